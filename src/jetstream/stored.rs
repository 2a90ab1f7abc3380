//! Reads stored messages one by one with `STREAM.MSG.GET`: without the consumer, and without the parser of the client.

use std::collections::VecDeque;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::Config;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures_util::future::try_join_all;
use serde::Deserialize;

use super::client::Client;
use super::error::Error;
use super::look::{self, Snapshot, StartsAt};
use super::unreadable::read_headers;
use crate::model::delivery::{Arrival, Headers, Position, Raw, Reply};
use crate::model::time::unix_ns;
use crate::model::view::Incarnation;

/// Requests that are open at the same time, and the bytes that their answers may have.
const REQUESTS_MAX: usize = 32;
const ANSWER_BYTES_MAX: usize = 32 * 1024 * 1024;
/// The name under which a dead letter keeps a header block that cannot be parsed.
const RAW_HEADERS: &str = "(header block, base64)";

/// Read access to the stored messages that one consumer is for.
#[derive(Clone)]
pub struct StreamReader {
    client: Client,
    stream: String,
    consumer: String,
    incarnation: Incarnation,
    pub(super) filters: Vec<String>,
    starts_at: StartsAt,
    is_filtered: bool,
    shows_removals: bool,
}

impl StreamReader {
    pub fn of(client: Client, snapshot: &Snapshot) -> Self {
        Self {
            client,
            stream: snapshot.consumer.stream_name.clone(),
            consumer: snapshot.consumer.name.clone(),
            incarnation: snapshot.incarnation(),
            filters: owned_filters(&snapshot.consumer.config),
            starts_at: snapshot.starts_at(),
            is_filtered: snapshot.is_filtered(),
            shows_removals: snapshot.shows_removals(),
        }
    }

    pub fn starts_at(&self) -> StartsAt {
        self.starts_at
    }

    /// The message with this sequence, as if it just had its `delivered`th delivery; `None` if the stream no longer has it.
    pub async fn message_at(&self, seq: u64, delivered: u64) -> Result<Option<Arrival>, Error> {
        let stored = message_at(&self.client, &self.stream, seq).await?;
        Ok(stored.map(|stored| self.arrive(stored, delivered)))
    }

    /// Some messages from sequence `from` to `to`, and the next sequence to read. At the end it is `to + 1`.
    pub async fn some(&self, from: u64, to: u64) -> Result<(Vec<Arrival>, u64), Error> {
        let mut range = self.range(from, to);
        let chunk = range.next_chunk().await?;
        let next = if chunk.is_empty() { to.saturating_add(1) } else { range.next };
        Ok((chunk.into_iter().map(|stored| self.arrive(stored, 1)).collect(), next))
    }

    /// The subjects that the consumer is for.
    pub fn filters(&self) -> &[String] {
        &self.filters
    }

    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Whether the stream has messages that the consumer is not for.
    pub fn is_filtered(&self) -> bool {
        self.is_filtered
    }

    /// Whether a sequence without a message shows that a message was removed.
    pub fn shows_removals(&self) -> bool {
        self.shows_removals
    }

    /// Adopts an edited consumer.
    pub(super) fn follow(&mut self, snapshot: &Snapshot) {
        *self = Self::of(self.client.clone(), snapshot);
    }

    pub(super) fn range(&self, from: u64, to: u64) -> StoredRange {
        StoredRange::of(self.client.clone(), self.stream.clone(), &self.filters, from, to)
    }

    fn arrive(&self, stored: Stored, delivered: u64) -> Arrival {
        stored.into_arrival(&self.stream, &self.consumer, delivered)
    }

    /// Whether everything that was read so far belongs to this stream and this consumer, and not to others of the same name.
    ///
    /// # Errors
    /// [`Error::Recreated`] if it may belong to others.
    pub async fn confirm(&self) -> Result<(), Error> {
        let snapshot = look::look(&self.client, &self.stream, &self.consumer).await?;
        if snapshot.incarnation() == self.incarnation { Ok(()) } else { Err(Error::Recreated) }
    }
}

