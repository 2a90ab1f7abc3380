//! The server's side: connect, bind to the durable, pull deliveries, acknowledge. Only this module knows what the client's
//! messages look like. It never creates, changes or deletes anything on the server.
//!
//! We pull with requests of our own and read the answers from an inbox of our own, instead of using the client's pull stream:
//! that one can stay silent for half a minute after a reconnect, asks again neither after a missed heartbeat nor after some
//! errors, and spins when the client drains (seen with async-nats 0.51). Here every trouble has the same cure, [`Consumer::lose`]:
//! look at stream and consumer again, then pull again. Deliveries that come in meanwhile are kept, since the inbox stays.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use async_nats::jetstream::consumer::Info as ConsumerInfo;
use async_nats::jetstream::context::{ConsumerInfoErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{Info as StreamInfo, Stream};
use async_nats::jetstream::{self, ErrorCode};
use async_nats::{Client, Message, Request, StatusCode};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep_until};

use super::connection::{self, Visit};
use super::gaps::{Look, Notice, Positions};
use super::gate::{self, Expectations, Finding, Severity};
use super::given_up::{Advised, Records, Start};
use super::link::{Link, is_connected};
use super::unreadable;
use crate::config::{self, Config};
use crate::model::delivery::{Headers, Position, Raw, Reply};
use crate::model::outcome::Acknowledgement;
use crate::model::text::chain;
use crate::model::view::ConsumerView;
use crate::telemetry::metrics::NatsErrorKind;
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

/// The server says that a pull is alive this often; two missed ones mean that it is not.
const HEARTBEAT: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_millis(2500);
/// How long one pull stays open on the server.
const PULL_EXPIRES: Duration = Duration::from_secs(15);
/// A pull whose end we have not heard of by then is forgotten.
const PULL_GRACE: Duration = Duration::from_secs(2);
/// How often [`Consumer::next`] looks at its clocks.
const CHECK_EVERY: Duration = Duration::from_millis(200);
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);
/// Looks without an answer in a row after which a new client is made.
const NO_ANSWERS_MAX: u32 = 3;
/// The pause after a pull that ended because the next message is larger than the consumer lets us ask for.
const TOO_LARGE_PAUSE: Duration = Duration::from_secs(1);
/// How long the age of the oldest message is waited for.
const AGE_PATIENCE: Duration = Duration::from_secs(1);
/// A gap in the sequences wants a look, but not a look each.
const GAP_PAUSE: Duration = Duration::from_millis(100);
/// Room for headers and protocol beside the largest payload, in the byte limit of a pull.
pub(super) const HEADER_ROOM_BYTES: usize = 64 * 1024;
/// Deliveries handed on at once.
const CHUNK_MAX: usize = 256;
/// Messages given up by the server that are fetched at once, and how many may wait for it. The rest is looked for.
const GIVEN_UP_MAX: usize = 100;
const ADVISED_MAX: usize = 10_000;
/// Until they are fetched again after a failure.
const ADVISED_AGAIN: Duration = Duration::from_secs(5);

/// The way to one durable pull consumer.
pub struct Consumer {
    config: Arc<Config>,
    telemetry: Arc<Telemetry>,
    info_every: Duration,
    state: State,
    /// Client and inbox. They outlive a binding and go only when the client is dead.
    link: Option<Link>,
    /// The link's client, for acknowledgements while the link is with a binding on its way.
    client: Option<Client>,
    /// What we were bound to last, to notice when it is another one.
    last: Option<(i128, i128)>,
    /// Deliveries that came in while it was in doubt whose they are.
    stash: Vec<Arrival>,
    /// What the server was heard to give up and what was not fetched yet. It outlives a connection: the server says it once.
    advised: Vec<Advised>,
    /// A connection was lost while deliveries were on their way: one of them may be to blame.
    suspicious: bool,
    /// Up to here no message in the stream is unreadable.
    clean_through: Arc<AtomicU64>,
    /// The consumer sequence of the last look at this consumer.
    ack_floor: u64,
    positions: Positions,
    paused: bool,
    /// The warnings of the start gate that hold, and were said.
    warned: HashSet<String>,
    failures: u32,
    reminder: Reminder,
}

/// `Down` --time or reconnect--> `Binding` --stream and consumer are good--> `Bound` --any trouble--> `Down`.
enum State {
    Down {
        until: Instant,
    },
    /// Holds the link, so that dropping [`Consumer::next`] half-way loses nothing.
    Binding(BoxFuture<'static, Bound>),
    Bound(Box<Session>),
}

/// What came of trying to bind. The link comes back in any case, if there is one.
type Bound = Result<(Link, Found), (Option<Link>, BindError)>;

/// One binding, from a look at stream and consumer to the next trouble.
struct Session {
    limits: Limits,
    created: (i128, i128),
    /// Messages that open pulls may still bring.
    outstanding: usize,
    /// When the last pull must be over.
    pull_deadline: Instant,
    pulls: u64,
    /// No pull before this.
    pull_due: Instant,
    /// Something came since the last pull was sent.
    fruitful: bool,
    last_heard: Instant,
    /// Something was heard since that was last asked.
    heard: bool,
    last_consumer_seq: u64,
    /// The client's count of connections when we bound.
    connects: u64,
    checks: tokio::time::Interval,
    info: Option<BoxFuture<'static, Result<Found, BindError>>>,
    info_due: Instant,
    /// Whether the age of the oldest message can be learnt; the permission for it is optional.
    ages: bool,
    /// The search for messages that the client cannot parse, after a loss.
    scan: Option<BoxFuture<'static, Result<Vec<Arrival>, BindError>>>,
    records: Records,
    /// The first of the messages that the server was heard to give up, on their way: so many, and not before this.
    given_up: Option<BoxFuture<'static, Result<Vec<Arrival>, BindError>>>,
    given_up_count: usize,
    given_up_due: Instant,
    given_up_reminder: Reminder,
}

/// What the consumer allows and when it delivers again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The shortest time in which the server may deliver a held message again.
    pub ack_wait: Duration,
    /// The last delivery there will be, if there is a last one.
    pub max_deliver: Option<u64>,
    /// So many messages may be delivered and not acknowledged.
    pub max_ack_pending: Option<usize>,
    backoff: Vec<Duration>,
    max_batch: Option<usize>,
    max_bytes: Option<usize>,
    max_expires: Option<Duration>,
    max_payload: usize,
}

