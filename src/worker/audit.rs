//! The daemon's own audit: is there a message at or below the ack floor that is neither processed nor a dead letter?
//!
//! This file decides when a [pass](Pass) runs and reports what it found. The audit never repairs by itself: the command
//! `audit --repair` does.

use std::time::{Duration, SystemTime};

use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use crate::model::delivery::Position;
use crate::model::ranges::{Range, Ranges};
use crate::model::text::chain;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::{Anchor, AuditMark};
use crate::telemetry::Telemetry;

pub mod pass;

use pass::{Missing, Pass, PassError, Passed, settled};

/// The pause before a pass over sequences that appear unaccounted for.
const GAP_PAUSE: Duration = Duration::from_secs(5);
/// The pause after a pass that ended too early.
const AGAIN: Duration = Duration::from_secs(60);

/// The state of the audit. A pass runs after each bind, after an edit of the consumer, and every `audit.every`.
pub struct Audit {
    every: Option<Duration>,
    /// The sequences that this process decided itself, in the stream of now.
    decided: Ranges,
    newest: Option<Anchor>,
    /// The last delivery, and the highest message that was delivered without a break before it.
    in_turn: Option<(u64, u64)>,
    running: Option<JoinHandle<Result<Passed, PassError>>>,
    /// The next pass; `None` if there is none.
    due: Option<Instant>,
    /// Where the audit stands. `None` until the first pass of this binding has ended.
    mark: Option<AuditMark>,
    is_stored: bool,
    /// Where the last pass ended, and when.
    audited: (u64, Instant),
    missing: Missing,
    undetermined: u64,
    /// Why the last pass ended too early. Each cause is logged once.
    trouble: Option<String>,
}

/// What came of the task of a pass.
pub type PassResult = Result<Result<Passed, PassError>, JoinError>;

impl Audit {
    pub fn new(every: Option<Duration>) -> Self {
        Self {
            every,
            decided: Ranges::default(),
            newest: None,
            in_turn: None,
            running: None,
            due: None,
            mark: None,
            is_stored: true,
            audited: (0, Instant::now()),
            missing: Missing::default(),
            undetermined: 0,
            trouble: None,
        }
    }

    /// A delivery came. Returns the first of the sequences for which its outcome will account: with a filter, the messages between
    /// two deliveries in turn are not for this consumer.
    pub fn delivered(&mut self, position: Position, filtered: bool) -> u64 {
        let Position { consumer_seq, stream_seq, .. } = position;
        let before = self.in_turn.filter(|(last, _)| last + 1 == consumer_seq);
        let highest = before.map_or(stream_seq, |(_, highest)| highest.max(stream_seq));
        self.in_turn = Some((consumer_seq, highest));
        match before {
            Some((_, highest)) if filtered && stream_seq > highest => highest + 1,
            Some(_) | None => stream_seq,
        }
    }

    /// A message of the stream of now has its final outcome. The outcome accounts for the sequences from `from` on.
    pub fn decided(&mut self, from: u64, position: Position) {
        let Position { stream_seq, published_ns, .. } = position;
        self.decided.add_range(Range { from, to: stream_seq });
        if self.newest.is_none_or(|newest| newest.stream_seq <= stream_seq) {
            self.newest = Some(Anchor { stream_seq, published_ns });
        }
    }

    /// These sequences need no check: their messages left the stream, and that is reported.
    pub fn accounted(&mut self, removed: &Ranges) {
        removed.iter().for_each(|range| self.decided.add_range(range));
    }

    /// The daemon bound again, or the consumer was edited: a pass is due.
    pub fn rebound(&mut self) {
        self.stop();
        self.mark = None;
        self.is_stored = true;
        self.in_turn = None;
        self.audited.0 = 0;
        self.due = Some(Instant::now());
    }

    /// The sequences that this process decided no longer prove anything: another stream, a lost tail, or a database that failed.
    pub fn distrust(&mut self) {
        self.decided.clear();
        if self.mark.is_some() || self.running.is_some() {
            self.rebound();
        }
    }

