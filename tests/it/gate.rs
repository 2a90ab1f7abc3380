//! The start gate: what it refuses and what it warns of, on the real server.

use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, ReplayPolicy, pull};
use async_nats::jetstream::stream::{self, ConsumerLimits, RetentionPolicy};

use crate::support::nats::{consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, equal, eventually};

async fn bench(stream: stream::Config, consumer: pull::Config) -> (NatsServer, Broker, DaemonSpec) {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.create(stream, consumer).await;
    let spec = DaemonSpec::new(server.url());
    (server, broker, spec)
}

fn retained(retention: RetentionPolicy) -> stream::Config {
    stream::Config { retention, ..stream_config() }
}

/// Exit code 2 of `run`, 1 of `check`, and these words in both.
async fn refused(spec: &DaemonSpec, words: &[&str]) {
    let (run, check) = (spec.run(&["run"]).await, spec.run(&["check"]).await);
    assert_eq!((run.code, check.code), (Some(2), Some(1)), "{run:?}");
    for word in words {
        assert!(run.stderr.contains(word), "no {word:?}: {run:?}");
        assert!(check.stdout.contains(word), "no {word:?}: {check:?}");
    }
}

/// `run` starts and logs a warning with these words, `check` exits 0 and prints them.
async fn warned(spec: &DaemonSpec, words: &[&str]) {
    let check = spec.run_ok(&["check"]).await;
    let worker = spec.run_ok(&["run", "--until-idle"]).await;
    for word in words {
        assert!(
            check.stdout.lines().any(|line| line.contains("warning") && line.contains(word)),
            "no {word:?}: {check:?}"
        );
        assert!(
            worker.stderr.lines().any(|line| line.contains("WARN") && line.contains(word)),
            "no {word:?}: {worker:?}"
        );
    }
}

