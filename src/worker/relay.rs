//! The relay: publishes the rows of the outbox after the commits that wrote them, in row order, and deletes them after the receipts.
//!
//! It works in rounds, one at a time. A job of the writer deletes the rows that are published and reads the oldest others. Then a
//! task publishes these. A row that cannot be published ends the round, because no later row may be stored before it. Only if the
//! stream refuses a row for what it is, such as for its size, then those that were on the way behind it are stored before it.
//!
//! A row may be published and still be there, after a crash or without a receipt. So before the first round, and after each round
//! without a receipt, the relay looks for the ids of all rows in their streams. It begins at the sequence that the database has on
//! record for the stream. The duplicate window of a stream is too short for that: two minutes by default.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use tokio::task::{JoinError, JoinHandle};
use tokio::time::Instant;

use self::round::{Round, Rounded};
use self::seek::{Seek, Sought};
use crate::config::Nats;
use crate::jetstream::outbox::Publisher;
use crate::model::outbox::OutboxTarget;
use crate::model::time::{age, doubled};
use crate::store::{Counts, OutboxStep, OutboxTaken, Store};
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

mod round;
mod seek;

/// Rows of one round, and their bytes.
const ROUND_MESSAGES: u32 = 2_000;
const ROUND_BYTES: usize = 8 * 1024 * 1024;
/// With so many rows in the outbox, pulling stops.
pub const ROWS_MAX: u64 = 100_000;
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The state of the relay, between the events of the loop.
pub struct Relay {
    stage: Stage,
    /// Rows in the outbox, as far as it is known.
    rows: u64,
    /// The last row that was committed.
    last_row: i64,
    /// Rows may have been published although they are there.
    in_doubt: bool,
    /// Rows up to this one were there at the last look in the streams. A later row is published for the first time.
    seen_through: i64,
    /// What the next step records.
    done: Vec<i64>,
    changed: Vec<OutboxTarget>,
    targets: HashMap<String, OutboxTarget>,
    streams: HashMap<String, String>,
    /// The last job of the writer was a step of the relay.
    had_turn: bool,
    failures: u32,
    retry_at: Option<Instant>,
    reminder: Reminder,
    reported_own: bool,
}

enum Stage {
    /// Nothing to publish.
    Idle,
    /// A step is due.
    Due,
    /// A step is with the writer.
    Taking,
    Running(JoinHandle<StageEnd>),
}

/// What came of the relay's task.
pub enum StageEnd {
    Sought(Result<Sought, String>),
    Rounded(Rounded),
}

/// What the relay's tasks need of the daemon.
#[derive(Clone)]
pub struct RelayContext {
    pub publisher: Publisher,
    pub nats: Nats,
    /// The stream and the subjects of our own consumer.
    pub own_stream: String,
    pub own_filters: Vec<String>,
}

impl Relay {
    /// Rows that are there at the start may have been published.
    pub fn of(store: &Store) -> Self {
        let rows = store.outbox_rows_at_open();
        Self {
            stage: if rows > 0 { Stage::Due } else { Stage::Idle },
            rows,
            last_row: store.last_outbox_row(),
            in_doubt: rows > 0,
            seen_through: 0,
            done: Vec::new(),
            changed: Vec::new(),
            targets: HashMap::new(),
            streams: HashMap::new(),
            had_turn: false,
            failures: 0,
            retry_at: None,
            reminder: Reminder::default(),
            reported_own: false,
        }
    }

    /// The rows of the outbox up to `last_row` are durable.
    pub fn committed(&mut self, last_row: i64, telemetry: &Telemetry) {
        if last_row > self.last_row {
            self.set_rows(self.rows + (last_row - self.last_row).unsigned_abs(), telemetry);
            self.last_row = last_row;
            self.wake();
        }
    }

    /// The outbox has so many rows: operators and other programs write to the database too.
    pub fn counted(&mut self, counts: Counts, telemetry: &Telemetry) {
        self.set_rows(counts.outbox_rows.saturating_sub(self.done.len() as u64), telemetry);
        if counts.outbox_rows > 0 {
            self.wake();
        }
        let oldest = counts.outbox_oldest_ns.map_or(Duration::ZERO, |ns| age(ns, SystemTime::now()));
        telemetry.metrics.outbox_oldest_seconds.set(oldest.as_secs_f64());
    }

    fn wake(&mut self) {
        if let Stage::Idle = self.stage {
            self.stage = Stage::Due;
        }
    }

    fn set_rows(&mut self, rows: u64, telemetry: &Telemetry) {
        self.rows = rows;
        telemetry.metrics.outbox_rows.set(rows as f64);
    }

    /// So many rows wait that nobody may write another one.
    pub fn is_full(&self) -> bool {
        self.rows >= ROWS_MAX
    }

    /// Nothing is left to do, or what is left has to wait.
    pub fn is_at_rest(&self) -> bool {
        match self.stage {
            Stage::Idle => true,
            Stage::Due => self.retry_at.is_some() && self.done.is_empty(),
            Stage::Taking | Stage::Running(_) => false,
        }
    }

