//! Messages, streams and consumers that are gone: dropped, purged, deleted, recreated, restored from a copy.

use std::path::Path;
use std::time::Duration;

use async_nats::jetstream::consumer;
use async_nats::jetstream::stream;
use sqlx::Connection;

use crate::support::nats::{
    consumer_config, headers, impatient_consumer_config, patient_consumer_config, stream_config,
};
use crate::support::{Broker, Daemon, DaemonSpec, FaultProxy, NatsServer, PATIENCE, at_least, equal, eventually};

fn keeps(max_messages: i64) -> stream::Config {
    stream::Config { max_messages, discard: stream::DiscardPolicy::Old, ..stream_config() }
}

async fn stream_that_keeps(max_messages: i64, consumer: consumer::pull::Config) -> (NatsServer, Broker) {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.create(keeps(max_messages), consumer).await;
    (server, broker)
}

/// A worker that has asked for ten messages and cannot ask for more.
async fn frozen_worker(server: &NatsServer, broker: &Broker) -> (DaemonSpec, Daemon) {
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "10");
    let mut worker = spec.start();
    worker.ready().await;
    eventually("it has asked for messages", PATIENCE, async || at_least(broker.consumer_info().await.num_waiting, 1))
        .await;
    worker.freeze();
    (spec, worker)
}

#[tokio::test]
async fn orders_dropped_while_no_worker_ran_are_counted_and_named_once() {
    let (server, broker) = stream_that_keeps(4, consumer_config()).await;
    broker.publish_numbered(1..=10).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.acknowledged(10).await;
    worker.metric("messages_expired_total", 6.0).await;
    worker.logged(&["ERROR", "messages 1 to 6 were removed"]).await;
    spec.db().applied_once(4).await;
    worker.drain().await;

    // Known, or processed: no loss is told twice.
    let mut worker = spec.start();
    broker.publish_numbered(11..=20).await;
    broker.acknowledged(20).await;
    let lost = worker.metrics().await.get("messages_expired_total").unwrap();
    assert_eq!(spec.db().count("orders").await, 14 - lost as i64);
    assert_eq!(worker.lines(&["messages 1 to 6"]), 0);
    worker.drain().await;
}

