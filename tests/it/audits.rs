//! `audit`: what it finds, what it does not take for missing, what it cannot tell and says so, and how it gets through.

use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy};
use async_nats::jetstream::stream::{self, RetentionPolicy};
use futures_util::TryStreamExt;

use crate::support::nats::{CONSUMER, STREAM, consumer_config, publish_raw, stream_config};
use crate::support::{
    Broker, Daemon, DaemonSpec, FaultProxy, Finished, NatsServer, PATIENCE, ServerSpec, at_least, equal, eventually,
};

/// A server and a database with this many orders, all processed.
async fn processed(orders: u64) -> (NatsServer, Broker, DaemonSpec) {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=orders).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    (server, broker, spec)
}

/// The objects of `--json`, the summary last.
fn objects(finished: &Finished) -> Vec<serde_json::Value> {
    finished.stdout.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{finished:?}"))).collect()
}

fn summary(finished: &Finished) -> serde_json::Value {
    objects(finished).pop().unwrap_or_else(|| panic!("no summary in {finished:?}"))
}

fn count(finished: &Finished, field: &str) -> u64 {
    summary(finished)[field].as_u64().unwrap_or_else(|| panic!("no {field} in {finished:?}"))
}

async fn consumers(broker: &Broker) -> Vec<String> {
    let stream = broker.jetstream.get_stream(STREAM).await.unwrap();
    stream.consumer_names().try_collect().await.unwrap()
}

