//! The values that the store takes and returns.

use std::sync::Arc;

use crate::model::id::Digest;
use crate::model::letter::Envelope;
use crate::model::outbox::{OutboxMessage, OutboxRow, OutboxTarget};

/// Whether [`Store::open`](super::Store::open) would find a database or create one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Exists,
    WillBeCreated,
}

/// What came of the claim of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The id was free: the message must be applied.
    New,
    /// A message with this digest was processed under the id.
    Processed(Digest),
    /// The id was free, but this message, with the same digest, is a dead letter, or was one until an operator dealt with it.
    Dead,
}

/// A message that was processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Earlier {
    pub stream_seq: u64,
    /// In nanoseconds since 1970 UTC.
    pub processed_at_ns: i64,
}

/// Runs of the handler on one message that did not succeed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    /// Runs that ended in a failure.
    pub failed: u32,
    /// Runs that began and never ended.
    pub started: u32,
}

impl Attempts {
    /// With one more run that has begun.
    pub fn begun(self) -> Self {
        Self { started: self.started.saturating_add(1), ..self }
    }

    /// With one of the begun runs ended.
    pub fn ended(self) -> Self {
        Self { started: self.started.saturating_sub(1), ..self }
    }
}

/// The retry of an order with a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    pub stream_seq: u64,
    pub key: Arc<str>,
    /// In nanoseconds since 1970 UTC, as the next one.
    pub due_ns: i64,
    /// When the failure was recorded: a stream that was created later has another message at the sequence.
    pub failed_at_ns: i64,
}

/// Which ids may be deleted. Times are in nanoseconds since 1970 UTC.
#[derive(Clone, Copy, Debug)]
pub struct Prunable {
    /// Only ids that were processed before this.
    pub before_ns: i64,
    /// And only ids of messages that the stream no longer holds, if that counts.
    pub gone: Option<Gone>,
}

/// What a stream no longer holds.
#[derive(Clone, Copy, Debug)]
pub struct Gone {
    /// Its first sequence. Every message below it was published before `published_before_ns`.
    pub below_seq: u64,
    pub published_before_ns: i64,
    /// A message that was processed before this belongs to a former stream, whatever its sequence.
    pub processed_before_ns: i64,
}

/// Up to where ids were deleted: a message that is below the sequence and was published before the time may have been processed
/// although its id is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub below_seq: u64,
    pub before_ns: i64,
}

/// Where the daemon's own audit stands. Times are in nanoseconds since 1970 UTC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditMark {
    /// No message up to this sequence is missing.
    pub through: u64,
    /// Shows whether the sequences still mean the same messages.
    pub anchor: Option<Anchor>,
    /// The subjects that the consumer is for.
    pub filters: Vec<String>,
    /// The consumer passed the messages up to this sequence under another filter.
    pub other_filter_through: u64,
    /// Rows that were processed before this do not account for their sequences: they may belong to a former stream.
    pub rows_since_ns: i64,
    pub audited_at_ns: i64,
}

/// A message of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    pub stream_seq: u64,
    pub published_ns: i64,
}

/// The part of a row of `processed_ids` that accounts for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessedRow {
    pub row: i64,
    pub stream_seq: u64,
    pub processed_at_ns: i64,
}

/// A row of `processed_ids`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessedId {
    pub id: String,
    pub stream_seq: u64,
    pub digest: Digest,
    pub processed_at_ns: i64,
}

/// What the tables have about one message id, at one moment.
#[derive(Clone, Debug, Default)]
pub struct IdRecord {
    pub processed: Option<ProcessedId>,
    pub attempts: Option<AttemptsRecord>,
    /// Dead letters, those that an operator has closed included: the newest ones of each kind, oldest first.
    pub letters: Vec<Envelope>,
    /// Rows of the outbox that have this id, or whose id contains it.
    pub outbox: Vec<OutboxHead>,
    /// The outbox has more rows than were compared.
    pub outbox_was_cut: bool,
}

/// A row of `attempts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptsRecord {
    pub attempts: Attempts,
    pub last_error: Option<String>,
    pub updated_at_ns: i64,
}

/// A row of the outbox, without what is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxHead {
    pub row: i64,
    pub id: String,
    pub subject: String,
    pub created_at_ns: i64,
}

/// What the tables have about one sequence of the stream, at one moment. A former stream may have used it too.
#[derive(Clone, Debug, Default)]
pub struct SeqRecord {
    pub processed: Vec<ProcessedId>,
    pub letters: Vec<Envelope>,
    /// The tables have rows that were not compared: those far from the place where the sequence is expected.
    pub was_cut: bool,
}

/// What the relay of the outbox records, and what it wants next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxStep {
    /// Rows to delete: the server has stored their messages.
    pub done: Vec<i64>,
    pub targets: Vec<OutboxTarget>,
    pub max_messages: u32,
    pub max_bytes: usize,
    /// All rows are wanted as well, without their payloads.
    pub wants_all: bool,
}

/// What the relay gets for an [`OutboxStep`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboxTaken {
    /// The oldest rows, in row order.
    pub messages: Vec<OutboxMessage>,
    pub rows: Vec<OutboxRow>,
    pub targets: Vec<OutboxTarget>,
}

/// Row counts for operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    pub processed_ids: u64,
    pub dead_letters: u64,
    pub outbox_rows: u64,
    /// When the oldest of them was written, in nanoseconds since 1970 UTC.
    pub outbox_oldest_ns: Option<i64>,
}

/// Sizes of the database on disk, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    pub database: u64,
    pub wal: u64,
}

/// What a copy of the database contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    pub orders: i64,
    pub processed_ids: i64,
    pub dead_letters: i64,
    /// The highest sequence of a message with an outcome; `None` without any.
    pub last_stream_seq: Option<i64>,
}

/// A process that has the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// For example `process 17`.
    pub name: String,
    /// The process repairs the database and ends by itself, unlike a daemon.
    pub is_repair: bool,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

/// Rows of dead letters that are still to be read.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub after: i64,
    pub through: i64,
}

impl Rows {
    pub const ALL: Self = Self { after: 0, through: i64::MAX };
}

/// Which end of [`Rows`] is read first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    OldestFirst,
    NewestFirst,
}
