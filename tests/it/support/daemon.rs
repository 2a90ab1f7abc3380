//! The real process with a folder, a database file and an HTTP port of its own, and what can be seen of it from outside.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper_util::rt::TokioIo;
use sqlx::sqlite::{SqliteConnectOptions, SqliteRow};
use sqlx::{ConnectOptions, Connection, Row, SqliteConnection};
use tempfile::TempDir;
use tokio::net::TcpStream;

use super::{PATIENCE, equal, eventually, free_port, signal};

/// Where a daemon runs and with which settings. One spec can start many daemons, one after the other: restarts.
pub struct DaemonSpec {
    folder: TempDir,
    http_port: u16,
    environment: BTreeMap<String, OsString>,
}

impl DaemonSpec {
    /// Settings that point at this server, a fresh database and a free HTTP port.
    pub fn new(nats_url: impl Into<String>) -> Self {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let http_port = free_port();
        let spec = Self { folder, http_port, environment: BTreeMap::new() };
        let database = format!("sqlite://{}", spec.database().display());
        spec.set("nats.url", nats_url.into())
            .set("database.url", database)
            .set("http.listen", format!("127.0.0.1:{http_port}"))
    }

    /// Sets a setting such as `retry.min_delay` through its environment variable.
    pub fn set(mut self, key: &str, value: impl Into<OsString>) -> Self {
        self.change(key, value);
        self
    }

    /// As [`set`](Self::set), between two daemons.
    pub fn change(&mut self, key: &str, value: impl Into<OsString>) {
        self.environment.insert(variable(key), value.into());
    }

    /// Leaves a setting to its default.
    pub fn unset(mut self, key: &str) -> Self {
        self.environment.remove(&variable(key));
        self
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn database(&self) -> PathBuf {
        self.folder.path().join("orders.db")
    }

    pub fn db(&self) -> Db {
        Db::at(self.database())
    }

    /// A file next to the database, such as `orders.db-wal`.
    pub fn beside(&self, suffix: &str) -> PathBuf {
        PathBuf::from(format!("{}{suffix}", self.database().display()))
    }

    /// The settings as variables.
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        self.environment.iter().map(|(name, value)| (name.into(), value.clone())).collect()
    }

    /// Starts `order-processor run`.
    pub fn start(&self) -> Daemon {
        self.start_with(&["run"])
    }

    pub fn start_with(&self, arguments: &[&str]) -> Daemon {
        self.spawn(self.command(arguments), None)
    }

    /// As [`start_with`](Self::start_with), with a [`command`](Self::command) that differs.
    /// `log`: a stream in the place of the log file.
    pub fn spawn(&self, mut command: Command, log: Option<Stdio>) -> Daemon {
        let place = self.folder.path();
        let log_file =
            (1..).map(|n| place.join(format!("stderr-{n}.log"))).find(|file| !file.exists()).expect("endless");
        let stderr = File::create(&log_file).expect("the log file can be created");
        let stdout = File::create(log_file.with_extension("out")).expect("the output file can be created");
        let child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(log.unwrap_or_else(|| stderr.into()))
            .spawn()
            .expect("the daemon's binary can be started");
        Daemon { child, log_file, http_port: self.http_port }
    }

    /// Runs a command such as `status --json` to its end.
    pub async fn run(&self, arguments: &[&str]) -> Finished {
        let mut daemon = self.start_with(arguments);
        daemon.wait_exit(PATIENCE).await;
        daemon.finished()
    }

    /// As [`run`](Self::run), for a command that must succeed.
    pub async fn run_ok(&self, arguments: &[&str]) -> Finished {
        let finished = self.run(arguments).await;
        assert_eq!(finished.code, Some(0), "{arguments:?}: {finished:?}");
        finished
    }

