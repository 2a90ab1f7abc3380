//! `pause` and `resume`: the daemon lets go of the database, so that it can be serviced, and goes on afterwards.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use clap::Args;
use tokio::time::Instant;

use crate::config::{Config, Database};
use crate::ops::operator;
use crate::store::{self, Holder, OpenError, Pause};

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
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error(
        "paused, but {holder} still has {database} open after {} s; see its log, `order-processor resume` calls the pause off",
        waited.as_secs()
    )]
    Held { database: Database, holder: Holder, waited: Duration },
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Puts the marker there and waits until nobody has the database open.
pub async fn pause(config: &Config, args: PauseArgs, out: &mut impl Write) -> Result<(), PauseError> {
    let database = &config.database;
    let at = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
    let ours = Pause { by: operator(), at, reason: args.reason };
    if !store::begin_pause(database, &ours)? {
        let theirs = store::paused(database)?.unwrap_or_default();
        writeln!(out, "was paused already {theirs}")?;
    }
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

/// Takes the marker away. Not to be paused is no error: the end is what was asked for.
pub fn resume(config: &Config, out: &mut impl Write) -> Result<(), PauseError> {
    let database = &config.database;
    let was = store::paused(database)?;
    match store::end_pause(database)? {
        true => writeln!(out, "resumed; it was paused {}", was.unwrap_or_default())?,
        false => writeln!(out, "it was not paused")?,
    }
    Ok(())
}
