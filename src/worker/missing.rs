//! The one table that decides whether a message is missing: what the database knows of it, its age, and the settings. The daemon's
//! own audit and the command `audit` both use it. Pure.

use crate::config::OnConflict;
use crate::model::delivery::Delivery;
use crate::store::Claim;

/// What may be judged.
#[derive(Clone, Copy, Debug)]
pub struct VerdictRules {
    /// Messages published before this were never for the consumer.
    pub start_ns: i64,
    /// The database may have deleted the id of a processed message that was published before this.
    pub pruned_before_ns: i64,
    /// Messages up to this sequence were delivered, if at all, under another filter of the consumer. Some of them were never for
    /// the consumer.
    pub other_filter_through: u64,
    pub on_conflict: OnConflict,
}

/// What one message at or below the ack floor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    NotForTheConsumer,
    Processed,
    DeadLetter,
    /// The message is in no table, but it may not have to be.
    Undetermined(&'static str),
    Missing(&'static str),
}

impl VerdictRules {
    pub fn verdict(&self, delivery: &Delivery, claim: Claim) -> Verdict {
        let position = delivery.raw.position;
        let why = match claim {
            _ if position.published_ns < self.start_ns => return Verdict::NotForTheConsumer,
            Claim::Processed(digest) if digest == delivery.digest => return Verdict::Processed,
            Claim::Processed(_) => match self.on_conflict {
                OnConflict::Duplicate => return Verdict::Processed,
                OnConflict::DeadLetter => "another message was processed under its id",
            },
            Claim::Dead => return Verdict::DeadLetter,
            // No table has a row for a message that is not an order.
            Claim::New if delivery.ignored.is_some() => return Verdict::NotForTheConsumer,
            Claim::New if position.published_ns < self.pruned_before_ns => {
                return Verdict::Undetermined("it is older than inbox.retention");
            }
            Claim::New => "neither processed nor a dead letter",
        };
        if position.stream_seq <= self.other_filter_through {
            return Verdict::Undetermined("the consumer had another filter when it passed the message");
        }
        Verdict::Missing(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::delivery::{Headers, Position, Raw};
    use crate::model::id::{Digest, IdScheme, UniqueIn};
    use crate::model::outcome::Ignored;

    #[test]
    fn each_row_of_the_table() {
        let rules = VerdictRules {
            start_ns: 10,
            pruned_before_ns: 20,
            other_filter_through: 5,
            on_conflict: OnConflict::DeadLetter,
        };
        let lenient = VerdictRules { on_conflict: OnConflict::Duplicate, ..rules };
        let delivery = |stream_seq, published_ns| {
            let position = Position { delivered: 1, stream_seq, consumer_seq: 0, published_ns };
            let (subject, headers, payload) = ("ORDERS.new".into(), Headers::new(), "order".into());
            let scheme = IdScheme { stream: "ORDERS".to_owned(), pointer: None, unique_in: UniqueIn::Subject };
            Delivery::new(Raw { subject, headers, payload, position, unreadable: None }, &scheme.into())
        };
        let marker = Delivery { ignored: Some(Ignored::DeleteMarker), ..delivery(6, 30) };
        let other = Claim::Processed(Digest([0; 16]));
        let same = |delivery: &Delivery| Claim::Processed(delivery.digest);
        let missing = |verdict| matches!(verdict, Verdict::Missing(_));
        let undetermined = |verdict| matches!(verdict, Verdict::Undetermined(_));

        let fresh = delivery(6, 30);
        assert_eq!(rules.verdict(&delivery(6, 9), Claim::New), Verdict::NotForTheConsumer);
        assert_eq!(rules.verdict(&fresh, same(&fresh)), Verdict::Processed);
        assert_eq!(rules.verdict(&fresh, Claim::Dead), Verdict::DeadLetter);
        assert_eq!(rules.verdict(&marker, Claim::New), Verdict::NotForTheConsumer);
        assert!(missing(rules.verdict(&fresh, Claim::New)));
        assert!(missing(rules.verdict(&fresh, other)));
        assert_eq!(lenient.verdict(&fresh, other), Verdict::Processed);
        assert!(undetermined(rules.verdict(&delivery(6, 19), Claim::New)), "its id may be pruned");
        assert!(undetermined(rules.verdict(&delivery(5, 30), Claim::New)), "passed under another filter");
        assert!(undetermined(rules.verdict(&delivery(5, 30), other)));
    }
}
