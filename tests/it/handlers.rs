//! The seam for business logic: a handler that fails on demand, in a worker inside the test process where the test must see
//! its runs, and in a process of its own where it must take that process down.

use std::ffi::OsString;
use std::future::pending;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{self, PullConsumer};
use async_nats::jetstream::stream;
use async_trait::async_trait;
use futures_util::StreamExt;
use order_processor::config::Config;
use order_processor::handler::{Failure, Handler, Order};
use order_processor::model::delivery::Delivery;
use order_processor::store::{self, Store, Tx};
use order_processor::telemetry::Telemetry;
use order_processor::worker::worker::{Ended, Until, Worker, WorkerError};
use sqlx::{ConnectOptions, Connection, Row};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::nats::{CONSUMER, STREAM, consumer_config, headers, patient_consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, at_least, equal, eventually};

/// The shortest that the start gate allows.
const SHORT_ACK_WAIT: Duration = Duration::from_secs(1);
/// How long an order beginning with `slow` takes: three times [`SHORT_ACK_WAIT`].
const SLOW: Duration = Duration::from_secs(3);
/// `retry.max_attempts` for orders that fail until the test lets them pass.
const MANY: &str = "1000";
/// The least that jitter leaves of a retry delay.
const JITTER_MIN: f64 = 0.8;

