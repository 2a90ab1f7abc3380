//! Deliveries that wait for their batch, in the order of their arrival.

use std::collections::VecDeque;

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

    /// The next batch in stream order: only suspects or none, no sequence twice, at least one message if there is any.
    pub fn next_batch(&mut self, max_messages: usize, max_bytes: usize) -> Vec<Delivery> {
        let Some(suspects) = self.deliveries.front().map(is_suspect) else { return Vec::new() };
        let mut bytes = 0;
        let fits = |delivery: &&Delivery| {
            bytes += delivery.bytes();
            is_suspect(delivery) == suspects && bytes <= max_bytes
        };
        let count = self.deliveries.iter().take(max_messages).take_while(fits).count().max(1);
        let mut batch: Vec<Delivery> = self.deliveries.drain(..count).collect();
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

    pub fn retain(&mut self, which: impl Fn(&Delivery) -> bool) {
        self.deliveries.retain(which);
        self.bytes = self.deliveries.iter().map(Delivery::bytes).sum();
    }
}
