//! Looks for rows that may have been published in the streams of their subjects.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::RelayContext;
use crate::jetstream;
use crate::jetstream::outbox::{SeekFrom, Seeker};
use crate::model::outbox::{OutboxRow, OutboxTarget};
use crate::model::text::chain;

pub(super) struct Seek {
    pub(super) around: RelayContext,
    pub(super) rows: Vec<OutboxRow>,
    pub(super) targets: HashMap<String, OutboxTarget>,
}

/// What was found.
pub struct Sought {
    /// Rows whose messages are in their streams.
    pub(super) done: Vec<i64>,
    /// The last row that was looked for.
    pub(super) through: i64,
}

impl Seek {
    pub(super) async fn run(self) -> Result<Sought, String> {
        let through = self.rows.iter().map(|row| row.row).max().unwrap_or_default();
        let done = self.find().await.map_err(|error| format!("looking for published rows: {}", chain(&error)))?;
        if !done.is_empty() {
            tracing::info!(
                rows = done.len(),
                "found rows of the outbox that were published before; they are not published again"
            );
        }
        Ok(Sought { done, through })
    }

    async fn find(&self) -> Result<Vec<i64>, jetstream::Error> {
        let mut done = Vec::new();
        let by_stream = self.by_stream().await?;
        if by_stream.is_empty() {
            return Ok(done);
        }
        let seeker = Seeker::connect(&self.around.nats).await?;
        for (stream, rows) in by_stream {
            let found = match self.find_in(&seeker, &stream, &rows).await {
                Err(jetstream::Error::Denied(denied)) => {
                    tracing::warn!(
                        %stream,
                        "cannot look for published rows: {denied}; the rows are published again, and the stream recognises those \
                         within its duplicate window"
                    );
                    continue;
                }
                found => found?,
            };
            done.extend(rows.iter().filter(|row| found.contains(&row.id)).map(|row| row.row));
        }
        done.sort_unstable();
        Ok(done)
    }

    /// The rows that may be in each stream. A subject without a stream has none: then nothing can be stored twice.
    async fn by_stream(&self) -> Result<BTreeMap<String, Vec<&OutboxRow>>, jetstream::Error> {
        let mut streams: HashMap<&str, Option<String>> = HashMap::new();
        let mut by_stream: BTreeMap<String, Vec<&OutboxRow>> = BTreeMap::new();
        for row in &self.rows {
            let subject = row.subject.as_str();
            if !streams.contains_key(subject) {
                streams.insert(subject, self.around.publisher.stream_of(subject).await?);
            }
            if let Some(Some(stream)) = streams.get(subject)
                && (row.sought_from.is_some() || self.targets.contains_key(stream))
            {
                by_stream.entry(stream.clone()).or_default().push(row);
            }
        }
        Ok(by_stream)
    }

    async fn find_in(
        &self,
        seeker: &Seeker,
        stream: &str,
        rows: &[&OutboxRow],
    ) -> Result<HashSet<String>, jetstream::Error> {
        let mut found = HashSet::new();
        let now = seeker.target(stream).await?;
        if let Some(target) = self.targets.get(stream) {
            let is_same = target.created_ns == now.created_ns && target.after_seq <= now.after_seq;
            let from = if is_same { target.after_seq + 1 } else { 1 };
            if from <= now.after_seq {
                let ids = rows.iter().map(|row| row.id.as_str()).collect();
                found.extend(seeker.seek(stream, SeekFrom::Sequence(from), &ids).await?);
            }
        }
        let since = rows.iter().filter_map(|row| row.sought_from).min();
        if let Some(since) = since {
            let repaired = rows.iter().filter(|row| row.sought_from.is_some());
            let ids = repaired.map(|row| row.id.as_str()).collect();
            found.extend(seeker.seek(stream, SeekFrom::Time(since), &ids).await?);
        }
        Ok(found)
    }
}
