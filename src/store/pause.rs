//! A pause of the daemon: it leaves the database alone until an operator ends the pause.

use serde::{Deserialize, Serialize};

/// Who paused the daemon, when and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// Empty if the marker cannot be read.
    pub by: String,
    /// RFC 3339.
    pub at: String,
    pub reason: Option<String>,
}

impl std::fmt::Display for Pause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.by.is_empty() {
            return write!(f, "by a marker that cannot be read");
        }
        write!(f, "by {} since {}", self.by, self.at)?;
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}
