//! `dead-letters`: list, show, export, replay and discard, with a running daemon and without one.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use clap::Parser;
use order_processor::config::Database;
use order_processor::handler::orders::Orders;
use order_processor::handler::{Failure, Handler, Order};
use order_processor::ops::dead_letters::{self, DeadLettersCommand, DeadLettersError};
use order_processor::store::{Connection, Store, Tx};
use order_processor::telemetry::Telemetry;
use order_processor::worker::worker::{Until, Worker};
use serde_json::{Value, json};
use sqlx::{Connection as _, Row};
use tokio_util::sync::CancellationToken;

use crate::support::keys::mode;
use crate::support::nats::{consumer_config, headers};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE};

/// Refuses orders that say so, until it is mended.
#[derive(Default)]
struct Clerk {
    mended: AtomicBool,
}

#[async_trait]
impl Handler for Clerk {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        for Order { delivery, .. } in orders {
            let payload = String::from_utf8_lossy(&delivery.raw.payload);
            Orders.apply(tx, &[Order { delivery, answer: None }]).await?;
            if !self.mended.load(Ordering::SeqCst) {
                match payload.split(' ').next() {
                    Some("bad") => return Err(Failure::Permanent(format!("no such product in {payload:?}"))),
                    Some("stuck") => panic!("the drawer is stuck"),
                    _ => {}
                }
            }
            if payload.starts_with("orphan") {
                let sql = "INSERT INTO children (parent) VALUES ('nobody')";
                let Connection::Sqlite(connection) = tx.connection();
                sqlx::query(sql).execute(connection).await?;
            }
        }
        Ok(())
    }
}

impl Clerk {
    fn mend(&self) {
        self.mended.store(true, Ordering::SeqCst);
    }

    /// Runs a worker with this handler in the test's process until nothing is pending.
    async fn work(self: &Arc<Self>, spec: &DaemonSpec) {
        let config = spec.config();
        let store = Store::open(&config.database).await.unwrap();
        let worker = Worker::new(Arc::new(config), store, self.clone(), Arc::new(Telemetry::new()), Until::Idle);
        let ended = tokio::time::timeout(PATIENCE, worker.run(CancellationToken::new(), pending())).await;
        ended.expect("it becomes idle").expect("it drains");
    }

    /// A command in the binary that a user has built around this handler.
    async fn desk(&self, spec: &DaemonSpec, arguments: &[&str]) -> (Result<bool, DeadLettersError>, String) {
        #[derive(Parser)]
        struct Desk {
            #[command(subcommand)]
            command: DeadLettersCommand,
        }
        let desk = Desk::parse_from(std::iter::once(&"dead-letters").chain(arguments));
        let mut out = Vec::new();
        let ended = dead_letters::run(&spec.config(), desk.command, self, &mut out).await;
        (ended, String::from_utf8(out).unwrap())
    }
}

/// Orders that the built-in handler would take, and whose ids cannot be found out: dead letters by settings.
fn json_only(spec: DaemonSpec) -> DaemonSpec {
    spec.set("inbox.id_pointer", "/id")
}

/// The story, with a server that soon lets an id pass again.
async fn forgetful_story() -> (NatsServer, Broker) {
    let (server, broker) = Broker::story().await;
    let mut stream = broker.stream_info().await.config;
    stream.duplicate_window = Duration::from_millis(100);
    broker.jetstream.update_stream(stream).await.expect("the stream can be changed");
    (server, broker)
}

/// Everything is delivered once more, as after a crash of the server.
async fn deliver_all_again(broker: &Broker) {
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
}

/// Lines of JSON by the id in each.
fn by_id(ndjson: &str) -> BTreeMap<String, Value> {
    let objects = ndjson.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    objects.map(|object| (object["id"].as_str().unwrap().to_owned(), object)).collect()
}

