//! Reads what a stream holds, in order, beside the durable consumer and without touching it: for the audit.
//!
//! A consumer of its own without acknowledgements brings the messages fast; the server forgets it soon after we leave. It is
//! never trusted: a delivery that does not follow the one before, a silence, any error have the same cure, a new consumer that
//! starts at the first message not yet read. Nor is a sequence: in a stream created anew each stands for another message, so
//! nothing is handed on before a look, asked for after it was read, shows that the stream is still the same. Where a message that the client cannot parse may be in the way, and where such a
//! consumer is not permitted or would count for the stream, messages are asked for one by one instead.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::{ConsumerCreateStrictErrorKind, RetentionPolicy};
use async_nats::{Client, Message, StatusCode};
use futures_util::future::try_join_all;
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::connection::{self, Denials, Visit};
use super::consumer::{BindError, Found, HEADER_ROOM_BYTES, arrival, is_end_of_pull, look, look_at_stream};
use super::link::Link;
use super::unreadable::{Stored, filters, message_at, next_message};
use crate::config::Config;
use crate::model::delivery::{Position, Raw};
use crate::model::text::chain;
use crate::telemetry::Reminder;

/// Messages in one pull, and in what [`Walk::next`] returns. Two pulls are open at a time.
const PULL_MESSAGES: usize = 1000;
const PULLED_MAX: usize = 2 * PULL_MESSAGES;
const PULL_BYTES: usize = 8 * 1024 * 1024;
const PULL_EXPIRES: Duration = Duration::from_secs(10);
const HEARTBEAT: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_millis(2500);
/// Messages asked for at a time where each is a request.
const REQUESTS_MAX: u64 = 32;
/// Where one message is that the client cannot parse, others may be: so many more are read one by one.
const AFTER_UNREADABLE: usize = 100;
const CHECK_EVERY: Duration = Duration::from_millis(200);
/// The server forgets our consumer this long after the last pull.
const INACTIVE: Duration = Duration::from_secs(30);
/// So long a consumer may bring nothing but heartbeats: what was still to come may have left the stream.
const DROUGHT_MAX: Duration = Duration::from_secs(5);
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(2);
/// How long the goodbye to the server may take.
const CLOSE_BUDGET: Duration = Duration::from_secs(2);

/// Why the walk ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum WalkError {
    #[error("nothing could be read for {}", humantime::format_duration(*.waited))]
    Lost {
        waited: Duration,
        #[source]
        cause: BindError,
    },
    #[error("the stream was deleted or created anew meanwhile")]
    OtherStream,
}

/// A walk over those messages of a stream that its durable is for.
pub struct Walk {
    config: Arc<Config>,
    /// How long it tries without reading anything before it gives up.
    patience: Duration,
    link: Option<Link>,
    denials: Denials,
    stream_created: i128,
    filters: Vec<String>,
    /// The first sequence not yet read, and the last one wanted.
    next: u64,
    to: u64,
    gone: Gone,
    way: Way,
    /// So many messages more are to be read one by one.
    one_by_one: usize,
    /// Where a connection was lost last.
    lost_at: Option<u64>,
    /// The server gives us no consumer.
    no_consumer: bool,
    /// Tells our consumer from that of another audit, which has the same name.
    tag: String,
    /// A consumer of ours may be on the server.
    made: bool,
    /// Since when nothing could be read, and how often that was tried.
    trouble: Option<(Instant, u32)>,
    reminder: Reminder,
}

/// Messages that left the stream before they were read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gone {
    pub count: u64,
    /// The last one of them.
    pub through: u64,
}

/// How the next messages are read.
enum Way {
    Unknown,
    Consumer(Session),
    /// The next message of each filter, as far as it is known.
    OneByOne(Vec<Head>),
}

enum Head {
    Unknown,
    Known(Option<Stored>),
}

/// One consumer of ours.
struct Session {
    pulls: u64,
    /// Messages that open pulls may still bring.
    outstanding: usize,
    /// Messages that are still to come.
    left: u64,
    last_consumer_seq: u64,
    connects: u64,
}

enum Reading {
    GoesOn,
    /// Nothing that is wanted is left.
    IsOver,
}

