//! The loop: pull, one transaction for each batch, commit, acknowledge.
//!
//! [`Worker::run`] is the path of every message; the functions below it stand in the order of the path. All messages that arrive
//! during one commit form the next batch. A single order therefore waits for nothing, and the orders of a backlog share an fsync.
//! Only waiting is ever cancelled. A batch runs to its end in its own task; only the drain's deadline cuts it off, undone.

use std::collections::HashSet;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::audit::pass::Pass;
use super::audit::{self, Audit};
use super::bound::Bound;
use super::held::Held;
use super::outage::Outages;
use super::parked::Parked;
use super::retention;
use super::waiting::Waiting;
use crate::config::Config;
use crate::handler::Handler;
use crate::jetstream;
use crate::jetstream::consumer::{Consumer, Event, Limits, Receipt, Room};
use crate::model::delivery::{Arrival, Delivery, Position, Reply};
use crate::model::id::IdScheme;
use crate::model::label::Label;
use crate::model::outcome::{Acknowledgement, Ignored, Outcome, Reason};
use crate::model::text::chain;
use crate::model::view::ConsumerView;
use crate::store::{self, AuditMark, Bind, Counts, Prunable, Store, Unbound};
use crate::telemetry::metrics::SeenBy;
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::inbox::{Inbox, Outcomes};
use crate::worker::retry::RetryPolicy;

/// The loop checks its clocks at least this often, and at least eight times within `ack_wait`.
const TICK_MAX: Duration = Duration::from_secs(1);
/// Acknowledgements that the client does not accept within this time are left to redelivery.
const ACKNOWLEDGE_BUDGET: Duration = Duration::from_secs(2);
/// How long the drain may continue after its deadline, with the running job cut off: to hand back and to close.
const CUT_GRACE: Duration = Duration::from_secs(1);
/// How often stream and consumer are looked at while running, and while waiting for the end of the work.
const INFO_EVERY: Duration = Duration::from_secs(2);
const INFO_EVERY_UNTIL_IDLE: Duration = Duration::from_millis(250);
/// How often ids are pruned and rows counted: operators write to the database too, and our gauges must show it.
const UPKEEP_EVERY: Duration = Duration::from_secs(10);
/// Ids deleted in one transaction: a few milliseconds.
const PRUNE_STEP: u32 = 500;

/// When [`Worker::run`] ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Only when it is stopped.
    Stopped,
    /// Even before that, when nothing is pending and nothing is held.
    Idle,
}

/// Why [`Worker::run`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was stopped, or it is idle as requested.
    Done,
    /// A pause began. Another worker continues after the pause.
    Paused,
}

/// Why the worker did not drain.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The operator has to change the consumer or the settings.
    #[error(transparent)]
    Refused(jetstream::Error),
    /// The operator has to give the daemon the database of its consumer.
    #[error(transparent)]
    Unbound(Unbound),
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
    view: Option<ConsumerView>,
    scheme: IdScheme,
    waiting: Waiting,
    held: Held,
    parked: Parked,
    writer: Writer,
    outages: Outages,
    bound: Bound,
    /// Makes the running job stop at the next message. Cancelled when the drain begins.
    hurry: CancellationToken,
    /// Ends the running job at once, undone. Cancelled at the drain's deadline.
    cut: CancellationToken,
    tick: Interval,
    upkeep_due: Instant,
    audit: Audit,
    /// The stream has messages that the consumer is not for.
    filtered: bool,
    /// When the stream was created.
    stream_ns: i64,
    waiting_for_pause: Reminder,
    /// What was reported once.
    ignored: HashSet<Ignored>,
    until: Until,
}

/// The one writer of the database: here, or with the job that uses it.
enum Writer {
    Free(Box<Inbox>),
    Busy(JoinHandle<Done>),
    /// Closed by the drain, or lost with a job that panicked.
    Closed,
}

/// What comes back from the task that works on the database.
struct Done {
    inbox: Box<Inbox>,
    work: Work,
}

enum Work {
    Batch { batch: Vec<Delivery>, took: Duration, result: Result<Outcomes, store::Error> },
    Upkeep(Result<Upkept, store::Error>),
    Bind { bind: Bind, result: Result<Result<(), Unbound>, store::Error> },
}

