//! Which ids are processed: the index of `processed_ids`, a table that is only ever added to at its end and dropped from at its
//! start.
//!
//! The newest rows, the open segment, are indexed in memory alone, and read from the table at every start. When there are
//! [`SEGMENT_ROWS`] of them they are sealed: their index is written in one go, in 256 pages by the hash of the id, with a Bloom
//! filter that stays in memory. So a new id touches no old page however many there are, and dropping a segment is dropping
//! its pages. (In a B-tree keyed by the id, every random id dirties a page of its own; see benches/README.md.)
//!
//! The index only says where to look. Whether an id is processed is decided by the row itself, or for the open segment by 128
//! bits of BLAKE3 over the id, which is what we trust for digests as well. What is in memory is compared with the file
//! whenever somebody else may have written it: see [`Ids::refresh`].

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use futures_util::TryStreamExt;
use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use self::filters::SegmentFilters;
pub use self::key::Key;
use self::key::{AsItIs, FILTER_BITS, PAGES};
use self::page::{checked, entry, with_check};
pub use self::row::processed_id;
use super::sql::{bind, failed};
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::store::sql::values;
use crate::store::{Error, ErrorClass};

mod filters;
mod find;
mod key;
mod page;
mod row;

/// Ids that are sealed together. They take 3 MiB of memory before that, and 150 kB for their filter after.
pub const SEGMENT_ROWS: usize = 50_000;
const INDEXING: &str = "reading the index of the ids";
const SEALING: &str = "writing the index of the ids";

/// The part of the index that is in memory.
#[derive(Debug)]
pub struct Ids {
    /// Oldest first.
    segments: Vec<Segment>,
    filters: SegmentFilters,
    open: HashMap<Key, Open, BuildHasherDefault<AsItIs>>,
    /// The last row that is known here.
    last_row: i64,
    /// What the open transaction has added to `open`.
    staged: Vec<(Key, i64)>,
    /// Whether there may be open or closed dead letters.
    pub any_letters: bool,
    /// SQLite's number for the commits of other connections, at the last refresh. It means nothing on another connection.
    data_version: Option<i64>,
    segment_rows: usize,
}

#[derive(Debug)]
struct Segment {
    number: i64,
    first_row: i64,
    last_row: i64,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    row: i64,
    digest: Digest,
}

/// Whether everything in the file is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    Yes,
    /// There are more rows than one segment takes: call [`Ids::seal`] and refresh again.
    NotYet,
}

impl Default for Ids {
    fn default() -> Self {
        Self {
            segments: Vec::new(),
            filters: SegmentFilters::default(),
            open: HashMap::default(),
            last_row: 0,
            staged: Vec::new(),
            any_letters: true,
            data_version: None,
            segment_rows: SEGMENT_ROWS,
        }
    }
}

impl Ids {
    /// For readers. They seal nothing: the daemon does that in its next transaction.
    pub fn reading() -> Self {
        Self { segment_rows: SEGMENT_ROWS * 10, ..Self::default() }
    }

    /// Seals after this many rows, for tests that cannot write [`SEGMENT_ROWS`].
    pub fn seal_after(&mut self, rows: usize) {
        self.segment_rows = rows.clamp(1, SEGMENT_ROWS);
    }

    /// Must be called for a new connection: the last transaction of the old one may or may not be in the file.
    pub fn distrust(&mut self) {
        self.unstage(0);
        self.data_version = None;
    }

    /// Whether no other connection has written since the last refresh. `data_version`: as for [`refresh`](Self::refresh).
    pub fn is_at(&self, data_version: i64) -> bool {
        self.data_version == Some(data_version)
    }

