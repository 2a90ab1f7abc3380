//! What is checked before the database is opened, and the files beside it.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::Access;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use tokio::time::Instant;

use super::MIGRATIONS;
use super::lock::{self, Lock, LockError};
use super::sql::{failed, io_class};
use crate::store::sql::ROWS_MAX;
use crate::store::{Error, ErrorClass, OpenError, Presence};

/// How long a statement waits for a lock of another program, such as a shell, before the batch is put off.
pub const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a starting process waits for the previous process to close the file.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
pub const OPENING_TO_READ: &str = "opening the database to read";

/// Device and inode of each file that this process has created or checked, and that SQLite may have open here.
///
/// If a process closes any descriptor of a file, POSIX drops all locks that the process has on the file, those of SQLite
/// included. Another program that closes the database would then count itself as the last user and delete the WAL: what the daemon
/// commits after that is lost. So nothing but SQLite opens such a file again.
static SEEN: Mutex<Option<HashSet<(u64, u64)>>> = Mutex::new(None);

fn seen() -> MutexGuard<'static, Option<HashSet<(u64, u64)>>> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file beside the database, such as `orders.db-wal`.
pub fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Gives a file beside the database to the owner of the database, or of the folder. Root may have created the file for a daemon
/// that runs as another user. Other users cannot change owners and do not need to.
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

/// Whether a file exists. In a folder that this user may not enter, that cannot be determined.
pub fn is_there(path: &Path) -> Result<bool, OpenError> {
    path.try_exists().map_err(|source| unseen(path, source))
}

/// The error if it cannot be determined whether `path` exists.
pub fn unseen(path: &Path, source: io::Error) -> OpenError {
    match source.kind() {
        io::ErrorKind::PermissionDenied => OpenError::NoEntry(folder(path).to_owned()),
        _ => OpenError::Io { path: path.to_owned(), source },
    }
}