/// Why a way was left.
struct Broken {
    cause: BindError,
    /// A message may be to blame.
    suspicious: bool,
}

impl Walk {
    /// From sequence `from` to `to`, of the stream and the consumer that were `found`.
    ///
    /// # Errors
    /// When there is no connection.
    pub async fn new(
        config: Arc<Config>,
        found: &Found,
        from: u64,
        to: u64,
        patience: Duration,
    ) -> Result<Self, BindError> {
        let (link, denials) = enter(&config).await?;
        Ok(Self {
            patience,
            link: Some(link),
            denials,
            config,
            stream_created: found.created().0,
            filters: filters(&found.consumer.config).into_iter().map(ToOwned::to_owned).collect(),
            next: from,
            to,
            gone: Gone::default(),
            way: Way::Unknown,
            one_by_one: 0,
            lost_at: None,
            // A stream that drops what its consumers have had would count ours as one of them.
            no_consumer: found.stream.config.retention != RetentionPolicy::Limits,
            tag: format!("{:016x}", fastrand::u64(..)),
            made: false,
            trouble: None,
            reminder: Reminder::default(),
        })
    }

    /// The next messages, in order; none at the end. What goes wrong on the way is tried again.
    ///
    /// # Errors
    /// When nothing could be read for as long as the patience lasts, or the stream is another one.
    pub async fn next(&mut self) -> Result<Vec<Raw>, WalkError> {
        let mut read = Vec::new();
        while self.next <= self.to && read.is_empty() {
            let denials = self.denials.clone();
            let ended = match (&mut self.way, &mut self.link) {
                (Way::Consumer(session), Some(link)) => {
                    denials.answer(session.read(link, &self.config, self.to, &mut read)).await
                }
                (Way::OneByOne(_), Some(_)) => denials.answer(self.read_one_by_one(&mut read)).await,
                (Way::Unknown, _) | (_, None) => Ok(self.open().await),
            };
            let mut ended = ended.unwrap_or_else(|denied| Err(BindError::from(denied).into()));
            let is_over = matches!(ended, Ok(Reading::IsOver));
            if (is_over || !read.is_empty())
                && let Err(broken) = self.confirm(&read, is_over).await
            {
                // It is read again, if it still can be. A message right behind it may have cut the line.
                read.clear();
                ended = Err(Broken { suspicious: true, ..broken });
            }
            if let Some(last) = read.last() {
                self.next = last.position.stream_seq + 1;
                self.trouble = None;
                self.reminder.forget();
            }
            match ended {
                Ok(Reading::GoesOn) => {}
                Ok(Reading::IsOver) => self.next = self.to.saturating_add(1),
                Err(broken) => self.leave(broken, read.is_empty()).await?,
            }
        }
        Ok(read)
    }

    /// What left the stream before it was read, so far.
    pub fn gone(&self) -> Gone {
        self.gone
    }

    /// Makes sure that what was read, or that nothing more is there, is of the stream that this walk is for.
    async fn confirm(&mut self, read: &[Raw], is_over: bool) -> Result<(), Broken> {
        let Some(link) = self.link.as_ref().filter(|link| link.is_connected()) else {
            return Err(Broken::because("the connection was lost"));
        };
        let stream = look_at_stream(&link.client, &self.config.consumer.stream).await?;
        let info = stream.cached_info();
        self.expect(info.created.unix_timestamp_nanos())?;
        let first = info.state.first_sequence;
        let mut next = self.next;
        let ends = read.iter().map(|raw| raw.position.stream_seq).chain(is_over.then(|| self.to.saturating_add(1)));
        for end in ends {
            // A gap beyond the first message is of other subjects, or of single messages that were deleted.
            let through = end.min(first);
            if through > next {
                self.gone = Gone { count: self.gone.count + (through - next), through: through - 1 };
            }
            next = end.saturating_add(1);
        }
        Ok(())
    }

    fn expect(&self, created: i128) -> Result<(), BindError> {
        match created == self.stream_created {
            true => Ok(()),
            false => Err(BindError::NoStream { stream: self.config.consumer.stream.clone() }),
        }
    }

