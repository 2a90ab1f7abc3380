//! One pass of the daemon's own audit: from the end of the last pass to the ack floor. It runs beside the loop and only reads.
//!
//! Most sequences are accounted for without a question to the server: this process decided them, or a table has a row for them.
//! Only the rest is read from the stream, and the ids decide.

use std::time::{Duration, SystemTime};

use crate::config::{Database, OnConflict, Retention};
use crate::jetstream;
use crate::jetstream::stored::StreamReader;
use crate::model::delivery::Delivery;
use crate::model::ranges::{Range, Ranges};
use crate::model::schemes::IdSchemes;
use crate::model::time::unix_ns;
use crate::model::view::ConsumerView;
use crate::store::{self, Anchor, AuditMark, OpenError, Reader};
use crate::worker::missing::{Verdict, VerdictRules};
use crate::worker::retention::{RETENTION_MIN, pruned_before};

/// The wait for the message that shows whether the sequences still mean the same messages. The permission to ask is optional.
const ANCHOR_PATIENCE: Duration = Duration::from_secs(2);
/// Rows of `processed_ids` that are read together, and that are read beyond the number of the sequences in question.
const ROWS: u32 = 20_000;
const ROWS_MORE: u64 = 100_000;
/// Dead letters that are counted as accounted for. The ids decide on the rest.
const LETTERS_MAX: u32 = 10_000;
/// Ranges of missing sequences that are named. All are counted.
const NAMED_MAX: usize = 50;

/// What a pass needs.
pub struct Pass {
    pub reader: StreamReader,
    pub database: Database,
    pub schemes: IdSchemes,
    pub retention: Retention,
    pub on_conflict: OnConflict,
    pub view: ConsumerView,
    /// The sequences that this process decided itself.
    pub decided: Ranges,
    /// The message with the highest of them.
    pub newest: Option<Anchor>,
    /// `false`: only the filter of the consumer is recorded.
    pub check: bool,
}

/// What a pass found.
pub struct Passed {
    /// What the next pass continues with.
    pub mark: AuditMark,
    pub audited_through: u64,
    pub missing: Missing,
    /// Messages in no table that may not have to be in one.
    pub undetermined: u64,
    /// Sequences that left the stream and are in no table.
    pub removed: Ranges,
    /// The sequences that this process decided may mean other messages now: the stream lost its tail, or was recreated.
    pub reused: bool,
}

/// The missing messages: how many, and the first of their sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    pub count: u64,
    ranges: Vec<Range>,
}

/// Why a pass ended too early.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Server(#[from] jetstream::Error),
    #[error("the database cannot be opened")]
    Open(#[from] OpenError),
    #[error("the database cannot be read")]
    Database(#[from] store::Error),
}

impl Missing {
    fn add(&mut self, seq: u64) {
        self.count += 1;
        match self.ranges.last_mut() {
            Some(last) if last.to + 1 == seq => last.to = seq,
            Some(_) | None => {
                if self.ranges.len() < NAMED_MAX {
                    self.ranges.push(Range { from: seq, to: seq });
                }
            }
        }
    }

    pub fn first(&self) -> Option<u64> {
        self.ranges.first().map(|range| range.from)
    }
}

/// `3, 7 to 9`, with a note if not all are named.
impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<String> = self.ranges.iter().map(Range::to_string).collect();
        write!(f, "{}", names.join(", "))?;
        let named: u64 = self.ranges.iter().map(|range| range.count()).sum();
        if self.count > named { write!(f, " and {} more", self.count - named) } else { Ok(()) }
    }
}

/// The last sequence that the server will not deliver again. With nothing pending, the ack floor may lag behind: it moves only with
/// an acknowledgement.
pub fn settled(view: &ConsumerView) -> u64 {
    let floor = view.ack_floor_stream_seq;
    if view.num_ack_pending == 0 { floor.max(view.delivered_stream_seq) } else { floor }
}

/// The last sequence that the consumer passed, or may have passed, under another filter than `filters`.
pub fn other_filter_through(mark: Option<&AuditMark>, filters: &[String], last_seq: u64) -> u64 {
    match mark {
        None => 0,
        Some(mark) if mark.filters == filters => mark.other_filter_through,
        // Under the old filter, the consumer may have passed messages above the last delivery.
        Some(_) => last_seq,
    }
}