#[tokio::test]
async fn while_the_database_is_locked_nothing_is_acknowledged_spent_or_delivered_again() {
    let bench = Bench::new(short_ack_wait(), &[]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    worker.ready().await;
    let mut writer = bench.spec.db().open_to_write().await;
    sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.unwrap();
    bench.broker.publish_numbered(1..=5).await;
    worker.not_ready("database").await;
    // The second refusal: by then the lock has outlasted the busy timeout twice and `ack_wait` four times.
    worker.metric("db_errors_total{class=\"busy\"}", 2.0).await;

    let info = bench.broker.consumer_info().await;
    assert_eq!((info.num_ack_pending, info.ack_floor.stream_sequence), (5, 0), "held, none acknowledged");
    assert_eq!(info.delivered.consumer_sequence, 5, "in-progress has kept each to its first delivery");
    assert_eq!(clerk.runs().len(), 0);

    sqlx::query("ROLLBACK").execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();
    bench.broker.acknowledged(5).await;
    worker.ready().await;
    bench.applied_once(5).await;
    bench.no_failures().await;
    assert_eq!(bench.broker.consumer_info().await.delivered.consumer_sequence, 5, "each delivered once");
    worker.drain().await;
}

#[tokio::test]
async fn an_order_that_the_database_refuses_at_the_commit_is_a_dead_letter_and_its_neighbours_pass() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.one_batch(&worker, &clerk, &["plain 2", "orphan 3", "plain 4"]).await;
    bench.broker.acknowledged(4).await;
    let row = bench.dead_letter().await;
    assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("stream_seq")), ("permanent", 3));
    let error = row.get::<String, _>("error");
    assert!(error.contains("committing") && error.contains("FOREIGN KEY constraint failed"), "{error}");
    assert_eq!(bench.effects().await, ["plain 2", "plain 4", "plug"]);
    bench.applied_once(3).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn one_failing_order_is_undone_and_retried_while_its_batch_is_applied_and_acknowledged() {
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
async fn a_permanent_failure_becomes_a_whole_dead_letter_and_is_terminated_with_its_reason() {
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

#[tokio::test]
async fn used_up_attempts_end_in_a_dead_letter_also_when_the_worker_restarts_between_them() {
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
async fn a_failure_on_the_last_delivery_that_max_deliver_allows_is_a_dead_letter() {
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
async fn a_panic_is_a_retry_and_the_worker_goes_on() {
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
async fn another_order_under_a_used_id_is_a_conflict_in_one_batch_and_across_batches() {
    let bench = conflicts(&[]).await;
    let rows = bench.spec.db().rows("SELECT id, reason, payload FROM dead_letters ORDER BY stream_seq").await;
    let letters: Vec<(String, String, Vec<u8>)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    let conflict = |payload: &str| ("order-1".to_owned(), "conflict".to_owned(), payload.as_bytes().to_vec());
    assert_eq!(letters, [conflict("plain three"), conflict("plain five")]);
}

#[tokio::test]
async fn on_conflict_duplicate_takes_another_payload_for_a_repetition() {
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
async fn an_order_whose_id_cannot_be_read_is_a_dead_letter_and_never_reaches_the_handler() {
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
async fn an_order_that_keeps_crashing_the_process_is_quarantined_and_takes_no_neighbour_along() {
    let bench = Bench::new(short_ack_wait(), &[("retry.max_attempts", "3")]).await;
    for number in 1..=9 {
        bench.broker.publish(if number == 5 { "crash 5".to_owned() } else { format!("plain {number}") }).await;
    }
    let mut crashes = 0;
    loop {
        let status = ChildWorker::start(&bench.spec).wait().await;
        if status.success() {
            break;
        }
        assert_eq!(status.signal(), Some(6), "ended by abort and nothing else: {status}");
        crashes += 1;
        // Two deliveries whose start is not on record, then three whose start is.
        assert!(crashes <= 5, "it should be quarantined by now");
    }
    assert!(crashes >= 3, "{crashes} crashes");
    let row = bench.dead_letter().await;
    assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("stream_seq")), ("crash_loop", 5));
    assert_eq!(row.get::<Vec<u8>, _>("payload"), b"crash 5");
    assert_eq!(row.get::<String, _>("error"), "the process ended during each of 3 runs of this message");
    assert!(!bench.effects().await.contains(&"crash 5".to_owned()));
    bench.applied_once(8).await;
    assert_eq!(bench.spec.db().count("attempts").await, 0);
    bench.broker.acknowledged(9).await;
}

/// A worker whose process an order can take down, until nothing is pending.
#[tokio::test]
#[ignore = "the process that an_order_that_keeps_crashing_the_process_is_quarantined_and_takes_no_neighbour_along starts"]
async fn child() {
    let config = Config::load(None, std::env::vars_os()).unwrap().config;
    let store = Store::open(&config.database.path).await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&config.database.path);
    make_effects(&mut options.connect().await.unwrap()).await;
    let worker = Worker::new(Arc::new(config), store, Clerk::new(), Arc::new(Telemetry::new()), Until::Idle);
    worker.run(CancellationToken::new(), pending()).await.unwrap();
}

#[tokio::test]
async fn ten_restarts_and_hand_backs_over_a_held_backlog_dead_letter_nothing() {
    const ORDERS: usize = 24;
    let bench = Bench::new(patient_consumer_config(), &[("retry.max_attempts", "3")]).await;
    for number in 1..=ORDERS {
        bench.broker.publish(format!("plug {number}")).await;
    }
    let all: Vec<u64> = (1..=ORDERS as u64).collect();
    for _ in 0..2 {
        bench.hand_back(&all).await;
    }
    let clerk = Clerk::new();
    for restart in 1..=10 {
        let worker = bench.start(&clerk).await;
        worker.held(ORDERS + 1 - restart).await;
        clerk.began(restart).await;
        worker.stop.cancel();
        worker.draining().await;
        clerk.let_pass(1);
        worker.drain().await;
    }
    bench.applied_once(10).await;
    bench.no_failures().await;
    clerk.let_pass(ORDERS);
    let worker = bench.start(&clerk).await;
    bench.broker.acknowledged(ORDERS as u64).await;
    bench.applied_once(ORDERS as i64).await;
    bench.no_failures().await;
    let most = clerk.runs().iter().map(|run| run.slice[0].delivered).max();
    assert_eq!(most, Some(13), "deliveries of the last one: far more than attempts are allowed");
    worker.drain().await;
}

#[tokio::test]
async fn a_handler_slower_than_ack_wait_runs_once_and_what_waits_behind_it_is_delivered_once() {
    let bench = Bench::new(short_ack_wait(), &[]).await;
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
async fn a_stop_during_a_slow_batch_commits_it_and_hands_the_rest_to_the_next_worker_at_once() {
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
async fn an_order_whose_data_the_handlers_own_table_refuses_is_a_dead_letter_and_its_neighbours_pass() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.one_batch(&worker, &clerk, &["plain 2", "forbidden 3", "plain 4"]).await;
    bench.broker.acknowledged(4).await;
    let row = bench.dead_letter().await;
    assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("stream_seq")), ("permanent", 3));
    let error: String = row.get("error");
    assert!(error.contains("writing an effect") && error.contains("CHECK constraint failed"), "{error}");
    assert_eq!(bench.effects().await, ["plain 2", "plain 4", "plug"]);
    bench.applied_once(3).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_broken_statement_of_the_handler_is_trouble_with_the_database_and_costs_no_order_an_attempt() {
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
async fn restarts_while_the_database_fails_are_no_crashes_of_the_order_that_waits_for_it() {
    let bench = Bench::new(consumer_config(), &[("retry.max_attempts", "2")]).await;
    bench.broker.publish("ledger 1").await;
    // From its third delivery on its start is on record.
    bench.hand_back(&[1]).await;
    bench.hand_back(&[1]).await;
    let clerk = Clerk::new();
    for _ in 0..4 {
        let worker = bench.start(&clerk).await;
        worker.not_ready("no such table: ledger").await;
        worker.drain().await;
        bench.no_open_runs().await;
    }
    let mut writer = bench.spec.db().open_to_write().await;
    sqlx::query("CREATE TABLE ledger (id TEXT NOT NULL)").execute(&mut writer).await.unwrap();
    let worker = bench.start(&clerk).await;
    bench.broker.acknowledged(1).await;
    bench.applied_once(1).await;
    bench.no_failures().await;
    worker.drain().await;
}

#[tokio::test]
async fn runs_that_a_stop_cuts_off_are_no_crashes_of_their_order() {
    let settings = [("retry.max_attempts", "2"), ("shutdown.timeout", "1s")];
    let bench = Bench::new(patient_consumer_config(), &settings).await;
    bench.broker.publish("plug").await;
    bench.broker.publish("plain 2").await;
    // From its third delivery on its start is on record.
    bench.hand_back(&[1]).await;
    bench.hand_back(&[1]).await;
    let clerk = Clerk::new();
    for run in 1..=4 {
        let worker = bench.start(&clerk).await;
        eventually("the plug runs", PATIENCE, async || at_least(clerk.runs_of("plug").len(), run)).await;
        worker.cut_off().await;
        bench.no_open_runs().await;
    }
    clerk.let_pass(1);
    let worker = bench.start(&clerk).await;
    // Nothing comes again by itself here: what was held at the deadline was handed back.
    bench.broker.acknowledged(2).await;
    bench.applied_once(2).await;
    bench.no_failures().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pause_cuts_off_what_outlasts_the_deadline_and_is_a_pause_all_the_same() {
    let settings = [("retry.max_attempts", "1"), ("shutdown.timeout", "1s")];
    let bench = Bench::new(patient_consumer_config(), &settings).await;
    bench.broker.publish("plug").await;
    let clerk = Clerk::new();
    let pause = CancellationToken::new();
    let worker = bench.start_with_pause(&clerk, pause.clone()).await;
    clerk.began(1).await;
    pause.cancel();
    let ended = tokio::time::timeout(PATIENCE, worker.task).await.expect("the deadline ends it");
    assert_eq!(ended.expect("it does not panic").expect("the database is closed"), Ended::Paused);

    let worker = bench.start(&clerk).await;
    clerk.let_pass(1);
    bench.broker.acknowledged(1).await;
    bench.applied_once(1).await;
    bench.no_failures().await;
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

/// Writes each order into its own table `effects`, then does what the first word of the payload says: see [`Clerk::act`].
pub struct Clerk {
    /// What fails until mended does not fail any more.
    mended: AtomicBool,
    /// Each order that begins with `plug` takes a permit.
    gate: Semaphore,
    runs: Mutex<Vec<Run>>,
}

/// One call of the handler.
#[derive(Clone, Debug)]
struct Run {
    began: Instant,
    slice: Vec<Seen>,
}

#[derive(Clone, Debug)]
struct Seen {
    id: String,
    stream_seq: u64,
    delivered: u64,
    payload: String,
}

#[async_trait]
impl Handler for Clerk {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        let slice: Vec<Seen> = orders.iter().map(|order| Seen::of(order.delivery)).collect();
        self.runs.lock().unwrap().push(Run { began: Instant::now(), slice: slice.clone() });
        for seen in &slice {
            execute(tx, "INSERT INTO effects (id, payload) VALUES (?1, ?2)", seen).await?;
            self.act(tx, seen).await?;
        }
        Ok(())
    }
}

impl Clerk {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { mended: AtomicBool::new(false), gate: Semaphore::new(0), runs: Mutex::default() })
    }

    async fn act(&self, tx: &mut Tx<'_>, seen: &Seen) -> Result<(), Failure> {
        let mended = self.mended.load(Ordering::SeqCst);
        match seen.payload.split(' ').next().unwrap_or_default() {
            "plug" => self.gate.acquire().await.expect("the gate is never closed").forget(),
            "slow" => tokio::time::sleep(SLOW).await,
            "crash" => std::process::abort(),
            "permanent" => return Err(Failure::Permanent("no such product".to_owned())),
            "retry" if !mended => return Err(Failure::Retry("out of stock".to_owned())),
            "panic" if !mended => panic!("drawer {} is stuck", seen.stream_seq),
            "orphan" => execute(tx, "INSERT INTO children (id, parent) VALUES (?1, ?2)", seen).await?,
            "ledger" => execute(tx, "INSERT INTO ledger (id) VALUES (?1)", seen).await?,
            _ => {}
        }
        Ok(())
    }

    pub fn mend(&self) {
        self.mended.store(true, Ordering::SeqCst);
    }

    /// Lets this many plugs pass, now or when they come.
    pub fn let_pass(&self, plugs: usize) {
        self.gate.add_permits(plugs);
    }

    fn runs(&self) -> Vec<Run> {
        self.runs.lock().unwrap().clone()
    }

    fn runs_of(&self, payload: &str) -> Vec<Run> {
        self.runs().into_iter().filter(|run| run.slice.iter().any(|seen| seen.payload == payload)).collect()
    }

    /// The times between the runs of one order.
    fn gaps(&self, payload: &str) -> Vec<Duration> {
        self.runs_of(payload).windows(2).map(|runs| runs[1].began - runs[0].began).collect()
    }

    /// Waits until this many runs have begun.
    pub async fn began(&self, runs: usize) {
        eventually(&format!("{runs} runs have begun"), PATIENCE, async || at_least(self.runs().len(), runs)).await;
    }
}

impl Seen {
    fn of(delivery: &Delivery) -> Self {
        Self {
            id: delivery.id.to_string(),
            stream_seq: delivery.raw.position.stream_seq,
            delivered: delivery.raw.position.delivered,
            payload: String::from_utf8_lossy(&delivery.raw.payload).into_owned(),
        }
    }
}

async fn execute(tx: &mut Tx<'_>, sql: &'static str, seen: &Seen) -> Result<(), Failure> {
    let statement = sqlx::query(sql).bind(&seen.id).bind(&seen.payload);
    statement.execute(tx.sqlite()).await.map_err(|source| store::Error::new("writing an effect", source))?;
    Ok(())
}

/// That there are `count` gaps and that each is as long as the policy promises, however the jitter fell.
fn assert_promised(gaps: &[Duration], min_delay: Duration, count: usize) {
    assert_eq!(gaps.len(), count, "{gaps:?}");
    for (doublings, gap) in (0..).zip(gaps) {
        let promised = (min_delay * (1 << doublings)).mul_f64(JITTER_MIN);
        assert!(*gap >= promised, "gap {doublings} of {gaps:?} is shorter than {promised:?}");
    }
}

fn short_ack_wait() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: SHORT_ACK_WAIT, ..consumer_config() }
}

/// A server with stream and consumer, and the place of one daemon.
pub struct Bench {
    pub broker: Broker,
    pub spec: DaemonSpec,
    _server: NatsServer,
}

impl Bench {
    pub async fn new(consumer: consumer::pull::Config, settings: &[(&str, &str)]) -> Self {
        let server = NatsServer::start().await;
        let broker = Broker::connect(&server).await;
        // The least that the server allows: the tests want repetitions to reach the worker.
        let stream = stream::Config { duplicate_window: Duration::from_millis(100), ..stream_config() };
        broker.create(stream, consumer).await;
        let spec = DaemonSpec::new(server.url());
        let spec = settings.iter().fold(spec, |spec, (key, value)| spec.set(key, *value));
        Self { broker, spec, _server: server }
    }

    /// Starts a worker in this process.
    pub async fn start(&self, clerk: &Arc<Clerk>) -> Running {
        self.start_with_pause(clerk, CancellationToken::new()).await
    }

    async fn start_with_pause(&self, clerk: &Arc<Clerk>, pause: CancellationToken) -> Running {
        let config = Config::load(None, environment(&self.spec)).expect("the settings are right").config;
        let store = Store::open(&config.database.path).await.expect("the database can be opened");
        make_effects(&mut self.spec.db().open_to_write().await).await;
        let telemetry = Arc::new(Telemetry::new());
        telemetry.health.set_database(Ok(()));
        let worker = Worker::new(Arc::new(config), store, clerk.clone(), telemetry.clone(), Until::Stopped);
        let stop = CancellationToken::new();
        Running { task: tokio::spawn(worker.run(stop.clone(), pause.cancelled_owned())), stop, telemetry }
    }

    /// Publishes these behind a plug, and pulls the plug when the worker holds all of them: they are one batch.
    async fn one_batch(&self, worker: &Running, clerk: &Clerk, texts: &[&str]) {
        self.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "plug")]), b"plug".to_vec()).await;
        clerk.began(1).await;
        for text in texts {
            self.broker.publish_to("ORDERS.new", HeaderMap::new(), (*text).into()).await;
        }
        worker.held(1 + texts.len()).await;
        clerk.let_pass(1);
        clerk.began(2).await;
        assert!(clerk.runs()[1].slice.len() > 1, "they are one batch: {:?}", clerk.runs());
    }

    /// Plays another worker, one that takes these messages and hands them back in this order.
    async fn hand_back(&self, stream_seqs: &[u64]) {
        let consumer: PullConsumer = self.broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
        let messages = consumer.fetch().max_messages(stream_seqs.len()).messages().await.unwrap();
        let messages: Vec<_> = messages.map(Result::unwrap).collect().await;
        for stream_seq in stream_seqs {
            let message = messages.iter().find(|message| message.info().unwrap().stream_sequence == *stream_seq);
            message.expect("it was delivered").double_ack_with(AckKind::Nak(None)).await.unwrap();
        }
    }

    /// Watches what the server says of terminated messages.
    async fn terminations(&self) -> Terminations {
        let subject = format!("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{STREAM}.{CONSUMER}");
        let advisories = self.broker.client.subscribe(subject).await.unwrap();
        self.broker.client.flush().await.unwrap();
        Terminations(advisories)
    }

    /// The payloads with an effect.
    pub async fn effects(&self) -> Vec<String> {
        self.spec.db().texts("SELECT payload FROM effects ORDER BY payload").await
    }

    /// As many effects as ids, and none twice.
    pub async fn applied_once(&self, orders: i64) {
        let db = self.spec.db();
        assert_eq!(db.count("effects").await, orders, "effects: {:?}", self.effects().await);
        assert_eq!(db.scalar("SELECT count(DISTINCT id) FROM effects").await, orders, "different ids in effects");
        assert_eq!(db.count("processed_ids").await, orders, "processed ids");
    }

    /// No attempt is on record and nothing is dead.
    async fn no_failures(&self) {
        assert_eq!(self.spec.db().count("attempts").await, 0, "attempts");
        assert_eq!(self.spec.db().count("dead_letters").await, 0, "dead letters");
    }

    /// No run is on record as begun and not ended.
    async fn no_open_runs(&self) {
        let open = self.spec.db().scalar("SELECT coalesce(sum(started), 0) FROM attempts").await;
        assert_eq!(open, 0, "runs without an end");
    }

    /// The one dead letter that there must be.
    async fn dead_letter(&self) -> sqlx::sqlite::SqliteRow {
        let mut rows = self.spec.db().rows("SELECT * FROM dead_letters").await;
        assert_eq!(rows.len(), 1, "dead letters");
        rows.remove(0)
    }
}

