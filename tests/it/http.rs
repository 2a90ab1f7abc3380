//! What operators and machines see over HTTP: metrics, liveness, readiness, status.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use crate::support::nats::{consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, equal, eventually};

/// Name and type of every metric of our own.
const METRICS: [(&str, &str); 45] = [
    ("deliveries_total", "counter"),
    ("redeliveries_total", "counter"),
    ("outcomes_total", "counter"),
    ("acks_total", "counter"),
    ("dead_letters_total", "counter"),
    ("nats_reconnects_total", "counter"),
    ("nats_errors_total", "counter"),
    ("consumer_rebinds_total", "counter"),
    ("messages_expired_total", "counter"),
    ("stream_rewinds_total", "counter"),
    ("db_errors_total", "counter"),
    ("ids_pruned_total", "counter"),
    ("log_lines_dropped_total", "counter"),
    ("consumer_ack_floor_stream_seq", "gauge"),
    ("consumer_ack_floor_consumer_seq", "gauge"),
    ("consumer_delivered_stream_seq", "gauge"),
    ("consumer_num_pending", "gauge"),
    ("consumer_num_ack_pending", "gauge"),
    ("consumer_num_redelivered", "gauge"),
    ("consumer_num_waiting", "gauge"),
    ("consumer_max_ack_pending", "gauge"),
    ("consumer_paused", "gauge"),
    ("stream_first_seq", "gauge"),
    ("stream_last_seq", "gauge"),
    ("consumer_info_timestamp_seconds", "gauge"),
    ("committed_stream_seq", "gauge"),
    ("held_deliveries", "gauge"),
    ("parked_messages", "gauge"),
    ("missing_messages", "gauge"),
    ("audited_through_stream_seq", "gauge"),
    ("oldest_pending_seconds", "gauge"),
    ("dead_letters", "gauge"),
    ("processed_ids", "gauge"),
    ("database_bytes", "gauge"),
    ("wal_bytes", "gauge"),
    ("nats_connected", "gauge"),
    ("ready", "gauge"),
    ("draining", "gauge"),
    ("last_commit_timestamp_seconds", "gauge"),
    ("build_info", "gauge"),
    ("commit_duration_seconds", "histogram"),
    ("commit_batch_messages", "histogram"),
    ("end_to_end_seconds", "histogram"),
    ("shutdown_duration_seconds", "histogram"),
    ("process_cpu_seconds_total", "counter"),
];

fn full_name(name: &str) -> String {
    if name.starts_with("process_") { name.to_owned() } else { format!("order_processor_{name}") }
}

#[tokio::test]
async fn every_metric_is_there_from_the_start_with_help_and_type() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;

    let (status, content_type, body) = worker.get_with_type("/metrics").await.unwrap();
    assert_eq!(status, 200);
    assert!(content_type.starts_with("text/plain; version=0.0.4"), "{content_type}");
    let lines: BTreeSet<&str> = body.lines().collect();
    for (name, kind) in METRICS {
        let name = full_name(name);
        assert!(lines.contains(format!("# TYPE {name} {kind}").as_str()), "no type {kind} of {name} in\n{body}");
        let help =
            lines.iter().any(|line| line.strip_prefix(&format!("# HELP {name} ")).is_some_and(|help| !help.is_empty()));
        assert!(help, "no help of {name} in\n{body}");
        let sample =
            lines.iter().any(|line| line.strip_prefix(&name).is_some_and(|rest| rest.starts_with(['{', ' ', '_'])));
        assert!(sample, "no sample of {name} in\n{body}");
    }

    // A counter that appears with its first event cannot be alerted upon: all label values are there, at zero.
    let metrics = worker.metrics().await;
    for series in [
        "outcomes_total{outcome=\"applied\"}",
        "outcomes_total{outcome=\"duplicate\"}",
        "outcomes_total{outcome=\"retry\"}",
        "outcomes_total{outcome=\"dead-lettered\"}",
        "redeliveries_total{seen_by=\"server\"}",
        "redeliveries_total{seen_by=\"inbox\"}",
        "dead_letters_total{reason=\"conflict\"}",
        "commit_duration_seconds_count",
        "end_to_end_seconds_bucket{le=\"+Inf\"}",
    ] {
        assert_eq!(metrics.get(series), Some(0.0), "{series}");
    }
    worker.drain().await;
}

#[tokio::test]
async fn metrics_follow_the_orders() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("ready", 1.0).await;
    broker.publish_numbered(1..=40).await;
    broker.acknowledged(40).await;

    for (name, value) in [
        ("deliveries_total", 40.0),
        ("outcomes_total{outcome=\"applied\"}", 40.0),
        ("acks_total{kind=\"ack\"}", 40.0),
        ("redeliveries_total{seen_by=\"server\"}", 0.0),
        ("committed_stream_seq", 40.0),
        ("consumer_ack_floor_stream_seq", 40.0),
        ("consumer_ack_floor_consumer_seq", 40.0),
        ("consumer_delivered_stream_seq", 40.0),
        ("consumer_num_pending", 0.0),
        ("consumer_num_ack_pending", 0.0),
        ("stream_first_seq", 1.0),
        ("stream_last_seq", 40.0),
        ("held_deliveries", 0.0),
        ("processed_ids", 40.0),
        ("dead_letters", 0.0),
        ("nats_connected", 1.0),
        ("draining", 0.0),
        ("end_to_end_seconds_count", 40.0),
        ("commit_batch_messages_sum", 40.0),
    ] {
        worker.metric(name, value).await;
    }
    let metrics = worker.metrics().await;
    let (commits, timed) = (metrics.get("commit_batch_messages_count"), metrics.get("commit_duration_seconds_count"));
    assert_eq!(commits, timed);
    assert!(metrics.get("last_commit_timestamp_seconds") > Some(1.7e9));
    assert!(metrics.get("database_bytes") > Some(0.0));
    worker.drain().await;
}