struct Upkept {
    pruned: u64,
    counts: Counts,
    mark: Option<AuditMark>,
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
            view: None,
            scheme: IdScheme { stream: config.consumer.stream.clone(), pointer: config.inbox.id_pointer.clone() },
            waiting: Waiting::default(),
            held: Held::default(),
            parked: Parked::default(),
            writer: Writer::Free(Box::new(Inbox::new(store, handler, retry, config.inbox.on_conflict))),
            outages: Outages::default(),
            bound: Bound::default(),
            hurry: CancellationToken::new(),
            cut: CancellationToken::new(),
            tick: ticks(TICK_MAX),
            upkeep_due: Instant::now(),
            audit: Audit::new(config.audit.every),
            filtered: false,
            stream_ns: 0,
            waiting_for_pause: Reminder::default(),
            ignored: HashSet::new(),
            until,
            config,
            telemetry,
        }
    }

    /// Works until `stop`, until `pause` completes, or until idle if requested. Then it drains within `shutdown.timeout` and
    /// closes the database. The next worker continues with what a pause cuts off after that time.
    ///
    /// # Errors
    /// [`WorkerError`]; whatever it is, nothing was acknowledged that is not durable.
    pub async fn run(mut self, stop: CancellationToken, pause: impl Future<Output = ()>) -> Result<Ended, WorkerError> {
        let mut pause = pin!(pause);
        let ended = self.work(stop, pause.as_mut()).await?;
        if ended == Ended::Done {
            self.telemetry.health.set_draining();
        }
        self.drain_in_time(ended).await
    }

    async fn work(
        &mut self,
        stop: CancellationToken,
        mut pause: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<Ended, WorkerError> {
        loop {
            self.start_job();
            let room = self.room();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(Ended::Done),
                () = &mut pause => return Ok(Ended::Paused),
                Some(done) = self.writer.done() => self.finish_job(done?).await?,
                Some(ended) = OptionFuture::from(self.audit.running()) => self.audited(ended),
                _ = self.tick.tick() => self.keep_alive().await,
                event = self.consumer.next(room) => match event {
                    Event::Deliveries(arrivals) => self.receive(arrivals),
                    Event::GivenUp(arrivals) => self.receive_given_up(arrivals),
                    Event::Seen { view, edited } => self.seen(view, edited),
                    Event::Refused(error) => return Err(WorkerError::Refused(error)),
                    Event::Bound { limits, stream_created_ns, former, view } => {
                        self.bound(limits, stream_created_ns, former, view);
                    }
                },
            }
            if self.until == Until::Idle && self.is_idle() {
                return Ok(Ended::Done);
            }
        }
    }

    /// How much may be requested from the server: nothing while the database or the handler cannot work.
    fn room(&self) -> Room {
        if self.outages.retry_at().is_some() || !self.bound.is_accepted() {
            return Room { messages: 0, bytes: 0 };
        }
        let batch = &self.config.batch;
        Room {
            messages: batch.max_messages.saturating_sub(self.waiting.messages()),
            bytes: batch.max_bytes.saturating_sub(self.waiting.bytes()),
        }
    }

    /// Takes deliveries in. Another delivery of a message that is held already only renews the claim on the message.
    fn receive(&mut self, arrivals: Vec<Arrival>) {
        let now = Instant::now();
        for Arrival { raw, reply } in arrivals {
            self.count(raw.position);
            self.parked.came(raw.position.stream_seq);
            let accounts_from = self.audit.delivered(raw.position, self.filtered);
            if self.held.take(raw.position, reply, accounts_from, now) {
                self.waiting.push(Delivery::new(raw, &self.scheme));
            }
        }
        self.telemetry.health.set_held(self.held.len());
    }

    /// Hands the next batch, or a step of upkeep, to its own task if the writer is free.
    fn start_job(&mut self) {
        let now = Instant::now();
        if self.outages.retry_at().is_some_and(|at| at > now) || self.cut.is_cancelled() {
            return;
        }
        let Some(mut inbox) = self.writer.take() else { return };
        if let Some(bind) = self.bound.due() {
            self.writer = Writer::Busy(tokio::spawn(async move {
                let result = inbox.store().bind(&bind).await;
                if let Err(error) = &result {
                    inbox.store().give_up(error).await;
                }
                Done { inbox, work: Work::Bind { bind, result } }
            }));
            return;
        }
        if !self.bound.is_accepted() {
            self.writer = Writer::Free(inbox);
            return;
        }
        let batch = self.waiting.next_batch(self.config.batch.max_messages, self.config.batch.max_bytes);
        self.writer = if !batch.is_empty() {
            inbox.max_deliver = self.max_deliver();
            let (hurry, cut) = (self.hurry.clone(), self.cut.clone());
            Writer::Busy(tokio::spawn(async move {
                let began = Instant::now();
                let processed = cut.run_until_cancelled(inbox.process(&batch, &hurry)).await;
                let result = processed.unwrap_or_else(|| Ok(vec![None; batch.len()]));
                Done { inbox, work: Work::Batch { batch, took: began.elapsed(), result } }
            }))
        } else if self.view.is_some() && self.upkeep_due <= now {
            let retention = self.config.inbox.retention;
            let prunable = retention::prunable(retention, self.view.as_ref());
            let mark = self.audit.mark_to_store();
            Writer::Busy(tokio::spawn(async move {
                let result = upkeep(inbox.store(), prunable, mark).await;
                Done { inbox, work: Work::Upkeep(result) }
            }))
        } else {
            Writer::Free(inbox)
        };
    }

    /// Draws the conclusions from a job that has ended: durable outcomes are acknowledged, a failed batch waits.
    async fn finish_job(&mut self, done: Done) -> Result<(), WorkerError> {
        let Done { mut inbox, work } = done;
        self.telemetry.sizes(inbox.store().sizes());
        let away = inbox.away.take();
        self.writer = Writer::Free(inbox);
        match work {
            Work::Batch { batch, took, result: Ok(outcomes) } => {
                self.outages.database_works(&self.telemetry);
                self.outages.handler(away, &self.telemetry);
                self.settle(batch, outcomes, took).await;
            }
            Work::Batch { batch, result: Err(error), .. } => {
                // None of it is known to be durable. The batch stays held and goes first when the database is back.
                self.waiting.put_back(batch);
                self.database_failed(error)?;
            }
            Work::Upkeep(Ok(Upkept { pruned, counts, mark })) => {
                self.outages.database_works(&self.telemetry);
                self.audit.stored(mark.as_ref());
                self.telemetry.metrics.ids_pruned.increment(pruned);
                self.telemetry.health.set_counts(counts);
                let more = pruned == u64::from(PRUNE_STEP);
                self.upkeep_due = Instant::now() + if more { Duration::ZERO } else { UPKEEP_EVERY };
            }
            Work::Bind { bind, result: Ok(answer) } => {
                self.outages.database_works(&self.telemetry);
                self.bound.answered(&bind, answer, &self.telemetry).map_err(WorkerError::Unbound)?;
                if let Some(view) = self.view.clone() {
                    self.audit(&view);
                }
            }
            Work::Upkeep(Err(error)) | Work::Bind { result: Err(error), .. } => self.database_failed(error)?,
        }
        Ok(())
    }

    fn database_failed(&mut self, error: store::Error) -> Result<(), WorkerError> {
        if error.may_have_written() {
            self.audit.distrust();
        }
        self.outages.database_failed(error, &self.telemetry).map_err(WorkerError::Corrupt)
    }

    /// Acknowledges what a commit has decided. Everything here is durable.
    async fn settle(&mut self, batch: Vec<Delivery>, outcomes: Outcomes, took: Duration) {
        let decisions = || batch.iter().zip(&outcomes);
        self.waiting.put_back(decisions().filter(|(_, outcome)| outcome.is_none()).map(|(it, _)| it.clone()).collect());
        // While draining, only `drain` starts jobs.
        let draining = self.hurry.is_cancelled();
        if !draining {
            // The next batch starts before anything else follows from this one: the database must not wait.
            self.start_job();
        }
        self.telemetry.committed(decisions(), took);
        tracing::debug!(messages = batch.len(), ?took, "committed");
        let mut acknowledgements = Vec::with_capacity(batch.len());
        for (delivery, outcome) in batch.iter().zip(outcomes) {
            let Some(outcome) = outcome else { continue };
            let outcome = self.parked.park(delivery.raw.position.stream_seq, outcome, self.limits.as_ref());
            if let Outcome::Ignored(why) = outcome
                && self.ignored.insert(why)
            {
                let (subject, stream_seq) = (&delivery.raw.subject, delivery.raw.position.stream_seq);
                tracing::info!(%subject, stream_seq, "ignored {}; more of its kind are only counted", why.name());
            }
            report(delivery, &outcome);
            if let Some((reply, accounts_from)) = self.held.answer(delivery.raw.position) {
                if outcome.is_final() {
                    self.audit.decided(accounts_from, delivery.raw.position);
                }
                acknowledgements.push((reply, outcome.acknowledgement()));
            }
        }
        self.telemetry.health.set_held(self.held.len());
        self.telemetry.health.set_parked(self.parked.len());
        // While draining, these may be the last acknowledgements on this connection.
        self.acknowledge(acknowledgements, if draining { Receipt::Last } else { Receipt::None }).await;
    }

    /// Sends acknowledgements. With a receipt, it waits until the server has the last one, and therefore all of them. What does
    /// not get through is delivered again and is then a duplicate. Returns whether all were sent.
    async fn acknowledge(&mut self, acknowledgements: Vec<(Reply, Acknowledgement)>, receipt: Receipt) -> bool {
        let sending = self.consumer.acknowledge(acknowledgements, receipt);
        match tokio::time::timeout(ACKNOWLEDGE_BUDGET, sending).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => tracing::debug!(%error, "not acknowledged; the server will redeliver the messages"),
            Err(_) => tracing::debug!("acknowledging took too long; the server will redeliver the messages"),
        }
        false
    }

    /// Shows that the loop runs, and restarts `ack_wait` for each delivery that has been held for half of it.
    async fn keep_alive(&mut self) {
        self.telemetry.health.tick();
        self.telemetry.health.set_held(self.held.len());
        let Some(limits) = &self.limits else { return };
        let (half, now) = (limits.ack_wait / 2, Instant::now());
        // What could not be sent is tried again at the next tick.
        if self.acknowledge(self.held.in_progress(half, now), Receipt::None).await {
            self.held.touch(half, now);
        }
    }

    /// Drains. At the deadline, it cuts off the job that still runs.
    async fn drain_in_time(self, ended: Ended) -> Result<Ended, WorkerError> {
        let deadline = self.config.shutdown.timeout;
        let began = Instant::now();
        let (telemetry, cut) = (self.telemetry.clone(), self.cut.clone());
        let mut drain = pin!(self.drain());
        let drained = match tokio::time::timeout(deadline, &mut drain).await {
            Ok(drained) => drained,
            Err(_) => {
                // A handler that is cut off is not a crash of its order, and held deliveries need not wait for `ack_wait`.
                cut.cancel();
                match tokio::time::timeout(CUT_GRACE, drain).await {
                    // A pause only needs the database to be closed.
                    Ok(Ok(())) if ended == Ended::Paused => Ok(()),
                    rest => rest.unwrap_or(Ok(())).and(Err(WorkerError::Deadline(deadline))),
                }
            }
        };
        telemetry.metrics.shutdown_duration_seconds.record(began.elapsed().as_secs_f64());
        drained.map(|()| ended)
    }

    /// Stops pulling, finishes and acknowledges what is in hand, hands the rest back, closes. The caller bounds the time.
    async fn drain(mut self) -> Result<(), WorkerError> {
        tracing::info!(held = self.held.len(), "draining");
        self.hurry.cancel();
        self.audit.stop();
        let arrived = self.consumer.quiesce().await;
        self.receive(arrived);
        self.finish_running().await?;
        // A message is not handed back on its last delivery: the server would never deliver it again.
        let last = self.max_deliver().unwrap_or(u64::MAX);
        self.waiting.retain(|delivery| delivery.raw.position.delivered >= last);
        self.upkeep_due = Instant::now() + UPKEEP_EVERY;
        self.start_job();
        while matches!(self.writer, Writer::Busy(_)) {
            self.finish_running().await?;
            self.start_job();
        }
        let rest = self.held.hand_back();
        let handed_back = rest.len();
        self.acknowledge(rest, Receipt::Last).await;
        if let Some(mut inbox) = self.writer.take() {
            if let Some(mark) = self.audit.mark_to_store().filter(|_| self.outages.retry_at().is_none())
                && let Err(error) = inbox.store().set_audit_mark(&mark).await
            {
                // The next audit begins a little earlier.
                tracing::debug!(error = %chain(&error), "cannot record where the audit stands");
                inbox.store().give_up(&error).await;
            }
            inbox.close().await.map_err(WorkerError::Close)?;
        }
        let outcomes = self.telemetry.health.status().committed_messages;
        let how = if self.cut.is_cancelled() { "cut off" } else { "drained" };
        tracing::info!(outcomes, handed_back, "{how}");
        Ok(())
    }

    /// Waits for the running job and keeps all held deliveries alive meanwhile.
    async fn finish_running(&mut self) -> Result<(), WorkerError> {
        loop {
            tokio::select! {
                done = self.writer.done() => match done {
                    Some(done) => return self.finish_job(done?).await,
                    None => return Ok(()),
                },
                _ = self.tick.tick() => self.keep_alive().await,
            }
        }
    }
}

