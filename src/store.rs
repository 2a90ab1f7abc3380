//! The database: all that the other rooms may know of it. No code outside this room depends on an SQL dialect, with one
//! exception: a handler writes its own statements on a [`Connection`].
//!
//! [`Store`], [`Tx`] and [`Reader`] have one arm for each database. The contract that each arm must fulfil is the suite
//! `store::*` in `tests/it`.
//!
//! Longer than most files: each verb of three enums stands here with what it promises.

use std::path::Path;

pub use binding::{Accepted, Bind, Binding, Unbound};
pub use error::{Error, ErrorClass, OpenError};
pub use pause::Pause;
use sqlx::SqliteConnection;
pub use types::{
    Anchor, Attempts, AttemptsRecord, AuditMark, Claim, Contents, Counts, Direction, Earlier, Gone, Holder, IdRecord,
    Mark, OutboxHead, OutboxStep, OutboxTaken, Presence, ProcessedId, ProcessedRow, Prunable, Retry, Rows, SeqRecord,
    Sizes,
};

use crate::config::Database;
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::model::letter::{Closed, Envelope, Letter, Pile, Which};
use crate::model::outbox::OutboxRow;
use crate::model::outcome::Outcome;
use crate::model::ranges::Range;
use crate::model::schemes::{IdSchemes, IdSettings};

mod binding;
mod error;
mod pause;
pub mod sql;
mod sqlite;
mod types;

/// The database of one daemon, open for writing.
#[derive(Debug)]
pub enum Store {
    Sqlite(Box<sqlite::Store>),
}

/// One open transaction. If it is dropped without [`Tx::commit`], nothing of it happened.
#[derive(Debug)]
pub enum Tx<'s> {
    Sqlite(sqlite::Tx<'s>),
}

/// A second connection to the database of a daemon that may be running. It cannot write.
#[derive(Debug)]
pub enum Reader {
    Sqlite(sqlite::Reader),
}

/// A database in memory with the schema of a real one, to try statements on.
#[derive(Debug)]
pub enum Scratch {
    Sqlite(Box<sqlite::scratch::SchemaCopy>),
}

/// The connection of a [`Tx`], for the statements of a handler.
#[derive(Debug)]
pub enum Connection<'c> {
    Sqlite(&'c mut SqliteConnection),
}

impl Store {
    /// Opens or creates the database and updates its schema. Waits for a while if another process has the database.
    ///
    /// # Errors
    /// [`OpenError`]. Nothing is created or changed if the database is not ours to use.
    pub async fn open(database: &Database) -> Result<Self, OpenError> {
        match database {
            Database::Sqlite(path) => Ok(Self::Sqlite(Box::new(sqlite::Store::open(path).await?))),
        }
    }

    /// As [`open`](Self::open), but never creates a database: one that this process has used must not come back empty.
    ///
    /// # Errors
    /// [`OpenError`]. That the database is missing is an error that may pass.
    pub async fn open_again(database: &Database) -> Result<Self, OpenError> {
        match database {
            Database::Sqlite(path) => Ok(Self::Sqlite(Box::new(sqlite::Store::open_again(path).await?))),
        }
    }

    /// Opens the database of a daemon that may be running: without its lock, and without creating or updating anything.
    /// Such a store must never write `attempts`: the daemon remembers whether that table has rows.
    ///
    /// # Errors
    /// [`OpenError`] if there is no database of this version.
    pub async fn open_beside(database: &Database) -> Result<Self, OpenError> {
        match database {
            Database::Sqlite(path) => Ok(Self::Sqlite(Box::new(sqlite::Store::open_beside(path).await?))),
        }
    }

    /// Names a repair as the holder of the database. A daemon that waits for the database then knows that the holder ends by itself.
    pub fn sign_as_repair(&mut self) {
        match self {
            Self::Sqlite(store) => store.sign_as_repair(),
        }
    }

