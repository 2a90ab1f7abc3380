//! One test binary over the real things: a nats-server of its own for each test, a real SQLite file, the real process.
//! Each file holds one theme; test names are claims.

mod http;
mod inputs;
mod kills;
mod settings;
mod stopping;
mod story;
mod support;
mod surroundings;