/// What follows from looks at stream and consumer.
impl Worker {
    fn bound(&mut self, limits: Limits, stream_created_ns: i64, former: Option<Vec<Arrival>>, view: ConsumerView) {
        let mut current = Vec::new();
        if let Some(former) = former {
            // What we hold of the former stream is still applied, under its old ids. But an acknowledgement goes by sequence
            // alone and would hit a message of the new stream: nothing is sent.
            self.held.clear();
            self.parked.clear();
            self.audit.distrust();
            self.view = None;
            for Arrival { raw, reply } in former {
                if raw.position.published_ns < stream_created_ns {
                    self.count(raw.position);
                    self.waiting.push(Delivery::new(raw, &self.scheme));
                } else {
                    current.push(Arrival { raw, reply });
                }
            }
        }
        self.stream_ns = stream_created_ns;
        self.filtered = self.consumer.reader().is_some_and(|reader| reader.is_filtered());
        self.receive(current);
        self.bound.bound(&self.config.consumer, &view);
        self.seen(view, Some(limits));
    }

    /// A fresh look at stream and consumer; with limits if they are new.
    fn seen(&mut self, view: ConsumerView, limits: Option<Limits>) {
        if let Some(limits) = limits {
            self.adopt(limits);
            // Also the filter may be another one.
            self.audit.rebound();
        }
        let last_seq = view.stream_last_seq;
        if self.view.as_ref().is_some_and(|before| before.stream_last_seq > last_seq) {
            // The stream lost its tail. What we hold of the tail is still applied.
            self.held.cut_after(last_seq);
            self.parked.cut_after(last_seq);
            self.audit.distrust();
        }
        self.bound.seen(&self.config.consumer, &view);
        self.parked.seen(&view, self.limits.as_ref(), self.stream_ns, &self.telemetry);
        if self.until == Until::Idle && view.paused && view.num_pending > 0 && self.waiting_for_pause.is_due("paused") {
            tracing::warn!(pending = view.num_pending, "waiting for the end of the consumer's pause");
        }
        self.audit(&view);
        self.view = Some(view);
    }

