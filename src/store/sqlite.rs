//! The store on SQLite. One connection writes. A transaction claims ids, applies the effects and commits.
//!
//! A connection whose transaction did not end in a clean commit is never used again. After SQLITE_FULL, for example, SQLite has
//! rolled back by itself and the driver does not know it (seen with sqlx 0.9.0). A new connection knows it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};
use tokio::time::Instant;

use self::ids::Ids;
use self::lock::Lock;
use self::open::{acquire, connect, create, identity, missing_file, options, unusable};
use self::open::{
    beside, is_there, require_beside, require_folder, require_known_schema, require_one_name, require_sqlite,
};
use self::reader::counts;
use self::retries::read_retries;
use self::sql::failed;
use super::{Counts, Error, ErrorClass, OpenError, Prunable, Retry, Sizes};

pub use self::open::check;
pub use self::reader::Reader;
use self::tx::Savepoint;
pub use self::tx::Tx;

mod audit;
pub mod backup;
mod binding;
mod find;
mod ids;
mod letters;
pub mod lock;
mod open;
mod outbox;
pub mod pause;
mod prune;
mod reader;
mod retries;
mod schemes;
pub mod scratch;
mod sql;
mod tx;

static MIGRATIONS: Migrator = sqlx::migrate!("migrations/sqlite");

/// The page size of a new database, twice SQLite's default. A backlog fills whole pages, and each page costs two writes, whatever
/// its size.
const PAGE_BYTES: u32 = 8192;
/// SQLite copies the WAL into the database when the WAL has this many pages. A commit waits for that.
const CHECKPOINT_PAGES: u32 = 2_000;
/// A WAL that a long reader has made larger than this is truncated after the reader has ended.
const WAL_LIMIT_BYTES: u64 = 64 * 1024 * 1024;
/// How often the truncation is tried: it waits for readers for up to [`open::BUSY_TIMEOUT`].
const WAL_LIMIT_EVERY: Duration = Duration::from_secs(60);
const READING_ATTEMPTS: &str = "reading the attempts";
const LOOKING_UP: &str = "looking ids up";

/// The database of one daemon: the file, the lock on it and the writing connection.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    options: SqliteConnectOptions,
    connection: Option<SqliteConnection>,
    /// The last transaction on `connection` ended in a clean commit.
    clean: bool,
    /// Device and inode of the file that was opened.
    identity: Option<(u64, u64)>,
    /// The same of the two files beside it that `connection` uses, after its first transaction has begun.
    wal_files: Option<WalFiles>,
    /// The database has failed, and it is not known whether everything in the WAL is on disk.
    faulted: bool,
    /// Whether `attempts` may have rows. Only the process with the lock writes the table, so the usual path need not ask.
    any_attempts: bool,
    retries: Vec<Retry>,
    ids: Ids,
    /// The last row of the outbox that is known.
    outbox_row: i64,
    /// The rows of the outbox when the database was opened.
    outbox_rows: u64,
    /// The size of the WAL is not checked before this.
    wal_due: Instant,
    /// `None` if another process may be the daemon.
    lock: Option<Lock>,
}

