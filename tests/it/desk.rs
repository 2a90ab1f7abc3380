//! The operator's desk: pauses, dead letters, backups, each beside a daemon that runs and without one.

use std::path::{Path, PathBuf};

use sqlx::Connection;
use tokio_util::sync::CancellationToken;

use crate::support::nats::{consumer_config, patient_consumer_config};
use crate::support::{Broker, DaemonSpec, PATIENCE, at_least, eventually};

/// A file beside the database.
fn beside(spec: &DaemonSpec, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", spec.database().display()))
}

fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode() & 0o7777
}

#[tokio::test]
async fn a_paused_daemon_lets_go_of_the_database_says_so_everywhere_and_goes_on_by_itself() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.metric("paused", 0.0).await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    let said = spec.run_ok(&["pause", "--reason", "a new disk"]).await.stdout;
    assert!(said.contains("paused; no daemon has"), "{said}");
    for suffix in ["-wal", "-shm", ".lock"] {
        assert!(!beside(&spec, suffix).exists(), "{suffix} is gone: the file alone is the database");
    }
    let mut alone = spec.db().open_to_write().await;
    sqlx::query("PRAGMA locking_mode = EXCLUSIVE").execute(&mut alone).await.unwrap();
    sqlx::query("BEGIN EXCLUSIVE").execute(&mut alone).await.expect("nobody else has it open");
    alone.close().await.unwrap();

    broker.publish_numbered(6..=10).await;
    worker.metric("consumer_num_pending", 5.0).await;
    worker.metric("paused", 1.0).await;
    worker.not_ready("paused: by ").await;
    let (_, problems) = worker.get("/readyz").await;
    assert_eq!(problems.lines().count(), 1, "{problems}");
    assert!(problems.contains(": a new disk"), "{problems}");
    assert_eq!(worker.get("/livez").await.0, 200, "nobody is to restart it");
    let (_, status) = worker.get("/status").await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["pause"]["reason"], "a new disk");
    assert_eq!(status["draining"], false);
    let status = spec.run_ok(&["status", "--json"]).await.json();
    assert_eq!(
        status["pause"],
        serde_json::from_str::<serde_json::Value>(&std::fs::read_to_string(beside(&spec, ".paused")).unwrap()).unwrap()
    );
    let status = spec.run_ok(&["status"]).await.stdout;
    assert!(status.contains("a new disk; `order-processor resume` ends it"), "{status}");
    let checked = spec.run_ok(&["check"]).await.stdout;
    assert!(checked.contains("a new disk"), "{checked}");
    worker.logged(&["WARN", "paused by ", "a new disk"]).await;
    assert_eq!(spec.db().count("processed_ids").await, 5);

    let said = spec.run_ok(&["pause"]).await.stdout;
    assert!(said.contains("was paused already by") && said.contains("a new disk"), "{said}");
    let said = spec.run_ok(&["resume"]).await.stdout;
    assert!(said.contains("it was paused by") && said.contains("a new disk"), "{said}");
    broker.acknowledged(10).await;
    worker.ready().await;
    worker.metric("paused", 0.0).await;
    worker.logged(&["resumed"]).await;
    assert_eq!(spec.run_ok(&["resume"]).await.stdout, "it was not paused\n");
    spec.db().applied_once(10).await;
    worker.drain().await;
}

#[tokio::test]
async fn what_a_pause_finds_in_hand_is_committed_and_acknowledged_and_the_rest_is_handed_back() {
    let consumer = patient_consumer_config();
    let (server, broker) = Broker::with(consumer).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "50");
    let mut worker = spec.start();
    // A publisher that is there during each of the pauses.
    let (publisher, mut last) = (Broker::connect(&server).await, 0);
    let enough = CancellationToken::new();
    let told = enough.clone();
    let publishing = tokio::spawn(async move {
        while !told.is_cancelled() {
            publisher.publish_numbered(last + 1..=last + 100).await;
            last += 100;
        }
        last
    });
    let processed = async || spec.db().count("processed_ids").await;
    for _ in 0..3 {
        let before = processed().await;
        eventually("it works", PATIENCE, async || at_least(processed().await, before + 1)).await;
        spec.run_ok(&["pause"]).await;
        let info = broker.consumer_info().await;
        let acknowledged = info.delivered.stream_sequence - info.num_ack_pending as u64;
        assert_eq!(i64::try_from(acknowledged).unwrap(), processed().await, "what is committed is acknowledged");
        spec.run_ok(&["resume"]).await;
    }
    enough.cancel();
    let last = publishing.await.unwrap();
    // Only what is handed back comes again with this consumer.
    broker.acknowledged(last).await;
    spec.db().applied_once(i64::try_from(last).unwrap()).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_pause_outlasts_the_daemon_and_can_begin_and_end_without_one() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5).await;
    spec.run_ok(&["pause", "--reason", "moving"]).await;
    assert_eq!(mode(&beside(&spec, ".paused")), 0o600);

    let mut worker = spec.start();
    worker.not_ready("paused: by").await;
    worker.metric("consumer_num_pending", 5.0).await;
    assert!(!spec.database().exists(), "nothing is made where somebody is at work");
    worker.drain().await;

    let refused = spec.run(&["run", "--until-idle"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    let complaints = refused.complaints();
    assert_eq!(complaints.len(), 1, "{refused:?}");
    assert!(complaints[0].contains("moving") && complaints[0].contains("order-processor resume"), "{complaints:?}");

    spec.run_ok(&["resume"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(5).await;
}

#[tokio::test]
async fn a_pause_ends_work_until_idle_with_a_clear_line() {
    let (server, broker) = Broker::with(consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "10");
    broker.publish_numbered(1..=20_000).await;
    let mut worker = spec.start_with(&["run", "--until-idle"]);
    eventually("it works", PATIENCE, async || at_least(spec.db().count("processed_ids").await, 1)).await;
    spec.run_ok(&["pause"]).await;
    assert_eq!(worker.wait_exit(PATIENCE).await.code(), Some(2));
    worker.logged(&["ERROR", "paused by", "order-processor resume"]).await;
    let (floor, rows) = (broker.consumer_info().await.ack_floor.stream_sequence, spec.db().count("orders").await);
    assert_eq!(i64::try_from(floor).unwrap(), rows);
}

#[tokio::test]
async fn a_database_that_is_away_when_the_pause_ends_is_waited_for_and_not_made_anew() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    spec.run_ok(&["pause"]).await;
    let elsewhere = spec.database().with_extension("elsewhere");
    std::fs::rename(spec.database(), &elsewhere).unwrap();
    spec.run_ok(&["resume"]).await;
    broker.publish_numbered(6..=10).await;
    worker.not_ready("the file was moved, removed or replaced; put it back").await;
    assert_eq!(worker.get("/livez").await.0, 200);
    assert!(!spec.database().exists(), "an empty one would take the orders");
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 5);

    std::fs::rename(&elsewhere, spec.database()).unwrap();
    broker.acknowledged(10).await;
    worker.ready().await;
    spec.db().applied_once(10).await;
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
        assert_eq!(mode(&beside(&spec, suffix)), 0o600, "orders.db{suffix}");
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
