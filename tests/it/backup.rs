//! `backup` of a working daemon, backups and exports that fail, and an old backup restored.

use std::path::Path;
use std::time::Duration;

use sqlx::Connection;

use crate::support::keys::mode;
use crate::support::nats::{consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, at_least, eventually};

/// Puts a file in the place of the database, as an operator restores one.
fn restore(spec: &DaemonSpec, backup: &Path) {
    for suffix in ["", "-wal", "-shm"] {
        drop(std::fs::remove_file(spec.beside(suffix)));
    }
    std::fs::copy(backup, spec.database()).unwrap();
}

/// A database of more than 100 MB: enough for a moment in the middle of its copy.
async fn large() -> (NatsServer, DaemonSpec) {
    let server = NatsServer::start().await;
    Broker::connect(&server).await.create(stream_config(), consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    let mut connection = spec.db().open_to_write().await;
    let many = "INSERT INTO dead_letters (id, subject, stream_seq, delivered, reason, error, headers, payload, dead_at, \
                digest) SELECT n, 'ORDERS.new', n, 1, 'permanent', '', '{}', randomblob(2000), n, x'00' \
                FROM (WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 60000) SELECT n FROM r)";
    sqlx::query(many).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    (server, spec)
}

#[tokio::test]
async fn an_old_backup_is_brought_up_to_date_by_an_audit_under_a_pause() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "50");
    let mut worker = spec.start();
    broker.publish_numbered(1..=2000).await;
    eventually("it works", PATIENCE, async || at_least(spec.db().count("orders").await, 1)).await;
    let said = spec.run_ok(&["backup", "copy.db"]).await.stdout;
    let backup = spec.folder().join("copy.db");
    assert_eq!(mode(&backup), 0o600);
    let names =
        std::fs::read_dir(spec.folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with("copy.db")).collect::<Vec<_>>(), ["copy.db"], "nothing half done");

    broker.publish_numbered(2001..=2500).await;
    broker.acknowledged(2500).await;
    spec.run_ok(&["pause", "--reason", "restoring"]).await;
    restore(&spec, &backup);
    let db = spec.db();
    let (orders, ids) = (db.count("orders").await, db.count("processed_ids").await);
    assert_eq!(orders, ids, "one moment");
    assert!((1..2500).contains(&orders), "older than the ack floor: {orders}");
    let last = db.scalar("SELECT max(stream_seq) FROM processed_ids").await;
    assert_eq!(said, format!("copy.db: {orders} orders, {ids} ids, 0 dead letters, last stream sequence {last}\n"));

    let missing = spec.run(&["audit"]).await;
    assert_eq!(missing.code, Some(1), "the audit finds what the ack floor hides: {missing:?}");
    spec.run_ok(&["audit", "--repair"]).await;
    spec.run_ok(&["resume"]).await;
    broker.publish("Order Data 2501").await;
    broker.acknowledged(2501).await;
    spec.db().applied_once(2501).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn an_export_or_a_backup_that_is_broken_off_leaves_nothing() {
    let (_server, spec) = large().await;
    let written = || {
        let entries = std::fs::read_dir(spec.folder()).unwrap().map(Result::unwrap);
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("answer")).collect::<Vec<_>>()
    };
    for (command, signal) in [("dead-letters export", "INT"), ("backup", "INT"), ("backup", "TERM")] {
        let arguments: Vec<_> = command.split(' ').chain(["answer"]).collect();
        let mut running = spec.start_with(&arguments);
        eventually("some of it is written", PATIENCE, async || {
            at_least(written().iter().map(|entry| entry.metadata().unwrap().len()).sum(), 1)
        })
        .await;
        running.send_signal(signal);
        running.wait_exit(PATIENCE).await;
        let finished = running.finished();
        assert_eq!(finished.code, Some(1), "{command}: {finished:?}");
        assert!(finished.stderr.contains("order-processor: stopped; "), "{command}: {finished:?}");
        assert_eq!(written().len(), 0, "{command}: {:?}", written());
    }
}

#[tokio::test]
async fn a_long_backup_logs_how_far_it_is_when_no_terminal_shows_a_bar() {
    let (_server, spec) = large().await;
    let mut running = spec.start_with(&["backup", "copy.db"]);
    eventually("some of it is written", PATIENCE, async || {
        let names = std::fs::read_dir(spec.folder()).unwrap().map(Result::unwrap);
        let copies = names.filter(|entry| entry.file_name().to_string_lossy().starts_with("copy.db"));
        at_least(copies.map(|entry| entry.metadata().unwrap().len()).sum(), 1_000_000)
    })
    .await;
    // Stopped longer than the 5 s after which a line is due: a slow disk, without the size.
    running.freeze();
    tokio::time::sleep(Duration::from_millis(5_100)).await;
    running.thaw();
    running.wait_exit(PATIENCE).await;
    let finished = running.finished();
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let line = finished.stderr.lines().find(|line| line.contains("the backup is being written"));
    let line = line.unwrap_or_else(|| panic!("no line in {finished:?}"));
    let number = |key: &str| line.split(key).nth(1).unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    let (copied, of) = (number("copied_bytes="), number("of_bytes="));
    assert!(0 < copied && copied <= of && of > 100_000_000, "{copied} of {of}");
    assert!(spec.folder().join("copy.db").exists());
}

#[tokio::test]
async fn a_backup_overwrites_nothing_and_leaves_nothing_when_it_fails() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let fails = async |code: i32, words: &str, arguments: &[&str]| {
        let finished = spec.run(arguments).await;
        assert_eq!(finished.code, Some(code), "{finished:?}");
        assert_eq!(finished.complaints().len(), 1, "{finished:?}");
        assert!(finished.stderr.contains(words), "no {words:?} in {finished:?}");
    };
    fails(2, "no database at ", &["backup", "copy.db"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let said = spec.run_ok(&["backup", "copy.db"]).await.stdout;
    assert_eq!(said, "copy.db: 0 orders, 0 ids, 0 dead letters, last stream sequence none\n");
    let before = std::fs::read(spec.folder().join("copy.db")).unwrap();
    fails(1, "copy.db exists; a backup overwrites nothing", &["backup", "copy.db"]).await;
    assert!(std::fs::read(spec.folder().join("copy.db")).unwrap() == before);
    fails(1, "cannot write", &["backup", "nowhere/copy.db"]).await;
    // A page of the original that is torn: the copy must not be taken for a backup.
    let mut bytes = std::fs::read(spec.database()).unwrap();
    bytes[4096..].fill(0xff);
    std::fs::write(spec.database(), &bytes).unwrap();
    fails(2, "damaged", &["backup", "another.db"]).await;
    let names =
        std::fs::read_dir(spec.folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.starts_with("another")).collect::<Vec<_>>(), [""; 0]);
}