impl Store {
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        require_folder(path)?;
        require_sqlite(path)?;
        let lock = acquire(path).await?;
        let after_stop = lock.comes_after_a_stop();
        if is_there(path)? {
            require_one_name(path)?;
            require_known_schema(path).await?;
        } else {
            create(path).map_err(|source| unusable(path, source))?;
        }
        let mut store = Self::open_file(path, Some(lock)).await?;
        let unopened = |source| OpenError::sqlite(path, source);
        store.migrate().await.map_err(unopened)?;
        if after_stop {
            store.take_back_start().await.map_err(unopened)?;
        }
        // Reads the newest ids and seals those that are due, before the first batch.
        store.begin().await.map_err(unopened)?.commit().await.map_err(unopened)?;
        Ok(store)
    }

    /// The previous process was killed during its shutdown. Its last recorded run was interrupted on purpose, so it does not
    /// count as a crash.
    async fn take_back_start(&mut self) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let taken_back = sqlx::query(
            "UPDATE attempts SET started = started - 1 \
             WHERE id = (SELECT id FROM attempts WHERE started > 0 ORDER BY updated_at DESC LIMIT 1)",
        );
        taken_back.execute(connection).await.map_err(|source| failed("taking back a start", source))?;
        Ok(())
    }

    pub async fn open_again(path: &Path) -> Result<Self, OpenError> {
        if is_there(path)? { Self::open(path).await } else { Err(OpenError::sqlite(path, missing_file())) }
    }

    pub async fn open_beside(path: &Path) -> Result<Self, OpenError> {
        require_beside(path).await?;
        Self::open_file(path, None).await
    }

    pub fn sign_as_repair(&mut self) {
        if let Some(lock) = &mut self.lock {
            lock.sign_as_repair();
        }
    }

    async fn open_file(path: &Path, lock: Option<Lock>) -> Result<Self, OpenError> {
        let options = options(path)
            .journal_mode(SqliteJournalMode::Wal)
            // An acknowledged order must survive a power cut: NORMAL would not sync the WAL at each commit.
            .synchronous(SqliteSynchronous::Full)
            .page_size(PAGE_BYTES)
            .pragma("wal_autocheckpoint", CHECKPOINT_PAGES.to_string())
            .pragma("journal_size_limit", WAL_LIMIT_BYTES.to_string());
        let connection = connect(&options, "opening the database").await;
        let connection = connection.map_err(|source| OpenError::sqlite(path, source))?;
        Ok(Self {
            path: path.to_owned(),
            options,
            connection: Some(connection),
            clean: true,
            identity: identity(path),
            wal_files: None,
            faulted: false,
            any_attempts: true,
            retries: Vec::new(),
            ids: Ids::default(),
            outbox_row: 0,
            outbox_rows: 0,
            wal_due: Instant::now(),
            lock,
        })
    }

    async fn migrate(&mut self) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        run_migrations(connection).await?;
        self.any_attempts = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM attempts)")
            .fetch_one(&mut *connection)
            .await
            .map_err(|source| failed(READING_ATTEMPTS, source))?;
        self.retries = read_retries(&mut *connection).await?;
        let counts = counts(connection).await.map_err(|source| failed("counting rows", source))?;
        self.outbox_rows = counts.outbox_rows;
        Ok(())
    }

    pub fn retries(&self) -> &[Retry] {
        &self.retries
    }

    pub async fn begin(&mut self) -> Result<Tx<'_>, Error> {
        self.roll_back().await;
        self.require_same_file()?;
        self.rescue_wal().await?;
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.reopen().await?,
        };
        self.limit_wal(&mut connection).await;
        let connection = self.connection.insert(connection);
        self.clean = false;
        let Self { path, wal_files: opened, clean, faulted, any_attempts, ids, outbox_row: outbox_committed, .. } =
            self;
        let outbox_row = *outbox_committed;
        let mut tx = Tx {
            connection,
            clean,
            faulted,
            any_attempts,
            ids,
            outbox_committed,
            outbox_row,
            sound: true,
            savepoint: Savepoint::default(),
        };
        tx.begin().await?;
        opened.get_or_insert_with(|| wal_files(path));
        Ok(tx)
    }

    pub async fn roll_back_after(&mut self, error: &Error) {
        self.faulted |= error.may_have_written();
        self.roll_back().await;
    }

    /// Ends a transaction that did not end in a clean commit, together with its connection.
    pub async fn roll_back(&mut self) {
        if !self.clean
            && let Some(suspect) = self.connection.take()
        {
            // The cause was reported already. Closing rolls back and unlocks even if it fails.
            drop(suspect.close_hard().await);
        }
    }

    /// SQLite continues to write into a file that was deleted or moved away. Orders that are acknowledged then would be lost with
    /// the file.
    fn require_same_file(&self) -> Result<(), Error> {
        if identity(&self.path) == self.identity {
            return Ok(());
        }
        Err(missing_file())
    }

    /// SQLite continues to write into a WAL that was deleted, for example against a lock. Its content would be lost with this
    /// process. The connection still has it, so it is written into the database here, at the latest before the next commit.
    /// Another program does not share the locks of this connection from then on, so the connection is closed.
    async fn rescue_wal(&mut self) -> Result<(), Error> {
        const DOING: &str = "writing a deleted WAL into the database";
        let (Some(connection), Some(opened)) = (&mut self.connection, self.wal_files) else { return Ok(()) };
        let [wal, shm] = wal_files(&self.path);
        if [wal, shm] == opened && wal.is_some() && shm.is_some() {
            return Ok(());
        }
        if wal != opened[0] && sizes(&self.path).wal > 0 {
            let text =
                "the WAL was deleted, and another program has written a new WAL; stop that program, then the daemon";
            return Err(Error::new(DOING, ErrorClass::Io, text));
        }
        checkpoint(connection, DOING).await?;
        tracing::error!(
            database = %self.path.display(),
            "the -wal or -shm file of the database was deleted while the daemon used it; the daemon has written its content into \
             the database, and no order is lost; never delete these files"
        );
        let Some(connection) = self.connection.take() else { return Ok(()) };
        connection.close().await.map_err(|source| failed(DOING, source))
    }

    async fn reopen(&mut self) -> Result<SqliteConnection, Error> {
        // The counts of the last connection mean nothing on this one, and its last transaction may or may not be in the file.
        self.ids.distrust();
        // Never `create_if_missing` here: a file deleted under us must not come back empty.
        let mut connection = connect(&self.options, "opening the database again").await?;
        if self.faulted {
            // A commit whose fsync failed may be in the WAL, and its messages then look processed. Copying the WAL into the
            // database writes those pages again and syncs them. Only then may a duplicate be acknowledged.
            checkpoint(&mut connection, "writing the WAL into the database").await?;
            self.faulted = false;
        }
        self.wal_files = None;
        Ok(connection)
    }

    /// SQLite begins the WAL again when a commit finds no reader in it. A long reader, or readers that overlap, prevent that, and
    /// the disk fills up. This function truncates the WAL. If it cannot, it logs the cause.
    async fn limit_wal(&mut self, connection: &mut SqliteConnection) {
        let wal_bytes = self.sizes().wal;
        if wal_bytes <= WAL_LIMIT_BYTES || Instant::now() < self.wal_due {
            return;
        }
        self.wal_due = Instant::now() + WAL_LIMIT_EVERY;
        let busy = sqlx::query_scalar("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(connection).await;
        match busy {
            Ok(0_i64) => tracing::info!(wal_bytes, "the WAL was cut back"),
            Ok(_) => tracing::warn!(
                wal_bytes,
                "the WAL grows, since another program keeps a transaction open on the database; end it before the disk is full"
            ),
            // The next transaction reports the cause if it lasts.
            Err(error) => tracing::warn!(wal_bytes, %error, "the WAL cannot be cut back"),
        }
    }

    pub fn idle_connection(&mut self) -> Option<&mut SqliteConnection> {
        self.connection.as_mut()
    }

    pub fn seal_after(&mut self, rows: usize) {
        self.ids.seal_after(rows);
    }

    pub async fn counts(&mut self) -> Result<Counts, Error> {
        let mut tx = self.begin().await?;
        let counts = counts(tx.connection).await.map_err(|source| tx.fail("counting rows", source))?;
        tx.commit().await?;
        Ok(counts)
    }

    /// Deletes up to `limit` of the oldest ids that are `prunable`. Attempts that were not updated for as long are deleted too:
    /// their message is gone, or it begins again with the first attempt if it is redelivered.
    pub async fn prune(&mut self, prunable: Prunable, limit: u32) -> Result<u64, Error> {
        const DOING: &str = "pruning ids";
        let mut tx = self.begin().await?;
        tx.forget_old_attempts(prunable.before_ns, limit).await?;
        let found = prune::find(tx.connection, prunable, limit).await.map_err(|source| tx.fail(DOING, source))?;
        let Some(going) = found else {
            tx.commit().await?;
            return Ok(0);
        };
        if let Some(gone) = prunable.gone {
            going.mark(tx.connection, gone).await.map_err(|source| tx.fail(DOING, source))?;
        }
        let last = going.last_row;
        let pruned = sqlx::query("DELETE FROM processed_ids WHERE row <= ?")
            .bind(last)
            .execute(&mut *tx.connection)
            .await
            .map_err(|source| tx.fail(DOING, source))?
            .rows_affected();
        let forgotten = tx.ids.forget(tx.connection, last).await;
        forgotten.map_err(|error| tx.failed(error))?;
        tx.commit().await?;
        self.ids.forgotten(last);
        Ok(pruned)
    }

    pub fn sizes(&self) -> Sizes {
        sizes(&self.path)
    }

    /// Moves the WAL into the database file and closes it. The file alone is then the whole database.
    pub async fn close(mut self) -> Result<(), Error> {
        const DOING: &str = "closing the database";
        let Some(mut connection) = self.connection.take().filter(|_| self.clean) else { return Ok(()) };
        let moved = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(&mut connection).await;
        let closed = connection.close().await;
        moved.map(drop).and(closed).map_err(|source| failed(DOING, source))
    }
}

