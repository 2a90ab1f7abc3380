//! The user's own tables: files `NNNN_name.sql`, each applied once, in a transaction, and recorded in `handler_migrations`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use sqlx::{AssertSqlSafe, Connection, SqliteConnection};

use super::check::{Ours, forbidden};
use super::scan::{Token, next};
use crate::handler::Failure;
use crate::model::text::printable;
use crate::model::time::unix_ns;
use crate::store;

const RECORD: &str = "CREATE TABLE IF NOT EXISTS handler_migrations (
    version    INTEGER NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL,
    checksum   BLOB    NOT NULL, -- BLAKE3 of the file
    applied_at INTEGER NOT NULL  -- ns since 1970 UTC
) STRICT";
/// What no migration may begin a statement with: each file is one transaction, which also records the file.
const REFUSED: [&str; 10] =
    ["BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "ATTACH", "DETACH", "PRAGMA", "VACUUM"];
/// Statements that change rows. The program of each must not touch a table of ours.
const CHANGES: [&str; 6] = ["INSERT", "UPDATE", "DELETE", "REPLACE", "WITH", "SELECT"];
/// What our tables look like, as one text.
const OUR_SCHEMA: &str = "SELECT name, tbl_name, type, coalesce(sql, '') FROM sqlite_schema ORDER BY name";

/// The files of the folder, in order.
#[derive(Default)]
pub struct Migrations {
    files: BTreeMap<i64, Migration>,
}

struct Migration {
    name: String,
    sql: String,
    checksum: [u8; 32],
}

impl Migrations {
    /// Reads the folder. Names that begin with a dot are skipped: Kubernetes puts such names beside the files of a ConfigMap.
    pub fn read(folder: &Path, problems: &mut Vec<String>) -> Self {
        let mut migrations = Self::default();
        let names = std::fs::read_dir(folder).and_then(|entries| {
            entries
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect::<std::io::Result<Vec<_>>>()
        });
        let mut names = match names {
            Ok(names) => names,
            Err(error) => {
                problems.push(format!("{}: cannot read the folder of sql.migrations: {error}", folder.display()));
                return migrations;
            }
        };
        names.sort();
        for name in names.into_iter().filter(|name| !name.starts_with('.')) {
            let path = folder.join(&name);
            let shown = path.display();
            let Some(version) = version(&name) else {
                problems
                    .push(format!("{shown}: the name of a migration must be like 0001_shop.sql; rename or remove it"));
                continue;
            };
            let sql = match std::fs::read_to_string(&path) {
                Ok(sql) => sql,
                Err(error) => {
                    problems.push(format!("{shown}: cannot read the migration: {error}"));
                    continue;
                }
            };
            let checksum = *blake3::hash(sql.as_bytes()).as_bytes();
            if let Some(other) = migrations.files.insert(version, Migration { name, sql, checksum }) {
                problems.push(format!("{shown}: {} has the same number; give each migration its own", other.name));
            }
        }
        migrations
    }

    /// Applies in a scratch database what it lacks, and checks each statement. Returns warnings, and whether all could be applied.
    pub async fn apply(
        &self,
        connection: &mut SqliteConnection,
        ours: &Ours,
        problems: &mut Vec<String>,
    ) -> Result<(Vec<String>, bool), store::Error> {
        let (pending, warnings) = match self.pending(connection).await? {
            Ok(found) => found,
            Err(changed) => {
                problems.extend(changed);
                return Ok((Vec::new(), false));
            }
        };
        for (_, migration) in pending {
            if let Err(problem) = try_out(connection, ours, migration).await? {
                problems.push(format!("migration {}: {problem}", migration.name));
                return Ok((warnings, false));
            }
        }
        Ok((warnings, true))
    }

    /// Applies in the database of the daemon what it lacks. Each file is one transaction with its record.
    pub async fn apply_for_good(&self, connection: &mut SqliteConnection) -> Result<(), Failure> {
        if self.files.is_empty() {
            return Ok(());
        }
        let (pending, _) = match self.pending(connection).await? {
            Ok(found) => found,
            Err(changed) => return Err(Failure::Permanent(changed.join("\n"))),
        };
        for (version, migration) in pending {
            let mut tx = connection.begin_with("BEGIN IMMEDIATE").await?;
            let text = |error: sqlx::Error| match store::Error::from(error) {
                error if error.is_about_data() || error.class == store::ErrorClass::Other => {
                    Failure::Permanent(format!("migration {}: {}", migration.name, crate::model::text::chain(&error)))
                }
                error => Failure::Store(error),
            };
            sqlx::raw_sql(RECORD).execute(&mut *tx).await?;
            sqlx::raw_sql(AssertSqlSafe(migration.sql.clone())).execute(&mut *tx).await.map_err(text)?;
            sqlx::query("INSERT INTO handler_migrations (version, name, checksum, applied_at) VALUES (?, ?, ?, ?)")
                .bind(version)
                .bind(&migration.name)
                .bind(migration.checksum.as_slice())
                .bind(unix_ns(SystemTime::now()))
                .execute(&mut *tx)
                .await?;
            tx.commit().await.map_err(text)?;
            tracing::info!(migration = %migration.name, "applied a migration of the handler file");
        }
        Ok(())
    }

    /// The files that the database lacks, and warnings; or what was changed after it was applied.
    async fn pending(
        &self,
        connection: &mut SqliteConnection,
    ) -> Result<Result<(Vec<(i64, &Migration)>, Vec<String>), Vec<String>>, store::Error> {
        let recorded: bool =
            sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'handler_migrations')")
                .fetch_one(&mut *connection)
                .await?;
        let applied: Vec<(i64, String, Vec<u8>)> = match recorded {
            true => {
                let all = "SELECT version, name, checksum FROM handler_migrations ORDER BY version";
                sqlx::query_as(all).fetch_all(&mut *connection).await?
            }
            false => Vec::new(),
        };
        let (mut changed, mut warnings) = (Vec::new(), Vec::new());
        for (version, name, checksum) in &applied {
            match self.files.get(version) {
                Some(file) if file.checksum[..] != **checksum => changed.push(format!(
                    "migration {} was changed after the database got it as {name}; put the old text back, and write the change \
                     into a new migration",
                    file.name
                )),
                Some(_) => {}
                None => warnings.push(format!("the database has migration {name}, which the folder lacks")),
            }
        }
        let pending = self.files.iter().filter(|(version, _)| !applied.iter().any(|(there, ..)| there == *version));
        let pending = pending.map(|(version, migration)| (*version, migration)).collect();
        Ok(if changed.is_empty() { Ok((pending, warnings)) } else { Err(changed) })
    }
}

