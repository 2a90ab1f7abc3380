//! `find`: what became of one order, from the database and the server. It changes nothing, and the daemon does not need to run.
//!
//! The server is asked before the database: what an ack floor has passed is then in the database. A source that cannot be asked is
//! named in the answer.

use std::io::{self, Write};

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgAction, ArgGroup, Args};

use crate::config::Config;
use crate::handler::{Handler, planned};
use crate::model::delivery::{Delivery, Raw};
use crate::model::id::Digest;
use crate::model::schemes::IdSchemes;
use crate::model::text::chain;
use crate::ops::{Format, json_flag, status};
use crate::store::{self, IdRecord, OpenError, Reader, SeqRecord, Unbound};
use crate::worker::message_ids;

mod judge;
mod server;
mod text;

pub use judge::OrderVerdict;
use judge::{DaemonState, OrderFacts, judge};
use server::{ScanResult, ServerSource};

/// Below the options in `--help`.
pub const AFTER_HELP: &str = "\
ID is the message id: the header Nats-Msg-Id; the value at inbox.id_pointer behind its scope, by default the subject: \
\"ORDERS.new 4711\", in quotes; or the place of the message, ORDERS@PUBLISHED:SEQ. An id that begins with a dash needs -- before it.

An id that is in no table may wait in the stream. The server cannot look for an id, so find reads the messages above the ack floor, \
10000 at most and for 3 seconds at most. --scan reads the whole stream.

Exit code 0: the order was applied. 1: it was not applied; the verdict says why, and whether it still will be. 3: it is not known \
whether it was applied. 2: a flag or a setting is wrong, or the database cannot be opened.";

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("order").required(true).args(["id", "seq"])))]
pub struct FindArgs {
    /// Message id of the order
    #[arg(value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    id: Option<String>,
    /// Sequence of its message in the stream
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seq: Option<u64>,
    /// Ask the database only
    #[arg(long, conflicts_with = "scan")]
    no_server: bool,
    /// Read the whole stream for an id that is in no table
    #[arg(long, conflicts_with = "seq")]
    scan: bool,
    /// Print JSON
    #[arg(long = "json", action = ArgAction::SetTrue, value_parser = json_flag())]
    format: Format,
}

#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Prints the answer, and returns whether the order was applied; `None` if that is not known. `handler`: or why there is none.
pub async fn run(
    config: &Config,
    args: FindArgs,
    handler: Result<&dyn Handler, String>,
    out: &mut impl Write,
) -> Result<Option<bool>, FindError> {
    let facts = learn(config, &args, handler).await.map_err(|error| match error {
        LearnError::Open(error) => error,
        LearnError::Store(error) => OpenError::database(&config.database, error),
    })?;
    let verdict = judge(&facts);
    let answer = match args.format {
        Format::Text => text::lines(&facts, &verdict),
        Format::Json => text::json_line(&facts, &verdict)?,
    };
    match out.write_all(answer.as_bytes()).and_then(|()| out.flush()) {
        // A reader that has seen enough does not change what became of the order.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(verdict.is_applied()),
    }
}

enum LearnError {
    Open(OpenError),
    Store(store::Error),
}

impl From<OpenError> for LearnError {
    fn from(error: OpenError) -> Self {
        Self::Open(error)
    }
}

impl From<store::Error> for LearnError {
    fn from(error: store::Error) -> Self {
        Self::Store(error)
    }
}

