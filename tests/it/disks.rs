//! What can happen to the database file while the daemon runs. Nothing is acknowledged, nothing held is lost, no attempt is
//! spent, the cause is shown, and the work resumes by itself when the fault is over.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use async_nats::HeaderMap;
use sqlx::{Connection, SqliteConnection};
use tempfile::TempDir;

use crate::support::nats::impatient_consumer_config;
use crate::support::{Broker, Daemon, DaemonSpec, PATIENCE, at_least, eventually};

/// A small tmpfs that only this value's mount namespace sees: nothing has to be cleaned up, however the test ends.
struct SmallDisk {
    folder: TempDir,
    /// Holds the namespace, and ends when its stdin does.
    keeper: Child,
    entry: Vec<&'static str>,
}

impl SmallDisk {
    /// `None`, and it says so, where neither root nor an unprivileged user may mount anything.
    fn mount() -> Option<Self> {
        const AS_ROOT: [&[&str]; 2] = [&["--mount"], &["--mount"]];
        const AS_USER: [&[&str]; 2] =
            [&["--mount", "--user", "--map-root-user"], &["--mount", "--user", "--preserve-credentials"]];
        let folder = TempDir::new().unwrap();
        for [unshare, enter] in [AS_ROOT, AS_USER] {
            let script = "mount -t tmpfs -o size=4m none \"$0\" && mkdir \"$0/db\" && echo mounted && exec cat";
            let mut keeper = Command::new("unshare")
                .args(unshare)
                .args(["sh", "-c", script])
                .arg(folder.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut line = String::new();
            BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
            if line == "mounted\n" {
                return Some(Self { folder, keeper, entry: enter.to_vec() });
            }
            keeper.wait().unwrap();
        }
        eprintln!("NOT TESTED: no tmpfs can be mounted here, neither as root nor in a user namespace");
        None
    }

    /// A command in this namespace.
    fn enter(&self, run: impl FnOnce(&[&str]) -> Command) -> Command {
        let target = format!("--target={}", self.keeper.id());
        let mut through = vec!["nsenter", &target];
        through.extend(&self.entry);
        run(&through)
    }

    fn spec(&self, server_url: String) -> DaemonSpec {
        let database = self.folder.path().join("db/orders.db");
        DaemonSpec::new(server_url).set("database.url", format!("sqlite://{}", database.display()))
    }

    fn start(&self, spec: &DaemonSpec) -> Daemon {
        self.run(spec, &["run"])
    }

    fn run(&self, spec: &DaemonSpec, arguments: &[&str]) -> Daemon {
        spec.spawn(self.enter(|through| spec.command_through(through, arguments)), None)
    }

    fn shell(&self, script: &str) {
        let mut command = self.enter(|through| {
            let mut command = Command::new(through[0]);
            command.args(&through[1..]).args(["sh", "-c", script]).arg(self.folder.path());
            command
        });
        assert!(command.status().unwrap().success(), "{script}");
    }

    /// A file of the disk, as we see it from outside.
    fn path(&self, name: &str) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.keeper.id()));
        root.join(self.folder.path().strip_prefix("/").unwrap()).join(name)
    }

    fn fill(&self) {
        let mut ballast = File::create(self.path("ballast")).unwrap();
        while ballast.write_all(&[0; 4096]).is_ok() {}
    }

    fn free(&self) {
        std::fs::remove_file(self.path("ballast")).unwrap();
    }

    /// Whoever opens a file in the database's folder from now on may only read it.
    fn make_read_only(&self) {
        self.shell("mount --bind \"$0/db\" \"$0/db\" && mount -o remount,bind,ro \"$0/db\"");
    }

    fn make_writable(&self) {
        self.shell("umount \"$0/db\"");
    }

    /// The database of a daemon that has ended, brought to where the spec's own would be.
    fn copy_database(&self, spec: &DaemonSpec) {
        for suffix in ["", "-wal"] {
            let from = self.path(&format!("db/orders.db{suffix}"));
            if from.exists() {
                std::fs::copy(from, format!("{}{suffix}", spec.database().display())).unwrap();
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        drop(self.keeper.wait());
    }
}

/// Orders that do not fit into what a database has left over.
async fn publish_large(broker: &Broker, count: usize) {
    for _ in 0..count {
        broker.publish_to("ORDERS.new", HeaderMap::new(), vec![b'x'; 10_000]).await;
    }
}

/// Refused so often that `ack_wait` has passed more than once; and yet all that is held was delivered once.
async fn refused_for_long(broker: &Broker, worker: &Daemon, class: &str) {
    let before = worker.metrics().await.sum("db_errors_total");
    eventually("it tries again and again", PATIENCE, async || {
        at_least(worker.metrics().await.sum("db_errors_total"), before + 3.0)
    })
    .await;
    let of_class = worker.metrics().await.get(&format!("db_errors_total{{class=\"{class}\"}}"));
    assert!(of_class >= Some(1.0), "{class}: {of_class:?}");
    let info = broker.consumer_info().await;
    assert!(info.num_ack_pending > 0, "orders are held");
    assert_eq!(info.delivered.consumer_sequence, info.delivered.stream_sequence, "and kept alive: {info:?}");
    assert_eq!(worker.get("/livez").await.0, 200, "waiting is no reason to be restarted");
}

async fn all_went_well(broker: &Broker, spec: &DaemonSpec, orders: u64) {
    let info = broker.consumer_info().await;
    assert_eq!(info.ack_floor.stream_sequence, orders);
    assert_eq!(info.delivered.consumer_sequence, orders, "each was delivered once");
    spec.db().applied_once(i64::try_from(orders).unwrap()).await;
    assert_eq!(spec.db().count("attempts").await, 0, "no attempt is spent");
}

/// The daemon has read the database through a second connection by then, as its audit does after each bind.
#[tokio::test]
async fn no_commit_is_lost_when_another_program_closes_the_database() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    spec.db().has("orders", 1).await;
    broker.acknowledged(1).await;

    // A process of its own, since locks belong to processes.
    let shell = Command::new("sqlite3").arg(spec.database()).arg("SELECT count(*) FROM orders").output();
    let Ok(shell) = shell else { return eprintln!("NOT TESTED: sqlite3 is not installed") };
    assert!(shell.status.success(), "{shell:?}");
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;

    assert_eq!(spec.db().count("orders").await, 2, "what is acknowledged is in the database");
    worker.drain().await;
}

