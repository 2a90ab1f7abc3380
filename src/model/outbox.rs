//! A row of the outbox: a message that a handler wants to have published. No I/O.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Deserialize;

use super::delivery::Headers;
use super::subject::SubjectPattern;

/// A row as the daemon checks it before the commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxRow {
    pub row: i64,
    /// The `Nats-Msg-Id` of the message.
    pub id: String,
    pub subject: String,
    /// JSON object: name → value or array of values.
    pub headers: Option<String>,
    pub payload_bytes: usize,
    /// The message may have been published since this time, in nanoseconds since 1970 UTC, although the row is new.
    pub sought_from: Option<i64>,
}

/// A row as the daemon publishes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxMessage {
    pub row: i64,
    pub id: String,
    pub subject: String,
    pub headers: Headers,
    pub payload: Bytes,
}

/// Where the rows of one stream can be in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxTarget {
    pub stream: String,
    /// When the stream was created, in nanoseconds since 1970 UTC.
    pub created_ns: i64,
    /// No row that is still in the outbox is in the stream up to this sequence.
    pub after_seq: u64,
}

/// What a header may be in the JSON of a row.
#[derive(Deserialize)]
#[serde(untagged)]
enum Values {
    One(String),
    Many(Vec<String>),
}

/// The headers of a row.
///
/// # Errors
/// One line that says what is wrong.
pub fn headers(json: Option<&str>) -> Result<Headers, String> {
    let Some(json) = json else { return Ok(Headers::new()) };
    let read: BTreeMap<String, Values> = serde_json::from_str(json)
        .map_err(|_| "its headers are not a JSON object of texts or of arrays of texts".to_owned())?;
    let mut headers = Headers::new();
    for (name, values) in read {
        let values = match values {
            Values::One(value) => vec![value],
            Values::Many(values) => values,
        };
        let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':');
        if !is_name {
            return Err(format!("{name:?} is not the name of a header"));
        }
        if name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("Nats-")) {
            return Err(format!("header {name}: names that begin with Nats- belong to the server"));
        }
        if values.iter().any(|value| value.contains(char::is_control)) {
            return Err(format!("header {name} has a line break or another control character"));
        }
        headers.extend(values.into_iter().map(|value| (name.clone(), value)));
    }
    Ok(headers)
}

/// Whether the server can store the message of a row. `max_payload`: the largest message that the server accepts, if known.
///
/// # Errors
/// One line that says what is wrong.
pub fn check(row: &OutboxRow, max_payload: Option<usize>) -> Result<(), String> {
    let OutboxRow { id, subject, payload_bytes, .. } = row;
    let problem = if id.is_empty() || id.contains(char::is_control) || id.starts_with(' ') || id.ends_with(' ') {
        "its id is empty, has a control character, or begins or ends with a space".to_owned()
    } else if !is_plain(subject) {
        "its subject must be tokens between dots, without white space, * and >".to_owned()
    } else if ["$JS.", "$SYS.", "_INBOX."].iter().any(|start| subject.starts_with(start)) {
        "its subject belongs to the server".to_owned()
    } else {
        match headers(row.headers.as_deref()) {
            Err(problem) => problem,
            Ok(headers) => {
                let bytes = payload_bytes + header_bytes(&headers, id);
                match max_payload {
                    Some(max) if bytes > max => format!("it has {bytes} bytes, and the server accepts {max}"),
                    Some(_) | None => return Ok(()),
                }
            }
        }
    };
    Err(format!("a row of the outbox for {subject:?} cannot be published: {problem}"))
}

fn is_plain(subject: &str) -> bool {
    let bad = |c: char| c.is_whitespace() || c.is_control() || c == '*' || c == '>';
    subject.parse::<SubjectPattern>().is_ok() && !subject.contains(bad)
}

/// The size of the header block (ADR-4 of the NATS project): the server counts it as part of the payload.
fn header_bytes(headers: &Headers, id: &str) -> usize {
    const AROUND: usize = "NATS/1.0\r\n\r\n".len() + "Nats-Msg-Id: \r\n".len();
    AROUND + id.len() + headers.iter().map(|(name, value)| name.len() + value.len() + ": \r\n".len()).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> OutboxRow {
        OutboxRow {
            row: 1,
            id: "accepted-4711".to_owned(),
            subject: "SHOP.accepted".to_owned(),
            headers: Some(r#"{"X-Shop": "eu", "X-Tag": ["a", "b"]}"#.to_owned()),
            payload_bytes: 10,
            sought_from: None,
        }
    }

    #[test]
    fn headers_are_texts_or_arrays_of_texts() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let expected = vec![pair("X-Shop", "eu"), pair("X-Tag", "a"), pair("X-Tag", "b")];
        assert_eq!(headers(row().headers.as_deref()), Ok(expected));
        assert_eq!(headers(None), Ok(vec![]));
        for bad in ["", "[]", r#"{"a": 1}"#, r#"{"a b": "1"}"#, r#"{"": "1"}"#, r#"{"a:": "1"}"#, r#"{"é": "1"}"#] {
            assert!(headers(Some(bad)).is_err(), "{bad}");
        }
        assert!(headers(Some(r#"{"nats-expected-stream": "x"}"#)).unwrap_err().contains("belong to the server"));
        assert!(headers(Some(r#"{"a": "x\r\nNats-Rollup: all"}"#)).unwrap_err().contains("line break"));
    }

    #[test]
    fn what_the_server_cannot_store_is_named() {
        assert_eq!(check(&row(), None), Ok(()));
        for subject in ["", "a b", "a.*", "a.>", ">", ".a", "a.", "a..b", "a\u{7}", "$JS.API.STREAM.DELETE.ORDERS"] {
            let bad = OutboxRow { subject: subject.to_owned(), ..row() };
            assert!(check(&bad, None).unwrap_err().contains("its subject"), "{subject}");
        }
        for id in ["", "a\nb", " a", "a "] {
            let bad = OutboxRow { id: id.to_owned(), ..row() };
            assert!(check(&bad, None).unwrap_err().contains("its id"), "{id:?}");
        }
        let all = 10 + header_bytes(&headers(row().headers.as_deref()).unwrap(), &row().id);
        assert_eq!(check(&row(), Some(all)), Ok(()));
        assert!(check(&row(), Some(all - 1)).unwrap_err().contains("bytes, and the server accepts"));
    }
}