    /// As [`run`](Self::run), as a user who owns nothing. `None`, and it says so, where we may not become one.
    pub async fn run_as_nobody(&self, arguments: &[&str]) -> Option<Finished> {
        const NOBODY: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
        let tried = self.command_through(&NOBODY, &["--version"]).output();
        if !tried.is_ok_and(|tried| tried.status.success()) {
            eprintln!("NOT TESTED: nobody can be put on here, or may not run the binary; it takes root and setpriv");
            return None;
        }
        let mut daemon = self.spawn(self.command_through(&NOBODY, arguments), None);
        daemon.wait_exit(PATIENCE).await;
        Some(daemon.finished())
    }

    /// The binary with only our environment, so that the developer's own settings do not leak into a test.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.command_through(&[], arguments)
    }

    /// The same, run by a program such as `nsenter` that becomes the daemon.
    pub fn command_through(&self, through: &[&str], arguments: &[&str]) -> Command {
        let mut words = through.to_vec();
        words.push(env!("CARGO_BIN_EXE_order-processor"));
        words.extend(arguments);
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(self.folder.path()).env_clear().envs(&self.environment);
        command
    }
}

/// `retry.min_delay` -> `ORDER_PROCESSOR__RETRY__MIN_DELAY`
fn variable(key: &str) -> String {
    format!("ORDER_PROCESSOR__{}", key.replace('.', "__").to_uppercase())
}

