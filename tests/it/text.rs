//! Texts of messages in every output: nothing in them drives a terminal, and nothing is without a bound.

use std::time::Duration;

use crate::support::nats::headers;
use crate::support::{Broker, DaemonSpec, NatsServer};

/// ESC, a C1 character, a mark of direction and a character without a shape. A NATS header or subject can hold them.
const HOSTILE: &str = "o\u{1b}[2J\u{9b}31m\u{202e}\u{feff}";
const ESCAPED: &str = "o\\u{1b}[2J\\u{9b}31m\\u{202e}\\u{feff}";

fn assert_harmless(what: &str, text: &str) {
    let drives = |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c) || c == '\u{feff}';
    assert!(!text.contains(drives), "{what}: {text:?}");
}

/// The story on a stream that forgets message ids, so that a publisher can use one for another order.
async fn forgetful_story() -> (NatsServer, Broker) {
    let (server, broker) = Broker::story().await;
    let mut stream = broker.stream_info().await.config;
    stream.duplicate_window = Duration::from_millis(100);
    broker.jetstream.update_stream(stream).await.unwrap();
    (server, broker)
}

/// A daemon that has made a dead letter with hostile id, subject, header and payload.
async fn with_hostile_letter(format: &str) -> (NatsServer, DaemonSpec, String) {
    let (server, broker) = forgetful_story().await;
    let spec = DaemonSpec::new(server.url()).set("log.format", format).set("log.level", "debug");
    let subject = format!("ORDERS.{HOSTILE}");
    let pairs = [("Nats-Msg-Id", HOSTILE), ("X-Note", HOSTILE)];
    broker.publish_to(&subject, headers(&pairs), b"first".to_vec()).await;
    broker.publish_anew(&subject, headers(&pairs), format!("second {HOSTILE}").into_bytes()).await;
    let mut worker = spec.start();
    broker.acknowledged(2).await;
    spec.db().has("dead_letters", 1).await;
    worker.drain().await;
    let log = worker.log();
    (server, spec, log)
}

#[tokio::test]
async fn hostile_ids_subjects_and_headers_are_escaped_in_every_output() {
    let (_server, spec, log) = with_hostile_letter("text").await;
    assert_harmless("text log", &log);
    assert!(log.contains(&format!("message_id={ESCAPED}")), "{log}");
    for arguments in [
        &["list"][..],
        &["show", HOSTILE],
        &["list", "--json"],
        &["show", HOSTILE, "--json"],
        &["export"],
        &["replay", HOSTILE, "--dry-run"],
    ] {
        let finished = spec.run(&[&["dead-letters"], arguments].concat()).await;
        assert_harmless(&format!("{arguments:?}"), &format!("{}{}", finished.stdout, finished.stderr));
        assert!(finished.stdout.contains("2J"), "{arguments:?}: {finished:?}");
    }
    let exported: serde_json::Value =
        serde_json::from_str(&spec.run_ok(&["dead-letters", "export"]).await.stdout).unwrap();
    assert_eq!(exported["id"], HOSTILE, "JSON escapes keep the value");
    let refused = spec.run(&["dead-letters", "show", &format!("{HOSTILE}x")]).await;
    assert_harmless("an error", &refused.stderr);
}

#[tokio::test]
async fn the_json_log_escapes_what_a_terminal_would_obey() {
    let (_server, _spec, log) = with_hostile_letter("json").await;
    assert_harmless("json log", &log);
    let events = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let ids = events.filter(|event| event["message_id"] == HOSTILE).count();
    assert!(ids >= 2, "the applied one at debug, the conflict as a warning: {log}");
}

#[tokio::test]
async fn a_dead_letter_of_any_depth_and_size_is_shown_in_bounded_memory() {
    let (server, broker) = forgetful_story().await;
    let spec = DaemonSpec::new(server.url());
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "deep")]), b"first".to_vec()).await;
    broker.publish_anew("ORDERS.new", headers(&[("Nats-Msg-Id", "deep")]), deep.into_bytes()).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    // In a megabyte of stack and half a gigabyte in all, it aborts if it needs more.
    let limits = "ulimit -v 1500000; exec \"$0\" \"$@\"";
    let shown = {
        let mut command = spec.command_through(&["sh", "-c", limits], &["dead-letters", "show", "deep"]);
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    };
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.status.success(), "{}: {}", shown.status, String::from_utf8_lossy(&shown.stderr));
    assert!(text.len() < 200_000 && text.contains("200000 bytes, JSON"), "{} bytes", text.len());
    assert!(text.ends_with("prints everything\n"), "the end says where the rest is");
    let whole = spec.run_ok(&["dead-letters", "show", "deep", "--json"]).await.stdout;
    assert!(whole.len() > 200_000, "{}", whole.len());
}
