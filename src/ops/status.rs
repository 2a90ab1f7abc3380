//! `status`: the state of the work, read from the server and the database. The daemon does not need to run.

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::time::Duration;

use clap::{ArgAction, Args};
use serde::Serialize;

use super::healthcheck::{self, HealthcheckError};
use crate::config::{Config, Database};
use crate::jetstream::connection::{self, CommandClient};
use crate::jetstream::gate::{self, Expectations, Severity};
use crate::jetstream::link::is_connected;
use crate::jetstream::look::{Snapshot, look_for_command};
use crate::jetstream::other_pulls;
use crate::model::text::{chain, json, printable};
use crate::model::time::{seconds_text, unix_ns};
use crate::ops::{Format, json_flag};
use crate::store::{self, Bind, Counts, OpenError, Pause, Reader, Unbound};
use crate::telemetry::status;

mod screen;

const INTERVAL_MIN: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long = "json", action = ArgAction::SetTrue, value_parser = json_flag())]
    format: Format,
    /// Repeat: on a terminal as a full-screen view, elsewhere one line each time
    #[arg(long)]
    watch: bool,
    /// Time between two looks
    #[arg(long, value_name = "DURATION", default_value = "1s", requires = "watch", allow_hyphen_values = true, value_parser = humantime::parse_duration)]
    interval: Duration,
}

impl StatusArgs {
    /// Whether the terminal is ours alone, so that nobody else may write to it.
    pub fn takes_the_screen(&self) -> bool {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        self.watch && self.format == Format::Text && !dumb && io::stdout().is_terminal() && io::stdin().is_terminal()
    }
}

/// The facts that were available, and the problems that hid the others.
#[derive(Clone, Debug, Serialize)]
pub struct StatusReport {
    consumer: String,
    ack_floor: Option<Sequences>,
    delivered: Option<Sequences>,
    num_pending: Option<u64>,
    num_ack_pending: Option<usize>,
    num_redelivered: Option<usize>,
    num_waiting: Option<usize>,
    paused: Option<bool>,
    stream: StreamStatus,
    processed_ids: Option<u64>,
    dead_letters: Option<u64>,
    /// The pause that an operator began; `paused` is the server's pause of the consumer.
    pause: Option<Pause>,
    /// `None` if it does not run.
    daemon: Option<status::Status>,
    /// Dangers that do not stop the work.
    warnings: Vec<String>,
    problems: Vec<String>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Sequences {
    stream_seq: u64,
    consumer_seq: u64,
}

#[derive(Clone, Debug, Serialize)]
struct StreamStatus {
    name: String,
    first_seq: Option<u64>,
    last_seq: Option<u64>,
    messages: Option<u64>,
    bytes: Option<u64>,
}

/// Prints the status once or repeatedly. `false` if there is a problem: a source did not answer, or `run` would refuse the
/// consumer.
pub async fn run(config: &Config, args: StatusArgs, out: &mut impl Write) -> io::Result<bool> {
    let interval = args.interval.max(INTERVAL_MIN);
    let mut observer = Observer { config, visit: None };
    if args.takes_the_screen() {
        return screen::run(observer, interval).await.map(|()| true);
    }
    loop {
        let status = observer.learn().await;
        match (args.format, args.watch) {
            (Format::Json, _) => writeln!(out, "{}", json(&status)?)?,
            (Format::Text, true) => writeln!(out, "{}", status.line())?,
            (Format::Text, false) => status.write(out)?,
        }
        if !args.watch {
            return Ok(status.problems.is_empty());
        }
        tokio::time::sleep(interval).await;
    }
}

/// Asks the server, the database, and the daemon if it runs.
pub struct Observer<'a> {
    config: &'a Config,
    /// Kept from one look to the next. It reconnects by itself.
    visit: Option<CommandClient>,
}

