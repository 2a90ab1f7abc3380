//! `setup`: creates the stream and the consumer, and changes them on request. It never deletes a message.

use std::io::Write;
use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy, Info as ConsumerInfo};
use async_nats::jetstream::context::{ConsumerInfoErrorKind, CreateStreamErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{self, ConsumerErrorKind, DiscardPolicy, RetentionPolicy, StorageType, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use clap::{Args, ValueEnum};

use super::teardown::ask;
use crate::config::{self, ByteSize, Config};
use crate::jetstream::connection::{self, CommandClient, ConnectError, Denials, Denied};
use crate::jetstream::gate::{self, Expectations, Severity};

mod edit;
mod recreate;

const MAX_BYTES: u64 = 10 * 1024 * 1024 * 1024;
const MAX_AGE: Duration = Duration::from_secs(30 * 24 * 3600);
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
const ACK_WAIT: Duration = Duration::from_secs(30);
const MAX_ACK_PENDING: i64 = 10_000;

/// What `setup` creates. The defaults suit those of the daemon. If stream or consumer exists, only the given options count.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Change what exists to the options that are given here, and nothing else
    #[arg(long)]
    update: bool,
    /// Delete the consumer and create it again with the same filter and position, for what the server cannot edit; asks
    /// first
    #[arg(long, conflicts_with = "update")]
    recreate: bool,
    /// Do not ask
    #[arg(long)]
    yes: bool,
    /// Subjects of the stream [default: all one level below the stream: ORDERS.*]
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<String>,
    /// The server deletes the oldest messages above this size of the stream; 0 for no limit [default: 10GiB]
    #[arg(long, allow_hyphen_values = true)]
    max_bytes: Option<ByteSize>,
    /// The server deletes messages that are older than this; 0s for no limit [default: 30d]
    #[arg(long, allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    max_age: Option<Duration>,
    /// How long the server recognises a repeated Nats-Msg-Id by itself [default: 2m]
    #[arg(long, allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    duplicate_window: Option<Duration>,
    /// Copies of the stream in a cluster [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    replicas: Option<usize>,
    /// Subjects that the consumer is for [default: all of the stream]
    #[arg(long, value_delimiter = ',')]
    filter: Vec<String>,
    /// Sequence of the first message that the consumer delivers [default: the first of the stream]
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    start_seq: Option<u64>,
    /// How long a delivery may stay unacknowledged [default: 30s]
    #[arg(long, allow_hyphen_values = true, value_parser = ack_wait)]
    ack_wait: Option<Duration>,
    /// Messages that may be delivered and not yet acknowledged; -1 for no limit [default: 10000]
    #[arg(long, allow_negative_numbers = true)]
    max_ack_pending: Option<i64>,
    /// With --update: settings to remove from the consumer (consumer-limits: from the stream)
    #[arg(long, value_delimiter = ',', value_name = "SETTING")]
    unset: Vec<Unset>,
}

/// Settings that the start gate refuses or warns of, and that the server can remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Unset {
    MaxDeliver,
    Backoff,
    InactiveThreshold,
    HeadersOnly,
    /// The bytes of one pull.
    MaxRequestBytes,
    ConsumerLimits,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupResult {
    Good,
    /// What exists differs from what was asked for, and was left as it is.
    Differs,
    /// The daemon would refuse the consumer.
    Refused,
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
    #[error(
        "stream {stream} has consumer_limits.inactive_threshold {threshold}: the server would give it to the consumer, and would \
         delete the consumer after {threshold} without a pull; run `order-processor setup --update --unset consumer-limits`"
    )]
    WouldBeDeleted { stream: String, threshold: String },
    #[error(
        "--max-ack-pending {wanted} is above consumer_limits.max_ack_pending {limit} of stream {stream}: choose at most {limit}, or \
         remove the limit with `order-processor setup --update --unset consumer-limits`"
    )]
    AboveLimit { stream: String, wanted: i64, limit: i64 },
    #[error("{0}: confirm it with --yes")]
    NotConfirmed(String),
    #[error("nothing was changed")]
    Declined,
    #[error("{0} does not exist")]
    Missing(String),
    #[error("cannot write the answer")]
    Output(#[from] std::io::Error),
}

