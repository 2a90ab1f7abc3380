//! One connection with two subscriptions: the replies to the pulls, and the advisories of the server.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::Subscriber;
use async_nats::connection::State as ConnectionState;
use futures_util::{FutureExt, StreamExt};

use super::advisory;
use super::client::Client;
use super::error::Error;
use super::pull::arrival;
use crate::config::Config;
use crate::model::delivery::Arrival;

/// The client reports a lost connection only by its state.
const LOST_CHECK_EVERY: Duration = Duration::from_millis(50);

pub(super) struct Link {
    pub(super) client: Client,
    pub(super) replies: Subscriber,
    pub(super) subject: String,
    /// Without the optional permission, nothing arrives here.
    pub(super) advisories: Subscriber,
}

impl Link {
    pub(super) async fn new(config: &Config, client: Client) -> Result<Self, Error> {
        let subject = client.new_inbox();
        // Statuses arrive on the subject of their pull, and deliveries too. One subscription has both.
        let replies = client.subscribe(format!("{subject}.*")).await.map_err(|_| Error::ClientDead)?;
        let advised = advisory::advisory_subject(&config.consumer.stream, &config.consumer.name);
        let advisories = client.subscribe(advised).await.map_err(|_| Error::ClientDead)?;
        Ok(Self { client, replies, subject, advisories })
    }

    pub(super) fn is_connected(&self) -> bool {
        is_connected(&self.client)
    }

    /// Takes every delivery that has arrived, without waiting for more.
    pub(super) fn take_ready(&mut self, arrivals: &mut Vec<Arrival>) {
        while let Some(Some(message)) = self.replies.next().now_or_never() {
            arrivals.extend(arrival(message));
        }
    }

    /// Waits until connection number `connects` is lost.
    pub(super) async fn lost(&self, connects: u64) {
        while self.is_connected() && self.connects() == connects {
            tokio::time::sleep(LOST_CHECK_EVERY).await;
        }
    }

    /// How many connections the client has made.
    pub(super) fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }
}

pub fn is_connected(client: &Client) -> bool {
    client.connection_state() == ConnectionState::Connected
}
