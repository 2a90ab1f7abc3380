//! One connection to the server: options, credentials, and what its events mean for health and metrics.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{AuthError, Client, ConnectErrorKind, ConnectOptions, Event, Server, ServerError, rustls};
use percent_encoding::percent_decode_str;
use tokio::sync::watch;

use super::given_up::ADVISORY_PREFIX;
use super::secrets::{self, FileError};
use crate::config::{Auth, Nats};
use crate::telemetry::Telemetry;
use crate::telemetry::metrics::NatsErrorKind;
use crate::telemetry::status::Component;

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
    #[error(transparent)]
    File(#[from] FileError),
    /// Somebody said no: the server to our login or certificate, or we to the server's certificate.
    #[error("cannot connect to {servers}: {cause}")]
    Refused { servers: String, cause: String },
    #[error("cannot connect to {servers}: {cause}")]
    Server { servers: String, cause: String },
}

impl ConnectError {
    /// Whether the settings, or the files that they name, do not open the door. Waiting does not mend that; a rotation may.
    pub fn is_about_settings(&self) -> bool {
        match self {
            Self::File(_) | Self::Refused { .. } => true,
            Self::Server { .. } => false,
        }
    }
}

/// The connection of a command that asks questions.
#[derive(Clone)]
pub struct Visit {
    pub client: Client,
    pub denials: Denials,
}

/// What the server denies us, as far as it was heard: a question that is not permitted gets no answer.
#[derive(Clone, Default)]
pub struct Denials(Arc<watch::Sender<Option<Denied>>>);

#[derive(Clone, Debug, thiserror::Error)]
#[error("the server denies us a subject: {0}")]
pub struct Denied(String);

impl Denials {
    /// Waits for the answer to a question that is asked from now on, or for the word that it is not permitted.
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
    // Nobody is there who could hear one.
    std::future::pending().await
}

/// Connects for a command.
pub async fn visit(nats: &Nats) -> Result<Visit, ConnectError> {
    let denials = Denials::default();
    let client = open(nats, Hearing::Command(denials.clone())).await?;
    Ok(Visit { client, denials })
}

/// Connects once. Afterwards the client reconnects by itself, for ever, with what the files say by then.
///
/// `telemetry` hears of every connect and disconnect.
pub async fn connect(nats: &Nats, telemetry: Arc<Telemetry>) -> Result<Client, ConnectError> {
    open(nats, Hearing::Daemon(telemetry)).await
}

/// Who is told what the client tells us.
#[derive(Clone)]
enum Hearing {
    Daemon(Arc<Telemetry>),
    Command(Denials),
}

async fn open(nats: &Nats, hearing: Hearing) -> Result<Client, ConnectError> {
    secrets::check(nats).await?;
    let settings = nats.auth.clone();
    let attempts = match &hearing {
        Hearing::Daemon(telemetry) => Some((telemetry.clone(), Arc::new(nats.clone()))),
        Hearing::Command(_) => None,
    };
    let quiet = attempts.is_none();
    let mut options = match (&nats.auth, user_in_url(&nats.url)) {
        (Auth::None, Some((user, Some(password)))) => ConnectOptions::with_user_and_password(user, password),
        (Auth::None, Some((token, None))) => ConnectOptions::with_token(token),
        // Called at each connect.
        _ => ConnectOptions::with_auth_callback(move |nonce| {
            let settings = settings.clone();
            async move { secrets::log_in(&settings, &nonce).await.map_err(AuthError::new) }
        }),
    };
    options = options
        .name("order-processor")
        .custom_inbox_prefix(INBOX_PREFIX)
        .connection_timeout(CONNECT_TIMEOUT)
        .request_timeout(Some(REQUEST_TIMEOUT))
        .ping_interval(PING_INTERVAL)
        .max_reconnects(None)
        .reconnect_delay_callback(reconnect_delay)
        // The daemon's subjects are the server's own reply subjects and names that the settings have checked.
        .skip_subject_validation(!quiet)
        .require_tls(nats.tls.is_wanted())
        .event_callback(move |event| {
            match &hearing {
                Hearing::Daemon(telemetry) => note(telemetry, &event),
                Hearing::Command(denials) => note_denial(denials, &event),
            }
            std::future::ready(())
        })
        .reconnect_to_server_callback(move |servers, _| {
            let attempts = attempts.clone();
            async move {
                if let Some((telemetry, nats)) = attempts {
                    note_attempts(&telemetry, &nats, &servers).await;
                }
                None
            }
        });
    if nats.tls.handshake_first {
        options = options.tls_first();
    }
    // The client reads these anew at each connect.
    if let Some(ca) = &nats.tls.ca_file {
        options = options.add_root_certificates(ca.clone());
    }
    if let (Some(cert), Some(key)) = (&nats.tls.cert_file, &nats.tls.key_file) {
        options = options.add_client_certificate(cert.clone(), key.clone());
    }
    match options.connect(servers(&nats.url)).await {
        Ok(client) => Ok(client),
        Err(error) => {
            let (servers, cause) = (nats.redacted_url(), why(nats, &error.to_string()).await);
            Err(if is_refusal(&error) {
                ConnectError::Refused { servers, cause }
            } else {
                ConnectError::Server { servers, cause }
            })
        }
    }
}

