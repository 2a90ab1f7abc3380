//! The stage before the inbox: it looks up the ids of orders that need a call, calls, and passes the answered orders on.
//!
//! An order that needs a call goes `to_look_up → queue of its service → running → out`, and its id is busy from the look-up until the
//! outcome of the order is durable. Another message with that id waits for this outcome and is then looked up again, so there are
//! never two calls of one id at once. What leaves the stage joins the next batch. An order whose host is [away](host) goes back to
//! the queue.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use self::host::{Begun, Host, Judged};
use super::inbox::single::caught;
use super::keys::{Blocked, KeyOrder};
use crate::handler::{Answer, Failure, Handler};
use crate::model::delivery::Delivery;
use crate::model::plan::Plan;
use crate::store::{Claim, Error};
use crate::telemetry::calls::{CallResult, HostMetrics};
use crate::telemetry::{Reminder, Telemetry};

mod host;

/// What is known of an id before a call.
#[derive(Clone, Copy, Debug)]
pub struct LookedUp {
    pub claim: Claim,
    /// Attempts that failed.
    pub failed: u32,
}

/// What is known of these orders, or the orders whose ids could not be looked up.
pub type LookUp = Result<Vec<(Delivery, LookedUp)>, (Vec<Delivery>, Error)>;

/// What a call brought for its order.
pub type CallOutcome = Result<Answer, Failure>;

/// The orders in the stage.
pub struct Calls {
    handler: Arc<dyn Handler>,
    services: Vec<Queue>,
    hosts: Vec<Watched>,
    to_look_up: Vec<Delivery>,
    /// The ids of orders that were looked up and have no durable outcome yet, and other messages with these ids.
    busy: HashMap<Arc<str>, Vec<Delivery>>,
    running: JoinSet<EndedCall>,
    /// Everything in the stage.
    size: Size,
    /// The service whose turn it is to begin.
    turn: usize,
    /// The last job of the writer was a look-up.
    had_turn: bool,
    /// After a stop, only orders with this `delivered` or more are called for.
    stopped_below: Option<u64>,
}

/// The orders of one service that wait for their call, and how many calls run.
struct Queue {
    host: usize,
    concurrency: usize,
    running: usize,
    waiting: VecDeque<Delivery>,
    /// Waiting and running.
    size: Size,
}

struct Watched {
    host: Host,
    metrics: HostMetrics,
    reminder: Reminder,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub messages: usize,
    pub bytes: usize,
}

/// A call that has ended.
pub struct EndedCall {
    service: usize,
    delivery: Delivery,
    begun: Begun,
    took: Duration,
    outcome: CallOutcome,
}

impl Size {
    fn add(&mut self, delivery: &Delivery) {
        self.messages += 1;
        self.bytes += delivery.bytes();
    }

    fn remove(&mut self, delivery: &Delivery) {
        self.messages -= 1;
        self.bytes -= delivery.bytes();
    }
}

impl Calls {
    pub fn new(handler: Arc<dyn Handler>, telemetry: &Telemetry) -> Self {
        let mut hosts: Vec<Watched> = Vec::new();
        let mut services = Vec::new();
        for service in handler.services() {
            let known = hosts.iter().position(|watched| watched.host.name == service.host);
            let host = known.unwrap_or_else(|| {
                let metrics = telemetry.metrics.host(&service.host);
                hosts.push(Watched { host: Host::new(service.host.clone()), metrics, reminder: Reminder::default() });
                hosts.len() - 1
            });
            let (waiting, size) = (VecDeque::new(), Size::default());
            services.push(Queue { host, concurrency: service.concurrency.max(1), running: 0, waiting, size });
        }
        Self {
            handler,
            services,
            hosts,
            to_look_up: Vec::new(),
            busy: HashMap::new(),
            running: JoinSet::new(),
            size: Size::default(),
            turn: 0,
            had_turn: false,
            stopped_below: None,
        }
    }

    /// Takes an order that needs a call; gives any other message back.
    pub fn take(&mut self, delivery: Delivery) -> Option<Delivery> {
        if !needs_call(&delivery) || self.services.is_empty() {
            return Some(delivery);
        }
        if self.is_wanted(&delivery) {
            self.size.add(&delivery);
            self.to_look_up.push(delivery);
        }
        None
    }

    /// Everything in the stage.
    pub fn size(&self) -> Size {
        self.size
    }

