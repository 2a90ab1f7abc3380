//! Deliveries for which we owe the server an answer, by stream sequence.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::delivery::{Position, Reply};
use crate::model::outcome::Acknowledgement;

#[derive(Default)]
pub struct Held(HashMap<u64, Owed>);

struct Owed {
    reply: Reply,
    /// Tells a message from another one that got the same sequence after the server lost its tail.
    published_ns: i64,
    /// The first of the sequences for which its outcome accounts.
    accounts_from: u64,
    /// When `ack_wait` last began to run.
    touched: Instant,
}

impl Held {
    /// Takes a delivery. `false` for another delivery of a message that is held already: this only renews the claim on the
    /// message, which must not run twice.
    pub fn take(&mut self, position: Position, reply: Reply, accounts_from: u64, now: Instant) -> bool {
        let owed = Owed { reply, published_ns: position.published_ns, accounts_from, touched: now };
        let before = self.0.insert(position.stream_seq, owed);
        before.is_none_or(|before| before.published_ns != position.published_ns)
    }

    /// Removes the delivery of a message that has its outcome. Returns where to acknowledge, and the first of the sequences for which
    /// the outcome accounts. `None` if the outcome must not be acknowledged.
    pub fn answer(&mut self, position: Position) -> Option<(Reply, u64)> {
        match self.0.entry(position.stream_seq) {
            Entry::Occupied(owed) if owed.get().published_ns == position.published_ns => {
                let owed = owed.remove();
                Some((owed.reply, owed.accounts_from))
            }
            Entry::Occupied(_) | Entry::Vacant(_) => None,
        }
    }

    pub fn contains(&self, stream_seq: u64) -> bool {
        self.0.contains_key(&stream_seq)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// In-progress for each delivery that has been held for `age` since its `ack_wait` began.
    pub fn in_progress(&self, age: Duration, now: Instant) -> Vec<(Reply, Acknowledgement)> {
        let due = self.0.values().filter(|owed| owed.is_due(age, now));
        due.map(|owed| (owed.reply.clone(), Acknowledgement::InProgress)).collect()
    }

    /// The server has what [`Held::in_progress`] returned.
    pub fn touch(&mut self, age: Duration, now: Instant) {
        self.0.values_mut().filter(|owed| owed.is_due(age, now)).for_each(|owed| owed.touched = now);
    }

    /// The stream lost everything after `last_seq`. An acknowledgement would hit the message that has the sequence now.
    pub fn cut_after(&mut self, last_seq: u64) {
        self.0.retain(|stream_seq, _| *stream_seq <= last_seq);
    }

    /// The stream is another one: none of them may be acknowledged.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// A nak without delay for all of them, in stream order: the server delivers them again in the order of the naks.
    pub fn hand_back(&mut self) -> Vec<(Reply, Acknowledgement)> {
        let nak = Acknowledgement::Nak { delay: Duration::ZERO };
        let mut owed: Vec<(u64, Owed)> = self.0.drain().collect();
        owed.sort_unstable_by_key(|(stream_seq, _)| *stream_seq);
        owed.into_iter().map(|(_, owed)| (owed.reply, nak)).collect()
    }
}

impl Owed {
    fn is_due(&self, age: Duration, now: Instant) -> bool {
        now.duration_since(self.touched) >= age
    }
}
