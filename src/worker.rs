//! The loop, and the parts of the path of a message that it calls.

mod calls;
pub mod inbox;
pub mod retention;
pub mod retry;
pub mod shift;
pub mod survey;
#[expect(clippy::module_inception, reason = "the room is named after its loop")]
pub mod worker;

mod bound;
mod given_up;
mod held;
mod outage;
mod parked;
mod waiting;
