//! Where settings come from, and what bad ones and bad flags end with.

use crate::support::{DaemonSpec, Finished};

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

/// Which settings are refused, and why, is held by the unit tests of `config`.
#[tokio::test]
async fn all_problems_are_said_at_once_on_one_line_each() {
    let spec = spec().set("log.level", "loud").set("retry.max_attempts", "0");
    std::fs::write(spec.folder().join("c.toml"), "[batch]\nmax_messages = 0\n[inbox]\nid_ponter = \"/id\"\n").unwrap();
    let words = ["LOG__LEVEL", "RETRY__MAX_ATTEMPTS", "batch.max_messages", "id_ponter"];
    let finished = refused(&spec, &["--config", "c.toml", "run"], &words).await;
    assert_eq!(finished.complaints().len(), words.len(), "{finished:?}");
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