/// One delivery, and where its acknowledgements go.
pub type Arrival = (Raw, Reply);

/// What happened on the server's side.
pub enum Event {
    /// We are bound. `former`: the stream is another one than before, and these deliveries came while that was not known.
    Bound { limits: Limits, stream_created_ns: i64, former: Option<Vec<Arrival>>, view: ConsumerView },
    /// In the order in which they came.
    Deliveries(Vec<Arrival>),
    /// Messages that the server delivers no more and that nobody has acknowledged, as their last deliveries.
    GivenUp(Vec<Arrival>),
    /// A fresh look at stream and consumer; with what the consumer allows, if that was edited.
    Seen { view: ConsumerView, edited: Option<Limits> },
    /// We were never bound, and cannot be before the operator has changed something.
    Refused(BindError),
}

/// How much more the worker can take.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub messages: usize,
    pub bytes: usize,
}

/// Stream and consumer as the server shows them.
pub struct Found {
    pub stream: StreamInfo,
    pub consumer: ConsumerInfo,
    /// When the oldest message that the ack floor has not passed was published, if that was asked for and there is one.
    oldest_published_at: Option<SystemTime>,
    /// It was asked for, and the server did not say.
    age_unknown: bool,
}

/// Why we are not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error(transparent)]
    Connect(#[from] connection::ConnectError),
    #[error("stream {stream} does not exist; create it and its consumer with `order-processor setup`")]
    NoStream { stream: String },
    #[error("stream {stream} has no consumer {consumer}; create it with `order-processor setup`")]
    NoConsumer { stream: String, consumer: String },
    #[error("JetStream is not enabled on the server, or not for this account")]
    NoJetStream,
    #[error("the server does not answer {asked}: {error}")]
    NoAnswer { asked: &'static str, error: String },
    #[error("{}", .0.iter().map(|finding| finding.text.as_str()).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Finding>),
    /// Of a command's question.
    #[error(transparent)]
    Denied(#[from] connection::Denied),
    #[error("stream or consumer was created anew meanwhile")]
    Another,
    #[error("the client has ended")]
    ClientDead,
}

impl BindError {
    /// Waiting does not mend these. Once we have been bound we wait all the same: whoever broke it may be at it.
    fn is_for_the_operator(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            // `run` has looked at the files before; what is wrong with them now, or with the login, is a rotation in the middle.
            Self::Connect(_)
            | Self::NoStream { .. }
            | Self::NoConsumer { .. }
            | Self::NoJetStream
            | Self::NoAnswer { .. }
            | Self::Denied(_)
            | Self::Another
            | Self::ClientDead => false,
        }
    }
}

/// Why a binding ended.
struct Trouble {
    cause: String,
    kind: Option<NatsErrorKind>,
    client_dead: bool,
    /// A delivery may be to blame.
    suspicious: bool,
}

impl Consumer {
    pub fn new(config: Arc<Config>, telemetry: Arc<Telemetry>, info_every: Duration) -> Self {
        Self {
            config,
            telemetry,
            info_every,
            state: State::Down { until: Instant::now() },
            link: None,
            client: None,
            last: None,
            stash: Vec::new(),
            advised: Vec::new(),
            suspicious: false,
            clean_through: Arc::default(),
            ack_floor: 0,
            positions: Positions::default(),
            paused: false,
            warned: HashSet::new(),
            failures: 0,
            reminder: Reminder::default(),
        }
    }

    /// Waits for the next event; asks the server for at most `room` beyond what was asked for already.
    ///
    /// May be dropped at any await without losing a delivery. It never fails: whatever goes wrong is logged, counted, shown
    /// in the health, and tried again.
    pub async fn next(&mut self, room: Room) -> Event {
        loop {
            match &mut self.state {
                State::Down { until } => {
                    let reconnecting = self.link.as_ref().is_some_and(|link| !link.is_connected());
                    if reconnecting {
                        // Nothing to ask before the client is back, and then at once.
                        tokio::time::sleep(RETRY_DELAY_MIN).await;
                    } else {
                        sleep_until(*until).await;
                        self.state =
                            State::Binding(bind(self.config.clone(), self.telemetry.clone(), self.link.take()).boxed());
                    }
                }
                State::Binding(binding) => match binding.await {
                    Ok((link, found)) => return self.bound(link, found),
                    Err((_, error)) if self.last.is_none() && error.is_for_the_operator() => {
                        return Event::Refused(error);
                    }
                    Err((link, error)) => {
                        self.link = link;
                        self.not_bound(&error);
                    }
                },
                State::Bound(_) if !self.stash.is_empty() => return Event::Deliveries(std::mem::take(&mut self.stash)),
                State::Bound(session) => {
                    let Some(link) = &mut self.link else {
                        self.lose(Trouble::dead());
                        continue;
                    };
                    let into =
                        Intake { stash: &mut self.stash, advised: &mut self.advised, positions: &mut self.positions };
                    let step = session.step(link, &self.config, room, self.info_every, into).await;
                    if std::mem::take(&mut session.heard) {
                        self.telemetry.pulls_work();
                    }
                    match step {
                        Ok(Step::Arrived) => {}
                        Ok(Step::GivenUp(arrivals)) => return Event::GivenUp(arrivals),
                        Ok(Step::Seen(found)) => match self.seen(&found) {
                            Ok(event) => return event,
                            Err(trouble) => self.lose(trouble),
                        },
                        Err(trouble) => self.lose(trouble),
                    }
                }
            }
        }
    }

    /// Tells the server about deliveries. Nothing comes back: what gets lost is delivered again, and is then a duplicate.
    ///
    /// # Errors
    /// When there is no connection to send it over. Bound the time: a client that reconnects takes 2,048 and then blocks.
    pub async fn acknowledge(&mut self, acknowledgements: Vec<(Reply, Acknowledgement)>) -> Result<(), BindError> {
        let client = self.connected_client()?;
        for (reply, acknowledgement) in acknowledgements {
            let payload = self.payload(&reply, acknowledgement);
            client.publish(reply.subject, payload).await.map_err(|_| BindError::ClientDead)?;
            self.telemetry.metrics.acks.increment(acknowledgement.kind(), 1);
        }
        Ok(())
    }

    /// Like [`Consumer::acknowledge`], and waits until the server says that it has the last one, and with it all before it.
    pub async fn acknowledge_with_receipt(
        &mut self,
        mut acknowledgements: Vec<(Reply, Acknowledgement)>,
    ) -> Result<(), BindError> {
        let Some((reply, acknowledgement)) = acknowledgements.pop() else { return Ok(()) };
        self.acknowledge(acknowledgements).await?;
        let client = self.connected_client()?;
        // Not the client's double ack: that one takes any answer for a receipt, also "no responders".
        let request = Request::new().payload(self.payload(&reply, acknowledgement));
        let answer = client.send_request(reply.subject, request).await;
        answer.map_err(|error| BindError::NoAnswer { asked: "the last acknowledgement", error: error.to_string() })?;
        self.telemetry.metrics.acks.increment(acknowledgement.kind(), 1);
        Ok(())
    }

    /// Read access to what the stream holds, while bound.
    pub fn records(&self) -> Option<Records> {
        match &self.state {
            State::Bound(session) => Some(session.records.clone()),
            State::Down { .. } | State::Binding(_) => None,
        }
    }

    fn connected_client(&self) -> Result<&Client, BindError> {
        let client = self.client.as_ref();
        client.filter(|client| is_connected(client)).ok_or(BindError::ClientDead)
    }

    /// Stops pulling for good and returns what had already been handed out to us.
    ///
    /// A delivery that reaches an inbox that is gone comes back only after `ack_wait`. So an open pull that the server is busy
    /// answering is let run out first, for a moment; then the inbox goes, and a round trip makes sure that nothing is on its way.
    pub async fn quiesce(&mut self) -> Vec<Arrival> {
        const LULL: Duration = Duration::from_millis(50);
        const RUN_OUT: Duration = Duration::from_millis(500);
        const BIND_PATIENCE: Duration = Duration::from_secs(1);
        let mut arrived = std::mem::take(&mut self.stash);
        if let State::Binding(binding) = &mut self.state
            && let Ok(bound) = tokio::time::timeout(BIND_PATIENCE, binding).await
        {
            self.link = bound.map_or_else(|(link, _)| link, |(link, _)| Some(link));
            self.state = State::Down { until: Instant::now() };
        }
        let Some(link) = &mut self.link else { return arrived };
        let deadline = Instant::now() + RUN_OUT;
        while let State::Bound(session) = &mut self.state
            && session.outstanding > 0
        {
            let patience = deadline.min(Instant::now() + LULL);
            let Ok(Some(message)) = tokio::time::timeout_at(patience, link.inbox.next()).await else { break };
            // Trouble is no longer of interest: we are leaving.
            let mut into = Intake { stash: &mut arrived, advised: &mut self.advised, positions: &mut self.positions };
            if session.take_in(message, &mut into).is_err() {
                break;
            }
        }
        if link.inbox.drain().await.is_ok() && link.is_connected() {
            let asked = inspect(link.client.clone(), self.config.clone());
            if tokio::time::timeout(Duration::from_secs(1), asked).await.is_err() {
                tracing::debug!("no answer from the server, what it still sends us comes back after ack_wait");
            }
        }
        link.take_ready(&mut arrived);
        arrived
    }

    fn bound(&mut self, mut link: Link, found: Found) -> Event {
        let created = found.created();
        let first = self.last.is_none();
        let another_stream = self.last.is_some_and(|last| last.0 != created.0);
        let another_consumer = self.last.is_some_and(|last| last.1 != created.1);
        self.last = Some(created);
        self.failures = 0;
        self.reminder.forget();
        let limits = Limits::of(&found.consumer, link.client.max_payload());
        let (stream, consumer) = (&found.stream.config.name, &found.consumer.name);
        if another_stream || another_consumer {
            self.telemetry.metrics.consumer_rebinds.increment(1);
        }
        if another_stream {
            tracing::warn!(%stream, "the stream was deleted and created anew: its sequences start again");
        } else if another_consumer {
            tracing::warn!(%consumer, "the consumer was deleted and created anew: messages may come again");
        }
        self.warn(gate::examine(&found.stream, &found.consumer, Expectations::of(&self.config)));
        let notices = self.positions.bound(Look::of(&found), another_stream || another_consumer);
        self.note(notices);
        self.note_pause(&found.consumer);
        let ack_floor = found.consumer.ack_floor.stream_sequence;
        tracing::info!(%stream, %consumer, ack_floor, pending = found.consumer.num_pending, "bound");
        self.telemetry.health.report(Component::Consumer, Ok(()));
        let view = found.view();
        if first || another_stream || another_consumer {
            // Where this consumer stands is none of our doing.
            self.ack_floor = view.ack_floor_consumer_seq;
        }
        self.note_ack_floor(&view);
        self.telemetry.health.set_consumer(view.clone());
        if another_stream || another_consumer {
            // They are about the one before.
            self.advised.clear();
            while let Some(Some(_)) = link.advisories.next().now_or_never() {}
        }
        let records = Records {
            client: link.client.clone(),
            stream: found.consumer.stream_name.clone(),
            consumer: found.consumer.name.clone(),
            created,
            filters: unreadable::filters(&found.consumer.config).into_iter().map(ToOwned::to_owned).collect(),
            start: Start::of(&found.consumer),
        };
        let mut session =
            Session::new(limits.clone(), created, link.connects(), Instant::now() + self.info_every, records);
        let former = another_stream.then(|| self.leftovers(&mut link));
        if another_stream {
            self.clean_through = Arc::default();
        }
        if std::mem::take(&mut self.suspicious) {
            let scan = unreadable::scan(link.client.clone(), found, self.clean_through.clone());
            session.scan = Some(scan.boxed());
        }
        self.client = Some(link.client.clone());
        self.link = Some(link);
        self.state = State::Bound(Box::new(session));
        let stream_created_ns = i64::try_from(created.0).unwrap_or(i64::MAX);
        Event::Bound { limits, stream_created_ns, former, view }
    }

    /// Draws the conclusions from a look while bound. The consumer may have been edited: what that brings is judged as it was
    /// at the start, and followed.
    fn seen(&mut self, found: &Found) -> Result<Event, Trouble> {
        let (refused, warnings) = gate::examine(&found.stream, &found.consumer, Expectations::of(&self.config))
            .into_iter()
            .partition::<Vec<_>, _>(|finding| finding.severity == Severity::Refused);
        if !refused.is_empty() {
            return Err(Trouble::new(BindError::Refused(refused).to_string(), None));
        }
        self.warn(warnings);
        let notices = self.positions.seen(Look::of(found));
        self.note(notices);
        self.note_pause(&found.consumer);
        let view = found.view();
        self.note_ack_floor(&view);
        self.telemetry.health.set_consumer(view.clone());
        let edited = match &mut self.state {
            State::Bound(session) => session.follow(found),
            State::Down { .. } | State::Binding(_) => None,
        };
        Ok(Event::Seen { view, edited })
    }

    /// A floor that has risen shows that the server takes our acknowledgements, whatever it denied before.
    fn note_ack_floor(&mut self, view: &ConsumerView) {
        if view.ack_floor_consumer_seq > self.ack_floor {
            self.telemetry.health.report(Component::Acks, Ok(()));
        }
        self.ack_floor = view.ack_floor_consumer_seq;
    }

    /// Says each warning once, for as long as it holds.
    fn warn(&mut self, findings: Vec<Finding>) {
        let warnings: HashSet<String> = findings.into_iter().map(|finding| finding.text).collect();
        for text in warnings.difference(&self.warned) {
            tracing::warn!("{text}");
        }
        self.warned = warnings;
    }

    /// A pause is somebody's will and ends by itself: said once at its beginning and once at its end.
    fn note_pause(&mut self, consumer: &ConsumerInfo) {
        if consumer.paused != self.paused {
            self.paused = consumer.paused;
            let left = consumer.pause_remaining.map(|left| Duration::from_secs(left.as_secs())).unwrap_or_default();
            if consumer.paused {
                tracing::warn!(left = %humantime::format_duration(left), "the server has paused the consumer and delivers nothing");
            } else {
                tracing::info!("the consumer is not paused any more");
            }
        }
    }

    /// Tells the operator what became of messages and sequences.
    fn note(&mut self, notices: Vec<Notice>) {
        let metrics = &self.telemetry.metrics;
        for notice in notices {
            match notice {
                Notice::Gone { from, to } => {
                    let stream = self.last.map_or(0, |(stream, _)| stream);
                    let Some(from) = self.telemetry.news_of_gone(stream, from, to) else { continue };
                    let messages = to - from + 1;
                    metrics.messages_expired.increment(messages);
                    tracing::error!(
                        from,
                        to,
                        messages,
                        "messages {from} to {to} are gone from the stream before they were processed (its limits, a purge or a \
                         deletion); raise the limits, and have them published again"
                    );
                }
                Notice::SomeGone { at_least, first } => {
                    metrics.messages_expired.increment(at_least);
                    tracing::error!(
                        at_least,
                        "at least {at_least} messages of this filtered consumer, below sequence {first}, are gone from the stream \
                         before they were processed (its limits, a purge or a deletion); raise the limits, and have them \
                         published again"
                    );
                }
                Notice::Rewound { from, to } => {
                    self.telemetry.rewound();
                    // The sequences come again, with other messages.
                    self.clean_through = Arc::default();
                    self.advised.clear();
                    if let State::Bound(session) = &mut self.state {
                        session.given_up = None;
                    }
                    tracing::error!(
                        from,
                        to,
                        "the stream ended at sequence {from} and now ends at {to}: the server has lost the messages after that, or was \
                         restored from a copy; have those published again that were not processed. New messages get these \
                         sequences a second time and are taken for new ones"
                    );
                }
                Notice::FloorBeyond { floor, last } => {
                    let text = format!(
                        "the consumer has acknowledged up to sequence {floor} and the stream ends at {last}: new messages may not be \
                         delivered until it has grown that far; run `nats consumer rm`, then `order-processor setup`: nothing is \
                         applied twice"
                    );
                    if self.reminder.is_due(&text) {
                        tracing::error!("{text}");
                    }
                }
            }
        }
    }

    /// Everything that was delivered before we knew that the stream is another one. The answer to our look came over the same
    /// connection behind them, so all of them are here by now.
    fn leftovers(&mut self, link: &mut Link) -> Vec<Arrival> {
        let mut leftovers = std::mem::take(&mut self.stash);
        link.take_ready(&mut leftovers);
        leftovers
    }

    fn not_bound(&mut self, error: &BindError) {
        let mut cause = chain(error);
        if let (BindError::NoAnswer { .. }, Some(denied)) = (error, self.telemetry.denied()) {
            cause += &format!("; the server denies us a subject: {denied}");
        }
        match error {
            BindError::Connect(_) | BindError::ClientDead => {
                self.telemetry.health.report(Component::Nats, Err(cause.clone()))
            }
            BindError::NoStream { .. }
            | BindError::NoConsumer { .. }
            | BindError::NoJetStream
            | BindError::NoAnswer { .. }
            | BindError::Denied(_)
            | BindError::Another
            | BindError::Refused(_) => {}
        }
        if let BindError::NoAnswer { .. } = error {
            self.telemetry.metrics.nats_errors.increment(NatsErrorKind::Request, 1);
            // Perhaps our subscriptions are gone: a server that denied them for a while does not bring them back.
            if self.failures >= NO_ANSWERS_MAX {
                self.link = None;
                self.client = None;
            }
        }
        if self.reminder.is_due(&cause) {
            tracing::warn!(%cause, "not bound, trying again");
        }
        self.telemetry.health.report(Component::Consumer, Err(cause));
        let delay = RETRY_DELAY_MIN * (1 << self.failures.min(6));
        self.failures += 1;
        self.state =
            State::Down { until: Instant::now() + delay.min(RETRY_DELAY_MAX).mul_f64(0.75 + fastrand::f64() / 2.0) };
    }

    /// The one cure for all troubles of a binding.
    fn lose(&mut self, trouble: Trouble) {
        if let Some(kind) = trouble.kind {
            self.telemetry.metrics.nats_errors.increment(kind, 1);
        }
        self.suspicious |= trouble.suspicious;
        if trouble.client_dead {
            tracing::error!("the client's connection task has ended, making a new client");
            self.link = None;
            self.client = None;
        } else {
            tracing::info!(cause = %trouble.cause, "looking at stream and consumer again");
        }
        self.telemetry.health.report(Component::Consumer, Err(trouble.cause));
        self.state = State::Down { until: Instant::now() };
    }

    fn payload(&self, reply: &Reply, acknowledgement: Acknowledgement) -> bytes::Bytes {
        match (&self.state, acknowledgement) {
            (State::Bound(session), Acknowledgement::Nak { delay }) if !delay.is_zero() => {
                let delay_ns = session.limits.nak_delay_ns(delay, reply.delivered);
                format!("-NAK {{\"delay\":{delay_ns}}}").into()
            }
            _ => match acknowledgement.payload() {
                std::borrow::Cow::Borrowed(fixed) => bytes::Bytes::from_static(fixed),
                std::borrow::Cow::Owned(made) => made.into(),
            },
        }
    }
}

enum Step {
    /// Deliveries may have come into the stash.
    Arrived,
    GivenUp(Vec<Arrival>),
    Seen(Box<Found>),
}

/// What deliveries go into.
struct Intake<'a> {
    stash: &'a mut Vec<Arrival>,
    advised: &'a mut Vec<Advised>,
    positions: &'a mut Positions,
}

