//! What the daemon knows of itself: the one source for `/readyz`, `/livez`, `/status`, the gauges and systemd.
//!
//! Others report facts here and never verdicts; what counts as ready or live is decided in this file alone. No I/O.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Serialize, Serializer};

use crate::model::time;
use crate::model::view::ConsumerView;
use crate::store::Pause;
use crate::telemetry::log;
use crate::telemetry::metrics::Metrics;

/// Work without a commit for this long is no progress. Twice the story's `ack_wait` of 30 s: by then everything that
/// was held when the trouble began has been delivered again at least once, and still nothing came of it.
pub const STALL: Duration = Duration::from_secs(60);

/// A loop that is to tick every second and has not for this long is wedged, not busy.
pub const LIVE: Duration = Duration::from_secs(10);

/// The facts, shared by everybody who reports or reads them.
pub struct Health {
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    started: Instant,
    /// Milliseconds from `started` to the last tick, plus one; 0 before the first. Apart from the rest, so that a tick
    /// waits for nobody.
    last_tick_ms: AtomicU64,
    state: Mutex<State>,
}

impl Health {
    /// A daemon that starts: not ready until somebody reports a connection, a consumer and a database.
    pub fn new() -> Self {
        Self::with_clock(Instant::now)
    }

    /// The same with another clock, for tests that must not wait.
    pub fn with_clock(clock: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        let started = clock();
        let state = Mutex::new(State::new(started));
        Self { clock: Box::new(clock), started, last_tick_ms: AtomicU64::new(0), state }
    }

    /// The worker's loop is alive; to be called at least every second.
    pub fn tick(&self) {
        self.last_tick_ms.store(self.uptime_ms() + 1, Ordering::Relaxed);
    }

    /// Connected to the server, or why not.
    pub fn set_connected(&self, connected: Result<(), String>) {
        self.update(|state| state.connected = one_line(connected));
    }

    /// Bound to a consumer that passed the start gate, or why not.
    pub fn set_bound(&self, bound: Result<(), String>) {
        self.update(|state| state.bound = one_line(bound));
    }

    /// The database can be written, or why not.
    pub fn set_database(&self, database: Result<(), String>) {
        self.update(|state| state.database = one_line(database));
    }

    /// The handler can work, or why not. Taken for granted until reported otherwise.
    pub fn set_handler(&self, handler: Result<(), String>) {
        self.update(|state| state.handler = one_line(handler));
    }

    /// The server accepts our acknowledgements, or why not. Taken for granted until reported otherwise.
    pub fn set_acks(&self, acks: Result<(), String>) {
        self.update(|state| state.acks = one_line(acks));
    }

    /// The first signal to stop came. There is no way back.
    pub fn set_draining(&self) {
        self.update(|state| state.draining = true);
    }

    /// The daemon has let go of the database because an operator asked for it; `None` when it goes on.
    pub fn set_paused(&self, pause: Option<Pause>) {
        if pause.is_none() {
            // What comes now is a start, and may take as long as one.
            self.last_tick_ms.store(0, Ordering::Relaxed);
        }
        self.update(|state| state.pause = pause);
    }

    /// The server's latest report on consumer and stream.
    pub fn set_consumer(&self, view: ConsumerView) {
        self.update(|state| {
            let floor = |view: &ConsumerView| view.ack_floor_consumer_seq;
            if state.consumer.as_ref().map(floor) != Some(floor(&view)) {
                // Somebody gets on, if not this worker.
                state.away.working_since = None;
            }
            state.consumer = Some(view);
        });
    }

    /// How long a delivery may be away, with another worker or lost, before it comes again.
    pub fn set_redelivery(&self, longest: Duration) {
        self.update(|state| state.away_patience = STALL + longest);
    }

    /// How many deliveries are received and not acknowledged yet.
    pub fn set_held(&self, held: usize) {
        self.update(|state| state.held = held);
    }

    /// How many messages wait for their retry.
    pub fn set_parked(&self, parked: usize) {
        self.update(|state| state.parked = parked);
    }

