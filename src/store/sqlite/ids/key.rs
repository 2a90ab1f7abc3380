//! The hash of an id: its place in the index.

use std::hash::{Hash, Hasher};

use super::SEGMENT_ROWS;
use crate::model::id::head;

/// Pages of a segment.
pub const PAGES: i64 = 256;
/// All probes for an id are within this many positions of a filter. They take 2 KiB of memory, so a probe waits for one page of
/// memory only.
const BLOCK: usize = 512;
/// 24 bits for each id, in whole blocks. With 8 probes, one filter in 11,000 reports an id that it does not have.
pub const FILTER_BITS: usize = (24 * SEGMENT_ROWS).next_multiple_of(BLOCK);
pub const PROBES: usize = 8;

/// 128 bits of BLAKE3 over an id. A part of it is stored, so it must never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u8; 16]);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        state.write_u64(u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
    }
}

/// A key is a hash already.
#[derive(Default)]
pub struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl Key {
    pub fn of(id: &str) -> Self {
        Self(head(&blake3::hash(id.as_bytes())))
    }

    /// The page of a segment that contains the id.
    pub fn page(self) -> i64 {
        i64::from(self.0[0])
    }

    /// The number of the id in its page.
    pub fn tag(self) -> u32 {
        let [_, a, b, c, d, ..] = self.0;
        u32::from_be_bytes([a, b, c, d])
    }

    /// The positions of the id in a filter: a block, and positions in it by double hashing (Kirsch and Mitzenmacher 2006).
    pub fn probes(self) -> [usize; PROBES] {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        let block = (u64::from(u32::from_le_bytes([a, b, c, d])) * (FILTER_BITS / BLOCK) as u64) >> 32;
        let (first, step) = (u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]) | 1);
        std::array::from_fn(|probe| {
            let place = first.wrapping_add(step.wrapping_mul(probe as u16));
            block as usize * BLOCK + usize::from(place) % BLOCK
        })
    }
}
