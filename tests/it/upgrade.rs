//! Databases of former versions: no order is applied a second time because the version has changed.

use std::path::Path;

use order_processor::config::Database;
use order_processor::store::Store;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};

use crate::support::nats::consumer_config;
use crate::support::{Broker, DaemonSpec, Db};

/// Ids that the daemon seals together.
const SEGMENT_ROWS: i64 = 50_000;

/// Gives every order the id of the version before, and takes the later migrations back. What is sealed stays sealed.
async fn with_former_ids(connection: &mut SqliteConnection, created_ns: i64) {
    {
        let sql = format!(
            "UPDATE processed_ids SET id = substr(id, 1, instr(id, '@')) || {created_ns} || ':' || stream_seq || ':' \
             || substr(id, instr(id, '@') + 1, instr(id, ':') - instr(id, '@') - 1)"
        );
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&mut *connection).await.unwrap();
    }
}

async fn downgrade(connection: &mut SqliteConnection) {
    for sql in [
        "DROP TABLE pruned",
        "DROP TABLE binding",
        "DROP TABLE audit_mark",
        "DROP TABLE id_schemes",
        "DROP TABLE outbox",
        "DROP TABLE outbox_targets",
        "ALTER TABLE attempts DROP COLUMN stream_seq",
        "ALTER TABLE attempts DROP COLUMN order_key",
        "ALTER TABLE attempts DROP COLUMN due_at",
        "DELETE FROM _sqlx_migrations WHERE version > 3",
    ] {
        sqlx::query(sql).execute(&mut *connection).await.unwrap();
    }
}

async fn open(file: &Path) -> SqliteConnection {
    SqliteConnectOptions::new().filename(file).connect().await.unwrap()
}

/// 60,000 orders whose ids have the form of before, 50,000 of them in the index.
#[tokio::test]
async fn ids_of_the_former_form_are_still_known_sealed_or_not() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_messages", "4000");
    let orders = SEGMENT_ROWS + 10_000;
    broker.publish_numbered(1..=orders.unsigned_abs()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(orders).await;

    let mut former = open(&spec.database()).await;
    with_former_ids(&mut former, 1_700_000_000_000_000_000).await;
    sqlx::query("DELETE FROM id_segments").execute(&mut former).await.unwrap();
    former.close().await.unwrap();
    // The index of the old ids, as the version before wrote it.
    Store::open(&Database::Sqlite(spec.database())).await.unwrap().close().await.unwrap();
    assert_eq!(spec.db().count("id_segments").await, 1);
    let mut former = open(&spec.database()).await;
    downgrade(&mut former).await;
    former.close().await.unwrap();

    // A database without a record of its consumer is accepted, although the consumer has acknowledged all these orders.
    spec.run_ok(&["run", "--until-idle"]).await;
    assert_eq!(spec.db().texts("SELECT stream || ' ' || consumer FROM binding").await, ["ORDERS order-processor"]);
    assert_eq!(spec.db().count("id_segments").await, 1, "the index was built again");
    broker.delete_consumer().await;
    broker.create_consumer(consumer_config()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(orders.unsigned_abs()).await;
    spec.db().applied_once(orders).await;
}

#[tokio::test]
async fn two_former_ids_of_a_message_become_one_and_other_ids_stay() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::Sqlite(folder.path().join("orders.db"));
    Store::open(&database).await.unwrap().close().await.unwrap();
    let mut former = open(&folder.path().join("orders.db")).await;
    let ids = [
        ("ORDERS@1:5:700", 5),
        ("a:b@1:c@1:6:701", 6),
        ("ORDERS@2:5:700", 5),
        // Of publishers: another sequence, no digits, something in front that is missing, zeros.
        ("x@1:2:3", 4),
        ("x@1:2:y3", 2),
        ("@1:2:3", 2),
        ("x@1:02:3", 2),
        ("x@1::3", 2),
        ("order 4711", 7),
        ("ORDERS@700:5", 8),
    ];
    for (id, seq) in ids {
        let sql = "INSERT INTO processed_ids (id, stream_seq, digest, processed_at) VALUES (?, ?, x'00', 1)";
        sqlx::query(sql).bind(id).bind(seq).execute(&mut former).await.unwrap();
    }
    for (id, error) in [("ORDERS@1:9:702", "first"), ("ORDERS@2:9:702", "second"), ("ORDERS@2:9:703", "other")] {
        let sql = "INSERT INTO dead_letters VALUES (?1, 's', 9, 1, 'permanent', ?2, '{}', x'', 1, x'01', 702)";
        sqlx::query(sql).bind(id).bind(error).execute(&mut former).await.unwrap();
        let sql = "INSERT INTO closed_letters VALUES (?1, 's', 9, 1, 'permanent', ?2, '{}', x'', 1, x'01', 702, \
             'replayed', 'ops', 1, ?1)";
        sqlx::query(sql).bind(id).bind(error).execute(&mut former).await.unwrap();
        let sql = "INSERT INTO attempts (id, failed, started, updated_at) VALUES (?1, ?2, 0, 1)";
        sqlx::query(sql).bind(id).bind(i64::from(error == "first")).execute(&mut former).await.unwrap();
    }
    downgrade(&mut former).await;
    former.close().await.unwrap();

    Store::open(&database).await.unwrap().close().await.unwrap();
    let db = Db::at(folder.path().join("orders.db"));
    let mut expected = vec!["ORDERS@700:5", "a:b@1:c@701:6"];
    expected.extend(ids[3..].iter().map(|(id, _)| *id));
    assert_eq!(db.texts("SELECT id FROM processed_ids ORDER BY row").await, expected);
    let letters = "SELECT id || ' ' || error FROM dead_letters ORDER BY rowid";
    assert_eq!(db.texts(letters).await, ["ORDERS@702:9 first", "ORDERS@703:9 other"]);
    let closed = "SELECT id || ' ' || applied_id || ' ' || error FROM closed_letters ORDER BY rowid";
    let of = |id: &str, error: &str| format!("{id} {id} {error}");
    let expected = [of("ORDERS@702:9", "first"), of("ORDERS@702:9", "second"), of("ORDERS@703:9", "other")];
    assert_eq!(db.texts(closed).await, expected, "a record of what operators did");
    let attempts = "SELECT id || ' ' || failed FROM attempts ORDER BY id";
    assert_eq!(db.texts(attempts).await, ["ORDERS@702:9 1", "ORDERS@703:9 0"]);
}