impl Session {
    fn new(limits: Limits, created: (i128, i128), connects: u64, info_due: Instant, records: Records) -> Self {
        let now = Instant::now();
        Self {
            limits,
            created,
            outstanding: 0,
            pull_deadline: now,
            pulls: 0,
            pull_due: now,
            fruitful: true,
            last_heard: now,
            heard: false,
            last_consumer_seq: 0,
            connects,
            checks: tokio::time::interval(CHECK_EVERY),
            info: None,
            info_due,
            ages: true,
            scan: None,
            records,
            given_up: None,
            given_up_count: 0,
            given_up_due: now,
            given_up_reminder: Reminder::default(),
        }
    }

    /// Takes over what was edited. The limits, if they are other ones.
    fn follow(&mut self, found: &Found) -> Option<Limits> {
        let filters: Vec<String> =
            unreadable::filters(&found.consumer.config).into_iter().map(ToOwned::to_owned).collect();
        let limits = Limits::of(&found.consumer, self.limits.max_payload);
        if limits == self.limits && filters == self.records.filters {
            return None;
        }
        let (ack_wait, max_deliver, max_ack_pending) = (limits.ack_wait, limits.max_deliver, limits.max_ack_pending);
        tracing::warn!(
            ?ack_wait,
            ?max_deliver,
            ?max_ack_pending,
            ?filters,
            "the consumer was edited, going on with what it is now"
        );
        self.records.filters = filters;
        self.limits = limits.clone();
        Some(limits)
    }

