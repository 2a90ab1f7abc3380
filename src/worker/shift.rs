//! One shift after the other: open the database, run a worker until a stop or a pause, sit out the pause.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::config::{Config, Database};
use crate::handler::{Failure, Handler};
use crate::jetstream::consumer::{Capacity, Consumer, Event};
use crate::model::text::chain;
use crate::store::{self, Counts, OpenError, Pause, Store};
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};
use crate::worker::worker::{Ended, Until, Worker, WorkerError};

/// How often a paused daemon checks whether the pause is over, and looks at stream and consumer.
const PAUSE_LOOK_EVERY: Duration = Duration::from_secs(1);
const PAUSED_INFO_EVERY: Duration = Duration::from_secs(2);
/// How long the note of a stop may take.
const NOTE_PATIENCE: Duration = Duration::from_secs(1);
const OPEN_RETRY_EVERY: Duration = Duration::from_secs(1);

/// Why the work ended otherwise than drained.
#[derive(Debug, thiserror::Error)]
pub enum ShiftError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The operator has to correct what the handler needs.
    #[error("{0}")]
    Handler(String),
    #[error("paused {0}; nothing is processed until `order-processor resume`")]
    Paused(Pause),
}

/// Works until `stop`, or until idle if so asked.
///
/// # Errors
/// [`ShiftError`]
pub async fn work(
    config: Config,
    handler: Arc<dyn Handler>,
    telemetry: Arc<Telemetry>,
    until: Until,
    stop: CancellationToken,
) -> Result<(), ShiftError> {
    let config = Arc::new(config);
    let database = &config.database;
    let mut opened_before = false;
    while !stop.is_cancelled() {
        sit_out_pause(&config, &telemetry, until, &stop).await?;
        let (store, counts) = tokio::select! {
            () = stop.cancelled() => break,
            () = store::pause_begins(database) => continue,
            opened = open(&config, handler.as_ref(), &telemetry, opened_before) => opened?,
        };
        opened_before = true;
        // A pause that began before we had the lock was told that nobody has the file.
        if store::paused(database)?.is_some() {
            continue;
        }
        telemetry.health.set_counts(counts);
        telemetry.health.report(Component::Database, Ok(()));
        let worker = Worker::new(config.clone(), store, handler.clone(), telemetry.clone(), until);
        let paused = database.clone();
        // On a task, so that the runtime's workers hand it what the client has read: the main thread would have to be woken for
        // it, up to once a message.
        let told = CancellationToken::new();
        let running = tokio::spawn(worker.run(told.clone(), async move { store::pause_begins(&paused).await }));
        let ended = tokio::select! {
            ended = running => ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic())),
            never = pass_on(&stop, database, &told) => match never {},
        };
        match ended {
            Ok(Ended::Done) => return Ok(()),
            Ok(Ended::Paused) => {}
            // For example on a full disk. What is in the WAL is safe there, and the next program that opens the database reads it.
            Err(WorkerError::Close(error)) if !stop.is_cancelled() && store::paused(database)?.is_some() => {
                tracing::warn!(error = %chain(&error), "paused, and a part of the database is still in its WAL file; nothing is lost; copy the -wal file together with the database");
            }
            Err(error) => return Err(error.into()),
        }
    }
    // The daemon was paused or waited for its database, so there is nothing to drain.
    telemetry.health.set_draining();
    Ok(())
}

/// Passes the stop on to the worker. Before that, notes it where the next process finds the note if a second signal or SIGKILL ends
/// this process before it has drained.
async fn pass_on(stop: &CancellationToken, database: &Database, told: &CancellationToken) -> Infallible {
    stop.cancelled().await;
    let database = database.clone();
    let noting = tokio::task::spawn_blocking(move || store::note_stop(&database));
    // A disk that hangs does not delay the stop.
    drop(tokio::time::timeout(NOTE_PATIENCE, noting).await);
    told.cancel();
    std::future::pending().await
}

