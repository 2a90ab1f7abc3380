//! The consumer that only one walk uses, and the pulls on it.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, timeout_at};

use super::{PULL_MESSAGES, Reading};
use crate::jetstream::client::Client;
use crate::jetstream::error::Trouble;
use crate::jetstream::link::Link;
use crate::jetstream::pull::{HEADER_ALLOWANCE_BYTES, Heartbeat, PullReply, PullRequest, Pulls};
use crate::model::delivery::Raw;

const PULL_BYTES: usize = 8 * 1024 * 1024;
const PULL_EXPIRES: Duration = Duration::from_secs(10);
const CHECK_EVERY: Duration = Duration::from_millis(200);
/// A consumer may send heartbeats without messages for so long: the remaining messages may have left the stream.
const DROUGHT_MAX: Duration = Duration::from_secs(5);

/// The server deletes our consumer so long after the last pull.
pub(super) const INACTIVE: Duration = Duration::from_secs(30);

/// The settings of this consumer, which begins at sequence `from`.
pub(super) fn config(name: &str, from: u64, filters: &[String], tag: &str) -> pull::Config {
    pull::Config {
        name: Some(name.to_owned()),
        description: Some("reads for order-processor audit".to_owned()),
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: from },
        ack_policy: AckPolicy::None,
        // Always a list: a single filter would be part of the subject that needs a permission.
        filter_subjects: filters.iter().filter(|filter| *filter != ">").cloned().collect(),
        inactive_threshold: INACTIVE,
        memory_storage: true,
        num_replicas: 1,
        metadata: [("audit".to_owned(), tag.to_owned())].into(),
        ..Default::default()
    }
}

/// The consumer that only this walk uses.
pub(super) struct OwnConsumer {
    pulls: Pulls,
    /// Messages that are still to come.
    left: u64,
    last_consumer_seq: u64,
    connects: u64,
}

impl OwnConsumer {
    pub(super) fn new(client: &Client, stream: &str, consumer: &str, left: u64, connects: u64) -> Self {
        Self { pulls: Pulls::of(client, stream, consumer), left, last_consumer_seq: 0, connects }
    }

    /// Waits for messages and takes all that have arrived. They are valid even if this ends with an error.
    pub(super) async fn read(&mut self, link: &mut Link, to: u64, read: &mut Vec<Raw>) -> Result<Reading, Trouble> {
        let asked = Instant::now();
        self.pulls.restart_silence();
        while read.len() < PULL_MESSAGES {
            if self.left == 0 {
                return Err(Trouble::new("the consumer has delivered everything that was in the stream", None));
            }
            if read.is_empty() && asked.elapsed() > DROUGHT_MAX {
                return Err(Trouble::new(format!("the server delivered no message for {DROUGHT_MAX:?}"), None));
            }
            self.pull(link).await?;
            let message = match link.replies.next().now_or_never() {
                None if !read.is_empty() => return Ok(Reading::Continues),
                Some(message) => Ok(message),
                None => timeout_at(Instant::now() + CHECK_EVERY, link.replies.next()).await,
            };
            match message {
                Ok(Some(message)) => match self.pulls.receive(message)? {
                    PullReply::Heartbeat | PullReply::Ended | PullReply::TooLarge => {}
                    PullReply::Delivery(arrival) => {
                        if let Reading::Complete = self.take_in(arrival.raw, to, read)? {
                            return Ok(Reading::Complete);
                        }
                    }
                },
                Ok(None) => return Err(Trouble::client_dead()),
                Err(_) if !link.is_connected() || link.connects() != self.connects => {
                    return Err(Trouble::by_message("the connection was lost"));
                }
                Err(_) => self.pulls.check()?,
            }
        }
        Ok(Reading::Continues)
    }

    async fn pull(&mut self, link: &Link) -> Result<(), Trouble> {
        if self.pulls.outstanding() > PULL_MESSAGES {
            return Ok(());
        }
        // A limit below the largest possible message would block the consumer on that message for ever.
        let bytes = PULL_BYTES.max(link.client.max_payload() + HEADER_ALLOWANCE_BYTES);
        self.pulls
            .send(link, PullRequest { messages: PULL_MESSAGES, bytes, expires: PULL_EXPIRES, heartbeat: Heartbeat::On })
            .await
            .map_err(Trouble::from)
    }

    fn take_in(&mut self, raw: Raw, to: u64, read: &mut Vec<Raw>) -> Result<Reading, Trouble> {
        let position = raw.position;
        if position.consumer_seq != self.last_consumer_seq + 1 {
            return Err(Trouble::by_message("a delivery was lost on its way"));
        }
        self.last_consumer_seq = position.consumer_seq;
        self.left = self.left.saturating_sub(1);
        if position.stream_seq <= to {
            read.push(raw);
        }
        Ok(if position.stream_seq >= to { Reading::Complete } else { Reading::Continues })
    }
}
