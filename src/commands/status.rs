//! `status`: where the work stands, asked from the server and the database themselves. The daemon need not run.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::config::Config;
use crate::consumer::{self, Found, connection};
use crate::errors::chain;
use crate::pause::{self, Pause};
use crate::store::sqlite;

const WATCH_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print a line every second until Ctrl-C
    #[arg(long)]
    watch: bool,
}

/// Everything that could be learnt, and what could not.
#[derive(Debug, Serialize)]
pub struct Status {
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
    /// The pause that an operator began; `paused` is what the server says of the consumer.
    pause: Option<Pause>,
    problems: Vec<String>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Sequences {
    stream_seq: u64,
    consumer_seq: u64,
}

#[derive(Debug, Serialize)]
struct StreamStatus {
    name: String,
    first_seq: Option<u64>,
    last_seq: Option<u64>,
    messages: Option<u64>,
    bytes: Option<u64>,
}

/// Prints the status once or again and again. `false` if something could not be learnt.
pub async fn run(config: &Config, args: StatusArgs, out: &mut impl Write) -> io::Result<bool> {
    loop {
        let status = learn(config).await;
        match (args.json, args.watch) {
            (true, _) => writeln!(out, "{}", serde_json::to_string(&status)?)?,
            (false, true) => writeln!(out, "{}", status.line())?,
            (false, false) => status.write(out)?,
        }
        if !args.watch {
            return Ok(status.problems.is_empty());
        }
        tokio::time::sleep(WATCH_EVERY).await;
    }
}

async fn learn(config: &Config) -> Status {
    let mut problems = Vec::new();
    let found = match connection::connect(&config.nats, None).await {
        Ok(client) => consumer::look(&client, &config.consumer.stream, &config.consumer.name)
            .await
            .map_err(|error| problems.push(chain(&error)))
            .ok(),
        Err(error) => {
            problems.push(chain(&error));
            None
        }
    };
    let counts = match sqlite::counts_of(&config.database.path).await {
        Ok(counts) => Some(counts),
        Err(_) if !config.database.path.exists() => {
            problems.push(format!("no database at {} yet", config.database.path.display()));
            None
        }
        Err(error) => {
            problems.push(chain(&error));
            None
        }
    };
    let pause = pause::look(&config.database.path).unwrap_or_else(|error| {
        problems.push(format!("cannot look for a pause: {error}"));
        None
    });
    Status { pause, ..Status::new(config, found, counts, problems) }
}

impl Status {
    fn new(config: &Config, found: Option<Found>, counts: Option<crate::store::Counts>, problems: Vec<String>) -> Self {
        let consumer = found.as_ref().map(|found| &found.consumer);
        let stream = found.as_ref().map(|found| &found.stream.state);
        let sequences = |info: &async_nats::jetstream::consumer::SequenceInfo| Sequences {
            stream_seq: info.stream_sequence,
            consumer_seq: info.consumer_sequence,
        };
        Self {
            consumer: config.consumer.name.clone(),
            ack_floor: consumer.map(|info| sequences(&info.ack_floor)),
            delivered: consumer.map(|info| sequences(&info.delivered)),
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
            problems,
        }
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let stream = &self.stream;
        let mut row = |name: &str, value: String| writeln!(out, "{name:<13} {value}");
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
        row("processed", format!("{} ids", show(self.processed_ids)))?;
        row("dead letters", show(self.dead_letters))?;
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
        if let Some(pause) = &self.pause {
            line.push_str(&format!("; paused {pause}"));
        }
        for problem in &self.problems {
            line.push_str("; ");
            line.push_str(problem);
        }
        line
    }

    fn floor(&self) -> Option<u64> {
        self.ack_floor.map(|floor| floor.stream_seq)
    }
}

fn show(value: Option<impl std::fmt::Display>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| value.to_string())
}
