//! What the tables have about one order. Each question is one read transaction, so that its parts fit together, and a short one.

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::ids::processed_id;
use super::letters::{ENVELOPE, columns_and_table, envelope};
use super::reader::Reader;
use super::sql::{failed, to_i64};
use super::{LOOKING_UP, begin};
use crate::model::id::Digest;
use crate::model::letter::{Envelope, Pile};
use crate::store::{Attempts, AttemptsRecord, Error, IdRecord, OutboxHead, ProcessedId, SeqRecord};

/// Letters that are returned, open ones and closed ones.
const LETTERS_MAX: i64 = 50;
/// Rows of the outbox that are compared, and that are returned.
const OUTBOX_COMPARED: i64 = 10_000;
const OUTBOX_MAX: usize = 20;
/// Rows on each side of the expected place that are compared with a sequence. A letter has its payload in its row.
const IDS_AROUND: i64 = 10_000;
const LETTERS_AROUND: i64 = 1_000;

impl Reader {
    pub async fn find(&mut self, id: &str) -> Result<IdRecord, Error> {
        begin(&mut self.connection, "BEGIN").await?;
        let found = by_id(&mut self.connection, id).await;
        self.end_reading(found).await
    }

    pub async fn find_seq(&mut self, stream_seq: u64) -> Result<SeqRecord, Error> {
        begin(&mut self.connection, "BEGIN").await?;
        let found = by_seq(&mut self.connection, to_i64(stream_seq)).await.map_err(|source| failed(LOOKING_UP, source));
        self.end_reading(found).await
    }

    /// The transaction has only read: there is nothing to undo.
    async fn end_reading<T>(&mut self, read: Result<T, Error>) -> Result<T, Error> {
        let ended = sqlx::query("ROLLBACK").execute(&mut self.connection).await;
        let read = read?;
        ended.map_err(|source| failed(LOOKING_UP, source))?;
        Ok(read)
    }
}

async fn by_id(connection: &mut SqliteConnection, id: &str) -> Result<IdRecord, Error> {
    let processed = processed_id(connection, id).await?;
    let failed = |source| failed(LOOKING_UP, source);
    let attempts = attempts(connection, id).await.map_err(failed)?;
    let mut letters = letters_of(connection, Pile::Closed, id).await.map_err(failed)?;
    letters.extend(letters_of(connection, Pile::Open, id).await.map_err(failed)?);
    letters.sort_by_key(|letter| letter.dead_at_ns);
    let (outbox, outbox_was_cut) = outbox(connection, id).await.map_err(failed)?;
    Ok(IdRecord { processed, attempts, letters, outbox, outbox_was_cut })
}

async fn attempts(connection: &mut SqliteConnection, id: &str) -> Result<Option<AttemptsRecord>, sqlx::Error> {
    let sql = "SELECT failed, started, last_error, updated_at FROM attempts WHERE id = ?";
    let row = sqlx::query(sql).bind(id).fetch_optional(connection).await?;
    Ok(row.map(|row| {
        let count = |name: &str| u32::try_from(row.get::<i64, _>(name).max(0)).unwrap_or(u32::MAX);
        AttemptsRecord {
            attempts: Attempts { failed: count("failed"), started: count("started") },
            last_error: row.get("last_error"),
            updated_at_ns: row.get("updated_at"),
        }
    }))
}

/// By the index on `id`, which a condition with OR would not use.
async fn letters_of(connection: &mut SqliteConnection, of: Pile, id: &str) -> Result<Vec<Envelope>, sqlx::Error> {
    let (closing, table) = columns_and_table(of);
    let sql = format!("SELECT {ENVELOPE}, {closing} FROM {table} WHERE id = ? ORDER BY rowid DESC LIMIT ?");
    let rows = sqlx::query(AssertSqlSafe(sql)).bind(id).bind(LETTERS_MAX).fetch_all(connection).await?;
    Ok(rows.iter().map(envelope).collect())
}

/// Rows that may belong to the order, the oldest first, and whether there are more rows than were compared. Statements build the id of
/// a row from the id of the order.
async fn outbox(connection: &mut SqliteConnection, id: &str) -> Result<(Vec<OutboxHead>, bool), sqlx::Error> {
    let rows = sqlx::query(
        "SELECT row, id, subject, created_at FROM \
         (SELECT row, id, subject, created_at FROM outbox ORDER BY row LIMIT ?1) WHERE instr(id, ?2) > 0",
    )
    .bind(OUTBOX_COMPARED)
    .bind(id)
    .fetch_all(&mut *connection)
    .await?;
    let more = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM outbox ORDER BY row LIMIT 1 OFFSET ?)");
    let more = more.bind(OUTBOX_COMPARED).fetch_one(connection).await?;
    let head = |row: &SqliteRow| OutboxHead {
        row: row.get("row"),
        id: row.get("id"),
        subject: row.get("subject"),
        created_at_ns: row.get("created_at"),
    };
    let heads = rows.iter().map(head).filter(|head| contains(&head.id, id));
    Ok((heads.take(OUTBOX_MAX).collect(), more))
}

