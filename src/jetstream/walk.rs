//! Reads what a stream holds, in stream order, without touching the durable consumer: for the audit.
//!
//! A second consumer without acknowledgements brings the messages fast. The server deletes it soon after the walk ends. The walk
//! never trusts this consumer: if a delivery does not follow the one before, or after a silence or any error, the walk makes a new
//! one that starts at the first message not yet read. Nor does the walk trust a sequence: in a recreated stream, each sequence
//! means another message. So the walk hands messages on only after a look, made after it read them, shows the same stream. The
//! walk reads messages one by one where a message that the client cannot parse may be in the way, where the server permits no such
//! consumer, and where this consumer would count for the retention of the stream.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::{ConsumerCreateStrictErrorKind, RetentionPolicy};
use tokio::time::{Instant, sleep, timeout};

use super::client::Client;
use super::connection::{self, CommandClient, Denials};
use super::error::{Blame, Error, Trouble};
use super::link::Link;
use super::look::{Snapshot, look, look_at_stream};
use super::stored::{StoredRange, owned_filters};
use crate::config::Config;
use crate::model::delivery::Raw;
use crate::model::time::unix_ns;
use crate::telemetry::Reminder;

mod own_consumer;

use own_consumer::OwnConsumer;

/// Messages in one pull, and in the result of [`Walk::next`]. Two pulls are open at the same time.
const PULL_MESSAGES: usize = 1000;
const PULLED_MAX: usize = 2 * PULL_MESSAGES;
/// Near a message that the client cannot parse may be others: so many messages after it are read one by one.
const AFTER_UNREADABLE: usize = 100;
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(2);
/// The longest wait for the deletion of our consumer at the end.
const CLOSE_BUDGET: Duration = Duration::from_secs(2);

/// Why the walk ended too early.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    #[error("nothing could be read for {}: {cause}", humantime::format_duration(*.waited))]
    Lost { waited: Duration, cause: String },
    #[error("the stream was deleted or recreated during the audit")]
    OtherStream,
}

/// A walk over the messages of a stream that its durable consumer is for.
pub struct Walk {
    config: Arc<Config>,
    /// The longest time without a message before the walk ends with [`WalkError::Lost`].
    patience: Duration,
    link: Option<Link>,
    denials: Denials,
    stream_ns: i64,
    filters: Vec<String>,
    /// The first sequence not yet read, and the last one wanted.
    next: u64,
    to: u64,
    vanished: Vanished,
    way: Way,
    permit: Permit,
    /// So many messages more are read one by one.
    one_by_one: usize,
    /// Where a connection was lost last.
    lost_at: Option<u64>,
    /// Distinguishes our consumer from the consumer of another audit, which has the same name.
    tag: String,
    /// Since when nothing could be read, and how many times it was tried.
    trouble: Option<(Instant, u32)>,
    reminder: Reminder,
}

/// Messages that left the stream before they were read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Vanished {
    pub count: u64,
    /// The last one of them.
    pub through: u64,
}

/// How the next messages are read.
enum Way {
    Unknown,
    Consumer(OwnConsumer),
    OneByOne(StoredRange),
}

/// Whether the walk may have its own consumer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Permit {
    /// Yes, and none is on the server.
    Unused,
    /// Yes, and one may be on the server.
    Used,
    /// The server does not permit it, or it would count for the retention.
    Denied,
}

enum Reading {
    Continues,
    /// Everything that is wanted was read.
    Complete,
}

/// Why a way to read ended.
enum Broken {
    OtherStream,
    Trouble(Trouble),
}

impl Walk {
    /// From sequence `from` to `to`, of the stream and the consumer in `snapshot`.
    ///
    /// # Errors
    /// Without a connection.
    pub async fn new(
        config: Arc<Config>,
        snapshot: &Snapshot,
        from: u64,
        to: u64,
        patience: Duration,
    ) -> Result<Self, Error> {
        let (link, denials) = connect(&config).await?;
        // Streams with another retention delete what all their consumers have acknowledged.
        let is_counted = snapshot.stream.config.retention != RetentionPolicy::Limits;
        Ok(Self {
            patience,
            link: Some(link),
            denials,
            config,
            stream_ns: snapshot.incarnation().stream_ns,
            filters: owned_filters(&snapshot.consumer.config),
            next: from,
            to,
            vanished: Vanished::default(),
            way: Way::Unknown,
            permit: if is_counted { Permit::Denied } else { Permit::Unused },
            one_by_one: 0,
            lost_at: None,
            tag: format!("{:016x}", fastrand::u64(..)),
            trouble: None,
            reminder: Reminder::default(),
        })
    }

