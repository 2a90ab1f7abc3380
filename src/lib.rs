//! A long-running worker for orders in a JetStream stream: *delivered at least once, effect applied once*.
//!
//! A message is never acknowledged, terminated or forgotten unless its effect, its duplicate or its dead letter is durable in
//! the database. The tests that prove it are named below.
//!
//! # The path of one message
//!
//! ```text
//! pull  →  delivery  →  inbox: claim + apply, one transaction per batch  →  COMMIT (fsync)  →  acknowledge
//! ```
//!
//! # Reading order
//!
//! 1. [`worker`]: the loop. Everything else is called from there.
//! 2. [`inbox`]: one batch in one transaction, and what becomes of each message; [`outcome`] turns that into an acknowledgement,
//!    [`retry`] decides over failures.
//! 3. [`handler`]: what an order means to the business, and both sides' contract; [`orders`] is the built-in one.
//! 4. [`delivery`]: message id and digest. [`store`]: the tables.
//! 5. [`consumer`]: the server's side: bind, pull, acknowledge, and the cure for every trouble. [`survey`]: what it has given up.
//!
//! Around it: [`cli`] and [`commands`], [`pause`], [`config`], [`health`], [`metrics`], [`telemetry`], [`http`], [`logging`], [`shutdown`],
//! [`systemd`], [`errors`].
//!
//! # Invariants, and where they are proven (`tests/it`)
//!
//! - Acknowledged only after the commit: `handlers::nothing_is_acknowledged_*`, `stopping::a_commit_that_waits_*`.
//! - Applied once, whenever the process is killed: `kills::killed_at_thirty_random_moments_*`, `torture::*`.
//! - One bad order harms no neighbour: `handlers::*`.
//! - What is held is never run twice and never redelivered for slowness: `handlers::a_handler_slower_than_ack_wait_*`.
//! - A sequence is no identity: `kills::stream_recreated_*`.
//! - Trouble of the database or the server spends no attempt: `handlers::nothing_is_acknowledged_*`.
//!
//! # What is absent on purpose
//!
//! No network call happens inside a transaction. No future that commits is ever dropped half-way: batches run on a task of their
//! own. Handlers never acknowledge. Nothing but `setup` and `teardown` changes anything on the server. Position is kept by the
//! server alone; the database knows ids, not offsets.
//!
//! # A daemon of your own
//!
//! Implement [`handler::Handler`] and pass it to [`cli::main`]:
//!
//! ```no_run
//! use async_trait::async_trait;
//! use order_processor::{cli, delivery::Delivery, handler::{Failure, Handler}, sqlx, store::Tx};
//!
//! struct Totals;
//!
//! #[async_trait]
//! impl Handler for Totals {
//!     async fn apply(&self, tx: &mut Tx<'_>, deliveries: &[&Delivery]) -> Result<(), Failure> {
//!         sqlx::query("CREATE TABLE IF NOT EXISTS totals (id TEXT, cents INTEGER)").execute(tx.sqlite()).await?;
//!         for delivery in deliveries {
//!             let order: serde_json::Value = serde_json::from_slice(&delivery.raw.payload)
//!                 .map_err(|error| Failure::Permanent(format!("not JSON: {error}")))?;
//!             sqlx::query("INSERT INTO totals (id, cents) VALUES (?, ?)")
//!                 .bind(&delivery.id)
//!                 .bind(order["cents"].as_i64())
//!                 .execute(tx.sqlite())
//!                 .await?;
//!         }
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     cli::main(Totals)
//! }
//! ```
#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod config;
pub mod consumer;
pub mod handler;
pub mod health;
pub mod http;
pub mod inbox;
pub mod logging;
pub mod metrics;
pub mod model;
pub mod orders;
pub mod pause;
pub mod retry;
pub mod shutdown;
pub mod store;
pub mod survey;
pub mod systemd;
pub mod telemetry;
pub mod worker;

/// The version that [`store::Tx::sqlite`] speaks.
pub use sqlx;
