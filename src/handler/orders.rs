//! The built-in handler: it records every order in the table `orders`, as it is.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, SqliteConnection};

use crate::handler::{Failure, Handler, Order};
use crate::model::text::chain;
use crate::store::sql::{chunks, values};
use crate::store::{self, Connection, ErrorClass, Tx};

/// Keeps subject, position, time and payload of each order byte for byte; it neither parses nor judges them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Orders;

#[async_trait]
impl Handler for Orders {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        match tx.connection() {
            Connection::Sqlite(connection) => record(connection, orders).await,
        }
    }
}

pub async fn record(connection: &mut SqliteConnection, orders: &[Order<'_>]) -> Result<(), Failure> {
    for chunk in chunks(orders) {
        let mut statement = sqlx::query(AssertSqlSafe(insert(chunk.len())));
        for Order { delivery, .. } in chunk {
            let position = delivery.raw.position;
            statement = statement
                .bind(delivery.id.clone())
                .bind(delivery.raw.subject.clone())
                .bind(i64::try_from(position.stream_seq).unwrap_or(i64::MAX))
                .bind(position.published_ns)
                .bind(delivery.raw.payload.as_ref());
        }
        if let Err(error) = statement.execute(&mut *connection).await {
            return Err(failure(connection, &insert(chunk.len()), error.into()).await);
        }
    }
    Ok(())
}

/// The text is up to 12 kB and is needed again only after a failure: it is built again then, not copied for each chunk.
fn insert(rows: usize) -> String {
    values("INSERT INTO orders (id, subject, stream_seq, published_at, payload) VALUES ", 5, rows, "")
}

/// SQLite reports a trigger that needs a missing table and a trigger that cannot read one payload (`malformed JSON`) with the
/// same code. The first stops every order and is the fault of none. The second is the fault of one order, and only then can the
/// statement still be prepared. EXPLAIN prepares a statement and does not run it.
async fn failure(connection: &mut SqliteConnection, sql: &str, error: store::Error) -> Failure {
    let unclear = error.class == ErrorClass::Other;
    let explained = sqlx::query(AssertSqlSafe(format!("EXPLAIN {sql}"))).persistent(false);
    if unclear && explained.execute(connection).await.is_ok() {
        return Failure::Permanent(chain(&error));
    }
    Failure::Store(error)
}
