//! A database in memory with the schema of a real one, to try statements on. It has no rows but those of the migrations.

use std::path::Path;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, SqliteConnection};

use super::open::{connect, is_there, options, require_readable, require_sqlite, unreadable};
use super::run_migrations;
use super::sql::failed;
use crate::store::{Error, OpenError};

const DOING: &str = "copying the schema of the database";
/// The tables whose rows say which migrations a database has, each with its columns.
const RECORDS: [(&str, &str); 2] = [
    ("_sqlx_migrations", "version, description, installed_on, success, checksum, execution_time"),
    ("handler_migrations", "version, name, checksum, applied_at"),
];

#[derive(Debug)]
pub struct SchemaCopy {
    connection: SqliteConnection,
}

impl SchemaCopy {
    /// With the tables of a new database.
    pub async fn empty() -> Result<Self, Error> {
        let mut connection = memory().await?;
        run_migrations(&mut connection).await?;
        Ok(Self { connection })
    }

    /// With the schema of a database, or with that of a new one if the file does not exist.
    pub async fn copy_of(path: &Path) -> Result<Self, OpenError> {
        let unopened = |source| OpenError::sqlite(path, source);
        if !is_there(path)? {
            return Self::empty().await.map_err(unopened);
        }
        require_readable(path)?;
        require_sqlite(path)?;
        let original = connect(&options(path).read_only(true), DOING).await.map_err(unopened).map_err(unreadable)?;
        let mut scratch = Self { connection: memory().await.map_err(unopened)? };
        let copied = scratch.copy(original).await;
        copied.map_err(|source| unreadable(unopened(failed(DOING, source))))?;
        run_migrations(&mut scratch.connection).await.map_err(unopened)?;
        Ok(scratch)
    }

    pub fn connection(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }

    async fn copy(&mut self, mut original: SqliteConnection) -> Result<(), sqlx::Error> {
        // Tables first: what refers to a table stands after it. The tables of a virtual table come with the virtual table.
        let schema: Vec<(String, String)> = sqlx::query_as(
            "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' \
             ORDER BY type <> 'table', sql NOT LIKE 'create virtual%', rowid",
        )
        .fetch_all(&mut original)
        .await?;
        for (name, sql) in &schema {
            let exists: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?)")
                .bind(name)
                .fetch_one(&mut self.connection)
                .await?;
            if !exists {
                sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut self.connection).await?;
            }
        }
        for (table, columns) in RECORDS.iter().filter(|(table, _)| schema.iter().any(|(name, _)| name == table)) {
            let rows = format!(
                "SELECT 'INSERT INTO {table} ({columns}) VALUES (' || concat_ws(',', {}) || ')' FROM {table}",
                columns.split(", ").map(|column| format!("quote({column})")).collect::<Vec<_>>().join(", ")
            );
            let inserts: Vec<String> = sqlx::query_scalar(AssertSqlSafe(rows)).fetch_all(&mut original).await?;
            for insert in inserts {
                sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut self.connection).await?;
            }
        }
        original.close().await
    }
}

async fn memory() -> Result<SqliteConnection, Error> {
    let options = SqliteConnectOptions::new().in_memory(true).disable_statement_logging();
    options.connect().await.map_err(|source| failed("opening a database in memory", source))
}

/// The names of all that a new database has.
pub async fn own_names() -> Result<Vec<String>, Error> {
    let mut scratch = SchemaCopy::empty().await?;
    let names = sqlx::query_scalar("SELECT name FROM sqlite_schema").fetch_all(scratch.connection()).await;
    names.map_err(|source| failed(DOING, source))
}
