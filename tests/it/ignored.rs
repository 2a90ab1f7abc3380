//! Messages that the server or a publisher did not mean as orders.

use std::time::{Duration, SystemTime};

use async_nats::jetstream::stream;

use crate::support::nats::{consumer_config, headers, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer};

const IGNORED: &str = "outcomes_total{outcome=\"ignored\"}";

#[tokio::test]
async fn a_delete_marker_of_the_server_is_acknowledged_without_an_effect() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let stream = stream::Config {
        max_age: Duration::from_secs(2),
        allow_message_ttl: true,
        allow_rollup: true,
        subject_delete_marker_ttl: Some(Duration::from_secs(60)),
        ..stream_config()
    };
    broker.create(stream, consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("plain 1").await;
    spec.db().has("orders", 1).await;
    // The order expires, and the server stores the marker in its place.
    broker.acknowledged(2).await;
    worker.metric(IGNORED, 1.0).await;
    worker.logged(&["ignored a delete marker of the server", "\"stream_seq\":2"]).await;
    worker.drain().await;
    spec.db().applied_once(1).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
}

#[tokio::test]
async fn the_definition_of_a_schedule_is_ignored_and_its_message_is_applied_once() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let stream = stream::Config { allow_message_schedules: true, allow_rollup: true, ..stream_config() };
    broker.create(stream, consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    let at = humantime::format_rfc3339_seconds(SystemTime::now() + Duration::from_secs(3));
    let schedule = [("Nats-Schedule", &*format!("@at {at}")), ("Nats-Schedule-Target", "ORDERS.new")];
    broker.publish_to("ORDERS.later", headers(&schedule), b"scheduled 1".to_vec()).await;
    worker.metric(IGNORED, 1.0).await;
    assert_eq!(spec.db().count("orders").await, 0, "the definition is not an order");
    spec.db().has("orders", 1).await;
    worker.drain().await;
    spec.db().applied_once(1).await;
    assert_eq!(spec.db().texts("SELECT subject FROM orders").await, ["ORDERS.new"]);
    assert_eq!(spec.db().texts("SELECT CAST(payload AS TEXT) FROM orders").await, ["scheduled 1"]);
}

#[tokio::test]
async fn ignored_messages_are_no_attempts_no_rows_and_not_missing_in_an_audit() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    for (name, value) in [("KV-Operation", "DEL"), ("KV-Operation", "PURGE"), ("Nats-Marker-Reason", "MaxAge")] {
        broker.publish_to("ORDERS.new", headers(&[(name, value)]), Vec::new()).await;
    }
    // A put is an order, and an empty header says nothing.
    broker.publish_to("ORDERS.new", headers(&[("KV-Operation", "PUT")]), b"plain 4".to_vec()).await;
    broker.publish_to("ORDERS.new", headers(&[("Nats-Marker-Reason", "")]), b"plain 5".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(5).await;
    spec.db().applied_once(2).await;
    for table in ["attempts", "dead_letters"] {
        assert_eq!(spec.db().count(table).await, 0, "{table}");
    }
    spec.run_ok(&["audit"]).await;
}
