//! What can be said of a statement before the first order: it is prepared, and the program that SQLite makes of it is read.
//!
//! EXPLAIN lists the program with those of all triggers. A program that would end the transaction of the batch, or that writes a
//! table of ours, is refused.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Either, Executor, Row, SqliteConnection, Statement as _};

use super::Statement;
use super::scan::{Token, next};
use crate::handler::file::HandlerFile;
use crate::handler::file::section::meant;
use crate::handler::route::Deed;
use crate::model::text::printable;
use crate::store;

/// What a statement of a route may begin with. `PRAGMA` and `ATTACH`, for example, show in no program.
const KEYWORDS: [&str; 7] = ["INSERT", "UPDATE", "DELETE", "REPLACE", "WITH", "SELECT", "VALUES"];
/// Users may write this table of ours, by INSERT only.
const OUTBOX: &str = "outbox";
const OUTBOX_CHANGED: &str = "it changes or deletes rows of outbox; only an INSERT without the column row is allowed";
/// Users may have triggers on this table of ours.
const ORDERS: &str = "orders";
/// `P2` of `Halt` for `OR ROLLBACK` and `RAISE(ROLLBACK)`.
const ON_ERROR_ROLLBACK: i64 = 1;
/// A flag in `P5` of `OpenWrite`: `P2` is not a page but a register.
const P2_IS_REGISTER: i64 = 0x10;
/// A flag in `P5` of `Insert` and `Delete`: the row is updated.
const IS_UPDATE: i64 = 0x04;

/// The names of our tables, indexes and triggers.
pub struct Ours(HashSet<String>);

impl Ours {
    pub async fn read() -> Result<Self, store::Error> {
        Ok(Self(
            store::own_names()
                .await?
                .into_iter()
                .chain(["handler_migrations".to_owned()])
                .filter(|name| name != "sqlite_sequence")
                .collect(),
        ))
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains(name)
    }
}

/// Checks every statement on a database in which the user's tables exist.
pub async fn check(
    connection: &mut SqliteConnection,
    ours: &Ours,
    file: &HandlerFile,
    problems: &mut Vec<String>,
) -> Result<(), store::Error> {
    let shown = file.path.display();
    let triggers: Vec<(String, String)> =
        sqlx::query_as("SELECT name, tbl_name FROM sqlite_schema WHERE type = 'trigger'")
            .fetch_all(&mut *connection)
            .await?;
    for (name, table) in triggers {
        if ours.has(&table) && table != ORDERS && !ours.has(&name) {
            problems
                .push(format!("{shown}: trigger {name} is on {table}; of our tables, only orders may have triggers"));
        }
    }
    for route in &file.routes {
        let Deed::Sql(statements) = &route.deed else { continue };
        for statement in statements {
            if let Err(problem) = judge(connection, ours, statement).await? {
                problems.push(format!("{shown}: {}: {problem}", statement.name));
            }
        }
    }
    Ok(())
}

async fn judge(
    connection: &mut SqliteConnection,
    ours: &Ours,
    statement: &Statement,
) -> Result<Result<(), String>, store::Error> {
    let scanned = &statement.scanned;
    if !KEYWORDS.contains(&scanned.keyword.as_str()) {
        let known = KEYWORDS.join(", ");
        return Ok(Err(format!(
            "a statement cannot begin with {}; it must begin with one of {known}",
            printable(&scanned.keyword)
        )));
    }
    match (&mut *connection).prepare(sqlx::SqlSafeStr::into_sql_str(AssertSqlSafe(scanned.sql.clone()))).await {
        Ok(prepared) => {
            let expected = Some(Either::Right(statement.wanted.len()));
            if prepared.parameters().map(|parameters| parameters.map_left(<[_]>::len)) != expected {
                return Ok(Err("SQLite finds other parameters in it than order-processor".to_owned()));
            }
            statement.returns_rows.store(!prepared.columns().is_empty(), Ordering::Relaxed);
        }
        Err(error) => return Ok(Err(unprepared(connection, &error).await)),
    }
    forbidden(connection, ours, &scanned.sql).await
}

