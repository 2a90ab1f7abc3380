//! What people who run JetStream consumers report: raised limits, pulls of others, gossiped addresses, connections that do not last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream::{self, consumer};
use futures_util::StreamExt;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::support::keys::Authority;
use crate::support::nats::{consumer_config, patient_consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, ServerSpec, eventually};

const MSG_NEXT: &str = "$JS.API.CONSUMER.MSG.NEXT.ORDERS.order-processor";

/// A port in front of the server that can announce other servers, as a cluster does, and that can be away.
struct Front {
    port: u16,
    mode: watch::Sender<Mode>,
    accepted: Arc<AtomicU64>,
    accepting: JoinHandle<()>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Open,
    /// Every connection is closed, and a new one immediately.
    Down,
    /// Every connection is closed just after the login.
    ShortLived,
}

impl Front {
    async fn start(upstream: String, announced: Vec<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, modes) = watch::channel(Mode::Open);
        let accepted = Arc::new(AtomicU64::new(0));
        let counter = accepted.clone();
        let accepting = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, Ordering::Relaxed);
                let (upstream, announced, mut modes) = (upstream.clone(), announced.clone(), modes.clone());
                tokio::spawn(async move {
                    let born_in = *modes.borrow_and_update();
                    let closed = async {
                        match born_in {
                            Mode::Open => drop(modes.changed().await),
                            Mode::Down => {}
                            Mode::ShortLived => tokio::time::sleep(Duration::from_millis(30)).await,
                        }
                    };
                    tokio::select! {
                        biased;
                        () = closed => {}
                        () = forward(client, upstream, announced) => {}
                    }
                });
            }
        });
        Self { port, mode, accepted, accepting }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.accepting.abort();
        self.set(Mode::Down);
    }
}

/// Forwards both directions, and puts the announced servers into the first line of the server.
async fn forward(mut client: TcpStream, upstream: String, announced: Vec<String>) {
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    let mut server = BufReader::new(server);
    let mut info = String::new();
    if server.read_line(&mut info).await.is_err() {
        return;
    }
    let mut json: serde_json::Value = serde_json::from_str(info.trim_start_matches("INFO ")).unwrap();
    json["connect_urls"] = announced.into();
    if client.write_all(format!("INFO {json}\r\n").as_bytes()).await.is_ok() {
        // It ends with either side.
        drop(copy_bidirectional(&mut client, &mut server).await);
    }
}

#[tokio::test]
async fn an_order_beyond_the_max_payload_at_the_connect_arrives_after_a_reload() {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;

    server.reload("max_payload: 32MB");
    let raised = eventually("the limit is raised", PATIENCE, async || {
        let broker = Broker::connect(&server).await;
        let max_payload = broker.client.server_info().max_payload;
        if max_payload == 32 * 1024 * 1024 { Ok(broker) } else { Err(max_payload) }
    })
    .await;
    raised.publish("x".repeat(20 * 1024 * 1024)).await;
    raised.publish("Order Data 3").await;
    raised.acknowledged(3).await;
    worker.logged(&["the next message is larger than the pull allowed"]).await;
    worker.drain().await;
    spec.db().applied_once(3).await;
}