    /// The server lets us ask for messages, or why not. Taken for granted until reported otherwise.
    pub fn set_pulls(&self, pulls: Result<(), String>) {
        self.update(|state| state.pulls = one_line(pulls));
    }

    /// A commit of `messages` outcomes, of which the highest stream sequence is `stream_seq`, is durable.
    pub fn committed(&self, stream_seq: u64, messages: u64, took: Duration) {
        self.update(|state| state.commit(stream_seq, messages, took));
    }

    /// Rows in `processed_ids` and `dead_letters`.
    pub fn set_counts(&self, processed_ids: u64, dead_letters: u64) {
        self.update(|state| state.counts = Some((processed_ids, dead_letters)));
    }

    /// Everything that keeps the daemon from being ready; nothing means ready.
    pub fn problems(&self) -> Vec<Problem> {
        self.state().problems((self.clock)())
    }

    /// Whether the loop has ticked within [`LIVE`].
    ///
    /// Before the first tick the answer is yes: a migration that takes minutes is no wedged loop, and a restart in the
    /// middle of it would only make it begin again.
    pub fn is_live(&self) -> Result<(), String> {
        let Some(last_tick_ms) = self.last_tick_ms.load(Ordering::Relaxed).checked_sub(1) else { return Ok(()) };
        let silent = Duration::from_millis(self.uptime_ms().saturating_sub(last_tick_ms));
        if silent <= LIVE { Ok(()) } else { Err(format!("loop: no tick for {} s", silent.as_secs())) }
    }

    /// Everything at once, for `/status`.
    pub fn status(&self) -> Status {
        let live = self.is_live().is_ok();
        let uptime_seconds = self.uptime_ms() / 1000;
        let state = self.state();
        let problems = state.problems((self.clock)());
        Status {
            version: env!("CARGO_PKG_VERSION"),
            uptime_seconds,
            ready: problems.is_empty(),
            live,
            draining: state.draining,
            pause: state.pause.clone(),
            problems,
            held: state.held,
            parked: state.parked,
            committed_stream_seq: state.committed_stream_seq,
            committed_messages: state.committed_messages,
            last_commit_at: state.last_commit_at,
            last_batch_messages: state.last_batch_messages,
            last_batch_seconds: state.last_batch_took,
            processed_ids: state.counts.map(|(processed_ids, _)| processed_ids),
            dead_letters: state.counts.map(|(_, dead_letters)| dead_letters),
            consumer: state.consumer.clone(),
        }
    }

    /// Whether the first signal to stop came.
    pub fn is_draining(&self) -> bool {
        self.state().draining
    }

    /// Whether an operator has paused the daemon.
    pub fn is_paused(&self) -> bool {
        self.state().pause.is_some()
    }

    /// One line for systemd's `STATUS=`.
    pub fn status_line(&self) -> String {
        let state = self.state();
        if state.draining {
            return format!("draining, {} deliveries held", state.held);
        }
        let problems = state.problems((self.clock)());
        if !problems.is_empty() {
            let problems: Vec<String> = problems.iter().map(Problem::to_string).collect();
            return format!("not ready: {}", problems.join("; "));
        }
        match &state.consumer {
            Some(view) => format!("ack floor {}, pending {}, ready", view.ack_floor_stream_seq, view.num_pending),
            None => "ready".to_owned(),
        }
    }

