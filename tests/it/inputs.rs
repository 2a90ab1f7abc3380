//! What may be in a message: the collected shapes of real publishers, sizes, ids, and what no client can parse.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::stream;
use serde::Deserialize;
use sqlx::Row;

use crate::support::nats::{consumer_config, headers, patient_consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, ServerSpec};

/// One line of `inputs/messages.ndjson`.
#[derive(Deserialize)]
struct Input {
    name: String,
    subject: String,
    headers: std::collections::BTreeMap<String, OneOrMany>,
    payload: Option<String>,
    payload_base64: Option<String>,
    outcome: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl Input {
    fn all() -> Vec<Self> {
        let lines = include_str!("inputs/messages.ndjson").lines();
        lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
    }

    fn header_map(&self) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, values) in &self.headers {
            match values {
                OneOrMany::One(value) => map.append(name.as_str(), value.as_str()),
                OneOrMany::Many(values) => values.iter().for_each(|value| map.append(name.as_str(), value.as_str())),
            }
        }
        map
    }

    fn bytes(&self) -> Vec<u8> {
        match (&self.payload, &self.payload_base64) {
            (Some(text), None) => text.clone().into_bytes(),
            (None, Some(coded)) => base64(coded),
            _ => panic!("{}: one payload is needed", self.name),
        }
    }

    fn message_id(&self) -> Option<String> {
        self.header_map().get("Nats-Msg-Id").map(ToString::to_string)
    }
}

fn base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bits = 0_u32;
    let mut bytes = Vec::new();
    for (position, letter) in text.bytes().filter(|letter| *letter != b'=').enumerate() {
        let value = ALPHABET.iter().position(|known| *known == letter).expect("a base64 letter");
        bits = (bits << 6) | u32::try_from(value).unwrap();
        if position % 4 != 0 {
            let shift = [0, 4, 2, 0][position % 4];
            bytes.push(u8::try_from((bits >> shift) & 0xff).unwrap());
        }
    }
    bytes
}

/// The server's duplicate window is shortened, so that a repetition reaches the daemon at all.
async fn broker_with_short_window(server: &NatsServer) -> Broker {
    let broker = Broker::connect(server).await;
    let stream = stream::Config { duplicate_window: Duration::from_millis(100), ..stream_config() };
    broker.create(stream, consumer_config()).await;
    broker
}

/// What the database says became of a message.
async fn outcome(spec: &DaemonSpec, stream_seq: u64) -> &'static str {
    let count = async |table: &str| {
        spec.db().scalar(&format!("SELECT count(*) FROM {table} WHERE stream_seq = {stream_seq}")).await
    };
    match (count("orders").await, count("dead_letters").await) {
        (0, 0) => "duplicate",
        (1, 0) => "applied",
        (0, 1) => "dead-lettered",
        other => panic!("message {stream_seq} has orders and dead letters {other:?}"),
    }
}

#[tokio::test]
async fn every_collected_input_gets_its_stated_outcome_and_keeps_its_bytes() {
    let server = NatsServer::start().await;
    let broker = broker_with_short_window(&server).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();

    let inputs = Input::all();
    let mut stored = Vec::new();
    for input in &inputs {
        stored.push(broker.publish_anew(&input.subject, input.header_map(), input.bytes()).await);
    }
    broker.acknowledged(stored.last().unwrap().stream_seq).await;

    for (input, stored) in inputs.iter().zip(&stored) {
        let seq = stored.stream_seq;
        assert_eq!(outcome(&spec, seq).await, input.outcome, "{}", input.name);
        let table = match input.outcome.as_str() {
            "applied" => "orders",
            "dead-lettered" => "dead_letters",
            _ => continue,
        };
        let rows = spec.db().rows(&format!("SELECT id, subject, payload FROM {table} WHERE stream_seq = {seq}")).await;
        let (id, subject, payload): (String, String, Vec<u8>) = (rows[0].get(0), rows[0].get(1), rows[0].get(2));
        assert_eq!((subject, payload), (input.subject.clone(), input.bytes()), "{}", input.name);
        match input.message_id() {
            // The client's parser takes white space off the ends of a header's value.
            Some(wanted) => assert_eq!(id, wanted.trim(), "{}", input.name),
            None => assert!(id.starts_with("ORDERS@"), "{}: the id is the position, not {id}", input.name),
        }
    }

    let letters = spec.db().rows("SELECT reason, error, headers FROM dead_letters").await;
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].get::<String, _>("reason"), "conflict");
    assert_ne!(letters[0].get::<String, _>("error"), "");
    let kept: serde_json::Value = serde_json::from_str(&letters[0].get::<String, _>("headers")).unwrap();
    assert_eq!(kept["Nats-Msg-Id"], serde_json::json!(["b54557e4-bdd9-4b37-8a5f-bf7d70bcd043"]));

    let count = |outcome: &str| inputs.iter().filter(|input| input.outcome == outcome).count();
    let metrics = worker.metrics().await;
    for outcome in ["applied", "duplicate", "dead-lettered"] {
        let seen = metrics.get(&format!("outcomes_total{{outcome=\"{outcome}\"}}"));
        assert_eq!(seen, Some(count(outcome) as f64), "{outcome}");
    }
    assert_eq!(metrics.get("dead_letters_total{reason=\"conflict\"}"), Some(1.0));
    worker.drain().await;
}

