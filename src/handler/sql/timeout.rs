//! The limit for one statement, watched by SQLite's progress handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlx::SqliteConnection;

/// SQLite calls back after this many of its instructions: some tenths of a millisecond.
const INSTRUCTIONS: i32 = 20_000;
/// A longer time between two calls counts as so much: the process was frozen or had no CPU, and no statement is to blame.
const STEP_MAX: u32 = 10;

/// The time that the running statement has taken.
pub struct Timeout {
    pub limit: Duration,
    state: Arc<StatementTime>,
}

#[derive(Default)]
struct StatementTime {
    watching: AtomicBool,
    spent_ns: AtomicU64,
}

impl Timeout {
    /// Watches the statements on a connection until this value is dropped.
    pub async fn watch(connection: &mut SqliteConnection, limit: Duration) -> Result<Self, sqlx::Error> {
        let state = Arc::new(StatementTime::default());
        state.watching.store(true, Ordering::Relaxed);
        let (watched, step_max) = (state.clone(), limit / STEP_MAX);
        let mut last = Instant::now();
        connection.lock_handle().await?.set_progress_handler(INSTRUCTIONS, move || {
            let now = Instant::now();
            let step = now.duration_since(last).min(step_max);
            last = now;
            let step_ns = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX);
            let spent = watched.spent_ns.fetch_add(step_ns, Ordering::Relaxed).saturating_add(step_ns);
            !watched.watching.load(Ordering::Relaxed) || Duration::from_nanos(spent) < limit
        });
        Ok(Self { limit, state })
    }

    /// The next statement begins.
    pub fn restart(&self) {
        self.state.spent_ns.store(0, Ordering::Relaxed);
    }
}

impl Drop for Timeout {
    fn drop(&mut self) {
        self.state.watching.store(false, Ordering::Relaxed);
    }
}