    /// Puts what is known here into the gauges, so that a scrape and `/readyz` can never disagree.
    pub fn record(&self, metrics: &Metrics) {
        let state = self.state();
        metrics.ready.set(flag(state.problems((self.clock)()).is_empty()));
        metrics.draining.set(flag(state.draining));
        metrics.paused.set(flag(state.pause.is_some()));
        metrics.log_lines_dropped.absolute(log::dropped_lines());
        metrics.nats_connected.set(flag(state.connected.is_ok()));
        metrics.held_deliveries.set(state.held as f64);
        metrics.parked_messages.set(state.parked as f64);
        metrics.committed_stream_seq.set(state.committed_stream_seq as f64);
        if let Some(at) = state.last_commit_at {
            metrics.last_commit_timestamp_seconds.set(unix_seconds(at));
        }
        if let Some((processed_ids, dead_letters)) = state.counts {
            metrics.processed_ids.set(processed_ids as f64);
            metrics.dead_letters.set(dead_letters as f64);
        }
        if let Some(view) = &state.consumer {
            record_view(view, metrics);
        }
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        let now = (self.clock)();
        let mut state = self.state();
        change(&mut state);
        let (has_work, hindered) = (state.has_work(), state.is_hindered());
        state.stall.observe(has_work, hindered, now);
        let is_away = state.is_away();
        state.away.observe(is_away, hindered, now);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is a plain assignment, so a panic elsewhere cannot have left half of one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn uptime_ms(&self) -> u64 {
        let uptime = (self.clock)().saturating_duration_since(self.started);
        u64::try_from(uptime.as_millis()).unwrap_or(u64::MAX)
    }
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

/// One thing that keeps the daemon from being ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub component: &'static str,
    pub cause: String,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.component, self.cause)
    }
}

/// The body of `/status`. Absent values are not known yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    pub version: &'static str,
    pub uptime_seconds: u64,
    pub ready: bool,
    pub live: bool,
    pub draining: bool,
    pub pause: Option<Pause>,
    pub problems: Vec<Problem>,
    pub held: usize,
    pub parked: usize,
    pub committed_stream_seq: u64,
    pub committed_messages: u64,
    #[serde(serialize_with = "time::serialize_optional")]
    pub last_commit_at: Option<SystemTime>,
    pub last_batch_messages: u64,
    /// How long the last batch took, from claim to commit.
    #[serde(serialize_with = "serialize_seconds")]
    pub last_batch_seconds: Duration,
    pub processed_ids: Option<u64>,
    pub dead_letters: Option<u64>,
    pub consumer: Option<ConsumerView>,
}

struct State {
    connected: Result<(), String>,
    bound: Result<(), String>,
    database: Result<(), String>,
    acks: Result<(), String>,
    handler: Result<(), String>,
    pulls: Result<(), String>,
    draining: bool,
    pause: Option<Pause>,
    consumer: Option<ConsumerView>,
    held: usize,
    parked: usize,
    committed_stream_seq: u64,
    committed_messages: u64,
    last_commit_at: Option<SystemTime>,
    last_batch_messages: u64,
    last_batch_took: Duration,
    counts: Option<(u64, u64)>,
    stall: StallClock,
    away: StallClock,
    away_patience: Duration,
}

impl State {
    fn new(now: Instant) -> Self {
        Self {
            connected: Err("starting, not connected yet".to_owned()),
            bound: Err("starting, no consumer bound yet".to_owned()),
            database: Err("starting, not opened yet".to_owned()),
            acks: Ok(()),
            handler: Ok(()),
            pulls: Ok(()),
            draining: false,
            pause: None,
            consumer: None,
            held: 0,
            parked: 0,
            committed_stream_seq: 0,
            committed_messages: 0,
            last_commit_at: None,
            last_batch_messages: 0,
            last_batch_took: Duration::ZERO,
            counts: None,
            stall: StallClock { working_since: None, hindered_since: Some(now) },
            away: StallClock { working_since: None, hindered_since: Some(now) },
            away_patience: STALL,
        }
    }

