//! How often the log repeats a trouble that lasts.

use std::time::Duration;

use tokio::time::Instant;

/// The same trouble is logged again after this long.
const REMIND_AFTER: Duration = Duration::from_secs(60);

/// Decides whether a trouble is worth a line: when it is new, and then once every [`REMIND_AFTER`].
#[derive(Debug, Default)]
pub struct Reminder {
    logged: Option<(String, Instant)>,
}

impl Reminder {
    /// Whether to log `cause` now. The answer yes counts as logged.
    pub fn is_due(&mut self, cause: &str) -> bool {
        let due = self.logged.as_ref().is_none_or(|(logged, at)| logged != cause || at.elapsed() >= REMIND_AFTER);
        if due {
            self.logged = Some((cause.to_owned(), Instant::now()));
        }
        due
    }

    /// The trouble is over.
    pub fn forget(&mut self) {
        self.logged = None;
    }
}
