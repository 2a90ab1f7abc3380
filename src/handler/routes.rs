//! The handler that a handler file describes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::file::{HandlerFile, Problems};
use super::http::{Endpoint, Place};
use super::orders;
use super::route::{Deed, Route};
use super::sql::migrations::Migrations;
use super::sql::timeout::Timeout;
use super::sql::{self, Statement, check};
use super::{Answer, Failure, Handler, Order, Service};
use crate::model::delivery::Delivery;
use crate::model::outbox::{self, OutboxRow};
use crate::model::outcome::Reason;
use crate::model::plan::Plan;
use crate::model::subject::SubjectPattern;
use crate::model::time::unix_ns;
use crate::store::{self, Connection, Scratch, Tx};

/// The routes of a file that was checked.
pub struct Routes {
    file: HandlerFile,
    migrations: Migrations,
}

/// Why a handler file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The operator must correct the file.
    #[error(transparent)]
    Problems(#[from] Problems),
    #[error("cannot check the handler file")]
    Database(#[from] store::Error),
}

impl Routes {
    /// Reads the file and checks everything in a scratch database, which gets the user's migrations that it lacks. The warnings are
    /// for the operator.
    ///
    /// # Errors
    /// All problems of the file together.
    pub async fn load(
        path: PathBuf,
        place: &Place<'_>,
        scratch: &mut Scratch,
    ) -> Result<(Self, Vec<String>), LoadError> {
        let (file, Problems(mut problems)) = HandlerFile::read(&path, place)?;
        let shown = path.display().to_string();
        let Connection::Sqlite(connection) = scratch.connection();
        let migrations = match &file.migrations {
            None => Migrations::default(),
            Some(folder) => Migrations::read(folder, &mut problems),
        };
        let ours = check::Ours::read().await?;
        let (mut warnings, migrated) = migrations.apply(connection, &ours, &mut problems).await?;
        if migrated {
            check::check(connection, &ours, &file, &mut problems).await?;
        }
        warnings.iter_mut().for_each(|warning| *warning = format!("{shown}: {warning}"));
        if problems.is_empty() { Ok((Self { file, migrations }, warnings)) } else { Err(Problems(problems).into()) }
    }

    /// The file and its routes in one line.
    pub fn summary(&self) -> String {
        let count = self.file.routes.len();
        format!("{}: {count} {}", self.file.path.display(), if count == 1 { "route" } else { "routes" })
    }

    /// Those of the subjects for which no route takes every order. An order without a route is a dead letter.
    pub fn without_route(&self, subjects: &[String]) -> Vec<String> {
        let takes = |subject: &SubjectPattern| {
            self.file.routes.iter().any(|route| route.takes_all() && route.subject.covers(subject))
        };
        let open = subjects.iter().filter(|subject| subject.parse().is_ok_and(|subject| !takes(&subject)));
        open.cloned().collect()
    }

    pub fn timeout(&self) -> Duration {
        self.file.timeout
    }

    /// The route of an order: the first one that matches.
    pub fn route(&self, delivery: &Delivery) -> Option<(usize, &Route)> {
        self.file.routes.iter().enumerate().find(|(_, route)| route.matches(delivery))
    }

    fn unrouted(&self, delivery: &Delivery) -> String {
        format!("no route of {} is for subject {}", self.file.path.display(), delivery.raw.subject)
    }
}

#[async_trait]
impl Handler for Routes {
    fn plan(&self, delivery: &Delivery) -> Plan {
        let Some((_, route)) = self.route(delivery) else {
            return Plan::DeadLetter(Reason::Unrouted, self.unrouted(delivery));
        };
        if let Some(key) = route.key.as_ref().filter(|key| key.text(delivery).is_none()) {
            return Plan::DeadLetter(Reason::Undecodable, format!("{}: key: {}", route.name, key.missing()));
        }
        match &route.deed {
            Deed::Sql(statements) => match values(route, statements, delivery, 0) {
                Ok(_) => Plan::Apply,
                Err(error) => Plan::DeadLetter(Reason::Undecodable, format!("{}: {error}", route.name)),
            },
            Deed::Http(endpoint) => match unpublishable(endpoint, delivery) {
                Some(error) => Plan::DeadLetter(Reason::Permanent, format!("{}: reply: {error}", route.name)),
                None => Plan::Call,
            },
            Deed::Record => Plan::Apply,
            Deed::Ignore => Plan::Ignore,
        }
    }

    fn key(&self, delivery: &Delivery) -> Option<Arc<str>> {
        self.route(delivery)?.1.key.as_ref()?.text(delivery).map(Into::into)
    }

    fn concurrency(&self) -> usize {
        self.services().iter().map(|service| service.concurrency).sum()
    }

    fn services(&self) -> Vec<Service> {
        let service =
            |endpoint: &Endpoint| Service { host: endpoint.host().into(), concurrency: endpoint.concurrency() };
        self.file.routes.iter().filter_map(Route::endpoint).map(service).collect()
    }

    fn service(&self, delivery: &Delivery) -> usize {
        let before = self.route(delivery).map_or(0, |(index, _)| index);
        self.file.routes[..before].iter().filter_map(Route::endpoint).count()
    }

    async fn call(&self, delivery: &Delivery) -> Result<Answer, Failure> {
        match self.route(delivery).and_then(|(_, route)| route.endpoint()) {
            Some(endpoint) => endpoint.call(delivery).await,
            None => Ok(Answer::default()),
        }
    }

    fn file(&self) -> Option<(&Path, &str)> {
        Some((&self.file.path, &self.file.digest))
    }

    async fn prepare(&self, connection: Connection<'_>) -> Result<(), Failure> {
        let Connection::Sqlite(connection) = connection;
        self.migrations.apply_for_good(connection).await
    }

    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        let Connection::Sqlite(connection) = tx.connection();
        let now_ns = unix_ns(SystemTime::now());
        let timeout = Timeout::watch(connection, self.file.timeout).await?;
        let mut begun = 0;
        while begun < orders.len() {
            let route = self.route(orders[begun].delivery);
            let same = |order: &&Order<'_>| {
                self.route(order.delivery).map(|(index, _)| index) == route.map(|(index, _)| index)
            };
            let count = orders[begun..].iter().take_while(same).count();
            let run = &orders[begun..begun + count];
            self.run(connection, route.map(|(_, route)| route), run, now_ns, &timeout)
                .await
                .map_err(|failure| failure.moved(begun))?;
            begun += count;
        }
        Ok(())
    }
}

