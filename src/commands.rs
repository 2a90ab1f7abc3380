//! The operator's commands, one file each.

pub mod check;
pub mod config;
pub mod healthcheck;
pub mod publish;
pub mod run;
pub mod setup;
pub mod status;
