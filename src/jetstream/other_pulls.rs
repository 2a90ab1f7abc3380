//! Other clients that pull from the consumer. Each client gets a part of the orders. With a SQLite database, each of two daemons
//! then knows only its own part. Pure; `run`, `status` and `check` share the rule and the text.

use std::time::{Duration, Instant};

/// Pulls of a lost connection stay open on the server for this long.
const LINGER: Duration = Duration::from_secs(20);

/// Follows from look to look whether the server holds more pulls than ours.
#[derive(Debug, Default)]
pub struct OtherPulls {
    since: Option<Instant>,
}

impl OtherPulls {
    /// How many pulls belong to other clients; 0 before that is certain.
    pub fn observe(&mut self, num_waiting: u64, own: u64, ack_wait: Duration, now: Instant) -> u64 {
        let others = num_waiting.saturating_sub(own);
        if others == 0 {
            self.since = None;
            return 0;
        }
        let since = *self.since.get_or_insert(now);
        if now.duration_since(since) > ack_wait.max(LINGER) { others } else { 0 }
    }
}

/// What the operator must know about `others` pulls; nothing if there are none.
pub fn warning(consumer: &str, others: u64) -> Option<String> {
    (others > 0).then(|| {
        format!(
            "another client pulls from consumer {consumer} ({others} open pulls are not from this daemon): each client gets a part \
             of the orders, and a second daemon with its own database applies its part there; stop the other client, or give it \
             another consumer"
        )
    })
}

/// The same for a command, which asks once and cannot wait. `daemon`: what the daemon of this machine has counted, if it runs.
pub fn warning_of_a_command(consumer: &str, num_waiting: u64, daemon: Option<u64>) -> Option<String> {
    match daemon {
        Some(others) => warning(consumer, others),
        None => (num_waiting > 0).then(|| {
            format!(
                "{num_waiting} pulls are open on consumer {consumer}, and no daemon answers on this machine: if they are from a \
                 daemon with another database, do not start a daemon here, because each gets a part of the orders"
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pulls_that_stay_longer_than_dead_ones_count() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let wait = Duration::from_secs(30);
        let mut pulls = OtherPulls::default();
        assert_eq!(pulls.observe(2, 2, wait, at(0)), 0, "they are ours");
        assert_eq!(pulls.observe(3, 1, wait, at(10)), 0, "they may be dead");
        assert_eq!(pulls.observe(3, 1, wait, at(40)), 0);
        assert_eq!(pulls.observe(3, 1, wait, at(41)), 2);
        assert_eq!(pulls.observe(1, 1, wait, at(50)), 0, "they are gone");
        assert_eq!(pulls.observe(2, 1, wait, at(60)), 0, "and the time begins again");
        assert_eq!(pulls.observe(2, 1, Duration::from_secs(1), at(79)), 0, "dead pulls outlast a short ack_wait");
        assert_eq!(pulls.observe(2, 1, Duration::from_secs(1), at(81)), 1);
    }
}
