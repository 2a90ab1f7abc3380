//! A server or a network that is there and does not do what it should: frozen, silent, thin.

use std::time::{Duration, Instant};

use crate::support::nats::{impatient_consumer_config, restricted_worker};
use crate::support::{Broker, DaemonSpec, FaultProxy, PATIENCE, eventually};

/// What operators were promised for noticing that nobody answers.
const NOTICED_WITHIN: Duration = Duration::from_secs(25);

#[tokio::test]
async fn a_server_that_is_frozen_is_noticed_and_goes_on_where_it_stopped() {
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
async fn a_half_open_connection_is_noticed_in_time_and_given_up() {
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
async fn over_a_line_too_thin_for_a_batch_within_ack_wait_all_is_applied_once() {
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
async fn questions_that_the_server_does_not_answer_are_asked_again_until_it_does() {
    const EVERYTHING: &str = r#"allow: ["$JS.>"]"#;
    let (mut server, broker) = Broker::with_restricted_worker(EVERYTHING, impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", "1h");
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    server.reload(&restricted_worker(r#"allow: ["$JS.>"], deny: ["$JS.API.STREAM.INFO.ORDERS"]"#));
    worker.not_ready("consumer: the server does not answer").await;
    worker.logged(&["ERROR", "the server denies us a subject", "STREAM.INFO"]).await;
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
