//! One order on trial, in a scratch database: what the routes would do with it, step by step, for people.

use std::time::SystemTime;

use sqlx::{Row, SqliteConnection};

use super::params::{Params, Value};
use super::route::Deed;
use super::routes::Routes;
use super::sql::timeout::Timeout;
use super::sql::{self, Statement};
use super::{Failure, planned};
use crate::model::delivery::Delivery;
use crate::model::text::{chain, printable, shortened};
use crate::model::time::unix_ns;
use crate::store::Connection;

/// Characters of one shown value.
const VALUE_MAX: usize = 200;

/// What was shown, and whether the order would have been applied or ignored.
pub struct Trial {
    pub lines: Vec<String>,
    pub passed: bool,
}

impl Routes {
    /// Runs one order. An endpoint is called only if `may_call`.
    pub async fn try_out(&self, connection: Connection<'_>, delivery: Delivery, may_call: bool) -> Trial {
        let Connection::Sqlite(connection) = connection;
        let delivery = planned(self, delivery);
        let mut lines = vec![format!("id          {}", shortened(&delivery.id, VALUE_MAX))];
        if let Some((_, route)) = self.route(&delivery) {
            lines.push(format!("route       {} ({})", route.name, route.subject));
        }
        if let Some((reason, error)) = &delivery.defect {
            use crate::model::label::Label;
            lines.push(format!("dead letter {}: {}", reason.name(), printable(error)));
            return Trial { lines, passed: false };
        }
        let deed = self.route(&delivery).map(|(_, route)| (&route.deed, &route.params));
        let ended = match deed {
            Some((Deed::Sql(statements), params)) => {
                self.try_statements(connection, statements, params, &delivery, &mut lines).await
            }
            Some((Deed::Http(endpoint), _)) => {
                lines
                    .extend(endpoint.preview(&delivery).lines().map(|line| format!("request     {}", printable(line))));
                match may_call {
                    false => {
                        lines.push("call        not made; --call makes it".to_owned());
                        Ok(())
                    }
                    true => endpoint.call(&delivery).await.map(|answer| {
                        let body = String::from_utf8_lossy(&answer.body).into_owned();
                        lines.push(format!("answer      {}", shortened(&body, VALUE_MAX)));
                    }),
                }
            }
            Some((Deed::Record, _)) => {
                lines.push("recorded    in the table orders".to_owned());
                Ok(())
            }
            Some((Deed::Ignore, _)) | None => {
                lines.push("ignored     only the id is kept".to_owned());
                Ok(())
            }
        };
        let passed = ended.is_ok();
        if let Err(failure) = ended {
            lines.push(verdict(&failure.into_inner()));
        }
        Trial { lines, passed }
    }

    async fn try_statements(
        &self,
        connection: &mut SqliteConnection,
        statements: &[Statement],
        params: &Params,
        delivery: &Delivery,
        lines: &mut Vec<String>,
    ) -> Result<(), Failure> {
        let now_ns = unix_ns(SystemTime::now());
        let values = |wanted: &[usize]| params.values(delivery, now_ns, wanted).map_err(Failure::Permanent);
        let mut used: Vec<usize> = statements.iter().flat_map(|statement| statement.wanted.iter().copied()).collect();
        used.sort_unstable();
        used.dedup();
        for (index, value) in used.iter().zip(values(&used)?) {
            lines.push(format!("parameter   :{} {}", params.params[*index].name, shown(&value)));
        }
        let timeout = Timeout::watch(connection, self.timeout()).await?;
        for statement in statements {
            let rows = sql::apply_one(connection, statement, values(&statement.wanted)?, &timeout).await?;
            let name = statement.name.rsplit_once(", ").map_or(statement.name.as_str(), |(_, name)| name);
            lines.push(format!("{name:<11} {rows} {}", if rows == 1 { "row" } else { "rows" }));
        }
        let outbox = sqlx::query("SELECT id, subject, CAST(payload AS TEXT) AS payload FROM outbox ORDER BY row");
        for row in outbox.fetch_all(connection).await? {
            let payload: String = row.get("payload");
            let (id, subject): (String, String) = (row.get("id"), row.get("subject"));
            lines.push(format!("outbox      {subject} {id} {}", shortened(&payload, VALUE_MAX)));
        }
        Ok(())
    }
}

fn verdict(failure: &Failure) -> String {
    let error = chain(failure);
    let text = printable(&error);
    match failure {
        Failure::Permanent(_) => format!("dead letter permanent: {text}"),
        Failure::Retry(_) => format!("retry       {text}"),
        Failure::Away(_) | Failure::Unanswered { .. } => format!("waits       {text}"),
        Failure::Store(_) | Failure::At { .. } => format!("failed      {text}"),
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "NULL".to_owned(),
        Value::Integer(number) => format!("integer {number}"),
        Value::Real(number) => format!("real {number}"),
        Value::Text(text) => format!("text {}", shortened(text, VALUE_MAX)),
        Value::Blob(bytes) => format!("blob, {} bytes", bytes.len()),
    }
}
