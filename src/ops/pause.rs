//! `pause` and `resume`: the daemon closes the database for maintenance, and processes orders again afterwards.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use clap::Args;
use tokio::time::Instant;

use crate::config::{Config, Database};
use crate::jetstream::look::look_for_command;
use crate::jetstream::{connection, gate};
use crate::model::text::chain;
use crate::ops::operator;
use crate::store::{self, Holder, OpenError, Pause};

/// What the daemon may need beyond `shutdown.timeout`, which bounds its drain: to find the marker, and to close.
const GRACE: Duration = Duration::from_secs(10);
/// How long the server may take to describe the consumer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct PauseArgs {
    /// The reason, which the status shows during the pause
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Return immediately, even while the daemon still has the database open
    #[arg(long)]
    no_wait: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error(
        "paused, but {holder} still has {database} open after {} s; see its log; `order-processor resume` ends the pause",
        waited.as_secs()
    )]
    Held { database: Database, holder: Holder, waited: Duration },
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Writes the marker and waits until no process has the database open.
pub async fn pause(config: &Config, args: PauseArgs, out: &mut impl Write) -> Result<(), PauseError> {
    let database = &config.database;
    let at = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let ours = Pause { by: operator(), at, reason: args.reason };
    if !store::begin_pause(database, &ours)? {
        let theirs = store::paused(database)?.unwrap_or_default();
        writeln!(out, "was paused already {theirs}")?;
    }
    warn_of_the_server(config, out).await?;
    if args.no_wait {
        writeln!(out, "paused; the daemon closes {database} after it finishes its held deliveries")?;
        return Ok(());
    }
    let patience = config.shutdown.timeout + GRACE;
    let deadline = Instant::now() + patience;
    while let Some(holder) = store::holder(database)? {
        if Instant::now() >= deadline {
            return Err(PauseError::Held { database: database.clone(), holder, waited: patience });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    writeln!(out, "paused; no daemon has {database} open")?;
    Ok(())
}

/// Prints what the server does to the consumer while nobody pulls. A pause does not depend on the answer.
async fn warn_of_the_server(config: &Config, out: &mut impl Write) -> io::Result<()> {
    let asked = tokio::time::timeout(ANSWER_PATIENCE, async {
        let visit = connection::connect_command(&config.nats).await.map_err(|error| chain(&error))?;
        look_for_command(&visit, &config.consumer).await.map_err(|error| chain(&error))
    });
    match asked.await.unwrap_or_else(|_| Err("no answer from the server".to_owned())) {
        Ok(found) => match gate::during_a_pause(&found.stream, &found.consumer) {
            Some(danger) => writeln!(out, "warning: {danger}"),
            None => Ok(()),
        },
        Err(error) => {
            writeln!(out, "warning: not known whether the server deletes the consumer during the pause: {error}")
        }
    }
}

/// Removes the marker. A daemon that is not paused is not an error: the result is what the operator asked for.
pub fn resume(config: &Config, out: &mut impl Write) -> Result<(), PauseError> {
    let database = &config.database;
    let was = store::paused(database)?;
    match store::end_pause(database)? {
        true => writeln!(out, "resumed; it was paused {}", was.unwrap_or_default())?,
        false => writeln!(out, "it was not paused")?,
    }
    Ok(())
}
