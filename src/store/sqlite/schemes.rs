//! SQL of the record how ids are made.

use std::time::SystemTime;

use sqlx::{Row, SqliteConnection};

use super::sql::{failed, to_i64};
use super::{Reader, Store};
use crate::model::id::{IdScheme, UniqueIn};
use crate::model::schemes::{FormerMessages, IdSchemes, IdSettings, SchemeChange};
use crate::model::time::unix_ns;
use crate::store::{Bind, Error};

const READING: &str = "reading how ids are made";
const WRITING: &str = "recording how ids are made";

impl Store {
    pub async fn id_schemes(&mut self, settings: &IdSettings) -> Result<IdSchemes, Error> {
        let mut tx = self.begin().await?;
        let recorded = read(tx.connection, settings).await.map_err(|source| tx.fail(READING, source))?;
        tx.commit().await?;
        Ok(recorded.unwrap_or_else(|| IdSchemes::unchanged(settings)))
    }

    pub async fn record_id_schemes(&mut self, settings: &IdSettings) -> Result<IdSchemes, Error> {
        let mut tx = self.begin().await?;
        let recorded = read(tx.connection, settings).await.map_err(|source| tx.fail(READING, source))?;
        // The settings of a command need not be those of the daemon that has filled the database: its next bind records them.
        let is_former = is_bound(tx.connection).await.map_err(|source| tx.fail(READING, source))?;
        let schemes = match recorded {
            Some(recorded) => recorded,
            None if is_former => IdSchemes::unchanged(settings),
            None => begin(tx.connection, settings).await.map_err(|source| tx.fail(WRITING, source))?,
        };
        tx.commit().await?;
        Ok(schemes)
    }
}

impl Reader {
    pub async fn id_schemes(&mut self, settings: &IdSettings) -> Result<Option<IdSchemes>, Error> {
        read(&mut self.connection, settings).await.map_err(|source| failed(READING, source))
    }
}

/// The record; `None` in a database that was never bound, or not since a former version.
async fn read(connection: &mut SqliteConnection, settings: &IdSettings) -> Result<Option<IdSchemes>, sqlx::Error> {
    let rows = sqlx::query("SELECT * FROM id_schemes ORDER BY number").fetch_all(connection).await?;
    let mut changes = rows.iter().map(|row| {
        let scope: &str = row.get("scope");
        let scheme = IdScheme {
            stream: row.get("stream"),
            pointer: row.get("pointer"),
            unique_in: UniqueIn::parse(scope)
                .ok_or_else(|| sqlx::Error::Decode(format!("id_schemes.scope is {scope:?}").into()))?,
        };
        let former = FormerMessages {
            through_seq: row.get::<i64, _>("from_seq").max(1).unsigned_abs() - 1,
            through_ns: row.get("through_ns"),
            gone_before_ns: row.get("gone_before_ns"),
        };
        Ok(SchemeChange { scheme, former })
    });
    let Some(first) = changes.next().transpose()? else { return Ok(None) };
    let changes = changes.collect::<Result<Vec<_>, sqlx::Error>>()?;
    Ok(Some(IdSchemes { first: first.scheme, changes, missing_is_dead: settings.missing_is_dead }))
}

/// The record. Without one, the settings hold for all messages.
async fn begin(connection: &mut SqliteConnection, settings: &IdSettings) -> Result<IdSchemes, sqlx::Error> {
    if let Some(recorded) = read(connection, settings).await? {
        return Ok(recorded);
    }
    // A database that is bound already is of a version that knew no other scope.
    let is_former = is_bound(connection).await?;
    let unique_in = if is_former { UniqueIn::Subject } else { settings.scheme.unique_in.clone() };
    let first = IdScheme { unique_in, ..settings.scheme.clone() };
    let none = FormerMessages { through_seq: 0, through_ns: 0, gone_before_ns: 0 };
    write(connection, 1, &SchemeChange { scheme: first.clone(), former: none }).await?;
    Ok(IdSchemes { first, changes: Vec::new(), missing_is_dead: settings.missing_is_dead })
}

async fn is_bound(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM binding)").fetch_one(connection).await
}

/// At a bind, in its transaction: the record, with another row if the settings have changed. Whether they have.
pub(super) async fn follow(
    connection: &mut SqliteConnection,
    bind: &Bind,
    settings: &IdSettings,
) -> Result<(IdSchemes, bool), sqlx::Error> {
    let mut schemes = begin(connection, settings).await?;
    let scheme = schemes.wanted(settings);
    if scheme == *schemes.newest() {
        return Ok((schemes, false));
    }
    // Only then: the table has no index for it.
    let known_seq = highest_seq(connection, bind.gone_before_ns()).await?;
    let change = SchemeChange { scheme, former: bind.former_messages(known_seq) };
    let number = i64::try_from(schemes.changes.len()).unwrap_or(i64::MAX).saturating_add(2);
    write(connection, number, &change).await?;
    schemes.changes.push(change);
    Ok((schemes, true))
}

/// The highest sequence of the present stream in the database. A consumer that was reset has delivered less than that. A row from
/// before the first message of the stream belongs to a former stream.
async fn highest_seq(connection: &mut SqliteConnection, since_ns: i64) -> Result<u64, sqlx::Error> {
    let highest: i64 = sqlx::query_scalar(
        "SELECT max(coalesce((SELECT max(stream_seq) FROM processed_ids WHERE processed_at >= ?1), 0), \
         coalesce((SELECT max(stream_seq) FROM dead_letters WHERE dead_at >= ?1), 0), \
         coalesce((SELECT max(stream_seq) FROM closed_letters WHERE dead_at >= ?1), 0))",
    )
    .bind(since_ns)
    .fetch_one(connection)
    .await?;
    Ok(highest.max(0).unsigned_abs())
}

async fn write(connection: &mut SqliteConnection, number: i64, change: &SchemeChange) -> Result<(), sqlx::Error> {
    let SchemeChange { scheme, former } = change;
    sqlx::query(
        "INSERT INTO id_schemes (number, from_seq, stream, pointer, scope, through_ns, gone_before_ns, recorded_at) \
         VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(number)
    .bind(to_i64(former.next_seq()))
    .bind(&scheme.stream)
    .bind(&scheme.pointer)
    .bind(scheme.unique_in.to_string())
    .bind(former.through_ns)
    .bind(former.gone_before_ns)
    .bind(unix_ns(SystemTime::now()))
    .execute(connection)
    .await
    .map(drop)
}
