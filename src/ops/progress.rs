//! The progress of long work, on stderr: a bar on a terminal, otherwise a log line every [`LINE_EVERY`].

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// How often a line is due without a bar.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The progress of one command. The bar is gone when this is dropped.
pub struct Progress {
    bar: ProgressBar,
    logged_at: Instant,
}

impl Progress {
    /// Of `total` messages, or of a number that is not known.
    pub fn new(total: Option<u64>) -> Self {
        Self::with_template(total, "{bar:40} {human_pos} of {human_len}, {per_sec}, {eta} left{msg}")
    }

    /// Of about `total` bytes.
    pub fn of_bytes(total: u64) -> Self {
        Self::with_template(Some(total), "{bar:40} {binary_bytes} of {binary_total_bytes}, {eta} left{msg}")
    }

    fn with_template(total: Option<u64>, template: &str) -> Self {
        let bar = match (io::stderr().is_terminal(), total) {
            (true, Some(total)) => ProgressBar::new(total),
            (true, None) => ProgressBar::new_spinner(),
            (false, _) => ProgressBar::hidden(),
        };
        if let (Some(_), Ok(style)) = (total, ProgressStyle::with_template(template)) {
            bar.set_style(style);
        }
        Self { bar, logged_at: Instant::now() }
    }

    /// Without a bar: there is nothing to do.
    pub fn none() -> Self {
        Self { bar: ProgressBar::hidden(), logged_at: Instant::now() }
    }

    /// Whether there is a bar.
    pub fn is_bar(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// Moves the bar. `true` if the caller is to log a line instead.
    pub fn advance(&mut self, position: u64) -> bool {
        self.bar.set_position(position);
        let due = self.bar.is_hidden() && self.logged_at.elapsed() >= LINE_EVERY;
        if due {
            self.logged_at = Instant::now();
        }
        due
    }

    pub fn set_total(&self, total: u64) {
        self.bar.set_length(total);
    }

    /// Text behind the bar.
    pub fn set_message(&self, message: String) {
        self.bar.set_message(message);
    }

    /// Writes something else without destroying the bar.
    pub fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}
