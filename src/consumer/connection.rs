//! One connection to the server: options, credentials, and what its events mean for health and metrics.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, ServerError};
use percent_encoding::percent_decode_str;

use super::given_up::ADVISORY_PREFIX;
use crate::config::{Auth, Nats};
use crate::metrics::NatsErrorKind;
use crate::telemetry::Telemetry;

/// Replies to us, and deliveries, come to subjects below this one; the least permission set names it.
pub const INBOX_PREFIX: &str = "_INBOX.order-processor";
/// A half-open connection is noticed after three of these (the client gives up at the third ping without an answer).
const PING_INTERVAL: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(2);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot read {}, the value of {setting}", path.display())]
    File {
        setting: &'static str,
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("credentials in {} are not valid", path.display())]
    Credentials {
        path: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The client's own text carries its source.
    #[error("cannot connect to {servers}: {error}")]
    Server { servers: String, error: async_nats::ConnectError },
}

impl ConnectError {
    /// Whether a file that the settings name is missing or unusable: nothing that waiting would mend.
    pub fn is_about_settings(&self) -> bool {
        match self {
            Self::File { .. } | Self::Credentials { .. } => true,
            Self::Server { .. } => false,
        }
    }
}

/// Connects once. Afterwards the client reconnects by itself, for ever.
///
/// `telemetry` hears of every connect and disconnect; commands that only ask a question pass `None`.
pub async fn connect(nats: &Nats, telemetry: Option<Arc<Telemetry>>) -> Result<Client, ConnectError> {
    // The client reads the TLS files itself, but does not say which one it could not read.
    require_files(nats).await?;
    let mut options = authenticate(ConnectOptions::new(), nats)
        .await?
        .name("order-processor")
        .custom_inbox_prefix(INBOX_PREFIX)
        .connection_timeout(CONNECT_TIMEOUT)
        .request_timeout(Some(REQUEST_TIMEOUT))
        .ping_interval(PING_INTERVAL)
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_delay)
        // The daemon's subjects are the server's own reply subjects and names that the settings have checked.
        .skip_subject_validation(telemetry.is_some())
        .event_callback(move |event| {
            if let Some(telemetry) = &telemetry {
                note(telemetry, &event);
            }
            std::future::ready(())
        });
    if let Some(ca) = &nats.tls.ca_file {
        options = options.add_root_certificates(ca.clone());
    }
    if let (Some(cert), Some(key)) = (&nats.tls.cert_file, &nats.tls.key_file) {
        options = options.add_client_certificate(cert.clone(), key.clone());
    }
    let servers: Vec<&str> = nats.url.split(',').map(str::trim).collect();
    options.connect(servers).await.map_err(|error| ConnectError::Server { servers: nats.redacted_url(), error })
}

/// Whether every file that the settings name can be read.
///
/// # Errors
/// [`ConnectError::File`] for the first that cannot.
pub async fn require_files(nats: &Nats) -> Result<(), ConnectError> {
    for (setting, path) in files(nats) {
        let opened = tokio::fs::File::open(path).await;
        opened.map_err(|source| ConnectError::File { setting, path: path.to_owned(), source })?;
    }
    Ok(())
}

fn files(nats: &Nats) -> Vec<(&'static str, &Path)> {
    let mut files: Vec<(&str, &Path)> = match &nats.auth {
        Auth::None => Vec::new(),
        Auth::UserPassword { password_file, .. } => vec![("nats.password_file", password_file)],
        Auth::Token { token_file } => vec![("nats.token_file", token_file)],
        Auth::Nkey { nkey_file } => vec![("nats.nkey_file", nkey_file)],
        Auth::Credentials { credentials_file } => vec![("nats.credentials_file", credentials_file)],
    };
    let tls = [
        ("nats.tls.ca_file", &nats.tls.ca_file),
        ("nats.tls.cert_file", &nats.tls.cert_file),
        ("nats.tls.key_file", &nats.tls.key_file),
    ];
    files.extend(tls.into_iter().filter_map(|(setting, path)| Some((setting, path.as_deref()?))));
    files
}