    fn adopt(&mut self, limits: Limits) {
        // The last delivery of a message that nobody answers, or the longest retry that another process may have asked for.
        let longest = (limits.ack_wait * 2).max(self.config.retry.max_delay.mul_f64(1.25));
        self.telemetry.health.set_redelivery(longest);
        self.tick = ticks(limits.ack_wait);
        self.limits = Some(limits);
    }

    /// Takes in messages that the server no longer delivers: they become dead letters unless they were processed.
    fn receive_given_up(&mut self, arrivals: Vec<Arrival>) {
        let max_deliver = self.max_deliver();
        for Arrival { raw, reply } in arrivals {
            let position = raw.position;
            // A message that we hold is at work on its last delivery: it will have an outcome.
            if self.held.contains(position.stream_seq) {
                continue;
            }
            self.count(position);
            self.held.take(position, reply, position.stream_seq, Instant::now());
            let mut delivery = Delivery::new(raw, &self.scheme);
            delivery.defect.get_or_insert_with(|| (Reason::LastDelivery, given_up_text(max_deliver)));
            self.waiting.push(delivery);
        }
        self.telemetry.health.set_held(self.held.len());
    }

    /// Begins a pass of the audit if one is due, or moves its mark along.
    fn audit(&mut self, view: &ConsumerView) {
        let Some(reader) = self.consumer.reader().filter(|_| self.bound.is_accepted()) else { return };
        self.filtered = reader.is_filtered();
        self.audit.accounted(&self.telemetry.reported_removed(self.stream_ns.into()));
        self.audit.begin(|decided, newest, check| Pass {
            reader,
            database: self.config.database.clone(),
            scheme: self.scheme.clone(),
            retention: self.config.inbox.retention,
            on_conflict: self.config.inbox.on_conflict,
            view: view.clone(),
            decided,
            newest,
            check,
        });
        self.audit.advance(view, &self.telemetry);
    }