    /// The next step for the writer, if one is due. While batches wait, every other job is one of them.
    pub fn step(&mut self, is_connected: bool, batches_wait: bool) -> Option<OutboxStep> {
        if !matches!(self.stage, Stage::Due) || (std::mem::take(&mut self.had_turn) && batches_wait) {
            return None;
        }
        let may_publish = is_connected && self.retry_at.is_none_or(|at| at <= Instant::now());
        if !may_publish && self.done.is_empty() {
            return None;
        }
        self.had_turn = true;
        self.stage = Stage::Taking;
        Some(OutboxStep {
            done: self.done.clone(),
            targets: self.changed.clone(),
            max_messages: match (may_publish, self.failures) {
                (true, 0) => ROUND_MESSAGES,
                // The server would store later rows of the round although it refuses the first one again.
                (true, _) => 1,
                (false, _) => 0,
            },
            max_bytes: ROUND_BYTES,
            wants_all: may_publish && self.in_doubt,
        })
    }

    /// A step has failed with the database. Nothing of it is known to be durable.
    pub fn not_taken(&mut self) {
        self.stage = Stage::Due;
    }

    /// A step is durable: looks for the rows if they are in doubt, otherwise publishes.
    pub fn taken(
        &mut self,
        step: &OutboxStep,
        taken: OutboxTaken,
        around: Option<RelayContext>,
        telemetry: &Telemetry,
    ) {
        self.done.clear();
        self.changed.clear();
        self.targets = taken.targets.into_iter().map(|target| (target.stream.clone(), target)).collect();
        self.stage = Stage::Due;
        if step.max_messages == 0 {
            return;
        }
        if taken.messages.is_empty() {
            self.stage = Stage::Idle;
            self.set_rows(0, telemetry);
            self.in_doubt = false;
            self.works(telemetry);
            return;
        }
        if self.in_doubt {
            self.set_rows(taken.rows.len() as u64, telemetry);
        }
        let Some(around) = around else { return };
        let targets = self.targets.clone();
        self.stage = Stage::Running(if self.in_doubt {
            tokio::spawn(async move { StageEnd::Sought(Seek { around, rows: taken.rows, targets }.run().await) })
        } else {
            let streams = std::mem::take(&mut self.streams);
            let round = Round { around, messages: taken.messages, targets, streams, seen_through: self.seen_through };
            tokio::spawn(async move { StageEnd::Rounded(round.run().await) })
        });
    }

    /// The task that runs.
    pub fn running(&mut self) -> Option<&mut JoinHandle<StageEnd>> {
        match &mut self.stage {
            Stage::Running(task) => Some(task),
            Stage::Idle | Stage::Due | Stage::Taking => None,
        }
    }

    /// Draws the conclusions from a task that has ended.
    pub fn ended(&mut self, ended: Result<StageEnd, JoinError>, telemetry: &Telemetry) {
        self.stage = Stage::Due;
        match ended {
            Ok(StageEnd::Sought(Ok(sought))) => {
                self.in_doubt = false;
                self.seen_through = sought.through;
                self.done = sought.done;
            }
            Ok(StageEnd::Sought(Err(cause))) => self.fails(&cause, telemetry),
            Ok(StageEnd::Rounded(rounded)) => self.rounded(rounded, telemetry),
            Err(error) => {
                self.in_doubt = true;
                self.fails(&format!("a round ended in a panic: {error}"), telemetry);
            }
        }
        self.set_rows(self.rows.saturating_sub(self.done.len() as u64), telemetry);
    }

    fn rounded(&mut self, rounded: Rounded, telemetry: &Telemetry) {
        let metrics = &telemetry.metrics;
        metrics.outbox_published.increment(rounded.done.len() as u64);
        metrics.outbox_duplicates.increment(rounded.duplicates.len() as u64);
        metrics.outbox_to_own_consumer.increment(rounded.own.0);
        if let Some(id) = rounded.duplicates.first() {
            tracing::warn!(
                message_id = %id,
                count = rounded.duplicates.len(),
                "the stream has a message with this id already, so the new one was not stored; \
                 a statement that writes the outbox must build the id of each message from the id of its order"
            );
        }
        if let Some(subject) = rounded.own.1.filter(|_| !std::mem::replace(&mut self.reported_own, true)) {
            tracing::warn!(
                %subject,
                "published a message of the outbox to the own consumer of this daemon: it comes back as an order; later ones are only \
                 counted in outbox_to_own_consumer_total"
            );
        }
        self.done = rounded.done;
        self.changed = rounded.targets;
        self.streams = rounded.streams;
        self.in_doubt |= rounded.in_doubt;
        match rounded.trouble {
            Some(cause) => self.fails(&cause, telemetry),
            None => self.works(telemetry),
        }
    }

    fn works(&mut self, telemetry: &Telemetry) {
        self.failures = 0;
        if self.retry_at.take().is_some() {
            tracing::info!("the outbox is published again");
            self.reminder.forget();
        }
        telemetry.health.report(Component::Outbox, Ok(()));
    }

    fn fails(&mut self, cause: &str, telemetry: &Telemetry) {
        self.retry_at = Some(Instant::now() + doubled(RETRY_MIN, self.failures, RETRY_MAX));
        self.failures = self.failures.saturating_add(1);
        // The server may have other streams now.
        self.streams.clear();
        let rows = self.rows;
        if self.reminder.is_due(cause) {
            tracing::error!(%cause, rows, "the outbox cannot be published; its rows wait");
        }
        telemetry.health.report(Component::Outbox, Err(format!("{cause}; {rows} rows wait")));
    }

    /// Ends the task. What it has published and nobody knows of is found at the next start.
    pub fn stop(&mut self) {
        if let Stage::Running(task) = &self.stage {
            task.abort();
            self.stage = Stage::Idle;
        }
    }
}
