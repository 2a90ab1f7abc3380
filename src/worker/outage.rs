//! Whether the database and the handler can work, and when they are tried again.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::text::chain;
use crate::model::time::doubled;
use crate::store::{Error, ErrorClass};
use crate::telemetry::status::Component;
use crate::telemetry::{Reminder, Telemetry};

const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// What every order needs: the database, and whatever the handler uses besides, such as a service.
#[derive(Default)]
pub struct Outages {
    database: Outage,
    handler: Outage,
    /// Why the handler cannot work on any order, and why orders wait for hosts.
    handler_away: Option<String>,
    hosts_away: Option<String>,
}

#[derive(Default)]
struct Outage {
    failures: u32,
    retry_at: Option<Instant>,
    reminder: Reminder,
}

impl Outages {
    /// No work before this time; `None` while everything works.
    pub fn retry_at(&self) -> Option<Instant> {
        self.database.retry_at.max(self.handler.retry_at)
    }

    pub fn database_works(&mut self, telemetry: &Telemetry) {
        if self.database.end() {
            tracing::info!("the database works again");
        }
        telemetry.health.report(Component::Database, Ok(()));
    }

    /// Puts the work off and logs the cause. Nothing is acknowledged and no attempt is counted.
    ///
    /// # Errors
    /// `error` itself, if no retry can help.
    pub fn database_failed(&mut self, error: Error, telemetry: &Telemetry) -> Result<(), Error> {
        telemetry.metrics.db_errors.increment(error.class, 1);
        if error.class == ErrorClass::Corrupt {
            return Err(error);
        }
        let cause = chain(&error);
        if self.database.begin(&cause) {
            tracing::error!(%cause, "the database does not work, pulling stops until it does");
        }
        telemetry.health.report(Component::Database, Err(cause));
        Ok(())
    }

    /// Takes what the last batch showed of the handler: `away` says why it could not work on any message.
    pub fn handler(&mut self, away: Option<String>, telemetry: &Telemetry) {
        match away {
            None => {
                if self.handler.end() {
                    tracing::info!("the handler works again");
                }
                self.handler_away = None;
            }
            Some(cause) => {
                if self.handler.begin(&cause) {
                    tracing::error!(%cause, "the handler cannot work, pulling stops until it can; no attempt is counted");
                }
                self.handler_away = Some(cause);
            }
        }
        self.report_handler(telemetry);
    }

    /// Takes why orders wait for the hosts of their calls. The others continue.
    pub fn hosts(&mut self, away: Option<String>, telemetry: &Telemetry) {
        // Nearly always, nothing has changed.
        if self.hosts_away != away {
            self.hosts_away = away;
            self.report_handler(telemetry);
        }
    }

    fn report_handler(&self, telemetry: &Telemetry) {
        let causes: Vec<&str> = self.handler_away.iter().chain(&self.hosts_away).map(String::as_str).collect();
        let fact = if causes.is_empty() { Ok(()) } else { Err(causes.join("; ")) };
        telemetry.health.report(Component::Handler, fact);
    }
}

impl Outage {
    /// Puts the work off, longer with each failure in a row. Whether the cause is due in the log.
    fn begin(&mut self, cause: &str) -> bool {
        let delay = doubled(RETRY_MIN, self.failures, RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        self.retry_at = Some(Instant::now() + delay);
        self.reminder.is_due(cause)
    }

    /// Whether there was an outage.
    fn end(&mut self) -> bool {
        std::mem::take(self).retry_at.is_some()
    }
}
