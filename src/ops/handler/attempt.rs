//! `handler try`: one order through the routes, in a scratch database.

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::time::SystemTime;

use clap::Args;

use super::{HandlerError, existing, scratch, with_scratch};
use crate::config::Config;
use crate::model::delivery::{Delivery, Position, Raw};
use crate::model::id::MESSAGE_ID_HEADER;
use crate::model::schemes::IdSchemes;
use crate::model::time::unix_ns;
use crate::worker::message_ids;

#[derive(Debug, Args)]
pub struct HandlerTryArgs {
    /// The handler file [default: handler.file of the settings]
    file: Option<PathBuf>,
    /// The subject of the order
    #[arg(long)]
    subject: String,
    /// A file with the payload; - is standard input
    #[arg(long, value_name = "FILE|-")]
    payload: PathBuf,
    /// The message id, as the header Nats-Msg-Id
    #[arg(long)]
    id: Option<String>,
    /// A header of the message; may be given several times
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Use a copy of the schema of this SQLite file, instead of a new database. Its rows are not copied
    #[arg(long, value_name = "FILE")]
    database: Option<PathBuf>,
    /// Call the endpoint of a route with http
    #[arg(long)]
    call: bool,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    if name.is_empty() { Err("the name is empty".to_owned()) } else { Ok((name.to_owned(), value.to_owned())) }
}

/// `false` if the order would not be applied.
pub async fn attempt(config: &Config, args: HandlerTryArgs, out: &mut impl Write) -> Result<bool, HandlerError> {
    let file = args.file.as_ref().or(config.handler.file.as_ref()).ok_or(HandlerError::NoFile)?;
    let database = args.database.map(existing).transpose()?;
    let mut scratch = scratch(database.as_ref()).await?;
    let routes = with_scratch(config, file, &mut scratch).await?;
    let payload = match args.payload.as_os_str().to_str() {
        Some("-") => {
            let mut payload = Vec::new();
            io::stdin().read_to_end(&mut payload).map(|_| payload)
        }
        Some(_) | None => std::fs::read(&args.payload),
    };
    let payload = payload.map_err(|source| HandlerError::Payload { path: args.payload.clone(), source })?;
    let mut headers = args.headers;
    headers.extend(args.id.map(|id| (MESSAGE_ID_HEADER.to_owned(), id)));
    let published_ns = unix_ns(SystemTime::now());
    let position = Position { delivered: 1, stream_seq: 1, consumer_seq: 1, published_ns };
    let raw = Raw { subject: args.subject.into(), headers, payload: payload.into(), position, unreadable: None };
    let delivery = Delivery::new(raw, &IdSchemes::unchanged(&message_ids::wanted(config)));
    let trial = routes.try_out(scratch.connection(), delivery, args.call).await;
    for line in &trial.lines {
        writeln!(out, "{line}")?;
    }
    writeln!(out, "nothing was changed")?;
    Ok(trial.passed)
}
