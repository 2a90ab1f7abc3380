//! The store on SQLite: SQL and nothing else. One connection writes; a transaction is claimed into, applied in, committed.
//!
//! A connection whose transaction did not end in a clean commit is never used again. After SQLITE_FULL, for one, SQLite has
//! rolled back by itself and the driver does not know (seen with sqlx 0.9.0); a fresh connection knows.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::Access;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{
    SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqliteQueryResult, SqliteRow, SqliteSynchronous,
};
use sqlx::{Arguments, AssertSqlSafe, ConnectOptions, Connection, Row, SqliteConnection};
use tokio::time::Instant;

use self::ids::{Fresh, Ids, Key};
use self::lock::{Lock, LockError};
use super::{Attempts, Claim, Counts, DeadLetter, Error, OpenError, Prunable, Sizes, beside, folder, is_there};
use crate::model::delivery::{Delivery, Headers};
use crate::model::label::Label;
use crate::store::ErrorClass;

pub mod backup;
pub mod ids;
pub mod letters;
pub mod lock;
pub mod pause;

static MIGRATIONS: Migrator = sqlx::migrate!("migrations/sqlite");

/// How long a statement waits for a lock that another program holds, a shell or a backup, before the batch is put off.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a starting process waits for the one before it to let go of the file.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// Of a new database. Twice SQLite's default: a backlog fills whole pages, and each costs two writes whatever its size.
const PAGE_BYTES: u32 = 8192;
/// The WAL is copied into the database when it has so many pages, and a commit waits for that.
const CHECKPOINT_PAGES: u32 = 2_000;
/// A WAL that a long reader has made larger than this is cut back when the reader has gone.
const WAL_LIMIT_BYTES: u64 = 64 * 1024 * 1024;
/// How often that is tried, since it waits for readers as long as [`BUSY_TIMEOUT`] says.
const WAL_LIMIT_EVERY: Duration = Duration::from_secs(60);
/// Rows in one statement at most: a longer one saves little, and its megabytes stay in the driver's cache. SQLite allows 32,766
/// variables, and [`Tx::record_orders`] binds five a row.
const ROWS_MAX: usize = 1000;

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
    /// The database itself has failed since the last time that everything in the WAL was known to be on disk.
    faulted: bool,
    /// Whether `attempts` may have rows. Only the process with the lock writes it, so its happy path need not ask.
    any_attempts: bool,
    ids: Ids,
    /// No look at the size of the WAL before this.
    wal_due: Instant,
    /// None where another process may be the daemon.
    lock: Option<Lock>,
}

