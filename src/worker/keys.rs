//! The order of the messages of one key: strictly one after the other, in stream order. No I/O.
//!
//! A message of a key runs only if every earlier message of the key that was delivered has its final outcome, or runs before it in
//! the same transaction. A message that waits for its retry is such an earlier one.
//!
//! After a bind, messages may be out that an earlier process received and did not decide. Their keys are unknown until the server
//! delivers them again, in any order: at once what was handed back, and after `ack_wait` the rest. Until then, all messages with a
//! key wait: see [`KeyOrder::bound`].

use std::collections::btree_set::Iter;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::iter::{Copied, Peekable};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::delivery::Delivery;
use crate::model::outcome::Outcome;

/// The messages with a key that came and have no final outcome.
#[derive(Default)]
pub struct KeyOrder {
    undecided: HashMap<Arc<str>, BTreeSet<u64>>,
    keys: HashMap<u64, Arc<str>>,
    barrier: Option<Barrier>,
}

/// Messages that were delivered before the bind, and come again.
struct Barrier {
    /// The last sequence that was delivered before the bind.
    through: u64,
    /// How many of them did not come yet.
    missing: u64,
    /// By then, the server can deliver all of them.
    expired_at: Instant,
    /// A newer message came first. So the server cannot deliver them yet, and only newer messages would come.
    overtaken: bool,
    /// The last time when one of them came, or by which the server can deliver all of them.
    last_came_at: Instant,
}

/// After this time without one of them, the others were removed or acknowledged elsewhere.
const LULL: Duration = Duration::from_secs(5);

impl KeyOrder {
    /// The daemon has bound. `missing`: how many messages up to `through` were delivered, are not acknowledged and are not here.
    /// Their last delivery runs out at `expired_at`. Those that the earlier process handed back for their keys come until `back_at`.
    pub fn bound(&mut self, through: u64, missing: u64, expired_at: Instant, back_at: Instant) {
        self.barrier = (missing > 0).then_some(Barrier {
            through,
            missing,
            expired_at,
            overtaken: false,
            last_came_at: expired_at.max(back_at),
        });
    }

    /// Ends the wait for messages that no longer come: the ack floor has passed them, or the server had the time to deliver them. It
    /// delivers such messages before newer ones.
    pub fn look(&mut self, ack_floor: u64, now: Instant) {
        let is_over = |barrier: &Barrier| ack_floor >= barrier.through || now > barrier.last_came_at + LULL;
        if self.barrier.as_ref().is_some_and(is_over) {
            self.barrier = None;
        }
    }

    /// A message came. `is_again`: it came to this process before.
    pub fn came(&mut self, delivery: &Delivery, is_again: bool, now: Instant) {
        let stream_seq = delivery.raw.position.stream_seq;
        if let Some(barrier) = &mut self.barrier {
            if stream_seq > barrier.through {
                barrier.overtaken |= delivery.key.is_some();
            } else if !is_again {
                barrier.missing -= 1;
                barrier.last_came_at = barrier.last_came_at.max(now);
                if barrier.missing == 0 {
                    self.barrier = None;
                }
            }
        }
        if let Some(key) = &delivery.key {
            self.expect(stream_seq, key);
        }
    }

    /// A message that an earlier process handed back for its retry, and that comes again.
    pub fn expect(&mut self, stream_seq: u64, key: &Arc<str>) {
        if let Entry::Vacant(place) = self.keys.entry(stream_seq) {
            place.insert(key.clone());
            self.undecided.entry(key.clone()).or_default().insert(stream_seq);
        }
    }

    /// A message has its final outcome.
    pub fn decided(&mut self, stream_seq: u64) {
        let Some(key) = self.keys.remove(&stream_seq) else { return };
        if let Entry::Occupied(mut seqs) = self.undecided.entry(key) {
            seqs.get_mut().remove(&stream_seq);
            if seqs.get().is_empty() {
                seqs.remove();
            }
        }
    }

    /// Only these messages are still to be decided by this process.
    pub fn retain(&mut self, which: impl Fn(u64) -> bool) {
        let gone: Vec<u64> = self.keys.keys().copied().filter(|seq| !which(*seq)).collect();
        gone.into_iter().for_each(|seq| self.decided(seq));
    }

    /// The stream is another one.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// No message with a key is undecided, and none is expected.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether newer messages wait for messages from before the bind.
    pub fn has_barrier(&self) -> bool {
        self.barrier.is_some()
    }

    /// No pull before this time: the server would only deliver messages that have to wait.
    pub fn pulls_from(&self) -> Option<Instant> {
        self.barrier.as_ref().filter(|barrier| barrier.overtaken).map(|barrier| barrier.expired_at)
    }

    /// Whether no earlier message of the key is undecided.
    pub fn is_first(&self, delivery: &Delivery) -> bool {
        delivery.key.is_none() || self.turn().takes(delivery)
    }

