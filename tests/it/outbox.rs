//! The outbox: what a handler writes there with its order is published once, after the commit.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::stream;
use futures_util::StreamExt;

use crate::auth::PUBLISH;
use crate::support::nats::{impatient_consumer_config, publish_raw_to};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, equal, eventually};

const SHOP: &str = "SHOP";
/// Far below the time that a test takes: the stream itself recognises nothing that comes twice.
const WINDOW: Duration = Duration::from_millis(100);

const ACCEPT: &str = "INSERT INTO outbox (id, subject, headers, payload) \
     VALUES ('accepted-' || new.id, 'SHOP.accepted', '{\"X-Shop\": [\"eu\"]}', new.payload)";

/// A message in the stream of the shop.
#[derive(Debug, PartialEq)]
struct Event {
    subject: String,
    id: String,
    shop: Option<String>,
    payload: String,
}

struct Shop {
    server: NatsServer,
    broker: Broker,
    spec: DaemonSpec,
}

impl Shop {
    /// With a trigger that runs `then` for each order.
    async fn with(then: &str) -> Self {
        Self::on(Broker::with(impatient_consumer_config()).await, then).await
    }

    async fn on((server, broker): (NatsServer, Broker), then: &str) -> Self {
        let spec = DaemonSpec::new(server.url());
        spec.run_ok(&["run", "--until-idle"]).await;
        spec.db().execute(&format!("CREATE TRIGGER to_outbox AFTER INSERT ON orders BEGIN {then}; END")).await;
        Self { server, broker, spec }
    }

    /// Each order is accepted.
    async fn accepting() -> Self {
        Self::with(ACCEPT).await
    }

    async fn open(&self) {
        let subjects = vec!["SHOP.>".to_owned()];
        let config = stream::Config { name: SHOP.to_owned(), subjects, duplicate_window: WINDOW, ..Default::default() };
        self.broker.jetstream.create_stream(config).await.unwrap();
    }

    /// Everything in the stream, in stream order.
    async fn events(&self) -> Vec<Event> {
        let config = pull::Config { ack_policy: AckPolicy::None, ..Default::default() };
        let consumer = self.broker.jetstream.create_consumer_on_stream(config, SHOP).await.unwrap();
        let count = consumer.cached_info().num_pending as usize;
        if count == 0 {
            return Vec::new();
        }
        let messages = consumer.fetch().max_messages(count).messages().await.unwrap();
        messages
            .map(|message| {
                let message = message.unwrap();
                let header = |name: &str| Some(message.headers.as_ref()?.get(name)?.to_string());
                Event {
                    subject: message.subject.to_string(),
                    id: header("Nats-Msg-Id").unwrap_or_default(),
                    shop: header("X-Shop"),
                    payload: String::from_utf8_lossy(&message.payload).into_owned(),
                }
            })
            .collect()
            .await
    }

    async fn stored(&self, count: u64) {
        eventually(&format!("{count} messages are in the stream"), PATIENCE, async || {
            let stream = self.broker.jetstream.get_stream(SHOP).await.map_err(|error| (0, error.to_string()))?;
            equal((stream.cached_info().state.messages, String::new()), (count, String::new()))
        })
        .await;
    }

    async fn has_rows(&self, rows: i64) {
        self.spec.db().has("outbox", rows).await;
    }

    /// As after a crash right after the receipts: published rows cannot be deleted.
    async fn keep_rows(&self) {
        self.spec
            .db()
            .execute("CREATE TRIGGER kept BEFORE DELETE ON outbox BEGIN SELECT RAISE(ABORT, 'kept'); END")
            .await;
    }

    async fn release_rows(&self) {
        self.spec.db().execute("DROP TRIGGER kept").await;
    }
}

fn numbered(count: u64) -> Vec<String> {
    (1..=count).map(|number| format!("Order Data {number}")).collect()
}

#[tokio::test]
async fn each_row_is_published_once_in_row_order_and_deleted() {
    let shop = Shop::accepting().await;
    shop.open().await;
    shop.broker.publish_numbered(1..=50).await;
    shop.spec.run_ok(&["run", "--until-idle"]).await;
    let events = shop.events().await;
    assert_eq!(events.iter().map(|event| event.payload.clone()).collect::<Vec<_>>(), numbered(50));
    let ids = shop.spec.db().texts("SELECT 'accepted-' || id FROM orders ORDER BY stream_seq").await;
    assert_eq!(events.iter().map(|event| event.id.clone()).collect::<Vec<_>>(), ids);
    assert!(events.iter().all(|event| event.subject == "SHOP.accepted" && event.shop.as_deref() == Some("eu")));
    assert_eq!(shop.spec.db().count("outbox").await, 0);
}

