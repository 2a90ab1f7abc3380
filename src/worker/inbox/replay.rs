//! One dead letter in one transaction: claim the id, apply the effect, delete the dead letter.

use std::sync::Arc;

use super::now_ns;
use super::single::{Publishing, caught, guarded};
use crate::handler::{Answer, Failure, Handler, Order, planned};
use crate::model::id::Digest;
use crate::model::letter::{Closed, Closing, Letter};
use crate::model::plan::Plan;
use crate::model::schemes::IdSchemes;
use crate::model::text::chain;
use crate::store::{Claim, Error, Store};

/// What an operator wants of a replay.
#[derive(Clone, Debug)]
pub struct Replay {
    /// `user@host`, for the record.
    pub by: String,
    /// Give a letter an id of its own if its id belongs to another order. Apply a letter without a readable id under its place.
    pub as_new: bool,
    /// How the ids of the database are made.
    pub schemes: IdSchemes,
    /// Run everything and undo it.
    pub dry_run: bool,
}

/// The result of the replay of one dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// Under this id.
    Applied(String),
    /// The handler ignores the order. Its id is claimed.
    Ignored,
    /// The message was applied before under this id. Only the dead letter was left.
    Known(String),
    /// Its id belongs to another order. The letter stays.
    Conflict,
    /// Its publisher's id cannot be read, so the order may have been applied under that id. The letter stays.
    NoId,
    /// The letter stays, with this error.
    Failed(String),
    /// The dead letter no longer exists.
    Gone,
}

/// Applies a dead letter in one transaction with its removal, as the daemon would have applied the message. Works beside the
/// daemon, through a [store of its own](Store::open_beside).
///
/// # Errors
/// When the database failed in a way that the letter is not to blame for. Then nothing of it happened, or the commit's end is
/// unknown; to do it again is safe.
pub async fn replay(
    store: &mut Store,
    handler: &dyn Handler,
    (id, digest): (&str, Digest),
    wish: &Replay,
) -> Result<Replayed, Error> {
    let replayed = match call(store, handler, (id, digest), wish).await {
        Ok(answer) => replay_in_transaction(store, handler, (id, digest), answer.as_ref(), wish).await,
        Err(failure) => Err(failure),
    };
    // Releases the write lock, even after a dry run: the daemon may wait for the lock.
    store.roll_back().await;
    let failure = match replayed {
        Ok(replayed) => return Ok(replayed),
        Err(Failure::Store(error)) if !error.is_about_data() => return Err(error),
        Err(failure) => chain(&failure),
    };
    if !wish.dry_run {
        let mut tx = store.begin().await?;
        tx.set_letter_error(id, digest, &failure).await?;
        tx.commit().await?;
    }
    Ok(Replayed::Failed(failure))
}

/// Calls for the letter before the transaction, as the daemon does for a message; `None` if no call is needed.
async fn call(
    store: &mut Store,
    handler: &dyn Handler,
    (id, digest): (&str, Digest),
    wish: &Replay,
) -> Result<Option<Answer>, Failure> {
    if handler.services().is_empty() || wish.dry_run {
        return Ok(None);
    }
    let mut tx = store.begin().await?;
    let Some(letter) = tx.take_letter(id, digest).await? else { return Ok(None) };
    if is_without_id(&letter, wish) {
        store.roll_back().await;
        return Ok(None);
    }
    let mut delivery = planned(handler, letter.delivery());
    let mut known = tx.known(&[&delivery]).await?.pop();
    if wish.as_new && is_conflict(known, digest) {
        delivery.id = own_id(id, digest);
        known = tx.known(&[&delivery]).await?.pop();
    }
    // No transaction is open during a call, and the letter is still there.
    store.roll_back().await;
    match known {
        Some(Claim::New) | None if delivery.plan == Plan::Call => caught(handler.call(&delivery)).await.map(Some),
        Some(Claim::New | Claim::Processed(_) | Claim::Dead) | None => Ok(None),
    }
}

async fn replay_in_transaction(
    store: &mut Store,
    handler: &dyn Handler,
    (id, digest): (&str, Digest),
    answer: Option<&Answer>,
    wish: &Replay,
) -> Result<Replayed, Failure> {
    let now_ns = now_ns();
    let mut tx = store.begin().await?;
    // First, because nothing may claim the id of a message while the message is a dead letter.
    let Some(letter) = tx.take_letter(id, digest).await? else { return Ok(Replayed::Gone) };
    if is_without_id(&letter, wish) {
        return Ok(Replayed::NoId);
    }
    let mut delivery = planned(handler, letter.delivery());
    let mut claim = tx.claim(&[&delivery], now_ns).await?.pop();
    if wish.as_new && is_conflict(claim, digest) {
        delivery.id = own_id(id, digest);
        claim = tx.claim(&[&delivery], now_ns).await?.pop();
    }
    let replayed = match claim {
        Some(Claim::New) | None if delivery.plan == Plan::Ignore => Replayed::Ignored,
        Some(Claim::New) | None => {
            if let Some((_, error)) = delivery.defect {
                return Err(Failure::Permanent(error));
            }
            let publishing = Publishing { max_payload: None, is_repair: true };
            guarded(handler, &mut tx, &[Order { delivery: &delivery, answer }], publishing).await?;
            Replayed::Applied(delivery.id.to_string())
        }
        Some(Claim::Processed(known)) if known != digest => return Ok(Replayed::Conflict),
        Some(Claim::Processed(_) | Claim::Dead) => Replayed::Known(delivery.id.to_string()),
    };
    let closed = Closed {
        closing: Closing::Replayed,
        by: wish.by.clone(),
        at_ns: now_ns,
        applied_id: Some(delivery.id.to_string()),
    };
    tx.record_closed(&letter, &closed).await?;
    if !wish.dry_run {
        tx.commit().await?;
    }
    Ok(replayed)
}

fn is_without_id(letter: &Letter, wish: &Replay) -> bool {
    !wish.as_new && letter.lacks_its_id(&wish.schemes)
}

fn is_conflict(claim: Option<Claim>, digest: Digest) -> bool {
    matches!(claim, Some(Claim::Processed(known)) if known != digest)
}

/// The id of a letter whose id belongs to another order. The same each time, so that a second replay finds the first one.
fn own_id(id: &str, digest: Digest) -> Arc<str> {
    format!("{id}@{digest}").into()
}
