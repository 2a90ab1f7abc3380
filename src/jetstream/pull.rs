//! Pull requests and what the server sends in answer. The daemon's consumer and the [walk](super::walk) both use it.

use std::collections::VecDeque;
use std::time::Duration;

use async_nats::{Message, StatusCode};
use tokio::time::Instant;

use super::client::Client;
use super::error::{Error, Trouble};
use super::link::Link;
use crate::model::delivery::{Arrival, Headers, Position, Raw, Reply};
use crate::model::text::printable;
use crate::telemetry::metrics::NatsErrorKind;

/// The server sends a heartbeat so often while a pull is open.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// After two missed heartbeats, the pull counts as lost.
const SILENCE_MAX: Duration = Duration::from_millis(2500);
/// After this time, a pull whose end did not arrive is forgotten.
const GRACE: Duration = Duration::from_secs(2);
/// Far more pulls than a server lets one consumer have.
const OPEN_MAX: usize = 4096;
/// Bytes for headers and protocol beside the largest payload, in the byte limit of a pull.
pub(super) const HEADER_ALLOWANCE_BYTES: usize = 64 * 1024;

/// What one pull asks for.
pub(super) struct PullRequest {
    pub(super) messages: usize,
    pub(super) bytes: usize,
    pub(super) expires: Duration,
    pub(super) heartbeat: Heartbeat,
}

/// Whether the server is to send heartbeats while a pull is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heartbeat {
    On,
    /// With heartbeats, the server drops a pull beyond `max_waiting` silently. Without them, it sends the status
    /// (nats-server 2.15).
    Off,
}

/// The open pulls on one consumer.
pub(super) struct Pulls {
    subject: String,
    sent: u64,
    /// Number and latest end of each pull whose end did not arrive. A pull that got all its messages has no end of its own.
    open: VecDeque<(u64, Instant)>,
    /// Messages that open pulls may still bring.
    outstanding: usize,
    /// When the last pull must be over.
    open_until: Instant,
    last_received: Instant,
    /// A delivery arrived since the last pull was sent.
    fruitful: bool,
    heartbeat: Heartbeat,
}

/// What a message of the subscription for replies was.
pub(super) enum PullReply {
    Delivery(Arrival),
    Heartbeat,
    /// A pull ran out of time, or is complete.
    Ended,
    /// The last pull brought nothing and ended: the next message is larger than the pull allows.
    TooLarge,
}

impl Pulls {
    pub(super) fn of(client: &Client, stream: &str, consumer: &str) -> Self {
        let now = Instant::now();
        Self {
            subject: client.api(&format!("CONSUMER.MSG.NEXT.{stream}.{consumer}")),
            sent: 0,
            open: VecDeque::new(),
            outstanding: 0,
            open_until: now,
            last_received: now,
            fruitful: true,
            heartbeat: Heartbeat::On,
        }
    }

    /// Messages that open pulls may still bring.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Pulls that may be open, at the most.
    pub(super) fn open(&self) -> u64 {
        if self.outstanding == 0 { 0 } else { self.open.len() as u64 }
    }

    /// Sends one pull request more.
    pub(super) async fn send(&mut self, link: &Link, request: PullRequest) -> Result<(), Error> {
        let PullRequest { messages, bytes, expires, heartbeat } = request;
        let heartbeat_every = match heartbeat {
            Heartbeat::On => HEARTBEAT.min(expires / 2),
            Heartbeat::Off => Duration::ZERO,
        };
        let body = serde_json::json!({
            "batch": messages,
            "max_bytes": bytes,
            "expires": expires.as_nanos() as u64,
            "idle_heartbeat": heartbeat_every.as_nanos() as u64,
        });
        let reply = format!("{}.{}", link.subject, self.sent);
        let sent = link.client.publish_with_reply(self.subject.clone(), reply, body.to_string().into()).await;
        sent.map_err(|_| Error::ClientDead)?;
        if self.outstanding == 0 {
            self.restart_silence();
            self.open.clear();
        }
        if self.open.len() >= OPEN_MAX {
            self.open.pop_front();
        }
        self.open.push_back((self.sent, Instant::now() + expires + GRACE));
        self.sent += 1;
        self.fruitful = false;
        self.heartbeat = heartbeat;
        self.outstanding += messages;
        self.open_until = Instant::now() + expires + GRACE;
        Ok(())
    }

    /// The time before this call is not the server's silence: nobody read the replies, or no pull was open.
    pub(super) fn restart_silence(&mut self) {
        self.last_received = Instant::now();
    }

