//! What a handler decides of an order before anything is done for it: ignore it, or keep it as a dead letter.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use order_processor::model::letter::{Pile, Which};
use order_processor::model::outcome::Reason;
use order_processor::model::plan::Plan;
use order_processor::model::schemes::IdSchemes;
use order_processor::store::{Direction, Reader, Rows, Store};
use order_processor::worker::inbox::replay::{Replay, Replayed, replay};
use order_processor::worker::message_ids;
use order_processor::{Connection, Delivery, Failure, Handler, Order, Tx};

use crate::support::in_process::Bench;
use crate::support::nats::{consumer_config, headers};

/// Applies what its plan lets pass.
#[derive(Default)]
struct Planner {
    runs: AtomicUsize,
    /// Everything is to be ignored.
    ignores_all: bool,
}

#[async_trait]
impl Handler for Planner {
    fn plan(&self, delivery: &Delivery) -> Plan {
        let payload = String::from_utf8_lossy(&delivery.raw.payload);
        match payload.split(' ').next().unwrap_or_default() {
            _ if self.ignores_all => Plan::Ignore,
            "test" => Plan::Ignore,
            "elsewhere" => Plan::DeadLetter(Reason::Unrouted, "no route".to_owned()),
            "blank" => Plan::DeadLetter(Reason::Undecodable, "no value at /id".to_owned()),
            "panic" => panic!("the drawer is stuck"),
            _ => Plan::Apply,
        }
    }

    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        self.runs.fetch_add(1, Ordering::SeqCst);
        for Order { delivery, .. } in orders {
            let payload = String::from_utf8_lossy(&delivery.raw.payload).into_owned();
            let Connection::Sqlite(connection) = tx.connection();
            let sql = "INSERT INTO effects (id, payload) VALUES (?1, ?2)";
            sqlx::query(sql).bind(&delivery.id).bind(&payload).execute(connection).await?;
            if payload.starts_with("broken") {
                return Err(Failure::Permanent("no such product".to_owned()));
            }
        }
        Ok(())
    }
}

async fn publish(bench: &Bench, id: &str, payload: &str) {
    bench.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", id)]), payload.into()).await;
}

#[tokio::test]
async fn an_ignored_order_claims_its_id_and_rejected_ones_are_dead_letters() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let planner = Arc::new(Planner::default());
    for (id, payload) in [
        ("o-1", "plain 1"),
        ("o-2", "test 2"),
        ("o-3", "elsewhere 3"),
        ("o-4", "blank 4"),
        ("o-5", "panic 5"),
        // Makes the batch run message by message.
        ("o-6", "broken 6"),
    ] {
        publish(&bench, id, payload).await;
    }
    let worker = bench.start(&planner).await;
    bench.broker.acknowledged(6).await;
    worker.metric("outcomes_total{outcome=\"ignored\"}", 1.0).await;
    worker.ready().await;

    // Known by its id from now on.
    tokio::time::sleep(Duration::from_millis(300)).await;
    publish(&bench, "o-2", "test 2").await;
    publish(&bench, "o-3", "elsewhere 3").await;
    bench.broker.acknowledged(8).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 2.0).await;
    worker.drain().await;

    assert_eq!(bench.effects().await, ["plain 1"]);
    let db = bench.spec.db();
    assert_eq!(db.texts("SELECT id FROM processed_ids ORDER BY id").await, ["o-1", "o-2"]);
    assert_eq!(db.count("attempts").await, 0);
    assert_eq!(
        db.texts("SELECT reason || ': ' || error FROM dead_letters ORDER BY id").await,
        [
            "unrouted: no route",
            "undecodable: no value at /id",
            "permanent: the handler panicked: the drawer is stuck",
            "permanent: no such product"
        ]
    );
}

#[tokio::test]
async fn a_batch_of_orders_that_need_no_handler_is_one_commit_without_a_run() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let planner = Arc::new(Planner::default());
    for n in 0..20 {
        publish(&bench, &format!("test-{n}"), "test").await;
        publish(&bench, &format!("gone-{n}"), "elsewhere").await;
    }
    let worker = bench.start(&planner).await;
    bench.broker.acknowledged(40).await;
    worker.drain().await;
    assert_eq!(planner.runs.load(Ordering::SeqCst), 0);
    let db = bench.spec.db();
    assert_eq!((db.count("processed_ids").await, db.count("dead_letters").await), (20, 20));
}

#[tokio::test]
async fn a_replay_asks_for_the_plan_as_it_is_now() {
    let bench = Bench::new(consumer_config(), &[]).await;
    let planner = Arc::new(Planner::default());
    publish(&bench, "o-1", "elsewhere 1").await;
    let worker = bench.start(&planner).await;
    bench.broker.acknowledged(1).await;
    worker.drain().await;

    let config = bench.spec.config();
    let mut store = Store::open_beside(&config.database).await.unwrap();
    let mut reader = Reader::open(&config.database).await.unwrap();
    let (pages, _) = reader.page(Pile::Open, &Which::default(), Rows::ALL, Direction::OldestFirst, 10).await.unwrap();
    let (id, digest) = (pages[0].1.id.clone(), pages[0].1.digest);
    let schemes = IdSchemes::unchanged(&message_ids::wanted(&config));
    let wish = |dry_run| Replay { by: "a@b".to_owned(), as_new: false, schemes: schemes.clone(), dry_run };
    let replayed = replay(&mut store, planner.as_ref(), (&id, digest), &wish(false)).await.unwrap();
    assert_eq!(replayed, Replayed::Failed("no route".to_owned()));
    let ignores_all = Planner { ignores_all: true, ..Planner::default() };
    let replayed = replay(&mut store, &ignores_all, (&id, digest), &wish(true)).await.unwrap();
    assert_eq!(replayed, Replayed::Ignored);
    let db = bench.spec.db();
    assert_eq!((db.count("processed_ids").await, db.count("dead_letters").await), (0, 1), "a dry run changes nothing");
    let replayed = replay(&mut store, &ignores_all, (&id, digest), &wish(false)).await.unwrap();
    assert_eq!(replayed, Replayed::Ignored);
    assert_eq!((db.count("processed_ids").await, db.count("dead_letters").await), (1, 0));
    assert_eq!(planner.runs.load(Ordering::SeqCst), 0);
}
