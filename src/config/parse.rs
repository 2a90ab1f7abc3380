//! One value each: text, numbers, sizes, durations, servers, names. Pure; a refusal says what is wrong with the value.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ::config::{Value, ValueKind};

use super::level::parse_level;
use super::{Bounds, Database, IdScope};

fn from_environment(value: &Value) -> bool {
    value.origin().is_some_and(|origin| origin.starts_with("environment"))
}

/// The value, if it is within `bounds`. `parse` reads the bounds too.
pub fn within<T: PartialOrd>(
    value: &Value,
    bounds: Bounds,
    parse: impl Fn(&Value) -> Result<T, String>,
) -> Result<T, String> {
    // Numbers are text only in variables.
    let origin = "environment".to_owned();
    let bound = |text: &str| parse(&Value::new(Some(&origin), text)).expect("a unit test reads every bound");
    let parsed = parse(value)?;
    if (bound(bounds.least)..=bound(bounds.most)).contains(&parsed) {
        Ok(parsed)
    } else {
        Err("is out of range".to_owned())
    }
}

/// Text that is fit for a name, a path or a log line.
pub fn text(value: &Value) -> Result<&str, String> {
    let wrong = match &value.kind {
        ValueKind::String(text) if text.is_empty() && from_environment(value) => "is empty; unset the variable instead",
        ValueKind::String(text) if text.is_empty() => "is empty; remove the key instead",
        ValueKind::String(text) if text.trim() != text => "begins or ends with white space",
        ValueKind::String(text) if text.contains(char::is_control) => "holds a control character",
        ValueKind::String(text) => return Ok(text),
        ValueKind::Array(_) => "where one text is wanted",
        _ => "is not text; put it in quotes",
    };
    Err(wrong.to_owned())
}

pub fn path(value: &Value) -> Result<PathBuf, String> {
    text(value).map(PathBuf::from)
}

/// Variables are text by nature; in the file a truth value is written as one.
pub fn yes_or_no(value: &Value) -> Result<bool, String> {
    match &value.kind {
        ValueKind::Boolean(value) => Ok(*value),
        ValueKind::String(_) if !from_environment(value) => Err("is text; write it without quotes".to_owned()),
        ValueKind::String(_) => text(value)?.parse().map_err(|_| "is neither true nor false".to_owned()),
        _ => Err("is neither true nor false".to_owned()),
    }
}

/// Never rounds: 2.6 is an error. Variables are text by nature; in the file a number is written as one.
pub fn whole_number(value: &Value) -> Result<u32, String> {
    let number = match &value.kind {
        ValueKind::I64(number) => i128::from(*number),
        ValueKind::Float(_) => return Err("is not a whole number".to_owned()),
        ValueKind::String(_) if !from_environment(value) => {
            return Err("is text where a number is wanted; write it without quotes".to_owned());
        }
        ValueKind::String(_) => text(value)?.parse::<i128>().map_err(|_| "is not a whole number".to_owned())?,
        _ => return Err("is not a number".to_owned()),
    };
    u32::try_from(number).map_err(|_| "is out of range".to_owned())
}

pub fn byte_size(value: &Value) -> Result<u32, String> {
    let ValueKind::String(_) = &value.kind else { return whole_number(value) };
    let ByteSize(bytes) = text(value)?.parse()?;
    u32::try_from(bytes).map_err(|_| "is out of range".to_owned())
}

/// A number of bytes, written `8388608` or `8MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        if number.is_empty() || unit.starts_with('.') {
            return Err("does not begin with a whole number".to_owned());
        }
        let factor: u64 = match unit.trim_start() {
            "" | "B" => 1,
            "KB" => 1000,
            "KiB" => 1 << 10,
            "MB" => 1_000_000,
            "MiB" => 1 << 20,
            "GB" => 1_000_000_000,
            "GiB" => 1 << 30,
            _ => return Err("has an unknown unit; known are KiB, MiB, GiB, KB, MB, GB".to_owned()),
        };
        let bytes = number.parse().ok().and_then(|number: u64| number.checked_mul(factor));
        bytes.map(Self).ok_or_else(|| "is out of range".to_owned())
    }
}

pub fn duration(value: &Value) -> Result<Duration, String> {
    let no_unit = || Err("has no unit; write for example \"25s\" or \"5m\"".to_owned());
    let text = match &value.kind {
        ValueKind::I64(_) | ValueKind::Float(_) => return no_unit(),
        _ => text(value)?,
    };
    if text.parse::<f64>().is_ok() {
        return no_unit();
    }
    humantime::parse_duration(text).map_err(|error| format!("is not a duration: {error}"))
}

/// The servers, without white space around the commas. No message shows any part of a server: it may be a password.
pub fn servers(value: &Value) -> Result<String, String> {
    let servers: Vec<&str> = text(value)?.split(',').map(str::trim).collect();
    let mut login = None;
    for (index, server) in servers.iter().enumerate() {
        let wrong = |wrong| format!("{wrong} (server {} of {})", index + 1, servers.len());
        let address = check_server(server).map_err(wrong)?;
        // The client has one login for all of them, also for those that it learns of from the others.
        if let Some(user) = address.username() {
            let ours = (user.to_owned(), address.password().map(ToOwned::to_owned));
            if *login.get_or_insert_with(|| ours.clone()) != ours {
                return Err(wrong("has another user than a server before it; all take the same login"));
            }
        }
    }
    Ok(servers.join(","))
}

