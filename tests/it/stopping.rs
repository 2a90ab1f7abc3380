//! Stopping with a signal: the batch in hand is finished, the other deliveries are handed back, and every step has a bound.

use std::time::Duration;

use async_nats::jetstream::AckKind;
use order_processor::worker::inbox::SUSPECT_FROM;
use sqlx::Connection;

use crate::support::nats::{consumer_config, impatient_consumer_config, patient_consumer_config, stream_config};
use crate::support::{
    Broker, Daemon, DaemonSpec, FaultProxy, NEVER, NatsServer, PATIENCE, at_least, equal, eventually, free_port,
};

/// Long enough that no run of this suite gets there: what ends before was not ended by it.
const NO_DEADLINE: &str = "1h";

/// In the middle of a backlog that nobody can have finished by the time that we look: thousands of commits.
async fn worker_in_the_middle(spec: &DaemonSpec) -> Daemon {
    let worker = spec.start();
    eventually("the first orders are applied", PATIENCE, async || at_least(spec.db().count("orders").await, 1)).await;
    worker
}

const BACKLOG: i64 = 20_000;

async fn backlog() -> (NatsServer, Broker, DaemonSpec) {
    let (server, broker) = Broker::with(patient_consumer_config()).await;
    broker.publish_numbered(1..=BACKLOG.unsigned_abs()).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "16");
    (server, broker, spec)
}

#[tokio::test]
async fn sigterm_in_a_backlog_hands_back_the_rest_for_the_next_worker() {
    let (_server, broker, spec) = backlog().await;
    let mut worker = worker_in_the_middle(&spec).await;
    worker.drain().await;

    let applied = spec.db().count("orders").await;
    assert!(applied < BACKLOG, "it was stopped in the middle, not after the last order");
    spec.db().applied_once(applied).await;
    // Everything with an outcome is acknowledged, so whatever comes again was handed back.
    let info = broker.consumer_info().await;
    let acknowledged = info.delivered.stream_sequence - info.num_ack_pending as u64;
    assert_eq!(acknowledged, applied.unsigned_abs(), "delivered {:?}", info.delivered);

    // With this `ack_wait` what was not handed back would not come before the hour is over.
    let next = spec.start_with(&["run"]);
    broker.acknowledged(BACKLOG.unsigned_abs()).await;
    spec.db().applied_once(BACKLOG).await;
    drop(next);
}

#[tokio::test]
async fn sigterm_over_a_slow_network_hands_back_what_is_on_its_way() {
    let (server, broker) = Broker::with(patient_consumer_config()).await;
    broker.publish_numbered(1..=1_000).await;
    let proxy = FaultProxy::start(server.address()).await;
    proxy.delay(Duration::from_millis(20));
    let spec = DaemonSpec::new(proxy.url()).set("batch.max_messages", "16");
    let mut worker = worker_in_the_middle(&spec).await;
    worker.drain().await;
    assert!(spec.db().count("orders").await < 1_000, "it was stopped in the middle, not after the last order");

    proxy.heal();
    let _next = spec.start();
    broker.acknowledged(1_000).await;
    spec.db().applied_once(1_000).await;
}

#[tokio::test]
async fn sigterm_or_sigint_on_an_idle_worker_leaves_one_clean_database_file() {
    for signal in ["TERM", "INT"] {
        let (server, broker) = Broker::story().await;
        let spec = DaemonSpec::new(server.url());
        let mut worker = spec.start();
        worker.ready().await;
        broker.publish_numbered(1..=5).await;
        broker.acknowledged(5).await;
        worker.send_signal(signal);
        assert_eq!(worker.wait_exit(PATIENCE).await.code(), Some(0), "{signal}");

        let left: Vec<_> = std::fs::read_dir(spec.folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("orders.db"))
            .collect();
        assert_eq!(left, ["orders.db"], "the WAL is checkpointed and no lock stays behind");
        assert_eq!(broker.consumer_info().await.num_waiting, 0, "no pull stays behind");
    }
}

