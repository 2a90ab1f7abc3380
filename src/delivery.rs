//! One delivery of one message: what the server said about it, its message id and its digest. No I/O.
//!
//! A message is stored once and may be delivered many times; everything here belongs to one handing-out of it.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::value::RawValue;

use crate::outcome::Reason;

/// The header in which publishers put the id of a message (also the server's own deduplication header).
pub const MESSAGE_ID_HEADER: &str = "Nats-Msg-Id";

/// Headers in no order across names; several values of one name stay in their order.
pub type Headers = Vec<(String, String)>;

/// What the server handed out, before we made an id of it.
#[derive(Clone, Debug)]
pub struct Raw {
    pub subject: String,
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

/// Nanoseconds since 1970 UTC, as the server and the tables count time.
pub fn unix_ns(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
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
        let tokens = reply.strip_prefix("$JS.ACK.")?;
        let mut numbers = tokens.split('.').skip(match tokens.split('.').count() {
            7 => 2,
            9.. => 4,
            _ => return None,
        });
        let mut next = || numbers.next();
        let position = Self {
            delivered: next()?.parse().ok()?,
            stream_seq: next()?.parse().ok()?,
            consumer_seq: next()?.parse().ok()?,
            published_ns: next()?.parse().ok()?,
        };
        next()?.parse::<u64>().ok().map(|_pending| position)
    }
}

/// One delivery, ready for the [inbox](crate::inbox).
#[derive(Clone, Debug)]
pub struct Delivery {
    pub raw: Raw,
    /// The message id: the same for every delivery of the message, and for its repetitions by the publisher.
    pub id: String,
    pub digest: Digest,
    /// Why the message is to be dead-lettered unapplied, whatever the handler would say.
    pub defect: Option<(Reason, String)>,
}

impl Delivery {
    /// Derives id and digest.
    pub fn new(raw: Raw, scheme: &IdScheme) -> Self {
        let digest = Digest::of(&raw.subject, &raw.payload);
        let (id, defect) = match (&raw.unreadable, scheme.derive(&raw)) {
            (Some(why), _) => (scheme.position(&raw), Some((Reason::Unreadable, why.clone()))),
            (None, Err(error)) => (scheme.position(&raw), Some((Reason::Undecodable, error))),
            (None, Ok(id)) => (id, None),
        };
        Self { raw, id, digest, defect }
    }

    /// What this delivery weighs against `batch.max_bytes`.
    pub fn bytes(&self) -> usize {
        self.raw.payload.len() + self.raw.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
    }
}

/// How message ids are made.
///
/// The `Nats-Msg-Id` header; else the configured JSON pointer into the payload, scoped by subject; else the position in the
/// stream. The position carries the stream's creation time and the message's own time, because a recreated stream starts
/// again at 1 and a server that lost its tail uses sequences twice: a bare sequence would make a new order look processed.
#[derive(Clone, Debug)]
pub struct IdScheme {
    pub stream: String,
    /// When the stream was created, in nanoseconds since 1970 UTC.
    pub stream_created_ns: i64,
    /// An RFC 6901 pointer, already validated by the settings.
    pub pointer: Option<String>,
}

impl IdScheme {
    /// The id of a message, or why its payload cannot give the one that the pointer asks for.
    fn derive(&self, raw: &Raw) -> Result<String, String> {
        let header = raw.headers.iter().find(|(name, value)| name == MESSAGE_ID_HEADER && !value.is_empty());
        if let Some((_, id)) = header {
            return Ok(id.clone());
        }
        if let Some(pointer) = &self.pointer {
            let value = scalar_at(&raw.payload, pointer)
                .map_err(|error| format!("inbox.id_pointer {pointer} needs a JSON payload: {error}"))?;
            // A subject has no spaces, so two pairs of subject and value never run together into one id.
            if let Some(value) = value {
                return Ok(format!("{} {value}", raw.subject));
            }
        }
        Ok(self.position(raw))
    }

    fn position(&self, raw: &Raw) -> String {
        format!("{}@{}:{}:{}", self.stream, self.stream_created_ns, raw.position.stream_seq, raw.position.published_ns)
    }
}

