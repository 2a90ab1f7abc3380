//! One batch in one transaction: claim the ids, apply the effects, commit. Says of every message what became of it.
//!
//! The batch is tried as a whole. If anything in it fails, all of it is undone. If the handler names the order to blame, the rest
//! runs together again. Otherwise the batch runs message by message, each in a savepoint, so that one bad order harms no other. An error that is about the database and not about a message judges
//! nothing: it goes to the caller, no attempt is spent, and the same batch is tried again later.

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;

use crate::config::OnConflict;
use crate::handler::{Failure, Handler, Order};
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::model::outcome::{Ignored, Outcome, Reason};
use crate::model::text::{chain, shortened};
use crate::model::time::{seconds_text, unix_ns};
use crate::store::{Attempts, Claim, Earlier, Error, Store, Tx};
use crate::worker::calls::{Called, Calls};
use crate::worker::retry::{RetryPolicy, Verdict};

pub mod replay;

/// From this delivery on a message travels alone, its start recorded: it may be the one that keeps killing the process.
pub const SUSPECT_FROM: u64 = 3;
/// Orders of one batch that the handler may name as the guilty ones before the batch runs message by message.
const BLAMED_MAX: usize = 8;
/// A pass over single messages, or over calls, commits what it has after this long and leaves the rest for the next one, so that finished
/// messages are acknowledged and a stop is not held up.
const SINGLES_BUDGET: Duration = Duration::from_secs(1);

/// Characters of an id in the text of a conflict; the id itself is in the dead letter.
const ID_MAX: usize = 200;

/// Outcomes in the order of the batch; `None` for a message that this pass did not come to.
pub type Outcomes = Vec<Option<Outcome>>;

/// The database and the handler, behind one function.
pub struct Inbox {
    store: Store,
    handler: Arc<dyn Handler>,
    retry: RetryPolicy,
    on_conflict: OnConflict,
    calls: Calls,
    /// Why the handler could not work on any message in the last batch, if so. No message is to blame.
    pub away: Option<String>,
    /// The last delivery that the consumer allows, if there is a last one.
    pub max_deliver: Option<u64>,
    /// The id of a message whose start is recorded and whose run ended in no outcome, since the database failed. The process
    /// lives, so that start must not count as a crash.
    begun: Option<Arc<str>>,
}

impl Inbox {
    pub fn new(store: Store, handler: Arc<dyn Handler>, retry: RetryPolicy, on_conflict: OnConflict) -> Self {
        let calls = Calls::default();
        Self { store, handler, retry, on_conflict, calls, away: None, max_deliver: None, begun: None }
    }

