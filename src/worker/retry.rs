//! When a failed message gets another attempt, and how long that waits. Pure.

use std::time::Duration;

use crate::config;
use crate::handler::Failure;
use crate::model::outcome::Reason;
use crate::model::time::doubled;

/// The delay of a retry when parked messages fill `max_ack_pending`.
const CROWDED_DELAY: Duration = Duration::from_secs(1);
/// The share by which a delay may be shorter or longer.
const JITTER: f64 = 0.2;

/// `retry.*` of the settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Failed runs after which a message is a dead letter.
    pub max_attempts: u32,
    pub min_delay: Duration,
    pub max_delay: Duration,
}

/// What a failure leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    Again(Duration),
    DeadLetter(Reason),
}

impl From<&config::Retry> for RetryPolicy {
    fn from(settings: &config::Retry) -> Self {
        let &config::Retry { max_attempts, min_delay, max_delay } = settings;
        Self { max_attempts, min_delay, max_delay }
    }
}

impl RetryPolicy {
    /// Decides after the `failed`th failed run. `last_delivery`: the server will not deliver the message again.
    pub fn next_step(&self, failure: &Failure, failed: u32, last_delivery: bool) -> NextStep {
        match failure {
            // A failure that no message caused never comes here.
            Failure::Permanent(_) | Failure::Store(_) | Failure::Away(_) => NextStep::DeadLetter(Reason::Permanent),
            Failure::At { failure, .. } => self.next_step(failure, failed, last_delivery),
            Failure::Retry(_) | Failure::Unanswered { .. } if failed >= self.max_attempts => {
                NextStep::DeadLetter(Reason::AttemptsExhausted)
            }
            Failure::Retry(_) | Failure::Unanswered { .. } if last_delivery => {
                NextStep::DeadLetter(Reason::LastDelivery)
            }
            Failure::Retry(_) | Failure::Unanswered { .. } => NextStep::Again(self.delay(failed)),
        }
    }

    /// `min_delay`, doubled with each failed run after the first, up to `max_delay`.
    fn delay(&self, failed: u32) -> Duration {
        doubled(self.min_delay, failed.saturating_sub(1), self.max_delay)
    }

    /// Shortens `delay` when many messages wait for a retry: `parked` of the consumer's `places` (`max_ack_pending`) are taken, this
    /// message included.
    ///
    /// When all places are taken, the server delivers nothing new. From half of the places on, delays become shorter, down to
    /// [`CROWDED_DELAY`] for the last place. Its attempts are then used up soon, and the place is free again.
    pub fn crowded(delay: Duration, parked: usize, places: usize) -> Duration {
        let half = places / 2;
        if parked <= half || delay <= CROWDED_DELAY {
            return delay;
        }
        let left = places.saturating_sub(parked) as f64 / (places - half) as f64;
        CROWDED_DELAY.mul_f64(delay.div_duration_f64(CROWDED_DELAY).powf(left))
    }

    /// Makes the delay up to a fifth shorter or longer, so that messages that failed together do not come back together. `random`
    /// is in 0..1.
    pub fn jitter(delay: Duration, random: f64) -> Duration {
        delay.mul_f64(1.0 - JITTER + 2.0 * JITTER * random)
    }

    /// The longest delay that a retry can have.
    pub fn longest(&self) -> Duration {
        self.max_delay.mul_f64(1.0 + JITTER)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICY: RetryPolicy =
        RetryPolicy { max_attempts: 5, min_delay: Duration::from_secs(1), max_delay: Duration::from_secs(5) };

    fn retry() -> Failure {
        Failure::Retry("busy".into())
    }

    #[test]
    fn delays_double_up_to_the_limit() {
        let delays: Vec<u64> = (1..=4).map(|failed| POLICY.delay(failed).as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 5]);
        assert_eq!(POLICY.delay(u32::MAX), POLICY.max_delay);
    }

    #[test]
    fn delays_shorten_when_parked_messages_take_more_than_half_the_places() {
        let long = Duration::from_secs(100);
        let delay = |parked| RetryPolicy::crowded(long, parked, 10).as_secs();
        assert_eq!([1, 5, 6, 8, 10, 11].map(delay), [100, 100, 39, 6, 1, 1]);
        assert_eq!(RetryPolicy::crowded(long, 1, 1), CROWDED_DELAY);
        let short = Duration::from_millis(100);
        assert_eq!(RetryPolicy::crowded(short, 10, 10), short, "never longer");
    }

    #[test]
    fn jittered_delays_still_grow() {
        let longest_first = RetryPolicy::jitter(POLICY.delay(1), 1.0);
        let shortest_second = RetryPolicy::jitter(POLICY.delay(2), 0.0);
        assert!(longest_first < shortest_second);
    }

    #[test]
    fn the_last_attempt_and_the_last_delivery_end_in_a_dead_letter() {
        assert_eq!(POLICY.next_step(&retry(), 4, false), NextStep::Again(Duration::from_secs(5)));
        assert_eq!(POLICY.next_step(&retry(), 5, false), NextStep::DeadLetter(Reason::AttemptsExhausted));
        assert_eq!(POLICY.next_step(&retry(), 1, true), NextStep::DeadLetter(Reason::LastDelivery));
    }

    #[test]
    fn a_permanent_failure_is_buried_at_once() {
        let failure = Failure::Permanent("unknown product".into());
        assert_eq!(POLICY.next_step(&failure, 1, false), NextStep::DeadLetter(Reason::Permanent));
    }

    prop_compose! {
        /// What the settings allow.
        fn policies()(
            max_attempts in 1..=1000_u32,
            delays in [1..=86_400_000_u64, 1..=86_400_000],
            shifts in [0..27_u32, 0..27],
        ) -> RetryPolicy {
            // As often a few milliseconds as many hours.
            let shifted = |index: usize| Duration::from_millis((delays[index] >> shifts[index]).max(1));
            let (one, other) = (shifted(0), shifted(1));
            RetryPolicy { max_attempts, min_delay: one.min(other), max_delay: one.max(other) }
        }
    }

    proptest! {
        #[test]
        fn each_delay_is_twice_the_one_before_it_or_the_longest(
            policy in policies(),
            failed in prop_oneof![0..40_u32, any::<u32>()],
        ) {
            let delay = policy.delay(failed);
            prop_assert!((policy.min_delay..=policy.max_delay).contains(&delay));
            prop_assert_eq!(policy.delay(1), policy.min_delay);
            if failed > 1 {
                prop_assert_eq!(delay, (policy.delay(failed - 1) * 2).min(policy.max_delay));
            }
        }

        #[test]
        fn jitter_moves_a_delay_by_a_fifth_at_most(policy in policies(), failed in any::<u32>(), random in 0.0..1.0) {
            let delay = policy.delay(failed);
            let jittered = RetryPolicy::jitter(delay, random);
            let slack = Duration::from_nanos(1);
            prop_assert!(jittered + slack >= delay * 4 / 5 && jittered <= delay * 6 / 5 + slack, "{jittered:?} of {delay:?}");
        }

        #[test]
        fn a_message_has_all_its_attempts_and_no_more(policy in policies(), last_delivery in any::<bool>()) {
            let steps = (1..).map(|failed| policy.next_step(&retry(), failed, last_delivery));
            let again = steps.take_while(|step| matches!(step, NextStep::Again(_))).count();
            prop_assert_eq!(again, if last_delivery { 0 } else { policy.max_attempts as usize - 1 });
        }
    }
}
