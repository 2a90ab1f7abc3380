//! What the server reports about stream and consumer.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::{DeliverPolicy, Info as ConsumerInfo};
use async_nats::jetstream::context::{ConsumerInfoErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{Info as StreamInfo, RetentionPolicy, Stream};

use super::client::Client;
use super::connection::CommandClient;
use super::error::Error;
use super::stored::{self, filters};
use crate::config;
use crate::model::time::{from_unix_ns, unix_ns};
use crate::model::view::{ConsumerView, Incarnation};

/// The longest wait for the age of the oldest message.
const AGE_PATIENCE: Duration = Duration::from_secs(1);

/// Stream and consumer at one moment, as the server reports them.
pub struct Snapshot {
    pub stream: StreamInfo,
    pub consumer: ConsumerInfo,
    pub(super) oldest: Oldest,
}

/// When the first message above the ack floor was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Oldest {
    NotAsked,
    /// The server did not answer. The permission to ask is optional.
    Unknown,
    /// `None` if no message is above the floor.
    Published(Option<SystemTime>),
}

/// The first message that a consumer is for. Older messages were never for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartsAt {
    pub seq: u64,
    pub ns: i64,
}

/// Asks for stream and consumer on behalf of a command, which also notices a missing permission.
pub async fn look_for_command(command: &CommandClient, names: &config::ConsumerNames) -> Result<Snapshot, Error> {
    command.denials.answer(look(&command.client, &names.stream, &names.name)).await?
}

/// Asks for stream and consumer.
pub async fn look(client: &Client, stream: &str, consumer: &str) -> Result<Snapshot, Error> {
    let found = look_at_stream(client, stream).await?;
    let info = found.consumer_info(consumer).await.map_err(|error| match error.kind() {
        ConsumerInfoErrorKind::NotFound => {
            Error::NoConsumer { stream: stream.to_owned(), consumer: consumer.to_owned() }
        }
        ConsumerInfoErrorKind::StreamNotFound => Error::NoStream { stream: stream.to_owned(), place: client.place() },
        _ => Error::NoAnswer { asked: "a request for the consumer", error: error.to_string() },
    })?;
    Ok(Snapshot { stream: found.cached_info().clone(), consumer: info, oldest: Oldest::NotAsked })
}

/// The same, and how old the oldest message above the ack floor is.
pub(super) async fn look_with_age(client: &Client, stream: &str, consumer: &str) -> Result<Snapshot, Error> {
    let mut snapshot = look(client, stream, consumer).await?;
    if snapshot.has_work() {
        let oldest = tokio::time::timeout(AGE_PATIENCE, oldest_published_at(client, &snapshot)).await;
        snapshot.oldest = match oldest {
            Ok(Ok(at)) => Oldest::Published(at),
            Ok(Err(error @ Error::NoStream { .. })) => return Err(error),
            Ok(Err(_)) | Err(_) => Oldest::Unknown,
        };
    }
    Ok(snapshot)
}

pub(super) async fn look_at_stream(client: &Client, stream: &str) -> Result<Stream, Error> {
    client.jetstream().get_stream(stream).await.map_err(|error| match error.kind() {
        GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            Error::NoStream { stream: stream.to_owned(), place: client.place() }
        }
        GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
            Error::NoJetStream
        }
        _ if error.to_string().contains("no responders") => Error::NoJetStream,
        _ => Error::NoAnswer { asked: "a request for the stream", error: error.to_string() },
    })
}

async fn oldest_published_at(client: &Client, snapshot: &Snapshot) -> Result<Option<SystemTime>, Error> {
    let next = snapshot.consumer.ack_floor.stream_sequence + 1;
    let mut oldest: Option<u64> = None;
    for filter in filters(&snapshot.consumer.config) {
        if let Some(stored) = stored::next_message(client, &snapshot.consumer.stream_name, next, filter).await? {
            let published_ns = stored.published_ns.unsigned_abs();
            oldest = Some(oldest.map_or(published_ns, |oldest| oldest.min(published_ns)));
        }
    }
    Ok(oldest.map(|published_ns| UNIX_EPOCH + Duration::from_nanos(published_ns)))
}