impl Store {
    /// Opens or creates the database, waits a while if another process has it, and brings the schema up to date.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is created or changed when the file is not ours to use.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        require_folder(path)?;
        require_sqlite(path)?;
        let lock = acquire(path, LOCK_PATIENCE).await?;
        let after_stop = lock.comes_after_a_stop();
        if is_there(path)? {
            require_known_schema(path).await?;
        } else {
            create(path).map_err(|source| unusable(path, source))?;
        }
        let mut store = Self::open_file(path, Some(lock)).await?;
        let failed = |source| OpenError::database(path, source);
        store.migrate().await.map_err(failed)?;
        if after_stop {
            store.take_back_start().await.map_err(failed)?;
        }
        // Reads the newest ids, and seals what is due, before anybody asks for one.
        store.begin().await.map_err(failed)?.commit().await.map_err(failed)?;
        Ok(store)
    }

    /// The process that had the database was ended while it drained: the run it was in, if it was a recorded one, was the last
    /// that began, and is no crash.
    async fn take_back_start(&mut self) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let taken_back = sqlx::query(
            "UPDATE attempts SET started = started - 1 \
             WHERE id = (SELECT id FROM attempts WHERE started > 0 ORDER BY updated_at DESC LIMIT 1)",
        );
        taken_back.execute(connection).await.map_err(|source| Error::new("taking back a start", source))?;
        Ok(())
    }

    /// Opens the database that this process has let go of: as [`open`](Self::open), but never makes a new one. A file that
    /// is not back yet must not come back empty.
    ///
    /// # Errors
    /// The same; a missing file may pass.
    pub async fn open_again(path: &Path) -> Result<Self, OpenError> {
        if is_there(path)? { Self::open(path).await } else { Err(OpenError::database(path, missing_file())) }
    }

    /// Tells a daemon that waits for the database that it is in use for a repair, which ends by itself.
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
        let connection = connection.map_err(|source| OpenError::database(path, source))?;
        Ok(Self {
            path: path.to_owned(),
            options,
            connection: Some(connection),
            clean: true,
            identity: identity(path),
            faulted: false,
            any_attempts: true,
            ids: Ids::default(),
            wal_due: Instant::now(),
            lock,
        })
    }

    async fn migrate(&mut self) -> Result<(), Error> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        MIGRATIONS.run(&mut *connection).await.map_err(|error| {
            let source = match error {
                MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) => source,
                other => sqlx::Error::Migrate(Box::new(other)),
            };
            Error::new("migrating the database", source)
        })?;
        self.any_attempts = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM attempts)")
            .fetch_one(connection)
            .await
            .map_err(|source| Error::new("reading the attempts", source))?;
        Ok(())
    }

    /// Begins the one transaction there can be, on a connection that is known to be sound.
    pub async fn begin(&mut self) -> Result<Tx<'_>, Error> {
        self.abandon().await;
        self.require_same_file()?;
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.reopen().await?,
        };
        self.limit_wal(&mut connection).await;
        let connection = self.connection.insert(connection);
        self.clean = false;
        let Self { clean, faulted, any_attempts, ids, .. } = self;
        let mut tx = Tx { connection, clean, faulted, any_attempts, ids, sound: true, savepoint: 0 };
        tx.begin().await?;
        Ok(tx)
    }

    /// To be called when work was given up because of `error`: lets go of the file, so that whoever else writes it need not
    /// wait until the work is tried again.
    pub async fn give_up(&mut self, error: &Error) {
        self.faulted |= error.may_have_written();
        self.abandon().await;
    }

    /// Ends a transaction that did not end in a clean commit, together with its connection.
    pub async fn abandon(&mut self) {
        if !self.clean
            && let Some(suspect) = self.connection.take()
        {
            // Whatever was wrong with it has been reported, and closing rolls back and unlocks also when it fails.
            drop(suspect.close_hard().await);
        }
    }

    /// SQLite goes on writing into a file that was deleted or moved away, and what is acknowledged then is gone with it.
    fn require_same_file(&self) -> Result<(), Error> {
        if identity(&self.path) == self.identity {
            return Ok(());
        }
        Err(missing_file())
    }

    async fn reopen(&mut self) -> Result<SqliteConnection, Error> {
        // What the last connection counted means nothing on this one, and its last transaction may or may not be in the file.
        self.ids.distrust();
        // Never `create_if_missing` here: a file deleted under us must not come back empty.
        let mut connection = connect(&self.options, "opening the database again").await?;
        if self.faulted {
            // A commit whose fsync failed may stand in the WAL all the same, and its messages will look processed. Copying
            // the WAL into the database writes those pages anew and syncs them; only then may a duplicate be acknowledged.
            const DOING: &str = "writing the WAL into the database";
            let (busy, _, _): (i64, i64, i64) = sqlx::query_as("PRAGMA wal_checkpoint(FULL)")
                .fetch_one(&mut connection)
                .await
                .map_err(|source| Error::new(DOING, source))?;
            if busy != 0 {
                // It then wrote a part or nothing, and says so in this row alone.
                let text = "another program has a transaction open on the database";
                let source = sqlx::Error::Io(io::Error::new(io::ErrorKind::ResourceBusy, text));
                return Err(Error { doing: DOING, class: ErrorClass::Busy, source });
            }
            self.faulted = false;
        }
        Ok(connection)
    }

    /// SQLite starts the WAL over when a commit finds no reader in it. A reader that stays, or one that overlaps with the next,
    /// keeps it from that; here it is insisted on, and if that is in vain somebody is told, for the disk fills up.
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
            // The transaction that comes next tells more, if this was no coincidence.
            Err(error) => tracing::warn!(wal_bytes, %error, "the WAL cannot be cut back"),
        }
    }

    /// Seals ids after so many rows instead of [`ids::SEGMENT_ROWS`], for tests that cannot write as many.
    pub fn seal_after(&mut self, rows: usize) {
        self.ids.seal_after(rows);
    }

    /// How many ids and dead letters there are. Cheap at any size.
    pub async fn counts(&mut self) -> Result<Counts, Error> {
        let mut tx = self.begin().await?;
        let counts = counts(tx.connection).await.map_err(|source| tx.fail("counting rows", source))?;
        tx.commit().await?;
        Ok(counts)
    }

    /// Drops ids as [`prune`](Self::prune) does, and counts the rows anew.
    pub async fn upkeep(&mut self, prunable: Prunable, limit: u32) -> Result<(u64, Counts), Error> {
        Ok((self.prune(prunable, limit).await?, self.counts().await?))
    }

    /// Drops up to `limit` of the oldest ids, as long as each is `prunable`. Returns how many went; fewer than `limit` means
    /// that none is left to drop. Attempts that nobody has touched for as long go with them: their message has vanished, or
    /// starts from the first attempt if it comes after all.
    pub async fn prune(&mut self, prunable: Prunable, limit: u32) -> Result<u64, Error> {
        const DOING: &str = "pruning ids";
        let mut tx = self.begin().await?;
        tx.forget_old_attempts(prunable.before_ns, limit).await?;
        let Prunable { before_ns, gone } = prunable;
        let last: Option<i64> = sqlx::query_scalar(
            "WITH oldest AS (SELECT row, processed_at, stream_seq FROM processed_ids ORDER BY row LIMIT ?1), \
             kept AS (SELECT min(row) AS first FROM oldest \
             WHERE NOT (processed_at < ?2 AND (stream_seq < ?3 OR processed_at < ?4))) \
             SELECT max(row) FROM oldest, kept WHERE first IS NULL OR row < first",
        )
        .bind(limit)
        .bind(before_ns)
        .bind(gone.map_or(i64::MAX, |gone| to_i64(gone.below_seq)))
        .bind(gone.map_or(i64::MAX, |gone| gone.stream_created_ns))
        .fetch_one(&mut *tx.connection)
        .await
        .map_err(|source| tx.fail(DOING, source))?;
        let Some(last) = last else {
            tx.commit().await?;
            return Ok(0);
        };
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

    /// What the database takes on disk; a file that cannot be looked at counts as empty.
    pub fn sizes(&self) -> Sizes {
        let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        Sizes { database: bytes(&self.path), wal: bytes(&beside(&self.path, "-wal")) }
    }

    /// Moves the WAL into the database file and closes it. The file alone is then the whole database.
    pub async fn close(mut self) -> Result<(), Error> {
        const DOING: &str = "closing the database";
        let Some(mut connection) = self.connection.take().filter(|_| self.clean) else { return Ok(()) };
        let moved = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(&mut connection).await;
        let closed = connection.close().await;
        moved.map(drop).and(closed).map_err(|source| Error::new(DOING, source))
    }
}