#[tokio::test]
async fn each_missing_message_is_reported_and_nothing_is_changed() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    for number in 1..=10 {
        // Every fifth cannot be decoded and becomes a dead letter.
        let payload = if number % 5 == 0 { "no JSON".to_owned() } else { format!("{{\"id\": {number}}}") };
        broker.publish(payload).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    let finished = spec.run_ok(&["audit"]).await;
    assert_eq!(finished.stdout, "stream ORDERS, messages 1 to 10: 8 processed, 2 dead letters, 0 missing\n");

    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 3").await;
    spec.db().execute("UPDATE processed_ids SET digest = zeroblob(16) WHERE stream_seq = 4").await;
    spec.db().execute("DELETE FROM dead_letters WHERE stream_seq = 10").await;
    let finished = spec.run(&["audit", "--json"]).await;

    assert_eq!(finished.code, Some(1), "{finished:?}");
    let objects = objects(&finished);
    let missing: Vec<_> = objects.iter().filter(|object| object["result"] == "missing").collect();
    let seqs: Vec<_> = missing.iter().filter_map(|object| object["stream_seq"].as_u64()).collect();
    assert_eq!(seqs, [3, 4, 10]);
    assert_eq!((&missing[0]["id"], &missing[0]["subject"]), (&"ORDERS.new 3".into(), &"ORDERS.new".into()));
    assert!(missing[1]["why"].as_str().unwrap().contains("another message"), "{finished:?}");
    assert!(missing[0]["age_seconds"].as_u64().unwrap() < 3600, "{finished:?}");
    for (field, wanted) in [("processed", 6), ("dead_letters", 1), ("missing", 3), ("repaired", 0), ("next", 11)] {
        assert_eq!(count(&finished, field), wanted, "{field}");
    }
    let finished = spec.run(&["audit"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.starts_with("missing     3, id ORDERS.new 3, subject ORDERS.new, "), "{finished:?}");

    assert_eq!(spec.db().count("orders").await, 8, "it applies nothing by itself");
    assert_eq!(consumers(&broker).await, [CONSUMER], "its own consumer is gone");
    broker.acknowledged(10).await;
}

#[tokio::test]
async fn dead_letters_that_an_operator_has_closed_are_not_missing() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    broker.publish("no JSON").await;
    broker.publish("no JSON either").await;
    broker.publish(r#"{"id": 3}"#).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let letters = spec.db().texts("SELECT id FROM dead_letters ORDER BY stream_seq").await;
    let (replayed, discarded) = (letters[0].as_str(), letters[1].as_str());
    spec.run_ok(&["dead-letters", "discard", "--yes", discarded]).await;
    spec.run_ok(&["dead-letters", "replay", "--as-new", replayed]).await;
    assert_eq!(spec.db().count("dead_letters").await, 0);

    let finished = spec.run_ok(&["audit"]).await;
    assert_eq!(finished.stdout, "stream ORDERS, messages 1 to 3: 2 processed, 1 dead letters, 0 missing\n");
}

#[tokio::test]
async fn a_database_of_an_older_version_is_brought_up_to_date_first() {
    let (_server, _broker, spec) = processed(1).await;
    spec.db().execute("DROP TABLE closed_letters").await;
    spec.db().execute("DELETE FROM _sqlx_migrations WHERE version > 1").await;
    let finished = spec.run(&["audit"]).await;
    assert_eq!((finished.code, finished.stderr.lines().count()), (Some(2), 1), "{finished:?}");
    assert!(finished.stderr.contains("older version"), "{finished:?}");
}

#[tokio::test]
async fn what_is_missing_is_repaired_through_the_handler_and_only_once() {
    let (_server, broker, spec) = processed(5).await;
    // As an operator would: a copy of the closed file, put back later.
    let copy = spec.folder().join("backup.db");
    std::fs::copy(spec.database(), &copy).unwrap();
    broker.publish_numbered(6..=10).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(10).await;
    std::fs::copy(&copy, spec.database()).unwrap();

    // The daemon alone gets nothing more: the server has its acknowledgements.
    let mut worker = spec.start();
    worker.ready().await;
    assert_eq!(spec.db().count("orders").await, 5);
    assert_eq!(count(&spec.run(&["audit", "--json"]).await, "missing"), 5, "beside the running daemon");

    let finished = spec.run(&["audit", "--repair"]).await;
    assert_eq!(finished.code, Some(2), "{finished:?}");
    let words =
        format!("in use by process {} (if that is the daemon, run `order-processor pause` first)", worker.pid());
    assert!(finished.stderr.contains(&words), "{finished:?}");
    spec.run_ok(&["pause"]).await;
    let finished = spec.run_ok(&["audit", "--repair", "--json"]).await;
    assert_eq!((count(&finished, "missing"), count(&finished, "repaired")), (5, 5));
    spec.run_ok(&["resume"]).await;

    spec.db().applied_once(10).await;
    let finished = spec.run_ok(&["audit", "--json"]).await;
    assert_eq!((count(&finished, "processed"), count(&finished, "missing")), (10, 0));
    worker.ready().await;
    broker.publish("Order Data 11").await;
    spec.db().has("orders", 11).await;
    worker.drain().await;
}

/// An operator's shell lacks what the daemon's unit sets, and the database is of a version that did not record how ids are made.
#[tokio::test]
async fn what_was_processed_under_another_id_is_named_and_not_applied_again() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    for number in 1..=4 {
        broker.publish(format!("{{\"id\": \"A{number}\"}}")).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().execute("DELETE FROM orders WHERE stream_seq >= 3").await;
    // One is missing, and one only looks processed: that was before it was published, in a former stream.
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 3").await;
    spec.db().execute("UPDATE processed_ids SET processed_at = 1 WHERE stream_seq = 4").await;
    spec.db().execute("DELETE FROM id_schemes").await;
    let spec = spec.unset("inbox.id_pointer");

    let plain = spec.run(&["audit", "--json"]).await;
    let repaired = spec.run(&["audit", "--repair"]).await;

    assert_eq!(spec.db().count("orders").await, 4, "the two that lacked an order, and no more: {repaired:?}");
    assert_eq!(
        spec.db().scalar("SELECT count(DISTINCT stream_seq) FROM orders").await,
        4,
        "applied twice: {repaired:?}"
    );
    let results: Vec<_> =
        objects(&plain).iter().filter_map(|object| object["result"].as_str().map(str::to_owned)).collect();
    assert_eq!(results, ["other id", "other id", "missing", "missing"], "{plain:?}");
    let why = "processed under another id, ORDERS.new A1; is inbox.id_pointer the daemon's?";
    assert_eq!(objects(&plain)[0]["why"], why);
    assert_eq!((plain.code, count(&plain, "missing"), count(&plain, "other_id")), (Some(1), 2, 2), "{plain:?}");
    assert_eq!(repaired.code, Some(1), "{repaired:?}");
    assert!(repaired.stdout.starts_with("other id    1, id ORDERS@"), "{repaired:?}");
    assert!(repaired.stdout.lines().next().unwrap().ends_with(why), "{repaired:?}");
    assert!(repaired.stdout.ends_with("2 missing, 2 of them repaired, 2 processed under another id\n"), "{repaired:?}");

    let again = spec.run(&["audit", "--repair", "--json"]).await;
    assert_eq!((again.code, count(&again, "missing"), count(&again, "other_id")), (Some(1), 0, 2), "{again:?}");
    assert_eq!(spec.db().count("orders").await, 4);
}

#[tokio::test]
async fn what_the_consumer_is_not_for_is_not_missing() {
    let filtered = consumer::pull::Config {
        filter_subjects: vec!["ORDERS.new".into(), "ORDERS.paid".into()],
        deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: 3 },
        ..consumer_config()
    };
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.jetstream.create_stream(stream_config()).await.unwrap();
    let spec = DaemonSpec::new(server.url());
    for subject in ["ORDERS.new", "ORDERS.paid", "ORDERS.new", "ORDERS.other", "ORDERS.paid", "ORDERS.other"] {
        broker.publish_to(subject, async_nats::HeaderMap::new(), b"order".to_vec()).await;
    }
    broker.create_consumer(filtered).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("orders").await, 2);

    let finished = spec.run_ok(&["audit", "--json"]).await;

    assert_eq!((count(&finished, "processed"), count(&finished, "from")), (2, 3));
    assert!(summary(&finished)["notes"][0].as_str().unwrap().contains("starts at message 3"), "{finished:?}");
}

