//! `pause` and `resume`, with a running daemon and without one.

use std::time::Duration;

use order_processor::config::Database;
use order_processor::store::Store;
use order_processor::worker::worker::Ended;
use sqlx::Connection;
use tokio_util::sync::CancellationToken;

use crate::support::in_process::{Bench, Clerk};
use crate::support::keys::mode;
use crate::support::nats::{consumer_config, patient_consumer_config};
use crate::support::{Broker, DaemonSpec, PATIENCE, at_least, eventually};

#[tokio::test]
async fn a_paused_daemon_closes_the_database_and_says_so_everywhere() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("paused", 0.0).await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    let said = spec.run_ok(&["pause", "--reason", "a new disk"]).await.stdout;
    assert!(said.contains("paused; no daemon has"), "{said}");
    for suffix in ["-wal", "-shm", ".lock"] {
        assert!(!spec.beside(suffix).exists(), "{suffix} is gone: the file alone is the database");
    }
    let mut alone = spec.db().open_to_write().await;
    sqlx::query("PRAGMA locking_mode = EXCLUSIVE").execute(&mut alone).await.unwrap();
    sqlx::query("BEGIN EXCLUSIVE").execute(&mut alone).await.expect("nobody else has it open");
    alone.close().await.unwrap();

    broker.publish_numbered(6..=10).await;
    worker.metric("consumer_num_pending", 5.0).await;
    worker.metric("paused", 1.0).await;
    worker.not_ready("paused: by ").await;
    let (_, problems) = worker.get("/readyz").await;
    assert_eq!(problems.lines().count(), 1, "{problems}");
    assert!(problems.contains(": a new disk"), "{problems}");
    assert_eq!(worker.get("/livez").await.0, 200, "nobody is to restart it");
    let (_, status) = worker.get("/status").await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["pause"]["reason"], "a new disk");
    assert_eq!(status["draining"], false);
    let status = spec.run_ok(&["status", "--json"]).await.json();
    assert_eq!(
        status["pause"],
        serde_json::from_str::<serde_json::Value>(&std::fs::read_to_string(spec.beside(".paused")).unwrap()).unwrap()
    );
    let status = spec.run_ok(&["status"]).await.stdout;
    assert!(status.contains("a new disk; `order-processor resume` ends it"), "{status}");
    let checked = spec.run_ok(&["check"]).await.stdout;
    assert!(checked.contains("a new disk"), "{checked}");
    worker.logged(&["WARN", "paused by ", "a new disk"]).await;
    assert_eq!(spec.db().count("processed_ids").await, 5);

    let said = spec.run_ok(&["pause"]).await.stdout;
    assert!(said.contains("was paused already by") && said.contains("a new disk"), "{said}");
    let said = spec.run_ok(&["resume"]).await.stdout;
    assert!(said.contains("it was paused by") && said.contains("a new disk"), "{said}");
    broker.acknowledged(10).await;
    worker.ready().await;
    worker.metric("paused", 0.0).await;
    worker.logged(&["resumed"]).await;
    assert_eq!(spec.run_ok(&["resume"]).await.stdout, "it was not paused\n");
    spec.db().applied_once(10).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pause_commits_the_batch_in_hand_and_hands_back_the_rest() {
    let consumer = patient_consumer_config();
    let (server, broker) = Broker::with(consumer).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "50");
    let mut worker = spec.start();
    // A publisher that is there during each of the pauses.
    let (publisher, mut last) = (Broker::connect(&server).await, 0);
    let enough = CancellationToken::new();
    let told = enough.clone();
    let publishing = tokio::spawn(async move {
        while !told.is_cancelled() {
            publisher.publish_numbered(last + 1..=last + 100).await;
            last += 100;
            // No faster than small batches work it off, or the end waits for a backlog.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        last
    });
    let processed = async || spec.db().count("processed_ids").await;
    for _ in 0..3 {
        let before = processed().await;
        eventually("it works", PATIENCE, async || at_least(processed().await, before + 1)).await;
        spec.run_ok(&["pause"]).await;
        let info = broker.consumer_info().await;
        let acknowledged = info.delivered.stream_sequence - info.num_ack_pending as u64;
        assert_eq!(i64::try_from(acknowledged).unwrap(), processed().await, "what is committed is acknowledged");
        spec.run_ok(&["resume"]).await;
    }
    enough.cancel();
    let last = publishing.await.unwrap();
    // Only what is handed back comes again with this consumer.
    broker.acknowledged(last).await;
    spec.db().applied_once(i64::try_from(last).unwrap()).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pause_outlasts_the_daemon_and_can_begin_and_end_without_one() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["pause", "--reason", "moving"]).await;
    assert_eq!(mode(&spec.beside(".paused")), 0o600);

    let mut worker = spec.start();
    worker.not_ready("paused: by").await;
    worker.metric("consumer_num_pending", 5.0).await;
    assert!(!spec.database().exists(), "nothing is made where somebody is at work");
    worker.drain().await;

    let refused = spec.run(&["run", "--until-idle"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    let complaints = refused.complaints();
    assert_eq!(complaints.len(), 1, "{refused:?}");
    assert!(complaints[0].contains("moving") && complaints[0].contains("order-processor resume"), "{complaints:?}");

    spec.run_ok(&["resume"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(5).await;
}

#[tokio::test]
async fn a_pause_ends_work_until_idle_with_a_clear_line() {
    let (server, broker) = Broker::with(consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "10");
    broker.publish_numbered(1..=20_000).await;
    let mut worker = spec.start_with(&["run", "--until-idle"]);
    eventually("it works", PATIENCE, async || at_least(spec.db().count("processed_ids").await, 1)).await;
    spec.run_ok(&["pause"]).await;
    assert_eq!(worker.wait_exit(PATIENCE).await.code(), Some(2));
    worker.logged(&["ERROR", "paused by", "order-processor resume"]).await;
    let (floor, rows) = (broker.consumer_info().await.ack_floor.stream_sequence, spec.db().count("orders").await);
    assert_eq!(i64::try_from(floor).unwrap(), rows);
}

#[tokio::test]
async fn a_database_that_is_away_when_the_pause_ends_is_waited_for() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    spec.run_ok(&["pause"]).await;
    let elsewhere = spec.database().with_extension("elsewhere");
    std::fs::rename(spec.database(), &elsewhere).unwrap();
    spec.run_ok(&["resume"]).await;
    broker.publish_numbered(6..=10).await;
    worker.not_ready("the file was moved, removed or replaced; put it back").await;
    assert_eq!(worker.get("/livez").await.0, 200);
    assert!(!spec.database().exists(), "an empty one would take the orders");
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 5);

    std::fs::rename(&elsewhere, spec.database()).unwrap();
    broker.acknowledged(10).await;
    worker.ready().await;
    spec.db().applied_once(10).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pause_lasts_while_its_folder_is_away() {
    let (server, broker) = Broker::story().await;
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("place");
    std::fs::create_dir(&place).unwrap();
    let url = format!("sqlite://{}", place.join("orders.db").display());
    let spec = DaemonSpec::new(server.url()).set("database.url", url);
    let mut worker = spec.start();
    worker.ready().await;
    spec.run_ok(&["pause"]).await;
    worker.not_ready("paused: ").await;

    let elsewhere = folder.path().join("elsewhere");
    std::fs::rename(&place, &elsewhere).unwrap();
    worker.logged(&["WARN", "cannot read the pause marker", "does not exist"]).await;
    let (_, problems) = worker.get("/readyz").await;
    assert!(problems.starts_with("paused: ") && problems.lines().count() == 1, "{problems}");

    std::fs::rename(&elsewhere, &place).unwrap();
    spec.run_ok(&["resume"]).await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_database_still_in_use_when_the_pause_ends_is_waited_for() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    spec.run_ok(&["pause"]).await;
    // An audit that repairs has the same lock.
    let store = Store::open(&Database::Sqlite(spec.database())).await.unwrap();
    spec.run_ok(&["resume"]).await;
    worker.not_ready("in use by process").await;
    store.close().await.unwrap();
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pause_cuts_off_what_outlasts_its_deadline() {
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