    fn problems(&self, now: Instant) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.draining {
            problems.push(Problem { component: "shutdown", cause: "draining".to_owned() });
        }
        if let Some(pause) = &self.pause {
            problems.extend(one_line(Err(pause.to_string())).err().map(|cause| Problem { component: "paused", cause }));
        }
        let reported = [
            ("nats", &self.connected),
            ("consumer", &self.bound),
            ("pulls", &self.pulls),
            ("acks", &self.acks),
            ("database", &self.database),
            ("handler", &self.handler),
        ];
        for (component, fact) in reported {
            // Of the database a paused daemon knows nothing but what was before.
            let is_known = self.pause.is_none() || component != "database";
            if let Err(cause) = fact
                && is_known
            {
                problems.push(Problem { component, cause: cause.clone() });
            }
        }
        let stalled = self.stall.stalled_for(now);
        if stalled > STALL {
            let num_pending = self.consumer.as_ref().map_or(0, |view| view.num_pending);
            let (held, seconds) = (self.held, stalled.as_secs());
            let mut cause = format!("num_pending {num_pending}, {held} deliveries held, no commit for {seconds} s");
            if let Some(view) = self.consumer.as_ref().filter(|view| view.is_full()) {
                let (out, parked) = (view.num_ack_pending, self.parked);
                cause +=
                    &format!("; max_ack_pending is used up by {out} deliveries, {parked} of them wait for their retry");
            }
            problems.push(Problem { component: "progress", cause });
        }
        let away = self.away.stalled_for(now);
        if away > self.away_patience {
            let out = self.consumer.as_ref().map_or(0, |view| view.num_ack_pending);
            let cause = format!(
                "the server waits for {out} deliveries that are not here, and none came again or was acknowledged for {} s",
                away.as_secs()
            );
            problems.push(Problem { component: "progress", cause });
        }
        problems
    }

    fn commit(&mut self, stream_seq: u64, messages: u64, took: Duration) {
        self.last_batch_messages = messages;
        self.last_batch_took = took;
        self.committed_stream_seq = self.committed_stream_seq.max(stream_seq);
        self.committed_messages += messages;
        self.last_commit_at = Some(SystemTime::now());
        // The next look at the facts starts it again if there is more to do.
        self.stall.working_since = None;
        self.away.working_since = None;
    }

    /// Deliveries that the server waits for and nobody here holds are no work of ours: they come back after `ack_wait`
    /// or a nak's delay. See [`State::is_away`] for when they do not.
    fn has_work(&self) -> bool {
        self.held > 0 || self.consumer.as_ref().is_some_and(|view| view.num_pending > 0)
    }

    /// All that is left to do is with somebody else, or lost on the way.
    fn is_away(&self) -> bool {
        let away = |view: &ConsumerView| view.num_pending == 0 && view.num_ack_pending > self.parked as u64;
        self.held == 0 && self.consumer.as_ref().is_some_and(away)
    }

    fn is_hindered(&self) -> bool {
        if self.pulls.is_err() {
            return true;
        }
        let paused = self.pause.is_some() || self.consumer.as_ref().is_some_and(|view| view.paused);
        paused
            || self.connected.is_err()
            || self.bound.is_err()
            || self.acks.is_err()
            || self.database.is_err()
            || self.handler.is_err()
    }
}

/// Measures how long there was work and no commit while nothing known was in the way.
///
/// Time in which something was in the way (no connection, no database, a paused consumer) is left out, not started
/// over: after an outage the worker gets its full time, yet a connection that is cut every few seconds by the same
/// message still counts as a stall in the end.
struct StallClock {
    /// When work first appeared, or the last commit, whichever is later; moved forward by every hindrance since.
    working_since: Option<Instant>,
    hindered_since: Option<Instant>,
}

