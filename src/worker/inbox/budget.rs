//! How long one pass over single messages or over calls may take.

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// After this time, a pass over single messages or over calls commits what it has and leaves the rest to the next pass. So finished
/// messages are acknowledged, and a stop does not wait.
const SINGLES_BUDGET: Duration = Duration::from_secs(1);

/// How long a pass continues: at least for one message.
pub(super) struct Budget<'a> {
    draining: &'a CancellationToken,
    began: Instant,
}

impl<'a> Budget<'a> {
    pub(super) fn new(draining: &'a CancellationToken) -> Self {
        Self { draining, began: Instant::now() }
    }

    pub(super) fn is_spent(&self) -> bool {
        self.draining.is_cancelled() || self.began.elapsed() >= SINGLES_BUDGET
    }
}
