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
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::LogFormat;
use crate::config::level::{LevelError, parse_level};

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

    use super::*;

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
        for child in ["telemetry::log::tests::child_logs_json", "telemetry::log::tests::child_logs_text"] {
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
