//! The story that the product grew from, and the operator's commands along it.

use std::collections::HashSet;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, push};
use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy, StorageType};

use crate::support::nats::{CONSUMER, consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, eventually};

#[tokio::test]
async fn five_orders_then_a_stop_then_five_more_end_at_ack_floor_ten() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());

    broker.publish_numbered(1..=5).await;
    let mut worker = spec.start();
    spec.db().has("orders", 5).await;
    broker.acknowledged(5).await;
    worker.drain().await;

    broker.publish_numbered(6..=10).await;
    assert_eq!(broker.consumer_info().await.num_pending, 5, "nobody works");
    let mut worker = spec.start();
    spec.db().has("orders", 10).await;
    broker.acknowledged(10).await;
    worker.drain().await;

    let info = broker.consumer_info().await;
    assert_eq!((info.ack_floor.stream_sequence, info.ack_floor.consumer_sequence), (10, 10));
    assert_eq!(info.num_redelivered, 0);
    let wanted: Vec<String> = (1..=10).map(|n| format!("Order Data {n}")).collect();
    let payloads = spec.db().texts("SELECT CAST(payload AS TEXT) FROM orders ORDER BY stream_seq").await;
    assert_eq!(payloads, wanted);
    spec.db().applied_once(10).await;
}

#[tokio::test]
async fn the_record_of_an_order_has_its_subject_position_and_time() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish("Order Data 1").await;
    let stored = broker.jetstream.get_stream("ORDERS").await.unwrap().get_raw_message(1).await.unwrap();

    spec.run_ok(&["run", "--until-idle"]).await;

    assert_eq!(spec.db().texts("SELECT subject FROM orders").await, ["ORDERS.new"]);
    assert_eq!(spec.db().scalar("SELECT stream_seq FROM orders").await, 1);
    let published_ns = i64::try_from(stored.time.unix_timestamp_nanos()).unwrap();
    assert_eq!(spec.db().scalar("SELECT published_at FROM orders").await, published_ns);
    let id = spec.db().texts("SELECT id FROM processed_ids").await;
    assert_eq!(id, spec.db().texts("SELECT id FROM orders").await, "both tables know the message under one id");
    assert_eq!(id, [format!("ORDERS@{published_ns}:1")]);
}

#[tokio::test]
async fn until_idle_processes_what_is_pending_and_ends() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());

    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("orders").await, 0);

    broker.publish_numbered(1..=2500).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(2500).await;
    broker.acknowledged(2500).await;
}

#[tokio::test]
async fn setup_makes_the_storys_stream_and_consumer_and_may_be_repeated() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let spec = DaemonSpec::new(server.url());

    spec.run_ok(&["setup"]).await;

    let stream = broker.stream_info().await.config;
    assert_eq!(stream.subjects, ["ORDERS.*"]);
    assert_eq!((stream.retention, stream.storage), (RetentionPolicy::Limits, StorageType::File));
    let consumer = broker.consumer_info().await.config;
    assert_eq!((consumer.ack_policy, consumer.ack_wait), (AckPolicy::Explicit, Duration::from_secs(30)));
    assert_eq!(consumer.deliver_subject, None, "it is a pull consumer");
    assert_eq!(consumer.max_deliver, -1);

    broker.publish("Order Data 1").await;
    spec.run_ok(&["setup"]).await;
    assert_eq!(broker.stream_info().await.state.messages, 1, "a second setup keeps what is there");
    // What setup makes has to pass the gate of the daemon.
    spec.run_ok(&["check"]).await;
}