/// Three letters that the handler made, with text, JSON and bytes, and a conflict, the newest.
async fn four_letters() -> (NatsServer, DaemonSpec) {
    let (server, broker) = forgetful_story().await;
    let spec = DaemonSpec::new(server.url());
    let clerk = Arc::new(Clerk::default());
    let pairs = [("Nats-Msg-Id", "o-1"), ("X-Trace", "a"), ("X-Trace", "b")];
    broker.publish_to("ORDERS.new", headers(&pairs), b"bad one".to_vec()).await;
    broker.publish_to("ORDERS.changed", headers(&[("Nats-Msg-Id", "o-2")]), br#"bad {"id":1}"#.to_vec()).await;
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "o-3")]), b"bad \xff\x00\x1b[31m".to_vec()).await;
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "used")]), b"fine".to_vec()).await;
    clerk.work(&spec).await;
    assert_eq!(clerk.desk(&spec, &["list", "--closed"]).await.1, "no closed letters\n");
    broker
        .publish_anew("ORDERS.new", headers(&[("Nats-Msg-Id", "used")]), br#"{"n":90071992547409931234}"#.to_vec())
        .await;
    clerk.work(&spec).await;
    (server, spec)
}

#[tokio::test]
async fn they_are_listed_by_reason_subject_and_time_and_shown() {
    let (_server, spec) = four_letters().await;
    let table = spec.run_ok(&["dead-letters", "list"]).await.stdout;
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("DEAD AT") && lines.len() == 5, "{table}");
    let (newest, oldest) = (lines[1], lines[4]);
    assert!(newest.contains("conflict") && newest.contains("used"), "newest first: {table}");
    assert!(oldest.contains("permanent") && oldest.contains("o-1") && oldest.contains("no such product"), "{table}");
    assert!(!table.contains('\u{1b}'), "no escape sequence reaches a terminal");
    let limited = spec.run_ok(&["dead-letters", "list", "--limit", "3"]).await.stdout;
    assert!(limited.ends_with("and 1 more; --limit N shows more\n"), "{limited}");

    let listed = async |arguments: &[&str]| {
        let arguments = [&["dead-letters", "list", "--json"], arguments].concat();
        by_id(&spec.run_ok(&arguments).await.stdout).into_keys().collect::<Vec<_>>()
    };
    assert_eq!(listed(&[]).await, ["o-1", "o-2", "o-3", "used"]);
    assert_eq!(listed(&["--reason", "conflict"]).await, ["used"]);
    assert_eq!(listed(&["--subject", "ORDERS.changed"]).await, ["o-2"]);
    assert_eq!(listed(&["--subject", "*.new", "--reason", "permanent"]).await, ["o-1", "o-3"]);
    assert_eq!(listed(&["--subject", "ORDERS.>", "--since", "1h", "--limit", "1"]).await, ["used"]);
    assert_eq!(listed(&["--until", "1h"]).await, [""; 0]);
    assert_eq!(listed(&["--since", "2099-01-01"]).await, [""; 0]);
    assert_eq!(listed(&["--until", "2099-01-01", "--reason", "conflict"]).await, ["used"]);
    for action in ["replay", "discard"] {
        let finished = spec.run(&["dead-letters", action, "o-1", "--subject", "ORDERS.changed"]).await;
        assert_eq!(finished.code, Some(1), "{finished:?}");
        assert!(finished.complaints()[0].starts_with("order-processor: nothing matches"), "{finished:?}");
    }
    assert_eq!(listed(&["--since", "2099-01-01T00:00:00Z"]).await, [""; 0]);

    let shown = spec.run_ok(&["dead-letters", "show", "o-1"]).await.stdout;
    for words in ["id            o-1", "X-Trace: a\n", "X-Trace: b\n", "7 bytes, text\n\nbad one\n", "permanent"] {
        assert!(shown.contains(words), "no {words:?} in {shown}");
    }
    let shown = spec.run_ok(&["dead-letters", "show", "used", "o-3"]).await.stdout;
    assert!(shown.contains("JSON\n\n{\n  \"n\": 90071992547409931234\n}\n"), "no digit is lost: {shown}");
    assert!(shown.contains("binary\n\n00000000  62 61 64 20 ff 00 1b 5b"), "{shown}");
}