#[tokio::test]
async fn a_full_disk_and_then_a_read_only_one_hold_up_and_cost_nothing() {
    let Some(disk) = SmallDisk::mount() else { return };
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = disk.spec(server.url()).set("retry.max_attempts", "1");
    let mut worker = disk.start(&spec);
    worker.ready().await;
    broker.publish_numbered(1..=20).await;
    broker.acknowledged(20).await;

    disk.fill();
    publish_large(&broker, 100).await;
    worker.not_ready("database or disk is full").await;
    refused_for_long(&broker, &worker, "full").await;

    disk.make_read_only();
    disk.free();
    worker.not_ready("readonly database").await;
    refused_for_long(&broker, &worker, "read_only").await;

    disk.make_writable();
    broker.acknowledged(120).await;
    worker.ready().await;
    worker.logged(&["the database works again"]).await;
    let reported = worker.log().lines().filter(|line| line.contains("the database does not work")).count();
    assert!(reported <= 6, "each cause is said once, not at each of the attempts: {}", worker.log());
    worker.drain().await;
    disk.copy_database(&spec);
    all_went_well(&broker, &spec, 120).await;
}

#[tokio::test]
async fn a_full_disk_at_the_start_and_a_read_only_one_are_waited_for() {
    let Some(disk) = SmallDisk::mount() else { return };
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    broker.publish_numbered(1..=20).await;
    let spec = disk.spec(server.url());
    disk.fill();
    let mut worker = disk.start(&spec);
    worker.not_ready("database").await;
    worker.logged(&["the database cannot be opened, trying again"]).await;
    disk.free();
    broker.acknowledged(20).await;
    worker.drain().await;

    disk.make_read_only();
    broker.publish_numbered(21..=40).await;
    let checked = disk.enter(|through| spec.command_through(through, &["check"])).output().unwrap();
    let said = String::from_utf8(checked.stdout).unwrap();
    assert!(checked.status.code() == Some(1) && said.contains("Read-only file system"), "{said}");
    let mut worker = disk.start(&spec);
    worker.not_ready("Read-only file system").await;
    disk.make_writable();
    broker.acknowledged(40).await;
    worker.drain().await;
    disk.copy_database(&spec);
    all_went_well(&broker, &spec, 40).await;
}

