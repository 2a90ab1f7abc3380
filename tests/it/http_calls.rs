//! Routes with `[route.http]`, from the outside: the real process, an endpoint on a real socket that remembers every request.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::stream;
use sqlx::Row;

use crate::support::endpoint::Seen;
use crate::support::keys::{Authority, secret};
use crate::support::nats::{consumer_config, headers, stream_config};
use crate::support::{Act, Broker, DaemonSpec, Endpoint, NatsServer, PATIENCE, at_least, equal, eventually};

mod away;
mod kills;
mod torture;

/// A server with stream and consumer, and a daemon whose orders go to an endpoint.
struct Shop {
    broker: Broker,
    spec: DaemonSpec,
    _server: NatsServer,
}

impl Shop {
    /// `route`: lines of `[route.http]` after the url.
    async fn new(url: &str, route: &str, settings: &[(&str, &str)]) -> Self {
        Self::with_consumer(url, route, settings, consumer_config()).await
    }

    async fn with_consumer(url: &str, route: &str, settings: &[(&str, &str)], consumer: pull::Config) -> Self {
        let file = format!("[[route]]\nsubject = \"ORDERS.*\"\n[route.http]\nurl = \"{url}\"\n{route}");
        Self::with_file(&file, settings, consumer).await
    }

    async fn with_file(file: &str, settings: &[(&str, &str)], consumer: pull::Config) -> Self {
        let server = NatsServer::start().await;
        let broker = Broker::connect(&server).await;
        let subjects = vec!["ORDERS.*".to_owned(), "SHOP.*".to_owned()];
        let stream = stream::Config { duplicate_window: Duration::from_millis(100), subjects, ..stream_config() };
        let consumer = pull::Config { filter_subject: "ORDERS.*".to_owned(), ..consumer };
        broker.create(stream, consumer).await;
        let spec = DaemonSpec::new(server.url());
        let handler = spec.folder().join("handler.toml");
        std::fs::write(&handler, file).unwrap();
        let spec = spec.set("handler.file", handler).set("retry.min_delay", "100ms").set("retry.max_delay", "200ms");
        let spec = settings.iter().fold(spec, |spec, (key, value)| spec.set(key, *value));
        Self { broker, spec, _server: server }
    }

    /// Publishes orders `o-<n>`.
    async fn publish(&self, numbers: std::ops::RangeInclusive<u64>) {
        for number in numbers {
            self.order(&format!("o-{number}")).await;
        }
    }

    async fn order(&self, id: &str) {
        let payload = format!("{{\"order\": \"{id}\"}}").into_bytes();
        self.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", id)]), payload).await;
    }

    /// The same order in another message.
    async fn order_again(&self, id: &str) {
        let payload = format!("{{\"order\": \"{id}\"}}").into_bytes();
        self.broker.publish_anew("ORDERS.new", headers(&[("Nats-Msg-Id", id)]), payload).await;
    }

    async fn processed(&self, orders: i64) {
        self.spec.db().has("processed_ids", orders).await;
    }

    async fn letters(&self, letters: i64) {
        self.spec.db().has("dead_letters", letters).await;
    }

    async fn no_attempts(&self) {
        assert_eq!(self.spec.db().count("attempts").await, 0, "attempts");
        assert_eq!(self.spec.db().count("dead_letters").await, 0, "dead letters");
    }
}

/// Each of so many orders once.
fn once(orders: std::ops::RangeInclusive<u64>) -> BTreeMap<String, usize> {
    orders.map(|n| (format!("o-{n}"), 1)).collect()
}

