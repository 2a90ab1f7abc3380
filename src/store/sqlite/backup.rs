//! SQL of a backup: a copy as of one moment, and a check of the copy.

use std::path::Path;

use super::open::{
    OPENING_TO_READ, beside, connect, options, require_known_schema, require_readable, require_sqlite, unreadable,
};
use super::sql::failed;
use crate::store::{Contents, Error, ErrorClass, OpenError};

/// The file that SQLite leaves beside a copy that was interrupted.
struct Journal<'a>(&'a Path);

impl Drop for Journal<'_> {
    fn drop(&mut self) {
        // Already gone after a copy that was completed. Nothing can be done about another failure.
        drop(std::fs::remove_file(beside(self.0, "-journal")));
    }
}

pub async fn copy(path: &Path, to: &Path) -> Result<Contents, OpenError> {
    let _journal = Journal(to);
    require_readable(path)?;
    require_sqlite(path)?;
    // An older schema may be copied: operators do that before an upgrade.
    require_known_schema(path).await.map_err(unreadable)?;
    let unopened = |source| OpenError::sqlite(path, source);
    let mut connection = connect(&options(path).read_only(true), OPENING_TO_READ).await.map_err(unopened)?;
    // Leaves no free pages behind, reads every page that is in use, and needs no lock but that of a reader.
    let copying = sqlx::query("VACUUM INTO ?").bind(to.to_string_lossy().into_owned()).execute(&mut connection);
    copying.await.map_err(|source| unopened(failed("copying the database", source)))?;
    examine(to).await
}

/// Checks a copy from its first page to its last.
async fn examine(path: &Path) -> Result<Contents, OpenError> {
    let unopened = |source| OpenError::sqlite(path, source);
    let reading = |source| unopened(failed("reading the copy", source));
    require_known_schema(path).await?;
    let read_only = options(path).read_only(true).immutable(true);
    let mut connection = connect(&read_only, "opening the copy").await.map_err(unopened)?;
    let verdict: String =
        sqlx::query_scalar("PRAGMA integrity_check(1)").fetch_one(&mut connection).await.map_err(reading)?;
    if verdict != "ok" {
        return Err(unopened(Error::new("checking the copy", ErrorClass::Corrupt, verdict)));
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
