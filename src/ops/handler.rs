//! The handler file for the commands that apply orders, and the commands `handler …`.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand};

use self::attempt::{HandlerTryArgs, attempt};
use self::init::{HandlerInitArgs, init};
use crate::config::{Config, Database};
use crate::handler::Handler;
use crate::handler::http::Place;
use crate::handler::routes::{LoadError, Routes};
use crate::store::{OpenError, Scratch};

mod attempt;
mod init;

/// Why there is no handler.
#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("handler.file is set, but this daemon has its own handler in Rust; remove the setting")]
    OwnHandler,
    #[error("no handler file: name one, or set handler.file")]
    NoFile,
    #[error("cannot read the payload {}", path.display())]
    Payload { path: PathBuf, source: io::Error },
    #[error("cannot write the example")]
    Init(#[source] io::Error),
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

#[derive(Debug, Subcommand)]
pub enum HandlerCommand {
    /// Check a handler file without a server and without a change to any database; exit 2 if something is wrong
    Check(HandlerCheckArgs),
    /// Show what the routes would do with one order; exit 1 if the order would not be applied
    Try(HandlerTryArgs),
    /// Write an example into a folder
    Init(HandlerInitArgs),
}

#[derive(Debug, Args)]
pub struct HandlerCheckArgs {
    /// The handler file [default: handler.file of the settings]
    file: Option<PathBuf>,
    /// Check against a copy of the schema of this SQLite file, instead of a new database
    #[arg(long, value_name = "FILE")]
    database: Option<PathBuf>,
}

pub async fn run(config: &Config, command: HandlerCommand, out: &mut impl Write) -> Result<bool, HandlerError> {
    match command {
        HandlerCommand::Check(args) => check(config, args, out).await.map(|()| true),
        HandlerCommand::Try(args) => attempt(config, args, out).await,
        HandlerCommand::Init(args) => init(&args, out).map(|()| true).map_err(HandlerError::Init),
    }
}

async fn check(config: &Config, args: HandlerCheckArgs, out: &mut impl Write) -> Result<(), HandlerError> {
    let file = args.file.as_ref().or(config.handler.file.as_ref()).ok_or(HandlerError::NoFile)?;
    let database = args.database.map(existing).transpose()?;
    let routes = load(config, file, database.as_ref()).await?;
    writeln!(out, "ok    {}", routes.summary())?;
    Ok(())
}

/// A database that must be there: a mistyped name would be a new database.
fn existing(path: PathBuf) -> Result<Database, OpenError> {
    if path.exists() { Ok(Database::Sqlite(path)) } else { Err(OpenError::Missing(path)) }
}

/// The handler of the settings: the routes of `handler.file`, or else the one that the program was built with.
pub async fn chosen(
    config: &Config,
    own: Arc<dyn Handler>,
    is_built_in: bool,
) -> Result<Arc<dyn Handler>, HandlerError> {
    match &config.handler.file {
        None => Ok(own),
        Some(_) if !is_built_in => Err(HandlerError::OwnHandler),
        Some(file) => Ok(Arc::new(load(config, file, Some(&config.database)).await?)),
    }
}

/// Reads and checks a handler file. The schema of `database` is copied, if there is one.
pub async fn load(config: &Config, file: &Path, database: Option<&Database>) -> Result<Routes, HandlerError> {
    with_scratch(config, file, &mut scratch(database).await?).await
}

async fn scratch(database: Option<&Database>) -> Result<Scratch, HandlerError> {
    match database {
        Some(database) => Ok(Scratch::copy_of(database).await?),
        None => Ok(Scratch::empty().await.map_err(LoadError::Database)?),
    }
}

async fn with_scratch(config: &Config, file: &Path, scratch: &mut Scratch) -> Result<Routes, HandlerError> {
    let variables: HashMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let place = Place {
        folder: file.parent().unwrap_or_else(|| Path::new("")),
        environment: &|name| variables.get(name).cloned(),
        stream: &config.consumer.stream,
        shutdown_timeout: config.shutdown.timeout,
    };
    let (routes, warnings) = Routes::load(file.to_owned(), &place, scratch).await?;
    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(routes)
}
