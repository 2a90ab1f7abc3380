//! Triggers of the user on the table `orders`: the smallest way to an own effect.

use crate::support::{Broker, DaemonSpec};

/// Fills `sales` from a JSON payload.
const SALES: [&str; 2] = [
    "CREATE TABLE sales (id TEXT PRIMARY KEY, cents INTEGER NOT NULL) STRICT",
    "CREATE TRIGGER to_sales AFTER INSERT ON orders BEGIN \
     INSERT INTO sales VALUES (new.id, CAST(new.payload AS TEXT) ->> '$.cents'); END",
];

async fn with_sales() -> (crate::support::NatsServer, Broker, DaemonSpec) {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    for sql in SALES {
        spec.db().execute(sql).await;
    }
    (server, broker, spec)
}

#[tokio::test]
async fn a_payload_that_a_trigger_cannot_read_is_a_dead_letter_alone() {
    let (_server, broker, spec) = with_sales().await;
    for payload in [r#"{"cents": 250}"#, "Order Data 2", r#"{"cents": 900}"#] {
        broker.publish(payload).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(3).await;
    assert_eq!(spec.db().texts("SELECT CAST(cents AS TEXT) FROM sales ORDER BY cents").await, ["250", "900"]);
    assert_eq!((spec.db().count("orders").await, spec.db().count("processed_ids").await), (2, 2));
    let letters = spec.db().texts("SELECT reason || ': ' || error FROM dead_letters").await;
    assert!(
        matches!(&letters[..], [one] if one.starts_with("permanent: ") && one.ends_with("malformed JSON")),
        "{letters:?}"
    );
}

#[tokio::test]
async fn such_a_payload_alone_is_a_dead_letter_as_well() {
    let (_server, broker, spec) = with_sales().await;
    broker.publish("Order Data 1").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(1).await;
    assert_eq!(spec.db().count("dead_letters").await, 1);
    assert_eq!((spec.db().count("orders").await, spec.db().count("processed_ids").await), (0, 0));
}

#[tokio::test]
async fn a_table_that_a_trigger_misses_stops_all_orders_and_spends_nothing() {
    let (_server, broker, spec) = with_sales().await;
    spec.db().execute("DROP TABLE sales").await;
    broker.publish(r#"{"cents": 250}"#).await;
    let mut worker = spec.start();
    worker.not_ready("no such table: main.sales").await;
    assert_eq!((spec.db().count("attempts").await, spec.db().count("dead_letters").await), (0, 0));
    spec.db().execute(SALES[0]).await;
    broker.acknowledged(1).await;
    worker.drain().await;
    assert_eq!(spec.db().count("sales").await, 1);
}
