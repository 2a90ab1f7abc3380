//! When and how the loop ends.

use std::time::Duration;

use tokio::task::JoinError;

use crate::jetstream;
use crate::store::{self, Unbound};

/// When [`Worker::run`](super::Worker::run) ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Only when it is stopped.
    Stopped,
    /// Even before that, when nothing is pending and nothing is held.
    Idle,
}

/// Why [`Worker::run`](super::Worker::run) ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was stopped, or it is idle as requested.
    Done,
    /// A pause began. Another worker continues after the pause.
    Paused,
}

/// Why the worker did not drain.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The operator has to change the consumer or the settings.
    #[error(transparent)]
    Refused(jetstream::Error),
    /// The operator has to give the daemon the database of its consumer.
    #[error(transparent)]
    Unbound(Unbound),
    /// The operator has to restore a backup.
    #[error("the database is damaged; stop, keep the file, and restore a backup")]
    Corrupt(#[source] store::Error),
    #[error("the deadline of {} passed before everything in hand was committed and acknowledged", humantime::format_duration(*.0))]
    Deadline(Duration),
    #[error("a batch ended in a panic")]
    Panicked(#[source] JoinError),
    #[error("the database could not be closed; nothing is lost, the next start recovers it")]
    Close(#[source] store::Error),
}