    /// What waits for hosts that are away.
    pub fn size_of_away(&self) -> Size {
        let away = self.services.iter().filter(|queue| self.hosts[queue.host].host.away().is_some());
        away.fold(Size::default(), |size, queue| Size {
            messages: size.messages + queue.size.messages,
            bytes: size.bytes + queue.size.bytes,
        })
    }

    /// The orders whose ids are to be looked up, in stream order. While batches wait, every other job is one of them.
    pub fn next_look_up(&mut self, batches_wait: bool) -> Vec<Delivery> {
        if std::mem::take(&mut self.had_turn) && batches_wait {
            return Vec::new();
        }
        self.had_turn = !self.to_look_up.is_empty();
        let mut next = std::mem::take(&mut self.to_look_up);
        next.sort_by_key(|delivery| delivery.raw.position.stream_seq);
        next
    }

    /// A look-up failed with the database.
    pub fn not_looked_up(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            self.size.remove(&delivery);
            self.take(delivery);
        }
    }

    /// Queues new orders. Returns the others, which need no call.
    pub fn looked_up(&mut self, looked_up: Vec<(Delivery, LookedUp)>) -> Vec<Delivery> {
        let mut known = Vec::new();
        for (mut delivery, LookedUp { claim, failed }) in looked_up {
            if claim != Claim::New {
                self.size.remove(&delivery);
                known.push(delivery);
                continue;
            }
            if !self.is_wanted(&delivery) {
                self.size.remove(&delivery);
                continue;
            }
            if let Some(repetitions) = self.busy.get_mut(&delivery.id) {
                repetitions.push(delivery);
                continue;
            }
            self.busy.insert(delivery.id.clone(), Vec::new());
            delivery.attempt = failed.saturating_add(1);
            let service = self.handler.service(&delivery).min(self.services.len() - 1);
            let queue = &mut self.services[service];
            queue.size.add(&delivery);
            queue.waiting.push_back(delivery);
        }
        known
    }

    /// Begins as many calls as may run now. Orders of one key are called for one after the other: the next one after the commit of the
    /// one before.
    pub fn start(&mut self, keys: &KeyOrder) {
        let now = Instant::now();
        let services = self.services.len();
        let first = self.turn;
        for service in (0..services).map(|index| (first + index) % services) {
            while let Some((delivery, begun)) = self.services[service].next(&mut self.hosts, keys, now) {
                // A host that is away gets one probe at a time: the other services of the host have their turn.
                self.turn = (service + 1) % services;
                let handler = self.handler.clone();
                self.running.spawn(async move {
                    let outcome = caught(handler.call(&delivery)).await;
                    EndedCall { service, delivery, begun, took: now.elapsed(), outcome }
                });
            }
        }
    }

    /// Waits for calls that have ended; `None` if none runs.
    pub async fn ended(&mut self) -> Option<Result<Vec<EndedCall>, JoinError>> {
        let first = self.running.join_next().await?;
        let mut ended = vec![];
        let mut next = Some(first);
        while let Some(call) = next {
            match call {
                Ok(call) => ended.push(call),
                Err(error) => return Some(Err(error)),
            }
            next = self.running.try_join_next();
        }
        Some(Ok(ended))
    }

    /// Decides what the calls mean. Returns the orders with an answer, or with a failure that is theirs.
    pub fn judge(&mut self, ended: Vec<EndedCall>) -> Vec<(Delivery, CallOutcome)> {
        let now = Instant::now();
        let mut decided = Vec::with_capacity(ended.len());
        for EndedCall { service, delivery, begun, took, outcome } in ended {
            let queue = &mut self.services[service];
            queue.running -= 1;
            let watched = &mut self.hosts[queue.host];
            let judged = match outcome {
                Ok(answer) => {
                    watched.succeeded(&delivery.id);
                    Judged::Counts(Ok(answer))
                }
                Err(failure) => watched.host.failed(&delivery.id, begun, failure, now),
            };
            watched.metrics.record(result(&judged), took);
            match judged {
                Judged::Held if self.stopped_below.is_none() => queue.waiting.push_back(delivery),
                Judged::Held => {
                    queue.size.remove(&delivery);
                    self.size.remove(&delivery);
                }
                Judged::Counts(outcome) => {
                    queue.size.remove(&delivery);
                    self.size.remove(&delivery);
                    decided.push((delivery, outcome));
                }
            }
        }
        decided
    }

    /// The outcome of an order is durable: other messages with its id are looked up again.
    pub fn settled(&mut self, delivery: &Delivery) {
        if needs_call(delivery)
            && let Some(repetitions) = self.busy.remove(&delivery.id)
        {
            self.to_look_up.extend(repetitions);
        }
    }

    /// Begins no other call, and drops the orders whose calls have not begun, unless this is their `last` delivery. The caller hands
    /// them back.
    pub fn stop(&mut self, last: u64) {
        self.stopped_below = Some(last);
        self.drop_waiting();
    }

    fn is_wanted(&self, delivery: &Delivery) -> bool {
        self.stopped_below.is_none_or(|last| delivery.raw.position.delivered >= last)
    }

    /// Drops the orders whose calls have not begun, except those that a stop leaves.
    pub fn drop_waiting(&mut self) {
        let stopped_below = self.stopped_below;
        let stays = |it: &Delivery| stopped_below.is_some_and(|last| it.raw.position.delivered >= last);
        let mut dropped: Vec<Delivery> = Vec::new();
        dropped.extend(self.to_look_up.extract_if(.., |it| !stays(it)));
        for repetitions in self.busy.values_mut() {
            dropped.extend(repetitions.extract_if(.., |it| !stays(it)));
        }
        for queue in &mut self.services {
            for delivery in std::mem::take(&mut queue.waiting) {
                if stays(&delivery) {
                    queue.waiting.push_back(delivery);
                    continue;
                }
                queue.size.remove(&delivery);
                self.to_look_up.extend(self.busy.remove(&delivery.id).unwrap_or_default());
                dropped.push(delivery);
            }
        }
        dropped.iter().for_each(|delivery| self.size.remove(delivery));
    }

    /// Takes orders out that are `blocked`, of each service the newest, until at most `limit` of them are left.
    pub fn take_blocked(&mut self, blocked: &Blocked<'_>, limit: usize) -> Vec<Delivery> {
        let mut taken = Vec::new();
        for queue in &mut self.services {
            for place in blocked.newest(queue.waiting.iter(), limit).into_iter().rev() {
                let Some(delivery) = queue.waiting.remove(place) else { continue };
                queue.size.remove(&delivery);
                self.size.remove(&delivery);
                self.to_look_up.extend(self.busy.remove(&delivery.id).unwrap_or_default());
                taken.push(delivery);
            }
        }
        taken
    }

    /// Whether calls run.
    pub fn are_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Cuts off the calls that run.
    pub fn abort(&mut self) {
        self.running = JoinSet::new();
    }

    /// Puts the state of the hosts into metrics and log. Returns why orders wait, if any do.
    pub fn report(&mut self) -> Option<String> {
        let mut causes = Vec::new();
        for (index, watched) in self.hosts.iter_mut().enumerate() {
            let held: usize =
                self.services.iter().filter(|queue| queue.host == index).map(|queue| queue.size.messages).sum();
            causes.extend(watched.report(held));
        }
        (!causes.is_empty()).then(|| causes.join("; "))
    }
}