    /// Takes our consumer off the server. If that fails the server does it by itself.
    pub async fn close(mut self) {
        if let Some(link) = self.link.take().filter(Link::is_connected) {
            // Nobody waits for what is left of it.
            drop(timeout(CLOSE_BUDGET, self.remove_consumer(&link.client)).await);
        }
    }

    /// Looks at the stream again and finds a way to read on, or that nothing is left.
    async fn open(&mut self) -> Result<Reading, Broken> {
        let link = match self.link.take() {
            Some(link) => link,
            None => {
                let (link, denials) = enter(&self.config).await?;
                self.denials = denials;
                link
            }
        };
        let client = self.link.insert(link).client.clone();
        let (stream, durable) = (&self.config.consumer.stream, &self.config.consumer.name);
        let found = self.denials.answer(look(&client, stream, durable)).await.map_err(BindError::from)??;
        self.expect(found.created().0)?;
        if !self.no_consumer && self.one_by_one == 0 {
            self.remove_consumer(&client).await;
            self.made = true;
            match self.create_consumer(&client).await? {
                Some(0) => return Ok(Reading::IsOver),
                Some(left) => {
                    let connects = self.link.as_ref().map_or(0, Link::connects);
                    self.way =
                        Way::Consumer(Session { pulls: 0, outstanding: 0, left, last_consumer_seq: 0, connects });
                }
                None => self.no_consumer = true,
            }
        }
        if matches!(self.way, Way::Unknown) {
            self.way = Way::OneByOne(self.filters.iter().map(|_| Head::Unknown).collect());
        }
        Ok(Reading::GoesOn)
    }

