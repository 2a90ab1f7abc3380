//! The settings: where they come from, what each one allows, and every problem with them at once.
//! `config/default.toml` ← file ← environment. Nothing here opens a secret file or reads the process environment:
//! the caller passes the variables, so that tests can pass their own.
//!
//! A new setting needs: its key with a comment in `config/default.toml`, a field here, its line in `SETTINGS` (with its bounds, if it has
//! some), its reader in `read.rs` (and a parser in `parse.rs` if no other fits), and `make docs` for the reference page. The unit tests check that the
//! file and `SETTINGS` have the same keys.

use std::ffi::OsString;
use std::fmt;
use std::fs::Metadata;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::{getegid, geteuid};

pub use parse::ByteSize;
use read::{Refused, SettingsReader, read_config};
use sources::{env_layer, file_layer, toml_layer};

pub mod level;
mod parse;
mod read;
mod sources;
#[cfg(test)]
mod tests;

pub const DEFAULT_TOML: &str = include_str!("../config/default.toml");
const SYSTEM_FILE: &str = "/etc/order-processor/config.toml";
const ENV_PREFIX: &str = "ORDER_PROCESSOR__";
/// What requests to JetStream begin with on the server itself.
pub const DEFAULT_API_PREFIX: &str = "$JS.API";

/// All settings, checked: a value of this type needs no further validation. `Debug` prints no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub nats: Nats,
    pub consumer: ConsumerNames,
    pub batch: Batch,
    pub retry: Retry,
    pub inbox: InboxSettings,
    pub database: Database,
    pub handler: HandlerSettings,
    pub audit: AuditSettings,
    pub http: Http,
    pub shutdown: Shutdown,
    pub log: Log,
}

impl Config {
    /// Merges the defaults, the file and the environment, later ones winning, and checks the result.
    ///
    /// `file` is the operand of `--config` and must exist; `None` means `/etc/order-processor/config.toml`, if it
    /// exists. Of `env` only `ORDER_PROCESSOR__*` counts: with two underscores, because Kubernetes sets
    /// `ORDER_PROCESSOR_PORT` and the like for a service of our name.
    pub fn load(file: Option<&Path>, env: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Loaded, Problems> {
        load_from(file, Path::new(SYSTEM_FILE), env)
    }
}

/// The server and how to log in to it.
#[derive(Clone, PartialEq, Eq)]
pub struct Nats {
    /// One or more `nats://host:port` or `tls://host:port`, separated by commas without white space. May hold a
    /// password: print [`Nats::redacted_url`] instead.
    pub url: String,
    pub auth: Auth,
    /// The JetStream domain, if it was set.
    pub domain: Option<String>,
    /// What all requests to JetStream begin with, without a dot at the end.
    pub api_prefix: String,
    pub tls: Tls,
}

impl Nats {
    /// [`Nats::url`] with `***` for the user and password of each server.
    pub fn redacted_url(&self) -> String {
        parse::redact(&self.url)
    }
}

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nats")
            .field("url", &self.redacted_url())
            .field("auth", &self.auth)
            .field("domain", &self.domain)
            .field("api_prefix", &self.api_prefix)
            .field("tls", &self.tls)
            .finish()
    }
}

/// What closes a file that is open to users who are neither its owner nor in its group, and leaves it readable for us; `None`
/// if it is closed. The group may read: that is how container platforms hand secrets on.
pub fn how_to_close(path: &Path, metadata: &Metadata) -> Option<String> {
    if metadata.mode() & 0o006 == 0 {
        return None;
    }
    // A secret of a container platform: no command changes it from here.
    if statvfs(path).is_ok_and(|system| system.f_flag.contains(StatVfsMountFlags::RDONLY)) {
        return Some(
            "`defaultMode: 0440` of the volume in Kubernetes, or `mode: 0400` and the uid of the secret in Docker (the file system is \
             read-only)"
                .to_owned(),
        );
    }
    let (path, user, group) = (path.display(), geteuid(), getegid().as_raw());
    let of_our_group = metadata.gid() == group && metadata.mode() & 0o040 != 0;
    if user.is_root() || user.as_raw() == metadata.uid() || of_our_group {
        return Some(format!("`chmod o= {path}`"));
    }
    Some(format!("`chgrp {group} {path} && chmod 640 {path}`"))
}

