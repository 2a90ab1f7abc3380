//! Which ids count as processed, wherever they stand, and how long they are remembered: as long as their message can come again,
//! and a week at least.

use std::path::Path;

use async_nats::jetstream::stream;
use order_processor::config::Database;
use order_processor::model::delivery::{Delivery, Position, Raw};
use order_processor::model::id::Digest;
use order_processor::model::plan::Plan;
use order_processor::store::{Claim, Gone, Prunable, Reader, Store};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use sqlx::migrate::Migrator;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};

use crate::support::nats::{STREAM, consumer_config, headers, stream_config};
use crate::support::{Broker, DaemonSpec, Db};

/// Ids that the daemon seals together.
const SEGMENT_ROWS: usize = 50_000;

/// Makes what the database holds look as if it had been done so many days before.
async fn age(spec: &DaemonSpec, days: i64) {
    age_up_to(spec, days, i64::MAX).await;
}

async fn age_up_to(spec: &DaemonSpec, days: i64, stream_seq: i64) {
    let ns = days * 24 * 60 * 60 * 1_000_000_000;
    let mut writer = spec.db().open_to_write().await;
    sqlx::query("UPDATE processed_ids SET processed_at = processed_at - ? WHERE stream_seq <= ?")
        .bind(ns)
        .bind(stream_seq)
        .execute(&mut writer)
        .await
        .unwrap();
    sqlx::query("UPDATE attempts SET updated_at = updated_at - ?").bind(ns).execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();
}

/// Everything before this sequence is gone from the stream.
async fn purge_before(broker: &Broker, stream_seq: u64) {
    broker.jetstream.get_stream(STREAM).await.unwrap().purge().sequence(stream_seq).await.unwrap();
}

/// Against the store itself, since a stream that is weeks old cannot be made here.
#[tokio::test]
async fn old_ids_go_in_small_steps_after_their_messages_and_not_before() {
    const DAY_NS: i64 = 24 * 60 * 60 * 1_000_000_000;
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=1_300).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    age_up_to(&spec, 8, 1_200).await;

    let week_ago = spec.db().scalar("SELECT max(processed_at) FROM processed_ids").await - 7 * DAY_NS;
    let mut store = Store::open(&Database::Sqlite(spec.database())).await.unwrap();
    let gone = |below_seq| Prunable {
        before_ns: week_ago,
        gone: Some(Gone { below_seq, published_before_ns: week_ago, processed_before_ns: 0 }),
    };
    let mut steps = Vec::new();
    for below_seq in [0, 1_101, 1_101, 1_101, 1_101, 2_000, 2_000] {
        steps.push(store.upkeep(gone(below_seq), 500).await.unwrap().0);
    }
    store.close().await.unwrap();
    assert_eq!(steps, [0, 500, 500, 100, 0, 100, 0], "nothing that the stream has, and nothing that is young");
    assert_eq!(spec.db().scalar("SELECT min(stream_seq) FROM processed_ids").await, 1_201);
    assert_eq!(spec.db().count("processed_ids").await, 100);
}

#[tokio::test]
async fn ids_of_a_former_stream_go_when_they_are_old() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=1_200).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.delete_stream().await;
    broker.create(stream_config(), consumer_config()).await;

    let mut worker = spec.start();
    broker.publish_numbered(1..=10).await;
    broker.acknowledged(10).await;
    worker.drain().await;
    assert_eq!(spec.db().count("processed_ids").await, 1_210, "none of them is a week old");
    age(&spec, 8).await;
    let mut worker = spec.start();
    broker.publish_numbered(11..=20).await;
    broker.acknowledged(20).await;
    // With those of the new stream: made older than their stream, they look like the former one's.
    worker.metric("ids_pruned_total", 1_210.0).await;
    spec.db().applied_once(1_220).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_full_replay_of_a_stream_is_all_duplicates() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=5_000).await;
    let mut worker = spec.start();
    broker.acknowledged(5_000).await;
    worker.ready().await;
    // What sets the ack floor back to 0, while the worker runs and while it does not.
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 5_000.0).await;
    broker.acknowledged(5_000).await;
    worker.drain().await;
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(5_000).await;
    spec.db().applied_once(5_000).await;
}

