//! Ends that nobody asked for: the worker killed, frozen or taken down by an order, the server killed.

use std::future::pending;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use order_processor::config::Config;
use order_processor::store::Store;
use order_processor::telemetry::Telemetry;
use order_processor::worker::worker::{Until, Worker};
use sqlx::{ConnectOptions, Row};
use tokio_util::sync::CancellationToken;

use crate::support::in_process::{Bench, Clerk, make_effects};
use crate::support::nats::{consumer_config, impatient_consumer_config, patient_consumer_config};
use crate::support::{Broker, DaemonSpec, PATIENCE, at_least, eventually};

#[tokio::test]
async fn a_worker_killed_at_thirty_random_moments_applies_each_order_once() {
    const KILLS: u64 = 30;
    const ORDERS: u64 = 20_000;
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}: SEED={seed} plays the same moments again");
    let mut random = fastrand::Rng::with_seed(seed);
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    broker.publish_numbered(1..=ORDERS).await;
    // Small batches make many moments: each has its claim, its commit and its acknowledgements.
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "8");

    for kill in 0..KILLS {
        let before = spec.db().count("orders").await;
        let mut worker = spec.start();
        // Every second one dies at work, the others anywhere from the start of the process on.
        if kill % 2 == 0 {
            eventually("it works", PATIENCE, async || at_least(spec.db().count("orders").await, before + 1)).await;
        }
        // Not a wait for anything: this is the random moment.
        tokio::time::sleep(Duration::from_micros(random.u64(0..50_000))).await;
        worker.kill9();
    }
    let applied = spec.db().count("orders").await;
    assert!(applied.unsigned_abs() < ORDERS, "all kills hit before the last order");

    let mut worker = spec.start();
    broker.acknowledged(ORDERS).await;
    spec.db().applied_once(i64::try_from(ORDERS).unwrap()).await;
    let payloads = spec.db().scalar("SELECT count(DISTINCT payload) FROM orders").await;
    assert_eq!(payloads.unsigned_abs(), ORDERS, "each order's own text is there");
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_killed_while_frozen_loses_nothing() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    broker.publish_numbered(1..=2_000).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "16");
    let mut worker = spec.start();
    eventually("the first orders are applied", PATIENCE, async || at_least(spec.db().count("orders").await, 1)).await;

    worker.freeze();
    // Another worker's database would be another one; the held orders wait for this file.
    let held = broker.consumer_info().await.num_ack_pending;
    worker.kill9();
    println!("{held} deliveries were held");

    let _next = spec.start();
    broker.acknowledged(2_000).await;
    spec.db().applied_once(2_000).await;
}

#[tokio::test]
async fn a_worker_frozen_past_ack_wait_applies_nothing_twice() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    broker.publish_numbered(1..=2_000).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "16");
    let mut worker = spec.start();
    eventually("the first orders are applied", PATIENCE, async || at_least(spec.db().count("orders").await, 1)).await;

    worker.freeze();
    let held = broker.consumer_info().await.num_ack_pending;
    if held > 0 {
        // The server takes them for lost; its own count says when.
        eventually("the deliveries timed out", PATIENCE, async || {
            let info = broker.consumer_info().await;
            if info.num_redelivered > 0 || info.num_waiting == 0 { Ok(()) } else { Err(info) }
        })
        .await;
    }
    worker.thaw();

    broker.acknowledged(2_000).await;
    spec.db().applied_once(2_000).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_server_killed_in_a_backlog_doubles_and_loses_nothing() {
    let (mut server, broker) = Broker::with(impatient_consumer_config()).await;
    broker.publish_numbered(1..=5_000).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "16");
    let mut worker = spec.start();
    for wanted in [500, 2_500] {
        eventually("it gets on", PATIENCE, async || at_least(spec.db().count("orders").await, wanted)).await;
        server.kill9();
        server.restart().await;
    }
    let broker = Broker::connect(&server).await;
    broker.acknowledged(5_000).await;
    spec.db().applied_once(5_000).await;
    worker.metric("nats_reconnects_total", 2.0).await;
    worker.drain().await;
}

#[tokio::test]
async fn an_order_that_keeps_crashing_the_process_is_quarantined_alone() {
    let bench = Bench::new(impatient_consumer_config(), &[("retry.max_attempts", "3")]).await;
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
    let store = Store::open(&config.database).await.unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(config.database.to_string());
    make_effects(&mut options.connect().await.unwrap()).await;
    let worker = Worker::new(Arc::new(config), store, Clerk::new(), Arc::new(Telemetry::new()), Until::Idle);
    worker.run(CancellationToken::new(), pending()).await.unwrap();
}

/// The worker of [`child`] in its process. It is killed with this value.
struct ChildWorker(Child);

impl ChildWorker {
    fn start(spec: &DaemonSpec) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this test binary has a path"));
        command.args(["--exact", "crashes::child", "--ignored"]).env_clear().envs(spec.environment());
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

#[tokio::test]
async fn restarts_while_the_database_fails_are_not_crashes_of_its_order() {
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
async fn runs_that_a_stop_cuts_off_are_not_crashes_of_their_order() {
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