impl Observer<'_> {
    pub async fn learn(&mut self) -> StatusReport {
        let config = self.config;
        let (found, counts, daemon) = tokio::join!(self.server(), counts(&config.database), daemon(config.http.listen));
        let mut problems = Vec::new();
        let found = found.map_err(|problem| problems.push(problem)).ok();
        if let Some(found) = &found {
            let bind = Bind::of(&config.consumer, &found.view());
            // Why the database cannot be read is a problem that `counts` has found.
            if let Ok(Err(refusal)) = judge(&config.database, &bind).await {
                problems.push(refusal.to_string());
            }
            let findings = gate::examine(&found.stream, &found.consumer, Expectations::of(config));
            let refused = findings.into_iter().filter(|finding| finding.severity == Severity::Refused);
            problems.extend(refused.map(|finding| finding.text));
        }
        let counts = match counts {
            Ok(counts) => Some(counts),
            Err(error) => {
                problems.push(chain(&error));
                None
            }
        };
        let daemon = daemon.unwrap_or_else(|problem| {
            problems.push(problem);
            None
        });
        let pause = store::paused(&config.database).unwrap_or_else(|error| {
            let problem = chain(&error);
            // The folder that keeps us from the database keeps us from the marker, too.
            if !problems.contains(&problem) {
                problems.push(problem);
            }
            None
        });
        let num_waiting = found.as_ref().map_or(0, |found| found.consumer.num_waiting as u64);
        let counted = daemon.as_ref().map(|daemon| daemon.other_pulls);
        let mut warnings: Vec<String> =
            other_pulls::warning_of_a_command(&config.consumer.name, num_waiting, counted).into_iter().collect();
        warnings.extend(found.as_ref().and_then(|found| gate::lost_origins(&found.stream)));
        StatusReport { pause, daemon, warnings, ..StatusReport::new(config, found, counts, problems) }
    }

    async fn server(&mut self) -> Result<Snapshot, String> {
        let config = self.config;
        let visit = match &self.visit {
            Some(visit) => visit,
            None => {
                let visit = connection::connect_command(&config.nats).await.map_err(|error| chain(&error))?;
                self.visit.insert(visit)
            }
        };
        if !is_connected(&visit.client) {
            return Err(format!("the server at {} does not answer", config.nats.redacted_url()));
        }
        look_for_command(visit, &config.consumer).await.map_err(|error| chain(&error))
    }
}

/// The daemon's own status; `None` if it does not run.
pub(super) async fn daemon(listen: SocketAddr) -> Result<Option<status::Status>, String> {
    // Port 0 lets the system choose, and only the daemon's log knows which one.
    if listen.port() == 0 {
        return Ok(None);
    }
    match healthcheck::status(listen).await {
        Ok(body) => match serde_json::from_str(&body) {
            Ok(daemon) => Ok(Some(daemon)),
            Err(error) => Err(format!("the program that listens on {listen} is not an order-processor: {error}")),
        },
        Err(HealthcheckError::Connect { .. }) => Ok(None),
        Err(error) => Err(chain(&error)),
    }
}

/// Whether the database belongs to the consumer.
async fn judge(database: &Database, bind: &Bind) -> Result<Result<(), Unbound>, OpenError> {
    let judged = Reader::open(database).await?.judge(bind).await;
    judged.map_err(|source| OpenError::database(database, source))
}

async fn counts(database: &Database) -> Result<Counts, OpenError> {
    let counts = Reader::open(database).await?.counts().await;
    counts.map_err(|source| OpenError::database(database, source))
}