/// `1` of `0001_shop.sql`.
fn version(name: &str) -> Option<i64> {
    let (digits, rest) = name.strip_suffix(".sql")?.split_once('_')?;
    let is_version = digits.len() >= 4 && digits.bytes().all(|digit| digit.is_ascii_digit()) && !rest.is_empty();
    is_version.then(|| digits.parse().ok())?
}

/// Runs a migration in a scratch database.
async fn try_out(
    connection: &mut SqliteConnection,
    ours: &Ours,
    migration: &Migration,
) -> Result<Result<(), String>, store::Error> {
    let before = our_schema(connection, ours).await?;
    for (number, sql) in (1..).zip(statements(&migration.sql)) {
        let keyword = keyword(sql);
        let at = format!("statement {number}");
        if REFUSED.contains(&keyword.as_str()) {
            return Ok(Err(format!("{at}: {keyword} is not allowed; each file is one transaction of its own")));
        }
        if CHANGES.contains(&keyword.as_str())
            && let Err(problem) = forbidden(connection, ours, sql).await?
        {
            return Ok(Err(format!("{at}: {problem}")));
        }
        if let Err(error) = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut *connection).await {
            let message =
                error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned());
            return Ok(Err(format!("{at}: {}", printable(&message))));
        }
    }
    if our_schema(connection, ours).await? != before {
        return Ok(Err("it changes a table of order-processor".to_owned()));
    }
    Ok(Ok(()))
}

type Schema = Vec<(String, String, String, String)>;

/// All that belongs to our tables. Triggers of the user on `orders` are not a part of it.
async fn our_schema(connection: &mut SqliteConnection, ours: &Ours) -> Result<Schema, store::Error> {
    let all: Schema = sqlx::query_as(OUR_SCHEMA).fetch_all(connection).await?;
    let is_ours = |(name, table, kind, _): &(String, String, String, String)| {
        ours.has(name) || ours.has(table) && !(kind == "trigger" && table == "orders")
    };
    Ok(all.into_iter().filter(is_ours).collect())
}

/// Cuts a text into statements. A trigger ends with `; END`.
fn statements(text: &str) -> Vec<&str> {
    let (mut found, mut start) = (Vec::new(), text);
    let (mut rest, mut words, mut after_end) = (text, Vec::new(), false);
    while let Some((token, after)) = next(rest) {
        match token {
            Token::Blank(_) => {}
            Token::End => {
                let is_trigger = words.first().is_some_and(|word: &String| word == "CREATE")
                    && words.iter().skip(1).take(2).any(|word| word == "TRIGGER");
                if !is_trigger || words.last().is_some_and(|word| word == "END") && after_end {
                    let statement = &start[..start.len() - after.len()];
                    if !words.is_empty() {
                        found.push(statement);
                    }
                    (start, after_end) = (after, false);
                    words.clear();
                } else {
                    after_end = true;
                    words.push(";".to_owned());
                }
            }
            Token::Word(word) => {
                // Only END directly after a semicolon ends a trigger: CASE has an END as well.
                after_end = word.eq_ignore_ascii_case("END") && words.last().is_some_and(|last| last == ";");
                words.push(word.to_ascii_uppercase());
            }
            Token::Other(_) | Token::Parameter(_) | Token::OtherParameter(_) => {
                after_end = false;
                words.push(String::new());
            }
        }
        rest = after;
    }
    if !words.is_empty() {
        found.push(start);
    }
    found
}

fn keyword(sql: &str) -> String {
    let mut rest = sql;
    while let Some((token, after)) = next(rest) {
        if let Token::Word(word) = token {
            return word.to_ascii_uppercase();
        }
        rest = after;
    }
    String::new()
}
