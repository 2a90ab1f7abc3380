//! Dead letters as operators see them: read back, and closed by a replay or a discard.

use bytes::Bytes;

use crate::delivery::{Delivery, Digest, Headers, Position, Raw};
use crate::outcome::Reason;

/// Where letters lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pile {
    /// `dead_letters`
    Open,
    /// `closed_letters`
    Closed,
}

/// A letter without what may be large.
#[derive(Clone, Debug)]
pub struct Envelope {
    pub id: String,
    pub digest: Digest,
    pub subject: String,
    pub stream_seq: u64,
    pub delivered: u64,
    /// One of [`Reason`], or what a later version wrote.
    pub reason: String,
    pub error: String,
    pub payload_bytes: u64,
    /// Not known of letters from before the column was there.
    pub published_ns: Option<i64>,
    pub dead_at_ns: i64,
    pub closed: Option<Closed>,
}

/// What an operator did with a letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    Replayed,
    Discarded,
}

impl Closing {
    pub fn name(self) -> &'static str {
        match self {
            Self::Replayed => "replayed",
            Self::Discarded => "discarded",
        }
    }
}

/// What became of a letter, who did it and when.
#[derive(Clone, Debug)]
pub struct Closed {
    pub closing: Closing,
    pub by: String,
    pub at_ns: i64,
    /// In `processed_ids`, if it was applied.
    pub applied_id: Option<String>,
}

/// A letter, whole.
#[derive(Clone, Debug)]
pub struct Letter {
    pub envelope: Envelope,
    pub headers: Headers,
    pub payload: Bytes,
}

impl Letter {
    /// The message as it was delivered, to be given to the handler whatever was wrong with it.
    pub fn delivery(&self) -> Delivery {
        let Envelope { id, digest, subject, stream_seq, delivered, published_ns, dead_at_ns, .. } = &self.envelope;
        let position = Position {
            delivered: *delivered,
            stream_seq: *stream_seq,
            consumer_seq: 0,
            // No later than this, where it is not known.
            published_ns: published_ns.unwrap_or(*dead_at_ns),
        };
        let (headers, payload) = (self.headers.clone(), self.payload.clone());
        let raw = Raw { subject: subject.as_str().into(), headers, payload, position, unreadable: None };
        Delivery { raw, id: id.as_str().into(), digest: *digest, defect: None }
    }
}

/// Which letters are meant. The default is all of them.
#[derive(Clone, Debug, Default)]
pub struct Which {
    /// Any of these; empty for any at all.
    pub ids: Vec<String>,
    pub reason: Option<Reason>,
    pub subject: Option<SubjectPattern>,
    /// Dead at or after this, in nanoseconds since 1970 UTC, and before that.
    pub since_ns: Option<i64>,
    pub until_ns: Option<i64>,
}

/// A subject in which `*` stands for one token and a `>` at the end for one or more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectPattern(String);

impl std::str::FromStr for SubjectPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let tokens: Vec<&str> = text.split('.').collect();
        let misplaced =
            |(index, token): (usize, &&str)| token.is_empty() || (*token == ">" && index + 1 < tokens.len());
        if tokens.iter().enumerate().any(misplaced) {
            return Err("a subject such as ORDERS.new, ORDERS.* or ORDERS.>".to_owned());
        }
        Ok(Self(text.to_owned()))
    }
}

impl SubjectPattern {
    pub fn matches(&self, subject: &str) -> bool {
        let mut subject = subject.split('.');
        for token in self.0.split('.') {
            match (token, subject.next()) {
                (_, None) => return false,
                (">", Some(_)) => return true,
                ("*", Some(_)) => {}
                (token, Some(there)) if token == there => {}
                (_, Some(_)) => return false,
            }
        }
        subject.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_are_those_of_the_server() {
        let matches = |pattern: &str, subject: &str| pattern.parse::<SubjectPattern>().unwrap().matches(subject);
        for (pattern, subject) in [
            ("ORDERS.new", "ORDERS.new"),
            ("ORDERS.*", "ORDERS.new"),
            ("*.new", "ORDERS.new"),
            ("ORDERS.>", "ORDERS.eu.new"),
            (">", "x"),
        ] {
            assert!(matches(pattern, subject), "{pattern} {subject}");
        }
        for (pattern, subject) in [
            ("ORDERS.new", "ORDERS.New"),
            ("ORDERS.*", "ORDERS"),
            ("ORDERS.*", "ORDERS.eu.new"),
            ("ORDERS.>", "ORDERS"),
        ] {
            assert!(!matches(pattern, subject), "{pattern} {subject}");
        }
        for bad in ["", "ORDERS.", ".new", ">.new", "a..b"] {
            assert!(bad.parse::<SubjectPattern>().is_err(), "{bad}");
        }
    }
}