/// The server counts the delivery that was handed back, and only that one. The daemon counts no attempt: a single one is allowed
/// here, and no order becomes a dead letter.
#[tokio::test]
async fn sigint_in_the_middle_of_work_hands_back_the_rest_with_one_delivery_counted() {
    let (server, broker) = Broker::with(patient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", NO_DEADLINE).set("batch.max_messages", "16");
    let spec = spec.set("retry.max_attempts", "1");
    let mut worker = spec.start();
    worker.ready().await;
    // The first upkeep is over then. It would be the first to find the database locked, and pulling would stop too early.
    broker.publish_numbered(1..=1).await;
    broker.acknowledged(1).await;
    let writer = spec.db().lock().await;
    broker.publish_numbered(2..=48).await;
    eventually("the worker holds more than one batch", PATIENCE, async || {
        at_least(worker.metrics().await.get("held_deliveries"), Some(17.0))
    })
    .await;
    worker.send_signal("INT");
    worker.not_ready("drain").await;
    writer.close().await.unwrap();
    assert_eq!(worker.wait_exit(PATIENCE).await.code(), Some(0));
    let applied = spec.db().count("orders").await;
    assert!((1..48).contains(&applied), "the batch is committed, the rest is not started: {applied}");
    spec.db().applied_once(applied).await;

    let handed_back_through = broker.consumer_info().await.delivered.stream_sequence;
    assert!(handed_back_through > applied.unsigned_abs(), "there was something to hand back");
    let mut messages = Vec::new();
    for _ in applied..48 {
        messages.push(broker.take_one().await);
    }
    for message in messages {
        let info = message.info().unwrap();
        assert!(info.stream_sequence > applied.unsigned_abs(), "what is applied was acknowledged");
        let wanted = if info.stream_sequence <= handed_back_through { 2 } else { 1 };
        assert_eq!(info.delivered, wanted, "deliveries of message {}", info.stream_sequence);
        message.ack_with(AckKind::Nak(None)).await.unwrap();
    }
    let _next = spec.start();
    broker.acknowledged(48).await;
    spec.db().applied_once(48).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
}

/// A worker with a commit that will never end by itself: the database counts to infinity for each order.
async fn stuck_worker(server: &NatsServer, shutdown_timeout: &str) -> (Broker, DaemonSpec, Daemon) {
    let broker = Broker::connect(server).await;
    broker.create(stream_config(), patient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", shutdown_timeout);
    let mut worker = spec.start();
    worker.ready().await;
    let endless =
        "CREATE VIEW endless AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n;
                   CREATE TRIGGER stuck BEFORE INSERT ON orders BEGIN SELECT count(*) FROM endless; END";
    spec.db().execute(endless).await;
    broker.publish_numbered(1..=50).await;
    eventually("the worker holds orders", PATIENCE, async || {
        at_least(worker.metrics().await.get("held_deliveries"), Some(1.0))
    })
    .await;
    (broker, spec, worker)
}

/// Frees the database; and a new consumer stands for the hour of `ack_wait` that would have to pass.
async fn unstick(broker: &Broker, spec: &DaemonSpec) {
    spec.db().execute("DROP TRIGGER stuck; DROP VIEW endless").await;
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
}

#[tokio::test]
async fn second_sigterm_ends_it_at_once_and_loses_nothing() {
    let server = NatsServer::start().await;
    let (broker, spec, mut worker) = stuck_worker(&server, NO_DEADLINE).await;

    worker.term();
    worker.not_ready("drain").await;
    worker.term();
    let status = worker.wait_exit(PATIENCE).await;
    assert!(status.code() != Some(0), "not drained, so not 0: {status}");
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 0, "nothing is acknowledged without a commit");

    unstick(&broker, &spec).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(50).await;
}

/// By a second signal, or by a supervisor whose patience is shorter than the drain.
#[tokio::test]
async fn stops_that_are_cut_short_are_not_crashes_of_the_order() {
    let server = NatsServer::start().await;
    let (broker, spec, mut worker) = stuck_worker(&server, NO_DEADLINE).await;
    worker.kill9();
    drop(worker);
    // One order, which comes again soon.
    broker.purge().await;
    broker.delete_consumer().await;
    broker.create_consumer(impatient_consumer_config()).await;
    broker.publish("Order Data 51").await;
    let spec = spec.set("retry.max_attempts", "2");
    for restart in 1..=7 {
        let mut worker = spec.start();
        eventually("the order is in hand", PATIENCE, async || {
            equal(worker.try_metrics().await?.get("held_deliveries"), Some(1.0)).map_err(|seen| format!("{seen:?}"))
        })
        .await;
        let recorded = u64::from(restart >= SUSPECT_FROM);
        eventually("its run has begun", PATIENCE, async || {
            let started = spec.db().scalar("SELECT coalesce(sum(started), 0) FROM attempts").await;
            equal(started.cast_unsigned(), recorded)
        })
        .await;
        worker.term();
        worker.not_ready("drain").await;
        if restart % 2 == 0 {
            worker.kill9();
        } else {
            worker.term();
            worker.wait_exit(PATIENCE).await;
        }
    }
    unstick(&broker, &spec).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
    spec.db().applied_once(1).await;
}

#[tokio::test]
async fn a_drain_that_cannot_commit_ends_at_its_deadline_with_exit_code_1() {
    let server = NatsServer::start().await;
    let (broker, spec, mut worker) = stuck_worker(&server, "1s").await;

    worker.term();
    assert_eq!(worker.wait_exit(PATIENCE).await.code(), Some(1));
    worker.logged(&["ERROR", "deadline"]).await;
    assert_eq!(spec.db().count("orders").await, 0);
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 0, "nothing is acknowledged without a commit");

    unstick(&broker, &spec).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(50).await;
}

