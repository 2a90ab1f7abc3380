//! The messages that were handed back for a retry and are to come again.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::jetstream::consumer::Limits;
use crate::model::outcome::Outcome;
use crate::model::ranges::Ranges;
use crate::model::view::ConsumerView;
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::retry::RetryPolicy;

/// A message that has not come back this long after it could have is with another worker.
const GRACE: Duration = Duration::from_secs(10);

/// By stream sequence, and when each is due.
#[derive(Default)]
pub struct Parked {
    due: HashMap<u64, Instant>,
    full: Reminder,
}

impl Parked {
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Remembers a message that is handed back for a retry, and lets it wait no longer than the flow of others allows.
    pub fn park(&mut self, stream_seq: u64, outcome: Outcome, limits: Option<&Limits>) -> Outcome {
        match outcome {
            Outcome::Retry { delay, error } => {
                let places = limits.and_then(|limits| limits.max_ack_pending).unwrap_or(usize::MAX);
                let delay = RetryPolicy::crowded(delay, self.due.len() + 1, places);
                self.due.insert(stream_seq, Instant::now() + delay);
                Outcome::Retry { delay, error }
            }
            decided @ (Outcome::Applied
            | Outcome::Duplicate
            | Outcome::Dropped
            | Outcome::Ignored(_)
            | Outcome::DeadLettered { .. }) => decided,
        }
    }

    /// One has come back.
    pub fn came(&mut self, stream_seq: u64) {
        // Nearly always none is parked, and then there is no need to hash.
        if !self.due.is_empty() {
            self.due.remove(&stream_seq);
        }
    }

    /// The stream has lost what came after this.
    pub fn cut_after(&mut self, last_seq: u64) {
        self.due.retain(|stream_seq, _| *stream_seq <= last_seq);
    }

    /// The stream is another one.
    pub fn clear(&mut self) {
        self.due.clear();
    }

    /// A fresh look: some may be gone from the stream, or with another worker by now, and together they may take all places.
    pub fn seen(&mut self, view: &ConsumerView, limits: Option<&Limits>, stream_ns: i64, telemetry: &Telemetry) {
        let mut removed = Ranges::default();
        self.due.keys().filter(|seq| **seq < view.stream_first_seq).for_each(|seq| removed.add(*seq));
        self.due.retain(|stream_seq, _| *stream_seq >= view.stream_first_seq);
        let removed = telemetry.news_of_removed(stream_ns.into(), &removed);
        if removed.count() > 0 {
            telemetry.metrics.messages_expired.increment(removed.count());
            tracing::error!(
                messages = removed.count(),
                sequences = %removed,
                "messages that waited for their retry were removed from the stream"
            );
        }
        let now = Instant::now();
        let overdue = limits.map_or(GRACE, |limits| limits.ack_wait + GRACE);
        self.due.retain(|_, due| now.saturating_duration_since(*due) < overdue);
        let (parked, out) = (self.due.len(), view.num_ack_pending);
        if view.is_full() && parked as u64 > out / 2 && self.full.is_due("full") {
            tracing::warn!(
                "max_ack_pending is used up: of {out} deliveries {parked} wait for their retry, new orders wait for them, and retries come \
                 sooner than they should; raise it with `order-processor setup --update --max-ack-pending`, or correct the \
                 cause of the failed orders"
            );
        }
        telemetry.health.set_parked(parked);
    }
}
