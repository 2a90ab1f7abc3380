//! Whether a database belongs to a consumer. No SQL.
//!
//! The consumer's position is on the server, the ids of what was processed are here. If they do not belong together, orders are
//! lost or applied twice. So the daemon records its consumer at the first bind, before the first acknowledgement, and compares
//! the record at every bind.

use super::Mark;
use crate::config;
use crate::model::schemes::{FormerMessages, IdSchemes};
use crate::model::time::{seconds_text, unix_ns};
use crate::model::view::ConsumerView;

/// A consumer as the server shows it. It must be read before the database: what an ack floor has passed is then recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bind {
    pub stream: String,
    pub consumer: String,
    /// The ack floor.
    pub floor_stream_seq: u64,
    /// Above 0 once something was acknowledged. `floor_stream_seq` is not: it begins where the consumer starts to deliver.
    pub floor_consumer_seq: u64,
    pub stream_first_seq: u64,
    /// When the first message of the stream was published; `None` if the stream is empty.
    pub stream_first_ns: Option<i64>,
    /// When the stream last stored a message.
    pub stream_last_ns: i64,
    pub stream_created_ns: i64,
    pub delivered_stream_seq: u64,
}

/// How the clocks of the servers of a cluster may differ: a message may have an earlier published time than the message before.
const SERVER_SKEW_NS: i64 = 2_000_000_000;

/// The database accepts the bind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    pub schemes: IdSchemes,
    /// The settings are not those of the bind before: ids of new messages are made by another scheme from now on.
    pub is_changed: bool,
}

/// The record in a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Stream and consumer; `None` in a database that a former version wrote, until the next bind.
    pub to: Option<(String, String)>,
    /// Orders up to this stream sequence were processed without this database.
    pub not_ours_through: u64,
}

/// Why a consumer and a database do not belong together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unbound {
    #[error(
        "the database belongs to consumer {} on stream {}, not to consumer {consumer} on stream {stream}; correct \
         consumer.stream and consumer.name, or set database.url to the database of this consumer; if only the name of the \
         consumer has changed, run `order-processor adopt`",
        ours.1, ours.0
    )]
    Other { ours: (String, String), stream: String, consumer: String },
    #[error(
        "the database has no record of consumer {consumer} on stream {stream}, but the consumer has acknowledged orders up to \
         message {floor}; if another database has processed them, correct database.url or the working directory; if that database is \
         lost, restore a backup, or apply the orders again with `order-processor audit --repair`; if another program has processed \
         them, run `order-processor adopt`"
    )]
    Unknown { stream: String, consumer: String, floor: u64 },
    #[error(
        "the next message of consumer {consumer} on stream {stream} is {next}, but ids of messages below {below} from before \
         {before} are deleted, and these orders would be applied a second time; the stream was restored or the consumer was \
         reset; run `order-processor setup --recreate --start-seq {below}`, which lets the consumer start at message {below}"
    )]
    Pruned { stream: String, consumer: String, next: u64, below: u64, before: String },
}

impl Bind {
    pub fn of(names: &config::ConsumerNames, view: &ConsumerView) -> Self {
        Self {
            stream: names.stream.clone(),
            consumer: names.name.clone(),
            floor_stream_seq: view.ack_floor_stream_seq,
            floor_consumer_seq: view.ack_floor_consumer_seq,
            stream_first_seq: view.stream_first_seq,
            stream_first_ns: view.first_published_at.map(unix_ns),
            stream_last_ns: unix_ns(view.last_published_at),
            stream_created_ns: unix_ns(view.stream_created_at),
            delivered_stream_seq: view.delivered_stream_seq,
        }
    }

    /// Messages that were published before this are not in the stream.
    pub fn gone_before_ns(&self) -> i64 {
        self.stream_first_ns.unwrap_or_else(|| self.stream_created_ns.max(self.stream_last_ns))
    }

    /// The messages that may have been delivered before this bind. `known_seq`: the highest sequence of this stream in the database.
    pub fn former_messages(&self, known_seq: u64) -> FormerMessages {
        FormerMessages {
            through_seq: self.delivered_stream_seq.max(known_seq),
            through_ns: self.stream_last_ns.saturating_add(SERVER_SKEW_NS),
            gone_before_ns: self.gone_before_ns(),
        }
    }

