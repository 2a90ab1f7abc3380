//! The contract of the store: what each database must do that stands behind [`Store`], [`Tx`] and [`Reader`].
//!
//! Each test runs on every database that [`databases`] returns. A second database passes this suite before it gets a release.
//! `ids` and `model` test the same functions with random steps, `kills` and `torture` with kill -9.

use std::time::Duration;

use order_processor::config::Database;
use order_processor::handler::orders::Orders;
use order_processor::handler::{Handler, Order};
use order_processor::model::delivery::{Delivery, Position, Raw};
use order_processor::model::id::Digest;
use order_processor::model::letter::{Closed, Closing, Pile, Which};
use order_processor::model::outbox::{OutboxRow, OutboxTarget};
use order_processor::model::outcome::{Outcome, Reason};
use order_processor::model::plan::Plan;
use order_processor::store::{
    self, Attempts, AttemptsRecord, Claim, Connection, Direction, Earlier, ErrorClass, OpenError, OutboxStep,
    OutboxTaken, Pause, Presence, ProcessedId, Prunable, Reader, Retry, Rows, Store, Tx,
};
use tempfile::TempDir;

const NOW: i64 = 1_000;

/// A database of each kind, new and without tables.
fn databases() -> Vec<(TempDir, Database)> {
    let folder = tempfile::tempdir().unwrap();
    let sqlite = Database::Sqlite(folder.path().join("orders.db"));
    vec![(folder, sqlite)]
}

async fn open(database: &Database) -> Store {
    Store::open(database).await.unwrap()
}

fn delivery(id: &str, payload: &str, stream_seq: u64) -> Delivery {
    let position = Position { delivered: 1, stream_seq, consumer_seq: 1, published_ns: 10 };
    let headers = vec![("A".to_owned(), "1".to_owned()), ("A".to_owned(), "2".to_owned())];
    let payload = payload.to_owned().into();
    let raw = Raw { subject: "ORDERS.new".into(), headers, payload, position, unreadable: None };
    let digest = Digest::of(&raw.subject, &raw.payload);
    Delivery {
        raw,
        id: id.into(),
        digest,
        defect: None,
        missing_id: None,
        ignored: None,
        attempt: 1,
        plan: Plan::Apply,
        key: None,
    }
}

fn dead(error: &str) -> Outcome {
    Outcome::DeadLettered { reason: Reason::Permanent, error: error.to_owned() }
}

async fn claim(store: &mut Store, deliveries: &[&Delivery]) -> Vec<Claim> {
    let mut tx = store.begin().await.unwrap();
    let claims = tx.claim(deliveries, NOW).await.unwrap();
    tx.commit().await.unwrap();
    claims
}

async fn known(store: &mut Store, delivery: &Delivery) -> Claim {
    let mut tx = store.begin().await.unwrap();
    let known = tx.known(&[delivery]).await.unwrap();
    tx.commit().await.unwrap();
    known[0]
}

async fn record(store: &mut Store, delivery: &Delivery, mut outcome: Outcome, now_ns: i64) -> Outcome {
    let mut tx = store.begin().await.unwrap();
    tx.record(&mut [(delivery, &mut outcome)], now_ns).await.unwrap();
    tx.commit().await.unwrap();
    outcome
}

async fn letters(database: &Database, of: Pile) -> Vec<(String, String)> {
    let mut reader = Reader::open(database).await.unwrap();
    let page = reader.page(of, &Which::default(), Rows::ALL, Direction::OldestFirst, 100).await.unwrap().0;
    page.into_iter().map(|(_, envelope)| (envelope.id, envelope.error)).collect()
}