#[tokio::test]
async fn dropped_messages_and_a_former_stream_are_beyond_checking() {
    let (_server, broker, spec) = processed(6).await;
    let stream = broker.jetstream.get_stream(STREAM).await.unwrap();
    stream.purge().sequence(5).await.unwrap();
    let finished = spec.run_ok(&["audit"]).await;
    let wanted = "note: messages 1 to 4 are no longer in the stream and cannot be checked\n\
                  stream ORDERS, messages 5 to 6: 2 processed, 0 dead letters, 0 missing\n";
    assert_eq!(finished.stdout, wanted);

    stream.purge().await.unwrap();
    let finished = spec.run_ok(&["audit"]).await;
    assert!(finished.stdout.contains("messages 1 to 6 are no longer in the stream"), "{finished:?}");
    assert!(finished.stdout.contains("nothing to check"), "{finished:?}");

    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;
    let finished = spec.run_ok(&["audit"]).await;
    assert!(finished.stdout.contains("the messages of a former stream cannot be checked"), "{finished:?}");
    assert!(finished.stdout.contains("the ack floor is 0"), "{finished:?}");
}

#[tokio::test]
async fn without_a_database_a_stream_or_a_server_one_line_says_so() {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let finished = spec.run(&["audit"]).await;
    assert_eq!(finished.code, Some(2), "{finished:?}");
    assert!(finished.stderr.contains("no database at"), "{finished:?}");
    assert!(!spec.database().exists(), "it makes none");

    spec.run_ok(&["run", "--until-idle"]).await;
    broker.delete_stream().await;
    let finished = spec.run(&["audit"]).await;
    assert_eq!((finished.code, finished.stderr.lines().count()), (Some(1), 1), "{finished:?}");
    assert!(finished.stderr.contains("stream ORDERS does not exist"), "{finished:?}");

    server.stop().await;
    let finished = spec.run(&["audit"]).await;
    assert_eq!((finished.code, finished.stderr.lines().count()), (Some(1), 1), "{finished:?}");
    assert!(finished.stderr.contains(&server.address()), "{finished:?}");
}

/// Publishers of other languages can store headers that our client refuses or even panics over: some of these end the client, some
/// cut its connection, one looks like a status of the server.
#[tokio::test]
async fn messages_that_no_client_can_parse_stop_neither_daemon_nor_audit() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=50).await;
    for header in [&b"X-Note: one\rtwo"[..], b"X-Note: \xff\xfe", b"X Note: three"] {
        publish_raw(&server, header, b"hidden order").await;
        broker.publish("Order Data").await;
    }
    eventually("53 orders and three dead letters", 2 * PATIENCE, async || {
        equal((spec.db().count("orders").await, spec.db().count("dead_letters").await), (53, 3))
    })
    .await;
    broker.acknowledged(56).await;
    let payloads = spec.db().texts("SELECT DISTINCT CAST(payload AS TEXT) FROM dead_letters").await;
    assert_eq!(payloads, ["hidden order"]);

    let finished = spec.run_ok(&["audit", "--json"]).await;
    assert_eq!((count(&finished, "processed"), count(&finished, "dead_letters")), (53, 3), "{finished:?}");
    assert!(!finished.stderr.contains("panicked"), "{finished:?}");

    worker.drain().await;
    spec.db().execute("DELETE FROM dead_letters WHERE stream_seq = 51").await;
    let finished = spec.run_ok(&["audit", "--repair", "--json"]).await;
    assert_eq!(objects(&finished)[0]["result"], "dead-lettered");
    assert_eq!(spec.db().count("dead_letters").await, 3);
}

