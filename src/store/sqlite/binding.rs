//! SQL of the binding record.

use std::time::SystemTime;

use sqlx::SqliteConnection;

use super::prune::marks;
use super::schemes;
use super::sql::{failed, to_i64};
use super::{Reader, Store};
use crate::model::schemes::IdSettings;
use crate::model::time::unix_ns;
use crate::store::{Accepted, Bind, Binding, Error, Unbound};

const READING: &str = "reading the binding record";
const WRITING: &str = "writing the binding record";

impl Store {
    pub async fn bind(&mut self, bind: &Bind, settings: &IdSettings) -> Result<Result<Accepted, Unbound>, Error> {
        let mut tx = self.begin().await?;
        let record = record(tx.connection).await.map_err(|source| tx.fail(READING, source))?;
        let marks = marks(tx.connection).await.map_err(|source| tx.fail(READING, source))?;
        if let Err(refusal) = bind.judge(record.as_ref(), &marks) {
            tx.commit().await?;
            return Ok(Err(refusal));
        }
        // Before the record of the consumer, whose absence shows that the database is new.
        let followed = schemes::follow(tx.connection, bind, settings).await;
        let (schemes, is_changed) = followed.map_err(|source| tx.fail("recording how ids are made", source))?;
        let bound = bind.recorded(record.as_ref());
        if record.as_ref() != Some(&bound) {
            write(tx.connection, &bound).await.map_err(|source| tx.fail(WRITING, source))?;
        }
        tx.commit().await?;
        Ok(Ok(Accepted { schemes, is_changed }))
    }

    pub async fn adopt(&mut self, bind: &Bind) -> Result<Binding, Error> {
        let mut tx = self.begin().await?;
        let record = record(tx.connection).await.map_err(|source| tx.fail(READING, source))?;
        let adopted = bind.adopted(record.as_ref());
        write(tx.connection, &adopted).await.map_err(|source| tx.fail(WRITING, source))?;
        tx.commit().await?;
        Ok(adopted)
    }
}

impl Reader {
    pub async fn binding(&mut self) -> Result<Option<Binding>, Error> {
        record(&mut self.connection).await.map_err(|source| failed(READING, source))
    }

    pub async fn judge(&mut self, bind: &Bind) -> Result<Result<(), Unbound>, Error> {
        let record = self.binding().await?;
        let marks = marks(&mut self.connection).await.map_err(|source| failed(READING, source))?;
        Ok(bind.judge(record.as_ref(), &marks))
    }
}

async fn record(connection: &mut SqliteConnection) -> Result<Option<Binding>, sqlx::Error> {
    let row: Option<(Option<String>, Option<String>, i64)> =
        sqlx::query_as("SELECT stream, consumer, not_ours_through FROM binding").fetch_optional(connection).await?;
    Ok(row.map(|(stream, consumer, through)| Binding {
        to: stream.zip(consumer),
        not_ours_through: through.unsigned_abs(),
    }))
}

async fn write(connection: &mut SqliteConnection, binding: &Binding) -> Result<(), sqlx::Error> {
    let (stream, consumer) = binding.to.clone().unzip();
    sqlx::query(
        "INSERT OR REPLACE INTO binding (only, stream, consumer, not_ours_through, bound_at) VALUES (1, ?, ?, ?, ?)",
    )
    .bind(stream)
    .bind(consumer)
    .bind(to_i64(binding.not_ours_through))
    .bind(unix_ns(SystemTime::now()))
    .execute(connection)
    .await
    .map(drop)
}
