//! Whether pulls work: what the server answers to them, and whether it delivers pending messages.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::Trouble;
use super::pull::Heartbeat;
use crate::model::view::ConsumerView;
use crate::telemetry::metrics::NatsErrorKind;
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

/// Pending messages and an open pull, but no delivery: after so long, the daemon is not ready.
const STARVED_AFTER: Duration = Duration::from_secs(10);

pub(super) struct PullHealth {
    telemetry: Arc<Telemetry>,
    /// Troubles in a row, without an answer of the server to a pull between them.
    troubles: u32,
    /// Since when messages are pending and none is delivered.
    since: Option<Instant>,
    reported: bool,
    reminder: Reminder,
}

impl PullHealth {
    pub(super) fn new(telemetry: Arc<Telemetry>) -> Self {
        Self { telemetry, troubles: 0, since: None, reported: false, reminder: Reminder::default() }
    }

    /// The server answered a pull.
    pub(super) fn answered(&mut self) {
        self.troubles = 0;
        self.telemetry.pulls_work();
    }

    /// How many troubles of pulls in a row came before this one; `None` if it is about something else. From the second one on,
    /// the daemon is not ready until the server answers a pull.
    pub(super) fn trouble(&mut self, trouble: &Trouble) -> Option<u32> {
        if !matches!(trouble.kind, Some(NatsErrorKind::Pull | NatsErrorKind::Heartbeat)) {
            return None;
        }
        let earlier = self.troubles;
        self.troubles = earlier.saturating_add(1);
        if earlier > 0 {
            self.telemetry.pulls_denied(trouble.cause.clone());
        }
        Some(earlier)
    }

    /// For the first pull of a new session. Without heartbeats, the server sends the status that ended the last pull.
    pub(super) fn heartbeat(&self) -> Heartbeat {
        if self.troubles == 0 { Heartbeat::On } else { Heartbeat::Off }
    }

    /// A look at the consumer. `waits`: a pull was open since the last look, and nothing was delivered. `too_large_for`: the most
    /// bytes that a pull may ask for, if the next message is larger.
    pub(super) fn observe(&mut self, view: &ConsumerView, waits: bool, too_large_for: Option<usize>) {
        if !waits || view.num_pending == 0 || view.paused || self.is_our_own(view) {
            self.since = None;
            if std::mem::take(&mut self.reported) {
                self.telemetry.health.report(Component::Progress, Ok(()));
            }
            return;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited >= STARVED_AFTER {
            self.reported = true;
            let cause = cause(view, too_large_for);
            if self.reminder.is_due(&cause) {
                tracing::warn!(%cause, pending = view.num_pending, "the server delivers no messages");
            }
            let (pending, seconds) = (view.num_pending, waited.as_secs());
            let cause =
                format!("{pending} messages pending, but the server has delivered none for {seconds} s: {cause}");
            self.telemetry.health.report(Component::Progress, Err(cause));
        }
    }

    /// Our own deliveries use up `max_ack_pending`: the daemon holds them, or they wait for their retry.
    fn is_our_own(&self, view: &ConsumerView) -> bool {
        let ours = || {
            let status = self.telemetry.health.status();
            status.held + status.parked
        };
        view.is_full() && ours() as u64 >= view.num_ack_pending
    }
}

fn cause(view: &ConsumerView, too_large_for: Option<usize>) -> String {
    if let Some(bytes) = too_large_for {
        return format!(
            "the next message is larger than {bytes} bytes, the most that a pull on this consumer may ask for (max_bytes), and no \
             message after it comes; run `order-processor setup --update --unset max-request-bytes`"
        );
    }
    match view.max_ack_pending.filter(|_| view.is_full()) {
        Some(max) => format!(
            "max_ack_pending {max} is used up by deliveries that this daemon does not hold; find the other client of this consumer, \
             or raise the limit with `order-processor setup --update --max-ack-pending={}`",
            max.saturating_mul(10).max(1000)
        ),
        None => "a pull is open; check for another client of this consumer, and the log of the server".to_owned(),
    }
}
