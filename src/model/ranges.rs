//! A bounded set of sequences, kept as ranges. Pure.

/// Ranges that are kept. Beyond this the lowest ones are forgotten.
const RANGES_MAX: usize = 4096;

/// Sequences, as ranges that neither overlap nor touch, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range>);

/// The sequences from `from` to `to`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub from: u64,
    pub to: u64,
}

impl Range {
    pub fn count(self) -> u64 {
        self.to.saturating_sub(self.from).saturating_add(1)
    }
}

impl std::fmt::Display for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.from == self.to { write!(f, "{}", self.from) } else { write!(f, "{} to {}", self.from, self.to) }
    }
}

impl Ranges {
    /// Adds one sequence. Cheap for sequences that nearly ascend.
    pub fn add(&mut self, seq: u64) {
        self.add_range(Range { from: seq, to: seq });
    }

    pub fn add_range(&mut self, range: Range) {
        if let Some(last) = self.0.last_mut()
            && range.from >= last.from
            && range.from <= last.to.saturating_add(1)
        {
            last.to = last.to.max(range.to);
            return;
        }
        // The ranges that overlap or touch the new one are merged with it.
        let first = self.0.partition_point(|known| known.to.saturating_add(1) < range.from);
        let end = self.0.partition_point(|known| known.from <= range.to.saturating_add(1));
        let merged = self.0[first..end]
            .iter()
            .fold(range, |merged, known| Range { from: merged.from.min(known.from), to: merged.to.max(known.to) });
        self.0.splice(first..end, [merged]);
        if self.0.len() > RANGES_MAX {
            self.0.drain(..RANGES_MAX / 2);
        }
    }

    /// The sequences from `range` that are not in the set.
    pub fn gaps(&self, range: Range) -> Vec<Range> {
        let mut gaps = Vec::new();
        let mut next = range.from;
        let first = self.0.partition_point(|known| known.to < range.from);
        for known in self.0[first..].iter().take_while(|known| known.from <= range.to) {
            if known.from > next {
                gaps.push(Range { from: next, to: known.from - 1 });
            }
            next = known.to.saturating_add(1);
        }
        if next <= range.to {
            gaps.push(Range { from: next, to: range.to });
        }
        gaps
    }

    /// Forgets the sequences up to `seq`.
    pub fn forget_through(&mut self, seq: u64) {
        self.0.retain(|range| range.to > seq);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn count(&self) -> u64 {
        self.0.iter().map(|range| range.count()).sum()
    }

    pub fn first(&self) -> Option<u64> {
        self.0.first().map(|range| range.from)
    }

    pub fn iter(&self) -> impl Iterator<Item = Range> {
        self.0.iter().copied()
    }
}

/// The first ranges of the set, and how many more there are: `3, 7 to 9 and 2 more ranges`.
impl std::fmt::Display for Ranges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const SHOWN: usize = 20;
        for (index, range) in self.0.iter().take(SHOWN).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{range}")?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more ranges"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_hold_what_was_added_and_gaps_are_the_rest(
            added in vec((0..60_u64, 0..6_u64), 0..30),
            (from, length) in (0..60_u64, 0..60_u64),
        ) {
            let (mut ranges, mut set) = (Ranges::default(), BTreeSet::new());
            for (start, more) in added {
                ranges.add_range(Range { from: start, to: start + more });
                set.extend(start..=start + more);
            }
            let held: Vec<u64> = ranges.iter().flat_map(|range| range.from..=range.to).collect();
            prop_assert_eq!(&held, &set.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(ranges.count(), set.len() as u64);
            let pairs: Vec<Range> = ranges.iter().collect();
            prop_assert!(pairs.windows(2).all(|pair| pair[0].to + 1 < pair[1].from), "{:?}", pairs);
            let to = from + length;
            let gaps: Vec<u64> =
                ranges.gaps(Range { from, to }).into_iter().flat_map(|range| range.from..=range.to).collect();
            prop_assert_eq!(gaps, (from..=to).filter(|seq| !set.contains(seq)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_set_with_too_many_ranges_forgets_the_lowest() {
        let mut ranges = Ranges::default();
        (0..=RANGES_MAX as u64).for_each(|index| ranges.add(2 * index));
        assert!(ranges.count() <= RANGES_MAX as u64);
        assert_eq!(ranges.gaps(Range { from: 2 * RANGES_MAX as u64, to: 2 * RANGES_MAX as u64 }), []);
        assert!(ranges.first().is_some_and(|first| first > 0));
    }

    #[test]
    fn a_set_shows_its_first_ranges() {
        let mut ranges = Ranges::default();
        [3, 7, 8, 9].into_iter().for_each(|seq| ranges.add(seq));
        assert_eq!(ranges.to_string(), "3, 7 to 9");
        (0..30).for_each(|index| ranges.add(100 + 2 * index));
        assert!(ranges.to_string().ends_with(" and 12 more ranges"), "{ranges}");
    }
}
