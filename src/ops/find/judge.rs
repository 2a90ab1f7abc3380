//! The one table that decides what became of an order. Pure.

use super::server::ServerFacts;
use crate::config::{Config, OnConflict};
use crate::model::delivery::Delivery;
use crate::model::id::{Digest, IdScheme};
use crate::model::letter::{Closing, Envelope};
use crate::model::plan::Plan;
use crate::model::subject::SubjectPattern;
use crate::store::{Claim, IdRecord};
use crate::worker::message_ids;
use crate::worker::missing::{self, VerdictRules};

/// What became of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrderVerdict {
    /// `other_id`: the settings of now make another id than the one under which it was applied.
    Applied {
        other_id: Option<String>,
    },
    /// Applied from a dead letter. `applied_id`: the id of its row.
    Replayed {
        by: String,
        applied_id: String,
    },
    DeadLetter {
        reason: String,
        error: String,
    },
    Discarded {
        by: String,
    },
    /// Another order under a used id, which `inbox.on_conflict` acknowledges without effect.
    Dropped,
    /// Not an order, or no order for the handler.
    Ignored(&'static str),
    NotForTheConsumer,
    /// `attempt`: the one that runs or comes next.
    Retrying {
        attempt: u32,
        max_attempts: u32,
    },
    /// Delivered, and no outcome is recorded.
    Delivered,
    /// `before`: messages that are delivered first; at most so many if not `exact`.
    Waiting {
        before: u64,
        exact: bool,
    },
    /// Not published yet: a row of the outbox has this id.
    InOutbox {
        row: i64,
    },
    /// The server will not deliver it again, and it is in no table.
    Missing(&'static str),
    /// The same, but it may have been applied, or may not have been for this database.
    Undetermined(String),
    NotFound,
}

impl OrderVerdict {
    /// For scripts.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Applied { .. } => "applied",
            Self::Replayed { .. } => "replayed",
            Self::DeadLetter { .. } => "dead-letter",
            Self::Discarded { .. } => "discarded",
            Self::Dropped => "dropped",
            Self::Ignored(_) => "ignored",
            Self::NotForTheConsumer => "not-for-the-consumer",
            Self::Retrying { .. } => "retrying",
            Self::Delivered => "delivered",
            Self::Waiting { .. } => "waiting",
            Self::InOutbox { .. } => "in-outbox",
            Self::Missing(_) => "missing",
            Self::Undetermined(_) => "undetermined",
            Self::NotFound => "not-found",
        }
    }

    /// Whether the order was applied; `None` if that is not known.
    pub fn is_applied(&self) -> Option<bool> {
        match self {
            Self::Applied { .. } | Self::Replayed { .. } => Some(true),
            Self::Undetermined(_) | Self::NotFound => None,
            Self::DeadLetter { .. }
            | Self::Discarded { .. }
            | Self::Dropped
            | Self::Ignored(_)
            | Self::NotForTheConsumer
            | Self::Retrying { .. }
            | Self::Delivered
            | Self::Waiting { .. }
            | Self::InOutbox { .. }
            | Self::Missing(_) => Some(false),
        }
    }

    /// Whether the daemon has still to do something for it.
    pub fn is_pending(&self) -> bool {
        matches!(self, Self::Retrying { .. } | Self::Delivered | Self::Waiting { .. } | Self::InOutbox { .. })
    }
}

/// The daemon on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DaemonState {
    Runs {
        ready: bool,
        health: String,
    },
    /// By whom, and since when.
    Paused(String),
    /// The address at which no daemon answers.
    Stopped(String),
    Unknown,
}

