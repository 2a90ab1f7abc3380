//! The Bloom filters of all segments, in memory.

use std::fmt;

use super::key::{FILTER_BITS, Key, PROBES};

/// The filters of all segments, side by side: one look at a position answers for a whole group of them.
#[derive(Default)]
pub struct SegmentFilters {
    groups: Vec<Group>,
}

struct Group {
    /// Bit `n` of each word belongs to the segment in place `n`.
    segments: [Option<i64>; 32],
    positions: Box<[u32]>,
}

/// The bits of a byte, in a form that lets the compiler test four of them at a time.
const BITS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

impl SegmentFilters {
    /// The segments that may have the id.
    pub fn candidates(&self, key: Key) -> impl Iterator<Item = i64> {
        let probes = key.probes();
        self.groups.iter().flat_map(move |group| {
            // Half of the probes are nearly always enough, and none of them waits for the memory access of another one.
            let hits = |half: &[usize]| half.iter().fold(u32::MAX, |hits, position| hits & group.positions[*position]);
            let (first, second) = probes.split_at(PROBES / 2);
            let hits = match hits(first) {
                0 => 0,
                some => some & hits(second),
            };
            let place = move |place: &usize| hits & 1 << place != 0;
            (0..group.segments.len()).filter(place).filter_map(|place| group.segments[place])
        })
    }

    pub fn add(&mut self, segment: i64, filter: &[u8]) {
        let free = |group: &Group| group.segments.iter().position(Option::is_none);
        let found = self.groups.iter().enumerate().find_map(|(group, it)| Some((group, free(it)?)));
        let (group, place) = found.unwrap_or_else(|| {
            self.groups.push(Group { segments: [None; 32], positions: vec![0; FILTER_BITS].into() });
            (self.groups.len() - 1, 0)
        });
        let group = &mut self.groups[group];
        group.segments[place] = Some(segment);
        for (positions, byte) in group.positions.chunks_mut(8).zip(filter) {
            for (position, bit) in positions.iter_mut().zip(BITS) {
                *position |= if u32::from(*byte) & bit == 0 { 0 } else { 1 << place };
            }
        }
    }

    pub fn remove(&mut self, segment: i64) {
        for group in &mut self.groups {
            if let Some(place) = group.segments.iter().position(|known| *known == Some(segment)) {
                group.segments[place] = None;
                group.positions.iter_mut().for_each(|position| *position &= !(1 << place));
            }
        }
        self.groups.retain(|group| group.segments.iter().any(Option::is_some));
    }
}

impl fmt::Debug for SegmentFilters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentFilters").field("groups", &self.groups.len()).finish()
    }
}