/// A worker in this process. It goes with the test's runtime.
pub struct Running {
    stop: CancellationToken,
    task: JoinHandle<Result<Ended, WorkerError>>,
    pub telemetry: Arc<Telemetry>,
}

impl Running {
    pub async fn ready(&self) {
        eventually("the worker is ready", PATIENCE, async || equal(self.telemetry.health.problems(), vec![])).await;
    }

    /// Waits until a problem says this.
    async fn not_ready(&self, because: &str) {
        eventually(&format!("not ready, because {because}"), PATIENCE, async || {
            let problems = self.telemetry.health.problems();
            if problems.iter().any(|problem| problem.to_string().contains(because)) { Ok(()) } else { Err(problems) }
        })
        .await;
    }

    async fn held(&self, deliveries: usize) {
        let what = format!("{deliveries} deliveries are held");
        eventually(&what, PATIENCE, async || equal(self.telemetry.health.status().held, deliveries)).await;
    }

    async fn draining(&self) {
        eventually("the worker drains", PATIENCE, async || equal(self.telemetry.health.status().draining, true)).await;
    }

    /// Waits until a counter has got this far.
    pub async fn metric(&self, name: &str, value: f64) {
        let prefix = format!("order_processor_{name} ");
        eventually(&format!("{name} >= {value}"), PATIENCE, async || {
            let text = self.telemetry.metrics.render();
            let seen = text.lines().find_map(|line| line.strip_prefix(&prefix)).and_then(|seen| seen.parse().ok());
            at_least(seen, Some(value))
        })
        .await;
    }