/// The one way to log in. Secrets stay in their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Nothing configured, or a user in [`Nats::url`].
    None,
    UserPassword {
        user: String,
        password_file: PathBuf,
    },
    Token {
        token_file: PathBuf,
    },
    Nkey {
        nkey_file: PathBuf,
    },
    /// A JWT and its seed.
    Credentials {
        credentials_file: PathBuf,
    },
}

/// PEM files. The certificate and the key are both set, or neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// The TLS handshake comes before the server has said anything.
    pub handshake_first: bool,
}

impl Tls {
    /// Whoever sets one of these means TLS: a password must not go out in the clear because the server offers nothing better.
    pub fn is_wanted(&self) -> bool {
        self.handshake_first || self.ca_file.is_some() || self.cert_file.is_some()
    }
}

/// What to bind to. Both names are legal JetStream names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerNames {
    pub stream: String,
    pub name: String,
}

/// The bounds of one commit and of what is prefetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Messages.
    pub max_messages: usize,
    /// Payload and headers, in bytes.
    pub max_bytes: usize,
}

/// When a message that failed in the handler is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Failed runs of the handler, after which a message is a dead letter.
    pub max_attempts: u32,
    /// Before the second run.
    pub min_delay: Duration,
    /// At least `min_delay`.
    pub max_delay: Duration,
}

/// What is remembered of processed messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboxSettings {
    pub on_conflict: OnConflict,
    /// An RFC 6901 pointer, never empty, to the message id in a JSON payload.
    pub id_pointer: Option<String>,
    pub id_scope: IdScope,
    pub on_missing_id: OnMissingId,
    pub retention: Retention,
}

/// What becomes of a known message id with another digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnConflict {
    DeadLetter,
    Duplicate,
}

/// Within what an id means one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdScope {
    Subject,
    Stream,
    /// Messages with the same value of this header.
    Header(String),
}

/// What becomes of a message whose id is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnMissingId {
    /// Its place in the stream is its id.
    Place,
    DeadLetter,
}

/// How long a processed message id is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// While the stream could still hold or redeliver its message, and at least 7 days.
    Auto,
    /// A fixed time.
    For(Duration),
}

/// The database that keeps ids, effects and dead letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Database {
    /// The file that `sqlite://relative.db` or `sqlite:///absolute.db` names.
    Sqlite(PathBuf),
}

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => path.display().fmt(f),
        }
    }
}

/// What an order does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandlerSettings {
    /// The handler file; `None` records every order.
    pub file: Option<PathBuf>,
}

/// When the daemon looks for missing messages by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditSettings {
    /// `None` for never.
    pub every: Option<Duration>,
}

/// Where metrics, health and status are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Http {
    /// Port 0 lets the system choose one.
    pub listen: SocketAddr,
}

/// How long a stop may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shutdown {
    /// From the first signal to the exit.
    pub timeout: Duration,
}

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// Directives that [`crate::config::level::parse_level`] accepts.
    pub level: String,
    pub format: LogFormat,
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    Text,
    Json,
}

/// The settings, and where each came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    /// Every key, in the order of `config/default.toml`.
    pub settings: Vec<Setting>,
}

/// One effective setting, fit to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub key: &'static str,
    /// As it was written, passwords redacted; empty if not set.
    pub value: String,
    /// `default`, `file /etc/…` or `environment ORDER_PROCESSOR__…`.
    pub source: String,
}

/// Everything that is wrong with the settings, one line each: key, source, value unless it may be secret, what is
/// wrong and what is allowed.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Problems(Vec<String>);

impl Problems {
    /// The lines that `Display` prints.
    pub fn lines(&self) -> &[String] {
        &self.0
    }
}

/// One key, and what its problems say is allowed. The parsers enforce it: see [`read_config`].
struct Known {
    key: &'static str,
    /// With `{bounds}`, `{least}` and `{most}` for what [`Known::bounds`] has.
    allowed: &'static str,
    bounds: Option<Bounds>,
}

/// The least and the greatest value of a setting, written as an operator writes them. The parser of the setting reads them, and its
/// problems show them. A test finds them in `config/default.toml`.
#[derive(Clone, Copy)]
struct Bounds {
    least: &'static str,
    most: &'static str,
}

const fn known(key: &'static str, allowed: &'static str) -> Known {
    Known { key, allowed, bounds: None }
}

