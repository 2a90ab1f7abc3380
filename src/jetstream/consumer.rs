//! The way to one durable pull consumer: connect, bind, pull, acknowledge. It never creates, edits or deletes anything on the
//! server.
//!
//! The daemon sends its own pull requests and reads the answers from its own subscription. It does not use the pull stream of the
//! client: that stream can stay silent for half a minute after a reconnect, does not pull again after a missed heartbeat or after
//! some errors, and spins when the client drains (seen with async-nats 0.51). Here every trouble has the same cure,
//! [`Consumer::lose`]: look at stream and consumer again, then pull again. Deliveries that arrive in the meantime are kept, because
//! the subscription stays.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_nats::Request;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep_until};

use super::advisory::Advisory;
use super::bind::{BindResult, RETRY_DELAY_MIN, Rebind, bind, delay};
use super::client::Client;
use super::elsewhere::{self, Switching};
use super::error::{Blame, Error, Trouble};
pub use super::event::{Capacity, Event, Receipt};
use super::gaps::{Figures, Notice, Positions};
use super::gate::{self, Expectations, Finding, Severity};
use super::limits;
pub use super::limits::Limits;
use super::link::{Link, is_connected};
use super::look::{Snapshot, look};
use super::notices::Notices;
use super::outbox::Publisher;
use super::pull_health::PullHealth;
use super::session::{Session, Step, Surroundings};
use super::stored::StreamReader;
use super::unreadable;
use crate::config::Config;
pub use crate::model::delivery::Arrival;
use crate::model::delivery::Reply;
use crate::model::outcome::Acknowledgement;
use crate::model::text::chain;
use crate::model::view::Incarnation;
use crate::telemetry::metrics::NatsErrorKind;
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

/// After so many looks in a row without an answer, the daemon makes a new client.
const NO_ANSWERS_MAX: u32 = 3;

pub struct Consumer {
    config: Arc<Config>,
    telemetry: Arc<Telemetry>,
    info_every: Duration,
    phase: Phase,
    /// Client and subscriptions. They outlive a binding, and end only with the client.
    link: Option<Link>,
    /// The client of the link, for acknowledgements while the link is with [`Phase::Binding`].
    client: Option<Client>,
    /// The stream and the consumer of the last binding.
    last: Option<Incarnation>,
    /// Deliveries that arrived while it was unknown to which stream they belong.
    stash: Vec<Arrival>,
    /// Advised messages that are not fetched yet. They outlive a connection, because the server sends an advisory once.
    advised: Vec<Advisory>,
    /// A connection was lost while deliveries were on their way. One of them may be the cause.
    check_unreadable: bool,
    /// Up to this sequence, the client can parse every message of the stream.
    clean_through: Arc<AtomicU64>,
    positions: Positions,
    notices: Notices,
    pull_health: PullHealth,
    failures: u32,
    switching: Switching,
    reminder: Reminder,
}

/// `Down` (until a time) --time or reconnect--> `Binding` --stream and consumer are good--> `Bound` --any trouble--> `Down`.
enum Phase {
    Down(Instant),
    /// Has the link, so that nothing is lost if [`Consumer::next`] is dropped half-way.
    Binding(BoxFuture<'static, BindResult>),
    Bound(Box<Session>),
}

impl Consumer {
    pub fn new(config: Arc<Config>, telemetry: Arc<Telemetry>, info_every: Duration) -> Self {
        Self {
            notices: Notices::new(telemetry.clone()),
            pull_health: PullHealth::new(telemetry.clone()),
            config,
            telemetry,
            info_every,
            phase: Phase::Down(Instant::now()),
            link: None,
            client: None,
            last: None,
            stash: Vec::new(),
            advised: Vec::new(),
            check_unreadable: false,
            clean_through: Arc::default(),
            positions: Positions::default(),
            failures: 0,
            switching: Switching::default(),
            reminder: Reminder::default(),
        }
    }

