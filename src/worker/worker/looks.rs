//! What follows from looks at stream and consumer: a bind, new limits, a lost tail, the audit.

use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use super::{TICK_MAX, Until, Worker, WorkerError};
use crate::handler::planned;
use crate::jetstream::consumer::Limits;
use crate::model::delivery::{Arrival, Delivery, Position};
use crate::model::outcome::Reason;
use crate::model::plan::Plan;
use crate::model::view::ConsumerView;
use crate::store::{Accepted, Bind, Unbound};
use crate::telemetry::metrics::SeenBy;
use crate::worker::audit;
use crate::worker::audit::pass::Pass;
use crate::worker::message_ids;
use crate::worker::retry::RetryPolicy;
use crate::worker::writer::Writer;

impl Worker {
    pub(super) fn after_bind(
        &mut self,
        limits: Limits,
        stream_created_ns: i64,
        former: Option<Vec<Arrival>>,
        view: ConsumerView,
    ) {
        let mut current = Vec::new();
        if let Some(former) = former {
            // The held deliveries of the former stream are still applied, under their old ids. But an acknowledgement names only a
            // sequence and would acknowledge a message of the new stream: nothing is sent.
            self.held.clear();
            self.parked.clear();
            self.keys.clear();
            self.audit.distrust();
            self.view = None;
            for Arrival { raw, reply } in former {
                if raw.position.published_ns < stream_created_ns {
                    self.count(raw.position);
                    self.enqueue(planned(&*self.handler, Delivery::new(raw, &self.schemes)));
                } else {
                    current.push(Arrival { raw, reply });
                }
            }
        }
        self.stream_ns = stream_created_ns;
        self.filtered = self.consumer.reader().is_some_and(|reader| reader.is_filtered());
        self.receive(current);
        self.acceptance.ask(&self.config.consumer, &view);
        self.observe(view.clone(), Some(limits));
        self.order_after_bind(&view);
    }

    /// What the server has given up may arrive before the first bind is recorded. It was delivered before, so the record of the
    /// bind before holds.
    pub(super) async fn read_schemes(&mut self) {
        let Writer::Free(inbox) = &mut self.writer else { return };
        match inbox.store().id_schemes(&self.id_settings).await {
            Ok(schemes) => self.schemes = schemes,
            // The bind reads it again, and waits for the database.
            Err(error) => inbox.store().roll_back_after(&error).await,
        }
    }

    /// The database has answered a bind.
    pub(super) fn answered(&mut self, bind: &Bind, answer: Result<Accepted, Unbound>) -> Result<(), WorkerError> {
        let answer = answer.map(|Accepted { schemes, is_changed }| {
            if is_changed {
                message_ids::log_change(&schemes);
            }
            self.schemes = schemes;
        });
        self.acceptance.take_answer(bind, answer, &self.telemetry).map_err(WorkerError::Unbound)?;
        if let Some(view) = self.view.clone() {
            self.audit(&view);
        }
        Ok(())
    }

    /// A fresh look at stream and consumer; with limits if they are new.
    pub(super) fn observe(&mut self, view: ConsumerView, limits: Option<Limits>) {
        if let Some(limits) = limits {
            self.set_limits(limits);
            // The filter may have changed too.
            self.audit.rebound();
        }
        let last_seq = view.stream_last_seq;
        if self.view.as_ref().is_some_and(|before| before.stream_last_seq > last_seq) {
            // The stream lost its tail. The held deliveries of the tail are still applied.
            self.held.cut_after(last_seq);
            self.parked.cut_after(last_seq);
            self.keys.retain(|stream_seq| stream_seq <= last_seq);
            self.audit.distrust();
        }
        self.acceptance.observe(&self.config.consumer, &view);
        if self.capacity().messages == 0 {
            self.parked.could_not_come();
        }
        self.parked.observe(&view, self.limits.as_ref(), self.stream_ns, &self.telemetry);
        self.observe_order(&view);
        if self.until == Until::Idle && view.paused && view.num_pending > 0 && self.waiting_for_pause.is_due("paused") {
            tracing::warn!(pending = view.num_pending, "waiting for the end of the consumer's pause");
        }
        self.audit(&view);
        self.view = Some(view);
    }

