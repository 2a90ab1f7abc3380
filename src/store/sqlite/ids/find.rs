//! The way from an id to its row: filters, then pages, then the rows themselves.

use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::key::{Key, PAGES};
use super::page::{Entries, checked};
use super::{Ids, damaged};
use crate::model::delivery::Delivery;
use crate::model::id::Digest;
use crate::store::sql::{chunks, values};
use crate::store::sqlite::LOOKING_UP;
use crate::store::sqlite::sql::{bind, failed};
use crate::store::{Earlier, Error};

/// Pages that are in memory for a moment, 1.6 kB each.
const PAGES_AT_ONCE: usize = 256;

impl Ids {
    /// For each of `deliveries`: the digest with which its id was processed, `None` if it was not processed; and the key of the id.
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

    /// The message that was processed under `id`. One row is read in nearly all cases.
    pub async fn earlier(&self, connection: &mut SqliteConnection, id: &str) -> Result<Option<Earlier>, Error> {
        let key = Key::of(id);
        let mut rows: Vec<i64> = self.open.get(&key).map(|open| open.row).into_iter().collect();
        let mut leads: Vec<Lead> =
            self.filters.candidates(key).map(|segment| Lead { segment, key, index: 0 }).collect();
        leads.sort_unstable_by_key(Lead::page);
        rows.extend(self.candidates(connection, &leads).await?.into_iter().map(|candidate| candidate.row));
        for row in rows {
            let found = sqlx::query("SELECT stream_seq, processed_at FROM processed_ids WHERE row = ? AND id = ?")
                .bind(row)
                .bind(id)
                .fetch_optional(&mut *connection)
                .await
                .map_err(|source| failed(LOOKING_UP, source))?;
            if let Some(found) = found {
                let stream_seq = found.get::<i64, _>(0).unsigned_abs();
                return Ok(Some(Earlier { stream_seq, processed_at_ns: found.get(1) }));
            }
        }
        Ok(None)
    }

    /// Reads the pages of `leads`, which are in the order of their pages.
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
            let rows = rows.map_err(|source| failed(LOOKING_UP, source))?;
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

/// Compares the rows themselves. A returned row costs more than a compared one, so the statement returns only rows of other
/// messages. Nearly always there are none.
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
        let others = others.map_err(|source| failed(LOOKING_UP, source))?;
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
