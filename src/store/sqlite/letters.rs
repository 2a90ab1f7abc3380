//! SQL of dead letters, for the commands of operators. Each statement or transaction is short: a daemon may be running.

use std::collections::BTreeMap;

use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Row};

use super::reader::Reader;
use super::sql::{bind, failed, to_i64};
use super::tx::Tx;
use crate::model::delivery::headers_json;
use crate::model::id::Digest;
use crate::model::label::Label;
use crate::model::letter::{Closed, Closing, Envelope, Letter, Pile, Which};
use crate::store::{Direction, Error, ErrorClass, Rows};

pub(super) const ENVELOPE: &str =
    "rowid, id, digest, subject, stream_seq, delivered, reason, error, length(payload) AS bytes, published_at, dead_at";
const DOING: &str = "reading dead letters";

impl Reader {
    pub async fn page(
        &mut self,
        of: Pile,
        which: &Which,
        rows: Rows,
        direction: Direction,
        limit: u32,
    ) -> Result<(Vec<(i64, Envelope)>, Option<Rows>), Error> {
        let ids = if which.ids.is_empty() { None } else { Some(serde_json::json!(which.ids).to_string()) };
        let order = match direction {
            Direction::OldestFirst => "ASC",
            Direction::NewestFirst => "DESC",
        };
        let (closing, table) = columns_and_table(of);
        let sql = format!(
            "SELECT {ENVELOPE}, {closing} FROM {table} WHERE rowid > ?1 AND rowid <= ?2 \
             AND (?3 IS NULL OR reason = ?3) AND (?4 IS NULL OR dead_at >= ?4) AND (?5 IS NULL OR dead_at < ?5) \
             AND (?6 IS NULL OR id IN (SELECT value FROM json_each(?6))) ORDER BY rowid {order} LIMIT ?7",
        );
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, rows.after)?;
        bind(&mut arguments, rows.through)?;
        bind(&mut arguments, which.reason.map(Label::name))?;
        bind(&mut arguments, which.since_ns)?;
        bind(&mut arguments, which.until_ns)?;
        bind(&mut arguments, ids)?;
        bind(&mut arguments, limit)?;
        let read = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(&mut self.connection).await;
        let read = read.map_err(|source| failed(DOING, source))?;
        let rest = read.last().filter(|_| read.len() as u64 == u64::from(limit)).map(|last| match direction {
            Direction::OldestFirst => Rows { after: last.get("rowid"), ..rows },
            Direction::NewestFirst => Rows { through: last.get::<i64, _>("rowid") - 1, ..rows },
        });
        let letters = read.iter().map(|row| (row.get("rowid"), envelope(row)));
        let fits = |subject: &str| which.subject.as_ref().is_none_or(|pattern| pattern.matches(subject));
        Ok((letters.filter(|(_, envelope)| fits(&envelope.subject)).collect(), rest))
    }

    pub async fn letter(&mut self, of: Pile, rowid: i64) -> Result<Option<Letter>, Error> {
        let (closing, table) = columns_and_table(of);
        let sql = format!("SELECT {ENVELOPE}, {closing}, headers, payload FROM {table} WHERE rowid = ?");
        let row = sqlx::query(AssertSqlSafe(sql)).bind(rowid).fetch_optional(&mut self.connection).await;
        row.map_err(|source| failed(DOING, source))?.as_ref().map(letter).transpose()
    }

    pub async fn last_row(&mut self) -> Result<i64, Error> {
        let last = sqlx::query_scalar("SELECT coalesce(max(rowid), 0) FROM dead_letters");
        last.fetch_one(&mut self.connection).await.map_err(|source| failed(DOING, source))
    }
}

