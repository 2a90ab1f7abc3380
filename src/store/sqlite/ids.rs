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
use std::fmt;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use futures_util::TryStreamExt;
use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::{bind, chunks, values};
use crate::model::delivery::Delivery;
use crate::model::id::{Digest, head};
use crate::store::Error;
use crate::store::ErrorClass;

/// Ids that are sealed together. They take 3 MiB of memory before, and 150 kB for their filter after.
pub const SEGMENT_ROWS: usize = 50_000;
const PAGES: i64 = 256;
/// Positions of a filter in which all probes for an id are: 2 KiB in memory, so that a look waits for one page of memory only.
const BLOCK: usize = 512;
/// 24 bits an id, in whole blocks. With 8 probes, one filter in 11,000 says that it may have an id that it has not.
const FILTER_BITS: usize = (24 * SEGMENT_ROWS).next_multiple_of(BLOCK);
const PROBES: usize = 8;
/// Of a hash at the end of each page and filter: a bit that is wrong in there would make an id look new.
const CHECK_BYTES: usize = 8;
/// Pages that are in memory for a moment, 1.6 kB each.
const PAGES_AT_ONCE: usize = 256;
const LOOKING_UP: &str = "looking ids up";
const INDEXING: &str = "reading the index of the ids";
const SEALING: &str = "writing the index of the ids";

/// What is in memory of the index.
#[derive(Debug)]
pub struct Ids {
    /// Oldest first.
    segments: Vec<Segment>,
    filters: Filters,
    open: HashMap<Key, Open, BuildHasherDefault<AsItIs>>,
    /// The last row that is known here.
    last_row: i64,
    /// What the transaction in hand has added to `open`.
    staged: Vec<(Key, i64)>,
    /// Whether there may be dead letters, or were some.
    pub any_letters: bool,
    /// SQLite's number for what others have committed, as of the last look. It means nothing on another connection.
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
    /// There are more rows than go into one segment: [`Ids::seal`] and go on.
    NotYet,
}

