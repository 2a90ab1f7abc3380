//! What an audit prints: a line for each message that is missing or has another id, then the summary.

use std::io::{self, Write};
use std::time::SystemTime;

use serde::Serialize;

use super::scope::Scope;
use crate::jetstream::look::Snapshot;
use crate::jetstream::walk::Vanished;
use crate::model::delivery::Delivery;
use crate::model::text::{json, shortened};
use crate::model::time::{age, seconds_text};
use crate::ops::Format;
use crate::ops::progress::Progress;

/// Characters of an id or a subject in a line, and of a reason. Publishers make them as long as they like.
const TEXT_MAX: usize = 200;
const WHY_MAX: usize = 1000;

#[derive(Debug, Default, Serialize)]
pub struct Summary {
    pub stream: String,
    pub consumer: String,
    pub ack_floor: u64,
    pub from: u64,
    pub to: u64,
    pub processed: u64,
    pub dead_letters: u64,
    pub cannot_be_told: u64,
    pub missing: u64,
    /// Of the missing ones.
    pub repaired: u64,
    /// Processed under another id than the present settings make. They do not count as missing.
    pub other_id: u64,
    /// Messages that left the stream during the audit before they were checked, and the last one of them.
    pub gone: u64,
    pub gone_through: u64,
    /// All from `from` to `to` was checked.
    pub complete: bool,
    /// The first sequence that was not checked.
    pub next: u64,
    pub notes: Vec<String>,
}

/// The result goes to `out`, the progress to stderr.
pub struct AuditReport<'a, W: Write> {
    out: &'a mut W,
    format: Format,
    pub summary: Summary,
    progress: Progress,
}

impl<'a, W: Write> AuditReport<'a, W> {
    pub fn new(found: &Snapshot, scope: &Scope, format: Format, out: &'a mut W) -> io::Result<Self> {
        if format == Format::Text {
            for note in &scope.notes {
                writeln!(out, "note: {note}")?;
            }
        }
        let length = scope.to.saturating_sub(scope.from).saturating_add(1);
        let progress = if scope.is_empty() { Progress::none() } else { Progress::new(Some(length)) };
        let summary = Summary {
            stream: found.stream.config.name.clone(),
            consumer: found.consumer.name.clone(),
            ack_floor: found.consumer.ack_floor.stream_sequence,
            from: scope.from,
            to: scope.to,
            notes: scope.notes.clone(),
            ..Summary::default()
        };
        Ok(Self { out, format, summary, progress })
    }

    pub fn gone(&mut self, gone: Vanished) {
        self.summary.gone += gone.count;
        self.summary.gone_through = self.summary.gone_through.max(gone.through);
    }

    pub fn missing(&mut self, delivery: &Delivery, what: &str, why: &str) -> io::Result<()> {
        self.summary.missing += 1;
        self.progress.set_message(format!(", {} missing", self.summary.missing));
        self.line(delivery, what, why)
    }

    pub fn repaired(&mut self, delivery: &Delivery, what: &str, why: &str) -> io::Result<()> {
        self.summary.missing += 1;
        self.summary.repaired += 1;
        self.line(delivery, what, why)
    }

    pub fn other_id(&mut self, delivery: &Delivery, id: &str) -> io::Result<()> {
        self.summary.other_id += 1;
        let why = format!("processed under another id, {id}; is inbox.id_pointer the daemon's?");
        self.line(delivery, "other id", &why)
    }

    fn line(&mut self, delivery: &Delivery, what: &str, why: &str) -> io::Result<()> {
        let position = delivery.raw.position;
        let age = age(position.published_ns, SystemTime::now());
        let line = match self.format {
            Format::Json => json(&serde_json::json!({
                "result": what,
                "stream_seq": position.stream_seq,
                "id": delivery.id,
                "subject": delivery.raw.subject,
                "published_at": seconds_text(position.published_ns),
                "age_seconds": age.as_secs(),
                "why": why,
            }))?,
            Format::Text => {
                let (seq, age) = (position.stream_seq, humantime::format_duration(age));
                let id = shortened(&delivery.id, TEXT_MAX);
                let subject = shortened(&delivery.raw.subject, TEXT_MAX);
                let why = if why.is_empty() { String::new() } else { format!(": {}", shortened(why, WHY_MAX)) };
                format!("{what:<11} {seq}, id {id}, subject {subject}, {age} old{why}")
            }
        };
        let out = &mut self.out;
        self.progress.suspend(|| writeln!(out, "{line}"))
    }

    pub fn show(&mut self, next: u64) {
        if self.progress.advance(next.saturating_sub(self.summary.from)) {
            tracing::info!(next, to = self.summary.to, missing = self.summary.missing, "auditing");
        }
    }

    pub fn finish(&mut self, next: u64, complete: bool) -> io::Result<()> {
        self.progress.finish();
        let summary = &mut self.summary;
        (summary.next, summary.complete) = (next, complete);
        if self.format == Format::Json {
            return writeln!(self.out, "{}", json(summary)?);
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
            write!(self.out, ", {cannot_be_told} that cannot be determined")?;
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
