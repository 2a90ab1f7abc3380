//! The message id and the digest of a message. No I/O.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::delivery::{Position, Raw};

/// The header in which publishers put the id of a message (also the server's own deduplication header).
pub const MESSAGE_ID_HEADER: &str = "Nats-Msg-Id";

/// How message ids are made.
///
/// The `Nats-Msg-Id` header; otherwise the configured JSON pointer into the payload; otherwise the place in the stream,
/// `<stream>@<published, unix ns>:<stream_seq>`. A sequence alone does not identify a message: a recreated stream starts
/// again at 1, and a server that lost its tail uses sequences twice. The published time tells such messages apart. The creation
/// time of the stream must not be part of the id: a stream that is restored from a snapshot has another one, and the same messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdScheme {
    pub stream: String,
    /// An RFC 6901 pointer, already validated by the settings.
    pub pointer: Option<String>,
    pub unique_in: UniqueIn,
}

/// Within what a publisher uses an id for one order only. Ids of different scopes never meet: each begins with its scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UniqueIn {
    /// `ORDERS.new 4711`. `Nats-Msg-Id` counts in the whole stream.
    Subject,
    /// `ORDERS 4711`. `Nats-Msg-Id` counts in the whole stream.
    Stream,
    /// Messages with the same value of this header: `X-Tenant=acme 4711`, and `X-Tenant=acme:4711` for a `Nats-Msg-Id`.
    Header(String),
}

/// An id that the publisher gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) id: Arc<str>,
    /// The order is the same one on another subject.
    pub(super) on_any_subject: bool,
}

/// Why a message has no id of its publisher although the settings expect one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoId {
    /// It is not in the message.
    Missing(String),
    /// The payload is not JSON.
    Undecodable(String),
}

impl IdScheme {
    /// The id of a message, if its publisher gave one and the settings say where.
    pub(super) fn derive(&self, raw: &Raw) -> Result<Option<Given>, NoId> {
        let header = value_of(raw, MESSAGE_ID_HEADER);
        let (id, mark) = match (header, &self.pointer) {
            (Some(id), _) => (id.to_owned(), ':'),
            (None, Some(pointer)) => (pointed_at(raw, pointer)?, ' '),
            (None, None) => return Ok(None),
        };
        // A subject, the name of a stream and an escaped value have no spaces, so a scope and an id run together in one way only.
        let scoped: Arc<str> = match &self.unique_in {
            UniqueIn::Subject | UniqueIn::Stream if header.is_some() => id.into(),
            UniqueIn::Subject => format!("{} {id}", raw.subject).into(),
            UniqueIn::Stream => format!("{} {id}", self.stream).into(),
            UniqueIn::Header(name) => {
                let value = value_of(raw, name).ok_or_else(|| {
                    NoId::Missing(format!("the message has no header {name}, which inbox.id_scope names"))
                })?;
                format!("{name}={}{mark}{id}", escaped(value)).into()
            }
        };
        let on_any_subject = header.is_none() && self.unique_in != UniqueIn::Subject;
        Ok(Some(Given { id: scoped, on_any_subject }))
    }

    pub(super) fn position(&self, raw: &Raw) -> Arc<str> {
        let Position { stream_seq, published_ns, .. } = raw.position;
        format!("{}@{published_ns}:{stream_seq}", self.stream).into()
    }
}

/// In the words of the settings.
impl fmt::Display for IdScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pointer {
            Some(pointer) => write!(f, "id_pointer {pointer}, ")?,
            None => f.write_str("no id_pointer, ")?,
        }
        write!(f, "id_scope {}", self.unique_in)
    }
}

/// As the settings and the database have it.
impl fmt::Display for UniqueIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Subject => f.write_str("subject"),
            Self::Stream => f.write_str("stream"),
            Self::Header(name) => write!(f, "header:{name}"),
        }
    }
}

impl UniqueIn {
    /// Reads what [`Display`](fmt::Display) writes.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "subject" => Some(Self::Subject),
            "stream" => Some(Self::Stream),
            _ => text.strip_prefix("header:").map(|name| Self::Header(name.to_owned())),
        }
    }
}

/// The first value of a header that is not empty.
fn value_of<'a>(raw: &'a Raw, name: &str) -> Option<&'a str> {
    raw.headers.iter().find(|(header, value)| header == name && !value.is_empty()).map(|(_, value)| value.as_str())
}

