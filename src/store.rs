//! The seam to the database: what the rest of the program may know of it. Nothing above this module knows a dialect.
//!
//! There is one store today, [`sqlite`]. A second one would implement the same functions and pass the same tests.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

pub use error::{Error, ErrorClass, OpenError};
pub use sqlite::{Store, Tx};

use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::model::outcome::Reason;

mod error;
pub mod sqlite;

/// What came of claiming the id of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nobody had it: the message is to be applied.
    New,
    /// It was processed, and the message had this digest.
    Processed(Digest),
    /// It was not, but this very message, with the same digest, is a dead letter, or was one until an operator dealt with it.
    Dead,
}

/// Runs of the handler over one message that did not succeed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// Runs that ended in a failure.
    pub failed: u32,
    /// Runs that began and never ended.
    pub started: u32,
}

impl Attempts {
    /// With one run more that has begun.
    pub fn begun(self) -> Self {
        Self { started: self.started.saturating_add(1), ..self }
    }

    /// With one of the begun runs ended.
    pub fn ended(self) -> Self {
        Self { started: self.started.saturating_sub(1), ..self }
    }
}

/// A message on its way to `dead_letters`.
#[derive(Debug)]
pub struct DeadLetter<'a> {
    pub delivery: &'a Delivery,
    pub reason: Reason,
    pub error: &'a str,
}

/// Which ids may go. Times are in nanoseconds since 1970 UTC.
#[derive(Clone, Copy, Debug)]
pub struct Prunable {
    /// Only what was processed before this.
    pub before_ns: i64,
    /// And only what the stream no longer holds, if that counts.
    pub gone: Option<Gone>,
}

/// What a stream no longer holds.
#[derive(Clone, Copy, Debug)]
pub struct Gone {
    pub below_seq: u64,
    /// What was processed before the stream was created belongs to one that is gone, whatever its sequence.
    pub stream_created_ns: i64,
}

/// Row counts that operators look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    pub processed_ids: u64,
    pub dead_letters: u64,
}

/// A file beside the database, such as `orders.db-wal`.
pub fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Gives a file beside the database to the database's owner, or to the folder's: root may have made it for a daemon that is
/// another user. Who is not root may not, and need not.
pub fn give_to_owner(path: &Path, database: &Path) {
    if let Ok(owner) = std::fs::metadata(database).or_else(|_| std::fs::metadata(folder(path))) {
        drop(std::os::unix::fs::chown(path, Some(owner.uid()), Some(owner.gid())));
    }
}

/// The folder that a file is in.
pub fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

/// Whether there is something at `path`. Behind a folder that we may not enter, that cannot be told.
///
/// # Errors
/// [`OpenError::unseen`]
pub fn is_there(path: &Path) -> Result<bool, OpenError> {
    path.try_exists().map_err(|source| OpenError::unseen(path, source))
}

/// Sizes of the database on disk, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub database: u64,
    pub wal: u64,
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// The rows that are left of `rows` (processed at, stream sequence) after one step of pruning a real file.
    async fn pruned(store: &mut Store, rows: &[(i64, i64)], prunable: Prunable, limit: u32) -> (u64, Vec<(i64, i64)>) {
        let mut tx = store.begin().await.unwrap();
        sqlx::query("DELETE FROM processed_ids").execute(tx.sqlite()).await.unwrap();
        for (at, seq) in rows {
            sqlx::query("INSERT INTO processed_ids (id, stream_seq, digest, processed_at) VALUES (hex(randomblob(8)), ?, x'00', ?)")
                .bind(seq)
                .bind(at)
                .execute(tx.sqlite())
                .await
                .unwrap();
        }
        tx.commit().await.unwrap();
        let went = store.prune(prunable, limit).await.unwrap();
        let mut tx = store.begin().await.unwrap();
        let left = sqlx::query_as("SELECT processed_at, stream_seq FROM processed_ids ORDER BY row");
        let left = left.fetch_all(tx.sqlite()).await.unwrap();
        tx.commit().await.unwrap();
        let counts = store.counts().await.unwrap();
        assert_eq!(counts.processed_ids, left.len() as u64, "counted by rowid");
        (went, left)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn pruning_takes_the_oldest_ids_that_may_go_and_stops_at_the_first_that_may_not(
            // Few values, so that the bounds themselves come up.
            steps in vec((vec((0..8_i64, 0..8_i64), 0..12), 0..9_i64, 0..9_u64, 0..9_i64, any::<bool>(), 1..14_u32), 12),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let folder = tempfile::tempdir().unwrap();
            let mut store = runtime.block_on(Store::open(&folder.path().join("orders.db"))).unwrap();
            for (rows, before_ns, below_seq, stream_created_ns, auto, limit) in steps {
                let prunable = Prunable { before_ns, gone: auto.then_some(Gone { below_seq, stream_created_ns }) };
                let may_go = |(at, seq): &&(i64, i64)| {
                    let elsewhere = *at < stream_created_ns || seq.unsigned_abs() < below_seq;
                    *at < before_ns && (!auto || elsewhere)
                };
                let going = rows.iter().take_while(may_go).count().min(limit as usize);
                let (went, left) = runtime.block_on(pruned(&mut store, &rows, prunable, limit));
                prop_assert_eq!(went, going as u64);
                prop_assert_eq!(&left[..], &rows[going..]);
            }
        }
    }
}