#[tokio::test]
async fn pulls_that_others_keep_from_us_are_named_with_the_status_of_the_server() {
    let (server, broker) = Broker::with(consumer::pull::Config { max_waiting: 1, ..consumer_config() }).await;
    let inbox = broker.client.new_inbox();
    let mut other = broker.client.subscribe(inbox.clone()).await.unwrap();
    broker.client.publish_with_reply(MSG_NEXT, inbox, r#"{"batch":10,"expires":3600000000000}"#.into()).await.unwrap();
    eventually("the other pull waits", PATIENCE, async || {
        let waiting = broker.consumer_info().await.num_waiting;
        if waiting == 1 { Ok(()) } else { Err(waiting) }
    })
    .await;

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.not_ready("pulls: the server ended a pull: 409 Exceeded MaxWaiting; other clients").await;
    // It stays so, although the daemon binds again and again, and not in a hot loop.
    let rebinds = || worker.log().matches("bound to the consumer").count();
    let before = rebinds();
    let mut seen = Vec::new();
    for _ in 0..30 {
        seen.push(worker.get("/readyz").await.0);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(seen.iter().all(|status| *status == 503), "{seen:?}");
    assert!(rebinds() - before < 15, "{} bindings in 3 s", rebinds() - before);

    other.unsubscribe().await.unwrap();
    broker.client.flush().await.unwrap();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn orders_that_another_client_blocks_by_max_ack_pending_are_not_ready() {
    let (server, broker) =
        Broker::with(consumer::pull::Config { max_ack_pending: 1, ..patient_consumer_config() }).await;
    broker.publish_numbered(1..=3).await;
    let inbox = broker.client.new_inbox();
    let mut other = broker.client.subscribe(inbox.clone()).await.unwrap();
    broker.client.publish_with_reply(MSG_NEXT, inbox, r#"{"batch":1,"expires":60000000000}"#.into()).await.unwrap();
    let held = other.next().await.unwrap();

    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.not_ready("max_ack_pending 1 is used up by deliveries that this daemon does not hold").await;
    worker.logged(&["WARN", "the server delivers no messages"]).await;

    broker.client.publish(held.reply.unwrap(), "-NAK".into()).await.unwrap();
    broker.acknowledged(3).await;
    worker.ready().await;
    worker.drain().await;
    spec.db().applied_once(3).await;
}

#[tokio::test]
async fn an_order_beyond_the_byte_limit_of_the_consumer_is_not_ready() {
    let (server, broker) = Broker::with(consumer::pull::Config { max_bytes: 2000, ..consumer_config() }).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    broker.publish("x".repeat(3000)).await;
    broker.publish("Order Data 3").await;
    worker.not_ready("the next message is larger than 2000 bytes").await;
    worker.not_ready("order-processor setup --update --unset max-request-bytes").await;
    spec.run_ok(&["setup", "--update", "--unset", "max-request-bytes"]).await;
    broker.acknowledged(3).await;
    worker.ready().await;
    worker.drain().await;
    spec.db().applied_once(3).await;
}

#[tokio::test]
async fn a_limit_of_subscriptions_is_named_by_the_daemon_and_by_check() {
    let config = "max_subscriptions: 2".to_owned();
    let server = NatsServer::with(ServerSpec { config, ..ServerSpec::default() }).await;
    let broker = Broker::connect(&server).await;
    broker.create(stream_config(), consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    let words = "the server refuses a subscription: maximum subscriptions exceeded; the daemon needs 3";
    assert!(checked.stdout.contains(words), "{checked:?}");
    let mut worker = spec.start();
    worker.not_ready(words).await;
    worker.logged(&["ERROR", words]).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_connection_that_is_closed_after_each_login_is_not_made_in_a_hot_loop() {
    let (server, broker) = Broker::story().await;
    let front = Front::start(server.address(), Vec::new()).await;
    let spec = DaemonSpec::new(format!("nats://127.0.0.1:{}", front.port));
    let mut worker = spec.start();
    worker.ready().await;
    front.set(Mode::ShortLived);
    let before = front.accepted.load(Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let connects = front.accepted.load(Ordering::Relaxed) - before;
    assert!((1..=15).contains(&connects), "{connects} connects in 5 s");
    front.set(Mode::Open);
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn silent_addresses_of_a_cluster_cost_seconds_and_not_half_a_minute() {
    let (server, broker) = Broker::story().await;
    let silent: Vec<_> = (0..6).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let announced = silent.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    let front = Front::start(server.address(), announced).await;
    let spec = DaemonSpec::new(format!("nats://127.0.0.1:{}", front.port));
    let mut worker = spec.start();
    worker.ready().await;
    front.set(Mode::Down);
    worker.not_ready("nats:").await;
    broker.publish("Order Data 1").await;
    front.set(Mode::Open);
    eventually("the daemon is back", Duration::from_secs(15), async || {
        let (status, body) = worker.try_get("/readyz").await?;
        if status == 200 { Ok(()) } else { Err(body) }
    })
    .await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

/// A server whose certificate is valid for this name only.
async fn tls_server(authority: &Authority, name: &str) -> NatsServer {
    let certificate = authority.issue_for(&format!("server-{name}"), name, 4000);
    let (cert, key) = (certificate.cert.display().to_string(), certificate.key.display().to_string());
    let config = format!("tls {{\n  cert_file: {cert:?}\n  key_file: {key:?}\n}}\n");
    NatsServer::with(ServerSpec { config, ..ServerSpec::default() }).await
}

/// A server of that kind with the stream and the consumer of the story.
async fn tls_story(authority: &Authority) -> (NatsServer, Broker) {
    let server = tls_server(authority, "localhost").await;
    let options = ConnectOptions::new().add_root_certificates(authority.ca());
    let client = options.connect(by_name(&server.address())).await.unwrap();
    let broker = Broker { jetstream: jetstream::new(client.clone()), client };
    broker.create(stream_config(), consumer_config()).await;
    (server, broker)
}

fn by_name(address: &str) -> String {
    format!("tls://localhost:{}", address.rsplit(':').next().unwrap())
}

#[tokio::test]
async fn a_gossiped_address_may_have_a_certificate_for_a_configured_name() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (server, broker) = tls_story(&ours).await;
    let address = server.address();
    let front = Front::start(address.clone(), vec![address.clone(), "127.0.0.1:1".to_owned()]).await;
    let spec = DaemonSpec::new(by_name(&front.address())).set("nats.tls.ca_file", ours.ca());
    let mut worker = spec.start();
    worker.ready().await;
    // The names are told before a fail-over needs them.
    let words = "nats.url names 1 of the 2 servers of the cluster, and the cluster announces 127.0.0.1:1, ";
    let accepted = "the certificate of each must be valid for its address or localhost";
    worker.logged(&["INFO", words, accepted]).await;
    let checked = spec.run(&["check"]).await;
    assert!(checked.stdout.contains(words), "{checked:?}");

    front.set(Mode::Down);
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.ready().await;
    worker.drain().await;
    spec.db().applied_once(1).await;
}

#[tokio::test]
async fn gossiped_addresses_with_other_certificates_are_refused_and_named() {
    let folder = TempDir::new().unwrap();
    let (ours, theirs) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "theirs"));
    let (server, broker) = tls_story(&ours).await;
    let other_name = tls_server(&ours, "other.example").await;
    let other_authority = tls_server(&theirs, "localhost").await;
    let announced = vec![other_name.address(), other_authority.address()];
    let front = Front::start(server.address(), announced).await;
    let spec = DaemonSpec::new(by_name(&front.address())).set("nats.tls.ca_file", ours.ca());
    let mut worker = spec.start();
    worker.ready().await;
    front.set(Mode::Down);
    let words = format!("the cluster announces {} by address", other_name.address());
    worker.not_ready(&words).await;
    worker.not_ready("valid for its address or localhost; add the DNS name of each server to nats.url").await;
    worker.logged(&["WARN", &words]).await;
    // Both were tried by then, again and again.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(worker.lines(&["connected to the server"]), 1, "{}", worker.log());

    front.set(Mode::Open);
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_configured_address_needs_a_certificate_for_this_address() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (server, _broker) = tls_story(&ours).await;
    // The second server is named, so its name is accepted for announced addresses, and only for these.
    let url = format!("tls://{},tls://localhost:1", server.address());
    let checked = DaemonSpec::new(url).set("nats.tls.ca_file", ours.ca()).run(&["check"]).await;
    assert!(checked.stdout.contains("FAIL  connection"), "{checked:?}");
    let alone = DaemonSpec::new(format!("tls://{}", server.address())).set("nats.tls.ca_file", ours.ca());
    let checked = alone.run(&["check"]).await;
    assert!(checked.stdout.contains("FAIL  connection"), "{checked:?}");
    assert!(checked.stdout.contains("the certificate of the server is not valid"), "{checked:?}");
}

#[tokio::test]
async fn damaged_certificates_of_the_system_do_not_matter_with_a_ca_file() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (server, broker) = tls_story(&ours).await;
    let spec = DaemonSpec::new(by_name(&server.address())).set("nats.tls.ca_file", ours.ca());
    let mut command = spec.command(&["run"]);
    command.env("SSL_CERT_FILE", folder.path().join("missing.pem"));
    let mut worker = spec.spawn(command, None);
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_daemon_goes_back_to_the_server_that_has_the_stream() {
    let (mut server, broker) = Broker::story().await;
    let other = NatsServer::start().await;
    let spec = DaemonSpec::new(format!("{},{}", server.url(), other.url()));
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;

    server.stop().await;
    let port = other.address().rsplit_once(':').unwrap().1.to_owned();
    let cause = format!("(port {port}): it was deleted, or it is on another server of nats.url or in another account");
    worker.logged(&["stream ORDERS existed when the daemon was bound", &cause]).await;
    worker.not_ready("would create a second, empty stream").await;
    server.restart().await;
    worker.ready().await;
    let broker = Broker::connect(&server).await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    worker.drain().await;
    spec.db().applied_once(2).await;
}

#[tokio::test]
async fn a_stream_in_another_account_is_not_created_a_second_time() {
    let config = |user: &str| {
        let account = |name: &str| format!("{name}: {{ jetstream: enabled, users: [{{user: {name}, password: x}}] }}");
        format!("accounts {{ {}, {} }}\nno_auth_user: {user}", account("shop"), account("other"))
    };
    let mut server = NatsServer::with(ServerSpec { config: config("shop"), ..ServerSpec::default() }).await;
    let broker = Broker::connect(&server).await;
    broker.create(stream_config(), consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    server.reconfigure(config("other")).await;
    worker.not_ready("stream ORDERS existed when the daemon was bound").await;
    assert_eq!(worker.lines(&["create the stream and its consumer"]), 0, "{}", worker.log());
    server.reconfigure(config("shop")).await;
    worker.ready().await;
    worker.drain().await;
}
