//! What became of the messages of a batch.

use crate::model::delivery::Delivery;
use crate::model::outcome::Outcome;

/// Outcomes in the order of the batch; `None` for a message that this pass did not come to.
///
/// Inside the inbox, parts of a batch run apart from the rest, and each part writes its outcomes into the places of its messages. A
/// list of decided messages would need these places too. Whoever owns the batch makes [`Processed`] of it.
pub type Outcomes = Vec<Option<Outcome>>;

/// A batch after its pass. Both parts are in the order of the batch.
pub struct Processed {
    pub decided: Vec<(Delivery, Outcome)>,
    /// The pass did not come to these.
    pub left: Vec<Delivery>,
}

impl Processed {
    pub fn of(batch: Vec<Delivery>, outcomes: Outcomes) -> Self {
        let mut processed = Self { decided: Vec::with_capacity(batch.len()), left: Vec::new() };
        for (delivery, outcome) in batch.into_iter().zip(outcomes) {
            match outcome {
                Some(outcome) => processed.decided.push((delivery, outcome)),
                None => processed.left.push(delivery),
            }
        }
        processed
    }
}