#[tokio::test]
async fn they_are_exported_whole() {
    let (_server, spec) = four_letters().await;
    let file = spec.folder().join("letters.ndjson");
    let exported = spec.run_ok(&["dead-letters", "export"]).await.stdout;
    assert_eq!(spec.run_ok(&["dead-letters", "export", "-"]).await.stdout, exported);
    assert!(!spec.folder().join("-").exists());
    spec.run_ok(&["dead-letters", "export", "letters.ndjson"]).await;
    assert_eq!(std::fs::read_to_string(&file).unwrap(), exported);
    assert_eq!(mode(&file), 0o600);
    let again = spec.run(&["dead-letters", "export", "letters.ndjson"]).await;
    assert_eq!(again.code, Some(1), "nothing is overwritten: {again:?}");
    let exported = by_id(&exported);
    let rows = spec.db().rows("SELECT * FROM dead_letters").await;
    assert_eq!(rows.len(), exported.len());
    for row in rows {
        let letter = &exported[&row.get::<String, _>("id")];
        let payload = base64::engine::general_purpose::STANDARD.decode(letter["payload"].as_str().unwrap()).unwrap();
        assert_eq!(payload, row.get::<Vec<u8>, _>("payload"));
        let (stream_seq, delivered): (i64, i64) = (row.get("stream_seq"), row.get("delivered"));
        assert_eq!((&letter["stream_seq"], &letter["delivered"]), (&stream_seq.into(), &delivered.into()));
        for column in ["subject", "reason", "error"] {
            assert_eq!(letter[column], row.get::<String, _>(column), "{column}");
        }
        for (name, column) in [("dead_at", "dead_at"), ("published_at", "published_at")] {
            let at = humantime::parse_rfc3339(letter[name].as_str().unwrap()).unwrap();
            let ns = at.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
            assert_eq!(i64::try_from(ns).unwrap(), row.get::<i64, _>(column), "{name} to the nanosecond");
        }
    }
    assert_eq!(exported["o-1"]["headers"], json!([["Nats-Msg-Id", "o-1"], ["X-Trace", "a"], ["X-Trace", "b"]]));
}

#[tokio::test]
async fn a_failed_replay_keeps_the_letter_with_its_new_error() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let clerk = Arc::new(Clerk::default());
    for (id, payload) in
        [("o-1", "bad 1"), ("o-2", "bad 2"), ("o-3", "stuck 3"), ("o-4", "fine 4"), ("o-5", "orphan 5")]
    {
        broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", id)]), payload.into()).await;
    }
    drop(Store::open(&Database::Sqlite(spec.database())).await.unwrap());
    let parents = "CREATE TABLE parents (id TEXT PRIMARY KEY) STRICT; \
                   CREATE TABLE children (parent TEXT REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED) STRICT";
    spec.db().execute(parents).await;
    let spec = spec.set("retry.max_attempts", "1");
    clerk.work(&spec).await;
    assert_eq!(spec.db().texts("SELECT id FROM dead_letters ORDER BY id").await, ["o-1", "o-2", "o-3", "o-5"]);
    let errors = async || spec.db().texts("SELECT error FROM dead_letters ORDER BY id").await;
    let before = errors().await;

    let (ended, said) = clerk.desk(&spec, &["replay", "--all", "--dry-run"]).await;
    assert!(!ended.unwrap(), "a letter that would fail is exit code 1");
    assert!(said.contains("failed   o-1: no such product") && said.contains("dry run, nothing was changed"), "{said}");
    assert_eq!(errors().await, before);
    spec.db().execute("UPDATE dead_letters SET error = 'an old one'").await;

    let (ended, said) = clerk.desk(&spec, &["replay", "--all"]).await;
    assert!(!ended.unwrap());
    assert!(said.ends_with("0 applied, 0 known, 0 refused, 4 failed\n"), "{said}");
    for (error, words) in errors().await.iter().zip(["\"bad 1\"", "\"bad 2\"", "the drawer is stuck", "FOREIGN KEY"]) {
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(spec.db().count("orders").await, 1, "a failed replay leaves no effect");
    assert_eq!(spec.db().count("processed_ids").await, 1);

    clerk.mend();
    let (ended, said) = clerk.desk(&spec, &["replay", "o-1"]).await;
    assert!(ended.unwrap());
    assert_eq!(said, "applied  o-1\n1 applied, 0 known, 0 refused, 0 failed\n");
    let (ended, said) = clerk.desk(&spec, &["replay", "--reason", "attempts_exhausted", "--dry-run"]).await;
    assert!(ended.unwrap() && said.contains("applied  o-3"), "{said}");
    assert_eq!(spec.db().count("dead_letters").await, 3, "a dry run undoes what went well, too");
    clerk.desk(&spec, &["replay", "--all"]).await.0.unwrap();
    assert_eq!(spec.db().texts("SELECT id FROM dead_letters").await, ["o-5"]);
    let published = spec
        .db()
        .scalar("SELECT count(*) FROM orders WHERE published_at < (SELECT min(dead_at) FROM closed_letters)")
        .await;
    assert_eq!(published, 4, "the handler gets the time at which the message was published");
    let closed = "SELECT id FROM closed_letters WHERE closed_as = 'replayed' AND closed_by LIKE '%_@_%' \
                  AND closed_at > dead_at AND applied_id = id ORDER BY id";
    assert_eq!(spec.db().texts(closed).await, ["o-1", "o-2", "o-3"]);

    let (ended, _) = clerk.desk(&spec, &["replay", "o-1"]).await;
    let error = ended.unwrap_err().to_string();
    assert!(error.starts_with("no dead letter has the id \"o-1\"; it was replayed by "), "{error}");
    let (ended, said) = clerk.desk(&spec, &["replay", "o-5", "o-9"]).await;
    assert_eq!(ended.unwrap_err().to_string(), "no dead letter has the id \"o-9\"");
    assert_eq!(said, "", "nothing is done when an id is wrong");

    deliver_all_again(&broker).await;
    clerk.work(&spec).await;
    assert_eq!(spec.db().count("orders").await, 4, "none is applied again");
    assert_eq!(spec.db().count("dead_letters").await, 1);
}

