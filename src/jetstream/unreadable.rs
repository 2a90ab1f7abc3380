//! Messages that the client cannot parse. Each delivery of such a message would cut the connection, or end the client, for ever.
//! After such a loss, the daemon reads the delivered messages raw. A message that the client cannot parse becomes an arrival that
//! is marked unreadable; the worker dead-letters and terminates it.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{HeaderName, HeaderValue};
use tokio::time::Instant;

use super::client::Client;
use super::error::Error;
use super::look::{Snapshot, look};
use super::stored::{StoredRange, owned_filters};
use crate::model::delivery::{Arrival, Headers};

/// Messages that are checked after one loss. After the next loss, the check continues where this one stopped.
const SCAN_MAX: usize = 10_000;
/// How long the check continues after the first unreadable message, which waits for the end of the check.
const AFTER_FIRST: Duration = Duration::from_secs(2);

/// Checks the messages that are delivered and not acknowledged, above `clean_through`, and raises `clean_through`.
pub(super) async fn scan(
    client: Client,
    snapshot: Snapshot,
    clean_through: Arc<AtomicU64>,
) -> Result<Vec<Arrival>, Error> {
    let unreadable = find(&client, &snapshot, &clean_through).await?;
    // The ids of these messages are made for this stream, so another stream must not have been read.
    if !unreadable.is_empty() {
        let now = look(&client, &snapshot.consumer.stream_name, &snapshot.consumer.name).await?;
        if now.incarnation().stream_ns != snapshot.incarnation().stream_ns {
            return Err(Error::Recreated);
        }
    }
    Ok(unreadable)
}

async fn find(client: &Client, snapshot: &Snapshot, clean_through: &AtomicU64) -> Result<Vec<Arrival>, Error> {
    let (stream, consumer) = (&snapshot.consumer.stream_name, &snapshot.consumer.name);
    let from = snapshot.consumer.ack_floor.stream_sequence.max(clean_through.load(Ordering::Relaxed)) + 1;
    let to = snapshot.consumer.delivered.stream_sequence;
    let filters = owned_filters(&snapshot.consumer.config);
    let mut range = StoredRange::of(client.clone(), stream.clone(), &filters, from, to);
    let mut unreadable = Vec::new();
    let mut deadline = None;
    for _ in 0..SCAN_MAX {
        let Some(stored) = range.next().await? else { break };
        if let Some(why) = why_unreadable(&stored.subject, &stored.headers) {
            unreadable.push(stored.into_unreadable(stream, consumer, why));
            deadline.get_or_insert_with(|| Instant::now() + AFTER_FIRST);
        } else if unreadable.is_empty() {
            // Immediately, because on a slow network the next loss comes before the end of the check. Not above an unreadable
            // message: its term may get lost, and then the message must be found again.
            clean_through.fetch_max(stored.seq, Ordering::Relaxed);
        }
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            break;
        }
    }
    Ok(unreadable)
}

/// What the client cannot parse in a subject or a header block; `None` for a message that the client can parse.
///
/// The order of the steps is the client's (async-nats 0.51, `connection.rs`), because an order counted as unreadable by mistake
/// would be lost. Names and values go through the checks of the client.
pub fn why_unreadable(subject: &str, block: &[u8]) -> Option<String> {
    read_headers(subject, block).err()
}

/// The headers of a message as the client would parse them, or what the client cannot parse.
pub(super) fn read_headers(subject: &str, block: &[u8]) -> Result<Headers, String> {
    // The JSON of the server has this character in place of bytes that are not UTF-8.
    if subject.contains(char::REPLACEMENT_CHARACTER) {
        return Err("the subject is not UTF-8".to_owned());
    }
    // With headers, the client splits the line at any Unicode white space. Around the subject, white space changes nothing.
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
        // The client reads this as a status of the server and not as a message.
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
