//! One test binary over the real things: a nats-server of its own for each test, a real SQLite file, the real process.
//! Each module holds one subject; test names are claims. tests/README.md maps faults to tests.

// A failed unwrap is a failed test, in helpers as well; seeds come from the environment.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod audits;
mod auth;
mod backup;
mod binding;
mod bulk;
mod calls;
mod conflicts;
mod crashes;
mod dead_letters;
mod disks;
mod docs;
mod domains;
mod edited;
mod examples;
mod field;
mod find;
mod gate;
mod given_up;
mod gone;
mod handlers;
mod http;
mod http_calls;
mod ids;
mod ignored;
mod inputs;
mod keys;
mod message_ids;
mod model;
mod network;
mod outbox;
mod pause;
mod plans;
mod processes;
mod reconnect;
mod restored;
mod seeds;
mod self_audit;
mod settings;
mod setup;
mod signals;
mod sql;
mod startup;
mod stopping;
mod store;
mod story;
mod support;
mod terminal;
mod text;
mod tidy;
mod torture;
mod triggers;
mod upgrade;
