//! The outbox: what a transaction has put into it, and what the relay takes out.

use sqlx::Row;
use sqlx::sqlite::{SqliteArguments, SqliteRow};

use super::sql::{bind, to_i64};
use super::{Store, Tx};
use crate::model::outbox::{OutboxMessage, OutboxRow, OutboxTarget, headers};
use crate::store::sql::{chunks, values};
use crate::store::{Error, OutboxStep, OutboxTaken};

const READING: &str = "reading the outbox";
const COLUMNS: &str = "row, id, subject, headers, octet_length(payload), sought_from";

impl Tx<'_> {
    pub async fn outbox_written(&mut self) -> Result<Vec<OutboxRow>, Error> {
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, self.outbox_row)?;
        let sql = format!("SELECT {COLUMNS} FROM outbox WHERE row > ? ORDER BY row");
        let rows: Vec<OutboxRow> = self.fetch(READING, sql, arguments).await?.iter().map(head).collect();
        if let Some(last) = rows.last() {
            self.outbox_row = last.row;
        }
        Ok(rows)
    }

    pub async fn seek_outbox_rows(&mut self, rows: &[OutboxRow], from_ns: i64) -> Result<(), Error> {
        for row in rows {
            let mut arguments = SqliteArguments::default();
            bind(&mut arguments, from_ns)?;
            bind(&mut arguments, row.row)?;
            let sql = "UPDATE outbox SET sought_from = ? WHERE row = ?".to_owned();
            self.execute("writing the outbox", sql, arguments).await?;
        }
        Ok(())
    }

    /// Reads the last row that any connection has written.
    pub(super) async fn read_outbox_row(&mut self) -> Result<(), Error> {
        let sql = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'outbox'), 0)".to_owned();
        let rows = self.fetch(READING, sql, SqliteArguments::default()).await?;
        self.outbox_row = rows.first().map_or(0, |row| row.get(0));
        *self.outbox_committed = self.outbox_row;
        Ok(())
    }
}

impl Store {
    pub fn last_outbox_row(&self) -> i64 {
        self.outbox_row
    }

    pub fn outbox_rows_at_open(&self) -> u64 {
        self.outbox_rows
    }

    pub async fn take_outbox(&mut self, step: &OutboxStep) -> Result<OutboxTaken, Error> {
        let mut tx = self.begin().await?;
        for chunk in chunks(&step.done) {
            let mut arguments = SqliteArguments::default();
            chunk.iter().try_for_each(|row| bind(&mut arguments, *row))?;
            let sql = values("DELETE FROM outbox WHERE row IN (VALUES ", 1, chunk.len(), ")");
            tx.execute("deleting published rows of the outbox", sql, arguments).await?;
        }
        for target in &step.targets {
            tx.set_target(target).await?;
        }
        let taken = OutboxTaken {
            messages: tx.outbox_messages(step.max_messages, step.max_bytes).await?,
            rows: if step.wants_all { tx.outbox_rows().await? } else { Vec::new() },
            targets: tx.targets().await?,
        };
        tx.commit().await?;
        Ok(taken)
    }
}

impl Tx<'_> {
    async fn set_target(&mut self, target: &OutboxTarget) -> Result<(), Error> {
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, target.stream.as_str())?;
        bind(&mut arguments, target.created_ns)?;
        bind(&mut arguments, to_i64(target.after_seq))?;
        let sql = "INSERT INTO outbox_targets (stream, created_at, after_seq) VALUES (?, ?, ?) ON CONFLICT (stream) \
             DO UPDATE SET created_at = excluded.created_at, after_seq = excluded.after_seq";
        self.execute("recording where published rows are", sql.to_owned(), arguments).await.map(drop)
    }

    async fn targets(&mut self) -> Result<Vec<OutboxTarget>, Error> {
        let sql = "SELECT stream, created_at, after_seq FROM outbox_targets".to_owned();
        let rows = self.fetch(READING, sql, SqliteArguments::default()).await?;
        let target = |row: &SqliteRow| OutboxTarget {
            stream: row.get(0),
            created_ns: row.get(1),
            after_seq: row.get::<i64, _>(2).max(0).unsigned_abs(),
        };
        Ok(rows.iter().map(target).collect())
    }

    async fn outbox_rows(&mut self) -> Result<Vec<OutboxRow>, Error> {
        let sql = format!("SELECT {COLUMNS} FROM outbox ORDER BY row");
        Ok(self.fetch(READING, sql, SqliteArguments::default()).await?.iter().map(head).collect())
    }

    /// The oldest rows that fit, at least one if there is any. Rows whose headers an operator has spoilt come without headers that
    /// can be read, and are left to the caller.
    async fn outbox_messages(&mut self, max_messages: u32, max_bytes: usize) -> Result<Vec<OutboxMessage>, Error> {
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, max_messages)?;
        bind(&mut arguments, i64::try_from(max_bytes).unwrap_or(i64::MAX))?;
        let sql = "WITH oldest AS (SELECT row, sum(octet_length(payload)) OVER (ORDER BY row) AS bytes, \
             row_number() OVER (ORDER BY row) AS number FROM (SELECT row, payload FROM outbox ORDER BY row LIMIT ?1)) \
             SELECT row, id, subject, headers, CAST(payload AS BLOB) FROM outbox \
             WHERE row IN (SELECT row FROM oldest WHERE number = 1 OR bytes <= ?2) ORDER BY row"
            .to_owned();
        let rows = self.fetch(READING, sql, arguments).await?;
        let message = |row: &SqliteRow| OutboxMessage {
            row: row.get(0),
            id: row.get(1),
            subject: row.get(2),
            headers: headers(row.get(3)).unwrap_or_default(),
            payload: row.get::<Vec<u8>, _>(4).into(),
        };
        Ok(rows.iter().map(message).collect())
    }
}

fn head(row: &SqliteRow) -> OutboxRow {
    OutboxRow {
        row: row.get(0),
        id: row.get(1),
        subject: row.get(2),
        headers: row.get(3),
        payload_bytes: usize::try_from(row.get::<i64, _>(4)).unwrap_or(usize::MAX),
        sought_from: row.get(5),
    }
}
