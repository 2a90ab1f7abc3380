//! Publishes the messages of the outbox, and looks in their streams for messages that may have been published before.

use std::collections::HashSet;
use std::future::IntoFuture;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::context::{GetStreamByNameErrorKind, PublishAckFuture, PublishErrorKind};
use futures_util::StreamExt;
use tokio::time::Instant;

use super::client::Client;
use super::connection::{self, CommandClient, Denials};
use super::error::Error;
use super::look::look_at_stream;
use crate::config::Nats;
use crate::model::id::MESSAGE_ID_HEADER;
use crate::model::outbox::{OutboxMessage, OutboxTarget};
use crate::model::text::chain;
use crate::model::time::{from_unix_ns, unix_ns};

/// How long the server may send no receipt while some are due.
const RECEIPT_TIMEOUT: Duration = Duration::from_secs(5);
/// Messages in one request while looking, and how long the server may be silent.
const FETCH_MESSAGES: usize = 1000;
const FETCH_EXPIRES: Duration = Duration::from_secs(5);
/// The server deletes the consumer of a look so long after it was last used.
const INACTIVE: Duration = Duration::from_secs(30);

/// Publishes on the connection of the daemon.
#[derive(Clone)]
pub struct Publisher {
    client: Client,
}

/// What came of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The stream has it, at this sequence. `duplicate`: it had a message with the same id before.
    Stored { stream: String, sequence: u64, duplicate: bool },
    /// The stream does not have it.
    Refused(String),
    /// Nobody knows: there was no receipt.
    Unknown(String),
}

impl Publisher {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The largest message that the server accepts, as it last said.
    pub fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// The stream that stores a subject; `None` if there is none.
    pub async fn stream_of(&self, subject: &str) -> Result<Option<String>, Error> {
        match self.client.jetstream().stream_by_subject(subject).await {
            Ok(stream) => Ok(Some(stream)),
            Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::NoAnswer { asked: "which stream has a subject", error: chain(&error) }),
        }
    }

    /// A stream as it is now, so that nothing published from now on is before its `after_seq`.
    pub async fn target(&self, stream: &str) -> Result<OutboxTarget, Error> {
        target(&self.client, stream).await
    }

    /// Publishes in order, and returns what came of each message.
    pub async fn publish(&self, messages: &[OutboxMessage]) -> Vec<Sent> {
        let jetstream = self.client.jetstream();
        let mut receipts = Vec::with_capacity(messages.len());
        for message in messages {
            receipts.push(send(&jetstream, message).await);
        }
        let mut sent = Vec::with_capacity(messages.len());
        let mut deadline = Instant::now() + RECEIPT_TIMEOUT;
        for receipt in receipts {
            let receipt = match receipt {
                Ok(receipt) => await_receipt(receipt, deadline).await,
                Err(sent) => sent,
            };
            if let Sent::Stored { .. } = receipt {
                deadline = Instant::now() + RECEIPT_TIMEOUT;
            }
            sent.push(receipt);
        }
        sent
    }
}

async fn send(jetstream: &Context, message: &OutboxMessage) -> Result<PublishAckFuture, Sent> {
    let mut headers = HeaderMap::new();
    for (name, value) in &message.headers {
        headers.append(name.as_str(), value.as_str());
    }
    headers.insert(MESSAGE_ID_HEADER, message.id.as_str());
    let sending = jetstream.publish_with_headers(message.subject.clone(), headers, message.payload.clone());
    sending.await.map_err(|error| Sent::of(error.kind(), chain(&error)))
}

async fn await_receipt(receipt: PublishAckFuture, deadline: Instant) -> Sent {
    match tokio::time::timeout_at(deadline, receipt.into_future()).await {
        Ok(Ok(ack)) => Sent::Stored { stream: ack.stream, sequence: ack.sequence, duplicate: ack.duplicate },
        Ok(Err(error)) => Sent::of(error.kind(), chain(&error)),
        Err(_) => Sent::Unknown("the server sent no receipt".to_owned()),
    }
}

impl Sent {
    fn of(kind: PublishErrorKind, text: String) -> Self {
        match kind {
            PublishErrorKind::StreamNotFound => Self::Refused("no stream has the subject".to_owned()),
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => Self::Unknown(text),
            PublishErrorKind::WrongLastMessageId
            | PublishErrorKind::WrongLastSequence
            | PublishErrorKind::MaxAckPending
            | PublishErrorKind::MaxPayloadExceeded
            | PublishErrorKind::Other => Self::Refused(text),
        }
    }
}

async fn target(client: &Client, stream: &str) -> Result<OutboxTarget, Error> {
    let stream = look_at_stream(client, stream).await?;
    let info = stream.cached_info();
    Ok(OutboxTarget {
        stream: info.config.name.clone(),
        created_ns: unix_ns(info.created.into()),
        after_seq: info.state.last_sequence,
    })
}

/// Looks for messages in streams, on a connection of its own: a message there that the client cannot parse must not end the
/// connection of the daemon.
pub struct Seeker {
    client: Client,
    denials: Denials,
}