/// Counts read beside a running daemon, through a connection that cannot write.
///
/// # Errors
/// Also when there is no database yet, or none of this version.
pub async fn counts_of(path: &Path) -> Result<Counts, OpenError> {
    let mut connection = open_to_read(path).await.map_err(unreadable)?;
    let counts = counts(&mut connection).await;
    counts.map_err(|source| unreadable(OpenError::database(path, Error::new("counting rows", source))))
}

/// Asks what the database knows, beside a running daemon, through a connection that cannot write.
#[derive(Debug)]
pub struct Lookup {
    connection: SqliteConnection,
    ids: Ids,
}

impl Lookup {
    /// # Errors
    /// [`OpenError`] when there is no database, or none of this version.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        Ok(Self { connection: open_to_read(path).await?, ids: Ids::reading() })
    }

    /// As [`Tx::known`].
    pub async fn known(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Claim>, Error> {
        let Self { connection, ids } = self;
        let data_version = begin(connection, "BEGIN").await?;
        let known = match ids.refresh(connection, data_version).await {
            Ok(Fresh::Yes) => known(connection, ids, deliveries).await.map(|(claims, _)| claims),
            Ok(Fresh::NotYet) => Err(not_indexed()),
            Err(error) => Err(error),
        };
        // It has only read: however this ends, there is nothing to undo.
        let ended = sqlx::query("ROLLBACK").execute(connection).await;
        let known = known?;
        ended.map_err(|source| Error::new(LOOKING_UP, source))?;
        Ok(known)
    }

    /// The id under which each of `deliveries` was processed, if that is another than its own: same place in the stream, same
    /// digest, and not before it was published, which would be a message of a former stream. Reads all of `processed_ids`.
    pub async fn other_ids(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Option<String>>, Error> {
        const DOING: &str = "looking for other ids";
        let Some(oldest) = deliveries.iter().map(|delivery| delivery.raw.position.published_ns).min() else {
            return Ok(Vec::new());
        };
        let seqs: Vec<i64> = deliveries.iter().map(|delivery| to_i64(delivery.raw.position.stream_seq)).collect();
        let rows = sqlx::query(
            "SELECT id, stream_seq, digest, processed_at FROM processed_ids \
             WHERE processed_at >= ?1 AND stream_seq IN (SELECT value FROM json_each(?2)) ORDER BY row",
        )
        .bind(oldest)
        .bind(serde_json::json!(seqs).to_string())
        .fetch_all(&mut self.connection)
        .await
        .map_err(|source| Error::new(DOING, source))?;
        let mut by_seq: HashMap<i64, Vec<&SqliteRow>> = HashMap::new();
        for row in &rows {
            by_seq.entry(row.get("stream_seq")).or_default().push(row);
        }
        let other_id = |(delivery, seq): (&&Delivery, &i64)| {
            let of_it = |row: &&&SqliteRow| {
                row.get::<&[u8], _>("digest") == delivery.digest.0
                    && row.get::<i64, _>("processed_at") >= delivery.raw.position.published_ns
                    && row.get::<&str, _>("id") != &*delivery.id
            };
            by_seq.get(seq)?.iter().find(of_it).map(|row| row.get("id"))
        };
        Ok(deliveries.iter().zip(&seqs).map(other_id).collect())
    }

    /// When the oldest of the ids that are kept was processed.
    pub async fn oldest_processed_at(&mut self) -> Result<Option<i64>, Error> {
        sqlx::query_scalar("SELECT processed_at FROM processed_ids ORDER BY row LIMIT 1")
            .fetch_optional(&mut self.connection)
            .await
            .map_err(|source| Error::new("looking for the oldest id", source))
    }
}

/// Whether the file could be used by `run`, without waiting, creating or changing anything.
///
/// # Errors
/// The same as [`Store::open`]. A file that is in use is no error here: the daemon itself may be running.
pub async fn check(path: &Path) -> Result<(), OpenError> {
    require_folder(path)?;
    require_access(path)?;
    require_sqlite(path)?;
    if is_there(path)? { require_known_schema(path).await.map(drop) } else { Ok(()) }
}

/// One open transaction. Dropped without [`Tx::commit`], nothing of it happened.
#[derive(Debug)]
pub struct Tx<'s> {
    connection: &'s mut SqliteConnection,
    clean: &'s mut bool,
    faulted: &'s mut bool,
    any_attempts: &'s mut bool,
    ids: &'s mut Ids,
    /// No statement has failed and nothing was undone.
    sound: bool,
    /// Where [`Tx::undo`] returns to in `ids`.
    savepoint: usize,
}

