//! `find`: the verdict on one order, its timeline and the next step, whatever of daemon, server and database is there.

use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::consumer;
use async_trait::async_trait;
use order_processor::handler::{Failure, Handler, Order};
use order_processor::model::delivery::Delivery;
use order_processor::model::plan::Plan;
use order_processor::ops::find;
use order_processor::store::Tx;
use serde_json::Value;

use crate::support::in_process::{Bench, Clerk};
use crate::support::nats::{consumer_config, headers, patient_consumer_config, publish_raw};
use crate::support::{Broker, DaemonSpec, Finished, PATIENCE, at_least, eventually};

const APPLIED: i32 = 0;
const NOT_APPLIED: i32 = 1;
const NOT_KNOWN: i32 = 3;

/// Runs `find --json`, and compares verdict, exit code and `applied`.
async fn found(spec: &DaemonSpec, arguments: &[&str], verdict: &str, code: i32) -> Value {
    let finished = spec.run(&[&["find", "--json"], arguments].concat()).await;
    assert_eq!(finished.code, Some(code), "{arguments:?}: {finished:?}");
    let answer = finished.json();
    assert_eq!(answer["verdict"], verdict, "{arguments:?}: {answer:#}");
    let row = format!("| `{verdict}` | {code} |");
    assert!(include_str!("../../docs/desk.md").contains(&row), "docs/desk.md has no {row}");
    let applied = match code {
        APPLIED => Some(true),
        NOT_APPLIED => Some(false),
        _ => None,
    };
    assert_eq!(answer["applied"].as_bool(), applied, "{answer:#}");
    let text = spec.run(&[&["find"], arguments].concat()).await;
    assert_eq!(text.code, Some(code), "the same in text: {text:?}");
    let summary = answer["summary"].as_str().unwrap();
    assert!(text.stdout.starts_with(&format!("verdict       {}", &summary[..summary.len().min(60)])), "{text:?}");
    answer
}

fn events(answer: &Value) -> Vec<&str> {
    let events = answer["timeline"].as_array().unwrap();
    let times: Vec<&str> = events.iter().filter_map(|event| event["at"].as_str()).collect();
    assert!(times.is_sorted() && times.len() == events.len(), "{answer:#}");
    events.iter().map(|event| event["event"].as_str().unwrap()).collect()
}

/// One of the lists of the answer, as one text.
fn list(answer: &Value, name: &str) -> String {
    let texts = answer[name].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    texts.collect::<Vec<_>>().join("\n")
}

/// Another client takes the next messages and acknowledges them.
async fn acknowledged_elsewhere(broker: &Broker, messages: usize) {
    for _ in 0..messages {
        broker.take_one().await.double_ack().await.unwrap();
    }
}

