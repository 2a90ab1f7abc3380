//! Finds the messages that the server has given up while nobody listened.
//!
//! The server says how many there are and not which. What it neither delivers any more nor waits for, and what this database
//! neither knows as processed nor as a dead letter, is one of them. If there are more of those than the server has given up,
//! another database has part of the orders, and nothing is concluded.

use std::path::PathBuf;
use std::time::SystemTime;

use crate::config::Retention;
use crate::consumer::{Arrival, BindError, Records};
use crate::delivery::{Delivery, IdScheme, Reply, unix_ns};
use crate::health::ConsumerView;
use crate::store::sqlite::Lookup;
use crate::store::{self, Claim, OpenError};

/// Sequences looked at in one go. From the top down: what was given up lately is near the end.
const BLOCK: u64 = 500;
/// Messages looked at in one step; also, at least so many are looked at before anything is concluded.
const MESSAGES_MAX: usize = 20_000;

/// What a survey needs. It runs beside the worker and only reads.
pub struct Survey {
    pub records: Records,
    pub scheme: IdScheme,
    pub database: PathBuf,
    pub retention: Retention,
    pub view: ConsumerView,
    /// What the dead letters will name as the last delivery.
    pub max_deliver: u64,
    /// No more than this of what was found is kept; the next survey finds the rest.
    pub bytes_max: usize,
    /// What the steps so far found.
    pub progress: Progress,
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
    /// How many the server must have given up.
    pub evidence: u64,
    /// Deliveries were pending, and some of what was given up may be above the floor still.
    pub pending: bool,
    pub conclusion: Conclusion,
}

pub enum Conclusion {
    /// Fewer were found than were given up, and there are messages below.
    GoOn(Box<Survey>),
    /// `lost` were never processed and will never be delivered again; of the youngest of them `arrivals` is kept.
    Done { arrivals: Vec<Arrival>, lost: u64, from: u64, to: u64 },
}

/// Why nothing could be concluded.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    #[error(transparent)]
    Server(#[from] BindError),
    #[error("the database cannot be opened")]
    Open(#[from] OpenError),
    #[error("the database cannot be read")]
    Database(#[from] store::Error),
    #[error(
        "the server has given up {given_up} of the messages that it delivered, but this database knows nothing of more than \
         that among messages {from} to {to}: another database has part of them, or they were not for this consumer when it \
         passed them; which ones were lost cannot be told; `order-processor audit` lists all that this database does not know"
    )]
    Ambiguous { given_up: u64, from: u64, to: u64 },
    #[error(
        "this database knows nothing of some of the messages {from} to {to}; as long as deliveries are pending it cannot be \
         told whether the server has given them up; `order-processor audit` lists them"
    )]
    Pending { from: u64, to: u64 },
}

impl SurveyError {
    /// Another try may have another result although the server's figures stay.
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Server(_) | Self::Open(_) | Self::Database(_) | Self::Pending { .. } => true,
            Self::Ambiguous { .. } => false,
        }
    }
}

impl Survey {
    /// How many messages the server must have given up, by its own figures: exact when nothing is pending.
    pub fn evidence(view: &ConsumerView) -> u64 {
        view.num_redelivered.saturating_sub(view.num_ack_pending)
    }

    /// One step.
    pub async fn run(mut self) -> Result<Surveyed, SurveyError> {
        let evidence = Self::evidence(&self.view);
        // With nothing pending the floor may lag behind: it moves only with an acknowledgement.
        let settled = match self.view.num_ack_pending {
            0 => self.view.delivered_stream_seq,
            _ => self.view.ack_floor_stream_seq,
        };
        let start = self.records.start;
        let first = self.view.stream_first_seq.max(start.seq).max(1);
        let mut lookup = Lookup::open(&self.database).await?;
        let oldest = lookup.oldest_processed_at().await?;
        let told_since = start.ns.max(pruned_before(self.retention, oldest, unix_ns(SystemTime::now())));
        let mut to = self.progress.to.unwrap_or(settled);
        let (mut processed, mut looked_at) = (Vec::new(), 0);
        while to >= first && looked_at < MESSAGES_MAX {
            let from = to.saturating_sub(BLOCK - 1).max(first);
            let block = self.records.between(from, to, self.max_deliver).await?;
            looked_at += block.len();
            let deliveries: Vec<Delivery> =
                block.iter().map(|(raw, _)| Delivery::new(raw.clone(), &self.scheme)).collect();
            let claims = lookup.known(&deliveries.iter().collect::<Vec<_>>()).await?;
            for ((arrival, delivery), claim) in block.into_iter().zip(&deliveries).zip(claims) {
                match claim {
                    // It was never for the consumer, or its id was pruned.
                    Claim::New if delivery.raw.position.published_ns < told_since => {}
                    Claim::New => self.progress.add(arrival, delivery.bytes(), self.bytes_max),
                    Claim::Processed(_) | Claim::Dead => processed.push(arrival.1),
                }
            }
            if self.progress.lost_count > evidence {
                return Err(match self.view.num_ack_pending {
                    0 => SurveyError::Ambiguous { given_up: evidence, from, to: settled },
                    _ => SurveyError::Pending { from, to: settled },
                });
            }
            to = from - 1;
        }
        let pending = self.view.num_ack_pending > 0;
        let conclusion = if to >= first && self.progress.lost_count < evidence {
            self.progress.to = Some(to);
            Conclusion::GoOn(Box::new(self))
        } else {
            let Progress { lost: arrivals, lost_count: lost, .. } = self.progress;
            Conclusion::Done { arrivals, lost, from: to + 1, to: settled }
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

/// Of a message published from then on the id is there if it was processed.
pub fn pruned_before(retention: Retention, oldest_processed_at: Option<i64>, now_ns: i64) -> i64 {
    match retention {
        // An id is kept while the stream holds its message.
        Retention::Auto => 0,
        // Ids go in the order in which they came, and none is younger than this.
        Retention::For(age) => {
            let kept_since = now_ns.saturating_sub(i64::try_from(age.as_nanos()).unwrap_or(i64::MAX));
            oldest_processed_at.map_or(kept_since, |oldest| oldest.min(kept_since))
        }
    }
}
