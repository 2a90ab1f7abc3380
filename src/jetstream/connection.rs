//! One connection to the server: its options, its credentials, and why it cannot be made.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_nats::{AuthError, ConnectErrorKind, ConnectOptions, ReconnectToServer, Server, rustls};
use percent_encoding::percent_decode_str;

use super::client::Client;
use super::events::{self, Listener};
pub use super::events::{Denials, Denied};
use super::secrets::{self, FileError};
use super::tls;
pub use super::tls::announced_by_address;
use crate::config::{Auth, Nats};
use crate::telemetry::Telemetry;

/// The prefix of the subjects for deliveries and replies. The least permission set names it.
pub const INBOX_PREFIX: &str = "_INBOX.order-processor";
/// After three pings without an answer, the client closes a half-open connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(2);
/// A shorter connection does not end the backoff.
const LASTING: Duration = Duration::from_secs(1);

/// Why no connection could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    File(#[from] FileError),
    /// The server refused the login or the certificate, or the certificate of the server is not valid.
    #[error("cannot connect to {servers}: {cause}")]
    Refused { servers: String, cause: String },
    #[error("cannot connect to {servers}: {cause}")]
    Server { servers: String, cause: String },
}

impl ConnectError {
    /// Whether the settings, or the files that they name, are the cause. Waiting does not end that, but a rotation may.
    pub fn is_about_settings(&self) -> bool {
        match self {
            Self::File(_) | Self::Refused { .. } => true,
            Self::Server { .. } => false,
        }
    }
}

/// The connection of a command.
#[derive(Clone)]
pub struct CommandClient {
    pub client: Client,
    pub denials: Denials,
}

/// Connects for a command.
pub async fn connect_command(nats: &Nats) -> Result<CommandClient, ConnectError> {
    let denials = Denials::default();
    let client = open(nats, Listener::Command(denials.clone())).await?;
    Ok(CommandClient { client, denials })
}

/// Connects the daemon once. Afterwards the client reconnects by itself, for ever, and reads the files again each time.
///
/// `telemetry` gets every connect and disconnect.
pub async fn connect(nats: &Nats, telemetry: Arc<Telemetry>) -> Result<Client, ConnectError> {
    let client = open(nats, Listener::Daemon(telemetry)).await?;
    if let Some(text) = announced_by_address(nats, &client.server_info()) {
        tracing::info!("{text}");
    }
    Ok(client)
}

