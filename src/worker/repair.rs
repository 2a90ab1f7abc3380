//! Applies messages outside the loop, for a repair: first the calls that they need, then one batch.

use std::collections::HashSet;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::calls::{Calls, needs_call};
use super::inbox::{Inbox, Outcomes};
use super::keys::KeyOrder;
use crate::handler::Handler;
use crate::model::delivery::Delivery;
use crate::store::Error;
use crate::telemetry::Telemetry;

pub struct Repair {
    inbox: Inbox,
    calls: Calls,
}

impl Repair {
    pub fn new(inbox: Inbox, handler: Arc<dyn Handler>) -> Self {
        Self { inbox, calls: Calls::new(handler, &Telemetry::new()) }
    }

    pub fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    pub fn into_inbox(self) -> Inbox {
        self.inbox
    }

    /// As [`Inbox::process`], with the calls before it. While a host is away, its orders have no outcome, and
    /// [`away`](Inbox::away) says why.
    ///
    /// # Errors
    /// Those of [`Inbox::process`].
    pub async fn process(&mut self, batch: &[Delivery], stop: &CancellationToken) -> Result<Outcomes, Error> {
        let mut ready = HashSet::new();
        ready.extend(batch.iter().filter_map(|delivery| self.calls.take(delivery.clone())).map(|it| stream_seq(&it)));
        let looked_up = self.inbox.look_up(self.calls.next_look_up(false)).await.map_err(|(_, error)| error)?;
        ready.extend(self.calls.looked_up(looked_up).iter().map(stream_seq));
        loop {
            if !stop.is_cancelled() {
                self.calls.start(&KeyOrder::default());
            }
            let Some(ended) = self.calls.ended().await else { break };
            // Only a call that is cut off ends without a result, and nobody cuts these off.
            for (delivery, outcome) in self.calls.judge(ended.unwrap_or_default()) {
                self.inbox.called(&delivery, outcome);
                ready.insert(stream_seq(&delivery));
            }
        }
        let away = self.calls.report();
        self.calls.drop_waiting();
        let is_ready = |delivery: &&Delivery| ready.contains(&stream_seq(delivery));
        let together: Vec<Delivery> = batch.iter().filter(is_ready).cloned().collect();
        let mut decided = self.inbox.process(&together, stop).await?.into_iter();
        self.inbox.away = self.inbox.away.take().or(away);
        let outcomes: Outcomes =
            batch.iter().map(|delivery| if is_ready(&delivery) { decided.next().flatten() } else { None }).collect();
        for (delivery, _) in batch.iter().zip(&outcomes).filter(|(it, outcome)| needs_call(it) && outcome.is_some()) {
            self.calls.settled(delivery);
        }
        Ok(outcomes)
    }
}

fn stream_seq(delivery: &Delivery) -> u64 {
    delivery.raw.position.stream_seq
}
