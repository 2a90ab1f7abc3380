//! What each message is within its batch, and which message a failure of the batch belongs to.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::handler::Failure;
use crate::model::delivery::Delivery;
use crate::model::outcome::{Ignored, Reason};
use crate::store::Error;

/// What a message is within its batch.
pub(super) enum Kind<'a> {
    First,
    /// The same message stands at this index before.
    RepeatOf(usize),
    Defective(Reason, &'a str),
    Ignored(Ignored),
}

/// The kind of each message, and those whose ids are to be claimed.
pub(super) type Sorted<'a> = (Vec<Kind<'a>>, Vec<&'a Delivery>);

/// `None` if two messages of the batch differ under one id. Which of them the id belongs to depends on what becomes of the
/// first, so such a batch runs message by message.
pub(super) fn sort<'a>(batch: &[&'a Delivery]) -> Option<Sorted<'a>> {
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
        // One look-up for both: hashing the ids is most of the work here.
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

/// A failure of a batch, and the message in it that is to blame, if that is known.
pub(super) struct Blamed {
    pub(super) index: Option<usize>,
    pub(super) failure: Failure,
}

impl Blamed {
    /// `applied`: where the orders that the handler got stand in the batch.
    pub(super) fn new(failure: Failure, applied: &[usize]) -> Self {
        let index = match &failure {
            Failure::At { index, .. } => applied.get(*index).copied(),
            Failure::Retry(_)
            | Failure::Permanent(_)
            | Failure::Away(_)
            | Failure::Unanswered { .. }
            | Failure::Store(_) => None,
        };
        Self { index, failure: failure.into_inner() }
    }
}

impl From<Error> for Blamed {
    fn from(error: Error) -> Self {
        Self { index: None, failure: error.into() }
    }
}
