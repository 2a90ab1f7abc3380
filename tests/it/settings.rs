//! Where settings come from, and what is said about bad ones.

use crate::support::keys::secret;
use crate::support::{Broker, DaemonSpec, Finished, NatsServer};

/// No server listens here; bad settings must be found before anybody looks for one.
fn spec() -> DaemonSpec {
    DaemonSpec::new("nats://127.0.0.1:9")
}

/// Exit code 2, the words on stderr, and nothing but the files that were there.
async fn refused(spec: &DaemonSpec, arguments: &[&str], words: &[&str]) -> Finished {
    let finished = spec.run(arguments).await;
    assert_eq!(finished.code, Some(2), "{arguments:?}: {finished:?}");
    for word in words {
        assert!(finished.stderr.contains(word), "no {word:?}: {finished:?}");
    }
    assert!(!spec.database().exists(), "nothing is created");
    finished
}

#[tokio::test]
async fn unknown_keys_are_errors_that_name_key_and_source() {
    let in_file = spec();
    std::fs::write(in_file.folder().join("c.toml"), "[retry]\nmax_atempts = 3\n").unwrap();
    refused(&in_file, &["--config", "c.toml", "run"], &["max_atempts", "c.toml"]).await;

    let section = spec();
    std::fs::write(section.folder().join("c.toml"), "[retries]\nmax_attempts = 3\n").unwrap();
    refused(&section, &["--config", "c.toml", "run"], &["retries", "c.toml"]).await;

    let in_environment = spec().set("retry.max_atempts", "3");
    refused(&in_environment, &["run"], &["ORDER_PROCESSOR__RETRY__MAX_ATEMPTS"]).await;
}

#[tokio::test]
async fn a_variable_with_one_underscore_too_few_is_an_error() {
    let run = async |name: &str| spec().command(&["config"]).env(name, "3").output().unwrap();
    let finished = run("ORDER_PROCESSOR_BATCH__MAX_MESSAGES").await;
    let said = String::from_utf8(finished.stderr).unwrap();
    assert_eq!(finished.status.code(), Some(2), "{said}");
    assert!(said.contains("did you mean ORDER_PROCESSOR__BATCH__MAX_MESSAGES?"), "{said}");
    for name in ["ORDER_PROCESSOR_SERVICE_HOST", "ORDER_PROCESSOR_PORT_9464_TCP", "ORDER_PROCESSOR_BATCH_SERVICE_PORT"]
    {
        let finished = run(name).await;
        assert_eq!(finished.status.code(), Some(0), "{name}: {finished:?}");
    }
}

#[tokio::test]
async fn a_value_in_quotation_marks_in_the_environment_is_an_error_that_names_them() {
    for value in ["\"nats://127.0.0.1:4222\"", "'ORDERS'"] {
        let finished =
            refused(&spec().set("consumer.stream", value), &["run"], &["ORDER_PROCESSOR__CONSUMER__STREAM"]).await;
        assert_eq!(finished.complaints().len(), 1, "{finished:?}");
        assert!(finished.stderr.contains("stands in quotation marks"), "{finished:?}");
    }
}

#[tokio::test]
async fn bad_values_are_errors_that_name_key_source_and_what_is_allowed() {
    for (key, value) in [
        ("retry.max_attempts", "0"),
        ("retry.max_attempts", "-1"),
        ("retry.max_attempts", "2.6"),
        ("retry.max_attempts", "many"),
        ("retry.max_attempts", ""),
        ("retry.min_delay", "1"),
        ("retry.min_delay", "soon"),
        ("retry.max_delay", "-5s"),
        ("batch.max_messages", "0"),
        ("batch.max_bytes", "0"),
        ("shutdown.timeout", "0s"),
        ("shutdown.timeout", "25"),
        ("http.listen", "9464"),
        ("http.listen", "localhost"),
        ("http.listen", "127.0.0.1:99999"),
        ("log.level", "loud"),
        ("log.format", "xml"),
        ("inbox.on_conflict", "ignore"),
        ("inbox.id_pointer", "id"),
        ("inbox.id_pointer", "/a~2b"),
        ("inbox.retention", "long"),
        ("database.url", "mysql://localhost/orders"),
        ("database.url", ""),
        ("nats.url", ""),
        ("nats.url", "http://127.0.0.1:4222"),
        ("nats.url", "nats://127.0.0.1:4222,,nats://127.0.0.1:4223"),
        ("consumer.stream", ""),
        ("consumer.stream", "OR DERS"),
        ("consumer.name", "order.processor"),
        ("consumer.name", "*"),
    ] {
        let spec = spec().set(key, value);
        let variable = format!("ORDER_PROCESSOR__{}", key.replace('.', "__").to_uppercase());
        let finished = refused(&spec, &["run"], &[&variable]).await;
        assert_eq!(finished.complaints().len(), 1, "{key} = {value:?} is one problem, so one line: {finished:?}");
    }
}

