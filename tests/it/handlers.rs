//! The seam for business logic: what becomes of an order when its handler fails, is slow, panics or breaks a constraint.

use std::time::Duration;

use async_nats::jetstream::consumer;
use sqlx::{Connection, Row};

use crate::support::in_process::{Bench, Clerk, SLOW};
use crate::support::nats::{consumer_config, headers, impatient_consumer_config, patient_consumer_config};
use crate::support::{PATIENCE, at_least, equal, eventually};

/// `retry.max_attempts` for orders that fail until the test lets them pass.
const MANY: &str = "1000";
/// The least that jitter leaves of a retry delay.
const JITTER_MIN: f64 = 0.8;

#[tokio::test]
async fn a_locked_database_acknowledges_spends_and_redelivers_nothing() {
    let bench = Bench::new(impatient_consumer_config(), &[]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    worker.ready().await;
    let writer = bench.spec.db().lock().await;
    bench.broker.publish_numbered(1..=5).await;
    worker.not_ready("database").await;
    // The second refusal: by then the lock has outlasted the busy timeout twice and `ack_wait` four times.
    worker.metric("db_errors_total{class=\"busy\"}", 2.0).await;

    let info = bench.broker.consumer_info().await;
    assert_eq!((info.num_ack_pending, info.ack_floor.stream_sequence), (5, 0), "held, none acknowledged");
    assert_eq!(info.delivered.consumer_sequence, 5, "in-progress has kept each to its first delivery");
    assert_eq!(clerk.runs().len(), 0);

    writer.close().await.unwrap();
    bench.broker.acknowledged(5).await;
    worker.ready().await;
    bench.applied_once(5).await;
    bench.no_failures().await;
    assert_eq!(bench.broker.consumer_info().await.delivered.consumer_sequence, 5, "each delivered once");
    worker.drain().await;
}

#[tokio::test]
async fn an_order_that_breaks_a_constraint_is_a_dead_letter_alone() {
    // One constraint is checked by the statement, the other one by the commit.
    for (payload, doing, constraint) in [
        ("forbidden 3", "running a statement of the handler", "CHECK constraint failed"),
        ("orphan 3", "committing", "FOREIGN KEY constraint failed"),
    ] {
        let bench = Bench::new(consumer_config(), &[]).await;
        let clerk = Clerk::new();
        let worker = bench.start(&clerk).await;
        bench.one_batch(&worker, &clerk, &["plain 2", payload, "plain 4"]).await;
        bench.broker.acknowledged(4).await;
        let row = bench.dead_letter().await;
        assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("stream_seq")), ("permanent", 3));
        let error: String = row.get("error");
        assert!(error.contains(doing) && error.contains(constraint), "{error}");
        assert_eq!(bench.effects().await, ["plain 2", "plain 4", "plug"]);
        bench.applied_once(3).await;
        worker.ready().await;
        worker.drain().await;
    }
}

