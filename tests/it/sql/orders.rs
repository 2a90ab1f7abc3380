//! What becomes of orders with right values.

use crate::sql::{SALES, Shop, TABLES};
use crate::support::nats::headers;

#[tokio::test]
async fn each_order_is_a_row_in_the_users_table_in_the_same_commit() {
    let shop = Shop::open(SALES, TABLES).await;
    for n in 1..=150 {
        shop.order(&format!("o-{n}"), &format!("{{\"cents\": {n}}}")).await;
    }
    shop.work().await;
    shop.broker.acknowledged(150).await;
    let db = shop.spec.db();
    assert_eq!((db.count("sales").await, db.count("processed_ids").await, db.count("orders").await), (150, 150, 0));
    assert_eq!(db.scalar("SELECT sum(cents) FROM sales JOIN processed_ids USING (id)").await, 150 * 151 / 2);
    assert_eq!(db.count("dead_letters").await, 0);
}

#[tokio::test]
async fn every_source_and_every_built_in_parameter_reaches_its_statement() {
    let file = r#"
[sql]
migrations = "migrations"
[[route]]
subject = "ORDERS.*"
[route.params]
cents = { json = "/order/total", type = "integer" }
price = { json = "/price", type = "text" }
rate = { json = "/rate", type = "real" }
paid = { json = "/paid", type = "bool" }
items = { json = "/items", type = "json" }
image = { json = "/image", type = "blob" }
note = { json = "/note", type = "text", optional = true }
tenant = { header = "X-Tenant", default = "main" }
shop = { header = "X-Shop" }
region = { subject = 2 }
far = { subject = 9, optional = true }
[[route.sql]]
run = """
INSERT INTO seen VALUES (:id, :cents, :price, :rate, :paid, :items, hex(:image), :note, :tenant, :shop, :region, :far,
  :subject, :stream_seq, :published_at, :now, :headers, :payload, hex(:payload_bytes), ':id') -- :id
"""
"#;
    let columns: Vec<String> = (1..=20).map(|n| format!("c{n}")).collect();
    let shop = Shop::open(file, &format!("CREATE TABLE seen ({});", columns.join(", "))).await;
    let payload = r#"{"order":{"total":9007199254740993},"price":12.50,"rate":0.1,"paid":true,"items":[{"a":1.0}],"image":"AP8="}"#;
    let with = [("Nats-Msg-Id", "o-1"), ("X-Shop", "7")];
    shop.broker.publish_to("ORDERS.eu", headers(&with), payload.into()).await;
    shop.work().await;
    assert_eq!(shop.letters().await, Vec::<String>::new());
    let text = "SELECT concat_ws('|', c1, c2, typeof(c2), c3, typeof(c3), c4, c5, typeof(c5), c6, c7, typeof(c8), c9, c10, \
                typeof(c10), c11, typeof(c12), c13, c14, typeof(c14), c17, c18, typeof(c18), c19, c20) FROM seen";
    let hex: String = payload.bytes().map(|byte| format!("{byte:02X}")).collect();
    let seen = shop.texts(text).await;
    let (before, after) = seen[0].split_once("|{\"").unwrap();
    assert_eq!(
        before,
        "o-1|9007199254740993|integer|12.50|text|0.1|1|integer|[{\"a\":1.0}]|00FF|null|main|7|text|eu|null|ORDERS.eu|1|integer"
    );
    assert!(after.contains("X-Shop\":[\"7\"]") && after.ends_with(&format!("{payload}|text|{hex}|:id")), "{after}");
    let times = "SELECT c16 > c15 AND c15 > 1600000000000000000 AND c16 - c15 < 600000000000 FROM seen";
    assert_eq!(shop.spec.db().scalar(times).await, 1);
}

