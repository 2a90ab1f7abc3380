//! Orders of one key: strictly one after the other, in stream order, whatever fails and stops in between.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::jetstream::consumer::PullConsumer;
use async_trait::async_trait;
use futures_util::StreamExt;
use order_processor::handler::{Answer, Failure, Handler, Order};
use order_processor::model::delivery::Delivery;
use order_processor::store::{Connection, Tx};

use crate::sql::with_files;
use crate::support::in_process::Bench;
use crate::support::nats::{CONSUMER, STREAM, consumer_config, impatient_consumer_config, patient_consumer_config};
use crate::support::{Broker, DaemonSpec, PATIENCE, equal, eventually};

/// The key of `a 1` is `a`. An order fails as often as it was told to.
struct Ledger {
    failures: Mutex<HashMap<String, usize>>,
    names_the_order: bool,
    /// How many calls at a time; 0 if it makes none, and orders fail in the transaction.
    concurrency: usize,
    /// The calls that run, by their keys.
    calling: Mutex<Vec<String>>,
    /// The orders that were called for, without those that failed.
    called: Mutex<Vec<String>>,
}

#[async_trait]
impl Handler for Ledger {
    fn key(&self, delivery: &Delivery) -> Option<Arc<str>> {
        let text = String::from_utf8_lossy(&delivery.raw.payload);
        let (key, _) = text.split_once(' ')?;
        (key != "none").then(|| key.into())
    }

    fn concurrency(&self) -> usize {
        self.concurrency
    }

    async fn call(&self, delivery: &Delivery) -> Result<Answer, Failure> {
        let text = String::from_utf8_lossy(&delivery.raw.payload).into_owned();
        let key = text.split(' ').next().unwrap().to_owned();
        {
            let mut calling = self.calling.lock().unwrap();
            assert!(key == "none" || !calling.contains(&key), "two calls of key {key}: {calling:?}");
            calling.push(key.clone());
        }
        let took = if key.starts_with("slow") { SLOW } else { Duration::from_millis(fastrand::u64(..5)) };
        tokio::time::sleep(took).await;
        self.calling.lock().unwrap().retain(|other| *other != key);
        if self.fails(&text) {
            return Err(Failure::Retry("not yet".to_owned()));
        }
        self.called.lock().unwrap().push(text);
        Ok(Answer::default())
    }

    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        for (index, order) in orders.iter().enumerate() {
            let text = String::from_utf8_lossy(&order.delivery.raw.payload).into_owned();
            if self.concurrency == 0 && self.fails(&text) {
                let failure = Failure::Retry("not yet".to_owned());
                return Err(if self.names_the_order {
                    Failure::At { index, failure: failure.into() }
                } else {
                    failure
                });
            }
            let Connection::Sqlite(connection) = tx.connection();
            let insert = sqlx::query("INSERT INTO effects (id, payload) VALUES (?1, ?2)");
            insert.bind(&*order.delivery.id).bind(text).execute(connection).await?;
        }
        Ok(())
    }
}

impl Ledger {
    fn failing(orders: &[(&str, usize)]) -> Arc<Self> {
        Arc::new(Self { names_the_order: true, ..Self::failing_somewhere(orders) })
    }

    /// Does not name the order that fails.
    fn failing_somewhere(orders: &[(&str, usize)]) -> Self {
        let failures = orders.iter().map(|(text, times)| ((*text).to_owned(), *times)).collect();
        let (calling, called) = (Mutex::default(), Mutex::default());
        Self { failures: Mutex::new(failures), names_the_order: false, concurrency: 0, calling, called }
    }

    fn fails(&self, text: &str) -> bool {
        let mut failures = self.failures.lock().unwrap();
        match failures.get_mut(text) {
            Some(0) | None => false,
            Some(left) => {
                *left -= 1;
                true
            }
        }
    }

    fn mend(&self) {
        self.failures.lock().unwrap().clear();
    }
}

const FOREVER: usize = usize::MAX;
/// A call for a key that begins with `slow`: longer than a message with another client is expected to come back.
const SLOW: Duration = Duration::from_secs(15);
const FAST: &[(&str, &str)] =
    &[("retry.max_attempts", "1000"), ("retry.min_delay", "50ms"), ("retry.max_delay", "100ms")];

