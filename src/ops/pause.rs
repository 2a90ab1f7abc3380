//! `pause` and `resume`: the daemon lets go of the database, so that it can be serviced, and goes on afterwards.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use tokio::time::Instant;

use crate::config::Config;
use crate::ops::operator;
use crate::store::OpenError;
use crate::store::sqlite::lock;
use crate::store::sqlite::pause::{self, Pause};

/// What the daemon may need beyond `shutdown.timeout`, which bounds its drain: to see the marker, and to close.
const GRACE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct PauseArgs {
    /// Why, for whoever looks at the status meanwhile
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Return at once, also while the daemon still has the database open
    #[arg(long)]
    no_wait: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    #[error("cannot write {}", .0.display())]
    Write(PathBuf, #[source] io::Error),
    #[error("cannot remove {}", .0.display())]
    Remove(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error("cannot look who has the database open")]
    Look(#[source] io::Error),
    #[error(
        "paused, but {holder} still has {} open after {} s; see its log, `order-processor resume` calls the pause off",
        database.display(), waited.as_secs()
    )]
    Held { database: PathBuf, holder: String, waited: Duration },
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Puts the marker there and waits until nobody has the database open.
pub async fn pause(config: &Config, args: PauseArgs, out: &mut impl Write) -> Result<(), PauseError> {
    let database = &config.database.path;
    let at = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let ours = Pause { by: operator(), at, reason: args.reason };
    let failed = |error| PauseError::Write(pause::marker(database), error);
    match pause::begin(database, &ours) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let theirs = pause::look(database)?.unwrap_or_default();
            writeln!(out, "was paused already {theirs}")?;
        }
        Err(error) => return Err(failed(error)),
    }
    if args.no_wait {
        writeln!(out, "paused; the daemon lets go of {} when it has finished what it holds", database.display())?;
        return Ok(());
    }
    let patience = config.shutdown.timeout + GRACE;
    let deadline = Instant::now() + patience;
    while let Some(holder) = lock::held_by(database).map_err(PauseError::Look)? {
        if Instant::now() >= deadline {
            return Err(PauseError::Held { database: database.clone(), holder, waited: patience });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    writeln!(out, "paused; no daemon has {} open", database.display())?;
    Ok(())
}

/// Takes the marker away. Not to be paused is no error: the end is what was asked for.
pub fn resume(config: &Config, out: &mut impl Write) -> Result<(), PauseError> {
    let database = &config.database.path;
    let failed = |error| PauseError::Remove(pause::marker(database), error);
    let was = pause::look(database)?;
    match (pause::end(database), was) {
        (Ok(()), was) => writeln!(out, "resumed; it was paused {}", was.unwrap_or_default())?,
        (Err(error), _) if error.kind() == io::ErrorKind::NotFound => writeln!(out, "it was not paused")?,
        (Err(error), _) => return Err(failed(error)),
    }
    Ok(())
}
