//! What the events of the NATS client mean for health, metrics and log.

use std::sync::Arc;

use async_nats::{Event, Server, ServerError};
use tokio::sync::watch;

use super::advisory::ADVISORY_PREFIX;
use super::connection::why;
use super::tls::accepted_names;
use crate::config::Nats;
use crate::model::text::printable;
use crate::telemetry::Telemetry;
use crate::telemetry::metrics::NatsErrorKind;
use crate::telemetry::status::Component;

/// Who gets the events of a client.
#[derive(Clone)]
pub(super) enum Listener {
    Daemon(Arc<Telemetry>),
    Command(Denials),
}

impl Listener {
    /// Nothing depends on an event: when many come at the same time, the client drops some.
    pub(super) fn note(&self, event: &Event) {
        match (self, event) {
            (Self::Daemon(telemetry), Event::ServerError(ServerError::Other(text)))
                if is_permission_violation(text) =>
            {
                note_violation(telemetry, text);
            }
            (Self::Daemon(telemetry), Event::ServerError(ServerError::Other(text))) if is_subscription_limit(text) => {
                let cause = too_many_subscriptions(text);
                if telemetry.is_news(&cause) {
                    tracing::error!("{cause}");
                }
                telemetry.metrics.nats_errors.increment(NatsErrorKind::Permission, 1);
                telemetry.deny(&cause);
            }
            (Self::Daemon(telemetry), event) => note(telemetry, event),
            // A command does not need the advisories.
            (Self::Command(denials), Event::ServerError(ServerError::Other(text)))
                if is_permission_violation(text) && !is_about_advisories(text) =>
            {
                denials.0.send_replace(Some(Denied(format!("the server denies a subject: {}", printable(text)))));
            }
            (Self::Command(denials), Event::ServerError(ServerError::Other(text))) if is_subscription_limit(text) => {
                denials.0.send_replace(Some(Denied(too_many_subscriptions(text))));
            }
            (Self::Command(_), _) => {}
        }
    }
}

fn note(telemetry: &Telemetry, event: &Event) {
    match event {
        Event::Connected => {
            tracing::info!("connected to the server");
            telemetry.established();
        }
        Event::Disconnected => {
            tracing::warn!("disconnected from the server; the client reconnects");
            telemetry.health.report(Component::Nats, Err("disconnected from the server".to_owned()));
        }
        Event::LameDuckMode => tracing::warn!("the server will shut down soon (lame duck mode)"),
        Event::Draining | Event::Closed => {}
        Event::SlowConsumer(_) => {
            // Cannot happen while the prefetch is bounded. If it does, the server redelivers the messages after ack_wait.
            tracing::error!("the client dropped deliveries because the daemon read them too slowly");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::SlowConsumer, 1);
        }
        Event::ServerError(error) => {
            tracing::warn!(%error, "the server reported an error");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Server, 1);
        }
        Event::ClientError(error) => {
            // Only failed attempts to reconnect; `note_attempts` has their cause.
            tracing::debug!(%error, "the client reported an error");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Client, 1);
        }
    }
}

fn note_violation(telemetry: &Telemetry, text: &str) {
    if is_about_advisories(text) {
        if telemetry.lacks("advisories") {
            tracing::info!(
                "cannot receive max-deliveries advisories: no permission to subscribe (optional); the audit finds the messages \
                 that the server will not deliver again"
            );
        }
        return;
    }
    if is_about_reading(text) {
        if telemetry.lacks("reading") {
            tracing::info!(
                "cannot read stored messages: no permission for STREAM.MSG.GET (optional); the age of the oldest order is not \
                 shown, and messages that the client cannot parse, or that the server will not deliver again, are not fetched"
            );
        }
        return;
    }
    let subject = text.to_ascii_uppercase();
    let is_ack = subject.contains("$JS.ACK");
    // Each acknowledgement has another subject.
    let kind = if is_ack { "$JS.ACK" } else { text };
    if telemetry.is_news(kind) {
        tracing::error!(error = %text, "the server denies a subject");
    }
    telemetry.metrics.nats_errors.increment(NatsErrorKind::Permission, 1);
    // Some other subjects are optional. A required one shows by a request without an answer.
    let cause = format!("the server denies a subject: {}", printable(text));
    if is_ack {
        telemetry.health.report(Component::Acks, Err(cause));
    } else if subject.contains(".CONSUMER.MSG.NEXT.") {
        telemetry.pulls_denied(cause);
    } else {
        telemetry.deny(&cause);
    }
}

