//! What operators do to the consumer under the worker and while it is away: edited, filtered, paused, reset, recreated.

use std::time::Duration;

use async_nats::jetstream::consumer::{self, DeliverPolicy};
use sqlx::Connection;

use crate::support::nats::{consumer_config, headers};
use crate::support::{Broker, Daemon, DaemonSpec, PATIENCE, at_least, eventually};

#[tokio::test]
async fn a_shorter_ack_wait_runs_no_held_order_twice_and_brings_no_storm() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    let writer = spec.db().lock().await;
    broker.publish_numbered(1..=20).await;
    worker.metric("held_deliveries", 20.0).await;

    broker.edit_consumer(consumer::pull::Config { ack_wait: Duration::from_secs(1), ..consumer_config() }).await;
    worker.logged(&["WARN", "the consumer was edited", "ack_wait"]).await;
    // From now on what is held is kept alive in time: five seconds of the busy database bring no delivery more.
    let before = broker.consumer_info().await.delivered.consumer_sequence;
    let busy = worker.metrics().await.get("db_errors_total{class=\"busy\"}").unwrap_or_default();
    eventually("the database was busy for a while", PATIENCE, async || {
        at_least(worker.metrics().await.get("db_errors_total{class=\"busy\"}"), Some(busy + 2.0))
    })
    .await;
    let after = broker.consumer_info().await.delivered.consumer_sequence;
    println!("{before} deliveries of 20 orders until the edit was noticed, {after} in the end");
    assert!(after <= before + 20, "{before} {after}");
    writer.close().await.unwrap();
    broker.acknowledged(20).await;
    spec.db().applied_once(20).await;

    broker.edit_consumer(consumer_config()).await;
    broker.publish_numbered(21..=30).await;
    broker.acknowledged(30).await;
    spec.db().applied_once(30).await;
    worker.drain().await;
}

#[tokio::test]
async fn an_edit_that_must_be_refused_stops_the_work_until_corrected() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.edit_consumer(consumer::pull::Config { max_deliver: 5, ..consumer_config() }).await;
    worker.not_ready("max_deliver 5, more than retry.max_attempts 5 is needed").await;
    worker.logged(&["setup --update --unset max-deliver"]).await;
    broker.publish("Order Data 1").await;
    assert_eq!(spec.db().count("orders").await, 0);

    broker.edit_consumer(consumer::pull::Config { max_deliver: 20, ..consumer_config() }).await;
    worker.ready().await;
    broker.acknowledged(1).await;
    worker.logged(&["WARN", "max_deliver 20: deliveries lost"]).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn max_ack_pending_of_one_is_warned_of_once_and_orders_flow() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.publish_numbered(1..=50).await;
    broker.acknowledged(50).await;
    broker.edit_consumer(consumer::pull::Config { max_ack_pending: 1, ..consumer_config() }).await;
    broker.publish_numbered(51..=70).await;
    broker.acknowledged(70).await;
    worker.logged(&["WARN", "has max_ack_pending 1,"]).await;
    broker.edit_consumer(consumer_config()).await;
    broker.publish_numbered(71..=120).await;
    broker.acknowledged(120).await;
    spec.db().applied_once(120).await;
    assert_eq!(worker.lines(&["has max_ack_pending 1,"]), 1);
    worker.drain().await;
}

