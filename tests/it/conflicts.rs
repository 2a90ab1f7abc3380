//! Another order under a used id: what the dead letter says, and what is counted if such orders are dropped.

use std::time::Duration;

use crate::support::nats::headers;
use crate::support::{Broker, DaemonSpec, NatsServer};

/// The story on a stream that forgets message ids, so that a publisher can use one for another order.
async fn forgetful_story() -> (NatsServer, Broker) {
    let (server, broker) = Broker::story().await;
    let mut stream = broker.stream_info().await.config;
    stream.duplicate_window = Duration::from_millis(100);
    broker.jetstream.update_stream(stream).await.unwrap();
    (server, broker)
}

#[tokio::test]
async fn a_conflict_names_the_earlier_message_and_what_differs() {
    let (server, broker) = forgetful_story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    let id = || headers(&[("Nats-Msg-Id", "o-1")]);
    broker.publish_to("ORDERS.new", id(), b"one".to_vec()).await;
    broker.publish_to("ORDERS.new", headers(&[]), br#"{"id":7,"n":1}"#.to_vec()).await;
    broker.publish_to("ORDERS.new", headers(&[]), br#"{"id":7,"n":2}"#.to_vec()).await;
    broker.publish_anew("ORDERS.new", id(), b"two".to_vec()).await;
    broker.publish_to("ORDERS.new", headers(&[]), b"no JSON".to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let errors = spec.db().texts("SELECT error FROM dead_letters ORDER BY stream_seq").await;
    let [by_pointer, by_header, undecodable] = &errors[..] else { panic!("{errors:?}") };
    assert!(by_pointer.starts_with("message id \"ORDERS.new 7\" was used before by stream sequence 2 (processed at 2"));
    assert!(by_pointer.ends_with("), with another payload"), "{by_pointer}");
    assert!(by_header.contains("used before by stream sequence 1 ("), "{by_header}");
    assert!(by_header.ends_with("), with another subject or payload"), "{by_header}");
    assert_eq!(undecodable, "inbox.id_pointer /id needs a JSON payload, but the payload is not valid JSON");
}

/// The digest is of the payload alone: the same order may come on another subject.
#[tokio::test]
async fn in_a_scope_without_the_subject_a_conflict_is_about_the_payload() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id").set("inbox.id_scope", "stream");
    broker.publish_to("ORDERS.new", headers(&[]), br#"{"id":7,"n":1}"#.to_vec()).await;
    broker.publish_to("ORDERS.paid", headers(&[]), br#"{"id":7,"n":1}"#.to_vec()).await;
    broker.publish_to("ORDERS.paid", headers(&[]), br#"{"id":7,"n":2}"#.to_vec()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let errors = spec.db().texts("SELECT error FROM dead_letters").await;
    assert!(errors.len() == 1 && errors[0].ends_with("), with another payload"), "{errors:?}");
}

#[tokio::test]
async fn dropped_conflicts_are_counted_and_logged_once() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id").set("inbox.on_conflict", "duplicate");
    for n in 1..=4 {
        broker.publish(format!(r#"{{"id":7,"total":{n}}}"#)).await;
    }
    broker.publish(r#"{"id":7,"total":1}"#).await;
    let mut worker = spec.start();
    broker.acknowledged(5).await;
    worker.metric("conflicts_dropped_total", 3.0).await;
    worker.logged(&["dropped an order", "ORDERS.new 7", "inbox.on_conflict"]).await;
    assert_eq!(worker.lines(&["dropped an order"]), 1, "{}", worker.log());
    worker.drain().await;
    spec.db().applied_once(1).await;
}

#[tokio::test]
async fn an_error_of_the_database_has_no_codes_in_its_text() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    broker.publish("first").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let trigger = "CREATE TRIGGER refuse BEFORE INSERT ON orders WHEN CAST(new.payload AS TEXT) = 'bad' \
                   BEGIN SELECT RAISE(ABORT, 'this order is bad'); END";
    spec.db().execute(trigger).await;
    broker.publish("bad").await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let errors = spec.db().texts("SELECT error FROM dead_letters").await;
    assert!(errors.len() == 1 && errors[0].contains("this order is bad"), "{errors:?}");
    assert!(!errors[0].contains("code") && !errors[0].contains("returned from database"), "{errors:?}");
}