/// The stored messages of some filters in a range of sequences, in stream order.
pub(super) struct StoredRange {
    client: Client,
    stream: String,
    /// The next message of each filter, as far as it is known.
    heads: Vec<(String, Head)>,
    /// The first sequence not yet read, and the last one wanted.
    next: u64,
    to: u64,
    ready: VecDeque<Stored>,
}

enum Head {
    Unknown,
    Known(Option<Stored>),
}

impl StoredRange {
    pub(super) fn of(client: Client, stream: String, filters: &[String], from: u64, to: u64) -> Self {
        let heads = filters.iter().map(|filter| (filter.clone(), Head::Unknown)).collect();
        Self { client, stream, heads, next: from, to, ready: VecDeque::new() }
    }

    /// The next message; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Stored>, Error> {
        if self.ready.is_empty() {
            self.ready = self.next_chunk().await?.into();
        }
        Ok(self.ready.pop_front())
    }

    /// Some messages more; none at the end.
    pub(super) async fn next_chunk(&mut self) -> Result<Vec<Stored>, Error> {
        if self.next > self.to {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        if let [(filter, _)] = &self.heads[..]
            && filter == ">"
        {
            // The consumer is for every message, so the next sequences are known without a question.
            let requests = (ANSWER_BYTES_MAX / self.client.max_payload().max(1)).clamp(1, REQUESTS_MAX);
            let last = self.to.min(self.next.saturating_add(requests as u64 - 1));
            let asked = (self.next..=last).map(|seq| message_at(&self.client, &self.stream, seq));
            found.extend(try_join_all(asked).await?.into_iter().flatten());
        }
        if found.is_empty() {
            found.extend(self.first_of_all_filters().await?);
        }
        self.next = found.last().map_or(self.to, |last| last.seq).saturating_add(1);
        Ok(found)
    }

    async fn first_of_all_filters(&mut self) -> Result<Option<Stored>, Error> {
        for (filter, head) in &mut self.heads {
            if matches!(head, Head::Unknown) {
                let stored = next_message(&self.client, &self.stream, self.next, filter).await?;
                *head = Head::Known(stored.filter(|stored| stored.seq <= self.to));
            }
        }
        let seq = |head: &Head| match head {
            Head::Known(Some(stored)) => Some(stored.seq),
            Head::Known(None) | Head::Unknown => None,
        };
        let heads = self.heads.iter_mut().map(|(_, head)| head);
        let Some(first) = heads.filter(|head| seq(head).is_some()).min_by_key(|head| seq(head)) else {
            return Ok(None);
        };
        Ok(match std::mem::replace(first, Head::Unknown) {
            Head::Known(stored) => stored,
            Head::Unknown => None,
        })
    }
}

/// The subjects that the consumer is for.
pub fn filters(config: &Config) -> Vec<&str> {
    match (config.filter_subject.as_str(), &config.filter_subjects[..]) {
        ("", []) => vec![">"],
        (filter, []) => vec![filter],
        (_, filters) => filters.iter().map(String::as_str).collect(),
    }
}

