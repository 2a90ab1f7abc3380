//! `audit`: is there a message that the server will not deliver again and that is neither processed nor a dead letter? With
//! `--repair` such messages are applied, the way every message is.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, OnConflict};
use crate::handler::Handler;
use crate::jetstream;
use crate::jetstream::connection::{self, CommandClient, ConnectError};
use crate::jetstream::gate;
use crate::jetstream::look::StartsAt;
use crate::jetstream::look::{Snapshot, look_for_command};
use crate::jetstream::walk::{Vanished, Walk, WalkError};
use crate::model::delivery::Delivery;
use crate::model::id::IdScheme;
use crate::model::label::Label;
use crate::model::outcome::Outcome;
use crate::model::text::chain;
use crate::model::time::unix_ns;
use crate::ops::signals;
use crate::store::{self, Claim, ErrorClass, Holder, OpenError, Reader, Store};
use crate::worker::inbox::Inbox;
use crate::worker::retention::pruned_before;
use crate::worker::retry::RetryPolicy;

/// Chunks that were read and not looked up yet.
const AHEAD: usize = 2;
const LINE_EVERY: Duration = Duration::from_secs(5);

/// What does not fit into a line, below the options.
pub const AFTER_HELP: &str = "\
Reads the stream beside the consumer and changes nothing, also while the daemon runs. Ids are derived with the settings of now: \
with another inbox.id_pointer than the daemon's, messages show as processed under another id. Those are never applied again.

--repair takes the lock on the database. `order-processor pause` makes a running daemon give it up, `resume` goes on.";

#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Begin at this sequence of the stream [default: the first message]
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    from: Option<u64>,
    /// Apply what is missing through the handler; the daemon must be stopped or paused
    #[arg(long)]
    repair: bool,
    /// Print JSON, one object a line: each missing message, then the summary
    #[arg(long)]
    json: bool,
    /// Give up when nothing could be read for this long
    #[arg(long, value_name = "DURATION", default_value = "2m", allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    patience: Duration,
}

/// Why the audit is not complete.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Bind(#[from] jetstream::Error),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("stopped before message {next}: {reason}; go on with `order-processor audit --from {next}`")]
    Stopped { next: u64, reason: String },
    #[error("the stream was deleted or created anew before message {next} was checked; audit again what is there now")]
    OtherStream { next: u64 },
    #[error("the database failed before message {next}; go on with `order-processor audit --from {next}`")]
    Database {
        next: u64,
        #[source]
        source: store::Error,
    },
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Checks all there is to check. `false` if a message is missing and was not repaired, or was processed under another id.
pub async fn run(
    config: Config,
    handler: Arc<dyn Handler>,
    args: AuditArgs,
    out: &mut impl Write,
) -> Result<bool, AuditError> {
    let config = Arc::new(config);
    audit(config.clone(), handler, args, out).await.map_err(|error| match error {
        // Nobody can go on from there.
        AuditError::Database { source, .. } if source.class == ErrorClass::Corrupt => {
            OpenError::database(&config.database, source).into()
        }
        other => other,
    })
}

async fn audit(
    config: Arc<Config>,
    handler: Arc<dyn Handler>,
    args: AuditArgs,
    out: &mut impl Write,
) -> Result<bool, AuditError> {
    let stop = CancellationToken::new();
    let hung_up = stop.clone();
    signals::listen(stop.clone(), move || hung_up.cancel()).map_err(AuditError::Signals)?;
    keep_quiet_about_the_client();
    // Before anything else, for `--repair` would make a database where there is none.
    let mut lookup = Reader::open(&config.database).await?;
    let inbox = if args.repair { Some(open_inbox(&config, handler).await?) } else { None };
    // The floor first and the ids after it: what the floor has passed was in the database by then.
    let visit = connection::connect_command(&config.nats).await?;
    let found = look_for_command(&visit, &config.consumer).await?;
    let oldest = lookup.oldest_processed_at().await.map_err(|source| AuditError::Database { next: 1, source })?;
    let scope = Scope::of(&config, &found, args.from, oldest);
    let mut report = Report::new(&found, &scope, args.json, out)?;
    let source = Source { config: config.clone(), visit, created_ns: unix_ns(found.stream.created.into()) };
    let mut audit = Audit { next: scope.from, config, source, scope, lookup, inbox, stop };
    let ended = audit.walk(&found, args.patience, &mut report).await;
    let closed = match audit.inbox.take() {
        Some(inbox) => inbox.close().await,
        None => Ok(()),
    };
    report.finish(audit.next, ended.is_ok())?;
    ended?;
    closed.map_err(|source| AuditError::Database { next: audit.next, source })?;
    Ok(report.summary.missing == report.summary.repaired && report.summary.other_id == 0)
}

