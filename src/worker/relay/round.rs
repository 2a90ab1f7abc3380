//! One round: publish some rows in their order.

use std::collections::HashMap;

use super::RelayContext;
use crate::jetstream::outbox::Sent;
use crate::model::outbox::{OutboxMessage, OutboxTarget};
use crate::model::subject::SubjectPattern;
use crate::model::text::chain;

/// Subjects whose streams are remembered. More are asked for again.
const STREAMS_MAX: usize = 1_000;

pub(super) struct Round {
    pub(super) around: RelayContext,
    pub(super) messages: Vec<OutboxMessage>,
    pub(super) targets: HashMap<String, OutboxTarget>,
    /// The stream of each subject, as far as it is known.
    pub(super) streams: HashMap<String, String>,
    pub(super) seen_through: i64,
}

/// What came of a round.
#[derive(Default)]
pub struct Rounded {
    /// Rows whose messages the server has stored.
    pub(super) done: Vec<i64>,
    /// Where the other rows can be from now on.
    pub(super) targets: Vec<OutboxTarget>,
    pub(super) streams: HashMap<String, String>,
    /// Ids of messages that were published for the first time, and that the server took for duplicates.
    pub(super) duplicates: Vec<String>,
    /// Messages to the daemon's own consumer, and the subject of one of them.
    pub(super) own: (u64, Option<String>),
    /// Why the round ended before its last row.
    pub(super) trouble: Option<String>,
    /// A receipt did not come.
    pub(super) in_doubt: bool,
}

impl Round {
    pub(super) async fn run(mut self) -> Rounded {
        let mut rounded = Rounded::default();
        let ready = self.ready(&mut rounded).await;
        self.messages.truncate(ready);
        let sent = self.around.publisher.publish(&self.messages).await;
        let mut ends: HashMap<String, u64> = HashMap::new();
        for (message, sent) in self.messages.iter().zip(sent) {
            match sent {
                Sent::Stored { stream, sequence, duplicate } => {
                    rounded.done.push(message.row);
                    if duplicate && message.row > self.seen_through {
                        rounded.duplicates.push(message.id.clone());
                    }
                    if !duplicate {
                        let end = ends.entry(stream).or_default();
                        *end = sequence.max(*end);
                    }
                }
                Sent::Refused(why) => rounded.blame(message, &why),
                Sent::Unknown(why) => {
                    rounded.in_doubt = true;
                    rounded.blame(message, &why);
                }
            }
        }
        self.count_own(&mut rounded);
        if !rounded.in_doubt {
            self.advance(ends, &mut rounded).await;
        }
        rounded.streams = self.streams;
        rounded
    }

    /// How many of the first messages can be published: their streams exist, and the database has a place of each on record.
    async fn ready(&mut self, rounded: &mut Rounded) -> usize {
        for (index, message) in self.messages.iter().enumerate() {
            let stream = match self.streams.get(&message.subject) {
                Some(stream) => stream,
                None => match self.around.publisher.stream_of(&message.subject).await {
                    Ok(Some(stream)) => {
                        if self.streams.len() >= STREAMS_MAX {
                            self.streams.clear();
                        }
                        self.streams.entry(message.subject.clone()).or_insert(stream)
                    }
                    Ok(None) => {
                        rounded.blame(message, "no stream has the subject; create the stream");
                        return index;
                    }
                    Err(error) => {
                        rounded.blame(message, &chain(&error));
                        return index;
                    }
                },
            };
            if !self.targets.contains_key(stream) {
                match self.around.publisher.target(stream).await {
                    Ok(target) => rounded.targets.push(target),
                    Err(error) => rounded.blame(message, &chain(&error)),
                }
                return index;
            }
        }
        self.messages.len()
    }

    /// All rows that are left are published after what was stored now.
    async fn advance(&self, ends: HashMap<String, u64>, rounded: &mut Rounded) {
        for (stream, end) in ends {
            let Some(target) = self.targets.get(&stream) else { continue };
            if end > target.after_seq {
                rounded.targets.push(OutboxTarget { after_seq: end, ..target.clone() });
            } else if let Ok(target) = self.around.publisher.target(&stream).await {
                // Its sequences start again: the stream was recreated.
                rounded.targets.push(target);
            }
        }
    }

    fn count_own(&self, rounded: &mut Rounded) {
        let filters = self.around.own_filters.iter().filter_map(|filter| filter.parse::<SubjectPattern>().ok());
        let filters: Vec<SubjectPattern> = filters.collect();
        let is_own = |message: &&OutboxMessage| {
            self.streams.get(&message.subject) == Some(&self.around.own_stream)
                && filters.iter().any(|filter| filter.matches(&message.subject))
        };
        let mut own = self.messages.iter().filter(is_own);
        let first = own.next();
        rounded.own = (first.iter().len() as u64 + own.count() as u64, first.map(|message| message.subject.clone()));
    }
}

impl Rounded {
    /// The first trouble counts.
    fn blame(&mut self, message: &OutboxMessage, why: &str) {
        self.trouble.get_or_insert_with(|| format!("subject {}: {why}", message.subject));
    }
}