impl Pass {
    pub async fn run(mut self) -> Result<Passed, PassError> {
        let mut database = Reader::open(&self.database).await?;
        let before = database.audit_mark().await?;
        let oldest = database.oldest_processed_at().await?;
        let reused = self.is_reused(before.as_ref()).await;
        if reused {
            self.decided.clear();
            self.newest = None;
        }
        let mut mark = self.begin(before.as_ref(), reused);
        let to = settled(&self.view).min(self.view.stream_last_seq);
        let first = if before.is_some() && !reused { mark.through + 1 } else { self.view.stream_first_seq };
        // An operator has said that the orders up to there were processed without this database.
        let not_ours_through = database.binding().await?.map_or(0, |binding| binding.not_ours_through);
        let first = first.max(self.reader.starts_at().seq).max(not_ours_through + 1);
        let wanted = Range { from: first, to };
        let mut found = Findings::default();
        if self.check && wanted.from <= wanted.to {
            let rules = VerdictRules {
                start_ns: self.reader.starts_at().ns,
                pruned_before_ns: pruned_before(self.retention, oldest, unix_ns(SystemTime::now())),
                other_filter_through: mark.other_filter_through,
                on_conflict: self.on_conflict,
            };
            for range in self.unaccounted(&mut database, wanted, mark.rows_since_ns).await? {
                self.read(&mut database, range, &rules, &mut found).await?;
            }
            if found.was_read {
                self.reader.confirm().await?;
            }
        }
        let is_recent = before.as_ref().is_some_and(|before| self.keeps_rows_since(before.audited_at_ns));
        if reused || !is_recent || !self.reader.shows_removals() {
            // The rows of these sequences may be deleted, or the consumer was not for them.
            found.absent.clear();
        }
        if self.check {
            // What left the stream before the first pass cannot be known.
            let end = to.max(mark.through).max(wanted.from - 1);
            mark.through = found.missing.first().map_or(end, |first| first - 1);
            mark.audited_at_ns = unix_ns(SystemTime::now());
        }
        let Findings { missing, undetermined, absent: removed, .. } = found;
        Ok(Passed { mark, audited_through: to, missing, undetermined, removed, reused })
    }

    /// Whether the sequences up to the last mark mean other messages now.
    async fn is_reused(&self, mark: Option<&AuditMark>) -> bool {
        let created_ns = self.reader.incarnation().stream_ns;
        let is_recreated = mark.is_some_and(|mark| mark.rows_since_ns < created_ns);
        let Some(anchor) = self.newest.or(mark.and_then(|mark| mark.anchor)) else { return is_recreated };
        match tokio::time::timeout(ANCHOR_PATIENCE, self.reader.message_at(anchor.stream_seq, 1)).await {
            Ok(Ok(Some(arrival))) => arrival.raw.position.published_ns != anchor.published_ns,
            Ok(Ok(None)) if self.view.stream_last_seq < anchor.stream_seq => true,
            // The message was removed, or the server does not permit to ask: the time of the creation must do.
            Ok(Ok(None) | Err(_)) | Err(_) => is_recreated,
        }
    }

    /// Where this pass begins.
    fn begin(&self, before: Option<&AuditMark>, reused: bool) -> AuditMark {
        let created_ns = self.reader.incarnation().stream_ns;
        let filters = self.reader.filters().to_vec();
        let other_filter_through = other_filter_through(before, &filters, self.view.stream_last_seq);
        let fresh = AuditMark {
            through: 0,
            anchor: self.newest,
            filters,
            other_filter_through,
            rows_since_ns: created_ns,
            audited_at_ns: 0,
        };
        match before {
            None => fresh,
            // A recreated stream has a new consumer. Only rows from after its creation account for its sequences.
            Some(before) if reused && before.rows_since_ns < created_ns => {
                AuditMark { other_filter_through: 0, ..fresh }
            }
            // The stream lost its tail: a row from before may have the sequence of a message that came later.
            Some(_) if reused => AuditMark { rows_since_ns: unix_ns(SystemTime::now()), ..fresh },
            Some(before) => AuditMark {
                through: before.through,
                anchor: self.newest.or(before.anchor),
                rows_since_ns: before.rows_since_ns.max(created_ns),
                audited_at_ns: before.audited_at_ns,
                ..fresh
            },
        }
    }