#[tokio::test]
async fn restarts_over_a_held_backlog_dead_letter_nothing() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    // What a killed worker held comes again soon.
    broker.create(stream_config(), impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url())
        .set("retry.max_attempts", "2")
        .set("shutdown.timeout", "1s")
        .set("batch.max_messages", "16");
    broker.publish_numbered(1..=100).await;

    // Three times as many as attempts are allowed.
    for restart in 0..6 {
        // The server delivers nothing until the database is in another hand: so the worker gets the orders and keeps them.
        broker.pause_consumer(NEVER).await;
        let mut worker = spec.start();
        worker.ready().await;
        let writer = spec.db().lock().await;
        broker.resume_consumer().await;
        eventually("the worker holds orders", PATIENCE, async || {
            at_least(worker.metrics().await.get("held_deliveries"), Some(1.0))
        })
        .await;
        if restart % 2 == 0 {
            worker.term();
            worker.wait_exit(PATIENCE).await;
        } else {
            worker.kill9();
        }
        assert_eq!(spec.db().count("orders").await, 0, "all of it was only held");
        writer.close().await.unwrap();
    }

    let mut worker = spec.start();
    broker.acknowledged(100).await;
    spec.db().applied_once(100).await;
    assert_eq!(spec.db().count("attempts").await, 0, "no attempt is spent on restarts");
    let again = worker.metrics().await.get("redeliveries_total{seen_by=\"server\"}");
    assert!(again >= Some(1.0), "the server has counted the restarts: {again:?}");
    worker.drain().await;
}

/// A worker that has processed five orders, and with a deadline that ends no test.
async fn five_orders(broker: &Broker, server: &NatsServer) -> (DaemonSpec, Daemon) {
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", NO_DEADLINE);
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    (spec, worker)
}

async fn no_server() {
    let spec = DaemonSpec::new(format!("nats://127.0.0.1:{}", free_port())).set("shutdown.timeout", NO_DEADLINE);
    let mut worker = spec.start();
    worker.not_ready("connect").await;
    worker.drain().await;
}

async fn no_stream() {
    let server = NatsServer::start().await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", NO_DEADLINE);
    let mut worker = spec.start();
    worker.not_ready("stream ORDERS").await;
    worker.drain().await;
}

async fn server_killed() {
    let (mut server, broker) = Broker::story().await;
    let (spec, mut worker) = five_orders(&broker, &server).await;
    server.kill9();
    worker.not_ready("connect").await;
    worker.drain().await;
    spec.db().applied_once(5).await;
}

