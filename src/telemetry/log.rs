//! The log: one line per event on stderr, as text or JSON, with a level that can be changed while running.
//!
//! Writing is synchronous: a line is out, or lost, before the program goes on, so what led to a crash is in the log. But a
//! reader that stops reading delays nothing for longer than [`PATIENCE`]: then lines are dropped and counted until it reads
//! again. Orders are worth more than their log lines.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::field::Field;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{self, Writer};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::LogFormat;
use crate::config::level::{LevelError, parse_level};
use crate::model::text::{hidden_as_json, printable};

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
    lines_of_text(|| Stderr, ansi)
}

fn lines_of_text<S, W>(writer: W, ansi: bool) -> Lines<S>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    W: for<'writer> fmt::MakeWriter<'writer> + Send + Sync + 'static,
{
    let fields = format::debug_fn(write_field).delimited(" ");
    fmt::layer().with_writer(writer).fmt_fields(fields).with_ansi(ansi).log_internal_errors(false).boxed()
}

/// A field may come from a message: whatever a terminal obeys is escaped, so that one event is one line.
fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn std::fmt::Debug) -> std::fmt::Result {
    let value = format!("{value:?}");
    let value = printable(&value);
    match (field.name(), writer.has_ansi_escapes()) {
        ("message", _) => write!(writer, "{value}"),
        (name, true) => write!(writer, "\u{1b}[3m{name}\u{1b}[0m\u{1b}[2m=\u{1b}[0m{value}"),
        (name, false) => write!(writer, "{name}={value}"),
    }
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
        .with_writer(EscapedJson(writer))
        .log_internal_errors(false)
        .boxed()
}

/// Writes lines of JSON in which strings have no character that a terminal obeys.
struct EscapedJson<W>(W);

impl<'writer, W: fmt::MakeWriter<'writer>> fmt::MakeWriter<'writer> for EscapedJson<W> {
    type Writer = EscapedJson<W::Writer>;

    fn make_writer(&'writer self) -> Self::Writer {
        EscapedJson(self.0.make_writer())
    }
}

impl<W: Write> Write for EscapedJson<W> {
    /// The library writes each line with one call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write_all(hidden_as_json(&String::from_utf8_lossy(line)).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// How long a line waits for a reader that was there until now.
const PATIENCE: Duration = Duration::from_millis(500);
/// A pipe that says it can be written takes this much without blocking (POSIX's PIPE_BUF on Linux).
const PIECE_BYTES: usize = 4096;

static DROPPED_LINES: AtomicU64 = AtomicU64::new(0);
static STDERR: Mutex<StderrState> = Mutex::new(StderrState { reads: true, cut: false });

/// How many lines nobody got to read, because stderr was full or failed.
pub fn dropped_lines() -> u64 {
    DROPPED_LINES.load(Ordering::Relaxed)
}

/// What we know of whoever reads stderr.
struct StderrState {
    reads: bool,
    /// The last line was dropped in its middle.
    cut: bool,
}

/// Standard error, never waited for without a bound.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Locked for the whole line: another thread must not fill the space that poll has reported to this one.
        let mut reader = STDERR.lock().unwrap_or_else(PoisonError::into_inner);
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

impl StderrState {
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

    /// Waits for space in the pipe. After a wait without success, the next lines do not wait until there is space again.
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

    /// ESC, a C1 character, a mark of direction and a line break, as a publisher may put them into an id or a subject.
    const HOSTILE: &str = "a\u{1b}[2J\u{9b}31m\u{202e}b\nc";

    fn written(lines: impl FnOnce(Buffer) -> Lines<Registry>) -> String {
        let buffer = Buffer::default();
        let subscriber = tracing_subscriber::registry().with(lines(buffer.clone()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(message_id = %HOSTILE, subject = HOSTILE, ?HOSTILE, stream_seq = 7, "{HOSTILE} is a dead letter");
        });
        String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn whatever_a_message_holds_an_event_is_one_line_that_no_terminal_obeys() {
        let text = written(|buffer| lines_of_text(move || buffer.clone(), false));
        let shown = "a\\u{1b}[2J\\u{9b}31m\\u{202e}b\\nc";
        assert!(text.contains(&format!("{shown} is a dead letter message_id={shown} subject=\"{shown}\"")), "{text}");
        assert!(text.contains("stream_seq=7"), "{text}");
        let json = written(|buffer| json(move || buffer.clone()));
        let event: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&event["message_id"], &event["subject"]), (&HOSTILE.into(), &HOSTILE.into()));
        for line in [text, json] {
            let line = line.strip_suffix('\n').unwrap();
            assert_eq!(printable(line), line, "nothing left to escape");
        }
        let colored = written(|buffer| lines_of_text(move || buffer.clone(), true));
        assert!(colored.contains("message_id") && !colored.contains("[2J\u{9b}"), "{colored:?}");
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