    /// Waits for the next event. Asks the server for at most `capacity`, minus what open pulls already ask for.
    ///
    /// May be dropped at any await without the loss of a delivery. It never fails: every trouble is logged, counted, shown in the
    /// health, and tried again.
    pub async fn next(&mut self, capacity: Capacity) -> Event {
        loop {
            match &mut self.phase {
                Phase::Down(until) => {
                    let until = *until;
                    self.begin_to_bind(until).await;
                }
                Phase::Binding(binding) => match binding.await {
                    Ok((link, snapshot)) => return self.after_bind(link, snapshot),
                    Err((_, error)) if self.last.is_none() && error.needs_operator() => return Event::Refused(error),
                    Err((link, error)) => {
                        self.link = link;
                        self.not_bound(&error);
                        self.switching.follow(&error, &self.config.nats.url, self.link.as_ref()).await;
                    }
                },
                Phase::Bound(_) if !self.stash.is_empty() => return Event::Deliveries(std::mem::take(&mut self.stash)),
                Phase::Bound(_) => match self.step(capacity).await {
                    Ok(Step::Arrived) => {}
                    Ok(Step::GivenUp(arrivals)) => return Event::GivenUp(arrivals),
                    Ok(Step::Seen(snapshot)) => match self.observe(&snapshot) {
                        Ok(event) => return event,
                        Err(trouble) => self.lose(trouble),
                    },
                    Err(trouble) => self.lose(trouble),
                },
            }
        }
    }

    /// Sends acknowledgements. Nothing comes back: if one gets lost, the server redelivers the message, which is then a duplicate.
    ///
    /// # Errors
    /// Without a connection. The caller must limit the time: a client that reconnects takes 2,048 of them and then blocks.
    pub async fn acknowledge(
        &mut self,
        mut acknowledgements: Vec<(Reply, Acknowledgement)>,
        receipt: Receipt,
    ) -> Result<(), Error> {
        let client = self.client.as_ref().filter(|client| is_connected(client)).ok_or(Error::ClientDead)?;
        let last = match receipt {
            Receipt::Last => acknowledgements.pop(),
            Receipt::None => None,
        };
        let acks = &self.telemetry.metrics.acks;
        for (reply, acknowledgement) in acknowledgements {
            let payload = self.payload(&reply, acknowledgement);
            client.publish(reply.subject, payload).await.map_err(|_| Error::ClientDead)?;
            acks.increment(acknowledgement.kind(), 1);
        }
        if let Some((reply, acknowledgement)) = last {
            // Not the double ack of the client, which counts every answer as a receipt, even "no responders".
            let request = Request::new().payload(self.payload(&reply, acknowledgement));
            let answer = client.send_request(reply.subject, request).await;
            answer.map_err(|error| Error::NoAnswer { asked: "the last acknowledgement", error: error.to_string() })?;
            acks.increment(acknowledgement.kind(), 1);
        }
        Ok(())
    }

    /// Read access to the stored messages, while bound.
    pub fn reader(&self) -> Option<StreamReader> {
        match &self.phase {
            Phase::Bound(session) => Some(session.reader.clone()),
            Phase::Down(_) | Phase::Binding(_) => None,
        }
    }

    /// Publishes on the connection of the consumer, while it is connected.
    pub fn publisher(&self) -> Option<Publisher> {
        self.client.as_ref().filter(|client| is_connected(client)).cloned().map(Publisher::new)
    }

    /// Stops pulling for good and returns the deliveries that have arrived.
    ///
    /// The server redelivers a message whose reply subject has no subscription only after `ack_wait`. So an open pull that the server
    /// answers at this moment may end first. Then the subscription ends, and a round trip makes sure that no delivery is on its way.
    pub async fn quiesce(&mut self) -> Vec<Arrival> {
        const LULL: Duration = Duration::from_millis(50);
        const RUN_OUT: Duration = Duration::from_millis(500);
        const PATIENCE: Duration = Duration::from_secs(1);
        let mut arrived = std::mem::take(&mut self.stash);
        if let Phase::Binding(binding) = &mut self.phase
            && let Ok(bound) = tokio::time::timeout(PATIENCE, binding).await
        {
            self.link = bound.map_or_else(|(link, _)| link, |(link, _)| Some(link));
            self.phase = Phase::Down(Instant::now());
        }
        let Some(link) = &mut self.link else { return arrived };
        let deadline = Instant::now() + RUN_OUT;
        while let Phase::Bound(session) = &mut self.phase
            && session.outstanding() > 0
        {
            let patience = deadline.min(Instant::now() + LULL);
            let Ok(Some(message)) = tokio::time::timeout_at(patience, link.replies.next()).await else { break };
            if session.take_in(message, &mut arrived, &mut self.positions).is_err() {
                break;
            }
        }
        if link.replies.drain().await.is_ok() && link.is_connected() {
            let names = &self.config.consumer;
            let asked = look(&link.client, &names.stream, &names.name);
            if tokio::time::timeout(PATIENCE, asked).await.is_err() {
                tracing::debug!("the server does not answer; the server redelivers what is on its way after ack_wait");
            }
        }
        link.take_ready(&mut arrived);
        arrived
    }