    /// The sequences that neither this process nor a table accounts for.
    async fn unaccounted(
        &mut self,
        database: &mut Reader,
        wanted: Range,
        rows_since_ns: i64,
    ) -> Result<Vec<Range>, PassError> {
        let unknown = self.decided.gaps(wanted);
        // The sequences of a filtered consumer have gaps that no row fills, so there the ids decide.
        if unknown.is_empty() || self.reader.is_filtered() {
            return Ok(unknown);
        }
        for seq in database.letter_seqs(wanted, rows_since_ns, LETTERS_MAX).await? {
            self.decided.add(seq);
        }
        // The rows in question are among the newest.
        let mut left = unknown.iter().map(|range| range.count()).sum::<u64>().saturating_add(ROWS_MORE);
        let mut below_row = i64::MAX;
        loop {
            let rows = database.newest_rows(below_row, ROWS).await?;
            let Some(last) = rows.last() else { break };
            below_row = last.row;
            for row in rows.iter().rev().filter(|row| row.processed_at_ns >= rows_since_ns) {
                if (wanted.from..=wanted.to).contains(&row.stream_seq) {
                    self.decided.add(row.stream_seq);
                }
            }
            left = left.saturating_sub(rows.len() as u64);
            if left == 0 || self.decided.gaps(wanted).is_empty() {
                break;
            }
        }
        Ok(self.decided.gaps(wanted))
    }

    async fn read(
        &self,
        database: &mut Reader,
        range: Range,
        rules: &VerdictRules,
        found: &mut Findings,
    ) -> Result<(), PassError> {
        let first = self.view.stream_first_seq;
        if range.from < first {
            found.absent.add_range(Range { from: range.from, to: range.to.min(first - 1) });
        }
        let mut from = range.from.max(first);
        while from <= range.to {
            found.was_read = true;
            let (arrivals, next) = self.reader.some(from, range.to).await?;
            let deliveries = arrivals.into_iter().map(|arrival| Delivery::new(arrival.raw, &self.schemes)).collect();
            self.check_page(database, Range { from, to: next - 1 }, deliveries, rules, found).await?;
            from = next;
        }
        Ok(())
    }

    async fn check_page(
        &self,
        database: &mut Reader,
        range: Range,
        deliveries: Vec<Delivery>,
        rules: &VerdictRules,
        found: &mut Findings,
    ) -> Result<(), PassError> {
        let claims = database.known(&deliveries.iter().collect::<Vec<_>>()).await?;
        let mut absent_from = range.from;
        let mut missing = Vec::new();
        for (delivery, claim) in deliveries.iter().zip(claims) {
            let position = delivery.raw.position;
            found.add_absent(absent_from, position.stream_seq);
            absent_from = position.stream_seq + 1;
            // A message that was published after the look has taken the sequence of a lost one and is not delivered yet.
            if position.published_ns > unix_ns(self.view.last_published_at) {
                continue;
            }
            match rules.verdict(delivery, claim) {
                Verdict::NotForTheConsumer | Verdict::Processed | Verdict::DeadLetter => {}
                Verdict::Undetermined(_) => found.undetermined += 1,
                Verdict::Missing(_) => missing.push(delivery),
            }
        }
        found.add_absent(absent_from, range.to + 1);
        // A database of a former version has no record how its ids were made: they may be other ids.
        let other_ids = database.other_ids(&missing).await?;
        for (delivery, other_id) in missing.into_iter().zip(other_ids) {
            match other_id {
                Some(_) => found.undetermined += 1,
                None => found.missing.add(delivery.raw.position.stream_seq),
            }
        }
        Ok(())
    }

    /// Whether the database still has every row of a message that was processed since then.
    fn keeps_rows_since(&self, since_ns: i64) -> bool {
        let kept = match self.retention {
            Retention::Auto => RETENTION_MIN,
            Retention::For(age) => age,
        };
        // Some of them were processed a while before the last pass, above the floor.
        let passed_ns = unix_ns(SystemTime::now()).saturating_sub(since_ns);
        u128::from(passed_ns.max(0).unsigned_abs()) < kept.as_nanos() / 2
    }
}

#[derive(Default)]
struct Findings {
    was_read: bool,
    missing: Missing,
    undetermined: u64,
    /// Sequences without a message and without a row.
    absent: Ranges,
}

impl Findings {
    /// The sequences from `from` on and before `end`.
    fn add_absent(&mut self, from: u64, end: u64) {
        if from < end {
            self.absent.add_range(Range { from, to: end - 1 });
        }
    }
}
