//! A handler that calls a service before the transaction: known ids, kept answers, a service that is away, named failures.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use order_processor::{Answer, Connection, Delivery, Failure, Handler, Order, Tx, store};
use tokio::sync::Semaphore;

use crate::support::in_process::Bench;
use crate::support::nats::{consumer_config, headers};
use crate::support::{PATIENCE, at_least, equal, eventually};

const CONCURRENCY: usize = 4;

/// Calls for each order and keeps the answer in the table `effects`.
#[derive(Default)]
struct Caller {
    /// What fails until mended does not fail any more.
    mended: AtomicBool,
    calls: Mutex<HashMap<String, usize>>,
    running: AtomicUsize,
    most_running: AtomicUsize,
    /// The slices that `apply` got, by their payloads.
    slices: Mutex<Vec<Vec<String>>>,
    /// Calls of orders that begin with `held` or `named` take a permit, if there is a gate.
    gate: Option<Semaphore>,
    /// Orders that begin with `plug` take a permit in their transaction.
    plug: Option<Semaphore>,
}

fn text(delivery: &Delivery) -> String {
    String::from_utf8_lossy(&delivery.raw.payload).into_owned()
}

#[async_trait]
impl Handler for Caller {
    fn concurrency(&self) -> usize {
        CONCURRENCY
    }

    async fn call(&self, delivery: &Delivery) -> Result<Answer, Failure> {
        *self.calls.lock().unwrap().entry(delivery.id.to_string()).or_default() += 1;
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_running.fetch_max(running, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(5)).await;
        let payload = text(delivery);
        if let Some(gate) = self.gate.as_ref().filter(|_| payload.starts_with("held") || payload.starts_with("named")) {
            gate.acquire().await.unwrap().forget();
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        let mended = self.mended.load(Ordering::SeqCst);
        match payload.split(' ').next().unwrap_or_default() {
            "away" if !mended => return Err(Failure::Away("the shop is away".to_owned())),
            "retry" if !mended => return Err(Failure::Retry("the shop is busy".to_owned())),
            "permanent" => return Err(Failure::Permanent("no such product".to_owned())),
            "panic" if !mended => panic!("the drawer is stuck"),
            _ => {}
        }
        Ok(Answer { body: format!("answer to {payload}").into() })
    }

    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        self.slices.lock().unwrap().push(orders.iter().map(|order| text(order.delivery)).collect());
        for (index, Order { delivery, answer }) in orders.iter().enumerate() {
            let payload = text(delivery);
            let answer = answer.map(|answer| String::from_utf8_lossy(&answer.body).into_owned());
            let Connection::Sqlite(connection) = tx.connection();
            let sql = "INSERT INTO effects (id, payload) VALUES (?1, ?2)";
            sqlx::query(sql).bind(&delivery.id).bind(answer).execute(connection).await?;
            if payload.starts_with("plug") {
                self.plug.as_ref().unwrap().acquire().await.unwrap().forget();
            }
            if payload.starts_with("named") {
                let failure = Failure::Permanent("no such product".to_owned()).into();
                return Err(Failure::At { index, failure });
            }
            if payload.starts_with("full") && !self.mended.swap(true, Ordering::SeqCst) {
                return Err(Failure::Store(store::Error::new("testing", store::ErrorClass::Full, "no space left")));
            }
        }
        Ok(())
    }
}

impl Caller {
    fn calls(&self) -> Vec<usize> {
        let mut calls: Vec<usize> = self.calls.lock().unwrap().values().copied().collect();
        calls.sort_unstable();
        calls
    }
}

#[tokio::test]
async fn each_order_is_called_once_and_its_answer_reaches_the_transaction() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let caller = Arc::new(Caller::default());
    bench.broker.publish_numbered(1..=50).await;
    let worker = bench.start(&caller).await;
    bench.broker.acknowledged(50).await;
    worker.drain().await;
    bench.applied_once(50).await;
    assert!(bench.effects().await.iter().all(|effect| effect.starts_with("answer to Order Data ")));
    assert_eq!(caller.calls(), [1; 50]);
    let most = caller.most_running.load(Ordering::SeqCst);
    assert!((2..=CONCURRENCY).contains(&most), "{most} calls at the same time");
}

#[tokio::test]
async fn a_known_id_is_not_called_and_two_messages_of_one_id_are_one_call() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let caller = Arc::new(Caller::default());
    for _ in 0..2 {
        bench.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "o-1")]), b"plain 1".to_vec()).await;
        // Past the stream's duplicate window of 100 ms.
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let worker = bench.start(&caller).await;
    bench.broker.acknowledged(2).await;
    bench.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "o-1")]), b"plain 1".to_vec()).await;
    bench.broker.acknowledged(3).await;
    worker.drain().await;
    bench.applied_once(1).await;
    assert_eq!(caller.calls(), [1]);
}

