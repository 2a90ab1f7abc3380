//! Which rows of `processed_ids` may be deleted, and the record of what was deleted.

use sqlx::{Row, SqliteConnection};

use super::sql::to_i64;
use crate::store::{Gone, Mark, Prunable};

/// The oldest rows, up to the first one that must stay.
pub struct Going {
    pub last_row: i64,
    /// Some are below the first sequence of the stream.
    any_below: bool,
    /// Of those that are not: the highest sequence, and when the last one was processed.
    highest_seq: Option<i64>,
    processed_ns: Option<i64>,
}

/// Looks at the `limit` oldest rows. `None` if the first one must stay.
///
/// Rows are in the order of the commits, so a row is not younger than any row after it. One that was written while the clock was
/// ahead must not keep all rows: its time counts as the earliest time among the rows behind it. All of these that are among the
/// oldest are looked at, and of the rest those that are once, twice, four times `limit` away, and so on.
pub async fn find(
    connection: &mut SqliteConnection,
    prunable: Prunable,
    limit: u32,
) -> Result<Option<Going>, sqlx::Error> {
    let Prunable { before_ns, gone } = prunable;
    let row = sqlx::query(
        "WITH RECURSIVE ends AS (SELECT min(row) AS first, max(row) AS last FROM processed_ids), \
         samples (row, step) AS (SELECT first + ?1, ?1 FROM ends UNION ALL \
         SELECT row + step, 2 * step FROM samples WHERE row + step <= (SELECT last FROM ends)), \
         later AS (SELECT min((SELECT processed_at FROM processed_ids AS p WHERE p.row >= samples.row ORDER BY p.row LIMIT 1)) \
         AS at FROM samples), \
         oldest AS (SELECT row, stream_seq, min(processed_at) OVER (ORDER BY row DESC) AS at \
         FROM (SELECT row, stream_seq, processed_at FROM processed_ids ORDER BY row LIMIT ?1)), \
         judged AS (SELECT row, stream_seq, min(oldest.at, coalesce(later.at, oldest.at)) AS at FROM oldest, later), \
         kept AS (SELECT min(row) AS first FROM judged WHERE NOT (at < ?2 AND (stream_seq < ?3 OR at < ?4))) \
         SELECT max(row), coalesce(max(stream_seq < ?3), 0), max(iif(stream_seq < ?3, NULL, stream_seq)), \
         max(iif(stream_seq < ?3, NULL, at)) FROM judged, kept WHERE first IS NULL OR row < first",
    )
    .bind(limit)
    .bind(before_ns)
    .bind(gone.map_or(i64::MAX, |gone| to_i64(gone.below_seq)))
    .bind(gone.map_or(i64::MAX, |gone| gone.processed_before_ns))
    .fetch_one(connection)
    .await?;
    let last_row: Option<i64> = row.get(0);
    Ok(last_row.map(|last_row| Going {
        last_row,
        any_below: row.get(1),
        highest_seq: row.get(2),
        processed_ns: row.get(3),
    }))
}

impl Going {
    /// Records up to where ids are deleted, in the same transaction.
    pub async fn mark(&self, connection: &mut SqliteConnection, gone: Gone) -> Result<(), sqlx::Error> {
        let below = self.any_below.then_some((to_i64(gone.below_seq), gone.published_before_ns));
        let former = self.highest_seq.zip(self.processed_ns).map(|(seq, at)| (seq.saturating_add(1), at));
        for (cause, mark) in [("sequence", below), ("time", former)] {
            let Some((below_seq, before_ns)) = mark else { continue };
            let sql = "INSERT INTO pruned (cause, below_seq, before_ns) VALUES (?, ?, ?) ON CONFLICT (cause) DO UPDATE SET \
                 below_seq = max(below_seq, excluded.below_seq), before_ns = max(before_ns, excluded.before_ns)";
            sqlx::query(sql).bind(cause).bind(below_seq).bind(before_ns).execute(&mut *connection).await?;
        }
        Ok(())
    }
}

