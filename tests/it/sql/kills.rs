//! The daemon killed at random moments, with statements of a handler file.

use std::time::Duration;

use crate::sql::Shop;
use crate::support::{PATIENCE, at_least, eventually};

/// Two tables that must agree, and one order in a hundred that a constraint refuses.
const FILE: &str = r#"
[sql]
migrations = "migrations"
[[route]]
subject = "ORDERS.*"
[[route.sql]]
run = "UPDATE total SET cents = cents + CAST(substr(:payload, 12) AS INTEGER)"
[[route.sql]]
run = "INSERT INTO sales VALUES (:id, CAST(substr(:payload, 12) AS INTEGER))"
"#;
const TABLES: &str = "CREATE TABLE sales (id TEXT NOT NULL, cents INTEGER NOT NULL CHECK (cents % 100 <> 7)) STRICT;
CREATE TABLE total (cents INTEGER NOT NULL) STRICT; INSERT INTO total VALUES (0);";

/// Kills the daemon this often while it works on the orders, and compares the tables at the end.
async fn killed(kills: u64, orders: u64) {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("seed {seed}: SEED={seed} plays the same moments again");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut shop = Shop::open(FILE, TABLES).await;
    shop.spec.change("batch.max_messages", "16");
    shop.broker.publish_numbered(1..=orders).await;
    let mut daemon = shop.spec.start();
    daemon.ready().await;
    daemon.kill9();
    for kill in 0..kills {
        let before = shop.spec.db().count("sales").await;
        let mut daemon = shop.spec.start();
        // Every second one dies at work, the others anywhere from the start of the process on.
        if kill % 2 == 0 && before < orders.cast_signed() * 9 / 10 {
            eventually("it works", PATIENCE, async || at_least(shop.spec.db().count("sales").await, before + 1)).await;
        }
        // Not a wait for anything: this is the random moment.
        tokio::time::sleep(Duration::from_micros(random.u64(0..60_000))).await;
        daemon.kill9();
    }
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(orders).await;
    daemon.drain().await;
    let db = shop.spec.db();
    let refused = i64::try_from((1..=orders).filter(|n| n % 100 == 7).count()).unwrap();
    let applied = i64::try_from(orders).unwrap() - refused;
    assert_eq!((db.count("sales").await, db.count("processed_ids").await), (applied, applied));
    assert_eq!(db.scalar("SELECT count(*) FROM sales JOIN processed_ids USING (id)").await, applied);
    assert_eq!(db.scalar("SELECT count(DISTINCT cents) FROM sales").await, applied, "each order once");
    assert_eq!(db.scalar("SELECT sum(cents) FROM sales").await, db.scalar("SELECT cents FROM total").await);
    assert_eq!(db.scalar("SELECT count(*) FROM dead_letters WHERE reason = 'permanent'").await, refused);
}

#[tokio::test]
async fn killed_at_twelve_random_moments_all_tables_and_ids_agree() {
    killed(12, 4_000).await;
}

/// `ROUNDS=n` kills n times.
#[tokio::test]
#[ignore = "a long run; make torture starts it"]
async fn torture_of_the_statements_of_a_handler_file() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(100);
    killed(rounds, 400 * rounds).await;
}
