//! The log: one line per event on stderr, as text or JSON, with a level that can be changed while running.
//!
//! Writing is synchronous: a line is out, or lost, before the program goes on, so what led to a crash is in the log. But a
//! reader that stops reading holds up nothing for longer than [`PATIENCE`]: then lines are dropped, and counted, until it reads
//! again. Orders are worth more than what is said about them.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::LogFormat;

/// Starts logging for the whole process; works once.
pub fn init(level: &str, format: LogFormat) -> Result<Reload, InitError> {
    let (filter, handle) = reload::Layer::new(parse_level(level)?);
    let lines = match format {
        LogFormat::Auto if io::stderr().is_terminal() => text(),
        LogFormat::Auto | LogFormat::Json => json(|| Stderr),
        LogFormat::Text => text(),
    };
    tracing_subscriber::registry().with(filter).with(lines).try_init()?;
    Ok(Reload { handle })
}

/// Changes the level of the running log.
#[derive(Clone)]
pub struct Reload {
    handle: reload::Handle<Targets, Registry>,
}

impl Reload {
    /// Takes effect for the next event; on an error the level stays what it was.
    pub fn set_level(&self, level: &str) -> Result<(), ReloadError> {
        let targets = parse_level(level)?;
        self.handle.reload(targets).map_err(ReloadError::Gone)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error(transparent)]
    Level(#[from] LevelError),
    #[error("cannot start the log")]
    AlreadyStarted(#[from] TryInitError),
}

#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error(transparent)]
    Level(#[from] LevelError),
    #[error("cannot change the level of the log")]
    Gone(#[source] reload::Error),
}

/// The part of `log.level` that cannot be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part:?} is no log level: allowed are off, error, warn, info, debug, trace, and target=level, with commas")]
pub struct LevelError {
    pub part: String,
}

/// Crates that tell more at `info` than an operator of this daemon wants to read, and what is left of them. What the connector
/// complains of at each attempt comes to us as an error or an event as well, and we say it once.
const QUIET: [(&str, &str, LevelFilter); 3] = [
    ("async_nats", "async_nats", LevelFilter::WARN),
    ("async_nats", "async_nats::connector", LevelFilter::OFF),
    ("sqlx", "sqlx", LevelFilter::WARN),
];

/// Reads `info` or `info,order_processor::worker=debug`. `async_nats` and `sqlx` say at most warnings unless they are
/// named.
///
/// Our own parser, because the one of the library takes a misspelt `inof` for a target, enables that and nothing else.
pub fn parse_level(level: &str) -> Result<Targets, LevelError> {
    let mut default = LevelFilter::INFO;
    let mut targets = Targets::new();
    for part in level.split(',').map(str::trim) {
        let refused = || LevelError { part: part.to_owned() };
        match part.split_once('=') {
            None => default = level_filter(part).ok_or_else(refused)?,
            Some((target, level)) if !target.is_empty() => {
                targets = targets.with_target(target, level_filter(level).ok_or_else(refused)?);
            }
            Some(_) => return Err(refused()),
        }
    }
    let named: Vec<String> = targets.iter().map(|(target, _)| target.to_owned()).collect();
    for (library, target, most) in QUIET {
        if !named.iter().any(|named| named.starts_with(library)) {
            targets = targets.with_target(target, default.min(most));
        }
    }
    Ok(targets.with_default(default))
}

fn level_filter(name: &str) -> Option<LevelFilter> {
    match name.to_ascii_lowercase().as_str() {
        "off" => Some(LevelFilter::OFF),
        "error" => Some(LevelFilter::ERROR),
        "warn" => Some(LevelFilter::WARN),
        "info" => Some(LevelFilter::INFO),
        "debug" => Some(LevelFilter::DEBUG),
        "trace" => Some(LevelFilter::TRACE),
        _ => None,
    }
}

type Lines<S> = Box<dyn Layer<S> + Send + Sync>;

fn text<S>() -> Lines<S>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
{
    let ansi = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    fmt::layer().with_writer(|| Stderr).with_ansi(ansi).log_internal_errors(false).boxed()
}

/// `log_internal_errors`, here and above: the library reports a failed write with `eprintln!`, which panics when stderr
/// is what failed.
fn json<S, W>(writer: W) -> Lines<S>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    W: for<'writer> fmt::MakeWriter<'writer> + Send + Sync + 'static,
{
    fmt::layer()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_span_list(false)
        .with_writer(writer)
        .log_internal_errors(false)
        .boxed()
}

/// How long a line waits for a reader that was there until now.
const PATIENCE: Duration = Duration::from_millis(500);
/// A pipe that says it can be written takes this much without blocking (POSIX's PIPE_BUF on Linux).
const PIECE_BYTES: usize = 4096;

static DROPPED_LINES: AtomicU64 = AtomicU64::new(0);
static READER: Mutex<Reader> = Mutex::new(Reader { reads: true, cut: false });

/// How many lines nobody got to read, because stderr was full or failed.
pub fn dropped_lines() -> u64 {
    DROPPED_LINES.load(Ordering::Relaxed)
}

/// What we know of whoever reads stderr.
struct Reader {
    reads: bool,
    /// The last line was dropped in its middle.
    cut: bool,
}

/// Standard error, never waited for without a bound.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Held over the whole line: room that one thread was promised must not be filled by another.
        let mut reader = READER.lock().unwrap_or_else(PoisonError::into_inner);
        let written = reader.write(line);
        if written.is_err() {
            DROPPED_LINES.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Reader {
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        let mut stderr = io::stderr().lock();
        if self.cut {
            self.wait(&stderr)?;
            stderr.write_all(b"\n")?;
            self.cut = false;
        }
        for piece in line.chunks(PIECE_BYTES) {
            self.wait(&stderr)?;
            stderr.write_all(piece)?;
            self.cut = true;
        }
        self.cut = false;
        Ok(())
    }

    /// Waits for room; not again before there was some.
    fn wait(&mut self, stderr: &io::StderrLock<'_>) -> io::Result<()> {
        let patience = if self.reads { PATIENCE } else { Duration::ZERO };
        let timeout = Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
        let mut fds = [PollFd::new(stderr, PollFlags::OUT)];
        let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&timeout)))?;
        self.reads = ready > 0;
        if self.reads { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::{Arc, Mutex};

    use tracing::Level;

    use super::*;

    #[test]
    fn the_level_holds_for_us_and_the_client_libraries_stay_at_warnings() {
        let targets = parse_level("debug").unwrap();
        assert!(targets.would_enable("order_processor::worker", &Level::DEBUG));
        assert!(targets.would_enable("async_nats::client", &Level::WARN));
        assert!(!targets.would_enable("async_nats::client", &Level::INFO));
        assert!(!targets.would_enable("async_nats::connector", &Level::ERROR), "it comes as an event as well");
        assert!(!targets.would_enable("sqlx::query", &Level::INFO));
    }

    #[test]
    fn a_library_that_is_named_says_what_was_asked_for() {
        let targets = parse_level("info, sqlx::query=debug").unwrap();
        assert!(targets.would_enable("sqlx::query", &Level::DEBUG));
        assert!(!targets.would_enable("async_nats", &Level::INFO));
        assert!(!targets.would_enable("order_processor", &Level::DEBUG));
        assert!(parse_level("info,async_nats=debug").unwrap().would_enable("async_nats::connector", &Level::DEBUG));
    }

    #[test]
    fn the_quiet_libraries_are_never_louder_than_the_rest() {
        let targets = parse_level("error").unwrap();
        assert!(!targets.would_enable("sqlx::query", &Level::WARN));
        assert!(!parse_level("off").unwrap().would_enable("async_nats", &Level::ERROR));
    }

    #[test]
    fn a_misspelt_level_is_an_error_that_names_it() {
        for (level, part) in
            [("inof", "inof"), ("info,sqlx=loud", "sqlx=loud"), ("", ""), ("info,", ""), ("=info", "=info")]
        {
            assert_eq!(parse_level(level), Err(LevelError { part: part.to_owned() }), "{level:?}");
        }
    }

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn json_has_the_fields_beside_the_message_and_follows_a_new_level() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (filter, handle) = reload::Layer::new(parse_level("info").unwrap());
        let reload = Reload { handle };
        let subscriber = tracing_subscriber::registry().with(filter).with(json(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("hidden");
            tracing::info!(stream_seq = 7, "applied");
            reload.set_level("debug").unwrap();
            tracing::debug!("shown");
            assert!(reload.set_level("loud").is_err());
            tracing::debug!("still shown");
        });
        let written = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<serde_json::Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let messages: Vec<&str> = lines.iter().map(|line| line["message"].as_str().unwrap()).collect();
        assert_eq!(messages, ["applied", "shown", "still shown"]);
        assert_eq!((&lines[0]["stream_seq"], &lines[0]["level"]), (&7.into(), &"INFO".into()));
    }

    /// In a process of its own, because the test harness catches what `eprintln!` writes and hides its panic.
    #[test]
    fn a_closed_stderr_loses_the_line_and_nothing_else() {
        for child in ["logging::tests::child_logs_json", "logging::tests::child_logs_text"] {
            let (reader, writer) = io::pipe().unwrap();
            drop(reader);
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", child, "--ignored", "--nocapture"])
                .stderr(writer)
                .output()
                .unwrap();
            let said = String::from_utf8(child.stdout).unwrap();
            assert!(child.status.success() && said.contains("1 passed"), "{}: {said}", child.status);
        }
    }

    #[test]
    #[ignore = "the process that a_closed_stderr_loses_the_line_and_nothing_else starts"]
    fn child_logs_json() {
        init("info", LogFormat::Auto).unwrap();
        tracing::error!("nobody reads this");
    }

    #[test]
    #[ignore = "the process that a_closed_stderr_loses_the_line_and_nothing_else starts"]
    fn child_logs_text() {
        init("info", LogFormat::Text).unwrap();
        tracing::error!("nobody reads this");
    }
}
