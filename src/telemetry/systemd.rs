//! The messages to systemd: ready, stopping, a status line, the watchdog, and more time to start and to drain.
//!
//! Without `NOTIFY_SOCKET`, nothing is sent. [`Health`] decides what is true; this file decides when it is sent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use crate::telemetry::health::Health;

/// The least time between two status lines. The status changes with every batch, and D-Bus needs only a few changes.
const STATUS_PAUSE: Duration = Duration::from_secs(5);

/// More time to start or to drain. It is requested again after a third of this time.
const EXTENSION: Duration = Duration::from_secs(30);

/// How often the health is read.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// Keeps systemd informed until `shutdown`.
pub async fn run(health: Arc<Health>, shutdown: CancellationToken) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let watchdog = sd_notify::watchdog_enabled();
    let pause = watchdog.map_or(LOOK_PAUSE, |interval| LOOK_PAUSE.min(interval / 2));
    let mut notifier = Notifier::new(watchdog, pause);
    loop {
        notify(&notifier.next(&health, Instant::now()));
        // After the messages, so that systemd gets STOPPING even if the drain takes less than a pause.
        if shutdown.is_cancelled() {
            return;
        }
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

fn extension(by: Duration) -> NotifyState<'static> {
    NotifyState::ExtendTimeoutUsec(u32::try_from(by.as_micros()).unwrap_or(u32::MAX))
}

fn notify(states: &[NotifyState<'_>]) {
    if states.is_empty() {
        return;
    }
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot send a message to systemd");
    }
}

/// What was sent already. It decides what is sent next.
struct Notifier {
    watchdog: Option<Duration>,
    pause: Duration,
    ready: bool,
    stopping: bool,
    line: String,
    line_at: Option<Instant>,
    watchdog_at: Option<Instant>,
    extended_at: Option<Instant>,
}

impl Notifier {
    fn new(watchdog: Option<Duration>, pause: Duration) -> Self {
        let (line, line_at, watchdog_at, extended_at) = (String::new(), None, None, None);
        Self { watchdog, pause, ready: false, stopping: false, line, line_at, watchdog_at, extended_at }
    }

