//! `run`: the daemon. Opens what it needs in an order that leaves nothing behind when something is wrong, then works.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Config, Database};
use crate::handler::Handler;
use crate::jetstream::secrets::{self, FileError};
use crate::ops::http;
use crate::ops::progress::Progress;
use crate::ops::signals;
use crate::store::{self, OpenError};
use crate::telemetry::Telemetry;
use crate::telemetry::log::{self, Reload};
use crate::telemetry::systemd;
use crate::worker::shift::{self, ShiftError};
use crate::worker::worker::Until;

const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// How often the bar of `--until-idle` moves on a terminal.
const BAR_EVERY: Duration = Duration::from_millis(100);
/// How often the log says how far the work is, while there is work.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Why `run` ended otherwise than drained.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Listen(#[from] http::ListenError),
    #[error(transparent)]
    Files(#[from] FileError),
    #[error("cannot listen for signals")]
    Signals(#[source] std::io::Error),
    #[error(transparent)]
    Open(#[from] OpenError),
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
    let listener = match http::listen(config.http.listen).await {
        Ok(listener) => listener,
        // Another daemon on this database has the port. Another port would not help.
        Err(taken) => return Err(in_use(&config.database)?.map_or(RunError::Listen(taken), RunError::Open)),
    };
    if let Some((file, digest)) = handler.file() {
        tracing::info!(file = %file.display(), digest, "orders are processed by the handler file");
        telemetry.health.set_handler_file(&file.display().to_string(), digest);
    }
    tracing::info!(version = env!("CARGO_PKG_VERSION"), http = %config.http.listen, "starting");

    let ending = CancellationToken::new();
    let tasks = TaskTracker::new();
    tasks.spawn(http::serve(listener, telemetry.metrics.clone(), telemetry.health.clone(), ending.clone()));
    tasks.spawn(systemd::run(telemetry.health.clone(), ending.clone()));
    tasks.spawn(upkeep(telemetry.clone(), ending.clone()));
    let bar = (until == Until::Idle).then(|| Progress::new(Some(0))).filter(Progress::is_bar);
    match bar {
        Some(bar) => tasks.spawn(show_bar(bar, telemetry.clone(), ending.clone())),
        None => tasks.spawn(log_progress(telemetry.clone(), ending.clone())),
    };
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
            tracing::warn!(lines = dropped - told, "lines of this log were dropped, because stderr was full or failed");
            // If this line got through, somebody reads again.
            told = if log::dropped_lines() == dropped { dropped } else { told };
        }
    }
}

/// Reads the settings again and takes the log level from them, and nothing else.
fn reload_level(reload: &Reload, file: Option<&std::path::Path>) {
    let level = match Config::load(file, std::env::vars_os()) {
        Ok(loaded) => loaded.config.log.level,
        Err(problems) => return tracing::error!(%problems, "the settings are wrong; the log level is unchanged"),
    };
    match reload.set_level(&level) {
        Ok(()) => tracing::info!(%level, "reloaded the log level"),
        Err(error) => tracing::error!(%error, "the log level is unchanged"),
    }
}

/// A line now and then while there is work: how much was processed, and where the floor is.
async fn log_progress(telemetry: Arc<Telemetry>, ending: CancellationToken) {
    let mut every = tokio::time::interval(LINE_EVERY);
    let mut logged = 0;
    while ending.run_until_cancelled(every.tick()).await.is_some() {
        let status = telemetry.health.status();
        let messages = status.committed_messages - logged;
        if let (1.., Some(view)) = (messages, status.consumer) {
            let (ack_floor, pending) = (view.ack_floor_stream_seq, view.num_pending);
            tracing::info!(messages, ack_floor, pending, "processed messages");
            logged = status.committed_messages;
        }
    }
}

async fn show_bar(mut bar: Progress, telemetry: Arc<Telemetry>, ending: CancellationToken) {
    let mut every = tokio::time::interval(BAR_EVERY);
    while ending.run_until_cancelled(every.tick()).await.is_some() {
        let status = telemetry.health.status();
        let Some(view) = status.consumer else { continue };
        bar.set_total(status.committed_messages + view.num_pending + view.num_ack_pending);
        bar.advance(status.committed_messages);
    }
}

/// The error that names the process which has the database open, if one has.
fn in_use(database: &Database) -> Result<Option<OpenError>, OpenError> {
    Ok(store::holder(database)?.map(|holder| OpenError::held(database, holder)))
}