#[tokio::test]
async fn teardown_asks_first() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish("Order Data 1").await;

    // Nobody is there to say yes: stdin is empty.
    let finished = spec.run(&["teardown"]).await;
    assert_ne!(finished.code, Some(0), "{finished:?}");
    assert_eq!(broker.stream_info().await.state.messages, 1);

    spec.run_ok(&["teardown", "--yes"]).await;
    eventually("the stream is gone", PATIENCE, async || {
        broker.jetstream.get_stream("ORDERS").await.map_or(Ok(()), |_| Err("still there"))
    })
    .await;
    let again = spec.run(&["teardown", "--yes"]).await;
    assert_eq!(again.complaints(), ["order-processor: stream ORDERS does not exist"]);
    assert_eq!(again.code, Some(1));
    let again = spec.run(&["teardown", "--consumer-only"]).await;
    assert_eq!(again.complaints(), ["order-processor: stream ORDERS does not exist"]);
    broker.create(stream_config(), consumer_config()).await;
    spec.run_ok(&["teardown", "--consumer-only", "--yes"]).await;
    let again = spec.run(&["teardown", "--consumer-only"]).await;
    assert_eq!(again.complaints(), ["order-processor: consumer order-processor of stream ORDERS does not exist"]);
}

#[tokio::test]
async fn setup_and_status_refuse_what_the_daemon_would_refuse() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    let status = spec.run_ok(&["status"]).await.stdout;
    assert!(!status.contains("problem"), "{status}");
    broker.delete_consumer().await;
    broker
        .create_push_consumer(push::Config {
            durable_name: Some(CONSUMER.into()),
            deliver_subject: "deliver.here".into(),
            ack_policy: AckPolicy::Explicit,
            ..Default::default()
        })
        .await;

    let finished = spec.run(&["setup"]).await;
    assert_eq!(finished.code, Some(2), "{finished:?}");
    assert!(finished.stdout.contains("refused: consumer order-processor is a push consumer"), "{finished:?}");
    let finished = spec.run(&["status"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.contains("problem       consumer order-processor is a push consumer"), "{finished:?}");
}

#[tokio::test]
async fn publish_without_a_stream_says_what_makes_one() {
    let server = NatsServer::start().await;
    let finished = DaemonSpec::new(server.url()).run(&["publish", "--count", "1"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let complaints = finished.complaints();
    assert_eq!(complaints.len(), 1, "{finished:?}");
    assert!(
        complaints[0].contains("no stream has the subject ORDERS.new; create it with `order-processor setup`"),
        "{finished:?}"
    );
}

#[tokio::test]
async fn an_interrupted_publish_can_be_continued_without_doubling() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let full = stream::Config { max_messages: 3, discard: DiscardPolicy::New, ..stream_config() };
    broker.create(full.clone(), consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    std::fs::write(spec.folder().join("to do.txt"), "a\nb\nc\nd\n").unwrap();
    for (arguments, words, messages) in [
        (&["publish", "--count", "10", "--start", "5"][..], "--count 7 --start 8 --id-prefix ", 10),
        (
            &["publish", "to do.txt", "--subject", "ORDERS.$x", "--id-prefix", "it's"],
            r"'to do.txt' --subject 'ORDERS.$x' --start 4 --id-prefix 'it'\''s'",
            4,
        ),
    ] {
        broker.purge().await;
        broker.jetstream.update_stream(full.clone()).await.unwrap();
        let finished = spec.run(arguments).await;
        assert_eq!(finished.code, Some(1), "{finished:?}");
        let (_, rest) = finished.stderr.split_once("Repeat from there with ").unwrap_or_else(|| panic!("{finished:?}"));
        assert!(rest.starts_with(words), "{finished:?}");

        broker.jetstream.update_stream(stream_config()).await.unwrap();
        // As an operator pastes it; the shell finds the binary in $0.
        let again = spec.command_through(&["/bin/sh", "-c", &format!("\"$0\" publish {rest}")], &[]).output().unwrap();
        assert!(again.status.success(), "{rest}: {again:?}");
        assert_eq!(broker.stream_info().await.state.messages, messages, "{rest}");
    }
}

#[tokio::test]
async fn publish_gives_every_order_an_id_of_its_own() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());

    spec.run_ok(&["publish", "--count", "3"]).await;
    spec.run_ok(&["publish", "--count", "3"]).await;

    assert_eq!(broker.stream_info().await.state.messages, 6, "a second run is six orders, not three twice");
    let mut ids = HashSet::new();
    let stream = broker.jetstream.get_stream("ORDERS").await.unwrap();
    for stream_seq in 1..=6 {
        let message = stream.get_raw_message(stream_seq).await.unwrap();
        ids.insert(message.headers.get("Nats-Msg-Id").expect("it has an id").to_string());
        let text = String::from_utf8(message.payload.to_vec()).unwrap();
        assert!(text.starts_with("Order Data "), "{text}");
    }
    assert_eq!(ids.len(), 6);
}