const fn bounded(key: &'static str, allowed: &'static str, least: &'static str, most: &'static str) -> Known {
    Known { key, allowed, bounds: Some(Bounds { least, most }) }
}

impl Known {
    fn of(key: &str) -> &'static Self {
        SETTINGS.iter().find(|setting| setting.key == key).expect("a unit test reads every setting")
    }

    fn allowed(&self) -> String {
        let Some(Bounds { least, most }) = self.bounds else { return self.allowed.to_owned() };
        let allowed = self.allowed.replace("{bounds}", "from {least} to {most}");
        allowed.replace("{least}", least).replace("{most}", most)
    }
}

const SERVERS: &str = "nats://host:port or tls://host:port, several with commas";
const FILE: &str = "the path of a file";
const NAME: &str = "1 to 255 bytes without white space and without . * > / \\";

/// Every key, in the order of `config/default.toml`: a test compares the two.
const SETTINGS: [Known; 31] = [
    known("nats.url", SERVERS),
    known("nats.credentials_file", FILE),
    known("nats.nkey_file", FILE),
    known("nats.user", "the name of a user"),
    known("nats.password_file", FILE),
    known("nats.token_file", FILE),
    known("nats.domain", NAME),
    known("nats.api_prefix", "a subject without wildcards, such as \"JS.orders.API\""),
    known("nats.tls.ca_file", FILE),
    known("nats.tls.cert_file", FILE),
    known("nats.tls.key_file", FILE),
    known("nats.tls.handshake_first", "true or false"),
    known("consumer.stream", NAME),
    known("consumer.name", NAME),
    bounded("batch.max_messages", "a whole number {bounds}", "1", "10000"),
    bounded("batch.max_bytes", "bytes, or a size such as \"8MiB\", {bounds}", "64KiB", "1GiB"),
    bounded("retry.max_attempts", "a whole number {bounds}", "1", "1000"),
    bounded("retry.min_delay", "a duration such as \"1s\", {bounds}", "1ms", "24h"),
    bounded("retry.max_delay", "a duration such as \"5m\", from retry.min_delay to {most}", "1ms", "24h"),
    known("inbox.on_conflict", "\"dead-letter\" or \"duplicate\""),
    known("inbox.id_pointer", "a JSON pointer such as \"/order/id\", in which ~ is written ~0 and a / in a name ~1"),
    known("inbox.id_scope", "\"subject\", \"stream\", or a header such as \"header:X-Tenant\""),
    known("inbox.on_missing_id", "\"place\" or \"dead-letter\""),
    bounded("inbox.retention", "\"auto\", or a duration such as \"30d\", {bounds}", "1h", "10y"),
    known("database.url", "sqlite://relative.db or sqlite:///absolute.db"),
    known("handler.file", FILE),
    bounded("audit.every", "a duration such as \"1h\", {bounds}, or \"off\"", "1s", "7d"),
    known("http.listen", "an IP address and port, such as \"127.0.0.1:9464\" or \"[::]:9464\""),
    bounded("shutdown.timeout", "a duration such as \"25s\", {bounds}", "1s", "1h"),
    known("log.level", "error, warn, info, debug, trace or off, then target=level with commas"),
    known("log.format", "\"auto\", \"text\" or \"json\""),
];

fn load_from(
    file: Option<&Path>,
    system_file: &Path,
    env: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Loaded, Problems> {
    let mut problems = Vec::new();
    let defaults = toml_layer(DEFAULT_TOML, "default", &mut problems);
    let from_file = file_layer(file, system_file, &mut problems);
    let from_env = env_layer(env, &mut problems);
    // Without the whole file the checks below would report what the file may well have set right.
    let (Some(defaults), Some(from_file)) = (defaults, from_file) else { return Err(Problems(problems)) };

    let merged = ::config::Config::builder()
        .add_source(defaults)
        .add_source(from_file)
        .add_source(from_env)
        .build()
        .expect("merging cannot fail: the layers are in memory and hold only known keys");
    let mut reader = SettingsReader { merged: merged.cache, problems };
    match read_config(&mut reader) {
        Ok(config) if reader.problems.is_empty() => Ok(Loaded { config, settings: reader.settings() }),
        Ok(_) | Err(Refused) => Err(Problems(reader.problems)),
    }
}
