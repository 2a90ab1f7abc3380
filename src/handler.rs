//! The extension point: what an order means to the business. The built-in handler is [`orders::Orders`].

pub mod file;
pub mod http;
pub mod orders;
pub mod params;
pub mod route;
pub mod routes;
pub mod sql;
pub mod trial;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::model::delivery::Delivery;
use crate::model::outcome::Reason;
use crate::model::plan::Plan;
use crate::model::text::panic_text;
use crate::store::{self, Connection, Tx};

/// What an order does: a call of a service, an effect in the database, or both.
///
/// What the daemon promises to a handler:
/// - [`apply`](Handler::apply) runs inside the transaction that also records the ids. Every order in the slice is of a message
///   whose id this transaction has claimed: none was applied before, and no two have the same id. They come in stream order.
///   There is no order across slices, because redeliveries come late.
/// - If `apply` returns `Ok`, its effect and the ids become durable together. Only then is anything acknowledged.
/// - If `apply` returns an error or panics, everything it did through `tx` is undone. A slice of several orders then runs again:
///   without the order that [`Failure::At`] names, or one order at a time.
/// - [`call`](Handler::call) runs before that, outside any transaction, and never for a known id. Its answer is kept in memory until
///   the order has an outcome, so a failed commit causes no second call. A restart does: calls happen at least once.
/// - The daemon cancels neither, even on SIGTERM, before `shutdown.timeout` has passed. Both may take longer than `ack_wait`,
///   because the server is told that work is in progress.
///
/// What a handler owes the daemon:
/// - The effects of `apply` go through `tx` and nowhere else. A mail sent from there is sent again whenever the transaction does
///   not commit.
/// - `apply` must not begin, commit or roll back, and must leave no savepoint open.
/// - `call` sends the message id with its request, so that the service can recognise a second call of one order.
/// - A handler never acknowledges. It returns.
///
/// Proven by `handlers::*` in `tests/it`.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Decides what is to be done for an order, from the message alone: no I/O, no clock. It is asked once for each delivery, and
    /// must not panic. The default calls if the handler makes calls.
    fn plan(&self, _delivery: &Delivery) -> Plan {
        if self.concurrency() > 0 { Plan::Call } else { Plan::Apply }
    }

    /// Orders of one key run strictly one after the other, in stream order. From the message alone, as [`plan`](Handler::plan); asked
    /// only for orders that are to be applied. The default has no key, and promises no order between messages.
    fn key(&self, _delivery: &Delivery) -> Option<Arc<str>> {
        None
    }

    /// The file that the handler was made from, and the start of its hash, for the log and `/status`.
    fn file(&self) -> Option<(&Path, &str)> {
        None
    }

    /// Runs each time after the daemon has opened the database, before the first message, outside any transaction: the place to
    /// create tables. `audit --repair` and `dead-letters replay` do not run it.
    async fn prepare(&self, _connection: Connection<'_>) -> Result<(), Failure> {
        Ok(())
    }

    /// How many calls may run at the same time. With 0 the handler makes no calls, and [`call`](Handler::call) never runs.
    fn concurrency(&self) -> usize {
        0
    }

    /// The services that [`call`](Handler::call) uses. The default is one service with [`concurrency`](Handler::concurrency) and no
    /// name.
    fn services(&self) -> Vec<Service> {
        match self.concurrency() {
            0 => Vec::new(),
            concurrency => vec![Service { host: "".into(), concurrency }],
        }
    }

    /// To which of [`services`](Handler::services) an order with [`Plan::Call`] goes.
    fn service(&self, _delivery: &Delivery) -> usize {
        0
    }

    /// Calls a service for one order. [`Delivery::attempt`] counts its attempts. It may be called again for the same order, so the
    /// service must expect that.
    async fn call(&self, _delivery: &Delivery) -> Result<Answer, Failure> {
        Ok(Answer::default())
    }

    /// Applies all of `orders` or fails.
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure>;
}