/// Device and inode of the WAL and of its index.
type WalFiles = [Option<(u64, u64)>; 2];

fn wal_files(path: &Path) -> WalFiles {
    ["-wal", "-shm"].map(|suffix| identity(&beside(path, suffix)))
}

/// Writes the whole WAL into the database and syncs it.
async fn checkpoint(connection: &mut SqliteConnection, doing: &'static str) -> Result<(), Error> {
    let (busy, _, _): (i64, i64, i64) = sqlx::query_as("PRAGMA wal_checkpoint(FULL)")
        .fetch_one(connection)
        .await
        .map_err(|source| failed(doing, source))?;
    if busy != 0 {
        // SQLite then wrote a part or nothing, and reports that only in this row.
        return Err(Error::new(doing, ErrorClass::Busy, "another program has a transaction open on the database"));
    }
    Ok(())
}

async fn run_migrations(connection: &mut SqliteConnection) -> Result<(), Error> {
    const DOING: &str = "migrating the database";
    MIGRATIONS.run(connection).await.map_err(|error| match error {
        MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) => failed(DOING, source),
        other => Error::new(DOING, ErrorClass::Other, other),
    })
}

/// A file that cannot be read counts as empty.
pub fn sizes(path: &Path) -> Sizes {
    let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    Sizes { database: bytes(path), wal: bytes(&beside(path, "-wal")) }
}

/// Begins a transaction. The returned number differs from the last one if other connections have written in between.
async fn begin(connection: &mut SqliteConnection, how: &str) -> Result<i64, Error> {
    // One request for both: each request costs a way to SQLite's thread and back.
    let sql = AssertSqlSafe(format!("{how}; PRAGMA data_version"));
    let data_version = sqlx::query_scalar(sql).fetch_one(connection).await;
    data_version.map_err(|source| failed("beginning a transaction", source))
}
