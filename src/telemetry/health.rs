//! What the daemon knows of itself: the one source for `/readyz`, `/livez`, `/status`, the gauges and systemd.
//!
//! Others report facts here and never verdicts; what counts as ready or live is decided in this file alone. No I/O.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::model::label::Label;
use crate::model::text::printable;
use crate::model::view::ConsumerView;
use crate::store::{Counts, Pause};
use crate::telemetry::log;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::stall::StallClock;
use crate::telemetry::status::{Component, Problem, Status, listed};

#[cfg(test)]
mod tests;

/// Work without a commit for this long is not progress. Twice the story's `ack_wait` of 30 s: by then everything that
/// was held when the trouble began has been delivered again at least once, and still nothing came of it.
pub const STALL: Duration = Duration::from_secs(60);

/// The loop ticks every second. A loop that has not ticked for this long is stuck, not busy.
pub const LIVE: Duration = Duration::from_secs(10);

/// The facts, shared by everybody who reports or reads them.
pub struct Health {
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    started: Instant,
    /// Milliseconds from `started` to the last tick, plus one; 0 before the first. Apart from the rest, so that a tick
    /// waits for nobody.
    last_tick_ms: AtomicU64,
    facts: Mutex<Facts>,
}

/// A durable commit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Commit {
    /// Outcomes in it, of which this is the highest stream sequence.
    pub messages: u64,
    pub stream_seq: u64,
    /// Rows that it added to `processed_ids` and to `dead_letters`.
    pub applied: u64,
    pub dead_lettered: u64,
    pub took: Duration,
}

impl Health {
    /// A daemon that starts: not ready until somebody reports a connection, a consumer and a database.
    pub fn new() -> Self {
        Self::with_clock(Instant::now)
    }

    /// The same with another clock, for tests that must not wait.
    pub fn with_clock(clock: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        let started = clock();
        let facts = Mutex::new(Facts::new(started));
        Self { clock: Box::new(clock), started, last_tick_ms: AtomicU64::new(0), facts }
    }

    /// The worker's loop is alive; to be called at least every second.
    pub fn tick(&self) {
        self.last_tick_ms.store(self.uptime_ms() + 1, Ordering::Relaxed);
    }

    /// A component works, or why not. [`Component::Pulls`], [`Component::Acks`] and [`Component::Handler`] are taken to work until reported otherwise.
    pub fn report(&self, component: Component, fact: Result<(), String>) {
        // A cause goes into answers that have a line for each.
        let cause = fact.err().map(|cause| printable(&cause).into_owned());
        self.update(|facts| facts.reported[component.index()] = cause);
    }

    /// The first signal to stop came. There is no way back.
    pub fn set_draining(&self) {
        self.update(|facts| facts.draining = true);
    }

    /// The daemon has closed the database because an operator asked for it; `None` when the pause is over.
    pub fn set_paused(&self, pause: Option<Pause>) {
        if pause.is_none() {
            // What comes now is a start, and may take as long as one.
            self.last_tick_ms.store(0, Ordering::Relaxed);
        }
        self.update(|facts| facts.pause = pause);
    }

    /// The server's latest report on consumer and stream.
    pub fn set_consumer(&self, view: ConsumerView) {
        self.update(|facts| {
            let floor = |view: &ConsumerView| view.ack_floor_consumer_seq;
            if facts.consumer.as_ref().map(floor) != Some(floor(&view)) {
                // Another client acknowledges, if not this worker.
                facts.elsewhere.progressed();
            }
            facts.consumer = Some(view);
        });
    }

    /// How many pulls on the consumer belong to other clients.
    pub fn set_other_pulls(&self, others: u64) {
        self.update(|facts| facts.other_pulls = others);
    }

    /// How long a delivery may be away, with another worker or lost, before the server redelivers it.
    pub fn set_redelivery(&self, longest: Duration) {
        self.update(|facts| facts.elsewhere_patience = STALL + longest);
    }

    /// How many deliveries are received and not acknowledged yet.
    pub fn set_held(&self, held: usize) {
        self.update(|facts| facts.held = held);
    }

    /// The sequence up to which the last audit checked, and how many messages are missing.
    pub fn set_audit(&self, through: u64, missing: u64) {
        self.update(|facts| facts.audit = Some((through, missing)));
    }