    fn next(&mut self, health: &Health, now: Instant) -> Vec<NotifyState<'_>> {
        let mut states = Vec::new();
        let live = health.is_live().is_ok();
        // A paused daemon counts as started: the boot of the machine must not wait for the end of the pause.
        if !self.ready && (health.is_paused() || health.problems().is_empty()) {
            self.ready = true;
            states.push(NotifyState::Ready);
        }
        if !self.stopping && health.is_draining() {
            self.stopping = true;
            self.extended_at = None;
            states.push(NotifyState::Stopping);
        }
        // systemd must not kill a unit whose server is down at boot, but it must kill a start that hangs. A drain has its own
        // deadline, `shutdown.timeout`, which may be longer than TimeoutStopSec.
        if (!self.ready || self.stopping) && live && self.is_due(self.extended_at, EXTENSION / 3, now) {
            self.extended_at = Some(now);
            states.push(extension(EXTENSION));
        }
        // Nothing is sent while the loop does not run: the watchdog must notice that.
        if let Some(interval) = self.watchdog
            && live
            && self.is_due(self.watchdog_at, interval / 2, now)
        {
            self.watchdog_at = Some(now);
            states.push(NotifyState::Watchdog);
        }
        let line = health.status_line();
        if line != self.line && self.is_due(self.line_at, STATUS_PAUSE, now) {
            self.line_at = Some(now);
            self.line = line;
            states.push(NotifyState::Status(&self.line));
        }
        states
    }

    /// Whether a message must be sent now because the next read of the health would be too late.
    fn is_due(&self, last: Option<Instant>, every: Duration, now: Instant) -> bool {
        last.is_none_or(|last| now + self.pause > last + every)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::process::Command;
    use std::sync::Mutex;

    use futures_util::FutureExt;

    use super::*;
    use crate::telemetry::status::Component;

    struct Bench {
        notifier: Notifier,
        health: Health,
        now: Arc<Mutex<Instant>>,
    }

    impl Bench {
        fn new(watchdog: Option<Duration>) -> Self {
            let now = Arc::new(Mutex::new(Instant::now()));
            let clock = Arc::clone(&now);
            let health = Health::with_clock(move || *clock.lock().unwrap());
            Self { notifier: Notifier::new(watchdog, LOOK_PAUSE), health, now }
        }

        fn become_ready(&self) {
            self.health.report(Component::Nats, Ok(()));
            self.health.report(Component::Consumer, Ok(()));
            self.health.report(Component::Database, Ok(()));
        }

        /// Everything said from `from` up to, not including, `to`, at one look per second; `second state` each.
        fn run(&mut self, seconds: std::ops::Range<u64>, tick: bool) -> Vec<String> {
            let mut said = Vec::new();
            for second in seconds {
                if tick {
                    self.health.tick();
                }
                let now = *self.now.lock().unwrap();
                let states = self.notifier.next(&self.health, now);
                said.extend(states.iter().map(|state| format!("{second} {state}")));
                *self.now.lock().unwrap() += Duration::from_secs(1);
            }
            said
        }
    }

    fn only(said: &[String], what: &str) -> Vec<String> {
        said.iter().filter(|state| state.contains(what)).cloned().collect()
    }

    #[test]
    fn ready_is_said_once_and_only_when_ready() {
        let mut bench = Bench::new(None);
        assert_eq!(only(&bench.run(0..5, true), "READY"), [""; 0]);
        bench.become_ready();
        assert_eq!(only(&bench.run(5..8, true), "READY"), ["5 READY=1"]);
        bench.health.report(Component::Database, Err("disk full".to_owned()));
        bench.run(8..10, true);
        bench.become_ready();
        assert_eq!(only(&bench.run(10..12, true), "READY"), [""; 0]);
    }

    #[test]
    fn a_start_that_waits_asks_for_time_until_it_is_ready() {
        let mut bench = Bench::new(None);
        let said = bench.run(0..20, true);
        assert_eq!(only(&said, "EXTEND"), ["0 EXTEND_TIMEOUT_USEC=30000000", "10 EXTEND_TIMEOUT_USEC=30000000"]);
        bench.become_ready();
        assert_eq!(only(&bench.run(20..60, true), "EXTEND"), [""; 0]);
    }

    #[test]
    fn a_start_that_hangs_gets_no_more_time() {
        let mut bench = Bench::new(None);
        bench.health.tick();
        let said = bench.run(0..60, false);
        assert_eq!(only(&said, "EXTEND").len(), 2, "at 0 and 10 s, the loop counts as live up to then");
    }

    #[test]
    fn a_drain_is_told_once_and_asks_for_time_while_the_loop_ticks() {
        let mut bench = Bench::new(None);
        bench.become_ready();
        bench.run(0..5, true);
        bench.health.set_draining();
        let said = bench.run(5..25, true);
        assert_eq!(only(&said, "STOPPING"), ["5 STOPPING=1"]);
        assert_eq!(only(&said, "EXTEND"), ["5 EXTEND_TIMEOUT_USEC=30000000", "15 EXTEND_TIMEOUT_USEC=30000000"]);
        assert_eq!(only(&said, "READY"), [""; 0]);
        let said = bench.run(25..100, false);
        assert_eq!(only(&said, "EXTEND").len(), 1, "at 25 s, the loop counts as live for 10 s more");
    }

    #[test]
    fn the_watchdog_is_fed_in_half_its_interval_while_the_loop_ticks_and_not_after() {
        let mut bench = Bench::new(Some(Duration::from_secs(10)));
        bench.become_ready();
        let said = bench.run(0..11, true);
        assert_eq!(only(&said, "WATCHDOG"), ["0 WATCHDOG=1", "5 WATCHDOG=1", "10 WATCHDOG=1"]);
        let said = bench.run(11..100, false);
        assert_eq!(only(&said, "WATCHDOG"), ["15 WATCHDOG=1", "20 WATCHDOG=1"], "live until 10 s after the last tick");
    }

    #[test]
    fn without_a_watchdog_none_is_fed() {
        let mut bench = Bench::new(None);
        assert_eq!(only(&bench.run(0..60, true), "WATCHDOG"), [""; 0]);
    }

    #[test]
    fn the_status_line_is_said_when_it_changes_and_not_too_often() {
        let mut bench = Bench::new(None);
        bench.become_ready();
        assert_eq!(only(&bench.run(0..10, true), "STATUS"), ["0 STATUS=ready"]);
        bench.health.report(Component::Database, Err("one".to_owned()));
        assert_eq!(only(&bench.run(10..11, true), "STATUS"), ["10 STATUS=not ready: database: one"]);
        bench.health.report(Component::Database, Err("two".to_owned()));
        bench.run(11..12, true);
        bench.health.report(Component::Database, Err("three".to_owned()));
        let said = bench.run(12..30, true);
        assert_eq!(only(&said, "STATUS"), ["15 STATUS=not ready: database: three"]);
    }

    /// In a process of its own, because the socket comes by environment.
    #[test]
    fn what_is_said_arrives_at_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "telemetry::systemd::tests::child_says_everything", "--ignored"])
            .env("NOTIFY_SOCKET", &path)
            .env("WATCHDOG_USEC", "30000000")
            .env_remove("WATCHDOG_PID")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "{output}");
        socket.set_nonblocking(true).unwrap();
        let mut received = Vec::new();
        let mut buffer = [0; 1024];
        while let Ok(length) = socket.recv(&mut buffer) {
            received.push(String::from_utf8(buffer[..length].to_vec()).unwrap());
        }
        assert_eq!(
            received,
            [
                "READY=1\nWATCHDOG=1\nSTATUS=ready\n",
                "STOPPING=1\nEXTEND_TIMEOUT_USEC=30000000\nWATCHDOG=1\nSTATUS=draining, 0 deliveries held\n"
            ]
        );
    }

    #[tokio::test]
    #[ignore = "the process that what_is_said_arrives_at_the_socket starts"]
    async fn child_says_everything() {
        let bench = Bench::new(None);
        bench.become_ready();
        let health = Arc::new(bench.health);
        let shutdown = CancellationToken::new();
        let first_look = run(health.clone(), shutdown.clone()).now_or_never();
        assert_eq!(first_look, None, "goes on until shutdown");
        health.set_draining();
        shutdown.cancel();
        let last_look = run(health, shutdown).now_or_never();
        assert_eq!(last_look, Some(()), "a drain that is over already is told, too");
    }
}
