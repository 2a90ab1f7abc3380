//! Which ids may be deleted: ids are kept as long as the server may redeliver their messages. Pure.

use std::time::{Duration, SystemTime};

use crate::config::Retention;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::{Gone, Prunable};

/// `inbox.retention = "auto"` keeps ids at least this long: publishers repeat messages without the server's help.
pub const RETENTION_MIN: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// How far the clocks of a server cluster and of this machine may be apart: a message may be stored with an earlier time than the
/// message before it.
const SKEW_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The ids that may be deleted now. An id whose message the stream still has is never one of them: the server can deliver the
/// message again, for example after a reset of the consumer.
pub fn prunable(retention: Retention, view: Option<&ConsumerView>) -> Prunable {
    // The earlier one of our clock and the stream's: a clock that jumps ahead must not make an id look old.
    let last_published_at = view.map_or(SystemTime::UNIX_EPOCH, |view| view.last_published_at);
    let now = SystemTime::now().min(last_published_at);
    let before = |time: SystemTime, age| time.checked_sub(age).map_or(0, unix_ns);
    match (retention, view) {
        (Retention::For(age), _) => Prunable { before_ns: before(now, age), gone: None },
        (Retention::Auto, None) => Prunable { before_ns: 0, gone: None },
        (Retention::Auto, Some(view)) => {
            let gone = Gone {
                below_seq: view.stream_first_seq,
                published_before_ns: unix_ns(view.first_published_at.unwrap_or(last_published_at)),
                processed_before_ns: view.first_published_at.map_or(0, |first| before(first.min(now), SKEW_MAX)),
            };
            Prunable { before_ns: before(now, RETENTION_MIN), gone: Some(gone) }
        }
    }
}

/// The database has the id of every processed message that was published at or after this time.
pub fn pruned_before(retention: Retention, oldest_processed_at: Option<i64>, now_ns: i64) -> i64 {
    match retention {
        // An id is kept while the stream holds its message.
        Retention::Auto => 0,
        // Ids are deleted in the order of their commits, and none that is younger than this.
        Retention::For(age) => {
            let kept_since = now_ns.saturating_sub(i64::try_from(age.as_nanos()).unwrap_or(i64::MAX));
            oldest_processed_at.map_or(kept_since, |oldest| oldest.min(kept_since))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_with_a_fixed_retention_an_old_id_may_be_deleted_before_its_message() {
        const SECOND: i64 = 1_000_000_000;
        let kept = Retention::For(Duration::from_secs(10));
        assert_eq!(pruned_before(Retention::Auto, Some(SECOND), 100 * SECOND), 0);
        assert_eq!(pruned_before(kept, Some(50 * SECOND), 100 * SECOND), 50 * SECOND, "nothing as young was pruned");
        assert_eq!(pruned_before(kept, Some(95 * SECOND), 100 * SECOND), 90 * SECOND, "too young to be pruned");
        assert_eq!(pruned_before(kept, None, 100 * SECOND), 90 * SECOND, "all may have been pruned");
    }
}