#[tokio::test]
async fn a_filter_set_and_removed_loses_nothing_that_is_for_the_worker() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    let publish = async |subject: &str, text: &str| broker.publish_to(subject, headers(&[]), text.into()).await;
    publish("ORDERS.new", "1").await;
    publish("ORDERS.other", "2").await;
    broker.acknowledged(2).await;
    broker.edit_consumer(consumer::pull::Config { filter_subject: "ORDERS.new".into(), ..consumer_config() }).await;
    publish("ORDERS.other", "not for us").await;
    publish("ORDERS.new", "4").await;
    broker.acknowledged(4).await;
    worker.logged(&["the consumer was edited", "ORDERS.new"]).await;
    broker.edit_consumer(consumer_config()).await;
    publish("ORDERS.other", "5").await;
    publish("ORDERS.new", "6").await;
    broker.acknowledged(6).await;
    let applied = spec.db().texts("SELECT CAST(payload AS TEXT) FROM orders ORDER BY stream_seq").await;
    assert_eq!(applied, ["1", "2", "4", "5", "6"]);
    assert_eq!(worker.metrics().await.get("messages_expired_total"), Some(0.0));
    worker.ready().await;
    worker.drain().await;
}

/// Makes the consumer begin at the first message again.
async fn rewind(broker: &Broker, recreate: bool) {
    if recreate {
        let deliver_policy = DeliverPolicy::ByStartSequence { start_sequence: 1 };
        broker.delete_consumer().await;
        broker.create_consumer(consumer::pull::Config { deliver_policy, ..consumer_config() }).await;
    } else {
        let request = broker.client.request("$JS.API.CONSUMER.RESET.ORDERS.order-processor", r#"{"seq":1}"#.into());
        let answer: serde_json::Value = serde_json::from_slice(&request.await.unwrap().payload).unwrap();
        assert!(answer["error"].is_null(), "{answer}");
    }
}

/// Waits until the whole stream of `orders` messages came once more and nothing was applied.
async fn replayed(broker: &Broker, spec: &DaemonSpec, worker: &Daemon, orders: u64) {
    eventually("all came again", PATIENCE, async || {
        at_least(worker.metrics().await.get("outcomes_total{outcome=\"duplicate\"}"), Some(orders as f64))
    })
    .await;
    broker.acknowledged(orders).await;
    spec.db().applied_once(i64::try_from(orders).unwrap()).await;
}

/// Under a running worker, and while no worker runs.
async fn rewound(recreate: bool) {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.publish_numbered(1..=500).await;
    broker.acknowledged(500).await;
    rewind(&broker, recreate).await;
    replayed(&broker, &spec, &worker, 500).await;
    worker.drain().await;

    rewind(&broker, recreate).await;
    let mut worker = spec.start();
    worker.ready().await;
    replayed(&broker, &spec, &worker, 500).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_consumer_reset_or_recreated_from_the_start_applies_nothing_twice() {
    tokio::join!(rewound(false), rewound(true));
}

#[tokio::test]
async fn a_paused_consumer_is_shown_and_work_resumes_after_the_pause() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.pause_consumer(Duration::from_secs(6)).await;
    worker.metric("consumer_paused", 1.0).await;
    broker.publish_numbered(1..=5).await;
    worker.metric("consumer_num_pending", 5.0).await;
    assert_eq!(worker.get("/readyz").await.0, 200, "a pause is no fault of the worker");
    let status: serde_json::Value = serde_json::from_str(&worker.get("/status").await.1).unwrap();
    assert_eq!(status["consumer"]["paused"], true);
    assert_eq!(spec.db().count("orders").await, 0);

    broker.acknowledged(5).await;
    worker.metric("consumer_paused", 0.0).await;
    worker.logged(&["INFO", "the pause of the consumer has ended"]).await;
    assert_eq!(worker.lines(&["WARN", "the consumer is paused"]), 1);
    spec.db().applied_once(5).await;
    worker.drain().await;
}

#[tokio::test]
async fn until_idle_waits_for_the_end_of_a_pause_and_says_so() {
    let (server, broker) = Broker::story().await;
    broker.publish_numbered(1..=5).await;
    broker.pause_consumer(Duration::from_secs(3)).await;
    let spec = DaemonSpec::new(server.url());
    let finished = spec.run_ok(&["run", "--until-idle"]).await;
    assert!(finished.stderr.contains("waiting for the end of the consumer's pause"), "{finished:?}");
    spec.db().applied_once(5).await;
}