    /// Pulls if there is room, then waits for whatever comes first.
    async fn step(
        &mut self,
        link: &mut Link,
        config: &Arc<Config>,
        room: Room,
        info_every: Duration,
        mut into: Intake<'_>,
    ) -> Result<Step, Trouble> {
        self.pull(link, config, room).await?;
        if self.given_up.is_none() && !into.advised.is_empty() && self.given_up_due <= Instant::now() {
            let first: Vec<Advised> = into.advised.iter().take(GIVEN_UP_MAX).copied().collect();
            self.given_up_count = first.len();
            self.given_up = Some(self.records.clone().advised(first).boxed());
        }
        tokio::select! {
            message = link.inbox.next() => {
                self.take_in(message.ok_or_else(Trouble::dead)?, &mut into)?;
                while into.stash.len() < CHUNK_MAX && let Some(Some(message)) = link.inbox.next().now_or_never() {
                    self.take_in(message, &mut into)?;
                }
                Ok(Step::Arrived)
            }
            found = wait_for(&mut self.info) => {
                self.info = None;
                self.info_due = Instant::now() + info_every;
                match found {
                    Ok(found) if found.created() != self.created => Err(Trouble::new("stream or consumer was created anew", None)),
                    Ok(found) => {
                        self.ages &= !found.age_unknown;
                        Ok(Step::Seen(Box::new(found)))
                    }
                    Err(error @ (BindError::NoStream { .. } | BindError::NoConsumer { .. })) => {
                        Err(Trouble::new(error.to_string(), None))
                    }
                    Err(error) => Err(Trouble::new(error.to_string(), Some(NatsErrorKind::Request))),
                }
            }
            unreadable = wait_for(&mut self.scan) => {
                self.scan = None;
                match unreadable {
                    Ok(unreadable) => into.stash.extend(unreadable),
                    Err(error) => tracing::warn!(%error, "cannot look for messages that the client cannot parse"),
                }
                Ok(Step::Arrived)
            }
            Some(first) = link.advisories.next(), if into.advised.len() < ADVISED_MAX => {
                into.advised.extend(Advised::parse(&first.payload));
                Ok(Step::Arrived)
            }
            given_up = wait_for(&mut self.given_up) => {
                self.given_up = None;
                match given_up {
                    Ok(given_up) => {
                        into.advised.drain(..self.given_up_count);
                        Ok(Step::GivenUp(given_up))
                    }
                    Err(error) => {
                        self.given_up_due = Instant::now() + ADVISED_AGAIN;
                        if self.given_up_reminder.is_due(&error.to_string()) {
                            tracing::warn!(%error, "cannot fetch messages that the server has given up, trying again");
                        }
                        Ok(Step::Arrived)
                    }
                }
            }
            _ = self.checks.tick() => self.check(link, config),
        }
    }

