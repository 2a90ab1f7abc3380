//! The log lines of outcomes. Of an error, the first line: below it stands what somebody else wrote, such as the endpoint of a call.

use crate::model::delivery::Delivery;
use crate::model::label::Label;
use crate::model::outcome::Outcome;
use crate::model::text::first_line;

/// One line for each message that did not simply succeed. Never its payload.
pub fn log_outcome(delivery: &Delivery, outcome: &Outcome) {
    let (id, position) = (&delivery.id, delivery.raw.position);
    let (stream_seq, delivered) = (position.stream_seq, position.delivered);
    let subject = &delivery.raw.subject;
    match outcome {
        Outcome::Applied | Outcome::Duplicate | Outcome::Dropped => {
            tracing::debug!(message_id = %id, %subject, stream_seq, delivered, outcome = outcome.kind().name(), "the outcome is durable");
        }
        Outcome::Ignored(why) => {
            tracing::debug!(%subject, stream_seq, delivered, outcome = "ignored", "the message is {}", why.name());
        }
        Outcome::Retry { delay, error } => {
            let error = first_line(error);
            tracing::warn!(message_id = %id, %subject, stream_seq, delivered, ?delay, %error, outcome = "retry", "the handler failed on {id}; the server will deliver the message again");
        }
        Outcome::DeadLettered { reason, error } => {
            let error = first_line(error);
            tracing::warn!(message_id = %id, %subject, stream_seq, delivered, reason = reason.name(), %error, outcome = "dead-lettered", "{id} became a dead letter");
        }
    }
}