/// The client ends in a panic over some messages that it cannot parse. The walk notices and reads them another way.
fn keep_quiet_about_the_client() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|at| at.file().contains("async-nats")) {
            tracing::debug!(%panic, "the client ended");
        } else {
            say(panic);
        }
    }));
}

async fn open_inbox(config: &Config, handler: Arc<dyn Handler>) -> Result<Inbox, OpenError> {
    let opened = Store::open(&config.database).await.map_err(|error| match error {
        OpenError::Held { path, holder } if !holder.is_repair => {
            let name = format!("{holder} (if that is the daemon, run `order-processor pause` first)");
            OpenError::Held { path, holder: Holder { name, ..holder } }
        }
        other => other,
    });
    let mut store = opened?;
    store.sign_as_repair();
    Ok(Inbox::new(store, handler, RetryPolicy::from(&config.retry), config.inbox.on_conflict))
}

/// What is to be checked, and what cannot be.
struct Scope {
    from: u64,
    to: u64,
    /// What was published before this is not for the consumer.
    start_ns: i64,
    /// The id of a message published before this may be there no more, although the message was processed.
    pruned_before_ns: i64,
    notes: Vec<String>,
}

impl Scope {
    fn of(config: &Config, found: &Snapshot, from: Option<u64>, oldest_processed_at: Option<i64>) -> Self {
        let (stream, consumer) = (&found.stream, &found.consumer);
        let (first, last) = (stream.state.first_sequence, stream.state.last_sequence);
        let created_ns = unix_ns(stream.created.into());
        // With nothing pending the floor may lag behind, below messages that the server has given up.
        let floor = match consumer.num_ack_pending {
            0 => consumer.delivered.stream_sequence.max(consumer.ack_floor.stream_sequence),
            _ => consumer.ack_floor.stream_sequence,
        };
        let mut notes = Vec::new();
        let StartsAt { seq: start_seq, ns: start_ns } = found.starts_at();
        if start_seq > 1 || start_ns > 0 {
            let start = if start_ns > 0 { time(start_ns) } else { format!("message {start_seq}") };
            notes.push(format!("the consumer starts at {start}; what is older was never for it and is not checked"));
        }
        notes.extend(gate::unauditable(stream));
        let wanted = start_seq.max(from.unwrap_or(1)).max(1);
        if floor > last {
            notes.push(format!(
                "the ack floor {floor} is beyond the last message {last}: the server lost its newest messages"
            ));
        }
        let to = floor.min(last);
        if wanted < first && wanted <= floor {
            let gone = floor.min(first - 1);
            notes.push(format!("messages {wanted} to {gone} are no longer in the stream and cannot be checked"));
        }
        if oldest_processed_at.is_some_and(|at| at < created_ns) {
            notes.push(format!(
                "the database has orders from before the stream was created at {}; what was in a former stream cannot be checked",
                time(created_ns)
            ));
        }
        let now_ns = unix_ns(SystemTime::now());
        let pruned_before_ns = pruned_before(config.inbox.retention, oldest_processed_at, now_ns);
        let from = wanted.max(first);
        if from > to {
            notes.push(format!("nothing to check: the ack floor is {floor}, and the first message to check is {from}"));
        }
        Self { from, to, start_ns, pruned_before_ns, notes }
    }

