//! A database belongs to one consumer: a lost, wrong or former one is refused before anything is pulled or acknowledged.

use async_nats::jetstream::{consumer, stream};

use crate::support::nats::{STREAM, consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec};

fn lose_the_database(spec: &DaemonSpec) {
    std::fs::remove_file(spec.database()).unwrap();
}

#[tokio::test]
async fn a_lost_database_is_refused_until_the_consumer_is_adopted() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(6..=8).await;
    lose_the_database(&spec);

    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(
        checked.stdout.contains("FAIL  database") && checked.stdout.contains("no record of consumer"),
        "{checked:?}"
    );
    for _ in 0..2 {
        let refused = spec.run(&["run"]).await;
        assert_eq!(refused.code, Some(2), "{refused:?}");
        for words in
            ["up to message 5", "restore a backup", "audit --repair", "order-processor adopt", "working directory"]
        {
            assert!(refused.stderr.contains(words), "{words}: {refused:?}");
        }
        assert!(!refused.stderr.contains("change database.url"), "{refused:?}");
    }
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 5, "nothing is acknowledged");
    assert_eq!((spec.db().count("orders").await, spec.db().count("binding").await), (0, 0));
    let status = spec.run(&["status", "--json"]).await;
    assert_eq!(status.code, Some(1), "{status:?}");
    assert!(status.json()["problems"].to_string().contains("no record of consumer"), "{status:?}");

    let asked = spec.run(&["adopt"]).await;
    assert_eq!(asked.code, Some(2), "{asked:?}");
    assert!(asked.stderr.contains("up to message 5") && asked.stderr.contains("--yes"), "{asked:?}");
    assert_eq!(spec.db().count("binding").await, 0);
    let adopted = spec.run_ok(&["adopt", "--yes"]).await;
    assert!(adopted.stdout.contains("from message 6 on"), "{adopted:?}");
    assert!(spec.run_ok(&["adopt"]).await.stdout.contains("already"), "once is enough");
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(3).await;
    assert_eq!(spec.db().scalar("SELECT not_ours_through FROM binding").await, 5);
    spec.run_ok(&["check"]).await;
}

#[tokio::test]
async fn a_lost_database_is_filled_again_by_an_audit_with_repair() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    lose_the_database(&spec);
    assert_eq!(spec.run(&["run"]).await.code, Some(2));
    let listed = spec.run(&["audit"]).await;
    assert!(listed.stdout.contains("note: the database has no record of consumer"), "{listed:?}");
    let found = spec.run(&["find", "order-1"]).await;
    assert!(found.stdout.contains("the database has no record of consumer"), "{found:?}");
    spec.run_ok(&["audit", "--repair"]).await;
    broker.publish_numbered(6..=8).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(8).await;
    assert_eq!(spec.db().scalar("SELECT not_ours_through FROM binding").await, 0);
}

/// As in a wrong working directory: the orders are applied already, in the database of the daemon that runs.
#[tokio::test]
async fn a_repair_of_another_database_is_refused_while_a_daemon_pulls() {
    let (server, broker) = Broker::story().await;
    let owner = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    let mut daemon = owner.start();
    daemon.ready().await;
    broker.acknowledged(5).await;
    let stray = DaemonSpec::new(server.url());
    assert_eq!(stray.run(&["run"]).await.code, Some(2));
    let refused = stray.run(&["audit", "--repair"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("another client pulls from consumer"), "{refused:?}");
    assert_eq!(stray.db().count("orders").await, 0);
    daemon.drain().await;
    stray.run_ok(&["audit", "--repair"]).await;
}

/// As after a kill: nothing is pending, and the server delivers the messages again only after `ack_wait`.
#[tokio::test]
async fn a_bind_logs_how_many_deliveries_a_former_client_has_left() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=1).await;
    broker.take_one().await;
    let mut daemon = spec.start();
    daemon.ready().await;
    daemon.logged(&["bound to the consumer", r#""unacknowledged":1"#]).await;
}

#[tokio::test]
async fn a_consumer_without_acks_is_accepted_wherever_it_starts() {
    let (server, broker) = Broker::story().await;
    broker.publish_numbered(1..=5).await;
    broker.delete_consumer().await;
    let new = consumer::pull::Config { deliver_policy: consumer::DeliverPolicy::New, ..consumer_config() };
    broker.create_consumer(new).await;
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 5, "its floor is not 0");
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(6..=8).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(3).await;
}

#[tokio::test]
async fn a_database_of_another_consumer_is_refused_unless_it_is_adopted() {
    let (server, broker) = Broker::story().await;
    let mut spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let renamed = consumer::pull::Config { durable_name: Some("renamed".into()), ..consumer_config() };
    broker.create_consumer(renamed).await;
    let other = stream::Config { name: "OTHER".into(), subjects: vec!["OTHER.*".into()], ..stream_config() };
    broker.jetstream.create_stream(other).await.unwrap().create_consumer(consumer_config()).await.unwrap();

    spec.change("consumer.stream", "OTHER");
    for command in ["run", "audit"] {
        let refused = spec.run(&[command]).await;
        assert_eq!(refused.code, Some(2), "{refused:?}");
        let belongs = "belongs to consumer order-processor on stream ORDERS";
        assert!(refused.stderr.contains(belongs), "{refused:?}");
    }
    spec.change("consumer.stream", STREAM);
    spec.change("consumer.name", "renamed");
    assert_eq!(spec.run(&["run"]).await.code, Some(2));
    spec.run_ok(&["adopt", "--yes"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(5).await;
    assert_eq!(spec.db().scalar("SELECT not_ours_through FROM binding").await, 0, "they are all in this database");
}

/// As after a restore of a stream from before the ids were deleted.
#[tokio::test]
async fn messages_whose_ids_are_deleted_are_never_pulled() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    let mut worker = spec.start();
    broker.acknowledged(5).await;
    worker.ready().await;
    let deleted = "INSERT INTO pruned VALUES ('sequence', 4, (SELECT max(processed_at) FROM processed_ids))";
    spec.db().execute(deleted).await;
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq < 4").await;

    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    worker.not_ready("ids of messages below 4").await;
    assert_eq!(broker.consumer_info().await.delivered.stream_sequence, 0, "nothing is pulled");
    assert_eq!(spec.run(&["status"]).await.code, Some(1));
    worker.drain().await;
    let refused = spec.run(&["run"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("start at message 4"), "{refused:?}");

    // What the text says.
    broker.delete_consumer().await;
    let policy = consumer::DeliverPolicy::ByStartSequence { start_sequence: 4 };
    broker.create_consumer(consumer::pull::Config { deliver_policy: policy, ..consumer_config() }).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("orders").await, 5);
}