impl Tx<'_> {
    pub async fn take_letter(&mut self, id: &str, digest: Digest) -> Result<Option<Letter>, Error> {
        const DOING: &str = "taking a dead letter out";
        let (closing, table) = columns_and_table(Pile::Open);
        let sql = format!(
            "DELETE FROM {table} WHERE id = ? AND digest = ? RETURNING {ENVELOPE}, {closing}, headers, payload"
        );
        let rows = self.fetch(DOING, sql, key(id, digest)?).await?;
        rows.first().map(letter).transpose()
    }

    pub async fn record_closed(&mut self, letter: &Letter, closed: &Closed) -> Result<(), Error> {
        let Letter { envelope, headers, payload } = letter;
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, envelope.id.as_str())?;
        bind(&mut arguments, envelope.subject.as_str())?;
        bind(&mut arguments, to_i64(envelope.stream_seq))?;
        bind(&mut arguments, to_i64(envelope.delivered))?;
        bind(&mut arguments, envelope.reason.as_str())?;
        bind(&mut arguments, envelope.error.as_str())?;
        bind(&mut arguments, headers_json(headers))?;
        bind(&mut arguments, payload.as_ref())?;
        bind(&mut arguments, envelope.dead_at_ns)?;
        bind(&mut arguments, envelope.digest.0.as_slice())?;
        bind(&mut arguments, envelope.published_ns)?;
        bind(&mut arguments, closed.closing.name())?;
        bind(&mut arguments, closed.by.as_str())?;
        bind(&mut arguments, closed.at_ns)?;
        bind(&mut arguments, closed.applied_id.as_deref())?;
        let sql = "INSERT INTO closed_letters (id, subject, stream_seq, delivered, reason, error, headers, payload, \
             dead_at, digest, published_at, closed_as, closed_by, closed_at, applied_id) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
        self.execute("recording a closed letter", sql.to_owned(), arguments).await.map(drop)
    }

    pub async fn set_letter_error(&mut self, id: &str, digest: Digest, error: &str) -> Result<(), Error> {
        let mut arguments = key(id, digest)?;
        bind(&mut arguments, error)?;
        let sql = "UPDATE dead_letters SET error = ?3 WHERE id = ?1 AND digest = ?2".to_owned();
        self.execute("writing the error of a dead letter", sql, arguments).await.map(drop)
    }
}

fn key(id: &str, digest: Digest) -> Result<SqliteArguments, Error> {
    let mut arguments = SqliteArguments::default();
    bind(&mut arguments, id)?;
    bind(&mut arguments, digest.0.as_slice())?;
    Ok(arguments)
}

pub(super) fn columns_and_table(of: Pile) -> (&'static str, &'static str) {
    match of {
        Pile::Open => ("NULL AS closed_as, NULL AS closed_by, NULL AS closed_at, NULL AS applied_id", "dead_letters"),
        Pile::Closed => ("closed_as, closed_by, closed_at, applied_id", "closed_letters"),
    }
}

pub(super) fn envelope(row: &SqliteRow) -> Envelope {
    let count = |name: &str| row.get::<i64, _>(name).unsigned_abs();
    let closing: Option<&str> = row.get("closed_as");
    Envelope {
        id: row.get("id"),
        digest: Digest::stored(row.get("digest")),
        subject: row.get("subject"),
        stream_seq: count("stream_seq"),
        delivered: count("delivered"),
        reason: row.get("reason"),
        error: row.get("error"),
        payload_bytes: count("bytes"),
        published_ns: row.get("published_at"),
        dead_at_ns: row.get("dead_at"),
        closed: closing.map(|closing| Closed {
            closing: if closing == Closing::Replayed.name() { Closing::Replayed } else { Closing::Discarded },
            by: row.get("closed_by"),
            at_ns: row.get("closed_at"),
            applied_id: row.get("applied_id"),
        }),
    }
}

fn letter(row: &SqliteRow) -> Result<Letter, Error> {
    let headers: BTreeMap<String, Vec<String>> = serde_json::from_str(row.get("headers"))
        .map_err(|source| Error::new("reading the headers of a dead letter", ErrorClass::Other, source))?;
    let headers =
        headers.into_iter().flat_map(|(name, values)| values.into_iter().map(move |value| (name.clone(), value)));
    Ok(Letter { envelope: envelope(row), headers: headers.collect(), payload: row.get::<Vec<u8>, _>("payload").into() })
}
