//! The request for one order: its headers, and the key under which it is sent each time.

use std::borrow::Cow;
use std::time::SystemTime;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Method, Request};
use percent_encoding::{CONTROLS, percent_encode};
use serde::de::IgnoredAny;

use super::files::Files;
use super::settings::Settings;
use crate::model::delivery::{Delivery, Headers};
use crate::model::time::{nanos_text, unix_ns};

const KEY_LENGTH_MAX: usize = 128;
/// Keys that are a hash begin like this. An id that begins like this is hashed too, so that nobody can choose the key of another
/// order.
const HASHED: &str = "b3_";
const HASH_DIGITS: usize = 32;
/// Of the headers of the message, only these are sent.
const FORWARDED: [HeaderName; 2] = [HeaderName::from_static("traceparent"), HeaderName::from_static("tracestate")];

pub(super) type Outgoing = Request<Full<Bytes>>;

/// The key of an order: the same for each of its calls.
pub(super) fn key(id: &str) -> Cow<'_, str> {
    let is_plain = (1..=KEY_LENGTH_MAX).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'));
    if is_plain && !id.starts_with(HASHED) {
        return Cow::Borrowed(id);
    }
    let hash = blake3::hash(id.as_bytes()).to_hex();
    Cow::Owned(format!("{HASHED}{}", &hash[..HASH_DIGITS]))
}

/// The request as it goes out on a connection that was opened with `files`.
pub(super) fn build(
    settings: &Settings,
    stream: &str,
    files: &Files,
    delivery: &Delivery,
    now: SystemTime,
) -> Outgoing {
    let mut request = Request::new(Full::new(delivery.raw.payload.clone()));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = settings.target.path.clone();
    *request.headers_mut() = headers(settings, stream, files, delivery, now);
    request
}

pub(super) fn headers(
    settings: &Settings,
    stream: &str,
    files: &Files,
    delivery: &Delivery,
    now: SystemTime,
) -> HeaderMap {
    let (raw, key) = (&delivery.raw, key(&delivery.id));
    let timestamp = unix_ns(now) / 1_000_000_000;
    let mut headers = HeaderMap::with_capacity(24);
    headers.insert(HOST, settings.target.host_header.clone());
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("order-processor/", env!("CARGO_PKG_VERSION"))));
    headers.insert(CONTENT_TYPE, content_type(&raw.headers, &raw.payload));
    let mut insert = |name: &'static str, text: &str| headers.insert(HeaderName::from_static(name), value(text));
    // A string of a structured field (RFC 8941) stands in quotes.
    insert("idempotency-key", &format!("\"{key}\""));
    insert("webhook-id", &key);
    insert("webhook-timestamp", &timestamp.to_string());
    if let Some(keys) = &files.keys {
        insert("webhook-signature", &keys.sign(&key, timestamp.unsigned_abs(), &raw.payload));
    }
    insert("nats-stream", stream);
    insert("nats-subject", &raw.subject);
    insert("nats-sequence", &raw.position.stream_seq.to_string());
    insert("nats-time-stamp", &nanos_text(raw.position.published_ns));
    insert("order-attempt", &delivery.attempt.to_string());
    for name in FORWARDED {
        if let Some(value) = find(&raw.headers, &name).and_then(|text| HeaderValue::from_str(text).ok()) {
            headers.insert(name, value);
        }
    }
    // Last, so that the file of the route may replace `User-Agent` and `Host`.
    headers.extend(settings.headers.iter().chain(&files.headers).map(|(name, value)| (name.clone(), value.clone())));
    headers
}

/// The message's own type, or what its payload is.
fn content_type(headers: &Headers, payload: &[u8]) -> HeaderValue {
    if let Some(own) = find(headers, &CONTENT_TYPE).and_then(|text| HeaderValue::from_str(text).ok()) {
        return own;
    }
    let Ok(text) = str::from_utf8(payload) else { return HeaderValue::from_static("application/octet-stream") };
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => HeaderValue::from_static("application/json"),
        Err(_) => HeaderValue::from_static("text/plain; charset=utf-8"),
    }
}

fn find<'a>(headers: &'a Headers, wanted: &HeaderName) -> Option<&'a str> {
    let found = headers.iter().find(|(name, value)| name.eq_ignore_ascii_case(wanted.as_str()) && !value.is_empty());
    found.map(|(_, value)| value.as_str())
}

