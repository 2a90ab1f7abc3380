//! One transaction: claim ids, count attempts, write dead letters, commit. [`crate::store::Tx`] says what each function does.

use sqlx::sqlite::{SqliteArguments, SqliteQueryResult, SqliteRow};
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use super::ids::{Fresh, Ids, Key};
use super::sql::{bind, failed, to_i64};
use super::{LOOKING_UP, begin};
use crate::model::delivery::{Delivery, headers_json};
use crate::model::label::Label;
use crate::model::outcome::{Ignored, Outcome, Reason};
use crate::store::sql::{chunks, values};
use crate::store::{Attempts, Claim, Earlier, Error, Retry};

/// One open transaction, and what the store remembers of its connection.
#[derive(Debug)]
pub struct Tx<'s> {
    pub(super) connection: &'s mut SqliteConnection,
    pub(super) clean: &'s mut bool,
    pub(super) faulted: &'s mut bool,
    pub(super) any_attempts: &'s mut bool,
    pub(super) ids: &'s mut Ids,
    pub(super) outbox_committed: &'s mut i64,
    /// The last row of the outbox that [`Tx::outbox_written`] need not return.
    pub(super) outbox_row: i64,
    /// No statement has failed and nothing was undone.
    pub(super) sound: bool,
    pub(super) savepoint: Savepoint,
}

/// Where [`Tx::undo`] returns to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Savepoint {
    staged_ids: usize,
    outbox_row: i64,
}

