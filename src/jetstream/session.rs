//! One binding: from a good look at stream and consumer to the next trouble.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Message;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use tokio::time::Instant;

use super::advisory::{self, Advisory};
use super::consumer::Capacity;
use super::error::{Error, Trouble};
use super::gaps::Positions;
use super::limits::Limits;
use super::link::Link;
use super::look::{Oldest, Snapshot, look, look_with_age};
use super::pull::{HEADER_ALLOWANCE_BYTES, Heartbeat, PullReply, PullRequest, Pulls};
use super::stored::{StreamReader, owned_filters};
use crate::config::Config;
use crate::model::delivery::Arrival;
use crate::model::view::Incarnation;
use crate::telemetry::Reminder;

/// How long one pull stays open on the server.
const PULL_EXPIRES: Duration = Duration::from_secs(15);
/// The same without heartbeats: only the expiry shows that such a pull was lost.
const BLIND_PULL_EXPIRES: Duration = Duration::from_secs(2);
/// The byte limit of a pull never grows beyond this, whatever the size of the next message.
const PULL_BYTES_MAX: usize = 1024 * 1024 * 1024;
/// How often a session checks its clocks.
const CHECK_EVERY: Duration = Duration::from_millis(200);
/// The pause after a pull that brought nothing, because the next message is larger than the consumer allows to ask for.
const TOO_LARGE_PAUSE: Duration = Duration::from_secs(1);
/// After a gap in the sequences, the next look comes so soon. One look is enough for many gaps.
const GAP_PAUSE: Duration = Duration::from_millis(100);
/// Deliveries that are handed on together.
const CHUNK_MAX: usize = 256;
/// Advised messages that are fetched together, and advisories that may wait. The self-audit finds the rest.
const ADVISED_FETCH_MAX: usize = 100;
const ADVISED_MAX: usize = 10_000;
/// The pause after advised messages could not be fetched.
const ADVISED_AGAIN: Duration = Duration::from_secs(5);

/// What the session needs from outside, and what it fills. All of it outlives the session.
pub(super) struct Surroundings<'a> {
    pub(super) link: &'a mut Link,
    pub(super) config: &'a Arc<Config>,
    pub(super) capacity: Capacity,
    pub(super) info_every: Duration,
    pub(super) stash: &'a mut Vec<Arrival>,
    pub(super) advised: &'a mut Vec<Advisory>,
    pub(super) positions: &'a mut Positions,
}

/// What came first.
pub(super) enum Step {
    /// The stash may have deliveries.
    Arrived,
    /// Messages that the server will not deliver again.
    GivenUp(Vec<Arrival>),
    Seen(Box<Snapshot>),
}

type Pending<T> = Option<BoxFuture<'static, Result<T, Error>>>;

pub(super) struct Session {
    pub(super) limits: Limits,
    pub(super) reader: StreamReader,
    incarnation: Incarnation,
    pulls: Pulls,
    /// No pull before this time.
    pull_due: Instant,
    /// The server answered a pull since this was last asked.
    answered: bool,
    heartbeat: Heartbeat,
    /// The byte limit of the last pull, and what the next one needs at least.
    pull_bytes: usize,
    pull_bytes_min: usize,
    /// The most bytes that a pull may ask for, if the next message is larger.
    too_large_for: Option<usize>,
    /// Deliveries arrived, or no pull was open, since the last look.
    served: bool,
    last_consumer_seq: u64,
    /// The number of the connection.
    connects: u64,
    checks: tokio::time::Interval,
    info: Pending<Snapshot>,
    info_due: Instant,
    /// Whether to ask for the age of the oldest message. The permission is optional.
    ask_age: bool,
    /// The check for messages that the client cannot parse, after a loss.
    scan: Pending<Vec<Arrival>>,
    /// The first `fetching` of the advised messages.
    fetch: Pending<Vec<Arrival>>,
    fetching: usize,
    fetch_due: Instant,
    fetch_reminder: Reminder,
}

impl Session {
    /// `heartbeat`: of the first pull.
    pub(super) fn new(link: &Link, snapshot: &Snapshot, info_every: Duration, heartbeat: Heartbeat) -> Self {
        let now = Instant::now();
        Self {
            limits: Limits::of(&snapshot.consumer),
            reader: StreamReader::of(link.client.clone(), snapshot),
            incarnation: snapshot.incarnation(),
            pulls: Pulls::of(&link.client, &snapshot.consumer.stream_name, &snapshot.consumer.name),
            pull_due: now,
            answered: false,
            heartbeat,
            pull_bytes: 0,
            // A limit below the largest possible message would block the consumer on that message for ever.
            pull_bytes_min: link.client.max_payload() + HEADER_ALLOWANCE_BYTES,
            too_large_for: None,
            served: true,
            last_consumer_seq: 0,
            connects: link.connects(),
            checks: tokio::time::interval(CHECK_EVERY),
            info: None,
            info_due: now + info_every,
            ask_age: true,
            scan: None,
            fetch: None,
            fetching: 0,
            fetch_due: now,
            fetch_reminder: Reminder::default(),
        }
    }

