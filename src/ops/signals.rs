//! Signals. The first SIGTERM or SIGINT drains, the second ends the process immediately. SIGHUP reloads the log level, or drains if
//! the daemon runs on a terminal: it then means that the terminal is gone.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook_tokio::Signals;
use tokio_util::sync::CancellationToken;

/// The exit code of the second signal: the drain was cut short. Safe, since nothing is acknowledged that is not durable.
const CUT_SHORT: i32 = 1;

/// Listens for signals from now on, until the process ends. `stop` is cancelled by the first one that asks for it.
///
/// As process 1 in a container the kernel ignores signals without a handler, so call this before anything that waits.
///
/// # Errors
/// When the handlers cannot be installed.
pub fn listen(stop: CancellationToken, reload: impl Fn() + Send + 'static) -> io::Result<()> {
    let armed = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // Before the stream below, and in the handler itself: the second signal works even if the runtime is stuck.
        signal_hook::flag::register_conditional_shutdown(signal, CUT_SHORT, armed.clone())?;
        signal_hook::flag::register(signal, armed.clone())?;
    }
    // Now: when the signal comes, the terminal is gone.
    let on_terminal = io::stdin().is_terminal() || io::stderr().is_terminal();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    // A signal between the first handlers and the stream is not in the stream.
    if armed.load(Ordering::SeqCst) {
        stop.cancel();
    }
    // The task owns the stream to the end of the process: dropping it would leave SIGTERM ignored.
    tokio::spawn(async move {
        while let Some(signal) = signals.next().await {
            if signal == SIGHUP && !on_terminal {
                reload();
            } else if !stop.is_cancelled() {
                // First, since a log that nobody reads may delay the line.
                stop.cancel();
                tracing::info!(
                    signal = signal_hook::low_level::signal_name(signal),
                    "stopping; a second signal ends the process immediately"
                );
            }
        }
    });
    Ok(())
}
