//! A real nats-server on a port of its own with a store of its own, and a client that plays publishers and operators.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use async_nats::jetstream::{self, consumer, stream};
use futures_util::StreamExt;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{NEVER, PATIENCE, equal, eventually, signal};

pub const STREAM: &str = "ORDERS";
pub const CONSUMER: &str = "order-processor";

/// How a server differs from the story's.
#[derive(Default)]
pub struct ServerSpec {
    /// Lines at the top level of the server's configuration, such as `authorization {..}` or `max_payload: 4MB`.
    pub config: String,
    /// Lines inside its `jetstream` block, such as `sync_interval: always`.
    pub jetstream: String,
}

/// A nats-server with JetStream, on loopback. It ends with this value, also when the test panics.
pub struct NatsServer {
    spec: ServerSpec,
    folder: TempDir,
    port: u16,
    child: Child,
}

impl NatsServer {
    pub async fn start() -> Self {
        Self::with(ServerSpec::default()).await
    }

    pub async fn with(spec: ServerSpec) -> Self {
        let folder = TempDir::new().expect("a temporary folder can be made");
        let child = spawn(&spec, folder.path(), None);
        let mut server = Self { spec, folder, port: 0, child };
        server.port = server.wait_until_listening().await;
        server
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Where it keeps streams and consumers.
    pub fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// As a crash of the machine would: nothing is flushed.
    pub fn kill9(&mut self) {
        self.child.kill().expect("the server can be killed");
        self.child.wait().expect("the server can be waited for");
    }

    /// A clean stop.
    pub async fn stop(&mut self) {
        signal(self.child.id(), "TERM");
        let child = &mut self.child;
        eventually("the server has stopped", PATIENCE, async || {
            child.try_wait().expect("the server can be waited for").ok_or("still running")
        })
        .await;
    }

    /// It tells its clients to go elsewhere, and shuts down.
    pub fn lame_duck(&self) {
        signal(self.child.id(), "USR2");
    }

    /// The server keeps its connections and says nothing any more.
    pub fn freeze(&self) {
        signal(self.child.id(), "STOP");
    }

    pub fn thaw(&self) {
        signal(self.child.id(), "CONT");
    }

    /// Starts it again after [`stop`](Self::stop) or [`kill9`](Self::kill9), on the same port and the same store.
    pub async fn restart(&mut self) {
        self.child = spawn(&self.spec, self.folder.path(), Some(self.port));
        let port = self.wait_until_listening().await;
        assert_eq!(port, self.port, "the server came back on its old port");
    }

    /// Lets the running server read another configuration.
    pub fn reload(&mut self, config: &str) {
        self.spec.config = config.to_owned();
        write_config(&self.spec, self.folder.path(), Some(self.port));
        signal(self.child.id(), "HUP");
    }

    /// Stops it and starts it again with another configuration.
    pub async fn reconfigure(&mut self, config: impl Into<String>) {
        self.spec.config = config.into();
        self.stop().await;
        self.restart().await;
    }

    async fn wait_until_listening(&mut self) -> u16 {
        // Named after the server's own file name, whatever that is on this machine.
        let program = binary().file_name().unwrap_or_default().display();
        let ports_file = self.folder.path().join(format!("{program}_{}.ports", self.child.id()));
        let log = self.folder.path().join("server.log");
        let child = &mut self.child;
        eventually("the server listens", PATIENCE, async || {
            if let Ok(Some(status)) = child.try_wait() {
                panic!("nats-server ended with {status}:\n{}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            let text = std::fs::read_to_string(&ports_file).map_err(|error| error.to_string())?;
            let ports: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            let port =
                ports["nats"][0].as_str().and_then(|url| url.rsplit(':').next()).and_then(|port| port.parse().ok());
            port.ok_or(text)
        })
        .await
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        // Both fail only if the server has already gone, which is what we want.
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("server.log")).unwrap_or_default();
            let trouble: Vec<_> = log.lines().filter(|line| !line.contains("[INF]")).collect();
            eprintln!("--- what the nats-server complained of\n{}", trouble.join("\n"));
        }
    }
}

fn spawn(spec: &ServerSpec, folder: &Path, port: Option<u16>) -> Child {
    let file = write_config(spec, folder, port);
    Command::new(binary())
        .arg("--config")
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("nats-server can be started")
}

fn write_config(spec: &ServerSpec, folder: &Path, port: Option<u16>) -> PathBuf {
    let port = port.map_or("-1".to_owned(), |port| port.to_string());
    let place = folder.display();
    // By itself the server allows three quarters of what the disk has left, which may be less than `setup` asks for.
    let config = format!(
        "listen: \"127.0.0.1:{port}\"\nports_file_dir: \"{place}\"\nlog_file: \"{place}/server.log\"\n{}\n\
         jetstream {{\n  store_dir: \"{place}/store\"\n  max_file: 64GB\n  {}\n}}\n",
        spec.config, spec.jetstream
    );
    let file = folder.join("server.conf");
    std::fs::write(&file, config).expect("the server's configuration can be written");
    file
}

/// The script finds one or fetches one, and honours `$NATS_SERVER`.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tools/nats-server.sh");
        let output = Command::new("sh").arg(script).output().expect("sh exists");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim_end().into()
    })
}