/// The effects in the order in which they were committed.
async fn effects(bench: &Bench) -> Vec<String> {
    bench.spec.db().texts("SELECT payload FROM effects ORDER BY rowid").await
}

async fn effects_are(bench: &Bench, expected: &[&str]) {
    let what = format!("the effects are {expected:?}");
    eventually(&what, PATIENCE, async || {
        equal(effects(bench).await, expected.iter().map(|text| (*text).to_owned()).collect())
    })
    .await;
}

/// That the orders of each key were applied once, in stream order.
fn assert_in_order(effects: &[String]) {
    let mut last: HashMap<&str, u64> = HashMap::new();
    for effect in effects {
        let (key, number) = effect.split_once(' ').unwrap();
        let number: u64 = number.parse().unwrap();
        assert_eq!(number, last.get(key).map_or(1, |last| last + 1), "{effect} in {effects:?}");
        last.insert(key, number);
    }
}

#[tokio::test]
async fn a_retry_makes_later_orders_of_its_key_wait_and_no_others() {
    for (names_the_order, concurrency) in [(true, 0), (false, 0), (false, 4)] {
        let bench = Bench::new(consumer_config(), FAST).await;
        let failing = Ledger::failing_somewhere(&[("a 1", FOREVER)]);
        let ledger = Arc::new(Ledger { names_the_order, concurrency, ..failing });
        for text in ["a 1", "b 1", "a 2", "none 1", "b 2", "a 3"] {
            bench.broker.publish(text).await;
        }
        let worker = bench.start(&ledger).await;
        eventually("all but those of a are applied", PATIENCE, async || {
            let mut effects = effects(&bench).await;
            effects.sort();
            equal(effects, ["b 1", "b 2", "none 1"].map(ToOwned::to_owned).to_vec())
        })
        .await;
        bench.broker.publish("a 4").await;
        bench.broker.publish("b 3").await;
        eventually("b 3 is applied", PATIENCE, async || {
            equal(effects(&bench).await.last().cloned(), Some("b 3".to_owned()))
        })
        .await;
        assert_eq!(bench.spec.db().texts("SELECT order_key FROM attempts").await, ["a"], "only the failing one");
        ledger.mend();
        bench.broker.acknowledged(8).await;
        assert_eq!(effects(&bench).await[4..], ["a 1", "a 2", "a 3", "a 4"]);
        worker.drain().await;
    }
}

#[tokio::test]
async fn a_dead_letter_lets_the_next_order_of_its_key_run() {
    let settings = [("retry.max_attempts", "2"), ("retry.min_delay", "50ms")];
    let bench = Bench::new(consumer_config(), &settings).await;
    let ledger = Ledger::failing(&[("a 2", FOREVER)]);
    for text in ["a 1", "a 2", "a 3", "b 1"] {
        bench.broker.publish(text).await;
    }
    let worker = bench.start(&ledger).await;
    bench.broker.acknowledged(4).await;
    let mut seen = effects(&bench).await;
    assert_eq!(seen.pop().as_deref(), Some("a 3"), "after the dead letter");
    assert_eq!(bench.spec.db().texts("SELECT CAST(payload AS TEXT) FROM dead_letters").await, ["a 2"]);
    assert_eq!(bench.spec.db().count("attempts").await, 0);
    worker.drain().await;
}

