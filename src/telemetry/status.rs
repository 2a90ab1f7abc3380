//! What `/readyz` and `/status` show, as data. The `status` command reads `/status` back, from this version or another.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::label::{Label, label};
use crate::model::time;
use crate::model::view::ConsumerView;
use crate::store::Pause;

label! {
    /// A part of the daemon that may keep it from being ready, in the order in which `/readyz` lists them.
    pub enum Component: "component" {
        /// The drain has begun. Decided by [`Health`](super::health::Health).
        Shutdown = "shutdown",
        /// An operator's pause. Decided by [`Health`](super::health::Health).
        Paused = "paused",
        /// The connection to the server.
        Nats = "nats",
        /// The binding to a consumer that passed the start gate.
        Consumer = "consumer",
        /// Whether the server accepts our pull requests.
        Pulls = "pulls",
        /// Whether the server accepts our acknowledgements.
        Acks = "acks",
        /// Whether the database can be written.
        Database = "database",
        /// Whether the handler can work on any message.
        Handler = "handler",
        /// Whether the rows of the outbox can be published.
        Outbox = "outbox",
        /// Work without commits. Decided by [`Health`](super::health::Health), unless something is reported.
        Progress = "progress",
    }
}

/// One thing that keeps the daemon from being ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The name of a [`Component`]. A later version may have more of them.
    pub component: String,
    pub cause: String,
}

impl Problem {
    pub fn new(component: Component, cause: impl Into<String>) -> Self {
        Self { component: component.name().to_owned(), cause: cause.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.component, self.cause)
    }
}

/// The body of `/status`. Values that are not known yet are `null`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    pub version: String,
    pub uptime_seconds: u64,
    pub ready: bool,
    pub live: bool,
    pub draining: bool,
    pub pause: Option<Pause>,
    pub problems: Vec<Problem>,
    pub held: usize,
    pub parked: usize,
    /// Messages at or below the ack floor that are neither processed nor dead letters, by the last audit.
    pub missing_messages: Option<u64>,
    pub audited_through_stream_seq: Option<u64>,
    pub committed_stream_seq: u64,
    pub committed_messages: u64,
    #[serde(with = "time::optional")]
    pub last_commit_at: Option<SystemTime>,
    pub last_batch_messages: u64,
    /// How long the last batch took, from claim to commit.
    #[serde(serialize_with = "serialize_seconds", deserialize_with = "deserialize_seconds")]
    pub last_batch_seconds: Duration,
    pub processed_ids: Option<u64>,
    pub dead_letters: Option<u64>,
    /// The handler file that the daemon read at its start, and the start of its BLAKE3 hash.
    pub handler_file: Option<String>,
    pub handler_digest: Option<String>,
    /// Pulls on the consumer that belong to other clients.
    pub other_pulls: u64,
    /// Not read back: who reads the status asks the server.
    #[serde(skip_deserializing)]
    pub consumer: Option<ConsumerView>,
}

impl Status {
    /// What keeps the daemon from being ready against the will of its operator, who wanted a pause.
    pub fn unwanted_problems(&self) -> impl Iterator<Item = &Problem> {
        self.problems.iter().filter(|problem| problem.component != Component::Paused.name())
    }

    /// The health in one line, with the causes.
    pub fn health(&self) -> String {
        match (self.draining, self.live, self.ready) {
            (true, _, _) => format!("draining, {} deliveries held", self.held),
            (false, false, _) => "not live: its main loop does not run".to_owned(),
            (false, true, true) => "ready".to_owned(),
            (false, true, false) => format!("not ready: {}", listed(&self.problems)),
        }
    }
}

/// Problems on one line.
pub fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}

fn serialize_seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

fn deserialize_seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let seconds = f64::deserialize(deserializer)?;
    Duration::try_from_secs_f64(seconds).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_another_version_is_read_as_far_as_it_goes() {
        let theirs = r#"{"version":"9.0","ready":true,"moons":2,"consumer":{"moons":1},
            "problems":[{"component":"moon","cause":"full"}],"last_batch_seconds":0.5,
            "last_commit_at":"2026-11-29T21:00:00.000Z"}"#;
        let status: Status = serde_json::from_str(theirs).unwrap();
        assert_eq!((status.version.as_str(), status.ready, status.live), ("9.0", true, false));
        assert_eq!(status.problems[0].to_string(), "moon: full");
        assert_eq!(status.last_batch_seconds, Duration::from_millis(500));
        assert_eq!(serde_json::to_value(&status).unwrap()["last_commit_at"], "2026-11-29T21:00:00.000Z");
    }
}