/// A command that has ended.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// What it says was wrong: the errors in its log, and lines that are no log.
    pub fn complaints(&self) -> Vec<String> {
        let complaint = |line: &str| match serde_json::from_str::<serde_json::Value>(line) {
            Ok(entry) if entry["level"] == "ERROR" => Some(entry["message"].as_str().unwrap_or(line).to_owned()),
            Ok(_) => None,
            Err(_) => Some(line.to_owned()),
        };
        self.stderr.lines().filter_map(complaint).collect()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

/// A running process. It is killed with this value, and its log is shown if the test panics.
pub struct Daemon {
    child: Child,
    log_file: PathBuf,
    http_port: u16,
}

/// A strace on a daemon. What it injects ends with it.
pub struct Tracer {
    child: Child,
}

impl Tracer {
    /// Lets the daemon go on undisturbed.
    pub async fn detach(mut self) {
        super::signal(self.child.id(), "INT");
        eventually("strace has ended", PATIENCE, async || {
            self.child.try_wait().expect("strace can be waited for").ok_or("still running")
        })
        .await;
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // Both fail only if it has ended already, which is what we want.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn http_address(&self) -> String {
        format!("127.0.0.1:{}", self.http_port)
    }

    /// Attaches strace, which injects faults into system calls; `None` where it is not installed.
    pub async fn trace(&self, expressions: &[&str]) -> Option<Tracer> {
        let stderr = tempfile::NamedTempFile::new().expect("a temporary file");
        let mut command = Command::new("strace");
        command.args(["-f", "-o", "/dev/null"]).args(expressions).args(["-p", &self.pid().to_string()]);
        command.stdin(Stdio::null()).stderr(stderr.reopen().expect("it can be opened again"));
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            Err(error) => panic!("strace cannot be started: {error}"),
        };
        let tracer = Tracer { child };
        eventually("strace is attached", PATIENCE, async || {
            let said = std::fs::read_to_string(stderr.path()).expect("its stderr is kept");
            if said.contains("attached") { Ok(()) } else { Err(said) }
        })
        .await;
        Some(tracer)
    }

    /// Waits until `/readyz` says 200.
    pub async fn ready(&mut self) {
        eventually("the daemon is ready", PATIENCE, async || {
            if let Some(status) = self.exited() {
                panic!("the daemon ended with {status} before it was ready");
            }
            self.try_get("/readyz").await.and_then(|(status, body)| equal(status, 200).map_err(|_| body))
        })
        .await;
    }

    pub fn term(&self) {
        signal(self.child.id(), "TERM");
    }

    pub fn send_signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// SIGSTOP: it keeps what it holds, and does nothing.
    pub fn freeze(&self) {
        signal(self.child.id(), "STOP");
    }

    pub fn thaw(&self) {
        signal(self.child.id(), "CONT");
    }

    pub fn kill9(&mut self) {
        self.child.kill().expect("the daemon can be killed");
        self.child.wait().expect("the daemon can be waited for");
    }

    /// The exit status, if it has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the daemon can be waited for")
    }

    /// What a command that has ended printed.
    pub fn finished(&mut self) -> Finished {
        let status = self.exited().expect("it has ended");
        let stdout = std::fs::read_to_string(self.log_file.with_extension("out")).expect("the output is text");
        Finished { code: status.code(), stdout, stderr: self.log() }
    }

    pub async fn wait_exit(&mut self, timeout: Duration) -> ExitStatus {
        eventually("the process has ended", timeout, async || self.exited().ok_or("still running")).await
    }

    /// SIGTERM, and the clean end that must follow.
    pub async fn drain(&mut self) {
        self.term();
        let status = self.wait_exit(PATIENCE).await;
        assert_eq!(status.code(), Some(0), "exit code after SIGTERM");
    }

    /// Everything on stderr so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log_file).expect("the log file exists")).into_owned()
    }

    /// Everything on stdout so far.
    pub fn printed(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log_file.with_extension("out")).expect("it exists")).into_owned()
    }

    /// How many lines of the log have all these words.
    pub fn lines(&self, words: &[&str]) -> usize {
        self.log().lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
    }

    /// Waits until the log contains all of these on one line.
    pub async fn logged(&self, words: &[&str]) {
        eventually(&format!("a log line with {words:?}"), PATIENCE, async || {
            if self.lines(words) > 0 { Ok(()) } else { Err(self.log()) }
        })
        .await;
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        self.try_get(path).await.unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    pub async fn try_get(&self, path: &str) -> Result<(u16, String), String> {
        self.get_with_type(path).await.map(|(status, _, body)| (status, body))
    }

    /// Status, content type and body.
    pub async fn get_with_type(&self, path: &str) -> Result<(u16, String, String), String> {
        let say = |error: &dyn std::fmt::Display| error.to_string();
        let stream = TcpStream::connect(("127.0.0.1", self.http_port)).await.map_err(|error| say(&error))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| say(&error))?;
        let connection = tokio::spawn(connection);
        let request = Request::get(path).header("host", "localhost").body(Empty::<Bytes>::new());
        let response = sender.send_request(request.expect("the path is a path")).await.map_err(|error| say(&error))?;
        let status = response.status().as_u16();
        let content_type =
            response.headers().get("content-type").and_then(|value| value.to_str().ok()).unwrap_or("").into();
        let body = response.into_body().collect().await.map_err(|error| say(&error))?.to_bytes();
        connection.abort();
        Ok((status, content_type, String::from_utf8_lossy(&body).into_owned()))
    }

    /// Every sample of `/metrics`, by its name with labels as written there.
    pub async fn metrics(&self) -> Metrics {
        self.try_metrics().await.unwrap_or_else(|error| panic!("GET /metrics: {error}"))
    }

    pub async fn try_metrics(&self) -> Result<Metrics, String> {
        let (status, body) = self.try_get("/metrics").await?;
        if status == 200 { Ok(Metrics::parse(&body)) } else { Err(body) }
    }

    /// Waits until a metric has this value.
    pub async fn metric(&self, name: &str, value: f64) {
        eventually(&format!("{name} = {value}"), PATIENCE, async || equal(self.metrics().await.get(name), Some(value)))
            .await;
    }

    /// Waits until `/readyz` says 503 and its body has this word.
    pub async fn not_ready(&self, because: &str) {
        eventually(&format!("not ready, because {because}"), PATIENCE, async || {
            let (status, body) = self.try_get("/readyz").await.map_err(|error| (0, error))?;
            if status == 503 && body.contains(because) { Ok(()) } else { Err((status, body)) }
        })
        .await;
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Both fail only if the daemon has already gone, which is what we want.
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}", self.log());
        }
    }
}

