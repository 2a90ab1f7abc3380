//! `run`: the daemon. Opens what it needs in an order that leaves nothing behind when something is wrong, then works.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::handler::Handler;
use crate::jetstream::secrets::{self, FileError};
use crate::ops::http;
use crate::ops::signals;
use crate::telemetry::Telemetry;
use crate::telemetry::log::{self, Reload};
use crate::telemetry::systemd;
use crate::worker::shift::{self, ShiftError};
use crate::worker::worker::Until;

const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// How often progress is shown on a terminal, and in lines elsewhere.
const BAR_EVERY: Duration = Duration::from_millis(100);
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Why `run` ended otherwise than drained.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Bind(#[from] http::BindError),
    #[error(transparent)]
    Files(#[from] FileError),
    #[error("cannot listen for signals")]
    Signals(#[source] std::io::Error),
    #[error(transparent)]
    Shift(#[from] ShiftError),
}

/// Runs until a signal, or until idle.
pub async fn run(
    config: Config,
    file: Option<PathBuf>,
    handler: Arc<dyn Handler>,
    reload: Reload,
    until: Until,
) -> Result<(), RunError> {
    let stop = CancellationToken::new();
    // First of all: a container's process 1 has no default for SIGTERM, and everything below may wait.
    signals::listen(stop.clone(), move || reload_level(&reload, file.as_deref())).map_err(RunError::Signals)?;
    let telemetry = Arc::new(Telemetry::new());
    // Before anything is created: a missing secret is for the operator to put there.
    secrets::check(&config.nats).await?;
    let listener = http::bind(config.http.listen).await?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), http = %config.http.listen, "starting");

    let ending = CancellationToken::new();
    let tasks = TaskTracker::new();
    tasks.spawn(http::serve(listener, telemetry.metrics.clone(), telemetry.health.clone(), ending.clone()));
    tasks.spawn(systemd::run(telemetry.health.clone(), ending.clone()));
    tasks.spawn(upkeep(telemetry.clone(), ending.clone()));
    if until == Until::Idle {
        tasks.spawn(show_progress(telemetry.clone(), ending.clone()));
    }
    tasks.close();
    let result = shift::work(config, handler, telemetry, until, stop).await;
    ending.cancel();
    tasks.wait().await;
    Ok(result?)
}

async fn upkeep(telemetry: Arc<Telemetry>, ending: CancellationToken) {
    let mut every = tokio::time::interval(UPKEEP_EVERY);
    let mut told = 0;
    while ending.run_until_cancelled(every.tick()).await.is_some() {
        telemetry.metrics.upkeep();
        let dropped = log::dropped_lines();
        if dropped > told {
            tracing::warn!(lines = dropped - told, "lines of this log were dropped, nobody read them");
            // If this line got through, somebody reads again.
            told = if log::dropped_lines() == dropped { dropped } else { told };
        }
    }
}

/// Reads the settings again and takes the log level from them, and nothing else.
fn reload_level(reload: &Reload, file: Option<&std::path::Path>) {
    let level = match Config::load(file, std::env::vars_os()) {
        Ok(loaded) => loaded.config.log.level,
        Err(problems) => return tracing::error!(%problems, "the settings are wrong, the log level stays"),
    };
    match reload.set_level(&level) {
        Ok(()) => tracing::info!(%level, "log level reloaded"),
        Err(error) => tracing::error!(%error, "the log level stays"),
    }
}

/// A bar on a terminal, a line now and then elsewhere.
async fn show_progress(telemetry: Arc<Telemetry>, ending: CancellationToken) {
    let on_terminal = std::io::stderr().is_terminal();
    let bar = if on_terminal { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {human_pos} of {human_len}, {per_sec}, {eta} left") {
        bar.set_style(style);
    }
    let mut every = tokio::time::interval(if on_terminal { BAR_EVERY } else { LINE_EVERY });
    while ending.run_until_cancelled(every.tick()).await.is_some() {
        let status = telemetry.health.status();
        let Some(view) = status.consumer else { continue };
        let left = view.num_pending + view.num_ack_pending;
        bar.set_length(status.committed_messages + left);
        bar.set_position(status.committed_messages);
        if !on_terminal {
            tracing::info!(committed = status.committed_messages, left, "working until idle");
        }
    }
    bar.finish_and_clear();
}