/// Where to look in one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekFrom {
    Sequence(u64),
    /// In nanoseconds since 1970 UTC.
    Time(i64),
}

impl Seeker {
    pub async fn connect(nats: &Nats) -> Result<Self, Error> {
        let CommandClient { client, denials } = connection::connect_command(nats).await?;
        Ok(Self { client, denials })
    }

    /// As [`Publisher::target`].
    pub async fn target(&self, stream: &str) -> Result<OutboxTarget, Error> {
        self.denials.answer(target(&self.client, stream)).await?
    }

    /// Which of `ids` are the ids of messages that the stream has, from `from` to its present end.
    ///
    /// # Errors
    /// [`Error::Denied`] without the permission to create a consumer on the stream.
    pub async fn seek(&self, stream: &str, from: SeekFrom, ids: &HashSet<&str>) -> Result<HashSet<String>, Error> {
        self.denials.answer(self.read(stream, from, ids)).await?
    }

    /// A message that the client cannot parse ends a batch, and with it the messages behind it. They are read again, one at a time, and
    /// that message is left out: the daemon did not publish it.
    async fn read(&self, stream: &str, mut from: SeekFrom, ids: &HashSet<&str>) -> Result<HashSet<String>, Error> {
        let mut found = HashSet::new();
        let mut fetch_messages = FETCH_MESSAGES;
        loop {
            let config = consumer_config(from);
            let consumer = self.consumer(stream, config.clone()).await?;
            let ReadUp { is_at_end, last } = read_up(&consumer, fetch_messages, ids, &mut found).await?;
            if is_at_end {
                return Ok(found);
            }
            if fetch_messages == 1 {
                // The same consumer again: that needs no other permission.
                let delivered = self.consumer(stream, config).await?.cached_info().delivered.stream_sequence;
                if delivered <= last.unwrap_or_default() || delivered == 0 {
                    return Err(no_answer("no message arrived".to_owned()));
                }
                (from, fetch_messages) = (SeekFrom::Sequence(delivered + 1), FETCH_MESSAGES);
            } else {
                from = last.map_or(from, |last| SeekFrom::Sequence(last + 1));
                fetch_messages = 1;
            }
        }
    }

    async fn consumer(&self, stream: &str, config: pull::Config) -> Result<PullConsumer, Error> {
        let created = self.client.jetstream().create_consumer_on_stream(config, stream).await;
        created.map_err(|error| no_answer(chain(&error)))
    }
}

fn consumer_config(from: SeekFrom) -> pull::Config {
    pull::Config {
        // A name of its own, so that the permission to create it can be given.
        name: Some(format!("order-processor-outbox-{:08x}", fastrand::u32(..))),
        description: Some("order-processor looks for messages of its outbox".to_owned()),
        deliver_policy: match from {
            SeekFrom::Sequence(start_sequence) => DeliverPolicy::ByStartSequence { start_sequence },
            SeekFrom::Time(ns) => DeliverPolicy::ByStartTime { start_time: from_unix_ns(ns).into() },
        },
        ack_policy: AckPolicy::None,
        headers_only: true,
        inactive_threshold: INACTIVE,
        memory_storage: true,
        num_replicas: 1,
        ..Default::default()
    }
}

/// How far a consumer was read.
struct ReadUp {
    is_at_end: bool,
    /// The sequence of the last message before the end, or before a message that did not arrive.
    last: Option<u64>,
}

async fn read_up(
    consumer: &PullConsumer,
    fetch_messages: usize,
    ids: &HashSet<&str>,
    found: &mut HashSet<String>,
) -> Result<ReadUp, Error> {
    let mut left = consumer.cached_info().num_pending;
    let (mut last, mut arrived) = (None, 0);
    while left > 0 {
        let batch = consumer.fetch().max_messages(fetch_messages).expires(FETCH_EXPIRES).messages().await;
        let mut batch = batch.map_err(|error| no_answer(chain(&error)))?;
        let before = arrived;
        while let Some(message) = batch.next().await {
            let message = message.map_err(|error| no_answer(error.to_string()))?;
            let info = message.info().map_err(|error| no_answer(error.to_string()))?;
            if info.consumer_sequence != arrived + 1 {
                return Ok(ReadUp { is_at_end: false, last });
            }
            (left, last, arrived) = (info.pending, Some(info.stream_sequence), info.consumer_sequence);
            let id = message.headers.as_ref().and_then(|headers| headers.get(MESSAGE_ID_HEADER));
            if let Some(id) = id.map(async_nats::HeaderValue::as_str).filter(|id| ids.contains(id)) {
                found.insert(id.to_owned());
            }
        }
        if arrived == before {
            return Ok(ReadUp { is_at_end: false, last });
        }
    }
    Ok(ReadUp { is_at_end: true, last })
}

fn no_answer(error: String) -> Error {
    Error::NoAnswer { asked: "a request for published messages", error }
}