#[tokio::test]
async fn a_claimed_id_is_known_to_every_connection_and_after_a_restart() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        let (one, two) = (delivery("a", "1", 1), delivery("b", "2", 2));
        assert_eq!(claim(&mut store, &[&one, &two]).await, [Claim::New, Claim::New]);
        let other = delivery("a", "another payload", 3);
        let expected = [Claim::Processed(one.digest), Claim::Processed(two.digest), Claim::New];
        let third = delivery("c", "3", 4);
        assert_eq!(claim(&mut store, &[&other, &two, &third]).await, expected, "the first digest stays");

        let mut beside = Store::open_beside(&database).await.unwrap();
        assert_eq!(known(&mut beside, &other).await, Claim::Processed(one.digest));
        let fourth = delivery("d", "4", 5);
        assert_eq!(claim(&mut beside, &[&fourth]).await, [Claim::New]);
        assert_eq!(
            known(&mut store, &fourth).await,
            Claim::Processed(fourth.digest),
            "claimed by the other connection"
        );
        let mut reader = Reader::open(&database).await.unwrap();
        let seen = reader.known(&[&third, &fourth, &delivery("e", "5", 6)]).await.unwrap();
        assert_eq!(seen, [Claim::Processed(third.digest), Claim::Processed(fourth.digest), Claim::New]);
        assert_eq!(reader.oldest_processed_at().await.unwrap(), Some(NOW));

        store.close().await.unwrap();
        let mut store = open(&database).await;
        assert_eq!(known(&mut store, &fourth).await, Claim::Processed(fourth.digest));
        assert_eq!(store.counts().await.unwrap().processed_ids, 4);
    }
}

/// The steps of a transaction, in the order of the path.
async fn steps(tx: &mut Tx<'_>, order: &Delivery, broken: &Delivery, count: usize) {
    for step in 0..count {
        match step {
            0 => drop(tx.claim(&[order], NOW).await.unwrap()),
            1 => Orders.apply(tx, &[Order { delivery: order, answer: None }]).await.unwrap(),
            2 => tx.set_attempts(&broken.id, Attempts { failed: 1, started: 0 }, Some("busy"), NOW).await.unwrap(),
            3 => tx.savepoint().await.unwrap(),
            4 => drop(tx.claim(&[broken], NOW).await.unwrap()),
            5 => tx.undo().await.unwrap(),
            _ => tx.record(&mut [(broken, &mut dead("unknown product"))], NOW).await.unwrap(),
        }
    }
}

#[tokio::test]
async fn a_transaction_does_everything_or_nothing() {
    let (order, broken) = (delivery("a", "1", 1), delivery("b", "2", 2));
    for dropped_after in 0..=7 {
        for reopened in [false, true] {
            for (_folder, database) in databases() {
                let mut store = open(&database).await;
                steps(&mut store.begin().await.unwrap(), &order, &broken, dropped_after).await;
                if reopened {
                    drop(store);
                    store = open(&database).await;
                }
                assert_eq!(known(&mut store, &order).await, Claim::New, "dropped after {dropped_after} steps");
                assert_eq!(known(&mut store, &broken).await, Claim::New);
                assert_eq!(store.counts().await.unwrap(), store::Counts::default());
                assert_eq!(rows(&mut store, "orders").await, 0);
                assert_eq!(rows(&mut store, "attempts").await, 0);

                let mut tx = store.begin().await.unwrap();
                steps(&mut tx, &order, &broken, 7).await;
                tx.commit().await.unwrap();
                assert_eq!(known(&mut store, &order).await, Claim::Processed(order.digest));
                assert_eq!(known(&mut store, &broken).await, Claim::Dead, "the claim was undone, the letter was not");
                assert_eq!(rows(&mut store, "orders").await, 1);
                assert_eq!(rows(&mut store, "attempts").await, 0, "the outcome deletes them");
            }
        }
    }
}

async fn rows(store: &mut Store, table: &str) -> i64 {
    let mut tx = store.begin().await.unwrap();
    let Connection::Sqlite(connection) = tx.connection();
    let sql = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
    let count = sqlx::query_scalar(sql).fetch_one(connection).await.unwrap();
    tx.commit().await.unwrap();
    count
}

