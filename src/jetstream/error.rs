//! Why a bind failed, and why a binding ended.

use super::connection::{ConnectError, Denied};
use super::gate::Finding;
use crate::telemetry::metrics::NatsErrorKind;

/// Why the server did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("stream {stream} does not exist{place}; create the stream and its consumer with `order-processor setup`")]
    NoStream { stream: String, place: String },
    #[error("stream {stream} has no consumer {consumer}; create the consumer with `order-processor setup`")]
    NoConsumer { stream: String, consumer: String },
    #[error(
        "JetStream is not enabled on the server or for this account; if the stream is in another domain or account, set nats.domain \
         or nats.api_prefix"
    )]
    NoJetStream,
    #[error("the server does not answer {asked}: {error}")]
    NoAnswer { asked: &'static str, error: String },
    #[error("{}", .0.iter().map(|finding| finding.text.as_str()).collect::<Vec<_>>().join("; "))]
    Refused(Vec<Finding>),
    /// Only for the question of a command.
    #[error(transparent)]
    Denied(#[from] Denied),
    #[error("the stream or the consumer was recreated in the meantime")]
    Recreated,
    #[error("the connection task of the NATS client has ended")]
    ClientDead,
}

impl Error {
    /// Waiting does not end these. Once the daemon has been bound, it waits all the same: the operator may be at work on the
    /// consumer.
    pub(super) fn needs_operator(&self) -> bool {
        match self {
            Self::Refused(_) => true,
            // `run` has checked the files before. If they or the login are wrong now, a rotation may be half done.
            Self::Connect(_)
            | Self::NoStream { .. }
            | Self::NoConsumer { .. }
            | Self::NoJetStream
            | Self::NoAnswer { .. }
            | Self::Denied(_)
            | Self::Recreated
            | Self::ClientDead => false,
        }
    }
}

/// Why a binding, or a way to read, ended.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) cause: String,
    pub(super) kind: Option<NatsErrorKind>,
    pub(super) blame: Blame,
}

/// Where the cause of a [`Trouble`] may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// In the server, the network, or the settings.
    Elsewhere,
    /// In a message that was on its way: perhaps the client cannot parse it.
    Message,
    /// In such a message as well, and the client has ended with it.
    MessageEndedClient,
}

impl Trouble {
    pub(super) fn new(cause: impl Into<String>, kind: Option<NatsErrorKind>) -> Self {
        Self { cause: cause.into(), kind, blame: Blame::Elsewhere }
    }

    pub(super) fn by_message(cause: impl Into<String>) -> Self {
        Self { blame: Blame::Message, ..Self::new(cause, None) }
    }

    pub(super) fn client_dead() -> Self {
        let cause = Error::ClientDead.to_string();
        Self { blame: Blame::MessageEndedClient, ..Self::new(cause, Some(NatsErrorKind::Client)) }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::ClientDead => return Self::client_dead(),
            Error::NoStream { .. } | Error::NoConsumer { .. } | Error::Recreated | Error::Refused(_) => None,
            Error::Connect(_) | Error::NoJetStream | Error::NoAnswer { .. } | Error::Denied(_) => {
                Some(NatsErrorKind::Request)
            }
        };
        Self::new(crate::model::text::chain(&error), kind)
    }
}
