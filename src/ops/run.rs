//! `run`: the daemon. Opens what it needs in an order that leaves nothing behind when something is wrong, then works.

use std::convert::Infallible;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::handler::Handler;
use crate::jetstream::consumer::{Consumer, Event, Room};
use crate::jetstream::secrets::{self, FileError};
use crate::model::text::chain;
use crate::ops::http;
use crate::ops::signals;
use crate::store::sqlite::lock;
use crate::store::sqlite::pause::{self, Pause};
use crate::store::{Counts, OpenError, Store};
use crate::telemetry::log::{self, Reload};
use crate::telemetry::systemd;
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::worker::{Ended, Until, Worker, WorkerError};

const UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// How often a paused daemon looks whether the pause is over, and what the server has meanwhile.
const PAUSE_LOOK_EVERY: Duration = Duration::from_secs(1);
const PAUSED_INFO_EVERY: Duration = Duration::from_secs(2);
/// How long the note of a stop may take.
const NOTE_PATIENCE: Duration = Duration::from_secs(1);
const OPEN_RETRY_EVERY: Duration = Duration::from_secs(1);
/// How often progress is shown on a terminal, and in lines elsewhere.
const BAR_EVERY: Duration = Duration::from_millis(100);
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Why `run` ended otherwise than drained.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Bind(#[from] http::BindError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Files(#[from] FileError),
    #[error("cannot listen for signals")]
    Signals(#[source] std::io::Error),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("paused {0}; nothing is processed until `order-processor resume`")]
    Paused(Pause),
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
    let result = work(config, handler, telemetry, until, stop).await;
    ending.cancel();
    tasks.wait().await;
    result
}

async fn work(
    config: Config,
    handler: Arc<dyn Handler>,
    telemetry: Arc<Telemetry>,
    until: Until,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let config = Arc::new(config);
    let path = &config.database.path;
    let mut opened_before = false;
    while !stop.is_cancelled() {
        sit_out_pause(&config, &telemetry, until, &stop).await?;
        let (store, counts) = tokio::select! {
            () = stop.cancelled() => break,
            () = pause::begins(path) => continue,
            opened = open(&config, &telemetry, opened_before) => opened?,
        };
        opened_before = true;
        // A pause that began before we had the lock was told that nobody has the file.
        if pause::look(path)?.is_some() {
            continue;
        }
        telemetry.counted(counts);
        telemetry.health.set_database(Ok(()));
        let worker = Worker::new(config.clone(), store, handler.clone(), telemetry.clone(), until);
        let paused = path.clone();
        // On a task, so that the runtime's workers hand it what the client has read: the main thread would have to be woken for
        // it, up to once a message.
        let told = CancellationToken::new();
        let running = tokio::spawn(worker.run(told.clone(), async move { pause::begins(&paused).await }));
        let ended = tokio::select! {
            ended = running => ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())),
            never = pass_on(&stop, path, &told) => match never {},
        };
        match ended {
            Ok(Ended::Done) => return Ok(()),
            Ok(Ended::Paused) => {}
            // On a full disk for one. What is in the WAL is safe there, and whoever opens the database next finds it.
            Err(WorkerError::Close(error)) if !stop.is_cancelled() && pause::look(path)?.is_some() => {
                tracing::warn!(error = %chain(&error), "paused, and a part of the database is still in its WAL file");
            }
            Err(error) => return Err(error.into()),
        }
    }
    // While it was paused or waited for its database; there is nothing to drain.
    telemetry.draining();
    Ok(())
}

/// Passes the stop on to the worker, noted first where the next process finds it if this one is ended before it has drained, by a
/// second signal or by SIGKILL.
async fn pass_on(stop: &CancellationToken, database: &Path, told: &CancellationToken) -> Infallible {
    stop.cancelled().await;
    let database = database.to_owned();
    let noting = tokio::task::spawn_blocking(move || lock::sign_as_stopping(&database));
    // A disk that hangs does not hold the stop up.
    drop(tokio::time::timeout(NOTE_PATIENCE, noting).await);
    told.cancel();
    std::future::pending().await
}

/// Waits for the end of a pause, if one is on. What the server has is looked at all the same, and nothing is pulled.
async fn sit_out_pause(
    config: &Arc<Config>,
    telemetry: &Arc<Telemetry>,
    until: Until,
    stop: &CancellationToken,
) -> Result<(), RunError> {
    let path = &config.database.path;
    let Some(mut pause) = pause::look(path)? else { return Ok(()) };
    if until == Until::Idle {
        return Err(RunError::Paused(pause));
    }
    tracing::warn!("paused {pause}; nothing is processed until `order-processor resume`");
    telemetry.paused(Some(&pause));
    let mut consumer = Consumer::new(config.clone(), telemetry.clone(), PAUSED_INFO_EVERY);
    let mut refused = false;
    let mut reminder = Reminder::default();
    let mut tick = tokio::time::interval(PAUSE_LOOK_EVERY);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = tick.tick() => match pause::look(path) {
                Ok(None) => break,
                Ok(Some(still)) if still == pause => {}
                Ok(Some(another)) => {
                    telemetry.paused(Some(&another));
                    pause = another;
                }
                // The file system may be part of what is serviced.
                Err(error) => {
                    let cause = chain(&error);
                    if reminder.is_due(&cause) {
                        tracing::warn!(%cause, "cannot look whether the pause is over");
                    }
                }
            },
            event = consumer.next(Room { messages: 0, bytes: 0 }), if !refused => match event {
                // Whoever services the database may service this as well. It counts at the end of the pause.
                Event::Refused(error) => {
                    tracing::warn!(error = %chain(&error), "the consumer is not fit");
                    refused = true;
                }
                // What the server gives up meanwhile is found after the pause.
                Event::Seen { .. } | Event::Bound { .. } | Event::Deliveries(_) | Event::GivenUp(_) => {}
            },
        }
        telemetry.health.tick();
    }
    telemetry.paused(None);
    tracing::info!("resumed");
    Ok(())
}

/// Opens the database. What may pass, a lock or a full disk, is waited for, not ready and saying why.
async fn open(config: &Config, telemetry: &Telemetry, opened_before: bool) -> Result<(Store, Counts), OpenError> {
    let path = &config.database.path;
    let mut reminder = Reminder::default();
    loop {
        let opened = async {
            let mut store = if opened_before { Store::open_again(path).await? } else { Store::open(path).await? };
            let counts = store.counts().await;
            let counts = counts.map_err(|source| OpenError::database(path, source))?;
            Ok((store, counts))
        };
        match opened.await {
            Err(OpenError::Database { source, .. }) if source.may_pass() => {
                let cause = chain(&source);
                if reminder.is_due(&cause) {
                    tracing::error!(%cause, "the database cannot be opened, trying again");
                }
                telemetry.metrics.db_errors.increment(source.class, 1);
                telemetry.health.set_database(Err(cause));
                tokio::time::sleep(OPEN_RETRY_EVERY).await;
            }
            // A repair will be done some time, and so will be whoever took a database that was ours until a pause. A second
            // daemon would not: that is for the operator.
            Err(OpenError::Held { holder, .. }) if opened_before || lock::is_repair(&holder) => {
                let cause = format!("in use by {holder}");
                if reminder.is_due(&cause) {
                    tracing::warn!(%cause, "the database cannot be opened, trying again");
                }
                telemetry.health.set_database(Err(cause));
            }
            ended => return ended,
        }
    }
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
