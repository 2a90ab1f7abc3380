//! Messages that the server has given up: delivered `max_deliver` times and never acknowledged. It delivers them no more, so
//! they are fetched by their sequence while the stream still has them.
//!
//! What the server shows of them (nats-server 2.15): an advisory at the moment; afterwards they are pending no more, the ack
//! floor passes them with the next acknowledgement of any message, and they count as `num_redelivered` until somebody
//! acknowledges them or the stream drops them. Which ones they are it does not say.

use async_nats::Client;
use async_nats::jetstream::consumer::{DeliverPolicy, Info};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Deserialize;

use super::consumer::{Arrival, BindError};
use super::unreadable::{message_at, next_message};
use crate::model::time::unix_ns;

/// Where the server says that it has given a message up. The permission to listen is optional.
pub fn advisory_subject(stream: &str, consumer: &str) -> String {
    format!("{ADVISORY_PREFIX}.{stream}.{consumer}")
}

/// The beginning of the [advisories' subject](advisory_subject).
pub const ADVISORY_PREFIX: &str = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES";

/// What an advisory says.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Advised {
    stream_seq: u64,
    deliveries: u64,
}

impl Advised {
    /// `None` for anything else that comes on that subject.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }
}

/// Read access to the messages of a stream that one consumer is for.
#[derive(Clone)]
pub struct Records {
    pub client: Client,
    pub stream: String,
    pub consumer: String,
    /// When both were created: what tells them from others of the same name.
    pub created: (i128, i128),
    pub filters: Vec<String>,
    pub start: Start,
}

/// Sequences that are read one after the other, and how many such runs at once.
const RUN: u64 = 50;
const RUNS: usize = 8;

/// What is older than this was never for the consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    pub seq: u64,
    pub ns: i64,
}

impl Start {
    pub fn of(consumer: &Info) -> Self {
        match consumer.config.deliver_policy {
            DeliverPolicy::All => Self { seq: 1, ns: 0 },
            DeliverPolicy::ByStartSequence { start_sequence } => Self { seq: start_sequence, ns: 0 },
            DeliverPolicy::ByStartTime { start_time } => Self { seq: 1, ns: unix_ns(start_time.into()) },
            DeliverPolicy::New | DeliverPolicy::Last | DeliverPolicy::LastPerSubject => {
                Self { seq: 1, ns: unix_ns(consumer.created.into()) }
            }
        }
    }
}

impl Records {
    /// The messages that the server was heard to give up and that the stream still has.
    pub async fn advised(self, advised: Vec<Advised>) -> Result<Vec<Arrival>, BindError> {
        let mut found = Vec::with_capacity(advised.len());
        for Advised { stream_seq, deliveries } in advised {
            let stored = message_at(&self.client, &self.stream, stream_seq).await?;
            found.extend(stored.map(|stored| stored.into_last_arrival(&self.stream, &self.consumer, deliveries)));
        }
        self.still_there().await?;
        Ok(found)
    }

    /// The messages from sequence `from` to `to`, as if each had just had its `delivered`th delivery.
    pub async fn between(&self, from: u64, to: u64, delivered: u64) -> Result<Vec<Arrival>, BindError> {
        let starts = (from..=to).step_by(usize::try_from(RUN).unwrap_or(usize::MAX));
        let runs = starts.map(|start| self.run(start, to.min(start + RUN - 1), delivered));
        let runs: Vec<Vec<Arrival>> = stream::iter(runs).buffered(RUNS).try_collect().await?;
        Ok(runs.into_iter().flatten().collect())
    }

    async fn run(&self, from: u64, to: u64, delivered: u64) -> Result<Vec<Arrival>, BindError> {
        let mut found = Vec::new();
        for filter in &self.filters {
            let mut next = from;
            while next <= to
                && let Some(stored) = next_message(&self.client, &self.stream, next, filter).await?
                && stored.seq <= to
            {
                next = stored.seq + 1;
                found.push(stored.into_last_arrival(&self.stream, &self.consumer, delivered));
            }
        }
        Ok(found)
    }

    /// Whether what was read until now is of this very stream, and this consumer's.
    ///
    /// # Errors
    /// [`BindError::Another`] if it may be of others.
    pub async fn still_there(&self) -> Result<(), BindError> {
        let found = super::consumer::look(&self.client, &self.stream, &self.consumer).await?;
        if found.created() == self.created { Ok(()) } else { Err(BindError::Another) }
    }
}
