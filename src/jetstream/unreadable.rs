//! Messages that the client cannot even parse. One in the stream would cut the connection, or end the client, at each of its
//! deliveries, for ever. After such a loss the messages that the server counts as delivered are fetched raw, and those that no
//! delivery can bring us become arrivals of their own: marked unreadable, to be dead-lettered and terminated.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::Config;
use async_nats::{Client, HeaderName, HeaderValue};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::Instant;

use super::consumer::{Arrival, BindError, Found};
use crate::model::delivery::{Headers, Position, Raw, Reply};
use crate::model::time::unix_ns;

/// Messages looked at after one loss. With one filter the next loss goes on where this one stopped.
const SCAN_MAX: usize = 10_000;
/// How long the search goes on after the first find, which waits for it.
const AFTER_FIRST: Duration = Duration::from_secs(2);
/// The name under which a dead letter keeps a header block that cannot be taken apart.
const RAW_HEADERS: &str = "(header block, base64)";

/// Looks at what is delivered and not acknowledged, beyond `clean_through`, and raises that.
pub async fn scan(client: Client, found: Found, clean_through: Arc<AtomicU64>) -> Result<Vec<Arrival>, BindError> {
    let unreadable = read(&client, &found, &clean_through).await?;
    // The ids of what was found are made for this stream: it must not be another one that was read.
    if !unreadable.is_empty() {
        let now = super::consumer::look(&client, &found.consumer.stream_name, &found.consumer.name).await?;
        if now.created().0 != found.created().0 {
            return Err(BindError::Another);
        }
    }
    Ok(unreadable)
}

async fn read(client: &Client, found: &Found, clean_through: &AtomicU64) -> Result<Vec<Arrival>, BindError> {
    let (stream, consumer, config) = (&found.consumer.stream_name, &found.consumer.name, &found.consumer.config);
    let from = found.consumer.ack_floor.stream_sequence.max(clean_through.load(Ordering::Relaxed)) + 1;
    let to = found.consumer.delivered.stream_sequence;
    let filters = filters(config);
    let mut unreadable = Vec::new();
    let mut deadline = None;
    for filter in &filters {
        let mut next = from;
        for _ in 0..SCAN_MAX {
            let stored = next_message(client, stream, next, filter).await?;
            let Some(stored) = stored.filter(|stored| stored.seq <= to) else { break };
            next = stored.seq + 1;
            if let Some(why) = why_unreadable(&stored.subject, &stored.headers) {
                unreadable.push(stored.into_arrival(stream, consumer, why));
                deadline.get_or_insert_with(|| Instant::now() + AFTER_FIRST);
            } else if unreadable.is_empty() && filters.len() == 1 {
                // At once: on a long line the next loss comes before the search is through. And not past one that was found:
                // its term may yet get lost, and then it has to be found again.
                clean_through.fetch_max(stored.seq, Ordering::Relaxed);
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(unreadable);
            }
        }
    }
    Ok(unreadable)
}

/// When the first message beyond the ack floor was published; `None` if there is none.
///
/// # Errors
/// When the server does not say: the permission for it is optional.
pub async fn oldest_published_at(client: &Client, found: &Found) -> Result<Option<SystemTime>, BindError> {
    let next = found.consumer.ack_floor.stream_sequence + 1;
    let mut oldest: Option<u64> = None;
    for filter in filters(&found.consumer.config) {
        if let Some(stored) = next_message(client, &found.consumer.stream_name, next, filter).await? {
            let published_ns = stored.published_ns.unsigned_abs();
            oldest = Some(oldest.map_or(published_ns, |oldest| oldest.min(published_ns)));
        }
    }
    Ok(oldest.map(|published_ns| UNIX_EPOCH + Duration::from_nanos(published_ns)))
}

/// The subjects that the consumer is for.
pub fn filters(config: &Config) -> Vec<&str> {
    match (config.filter_subject.as_str(), &config.filter_subjects[..]) {
        ("", []) => vec![">"],
        (filter, []) => vec![filter],
        (_, filters) => filters.iter().map(String::as_str).collect(),
    }
}

/// A message as the stream stores it.
pub struct Stored {
    pub subject: String,
    pub seq: u64,
    pub headers: Vec<u8>,
    pub payload: Vec<u8>,
    pub published_ns: i64,
}

