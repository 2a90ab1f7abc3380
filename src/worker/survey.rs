//! Finds the messages that the server has given up while nobody listened.
//!
//! The server says how many there are and not which. What it neither delivers any more nor waits for, and what this database
//! neither knows as processed nor as a dead letter, is one of them, or was acknowledged by somebody else, or is one that the
//! server has forgotten. So all that is unknown is counted: only if that is no more than the server has given up, each of them is
//! lost for certain. Else nothing is concluded about any of them, and what comes later is judged for itself: [`Judged`].

use std::time::SystemTime;

use crate::config::{Database, OnConflict, Retention};
use crate::jetstream;
use crate::jetstream::stored::StreamReader;
use crate::model::delivery::{Arrival, Delivery, Reply};
use crate::model::id::IdScheme;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::{self, Claim, OpenError, Reader};
use crate::worker::retention::pruned_before;

/// Sequences looked at in one go. From the top down: what was given up lately is near the end.
const BLOCK: u64 = 1000;
/// Messages looked at in one step.
const MESSAGES_MAX: usize = 20_000;

/// What a survey needs. It runs beside the worker and only reads.
pub struct Survey {
    pub reader: StreamReader,
    pub scheme: IdScheme,
    pub database: Database,
    pub retention: Retention,
    pub on_conflict: OnConflict,
    pub view: ConsumerView,
    /// What needs no look.
    pub judged: Judged,
    /// What the dead letters will name as the last delivery.
    pub max_deliver: u64,
    /// No more than this of what was found is kept; the next survey finds the rest.
    pub bytes_max: usize,
    /// What the steps so far found.
    pub progress: Progress,
}

/// The part of the stream about which there is nothing more to find out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// Up to this sequence.
    pub through: u64,
    /// So many of the messages that the server counts as given up are in it.
    pub given_up: u64,
}

#[derive(Default)]
pub struct Progress {
    /// The next step begins here; `None` before the first one.
    to: Option<u64>,
    lost: Vec<Arrival>,
    lost_count: u64,
    bytes: usize,
}

/// What one step found.
pub struct Surveyed {
    /// Of those that were processed. What the server has given up may be among them.
    pub processed: Vec<Reply>,
    /// How many the server must have given up, by the figures that led to the survey.
    pub evidence: u64,
    /// Deliveries were pending, and some of what was given up may be above the floor still.
    pub pending: bool,
    pub conclusion: Conclusion,
}

pub enum Conclusion {
    /// There are messages below that were not looked at.
    GoOn(Box<Survey>),
    /// `lost` were never processed and will never be delivered again; of the youngest of them `arrivals` is kept.
    Done { arrivals: Vec<Arrival>, lost: u64, looked_at: LookedAt },
    /// More are unknown than were certainly given up: which ones were lost cannot be told.
    CannotTell { unknown: u64, looked_at: LookedAt },
}

/// What a survey was about.
#[derive(Clone, Copy, Debug)]
pub struct LookedAt {
    pub from: u64,
    /// How many of the messages were given up at the least; exactly, if nothing is pending.
    pub given_up: u64,
    /// All of it, if nothing is pending.
    pub judged: Judged,
}

/// Why there is no conclusion.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    #[error(transparent)]
    Server(#[from] jetstream::Error),
    #[error("the database cannot be opened")]
    Open(#[from] OpenError),
    #[error("the database cannot be read")]
    Database(#[from] store::Error),
}

impl Survey {
    /// How many messages the server must have given up, by its own figures: exact when nothing is pending.
    pub fn evidence(view: &ConsumerView) -> u64 {
        view.num_redelivered.saturating_sub(view.num_ack_pending)
    }

    /// One step.
    pub async fn run(mut self) -> Result<Surveyed, SurveyError> {
        let view = &self.view;
        let pending = view.num_ack_pending > 0;
        // With nothing pending the floor may lag behind: it moves only with an acknowledgement.
        let settled = if pending { view.ack_floor_stream_seq } else { view.delivered_stream_seq };
        let start = self.reader.starts_at();
        let first = view.stream_first_seq.max(start.seq).max(self.judged.through + 1);
        let mut lookup = Reader::open(&self.database).await?;
        let oldest = lookup.oldest_processed_at().await?;
        let told_since = start.ns.max(pruned_before(self.retention, oldest, unix_ns(SystemTime::now())));
        // What was published since took the sequence of a message that the server has lost, and is yet to be delivered.
        let looked_at_ns = unix_ns(view.last_published_at);
        let mut to = self.progress.to.unwrap_or(settled);
        let (mut processed, mut looked_at) = (Vec::new(), 0);
        while to >= first && looked_at < MESSAGES_MAX {
            let from = to.saturating_sub(BLOCK - 1).max(first);
            let block = self.reader.between(from, to, self.max_deliver).await?;
            looked_at += block.len();
            let deliveries: Vec<Delivery> =
                block.iter().map(|arrival| Delivery::new(arrival.raw.clone(), &self.scheme)).collect();
            let claims = lookup.known(&deliveries.iter().collect::<Vec<_>>()).await?;
            for ((arrival, delivery), claim) in block.into_iter().zip(&deliveries).zip(claims) {
                let position = delivery.raw.position;
                let is_unknown = match claim {
                    _ if position.published_ns < start.ns || position.published_ns > looked_at_ns => continue,
                    // Its id may be pruned.
                    Claim::New if position.published_ns < told_since => continue,
                    Claim::New => true,
                    Claim::Processed(digest) => digest != delivery.digest && self.on_conflict == OnConflict::DeadLetter,
                    Claim::Dead => false,
                };
                match is_unknown {
                    true => self.progress.add(arrival, delivery.bytes(), self.bytes_max),
                    false => processed.push(arrival.reply),
                }
            }
            to = from - 1;
        }
        self.reader.confirm().await?;
        let evidence = Self::evidence(&self.view);
        if to >= first {
            self.progress.to = Some(to);
            return Ok(Surveyed { processed, evidence, pending, conclusion: Conclusion::GoOn(Box::new(self)) });
        }
        let Progress { lost: arrivals, lost_count: lost, .. } = self.progress;
        // What the server counts may be elsewhere: in the part that was judged, or above.
        let above = self.view.delivered_stream_seq.saturating_sub(settled);
        let given_up = self.view.num_redelivered.saturating_sub(self.judged.given_up).saturating_sub(above);
        let judged = Judged { through: settled, given_up: self.view.num_redelivered };
        let looked_at = LookedAt { from: first, given_up, judged };
        let conclusion = if lost <= given_up {
            Conclusion::Done { arrivals, lost, looked_at }
        } else {
            Conclusion::CannotTell { unknown: lost, looked_at }
        };
        Ok(Surveyed { processed, evidence, pending, conclusion })
    }
}

impl Progress {
    fn add(&mut self, arrival: Arrival, bytes: usize, bytes_max: usize) {
        self.lost_count += 1;
        if self.lost.is_empty() || self.bytes + bytes <= bytes_max {
            self.bytes += bytes;
            self.lost.push(arrival);
        }
    }
}
