//! `audit`: finds messages that the server will not deliver again and that are neither processed nor dead letters.
//! `--repair` applies them, the way every message is applied.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgAction, Args};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::handler::Handler;
use crate::jetstream;
use crate::jetstream::connection::{self, ConnectError};
use crate::jetstream::look::{Snapshot, look_for_command};
use crate::jetstream::walk::{Vanished, Walk, WalkError};
use crate::model::delivery::Delivery;
use crate::model::label::Label;
use crate::model::outcome::Outcome;
use crate::model::schemes::IdSchemes;
use crate::model::text::chain;
use crate::model::time::unix_ns;
use crate::ops::{Format, json_flag, signals};
use crate::store::{self, Bind, ErrorClass, Holder, OpenError, Reader, Store, Unbound};
use crate::worker::inbox::{Inbox, Processed};
use crate::worker::message_ids;
use crate::worker::missing::Verdict;
use crate::worker::repair::Repair;
use crate::worker::retry::RetryPolicy;

mod report;
mod scope;

use report::AuditReport;
use scope::{AuditedStream, Scope};

/// Chunks that are read but not compared with the database yet.
const AHEAD: usize = 2;

/// Below the options in `--help`.
pub const AFTER_HELP: &str = "\
Reads the stream without changing the consumer, even while the daemon runs. The ids of messages are made as the database \
records it, whatever the settings of this command are. Without a record (a database of a former version), the settings make them: \
messages may then be listed as processed under another id. Such messages are never applied again.

--repair needs the database for itself: run `order-processor pause` before it, and `resume` after it.";

#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Start at this stream sequence [default: the first message]
    #[arg(long, value_name = "SEQ", allow_negative_numbers = true)]
    from: Option<u64>,
    /// Apply the missing messages through the handler; the daemon must be stopped or paused
    #[arg(long)]
    repair: bool,
    /// Print JSON, one object a line: each missing message, then the summary
    #[arg(long = "json", action = ArgAction::SetTrue, value_parser = json_flag())]
    format: Format,
    /// Stop if nothing could be read for this long
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
    #[error(transparent)]
    Unbound(Unbound),
    #[error(
        "another client pulls from consumer {consumer} ({num_waiting} open pulls), and this database has no record of the consumer: \
         a daemon with another database would have applied these orders already; correct database.url or the working directory, \
         or stop the other client and repeat the command after 20 s"
    )]
    Pulled { consumer: String, num_waiting: usize },
    #[error("cannot listen for signals")]
    Signals(#[source] io::Error),
    #[error("stopped before message {next}: {reason}; continue with `order-processor audit --from {next}`")]
    Stopped { next: u64, reason: String },
    #[error("the stream was deleted or recreated before message {next} was checked; run the audit again")]
    OtherStream { next: u64 },
    #[error("the database failed before message {next}; continue with `order-processor audit --from {next}`")]
    Database {
        next: u64,
        #[source]
        source: store::Error,
    },
    #[error("cannot write the answer")]
    Output(#[from] io::Error),
}

/// Checks all messages of the scope. `false` if a message is missing and not repaired, or was processed under another id.
pub async fn run(
    config: Config,
    handler: Arc<dyn Handler>,
    args: AuditArgs,
    out: &mut impl Write,
) -> Result<bool, AuditError> {
    let config = Arc::new(config);
    audit(config.clone(), handler, args, out).await.map_err(|error| match error {
        // No later audit can continue on this file.
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
    // First, because `--repair` would create a missing database.
    let mut lookup = Reader::open(&config.database).await?;
    let mut repair = if args.repair { Some(open_repair(&config, handler).await?) } else { None };
    // The floor first and the ids after it: what the floor has passed was in the database by then.
    let visit = connection::connect_command(&config.nats).await?;
    let found = look_for_command(&visit, &config.consumer).await?;
    let bind = Bind::of(&config.consumer, &found.view());
    let record = lookup.binding().await.map_err(|source| AuditError::Database { next: 1, source })?;
    // A database that has no record of the consumer is what an audit may repair. One of another consumer is not.
    let unknown = match bind.judge(record.as_ref(), &[]) {
        Err(refusal @ Unbound::Other { .. }) => return Err(AuditError::Unbound(refusal)),
        // A paused or stopped daemon has no open pull.
        Err(Unbound::Unknown { consumer, .. }) if args.repair && found.consumer.num_waiting > 0 => {
            return Err(AuditError::Pulled { consumer, num_waiting: found.consumer.num_waiting });
        }
        Err(unknown @ Unbound::Unknown { .. }) if !args.repair => Some(unknown.to_string()),
        Ok(()) | Err(Unbound::Unknown { .. } | Unbound::Pruned { .. }) => None,
    };
    let oldest = lookup.oldest_processed_at().await.map_err(|source| AuditError::Database { next: 1, source })?;
    let mark = lookup.audit_mark().await.map_err(|source| AuditError::Database { next: 1, source })?;
    let settings = message_ids::wanted(&config);
    let schemes = match &mut repair {
        Some(repair) => repair.inbox().store().record_id_schemes(&settings).await,
        None => lookup
            .id_schemes(&settings)
            .await
            .map(|recorded| recorded.unwrap_or_else(|| IdSchemes::unchanged(&settings))),
    };
    let schemes = schemes.map_err(|source| AuditError::Database { next: 1, source })?;
    let from = args.from;
    let not_ours_through = record.as_ref().map_or(0, |record| record.not_ours_through);
    let mut scope = Scope::of(&config, &found, from.unwrap_or(not_ours_through + 1), oldest, mark.as_ref());
    scope.notes.extend(message_ids::difference(&schemes, &settings));
    scope.notes.extend(unknown);
    let mut report = AuditReport::new(&found, &scope, args.format, out)?;
    let stream = AuditedStream { config: config.clone(), visit, created_ns: unix_ns(found.stream.created.into()) };
    let mut audit = AuditRun { next: scope.from, config, stream, scope, lookup, schemes, repair, stop };
    let ended = audit.walk(&found, args.patience, &mut report).await;
    let is_repaired = ended.is_ok() && from.is_none() && report.summary.missing == report.summary.repaired;
    let closed = match audit.repair.take() {
        // Everything that the stream still has up to the ack floor is in this database now.
        Some(mut repair) if is_repaired && record.is_none() => {
            let repaired = Bind { floor_stream_seq: 0, ..bind };
            match repair.inbox().store().adopt(&repaired).await {
                Ok(_) => repair.into_inbox().close().await,
                Err(error) => Err(error),
            }
        }
        Some(repair) => repair.into_inbox().close().await,
        None => Ok(()),
    };
    report.finish(audit.next, ended.is_ok())?;
    ended?;
    closed.map_err(|source| AuditError::Database { next: audit.next, source })?;
    Ok(report.summary.missing == report.summary.repaired && report.summary.other_id == 0)
}

/// Some messages that the client cannot parse end it with a panic. The walk notices that and reads these messages raw.
pub(super) fn keep_quiet_about_the_client() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|at| at.file().contains("async-nats")) {
            tracing::debug!(%panic, "the client ended");
        } else {
            say(panic);
        }
    }));
}