impl Default for Ids {
    fn default() -> Self {
        Self {
            segments: Vec::new(),
            filters: Filters::default(),
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
    /// For who only reads: what is to be sealed is left to the daemon, which does it with its next transaction.
    pub fn reading() -> Self {
        Self { segment_rows: SEGMENT_ROWS * 10, ..Self::default() }
    }

    /// Seals after so many rows: tests need not write [`SEGMENT_ROWS`].
    pub fn seal_after(&mut self, rows: usize) {
        self.segment_rows = rows.clamp(1, SEGMENT_ROWS);
    }

    /// To be called when there is another connection, since the last one left a transaction that may or may not be in the file.
    pub fn distrust(&mut self) {
        self.unstage(0);
        self.data_version = None;
    }

    /// Takes in what the file has, if anybody else may have written it since the last time. To be called within a transaction,
    /// with the `PRAGMA data_version` of its connection.
    pub async fn refresh(&mut self, connection: &mut SqliteConnection, data_version: i64) -> Result<Fresh, Error> {
        if self.data_version == Some(data_version) {
            return Ok(Fresh::Yes);
        }
        let failed = |source| Error::new(INDEXING, source);
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
            // Somebody has deleted rows, or a seal of ours was undone.
            self.open.clear();
            self.last_row = floor;
            if self.read_rows(connection).await? == Fresh::NotYet {
                return Ok(Fresh::NotYet);
            }
        }
        self.data_version = Some(data_version);
        Ok(Fresh::Yes)
    }

    /// Drops the segments that are gone from the file, and reads those that are new in it.
    async fn read_segments(&mut self, connection: &mut SqliteConnection) -> Result<(), Error> {
        let failed = |source| Error::new(INDEXING, source);
        let there: Vec<(i64, i64, i64)> =
            sqlx::query_as("SELECT segment, first_row, last_row FROM id_segments ORDER BY segment")
                .fetch_all(&mut *connection)
                .await
                .map_err(failed)?;
        let same = |known: &Segment| there.contains(&(known.number, known.first_row, known.last_row));
        for segment in self.segments.extract_if(.., |known| !same(known)) {
            self.filters.remove(segment.number);
        }
        // What is not in the index would look new.
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

    /// Reads the rows after the last one that is known, as many as go into the open segment.
    async fn read_rows(&mut self, connection: &mut SqliteConnection) -> Result<Fresh, Error> {
        let room = self.segment_rows.saturating_sub(self.open.len());
        // One more, to see whether there is more.
        let mut rows = sqlx::query("SELECT row, id, digest FROM processed_ids WHERE row > ? ORDER BY row LIMIT ?")
            .bind(self.last_row)
            .bind(room as i64 + 1)
            .fetch(connection);
        let mut left = room;
        while let Some(row) = rows.try_next().await.map_err(|source| Error::new(INDEXING, source))? {
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

    /// Writes the index of the open segment. To be called in the transaction of [`refresh`](Self::refresh), before anything is
    /// [added](Self::add) in it.
    pub async fn seal(&mut self, connection: &mut SqliteConnection) -> Result<(), Error> {
        let failed = |source| Error::new(SEALING, source);
        if self.segments.len() % 20 == 19 {
            // The first start after many rows were put in by hand, or by the version before, is a long one.
            tracing::info!(rows = (self.segments.len() + 1) * self.segment_rows, "ids are indexed");
        }
        let Some(first_row) = self.open.values().map(|open| open.row).min() else { return Ok(()) };
        let number = self.segments.last().map_or(0, |segment| segment.number) + 1;
        let mut pages = vec![Vec::new(); PAGES as usize];
        let mut filter = vec![0_u8; FILTER_BITS / 8];
        for (key, open) in &self.open {
            let Ok(offset) = u32::try_from(open.row - first_row) else {
                let text = format!("rows {first_row} and {} of processed_ids are too far apart", open.row);
                return Err(failed(sqlx::Error::Protocol(text)));
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
        // There are pages already if somebody has deleted the segments, so that the index is made anew.
        let sql = values("INSERT OR REPLACE INTO id_pages (page, entries) VALUES ", 2, pages.len(), "");
        sqlx::query_with(AssertSqlSafe(sql), arguments).execute(connection).await.map_err(failed)?;

        self.filters.add(number, &filter);
        self.segments.push(Segment { number, first_row, last_row: self.last_row });
        self.open.clear();
        Ok(())
    }

    /// Removes what the index has of rows up to `row`, which are gone from the table, from the file.
    pub async fn forget(&self, connection: &mut SqliteConnection, row: i64) -> Result<(), Error> {
        let failed = |source| Error::new("dropping a part of the index of the ids", source);
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

    /// Says of each of `deliveries` which digest its id was processed with, `None` if it was not, and the id's key.
    pub async fn find(
        &self,
        connection: &mut SqliteConnection,
        deliveries: &[&Delivery],
    ) -> Result<(Vec<Option<Digest>>, Vec<Key>), Error> {
        let keys: Vec<Key> = deliveries.iter().map(|delivery| Key::of(&delivery.id)).collect();
        let mut found = Vec::with_capacity(deliveries.len());
        let mut leads = Vec::new();
        for (index, key) in keys.iter().copied().enumerate() {
            let open = self.open.get(&key);
            found.push(open.map(|open| open.digest));
            if open.is_none() {
                leads.extend(self.filters.candidates(key).map(|segment| Lead { segment, key, index }));
            }
        }
        leads.sort_unstable_by_key(Lead::page);
        let candidates = self.candidates(connection, &leads).await?;
        verify(connection, deliveries, &candidates, &mut found).await?;
        Ok((found, keys))
    }

    /// Looks into the pages of `leads`, which are in the order of their pages.
    async fn candidates(&self, connection: &mut SqliteConnection, leads: &[Lead]) -> Result<Vec<Candidate>, Error> {
        let mut numbers: Vec<i64> = leads.iter().map(Lead::page).collect();
        numbers.dedup();
        let mut candidates = Vec::new();
        let mut leads = leads.iter().peekable();
        for chunk in numbers.chunks(PAGES_AT_ONCE).flat_map(chunks) {
            let sql =
                values("SELECT page, entries FROM id_pages WHERE page IN (VALUES ", 1, chunk.len(), ") ORDER BY page");
            let mut arguments = SqliteArguments::default();
            for page in chunk {
                bind(&mut arguments, *page)?;
            }
            let rows = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(&mut *connection).await;
            let rows = rows.map_err(|source| Error::new(LOOKING_UP, source))?;
            if rows.len() < chunk.len() {
                return Err(damaged("a page is missing".to_owned()));
            }
            for row in rows {
                let page: i64 = row.get(0);
                let Some(entries) = checked(page, row.get(1)) else {
                    return Err(damaged(format!("page {page} is not what was written")));
                };
                let entries = Entries(entries.as_chunks().0);
                while let Some(lead) = leads.next_if(|lead| lead.page() <= page) {
                    let at = self.segments.binary_search_by_key(&lead.segment, |segment| segment.number);
                    if lead.page() == page
                        && let Ok(at) = at
                    {
                        let rows = entries.offsets(lead.key).map(|offset| self.segments[at].first_row + offset);
                        candidates.extend(rows.map(|row| Candidate { index: lead.index, row }));
                    }
                }
            }
        }
        Ok(candidates)
    }

    /// Takes in rows that the transaction in hand has added, the last of which is `last_row`.
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

    /// Takes back what was added since then.
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

/// A segment that may have an id.
struct Lead {
    segment: i64,
    key: Key,
    /// Of the delivery.
    index: usize,
}

impl Lead {
    fn page(&self) -> i64 {
        self.segment * PAGES + self.key.page()
    }
}

/// A row that may have the id of a delivery.
struct Candidate {
    index: usize,
    row: i64,
}

/// Looks at the rows themselves. A row that comes back costs more than one that is looked at, so the statement returns only those
/// that are another message's; nearly always there are none.
async fn verify(
    connection: &mut SqliteConnection,
    deliveries: &[&Delivery],
    candidates: &[Candidate],
    found: &mut [Option<Digest>],
) -> Result<(), Error> {
    for chunk in chunks(candidates) {
        let sql = values(
            "SELECT column1, CASE WHEN id = column3 THEN digest END \
             FROM (VALUES ",
            4,
            chunk.len(),
            ") LEFT JOIN processed_ids ON row = column2 WHERE id IS NOT column3 OR digest IS NOT column4",
        );
        let mut arguments = SqliteArguments::default();
        for (position, candidate) in (0_i64..).zip(chunk) {
            let delivery = deliveries[candidate.index];
            bind(&mut arguments, position)?;
            bind(&mut arguments, candidate.row)?;
            bind(&mut arguments, delivery.id.clone())?;
            bind(&mut arguments, delivery.digest.0.as_slice())?;
        }
        let others = sqlx::query_with(AssertSqlSafe(sql), arguments).fetch_all(&mut *connection).await;
        let others = others.map_err(|source| Error::new(LOOKING_UP, source))?;
        let mut digests: Vec<Option<Digest>> =
            chunk.iter().map(|candidate| Some(deliveries[candidate.index].digest)).collect();
        for other in others {
            let digest: Option<&[u8]> = other.get(1);
            digests[other.get::<i64, _>(0) as usize] = digest.map(Digest::stored);
        }
        for (candidate, digest) in chunk.iter().zip(digests) {
            found[candidate.index] = found[candidate.index].or(digest);
        }
    }
    Ok(())
}

/// The bytes of a page or a filter of that number, with their hash.
fn with_check(number: i64, mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend(check(number, &bytes));
    bytes
}

/// The bytes without their hash, if it is theirs.
fn checked(number: i64, stored: &[u8]) -> Option<&[u8]> {
    let (bytes, found) = stored.split_last_chunk()?;
    (*found == check(number, bytes)).then_some(bytes)
}

fn check(number: i64, bytes: &[u8]) -> [u8; CHECK_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&number.to_le_bytes()).update(bytes);
    head(&hasher.finalize())
}

/// SQLite finds what is wrong with its own pages; what is wrong with ours is as bad.
fn damaged(what: String) -> Error {
    Error { doing: INDEXING, class: ErrorClass::Corrupt, source: sqlx::Error::Protocol(what) }
}

/// One id in a page.
fn entry(key: Key, offset: u32) -> u64 {
    u64::from(key.tag()) << 32 | u64::from(offset)
}

/// A page as it is stored.
struct Entries<'a>(&'a [[u8; 8]]);

impl Entries<'_> {
    /// How far behind the first row of the segment the rows are that the id may be in.
    fn offsets(&self, key: Key) -> impl Iterator<Item = i64> {
        let first = self.0.partition_point(|bytes| u64::from_le_bytes(*bytes) < entry(key, 0));
        let entries = self.0[first..].iter().map(|bytes| u64::from_le_bytes(*bytes));
        entries.take_while(move |found| *found <= entry(key, u32::MAX)).map(|found| found as u32).map(i64::from)
    }
}

/// 128 bits of BLAKE3 over an id. Stored in part, so it must stay what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u8; 16]);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        state.write_u64(u64::from_ne_bytes([a, b, c, d, e, f, g, h]));
    }
}

/// A key is a hash already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

impl Key {
    fn of(id: &str) -> Self {
        Self(head(&blake3::hash(id.as_bytes())))
    }

    /// In which of the pages of a segment the id stands.
    fn page(self) -> i64 {
        i64::from(self.0[0])
    }

    /// What it stands under in there.
    fn tag(self) -> u32 {
        let [_, a, b, c, d, ..] = self.0;
        u32::from_be_bytes([a, b, c, d])
    }

    /// The positions of the id in a filter: a block, and in there by double hashing (Kirsch and Mitzenmacher 2006).
    fn probes(self) -> [usize; PROBES] {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        let block = (u64::from(u32::from_le_bytes([a, b, c, d])) * (FILTER_BITS / BLOCK) as u64) >> 32;
        let (first, step) = (u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]) | 1);
        std::array::from_fn(|probe| {
            let place = first.wrapping_add(step.wrapping_mul(probe as u16));
            block as usize * BLOCK + usize::from(place) % BLOCK
        })
    }
}

/// The filters of all segments, side by side: one look at a position answers for a whole group of them.
#[derive(Default)]
struct Filters {
    groups: Vec<Group>,
}

struct Group {
    /// Bit `n` of each word belongs to the segment in place `n`.
    segments: [Option<i64>; 32],
    positions: Box<[u32]>,
}

/// Of a byte, in a form in which four of them can be looked at at once.
const BITS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

impl Filters {
    /// The segments that may have the id.
    fn candidates(&self, key: Key) -> impl Iterator<Item = i64> {
        let probes = key.probes();
        self.groups.iter().flat_map(move |group| {
            // Half of the probes nearly always tell, and none of those waits for another one's word to come from memory.
            let hits = |half: &[usize]| half.iter().fold(u32::MAX, |hits, position| hits & group.positions[*position]);
            let (first, second) = probes.split_at(PROBES / 2);
            let hits = match hits(first) {
                0 => 0,
                some => some & hits(second),
            };
            let place = move |place: &usize| hits & 1 << place != 0;
            (0..group.segments.len()).filter(place).filter_map(|place| group.segments[place])
        })
    }

    fn add(&mut self, segment: i64, filter: &[u8]) {
        let free = |group: &Group| group.segments.iter().position(Option::is_none);
        let found = self.groups.iter().enumerate().find_map(|(group, it)| Some((group, free(it)?)));
        let (group, place) = found.unwrap_or_else(|| {
            self.groups.push(Group { segments: [None; 32], positions: vec![0; FILTER_BITS].into() });
            (self.groups.len() - 1, 0)
        });
        let group = &mut self.groups[group];
        group.segments[place] = Some(segment);
        for (positions, byte) in group.positions.chunks_mut(8).zip(filter) {
            for (position, bit) in positions.iter_mut().zip(BITS) {
                *position |= if u32::from(*byte) & bit == 0 { 0 } else { 1 << place };
            }
        }
    }

    fn remove(&mut self, segment: i64) {
        for group in &mut self.groups {
            if let Some(place) = group.segments.iter().position(|known| *known == Some(segment)) {
                group.segments[place] = None;
                group.positions.iter_mut().for_each(|position| *position &= !(1 << place));
            }
        }
        self.groups.retain(|group| group.segments.iter().any(Option::is_some));
    }
}

impl fmt::Debug for Filters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filters").field("groups", &self.groups.len()).finish()
    }
}