impl Stored {
    /// The delivery of it that the client could not take in.
    pub fn into_arrival(self, stream: &str, consumer: &str, why: String) -> Arrival {
        let headers = vec![(RAW_HEADERS.to_owned(), BASE64.encode(&self.headers))];
        self.arrive(stream, consumer, 1, headers, Some(why))
    }

    /// The delivery that the server does not make any more, as if it were the `delivered`th.
    pub fn into_last_arrival(self, stream: &str, consumer: &str, delivered: u64) -> Arrival {
        match read_headers(&self.subject, &self.headers) {
            Ok(headers) => self.arrive(stream, consumer, delivered, headers, None),
            Err(why) => self.into_arrival(stream, consumer, why),
        }
    }

    fn arrive(
        self,
        stream: &str,
        consumer: &str,
        delivered: u64,
        headers: Headers,
        unreadable: Option<String>,
    ) -> Arrival {
        // The server finds a delivery by its stream sequence, so a reply subject without the other numbers will do.
        let subject = format!("$JS.ACK.{stream}.{consumer}.{delivered}.{}.0.0.0", self.seq);
        let position = Position { delivered, stream_seq: self.seq, consumer_seq: 0, published_ns: self.published_ns };
        let raw =
            Raw { subject: self.subject.into(), headers, payload: Bytes::from(self.payload), position, unreadable };
        (raw, Reply { subject, delivered })
    }
}

/// The first message from `seq` on whose subject matches; `None` if there is none.
///
/// Asked for without the client's own types: they parse the headers, and that is what cannot be done here.
pub async fn next_message(client: &Client, stream: &str, seq: u64, filter: &str) -> Result<Option<Stored>, BindError> {
    ask(client, stream, serde_json::json!({ "seq": seq, "next_by_subj": filter }).to_string()).await
}

/// The message with this sequence; `None` if the stream does not have it any more.
pub async fn message_at(client: &Client, stream: &str, seq: u64) -> Result<Option<Stored>, BindError> {
    ask(client, stream, serde_json::json!({ "seq": seq }).to_string()).await
}

async fn ask(client: &Client, stream: &str, request: String) -> Result<Option<Stored>, BindError> {
    const ASKED: &str = "a request for a stored message";
    let no_answer = |error: String| BindError::NoAnswer { asked: ASKED, error };
    let subject = format!("$JS.API.STREAM.MSG.GET.{stream}");
    let answer = client.request(subject, request.into()).await.map_err(|error| no_answer(error.to_string()))?;
    read_answer(&answer.payload).map_err(|error| match error {
        AnswerError::NoStream => BindError::NoStream { stream: stream.to_owned() },
        AnswerError::Other(text) => no_answer(text),
    })
}

/// Why the server's answer has neither a message nor says that there is none.
#[derive(Debug, PartialEq)]
pub enum AnswerError {
    NoStream,
    Other(String),
}

/// The message in the server's answer, `None` if the stream has no such message; else why not.
pub fn read_answer(answer: &[u8]) -> Result<Option<Stored>, AnswerError> {
    let answer: Answer = serde_json::from_slice(answer).map_err(|error| AnswerError::Other(error.to_string()))?;
    match (answer.message, answer.error) {
        (Some(message), _) => message.decode().map(Some).map_err(|error| AnswerError::Other(error.to_string())),
        // Both are a 404, and only one of them says anything about the message.
        (None, Some(error)) if error.err_code == ErrorCode::NO_MESSAGE_FOUND.0 => Ok(None),
        (None, Some(error)) if error.err_code == ErrorCode::STREAM_NOT_FOUND.0 => Err(AnswerError::NoStream),
        (None, Some(error)) => Err(AnswerError::Other(error.description)),
        (None, None) => Err(AnswerError::Other("neither a message nor an error".to_owned())),
    }
}

#[derive(Deserialize)]
struct Answer {
    message: Option<Encoded>,
    error: Option<ApiError>,
}

#[derive(Deserialize)]
struct Encoded {
    subject: String,
    seq: u64,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
    time: String,
}

#[derive(Deserialize)]
struct ApiError {
    err_code: u64,
    #[serde(default)]
    description: String,
}