#[tokio::test]
async fn a_failing_order_is_retried_while_its_batch_is_applied() {
    let bench = Bench::new(consumer_config(), &[("retry.max_attempts", MANY), ("retry.min_delay", "100ms")]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.one_batch(&worker, &clerk, &["plain 2", "retry 3", "plain 4"]).await;
    // The plug and both neighbours are through, and only the failing order is not.
    eventually("the neighbours are acknowledged", PATIENCE, async || {
        let info = bench.broker.consumer_info().await;
        equal((info.ack_floor.stream_sequence, info.num_ack_pending, info.num_pending), (2, 1, 0))
    })
    .await;
    assert_eq!(bench.effects().await, ["plain 2", "plain 4", "plug"], "the failing order left no effect");
    eventually("it is retried", PATIENCE, async || at_least(clerk.runs_of("retry 3").len(), 4)).await;
    assert_eq!(bench.spec.db().texts("SELECT last_error FROM attempts").await, ["out of stock"]);
    assert_eq!(bench.effects().await.len(), 3, "still none");

    clerk.mend();
    bench.broker.acknowledged(4).await;
    bench.applied_once(4).await;
    bench.no_failures().await;
    assert_eq!(clerk.runs_of("plain 4").len(), 2, "with the batch, alone, and never again");
    worker.drain().await;
}

#[tokio::test]
async fn a_permanent_failure_is_a_whole_dead_letter_and_terminated() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let mut terminated = bench.terminations().await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    let payload = b"permanent \xff\x00 failure".to_vec();
    let pairs = [("Nats-Msg-Id", "order-1"), ("X-Trace", "a"), ("X-Trace", "b")];
    bench.broker.publish_to("ORDERS.changed", headers(&pairs), payload.clone()).await;
    bench.broker.publish("plain 2").await;
    bench.broker.acknowledged(2).await;

    let row = bench.dead_letter().await;
    assert_eq!(row.get::<String, _>("id"), "order-1");
    assert_eq!(row.get::<String, _>("subject"), "ORDERS.changed");
    assert_eq!((row.get::<i64, _>("stream_seq"), row.get::<i64, _>("delivered")), (1, 1));
    assert_eq!(row.get::<String, _>("reason"), "permanent");
    assert_eq!(row.get::<String, _>("error"), "no such product");
    assert_eq!(row.get::<Vec<u8>, _>("payload"), payload);
    let kept: serde_json::Value = serde_json::from_str(row.get("headers")).unwrap();
    assert_eq!(kept, serde_json::json!({"Nats-Msg-Id": ["order-1"], "X-Trace": ["a", "b"]}));

    assert_eq!(terminated.next().await, (1, "permanent".to_owned()));
    assert_eq!(bench.effects().await, ["plain 2"]);
    assert_eq!(bench.broker.consumer_info().await.delivered.consumer_sequence, 2, "never delivered again");
    worker.drain().await;
}

#[tokio::test]
async fn retry_delays_grow() {
    let bench = Bench::new(consumer_config(), &[("retry.max_attempts", "5"), ("retry.min_delay", "100ms")]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.broker.publish("retry 1").await;
    bench.spec.db().has("dead_letters", 1).await;
    assert_promised(&clerk.gaps("retry 1"), Duration::from_millis(100), 4);
    worker.drain().await;
}

#[tokio::test]
async fn a_backoff_list_of_the_consumer_is_not_added_to_retry_delays() {
    let backoff = vec![Duration::from_secs(1), Duration::from_secs(6)];
    let consumer = consumer::pull::Config { backoff, ..consumer_config() };
    let bench = Bench::new(consumer, &[("retry.max_attempts", "4"), ("retry.min_delay", "300ms")]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.broker.publish("retry 1").await;
    bench.spec.db().has("dead_letters", 1).await;
    let gaps = clerk.gaps("retry 1");
    assert_promised(&gaps, Duration::from_millis(300), 3);
    // The server would add the 5 s between the steps of the list from the second delivery on.
    assert!(gaps.iter().all(|gap| *gap < Duration::from_secs(5)), "{gaps:?}");
    worker.drain().await;
}

/// That there are `count` gaps and that each is as long as the policy promises, however the jitter fell.
fn assert_promised(gaps: &[Duration], min_delay: Duration, count: usize) {
    assert_eq!(gaps.len(), count, "{gaps:?}");
    for (doublings, gap) in (0..).zip(gaps) {
        let promised = (min_delay * (1 << doublings)).mul_f64(JITTER_MIN);
        assert!(*gap >= promised, "gap {doublings} of {gaps:?} is shorter than {promised:?}");
    }
}

#[tokio::test]
async fn attempts_are_counted_over_restarts_and_end_in_a_dead_letter() {
    let settings = [("retry.max_attempts", "4"), ("retry.min_delay", "500ms"), ("retry.max_delay", "500ms")];
    let bench = Bench::new(consumer_config(), &settings).await;
    let mut terminated = bench.terminations().await;
    let (before, after) = (Clerk::new(), Clerk::new());
    let worker = bench.start(&before).await;
    bench.broker.publish("retry 1").await;
    let failed = async || bench.spec.db().scalar("SELECT coalesce(max(failed), 0) FROM attempts").await;
    eventually("two failures are on record", PATIENCE, async || at_least(failed().await, 2)).await;
    worker.drain().await;
    assert_eq!(failed().await, before.runs().len() as i64, "each run of the handler is one attempt");

    let worker = bench.start(&after).await;
    bench.broker.acknowledged(1).await;
    assert!(!after.runs().is_empty(), "the restart was in the middle");
    assert_eq!(before.runs().len() + after.runs().len(), 4, "runs in all");
    let row = bench.dead_letter().await;
    assert_eq!(row.get::<String, _>("reason"), "attempts_exhausted");
    assert_eq!(row.get::<String, _>("error"), "out of stock");
    assert_eq!(row.get::<Vec<u8>, _>("payload"), b"retry 1");
    assert_eq!(terminated.next().await, (1, "attempts_exhausted".to_owned()));
    assert_eq!(bench.spec.db().count("attempts").await, 0, "nothing is left to count");
    assert_eq!(bench.effects().await, [""; 0]);
    worker.drain().await;
}

#[tokio::test]
async fn a_failure_on_the_last_delivery_is_a_dead_letter() {
    let consumer = consumer::pull::Config { max_deliver: 3, ..consumer_config() };
    let bench = Bench::new(consumer, &[("retry.max_attempts", "2")]).await;
    let mut terminated = bench.terminations().await;
    bench.broker.publish("retry 1").await;
    for _ in 0..2 {
        bench.hand_back(&[1]).await;
    }
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.broker.acknowledged(1).await;
    let row = bench.dead_letter().await;
    assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("delivered")), ("last_delivery", 3));
    assert_eq!(row.get::<String, _>("error"), "out of stock");
    assert_eq!(clerk.runs().len(), 1, "one of two attempts");
    assert_eq!(terminated.next().await, (1, "last_delivery".to_owned()));
    worker.drain().await;
}

