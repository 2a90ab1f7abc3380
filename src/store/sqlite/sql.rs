//! Values of statements, and what an error of SQLite means.

use std::io;

use sqlx::Arguments;
use sqlx::sqlite::SqliteArguments;

use crate::store::{Error, ErrorClass};

/// The error of a statement, with the class that its extended result code has (sqlite.org/rescode.html).
pub fn failed(doing: &'static str, source: sqlx::Error) -> Error {
    let code = source.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    let class = match code.map(|code| code & 0xff) {
        Some(5 | 6) => ErrorClass::Busy,
        Some(8) => ErrorClass::ReadOnly,
        Some(10 | 14) => ErrorClass::Io,
        Some(11 | 26) => ErrorClass::Corrupt,
        Some(13) => ErrorClass::Full,
        // Too big, constraint, type mismatch: all about the values of one row.
        Some(18..=20) => ErrorClass::Constraint,
        Some(_) => ErrorClass::Other,
        None => match &source {
            sqlx::Error::Io(error) => io_class(error),
            _ => ErrorClass::Other,
        },
    };
    match source {
        // The text of SQLite alone: its code, which the driver puts before it, is in the class.
        sqlx::Error::Database(error) => Error::new(doing, class, error.message().to_owned()),
        other => Error::new(doing, class, other),
    }
}

/// For `?` on a statement of a handler.
impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        failed("running a statement of the handler", source)
    }
}

pub fn io_class(error: &io::Error) -> ErrorClass {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorClass::Full,
        io::ErrorKind::ReadOnlyFilesystem => ErrorClass::ReadOnly,
        _ => ErrorClass::Io,
    }
}

pub fn bind<'a, T>(arguments: &mut SqliteArguments, value: T) -> Result<(), Error>
where
    T: sqlx::Encode<'a, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
{
    arguments.add(value).map_err(|source| Error::new("binding a value", ErrorClass::Other, source))
}

/// SQLite integers are signed. No stream reaches 2^63 messages.
pub fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