#[tokio::test]
async fn cut_connections_and_a_server_restart_make_it_miss_nothing() {
    const ORDERS: u64 = 8_000;
    let (mut server, broker, spec) = processed(ORDERS).await;
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq IN (1, 5000, 8000)").await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = spec.set("nats.url", proxy.url());
    proxy.delay(Duration::from_millis(20));

    let mut audit = spec.start_with(&["audit", "--json"]);
    let mut reader = reads(&broker, "").await;
    for _ in 0..3 {
        proxy.cut();
        reader = reads(&broker, &reader).await;
    }
    proxy.refuse();
    server.stop().await;
    server.restart().await;
    proxy.heal();
    assert_eq!(audit.wait_exit(PATIENCE).await.code(), Some(1));

    let finished = audit.finished();
    assert_eq!((count(&finished, "processed"), count(&finished, "missing")), (ORDERS - 3, 3), "{finished:?}");
}

/// Waits until a consumer of the audit has been given messages, another one than the `former`.
async fn reads(broker: &Broker, former: &str) -> String {
    let name = format!("{CONSUMER}-audit");
    eventually("the audit reads", PATIENCE, async || {
        let found = broker.jetstream.get_consumer_from_stream::<consumer::pull::Config, _, _>(&name, STREAM).await;
        let info = found.map_err(|error| error.to_string())?.cached_info().clone();
        let created = info.created.to_string();
        let given = info.delivered.consumer_sequence;
        if created != former && given > 0 { Ok(created) } else { Err(format!("created {created}, given {given}")) }
    })
    .await
}

#[tokio::test]
async fn interrupted_it_says_where_to_go_on_and_goes_on_there() {
    const ORDERS: u64 = 5000;
    let (server, broker, spec) = processed(ORDERS).await;
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 5000").await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = spec.set("nats.url", proxy.url());
    proxy.delay(Duration::from_millis(20));
    let mut audit = spec.start_with(&["audit", "--json"]);
    reads(&broker, "").await;
    proxy.stall();
    audit.send_signal("INT");
    assert_eq!(audit.wait_exit(PATIENCE).await.code(), Some(1));
    let finished = audit.finished();
    let (next, words) = (count(&finished, "next"), format!("--from {}", count(&finished, "next")));
    assert_eq!(summary(&finished)["complete"], false);
    assert!(finished.stderr.contains(&words) && (1..=ORDERS).contains(&next), "{finished:?}");
    proxy.heal();

    let second = spec.run(&["audit", "--json", "--from", &next.to_string()]).await;

    assert_eq!(second.code, Some(1), "{second:?}");
    assert_eq!(count(&finished, "processed") + count(&second, "processed"), ORDERS - 1, "each is checked once");
    assert_eq!(count(&second, "missing"), 1);
}

#[tokio::test]
async fn a_connection_that_stays_lost_ends_it_after_its_patience() {
    let (server, broker, spec) = processed(5000).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = spec.set("nats.url", proxy.url());
    proxy.delay(Duration::from_millis(20));
    let mut audit = spec.start_with(&["audit", "--patience", "1s"]);
    reads(&broker, "").await;
    proxy.refuse();
    assert_eq!(audit.wait_exit(PATIENCE).await.code(), Some(1));
    let finished = audit.finished();
    assert!(
        finished.stderr.contains("nothing could be read for 1s") && finished.stderr.contains("--from "),
        "{finished:?}"
    );
}