    /// How many messages it will bring; `None` if that is not permitted, or the server does not answer.
    async fn create_consumer(&self, client: &Client) -> Result<Option<u64>, BindError> {
        let name = consumer_name(&self.config);
        let consumer = pull::Config {
            name: Some(name.clone()),
            description: Some("reads for order-processor audit".to_owned()),
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: self.next },
            ack_policy: AckPolicy::None,
            // A list, also of one: a single filter would be part of the subject that has to be permitted.
            filter_subjects: self.filters.iter().filter(|filter| *filter != ">").cloned().collect(),
            inactive_threshold: INACTIVE,
            memory_storage: true,
            num_replicas: 1,
            metadata: [("audit".to_owned(), self.tag.clone())].into(),
            ..Default::default()
        };
        let jetstream = jetstream::new(client.clone());
        let created = jetstream.create_consumer_strict_on_stream(consumer, &self.config.consumer.stream);
        match self.denials.answer(created).await {
            Ok(Ok(consumer)) => Ok(Some(consumer.cached_info().num_pending)),
            Err(denied) => {
                tracing::warn!("{name} cannot be created, {denied}; reading one by one, which is slow");
                Ok(None)
            }
            Ok(Err(error)) if error.kind() == ConsumerCreateStrictErrorKind::TimedOut => {
                tracing::warn!("{name} cannot be created, there is no answer; reading one by one, which is slow");
                Ok(None)
            }
            Ok(Err(error)) => {
                let text = match error.kind() {
                    ConsumerCreateStrictErrorKind::AlreadyExists => {
                        format!("{name} exists: another audit runs, or ended less than {INACTIVE:?} ago")
                    }
                    _ => error.to_string(),
                };
                Err(BindError::NoAnswer { asked: "a request for a consumer to read with", error: text })
            }
        }
    }

    async fn remove_consumer(&mut self, client: &Client) {
        if std::mem::take(&mut self.made) {
            // What does not go now goes by itself, or shows when the next one is to be made.
            let (jetstream, name) = (jetstream::new(client.clone()), consumer_name(&self.config));
            let deleted = jetstream.delete_consumer_from_stream(&name, &self.config.consumer.stream);
            drop(self.denials.answer(deleted).await);
        }
    }

    /// Some messages, one request each.
    async fn read_one_by_one(&mut self, read: &mut Vec<Raw>) -> Result<Reading, Broken> {
        let (Way::OneByOne(heads), Some(link)) = (&mut self.way, &self.link) else { return Ok(Reading::GoesOn) };
        let (stream, durable) = (&self.config.consumer.stream, &self.config.consumer.name);
        let last = self.to.min(self.next.saturating_add(REQUESTS_MAX - 1));
        let mut found = Vec::new();
        if self.filters == [">"] {
            // Every sequence is wanted, so it need not be known which one comes next.
            let asked = (self.next..=last).map(|seq| message_at(&link.client, stream, seq));
            found.extend(try_join_all(asked).await?.into_iter().flatten());
        }
        if found.is_empty() {
            for (head, filter) in heads.iter_mut().zip(&self.filters) {
                if matches!(head, Head::Unknown) {
                    let stored = next_message(&link.client, stream, self.next, filter).await?;
                    *head = Head::Known(stored.filter(|stored| stored.seq <= self.to));
                }
            }
            match take_first(heads) {
                Some(stored) => found.push(stored),
                None => return Ok(Reading::IsOver),
            }
        }
        for stored in found {
            let (raw, _) = stored.into_last_arrival(stream, durable, 1);
            self.one_by_one = match raw.unreadable {
                Some(_) => AFTER_UNREADABLE,
                None => self.one_by_one.saturating_sub(1),
            };
            read.push(raw);
        }
        if self.one_by_one == 0 && !self.no_consumer {
            self.way = Way::Unknown;
        }
        Ok(Reading::GoesOn)
    }

    /// Waits before the next try if nothing came of the last one, unless the patience is over.
    async fn leave(&mut self, broken: Broken, in_vain: bool) -> Result<(), WalkError> {
        // Lost for the second time at about the same place: a message there may be to blame. Otherwise it is tried again with a
        // consumer, also because the reading one by one may not be permitted.
        let again = self.lost_at.is_some_and(|at| self.next - at <= PULLED_MAX as u64);
        self.one_by_one = if broken.suspicious && again { PULLED_MAX } else { 0 };
        if broken.suspicious {
            self.lost_at = Some(self.next);
        }
        self.way = Way::Unknown;
        // With it goes whatever is still on its way to us.
        self.link = None;
        if matches!(broken.cause, BindError::NoStream { .. }) {
            return Err(WalkError::OtherStream);
        }
        if !in_vain {
            return Ok(());
        }
        let (since, failures) = *self.trouble.get_or_insert((Instant::now(), 0));
        if since.elapsed() >= self.patience {
            return Err(WalkError::Lost { waited: self.patience, cause: broken.cause });
        }
        let cause = chain(&broken.cause);
        if failures > 0 && self.reminder.is_due(&cause) {
            tracing::warn!(%cause, next = self.next, "cannot read on, trying again");
        }
        self.trouble = Some((since, failures + 1));
        sleep((RETRY_DELAY_MIN * (1 << failures.min(5))).min(RETRY_DELAY_MAX)).await;
        Ok(())
    }
}

impl Session {
    /// Waits for messages and takes all that are there. What it has read is good also if it ends in an error.
    async fn read(
        &mut self,
        link: &mut Link,
        config: &Config,
        to: u64,
        read: &mut Vec<Raw>,
    ) -> Result<Reading, Broken> {
        let asked = Instant::now();
        let mut last_heard = asked;
        while read.len() < PULL_MESSAGES {
            if self.left == 0 {
                return Err(Broken::because("all that was there has been read"));
            }
            if read.is_empty() && asked.elapsed() > DROUGHT_MAX {
                return Err(Broken::because("no message comes"));
            }
            self.pull(link, config).await?;
            let message = match link.inbox.next().now_or_never() {
                None if !read.is_empty() => return Ok(Reading::GoesOn),
                Some(message) => Ok(message),
                None => timeout_at(Instant::now() + CHECK_EVERY, link.inbox.next()).await,
            };
            match message {
                Ok(Some(message)) => {
                    last_heard = Instant::now();
                    if let Reading::IsOver = self.take_in(message, to, read)? {
                        return Ok(Reading::IsOver);
                    }
                }
                Ok(None) => return Err(Broken::suspicious(BindError::ClientDead)),
                Err(_) if !link.is_connected() || link.connects() != self.connects => {
                    return Err(Broken { suspicious: true, ..Broken::because("the connection was lost") });
                }
                Err(_) if last_heard.elapsed() > SILENCE_MAX => return Err(Broken::because("the server is silent")),
                Err(_) => {}
            }
        }
        Ok(Reading::GoesOn)
    }

