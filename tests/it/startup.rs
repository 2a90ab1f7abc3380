//! What a daemon finds at its start: no server, a consumer that must be refused, ports and databases that are not for it.
//! Exit code 2 means that the operator must correct something: one clear line names it, and nothing was changed.

use std::path::Path;
use std::time::Duration;

use async_nats::jetstream::consumer;
use serde_json::Value;
use sqlx::{Connection, Row};

use crate::support::keys::{mode, set_mode};
use crate::support::nats::{CONSUMER, consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, Finished, NatsServer, ServerSpec};

/// `run` ends with exit code 2 and one line that has all these words.
async fn refused(spec: &DaemonSpec, words: &[&str]) -> Finished {
    let finished = spec.run(&["run"]).await;
    assert_eq!(finished.code, Some(2), "{finished:?}");
    let complaints = finished.complaints();
    assert_eq!(complaints.len(), 1, "one clear line: {finished:?}");
    for word in words {
        assert!(complaints[0].contains(word), "no {word:?} in {complaints:?}");
    }
    finished
}

/// Names and contents of everything in a folder but our own captures.
fn snapshot(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .filter(|(name, _)| !name.starts_with("stderr-"))
        .collect();
    files.sort();
    files
}

#[tokio::test]
async fn no_server_at_start_is_waited_for() {
    let (mut server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    server.stop().await;
    let mut worker = spec.start();
    worker.not_ready("connect").await;
    assert_eq!(worker.get("/livez").await.0, 200, "waiting is no reason to be restarted");
    worker.logged(&["tries again"]).await;

    server.restart().await;
    worker.ready().await;
    let broker = Broker::connect(&server).await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_push_consumer_is_refused() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.jetstream.create_stream(stream_config()).await.unwrap();
    broker
        .create_push_consumer(consumer::push::Config {
            durable_name: Some(CONSUMER.into()),
            deliver_subject: "deliver.here".into(),
            ack_policy: consumer::AckPolicy::Explicit,
            ..Default::default()
        })
        .await;
    let spec = DaemonSpec::new(server.url());
    refused(&spec, &["push", "pull", "order-processor setup --recreate"]).await;
}

#[tokio::test]
async fn consumers_that_would_lose_orders_are_refused_with_the_command() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.jetstream.create_stream(stream_config()).await.unwrap();
    broker.publish("Order Data 1").await;
    let story = consumer_config();
    let cases: [(consumer::pull::Config, &[&str]); 5] = [
        (
            consumer::pull::Config { ack_policy: consumer::AckPolicy::None, ..story.clone() },
            &["ack policy none", "explicit", "order-processor setup --recreate"],
        ),
        (
            consumer::pull::Config { ack_policy: consumer::AckPolicy::All, ..story.clone() },
            &["ack policy all", "explicit", "order-processor setup --recreate"],
        ),
        (
            consumer::pull::Config { max_deliver: 5, ..story.clone() },
            &["max_deliver 5", "retry.max_attempts 5", "setup --update --unset max-deliver"],
        ),
        (
            consumer::pull::Config { ack_wait: Duration::from_millis(500), ..story.clone() },
            &["ack_wait 500ms", "1s", "setup --update --ack-wait 30s"],
        ),
        (
            consumer::pull::Config { headers_only: true, ..story.clone() },
            &["headers", "setup --update --unset headers-only"],
        ),
    ];
    for (config, words) in cases {
        broker.create_consumer(config.clone()).await;
        let before = broker.consumer_info().await;
        let spec = DaemonSpec::new(server.url());
        refused(&spec, words).await;
        let after = broker.consumer_info().await;
        assert_eq!(after.config, before.config, "the daemon edits no consumer");
        assert_eq!(after.delivered.stream_sequence, 0, "nothing was pulled");

        let checked = spec.run(&["check"]).await;
        assert_eq!(checked.code, Some(1), "{checked:?}");
        for word in words {
            assert!(checked.stdout.contains(word), "no {word:?} in {checked:?}");
        }
        broker.delete_consumer().await;
    }
}

#[tokio::test]
async fn what_will_hurt_some_day_is_warned_of_and_works() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let unlimited = async_nats::jetstream::stream::Config {
        max_bytes: -1,
        storage: async_nats::jetstream::stream::StorageType::Memory,
        ..stream_config()
    };
    let consumer = consumer::pull::Config {
        max_deliver: 20,
        max_ack_pending: 10,
        backoff: vec![Duration::from_secs(1), Duration::from_secs(2)],
        ..consumer_config()
    };
    broker.create(unlimited, consumer).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "100");
    broker.publish_numbered(1..=50).await;
    let mut worker = spec.start();
    broker.acknowledged(50).await;
    for word in ["max_bytes", "memory", "max_deliver 20", "max_ack_pending 10", "backoff"] {
        worker.logged(&["WARN", word]).await;
    }
    worker.drain().await;
    spec.db().applied_once(50).await;
}

