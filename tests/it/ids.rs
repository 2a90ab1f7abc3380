//! How long a processed id is remembered: as long as its message can come again, and a week at least.

use async_nats::jetstream::stream;
use order_processor::store::{Gone, Prunable, Store};
use sqlx::Connection;

use crate::support::nats::{STREAM, consumer_config, headers, stream_config};
use crate::support::{Broker, DaemonSpec};

/// Makes what the database holds look as if it had been done so many days before.
async fn age(spec: &DaemonSpec, days: i64) {
    age_up_to(spec, days, i64::MAX).await;
}

async fn age_up_to(spec: &DaemonSpec, days: i64, stream_seq: i64) {
    let ns = days * 24 * 60 * 60 * 1_000_000_000;
    let mut writer = spec.db().open_to_write().await;
    sqlx::query("UPDATE processed_ids SET processed_at = processed_at - ? WHERE stream_seq <= ?")
        .bind(ns)
        .bind(stream_seq)
        .execute(&mut writer)
        .await
        .unwrap();
    sqlx::query("UPDATE attempts SET updated_at = updated_at - ?").bind(ns).execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();
}

/// Everything before this sequence is gone from the stream.
async fn purge_before(broker: &Broker, stream_seq: u64) {
    broker.jetstream.get_stream(STREAM).await.unwrap().purge().sequence(stream_seq).await.unwrap();
}

/// Against the store itself, since a stream that is weeks old cannot be made here.
#[tokio::test]
async fn ids_go_in_small_steps_when_they_are_old_and_their_messages_are_gone_and_not_before() {
    const DAY_NS: i64 = 24 * 60 * 60 * 1_000_000_000;
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=1_300).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    age_up_to(&spec, 8, 1_200).await;

    let week_ago = spec.db().scalar("SELECT max(processed_at) FROM processed_ids").await - 7 * DAY_NS;
    let mut store = Store::open(&spec.database()).await.unwrap();
    let gone = |below_seq| Prunable { before_ns: week_ago, gone: Some(Gone { below_seq, stream_created_ns: 0 }) };
    let mut steps = Vec::new();
    for below_seq in [0, 1_101, 1_101, 1_101, 1_101, 2_000, 2_000] {
        steps.push(store.prune(gone(below_seq), 500).await.unwrap());
    }
    store.close().await.unwrap();
    assert_eq!(steps, [0, 500, 500, 100, 0, 100, 0], "nothing that the stream has, and nothing that is young");
    assert_eq!(spec.db().scalar("SELECT min(stream_seq) FROM processed_ids").await, 1_201);
    assert_eq!(spec.db().count("processed_ids").await, 100);
}

#[tokio::test]
async fn ids_of_a_former_stream_go_when_they_are_old() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=1_200).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;

    let mut worker = spec.start();
    broker.publish_numbered(1..=10).await;
    broker.acknowledged(10).await;
    worker.drain().await;
    assert_eq!(spec.db().count("processed_ids").await, 1_210, "none of them is a week old");
    age(&spec, 8).await;
    let mut worker = spec.start();
    broker.publish_numbered(11..=20).await;
    broker.acknowledged(20).await;
    // With those of the new stream: made older than their stream, they look like the former one's.
    worker.metric("ids_pruned_total", 1_210.0).await;
    spec.db().applied_once(1_220).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_full_replay_of_a_stream_is_all_duplicates() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5_000).await;
    let mut worker = spec.start();
    broker.acknowledged(5_000).await;
    worker.ready().await;
    // What sets the ack floor back to 0, while the worker runs and while it does not.
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 5_000.0).await;
    broker.acknowledged(5_000).await;
    worker.drain().await;
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(5_000).await;
    spec.db().applied_once(5_000).await;
}

#[tokio::test]
async fn an_order_that_its_publisher_repeats_within_a_week_is_a_duplicate_though_the_stream_has_forgotten_it() {
    let (server, broker) = Broker::story().await;
    let short_memory = stream::Config { duplicate_window: std::time::Duration::from_millis(100), ..stream_config() };
    broker.jetstream.update_stream(short_memory).await.unwrap();
    let spec = DaemonSpec::new(server.url());
    let order = || headers(&[("Nats-Msg-Id", "order-1")]);
    broker.publish_to("ORDERS.new", order(), b"Order Data 1".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    age(&spec, 6).await;
    purge_before(&broker, 2).await;

    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_anew("ORDERS.new", order(), b"Order Data 1".to_vec()).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 1.0).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn attempts_of_a_message_that_has_vanished_are_forgotten_after_a_week() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    let mut writer = spec.db().open_to_write().await;
    // As it is left behind by a stream that is purged between two attempts.
    let left =
        "INSERT INTO attempts (id, failed, started, updated_at) VALUES ('vanished', 2, 0, unixepoch() * 1000000000)";
    sqlx::query(left).execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();

    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    assert_eq!(spec.db().count("attempts").await, 1, "it might come again");
    worker.drain().await;
    age(&spec, 8).await;
    let mut worker = spec.start();
    spec.db().has("attempts", 0).await;
    worker.drain().await;
    spec.db().applied_once(1).await;
}
