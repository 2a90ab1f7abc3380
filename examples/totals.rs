//! A daemon with its own handler: it adds up what each customer has ordered.
//!
//! ```console
//! cargo run --example totals -- run
//! ```
//!
//! An order is JSON such as `{"customer": "anna", "cents": 1250}`. The binary has every command of `order-processor`. Use it for
//! all of them, because `audit --repair` and `dead-letters replay` run the handler as well.

use std::process::ExitCode;

use async_trait::async_trait;
use order_processor::{Connection, Failure, Handler, Order, Tx, sqlx};
use serde_json::Value;

struct Totals;

#[async_trait]
impl Handler for Totals {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        let Connection::Sqlite(connection) = tx.connection();
        // A statement of its own for a table is enough here. `sqlx::migrate!` is not possible: the daemon has its own migrations
        // in this database.
        sqlx::query("CREATE TABLE IF NOT EXISTS totals (customer TEXT PRIMARY KEY, cents INTEGER NOT NULL) STRICT")
            .execute(&mut *connection)
            .await?;
        for (index, order) in orders.iter().enumerate() {
            // Naming the order spares the rest of the batch: it runs together again without this order.
            let (customer, cents) = read(&order.delivery.raw.payload)
                .map_err(|error| Failure::At { index, failure: Failure::Permanent(error).into() })?;
            let sql = "INSERT INTO totals VALUES (?1, ?2) ON CONFLICT DO UPDATE SET cents = cents + excluded.cents";
            sqlx::query(sql).bind(customer).bind(cents).execute(&mut *connection).await?;
        }
        Ok(())
    }
}

fn read(payload: &[u8]) -> Result<(String, i64), String> {
    let order: Value = serde_json::from_slice(payload).map_err(|_| "the order is not JSON".to_owned())?;
    let customer = order["customer"].as_str().ok_or("the order has no text at /customer")?;
    let cents = order["cents"].as_i64().ok_or("the order has no whole number at /cents")?;
    Ok((customer.to_owned(), cents))
}

fn main() -> ExitCode {
    order_processor::main(Totals)
}
