//! The positions of consumer and stream, compared from look to look. They show messages that left the stream before they were
//! processed, and a stream that became shorter. No I/O.
//!
//! A consumer without a filter gets every message in turn. So a sequence that was never delivered, below the first sequence of the
//! stream, is a message that a limit, a purge or a deletion removed. With a filter, most sequences are not for the consumer; only
//! messages that leave `num_pending` without a delivery are certain. Two losses leave no trace here: a message that was delivered,
//! lost with its worker and then removed, and a purge while no worker runs, which moves the position of the consumer.

use super::look::Snapshot;
use crate::model::delivery::Position;

/// Gaps between two looks that are kept apart.
const GAPS_MAX: usize = 64;
/// A look that was on its way when the gap appeared may not show the gap yet.
const LOOKS_PER_GAP: u32 = 2;

/// What an operator must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The messages with these sequences were not processed and are no longer in the stream.
    Gone { from: u64, to: u64 },
    /// At least so many messages left the stream before they were processed. The stream now begins at `first`.
    SomeGone { at_least: u64, first: u64 },
    /// The stream became shorter: the server lost its end, and new messages get the same sequences again.
    Rewound { from: u64, to: u64 },
    /// The ack floor is above the end of the stream. The server delivers nothing until the stream has grown to the floor.
    FloorBeyond { floor: u64, last: u64 },
}

/// Follows one stream.
#[derive(Debug, Default)]
pub struct Positions {
    /// Up to this sequence, every message was delivered or reported as gone.
    accounted: u64,
    /// Of the last delivery. Two in a row show that no other client got a delivery between them.
    consumer_seq: u64,
    gaps: Vec<Gap>,
    /// The first message with a sequence that another message had before: the stream lost its end and has grown again.
    second: Option<u64>,
    last: Option<Figures>,
}

#[derive(Debug)]
struct Gap {
    from: u64,
    to: u64,
    looks_left: u32,
}

/// The figures of one look. The figures of the stream are a moment older than those of the consumer.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    first: u64,
    last: u64,
    /// When the last message was published.
    last_ns: i128,
    delivered: u64,
    delivered_consumer_seq: u64,
    floor: u64,
    pending: u64,
    /// Not every message of the stream is for the consumer.
    filtered: bool,
}

impl Figures {
    pub fn of(snapshot: &Snapshot) -> Self {
        let (state, consumer) = (&snapshot.stream.state, &snapshot.consumer);
        Self {
            first: state.first_sequence,
            last: state.last_sequence,
            last_ns: state.last_timestamp.unix_timestamp_nanos(),
            delivered: consumer.delivered.stream_sequence,
            delivered_consumer_seq: consumer.delivered.consumer_sequence,
            floor: consumer.ack_floor.stream_sequence,
            pending: consumer.num_pending,
            filtered: snapshot.is_filtered(),
        }
    }
}

impl Positions {
    /// A new binding. `fresh`: to another stream than before, or to another consumer on it.
    pub fn after_bind(&mut self, look: Figures, fresh: bool) -> Vec<Notice> {
        if fresh {
            // The operator chose where this consumer begins.
            *self = Self::default();
        }
        if !self.has_seen_all_of(&look) {
            // The server redelivers what was delivered to a client that is gone.
            self.accounted = self.accounted.max(look.delivered);
        }
        self.consumer_seq = look.delivered_consumer_seq;
        self.observe(look)
    }

    /// One delivery arrived. Whether a look is needed: the delivery leaves a gap, or has the sequence of another message.
    pub fn delivered(&mut self, position: Position) -> bool {
        // An empty stream reports a last message of the year 1.
        let is_second = |last: &Figures| {
            last.last_ns > 0 && position.stream_seq <= last.last && i128::from(position.published_ns) > last.last_ns
        };
        if self.second.is_none() && self.last.as_ref().is_some_and(is_second) {
            self.second = Some(position.stream_seq);
            self.accounted = self.accounted.min(position.stream_seq);
            self.consumer_seq = position.consumer_seq;
            return true;
        }
        let in_turn = position.consumer_seq == self.consumer_seq + 1;
        self.consumer_seq = position.consumer_seq;
        let (from, to) = (self.accounted + 1, position.stream_seq.saturating_sub(1));
        let gap = in_turn && from <= to && !self.last.is_some_and(|last| last.filtered);
        self.accounted = self.accounted.max(position.stream_seq);
        if gap && self.gaps.len() < GAPS_MAX {
            self.gaps.push(Gap { from, to, looks_left: LOOKS_PER_GAP });
        }
        gap
    }

