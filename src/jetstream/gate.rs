//! The start gate: what must not be so about the stream and the consumer that the daemon binds to, and what is dangerous.
//! Pure. `run` and `check` examine both before the first pull, `run` at every later look, `setup` at its end.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, Info as ConsumerInfo, PriorityPolicy};
use async_nats::jetstream::stream::{Info as StreamInfo, RetentionPolicy, StorageType};

use super::deletion;
use crate::config::{Config, IdScope};

mod consumer;
mod stream;

pub use stream::{lost_origins, unauditable};

/// The shortest `ack_wait` that the daemon can keep a delivery alive with.
pub const ACK_WAIT_MIN: Duration = Duration::from_secs(1);

/// Something on the server that is wrong, with both values and the command that corrects it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub severity: Severity,
    pub text: String,
}

impl Finding {
    pub(super) fn warned(text: String) -> Self {
        Self { severity: Severity::Warned, text }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Orders could be lost or never be delivered: the daemon does not start.
    Refused,
    /// The daemon works, and the operator must know the danger.
    Warned,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Warned => "warning",
        }
    }
}

/// Our own settings that the consumer must suit.
#[derive(Clone, Copy, Debug)]
pub struct Expectations {
    pub retry_max_attempts: u32,
    pub batch_max_messages: usize,
    pub has_id_pointer: bool,
    /// A header tells tenants apart.
    pub has_tenants: bool,
}

impl Expectations {
    pub fn of(config: &Config) -> Self {
        Self {
            retry_max_attempts: config.retry.max_attempts,
            batch_max_messages: config.batch.max_messages,
            has_id_pointer: config.inbox.id_pointer.is_some(),
            has_tenants: matches!(config.inbox.id_scope, IdScope::Header(_)),
        }
    }
}

/// All findings, the refusals first.
pub fn examine(stream: &StreamInfo, consumer: &ConsumerInfo, ours: Expectations) -> Vec<Finding> {
    let refused = |text| Finding { severity: Severity::Refused, text };
    let mut findings: Vec<Finding> = refusals(stream, consumer, ours).into_iter().map(refused).collect();
    findings.extend(consumer::warnings(stream, consumer, ours).into_iter().map(Finding::warned));
    findings.extend(stream::warnings(stream, ours).into_iter().map(Finding::warned));
    findings
}

/// What only another consumer corrects comes alone: the new consumer has none of the other faults.
fn refusals(stream: &StreamInfo, consumer: &ConsumerInfo, ours: Expectations) -> Vec<String> {
    let replaced = replaceable(stream, consumer);
    if replaced.is_empty() { editable(stream, consumer, ours) } else { replaced }
}

fn replaceable(stream: &StreamInfo, consumer: &ConsumerInfo) -> Vec<String> {
    let (name, config) = (&consumer.name, &consumer.config);
    let recreate = deletion::advice(stream, consumer);
    let mut found = Vec::new();
    if let Some(subject) = &config.deliver_subject {
        found.push(format!(
            "consumer {name} is a push consumer (delivers to {subject}), a pull consumer is needed: {recreate}"
        ));
    }
    if config.ack_policy != AckPolicy::Explicit {
        let policy = format!("{:?}", config.ack_policy).to_lowercase();
        found.push(format!("consumer {name} has ack policy {policy}, explicit is needed: {recreate}"));
    }
    if config.priority_policy != PriorityPolicy::None {
        found.push(format!("consumer {name} delivers by priority groups, which are not supported: {recreate}"));
    }
    if consumer_dies_with_the_server(stream, consumer) {
        let stream = &stream.config.name;
        found.push(format!(
            "consumer {name} is stored in memory, and stream {stream} has retention interest: a server restart deletes the \
             consumer, and with it the messages that wait for it: {recreate}"
        ));
    }
    found
}

fn editable(stream: &StreamInfo, consumer: &ConsumerInfo, ours: Expectations) -> Vec<String> {
    let (name, config) = (&consumer.name, &consumer.config);
    let mut found = Vec::new();
    if config.headers_only {
        found.push(format!(
            "consumer {name} delivers headers only, the payload is needed: run \
             `order-processor setup --update --unset headers-only`"
        ));
    }
    if config.ack_wait < ACK_WAIT_MIN {
        let (ack_wait, least) = (humantime::format_duration(config.ack_wait), humantime::format_duration(ACK_WAIT_MIN));
        found.push(format!(
            "consumer {name} has ack_wait {ack_wait}, at least {least} is needed: run \
             `order-processor setup --update --ack-wait 30s`"
        ));
    }
    let attempts = ours.retry_max_attempts;
    if config.max_deliver > 0 && config.max_deliver <= i64::from(attempts) {
        found.push(format!(
            "consumer {name} has max_deliver {}, more than retry.max_attempts {attempts} is needed: run \
             `order-processor setup --update --unset max-deliver`, or lower retry.max_attempts",
            config.max_deliver
        ));
    }
    if stream.config.retention == RetentionPolicy::Interest
        && let Some(fault) = inactivity(stream, consumer)
    {
        found.push(fault);
    }
    found
}

/// What is wrong with a durable that the server deletes when nobody pulls for a while.
fn inactivity(stream: &StreamInfo, consumer: &ConsumerInfo) -> Option<String> {
    let (name, config) = (&consumer.name, &consumer.config);
    if config.inactive_threshold.is_zero() {
        return None;
    }
    let threshold = humantime::format_duration(config.inactive_threshold);
    let limits = stream.config.consumer_limits.as_ref();
    // The server gives its limit to a consumer that has no threshold.
    let unset = match limits.is_some_and(|limits| !limits.inactive_threshold.is_zero()) {
        true => "consumer-limits,inactive-threshold",
        false => "inactive-threshold",
    };
    let effect = match stream.config.retention {
        RetentionPolicy::Interest => {
            "and with the consumer every order that waits for it (retention interest), for example during a pause of the daemon"
        }
        RetentionPolicy::Limits | RetentionPolicy::WorkQueue => {
            "for example during a pause of the daemon: its position is then lost, and its orders wait until it is created again"
        }
    };
    Some(format!(
        "consumer {name} has inactive_threshold {threshold}: the server deletes it after {threshold} without a pull, {effect}; run \
         `order-processor setup --update --unset {unset}`"
    ))
}

/// For `pause`: what the server does to the consumer while nobody pulls.
pub fn during_a_pause(stream: &StreamInfo, consumer: &ConsumerInfo) -> Option<String> {
    inactivity(stream, consumer)
}

/// A stream in memory dies as well; the warning about that says more.
fn consumer_dies_with_the_server(stream: &StreamInfo, consumer: &ConsumerInfo) -> bool {
    consumer.config.memory_storage
        && stream.config.storage == StorageType::File
        && stream.config.retention == RetentionPolicy::Interest
}
