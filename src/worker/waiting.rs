//! Deliveries that wait for their batch, in the order of their arrival.

use std::collections::VecDeque;

use super::keys::{Blocked, KeyOrder};
use crate::model::delivery::Delivery;
use crate::worker::inbox::is_suspect;

#[derive(Default)]
pub struct Waiting {
    deliveries: VecDeque<Delivery>,
    bytes: usize,
}

impl Waiting {
    pub fn push(&mut self, delivery: Delivery) {
        self.bytes += delivery.bytes();
        self.deliveries.push_back(delivery);
    }

    /// Puts deliveries back to the front, in order.
    pub fn put_back(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries.into_iter().rev() {
            self.bytes += delivery.bytes();
            self.deliveries.push_front(delivery);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.deliveries.is_empty()
    }

    pub fn messages(&self) -> usize {
        self.deliveries.len()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The next batch in stream order: only suspects or none, no sequence twice, at least one message if any may run.
    pub fn next_batch(&mut self, keys: &KeyOrder, max_messages: usize, max_bytes: usize) -> Vec<Delivery> {
        let mut batch = if keys.is_empty() {
            self.first(max_messages, max_bytes)
        } else {
            self.first_in_turn(keys, max_messages, max_bytes)
        };
        batch.sort_by_key(|delivery| delivery.raw.position.stream_seq);
        // The same sequence twice: the stream was recreated, or lost its tail, while we held a message.
        let mut later = Vec::new();
        let mut index = 1;
        while index < batch.len() {
            if batch[index].raw.position.stream_seq == batch[index - 1].raw.position.stream_seq {
                later.push(batch.remove(index));
            } else {
                index += 1;
            }
        }
        self.bytes -= batch.iter().chain(&later).map(Delivery::bytes).sum::<usize>();
        self.put_back(later);
        batch
    }

    fn first(&mut self, max_messages: usize, max_bytes: usize) -> Vec<Delivery> {
        let Some(suspects) = self.deliveries.front().map(is_suspect) else { return Vec::new() };
        let mut bytes = 0;
        let fits = |delivery: &&Delivery| {
            bytes += delivery.bytes();
            is_suspect(delivery) == suspects && bytes <= max_bytes
        };
        let count = self.deliveries.iter().take(max_messages).take_while(fits).count().max(1);
        self.deliveries.drain(..count).collect()
    }

    /// As [`first`](Self::first), without the messages whose turn it is not.
    fn first_in_turn(&mut self, keys: &KeyOrder, max_messages: usize, max_bytes: usize) -> Vec<Delivery> {
        let (mut turn, mut suspects, mut bytes) = (keys.turn(), None, 0);
        let mut chosen = Vec::new();
        for (index, delivery) in self.deliveries.iter().enumerate() {
            let is_of_the_kind = *suspects.get_or_insert(is_suspect(delivery)) == is_suspect(delivery);
            if !is_of_the_kind || !turn.takes(delivery) {
                if chosen.is_empty() {
                    suspects = None;
                }
                continue;
            }
            bytes += delivery.bytes();
            if chosen.len() == max_messages || (bytes > max_bytes && !chosen.is_empty()) {
                break;
            }
            chosen.push(index);
        }
        self.take(&chosen)
    }

    /// Takes messages out that are `blocked`, the newest first, until at most `limit` of them are left.
    pub fn take_blocked(&mut self, blocked: &Blocked<'_>, limit: usize) -> Vec<Delivery> {
        let places = blocked.newest(self.deliveries.iter(), limit);
        let taken = self.take(&places);
        self.bytes -= taken.iter().map(Delivery::bytes).sum::<usize>();
        taken
    }

    /// Takes out what is at these places, given in ascending order.
    fn take(&mut self, places: &[usize]) -> Vec<Delivery> {
        let mut taken = Vec::with_capacity(places.len());
        let mut places = places.iter().peekable();
        let mut left = VecDeque::with_capacity(self.deliveries.len());
        for (index, delivery) in self.deliveries.drain(..).enumerate() {
            if places.next_if_eq(&&index).is_some() {
                taken.push(delivery);
            } else {
                left.push_back(delivery);
            }
        }
        self.deliveries = left;
        taken
    }

    pub fn retain(&mut self, which: impl Fn(&Delivery) -> bool) {
        self.deliveries.retain(which);
        self.bytes = self.deliveries.iter().map(Delivery::bytes).sum();
    }
}
