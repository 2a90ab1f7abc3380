//! The loop, and the parts of the path of a message that it calls.

mod acceptance;
pub mod audit;
mod calls;
pub mod inbox;
pub mod message_ids;
pub mod missing;
pub mod retention;
pub mod retry;
pub mod shift;
#[expect(clippy::module_inception, reason = "the room is named after its loop")]
pub mod worker;

mod held;
mod keys;
mod outage;
mod parked;
mod relay;
pub mod repair;
mod report;
mod waiting;
mod writer;
