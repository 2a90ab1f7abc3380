//! The data types that every other module speaks of. No I/O, and no use of any other module of ours.

pub mod delivery;
pub mod id;
pub mod label;
pub mod letter;
pub mod outbox;
pub mod outcome;
pub mod plan;
pub mod pointer;
pub mod ranges;
pub mod schemes;
pub mod subject;
pub mod text;
pub mod time;
pub mod view;
