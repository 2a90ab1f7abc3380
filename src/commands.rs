//! The operator's commands, one file each.

pub mod check;
pub mod completions;
pub mod config;
pub mod healthcheck;
pub mod man;
pub mod publish;
pub mod run;
pub mod setup;
pub mod status;