#[tokio::test]
async fn an_applied_order_is_found_by_id_sequence_and_place_in_every_state() {
    let (mut server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let trace = [("Nats-Msg-Id", "o-1"), ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")];
    broker.publish_to("ORDERS.new", headers(&trace), b"Coffee".to_vec()).await;
    broker.publish("plain").await;
    let mut worker = spec.start();
    broker.acknowledged(2).await;

    let answer = found(&spec, &["o-1"], "applied", APPLIED).await;
    assert_eq!(events(&answer), ["published", "applied"]);
    assert_eq!((answer["id"].as_str(), answer["stream_seq"].as_u64()), (Some("o-1"), Some(1)));
    assert_eq!(answer["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!((answer["ack_floor_stream_seq"].as_u64(), answer["last_stream_seq"].as_u64()), (Some(2), Some(2)));
    assert_eq!((list(&answer, "next"), list(&answer, "not_asked")), (String::new(), String::new()));
    assert_eq!(answer["timeline"][0]["text"], "message 1 of ORDERS, subject ORDERS.new, 6 bytes");
    assert!(answer["daemon"].as_str().unwrap().contains("ready"), "{answer:#}");
    let place = spec.db().texts("SELECT id FROM orders WHERE stream_seq = 2").await.remove(0);
    assert!(place.starts_with("ORDERS@"), "{place}");
    assert_eq!(found(&spec, &[&place], "applied", APPLIED).await["stream_seq"], 2);
    assert_eq!(found(&spec, &["--seq", "2"], "applied", APPLIED).await["id"], place);
    let of_first = place.replace(":2", ":1");
    let answer = found(&spec, &[&of_first], "not-found", NOT_KNOWN).await;
    assert!(list(&answer, "notes").contains("published at another time"), "{answer:#}");

    spec.run_ok(&["pause", "--reason", "disk"]).await;
    let answer = found(&spec, &["o-1"], "applied", APPLIED).await;
    assert!(answer["daemon"].as_str().unwrap().starts_with("paused by "), "{answer:#}");
    spec.run_ok(&["resume"]).await;
    worker.ready().await;
    worker.drain().await;
    let answer = found(&spec, &["o-1"], "applied", APPLIED).await;
    assert!(answer["daemon"].as_str().unwrap().starts_with("not running"), "{answer:#}");

    server.kill9();
    for (arguments, why) in [(&["o-1"][..], "cannot connect"), (&["o-1", "--no-server"], "--no-server")] {
        let answer = found(&spec, arguments, "applied", APPLIED).await;
        assert_eq!(events(&answer), ["applied"]);
        assert!(list(&answer, "not_asked").starts_with("the server: "), "{answer:#}");
        assert!(list(&answer, "not_asked").contains(why), "{answer:#}");
    }
    assert_eq!(found(&spec, &["--seq", "2"], "applied", APPLIED).await["id"], place);
}

#[tokio::test]
async fn an_id_of_the_pointer_is_found_with_its_subject_and_hinted_at_without_it() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    broker.publish(r#"{"id": 4711}"#).await;
    broker.publish("no JSON").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    found(&spec, &["ORDERS.new 4711"], "applied", APPLIED).await;
    assert_eq!(found(&spec, &["--seq", "1"], "applied", APPLIED).await["id"], "ORDERS.new 4711");
    let answer = found(&spec, &["4711"], "not-found", NOT_KNOWN).await;
    assert!(list(&answer, "next").contains("\"ORDERS.new 4711\""), "{answer:#}");
    let answer = found(&spec, &["--seq", "2"], "dead-letter", NOT_APPLIED).await;
    assert_eq!(answer["reason"], "undecodable");

    // The record of the database makes the ids, whatever the settings are.
    let other = spec.set("inbox.id_pointer", "/number");
    let answer = found(&other, &["--seq", "1"], "applied", APPLIED).await;
    assert_eq!((answer["id"].as_str(), answer["applied_id"].as_str()), (Some("ORDERS.new 4711"), None));
    assert!(list(&answer, "notes").contains("in another way"), "{answer:#}");
    // A former version made no record.
    other.db().execute("DELETE FROM id_schemes").await;
    let answer = found(&other, &["--seq", "1"], "applied", APPLIED).await;
    assert_eq!(answer["summary"], "applied, under another id: ORDERS.new 4711");
    assert_eq!(answer["applied_id"], "ORDERS.new 4711");
    assert_eq!(events(&answer), ["published", "applied"]);
}

/// A conflict: `o-1` is applied as message 1 and a dead letter as message 2.
async fn conflict() -> Bench {
    let bench = Bench::new(consumer_config(), &[]).await;
    let id = headers(&[("Nats-Msg-Id", "o-1")]);
    bench.broker.publish_to("ORDERS.new", id.clone(), b"Coffee, two pounds".to_vec()).await;
    bench.broker.publish_anew("ORDERS.new", id, b"Coffee, one pound".to_vec()).await;
    bench.spec.run_ok(&["run", "--until-idle"]).await;
    bench
}

#[tokio::test]
async fn a_dead_letter_comes_before_the_order_that_used_its_id() {
    let Bench { spec, .. } = &conflict().await;
    let answer = found(spec, &["o-1"], "dead-letter", NOT_APPLIED).await;
    assert_eq!((answer["reason"].as_str(), answer["stream_seq"].as_u64()), (Some("conflict"), Some(2)));
    assert_eq!(events(&answer), ["published", "applied", "dead letter"]);
    assert!(answer["summary"].as_str().unwrap().contains("was used before by stream sequence 1"), "{answer:#}");
    let next = list(&answer, "next");
    assert!(next.starts_with("order-processor dead-letters show o-1\n"), "{next}");
    assert!(next.contains("replay o-1 --as-new") && next.contains("discard o-1"), "{next}");
    found(spec, &["--seq", "1"], "applied", APPLIED).await;
    found(spec, &["--seq", "2"], "dead-letter", NOT_APPLIED).await;
    found(spec, &["o-1", "--no-server"], "dead-letter", NOT_APPLIED).await;
    found(spec, &["--seq", "2", "--no-server"], "dead-letter", NOT_APPLIED).await;

    spec.run_ok(&["dead-letters", "replay", "o-1", "--as-new"]).await;
    let answer = found(spec, &["--seq", "2"], "replayed", APPLIED).await;
    assert!(answer["by"].as_str().unwrap().contains('@'), "{answer:#}");
    assert!(answer["applied_id"].as_str().unwrap().starts_with("o-1@"), "{answer:#}");
    assert_eq!(events(&answer), ["published", "applied", "dead letter", "replayed"]);
    let answer = found(spec, &["o-1"], "applied", APPLIED).await;
    assert_eq!(answer["stream_seq"], 1, "the order that has the id");
    let own_id = spec.db().texts("SELECT applied_id FROM closed_letters").await.remove(0);
    found(spec, &[&own_id], "applied", APPLIED).await;
}

#[tokio::test]
async fn who_replayed_or_discarded_a_letter_is_in_the_verdict() {
    let (server, broker) = Broker::story().await;
    let strict = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    broker.publish("one").await;
    broker.publish("two").await;
    strict.run_ok(&["run", "--until-idle"]).await;
    let ids = strict.db().texts("SELECT id FROM dead_letters ORDER BY stream_seq").await;
    strict.run_ok(&["dead-letters", "replay", "--as-new", &ids[0]]).await;
    strict.run_ok(&["dead-letters", "discard", "--yes", &ids[1]]).await;
    let by = strict.db().texts("SELECT closed_by FROM closed_letters").await.remove(0);
    let answer = found(&strict, &[&ids[0]], "replayed", APPLIED).await;
    assert_eq!(answer["summary"], format!("applied: replayed by {by}"));
    assert_eq!(events(&answer), ["published", "dead letter", "applied", "replayed"]);
    let answer = found(&strict, &["--seq", "2"], "discarded", NOT_APPLIED).await;
    assert_eq!(answer["summary"], format!("not applied: discarded by {by}"));
    assert!(list(&answer, "next").contains("dead-letters show"), "{answer:#}");
}

#[tokio::test]
async fn a_failing_order_is_retrying_with_its_attempt_and_its_error() {
    let bench = Bench::new(consumer_config(), &[("retry.max_attempts", "5"), ("retry.min_delay", "5m")]).await;
    let clerk = Clerk::new();
    let worker = bench.start(&clerk).await;
    bench.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "o-1")]), b"retry 1".to_vec()).await;
    bench.spec.db().has("attempts", 1).await;
    for arguments in [&["o-1"][..], &["--seq", "1"], &["o-1", "--no-server"]] {
        let answer = found(&bench.spec, arguments, "retrying", NOT_APPLIED).await;
        assert_eq!(answer["summary"], "retrying, attempt 2 of 5");
        assert_eq!((answer["attempt"].as_u64(), answer["max_attempts"].as_u64()), (Some(2), Some(5)));
        let failed = &answer["timeline"].as_array().unwrap().last().unwrap()["text"];
        assert_eq!(*failed, "attempt 1 of 5: out of stock");
        assert!(list(&answer, "next").contains("after 5 attempts"), "{answer:#}");
    }
    assert_eq!(events(&found(&bench.spec, &["o-1"], "retrying", NOT_APPLIED).await), ["published", "failed"]);
    worker.drain().await;
}