#[tokio::test]
async fn on_a_full_disk_a_pause_is_on_or_it_says_that_it_is_not() {
    let Some(disk) = SmallDisk::mount() else { return };
    let (server, broker) = Broker::story().await;
    let spec = disk.spec(server.url());
    let mut worker = disk.start(&spec);
    worker.ready().await;
    broker.publish_numbered(1..=20).await;
    broker.acknowledged(20).await;

    disk.fill();
    let mut pause = disk.run(&spec, &["pause"]);
    assert_eq!(pause.wait_exit(PATIENCE).await.code(), Some(1), "there is no room for its marker");
    assert!(pause.log().contains("No space left"), "{}", pause.log());
    assert!(!disk.path("db/orders.db.paused").exists(), "a marker, even an empty one, is a pause");

    // Room for the marker, and not for all that is in the WAL.
    disk.shell("truncate --size=-8192 \"$0/ballast\"");
    let mut pause = disk.run(&spec, &["pause"]);
    assert_eq!(pause.wait_exit(PATIENCE).await.code(), Some(0), "{}", pause.log());
    worker.not_ready("paused").await;

    disk.free();
    let mut resume = disk.run(&spec, &["resume"]);
    assert_eq!(resume.wait_exit(PATIENCE).await.code(), Some(0), "{}", resume.log());
    broker.publish_numbered(21..=40).await;
    broker.acknowledged(40).await;
    worker.ready().await;
    worker.drain().await;
}

/// The same without any mount, and what no mount can make: writes and syncs that fail on a disk that seemed well.
#[tokio::test]
async fn nothing_is_acknowledged_while_writes_or_syncs_fail() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("retry.max_attempts", "1");
    let mut worker = spec.start();
    worker.ready().await;
    let mut published = 0;
    let faults = [("pwrite64", "ENOSPC", "full"), ("pwrite64", "EIO", "io"), ("pwrite64", "EROFS", "io")];
    for (calls, error, class) in faults.into_iter().chain([("fsync,fdatasync", "EIO", "io")]) {
        let (trace, injection) = (format!("trace={calls}"), format!("inject={calls}:error={error}"));
        let Some(tracer) = worker.trace(&["-e", &trace, "-e", &injection]).await else {
            return eprintln!("NOT TESTED: strace is not installed, no write and no sync fails");
        };
        broker.publish_numbered(published + 1..=published + 20).await;
        published += 20;
        worker.not_ready("database: ").await;
        refused_for_long(&broker, &worker, class).await;
        assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, published - 20, "{calls}: {error}");

        tracer.detach().await;
        broker.acknowledged(published).await;
        worker.ready().await;
    }
    worker.drain().await;
    all_went_well(&broker, &spec, published).await;
}