/// Called before each attempt to connect. The events do not have the cause of a failed attempt, but the list of servers has it.
pub(super) async fn note_attempts(telemetry: &Telemetry, nats: &Nats, servers: &[Server]) {
    let is_known = |server: &&Server| !server.is_discovered || server.did_connect;
    if servers.iter().filter(is_known).any(|server| server.last_error.is_none()) {
        // The server of the lost connection was not tried again yet.
        return;
    }
    let mut errors: Vec<&str> =
        servers.iter().filter(is_known).filter_map(|server| server.last_error.as_deref()).collect();
    errors.sort_unstable();
    errors.dedup();
    let mut cause = format!("cannot connect to {}: {}", nats.redacted_url(), why(nats, &errors.join("; ")).await);
    if let Some(hint) = wrong_names(nats, servers) {
        cause += &hint;
    }
    if telemetry.is_news(&cause) {
        tracing::warn!(%cause, "the daemon is not connected and tries again");
    }
    telemetry.health.report(Component::Nats, Err(cause));
}

/// Servers that the cluster announces by address, with a certificate for a name that `nats.url` does not have.
fn wrong_names(nats: &Nats, servers: &[Server]) -> Option<String> {
    let is_wrong = |server: &&Server| {
        let error = server.last_error.as_deref().unwrap_or_default();
        server.is_discovered && (error.contains("not valid for name") || error.contains("NotValidForName"))
    };
    let mut addresses: Vec<String> = servers
        .iter()
        .filter(is_wrong)
        .map(|server| format!("{}:{}", server.addr.host(), server.addr.port()))
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    (!addresses.is_empty()).then(|| {
        format!(
            "; the cluster announces {} by address: {}; add the DNS name of each server to nats.url",
            addresses.join(", "),
            accepted_names(nats)
        )
    })
}

/// The permission violations that the server reported: a request without permission gets no answer.
#[derive(Clone, Default)]
pub struct Denials(Arc<watch::Sender<Option<Denied>>>);

#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Denied(String);

impl Denials {
    /// Waits for the answer to a request that is sent from now on, or for the report that it is not permitted.
    pub async fn answer<T>(&self, question: impl Future<Output = T>) -> Result<T, Denied> {
        let mut denials = self.0.subscribe();
        tokio::select! {
            answer = question => Ok(answer),
            denied = next_denial(&mut denials) => Err(denied),
        }
    }

    /// The last one.
    pub fn last(&self) -> Option<Denied> {
        self.0.borrow().clone()
    }
}

async fn next_denial(denials: &mut watch::Receiver<Option<Denied>>) -> Denied {
    while denials.changed().await.is_ok() {
        if let Some(denied) = denials.borrow_and_update().clone() {
            return denied;
        }
    }
    // The client is gone, so no report will come.
    std::future::pending().await
}

fn is_permission_violation(text: &str) -> bool {
    text.to_ascii_lowercase().contains("permissions violation")
}

fn is_subscription_limit(text: &str) -> bool {
    text.to_ascii_lowercase().contains("maximum subscriptions")
}

fn too_many_subscriptions(text: &str) -> String {
    format!(
        "the server refuses a subscription: {}; the daemon needs 3 of them; raise the limit of subscriptions (max_subscriptions) of \
         the server, the account or the user",
        printable(text)
    )
}

fn is_about_reading(text: &str) -> bool {
    text.to_ascii_uppercase().contains(".STREAM.MSG.GET.")
}

fn is_about_advisories(text: &str) -> bool {
    text.to_ascii_uppercase().contains(ADVISORY_PREFIX)
}