#[tokio::test]
async fn a_taken_http_port_is_refused() {
    let (server, broker) = Broker::story().await;
    broker.publish("Order Data 1").await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let spec = DaemonSpec::new(server.url()).set("http.listen", address.clone());
    refused(&spec, &[&address, "http.listen"]).await;
    assert!(!spec.database().exists(), "nothing is created");
    assert_eq!(broker.consumer_info().await.delivered.stream_sequence, 0, "nothing was pulled");
}

#[tokio::test]
async fn what_is_not_a_database_of_the_daemon_is_refused_and_kept() {
    let offline = || DaemonSpec::new("nats://127.0.0.1:9");
    let missing = offline();
    let folder = missing.folder().join("missing");
    let missing = missing.set("database.url", format!("sqlite://{}/orders.db", folder.display()));
    refused(&missing, &["missing", "does not exist", "database.url"]).await;
    assert!(!folder.exists(), "nothing is created");

    let directory = offline();
    std::fs::create_dir(directory.database()).unwrap();
    refused(&directory, &["orders.db"]).await;

    let notes = offline();
    std::fs::write(notes.database(), "these are my notes, and not a database\n".repeat(100)).unwrap();
    let before = snapshot(notes.folder());
    refused(&notes, &["orders.db", "SQLite", "database.url"]).await;
    assert_eq!(snapshot(notes.folder()), before);

    let theirs = offline();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(theirs.database()).create_if_missing(true);
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
    sqlx::query("CREATE TABLE orders (number INTEGER)").execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let before = snapshot(theirs.folder());
    refused(&theirs, &["orders.db", "database.url"]).await;
    assert_eq!(snapshot(theirs.folder()), before);
}

#[tokio::test]
async fn a_damaged_database_is_refused_and_kept() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=200).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let mut bytes = std::fs::read(spec.database()).unwrap();
    // Everything behind the first page, which holds the header and the schema.
    bytes[4096..].fill(0xff);
    std::fs::write(spec.database(), &bytes).unwrap();
    refused(&spec, &["orders.db", "damaged", "restore a backup"]).await;
    assert!(std::fs::read(spec.database()).unwrap() == bytes, "nothing is repaired and nothing made anew");
}

#[tokio::test]
async fn each_command_names_a_damaged_database_and_what_to_do() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=200).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    // The schema and the list of migrations are whole; what is counted, listed and looked up is not.
    let roots = "SELECT rootpage FROM sqlite_schema WHERE rootpage > 0 AND tbl_name NOT LIKE '\\_sqlx%' ESCAPE '\\'";
    let roots: Vec<i64> = spec.db().rows(roots).await.iter().map(|row| row.get(0)).collect();
    let page = usize::try_from(spec.db().scalar("PRAGMA page_size").await).unwrap();
    let mut bytes = std::fs::read(spec.database()).unwrap();
    for root in roots {
        let at = usize::try_from(root - 1).unwrap() * page;
        bytes[at..at + page].fill(0xff);
    }
    std::fs::write(spec.database(), &bytes).unwrap();
    let line = format!("{} is damaged; keep the file, and restore a backup", spec.database().display());
    let commands: [&[&str]; 6] = [
        &["run"],
        &["backup", "copy.db"],
        &["audit"],
        &["dead-letters", "list"],
        &["dead-letters", "show", "x"],
        &["dead-letters", "replay", "--all"],
    ];
    for command in commands {
        let finished = spec.run(command).await;
        assert_eq!(finished.code, Some(2), "{command:?}: {finished:?}");
        let complaints = finished.complaints();
        assert!(complaints.len() == 1 && complaints[0].contains(&line), "{command:?}: {finished:?}");
        assert!(!finished.stderr.contains("continue with"), "{command:?}: {finished:?}");
    }
    let status = spec.run(&["status"]).await;
    assert!(status.code == Some(1) && status.stdout.contains(&line), "{status:?}");
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_kept() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    let mut writer = spec.db().open_to_write().await;
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES (99990101000000, 'from the future', TRUE, x'00', 0)";
    sqlx::query(newer).execute(&mut writer).await.unwrap();
    sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();

    let before = snapshot(spec.folder());
    refused(&spec, &["orders.db", "newer"]).await;
    assert_eq!(snapshot(spec.folder()), before);
}

#[tokio::test]
async fn a_second_daemon_names_the_first_and_takes_over_when_it_ends() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut first = spec.start();
    first.ready().await;
    let second = DaemonSpec::new(server.url()).set("database.url", format!("sqlite://{}", spec.database().display()));
    refused(&second, &["orders.db", &first.pid().to_string()]).await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    spec.db().applied_once(5).await;

    let mut second = second.start();
    first.drain().await;
    second.ready().await;
    broker.publish_numbered(6..=10).await;
    broker.acknowledged(10).await;
    second.drain().await;
    spec.db().applied_once(10).await;
}