#[tokio::test]
async fn an_order_that_was_not_decided_is_delivered_or_waits_behind_the_others() {
    let (server, broker) = Broker::with(patient_consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["run", "--until-idle"]).await;
    for number in 1..=40 {
        let id = format!("o-{number}");
        broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", &id)]), b"order".to_vec()).await;
    }
    let held = broker.take_one().await;
    let answer = found(&spec, &["o-1"], "delivered", NOT_APPLIED).await;
    assert_eq!(events(&answer), ["published"]);
    assert!(list(&answer, "next").contains("start the daemon"), "{answer:#}");
    let answer = found(&spec, &["--seq", "2"], "waiting", NOT_APPLIED).await;
    assert_eq!(answer["summary"], "waits in the stream, and is the next one");
    for arguments in [&["o-40"][..], &["--seq", "40"]] {
        let answer = found(&spec, arguments, "waiting", NOT_APPLIED).await;
        assert_eq!(answer["summary"], "waits in the stream, 38 before it");
        assert_eq!((answer["before"].as_u64(), answer["exact"].as_bool()), (Some(38), Some(true)));
    }
    let answer = found(&spec, &["o-41"], "not-found", NOT_KNOWN).await;
    assert_eq!(answer["summary"], "not found: no table has the id, and no message above the ack floor");
    assert_eq!(list(&answer, "next"), "order-processor find --scan o-41");
    let answer = found(&spec, &["o-40", "--no-server"], "not-found", NOT_KNOWN).await;
    assert_eq!(answer["summary"], "not found: no table has the id");
    let answer = found(&spec, &["--seq", "41"], "not-found", NOT_KNOWN).await;
    assert_eq!(answer["summary"], "not found: the last message of the stream is 40");
    assert_eq!(list(&answer, "next"), "");

    spec.run_ok(&["pause"]).await;
    let answer = found(&spec, &["o-40"], "waiting", NOT_APPLIED).await;
    assert!(list(&answer, "next").contains("order-processor resume"), "{answer:#}");
    spec.run_ok(&["resume"]).await;
    broker.pause_consumer(Duration::from_secs(600)).await;
    let answer = found(&spec, &["o-40"], "waiting", NOT_APPLIED).await;
    assert!(list(&answer, "next").contains("nats consumer resume"), "{answer:#}");
    drop(held);
}