#[tokio::test]
async fn a_savepoint_takes_back_its_claim_and_its_effect_and_nothing_else() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        let (kept, undone) = (delivery("a", "1", 1), delivery("b", "2", 2));
        let mut tx = store.begin().await.unwrap();
        for (order, keep) in [(&kept, true), (&undone, false)] {
            tx.savepoint().await.unwrap();
            assert_eq!(tx.claim(&[order], NOW).await.unwrap(), [Claim::New]);
            Orders.apply(&mut tx, &[Order { delivery: order, answer: None }]).await.unwrap();
            match keep {
                true => tx.keep().await.unwrap(),
                false => tx.undo().await.unwrap(),
            }
        }
        assert_eq!(tx.known(&[&kept, &undone]).await.unwrap(), [Claim::Processed(kept.digest), Claim::New]);
        tx.commit().await.unwrap();
        assert_eq!(known(&mut store, &undone).await, Claim::New);
        assert_eq!(rows(&mut store, "orders").await, 1);
        assert_eq!(claim(&mut store, &[&undone]).await, [Claim::New], "its id is free");
    }
}

#[tokio::test]
async fn a_message_is_a_dead_letter_once_even_after_it_was_closed() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        let (broken, other) = (delivery("a", "1", 1), delivery("a", "other", 2));
        assert_eq!(record(&mut store, &broken, dead("first"), NOW).await, dead("first"));
        assert_eq!(record(&mut store, &broken, dead("second"), NOW).await, Outcome::Duplicate);
        assert_eq!(known(&mut store, &broken).await, Claim::Dead);
        assert_eq!(known(&mut store, &other).await, Claim::New, "another message under the same id");
        assert_eq!(record(&mut store, &other, dead("third"), NOW).await, dead("third"));
        let open_letters = [("a".to_owned(), "first".to_owned()), ("a".to_owned(), "third".to_owned())];
        assert_eq!(letters(&database, Pile::Open).await, open_letters);
        assert_eq!(store.counts().await.unwrap().dead_letters, 2);

        let mut tx = store.begin().await.unwrap();
        tx.set_letter_error(&other.id, other.digest, "fourth").await.unwrap();
        let letter = tx.take_letter(&broken.id, broken.digest).await.unwrap().unwrap();
        assert_eq!(letter.delivery().raw.payload, broken.raw.payload);
        assert_eq!((letter.headers.clone(), letter.envelope.stream_seq), (broken.raw.headers.clone(), 1));
        assert!(tx.take_letter(&broken.id, broken.digest).await.unwrap().is_none());
        let closed = Closed { closing: Closing::Discarded, by: "ops".into(), at_ns: NOW, applied_id: None };
        tx.record_closed(&letter, &closed).await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(known(&mut store, &broken).await, Claim::Dead);
        assert_eq!(record(&mut store, &broken, dead("again"), NOW).await, Outcome::Duplicate);
        assert_eq!(letters(&database, Pile::Open).await, [("a".to_owned(), "fourth".to_owned())]);
        assert_eq!(letters(&database, Pile::Closed).await, [("a".to_owned(), "first".to_owned())]);
    }
}

#[tokio::test]
async fn letters_are_read_page_by_page_from_either_end() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        for id in ["a", "b", "c", "d", "e"] {
            record(&mut store, &delivery(id, id, 1), dead(id), NOW).await;
        }
        let mut reader = Reader::open(&database).await.unwrap();
        assert_eq!(reader.last_row().await.unwrap(), 5);
        for (direction, expected) in [(Direction::OldestFirst, "abcde"), (Direction::NewestFirst, "edcba")] {
            let (mut seen, mut left) = (String::new(), Some(Rows::ALL));
            while let Some(rows) = left {
                let page = reader.page(Pile::Open, &Which::default(), rows, direction, 2).await.unwrap();
                left = page.1;
                assert!(page.0.len() <= 2);
                for (row, envelope) in page.0 {
                    let letter = reader.letter(Pile::Open, row).await.unwrap().unwrap();
                    assert_eq!(letter.payload, envelope.id);
                    seen.push_str(&envelope.id);
                }
            }
            assert_eq!(seen, expected);
        }
        let which = Which { ids: vec!["b".into(), "e".into()], ..Which::default() };
        let page = reader.page(Pile::Open, &which, Rows::ALL, Direction::OldestFirst, 9).await.unwrap().0;
        assert_eq!(page.iter().map(|(_, envelope)| &*envelope.id).collect::<Vec<_>>(), ["b", "e"]);
    }
}