impl StallClock {
    fn observe(&mut self, has_work: bool, hindered: bool, now: Instant) {
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

    fn stalled_for(&self, now: Instant) -> Duration {
        let until = self.hindered_since.unwrap_or(now);
        self.working_since.map_or(Duration::ZERO, |since| until.saturating_duration_since(since))
    }
}

/// Shows what the server says.
fn record_view(view: &ConsumerView, metrics: &Metrics) {
    metrics.consumer_ack_floor_stream_seq.set(view.ack_floor_stream_seq as f64);
    metrics.consumer_ack_floor_consumer_seq.set(view.ack_floor_consumer_seq as f64);
    metrics.consumer_delivered_stream_seq.set(view.delivered_stream_seq as f64);
    metrics.consumer_num_pending.set(view.num_pending as f64);
    metrics.consumer_num_ack_pending.set(view.num_ack_pending as f64);
    metrics.consumer_num_redelivered.set(view.num_redelivered as f64);
    metrics.consumer_num_waiting.set(view.num_waiting as f64);
    metrics.consumer_max_ack_pending.set(view.max_ack_pending.unwrap_or(0) as f64);
    metrics.consumer_paused.set(flag(view.paused));
    metrics.stream_first_seq.set(view.stream_first_seq as f64);
    metrics.stream_last_seq.set(view.stream_last_seq as f64);
    let age = view.oldest_published_at.and_then(|at| at.elapsed().ok()).unwrap_or_default();
    metrics.oldest_pending_seconds.set(age.as_secs_f64());
    metrics.consumer_info_timestamp_seconds.set(unix_seconds(view.taken_at));
}

/// A cause goes into line-based answers, so it must not bring lines of its own.
fn one_line(fact: Result<(), String>) -> Result<(), String> {
    fact.map_err(|cause| cause.replace(|c: char| c.is_control(), " "))
}

fn flag(fact: bool) -> f64 {
    if fact { 1.0 } else { 0.0 }
}

fn unix_seconds(at: SystemTime) -> f64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

fn serialize_seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    /// A clock that moves only when told to.
    #[derive(Clone)]
    struct Hand(Arc<Mutex<Instant>>);

    impl Hand {
        fn advance(&self, seconds: u64) {
            *self.0.lock().unwrap() += Duration::from_secs(seconds);
        }
    }

    fn starting() -> (Health, Hand) {
        let hand = Hand(Arc::new(Mutex::new(Instant::now())));
        let clock = hand.clone();
        (Health::with_clock(move || *clock.0.lock().unwrap()), hand)
    }

    fn running() -> (Health, Hand) {
        let (health, hand) = starting();
        health.set_connected(Ok(()));
        health.set_bound(Ok(()));
        health.set_database(Ok(()));
        (health, hand)
    }

    fn view(num_pending: u64) -> ConsumerView {
        ConsumerView {
            ack_floor_stream_seq: 10,
            ack_floor_consumer_seq: 12,
            delivered_stream_seq: 10,
            num_pending,
            num_ack_pending: 0,
            num_redelivered: 0,
            num_waiting: 1,
            stream_first_seq: 1,
            stream_last_seq: 10 + num_pending,
            max_ack_pending: None,
            paused: false,
            last_published_at: SystemTime::now(),
            oldest_published_at: None,
            taken_at: SystemTime::UNIX_EPOCH,
        }
    }