impl Tx<'_> {
    pub fn connection(&mut self) -> &mut SqliteConnection {
        self.connection
    }

    pub(super) async fn begin(&mut self) -> Result<(), Error> {
        let data_version = begin(self.connection, "BEGIN IMMEDIATE").await.map_err(|error| self.failed(error))?;
        if !self.ids.is_at(data_version) {
            self.read_outbox_row().await?;
        }
        loop {
            let fresh = self.ids.refresh(self.connection, data_version).await.map_err(|error| self.failed(error))?;
            if self.ids.is_full() {
                self.ids.seal(self.connection).await.map_err(|error| self.failed(error))?;
            }
            if fresh == Fresh::Yes {
                return Ok(());
            }
        }
    }

    pub async fn claim(&mut self, deliveries: &[&Delivery], now_ns: i64) -> Result<Vec<Claim>, Error> {
        let (claims, keys) = known(self.connection, self.ids, deliveries).await.map_err(|error| self.failed(error))?;
        let rows = keys.into_iter().zip(deliveries.iter().copied()).zip(&claims);
        let new: Vec<(Key, &Delivery)> = rows.filter(|(_, claim)| **claim == Claim::New).map(|(row, _)| row).collect();
        for chunk in chunks(&new) {
            let sql =
                values("INSERT INTO processed_ids (id, stream_seq, digest, processed_at) VALUES ", 4, chunk.len(), "");
            let mut arguments = SqliteArguments::default();
            for (_, delivery) in chunk {
                bind(&mut arguments, delivery.id.clone())?;
                bind(&mut arguments, to_i64(delivery.raw.position.stream_seq))?;
                bind(&mut arguments, delivery.digest.0.as_slice())?;
                // A clock that is behind must not make the id look older than its message: it would be pruned too early.
                bind(&mut arguments, now_ns.max(delivery.raw.position.published_ns))?;
            }
            let done = self.execute("claiming ids", sql, arguments).await?;
            // One statement numbers its rows one after the other (sqlite.org/autoinc.html: AUTOINCREMENT adds one).
            self.ids.add(chunk, done.last_insert_rowid());
        }
        Ok(claims)
    }

    pub async fn known(&mut self, deliveries: &[&Delivery]) -> Result<Vec<Claim>, Error> {
        let known = known(self.connection, self.ids, deliveries).await;
        known.map(|(claims, _)| claims).map_err(|error| self.failed(error))
    }

    pub async fn earlier(&mut self, id: &str) -> Result<Option<Earlier>, Error> {
        let earlier = self.ids.earlier(self.connection, id).await;
        earlier.map_err(|error| self.failed(error))
    }

    pub async fn record(&mut self, decided: &mut [(&Delivery, &mut Outcome)], now_ns: i64) -> Result<(), Error> {
        let mut ended = Vec::with_capacity(decided.len());
        for (delivery, outcome) in decided {
            match outcome {
                Outcome::Ignored(Ignored::DeleteMarker | Ignored::Schedule | Ignored::KeyDeleted)
                | Outcome::Retry { .. } => continue,
                Outcome::Applied | Outcome::Duplicate | Outcome::Dropped | Outcome::Ignored(Ignored::Order) => {}
                Outcome::DeadLettered { reason, error } => {
                    if !self.write_letter(delivery, *reason, error, now_ns).await? {
                        **outcome = Outcome::Duplicate;
                    }
                }
            }
            ended.push(*delivery);
        }
        self.forget_attempts(&ended).await
    }

    /// `false` if the same message is a dead letter already, or was one until an operator dealt with it.
    async fn write_letter(
        &mut self,
        delivery: &Delivery,
        reason: Reason,
        error: &str,
        now_ns: i64,
    ) -> Result<bool, Error> {
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, delivery.id.clone())?;
        bind(&mut arguments, delivery.raw.subject.clone())?;
        bind(&mut arguments, to_i64(delivery.raw.position.stream_seq))?;
        bind(&mut arguments, to_i64(delivery.raw.position.delivered))?;
        bind(&mut arguments, reason.name())?;
        bind(&mut arguments, error)?;
        bind(&mut arguments, headers_json(&delivery.raw.headers))?;
        bind(&mut arguments, delivery.raw.payload.as_ref())?;
        bind(&mut arguments, now_ns)?;
        bind(&mut arguments, delivery.digest.0.as_slice())?;
        bind(&mut arguments, delivery.raw.position.published_ns)?;
        let sql = "INSERT INTO dead_letters \
             (id, subject, stream_seq, delivered, reason, error, headers, payload, dead_at, digest, published_at) \
             SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11 \
             WHERE NOT EXISTS (SELECT 1 FROM closed_letters WHERE id = ?1 AND digest = ?10) \
             ON CONFLICT (id, digest) DO NOTHING";
        self.ids.any_letters = true;
        Ok(self.execute("writing a dead letter", sql.to_owned(), arguments).await?.rows_affected() > 0)
    }

    pub async fn attempts(&mut self, id: &str) -> Result<Attempts, Error> {
        if !*self.any_attempts {
            return Ok(Attempts::default());
        }
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, id)?;
        let sql = "SELECT failed, started FROM attempts WHERE id = ?".to_owned();
        let rows = self.fetch("reading the attempts", sql, arguments).await?;
        Ok(rows.first().map_or_else(Attempts::default, |row| Attempts { failed: row.get(0), started: row.get(1) }))
    }

    pub async fn set_attempts(
        &mut self,
        id: &str,
        attempts: Attempts,
        error: Option<&str>,
        now_ns: i64,
    ) -> Result<(), Error> {
        *self.any_attempts = true;
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, id)?;
        bind(&mut arguments, attempts.failed)?;
        bind(&mut arguments, attempts.started)?;
        bind(&mut arguments, error)?;
        bind(&mut arguments, now_ns)?;
        let sql = "INSERT INTO attempts (id, failed, started, last_error, updated_at) VALUES (?, ?, ?, ?, ?) \
             ON CONFLICT (id) DO UPDATE SET failed = excluded.failed, started = excluded.started, \
             last_error = coalesce(excluded.last_error, last_error), updated_at = excluded.updated_at";
        self.execute("writing the attempts", sql.to_owned(), arguments).await.map(drop)
    }

    pub async fn set_retry(&mut self, id: &str, retry: &Retry) -> Result<(), Error> {
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, to_i64(retry.stream_seq))?;
        bind(&mut arguments, retry.key.clone())?;
        bind(&mut arguments, retry.due_ns)?;
        bind(&mut arguments, id)?;
        let sql = "UPDATE attempts SET stream_seq = ?, order_key = ?, due_at = ? WHERE id = ?".to_owned();
        self.execute("recording a retry", sql, arguments).await.map(drop)
    }

    async fn forget_attempts(&mut self, deliveries: &[&Delivery]) -> Result<(), Error> {
        if !*self.any_attempts {
            return Ok(());
        }
        for chunk in chunks(deliveries) {
            let sql = values("DELETE FROM attempts WHERE id IN (VALUES ", 1, chunk.len(), ")");
            let mut arguments = SqliteArguments::default();
            for delivery in chunk {
                bind(&mut arguments, delivery.id.clone())?;
            }
            self.execute("forgetting attempts", sql, arguments).await?;
        }
        Ok(())
    }

    pub(super) async fn forget_old_attempts(&mut self, before_ns: i64, limit: u32) -> Result<(), Error> {
        if !*self.any_attempts {
            return Ok(());
        }
        let mut arguments = SqliteArguments::default();
        bind(&mut arguments, before_ns)?;
        bind(&mut arguments, limit)?;
        let sql = "DELETE FROM attempts WHERE id IN (SELECT id FROM attempts WHERE updated_at < ? LIMIT ?)".to_owned();
        self.execute("forgetting old attempts", sql, arguments).await.map(drop)
    }

    pub async fn savepoint(&mut self) -> Result<(), Error> {
        self.savepoint = Savepoint { staged_ids: self.ids.staged(), outbox_row: self.outbox_row };
        self.execute("setting a savepoint", "SAVEPOINT message".to_owned(), SqliteArguments::default()).await.map(drop)
    }

    pub async fn keep(&mut self) -> Result<(), Error> {
        self.execute("releasing a savepoint", "RELEASE message".to_owned(), SqliteArguments::default()).await.map(drop)
    }

    pub async fn undo(&mut self) -> Result<(), Error> {
        const DOING: &str = "returning to a savepoint";
        self.sound = false;
        self.ids.unstage(self.savepoint.staged_ids);
        self.outbox_row = self.savepoint.outbox_row;
        self.execute(DOING, "ROLLBACK TO message".to_owned(), SqliteArguments::default()).await?;
        self.execute(DOING, "RELEASE message".to_owned(), SqliteArguments::default()).await.map(drop)
    }

    pub async fn commit(mut self) -> Result<(), Error> {
        self.execute("committing", "COMMIT".to_owned(), SqliteArguments::default()).await?;
        self.ids.committed();
        *self.outbox_committed = self.outbox_row;
        *self.clean = self.sound;
        Ok(())
    }

    pub(super) async fn execute(
        &mut self,
        doing: &'static str,
        sql: String,
        arguments: SqliteArguments,
    ) -> Result<SqliteQueryResult, Error> {
        sqlx::query_with(AssertSqlSafe(sql), arguments)
            .execute(&mut *self.connection)
            .await
            .map_err(|source| self.fail(doing, source))
    }

    pub(super) async fn fetch(
        &mut self,
        doing: &'static str,
        sql: String,
        arguments: SqliteArguments,
    ) -> Result<Vec<SqliteRow>, Error> {
        sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(&mut *self.connection)
            .await
            .map_err(|source| self.fail(doing, source))
    }

    pub(super) fn fail(&mut self, doing: &'static str, source: sqlx::Error) -> Error {
        self.failed(failed(doing, source))
    }

    pub(super) fn failed(&mut self, error: Error) -> Error {
        self.sound = false;
        *self.faulted |= error.may_have_written();
        error
    }
}