impl Tx<'_> {
    /// The connection, for a handler's own statements. See [`crate::handler::Handler`] for what is not allowed on it.
    pub fn sqlite(&mut self) -> &mut SqliteConnection {
        self.connection
    }

    async fn begin(&mut self) -> Result<(), Error> {
        let data_version = begin(self.connection, "BEGIN IMMEDIATE").await.map_err(|error| self.failed(error))?;
        loop {
            let fresh = self.ids.refresh(self.connection, data_version).await.map_err(|error| self.failed(error))?;
            if self.ids.is_full() {
                self.ids.seal(self.connection).await.map_err(|error| self.failed(error))?;
            }
            if fresh == Fresh::Yes {
                return Ok(());
            }
        }
    }

    /// Claims the ids of `deliveries`, which must differ from each other, and says of each what came of it.
    pub async fn claim(&mut self, deliveries: &[&Delivery], now_ns: i64) -> Result<Vec<Claim>, Error> {
        let (claims, keys) = known(self.connection, self.ids, deliveries).await.map_err(|error| self.failed(error))?;
        let rows = keys.into_iter().zip(deliveries.iter().copied()).zip(&claims);
        let new: Vec<(Key, &Delivery)> = rows.filter(|(_, claim)| **claim == Claim::New).map(|(row, _)| row).collect();
        for chunk in chunks(&new) {
            let sql =
                values("INSERT INTO processed_ids (id, stream_seq, digest, processed_at) VALUES ", 4, chunk.len(), "");
            let mut arguments = SqliteArguments::default();
            for (_, delivery) in chunk {
                bind(&mut arguments, delivery.id.clone())?;
                bind(&mut arguments, to_i64(delivery.raw.position.stream_seq))?;
                bind(&mut arguments, delivery.digest.0.as_slice())?;
                // A clock that is behind must not make the id look older than its message: it would be pruned too early.
                bind(&mut arguments, now_ns.max(delivery.raw.position.published_ns))?;
            }
            let done = self.execute("claiming ids", sql, arguments).await?;
            // One statement numbers its rows one after the other (sqlite.org/autoinc.html: AUTOINCREMENT adds one).
            self.ids.add(chunk, done.last_insert_rowid());
        }
        Ok(claims)
    }

    /// What the database knows of each of `deliveries`, in their order, without claiming anything.
    pub async fn known(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Claim>, Error> {
        let known = known(self.connection, self.ids, deliveries).await.map_err(|error| self.failed(error))?;
        Ok(known.0)
    }

    /// Keeps `deliveries` in `orders`: the effect of the built-in handler.
    pub async fn record_orders(&mut self, deliveries: &[&Delivery]) -> Result<(), Error> {
        for chunk in chunks(deliveries) {
            let sql = values(
                "INSERT INTO orders (id, subject, stream_seq, published_at, payload) VALUES ",
                5,
                chunk.len(),
                "",
            );
            let mut arguments = SqliteArguments::default();
            for delivery in chunk {
                bind(&mut arguments, delivery.id.clone())?;
                bind(&mut arguments, delivery.raw.subject.clone())?;
                bind(&mut arguments, to_i64(delivery.raw.position.stream_seq))?;
                bind(&mut arguments, delivery.raw.position.published_ns)?;
                bind(&mut arguments, delivery.raw.payload.as_ref())?;
            }
            self.execute("recording orders", sql, arguments).await?;
        }
        Ok(())
    }

    /// Writes a dead letter; `false` if the same message lies there already, or did until an operator dealt with it.
    pub async fn bury(&mut self, letter: &DeadLetter<'_>, now_ns: i64) -> Result<bool, Error> {
        let DeadLetter { delivery, reason, error } = letter;
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, delivery.id.clone())?;
        bind(&mut arguments, delivery.raw.subject.clone())?;
        bind(&mut arguments, to_i64(delivery.raw.position.stream_seq))?;
        bind(&mut arguments, to_i64(delivery.raw.position.delivered))?;
        bind(&mut arguments, reason.name())?;
        bind(&mut arguments, *error)?;
        bind(&mut arguments, headers_json(&delivery.raw.headers))?;
        bind(&mut arguments, delivery.raw.payload.as_ref())?;
        bind(&mut arguments, now_ns)?;
        bind(&mut arguments, delivery.digest.0.as_slice())?;
        bind(&mut arguments, delivery.raw.position.published_ns)?;
        let sql = "INSERT INTO dead_letters \
             (id, subject, stream_seq, delivered, reason, error, headers, payload, dead_at, digest, published_at) \
             SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11 \
             WHERE NOT EXISTS (SELECT 1 FROM closed_letters WHERE id = ?1 AND digest = ?10) \
             ON CONFLICT (id, digest) DO NOTHING";
        self.ids.any_letters = true;
        Ok(self.execute("writing a dead letter", sql.to_owned(), arguments).await?.rows_affected() > 0)
    }

    /// The runs over a message that did not succeed so far.
    pub async fn attempts(&mut self, id: &str) -> Result<Attempts, Error> {
        if !*self.any_attempts {
            return Ok(Attempts::default());
        }
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, id)?;
        let sql = "SELECT failed, started FROM attempts WHERE id = ?".to_owned();
        let rows = self.fetch("reading the attempts", sql, arguments).await?;
        Ok(rows.first().map_or_else(Attempts::default, |row| Attempts { failed: row.get(0), started: row.get(1) }))
    }

    /// Stores the runs over a message. `error` is what the last failure said, if one is to be noted.
    pub async fn set_attempts(
        &mut self,
        id: &str,
        attempts: Attempts,
        error: Option<&str>,
        now_ns: i64,
    ) -> Result<(), Error> {
        *self.any_attempts = true;
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, id)?;
        bind(&mut arguments, attempts.failed)?;
        bind(&mut arguments, attempts.started)?;
        bind(&mut arguments, error)?;
        bind(&mut arguments, now_ns)?;
        let sql = "INSERT INTO attempts (id, failed, started, last_error, updated_at) VALUES (?, ?, ?, ?, ?) \
             ON CONFLICT (id) DO UPDATE SET failed = excluded.failed, started = excluded.started, \
             last_error = coalesce(excluded.last_error, last_error), updated_at = excluded.updated_at";
        self.execute("writing the attempts", sql.to_owned(), arguments).await.map(drop)
    }

    /// Forgets the attempts of messages that have their outcome.
    pub async fn forget_attempts(&mut self, deliveries: &[&Delivery]) -> Result<(), Error> {
        if !*self.any_attempts {
            return Ok(());
        }
        for chunk in chunks(deliveries) {
            let sql = values("DELETE FROM attempts WHERE id IN (VALUES ", 1, chunk.len(), ")");
            let mut arguments = SqliteArguments::default();
            for delivery in chunk {
                bind(&mut arguments, delivery.id.clone())?;
            }
            self.execute("forgetting attempts", sql, arguments).await?;
        }
        Ok(())
    }

    async fn forget_old_attempts(&mut self, before_ns: i64, limit: u32) -> Result<(), Error> {
        if !*self.any_attempts {
            return Ok(());
        }
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, before_ns)?;
        bind(&mut arguments, limit)?;
        let sql = "DELETE FROM attempts WHERE id IN (SELECT id FROM attempts WHERE updated_at < ? LIMIT ?)".to_owned();
        self.execute("forgetting old attempts", sql, arguments).await.map(drop)
    }

    /// Marks the point that [`Tx::undo`] returns to.
    pub async fn savepoint(&mut self) -> Result<(), Error> {
        self.savepoint = self.ids.staged();
        self.execute("setting a savepoint", "SAVEPOINT message".to_owned(), SqliteArguments::default()).await.map(drop)
    }

    /// Keeps what was done since the savepoint.
    pub async fn keep(&mut self) -> Result<(), Error> {
        self.execute("releasing a savepoint", "RELEASE message".to_owned(), SqliteArguments::default()).await.map(drop)
    }

    /// Undoes what was done since the savepoint.
    pub async fn undo(&mut self) -> Result<(), Error> {
        const DOING: &str = "returning to a savepoint";
        self.sound = false;
        self.ids.unstage(self.savepoint);
        self.execute(DOING, "ROLLBACK TO message".to_owned(), SqliteArguments::default()).await?;
        self.execute(DOING, "RELEASE message".to_owned(), SqliteArguments::default()).await.map(drop)
    }

    /// Makes it durable: returns after the WAL is on disk.
    ///
    /// # Errors
    /// The outcome is then unknown. Nothing may be acknowledged; the ids tell the truth when the messages come again.
    pub async fn commit(mut self) -> Result<(), Error> {
        self.execute("committing", "COMMIT".to_owned(), SqliteArguments::default()).await?;
        self.ids.committed();
        *self.clean = self.sound;
        Ok(())
    }

    async fn execute(
        &mut self,
        doing: &'static str,
        sql: String,
        arguments: SqliteArguments,
    ) -> Result<SqliteQueryResult, Error> {
        sqlx::query_with(AssertSqlSafe(sql), arguments)
            .execute(&mut *self.connection)
            .await
            .map_err(|source| self.fail(doing, source))
    }

    async fn fetch(
        &mut self,
        doing: &'static str,
        sql: String,
        arguments: SqliteArguments,
    ) -> Result<Vec<SqliteRow>, Error> {
        sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(&mut *self.connection)
            .await
            .map_err(|source| self.fail(doing, source))
    }

    fn fail(&mut self, doing: &'static str, source: sqlx::Error) -> Error {
        self.failed(Error::new(doing, source))
    }

    fn failed(&mut self, error: Error) -> Error {
        self.sound = false;
        *self.faulted |= error.may_have_written();
        error
    }
}