async fn authenticate(options: ConnectOptions, nats: &Nats) -> Result<ConnectOptions, ConnectError> {
    Ok(match &nats.auth {
        // The client parses a user in the URL and then logs in without it (async-nats 0.51).
        Auth::None => match user_in_url(&nats.url) {
            Some((user, Some(password))) => options.user_and_password(user, password),
            Some((token, None)) => options.token(token),
            None => options,
        },
        Auth::UserPassword { user, password_file } => {
            options.user_and_password(user.clone(), secret("nats.password_file", password_file).await?)
        }
        Auth::Token { token_file } => options.token(secret("nats.token_file", token_file).await?),
        Auth::Nkey { nkey_file } => {
            let seed = secret("nats.nkey_file", nkey_file).await?;
            // The client looks at it only while it connects, and takes what it finds for a server that may let us in later.
            nkeys::KeyPair::from_seed(&seed).map_err(|error| ConnectError::Credentials {
                path: nkey_file.clone(),
                source: std::io::Error::new(std::io::ErrorKind::InvalidData, error),
            })?;
            options.nkey(seed)
        }
        Auth::Credentials { credentials_file } => {
            let text = secret("nats.credentials_file", credentials_file).await?;
            options
                .credentials(&text)
                .map_err(|source| ConnectError::Credentials { path: credentials_file.clone(), source })?
        }
    })
}

/// The first user and password in the list of servers; a name alone is a token, as everywhere with NATS.
fn user_in_url(servers: &str) -> Option<(String, Option<String>)> {
    servers.split(',').filter_map(|server| server.trim().parse::<async_nats::ServerAddr>().ok()).find_map(|server| {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        Some((decoded(server.username()?), server.password().map(decoded)))
    })
}

/// The content of a secret file without the line end that editors leave behind.
async fn secret(setting: &'static str, path: &Path) -> Result<String, ConnectError> {
    let text = tokio::fs::read_to_string(path).await.map_err(|source| ConnectError::File {
        setting,
        path: path.to_owned(),
        source,
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// 100 ms and up to twice as much each time, so that many workers do not come back in step.
fn reconnect_delay(attempts: usize) -> Duration {
    if attempts <= 1 {
        return Duration::ZERO;
    }
    let doubled = Duration::from_millis(100) * (1 << (attempts - 2).min(5));
    doubled.min(RECONNECT_DELAY_MAX).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Events are best effort, the client drops them when many come at once: they inform, nothing depends on one.
fn note(telemetry: &Telemetry, event: &Event) {
    match event {
        Event::Connected => {
            tracing::info!("connected to the server");
            telemetry.established();
        }
        Event::Disconnected => {
            tracing::warn!("disconnected from the server, reconnecting");
            telemetry.connected(Err("disconnected from the server".to_owned()));
        }
        Event::LameDuckMode => tracing::warn!("the server is about to shut down (lame duck mode)"),
        Event::Draining | Event::Closed => {}
        Event::SlowConsumer(_) => {
            // Cannot happen while the prefetch is bounded; if it does, the server delivers again after ack_wait.
            tracing::error!("the client dropped deliveries because nobody took them");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::SlowConsumer, 1);
        }
        Event::ServerError(ServerError::Other(text)) if is_permission_violation(text) && is_about_advisories(text) => {
            if telemetry.is_news(text) {
                tracing::info!(
                    "the server does not let us hear of messages that it gives up (an optional permission); they are looked \
                     for now and then instead"
                );
            }
        }
        Event::ServerError(ServerError::Other(text)) if is_permission_violation(text) => {
            let subject = text.to_ascii_uppercase();
            let is_ack = subject.contains("$JS.ACK");
            // The subject of an acknowledgement is another one for each delivery.
            let kind = if is_ack { "$JS.ACK" } else { text };
            if telemetry.is_news(kind) {
                tracing::error!(error = %text, "the server denies us a subject");
            }
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Permission, 1);
            // Of the others we can do without some; those that we cannot do without show by themselves.
            if is_ack {
                telemetry.health.set_acks(Err(format!("the server denies us a subject: {text}")));
            } else if subject.contains("$JS.API.CONSUMER.MSG.NEXT") {
                telemetry.pulls_denied(format!("the server denies us a subject: {text}"));
            }
        }
        Event::ServerError(error) => {
            tracing::warn!(%error, "the server reports an error");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Server, 1);
        }
        Event::ClientError(error) => {
            if telemetry.is_news(&error.to_string()) {
                tracing::warn!(%error, "the client reports an error");
            }
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Client, 1);
        }
    }
}

fn is_permission_violation(text: &str) -> bool {
    text.to_ascii_lowercase().contains("permissions violation")
}

fn is_about_advisories(text: &str) -> bool {
    text.to_ascii_uppercase().contains(ADVISORY_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_in_the_url_is_found_and_decoded() {
        let found = |servers: &str| user_in_url(servers);
        let pair = |user: &str, password: &str| Some((user.to_owned(), Some(password.to_owned())));
        assert_eq!(found("nats://a:4222"), None);
        assert_eq!(found("nats://worker:p%40ss%2c%zz@a:4222"), pair("worker", "p@ss,%zz"));
        assert_eq!(found("nats://a:4222,tls://worker:secret@b"), pair("worker", "secret"));
        assert_eq!(found("nats://token@a"), Some(("token".to_owned(), None)));
    }
}
