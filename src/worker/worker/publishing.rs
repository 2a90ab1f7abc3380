//! The relay's part of the loop: its steps on the database, and its end.

use std::time::Duration;

use futures_util::future::OptionFuture;

use super::{Worker, WorkerError};
use crate::store::{self, OutboxStep, OutboxTaken};
use crate::worker::inbox::Inbox;
use crate::worker::relay::RelayContext;
use crate::worker::writer::{Done, Work, Writer};

/// How long the drain publishes what its commits have left in the outbox. The next start publishes the rest.
const PUBLISH_BUDGET: Duration = Duration::from_secs(5);

/// Begins a step of the relay on the database.
pub(super) fn start(mut inbox: Box<Inbox>, step: OutboxStep) -> Writer {
    Writer::Busy(tokio::spawn(async move {
        let result = inbox.store().take_outbox(&step).await;
        if let Err(error) = &result {
            inbox.store().roll_back_after(error).await;
        }
        Done { inbox, work: Work::Outbox { step, result } }
    }))
}

impl Worker {
    pub(super) fn outbox_taken(
        &mut self,
        step: &OutboxStep,
        result: Result<OutboxTaken, store::Error>,
    ) -> Result<(), WorkerError> {
        let taken = match result {
            Ok(taken) => taken,
            Err(error) => {
                self.relay.not_taken();
                return self.database_failed(error);
            }
        };
        self.outages.database_works(&self.telemetry);
        let around = self.consumer.publisher().map(|publisher| RelayContext {
            publisher,
            nats: self.config.nats.clone(),
            own_stream: self.config.consumer.stream.clone(),
            own_filters: self.consumer.reader().map(|reader| reader.filters().to_vec()).unwrap_or_default(),
        });
        self.relay.taken(step, taken, around, &self.telemetry);
        Ok(())
    }

    /// Publishes what is in the outbox, as far as that is possible at once.
    pub(super) async fn publish_the_rest(&mut self) -> Result<(), WorkerError> {
        let budget = PUBLISH_BUDGET.min(self.config.shutdown.timeout / 3);
        let published = tokio::time::timeout(budget, self.publish()).await;
        self.relay.stop();
        self.finish_running().await?;
        published.unwrap_or(Ok(()))
    }

    async fn publish(&mut self) -> Result<(), WorkerError> {
        while !self.relay.is_at_rest() && self.outages.retry_at().is_none() {
            if let Some(inbox) = self.writer.take() {
                self.writer = match self.relay.step(self.consumer.publisher().is_some(), false) {
                    Some(step) => start(inbox, step),
                    None => Writer::Free(inbox),
                };
            }
            tokio::select! {
                Some(done) = self.writer.done() => self.finish_job(done?).await?,
                Some(ended) = OptionFuture::from(self.relay.running()) => self.relay.ended(ended, &self.telemetry),
                else => return Ok(()),
            }
        }
        Ok(())
    }
}
