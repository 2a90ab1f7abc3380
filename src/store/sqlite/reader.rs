//! Reads from the database of a daemon that may be running, through a connection that cannot write.

use std::collections::HashMap;
use std::path::Path;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::ids::{Fresh, Ids};
use super::open::{open_to_read, unreadable};
use super::sql::{failed, to_i64};
use super::tx::known;
use super::{LOOKING_UP, begin};
use crate::model::delivery::Delivery;
use crate::store::{Claim, Counts, Error, ErrorClass, OpenError};

/// The connection, and what it knows of the index of the ids.
#[derive(Debug)]
pub struct Reader {
    pub(super) connection: SqliteConnection,
    ids: Ids,
}

impl Reader {
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        let connection = open_to_read(path).await.map_err(unreadable)?;
        Ok(Self { connection, ids: Ids::reading() })
    }

    pub async fn known(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Claim>, Error> {
        let Self { connection, ids } = self;
        let data_version = begin(connection, "BEGIN").await?;
        let known = match ids.refresh(connection, data_version).await {
            Ok(Fresh::Yes) => known(connection, ids, deliveries).await.map(|(claims, _)| claims),
            Ok(Fresh::NotYet) => Err(not_indexed()),
            Err(error) => Err(error),
        };
        // The transaction has only read: there is nothing to undo.
        let ended = sqlx::query("ROLLBACK").execute(connection).await;
        let known = known?;
        ended.map_err(|source| failed(LOOKING_UP, source))?;
        Ok(known)
    }

    pub async fn other_ids(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Option<String>>, Error> {
        const DOING: &str = "looking for other ids";
        let Some(oldest) = deliveries.iter().map(|delivery| delivery.raw.position.published_ns).min() else {
            return Ok(Vec::new());
        };
        let seqs: Vec<i64> = deliveries.iter().map(|delivery| to_i64(delivery.raw.position.stream_seq)).collect();
        let rows = sqlx::query(
            "SELECT id, stream_seq, digest, processed_at FROM processed_ids \
             WHERE processed_at >= ?1 AND stream_seq IN (SELECT value FROM json_each(?2)) ORDER BY row",
        )
        .bind(oldest)
        .bind(serde_json::json!(seqs).to_string())
        .fetch_all(&mut self.connection)
        .await
        .map_err(|source| failed(DOING, source))?;
        let mut by_seq: HashMap<i64, Vec<&SqliteRow>> = HashMap::new();
        for row in &rows {
            by_seq.entry(row.get("stream_seq")).or_default().push(row);
        }
        let other_id = |(delivery, seq): (&&Delivery, &i64)| {
            let of_it = |row: &&&SqliteRow| {
                row.get::<&[u8], _>("digest") == delivery.digest.0
                    && row.get::<i64, _>("processed_at") >= delivery.raw.position.published_ns
                    && row.get::<&str, _>("id") != &*delivery.id
            };
            by_seq.get(seq)?.iter().find(of_it).map(|row| row.get("id"))
        };
        Ok(deliveries.iter().zip(&seqs).map(other_id).collect())
    }

    pub async fn oldest_processed_at(&mut self) -> Result<Option<i64>, Error> {
        sqlx::query_scalar("SELECT processed_at FROM processed_ids ORDER BY row LIMIT 1")
            .fetch_optional(&mut self.connection)
            .await
            .map_err(|source| failed("looking for the oldest id", source))
    }

    pub async fn counts(&mut self) -> Result<Counts, Error> {
        counts(&mut self.connection).await.map_err(|source| failed("counting rows", source))
    }
}

pub(super) async fn counts(connection: &mut SqliteConnection) -> Result<Counts, sqlx::Error> {
    // Two subqueries, since SQLite looks min and max up in the B-tree only when each stands alone.
    let (ids, dead, outbox, oldest): (i64, i64, i64, Option<i64>) = sqlx::query_as(
        "SELECT coalesce((SELECT max(row) FROM processed_ids) - (SELECT min(row) FROM processed_ids) + 1, 0), \
         (SELECT count(*) FROM dead_letters), (SELECT count(*) FROM outbox), \
         (SELECT created_at FROM outbox ORDER BY row LIMIT 1)",
    )
    .fetch_one(connection)
    .await?;
    Ok(Counts {
        processed_ids: ids.unsigned_abs(),
        dead_letters: dead.unsigned_abs(),
        outbox_rows: outbox.unsigned_abs(),
        outbox_oldest_ns: oldest,
    })
}

fn not_indexed() -> Error {
    let text = "ids that were put into the database by hand are being indexed; try again when the daemon is ready";
    Error::new(LOOKING_UP, ErrorClass::Busy, text)
}
