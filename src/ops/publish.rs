//! `publish`: sends orders to the stream and counts only those that the server has stored.

use std::collections::VecDeque;
use std::future::IntoFuture;
use std::path::{Path, PathBuf};

use async_nats::HeaderMap;
use async_nats::jetstream::Context;
use async_nats::jetstream::context::{self, PublishAckFuture, PublishErrorKind};
use clap::{ArgGroup, Args};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};

use super::setup;
use crate::config::{Config, IdScope};
use crate::jetstream::connection::{self, CommandClient, ConnectError, Denials};
use crate::model::id::MESSAGE_ID_HEADER;
use crate::model::subject::SubjectPattern;
use crate::ops::progress::Progress;

/// Publishes whose receipt is awaited at a time; bounds memory and what is in doubt after a failure.
const IN_FLIGHT_MAX: usize = 512;
/// No server takes a larger message than this (nats-server's hard limit for max_payload), so no line needs more memory.
const LINE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Orders to publish: `--count` generated orders, or one order a line from a file or standard input.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("orders").required(true).args(["count", "file"])))]
pub struct PublishArgs {
    /// Publish this many orders, "Order Data 1" and so on
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    count: Option<u64>,
    /// File with one order a line; - for standard input
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Subject to publish on [default: new below the stream: ORDERS.new]
    #[arg(long)]
    subject: Option<String>,
    /// Number of the first order; in a FILE, the first line that is published
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    start: u64,
    /// Message ids are this text, a dash and the number; with the same text again, repeated orders are duplicates [default:
    /// random]
    #[arg(long, value_name = "TEXT")]
    id_prefix: Option<String>,
    /// Publish without the header Nats-Msg-Id; the daemon then uses inbox.id_pointer, or the place in the stream
    #[arg(long, conflicts_with = "id_prefix")]
    no_id: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot read {}", path.display())]
    Input {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("subject {0:?} cannot be published on; give one without white space, control characters, * and >")]
    Subject(String),
    #[error(
        "--id-prefix {0:?} cannot begin a message id; give text without control characters, and no white space in front"
    )]
    IdPrefix(String),
    #[error("--start {start} and --count {count} go beyond the largest number there is; give a smaller --start")]
    TooMany { start: u64, count: u64 },
    #[error("line {number} of {} is longer than any server accepts", path.display())]
    TooLong { path: PathBuf, number: u64 },
    #[error(
        "order {number} {problem} ({error}); {stored} were stored. Repeat from there with {rest} --start {number} {ids}"
    )]
    NotStored { number: u64, problem: &'static str, stored: u64, rest: String, ids: String, error: String },
    #[error(
        "stream {stream} has no_ack: the server sends no receipt, so `publish` does not know whether orders {number} to {last} are \
         stored. All of them were sent. Check with `nats stream info {stream}` before you repeat them. With no_ack = false, the server \
         sends receipts"
    )]
    NoReceipts { stream: String, number: u64, last: u64 },
}

impl std::fmt::Display for Published {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "published {}, of which {} were known already", self.stored, self.duplicates)
    }
}

impl PublishError {
    /// Whether other flags are needed, so that nothing was tried.
    pub fn is_about_flags(&self) -> bool {
        match self {
            Self::Subject(_) | Self::IdPrefix(_) | Self::TooMany { .. } => true,
            Self::Connect(_)
            | Self::Input { .. }
            | Self::TooLong { .. }
            | Self::NotStored { .. }
            | Self::NoReceipts { .. } => false,
        }
    }
}

/// The result.
#[derive(Debug, Default)]
pub struct Published {
    pub stored: u64,
    /// Of these, the server knew the message id already.
    pub duplicates: u64,
}