    async fn begin_to_bind(&mut self, until: Instant) {
        if self.link.as_ref().is_some_and(|link| !link.is_connected()) {
            // Nothing can be asked before the client has reconnected, and then it is asked immediately.
            tokio::time::sleep(RETRY_DELAY_MIN).await;
        } else {
            sleep_until(until).await;
            let binding = bind(self.config.clone(), self.telemetry.clone(), self.link.take());
            self.phase = Phase::Binding(binding.boxed());
        }
    }

    async fn step(&mut self, capacity: Capacity) -> Result<Step, Trouble> {
        let (Phase::Bound(session), Some(link)) = (&mut self.phase, &mut self.link) else {
            return Err(Trouble::client_dead());
        };
        let step = session
            .step(&mut Surroundings {
                link,
                config: &self.config,
                capacity,
                info_every: self.info_every,
                stash: &mut self.stash,
                advised: &mut self.advised,
                positions: &mut self.positions,
            })
            .await;
        if session.take_answered() {
            self.pull_health.answered();
        }
        step
    }

    fn after_bind(&mut self, mut link: Link, snapshot: Snapshot) -> Event {
        let incarnation = snapshot.incarnation();
        let rebind = Rebind::between(self.last.replace(incarnation), incarnation);
        self.failures = 0;
        self.switching = Switching::default();
        self.reminder.forget();
        self.notices.log_bind(rebind, &snapshot);
        self.notices.warn(gate::examine(&snapshot.stream, &snapshot.consumer, Expectations::of(&self.config)));
        let notices = self.positions.after_bind(Figures::of(&snapshot), rebind.is_recreated());
        self.take_notices(&notices);
        self.notices.log_pause(&snapshot.consumer);
        self.telemetry.health.report(Component::Consumer, Ok(()));
        let view = snapshot.view();
        if rebind != Rebind::Same {
            self.notices.restart_ack_floor(&view);
        }
        self.notices.ack_floor(&view);
        self.telemetry.health.set_consumer(view.clone());
        if rebind.is_recreated() {
            // They are about the former consumer.
            self.advised.clear();
            while let Some(Some(_)) = link.advisories.next().now_or_never() {}
        }
        let mut session = Session::new(&link, &snapshot, self.info_every, self.pull_health.heartbeat());
        let former = (rebind == Rebind::OtherStream).then(|| self.leftovers(&mut link));
        if former.is_some() {
            self.clean_through = Arc::default();
        }
        if std::mem::take(&mut self.check_unreadable) {
            session.scan(unreadable::scan(link.client.clone(), snapshot, self.clean_through.clone()));
        }
        self.client = Some(link.client.clone());
        self.link = Some(link);
        let limits = session.limits.clone();
        self.phase = Phase::Bound(Box::new(session));
        Event::Bound { limits, stream_created_ns: incarnation.stream_ns, former, view }
    }

