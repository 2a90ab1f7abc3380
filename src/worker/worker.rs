//! The loop: pull, one transaction for each batch, commit, acknowledge.
//!
//! [`Worker::run`] is the path of every message; the functions below it stand in the order of the path. All messages that arrive
//! during one commit form the next batch. A single order therefore waits for nothing, and the orders of a backlog share an fsync.
//! Only waiting is ever cancelled. A batch runs to its end in its own task; only the drain's deadline cuts it off, undone.

use std::collections::HashSet;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::{Instant, Interval};
use tokio_util::sync::CancellationToken;

use super::acceptance::Acceptance;
use super::audit::Audit;
use super::calls::{self, Calls};
use super::held::Held;
use super::keys::KeyOrder;
use super::message_ids;
use super::outage::Outages;
use super::parked::Parked;
use super::relay::Relay;
use super::report::log_outcome;
use super::retention;
use super::waiting::Waiting;
use super::writer::{Done, PRUNE_STEP, Upkept, Work, Writer, upkeep};
use crate::config::Config;
use crate::handler::{Handler, planned};
use crate::jetstream::consumer::{Capacity, Consumer, Event, Limits, Receipt};
use crate::model::delivery::{Arrival, Delivery, Reply};
use crate::model::outcome::{Acknowledgement, Ignored, Outcome};
use crate::model::schemes::{IdSchemes, IdSettings};
use crate::model::view::ConsumerView;
use crate::store::{self, Retry, Store};
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::inbox::{Inbox, Processed};
use crate::worker::retry::RetryPolicy;

pub use end::{Ended, Until, WorkerError};
use looks::ticks;

mod calling;
mod drain;
mod end;
mod looks;
mod ordering;
mod publishing;

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

