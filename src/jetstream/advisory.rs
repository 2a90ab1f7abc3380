//! The server's advisory that it will not deliver a message again: the message had `max_deliver` deliveries and no
//! acknowledgement. The message is fetched immediately by its sequence, while the stream still has it.

use serde::Deserialize;

use super::error::Error;
use super::stored::StreamReader;
use crate::model::delivery::Arrival;

/// Where the server publishes the advisories of one consumer. The permission to subscribe is optional.
pub fn advisory_subject(stream: &str, consumer: &str) -> String {
    format!("{ADVISORY_PREFIX}.{stream}.{consumer}")
}

/// The beginning of the [subject](advisory_subject).
pub const ADVISORY_PREFIX: &str = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES";

/// What an advisory contains.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Advisory {
    stream_seq: u64,
    deliveries: u64,
}

impl Advisory {
    /// `None` for any other message on that subject.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }
}

/// The messages of these advisories that the stream still has.
pub async fn fetch(reader: StreamReader, advisories: Vec<Advisory>) -> Result<Vec<Arrival>, Error> {
    let mut found = Vec::with_capacity(advisories.len());
    for Advisory { stream_seq, deliveries } in advisories {
        found.extend(reader.message_at(stream_seq, deliveries).await?);
    }
    reader.confirm().await?;
    Ok(found)
}