#[tokio::test]
async fn attempts_are_counted_until_the_outcome_and_a_retry_is_none() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        let order = delivery("a", "1", 1);
        let mut tx = store.begin().await.unwrap();
        assert_eq!(tx.attempts("a").await.unwrap(), Attempts::default());
        tx.set_attempts("a", Attempts::default().begun(), None, NOW).await.unwrap();
        let attempts = Attempts { failed: 1, ..tx.attempts("a").await.unwrap() };
        tx.set_attempts("a", attempts, Some("busy"), NOW).await.unwrap();
        tx.commit().await.unwrap();
        let retry = Outcome::Retry { delay: Duration::ZERO, error: "busy".to_owned() };
        assert_eq!(record(&mut store, &order, retry.clone(), NOW).await, retry);
        drop(store);

        let mut store = open(&database).await;
        let mut tx = store.begin().await.unwrap();
        assert_eq!(tx.attempts("a").await.unwrap(), Attempts { failed: 1, started: 1 });
        tx.commit().await.unwrap();
        record(&mut store, &order, Outcome::Applied, NOW).await;
        let mut tx = store.begin().await.unwrap();
        assert_eq!(tx.attempts("a").await.unwrap(), Attempts::default());
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_statement_that_a_constraint_refuses_blames_its_data() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        let mut tx = store.begin().await.unwrap();
        tx.claim(&[&delivery("a", "1", 1)], NOW).await.unwrap();
        let Connection::Sqlite(connection) = tx.connection();
        let refused = sqlx::query("INSERT INTO orders (id) VALUES (NULL)").execute(connection).await.unwrap_err();
        let error = store::Error::from(refused);
        assert_eq!((error.class, error.is_about_data()), (ErrorClass::Constraint, true));
        store.roll_back_after(&error).await;
        assert_eq!(claim(&mut store, &[&delivery("a", "1", 1)]).await, [Claim::New]);
    }
}

#[tokio::test]
async fn the_message_that_used_an_id_earlier_is_found_wherever_its_row_is() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        store.seal_after(10);
        for seq in 1..=25 {
            claim(&mut store, &[&delivery(&format!("o-{seq}"), "1", seq)]).await;
        }
        let mut tx = store.begin().await.unwrap();
        for seq in 1..=25 {
            let earlier = tx.earlier(&format!("o-{seq}")).await.unwrap();
            assert_eq!(earlier, Some(Earlier { stream_seq: seq, processed_at_ns: NOW }), "o-{seq}");
        }
        assert_eq!(tx.earlier("o-26").await.unwrap(), None);
    }
}

#[tokio::test]
async fn an_id_is_found_with_all_that_the_tables_have_about_it() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        store.seal_after(10);
        for seq in 1..=405 {
            claim(&mut store, &[&delivery(&format!("o-{seq}"), "1", seq)]).await;
        }
        let mut reader = Reader::open(&database).await.unwrap();
        for seq in 1..=405 {
            let order = delivery(&format!("o-{seq}"), "1", seq);
            let found = reader.find(&order.id).await.unwrap();
            let (id, digest) = (order.id.to_string(), order.digest);
            let expected = ProcessedId { id, stream_seq: seq, digest, processed_at_ns: NOW };
            assert_eq!(found.processed, Some(expected), "one page of each segment, or the open segment");
            assert!(found.attempts.is_none() && found.letters.is_empty() && found.outbox.is_empty());
        }
        assert_eq!(reader.find("o-406").await.unwrap().processed, None);
        let prunable = Prunable { before_ns: NOW + 1, gone: None };
        assert_eq!(store.upkeep(prunable, 25).await.unwrap().0, 25);
        assert_eq!(reader.find("o-25").await.unwrap().processed, None, "in a segment of which a part is pruned");
        assert!(reader.find("o-26").await.unwrap().processed.is_some());

        let (first, second, other) = (delivery("o-7", "1", 7), delivery("o-7", "2", 8), delivery("o-77", "3", 9));
        record(&mut store, &first, dead("first"), NOW + 1).await;
        record(&mut store, &second, dead("second"), NOW + 2).await;
        record(&mut store, &other, dead("other"), NOW + 3).await;
        let mut tx = store.begin().await.unwrap();
        tx.set_attempts("o-7", Attempts { failed: 2, started: 1 }, Some("busy"), NOW + 4).await.unwrap();
        let letter = tx.take_letter("o-7", first.digest).await.unwrap().unwrap();
        let closed = Closed { closing: Closing::Discarded, by: "ops".into(), at_ns: NOW, applied_id: None };
        tx.record_closed(&letter, &closed).await.unwrap();
        for id in ["accepted-o-7", "accepted-o-77", "o-7"] {
            write_row(&mut tx, id, "one").await;
        }
        tx.commit().await.unwrap();
        let found = reader.find("o-7").await.unwrap();
        assert_eq!(
            found.attempts,
            Some(AttemptsRecord {
                attempts: Attempts { failed: 2, started: 1 },
                last_error: Some("busy".into()),
                updated_at_ns: NOW + 4
            })
        );
        let letters: Vec<_> =
            found.letters.iter().map(|letter| (letter.error.as_str(), letter.closed.is_some())).collect();
        assert_eq!(letters, [("first", true), ("second", false)]);
        let outbox: Vec<_> = found.outbox.iter().map(|head| head.id.as_str()).collect();
        assert_eq!((outbox, found.outbox_was_cut), (vec!["accepted-o-7", "o-7"], false));
    }
}