#[tokio::test]
async fn each_order_is_one_request_with_the_headers_of_the_contract() {
    let endpoint = Endpoint::start(|_| Act::status(200)).await;
    let route = "secret_file = \"webhook.secret\"\nheaders = { X-Shop = \"eu\" }\nheader_files = { Authorization = \"token\" }\n";
    let shop = Shop::new(&endpoint.url(), route, &[]).await;
    secret(shop.spec.folder().join("webhook.secret"), "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n");
    secret(shop.spec.folder().join("token"), "Bearer abc\n");
    let more = headers(&[("Nats-Msg-Id", "o-1"), ("traceparent", "00-1-2-01"), ("X-Internal", "no")]);
    shop.broker.publish_to("ORDERS.eu", more, b"{\"cents\": 5}".to_vec()).await;
    shop.broker.publish("Order Data 2").await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(2).await;
    daemon.drain().await;
    let seen = endpoint.seen();
    assert_eq!(seen.len(), 2);
    let first = seen.iter().find(|seen| seen.key() == "o-1").expect("its id is its key");
    assert_eq!((first.path.as_str(), first.text().as_str()), ("/orders", "{\"cents\": 5}"));
    for (name, value) in [
        ("content-type", "application/json"),
        ("idempotency-key", "\"o-1\""),
        ("webhook-id", "o-1"),
        ("nats-stream", "ORDERS"),
        ("nats-subject", "ORDERS.eu"),
        ("nats-sequence", "1"),
        ("order-attempt", "1"),
        ("traceparent", "00-1-2-01"),
        ("x-shop", "eu"),
        ("authorization", "Bearer abc"),
    ] {
        assert_eq!(first.headers.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert!(first.headers["webhook-signature"].starts_with("v1,"), "{first:?}");
    assert!(!first.headers.contains_key("x-internal"));
    let second = seen.iter().find(|seen| seen.key() != "o-1").unwrap();
    assert_eq!(second.headers["content-type"], "text/plain; charset=utf-8");
    assert!(second.key().starts_with("b3_") && second.key().len() == 35, "{}", second.key());
    let log = daemon.log();
    for hidden in ["/orders", "Bearer", "whsec", "abc"] {
        assert!(!log.contains(hidden), "{hidden} is in the log:\n{log}");
    }
}

#[tokio::test]
async fn known_ids_are_not_called_and_two_messages_of_one_id_are_one_call() {
    let endpoint = Endpoint::start(|_| Act::Slow(Duration::from_millis(300), Act::status(200).into())).await;
    let shop = Shop::new(&endpoint.url(), "", &[]).await;
    shop.order("o-1").await;
    // Past the duplicate window of the stream.
    tokio::time::sleep(Duration::from_millis(300)).await;
    shop.order("o-1").await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(2).await;
    shop.order("o-1").await;
    shop.broker.acknowledged(3).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(1..=1));
}

#[tokio::test]
async fn one_order_that_gets_500_is_a_dead_letter_while_others_pass() {
    let endpoint =
        Endpoint::start(|seen| if seen.key() == "o-3" { Act::body(500, "stack trace") } else { Act::status(200) })
            .await;
    let shop = Shop::new(&endpoint.url(), "", &[("retry.max_attempts", "3")]).await;
    shop.publish(1..=50).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(50).await;
    shop.processed(49).await;
    let letter = &shop.spec.db().rows("SELECT id, reason, error FROM dead_letters").await[0];
    assert_eq!(letter.get::<&str, _>("reason"), "attempts_exhausted");
    let error: &str = letter.get("error");
    assert!(error.contains("HTTP 500") && error.contains("stack trace"), "{error}");
    let metrics = daemon.metrics().await;
    let host = endpoint.host();
    assert_eq!(metrics.get(&format!("calls_total{{host=\"{host}\",result=\"success\"}}")), Some(49.0));
    assert_eq!(metrics.get(&format!("calls_total{{host=\"{host}\",result=\"retry\"}}")), Some(3.0));
    daemon.drain().await;
    let attempts: Vec<u32> =
        endpoint.seen().iter().filter(|seen| seen.key() == "o-3").map(|seen| seen.attempt()).collect();
    assert_eq!(attempts, [1, 2, 3]);
    assert!(!daemon.log().contains("stack trace"), "the endpoint's words are only in the database");
}

#[tokio::test]
async fn a_deploy_that_answers_400_to_all_stops_at_twenty() {
    let endpoint = Endpoint::start(|_| Act::body(400, "bad deploy")).await;
    let shop = Shop::new(&endpoint.url(), "concurrency = 4\n", &[]).await;
    shop.publish(1..=60).await;
    let mut daemon = shop.spec.start();
    daemon.not_ready(&format!("{} is away: 20 different orders in a row had no success", endpoint.host())).await;
    endpoint.called(22).await;
    endpoint.now(|_| Act::status(200));
    shop.broker.acknowledged(60).await;
    shop.letters(20).await;
    shop.processed(40).await;
    let (_, ready) = daemon.get("/readyz").await;
    assert!(!ready.contains("bad deploy"), "{ready}");
    daemon.drain().await;
}

#[tokio::test]
async fn each_answer_means_what_the_table_and_the_route_say() {
    let endpoint = Endpoint::start(|seen| match seen.key() {
        "o-1" => Act::status(422),
        "o-2" => Act::status(404),
        "o-3" => Act::body(200, "{\"error\": \"sold out\"}"),
        "o-4" => Act::status(409),
        _ => Act::status(204),
    })
    .await;
    let route = "error = \"/error\"\nstatus = { \"404\" = \"dead-letter\", \"409\" = \"success\" }\n";
    let shop = Shop::new(&endpoint.url(), route, &[]).await;
    shop.publish(1..=5).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(5).await;
    daemon.drain().await;
    let letters = shop.spec.db().texts("SELECT id || ' ' || error FROM dead_letters ORDER BY id").await;
    assert_eq!(letters.len(), 3, "{letters:?}");
    for (letter, text) in letters.iter().zip(["o-1 HTTP 422", "o-2 HTTP 404", "o-3 HTTP 200"]) {
        assert!(letter.starts_with(text), "{letter}");
    }
    assert_eq!(endpoint.keys(), once(1..=5));
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let other = Endpoint::start(|_| Act::status(200)).await;
    let location = other.url();
    let endpoint = Endpoint::start(move |seen| match seen.key() {
        "o-1" => Act::with(302, "Location", location.clone()),
        _ => Act::status(200),
    })
    .await;
    let shop = Shop::new(&endpoint.url(), "", &[("retry.max_attempts", "2")]).await;
    shop.publish(1..=3).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(3).await;
    daemon.drain().await;
    let error = &shop.spec.db().texts("SELECT error FROM dead_letters").await[0];
    assert!(error.contains("HTTP 302") && error.contains("Location: http"), "{error}");
    assert!(other.seen().is_empty(), "nothing went there");
}

#[tokio::test]
async fn a_body_that_drips_or_never_ends_is_cut() {
    let endpoint = Endpoint::start(|seen| match seen.key() {
        "o-1" => Act::Drip(200),
        "o-2" => Act::Endless(200),
        "o-3" => Act::Endless(422),
        "o-4" => Act::Drip(422),
        _ => Act::status(200),
    })
    .await;
    let shop = Shop::new(&endpoint.url(), "timeout = \"2s\"\n", &[]).await;
    shop.publish(1..=5).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(5).await;
    // Without a reply, the head is the answer.
    shop.processed(3).await;
    shop.letters(2).await;
    let longest = shop.spec.db().scalar("SELECT max(length(error)) FROM dead_letters").await;
    assert!(longest < 600, "{longest} characters of an endless answer");
    eventually("the connections are closed", PATIENCE, async || equal(endpoint.running(), 0)).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(1..=5));
}