impl Encoded {
    fn decode(self) -> Result<Stored, base64::DecodeError> {
        // The time is part of the message id: one that we cannot read leaves an id that is still the same each time.
        Ok(Stored {
            subject: self.subject,
            seq: self.seq,
            headers: BASE64.decode(&self.hdrs)?,
            payload: BASE64.decode(&self.data)?,
            published_ns: humantime::parse_rfc3339(&self.time).map_or(0, unix_ns),
        })
    }
}

/// What the client trips over in a subject or a header block; `None` for a message that it can read.
///
/// The order of its steps matters: a healthy message taken for an unreadable one would be an order lost (async-nats 0.51,
/// `connection.rs`). Names and values go through the client's own checks.
pub fn why_unreadable(subject: &str, block: &[u8]) -> Option<String> {
    read_headers(subject, block).err()
}

/// The headers of a message as the client would hand them on, or what it trips over.
fn read_headers(subject: &str, block: &[u8]) -> Result<Headers, String> {
    // The server's JSON shows bytes that are not UTF-8 as this character.
    if subject.contains(char::REPLACEMENT_CHARACTER) {
        return Err("the subject is not UTF-8".to_owned());
    }
    // With headers the client splits the line at any white space that Unicode knows; around the subject that changes nothing.
    if !block.is_empty() && subject.trim().contains(char::is_whitespace) {
        return Err(format!("the subject {subject:?} has white space in it"));
    }
    let mut headers = Headers::new();
    if block.is_empty() {
        return Ok(headers);
    }
    let Ok(text) = str::from_utf8(block) else { return Err("headers are not UTF-8".to_owned()) };
    let mut lines = text.lines().peekable();
    match lines.next().and_then(|version| version.strip_prefix("NATS/1.0")).map(str::trim) {
        Some("") => {}
        // The client takes it for a word of the server to us, not for a message.
        Some(status) => return Err(format!("headers begin with the status {status:?}")),
        None => return Err("headers do not begin with NATS/1.0".to_owned()),
    }
    while let Some(line) = lines.next() {
        if line.is_empty() {
            continue;
        }
        let Some((name, value)) = line.split_once(':') else {
            return Err(format!("header line {line:?} has no colon"));
        };
        if HeaderName::from_str(name).is_err() {
            return Err(format!("header name {name:?} has a character that is not allowed"));
        }
        let mut value = value.trim_start().to_owned();
        while let Some(more) = lines.next_if(|line| line.starts_with(char::is_whitespace)) {
            value.push_str(more);
        }
        value.truncate(value.trim_end().len());
        if HeaderValue::from_str(&value).is_err() {
            return Err(format!("the value of header {name} has a carriage return in it"));
        }
        headers.push((name.to_owned(), value));
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::TcpListener;

    use super::*;

    /// What a real client makes of a message on its line: whether it hands it on as a message.
    async fn client_can_read(subject: &str, block: &[u8]) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = async {
            let (mut line, _) = listener.accept().await.unwrap();
            let info = r#"INFO {"server_id":"","version":"2.15.1","headers":true,"max_payload":1048576}"#;
            line.write_all(format!("{info}\r\n").as_bytes()).await.unwrap();
            let mut line = BufReader::new(line);
            let (mut said, mut sid) = (String::new(), String::new());
            while sid.is_empty() {
                said.clear();
                line.read_line(&mut said).await.unwrap();
                match said.split_whitespace().collect::<Vec<_>>()[..] {
                    ["PING"] => line.write_all(b"PONG\r\n").await.unwrap(),
                    ["SUB", _, id] => sid = id.to_owned(),
                    _ => {}
                }
            }
            let reply = "$JS.ACK.ORDERS.order-processor.1.7.9.1790230470084404000.0";
            let start = match block.len() {
                0 => format!("MSG {subject} {sid} {reply} 5\r\n"),
                length => format!("HMSG {subject} {sid} {reply} {length} {}\r\n", length + 5),
            };
            line.write_all(&[start.as_bytes(), block, b"order\r\n"].concat()).await.unwrap();
            // It keeps the old line until it has a new one: this ends when it has given the old one up, or with the test.
            listener.accept().await.unwrap();
        };
        let client = async {
            let client = async_nats::connect(address.to_string()).await.unwrap();
            let message = client.subscribe("inbox").await.unwrap().next().await;
            message.is_some_and(|message| message.status.is_none() && message.payload == "order")
        };
        tokio::select! {
            () = server => false,
            read = client => read,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// One that is taken for unreadable and is not is an order lost; the other way round it blocks the consumer.
        #[test]
        fn unreadable_is_what_the_client_cannot_read(
            subject in vec(select(vec!["a", "ü", "\u{a0}", "\u{b}", ":"]), 0..3),
            version in select(vec!["NATS/1.0", "NATS/1.0 ", "NATS/1.0\u{a0}", "NATS/1.0 503", "NATS/1.1", ""]),
            pieces in vec(select(PIECES), 0..8),
            bare in prop::bool::weighted(0.1),
        ) {
            let subject = format!("ORDERS.x{}", subject.concat());
            let block = if bare { vec![] } else { [version.as_bytes(), b"\r\n", &pieces.concat(), b"\r\n\r\n"].concat() };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let asked = async { tokio::time::timeout(Duration::from_secs(20), client_can_read(&subject, &block)).await };
            let readable = runtime.block_on(asked).expect("the client neither hands it on nor gives up");
            let why = why_unreadable(&subject, &block);
            prop_assert_eq!(why.is_none(), readable, "{:?} {:?}: {:?}", subject, block.escape_ascii().to_string(), why);
        }
    }

    const PIECES: &[&[u8]] = &[
        b"\r\n",
        b"\r\n",
        b"X: y\r\n y",
        b"X: y\r\n\ty\ry",
        b"\n",
        b"\r",
        b"X",
        b"Nats-Msg-Id",
        b": ",
        b":",
        b": ",
        b" ",
        b"\t",
        b"\x0b",
        b"\0",
        b"\x7f",
        b"\xff",
        "é".as_bytes(),
        "\u{85}".as_bytes(),
        "\u{a0}".as_bytes(),
        b"y",
        b"(",
    ];

    #[test]
    fn a_stream_that_is_gone_is_not_a_message_that_is_gone() {
        let answer = |code: u64| format!(r#"{{"error": {{"code": 404, "err_code": {code}, "description": "why"}}}}"#);
        assert!(matches!(read_answer(answer(10037).as_bytes()), Ok(None)));
        assert_eq!(read_answer(answer(10059).as_bytes()).err(), Some(AnswerError::NoStream));
        assert_eq!(read_answer(answer(10008).as_bytes()).err(), Some(AnswerError::Other("why".to_owned())));
    }

    #[test]
    fn readable_headers_are_left_alone() {
        for block in [
            "",
            "NATS/1.0\r\n\r\n",
            "NATS/1.0\r\nNats-Msg-Id: 1\r\nX: \r\nX:y\r\n\r\n",
            "NATS/1.0\r\nX: folded\r\n over lines\r\n\r\n",
            "NATS/1.0\r\nX: trailing\r\r\n\r\n",
            "NATS/1.0 \r\nX: ü\r\n",
        ] {
            assert_eq!(why_unreadable("ORDERS.new", block.as_bytes()), None, "{block:?}");
        }
    }

    #[test]
    fn subjects_that_the_client_cannot_take_apart_are_named() {
        assert_eq!(why_unreadable("ORDERS.ü", b"NATS/1.0\r\n\r\n"), None);
        assert_eq!(why_unreadable("ORDERS.a\u{a0}b", b""), None);
        assert_eq!(why_unreadable("ORDERS.a\u{a0}", b"NATS/1.0\r\n\r\n"), None);
        assert!(why_unreadable("ORDERS.a\u{a0}b", b"NATS/1.0\r\n\r\n").is_some());
        assert!(why_unreadable("ORDERS.a\u{fffd}", b"").is_some());
    }

    #[test]
    fn each_header_that_the_client_trips_over_is_named() {
        for (block, why) in [
            (&b"NATS/1.0\r\nX: a\rb\r\n\r\n"[..], "carriage return"),
            (b"NATS/1.0\r\nX: \xff\r\n\r\n", "UTF-8"),
            (b"NATS/1.0\r\nX Y: a\r\n\r\n", "name"),
            (b"NATS/1.0\r\nno colon\r\n\r\n", "colon"),
            (b"NATS/1.0 503\r\n\r\n", "status"),
            (b"HTTP/1.1\r\n\r\n", "NATS/1.0"),
        ] {
            let said = why_unreadable("ORDERS.new", block).unwrap_or_else(|| panic!("{block:?} is readable"));
            assert!(said.contains(why), "{said}");
        }
    }
}