#[tokio::test]
async fn a_repetition_within_a_week_is_a_duplicate_after_its_message_is_gone() {
    let (server, broker) = Broker::story().await;
    let short_memory = stream::Config { duplicate_window: std::time::Duration::from_millis(100), ..stream_config() };
    broker.jetstream.update_stream(short_memory).await.unwrap();
    let spec = DaemonSpec::new(server.url());
    let order = || headers(&[("Nats-Msg-Id", "order-1")]);
    broker.publish_to("ORDERS.new", order(), b"Order Data 1".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    age(&spec, 6).await;
    purge_before(&broker, 2).await;

    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_anew("ORDERS.new", order(), b"Order Data 1".to_vec()).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 1.0).await;
    spec.db().applied_once(1).await;
    worker.drain().await;
}

#[tokio::test]
async fn attempts_of_a_message_that_has_vanished_are_forgotten_after_a_week() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    let mut writer = spec.db().open_to_write().await;
    // As it is left behind by a stream that is purged between two attempts.
    let left =
        "INSERT INTO attempts (id, failed, started, updated_at) VALUES ('vanished', 2, 0, unixepoch() * 1000000000)";
    sqlx::query(left).execute(&mut writer).await.unwrap();
    writer.close().await.unwrap();

    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    assert_eq!(spec.db().count("attempts").await, 1, "it might come again");
    worker.drain().await;
    age(&spec, 8).await;
    let mut worker = spec.start();
    spec.db().has("attempts", 0).await;
    worker.drain().await;
    spec.db().applied_once(1).await;
}

/// What happens to the ids of one database.
#[derive(Clone, Debug)]
enum Step {
    /// Somebody claims ids, each with one of two digests.
    Claim {
        beside: bool,
        orders: Vec<(u8, bool)>,
        end: End,
    },
    /// The daemon drops the oldest.
    Prune {
        rows: u32,
    },
    /// The daemon ends, or dies, and starts again.
    Restart {
        clean: bool,
    },
    /// An operator removes an id by hand.
    Delete {
        id: u8,
    },
    Vacuum,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Commit,
    /// Dropped as it stands.
    Drop,
    /// Back to the savepoint before the second half, which is then claimed once more.
    UndoHalf,
}