/// Creates stream and consumer where they are missing. What exists is changed only on request.
pub async fn setup(config: &Config, args: SetupArgs, out: &mut impl Write) -> Result<SetupResult, SetupError> {
    let server = Server::connect(config).await?;
    let (stream_name, consumer_name) = (&config.consumer.stream, &config.consumer.name);
    let mut differs = false;
    let stream = match server.stream().await? {
        Some(stream) => {
            let asked = edit::of_stream(&args);
            differs |= edit::apply(&server, edit::SetupTarget::Stream, asked, &args, stream.cached_info(), out).await?;
            // With what was edited.
            server.stream().await?.ok_or_else(|| SetupError::Missing(format!("stream {stream_name}")))?
        }
        None => create_stream(&server, &args, out).await?,
    };
    require_within_limits(&args, &stream)?;
    match server.consumer(&stream).await? {
        Some(old) if args.recreate => recreate::run(&server, &stream, &old, &args, out).await?,
        Some(_) => {
            let asked = edit::of_consumer(&args);
            differs |=
                edit::apply(&server, edit::SetupTarget::Consumer, asked, &args, stream.cached_info(), out).await?;
        }
        None => {
            let wanted = wanted_consumer(consumer_name, &args, None, &stream)?;
            server.create_consumer(&stream, wanted).await?;
            writeln!(out, "consumer {consumer_name} created")?;
        }
    }
    let passes = report_findings(config, &server, &stream, out).await?;
    Ok(match (passes, differs) {
        (false, _) => SetupResult::Refused,
        (true, true) => SetupResult::Differs,
        (true, false) => SetupResult::Good,
    })
}

async fn create_stream(server: &Server<'_>, args: &SetupArgs, out: &mut impl Write) -> Result<Stream, SetupError> {
    let name = &server.names.stream;
    if let Some(domain) = &server.domain {
        let what = format!(
            "this creates stream {name} in JetStream domain {domain}, the one of the server; if stream {name} exists in another \
             domain, set nats.domain to that domain, because a second stream takes a copy of each order"
        );
        writeln!(out, "{what}")?;
        ask(
            args.yes,
            &format!("Create stream {name} in domain {domain}? Type the name of the domain to confirm: "),
            domain,
            || what.clone(),
        )?;
    }
    let subjects = if args.subjects.is_empty() { vec![format!("{name}.*")] } else { args.subjects.clone() };
    let max_age = args.max_age.unwrap_or(MAX_AGE);
    let window = args.duplicate_window.unwrap_or(DUPLICATE_WINDOW);
    let wanted = stream::Config {
        name: name.clone(),
        subjects: subjects.clone(),
        retention: RetentionPolicy::Limits,
        storage: StorageType::File,
        discard: DiscardPolicy::Old,
        max_bytes: i64::try_from(args.max_bytes.map_or(MAX_BYTES, |size| size.0)).unwrap_or(i64::MAX),
        max_age,
        // The server refuses a duplicate window longer than `max_age`.
        duplicate_window: if max_age.is_zero() { window } else { window.min(max_age) },
        num_replicas: args.replicas.unwrap_or(1),
        ..Default::default()
    };
    let stream = match server.denials.answer(server.jetstream.create_stream(wanted)).await? {
        Ok(stream) => stream,
        Err(error) => {
            let what = format!("create stream {name}");
            return Err(match error.kind() {
                CreateStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_SUBJECT_OVERLAP => {
                    let subjects = subjects.join(", ");
                    let hint =
                        format!("{what} for {subjects}, which another stream has; choose others with --subjects");
                    refused(hint, error)
                }
                CreateStreamErrorKind::JetStream(error) => beyond_limit(&what, &error),
                _ => refused(what, error),
            });
        }
    };
    writeln!(out, "stream {name} created for {}", subjects.join(", "))?;
    Ok(stream)
}

