//! `backup`: a consistent copy of the database, which is checked before it gets its name. The daemon may run.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use tokio_util::sync::CancellationToken;

use super::new_file::NewFile;
use crate::config::{Config, Database};
use crate::ops::progress::Progress;
use crate::ops::signals;
use crate::store::{self, Contents, OpenError};

const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct BackupArgs {
    /// Where the copy goes; must not exist
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error("{} exists; a backup overwrites nothing, choose another name", .0.display())]
    Exists(PathBuf),
    #[error("cannot write {}", .0.display())]
    Write(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("stopped; there is no backup")]
    Stopped,
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Copies, checks, syncs, and only then gives the copy its name.
pub async fn run(config: &Config, args: BackupArgs, out: &mut impl Write) -> Result<(), BackupError> {
    let stop = CancellationToken::new();
    signals::listen(stop.clone(), || {}).map_err(BackupError::Signals)?;
    // For SQLite, a name like "file:x" is a URI.
    let file = std::path::absolute(&args.file).map_err(|source| BackupError::Write(args.file.clone(), source))?;
    let making = make(&config.database, &file, &args.file);
    let Some(made) = stop.run_until_cancelled(making).await else { return Err(BackupError::Stopped) };
    let Contents { orders, processed_ids, dead_letters, last_stream_seq } = made?;
    let last = last_stream_seq.map_or_else(|| "none".to_owned(), |seq| seq.to_string());
    writeln!(
        out,
        "{}: {orders} orders, {processed_ids} ids, {dead_letters} dead letters, last stream sequence {last}",
        args.file.display()
    )?;
    Ok(())
}

/// `named` is the file as the operator wrote it.
async fn make(database: &Database, file: &Path, named: &Path) -> Result<Contents, BackupError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => BackupError::Exists(named.to_owned()),
        _ => BackupError::Write(file.to_owned(), source),
    };
    let new = NewFile::create(file).map_err(failed)?;
    let contents = tokio::select! {
        copied = store::backup(database, new.partial()) => copied?,
        never = show_progress(database, new.partial()) => match never {},
    };
    new.keep().map_err(failed)?;
    Ok(contents)
}

/// The size of the original is a bound: free pages are not copied. The check of the copy follows when all pages are copied.
async fn show_progress(database: &Database, copy: &Path) -> std::convert::Infallible {
    let total = store::sizes(database).database;
    let mut progress = Progress::of_bytes(total);
    let mut every = tokio::time::interval(LOOK_EVERY);
    loop {
        every.tick().await;
        let copied = std::fs::metadata(copy).map_or(0, |metadata| metadata.len());
        if progress.advance(copied) {
            tracing::info!(copied_bytes = copied, of_bytes = total, "the backup is being written");
        }
    }
}
