//! Messages that the server gives up: their `max_deliver` is used up while the worker is away, frozen, killed or running.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{self, PullConsumer};
use futures_util::StreamExt;
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

/// As [`hand_back`], until the server has given them up.
async fn roll_back_after(broker: &Broker, stream_seqs: &[u64]) {
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
async fn orders_given_up_while_no_worker_ran_are_missing_until_they_are_repaired() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "one")]), b"Order Data 1".to_vec()).await;
    broker.publish("Order Data 2").await;
    roll_back_after(&broker, &[1, 2]).await;
    broker.publish("Order Data 3").await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("missing_messages", 2.0).await;
    worker.logged(&["ERROR", "messages are missing", "1 to 2"]).await;
    broker.acknowledged(3).await;
    assert_eq!(spec.db().count("dead_letters").await, 0, "nothing is guessed");
    spec.run_ok(&["pause"]).await;
    spec.run_ok(&["audit", "--repair"]).await;
    spec.run_ok(&["resume"]).await;
    worker.metric("missing_messages", 0.0).await;
    spec.db().applied_once(3).await;
    worker.drain().await;
}

#[tokio::test]
async fn under_a_frozen_and_killed_worker_it_is_missing_at_the_next_start() {
    let (_server, broker, spec, mut worker) = frozen_until_given_up().await;
    worker.kill9();
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("missing_messages", 1.0).await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    assert_eq!(spec.db().count("orders").await, 1);
    worker.drain().await;
}

#[tokio::test]
async fn without_the_advisory_it_is_missing_while_the_daemon_runs() {
    let (server, broker) =
        Broker::with_restricted_worker(r#"allow: ["$JS.API.>", "$JS.ACK.>"]"#, six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.logged(&["INFO", "cannot receive max-deliveries advisories"]).await;
    worker.freeze();
    broker.publish("Order Data 1").await;
    given_up(&broker, 1).await;
    worker.thaw();
    broker.publish("Order Data 2").await;
    // The thawed worker has the last delivery of the first in hand: it is applied, or missing.
    broker.acknowledged(2).await;
    eventually("each order is applied or named", PATIENCE, async || {
        let missing = worker.metrics().await.get("missing_messages").unwrap_or_default() as i64;
        equal(spec.db().count("orders").await + missing, 2)
    })
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn a_processed_order_is_not_missing() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.delete_consumer().await;
    broker.create_consumer(six_deliveries()).await;
    roll_back_after(&broker, &[1, 2, 3]).await;

    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("audited_through_stream_seq", 3.0).await;
    assert_eq!(worker.metrics().await.get("missing_messages"), Some(0.0));
    spec.db().applied_once(3).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pending_order_is_not_missing() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    broker.edit_consumer(consumer::pull::Config { ack_wait: Duration::from_secs(5), ..six_deliveries() }).await;
    broker.publish("Order Data 1").await;
    broker.take_one().await;
    broker.publish("Order Data 2").await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.acknowledged(2).await;
    worker.metric("audited_through_stream_seq", 2.0).await;
    assert_eq!(worker.lines(&["messages are missing"]), 0);
    spec.db().applied_once(2).await;
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
    // Of what the server gave up unheard, each order is named, and one repair applies them all.
    let db = spec.db();
    let total = i64::try_from(ROUNDS * ORDERS).unwrap();
    eventually("each order is applied, a dead letter or missing", PATIENCE, async || {
        let (info, decided) = (broker.consumer_info().await, db.count("orders").await + db.count("dead_letters").await);
        let missing = worker.metrics().await.get("missing_messages").unwrap_or_default() as i64;
        if decided + missing == total && info.num_pending == 0 && info.num_ack_pending == 0 {
            Ok(())
        } else {
            Err(format!("{decided} and {missing} missing, {info:?}"))
        }
    })
    .await;
    println!("{} of {total} orders were given up", total - db.count("orders").await);
    spec.run_ok(&["pause"]).await;
    spec.run_ok(&["audit", "--repair"]).await;
    spec.run_ok(&["resume"]).await;
    worker.metric("missing_messages", 0.0).await;
    assert_eq!(db.count("orders").await + db.count("dead_letters").await, total);
    worker.drain().await;
}

#[tokio::test]
async fn audit_names_the_orders_above_the_ack_floor() {
    let (server, broker) = Broker::with(six_deliveries()).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(1..=2).await;
    roll_back_after(&broker, &[1, 2]).await;
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 0);
    let audit = spec.run(&["audit"]).await;
    assert!(audit.stdout.contains("messages 1 to 2: 0 processed, 0 dead letters, 2 missing"), "{}", audit.stdout);
}
