//! The statements of a route, run for many orders with one hand-over to SQLite's thread.
//!
//! The text of a route is repeated for up to [`UNROLLED_MAX`] orders. The results come back in the order of the statements, so their
//! number before an error tells which order failed, and the rows of each tell whether `expect` holds.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::TryStreamExt;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Arguments, AssertSqlSafe, Either, Executor, SqliteConnection};

use self::failure::failure;
use self::scan::Scanned;
use self::timeout::Timeout;
use super::Failure;
use super::file::section::Section;
use super::params::Value;

pub mod check;
mod failure;
pub mod migrations;
pub mod scan;
pub mod timeout;

/// Statements in one text at most. They stay prepared, with a few kilobytes each.
const UNROLLED_MAX: usize = 64;

/// One statement of a route.
pub struct Statement {
    /// `route 1, statement 2`, for texts.
    pub name: String,
    pub scanned: Scanned,
    /// The parameter of each `?`.
    pub wanted: Vec<usize>,
    expect: Option<Expect>,
    /// Whether it returns rows, even none. Known after the check.
    returns_rows: AtomicBool,
}

/// How many rows a statement must return or change, and what becomes of the order otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expect {
    rows: ExpectedRows,
    retry: bool,
    because: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpectedRows {
    None,
    One,
    Some,
}

impl Expect {
    pub fn read(section: &Section<'_>) -> Option<Self> {
        let rows = match section.text("expect") {
            None | Some("any") => None,
            Some("none") => Some(ExpectedRows::None),
            Some("one") => Some(ExpectedRows::One),
            Some("some") => Some(ExpectedRows::Some),
            Some(other) => {
                section.note(format!("expect {other:?} is not none, one, some or any"));
                return None;
            }
        };
        let retry = match section.text("otherwise") {
            None | Some("dead-letter") => false,
            Some("retry") => true,
            Some(other) => {
                section.note(format!("otherwise {other:?} is not dead-letter or retry"));
                false
            }
        };
        let because = section.text("because").map(ToOwned::to_owned);
        if rows.is_none() && !section.has("expect") && (section.has("otherwise") || section.has("because")) {
            section.note("`otherwise` and `because` only count together with `expect`");
        }
        rows.map(|rows| Self { rows, retry, because })
    }

    /// The failure of an order for which the statement had this many rows.
    fn failure(&self, rows: u64, name: &str) -> Option<Failure> {
        let (holds, wanted) = match self.rows {
            ExpectedRows::None => (rows == 0, "none"),
            ExpectedRows::One => (rows == 1, "one"),
            ExpectedRows::Some => (rows > 0, "some"),
        };
        if holds {
            return None;
        }
        let found = format!("{name}: {rows} rows, expected {wanted}");
        let text = self.because.as_ref().map_or_else(|| found.clone(), |because| format!("{because} ({found})"));
        Some(if self.retry { Failure::Retry(text) } else { Failure::Permanent(text) })
    }
}

impl Statement {
    pub fn new(name: String, scanned: Scanned, wanted: Vec<usize>, expect: Option<Expect>) -> Self {
        Self { name, scanned, wanted, expect, returns_rows: AtomicBool::new(false) }
    }
}

/// How one hand-over ended.
enum HandOver {
    Done {
        /// Of the last statement.
        rows: u64,
    },
    /// The order at this index failed in the statement at this index of the route.
    Failed { order: usize, statement: usize, error: sqlx::Error },
    /// The order at this index did not have the rows that a statement expects.
    Unexpected { order: usize, failure: Failure },
}

/// Applies orders of one route: `values` has, for each order, one value for each `?` of all the statements.
///
/// # Errors
/// [`Failure::At`] with the index of the first order that failed, or what keeps every order from being applied.
pub async fn apply(
    connection: &mut SqliteConnection,
    statements: &[Statement],
    values: Vec<Vec<Value>>,
    timeout: &Timeout,
) -> Result<(), Failure> {
    let orders_max = (UNROLLED_MAX / statements.len()).max(1);
    let mut values = values.into_iter();
    let mut applied = 0;
    while values.len() > 0 {
        // Powers of two: a few texts serve every number of orders, and stay in the driver's cache.
        let count = 1 << values.len().min(orders_max).ilog2();
        let ended = hand_over(connection, statements, values.by_ref().take(count), count, timeout).await?;
        match ended {
            HandOver::Done { .. } => applied += count,
            HandOver::Unexpected { order, failure } => return Err(at(applied + order, failure)),
            HandOver::Failed { order, statement, error } => {
                let failure = failure(connection, &statements[statement], error, timeout).await;
                return Err(at(applied + order, failure));
            }
        }
    }
    Ok(())
}

/// Runs one statement for one order, and returns the rows that `expect` counts.
///
/// # Errors
/// The failure of the order.
pub async fn apply_one(
    connection: &mut SqliteConnection,
    statement: &Statement,
    values: Vec<Value>,
    timeout: &Timeout,
) -> Result<u64, Failure> {
    let ended = hand_over(connection, std::slice::from_ref(statement), std::iter::once(values), 1, timeout).await?;
    match ended {
        HandOver::Done { rows } => Ok(rows),
        HandOver::Unexpected { failure, .. } => Err(failure),
        HandOver::Failed { error, .. } => Err(failure(connection, statement, error, timeout).await),
    }
}

fn at(index: usize, failure: Failure) -> Failure {
    Failure::At { index, failure: Box::new(failure) }
}

async fn hand_over(
    connection: &mut SqliteConnection,
    statements: &[Statement],
    values: impl Iterator<Item = Vec<Value>>,
    count: usize,
    timeout: &Timeout,
) -> Result<HandOver, Failure> {
    let mut arguments = SqliteArguments::default();
    for value in values.flatten() {
        bind(&mut arguments, value)?;
    }
    let text: String = statements.iter().flat_map(|statement| [statement.scanned.sql.as_str(), ";"]).collect();
    let query = sqlx::query_with(AssertSqlSafe(text.repeat(count)), arguments);
    let mut results = (&mut *connection).fetch_many(query);
    let (mut done, mut rows_seen, mut last_rows) = (0, 0, 0);
    let mut unexpected = None;
    loop {
        let (order, statement) = (done / statements.len(), done % statements.len());
        match results.try_next().await {
            Ok(Some(Either::Right(_row))) => rows_seen += 1,
            Ok(Some(Either::Left(result))) => {
                timeout.restart();
                let statement = &statements[statement];
                let rows =
                    if statement.returns_rows.load(Ordering::Relaxed) { rows_seen } else { result.rows_affected() };
                let failure = statement.expect.as_ref().and_then(|expect| expect.failure(rows, &statement.name));
                if let (Some(failure), None) = (failure, &unexpected) {
                    unexpected = Some(HandOver::Unexpected { order, failure });
                }
                (done, rows_seen, last_rows) = (done + 1, 0, rows);
            }
            Ok(None) => return Ok(unexpected.unwrap_or(HandOver::Done { rows: last_rows })),
            // An earlier order is to blame first: this one may have failed because of it.
            Err(error) => return Ok(unexpected.unwrap_or(HandOver::Failed { order, statement, error })),
        }
    }
}

fn bind(arguments: &mut SqliteArguments, value: Value) -> Result<(), Failure> {
    let bound = match value {
        Value::Null => arguments.add(None::<i64>),
        Value::Integer(number) => arguments.add(number),
        Value::Real(number) => arguments.add(number),
        Value::Text(text) => arguments.add(text),
        Value::Blob(bytes) => arguments.add(bytes),
    };
    bound.map_err(|error| Failure::Permanent(format!("a value cannot be bound: {error}")))
}