    /// Runs this check beside the pulls. Its result counts as deliveries.
    pub(super) fn scan(&mut self, scan: impl Future<Output = Result<Vec<Arrival>, Error>> + Send + 'static) {
        self.scan = Some(scan.boxed());
    }

    /// Drops the advised messages that are on their way: their sequences mean other messages now.
    pub(super) fn forget_advised(&mut self) {
        self.fetch = None;
    }

    /// Whether the server answered a pull since the last call.
    pub(super) fn take_answered(&mut self) -> bool {
        std::mem::take(&mut self.answered)
    }

    /// Whether a pull was open since the last call, or every pull ended for the size of the next message, and nothing was delivered.
    pub(super) fn take_waits(&mut self) -> bool {
        let asks = self.pulls.outstanding() > 0 || self.too_large_for.is_some();
        let waits = !self.served && asks;
        self.served = !asks;
        waits
    }

    /// The most bytes that a pull may ask for, if the next message is larger.
    pub(super) fn too_large_for(&self) -> Option<usize> {
        self.too_large_for
    }

    /// Messages that open pulls may still bring.
    pub(super) fn outstanding(&self) -> usize {
        self.pulls.outstanding()
    }

    /// Pulls of this session that may be open on the server.
    pub(super) fn open_pulls(&self) -> u64 {
        self.pulls.open()
    }

    /// Adopts an edited consumer. The limits, if they changed.
    pub(super) fn follow(&mut self, snapshot: &Snapshot) -> Option<Limits> {
        let filters = owned_filters(&snapshot.consumer.config);
        let limits = Limits::of(&snapshot.consumer);
        if limits == self.limits && filters == self.reader.filters {
            return None;
        }
        let (ack_wait, max_deliver, max_ack_pending) = (limits.ack_wait, limits.max_deliver, limits.max_ack_pending);
        tracing::warn!(
            ?ack_wait,
            ?max_deliver,
            ?max_ack_pending,
            ?filters,
            "the consumer was edited; the daemon continues with the new settings"
        );
        self.reader.follow(snapshot);
        self.limits = limits.clone();
        Some(limits)
    }

    /// Pulls if there is capacity, then waits for what comes first.
    pub(super) async fn step(&mut self, around: &mut Surroundings<'_>) -> Result<Step, Trouble> {
        self.pull(around).await?;
        self.begin_fetch(around.advised);
        tokio::select! {
            message = around.link.replies.next() => {
                self.take_in(message.ok_or_else(Trouble::client_dead)?, around.stash, around.positions)?;
                while around.stash.len() < CHUNK_MAX
                    && let Some(Some(message)) = around.link.replies.next().now_or_never()
                {
                    self.take_in(message, around.stash, around.positions)?;
                }
                Ok(Step::Arrived)
            }
            seen = wait_for(&mut self.info) => {
                self.info = None;
                self.info_due = Instant::now() + around.info_every;
                self.observe(seen?)
            }
            unreadable = wait_for(&mut self.scan) => {
                self.scan = None;
                match unreadable {
                    Ok(unreadable) => around.stash.extend(unreadable),
                    Err(error) => tracing::warn!(%error, "cannot check for messages that the client cannot parse"),
                }
                Ok(Step::Arrived)
            }
            Some(first) = around.link.advisories.next(), if around.advised.len() < ADVISED_MAX => {
                around.advised.extend(Advisory::parse(&first.payload));
                Ok(Step::Arrived)
            }
            fetched = wait_for(&mut self.fetch) => {
                self.fetch = None;
                Ok(self.fetched(fetched, around.advised))
            }
            _ = self.checks.tick() => self.check(around.link, around.config),
        }
    }

    /// Takes in one message of the subscription for replies.
    pub(super) fn take_in(
        &mut self,
        message: Message,
        stash: &mut Vec<Arrival>,
        positions: &mut Positions,
    ) -> Result<(), Trouble> {
        let received = self.pulls.receive(message)?;
        self.answered = true;
        match received {
            PullReply::Heartbeat | PullReply::Ended => Ok(()),
            PullReply::TooLarge => {
                self.ask_for_more_bytes();
                Ok(())
            }
            PullReply::Delivery(arrival) => {
                self.served = true;
                self.too_large_for = None;
                let position = arrival.raw.position;
                let is_backwards = position.consumer_seq <= self.last_consumer_seq;
                self.last_consumer_seq = position.consumer_seq;
                if positions.delivered(position) {
                    self.info_due = self.info_due.min(Instant::now() + GAP_PAUSE);
                }
                stash.push(arrival);
                // The sequences of a consumer only grow. So this is another consumer, perhaps on another stream of this name.
                if is_backwards { Err(Trouble::new("the consumer sequence went backwards", None)) } else { Ok(()) }
            }
        }
    }