/// Samples of one scrape. `order_processor_` is left out of the names asked for.
pub struct Metrics(pub BTreeMap<String, f64>);

impl Metrics {
    fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
            (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("no value: {line}")))
        });
        Self(samples.collect())
    }

    /// Over all values of its label.
    pub fn sum(&self, name: &str) -> f64 {
        let series = format!("order_processor_{name}{{");
        self.0.iter().filter(|(name, _)| name.starts_with(&series)).map(|(_, value)| value).sum()
    }

    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(&format!("order_processor_{name}")).copied()
    }
}

/// The database file, read behind the daemon's back: each question opens and closes a connection of its own.
#[derive(Clone)]
pub struct Db {
    file: PathBuf,
}

impl Db {
    pub async fn open(&self) -> SqliteConnection {
        self.try_open(true).await.unwrap_or_else(|error| panic!("{}: {error}", self.file.display()))
    }

    /// One that no daemon of this test need have made.
    pub fn at(file: PathBuf) -> Self {
        Self { file }
    }

    /// What an operator does by hand: statements that return nothing.
    pub async fn execute(&self, sql: &str) {
        let mut writer = self.open_to_write().await;
        let done = sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&mut writer).await;
        done.unwrap_or_else(|error| panic!("{sql}: {error}"));
        writer.close().await.expect("a connection without a transaction can be closed");
    }

    /// A connection that may write: for tests that stand in the daemon's way.
    pub async fn open_to_write(&self) -> SqliteConnection {
        self.try_open(false).await.unwrap_or_else(|error| panic!("{}: {error}", self.file.display()))
    }

    /// Somebody else writes the database, for as long as this connection lives.
    pub async fn lock(&self) -> SqliteConnection {
        let mut writer = self.open_to_write().await;
        sqlx::query("BEGIN IMMEDIATE").execute(&mut writer).await.expect("the database is not locked already");
        writer
    }

    async fn try_open(&self, read_only: bool) -> sqlx::Result<SqliteConnection> {
        let options = SqliteConnectOptions::new().filename(&self.file).read_only(read_only).busy_timeout(PATIENCE);
        options.connect().await
    }

    /// The rows of a table; 0 while there is no database or no table yet.
    pub async fn count(&self, table: &str) -> i64 {
        if !self.file.exists() {
            return 0;
        }
        let exists = self.scalar(&format!("SELECT count(*) FROM sqlite_schema WHERE name = '{table}'")).await;
        if exists == 0 { 0 } else { self.scalar(&format!("SELECT count(*) FROM {table}")).await }
    }

    /// One number.
    pub async fn scalar(&self, sql: &str) -> i64 {
        let rows = self.rows(sql).await;
        rows.first().unwrap_or_else(|| panic!("no row: {sql}")).get(0)
    }

    /// One column of text.
    pub async fn texts(&self, sql: &str) -> Vec<String> {
        self.rows(sql).await.iter().map(|row| row.get(0)).collect()
    }

    pub async fn rows(&self, sql: &str) -> Vec<SqliteRow> {
        let mut connection = self.open().await;
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql.to_owned())).fetch_all(&mut connection).await;
        let rows = rows.unwrap_or_else(|error| panic!("{sql}: {error}"));
        connection.close().await.expect("a read-only connection can be closed");
        rows
    }

    /// Waits until a table has this many rows.
    pub async fn has(&self, table: &str, rows: i64) {
        eventually(&format!("{rows} rows in {table}"), PATIENCE, async || equal(self.count(table).await, rows)).await;
    }

    /// Every order once: as many rows as ids, and no id twice.
    pub async fn applied_once(&self, orders: i64) {
        assert_eq!(self.count("orders").await, orders, "rows in orders");
        assert_eq!(self.scalar("SELECT count(DISTINCT id) FROM orders").await, orders, "different ids in orders");
        assert_eq!(self.count("dead_letters").await, 0, "dead letters");
    }
}
