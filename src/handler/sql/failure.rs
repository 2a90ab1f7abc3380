//! What an error of a statement means for its order.

use sqlx::{AssertSqlSafe, SqliteConnection};

use super::Statement;
use super::timeout::Timeout;
use crate::handler::Failure;

/// A trigger of the user that begins its text with this wants the order to be tried again.
const RETRY_PREFIX: &str = "retry: ";

/// The extended result codes that matter here (sqlite.org/rescode.html).
const ERROR: u32 = 1;
const INTERRUPT: u32 = 9;
const TOO_BIG: u32 = 18;
const CONSTRAINT: u32 = 19;
const MISMATCH: u32 = 20;
const CONSTRAINT_FOREIGN_KEY: u32 = 787;
const CONSTRAINT_TRIGGER: u32 = 1811;

pub async fn failure(
    connection: &mut SqliteConnection,
    statement: &Statement,
    error: sqlx::Error,
    timeout: &Timeout,
) -> Failure {
    let name = &statement.name;
    let Some((code, message)) = code(&error) else { return Failure::Store(error.into()) };
    match (code, code & 0xff) {
        (CONSTRAINT_FOREIGN_KEY, _) => Failure::Retry(format!("{name}: {message}")),
        (CONSTRAINT_TRIGGER, _) => match message.strip_prefix(RETRY_PREFIX) {
            Some(text) => Failure::Retry(format!("{text} ({name})")),
            None => Failure::Permanent(format!("{message} ({name})")),
        },
        (_, TOO_BIG | CONSTRAINT | MISMATCH) => Failure::Permanent(format!("{name}: {message}")),
        (_, INTERRUPT) => {
            let limit = humantime::format_duration(timeout.limit);
            Failure::Retry(format!("{name}: the statement was ended after sql.timeout ({limit})"))
        }
        // SQLite has one code for a value that a function cannot take and for a table that is missing. Only in the first case can
        // the statement still be prepared. EXPLAIN prepares a statement and does not run it.
        (_, ERROR) => {
            let explain = format!("EXPLAIN {}", statement.scanned.sql);
            let explained = sqlx::query(AssertSqlSafe(explain)).persistent(false).execute(connection).await;
            match explained {
                Ok(_) => Failure::Permanent(format!("{name}: {message}")),
                Err(error) => match code_of(&error) {
                    Some(ERROR) => Failure::Away(format!("{name}: {message}")),
                    Some(_) | None => Failure::Store(error.into()),
                },
            }
        }
        _ => Failure::Store(error.into()),
    }
}

fn code(error: &sqlx::Error) -> Option<(u32, String)> {
    let database = error.as_database_error()?;
    Some((database.code()?.parse().ok()?, database.message().to_owned()))
}

fn code_of(error: &sqlx::Error) -> Option<u32> {
    code(error).map(|(code, _)| code & 0xff)
}