#[tokio::test]
async fn a_sequence_is_found_near_its_place_and_a_cut_is_reported() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        // A former stream with the same sequences, then this one, in which some orders came late.
        let former: Vec<_> = (1..=30_000).map(|seq| delivery(&format!("f-{seq}"), "1", seq)).collect();
        let current: Vec<_> = (0..30_000).map(|seq| delivery(&format!("c-{seq}"), "1", seq ^ 7)).collect();
        for batch in former.chunks(10_000).chain(current.chunks(10_000)) {
            claim(&mut store, &batch.iter().collect::<Vec<_>>()).await;
        }
        let (broken, other) = (delivery("b", "1", 12_345), delivery("x", "1", 12_346));
        record(&mut store, &broken, dead("broken"), NOW).await;
        record(&mut store, &other, dead("other"), NOW).await;
        let mut reader = Reader::open(&database).await.unwrap();
        for seq in [1, 7, 9_999, 12_345, 29_999] {
            let found = reader.find_seq(seq).await.unwrap();
            let expected = current.iter().find(|order| order.raw.position.stream_seq == seq).unwrap();
            let ids: Vec<_> = found.processed.iter().map(|row| row.id.as_str()).collect();
            assert!(ids.contains(&&*expected.id), "{seq}: {ids:?}");
            assert!(found.was_cut, "60,000 rows are too many to compare");
            assert_eq!(found.letters.len(), usize::from(seq == 12_345));
        }
        assert!(reader.find_seq(40_000).await.unwrap().processed.is_empty());
    }
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        claim(&mut store, &[&delivery("a", "1", 3), &delivery("b", "1", 2)]).await;
        let mut reader = Reader::open(&database).await.unwrap();
        let found = reader.find_seq(2).await.unwrap();
        assert_eq!((found.processed[0].id.as_str(), found.was_cut), ("b", false));
        assert!(reader.find_seq(1).await.unwrap().processed.is_empty());
    }
}

#[tokio::test]
async fn upkeep_deletes_the_oldest_ids_and_attempts_in_steps() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        for seq in 1..=5 {
            let mut tx = store.begin().await.unwrap();
            tx.claim(&[&delivery(&seq.to_string(), "1", seq)], seq as i64 * 100).await.unwrap();
            tx.set_attempts(&format!("x{seq}"), Attempts::default().begun(), None, seq as i64 * 100).await.unwrap();
            tx.commit().await.unwrap();
        }
        let prunable = Prunable { before_ns: 400, gone: None };
        for (limit, expected, left) in [(2, 2, 3), (2, 1, 2), (2, 0, 2)] {
            let (pruned, counts) = store.upkeep(prunable, limit).await.unwrap();
            assert_eq!((pruned, counts.processed_ids), (expected, left));
        }
        assert_eq!(known(&mut store, &delivery("3", "1", 3)).await, Claim::New);
        assert!(matches!(known(&mut store, &delivery("4", "1", 4)).await, Claim::Processed(_)));
        let mut tx = store.begin().await.unwrap();
        assert_eq!(tx.attempts("x3").await.unwrap(), Attempts::default());
        assert_eq!(tx.attempts("x4").await.unwrap(), Attempts { failed: 0, started: 1 });
        tx.commit().await.unwrap();
    }
}

