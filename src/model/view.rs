//! What the server says of stream and consumer.

use std::time::SystemTime;

use serde::Serialize;

use super::time;

/// What the server says of consumer and stream, taken at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConsumerView {
    pub ack_floor_stream_seq: u64,
    pub ack_floor_consumer_seq: u64,
    pub delivered_stream_seq: u64,
    pub num_pending: u64,
    pub num_ack_pending: u64,
    pub num_redelivered: u64,
    pub num_waiting: u64,
    pub stream_first_seq: u64,
    pub stream_last_seq: u64,
    pub max_ack_pending: Option<u64>,
    pub paused: bool,
    /// When the first message of the stream was published; `None` for an empty stream.
    #[serde(skip)]
    pub first_published_at: Option<SystemTime>,
    #[serde(skip)]
    pub stream_created_at: SystemTime,
    /// When the stream last stored a message, by the server's clock.
    #[serde(serialize_with = "time::serialize")]
    pub last_published_at: SystemTime,
    /// When the oldest message that the ack floor has not passed was published; `None` if there is none.
    #[serde(serialize_with = "time::optional::serialize")]
    pub oldest_published_at: Option<SystemTime>,
    #[serde(serialize_with = "time::serialize")]
    pub taken_at: SystemTime,
}

impl ConsumerView {
    /// The server delivers nothing new before something is acknowledged, and there is something new.
    pub fn is_full(&self) -> bool {
        self.num_pending > 0 && self.max_ack_pending.is_some_and(|max| self.num_ack_pending >= max)
    }
}

/// When stream and consumer were created, in nanoseconds since 1970 UTC. Another time is another stream or consumer of the same
/// name, or the same stream after a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incarnation {
    pub stream_ns: i64,
    pub consumer_ns: i64,
}