#[tokio::test]
async fn dropped_orders_are_not_counted_again_after_a_pause() {
    let (server, broker) = stream_that_keeps(4, consumer_config()).await;
    broker.publish_numbered(1..=10).await;
    // The server delivers nothing for as long as the test lasts: the gap stays where it is.
    broker.pause_consumer(Duration::from_secs(3600)).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("messages_expired_total", 6.0).await;
    spec.run_ok(&["pause"]).await;
    worker.logged(&["WARN", "nothing is processed until"]).await;
    broker.publish_numbered(11..=12).await;
    spec.run_ok(&["resume"]).await;
    worker.metric("messages_expired_total", 8.0).await;
    assert_eq!(worker.lines(&["messages 1 to 6 were removed"]), 1);
    worker.logged(&["ERROR", "messages 7 to 8 were removed"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn orders_dropped_under_a_running_worker_are_counted_to_the_last() {
    let (server, broker) = stream_that_keeps(20, consumer_config()).await;
    let (spec, mut worker) = frozen_worker(&server, &broker).await;
    broker.publish_numbered(1..=100).await;
    worker.thaw();
    broker.acknowledged(100).await;
    let applied = spec.db().count("orders").await;
    worker.metric("messages_expired_total", (100 - applied) as f64).await;
    assert!(applied < 100, "some were dropped");
    worker.drain().await;
}

#[tokio::test]
async fn a_purge_counts_the_orders_that_were_not_processed_and_no_others() {
    let (server, broker) = Broker::with(consumer_config()).await;
    let (spec, mut worker) = frozen_worker(&server, &broker).await;
    broker.publish_numbered(1..=30).await;
    broker.purge().await;
    worker.thaw();
    // What had been delivered before is applied all the same.
    eventually("all are accounted for", PATIENCE, async || {
        let lost = worker.metrics().await.get("messages_expired_total").unwrap_or_default();
        equal(spec.db().count("orders").await + lost as i64, 30)
    })
    .await;
    let lost = worker.metrics().await.get("messages_expired_total");
    // A pull that was given up, after an answer that came late for one, stays with the server: up to two pulls of ten.
    assert!(lost >= Some(10.0), "{lost:?}");

    broker.publish_numbered(31..=40).await;
    broker.acknowledged(40).await;
    broker.purge().await;
    worker.metric("stream_first_seq", 41.0).await;
    assert_eq!(worker.metrics().await.get("messages_expired_total"), lost, "these were processed");
    worker.drain().await;
}

#[tokio::test]
async fn after_a_purge_while_no_worker_runs_new_orders_are_applied() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(6..=8).await;
    broker.purge().await;
    broker.publish_numbered(9..=10).await;

    let mut worker = spec.start();
    broker.acknowledged(10).await;
    spec.db().applied_once(7).await;
    worker.drain().await;
}

#[tokio::test]
async fn with_a_filter_only_what_vanished_undelivered_is_counted() {
    let filtered = consumer::pull::Config { filter_subject: "ORDERS.new".into(), ..consumer_config() };
    let (server, broker) = Broker::with(filtered).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "10");
    for _ in 0..5 {
        broker.publish_to("ORDERS.other", headers(&[]), b"not for us".to_vec()).await;
    }
    broker.purge().await;
    let mut worker = spec.start();
    worker.ready().await;
    let writer = spec.db().lock().await;
    broker.publish_numbered(6..=35).await;
    eventually("it holds what it can", PATIENCE, async || {
        let metrics = worker.metrics().await;
        let pending = metrics.get("consumer_num_pending").unwrap_or_default();
        if pending > 0.0 && metrics.get("consumer_delivered_stream_seq") >= Some(10.0) { Ok(()) } else { Err(pending) }
    })
    .await;
    assert_eq!(worker.metrics().await.get("messages_expired_total"), Some(0.0));
    broker.purge().await;
    worker.logged(&["ERROR", "at least", "the consumer has a filter"]).await;
    writer.close().await.unwrap();
    eventually("all are accounted for", PATIENCE, async || {
        let lost = worker.metrics().await.get("messages_expired_total").unwrap_or_default();
        equal(spec.db().count("orders").await + lost as i64, 30)
    })
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn a_stream_recreated_under_a_running_worker_loses_no_order() {
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
async fn redeliveries_of_a_former_stream_are_not_messages_of_the_new_one() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
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
    broker.create(stream_config(), impatient_consumer_config()).await;
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
async fn a_stream_recreated_while_no_worker_runs_loses_no_order() {
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
async fn a_deleted_stream_is_waited_for() {
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
async fn a_consumer_recreated_under_a_running_worker_doubles_no_order() {
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

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The server comes back as it was five orders ago. `part` of its store is restored, in all or the messages alone.
async fn restored(part: &str, running: bool) {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    server.stop().await;
    let backup = tempfile::TempDir::new().unwrap();
    let place = server.store().join(part);
    copy(&place, backup.path());
    server.restart().await;
    let broker = Broker::connect(&server).await;
    let mut worker = spec.start();
    broker.publish_numbered(6..=10).await;
    broker.acknowledged(10).await;
    if !running {
        worker.drain().await;
    }

    server.stop().await;
    std::fs::remove_dir_all(&place).unwrap();
    copy(backup.path(), &place);
    server.restart().await;
    let broker = Broker::connect(&server).await;
    if running {
        // The same texts under the same sequences, and yet other orders.
        worker.logged(&["ERROR", "ended at sequence 10 and now ends at 5"]).await;
        worker.metric("stream_rewinds_total", 1.0).await;
    } else {
        worker = spec.start();
    }
    broker.publish_numbered(6..=10).await;
    spec.db().has("orders", 15).await;
    broker.acknowledged(10).await;
    spec.db().applied_once(15).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_server_restored_from_a_copy_loses_no_new_order() {
    tokio::join!(restored("", true), restored("", false));
}

#[tokio::test]
async fn a_stream_that_lost_its_tail_loses_no_new_order() {
    const MESSAGES: &str = "jetstream/$G/streams/ORDERS/msgs";
    tokio::join!(restored(MESSAGES, true), restored(MESSAGES, false));
}
