//! What became of a message, and what that means for the acknowledgement. Pure: no I/O, no clock.

use std::borrow::Cow;
use std::time::Duration;

use crate::model::label::{Label, label};

/// What one run over one message came to.
///
/// There is no outcome for "the database or the server is away": then nothing is decided, nothing is
/// acknowledged and no attempt is spent. See [`crate::worker::inbox`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The effect of the message is durable, and this run made it so.
    Applied,
    /// The effect, or the dead letter, of this very message was durable before.
    Duplicate,
    /// Another order under a used id. With `inbox.on_conflict = "duplicate"`, it is acknowledged without effect.
    Dropped,
    /// The message needs no effect. Only the id of an order that the handler ignores has a row.
    Ignored(Ignored),
    /// The handler failed in a way that may pass; the server is to deliver it again after `delay`.
    Retry { delay: Duration, error: String },
    /// The message is kept, whole, in `dead_letters`.
    DeadLettered { reason: Reason, error: String },
}

impl Outcome {
    /// Whether the message is decided for good.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::Retry { .. })
    }

    /// Whether the message was decided by this run, for good, as an order.
    pub fn is_new(&self) -> bool {
        match self {
            Self::Applied | Self::DeadLettered { .. } => true,
            Self::Duplicate | Self::Dropped | Self::Ignored(_) | Self::Retry { .. } => false,
        }
    }

    /// The one place where an outcome becomes an acknowledgement. Deliveries without an outcome are only handed back at a stop.
    ///
    /// Exhaustive on purpose: a new outcome must not compile until somebody has decided what the server is told.
    pub fn acknowledgement(&self) -> Acknowledgement {
        match self {
            Self::Applied | Self::Duplicate | Self::Dropped | Self::Ignored(_) => Acknowledgement::Ack,
            Self::Retry { delay, .. } => Acknowledgement::Nak { delay: *delay },
            Self::DeadLettered { reason, .. } => Acknowledgement::Term { reason: *reason },
        }
    }

    /// The label of this outcome in `outcomes_total`.
    pub fn kind(&self) -> OutcomeKind {
        match self {
            Self::Applied => OutcomeKind::Applied,
            Self::Duplicate | Self::Dropped => OutcomeKind::Duplicate,
            Self::Ignored(_) => OutcomeKind::Ignored,
            Self::Retry { .. } => OutcomeKind::Retry,
            Self::DeadLettered { .. } => OutcomeKind::DeadLettered,
        }
    }
}

label! {
    /// [`Outcome`] without its data, for metrics and logs.
    pub enum OutcomeKind: "outcome" {
        Applied = "applied",
        Duplicate = "duplicate",
        Ignored = "ignored",
        Retry = "retry",
        DeadLettered = "dead-lettered",
    }
}

/// Why a message needs no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ignored {
    /// The server stored it because the last message of its subject was removed: header `Nats-Marker-Reason` (ADR-43).
    DeleteMarker,
    /// It defines a schedule: header `Nats-Schedule` (ADR-51). The server publishes the scheduled message itself later.
    Schedule,
    /// It deletes a key of a key-value bucket: header `KV-Operation` with `DEL` or `PURGE` (ADR-8).
    KeyDeleted,
    /// It is an order, and the handler ignores it.
    Order,
}

impl Ignored {
    /// For logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::DeleteMarker => "a delete marker of the server",
            Self::Schedule => "the definition of a schedule",
            Self::KeyDeleted => "the deletion of a key",
            Self::Order => "an order that the handler ignores",
        }
    }
}

label! {
    /// Why a message went to the dead letters.
    pub enum Reason: "reason" {
        /// The handler said that no repetition will help.
        Permanent = "permanent",
        /// A known message id came with another subject or payload: another order under a used id.
        Conflict = "conflict",
        /// The id pointer or the handler needs a value that the message does not have.
        Undecodable = "undecodable",
        /// No route of the handler file is for its subject.
        Unrouted = "unrouted",
        /// The client cannot parse its headers; it was fetched raw.
        Unreadable = "unreadable",
        /// `retry.max_attempts` runs of the handler failed.
        AttemptsExhausted = "attempts_exhausted",
        /// `retry.max_attempts` runs of the handler started and never ended: it takes the process down.
        CrashLoop = "crash_loop",
        /// It failed on the last delivery that the consumer's `max_deliver` allows, or that one got lost and the server gave it up.
        LastDelivery = "last_delivery",
    }
}