    /// How many messages wait for their retry.
    pub fn set_parked(&self, parked: usize) {
        self.update(|facts| facts.parked = parked);
    }

    /// A commit is durable.
    pub fn committed(&self, commit: Commit) {
        self.update(|facts| facts.commit(commit));
    }

    /// The handler file that the daemon has read, and the start of its hash.
    pub fn set_handler_file(&self, file: &str, digest: &str) {
        self.update(|facts| facts.handler_file = Some((file.to_owned(), digest.to_owned())));
    }

    /// The rows of the database, counted. Later commits are added, until it is counted again.
    pub fn set_counts(&self, counts: Counts) {
        self.update(|facts| facts.counts = Some(counts));
    }

    /// Everything that keeps the daemon from being ready; nothing means ready.
    pub fn problems(&self) -> Vec<Problem> {
        self.facts().problems((self.clock)())
    }

    /// Whether the loop has ticked within [`LIVE`].
    ///
    /// Before the first tick the answer is yes: a migration that takes minutes is not a stuck loop, and a restart in the
    /// middle of it would only make it begin again.
    pub fn is_live(&self) -> Result<(), String> {
        let Some(last_tick_ms) = self.last_tick_ms.load(Ordering::Relaxed).checked_sub(1) else { return Ok(()) };
        let silent = Duration::from_millis(self.uptime_ms().saturating_sub(last_tick_ms));
        if silent <= LIVE { Ok(()) } else { Err(format!("loop: the main loop has not run for {} s", silent.as_secs())) }
    }