/// The string or number at an RFC 6901 pointer, as it is written; `None` if there is none there.
///
/// Values stay raw text: a number beyond 2^53 or an exponent beyond `f64` must not turn two ids into one, and must not make
/// a payload undecodable.
fn scalar_at(payload: &[u8], pointer: &str) -> Result<Option<String>, serde_json::Error> {
    let mut value: &RawValue = serde_json::from_slice(payload)?;
    for token in pointer.split('/').skip(1) {
        let token = token.replace("~1", "/").replace("~0", "~");
        let child = match value.get().as_bytes().first() {
            Some(b'{') => serde_json::from_str::<HashMap<String, &RawValue>>(value.get())?.remove(&token),
            Some(b'[') => match token.parse::<usize>() {
                Ok(index) => serde_json::from_str::<Vec<&RawValue>>(value.get())?.get(index).copied(),
                Err(_) => None,
            },
            _ => None,
        };
        match child {
            Some(child) => value = child,
            None => return Ok(None),
        }
    }
    let text = value.get();
    match text.as_bytes().first() {
        Some(b'"') => serde_json::from_str::<String>(text).map(|text| Some(text).filter(|text| !text.is_empty())),
        Some(b'-' | b'0'..=b'9') => Ok(Some(text.to_owned())),
        _ => Ok(None),
    }
}

/// 128 bits of BLAKE3 over subject and payload: tells a repetition from another order under the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

impl Digest {
    pub fn of(subject: &str, payload: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        // The length keeps "ab" + "c" apart from "a" + "bc".
        hasher.update(&(subject.len() as u64).to_le_bytes());
        hasher.update(subject.as_bytes());
        hasher.update(payload);
        let mut digest = [0; 16];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Self(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(headers: &[(&str, &str)], payload: &str) -> Raw {
        Raw {
            subject: "ORDERS.new".into(),
            headers: headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
            payload: Bytes::copy_from_slice(payload.as_bytes()),
            position: Position {
                delivered: 1,
                stream_seq: 7,
                consumer_seq: 9,
                published_ns: 1_700_000_000_000_000_001,
            },
            unreadable: None,
        }
    }

    fn id(pointer: Option<&str>, raw: Raw) -> Result<String, String> {
        let scheme =
            IdScheme { stream: "ORDERS".into(), stream_created_ns: 42, pointer: pointer.map(ToOwned::to_owned) };
        let delivery = Delivery::new(raw, &scheme);
        match delivery.defect {
            None => Ok(delivery.id),
            Some((_, error)) => Err(error),
        }
    }

    const POSITION: &str = "ORDERS@42:7:1700000000000000001";

    #[test]
    fn header_wins_over_pointer() {
        assert_eq!(id(Some("/id"), raw(&[("Nats-Msg-Id", "h")], r#"{"id":"p"}"#)).unwrap(), "h");
    }

    #[test]
    fn empty_header_is_no_id() {
        assert_eq!(id(None, raw(&[("Nats-Msg-Id", "")], "x")).unwrap(), POSITION);
    }

    #[test]
    fn pointer_is_scoped_by_subject() {
        assert_eq!(id(Some("/data/0/id"), raw(&[], r#"{"data":[{"id":"A"}]}"#)).unwrap(), "ORDERS.new A");
    }

    #[test]
    fn pointer_tokens_are_unescaped() {
        assert_eq!(id(Some("/a~1b/c~0d"), raw(&[], r#"{"a/b":{"c~d":"x"}}"#)).unwrap(), "ORDERS.new x");
    }

    #[test]
    fn number_is_taken_as_written() {
        let payload = r#"{"id": 90071992547409931234, "total": 1e400}"#;
        assert_eq!(id(Some("/id"), raw(&[], payload)).unwrap(), "ORDERS.new 90071992547409931234");
    }

    #[test]
    fn value_that_is_no_scalar_or_is_missing_falls_back_to_the_position() {
        for payload in [r#"{"id":null}"#, r#"{"id":{}}"#, r#"{"id":true}"#, r#"{"id":""}"#, r#"{}"#, "[]", "3"] {
            assert_eq!(id(Some("/id"), raw(&[], payload)).unwrap(), POSITION, "{payload}");
        }
    }

    #[test]
    fn payload_that_is_no_json_is_undecodable_only_with_a_pointer() {
        for payload in ["", r#"{"id": "half"#, r#"{"id":1} x"#, "\u{0}"] {
            assert!(id(Some("/id"), raw(&[], payload)).is_err(), "{payload}");
            assert_eq!(id(None, raw(&[], payload)).unwrap(), POSITION);
        }
    }

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

    #[test]
    fn digest_covers_subject_and_payload_apart() {
        assert_eq!(Digest::of("a", b"b"), Digest::of("a", b"b"));
        assert_ne!(Digest::of("ab", b"c"), Digest::of("a", b"bc"));
        assert_ne!(Digest::of("a", b"b"), Digest::of("a", b"c"));
    }
}