/// Without what ends a scope: white space and colons are written as `%` and the bytes in hexadecimal, and so is `%`.
fn escaped(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for c in value.chars() {
        if c.is_whitespace() || c.is_control() || matches!(c, ':' | '%') {
            let mut bytes = [0; 4];
            c.encode_utf8(&mut bytes).bytes().for_each(|byte| escaped.push_str(&format!("%{byte:02X}")));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// The value at the pointer, or why there is none.
fn pointed_at(raw: &Raw, pointer: &str) -> Result<String, NoId> {
    match scalar_at(&raw.payload, pointer) {
        Ok(Some(value)) => Ok(value),
        Ok(None) => Err(NoId::Missing(format!("the payload has no text and no number at inbox.id_pointer {pointer}"))),
        Err(_) => Err(NoId::Undecodable(format!(
            "inbox.id_pointer {pointer} needs a JSON payload, but the payload is not valid JSON"
        ))),
    }
}

/// The string or number at an RFC 6901 pointer, as it is written; `None` if there is no such value.
///
/// Values stay raw text: a number beyond 2^53 or an exponent beyond `f64` must not turn two ids into one, and must not make
/// a payload undecodable.
fn scalar_at(payload: &[u8], pointer: &str) -> Result<Option<String>, serde_json::Error> {
    let mut value: &RawValue = serde_json::from_slice(payload)?;
    for token in pointer.split('/').skip(1) {
        let token = token.replace("~1", "/").replace("~0", "~");
        let child = match value.get().as_bytes().first() {
            Some(b'{') => serde_json::from_str::<HashMap<String, &RawValue>>(value.get())?.remove(&token),
            // An index is digits without a sign and without zeros before it (RFC 6901, section 4).
            Some(b'[') => match token.parse::<usize>() {
                Ok(index) if index.to_string() == token => {
                    serde_json::from_str::<Vec<&RawValue>>(value.get())?.get(index).copied()
                }
                Ok(_) | Err(_) => None,
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

/// 128 bits of BLAKE3 over subject and payload. It distinguishes a repetition from another order under the same id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 16]);

impl Digest {
    pub fn of(subject: &str, payload: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        // The length keeps "ab" + "c" apart from "a" + "bc".
        hasher.update(&(subject.len() as u64).to_le_bytes());
        hasher.update(subject.as_bytes());
        hasher.update(payload);
        Self(head(&hasher.finalize()))
    }

    /// As it stands in a table. Any other length is not a digest of ours, and equals none.
    pub fn stored(bytes: &[u8]) -> Self {
        Self(bytes.try_into().unwrap_or_default())
    }
}

/// The first bytes of a hash, which are as good as any others.
pub fn head<const N: usize>(hash: &blake3::Hash) -> [u8; N] {
    let bytes = hash.as_bytes();
    std::array::from_fn(|index| bytes[index])
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use serde_json::{Value, json};

    use super::*;
    use crate::model::delivery::Delivery;
    use crate::model::schemes::IdSchemes;

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
        scoped_id(pointer, UniqueIn::Subject, raw)
    }

    fn scoped_id(pointer: Option<&str>, unique_in: UniqueIn, raw: Raw) -> Result<String, String> {
        let scheme = IdScheme { stream: "ORDERS".into(), pointer: pointer.map(ToOwned::to_owned), unique_in };
        let delivery = Delivery::new(raw, &scheme.into());
        match delivery.defect {
            None => Ok(delivery.id.to_string()),
            Some((_, error)) => Err(error),
        }
    }

    const POSITION: &str = "ORDERS@1700000000000000001:7";

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
    fn ids_begin_with_the_scope_of_the_settings() {
        let order = |headers: &[(&str, &str)]| raw(headers, r#"{"id":7}"#);
        let id = |unique_in: &UniqueIn, raw| scoped_id(Some("/id"), unique_in.clone(), raw).unwrap();
        assert_eq!(id(&UniqueIn::Stream, order(&[])), "ORDERS 7");
        assert_eq!(id(&UniqueIn::Stream, order(&[(MESSAGE_ID_HEADER, "h")])), "h", "as without a scope");
        let tenant = UniqueIn::Header("X-Tenant".into());
        assert_eq!(id(&tenant, order(&[("X-Tenant", "acme")])), "X-Tenant=acme 7");
        assert_eq!(id(&tenant, order(&[("X-Tenant", "a:b c%")])), "X-Tenant=a%3Ab%20c%25 7");
        assert_eq!(id(&tenant, order(&[("X-Tenant", "acme"), (MESSAGE_ID_HEADER, "h")])), "X-Tenant=acme:h");
        assert_eq!(id(&tenant, order(&[(MESSAGE_ID_HEADER, "h")])), POSITION, "the id of an unknown tenant");
        assert_eq!(id(&tenant, order(&[("X-Tenant", ""), (MESSAGE_ID_HEADER, "h")])), POSITION);
    }

    #[test]
    fn a_missing_id_is_named_or_makes_a_dead_letter() {
        let scheme = |pointer: Option<&str>, unique_in| {
            IdSchemes::from(IdScheme { stream: "ORDERS".into(), pointer: pointer.map(ToOwned::to_owned), unique_in })
        };
        let by_pointer = scheme(Some("/id"), UniqueIn::Subject);
        let lacking = Delivery::new(raw(&[], "{}"), &by_pointer);
        assert!(lacking.missing_id.unwrap().contains("inbox.id_pointer /id"));
        assert_eq!(lacking.defect, None);
        let dead = Delivery::new(raw(&[], "{}"), &IdSchemes { missing_is_dead: true, ..by_pointer });
        assert!(dead.defect.unwrap().1.contains("inbox.id_pointer /id"));
        assert_eq!((&*dead.id, dead.missing_id), (POSITION, None));

        let by_tenant = scheme(None, UniqueIn::Header("X-Tenant".into()));
        let of_nobody = Delivery::new(raw(&[(MESSAGE_ID_HEADER, "h")], "x"), &by_tenant);
        assert!(of_nobody.missing_id.unwrap().contains("header X-Tenant"));
        assert_eq!(Delivery::new(raw(&[], "x"), &by_tenant).missing_id, None, "nobody expects an id");
    }

    #[test]
    fn an_order_is_the_same_one_on_another_subject_if_its_id_says_so() {
        let digest = |unique_in, headers: &[(&str, &str)], subject: &str| {
            let scheme = IdScheme { stream: "ORDERS".into(), pointer: Some("/id".into()), unique_in };
            Delivery::new(Raw { subject: subject.into(), ..raw(headers, r#"{"id":7}"#) }, &scheme.into()).digest
        };
        let (one, other) = ("ORDERS.new", "ORDERS.retry");
        assert_eq!(digest(UniqueIn::Stream, &[], one), digest(UniqueIn::Stream, &[], other));
        assert_ne!(digest(UniqueIn::Subject, &[], one), digest(UniqueIn::Subject, &[], other));
        let by_header = [(MESSAGE_ID_HEADER, "h")];
        assert_ne!(digest(UniqueIn::Stream, &by_header, one), digest(UniqueIn::Stream, &by_header, other));
    }

    #[test]
    fn number_is_taken_as_written() {
        let payload = r#"{"id": 90071992547409931234, "total": 1e400}"#;
        assert_eq!(id(Some("/id"), raw(&[], payload)).unwrap(), "ORDERS.new 90071992547409931234");
    }

    #[test]
    fn value_that_is_no_scalar_or_is_missing_falls_back_to_the_position() {
        for pointer in ["/00", "/+0"] {
            assert_eq!(id(Some(pointer), raw(&[], "[1]")).unwrap(), POSITION, "{pointer}");
        }
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
    fn digest_covers_subject_and_payload_apart() {
        assert_eq!(Digest::of("a", b"b"), Digest::of("a", b"b"));
        assert_ne!(Digest::of("ab", b"c"), Digest::of("a", b"bc"));
        assert_ne!(Digest::of("a", b"b"), Digest::of("a", b"c"));
    }

    /// Where a generated message says its id is; equal sources are equal ids, and only they.
    #[derive(Clone, Debug, PartialEq)]
    enum Source {
        Header(String),
        Pointer { subject: String, value: String },
        InStream { stream: String, value: String },
        OfTenant { header: String, tenant: String, by_pointer: bool, id: String },
        Position { stream: String, seq: u64, published_ns: i64 },
    }

    prop_compose! {
        /// Messages of few subjects, ids and positions, so that two of them often have some in common.
        fn messages()(
            // The separators of an id are in what it is made of.
            stream in select(vec!["A", "A@1", "A:1"]),
            subject in select(vec!["A.x", "A.x.1"]),
            unique_in in select(vec![
                UniqueIn::Subject,
                UniqueIn::Stream,
                UniqueIn::Header("T".into()),
                UniqueIn::Header("U".into()),
            ]),
            tenant in proptest::option::weighted(0.9, select(vec!["", "a", "a b", "a:h", "a%20b", "A.x", "a 1"])),
            header in proptest::option::weighted(0.3, select(vec!["", "h", "h 1", "é"])),
            value in proptest::option::weighted(0.8, select(vec!["", "1", "1 1", "1.1"])),
            as_number in any::<bool>(),
            seq in prop_oneof![0..3_u64, Just(u64::MAX)],
            published_ns in prop_oneof![0..3_i64, Just(i64::MAX)],
        ) -> (Raw, IdSchemes, Source) {
            let is_number = as_number && value == Some("1");
            let payload = match value {
                Some(value) if is_number => json!({ "id": value.parse::<u64>().unwrap() }),
                Some(value) => json!({ "id": value }),
                None => json!({}),
            };
            let (stream, subject) = (stream.to_owned(), subject.to_owned());
            let place = Source::Position { stream: stream.clone(), seq, published_ns };
            let of_tenant = |by_pointer, id: &str| match (&unique_in, tenant.filter(|tenant| !tenant.is_empty())) {
                (UniqueIn::Header(header), Some(tenant)) => {
                    let (header, tenant, id) = (header.clone(), tenant.to_owned(), id.to_owned());
                    Source::OfTenant { header, tenant, by_pointer, id }
                }
                _ => place.clone(),
            };
            let source = match (header.filter(|id| !id.is_empty()), value.filter(|id| !id.is_empty()), &unique_in) {
                (Some(header), _, UniqueIn::Header(_)) => of_tenant(false, header),
                (None, Some(value), UniqueIn::Header(_)) => of_tenant(true, value),
                (Some(header), _, UniqueIn::Subject | UniqueIn::Stream) => Source::Header(header.to_owned()),
                (None, Some(value), UniqueIn::Subject) => {
                    Source::Pointer { subject: subject.clone(), value: value.to_owned() }
                }
                (None, Some(value), UniqueIn::Stream) => {
                    Source::InStream { stream: stream.clone(), value: value.to_owned() }
                }
                (None, None, _) => place,
            };
            let tenant = tenant.map(|tenant| match &unique_in {
                UniqueIn::Header(name) => (name.clone(), tenant.to_owned()),
                UniqueIn::Subject | UniqueIn::Stream => ("T".to_owned(), tenant.to_owned()),
            });
            let header = header.map(|id| (MESSAGE_ID_HEADER.to_owned(), id.to_owned()));
            let raw = Raw {
                subject: subject.into(),
                headers: header.into_iter().chain(tenant).collect(),
                payload: payload.to_string().into(),
                position: Position { delivered: 1, stream_seq: seq, consumer_seq: 1, published_ns },
                unreadable: None,
            };
            (raw, IdScheme { stream, pointer: Some("/id".into()), unique_in }.into(), source)
        }
    }

    fn json_values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(|number| json!(number)),
            prop::num::f64::NORMAL.prop_map(|number| json!(number)),
            ".{0,3}".prop_map(Value::String),
        ];
        leaf.prop_recursive(3, 24, 3, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..3).prop_map(Value::Array),
                vec((select(KEYS), inner), 0..3)
                    .prop_map(|members| members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()),
            ]
        })
    }

    /// Names of members, indices, and what only looks like an index.
    const KEYS: &[&str] = &["a", "", "/", "~", "~1", "0", "1", "00", "+1", "-", "é\""];

    proptest! {
        // Cheap ones, and two messages must meet by chance.
        #![proptest_config(ProptestConfig::with_cases(1024))]

        #[test]
        fn two_messages_have_one_id_only_if_it_comes_from_the_same_place(
            (one, one_scheme, one_source) in messages(),
            (other, other_scheme, other_source) in messages(),
        ) {
            let (one, other) = (Delivery::new(one, &one_scheme), Delivery::new(other, &other_scheme));
            prop_assert_eq!((&one.defect, &other.defect), (&None, &None));
            // A publisher can write anything into its header, also what looks like the id of another message.
            prop_assert_eq!(one.id == other.id, one_source == other_source, "{} and {}", one.id, other.id);
        }

        #[test]
        fn another_delivery_of_a_message_has_its_id_and_digest(
            (raw, scheme, _) in messages(),
            delivered in any::<u64>(),
            consumer_seq in any::<u64>(),
            other_header in ".{0,5}",
        ) {
            let mut again = raw.clone();
            again.position = Position { delivered, consumer_seq, ..raw.position };
            again.headers.insert(0, ("Other".to_owned(), other_header));
            let (first, again) = (Delivery::new(raw, &scheme), Delivery::new(again, &scheme));
            prop_assert_eq!((first.id, first.digest), (again.id, again.digest));
        }

        #[test]
        fn the_pointer_finds_what_rfc_6901_says(payload in json_values(), path in vec(select(KEYS), 1..4)) {
            let pointer: String =
                path.iter().map(|key| format!("/{}", key.replace('~', "~0").replace('/', "~1"))).collect();
            let expected = match payload.pointer(&pointer) {
                Some(Value::String(text)) if !text.is_empty() => Some(text.clone()),
                Some(number @ Value::Number(_)) => Some(number.to_string()),
                Some(_) | None => None,
            };
            prop_assert_eq!(scalar_at(payload.to_string().as_bytes(), &pointer).unwrap(), expected, "{}", pointer);
        }

        #[test]
        fn no_payload_and_no_pointer_is_too_strange(payload in vec(any::<u8>(), 0..20), pointer in "[/~01a]{0,6}") {
            let scheme = IdScheme { stream: "A".into(), pointer: Some(pointer), unique_in: UniqueIn::Subject };
            let position = Position { delivered: 1, stream_seq: 1, consumer_seq: 1, published_ns: 1 };
            let raw = Raw { subject: "A.x".into(), headers: vec![], payload: payload.into(), position, unreadable: None };
            prop_assert!(!Delivery::new(raw, &scheme.into()).id.is_empty());
        }

        #[test]
        fn digests_are_equal_only_of_the_same_subject_and_payload(
            // Cut out of one text, so that only the place of the cut tells them apart.
            (text, cuts) in "[ab\0]{0,9}".prop_flat_map(|text| { let end = text.len(); (Just(text), [0..=end, 0..=end]) }),
        ) {
            let [(one, one_rest), (other, other_rest)] = cuts.map(|cut| text.split_at(cut));
            let equal = Digest::of(one, one_rest.as_bytes()) == Digest::of(other, other_rest.as_bytes());
            prop_assert_eq!(equal, one == other);
        }

        #[test]
        fn a_reply_subject_says_the_position_that_it_was_made_of(
            (delivered, stream_seq, consumer_seq, pending) in any::<(u64, u64, u64, u64)>(),
            published_ns in 0..=i64::MAX,
            names in "[^. \t\r\n]{1,9}\\.[^. \t\r\n]{1,9}",
            domain in proptest::option::of("(_|hub)\\.[A-Za-z0-9]{1,9}\\."),
            more in "(\\.[a-zA-Z0-9]{1,5}){0,3}",
        ) {
            let more = domain.as_ref().map_or("", |_| &more);
            let domain = domain.as_deref().unwrap_or_default();
            let reply = format!(
                "$JS.ACK.{domain}{names}.{delivered}.{stream_seq}.{consumer_seq}.{published_ns}.{pending}{more}"
            );
            let position = Position { delivered, stream_seq, consumer_seq, published_ns };
            prop_assert_eq!(Position::parse(&reply), Some(position));
        }

        #[test]
        fn any_other_text_is_no_position(
            start in select(vec!["$JS.ACK", "$JS.ACK.", "$JS.ACK.s.c", "$JS", ""]),
            tokens in vec(prop_oneof![1 => "(|x|-1|[0-9]{1,21})", 20 => "[0-9]{1,3}"], 0..13),
        ) {
            let reply = format!("{start}.{}", tokens.join("."));
            let all: Vec<&str> = reply.split('.').collect();
            let numbers = match all.len() {
                9 => &all[4..],
                11.. => &all[6..11],
                _ => &[],
            };
            let is_position = reply.starts_with("$JS.ACK.")
                && numbers.len() == 5
                && numbers.iter().enumerate().all(|(index, number)| match index {
                    3 => number.parse::<i64>().is_ok(),
                    _ => number.parse::<u64>().is_ok(),
                });
            prop_assert_eq!(Position::parse(&reply).is_some(), is_position, "{}", reply);
        }

    }
}