    /// Reads the rows that other connections may have written since the last refresh. Must be called within a transaction, with the
    /// `PRAGMA data_version` of its connection.
    pub async fn refresh(&mut self, connection: &mut SqliteConnection, data_version: i64) -> Result<Fresh, Error> {
        if self.is_at(data_version) {
            return Ok(Fresh::Yes);
        }
        let failed = |source| failed(INDEXING, source);
        let (count, first, last, floor, any_letters): (i64, i64, i64, i64, bool) = sqlx::query_as(
            "SELECT (SELECT count(*) FROM id_segments), coalesce((SELECT min(segment) FROM id_segments), 0), \
             coalesce((SELECT max(segment) FROM id_segments), 0), \
             coalesce((SELECT last_row FROM id_segments ORDER BY segment DESC LIMIT 1), 0), \
             EXISTS (SELECT 1 FROM dead_letters) OR EXISTS (SELECT 1 FROM closed_letters)",
        )
        .fetch_one(&mut *connection)
        .await
        .map_err(failed)?;
        let number = |segment: Option<&Segment>| segment.map_or(0, |segment| segment.number);
        let known = (self.segments.len() as i64, number(self.segments.first()), number(self.segments.last()));
        if (known, self.floor()) != ((count, first, last), floor) {
            self.read_segments(connection).await?;
        }
        self.any_letters = any_letters;
        self.open.retain(|_, open| open.row > floor);
        self.last_row = self.last_row.max(floor);
        if self.read_rows(connection).await? == Fresh::NotYet {
            return Ok(Fresh::NotYet);
        }
        let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM processed_ids WHERE row > ?")
            .bind(floor)
            .fetch_one(&mut *connection)
            .await
            .map_err(failed)?;
        if rows != self.open.len() as i64 {
            // An operator has deleted rows, or a seal was undone.
            self.open.clear();
            self.last_row = floor;
            if self.read_rows(connection).await? == Fresh::NotYet {
                return Ok(Fresh::NotYet);
            }
        }
        self.data_version = Some(data_version);
        Ok(Fresh::Yes)
    }

    /// Forgets the segments that are gone from the file, and reads the new ones.
    async fn read_segments(&mut self, connection: &mut SqliteConnection) -> Result<(), Error> {
        let failed = |source| failed(INDEXING, source);
        let there: Vec<(i64, i64, i64)> =
            sqlx::query_as("SELECT segment, first_row, last_row FROM id_segments ORDER BY segment")
                .fetch_all(&mut *connection)
                .await
                .map_err(failed)?;
        let same = |known: &Segment| there.contains(&(known.number, known.first_row, known.last_row));
        for segment in self.segments.extract_if(.., |known| !same(known)) {
            self.filters.remove(segment.number);
        }
        // An id that is missing in the index would look new.
        if !there
            .is_sorted_by(|(before, _, last_row), (number, first_row, _)| *number == before + 1 && first_row > last_row)
        {
            return Err(damaged("a segment is missing".to_owned()));
        }
        if let Some((_, first_row, _)) = there.first() {
            let rows = "SELECT EXISTS (SELECT 1 FROM processed_ids WHERE row < ?)";
            let before = sqlx::query_scalar(rows).bind(first_row).fetch_one(&mut *connection).await.map_err(failed)?;
            if before {
                return Err(damaged("the first segment is missing".to_owned()));
            }
        }
        let last_known = self.segments.last().map_or(i64::MIN, |segment| segment.number);
        for (number, first_row, last_row) in there.into_iter().filter(|(number, ..)| *number > last_known) {
            let filter: Vec<u8> = sqlx::query_scalar("SELECT filter FROM id_segments WHERE segment = ?")
                .bind(number)
                .fetch_one(&mut *connection)
                .await
                .map_err(failed)?;
            match checked(number, &filter).filter(|filter| filter.len() == FILTER_BITS / 8) {
                Some(filter) => self.filters.add(number, filter),
                None => return Err(damaged(format!("the filter of segment {number} is not what was written"))),
            }
            self.segments.push(Segment { number, first_row, last_row });
        }
        Ok(())
    }

    /// Reads the rows after the last known row, as many as the open segment takes.
    async fn read_rows(&mut self, connection: &mut SqliteConnection) -> Result<Fresh, Error> {
        let free_rows = self.segment_rows.saturating_sub(self.open.len());
        // One more row than that, to see whether there are more.
        let mut rows = sqlx::query("SELECT row, id, digest FROM processed_ids WHERE row > ? ORDER BY row LIMIT ?")
            .bind(self.last_row)
            .bind(free_rows as i64 + 1)
            .fetch(connection);
        let mut left = free_rows;
        while let Some(row) = rows.try_next().await.map_err(|source| failed(INDEXING, source))? {
            if left == 0 {
                return Ok(Fresh::NotYet);
            }
            left -= 1;
            self.last_row = row.get(0);
            self.open.insert(Key::of(row.get(1)), Open { row: self.last_row, digest: Digest::stored(row.get(2)) });
        }
        Ok(Fresh::Yes)
    }

    /// The last row that is sealed.
    fn floor(&self) -> i64 {
        self.segments.last().map_or(0, |segment| segment.last_row)
    }

    /// Whether the open segment is due to be sealed.
    pub fn is_full(&self) -> bool {
        self.open.len() >= self.segment_rows
    }