#[tokio::test]
async fn a_replay_beside_a_busy_daemon_applies_each_letter_once() {
    const LETTERS: i64 = 100;
    let (server, broker) = Broker::story().await;
    let spec = json_only(DaemonSpec::new(server.url())).set("batch.max_messages", "50");
    let mut worker = spec.start();
    broker.publish_numbered(1..=100).await;
    spec.db().has("dead_letters", LETTERS).await;
    worker.metric("dead_letters", LETTERS as f64).await;
    let (publisher, enough) = (Broker::connect(&server).await, CancellationToken::new());
    let told = enough.clone();
    let publishing = tokio::spawn(async move {
        let mut published = 0;
        while !told.is_cancelled() {
            published += 1;
            publisher.publish(format!("{{\"id\":{published}}}")).await;
        }
        published
    });
    let said = spec.run_ok(&["dead-letters", "replay", "--as-new", "--reason", "undecodable"]).await.stdout;
    assert!(said.ends_with("100 applied, 0 known, 0 refused, 0 failed\n"), "{said}");
    enough.cancel();
    let published: i64 = publishing.await.unwrap();
    spec.db().has("orders", LETTERS + published).await;
    spec.db().applied_once(LETTERS + published).await;
    worker.metric("dead_letters", 0.0).await;
    worker.metric("processed_ids", (LETTERS + published) as f64).await;
    deliver_all_again(&broker).await;
    broker.acknowledged(u64::try_from(LETTERS + published).unwrap()).await;
    spec.db().applied_once(LETTERS + published).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_replay_that_is_killed_at_any_moment_loses_and_repeats_nothing() {
    const LETTERS: i64 = 300;
    let (server, broker) = Broker::story().await;
    let spec = json_only(DaemonSpec::new(server.url()));
    broker.publish_numbered(1..=300).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().count("dead_letters").await, LETTERS);
    let mut delay_ms = 30;
    while spec.db().count("dead_letters").await > 0 {
        let mut replay = spec.start_with(&["dead-letters", "replay", "--as-new", "--all"]);
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        replay.kill9();
        // Longer each time, so that it comes to an end also on a slow machine.
        delay_ms += 10;
        let (open, closed) = (spec.db().count("dead_letters").await, spec.db().count("closed_letters").await);
        assert_eq!(open + closed, LETTERS);
        assert_eq!(spec.db().count("orders").await, closed);
        assert_eq!(spec.db().count("processed_ids").await, closed);
    }
    spec.db().applied_once(LETTERS).await;
}

