//! What can happen to the process itself: nobody reads its log, it is out of file descriptors, its clock jumps.

use std::io::{BufRead, BufReader};
use std::process::Command;

use sqlx::Connection;
use tokio::net::TcpStream;

use crate::support::nats::impatient_consumer_config;
use crate::support::{Broker, Daemon, DaemonSpec, FaultProxy, PATIENCE, at_least, eventually};

#[tokio::test]
async fn an_unread_log_holds_up_neither_orders_nor_the_drain() {
    let (server, broker) = Broker::story().await;
    // Several lines for each order: the pipe is full long before the last one.
    let spec = DaemonSpec::new(server.url()).set("log.level", "trace");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut worker = spec.spawn(spec.command(&["run"]), Some(writer.into()));
    broker.publish_numbered(1..=2_000).await;
    broker.acknowledged(2_000).await;
    spec.db().applied_once(2_000).await;
    assert_eq!(worker.get("/livez").await.0, 200);
    eventually("dropped lines are counted", PATIENCE, async || {
        at_least(worker.metrics().await.get("log_lines_dropped_total"), Some(1.0))
    })
    .await;

    let lines = tokio::task::spawn_blocking(move || {
        // Up to the line about the gap. From then on nobody reads for good.
        let (mut lines, mut reader) = (Vec::new(), BufReader::new(reader));
        while !lines.last().is_some_and(|line: &String| line.contains("were dropped")) {
            let mut line = String::new();
            assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the log ended");
            lines.push(line);
        }
        (lines, reader)
    });
    let lines = tokio::time::timeout(PATIENCE, lines).await.expect("the gap is told when somebody reads again");
    let (lines, _reader) = lines.unwrap();
    let whole = |line: &String| serde_json::from_str::<serde_json::Value>(line).is_ok();
    let cut: Vec<_> = lines.iter().filter(|line| !whole(line)).collect();
    assert!(cut.len() <= 1, "at most the one in the middle of which the room ended: {cut:?}");

    // The pipe is full again, and the drain ends all the same.
    broker.publish_numbered(2_001..=4_000).await;
    broker.acknowledged(4_000).await;
    worker.drain().await;
    spec.db().applied_once(4_000).await;
}

#[tokio::test]
async fn without_any_output_stream_it_works_all_the_same() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let closed = ["sh", "-c", "exec \"$0\" \"$@\" <&- >&- 2>&-"];
    let mut worker = spec.spawn(spec.command_through(&closed, &["run"]), None);
    broker.publish_numbered(1..=20).await;
    broker.acknowledged(20).await;
    worker.drain().await;
    spec.db().applied_once(20).await;
}

/// Leaves the process room for so many more file descriptors; none of those that it has is lost.
fn leave_file_descriptors(worker: &Daemon, more: usize) {
    let open: Vec<usize> = std::fs::read_dir(format!("/proc/{}/fd", worker.pid()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    let limit = (0..).filter(|fd| !open.contains(fd)).nth(more).unwrap();
    let arguments = [format!("--pid={}", worker.pid()), format!("--nofile={limit}:")];
    assert!(Command::new("prlimit").args(arguments).status().unwrap().success());
}

#[tokio::test]
async fn out_of_file_descriptors_it_answers_probes_and_recovers() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url()).set("log.level", "debug");
    let mut worker = spec.start();
    worker.ready().await;
    // SQLite keeps a file descriptor of the audit's connection for the next one.
    worker.logged(&["the audit ended"]).await;
    leave_file_descriptors(&worker, 2);
    let address = worker.http_address();
    // So many that to wait until each has been timed out, two at a time, would take minutes.
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(TcpStream::connect(&address).await.unwrap());
    }
    worker.logged(&["Too many open files"]).await;
    // A new connection to the server needs a file descriptor, and a new one to the database needs three.
    proxy.cut();
    let lock = spec.db().lock().await;
    broker.publish_numbered(1..=20).await;
    worker.not_ready("database").await;
    drop(lock);

    broker.acknowledged(20).await;
    worker.ready().await;
    spec.db().applied_once(20).await;
    assert_eq!(spec.db().count("attempts").await, 0, "no attempt is spent");
    let log = worker.log();
    let said = log.lines().filter(|line| line.contains("cannot accept an HTTP connection")).count();
    assert!(said <= 2, "said {said} times: {log}");
    worker.drain().await;
}

