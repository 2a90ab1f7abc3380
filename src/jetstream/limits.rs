//! What a consumer allows, and when it delivers a message again.

use std::borrow::Cow;
use std::time::Duration;

use async_nats::jetstream::consumer::Info as ConsumerInfo;
use bytes::Bytes;

use crate::model::outcome::Acknowledgement;

/// The settings of a consumer that the worker and the pulls depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The shortest time after which the server may redeliver a held message.
    pub ack_wait: Duration,
    /// The number of the last delivery, if the consumer limits them.
    pub max_deliver: Option<u64>,
    /// So many messages may be delivered and not acknowledged.
    pub max_ack_pending: Option<usize>,
    backoff: Vec<Duration>,
    pub(super) max_batch: Option<usize>,
    pub(super) max_bytes: Option<usize>,
    pub(super) max_expires: Option<Duration>,
}

impl Limits {
    pub(super) fn of(consumer: &ConsumerInfo) -> Self {
        let config = &consumer.config;
        let positive = |value: i64| usize::try_from(value).ok().filter(|value| *value > 0);
        Self {
            ack_wait: config.backoff.iter().copied().min().unwrap_or(config.ack_wait),
            max_deliver: u64::try_from(config.max_deliver).ok().filter(|max| *max > 0),
            max_ack_pending: positive(config.max_ack_pending),
            backoff: config.backoff.clone(),
            max_batch: positive(config.max_batch),
            max_bytes: positive(config.max_bytes),
            max_expires: Some(config.max_expires).filter(|expires| !expires.is_zero()),
        }
    }

    /// The delay to send with a nak so that the server redelivers the message after `delay`. With a backoff list, the server
    /// counts this delay from the first step of the list, but the delay ends at the step of this delivery. So the difference is
    /// subtracted, and the result may be negative (nats-server 2.15, `processNak` and `checkPending`).
    fn nak_delay_ns(&self, delay: Duration, delivered: u64) -> i128 {
        let wanted = delay.as_nanos() as i128;
        let (Some(first), Some(last)) = (self.backoff.first(), self.backoff.last()) else { return wanted };
        let step =
            usize::try_from(delivered.saturating_sub(1)).ok().and_then(|step| self.backoff.get(step)).unwrap_or(last);
        wanted + first.as_nanos() as i128 - step.as_nanos() as i128
    }
}

/// What to send for an acknowledgement of the `delivered`th delivery. Without `limits`, a delay is sent as it is.
pub(super) fn payload(limits: Option<&Limits>, delivered: u64, acknowledgement: Acknowledgement) -> Bytes {
    match (limits, acknowledgement) {
        (Some(limits), Acknowledgement::Nak { delay }) if !delay.is_zero() => {
            Acknowledgement::delayed_nak(limits.nak_delay_ns(delay, delivered)).into()
        }
        _ => match acknowledgement.payload() {
            Cow::Borrowed(fixed) => Bytes::from_static(fixed),
            Cow::Owned(made) => made.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn limits(backoff: Vec<Duration>) -> Limits {
        Limits {
            ack_wait: Duration::from_secs(30),
            max_deliver: None,
            max_ack_pending: None,
            backoff,
            max_batch: None,
            max_bytes: None,
            max_expires: None,
        }
    }

    proptest! {
        #[test]
        fn a_nak_takes_effect_after_its_delay_whatever_the_backoff_list(
            backoff in vec(1..=86_400_000_000_000_u64, 0..5),
            delay_ns in 1..=103_680_000_000_000_u64,
            delivered in prop_oneof![1..8_u64, any::<u64>()],
        ) {
            let asked = limits(backoff.iter().copied().map(Duration::from_nanos).collect())
                .nak_delay_ns(Duration::from_nanos(delay_ns), delivered);
            prop_assert!(i64::try_from(asked).is_ok(), "the server reads 64 bits");
            // The server sets the clock of the delivery to `asked` minus the first step, and adds the step of this delivery.
            let steps = i128::from(delivered.max(1) - 1).min(backoff.len() as i128 - 1);
            let step = usize::try_from(steps).map_or(0, |step| backoff[step]);
            let first = backoff.first().copied().unwrap_or(0);
            prop_assert_eq!(asked - i128::from(first) + i128::from(step), i128::from(delay_ns));
        }
    }

    #[test]
    fn nak_delay_allows_for_the_backoff_list() {
        let seconds = Duration::from_secs;
        let limits = |backoff: &[u64]| limits(backoff.iter().copied().map(seconds).collect());
        let asked = |limits: &Limits, delivered| limits.nak_delay_ns(seconds(4), delivered) / 1_000_000_000;
        assert_eq!(asked(&limits(&[]), 7), 4);
        let backoff = limits(&[1, 3, 10]);
        assert_eq!([1, 2, 3, 9].map(|delivered| asked(&backoff, delivered)), [4, 2, -5, -5]);
    }
}
