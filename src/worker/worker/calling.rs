//! The part of the loop for orders that need a call: their look-ups, their answers, and the state of the hosts.

use tokio::task::JoinError;
use tokio::time::Instant;

use super::{Worker, WorkerError};
use crate::model::delivery::Delivery;
use crate::worker::calls::{EndedCall, LookUp};
use crate::worker::inbox::Inbox;
use crate::worker::writer::{Done, Work, Writer};

/// Begins to look up the ids of orders before their calls.
pub(super) fn look_up(mut inbox: Box<Inbox>, deliveries: Vec<Delivery>) -> Writer {
    Writer::Busy(tokio::spawn(async move {
        let result = inbox.look_up(deliveries).await;
        Done { inbox, work: Work::LookUp(result) }
    }))
}

impl Worker {
    /// Puts an order on its way: to its call, or to the next batch.
    pub(super) fn enqueue(&mut self, delivery: Delivery) {
        if let Some(delivery) = self.calls.take(delivery) {
            self.waiting.push(delivery);
        }
    }

    /// Begins calls, unless their answers could not be committed.
    pub(super) fn start_calls(&mut self) {
        let may_commit = self.outages.retry_at().is_none_or(|at| at <= Instant::now()) && self.acceptance.is_accepted();
        if may_commit && !self.draining.is_cancelled() {
            self.calls.start(&self.keys);
        }
    }

    pub(super) fn looked_up(&mut self, result: LookUp) -> Result<(), WorkerError> {
        match result {
            Ok(looked_up) => {
                self.outages.database_works(&self.telemetry);
                self.calls.looked_up(looked_up).into_iter().for_each(|delivery| self.waiting.push(delivery));
                Ok(())
            }
            Err((deliveries, error)) => {
                self.calls.not_looked_up(deliveries);
                self.database_failed(error)
            }
        }
    }

    /// Passes the orders whose calls have ended to the next batch. Those of hosts that are away stay in the stage.
    pub(super) fn called(&mut self, ended: Result<Vec<EndedCall>, JoinError>) -> Result<(), WorkerError> {
        let ended = ended.map_err(WorkerError::Panicked)?;
        for (delivery, outcome) in self.calls.judge(ended) {
            self.answers.push((delivery.clone(), outcome));
            self.waiting.push(delivery);
        }
        self.report_hosts();
        Ok(())
    }

    pub(super) fn report_hosts(&mut self) {
        let away = self.calls.report();
        self.outages.hosts(away, &self.telemetry);
    }

    /// Whether so many orders wait for hosts that are away that pulling stops.
    pub(super) fn is_away_half(&self) -> bool {
        let (away, batch) = (self.calls.size_of_away(), &self.config.batch);
        away.messages * 2 >= batch.max_messages || away.bytes * 2 >= batch.max_bytes
    }
}
