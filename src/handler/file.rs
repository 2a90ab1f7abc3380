//! The handler file: routes in TOML. Everything that is wrong with it is found here without a database, and reported together.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::section::Section;
use super::http::Place;
use super::route::{self, Route};
use crate::model::text::printable;

pub mod section;

const SQL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
const SQL_TIMEOUT_MIN: Duration = Duration::from_millis(10);
const SQL_TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// The file as it was read at the start.
pub struct HandlerFile {
    pub path: PathBuf,
    /// The start of its BLAKE3 hash, in hex. Log and `/status` show it.
    pub digest: String,
    /// The folder of the user's migrations, if the file names one.
    pub migrations: Option<PathBuf>,
    /// The most time that one statement may take.
    pub timeout: Duration,
    pub routes: Vec<Route>,
}

/// Everything that is wrong, one line each: file, route, statement, and what to correct.
#[derive(Debug, Default, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Problems(pub Vec<String>);

impl HandlerFile {
    /// Reads the file. The problems may be those of a file that is usable in parts, so that its statements can be checked as well.
    ///
    /// # Errors
    /// If nothing of the file is usable.
    pub fn read(path: &Path, place: &Place<'_>) -> Result<(Self, Problems), Problems> {
        let shown = path.display();
        let refused = |problem: String| Problems(vec![format!("{shown}: {problem}")]);
        let bytes = std::fs::read(path).map_err(|error| refused(format!("cannot read the handler file: {error}")))?;
        let text = str::from_utf8(&bytes).map_err(|_| refused("the handler file is not UTF-8".to_owned()))?;
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| refused(syntax(text, &error)))?;
        let notes = RefCell::new(Vec::new());
        let file = Section::new(shown.to_string(), &table, &notes);
        file.known(&["sql", "route"]);
        let (migrations, timeout) = sql_settings(&file, place.folder);
        let routes: Vec<Route> =
            file.sections("route", "route").iter().filter_map(|section| Route::read(section, place)).collect();
        if !table.contains_key("route") {
            file.note("it has no [[route]]; every order would be a dead letter");
        }
        route::unreachable(&file, &routes);
        let digest = blake3::hash(&bytes).to_hex()[..16].to_owned();
        let file = Self { path: path.to_owned(), digest, migrations, timeout, routes };
        Ok((file, Problems(notes.into_inner())))
    }
}

fn sql_settings(file: &Section<'_>, folder: &Path) -> (Option<PathBuf>, Duration) {
    let Some(sql) = file.section("sql") else { return (None, SQL_TIMEOUT_DEFAULT) };
    sql.known(&["migrations", "timeout"]);
    let migrations = sql.text("migrations").map(|path| folder.join(path));
    let timeout = match sql.text("timeout").map(humantime::parse_duration) {
        None => SQL_TIMEOUT_DEFAULT,
        Some(Ok(timeout)) if (SQL_TIMEOUT_MIN..=SQL_TIMEOUT_MAX).contains(&timeout) => timeout,
        Some(_) => {
            sql.note("timeout must be a duration such as \"10s\", from 10ms to 1h");
            SQL_TIMEOUT_DEFAULT
        }
    };
    (migrations, timeout)
}

/// An error of the TOML parser, on one line.
fn syntax(text: &str, error: &toml::de::Error) -> String {
    let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    format!("line {line}: not valid TOML: {}", printable(&error.message().replace('\n', ", ")))
}