#[tokio::test]
async fn a_running_daemon_publishes_at_once_and_counts() {
    let shop = Shop::accepting().await;
    shop.open().await;
    let mut worker = shop.spec.start();
    worker.ready().await;
    shop.broker.publish("Order Data 1").await;
    shop.stored(1).await;
    shop.broker.publish("Order Data 2").await;
    shop.stored(2).await;
    worker.metric("outbox_published_total", 2.0).await;
    worker.metric("outbox_rows", 0.0).await;
    shop.has_rows(0).await;
    worker.drain().await;
    assert_eq!(worker.lines(&["has a message with this id"]), 0);
}

#[tokio::test]
async fn rows_without_a_stream_wait_and_the_subject_is_named() {
    let shop = Shop::accepting().await;
    let mut worker = shop.spec.start();
    shop.broker.publish_numbered(1..=3).await;
    worker.not_ready("outbox: subject SHOP.accepted: no stream has the subject; create the stream; 3 rows wait").await;
    shop.broker.acknowledged(3).await;
    shop.has_rows(3).await;
    shop.open().await;
    worker.ready().await;
    shop.stored(3).await;
    shop.has_rows(0).await;
    assert_eq!(shop.events().await.iter().map(|event| event.payload.clone()).collect::<Vec<_>>(), numbered(3));
    worker.drain().await;
}

