//! `setup` and `teardown`: the only commands that change anything on the server, and only when asked to.

use std::io::Write;
use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy};
use async_nats::jetstream::context::{
    ConsumerInfoErrorKind, CreateStreamErrorKind, DeleteStreamErrorKind, GetStreamErrorKind,
};
use async_nats::jetstream::stream::{self, ConsumerErrorKind, DiscardPolicy, RetentionPolicy, StorageType};
use async_nats::jetstream::{self, ErrorCode};
use clap::Args;

use crate::config::{ByteSize, Config};
use crate::jetstream::connection::{self, ConnectError, Denied, Visit};
use crate::jetstream::gate::{self, Expectations, Severity};
use crate::ops::confirmed;

/// Limits of what `setup` creates. The defaults fit the daemon's own.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Subjects of the stream [default: all one level below the stream: ORDERS.*]
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<String>,
    /// Oldest messages go when the stream is larger than this; 0 for no limit
    #[arg(long, default_value = "10GiB", allow_hyphen_values = true)]
    max_bytes: ByteSize,
    /// Messages go when they are older than this; 0s for no limit
    #[arg(long, default_value = "30d", allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    max_age: Duration,
    /// How long the server recognises a repeated Nats-Msg-Id by itself
    #[arg(long, default_value = "2m", allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    duplicate_window: Duration,
    /// Copies of the stream in a cluster
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    replicas: usize,
    /// How long a delivery may stay unacknowledged
    #[arg(long, default_value = "30s", allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    ack_wait: Duration,
    /// Messages that may be delivered and not yet acknowledged; -1 for no limit
    #[arg(long, default_value_t = 10_000, allow_negative_numbers = true)]
    max_ack_pending: i64,
}