    /// The messages that wait for one of `parked`: sequences, and when they are due.
    pub fn blocked_by(&self, parked: impl Iterator<Item = (u64, Instant)>) -> Blocked<'_> {
        let mut first: HashMap<&str, (u64, Instant)> = HashMap::new();
        for (stream_seq, due) in parked {
            if let Some(key) = self.keys.get(&stream_seq) {
                let place = first.entry(&**key).or_insert((stream_seq, due));
                *place = (*place).min((stream_seq, due));
            }
        }
        Blocked { first_parked: first, all: self.barrier.is_some() }
    }

    /// Chooses the messages of one transaction.
    pub fn turn(&self) -> Turn<'_> {
        Turn { keys: self, next: HashMap::new() }
    }
}

/// The messages of one transaction, chosen one after the other.
pub struct Turn<'a> {
    keys: &'a KeyOrder,
    /// What each key has left.
    next: HashMap<&'a str, Peekable<Copied<Iter<'a, u64>>>>,
}

impl Turn<'_> {
    /// Takes a message if it is the next one of its key, and needs no other one before it.
    pub fn takes(&mut self, delivery: &Delivery) -> bool {
        let Some(key) = &delivery.key else { return true };
        let stream_seq = delivery.raw.position.stream_seq;
        // A message of a former stream has no place in the order of this one.
        if self.keys.keys.get(&stream_seq) != Some(key) {
            return true;
        }
        let Some((key, seqs)) = self.keys.undecided.get_key_value(key) else { return true };
        let next = self.next.entry(key).or_insert_with(|| seqs.iter().copied().peekable());
        self.keys.barrier.is_none() && next.next_if_eq(&stream_seq).is_some()
    }
}

/// Which messages wait for parked ones, or for those that are out since before the bind.
pub struct Blocked<'a> {
    /// The first parked message of each key that has one, and when it is due.
    first_parked: HashMap<&'a str, (u64, Instant)>,
    /// All messages with a key wait.
    all: bool,
}

impl Blocked<'_> {
    pub fn is_empty(&self) -> bool {
        self.first_parked.is_empty() && !self.all
    }

    fn has(&self, delivery: &Delivery) -> bool {
        let Some(key) = &delivery.key else { return false };
        let first = self.first_parked.get(&**key);
        self.all || first.is_some_and(|(first, _)| *first < delivery.raw.position.stream_seq)
    }

    /// When the message that this one waits for is due, if that is known.
    pub fn due(&self, delivery: &Delivery) -> Option<Instant> {
        delivery.key.as_ref().and_then(|key| self.first_parked.get(&**key)).map(|(_, due)| *due)
    }

    /// The places of blocked messages, the newest ones, if there are more of them than `limit`. In ascending order.
    pub fn newest<'d>(&self, deliveries: impl Iterator<Item = &'d Delivery>, limit: usize) -> Vec<usize> {
        let mut blocked: Vec<(u64, usize)> = Vec::new();
        for (place, delivery) in deliveries.enumerate() {
            if self.has(delivery) {
                blocked.push((delivery.raw.position.stream_seq, place));
            }
        }
        blocked.sort_unstable();
        let mut newest: Vec<usize> = blocked.into_iter().skip(limit).map(|(_, place)| place).collect();
        newest.sort_unstable();
        newest
    }
}

/// The keys whose later messages must not run in the rest of a pass over single messages.
#[derive(Default)]
pub struct Stopped<'a>(HashSet<&'a str>);

impl<'a> Stopped<'a> {
    pub fn lets(&self, delivery: &Delivery) -> bool {
        self.0.is_empty() || delivery.key.as_ref().is_none_or(|key| !self.0.contains(&**key))
    }