#[tokio::test]
async fn later_rows_wait_for_one_that_the_stream_refuses() {
    let shop = Shop::accepting().await;
    shop.open().await;
    let config = shop.broker.jetstream.get_stream(SHOP).await.unwrap().cached_info().config.clone();
    let small = stream::Config { max_message_size: 300, ..config.clone() };
    shop.broker.jetstream.update_stream(small).await.unwrap();
    let mut worker = shop.spec.start();
    let large = "large".repeat(100);
    for payload in ["1", large.as_str()] {
        shop.broker.publish(payload.to_owned()).await;
    }
    shop.has_rows(1).await;
    for payload in ["3", "4"] {
        shop.broker.publish(payload.to_owned()).await;
    }
    worker.not_ready("message size exceeds maximum allowed (code 400, error code 10054); 3 rows wait").await;
    // Two more tries.
    tokio::time::sleep(Duration::from_secs(4)).await;
    shop.has_rows(3).await;
    shop.broker.jetstream.update_stream(config).await.unwrap();
    shop.stored(4).await;
    let payloads: Vec<String> = shop.events().await.into_iter().map(|event| event.payload).collect();
    assert_eq!(payloads, ["1", &large, "3", "4"]);
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn a_row_that_cannot_be_published_makes_its_order_a_dead_letter_alone() {
    let shop = Shop::with(
        "INSERT INTO outbox (id, subject, headers, payload) SELECT coalesce(payload ->> 'id', new.id), \
         coalesce(payload ->> 'subject', 'SHOP.a'), payload ->> 'headers', \
         coalesce(zeroblob(payload ->> 'size'), payload) FROM (SELECT CAST(new.payload AS TEXT) AS payload)",
    )
    .await;
    shop.open().await;
    for payload in [
        r#"{"good": 1}"#,
        r#"{"subject": "SHOP a"}"#,
        r#"{"id": "a\r\nb"}"#,
        r#"{"headers": {"nats-rollup": "all"}}"#,
        r#"{"headers": {"X": "a\nb"}}"#,
        r#"{"size": 2000000}"#,
        r#"{"good": 2}"#,
    ] {
        shop.broker.publish(payload).await;
    }
    let mut worker = shop.spec.start();
    shop.broker.acknowledged(7).await;
    shop.stored(2).await;
    worker.drain().await;
    let errors = shop.spec.db().texts("SELECT reason || ': ' || error FROM dead_letters ORDER BY stream_seq").await;
    assert_eq!(errors.len(), 5, "{errors:?}");
    for (error, what) in
        errors.iter().zip(["subject must be", "its id", "belong to the server", "line break", "the server accepts"])
    {
        assert!(error.starts_with("permanent: a row of the outbox for ") && error.contains(what), "{error}");
    }
    assert_eq!((shop.spec.db().count("orders").await, shop.spec.db().count("outbox").await), (2, 0));
}

#[tokio::test]
async fn rows_published_before_a_crash_are_stored_once_beyond_the_window() {
    let shop = Shop::accepting().await;
    shop.open().await;
    shop.keep_rows().await;
    let mut worker = shop.spec.start();
    shop.broker.publish_numbered(1..=20).await;
    shop.stored(20).await;
    worker.not_ready("kept").await;
    worker.kill9();
    shop.has_rows(20).await;
    shop.release_rows().await;
    // Others publish to the stream as well, and the window passes.
    for _ in 0..30 {
        shop.broker.publish_to("SHOP.other", Default::default(), b"other".to_vec()).await;
    }
    tokio::time::sleep(WINDOW * 3).await;
    let mut worker = shop.spec.start();
    shop.broker.publish("Order Data 21").await;
    shop.stored(51).await;
    shop.has_rows(0).await;
    worker.logged(&["found rows of the outbox that were published before", "\"rows\":20"]).await;
    worker.drain().await;
    let events = shop.events().await;
    let accepted = events.iter().filter(|event| event.subject == "SHOP.accepted");
    assert_eq!(accepted.map(|event| event.payload.clone()).collect::<Vec<_>>(), numbered(21));
}

#[tokio::test]
async fn published_rows_are_found_behind_messages_that_the_client_cannot_parse() {
    let shop = Shop::accepting().await;
    shop.open().await;
    let mut worker = shop.spec.start();
    shop.broker.publish("Order Data 1").await;
    shop.stored(1).await;
    shop.has_rows(0).await;
    worker.kill9();
    shop.keep_rows().await;
    for _ in 0..2 {
        publish_raw_to("SHOP.other", &shop.server, b"no colon", b"").await;
    }
    shop.broker.publish_numbered(2..=20).await;
    let mut worker = shop.spec.start();
    shop.stored(22).await;
    worker.kill9();
    shop.release_rows().await;
    tokio::time::sleep(WINDOW * 3).await;
    let mut worker = shop.spec.start();
    shop.has_rows(0).await;
    shop.stored(22).await;
    worker.drain().await;
}

#[tokio::test]
async fn the_documented_permissions_are_enough_and_a_missing_look_is_named() {
    const NEEDED: [&str; 3] = ["SHOP.>", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.SHOP"];
    const LOOK: [&str; 2] = ["$JS.API.CONSUMER.CREATE.SHOP.>", "$JS.API.CONSUMER.MSG.NEXT.SHOP.>"];
    for look in [&LOOK[..], &[]] {
        let allowed: Vec<&str> = PUBLISH.iter().chain(&NEEDED).chain(look).copied().collect();
        let restricted =
            Broker::with_restricted_worker(&format!("allow: {allowed:?}"), impatient_consumer_config()).await;
        let shop = Shop::on(restricted, ACCEPT).await;
        shop.open().await;
        shop.keep_rows().await;
        let mut worker = shop.spec.start();
        shop.broker.publish_numbered(1..=3).await;
        shop.stored(3).await;
        worker.not_ready("kept").await;
        worker.kill9();
        shop.release_rows().await;
        tokio::time::sleep(WINDOW * 3).await;
        let mut worker = shop.spec.start();
        shop.has_rows(0).await;
        worker.ready().await;
        let (found, warned) =
            (worker.lines(&["found rows of the outbox"]), worker.lines(&["cannot look for published rows"]));
        assert_eq!((found, warned), if look.is_empty() { (0, 1) } else { (1, 0) }, "{}", worker.log());
        worker.drain().await;
    }
}

#[tokio::test]
async fn an_order_that_is_repaired_does_not_publish_again() {
    let shop = Shop::accepting().await;
    shop.open().await;
    shop.broker.publish_numbered(1..=5).await;
    shop.spec.run_ok(&["run", "--until-idle"]).await;
    // As after the restore of a backup from before order 3.
    for table in ["orders", "processed_ids"] {
        shop.spec.db().execute(&format!("DELETE FROM {table} WHERE stream_seq >= 3")).await;
    }
    tokio::time::sleep(WINDOW * 3).await;
    shop.spec.run_ok(&["audit", "--repair"]).await;
    shop.spec.db().applied_once(5).await;
    shop.has_rows(3).await;
    shop.spec.run_ok(&["run", "--until-idle"]).await;
    shop.has_rows(0).await;
    assert_eq!(shop.events().await.iter().map(|event| event.payload.clone()).collect::<Vec<_>>(), numbered(5));
}

#[tokio::test]
async fn two_rows_with_one_id_are_reported_and_counted() {
    let shop = Shop::with("INSERT INTO outbox (id, subject, payload) VALUES ('same', 'SHOP.a', new.payload)").await;
    let subjects = vec!["SHOP.>".to_owned()];
    let config = stream::Config { name: SHOP.to_owned(), subjects, ..Default::default() };
    shop.broker.jetstream.create_stream(config).await.unwrap();
    let mut worker = shop.spec.start();
    worker.ready().await;
    shop.broker.publish_numbered(1..=3).await;
    worker.metric("outbox_duplicates_total", 2.0).await;
    worker.logged(&["has a message with this id already", "\"message_id\":\"same\""]).await;
    shop.has_rows(0).await;
    shop.stored(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_row_to_the_own_consumer_comes_back_as_an_order_and_is_counted() {
    let shop = Shop::with(
        "INSERT INTO outbox (id, subject, payload) SELECT 'again-' || new.id, 'ORDERS.again', new.payload \
         WHERE new.subject = 'ORDERS.new'",
    )
    .await;
    let mut worker = shop.spec.start();
    worker.ready().await;
    shop.broker.publish_numbered(1..=2).await;
    worker.metric("outbox_to_own_consumer_total", 2.0).await;
    shop.broker.acknowledged(4).await;
    assert_eq!(worker.lines(&["to the own consumer of this daemon"]), 1);
    worker.drain().await;
    assert_eq!(shop.spec.db().texts("SELECT id FROM orders WHERE subject = 'ORDERS.again'").await.len(), 2);
}

#[tokio::test]
async fn pulling_stops_while_a_hundred_thousand_rows_wait() {
    let shop = Shop::accepting().await;
    let rows = "WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 100000) \
         INSERT INTO outbox (id, subject, payload) SELECT 'row-' || i, 'SHOP.row', i FROM n";
    shop.spec.db().execute(rows).await;
    let mut worker = shop.spec.start();
    worker.not_ready("100000 rows wait").await;
    shop.broker.publish("Order Data 1").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(shop.broker.consumer_info().await.num_pending, 1, "it is not delivered");
    shop.open().await;
    shop.broker.acknowledged(1).await;
    shop.stored(100_001).await;
    shop.has_rows(0).await;
    worker.ready().await;
    worker.drain().await;
}

#[tokio::test]
async fn killed_at_random_moments_every_row_is_stored_once() {
    let rounds: u64 = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(8);
    const ORDERS: u64 = 200;
    let shop = Shop::accepting().await;
    shop.open().await;
    for round in 0..rounds {
        let mut worker = shop.spec.start();
        worker.ready().await;
        let first = round * ORDERS + 1;
        let (publishing, killing) = (shop.broker.publish_numbered(first..=first + ORDERS - 1), async {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..150))).await;
            worker.kill9();
        });
        tokio::join!(publishing, killing);
        tokio::time::sleep(WINDOW * 2).await;
    }
    shop.spec.run_ok(&["run", "--until-idle"]).await;
    let count = (rounds * ORDERS) as i64;
    shop.spec.db().applied_once(count).await;
    shop.has_rows(0).await;
    let mut ids: Vec<String> = shop.events().await.into_iter().map(|event| event.id).collect();
    assert_eq!(ids.len() as i64, count, "stored");
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len() as i64, count, "different ones");
}

#[tokio::test]
async fn a_server_that_restarts_under_load_gets_every_row_once() {
    let mut shop = Shop::accepting().await;
    shop.open().await;
    let mut worker = shop.spec.start();
    worker.ready().await;
    for round in 0..3 {
        shop.broker.publish_numbered(round * 300 + 1..=round * 300 + 300).await;
        shop.server.kill9();
        tokio::time::sleep(WINDOW * 2).await;
        shop.server.restart().await;
        worker.ready().await;
    }
    shop.broker.acknowledged(900).await;
    shop.has_rows(0).await;
    shop.stored(900).await;
    worker.drain().await;
    let mut ids: Vec<String> = shop.events().await.into_iter().map(|event| event.id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 900);
}