async fn open(nats: &Nats, listener: Listener) -> Result<Client, ConnectError> {
    secrets::check(nats).await?;
    let settings = nats.auth.clone();
    let attempts = match &listener {
        Listener::Daemon(telemetry) => Some((telemetry.clone(), Arc::new(nats.clone()))),
        Listener::Command(_) => None,
    };
    let is_daemon = attempts.is_some();
    let (backoff, turns) = (Backoff::default(), AtomicUsize::new(0));
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
        .reconnect_delay_callback(move |attempts| backoff.delay(attempts))
        // The daemon uses only reply subjects of the server, and names that the settings have checked.
        .skip_subject_validation(is_daemon)
        .require_tls(nats.tls.is_wanted())
        .event_callback(move |event| {
            listener.note(&event);
            std::future::ready(())
        })
        .reconnect_to_server_callback(move |servers, info| {
            let (attempts, turn) = (attempts.clone(), turns.fetch_add(1, Ordering::Relaxed));
            async move {
                let (telemetry, nats) = attempts?;
                events::note_attempts(&telemetry, &nats, &servers).await;
                // Without a connection before, the client tries each server of the settings once.
                let is_first = info.server_id.is_empty();
                let addr = if is_first { None } else { next_server(&servers, turn).map(|server| server.addr.clone()) }?;
                Some(ReconnectToServer { addr, delay: None })
            }
        });
    if nats.tls.handshake_first {
        options = options.tls_first();
    }
    match with_tls(options, nats).connect(servers(&nats.url)).await {
        Ok(client) => Ok(Client::new(client, nats)),
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

/// The files are read again at each connect.
fn with_tls(options: ConnectOptions, nats: &Nats) -> ConnectOptions {
    if let Some(config) = tls::client_config(nats) {
        return options.tls_client_config(config);
    }
    let options = match &nats.tls.ca_file {
        Some(ca) => options.add_root_certificates(ca.clone()),
        None => options,
    };
    match (&nats.tls.cert_file, &nats.tls.key_file) {
        (Some(cert), Some(key)) => options.add_client_certificate(cert.clone(), key.clone()),
        _ => options,
    }
}

/// The addresses without user and password: the client writes them into its debug log.
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

/// Why a connect failed, in terms of the settings. `said`: the error of the client.
pub(super) async fn why(nats: &Nats, said: &str) -> String {
    // The error of the client does not name the file.
    if let Err(error) = secrets::check(nats).await {
        return error.to_string();
    }
    if said.contains("authorization violation") {
        let expired = match secrets::expired_at(&nats.auth).await {
            Some(at) => format!("; its JWT expired at {}", humantime::format_rfc3339_seconds(at)),
            None => String::new(),
        };
        return format!("the server rejects {} (authorization violation){expired}", credentials(nats));
    }
    if let Some((_, alert)) = said.split_once("received fatal alert: ") {
        return match &nats.tls.cert_file {
            Some(cert) => format!("the server rejects the certificate in {} ({alert})", cert.display()),
            None => format!("the server requires a client certificate ({alert}); set nats.tls.cert_file"),
        };
    }
    if let Some((_, wrong)) = said.split_once("invalid peer certificate: ") {
        let trusted = match &nats.tls.ca_file {
            Some(ca) => format!("the authorities in {}", ca.display()),
            None => "the authorities of this system, because nats.tls.ca_file is not set".to_owned(),
        };
        return format!("the certificate of the server is not valid ({wrong}) for {trusted}");
    }
    let hint = if said.contains("InvalidContentType") {
        "; the server does not use TLS on this port"
    } else if !nats.tls.handshake_first && (said.contains("timed out") || said.contains("expected INFO")) {
        "; if the server waits for the TLS handshake, set nats.tls.handshake_first"
    } else {
        ""
    };
    format!("{said}{hint}")
}

fn credentials(nats: &Nats) -> String {
    let login = match &nats.auth {
        Auth::None if nats.url.contains('@') => "the user in nats.url".to_owned(),
        Auth::None => "a client without a login".to_owned(),
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

/// The first user and password in the list of servers. A name without a password is a token, as in all NATS clients.
fn user_in_url(servers: &str) -> Option<(String, Option<String>)> {
    servers.split(',').filter_map(|server| server.trim().parse::<async_nats::ServerAddr>().ok()).find_map(|server| {
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        Some((decoded(server.username()?), server.password().map(decoded)))
    })
}

/// The server to try in this turn. Two turns of three are for the servers of the settings and for those that worked before: an
/// address that the cluster announces may be out of reach, and each attempt there costs [`CONNECT_TIMEOUT`]. In turn, because the
/// client does not count each kind of failure.
fn next_server(servers: &[Server], turn: usize) -> Option<&Server> {
    let (known, others): (Vec<&Server>, Vec<&Server>) =
        servers.iter().partition(|server| !server.is_discovered || server.did_connect);
    fn in_turn<'a>(servers: &[&'a Server], turn: usize) -> Option<&'a Server> {
        servers.get(turn.checked_rem(servers.len())?).copied()
    }
    match turn % 3 {
        2 => in_turn(&others, turn / 3).or_else(|| in_turn(&known, turn)),
        _ => in_turn(&known, turn - turn / 3),
    }
}

/// The delays between attempts to connect. They start again only after a connection that lasted: a server may accept each
/// connection and close it immediately.
#[derive(Default)]
struct Backoff(Mutex<Reconnects>);

#[derive(Default)]
struct Reconnects {
    last_at: Option<Instant>,
    /// Connections in a row that did not last.
    short: usize,
}

impl Backoff {
    /// `attempts`: since the last connection, with this one.
    fn delay(&self, attempts: usize) -> Duration {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if attempts <= 1 {
            let lasted = state.last_at.is_none_or(|at| at.elapsed() >= LASTING);
            state.short = if lasted { 0 } else { state.short.saturating_add(1) };
        }
        let delay = reconnect_delay(attempts.saturating_add(state.short));
        state.last_at = Some(Instant::now() + delay);
        delay
    }
}

/// From 100 ms, doubled each time, with jitter, so that many daemons do not reconnect at the same moment.
fn reconnect_delay(attempts: usize) -> Duration {
    if attempts <= 1 {
        return Duration::ZERO;
    }
    let doubled = Duration::from_millis(100) * (1 << (attempts - 2).min(5));
    doubled.min(RECONNECT_DELAY_MAX).mul_f64(0.5 + fastrand::f64() / 2.0)
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
