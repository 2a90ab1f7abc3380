//! A page of the index as it is stored, and the hash that guards it.

use super::key::Key;
use crate::model::id::head;

/// A hash at the end of each page and filter: a wrong bit in a page would make an id look new.
const CHECK_BYTES: usize = 8;

/// The bytes of a page or a filter of that number, with their hash.
pub fn with_check(number: i64, mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend(check(number, &bytes));
    bytes
}

/// The bytes without their hash; `None` if the hash does not match.
pub fn checked(number: i64, stored: &[u8]) -> Option<&[u8]> {
    let (bytes, found) = stored.split_last_chunk()?;
    (*found == check(number, bytes)).then_some(bytes)
}

fn check(number: i64, bytes: &[u8]) -> [u8; CHECK_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&number.to_le_bytes()).update(bytes);
    head(&hasher.finalize())
}

/// One id in a page.
pub fn entry(key: Key, offset: u32) -> u64 {
    u64::from(key.tag()) << 32 | u64::from(offset)
}

/// A page as it is stored.
pub struct Entries<'a>(pub &'a [[u8; 8]]);

impl Entries<'_> {
    /// The rows that may have the id, counted from the first row of the segment.
    pub fn offsets(&self, key: Key) -> impl Iterator<Item = i64> {
        let first = self.0.partition_point(|bytes| u64::from_le_bytes(*bytes) < entry(key, 0));
        let entries = self.0[first..].iter().map(|bytes| u64::from_le_bytes(*bytes));
        entries.take_while(move |found| *found <= entry(key, u32::MAX)).map(|found| found as u32).map(i64::from)
    }
}
