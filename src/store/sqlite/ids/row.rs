//! The way from one id to its row for a process that asks once: without the filters, whose reading takes longer than the answer.

use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::damaged;
use super::key::{Key, PAGES};
use super::page::{Entries, checked};
use crate::model::id::Digest;
use crate::store::sqlite::LOOKING_UP;
use crate::store::sqlite::sql::failed;
use crate::store::{Error, ProcessedId};

/// Segments of which one page each is read together.
const SEGMENTS_AT_ONCE: i64 = 32;

/// The row of an id. Reads the rows that no segment has, and then one page of each segment, the newest first.
pub async fn processed_id(connection: &mut SqliteConnection, id: &str) -> Result<Option<ProcessedId>, Error> {
    const NEWEST: &str = "SELECT stream_seq, digest, processed_at FROM processed_ids \
         WHERE row > coalesce((SELECT last_row FROM id_segments ORDER BY segment DESC LIMIT 1), 0) AND id = ?";
    let newest = sqlx::query(NEWEST).bind(id).fetch_optional(&mut *connection).await;
    if let Some(row) = newest.map_err(|source| failed(LOOKING_UP, source))? {
        return Ok(Some(read(&row, id)));
    }
    let key = Key::of(id);
    let mut next: Option<(i64, i64)> = None;
    loop {
        let segments = segments_below(connection, next.map(|(number, _)| number), key).await?;
        if segments.is_empty() {
            break;
        }
        for segment in &segments {
            // An id that is missing in the index would look unknown.
            if next.is_some_and(|(number, first_row)| segment.number + 1 != number || segment.last_row >= first_row) {
                return Err(damaged("a segment is missing".to_owned()));
            }
            next = Some((segment.number, segment.first_row));
            for row in segment.candidates(key)? {
                if let Some(found) = row_with_id(connection, row, id).await? {
                    return Ok(Some(found));
                }
            }
        }
    }
    if let Some((_, first_row)) = next {
        let before = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM processed_ids WHERE row < ?)").bind(first_row);
        if before.fetch_one(connection).await.map_err(|source| failed(LOOKING_UP, source))? {
            return Err(damaged("the first segment is missing".to_owned()));
        }
    }
    Ok(None)
}

/// A segment with the one page that may have the id.
struct SegmentPage {
    number: i64,
    first_row: i64,
    last_row: i64,
    page: Option<Vec<u8>>,
}

/// Some segments below `number`, the newest first; none at the end.
async fn segments_below(
    connection: &mut SqliteConnection,
    number: Option<i64>,
    key: Key,
) -> Result<Vec<SegmentPage>, Error> {
    let rows = sqlx::query(
        "SELECT segment, first_row, last_row, entries FROM id_segments LEFT JOIN id_pages ON page = segment * ?1 + ?2 \
         WHERE segment < ?3 ORDER BY segment DESC LIMIT ?4",
    )
    .bind(PAGES)
    .bind(key.page())
    .bind(number.unwrap_or(i64::MAX))
    .bind(SEGMENTS_AT_ONCE)
    .fetch_all(connection)
    .await
    .map_err(|source| failed(LOOKING_UP, source))?;
    let segment = |row: &SqliteRow| SegmentPage {
        number: row.get("segment"),
        first_row: row.get("first_row"),
        last_row: row.get("last_row"),
        page: row.get("entries"),
    };
    Ok(rows.iter().map(segment).collect())
}

impl SegmentPage {
    /// The rows that may have the id.
    fn candidates(&self, key: Key) -> Result<Vec<i64>, Error> {
        let page = self.number * PAGES + key.page();
        let Some(stored) = &self.page else { return Err(damaged("a page is missing".to_owned())) };
        let Some(entries) = checked(page, stored) else {
            return Err(damaged(format!("page {page} is not what was written")));
        };
        Ok(Entries(entries.as_chunks().0).offsets(key).map(|offset| self.first_row + offset).collect())
    }
}

async fn row_with_id(connection: &mut SqliteConnection, row: i64, id: &str) -> Result<Option<ProcessedId>, Error> {
    let sql = "SELECT stream_seq, digest, processed_at FROM processed_ids WHERE row = ? AND id = ?";
    let found = sqlx::query(sql).bind(row).bind(id).fetch_optional(connection).await;
    let found = found.map_err(|source| failed(LOOKING_UP, source))?;
    Ok(found.map(|row| read(&row, id)))
}

fn read(row: &SqliteRow, id: &str) -> ProcessedId {
    ProcessedId {
        id: id.to_owned(),
        stream_seq: row.get::<i64, _>("stream_seq").max(0).unsigned_abs(),
        digest: Digest::stored(row.get("digest")),
        processed_at_ns: row.get("processed_at"),
    }
}
