//! What the daemon shows of itself, in one place: where a fact belongs to both a metric and the health, both are set together.

pub mod health;
pub mod log;
pub mod metrics;
pub mod systemd;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::model::delivery::Delivery;
use crate::model::outcome::Outcome;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::{Counts, Pause, Sizes};
use crate::telemetry::health::Health;
use crate::telemetry::metrics::{Metrics, SeenBy};

/// The same trouble is said again after this long.
const REMIND_AFTER: Duration = Duration::from_secs(60);

/// Metrics and health of one daemon.
pub struct Telemetry {
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    was_connected: AtomicBool,
    pulls_denied: AtomicBool,
    /// The last word of the server, on this connection, about a subject that we cannot do without.
    denied: Mutex<Option<String>>,
    /// Optional permissions that we lack and that were spoken of.
    lacks: Mutex<BTreeSet<&'static str>>,
    connection: Mutex<Reminder>,
    /// Up to which sequence of which stream, by the time of its creation, it was said that messages are gone.
    gone: Mutex<(i128, u64)>,
    processed_ids: AtomicU64,
    dead_letters: AtomicU64,
}

impl Telemetry {
    pub fn new() -> Self {
        Self {
            metrics: Arc::new(Metrics::new()),
            health: Arc::new(Health::new()),
            was_connected: AtomicBool::new(false),
            pulls_denied: AtomicBool::new(false),
            denied: Mutex::default(),
            lacks: Mutex::default(),
            connection: Mutex::default(),
            gone: Mutex::default(),
            processed_ids: AtomicU64::new(0),
            dead_letters: AtomicU64::new(0),
        }
    }

    /// A connection was made, the first one or another.
    pub fn established(&self) {
        if self.was_connected.swap(true, Ordering::Relaxed) {
            self.metrics.nats_reconnects.increment(1);
        }
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).forget();
        *self.denied.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.connected(Ok(()));
    }

    /// The server has denied us a subject: the reason why it will not answer.
    pub fn deny(&self, text: &str) {
        *self.denied.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
    }

    pub fn denied(&self) -> Option<String> {
        self.denied.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it is the first time that an optional permission is found to be missing.
    pub fn lacks(&self, permission: &'static str) -> bool {
        self.lacks.lock().unwrap_or_else(PoisonError::into_inner).insert(permission)
    }

    /// Whether a trouble with the connection is worth a line: the client tells of every attempt.
    pub fn is_news(&self, trouble: &str) -> bool {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).is_due(trouble)
    }

    /// The connection is there, or why not.
    pub fn connected(&self, connected: Result<(), String>) {
        self.health.set_connected(connected);
    }

    /// The server does not let us ask for messages.
    pub fn pulls_denied(&self, cause: String) {
        self.pulls_denied.store(true, Ordering::Relaxed);
        self.health.set_pulls(Err(cause));
    }

    /// The server has answered a pull.
    pub fn pulls_work(&self) {
        if self.pulls_denied.swap(false, Ordering::Relaxed) {
            self.health.set_pulls(Ok(()));
        }
    }

    /// A fresh look at stream and consumer.
    pub fn consumer_seen(&self, view: &ConsumerView) {
        self.health.set_consumer(view.clone());
    }

    /// Messages `from` to `to` of a stream are gone. From where on that is news: each worker and each pause looks anew.
    pub fn news_of_gone(&self, stream_created_ns: i128, from: u64, to: u64) -> Option<u64> {
        let mut gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        if gone.0 != stream_created_ns {
            *gone = (stream_created_ns, 0);
        }
        let from = from.max(gone.1 + 1);
        gone.1 = gone.1.max(to);
        (from <= to).then_some(from)
    }

    /// The sequences of the stream come a second time.
    pub fn rewound(&self) {
        self.metrics.stream_rewinds.increment(1);
        *self.gone.lock().unwrap_or_else(PoisonError::into_inner) = (0, 0);
    }

    /// How many messages wait for their retry.
    pub fn parked(&self, parked: usize) {
        self.health.set_parked(parked);
    }

    /// How many deliveries are in hand.
    pub fn held(&self, held: usize) {
        self.health.set_held(held);
    }

    /// An operator's pause is on, or over.
    pub fn paused(&self, pause: Option<&Pause>) {
        self.health.set_paused(pause.cloned());
    }

    pub fn draining(&self) {
        self.health.set_draining();
    }

    /// What the database holds. Later changes are counted from there, until it is counted again.
    pub fn counted(&self, counts: Counts) {
        self.processed_ids.store(counts.processed_ids, Ordering::Relaxed);
        self.dead_letters.store(counts.dead_letters, Ordering::Relaxed);
        self.health.set_counts(counts.processed_ids, counts.dead_letters);
    }

    pub fn pruned(&self, ids: u64) {
        self.metrics.ids_pruned.increment(ids);
    }

    pub fn sizes(&self, sizes: Sizes) {
        self.metrics.database_bytes.set(sizes.database as f64);
        self.metrics.wal_bytes.set(sizes.wal as f64);
    }

    /// A commit is durable. Messages without an outcome were not part of it.
    pub fn committed<'a>(&self, decided: impl Iterator<Item = (&'a Delivery, &'a Option<Outcome>)>, took: Duration) {
        let now_ns = unix_ns(SystemTime::now());
        let (mut messages, mut last_seq, mut applied, mut dead) = (0_u64, 0, 0, 0);
        for (delivery, outcome) in decided {
            let Some(outcome) = outcome else { continue };
            messages += 1;
            self.metrics.outcomes.increment(outcome.kind(), 1);
            match outcome {
                Outcome::Applied => applied += 1,
                Outcome::Duplicate => self.metrics.redeliveries.increment(SeenBy::Inbox, 1),
                // Durable is only that it failed: the message is still to come.
                Outcome::Retry { .. } => continue,
                Outcome::DeadLettered { reason, .. } => {
                    dead += 1;
                    self.metrics.dead_letters_total.increment(*reason, 1);
                }
            }
            last_seq = last_seq.max(delivery.raw.position.stream_seq);
            let age_ns = now_ns.saturating_sub(delivery.raw.position.published_ns).max(0);
            self.metrics.end_to_end_seconds.record(age_ns as f64 / 1e9);
        }
        if messages == 0 {
            // It was cut off, and nothing was committed.
            return;
        }
        self.metrics.commit_duration_seconds.record(took.as_secs_f64());
        self.metrics.commit_batch_messages.record(messages as f64);
        self.count(applied, dead);
        self.health.committed(last_seq, messages, took);
    }

    fn count(&self, applied: u64, dead: u64) {
        let processed = self.processed_ids.fetch_add(applied, Ordering::Relaxed) + applied;
        let dead_letters = self.dead_letters.fetch_add(dead, Ordering::Relaxed) + dead;
        self.health.set_counts(processed, dead_letters);
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self::new()
    }
}

/// Decides whether a trouble is worth a line: when it is new, and then now and then.
#[derive(Debug, Default)]
pub struct Reminder {
    said: Option<(String, Instant)>,
}

impl Reminder {
    pub fn is_due(&mut self, cause: &str) -> bool {
        let due = self.said.as_ref().is_none_or(|(said, at)| said != cause || at.elapsed() >= REMIND_AFTER);
        if due {
            self.said = Some((cause.to_owned(), Instant::now()));
        }
        due
    }

    /// The trouble is over.
    pub fn forget(&mut self) {
        self.said = None;
    }
}
