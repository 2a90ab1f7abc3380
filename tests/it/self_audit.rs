//! The daemon's own audit: what it reports as missing or removed, what it does not, and that it stands in nobody's way.

use std::time::Instant;

use async_nats::jetstream::consumer::{self, DeliverPolicy};
use async_nats::jetstream::stream;

use crate::support::nats::{STREAM, consumer_config, headers, impatient_consumer_config, stream_config};
use crate::support::{Broker, Daemon, DaemonSpec, FaultProxy, NatsServer, PATIENCE, equal, eventually};

/// `processed` orders, of which the database of the next daemon has forgotten those after `kept`: it is a copy from before them.
async fn restored(kept: u64, processed: u64) -> (NatsServer, Broker, DaemonSpec) {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=kept).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let copy = spec.folder().join("backup.db");
    std::fs::copy(spec.database(), &copy).unwrap();
    broker.publish_numbered(kept + 1..=processed).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(processed).await;
    std::fs::copy(&copy, spec.database()).unwrap();
    (server, broker, spec)
}

async fn ready(spec: &DaemonSpec) -> Daemon {
    let mut worker = spec.start();
    worker.ready().await;
    worker
}

/// The daemon has checked everything up to this sequence, and nothing is missing.
async fn complete(worker: &Daemon, through: u64) {
    worker.metric("audited_through_stream_seq", through as f64).await;
    assert_eq!(worker.metrics().await.get("missing_messages"), Some(0.0), "{}", worker.log());
    assert_eq!(worker.metrics().await.get("messages_expired_total"), Some(0.0), "{}", worker.log());
}

/// Somebody else gets this order while the daemon cannot pull, and acknowledges it.
async fn acknowledged_behind_its_back(broker: &Broker, worker: &Daemon, order: &str) {
    worker.freeze();
    eventually("its pull is over", PATIENCE, async || equal(broker.consumer_info().await.num_waiting, 0)).await;
    broker.publish(order).await;
    broker.take_one().await.double_ack().await.unwrap();
    worker.thaw();
}

async fn repair(spec: &DaemonSpec) {
    spec.run_ok(&["pause"]).await;
    spec.run_ok(&["audit", "--repair"]).await;
    spec.run_ok(&["resume"]).await;
}

#[tokio::test]
async fn orders_that_a_restored_database_lacks_are_named_until_they_are_repaired() {
    let (_server, broker, spec) = restored(5, 10).await;
    let mut worker = ready(&spec).await;
    worker.metric("missing_messages", 5.0).await;
    worker.logged(&["ERROR", "messages are missing", "6 to 10"]).await;
    let status: serde_json::Value = serde_json::from_str(&worker.get("/status").await.1).unwrap();
    assert_eq!((&status["missing_messages"], &status["audited_through_stream_seq"]), (&5.into(), &10.into()));
    worker.ready().await;
    broker.publish("Order Data 11").await;
    worker.metric("audited_through_stream_seq", 11.0).await;
    worker.drain().await;

    // It is still so after a restart, and the daemon repairs nothing by itself.
    let mut worker = ready(&spec).await;
    worker.metric("missing_messages", 5.0).await;
    assert_eq!(spec.db().count("orders").await, 6);
    repair(&spec).await;
    worker.metric("missing_messages", 0.0).await;
    complete(&worker, 11).await;
    spec.db().applied_once(11).await;
    worker.drain().await;
}

#[tokio::test]
async fn orders_that_somebody_else_acknowledged_are_missing() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(1..=3).await;
    broker.take_one().await.double_ack().await.unwrap();
    let mut worker = ready(&spec).await;
    worker.metric("missing_messages", 1.0).await;
    worker.logged(&["ERROR", "messages are missing", "\"sequences\":\"1\""]).await;
    repair(&spec).await;
    worker.metric("missing_messages", 0.0).await;
    complete(&worker, 3).await;

    // Under the running daemon, which has pulled for nothing.
    acknowledged_behind_its_back(&broker, &worker, "Order Data 4").await;
    worker.metric("missing_messages", 1.0).await;
    worker.logged(&["ERROR", "messages are missing", "\"sequences\":\"4\""]).await;
    worker.drain().await;
}

