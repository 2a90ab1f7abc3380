//! Where the daemon's own audit stands, and which sequences the tables account for.

use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::Store;
use super::reader::Reader;
use super::sql::{failed, to_i64};
use crate::model::ranges::Range;
use crate::store::{Anchor, AuditMark, Error, ProcessedRow};

impl Store {
    pub async fn set_audit_mark(&mut self, mark: &AuditMark) -> Result<(), Error> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO audit_mark (only_row, through, anchor_seq, anchor_ns, filters, other_filter_through, rows_since, audited_at) \
             VALUES (1, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (only_row) DO UPDATE SET through = excluded.through, \
             anchor_seq = excluded.anchor_seq, anchor_ns = excluded.anchor_ns, filters = excluded.filters, \
             other_filter_through = excluded.other_filter_through, rows_since = excluded.rows_since, \
             audited_at = excluded.audited_at",
        )
        .bind(to_i64(mark.through))
        .bind(mark.anchor.map(|anchor| to_i64(anchor.stream_seq)))
        .bind(mark.anchor.map(|anchor| anchor.published_ns))
        .bind(serde_json::json!(mark.filters).to_string())
        .bind(to_i64(mark.other_filter_through))
        .bind(mark.rows_since_ns)
        .bind(mark.audited_at_ns)
        .execute(&mut *tx.connection)
        .await
        .map_err(|source| tx.fail("recording the audit", source))?;
        tx.commit().await
    }
}

impl Reader {
    pub async fn audit_mark(&mut self) -> Result<Option<AuditMark>, Error> {
        let row = sqlx::query("SELECT * FROM audit_mark").fetch_optional(&mut self.connection).await;
        let row = row.map_err(|source| failed("reading where the audit stands", source))?;
        Ok(row.map(|row| AuditMark {
            through: seq(&row, "through"),
            anchor: row.get::<Option<i64>, _>("anchor_seq").zip(row.get::<Option<i64>, _>("anchor_ns")).map(
                |(stream_seq, published_ns)| Anchor { stream_seq: stream_seq.max(0).unsigned_abs(), published_ns },
            ),
            // A text that is not ours is another filter than any.
            filters: serde_json::from_str(row.get("filters")).unwrap_or_default(),
            other_filter_through: seq(&row, "other_filter_through"),
            rows_since_ns: row.get("rows_since"),
            audited_at_ns: row.get("audited_at"),
        }))
    }

    pub async fn newest_rows(&mut self, below_row: i64, limit: u32) -> Result<Vec<ProcessedRow>, Error> {
        let rows = sqlx::query(
            "SELECT row, stream_seq, processed_at FROM processed_ids WHERE row < ? ORDER BY row DESC LIMIT ?",
        )
        .bind(below_row)
        .bind(limit)
        .fetch_all(&mut self.connection)
        .await
        .map_err(|source| failed("reading which sequences were processed", source))?;
        let row = |row: &SqliteRow| ProcessedRow {
            row: row.get("row"),
            stream_seq: seq(row, "stream_seq"),
            processed_at_ns: row.get("processed_at"),
        };
        Ok(rows.iter().map(row).collect())
    }

    pub async fn letter_seqs(&mut self, range: Range, since_ns: i64, limit: u32) -> Result<Vec<u64>, Error> {
        let rows = sqlx::query(
            "SELECT stream_seq FROM dead_letters WHERE stream_seq BETWEEN ?1 AND ?2 AND dead_at >= ?3 \
             UNION ALL SELECT stream_seq FROM closed_letters WHERE stream_seq BETWEEN ?1 AND ?2 AND dead_at >= ?3 LIMIT ?4",
        )
        .bind(to_i64(range.from))
        .bind(to_i64(range.to))
        .bind(since_ns)
        .bind(limit)
        .fetch_all(&mut self.connection)
        .await
        .map_err(|source| failed("reading which sequences are dead letters", source))?;
        Ok(rows.iter().map(|row| seq(row, "stream_seq")).collect())
    }
}

fn seq(row: &SqliteRow, column: &str) -> u64 {
    row.get::<i64, _>(column).max(0).unsigned_abs()
}