#[tokio::test]
async fn with_an_id_pointer_ids_come_from_the_payload_unless_a_header_has_one() {
    let server = NatsServer::start().await;
    let broker = broker_with_short_window(&server).await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    let mut worker = spec.start();

    let inputs = Input::all();
    let mut last = 0;
    for input in &inputs {
        let stored = broker.publish_anew(&input.subject, input.header_map(), input.bytes()).await;
        last = stored.stream_seq;
        broker.acknowledged(last).await;
        // Without a header the payload has to give the id, and plain text cannot.
        let undecodable =
            input.message_id().is_none() && serde_json::from_slice::<serde::de::IgnoredAny>(&input.bytes()).is_err();
        let wanted = if undecodable { "dead-lettered" } else { input.outcome.as_str() };
        assert_eq!(outcome(&spec, last).await, wanted, "{}", input.name);
        if undecodable {
            let reason = spec.db().texts(&format!("SELECT reason FROM dead_letters WHERE stream_seq = {last}")).await;
            assert_eq!(reason, ["undecodable"], "{}", input.name);
        }
    }

    let ids = spec.db().texts("SELECT id FROM processed_ids WHERE id LIKE '%A234-1234-1234'").await;
    assert_eq!(ids, ["ORDERS.shipped A234-1234-1234"], "the id is scoped by subject");
    let event = r#"{"id": "A234-1234-1234", "changed": true}"#;
    let conflict = broker.publish_to("ORDERS.shipped", HeaderMap::new(), event.into()).await.stream_seq;
    let elsewhere = broker.publish_to("ORDERS.billed", HeaderMap::new(), event.into()).await.stream_seq;
    let again = broker.publish_to("ORDERS.billed", HeaderMap::new(), event.into()).await.stream_seq;
    broker.acknowledged(again).await;
    assert_eq!(again, last + 3);
    assert_eq!(outcome(&spec, conflict).await, "dead-lettered");
    assert_eq!(outcome(&spec, elsewhere).await, "applied");
    assert_eq!(outcome(&spec, again).await, "duplicate");
    worker.drain().await;
}

#[tokio::test]
async fn duplicates_within_one_batch_and_across_restarts_have_no_second_effect() {
    let server = NatsServer::start().await;
    let broker = broker_with_short_window(&server).await;
    let spec = DaemonSpec::new(server.url());
    let publish_all = async || {
        for n in 1..=3 {
            let id = headers(&[("Nats-Msg-Id", &format!("order-{n}"))]);
            broker.publish_anew("ORDERS.new", id, format!("Order Data {n}").into_bytes()).await;
        }
    };

    // Nobody works while they are published, so they wait together and are delivered together.
    publish_all().await;
    publish_all().await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(6).await;
    spec.db().applied_once(3).await;

    publish_all().await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(9).await;
    spec.db().applied_once(3).await;
    assert_eq!(spec.db().count("processed_ids").await, 3);
}

#[tokio::test]
async fn a_redelivered_message_is_acknowledged_without_a_second_effect() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=20).await;
    spec.run_ok(&["run", "--until-idle"]).await;

    // The new consumer knows nothing of the old one's acknowledgements: all come again with `delivered` = 1.
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    let mut worker = spec.start();
    broker.acknowledged(20).await;

    spec.db().applied_once(20).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 20.0).await;
    worker.metric("redeliveries_total{seen_by=\"inbox\"}", 20.0).await;
    worker.drain().await;
}

#[tokio::test]
async fn an_empty_payload_and_one_of_a_mebibyte_are_orders_like_any_other() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let largest: Vec<u8> = (0..1024 * 1024).map(|n| u8::try_from(n % 251).unwrap()).collect();
    broker.publish_to("ORDERS.new", HeaderMap::new(), Vec::new()).await;
    broker.publish_to("ORDERS.new", HeaderMap::new(), largest.clone()).await;
    broker.publish_to("ORDERS.new", HeaderMap::new(), b"small".to_vec()).await;

    spec.run_ok(&["run", "--until-idle"]).await;

    broker.acknowledged(3).await;
    let payloads: Vec<Vec<u8>> =
        spec.db().rows("SELECT payload FROM orders ORDER BY stream_seq").await.iter().map(|row| row.get(0)).collect();
    assert!(payloads == [Vec::new(), largest, b"small".to_vec()], "payloads are kept byte for byte");
}

#[tokio::test]
async fn a_message_larger_than_a_batch_does_not_block_the_rest() {
    let config = "max_payload: 4MB".to_owned();
    let server = NatsServer::with(ServerSpec { config, ..ServerSpec::default() }).await;
    let broker = Broker::connect(&server).await;
    broker.create(stream_config(), patient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_bytes", (1024 * 1024).to_string());
    for size in [10, 3 * 1024 * 1024, 10, 1024 * 1024, 3 * 1024 * 1024, 10] {
        broker.publish_to("ORDERS.new", HeaderMap::new(), vec![b'x'; size]).await;
    }

    let mut worker = spec.start();
    broker.acknowledged(6).await;

    spec.db().applied_once(6).await;
    worker.drain().await;
}
