//! What operators and the server do to consumer and stream under the worker, and while it is away: given up, dropped, edited,
//! paused, reset, purged, restored.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{self, PullConsumer};
use futures_util::StreamExt;
use sqlx::Row;

use crate::support::nats::{CONSUMER, STREAM, consumer_config, headers, stream_config};
use crate::support::{Broker, Daemon, DaemonSpec, NatsServer, PATIENCE, ServerSpec, equal, eventually};

/// One delivery more than `retry.max_attempts`: the least that the start gate takes.
const MAX_DELIVER: i64 = 6;

/// The server gives a message up after six deliveries; one that is lost comes again after a second.
fn six_deliveries() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: Duration::from_secs(1), max_deliver: MAX_DELIVER, ..consumer_config() }
}

/// Plays a worker that gets these messages, and no others, and hands each back until it has had so many deliveries.
async fn hand_back(broker: &Broker, stream_seqs: &[u64], deliveries: i64) {
    let consumer: PullConsumer = broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    let mut left: BTreeSet<u64> = stream_seqs.iter().copied().collect();
    eventually("the messages were delivered as often as asked", PATIENCE, async || {
        let mut messages = consumer.fetch().max_messages(10).messages().await.map_err(|error| error.to_string())?;
        while let Some(message) = messages.next().await {
            let message = message.map_err(|error| error.to_string())?;
            let info = message.info().unwrap();
            let (stream_seq, delivered) = (info.stream_sequence, info.delivered);
            assert!(stream_seqs.contains(&stream_seq), "{stream_seq} is not to be delivered");
            message.ack_with(AckKind::Nak(None)).await.unwrap();
            if delivered >= deliveries {
                left.remove(&stream_seq);
            }
        }
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
}

/// As [`hand_back`], until the server has given them up.
async fn give_up(broker: &Broker, stream_seqs: &[u64]) {
    hand_back(broker, stream_seqs, MAX_DELIVER).await;
    // It notices when it is asked for more.
    let consumer: PullConsumer = broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    assert!(consumer.fetch().messages().await.unwrap().next().await.is_none(), "nothing is left to be delivered");
    given_up(broker, stream_seqs.len()).await;
}

/// Waits until the server has given up so many messages. Nothing else shows it: they are not pending any more.
async fn given_up(broker: &Broker, messages: usize) {
    eventually("the server has given them up", PATIENCE, async || {
        let info = broker.consumer_info().await;
        equal((info.num_ack_pending, info.num_redelivered), (0, messages))
    })
    .await;
}

/// Waits until nothing is pending and nothing counts as given up.
async fn at_peace(broker: &Broker) {
    eventually("nothing is pending or given up", PATIENCE, async || {
        let info = broker.consumer_info().await;
        equal((info.num_pending, info.num_ack_pending, info.num_redelivered), (0, 0, 0))
    })
    .await;
}

/// The server delivers one order to a worker that is frozen, again and again, until it gives it up.
async fn frozen_until_given_up() -> (NatsServer, Broker, DaemonSpec, Daemon) {
    let (server, broker) = Broker::with(six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    eventually("it has asked for messages", PATIENCE, async || equal(broker.consumer_info().await.num_waiting, 1))
        .await;
    worker.freeze();
    broker.publish("Order Data 1").await;
    given_up(&broker, 1).await;
    (server, broker, spec, worker)
}

#[tokio::test]
async fn orders_that_the_server_gave_up_while_no_worker_ran_are_dead_letters_and_the_floor_moves_on() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "one"), ("X", "y")]), b"Order Data 1".to_vec()).await;
    broker.publish("Order Data 2").await;
    give_up(&broker, &[1, 2]).await;
    broker.publish("Order Data 3").await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    spec.db().has("dead_letters", 2).await;
    broker.acknowledged(3).await;
    at_peace(&broker).await;
    let rows = spec.db().rows("SELECT * FROM dead_letters ORDER BY stream_seq").await;
    assert_eq!(rows[0].get::<&str, _>("id"), "one");
    assert_eq!(rows[0].get::<&[u8], _>("payload"), b"Order Data 1");
    let kept: serde_json::Value = serde_json::from_str(rows[0].get("headers")).unwrap();
    assert_eq!(kept, serde_json::json!({"Nats-Msg-Id": ["one"], "X": ["y"]}));
    for row in &rows {
        assert_eq!((row.get::<&str, _>("reason"), row.get::<i64, _>("delivered")), ("last_delivery", MAX_DELIVER));
    }
    assert_eq!(spec.db().texts("SELECT CAST(payload AS TEXT) FROM orders").await, ["Order Data 3"]);
    worker.metric("dead_letters_total{reason=\"last_delivery\"}", 2.0).await;
    worker.logged(&["ERROR", "given up", "\"lost\":2"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn until_idle_ends_only_when_what_the_server_gave_up_is_a_dead_letter() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    give_up(&broker, &[1]).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("dead_letters").await, 1);
    at_peace(&broker).await;
}