fn ids_steps() -> impl Strategy<Value = Step> {
    let end = prop_oneof![4 => Just(End::Commit), 1 => Just(End::Drop), 2 => Just(End::UndoHalf)];
    prop_oneof![
        8 => (prop::bool::weighted(0.2), vec((0..40_u8, prop::bool::weighted(0.1)), 1..12), end)
            .prop_map(|(beside, orders, end)| Step::Claim { beside, orders, end }),
        2 => (1..30_u32).prop_map(|rows| Step::Prune { rows }),
        1 => any::<bool>().prop_map(|clean| Step::Restart { clean }),
        1 => (0..40_u8).prop_map(|id| Step::Delete { id }),
        1 => Just(Step::Vacuum),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 12,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn an_id_is_new_exactly_once_wherever_its_row_stands(steps in vec(ids_steps(), 1..30), segment_rows in 2..9_usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(play(&steps, segment_rows));
    }
}

fn delivery(id: u8, other: bool) -> Delivery {
    let position = Position { delivered: 1, stream_seq: 1, consumer_seq: 1, published_ns: 1 };
    let raw = Raw { subject: "ORDERS.new".into(), headers: vec![], payload: "".into(), position, unreadable: None };
    Delivery {
        raw,
        id: format!("order {id}").into(),
        digest: Digest([u8::from(other); 16]),
        defect: None,
        missing_id: None,
        ignored: None,
        attempt: 1,
        plan: Plan::Apply,
        key: None,
    }
}

async fn open(database: &Path, segment_rows: usize) -> Store {
    let mut store = Store::open(&Database::Sqlite(database.to_owned())).await.unwrap();
    store.seal_after(segment_rows);
    store
}

/// Takes `steps` on a real file, and says after each of every id what a plain list of rows says of it.
async fn play(steps: &[Step], segment_rows: usize) {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("orders.db");
    let mut daemon = Some(open(&database, segment_rows).await);
    let mut operator = Store::open_beside(&Database::Sqlite(database.clone())).await.unwrap();
    operator.seal_after(segment_rows);
    let mut reader = Reader::open(&Database::Sqlite(database.clone())).await.unwrap();
    let mut rows: Vec<(u8, bool)> = Vec::new();
    for step in steps {
        let store = daemon.as_mut().unwrap();
        match step {
            Step::Claim { beside, orders, end } => {
                let store = if *beside { &mut operator } else { store };
                claim(store, orders, *end, &mut rows).await;
            }
            Step::Prune { rows: limit } => {
                let prunable = Prunable { before_ns: i64::MAX, gone: None };
                let pruned = store.upkeep(prunable, *limit).await.unwrap().0;
                assert_eq!(pruned, u64::from(*limit).min(rows.len() as u64));
                rows.drain(..pruned as usize);
            }
            Step::Restart { clean } => {
                let store = daemon.take().unwrap();
                match clean {
                    true => store.close().await.unwrap(),
                    false => drop(store),
                }
                daemon = Some(open(&database, segment_rows).await);
            }
            Step::Delete { id } => {
                Db::at(database.clone()).execute(&format!("DELETE FROM processed_ids WHERE id = 'order {id}'")).await;
                rows.retain(|(known, _)| known != id);
            }
            Step::Vacuum => Db::at(database.clone()).execute("VACUUM").await,
        }
        let all: Vec<Delivery> = (0..40).map(|id| delivery(id, false)).collect();
        let all: Vec<&Delivery> = all.iter().collect();
        let expected: Vec<Claim> = (0..40).map(|id| known(&rows, id)).collect();
        assert_eq!(reader.known(&all).await.unwrap(), expected, "beside the daemon, after {step:?}");
        for store in [daemon.as_mut().unwrap(), &mut operator] {
            let mut tx = store.begin().await.unwrap();
            assert_eq!(tx.known(&all).await.unwrap(), expected, "after {step:?}");
            tx.commit().await.unwrap();
        }
    }
}

fn known(rows: &[(u8, bool)], id: u8) -> Claim {
    let row = rows.iter().find(|(known, _)| *known == id);
    row.map_or(Claim::New, |(_, other)| Claim::Processed(Digest([u8::from(*other); 16])))
}

async fn claim(store: &mut Store, orders: &[(u8, bool)], end: End, rows: &mut Vec<(u8, bool)>) {
    let mut unique: Vec<(u8, bool)> = Vec::new();
    for (id, other) in orders {
        if !unique.iter().any(|(known, _)| known == id) {
            unique.push((*id, *other));
        }
    }
    let deliveries: Vec<Delivery> = unique.iter().map(|(id, other)| delivery(*id, *other)).collect();
    let deliveries: Vec<&Delivery> = deliveries.iter().collect();
    let expected: Vec<Claim> = unique.iter().map(|(id, _)| known(rows, *id)).collect();
    let half = unique.len() / 2;
    let mut tx = store.begin().await.unwrap();
    assert_eq!(tx.claim(&deliveries[..half], 1).await.unwrap(), expected[..half]);
    tx.savepoint().await.unwrap();
    assert_eq!(tx.claim(&deliveries[half..], 1).await.unwrap(), expected[half..]);
    if end == End::UndoHalf {
        tx.undo().await.unwrap();
        assert_eq!(tx.claim(&deliveries[half..], 1).await.unwrap(), expected[half..], "what was undone is new again");
    }
    if end == End::Drop {
        return store.roll_back().await;
    }
    tx.commit().await.unwrap();
    rows.extend(unique.iter().zip(expected).filter(|(_, claim)| *claim == Claim::New).map(|(order, _)| *order));
}

/// A hole in the index would let an order through twice.
#[tokio::test]
async fn a_damaged_index_stops_the_daemon_and_a_missing_one_is_rebuilt() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.on_conflict", "duplicate");
    let mut worker = spec.start();
    worker.ready().await;
    worker.drain().await;
    let mut writer = spec.db().open_to_write().await;
    fill(&mut writer, SEGMENT_ROWS as i64 * 2).await;
    writer.close().await.unwrap();
    let mut worker = spec.start();
    worker.ready().await;
    worker.drain().await;
    assert_eq!(spec.db().count("id_segments").await, 2);
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "order-1")]), b"Order Data".to_vec()).await;

    let whole = std::fs::read(spec.database()).unwrap();
    for damage in [
        "UPDATE id_segments SET filter = zeroblob(length(filter)) WHERE segment = 1",
        "UPDATE id_segments SET filter = x'' WHERE segment = 2",
        "DELETE FROM id_segments WHERE segment = 1",
        "UPDATE id_pages SET entries = zeroblob(length(entries))",
        "UPDATE id_pages SET entries = (SELECT entries FROM id_pages WHERE page = 300) WHERE page < 512",
        "DELETE FROM id_pages",
    ] {
        spec.db().execute(damage).await;
        let finished = spec.run(&["run"]).await;
        assert_eq!(finished.code, Some(2), "{damage}: {finished:?}");
        assert!(finished.stderr.contains("damaged"), "{damage}: {finished:?}");
        assert_eq!(spec.db().count("orders").await, 0, "{damage}");
        std::fs::write(spec.database(), &whole).unwrap();
        // So that the order comes again at once.
        broker.delete_consumer().await;
        broker.create_consumer(consumer_config()).await;
    }
    spec.db().execute("DELETE FROM id_segments").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!((spec.db().count("id_segments").await, spec.db().count("orders").await), (2, 0));
    broker.acknowledged(1).await;
}