    /// A message has run, and `outcome` came of it.
    pub fn note(&mut self, delivery: &'a Delivery, outcome: Option<&Outcome>) {
        if let Some(key) = &delivery.key
            && !outcome.is_some_and(Outcome::is_final)
        {
            self.0.insert(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::model::delivery::{Position, Raw};
    use crate::model::id::{IdScheme, UniqueIn};

    fn order(stream_seq: u64, key: Option<&str>) -> Delivery {
        let position = Position { delivered: 1, stream_seq, consumer_seq: 1, published_ns: 1 };
        let (headers, payload) = (vec![], "x".into());
        let raw = Raw { subject: "ORDERS.new".into(), headers, payload, position, unreadable: None };
        let scheme = IdScheme { stream: "ORDERS".into(), pointer: None, unique_in: UniqueIn::Subject };
        Delivery { key: key.map(Into::into), ..Delivery::new(raw, &scheme.into()) }
    }

    fn came(keys: &mut KeyOrder, stream_seq: u64, key: &str) {
        keys.came(&order(stream_seq, Some(key)), false, Instant::now());
    }

    fn taken(keys: &KeyOrder, candidates: &[(u64, &str)]) -> Vec<u64> {
        let mut turn = keys.turn();
        let taken = candidates.iter().filter(|(seq, key)| turn.takes(&order(*seq, Some(key))));
        taken.map(|(seq, _)| *seq).collect()
    }

    #[test]
    fn messages_of_a_key_run_together_until_one_is_missing() {
        let mut keys = KeyOrder::default();
        for (seq, name) in [(1, "a"), (2, "b"), (3, "a"), (4, "a"), (5, "b")] {
            came(&mut keys, seq, name);
        }
        assert_eq!(taken(&keys, &[(1, "a"), (2, "b"), (3, "a"), (4, "a"), (5, "b")]), [1, 2, 3, 4, 5]);
        assert_eq!(taken(&keys, &[(2, "b"), (3, "a"), (4, "a"), (5, "b")]), [2, 5], "1 waits for its retry");
        assert_eq!(taken(&keys, &[(1, "a"), (4, "a")]), [1], "3 is not among them");
        keys.decided(1);
        assert_eq!(taken(&keys, &[(4, "a"), (3, "a")]), [3], "in stream order, whatever came first");
        assert!(keys.is_first(&order(2, Some("b"))) && !keys.is_first(&order(5, Some("b"))));
        keys.retain(|seq| seq == 5);
        assert!(keys.is_first(&order(5, Some("b"))));
        assert!(keys.is_first(&order(9, None)), "without a key there is no order");
    }

    #[test]
    fn newer_messages_wait_until_those_before_the_bind_have_come() {
        let now = Instant::now();
        let later = now + Duration::from_secs(30);
        let mut keys = KeyOrder::default();
        keys.bound(10, 2, later, now);
        assert_eq!(keys.pulls_from(), None, "perhaps the server has them ready");
        came(&mut keys, 11, "a");
        assert_eq!(keys.pulls_from(), Some(later));
        assert_eq!(taken(&keys, &[(11, "a")]), [0_u64; 0]);
        assert!(keys.is_first(&order(12, None)), "no key, no barrier");
        came(&mut keys, 4, "a");
        assert_eq!(taken(&keys, &[(4, "a"), (11, "a")]), [0_u64; 0], "the other one may be an earlier one");
        keys.came(&order(4, Some("a")), true, Instant::now());
        assert_eq!(taken(&keys, &[(4, "a"), (11, "a")]), [0_u64; 0], "the same one again is not the other one");
        came(&mut keys, 7, "b");
        assert_eq!((taken(&keys, &[(4, "a"), (7, "b"), (11, "a")]), keys.pulls_from()), (vec![4, 7, 11], None));
        keys.bound(20, 3, later, now);
        keys.look(19, later + LULL);
        assert!(!keys.is_first(&order(4, Some("a"))));
        keys.look(19, later + LULL + Duration::from_millis(1));
        assert!(keys.is_first(&order(4, Some("a"))));
        keys.bound(20, 3, later, now);
        keys.look(20, Instant::now());
        keys.decided(4);
        assert!(keys.is_first(&order(11, Some("a"))));
        keys.bound(20, 3, now, later);
        keys.look(19, later + LULL);
        assert!(keys.has_barrier(), "an earlier process handed some back until later");
    }

    proptest! {
        /// Messages come in any order, run in any batches, and some fail and come again later.
        #[test]
        fn no_message_runs_before_an_earlier_one_of_its_key_that_came(
            messages in vec((0..3_u8, any::<bool>(), any::<bool>()), 1..30),
            arrival in vec(any::<prop::sample::Index>(), 30),
        ) {
            let name = |seq: u64| ["a", "b", "c"][messages[seq as usize].0 as usize];
            let mut keys = KeyOrder::default();
            let mut to_come: Vec<u64> = (0..messages.len() as u64).collect();
            let mut here: Vec<u64> = Vec::new();
            let mut done: Vec<u64> = Vec::new();
            let mut fails: HashMap<u64, bool> = HashMap::new();
            let mut picks = arrival.iter().cycle();
            while done.len() < messages.len() {
                if !to_come.is_empty() {
                    let seq = to_come.remove(picks.next().unwrap().index(to_come.len()));
                    came(&mut keys, seq, name(seq));
                    here.push(seq);
                }
                if !to_come.is_empty() && messages[to_come[0] as usize].1 {
                    continue;
                }
                here.sort_unstable();
                let candidates: Vec<(u64, &str)> = here.iter().map(|seq| (*seq, name(*seq))).collect();
                for seq in taken(&keys, &candidates) {
                    let before = here.iter().filter(|other| **other < seq && name(**other) == name(seq)).count();
                    // The transaction decides them in stream order: an earlier one that fails leaves this one out.
                    if before > 0 {
                        continue;
                    }
                    if messages[seq as usize].2 && !*fails.entry(seq).or_default() {
                        fails.insert(seq, true);
                        continue;
                    }
                    here.retain(|other| *other != seq);
                    keys.decided(seq);
                    done.push(seq);
                }
            }
            prop_assert!(keys.keys.is_empty() && keys.undecided.is_empty());
        }
    }
}