#[tokio::test]
async fn an_order_given_up_while_its_worker_was_frozen_and_then_killed_is_a_dead_letter_after_the_next_start() {
    let (_server, broker, spec, mut worker) = frozen_until_given_up().await;
    worker.kill9();
    let mut worker = spec.start();
    spec.db().has("dead_letters", 1).await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    at_peace(&broker).await;
    assert_eq!(spec.db().count("orders").await, 1);
    worker.drain().await;
}

#[tokio::test]
async fn an_order_given_up_while_its_worker_was_frozen_is_applied_when_the_worker_thaws() {
    let (_server, broker, spec, mut worker) = frozen_until_given_up().await;
    worker.thaw();
    at_peace(&broker).await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    spec.db().applied_once(2).await;
    worker.drain().await;
}

#[tokio::test]
async fn an_order_that_the_server_gives_up_under_a_running_worker_is_a_dead_letter_at_once() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    hand_back(&broker, &[1], MAX_DELIVER - 1).await;
    // The sixth and last goes to somebody who says nothing.
    let consumer: PullConsumer = broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    let mut last = consumer.batch().max_messages(1).expires(PATIENCE).messages().await.unwrap();
    let last = last.next().await.unwrap().unwrap();
    assert_eq!(last.info().unwrap().delivered, MAX_DELIVER);

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    spec.db().has("dead_letters", 1).await;
    at_peace(&broker).await;
    assert!(!worker.log().contains("never processed"), "it was heard of, not searched for");
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn without_the_permission_to_hear_of_it_an_order_given_up_is_found_all_the_same() {
    let config = "authorization {\n  users: [\n    {user: admin, password: admin}\n    {user: worker, password: worker, permissions: {\n      \
                  publish: {allow: [\"$JS.API.>\", \"$JS.ACK.>\"]}, subscribe: [\"_INBOX.>\"]}}\n  ]\n}\nno_auth_user: worker";
    let server = NatsServer::with(ServerSpec { config: config.into(), ..ServerSpec::default() }).await;
    let options = async_nats::ConnectOptions::with_user_and_password("admin".into(), "admin".into());
    let broker = Broker::connect_with(&server, options).await;
    broker.create(stream_config(), six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.logged(&["INFO", "optional permission"]).await;
    worker.metric("nats_errors_total{kind=\"permission\"}", 0.0).await;

    // It goes to somebody who is faster, and says nothing.
    worker.freeze();
    broker.publish("Order Data 1").await;
    given_up(&broker, 1).await;
    worker.kill9();
    let mut worker = spec.start();
    at_peace(&broker).await;
    assert_eq!(spec.db().count("dead_letters").await, 1);
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn an_order_that_was_processed_before_the_server_gave_it_up_is_only_acknowledged() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.delete_consumer().await;
    broker.create_consumer(six_deliveries()).await;
    give_up(&broker, &[1, 2, 3]).await;

    let mut worker = spec.start();
    at_peace(&broker).await;
    spec.db().applied_once(3).await;
    worker.drain().await;
}

#[tokio::test]
async fn with_a_database_that_knows_less_than_the_server_gave_up_nothing_is_guessed() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish_numbered(1..=3).await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.publish("Order Data 4").await;
    give_up(&broker, &[4]).await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.logged(&["ERROR", "which ones were lost cannot be told"]).await;
    broker.publish("Order Data 5").await;
    broker.acknowledged(5).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}
