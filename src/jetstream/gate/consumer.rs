//! What the gate warns of in a consumer.

use async_nats::jetstream::consumer::{DeliverPolicy, Info as ConsumerInfo, ReplayPolicy};
use async_nats::jetstream::stream::{Info as StreamInfo, RetentionPolicy, StorageType};

use super::{Expectations, deletion, inactivity};
use crate::jetstream::stored::filters;
use crate::model::subject::SubjectPattern;

/// What the server gives a consumer that is made without the setting (nats-server 2.15). Enough for a steady flow, so not a
/// reason for a warning.
const SERVER_MAX_ACK_PENDING: usize = 1000;

/// The daemon has two or three pulls open, and as many of an earlier connection may still be open on the server.
const MAX_WAITING_MIN: i64 = 8;

pub(super) fn warnings(stream: &StreamInfo, consumer: &ConsumerInfo, ours: Expectations) -> Vec<String> {
    let (name, config) = (&consumer.name, &consumer.config);
    let recreate = deletion::advice(stream, consumer);
    let mut found = limits(consumer, ours);
    if stream.config.retention != RetentionPolicy::Interest {
        found.extend(inactivity(stream, consumer));
    }
    if config.memory_storage
        && stream.config.storage == StorageType::File
        && stream.config.retention != RetentionPolicy::Interest
    {
        found.push(format!(
            "consumer {name} is stored in memory: a server restart deletes it, and its orders wait until it is created again; {recreate}"
        ));
    }
    found.extend(unmatched(stream, consumer));
    found.extend(start(stream, consumer));
    if config.replay_policy == ReplayPolicy::Original {
        found.push(format!(
            "consumer {name} has replay policy original: the server delivers waiting orders as slowly as they were published; {recreate}"
        ));
    }
    if config.max_waiting > 0 && config.max_waiting < MAX_WAITING_MIN {
        found.push(format!(
            "consumer {name} has max_waiting {}, at least {MAX_WAITING_MIN} is advised: pulls of a lost connection or of another \
             client can take all places, and no order is delivered meanwhile; {recreate}",
            config.max_waiting
        ));
    }
    found
}

fn limits(consumer: &ConsumerInfo, ours: Expectations) -> Vec<String> {
    let (name, config) = (&consumer.name, &consumer.config);
    let mut found = Vec::new();
    if config.max_deliver > i64::from(ours.retry_max_attempts) {
        found.push(format!(
            "consumer {name} has max_deliver {}: deliveries lost to restarts and disconnects count too, and after the last one the \
             server no longer delivers the order; run `order-processor setup --update --unset max-deliver`",
            config.max_deliver
        ));
    }
    let batch = ours.batch_max_messages;
    let few = batch.min(SERVER_MAX_ACK_PENDING);
    if config.max_ack_pending > 0 && usize::try_from(config.max_ack_pending).is_ok_and(|pending| pending < few) {
        found.push(format!(
            "consumer {name} has max_ack_pending {}, less than batch.max_messages {batch}: batches stay smaller; run \
             `order-processor setup --update --max-ack-pending {}`, or lower batch.max_messages",
            config.max_ack_pending,
            batch * 2
        ));
    }
    if config.max_bytes > 0 {
        found.push(format!(
            "consumer {name} allows pulls of at most {} bytes: a larger message is never delivered, nor any message after it; run \
             `order-processor setup --update --unset max-request-bytes`",
            config.max_bytes
        ));
    }
    if !config.backoff.is_empty() {
        found.push(format!(
            "consumer {name} has a backoff list: it replaces ack_wait, and the server adds it to retry delays (the daemon allows for \
             that if it can); run `order-processor setup --update --unset backoff`"
        ));
    }
    found
}

/// Filters that match no subject of the stream, for example after an edit of its subjects. A copy and a transform store other
/// subjects than those of the stream.
fn unmatched(stream: &StreamInfo, consumer: &ConsumerInfo) -> Option<String> {
    let config = &stream.config;
    let is_copy = config.mirror.is_some() || config.sources.as_ref().is_some_and(|sources| !sources.is_empty());
    let subjects: Vec<SubjectPattern> = config.subjects.iter().filter_map(|subject| subject.parse().ok()).collect();
    if is_copy || config.subject_transform.is_some() || subjects.is_empty() {
        return None;
    }
    let matches = |filter: &SubjectPattern| subjects.iter().any(|subject| subject.overlaps(filter));
    let useless: Vec<&str> = filters(&consumer.config)
        .into_iter()
        .filter(|filter| filter.parse().is_ok_and(|filter| !matches(&filter)))
        .collect();
    (!useless.is_empty()).then(|| {
        format!(
            "consumer {} is for {}, but stream {} stores {}: the server delivers no new order of this filter; correct the subjects of \
             the stream, or the filter with `order-processor setup --recreate --filter`",
            consumer.name,
            useless.join(", "),
            config.name,
            config.subjects.join(", ")
        )
    })
}

/// Orders that the consumer never delivers, because of where it was told to start.
fn start(stream: &StreamInfo, consumer: &ConsumerInfo) -> Option<String> {
    let name = &consumer.name;
    let what = match consumer.config.deliver_policy {
        DeliverPolicy::All => return None,
        DeliverPolicy::New => "messages from before its creation".to_owned(),
        DeliverPolicy::Last => "messages from before its creation, except for the last one".to_owned(),
        DeliverPolicy::LastPerSubject => {
            "messages from before its creation, except for the last one of each subject".to_owned()
        }
        DeliverPolicy::ByStartSequence { start_sequence } => {
            let last = stream.state.last_sequence;
            let far = if start_sequence > last + 1 { format!("; the stream ends at {last}") } else { String::new() };
            format!("messages below sequence {start_sequence}{far}")
        }
        DeliverPolicy::ByStartTime { start_time } => format!("messages that were published before {start_time}"),
    };
    let policy = deletion::policy(&consumer.config.deliver_policy);
    Some(format!(
        "consumer {name} has deliver policy {policy}: it never delivers {what}, and `audit` does not check them"
    ))
}
