//! Messages that the server gives up: their `max_deliver` is used up while the worker is away, frozen, killed or running.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{self, DeliverPolicy, PullConsumer};
use async_nats::jetstream::stream;
use futures_util::StreamExt;
use sqlx::Row;
use tokio_util::sync::CancellationToken;

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
async fn orders_given_up_while_no_worker_ran_are_dead_letters() {
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
async fn until_idle_ends_only_when_they_are_dead_letters() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    give_up(&broker, &[1]).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("dead_letters").await, 1);
    at_peace(&broker).await;
}

#[tokio::test]
async fn under_a_frozen_and_killed_worker_it_is_a_dead_letter_at_the_next_start() {
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
async fn under_a_frozen_worker_it_is_applied_when_the_worker_thaws() {
    let (_server, broker, spec, mut worker) = frozen_until_given_up().await;
    worker.thaw();
    at_peace(&broker).await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    spec.db().applied_once(2).await;
    worker.drain().await;
}

#[tokio::test]
async fn under_a_running_worker_it_is_a_dead_letter_at_once() {
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
async fn without_the_advisory_it_is_found_all_the_same() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.logged(&["INFO", "(optional)"]).await;
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
async fn a_processed_order_is_only_acknowledged() {
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
async fn a_database_that_knows_less_guesses_nothing() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    three_elsewhere_and_the_fourth_given_up(&server, &broker).await;

    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["adopt", "--yes"]).await;
    let mut worker = spec.start();
    worker.logged(&["ERROR", "which ones were lost cannot be told", "order-processor audit"]).await;
    broker.publish("Order Data 5").await;
    broker.acknowledged(5).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn it_is_found_below_however_many_others() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    broker.publish("Order Data 0").await;
    hand_back(&broker, &[1], MAX_DELIVER - 1).await;
    // The last delivery goes to somebody who says nothing. It is pending until the others are worked off.
    broker.take_one().await;
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
async fn orders_before_the_consumers_start_are_not_given_up() {
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
async fn orders_of_another_database_are_not_given_up() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.publish("Order Data 2").await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["adopt", "--yes"]).await;
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
async fn unknown_orders_are_not_guessed_while_pending() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    broker.publish("Order Data 1").await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(2..=3).await;
    give_up(&broker, &[2, 3]).await;
    broker.edit_consumer(consumer::pull::Config { ack_wait: PATIENCE, ..six_deliveries() }).await;
    broker.publish("Order Data 4").await;
    broker.take_one().await;

    // Two given up, one pending, and one below the ack floor that this database does not know.
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["adopt", "--yes"]).await;
    let worker = spec.start();
    worker.logged(&["ERROR", "nothing of some of the messages 1 to 1", "pending"]).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);
}

#[tokio::test]
async fn pending_orders_are_not_given_up() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish("Order Data 1").await;
    DaemonSpec::new(server.url()).run_ok(&["run", "--until-idle"]).await;
    broker.edit_consumer(consumer::pull::Config { ack_wait: Duration::from_secs(3), ..six_deliveries() }).await;
    broker.publish("Order Data 2").await;
    hand_back(&broker, &[2], 2).await;
    broker.take_one().await;

    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["adopt", "--yes"]).await;
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
async fn under_a_used_id_it_is_a_conflict_as_with_any_delivery() {
    assert_eq!(given_up_under_a_used_id("dead-letter").await, ["conflict: Order Data 2"]);
    assert_eq!(given_up_under_a_used_id("duplicate").await, Vec::<String>::new());
}

#[tokio::test]
async fn a_later_one_is_found_although_earlier_ones_are_unknown() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    three_elsewhere_and_the_fourth_given_up(&server, &broker).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["adopt", "--yes"]).await;
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
async fn no_order_is_left_behind_while_others_drop_what_they_get() {
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
async fn audit_names_the_orders_above_the_ack_floor() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(1..=2).await;
    give_up(&broker, &[1, 2]).await;
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 0);
    let audit = spec.run(&["audit"]).await;
    assert!(audit.stdout.contains("messages 1 to 2: 0 processed, 0 dead letters, 2 missing"), "{}", audit.stdout);
}