/// Publishes in order. Returns when the server has confirmed each.
pub async fn run(config: &Config, args: PublishArgs) -> Result<Published, PublishError> {
    let subject = args.subject.unwrap_or_else(|| subject_of(&config.consumer.stream));
    // The server would store a wildcard as an ordinary name, and no filter would match it as expected.
    if subject.is_empty() || subject.contains(|c: char| c.is_whitespace() || c.is_control() || c == '*' || c == '>') {
        return Err(PublishError::Subject(subject));
    }
    let prefix = (!args.no_id).then(|| args.id_prefix.unwrap_or_else(|| format!("{:08x}", fastrand::u32(..))));
    // A header cannot hold control characters, and loses white space in front on its way.
    let is_bad = |prefix: &String| {
        prefix.is_empty() || prefix.starts_with(char::is_whitespace) || prefix.contains(char::is_control)
    };
    if let Some(prefix) = prefix.as_ref().filter(|prefix| is_bad(prefix)) {
        return Err(PublishError::IdPrefix(prefix.clone()));
    }
    if prefix.is_some() && args.file.is_some() && config.inbox.id_pointer.is_some() {
        tracing::info!(
            "the orders get the header Nats-Msg-Id, which wins over inbox.id_pointer; --no-id omits the header"
        );
    }
    if let IdScope::Header(name) = &config.inbox.id_scope
        && (prefix.is_some() || config.inbox.id_pointer.is_some())
    {
        tracing::warn!(
            "the orders do not have the header {name}, which inbox.id_scope needs, so their ids are missing; to set the header, \
             publish with another client, for example `nats pub -H {name}:VALUE SUBJECT BODY`"
        );
    }
    let (start, count) = (args.start, args.count.unwrap_or_default());
    let end = start.checked_add(count).ok_or(PublishError::TooMany { start, count })?;
    let CommandClient { client, denials } = connection::connect_command(&config.nats).await?;
    let mut publisher = PublishRun {
        jetstream: client.jetstream(),
        denials,
        subject,
        stream: config.consumer.stream.clone(),
        prefix,
        number: start,
        end,
        file: args.file.clone(),
        in_flight: VecDeque::with_capacity(IN_FLIGHT_MAX),
        published: Published::default(),
        progress: Progress::new(args.count),
    };
    match args.file {
        Some(path) if path.as_os_str() == "-" => publisher.lines(&path, tokio::io::stdin(), start).await?,
        Some(path) => {
            let file = tokio::fs::File::open(&path).await;
            let file = file.map_err(|source| PublishError::Input { path: path.clone(), source })?;
            publisher.lines(&path, file, start).await?;
        }
        None => {
            while publisher.number < end {
                let payload = format!("Order Data {}", publisher.number);
                publisher.publish(payload.into_bytes()).await?;
            }
        }
    }
    publisher.finish().await
}

/// The subject if none is given.
fn subject_of(stream: &str) -> String {
    format!("{stream}.new")
}

/// Quoted for a shell, as one word.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:@%+=,".contains(c);
    if text.chars().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

struct PublishRun {
    jetstream: Context,
    denials: Denials,
    subject: String,
    stream: String,
    /// Without it, no order gets an id.
    prefix: Option<String>,
    number: u64,
    /// One after the last number, without a file.
    end: u64,
    file: Option<PathBuf>,
    in_flight: VecDeque<(u64, PublishAckFuture)>,
    published: Published,
    progress: Progress,
}

impl PublishRun {
    /// One order a line; empty lines count and are skipped, so that a number is a line number. Begins at line `start`.
    async fn lines(&mut self, path: &Path, input: impl AsyncRead + Unpin, start: u64) -> Result<(), PublishError> {
        let failed = |source| PublishError::Input { path: path.to_owned(), source };
        let mut input = BufReader::new(input);
        let mut line = Vec::new();
        let mut number = 0;
        loop {
            line.clear();
            if (&mut input).take(LINE_BYTES_MAX).read_until(b'\n', &mut line).await.map_err(failed)? == 0 {
                return Ok(());
            }
            number += 1;
            if line.len() as u64 == LINE_BYTES_MAX {
                return Err(PublishError::TooLong { path: path.to_owned(), number });
            }
            let order = line.strip_suffix(b"\n").unwrap_or(&line);
            let order = order.strip_suffix(b"\r").unwrap_or(order);
            if number >= start && !order.is_empty() {
                self.number = number;
                self.publish(order.to_owned()).await?;
            }
        }
    }