#[tokio::test]
async fn a_second_daemon_is_refused_under_another_name_of_the_database() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut first = spec.start();
    first.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    let at = |name: &str| spec.folder().join(name);
    let second =
        |name: &str| DaemonSpec::new(server.url()).set("database.url", format!("sqlite://{}", at(name).display()));
    std::os::unix::fs::symlink(spec.database(), at("symbolic.db")).unwrap();
    refused(&second("symbolic.db"), &["is in use by", &first.pid().to_string()]).await;
    std::fs::hard_link(spec.database(), at("hard.db")).unwrap();
    refused(&second("hard.db"), &["hard.db has 2 names (hard links)"]).await;
    std::fs::remove_file(at("hard.db")).unwrap();
    first.drain().await;

    broker.publish("Order Data 2").await;
    let through_the_link = second("symbolic.db");
    through_the_link.run_ok(&["run", "--until-idle"]).await;
    assert!(!at("symbolic.db-wal").exists() && !at("symbolic.db.lock").exists());
    spec.db().applied_once(2).await;
}

#[tokio::test]
async fn a_database_that_is_busy_at_the_start_is_waited_for() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    // Makes the file, and somebody else then has it before the daemon starts again.
    spec.run_ok(&["run", "--until-idle"]).await;
    let writer = spec.db().lock().await;
    broker.publish_numbered(6..=9).await;

    let mut worker = spec.start();
    worker.not_ready("database").await;
    worker.logged(&["the database cannot be opened, trying again", "database is locked"]).await;
    writer.close().await.unwrap();
    broker.acknowledged(9).await;
    spec.db().applied_once(9).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_server_without_jetstream_is_waited_for() {
    // An account without JetStream sees what a server without it shows.
    let config = "accounts { A { jetstream: enabled, users: [{user: a, password: a}] }, B { users: [{user: b, password: b}] } }\n\
                  no_auth_user: b";
    let server = NatsServer::with(ServerSpec { config: config.into(), ..ServerSpec::default() }).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.not_ready("JetStream").await;
    worker.drain().await;
}

#[tokio::test]
async fn what_the_daemon_creates_is_for_its_owner_alone_whatever_the_umask() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    // The shell's umask is the only way to set one for a child without unsafe code.
    let program = spec.command(&["run"]);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "umask 0; exec \"$0\" run"]).arg(program.get_program()).current_dir(spec.folder()).env_clear();
    shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let child = shell.stderr(std::process::Stdio::null()).spawn().unwrap();
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    for suffix in ["", "-wal", "-shm", ".lock"] {
        assert_eq!(mode(&spec.beside(suffix)), 0o600, "orders.db{suffix}");
    }
    crate::support::signal(child.id(), "TERM");
    let ended = tokio::task::spawn_blocking(move || {
        let mut child = child;
        child.wait().unwrap()
    })
    .await
    .unwrap();
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test]
async fn a_user_who_may_not_read_the_database_gets_one_clear_line() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let (folder, copies) = (spec.folder().join("db"), spec.folder().join("copies"));
    let database = folder.join("orders.db");
    let spec = spec.set("database.url", format!("sqlite://{}", database.display()));
    for made in [&folder, &copies] {
        std::fs::create_dir(made).unwrap();
    }
    for (path, mode) in [(spec.folder(), 0o755), (&folder, 0o700), (&copies, 0o777)] {
        set_mode(path, mode);
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    let commands: [&[&str]; 5] =
        [&["run"], &["dead-letters", "list"], &["audit"], &["backup", "copies/x.db"], &["resume"]];
    let is_told = async |commands: &[&[&str]], line: &str| {
        for command in commands {
            let Some(finished) = spec.run_as_nobody(command).await else { return false };
            let complaints = finished.complaints();
            assert!(complaints.len() == 1 && complaints[0].contains(line), "{command:?}: {finished:?}");
            // Nothing that `resume` asks of its user.
            assert_eq!(finished.code, Some(if *command == ["resume"] { 1 } else { 2 }), "{command:?}: {finished:?}");
        }
        let Some(status) = spec.run_as_nobody(&["status", "--json"]).await else { return false };
        assert_eq!((status.code, &status.json()["pause"]), (Some(1), &Value::Null), "{status:?}");
        assert_eq!(status.json()["problems"].as_array().map(Vec::len), Some(1), "{status:?}");
        assert!(status.json()["problems"][0].as_str().unwrap().contains(line), "{status:?}");
        let Some(check) = spec.run_as_nobody(&["check"]).await else { return false };
        assert!(check.code == Some(1) && check.stdout.contains("FAIL  database"), "{check:?}");
        true
    };
    if !is_told(&commands, &format!("cannot enter {} (permission denied); run this as the", folder.display())).await {
        return;
    }
    set_mode(&folder, 0o755);
    let line = format!("{} cannot be read by this user (permission denied); run this as the", database.display());
    assert!(is_told(&commands[..4], &line).await);
    // To read is not enough: SQLite needs to make the WAL's index beside it.
    set_mode(&database, 0o644);
    assert!(is_told(&commands[1..4], &line).await);
    set_mode(&database, 0o600);

    // A marker that can be seen is one also for those who may not read it.
    spec.run_ok(&["pause"]).await;
    let status = spec.run_as_nobody(&["status", "--json"]).await.unwrap();
    assert!(status.json()["pause"].is_object(), "{status:?}");
    let run = spec.run_as_nobody(&["run", "--until-idle"]).await.unwrap();
    assert!(run.code == Some(2) && run.stderr.contains("paused by a marker that cannot be read"), "{run:?}");
}