#[tokio::test]
async fn what_the_floor_has_passed_unknown_is_missing_and_a_scan_finds_it() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish("first").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "lost")]), b"lost".to_vec()).await;
    acknowledged_elsewhere(&broker, 1).await;
    let answer = found(&spec, &["--seq", "2"], "missing", NOT_APPLIED).await;
    assert_eq!(answer["id"], "lost");
    assert!(list(&answer, "next").contains("audit --repair"), "{answer:#}");
    let answer = found(&spec, &["lost"], "not-found", NOT_KNOWN).await;
    assert_eq!(list(&answer, "next"), "order-processor find --scan lost");
    assert_eq!(found(&spec, &["lost", "--scan"], "missing", NOT_APPLIED).await["stream_seq"], 2);
    let answer = found(&spec, &["nowhere", "--scan"], "not-found", NOT_KNOWN).await;
    assert_eq!(answer["summary"], "not found: no table and no message of the stream has the id");
    // What no client can parse is in the way of neither.
    publish_raw(&server, b"no colon", b"unreadable").await;
    let behind = broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "behind")]), b"behind".to_vec()).await;
    for arguments in [&["behind"][..], &["behind", "--scan"]] {
        let finished = spec.run(&[&["find", "--json"], arguments].concat()).await;
        assert_eq!(finished.json()["verdict"], "waiting", "{finished:?}");
        assert!(!finished.stderr.contains("panicked"), "{finished:?}");
        assert_eq!(finished.json()["stream_seq"], behind.stream_seq);
    }
    spec.run_ok(&["audit", "--repair"]).await;
    found(&spec, &["lost"], "applied", APPLIED).await;
}