/// What `teardown` removes.
#[derive(Debug, Args)]
pub struct TeardownArgs {
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Remove the consumer only and keep the stream with its messages
    #[arg(long)]
    consumer_only: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Denied(#[from] Denied),
    /// The client's text carries its source.
    #[error("the server refused to {what}: {error}")]
    Server { what: String, error: String },
    #[error("this deletes every message of stream {0}: confirm it with --yes")]
    NotConfirmed(String),
    #[error("nothing was deleted")]
    Declined,
    #[error("{0} does not exist")]
    Missing(String),
    #[error("cannot write the answer")]
    Output(#[from] std::io::Error),
}

/// Creates stream and consumer where they are missing. What exists is left as it is, and said so. `false` if the daemon would
/// refuse it.
pub async fn setup(config: &Config, args: SetupArgs, out: &mut impl Write) -> Result<bool, SetupError> {
    let Visit { client, denials } = connection::visit(&config.nats).await?;
    let jetstream = jetstream::new(client);
    let (stream_name, consumer_name) = (&config.consumer.stream, &config.consumer.name);
    let subjects = if args.subjects.is_empty() { vec![format!("{stream_name}.*")] } else { args.subjects };
    let stream = match denials.answer(jetstream.get_stream(stream_name)).await? {
        Ok(stream) => {
            writeln!(out, "stream {stream_name} exists, left as it is")?;
            stream
        }
        Err(error) if is_missing_stream(error.kind()) => {
            let wanted = stream::Config {
                name: stream_name.clone(),
                subjects: subjects.clone(),
                retention: RetentionPolicy::Limits,
                storage: StorageType::File,
                discard: DiscardPolicy::Old,
                max_bytes: i64::try_from(args.max_bytes.0).unwrap_or(i64::MAX),
                max_age: args.max_age,
                duplicate_window: duplicate_window(args.duplicate_window, args.max_age),
                num_replicas: args.replicas,
                ..Default::default()
            };
            let stream = match denials.answer(jetstream.create_stream(wanted)).await? {
                Ok(stream) => stream,
                Err(error) => {
                    let what = format!("create stream {stream_name}{}", hint(error.kind(), &subjects));
                    return Err(SetupError::Server { what, error: error.to_string() });
                }
            };
            writeln!(out, "stream {stream_name} created for {}", subjects.join(", "))?;
            stream
        }
        Err(error) => return Err(refused(format!("look at stream {stream_name}"), error)),
    };
    match denials.answer(stream.consumer_info(consumer_name)).await? {
        Ok(_) => writeln!(out, "consumer {consumer_name} exists, left as it is")?,
        Err(error) if matches!(error.kind(), ConsumerInfoErrorKind::NotFound) => {
            let wanted = consumer::pull::Config {
                durable_name: Some(consumer_name.clone()),
                ack_policy: AckPolicy::Explicit,
                ack_wait: args.ack_wait,
                max_ack_pending: args.max_ack_pending,
                ..Default::default()
            };
            let created = denials.answer(stream.create_consumer(wanted)).await?;
            created.map_err(|error| refused(format!("create consumer {consumer_name}"), error))?;
            writeln!(out, "consumer {consumer_name} created")?;
        }
        Err(error) => return Err(refused(format!("look at consumer {consumer_name}"), error)),
    }
    report_findings(config, &stream, out).await
}

/// Removes what the story made: the consumer, and the stream with every message in it.
pub async fn teardown(config: &Config, args: TeardownArgs, out: &mut impl Write) -> Result<(), SetupError> {
    let Visit { client, denials } = connection::visit(&config.nats).await?;
    let jetstream = jetstream::new(client);
    let (stream, consumer) = (&config.consumer.stream, &config.consumer.name);
    let question = format!("Delete stream {stream} and every message in it? Type its name to confirm: ");
    if !args.yes && !args.consumer_only {
        match confirmed(&question, stream)? {
            Some(true) => {}
            Some(false) => return Err(SetupError::Declined),
            None => return Err(SetupError::NotConfirmed(stream.clone())),
        }
    }
    if args.consumer_only {
        let deleted = denials.answer(jetstream.delete_consumer_from_stream(consumer, stream)).await?;
        deleted.map_err(|error| match error.kind() {
            ConsumerErrorKind::JetStream(error) if error.error_code() == ErrorCode::CONSUMER_NOT_FOUND => {
                SetupError::Missing(format!("consumer {consumer} of stream {stream}"))
            }
            ConsumerErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                SetupError::Missing(format!("stream {stream}"))
            }
            _ => refused(format!("delete consumer {consumer}"), error),
        })?;
        writeln!(out, "consumer {consumer} deleted")?;
        return Ok(());
    }
    let deleted = denials.answer(jetstream.delete_stream(stream)).await?;
    deleted.map_err(|error| match error.kind() {
        DeleteStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            SetupError::Missing(format!("stream {stream}"))
        }
        _ => refused(format!("delete stream {stream}"), error),
    })?;
    writeln!(out, "stream {stream} deleted, and its consumers with it")?;
    Ok(())
}

/// What exists may not be what the daemon needs: say so now, not at its start. `false` if the daemon would not start.
async fn report_findings(config: &Config, stream: &stream::Stream, out: &mut impl Write) -> Result<bool, SetupError> {
    let name = &config.consumer.name;
    let consumer = stream.consumer_info(name).await;
    let consumer = consumer.map_err(|error| refused(format!("look at consumer {name}"), error))?;
    let findings = gate::examine(stream.cached_info(), &consumer, Expectations::of(config));
    for finding in &findings {
        writeln!(out, "{}: {}", finding.severity.name(), finding.text)?;
    }
    Ok(findings.iter().all(|finding| finding.severity == Severity::Warned))
}

/// The server refuses a duplicate window longer than `max_age`.
fn duplicate_window(window: Duration, max_age: Duration) -> Duration {
    if max_age.is_zero() { window } else { window.min(max_age) }
}

fn is_missing_stream(kind: GetStreamErrorKind) -> bool {
    matches!(kind, GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

fn hint(kind: CreateStreamErrorKind, subjects: &[String]) -> String {
    match kind {
        CreateStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_SUBJECT_OVERLAP => {
            format!(" for {}, which another stream has; choose others with --subjects", subjects.join(", "))
        }
        CreateStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STORAGE_RESOURCES_EXCEEDED => {
            ", which has no room for so much; choose less with --max-bytes".to_owned()
        }
        _ => String::new(),
    }
}

fn refused(what: String, error: impl std::fmt::Display) -> SetupError {
    SetupError::Server { what, error: error.to_string() }
}