    fn audited(&mut self, ended: audit::Ended) {
        if self.audit.ended(ended, self.stream_ns, &self.telemetry) {
            self.upkeep_due = Instant::now();
        }
    }

    fn is_idle(&self) -> bool {
        let nothing_pending = |view: &ConsumerView| view.num_pending == 0 && view.num_ack_pending == 0;
        let at_rest = self.held.is_empty()
            && self.bound.is_accepted()
            && matches!(self.writer, Writer::Free(_))
            && self.audit.is_at_rest();
        at_rest && self.view.as_ref().is_some_and(nothing_pending)
    }

    /// The last delivery that the consumer allows, if there is a last one.
    fn max_deliver(&self) -> Option<u64> {
        self.limits.as_ref().and_then(|limits| limits.max_deliver)
    }

    fn count(&self, position: Position) {
        let metrics = &self.telemetry.metrics;
        metrics.deliveries.increment(1);
        if position.delivered > 1 {
            metrics.redeliveries.increment(SeenBy::Server, 1);
        }
    }
}

impl Writer {
    fn take(&mut self) -> Option<Box<Inbox>> {
        match mem::replace(self, Self::Closed) {
            Self::Free(inbox) => Some(inbox),
            other @ (Self::Busy(_) | Self::Closed) => {
                *self = other;
                None
            }
        }
    }