async fn open_repair(config: &Config, handler: Arc<dyn Handler>) -> Result<Repair, OpenError> {
    let opened = Store::open(&config.database).await.map_err(|error| match error {
        OpenError::Held { path, holder } if !holder.is_repair => {
            let name = format!("{holder} (if that is the daemon, run `order-processor pause` first)");
            OpenError::Held { path, holder: Holder { name, ..holder } }
        }
        other => other,
    });
    let mut store = opened?;
    store.sign_as_repair();
    let mut inbox = Inbox::new(store, handler.clone(), RetryPolicy::from(&config.retry), config.inbox.on_conflict);
    inbox.publishing.is_repair = true;
    Ok(Repair::new(inbox, handler))
}

struct AuditRun {
    config: Arc<Config>,
    stream: AuditedStream,
    scope: Scope,
    lookup: Reader,
    schemes: IdSchemes,
    /// With `--repair`.
    repair: Option<Repair>,
    stop: CancellationToken,
    /// The first sequence that was not checked yet.
    next: u64,
}

impl AuditRun {
    /// Reads ahead on a separate task, and compares what was read with the database.
    async fn walk<W: Write>(
        &mut self,
        found: &Snapshot,
        patience: Duration,
        report: &mut AuditReport<'_, W>,
    ) -> Result<(), AuditError> {
        if self.scope.is_empty() {
            return Ok(());
        }
        let walk = Walk::new(self.config.clone(), found, self.scope.from, self.scope.to, patience).await?;
        let (chunks, mut read) = mpsc::channel(AHEAD);
        let reading = tokio::spawn(read_ahead(walk, self.schemes.clone(), chunks, self.stop.clone()));
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

    async fn check<W: Write>(
        &mut self,
        chunk: Vec<Delivery>,
        report: &mut AuditReport<'_, W>,
    ) -> Result<(), AuditError> {
        let Some(last) = chunk.last().map(|delivery| delivery.raw.position.stream_seq) else { return Ok(()) };
        let known = self.lookup.known(&chunk.iter().collect::<Vec<_>>()).await;
        let known = known.map_err(|source| AuditError::Database { next: self.next, source })?;
        let mut missing = Vec::new();
        for (delivery, claim) in chunk.into_iter().zip(known) {
            match self.scope.rules.verdict(&delivery, claim) {
                Verdict::NotForTheConsumer => {}
                Verdict::Processed => report.summary.processed += 1,
                Verdict::DeadLetter => report.summary.dead_letters += 1,
                Verdict::Undetermined(_) => report.summary.cannot_be_told += 1,
                Verdict::Missing(why) => missing.push((delivery, why)),
            }
        }
        if !missing.is_empty() {
            let gone = self.forget_what_is_gone(&mut missing).await?;
            report.gone(gone);
            let missing = self.set_other_ids_apart(missing, report).await?;
            self.handle(missing, report).await?;
            if self.stop.is_cancelled() && self.repair.is_some() {
                return Ok(());
            }
        }
        self.next = last + 1;
        report.show(self.next);
        Ok(())
    }

    /// The daemon deletes the ids of messages that left the stream. That may have happened after the message was read here.
    async fn forget_what_is_gone(&self, missing: &mut Vec<(Delivery, &'static str)>) -> Result<Vanished, AuditError> {
        let mut gone = Vanished::default();
        if let Some(first) = self.stream.first_sequence(self.next).await? {
            for (delivery, _) in missing.extract_if(.., |(delivery, _)| delivery.raw.position.stream_seq < first) {
                gone = Vanished { count: gone.count + 1, through: delivery.raw.position.stream_seq };
            }
        }
        Ok(gone)
    }

    /// With settings that make other ids than the daemon makes, each processed message appears missing. A repair would apply it twice.
    async fn set_other_ids_apart<W: Write>(
        &mut self,
        missing: Vec<(Delivery, &'static str)>,
        report: &mut AuditReport<'_, W>,
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

    /// Applies the missing messages with `--repair`, and reports the result of each.
    async fn handle<W: Write>(
        &mut self,
        missing: Vec<(Delivery, &'static str)>,
        report: &mut AuditReport<'_, W>,
    ) -> Result<(), AuditError> {
        let Some(repair) = &mut self.repair else {
            for (delivery, why) in &missing {
                report.missing(delivery, "missing", why)?;
            }
            return Ok(());
        };
        let mut rest: Vec<Delivery> =
            missing.into_iter().map(|(delivery, _)| repair.inbox().planned(delivery)).collect();
        while let Some(first) = rest.first() {
            let next = first.raw.position.stream_seq;
            self.next = next;
            if self.stop.is_cancelled() {
                return Ok(());
            }
            self.stream.first_sequence(next).await?;
            let later = rest.split_off(rest.len().min(self.config.batch.max_messages));
            let outcomes = repair.process(&rest, &self.stop).await;
            let outcomes = outcomes.map_err(|source| AuditError::Database { next, source })?;
            let Processed { decided, mut left } = Processed::of(rest, outcomes);
            for (delivery, outcome) in decided {
                match outcome {
                    Outcome::Applied | Outcome::Duplicate | Outcome::Dropped | Outcome::Ignored(_) => {
                        report.repaired(&delivery, "applied", "")?;
                    }
                    Outcome::DeadLettered { reason, error } => {
                        report.repaired(&delivery, "dead-lettered", &format!("{}: {error}", reason.name()))?;
                    }
                    Outcome::Retry { error, .. } => report.missing(&delivery, "not applied", &error)?,
                }
            }
            if let Some(reason) = repair.inbox().away.take() {
                return Err(AuditError::Stopped { next, reason });
            }
            left.extend(later);
            rest = left;
        }
        Ok(())
    }
}

/// `true` at the end of the range, `false` after a stop; and the messages that left the stream before they were read.
async fn read_ahead(
    mut walk: Walk,
    schemes: IdSchemes,
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
        let deliveries = read.into_iter().map(|raw| Delivery::new(raw, &schemes)).collect();
        if chunks.send(deliveries).await.is_err() {
            break Ok(false);
        }
    };
    let gone = walk.vanished();
    walk.close().await;
    (ended, gone)
}