#[tokio::test]
async fn without_permission_for_a_consumer_of_its_own_it_reads_one_by_one() {
    let config = r#"authorization { users = [
        { user: admin, password: admin }
        { user: desk, password: desk, permissions: {
            publish: ["$JS.API.STREAM.INFO.ORDERS", "$JS.API.CONSUMER.INFO.ORDERS.order-processor", "$JS.API.STREAM.MSG.GET.ORDERS"]
            subscribe: ["_INBOX.order-processor.>"]
        } }
    ] }"#;
    let server = NatsServer::with(ServerSpec { config: config.to_owned(), ..ServerSpec::default() }).await;
    let options = async_nats::ConnectOptions::with_user_and_password("admin".into(), "admin".into());
    let broker = Broker::connect_with(&server, options).await;
    broker.create(stream_config(), consumer_config()).await;
    broker.publish_numbered(1..=30).await;
    let address = server.address();
    let spec = DaemonSpec::new(format!("nats://admin:admin@{address}"));
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 20").await;

    let spec = spec.set("nats.url", format!("nats://desk:desk@{address}"));
    let finished = spec.run(&["audit", "--json"]).await;

    assert_eq!((count(&finished, "processed"), count(&finished, "missing")), (29, 1), "{finished:?}");
    assert!(finished.stderr.contains("one by one"), "{finished:?}");
}

/// There a consumer of its own would hold messages back, or be refused.
#[tokio::test]
async fn a_stream_that_drops_what_is_acknowledged_gets_no_second_consumer() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let stream = stream::Config { retention: RetentionPolicy::Interest, ..stream_config() };
    broker.create(stream, consumer_config()).await;
    let other = consumer::pull::Config {
        durable_name: Some("other".into()),
        ack_policy: AckPolicy::Explicit,
        ..consumer::pull::Config::default()
    };
    broker.create_consumer(other).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 2").await;

    let finished = spec.run(&["audit", "--json"]).await;

    assert_eq!((count(&finished, "processed"), count(&finished, "missing")), (4, 1), "{finished:?}");
    assert_eq!(broker.stream_info().await.state.messages, 5);
}

#[tokio::test]
async fn two_audits_at_a_time_leave_each_other_alone() {
    let (server, broker, spec) = processed(3000).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = spec.set("nats.url", proxy.url());
    proxy.delay(Duration::from_millis(20));
    let mut first = spec.start_with(&["audit", "--json"]);
    reads(&broker, "").await;
    let second = spec.set("nats.url", server.url());
    let second = second.run_ok(&["audit", "--json"]).await;
    assert_eq!(first.wait_exit(PATIENCE).await.code(), Some(0));
    for finished in [first.finished(), second] {
        assert_eq!(count(&finished, "processed"), 3000, "{finished:?}");
    }
}

/// The permissions of a worker whose audit gets no consumer of its own.
const ONE_BY_ONE: &str = r#"allow: [">"], deny: ["$JS.API.CONSUMER.CREATE.ORDERS.order-processor-audit.>", "$JS.API.CONSUMER.CREATE.ORDERS.order-processor-audit"]"#;

async fn processed_one_by_one(orders: u64) -> (NatsServer, Broker, DaemonSpec) {
    let (server, broker) = Broker::with_restricted_worker(ONE_BY_ONE, consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=orders).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    (server, broker, spec)
}

fn is_told_of_another_stream(finished: &Finished) {
    assert_eq!((finished.code, summary(finished)["complete"].as_bool()), (Some(1), Some(false)), "{finished:?}");
    let said: Vec<_> = finished.stderr.lines().filter(|line| line.starts_with("order-processor: ")).collect();
    assert!(said.len() == 1 && said[0].contains("deleted or recreated"), "{finished:?}");
}

/// A repair whose handler takes a while, after its first batch.
async fn slow_repair(spec: &DaemonSpec) -> Daemon {
    spec.db().execute("DELETE FROM orders").await;
    spec.db().execute("DELETE FROM processed_ids").await;
    let slow = "CREATE TRIGGER slow BEFORE INSERT ON orders BEGIN SELECT count(*) FROM (WITH RECURSIVE r(x) AS \
                (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 100000) SELECT x FROM r); END";
    spec.db().execute(slow).await;
    let audit = spec.start_with(&["audit", "--repair", "--json"]);
    eventually("the repair is under way", PATIENCE, async || at_least(spec.db().count("orders").await, 1)).await;
    audit
}

