//! The calls of the handler for one batch. They run outside any transaction.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::inbox::single::caught;
use crate::handler::{Answer, Failure, Handler, Order};
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::model::plan::Plan;
use crate::model::text::chain;
use crate::store::Claim;

/// Answers that are kept for messages outside the batch in hand. More are forgotten, and their calls repeated.
const ANSWERS_MAX: usize = 20_000;

/// Answers, until their orders have an outcome. A commit that fails causes no second call.
#[derive(Debug, Default)]
pub struct Calls {
    answers: HashMap<(Arc<str>, Digest), Answer>,
}

/// What the calls mean for one message.
#[derive(Debug)]
pub enum Called {
    /// Answered, or in no need of a call.
    Ready,
    /// The call failed, and the message is to blame.
    Failed(Failure),
    /// Not called in this pass.
    Left,
}

impl Calls {
    /// Calls for every message of `batch` that is new, at most [`Handler::concurrency`] at a time and never for two messages of
    /// one id. Starts no call once `is_over` says so, or once what the handler needs is away; the second value is why.
    pub async fn run(
        &mut self,
        handler: &dyn Handler,
        batch: &[&Delivery],
        known: &[Claim],
        is_over: impl Fn() -> bool,
    ) -> (Vec<Called>, Option<String>) {
        if self.answers.len() > ANSWERS_MAX {
            let here: HashSet<_> = batch.iter().map(|delivery| key(delivery)).collect();
            self.answers.retain(|key, _| here.contains(key));
        }
        let mut called: Vec<Called> = Vec::with_capacity(batch.len());
        let mut first_of_id = HashMap::with_capacity(batch.len());
        let mut waiting = Vec::new();
        for (index, (delivery, known)) in batch.iter().zip(known).enumerate() {
            let first = *first_of_id.entry(&delivery.id).or_insert(index);
            let needs_call = delivery.is_for_the_handler()
                && delivery.plan == Plan::Call
                && matches!(known, Claim::New)
                && !self.answers.contains_key(&key(delivery));
            called.push(if needs_call { Called::Left } else { Called::Ready });
            if needs_call && first == index {
                waiting.push(index);
            }
        }
        let mut waiting = waiting.into_iter();
        let mut running = FuturesUnordered::new();
        let (mut started, mut away) = (0, None);
        loop {
            while running.len() < handler.concurrency() && away.is_none() && (started == 0 || !is_over()) {
                let Some(index) = waiting.next() else { break };
                running.push(async move { (index, caught(handler.call(batch[index])).await) });
                started += 1;
            }
            let Some((index, answer)) = running.next().await else { break };
            match answer.map_err(Failure::into_inner) {
                Ok(answer) => {
                    self.answers.insert(key(batch[index]), answer);
                    called[index] = Called::Ready;
                }
                Err(Failure::Away(cause) | Failure::Unanswered { cause, .. }) => away = Some(cause),
                Err(Failure::Store(error)) if !error.is_about_data() => away = Some(chain(&error)),
                Err(failure) => called[index] = Called::Failed(failure),
            }
        }
        // A repetition of a message that was answered just now needs no call either.
        for (delivery, called) in batch.iter().zip(&mut called) {
            if matches!(called, Called::Left) && self.answers.contains_key(&key(delivery)) {
                *called = Called::Ready;
            }
        }
        (called, away)
    }

    /// A message as the handler gets it.
    pub fn order<'a>(&'a self, delivery: &'a Delivery) -> Order<'a> {
        // Nearly every handler makes no calls, and then there is nothing to look up.
        let answer = if self.answers.is_empty() { None } else { self.answers.get(&key(delivery)) };
        Order { delivery, answer }
    }

    /// Drops the answers of messages that have their outcome.
    pub fn forget<'a>(&mut self, decided: impl Iterator<Item = &'a Delivery>) {
        decided.for_each(|delivery| drop(self.answers.remove(&key(delivery))));
    }
}

fn key(delivery: &Delivery) -> (Arc<str>, Digest) {
    (delivery.id.clone(), delivery.digest)
}
