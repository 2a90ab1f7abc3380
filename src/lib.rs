//! A long-running worker for orders in a JetStream stream: *delivered at least once, effect applied once*.
//!
//! A message is never acknowledged, terminated or forgotten unless its effect, its duplicate or its dead letter is durable in
//! the database. The tests that prove it are named below.
//!
//! # The path of one message
//!
//! ```text
//! pull  →  delivery  →  [call]  →  inbox: claim + apply, one transaction per batch  →  COMMIT (fsync)  →  acknowledge
//! ```
//!
//! # The rooms
//!
//! Each module at the root is a room. A room uses only rooms of a lower number; a test holds that (`tidy::*`).
//!
//! | room | what it owns |
//! |---|---|
//! | 0 [`model`] | the data types: delivery, id, outcome, dead letter; no I/O |
//! | 0 [`config`] | the settings and where each value came from |
//! | 1 [`store`] | the database: claim ids, commit, count attempts, keep dead letters |
//! | 2 [`telemetry`] | health, metrics, log, systemd |
//! | 3 [`jetstream`] | the server's side: bind, pull, acknowledge, and the cure for every trouble |
//! | 3 [`handler`] | what an order does: the [`Handler`] trait and the built-in handler |
//! | 4 [`worker`] | the loop, and one batch in one transaction |
//! | 5 [`ops`] | what operators touch: commands, exit codes, signals, the HTTP server |
//!
//! Begin with [`worker::worker`], the loop; everything else is called from there. [`worker::inbox`] is one batch in one
//! transaction. [`model::outcome`] turns what became of a message into its acknowledgement.
//!
//! # Invariants, and the tests that prove them (`tests/it`)
//!
//! - A message is acknowledged only after the commit: `handlers::a_locked_database_*`,
//!   `disks::nothing_is_acknowledged_*`.
//! - An order is applied once, whenever the process is killed: `crashes::a_worker_killed_at_thirty_random_moments_*`, `torture::*`.
//! - One bad order does not affect the other orders: `handlers::*`.
//! - A held delivery is never run twice, and slow work causes no redelivery: `handlers::a_handler_slower_than_ack_wait_*`.
//! - A sequence does not identify a message: `gone::a_stream_recreated_*`.
//! - A fault of the database or of the server counts no attempt: `handlers::a_locked_database_*`.
//!
//! # What is absent on purpose
//!
//! No network call happens inside a transaction. A batch runs on a task of its own. Only the deadline of a drain cuts a batch off;
//! that batch is undone, nothing of it is acknowledged, and the ids decide at the next start. Handlers never acknowledge.
//! The daemon changes nothing on the server: `setup` and `teardown` do on request, `publish` stores messages, and `audit`
//! reads through a consumer of its own that it deletes again. The server alone keeps the position; the database knows ids, not
//! offsets.
//!
//! # A daemon of your own
//!
//! Implement [`Handler`] and pass it to [`main`]:
//!
//! ```no_run
//! use async_trait::async_trait;
//! use order_processor::{Connection, Failure, Handler, Order, Tx, sqlx};
//!
//! struct Totals;
//!
//! #[async_trait]
//! impl Handler for Totals {
//!     async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
//!         let Connection::Sqlite(connection) = tx.connection();
//!         sqlx::query("CREATE TABLE IF NOT EXISTS totals (id TEXT, cents INTEGER)").execute(&mut *connection).await?;
//!         for Order { delivery, .. } in orders {
//!             let order: serde_json::Value = serde_json::from_slice(&delivery.raw.payload)
//!                 .map_err(|error| Failure::Permanent(format!("not JSON: {error}")))?;
//!             sqlx::query("INSERT INTO totals (id, cents) VALUES (?, ?)")
//!                 .bind(&delivery.id)
//!                 .bind(order["cents"].as_i64())
//!                 .execute(&mut *connection)
//!                 .await?;
//!         }
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     order_processor::main(Totals)
//! }
//! ```
#![forbid(unsafe_code)]

pub mod config;
pub mod handler;
pub mod jetstream;
pub mod model;
pub mod ops;
pub mod store;
pub mod telemetry;
pub mod worker;

pub use handler::{Answer, Failure, Handler, Order};
pub use model::delivery::Delivery;
pub use ops::cli::main;
pub use store::{Connection, Tx};

/// The version of the database driver that a [`Connection`] speaks.
pub use sqlx;