/// A subject may have bytes that a header cannot have.
fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text)
        .or_else(|_| HeaderValue::from_str(&percent_encode(text.as_bytes(), CONTROLS).to_string()))
        .unwrap_or_else(|_| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::handler::http::signature::Keys;
    use crate::handler::http::{HttpRoute, Place};
    use crate::model::delivery::{Position, Raw};
    use crate::model::id::{IdScheme, UniqueIn};

    fn delivery(id: Option<&str>, more: &[(&str, &str)], payload: &'static [u8]) -> Delivery {
        let id = id.map(|id| ("Nats-Msg-Id".to_owned(), id.to_owned()));
        let more = more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let raw = Raw {
            subject: "ORDERS.new".into(),
            headers: id.into_iter().chain(more).collect(),
            payload: Bytes::from_static(payload),
            position: Position {
                delivered: 4,
                stream_seq: 7,
                consumer_seq: 9,
                published_ns: 1_700_000_000_123_456_789,
            },
            unreadable: None,
        };
        let scheme = IdScheme { stream: "ORDERS".to_owned(), pointer: None, unique_in: UniqueIn::Subject };
        Delivery { attempt: 2, ..Delivery::new(raw, &scheme.into()) }
    }

    fn sent(delivery: &Delivery) -> BTreeMap<String, String> {
        let route = HttpRoute {
            url: "http://shop.example/orders".to_owned(),
            headers: [("X-Shop".to_owned(), "eu".to_owned())].into(),
            ..HttpRoute::default()
        };
        let none = |_: &str| None;
        let shutdown_timeout = Duration::from_secs(25);
        let place = Place { folder: Path::new("/"), environment: &none, stream: "ORDERS", shutdown_timeout };
        let keys = Keys::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let token = (HeaderName::from_static("authorization"), HeaderValue::from_static("Bearer abc"));
        let files = Files { keys: Some(keys), headers: vec![token], tls: None };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_614_265_330);
        let headers = headers(&route.check(&place).unwrap(), "ORDERS", &files, delivery, now);
        headers.iter().map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned())).collect()
    }

    #[test]
    fn the_headers_are_those_of_the_contract_and_no_others() {
        let trace = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let delivery = delivery(
            Some("msg_p5jXN8AQM9LWM0D4loKWxJek"),
            &[trace, ("X-Internal", "secret")],
            br#"{"test": 2432232314}"#,
        );
        let expected = [
            ("authorization", "Bearer abc"),
            ("content-type", "application/json"),
            ("host", "shop.example"),
            ("idempotency-key", "\"msg_p5jXN8AQM9LWM0D4loKWxJek\""),
            ("nats-sequence", "7"),
            ("nats-stream", "ORDERS"),
            ("nats-subject", "ORDERS.new"),
            ("nats-time-stamp", "2023-11-14T22:13:20.123456789Z"),
            ("order-attempt", "2"),
            trace,
            ("user-agent", concat!("order-processor/", env!("CARGO_PKG_VERSION"))),
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            // As the reference library for Python makes it.
            ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
            ("webhook-timestamp", "1614265330"),
            ("x-shop", "eu"),
        ];
        let expected: BTreeMap<_, _> = expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        assert_eq!(sent(&delivery), expected);
    }

    #[test]
    fn the_type_is_that_of_the_message_or_of_its_payload() {
        let of = |headers: &[(&str, &str)], payload| sent(&delivery(None, headers, payload))["content-type"].clone();
        assert_eq!(of(&[("content-type", "application/xml")], b"<order/>"), "application/xml");
        assert_eq!(of(&[], b"7"), "application/json");
        assert_eq!(of(&[], b"Order Data 3"), "text/plain; charset=utf-8");
        assert_eq!(of(&[], b""), "text/plain; charset=utf-8");
        assert_eq!(of(&[], b"\"\xff\""), "application/octet-stream");
    }

    #[test]
    fn an_id_that_cannot_be_a_key_is_hashed() {
        assert_eq!(key("o-1_A"), "o-1_A");
        // `printf 'ORDERS@1:2' | b3sum`
        let position = key("ORDERS@1:2").into_owned();
        assert_eq!(position, format!("b3_{}", &blake3::hash(b"ORDERS@1:2").to_hex()[..32]));
        assert_eq!(position.len(), 35);
        assert_ne!(key(&position), position, "a publisher cannot choose the key of another order");
        assert_eq!(key(&"x".repeat(128)).len(), 128);
        assert_eq!(key(&"x".repeat(129)).len(), 35);
    }

    proptest! {
        #[test]
        fn every_id_has_a_key_that_a_header_can_have(id in "\\PC{0,200}|[\u{0}-\u{7f}]{0,20}") {
            let key = key(&id);
            prop_assert!((1..=128).contains(&key.len()));
            prop_assert!(key.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')));
        }
    }
}
