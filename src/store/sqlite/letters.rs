//! SQL over dead letters, for the operator's commands. They work beside a daemon that runs: each statement or transaction is short.

use std::collections::BTreeMap;
use std::path::Path;

use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{Store, Tx, bind, headers_json, open_to_read, require_beside, to_i64};
use crate::model::id::Digest;
use crate::model::label::Label;
use crate::model::letter::{Closed, Closing, Envelope, Letter, Pile, Which};
use crate::store::{Error, OpenError};

const ENVELOPE: &str =
    "rowid, id, digest, subject, stream_seq, delivered, reason, error, length(payload) AS bytes, published_at, dead_at";
const DOING: &str = "reading dead letters";

/// A way to read letters beside a daemon that runs, or without one. It cannot write.
pub struct Reader {
    connection: SqliteConnection,
}

/// Rows still to be read: those after the one and up to the other.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub after: i64,
    pub through: i64,
}

impl Range {
    pub const ALL: Self = Self { after: 0, through: i64::MAX };
}

/// In which order, and so which end of the range is read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    OldestFirst,
    NewestFirst,
}

impl Reader {
    /// # Errors
    /// [`OpenError`] when there is no database, or none of this version.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        Ok(Self { connection: open_to_read(path).await? })
    }

    /// Up to `limit` letters with the rows that they are in. Fewer than `limit` may come although more are there: go on with
    /// what is left of the range, until that is `None`.
    pub async fn page(
        &mut self,
        of: Pile,
        which: &Which,
        range: Range,
        order: Order,
        limit: u32,
    ) -> Result<(Vec<(i64, Envelope)>, Option<Range>), Error> {
        let ids = if which.ids.is_empty() { None } else { Some(serde_json::json!(which.ids).to_string()) };
        let direction = match order {
            Order::OldestFirst => "ASC",
            Order::NewestFirst => "DESC",
        };
        let (closing, table) = columns_and_table(of);
        let sql = format!(
            "SELECT {ENVELOPE}, {closing} FROM {table} WHERE rowid > ?1 AND rowid <= ?2 \
             AND (?3 IS NULL OR reason = ?3) AND (?4 IS NULL OR dead_at >= ?4) AND (?5 IS NULL OR dead_at < ?5) \
             AND (?6 IS NULL OR id IN (SELECT value FROM json_each(?6))) ORDER BY rowid {direction} LIMIT ?7",
        );
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, range.after)?;
        bind(&mut arguments, range.through)?;
        bind(&mut arguments, which.reason.map(Label::name))?;
        bind(&mut arguments, which.since_ns)?;
        bind(&mut arguments, which.until_ns)?;
        bind(&mut arguments, ids)?;
        bind(&mut arguments, limit)?;
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(&mut self.connection).await;
        let rows = rows.map_err(|source| Error::new(DOING, source))?;
        let rest = rows.last().filter(|_| rows.len() as u64 == u64::from(limit)).map(|last| match order {
            Order::OldestFirst => Range { after: last.get("rowid"), ..range },
            Order::NewestFirst => Range { through: last.get::<i64, _>("rowid") - 1, ..range },
        });
        let letters = rows.iter().map(|row| (row.get("rowid"), envelope(row)));
        let fits = |subject: &str| which.subject.as_ref().is_none_or(|pattern| pattern.matches(subject));
        Ok((letters.filter(|(_, envelope)| fits(&envelope.subject)).collect(), rest))
    }

    /// The letter in a row; `None` if it is there no more.
    pub async fn letter(&mut self, of: Pile, rowid: i64) -> Result<Option<Letter>, Error> {
        let (closing, table) = columns_and_table(of);
        let sql = format!("SELECT {ENVELOPE}, {closing}, headers, payload FROM {table} WHERE rowid = ?");
        let row = sqlx::query(AssertSqlSafe(sql)).bind(rowid).fetch_optional(&mut self.connection).await;
        row.and_then(|row| row.as_ref().map(letter).transpose()).map_err(|source| Error::new(DOING, source))
    }

    /// The last row that there is.
    pub async fn last_row(&mut self) -> Result<i64, Error> {
        let last = sqlx::query_scalar("SELECT coalesce(max(rowid), 0) FROM dead_letters");
        last.fetch_one(&mut self.connection).await.map_err(|source| Error::new(DOING, source))
    }
}

impl Store {
    /// Opens the database beside a daemon that may be running: without its lock, and without making or migrating anything.
    /// What is written must not need what the daemon remembers of its own writing: never `attempts`.
    ///
    /// # Errors
    /// [`OpenError`] when there is no database, or none of this version.
    pub async fn open_beside(path: &Path) -> Result<Self, OpenError> {
        require_beside(path).await?;
        Self::open_file(path, None).await
    }
}

impl Tx<'_> {
    /// Takes a letter out; `None` if it is there no more. What becomes of it is to be [recorded](Self::record_closed).
    pub async fn take_letter(&mut self, id: &str, digest: Digest) -> Result<Option<Letter>, Error> {
        const DOING: &str = "taking a dead letter out";
        let (closing, table) = columns_and_table(Pile::Open);
        let sql = format!(
            "DELETE FROM {table} WHERE id = ? AND digest = ? RETURNING {ENVELOPE}, {closing}, headers, payload"
        );
        let rows = self.fetch(DOING, sql, key(id, digest)?).await?;
        rows.first().map(letter).transpose().map_err(|source| Error::new(DOING, source))
    }

    /// Records what an operator did with a letter.
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

    /// Keeps a letter with what went wrong this time.
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

fn columns_and_table(of: Pile) -> (&'static str, &'static str) {
    match of {
        Pile::Open => ("NULL AS closed_as, NULL AS closed_by, NULL AS closed_at, NULL AS applied_id", "dead_letters"),
        Pile::Closed => ("closed_as, closed_by, closed_at, applied_id", "closed_letters"),
    }
}

fn envelope(row: &SqliteRow) -> Envelope {
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

fn letter(row: &SqliteRow) -> Result<Letter, sqlx::Error> {
    let headers: BTreeMap<String, Vec<String>> = serde_json::from_str(row.get("headers"))
        .map_err(|source| sqlx::Error::ColumnDecode { index: "headers".to_owned(), source: source.into() })?;
    let headers =
        headers.into_iter().flat_map(|(name, values)| values.into_iter().map(move |value| (name.clone(), value)));
    Ok(Letter { envelope: envelope(row), headers: headers.collect(), payload: row.get::<Vec<u8>, _>("payload").into() })
}