    /// Reads one message of the subscription for replies.
    pub(super) fn receive(&mut self, message: Message) -> Result<PullReply, Trouble> {
        self.last_received = Instant::now();
        let Some(status) = message.status else {
            let Some(arrival) = arrival(message) else {
                let cause = "a message that is not a delivery arrived on the reply subject of the pulls";
                return Err(Trouble::new(cause, Some(NatsErrorKind::Pull)));
            };
            self.outstanding = self.outstanding.saturating_sub(1);
            self.fruitful = true;
            return Ok(PullReply::Delivery(arrival));
        };
        if message.reply.as_ref().is_some_and(|reply| Position::parse(reply).is_some()) {
            let cause = "a stored message has a NATS status header, so the client reads it as a status of the server";
            return Err(Trouble::by_message(cause));
        }
        let description = message.description.as_deref().unwrap_or_default();
        let pull = message.subject.rsplit('.').next().and_then(|number| number.parse::<u64>().ok());
        let left = message.headers.as_ref().and_then(|headers| headers.get("Nats-Pending-Messages"));
        match (status, left.and_then(|left| left.as_str().parse::<usize>().ok())) {
            (StatusCode::IDLE_HEARTBEAT, _) => Ok(PullReply::Heartbeat),
            (StatusCode::TIMEOUT | StatusCode::NOT_FOUND, Some(left)) => {
                self.end(pull);
                self.outstanding = self.outstanding.saturating_sub(left);
                Ok(PullReply::Ended)
            }
            (StatusCode::REQUEST_TERMINATED, Some(left)) if is_end_of_pull(description) => {
                self.end(pull);
                self.outstanding = self.outstanding.saturating_sub(left);
                // The end of an earlier pull may arrive after the next pull was sent, and is not about that one.
                let is_last = pull == self.sent.checked_sub(1);
                Ok(if is_last && !self.fruitful { PullReply::TooLarge } else { PullReply::Ended })
            }
            (status, _) => {
                let hint = match description.to_ascii_lowercase().contains("exceeded maxwaiting") {
                    true => "; other clients have all the open pulls that the consumer allows (max_waiting)",
                    false => "",
                };
                let cause = format!("the server ended a pull: {status} {}{hint}", printable(description));
                Err(Trouble::new(cause, Some(NatsErrorKind::Pull)))
            }
        }
    }

    fn end(&mut self, pull: Option<u64>) {
        self.open.retain(|(number, _)| Some(*number) != pull);
    }

    /// Notices heartbeats that did not come, and forgets a pull whose end got lost.
    pub(super) fn check(&mut self) -> Result<(), Trouble> {
        let now = Instant::now();
        let is_silent = self.heartbeat == Heartbeat::On && now.duration_since(self.last_received) > SILENCE_MAX;
        if self.outstanding > 0 && is_silent {
            return Err(Trouble::new(
                format!("the server sent neither a delivery nor a heartbeat for {SILENCE_MAX:?}"),
                Some(NatsErrorKind::Heartbeat),
            ));
        }
        if self.outstanding > 0 && now > self.open_until {
            self.outstanding = 0;
            self.restart_silence();
        }
        if self.outstanding == 0 {
            self.open.clear();
        }
        while self.open.front().is_some_and(|(_, until)| *until < now) {
            self.open.pop_front();
        }
        Ok(())
    }
}

/// `None` for a message that the server did not deliver from a stream.
pub(super) fn arrival(message: Message) -> Option<Arrival> {
    let reply = message.reply?.into_string();
    let position = Position::parse(&reply)?;
    let reply = Reply { subject: reply, delivered: position.delivered };
    let mut headers = Headers::new();
    if let Some(found) = &message.headers {
        headers.reserve(found.len());
        for (name, values) in found.iter() {
            let name: &str = name.as_ref();
            headers.extend(values.iter().map(|value| (name.to_owned(), value.as_str().to_owned())));
        }
    }
    let (subject, payload) = (message.subject.as_str().into(), message.payload);
    Some(Arrival { raw: Raw { subject, headers, payload, position, unreadable: None }, reply })
}

/// 409s that end one pull and mean nothing else. With the other ones, the consumer or its leader is gone or has changed.
fn is_end_of_pull(description: &str) -> bool {
    let description = description.to_ascii_lowercase();
    description.contains("message size exceeds maxbytes") || description.contains("batch completed")
}