    fn is_empty(&self) -> bool {
        self.from > self.to
    }
}

/// The stream that is audited.
struct Source {
    config: Arc<Config>,
    visit: CommandClient,
    created_ns: i64,
}

impl Source {
    /// What it has first now, if the server says so. An error if there is another stream, or none: `next` is still unchecked.
    async fn first_sequence(&self, next: u64) -> Result<Option<u64>, AuditError> {
        match look_for_command(&self.visit, &self.config.consumer).await {
            Ok(found) if unix_ns(found.stream.created.into()) == self.created_ns => {
                Ok(Some(found.stream.state.first_sequence))
            }
            Ok(_) | Err(jetstream::Error::NoStream { .. }) => Err(AuditError::OtherStream { next }),
            Err(_) => Ok(None),
        }
    }
}

struct Audit {
    config: Arc<Config>,
    source: Source,
    scope: Scope,
    lookup: Reader,
    /// With `--repair`.
    inbox: Option<Inbox>,
    stop: CancellationToken,
    /// The first sequence that was not checked yet.
    next: u64,
}

/// What one message turned out to be.
enum Verdict {
    NotForTheConsumer,
    Processed,
    DeadLetter,
    /// It is old, and its id may have been pruned.
    CannotBeTold,
    Missing(&'static str),
}

impl Audit {
    /// Reads ahead on a task of its own, and looks up what was read.
    async fn walk<W: Write>(
        &mut self,
        found: &Snapshot,
        patience: Duration,
        report: &mut Report<'_, W>,
    ) -> Result<(), AuditError> {
        if self.scope.is_empty() {
            return Ok(());
        }
        let scheme = IdScheme {
            stream: self.config.consumer.stream.clone(),
            stream_created_ns: self.source.created_ns,
            pointer: self.config.inbox.id_pointer.clone(),
        };
        let walk = Walk::new(self.config.clone(), found, self.scope.from, self.scope.to, patience).await?;
        let (chunks, mut read) = mpsc::channel(AHEAD);
        let reading = tokio::spawn(read_ahead(walk, scheme, chunks, self.stop.clone()));
        let mut checked = Ok(());
        while let Some(chunk) = read.recv().await {
            checked = self.check(chunk, report).await;
            if checked.is_err() || self.stop.is_cancelled() {
                break;
            }
        }
        drop(read);
        let ended = reading.await;
        checked?;
        let next = self.next;
        let (ended, gone) = ended.map_err(|error| AuditError::Stopped { next, reason: chain(&error) })?;
        report.gone(gone);
        match ended {
            Ok(true) if !self.stop.is_cancelled() => {
                self.next = self.scope.to + 1;
                Ok(())
            }
            Ok(_) => Err(AuditError::Stopped { next, reason: "interrupted".to_owned() }),
            Err(WalkError::OtherStream) => Err(AuditError::OtherStream { next }),
            Err(error @ WalkError::Lost { .. }) => Err(AuditError::Stopped { next, reason: chain(&error) }),
        }
    }

    async fn check<W: Write>(&mut self, chunk: Vec<Delivery>, report: &mut Report<'_, W>) -> Result<(), AuditError> {
        let Some(last) = chunk.last().map(|delivery| delivery.raw.position.stream_seq) else { return Ok(()) };
        let known = self.lookup.known(&chunk.iter().collect::<Vec<_>>()).await;
        let known = known.map_err(|source| AuditError::Database { next: self.next, source })?;
        let mut missing = Vec::new();
        for (delivery, claim) in chunk.into_iter().zip(known) {
            match self.judge(&delivery, claim) {
                Verdict::NotForTheConsumer => {}
                Verdict::Processed => report.summary.processed += 1,
                Verdict::DeadLetter => report.summary.dead_letters += 1,
                Verdict::CannotBeTold => report.summary.cannot_be_told += 1,
                Verdict::Missing(why) => missing.push((delivery, why)),
            }
        }
        if !missing.is_empty() {
            let gone = self.forget_what_is_gone(&mut missing).await?;
            report.gone(gone);
            let missing = self.set_other_ids_apart(missing, report).await?;
            self.handle(missing, report).await?;
            if self.stop.is_cancelled() && self.inbox.is_some() {
                return Ok(());
            }
        }
        self.next = last + 1;
        report.show(self.next);
        Ok(())
    }

