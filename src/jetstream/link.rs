//! One connection with the inboxes of its pulls and of the server's advisories.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::connection::State as ConnectionState;
use async_nats::{Client, Subscriber};
use futures_util::{FutureExt, StreamExt};

use super::consumer::{Arrival, BindError, arrival};
use super::given_up;
use crate::config::Config;

/// The client tells of a lost connection by its state alone.
const LOST_CHECK_EVERY: Duration = Duration::from_millis(50);

pub(super) struct Link {
    pub(super) client: Client,
    pub(super) inbox: Subscriber,
    pub(super) subject: String,
    /// What the server says of messages that it gives up. Without the permission for it nothing comes.
    pub(super) advisories: Subscriber,
}

impl Link {
    pub(super) async fn new(config: &Config, client: Client) -> Result<Self, BindError> {
        let subject = client.new_inbox();
        // Statuses come to the subject of their pull, deliveries under their own; both reach this subscription.
        let inbox = client.subscribe(format!("{subject}.*")).await.map_err(|_| BindError::ClientDead)?;
        let advised = given_up::advisory_subject(&config.consumer.stream, &config.consumer.name);
        let advisories = client.subscribe(advised).await.map_err(|_| BindError::ClientDead)?;
        Ok(Self { client, inbox, subject, advisories })
    }

    pub(super) fn is_connected(&self) -> bool {
        is_connected(&self.client)
    }

    /// Takes every delivery that is here, without waiting for more.
    pub(super) fn take_ready(&mut self, arrivals: &mut Vec<Arrival>) {
        while let Some(Some(message)) = self.inbox.next().now_or_never() {
            arrivals.extend(arrival(message));
        }
    }

    /// Waits until the connection that was the `connects`th is there no more.
    pub(super) async fn lost(&self, connects: u64) {
        while self.is_connected() && self.connects() == connects {
            tokio::time::sleep(LOST_CHECK_EVERY).await;
        }
    }

    pub(super) fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }
}

pub(super) fn is_connected(client: &Client) -> bool {
    client.connection_state() == ConnectionState::Connected
}