#[tokio::test]
async fn sigterm_while_the_disk_is_full_ends_it_and_the_next_one_finishes() {
    let Some(disk) = SmallDisk::mount() else { return };
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = disk.spec(server.url()).set("shutdown.timeout", "1h");
    let mut worker = disk.start(&spec);
    worker.ready().await;
    broker.publish_numbered(1..=20).await;
    broker.acknowledged(20).await;
    disk.fill();
    publish_large(&broker, 100).await;
    worker.not_ready("database or disk is full").await;
    worker.drain().await;

    disk.free();
    let mut worker = disk.start(&spec);
    broker.acknowledged(120).await;
    worker.drain().await;
    disk.copy_database(&spec);
    spec.db().applied_once(120).await;
}

#[tokio::test]
async fn a_locked_database_holds_up_and_costs_nothing() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("retry.max_attempts", "1");
    let mut worker = spec.start();
    worker.ready().await;
    let lock = spec.db().lock().await;
    broker.publish_numbered(1..=50).await;
    worker.not_ready("database is locked").await;
    // Each refusal takes the busy timeout of 2 s: several times `ack_wait`, as a minute is with the story's 30 s.
    refused_for_long(&broker, &worker, "busy").await;
    eventually("the age of the oldest order is shown", PATIENCE, async || {
        let age = worker.metrics().await.get("oldest_pending_seconds");
        if age > Some(0.0) { Ok(()) } else { Err(age) }
    })
    .await;
    lock.close().await.unwrap();
    broker.acknowledged(50).await;
    worker.ready().await;
    worker.metric("oldest_pending_seconds", 0.0).await;
    worker.drain().await;
    all_went_well(&broker, &spec, 50).await;
}

#[tokio::test]
async fn a_reader_that_stays_makes_the_wal_grow_until_it_ends() {
    const ORDERS: usize = 20_000;
    const LIMIT: f64 = 64.0 * 1024.0 * 1024.0;
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    let mut reader: SqliteConnection = spec.db().open().await;
    sqlx::raw_sql("BEGIN; SELECT count(*) FROM orders").execute(&mut reader).await.unwrap();
    for _ in 0..ORDERS {
        broker.client.publish("ORDERS.new", vec![b'x'; 4_000].into()).await.unwrap();
    }
    let orders = ORDERS as u64;
    broker.acknowledged(orders).await;
    worker.ready().await;
    let wal_bytes = worker.metrics().await.get("wal_bytes");
    assert!(wal_bytes > Some(LIMIT), "the reader pins it: {wal_bytes:?}");
    worker.logged(&["another program keeps a transaction open on the database"]).await;

    reader.close().await.unwrap();
    eventually("the WAL is small again", PATIENCE, async || {
        broker.publish("Order Data").await;
        let wal_bytes = worker.metrics().await.get("wal_bytes");
        if wal_bytes <= Some(LIMIT) { Ok(()) } else { Err(wal_bytes) }
    })
    .await;
    worker.drain().await;
    assert!(spec.db().count("orders").await > ORDERS.try_into().unwrap());
    let ids = spec.db().scalar("SELECT count(DISTINCT id) FROM orders").await;
    assert_eq!(ids, spec.db().count("orders").await);
}

#[tokio::test]
async fn a_deleted_or_replaced_database_is_not_recreated() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", "1h");
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    let kept = spec.folder().join("kept");
    std::fs::hard_link(spec.database(), &kept).unwrap();
    std::fs::remove_file(spec.database()).unwrap();
    broker.publish_numbered(6..=10).await;
    worker.not_ready("removed or replaced").await;
    assert!(!spec.database().exists(), "an empty one would look as if nothing had been processed");

    std::fs::copy(&kept, spec.database()).unwrap();
    refused_for_long(&broker, &worker, "io").await;
    worker.not_ready("removed or replaced").await;
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 5);

    std::fs::rename(&kept, spec.database()).unwrap();
    broker.acknowledged(10).await;
    worker.ready().await;
    worker.drain().await;
    all_went_well(&broker, &spec, 10).await;
}