    /// The next messages, in stream order; none at the end. After a trouble on the way, the walk tries again.
    ///
    /// # Errors
    /// If nothing could be read for the time of the patience, or if the stream is another one.
    pub async fn next(&mut self) -> Result<Vec<Raw>, WalkError> {
        let mut read = Vec::new();
        while self.next <= self.to && read.is_empty() {
            let mut ended = self.read(&mut read).await;
            let is_complete = matches!(ended, Ok(Reading::Complete));
            if (is_complete || !read.is_empty())
                && let Err(broken) = self.confirm(&read, is_complete).await
            {
                // The messages are read again, if they still can be. A message right after them may have cut the connection.
                read.clear();
                ended = Err(broken.by_message());
            }
            if let Some(last) = read.last() {
                self.next = last.position.stream_seq + 1;
                self.trouble = None;
                self.reminder.forget();
            }
            match ended {
                Ok(Reading::Continues) => {}
                Ok(Reading::Complete) => self.next = self.to.saturating_add(1),
                Err(Broken::OtherStream) => return Err(WalkError::OtherStream),
                Err(Broken::Trouble(trouble)) => self.leave(trouble, read.is_empty()).await?,
            }
        }
        Ok(read)
    }

    /// The messages that left the stream before they were read, so far.
    pub fn vanished(&self) -> Vanished {
        self.vanished
    }

    /// Deletes our consumer. If that fails, the server deletes it later.
    pub async fn close(mut self) {
        if let Some(link) = self.link.take().filter(Link::is_connected) {
            drop(timeout(CLOSE_BUDGET, self.remove_consumer(&link.client)).await);
        }
    }

    async fn read(&mut self, read: &mut Vec<Raw>) -> Result<Reading, Broken> {
        let denials = self.denials.clone();
        let reading = match (&mut self.way, &mut self.link) {
            (Way::Consumer(consumer), Some(link)) => {
                denials.answer(consumer.read(link, self.to, read)).await.map(|reading| reading.map_err(Broken::from))
            }
            (Way::OneByOne(_), Some(_)) => denials.answer(self.read_one_by_one(read)).await,
            (Way::Unknown, _) | (_, None) => Ok(self.open().await),
        };
        reading.map_err(Error::from)?
    }

    /// Makes sure that what was read, or that nothing is left to read, belongs to the stream of this walk.
    async fn confirm(&mut self, read: &[Raw], is_complete: bool) -> Result<(), Broken> {
        let Some(link) = self.link.as_ref().filter(|link| link.is_connected()) else {
            return Err(Trouble::new("the connection was lost", None).into());
        };
        let stream = look_at_stream(&link.client, &self.config.consumer.stream).await?;
        let info = stream.cached_info();
        self.expect(unix_ns(info.created.into()))?;
        let first = info.state.first_sequence;
        let mut next = self.next;
        let ends = read.iter().map(|raw| raw.position.stream_seq).chain(is_complete.then(|| self.to.saturating_add(1)));
        for end in ends {
            // Gaps above the first message are other subjects, or single messages that were deleted.
            let through = end.min(first);
            if through > next {
                self.vanished = Vanished { count: self.vanished.count + (through - next), through: through - 1 };
            }
            next = end.saturating_add(1);
        }
        Ok(())
    }

    fn expect(&self, stream_ns: i64) -> Result<(), Broken> {
        if stream_ns == self.stream_ns { Ok(()) } else { Err(Broken::OtherStream) }
    }

    /// Looks at the stream again and finds a way to continue, or that nothing is left.
    async fn open(&mut self) -> Result<Reading, Broken> {
        let link = match self.link.take() {
            Some(link) => link,
            None => {
                let (link, denials) = connect(&self.config).await?;
                self.denials = denials;
                link
            }
        };
        let connects = link.connects();
        let client = self.link.insert(link).client.clone();
        let names = &self.config.consumer;
        let looked = self.denials.answer(look(&client, &names.stream, &names.name)).await;
        let snapshot = looked.map_err(Error::from)??;
        self.expect(snapshot.incarnation().stream_ns)?;
        if self.permit != Permit::Denied && self.one_by_one == 0 {
            self.remove_consumer(&client).await;
            self.permit = Permit::Used;
            match self.create_consumer(&client).await? {
                Some(0) => return Ok(Reading::Complete),
                Some(left) => {
                    let (stream, name) = (&self.config.consumer.stream, consumer_name(&self.config));
                    self.way = Way::Consumer(OwnConsumer::new(&client, stream, &name, left, connects));
                }
                None => self.permit = Permit::Denied,
            }
        }
        if matches!(self.way, Way::Unknown) {
            let stream = self.config.consumer.stream.clone();
            self.way = Way::OneByOne(StoredRange::of(client, stream, &self.filters, self.next, self.to));
        }
        Ok(Reading::Continues)
    }

