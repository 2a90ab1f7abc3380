//! Finds the messages that the server has given up while nobody listened.
//!
//! The server says how many there are and not which. What it neither delivers any more nor waits for, and what this database
//! neither knows as processed nor as a dead letter, is one of them. If there are more of those than the server has given up,
//! another database has part of the orders, and nothing is concluded.

use std::path::PathBuf;

use crate::consumer::{Arrival, BindError, Records};
use crate::delivery::{Delivery, IdScheme, Reply};
use crate::health::ConsumerView;
use crate::store::{self, Claim, sqlite};

/// Sequences looked at in one go. From the top down: what was given up lately is near the end.
const BLOCK: u64 = 500;
/// Messages looked at in one survey.
const MESSAGES_MAX: usize = 20_000;

/// What a survey needs. It runs beside the worker and only reads.
pub struct Survey {
    pub records: Records,
    pub scheme: IdScheme,
    pub database: PathBuf,
    pub view: ConsumerView,
    /// What the dead letters will name as the last delivery.
    pub max_deliver: u64,
    /// Stop when what was found weighs this much; the next survey finds the rest.
    pub bytes_max: usize,
}

/// What it found.
pub struct Surveyed {
    /// Never processed, and never to be delivered again.
    pub lost: Vec<Arrival>,
    /// Of those that were processed. If less is lost than the server has given up, the rest is among them.
    pub processed: Vec<Reply>,
    /// How many the server must have given up.
    pub evidence: u64,
    /// There may be more.
    pub partial: bool,
}

/// Why nothing could be concluded.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    #[error(transparent)]
    Server(#[from] BindError),
    #[error("the database cannot be read")]
    Database(#[from] store::Error),
    #[error(
        "the server has given up {given_up} of the messages that it delivered, but this database knows nothing of more than \
         that: other workers, or another database, processed some; which ones were lost cannot be told"
    )]
    Ambiguous { given_up: u64 },
}

impl Survey {
    /// How many messages the server must have given up, by its own figures.
    pub fn evidence(view: &ConsumerView) -> u64 {
        view.num_redelivered.saturating_sub(view.num_ack_pending)
    }

    pub async fn run(self) -> Result<Surveyed, SurveyError> {
        let given_up = self.view.num_redelivered;
        // With nothing pending the floor may lag behind: it moves only with an acknowledgement.
        let settled = match self.view.num_ack_pending {
            0 => self.view.delivered_stream_seq,
            _ => self.view.ack_floor_stream_seq,
        };
        let first = self.view.stream_first_seq.max(1);
        let mut found =
            Surveyed { lost: Vec::new(), processed: Vec::new(), evidence: Self::evidence(&self.view), partial: false };
        let (mut to, mut looked_at, mut bytes) = (settled, 0, 0);
        while to >= first && !found.partial {
            let from = to.saturating_sub(BLOCK - 1).max(first);
            let block = self.records.between(from, to, self.max_deliver).await?;
            looked_at += block.len();
            let deliveries: Vec<Delivery> =
                block.iter().map(|(raw, _)| Delivery::new(raw.clone(), &self.scheme)).collect();
            let claims = sqlite::known_of(&self.database, &deliveries.iter().collect::<Vec<_>>()).await?;
            for ((arrival, delivery), claim) in block.into_iter().zip(&deliveries).zip(claims) {
                match claim {
                    Claim::New => {
                        bytes += delivery.bytes();
                        found.lost.push(arrival);
                    }
                    Claim::Processed(_) | Claim::Dead => found.processed.push(arrival.1),
                }
            }
            if found.lost.len() as u64 > given_up {
                return Err(SurveyError::Ambiguous { given_up });
            }
            found.partial = bytes >= self.bytes_max || looked_at >= MESSAGES_MAX;
            to = from - 1;
        }
        Ok(found)
    }
}
