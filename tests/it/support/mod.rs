//! What all tests stand on: a server, a client of it, the daemon, a faulty network, and the only way to wait.

// Each theme, and the benchmark, uses its own share of the helpers.
#![allow(dead_code, unused_imports, reason = "a helper that no theme needs at the moment is not worth a warning")]

pub mod daemon;
pub mod endpoint;
pub mod in_process;
pub mod keys;
pub mod nats;
pub mod proxy;

use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use daemon::{Daemon, DaemonSpec, Db, Finished};
pub use endpoint::{Act, Endpoint};
pub use nats::{Broker, NatsServer, ServerSpec};
pub use proxy::FaultProxy;

/// How long [`eventually`] waits by default. Only a bound for a hopeless wait: a slow machine must not fail a test.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than any test waits: with this `ack_wait`, what arrives again was handed back and not timed out.
pub const NEVER: Duration = Duration::from_secs(3600);

/// Waits until `probe` returns `Ok`, and returns what is in it; `Err` carries what was seen instead.
///
/// The only waiting helper. It panics with `what` and the last seen value, so that a failure explains itself.
pub async fn eventually<T, E: Debug>(what: &str, timeout: Duration, mut probe: impl AsyncFnMut() -> Result<T, E>) -> T {
    let deadline = Instant::now() + timeout;
    let mut last_seen = "nothing: the first look did not end".to_owned();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left.max(POLL), probe()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(seen)) => last_seen = format!("{seen:?}"),
            Err(_) => {}
        }
        assert!(Instant::now() < deadline, "not within {timeout:?}: {what}; last seen: {last_seen}");
        tokio::time::sleep(POLL).await;
    }
}

const POLL: Duration = Duration::from_millis(20);

/// The usual probe of [`eventually`]: is it this value by now?
pub fn equal<T: PartialEq>(seen: T, wanted: T) -> Result<(), T> {
    if seen == wanted { Ok(()) } else { Err(seen) }
}

/// Another usual probe: has it grown to this by now?
pub fn at_least<T: PartialOrd>(seen: T, wanted: T) -> Result<T, T> {
    if seen >= wanted { Ok(seen) } else { Err(seen) }
}

/// Sends `signal` to a process that we started. The shell's own `kill`, because std has no other signal than SIGKILL.
pub fn signal(pid: u32, signal: &str) {
    let status =
        std::process::Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", signal, &pid.to_string()]).status();
    assert!(status.expect("sh exists").success(), "cannot send {signal} to process {pid}");
}

/// A port of loopback on which nobody listens at the moment, and that no other test of this process gets. Below the ports that the
/// kernel gives out by itself (32768 and up on Linux): another test could get one of these before the port is used.
pub fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    loop {
        // Test processes that run beside each other begin at different ports.
        let number = std::process::id().wrapping_mul(97).wrapping_add(GIVEN.fetch_add(1, Ordering::Relaxed));
        let port = u16::try_from(FIRST + number % COUNT).expect("it is below 32768");
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