/// What is written on the Internet against `database is locked`.
#[tokio::test]
async fn a_deleted_wal_costs_nothing_even_if_the_daemon_is_killed() {
    for suffixes in [&["-wal"][..], &["-shm"], &["-wal", "-shm"]] {
        let (server, broker) = Broker::story().await;
        let spec = DaemonSpec::new(server.url());
        let mut worker = spec.start();
        worker.ready().await;
        let delete = || suffixes.iter().for_each(|suffix| std::fs::remove_file(spec.beside(suffix)).unwrap());
        broker.publish_numbered(1..=5).await;
        broker.acknowledged(5).await;
        delete();
        broker.publish_numbered(6..=10).await;
        broker.acknowledged(10).await;
        assert_eq!(worker.lines(&["ERROR", "was deleted while the daemon used it"]), 1, "{}", worker.log());
        // Once more, and no order follows.
        delete();
        eventually("an idle daemon notices it", PATIENCE, async || {
            let lines = worker.lines(&["ERROR", "was deleted while the daemon used it"]);
            if lines == 2 { Ok(()) } else { Err(lines) }
        })
        .await;
        worker.kill9();
        spec.db().applied_once(10).await;
        spec.run_ok(&["run", "--until-idle"]).await;
        let audited = spec.run_ok(&["audit"]).await;
        assert!(audited.stdout.contains("10 processed, 0 dead letters, 0 missing"), "{audited:?}");
    }
}

#[tokio::test]
async fn sigterm_while_the_folder_is_away_ends_it_and_the_next_one_finishes() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url()).set("shutdown.timeout", "1h");
    let folder = spec.folder().join("data");
    let elsewhere = spec.folder().join("elsewhere");
    std::fs::create_dir(&folder).unwrap();
    let spec = spec.set("database.url", format!("sqlite://{}", folder.join("orders.db").display()));
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=5).await;
    broker.acknowledged(5).await;

    std::fs::rename(&folder, &elsewhere).unwrap();
    broker.publish_numbered(6..=10).await;
    worker.not_ready("moved, removed or replaced").await;
    std::fs::rename(&elsewhere, &folder).unwrap();
    broker.acknowledged(10).await;
    worker.ready().await;

    std::fs::rename(&folder, &elsewhere).unwrap();
    broker.publish_numbered(11..=15).await;
    worker.not_ready("moved, removed or replaced").await;
    worker.drain().await;

    std::fs::rename(&elsewhere, &folder).unwrap();
    spec.run_ok(&["run", "--until-idle"]).await;
    std::fs::copy(folder.join("orders.db"), spec.database()).unwrap();
    spec.db().applied_once(15).await;
}

#[tokio::test]
async fn an_export_or_a_backup_that_the_disk_has_no_room_for_leaves_nothing() {
    let Some(disk) = SmallDisk::mount() else { return };
    let (server, broker) = Broker::story().await;
    let spec = disk.spec(server.url()).set("inbox.id_pointer", "/id");
    let mut worker = disk.start(&spec);
    worker.ready().await;
    publish_large(&broker, 30).await;
    broker.acknowledged(30).await;
    worker.drain().await;
    disk.fill();
    // Room for what a reader needs beside the database, and not for what is written here.
    let ballast = File::options().write(true).open(disk.path("ballast")).unwrap();
    ballast.set_len(ballast.metadata().unwrap().len() - 100_000).unwrap();
    for command in [&["dead-letters", "export"][..], &["backup"]] {
        let file = disk.folder.path().join("answer");
        let arguments = [command, &[file.to_str().unwrap()]].concat();
        let output = disk.enter(|through| spec.command_through(through, &arguments)).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && (said.contains("No space left") || said.contains("is full")),
            "{command:?}: {said}"
        );
        let entries = std::fs::read_dir(disk.path("")).unwrap();
        let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(!names.iter().any(|name| name.starts_with("answer")), "{command:?}: {names:?}");
    }
}
