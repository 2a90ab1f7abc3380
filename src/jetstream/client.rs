//! The NATS client, and where JetStream is on its connection: on this server, in another domain, or behind the prefix under which
//! another account exports it. All requests to JetStream get their subject here. Acknowledgements do not: their subject comes
//! with the delivery.

use std::ops::Deref;
use std::sync::Arc;

use async_nats::jetstream::{self, Context};

use crate::config::{DEFAULT_API_PREFIX, Nats};

#[derive(Clone)]
pub struct Client {
    nats: async_nats::Client,
    api_prefix: Arc<str>,
}

impl Client {
    pub(super) fn new(nats: async_nats::Client, settings: &Nats) -> Self {
        Self { nats, api_prefix: settings.api_prefix.as_str().into() }
    }

    /// The subject of a request such as `STREAM.INFO.ORDERS`.
    pub fn api(&self, request: &str) -> String {
        format!("{}.{request}", self.api_prefix)
    }

    pub fn jetstream(&self) -> Context {
        jetstream::with_prefix(self.nats.clone(), &self.api_prefix)
    }

    /// The JetStream domain of the server, if no setting tells which domain is meant.
    pub fn unconfirmed_domain(&self) -> Option<String> {
        let domain = self.nats.try_server_info()?.domain?;
        (*self.api_prefix == *DEFAULT_API_PREFIX).then_some(domain)
    }

    /// Where a stream was not found, and which setting names another place; empty if there is only one place.
    pub fn place(&self) -> String {
        match self.unconfirmed_domain() {
            Some(domain) => {
                format!(" in JetStream domain {domain}, the one of the server (nats.domain names another domain)")
            }
            None if *self.api_prefix == *DEFAULT_API_PREFIX => String::new(),
            None => format!(" behind {} (nats.domain, nats.api_prefix)", self.api_prefix),
        }
    }
}

impl Deref for Client {
    type Target = async_nats::Client;

    fn deref(&self) -> &async_nats::Client {
        &self.nats
    }
}