/// Asks all sources.
async fn learn(
    config: &Config,
    args: &FindArgs,
    handler: Result<&dyn Handler, String>,
) -> Result<OrderFacts, LearnError> {
    let mut facts = OrderFacts::of(config, args.id.clone(), args.seq);
    let handler = handler.map_err(|problem| {
        facts.not_asked.push(format!("the handler, so that an order that it ignores counts as applied: {problem}"));
    });
    let mut server = if args.no_server {
        facts.not_asked.push("the server: --no-server".to_owned());
        None
    } else {
        ServerSource::ask(config).await.map_err(|problem| facts.not_asked.push(format!("the server: {problem}"))).ok()
    };
    let mut reader = Reader::open(&config.database).await?;
    let settings = message_ids::wanted(config);
    let schemes = reader.id_schemes(&settings).await?.unwrap_or_else(|| IdSchemes::unchanged(&settings));
    let place = args.id.as_deref().and_then(|id| place(id, &schemes.first.stream));
    facts.notes.extend(message_ids::difference(&schemes, &settings));
    facts.scheme = schemes.newest().clone();
    let mut search = Search { reader, config, schemes, handler: handler.ok() };
    let seq = args.seq.or(place.map(|(seq, _)| seq));
    if let (Some(seq), Some(server)) = (seq, &mut server) {
        let published_ns = place.map(|(_, published_ns)| published_ns);
        search.message(&mut facts, server, seq, published_ns).await;
    }
    search.tables(&mut facts).await?;
    if let (Some(server), Some(id)) = (&mut server, args.id.as_deref())
        && !facts.is_decided()
        && facts.message.is_none()
    {
        search.stream(&mut facts, server, id, args.scan).await?;
    }
    if let Some(server) = &mut server {
        search.rest(&mut facts, server).await?;
    }
    facts.server = server.map(|server| server.facts);
    facts.daemon = daemon(config, &mut facts.not_asked).await;
    Ok(facts)
}

/// Sequence and published time of a message whose id is its place in the stream.
fn place(id: &str, stream: &str) -> Option<(u64, i64)> {
    let (published_ns, seq) = id.strip_prefix(stream)?.strip_prefix('@')?.split_once(':')?;
    Some((seq.parse().ok()?, published_ns.parse().ok()?))
}

async fn daemon(config: &Config, not_asked: &mut Vec<String>) -> DaemonState {
    let pause = store::paused(&config.database).unwrap_or_else(|error| {
        not_asked.push(format!("whether there is a pause: {}", chain(&error)));
        None
    });
    if let Some(pause) = pause {
        return DaemonState::Paused(pause.to_string());
    }
    match status::daemon(config.http.listen).await {
        Ok(Some(status)) => DaemonState::Runs { ready: status.ready, health: status.health() },
        Ok(None) if config.http.listen.port() == 0 => DaemonState::Unknown,
        Ok(None) => DaemonState::Stopped(config.http.listen.to_string()),
        Err(problem) => {
            not_asked.push(format!("the daemon: {problem}"));
            DaemonState::Unknown
        }
    }
}

/// The tables, and how messages get their ids.
struct Search<'a> {
    reader: Reader,
    config: &'a Config,
    schemes: IdSchemes,
    handler: Option<&'a dyn Handler>,
}

