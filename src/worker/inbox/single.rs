//! One message: claimed and applied in a savepoint, judged by its failure, or by the message that has its id already.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;

use super::now_ns;
use crate::config::OnConflict;
use crate::handler::{Failure, Handler, Order};
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::model::outbox;
use crate::model::outcome::{Ignored, Outcome, Reason};
use crate::model::plan::Plan;
use crate::model::text::{chain, panic_text, shortened};
use crate::model::time::seconds_text;
use crate::store::{Attempts, Claim, Earlier, Error, ErrorClass, Retry, Tx};
use crate::worker::retry::{NextStep, RetryPolicy};

/// Characters of an id in the text of a conflict. The whole id is in the dead letter.
const ID_MAX: usize = 200;

/// What decides over a single message.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) retry: RetryPolicy,
    pub(super) on_conflict: OnConflict,
    pub(super) max_deliver: Option<u64>,
    pub(super) publishing: Publishing,
}

/// What holds for the rows that the handler writes into the outbox.
#[derive(Clone, Copy, Debug, Default)]
pub struct Publishing {
    /// The largest message that the server accepts, if it is known.
    pub max_payload: Option<usize>,
    /// The orders may have been applied in a former life of the database, and their messages published.
    pub is_repair: bool,
}

/// Whether the start of a run is recorded, so that its end must be recorded too.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    InBatch,
    Recorded,
}

/// What came of one message in its savepoint.
pub(super) enum Single {
    Decided(Outcome),
    /// Undone, because the handler reported that something it needs is away.
    Away(String),
    /// The failure ended the whole transaction, for example because SQLite ended a statement that took too long. Nothing of this
    /// pass is left.
    Ended(Failure),
}

/// Claims and applies one message in a savepoint. A failure undoes that much and becomes the message's outcome.
pub(super) async fn single(
    tx: &mut Tx<'_>,
    handler: &dyn Handler,
    order: Order<'_>,
    rules: Rules,
    run: Run,
) -> Result<Single, Error> {
    let now_ns = now_ns();
    let delivery = order.delivery;
    if let Some(why) = delivery.ignored {
        return Ok(Single::Decided(Outcome::Ignored(why)));
    }
    if let Some((reason, error)) = &delivery.defect {
        let mut outcome = defective(tx, delivery, (*reason, error), rules.on_conflict).await?;
        tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
        return Ok(Single::Decided(outcome));
    }
    tx.savepoint().await?;
    let mut outcome = match tx.claim(&[delivery], now_ns).await?.first() {
        Some(Claim::Processed(digest)) => of_known(tx, delivery, *digest, rules.on_conflict).await?,
        Some(Claim::Dead) => Outcome::Duplicate,
        Some(Claim::New) | None if delivery.plan == Plan::Ignore => Outcome::Ignored(Ignored::Order),
        Some(Claim::New) | None => {
            match guarded(handler, tx, &[order], rules.publishing).await.map_err(Failure::into_inner) {
                Ok(()) => Outcome::Applied,
                Err(Failure::Store(error)) if !error.is_about_data() => return Err(error),
                Err(Failure::Away(cause) | Failure::Unanswered { cause, .. }) => {
                    tx.undo().await?;
                    return Ok(Single::Away(cause));
                }
                Err(failure) => {
                    match tx.undo().await {
                        Ok(()) => {}
                        // No savepoint is left to return to.
                        Err(error) if error.class == ErrorClass::Other => return Ok(Single::Ended(failure)),
                        Err(error) => return Err(error),
                    }
                    return failed(tx, delivery, &failure, rules, run, now_ns).await.map(Single::Decided);
                }
            }
        }
    };
    tx.keep().await?;
    tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
    Ok(Single::Decided(outcome))
}