/// Puts ids of processed orders into the table by hand.
async fn fill(connection: &mut SqliteConnection, rows: i64) {
    let insert = "WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?) \
         INSERT INTO processed_ids (id, stream_seq, digest, processed_at) \
         SELECT 'order-' || n, n, randomblob(16), unixepoch() * 1000000000 FROM number";
    sqlx::query(insert).bind(rows).execute(connection).await.unwrap();
}

/// The daemon seals with its next transaction.
#[tokio::test]
async fn readers_find_ids_that_are_not_sealed_yet() {
    let folder = tempfile::tempdir().unwrap();
    let database = folder.path().join("orders.db");
    Store::open(&Database::Sqlite(database.clone())).await.unwrap().close().await.unwrap();
    let mut writer = SqliteConnectOptions::new().filename(&database).connect().await.unwrap();
    fill(&mut writer, SEGMENT_ROWS as i64 + 10).await;
    writer.close().await.unwrap();
    let mut reader = Reader::open(&Database::Sqlite(database.clone())).await.unwrap();
    for number in [1, SEGMENT_ROWS + 1, SEGMENT_ROWS + 10] {
        let delivery = Delivery { id: format!("order-{number}").into(), ..delivery(0, false) };
        let known = reader.known(&[&delivery]).await.unwrap();
        assert!(matches!(known[..], [Claim::Processed(_)]), "{number}: {known:?}");
    }
}

/// As many rows as three segments have, and some more.
#[tokio::test]
async fn a_database_from_before_the_segments_keeps_all_its_ids() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.on_conflict", "duplicate");
    let rows = SEGMENT_ROWS as i64 * 3 + 100;
    let mut former =
        SqliteConnectOptions::new().filename(spec.database()).create_if_missing(true).connect().await.unwrap();
    former_version(&mut former).await;
    fill(&mut former, rows).await;
    former.close().await.unwrap();

    let mut worker = spec.start();
    worker.ready().await;
    assert_eq!(spec.db().count("id_segments").await, 3);
    let segment = SEGMENT_ROWS as i64;
    for number in [1, segment, segment + 1, segment * 3, segment * 3 + 1, rows, 0] {
        let id = format!("order-{number}");
        broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", id.as_str())]), b"Order Data".to_vec()).await;
    }
    worker.metric("outcomes_total{outcome=\"applied\"}", 1.0).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", 6.0).await;
    worker.drain().await;
    assert_eq!(spec.db().texts("SELECT id FROM orders").await, ["order-0"]);
    assert_eq!(spec.db().count("processed_ids").await, rows + 1);
}

/// Makes of an empty file what the version before this one made.
async fn former_version(connection: &mut SqliteConnection) {
    let folder = tempfile::tempdir().unwrap();
    for name in ["0001_initial.sql", "0002_closed_letters.sql"] {
        let migrations = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations/sqlite");
        std::fs::copy(migrations.join(name), folder.path().join(name)).unwrap();
    }
    Migrator::new(folder.path()).await.unwrap().run(connection).await.unwrap();
}