#[tokio::test]
async fn a_dead_keep_alive_costs_no_attempt() {
    let endpoint = Endpoint::start(|_| Act::AnswerAndClose).await;
    let shop = Shop::new(&endpoint.url(), "concurrency = 1\n", &[("retry.max_attempts", "1")]).await;
    shop.publish(1..=30).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(30).await;
    daemon.drain().await;
    shop.processed(30).await;
    shop.no_attempts().await;
}

#[tokio::test]
async fn a_connection_is_used_again_and_never_more_than_n_calls_run() {
    let endpoint = Endpoint::start(|_| Act::Slow(Duration::from_millis(10), Act::status(200).into())).await;
    let shop = Shop::new(&endpoint.url(), "concurrency = 3\n", &[]).await;
    shop.publish(1..=60).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(60).await;
    daemon.drain().await;
    assert_eq!(endpoint.most_running(), 3);
    assert!(endpoint.connections() <= 3, "{} connections", endpoint.connections());
    assert_eq!(endpoint.keys(), once(1..=60));
}

#[tokio::test]
async fn orders_of_other_routes_do_not_wait_for_calls() {
    let endpoint = Endpoint::start(|_| Act::Hang).await;
    let route = "[[route]]\nsubject = \"ORDERS.slow\"\n[route.http]\n";
    let file = format!("{route}url = \"{}\"\n[[route]]\nsubject = \"ORDERS.*\"\nrecord = true\n", endpoint.url());
    let shop = Shop::with_file(&file, &[], consumer_config()).await;
    for _ in 0..5 {
        shop.broker.publish_to("ORDERS.slow", headers(&[]), b"slow".to_vec()).await;
    }
    shop.publish(1..=20).await;
    let _daemon = shop.spec.start();
    shop.spec.db().has("orders", 20).await;
    endpoint.called(5).await;
    assert_eq!(shop.broker.consumer_info().await.ack_floor.stream_sequence, 0, "the calls still run");
}