    /// A fresh look.
    pub fn observe(&mut self, look: Figures) -> Vec<Notice> {
        let mut notices = Vec::new();
        let before = self.last.replace(look);
        let second = self.second.take();
        if let Some(before) = before
            && (look.last < before.last || second.is_some())
        {
            let to = second.map_or(look.last, |second| look.last.min(second.saturating_sub(1)));
            notices.push(Notice::Rewound { from: before.last, to });
            self.accounted = self.accounted.min(look.delivered);
            self.gaps.clear();
            return notices;
        }
        // The floor of the look before: the floor of this look may be newer than the figures of the stream.
        if let Some(before) = before
            && before.floor > look.last
        {
            notices.push(Notice::FloorBeyond { floor: before.floor, last: look.last });
        }
        if look.filtered {
            notices.extend(before.and_then(|before| before.vanished_until(&look)));
            return notices;
        }
        for gap in &mut self.gaps {
            gap.looks_left -= 1;
            // Gaps above the first sequence are messages that an operator deleted or skipped.
            if look.first > gap.from {
                notices.push(Notice::Gone { from: gap.from, to: gap.to.min(look.first - 1) });
                gap.looks_left = 0;
            }
        }
        self.gaps.retain(|gap| gap.looks_left > 0);
        // A later delivery that is on its way will show the gap. (A purge moves the consumer without a delivery.)
        let nothing_on_its_way = look.delivered <= self.accounted || self.has_seen_all_of(&look);
        if nothing_on_its_way && look.first > self.accounted + 1 {
            notices.push(Notice::Gone { from: self.accounted + 1, to: look.first - 1 });
            self.accounted = look.first - 1;
        }
        notices
    }
}

impl Positions {
    /// The last delivery of the server, to any client, arrived here.
    fn has_seen_all_of(&self, look: &Figures) -> bool {
        self.last.is_some() && self.consumer_seq == look.delivered_consumer_seq
    }
}

