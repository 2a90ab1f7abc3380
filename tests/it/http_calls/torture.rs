//! Kills at random moments, while the endpoint answers, fails, waits and breaks connections at random.

use std::collections::BTreeSet;

use fastrand::Rng;

use super::*;
use crate::support::nats::impatient_consumer_config;

/// Orders between two kills.
const ORDERS: u64 = 20;

#[tokio::test]
async fn killed_at_random_moments_every_order_is_recorded_once() {
    kills(10).await;
}

#[tokio::test]
#[ignore = "takes minutes: make torture"]
async fn torture_of_calls() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    kills(rounds.unwrap_or(60)).await;
}

async fn kills(rounds: u64) {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| fastrand::u64(..));
    println!("{rounds} kills, seed {seed}: SEED={seed} draws the same moments again");
    let mut random = Rng::with_seed(seed);
    let endpoint = Endpoint::start(at_random).await;
    // No failure may use up the attempts: a dead letter would be right, and would hide an order that is lost.
    let settings = [("retry.max_attempts", "1000")];
    let shop =
        Shop::with_consumer(&endpoint.url(), "timeout = \"500ms\"\n", &settings, impatient_consumer_config()).await;
    let mut ids = BTreeSet::new();
    for round in 0..rounds {
        let mut daemon = shop.spec.start();
        for number in round * ORDERS..(round + 1) * ORDERS {
            let id = format!("o-{number}");
            shop.order(&id).await;
            if random.u8(0..10) == 0 {
                // Known already, or under way.
                shop.order_again(&format!("o-{}", random.u64(0..=number))).await;
            }
            ids.insert(id);
        }
        tokio::time::sleep(Duration::from_millis(random.u64(0..700))).await;
        if random.u8(0..8) == 0 {
            // Before that, SIGTERM would kill it.
            daemon.logged(&["the daemon bound"]).await;
            daemon.drain().await;
        } else {
            daemon.kill9();
        }
    }
    endpoint.now(|_| Act::status(200));
    let messages = shop.broker.stream_info().await.state.last_sequence;
    let mut daemon = shop.spec.start();
    // Everything may be acknowledged already, and SIGTERM kills a process that has no handler yet.
    daemon.logged(&["the daemon bound"]).await;
    shop.broker.acknowledged(messages).await;
    daemon.drain().await;
    let db = shop.spec.db();
    let recorded = db.texts("SELECT id FROM processed_ids").await;
    assert_eq!(recorded.len(), ids.len(), "an id for each order and none twice");
    assert_eq!(recorded.into_iter().collect::<BTreeSet<_>>(), ids, "rows are orders");
    assert_eq!(db.count("dead_letters").await, 0, "dead letters");
    let calls = endpoint.keys();
    assert_eq!(calls.keys().cloned().collect::<BTreeSet<_>>(), ids, "each order was called, under its key");
    let texts: BTreeSet<(String, String)> =
        endpoint.seen().iter().map(|seen| (seen.key().to_owned(), seen.text())).collect();
    assert_eq!(texts.len(), ids.len(), "and always with its own body");
    println!("{rounds} kills, {} orders, {} calls", ids.len(), calls.values().sum::<usize>());
}

fn at_random(_: &Seen) -> Act {
    let slow = |act: Act| Act::Slow(Duration::from_millis(fastrand::u64(0..100)), act.into());
    match fastrand::u8(0..20) {
        0..12 => Act::status(200),
        12..15 => slow(Act::status(200)),
        15 => Act::AnswerAndClose,
        16 => slow(Act::Close),
        17 => Act::status(500),
        18 => Act::with(503, "Retry-After", "1"),
        _ => Act::Hang,
    }
}
