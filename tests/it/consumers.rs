//! What operators and the server do to consumer and stream under the worker, and while it is away: given up, dropped, edited,
//! paused, reset, purged, restored.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{self, DeliverPolicy, PullConsumer};
use async_nats::jetstream::stream;
use futures_util::StreamExt;
use sqlx::{Connection, Row, SqliteConnection};
use tokio_util::sync::CancellationToken;

use crate::handlers::{Bench, Clerk};
use crate::support::nats::{CONSUMER, STREAM, consumer_config, headers, stream_config};
use crate::support::{
    Broker, Daemon, DaemonSpec, FaultProxy, NatsServer, PATIENCE, ServerSpec, at_least, equal, eventually, free_port,
};

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

/// Orders 1 to 3 are in another database, order 4 is in none.
async fn three_elsewhere_and_the_fourth_given_up(server: &NatsServer, broker: &Broker) {
    broker.publish_numbered(1..=3).await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.publish("Order Data 4").await;
    give_up(broker, &[4]).await;
}

/// As [`hand_back`], until the server has given them up.
async fn give_up(broker: &Broker, stream_seqs: &[u64]) {
    use_up(broker, stream_seqs).await;
    given_up(broker, stream_seqs.len()).await;
}

/// As [`hand_back`], until there is nothing more to hand back.
async fn use_up(broker: &Broker, stream_seqs: &[u64]) {
    hand_back(broker, stream_seqs, MAX_DELIVER).await;
    // The server notices when it is asked for more, once it has read the last acknowledgement.
    let consumer: PullConsumer = broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    eventually("nothing is left to be delivered", PATIENCE, async || {
        assert!(consumer.fetch().messages().await.unwrap().next().await.is_none(), "that was the last delivery");
        equal(broker.consumer_info().await.num_ack_pending, 0)
    })
    .await;
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
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
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
    three_elsewhere_and_the_fourth_given_up(&server, &broker).await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.logged(&["ERROR", "which ones were lost cannot be told", "order-processor audit"]).await;
    broker.publish("Order Data 5").await;
    broker.acknowledged(5).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}

/// The stream keeps so many messages and drops the oldest.
/// Plays a worker that gets one message and says nothing.
async fn take_one(broker: &Broker) {
    let consumer: PullConsumer = broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    let mut messages = consumer.batch().max_messages(1).expires(PATIENCE).messages().await.unwrap();
    messages.next().await.unwrap().unwrap();
}

#[tokio::test]
async fn an_order_given_up_is_found_below_however_many_others() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    broker.publish("Order Data 0").await;
    hand_back(&broker, &[1], MAX_DELIVER - 1).await;
    // The last delivery goes to somebody who says nothing. It is pending until the others are worked off.
    take_one(&broker).await;
    broker.publish_numbered(1..=20_500).await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    spec.db().has("dead_letters", 1).await;
    at_peace(&broker).await;
    assert_eq!(spec.db().texts("SELECT CAST(payload AS TEXT) FROM dead_letters").await, ["Order Data 0"]);
    assert_eq!(spec.db().count("orders").await, 20_500);
    worker.drain().await;
}

#[tokio::test]
async fn what_is_older_than_the_consumers_start_is_not_taken_for_given_up() {
    let (server, broker) = Broker::story().await;
    broker.publish_numbered(1..=2).await;
    broker.delete_consumer().await;
    let from_the_second = || consumer::pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: 2 },
        ..six_deliveries()
    };
    broker.create_consumer(from_the_second()).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    // The server gives up the one that was processed.
    broker.delete_consumer().await;
    broker.create_consumer(from_the_second()).await;
    give_up(&broker, &[2]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    at_peace(&broker).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);

    // And one that was not, of a consumer that gets only what is new.
    broker.delete_consumer().await;
    broker.create_consumer(consumer::pull::Config { deliver_policy: DeliverPolicy::New, ..six_deliveries() }).await;
    broker.publish("Order Data 3").await;
    give_up(&broker, &[3]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    at_peace(&broker).await;
    assert_eq!(spec.db().texts("SELECT CAST(payload AS TEXT) FROM dead_letters").await, ["Order Data 3"]);
}