    /// Asks for what there is room for, once that is worth a request: half a window, or anything when nothing is on its way.
    async fn pull(&mut self, link: &Link, config: &Arc<Config>, room: Room) -> Result<(), Trouble> {
        let window = config.batch.max_messages;
        let wanted = room.messages.saturating_sub(self.outstanding).min(self.limits.max_batch.unwrap_or(usize::MAX));
        if self.pull_due > Instant::now() {
            return Ok(());
        }
        if wanted == 0 || room.bytes == 0 || (self.outstanding > 0 && wanted < window.div_ceil(2)) {
            return Ok(());
        }
        // A limit below the largest possible message would block the consumer on it for ever.
        let floor = self.limits.max_payload + HEADER_ROOM_BYTES;
        let max_bytes = room.bytes.max(floor).min(self.limits.max_bytes.unwrap_or(usize::MAX));
        let expires = PULL_EXPIRES.min(self.limits.max_expires.unwrap_or(PULL_EXPIRES));
        let heartbeat = HEARTBEAT.min(expires / 2);
        let request = serde_json::json!({
            "batch": wanted,
            "max_bytes": max_bytes,
            "expires": expires.as_nanos() as u64,
            "idle_heartbeat": heartbeat.as_nanos() as u64,
        });
        let consumer = &config.consumer;
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", consumer.stream, consumer.name);
        let reply = format!("{}.{}", link.subject, self.pulls);
        let sent = link.client.publish_with_reply(subject, reply, request.to_string().into()).await;
        sent.map_err(|_| Trouble::dead())?;
        let now = Instant::now();
        if self.outstanding == 0 {
            // The silence before we asked is not the server's.
            self.last_heard = now;
        }
        self.pulls += 1;
        self.fruitful = false;
        self.outstanding += wanted;
        self.pull_deadline = now + expires + PULL_GRACE;
        Ok(())
    }

