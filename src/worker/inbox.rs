//! One batch in one transaction: claim the ids, apply the effects, commit. The result says what became of each message.
//!
//! The batch is tried as a whole. If anything in it fails, all of it is undone. If the handler names the order to blame, the rest
//! runs together again. Otherwise the batch runs message by message, each in a savepoint, so that one bad order does not affect
//! the others. An error of the database that no message caused decides nothing: the caller gets it, no attempt is counted, and
//! the same batch is tried again later.

use std::sync::Arc;
use std::time::SystemTime;

use tokio_util::sync::CancellationToken;

use crate::config::OnConflict;
use crate::handler::{Failure, Handler, Order, planned};
use crate::model::delivery::Delivery;
use crate::model::outcome::{Ignored, Outcome, Reason};
use crate::model::plan::Plan;
use crate::model::text::chain;
use crate::model::time::unix_ns;
use crate::store::{Claim, Error, Store, Tx};
use crate::worker::keys::Stopped;
use crate::worker::retry::RetryPolicy;
use answers::Answers;
use budget::Budget;
pub use processed::{Outcomes, Processed};
pub use single::Publishing;
use single::{Rules, Run, Single, dead, defective, failed, guarded, of_known, single};
use sort::{Blamed, Kind, Sorted, sort};

mod answers;
mod budget;
mod calling;
mod processed;
pub mod replay;
pub mod single;
mod sort;

/// From this delivery on, a message runs alone and its start is recorded: it may be the message that kills the process.
pub const SUSPECT_FROM: u64 = 3;
/// The handler may blame this many orders of one batch. After that, the batch runs message by message.
const BLAMED_MAX: usize = 8;

/// The database and the handler, behind one function.
pub struct Inbox {
    store: Store,
    handler: Arc<dyn Handler>,
    retry: RetryPolicy,
    on_conflict: OnConflict,
    answers: Answers,
    /// Why the handler could not work on any message in the last batch, if so. No message is to blame.
    pub away: Option<String>,
    /// The last delivery that the consumer allows, if there is a last one.
    pub max_deliver: Option<u64>,
    pub publishing: Publishing,
    /// The id of a message whose start is recorded and whose run had no outcome, because the database failed or the handler was
    /// away. The process lives, so this start must not count as a crash.
    begun: Option<Arc<str>>,
}

impl Inbox {
    pub fn new(store: Store, handler: Arc<dyn Handler>, retry: RetryPolicy, on_conflict: OnConflict) -> Self {
        let (answers, publishing) = (Answers::default(), Publishing::default());
        Self { store, handler, retry, on_conflict, answers, away: None, max_deliver: None, publishing, begun: None }
    }