#[tokio::test]
async fn what_another_database_has_processed_is_not_known() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=3).await;
    acknowledged_elsewhere(&broker, 3).await;
    // Creates the database, and is refused.
    assert_eq!(spec.run(&["run", "--until-idle"]).await.code, Some(2));
    spec.run_ok(&["adopt", "--yes"]).await;
    let answer = found(&spec, &["--seq", "3"], "undetermined", NOT_KNOWN).await;
    assert!(answer["summary"].as_str().unwrap().contains("orders up to message 3"), "{answer:#}");
    let other = spec.set("consumer.name", "other");
    broker.create_consumer(consumer::pull::Config { durable_name: Some("other".into()), ..consumer_config() }).await;
    let answer = found(&other, &["--seq", "3"], "waiting", NOT_APPLIED).await;
    assert!(list(&answer, "notes").contains("the database belongs to consumer order-processor"), "{answer:#}");
}

#[tokio::test]
async fn a_message_that_left_the_stream_is_found_in_the_tables_or_not_at_all() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_numbered(1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().execute("DELETE FROM processed_ids WHERE stream_seq = 3").await;
    broker.purge().await;
    let answer = found(&spec, &["--seq", "2"], "applied", APPLIED).await;
    assert_eq!(events(&answer), ["applied"]);
    let answer = found(&spec, &["--seq", "3"], "not-found", NOT_KNOWN).await;
    assert!(answer["summary"].as_str().unwrap().contains("no longer has the message"), "{answer:#}");
    assert!(list(&answer, "next").contains("inbox.retention"), "{answer:#}");
}

#[tokio::test]
async fn messages_that_are_no_orders_or_not_for_the_consumer_are_called_so() {
    let filtered = consumer::pull::Config { filter_subject: "ORDERS.new".into(), ..consumer_config() };
    let (server, broker) = Broker::with(filtered).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish_to("ORDERS.new", headers(&[("KV-Operation", "DEL")]), Vec::new()).await;
    broker.publish_to("ORDERS.other", HeaderMap::new(), b"other".to_vec()).await;
    broker.publish("plain").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let answer = found(&spec, &["--seq", "1"], "ignored", NOT_APPLIED).await;
    assert_eq!(answer["summary"], "ignored: the deletion of a key");
    found(&spec, &["--seq", "2"], "not-for-the-consumer", NOT_APPLIED).await;
    found(&spec, &["--seq", "3"], "applied", APPLIED).await;
    broker.publish("plain").await;
    broker.publish("plain").await;
    let answer = found(&spec, &["--seq", "5"], "waiting", NOT_APPLIED).await;
    assert_eq!(answer["summary"], "waits in the stream, at most 1 before it", "the filter hides some");
}

/// Ignores every order.
struct Idle;

#[async_trait]
impl Handler for Idle {
    fn plan(&self, _: &Delivery) -> Plan {
        Plan::Ignore
    }

    async fn apply(&self, _: &mut Tx<'_>, _: &[Order<'_>]) -> Result<(), Failure> {
        panic!("no order is for this handler")
    }
}