/// The addresses alone: the client writes them whole into its debug log.
fn servers(url: &str) -> Vec<String> {
    let without_user = |server: &str| match (server.split_once("://"), server.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        _ => server.to_owned(),
    };
    url.split(',').map(str::trim).map(without_user).collect()
}

fn is_refusal(error: &async_nats::ConnectError) -> bool {
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation | ConnectErrorKind::Authentication | ConnectErrorKind::Tls => true,
        ConnectErrorKind::Io => {
            let io = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
            io.and_then(std::io::Error::get_ref).is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>)
        }
        ConnectErrorKind::ServerParse
        | ConnectErrorKind::Dns
        | ConnectErrorKind::TimedOut
        | ConnectErrorKind::MaxReconnects => false,
    }
}

/// What the client says of a failed connect, in terms of the settings.
async fn why(nats: &Nats, said: &str) -> String {
    // What it says of files does not name them.
    if let Err(error) = secrets::check(nats).await {
        return error.to_string();
    }
    if said.contains("authorization violation") {
        let expired = match secrets::expired_at(&nats.auth).await {
            Some(at) => format!("; its JWT expired at {}", humantime::format_rfc3339_seconds(at)),
            None => String::new(),
        };
        return format!("the server refuses {} (authorization violation){expired}", way_in(nats));
    }
    if let Some((_, alert)) = said.split_once("received fatal alert: ") {
        return match &nats.tls.cert_file {
            Some(cert) => format!("the server refuses the certificate in {} ({alert})", cert.display()),
            None => format!("the server refuses us without a client certificate ({alert}); set nats.tls.cert_file"),
        };
    }
    if let Some((_, wrong)) = said.split_once("invalid peer certificate: ") {
        let trusted = match &nats.tls.ca_file {
            Some(ca) => format!("the authorities in {}", ca.display()),
            None => "the authorities of this system, since nats.tls.ca_file is not set".to_owned(),
        };
        return format!("the server's certificate is not valid ({wrong}) to {trusted}");
    }
    let hint = if said.contains("InvalidContentType") {
        "; the server does not speak TLS here"
    } else if !nats.tls.handshake_first && (said.contains("timed out") || said.contains("expected INFO")) {
        "; a server that waits for the TLS handshake needs nats.tls.handshake_first"
    } else {
        ""
    };
    format!("{said}{hint}")
}

fn way_in(nats: &Nats) -> String {
    let login = match &nats.auth {
        Auth::None if nats.url.contains('@') => "the user in nats.url".to_owned(),
        Auth::None => "us without a login".to_owned(),
        Auth::UserPassword { user, password_file } => {
            format!("user {user} with the password in {}", password_file.display())
        }
        Auth::Token { token_file } => format!("the token in {}", token_file.display()),
        Auth::Nkey { nkey_file } => format!("the NKey in {}", nkey_file.display()),
        Auth::Credentials { credentials_file } => format!("the credentials in {}", credentials_file.display()),
    };
    match &nats.tls.cert_file {
        Some(cert) => format!("{login} and the certificate in {}", cert.display()),
        None => login,
    }
}

