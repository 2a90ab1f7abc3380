//! The start gate: what must not be so about the stream and the consumer that we bind to, and what had better not be.
//! Pure; `run` and `check` look at it before the first pull.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, Info as ConsumerInfo, PriorityPolicy};
use async_nats::jetstream::stream::{Info as StreamInfo, StorageType};

use crate::config::Config;

/// What the server gives a consumer that is made without the setting (nats-server 2.15). Enough for a steady flow, so no reason
/// for a warning.
const SERVER_MAX_ACK_PENDING: usize = 1000;

/// Something about the server's side that is wrong, with both values and the command that mends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub severity: Severity,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Orders could be lost or never come again: the daemon does not start.
    Refused,
    /// It works, and will hurt some day.
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

/// Our own settings that the consumer must fit.
#[derive(Clone, Copy, Debug)]
pub struct Expectations {
    pub retry_max_attempts: u32,
    pub batch_max_messages: usize,
}

impl Expectations {
    pub fn of(config: &Config) -> Self {
        Self { retry_max_attempts: config.retry.max_attempts, batch_max_messages: config.batch.max_messages }
    }
}

/// All findings, the refusals first.
pub fn examine(stream: &StreamInfo, consumer: &ConsumerInfo, ours: Expectations) -> Vec<Finding> {
    let mut findings = refusals(consumer, ours);
    findings.extend(consumer_warnings(consumer, ours));
    findings.extend(stream_warnings(stream));
    findings
}

fn refusals(consumer: &ConsumerInfo, ours: Expectations) -> Vec<Finding> {
    let (stream, name, config) = (&consumer.stream_name, &consumer.name, &consumer.config);
    let recreate = format!("run `nats consumer rm {stream} {name}`, then `order-processor setup`");
    let mut found = Vec::new();
    let mut refuse = |text: String| found.push(Finding { severity: Severity::Refused, text });
    if let Some(subject) = &config.deliver_subject {
        refuse(format!(
            "consumer {name} is a push consumer (delivers to {subject}), a pull consumer is needed: {recreate}"
        ));
    }
    if config.ack_policy != AckPolicy::Explicit {
        let policy = format!("{:?}", config.ack_policy).to_lowercase();
        refuse(format!("consumer {name} has ack policy {policy}, explicit is needed: {recreate}"));
    }
    if config.headers_only {
        refuse(format!("consumer {name} delivers headers only, the payload is needed: {recreate}"));
    }
    if config.priority_policy != PriorityPolicy::None {
        refuse(format!("consumer {name} hands out by priority groups, which are not supported: {recreate}"));
    }
    if config.ack_wait < Duration::from_secs(1) {
        let ack_wait = humantime::format_duration(config.ack_wait);
        refuse(format!(
            "consumer {name} has ack_wait {ack_wait}, at least 1s is needed: run `nats consumer edit {stream} {name} --wait=30s`"
        ));
    }
    let attempts = ours.retry_max_attempts;
    if config.max_deliver > 0 && config.max_deliver <= i64::from(attempts) {
        refuse(format!(
            "consumer {name} has max_deliver {}, more than retry.max_attempts {attempts} is needed: \
             run `nats consumer edit {stream} {name} --max-deliver=-1`, or lower retry.max_attempts",
            config.max_deliver
        ));
    }
    found
}

fn consumer_warnings(consumer: &ConsumerInfo, ours: Expectations) -> Vec<Finding> {
    let (stream, name, config) = (&consumer.stream_name, &consumer.name, &consumer.config);
    let mut found = Vec::new();
    let mut warn = |text: String| found.push(Finding { severity: Severity::Warned, text });
    if config.max_deliver > 0 && config.max_deliver > i64::from(ours.retry_max_attempts) {
        warn(format!(
            "consumer {name} has max_deliver {}: deliveries lost to restarts and disconnects count too, and after the last one the \
             server gives up silently; run `nats consumer edit {stream} {name} --max-deliver=-1`",
            config.max_deliver
        ));
    }
    let batch = ours.batch_max_messages;
    let few = batch.min(SERVER_MAX_ACK_PENDING);
    if config.max_ack_pending > 0 && usize::try_from(config.max_ack_pending).is_ok_and(|pending| pending < few) {
        warn(format!(
            "consumer {name} has max_ack_pending {}, less than batch.max_messages {batch}: batches stay smaller; \
             run `nats consumer edit {stream} {name} --max-pending={}`, or lower batch.max_messages",
            config.max_ack_pending,
            batch * 2
        ));
    }
    if config.max_bytes > 0 {
        warn(format!(
            "consumer {name} allows pulls of at most {} bytes: a larger message blocks it for ever; recreate the consumer without \
             max_bytes: `nats consumer rm {stream} {name}`, then `order-processor setup`",
            config.max_bytes
        ));
    }
    if !config.backoff.is_empty() {
        warn(format!(
            "consumer {name} has a backoff list: the server adds it to retry delays (allowed for as far as can be) and it replaces \
             ack_wait; recreate the consumer without one: `nats consumer rm {stream} {name}`, then `order-processor setup`"
        ));
    }
    found
}

fn stream_warnings(stream: &StreamInfo) -> Vec<Finding> {
    let config = &stream.config;
    let name = &config.name;
    let mut found = Vec::new();
    let mut warn = |text: String| found.push(Finding { severity: Severity::Warned, text });
    if config.max_bytes <= 0 && config.max_age.is_zero() {
        warn(format!(
            "stream {name} has neither max_bytes nor max_age and will fill the server's disk; \
             run `nats stream edit {name} --max-age=30d --max-bytes=10GB`"
        ));
    }
    if config.storage == StorageType::Memory {
        warn(format!(
            "stream {name} is stored in memory: a server restart loses every order in it; recreate it with --storage=file"
        ));
    }
    found
}