impl Error {
    /// Classifies what SQLite said by its extended result code (sqlite.org/rescode.html).
    pub fn new(doing: &'static str, source: sqlx::Error) -> Self {
        let code = source.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
        let class = match code.map(|code| code & 0xff) {
            Some(5 | 6) => ErrorClass::Busy,
            Some(8) => ErrorClass::ReadOnly,
            Some(10 | 14) => ErrorClass::Io,
            Some(11 | 26) => ErrorClass::Corrupt,
            Some(13) => ErrorClass::Full,
            // Too big, constraint, type mismatch: all about the values of one row.
            Some(18..=20) => ErrorClass::Constraint,
            Some(_) => ErrorClass::Other,
            None => match &source {
                sqlx::Error::Io(error) => io_class(error),
                _ => ErrorClass::Other,
            },
        };
        Self { doing, class, source }
    }
}

fn missing_file() -> Error {
    let text = "the file was moved, removed or replaced; put it back, or restart to use what is there now";
    Error::new("looking for the database file", sqlx::Error::Io(io::Error::new(io::ErrorKind::NotFound, text)))
}

/// Makes an empty file, which SQLite takes for a new database, for the owner alone. SQLite gives the files that it puts
/// beside it the same mode.
fn create(path: &Path) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map(drop)
}