/// The first user and password in the list of servers; a name alone is a token, as everywhere with NATS.
fn user_in_url(servers: &str) -> Option<(String, Option<String>)> {
    servers.split(',').filter_map(|server| server.trim().parse::<async_nats::ServerAddr>().ok()).find_map(|server| {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        Some((decoded(server.username()?), server.password().map(decoded)))
    })
}

/// 100 ms and up to twice as much each time, so that many workers do not come back in step.
fn reconnect_delay(attempts: usize) -> Duration {
    if attempts <= 1 {
        return Duration::ZERO;
    }
    let doubled = Duration::from_millis(100) * (1 << (attempts - 2).min(5));
    doubled.min(RECONNECT_DELAY_MAX).mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// Called before each attempt to connect. The events tell that one failed, and not why; the list of servers does.
async fn note_attempts(telemetry: &Telemetry, nats: &Nats, servers: &[Server]) {
    let mut errors: Vec<&str> = servers.iter().filter_map(|server| server.last_error.as_deref()).collect();
    if errors.len() < servers.len() {
        // The one that we were connected to has not been tried yet.
        return;
    }
    errors.sort_unstable();
    errors.dedup();
    let cause = format!("cannot connect to {}: {}", nats.redacted_url(), why(nats, &errors.join("; ")).await);
    if telemetry.is_news(&cause) {
        tracing::warn!(%cause, "not connected, trying again");
    }
    telemetry.health.report(Component::Nats, Err(cause));
}

/// All that a command wants to know: it can do without the advisories.
fn note_denial(denials: &Denials, event: &Event) {
    if let Event::ServerError(ServerError::Other(text)) = event
        && is_permission_violation(text)
        && !is_about_advisories(text)
    {
        denials.0.send_replace(Some(Denied(text.clone())));
    }
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
            telemetry.health.report(Component::Nats, Err("disconnected from the server".to_owned()));
        }
        Event::LameDuckMode => tracing::warn!("the server is about to shut down (lame duck mode)"),
        Event::Draining | Event::Closed => {}
        Event::SlowConsumer(_) => {
            // Cannot happen while the prefetch is bounded; if it does, the server delivers again after ack_wait.
            tracing::error!("the client dropped deliveries because nobody took them");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::SlowConsumer, 1);
        }
        Event::ServerError(ServerError::Other(text)) if is_permission_violation(text) && is_about_advisories(text) => {
            if telemetry.lacks("advisories") {
                tracing::info!(
                    "the server does not let us hear of messages that it gives up (an optional permission); they are looked \
                     for now and then instead"
                );
            }
        }
        Event::ServerError(ServerError::Other(text)) if is_permission_violation(text) && is_about_reading(text) => {
            if telemetry.lacks("reading") {
                tracing::info!(
                    "the server does not let us read single messages (an optional permission): the age of the oldest order \
                     is not shown, and messages that no client can parse, or that the server has given up, are not fetched"
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
                telemetry.health.report(Component::Acks, Err(format!("the server denies us a subject: {text}")));
            } else if subject.contains("$JS.API.CONSUMER.MSG.NEXT") {
                telemetry.pulls_denied(format!("the server denies us a subject: {text}"));
            } else {
                telemetry.deny(text);
            }
        }
        Event::ServerError(error) => {
            tracing::warn!(%error, "the server reports an error");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Server, 1);
        }
        Event::ClientError(error) => {
            // Of nothing but failed attempts to reconnect; `note_attempts` knows more of them.
            tracing::debug!(%error, "the client reports an error");
            telemetry.metrics.nats_errors.increment(NatsErrorKind::Client, 1);
        }
    }
}

fn is_permission_violation(text: &str) -> bool {
    text.to_ascii_lowercase().contains("permissions violation")
}

fn is_about_reading(text: &str) -> bool {
    text.to_ascii_uppercase().contains("$JS.API.STREAM.MSG.GET.")
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
