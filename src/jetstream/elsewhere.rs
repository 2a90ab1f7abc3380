//! A stream that the daemon was bound to, and that its server does not have: another server of `nats.url` may have it, if the
//! servers are not one cluster.

use std::time::Duration;

use tokio::time::Instant;

use super::client::Client;
use super::error::Error;
use super::link::Link;

/// The time on a server without the stream before the daemon tries another one. Doubled each time.
const STAY_MIN: Duration = Duration::from_secs(1);
const STAY_MAX: Duration = Duration::from_secs(60);

/// When to try another server of `nats.url`.
pub(super) struct Switching {
    stay: Duration,
    due: Option<Instant>,
}

impl Default for Switching {
    fn default() -> Self {
        Self { stay: STAY_MIN, due: None }
    }
}

impl Switching {
    /// After a failed attempt to bind: connects to another server if that is due. `url`: the servers of the settings.
    pub(super) async fn follow(&mut self, error: &Error, url: &str, link: Option<&Link>) {
        let Some(link) = link.filter(|_| self.is_due(error, url)) else { return };
        tracing::info!("the daemon connects again, to another server of nats.url if there is one");
        if link.client.force_reconnect().await.is_err() {
            tracing::debug!("the client has ended; the next attempt to bind makes a new client");
        }
    }

    fn is_due(&mut self, error: &Error, url: &str) -> bool {
        if !matches!(error, Error::NoStream { .. }) || !url.contains(',') {
            return false;
        }
        let now = Instant::now();
        let is_due = self.due.is_some_and(|due| due <= now);
        if is_due {
            self.stay = (self.stay * 2).min(STAY_MAX);
        }
        if is_due || self.due.is_none() {
            self.due = Some(now + self.stay);
        }
        is_due
    }
}

/// For a daemon that was bound to the stream before: `setup` may be the wrong advice.
pub(super) fn cause(stream: &str, client: &Client) -> String {
    let server = client.server_info();
    format!(
        "stream {stream} existed when the daemon was bound, and does not exist{} on server {} (port {}): it was deleted, or it is on \
         another server of nats.url or in another account; correct nats.url or the account of the login; `order-processor setup` \
         would create a second, empty stream",
        client.place(),
        server.server_name,
        server.port
    )
}
