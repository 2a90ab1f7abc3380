//! What is lost when the consumer is deleted. Pure. Every command that deletes or recreates a consumer, and every text that
//! advises it, takes its words from here.

use async_nats::jetstream::consumer::{Config as ConsumerConfig, DeliverPolicy, Info as ConsumerInfo};
use async_nats::jetstream::stream::{Info as StreamInfo, RetentionPolicy};

/// The command that replaces a consumer and loses nothing.
pub const RECREATE: &str = "order-processor setup --recreate";

/// What the deletion of the consumer means for the orders, one fact each.
pub fn consequences(stream: &StreamInfo, consumer: &ConsumerInfo) -> Vec<String> {
    let name = &stream.config.name;
    let waiting = waiting(consumer);
    let mut facts = Vec::new();
    facts.push(match stream.config.retention {
        RetentionPolicy::Interest => {
            let others = if stream.state.consumer_count > 1 { "; those that another consumer waits for stay" } else { "" };
            format!(
                "stream {name} has retention interest: the server deletes the messages that wait for this consumer, {waiting} now \
                 ({} not delivered, {} not acknowledged){others}, and stores no message for it until it exists again",
                consumer.num_pending, consumer.num_ack_pending
            )
        }
        RetentionPolicy::WorkQueue => {
            format!("stream {name} has retention workqueue: the {waiting} messages that wait for this consumer stay in the stream")
        }
        RetentionPolicy::Limits => {
            format!("stream {name} has retention limits: the {waiting} messages that wait for this consumer stay in the stream")
        }
    });
    let floor = consumer.ack_floor.stream_sequence;
    if floor > 0 {
        facts.push(format!(
            "the position is deleted (ack floor {floor}): a consumer from the beginning delivers every message of the stream again, \
             and the database recognises only the orders that it has processed"
        ));
    }
    let filters = filters(&consumer.config);
    if !filters.is_empty() {
        facts.push(format!(
            "the filter {} is deleted: a consumer without it delivers the orders of other consumers, too",
            filters.join(", ")
        ));
    }
    if consumer.config.deliver_policy != DeliverPolicy::All {
        facts.push(format!(
            "the deliver policy {} is deleted: a consumer with policy all delivers older messages, too",
            policy(&consumer.config.deliver_policy)
        ));
    }
    facts
}

/// Whether the server deletes messages with the consumer.
pub fn loses_messages(stream: &StreamInfo, consumer: &ConsumerInfo) -> bool {
    stream.config.retention == RetentionPolicy::Interest && waiting(consumer) > 0
}

/// The advice to replace the consumer, as the end of a sentence.
pub fn advice(stream: &StreamInfo, consumer: &ConsumerInfo) -> String {
    let mut advice = format!("run `{RECREATE}`, which keeps the filter and the position");
    if loses_messages(stream, consumer) {
        advice += &format!(
            "; any other deletion of the consumer loses the {} messages that wait for it (retention interest)",
            waiting(consumer)
        );
    }
    advice
}

/// Messages that the consumer has not acknowledged.
pub fn waiting(consumer: &ConsumerInfo) -> u64 {
    consumer.num_pending + consumer.num_ack_pending as u64
}

/// The subjects that the consumer is for; empty for all of the stream.
pub fn filters(config: &ConsumerConfig) -> Vec<String> {
    if config.filter_subject.is_empty() { config.filter_subjects.clone() } else { vec![config.filter_subject.clone()] }
}

/// A deliver policy in the words of the server.
pub fn policy(policy: &DeliverPolicy) -> String {
    match policy {
        DeliverPolicy::All => "all".to_owned(),
        DeliverPolicy::Last => "last".to_owned(),
        DeliverPolicy::New => "new".to_owned(),
        DeliverPolicy::ByStartSequence { start_sequence } => format!("by_start_sequence {start_sequence}"),
        DeliverPolicy::ByStartTime { start_time } => format!("by_start_time {start_time}"),
        DeliverPolicy::LastPerSubject => "last_per_subject".to_owned(),
    }
}
