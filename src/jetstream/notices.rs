//! What the operator must know about stream and consumer: each fact once, in log and metrics.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::Info as ConsumerInfo;

use super::bind::Rebind;
use super::deletion::RECREATE;
use super::gaps::Notice;
use super::gate::Finding;
use super::look::Snapshot;
use super::other_pulls::{self, OtherPulls};
use crate::model::view::ConsumerView;
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

pub(super) struct Notices {
    telemetry: Arc<Telemetry>,
    /// The warnings of the start gate that are logged and still hold.
    warned: HashSet<String>,
    paused: bool,
    /// The ack floor of the last look at this consumer, as a consumer sequence.
    ack_floor: u64,
    floor_reminder: Reminder,
    other_pulls: OtherPulls,
    others: u64,
}

impl Notices {
    pub(super) fn new(telemetry: Arc<Telemetry>) -> Self {
        Self {
            telemetry,
            warned: HashSet::new(),
            paused: false,
            ack_floor: 0,
            floor_reminder: Reminder::default(),
            other_pulls: OtherPulls::default(),
            others: 0,
        }
    }

    /// A binding, and what it follows.
    pub(super) fn log_bind(&self, rebind: Rebind, snapshot: &Snapshot) {
        let (stream, consumer) = (&snapshot.stream.config.name, &snapshot.consumer.name);
        let (first_seq, last_seq) = (snapshot.stream.state.first_sequence, snapshot.stream.state.last_sequence);
        if rebind.is_recreated() {
            self.telemetry.metrics.consumer_rebinds.increment(1);
        }
        match rebind {
            Rebind::First | Rebind::Same => {}
            Rebind::OtherStream => {
                tracing::warn!(%stream, first_seq, last_seq, "the stream was deleted and recreated, or restored");
            }
            Rebind::OtherConsumer => {
                tracing::warn!(%consumer, "the consumer was deleted and recreated; the server may redeliver messages");
            }
        }
        let (ack_floor, pending) = (snapshot.consumer.ack_floor.stream_sequence, snapshot.consumer.num_pending);
        // After a kill, `pending` may be 0, and the server delivers these again only after `ack_wait`.
        let unacknowledged = Some(snapshot.consumer.num_ack_pending).filter(|count| *count > 0);
        tracing::info!(%stream, %consumer, ack_floor, pending, unacknowledged, "the daemon bound to the consumer");
    }

    /// Logs each warning once for as long as it holds.
    pub(super) fn warn(&mut self, findings: Vec<Finding>) {
        let warnings: HashSet<String> = findings.into_iter().map(|finding| finding.text).collect();
        for text in warnings.difference(&self.warned) {
            tracing::warn!("{text}");
        }
        self.warned = warnings;
    }

    /// Compares the pulls that the server has open with the `own` pulls of this daemon.
    pub(super) fn pulls(&mut self, consumer: &ConsumerInfo, own: u64) {
        let (num_waiting, ack_wait) = (consumer.num_waiting as u64, consumer.config.ack_wait);
        let others = self.other_pulls.observe(num_waiting, own, ack_wait, Instant::now());
        self.telemetry.health.set_other_pulls(others);
        // The number may change often; one line for each time is enough.
        if self.others == 0
            && let Some(warning) = other_pulls::warning(&consumer.name, others)
        {
            tracing::warn!("{warning}");
        }
        if others == 0 && self.others > 0 {
            tracing::info!("no other client pulls from the consumer any longer");
        }
        self.others = others;
    }

    /// The server ends a pause by itself. So its beginning and its end are logged once each.
    pub(super) fn log_pause(&mut self, consumer: &ConsumerInfo) {
        if consumer.paused == self.paused {
            return;
        }
        self.paused = consumer.paused;
        let left = consumer.pause_remaining.map(|left| Duration::from_secs(left.as_secs())).unwrap_or_default();
        if consumer.paused {
            tracing::warn!(left = %humantime::format_duration(left), "the consumer is paused; the server delivers nothing");
        } else {
            tracing::info!("the pause of the consumer has ended");
        }
    }

    /// The consumer is another one. The position of its floor is not the result of our acknowledgements.
    pub(super) fn restart_ack_floor(&mut self, view: &ConsumerView) {
        self.ack_floor = view.ack_floor_consumer_seq;
    }

    /// A higher floor proves that the server accepts our acknowledgements, whatever it denied before.
    pub(super) fn ack_floor(&mut self, view: &ConsumerView) {
        if view.ack_floor_consumer_seq > self.ack_floor {
            self.telemetry.health.report(Component::Acks, Ok(()));
        }
        self.ack_floor = view.ack_floor_consumer_seq;
    }

    /// Reports what happened to messages and sequences of the stream that was created at `stream_ns`.
    pub(super) fn log_gaps(&mut self, notices: &[Notice], stream_ns: i64) {
        let metrics = &self.telemetry.metrics;
        for notice in notices {
            match *notice {
                Notice::Gone { from, to } => {
                    let Some(from) = self.telemetry.news_of_gone(stream_ns.into(), from, to) else { continue };
                    let messages = to - from + 1;
                    metrics.messages_expired.increment(messages);
                    tracing::error!(
                        from,
                        to,
                        messages,
                        "messages {from} to {to} were removed from the stream before they were processed (by its limits, a purge \
                         or a deletion); raise the limits of the stream and publish these orders again"
                    );
                }
                Notice::SomeGone { at_least, first } => {
                    metrics.messages_expired.increment(at_least);
                    tracing::error!(
                        at_least,
                        "at least {at_least} messages below sequence {first} were removed from the stream before they were \
                         processed (by its limits, a purge or a deletion); the consumer has a filter, so their sequences are not \
                         known; raise the limits of the stream and publish these orders again"
                    );
                }
                Notice::Rewound { from, to } => {
                    self.telemetry.rewound();
                    tracing::error!(
                        from,
                        to,
                        "the stream ended at sequence {from} and now ends at {to}: the server has lost the messages after {to}, \
                         or was restored from a copy; publish those again that were not processed. New messages get these \
                         sequences again and are processed as new orders"
                    );
                }
                Notice::FloorBeyond { floor, last } => {
                    let text = format!(
                        "the ack floor of the consumer is {floor}, but the stream ends at {last}: the server may not deliver new \
                         messages until the stream has grown to {floor}; run `{RECREATE}`: \
                         no order is applied twice"
                    );
                    if self.floor_reminder.is_due(&text) {
                        tracing::error!("{text}");
                    }
                }
            }
        }
    }
}