#[tokio::test]
async fn a_durable_that_the_server_deletes_is_refused_on_interest_retention() {
    let fleeting = pull::Config { inactive_threshold: Duration::from_secs(3600), ..consumer_config() };
    let words = ["inactive_threshold 1h", "setup --update --unset inactive-threshold"];
    let (_server, _, spec) = bench(retained(RetentionPolicy::Interest), fleeting.clone()).await;
    refused(&spec, &words).await;
    spec.run_ok(&["setup", "--update", "--unset", "inactive-threshold"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    for retention in [RetentionPolicy::Limits, RetentionPolicy::WorkQueue] {
        let (_server, _, spec) = bench(retained(retention), fleeting.clone()).await;
        warned(&spec, &words).await;
    }
}

#[tokio::test]
async fn an_inherited_inactive_threshold_is_refused_with_both_settings_to_remove() {
    let limits = ConsumerLimits { inactive_threshold: Duration::from_secs(3600), max_ack_pending: 0 };
    let stream = stream::Config { consumer_limits: Some(limits), ..retained(RetentionPolicy::Interest) };
    let (_server, broker, spec) = bench(stream, consumer_config()).await;
    refused(&spec, &["inactive_threshold 1h", "setup --update --unset consumer-limits,inactive-threshold"]).await;
    spec.run_ok(&["setup", "--update", "--unset", "consumer-limits,inactive-threshold"]).await;
    assert!(broker.consumer_info().await.config.inactive_threshold.is_zero());
    spec.run_ok(&["run", "--until-idle"]).await;
}

#[tokio::test]
async fn a_consumer_in_memory_is_refused_on_interest_retention() {
    let fleeting = pull::Config { memory_storage: true, ..consumer_config() };
    let (_server, _, spec) = bench(stream_config(), fleeting.clone()).await;
    warned(&spec, &["stored in memory"]).await;

    let (mut server, broker, spec) = bench(retained(RetentionPolicy::Interest), fleeting).await;
    refused(&spec, &["stored in memory", "setup --recreate"]).await;
    broker.publish_numbered(1..=5).await;
    server.stop().await;
    server.restart().await;
    eventually("the consumer is gone", PATIENCE, async || equal(broker.try_consumer_info().await.is_err(), true)).await;
}

#[tokio::test]
async fn a_consumer_that_skips_orders_or_slows_them_down_is_warned_of() {
    let policies = [
        (DeliverPolicy::New, "deliver policy new: it never delivers messages from before"),
        (DeliverPolicy::Last, "deliver policy last: it never delivers"),
        (DeliverPolicy::LastPerSubject, "deliver policy last_per_subject: it never delivers"),
        (
            DeliverPolicy::ByStartSequence { start_sequence: 100 },
            "by_start_sequence 100: it never delivers messages below sequence 100; the stream ends at 0",
        ),
    ];
    for (deliver_policy, word) in policies {
        let filter_subject =
            if deliver_policy == DeliverPolicy::LastPerSubject { "ORDERS.*".into() } else { String::new() };
        let consumer = pull::Config { deliver_policy, filter_subject, ..consumer_config() };
        let (_server, _, spec) = bench(stream_config(), consumer).await;
        warned(&spec, &[word]).await;
    }
    let slow = pull::Config { replay_policy: ReplayPolicy::Original, max_waiting: 1, ..consumer_config() };
    let (_server, _, spec) = bench(stream_config(), slow).await;
    warned(&spec, &["replay policy original", "max_waiting 1"]).await;
}

#[tokio::test]
async fn stream_settings_that_remove_or_add_orders_are_warned_of() {
    let stream = stream::Config {
        max_messages_per_subject: 10,
        allow_message_ttl: true,
        allow_rollup: true,
        allow_message_schedules: true,
        subject_delete_marker_ttl: Some(Duration::from_secs(60)),
        ..stream_config()
    };
    let (_server, _, spec) = bench(stream, consumer_config()).await;
    let words = ["max_msgs_per_subject 10", "Nats-TTL", "Nats-Rollup", "Nats-Schedule", "Nats-Marker-Reason"];
    warned(&spec, &words).await;
}

#[tokio::test]
async fn a_stream_that_refuses_messages_of_a_full_subject_is_not_warned_of() {
    let stream = stream::Config {
        max_messages_per_subject: 10,
        discard: stream::DiscardPolicy::New,
        discard_new_per_subject: true,
        ..stream_config()
    };
    let (_server, _, spec) = bench(stream, consumer_config()).await;
    let check = spec.run_ok(&["check"]).await;
    assert!(!check.stdout.contains("max_msgs_per_subject"), "{check:?}");
}

#[tokio::test]
async fn a_stream_with_sources_is_warned_of() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let upstream = stream::Config { name: "SHOP".into(), subjects: vec!["SHOP.*".into()], ..stream_config() };
    broker.jetstream.create_stream(upstream).await.unwrap();
    let source = stream::Source { name: "SHOP".into(), ..Default::default() };
    broker.create(stream::Config { sources: Some(vec![source]), ..stream_config() }, consumer_config()).await;
    warned(&DaemonSpec::new(server.url()), &["sources (SHOP)"]).await;
}

#[tokio::test]
async fn check_shows_the_report_of_the_daemon_and_a_locked_database() {
    let (_server, broker, spec) = bench(stream_config(), consumer_config()).await;
    let mut worker = spec.start();
    worker.ready().await;
    let checked = spec.run_ok(&["check"]).await;
    assert!(checked.stdout.contains("ok    daemon      runs and reports no problem"), "{checked:?}");

    let lock = spec.db().lock().await;
    broker.publish("Order Data 1").await;
    worker.not_ready("database").await;
    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(checked.stdout.contains("FAIL  daemon      is not ready: database: "), "{checked:?}");
    assert!(checked.stdout.contains("FAIL  database    "), "{checked:?}");
    assert!(checked.stdout.contains("write lock"), "{checked:?}");
    drop(lock);
    broker.acknowledged(1).await;
    spec.run_ok(&["check"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn check_does_not_promise_to_create_a_database_that_a_daemon_has_lost() {
    let (_server, _, spec) = bench(stream_config(), consumer_config()).await;
    let mut worker = spec.start();
    worker.ready().await;
    std::fs::remove_file(spec.database()).unwrap();
    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(checked.stdout.contains("does not exist any longer, but process "), "{checked:?}");
    assert!(!checked.stdout.contains("will be created"), "{checked:?}");
}

#[tokio::test]
async fn pause_tells_that_the_server_deletes_the_consumer_meanwhile() {
    let fleeting = pull::Config { inactive_threshold: Duration::from_secs(3600), ..consumer_config() };
    let (mut server, broker, spec) = bench(stream_config(), fleeting).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let paused = spec.run_ok(&["pause"]).await;
    assert!(paused.stdout.contains("warning: consumer order-processor has inactive_threshold 1h"), "{paused:?}");
    spec.run_ok(&["resume"]).await;
    broker.edit_consumer(consumer_config()).await;
    let paused = spec.run_ok(&["pause"]).await;
    assert!(!paused.stdout.contains("warning"), "{paused:?}");
    // A pause does not need the server.
    server.stop().await;
    let paused = spec.run_ok(&["pause"]).await;
    assert!(paused.stdout.contains("warning: not known whether the server deletes the consumer"), "{paused:?}");
    assert!(paused.stdout.contains("no daemon has"), "{paused:?}");
}

#[tokio::test]
async fn audit_and_check_tell_that_a_work_queue_keeps_no_evidence() {
    let (_server, broker, spec) = bench(retained(RetentionPolicy::WorkQueue), consumer_config()).await;
    broker.publish_numbered(1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    let words = "stream ORDERS has retention workqueue: the server deletes a message after its acknowledgement";
    for command in ["check", "audit"] {
        let finished = spec.run_ok(&[command]).await;
        assert!(format!("{}{}", finished.stdout, finished.stderr).contains(words), "{command}: {finished:?}");
    }
}

#[tokio::test]
async fn a_second_daemon_with_its_own_database_is_noticed_by_both() {
    let short = pull::Config { ack_wait: Duration::from_secs(1), ..consumer_config() };
    let (server, _broker, spec) = bench(stream_config(), short).await;
    let other = DaemonSpec::new(server.url());
    let mut worker = spec.start();
    worker.ready().await;
    // Before a second daemon starts, its `check` tells that one is there.
    let checked = other.run_ok(&["check"]).await;
    assert!(checked.stdout.contains("no daemon answers on this machine"), "{checked:?}");
    worker.metric("other_pulls", 0.0).await;

    let mut second = other.start();
    for daemon in [&worker, &second] {
        daemon.logged(&["WARN", "another client pulls from consumer order-processor"]).await;
        eventually("other_pulls", PATIENCE, async || {
            let seen = daemon.metrics().await.get("other_pulls");
            if seen > Some(0.0) { Ok(()) } else { Err(seen) }
        })
        .await;
    }
    for command in ["check", "status"] {
        let finished = spec.run_ok(&[command]).await;
        assert!(finished.stdout.contains("another client pulls from consumer"), "{command}: {finished:?}");
    }
    second.drain().await;
    worker.metric("other_pulls", 0.0).await;
    let status = spec.run_ok(&["status"]).await;
    assert!(!status.stdout.contains("another client"), "{status:?}");
    worker.drain().await;
}

#[tokio::test]
async fn a_filter_that_matches_no_subject_of_the_stream_is_named() {
    let filter_subject = "ORDERS.paid".to_owned();
    let (_server, broker, spec) = bench(stream_config(), pull::Config { filter_subject, ..consumer_config() }).await;
    let mut worker = spec.start();
    worker.ready().await;
    // An edit of the stream that nobody compares with its consumers.
    let subjects = vec!["SHOP.*".to_owned(), "ORDERS.new".to_owned()];
    broker.jetstream.update_stream(stream::Config { subjects, ..stream_config() }).await.unwrap();
    let words = "consumer order-processor is for ORDERS.paid, but stream ORDERS stores SHOP.*, ORDERS.new: the server delivers no";
    worker.logged(&["WARN", words]).await;
    worker.drain().await;
    warned(&spec, &[words]).await;
    broker.jetstream.update_stream(stream_config()).await.unwrap();
    let check = spec.run_ok(&["check"]).await;
    assert!(!check.stdout.contains("is for"), "{check:?}");
}

/// The consumer looks idle: nothing is pending.
#[tokio::test]
async fn a_mirror_without_contact_to_its_origin_is_named() {
    let mut server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let origin = stream::Config { name: "ORIGIN".to_owned(), ..stream_config() };
    broker.jetstream.create_stream(origin.clone()).await.unwrap();
    let mirror = stream::Source { name: "ORIGIN".to_owned(), ..stream::Source::default() };
    let mirror = stream::Config { subjects: Vec::new(), mirror: Some(mirror), ..stream_config() };
    broker.create(mirror, consumer_config()).await;
    let spec = DaemonSpec::new(server.url());
    let lost = "stream ORDERS copies the messages of ORIGIN, but its server has had no contact";
    let mut worker = spec.start();
    broker.publish("Order Data 1").await;
    broker.acknowledged(1).await;
    // A healthy mirror that is idle, also just after a start of its server.
    server.stop().await;
    server.restart().await;
    worker.ready().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(worker.lines(&[lost]), 0, "{}", worker.log());

    broker.jetstream.delete_stream("ORIGIN").await.unwrap();
    worker.logged(&["WARN", lost]).await;
    worker.ready().await;
    for command in ["check", "status"] {
        let finished = spec.run_ok(&[command]).await;
        assert!(finished.stdout.contains(lost), "{command}: {finished:?}");
    }
    worker.drain().await;

    // The time of the last contact does not outlive the server.
    server.stop().await;
    server.restart().await;
    let mut worker = spec.start();
    worker.logged(&["WARN", lost]).await;
    eventually("the client is connected again", PATIENCE, async || {
        broker.jetstream.create_stream(origin.clone()).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
    eventually("the warning ends", PATIENCE, async || {
        let checked = spec.run_ok(&["check"]).await.stdout;
        if checked.contains(lost) { Err(checked) } else { Ok(()) }
    })
    .await;
    worker.drain().await;
}
