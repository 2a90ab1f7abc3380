//! The messages that were handed back for a retry, until the server delivers them again.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::jetstream::consumer::Limits;
use crate::model::outcome::Outcome;
use crate::model::ranges::Ranges;
use crate::model::view::ConsumerView;
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::retry::RetryPolicy;

/// A message that did not come back for this long after its retry was due is with another client.
const GRACE: Duration = Duration::from_secs(10);
/// Looks at the consumer come more often than that, unless the process was frozen or the server was away.
const LOOK_GAP: Duration = Duration::from_secs(5);

/// When the retry of each message is due, by stream sequence.
#[derive(Default)]
pub struct Parked {
    due: HashMap<u64, Instant>,
    looked_at: Option<Instant>,
    full: Reminder,
}

impl Parked {
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Records a message that is handed back for a retry, and shortens its delay if parked messages fill the consumer.
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

    /// The server delivered a message. Whether it was parked.
    pub fn came(&mut self, stream_seq: u64) -> bool {
        // Nearly always, no message is parked. Then the sequence needs no hash.
        !self.due.is_empty() && self.due.remove(&stream_seq).is_some()
    }

    pub fn contains(&self, stream_seq: u64) -> bool {
        self.due.contains_key(&stream_seq)
    }

    /// The sequences of all, and when they are due.
    pub fn due(&self) -> impl Iterator<Item = (u64, Instant)> {
        self.due.iter().map(|(stream_seq, due)| (*stream_seq, *due))
    }

    /// Records a message that is handed back until then, for another reason than a failure.
    pub fn put(&mut self, stream_seq: u64, due: Instant) {
        self.due.insert(stream_seq, due);
    }

    /// Until now, the server could not deliver what was due: nothing was requested.
    pub fn could_not_come(&mut self) {
        let now = Instant::now();
        self.due.values_mut().for_each(|due| *due = now.max(*due));
    }

    /// The stream lost the messages after this sequence.
    pub fn cut_after(&mut self, last_seq: u64) {
        self.due.retain(|stream_seq, _| *stream_seq <= last_seq);
    }

    /// The stream was recreated.
    pub fn clear(&mut self) {
        self.due.clear();
    }

    /// Takes a new look at the consumer: the stream may have removed messages, another client may have them, and they may fill
    /// `max_ack_pending`.
    pub fn observe(&mut self, view: &ConsumerView, limits: Option<&Limits>, stream_ns: i64, telemetry: &Telemetry) {
        let now = Instant::now();
        if self.looked_at.replace(now).is_some_and(|before| now - before > LOOK_GAP) {
            self.could_not_come();
        }
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
        let overdue = limits.map_or(GRACE, |limits| limits.ack_wait + GRACE);
        self.due.retain(|_, due| now.saturating_duration_since(*due) < overdue);
        let (parked, out) = (self.due.len(), view.num_ack_pending);
        if view.is_full() && parked as u64 > out / 2 && self.full.is_due("full") {
            tracing::warn!(
                "max_ack_pending is used up: {parked} of {out} deliveries wait for their retry; new orders wait, and retries come \
                 sooner; correct the cause of the failures, or raise the limit with `order-processor setup --update \
                 --max-ack-pending`"
            );
        }
        telemetry.health.set_parked(parked);
    }
}