    /// Everything at once, for `/status`.
    pub fn status(&self) -> Status {
        let live = self.is_live().is_ok();
        let uptime_seconds = self.uptime_ms() / 1000;
        let facts = self.facts();
        let problems = facts.problems((self.clock)());
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds,
            ready: problems.is_empty(),
            live,
            draining: facts.draining,
            pause: facts.pause.clone(),
            problems,
            held: facts.held,
            parked: facts.parked,
            missing_messages: facts.audit.map(|(_, missing)| missing),
            audited_through_stream_seq: facts.audit.map(|(through, _)| through),
            committed_stream_seq: facts.last_commit.stream_seq,
            committed_messages: facts.committed_messages,
            last_commit_at: facts.last_commit_at,
            last_batch_messages: facts.last_commit.messages,
            last_batch_seconds: facts.last_commit.took,
            handler_file: facts.handler_file.as_ref().map(|(file, _)| file.clone()),
            handler_digest: facts.handler_file.as_ref().map(|(_, digest)| digest.clone()),
            processed_ids: facts.counts.map(|counts| counts.processed_ids),
            dead_letters: facts.counts.map(|counts| counts.dead_letters),
            other_pulls: facts.other_pulls,
            consumer: facts.consumer.clone(),
        }
    }

    /// Whether the first signal to stop came.
    pub fn is_draining(&self) -> bool {
        self.facts().draining
    }

    /// Whether an operator has paused the daemon.
    pub fn is_paused(&self) -> bool {
        self.facts().pause.is_some()
    }

    /// One line for systemd's `STATUS=`.
    pub fn status_line(&self) -> String {
        let facts = self.facts();
        if facts.draining {
            return format!("draining, {} deliveries held", facts.held);
        }
        let problems = facts.problems((self.clock)());
        if !problems.is_empty() {
            return format!("not ready: {}", listed(&problems));
        }
        match &facts.consumer {
            Some(view) => format!("ack floor {}, pending {}, ready", view.ack_floor_stream_seq, view.num_pending),
            None => "ready".to_owned(),
        }
    }

    /// Puts the facts into the gauges, so that a scrape and `/readyz` can never disagree.
    pub fn record(&self, metrics: &Metrics) {
        let facts = self.facts();
        let problems = facts.problems((self.clock)());
        metrics.ready.set(flag(problems.is_empty()));
        for component in Component::ALL {
            let has_one = problems.iter().any(|problem| problem.component == component.name());
            metrics.problem.set(*component, flag(has_one));
        }
        metrics.draining.set(flag(facts.draining));
        metrics.paused.set(flag(facts.pause.is_some()));
        metrics.log_lines_dropped.absolute(log::dropped_lines());
        metrics.nats_connected.set(flag(facts.works(Component::Nats)));
        metrics.held_deliveries.set(facts.held as f64);
        metrics.parked_messages.set(facts.parked as f64);
        metrics.other_pulls.set(facts.other_pulls as f64);
        if let Some((through, missing)) = facts.audit {
            metrics.missing_messages.set(missing as f64);
            metrics.audited_through_stream_seq.set(through as f64);
        }
        metrics.committed_stream_seq.set(facts.last_commit.stream_seq as f64);
        if let Some(at) = facts.last_commit_at {
            metrics.last_commit_timestamp_seconds.set(unix_seconds(at));
        }
        if let Some(counts) = facts.counts {
            metrics.processed_ids.set(counts.processed_ids as f64);
            metrics.dead_letters.set(counts.dead_letters as f64);
        }
        if let Some(view) = &facts.consumer {
            record_view(view, metrics);
        }
    }

    fn update(&self, change: impl FnOnce(&mut Facts)) {
        let now = (self.clock)();
        let mut facts = self.facts();
        change(&mut facts);
        let (has_work, hindered) = (facts.has_work(), facts.is_hindered());
        facts.stall.observe(has_work, hindered, now);
        let is_elsewhere = facts.is_elsewhere();
        facts.elsewhere.observe(is_elsewhere, hindered, now);
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        // Every change is a plain assignment, so a panic elsewhere cannot have left half of one.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uptime_ms(&self) -> u64 {
        let uptime = (self.clock)().saturating_duration_since(self.started);
        u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

/// While one of these does not work, no commit is expected.
const HINDRANCES: [Component; 6] =
    [Component::Nats, Component::Consumer, Component::Pulls, Component::Acks, Component::Database, Component::Handler];

struct Facts {
    /// Why a component does not work, by [`Label::index`]; `None` if it does.
    reported: [Option<String>; Component::ALL.len()],
    draining: bool,
    pause: Option<Pause>,
    consumer: Option<ConsumerView>,
    held: usize,
    parked: usize,
    other_pulls: u64,
    /// The sequence up to which the last audit checked, and the messages that are missing.
    audit: Option<(u64, u64)>,
    /// With the highest sequence of all commits.
    last_commit: Commit,
    committed_messages: u64,
    last_commit_at: Option<SystemTime>,
    counts: Option<Counts>,
    handler_file: Option<(String, String)>,
    stall: StallClock,
    elsewhere: StallClock,
    elsewhere_patience: Duration,
}

impl Facts {
    fn new(now: Instant) -> Self {
        let mut reported = [const { None }; Component::ALL.len()];
        for (component, cause) in [
            (Component::Nats, "the daemon is starting and not connected yet"),
            (Component::Consumer, "the daemon is starting and not bound yet"),
            (Component::Database, "the daemon is starting and has not opened the database yet"),
        ] {
            reported[component.index()] = Some(cause.to_owned());
        }
        Self {
            reported,
            draining: false,
            pause: None,
            consumer: None,
            held: 0,
            parked: 0,
            other_pulls: 0,
            audit: None,
            last_commit: Commit::default(),
            committed_messages: 0,
            last_commit_at: None,
            counts: None,
            handler_file: None,
            stall: StallClock::starting(now),
            elsewhere: StallClock::starting(now),
            elsewhere_patience: STALL,
        }
    }

    fn works(&self, component: Component) -> bool {
        self.reported[component.index()].is_none()
    }

    fn problems(&self, now: Instant) -> Vec<Problem> {
        let cause = |component: Component| match component {
            Component::Shutdown => self.draining.then(|| "draining".to_owned()),
            Component::Paused => self.pause.as_ref().map(|pause| printable(&pause.to_string()).into_owned()),
            Component::Progress => self.no_progress(now).or_else(|| self.reported[component.index()].clone()),
            // A paused daemon does not know the state of the database and of what is in it.
            Component::Database | Component::Outbox if self.pause.is_some() => None,
            Component::Nats
            | Component::Consumer
            | Component::Pulls
            | Component::Acks
            | Component::Database
            | Component::Handler
            | Component::Outbox => self.reported[component.index()].clone(),
        };
        let problem = |component: &Component| cause(*component).map(|cause| Problem::new(*component, cause));
        Component::ALL.iter().filter_map(problem).collect()
    }

    fn no_progress(&self, now: Instant) -> Option<String> {
        let stalled = self.stall.stalled_for(now);
        if stalled > STALL {
            let num_pending = self.consumer.as_ref().map_or(0, |view| view.num_pending);
            let (held, seconds) = (self.held, stalled.as_secs());
            let mut cause =
                format!("no commit for {seconds} s, {num_pending} messages pending, {held} deliveries held");
            cause += &match self.consumer.as_ref().filter(|view| view.is_full()) {
                Some(view) => format!(
                    "; max_ack_pending is used up by {} deliveries, {} of them wait for their retry",
                    view.num_ack_pending, self.parked
                ),
                None => "; check the handler".to_owned(),
            };
            return Some(cause);
        }
        let elsewhere = self.elsewhere.stalled_for(now);
        (elsewhere > self.elsewhere_patience).then(|| {
            let out = self.consumer.as_ref().map_or(0, |view| view.num_ack_pending);
            format!(
                "{out} deliveries are unacknowledged but not held by this daemon, and none was redelivered or acknowledged for {} s; look for another client on this consumer",
                elsewhere.as_secs()
            )
        })
    }

    fn commit(&mut self, commit: Commit) {
        self.last_commit = Commit { stream_seq: self.last_commit.stream_seq.max(commit.stream_seq), ..commit };
        self.committed_messages += commit.messages;
        self.last_commit_at = Some(SystemTime::now());
        if let Some(counts) = &mut self.counts {
            counts.processed_ids += commit.applied;
            counts.dead_letters += commit.dead_lettered;
        }
        self.stall.progressed();
        self.elsewhere.progressed();
    }

    /// Deliveries that the server waits for and that are not held here are no work of ours: the server redelivers them after
    /// `ack_wait` or a nak's delay. See [`Facts::is_elsewhere`] for when it does not.
    fn has_work(&self) -> bool {
        self.held > 0 || self.consumer.as_ref().is_some_and(|view| view.num_pending > 0)
    }

    /// All that is left to do is with another client, or lost on the way.
    fn is_elsewhere(&self) -> bool {
        let elsewhere = |view: &ConsumerView| view.num_pending == 0 && view.num_ack_pending > self.parked as u64;
        self.held == 0 && self.consumer.as_ref().is_some_and(elsewhere)
    }

    fn is_hindered(&self) -> bool {
        let paused = self.pause.is_some() || self.consumer.as_ref().is_some_and(|view| view.paused);
        paused || HINDRANCES.iter().any(|component| !self.works(*component))
    }
}

/// The server's report as gauges.
fn record_view(view: &ConsumerView, metrics: &Metrics) {
    metrics.consumer_ack_floor_stream_seq.set(view.ack_floor_stream_seq as f64);
    metrics.consumer_ack_floor_consumer_seq.set(view.ack_floor_consumer_seq as f64);
    metrics.consumer_delivered_stream_seq.set(view.delivered_stream_seq as f64);
    metrics.consumer_num_pending.set(view.num_pending as f64);
    metrics.consumer_num_ack_pending.set(view.num_ack_pending as f64);
    metrics.consumer_num_redelivered.set(view.num_redelivered as f64);
    metrics.consumer_num_waiting.set(view.num_waiting as f64);
    metrics.consumer_max_ack_pending.set(view.max_ack_pending.unwrap_or(0) as f64);
    metrics.consumer_paused.set(flag(view.paused));
    metrics.stream_first_seq.set(view.stream_first_seq as f64);
    metrics.stream_last_seq.set(view.stream_last_seq as f64);
    let age = view.oldest_published_at.and_then(|at| at.elapsed().ok()).unwrap_or_default();
    metrics.oldest_pending_seconds.set(age.as_secs_f64());
    metrics.consumer_info_timestamp_seconds.set(unix_seconds(view.taken_at));
}

fn flag(fact: bool) -> f64 {
    if fact { 1.0 } else { 0.0 }
}

fn unix_seconds(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