    /// The connection outside a transaction, for what a handler prepares; `None` if it was lost.
    pub fn idle_connection(&mut self) -> Option<Connection<'_>> {
        match self {
            Self::Sqlite(store) => store.idle_connection().map(Connection::Sqlite),
        }
    }

    /// Begins the one transaction that a store can have, on a connection that is known to be sound.
    pub async fn begin(&mut self) -> Result<Tx<'_>, Error> {
        match self {
            Self::Sqlite(store) => store.begin().await.map(Tx::Sqlite),
        }
    }

    /// Must be called if work ended because of `error`. Ends the transaction, so that other writers need not wait until the
    /// work is tried again.
    pub async fn roll_back_after(&mut self, error: &Error) {
        match self {
            Self::Sqlite(store) => store.roll_back_after(error).await,
        }
    }

    /// Ends a transaction that was dropped without a commit.
    pub async fn roll_back(&mut self) {
        match self {
            Self::Sqlite(store) => store.roll_back().await,
        }
    }

    /// Deletes up to `limit` of the oldest ids that are `prunable`, and counts the rows. Returns how many ids were deleted;
    /// fewer than `limit` means that no other id is prunable. Attempts that were not updated for as long are deleted too.
    pub async fn upkeep(&mut self, prunable: Prunable, limit: u32) -> Result<(u64, Counts), Error> {
        match self {
            Self::Sqlite(store) => Ok((store.prune(prunable, limit).await?, store.counts().await?)),
        }
    }

    /// Compares the consumer with the record of this database, and records the consumer if they belong together. Must be called at
    /// every bind, before the first acknowledgement.
    ///
    /// Records how ids are made as well: from the first bind on, and again when the settings have changed.
    pub async fn bind(&mut self, bind: &Bind, settings: &IdSettings) -> Result<Result<Accepted, Unbound>, Error> {
        match self {
            Self::Sqlite(store) => store.bind(bind, settings).await,
        }
    }

    /// How ids are made, as recorded. Without a record, the settings hold for all messages.
    pub async fn id_schemes(&mut self, settings: &IdSettings) -> Result<IdSchemes, Error> {
        match self {
            Self::Sqlite(store) => store.id_schemes(settings).await,
        }
    }

    /// The same, and a new database gets a record: its first ids are about to be made.
    pub async fn record_id_schemes(&mut self, settings: &IdSettings) -> Result<IdSchemes, Error> {
        match self {
            Self::Sqlite(store) => store.record_id_schemes(settings).await,
        }
    }

    /// Records that the consumer belongs to this database from now on, because an operator says so. Returns the record.
    pub async fn adopt(&mut self, bind: &Bind) -> Result<Binding, Error> {
        match self {
            Self::Sqlite(store) => store.adopt(bind).await,
        }
    }

    /// Records where the daemon's own audit stands.
    pub async fn set_audit_mark(&mut self, mark: &AuditMark) -> Result<(), Error> {
        match self {
            Self::Sqlite(store) => store.set_audit_mark(mark).await,
        }
    }

    /// Deletes rows of the outbox that are published, records where the others can be, and returns the oldest rows.
    pub async fn take_outbox(&mut self, step: &OutboxStep) -> Result<OutboxTaken, Error> {
        match self {
            Self::Sqlite(store) => store.take_outbox(step).await,
        }
    }

    /// How many rows the outbox had when the database was opened.
    pub fn outbox_rows_at_open(&self) -> u64 {
        match self {
            Self::Sqlite(store) => store.outbox_rows_at_open(),
        }
    }

    /// The last row of the outbox that was committed, as far as this store knows.
    pub fn last_outbox_row(&self) -> i64 {
        match self {
            Self::Sqlite(store) => store.last_outbox_row(),
        }
    }

    /// How many ids, dead letters and rows of the outbox there are. Cheap at any size of the first two.
    pub async fn counts(&mut self) -> Result<Counts, Error> {
        match self {
            Self::Sqlite(store) => store.counts().await,
        }
    }

    /// The retries of orders with a key that were not done when the database was opened.
    pub fn retries(&self) -> &[Retry] {
        match self {
            Self::Sqlite(store) => store.retries(),
        }
    }

    /// The sizes of the database on disk.
    pub fn sizes(&self) -> Sizes {
        match self {
            Self::Sqlite(store) => store.sizes(),
        }
    }

    /// Closes the database. All that was committed is then in the database file alone.
    pub async fn close(self) -> Result<(), Error> {
        match self {
            Self::Sqlite(store) => store.close().await,
        }
    }

    /// Makes the index of the ids smaller steps, for tests that cannot write 50,000 rows.
    pub fn seal_after(&mut self, rows: usize) {
        match self {
            Self::Sqlite(store) => store.seal_after(rows),
        }
    }
}