fn check_server(server: &str) -> Result<async_nats::ServerAddr, &'static str> {
    if server.is_empty() {
        return Err("has nothing between two commas");
    }
    let Some(authority) = server.strip_prefix("nats://").or_else(|| server.strip_prefix("tls://")) else {
        return Err("does not begin with nats:// or tls://");
    };
    if authority.contains(['/', '?', '#']) || authority.contains(char::is_whitespace) {
        return Err("has a path, a query or white space; in a password write / ? # , as %2F %3F %23 %2C");
    }
    // The client's own parser, so that what passes here is what it can connect to.
    let address: async_nats::ServerAddr = server.parse().map_err(|_| "has a host or port that cannot be one")?;
    if authority.contains('@') && address.username().is_none() {
        return Err("has an @ and no user before it");
    }
    if address.host().is_empty() || address.port() == 0 {
        return Err("has no host, or port 0");
    }
    Ok(address)
}

pub fn jetstream_name(value: &Value) -> Result<String, String> {
    let name = text(value)?;
    if name.len() > 255 {
        return Err("is too long".to_owned());
    }
    if name.contains(|c: char| c.is_whitespace() || ".*>/\\".contains(c)) {
        return Err("holds a character that a JetStream name cannot have".to_owned());
    }
    Ok(name.to_owned())
}

/// A subject that others are appended to.
pub fn subject(value: &Value) -> Result<String, String> {
    let subject = text(value)?.trim_end_matches('.');
    if subject.contains(|c: char| c.is_whitespace() || c.is_control() || "*>".contains(c)) {
        return Err("holds a character that a subject without wildcards cannot have".to_owned());
    }
    if subject.split('.').any(str::is_empty) {
        return Err("has an empty token".to_owned());
    }
    Ok(subject.to_owned())
}

/// RFC 6901, without its empty pointer: the whole payload is not a message id.
pub fn json_pointer(value: &Value) -> Result<String, String> {
    let pointer = text(value)?;
    if !pointer.starts_with('/') {
        return Err("does not begin with /".to_owned());
    }
    if pointer.split('~').skip(1).any(|after| !after.starts_with(['0', '1'])) {
        return Err("holds a ~ that is neither ~0 nor ~1".to_owned());
    }
    Ok(pointer.to_owned())
}

/// A header whose values tell tenants apart. The headers of the server do not: some differ with each message.
pub fn id_scope(value: &Value) -> Result<IdScope, String> {
    let name = match text(value)? {
        "subject" => return Ok(IdScope::Subject),
        "stream" => return Ok(IdScope::Stream),
        text => text.strip_prefix("header:").ok_or("is not one of these")?,
    };
    if name.is_empty() {
        return Err("names no header".to_owned());
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)) {
        return Err("holds a character that the name of a header cannot have".to_owned());
    }
    if name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-")) {
        return Err("names a header of the server, which does not tell tenants apart".to_owned());
    }
    Ok(IdScope::Header(name.to_owned()))
}

pub fn database(value: &Value) -> Result<Database, String> {
    let url = text(value)?;
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Err("names a PostgreSQL database, which is not supported yet".to_owned());
    }
    let Some(path) = url.strip_prefix("sqlite://") else {
        return Err("does not begin with sqlite://".to_owned());
    };
    if path.contains(['?', '%']) {
        return Err("holds options or escapes, which are not supported".to_owned());
    }
    if path.starts_with([':', '~']) || path.starts_with("file:") {
        return Err("is not a plain path; a database in memory would forget what was acknowledged".to_owned());
    }
    if path.is_empty() || path.ends_with('/') {
        return Err("names no file".to_owned());
    }
    // By the name of a link, two daemons would lock different files, and the files beside the database would have other names.
    let path = PathBuf::from(path);
    let target = if path.is_symlink() { path.canonicalize().ok() } else { None };
    Ok(Database::Sqlite(target.unwrap_or(path)))
}

pub fn socket_address(value: &Value) -> Result<SocketAddr, String> {
    text(value)?.parse().map_err(|_| "is not an IP address and port".to_owned())
}

/// The directives, without white space around the commas.
pub fn log_level(value: &Value) -> Result<String, String> {
    let directives = text(value)?.split(',').map(str::trim).collect::<Vec<_>>().join(",");
    parse_level(&directives)
        .map_err(|error| format!("holds {:?}, which is neither a level nor target=level", error.part))?;
    Ok(directives)
}

/// `***` for what stands before the last `@` of each server. Only for values that [`servers`] accepts.
pub fn redact(url: &str) -> String {
    let servers =
        url.split(',').map(str::trim).map(|server| match (server.split_once("://"), server.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}"),
            _ => server.to_owned(),
        });
    servers.collect::<Vec<_>>().join(",")
}