/// What [`Going::mark`] has recorded so far.
pub async fn marks(connection: &mut SqliteConnection) -> Result<Vec<Mark>, sqlx::Error> {
    let rows = sqlx::query("SELECT below_seq, before_ns FROM pruned").fetch_all(connection).await?;
    let mark =
        |row: &sqlx::sqlite::SqliteRow| Mark { below_seq: row.get::<i64, _>(0).unsigned_abs(), before_ns: row.get(1) };
    Ok(rows.iter().map(mark).collect())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::store::sqlite::Store;

    /// The rows that are left of `rows` (processed at, stream sequence) after one step of pruning a real file.
    async fn pruned(store: &mut Store, rows: &[(i64, i64)], prunable: Prunable, limit: u32) -> (u64, Vec<(i64, i64)>) {
        let mut tx = store.begin().await.unwrap();
        sqlx::query("DELETE FROM processed_ids").execute(tx.connection()).await.unwrap();
        for (at, seq) in rows {
            sqlx::query("INSERT INTO processed_ids (id, stream_seq, digest, processed_at) VALUES (hex(randomblob(8)), ?, x'00', ?)")
                .bind(seq)
                .bind(at)
                .execute(tx.connection())
                .await
                .unwrap();
        }
        tx.commit().await.unwrap();
        let went = store.prune(prunable, limit).await.unwrap();
        let mut tx = store.begin().await.unwrap();
        let left = sqlx::query_as("SELECT processed_at, stream_seq FROM processed_ids ORDER BY row");
        let left = left.fetch_all(tx.connection()).await.unwrap();
        tx.commit().await.unwrap();
        let counts = store.counts().await.unwrap();
        assert_eq!(counts.processed_ids, left.len() as u64, "counted by rowid");
        (went, left)
    }

    /// When each row was processed at the latest, by its own time and by those of rows behind it.
    fn times(rows: &[(i64, i64)], limit: usize) -> Vec<i64> {
        let (mut samples, mut step) = (vec![limit], limit);
        while samples[samples.len() - 1] + step < rows.len() {
            samples.push(samples[samples.len() - 1] + step);
            step *= 2;
        }
        let at = |index: usize| rows.get(index).map(|(at, _)| *at);
        let later = samples.into_iter().filter_map(at).min().unwrap_or(i64::MAX);
        (0..rows.len().min(limit))
            .map(|index| (index..rows.len().min(limit)).filter_map(at).min().unwrap().min(later))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn pruning_takes_the_oldest_ids_and_stops_at_the_first_that_must_stay(
            // Few values, so that the bounds themselves come up.
            steps in vec((vec((0..8_i64, 0..8_i64), 0..24), 0..9_i64, 0..9_u64, 0..9_i64, any::<bool>(), 1..14_u32), 12),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let folder = tempfile::tempdir().unwrap();
            let mut store = runtime.block_on(Store::open(&folder.path().join("orders.db"))).unwrap();
            for (rows, before_ns, below_seq, processed_before_ns, auto, limit) in steps {
                let gone = Gone { below_seq, published_before_ns: 0, processed_before_ns };
                let prunable = Prunable { before_ns, gone: auto.then_some(gone) };
                let times = times(&rows, limit as usize);
                let may_go = |(at, (_, seq)): &(&i64, &(i64, i64))| {
                    let elsewhere = **at < processed_before_ns || seq.unsigned_abs() < below_seq;
                    **at < before_ns && (!auto || elsewhere)
                };
                let going = times.iter().zip(&rows).take_while(may_go).count();
                let (went, left) = runtime.block_on(pruned(&mut store, &rows, prunable, limit));
                prop_assert_eq!(went, going as u64);
                prop_assert_eq!(&left[..], &rows[going..]);
            }
        }
    }

    #[tokio::test]
    async fn rows_from_a_clock_that_was_ahead_do_not_stop_the_pruning() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(&folder.path().join("orders.db")).await.unwrap();
        let future = (2..42).map(|seq| (i64::MAX / 2, seq));
        let rows: Vec<(i64, i64)> =
            std::iter::once((1, 1)).chain(future).chain((42..200).map(|seq| (seq, seq))).collect();
        let gone = Gone { below_seq: 1_000, published_before_ns: 500, processed_before_ns: 0 };
        let prunable = Prunable { before_ns: 100, gone: Some(gone) };
        let (went, left) = pruned(&mut store, &rows, prunable, 10).await;
        assert_eq!((went, left.len()), (10, 189));
        let mut all = 0;
        loop {
            match store.prune(prunable, 10).await.unwrap() {
                0 => break,
                went => all += went,
            }
        }
        assert_eq!(all, 89, "all that were processed before 100");
        let mut tx = store.begin().await.unwrap();
        assert_eq!(marks(tx.connection()).await.unwrap(), [Mark { below_seq: 1_000, before_ns: 500 }]);
    }

    #[tokio::test]
    async fn ids_of_a_former_stream_are_recorded_with_their_sequence_and_time() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(&folder.path().join("orders.db")).await.unwrap();
        let gone = Gone { below_seq: 3, published_before_ns: 80, processed_before_ns: 70 };
        let prunable = Prunable { before_ns: 100, gone: Some(gone) };
        let (went, _) = pruned(&mut store, &[(10, 900), (20, 800), (75, 2), (90, 3)], prunable, 10).await;
        assert_eq!(went, 3);
        let mut tx = store.begin().await.unwrap();
        let expected = [Mark { below_seq: 3, before_ns: 80 }, Mark { below_seq: 901, before_ns: 20 }];
        assert_eq!(marks(tx.connection()).await.unwrap(), expected);
    }
}
