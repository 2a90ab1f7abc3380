//! `setup` and `teardown`: what they create, change and delete, and that no order is lost by it.

use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy, pull, push};
use async_nats::jetstream::stream::{self, ConsumerLimits, RetentionPolicy};

use crate::support::nats::{CONSUMER, STREAM, ServerSpec, consumer_config, restricted_worker, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, eventually};

fn interest() -> stream::Config {
    stream::Config { retention: RetentionPolicy::Interest, ..stream_config() }
}

async fn server_with(stream: stream::Config, consumer: pull::Config) -> (NatsServer, Broker, DaemonSpec) {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.create(stream, consumer).await;
    let spec = DaemonSpec::new(server.url());
    (server, broker, spec)
}

#[tokio::test]
async fn teardown_of_a_consumer_tells_what_is_lost_and_asks() {
    let filtered = pull::Config { filter_subject: "ORDERS.new".into(), ..consumer_config() };
    let (_server, broker, spec) = server_with(interest(), filtered).await;
    broker.publish_numbered(1..=10).await;

    let finished = spec.run(&["teardown", "--consumer-only"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert_eq!(
        finished.complaints(),
        ["order-processor: this deletes consumer order-processor of stream ORDERS: confirm it with --yes"]
    );
    for word in ["retention interest", "10 now", "filter ORDERS.new", "setup --recreate", "stop the publishers"] {
        assert!(finished.stdout.contains(word), "no {word:?}: {finished:?}");
    }
    assert_eq!(broker.consumer_info().await.num_pending, 10, "nothing was deleted");

    spec.run_ok(&["teardown", "--consumer-only", "--yes"]).await;
    assert_eq!(broker.stream_info().await.state.messages, 0, "the text told the truth");
}

#[tokio::test]
async fn teardown_of_a_consumer_tells_when_the_messages_stay() {
    let (_server, broker, spec) = server_with(stream_config(), consumer_config()).await;
    broker.publish_numbered(1..=3).await;
    let finished = spec.run(&["teardown", "--consumer-only"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.contains("retention limits: the 3 messages"), "{finished:?}");
    assert!(!finished.stdout.contains("stop the publishers"), "{finished:?}");
}

#[tokio::test]
async fn teardown_of_the_stream_tells_how_many_orders_are_not_processed() {
    let (_server, broker, spec) = server_with(stream_config(), consumer_config()).await;
    broker.publish_numbered(1..=3).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.publish_numbered(4..=5).await;
    let finished = spec.run(&["teardown"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.contains("5 messages, of which 2 are not processed"), "{finished:?}");
}

/// The consumer is one that the daemon refuses; it has acknowledged 5 of 12 orders, and 3 of these 12 are not for it.
#[tokio::test]
async fn recreate_loses_nothing_and_doubles_nothing_on_any_retention() {
    for retention in [RetentionPolicy::Limits, RetentionPolicy::Interest, RetentionPolicy::WorkQueue] {
        let stream = stream::Config { retention, ..stream_config() };
        let odd = pull::Config {
            filter_subject: "ORDERS.new".into(),
            inactive_threshold: Duration::from_secs(3600),
            priority_policy: consumer::PriorityPolicy::Overflow,
            priority_groups: vec!["a".into()],
            ..consumer_config()
        };
        let good = pull::Config { filter_subject: "ORDERS.new".into(), ..consumer_config() };
        let (_server, broker, spec) = server_with(stream, good).await;
        broker.publish_numbered(1..=5).await;
        spec.run_ok(&["run", "--until-idle"]).await;
        broker.edit_consumer(odd).await;
        for _ in 0..3 {
            drop(broker.jetstream.publish("ORDERS.other", "not ours".into()).await.unwrap().await.unwrap());
        }
        broker.publish_numbered(6..=9).await;

        let checked = spec.run(&["check"]).await;
        assert!(checked.stdout.contains("priority groups"), "{checked:?}");
        assert!(checked.stdout.contains("run `order-processor setup --recreate`"), "{checked:?}");
        let loses = checked.stdout.contains("any other deletion of the consumer loses the 4 messages");
        assert_eq!(loses, retention == RetentionPolicy::Interest, "{checked:?}");

        let asked = spec.run(&["setup", "--recreate"]).await;
        assert_eq!(asked.code, Some(1), "{asked:?}");
        assert!(asked.stdout.contains("filter ORDERS.new"), "{asked:?}");
        assert!(asked.stdout.contains("4 messages wait for it"), "{asked:?}");
        spec.run_ok(&["setup", "--recreate", "--yes"]).await;

        let info = broker.consumer_info().await;
        assert_eq!(info.config.filter_subject, "ORDERS.new", "{retention:?}");
        assert!(info.config.inactive_threshold.is_zero(), "{retention:?}");
        assert_eq!(info.num_pending, 4, "{retention:?}: what is acknowledged does not come again");
        assert_eq!(broker.stream_info().await.state.consumer_count, 1, "{retention:?}: no keeper stays");
        spec.run_ok(&["run", "--until-idle"]).await;
        spec.db().applied_once(9).await;
    }
}

/// On interest retention each order that no consumer waits for is gone at once.
#[tokio::test]
async fn recreate_under_a_running_daemon_and_publisher_loses_and_doubles_nothing() {
    let (_server, broker, spec) = server_with(interest(), consumer_config()).await;
    let mut worker = spec.start();
    worker.ready().await;
    let publishing = async {
        for start in (1..=2000).step_by(100) {
            broker.publish_numbered(start..=start + 99).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let recreating = async {
        for _ in 0..3 {
            spec.run_ok(&["setup", "--recreate", "--yes"]).await;
        }
    };
    tokio::join!(publishing, recreating);
    spec.db().has("orders", 2000).await;
    worker.drain().await;
    spec.db().applied_once(2000).await;
}

/// The user of the command may delete the consumer but not create it. The printed commands, in their order, complete the work.
#[tokio::test]
async fn recreate_that_ends_after_the_deletion_is_completed_by_what_it_prints() {
    let denied = r#"allow: [">"], deny: ["$JS.API.CONSUMER.CREATE.ORDERS.order-processor", "$JS.API.CONSUMER.CREATE.ORDERS.order-processor.>"]"#;
    for retention in [RetentionPolicy::Limits, RetentionPolicy::Interest, RetentionPolicy::WorkQueue] {
        let mut server =
            NatsServer::with(ServerSpec { config: restricted_worker(denied), ..ServerSpec::default() }).await;
        let admin = ConnectOptions::with_user_and_password("admin".into(), "admin".into());
        let broker = Broker::connect_with(&server, admin).await;
        let old = pull::Config { ack_wait: Duration::from_secs(90), max_ack_pending: 77, ..consumer_config() };
        broker.create(stream::Config { retention, ..stream_config() }, old).await;
        let spec = DaemonSpec::new(server.url());
        broker.publish_numbered(1..=5).await;
        spec.run_ok(&["run", "--until-idle"]).await;
        broker.publish_numbered(6..=9).await;

        let failed = spec.run(&["setup", "--recreate", "--yes"]).await;
        assert_eq!(failed.code, Some(1), "{failed:?}");
        assert_eq!(failed.complaints().len(), 1, "{failed:?}");
        let lines: Vec<&str> = failed.stdout.lines().collect();
        let create = lines.iter().find(|line| line.starts_with("consumer order-processor is deleted")).expect("a line");
        let command = create.split('`').nth(1).unwrap();
        let keeps = failed.stdout.contains("`nats consumer rm ORDERS order-processor-keeper`");
        assert_eq!(keeps, retention == RetentionPolicy::Interest, "{failed:?}");
        broker.publish_numbered(10..=11).await;

        server.reload(&restricted_worker(r#"allow: [">"]"#));
        let arguments: Vec<&str> = command.split(' ').skip(1).collect();
        eventually("the server has the new permissions", PATIENCE, async || {
            let finished = spec.run(&arguments).await;
            if finished.code == Some(0) { Ok(()) } else { Err(finished) }
        })
        .await;
        if keeps {
            broker.jetstream.delete_consumer_from_stream("order-processor-keeper", STREAM).await.unwrap();
        }
        let info = broker.consumer_info().await;
        assert_eq!((info.config.ack_wait, info.config.max_ack_pending), (Duration::from_secs(90), 77), "{command}");
        assert_eq!(info.num_pending, 6, "{retention:?}: what is acknowledged does not come again");
        spec.run_ok(&["run", "--until-idle"]).await;
        spec.db().applied_once(11).await;
    }
}

#[tokio::test]
async fn recreate_turns_a_push_consumer_into_a_pull_consumer() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.jetstream.create_stream(interest()).await.unwrap();
    let push = push::Config {
        durable_name: Some(CONSUMER.into()),
        deliver_subject: "deliver.here".into(),
        ack_policy: AckPolicy::Explicit,
        ..Default::default()
    };
    broker.create_push_consumer(push).await;
    broker.publish_numbered(1..=3).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["setup", "--recreate", "--yes"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(3).await;
}

/// Ack policy none has no ack_wait, and the server cannot give it one.
#[tokio::test]
async fn a_consumer_that_must_be_replaced_gets_one_advice() {
    let none = pull::Config { ack_policy: AckPolicy::None, ack_wait: Duration::ZERO, ..consumer_config() };
    let (_server, _broker, spec) = server_with(stream_config(), none).await;
    let finished = spec.run(&["check"]).await;
    assert_eq!(finished.stdout.lines().filter(|line| line.contains("FAIL")).count(), 1, "{finished:?}");
    assert!(finished.stdout.contains("ack policy none"), "{finished:?}");
    spec.run_ok(&["setup", "--recreate", "--yes"]).await;
    spec.run_ok(&["check"]).await;
}

#[tokio::test]
async fn options_that_differ_from_what_exists_are_named_and_change_nothing() {
    let (_server, broker, spec) = server_with(stream_config(), consumer_config()).await;
    let (stream, consumer) = (broker.stream_info().await.config, broker.consumer_info().await.config);

    let finished = spec.run(&["setup", "--max-ack-pending", "50", "--max-age", "1h", "--ack-wait", "30s"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(
        finished.stdout.contains("consumer order-processor has max_ack_pending 1000, asked for 50: "),
        "{finished:?}"
    );
    assert!(finished.stdout.contains("stream ORDERS has max_age 0s, asked for 1h: "), "{finished:?}");
    assert!(finished.stdout.contains("--update"), "{finished:?}");
    assert!(!finished.stdout.contains("ack_wait"), "what is as asked for is no difference: {finished:?}");
    assert_eq!(broker.stream_info().await.config, stream);
    assert_eq!(broker.consumer_info().await.config, consumer);

    let finished = spec.run(&["setup", "--update", "--filter", "ORDERS.eu", "--max-ack-pending", "50"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stdout.contains("filter_subjects none, asked for ORDERS.eu: left as it is"), "{finished:?}");
    assert_eq!(broker.consumer_info().await.config.max_ack_pending, 50, "{finished:?}");
}

#[tokio::test]
async fn update_changes_what_was_asked_for_and_nothing_else() {
    let odd = pull::Config {
        max_deliver: 20,
        max_bytes: 100_000,
        headers_only: true,
        backoff: vec![Duration::from_secs(5), Duration::from_secs(10)],
        inactive_threshold: Duration::from_secs(3600),
        filter_subjects: vec!["ORDERS.a".into(), "ORDERS.b".into()],
        description: Some("mine".into()),
        ..consumer_config()
    };
    let stream = stream::Config { allow_message_ttl: true, allow_direct: true, ..stream_config() };
    let (_server, broker, spec) = server_with(stream, odd.clone()).await;
    let before = (broker.stream_info().await.config, broker.consumer_info().await.config);

    // Every fault that the gate finds in this consumer, with the command that it names.
    let found = spec.run(&["check"]).await.stdout;
    let fixes = ["headers-only", "max-deliver", "max-request-bytes", "backoff", "inactive-threshold"];
    for fix in fixes {
        assert!(found.contains(&format!("`order-processor setup --update --unset {fix}`")), "no {fix}: {found}");
    }
    spec.run_ok(&["setup", "--update", "--unset", &fixes.join(",")]).await;
    spec.run_ok(&["setup", "--update", "--ack-wait", "40s", "--max-age", "30d"]).await;

    let after = (broker.stream_info().await.config, broker.consumer_info().await.config);
    assert_eq!(after.0, stream::Config { max_age: Duration::from_secs(30 * 24 * 3600), ..before.0 });
    let wanted = consumer::Config {
        max_deliver: -1,
        max_bytes: 0,
        headers_only: false,
        backoff: vec![],
        inactive_threshold: Duration::ZERO,
        ack_wait: Duration::from_secs(40),
        ..before.1
    };
    assert_eq!(after.1, wanted);
    let refused = spec.run(&["setup", "--update", "--ack-wait", "500ms"]).await;
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert_eq!(broker.consumer_info().await.config.ack_wait, Duration::from_secs(40), "refused before the change");
    let again = spec.run_ok(&["setup", "--update", "--ack-wait", "40s"]).await;
    assert!(again.stdout.contains("consumer order-processor exists, left as it is"), "{again:?}");
    let found = spec.run_ok(&["check"]).await.stdout;
    assert!(!found.contains("--unset"), "{found}");
}

#[tokio::test]
async fn a_lower_limit_that_deletes_messages_asks_first() {
    let (_server, broker, spec) = server_with(stream_config(), consumer_config()).await;
    broker.publish_numbered(1..=100).await;
    let lower = ["setup", "--update", "--max-bytes", "1KiB"];
    let finished = spec.run(&lower).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stderr.contains("max_bytes deletes messages of stream ORDERS"), "{finished:?}");
    assert_eq!(broker.stream_info().await.state.messages, 100);
    spec.run_ok(&["setup", "--update", "--max-bytes", "1KiB", "--yes"]).await;
    assert!(broker.stream_info().await.state.messages < 100);
}

#[tokio::test]
async fn setup_keeps_to_the_streams_consumer_limits() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let limits = |inactive_threshold| ConsumerLimits { inactive_threshold, max_ack_pending: 500 };
    let stream = stream::Config { consumer_limits: Some(limits(Duration::from_secs(3))), ..stream_config() };
    broker.jetstream.create_stream(stream.clone()).await.unwrap();
    let spec = DaemonSpec::new(server.url());

    let finished = spec.run(&["setup"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(finished.stderr.contains("consumer_limits.inactive_threshold 3s"), "{finished:?}");
    assert!(finished.stderr.contains("setup --update --unset consumer-limits"), "{finished:?}");
    broker.try_consumer_info().await.unwrap_err();

    let stream = stream::Config { consumer_limits: Some(limits(Duration::ZERO)), ..stream };
    broker.jetstream.update_stream(stream).await.unwrap();
    spec.run_ok(&["setup"]).await;
    let config = broker.consumer_info().await.config;
    assert_eq!((config.max_ack_pending, config.inactive_threshold), (500, Duration::ZERO));

    let finished = spec.run(&["setup", "--update", "--max-ack-pending", "600"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let text = "--max-ack-pending 600 is above consumer_limits.max_ack_pending 500 of stream ORDERS";
    assert!(finished.stderr.contains(text), "{finished:?}");
    spec.run_ok(&["setup", "--update", "--unset", "consumer-limits", "--max-ack-pending", "600"]).await;
    assert_eq!(broker.consumer_info().await.config.max_ack_pending, 600);
}

#[tokio::test]
async fn setup_can_create_a_filtered_consumer_that_starts_later() {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    broker.jetstream.create_stream(stream_config()).await.unwrap();
    broker.publish_numbered(1..=5).await;
    let spec = DaemonSpec::new(server.url());
    spec.run_ok(&["setup", "--filter", "ORDERS.new,ORDERS.paid", "--start-seq", "4"]).await;
    let info = broker.consumer_info().await;
    assert_eq!(info.config.filter_subjects, ["ORDERS.new", "ORDERS.paid"]);
    assert_eq!(info.config.deliver_policy, DeliverPolicy::ByStartSequence { start_sequence: 4 });
    assert_eq!(info.num_pending, 2);
    assert_eq!(info.stream_name, STREAM);
}

#[tokio::test]
async fn publish_and_setup_name_the_subjects_of_a_stream_that_has_others() {
    let stream = stream::Config { subjects: vec!["orders.*".into()], ..stream_config() };
    let (_server, _, spec) = server_with(stream, consumer_config()).await;
    let finished = spec.run(&["publish", "--count", "1"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    let advice = "no stream has the subject ORDERS.new; stream ORDERS has orders.*: choose one of these with --subject";
    assert!(finished.stderr.contains(advice), "{finished:?}");
    let finished = spec.run_ok(&["setup"]).await;
    assert!(finished.stdout.contains("stream ORDERS exists for orders.*, left as it is"), "{finished:?}");
}

/// `limits`: of the account, for example `max_ack_pending: 500`.
async fn account_with(limits: &str) -> (NatsServer, DaemonSpec) {
    let limits = if limits.contains("max_file") { limits } else { &format!("max_file: 20GB, {limits}") };
    let config = format!(
        "accounts {{ SHOP: {{ jetstream: {{ max_mem: 1MB, {limits} }}, users: [{{user: shop, password: shop}}] }} }}\n\
         no_auth_user: shop"
    );
    // The disk of the machine does not matter.
    let server = NatsServer::with(ServerSpec { config, jetstream: "max_file_store: 200GB".into() }).await;
    let spec = DaemonSpec::new(server.url());
    (server, spec)
}

#[tokio::test]
async fn a_limit_of_the_account_is_named_with_the_flag_to_give() {
    for (limits, wrong, words, right) in [
        (
            "max_ack_pending: 500",
            &["setup"][..],
            "choose less with --max-ack-pending",
            &["--max-ack-pending", "500"][..],
        ),
        ("max_bytes: true", &["setup", "--max-bytes", "0"], "choose a size with --max-bytes", &["--max-bytes", "1GiB"]),
        (
            "store_max_stream_bytes: 1GB",
            &["setup", "--max-bytes", "2GiB"],
            "than the account allows for one stream; choose less with --max-bytes",
            &["--max-bytes", "512MiB"],
        ),
        (
            "max_file: 1GB",
            &["setup", "--max-bytes", "2GiB"],
            "than the server or the account has left; choose less with --max-bytes",
            &["--max-bytes", "512MiB"],
        ),
        (
            "max_consumers: 5",
            &["setup", "--max-bytes", "1GiB", "--replicas", "3"],
            "choose another one with --replicas",
            &[],
        ),
    ] {
        let (_server, spec) = account_with(limits).await;
        let finished = spec.run(wrong).await;
        assert_eq!(finished.code, Some(1), "{limits}: {finished:?}");
        assert!(finished.stderr.contains(words), "{limits}: {finished:?}");
        spec.run_ok(&[&["setup"], right].concat()).await;
        if limits.starts_with("max_ack_pending") {
            let finished = spec.run(&["setup", "--update", "--max-ack-pending", "600"]).await;
            assert!(finished.stderr.contains(words), "{limits}: {finished:?}");
        }
    }
    for (limits, words) in [("max_streams: 1", "raise max_streams"), ("max_consumers: 1", "raise max_consumers")] {
        let (server, spec) = account_with(limits).await;
        let broker = Broker::connect(&server).await;
        let taken = stream::Config { name: "OTHER".into(), subjects: vec!["other".into()], ..stream_config() };
        let taken = if limits.starts_with("max_streams") { taken } else { stream_config() };
        let stream = broker.jetstream.create_stream(taken).await.unwrap();
        stream.create_consumer(pull::Config { durable_name: Some("other".into()), ..consumer_config() }).await.unwrap();
        let finished = spec.run(&["setup"]).await;
        assert_eq!(finished.code, Some(1), "{limits}: {finished:?}");
        assert!(finished.stderr.contains(words), "{limits}: {finished:?}");
    }
}

#[tokio::test]
async fn publish_tells_that_a_stream_sends_no_receipts() {
    let stream = stream::Config { no_ack: true, ..stream_config() };
    let (_server, broker, spec) = server_with(stream, consumer_config()).await;
    let finished = spec.run(&["publish", "--count", "3"]).await;
    assert_eq!(finished.code, Some(1), "{finished:?}");
    for words in ["stream ORDERS has no_ack", "whether orders 1 to 3 are stored", "All of them were sent"] {
        assert!(finished.stderr.contains(words), "no {words:?}: {finished:?}");
    }
    assert!(!finished.stderr.contains("was not stored"), "{finished:?}");
    assert_eq!(broker.stream_info().await.state.messages, 3, "the server has stored them");
}