#[tokio::test]
async fn one_process_has_the_store_and_the_others_learn_who_it_is() {
    for (_folder, database) in databases() {
        assert_eq!(store::check(&database).await.unwrap(), Presence::WillBeCreated);
        assert_eq!(store::holder(&database).unwrap(), None);
        assert!(matches!(Store::open_again(&database).await, Err(OpenError::Database { .. })), "nothing is created");
        assert!(matches!(Reader::open(&database).await, Err(OpenError::Missing(_))));
        let mut store = open(&database).await;
        assert_eq!(store::check(&database).await.unwrap(), Presence::Exists);
        let holder = store::holder(&database).unwrap().unwrap();
        assert_eq!((holder.name, holder.is_repair), (format!("process {}", std::process::id()), false));
        store.sign_as_repair();
        assert!(store::holder(&database).unwrap().unwrap().is_repair);
        store.close().await.unwrap();
        assert_eq!(store::holder(&database).unwrap(), None);
    }
}

#[tokio::test]
async fn a_pause_and_a_backup_are_verbs_of_the_database() {
    for (folder, database) in databases() {
        let mut store = open(&database).await;
        claim(&mut store, &[&delivery("a", "1", 7)]).await;
        record(&mut store, &delivery("b", "2", 8), dead("no"), NOW).await;
        assert_eq!(store::paused(&database).unwrap(), None);
        let pause = Pause { by: "ops@db1".into(), at: "2026-11-29T21:00:00Z".into(), reason: None };
        assert!(store::begin_pause(&database, &pause).unwrap());
        assert!(!store::begin_pause(&database, &pause).unwrap());
        assert_eq!(store::paused(&database).unwrap(), Some(pause));
        store::pause_begins(&database).await;
        assert!(store::end_pause(&database).unwrap());
        assert!(!store::end_pause(&database).unwrap());

        let copy = folder.path().join("copy");
        let contents = store::backup(&database, &copy).await.unwrap();
        assert_eq!((contents.processed_ids, contents.dead_letters, contents.last_stream_seq), (1, 1, Some(8)));
        assert!(store.sizes().database > 0 && store::sizes(&database) == store.sizes());
    }
}

const STEP: OutboxStep =
    OutboxStep { done: Vec::new(), targets: Vec::new(), max_messages: 10, max_bytes: 1 << 20, wants_all: true };

/// Writes a row into the outbox, as a handler does.
async fn write_row(tx: &mut Tx<'_>, id: &str, payload: &str) {
    let Connection::Sqlite(connection) = tx.connection();
    let sql = "INSERT INTO outbox (id, subject, headers, payload) VALUES (?, 'SHOP.a', '{\"A\": \"1\"}', ?)";
    sqlx::query(sql).bind(id).bind(payload).execute(connection).await.unwrap();
}

fn ids(rows: &[OutboxRow]) -> Vec<&str> {
    rows.iter().map(|row| row.id.as_str()).collect()
}

#[tokio::test]
async fn a_retry_of_an_order_with_a_key_is_known_to_the_next_process() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        assert_eq!(store.retries(), []);
        let mut tx = store.begin().await.unwrap();
        for (id, failed) in [("a", 1), ("no key", 1), ("done", 1)] {
            tx.set_attempts(id, Attempts { failed, started: 0 }, Some("busy"), NOW).await.unwrap();
        }
        let retry = Retry { stream_seq: 7, key: "customer".into(), due_ns: 99, failed_at_ns: NOW };
        tx.set_retry("a", &retry).await.unwrap();
        tx.set_retry("done", &Retry { stream_seq: 8, ..retry.clone() }).await.unwrap();
        tx.record(&mut [(&delivery("done", "x", 8), &mut Outcome::Applied)], NOW).await.unwrap();
        tx.commit().await.unwrap();
        store.close().await.unwrap();
        assert_eq!(open(&database).await.retries(), [retry]);
    }
}

