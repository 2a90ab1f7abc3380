//! The operator's commands, one file each, and what several of them need.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};

use clap::builder::{BoolValueParser, TypedValueParser};

pub mod adopt;
pub mod audit;
pub mod backup;
pub mod check;
pub mod cli;
pub mod completions;
pub mod config;
pub mod dead_letters;
pub mod exit;
pub mod find;
pub mod handler;
pub mod healthcheck;
pub mod http;
pub mod man;
mod new_file;
pub mod pause;
pub mod progress;
pub mod publish;
pub mod reference;
pub mod run;
pub mod setup;
pub mod signals;
pub mod status;
pub mod teardown;

/// Who runs this command, as `user@host`: what stays on record of what operators do.
pub fn operator() -> String {
    // Through sudo everybody is the daemon's user.
    let sudo = std::env::var_os("SUDO_USER");
    let user = sudo.as_deref().and_then(OsStr::to_str).map(ToOwned::to_owned);
    let user = user.or_else(|| whoami::username().ok()).unwrap_or_else(|| "unknown".to_owned());
    format!("{user}@{}", whoami::hostname().unwrap_or_else(|_| "unknown".to_owned()))
}

/// How a command prints its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
}

/// The parser of a flag `--json`.
fn json_flag() -> impl TypedValueParser<Value = Format> {
    BoolValueParser::new().map(|json| if json { Format::Json } else { Format::Text })
}

/// Asks on the terminal; `None` without one. Anything but `answer` is a no.
fn confirmed(question: &str, answer: &str) -> io::Result<Option<bool>> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Ok(None);
    }
    let mut terminal = io::stderr();
    write!(terminal, "{question}")?;
    terminal.flush()?;
    let mut typed = String::new();
    stdin.read_line(&mut typed)?;
    Ok(Some(typed.trim() == answer))
}
