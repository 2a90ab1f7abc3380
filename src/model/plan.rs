//! What the handler decides of an order from the message alone, before anything is done for it.

use super::outcome::Reason;

/// What is to be done for an order whose id is new.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Plan {
    /// Apply it.
    #[default]
    Apply,
    /// Call for it, then apply it.
    Call,
    /// Claim its id and do nothing else.
    Ignore,
    /// Keep it as a dead letter. The handler does not run, and no attempt is counted.
    DeadLetter(Reason, String),
}