async fn server_frozen() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", "3s");
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    server.freeze();
    worker.term();
    let status = worker.wait_exit(PATIENCE).await;
    server.thaw();
    assert!(matches!(status.code(), Some(0 | 1)), "{status}");
    spec.db().applied_once(5).await;
}

async fn consumer_paused() {
    let (server, broker) = Broker::story().await;
    let (spec, mut worker) = five_orders(&broker, &server).await;
    broker.pause_consumer(NEVER).await;
    broker.publish_numbered(6..=25).await;
    worker.metric("consumer_num_pending", 20.0).await;
    worker.drain().await;
    broker.resume_consumer().await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(25).await;
}

#[tokio::test]
async fn sigterm_ends_a_worker_whose_server_cannot_serve_it() {
    tokio::join!(no_server(), no_stream(), server_killed(), server_frozen(), consumer_paused());
}

#[tokio::test]
async fn sigterm_over_a_dead_cable_ends_within_the_deadline_and_loses_nothing() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    broker.publish_numbered(1..=2_000).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url()).set("batch.max_messages", "16").set("shutdown.timeout", "3s");
    let mut worker = worker_in_the_middle(&spec).await;

    proxy.stall();
    worker.term();
    let status = worker.wait_exit(PATIENCE).await;
    assert!(matches!(status.code(), Some(0 | 1)), "{status}");
    proxy.heal();

    let _next = spec.start();
    broker.acknowledged(2_000).await;
    spec.db().applied_once(2_000).await;
}

#[tokio::test]
async fn a_drain_on_a_busy_database_acknowledges_what_is_committed() {
    let (server, broker) = Broker::with(patient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", NO_DEADLINE).set("batch.max_messages", "16");
    let mut worker = spec.start();
    worker.ready().await;
    // The first upkeep is over then.
    broker.publish_numbered(1..=1).await;
    broker.acknowledged(1).await;
    let writer = spec.db().lock().await;
    broker.publish_numbered(2..=50).await;
    // More than one batch: some of it has not been started, whatever becomes of the batch in hand.
    eventually("the worker holds orders", PATIENCE, async || {
        at_least(worker.metrics().await.get("held_deliveries"), Some(17.0))
    })
    .await;

    worker.term();
    worker.not_ready("drain").await;
    writer.close().await.unwrap();
    assert_eq!(worker.wait_exit(PATIENCE).await.code(), Some(0));

    let info = broker.consumer_info().await;
    let applied = spec.db().count("orders").await;
    eventually("what is applied is acknowledged", PATIENCE, async || {
        let info = broker.consumer_info().await;
        equal(info.delivered.stream_sequence - info.num_ack_pending as u64, applied.unsigned_abs())
    })
    .await;
    assert_eq!(info.num_waiting, 0, "no pull stays behind");
    assert!(info.num_ack_pending > 0, "there was something to hand back");
    let _next = spec.start();
    broker.acknowledged(50).await;
    spec.db().applied_once(50).await;
}

#[tokio::test]
async fn sighup_reloads_the_log_level_and_nothing_stops() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let file = spec.folder().join("config.toml");
    std::fs::write(&file, "[log]\nlevel = \"info\"\n").unwrap();
    let mut worker = spec.start_with(&["--config", "config.toml", "run"]);
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    assert!(!worker.log().contains("DEBUG"), "one line per batch is for debug only");

    std::fs::write(&file, "[log]\nlevel = \"debug\"\n").unwrap();
    worker.send_signal("HUP");
    eventually("debug lines are logged", PATIENCE, async || {
        broker.publish("Order Data").await;
        if worker.log().contains("DEBUG") { Ok(()) } else { Err(worker.log()) }
    })
    .await;
    assert_eq!(worker.exited(), None);
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn sigterm_right_after_the_start_is_never_lost() {
    let (server, _broker) = Broker::story().await;
    // From before the handlers are installed, when the kernel itself ends the process, to after the first pull.
    for delay_ms in (0..200).step_by(10) {
        let spec = DaemonSpec::new(server.url());
        let mut worker = spec.start();
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        worker.term();
        let status = worker.wait_exit(PATIENCE).await;
        assert!(matches!(status.code(), Some(0) | None), "after {delay_ms} ms: {status}");
    }
}