/// A client of the server: publishers, operators and their questions.
pub struct Broker {
    pub client: async_nats::Client,
    pub jetstream: jetstream::Context,
}

/// What the server answers to a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PubAck {
    pub stream_seq: u64,
    /// The server's own duplicate window has swallowed it.
    pub duplicate: bool,
}

impl Broker {
    pub async fn connect(server: &NatsServer) -> Self {
        Self::connect_with(server, async_nats::ConnectOptions::new()).await
    }

    pub async fn connect_with(server: &NatsServer, options: async_nats::ConnectOptions) -> Self {
        let client = options.connect(server.url()).await.expect("the server lets the test in");
        Self { jetstream: jetstream::new(client.clone()), client }
    }

    /// A server of its own with the stream and the consumer of the story, and a client of it: how most tests begin.
    pub async fn story() -> (NatsServer, Self) {
        Self::with(consumer_config()).await
    }

    /// As [`story`](Self::story), with a consumer that differs.
    pub async fn with(consumer: consumer::pull::Config) -> (NatsServer, Self) {
        let server = NatsServer::start().await;
        let broker = Self::connect(&server).await;
        broker.create(stream_config(), consumer).await;
        (server, broker)
    }

    /// As [`with`](Self::with), on a server where who does not log in, as the daemon here, may publish only as this
    /// says, such as `allow: ["$JS.API.>"], deny: [..]`.
    pub async fn with_restricted_worker(publish: &str, consumer: consumer::pull::Config) -> (NatsServer, Self) {
        let server = NatsServer::with(ServerSpec { config: restricted_worker(publish), ..ServerSpec::default() }).await;
        let options = async_nats::ConnectOptions::with_user_and_password("admin".into(), "admin".into());
        let broker = Self::connect_with(&server, options).await;
        broker.create(stream_config(), consumer).await;
        (server, broker)
    }

    pub async fn create(&self, stream: stream::Config, consumer: consumer::pull::Config) {
        self.jetstream.create_stream(stream).await.expect("the stream can be created");
        self.create_consumer(consumer).await;
    }

    pub async fn create_consumer(&self, config: consumer::pull::Config) {
        self.jetstream.create_consumer_on_stream(config, STREAM).await.expect("the consumer can be created");
    }

    pub async fn create_push_consumer(&self, config: consumer::push::Config) {
        self.jetstream.create_consumer_on_stream(config, STREAM).await.expect("the push consumer can be created");
    }

    /// What `nats consumer edit` does.
    pub async fn edit_consumer(&self, config: consumer::pull::Config) {
        self.jetstream.update_consumer_on_stream(config, STREAM).await.expect("the consumer can be edited");
    }

    /// What `nats consumer pause` does.
    pub async fn pause_consumer(&self, lasting: Duration) {
        let stream = self.jetstream.get_stream(STREAM).await.expect("the stream exists");
        let paused = stream.pause_consumer(CONSUMER, (SystemTime::now() + lasting).into()).await;
        assert!(paused.expect("the consumer can be paused").paused);
    }

    /// What `nats consumer resume` does.
    pub async fn resume_consumer(&self) {
        let stream = self.jetstream.get_stream(STREAM).await.expect("the stream exists");
        stream.resume_consumer(CONSUMER).await.expect("the consumer can be resumed");
    }

    /// Takes the next message, as another worker would have it.
    pub async fn take_one(&self) -> jetstream::Message {
        let consumer: consumer::PullConsumer =
            self.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.expect("the consumer exists");
        let mut messages =
            consumer.batch().max_messages(1).expires(PATIENCE).messages().await.expect("it can be asked");
        messages.next().await.expect("a message is pending").expect("it can be read")
    }

    /// What `nats stream purge` does.
    pub async fn purge(&self) {
        self.jetstream.get_stream(STREAM).await.expect("the stream exists").purge().await.expect("it can be purged");
    }

    pub async fn delete_stream(&self) {
        self.jetstream.delete_stream(STREAM).await.expect("the stream can be deleted");
    }

    pub async fn delete_consumer(&self) {
        self.jetstream.delete_consumer_from_stream(CONSUMER, STREAM).await.expect("the consumer can be deleted");
    }

    /// Plain text on `ORDERS.new` without headers, as the story's publisher does it.
    pub async fn publish(&self, text: impl Into<String>) -> PubAck {
        self.publish_to("ORDERS.new", HeaderMap::new(), text.into().into_bytes()).await
    }

    /// `Order Data <number>` for each of the numbers.
    pub async fn publish_numbered(&self, numbers: std::ops::RangeInclusive<u64>) {
        // The client lets 5,000 receipts be open and then waits for one to be taken.
        const IN_FLIGHT: usize = 1000;
        let numbers: Vec<u64> = numbers.collect();
        for some in numbers.chunks(IN_FLIGHT) {
            let mut receipts = Vec::with_capacity(some.len());
            for number in some {
                let payload = format!("Order Data {number}");
                let publish = self.jetstream.publish("ORDERS.new", payload.into());
                receipts.push(publish.await.expect("the client takes a message"));
            }
            for receipt in receipts {
                receipt.await.expect("the stream takes a message");
            }
        }
    }

