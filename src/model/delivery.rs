//! One delivery of one message: what the server said about it, its message id and its digest. No I/O.
//!
//! A message is stored once and may be delivered many times; everything here belongs to one handing-out of it.

use std::collections::HashMap;
use std::sync::Arc;

use super::id::{Digest, Given, NoId};
use super::outcome::{Ignored, Reason};
use super::plan::Plan;
use super::schemes::IdSchemes;
use bytes::Bytes;

/// Headers in no order across names; several values of one name stay in their order.
pub type Headers = Vec<(String, String)>;

/// What the server handed out, before we made an id of it.
#[derive(Clone, Debug)]
pub struct Raw {
    /// Shared, as the id is, with the statements that it is bound to.
    pub subject: Arc<str>,
    pub headers: Headers,
    pub payload: Bytes,
    pub position: Position,
    /// Why the client cannot parse the message; its headers are then one raw block.
    pub unreadable: Option<String>,
}

/// Where acknowledgements of a delivery go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub subject: String,
    /// Of the delivery that brought this subject; retry delays depend on it.
    pub delivered: u64,
}

/// One delivery as it came from the server, and where its acknowledgements go.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub raw: Raw,
    pub reply: Reply,
}

/// Where a delivery stands, as its reply subject says (ADR-15 of the NATS project).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The server's 1-based count of deliveries of this message; it also counts those that never reached a handler.
    pub delivered: u64,
    pub stream_seq: u64,
    pub consumer_seq: u64,
    /// When the server stored the message, in nanoseconds since 1970 UTC.
    pub published_ns: i64,
}

impl Position {
    /// Reads `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<published, ns>.<pending>` and the newer form,
    /// which has domain and account hash before the stream and perhaps more at its end. `None` for anything else.
    pub fn parse(reply: &str) -> Option<Self> {
        // Byte by byte: the tokens are shorter than what a search needs to begin.
        let is_dot = |byte: &u8| *byte == b'.';
        let tokens = reply.strip_prefix("$JS.ACK.")?.as_bytes();
        let mut numbers = tokens.split(is_dot).skip(match tokens.iter().filter(|byte| is_dot(byte)).count() {
            6 => 2,
            8.. => 4,
            _ => return None,
        });
        let mut next = || numbers.next().and_then(|number| str::from_utf8(number).ok());
        let position = Self {
            delivered: next()?.parse().ok()?,
            stream_seq: next()?.parse().ok()?,
            consumer_seq: next()?.parse().ok()?,
            published_ns: next()?.parse().ok()?,
        };
        next()?.parse::<u64>().ok().map(|_pending| position)
    }
}

/// One delivery, ready for the [inbox](crate::worker::inbox).
#[derive(Clone, Debug)]
pub struct Delivery {
    pub raw: Raw,
    /// The message id: the same for every delivery of the message, and for its repetitions by the publisher.
    pub id: Arc<str>,
    pub digest: Digest,
    /// Why the message is to be dead-lettered unapplied, whatever the handler would say.
    pub defect: Option<(Reason, String)>,
    /// Why the place in the stream is the id, although the settings expect one of the publisher.
    pub missing_id: Option<String>,
    /// Why the message is not an order. Nothing else about it matters then.
    pub ignored: Option<Ignored>,
    /// Which attempt this is, from 1: our count, known before a call.
    pub attempt: u32,
    /// What the handler has decided of the order. It is not asked about a message with a defect, or one that is not an order.
    pub plan: Plan,
    /// Orders of one key run strictly one after the other, in stream order.
    pub key: Option<Arc<str>>,
}

impl Delivery {
    /// Derives id and digest.
    pub fn new(raw: Raw, schemes: &IdSchemes) -> Self {
        let scheme = schemes.of(raw.position);
        let given = match &raw.unreadable {
            Some(_) => Ok(None),
            None => scheme.derive(&raw),
        };
        let mut defect = raw.unreadable.clone().map(|why| (Reason::Unreadable, why));
        let mut missing_id = None;
        let (id, digest_subject) = match given {
            Ok(Some(Given { id, on_any_subject: true })) => (id, ""),
            Ok(Some(Given { id, on_any_subject: false })) => (id, &*raw.subject),
            Ok(None) => (scheme.position(&raw), &*raw.subject),
            Err(no_id) => {
                match no_id {
                    NoId::Missing(why) if !schemes.missing_is_dead => missing_id = Some(why),
                    NoId::Missing(why) | NoId::Undecodable(why) => defect = Some((Reason::Undecodable, why)),
                }
                (scheme.position(&raw), &*raw.subject)
            }
        };
        let digest = Digest::of(digest_subject, &raw.payload);
        let ignored = ignored(&raw.headers);
        Self { raw, id, digest, defect, missing_id, ignored, attempt: 1, plan: Plan::default(), key: None }
    }

    /// Whether the handler may have to run for this message.
    pub fn is_for_the_handler(&self) -> bool {
        self.defect.is_none() && self.ignored.is_none() && self.plan != Plan::Ignore
    }

    /// What this delivery weighs against `batch.max_bytes`.
    pub fn bytes(&self) -> usize {
        self.raw.payload.len() + self.raw.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
    }
}

/// A JSON object: name -> array of values.
pub fn headers_json(headers: &Headers) -> String {
    let mut values: HashMap<&str, Vec<&str>> = HashMap::new();
    for (name, value) in headers {
        values.entry(name).or_default().push(value);
    }
    serde_json::json!(values).to_string()
}

/// Header names as written: the server and its clients look them up with their case.
fn ignored(headers: &Headers) -> Option<Ignored> {
    headers.iter().find_map(|(name, value)| match (name.as_str(), value.as_str()) {
        (_, "") => None,
        ("Nats-Marker-Reason", _) => Some(Ignored::DeleteMarker),
        ("Nats-Schedule", _) => Some(Ignored::Schedule),
        ("KV-Operation", "DEL" | "PURGE") => Some(Ignored::KeyDeleted),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_forms_of_the_reply_subject_are_read_and_nothing_else_is() {
        let position =
            Position { delivered: 3, stream_seq: 100, consumer_seq: 7, published_ns: 1_790_230_470_084_404_000 };
        let tail = "3.100.7.1790230470084404000.42";
        for good in [
            format!("$JS.ACK.ORDERS.order-processor.{tail}"),
            format!("$JS.ACK._.hash.ORDERS.order-processor.{tail}"),
            format!("$JS.ACK.hub.hash.ORDERS.order-processor.{tail}.token.more"),
        ] {
            assert_eq!(Position::parse(&good), Some(position), "{good}");
        }
        for bad in ["", "$JS.ACK.", "_INBOX.x", "$JS.ACK.a.b.1.2.3.4", "$JS.ACK.a.b.x.2.3.4.5", "$JS.ACK.a.b.1.2.3.4.x"]
        {
            assert_eq!(Position::parse(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_of_positions_panic(reply in ".*") {
            prop_assert_eq!(Position::parse(&reply), None);
        }
    }
}
