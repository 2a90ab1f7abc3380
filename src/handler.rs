//! The extension point: what an order means to the business. The built-in one is [`crate::handler::orders::Orders`].

pub mod orders;

use async_trait::async_trait;

use crate::model::delivery::Delivery;
use crate::store::{self, Tx};

/// Applies orders to the database, inside the transaction that also records their ids.
///
/// What the daemon promises to a handler:
/// - Every delivery in the slice is of a message whose id this transaction has just claimed: none was applied before, and no
///   two have the same id. They come in stream order; across calls there is no order, because redeliveries come late.
/// - If `apply` returns `Ok`, its effect and the ids become durable together, and only then is anything acknowledged.
/// - If it returns an error or panics, everything it did through `tx` is undone. A slice of several is then run again one
///   message at a time, so a handler need not find out which order was to blame.
/// - It is never cancelled by the daemon, also not on SIGTERM, unless `shutdown.timeout` runs out: then nothing was committed.
///   It may take longer than `ack_wait`: the server is told that work is in progress.
///
/// What a handler owes the daemon:
/// - Its effects go through `tx` and nowhere else. A mail sent from here is sent again whenever the transaction does not
///   commit; write an outbox row instead.
/// - It must not begin, commit or roll back, and must leave no savepoint open.
/// - It never acknowledges. It returns.
///
/// Proven by `handlers::*` in `tests/it`.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Applies all of `deliveries` or fails.
    async fn apply(&self, tx: &mut Tx<'_>, deliveries: &[&Delivery]) -> Result<(), Failure>;
}

/// Why a handler could not apply.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// It may work later. Costs the message one attempt; used-up attempts make it a dead letter.
    #[error("{0}")]
    Retry(String),
    /// It will never work: a dead letter at once.
    #[error("{0}")]
    Permanent(String),
    /// The database refused a statement. What that means depends on the error: a full disk is nobody's fault and costs
    /// nothing, a violated constraint is [`Failure::Permanent`]. `?` on a call through [`Tx`] ends up here.
    #[error(transparent)]
    Store(#[from] store::Error),
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(store::Error::new("running a statement of the handler", error))
    }
}