/// Counts the failure and decides whether there is another attempt.
pub(super) async fn failed(
    tx: &mut Tx<'_>,
    delivery: &Delivery,
    failure: &Failure,
    rules: Rules,
    run: Run,
    now_ns: i64,
) -> Result<Outcome, Error> {
    let before = tx.attempts(&delivery.id).await?;
    let ended = if run == Run::Recorded { before.ended() } else { before };
    let attempts = Attempts { failed: ended.failed.saturating_add(1), ..ended };
    let error = chain(failure);
    let last_delivery = rules.max_deliver.is_some_and(|max| delivery.raw.position.delivered >= max);
    let mut outcome = match rules.retry.next_step(failure, attempts.failed, last_delivery) {
        NextStep::DeadLetter(reason) => dead(reason, error),
        NextStep::Again(delay) => Outcome::Retry { delay: RetryPolicy::jitter(delay, fastrand::f64()), error },
    };
    if let Outcome::Retry { error, delay } = &outcome {
        tx.set_attempts(&delivery.id, attempts, Some(error), now_ns).await?;
        if let Some(key) = &delivery.key {
            let due_ns = now_ns.saturating_add(i64::try_from(delay.as_nanos()).unwrap_or(i64::MAX));
            let retry =
                Retry { stream_seq: delivery.raw.position.stream_seq, key: key.clone(), due_ns, failed_at_ns: now_ns };
            tx.set_retry(&delivery.id, &retry).await?;
        }
    }
    tx.record(&mut [(delivery, &mut outcome)], now_ns).await?;
    Ok(outcome)
}

/// The outcome of a message that must not be applied: a dead letter, unless the message was processed or is a dead letter already.
/// A message that the server gave up may have been applied on its last delivery.
pub(super) async fn defective(
    tx: &mut Tx<'_>,
    delivery: &Delivery,
    (reason, error): (Reason, &str),
    on_conflict: OnConflict,
) -> Result<Outcome, Error> {
    Ok(match tx.known(&[delivery]).await?.first() {
        Some(Claim::Processed(digest)) => of_known(tx, delivery, *digest, on_conflict).await?,
        Some(Claim::Dead) => Outcome::Duplicate,
        Some(Claim::New) | None => dead(reason, error.to_owned()),
    })
}

/// Runs the handler and checks what it wrote into the outbox; a panic is a failure that may pass, not the end of the process.
pub(super) async fn guarded(
    handler: &dyn Handler,
    tx: &mut Tx<'_>,
    orders: &[Order<'_>],
    publishing: Publishing,
) -> Result<(), Failure> {
    // Whatever a panic leaves half done is in the transaction, and the transaction is undone.
    caught(handler.apply(tx, orders)).await?;
    let rows = tx.outbox_written().await?;
    rows.iter().try_for_each(|row| outbox::check(row, publishing.max_payload)).map_err(Failure::Permanent)?;
    if publishing.is_repair
        && let Some(first) = orders.iter().map(|order| order.delivery.raw.position.published_ns).min()
    {
        tx.seek_outbox_rows(&rows, first).await?;
    }
    Ok(())
}

/// Runs a part of the handler; a panic in it is a failure that may pass.
pub(in crate::worker) async fn caught<T>(part: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let run = AssertUnwindSafe(part).catch_unwind().await;
    run.unwrap_or_else(|panic| Err(Failure::Retry(format!("the handler panicked: {}", panic_text(panic.as_ref())))))
}

/// The outcome of a message whose id was processed with digest `known`.
pub(super) async fn of_known(
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

/// Names the earlier message and what differs. The subject cannot differ if the id begins with it, or if the digest is of the
/// payload alone.
fn conflict_text(delivery: &Delivery, earlier: Option<Earlier>) -> String {
    let by = earlier.map_or_else(String::new, |Earlier { stream_seq, processed_at_ns }| {
        format!(" by stream sequence {stream_seq} (processed at {})", seconds_text(processed_at_ns))
    });
    let same_subject = delivery.id.strip_prefix(&*delivery.raw.subject).is_some_and(|rest| rest.starts_with(' '));
    let any_subject = delivery.digest == Digest::of("", &delivery.raw.payload);
    let what = if same_subject || any_subject { "payload" } else { "subject or payload" };
    format!("message id {:?} was used before{by}, with another {what}", shortened(&delivery.id, ID_MAX))
}

pub(super) fn dead(reason: Reason, error: String) -> Outcome {
    Outcome::DeadLettered { reason, error }
}
