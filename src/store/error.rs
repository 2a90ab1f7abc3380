//! What can go wrong in a database, and what that means for the work.

use std::path::{Path, PathBuf};

use super::Holder;
use crate::config::Database;
use crate::model::label::label;

/// A statement or a commit that failed.
#[derive(Debug, thiserror::Error)]
#[error("{doing}")]
pub struct Error {
    /// What we were doing, for the log.
    pub doing: &'static str,
    pub class: ErrorClass,
    /// Of the driver, or a text.
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl Error {
    pub fn new(
        doing: &'static str,
        class: ErrorClass,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { doing, class, source: source.into() }
    }

    /// Whether the data of one message may be the cause. If not, no message is blamed and no attempt is counted.
    pub fn is_about_data(&self) -> bool {
        match self.class {
            ErrorClass::Constraint => true,
            ErrorClass::Busy
            | ErrorClass::Full
            | ErrorClass::Io
            | ErrorClass::ReadOnly
            | ErrorClass::Corrupt
            | ErrorClass::Other => false,
        }
    }

    /// Whether a part of the data may be in the file although the statement failed.
    pub fn may_have_written(&self) -> bool {
        match self.class {
            ErrorClass::Busy | ErrorClass::Constraint => false,
            ErrorClass::Full | ErrorClass::Io | ErrorClass::ReadOnly | ErrorClass::Corrupt | ErrorClass::Other => true,
        }
    }

    /// Whether the error may pass without the operator.
    pub fn may_pass(&self) -> bool {
        match self.class {
            ErrorClass::Busy | ErrorClass::Full | ErrorClass::Io | ErrorClass::ReadOnly => true,
            ErrorClass::Corrupt | ErrorClass::Constraint | ErrorClass::Other => false,
        }
    }
}

/// Why the database could not be opened. [`OpenError::is_for_operator`] says which of them a restart cannot correct.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("database folder {} does not exist; mount its disk, create the folder or correct database.url", .0.display())]
    MissingFolder(PathBuf),
    #[error("{} is not an SQLite database; correct database.url, or move the file away", .0.display())]
    NotADatabase(PathBuf),
    #[error("{} contains the tables of another program; correct database.url", .0.display())]
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
    #[error("no database at {} yet; the daemon creates it at its first start; if it runs already, use its settings", .0.display())]
    Missing(PathBuf),
    #[error("{} was written by an older version of order-processor; start the daemon once, which updates it", .0.display())]
    Older(PathBuf),
    #[error("{} is in use by {holder}; stop that process", path.display())]
    Held { path: PathBuf, holder: Holder },
    #[error(
        "{} has {names} names (hard links): a program that opens the database by another name destroys it; find the names with \
         `find FOLDER -samefile {}`, and remove all but this one",
        path.display(),
        path.display()
    )]
    Linked { path: PathBuf, names: u64 },
    #[error(
        "cannot enter {} (permission denied); run this as the user of the daemon (`sudo -u USER`), or give this user access",
        .0.display()
    )]
    NoEntry(PathBuf),
    #[error(
        "{} cannot be read by this user (permission denied); run this as the user of the daemon (`sudo -u USER`), or make that \
         user the owner of the file",
        .0.display()
    )]
    NotReadable(PathBuf),
    #[error("{} cannot be written; give the user of the daemon write access", path.display())]
    NotWritable {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("cannot {doing} {}", path.display())]
    Marker {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
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
    /// Another process has the database.
    pub fn held(database: &Database, holder: Holder) -> Self {
        match database {
            Database::Sqlite(path) => Self::Held { path: path.clone(), holder },
        }
    }

    /// What a failed statement means while the database is opened, or for a command that reads it.
    pub fn database(database: &Database, source: Error) -> Self {
        match database {
            Database::Sqlite(path) => Self::sqlite(path, source),
        }
    }

    pub(super) fn sqlite(path: &Path, source: Error) -> Self {
        let path = path.to_owned();
        match source.class {
            ErrorClass::Corrupt => Self::Damaged { path, source },
            ErrorClass::Busy
            | ErrorClass::Full
            | ErrorClass::Io
            | ErrorClass::ReadOnly
            | ErrorClass::Constraint
            | ErrorClass::Other => Self::Database { path, source },
        }
    }

    /// Whether the operator must correct something before another try can succeed.
    pub fn is_for_operator(&self) -> bool {
        match self {
            Self::Database { .. } | Self::Marker { .. } => false,
            Self::MissingFolder(_)
            | Self::NotADatabase(_)
            | Self::NotOurs(_)
            | Self::Missing(_)
            | Self::Older(_)
            | Self::Newer { .. }
            | Self::Foreign { .. }
            | Self::Held { .. }
            | Self::Linked { .. }
            | Self::Damaged { .. }
            | Self::NoEntry(_)
            | Self::NotReadable(_)
            | Self::NotWritable { .. }
            | Self::Io { .. } => true,
        }
    }
}

label! {
    /// The kind of an error, which decides what the daemon does next.
    pub enum ErrorClass: "class" {
        /// Another process holds the lock.
        Busy = "busy",
        /// The disk, or the database's own limit, is full.
        Full = "full",
        /// Reading or writing the file failed.
        Io = "io",
        /// The file or its file system cannot be written.
        ReadOnly = "read_only",
        /// The file is damaged, or is not a database.
        Corrupt = "corrupt",
        /// A value violates a constraint of the schema.
        Constraint = "constraint",
        /// Anything else.
        Other = "other",
    }
}