/// A daemon whose wall clock can be set while it runs; time that only passes is left alone. `None` where there is no libfaketime.
struct Clock {
    offset: std::path::PathBuf,
}

impl Clock {
    fn start(spec: &DaemonSpec) -> Option<(Daemon, Self)> {
        let libraries = ["x86_64-linux-gnu", "aarch64-linux-gnu"]
            .map(|triple| format!("/usr/lib/{triple}/faketime/libfaketimeMT.so.1"));
        let Some(library) = libraries.into_iter().find(|library| std::path::Path::new(library).exists()) else {
            eprintln!("NOT TESTED: libfaketime is not installed, no clock jumps");
            return None;
        };
        let clock = Self { offset: spec.folder().join("clock") };
        clock.set("+0");
        let mut command = spec.command(&["run"]);
        command
            .env("LD_PRELOAD", library)
            .env("FAKETIME_TIMESTAMP_FILE", &clock.offset)
            .env("FAKETIME_NO_CACHE", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
        Some((spec.spawn(command, None), clock))
    }

    fn set(&self, offset: &str) {
        std::fs::write(&self.offset, offset).unwrap();
    }
}

#[tokio::test]
async fn a_clock_that_jumps_loses_doubles_and_forgets_nothing() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let Some((mut worker, clock)) = Clock::start(&spec) else { return };
    worker.ready().await;
    let mut published = 0;
    for offset in ["+0", "-400d", "+400d", "-30d", "+3600"] {
        clock.set(offset);
        broker.publish_numbered(published + 1..=published + 100).await;
        published += 100;
        broker.acknowledged(published).await;
        worker.ready().await;
        assert_eq!(worker.get("/livez").await.0, 200, "{offset}");
        let metrics = worker.metrics().await;
        let oldest = metrics.get("oldest_pending_seconds");
        assert!(oldest >= Some(0.0), "{offset}: {oldest:?}");
    }
    clock.set("+400d");
    worker.drain().await;
    assert!(!worker.log().contains("panicked"), "{}", worker.log());
    spec.db().applied_once(500).await;
    let too_old = "SELECT count(*) FROM processed_ids WHERE processed_at < (SELECT min(published_at) FROM orders)";
    assert_eq!(spec.db().scalar(too_old).await, 0, "no id is older than its message");

    // All messages are gone, and one id is a week old by any clock: when that one has been pruned, the others were looked at.
    broker.jetstream.get_stream("ORDERS").await.unwrap().purge().await.unwrap();
    let mut writer = spec.db().open_to_write().await;
    sqlx::query("UPDATE processed_ids SET processed_at = processed_at - ? WHERE rowid = 1")
        .bind(8 * 24 * 3600 * 1_000_000_000_i64)
        .execute(&mut writer)
        .await
        .unwrap();
    writer.close().await.unwrap();
    let (mut worker, clock) = Clock::start(&spec).expect("it was there before");
    clock.set("+400d");
    worker.ready().await;
    worker.metric("ids_pruned_total", 1.0).await;
    broker.publish("Order Data 501").await;
    broker.acknowledged(501).await;
    worker.metric("ids_pruned_total", 1.0).await;
    assert_eq!(spec.db().count("processed_ids").await, 500, "a publisher may still repeat the others");
    worker.drain().await;
}

#[tokio::test]
async fn sigterm_without_a_file_descriptor_or_a_server_ends_it() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url()).set("shutdown.timeout", "1h");
    let mut worker = spec.start();
    worker.ready().await;
    leave_file_descriptors(&worker, 0);
    proxy.refuse();
    broker.publish_numbered(1..=20).await;
    worker.logged(&["disconnected from the server"]).await;
    worker.drain().await;

    proxy.heal();
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(20).await;
}

#[tokio::test]
async fn sigterm_while_no_write_works_ends_it_and_the_next_one_finishes() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", "1h");
    let mut worker = spec.start();
    worker.ready().await;
    let faults = ["-e", "trace=pwrite64,fsync,fdatasync", "-e", "inject=pwrite64,fsync,fdatasync:error=EIO"];
    let Some(_tracer) = worker.trace(&faults).await else {
        return eprintln!("NOT TESTED: strace is not installed, no write fails");
    };
    broker.publish_numbered(1..=20).await;
    worker.not_ready("database: ").await;
    worker.drain().await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(20).await;
    assert_eq!(spec.db().count("attempts").await, 0, "no attempt is spent");
}