    fn judge(&self, delivery: &Delivery, claim: Claim) -> Verdict {
        let published_ns = delivery.raw.position.published_ns;
        match claim {
            _ if published_ns < self.scope.start_ns => Verdict::NotForTheConsumer,
            Claim::Processed(digest) if digest == delivery.digest => Verdict::Processed,
            Claim::Processed(_) => match self.config.inbox.on_conflict {
                OnConflict::Duplicate => Verdict::Processed,
                OnConflict::DeadLetter => Verdict::Missing("another message was processed under its id"),
            },
            Claim::Dead => Verdict::DeadLetter,
            // No table has a row for what is not an order.
            Claim::New if delivery.ignored.is_some() => Verdict::NotForTheConsumer,
            Claim::New if published_ns < self.scope.pruned_before_ns => Verdict::CannotBeTold,
            Claim::New => Verdict::Missing("neither processed nor a dead letter"),
        }
    }

    /// The daemon prunes ids of messages that the stream drops, and it may have done both while this process slept.
    async fn forget_what_is_gone(&self, missing: &mut Vec<(Delivery, &'static str)>) -> Result<Vanished, AuditError> {
        let mut gone = Vanished::default();
        if let Some(first) = self.source.first_sequence(self.next).await? {
            for (delivery, _) in missing.extract_if(.., |(delivery, _)| delivery.raw.position.stream_seq < first) {
                gone = Vanished { count: gone.count + 1, through: delivery.raw.position.stream_seq };
            }
        }
        Ok(gone)
    }

    /// With settings that make other ids than the daemon's, all looks missing that it has processed. Applied, it would be so twice.
    async fn set_other_ids_apart<W: Write>(
        &mut self,
        missing: Vec<(Delivery, &'static str)>,
        report: &mut Report<'_, W>,
    ) -> Result<Vec<(Delivery, &'static str)>, AuditError> {
        let deliveries: Vec<&Delivery> = missing.iter().map(|(delivery, _)| delivery).collect();
        let other_ids = self.lookup.other_ids(&deliveries).await;
        let other_ids = other_ids.map_err(|source| AuditError::Database { next: self.next, source })?;
        let mut rest = Vec::new();
        for ((delivery, why), other_id) in missing.into_iter().zip(other_ids) {
            match other_id {
                Some(id) => report.other_id(&delivery, &id)?,
                None => rest.push((delivery, why)),
            }
        }
        Ok(rest)
    }

    /// Applies what is missing, if so asked, and says of each message what came of it.
    async fn handle<W: Write>(
        &mut self,
        missing: Vec<(Delivery, &'static str)>,
        report: &mut Report<'_, W>,
    ) -> Result<(), AuditError> {
        let Some(inbox) = &mut self.inbox else {
            for (delivery, why) in &missing {
                report.missing(delivery, "missing", why)?;
            }
            return Ok(());
        };
        let mut rest: Vec<Delivery> = missing.into_iter().map(|(delivery, _)| delivery).collect();
        while let Some(first) = rest.first() {
            let next = first.raw.position.stream_seq;
            self.next = next;
            if self.stop.is_cancelled() {
                return Ok(());
            }
            self.source.first_sequence(next).await?;
            let later = rest.split_off(rest.len().min(self.config.batch.max_messages));
            let outcomes = inbox.process(&rest, &self.stop).await;
            let outcomes = outcomes.map_err(|source| AuditError::Database { next, source })?;
            let mut undecided = Vec::new();
            for (delivery, outcome) in rest.into_iter().zip(outcomes) {
                match outcome {
                    Some(Outcome::Applied | Outcome::Duplicate | Outcome::Ignored(_)) => {
                        report.repaired(&delivery, "applied", "")?
                    }
                    Some(Outcome::DeadLettered { reason, error }) => {
                        report.repaired(&delivery, "dead-lettered", &format!("{}: {error}", reason.name()))?;
                    }
                    Some(Outcome::Retry { error, .. }) => report.missing(&delivery, "not applied", &error)?,
                    None => undecided.push(delivery),
                }
            }
            if let Some(reason) = inbox.away.take() {
                return Err(AuditError::Stopped { next, reason });
            }
            undecided.extend(later);
            rest = undecided;
        }
        Ok(())
    }
}

/// `true` when there is nothing more to read, `false` when it was told to stop; and what could not be read any more.
async fn read_ahead(
    mut walk: Walk,
    scheme: IdScheme,
    chunks: mpsc::Sender<Vec<Delivery>>,
    stop: CancellationToken,
) -> (Result<bool, WalkError>, Vanished) {
    let ended = loop {
        let read = match stop.run_until_cancelled(walk.next()).await {
            Some(Ok(read)) if read.is_empty() => break Ok(true),
            Some(Ok(read)) => read,
            Some(Err(error)) => break Err(error),
            None => break Ok(false),
        };
        let deliveries = read.into_iter().map(|raw| Delivery::new(raw, &scheme)).collect();
        if chunks.send(deliveries).await.is_err() {
            break Ok(false);
        }
    };
    let gone = walk.vanished();
    walk.close().await;
    (ended, gone)
}

#[derive(Debug, Default, Serialize)]
struct Summary {
    stream: String,
    consumer: String,
    ack_floor: u64,
    from: u64,
    to: u64,
    processed: u64,
    dead_letters: u64,
    cannot_be_told: u64,
    missing: u64,
    /// Of the missing ones.
    repaired: u64,
    /// Processed, but under another id than the settings of now give them; not among the missing ones.
    other_id: u64,
    /// Messages that left the stream during the audit before they were checked, and the last one of them.
    gone: u64,
    gone_through: u64,
    /// All from `from` to `to` was checked.
    complete: bool,
    /// The first sequence that was not checked.
    next: u64,
    notes: Vec<String>,
}

/// Answers go to `out`, progress to stderr: a bar on a terminal, a line now and then elsewhere.
struct Report<'a, W: Write> {
    out: &'a mut W,
    json: bool,
    summary: Summary,
    bar: ProgressBar,
    said: Instant,
}

impl<'a, W: Write> Report<'a, W> {
    fn new(found: &Snapshot, scope: &Scope, json: bool, out: &'a mut W) -> io::Result<Self> {
        if !json {
            for note in &scope.notes {
                writeln!(out, "note: {note}")?;
            }
        }
        let on_terminal = io::stderr().is_terminal() && !scope.is_empty();
        let length = scope.to.saturating_sub(scope.from).saturating_add(1);
        let bar = if on_terminal { ProgressBar::new(length) } else { ProgressBar::hidden() };
        if let Ok(style) =
            ProgressStyle::with_template("{bar:40} {human_pos} of {human_len}, {per_sec}, {eta} left{msg}")
        {
            bar.set_style(style);
        }
        let summary = Summary {
            stream: found.stream.config.name.clone(),
            consumer: found.consumer.name.clone(),
            ack_floor: found.consumer.ack_floor.stream_sequence,
            from: scope.from,
            to: scope.to,
            notes: scope.notes.clone(),
            ..Summary::default()
        };
        Ok(Self { out, json, summary, bar, said: Instant::now() })
    }

    fn gone(&mut self, gone: Vanished) {
        self.summary.gone += gone.count;
        self.summary.gone_through = self.summary.gone_through.max(gone.through);
    }

    fn missing(&mut self, delivery: &Delivery, what: &str, why: &str) -> io::Result<()> {
        self.summary.missing += 1;
        self.bar.set_message(format!(", {} missing", self.summary.missing));
        self.say(delivery, what, why)
    }

    fn repaired(&mut self, delivery: &Delivery, what: &str, why: &str) -> io::Result<()> {
        self.summary.missing += 1;
        self.summary.repaired += 1;
        self.say(delivery, what, why)
    }

    fn other_id(&mut self, delivery: &Delivery, id: &str) -> io::Result<()> {
        self.summary.other_id += 1;
        let why = format!("processed under another id, {id}; is inbox.id_pointer the daemon's?");
        self.say(delivery, "other id", &why)
    }

    fn say(&mut self, delivery: &Delivery, what: &str, why: &str) -> io::Result<()> {
        let position = delivery.raw.position;
        let age = Duration::from_nanos(
            unix_ns(SystemTime::now()).saturating_sub(position.published_ns).max(0).unsigned_abs(),
        );
        let line = if self.json {
            serde_json::json!({
                "result": what,
                "stream_seq": position.stream_seq,
                "id": delivery.id,
                "subject": delivery.raw.subject,
                "published_at": time(position.published_ns),
                "age_seconds": age.as_secs(),
                "why": why,
            })
            .to_string()
        } else {
            let (seq, id, subject) = (position.stream_seq, harmless(&delivery.id), harmless(&delivery.raw.subject));
            let age = humantime::format_duration(Duration::from_secs(age.as_secs()));
            let why = if why.is_empty() { String::new() } else { format!(": {}", harmless(why)) };
            format!("{what:<11} {seq}, id {id}, subject {subject}, {age} old{why}")
        };
        let out = &mut self.out;
        self.bar.suspend(|| writeln!(out, "{line}"))
    }

    fn show(&mut self, next: u64) {
        self.bar.set_position(next.saturating_sub(self.summary.from));
        if self.bar.is_hidden() && self.said.elapsed() >= LINE_EVERY {
            tracing::info!(next, to = self.summary.to, missing = self.summary.missing, "auditing");
            self.said = Instant::now();
        }
    }

    fn finish(&mut self, next: u64, complete: bool) -> io::Result<()> {
        self.bar.finish_and_clear();
        let summary = &mut self.summary;
        (summary.next, summary.complete) = (next, complete);
        if self.json {
            return writeln!(self.out, "{}", serde_json::to_string(summary)?);
        }
        if summary.from > summary.to {
            return Ok(());
        }
        let Summary { stream, from, processed, dead_letters, cannot_be_told, missing, repaired, other_id, .. } =
            &*summary;
        write!(self.out, "stream {stream}, messages {from} to {}: ", next.saturating_sub(1))?;
        write!(self.out, "{processed} processed, {dead_letters} dead letters, {missing} missing")?;
        if *repaired > 0 {
            write!(self.out, ", {repaired} of them repaired")?;
        }
        if *other_id > 0 {
            write!(self.out, ", {other_id} processed under another id")?;
        }
        if *cannot_be_told > 0 {
            write!(self.out, ", {cannot_be_told} older than inbox.retention that cannot be told")?;
        }
        if summary.gone > 0 {
            let Summary { gone, gone_through, .. } = summary;
            write!(
                self.out,
                ", {gone} that left the stream before they could be checked, up to message {gone_through}"
            )?;
        }
        writeln!(self.out)
    }
}

/// Ids and subjects come from publishers, and a terminal obeys what it is sent.
fn harmless(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_debug().collect() } else { vec![c] }).collect()
}

fn time(ns: i64) -> String {
    let since = Duration::from_nanos(ns.max(0).unsigned_abs());
    humantime::format_rfc3339_seconds(UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_publishers_chose_does_not_command_the_terminal() {
        assert_eq!(harmless("a\u{1b}[2J\nü"), "a\\u{1b}[2J\\nü");
    }
}