#[tokio::test]
async fn a_transaction_knows_the_rows_that_it_has_put_into_the_outbox() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        let mut tx = store.begin().await.unwrap();
        assert_eq!(tx.outbox_written().await.unwrap(), []);
        write_row(&mut tx, "a", "one").await;
        assert_eq!(ids(&tx.outbox_written().await.unwrap()), ["a"]);
        tx.savepoint().await.unwrap();
        write_row(&mut tx, "b", "two").await;
        assert_eq!(ids(&tx.outbox_written().await.unwrap()), ["b"], "only the new one");
        tx.undo().await.unwrap();
        write_row(&mut tx, "c", "three").await;
        assert_eq!(ids(&tx.outbox_written().await.unwrap()), ["c"], "also under the number of an undone row");
        tx.commit().await.unwrap();
        let last = store.last_outbox_row();

        // Rows of others are not those of the next transaction.
        let mut beside = Store::open_beside(&database).await.unwrap();
        let mut tx = beside.begin().await.unwrap();
        write_row(&mut tx, "d", "four").await;
        tx.commit().await.unwrap();
        let mut tx = store.begin().await.unwrap();
        assert_eq!(tx.outbox_written().await.unwrap(), []);
        write_row(&mut tx, "undone", "five").await;
        assert_eq!(ids(&tx.outbox_written().await.unwrap()), ["undone"]);
        store.roll_back().await;
        store.begin().await.unwrap().commit().await.unwrap();
        assert_eq!(store.last_outbox_row(), last + 1, "that of the other connection");
    }
}

#[tokio::test]
async fn the_outbox_returns_the_oldest_rows_and_deletes_the_published_ones() {
    for (_folder, database) in databases() {
        let mut store = open(&database).await;
        assert_eq!(store.take_outbox(&STEP).await.unwrap(), OutboxTaken::default());
        let mut tx = store.begin().await.unwrap();
        for (id, payload) in [("a", "one"), ("b", "two"), ("c", "three")] {
            write_row(&mut tx, id, payload).await;
        }
        let written = tx.outbox_written().await.unwrap();
        tx.seek_outbox_rows(&written[1..2], 77).await.unwrap();
        tx.commit().await.unwrap();
        let counts = store.counts().await.unwrap();
        assert_eq!((counts.outbox_rows, counts.outbox_oldest_ns.is_some()), (3, true));

        let taken = store.take_outbox(&OutboxStep { max_bytes: 6, ..STEP }).await.unwrap();
        let messages: Vec<_> =
            taken.messages.iter().map(|message| (message.id.as_str(), &message.payload[..])).collect();
        assert_eq!(messages, [("a", &b"one"[..]), ("b", b"two")], "as many as fit");
        assert_eq!(taken.messages[0].headers, [("A".to_owned(), "1".to_owned())]);
        let sought: Vec<_> = taken.rows.iter().map(|row| (row.id.as_str(), row.sought_from)).collect();
        assert_eq!(sought, [("a", None), ("b", Some(77)), ("c", None)]);
        let tiny = store.take_outbox(&OutboxStep { max_bytes: 1, wants_all: false, ..STEP }).await.unwrap();
        assert_eq!((tiny.messages.len(), tiny.rows.len()), (1, 0), "at least one");

        let target = OutboxTarget { stream: "SHOP".to_owned(), created_ns: 5, after_seq: 9 };
        let done = vec![taken.messages[0].row, taken.messages[1].row];
        let step = OutboxStep { done, targets: vec![target.clone()], ..STEP };
        let left = store.take_outbox(&step).await.unwrap();
        assert_eq!((ids(&left.rows), left.targets), (vec!["c"], vec![target.clone()]));
        let moved = OutboxTarget { after_seq: 12, ..target };
        let step = OutboxStep { targets: vec![moved.clone()], max_messages: 0, ..STEP };
        let none = store.take_outbox(&step).await.unwrap();
        assert_eq!((none.messages.len(), none.targets), (0, vec![moved]));
    }
}
