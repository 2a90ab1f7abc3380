//! The server's side: everything that names the client library.

pub mod connection;
pub mod consumer;
pub mod deletion;
mod gaps;
pub mod gate;
pub mod given_up;
mod link;
pub mod permissions;
pub mod secrets;
pub mod unreadable;
pub mod walk;