#[tokio::test]
async fn after_a_restart_later_orders_wait_for_the_retry_and_others_do_not() {
    let settings = [("retry.max_attempts", "1000"), ("retry.min_delay", "3s"), ("retry.max_delay", "3s")];
    let bench = Bench::new(patient_consumer_config(), &settings).await;
    let ledger = Ledger::failing(&[("a 1", 1)]);
    for text in ["a 1", "a 2", "b 1"] {
        bench.broker.publish(text).await;
    }
    let worker = bench.start(&ledger).await;
    effects_are(&bench, &["b 1"]).await;
    worker.drain().await;
    let worker = bench.start(&ledger).await;
    for text in ["b 2", "a 3"] {
        bench.broker.publish(text).await;
    }
    effects_are(&bench, &["b 1", "b 2"]).await;
    bench.broker.acknowledged(5).await;
    effects_are(&bench, &["b 1", "b 2", "a 1", "a 2", "a 3"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn what_was_delivered_before_comes_before_newer_orders_of_its_key() {
    let bench = Bench::new(impatient_consumer_config(), FAST).await;
    for text in ["a 1", "a 2", "b 1"] {
        bench.broker.publish(text).await;
    }
    // As a process that took them and was killed.
    let consumer: PullConsumer = bench.broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
    let taken: Vec<_> = consumer.fetch().max_messages(3).messages().await.unwrap().collect().await;
    assert_eq!(taken.len(), 3);
    for text in ["a 3", "c 1", "none 1"] {
        bench.broker.publish(text).await;
    }
    let worker = bench.start(&Ledger::failing(&[])).await;
    bench.broker.acknowledged(6).await;
    let effects = effects(&bench).await;
    assert_eq!(effects[0], "none 1", "it has no key and waits for nobody");
    assert_in_order(&effects);
    worker.drain().await;
}

#[tokio::test]
async fn a_key_that_waits_leaves_room_for_others() {
    let settings = [FAST, &[("batch.max_messages", "10")]].concat();
    let bench = Bench::new(consumer_config(), &settings).await;
    let ledger = Ledger::failing(&[("a 1", FOREVER)]);
    for number in 1..=40 {
        bench.broker.publish(format!("a {number}")).await;
    }
    for number in 1..=20 {
        bench.broker.publish(format!("b {number}")).await;
    }
    let worker = bench.start(&ledger).await;
    eventually("all of b are applied", PATIENCE, async || equal(effects(&bench).await.len(), 20)).await;
    ledger.mend();
    bench.broker.acknowledged(60).await;
    assert_in_order(&effects(&bench).await);
    worker.drain().await;
}

#[tokio::test]
async fn newer_orders_wait_for_those_that_an_earlier_process_handed_back() {
    let settings = [("batch.max_messages", "8"), ("retry.min_delay", "3s"), ("retry.max_attempts", "1000")];
    let bench = Bench::new(impatient_consumer_config(), &settings).await;
    let ledger = Ledger::failing(&[("a 1", 1)]);
    for number in 1..=40 {
        bench.broker.publish(format!("a {number}")).await;
    }
    let worker = bench.start(&ledger).await;
    eventually("a 1 has failed", PATIENCE, async || equal(bench.spec.db().count("attempts").await, 1)).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    worker.drain().await;
    let worker = bench.start(&ledger).await;
    for number in 41..=43 {
        bench.broker.publish(format!("a {number}")).await;
    }
    bench.broker.acknowledged(43).await;
    assert_in_order(&effects(&bench).await);
    worker.drain().await;
}

#[tokio::test]
async fn a_retry_that_came_late_still_runs_before_later_orders_of_its_key() {
    let settings = [("batch.max_messages", "4"), ("retry.min_delay", "2s"), ("retry.max_attempts", "1000")];
    let bench = Bench::new(impatient_consumer_config(), &settings).await;
    let ledger = Arc::new(Ledger { concurrency: 4, ..Ledger::failing_somewhere(&[("a 1", 1)]) });
    let worker = bench.start(&ledger).await;
    bench.broker.publish("a 1").await;
    eventually("a 1 has failed", PATIENCE, async || equal(bench.spec.db().count("attempts").await, 1)).await;
    // They take all places, so nothing is requested from the server while they run.
    for text in ["a 2", "slow1 1", "slow2 1", "slow3 1"] {
        bench.broker.publish(text).await;
    }
    bench.broker.acknowledged(5).await;
    let called = ledger.called.lock().unwrap().clone();
    assert_in_order(&called);
    worker.drain().await;
}

#[tokio::test]
async fn failures_and_restarts_at_random_keep_the_order_of_effects() {
    at_random(0).await;
}

#[tokio::test]
async fn failures_and_restarts_at_random_keep_the_order_of_calls() {
    let ledger = at_random(8).await;
    let mut seen: Vec<String> = Vec::new();
    for call in ledger.called.lock().unwrap().iter() {
        // A stop may come between a call and its commit. Then the same order is called for again, before any other one of its key.
        let key = call.split(' ').next().unwrap();
        let last = seen.iter().rev().find(|seen| seen.starts_with(&format!("{key} ")));
        if last != Some(call) {
            seen.push(call.clone());
        }
    }
    assert_in_order(&seen);
}

async fn at_random(concurrency: usize) -> Arc<Ledger> {
    let bench = Bench::new(impatient_consumer_config(), FAST).await;
    let mut numbers: HashMap<&str, u64> = HashMap::new();
    let texts: Vec<String> = (0..300)
        .map(|_| {
            let key = ["a", "b", "c", "d", "e"][fastrand::usize(..5)];
            let number = numbers.entry(key).or_default();
            *number += 1;
            format!("{key} {number}")
        })
        .collect();
    let failing: Vec<(&str, usize)> =
        texts.iter().filter(|_| fastrand::u8(..10) == 0).map(|text| (text.as_str(), fastrand::usize(1..4))).collect();
    let ledger = Arc::new(Ledger { concurrency, ..Ledger::failing_somewhere(&failing) });
    let publishing = async {
        for text in &texts {
            bench.broker.publish(text.as_str()).await;
            if fastrand::u8(..20) == 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let working = async {
        for _ in 0..4 {
            let worker = bench.start(&ledger).await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(50..600))).await;
            worker.drain().await;
        }
    };
    tokio::join!(publishing, working);
    let worker = bench.start(&ledger).await;
    bench.broker.acknowledged(300).await;
    worker.drain().await;
    let effects = effects(&bench).await;
    assert_eq!(effects.len(), 300, "failing: {failing:?}");
    assert_in_order(&effects);
    ledger
}

/// One row for each order, in the order of the effects.
const LOG: &str = "CREATE TABLE log (at INTEGER PRIMARY KEY, customer TEXT NOT NULL, number INTEGER NOT NULL) STRICT;";
const FILE: &str = r#"
[sql]
migrations = "migrations"
[[route]]
subject = "ORDERS.*"
key = { json = "/customer" }
[route.params]
customer = { json = "/customer", type = "text" }
number = { json = "/number", type = "integer" }
[[route.sql]]
run = "INSERT INTO log (customer, number) VALUES (:customer, :number)"
[[route.sql]]
run = "SELECT 1 WHERE :number % 20 <> 7 OR abs(random()) % 2 = 0"
expect = "one"
otherwise = "retry"
"#;

#[tokio::test]
async fn a_route_orders_by_its_key_and_an_order_without_one_is_a_dead_letter() {
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = with_files(DaemonSpec::new(server.url()), FILE, LOG).set("retry.min_delay", "20ms");
    for payload in [r#"{"number": 1}"#, r#"{"customer": null, "number": 1}"#, "plain text"] {
        broker.publish(payload).await;
    }
    for number in 1..=60 {
        broker.publish(format!(r#"{{"customer": "a", "number": {number}}}"#)).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    let numbers = spec.db().texts("SELECT CAST(number AS TEXT) FROM log ORDER BY at").await;
    assert_eq!(numbers, (1..=60).map(|number: u64| number.to_string()).collect::<Vec<_>>());
    let letters = spec.db().texts("SELECT reason || ': ' || error FROM dead_letters").await;
    assert_eq!(letters, ["undecodable: route 1: key: the payload has no value at /customer"; 3]);
}

#[tokio::test]
async fn killed_at_random_moments_the_orders_of_a_key_keep_their_order() {
    const ORDERS: u64 = 60;
    let rounds: u64 = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(4);
    let (server, broker) = Broker::with(impatient_consumer_config()).await;
    let spec = with_files(DaemonSpec::new(server.url()), FILE, LOG)
        .set("retry.min_delay", "20ms")
        .set("retry.max_delay", "100ms")
        .set("retry.max_attempts", "1000");
    for round in 0..rounds {
        let mut worker = spec.start();
        let publishing = async {
            for number in round * ORDERS + 1..=(round + 1) * ORDERS {
                for customer in ["a", "b", "c"] {
                    broker.publish(format!(r#"{{"customer": "{customer}", "number": {number}}}"#)).await;
                }
            }
        };
        let killing = async {
            tokio::time::sleep(Duration::from_millis(100 + fastrand::u64(0..400))).await;
            worker.kill9();
        };
        tokio::join!(publishing, killing);
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    let effects = spec.db().texts("SELECT customer || ' ' || number FROM log ORDER BY at").await;
    assert_eq!(effects.len() as u64, rounds * ORDERS * 3);
    assert_in_order(&effects);
}