/// After a reboot during a repair for one: with exit code 2 no supervisor would start it again.
#[tokio::test]
async fn a_daemon_that_starts_during_a_repair_waits_for_its_end() {
    let (_server, broker, spec) = processed(50).await;
    let spec = spec.set("batch.max_messages", "10");
    let mut audit = slow_repair(&spec).await;
    audit.freeze();
    let mut worker = spec.start();
    worker.not_ready(&format!("in use by process {}, audit --repair", audit.pid())).await;
    assert_eq!(worker.get("/livez").await.0, 200);
    audit.thaw();
    assert_eq!(audit.wait_exit(PATIENCE).await.code(), Some(0));
    worker.ready().await;
    broker.publish("Order Data 51").await;
    broker.acknowledged(51).await;
    worker.drain().await;
    spec.db().applied_once(51).await;
}

#[tokio::test]
async fn a_stream_recreated_during_a_repair_ends_it_and_keeps_ids_apart() {
    const ORDERS: u64 = 300;
    let recreated = async |one_by_one: bool, anew: bool| {
        let (_server, broker, spec) = match one_by_one {
            true => processed_one_by_one(ORDERS).await,
            false => processed(ORDERS).await,
        };
        let spec = spec.set("batch.max_messages", "10");
        let mut audit = slow_repair(&spec).await;
        broker.delete_stream().await;
        if anew {
            broker.create(stream_config(), consumer_config()).await;
            broker.publish_numbered(1001..=1000 + ORDERS).await;
        }
        audit.wait_exit(PATIENCE).await;

        let finished = audit.finished();
        is_told_of_another_stream(&finished);
        let applied = spec.db().count("orders").await;
        assert!(applied < ORDERS.cast_signed(), "it went on to the end: {applied}");
        assert_eq!(count(&finished, "repaired"), applied.cast_unsigned(), "{finished:?}");
        assert_eq!(
            spec.db().scalar("SELECT count(*) FROM orders WHERE stream_seq > 1000 OR payload LIKE '%Data 1___'").await,
            0
        );
    };
    tokio::join!(recreated(true, true), recreated(false, true), recreated(true, false));
}

#[tokio::test]
async fn a_stream_deleted_while_it_is_read_is_not_taken_for_its_end() {
    let deleted = async |anew: bool| {
        let (server, broker, spec) = processed_one_by_one(300).await;
        let proxy = FaultProxy::start(server.address()).await;
        let spec = spec.set("nats.url", proxy.url());
        proxy.delay(Duration::from_millis(100));
        let mut audit = spec.start_with(&["audit", "--json"]);
        audit.logged(&["reads messages one by one"]).await;
        broker.delete_stream().await;
        if anew {
            broker.create(stream_config(), consumer_config()).await;
        }
        audit.wait_exit(PATIENCE).await;
        is_told_of_another_stream(&audit.finished());
    };
    tokio::join!(deleted(false), deleted(true));
}

#[tokio::test]
async fn what_leaves_the_stream_before_it_could_be_checked_is_counted() {
    const ORDERS: u64 = 5_000;
    let left = async |kept: u64| {
        let (server, broker, spec) = processed(ORDERS).await;
        let proxy = FaultProxy::start(server.address()).await;
        let spec = spec.set("nats.url", proxy.url());
        proxy.delay(Duration::from_millis(150));
        let mut audit = spec.start_with(&["audit"]);
        reads(&broker, "").await;
        let stream = broker.jetstream.get_stream(STREAM).await.unwrap();
        stream.purge().sequence(ORDERS - kept + 1).await.unwrap();
        assert_eq!(audit.wait_exit(PATIENCE).await.code(), Some(0));

        let said = audit.finished().stdout;
        let number = |after: &str| -> u64 {
            let number = said.split_once(after).unwrap_or_else(|| panic!("no {after:?} in {said}")).1;
            number.split(' ').next().unwrap().trim().parse().unwrap_or_else(|_| panic!("{said}"))
        };
        let (processed, gone) = (number("to 5000: "), number("0 missing, "));
        assert_eq!(processed + gone, ORDERS, "{said}");
        assert!(gone > 0 && said.contains(" that left the stream before they could be checked"), "{said}");
        assert_eq!(number("up to message "), ORDERS - kept, "{said}");
    };
    tokio::join!(left(500), left(0));
}
