//! THE loop: pull, one transaction per batch, commit, acknowledge.
//!
//! [`Worker::run`] is the path of every message. Whatever arrives during one commit is the next batch, so a lone order waits for
//! nothing and a backlog shares its fsyncs. Only waiting is ever cancelled: a batch runs on a task of its own to its end.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::OptionFuture;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::given_up::{self, GivenUp, ToDo};
use super::parked::Parked;
use crate::config::{Config, Retention};
use crate::handler::Handler;
use crate::jetstream::consumer::{Arrival, BindError, Consumer, Event, Limits, Room};
use crate::model::delivery::{Delivery, Position, Reply};
use crate::model::id::IdScheme;
use crate::model::label::Label;
use crate::model::outcome::{Acknowledgement, Outcome, Reason};
use crate::model::text::chain;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::ErrorClass;
use crate::store::{self, Counts, Gone, Prunable, Store};
use crate::telemetry::metrics::SeenBy;
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::inbox::{Inbox, Outcomes, is_suspect};
use crate::worker::retry::RetryPolicy;
use crate::worker::survey::{Progress, Survey};

/// How often the loop looks at its clocks at the most; at least eight times within `ack_wait`.
const TICK_MAX: Duration = Duration::from_secs(1);
/// Acknowledgements that cannot be handed to the client within this long are left to redelivery.
const ACKNOWLEDGE_BUDGET: Duration = Duration::from_secs(2);
/// How long the drain may go on after its deadline, with whatever ran cut off: to hand back and to close.
const CUT_GRACE: Duration = Duration::from_secs(1);
const DATABASE_RETRY_MIN: Duration = Duration::from_millis(100);
const DATABASE_RETRY_MAX: Duration = Duration::from_secs(2);
/// How often stream and consumer are looked at while running, and while waiting for the end of the work.
const INFO_EVERY: Duration = Duration::from_secs(2);
const INFO_EVERY_UNTIL_IDLE: Duration = Duration::from_millis(250);
/// How often ids are pruned and rows counted: operators write beside us, and our gauges must not go on without them.
const UPKEEP_EVERY: Duration = Duration::from_secs(10);
/// Ids dropped in one transaction: a few milliseconds.
const PRUNE_STEP: u32 = 500;
/// `inbox.retention = "auto"` keeps ids at least this long: publishers repeat themselves without the server's help.
const RETENTION_MIN: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// When [`Worker::run`] is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Only when it is told to.
    Stopped,
    /// Also when nothing is pending and nothing is held.
    Idle,
}

/// Why [`Worker::run`] came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was told to stop, or is idle as was asked for.
    Done,
    /// A pause began: work is to go on some time, with another worker.
    Paused,
}

