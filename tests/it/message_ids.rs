//! How ids are made: scopes, missing ids, and changes of the settings while messages are on their way. Nothing is applied twice.

use std::time::Duration;

use async_nats::jetstream::stream;

use crate::support::nats::{STREAM, consumer_config, headers, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer};

/// Everything is delivered once more, as after a reset of the consumer.
async fn deliver_all_again(broker: &Broker) {
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
}

async fn publish_ids(broker: &Broker, ids: std::ops::RangeInclusive<u64>) {
    for id in ids {
        broker.publish(format!("{{\"id\":{id}}}")).await;
    }
}

async fn ids(spec: &DaemonSpec) -> Vec<String> {
    spec.db().texts("SELECT id FROM orders ORDER BY rowid").await
}

/// The story on a stream that forgets message ids soon, so that a publisher can use one again.
async fn forgetful_story() -> (NatsServer, Broker) {
    let (server, broker) = Broker::story().await;
    let forgetful = stream::Config { duplicate_window: Duration::from_millis(100), ..stream_config() };
    broker.jetstream.update_stream(forgetful).await.unwrap();
    (server, broker)
}

#[tokio::test]
async fn a_change_of_the_id_settings_applies_nothing_twice_and_is_named() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    publish_ids(&broker, 1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    publish_ids(&broker, 4..=4).await;
    let spec = spec.set("inbox.id_pointer", "/id");
    let checked = spec.run_ok(&["check"]).await;
    assert!(checked.stdout.contains("ok    ids         no id_pointer, id_scope subject\n"), "{checked:?}");
    assert!(checked.stdout.contains("in another way (id_pointer /id, id_scope subject)"), "{checked:?}");

    // All of them come again, and the consumer has delivered none of them.
    deliver_all_again(&broker).await;
    let changed = spec.run_ok(&["run", "--until-idle"]).await;
    for words in ["message ids have changed", "no id_pointer, id_scope subject", "id_pointer /id, id_scope", "from_seq"]
    {
        assert!(changed.stderr.contains(words), "{words}: {changed:?}");
    }
    spec.db().applied_once(4).await;
    assert_eq!(ids(&spec).await.last().unwrap(), "ORDERS.new 4", "it was not delivered before the change");
    let checked = spec.run_ok(&["check"]).await;
    let history = "no id_pointer, id_scope subject; from message 4: id_pointer /id, id_scope subject\n";
    assert!(checked.stdout.contains(history) && !checked.stdout.contains("another way"), "{checked:?}");

    // Another change, back to the former settings, and everything once more.
    let spec = spec.set("inbox.id_scope", "stream");
    spec.run_ok(&["run", "--until-idle"]).await;
    let spec = spec.unset("inbox.id_pointer").unset("inbox.id_scope");
    publish_ids(&broker, 5..=5).await;
    deliver_all_again(&broker).await;
    let again = spec.run_ok(&["run", "--until-idle"]).await;
    assert!(again.stderr.contains("message ids have changed"), "{again:?}");
    spec.db().applied_once(5).await;
    assert_eq!(spec.db().count("id_schemes").await, 4);
    let quiet = spec.run_ok(&["run", "--until-idle"]).await;
    assert!(!quiet.stderr.contains("message ids have changed"), "{quiet:?}");
}

#[tokio::test]
async fn applied_orders_without_an_ack_keep_their_ids_over_a_change() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let consumer =
        async_nats::jetstream::consumer::pull::Config { ack_wait: Duration::from_secs(1), ..consumer_config() };
    broker.create(stream_config(), consumer).await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    publish_ids(&broker, 1..=5).await;
    // Another client takes the deliveries, so that they are delivered and not acknowledged.
    for _ in 1..=3 {
        broker.take_one().await;
    }
    let mut worker = spec.start();
    spec.db().has("orders", 5).await;
    worker.kill9();
    // As after a kill between the commit and the acknowledgement: the server knows of no acknowledgement.
    deliver_all_again(&broker).await;
    for _ in 1..=2 {
        broker.take_one().await;
    }
    let spec = spec.set("inbox.id_scope", "stream").set("inbox.id_pointer", "/other");
    publish_ids(&broker, 6..=6).await;
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 5.0).await;
    worker.metric("missing_ids_total", 1.0).await;
    worker.drain().await;
    spec.db().applied_once(6).await;
}