    fn components(health: &Health) -> Vec<&'static str> {
        health.problems().iter().map(|problem| problem.component).collect()
    }

    #[test]
    fn a_daemon_that_starts_is_not_ready_and_says_what_is_missing() {
        let (health, _hand) = starting();
        assert_eq!(components(&health), ["nats", "consumer", "database"]);
        health.set_connected(Ok(()));
        health.set_bound(Ok(()));
        assert_eq!(health.status_line(), "not ready: database: starting, not opened yet");
    }

    #[test]
    fn an_idle_daemon_stays_ready_for_ever() {
        let (health, hand) = running();
        health.set_consumer(view(0));
        hand.advance(86_400);
        assert_eq!(health.problems(), []);
        assert_eq!(health.status_line(), "ack floor 10, pending 0, ready");
    }

    #[test]
    fn each_reported_failure_is_named_and_goes_when_it_is_over() {
        type Setter = fn(&Health, Result<(), String>);
        let setters: [(&str, Setter); 5] = [
            ("nats", Health::set_connected),
            ("consumer", Health::set_bound),
            ("acks", Health::set_acks),
            ("handler", Health::set_handler),
            ("database", Health::set_database),
        ];
        for (component, set) in setters {
            let (health, _hand) = running();
            set(&health, Err("disk\nfull".to_owned()));
            assert_eq!(health.problems(), [Problem { component, cause: "disk full".to_owned() }]);
            set(&health, Ok(()));
            assert_eq!(health.problems(), [], "{component}");
        }
    }

    proptest! {
        /// systemd reads an assignment a line: a cause with a line break could feed the watchdog.
        #[test]
        fn whatever_the_cause_it_takes_one_line_in_every_answer(cause in "(\\PC|[\r\n\0\u{85}\u{2028}]){0,20}") {
            let (health, _hand) = running();
            health.set_bound(Err(cause.clone()));
            health.set_database(Err(cause));
            let said = health.problems().iter().map(Problem::to_string).chain([health.status_line()]).collect::<Vec<_>>();
            prop_assert_eq!(said.len(), 3);
            for line in said {
                prop_assert!(!line.contains(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn draining_is_not_ready() {
        let (health, _hand) = running();
        health.set_held(3);
        health.set_draining();
        assert_eq!(components(&health), ["shutdown"]);
        assert_eq!(health.status_line(), "draining, 3 deliveries held");
    }

    #[test]
    fn work_without_a_commit_is_a_stall_measured_from_when_it_appeared() {
        let (health, hand) = running();
        hand.advance(3600);
        health.set_consumer(view(5));
        hand.advance(60);
        assert_eq!(health.problems(), []);
        hand.advance(1);
        let cause = "num_pending 5, 0 deliveries held, no commit for 61 s".to_owned();
        assert_eq!(health.problems(), [Problem { component: "progress", cause }]);
    }

    #[test]
    fn held_deliveries_without_a_commit_are_a_stall() {
        let (health, hand) = running();
        health.set_held(1);
        hand.advance(61);
        assert_eq!(components(&health), ["progress"]);
    }

    #[test]
    fn a_commit_starts_the_measurement_anew() {
        let (health, hand) = running();
        health.set_consumer(view(500));
        hand.advance(50);
        health.committed(20, 10, Duration::from_millis(7));
        hand.advance(50);
        assert_eq!(health.problems(), []);
        hand.advance(11);
        assert_eq!(components(&health), ["progress"]);
        health.committed(30, 10, Duration::from_millis(7));
        assert_eq!(health.problems(), []);
    }

    #[test]
    fn work_that_went_away_leaves_no_stall_behind() {
        let (health, hand) = running();
        health.set_consumer(view(5));
        hand.advance(50);
        health.set_consumer(view(0));
        hand.advance(50);
        health.set_consumer(view(5));
        hand.advance(50);
        assert_eq!(health.problems(), []);
    }

    #[test]
    fn retries_that_take_all_places_are_named() {
        let (health, hand) = running();
        health.set_parked(7);
        health.set_consumer(ConsumerView { num_ack_pending: 8, max_ack_pending: Some(8), ..view(5) });
        hand.advance(61);
        let cause = &health.problems()[0].cause;
        assert!(
            cause.contains("max_ack_pending is used up by 8 deliveries, 7 of them wait for their retry"),
            "{cause}"
        );
    }

    #[test]
    fn deliveries_that_nobody_here_holds_and_that_do_not_come_again_are_named_after_their_time() {
        let (health, hand) = running();
        health.set_redelivery(Duration::from_secs(300));
        let away = |floor| ConsumerView { num_ack_pending: 3, ack_floor_consumer_seq: floor, ..view(0) };
        health.set_consumer(away(12));
        hand.advance(359);
        assert_eq!(health.problems(), []);
        health.set_consumer(away(13));
        hand.advance(359);
        assert_eq!(health.problems(), [], "another worker gets on");
        hand.advance(2);
        assert_eq!(health.problems()[0].component, "progress");
        health.set_parked(3);
        assert_eq!(health.problems(), [], "they wait for their retry");
    }

    #[test]
    fn a_paused_consumer_does_not_stall() {
        let (health, hand) = running();
        health.set_consumer(ConsumerView { paused: true, ..view(5) });
        hand.advance(600);
        assert_eq!(health.problems(), []);
        health.set_consumer(view(5));
        hand.advance(60);
        assert_eq!(health.problems(), []);
        hand.advance(1);
        assert_eq!(components(&health), ["progress"]);
    }

    #[test]
    fn a_paused_daemon_is_not_ready_says_who_and_why_and_does_not_stall() {
        let (health, hand) = running();
        let pause = Pause { by: "ops@db1".into(), at: "2026-11-29T21:00:00Z".into(), reason: Some("new\ndisk".into()) };
        health.set_consumer(view(5));
        health.tick();
        health.set_database(Err("the file was moved".to_owned()));
        health.set_paused(Some(pause));
        hand.advance(600);
        let cause = "by ops@db1 since 2026-11-29T21:00:00Z: new disk".to_owned();
        assert_eq!(health.problems(), [Problem { component: "paused", cause }]);
        assert!(health.is_live().is_err(), "its loop has to tick");
        health.set_paused(None);
        health.set_database(Ok(()));
        assert_eq!((health.problems(), health.is_live()), (vec![], Ok(())), "opening the database may take long");
    }

    #[test]
    fn after_an_outage_the_worker_has_its_full_time_to_make_progress() {
        let (health, hand) = running();
        health.set_consumer(view(5));
        health.set_database(Err("disk full".to_owned()));
        hand.advance(600);
        assert_eq!(components(&health), ["database"]);
        health.set_database(Ok(()));
        hand.advance(60);
        assert_eq!(health.problems(), []);
        hand.advance(1);
        assert_eq!(components(&health), ["progress"]);
    }

    #[test]
    fn a_connection_cut_over_and_over_is_a_stall_in_the_end() {
        let (health, hand) = running();
        health.set_consumer(view(5));
        for _ in 0..7 {
            hand.advance(9);
            health.set_connected(Err("cut".to_owned()));
            hand.advance(1);
            health.set_connected(Ok(()));
        }
        assert_eq!(components(&health), ["progress"]);
    }

    #[test]
    fn a_loop_without_a_tick_is_not_live_but_a_long_start_is() {
        let (health, hand) = running();
        hand.advance(600);
        assert_eq!(health.is_live(), Ok(()));
        health.tick();
        hand.advance(10);
        assert_eq!(health.is_live(), Ok(()));
        hand.advance(1);
        assert_eq!(health.is_live(), Err("loop: no tick for 11 s".to_owned()));
        health.tick();
        assert_eq!(health.is_live(), Ok(()));
    }

    #[test]
    fn the_status_holds_what_was_reported() {
        let (health, hand) = running();
        hand.advance(7);
        health.set_consumer(view(0));
        health.committed(12, 2, Duration::from_millis(7));
        health.committed(11, 1, Duration::from_millis(7));
        health.set_counts(40, 2);
        let status = serde_json::to_value(health.status()).unwrap();
        assert_eq!(status["ready"], true);
        assert_eq!(status["uptime_seconds"], 7);
        assert_eq!(status["committed_stream_seq"], 12);
        assert_eq!(status["committed_messages"], 3);
        assert_eq!((&status["last_batch_messages"], &status["last_batch_seconds"]), (&1.into(), &0.007.into()));
        assert_eq!((&status["processed_ids"], &status["dead_letters"]), (&40.into(), &2.into()));
        assert_eq!(status["consumer"]["ack_floor_stream_seq"], 10);
        assert_eq!(status["consumer"]["taken_at"], "1970-01-01T00:00:00.000Z");
        assert!(status["last_commit_at"].is_string());
    }

    #[test]
    fn the_gauges_say_what_the_status_says() {
        let (health, _hand) = running();
        let metrics = Metrics::new();
        health.set_consumer(view(5));
        health.committed(12, 2, Duration::from_millis(7));
        health.set_counts(40, 2);
        health.record(&metrics);
        let text = metrics.render();
        for line in [
            "ready 1",
            "nats_connected 1",
            "draining 0",
            "consumer_num_pending 5",
            "committed_stream_seq 12",
            "processed_ids 40",
            "dead_letters 2",
        ] {
            assert!(text.contains(&format!("\norder_processor_{line}\n")), "{line}");
        }
        health.set_draining();
        health.record(&metrics);
        assert!(metrics.render().contains("\norder_processor_ready 0\n"));
    }
}
