//! What the inbox does for calls: it looks up ids before them, keeps what they brought, and commits their failures.

use super::single::{Run, failed};
use super::{Inbox, Outcomes, now_ns};
use crate::model::delivery::Delivery;
use crate::store::{Claim, Error};
use crate::worker::calls::{CallOutcome, LookUp, LookedUp};

impl Inbox {
    /// Takes what a call brought, until its order has an outcome.
    pub fn called(&mut self, delivery: &Delivery, outcome: CallOutcome) {
        self.answers.add(delivery, outcome);
    }

    /// What is known of these ids before their calls.
    ///
    /// # Errors
    /// Those of the database, with the deliveries.
    pub async fn look_up(&mut self, deliveries: Vec<Delivery>) -> LookUp {
        match self.look_up_all(&deliveries).await {
            Ok(looked_up) => Ok(deliveries.into_iter().zip(looked_up).collect()),
            Err(error) => {
                self.store.roll_back_after(&error).await;
                Err((deliveries, error))
            }
        }
    }

    async fn look_up_all(&mut self, deliveries: &[Delivery]) -> Result<Vec<LookedUp>, Error> {
        let all: Vec<&Delivery> = deliveries.iter().collect();
        if all.is_empty() {
            return Ok(Vec::new());
        }
        let mut tx = self.store.begin().await?;
        let known = tx.known(&all).await?;
        let mut looked_up = Vec::with_capacity(known.len());
        for (delivery, claim) in all.into_iter().zip(known) {
            // A message that failed before was delivered before.
            let may_have_failed = claim == Claim::New && delivery.raw.position.delivered > 1;
            let failed = if may_have_failed { tx.attempts(&delivery.id).await?.failed } else { 0 };
            looked_up.push(LookedUp { claim, failed });
        }
        tx.commit().await?;
        Ok(looked_up)
    }

    /// Commits the failures of calls. The handler does not run for these orders.
    pub(super) async fn fail(&mut self, batch: &[Delivery]) -> Result<Outcomes, Error> {
        let mut outcomes = vec![None; batch.len()];
        let failures = batch.iter().zip(&mut outcomes);
        let failures = failures.filter_map(|(it, outcome)| Some((it, outcome, self.answers.failure(it)?)));
        let failures: Vec<_> = failures.collect();
        if !failures.is_empty() {
            let (rules, now_ns) = (self.rules(), now_ns());
            let mut tx = self.store.begin().await?;
            let known = tx.known(&failures.iter().map(|(delivery, ..)| *delivery).collect::<Vec<_>>()).await?;
            let new = failures.into_iter().zip(known).filter(|(_, claim)| *claim == Claim::New);
            // An operator may have replayed the dead letter of an id during the call: the order is then a duplicate.
            for ((delivery, outcome, failure), _) in new {
                *outcome = Some(failed(&mut tx, delivery, failure, rules, Run::InBatch, now_ns).await?);
            }
            tx.commit().await?;
        }
        Ok(outcomes)
    }
}