    /// How many messages our consumer will bring; `None` if it is not permitted, or if the server does not answer.
    async fn create_consumer(&self, client: &Client) -> Result<Option<u64>, Error> {
        let name = consumer_name(&self.config);
        let consumer = own_consumer::config(&name, self.next, &self.filters, &self.tag);
        let jetstream = client.jetstream();
        let created = jetstream.create_consumer_strict_on_stream(consumer, &self.config.consumer.stream);
        match self.denials.answer(created).await {
            Ok(Ok(consumer)) => Ok(Some(consumer.cached_info().num_pending)),
            Err(denied) => {
                tracing::warn!(
                    "cannot create consumer {name}: {denied}; the audit reads messages one by one, which is slow"
                );
                Ok(None)
            }
            Ok(Err(error)) if error.kind() == ConsumerCreateStrictErrorKind::TimedOut => {
                tracing::warn!(
                    "cannot create consumer {name}: the server does not answer; the audit reads messages one by one, which is slow"
                );
                Ok(None)
            }
            Ok(Err(error)) => {
                let text = match error.kind() {
                    ConsumerCreateStrictErrorKind::AlreadyExists => {
                        format!(
                            "{name} exists: another audit runs, or ended less than {:?} ago",
                            own_consumer::INACTIVE
                        )
                    }
                    _ => error.to_string(),
                };
                Err(Error::NoAnswer { asked: "a request for a consumer to read with", error: text })
            }
        }
    }

    async fn remove_consumer(&mut self, client: &Client) {
        if self.permit == Permit::Used {
            self.permit = Permit::Unused;
            // A failure shows when the next consumer is created; otherwise the server deletes this one later.
            let (jetstream, name) = (client.jetstream(), consumer_name(&self.config));
            let deleted = jetstream.delete_consumer_from_stream(&name, &self.config.consumer.stream);
            drop(self.denials.answer(deleted).await);
        }
    }

    async fn read_one_by_one(&mut self, read: &mut Vec<Raw>) -> Result<Reading, Broken> {
        let Way::OneByOne(range) = &mut self.way else { return Ok(Reading::Continues) };
        let found = range.next_chunk().await?;
        if found.is_empty() {
            return Ok(Reading::Complete);
        }
        let names = &self.config.consumer;
        for stored in found {
            let raw = stored.into_arrival(&names.stream, &names.name, 1).raw;
            self.one_by_one = match raw.unreadable {
                Some(_) => AFTER_UNREADABLE,
                None => self.one_by_one.saturating_sub(1),
            };
            read.push(raw);
        }
        if self.one_by_one == 0 && self.permit != Permit::Denied {
            self.way = Way::Unknown;
        }
        Ok(Reading::Continues)
    }

    /// Waits before the next attempt if the last one brought nothing, unless the patience is over.
    async fn leave(&mut self, trouble: Trouble, in_vain: bool) -> Result<(), WalkError> {
        let is_by_message = trouble.blame != Blame::Elsewhere;
        // Lost for the second time near the same place: a message there may be the cause. Otherwise the next attempt uses a
        // consumer, also because the server may not permit to read one by one.
        let again = self.lost_at.is_some_and(|at| self.next - at <= PULLED_MAX as u64);
        self.one_by_one = if is_by_message && again { PULLED_MAX } else { 0 };
        if is_by_message {
            self.lost_at = Some(self.next);
        }
        self.way = Way::Unknown;
        // This also drops the deliveries that are on their way.
        self.link = None;
        if !in_vain {
            return Ok(());
        }
        let (since, failures) = *self.trouble.get_or_insert((Instant::now(), 0));
        if since.elapsed() >= self.patience {
            return Err(WalkError::Lost { waited: self.patience, cause: trouble.cause });
        }
        if failures > 0 && self.reminder.is_due(&trouble.cause) {
            tracing::warn!(cause = %trouble.cause, next = self.next, "cannot read the stream; trying again");
        }
        self.trouble = Some((since, failures + 1));
        sleep((RETRY_DELAY_MIN * (1 << failures.min(5))).min(RETRY_DELAY_MAX)).await;
        Ok(())
    }
}

impl Broken {
    /// A message may be the cause.
    fn by_message(self) -> Self {
        match self {
            Self::Trouble(trouble) => Self::Trouble(Trouble { blame: Blame::Message, ..trouble }),
            Self::OtherStream => Self::OtherStream,
        }
    }
}

impl From<Trouble> for Broken {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        match error {
            Error::NoStream { .. } => Self::OtherStream,
            other => Self::Trouble(other.into()),
        }
    }
}

async fn connect(config: &Config) -> Result<(Link, Denials), Error> {
    let CommandClient { client, denials } = connection::connect_command(&config.nats).await?;
    Ok((Link::new(config, client).await?, denials))
}

fn consumer_name(config: &Config) -> String {
    format!("{}-audit", config.consumer.name)
}