pub async fn acquire(path: &Path) -> Result<Lock, OpenError> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    let mut said = false;
    loop {
        match Lock::try_acquire(path) {
            Ok(lock) => return Ok(lock),
            Err(LockError::Io(source)) => return Err(unusable(&lock::path(path), source)),
            Err(LockError::Held(holder)) if Instant::now() >= deadline => {
                return Err(OpenError::Held { path: path.to_owned(), holder });
            }
            Err(LockError::Held(holder)) => {
                if !said {
                    tracing::warn!(database = %path.display(), %holder, "database is in use, waiting for it");
                    said = true;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Creates an empty file with access for the owner only. For SQLite, an empty file is a new database. SQLite creates the files
/// beside it with the same mode.
pub fn create(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map(drop)?;
    seen().get_or_insert_default().extend(identity(path));
    Ok(())
}

pub fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

pub fn missing_file() -> Error {
    let text = "the file was moved, removed or replaced; put it back";
    Error::new("looking for the database file", ErrorClass::Io, text)
}

/// Errors that may pass are waited for; the operator must correct the others.
pub fn unusable(path: &Path, source: io::Error) -> OpenError {
    let class = io_class(&source);
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::PermissionDenied => OpenError::NotWritable { path, source },
        _ if class == ErrorClass::Io => OpenError::Io { path, source },
        _ => OpenError::Database { path, source: Error::new("locking the database", class, source) },
    }
}

pub fn require_folder(path: &Path) -> Result<(), OpenError> {
    let folder = folder(path);
    if is_there(folder)? && folder.is_dir() { Ok(()) } else { Err(OpenError::MissingFolder(folder.to_owned())) }
}

/// Under another name of the file, SQLite would use another WAL, and another daemon another lock.
pub fn require_one_name(path: &Path) -> Result<(), OpenError> {
    let names = std::fs::metadata(path).map_or(1, |metadata| metadata.nlink());
    if names > 1 { Err(OpenError::Linked { path: path.to_owned(), names }) } else { Ok(()) }
}

/// SQLite must be able to create files beside the database.
fn require_access(path: &Path) -> Result<(), OpenError> {
    let folder_access = (folder(path), Access::WRITE_OK | Access::EXEC_OK);
    let file_access = is_there(path)?.then_some((path, Access::READ_OK | Access::WRITE_OK));
    for (path, access) in [folder_access].into_iter().chain(file_access) {
        rustix::fs::access(path, access).map_err(|error| unusable(path, error.into()))?;
    }
    Ok(())
}

/// Requires a file that this user may read. Does not open the file.
pub fn require_readable(path: &Path) -> Result<(), OpenError> {
    if !is_there(path)? {
        return Err(OpenError::Missing(path.to_owned()));
    }
    match rustix::fs::access(path, Access::READ_OK).map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(OpenError::NotReadable(path.to_owned())),
        // The reader finds other problems.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Names the cause if a reader has no access. SQLite must write beside the database even to read it, and reports only a code.
pub fn unreadable(error: OpenError) -> OpenError {
    match error {
        OpenError::Database { path, source }
            if matches!(source.class, ErrorClass::Io | ErrorClass::ReadOnly)
                && matches!(require_access(&path), Err(OpenError::NotWritable { .. })) =>
        {
            OpenError::NotReadable(path)
        }
        other => other,
    }
}

/// Checks the first bytes before anything opens the file for writing. Once for each file, see [`SEEN`].
pub fn require_sqlite(path: &Path) -> Result<(), OpenError> {
    const MAGIC: &[u8] = b"SQLite format 3\0";
    let io_error = |source: io::Error| match (is_there(path), source.kind()) {
        (Err(unseen), _) => unseen,
        (Ok(_), io::ErrorKind::PermissionDenied) => OpenError::NotReadable(path.to_owned()),
        (Ok(_), _) => unusable(path, source),
    };
    let file_identity = identity(path);
    let mut seen = seen();
    let seen = seen.get_or_insert_default();
    if file_identity.is_some_and(|identity| seen.contains(&identity)) {
        return Ok(());
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error(error)),
    };
    let mut head = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut head).map_err(io_error)?;
    // SQLite itself leaves a database without tables as an empty file.
    if head.is_empty() || head == MAGIC {
        seen.extend(file_identity);
        Ok(())
    } else {
        Err(OpenError::NotADatabase(path.to_owned()))
    }
}

/// Requires a database of exactly this version, for commands that work beside the daemon.
pub async fn require_beside(path: &Path) -> Result<(), OpenError> {
    require_readable(path)?;
    require_sqlite(path)?;
    let applied = require_known_schema(path).await.map_err(unreadable)?;
    if applied < MIGRATIONS.iter().count() { Err(OpenError::Older(path.to_owned())) } else { Ok(()) }
}

/// Compares the migrations in the file with ours, before any of them runs. Returns how many are applied.
pub async fn require_known_schema(path: &Path) -> Result<usize, OpenError> {
    let unopened = |source| OpenError::sqlite(path, source);
    let mut connection = connect(&options(path), "opening the database").await.map_err(unopened)?;
    let seen = known_schema(path, &mut connection).await;
    // Closed in any case: one that is dropped leaves its WAL if the process ends first.
    let closed = connection.close().await;
    let seen = seen?;
    closed.map_err(|source| unopened(failed("closing the database", source)))?;
    Ok(seen)
}

async fn known_schema(path: &Path, connection: &mut SqliteConnection) -> Result<usize, OpenError> {
    let reading = |source| OpenError::sqlite(path, failed("reading the schema", source));
    let (tables, ours): (i64, bool) = sqlx::query_as(
        "SELECT count(*), coalesce(max(name = '_sqlx_migrations'), 0) FROM sqlite_schema WHERE type = 'table'",
    )
    .fetch_one(&mut *connection)
    .await
    .map_err(reading)?;
    if tables > 0 && !ours {
        return Err(OpenError::NotOurs(path.to_owned()));
    }
    let mut seen = 0;
    if ours {
        let applied: Vec<(i64, Vec<u8>)> =
            sqlx::query_as("SELECT version, checksum FROM _sqlx_migrations ORDER BY version")
                .fetch_all(&mut *connection)
                .await
                .map_err(reading)?;
        for (version, checksum) in applied {
            match MIGRATIONS.iter().find(|migration| migration.version == version) {
                None => return Err(OpenError::Newer { path: path.to_owned(), version }),
                Some(known) if known.checksum != checksum => {
                    return Err(OpenError::Foreign { path: path.to_owned(), version });
                }
                Some(_) => seen += 1,
            }
        }
    }
    Ok(seen)
}

pub async fn check(path: &Path) -> Result<Presence, OpenError> {
    require_folder(path)?;
    require_access(path)?;
    require_sqlite(path)?;
    if !is_there(path)? {
        return Ok(Presence::WillBeCreated);
    }
    require_known_schema(path).await?;
    require_unlocked(path).await?;
    Ok(Presence::Exists)
}

/// That no other program keeps the write lock. The daemon itself holds it for one commit at a time.
async fn require_unlocked(path: &Path) -> Result<(), OpenError> {
    let unusable = |source| OpenError::sqlite(path, source);
    let locking = |source| unusable(failed("another program keeps the write lock", source));
    let mut connection = connect(&options(path), "opening the database").await.map_err(unusable)?;
    sqlx::raw_sql("BEGIN IMMEDIATE; ROLLBACK").execute(&mut connection).await.map_err(locking)?;
    connection.close().await.map_err(locking)
}

pub fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .busy_timeout(BUSY_TIMEOUT)
        // Rows of one statement that may wait to be read: SQLite's thread need not stop in the middle of a batch.
        .row_buffer_size(ROWS_MAX)
        .disable_statement_logging()
}

pub async fn connect(options: &SqliteConnectOptions, doing: &'static str) -> Result<SqliteConnection, Error> {
    options.connect().await.map_err(|source| failed(doing, source))
}

/// A connection that cannot write, beside a daemon that may be running.
pub async fn open_to_read(path: &Path) -> Result<SqliteConnection, OpenError> {
    require_beside(path).await?;
    let connection = connect(&options(path).read_only(true), OPENING_TO_READ).await;
    connection.map_err(|source| OpenError::sqlite(path, source))
}