/// Waits for the end of a pause, if there is one. The daemon still looks at stream and consumer, and pulls nothing.
async fn sit_out_pause(
    config: &Arc<Config>,
    telemetry: &Arc<Telemetry>,
    until: Until,
    stop: &CancellationToken,
) -> Result<(), ShiftError> {
    let database = &config.database;
    let Some(mut pause) = store::paused(database)? else { return Ok(()) };
    if until == Until::Idle {
        return Err(ShiftError::Paused(pause));
    }
    tracing::warn!("paused {pause}; nothing is processed until `order-processor resume`");
    telemetry.health.set_paused(Some(pause.clone()));
    let mut consumer = Consumer::new(config.clone(), telemetry.clone(), PAUSED_INFO_EVERY);
    let mut refused = false;
    let mut reminder = Reminder::default();
    let mut tick = tokio::time::interval(PAUSE_LOOK_EVERY);
    loop {
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            _ = tick.tick() => match store::paused(database) {
                Ok(None) => break,
                Ok(Some(still)) if still == pause => {}
                Ok(Some(another)) => {
                    telemetry.health.set_paused(Some(another.clone()));
                    pause = another;
                }
                // The file system itself may be in service.
                Err(error) => {
                    let cause = chain(&error);
                    if reminder.is_due(&cause) {
                        tracing::warn!(%cause, "cannot read the pause marker; the daemon stays paused");
                    }
                }
            },
            event = consumer.next(Capacity { messages: 0, bytes: 0 }), if !refused => match event {
                // The operator may correct the consumer during the pause as well. It matters at the end of the pause.
                Event::Refused(error) => {
                    tracing::warn!(error = %chain(&error), "the daemon will refuse this consumer when the pause ends");
                    refused = true;
                }
                // The audit finds after the pause what the server gives up meanwhile.
                Event::Seen { .. } | Event::Bound { .. } | Event::Deliveries(_) | Event::GivenUp(_) => {}
            },
        }
        telemetry.health.tick();
    }
    telemetry.health.set_paused(None);
    tracing::info!("resumed");
    Ok(())
}

/// Opens the database. What may pass, a lock or a full disk, is waited for, not ready and saying why.
async fn open(
    config: &Config,
    handler: &dyn Handler,
    telemetry: &Telemetry,
    opened_before: bool,
) -> Result<(Store, Counts), ShiftError> {
    let database = &config.database;
    let mut reminder = Reminder::default();
    loop {
        let opened = async {
            let mut store =
                if opened_before { Store::open_again(database).await? } else { Store::open(database).await? };
            prepare(handler, &mut store, database).await?;
            let counts = store.counts().await;
            let counts = counts.map_err(|source| OpenError::database(database, source))?;
            Ok((store, counts))
        };
        match opened.await {
            Err(ShiftError::Open(OpenError::Database { source, .. })) if source.may_pass() => {
                let cause = chain(&source);
                if reminder.is_due(&cause) {
                    tracing::error!(%cause, "the database cannot be opened, trying again");
                }
                telemetry.metrics.db_errors.increment(source.class, 1);
                telemetry.health.report(Component::Database, Err(cause));
                tokio::time::sleep(OPEN_RETRY_EVERY).await;
            }
            // A repair will be done some time, and so will be whoever took a database that was ours until a pause. A second
            // daemon would not: that is for the operator.
            Err(ShiftError::Open(OpenError::Held { holder, .. })) if opened_before || holder.is_repair => {
                let cause = format!("in use by {holder}");
                if reminder.is_due(&cause) {
                    tracing::warn!(%cause, "the database cannot be opened, trying again");
                }
                telemetry.health.report(Component::Database, Err(cause));
            }
            ended => return ended,
        }
    }
}

async fn prepare(handler: &dyn Handler, store: &mut Store, database: &Database) -> Result<(), ShiftError> {
    let Some(connection) = store.idle_connection() else { return Ok(()) };
    match handler.prepare(connection).await {
        Ok(()) => Ok(()),
        Err(Failure::Store(source)) => Err(OpenError::database(database, source).into()),
        Err(failure) => Err(ShiftError::Handler(chain(&failure))),
    }
}