/// Checked before anything is changed: a running daemon would refuse the changed consumer.
fn ack_wait(text: &str) -> Result<Duration, String> {
    let wait = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if wait < gate::ACK_WAIT_MIN {
        return Err(format!("at least {} is needed", humantime::format_duration(gate::ACK_WAIT_MIN)));
    }
    Ok(wait)
}

/// The server's own error does not name the setting of the stream.
fn require_within_limits(args: &SetupArgs, stream: &Stream) -> Result<(), SetupError> {
    let config = &stream.cached_info().config;
    let limit = config.consumer_limits.as_ref().map_or(0, |limits| limits.max_ack_pending);
    match args.max_ack_pending {
        Some(wanted) if limit > 0 && wanted > limit => {
            Err(SetupError::AboveLimit { stream: config.name.clone(), wanted, limit })
        }
        Some(_) | None => Ok(()),
    }
}

/// A consumer as the daemon needs it. `old`: the one that it replaces, whose filter, position and limits it keeps.
fn wanted_consumer(
    name: &str,
    args: &SetupArgs,
    old: Option<&ConsumerInfo>,
    stream: &Stream,
) -> Result<consumer::pull::Config, SetupError> {
    let stream = stream.cached_info();
    let limits = stream.config.consumer_limits.clone().unwrap_or_default();
    if !limits.inactive_threshold.is_zero() {
        let threshold = humantime::format_duration(limits.inactive_threshold).to_string();
        return Err(SetupError::WouldBeDeleted { stream: stream.config.name.clone(), threshold });
    }
    let kept = old.map(|old| &old.config);
    let kept_ack_wait = kept.map(|kept| kept.ack_wait).filter(|wait| *wait >= gate::ACK_WAIT_MIN);
    let kept_max = kept.map(|kept| kept.max_ack_pending).filter(|max| *max != 0);
    let default_max =
        if limits.max_ack_pending > 0 { MAX_ACK_PENDING.min(limits.max_ack_pending) } else { MAX_ACK_PENDING };
    let filters = if args.filter.is_empty() {
        kept.map(crate::jetstream::deletion::filters).unwrap_or_default()
    } else {
        args.filter.clone()
    };
    let deliver_policy = match (args.start_seq, old) {
        // The beginning has a name of its own, and a work queue takes no other policy.
        (Some(0 | 1), _) => DeliverPolicy::All,
        (Some(start_sequence), _) => DeliverPolicy::ByStartSequence { start_sequence },
        (None, Some(old)) => recreate::position(stream, old),
        (None, None) => DeliverPolicy::All,
    };
    let mut wanted = consumer::pull::Config {
        durable_name: Some(name.to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: args.ack_wait.or(kept_ack_wait).unwrap_or(ACK_WAIT),
        max_ack_pending: args.max_ack_pending.or(kept_max).unwrap_or(default_max),
        deliver_policy,
        description: kept.and_then(|kept| kept.description.clone()),
        metadata: kept.map(recreate::metadata).unwrap_or_default(),
        ..Default::default()
    };
    // A server before 2.10 knows no list.
    match <[String; 1]>::try_from(filters) {
        Ok([filter]) => wanted.filter_subject = filter,
        Err(filters) => wanted.filter_subjects = filters,
    }
    Ok(wanted)
}

/// The server that the stream is on, for commands that change something there.
pub(super) struct Server<'a> {
    pub(super) jetstream: Context,
    /// The JetStream domain of the server, if no setting tells which domain is meant.
    domain: Option<String>,
    pub(super) denials: Denials,
    pub(super) names: &'a config::ConsumerNames,
}

impl<'a> Server<'a> {
    pub(super) async fn connect(config: &'a Config) -> Result<Self, SetupError> {
        let CommandClient { client, denials } = connection::connect_command(&config.nats).await?;
        Ok(Self {
            jetstream: client.jetstream(),
            domain: client.unconfirmed_domain(),
            denials,
            names: &config.consumer,
        })
    }

    /// `None` if there is no such stream.
    pub(super) async fn stream(&self) -> Result<Option<Stream>, SetupError> {
        let name = &self.names.stream;
        match self.denials.answer(self.jetstream.get_stream(name)).await? {
            Ok(stream) => Ok(Some(stream)),
            Err(error) if is_missing_stream(error.kind()) => Ok(None),
            Err(error) => Err(refused(format!("return stream {name}"), error)),
        }
    }