    fn set_limits(&mut self, limits: Limits) {
        // The last delivery of a message that nobody answers, or the longest retry that another process may have asked for.
        let longest = (limits.ack_wait * 2).max(RetryPolicy::from(&self.config.retry).longest());
        self.telemetry.health.set_redelivery(longest);
        self.tick = ticks(limits.ack_wait);
        self.limits = Some(limits);
    }

    /// Takes in messages that the server no longer delivers: they become dead letters unless they were processed.
    pub(super) fn receive_given_up(&mut self, arrivals: Vec<Arrival>) {
        let max_deliver = self.max_deliver();
        for Arrival { raw, reply } in arrivals {
            let position = raw.position;
            // A message that we hold is at work on its last delivery: it will have an outcome.
            if self.held.contains(position.stream_seq) {
                continue;
            }
            self.count(position);
            self.held.take(position, reply, position.stream_seq, Instant::now());
            let mut delivery = planned(&*self.handler, Delivery::new(raw, &self.schemes));
            if delivery.plan != Plan::Ignore {
                delivery.defect.get_or_insert_with(|| (Reason::LastDelivery, given_up_text(max_deliver)));
            }
            self.waiting.push(delivery);
        }
        self.telemetry.health.set_held(self.held.len());
    }

    /// Begins a pass of the audit if one is due, or moves its mark along.
    pub(super) fn audit(&mut self, view: &ConsumerView) {
        let Some(reader) = self.consumer.reader().filter(|_| self.acceptance.is_accepted()) else { return };
        self.filtered = reader.is_filtered();
        self.audit.accounted(&self.telemetry.reported_removed(self.stream_ns.into()));
        self.audit.begin(|decided, newest, check| Pass {
            reader,
            database: self.config.database.clone(),
            schemes: self.schemes.clone(),
            retention: self.config.inbox.retention,
            on_conflict: self.config.inbox.on_conflict,
            view: view.clone(),
            decided,
            newest,
            check,
        });
        self.audit.advance(view, &self.telemetry);
    }

    pub(super) fn audited(&mut self, ended: audit::PassResult) {
        if self.audit.ended(ended, self.stream_ns, &self.telemetry) {
            self.upkeep_due = Instant::now();
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        let nothing_pending = |view: &ConsumerView| view.num_pending == 0 && view.num_ack_pending == 0;
        let at_rest = self.held.is_empty()
            && self.acceptance.is_accepted()
            && matches!(self.writer, Writer::Free(_))
            && self.audit.is_at_rest()
            && self.relay.is_at_rest();
        at_rest && self.view.as_ref().is_some_and(nothing_pending)
    }

    /// The last delivery that the consumer allows, if there is a last one.
    pub(super) fn max_deliver(&self) -> Option<u64> {
        self.limits.as_ref().and_then(|limits| limits.max_deliver)
    }

    pub(super) fn count(&self, position: Position) {
        let metrics = &self.telemetry.metrics;
        metrics.deliveries.increment(1);
        if position.delivered > 1 {
            metrics.redeliveries.increment(SeenBy::Server, 1);
        }
    }
}

fn given_up_text(max_deliver: Option<u64>) -> String {
    let deliveries = max_deliver.map_or_else(|| "the".to_owned(), |max| format!("the {max}"));
    format!(
        "the server gave up the message: it made {deliveries} deliveries that the consumer allows, and none was acknowledged"
    )
}

/// For the loop's clocks.
pub(in crate::worker) fn ticks(ack_wait: Duration) -> Interval {
    let mut tick = interval(TICK_MAX.min(ack_wait / 8));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tick
}
