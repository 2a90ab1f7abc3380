//! What the gate warns of in a stream.

use std::time::Duration;

use async_nats::jetstream::stream::{DiscardPolicy, Info as StreamInfo, RetentionPolicy, StorageType};

use super::Expectations;

pub(super) fn warnings(stream: &StreamInfo, ours: Expectations) -> Vec<String> {
    let config = &stream.config;
    let name = &config.name;
    let mut found = Vec::new();
    if config.max_bytes <= 0 && config.max_age.is_zero() {
        found.push(format!(
            "stream {name} has neither max_bytes nor max_age and will fill the server's disk; run \
             `order-processor setup --update --max-age 30d --max-bytes 10GiB`"
        ));
    }
    if config.storage == StorageType::Memory {
        found.push(format!(
            "stream {name} is stored in memory: a server restart loses every order in it; recreate it with storage file"
        ));
    }
    found.extend(removals(stream));
    found.extend(other_than_orders(stream));
    found.extend(sources(stream, ours));
    found
}

/// Settings that remove orders before they are processed, other than the ordinary limits.
fn removals(stream: &StreamInfo) -> Vec<String> {
    let config = &stream.config;
    let name = &config.name;
    let mut found = Vec::new();
    let refuses_new = config.discard == DiscardPolicy::New && config.discard_new_per_subject;
    if config.max_messages_per_subject > 0 && !refuses_new {
        found.push(format!(
            "stream {name} has max_msgs_per_subject {}: the server removes the oldest orders of a subject above this number, \
             processed or not; remove the limit",
            config.max_messages_per_subject
        ));
    }
    if config.allow_message_ttl {
        found.push(format!(
            "stream {name} has allow_msg_ttl: the server removes a message with a Nats-TTL header at the end of its time, processed \
             or not; publishers must not set the header on orders"
        ));
    }
    if config.allow_rollup {
        found.push(format!(
            "stream {name} has allow_rollup_hdrs: a message with a Nats-Rollup header removes earlier orders, processed or not; \
             publishers must not set the header"
        ));
    }
    found
}

/// Features that put messages into the stream that are not orders.
fn other_than_orders(stream: &StreamInfo) -> Vec<String> {
    let config = &stream.config;
    let name = &config.name;
    let mut found = Vec::new();
    if config.subject_delete_marker_ttl.is_some_and(|ttl| !ttl.is_zero()) {
        found.push(format!(
            "stream {name} has subject_delete_marker_ttl: the server stores an empty message (Nats-Marker-Reason) when the last \
             message of a subject expires; such a marker is not an order"
        ));
    }
    if config.allow_message_schedules {
        found.push(format!(
            "stream {name} has allow_msg_schedules: a message with a Nats-Schedule header is a definition, from which the server \
             publishes the order later; publish definitions on subjects that the consumer does not deliver"
        ));
    }
    if config.allow_message_counter {
        found.push(format!(
            "stream {name} has allow_msg_counter: each message of it is a counter with the new total, not an order"
        ));
    }
    found
}

fn sources(stream: &StreamInfo, ours: Expectations) -> Option<String> {
    let config = &stream.config;
    let sources: Vec<&str> = config.sources.iter().flatten().map(|source| source.name.as_str()).collect();
    if sources.is_empty() {
        return None;
    }
    let ids = if ours.has_id_pointer { "a Nats-Msg-Id or an id at inbox.id_pointer" } else { "a Nats-Msg-Id" };
    let copies = format!(
        "stream {} has sources ({}): after an edit of a source, the server may copy a message again under a new sequence; with {ids} \
         the copy is a duplicate, without an id it is a second order",
        config.name,
        sources.join(", ")
    );
    let sharing = "; of two orders with one id in two sources, only one is applied: if the sources do not agree on their ids, set \
                   inbox.id_scope to a header that tells them apart";
    Some(if ours.has_tenants { copies } else { copies + sharing })
}

/// The server asks each origin for a sign of life every second, even if the origin has no messages (nats-server 2.15).
const CONTACT_MAX: Duration = Duration::from_secs(30);

/// Origins of a mirror or of sources without contact: the consumer then looks idle. Not for a look just after a connect: a server
/// needs about a second after its start to reach an origin.
pub fn lost_origins(stream: &StreamInfo) -> Option<String> {
    let origins = stream.mirror.iter().chain(&stream.sources);
    let is_lost = |active: Option<Duration>| active.is_none_or(|active| active > CONTACT_MAX);
    let lost: Vec<&str> = origins.filter(|origin| is_lost(origin.active)).map(|origin| origin.name.as_str()).collect();
    (!lost.is_empty()).then(|| {
        format!(
            "stream {} copies the messages of {}, but its server has had no contact with that stream for more than {} s, or since its \
             start: orders that are published there do not arrive; check whether the stream exists and its server is connected",
            stream.config.name,
            lost.join(" and of "),
            CONTACT_MAX.as_secs()
        )
    })
}

/// Why `audit` cannot find the orders that the database lost, if it cannot.
pub fn unauditable(stream: &StreamInfo) -> Option<String> {
    let (name, retention) = (
        &stream.config.name,
        match stream.config.retention {
            RetentionPolicy::Limits => return None,
            RetentionPolicy::Interest => "interest",
            RetentionPolicy::WorkQueue => "workqueue",
        },
    );
    Some(format!(
        "stream {name} has retention {retention}: the server deletes a message after its acknowledgement, so `audit` cannot find an \
         order that is acknowledged and not in the database"
    ))
}