/// What is wrong with a statement that runs in our transaction: it would end the transaction, or write a table of ours.
pub async fn forbidden(
    connection: &mut SqliteConnection,
    ours: &Ours,
    sql: &str,
) -> Result<Result<(), String>, store::Error> {
    if words(sql).any(|word| word.eq_ignore_ascii_case("sqlite_sequence")) {
        return Ok(Err("it uses sqlite_sequence, in which SQLite counts the rows of our tables".to_owned()));
    }
    let pages: Vec<(i64, String, String)> =
        sqlx::query_as("SELECT rootpage, name, tbl_name FROM sqlite_schema WHERE rootpage > 0")
            .fetch_all(&mut *connection)
            .await?;
    let pages: HashMap<i64, String> = pages
        .into_iter()
        .filter(|(_, name, table)| ours.has(name) || ours.has(table))
        .map(|(page, _, table)| (page, table))
        .collect();
    let explain = AssertSqlSafe(format!("EXPLAIN {sql}"));
    let program = match sqlx::query(explain).persistent(false).fetch_all(&mut *connection).await {
        Ok(program) => program,
        Err(error) => return Ok(Err(unprepared(connection, &error).await)),
    };
    let mut outbox = HashSet::new();
    for line in program {
        if line.get::<i64, _>("addr") == 0 {
            // Each trigger is a program with its own cursors.
            outbox.clear();
        }
        let step = Instruction::of(&line);
        if let Some(problem) = step.ends_the_transaction() {
            return Ok(Err(problem.to_owned()));
        }
        if step.changes_a_row() && outbox.contains(&step.p1) {
            return Ok(Err(OUTBOX_CHANGED.to_owned()));
        }
        match step.written_page().and_then(|page| pages.get(&page)) {
            Some(table) if table == OUTBOX && step.opcode == "OpenWrite" => drop(outbox.insert(step.p1)),
            Some(table) if table == OUTBOX => return Ok(Err(OUTBOX_CHANGED.to_owned())),
            Some(table) => {
                return Ok(Err(format!(
                    "it writes {table}, a table of order-processor, perhaps through a trigger; only outbox takes an INSERT"
                )));
            }
            None => {}
        }
    }
    Ok(Ok(()))
}

/// One instruction of a program.
struct Instruction {
    opcode: String,
    p1: i64,
    p2: i64,
    p4: Option<String>,
    p5: i64,
}

impl Instruction {
    fn of(line: &SqliteRow) -> Self {
        Self {
            opcode: line.get("opcode"),
            p1: line.get("p1"),
            p2: line.get("p2"),
            p4: line.get("p4"),
            p5: line.get("p5"),
        }
    }

    fn ends_the_transaction(&self) -> Option<&'static str> {
        let calls = |name: &str| self.p4.as_deref().is_some_and(|function| function.starts_with(name));
        match self.opcode.as_str() {
            "AutoCommit" | "Savepoint" | "Vacuum" | "JournalMode" | "Checkpoint" => {
                Some("it would begin or end a transaction")
            }
            "Halt" | "HaltIfNull" if self.p1 != 0 && self.p2 == ON_ERROR_ROLLBACK => Some(
                "it can roll back the whole batch (OR ROLLBACK, ON CONFLICT ROLLBACK or RAISE(ROLLBACK), also in a trigger or a \
                 table); use ABORT",
            ),
            "Function" | "PureFunc" if calls("sqlite_attach") || calls("sqlite_detach") => {
                Some("it would attach or detach a database")
            }
            _ => None,
        }
    }

    /// Whether the instruction changes a row that exists, or looks for the row that an INSERT would replace.
    fn changes_a_row(&self) -> bool {
        match self.opcode.as_str() {
            "Delete" | "IdxDelete" | "NotExists" => true,
            "Insert" => self.p5 & IS_UPDATE != 0,
            _ => false,
        }
    }

    fn written_page(&self) -> Option<i64> {
        match self.opcode.as_str() {
            "OpenWrite" if self.p5 & P2_IS_REGISTER == 0 => Some(self.p2),
            "Clear" | "Destroy" => Some(self.p1),
            _ => None,
        }
    }
}

/// The words of a statement outside of quotes, and the names in quotes.
fn words(sql: &str) -> impl Iterator<Item = &str> {
    let mut rest = sql;
    std::iter::from_fn(move || {
        let (token, after) = next(rest)?;
        rest = after;
        Some(match token {
            Token::Word(word) => word,
            Token::Other(quoted) => quoted.trim_matches(['"', '`', '[', ']']),
            Token::Blank(_) | Token::Parameter(_) | Token::OtherParameter(_) | Token::End => "",
        })
    })
}

/// Why SQLite cannot prepare a statement, with the nearest name of a table or a column.
async fn unprepared(connection: &mut SqliteConnection, error: &sqlx::Error) -> String {
    let message = error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned());
    let missing =
        |prefix: &str| message.strip_prefix(prefix).map(|name| name.rsplit('.').next().unwrap_or(name).to_owned());
    let (name, sql) = if let Some(name) = missing("no such table: ") {
        (
            name,
            "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'",
        )
    } else if let Some(name) = missing("no such column: ") {
        let columns = "SELECT DISTINCT column.name FROM sqlite_schema AS tab, pragma_table_info(tab.name) AS column";
        (name, columns)
    } else if let Some((_, name)) = message.split_once(" has no column named ") {
        (
            name.to_owned(),
            "SELECT DISTINCT column.name FROM sqlite_schema AS tab, pragma_table_info(tab.name) AS column",
        )
    } else {
        return printable(&message).into_owned();
    };
    // Without names to compare, the text of SQLite still says what is missing.
    let names: Vec<String> = sqlx::query_scalar(sql).fetch_all(connection).await.unwrap_or_default();
    format!("{}{}", printable(&message), meant(&name, names.iter().map(String::as_str)))
}