impl Routes {
    /// Applies orders of one route.
    async fn run(
        &self,
        connection: &mut SqliteConnection,
        route: Option<&Route>,
        orders: &[Order<'_>],
        now_ns: i64,
        timeout: &Timeout,
    ) -> Result<(), Failure> {
        let Some(route) = route else {
            let error = self.unrouted(orders[0].delivery);
            return Err(Failure::At { index: 0, failure: Box::new(Failure::Permanent(error)) });
        };
        match &route.deed {
            Deed::Sql(statements) => {
                let mut all = Vec::with_capacity(orders.len());
                for (index, order) in orders.iter().enumerate() {
                    let one = values(route, statements, order.delivery, now_ns);
                    let failure = |error| Failure::At { index, failure: Box::new(Failure::Permanent(error)) };
                    all.push(one.map_err(failure)?);
                }
                sql::apply(connection, statements, all, timeout).await
            }
            Deed::Record => orders::record(connection, orders).await,
            Deed::Http(endpoint) => reply(connection, endpoint, orders).await,
            Deed::Ignore => Ok(()),
        }
    }
}

/// Puts the answers into the outbox, for a route with `reply`.
async fn reply(connection: &mut SqliteConnection, endpoint: &Endpoint, orders: &[Order<'_>]) -> Result<(), Failure> {
    let Some(subject) = endpoint.reply() else { return Ok(()) };
    for Order { delivery, answer } in orders {
        let Some(answer) = answer.filter(|answer| !answer.body.is_empty()) else { continue };
        sqlx::query("INSERT INTO outbox (id, subject, payload) VALUES (?, ?, ?)")
            .bind(reply_id(delivery))
            .bind(subject)
            .bind(answer.body.as_ref())
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

fn reply_id(delivery: &Delivery) -> String {
    format!("{}/reply", delivery.id)
}

/// Why the reply could not be published, if so. This must be known before the call: afterwards, the endpoint has the order.
fn unpublishable(endpoint: &Endpoint, delivery: &Delivery) -> Option<String> {
    let (id, subject) = (reply_id(delivery), endpoint.reply()?.to_owned());
    let row = OutboxRow { row: 0, id, subject, headers: None, payload_bytes: 0, sought_from: None };
    outbox::check(&row, None).err()
}

fn values(
    route: &Route,
    statements: &[Statement],
    delivery: &Delivery,
    now_ns: i64,
) -> Result<Vec<super::params::Value>, String> {
    let wanted: Vec<usize> = statements.iter().flat_map(|statement| statement.wanted.iter().copied()).collect();
    route.params.values(delivery, now_ns, &wanted)
}
