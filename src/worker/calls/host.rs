//! Whether a host is away, and whether a failed call is the fault of its order. All of this policy stands here. No I/O.
//!
//! A host works until a call is not sent, until a call is not answered and no other order shows that the host works, or until several
//! different orders in a row had no success. From then on it is away: its orders are held, and nothing that happens to them counts.
//! One probe at a time goes out, each with another order. The first success ends this.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::handler::{Answer, Failure};
use crate::model::text::{chain, first_line};
use crate::model::time::{doubled, seconds_text, unix_ns};

/// So many different orders in a row without a success make a host away.
const FAILURES_MAX: usize = 5;
/// The same if all the answers were permanent. They may be right, so it takes more of them.
const PERMANENT_MAX: usize = 20;
const PROBE_MIN: Duration = Duration::from_secs(1);
const PROBE_MAX: Duration = Duration::from_secs(30);
/// Failed orders whose last call is remembered. With more, all are forgotten, and their next failure is judged as their first.
const EARLIER_MAX: usize = 20_000;

/// What is known of one host.
pub(super) struct Host {
    pub name: Arc<str>,
    /// How many calls had a success. An order that failed had none, so each of them is one of another order.
    successes: u64,
    /// The orders that failed since the last success.
    in_a_row: HashSet<Arc<str>>,
    all_permanent: bool,
    /// `successes` at the end of the last call of each order that failed.
    earlier: HashMap<Arc<str>, u64>,
    away: Option<Away>,
}

struct Away {
    since: SystemTime,
    /// Nothing that the endpoint wrote.
    cause: String,
    /// Probes that failed.
    probes: u32,
    next_probe: Instant,
    is_probing: bool,
}

/// A call that was begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    successes: u64,
    is_probe: bool,
}

/// What the end of a call means.
#[derive(Debug)]
pub(super) enum Judged {
    /// The order has an answer, or the failure is its own.
    Counts(Result<Answer, Failure>),
    /// The host is away. The order waits, as if there had been no call.
    Held,
}

impl Host {
    pub fn new(name: Arc<str>) -> Self {
        let (in_a_row, earlier) = (HashSet::new(), HashMap::new());
        Self { name, successes: 0, in_a_row, all_permanent: true, earlier, away: None }
    }

    /// Why the host is away and since when, if it is.
    pub fn away(&self) -> Option<String> {
        let away = self.away.as_ref()?;
        let since = seconds_text(unix_ns(away.since));
        let name = if self.name.is_empty() { String::new() } else { format!("{} is away: ", self.name) };
        Some(format!("{name}{}, since {since}", away.cause))
    }

    /// Begins a call, if one may be begun now.
    pub fn begin(&mut self, now: Instant) -> Option<Begun> {
        let is_probe = self.away.is_some();
        if let Some(away) = &mut self.away {
            if away.is_probing || now < away.next_probe {
                return None;
            }
            away.is_probing = true;
        }
        Some(Begun { successes: self.successes, is_probe })
    }

    /// A call had a success. Whether this ended an absence.
    pub fn succeeded(&mut self, id: &Arc<str>) -> bool {
        self.successes += 1;
        self.in_a_row.clear();
        self.all_permanent = true;
        self.earlier.remove(id);
        self.away.take().is_some()
    }

    /// A call failed.
    pub fn failed(&mut self, id: &Arc<str>, begun: Begun, failure: Failure, now: Instant) -> Judged {
        let before = self.remember(id).unwrap_or(begun.successes);
        let others_succeed = self.successes > before;
        if self.away.is_some() {
            self.still_away(begun, &failure, now);
            return Judged::Held;
        }
        match failure {
            Failure::Unanswered { cause, .. } if others_succeed => self.count(id, Failure::Retry(cause), now),
            Failure::Unanswered { cause, retry_after } => self.go_away(first_line(&cause), retry_after, now),
            Failure::Away(cause) => self.go_away(first_line(&cause), None, now),
            Failure::Store(error) if !error.is_about_data() => self.go_away(&chain(&error), None, now),
            Failure::At { failure, .. } => self.failed(id, begun, *failure, now),
            counts @ (Failure::Retry(_) | Failure::Permanent(_) | Failure::Store(_)) => self.count(id, counts, now),
        }
    }