#[tokio::test]
async fn promtool_finds_no_fault_with_the_metrics() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    let (_, body) = worker.get("/metrics").await;
    worker.drain().await;

    let child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("not checked: there is no promtool on the PATH");
            return;
        }
        Err(error) => panic!("promtool: {error}"),
    };
    child.stdin.take().expect("it is piped").write_all(body.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    // `process_*` is the field's own set of names, which promtool has wishes about.
    let about_us = said.lines().any(|line| line.contains("order_processor_"));
    assert!(!about_us && (output.status.success() || said.contains("process_")), "{said}\n{body}");
}

#[tokio::test]
async fn readiness_names_the_cause_and_comes_when_the_stream_appears() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();

    worker.not_ready("stream ORDERS").await;
    worker.not_ready("order-processor setup").await;
    worker.metric("ready", 0.0).await;
    assert_eq!(worker.get("/livez").await.0, 200, "waiting is no reason to be restarted");
    worker.logged(&["order-processor setup"]).await;

    broker.jetstream.create_stream(stream_config()).await.unwrap();
    worker.not_ready("consumer order-processor").await;

    broker.create_consumer(consumer_config()).await;
    worker.ready().await;
    worker.metric("ready", 1.0).await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn status_is_json_and_unknown_paths_are_not_found() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=3).await;
    broker.acknowledged(3).await;

    eventually("the status shows the ack floor", PATIENCE, async || {
        let (status, content_type, body) = worker.get_with_type("/status").await.unwrap();
        assert_eq!((status, content_type.as_str()), (200, "application/json"));
        let json: serde_json::Value = serde_json::from_str(&body).unwrap();
        equal((json["ready"].clone(), body.contains("ack_floor")), (serde_json::json!(true), true))
    })
    .await;
    for path in ["/", "/metrics/", "/healthz", "/../etc/passwd"] {
        assert_eq!(worker.get(path).await.0, 404, "{path}");
    }
    worker.drain().await;
}

#[tokio::test]
async fn readiness_is_gone_and_metrics_stay_while_the_server_is_away() {
    let (mut server, _) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    server.stop().await;

    worker.not_ready("connect").await;
    worker.metric("nats_connected", 0.0).await;
    worker.metric("ready", 0.0).await;
    assert_eq!(worker.get("/livez").await.0, 200);

    server.restart().await;
    worker.ready().await;
    worker.metric("nats_connected", 1.0).await;
    worker.metric("nats_reconnects_total", 1.0).await;
    let broker = Broker::connect(&server).await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn over_http_nothing_can_be_changed() {
    let spec = DaemonSpec::new("nats://127.0.0.1:9").unset("http.listen");
    let listens = spec.run_ok(&["config", "--json"]).await.json();
    let listens = listens.as_array().unwrap().iter().find(|row| row["key"] == "http.listen").unwrap()["value"].clone();
    assert_eq!(listens, "127.0.0.1:9464", "the loopback, unless somebody decides otherwise");

    let spec = DaemonSpec::new("nats://127.0.0.1:9");
    let mut worker = spec.start();
    eventually("it serves", PATIENCE, async || worker.try_get("/livez").await).await;
    for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "NONSENSE"] {
        for path in ["/metrics", "/livez", "/readyz", "/status"] {
            let answer = say(&worker.http_address(), &format!("{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
            assert!(answer.starts_with("HTTP/1.1 405 ") || method == "CONNECT", "{method} {path}: {answer}");
            assert!(!answer.starts_with("HTTP/1.1 2"), "{method} {path}: {answer}");
        }
    }
    let long = format!("GET /livez HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "x".repeat(64 * 1024));
    assert!(!say(&worker.http_address(), &long).await.starts_with("HTTP/1.1 2"), "a request is bounded");
    for garbage in ["\0\x01\x02\r\n\r\n", "GET\r\n\r\n", "GET /livez HTTP/9.9\r\n\r\n", "\r\n\r\n\r\n"] {
        assert!(!say(&worker.http_address(), garbage).await.starts_with("HTTP/1.1 2"), "{garbage:?}");
    }
    assert_eq!(worker.get("/livez").await.0, 200);
    worker.drain().await;
}

/// Everything that comes back until the connection ends.
async fn say(address: &str, request: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    // It may be closed before it has read everything.
    drop(stream.write_all(request.as_bytes()).await);
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "the connection is never closed");
    String::from_utf8_lossy(&answer).into_owned()
}