#[tokio::test]
async fn all_problems_are_said_at_once() {
    let spec = spec().set("log.level", "loud").set("retry.max_attempts", "0");
    std::fs::write(spec.folder().join("c.toml"), "[batch]\nmax_messages = 0\n[inbox]\nid_ponter = \"/id\"\n").unwrap();
    let words = ["LOG__LEVEL", "RETRY__MAX_ATTEMPTS", "batch.max_messages", "id_ponter"];
    refused(&spec, &["--config", "c.toml", "run"], &words).await;
}

#[tokio::test]
async fn settings_that_contradict_each_other_are_errors() {
    let delays = spec().set("retry.min_delay", "10s").set("retry.max_delay", "1s");
    refused(&delays, &["run"], &["min_delay", "max_delay"]).await;

    let ways_in = spec().set("nats.user", "worker");
    let (password, token) = (ways_in.folder().join("password"), ways_in.folder().join("token"));
    std::fs::write(&password, "secret-of-the-test").unwrap();
    std::fs::write(&token, "secret-of-the-test").unwrap();
    let ways_in = ways_in.set("nats.password_file", password).set("nats.token_file", token);
    let finished = refused(&ways_in, &["run"], &["nats.token_file", "nats.user"]).await;
    assert!(!finished.stderr.contains("secret-of-the-test"), "{finished:?}");
}

#[tokio::test]
async fn a_missing_settings_file_is_an_error_that_names_it() {
    refused(&spec(), &["--config", "nowhere.toml", "run"], &["nowhere.toml"]).await;
}

#[tokio::test]
async fn a_missing_secret_file_is_an_error_that_names_it() {
    let spec = spec().set("nats.token_file", "no-token-here");
    refused(&spec, &["run"], &["no-token-here", "token"]).await;
}

#[tokio::test]
async fn a_file_that_is_no_toml_is_an_error_with_its_line() {
    let spec = spec();
    std::fs::write(spec.folder().join("c.toml"), "[retry]\nmax_attempts = = 3\n").unwrap();
    refused(&spec, &["--config", "c.toml", "run"], &["c.toml", "line 2"]).await;
}

#[tokio::test]
async fn bad_flags_are_exit_code_2() {
    refused(&spec(), &["run", "--no-such-flag"], &["--no-such-flag"]).await;
    refused(&spec(), &["walk"], &["walk"]).await;
    refused(&spec(), &[], &[]).await;
    refused(&spec(), &["publish"], &["--count", "FILE"]).await;
    refused(&spec(), &["publish", "--count", "3", "orders.txt"], &["--count", "FILE"]).await;
    refused(&spec(), &["status", "--interval", "1s"], &["--watch"]).await;
    for (arguments, flag) in [
        (&["publish", "--count=-1"][..], "--count"),
        (&["publish", "--count", "1", "--start", "-5"], "--start"),
        (&["setup", "--replicas", "-1"], "--replicas"),
        (&["setup", "--max-bytes", "-1GiB"], "--max-bytes"),
        (&["setup", "--max-age", "-5s"], "--max-age"),
        (&["status", "--watch", "--interval", "-1s"], "--interval"),
        (&["dead-letters", "list", "--limit", "-1"], "--limit"),
        (&["dead-letters", "list", "--since", "-2h"], "--since"),
        (&["dead-letters", "list", "--since", "2h ago"], "--since"),
        (&["audit", "--from", "-1"], "--from"),
    ] {
        refused(&spec(), arguments, &["invalid value", flag]).await;
    }
}