/// The ids come from the payload, so the server sees no duplicate. The repair makes a dead letter of the order under a used id.
#[tokio::test]
async fn another_order_under_a_used_id_is_missing_and_the_same_order_is_not() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    let mut worker = ready(&spec).await;
    broker.publish(r#"{"id": 1}"#).await;
    broker.acknowledged(1).await;
    acknowledged_behind_its_back(&broker, &worker, r#"{"id": 1}"#).await;
    complete(&worker, 2).await;

    acknowledged_behind_its_back(&broker, &worker, r#"{"id": 1, "sku": "another"}"#).await;
    worker.metric("missing_messages", 1.0).await;
    worker.logged(&["ERROR", "messages are missing", "\"sequences\":\"3\""]).await;
    repair(&spec).await;
    worker.metric("missing_messages", 0.0).await;
    assert_eq!((spec.db().count("orders").await, spec.db().count("dead_letters").await), (1, 1));
    assert_eq!(spec.db().scalar("SELECT count(*) FROM dead_letters WHERE reason = 'conflict'").await, 1);
    worker.drain().await;
}

#[tokio::test]
async fn messages_before_the_start_of_the_consumer_are_not_missing() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.jetstream.create_stream(stream_config()).await.unwrap();
    broker.publish_numbered(1..=5).await;
    broker.create_consumer(consumer::pull::Config { deliver_policy: DeliverPolicy::New, ..consumer_config() }).await;
    broker.publish_numbered(6..=8).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = ready(&spec).await;
    complete(&worker, 8).await;
    spec.db().has("orders", 3).await;
    worker.drain().await;

    // A new process has only the tables.
    let mut worker = ready(&spec).await;
    broker.publish("Order Data 9").await;
    complete(&worker, 9).await;
    acknowledged_behind_its_back(&broker, &worker, "Order Data 10").await;
    worker.metric("missing_messages", 1.0).await;
    worker.logged(&["ERROR", "messages are missing", "\"sequences\":\"10\""]).await;
    worker.drain().await;
}

#[tokio::test]
async fn orders_removed_from_the_middle_of_the_stream_are_counted_and_named() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_to("ORDERS.paid", headers(&[]), b"Order Data 1".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let limited = stream::Config { max_messages_per_subject: 10, ..stream_config() };
    broker.jetstream.update_stream(limited).await.unwrap();
    broker.publish_numbered(2..=31).await;

    let mut worker = ready(&spec).await;
    broker.acknowledged(31).await;
    worker.metric("messages_expired_total", 20.0).await;
    worker.logged(&["ERROR", "left the stream before they were processed", "2 to 21"]).await;
    worker.metric("audited_through_stream_seq", 31.0).await;
    assert_eq!(worker.metrics().await.get("missing_messages"), Some(0.0));
    assert_eq!(spec.db().count("orders").await, 11);
    worker.drain().await;
}

#[tokio::test]
async fn an_order_removed_while_a_killed_process_held_it_is_counted_and_named() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = ready(&spec).await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    spec.db().has("audit_mark", 1).await;
    let lock = spec.db().lock().await;
    broker.publish_numbered(2..=4).await;
    worker.metric("held_deliveries", 3.0).await;
    worker.kill9();
    drop(lock);
    broker.jetstream.get_stream(STREAM).await.unwrap().delete_message(3).await.unwrap();

    let mut worker = ready(&spec).await;
    worker.metric("messages_expired_total", 1.0).await;
    worker.logged(&["ERROR", "left the stream before they were processed", "\"sequences\":\"3\""]).await;
    broker.acknowledged(4).await;
    assert_eq!(spec.db().count("orders").await, 3);
    worker.drain().await;
}

#[tokio::test]
async fn a_restart_and_messages_that_are_not_orders_raise_no_alarm() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    broker.publish("no JSON: a dead letter").await;
    broker.publish(r#"{"id": 2}"#).await;
    broker.publish_to("ORDERS.new", headers(&[("KV-Operation", "DEL")]), Vec::new()).await;
    let mut worker = ready(&spec).await;
    complete(&worker, 3).await;
    worker.kill9();
    // All must come from the tables and the stream.
    spec.db().execute("DELETE FROM audit_mark").await;
    let mut worker = ready(&spec).await;
    complete(&worker, 3).await;
    worker.drain().await;
}

#[tokio::test]
async fn what_a_wider_filter_matches_below_the_floor_is_never_missing_nor_repaired() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let narrow = consumer::pull::Config { filter_subject: "ORDERS.eu".into(), ..consumer_config() };
    broker.create(stream_config(), narrow).await;
    let spec = DaemonSpec::new(server.url());
    for _ in 0..20 {
        broker.publish_to("ORDERS.us", headers(&[]), b"for somebody else".to_vec()).await;
    }
    broker.publish_to("ORDERS.eu", headers(&[]), b"Order Data 21".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.edit_consumer(consumer::pull::Config { filter_subject: "ORDERS.>".into(), ..consumer_config() }).await;

    // Before the daemon knows of it, and after.
    for reported in [1, 0] {
        let audit = spec.run_ok(&["audit", "--repair"]).await;
        assert!(audit.stdout.contains("had another filter up to message 21"), "{audit:?}");
        assert!(audit.stdout.contains("0 missing, 20 that cannot be determined"), "{audit:?}");
        let mut worker = ready(&spec).await;
        complete(&worker, 21).await;
        worker.drain().await;
        assert_eq!(worker.lines(&["WARN", "cannot determine"]), reported);
    }
    assert_eq!(spec.db().count("orders").await, 1);

    // What comes later is judged.
    broker.publish_numbered(22..=23).await;
    broker.take_one().await.double_ack().await.unwrap();
    let mut worker = ready(&spec).await;
    worker.metric("missing_messages", 1.0).await;
    worker.drain().await;
}