    /// Takes a delivery in, or draws the conclusion from a status message.
    fn take_in(&mut self, message: Message, into: &mut Intake<'_>) -> Result<(), Trouble> {
        self.last_heard = Instant::now();
        self.heard = true;
        if message.status.is_some() && message.reply.as_ref().is_some_and(|reply| Position::parse(reply).is_some()) {
            return Err(Trouble::suspicious("a stored message calls itself a word of the server"));
        }
        let Some(status) = message.status else {
            let Some(arrival) = arrival(message) else {
                return Err(Trouble::new("a message that is no delivery came to our inbox", Some(NatsErrorKind::Pull)));
            };
            self.outstanding = self.outstanding.saturating_sub(1);
            let consumer_seq = arrival.0.position.consumer_seq;
            let backwards = consumer_seq <= self.last_consumer_seq;
            self.last_consumer_seq = consumer_seq;
            if into.positions.delivered(arrival.0.position) {
                self.info_due = self.info_due.min(Instant::now() + GAP_PAUSE);
            }
            into.stash.push(arrival);
            self.fruitful = true;
            // A consumer counts upwards all its life: this is another one, perhaps on another stream of the same name.
            return if backwards { Err(Trouble::new("the consumer counts anew", None)) } else { Ok(()) };
        };
        let description = message.description.as_deref().unwrap_or_default();
        let left = message.headers.as_ref().and_then(|headers| headers.get("Nats-Pending-Messages"));
        let left = left.and_then(|left| left.as_str().parse::<usize>().ok());
        match (status, left) {
            (StatusCode::IDLE_HEARTBEAT, _) => Ok(()),
            // The end of one pull, as it should be: out of time, or the next message does not fit any more.
            (StatusCode::TIMEOUT | StatusCode::NOT_FOUND, Some(left)) => {
                self.outstanding = self.outstanding.saturating_sub(left);
                Ok(())
            }
            (StatusCode::REQUEST_TERMINATED, Some(left)) if is_end_of_pull(description) => {
                self.outstanding = self.outstanding.saturating_sub(left);
                // The end of an earlier pull may reach us when the next one is sent already, and says nothing about that.
                let pull = message.subject.rsplit('.').next().and_then(|number| number.parse::<u64>().ok());
                if !self.fruitful && pull == self.pulls.checked_sub(1) {
                    self.pull_due = Instant::now() + TOO_LARGE_PAUSE;
                }
                Ok(())
            }
            (status, _) => {
                Err(Trouble::new(format!("the server ended a pull: {status} {description}"), Some(NatsErrorKind::Pull)))
            }
        }
    }

