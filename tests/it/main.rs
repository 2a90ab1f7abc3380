//! One test binary over the real things: a nats-server of its own for each test, a real SQLite file, the real process.
//! Each file holds one theme; test names are claims.

// A failed unwrap is a failed test, in helpers as well; seeds come from the environment.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod audits;
mod bulk;
mod consumers;
mod desk;
mod disks;
mod docs;
mod doors;
mod handlers;
mod http;
mod ids;
mod inputs;
mod kills;
mod model;
mod network;
mod processes;
mod seeds;
mod settings;
mod stopping;
mod story;
mod support;
mod surroundings;
mod torture;
mod views;