    /// Runs one batch: all [suspects](is_suspect) or none, in stream order, no stream sequence twice.
    ///
    /// When it returns outcomes, they are durable. `hurry` makes a pass over single messages stop early.
    ///
    /// # Errors
    /// When the database failed in a way that no message is to blame for. Then nothing is known to be durable.
    pub async fn process(&mut self, batch: &[Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        self.away = None;
        let outcomes = self.run(batch, hurry).await;
        if let Err(error) = &outcomes {
            self.store.give_up(error).await;
        }
        outcomes
    }

    /// The store, between two batches.
    pub fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// Takes a start that had no end off the record, since this process did not crash in it, and closes the database.
    pub async fn close(mut self) -> Result<(), Error> {
        if let Some(id) = self.begun.take() {
            let ended = self.end(&id).await;
            if let Err(error) = ended {
                tracing::warn!(message_id = %id, error = %chain(&error), "a run that was put off counts as a crash");
                self.store.give_up(&error).await;
            }
        }
        self.store.close().await
    }

    async fn end(&mut self, id: &str) -> Result<(), Error> {
        let mut tx = self.store.begin().await?;
        end_start(&mut tx, id, now_ns()).await?;
        tx.commit().await
    }

    async fn run(&mut self, batch: &[Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        let all: Vec<&Delivery> = batch.iter().collect();
        if self.handler.concurrency() == 0 {
            return self.apply(&all, hurry).await;
        }
        let mut outcomes = vec![None; batch.len()];
        let mut ready = Vec::with_capacity(batch.len());
        for (index, called) in self.call(&all, hurry).await?.into_iter().enumerate() {
            match called {
                Called::Ready => ready.push(index),
                Called::Left => {}
                Called::Failed(failure) => {
                    outcomes[index] = Some(self.blame(all[index], failure, Run::InBatch).await?);
                }
            }
        }
        let answered: Vec<&Delivery> = ready.iter().map(|&index| all[index]).collect();
        for (index, outcome) in ready.into_iter().zip(self.apply(&answered, hurry).await?) {
            outcomes[index] = outcome;
        }
        self.calls
            .forget(all.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_some()).map(|(delivery, _)| *delivery));
        Ok(outcomes)
    }

    /// Runs the calls that the batch needs, outside any transaction. Known ids need none.
    async fn call(&mut self, batch: &[&Delivery], hurry: &CancellationToken) -> Result<Vec<Called>, Error> {
        let mut tx = self.store.begin().await?;
        let known = tx.known(batch).await?;
        tx.commit().await?;
        let pass = Pass::new(hurry);
        let (called, away) = self.calls.run(self.handler.as_ref(), batch, &known, || pass.is_over()).await;
        self.away = away;
        Ok(called)
    }

    /// Claims and applies: all together; without those that the handler blames; message by message.
    async fn apply(&mut self, batch: &[&Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        if batch.iter().any(|delivery| is_suspect(delivery)) {
            return self.suspects(batch, hurry).await;
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
                Failure::Away(cause) => {
                    self.away = Some(cause);
                    return Ok(outcomes);
                }
                failure => {
                    tracing::debug!(messages = together.len(), %failure, "the batch failed");
                    // It is known who is to blame: running it again would be an attempt more.
                    let Some(guilty) = index.or((rest.len() == 1).then_some(0)) else { break };
                    let guilty = rest.remove(guilty);
                    outcomes[guilty] = Some(self.blame(batch[guilty], failure, Run::InBatch).await?);
                }
            }
            if rest.is_empty() {
                return Ok(outcomes);
            }
        }
        let singles: Vec<&Delivery> = rest.iter().map(|&index| batch[index]).collect();
        for (index, outcome) in rest.into_iter().zip(self.one_by_one(&singles, hurry).await?) {
            outcomes[index] = outcome;
        }
        Ok(outcomes)
    }

    /// The path of nearly every message: one claim, one apply, one commit for all.
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
                    Outcome::Applied => Outcome::Duplicate,
                    same @ (Outcome::Duplicate
                    | Outcome::Dropped
                    | Outcome::Ignored(_)
                    | Outcome::Retry { .. }
                    | Outcome::DeadLettered { .. }) => same.clone(),
                },
                Kind::First => match claims.next() {
                    Some(Claim::Processed(digest)) => judged(&mut tx, delivery, digest, self.on_conflict).await?,
                    Some(Claim::Dead) => Outcome::Duplicate,
                    Some(Claim::New) | None => {
                        new.push(index);
                        Outcome::Applied
                    }
                },
            });
        }
        if !new.is_empty() {
            let orders: Vec<Order<'_>> = new.iter().map(|&index| self.calls.order(batch[index])).collect();
            let applied = guarded(self.handler.as_ref(), &mut tx, &orders).await;
            applied.map_err(|failure| Blamed::new(failure, &new))?;
        }
        tx.record(&mut batch.iter().copied().zip(&mut outcomes).collect::<Vec<_>>(), now_ns).await?;
        tx.commit().await?;
        Ok(outcomes)
    }

    /// The same for a batch in which something failed: each message in its savepoint, one commit.
    async fn one_by_one(&mut self, batch: &[&Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        match self.in_savepoints(batch, hurry).await {
            // The database refuses at the commit what one of them did, a deferred foreign key for one. Which of them shows
            // only when each has a commit of its own.
            Err(error) if error.is_about_data() => self.in_transactions(batch, hurry).await,
            ended => ended,
        }
    }

    async fn in_savepoints(&mut self, batch: &[&Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        let (judge, handler) = (self.judge(), self.handler.clone());
        let pass = Pass::new(hurry);
        let mut outcomes = vec![None; batch.len()];
        let mut tx = self.store.begin().await?;
        for (delivery, outcome) in batch.iter().zip(&mut outcomes) {
            match single(&mut tx, handler.as_ref(), self.calls.order(delivery), judge, Run::InBatch).await? {
                Single::Decided(decided) => *outcome = Some(decided),
                Single::Away(cause) => {
                    self.away = Some(cause);
                    break;
                }
            }
            if pass.is_over() {
                break;
            }
        }
        tx.commit().await?;
        Ok(outcomes)
    }

    async fn in_transactions(&mut self, batch: &[&Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        let pass = Pass::new(hurry);
        let mut outcomes = vec![None; batch.len()];
        for (delivery, outcome) in batch.iter().zip(&mut outcomes) {
            *outcome = self.transaction(delivery, Run::InBatch).await?;
            if pass.is_over() || self.away.is_some() {
                break;
            }
        }
        Ok(outcomes)
    }

    /// One message, one commit; a commit that is refused for what the message did is the message's failure.
    async fn transaction(&mut self, delivery: &Delivery, run: Run) -> Result<Option<Outcome>, Error> {
        let (judge, handler) = (self.judge(), self.handler.clone());
        let mut tx = self.store.begin().await?;
        let outcome = match single(&mut tx, handler.as_ref(), self.calls.order(delivery), judge, run).await? {
            Single::Decided(outcome) => Some(outcome),
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
        let judge = self.judge();
        let mut tx = self.store.begin().await?;
        let outcome = failed(&mut tx, delivery, failure, judge, run, now_ns()).await?;
        tx.commit().await?;
        Ok(outcome)
    }

    fn judge(&self) -> Judge {
        Judge { retry: self.retry, on_conflict: self.on_conflict, max_deliver: self.max_deliver }
    }

    /// Messages that may be killing the process: what is known already is settled at once, the others run alone.
    async fn suspects(&mut self, batch: &[&Delivery], hurry: &CancellationToken) -> Result<Outcomes, Error> {
        let pass = Pass::new(hurry);
        let mut outcomes: Outcomes = self.settle(batch).await?;
        for (delivery, outcome) in batch.iter().zip(&mut outcomes).filter(|(_, outcome)| outcome.is_none()) {
            *outcome = self.alone(delivery).await?;
            if pass.is_over() || self.away.is_some() {
                break;
            }
        }
        Ok(outcomes)
    }

    /// Duplicates and conflicts need no run of the handler: after a crash of the server they are most of what comes again.
    async fn settle(&mut self, batch: &[&Delivery]) -> Result<Outcomes, Error> {
        let now_ns = now_ns();
        let on_conflict = self.on_conflict;
        let mut tx = self.store.begin().await?;
        let known = tx.known(batch).await?;
        let mut outcomes = Vec::with_capacity(batch.len());
        for (delivery, known) in batch.iter().zip(known) {
            let mut outcome = match known {
                Claim::New => None,
                Claim::Dead => Some(Outcome::Duplicate),
                Claim::Processed(digest) => Some(judged(&mut tx, delivery, digest, on_conflict).await?),
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
        // Also if the commit fails: it may stand all the same, and was no crash.
        self.begun = Some(delivery.id.clone());
        tx.commit().await?;
        let outcome = self.transaction(delivery, Run::Recorded).await?;
        // A run that found its service away is put off. Its start stays on record, as after an error of the database.
        if outcome.is_some() {
            self.begun = None;
        }
        Ok(outcome)
    }
}

/// Takes a start that was no crash off the record. If its message has had its outcome since, there is none on it.
async fn end_start(tx: &mut Tx<'_>, id: &str, now_ns: i64) -> Result<(), Error> {
    let attempts = tx.attempts(id).await?;
    if attempts.started > 0 {
        tx.set_attempts(id, attempts.ended(), None, now_ns).await?;
    }
    Ok(())
}

/// Whether a delivery has come so often that it travels alone. One that the handler never sees does no harm.
pub fn is_suspect(delivery: &Delivery) -> bool {
    delivery.raw.position.delivered >= SUSPECT_FROM && delivery.defect.is_none() && delivery.ignored.is_none()
}

/// How long a pass over single messages goes on: at least for one of them.
struct Pass<'a> {
    hurry: &'a CancellationToken,
    began: Instant,
}

impl<'a> Pass<'a> {
    fn new(hurry: &'a CancellationToken) -> Self {
        Self { hurry, began: Instant::now() }
    }

    fn is_over(&self) -> bool {
        self.hurry.is_cancelled() || self.began.elapsed() >= SINGLES_BUDGET
    }
}

/// What decides over a single message.
#[derive(Clone, Copy)]
struct Judge {
    retry: RetryPolicy,
    on_conflict: OnConflict,
    max_deliver: Option<u64>,
}

/// Whether the start of a run is on record and has to be taken off it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Run {
    InBatch,
    Recorded,
}

/// What came of one message in its savepoint.
enum Single {
    Decided(Outcome),
    /// Undone, since what the handler needs is away.
    Away(String),
}

/// Claims and applies one message in a savepoint. A failure undoes that much and becomes the message's outcome.
async fn single(
    tx: &mut Tx<'_>,
    handler: &dyn Handler,
    order: Order<'_>,
    judge: Judge,
    run: Run,
) -> Result<Single, Error> {
    let now_ns = now_ns();
    let delivery = order.delivery;
    if let Some(why) = delivery.ignored {
        return Ok(Single::Decided(Outcome::Ignored(why)));
    }
    if let Some((reason, error)) = &delivery.defect {
        let mut outcome = defective(tx, delivery, (*reason, error), judge.on_conflict).await?;
        tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
        return Ok(Single::Decided(outcome));
    }
    tx.savepoint().await?;
    let mut outcome = match tx.claim(&[delivery], now_ns).await?.first() {
        Some(Claim::Processed(digest)) => judged(tx, delivery, *digest, judge.on_conflict).await?,
        Some(Claim::Dead) => Outcome::Duplicate,
        Some(Claim::New) | None => match guarded(handler, tx, &[order]).await.map_err(Failure::into_inner) {
            Ok(()) => Outcome::Applied,
            Err(Failure::Store(error)) if !error.is_about_data() => return Err(error),
            Err(Failure::Away(cause)) => {
                tx.undo().await?;
                return Ok(Single::Away(cause));
            }
            Err(failure) => {
                tx.undo().await?;
                return failed(tx, delivery, failure, judge, run, now_ns).await.map(Single::Decided);
            }
        },
    };
    tx.keep().await?;
    tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
    Ok(Single::Decided(outcome))
}

/// Counts the failure and decides whether there is another attempt.
async fn failed(
    tx: &mut Tx<'_>,
    delivery: &Delivery,
    failure: Failure,
    judge: Judge,
    run: Run,
    now_ns: i64,
) -> Result<Outcome, Error> {
    let before = tx.attempts(&delivery.id).await?;
    let ended = if run == Run::Recorded { before.ended() } else { before };
    let attempts = Attempts { failed: ended.failed.saturating_add(1), ..ended };
    let error = chain(&failure);
    let last_delivery = judge.max_deliver.is_some_and(|max| delivery.raw.position.delivered >= max);
    let mut outcome = match judge.retry.verdict(&failure, attempts.failed, last_delivery) {
        Verdict::Bury(reason) => dead(reason, error),
        Verdict::Again(delay) => Outcome::Retry { delay: RetryPolicy::jitter(delay, fastrand::f64()), error },
    };
    if let Outcome::Retry { error, .. } = &outcome {
        tx.set_attempts(&delivery.id, attempts, Some(error), now_ns).await?;
    }
    tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
    Ok(outcome)
}

/// What becomes of a message that is not applied whatever the handler says: a dead letter, unless it was processed or lies there
/// already. One that the server gave up may have been applied on its last delivery.
async fn defective(
    tx: &mut Tx<'_>,
    delivery: &Delivery,
    (reason, error): (Reason, &str),
    on_conflict: OnConflict,
) -> Result<Outcome, Error> {
    Ok(match tx.known(&[delivery]).await?.first() {
        Some(Claim::Processed(digest)) => judged(tx, delivery, *digest, on_conflict).await?,
        Some(Claim::Dead) => Outcome::Duplicate,
        Some(Claim::New) | None => dead(reason, error.to_owned()),
    })
}

/// Runs the handler; a panic is a failure that may pass, not the end of the process.
async fn guarded(handler: &dyn Handler, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
    // What a panic may leave half done lies in the transaction, and that is undone.
    caught(handler.apply(tx, orders)).await
}

/// Runs a part of the handler; a panic in it is a failure that may pass.
pub(super) async fn caught<T>(part: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let run = AssertUnwindSafe(part).catch_unwind().await;
    run.unwrap_or_else(|panic| Err(Failure::Retry(format!("the handler panicked: {}", panic_text(panic.as_ref())))))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// A failure of a batch, and the message in it that is to blame, if that is known.
struct Blamed {
    index: Option<usize>,
    failure: Failure,
}

impl Blamed {
    /// `applied`: where the orders that the handler got stand in the batch.
    fn new(failure: Failure, applied: &[usize]) -> Self {
        let index = match &failure {
            Failure::At { index, .. } => applied.get(*index).copied(),
            Failure::Retry(_) | Failure::Permanent(_) | Failure::Away(_) | Failure::Store(_) => None,
        };
        Self { index, failure: failure.into_inner() }
    }
}

impl From<Error> for Blamed {
    fn from(error: Error) -> Self {
        Self { index: None, failure: error.into() }
    }
}

/// What a message is within its batch.
enum Kind<'a> {
    First,
    /// The same message stands at this index before.
    RepeatOf(usize),
    Defective(Reason, &'a str),
    Ignored(Ignored),
}

/// The kind of each message, and those whose ids are to be claimed.
type Sorted<'a> = (Vec<Kind<'a>>, Vec<&'a Delivery>);

/// `None` if two messages of the batch differ under one id. Which of them the id belongs to depends on what becomes of the
/// first, so such a batch runs message by message.
fn sort<'a>(batch: &[&'a Delivery]) -> Option<Sorted<'a>> {
    let mut seen: HashMap<&str, usize> = HashMap::with_capacity(batch.len());
    let mut unique = Vec::with_capacity(batch.len());
    let mut kinds = Vec::with_capacity(batch.len());
    for (index, &delivery) in batch.iter().enumerate() {
        if let Some(why) = delivery.ignored {
            kinds.push(Kind::Ignored(why));
            continue;
        }
        if let Some((reason, error)) = &delivery.defect {
            kinds.push(Kind::Defective(*reason, error));
            continue;
        }
        // One look for both: hashing the ids is most of the work here.
        match seen.entry(&delivery.id) {
            Entry::Occupied(first) if batch[*first.get()].digest != delivery.digest => return None,
            Entry::Occupied(first) => kinds.push(Kind::RepeatOf(*first.get())),
            Entry::Vacant(place) => {
                place.insert(index);
                unique.push(delivery);
                kinds.push(Kind::First);
            }
        }
    }
    Some((kinds, unique))
}

/// The outcome of a message whose id was processed with digest `known`.
async fn judged(
    tx: &mut Tx<'_>,
    delivery: &Delivery,
    known: Digest,
    on_conflict: OnConflict,
) -> Result<Outcome, Error> {
    Ok(match on_conflict {
        _ if delivery.digest == known => Outcome::Duplicate,
        OnConflict::Duplicate => Outcome::Dropped,
        OnConflict::DeadLetter => {
            let earlier = tx.earlier(&delivery.id).await?;
            dead(Reason::Conflict, conflict_text(delivery, earlier))
        }
    })
}

/// Names the earlier message and what differs. Only an id that begins with the subject proves that the subject is the same.
fn conflict_text(delivery: &Delivery, earlier: Option<Earlier>) -> String {
    let by = earlier.map_or_else(String::new, |Earlier { stream_seq, processed_at_ns }| {
        format!(" by stream sequence {stream_seq} (processed at {})", seconds_text(processed_at_ns))
    });
    let same_subject = delivery.id.strip_prefix(&*delivery.raw.subject).is_some_and(|rest| rest.starts_with(' '));
    let what = if same_subject { "payload" } else { "subject or payload" };
    format!("message id {:?} was used before{by}, with another {what}", shortened(&delivery.id, ID_MAX))
}

fn dead(reason: Reason, error: String) -> Outcome {
    Outcome::DeadLettered { reason, error }
}

fn now_ns() -> i64 {
    unix_ns(SystemTime::now())
}