#[tokio::test]
async fn what_cannot_be_published_is_exit_code_2_without_a_server() {
    for (arguments, word) in [
        (["--count=1", "--id-prefix", "a\nb"], "--id-prefix"),
        (["--count=1", "--id-prefix", "a\u{7f}"], "--id-prefix"),
        (["--count=1", "--id-prefix", " a"], "--id-prefix"),
        (["--count=1", "--id-prefix", ""], "--id-prefix"),
        (["--count=2", "--start", "18446744073709551615"], "--start"),
        (["--count=1", "--subject", "ORDERS.*"], "subject"),
        (["--count=1", "--subject", "ORDERS.\u{1}"], "subject"),
    ] {
        let finished = refused(&spec(), &[&["publish"], &arguments[..]].concat(), &[word]).await;
        assert_eq!(finished.complaints().len(), 1, "{finished:?}");
    }
}

#[tokio::test]
async fn environment_wins_over_file_and_file_over_default() {
    let spec = spec().set("retry.max_attempts", "7");
    std::fs::write(spec.folder().join("c.toml"), "[retry]\nmax_attempts = 6\nmin_delay = \"2s\"\n").unwrap();
    let shown = spec.run_ok(&["--config", "c.toml", "config"]).await.stdout;
    let line = |key: &str| {
        shown.lines().find(|line| line.trim_start().starts_with(key)).unwrap_or_else(|| panic!("no {key} in {shown}"))
    };
    let max_attempts = line("retry.max_attempts");
    assert!(
        max_attempts.contains('7') && max_attempts.contains("ORDER_PROCESSOR__RETRY__MAX_ATTEMPTS"),
        "{max_attempts}"
    );
    let min_delay = line("retry.min_delay");
    assert!(min_delay.contains("2s") && min_delay.contains("c.toml"), "{min_delay}");
    let max_delay = line("retry.max_delay");
    assert!(max_delay.contains("5m") && max_delay.contains("default"), "{max_delay}");
    assert!(!spec.database().exists(), "showing creates nothing");
}

#[tokio::test]
async fn secrets_are_never_shown() {
    let server = NatsServer::with(crate::support::ServerSpec {
        config: "authorization { user: worker, password: secret-of-the-test }".into(),
        ..Default::default()
    })
    .await;
    let options = async_nats::ConnectOptions::with_user_and_password("worker".into(), "secret-of-the-test".into());
    let broker = Broker::connect_with(&server, options).await;
    broker.create(crate::support::nats::stream_config(), crate::support::nats::consumer_config()).await;

    let spec = DaemonSpec::new(server.url()).set("nats.user", "worker").set("log.level", "debug");
    let password_file = spec.folder().join("password");
    // An editor leaves a line break; it is not part of the password.
    let spec = spec.set("nats.password_file", secret(password_file, "secret-of-the-test\n"));

    broker.publish("Order Data 1").await;
    let shown = spec.run_ok(&["config"]).await;
    let processed = spec.run_ok(&["run", "--until-idle"]).await;
    let checked = spec.run_ok(&["check"]).await;
    spec.db().applied_once(1).await;
    for finished in [&shown, &processed, &checked] {
        assert!(!format!("{finished:?}").contains("secret-of-the-test"), "{finished:?}");
    }

    let in_url = spec.unset("nats.user").unset("nats.password_file");
    let url = server.url().replace("nats://", "nats://worker:secret-of-the-test@");
    let in_url = in_url.set("nats.url", url);
    let shown = in_url.run_ok(&["config"]).await;
    let checked = in_url.run_ok(&["check"]).await;
    for finished in [&shown, &checked] {
        assert!(!format!("{finished:?}").contains("secret-of-the-test"), "{finished:?}");
    }
}

#[tokio::test]
async fn a_wrong_password_is_said_and_does_not_end_the_daemon() {
    let server = NatsServer::with(crate::support::ServerSpec {
        config: "authorization { token: right }".into(),
        ..Default::default()
    })
    .await;
    let spec = DaemonSpec::new(server.url());
    let token = secret(spec.folder().join("token"), "wrong");
    let spec = spec.set("nats.token_file", token);

    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(2), "{checked:?}");
    assert!(checked.stdout.to_lowercase().contains("authorization"), "{checked:?}");

    let mut worker = spec.start();
    worker.not_ready("uthorization").await;
    worker.drain().await;
}