#[tokio::test]
async fn a_conflict_is_replayed_only_as_a_new_order() {
    let (server, broker) = forgetful_story().await;
    let spec = DaemonSpec::new(server.url());
    let id = || headers(&[("Nats-Msg-Id", "used")]);
    broker.publish_to("ORDERS.new", id(), b"one".to_vec()).await;
    broker.publish_anew("ORDERS.new", id(), b"another".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().texts("SELECT reason FROM dead_letters").await, ["conflict"]);

    let refused = spec.run(&["dead-letters", "replay", "used"]).await;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stdout.contains("refused  used: its id belongs to another order; --as-new"), "{refused:?}");
    assert_eq!(spec.db().count("dead_letters").await, 1);

    let applied = spec.run_ok(&["dead-letters", "replay", "--as-new", "used"]).await.stdout;
    assert!(applied.starts_with("applied  used: as used@"), "{applied}");
    spec.db().applied_once(2).await;
    let ids = spec.db().texts("SELECT id FROM processed_ids ORDER BY id").await;
    assert_eq!(ids, spec.db().texts("SELECT id FROM orders ORDER BY id").await);
    let shown = spec.run_ok(&["dead-letters", "show", "used"]).await.stdout;
    assert!(shown.contains(&format!("applied as    {}", ids[1])) && shown.contains("another"), "{shown}");

    deliver_all_again(&broker).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(2).await;
    spec.db().applied_once(2).await;
}

#[tokio::test]
async fn a_discard_asks_stays_on_record_and_its_message_never_comes_back() {
    let (server, broker) = forgetful_story().await;
    let clerk = Arc::new(Clerk::default());
    let spec = DaemonSpec::new(server.url());
    let id = |id: &'static str| headers(&[("Nats-Msg-Id", id)]);
    // One that the handler refuses, one under a used id, and one whose id cannot be found out.
    broker.publish_to("ORDERS.new", id("o-1"), b"bad 1".to_vec()).await;
    broker.publish_to("ORDERS.new", id("o-2"), b"fine 2".to_vec()).await;
    broker.publish_anew("ORDERS.new", id("o-2"), b"another 2".to_vec()).await;
    clerk.work(&spec).await;
    let spec = json_only(spec);
    broker.publish("no JSON").await;
    clerk.work(&spec).await;
    let reasons = spec.db().texts("SELECT reason FROM dead_letters ORDER BY rowid").await;
    assert_eq!(reasons, ["permanent", "conflict", "undecodable"]);

    let refused = spec.run(&["dead-letters", "discard", "--all"]).await;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert_eq!(refused.complaints(), ["order-processor: this discards 3 dead letters for ever; confirm with --yes"]);
    assert_eq!(spec.run(&["dead-letters", "discard", "--yes"]).await.code, Some(2), "which ones?");
    assert_eq!(spec.db().count("dead_letters").await, 3);

    let letters = "SELECT id, subject, stream_seq, delivered, reason, error, headers, payload, dead_at, digest, published_at FROM ";
    let rows = async |table: &str| {
        let rows = spec.db().rows(&format!("{letters} {table} ORDER BY rowid")).await;
        let row = |row: &sqlx::sqlite::SqliteRow| {
            let texts: Vec<String> = ["id", "subject", "reason", "error", "headers"].map(|name| row.get(name)).into();
            let numbers: Vec<i64> =
                ["stream_seq", "delivered", "dead_at", "published_at"].map(|name| row.get(name)).into();
            let blobs: Vec<Vec<u8>> = ["payload", "digest"].map(|name| row.get(name)).into();
            (texts, numbers, blobs)
        };
        rows.iter().map(row).collect::<Vec<_>>()
    };
    let before = rows("dead_letters").await;
    let said = spec.run_ok(&["dead-letters", "discard", "--all", "--yes"]).await.stdout;
    assert!(said.starts_with("discarded 3;"), "{said}");
    assert_eq!(rows("closed_letters").await, before, "on record, whole");
    let listed = by_id(&spec.run_ok(&["dead-letters", "list", "--closed", "--json"]).await.stdout);
    for letter in listed.values() {
        assert_eq!(letter["closed"]["as"], "discarded");
        assert!(letter["closed"]["by"].as_str().unwrap().contains('@'), "{letter}");
        assert_eq!(letter["closed"]["applied_id"], Value::Null);
    }
    assert_eq!(spec.run_ok(&["dead-letters", "discard", "--all", "--yes"]).await.stdout, "no dead letters\n");

    clerk.mend();
    deliver_all_again(&broker).await;
    clerk.work(&spec).await;
    broker.acknowledged(4).await;
    assert_eq!(spec.db().count("dead_letters").await, 0, "it does not come back as a letter");
    assert_eq!(spec.db().texts("SELECT id FROM orders").await, ["o-2"], "nor as an order");
    // Delivered so often, it takes the path of messages that travel alone.
    for _ in 0..3 {
        deliver_all_again(&broker).await;
        clerk.work(&spec).await;
    }
    assert_eq!((spec.db().count("dead_letters").await, spec.db().count("orders").await), (0, 1));
}