/// What the database knows of each of `deliveries`, in their order, and the keys of their ids.
pub(super) async fn known(
    connection: &mut SqliteConnection,
    ids: &Ids,
    deliveries: &[&Delivery],
) -> Result<(Vec<Claim>, Vec<Key>), Error> {
    let (found, keys) = ids.find(connection, deliveries).await?;
    let mut claims: Vec<Claim> = found.into_iter().map(|digest| digest.map_or(Claim::New, Claim::Processed)).collect();
    if !ids.any_letters {
        return Ok((claims, keys));
    }
    let same = |(index, claim): &(usize, &Claim)| **claim == Claim::Processed(deliveries[*index].digest);
    let others: Vec<usize> = claims.iter().enumerate().filter(|it| !same(it)).map(|(index, _)| index).collect();
    for chunk in chunks(&others) {
        let sql = values(
            "SELECT column3 FROM (VALUES ",
            3,
            chunk.len(),
            ") WHERE EXISTS (SELECT 1 FROM dead_letters WHERE id = column1 AND digest = column2) \
             OR EXISTS (SELECT 1 FROM closed_letters WHERE id = column1 AND digest = column2)",
        );
        let mut arguments = SqliteArguments::default();
        for index in chunk {
            bind(&mut arguments, deliveries[*index].id.clone())?;
            bind(&mut arguments, deliveries[*index].digest.0.as_slice())?;
            bind(&mut arguments, *index as i64)?;
        }
        let dead = sqlx::query_scalar_with(AssertSqlSafe(sql), arguments).fetch_all(&mut *connection).await;
        for index in dead.map_err(|source| failed(LOOKING_UP, source))? {
            let index: i64 = index;
            claims[index as usize] = Claim::Dead;
        }
    }
    Ok((claims, keys))
}