#[tokio::test]
async fn a_recreated_stream_has_the_ids_of_the_new_settings() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    publish_ids(&broker, 1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let spec = spec.set("inbox.id_pointer", "/id");
    spec.run_ok(&["run", "--until-idle"]).await;
    // The clocks of a cluster may differ a little: so long after the last message, a sequence belongs to another message.
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;
    publish_ids(&broker, 11..=12).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let of_the_new_stream = spec.db().texts("SELECT id FROM orders WHERE id LIKE 'ORDERS.new %' ORDER BY id").await;
    assert_eq!(of_the_new_stream, ["ORDERS.new 11", "ORDERS.new 12"]);

    // A change while the stream is being recreated: its first messages are new, whatever their sequence.
    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;
    publish_ids(&broker, 21..=22).await;
    let spec = spec.set("inbox.id_scope", "stream");
    spec.run_ok(&["run", "--until-idle"]).await;
    let of_the_newest_stream = spec.db().texts("SELECT id FROM orders WHERE id LIKE 'ORDERS 2%' ORDER BY id").await;
    assert_eq!(of_the_newest_stream, ["ORDERS 21", "ORDERS 22"]);
    spec.db().applied_once(7).await;
}

#[tokio::test]
async fn an_order_on_two_subjects_is_one_order_in_its_stream() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id").set("inbox.id_scope", "stream");
    for subject in ["ORDERS.new", "ORDERS.retry"] {
        broker.publish_to(subject, headers(&[]), br#"{"id":4711}"#.to_vec()).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(1).await;
    assert_eq!(ids(&spec).await, ["ORDERS 4711"]);
    assert_eq!(spec.run_ok(&["audit", "--json"]).await.json()["processed"], 2);
}

#[tokio::test]
async fn sources_with_equal_ids_are_told_apart_by_a_header() {
    let (server, broker) = Broker::story().await;
    broker.delete_stream().await;
    for shop in ["SHOP1", "SHOP2"] {
        let subjects = vec![format!("{shop}.*")];
        broker
            .jetstream
            .create_stream(stream::Config { name: shop.into(), subjects, ..stream_config() })
            .await
            .unwrap();
        let tenant = headers(&[("Nats-Msg-Id", "4711"), ("X-Tenant", shop)]);
        broker.publish_to(&format!("{shop}.new"), tenant, b"Coffee".to_vec()).await;
    }
    let transform = |shop: &str| stream::Source {
        name: shop.into(),
        subject_transforms: vec![stream::SubjectTransform {
            source: format!("{shop}.*"),
            destination: "ORDERS.new".into(),
        }],
        ..Default::default()
    };
    let sources = Some(vec![transform("SHOP1"), transform("SHOP2")]);
    broker.create(stream::Config { sources, subjects: vec![], ..stream_config() }, consumer_config()).await;
    let plain = DaemonSpec::new(server.url());
    let checked = plain.run_ok(&["check"]).await;
    assert!(
        checked.stdout.contains("sources (SHOP1, SHOP2)") && checked.stdout.contains("inbox.id_scope"),
        "{checked:?}"
    );
    let spec = plain.set("inbox.id_scope", "header:X-Tenant");
    let checked = spec.run_ok(&["check"]).await;
    assert!(
        checked.stdout.contains("copy a message again") && !checked.stdout.contains("inbox.id_scope"),
        "{checked:?}"
    );

    let mut worker = spec.start();
    broker.acknowledged(2).await;
    worker.drain().await;
    spec.db().applied_once(2).await;
    let mut both = ids(&spec).await;
    both.sort();
    assert_eq!(both, ["X-Tenant=SHOP1:4711", "X-Tenant=SHOP2:4711"]);
}

#[tokio::test]
async fn a_missing_id_is_counted_and_logged_once_or_makes_a_dead_letter() {
    let (server, broker) = forgetful_story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/order_id");
    for payload in [r#"{"orderId":1}"#, r#"{"orderId":1}"#, r#"{"order_id":null}"#, r#"{"order_id":2}"#] {
        broker.publish(payload).await;
    }
    let mut worker = spec.start();
    broker.acknowledged(4).await;
    worker.metric("missing_ids_total", 3.0).await;
    worker.logged(&["id of a message is missing", "inbox.id_pointer /order_id", "missing_ids_total"]).await;
    assert_eq!(worker.lines(&["id of a message is missing"]), 1, "{}", worker.log());
    worker.drain().await;
    spec.db().applied_once(4).await;

    // What was applied stays applied, and what has no tenant has no id.
    let spec = spec.set("inbox.on_missing_id", "dead-letter").set("inbox.id_scope", "header:X-Tenant");
    broker.publish(r#"{"orderId":5}"#).await;
    broker.publish(r#"{"order_id":6}"#).await;
    broker.publish_to("ORDERS.new", headers(&[("X-Tenant", "a b")]), br#"{"order_id":7}"#.to_vec()).await;
    deliver_all_again(&broker).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("orders").await, 5);
    let errors = spec.db().texts("SELECT error FROM dead_letters ORDER BY stream_seq").await;
    assert!(errors[0].contains("inbox.id_pointer /order_id"), "{errors:?}");
    assert!(errors[1].contains("no header X-Tenant"), "{errors:?}");
    assert_eq!(spec.db().texts("SELECT DISTINCT reason FROM dead_letters").await, ["undecodable"]);
    assert_eq!(ids(&spec).await.last().unwrap(), "X-Tenant=a%20b 7");
    assert_eq!(errors.len(), 2, "{errors:?}");
}

#[tokio::test]
async fn a_letter_without_a_readable_id_is_replayed_only_as_new() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    broker.publish(r#"{"id":4711"#).await;
    broker.publish(r#"{"id":4711}"#).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(ids(&spec).await, ["ORDERS.new 4711"]);
    let refused = spec.run(&["dead-letters", "replay", "--all"]).await;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(
        refused.stdout.contains("publisher's id cannot be read") && refused.stdout.contains("--as-new"),
        "{refused:?}"
    );
    assert_eq!((spec.db().count("orders").await, spec.db().count("dead_letters").await), (1, 1));

    // The settings of the command do not matter: the database records how the id was made.
    let spec = spec.unset("inbox.id_pointer");
    assert_eq!(spec.run(&["dead-letters", "replay", "--all"]).await.code, Some(1));
    let applied = spec.run_ok(&["dead-letters", "replay", "--all", "--as-new"]).await;
    assert!(applied.stdout.starts_with("applied  ORDERS@"), "{applied:?}");
    spec.db().applied_once(2).await;
}

#[tokio::test]
async fn an_audit_makes_the_ids_that_the_database_records() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id").set("inbox.id_scope", "stream");
    publish_ids(&broker, 1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let spec = spec.unset("inbox.id_pointer").unset("inbox.id_scope");
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 2").await;
    spec.db().execute("DELETE FROM orders WHERE stream_seq = 2").await;
    let repaired = spec.run_ok(&["audit", "--repair", "--json"]).await;
    let summary: serde_json::Value = serde_json::from_str(repaired.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&summary["missing"], &summary["repaired"], &summary["other_id"]), (&1.into(), &1.into(), &0.into()));
    assert!(summary["notes"].to_string().contains("in another way"), "{summary}");
    spec.db().applied_once(3).await;
    assert_eq!(ids(&spec).await, ["ORDERS 1", "ORDERS 3", "ORDERS 2"]);
    assert_eq!(broker.stream_info().await.config.name, STREAM);
}

/// A mirror has the sequences and times of its origin, and another name.
#[tokio::test]
async fn a_mirror_that_is_adopted_holds_the_same_orders() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=4).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let mirror = stream::Config {
        name: "COPY".into(),
        subjects: vec![],
        mirror: Some(stream::Source { name: STREAM.into(), ..Default::default() }),
        ..stream_config()
    };
    let mirror = broker.jetstream.create_stream(mirror).await.unwrap();
    mirror.create_consumer(consumer_config()).await.unwrap();
    broker.publish_numbered(5..=5).await;
    let spec = spec.set("consumer.stream", "COPY");
    spec.run_ok(&["adopt", "--yes"]).await;
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 4.0).await;
    spec.db().has("orders", 5).await;
    worker.drain().await;
    spec.db().applied_once(5).await;
    assert!(ids(&spec).await.iter().all(|id| id.starts_with("ORDERS@")), "{:?}", ids(&spec).await);
}