    /// `None` if there is no such consumer.
    pub(super) async fn consumer(&self, stream: &Stream) -> Result<Option<ConsumerInfo>, SetupError> {
        let name = &self.names.name;
        match self.denials.answer(stream.consumer_info(name)).await? {
            Ok(info) => Ok(Some(info)),
            Err(error) if matches!(error.kind(), ConsumerInfoErrorKind::NotFound) => Ok(None),
            Err(error) => Err(refused(format!("return consumer {name}"), error)),
        }
    }

    async fn create_consumer(&self, stream: &Stream, wanted: consumer::pull::Config) -> Result<(), SetupError> {
        let what = format!("create consumer {}", wanted.durable_name.as_deref().unwrap_or_default());
        let created = self.denials.answer(stream.create_consumer(wanted)).await?;
        created.map(drop).map_err(|error| match error.kind() {
            ConsumerErrorKind::JetStream(error) => beyond_limit(&what, &error),
            _ => refused(what, error),
        })
    }

    async fn delete_consumer(&self, stream: &Stream, name: &str) -> Result<(), SetupError> {
        let deleted = self.denials.answer(stream.delete_consumer(name)).await?;
        deleted.map(drop).map_err(|error| refused(format!("delete consumer {name}"), error))
    }
}

/// Prints what the daemon would say of stream and consumer. `false` if it would not start.
async fn report_findings(
    config: &Config,
    server: &Server<'_>,
    stream: &Stream,
    out: &mut impl Write,
) -> Result<bool, SetupError> {
    let name = &config.consumer.name;
    let consumer = server.consumer(stream).await?.ok_or_else(|| SetupError::Missing(format!("consumer {name}")))?;
    let findings = gate::examine(stream.cached_info(), &consumer, Expectations::of(config));
    for finding in &findings {
        writeln!(out, "{}: {}", finding.severity.name(), finding.text)?;
    }
    Ok(findings.iter().all(|finding| finding.severity == Severity::Warned))
}

pub(super) fn is_missing_stream(kind: GetStreamErrorKind) -> bool {
    matches!(kind, GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND)
}

/// The answer of the server, and the flag to give if a limit of the server, the account or the stream is the cause.
fn beyond_limit(what: &str, error: &async_nats::jetstream::Error) -> SetupError {
    let hint = match error.error_code() {
        ErrorCode::STORAGE_RESOURCES_EXCEEDED | ErrorCode::ACCOUNT_RESOURCES_EXCEEDED => {
            " with more storage than the server or the account has left; choose less with --max-bytes"
        }
        ErrorCode::STREAM_MAX_STREAM_BYTES_EXCEEDED => {
            " with more bytes than the account allows for one stream; choose less with --max-bytes"
        }
        ErrorCode::STREAM_MAX_BYTES_REQUIRED => {
            " without a limit of its size, which the account requires; choose a size with --max-bytes"
        }
        ErrorCode::CONSUMER_MAX_PENDING_ACK_EXCESS => {
            " with more unacknowledged messages than the account or the stream allows; choose less with --max-ack-pending"
        }
        ErrorCode::MAXIMUM_STREAMS_LIMIT => {
            "; the account already has as many streams as it may have: delete one, or raise max_streams of the account"
        }
        ErrorCode::MAXIMUM_CONSUMERS_LIMIT => {
            "; the stream already has as many consumers as it or the account allows: delete one, or raise max_consumers"
        }
        ErrorCode::STREAM_REPLICAS_NOT_SUPPORTED
        | ErrorCode::CLUSTER_NO_PEERS
        | ErrorCode::INSUFFICIENT_RESOURCES
        | ErrorCode::NO_LIMITS => " with this number of copies; choose another one with --replicas",
        _ => "",
    };
    refused(format!("{what}{hint}"), error)
}

pub(super) fn refused(what: String, error: impl std::fmt::Display) -> SetupError {
    SetupError::Server { what, error: error.to_string() }
}
