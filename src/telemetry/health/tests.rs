//! [`Health`] with a clock that the test moves.

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
    health.report(Component::Nats, Ok(()));
    health.report(Component::Consumer, Ok(()));
    health.report(Component::Database, Ok(()));
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
        first_published_at: None,
        stream_created_at: SystemTime::now(),
        last_published_at: SystemTime::now(),
        oldest_published_at: None,
        taken_at: SystemTime::UNIX_EPOCH,
    }
}

fn commit(stream_seq: u64, messages: u64) -> Commit {
    Commit { stream_seq, messages, took: Duration::from_millis(7), ..Commit::default() }
}

fn components(health: &Health) -> Vec<String> {
    health.problems().iter().map(|problem| problem.component.clone()).collect()
}

#[test]
fn a_daemon_that_starts_is_not_ready_and_says_what_is_missing() {
    let (health, _hand) = starting();
    assert_eq!(components(&health), ["nats", "consumer", "database"]);
    health.report(Component::Nats, Ok(()));
    health.report(Component::Consumer, Ok(()));
    assert_eq!(health.status_line(), "not ready: database: the daemon is starting and has not opened the database yet");
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
    for component in HINDRANCES {
        let (health, _hand) = running();
        health.report(component, Err("disk\nfull".to_owned()));
        assert_eq!(health.problems(), [Problem::new(component, "disk\\nfull")]);
        let metrics = Metrics::new();
        health.record(&metrics);
        let shown = format!("order_processor_problem{{component=\"{}\"}} 1\n", component.name());
        assert!(metrics.render().contains(&shown), "{shown}");
        health.report(component, Ok(()));
        assert_eq!(health.problems(), [], "{component:?}");
        health.record(&metrics);
        assert!(!metrics.render().contains("order_processor_problem{component=\"nats\"} 1"), "{component:?}");
    }
}

proptest! {
    /// systemd reads an assignment a line: a cause with a line break could feed the watchdog.
    #[test]
    fn whatever_the_cause_it_takes_one_line_in_every_answer(cause in "(\\PC|[\r\n\0\u{85}\u{2028}]){0,20}") {
        let (health, _hand) = running();
        health.report(Component::Consumer, Err(cause.clone()));
        health.report(Component::Database, Err(cause));
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
    let cause = "no commit for 61 s, 5 messages pending, 0 deliveries held; check the handler".to_owned();
    assert_eq!(health.problems(), [Problem::new(Component::Progress, cause)]);
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
    health.committed(commit(20, 10));
    hand.advance(50);
    assert_eq!(health.problems(), []);
    hand.advance(11);
    assert_eq!(components(&health), ["progress"]);
    health.committed(commit(30, 10));
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
    assert!(cause.contains("max_ack_pending is used up by 8 deliveries, 7 of them wait for their retry"), "{cause}");
}

#[test]
fn deliveries_that_nobody_holds_are_named_after_their_time() {
    let (health, hand) = running();
    health.set_redelivery(Duration::from_secs(300));
    let elsewhere = |floor| ConsumerView { num_ack_pending: 3, ack_floor_consumer_seq: floor, ..view(0) };
    health.set_consumer(elsewhere(12));
    hand.advance(359);
    assert_eq!(health.problems(), []);
    health.set_consumer(elsewhere(13));
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
    health.report(Component::Database, Err("the file was moved".to_owned()));
    health.set_paused(Some(pause));
    hand.advance(600);
    let cause = "by ops@db1 since 2026-11-29T21:00:00Z: new\\ndisk".to_owned();
    assert_eq!(health.problems(), [Problem::new(Component::Paused, cause)]);
    assert!(health.is_live().is_err(), "its loop has to tick");
    health.set_paused(None);
    health.report(Component::Database, Ok(()));
    assert_eq!((health.problems(), health.is_live()), (vec![], Ok(())), "opening the database may take long");
}

#[test]
fn after_an_outage_the_worker_has_its_full_time_to_make_progress() {
    let (health, hand) = running();
    health.set_consumer(view(5));
    health.report(Component::Database, Err("disk full".to_owned()));
    hand.advance(600);
    assert_eq!(components(&health), ["database"]);
    health.report(Component::Database, Ok(()));
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
        health.report(Component::Nats, Err("cut".to_owned()));
        hand.advance(1);
        health.report(Component::Nats, Ok(()));
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
    assert_eq!(health.is_live(), Err("loop: the main loop has not run for 11 s".to_owned()));
    health.tick();
    assert_eq!(health.is_live(), Ok(()));
}

#[test]
fn the_status_holds_what_was_reported() {
    let (health, hand) = running();
    hand.advance(7);
    health.set_consumer(view(0));
    health.committed(commit(12, 2));
    health.committed(commit(11, 1));
    health.set_counts(Counts { processed_ids: 40, dead_letters: 2, ..Counts::default() });
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
    health.committed(commit(12, 2));
    health.set_counts(Counts { processed_ids: 40, dead_letters: 2, ..Counts::default() });
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
