//! What becomes of an order that fails, and of its neighbours.

use std::time::Duration;

use crate::sql::{SALES, Shop, TABLES};
use crate::support::{PATIENCE, at_least, eventually};

#[tokio::test]
async fn a_payload_that_is_not_json_harms_no_neighbour() {
    // A declared parameter, and a function of SQLite that reads the payload.
    for (run, letter) in [
        ("INSERT INTO sales (id, cents) VALUES (:id, :cents)", "undecodable: route 1: the payload is not valid JSON"),
        (
            "INSERT INTO sales (id, cents) VALUES (:id, :payload ->> '$.cents')",
            "permanent: route 1, statement 1: malformed JSON",
        ),
    ] {
        let mut file = SALES.replace("INSERT INTO sales (id, cents) VALUES (:id, :cents)", run);
        if !run.contains(":cents") {
            file = file.replace("[route.params]\ncents = { json = \"/cents\", type = \"integer\" }\n", "");
        }
        let shop = Shop::open(&file, TABLES).await;
        shop.order("o-1", r#"{"cents": 1}"#).await;
        shop.order("o-2", "Order Data 2").await;
        shop.order("o-3", r#"{"cents": 3}"#).await;
        shop.work().await;
        shop.broker.acknowledged(3).await;
        assert_eq!(shop.texts("SELECT id FROM sales ORDER BY id").await, ["o-1", "o-3"]);
        let letters = shop.letters().await;
        assert!(letters.len() == 1 && letters[0].starts_with(letter), "{letters:?}");
        assert_eq!(shop.spec.db().count("attempts").await, 0);
    }
}

#[tokio::test]
async fn a_value_that_the_database_refuses_is_the_dead_letter_of_its_order_alone() {
    let overflow = "SELECT abs(:cents - 9223372036854775807 - 1)";
    let file = format!("{SALES}\n[[route.sql]]\nrun = \"{overflow}\"\n");
    let shop = Shop::open(&file, TABLES).await;
    for n in 1..=200 {
        let cents = if n % 50 == 25 { -n } else { n };
        // The smallest number has no absolute value: `integer overflow`.
        let cents = if n == 100 { 0 } else { cents };
        shop.order(&format!("o-{n:03}"), &format!("{{\"cents\": {cents}}}")).await;
    }
    shop.work().await;
    shop.broker.acknowledged(200).await;
    let db = shop.spec.db();
    assert_eq!(
        (db.count("sales").await, db.count("processed_ids").await, db.count("dead_letters").await),
        (195, 195, 5)
    );
    let letters = shop.letters().await;
    assert_eq!(letters.iter().filter(|letter| letter.contains("CHECK constraint failed")).count(), 4, "{letters:?}");
    assert_eq!(
        letters.iter().filter(|letter| letter.contains("statement 2: integer overflow")).count(),
        1,
        "{letters:?}"
    );
    assert_eq!(db.count("attempts").await, 0);
}

#[tokio::test]
async fn missing_null_and_wrong_type_name_the_pointer() {
    let file = SALES.replace("/cents", "/order/cents");
    let shop = Shop::open(&file, TABLES).await;
    for (n, value) in
        ["", "null", "\"12\"", "1.5", "1e3", "9223372036854775808", "true", "[1]", "7.0"].into_iter().enumerate()
    {
        let order = if value.is_empty() { "{}".to_owned() } else { format!("{{\"cents\": {value}}}") };
        shop.order(&format!("o-{}", n + 1), &format!("{{\"order\": {order}}}")).await;
    }
    shop.work().await;
    assert_eq!(shop.texts("SELECT id || ' ' || cents FROM sales").await, ["o-9 7"]);
    let at = "undecodable: route 1: the value at /order/cents is";
    let expected = [
        "undecodable: route 1: the payload has no value at /order/cents; parameter :cents needs it".to_owned(),
        format!("{at} null; parameter :cents needs it"),
        format!("{at} a text, and parameter :cents has type integer"),
        format!("{at} not a whole number, and parameter :cents has type integer"),
        format!("{at} not a whole number, and parameter :cents has type integer"),
        format!(
            "{at} a number beyond 64 bits (type = \"text\" keeps every digit), and parameter :cents has type integer"
        ),
        format!("{at} true or false, and parameter :cents has type integer"),
        format!("{at} an array, and parameter :cents has type integer"),
    ];
    assert_eq!(shop.letters().await, expected);
}

#[tokio::test]
async fn a_table_dropped_beside_the_daemon_holds_everything_and_spends_nothing() {
    let shop = Shop::open(SALES, TABLES).await;
    let mut daemon = shop.spec.start();
    daemon.ready().await;
    shop.order("o-1", r#"{"cents": 1}"#).await;
    shop.spec.db().has("sales", 1).await;
    shop.spec.db().execute("ALTER TABLE sales RENAME TO away").await;
    for n in 2..=5 {
        shop.order(&format!("o-{n}"), r#"{"cents": 1}"#).await;
    }
    daemon.not_ready("handler: route 1, statement 1: no such table: sales").await;
    let db = shop.spec.db();
    assert_eq!((db.count("attempts").await, db.count("dead_letters").await), (0, 0));
    assert_eq!(shop.broker.consumer_info().await.delivered.consumer_sequence, 5, "each was delivered once");
    db.execute("ALTER TABLE away RENAME TO sales").await;
    shop.broker.acknowledged(5).await;
    daemon.ready().await;
    daemon.drain().await;
    assert_eq!(db.count("sales").await, 5);
}

#[tokio::test]
async fn a_foreign_key_and_a_trigger_that_asks_for_it_are_retried() {
    let tables = "
CREATE TABLE customers (id TEXT PRIMARY KEY) STRICT;
CREATE TABLE sales (id TEXT PRIMARY KEY, cents INTEGER NOT NULL, customer TEXT REFERENCES customers (id)) STRICT;
CREATE TABLE closed (cents INTEGER) STRICT;
CREATE TRIGGER open_only BEFORE INSERT ON sales WHEN new.cents IN (SELECT cents FROM closed) BEGIN
  SELECT CASE new.cents WHEN 3 THEN RAISE(ABORT, 'retry: the shop is closed') ELSE RAISE(ABORT, 'never sold') END;
END;";
    let file = SALES.replace("(id, cents) VALUES (:id, :cents)", "VALUES (:id, :cents, :customer)").replace(
        "[route.params]",
        "[route.params]\ncustomer = { json = \"/customer\", type = \"text\", optional = true }",
    );
    let shop = Shop::open(&file, tables).await;
    let spec = &shop.spec;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().execute("INSERT INTO closed VALUES (3), (4)").await;
    shop.order("o-1", r#"{"cents": 1, "customer": "c"}"#).await;
    shop.order("o-2", r#"{"cents": 2}"#).await;
    shop.order("o-3", r#"{"cents": 3}"#).await;
    shop.order("o-4", r#"{"cents": 4}"#).await;
    let mut daemon = spec.start();
    eventually("both are retried", PATIENCE, async || at_least(spec.db().count("attempts").await, 2)).await;
    let errors = "SELECT id || ': ' || last_error FROM attempts ORDER BY id";
    assert_eq!(
        spec.db().texts(errors).await,
        ["o-1: route 1, statement 1: FOREIGN KEY constraint failed", "o-3: the shop is closed (route 1, statement 1)"]
    );
    spec.db().execute("INSERT INTO customers VALUES ('c')").await;
    spec.db().execute("DELETE FROM closed").await;
    shop.broker.acknowledged(4).await;
    daemon.drain().await;
    assert_eq!(spec.db().texts("SELECT id FROM sales ORDER BY id").await, ["o-1", "o-2", "o-3"]);
    assert_eq!(shop.letters().await, ["permanent: never sold (route 1, statement 1)"]);
}

#[tokio::test]
async fn an_expectation_that_fails_undoes_the_order_and_otherwise_decides() {
    let file = r#"
[sql]
migrations = "migrations"
[[route]]
subject = "ORDERS.*"
[[route.sql]]
run = "INSERT INTO sales (id, cents) VALUES (:id, 1)"
[[route.sql]]
run = "UPDATE stock SET qty = qty - 1 WHERE sku = :payload AND qty >= 1"
expect = "one"
otherwise = "retry"
because = "out of stock"
[[route.sql]]
run = "SELECT 1 FROM stock WHERE sku = :payload AND sku = 'banned'"
expect = "none"
"#;
    let shop = Shop::open(file, TABLES).await;
    shop.work().await;
    shop.spec.db().execute("INSERT INTO stock VALUES ('a', 2), ('b', 0), ('banned', 9)").await;
    for (id, sku) in [("o-1", "a"), ("o-2", "b"), ("o-3", "a"), ("o-4", "banned"), ("o-5", "a")] {
        shop.order(id, sku).await;
    }
    let mut daemon = shop.spec.start();
    let db = shop.spec.db();
    eventually("two are retried", PATIENCE, async || at_least(db.count("attempts").await, 2)).await;
    // Each failure is committed before the rest of its batch runs again.
    db.has("sales", 2).await;
    assert_eq!(db.texts("SELECT id FROM sales ORDER BY id").await, ["o-1", "o-3"]);
    assert_eq!(shop.letters().await, ["permanent: route 1, statement 3: 1 rows, expected none"]);
    let errors = db.texts("SELECT DISTINCT last_error FROM attempts").await;
    assert_eq!(errors, ["out of stock (route 1, statement 2: 0 rows, expected one)"]);
    db.execute("UPDATE stock SET qty = qty + 1 WHERE sku IN ('a', 'b')").await;
    shop.broker.acknowledged(5).await;
    daemon.drain().await;
    assert_eq!(db.texts("SELECT sku || qty FROM stock ORDER BY sku").await, ["a0", "b0", "banned9"]);
    assert_eq!(db.count("sales").await, 4);
}

#[tokio::test]
async fn a_statement_that_never_ends_is_ended_and_only_its_order_is_counted() {
    // Ends with the first row, or never.
    let endless = "WITH RECURSIVE n (i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) \
                   SELECT i FROM n WHERE i = 1 AND :cents <> 2 OR i < 0 LIMIT 1";
    let file = format!("{SALES}[[route.sql]]\nrun = \"{endless}\"\n").replace("[sql]", "[sql]\ntimeout = \"300ms\"");
    let mut shop = Shop::open(&file, TABLES).await;
    for (key, value) in [("retry.max_attempts", "4"), ("retry.min_delay", "10ms"), ("retry.max_delay", "20ms")] {
        shop.spec.change(key, value);
    }
    let spec = &shop.spec;
    for n in 1..=4 {
        shop.order(&format!("o-{n}"), &format!("{{\"cents\": {n}}}")).await;
    }
    let started = std::time::Instant::now();
    let mut daemon = spec.start();
    eventually("the others are applied", PATIENCE, async || at_least(spec.db().count("sales").await, 3)).await;
    // From the third delivery on the order runs alone, in a savepoint, which SQLite ends together with the transaction.
    shop.broker.acknowledged(4).await;
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert_eq!(
        shop.letters().await,
        ["attempts_exhausted: route 1, statement 2: the statement was ended after sql.timeout (300ms)"]
    );
    daemon.drain().await;
    assert_eq!(spec.db().texts("SELECT id FROM sales ORDER BY id").await, ["o-1", "o-3", "o-4"]);
}
