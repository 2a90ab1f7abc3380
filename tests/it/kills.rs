//! Ends that nobody asked for: the worker killed, the server killed, the network cut, the stream replaced.

use std::time::Duration;

use async_nats::jetstream::consumer;

use crate::support::nats::{consumer_config, headers, patient_consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, FaultProxy, PATIENCE, at_least, equal, eventually};

/// What a killed worker held comes again after a second, so that the tests need not wait for half a minute.
fn short_ack_wait() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: Duration::from_secs(1), ..consumer_config() }
}

#[tokio::test]
async fn killed_at_thirty_random_moments_it_applies_each_order_once() {
    const KILLS: u64 = 30;
    const ORDERS: u64 = 20_000;
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}: SEED={seed} plays the same moments again");
    let mut random = fastrand::Rng::with_seed(seed);
    let (server, broker) = Broker::with(short_ack_wait()).await;
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
async fn killed_while_frozen_between_delivery_and_commit_it_loses_nothing() {
    let (server, broker) = Broker::with(short_ack_wait()).await;
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
async fn a_worker_that_was_frozen_past_ack_wait_goes_on_and_applies_nothing_twice() {
    let (server, broker) = Broker::with(short_ack_wait()).await;
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
async fn server_killed_in_the_middle_of_a_backlog_brings_no_order_twice_and_loses_none() {
    let (mut server, broker) = Broker::with(short_ack_wait()).await;
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
async fn after_a_clean_server_restart_orders_flow_again_without_a_worker_restart() {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;

    server.stop().await;
    worker.not_ready("connect").await;
    server.restart().await;
    let broker = Broker::connect(&server).await;
    broker.publish("Order Data 2").await;

    broker.acknowledged(2).await;
    worker.ready().await;
    spec.db().applied_once(2).await;
    worker.drain().await;
}

#[tokio::test]
async fn cut_connections_lose_nothing_and_deliveries_flow_again() {
    let (server, broker) = Broker::with(short_ack_wait()).await;
    broker.publish_numbered(1..=10_000).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url()).set("batch.max_messages", "64");
    let mut worker = spec.start();
    for cut in 1..=5 {
        eventually("it gets on", PATIENCE, async || at_least(spec.db().count("orders").await, cut * 1_000)).await;
        proxy.cut();
    }
    broker.acknowledged(10_000).await;
    spec.db().applied_once(10_000).await;
    worker.drain().await;
}

#[tokio::test]
async fn acknowledgements_lost_on_the_way_make_duplicates_and_no_second_effect() {
    let (server, broker) = Broker::with(short_ack_wait()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;

    // Deliveries arrive and are committed; their acknowledgements are stuck, and then gone with the connection.
    proxy.stall_to_server();
    broker.publish_numbered(1..=50).await;
    spec.db().has("orders", 50).await;
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 0);
    proxy.cut();
    proxy.heal();

    broker.acknowledged(50).await;
    spec.db().applied_once(50).await;
    let duplicates = worker.metrics().await.get("outcomes_total{outcome=\"duplicate\"}");
    assert!(duplicates >= Some(1.0), "duplicates: {duplicates:?}");
    worker.drain().await;
}

#[tokio::test]
async fn a_dead_cable_is_noticed_and_deliveries_flow_again_when_it_lives() {
    let (server, broker) = Broker::with(short_ack_wait()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;

    proxy.stall();
    eventually("not ready over a dead cable", PATIENCE, async || equal(worker.get("/readyz").await.0, 503)).await;
    broker.publish_numbered(1..=50).await;
    proxy.heal();

    broker.acknowledged(50).await;
    spec.db().applied_once(50).await;
    worker.ready().await;
    worker.drain().await;
}

/// The end of a pull then comes after the next pull was sent, and must not be taken for the end of that one.
#[tokio::test]
async fn small_batches_do_not_wait_when_the_link_breaks_up_what_the_server_says() {
    let (server, broker) = Broker::with(patient_consumer_config()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url()).set("batch.max_messages", "1");
    let mut worker = spec.start();
    worker.ready().await;

    proxy.break_up(32);
    broker.publish_numbered(1..=150).await;

    // A wait of a second for each would be too long.
    broker.acknowledged(150).await;
    spec.db().applied_once(150).await;
    worker.drain().await;
}

#[tokio::test]
async fn stream_recreated_under_a_running_worker_loses_no_order() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;
    // The same sequences, and even the same texts, and yet other orders.
    broker.publish_numbered(1..=5).await;

    spec.db().has("orders", 10).await;
    broker.acknowledged(5).await;
    spec.db().applied_once(10).await;
    let rebinds = worker.metrics().await.get("consumer_rebinds_total");
    assert!(rebinds >= Some(1.0), "it is counted: {rebinds:?}");
    worker.drain().await;
}

/// The worst moment for it: redeliveries of the old stream lie unread in the worker's socket.
#[tokio::test]
async fn redeliveries_of_a_former_stream_are_not_taken_for_messages_of_the_new_one() {
    let (server, broker) = Broker::with(short_ack_wait()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    // Applied, and the server does not hear of it: it delivers again, to a worker that does not read.
    proxy.stall_to_server();
    broker.publish_numbered(6..=45).await;
    spec.db().has("orders", 45).await;
    worker.freeze();
    eventually("the server delivers again", PATIENCE, async || {
        at_least(broker.consumer_info().await.delivered.consumer_sequence, 85)
    })
    .await;
    broker.delete_stream().await;
    broker.create(stream_config(), short_ack_wait()).await;
    broker.publish_numbered(46..=75).await;
    proxy.heal();
    worker.thaw();

    spec.db().has("orders", 75).await;
    broker.acknowledged(30).await;
    spec.db().applied_once(75).await;
    let texts = spec.db().scalar("SELECT count(DISTINCT payload) FROM orders").await;
    assert_eq!(texts, 75, "no order has two ids");
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn stream_recreated_while_no_worker_runs_loses_no_order() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;

    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;

    broker.acknowledged(5).await;
    spec.db().applied_once(10).await;
}

#[tokio::test]
async fn stream_deleted_under_a_running_worker_is_not_ready_until_it_is_back() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;

    broker.delete_stream().await;
    worker.not_ready("order-processor setup").await;
    broker.create(stream_config(), consumer_config()).await;
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn consumer_recreated_under_a_running_worker_repeats_nothing_and_loses_nothing() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    broker.delete_consumer().await;
    broker.create_consumer(patient_consumer_config()).await;
    broker.publish_numbered(6..=10).await;

    broker.acknowledged(10).await;
    spec.db().applied_once(10).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_purged_stream_goes_on_with_what_is_published_next() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    broker.jetstream.get_stream("ORDERS").await.unwrap().purge().await.unwrap();
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "after")]), b"Order Data 6".to_vec()).await;

    broker.acknowledged(6).await;
    spec.db().applied_once(6).await;
    worker.drain().await;
}
