//! Signals, the lock and the port, as whoever starts a daemon in a terminal meets them.

use crate::support::{Broker, DaemonSpec, PATIENCE, eventually};

/// `script` gives a program a terminal of its own. Without it this is not tested.
fn has_script() -> bool {
    let found = std::process::Command::new("script").arg("--version").output().is_ok();
    if !found {
        eprintln!("NOT TESTED: script is not installed");
    }
    found
}

#[tokio::test]
async fn on_a_terminal_sighup_drains_since_the_terminal_is_gone() {
    if !has_script() {
        return;
    }
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=3).await;
    let program = env!("CARGO_BIN_EXE_order-processor");
    let mut command = std::process::Command::new("script");
    command.args(["-qec", &format!("echo $$ > pid; exec {program} run"), "/dev/null"]).current_dir(spec.folder());
    command.env_clear().envs(spec.environment()).env("PATH", "/usr/bin:/bin").env("SHELL", "/bin/sh");
    let mut running = command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).spawn().unwrap();
    broker.acknowledged(3).await;
    let pid: u32 = std::fs::read_to_string(spec.folder().join("pid")).unwrap().trim().parse().unwrap();
    crate::support::signal(pid, "HUP");
    let status =
        eventually("the daemon drains", PATIENCE, async || running.try_wait().unwrap().ok_or("still running")).await;
    assert!(status.success(), "{status}");
    assert!(!spec.beside(".lock").exists(), "it ended by itself");
}

#[tokio::test]
async fn without_a_terminal_sighup_reloads_the_log_level() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.send_signal("HUP");
    worker.logged(&["reloaded the log level"]).await;
    broker.publish_numbered(1..=2).await;
    broker.acknowledged(2).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_port_that_a_daemon_on_the_same_database_has_is_not_the_problem() {
    let (server, _broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut first = spec.start();
    first.ready().await;
    let second = spec.run(&["run"]).await;
    assert_eq!(second.code, Some(2), "{second:?}");
    let wanted = format!("is in use by process {}; stop that process", first.pid());
    assert!(second.stderr.contains(&wanted) && !second.stderr.contains("cannot listen"), "{second:?}");
    first.drain().await;

    let taken = std::net::TcpListener::bind(first.http_address()).unwrap();
    let alone = spec.run(&["run"]).await;
    assert!(alone.code == Some(2) && alone.stderr.contains("cannot listen on"), "{alone:?}");
    drop(taken);
}

#[tokio::test]
async fn the_log_tells_how_far_the_work_is_and_debug_names_the_ids() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("log.level", "debug").set("log.format", "text");
    let mut worker = spec.start();
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;
    worker.logged(&["processed messages", "messages=5", "ack_floor="]).await;
    worker.logged(&["DEBUG", "message_id=", "stream_seq=5", "outcome=\"applied\""]).await;
    assert_eq!(worker.lines(&["processed messages"]), 1, "nothing more while there is no work: {}", worker.log());
    worker.drain().await;
}

#[tokio::test]
async fn publish_without_ids_leaves_them_to_the_pointer_and_says_so_otherwise() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/order");
    std::fs::write(spec.folder().join("orders"), "{\"order\":1}\n{\"order\":2}\n").unwrap();
    for _ in 0..2 {
        spec.run_ok(&["publish", "orders", "--no-id"]).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(4).await;
    spec.db().applied_once(2).await;
    let with_ids = spec.run_ok(&["publish", "orders"]).await;
    assert!(with_ids.stderr.contains("--no-id"), "{with_ids:?}");
}