impl Queue {
    /// The next order to call for, if a call may begin now.
    fn next(&mut self, hosts: &mut [Watched], keys: &KeyOrder, now: Instant) -> Option<(Delivery, Begun)> {
        if self.running >= self.concurrency {
            return None;
        }
        let place = self.waiting.iter().position(|delivery| keys.is_first(delivery))?;
        let begun = hosts[self.host].host.begin(now)?;
        self.running += 1;
        self.waiting.remove(place).map(|delivery| (delivery, begun))
    }
}

impl Watched {
    fn succeeded(&mut self, id: &Arc<str>) {
        if self.host.succeeded(id) {
            tracing::info!(host = %self.host.name, "the host works again");
            self.reminder.forget();
        }
    }

    fn report(&mut self, held: usize) -> Option<String> {
        let away = self.host.away();
        self.metrics.set_away(away.is_some());
        let orders = if held == 1 { "order waits" } else { "orders wait" };
        let cause = format!("{}; {held} {orders}", away?);
        if self.reminder.is_due("away") {
            tracing::error!(host = %self.host.name, %cause, "a host is away; its orders wait, and no attempt is counted");
        }
        Some(cause)
    }
}

/// Whether an order is to be called for before it is applied.
pub fn needs_call(delivery: &Delivery) -> bool {
    delivery.plan == Plan::Call && delivery.is_for_the_handler()
}

fn result(judged: &Judged) -> CallResult {
    match judged {
        Judged::Counts(Ok(_)) => CallResult::Success,
        Judged::Counts(Err(Failure::Permanent(_) | Failure::Store(_))) => CallResult::DeadLetter,
        Judged::Counts(Err(_)) => CallResult::Retry,
        Judged::Held => CallResult::Away,
    }
}