    /// Stops it, and asserts the clean end that must follow.
    pub async fn drain(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(PATIENCE, self.task).await.expect("the drain ends");
        ended.expect("the worker does not panic").expect("the worker drains");
    }

    /// Stops it, and asserts that its deadline passes before it has drained.
    async fn cut_off(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(PATIENCE, self.task).await.expect("the deadline ends it");
        assert!(matches!(ended.expect("the worker does not panic"), Err(WorkerError::Deadline(_))));
    }
}

/// Advisories of terminated messages.
struct Terminations(async_nats::Subscriber);

impl Terminations {
    /// Stream sequence and reason of the next one.
    async fn next(&mut self) -> (u64, String) {
        let message = tokio::time::timeout(PATIENCE, self.0.next()).await.expect("an advisory comes").unwrap();
        let advisory: serde_json::Value = serde_json::from_slice(&message.payload).unwrap();
        (advisory["stream_seq"].as_u64().unwrap(), advisory["reason"].as_str().unwrap_or_default().to_owned())
    }
}

/// The worker of [`child`] in its process. It is killed with this value.
struct ChildWorker(Child);

impl ChildWorker {
    fn start(spec: &DaemonSpec) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this test binary has a path"));
        command.args(["--exact", "handlers::child", "--ignored"]).env_clear().envs(environment(spec));
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().expect("this test binary can be started"))
    }

    async fn wait(mut self) -> ExitStatus {
        eventually("the worker's process has ended", PATIENCE, async || {
            self.0.try_wait().expect("it can be waited for").ok_or("still running")
        })
        .await
    }
}

impl Drop for ChildWorker {
    fn drop(&mut self) {
        // Both fail only if it has already gone, which is what we want.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The settings of a daemon as variables.
fn environment(spec: &DaemonSpec) -> Vec<(OsString, OsString)> {
    let command = spec.command(&[]);
    let set = command.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
    set.collect()
}

/// The table of the [`Clerk`]. No constraint keeps an effect from being there twice: the inbox has to.
async fn make_effects(connection: &mut sqlx::SqliteConnection) {
    let sql = "CREATE TABLE IF NOT EXISTS effects \
               (id TEXT NOT NULL, payload TEXT NOT NULL CHECK (payload NOT LIKE 'forbidden%')) STRICT";
    // A deferred foreign key is checked by the COMMIT and not by the statement.
    let children = "CREATE TABLE IF NOT EXISTS children \
                    (id TEXT NOT NULL, parent TEXT NOT NULL REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED) STRICT";
    for sql in [sql, "CREATE TABLE IF NOT EXISTS parents (id TEXT NOT NULL PRIMARY KEY) STRICT", children] {
        sqlx::query(sql).execute(&mut *connection).await.expect("the table can be made");
    }
}