/// Asks the handler what is to be done for a delivery. Each delivery must come through here before the inbox gets it.
pub fn planned(handler: &dyn Handler, mut delivery: Delivery) -> Delivery {
    if !delivery.is_for_the_handler() {
        return delivery;
    }
    // A plan depends on the message alone: it would panic again.
    let asked = catch_unwind(AssertUnwindSafe(|| match handler.plan(&delivery) {
        plan @ (Plan::Apply | Plan::Call) => (plan, handler.key(&delivery)),
        plan @ (Plan::Ignore | Plan::DeadLetter(..)) => (plan, None),
    }));
    let (plan, key) = asked.unwrap_or_else(|panic| {
        let error = format!("the handler panicked: {}", panic_text(panic.as_ref()));
        (Plan::DeadLetter(Reason::Permanent, error), None)
    });
    match plan {
        Plan::DeadLetter(reason, error) => delivery.defect = Some((reason, error)),
        plan @ (Plan::Apply | Plan::Call | Plan::Ignore) => delivery.plan = plan,
    }
    delivery.key = key;
    delivery
}

/// A service that orders go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// The host, such as `https://shop.example:443`, for log, metrics and `/readyz`. Services with one host are away together.
    pub host: Arc<str>,
    /// How many calls may run at the same time.
    pub concurrency: usize,
}

/// One order, as a handler gets it.
#[derive(Clone, Copy, Debug)]
pub struct Order<'a> {
    pub delivery: &'a Delivery,
    /// What [`Handler::call`] returned. `None` for a handler that makes no calls, and in a dry run, which never calls.
    pub answer: Option<&'a Answer>,
}

/// What a call brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub body: Bytes,
}

/// Why a handler could not call or apply. Of a text, only the first line is logged; all of it is stored with the order.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// It may work later. The failure counts one attempt of the message; used-up attempts make the message a dead letter.
    #[error("{0}")]
    Retry(String),
    /// It will never work: the message becomes a dead letter immediately.
    #[error("{0}")]
    Permanent(String),
    /// Something that every order needs is away, such as the service that the handler calls. No message is to blame: no attempt
    /// is counted, nothing is acknowledged, and the daemon tries again by itself.
    #[error("{0}")]
    Away(String),
    /// A call brought no answer, or one that says nothing about the order, such as "too many requests". Another order may show that
    /// the service works: then it is a [`Failure::Retry`] of this order. Otherwise it is [`Failure::Away`], and the next call is made
    /// after `retry_after` if the service asked for it. Outside of [`Handler::call`] it is the same as `Away`.
    #[error("{cause}")]
    Unanswered { cause: String, retry_after: Option<Duration> },
    /// The database refused a statement. The meaning depends on the error. A full disk is not the fault of a message and counts
    /// no attempt. A violated constraint is [`Failure::Permanent`]. `?` on a statement through [`Tx`] ends up here.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// The failure is that of the order at this index of the slice. The other orders run together again without it.
    #[error("{failure}")]
    At { index: usize, failure: Box<Failure> },
}

impl Failure {
    /// The failure without the index. In a slice of one order, the index says nothing.
    pub fn into_inner(self) -> Self {
        match self {
            Self::At { failure, .. } => failure.into_inner(),
            plain
            @ (Self::Retry(_) | Self::Permanent(_) | Self::Away(_) | Self::Unanswered { .. } | Self::Store(_)) => plain,
        }
    }
}

impl Failure {
    /// The failure in a longer slice, in which this many orders stand before its own.
    pub(crate) fn moved(self, before: usize) -> Self {
        match self {
            Self::At { index, failure } => Self::At { index: index + before, failure },
            plain
            @ (Self::Retry(_) | Self::Permanent(_) | Self::Away(_) | Self::Unanswered { .. } | Self::Store(_)) => plain,
        }
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error.into())
    }
}