    /// Runs one batch of [planned](planned()) deliveries: all [suspects](is_suspect) or none, in stream order, no stream sequence twice.
    ///
    /// When it returns outcomes, they are durable. `draining` makes a pass over single messages stop early.
    ///
    /// # Errors
    /// When the database failed in a way that no message is to blame for. Then nothing is known to be durable.
    pub async fn process(&mut self, batch: &[Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        self.away = None;
        let outcomes = self.run(batch, draining).await;
        if let Err(error) = &outcomes {
            self.store.roll_back_after(error).await;
        } else if self.away.is_some() {
            // The operator needs the lock, for example to create the table that the handler misses.
            self.store.roll_back().await;
        }
        outcomes
    }

    /// Asks the handler what is to be done for a delivery, as [`planned()`].
    pub fn planned(&self, delivery: Delivery) -> Delivery {
        planned(self.handler.as_ref(), delivery)
    }

    /// The store, between two batches.
    pub fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// Deletes a recorded start that had no end, because this process did not crash in it. Then closes the database.
    pub async fn close(mut self) -> Result<(), Error> {
        if let Some(id) = self.begun.take() {
            let ended = self.end(&id).await;
            if let Err(error) = ended {
                tracing::warn!(message_id = %id, error = %chain(&error), "cannot delete the recorded start of a run; it counts as one crash of this message");
                self.store.roll_back_after(&error).await;
            }
        }
        self.store.close().await
    }

    async fn end(&mut self, id: &str) -> Result<(), Error> {
        let mut tx = self.store.begin().await?;
        end_start(&mut tx, id, now_ns()).await?;
        tx.commit().await
    }

    async fn run(&mut self, batch: &[Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        let mut outcomes = self.fail(batch).await?;
        let open: Vec<usize> = (0..batch.len()).filter(|&index| outcomes[index].is_none()).collect();
        let rest: Vec<&Delivery> = open.iter().map(|&index| &batch[index]).collect();
        for (index, outcome) in open.into_iter().zip(self.apply(&rest, draining).await?) {
            outcomes[index] = outcome;
        }
        for (delivery, _) in batch.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_some()) {
            self.answers.forget(delivery);
        }
        Ok(outcomes)
    }

    /// Claims and applies: all together; without those that the handler blames; message by message.
    async fn apply(&mut self, batch: &[&Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        if batch.iter().any(|delivery| is_suspect(delivery)) {
            return self.suspects(batch, draining).await;
        }
        let mut outcomes = vec![None; batch.len()];
        let mut rest: Vec<usize> = (0..batch.len()).collect();
        for _ in 0..=BLAMED_MAX {
            let together: Vec<&Delivery> = rest.iter().map(|&index| batch[index]).collect();
            let Some(sorted) = sort(&together) else { break };
            let Blamed { index, failure } = match self.together(&together, sorted).await {
                Ok(decided) => {
                    rest.into_iter().zip(decided).for_each(|(index, outcome)| outcomes[index] = Some(outcome));
                    return Ok(outcomes);
                }
                Err(blamed) => blamed,
            };
            match failure {
                Failure::Store(error) if !error.is_about_data() => return Err(error),
                Failure::Away(cause) | Failure::Unanswered { cause, .. } => {
                    self.away = Some(cause);
                    return Ok(outcomes);
                }
                failure => {
                    tracing::debug!(messages = together.len(), %failure, "the batch failed");
                    // It is known who is to blame: running it again would be an attempt more.
                    let Some(guilty) = index.or((rest.len() == 1).then_some(0)) else { break };
                    let guilty = rest.remove(guilty);
                    outcomes[guilty] = Some(self.blame(batch[guilty], failure, Run::InBatch).await?);
                    let mut stopped = Stopped::default();
                    stopped.note(batch[guilty], outcomes[guilty].as_ref());
                    rest.retain(|&index| index < guilty || stopped.lets(batch[index]));
                }
            }
            if rest.is_empty() {
                return Ok(outcomes);
            }
        }
        let singles: Vec<&Delivery> = rest.iter().map(|&index| batch[index]).collect();
        for (index, outcome) in rest.into_iter().zip(self.one_by_one(&singles, draining).await?) {
            outcomes[index] = outcome;
        }
        Ok(outcomes)
    }

    /// The path of nearly every message: one claim, one run of the handler and one commit for all.
    async fn together(&mut self, batch: &[&Delivery], sorted: Sorted<'_>) -> Result<Vec<Outcome>, Blamed> {
        let now_ns = now_ns();
        let mut tx = self.store.begin().await?;
        let (kinds, unique) = sorted;
        let mut claims = tx.claim(&unique, now_ns).await?.into_iter();
        let mut new = Vec::with_capacity(unique.len());
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(batch.len());
        for (index, (delivery, kind)) in batch.iter().zip(kinds).enumerate() {
            outcomes.push(match kind {
                Kind::Ignored(why) => Outcome::Ignored(why),
                Kind::Defective(reason, error) => {
                    defective(&mut tx, delivery, (reason, error), self.on_conflict).await?
                }
                Kind::RepeatOf(first) => match &outcomes[first] {
                    Outcome::Applied | Outcome::Ignored(Ignored::Order) => Outcome::Duplicate,
                    same @ (Outcome::Duplicate
                    | Outcome::Dropped
                    | Outcome::Ignored(_)
                    | Outcome::Retry { .. }
                    | Outcome::DeadLettered { .. }) => same.clone(),
                },
                Kind::First => match claims.next() {
                    Some(Claim::Processed(digest)) => of_known(&mut tx, delivery, digest, self.on_conflict).await?,
                    Some(Claim::Dead) => Outcome::Duplicate,
                    Some(Claim::New) | None if delivery.plan == Plan::Ignore => Outcome::Ignored(Ignored::Order),
                    Some(Claim::New) | None => {
                        new.push(index);
                        Outcome::Applied
                    }
                },
            });
        }
        if !new.is_empty() {
            let orders: Vec<Order<'_>> = new.iter().map(|&index| self.answers.order(batch[index])).collect();
            let applied = guarded(self.handler.as_ref(), &mut tx, &orders, self.publishing).await;
            applied.map_err(|failure| Blamed::new(failure, &new))?;
        }
        tx.record(&mut batch.iter().copied().zip(&mut outcomes).collect::<Vec<_>>(), now_ns).await?;
        tx.commit().await?;
        Ok(outcomes)
    }

    /// The same for a batch in which something failed: each message in its savepoint, one commit.
    async fn one_by_one(&mut self, batch: &[&Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        match self.in_savepoints(batch, draining).await {
            // The database refused at the commit what one of them did, for example a deferred foreign key. Only a separate
            // commit for each message shows which one.
            Err(error) if error.is_about_data() => self.in_transactions(batch, draining).await,
            ended => ended,
        }
    }

    async fn in_savepoints(&mut self, batch: &[&Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        let (rules, handler) = (self.rules(), self.handler.clone());
        let budget = Budget::new(draining);
        let mut outcomes = vec![None; batch.len()];
        let mut stopped = Stopped::default();
        let mut tx = self.store.begin().await?;
        for (index, delivery) in batch.iter().enumerate() {
            if !stopped.lets(delivery) {
                continue;
            }
            match single(&mut tx, handler.as_ref(), self.answers.order(delivery), rules, Run::InBatch).await? {
                Single::Decided(decided) => outcomes[index] = Some(decided),
                Single::Ended(failure) => {
                    outcomes.fill(None);
                    outcomes[index] = Some(self.blame(delivery, failure, Run::InBatch).await?);
                    return Ok(outcomes);
                }
                Single::Away(cause) => {
                    self.away = Some(cause);
                    break;
                }
            }
            stopped.note(delivery, outcomes[index].as_ref());
            if budget.is_spent() {
                break;
            }
        }
        tx.commit().await?;
        Ok(outcomes)
    }

    async fn in_transactions(&mut self, batch: &[&Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        let budget = Budget::new(draining);
        let mut outcomes = vec![None; batch.len()];
        let mut stopped = Stopped::default();
        for (delivery, outcome) in batch.iter().zip(&mut outcomes) {
            if !stopped.lets(delivery) {
                continue;
            }
            *outcome = self.transaction(delivery, Run::InBatch).await?;
            stopped.note(delivery, outcome.as_ref());
            if budget.is_spent() || self.away.is_some() {
                break;
            }
        }
        Ok(outcomes)
    }

    /// One message, one commit; a commit that is refused for what the message did is the message's failure.
    async fn transaction(&mut self, delivery: &Delivery, run: Run) -> Result<Option<Outcome>, Error> {
        let (rules, handler) = (self.rules(), self.handler.clone());
        let mut tx = self.store.begin().await?;
        let outcome = match single(&mut tx, handler.as_ref(), self.answers.order(delivery), rules, run).await? {
            Single::Decided(outcome) => Some(outcome),
            Single::Ended(failure) => return self.blame(delivery, failure, run).await.map(Some),
            Single::Away(cause) => {
                self.away = Some(cause);
                None
            }
        };
        match tx.commit().await {
            Ok(()) => Ok(outcome),
            Err(error) if error.is_about_data() => self.blame(delivery, Failure::Store(error), run).await.map(Some),
            Err(error) => Err(error),
        }
    }

    /// Commits the outcome of a failure whose transaction is undone already.
    async fn blame(&mut self, delivery: &Delivery, failure: Failure, run: Run) -> Result<Outcome, Error> {
        let rules = self.rules();
        let mut tx = self.store.begin().await?;
        let outcome = failed(&mut tx, delivery, &failure, rules, run, now_ns()).await?;
        tx.commit().await?;
        Ok(outcome)
    }

    fn rules(&self) -> Rules {
        Rules {
            retry: self.retry,
            on_conflict: self.on_conflict,
            max_deliver: self.max_deliver,
            publishing: self.publishing,
        }
    }

    /// Messages that may be killing the process: what is known already is decided first, the others run alone.
    async fn suspects(&mut self, batch: &[&Delivery], draining: &CancellationToken) -> Result<Outcomes, Error> {
        let budget = Budget::new(draining);
        let mut outcomes: Outcomes = self.decide_known(batch).await?;
        let mut stopped = Stopped::default();
        for (delivery, outcome) in batch.iter().zip(&mut outcomes).filter(|(_, outcome)| outcome.is_none()) {
            if !stopped.lets(delivery) {
                continue;
            }
            *outcome = self.alone(delivery).await?;
            stopped.note(delivery, outcome.as_ref());
            if budget.is_spent() || self.away.is_some() {
                break;
            }
        }
        Ok(outcomes)
    }

    /// Decides duplicates and conflicts. They need no run of the handler, and after a crash of the server most redelivered messages
    /// are duplicates.
    async fn decide_known(&mut self, batch: &[&Delivery]) -> Result<Outcomes, Error> {
        let now_ns = now_ns();
        let on_conflict = self.on_conflict;
        let mut tx = self.store.begin().await?;
        let known = tx.known(batch).await?;
        let mut outcomes = Vec::with_capacity(batch.len());
        for (delivery, known) in batch.iter().zip(known) {
            let mut outcome = match known {
                Claim::New => None,
                Claim::Dead => Some(Outcome::Duplicate),
                Claim::Processed(digest) => Some(of_known(&mut tx, delivery, digest, on_conflict).await?),
            };
            if let Some(outcome) = &mut outcome {
                tx.record(&mut [(delivery, outcome)], now_ns).await?;
            }
            outcomes.push(outcome);
        }
        tx.commit().await?;
        Ok(outcomes)
    }

    /// Runs one message with its start on record, or quarantines it if too many starts have had no end.
    async fn alone(&mut self, delivery: &Delivery) -> Result<Option<Outcome>, Error> {
        let now_ns = now_ns();
        let max_attempts = self.retry.max_attempts;
        let mut tx = self.store.begin().await?;
        let attempts = tx.attempts(&delivery.id).await?;
        if self.begun.as_ref() != Some(&delivery.id) || attempts.started == 0 {
            if let Some(other) = &self.begun {
                end_start(&mut tx, other, now_ns).await?;
            }
            if attempts.started >= max_attempts {
                let mut outcome = dead(
                    Reason::CrashLoop,
                    format!("the process ended during each of {} runs of this message", attempts.started),
                );
                tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
                tx.commit().await?;
                self.begun = None;
                return Ok(Some(outcome));
            }
            tx.set_attempts(&delivery.id, attempts.begun(), None, now_ns).await?;
        }
        // Even if the commit fails: the start may be in the database, and it was not a crash.
        self.begun = Some(delivery.id.clone());
        tx.commit().await?;
        let outcome = self.transaction(delivery, Run::Recorded).await?;
        // A run whose service was away is put off. Its start stays recorded, as after an error of the database.
        if outcome.is_some() {
            self.begun = None;
        }
        Ok(outcome)
    }
}

/// Deletes a recorded start that was not a crash. If its message has an outcome by now, no start is recorded.
async fn end_start(tx: &mut Tx<'_>, id: &str, now_ns: i64) -> Result<(), Error> {
    let attempts = tx.attempts(id).await?;
    if attempts.started > 0 {
        tx.set_attempts(id, attempts.ended(), None, now_ns).await?;
    }
    Ok(())
}

/// Whether a message was delivered so often that it runs alone. A message that the handler never sees cannot kill the process.
pub fn is_suspect(delivery: &Delivery) -> bool {
    delivery.raw.position.delivered >= SUSPECT_FROM && delivery.is_for_the_handler()
}

fn now_ns() -> i64 {
    unix_ns(SystemTime::now())
}