impl Snapshot {
    pub fn incarnation(&self) -> Incarnation {
        Incarnation {
            stream_ns: unix_ns(self.stream.created.into()),
            consumer_ns: unix_ns(self.consumer.created.into()),
        }
    }

    pub fn starts_at(&self) -> StartsAt {
        match self.consumer.config.deliver_policy {
            DeliverPolicy::All => StartsAt { seq: 1, ns: 0 },
            DeliverPolicy::ByStartSequence { start_sequence } => StartsAt { seq: start_sequence, ns: 0 },
            DeliverPolicy::ByStartTime { start_time } => StartsAt { seq: 1, ns: unix_ns(start_time.into()) },
            DeliverPolicy::New | DeliverPolicy::Last | DeliverPolicy::LastPerSubject => {
                StartsAt { seq: 1, ns: unix_ns(self.consumer.created.into()) }
            }
        }
    }

    /// Whether the stream has subjects that the consumer is not for.
    pub(super) fn is_filtered(&self) -> bool {
        if matches!(self.consumer.config.deliver_policy, DeliverPolicy::Last | DeliverPolicy::LastPerSubject) {
            return true;
        }
        let filters = filters(&self.consumer.config);
        let covered = |subject: &String| filters.iter().any(|filter| *filter == ">" || filter == subject);
        !self.stream.config.subjects.iter().all(covered)
    }

    /// Whether each sequence of the stream has a message for the consumer until that message is removed. Markers and scheduled
    /// messages are removed by the server itself, mirrors have the sequences of their origin, and other retentions than limits
    /// remove what is acknowledged.
    pub(super) fn shows_removals(&self) -> bool {
        let config = &self.stream.config;
        let removes_by_itself = config.allow_message_ttl || config.allow_message_schedules;
        let is_copy = config.mirror.is_some();
        !self.is_filtered() && !removes_by_itself && !is_copy && !self.removes_acknowledged()
    }

    /// Whether the stream removes messages that its consumers have acknowledged.
    fn removes_acknowledged(&self) -> bool {
        self.stream.config.retention != RetentionPolicy::Limits
    }

    /// The subjects of the messages that the server delivers.
    pub fn subjects(&self) -> Vec<String> {
        let filters = self.filters();
        if self.is_filtered() { filters } else { self.stream.config.subjects.clone() }
    }

    /// The subjects that the consumer is for.
    pub fn filters(&self) -> Vec<String> {
        stored::owned_filters(&self.consumer.config)
    }

    fn has_work(&self) -> bool {
        self.consumer.num_pending > 0 || self.consumer.num_ack_pending > 0
    }

    /// The numbers that operators look at.
    pub fn view(&self) -> ConsumerView {
        let (state, consumer) = (&self.stream.state, &self.consumer);
        ConsumerView {
            ack_floor_stream_seq: consumer.ack_floor.stream_sequence,
            ack_floor_consumer_seq: consumer.ack_floor.consumer_sequence,
            delivered_stream_seq: consumer.delivered.stream_sequence,
            num_pending: consumer.num_pending,
            num_ack_pending: consumer.num_ack_pending as u64,
            num_redelivered: consumer.num_redelivered as u64,
            num_waiting: consumer.num_waiting as u64,
            stream_first_seq: state.first_sequence,
            stream_last_seq: state.last_sequence,
            max_ack_pending: u64::try_from(consumer.config.max_ack_pending).ok().filter(|max| *max > 0),
            paused: consumer.paused,
            // An empty stream reports a first and a last message of the year 1.
            first_published_at: (state.messages > 0).then(|| from_unix_ns(unix_ns(state.first_timestamp.into()))),
            stream_created_at: from_unix_ns(unix_ns(self.stream.created.into())),
            last_published_at: from_unix_ns(unix_ns(state.last_timestamp.into())),
            oldest_published_at: match self.oldest {
                Oldest::Published(at) => at,
                Oldest::NotAsked | Oldest::Unknown => None,
            },
            taken_at: SystemTime::now(),
        }
    }
}