/// All that was learned about one order.
#[derive(Debug)]
pub struct OrderFacts {
    pub stream: String,
    pub id: Option<String>,
    pub seq: Option<u64>,
    /// Of the message that is meant. Without it, all messages under the id are meant.
    pub digest: Option<Digest>,
    pub record: IdRecord,
    /// As the stream stores it.
    pub message: Option<Delivery>,
    /// The stream does not have the message.
    pub is_gone: bool,
    /// All messages of the stream were read, and none has the id.
    pub was_scanned: bool,
    /// What the tables have about the message under another id.
    pub other_id: Option<(String, IdRecord)>,
    /// For a message at or below the ack floor that is in no table.
    pub rules: Option<VerdictRules>,
    pub not_ours_through: u64,
    /// The database belongs to another consumer.
    pub is_unbound: bool,
    pub server: Option<ServerFacts>,
    pub daemon: DaemonState,
    pub notes: Vec<String>,
    /// Sources that were not asked or did not answer, and why.
    pub not_asked: Vec<String>,
    pub max_attempts: u32,
    /// How new messages get their ids.
    pub scheme: IdScheme,
    on_conflict: OnConflict,
}

impl OrderFacts {
    pub fn of(config: &Config, id: Option<String>, seq: Option<u64>) -> Self {
        Self {
            stream: config.consumer.stream.clone(),
            id,
            seq,
            digest: None,
            record: IdRecord::default(),
            message: None,
            is_gone: false,
            was_scanned: false,
            other_id: None,
            rules: None,
            not_ours_through: 0,
            is_unbound: false,
            server: None,
            daemon: DaemonState::Unknown,
            notes: Vec::new(),
            not_asked: Vec::new(),
            max_attempts: config.retry.max_attempts,
            scheme: message_ids::wanted(config).scheme,
            on_conflict: config.inbox.on_conflict,
        }
    }

    /// This message is meant.
    pub fn take_message(&mut self, message: Delivery) {
        self.take_id(message.id.to_string(), message.digest);
        self.seq = Some(message.raw.position.stream_seq);
        self.message = Some(message);
    }

    /// The message with this id and this digest is meant.
    pub fn take_id(&mut self, id: String, digest: Digest) {
        self.id = Some(id);
        self.digest = Some(digest);
    }

    /// Whether a table has an outcome.
    pub fn is_decided(&self) -> bool {
        self.of_tables(&self.record).is_some()
    }

    /// Sequence and digest of the message that the verdict is about, by the tables.
    pub fn recorded_message(&self) -> Option<(u64, Digest)> {
        let processed = self.record.processed.as_ref().filter(|row| self.means(row.digest));
        let letter = self.letter(|letter| letter.closed.is_none());
        let of_letter = |letter: &Envelope| (letter.stream_seq, letter.digest);
        letter
            .map(of_letter)
            .or_else(|| processed.map(|row| (row.stream_seq, row.digest)))
            .or_else(|| self.letter(|_| true).map(of_letter))
    }

    fn means(&self, digest: Digest) -> bool {
        self.digest.is_none_or(|meant| meant == digest)
    }

    /// The newest dead letter of the order.
    fn letter(&self, is_it: impl Fn(&Envelope) -> bool) -> Option<&Envelope> {
        self.record.letters.iter().rfind(|letter| self.means(letter.digest) && is_it(letter))
    }

    /// What the tables say. An open dead letter comes first: somebody must still decide about it, although another order may have
    /// been applied under its id.
    fn of_tables(&self, record: &IdRecord) -> Option<OrderVerdict> {
        let of_order = |letter: &&Envelope| self.means(letter.digest);
        let letters = record.letters.iter().filter(of_order);
        if let Some(letter) = letters.clone().rfind(|letter| letter.closed.is_none()) {
            return Some(OrderVerdict::DeadLetter { reason: letter.reason.clone(), error: letter.error.clone() });
        }
        let closed = letters.filter_map(|letter| letter.closed.as_ref().map(|closed| (letter, closed)));
        let processed = record.processed.as_ref();
        let replayed = closed.clone().rfind(|(_, closed)| closed.closing == Closing::Replayed);
        match (processed.filter(|row| self.means(row.digest)), replayed) {
            // The order itself was applied, unless only another one has its id and the letter was given a new one.
            (row, Some((letter, closed))) if row.is_none_or(|row| row.digest == letter.digest) => {
                let applied_id = closed.applied_id.clone().unwrap_or_else(|| letter.id.clone());
                return Some(OrderVerdict::Replayed { by: closed.by.clone(), applied_id });
            }
            (Some(_), _) => return Some(OrderVerdict::Applied { other_id: None }),
            (None, _) => {}
        }
        closed.last().map(|(_, closed)| OrderVerdict::Discarded { by: closed.by.clone() })
    }
}