#[tokio::test]
async fn a_reply_goes_to_the_outbox_under_the_id_of_its_order() {
    let endpoint = Endpoint::start(|seen| match seen.key() {
        "o-2" => Act::status(204),
        _ => Act::body(200, "accepted"),
    })
    .await;
    let shop = Shop::new(&endpoint.url(), "reply = \"SHOP.answers\"\n", &[]).await;
    shop.publish(1..=2).await;
    let mut daemon = shop.spec.start();
    shop.processed(2).await;
    eventually("the reply is published", PATIENCE, async || equal(shop.broker.stream_info().await.state.messages, 3))
        .await;
    daemon.drain().await;
    let reply = shop.broker.jetstream.get_stream("ORDERS").await.unwrap().get_raw_message(3).await.unwrap();
    assert_eq!((reply.subject.as_str(), &reply.payload[..]), ("SHOP.answers", &b"accepted"[..]));
    assert_eq!(reply.headers.get("Nats-Msg-Id").unwrap().as_str(), "o-1/reply");
}

#[tokio::test]
async fn an_order_whose_reply_could_not_be_published_is_not_called() {
    let endpoint = Endpoint::start(|_| Act::body(200, "accepted")).await;
    let shop = Shop::new(&endpoint.url(), "reply = \"SHOP.answers\"\n", &[]).await;
    shop.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "a\tb")]), b"{}".to_vec()).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(1).await;
    daemon.drain().await;
    let letters = shop.spec.db().texts("SELECT reason || ': ' || error FROM dead_letters").await;
    assert!(
        matches!(&letters[..], [one] if one.starts_with("permanent: route 1: reply: ") && one.contains("its id")),
        "{letters:?}"
    );
    assert_eq!(shop.spec.db().count("outbox").await, 0);
    assert_eq!(endpoint.seen().len(), 0);
}

#[tokio::test]
async fn a_socket_and_tls_with_a_private_authority_are_reached() {
    let folder = tempfile::tempdir().unwrap();
    let socket: PathBuf = folder.path().join("shop.sock");
    let endpoint = Endpoint::start_unix(&socket, |_| Act::status(200)).await;
    let shop = Shop::new(&format!("unix:{}:/orders", socket.display()), "", &[]).await;
    shop.publish(1..=3).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(3).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(1..=3));

    let authority = Authority::new(folder.path(), "authority");
    let endpoint = Endpoint::start_tls(&authority.issue("shop", 2040), |_| Act::status(200)).await;
    let url = format!("https://127.0.0.1:{}/orders", endpoint.port());
    let shop = Shop::new(&url, &format!("ca_file = \"{}\"\n", authority.ca().display()), &[]).await;
    shop.publish(1..=3).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(3).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(1..=3));

    // The authorities of the system do not know it.
    let shop = Shop::new(&url, "", &[]).await;
    shop.publish(1..=3).await;
    let daemon = shop.spec.start();
    daemon.not_ready("TLS failed").await;
    shop.no_attempts().await;
}

#[tokio::test]
async fn a_drain_waits_for_calls_and_hands_back_the_rest() {
    let endpoint = Endpoint::start(|_| Act::Slow(Duration::from_secs(2), Act::status(200).into())).await;
    let shop = Shop::new(&endpoint.url(), "concurrency = 3\n", &[]).await;
    shop.publish(1..=10).await;
    let mut daemon = shop.spec.start();
    endpoint.called(3).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys().len(), 3, "no call began during the drain");
    shop.processed(3).await;
    shop.no_attempts().await;
    let info = shop.broker.consumer_info().await;
    assert_eq!((info.num_ack_pending, info.ack_floor.stream_sequence), (7, 3));
    endpoint.now(|_| Act::status(200));
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(10).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(1..=10));
    assert!(endpoint.seen().iter().all(|seen| seen.attempt() == 1));
}
