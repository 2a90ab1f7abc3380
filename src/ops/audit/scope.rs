//! Which messages an audit checks, and which it cannot.

use std::sync::Arc;
use std::time::SystemTime;

use super::AuditError;
use crate::config::Config;
use crate::jetstream;
use crate::jetstream::connection::CommandClient;
use crate::jetstream::gate;
use crate::jetstream::look::{Snapshot, StartsAt, look_for_command};
use crate::model::time::{seconds_text, unix_ns};
use crate::store::AuditMark;
use crate::worker::audit::pass::{other_filter_through, settled};
use crate::worker::missing::VerdictRules;
use crate::worker::retention::pruned_before;

/// Which messages are checked.
pub struct Scope {
    pub from: u64,
    pub to: u64,
    pub rules: VerdictRules,
    pub notes: Vec<String>,
}

impl Scope {
    pub fn of(
        config: &Config,
        found: &Snapshot,
        from: u64,
        oldest_processed_at: Option<i64>,
        mark: Option<&AuditMark>,
    ) -> Self {
        let stream = &found.stream;
        let (first, last) = (stream.state.first_sequence, stream.state.last_sequence);
        let floor = settled(&found.view());
        let mut notes = Vec::new();
        let StartsAt { seq: start_seq, ns: start_ns } = found.starts_at();
        if start_seq > 1 || start_ns > 0 {
            let start = if start_ns > 0 { seconds_text(start_ns) } else { format!("message {start_seq}") };
            notes.push(format!("the consumer starts at {start}; older messages were never for it and are not checked"));
        }
        notes.extend(gate::unauditable(stream));
        let wanted = start_seq.max(from).max(1);
        if floor > last {
            notes.push(format!(
                "the ack floor {floor} is beyond the last message {last}: the server lost its newest messages"
            ));
        }
        let to = floor.min(last);
        if wanted < first && wanted <= floor {
            let gone = floor.min(first - 1);
            notes.push(format!("messages {wanted} to {gone} are no longer in the stream and cannot be checked"));
        }
        // A stream that was restored from a snapshot has a new creation time, but its first message is as old as before.
        let began = if last > 0 { stream.state.first_timestamp } else { stream.created };
        let began_ns = unix_ns(began.into());
        if first <= 1 && oldest_processed_at.is_some_and(|at| at < began_ns) {
            notes.push(format!(
                "the database has orders from before {}, when this stream began; the messages of a former stream cannot be checked",
                seconds_text(began_ns)
            ));
        }
        let other_filter_through = other_filter_through(mark, &found.filters(), last);
        if other_filter_through > 0 {
            notes.push(format!(
                "the consumer had another filter up to message {other_filter_through}; messages up to there that are in no table \
                 may never have been for it: they cannot be determined and are never repaired"
            ));
        }
        let rules = VerdictRules {
            start_ns,
            pruned_before_ns: pruned_before(config.inbox.retention, oldest_processed_at, unix_ns(SystemTime::now())),
            other_filter_through,
            on_conflict: config.inbox.on_conflict,
        };
        let from = wanted.max(first);
        if from > to {
            notes.push(format!("nothing to check: the ack floor is {floor}, and the first message to check is {from}"));
        }
        Self { from, to, rules, notes }
    }

    pub fn is_empty(&self) -> bool {
        self.from > self.to
    }
}

/// The stream that is audited.
pub struct AuditedStream {
    pub config: Arc<Config>,
    pub visit: CommandClient,
    pub created_ns: i64,
}

impl AuditedStream {
    /// Its first sequence now; `None` if the server does not answer. An error if the stream is another one, or gone: `next` is
    /// not checked yet.
    pub async fn first_sequence(&self, next: u64) -> Result<Option<u64>, AuditError> {
        match look_for_command(&self.visit, &self.config.consumer).await {
            Ok(found) if unix_ns(found.stream.created.into()) == self.created_ns => {
                Ok(Some(found.stream.state.first_sequence))
            }
            Ok(_) | Err(jetstream::Error::NoStream { .. }) => Err(AuditError::OtherStream { next }),
            Err(_) => Ok(None),
        }
    }
}
