//! What the daemon shows of itself, in one place: a fact that belongs to both a metric and the health is set in both together.

pub mod calls;
pub mod health;
pub mod log;
pub mod metrics;
mod reminder;
mod stall;
pub mod status;
pub mod systemd;

pub use reminder::Reminder;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::model::delivery::Delivery;
use crate::model::outcome::Outcome;
use crate::model::ranges::{Range, Ranges};
use crate::model::time::unix_ns;
use crate::store::Sizes;
use crate::telemetry::health::{Commit, Health};
use crate::telemetry::metrics::{Metrics, SeenBy};
use crate::telemetry::status::Component;

/// Metrics and health of one daemon.
pub struct Telemetry {
    pub metrics: Arc<Metrics>,
    pub health: Arc<Health>,
    was_connected: AtomicBool,
    pulls_denied: AtomicBool,
    dropped_before: AtomicBool,
    missing_id_before: AtomicBool,
    /// The last word of the server, on this connection, about a subject that we cannot do without.
    denied: Mutex<Option<String>>,
    /// Optional permissions that we lack and that were spoken of.
    lacks: Mutex<BTreeSet<&'static str>>,
    connection: Mutex<Reminder>,
    /// The sequences whose messages left the stream unprocessed, as far as that is reported, and when the stream was created.
    gone: Mutex<(i128, Ranges)>,
}

impl Telemetry {
    pub fn new() -> Self {
        Self {
            metrics: Arc::new(Metrics::new()),
            health: Arc::new(Health::new()),
            was_connected: AtomicBool::new(false),
            pulls_denied: AtomicBool::new(false),
            dropped_before: AtomicBool::new(false),
            missing_id_before: AtomicBool::new(false),
            denied: Mutex::default(),
            lacks: Mutex::default(),
            connection: Mutex::default(),
            gone: Mutex::default(),
        }
    }

    /// A connection was made, the first one or another.
    pub fn established(&self) {
        if self.was_connected.swap(true, Ordering::Relaxed) {
            self.metrics.nats_reconnects.increment(1);
        }
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).forget();
        *self.denied.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.health.report(Component::Nats, Ok(()));
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

    /// The server does not let us ask for messages.
    pub fn pulls_denied(&self, cause: String) {
        self.pulls_denied.store(true, Ordering::Relaxed);
        self.health.report(Component::Pulls, Err(cause));
    }

    /// The server has answered a pull.
    pub fn pulls_work(&self) {
        if self.pulls_denied.swap(false, Ordering::Relaxed) {
            self.health.report(Component::Pulls, Ok(()));
        }
    }

    /// Messages `from` to `to` of a stream are gone. From where on that is news: each worker and each pause looks again.
    pub fn news_of_gone(&self, stream_created_ns: i128, from: u64, to: u64) -> Option<u64> {
        let mut removed = Ranges::default();
        removed.add_range(Range { from, to });
        self.news_of_removed(stream_created_ns, &removed).first()
    }

    /// The part of `removed` that was not reported before. It counts as reported from now on.
    pub fn news_of_removed(&self, stream_created_ns: i128, removed: &Ranges) -> Ranges {
        let mut gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        if gone.0 != stream_created_ns {
            *gone = (stream_created_ns, Ranges::default());
        }
        let mut news = Ranges::default();
        for range in removed.iter() {
            gone.1.gaps(range).into_iter().for_each(|range| news.add_range(range));
            gone.1.add_range(range);
        }
        news
    }

    /// The sequences of this stream that were reported as removed before they were processed.
    pub fn reported_removed(&self, stream_created_ns: i128) -> Ranges {
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        if gone.0 == stream_created_ns { gone.1.clone() } else { Ranges::default() }
    }

    /// The daemon's own audit has checked all messages up to this sequence, and so many of them are missing.
    pub fn audited(&self, through: u64, missing: u64) {
        self.health.set_audit(through, missing);
    }

    /// The sequences of the stream come a second time.
    pub fn rewound(&self) {
        self.metrics.stream_rewinds.increment(1);
        *self.gone.lock().unwrap_or_else(PoisonError::into_inner) = (0, Ranges::default());
    }

    pub fn sizes(&self, sizes: Sizes) {
        self.metrics.database_bytes.set(sizes.database as f64);
        self.metrics.wal_bytes.set(sizes.wal as f64);
    }

    /// A commit is durable.
    pub fn committed(&self, decided: &[(Delivery, Outcome)], took: Duration) {
        let now_ns = unix_ns(SystemTime::now());
        let mut commit = Commit { took, ..Commit::default() };
        for (delivery, outcome) in decided {
            commit.messages += 1;
            self.metrics.outcomes.increment(outcome.kind(), 1);
            match outcome {
                Outcome::Applied => commit.applied += 1,
                Outcome::Ignored(_) => {}
                Outcome::Duplicate => self.metrics.redeliveries.increment(SeenBy::Inbox, 1),
                Outcome::Dropped => self.dropped(delivery),
                // Only the failure is durable: the message is still to come.
                Outcome::Retry { .. } => continue,
                Outcome::DeadLettered { reason, .. } => {
                    commit.dead_lettered += 1;
                    self.metrics.dead_letters_total.increment(*reason, 1);
                }
            }
            if let Some(why) = delivery.missing_id.as_deref().filter(|_| outcome.is_new()) {
                self.missing_id(delivery, why);
            }
            commit.stream_seq = commit.stream_seq.max(delivery.raw.position.stream_seq);
            let age_ns = now_ns.saturating_sub(delivery.raw.position.published_ns).max(0);
            self.metrics.end_to_end_seconds.record(age_ns as f64 / 1e9);
        }
        if commit.messages == 0 {
            // It was cut off, and nothing was committed.
            return;
        }
        self.metrics.commit_duration_seconds.record(took.as_secs_f64());
        self.metrics.commit_batch_messages.record(commit.messages as f64);
        self.health.committed(commit);
    }
}

impl Telemetry {
    /// Another order under a used id was acknowledged without effect, as `inbox.on_conflict = "duplicate"` wants it.
    fn dropped(&self, delivery: &Delivery) {
        self.metrics.redeliveries.increment(SeenBy::Inbox, 1);
        self.metrics.conflicts_dropped.increment(1);
        if !self.dropped_before.swap(true, Ordering::Relaxed) {
            let (message_id, stream_seq) = (&delivery.id, delivery.raw.position.stream_seq);
            tracing::warn!(
                %message_id,
                stream_seq,
                "dropped an order with another subject or payload under a used id, because inbox.on_conflict is \"duplicate\"; \
                 later ones are only counted in conflicts_dropped_total"
            );
        }
    }
}

impl Telemetry {
    /// The place of a message is its id, as `inbox.on_missing_id = "place"` wants it.
    fn missing_id(&self, delivery: &Delivery, why: &str) {
        self.metrics.missing_ids.increment(1);
        if !self.missing_id_before.swap(true, Ordering::Relaxed) {
            let (subject, stream_seq) = (&delivery.raw.subject, delivery.raw.position.stream_seq);
            tracing::warn!(
                %subject,
                stream_seq,
                why,
                "the id of a message is missing; the place in the stream is its id, so a repetition by its publisher is another order; \
                 later ones are only counted in missing_ids_total"
            );
        }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self::new()
    }
}