    /// Draws the conclusions from a look while bound. An edited consumer is examined as at the start, and followed.
    fn observe(&mut self, snapshot: &Snapshot) -> Result<Event, Trouble> {
        let (refused, mut warnings) =
            gate::examine(&snapshot.stream, &snapshot.consumer, Expectations::of(&self.config))
                .into_iter()
                .partition::<Vec<_>, _>(|finding| finding.severity == Severity::Refused);
        if !refused.is_empty() {
            return Err(Error::Refused(refused).into());
        }
        warnings.extend(gate::lost_origins(&snapshot.stream).map(Finding::warned));
        self.notices.warn(warnings);
        let notices = self.positions.observe(Figures::of(snapshot));
        self.take_notices(&notices);
        self.notices.log_pause(&snapshot.consumer);
        let view = snapshot.view();
        self.notices.ack_floor(&view);
        self.telemetry.health.set_consumer(view.clone());
        let Phase::Bound(session) = &mut self.phase else { return Ok(Event::Seen { view, edited: None }) };
        self.notices.pulls(&snapshot.consumer, session.open_pulls());
        self.pull_health.observe(&view, session.take_waits(), session.too_large_for());
        Ok(Event::Seen { view, edited: session.follow(snapshot) })
    }

    fn take_notices(&mut self, notices: &[Notice]) {
        self.notices.log_gaps(notices, self.last.map_or(0, |last| last.stream_ns));
        if notices.iter().any(|notice| matches!(notice, Notice::Rewound { .. })) {
            // The same sequences come again with other messages.
            self.clean_through = Arc::default();
            self.advised.clear();
            if let Phase::Bound(session) = &mut self.phase {
                session.forget_advised();
            }
        }
    }

    /// Everything that was delivered before it was known that the stream is another one. The answer to our look came over the
    /// same connection after these deliveries, so all of them have arrived.
    fn leftovers(&mut self, link: &mut Link) -> Vec<Arrival> {
        let mut leftovers = std::mem::take(&mut self.stash);
        link.take_ready(&mut leftovers);
        leftovers
    }

    fn not_bound(&mut self, error: &Error) {
        let mut cause = chain(error);
        match error {
            Error::Connect(_) | Error::ClientDead => self.telemetry.health.report(Component::Nats, Err(cause.clone())),
            Error::NoAnswer { .. } => {
                if let Some(denied) = self.telemetry.denied() {
                    cause += &format!("; {denied}");
                }
                self.telemetry.metrics.nats_errors.increment(NatsErrorKind::Request, 1);
                // Perhaps the subscriptions are gone: a server that denied them for a while does not restore them.
                if self.failures >= NO_ANSWERS_MAX {
                    self.drop_client();
                }
            }
            Error::NoStream { stream, .. } => {
                if let (Some(_), Some(link)) = (self.last, &self.link) {
                    cause = elsewhere::cause(stream, &link.client);
                }
            }
            Error::NoConsumer { .. } | Error::NoJetStream | Error::Denied(_) | Error::Recreated | Error::Refused(_) => {
            }
        }
        if self.reminder.is_due(&cause) {
            tracing::warn!(%cause, "the daemon is not bound to the consumer and tries again");
        }
        self.telemetry.health.report(Component::Consumer, Err(cause));
        self.phase = Phase::Down(Instant::now() + delay(self.failures));
        self.failures += 1;
    }

    /// The one cure for all troubles of a binding.
    fn lose(&mut self, trouble: Trouble) {
        if let Some(kind) = trouble.kind {
            self.telemetry.metrics.nats_errors.increment(kind, 1);
        }
        // The first trouble costs no time, and each one after it in a row waits longer.
        let earlier = self.pull_health.trouble(&trouble).unwrap_or(0);
        let delay = if earlier == 0 { Duration::ZERO } else { delay(earlier) };
        self.check_unreadable |= trouble.blame != Blame::Elsewhere;
        if trouble.blame == Blame::MessageEndedClient {
            tracing::error!("the connection task of the NATS client has ended; the daemon makes a new client");
            self.drop_client();
        } else {
            tracing::info!(cause = %trouble.cause, "the daemon looks at stream and consumer again");
        }
        self.telemetry.health.report(Component::Consumer, Err(trouble.cause));
        self.phase = Phase::Down(Instant::now() + delay);
    }

    fn drop_client(&mut self) {
        self.link = None;
        self.client = None;
    }

    fn payload(&self, reply: &Reply, acknowledgement: Acknowledgement) -> bytes::Bytes {
        let limits = match &self.phase {
            Phase::Bound(session) => Some(&session.limits),
            Phase::Down(_) | Phase::Binding(_) => None,
        };
        limits::payload(limits, reply.delivered, acknowledgement)
    }
}