pub fn judge(facts: &OrderFacts) -> OrderVerdict {
    if let Some(verdict) = facts.of_tables(&facts.record) {
        return match (&verdict, &facts.message) {
            (OrderVerdict::Applied { .. }, Some(message)) if message.plan == Plan::Ignore => {
                OrderVerdict::Ignored("a route of the handler ignores it")
            }
            _ => verdict,
        };
    }
    if let Some(verdict) = facts.server.as_ref().and_then(|server| settled(facts, server)) {
        return verdict;
    }
    if let Some(attempts) = &facts.record.attempts {
        let attempt = attempts.attempts.failed.saturating_add(1).min(facts.max_attempts);
        return OrderVerdict::Retrying { attempt, max_attempts: facts.max_attempts };
    }
    match (&facts.server, &facts.message) {
        (Some(server), Some(message)) => unsettled(server, message),
        (None, _) | (_, None) => {
            let waits = |row: &&crate::store::OutboxHead| facts.id.as_ref().is_some_and(|id| *id == row.id);
            facts
                .record
                .outbox
                .iter()
                .find(waits)
                .map_or(OrderVerdict::NotFound, |row| OrderVerdict::InOutbox { row: row.row })
        }
    }
}

/// A message that is not for the consumer, or that the server will not deliver again, and that is in no table.
fn settled(facts: &OrderFacts, server: &ServerFacts) -> Option<OrderVerdict> {
    let message = facts.message.as_ref()?;
    let position = message.raw.position;
    let is_wanted =
        |filter: &String| filter.parse::<SubjectPattern>().is_ok_and(|pattern| pattern.matches(&message.raw.subject));
    let starts_at = server.starts_at;
    if position.stream_seq < starts_at.seq
        || position.published_ns < starts_at.ns
        || !server.filters.iter().any(is_wanted)
    {
        return Some(OrderVerdict::NotForTheConsumer);
    }
    if position.stream_seq > server.settled {
        return None;
    }
    if let Some(ignored) = message.ignored {
        return Some(OrderVerdict::Ignored(ignored.name()));
    }
    if let Some((id, record)) = &facts.other_id
        && let Some(verdict) = facts.of_tables(record)
    {
        return Some(match verdict {
            OrderVerdict::Applied { .. } => OrderVerdict::Applied { other_id: Some(id.clone()) },
            other => other,
        });
    }
    if facts.is_unbound {
        return Some(OrderVerdict::Undetermined("the database belongs to another consumer".to_owned()));
    }
    if position.stream_seq <= facts.not_ours_through {
        return Some(OrderVerdict::Undetermined(format!(
            "another program had processed the orders up to message {} when this database was adopted",
            facts.not_ours_through
        )));
    }
    let claim = facts.record.processed.as_ref().map_or(Claim::New, |row| Claim::Processed(row.digest));
    Some(match facts.rules.as_ref()?.verdict(message, claim) {
        missing::Verdict::NotForTheConsumer => OrderVerdict::NotForTheConsumer,
        missing::Verdict::Undetermined(why) => OrderVerdict::Undetermined(why.to_owned()),
        missing::Verdict::Missing(why) => OrderVerdict::Missing(why),
        missing::Verdict::Processed if facts.on_conflict == OnConflict::Duplicate => OrderVerdict::Dropped,
        // Only of rows that were found before.
        missing::Verdict::Processed | missing::Verdict::DeadLetter => return None,
    })
}

/// A message above the ack floor without an outcome and without a failed attempt.
fn unsettled(server: &ServerFacts, message: &Delivery) -> OrderVerdict {
    let (seq, delivered) = (message.raw.position.stream_seq, server.view.delivered_stream_seq);
    if seq <= delivered {
        return OrderVerdict::Delivered;
    }
    let before = (seq - delivered - 1).min(server.view.num_pending.saturating_sub(1));
    OrderVerdict::Waiting { before, exact: server.has_all }
}