    /// Compares the consumer with what a database has recorded.
    ///
    /// # Errors
    /// [`Unbound`]
    pub fn judge(&self, record: Option<&Binding>, marks: &[Mark]) -> Result<(), Unbound> {
        let (stream, consumer) = (self.stream.clone(), self.consumer.clone());
        match record {
            None if self.floor_consumer_seq > 0 => {
                return Err(Unbound::Unknown { stream, consumer, floor: self.floor_stream_seq });
            }
            Some(Binding { to: Some(ours), .. }) if *ours != (stream.clone(), consumer.clone()) => {
                return Err(Unbound::Other { ours: ours.clone(), stream, consumer });
            }
            Some(_) | None => {}
        }
        let next = self.stream_first_seq.max(self.floor_stream_seq + 1);
        let is_deleted = |mark: &&Mark| {
            next < mark.below_seq && self.stream_first_ns.is_some_and(|first_ns| first_ns < mark.before_ns)
        };
        match marks.iter().find(is_deleted) {
            Some(mark) => {
                let before = seconds_text(mark.before_ns);
                Err(Unbound::Pruned { stream, consumer, next, below: mark.below_seq, before })
            }
            None => Ok(()),
        }
    }

    /// The record after a bind.
    pub fn recorded(&self, former: Option<&Binding>) -> Binding {
        let to = Some((self.stream.clone(), self.consumer.clone()));
        Binding { to, not_ours_through: former.map_or(0, |former| former.not_ours_through) }
    }

    /// The record after an operator has said that the consumer belongs to this database. What the consumer has acknowledged was
    /// processed without it, unless the database is that of the same stream.
    pub fn adopted(&self, former: Option<&Binding>) -> Binding {
        let same_stream = |former: &&Binding| former.to.as_ref().is_none_or(|(stream, _)| *stream == self.stream);
        let not_ours_through =
            former.filter(same_stream).map_or(self.floor_stream_seq, |former| former.not_ours_through);
        Binding { to: Some((self.stream.clone(), self.consumer.clone())), not_ours_through }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(floor_stream_seq: u64, floor_consumer_seq: u64) -> Bind {
        Bind {
            stream: "ORDERS".into(),
            consumer: "op".into(),
            floor_stream_seq,
            floor_consumer_seq,
            stream_first_seq: 1,
            stream_first_ns: Some(1_000),
            stream_last_ns: 2_000,
            stream_created_ns: 1_000,
            delivered_stream_seq: floor_stream_seq,
        }
    }

    fn binding(stream: &str, consumer: &str) -> Binding {
        Binding { to: Some((stream.into(), consumer.into())), not_ours_through: 7 }
    }

    #[test]
    fn a_database_without_a_record_is_refused_once_something_is_acked() {
        assert_eq!(
            bind(721, 0).judge(None, &[]),
            Ok(()),
            "deliver policy new, or a stream that has lost its older messages"
        );
        let unknown = Unbound::Unknown { stream: "ORDERS".into(), consumer: "op".into(), floor: 721 };
        assert_eq!(bind(721, 1).judge(None, &[]), Err(unknown));
        let former = Binding { to: None, not_ours_through: 0 };
        assert_eq!(bind(721, 1).judge(Some(&former), &[]), Ok(()), "of a former version");
        assert_eq!(bind(721, 1).judge(Some(&binding("ORDERS", "op")), &[]), Ok(()));
    }

    #[test]
    fn a_database_of_another_stream_or_consumer_is_refused_whatever_the_floor() {
        for (stream, consumer) in [("ORDERS", "other"), ("other", "op")] {
            let refused = bind(0, 0).judge(Some(&binding(stream, consumer)), &[]);
            assert!(matches!(refused, Err(Unbound::Other { .. })), "{refused:?}");
        }
    }

    #[test]
    fn deleted_ids_refuse_a_bind_only_by_both_sequence_and_time() {
        let ours = binding("ORDERS", "op");
        let mark = |below_seq, before_ns| [Mark { below_seq, before_ns }];
        assert!(matches!(bind(9, 1).judge(Some(&ours), &mark(11, 1_001)), Err(Unbound::Pruned { next: 10, .. })));
        assert_eq!(bind(10, 1).judge(Some(&ours), &mark(11, 1_001)), Ok(()), "the floor is past them");
        assert_eq!(
            bind(9, 1).judge(Some(&ours), &mark(11, 1_000)),
            Ok(()),
            "they were published later: another stream"
        );
        let empty = Bind { stream_first_ns: None, ..bind(9, 1) };
        assert_eq!(empty.judge(Some(&ours), &mark(11, 1_001)), Ok(()));
    }

    #[test]
    fn only_what_another_database_has_processed_is_not_ours() {
        assert_eq!(bind(721, 5).adopted(None).not_ours_through, 721);
        assert_eq!(bind(721, 5).adopted(Some(&binding("other", "op"))).not_ours_through, 721);
        assert_eq!(bind(721, 5).adopted(Some(&binding("ORDERS", "former name"))).not_ours_through, 7);
    }
}
