//! The order of the messages of one key, as far as the server and the restarts of the daemon matter to it.

use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;

use super::Worker;
use crate::jetstream::consumer::Receipt;
use crate::model::outcome::Acknowledgement;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::Retry;

/// Added to `ack_wait` until the server must have noticed that a delivery has run out.
const EXPIRY_GRACE: Duration = Duration::from_secs(1);
/// How long a message that waits for its key is handed back: until the message is due that it waits for, within these limits. The
/// server delivers such messages before new ones, so a short time would keep new ones out. A later time would make newer messages
/// of the key wait for this one.
const HAND_BACK_MIN: Duration = Duration::from_secs(1);
const HAND_BACK_MAX: Duration = Duration::from_secs(10);

impl Worker {
    /// After a bind: messages that were delivered and are neither decided nor here come again, and newer ones of their keys wait.
    pub(super) fn order_after_bind(&mut self, view: &ConsumerView) {
        for Retry { stream_seq, key, due_ns, failed_at_ns } in std::mem::take(&mut self.retries) {
            let is_out = stream_seq > view.ack_floor_stream_seq && stream_seq <= view.delivered_stream_seq;
            let is_of_this_stream = failed_at_ns >= self.stream_ns;
            if is_out && is_of_this_stream && !self.held.contains(stream_seq) {
                let left = due_ns.saturating_sub(unix_ns(SystemTime::now())).max(0).unsigned_abs();
                self.parked.put(stream_seq, Instant::now() + Duration::from_nanos(left));
                self.keys.expect(stream_seq, &key);
            }
        }
        let here = (self.held.len() + self.parked.len()) as u64;
        let missing = view.num_ack_pending.saturating_sub(here);
        let ack_wait = self.limits.as_ref().map_or(Duration::ZERO, |limits| limits.ack_wait);
        let now = Instant::now();
        let (expired_at, back_at) = (now + ack_wait + EXPIRY_GRACE, now + HAND_BACK_MAX + EXPIRY_GRACE);
        self.keys.bound(view.delivered_stream_seq, missing, expired_at, back_at);
    }

    /// Forgets messages that this process will not decide: they were removed, or another client has them.
    pub(super) fn observe_order(&mut self, view: &ConsumerView) {
        let keys = &mut self.keys;
        keys.look(view.ack_floor_stream_seq, Instant::now());
        keys.retain(|stream_seq| self.held.contains(stream_seq) || self.parked.contains(stream_seq));
    }

    /// Hands messages back that wait for an earlier one of their key, if they leave too little room for other keys. No attempt is
    /// counted. With a `max_deliver`, they stay: a delivery is then too precious.
    pub(super) async fn hand_back_blocked(&mut self) {
        if self.max_deliver().is_some() || self.draining.is_cancelled() {
            return;
        }
        let blocked = self.keys.blocked_by(self.parked.due());
        if blocked.is_empty() {
            return;
        }
        // Behind the barrier, room is needed for the messages that are still out.
        let parts = if self.keys.has_barrier() { 1 } else { 4 };
        let limit = self.config.batch.max_messages / parts;
        let mut taken = self.waiting.take_blocked(&blocked, limit);
        taken.extend(self.calls.take_blocked(&blocked, limit));
        if taken.is_empty() {
            return;
        }
        let now = Instant::now();
        let delay = |due: Instant| due.saturating_duration_since(now).clamp(HAND_BACK_MIN, HAND_BACK_MAX);
        let delays: Vec<Duration> = taken.iter().map(|it| blocked.due(it).map_or(HAND_BACK_MAX, delay)).collect();
        let mut naks = Vec::with_capacity(taken.len());
        for (delivery, delay) in taken.into_iter().zip(delays) {
            let position = delivery.raw.position;
            if let Some((reply, _)) = self.held.answer(position) {
                self.parked.put(position.stream_seq, now + delay);
                naks.push((reply, Acknowledgement::Nak { delay }));
            } else {
                self.enqueue(delivery);
            }
        }
        tracing::debug!(messages = naks.len(), "handed back: they wait for earlier messages of their keys");
        self.telemetry.health.set_held(self.held.len());
        self.acknowledge(naks, Receipt::None).await;
    }
}
