//! The server's side: connect, bind, pull, acknowledge, and read what a stream holds.

pub mod advisory;
mod bind;
mod client;
pub mod connection;
pub mod consumer;
pub mod deletion;
mod elsewhere;
mod error;
mod event;
mod events;
mod gaps;
pub mod gate;
mod limits;
pub mod link;
pub mod look;
mod notices;
pub mod other_pulls;
pub mod outbox;
pub mod permissions;
mod pull;
mod pull_health;
pub mod secrets;
mod session;
pub mod stored;
mod tls;
pub mod unreadable;
pub mod walk;

pub use client::Client;
pub use error::Error;