fn io_class(error: &io::Error) -> ErrorClass {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorClass::Full,
        io::ErrorKind::ReadOnlyFilesystem => ErrorClass::ReadOnly,
        _ => ErrorClass::Io,
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

async fn acquire(path: &Path, patience: Duration) -> Result<Lock, OpenError> {
    let deadline = Instant::now() + patience;
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

/// What time may mend is waited for; the rest is for the operator.
fn unusable(path: &Path, source: io::Error) -> OpenError {
    let class = io_class(&source);
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::PermissionDenied => OpenError::NotWritable { path, source },
        _ if class == ErrorClass::Io => OpenError::Io { path, source },
        _ => OpenError::Database { path, source: Error::new("locking the database", sqlx::Error::Io(source)) },
    }
}

fn require_folder(path: &Path) -> Result<(), OpenError> {
    let folder = folder(path);
    if is_there(folder)? && folder.is_dir() { Ok(()) } else { Err(OpenError::MissingFolder(folder.to_owned())) }
}

/// SQLite needs to make files of its own beside the database.
fn require_access(path: &Path) -> Result<(), OpenError> {
    let folder_access = (folder(path), Access::WRITE_OK | Access::EXEC_OK);
    let file_access = is_there(path)?.then_some((path, Access::READ_OK | Access::WRITE_OK));
    for (path, access) in [folder_access].into_iter().chain(file_access) {
        rustix::fs::access(path, access).map_err(|error| unusable(path, error.into()))?;
    }
    Ok(())
}

/// That there is a file, and one for us to read, without opening it.
fn require_readable(path: &Path) -> Result<(), OpenError> {
    if !is_there(path)? {
        return Err(OpenError::Missing(path.to_owned()));
    }
    match rustix::fs::access(path, Access::READ_OK).map_err(io::Error::from) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(OpenError::NotReadable(path.to_owned())),
        // Whatever else may be wrong with it is found by whoever reads it.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// What keeps a reader out. SQLite needs to write beside the database also to read it, and tells only by a code.
fn unreadable(error: OpenError) -> OpenError {
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

/// Looks at the first bytes before anything opens the file for writing.
fn require_sqlite(path: &Path) -> Result<(), OpenError> {
    const MAGIC: &[u8] = b"SQLite format 3\0";
    let io_error = |source: io::Error| match (is_there(path), source.kind()) {
        (Err(unseen), _) => unseen,
        (Ok(_), io::ErrorKind::PermissionDenied) => OpenError::NotReadable(path.to_owned()),
        (Ok(_), _) => unusable(path, source),
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error(error)),
    };
    let mut head = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut head).map_err(io_error)?;
    // An empty file is what SQLite itself makes of a database without tables.
    if head.is_empty() || head == MAGIC { Ok(()) } else { Err(OpenError::NotADatabase(path.to_owned())) }
}

/// That there is a database of this very version, for commands that work beside the daemon.
async fn require_beside(path: &Path) -> Result<(), OpenError> {
    require_readable(path)?;
    require_sqlite(path)?;
    let applied = require_known_schema(path).await.map_err(unreadable)?;
    if applied < MIGRATIONS.iter().count() { Err(OpenError::Older(path.to_owned())) } else { Ok(()) }
}

/// Compares the migrations that the file has seen with ours, before any of them runs. Returns how many it has seen.
async fn require_known_schema(path: &Path) -> Result<usize, OpenError> {
    let failed = |source| OpenError::database(path, source);
    let mut connection = connect(&options(path), "opening the database").await.map_err(failed)?;
    let reading = |source| failed(Error::new("reading the schema", source));
    let (tables, ours): (i64, bool) = sqlx::query_as(
        "SELECT count(*), coalesce(max(name = '_sqlx_migrations'), 0) FROM sqlite_schema WHERE type = 'table'",
    )
    .fetch_one(&mut connection)
    .await
    .map_err(reading)?;
    if tables > 0 && !ours {
        return Err(OpenError::NotOurs(path.to_owned()));
    }
    let mut seen = 0;
    if ours {
        let applied: Vec<(i64, Vec<u8>)> =
            sqlx::query_as("SELECT version, checksum FROM _sqlx_migrations ORDER BY version")
                .fetch_all(&mut connection)
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
    connection.close().await.map_err(reading)?;
    Ok(seen)
}

fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .busy_timeout(BUSY_TIMEOUT)
        // Rows of one statement that may wait for us: SQLite's thread need not stop in the middle of a batch.
        .row_buffer_size(ROWS_MAX)
        .disable_statement_logging()
}

async fn connect(options: &SqliteConnectOptions, doing: &'static str) -> Result<SqliteConnection, Error> {
    options.connect().await.map_err(|source| Error::new(doing, source))
}

/// A connection beside a running daemon, that cannot write.
///
/// # Errors
/// [`OpenError`] when there is no database, or none of this version.
async fn open_to_read(path: &Path) -> Result<SqliteConnection, OpenError> {
    require_beside(path).await?;
    let connection = connect(&options(path).read_only(true), OPENING_TO_READ).await;
    connection.map_err(|source| OpenError::database(path, source))
}

async fn counts(connection: &mut SqliteConnection) -> Result<Counts, sqlx::Error> {
    // Two subqueries, since SQLite looks min and max up in the B-tree only when each stands alone.
    let (ids, dead): (i64, i64) = sqlx::query_as(
        "SELECT coalesce((SELECT max(row) FROM processed_ids) - (SELECT min(row) FROM processed_ids) + 1, 0), \
         (SELECT count(*) FROM dead_letters)",
    )
    .fetch_one(connection)
    .await?;
    Ok(Counts { processed_ids: ids.unsigned_abs(), dead_letters: dead.unsigned_abs() })
}

const OPENING_TO_READ: &str = "opening the database to read";
const LOOKING_UP: &str = "looking ids up";

/// Begins a transaction, and says whether others have written since the last one: then the number is another.
async fn begin(connection: &mut SqliteConnection, how: &str) -> Result<i64, Error> {
    // In one go, since each costs a way to SQLite's thread and back.
    let sql = AssertSqlSafe(format!("{how}; PRAGMA data_version"));
    let data_version = sqlx::query_scalar(sql).fetch_one(connection).await;
    data_version.map_err(|source| Error::new("beginning a transaction", source))
}

fn not_indexed() -> Error {
    let text = "ids that were put into the database by hand are being indexed; try again when the daemon is ready";
    let source = sqlx::Error::Io(io::Error::new(io::ErrorKind::ResourceBusy, text));
    Error { doing: LOOKING_UP, class: ErrorClass::Busy, source }
}

/// What the database knows of each of `deliveries`, in their order, and the keys of their ids.
async fn known(
    connection: &mut SqliteConnection,
    ids: &Ids,
    deliveries: &[&Delivery],
) -> Result<(Vec<Claim>, Vec<Key>), Error> {
    let (found, keys) = ids.find(connection, deliveries).await?;
    let mut claims: Vec<Claim> = found.into_iter().map(|digest| digest.map_or(Claim::New, Claim::Processed)).collect();
    if !ids.any_letters {
        return Ok((claims, keys));
    }
    let same = |(index, claim): &(usize, &Claim)| **claim == Claim::Processed(deliveries[*index].digest);
    let others: Vec<usize> = claims.iter().enumerate().filter(|it| !same(it)).map(|(index, _)| index).collect();
    for chunk in chunks(&others) {
        let sql = values(
            "SELECT column3 FROM (VALUES ",
            3,
            chunk.len(),
            ") WHERE EXISTS (SELECT 1 FROM dead_letters WHERE id = column1 AND digest = column2) \
             OR EXISTS (SELECT 1 FROM closed_letters WHERE id = column1 AND digest = column2)",
        );
        let mut arguments = SqliteArguments::default();
        for index in chunk {
            bind(&mut arguments, deliveries[*index].id.clone())?;
            bind(&mut arguments, deliveries[*index].digest.0.as_slice())?;
            bind(&mut arguments, *index as i64)?;
        }
        let dead = sqlx::query_scalar_with(AssertSqlSafe(sql), arguments).fetch_all(&mut *connection).await;
        for index in dead.map_err(|source| Error::new(LOOKING_UP, source))? {
            let index: i64 = index;
            claims[index as usize] = Claim::Dead;
        }
    }
    Ok((claims, keys))
}

/// Cuts a batch into runs of [`ROWS_MAX`], and what is left into runs whose lengths are powers of two, so that a handful of
/// statement texts serve every batch and stay in the driver's cache.
fn chunks<T>(mut rows: &[T]) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let length = match rows.len() {
            0 => return None,
            ROWS_MAX.. => ROWS_MAX,
            length => 1 << length.ilog2(),
        };
        let (chunk, rest) = rows.split_at(length);
        rows = rest;
        Some(chunk)
    })
}

/// `before (?,?),(?,?) after`
fn values(before: &str, columns: usize, rows: usize, after: &str) -> String {
    let row = format!("({}),", vec!["?"; columns].join(","));
    let rows = row.repeat(rows);
    format!("{before}{}{after}", rows.strip_suffix(',').unwrap_or_default())
}

fn bind<'a, T>(arguments: &mut SqliteArguments, value: T) -> Result<(), Error>
where
    T: sqlx::Encode<'a, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
{
    arguments.add(value).map_err(|source| Error::new("binding a value", sqlx::Error::Encode(source)))
}

/// A JSON object: name -> array of values.
fn headers_json(headers: &Headers) -> String {
    let mut values: HashMap<&str, Vec<&str>> = HashMap::new();
    for (name, value) in headers {
        values.entry(name).or_default().push(value);
    }
    serde_json::json!(values).to_string()
}

/// SQLite integers are signed; a stream of 2^63 messages is out of this world.
fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