impl Figures {
    fn vanished_until(&self, later: &Self) -> Option<Notice> {
        // At most so many messages were delivered for the first time.
        let deliveries = later.delivered_consumer_seq.checked_sub(self.delivered_consumer_seq)?;
        let at_least = self.pending.checked_sub(deliveries)?.checked_sub(later.pending)?;
        let dropped = later.first > self.first && later.first > self.delivered + 1;
        (at_least > 0 && dropped).then_some(Notice::SomeGone { at_least, first: later.first })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(first: u64, last: u64, delivered: u64, pending: u64) -> Figures {
        let (delivered_consumer_seq, floor, last_ns) = (delivered, delivered, i128::from(last));
        Figures { first, last, last_ns, delivered, delivered_consumer_seq, floor, pending, filtered: false }
    }

    fn delivery(consumer_seq: u64, stream_seq: u64) -> Position {
        Position { delivered: 1, stream_seq, consumer_seq, published_ns: 0 }
    }

    fn bound(first: u64, last: u64, delivered: u64) -> Positions {
        let mut positions = Positions::default();
        assert_eq!(positions.after_bind(look(first, last, delivered, last - delivered), true), []);
        positions
    }

    #[test]
    fn what_the_stream_dropped_behind_the_last_delivery_is_gone_once() {
        let mut positions = bound(1, 10, 10);
        assert_eq!(positions.observe(look(16, 30, 10, 15)), [Notice::Gone { from: 11, to: 15 }]);
        assert_eq!(positions.observe(look(16, 30, 10, 15)), []);
        assert!(!positions.delivered(delivery(11, 16)), "reported already");
        assert_eq!(positions.observe(look(17, 30, 16, 14)), []);
    }

    #[test]
    fn what_was_dropped_while_nobody_was_bound_shows_at_the_binding() {
        let mut positions = Positions::default();
        assert_eq!(positions.after_bind(look(6, 10, 2, 5), true), [Notice::Gone { from: 3, to: 5 }]);
    }

    #[test]
    fn a_gap_between_two_deliveries_counts_only_up_to_the_first_sequence() {
        let mut positions = bound(1, 10, 10);
        assert!(positions.delivered(delivery(11, 21)));
        // A look that was under way knows nothing of it yet.
        assert_eq!(positions.observe(look(1, 30, 21, 9)), []);
        assert_eq!(positions.observe(look(21, 30, 21, 9)), [Notice::Gone { from: 11, to: 20 }]);

        let mut positions = bound(1, 10, 10);
        assert!(positions.delivered(delivery(11, 21)));
        assert_eq!(positions.observe(look(1, 30, 21, 9)), []);
        assert_eq!(positions.observe(look(1, 30, 21, 9)), [], "deleted from the middle");
        assert_eq!(positions.observe(look(25, 30, 30, 0)), []);
    }

    #[test]
    fn a_purge_hides_nothing_from_a_worker_that_saw_every_delivery() {
        let purged = Figures { delivered_consumer_seq: 10, ..look(31, 30, 30, 0) };
        assert_eq!(bound(1, 10, 10).observe(purged), [Notice::Gone { from: 11, to: 30 }]);
        assert_eq!(bound(1, 10, 10).after_bind(purged, false), [Notice::Gone { from: 11, to: 30 }]);
    }

    #[test]
    fn what_another_worker_got_is_not_gone() {
        let mut positions = bound(1, 10, 10);
        assert!(!positions.delivered(delivery(21, 21)), "ten deliveries went elsewhere");
        assert!(!positions.delivered(delivery(22, 22)));
        assert_eq!(positions.observe(look(20, 30, 30, 0)), [], "the rest is on its way to somebody");
    }

    #[test]
    fn with_a_filter_only_what_vanishes_from_pending_is_certain() {
        let filtered = |first, delivered, pending| Figures { filtered: true, ..look(first, 100, delivered, pending) };
        let mut positions = Positions::default();
        assert_eq!(
            positions.after_bind(filtered(50, 10, 0), true),
            [],
            "not for this consumer, as far as the figures show"
        );
        assert_eq!(positions.observe(filtered(50, 10, 20)), []);
        assert!(!positions.delivered(delivery(11, 55)));
        assert_eq!(positions.observe(filtered(70, 11, 12)), [Notice::SomeGone { at_least: 7, first: 70 }]);
    }

    #[test]
    fn a_shorter_stream_is_said_once_and_its_sequences_count_anew() {
        let mut positions = bound(1, 10, 10);
        assert_eq!(positions.after_bind(look(1, 5, 5, 0), false), [Notice::Rewound { from: 10, to: 5 }]);
        assert_eq!(positions.observe(look(1, 5, 5, 0)), []);
        assert_eq!(positions.observe(look(8, 10, 5, 3)), [Notice::Gone { from: 6, to: 7 }]);
    }

    #[test]
    fn a_stream_that_lost_its_tail_and_grew_past_it_shows_by_its_messages() {
        let mut positions = bound(1, 10, 10);
        let published = |stream_seq, published_ns| Position { published_ns, ..delivery(stream_seq, stream_seq) };
        assert!(!positions.delivered(published(8, 8)), "again, as it was");
        assert!(positions.delivered(published(8, 11)), "published after the tenth");
        positions.delivered(published(9, 12));
        assert_eq!(positions.observe(look(1, 20, 9, 11)), [Notice::Rewound { from: 10, to: 7 }]);
        assert_eq!(positions.observe(look(1, 20, 9, 11)), []);
        assert!(!positions.delivered(published(10, 13)));
    }

    #[test]
    fn a_floor_that_stays_beyond_the_end_of_the_stream_is_reported() {
        let ahead = Figures { floor: 12, ..look(1, 10, 12, 0) };
        let mut positions = Positions::default();
        assert_eq!(positions.after_bind(ahead, true), []);
        assert_eq!(positions.observe(ahead), [Notice::FloorBeyond { floor: 12, last: 10 }]);
    }
}
