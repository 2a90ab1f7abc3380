//! One attempt to bind: connect if needed, look at stream and consumer, examine them.

use std::sync::Arc;
use std::time::Duration;

use super::connection;
use super::error::Error;
use super::gate::{self, Expectations, Severity};
use super::link::Link;
use super::look::{Snapshot, look};
use crate::config::Config;
use crate::model::view::Incarnation;
use crate::telemetry::Telemetry;
use crate::telemetry::status::Component;

pub(super) const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// The result of an attempt to bind. The link comes back in any case, if there is one.
pub(super) type BindResult = Result<(Link, Snapshot), (Option<Link>, Error)>;

/// Connects if needed, looks at stream and consumer, and examines them.
pub(super) async fn bind(config: Arc<Config>, telemetry: Arc<Telemetry>, link: Option<Link>) -> BindResult {
    let link = match link {
        Some(link) => link,
        None => connect(&config, telemetry.clone()).await.map_err(|error| (None, error))?,
    };
    telemetry.health.report(Component::Nats, Ok(()));
    // A server that shuts down closes the connection. Its answer will never come, so the end of the connection ends the wait.
    let snapshot = tokio::select! {
        snapshot = look(&link.client, &config.consumer.stream, &config.consumer.name) => snapshot,
        () = link.lost(link.connects()) => Err(Error::NoAnswer {
            asked: "a request for stream and consumer",
            error: "the connection was lost".to_owned(),
        }),
    };
    let snapshot = snapshot.and_then(|snapshot| {
        let mut findings = gate::examine(&snapshot.stream, &snapshot.consumer, Expectations::of(&config));
        findings.retain(|finding| finding.severity == Severity::Refused);
        if findings.is_empty() { Ok(snapshot) } else { Err(Error::Refused(findings)) }
    });
    match snapshot {
        Ok(snapshot) => Ok((link, snapshot)),
        Err(error) => Err((Some(link), error)),
    }
}

async fn connect(config: &Config, telemetry: Arc<Telemetry>) -> Result<Link, Error> {
    Link::new(config, connection::connect(&config.nats, telemetry).await?).await
}

/// How a binding relates to the one before.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rebind {
    First,
    Same,
    OtherConsumer,
    OtherStream,
}

impl Rebind {
    pub(super) fn between(last: Option<Incarnation>, now: Incarnation) -> Self {
        match last {
            None => Self::First,
            Some(last) if last.stream_ns != now.stream_ns => Self::OtherStream,
            Some(last) if last.consumer_ns != now.consumer_ns => Self::OtherConsumer,
            Some(_) => Self::Same,
        }
    }

    pub(super) fn is_recreated(self) -> bool {
        match self {
            Self::First | Self::Same => false,
            Self::OtherConsumer | Self::OtherStream => true,
        }
    }
}

/// Before the next attempt: doubled for each failure before, with jitter.
pub(super) fn delay(failures: u32) -> Duration {
    (RETRY_DELAY_MIN * (1 << failures.min(6))).min(RETRY_DELAY_MAX).mul_f64(0.75 + fastrand::f64() / 2.0)
}