    async fn pull(&mut self, link: &Link, config: &Config) -> Result<(), BindError> {
        if self.outstanding > PULL_MESSAGES {
            return Ok(());
        }
        let request = serde_json::json!({
            "batch": PULL_MESSAGES,
            // A limit below the largest possible message would stop at it for ever.
            "max_bytes": PULL_BYTES.max(link.client.max_payload() + HEADER_ROOM_BYTES),
            "expires": PULL_EXPIRES.as_nanos() as u64,
            "idle_heartbeat": HEARTBEAT.as_nanos() as u64,
        });
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", config.consumer.stream, consumer_name(config));
        let reply = format!("{}.{}", link.subject, self.pulls);
        let sent = link.client.publish_with_reply(subject, reply, request.to_string().into()).await;
        sent.map_err(|_| BindError::ClientDead)?;
        self.pulls += 1;
        self.outstanding += PULL_MESSAGES;
        Ok(())
    }

    fn take_in(&mut self, message: Message, to: u64, read: &mut Vec<Raw>) -> Result<Reading, Broken> {
        let position = message.reply.as_ref().and_then(|reply| Position::parse(reply));
        let Some(position) = position else { return self.heed(&message).map(|()| Reading::GoesOn) };
        if message.status.is_some() {
            return Err(Broken {
                suspicious: true,
                ..Broken::because("a stored message calls itself a word of the server")
            });
        }
        if position.consumer_seq != self.last_consumer_seq + 1 {
            return Err(Broken { suspicious: true, ..Broken::because("a message got lost on its way") });
        }
        self.last_consumer_seq = position.consumer_seq;
        self.outstanding = self.outstanding.saturating_sub(1);
        self.left = self.left.saturating_sub(1);
        if position.stream_seq <= to {
            read.extend(arrival(message).map(|(raw, _)| raw));
        }
        Ok(if position.stream_seq >= to { Reading::IsOver } else { Reading::GoesOn })
    }

    /// A word of the server about one of our pulls.
    fn heed(&mut self, message: &Message) -> Result<(), Broken> {
        let status = message.status.unwrap_or_default();
        let description = message.description.as_deref().unwrap_or_default();
        let left = message.headers.as_ref().and_then(|headers| headers.get("Nats-Pending-Messages"));
        match left.and_then(|left| left.as_str().parse::<usize>().ok()) {
            _ if status == StatusCode::IDLE_HEARTBEAT => Ok(()),
            Some(left) if is_end_of_pull(description) => {
                self.outstanding = self.outstanding.saturating_sub(left);
                Ok(())
            }
            Some(_) | None => Err(Broken::because(&format!("the server ended a pull: {status} {description}"))),
        }
    }
}

impl Broken {
    fn because(text: &str) -> Self {
        Self { cause: BindError::NoAnswer { asked: "the reading", error: text.to_owned() }, suspicious: false }
    }

    fn suspicious(cause: BindError) -> Self {
        Self { cause, suspicious: true }
    }
}

impl From<BindError> for Broken {
    fn from(cause: BindError) -> Self {
        Self { cause, suspicious: false }
    }
}

async fn enter(config: &Config) -> Result<(Link, Denials), BindError> {
    let Visit { client, denials } = connection::visit(&config.nats).await?;
    Ok((Link::new(config, client).await?, denials))
}

/// Takes the known message with the lowest sequence; `None` if no filter has one more.
fn take_first(heads: &mut [Head]) -> Option<Stored> {
    let seq = |head: &Head| match head {
        Head::Known(Some(stored)) => Some(stored.seq),
        Head::Known(None) | Head::Unknown => None,
    };
    let first = heads.iter_mut().filter(|head| seq(head).is_some()).min_by_key(|head| seq(head))?;
    match std::mem::replace(first, Head::Unknown) {
        Head::Known(stored) => stored,
        Head::Unknown => None,
    }
}

fn consumer_name(config: &Config) -> String {
    format!("{}-audit", config.consumer.name)
}