/// Whether `text` contains `part` as a whole: `accepted-7` contains `7`, and `accepted-17` does not.
fn contains(text: &str, part: &str) -> bool {
    text.match_indices(part).any(|(at, _)| {
        let (before, after) = (text[..at].chars().next_back(), text[at + part.len()..].chars().next());
        let goes_on = |outside: Option<char>, inside: Option<char>| {
            outside.is_some_and(char::is_alphanumeric) && inside.is_some_and(char::is_alphanumeric)
        };
        !goes_on(before, part.chars().next()) && !goes_on(after, part.chars().next_back())
    })
}

async fn by_seq(connection: &mut SqliteConnection, seq: i64) -> Result<SeqRecord, sqlx::Error> {
    let mut record = SeqRecord::default();
    let (from, to) = around(connection, "processed_ids", seq, IDS_AROUND, &mut record.was_cut).await?;
    let sql =
        "SELECT id, digest, processed_at FROM processed_ids WHERE row BETWEEN ? AND ? AND stream_seq = ? ORDER BY row";
    let rows = sqlx::query(sql).bind(from).bind(to).bind(seq).fetch_all(&mut *connection).await?;
    let processed = |row: &SqliteRow| ProcessedId {
        id: row.get("id"),
        stream_seq: seq.unsigned_abs(),
        digest: Digest::stored(row.get("digest")),
        processed_at_ns: row.get("processed_at"),
    };
    record.processed = rows.iter().map(processed).collect();
    for of in [Pile::Closed, Pile::Open] {
        let (closing, table) = columns_and_table(of);
        let (from, to) = around(connection, table, seq, LETTERS_AROUND, &mut record.was_cut).await?;
        let sql = format!(
            "SELECT {ENVELOPE}, {closing} FROM {table} WHERE rowid BETWEEN ? AND ? AND stream_seq = ? ORDER BY rowid LIMIT ?"
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).bind(from).bind(to).bind(seq).bind(LETTERS_MAX);
        record.letters.extend(rows.fetch_all(&mut *connection).await?.iter().map(envelope));
    }
    record.letters.sort_by_key(|letter| letter.dead_at_ns);
    Ok(record)
}

/// The rows of a table in which `seq` is expected. `was_cut` becomes true if the table has others.
async fn around(
    connection: &mut SqliteConnection,
    table: &str,
    seq: i64,
    rows: i64,
    was_cut: &mut bool,
) -> Result<(i64, i64), sqlx::Error> {
    // Two subqueries, since SQLite looks min and max up in the B-tree only when each stands alone.
    let ends =
        format!("SELECT coalesce((SELECT min(rowid) FROM {table}), 1), coalesce((SELECT max(rowid) FROM {table}), 0)");
    let (first, last): (i64, i64) = sqlx::query_as(AssertSqlSafe(ends)).fetch_one(&mut *connection).await?;
    if last - first <= 2 * rows {
        return Ok((first, last));
    }
    *was_cut = true;
    let row_at = format!("SELECT stream_seq FROM {table} WHERE rowid >= ? ORDER BY rowid LIMIT 1");
    let mut seq_at = async |row: i64| {
        sqlx::query_scalar::<_, i64>(AssertSqlSafe(row_at.as_str())).bind(row).fetch_one(&mut *connection).await
    };
    // From the end, in steps that double. An older row with a higher sequence belongs to a former stream, which has used the same
    // sequences.
    let (mut low, mut high, mut step) = (last, last, rows);
    let (mut low_seq, mut high_seq) = (seq_at(last).await?, i64::MAX);
    while low > first && low_seq > seq && low_seq <= high_seq {
        (high, high_seq) = (low, low_seq);
        low = (low - step).max(first);
        low_seq = seq_at(low).await?;
        step = step.saturating_mul(2);
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let is_after = (seq + 1..=high_seq).contains(&seq_at(middle).await?);
        if is_after { high = middle } else { low = middle }
    }
    Ok(((low - rows).max(first), (high + rows).min(last)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_the_outbox_belongs_to_an_order_whose_whole_id_is_in_its_id() {
        for (text, part) in [("accepted-7", "7"), ("7", "7"), ("7/reply", "7"), ("17-7", "7"), ("a-o-1-b", "o-1")] {
            assert!(contains(text, part), "{text} {part}");
        }
        for (text, part) in [("accepted-17", "7"), ("71", "7"), ("o-11", "o-1"), ("", "7"), ("éa", "a")] {
            assert!(!contains(text, part), "{text} {part}");
        }
        assert!(contains("a--", "-"), "a part that is not a word has no end to miss");
    }
}