impl Tx<'_> {
    /// The connection, for the statements of a handler. [`crate::handler::Handler`] says what is not allowed on it.
    pub fn connection(&mut self) -> Connection<'_> {
        match self {
            Self::Sqlite(tx) => Connection::Sqlite(tx.connection()),
        }
    }

    /// What the database knows of each of `deliveries`, in their order. Claims nothing.
    pub async fn known(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Claim>, Error> {
        match self {
            Self::Sqlite(tx) => tx.known(deliveries).await,
        }
    }

    /// The message that was processed under an id. For the text of a conflict.
    pub async fn earlier(&mut self, id: &str) -> Result<Option<Earlier>, Error> {
        match self {
            Self::Sqlite(tx) => tx.earlier(id).await,
        }
    }

    /// Claims the ids of `deliveries`, which must differ from each other. Returns what came of each claim.
    pub async fn claim(&mut self, deliveries: &[&Delivery], now_ns: i64) -> Result<Vec<Claim>, Error> {
        match self {
            Self::Sqlite(tx) => tx.claim(deliveries, now_ns).await,
        }
    }

    /// The runs of the handler on a message so far that did not succeed.
    pub async fn attempts(&mut self, id: &str) -> Result<Attempts, Error> {
        match self {
            Self::Sqlite(tx) => tx.attempts(id).await,
        }
    }

    /// Stores the runs of the handler on a message. `error` is the text of the last failure, if there is a new one.
    pub async fn set_attempts(
        &mut self,
        id: &str,
        attempts: Attempts,
        error: Option<&str>,
        now_ns: i64,
    ) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.set_attempts(id, attempts, error, now_ns).await,
        }
    }

    /// Records where and when an order with a key has its retry.
    pub async fn set_retry(&mut self, id: &str, retry: &Retry) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.set_retry(id, retry).await,
        }
    }

    /// Records final outcomes: writes the dead letters and deletes the attempts. An outcome `DeadLettered` becomes `Duplicate`
    /// if the same message is a dead letter already, or was one until an operator dealt with it. A `Retry` is not final and
    /// is left alone.
    pub async fn record(&mut self, decided: &mut [(&Delivery, &mut Outcome)], now_ns: i64) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.record(decided, now_ns).await,
        }
    }

    /// Sets the point that [`Tx::undo`] returns to.
    pub async fn savepoint(&mut self) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.savepoint().await,
        }
    }

    /// Keeps what was done since the savepoint.
    pub async fn keep(&mut self) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.keep().await,
        }
    }

    /// Undoes what was done since the savepoint.
    pub async fn undo(&mut self) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.undo().await,
        }
    }

    /// Makes the transaction durable: returns after its data is on disk.
    ///
    /// # Errors
    /// The outcome is then unknown. Nothing may be acknowledged; the ids decide when the messages are redelivered.
    pub async fn commit(self) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.commit().await,
        }
    }

    /// The rows of the outbox that this transaction has written since the last call.
    pub async fn outbox_written(&mut self) -> Result<Vec<OutboxRow>, Error> {
        match self {
            Self::Sqlite(tx) => tx.outbox_written().await,
        }
    }

    /// Records that the messages of `rows` may have been published since `from_ns`, before the rows existed.
    pub async fn seek_outbox_rows(&mut self, rows: &[OutboxRow], from_ns: i64) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.seek_outbox_rows(rows, from_ns).await,
        }
    }

    /// Removes a dead letter and returns it; `None` if it no longer exists. The caller must [record](Self::record_closed) what
    /// became of it.
    pub async fn take_letter(&mut self, id: &str, digest: Digest) -> Result<Option<Letter>, Error> {
        match self {
            Self::Sqlite(tx) => tx.take_letter(id, digest).await,
        }
    }

    /// Records what an operator did with a dead letter.
    pub async fn record_closed(&mut self, letter: &Letter, closed: &Closed) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.record_closed(letter, closed).await,
        }
    }

    /// Stores the text of the newest failure of a dead letter.
    pub async fn set_letter_error(&mut self, id: &str, digest: Digest, error: &str) -> Result<(), Error> {
        match self {
            Self::Sqlite(tx) => tx.set_letter_error(id, digest, error).await,
        }
    }
}

