//! How long nothing was committed although there was work and nothing known was in the way.

use std::time::{Duration, Instant};

/// Measures how long there was work and no commit while nothing known was in the way.
///
/// Time in which something was in the way (no connection, no database, a paused consumer) is left out, not started
/// over: after an outage the worker gets its full time, yet a connection that is cut every few seconds by the same
/// message still counts as a stall in the end.
#[derive(Debug)]
pub struct StallClock {
    /// When work first appeared, or the last commit, whichever is later; moved forward by every hindrance since.
    working_since: Option<Instant>,
    hindered_since: Option<Instant>,
}

impl StallClock {
    /// The clock of a daemon that starts and is hindered until the first report that all is well.
    pub fn starting(now: Instant) -> Self {
        Self { working_since: None, hindered_since: Some(now) }
    }

    /// To be called with each change of the facts.
    pub fn observe(&mut self, has_work: bool, hindered: bool, now: Instant) {
        if let (Some(hindered_since), false) = (self.hindered_since, hindered) {
            if let Some(working_since) = &mut self.working_since {
                *working_since += now.saturating_duration_since(hindered_since.max(*working_since));
            }
            self.hindered_since = None;
        } else if self.hindered_since.is_none() && hindered {
            self.hindered_since = Some(now);
        }
        self.working_since = if has_work { self.working_since.or(Some(now)) } else { None };
    }

    /// Progress was made. The next [`StallClock::observe`] starts the clock again if there is more to do.
    pub fn progressed(&mut self) {
        self.working_since = None;
    }

    pub fn stalled_for(&self, now: Instant) -> Duration {
        let until = self.hindered_since.unwrap_or(now);
        self.working_since.map_or(Duration::ZERO, |since| until.saturating_duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hindered_time_is_left_out_and_progress_starts_over() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut clock = StallClock::starting(start);
        clock.observe(true, true, at(0));
        assert_eq!(clock.stalled_for(at(50)), Duration::ZERO, "hindered from the start");
        clock.observe(true, false, at(50));
        clock.observe(true, true, at(60));
        assert_eq!(clock.stalled_for(at(90)), Duration::from_secs(10));
        clock.observe(true, false, at(100));
        assert_eq!(clock.stalled_for(at(105)), Duration::from_secs(15));
        clock.progressed();
        clock.observe(true, false, at(110));
        assert_eq!(clock.stalled_for(at(111)), Duration::from_secs(1));
        clock.observe(false, false, at(112));
        assert_eq!(clock.stalled_for(at(200)), Duration::ZERO, "no work, no stall");
    }
}
