//! A server or a network that is there and does not do what it should: frozen, silent, thin, cut, in pieces.

use std::time::{Duration, Instant};

use crate::support::nats::{impatient_consumer_config, patient_consumer_config, restricted_worker};
use crate::support::{Broker, DaemonSpec, FaultProxy, PATIENCE, at_least, eventually};

/// What operators were promised for noticing that nobody answers.
const NOTICED_WITHIN: Duration = Duration::from_secs(25);

#[tokio::test]
async fn a_frozen_server_is_noticed_and_loses_nothing() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "16");
    broker.publish_numbered(1..=2_000).await;
    let mut worker = spec.start();
    eventually("it is at work", PATIENCE, async || if spec.db().count("orders").await > 0 { Ok(()) } else { Err(()) })
        .await;

    server.freeze();
    let frozen = Instant::now();
    worker.not_ready("the server").await;
    let noticed = frozen.elapsed();
    assert!(noticed < NOTICED_WITHIN, "only after {noticed:?}");
    assert_eq!(worker.get("/livez").await.0, 200, "waiting is no reason to be restarted");
    server.thaw();

    broker.acknowledged(2_000).await;
    worker.ready().await;
    spec.db().applied_once(2_000).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_half_open_connection_is_noticed_in_time_and_replaced() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;
    // What the worker sends is swallowed, and nothing comes back: its machine sees a connection that is well.
    proxy.stall();
    let stalled = Instant::now();
    worker.not_ready("nats: ").await;
    let noticed = stalled.elapsed();
    assert!(noticed < NOTICED_WITHIN, "only after {noticed:?}");
    // The client itself waits for three pings without an answer.
    worker.logged(&["disconnected from the server"]).await;
    proxy.heal();
    broker.publish_numbered(1..=20).await;
    broker.acknowledged(20).await;
    worker.ready().await;
    spec.db().applied_once(20).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_line_too_thin_for_a_batch_within_ack_wait_doubles_nothing() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    for number in 1..=1_000 {
        let text = format!("Order Data {number}").into_bytes();
        broker.client.publish("ORDERS.new", [text, vec![b' '; 1_000]].concat().into()).await.unwrap();
    }
    // A pull of a thousand is three seconds on its way, and each of them is timed out after one.
    proxy.throttle(400_000);
    let mut worker = spec.start();
    broker.acknowledged(1_000).await;
    spec.db().applied_once(1_000).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn unanswered_requests_are_repeated_until_the_server_answers() {
    const EVERYTHING: &str = r#"allow: ["$JS.>"]"#;
    let (mut server, broker) = Broker::with_restricted_worker(EVERYTHING, impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", "1h");
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    server.reload(&restricted_worker(r#"allow: ["$JS.>"], deny: ["$JS.API.STREAM.INFO.ORDERS"]"#));
    worker.not_ready("consumer: the server does not answer").await;
    worker.logged(&["ERROR", "the server denies a subject", "STREAM.INFO"]).await;
    broker.publish_numbered(6..=10).await;
    worker.drain().await;
    let mut worker = spec.start();
    worker.not_ready("consumer: the server does not answer").await;
    assert_eq!(worker.get("/livez").await.0, 200, "waiting is no reason to be restarted");

    server.reload(&restricted_worker(EVERYTHING));
    broker.acknowledged(10).await;
    worker.ready().await;
    spec.db().applied_once(10).await;
    worker.drain().await;
}

#[tokio::test]
async fn cut_connections_lose_nothing_and_deliveries_flow_again() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
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
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;

    // The daemon pulls only after its database has accepted the bind.
    eventually("a pull is open", PATIENCE, async || at_least(broker.consumer_info().await.num_waiting, 1)).await;
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

/// The end of a pull then comes after the next pull was sent, and must not be taken for the end of that one.
#[tokio::test]
async fn small_batches_do_not_wait_when_replies_arrive_in_pieces() {
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