    /// Waits for the running job; `None` if there is none.
    async fn done(&mut self) -> Option<Result<Done, WorkerError>> {
        let Self::Busy(job) = self else { return None };
        let done = job.await.map_err(WorkerError::Panicked);
        *self = Self::Closed;
        Some(done)
    }
}

/// Deletes ids that may go, counts the rows, and records where the audit stands.
async fn upkeep(store: &mut Store, prunable: Prunable, mark: Option<AuditMark>) -> Result<Upkept, store::Error> {
    let upkept = async {
        let (pruned, counts) = store.upkeep(prunable, PRUNE_STEP).await?;
        if let Some(mark) = &mark {
            store.set_audit_mark(mark).await?;
        }
        Ok((pruned, counts))
    };
    match upkept.await {
        Ok((pruned, counts)) => Ok(Upkept { pruned, counts, mark }),
        Err(error) => {
            store.give_up(&error).await;
            Err(error)
        }
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
        Outcome::Applied | Outcome::Duplicate | Outcome::Dropped => {
            tracing::debug!(message_id = %id, %subject, stream_seq, delivered, outcome = outcome.kind().name(), "the outcome is durable");
        }
        Outcome::Ignored(why) => {
            tracing::debug!(%subject, stream_seq, delivered, outcome = "ignored", "the message is {}", why.name());
        }
        Outcome::Retry { delay, error } => {
            tracing::warn!(message_id = %id, %subject, stream_seq, delivered, ?delay, %error, outcome = "retry", "the handler failed on {id}, it will be delivered again");
        }
        Outcome::DeadLettered { reason, error } => {
            tracing::warn!(message_id = %id, %subject, stream_seq, delivered, reason = reason.name(), %error, outcome = "dead-lettered", "{id} is a dead letter");
        }
    }
}