    /// Pulls what there is capacity for, if that is worth a request: half a window, or anything if no pull is open.
    async fn pull(&mut self, around: &Surroundings<'_>) -> Result<(), Trouble> {
        let (window, capacity, outstanding) =
            (around.config.batch.max_messages, around.capacity, self.pulls.outstanding());
        let messages = capacity.messages.saturating_sub(outstanding).min(self.limits.max_batch.unwrap_or(usize::MAX));
        let is_worth_it = outstanding == 0 || messages >= window.div_ceil(2);
        if messages == 0 || capacity.bytes == 0 || !is_worth_it || self.pull_due > Instant::now() {
            return Ok(());
        }
        let heartbeat = std::mem::replace(&mut self.heartbeat, Heartbeat::On);
        let expires = match heartbeat {
            Heartbeat::On => PULL_EXPIRES,
            Heartbeat::Off => BLIND_PULL_EXPIRES,
        };
        let expires = expires.min(self.limits.max_expires.unwrap_or(expires));
        let bytes = capacity.bytes.max(self.pull_bytes_min).min(self.limits.max_bytes.unwrap_or(usize::MAX));
        self.pull_bytes = bytes;
        Ok(self.pulls.send(around.link, PullRequest { messages, bytes, expires, heartbeat }).await?)
    }

    /// The next message is larger than the last pull allowed. The server may have a higher `max_payload` since a reload of its
    /// configuration, which clients do not get to know.
    fn ask_for_more_bytes(&mut self) {
        let wanted = self.pull_bytes.saturating_mul(2).min(PULL_BYTES_MAX);
        let is_allowed = self.limits.max_bytes.is_none_or(|max| wanted <= max) && wanted > self.pull_bytes;
        match is_allowed {
            false => {
                self.pull_due = Instant::now() + TOO_LARGE_PAUSE;
                self.too_large_for = Some(self.pull_bytes);
            }
            true => {
                self.pull_bytes_min = wanted;
                tracing::info!(
                    max_bytes = wanted,
                    "the next message is larger than the pull allowed; the daemon pulls again"
                );
            }
        }
    }

    fn begin_fetch(&mut self, advised: &[Advisory]) {
        if self.fetch.is_none() && !advised.is_empty() && self.fetch_due <= Instant::now() {
            let first: Vec<Advisory> = advised.iter().take(ADVISED_FETCH_MAX).copied().collect();
            self.fetching = first.len();
            self.fetch = Some(advisory::fetch(self.reader.clone(), first).boxed());
        }
    }

    fn fetched(&mut self, fetched: Result<Vec<Arrival>, Error>, advised: &mut Vec<Advisory>) -> Step {
        match fetched {
            Ok(given_up) => {
                advised.drain(..self.fetching);
                Step::GivenUp(given_up)
            }
            Err(error) => {
                self.fetch_due = Instant::now() + ADVISED_AGAIN;
                if self.fetch_reminder.is_due(&error.to_string()) {
                    tracing::warn!(
                        %error,
                        "cannot fetch messages that the server will not deliver again; the daemon tries again"
                    );
                }
                Step::Arrived
            }
        }
    }

    fn observe(&mut self, snapshot: Snapshot) -> Result<Step, Trouble> {
        if snapshot.incarnation() != self.incarnation {
            return Err(Error::Recreated.into());
        }
        self.ask_age &= snapshot.oldest != Oldest::Unknown;
        Ok(Step::Seen(Box::new(snapshot)))
    }

    /// Notices what no message reports: a reconnect, silence, a pull whose end got lost, the time for a look.
    fn check(&mut self, link: &Link, config: &Arc<Config>) -> Result<Step, Trouble> {
        let now = Instant::now();
        if link.connects() != self.connects || !link.is_connected() {
            return Err(Trouble::by_message("the connection was lost"));
        }
        self.pulls.check()?;
        if self.info.is_none() && now >= self.info_due {
            let (client, config, ask_age) = (link.client.clone(), config.clone(), self.ask_age);
            let info = async move {
                let names = &config.consumer;
                match ask_age {
                    true => look_with_age(&client, &names.stream, &names.name).await,
                    false => look(&client, &names.stream, &names.name).await,
                }
            };
            self.info = Some(info.boxed());
        }
        Ok(Step::Arrived)
    }
}

async fn wait_for<T>(slot: &mut Pending<T>) -> Result<T, Error> {
    match slot {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}