#[tokio::test]
async fn an_order_that_another_database_has_is_not_taken_for_given_up() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.publish("Order Data 2").await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;

    // Given up is one, and this database does not know one: not the same.
    broker.delete_consumer().await;
    broker.create_consumer(six_deliveries()).await;
    let consumer: PullConsumer = broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    let first = consumer.fetch().max_messages(1).messages().await.unwrap().next().await.unwrap().unwrap();
    assert_eq!(first.info().unwrap().stream_sequence, 1);
    first.double_ack().await.unwrap();
    give_up(&broker, &[2]).await;
    let mut worker = spec.start();
    at_peace(&broker).await;
    worker.drain().await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
}

#[tokio::test]
async fn an_order_that_another_database_has_is_not_taken_for_one_given_up_above_while_deliveries_are_pending() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    broker.publish("Order Data 1").await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(2..=3).await;
    give_up(&broker, &[2, 3]).await;
    broker.edit_consumer(consumer::pull::Config { ack_wait: PATIENCE, ..six_deliveries() }).await;
    broker.publish("Order Data 4").await;
    take_one(&broker).await;

    // Two given up, one pending, and one below the ack floor that this database does not know.
    let spec = DaemonSpec::new(server.url());
    let worker = spec.start();
    worker.logged(&["ERROR", "nothing of some of the messages 1 to 1", "pending"]).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
}

#[tokio::test]
async fn what_is_only_pending_is_not_taken_for_given_up() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.edit_consumer(consumer::pull::Config { ack_wait: Duration::from_secs(3), ..six_deliveries() }).await;
    broker.publish("Order Data 2").await;
    hand_back(&broker, &[2], 2).await;
    take_one(&broker).await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.logged(&["ERROR", "cannot find", "pending", "order-processor audit"]).await;
    spec.db().has("orders", 1).await;
    at_peace(&broker).await;
    worker.drain().await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
}

