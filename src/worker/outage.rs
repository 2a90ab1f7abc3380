//! Whether the database accepts our work, and when it is tried again.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::text::chain;
use crate::store::{Error, ErrorClass};
use crate::telemetry::{Reminder, Telemetry};

const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

#[derive(Default)]
pub struct Outage {
    failures: u32,
    retry_at: Option<Instant>,
    reminder: Reminder,
}

impl Outage {
    /// No work before this time; `None` while the database works.
    pub fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    pub fn end(&mut self, telemetry: &Telemetry) {
        if self.retry_at.is_some() {
            tracing::info!("the database works again");
        }
        *self = Self::default();
        telemetry.health.set_database(Ok(()));
    }

    /// Puts the work off and logs the cause. Nothing is acknowledged and no attempt is counted.
    ///
    /// # Errors
    /// `error` itself, if no retry can help.
    pub fn begin(&mut self, error: Error, telemetry: &Telemetry) -> Result<(), Error> {
        telemetry.metrics.db_errors.increment(error.class, 1);
        if error.class == ErrorClass::Corrupt {
            return Err(error);
        }
        let cause = chain(&error);
        if self.reminder.is_due(&cause) {
            tracing::error!(%cause, "the database does not work, pulling stops until it does");
        }
        telemetry.health.set_database(Err(cause));
        let delay = RETRY_MIN * (1 << self.failures.min(5));
        self.failures += 1;
        self.retry_at = Some(Instant::now() + delay.min(RETRY_MAX));
        Ok(())
    }
}