    /// Ends a pass that runs. It only reads.
    pub fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.abort();
        }
    }

    /// Begins a pass if one is due.
    pub fn begin(&mut self, pass: impl FnOnce(Ranges, Option<Anchor>, bool) -> Pass) {
        let is_due = self.due.is_some_and(|due| due <= Instant::now()) && self.running.is_none();
        if is_due {
            self.due = None;
            let pass = pass(self.decided.clone(), self.newest, self.every.is_some());
            self.running = Some(tokio::spawn(pass.run()));
        }
    }

    /// The pass that runs.
    pub fn running(&mut self) -> Option<&mut JoinHandle<Result<Passed, PassError>>> {
        self.running.as_mut()
    }

    /// No pass runs, and the one after the bind has ended.
    pub fn is_at_rest(&self) -> bool {
        self.running.is_none() && (self.mark.is_some() || self.trouble.is_some())
    }

    /// Draws the conclusions from a pass. Whether there is a mark to store.
    pub fn ended(&mut self, ended: PassResult, stream_ns: i64, telemetry: &Telemetry) -> bool {
        self.running = None;
        let passed = match ended {
            Ok(Ok(passed)) => passed,
            Ok(Err(error)) => return self.failed(chain(&error)),
            Err(error) => return self.failed(error.to_string()),
        };
        self.trouble = None;
        self.due = self.every.map(|every| Instant::now() + every);
        if passed.reused {
            self.decided.clear();
            self.newest = None;
        }
        if self.every.is_some() {
            telemetry.audited(passed.audited_through, passed.missing.count);
            report_removed(&passed.removed, stream_ns, telemetry);
            self.report(&passed);
        }
        self.audited = (passed.audited_through, Instant::now());
        self.mark = Some(passed.mark);
        self.is_stored = false;
        true
    }

    /// The daemon continues without an audit for a while.
    fn failed(&mut self, cause: String) -> bool {
        self.due = Some(Instant::now() + AGAIN);
        if self.trouble.as_ref() != Some(&cause) {
            tracing::warn!(%cause, "the audit cannot check whether messages are missing; it tries again");
            self.trouble = Some(cause);
        }
        false
    }

    fn report(&mut self, passed: &Passed) {
        let Passed { missing, undetermined, audited_through, .. } = passed;
        if missing.count > 0 {
            tracing::error!(
                missing = missing.count,
                sequences = %missing,
                audited_through,
                "messages are missing: the ack floor has passed them, and they are neither processed nor dead letters; \
                 apply them with `order-processor pause`, `order-processor audit --repair`, `order-processor resume`"
            );
        } else if self.missing.count > 0 {
            tracing::info!(audited_through, "no message is missing any longer");
        }
        if *undetermined > 0 && self.undetermined != *undetermined {
            tracing::warn!(
                messages = undetermined,
                audited_through,
                "the audit cannot determine whether some messages are missing; `order-processor audit` gives the reason"
            );
        }
        tracing::debug!(audited_through, missing = missing.count, undetermined, "the audit ended");
        self.missing = missing.clone();
        self.undetermined = *undetermined;
    }

    /// Moves the mark along without a pass, if this process decided everything up to the ack floor itself. Otherwise a pass is due
    /// soon.
    pub fn advance(&mut self, view: &ConsumerView, telemetry: &Telemetry) {
        let to = settled(view).min(view.stream_last_seq);
        let Some(mark) = &mut self.mark else { return };
        if self.running.is_some() || self.every.is_none() {
            return;
        }
        let (audited, at) = self.audited;
        let from = mark.through.max(audited) + 1;
        if from > to {
            return;
        }
        if !self.decided.gaps(Range { from, to }).is_empty() {
            let soon = at + GAP_PAUSE;
            self.due = Some(self.due.map_or(soon, |due| due.min(soon)));
            return;
        }
        self.audited.0 = to;
        telemetry.audited(to, self.missing.count);
        if self.missing.count > 0 {
            return;
        }
        mark.through = to;
        mark.anchor = self.newest.or(mark.anchor);
        mark.audited_at_ns = unix_ns(SystemTime::now());
        self.is_stored = false;
    }

    /// The mark that the database does not have yet.
    pub fn mark_to_store(&self) -> Option<AuditMark> {
        self.mark.clone().filter(|_| !self.is_stored)
    }

    /// The database has this mark.
    pub fn stored(&mut self, stored: Option<&AuditMark>) {
        if stored.is_some() && self.mark.as_ref() == stored {
            self.is_stored = true;
        }
    }
}

/// Counts and names messages that left the stream and were never processed, if nobody did so before.
fn report_removed(removed: &Ranges, stream_ns: i64, telemetry: &Telemetry) {
    let news = telemetry.news_of_removed(stream_ns.into(), removed);
    let messages = news.count();
    if messages > 0 {
        telemetry.metrics.messages_expired.increment(messages);
        tracing::error!(
            messages,
            sequences = %news,
            "messages left the stream before they were processed: its limits, a purge or a deletion removed them; raise the \
             limits, and have the messages published again"
        );
    }
}