#[tokio::test]
async fn publish_takes_orders_from_a_file_one_a_line() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let lines = ["Order Data 1", r#"{"id": "ü-2", "total": 1e400}"#, "Order Data 1"];
    // No line break after the last one: it is an order all the same.
    std::fs::write(spec.folder().join("orders.txt"), lines.join("\n")).unwrap();

    spec.run_ok(&["publish", "orders.txt"]).await;

    let stream = broker.jetstream.get_stream("ORDERS").await.unwrap();
    for (stream_seq, line) in (1..).zip(lines) {
        assert_eq!(stream.get_raw_message(stream_seq).await.unwrap().payload, line);
    }
    assert_eq!(broker.stream_info().await.state.messages, 3);
}

#[tokio::test]
async fn publish_reads_standard_input_and_repeats_no_known_id() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let publish = || {
        let mut child =
            spec.command(&["publish", "-", "--id-prefix", "morning"]).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().expect("it is piped").write_all(b"Order Data 1\nOrder Data 2\n").unwrap();
        child.wait().unwrap()
    };

    assert!(publish().success());
    assert!(publish().success(), "repeated after a doubtful failure");

    assert_eq!(broker.stream_info().await.state.messages, 2);
    let stored = broker.jetstream.get_stream("ORDERS").await.unwrap().get_raw_message(2).await.unwrap();
    assert_eq!(stored.payload, "Order Data 2");
    assert_eq!(stored.headers.get("Nats-Msg-Id").map(ToString::to_string).as_deref(), Some("morning-2"));
}

#[tokio::test]
async fn status_as_json_says_where_everything_is() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=7).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(8..=10).await;

    let status = spec.run_ok(&["status", "--json"]).await.json();

    for (field, wanted) in [
        ("/ack_floor/stream_seq", 7),
        ("/ack_floor/consumer_seq", 7),
        ("/num_pending", 3),
        ("/num_ack_pending", 0),
        ("/num_redelivered", 0),
        ("/stream/first_seq", 1),
        ("/stream/last_seq", 10),
        ("/processed_ids", 7),
        ("/dead_letters", 0),
    ] {
        assert_eq!(status.pointer(field).and_then(serde_json::Value::as_u64), Some(wanted), "{field} in {status}");
    }
}

#[tokio::test]
async fn healthcheck_follows_readiness() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let spec = DaemonSpec::new(server.url());
    let finished = spec.run(&["healthcheck"]).await;
    assert_eq!(finished.code, Some(1), "nobody listens: {finished:?}");

    let mut worker = spec.start();
    worker.not_ready("stream ORDERS").await;
    let finished = spec.run(&["healthcheck"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(format!("{}{}", finished.stdout, finished.stderr).contains("stream ORDERS"), "it says why: {finished:?}");

    broker.create(crate::support::nats::stream_config(), crate::support::nats::consumer_config()).await;
    worker.ready().await;
    spec.run_ok(&["healthcheck"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn check_says_ok_line_by_line_and_fails_if_any_fails() {
    let (mut server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let finished = spec.run_ok(&["check"]).await;
    assert!(finished.stdout.lines().count() >= 4, "config, connection, start gate, database: {finished:?}");
    assert!(!spec.database().exists(), "a check creates nothing");

    server.stop().await;
    let finished = spec.run(&["check"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.contains(&server.address()), "the server that does not answer is named: {finished:?}");
}
