//! The seam to the database: what the rest of the program may know of it. Nothing above this module knows a dialect.
//!
//! There is one store today, [`sqlite`]. A second one would implement the same functions and pass the same tests.

use std::path::{Path, PathBuf};

pub use sqlite::{Store, Tx};

use crate::delivery::{Delivery, Digest};
use crate::metrics::DbErrorClass;
use crate::outcome::Reason;

pub mod lock;
pub mod sqlite;

/// A statement or a commit that did not go through.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct Error {
    /// What we were doing, for the log.
    pub doing: &'static str,
    pub class: DbErrorClass,
    #[source]
    pub source: sqlx::Error,
}

impl Error {
    /// Whether the data of one message may be to blame. If not, no message is judged by it and no attempt is spent.
    pub fn is_about_data(&self) -> bool {
        match self.class {
            DbErrorClass::Constraint => true,
            DbErrorClass::Busy
            | DbErrorClass::Full
            | DbErrorClass::Io
            | DbErrorClass::ReadOnly
            | DbErrorClass::Corrupt
            | DbErrorClass::Other => false,
        }
    }

    /// Whether some of what was to be written may stand in the file all the same.
    pub fn may_have_written(&self) -> bool {
        match self.class {
            DbErrorClass::Busy | DbErrorClass::Constraint => false,
            DbErrorClass::Full
            | DbErrorClass::Io
            | DbErrorClass::ReadOnly
            | DbErrorClass::Corrupt
            | DbErrorClass::Other => true,
        }
    }

    /// Whether time may mend it without the operator.
    pub fn may_pass(&self) -> bool {
        match self.class {
            DbErrorClass::Busy | DbErrorClass::Full | DbErrorClass::Io | DbErrorClass::ReadOnly => true,
            DbErrorClass::Corrupt | DbErrorClass::Constraint | DbErrorClass::Other => false,
        }
    }
}

/// Why the database could not be opened. All but the last are for the operator to mend.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("database folder {} does not exist; create it, or change database.url", .0.display())]
    MissingFolder(PathBuf),
    #[error("{} is no SQLite database; move it away, or change database.url", .0.display())]
    NotADatabase(PathBuf),
    #[error("{} holds another program's tables; change database.url", .0.display())]
    NotOurs(PathBuf),
    #[error(
        "{} was written by a newer version of order-processor (migration {version}); start that version, or restore a backup from before the upgrade",
        path.display()
    )]
    Newer { path: PathBuf, version: i64 },
    #[error(
        "migration {version} of {} is not the one that this binary knows; start the version that wrote the database",
        path.display()
    )]
    Foreign { path: PathBuf, version: i64 },
    #[error("{} is in use by {holder}; stop that process, or change database.url", path.display())]
    Held { path: PathBuf, holder: String },
    #[error("cannot use {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is damaged; keep the file, and restore a backup", path.display())]
    Damaged {
        path: PathBuf,
        #[source]
        source: Error,
    },
    #[error("cannot open {}", path.display())]
    Database {
        path: PathBuf,
        #[source]
        source: Error,
    },
}

impl OpenError {
    /// What a failed statement on a database that is being opened means.
    pub fn database(path: &Path, source: Error) -> Self {
        let path = path.to_owned();
        match source.class {
            DbErrorClass::Corrupt => Self::Damaged { path, source },
            DbErrorClass::Busy
            | DbErrorClass::Full
            | DbErrorClass::Io
            | DbErrorClass::ReadOnly
            | DbErrorClass::Constraint
            | DbErrorClass::Other => Self::Database { path, source },
        }
    }
}

/// What came of claiming the id of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nobody had it: the message is to be applied.
    New,
    /// It was processed, and the message had this digest.
    Processed(Digest),
    /// This very message, with the same digest, is a dead letter.
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

impl Prunable {
    pub fn covers(&self, processed_at_ns: i64, stream_seq: i64) -> bool {
        let gone = self.gone.is_none_or(|gone| {
            u64::try_from(stream_seq).is_ok_and(|seq| seq < gone.below_seq) || processed_at_ns < gone.stream_created_ns
        });
        processed_at_ns < self.before_ns && gone
    }
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

/// Sizes of the database on disk, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub database: u64,
    pub wal: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_goes_only_when_it_is_old_and_its_message_cannot_come_again() {
        let auto = Prunable { before_ns: 100, gone: Some(Gone { below_seq: 10, stream_created_ns: 50 }) };
        assert!(auto.covers(60, 9), "old, and dropped by the stream");
        assert!(!auto.covers(60, 10), "the stream still has it");
        assert!(!auto.covers(100, 9), "too young");
        assert!(auto.covers(40, 1000), "of a stream of the same name that is gone");
        assert!(Prunable { before_ns: 100, gone: None }.covers(60, 1000), "by age alone");
    }
}
