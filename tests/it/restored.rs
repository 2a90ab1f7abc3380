//! A stream that is restored from a snapshot holds the messages of before, whatever its creation time: nothing is applied twice.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::{Value, json};

use crate::support::nats::{STREAM, consumer_config};
use crate::support::{Broker, DaemonSpec};

/// A stream with its consumers, as `nats stream backup` stores it.
struct Snapshot {
    answer: Value,
    chunks: Vec<Bytes>,
}

impl Snapshot {
    async fn take(broker: &Broker) -> Self {
        let deliver = broker.client.new_inbox();
        let mut inbox = broker.client.subscribe(deliver.clone()).await.unwrap();
        let request = json!({ "deliver_subject": deliver, "no_consumers": false, "chunk_size": 65536 });
        let answer = ask(broker, format!("$JS.API.STREAM.SNAPSHOT.{STREAM}"), request.to_string().into()).await;
        let mut chunks = Vec::new();
        loop {
            let chunk = tokio::time::timeout(Duration::from_secs(5), inbox.next()).await.unwrap().unwrap();
            if chunk.payload.is_empty() {
                return Self { answer, chunks };
            }
            if let Some(reply) = chunk.reply {
                broker.client.publish(reply, Bytes::new()).await.unwrap();
            }
            chunks.push(chunk.payload);
        }
    }

    /// Needs that the stream does not exist.
    async fn restore(&self, broker: &Broker) {
        let request = json!({ "config": self.answer["config"], "state": self.answer["state"] });
        let answer = ask(broker, format!("$JS.API.STREAM.RESTORE.{STREAM}"), request.to_string().into()).await;
        let subject = answer["deliver_subject"].as_str().unwrap().to_owned();
        for chunk in &self.chunks {
            broker.client.request(subject.clone(), chunk.clone()).await.unwrap();
        }
        ask(broker, subject, Bytes::new()).await;
    }
}

async fn ask(broker: &Broker, subject: String, payload: Bytes) -> Value {
    let answer = broker.client.request(subject, payload).await.unwrap();
    let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
    assert_eq!(answer["error"], Value::Null, "{answer}");
    answer
}

#[tokio::test]
async fn a_restored_stream_holds_the_same_orders_and_none_is_applied_twice() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=10).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(11..=20).await;
    let created = broker.stream_info().await.created;
    let snapshot = Snapshot::take(&broker).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(20).await;

    broker.delete_stream().await;
    snapshot.restore(&broker).await;
    assert_ne!(broker.stream_info().await.created, created, "this is what makes it look like another stream");
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(20).await;
    assert_eq!(spec.run_ok(&["audit", "--json"]).await.json()["missing"], 0);

    // The whole stream once more.
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(20).await;
    broker.publish_numbered(21..=25).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(25).await;
}

#[tokio::test]
async fn a_stream_restored_under_a_running_daemon_has_no_second_effect() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=10).await;
    let mut worker = spec.start();
    broker.acknowledged(10).await;
    let snapshot = Snapshot::take(&broker).await;
    broker.publish_numbered(11..=20).await;
    broker.acknowledged(20).await;
    broker.delete_stream().await;
    snapshot.restore(&broker).await;
    // The server gives the sequences 11 to 20 to other orders.
    broker.publish_numbered(21..=30).await;
    broker.acknowledged(20).await;
    spec.db().applied_once(30).await;
    worker.drain().await;
}
