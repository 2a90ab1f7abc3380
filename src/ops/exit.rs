//! The exit code of each command, in one place. Operators, systemd and scripts rely on it.

use std::error::Error;
use std::io;
use std::process::ExitCode;

use crate::handler::routes::LoadError;
use crate::ops::adopt::AdoptError;
use crate::ops::audit::AuditError;
use crate::ops::backup::BackupError;
use crate::ops::check::CheckResult;
use crate::ops::dead_letters::DeadLettersError;
use crate::ops::find::FindError;
use crate::ops::handler::HandlerError;
use crate::ops::healthcheck::HealthcheckError;
use crate::ops::pause::PauseError;
use crate::ops::publish::PublishError;
use crate::ops::run::RunError;
use crate::ops::setup::{SetupError, SetupResult};
use crate::store::OpenError;
use crate::worker::shift::ShiftError;
use crate::worker::worker::WorkerError;

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: done, and nothing is wrong. Also if the reader of an answer went away.
    Done,
    /// 1: it ran and failed, or shows that something is wrong, or the deadline of the drain passed.
    Failed,
    /// 2: the operator must change flags, settings, the consumer or the database; a restart does not help.
    Operator,
    /// 3: only of `find`. It is not known whether the order was applied.
    NotKnown,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Done => Self::SUCCESS,
            Exit::Failed => Self::from(1),
            Exit::Operator => Self::from(2),
            Exit::NotKnown => Self::from(3),
        }
    }
}

impl From<()> for Exit {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// `false` if the answer of the command shows that something is wrong.
impl From<bool> for Exit {
    fn from(good: bool) -> Self {
        if good { Self::Done } else { Self::Failed }
    }
}

/// Whether the order that was looked for was applied.
impl From<Option<bool>> for Exit {
    fn from(applied: Option<bool>) -> Self {
        applied.map_or(Self::NotKnown, Self::from)
    }
}

impl From<CheckResult> for Exit {
    fn from(result: CheckResult) -> Self {
        match result {
            CheckResult::Good => Self::Done,
            CheckResult::Failed => Self::Failed,
            CheckResult::Refused => Self::Operator,
        }
    }
}

impl From<SetupResult> for Exit {
    fn from(result: SetupResult) -> Self {
        match result {
            SetupResult::Good => Self::Done,
            SetupResult::Differs => Self::Failed,
            SetupResult::Refused => Self::Operator,
        }
    }
}

/// An error that ends a command.
pub trait CommandError: Error {
    fn exit(&self) -> Exit {
        Exit::Failed
    }
}

/// An answer could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the answer")]
pub struct OutputError(#[from] io::Error);

impl CommandError for OutputError {
    fn exit(&self) -> Exit {
        unwritten(&self.0)
    }
}

/// A reader that has seen enough, such as `head`, is not a failure.
fn unwritten(error: &io::Error) -> Exit {
    if error.kind() == io::ErrorKind::BrokenPipe { Exit::Done } else { Exit::Failed }
}

impl CommandError for HandlerError {
    fn exit(&self) -> Exit {
        match self {
            Self::Load(LoadError::Problems(_)) | Self::OwnHandler | Self::NoFile | Self::Payload { .. } => {
                Exit::Operator
            }
            Self::Init(_) => Exit::Failed,
            Self::Output(error) => unwritten(error),
            Self::Load(LoadError::Database(_)) => Exit::Failed,
            Self::Open(error) => error.exit(),
        }
    }
}

impl CommandError for RunError {
    fn exit(&self) -> Exit {
        match self {
            Self::Listen(_) | Self::Files(_) => Exit::Operator,
            Self::Open(error) => error.exit(),
            Self::Shift(error) => error.exit(),
            Self::Signals(_) => Exit::Failed,
        }
    }
}

impl CommandError for ShiftError {
    fn exit(&self) -> Exit {
        match self {
            Self::Paused(_) | Self::Handler(_) => Exit::Operator,
            Self::Open(error) => error.exit(),
            Self::Worker(WorkerError::Refused(_) | WorkerError::Unbound(_) | WorkerError::Corrupt(_)) => Exit::Operator,
            Self::Worker(WorkerError::Deadline(_) | WorkerError::Panicked(_) | WorkerError::Close(_)) => Exit::Failed,
        }
    }
}

impl CommandError for OpenError {
    fn exit(&self) -> Exit {
        if self.is_for_operator() { Exit::Operator } else { Exit::Failed }
    }
}

impl CommandError for AdoptError {
    fn exit(&self) -> Exit {
        match self {
            Self::Open(error) => error.exit(),
            Self::Connect(error) if error.is_about_settings() => Exit::Operator,
            Self::NotConfirmed(_) => Exit::Operator,
            Self::Output(error) => unwritten(error),
            Self::Connect(_) | Self::Server(_) | Self::Store(_) | Self::Declined => Exit::Failed,
        }
    }
}

/// Code 1 would say that the order was not applied.
impl CommandError for FindError {
    fn exit(&self) -> Exit {
        match self {
            Self::Open(error) if error.is_for_operator() => Exit::Operator,
            Self::Open(_) | Self::Output(_) => Exit::NotKnown,
        }
    }
}

impl CommandError for AuditError {
    fn exit(&self) -> Exit {
        match self {
            Self::Open(error) => error.exit(),
            Self::Connect(error) if error.is_about_settings() => Exit::Operator,
            Self::Unbound(_) | Self::Pulled { .. } => Exit::Operator,
            Self::Output(error) => unwritten(error),
            Self::Connect(_)
            | Self::Bind(_)
            | Self::Signals(_)
            | Self::Stopped { .. }
            | Self::OtherStream { .. }
            | Self::Database { .. } => Exit::Failed,
        }
    }
}

impl CommandError for DeadLettersError {
    fn exit(&self) -> Exit {
        match self {
            Self::Open(error) => error.exit(),
            Self::Output(error) => unwritten(error),
            Self::Store(_)
            | Self::NoSuchId(_)
            | Self::ClosedAlready { .. }
            | Self::NothingMatches
            | Self::Declined
            | Self::NotConfirmed(_)
            | Self::File(..)
            | Self::Signals(_)
            | Self::Stopped(_) => Exit::Failed,
        }
    }
}

impl CommandError for PublishError {
    fn exit(&self) -> Exit {
        if self.is_about_flags() { Exit::Operator } else { Exit::Failed }
    }
}

impl CommandError for BackupError {
    fn exit(&self) -> Exit {
        match self {
            Self::Database(error) => error.exit(),
            Self::Output(error) => unwritten(error),
            Self::Exists(_) | Self::Write(..) | Self::Signals(_) | Self::Stopped => Exit::Failed,
        }
    }
}

impl CommandError for SetupError {}
impl CommandError for PauseError {}
impl CommandError for HealthcheckError {}