    /// What no message tells: a reconnect, silence, a pull whose end got lost, the time for a fresh look.
    fn check(&mut self, link: &Link, config: &Arc<Config>) -> Result<Step, Trouble> {
        let now = Instant::now();
        if link.connects() != self.connects || !link.is_connected() {
            return Err(Trouble::suspicious("the connection was lost"));
        }
        if self.outstanding > 0 && now.duration_since(self.last_heard) > SILENCE_MAX {
            return Err(Trouble::new("the server has missed its heartbeats", Some(NatsErrorKind::Heartbeat)));
        }
        if self.outstanding > 0 && now > self.pull_deadline {
            self.outstanding = 0;
        }
        if self.info.is_none() && now >= self.info_due {
            self.info = Some(inspect_with_age(link.client.clone(), config.clone(), self.ages).boxed());
        }
        Ok(Step::Arrived)
    }
}

impl Limits {
    fn of(consumer: &ConsumerInfo, max_payload: usize) -> Self {
        let config = &consumer.config;
        let positive = |value: i64| usize::try_from(value).ok().filter(|value| *value > 0);
        Self {
            ack_wait: config.backoff.iter().copied().min().unwrap_or(config.ack_wait),
            max_deliver: u64::try_from(config.max_deliver).ok().filter(|max| *max > 0),
            max_ack_pending: positive(config.max_ack_pending),
            backoff: config.backoff.clone(),
            max_batch: positive(config.max_batch),
            max_bytes: positive(config.max_bytes),
            max_expires: Some(config.max_expires).filter(|expires| !expires.is_zero()),
            max_payload,
        }
    }

    /// What to ask for so that the message comes after `delay`. With a backoff list the server counts a nak's delay from the
    /// list's first step but lets it run to the step of this delivery; the difference is taken off, also below zero
    /// (nats-server 2.15, `processNak` and `checkPending`).
    fn nak_delay_ns(&self, delay: Duration, delivered: u64) -> i128 {
        let wanted = delay.as_nanos() as i128;
        let (Some(first), Some(last)) = (self.backoff.first(), self.backoff.last()) else { return wanted };
        let step =
            usize::try_from(delivered.saturating_sub(1)).ok().and_then(|step| self.backoff.get(step)).unwrap_or(last);
        wanted + first.as_nanos() as i128 - step.as_nanos() as i128
    }
}

impl Found {
    /// When stream and consumer were created: what tells them from others of the same name.
    pub(super) fn created(&self) -> (i128, i128) {
        (self.stream.created.unix_timestamp_nanos(), self.consumer.created.unix_timestamp_nanos())
    }

    /// Whether the stream has subjects that the consumer is not for.
    pub(super) fn is_filtered(&self) -> bool {
        let filters = unreadable::filters(&self.consumer.config);
        let covered = |subject: &String| filters.iter().any(|filter| *filter == ">" || filter == subject);
        !self.stream.config.subjects.iter().all(covered)
    }

    fn has_work(&self) -> bool {
        self.consumer.num_pending > 0 || self.consumer.num_ack_pending > 0
    }

    /// The figures that operators look at.
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
            last_published_at: at_unix_ns(state.last_timestamp.unix_timestamp_nanos()),
            oldest_published_at: self.oldest_published_at,
            taken_at: SystemTime::now(),
        }
    }
}

impl Trouble {
    fn new(cause: impl Into<String>, kind: Option<NatsErrorKind>) -> Self {
        Self { cause: cause.into(), kind, client_dead: false, suspicious: false }
    }

    fn suspicious(cause: &str) -> Self {
        Self { suspicious: true, ..Self::new(cause, None) }
    }

    fn dead() -> Self {
        Self { client_dead: true, suspicious: true, ..Self::new("the client has ended", Some(NatsErrorKind::Client)) }
    }
}

/// Connects if need be and looks at stream and consumer.
async fn bind(config: Arc<Config>, telemetry: Arc<Telemetry>, link: Option<Link>) -> Bound {
    let link = match link {
        Some(link) => link,
        None => connect(&config, telemetry.clone()).await.map_err(|error| (None, error))?,
    };
    telemetry.health.report(Component::Nats, Ok(()));
    // A server that shuts down says so before it closes: an answer that will never come must not be waited for.
    let found = tokio::select! {
        found = inspect(link.client.clone(), config.clone()) => found,
        () = link.lost(link.connects()) => Err(BindError::NoAnswer {
            asked: "a request for stream and consumer",
            error: "the connection was lost".to_owned(),
        }),
    };
    let found = found.and_then(|found| {
        let mut findings = gate::examine(&found.stream, &found.consumer, Expectations::of(&config));
        findings.retain(|finding| finding.severity == Severity::Refused);
        if findings.is_empty() { Ok(found) } else { Err(BindError::Refused(findings)) }
    });
    match found {
        Ok(found) => Ok((link, found)),
        Err(error) => Err((Some(link), error)),
    }
}

