//! `teardown`: deletes what the story made. It tells what is lost, and asks.

use std::io::Write;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::DeleteStreamErrorKind;
use async_nats::jetstream::stream::ConsumerErrorKind;
use clap::Args;

use super::confirmed;
use super::setup::{Server, SetupError, refused};
use crate::config::Config;
use crate::jetstream::deletion::{self, RECREATE};

/// What `teardown` removes.
#[derive(Debug, Args)]
pub struct TeardownArgs {
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Delete the consumer only and keep the stream
    #[arg(long)]
    consumer_only: bool,
}

/// Deletes the consumer, and the stream with every message in it unless that is to stay.
pub async fn teardown(config: &Config, args: TeardownArgs, out: &mut impl Write) -> Result<(), SetupError> {
    let server = Server::connect(config).await?;
    if args.consumer_only { consumer(&server, args.yes, out).await } else { stream(&server, args.yes, out).await }
}

async fn consumer(server: &Server<'_>, yes: bool, out: &mut impl Write) -> Result<(), SetupError> {
    let (stream, consumer) = (&server.names.stream, &server.names.name);
    let missing = || SetupError::Missing(format!("consumer {consumer} of stream {stream}"));
    let found = server.stream().await?.ok_or_else(|| SetupError::Missing(format!("stream {stream}")))?;
    let info = server.consumer(&found).await?.ok_or_else(missing)?;
    writeln!(out, "consumer {consumer} will be deleted:")?;
    for fact in deletion::consequences(found.cached_info(), &info) {
        writeln!(out, "- {fact}")?;
    }
    if deletion::loses_messages(found.cached_info(), &info) {
        writeln!(
            out,
            "To lose no message: stop the publishers, wait until `order-processor status` shows nothing pending, then repeat this \
             command. To replace the consumer: `{RECREATE}`"
        )?;
    }
    ask(yes, &format!("Delete consumer {consumer}? Type its name to confirm: "), consumer, || {
        format!("this deletes consumer {consumer} of stream {stream}")
    })?;
    let deleted = server.denials.answer(server.jetstream.delete_consumer_from_stream(consumer, stream)).await?;
    deleted.map_err(|error| match error.kind() {
        ConsumerErrorKind::JetStream(error) if error.error_code() == ErrorCode::CONSUMER_NOT_FOUND => missing(),
        _ => refused(format!("delete consumer {consumer}"), error),
    })?;
    writeln!(out, "consumer {consumer} deleted")?;
    Ok(())
}

async fn stream(server: &Server<'_>, yes: bool, out: &mut impl Write) -> Result<(), SetupError> {
    let stream = &server.names.stream;
    let missing = || SetupError::Missing(format!("stream {stream}"));
    let found = server.stream().await?.ok_or_else(missing)?;
    let state = &found.cached_info().state;
    let unprocessed = match server.consumer(&found).await? {
        Some(info) => format!(", of which {} are not processed", deletion::waiting(&info)),
        None => String::new(),
    };
    writeln!(
        out,
        "stream {stream} will be deleted: {} messages{unprocessed}, {} consumers",
        state.messages, state.consumer_count
    )?;
    ask(yes, &format!("Delete stream {stream} and every message in it? Type its name to confirm: "), stream, || {
        format!("this deletes every message of stream {stream}")
    })?;
    let deleted = server.denials.answer(server.jetstream.delete_stream(stream)).await?;
    deleted.map_err(|error| match error.kind() {
        DeleteStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => missing(),
        _ => refused(format!("delete stream {stream}"), error),
    })?;
    writeln!(out, "stream {stream} deleted, and its consumers with it")?;
    Ok(())
}

/// Goes on only with the operator's consent.
pub(super) fn ask(yes: bool, question: &str, answer: &str, what: impl Fn() -> String) -> Result<(), SetupError> {
    if yes {
        return Ok(());
    }
    match confirmed(question, answer)? {
        Some(true) => Ok(()),
        Some(false) => Err(SetupError::Declined),
        None => Err(SetupError::NotConfirmed(what())),
    }
}