impl Search<'_> {
    fn delivery(&self, raw: Raw) -> Delivery {
        let delivery = Delivery::new(raw, &self.schemes);
        match self.handler {
            Some(handler) => planned(handler, delivery),
            None => delivery,
        }
    }

    /// The message with this sequence. With `published_ns`, only the message that was published then.
    async fn message(
        &mut self,
        facts: &mut OrderFacts,
        server: &mut ServerSource,
        seq: u64,
        published_ns: Option<i64>,
    ) {
        match server.message_at(seq).await {
            Ok(Some(raw)) if published_ns.is_none_or(|ns| ns == raw.position.published_ns) => {
                facts.take_message(self.delivery(raw));
            }
            Ok(Some(_)) => facts.notes.push(format!(
                "message {seq} of the stream was published at another time: the stream was recreated, or its server lost messages"
            )),
            Ok(None) => facts.is_gone = true,
            Err(problem) => facts.not_asked.push(format!("message {seq} of the stream: {problem}")),
        }
    }

    /// What the tables have about the id. For a sequence without a message, the id is looked for first.
    async fn tables(&mut self, facts: &mut OrderFacts) -> Result<(), store::Error> {
        if let (None, Some(seq)) = (&facts.id, facts.seq) {
            let SeqRecord { processed, letters, was_cut } = self.reader.find_seq(seq).await?;
            let of_rows = processed.iter().map(|row| (row.processed_at_ns, row.id.clone(), row.digest));
            let of_letters = letters.iter().map(|letter| (letter.dead_at_ns, letter.id.clone(), letter.digest));
            // A former stream may have used the sequence for another order.
            let newest = of_rows.chain(of_letters).max_by_key(|(at_ns, ..)| *at_ns);
            match newest {
                Some((_, id, digest)) => facts.take_id(id, digest),
                None if was_cut => facts.not_asked.push(format!(
                    "rows of the database far from the place of sequence {seq}: no index leads to a sequence"
                )),
                None => {}
            }
        }
        if let Some(id) = facts.id.clone() {
            facts.record = self.reader.find(&id).await?;
        }
        Ok(())
    }

    /// Looks for a message with the id in the stream. If one is found, the tables are read again: the daemon goes on meanwhile.
    async fn stream(
        &mut self,
        facts: &mut OrderFacts,
        server: &mut ServerSource,
        id: &str,
        all: bool,
    ) -> Result<(), store::Error> {
        let found = server.scan(self.config, all, |raw| {
            let delivery = self.delivery(raw);
            (*delivery.id == *id).then_some(delivery)
        });
        match found.await {
            Ok(ScanResult::Message(delivery)) => {
                facts.take_message(*delivery);
                if let Err(problem) = server.look_again().await {
                    facts.not_asked.push(format!("the server: {problem}"));
                }
                return self.tables(facts).await;
            }
            Ok(ScanResult::Nothing { through_all }) => facts.was_scanned = through_all,
            Ok(ScanResult::Unread(what)) => facts.not_asked.push(what),
            Err(problem) => facts.not_asked.push(format!("the messages of the stream: {problem}")),
        }
        Ok(())
    }

    /// What the verdict and the timeline still need: the message of a row, and what the database says of messages that are in no
    /// table.
    async fn rest(&mut self, facts: &mut OrderFacts, server: &mut ServerSource) -> Result<(), store::Error> {
        if facts.message.is_none()
            && let Some((seq, digest)) = facts.recorded_message()
        {
            match server.message_at(seq).await {
                Ok(found) => {
                    facts.message = found.map(|raw| self.delivery(raw)).filter(|message| message.digest == digest);
                    facts.is_gone = facts.message.is_none();
                }
                Err(problem) => facts.not_asked.push(format!("message {seq} of the stream: {problem}")),
            }
        }
        if let Err(refusal @ (Unbound::Other { .. } | Unbound::Unknown { .. })) =
            self.reader.judge(&server.bind()).await?
        {
            facts.notes.push(refusal.to_string());
            facts.is_unbound = matches!(refusal, Unbound::Other { .. });
        }
        let Some(message) = &facts.message else { return Ok(()) };
        if !facts.is_decided() && message.raw.position.stream_seq <= server.facts.settled {
            facts.other_id = self.other_id(message.raw.position.stream_seq, message.digest).await?;
            facts.rules = Some(server.rules(self.config, &mut self.reader).await?);
            let binding = self.reader.binding().await?;
            facts.not_ours_through = binding.map_or(0, |binding| binding.not_ours_through);
        }
        Ok(())
    }

    /// What the tables have about the message under another id.
    async fn other_id(&mut self, seq: u64, digest: Digest) -> Result<Option<(String, IdRecord)>, store::Error> {
        let rows = self.reader.find_seq(seq).await?.processed;
        let Some(row) = rows.into_iter().find(|row| row.digest == digest) else { return Ok(None) };
        let record = self.reader.find(&row.id).await?;
        Ok(Some((row.id, record)))
    }
}