    /// Writes the index of the open segment. Must be called in the transaction of [`refresh`](Self::refresh), before anything is
    /// [added](Self::add).
    pub async fn seal(&mut self, connection: &mut SqliteConnection) -> Result<(), Error> {
        let failed = |source| failed(SEALING, source);
        if self.segments.len() % 20 == 19 {
            // The first start after an upgrade, or after many rows were inserted by hand, takes long.
            tracing::info!(rows = (self.segments.len() + 1) * self.segment_rows, "ids are indexed");
        }
        let Some(first_row) = self.open.values().map(|open| open.row).min() else { return Ok(()) };
        let number = self.segments.last().map_or(0, |segment| segment.number) + 1;
        let mut pages = vec![Vec::new(); PAGES as usize];
        let mut filter = vec![0_u8; FILTER_BITS / 8];
        for (key, open) in &self.open {
            let Ok(offset) = u32::try_from(open.row - first_row) else {
                let text = format!("rows {first_row} and {} of processed_ids are too far apart", open.row);
                return Err(Error::new(SEALING, ErrorClass::Other, text));
            };
            pages[key.page() as usize].push(entry(*key, offset));
            for position in key.probes() {
                filter[position / 8] |= 1 << (position % 8);
            }
        }
        let sql = "INSERT INTO id_segments (segment, first_row, last_row, filter) VALUES (?, ?, ?, ?)";
        let segment =
            sqlx::query(sql).bind(number).bind(first_row).bind(self.last_row).bind(with_check(number, filter.clone()));
        segment.execute(&mut *connection).await.map_err(failed)?;
        let mut arguments = SqliteArguments::default();
        for (page, entries) in (number * PAGES..).zip(&mut pages) {
            entries.sort_unstable();
            bind(&mut arguments, page)?;
            bind(&mut arguments, with_check(page, entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()))?;
        }
        // Pages exist already if an operator has deleted the segments, so that the index is built again.
        let sql = values("INSERT OR REPLACE INTO id_pages (page, entries) VALUES ", 2, pages.len(), "");
        sqlx::query_with(AssertSqlSafe(sql), arguments).execute(connection).await.map_err(failed)?;

        self.filters.add(number, &filter);
        self.segments.push(Segment { number, first_row, last_row: self.last_row });
        self.open.clear();
        Ok(())
    }

    /// Deletes the index of the rows up to `row`, which are gone from the table, from the file.
    pub async fn forget(&self, connection: &mut SqliteConnection, row: i64) -> Result<(), Error> {
        let failed = |source| failed("dropping a part of the index of the ids", source);
        for segment in self.segments.iter().take_while(|segment| segment.last_row <= row) {
            let first_page = segment.number * PAGES;
            sqlx::query("DELETE FROM id_pages WHERE page >= ? AND page < ?")
                .bind(first_page)
                .bind(first_page + PAGES)
                .execute(&mut *connection)
                .await
                .map_err(failed)?;
            let segment = sqlx::query("DELETE FROM id_segments WHERE segment = ?").bind(segment.number);
            segment.execute(&mut *connection).await.map_err(failed)?;
        }
        Ok(())
    }

    /// The same in memory, once that is durable.
    pub fn forgotten(&mut self, row: i64) {
        for segment in self.segments.extract_if(.., |segment| segment.last_row <= row) {
            self.filters.remove(segment.number);
        }
        self.open.retain(|_, open| open.row > row);
    }

    /// Adds the rows that the open transaction has inserted. The last of them is `last_row`.
    pub fn add(&mut self, rows: &[(Key, &Delivery)], last_row: i64) {
        let first_row = last_row + 1 - rows.len() as i64;
        for (row, (key, delivery)) in (first_row..).zip(rows) {
            self.open.insert(*key, Open { row, digest: delivery.digest });
            self.staged.push((*key, row));
        }
    }

    /// A point for [`unstage`](Self::unstage) to return to.
    pub fn staged(&self) -> usize {
        self.staged.len()
    }

    /// Removes what was added since then.
    pub fn unstage(&mut self, since: usize) {
        for (key, _) in self.staged.drain(since.min(self.staged.len())..) {
            self.open.remove(&key);
        }
    }

    /// What was added is durable.
    pub fn committed(&mut self) {
        if let Some((_, row)) = self.staged.last() {
            self.last_row = *row;
        }
        self.staged.clear();
    }
}

/// SQLite finds damage in its own pages. Damage in ours is as bad.
fn damaged(what: String) -> Error {
    Error::new(INDEXING, ErrorClass::Corrupt, what)
}
