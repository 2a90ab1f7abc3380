//! A batch leaves the same tables as its orders one by one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use order_processor::config::{Database, OnConflict};
use order_processor::handler::http::Place;
use order_processor::handler::routes::Routes;
use order_processor::handler::{Handler, planned};
use order_processor::model::delivery::{Delivery, Position, Raw};
use order_processor::model::id::{IdScheme, MESSAGE_ID_HEADER, UniqueIn};
use order_processor::model::schemes::IdSchemes;
use order_processor::store::{Scratch, Store};
use order_processor::worker::inbox::Inbox;
use order_processor::worker::retry::RetryPolicy;
use proptest::collection::vec;
use proptest::prelude::*;
use tokio_util::sync::CancellationToken;

use crate::support::daemon::Db;

const FILE: &str = r#"
[sql]
migrations = "migrations"
[[route]]
subject = "ORDERS.paid"
[route.params]
cents = { json = "/cents", type = "integer" }
[[route.sql]]
run = "INSERT INTO sales VALUES (:id, :cents)"
[[route.sql]]
run = "UPDATE stock SET qty = qty - :cents WHERE qty >= :cents"
expect = "one"
because = "out of stock"
[[route]]
subject = "ORDERS.back"
[[route.sql]]
run = "UPDATE stock SET qty = qty + (:payload ->> '$.cents')"
"#;
const TABLES: &str = "CREATE TABLE sales (id TEXT PRIMARY KEY, cents INTEGER NOT NULL CHECK (cents <> 3)) STRICT;
CREATE TABLE stock (qty INTEGER NOT NULL) STRICT; INSERT INTO stock VALUES (20);";
const TABLES_READ: [&str; 4] = [
    "SELECT id || ' ' || cents FROM sales ORDER BY id",
    "SELECT CAST(qty AS TEXT) FROM stock",
    "SELECT id FROM processed_ids ORDER BY id",
    "SELECT id || ' ' || reason || ' ' || error FROM dead_letters ORDER BY id",
];

/// Applies the orders in batches of this size, and reads what is in the tables then.
async fn play(orders: &[(bool, u8)], batch: usize) -> Vec<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("migrations")).unwrap();
    std::fs::write(folder.path().join("migrations/0001_shop.sql"), TABLES).unwrap();
    let file = folder.path().join("handler.toml");
    std::fs::write(&file, FILE).unwrap();
    let routes = Arc::new(load(&file).await);
    let database = folder.path().join("orders.db");
    let mut store = Store::open(&Database::Sqlite(database.clone())).await.unwrap();
    routes.prepare(store.idle_connection().unwrap()).await.unwrap();
    let retry = RetryPolicy { max_attempts: 3, min_delay: Duration::from_secs(1), max_delay: Duration::from_secs(1) };
    let mut inbox = Inbox::new(store, routes.clone(), retry, OnConflict::DeadLetter);
    let deliveries: Vec<Delivery> =
        (1..).zip(orders).map(|(n, order)| planned(routes.as_ref(), delivery(n, *order))).collect();
    for batch in deliveries.chunks(batch) {
        let outcomes = inbox.process(batch, &CancellationToken::new()).await.unwrap();
        assert!(outcomes.iter().all(Option::is_some), "{outcomes:?}");
    }
    inbox.close().await.unwrap();
    let db = Db::at(database);
    let mut tables = Vec::new();
    for sql in TABLES_READ {
        tables.push(db.texts(sql).await);
    }
    tables
}

async fn load(file: &Path) -> Routes {
    let place = Place {
        folder: file.parent().unwrap(),
        environment: &|_| None,
        stream: "ORDERS",
        shutdown_timeout: Duration::from_secs(25),
    };
    Routes::load(file.to_owned(), &place, &mut Scratch::empty().await.unwrap()).await.unwrap().0
}

fn delivery(n: u64, (paid, cents): (bool, u8)) -> Delivery {
    // 9 is a text that is not JSON.
    let payload = if cents == 9 { "nine".to_owned() } else { format!("{{\"cents\": {cents}}}") };
    let raw = Raw {
        subject: if paid { "ORDERS.paid" } else { "ORDERS.back" }.into(),
        headers: vec![(MESSAGE_ID_HEADER.to_owned(), format!("o-{n:03}"))],
        payload: payload.into(),
        position: Position { delivered: 1, stream_seq: n, consumer_seq: n, published_ns: 1 },
        unreadable: None,
    };
    let scheme = IdScheme { stream: "ORDERS".to_owned(), pointer: None, unique_in: UniqueIn::Subject };
    Delivery::new(raw, &IdSchemes::from(scheme))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_batch_leaves_the_same_tables_as_its_orders_one_by_one(
        orders in vec((prop::bool::weighted(0.8), 0..10_u8), 1..60),
        batch in 2..80_usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (alone, together) = runtime.block_on(async { (play(&orders, 1).await, play(&orders, batch).await) });
        prop_assert_eq!(alone, together);
    }
}