impl Reader {
    /// # Errors
    /// [`OpenError`] if there is no database of this version.
    pub async fn open(database: &Database) -> Result<Self, OpenError> {
        match database {
            Database::Sqlite(path) => sqlite::Reader::open(path).await.map(Self::Sqlite),
        }
    }

    /// As [`Tx::known`].
    pub async fn known(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Claim>, Error> {
        match self {
            Self::Sqlite(reader) => reader.known(deliveries).await,
        }
    }

    /// The id under which each of `deliveries` was processed, if it is not its own id: the same place in the stream, the same
    /// digest, and not processed before it was published. Reads all of `processed_ids`.
    pub async fn other_ids(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Option<String>>, Error> {
        match self {
            Self::Sqlite(reader) => reader.other_ids(deliveries).await,
        }
    }

    /// What the tables have about a message id. Takes milliseconds at any number of ids: it neither needs nor loads what a store keeps
    /// in memory.
    pub async fn find(&mut self, id: &str) -> Result<IdRecord, Error> {
        match self {
            Self::Sqlite(reader) => reader.find(id).await,
        }
    }

    /// What the tables have about a sequence of the stream. No index leads there, so only the rows around the place are compared at
    /// which the sequence is expected: rows are nearly in the order of the stream.
    pub async fn find_seq(&mut self, stream_seq: u64) -> Result<SeqRecord, Error> {
        match self {
            Self::Sqlite(reader) => reader.find_seq(stream_seq).await,
        }
    }

    /// The consumer that the database belongs to; `None` in a database that was never bound.
    pub async fn binding(&mut self) -> Result<Option<Binding>, Error> {
        match self {
            Self::Sqlite(reader) => reader.binding().await,
        }
    }

    /// What [`Store::bind`] would answer. Records nothing.
    pub async fn judge(&mut self, bind: &Bind) -> Result<Result<(), Unbound>, Error> {
        match self {
            Self::Sqlite(reader) => reader.judge(bind).await,
        }
    }

    /// How ids are made, as recorded; `None` without a record.
    pub async fn id_schemes(&mut self, settings: &IdSettings) -> Result<Option<IdSchemes>, Error> {
        match self {
            Self::Sqlite(reader) => reader.id_schemes(settings).await,
        }
    }

    /// Where the daemon's own audit stands; `None` if no audit has ended yet.
    pub async fn audit_mark(&mut self) -> Result<Option<AuditMark>, Error> {
        match self {
            Self::Sqlite(reader) => reader.audit_mark().await,
        }
    }

    /// Up to `limit` rows of `processed_ids` below `below_row`, the newest first.
    pub async fn newest_rows(&mut self, below_row: i64, limit: u32) -> Result<Vec<ProcessedRow>, Error> {
        match self {
            Self::Sqlite(reader) => reader.newest_rows(below_row, limit).await,
        }
    }

    /// Up to `limit` sequences in `range` whose messages became dead letters since then.
    pub async fn letter_seqs(&mut self, range: Range, since_ns: i64, limit: u32) -> Result<Vec<u64>, Error> {
        match self {
            Self::Sqlite(reader) => reader.letter_seqs(range, since_ns, limit).await,
        }
    }

    /// When the oldest of the kept ids was processed.
    pub async fn oldest_processed_at(&mut self) -> Result<Option<i64>, Error> {
        match self {
            Self::Sqlite(reader) => reader.oldest_processed_at().await,
        }
    }

    /// As [`Store::counts`].
    pub async fn counts(&mut self) -> Result<Counts, Error> {
        match self {
            Self::Sqlite(reader) => reader.counts().await,
        }
    }

    /// Up to `limit` dead letters with the rows that they are in, and the rows that are left to read. A page may have fewer
    /// letters than `limit` although more exist: the end is reached when no rows are left.
    pub async fn page(
        &mut self,
        of: Pile,
        which: &Which,
        rows: Rows,
        direction: Direction,
        limit: u32,
    ) -> Result<(Vec<(i64, Envelope)>, Option<Rows>), Error> {
        match self {
            Self::Sqlite(reader) => reader.page(of, which, rows, direction, limit).await,
        }
    }

    /// The dead letter in a row; `None` if it no longer exists.
    pub async fn letter(&mut self, of: Pile, row: i64) -> Result<Option<Letter>, Error> {
        match self {
            Self::Sqlite(reader) => reader.letter(of, row).await,
        }
    }

    /// The last row of the open dead letters.
    pub async fn last_row(&mut self) -> Result<i64, Error> {
        match self {
            Self::Sqlite(reader) => reader.last_row().await,
        }
    }
}

impl Scratch {
    /// With the tables of a new database.
    pub async fn empty() -> Result<Self, Error> {
        Ok(Self::Sqlite(Box::new(sqlite::scratch::SchemaCopy::empty().await?)))
    }

    /// With the schema of a database that another process may use, as this version would update it. A file that does not exist is
    /// not created.
    ///
    /// # Errors
    /// [`OpenError`] if the schema cannot be read.
    pub async fn copy_of(database: &Database) -> Result<Self, OpenError> {
        match database {
            Database::Sqlite(path) => {
                sqlite::scratch::SchemaCopy::copy_of(path).await.map(|scratch| Self::Sqlite(Box::new(scratch)))
            }
        }
    }

    pub fn connection(&mut self) -> Connection<'_> {
        match self {
            Self::Sqlite(scratch) => Connection::Sqlite(scratch.connection()),
        }
    }
}

/// The names of all tables, indexes and triggers that a new database has.
pub async fn own_names() -> Result<Vec<String>, Error> {
    sqlite::scratch::own_names().await
}

/// Checks whether `run` could use the database, without creating or changing anything. Waits two seconds for the write lock.
///
/// # Errors
/// As [`Store::open`]. That the database is in use is not an error here: the daemon may be running.
pub async fn check(database: &Database) -> Result<Presence, OpenError> {
    match database {
        Database::Sqlite(path) => sqlite::check(path).await,
    }
}

/// The process that has the database open for writing, if there is one. Does not wait.
///
/// # Errors
/// [`OpenError`] if the lock cannot be read.
pub fn holder(database: &Database) -> Result<Option<Holder>, OpenError> {
    match database {
        Database::Sqlite(path) => sqlite::lock::held_by(path),
    }
}

/// Records that this process, which has the database, begins to stop. If the stop is cut short, the next process learns that
/// the run of the handler that was interrupted is not a crash.
pub fn note_stop(database: &Database) {
    match database {
        Database::Sqlite(path) => sqlite::lock::sign_as_stopping(path),
    }
}

/// The pause of the daemon that uses the database, if there is one.
///
/// # Errors
/// [`OpenError`] if it cannot be determined whether there is a pause.
pub fn paused(database: &Database) -> Result<Option<Pause>, OpenError> {
    match database {
        Database::Sqlite(path) => sqlite::pause::read(path),
    }
}

/// Returns when a pause begins. Looks once a second.
pub async fn pause_begins(database: &Database) {
    match database {
        Database::Sqlite(path) => sqlite::pause::begins(path).await,
    }
}

/// Begins a pause, durably. `false` if there is one already.
///
/// # Errors
/// [`OpenError::Marker`]
pub fn begin_pause(database: &Database, pause: &Pause) -> Result<bool, OpenError> {
    match database {
        Database::Sqlite(path) => sqlite::pause::begin(path, pause),
    }
}

/// Ends a pause, durably. `false` if there is none.
///
/// # Errors
/// [`OpenError::Marker`]
pub fn end_pause(database: &Database) -> Result<bool, OpenError> {
    match database {
        Database::Sqlite(path) => sqlite::pause::end(path),
    }
}

/// Copies the database as it is at this moment into `to`, an empty file, while the daemon works. Checks the copy from its first
/// page to its last and returns what it contains.
///
/// # Errors
/// [`OpenError`] if there is no database of ours, or the copy cannot be made or is damaged.
pub async fn backup(database: &Database, to: &Path) -> Result<Contents, OpenError> {
    match database {
        Database::Sqlite(path) => sqlite::backup::copy(path, to).await,
    }
}

/// The sizes of a database on disk. A file that cannot be read counts as empty.
pub fn sizes(database: &Database) -> Sizes {
    match database {
        Database::Sqlite(path) => sqlite::sizes(path),
    }
}
