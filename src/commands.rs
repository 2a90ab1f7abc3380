//! The operator's commands, one file each, and what several of them need.

use std::ffi::OsStr;

pub mod audit;
pub mod check;
pub mod completions;
pub mod config;
pub mod healthcheck;
pub mod man;
pub mod pause;
pub mod publish;
pub mod run;
pub mod setup;
pub mod status;

/// Who runs this command, as `user@host`: what stays on record of what operators do.
pub fn operator() -> String {
    // Through sudo everybody is the daemon's user.
    let sudo = std::env::var_os("SUDO_USER");
    let user = sudo.as_deref().and_then(OsStr::to_str).map(ToOwned::to_owned);
    let user = user.or_else(|| whoami::username().ok()).unwrap_or_else(|| "unknown".to_owned());
    format!("{user}@{}", whoami::hostname().unwrap_or_else(|_| "unknown".to_owned()))
}
