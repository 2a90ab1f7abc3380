//! Dead letters as operators see them: read back, and closed by a replay or a discard.

use bytes::Bytes;

use super::subject::SubjectPattern;
use crate::model::delivery::{Delivery, Headers, Position, Raw};
use crate::model::id::{Digest, NoId};
use crate::model::label::Label;
use crate::model::outcome::Reason;
use crate::model::plan::Plan;
use crate::model::schemes::IdSchemes;

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
    /// Whether the letter has the place in the stream as its id because the id of its publisher cannot be read. The publisher may
    /// have sent the same order again, with its id.
    pub fn lacks_its_id(&self, schemes: &IdSchemes) -> bool {
        if self.envelope.reason == Reason::Unreadable.name() {
            return true;
        }
        let raw = self.delivery().raw;
        self.envelope.reason == Reason::Undecodable.name()
            && match schemes.of(raw.position).derive(&raw) {
                Ok(_) => false,
                Err(NoId::Missing(_)) => schemes.missing_is_dead,
                Err(NoId::Undecodable(_)) => true,
            }
    }

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
        Delivery {
            raw,
            id: id.as_str().into(),
            digest: *digest,
            defect: None,
            missing_id: None,
            ignored: None,
            attempt: 1,
            plan: Plan::default(),
            key: None,
        }
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