#[tokio::test]
async fn the_first_route_that_matches_takes_the_order_and_one_without_is_unrouted() {
    let file = r#"
[sql]
migrations = "migrations"

[[route]]
subject = "ORDERS.>"
when = { header = "X-Test", is = "1" }
ignore = true

[[route]]
subject = "ORDERS.new"
when = { json = "/kind", is = "gift" }
[[route.sql]]
run = "INSERT INTO sales (id, cents, note) VALUES (:id, 0, 'gift')"

[[route]]
subject = "ORDERS.new"
[[route.sql]]
run = "INSERT INTO sales (id, cents, note) VALUES (:id, 1, 'new')"

[[route]]
subject = "ORDERS.kept"
record = true
"#;
    let shop = Shop::open(file, TABLES).await;
    let orders = [
        ("o-1", "ORDERS.new", r#"{"kind": "gift"}"#, ""),
        ("o-2", "ORDERS.new", "plain text", ""),
        ("o-3", "ORDERS.new", r#"{"kind": "gift"}"#, "1"),
        ("o-4", "ORDERS.kept", "kept", ""),
        ("o-5", "ORDERS.other", "lost", ""),
        ("o-6", "ORDERS.new", r#"{"kind": null}"#, "2"),
    ];
    for (id, subject, payload, test) in orders {
        shop.broker.publish_to(subject, headers(&[("Nats-Msg-Id", id), ("X-Test", test)]), payload.into()).await;
    }
    shop.work().await;
    shop.broker.acknowledged(6).await;
    assert_eq!(shop.texts("SELECT id || ' ' || note FROM sales ORDER BY id").await, ["o-1 gift", "o-2 new", "o-6 new"]);
    assert_eq!(shop.texts("SELECT id FROM orders").await, ["o-4"]);
    assert_eq!(shop.texts("SELECT id FROM processed_ids ORDER BY id").await, ["o-1", "o-2", "o-3", "o-4", "o-6"]);
    let letters = shop.letters().await;
    assert!(
        letters.len() == 1
            && letters[0].starts_with("unrouted: no route of ")
            && letters[0].ends_with("for subject ORDERS.other"),
        "{letters:?}"
    );
    shop.spec.run_ok(&["audit"]).await;
}

#[tokio::test]
async fn arrays_of_an_order_are_rows_and_rows_of_the_outbox_are_published() {
    let file = r#"
[sql]
migrations = "migrations"
[[route]]
subject = "ORDERS.accepted"
ignore = true
[[route]]
subject = "ORDERS.*"
[[route.sql]]
run = "INSERT INTO lines SELECT :id, value ->> '$.sku', value ->> '$.qty' FROM json_each(:payload, '$.items')"
expect = "some"
[[route.sql]]
run = "INSERT INTO outbox (id, subject, payload) VALUES ('accepted-' || :id, 'ORDERS.accepted', :payload)"
"#;
    let shop = Shop::open(file, "CREATE TABLE lines (id TEXT, sku TEXT, qty INTEGER) STRICT;").await;
    shop.order("o-1", r#"{"items": [{"sku": "a", "qty": 2}, {"sku": "b", "qty": 1}]}"#).await;
    shop.order("o-2", r#"{"items": []}"#).await;
    let mut daemon = shop.spec.start();
    // The order, the empty one, and the message of the outbox.
    shop.broker.acknowledged(3).await;
    daemon.drain().await;
    assert_eq!(shop.texts("SELECT concat_ws(' ', id, sku, qty) FROM lines ORDER BY sku").await, ["o-1 a 2", "o-1 b 1"]);
    assert_eq!(shop.letters().await, ["permanent: route 2, statement 1: 0 rows, expected some"]);
    assert_eq!(shop.spec.db().count("outbox").await, 0);
    assert_eq!(shop.texts("SELECT id FROM processed_ids ORDER BY id").await, ["accepted-o-1", "o-1"]);
}

#[tokio::test]
async fn log_and_status_show_the_file_and_its_digest() {
    let shop = Shop::open(SALES, TABLES).await;
    let mut daemon = shop.spec.start();
    daemon.ready().await;
    daemon.logged(&["orders are processed by the handler file", "handler.toml"]).await;
    let (_, status) = daemon.get("/status").await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let digest = status["handler_digest"].as_str().unwrap();
    assert!(digest.len() == 16 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{digest}");
    assert!(status["handler_file"].as_str().unwrap().ends_with("handler.toml"));
    daemon.drain().await;
}

#[tokio::test]
async fn migrations_are_applied_once_and_a_changed_one_is_refused() {
    let shop = Shop::open(SALES, TABLES).await;
    shop.work().await;
    shop.work().await;
    let file = shop.spec.folder().join("migrations/0001_shop.sql");
    std::fs::write(shop.spec.folder().join("migrations/0002_more.sql"), "CREATE TABLE more (id TEXT) STRICT;").unwrap();
    std::fs::write(shop.spec.folder().join("migrations/.hidden"), "x").unwrap();
    shop.work().await;
    let names = "SELECT name FROM handler_migrations ORDER BY version";
    assert_eq!(shop.texts(names).await, ["0001_shop.sql", "0002_more.sql"]);
    assert_eq!(shop.spec.db().count("more").await, 0);

    std::fs::write(&file, format!("{TABLES}\n-- changed")).unwrap();
    let refused = shop.spec.run(&["run", "--until-idle"]).await;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("migration 0001_shop.sql was changed after"), "{}", refused.stderr);

    // The previous version of the file starts again.
    std::fs::write(&file, TABLES).unwrap();
    std::fs::remove_file(shop.spec.folder().join("migrations/0002_more.sql")).unwrap();
    let warned = shop.spec.run_ok(&["run", "--until-idle"]).await;
    assert!(
        warned.stderr.contains("the database has migration 0002_more.sql, which the folder lacks"),
        "{}",
        warned.stderr
    );
}

#[tokio::test]
async fn a_file_that_is_refused_applies_no_migration() {
    let shop = Shop::open(&SALES.replace("INTO sales", "INTO sale"), TABLES).await;
    let refused = shop.spec.run(&["run", "--until-idle"]).await;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("route 1, statement 1: no such table: sale, did you mean \"sales\"?"),
        "{}",
        refused.stderr
    );
    assert!(!shop.spec.database().exists(), "nothing was created");
}