    /// `successes` at the end of the last failed call of this order, before this one.
    fn remember(&mut self, id: &Arc<str>) -> Option<u64> {
        if self.earlier.len() >= EARLIER_MAX {
            self.earlier.clear();
        }
        self.earlier.insert(id.clone(), self.successes)
    }

    fn count(&mut self, id: &Arc<str>, failure: Failure, now: Instant) -> Judged {
        self.all_permanent &= matches!(failure, Failure::Permanent(_));
        self.in_a_row.insert(id.clone());
        let most = if self.all_permanent { PERMANENT_MAX } else { FAILURES_MAX };
        let orders = self.in_a_row.len();
        if orders >= most {
            let last = failure.to_string();
            let cause = format!("{orders} different orders in a row had no success, the last: {}", first_line(&last));
            self.go_away(&cause, None, now);
        }
        Judged::Counts(Err(failure))
    }

    fn go_away(&mut self, cause: &str, retry_after: Option<Duration>, now: Instant) -> Judged {
        self.away = Some(Away {
            since: SystemTime::now(),
            cause: cause.to_owned(),
            probes: 0,
            next_probe: now + retry_after.unwrap_or(PROBE_MIN),
            is_probing: false,
        });
        Judged::Held
    }

    fn still_away(&mut self, begun: Begun, failure: &Failure, now: Instant) {
        let Some(away) = &mut self.away else { return };
        let retry_after = match failure {
            Failure::Unanswered { retry_after, .. } => retry_after.map(|wait| now + wait),
            Failure::Retry(_) | Failure::Permanent(_) | Failure::Away(_) | Failure::Store(_) | Failure::At { .. } => {
                None
            }
        };
        if begun.is_probe {
            away.is_probing = false;
            away.probes = away.probes.saturating_add(1);
            away.cause = first_line(&failure.to_string()).to_owned();
            away.next_probe = retry_after.unwrap_or(now + doubled(PROBE_MIN, away.probes, PROBE_MAX));
        } else {
            // A call that was under way when the host went away.
            away.next_probe = retry_after.map_or(away.next_probe, |at| away.next_probe.max(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bench {
        host: Host,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            Self { host: Host::new("http://shop:80".into()), now: Instant::now() }
        }

        fn begin(&mut self) -> Begun {
            self.host.begin(self.now).expect("a call may begin")
        }

        fn fail(&mut self, order: u32, failure: Failure) -> Judged {
            let begun = self.begin();
            self.end(order, begun, failure)
        }

        fn end(&mut self, order: u32, begun: Begun, failure: Failure) -> Judged {
            self.host.failed(&id(order), begun, failure, self.now)
        }

        /// Seconds until the next call may begin.
        fn wait(&self) -> u64 {
            self.host.away.as_ref().map_or(0, |away| (away.next_probe - self.now).as_secs())
        }
    }

    fn id(order: u32) -> Arc<str> {
        format!("o-{order}").into()
    }

    fn timeout() -> Failure {
        Failure::Unanswered { cause: "no answer".to_owned(), retry_after: None }
    }

    fn busy(seconds: u64) -> Failure {
        Failure::Unanswered { cause: "HTTP 503".to_owned(), retry_after: Some(Duration::from_secs(seconds)) }
    }

    fn retry() -> Failure {
        Failure::Retry("HTTP 500\nsecret".to_owned())
    }

    fn permanent() -> Failure {
        Failure::Permanent("HTTP 400".to_owned())
    }

    #[test]
    fn a_request_that_was_not_sent_makes_the_host_away_whatever_others_do() {
        let mut bench = Bench::new();
        let begun = bench.begin();
        bench.host.succeeded(&id(1));
        assert!(matches!(bench.end(2, begun, Failure::Away("refused".to_owned())), Judged::Held));
        let away = bench.host.away().unwrap();
        assert!(away.starts_with("http://shop:80 is away: refused, since 20"), "{away}");
    }

    #[test]
    fn no_answer_counts_only_if_another_order_had_a_success_meanwhile() {
        let mut bench = Bench::new();
        bench.host.succeeded(&id(1));
        assert!(matches!(bench.fail(2, timeout()), Judged::Held), "that success was before the call");
        bench.now += PROBE_MIN;
        let probe = bench.begin();
        assert!(bench.host.succeeded(&id(3)), "the absence ends");
        assert!(matches!(bench.end(3, probe, retry()), Judged::Counts(_)));
        assert!(
            matches!(bench.fail(2, timeout()), Judged::Counts(Err(Failure::Retry(_)))),
            "another order had a success since its previous call"
        );
        let begun = bench.begin();
        bench.host.succeeded(&id(4));
        assert!(matches!(bench.end(5, begun, busy(9)), Judged::Counts(Err(Failure::Retry(_)))), "during the call");
    }

    #[test]
    fn five_different_orders_in_a_row_make_the_host_away_and_one_order_never() {
        let mut bench = Bench::new();
        for _ in 0..50 {
            assert!(matches!(bench.fail(1, retry()), Judged::Counts(_)));
        }
        for order in 2..=5 {
            assert!(bench.host.away().is_none());
            assert!(matches!(bench.fail(order, retry()), Judged::Counts(_)));
        }
        let away = bench.host.away().unwrap();
        assert!(away.contains("5 different orders in a row had no success, the last: HTTP 500"), "{away}");
        assert!(!away.contains("secret"));
    }

    #[test]
    fn a_success_between_begins_the_row_again() {
        let mut bench = Bench::new();
        for order in 0..100 {
            bench.fail(order, retry());
            if order % 4 == 3 {
                bench.host.succeeded(&id(1000));
            }
        }
        assert!(bench.host.away().is_none());
    }

    #[test]
    fn twenty_permanent_answers_in_a_row_make_the_host_away() {
        let mut bench = Bench::new();
        for order in 1..=20 {
            assert!(bench.host.away().is_none(), "{order}");
            assert!(matches!(bench.fail(order, permanent()), Judged::Counts(Err(Failure::Permanent(_)))));
        }
        assert!(bench.host.away().is_some());
        let mut bench = Bench::new();
        (1..=10).for_each(|order| drop(bench.fail(order, permanent())));
        bench.fail(11, retry());
        assert!(bench.host.away().is_some());
    }

    #[test]
    fn while_a_host_is_away_nothing_counts_and_one_probe_at_a_time_goes_out() {
        let mut bench = Bench::new();
        let (first, second) = (bench.begin(), bench.begin());
        bench.end(1, first, timeout());
        assert!(bench.host.begin(bench.now).is_none(), "not yet");
        assert!(matches!(bench.end(2, second, permanent()), Judged::Held), "it was under way");
        let mut waits = Vec::new();
        for order in 0..8 {
            bench.now += Duration::from_secs(bench.wait());
            let probe = bench.begin();
            assert!(bench.host.begin(bench.now + PROBE_MAX).is_none(), "one at a time");
            assert!(matches!(bench.end(order, probe, permanent()), Judged::Held));
            waits.push(bench.wait());
        }
        assert_eq!(waits, [2, 4, 8, 16, 30, 30, 30, 30]);
        assert!(bench.host.succeeded(&id(1)));
        assert!(!bench.host.succeeded(&id(2)));
        assert!(bench.host.begin(bench.now).is_some());
    }

    #[test]
    fn retry_after_sets_the_time_of_the_next_probe_for_all() {
        let mut bench = Bench::new();
        let (first, second, third) = (bench.begin(), bench.begin(), bench.begin());
        bench.end(1, first, busy(7));
        assert_eq!(bench.wait(), 7);
        bench.end(2, second, busy(3));
        assert_eq!(bench.wait(), 7, "the longest of those that were under way");
        bench.end(3, third, busy(9));
        assert_eq!(bench.wait(), 9);
        bench.now += Duration::from_secs(9);
        bench.fail(4, busy(3600));
        assert_eq!(bench.wait(), 3600);
    }
}