    async fn publish(&mut self, payload: Vec<u8>) -> Result<(), PublishError> {
        if self.in_flight.len() >= IN_FLIGHT_MAX {
            self.receipt().await?;
        }
        let mut headers = HeaderMap::new();
        if let Some(prefix) = &self.prefix {
            headers.insert(MESSAGE_ID_HEADER, format!("{prefix}-{}", self.number).as_str());
        }
        let sent = self.jetstream.publish_with_headers(self.subject.clone(), headers, payload.into()).await;
        let receipt = match sent {
            Ok(receipt) => receipt,
            Err(error) => return Err(self.not_stored(self.number, error).await),
        };
        self.in_flight.push_back((self.number, receipt));
        self.number += 1;
        Ok(())
    }

    /// Waits for the oldest receipt that is due.
    async fn receipt(&mut self) -> Result<(), PublishError> {
        let Some((number, receipt)) = self.in_flight.pop_front() else { return Ok(()) };
        let receipt = match receipt.into_future().await {
            Ok(receipt) => receipt,
            Err(error) => return Err(self.not_stored(number, error).await),
        };
        self.published.stored += 1;
        self.published.duplicates += u64::from(receipt.duplicate);
        if self.progress.advance(self.published.stored) {
            tracing::info!(stored = self.published.stored, "publishing");
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<Published, PublishError> {
        while !self.in_flight.is_empty() {
            self.receipt().await?;
        }
        self.progress.finish();
        Ok(std::mem::take(&mut self.published))
    }

    async fn not_stored(&self, number: u64, error: context::PublishError) -> PublishError {
        let stored = self.published.stored;
        let ids = match &self.prefix {
            Some(prefix) => format!("--id-prefix {}", quoted(prefix)),
            None => "--no-id".to_owned(),
        };
        let mut rest = match &self.file {
            Some(path) => quoted(&path.display().to_string()),
            None => format!("--count {}", self.end - number),
        };
        // The next run needs the options of this one.
        if self.subject != subject_of(&self.stream) {
            rest = format!("{rest} --subject {}", quoted(&self.subject));
        }
        let is_unknown = matches!(error.kind(), PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe);
        if is_unknown && self.sends_no_receipts().await {
            return PublishError::NoReceipts { stream: self.stream.clone(), number, last: self.number - 1 };
        }
        let problem = match is_unknown && self.denials.last().is_none() {
            true => "has no receipt, and may be stored",
            false => "was not stored",
        };
        let error = match error.kind() {
            PublishErrorKind::StreamNotFound => {
                format!("no stream has the subject {}; {}", self.subject, self.remedy().await)
            }
            _ => self.denials.last().map_or_else(|| error.to_string(), |denied| denied.to_string()),
        };
        PublishError::NotStored { number, problem, stored, rest, ids, error }
    }

    /// Whether the subject belongs to the stream, and the stream has `no_ack`.
    async fn sends_no_receipts(&self) -> bool {
        let Ok(Ok(stream)) = self.denials.answer(self.jetstream.get_stream(&self.stream)).await else { return false };
        let config = &stream.cached_info().config;
        let has_subject =
            |filter: &String| filter.parse::<SubjectPattern>().is_ok_and(|pattern| pattern.matches(&self.subject));
        config.no_ack && config.subjects.iter().any(has_subject)
    }

    /// What helps if no stream has the subject.
    async fn remedy(&self) -> String {
        let stream = &self.stream;
        match self.denials.answer(self.jetstream.get_stream(stream)).await {
            Ok(Ok(found)) => {
                let subjects = found.cached_info().config.subjects.join(", ");
                format!("stream {stream} has {subjects}: choose one of these with --subject")
            }
            Ok(Err(error)) if setup::is_missing_stream(error.kind()) => {
                "create it with `order-processor setup`".to_owned()
            }
            // The login may lack the permission for the question.
            Ok(Err(_)) | Err(_) => {
                format!(
                    "if stream {stream} exists, choose one of its subjects with --subject, else run `order-processor setup`"
                )
            }
        }
    }
}
