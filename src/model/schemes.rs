//! How the ids of one database are made: one scheme after the other, since settings change. No I/O.
//!
//! A message that was delivered before a change keeps the id that it had then, whatever the settings are now. Otherwise it would be
//! applied a second time when it is delivered again.

use super::delivery::Position;
use super::id::IdScheme;

/// The schemes of a database, and what becomes of a message whose id is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdSchemes {
    pub first: IdScheme,
    /// In the order in which they were made.
    pub changes: Vec<SchemeChange>,
    /// A message whose id is missing becomes a dead letter. Otherwise its place in the stream is its id.
    pub missing_is_dead: bool,
}

/// What the settings say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdSettings {
    pub scheme: IdScheme,
    /// See [`IdSchemes::missing_is_dead`].
    pub missing_is_dead: bool,
}

/// From a bind on, ids of new messages are made by another scheme.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemeChange {
    pub scheme: IdScheme,
    pub former: FormerMessages,
}

/// The messages that may have been delivered before a change.
///
/// A sequence alone does not tell: a recreated stream uses it again. A published time alone would include the messages that still
/// wait in the stream, for which the new settings are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormerMessages {
    /// The highest sequence that the consumer had delivered, or that the database knows of the stream of that time.
    pub through_seq: u64,
    /// Messages that were published later than this have the sequence of a former message at most.
    pub through_ns: i64,
    /// What was published before this was no longer in the stream: it belongs to a former stream, or a limit had removed it.
    pub gone_before_ns: i64,
}

impl IdSchemes {
    /// One scheme for all messages.
    pub fn unchanged(settings: &IdSettings) -> Self {
        Self { first: settings.scheme.clone(), changes: Vec::new(), missing_is_dead: settings.missing_is_dead }
    }

    /// The scheme of a message: the one that held when the message was delivered for the first time.
    pub fn of(&self, position: Position) -> &IdScheme {
        let mut scheme = &self.first;
        for change in &self.changes {
            if change.former.includes(position) {
                break;
            }
            scheme = &change.scheme;
        }
        scheme
    }

    /// The scheme of new messages.
    pub fn newest(&self) -> &IdScheme {
        self.changes.last().map_or(&self.first, |change| &change.scheme)
    }

    /// The scheme that the settings want, with the recorded name of the stream: a mirror or a renamed stream has the same messages.
    pub fn wanted(&self, settings: &IdSettings) -> IdScheme {
        IdScheme { stream: self.first.stream.clone(), ..settings.scheme.clone() }
    }
}

impl FormerMessages {
    fn includes(&self, position: Position) -> bool {
        let Position { stream_seq, published_ns, .. } = position;
        published_ns < self.gone_before_ns || (stream_seq <= self.through_seq && published_ns <= self.through_ns)
    }

    /// The first sequence of the new scheme.
    pub fn next_seq(&self) -> u64 {
        self.through_seq.saturating_add(1)
    }
}

impl From<IdScheme> for IdSchemes {
    fn from(first: IdScheme) -> Self {
        Self { first, changes: Vec::new(), missing_is_dead: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::id::UniqueIn;

    fn scheme(pointer: &str) -> IdScheme {
        IdScheme { stream: "ORDERS".into(), pointer: Some(pointer.into()), unique_in: UniqueIn::Subject }
    }

    fn change(pointer: &str, through_seq: u64, through_ns: i64, gone_before_ns: i64) -> SchemeChange {
        SchemeChange { scheme: scheme(pointer), former: FormerMessages { through_seq, through_ns, gone_before_ns } }
    }

    #[test]
    fn a_message_keeps_the_scheme_of_its_first_delivery() {
        let schemes = IdSchemes {
            changes: vec![change("/b", 10, 100, 5), change("/a", 20, 200, 5), change("/c", 3, 320, 300)],
            ..IdSchemes::from(scheme("/a"))
        };
        let pointer = |stream_seq, published_ns| {
            let position = Position { delivered: 1, stream_seq, consumer_seq: 1, published_ns };
            schemes.of(position).pointer.clone().unwrap()
        };
        assert_eq!(pointer(10, 100), "/a", "delivered before the first change");
        assert_eq!(pointer(11, 100), "/b", "it waited in the stream");
        assert_eq!(pointer(15, 150), "/b");
        assert_eq!(pointer(25, 4), "/a", "of a former stream");
        assert_eq!(pointer(21, 250), "/a", "back to the former settings");
        assert_eq!(pointer(2, 310), "/a", "of the recreated stream, delivered before the third change");
        assert_eq!(pointer(4, 310), "/c", "of the recreated stream, although its sequence is low");
        assert_eq!(pointer(2, 321), "/c", "its sequence is used again");
    }
}