#[tokio::test]
async fn without_a_database_of_this_version_each_command_says_so_on_one_line() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let commands: [&[&str]; 4] = [&["list"], &["show", "x"], &["replay", "--all"], &["discard", "--all", "--yes"]];
    let all_say = async |words: &str| {
        for command in commands {
            let finished = spec.run(&[&["dead-letters"], command].concat()).await;
            assert_eq!(finished.code, Some(2), "{finished:?}");
            assert_eq!(finished.complaints().len(), 1, "{finished:?}");
            assert!(finished.stderr.contains(words), "no {words:?} in {finished:?}");
        }
    };
    all_say("no database at ").await;
    assert!(!spec.database().exists(), "looking makes none");

    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.run_ok(&["dead-letters", "list"]).await.stdout, "no dead letters\n");
    let mut writer = spec.db().open_to_write().await;
    let taken = "DELETE FROM _sqlx_migrations WHERE version = 2 RETURNING version, description, success, checksum, execution_time";
    sqlx::query("CREATE TABLE kept AS SELECT * FROM _sqlx_migrations").execute(&mut writer).await.unwrap();
    sqlx::query(taken).execute(&mut writer).await.unwrap();
    all_say("was written by an older version of order-processor; start the daemon once").await;
    sqlx::query("INSERT INTO _sqlx_migrations SELECT version + 98, description, installed_on, success, checksum, execution_time FROM kept")
        .execute(&mut writer)
        .await
        .unwrap();
    all_say("newer").await;
    writer.close().await.unwrap();
    std::fs::write(spec.database(), "not a database").unwrap();
    all_say("is not an SQLite database").await;
}

#[tokio::test]
async fn a_long_id_is_shortened_for_people_and_whole_in_json() {
    let (server, broker) = Broker::story().await;
    let spec = json_only(DaemonSpec::new(server.url()));
    let id = "x".repeat(70_000);
    for version in 1..=2 {
        broker.publish(json!({ "id": id, "version": version }).to_string()).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    let table = spec.run_ok(&["dead-letters", "list"]).await.stdout;
    assert!(table.lines().count() == 2 && table.lines().all(|line| line.chars().count() < 400), "{table}");
    assert!(table.contains("xx…  "), "{table}");
    let listed = spec.run_ok(&["dead-letters", "list", "--json"]).await.stdout;
    let id = format!("ORDERS.new {id}");
    assert!(by_id(&listed).contains_key(&id), "it is whole");
    let shown = spec.run_ok(&["dead-letters", "show", &id]).await.stdout;
    assert!(shown.len() < 80_000 && shown.ends_with("show --json ID` prints everything\n"), "{} bytes", shown.len());
    assert!(spec.run_ok(&["dead-letters", "show", &id, "--json"]).await.stdout.contains(&id));
}