    pub async fn publish_to(&self, subject: &str, headers: HeaderMap, payload: Vec<u8>) -> PubAck {
        let publish = self.jetstream.publish_with_headers(subject.to_owned(), headers, payload.into());
        let receipt = publish.await.expect("the client takes a message").await.expect("the stream takes a message");
        PubAck { stream_seq: receipt.sequence, duplicate: receipt.duplicate }
    }

    /// Publishes past the server's duplicate window: again and again until the stream stores it as a message of its own.
    pub async fn publish_anew(&self, subject: &str, headers: HeaderMap, payload: Vec<u8>) -> PubAck {
        eventually("the duplicate window is over", PATIENCE, async || {
            let stored = self.publish_to(subject, headers.clone(), payload.clone()).await;
            if stored.duplicate { Err(stored) } else { Ok(stored) }
        })
        .await
    }

    pub async fn consumer_info(&self) -> consumer::Info {
        self.try_consumer_info().await.expect("the consumer exists")
    }

    pub async fn try_consumer_info(&self) -> Result<consumer::Info, String> {
        let consumer: consumer::Consumer<consumer::pull::Config> =
            self.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.map_err(|error| error.to_string())?;
        Ok(consumer.cached_info().clone())
    }

    pub async fn stream_info(&self) -> stream::Info {
        self.jetstream.get_stream(STREAM).await.expect("the stream exists").cached_info().clone()
    }

    /// Waits until everything up to `stream_seq` is acknowledged and nothing is on its way.
    pub async fn acknowledged(&self, stream_seq: u64) {
        let what = format!("the ack floor is {stream_seq} and nothing is pending");
        eventually(&what, PATIENCE, async || {
            let info = self.try_consumer_info().await.map_err(|error| (0, 0, error))?;
            let seen = (info.ack_floor.stream_sequence, info.num_ack_pending, info.num_pending.to_string());
            equal(seen, (stream_seq, 0, "0".to_owned()))
        })
        .await;
    }
}

/// The server's configuration for [`Broker::with_restricted_worker`].
pub fn restricted_worker(publish: &str) -> String {
    format!(
        "authorization {{\n  users: [\n    {{user: admin, password: admin}}\n    {{user: worker, password: worker, permissions: {{\n      \
         publish: {{{publish}}}, subscribe: [\"_INBOX.>\"]}}}}\n  ]\n}}\nno_auth_user: worker"
    )
}

/// The stream of the story: `--subjects="ORDERS.*" --retention=limits --storage=file`, with limits.
pub fn stream_config() -> stream::Config {
    stream::Config {
        name: STREAM.into(),
        subjects: vec!["ORDERS.*".into()],
        retention: stream::RetentionPolicy::Limits,
        storage: stream::StorageType::File,
        max_bytes: 256 * 1024 * 1024,
        ..Default::default()
    }
}

/// The consumer of the story: `--ack explicit --ack-wait=30s`, pull.
pub fn consumer_config() -> consumer::pull::Config {
    consumer::pull::Config {
        durable_name: Some(CONSUMER.into()),
        ack_policy: consumer::AckPolicy::Explicit,
        ack_wait: Duration::from_secs(30),
        ..Default::default()
    }
}

/// A consumer that delivers again what is not kept alive, after the shortest time that the start gate allows.
pub fn impatient_consumer_config() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: Duration::from_secs(1), ..consumer_config() }
}

/// A consumer that never delivers a message again by itself: only because somebody handed it back.
pub fn patient_consumer_config() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: NEVER, ..consumer_config() }
}

pub fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, *value);
    }
    headers
}

/// Speaks the protocol by hand, because no client would send such a header.
pub async fn publish_raw(server: &NatsServer, header: &[u8], payload: &[u8]) {
    publish_raw_to("ORDERS.new", server, header, payload).await;
}

pub async fn publish_raw_to(subject: &str, server: &NatsServer, header: &[u8], payload: &[u8]) {
    let block = [b"NATS/1.0\r\n", header, b"\r\n\r\n"].concat();
    let total = block.len() + payload.len();
    let start = format!("CONNECT {{\"verbose\":false,\"headers\":true}}\r\nHPUB {subject} {} {total}\r\n", block.len());
    let bytes = [start.as_bytes(), &block, payload, b"\r\nPING\r\n"].concat();
    let mut stream = TcpStream::connect(server.address()).await.unwrap();
    stream.write_all(&bytes).await.unwrap();
    let mut answer = String::new();
    while !answer.contains("PONG") {
        let mut buffer = [0; 4096];
        let length = stream.read(&mut buffer).await.unwrap();
        assert_ne!(length, 0, "the server closed the connection: {answer}");
        answer += &String::from_utf8_lossy(&buffer[..length]);
        assert!(!answer.contains("-ERR"), "{answer}");
    }
}
