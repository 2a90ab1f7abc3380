//! The retries that the last process has left.

use sqlx::SqliteConnection;

use super::READING_ATTEMPTS;
use super::sql::failed;
use crate::store::{Error, Retry};

pub async fn read_retries(connection: &mut SqliteConnection) -> Result<Vec<Retry>, Error> {
    let rows: Vec<(i64, String, i64, i64)> = sqlx::query_as(
        "SELECT stream_seq, order_key, due_at, updated_at FROM attempts \
         WHERE failed > 0 AND stream_seq IS NOT NULL AND order_key IS NOT NULL AND due_at IS NOT NULL",
    )
    .fetch_all(connection)
    .await
    .map_err(|source| failed(READING_ATTEMPTS, source))?;
    let retry = |(stream_seq, key, due_ns, failed_at_ns): (i64, String, i64, i64)| Retry {
        stream_seq: stream_seq.max(0).unsigned_abs(),
        key: key.into(),
        due_ns,
        failed_at_ns,
    };
    Ok(rows.into_iter().map(retry).collect())
}