#[tokio::test]
async fn a_commit_that_fails_causes_no_second_call() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let caller = Arc::new(Caller::default());
    bench.broker.publish("full 1").await;
    bench.broker.publish("plain 2").await;
    let worker = bench.start(&caller).await;
    bench.broker.acknowledged(2).await;
    worker.drain().await;
    bench.applied_once(2).await;
    bench.no_failures().await;
    assert_eq!(caller.calls(), [1, 1]);
    assert!(caller.slices.lock().unwrap().len() > 1, "the first transaction was undone");
}

#[tokio::test]
async fn while_the_service_is_away_no_attempt_is_counted_and_nothing_is_acknowledged() {
    let bench = Bench::new(consumer_config(), &[("retry.max_attempts", "2")]).await;
    let caller = Arc::new(Caller::default());
    for n in 1..=5 {
        bench.broker.publish(&format!("away {n}")).await;
    }
    let worker = bench.start(&caller).await;
    worker.not_ready("handler: the shop is away").await;
    // More tries than there are attempts. One at a time, and each later than the one before.
    let tries = || caller.calls.lock().unwrap().values().sum::<usize>();
    eventually("it is tried again", PATIENCE, async || at_least(tries(), 5)).await;
    bench.no_failures().await;
    let info = bench.broker.consumer_info().await;
    assert_eq!((info.num_ack_pending, info.ack_floor.stream_sequence), (5, 0), "held, none acknowledged");
    assert_eq!(info.delivered.consumer_sequence, 5, "each was delivered once");
    caller.mended.store(true, Ordering::SeqCst);
    bench.broker.acknowledged(5).await;
    worker.ready().await;
    worker.drain().await;
    bench.applied_once(5).await;
}

#[tokio::test]
async fn a_call_that_fails_is_the_failure_of_its_order_alone() {
    let bench = Bench::new(consumer_config(), &[("retry.min_delay", "100ms")]).await;
    let caller = Arc::new(Caller::default());
    for payload in ["plain 1", "permanent 2", "retry 3", "panic 4", "plain 5"] {
        bench.broker.publish(payload).await;
    }
    let worker = bench.start(&caller).await;
    eventually("the others are applied", PATIENCE, async || equal(bench.effects().await.len(), 2)).await;
    eventually("the failures are counted", PATIENCE, async || at_least(bench.spec.db().count("attempts").await, 2))
        .await;
    caller.mended.store(true, Ordering::SeqCst);
    bench.broker.acknowledged(5).await;
    worker.drain().await;
    bench.applied_once(4).await;
    let letter = bench.dead_letter().await;
    assert_eq!(sqlx::Row::get::<&str, _>(&letter, "error"), "no such product");
}

#[tokio::test]
async fn no_transaction_is_open_during_a_call() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let caller = Arc::new(Caller { gate: Some(Semaphore::new(0)), ..Caller::default() });
    bench.broker.publish("held 1").await;
    let worker = bench.start(&caller).await;
    eventually("the call has begun", PATIENCE, async || equal(caller.calls(), vec![1])).await;
    drop(bench.spec.db().lock().await);
    caller.gate.as_ref().unwrap().add_permits(1);
    bench.broker.acknowledged(1).await;
    worker.drain().await;
    bench.applied_once(1).await;
}

#[tokio::test]
async fn an_order_that_the_handler_names_fails_alone_and_the_rest_run_together_again() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let gates = (Some(Semaphore::new(0)), Some(Semaphore::new(0)));
    let caller = Arc::new(Caller { gate: gates.0, plug: gates.1, ..Caller::default() });
    let worker = bench.start(&caller).await;
    for payload in ["held 1", "named 2", "held 3"] {
        bench.broker.publish(payload).await;
    }
    eventually("three calls have begun", PATIENCE, async || equal(caller.running.load(Ordering::SeqCst), 3)).await;
    // The transaction of this order keeps the database busy until the others are answered, so that they are one batch after it.
    bench.broker.publish("plug 4").await;
    eventually("its transaction has begun", PATIENCE, async || equal(caller.slices.lock().unwrap().len(), 1)).await;
    caller.gate.as_ref().unwrap().add_permits(3);
    worker.metric(r#"calls_total{host="",result="success"}"#, 4.0).await;
    caller.plug.as_ref().unwrap().add_permits(1);
    bench.broker.acknowledged(4).await;
    worker.drain().await;
    let slices = caller.slices.lock().unwrap().clone();
    let expected = [vec!["plug 4"], vec!["held 1", "named 2", "held 3"], vec!["held 1", "held 3"]];
    assert_eq!(slices, expected, "never one by one");
    bench.applied_once(3).await;
    bench.dead_letter().await;
}