#[tokio::test]
async fn orders_below_an_adopted_floor_are_checked_only_on_request() {
    let (server, broker) = Broker::story().await;
    broker.publish_numbered(1..=3).await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["adopt", "--yes"]).await;
    broker.publish("Order Data 4").await;
    let mut worker = ready(&spec).await;
    complete(&worker, 4).await;
    spec.run_ok(&["audit"]).await;
    let all = spec.run(&["audit", "--from", "1"]).await;
    assert!(all.code == Some(1) && all.stdout.contains("1 processed, 0 dead letters, 3 missing"), "{all:?}");
    worker.drain().await;
}

#[tokio::test]
async fn a_recreated_stream_starts_over_without_an_alarm() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = ready(&spec).await;
    broker.publish_numbered(1..=10).await;
    complete(&worker, 10).await;
    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;
    broker.publish_numbered(11..=13).await;
    complete(&worker, 3).await;
    acknowledged_behind_its_back(&broker, &worker, "Order Data 14").await;
    worker.metric("missing_messages", 1.0).await;
    worker.logged(&["ERROR", "messages are missing", "\"sequences\":\"4\""]).await;
    worker.drain().await;
}

#[tokio::test]
async fn sequences_that_the_server_gave_out_twice_raise_no_alarm_and_hide_none() {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    let mut worker = ready(&spec).await;
    complete(&worker, 5).await;
    server.stop().await;
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&server.store(), copy.path());
    server.restart().await;
    broker.publish_numbered(6..=10).await;
    complete(&worker, 10).await;
    worker.drain().await;
    server.stop().await;
    std::fs::remove_dir_all(server.store()).unwrap();
    copy_folder(copy.path(), &server.store());
    server.restart().await;

    // 6 to 8 are other messages now, and somebody else acknowledges one of them.
    eventually("the server is back", PATIENCE, async || broker.try_consumer_info().await).await;
    broker.publish_numbered(16..=18).await;
    broker.take_one().await.double_ack().await.unwrap();
    let mut worker = ready(&spec).await;
    worker.metric("missing_messages", 1.0).await;
    worker.logged(&["ERROR", "messages are missing", "\"sequences\":\"6\""]).await;
    worker.metric("audited_through_stream_seq", 8.0).await;
    worker.drain().await;
}

fn copy_folder(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test]
async fn a_stop_does_not_wait_for_it() {
    let (server, _broker, spec) = restored(1, 5000).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = spec.set("nats.url", proxy.url());
    proxy.delay(std::time::Duration::from_millis(100));
    let mut worker = ready(&spec).await;
    assert_eq!(worker.metrics().await.get("missing_messages"), Some(0.0), "it is still reading");
    let began = Instant::now();
    worker.drain().await;
    assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
    assert_eq!(worker.lines(&["messages are missing"]), 0);
}

#[tokio::test]
async fn without_optional_permissions_the_tables_decide_and_the_rest_is_logged() {
    const NEEDED: &str =
        r#"allow: ["$JS.API.STREAM.INFO.>", "$JS.API.CONSUMER.INFO.>", "$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>"]"#;
    let (server, broker) = Broker::with_restricted_worker(NEEDED, consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    let mut worker = ready(&spec).await;
    complete(&worker, 5).await;
    worker.drain().await;

    // The tables account for everything: nothing need be read.
    spec.db().execute("DELETE FROM audit_mark").await;
    let mut worker = ready(&spec).await;
    complete(&worker, 5).await;
    worker.drain().await;

    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 3").await;
    spec.db().execute("DELETE FROM audit_mark").await;
    let mut worker = ready(&spec).await;
    worker.logged(&["WARN", "the audit cannot check whether messages are missing"]).await;
    worker.ready().await;
    broker.publish("Order Data 6").await;
    broker.acknowledged(6).await;
    assert_eq!(worker.lines(&["the audit cannot check"]), 1);
    worker.drain().await;
}

#[tokio::test]
async fn switched_off_it_reports_nothing_and_still_records_the_filter() {
    let (_server, broker, spec) = restored(1, 3).await;
    let spec = spec.set("audit.every", "off");
    spec.db().execute("DELETE FROM audit_mark").await;
    let mut worker = ready(&spec).await;
    spec.db().has("audit_mark", 1).await;
    broker.publish("Order Data 4").await;
    broker.acknowledged(4).await;
    assert_eq!(worker.lines(&["messages are missing"]), 0);
    let (missing, through) = (
        worker.metrics().await.get("missing_messages").unwrap_or_default(),
        worker.metrics().await.get("audited_through_stream_seq").unwrap_or_default(),
    );
    assert_eq!((missing, through), (0.0, 0.0));
    worker.drain().await;
}