#[tokio::test]
async fn at_a_stop_a_last_delivery_is_finished_and_not_handed_back() {
    let consumer = consumer::pull::Config { max_deliver: 2, ..patient_consumer_config() };
    let bench = Bench::new(consumer, &[("retry.max_attempts", "1")]).await;
    for text in ["plug", "plain 2", "plain 3"] {
        bench.broker.publish(text).await;
    }
    // The plug stays ahead: what was handed back first comes first.
    bench.hand_back(&[1, 2]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    worker.held(3).await;
    worker.stop.cancel();
    worker.draining().await;
    clerk.let_pass(1);
    worker.drain().await;
    let effects = bench.effects().await;
    assert!(effects.contains(&"plain 2".to_owned()), "it would never come again: {effects:?}");

    let worker = bench.start(&clerk).await;
    bench.broker.acknowledged(3).await;
    bench.applied_once(3).await;
    bench.no_failures().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_panic_is_a_retry_and_the_worker_continues() {
    let settings = [("retry.max_attempts", MANY), ("retry.min_delay", "100ms"), ("retry.max_delay", "100ms")];
    let bench = Bench::new(consumer_config(), &settings).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.broker.publish("panic 1").await;
    eventually("it is retried", PATIENCE, async || at_least(clerk.runs_of("panic 1").len(), 3)).await;
    bench.broker.publish("plain 2").await;
    bench.spec.db().has("effects", 1).await;
    assert_eq!(bench.effects().await, ["plain 2"], "what the panic left half done is undone");
    let errors = bench.spec.db().texts("SELECT last_error FROM attempts").await;
    assert_eq!(errors, ["the handler panicked: drawer 1 is stuck"]);

    clerk.mend();
    bench.broker.acknowledged(2).await;
    bench.applied_once(2).await;
    bench.no_failures().await;
    worker.drain().await;
}

#[tokio::test]
async fn another_order_under_a_used_id_is_a_conflict() {
    let bench = conflicts(&[]).await;
    let rows = bench.spec.db().rows("SELECT id, reason, payload FROM dead_letters ORDER BY stream_seq").await;
    let letters: Vec<(String, String, Vec<u8>)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let conflict = |payload: &str| ("order-1".to_owned(), "conflict".to_owned(), payload.as_bytes().to_vec());
    assert_eq!(letters, [conflict("plain three"), conflict("plain five")]);
}

#[tokio::test]
async fn on_conflict_duplicate_makes_another_payload_a_duplicate() {
    let bench = conflicts(&[("inbox.on_conflict", "duplicate")]).await;
    assert_eq!(bench.spec.db().count("dead_letters").await, 0);
}

/// One id with three payloads: two in one batch, the third later, and then the first once more. Only the first has an effect.
async fn conflicts(settings: &[(&str, &str)]) -> Bench {
    let bench = Bench::new(consumer_config(), settings).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    let publish = async |payload: &str| {
        let headers = headers(&[("Nats-Msg-Id", "order-1")]);
        bench.broker.publish_anew("ORDERS.new", headers, payload.into()).await
    };
    bench.broker.publish("plug").await;
    clerk.began(1).await;
    publish("plain two").await;
    publish("plain three").await;
    bench.broker.publish("plain four").await;
    worker.held(4).await;
    clerk.let_pass(1);
    bench.broker.acknowledged(4).await;
    publish("plain five").await;
    publish("plain two").await;
    bench.broker.acknowledged(6).await;
    assert_eq!(bench.effects().await, ["plain four", "plain two", "plug"]);
    bench.applied_once(3).await;
    worker.drain().await;
    bench
}

#[tokio::test]
async fn an_order_without_a_readable_id_never_reaches_the_handler() {
    let bench = Bench::new(consumer_config(), &[("inbox.id_pointer", "/id")]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.one_batch(&worker, &clerk, &["{\"id\": 2}", "{\"id\": 3", "{\"id\": 4}"]).await;
    bench.broker.acknowledged(4).await;
    // The plug is no JSON either, so it needs the other way to name itself.
    assert_eq!(bench.effects().await, ["plug", "{\"id\": 2}", "{\"id\": 4}"]);
    let ids: Vec<_> = clerk.runs().into_iter().flat_map(|run| run.slice).map(|seen| seen.id).collect();
    assert_eq!(ids, ["plug", "ORDERS.new 2", "ORDERS.new 4"]);
    let row = bench.dead_letter().await;
    assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("stream_seq")), ("undecodable", 3));
    assert_eq!(row.get::<Vec<u8>, _>("payload"), b"{\"id\": 3");
    worker.drain().await;
}

#[tokio::test]
async fn a_handler_slower_than_ack_wait_runs_each_order_once() {
    let bench = Bench::new(impatient_consumer_config(), &[]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.broker.publish("slow 1").await;
    clerk.began(1).await;
    bench.broker.publish("plain 2").await;
    bench.broker.acknowledged(2).await;
    assert_eq!(clerk.runs_of("slow 1").len(), 1, "runs of the slow order");
    assert!(
        clerk.runs_of("plain 2")[0].began - clerk.runs_of("slow 1")[0].began >= SLOW,
        "it waited behind the slow one"
    );
    assert_eq!(bench.broker.consumer_info().await.delivered.consumer_sequence, 2, "each delivered once");
    bench.applied_once(2).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_stop_commits_the_batch_in_hand_and_hands_back_the_rest() {
    const ORDERS: u64 = 8;
    let bench = Bench::new(patient_consumer_config(), &[("batch.max_messages", "4")]).await;
    for number in 1..=ORDERS {
        bench.broker.publish(format!("plug {number}")).await;
    }
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    clerk.began(1).await;
    let in_hand = clerk.runs()[0].slice.len() as u64;
    worker.held(in_hand as usize + 4).await;
    worker.stop.cancel();
    worker.draining().await;
    clerk.let_pass(ORDERS as usize);
    worker.drain().await;
    bench.applied_once(in_hand as i64).await;
    let info = bench.broker.consumer_info().await;
    assert_eq!(info.ack_floor.stream_sequence, in_hand, "the batch in hand is acknowledged");
    assert_eq!(info.num_ack_pending, 4, "and nothing else");

    // With this `ack_wait` what was not handed back would not come before the hour is over.
    let worker = bench.start(&clerk).await;
    bench.broker.acknowledged(ORDERS).await;
    bench.applied_once(ORDERS as i64).await;
    bench.no_failures().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_broken_statement_is_a_database_fault_and_costs_no_attempt() {
    let bench = Bench::new(consumer_config(), &[("retry.max_attempts", "1")]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.one_batch(&worker, &clerk, &["plain 2", "ledger 3", "plain 4"]).await;
    worker.not_ready("no such table: ledger").await;
    worker.metric("db_errors_total{class=\"other\"}", 3.0).await;
    let info = bench.broker.consumer_info().await;
    assert_eq!((info.ack_floor.stream_sequence, info.num_ack_pending), (1, 3), "the batch is held");
    assert_eq!(bench.effects().await, ["plug"]);
    bench.no_failures().await;

    let mut writer = bench.spec.db().open_to_write().await;
    sqlx::query("CREATE TABLE ledger (id TEXT NOT NULL)").execute(&mut writer).await.unwrap();
    bench.broker.acknowledged(4).await;
    bench.applied_once(4).await;
    bench.no_failures().await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn the_handler_gets_a_batch_in_stream_order_and_no_id_twice() {
    let bench = Bench::new(patient_consumer_config(), &[]).await;
    let repeated = || headers(&[("Nats-Msg-Id", "order-1")]);
    bench.broker.publish_to("ORDERS.new", repeated(), b"plain one".to_vec()).await;
    bench.broker.publish("plain 2").await;
    bench.broker.publish_anew("ORDERS.new", repeated(), b"plain one".to_vec()).await;
    bench.broker.publish("plug").await;
    bench.broker.publish("plain 5").await;
    // The server delivers in the order in which it got them back.
    bench.hand_back(&[4, 3, 2, 1]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    worker.held(5).await;
    clerk.let_pass(1);
    bench.broker.acknowledged(5).await;
    let runs = clerk.runs();
    let mut ids: Vec<_> = runs.iter().flat_map(|run| &run.slice).map(|seen| &seen.id).collect();
    for run in &runs {
        assert!(run.slice.is_sorted_by_key(|seen| seen.stream_seq), "{runs:?}");
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), runs.iter().map(|run| run.slice.len()).sum::<usize>(), "{runs:?}");
    assert_eq!(ids.len(), 4, "the repetition has no run of its own");
    bench.applied_once(4).await;
    worker.drain().await;
}

#[tokio::test]
async fn long_retries_that_take_all_of_max_ack_pending_do_not_stop_the_flow() {
    let four = consumer::pull::Config { max_ack_pending: 4, ..consumer_config() };
    let hours = [("retry.min_delay", "1h"), ("retry.max_delay", "1h"), ("retry.max_attempts", "3")];
    let bench = Bench::new(four, &hours).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    worker.ready().await;
    for number in 1..=6 {
        bench.broker.publish(format!("retry {number}")).await;
    }
    for number in 7..=26 {
        bench.broker.publish(format!("plain {number}")).await;
    }
    // Some of the failing ones wait for their hour; those that would take the last place use up their attempts at once.
    eventually("all the others are applied", PATIENCE, async || equal(bench.effects().await.len(), 20)).await;
    let parked = worker.telemetry.health.status().parked;
    assert!(parked > 0, "there are retries that wait");
    let dead = bench.spec.db().texts("SELECT DISTINCT reason FROM dead_letters").await;
    assert_eq!(dead, ["attempts_exhausted"]);
    worker.drain().await;
}
