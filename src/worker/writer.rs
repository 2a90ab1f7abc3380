//! The one writer of the database, and the work that it does on a task of its own.

use std::mem;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::calls::LookUp;
use super::inbox::{Inbox, Outcomes};
use super::worker::WorkerError;
use crate::model::delivery::Delivery;
use crate::store::{self, Accepted, AuditMark, Bind, Counts, OutboxStep, OutboxTaken, Prunable, Store, Unbound};

/// Ids deleted in one transaction: a few milliseconds.
pub const PRUNE_STEP: u32 = 500;

/// The one writer of the database: here, or with the job that uses it.
pub enum Writer {
    Free(Box<Inbox>),
    Busy(JoinHandle<Done>),
    /// Closed by the drain, or lost with a job that panicked.
    Closed,
}

/// What comes back from the task that works on the database.
pub struct Done {
    pub inbox: Box<Inbox>,
    pub work: Work,
}

pub enum Work {
    Batch {
        batch: Vec<Delivery>,
        took: Duration,
        result: Result<Outcomes, store::Error>,
    },
    /// The ids of orders before their calls.
    LookUp(LookUp),
    Upkeep(Result<Upkept, store::Error>),
    /// A step of the relay.
    Outbox {
        step: OutboxStep,
        result: Result<OutboxTaken, store::Error>,
    },
    Bind {
        bind: Bind,
        result: Result<Result<Accepted, Unbound>, store::Error>,
    },
}

pub struct Upkept {
    pub pruned: u64,
    pub counts: Counts,
    pub mark: Option<AuditMark>,
}

impl Writer {
    pub fn take(&mut self) -> Option<Box<Inbox>> {
        match mem::replace(self, Self::Closed) {
            Self::Free(inbox) => Some(inbox),
            other @ (Self::Busy(_) | Self::Closed) => {
                *self = other;
                None
            }
        }
    }

    /// Waits for the running job; `None` if there is none.
    pub async fn done(&mut self) -> Option<Result<Done, WorkerError>> {
        let Self::Busy(job) = self else { return None };
        let done = job.await.map_err(WorkerError::Panicked);
        *self = Self::Closed;
        Some(done)
    }
}

/// Deletes ids that may go, counts the rows, and records where the audit stands.
pub async fn upkeep(store: &mut Store, prunable: Prunable, mark: Option<AuditMark>) -> Result<Upkept, store::Error> {
    let upkept = async {
        let (pruned, counts) = store.upkeep(prunable, PRUNE_STEP).await?;
        if let Some(mark) = &mark {
            store.set_audit_mark(mark).await?;
        }
        Ok((pruned, counts))
    };
    match upkept.await {
        Ok((pruned, counts)) => Ok(Upkept { pruned, counts, mark }),
        Err(error) => {
            store.roll_back_after(&error).await;
            Err(error)
        }
    }
}