/// Why the worker did not end as it should.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The operator has to change the consumer or the settings.
    #[error(transparent)]
    Refused(BindError),
    /// The operator has to restore a backup.
    #[error("the database is damaged; stop, keep the file, and restore a backup")]
    Corrupt(#[source] store::Error),
    #[error("the deadline of {} passed before everything in hand was committed and acknowledged", humantime::format_duration(*.0))]
    Deadline(Duration),
    #[error("a batch ended in a panic")]
    Panicked(#[source] JoinError),
    #[error("the database could not be closed; nothing is lost, the next start recovers it")]
    Close(#[source] store::Error),
}

/// One consumer, one database, one loop.
pub struct Worker {
    config: Arc<Config>,
    telemetry: Arc<Telemetry>,
    consumer: Consumer,
    limits: Option<Limits>,
    scheme: IdScheme,
    waiting: Waiting,
    held: HashMap<u64, Held>,
    /// Here while no job runs.
    inbox: Option<Inbox>,
    job: Option<JoinHandle<Done>>,
    database: Database,
    /// Makes the job in hand stop at the next message.
    hurry: CancellationToken,
    /// Ends the job in hand where it stands, undone.
    cut: CancellationToken,
    view: Option<ConsumerView>,
    given_up: GivenUp,
    parked: Parked,
    waiting_for_pause: Reminder,
    upkeep_due: Instant,
    until: Until,
}

/// A delivery that we owe the server an answer for, by stream sequence.
struct Held {
    reply: Reply,
    /// Tells a message from another one that got the same sequence after the server lost its tail.
    published_ns: i64,
    /// When `ack_wait` last began to run.
    touched: Instant,
}

/// Deliveries that wait for their batch, in the order of their arrival.
#[derive(Default)]
struct Waiting {
    deliveries: VecDeque<Delivery>,
    bytes: usize,
}

/// Whether the database lets us.
#[derive(Default)]
struct Database {
    failures: u32,
    retry_at: Option<Instant>,
    reminder: Reminder,
}

/// What comes back from the task that works on the database.
struct Done {
    inbox: Inbox,
    work: Work,
}

enum Work {
    Batch { batch: Vec<Delivery>, took: Duration, result: Result<Outcomes, store::Error> },
    Upkeep(Result<(u64, Counts), store::Error>),
}

impl Worker {
    pub fn new(
        config: Arc<Config>,
        store: Store,
        handler: Arc<dyn Handler>,
        telemetry: Arc<Telemetry>,
        until: Until,
    ) -> Self {
        let info_every = if until == Until::Idle { INFO_EVERY_UNTIL_IDLE } else { INFO_EVERY };
        let retry = RetryPolicy::from(&config.retry);
        Self {
            consumer: Consumer::new(config.clone(), telemetry.clone(), info_every),
            limits: None,
            scheme: IdScheme {
                stream: config.consumer.stream.clone(),
                stream_created_ns: 0,
                pointer: config.inbox.id_pointer.clone(),
            },
            waiting: Waiting::default(),
            held: HashMap::new(),
            inbox: Some(Inbox::new(store, handler, retry, config.inbox.on_conflict)),
            job: None,
            database: Database::default(),
            hurry: CancellationToken::new(),
            cut: CancellationToken::new(),
            view: None,
            given_up: GivenUp::default(),
            parked: Parked::default(),
            waiting_for_pause: Reminder::default(),
            upkeep_due: Instant::now(),
            until,
            config,
            telemetry,
        }
    }

    /// Works until `stop`, until `pause` is over, or until idle if so asked; then drains, within `shutdown.timeout`, and has let
    /// go of the database. What a pause cuts off after that time goes on with the next worker.
    ///
    /// # Errors
    /// [`WorkerError`]; whatever it is, nothing was acknowledged that is not durable.
    pub async fn run(mut self, stop: CancellationToken, pause: impl Future<Output = ()>) -> Result<Ended, WorkerError> {
        let mut pause = pin!(pause);
        let mut tick = ticks(TICK_MAX);
        let ended = loop {
            self.start_job();
            let room = self.room();
            tokio::select! {
                biased;
                () = stop.cancelled() => break Ended::Done,
                () = &mut pause => break Ended::Paused,
                Some(done) = OptionFuture::from(self.job.as_mut()) => self.finish_job(done.map_err(WorkerError::Panicked)?).await?,
                Some(ended) = OptionFuture::from(self.given_up.running()) => self.surveyed(ended).await,
                _ = tick.tick() => self.keep_alive().await,
                event = self.consumer.next(room) => match event {
                    Event::Deliveries(arrivals) => self.receive(arrivals),
                    Event::GivenUp(arrivals) => self.receive_given_up(arrivals),
                    Event::Seen { view, edited } => {
                        if let Some(limits) = edited {
                            tick = ticks(limits.ack_wait);
                            self.adopt(limits);
                        }
                        self.seen(view);
                    }
                    Event::Refused(error) => return Err(WorkerError::Refused(error)),
                    Event::Bound { limits, stream_created_ns, former, view } => {
                        tick = ticks(limits.ack_wait);
                        self.bound(limits, stream_created_ns, former);
                        self.given_up.bound(&view);
                        self.seen(view);
                    }
                },
            }
            if self.until == Until::Idle && self.is_idle() {
                break Ended::Done;
            }
        };
        if ended == Ended::Done {
            self.telemetry.draining();
        }
        let deadline = self.config.shutdown.timeout;
        let began = Instant::now();
        let (telemetry, cut) = (self.telemetry.clone(), self.cut.clone());
        let mut drain = pin!(self.drain());
        let drained = match tokio::time::timeout(deadline, &mut drain).await {
            Ok(drained) => drained,
            Err(_) => {
                // A handler that is cut off is no crash of its order, and what is held need not wait for `ack_wait`.
                cut.cancel();
                match tokio::time::timeout(CUT_GRACE, drain).await {
                    // The database is closed, and that is all that a pause is for.
                    Ok(Ok(())) if ended == Ended::Paused => Ok(()),
                    rest => rest.unwrap_or(Ok(())).and(Err(WorkerError::Deadline(deadline))),
                }
            }
        };
        telemetry.metrics.shutdown_duration_seconds.record(began.elapsed().as_secs_f64());
        drained.map(|()| ended)
    }

    /// Hands the next batch, or a step of upkeep, to a task of its own, if the last one is done.
    fn start_job(&mut self) {
        let now = Instant::now();
        if self.database.retry_at.is_some_and(|at| at > now) || self.cut.is_cancelled() {
            return;
        }
        let Some(mut inbox) = self.inbox.take() else { return };
        let batch = self.waiting.next_batch(self.config.batch.max_messages, self.config.batch.max_bytes);
        if !batch.is_empty() {
            inbox.max_deliver = self.max_deliver();
            let (hurry, cut) = (self.hurry.clone(), self.cut.clone());
            self.job = Some(tokio::spawn(async move {
                let began = Instant::now();
                let processed = cut.run_until_cancelled(inbox.process(&batch, &hurry)).await;
                let result = processed.unwrap_or_else(|| Ok(vec![None; batch.len()]));
                Done { inbox, work: Work::Batch { batch, took: began.elapsed(), result } }
            }));
        } else if self.view.is_some() && self.upkeep_due <= now {
            let prunable = self.prunable();
            self.job = Some(tokio::spawn(async move {
                let result = inbox.store().upkeep(prunable, PRUNE_STEP).await;
                if let Err(error) = &result {
                    inbox.store().give_up(error).await;
                }
                Done { inbox, work: Work::Upkeep(result) }
            }));
        } else {
            self.inbox = Some(inbox);
        }
    }

    /// Draws the conclusions from a job that has ended: durable outcomes are acknowledged, a failed batch waits.
    async fn finish_job(&mut self, done: Done) -> Result<(), WorkerError> {
        self.job = None;
        let inbox = self.inbox.insert(done.inbox);
        self.telemetry.sizes(inbox.store().sizes());
        match done.work {
            Work::Batch { batch, took, result: Ok(outcomes) } => {
                self.database_works();
                self.settle(batch, outcomes, took).await;
            }
            Work::Batch { batch, result: Err(error), .. } => {
                // Nothing of it is known to be durable. It stays held and goes first when the database is back.
                self.waiting.put_back(batch);
                self.database_failed(error)?;
            }
            Work::Upkeep(Ok((pruned, counts))) => {
                self.database_works();
                self.telemetry.pruned(pruned);
                self.telemetry.counted(counts);
                let more = pruned == u64::from(PRUNE_STEP);
                self.upkeep_due = Instant::now() + if more { Duration::ZERO } else { UPKEEP_EVERY };
            }
            Work::Upkeep(Err(error)) => self.database_failed(error)?,
        }
        Ok(())
    }

    /// Acknowledges what a commit has decided. Everything here is durable.
    async fn settle(&mut self, batch: Vec<Delivery>, outcomes: Outcomes, took: Duration) {
        let decisions = || batch.iter().zip(&outcomes);
        self.waiting.put_back(decisions().filter(|(_, outcome)| outcome.is_none()).map(|(it, _)| it.clone()).collect());
        // While draining, what is started next is the drain's to say.
        let draining = self.hurry.is_cancelled();
        if !draining {
            // The database need not wait for what follows from its last batch.
            self.start_job();
        }
        self.telemetry.committed(decisions(), took);
        tracing::debug!(messages = batch.len(), ?took, "committed");
        let mut acknowledgements = Vec::with_capacity(batch.len());
        for (delivery, outcome) in batch.iter().zip(outcomes) {
            let Some(outcome) = outcome else { continue };
            let position = delivery.raw.position;
            let outcome = self.parked.park(position.stream_seq, outcome, self.limits.as_ref());
            report(delivery, &outcome);
            if let Entry::Occupied(held) = self.held.entry(position.stream_seq)
                && held.get().published_ns == position.published_ns
            {
                acknowledgements.push((held.remove().reply, outcome.acknowledgement()));
            }
        }
        self.telemetry.held(self.held.len());
        self.telemetry.parked(self.parked.len());
        // While draining this may be the last word.
        self.acknowledge(acknowledgements, draining).await;
    }

    /// Tells the server, and if asked waits until it has the last one, and with it all. What does not get through is delivered
    /// again and is then a duplicate. Whether all were sent.
    async fn acknowledge(&mut self, acknowledgements: Vec<(Reply, Acknowledgement)>, with_receipt: bool) -> bool {
        let sending = async {
            if with_receipt {
                self.consumer.acknowledge_with_receipt(acknowledgements).await
            } else {
                self.consumer.acknowledge(acknowledgements).await
            }
        };
        match tokio::time::timeout(ACKNOWLEDGE_BUDGET, sending).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => tracing::debug!(%error, "not acknowledged, the server will deliver again"),
            Err(_) => tracing::debug!("acknowledging took too long, the server will deliver again"),
        }
        false
    }

    /// Takes deliveries in. One of a message that we hold already only renews the claim on it: it must not run twice.
    fn receive(&mut self, arrivals: Vec<Arrival>) {
        let now = Instant::now();
        for (raw, reply) in arrivals {
            let position = raw.position;
            self.count(position);
            self.parked.came(position.stream_seq);
            let held = Held { reply, published_ns: position.published_ns, touched: now };
            match self.held.insert(position.stream_seq, held) {
                Some(before) if before.published_ns == position.published_ns => {}
                Some(_) | None => self.waiting.push(Delivery::new(raw, &self.scheme)),
            }
        }
        self.telemetry.held(self.held.len());
    }

    fn count(&self, position: Position) {
        let metrics = &self.telemetry.metrics;
        metrics.deliveries.increment(1);
        if position.delivered > 1 {
            metrics.redeliveries.increment(SeenBy::Server, 1);
        }
    }

    fn bound(&mut self, limits: Limits, stream_created_ns: i64, former: Option<Vec<Arrival>>) {
        let mut current = Vec::new();
        if let Some(former) = former {
            // What we hold of the former stream is still applied, under its old ids. But an acknowledgement goes by sequence
            // alone and would hit a message of the new stream: nobody is told.
            self.held.clear();
            self.parked.clear();
            self.given_up.forget();
            self.view = None;
            for (raw, reply) in former {
                if raw.position.published_ns < stream_created_ns {
                    self.count(raw.position);
                    self.waiting.push(Delivery::new(raw, &self.scheme));
                } else {
                    current.push((raw, reply));
                }
            }
        }
        self.scheme.stream_created_ns = stream_created_ns;
        self.adopt(limits);
        self.receive(current);
    }

    fn adopt(&mut self, limits: Limits) {
        // The last delivery of a message that nobody answers, or the longest retry that another process may have asked for.
        let longest = (limits.ack_wait * 2).max(self.config.retry.max_delay.mul_f64(1.25));
        self.telemetry.health.set_redelivery(longest);
        self.limits = Some(limits);
    }

    /// Takes in messages that the server delivers no more: they go to the dead letters unless they were processed.
    fn receive_given_up(&mut self, arrivals: Vec<Arrival>) {
        let max_deliver = self.max_deliver();
        for (raw, reply) in arrivals {
            let position = raw.position;
            // One that we hold is at work, and that was its last delivery: it will have an outcome.
            if self.held.contains_key(&position.stream_seq) {
                continue;
            }
            self.count(position);
            let held = Held { reply, published_ns: position.published_ns, touched: Instant::now() };
            self.held.insert(position.stream_seq, held);
            let mut delivery = Delivery::new(raw, &self.scheme);
            delivery.defect.get_or_insert_with(|| (Reason::LastDelivery, given_up_text(max_deliver)));
            self.waiting.push(delivery);
        }
        self.telemetry.held(self.held.len());
    }

    /// A fresh look at stream and consumer.
    fn seen(&mut self, view: ConsumerView) {
        let last_seq = view.stream_last_seq;
        if self.view.as_ref().is_some_and(|before| before.stream_last_seq > last_seq) {
            // The stream lost its tail. What we hold of that is still applied, but an acknowledgement would hit the message that
            // has its sequence now.
            self.held.retain(|stream_seq, _| *stream_seq <= last_seq);
            self.parked.cut_after(last_seq);
        }
        self.parked.seen(&view, self.limits.as_ref(), &self.telemetry);
        if self.until == Until::Idle && view.paused && view.num_pending > 0 && self.waiting_for_pause.is_due("paused") {
            tracing::warn!(pending = view.num_pending, "waiting for the end of the consumer's pause");
        }
        let max_deliver = self.max_deliver();
        self.given_up.seen(&view, max_deliver, |judged| {
            Some(Survey {
                records: self.consumer.records()?,
                scheme: self.scheme.clone(),
                database: self.config.database.path.clone(),
                retention: self.config.inbox.retention,
                on_conflict: self.config.inbox.on_conflict,
                judged,
                view: view.clone(),
                max_deliver: max_deliver.unwrap_or(1),
                bytes_max: self.config.batch.max_bytes,
                progress: Progress::default(),
            })
        });
        self.view = Some(view);
    }

    /// Does what follows from a step of the search for messages that the server has given up.
    async fn surveyed(&mut self, ended: given_up::Ended) {
        let ToDo { acknowledge, with_receipt, mut take_in } = self.given_up.surveyed(ended);
        let acknowledge: Vec<_> = acknowledge.into_iter().map(|reply| (reply, Acknowledgement::Ack)).collect();
        self.acknowledge(acknowledge, with_receipt).await;
        // What the stream has dropped meanwhile may have been processed, and its id pruned.
        let first = self.view.as_ref().map_or(0, |view| view.stream_first_seq);
        take_in.retain(|(raw, _)| raw.position.stream_seq >= first);
        self.receive_given_up(take_in);
    }

    /// Shows that the loop turns, and restarts `ack_wait` for whatever has been held for half of it.
    async fn keep_alive(&mut self) {
        self.telemetry.health.tick();
        self.telemetry.held(self.held.len());
        let Some(limits) = &self.limits else { return };
        let now = Instant::now();
        let half = limits.ack_wait / 2;
        let is_due = |held: &Held| now.duration_since(held.touched) >= half;
        let due: Vec<(Reply, Acknowledgement)> = (self.held.values())
            .filter(|held| is_due(held))
            .map(|held| (held.reply.clone(), Acknowledgement::InProgress))
            .collect();
        // What did not get out is tried again at the next tick.
        if self.acknowledge(due, false).await {
            self.held.values_mut().filter(|held| is_due(held)).for_each(|held| held.touched = now);
        }
    }

    /// What may be asked of the server: nothing while the database does not take it.
    fn room(&self) -> Room {
        if self.database.retry_at.is_some() {
            return Room { messages: 0, bytes: 0 };
        }
        let batch = &self.config.batch;
        Room {
            messages: batch.max_messages.saturating_sub(self.waiting.deliveries.len()),
            bytes: batch.max_bytes.saturating_sub(self.waiting.bytes),
        }
    }

    fn is_idle(&self) -> bool {
        let nothing_pending = |view: &ConsumerView| view.num_pending == 0 && view.num_ack_pending == 0;
        let at_rest = self.held.is_empty() && self.inbox.is_some() && self.given_up.is_at_rest();
        at_rest && self.view.as_ref().is_some_and(nothing_pending)
    }

    /// The last delivery that the consumer allows, if there is a last one.
    fn max_deliver(&self) -> Option<u64> {
        self.limits.as_ref().and_then(|limits| limits.max_deliver)
    }

    fn prunable(&self) -> Prunable {
        let (age, gone) = match self.config.inbox.retention {
            // A message that the stream still has can come again, after a reset of the consumer for one.
            Retention::Auto => {
                let below_seq = self.view.as_ref().map_or(0, |view| view.stream_first_seq);
                (RETENTION_MIN, Some(Gone { below_seq, stream_created_ns: self.scheme.stream_created_ns }))
            }
            Retention::For(age) => (age, None),
        };
        // By our clock and by the stream's, whichever is behind: one that jumps ahead must make no id look old.
        let last_published_at = self.view.as_ref().map_or(SystemTime::UNIX_EPOCH, |view| view.last_published_at);
        let now = SystemTime::now().min(last_published_at);
        Prunable { before_ns: now.checked_sub(age).map_or(0, unix_ns), gone }
    }

    fn database_works(&mut self) {
        if self.database.retry_at.is_some() {
            tracing::info!("the database works again");
        }
        self.database = Database::default();
        self.telemetry.health.set_database(Ok(()));
    }

    /// Puts the work off, and says why. Nothing is acknowledged and no attempt is spent.
    fn database_failed(&mut self, error: store::Error) -> Result<(), WorkerError> {
        self.telemetry.metrics.db_errors.increment(error.class, 1);
        if error.class == ErrorClass::Corrupt {
            return Err(WorkerError::Corrupt(error));
        }
        let cause = chain(&error);
        if self.database.reminder.is_due(&cause) {
            tracing::error!(%cause, "the database does not work, pulling stops until it does");
        }
        self.telemetry.health.set_database(Err(cause));
        let delay = DATABASE_RETRY_MIN * (1 << self.database.failures.min(5));
        self.database.failures += 1;
        self.database.retry_at = Some(Instant::now() + delay.min(DATABASE_RETRY_MAX));
        Ok(())
    }

    /// Stops pulling, finishes and acknowledges what is in hand, hands the rest back, closes. The caller bounds the time.
    async fn drain(mut self) -> Result<(), WorkerError> {
        tracing::info!(held = self.held.len(), "draining");
        self.hurry.cancel();
        let arrived = self.consumer.quiesce().await;
        self.receive(arrived);
        self.finish_running().await?;
        // The server's last delivery of a message is not handed back: it would never come again.
        let last = self.max_deliver().unwrap_or(u64::MAX);
        self.waiting.retain(|delivery| delivery.raw.position.delivered >= last);
        self.upkeep_due = Instant::now() + UPKEEP_EVERY;
        self.start_job();
        while self.job.is_some() {
            self.finish_running().await?;
            self.start_job();
        }
        let rest: Vec<_> =
            self.held.drain().map(|(_, held)| (held.reply, Acknowledgement::Nak { delay: Duration::ZERO })).collect();
        let handed_back = rest.len();
        self.acknowledge(rest, true).await;
        if let Some(inbox) = self.inbox.take() {
            inbox.close().await.map_err(WorkerError::Close)?;
        }
        let outcomes = self.telemetry.health.status().committed_messages;
        let how = if self.cut.is_cancelled() { "cut off" } else { "drained" };
        tracing::info!(outcomes, handed_back, "{how}");
        Ok(())
    }

    /// Waits for the job in hand, keeping everything that is held alive.
    async fn finish_running(&mut self) -> Result<(), WorkerError> {
        let mut tick = interval(TICK_MAX);
        loop {
            tokio::select! {
                done = OptionFuture::from(self.job.as_mut()) => match done {
                    Some(done) => return self.finish_job(done.map_err(WorkerError::Panicked)?).await,
                    None => return Ok(()),
                },
                _ = tick.tick() => self.keep_alive().await,
            }
        }
    }
}

impl Waiting {
    fn push(&mut self, delivery: Delivery) {
        self.bytes += delivery.bytes();
        self.deliveries.push_back(delivery);
    }

    /// Back to the front, in order.
    fn put_back(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries.into_iter().rev() {
            self.bytes += delivery.bytes();
            self.deliveries.push_front(delivery);
        }
    }

    /// The next batch in stream order: only suspects or none, no sequence twice, at least one message if there is any.
    fn next_batch(&mut self, max_messages: usize, max_bytes: usize) -> Vec<Delivery> {
        let Some(suspects) = self.deliveries.front().map(is_suspect) else { return Vec::new() };
        let mut bytes = 0;
        let fits = |delivery: &&Delivery| {
            bytes += delivery.bytes();
            is_suspect(delivery) == suspects && bytes <= max_bytes
        };
        let count = self.deliveries.iter().take(max_messages).take_while(fits).count().max(1);
        let mut batch: Vec<Delivery> = self.deliveries.drain(..count).collect();
        batch.sort_by_key(|delivery| delivery.raw.position.stream_seq);
        // The same sequence twice: the stream was created anew, or lost its tail, while we held a message.
        let mut later = Vec::new();
        let mut index = 1;
        while index < batch.len() {
            if batch[index].raw.position.stream_seq == batch[index - 1].raw.position.stream_seq {
                later.push(batch.remove(index));
            } else {
                index += 1;
            }
        }
        self.bytes -= batch.iter().chain(&later).map(Delivery::bytes).sum::<usize>();
        self.put_back(later);
        batch
    }

    fn retain(&mut self, which: impl Fn(&Delivery) -> bool) {
        self.deliveries.retain(which);
        self.bytes = self.deliveries.iter().map(Delivery::bytes).sum();
    }
}

/// For the loop's clocks.
fn ticks(ack_wait: Duration) -> Interval {
    let mut tick = interval(TICK_MAX.min(ack_wait / 8));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick
}

fn given_up_text(max_deliver: Option<u64>) -> String {
    let deliveries = max_deliver.map_or_else(|| "the".to_owned(), |max| format!("the {max}"));
    format!(
        "the server has given it up: {deliveries} deliveries that the consumer allows were made and none was acknowledged"
    )
}

/// One line for each message that did not simply succeed. Never its payload.
fn report(delivery: &Delivery, outcome: &Outcome) {
    let (id, position) = (&delivery.id, delivery.raw.position);
    let (stream_seq, delivered) = (position.stream_seq, position.delivered);
    let subject = &delivery.raw.subject;
    match outcome {
        Outcome::Applied | Outcome::Duplicate => {
            tracing::trace!(message_id = %id, stream_seq, delivered, outcome = outcome.kind().name());
        }
        Outcome::Retry { delay, error } => {
            tracing::warn!(message_id = %id, %subject, stream_seq, delivered, ?delay, %error, outcome = "retry", "the handler failed on {id}, it will be delivered again");
        }
        Outcome::DeadLettered { reason, error } => {
            tracing::warn!(message_id = %id, %subject, stream_seq, delivered, reason = reason.name(), %error, outcome = "dead-lettered", "{id} is a dead letter");
        }
    }
}