/// What the server is told about one delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledgement {
    /// Done: the ack floor may pass it.
    Ack,
    /// Deliver it again, `delay` from now; zero means at once.
    Nak { delay: Duration },
    /// Never deliver it again; the reason goes into the server's advisory.
    Term { reason: Reason },
    /// Still at work: `ack_wait` begins again.
    InProgress,
}

impl Acknowledgement {
    /// The payload that goes to the reply subject of the delivery (ADR-15 of the NATS project).
    pub fn payload(self) -> Cow<'static, [u8]> {
        match self {
            Self::Ack => Cow::Borrowed(b"+ACK"),
            Self::Nak { delay } if delay.is_zero() => Cow::Borrowed(b"-NAK"),
            Self::Nak { delay } => Cow::Owned(Self::delayed_nak(delay.as_nanos() as i128).into_bytes()),
            Self::Term { reason } => Cow::Owned(format!("+TERM {}", reason.name()).into_bytes()),
            Self::InProgress => Cow::Borrowed(b"+WPI"),
        }
    }

    /// The payload of a nak with a delay (ADR-8 of the NATS project).
    pub fn delayed_nak(delay_ns: i128) -> String {
        format!("-NAK {{\"delay\":{delay_ns}}}")
    }

    /// The label of this acknowledgement in `acks_total`.
    pub fn kind(self) -> AckKind {
        match self {
            Self::Ack => AckKind::Ack,
            Self::Nak { .. } => AckKind::Nak,
            Self::Term { .. } => AckKind::Term,
            Self::InProgress => AckKind::InProgress,
        }
    }
}

label! {
    /// [`Acknowledgement`] without its data, for metrics.
    pub enum AckKind: "kind" {
        Ack = "ack",
        Nak = "nak",
        Term = "term",
        InProgress = "in_progress",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn outcomes() -> impl Strategy<Value = Outcome> {
        // A day and a fifth of it for the jitter is the longest delay there can be.
        let delays = (0..=103_680_000_000_000_u64).prop_map(Duration::from_nanos);
        prop_oneof![
            Just(Outcome::Applied),
            Just(Outcome::Duplicate),
            Just(Outcome::Dropped),
            Just(Outcome::Ignored(Ignored::Schedule)),
            (delays, ".*").prop_map(|(delay, error)| Outcome::Retry { delay, error }),
            (select(Reason::ALL), ".*").prop_map(|(reason, error)| Outcome::DeadLettered { reason, error }),
        ]
    }

    proptest! {
        #[test]
        fn the_server_is_told_what_the_outcome_says_and_nothing_of_its_error(outcome in outcomes()) {
            let acknowledgement = outcome.acknowledgement();
            let payload = acknowledgement.payload();
            let text = str::from_utf8(&payload).unwrap();
            match &outcome {
                Outcome::Applied | Outcome::Duplicate | Outcome::Dropped | Outcome::Ignored(_) => prop_assert_eq!(text, "+ACK"),
                Outcome::Retry { delay: Duration::ZERO, .. } => prop_assert_eq!(text, "-NAK"),
                Outcome::Retry { delay, .. } => {
                    let options: serde_json::Value = serde_json::from_str(text.strip_prefix("-NAK ").unwrap()).unwrap();
                    prop_assert_eq!(options["delay"].as_i64(), i64::try_from(delay.as_nanos()).ok());
                }
                Outcome::DeadLettered { reason, .. } => {
                    prop_assert_eq!(text.split_once(' '), Some(("+TERM", reason.name())));
                    prop_assert!(reason.name().bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'));
                }
            }
        }
    }
}