pub(super) fn owned_filters(config: &Config) -> Vec<String> {
    filters(config).into_iter().map(ToOwned::to_owned).collect()
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
    /// The delivery that the client could not parse.
    pub fn into_unreadable(self, stream: &str, consumer: &str, why: String) -> Arrival {
        let headers = vec![(RAW_HEADERS.to_owned(), BASE64.encode(&self.headers))];
        self.arrive(stream, consumer, 1, headers, Some(why))
    }

    /// A delivery that the server does not make, as if it were the `delivered`th.
    pub fn into_arrival(self, stream: &str, consumer: &str, delivered: u64) -> Arrival {
        match read_headers(&self.subject, &self.headers) {
            Ok(headers) => self.arrive(stream, consumer, delivered, headers, None),
            Err(why) => self.into_unreadable(stream, consumer, why),
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
        // The server finds a delivery by its stream sequence alone, so the other numbers of the reply subject may be 0.
        let subject = format!("$JS.ACK.{stream}.{consumer}.{delivered}.{}.0.0.0", self.seq);
        let position = Position { delivered, stream_seq: self.seq, consumer_seq: 0, published_ns: self.published_ns };
        let raw =
            Raw { subject: self.subject.into(), headers, payload: Bytes::from(self.payload), position, unreadable };
        Arrival { raw, reply: Reply { subject, delivered } }
    }
}

/// The first message from `seq` on whose subject matches; `None` without such a message.
///
/// The types of the client cannot be used: they parse the headers.
pub async fn next_message(client: &Client, stream: &str, seq: u64, filter: &str) -> Result<Option<Stored>, Error> {
    ask(client, stream, serde_json::json!({ "seq": seq, "next_by_subj": filter }).to_string()).await
}

/// The message with this sequence; `None` if the stream no longer has it.
pub async fn message_at(client: &Client, stream: &str, seq: u64) -> Result<Option<Stored>, Error> {
    ask(client, stream, serde_json::json!({ "seq": seq }).to_string()).await
}

async fn ask(client: &Client, stream: &str, request: String) -> Result<Option<Stored>, Error> {
    const ASKED: &str = "a request for a stored message";
    let no_answer = |error: String| Error::NoAnswer { asked: ASKED, error };
    let subject = client.api(&format!("STREAM.MSG.GET.{stream}"));
    let answer = client.request(subject, request.into()).await.map_err(|error| no_answer(error.to_string()))?;
    read_answer(&answer.payload).map_err(|error| match error {
        AnswerError::NoStream => Error::NoStream { stream: stream.to_owned(), place: client.place() },
        AnswerError::Other(text) => no_answer(text),
    })
}

/// Why an answer of the server has neither a message nor the error that no message was found.
#[derive(Debug, PartialEq)]
pub enum AnswerError {
    NoStream,
    Other(String),
}

/// The message in the answer of the server; `None` if the stream has no such message.
pub fn read_answer(answer: &[u8]) -> Result<Option<Stored>, AnswerError> {
    let answer: MessageAnswer =
        serde_json::from_slice(answer).map_err(|error| AnswerError::Other(error.to_string()))?;
    match (answer.message, answer.error) {
        (Some(message), _) => message.decode().map(Some).map_err(|error| AnswerError::Other(error.to_string())),
        // Both are a 404, but only the first one is about the message.
        (None, Some(error)) if error.err_code == ErrorCode::NO_MESSAGE_FOUND.0 => Ok(None),
        (None, Some(error)) if error.err_code == ErrorCode::STREAM_NOT_FOUND.0 => Err(AnswerError::NoStream),
        (None, Some(error)) => Err(AnswerError::Other(error.description)),
        (None, None) => Err(AnswerError::Other("the answer has neither a message nor an error".to_owned())),
    }
}

#[derive(Deserialize)]
struct MessageAnswer {
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
        // The time is part of the message id. With a time that cannot be parsed, the id is still the same at each delivery.
        Ok(Stored {
            subject: self.subject,
            seq: self.seq,
            headers: BASE64.decode(&self.hdrs)?,
            payload: BASE64.decode(&self.data)?,
            published_ns: humantime::parse_rfc3339(&self.time).map_or(0, unix_ns),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_gone_is_not_a_message_that_is_gone() {
        let answer = |code: u64| format!(r#"{{"error": {{"code": 404, "err_code": {code}, "description": "why"}}}}"#);
        assert!(matches!(read_answer(answer(10037).as_bytes()), Ok(None)));
        assert_eq!(read_answer(answer(10059).as_bytes()).err(), Some(AnswerError::NoStream));
        assert_eq!(read_answer(answer(10008).as_bytes()).err(), Some(AnswerError::Other("why".to_owned())));
    }
}
