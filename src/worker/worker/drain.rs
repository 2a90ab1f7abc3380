//! The end of the loop: stop pulling, finish, hand back, close.

use std::pin::pin;

use tokio::time::Instant;

use super::{CUT_GRACE, Ended, UPKEEP_EVERY, Worker, WorkerError};
use crate::jetstream::consumer::Receipt;
use crate::model::text::chain;
use crate::worker::calls::needs_call;
use crate::worker::writer::Writer;

impl Worker {
    /// Drains. At the deadline, it cuts off the job that still runs.
    pub(super) async fn drain_in_time(self, ended: Ended) -> Result<Ended, WorkerError> {
        let deadline = self.config.shutdown.timeout;
        let began = Instant::now();
        let (telemetry, cut) = (self.telemetry.clone(), self.cut.clone());
        let mut drain = pin!(self.drain());
        let drained = match tokio::time::timeout(deadline, &mut drain).await {
            Ok(drained) => drained,
            Err(_) => {
                // A handler that is cut off is not a crash of its order, and held deliveries need not wait for `ack_wait`.
                cut.cancel();
                match tokio::time::timeout(CUT_GRACE, drain).await {
                    // A pause only needs the database to be closed.
                    Ok(Ok(())) if ended == Ended::Paused => Ok(()),
                    rest => rest.unwrap_or(Ok(())).and(Err(WorkerError::Deadline(deadline))),
                }
            }
        };
        telemetry.metrics.shutdown_duration_seconds.record(began.elapsed().as_secs_f64());
        drained.map(|()| ended)
    }

    /// Stops pulling, finishes and acknowledges what is in hand, hands the rest back, closes. The caller bounds the time.
    async fn drain(mut self) -> Result<(), WorkerError> {
        tracing::info!(held = self.held.len(), "draining");
        self.draining.cancel();
        self.audit.stop();
        // A message is not handed back on its last delivery: the server would never deliver it again.
        let last = self.max_deliver().unwrap_or(u64::MAX);
        self.calls.stop(last);
        let arrived = self.consumer.quiesce().await;
        self.receive(arrived);
        self.finish_running().await?;
        // An order whose call has ended is not handed back: it would be called again.
        self.waiting.retain(|delivery| delivery.raw.position.delivered >= last || needs_call(delivery));
        self.upkeep_due = Instant::now() + UPKEEP_EVERY;
        self.finish_all().await?;
        let rest = self.held.hand_back();
        let handed_back = rest.len();
        self.acknowledge(rest, Receipt::Last).await;
        self.publish_the_rest().await?;
        if let Some(mut inbox) = self.writer.take() {
            if let Some(mark) = self.audit.mark_to_store().filter(|_| self.outages.retry_at().is_none())
                && let Err(error) = inbox.store().set_audit_mark(&mark).await
            {
                // The next audit begins a little earlier.
                tracing::debug!(error = %chain(&error), "cannot record where the audit stands");
                inbox.store().roll_back_after(&error).await;
            }
            inbox.close().await.map_err(WorkerError::Close)?;
        }
        let outcomes = self.telemetry.health.status().committed_messages;
        let how = if self.cut.is_cancelled() { "drain cut off at shutdown.timeout" } else { "drained" };
        tracing::info!(outcomes, handed_back, "{how}");
        Ok(())
    }

    /// Waits for the calls that run, and commits all that is in hand.
    async fn finish_all(&mut self) -> Result<(), WorkerError> {
        loop {
            self.start_job();
            self.calls.start(&self.keys);
            if !matches!(self.writer, Writer::Busy(_)) && !self.calls.are_running() {
                return Ok(());
            }
            tokio::select! {
                Some(done) = self.writer.done() => self.finish_job(done?).await?,
                Some(ended) = self.calls.ended() => self.called(ended)?,
                () = self.cut.cancelled(), if self.calls.are_running() => self.calls.abort(),
                _ = self.tick.tick() => self.keep_alive().await,
            }
        }
    }

    /// Waits for the running job and keeps all held deliveries alive meanwhile.
    pub(super) async fn finish_running(&mut self) -> Result<(), WorkerError> {
        loop {
            tokio::select! {
                done = self.writer.done() => match done {
                    Some(done) => return self.finish_job(done?).await,
                    None => return Ok(()),
                },
                _ = self.tick.tick() => self.keep_alive().await,
            }
        }
    }
}