async fn connect(config: &Config, telemetry: Arc<Telemetry>) -> Result<Link, BindError> {
    Link::new(config, connection::connect(&config.nats, telemetry).await?).await
}

async fn inspect(client: Client, config: Arc<Config>) -> Result<Found, BindError> {
    look(&client, &config.consumer.stream, &config.consumer.name).await
}

/// The same, and how old the oldest message is that waits, if `ages`.
async fn inspect_with_age(client: Client, config: Arc<Config>, ages: bool) -> Result<Found, BindError> {
    let mut found = inspect(client.clone(), config).await?;
    if ages && found.has_work() {
        let oldest = tokio::time::timeout(AGE_PATIENCE, unreadable::oldest_published_at(&client, &found)).await;
        match oldest {
            Ok(Ok(at)) => found.oldest_published_at = at,
            Ok(Err(error @ BindError::NoStream { .. })) => return Err(error),
            Ok(Err(_)) | Err(_) => found.age_unknown = true,
        }
    }
    Ok(found)
}

/// The same for a command, which hears what is not permitted.
pub async fn visit(visit: &Visit, names: &config::Consumer) -> Result<Found, BindError> {
    visit.denials.answer(look(&visit.client, &names.stream, &names.name)).await?
}

/// Asks the server for stream and consumer.
pub async fn look(client: &Client, stream: &str, consumer: &str) -> Result<Found, BindError> {
    let no_consumer = || BindError::NoConsumer { stream: stream.to_owned(), consumer: consumer.to_owned() };
    let found = look_at_stream(client, stream).await?;
    let info = found.consumer_info(consumer).await.map_err(|error| match error.kind() {
        ConsumerInfoErrorKind::NotFound => no_consumer(),
        ConsumerInfoErrorKind::StreamNotFound => BindError::NoStream { stream: stream.to_owned() },
        _ => BindError::NoAnswer { asked: "a request for the consumer", error: error.to_string() },
    })?;
    Ok(Found { stream: found.cached_info().clone(), consumer: info, oldest_published_at: None, age_unknown: false })
}

pub(super) async fn look_at_stream(client: &Client, stream: &str) -> Result<Stream, BindError> {
    jetstream::new(client.clone()).get_stream(stream).await.map_err(|error| match error.kind() {
        GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            BindError::NoStream { stream: stream.to_owned() }
        }
        GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
            BindError::NoJetStream
        }
        _ if error.to_string().contains("no responders") => BindError::NoJetStream,
        _ => BindError::NoAnswer { asked: "a request for the stream", error: error.to_string() },
    })
}

/// A stream without any message says that its last one came in the year 1.
fn at_unix_ns(unix_ns: i128) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(unix_ns).unwrap_or(0))
}

/// `None` for a message that the server did not hand out from a stream.
pub(super) fn arrival(message: Message) -> Option<Arrival> {
    let reply = message.reply?.into_string();
    let position = Position::parse(&reply)?;
    let reply = Reply { subject: reply, delivered: position.delivered };
    let mut headers = Headers::new();
    if let Some(found) = &message.headers {
        headers.reserve(found.len());
        for (name, values) in found.iter() {
            let name: &str = name.as_ref();
            headers.extend(values.iter().map(|value| (name.to_owned(), value.as_str().to_owned())));
        }
    }
    let (subject, payload) = (message.subject.as_str().into(), message.payload);
    let raw = Raw { subject, headers, payload, position, unreadable: None };
    Some((raw, reply))
}

/// 409s that end one pull and mean nothing else; with the others the consumer or its leader is gone or has changed.
pub(super) fn is_end_of_pull(description: &str) -> bool {
    let description = description.to_ascii_lowercase();
    description.contains("message size exceeds maxbytes") || description.contains("batch completed")
}

async fn wait_for<T>(slot: &mut Option<BoxFuture<'static, T>>) -> T {
    match slot {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn limits(backoff: Vec<Duration>) -> Limits {
        Limits {
            ack_wait: Duration::from_secs(30),
            max_deliver: None,
            max_ack_pending: None,
            backoff,
            max_batch: None,
            max_bytes: None,
            max_expires: None,
            max_payload: 0,
        }
    }

    proptest! {
        #[test]
        fn a_nak_takes_effect_after_its_delay_whatever_the_backoff_list(
            backoff in vec(1..=86_400_000_000_000_u64, 0..5),
            delay_ns in 1..=103_680_000_000_000_u64,
            delivered in prop_oneof![1..8_u64, any::<u64>()],
        ) {
            let asked = limits(backoff.iter().copied().map(Duration::from_nanos).collect())
                .nak_delay_ns(Duration::from_nanos(delay_ns), delivered);
            prop_assert!(i64::try_from(asked).is_ok(), "the server reads 64 bits");
            // The server sets the delivery's clock to `asked` less the first step, and lets it run for this one's.
            let steps = i128::from(delivered.max(1) - 1).min(backoff.len() as i128 - 1);
            let step = usize::try_from(steps).map_or(0, |step| backoff[step]);
            let first = backoff.first().copied().unwrap_or(0);
            prop_assert_eq!(asked - i128::from(first) + i128::from(step), i128::from(delay_ns));
        }
    }

    #[test]
    fn nak_delay_allows_for_the_backoff_list() {
        let seconds = Duration::from_secs;
        let limits = |backoff: &[u64]| limits(backoff.iter().copied().map(seconds).collect());
        let asked = |limits: &Limits, delivered| limits.nak_delay_ns(seconds(4), delivered) / 1_000_000_000;
        assert_eq!(asked(&limits(&[]), 7), 4);
        let backoff = limits(&[1, 3, 10]);
        assert_eq!([1, 2, 3, 9].map(|delivered| asked(&backoff, delivered)), [4, 2, -5, -5]);
    }
}
