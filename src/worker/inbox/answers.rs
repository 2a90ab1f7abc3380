//! What the calls brought, until the orders have an outcome: a commit that fails causes no second call.

use std::collections::HashMap;
use std::sync::Arc;

use crate::handler::{Failure, Order};
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::worker::calls::CallOutcome;

#[derive(Default)]
pub(super) struct Answers(HashMap<(Arc<str>, Digest), CallOutcome>);

impl Answers {
    pub(super) fn add(&mut self, delivery: &Delivery, outcome: CallOutcome) {
        self.0.insert(key(delivery), outcome);
    }

    /// A message as the handler gets it.
    pub(super) fn order<'a>(&'a self, delivery: &'a Delivery) -> Order<'a> {
        Order { delivery, answer: self.get(delivery).and_then(|outcome| outcome.as_ref().ok()) }
    }

    /// Why the call of this message failed, if it did.
    pub(super) fn failure(&self, delivery: &Delivery) -> Option<&Failure> {
        self.get(delivery).and_then(|outcome| outcome.as_ref().err())
    }

    fn get(&self, delivery: &Delivery) -> Option<&CallOutcome> {
        // Nearly every handler makes no calls, and then there is nothing to look up.
        if self.0.is_empty() { None } else { self.0.get(&key(delivery)) }
    }

    /// Drops what belongs to a message that has its outcome.
    pub(super) fn forget(&mut self, delivery: &Delivery) {
        if !self.0.is_empty() {
            self.0.remove(&key(delivery));
        }
    }
}

fn key(delivery: &Delivery) -> (Arc<str>, Digest) {
    (delivery.id.clone(), delivery.digest)
}