/// Two orders under one id. The first is processed, the server gives the second up, and the worker finds that.
async fn given_up_under_a_used_id(on_conflict: &str) -> Vec<String> {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let short = stream::Config { duplicate_window: Duration::from_millis(100), ..stream_config() };
    broker.create(short, six_deliveries()).await;
    let spec = DaemonSpec::new(server.url()).set("inbox.on_conflict", on_conflict);
    let id = || headers(&[("Nats-Msg-Id", "one")]);
    broker.publish_to("ORDERS.new", id(), b"Order Data 1".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_anew("ORDERS.new", id(), b"Order Data 2".to_vec()).await;
    give_up(&broker, &[2]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    at_peace(&broker).await;
    spec.run_ok(&["audit"]).await;
    assert_eq!(spec.db().count("orders").await, 1);
    spec.db().texts("SELECT reason || ': ' || CAST(payload AS TEXT) FROM dead_letters").await
}

#[tokio::test]
async fn an_order_given_up_under_the_id_of_another_one_is_a_conflict_as_with_any_delivery() {
    assert_eq!(given_up_under_a_used_id("dead-letter").await, ["conflict: Order Data 2"]);
    assert_eq!(given_up_under_a_used_id("duplicate").await, Vec::<String>::new());
}

#[tokio::test]
async fn an_order_given_up_later_is_found_although_of_earlier_ones_nothing_can_be_told() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    three_elsewhere_and_the_fourth_given_up(&server, &broker).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.logged(&["ERROR", "messages 1 to 4", "which ones were lost cannot be told"]).await;

    worker.freeze();
    eventually("its request for messages is over", PATIENCE, async || {
        equal(broker.consumer_info().await.num_waiting, 0)
    })
    .await;
    broker.publish("Order Data 5").await;
    use_up(&broker, &[5]).await;
    given_up(&broker, 2).await;
    worker.thaw();
    spec.db().has("dead_letters", 1).await;
    given_up(&broker, 1).await;
    assert_eq!(spec.db().texts("SELECT CAST(payload AS TEXT) FROM dead_letters").await, ["Order Data 5"]);
    worker.drain().await;
}

/// Plays somebody who gets orders and says nothing, and comes back whenever the server does, until it is told to stop.
async fn drops_what_it_gets(url: String, stop: CancellationToken) {
    let options = async_nats::ConnectOptions::new().reconnect_delay_callback(|_| Duration::from_millis(20));
    let jetstream = async_nats::jetstream::new(options.connect(url).await.unwrap());
    let taken = async || {
        let consumer: PullConsumer = jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.ok()?;
        let pull = consumer.batch().max_messages(100).expires(Duration::from_millis(300));
        let mut messages = pull.messages().await.ok()?;
        while let Some(Ok(_)) = messages.next().await {}
        Some(())
    };
    while !stop.is_cancelled() {
        drop(tokio::time::timeout(Duration::from_secs(1), taken()).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_order_is_left_behind_when_others_drop_what_they_get_and_the_server_is_killed_again_and_again() {
    const ROUNDS: u64 = 5;
    const ORDERS: u64 = 400;
    // What it has confirmed it must still have.
    let always = ServerSpec { jetstream: "sync_interval: always".into(), ..ServerSpec::default() };
    let mut server = NatsServer::with(always).await;
    let options = async_nats::ConnectOptions::new().reconnect_delay_callback(|_| Duration::from_millis(50));
    let broker = Broker::connect_with(&server, options).await;
    broker.create(stream_config(), consumer::pull::Config { max_deliver: 3, ..six_deliveries() }).await;
    let spec = DaemonSpec::new(server.url()).set("retry.max_attempts", "2");
    let mut worker = spec.start();
    worker.ready().await;
    let stop = CancellationToken::new();
    let others = [(); 3].map(|()| tokio::spawn(drops_what_it_gets(server.url(), stop.clone())));
    for round in 0..ROUNDS {
        // The server gives up what it last delivered before it was killed when it is back, and the worker does not hear of it.
        worker.freeze();
        broker.publish_numbered(round * ORDERS + 1..=(round + 1) * ORDERS).await;
        eventually("some have had their last delivery", PATIENCE, async || {
            let info = broker.try_consumer_info().await?;
            if info.delivered.consumer_sequence >= (round + 1) * ORDERS * 5 / 2 {
                Ok(())
            } else {
                Err(format!("{info:?}"))
            }
        })
        .await;
        server.kill9();
        server.restart().await;
        eventually("the server answers", PATIENCE, async || broker.try_consumer_info().await).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        worker.thaw();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    stop.cancel();
    for other in others {
        other.await.unwrap();
    }
    let db = spec.db();
    eventually("each order is applied or a dead letter", PATIENCE, async || {
        let (info, decided) = (broker.consumer_info().await, db.count("orders").await + db.count("dead_letters").await);
        if decided == i64::try_from(ROUNDS * ORDERS).unwrap() { Ok(()) } else { Err(format!("{decided} {info:?}")) }
    })
    .await;
    at_peace(&broker).await;
    println!("{} of {} orders were given up", db.count("dead_letters").await, ROUNDS * ORDERS);
    spec.run_ok(&["audit"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn audit_names_the_orders_that_the_server_gave_up_above_the_ack_floor() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(1..=2).await;
    give_up(&broker, &[1, 2]).await;
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 0);
    let audit = spec.run(&["audit"]).await;
    assert!(audit.stdout.contains("messages 1 to 2: 0 processed, 0 dead letters, 2 missing"), "{}", audit.stdout);
}

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

/// Lines of the log with all these words.
fn lines(worker: &Daemon, words: &[&str]) -> usize {
    worker.log().lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

async fn lock(spec: &DaemonSpec) -> SqliteConnection {
    let mut writer = spec.db().open_to_write().await;
    sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.unwrap();
    writer
}

async fn unlock(mut writer: SqliteConnection) {
    sqlx::query("ROLLBACK").execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();
}

#[tokio::test]
async fn orders_that_the_stream_dropped_while_no_worker_ran_are_counted_and_named_once() {
    let (server, broker) = stream_that_keeps(4, consumer_config()).await;
    broker.publish_numbered(1..=10).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.acknowledged(10).await;
    worker.metric("messages_expired_total", 6.0).await;
    worker.logged(&["ERROR", "messages 1 to 6 are gone"]).await;
    spec.db().applied_once(4).await;
    worker.drain().await;

    // Known, or processed: no loss is told twice.
    let mut worker = spec.start();
    broker.publish_numbered(11..=20).await;
    broker.acknowledged(20).await;
    let lost = worker.metrics().await.get("messages_expired_total").unwrap();
    assert_eq!(spec.db().count("orders").await, 14 - lost as i64);
    assert_eq!(lines(&worker, &["messages 1 to 6"]), 0);
    worker.drain().await;
}

#[tokio::test]
async fn orders_that_the_stream_dropped_are_not_counted_again_by_the_worker_after_a_pause() {
    let (server, broker) = stream_that_keeps(4, consumer_config()).await;
    broker.publish_numbered(1..=10).await;
    // The server delivers nothing for as long as the test lasts: the gap stays where it is.
    pause(&broker, Duration::from_secs(3600)).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("messages_expired_total", 6.0).await;
    spec.run_ok(&["pause"]).await;
    worker.logged(&["WARN", "nothing is processed until"]).await;
    broker.publish_numbered(11..=12).await;
    spec.run_ok(&["resume"]).await;
    worker.metric("messages_expired_total", 8.0).await;
    assert_eq!(lines(&worker, &["messages 1 to 6 are gone"]), 1);
    worker.logged(&["ERROR", "messages 7 to 8 are gone"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn orders_that_the_stream_drops_under_a_running_worker_are_counted_to_the_last_one() {
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
async fn with_a_filter_other_subjects_may_expire_and_only_what_vanished_undelivered_is_counted() {
    let filtered = consumer::pull::Config { filter_subject: "ORDERS.new".into(), ..consumer_config() };
    let (server, broker) = Broker::with(filtered).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "10");
    for _ in 0..5 {
        broker.publish_to("ORDERS.other", headers(&[]), b"not for us".to_vec()).await;
    }
    broker.purge().await;
    let mut worker = spec.start();
    worker.ready().await;
    let writer = lock(&spec).await;
    broker.publish_numbered(6..=35).await;
    eventually("it holds what it can", PATIENCE, async || {
        let metrics = worker.metrics().await;
        let pending = metrics.get("consumer_num_pending").unwrap_or_default();
        if pending > 0.0 && metrics.get("consumer_delivered_stream_seq") >= Some(10.0) { Ok(()) } else { Err(pending) }
    })
    .await;
    assert_eq!(worker.metrics().await.get("messages_expired_total"), Some(0.0));
    broker.purge().await;
    worker.logged(&["ERROR", "at least", "of this filtered consumer"]).await;
    unlock(writer).await;
    eventually("all are accounted for", PATIENCE, async || {
        let lost = worker.metrics().await.get("messages_expired_total").unwrap_or_default();
        equal(spec.db().count("orders").await + lost as i64, 30)
    })
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn ack_wait_made_shorter_under_held_orders_runs_none_twice_and_brings_no_storm() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    let writer = lock(&spec).await;
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
    unlock(writer).await;
    broker.acknowledged(20).await;
    spec.db().applied_once(20).await;

    broker.edit_consumer(consumer_config()).await;
    broker.publish_numbered(21..=30).await;
    broker.acknowledged(30).await;
    spec.db().applied_once(30).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_consumer_edited_so_that_it_must_be_refused_stops_the_work_until_it_is_mended() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.edit_consumer(consumer::pull::Config { max_deliver: 5, ..consumer_config() }).await;
    worker.not_ready("max_deliver 5, more than retry.max_attempts 5 is needed").await;
    worker.logged(&["WARN", "--max-deliver=-1"]).await;
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
async fn max_ack_pending_edited_to_one_and_back_is_warned_of_once_and_the_flow_goes_on() {
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
    assert_eq!(lines(&worker, &["has max_ack_pending 1,"]), 1);
    worker.drain().await;
}

#[tokio::test]
async fn a_filter_set_and_taken_off_under_a_running_worker_loses_nothing_that_is_for_it_and_stops_nothing() {
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
async fn reset(broker: &Broker) {
    let request = broker.client.request("$JS.API.CONSUMER.RESET.ORDERS.order-processor", r#"{"seq":1}"#.into());
    let answer: serde_json::Value = serde_json::from_slice(&request.await.unwrap().payload).unwrap();
    assert!(answer["error"].is_null(), "{answer}");
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

#[tokio::test]
async fn a_consumer_reset_to_the_first_message_under_the_worker_and_while_it_is_away_applies_nothing_twice() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.publish_numbered(1..=500).await;
    broker.acknowledged(500).await;
    reset(&broker).await;
    replayed(&broker, &spec, &worker, 500).await;
    worker.drain().await;

    reset(&broker).await;
    let mut worker = spec.start();
    worker.ready().await;
    replayed(&broker, &spec, &worker, 500).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_consumer_made_anew_from_the_first_message_under_the_worker_and_while_it_is_away_applies_nothing_twice() {
    let again = || consumer::pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: 1 },
        ..consumer_config()
    };
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.publish_numbered(1..=500).await;
    broker.acknowledged(500).await;
    broker.delete_consumer().await;
    broker.create_consumer(again()).await;
    replayed(&broker, &spec, &worker, 500).await;
    worker.drain().await;

    broker.delete_consumer().await;
    broker.create_consumer(again()).await;
    let mut worker = spec.start();
    worker.ready().await;
    replayed(&broker, &spec, &worker, 500).await;
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
async fn a_server_restored_from_a_copy_gives_old_sequences_to_new_orders_and_all_are_applied() {
    restored("", true).await;
}

#[tokio::test]
async fn a_server_restored_while_no_worker_ran_gives_old_sequences_to_new_orders_and_all_are_applied() {
    restored("", false).await;
}

#[tokio::test]
async fn a_stream_that_lost_its_tail_below_the_consumers_floor_gives_old_sequences_to_new_orders_and_all_are_applied() {
    restored("jetstream/$G/streams/ORDERS/msgs", true).await;
    restored("jetstream/$G/streams/ORDERS/msgs", false).await;
}

/// What `nats consumer pause` does.
async fn pause(broker: &Broker, lasting: Duration) {
    let until = humantime::format_rfc3339_millis(SystemTime::now() + lasting);
    let request = format!(r#"{{"pause_until":"{until}"}}"#);
    let answer = broker.client.request("$JS.API.CONSUMER.PAUSE.ORDERS.order-processor", request.into()).await.unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&answer.payload).unwrap();
    assert_eq!(answer["paused"], true, "{answer}");
}

#[tokio::test]
async fn a_paused_consumer_is_shown_and_said_once_and_the_work_goes_on_when_the_pause_ends() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    pause(&broker, Duration::from_secs(6)).await;
    worker.metric("consumer_paused", 1.0).await;
    broker.publish_numbered(1..=5).await;
    worker.metric("consumer_num_pending", 5.0).await;
    assert_eq!(worker.get("/readyz").await.0, 200, "a pause is no fault of the worker");
    let status: serde_json::Value = serde_json::from_str(&worker.get("/status").await.1).unwrap();
    assert_eq!(status["consumer"]["paused"], true);
    assert_eq!(spec.db().count("orders").await, 0);

    broker.acknowledged(5).await;
    worker.metric("consumer_paused", 0.0).await;
    worker.logged(&["INFO", "not paused any more"]).await;
    assert_eq!(lines(&worker, &["WARN", "has paused the consumer"]), 1);
    spec.db().applied_once(5).await;
    worker.drain().await;
}

#[tokio::test]
async fn until_idle_waits_for_the_end_of_a_pause_and_says_so() {
    let (server, broker) = Broker::story().await;
    broker.publish_numbered(1..=5).await;
    pause(&broker, Duration::from_secs(3)).await;
    let spec = DaemonSpec::new(server.url());
    let finished = spec.run_ok(&["run", "--until-idle"]).await;
    assert!(finished.stderr.contains("waiting for the end of the consumer's pause"), "{finished:?}");
    spec.db().applied_once(5).await;
}

#[tokio::test]
async fn long_retries_that_take_all_of_max_ack_pending_do_not_stop_the_flow() {
    let four = consumer::pull::Config { max_ack_pending: 4, ..consumer_config() };
    let hours = [("retry.min_delay", "1h"), ("retry.max_delay", "1h"), ("retry.max_attempts", "3")];
    let bench = Bench::new(four, &hours).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    worker.ready().await;
    for number in 1..=6 {
        bench.broker.publish(format!("retry {number}")).await;
    }
    for number in 7..=26 {
        bench.broker.publish(format!("plain {number}")).await;
    }
    // Some of the failing ones wait for their hour; those that would take the last place use up their attempts at once.
    eventually("all the others are applied", PATIENCE, async || equal(bench.effects().await.len(), 20)).await;
    let parked = worker.telemetry.health.status().parked;
    assert!(parked > 0, "there are retries that wait");
    let dead = bench.spec.db().texts("SELECT DISTINCT reason FROM dead_letters").await;
    assert_eq!(dead, ["attempts_exhausted"]);
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_that_may_not_ask_for_messages_is_not_ready_and_says_why_at_once() {
    let (server, _broker) = Broker::with_restricted_worker(
        r#"allow: ["$JS.API.STREAM.INFO.>", "$JS.API.CONSUMER.INFO.>", "$JS.ACK.>"]"#,
        consumer_config(),
    )
    .await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.not_ready("MSG.NEXT.ORDERS.order-processor").await;
    let (_, body) = worker.get("/readyz").await;
    assert!(body.contains("pulls: the server denies us a subject"), "{body}");
    worker.drain().await;
}

/// A stall of pulling would be half a minute; a loaded machine takes a second or two.
const GAP_MAX: Duration = Duration::from_secs(10);

/// What was on its way when a connection broke comes again soon.
fn two_seconds() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: Duration::from_secs(2), ..consumer_config() }
}

/// Publishes ten orders and measures the time until the databases have `orders` in all.
async fn flow_again(broker: &Broker, specs: &[&DaemonSpec], orders: u64) -> Duration {
    let began = Instant::now();
    broker.publish_numbered(orders - 9..=orders).await;
    eventually("the orders are applied", PATIENCE, async || {
        let mut applied = 0;
        for spec in specs {
            applied += spec.db().count("orders").await.unsigned_abs();
        }
        equal(applied, orders)
    })
    .await;
    began.elapsed()
}

fn assert_short(what: &str, gaps: &[Duration]) {
    println!("{what}: deliveries flowed again after {gaps:?}");
    assert!(gaps.iter().all(|gap| *gap < GAP_MAX), "{what}: {gaps:?}");
}

#[tokio::test]
async fn after_every_reconnect_deliveries_flow_again_at_once() {
    let (server, broker) = Broker::with(two_seconds()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;
    let mut gaps = Vec::new();
    for cut in 1..=5 {
        proxy.cut();
        gaps.push(flow_again(&broker, &[&spec], cut * 10).await);
    }
    assert_short("one worker, five cuts", &gaps);

    // Busy with a commit, it polls nothing while the connection comes and goes.
    let writer = lock(&spec).await;
    broker.publish_numbered(51..=60).await;
    worker.metric("held_deliveries", 10.0).await;
    for _ in 1..=4 {
        let before = worker.metrics().await.get("nats_reconnects_total").unwrap();
        proxy.cut();
        eventually("it is connected again", PATIENCE, async || {
            at_least(worker.metrics().await.get("nats_reconnects_total"), Some(before + 1.0))
        })
        .await;
    }
    unlock(writer).await;
    let gap = flow_again(&broker, &[&spec], 70).await;
    assert_short("busy over four reconnects", &[gap]);
    broker.acknowledged(70).await;
    spec.db().applied_once(70).await;
    worker.drain().await;
}

#[tokio::test]
async fn two_workers_on_one_consumer_go_on_at_once_after_every_reconnect() {
    let (server, broker) = Broker::with(two_seconds()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let specs = [DaemonSpec::new(proxy.url()), DaemonSpec::new(proxy.url())];
    let mut workers = specs.each_ref().map(DaemonSpec::start);
    for worker in &mut workers {
        worker.ready().await;
    }
    let mut gaps = Vec::new();
    for cut in 1..=5 {
        proxy.cut();
        gaps.push(flow_again(&broker, &specs.each_ref(), cut * 10).await);
    }
    assert_short("two workers, five cuts", &gaps);
    broker.acknowledged(50).await;
    for worker in &mut workers {
        assert_eq!(worker.metrics().await.get("messages_expired_total"), Some(0.0), "the other one has the rest");
        worker.drain().await;
    }
}

/// Three servers that hold the stream together.
async fn cluster() -> Vec<NatsServer> {
    let routes = [(); 3].map(|()| free_port());
    let urls = routes.map(|port| format!("nats-route://127.0.0.1:{port}")).join(", ");
    let mut servers = Vec::new();
    for (number, port) in routes.iter().enumerate() {
        let config = format!(
            "server_name: s{number}\nlame_duck_grace_period: \"1s\"\nlame_duck_duration: \"30s\"\n\
             cluster {{\n  name: c\n  listen: \"127.0.0.1:{port}\"\n  routes: [{urls}]\n}}\n"
        );
        servers.push(NatsServer::with(ServerSpec { config, ..ServerSpec::default() }).await);
    }
    servers
}

#[tokio::test]
async fn when_its_server_shuts_down_in_lame_duck_mode_the_worker_moves_to_another_one_and_loses_nothing() {
    let servers = cluster().await;
    let broker = Broker::connect(&servers[2]).await;
    let replicated = stream::Config { num_replicas: 3, ..stream_config() };
    eventually("the cluster takes a stream", PATIENCE, async || {
        broker.jetstream.create_stream(replicated.clone()).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
    broker.create_consumer(two_seconds()).await;
    // The other servers of the cluster it learns from this one.
    let spec = DaemonSpec::new(servers[0].url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=100).await;
    broker.acknowledged(100).await;

    servers[0].lame_duck();
    let mut sent: u32 = 100;
    let mut unready = 0;
    eventually("it is connected to another server", PATIENCE, async || {
        sent += 1;
        let id = format!("order-{sent}");
        // While leaders change nobody takes a message; a publisher tries again.
        eventually("the stream takes an order", PATIENCE, async || {
            let (headers, payload) = (headers(&[("Nats-Msg-Id", &id)]), "Order Data".into());
            let publish = broker.jetstream.publish_with_headers("ORDERS.new", headers, payload).await;
            publish.map_err(|error| error.to_string())?.await.map_err(|error| error.to_string())
        })
        .await;
        unready += u32::from(worker.get("/readyz").await.0 != 200);
        at_least(lines(&worker, &["INFO", "connected to the server"]), 2)
    })
    .await;
    broker.acknowledged(u64::from(sent)).await;
    spec.db().applied_once(i64::from(sent)).await;
    println!("{unready} of {} looks at the readiness said no", sent - 100);
    worker.logged(&["WARN", "lame duck mode"]).await;
    worker.ready().await;
    worker.drain().await;
}