impl StatusReport {
    fn new(config: &Config, found: Option<Snapshot>, counts: Option<Counts>, problems: Vec<String>) -> Self {
        let consumer = found.as_ref().map(|found| &found.consumer);
        let stream = found.as_ref().map(|found| &found.stream.state);
        let sequences = |stream_seq, consumer_seq| Sequences { stream_seq, consumer_seq };
        Self {
            consumer: config.consumer.name.clone(),
            ack_floor: consumer.map(|info| sequences(info.ack_floor.stream_sequence, info.ack_floor.consumer_sequence)),
            delivered: consumer.map(|info| sequences(info.delivered.stream_sequence, info.delivered.consumer_sequence)),
            num_pending: consumer.map(|info| info.num_pending),
            num_ack_pending: consumer.map(|info| info.num_ack_pending),
            num_redelivered: consumer.map(|info| info.num_redelivered),
            num_waiting: consumer.map(|info| info.num_waiting),
            paused: consumer.map(|info| info.paused),
            stream: StreamStatus {
                name: config.consumer.stream.clone(),
                first_seq: stream.map(|state| state.first_sequence),
                last_seq: stream.map(|state| state.last_sequence),
                messages: stream.map(|state| state.messages),
                bytes: stream.map(|state| state.bytes),
            },
            processed_ids: counts.map(|counts| counts.processed_ids),
            dead_letters: counts.map(|counts| counts.dead_letters),
            pause: None,
            daemon: None,
            warnings: Vec::new(),
            problems,
        }
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let stream = &self.stream;
        let mut row = |name: &str, value: String| writeln!(out, "{name:<13} {}", printable(&value));
        row(
            "stream",
            format!("{}, {} messages, last sequence {}", stream.name, show(stream.messages), show(stream.last_seq)),
        )?;
        row("consumer", self.consumer.clone())?;
        row("ack floor", format!("{} of {}", show(self.floor()), show(stream.last_seq)))?;
        row(
            "pending",
            format!(
                "{} to deliver, {} delivered and not acknowledged",
                show(self.num_pending),
                show(self.num_ack_pending)
            ),
        )?;
        row("redelivered", format!("{} not acknowledged yet", show(self.num_redelivered)))?;
        if self.paused == Some(true) {
            row("paused", "the server delivers nothing until the pause ends".to_owned())?;
        }
        if let Some(pause) = &self.pause {
            row("paused", format!("{pause}; `order-processor resume` ends it"))?;
        }
        match &self.daemon {
            None => row("daemon", "not running".to_owned())?,
            Some(daemon) => {
                let up = humantime::format_duration(Duration::from_secs(daemon.uptime_seconds));
                row("daemon", format!("{}; version {}, up {up}", daemon.health(), daemon.version))?;
                if let Some(at) = daemon.last_commit_at {
                    let (at, messages) = (seconds_text(unix_ns(at)), daemon.last_batch_messages);
                    let took_ms = daemon.last_batch_seconds.as_secs_f64() * 1e3;
                    row("last commit", format!("{at}, {messages} messages in {took_ms:.1} ms"))?;
                }
            }
        }
        row("processed", format!("{} ids", show(self.processed_ids)))?;
        row("dead letters", show(self.dead_letters))?;
        for warning in &self.warnings {
            row("warning", warning.clone())?;
        }
        for problem in &self.problems {
            row("problem", problem.clone())?;
        }
        Ok(())
    }

    fn line(&self) -> String {
        let mut line = format!(
            "ack floor {} of {}, pending {}, ack pending {}, redelivered {}, processed {}, dead letters {}",
            show(self.floor()),
            show(self.stream.last_seq),
            show(self.num_pending),
            show(self.num_ack_pending),
            show(self.num_redelivered),
            show(self.processed_ids),
            show(self.dead_letters),
        );
        line.push_str("; daemon ");
        line.push_str(&self.daemon.as_ref().map_or_else(|| "not running".to_owned(), status::Status::health));
        if let Some(pause) = &self.pause {
            line.push_str(&format!("; paused {pause}"));
        }
        for problem in self.warnings.iter().chain(&self.problems) {
            line.push_str("; ");
            line.push_str(problem);
        }
        printable(&line).into_owned()
    }

    fn floor(&self) -> Option<u64> {
        self.ack_floor.map(|floor| floor.stream_seq)
    }
}

fn show(value: Option<impl std::fmt::Display>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}