#[tokio::test]
async fn an_order_that_its_handler_ignores_was_claimed_and_not_applied() {
    #[derive(clap::Parser)]
    struct Asked {
        #[command(flatten)]
        args: find::FindArgs,
    }
    let bench = Bench::new(consumer_config(), &[]).await;
    bench.broker.publish("nothing").await;
    let worker = bench.start(&Arc::new(Idle)).await;
    bench.broker.acknowledged(1).await;
    worker.drain().await;
    let mut out = Vec::new();
    let asked = <Asked as clap::Parser>::parse_from(["find", "--seq", "1"]);
    let applied = find::run(&bench.spec.config(), asked.args, Ok(&Idle), &mut out).await.unwrap();
    let answer = String::from_utf8(out).unwrap();
    assert_eq!(applied, Some(false), "{answer}");
    assert!(answer.starts_with("verdict       ignored: a route of the handler ignores it\n"), "{answer}");
    assert!(answer.contains("\nclaimed  ") && !answer.contains("\napplied  "), "{answer}");
}

#[tokio::test]
async fn a_broken_handler_file_does_not_hide_an_order_and_a_scope_is_hinted_at() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_scope", "header:X-Tenant");
    let tenant = headers(&[("Nats-Msg-Id", "4711"), ("X-Tenant", "acme")]);
    broker.publish_to("ORDERS.new", tenant, b"order".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let answer = found(&spec, &["4711"], "not-found", NOT_KNOWN).await;
    assert!(list(&answer, "next").contains("\"X-Tenant=VALUE:4711\""), "{answer:#}");
    found(&spec, &["X-Tenant=acme:4711"], "applied", APPLIED).await;

    let file = spec.folder().join("orders.toml");
    std::fs::write(&file, "[[route]]\nsubject = ").unwrap();
    let broken = spec.set("handler.file", file.as_os_str());
    assert_eq!(broken.run(&["audit"]).await.code, Some(2), "it is broken");
    let answer = found(&broken, &["--seq", "1"], "applied", APPLIED).await;
    assert!(list(&answer, "not_asked").starts_with("the handler, so that"), "{answer:#}");
}

#[tokio::test]
async fn a_dropped_conflict_and_rows_of_the_outbox_are_shown() {
    let bench = Bench::new(consumer_config(), &[("inbox.on_conflict", "duplicate")]).await;
    let id = headers(&[("Nats-Msg-Id", "o-1")]);
    bench.broker.publish_to("ORDERS.new", id.clone(), b"one".to_vec()).await;
    bench.broker.publish_anew("ORDERS.new", id, b"two".to_vec()).await;
    bench.spec.run_ok(&["run", "--until-idle"]).await;
    found(&bench.spec, &["--seq", "2"], "dropped", NOT_APPLIED).await;
    let row = "INSERT INTO outbox (id, subject, payload) VALUES ('accepted-o-1', 'SHOP.accepted', 'x')";
    bench.spec.db().execute(row).await;
    let answer = found(&bench.spec, &["o-1"], "applied", APPLIED).await;
    assert_eq!(events(&answer), ["published", "applied", "outbox"]);
    let waits = "row 1, id accepted-o-1, subject SHOP.accepted, waits to be published";
    assert_eq!(answer["timeline"][2]["text"], waits);
    let answer = found(&bench.spec, &["accepted-o-1"], "in-outbox", NOT_APPLIED).await;
    assert_eq!(answer["summary"], "not published yet: row 1 of the outbox has this id");
}

#[tokio::test]
async fn a_missing_permission_is_a_source_that_was_not_asked() {
    let publish = "allow: [\"$JS.API.STREAM.INFO.ORDERS\", \"$JS.API.CONSUMER.INFO.ORDERS.order-processor\", \
                   \"$JS.API.CONSUMER.MSG.NEXT.ORDERS.order-processor\", \"$JS.ACK.>\"]";
    let (server, broker) = Broker::with_restricted_worker(publish, consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    broker.publish("plain").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let answer = found(&spec, &["--seq", "1"], "applied", APPLIED).await;
    assert!(list(&answer, "not_asked").contains("STREAM.MSG.GET.ORDERS"), "{answer:#}");
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "o-2")]), b"order".to_vec()).await;
    let answer = found(&spec, &["o-2"], "not-found", NOT_KNOWN).await;
    assert!(list(&answer, "not_asked").starts_with("the messages of the stream: "), "{answer:#}");
}

