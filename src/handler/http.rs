//! A call of a route: one POST for each order. What an answer means stands in [`answer`]; whether the endpoint is away is decided by
//! the worker, which sees all orders.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;

use self::connect::connect;
use self::exchange::{Lost, Pool, exchange};
use self::files::{Files, Paths};
use self::settings::Settings;
pub use self::settings::{HttpRoute, Place};
use super::{Answer, Failure};
use crate::model::delivery::Delivery;

mod answer;
mod connect;
mod exchange;
mod files;
mod request;
mod settings;
mod signature;
mod target;

/// The endpoint of one route, with its open connections.
pub struct Endpoint {
    settings: Settings,
    paths: Arc<Paths>,
    stream: String,
    pool: Pool,
}

impl Endpoint {
    /// # Errors
    /// Every problem of the settings, one text each, that begins with the name of the setting.
    pub fn new(route: &HttpRoute, place: &Place<'_>) -> Result<Self, Vec<String>> {
        let settings = route.check(place)?;
        let paths = Arc::new(settings.paths.clone());
        Ok(Self { settings, paths, stream: place.stream.to_owned(), pool: Pool::default() })
    }

    /// Scheme, name and port, or the socket. Routes to one host share its state.
    pub fn host(&self) -> &str {
        &self.settings.target.host
    }

    /// How many calls may run at the same time.
    pub fn concurrency(&self) -> usize {
        self.settings.concurrency
    }

    /// The subject to which the body of a 2xx goes.
    pub fn reply(&self) -> Option<&str> {
        self.settings.reply.as_deref()
    }

    /// Sends one order and reads the answer.
    ///
    /// # Errors
    /// What the answer, or its absence, means for the order. Only the first line of the text may be logged.
    pub async fn call(&self, delivery: &Delivery) -> Result<Answer, Failure> {
        let deadline = Instant::now() + self.settings.timeout;
        let used = self.pool.take(self.settings.timeout);
        let was_used = used.is_some();
        let mut lost = match used {
            Some(connection) => self.exchange(connection, delivery, deadline).await,
            None => self.on_a_new_connection(delivery, deadline).await,
        };
        // The endpoint closes connections when it likes. It gets the same key again, and the order is not to blame.
        if was_used && matches!(lost, Err(Lost::NotSent(_) | Lost::Silent(_))) {
            lost = self.on_a_new_connection(delivery, deadline).await;
        }
        match lost {
            Ok(received) => self.settings.statuses.judge(received, SystemTime::now()),
            Err(Lost::NotSent(cause)) => Err(Failure::Away(cause)),
            Err(Lost::Silent(cause) | Lost::Unanswered(cause)) => Err(Failure::Unanswered { cause, retry_after: None }),
        }
    }

    async fn on_a_new_connection(&self, delivery: &Delivery, deadline: Instant) -> Result<answer::Received, Lost> {
        let connection = connect(&self.settings.target.address, &self.paths, deadline).await.map_err(Lost::NotSent)?;
        self.exchange(connection, delivery, deadline).await
    }

    async fn exchange(
        &self,
        connection: connect::HttpConnection,
        delivery: &Delivery,
        deadline: Instant,
    ) -> Result<answer::Received, Lost> {
        let request = request::build(&self.settings, &self.stream, &connection.files, delivery, SystemTime::now());
        exchange(connection, &self.pool, request, |status| self.settings.statuses.needs_body(status), deadline).await
    }

    /// The request as it would be sent, for people: the URL as the file has it, and no secrets.
    pub fn preview(&self, delivery: &Delivery) -> String {
        let none = Files { keys: None, headers: Vec::new(), tls: None };
        let headers = request::headers(&self.settings, &self.stream, &none, delivery, SystemTime::now());
        let mut text = format!("POST {}\n", self.settings.url_as_written);
        let shown = headers.iter().map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes())));
        let signature = self.paths.secret.is_some().then_some("webhook-signature");
        let hidden = self.paths.headers.iter().map(|file| file.name.as_str()).chain(signature);
        for (name, value) in shown.chain(hidden.map(|name| (name, "***".into()))) {
            writeln!(text, "{name}: {value}").expect("writing to a string cannot fail");
        }
        text
    }
}
