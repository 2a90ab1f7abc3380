//! What the server says: stream, consumer and single messages.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::config::{Config, ConsumerNames};
use crate::jetstream::connection::{CommandClient, connect_command};
use crate::jetstream::look::{Snapshot, StartsAt, look_for_command};
use crate::jetstream::stored::{self, StreamReader};
use crate::jetstream::walk::Walk;
use crate::model::delivery::{Delivery, Raw};
use crate::model::text::chain;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::ops::audit::keep_quiet_about_the_client;
use crate::ops::progress::Progress;
use crate::store::{Bind, Error, Reader};
use crate::worker::audit::pass::{other_filter_through, settled};
use crate::worker::missing::VerdictRules;
use crate::worker::retention::pruned_before;

/// What is read of the messages above the ack floor without `--scan`.
const READ_MAX: u64 = 10_000;
const READ_PATIENCE: Duration = Duration::from_secs(3);
/// The longest time without a message before `--scan` ends.
const SCAN_PATIENCE: Duration = Duration::from_secs(30);

/// One connection, and what the server has answered.
pub struct ServerSource {
    visit: CommandClient,
    names: ConsumerNames,
    snapshot: Snapshot,
    pub facts: ServerFacts,
}

/// Stream and consumer at one moment.
#[derive(Clone, Debug)]
pub struct ServerFacts {
    pub view: ConsumerView,
    /// The last sequence that the server will not deliver again.
    pub settled: u64,
    /// The subjects that the consumer is for, and its first message.
    pub filters: Vec<String>,
    pub starts_at: StartsAt,
    /// Each sequence is a message for the consumer.
    pub has_all: bool,
}

/// What the stream has of an id.
pub enum ScanResult {
    Message(Box<Delivery>),
    /// No message of those that were read, which are all of the stream or all above the ack floor.
    Nothing {
        through_all: bool,
    },
    /// Not all of these were read.
    Unread(String),
}

impl ServerSource {
    pub async fn ask(config: &Config) -> Result<Self, String> {
        let visit = connect_command(&config.nats).await.map_err(|error| chain(&error))?;
        let snapshot = look_for_command(&visit, &config.consumer).await.map_err(|error| chain(&error))?;
        Ok(Self { facts: ServerFacts::of(&visit, &snapshot), names: config.consumer.clone(), visit, snapshot })
    }

    pub async fn look_again(&mut self) -> Result<(), String> {
        self.snapshot = look_for_command(&self.visit, &self.names).await.map_err(|error| chain(&error))?;
        self.facts = ServerFacts::of(&self.visit, &self.snapshot);
        Ok(())
    }

    pub fn bind(&self) -> Bind {
        Bind::of(&self.names, &self.facts.view)
    }

    /// The message with this sequence; `None` if the stream does not have it.
    pub async fn message_at(&self, seq: u64) -> Result<Option<Raw>, String> {
        let ConsumerNames { stream, name: consumer } = &self.names;
        let asked = self.visit.denials.answer(stored::message_at(&self.visit.client, stream, seq)).await;
        let stored = asked.map_err(|error| chain(&error))?.map_err(|error| chain(&error))?;
        Ok(stored.map(|stored| stored.into_arrival(stream, consumer, 1).raw))
    }

    /// The first message that `is_it` accepts: of those above the ack floor, or of `all`.
    pub async fn scan(
        &self,
        config: &Config,
        all: bool,
        is_it: impl FnMut(Raw) -> Option<Delivery>,
    ) -> Result<ScanResult, String> {
        if all { self.scan_all(config, is_it).await } else { self.read_above_floor(is_it).await }
    }

    async fn read_above_floor(&self, mut is_it: impl FnMut(Raw) -> Option<Delivery>) -> Result<ScanResult, String> {
        let reader = StreamReader::of(self.visit.client.clone(), &self.snapshot);
        let (mut next, last) = (self.facts.settled + 1, self.facts.view.stream_last_seq);
        let (mut left, deadline) = (READ_MAX, Instant::now() + READ_PATIENCE);
        while next <= last {
            if left == 0 || Instant::now() >= deadline {
                let unread = format!("messages {next} to {last} of the stream, which wait: --scan reads all messages");
                return Ok(ScanResult::Unread(unread));
            }
            let some = self.visit.denials.answer(reader.some(next, last)).await;
            let (arrivals, after) = some.map_err(|error| chain(&error))?.map_err(|error| chain(&error))?;
            left = left.saturating_sub(arrivals.len() as u64);
            if let Some(found) = arrivals.into_iter().find_map(|arrival| is_it(arrival.raw)) {
                return Ok(ScanResult::Message(Box::new(found)));
            }
            next = after;
        }
        Ok(ScanResult::Nothing { through_all: false })
    }

    async fn scan_all(
        &self,
        config: &Config,
        mut is_it: impl FnMut(Raw) -> Option<Delivery>,
    ) -> Result<ScanResult, String> {
        let (first, last) = (self.facts.view.stream_first_seq.max(1), self.facts.view.stream_last_seq);
        if first > last {
            return Ok(ScanResult::Nothing { through_all: true });
        }
        keep_quiet_about_the_client();
        let config = Arc::new(config.clone());
        let walk = Walk::new(config, &self.snapshot, first, last, SCAN_PATIENCE).await;
        let mut walk = walk.map_err(|error| chain(&error))?;
        let mut progress = Progress::new(Some(last - first + 1));
        let found = loop {
            match walk.next().await {
                Ok(messages) if messages.is_empty() => break Ok(ScanResult::Nothing { through_all: true }),
                Ok(messages) => {
                    let read_through = messages.last().map_or(first, |raw| raw.position.stream_seq);
                    if let Some(found) = messages.into_iter().find_map(&mut is_it) {
                        break Ok(ScanResult::Message(Box::new(found)));
                    }
                    progress.advance(read_through - first + 1);
                }
                Err(error) => break Err(chain(&error)),
            }
        };
        progress.finish();
        walk.close().await;
        found
    }

    /// What may be judged of messages that are in no table.
    pub async fn rules(&self, config: &Config, reader: &mut Reader) -> Result<VerdictRules, Error> {
        let (mark, oldest) = (reader.audit_mark().await?, reader.oldest_processed_at().await?);
        let last = self.facts.view.stream_last_seq;
        Ok(VerdictRules {
            start_ns: self.facts.starts_at.ns,
            pruned_before_ns: pruned_before(config.inbox.retention, oldest, unix_ns(SystemTime::now())),
            other_filter_through: other_filter_through(mark.as_ref(), &self.facts.filters, last),
            on_conflict: config.inbox.on_conflict,
        })
    }
}

impl ServerFacts {
    fn of(visit: &CommandClient, snapshot: &Snapshot) -> Self {
        let view = snapshot.view();
        let is_filtered = StreamReader::of(visit.client.clone(), snapshot).is_filtered();
        Self {
            settled: settled(&view),
            view,
            filters: snapshot.filters(),
            starts_at: snapshot.starts_at(),
            has_all: !is_filtered && snapshot.stream.state.deleted_count.unwrap_or(0) == 0,
        }
    }
}