/// One consumer, one database, one loop.
pub struct Worker {
    config: Arc<Config>,
    telemetry: Arc<Telemetry>,
    consumer: Consumer,
    limits: Option<Limits>,
    view: Option<ConsumerView>,
    id_settings: IdSettings,
    schemes: IdSchemes,
    calls: Calls,
    /// What calls brought since the last batch began.
    answers: Vec<(Delivery, calls::CallOutcome)>,
    waiting: Waiting,
    held: Held,
    parked: Parked,
    keys: KeyOrder,
    /// Retries that an earlier process has left, until the first bind.
    retries: Vec<Retry>,
    handler: Arc<dyn Handler>,
    writer: Writer,
    outages: Outages,
    relay: Relay,
    acceptance: Acceptance,
    /// Makes the running job stop at the next message. Cancelled when the drain begins.
    draining: CancellationToken,
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
        let id_settings = message_ids::wanted(&config);
        Self {
            consumer: Consumer::new(config.clone(), telemetry.clone(), info_every),
            limits: None,
            view: None,
            schemes: IdSchemes::unchanged(&id_settings),
            id_settings,
            calls: Calls::new(handler.clone(), &telemetry),
            answers: Vec::new(),
            waiting: Waiting::default(),
            held: Held::default(),
            parked: Parked::default(),
            keys: KeyOrder::default(),
            retries: store.retries().to_vec(),
            relay: Relay::of(&store),
            writer: Writer::Free(Box::new(Inbox::new(store, handler.clone(), retry, config.inbox.on_conflict))),
            handler,
            outages: Outages::default(),
            acceptance: Acceptance::default(),
            draining: CancellationToken::new(),
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
        self.read_schemes().await;
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
            self.start_calls();
            let capacity = self.capacity();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(Ended::Done),
                () = &mut pause => return Ok(Ended::Paused),
                Some(done) = self.writer.done() => self.finish_job(done?).await?,
                Some(ended) = self.calls.ended() => self.called(ended)?,
                Some(ended) = OptionFuture::from(self.audit.running()) => self.audited(ended),
                Some(ended) = OptionFuture::from(self.relay.running()) => self.relay.ended(ended, &self.telemetry),
                _ = self.tick.tick() => self.keep_alive().await,
                event = self.consumer.next(capacity) => match event {
                    Event::Deliveries(arrivals) => {
                        self.receive(arrivals);
                        self.hand_back_blocked().await;
                    }
                    Event::GivenUp(arrivals) => self.receive_given_up(arrivals),
                    Event::Seen { view, edited } => self.observe(view, edited),
                    Event::Refused(error) => return Err(WorkerError::Refused(error)),
                    Event::Bound { limits, stream_created_ns, former, view } => {
                        self.after_bind(limits, stream_created_ns, former, view);
                    }
                },
            }
            if self.until == Until::Idle && self.is_idle() {
                return Ok(Ended::Done);
            }
        }
    }

    /// How much may be requested from the server: nothing while the database or the handler cannot work.
    fn capacity(&self) -> Capacity {
        if self.keys.pulls_from().is_some_and(|from| Instant::now() < from)
            || self.outages.retry_at().is_some()
            || !self.acceptance.is_accepted()
            || self.relay.is_full()
            || self.is_away_half()
        {
            return Capacity { messages: 0, bytes: 0 };
        }
        let (batch, calls) = (&self.config.batch, self.calls.size());
        // Messages that wait for others from before the bind must not keep these out.
        let share = if self.keys.has_barrier() { 2 } else { 1 };
        Capacity {
            messages: (share * batch.max_messages).saturating_sub(self.waiting.messages() + calls.messages),
            bytes: (share * batch.max_bytes).saturating_sub(self.waiting.bytes() + calls.bytes),
        }
    }

    /// Takes deliveries in. Another delivery of a message that is held already only renews the claim on the message.
    fn receive(&mut self, arrivals: Vec<Arrival>) {
        let now = Instant::now();
        for Arrival { raw, reply } in arrivals {
            self.count(raw.position);
            let is_again = self.parked.came(raw.position.stream_seq);
            let accounts_from = self.audit.delivered(raw.position, self.filtered);
            if self.held.take(raw.position, reply, accounts_from, now) {
                let delivery = planned(&*self.handler, Delivery::new(raw, &self.schemes));
                self.keys.came(&delivery, is_again, now);
                self.enqueue(delivery);
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
        if let Some(bind) = self.acceptance.due() {
            let id_settings = self.id_settings.clone();
            self.writer = Writer::Busy(tokio::spawn(async move {
                let result = inbox.store().bind(&bind, &id_settings).await;
                if let Err(error) = &result {
                    inbox.store().roll_back_after(error).await;
                }
                Done { inbox, work: Work::Bind { bind, result } }
            }));
            return;
        }
        if !self.acceptance.is_accepted() {
            self.writer = Writer::Free(inbox);
            return;
        }
        if let Some(step) = self.relay.step(self.consumer.publisher().is_some(), !self.waiting.is_empty()) {
            self.writer = publishing::start(inbox, step);
            return;
        }
        let to_look_up = self.calls.next_look_up(!self.waiting.is_empty());
        if !to_look_up.is_empty() {
            self.writer = calling::look_up(inbox, to_look_up);
            return;
        }
        let batch = self.waiting.next_batch(&self.keys, self.config.batch.max_messages, self.config.batch.max_bytes);
        self.writer = if !batch.is_empty() {
            inbox.max_deliver = self.max_deliver();
            self.answers.drain(..).for_each(|(delivery, outcome)| inbox.called(&delivery, outcome));
            inbox.publishing.max_payload = self.consumer.publisher().map(|publisher| publisher.max_payload());
            let (draining, cut) = (self.draining.clone(), self.cut.clone());
            Writer::Busy(tokio::spawn(async move {
                let began = Instant::now();
                let processed = cut.run_until_cancelled(inbox.process(&batch, &draining)).await;
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
        self.relay.committed(inbox.store().last_outbox_row(), &self.telemetry);
        self.writer = Writer::Free(inbox);
        match work {
            Work::Batch { batch, took, result: Ok(outcomes) } => {
                self.outages.database_works(&self.telemetry);
                self.outages.handler(away, &self.telemetry);
                self.settle(Processed::of(batch, outcomes), took).await;
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
                self.relay.counted(counts, &self.telemetry);
                let more = pruned == u64::from(PRUNE_STEP);
                self.upkeep_due = Instant::now() + if more { Duration::ZERO } else { UPKEEP_EVERY };
            }
            Work::Bind { bind, result: Ok(answer) } => {
                self.outages.database_works(&self.telemetry);
                self.answered(&bind, answer)?;
            }
            Work::LookUp(result) => self.looked_up(result)?,
            Work::Outbox { step, result } => self.outbox_taken(&step, result)?,
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
    async fn settle(&mut self, Processed { decided, left }: Processed, took: Duration) {
        self.waiting.put_back(left);
        // While draining, only `drain` starts jobs.
        let draining = self.draining.is_cancelled();
        if !draining {
            // The next batch starts before anything else follows from this one: the database must not wait.
            self.start_job();
        }
        self.telemetry.committed(&decided, took);
        tracing::debug!(messages = decided.len(), ?took, "committed");
        let mut acknowledgements = Vec::with_capacity(decided.len());
        for (delivery, outcome) in decided {
            let outcome = self.parked.park(delivery.raw.position.stream_seq, outcome, self.limits.as_ref());
            if let Outcome::Ignored(why) = outcome
                && self.ignored.insert(why)
            {
                let (subject, stream_seq) = (&delivery.raw.subject, delivery.raw.position.stream_seq);
                tracing::info!(%subject, stream_seq, "ignored {}; more of its kind are only counted", why.name());
            }
            log_outcome(&delivery, &outcome);
            self.calls.settled(&delivery);
            if let Some((reply, accounts_from)) = self.held.answer(delivery.raw.position) {
                if outcome.is_final() {
                    self.keys.decided(delivery.raw.position.stream_seq);
                    self.audit.decided(accounts_from, delivery.raw.position);
                }
                acknowledgements.push((reply, outcome.acknowledgement()));
            }
        }
        self.telemetry.health.set_held(self.held.len());
        self.telemetry.health.set_parked(self.parked.len());
        // While draining, these may be the last acknowledgements on this connection.
        self.acknowledge(acknowledgements, if draining { Receipt::Last } else { Receipt::None }).await;
        self.hand_back_blocked().await;
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
        self.report_hosts();
        let Some(limits) = &self.limits else { return };
        let (half, now) = (limits.ack_wait / 2, Instant::now());
        // What could not be sent is tried again at the next tick.
        if self.acknowledge(self.held.in_progress(half, now), Receipt::None).await {
            self.held.touch(half, now);
        }
    }
}