#[tokio::test]
async fn ids_that_are_hostile_or_long_are_found_and_drive_no_terminal() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    let long = "x".repeat(60_000);
    let values =
        ["\u{1b}]0;title\u{7}\u{1b}[31m", "a\nverdict       applied", "\u{202e}reversed", "'; rm -rf / #", &long];
    for value in values {
        broker.publish(serde_json::json!({ "id": value }).to_string()).await;
    }
    // The same ids with other payloads.
    for value in values {
        broker.publish(serde_json::json!({ "id": value, "more": 1 }).to_string()).await;
    }
    spec.run_ok(&["run", "--until-idle"]).await;
    for value in values {
        let id = format!("ORDERS.new {value}");
        let Finished { code, stdout, stderr } = spec.run(&["find", &id]).await;
        assert_eq!(code, Some(NOT_APPLIED), "{stdout} {stderr}");
        let is_safe = |c: char| c == '\n' || !(c.is_control() || c == '\u{202e}');
        assert!(stdout.chars().all(is_safe) && stdout.len() < 8_000, "{} {stdout:?}", stdout.len());
        assert_eq!(stdout.lines().filter(|line| line.starts_with("verdict ")).count(), 1, "{stdout}");
        assert!(!stdout.contains("show 'ORDERS.new \\u"), "an escaped id is not the id: {stdout}");
        let answer = spec.run(&["find", "--json", &id]).await;
        assert!(answer.stdout.trim_end().chars().all(|c| !c.is_control() && c != '\u{202e}'), "{answer:?}");
        assert_eq!(answer.json()["id"], id);
        assert_eq!(answer.json()["verdict"], "dead-letter");
    }
    let quoted = spec.run(&["find", "ORDERS.new '; rm -rf / #"]).await.stdout;
    assert!(quoted.contains(r"dead-letters show 'ORDERS.new '\''; rm -rf / #'"), "{quoted}");
    for wrong in
        [&["find"][..], &["find", ""], &["find", "a", "--seq", "1"], &["find", "--seq", "0"], &["find", "--jsno"]]
    {
        assert_eq!(spec.run(wrong).await.code, Some(2), "{wrong:?}");
    }
}

#[tokio::test]
async fn a_missing_database_is_for_the_operator_and_a_gone_reader_is_nothing() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let missing = spec.run(&["find", "o-1"]).await;
    assert_eq!(missing.code, Some(2), "{missing:?}");
    assert!(missing.complaints()[0].contains("no database at"), "{missing:?}");
    broker.publish("plain").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    for (arguments, code) in [(["find", "--seq", "1"], APPLIED), (["find", "--seq", "9"], NOT_KNOWN)] {
        let mut command = spec.command(&arguments);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = command.stdout(writer).status().unwrap();
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

#[tokio::test]
async fn a_busy_daemon_is_looked_at_while_it_works() {
    const ORDERS: u64 = 3_000;
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    worker.freeze();
    broker.publish_numbered(1..=ORDERS).await;
    let seq = ORDERS.to_string();
    let frozen = spec.run(&["find", "--json", "--seq", &seq, "--no-server"]).await;
    assert_eq!((frozen.code, &frozen.json()["verdict"]), (Some(NOT_KNOWN), &Value::from("not-found")));
    worker.thaw();
    let mut looks = 0;
    eventually("the last order is applied", PATIENCE, async || {
        let answer = spec.run(&["find", "--json", "--seq", &seq]).await;
        looks += 1;
        let answer = answer.json();
        match answer["verdict"].as_str() {
            Some("applied") => Ok(()),
            Some("waiting" | "delivered") => Err(answer),
            _ => panic!("neither of the three: {answer:#}"),
        }
    })
    .await;
    println!("{looks} looks");
    at_least(spec.db().count("orders").await, i64::try_from(ORDERS).unwrap()).unwrap();
    drop(worker);
}
