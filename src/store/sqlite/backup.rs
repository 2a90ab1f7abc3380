//! SQL of a backup: a copy as of one moment, made beside a daemon that runs, and a look at what is in it.

use std::path::Path;

use super::{OPENING_TO_READ, connect, options, require_known_schema, require_readable, require_sqlite, unreadable};
use crate::store::ErrorClass;
use crate::store::{Error, OpenError};

/// What a database holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    pub orders: i64,
    pub processed_ids: i64,
    pub dead_letters: i64,
    /// The highest of a message with an outcome; `None` without any.
    pub last_stream_seq: Option<i64>,
}

/// Copies the database as it is at this moment into `to`, an empty file. Nothing is locked: the daemon goes on.
///
/// # Errors
/// When there is no database of ours, or the copy cannot be made.
pub async fn copy(path: &Path, to: &Path) -> Result<(), OpenError> {
    require_readable(path)?;
    require_sqlite(path)?;
    // An older schema may be copied: that is what one does before an upgrade.
    require_known_schema(path).await.map_err(unreadable)?;
    let failed = |source| OpenError::database(path, source);
    let mut connection = connect(&options(path).read_only(true), OPENING_TO_READ).await.map_err(failed)?;
    // Leaves no free pages behind, reads every page that is in use, and needs no lock but that of a reader.
    let copying = sqlx::query("VACUUM INTO ?").bind(to.to_string_lossy().into_owned()).execute(&mut connection);
    copying.await.map(drop).map_err(|source| failed(Error::new("copying the database", source)))
}

/// Checks a copy from its first page to its last, and says what is in it.
///
/// # Errors
/// When it is not whole.
pub async fn examine(path: &Path) -> Result<Contents, OpenError> {
    let failed = |source| OpenError::database(path, source);
    let reading = |source| failed(Error::new("reading the copy", source));
    require_known_schema(path).await?;
    let read_only = options(path).read_only(true).immutable(true);
    let mut connection = connect(&read_only, "opening the copy").await.map_err(failed)?;
    let verdict: String =
        sqlx::query_scalar("PRAGMA integrity_check(1)").fetch_one(&mut connection).await.map_err(reading)?;
    if verdict != "ok" {
        let source = sqlx::Error::Protocol(verdict);
        return Err(failed(Error { doing: "checking the copy", class: ErrorClass::Corrupt, source }));
    }
    let (orders, processed_ids, dead_letters, last_stream_seq) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM processed_ids), (SELECT count(*) FROM dead_letters), \
         (SELECT max(stream_seq) FROM (SELECT stream_seq FROM processed_ids UNION ALL SELECT stream_seq FROM dead_letters))",
    )
    .fetch_one(&mut connection)
    .await
    .map_err(reading)?;
    Ok(Contents { orders, processed_ids, dead_letters, last_stream_seq })
}
