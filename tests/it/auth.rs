//! Authentication and permissions: every way in, wrong keys, keys that are replaced, and the least that a daemon needs.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use async_nats::ConnectOptions;
use async_nats::jetstream::consumer;
use nkeys::KeyPair as Nkey;
use tempfile::TempDir;

use crate::support::keys::{Authority, Operator, secret, set_mode};
use crate::support::nats::{consumer_config, impatient_consumer_config, stream_config};
use crate::support::{Broker, DaemonSpec, NatsServer, PATIENCE, ServerSpec, eventually};

const ADMIN: &str = "{user: admin, password: admin}";

async fn server(config: impl Into<String>) -> NatsServer {
    NatsServer::with(ServerSpec { config: config.into(), ..Default::default() }).await
}

/// `authorization` with the test's own user and another one.
fn users(another: &str) -> String {
    format!("authorization {{ users: [ {ADMIN}, {another} ] }}\n")
}

async fn admin(server: &NatsServer) -> Broker {
    Broker::connect_with(server, ConnectOptions::with_user_and_password("admin".into(), "admin".into())).await
}

/// The stream and the consumer of the story, with one order in it.
async fn story(broker: &Broker) {
    broker.create(stream_config(), consumer_config()).await;
    broker.publish("Order Data 1").await;
}

/// `check` says yes, and the daemon binds and processes.
async fn let_in(spec: &DaemonSpec, broker: &Broker) {
    let checked = spec.run_ok(&["check"]).await;
    assert!(!checked.stdout.contains("FAIL"), "{checked:?}");
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    worker.drain().await;
    spec.db().applied_once(2).await;
}

/// One line says what was refused, and `check` ends with 2; the daemon goes on trying, not ready for the same reason.
async fn locked_out(spec: &DaemonSpec, words: &[&str]) {
    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(2), "{checked:?}");
    let lines: Vec<&str> = checked.stdout.lines().filter(|line| line.starts_with("FAIL  connection")).collect();
    assert_eq!(lines.len(), 1, "{checked:?}");
    assert_eq!(checked.stderr, "", "one clear line");
    for word in words {
        assert!(lines[0].contains(word), "no {word:?} in {}", lines[0]);
    }
    let mut worker = spec.start();
    for word in words {
        worker.not_ready(word).await;
    }
    worker.logged(&["WARN", "tries again"]).await;
    assert_eq!(worker.get("/livez").await.0, 200);
    let log = worker.log();
    let complaints: Vec<&str> = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    assert_eq!(complaints.len(), 1, "one clear line: {complaints:?}");
    worker.drain().await;
}

/// The daemon does not start with this, and says so in one line.
async fn refused(spec: &DaemonSpec, words: &[&str]) {
    for command in ["run", "check"] {
        let finished = spec.run(&[command]).await;
        assert_eq!(finished.code, Some(2), "{finished:?}");
        let complaints = match command {
            "run" => finished.complaints(),
            _ => finished.stdout.lines().filter(|line| line.starts_with("FAIL  conn")).map(str::to_owned).collect(),
        };
        assert_eq!(complaints.len(), 1, "one clear line: {finished:?}");
        for word in words {
            assert!(complaints[0].contains(word), "no {word:?} in {complaints:?}");
        }
    }
    assert!(!spec.database().exists(), "nothing is created");
}

impl DaemonSpec {
    /// A setting whose value is a file with this content, for its owner alone.
    fn with_secret(self, key: &str, text: &str) -> Self {
        let file = secret(self.folder().join(key), text);
        self.set(key, file)
    }

    fn secret_file(&self, key: &str) -> PathBuf {
        self.folder().join(key)
    }
}

#[tokio::test]
async fn user_and_password() {
    let server = server(users("{user: worker, password: \"right one\"}")).await;
    let broker = admin(&server).await;
    story(&broker).await;
    locked_out(&DaemonSpec::new(server.url()), &["rejects a client without a login"]).await;
    let spec =
        DaemonSpec::new(server.url()).set("nats.user", "worker").with_secret("nats.password_file", "wrong one\n");
    locked_out(&spec, &["rejects user worker with the password in", "nats.password_file"]).await;
    let in_url = |password: &str| server.url().replace("nats://", &format!("nats://worker:{password}@"));
    locked_out(&DaemonSpec::new(in_url("wrong")), &["rejects the user in nats.url", "nats://***@127.0.0.1"]).await;

    secret(spec.secret_file("nats.password_file"), "right one\n");
    let_in(&spec, &broker).await;
    let spec = spec.unset("nats.user").unset("nats.password_file").set("nats.url", in_url("right%20one"));
    spec.run_ok(&["check"]).await;
}

#[tokio::test]
async fn a_token() {
    let server = server("authorization { token: \"right one\" }\n").await;
    let broker = Broker::connect_with(&server, ConnectOptions::with_token("right one".into())).await;
    story(&broker).await;
    let spec = DaemonSpec::new(server.url()).with_secret("nats.token_file", "wrong one");
    locked_out(&spec, &["rejects the token in", "nats.token_file"]).await;
    secret(spec.secret_file("nats.token_file"), "right one\r\n");
    let_in(&spec, &broker).await;
}

#[tokio::test]
async fn an_nkey() {
    let (ours, other) = (Nkey::new_user(), Nkey::new_user());
    let server = server(users(&format!("{{nkey: {}}}", ours.public_key()))).await;
    let broker = admin(&server).await;
    story(&broker).await;
    let spec = DaemonSpec::new(server.url()).with_secret("nats.nkey_file", &other.seed().unwrap());
    locked_out(&spec, &["rejects the NKey in", "nats.nkey_file"]).await;
    secret(spec.secret_file("nats.nkey_file"), &ours.seed().unwrap());
    let_in(&spec, &broker).await;
}

#[tokio::test]
async fn a_credentials_file() {
    let operator = Operator::new();
    let server = server(operator.config()).await;
    let options = ConnectOptions::with_credentials(&operator.user(None)).unwrap();
    let broker = Broker::connect_with(&server, options).await;
    story(&broker).await;
    let spec = DaemonSpec::new(server.url()).with_secret("nats.credentials_file", &Operator::new().user(None));
    locked_out(&spec, &["rejects the credentials in", "nats.credentials_file (authorization violation)"]).await;
    secret(spec.secret_file("nats.credentials_file"), &operator.user(Some(-60)));
    locked_out(&spec, &["rejects the credentials in", "its JWT expired at 20"]).await;
    secret(spec.secret_file("nats.credentials_file"), &operator.user(None));
    let_in(&spec, &broker).await;
}

/// A server's configuration: its certificate, and more lines in the same block.
fn tls(authority: &Authority, clients: &Authority, until: i32, more: &str) -> String {
    let server = authority.issue("server", until);
    let (cert, key, ca) = (server.cert.display(), server.key.display(), clients.ca());
    format!(
        "tls {{\n  cert_file: {cert:?}\n  key_file: {key:?}\n  ca_file: {ca:?}\n  {more}\n}}\n",
        cert = cert.to_string(),
        key = key.to_string()
    )
}

async fn through_tls(server: &NatsServer, authority: &Authority) -> Broker {
    let client = authority.issue("admin", 4000);
    let options =
        ConnectOptions::new().add_root_certificates(authority.ca()).add_client_certificate(client.cert, client.key);
    Broker::connect_with(server, options.require_tls(true)).await
}

#[tokio::test]
async fn tls_with_an_authority_of_our_own() {
    let folder = TempDir::new().unwrap();
    let (ours, other) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "other"));
    let mut server = server(tls(&ours, &ours, 4000, "")).await;
    let broker = through_tls(&server, &ours).await;
    story(&broker).await;
    locked_out(&DaemonSpec::new(server.url()), &["certificate", "UnknownIssuer"]).await;
    locked_out(&DaemonSpec::new(server.url()).set("nats.tls.ca_file", other.ca()), &["certificate", "UnknownIssuer"])
        .await;
    let spec = DaemonSpec::new(server.url()).set("nats.tls.ca_file", ours.ca());
    let_in(&spec, &broker).await;
    let spec = spec.set("nats.url", server.url().replace("nats://", "tls://"));
    spec.run_ok(&["check"]).await;

    server.reconfigure(tls(&ours, &ours, 2020, "")).await;
    locked_out(&spec, &["certificate", "expired"]).await;
}

#[tokio::test]
async fn a_password_never_goes_to_a_server_without_tls_where_tls_is_configured() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let server = server(users("{user: worker, password: secret}")).await;
    let spec = DaemonSpec::new(server.url()).set("nats.user", "worker").with_secret("nats.password_file", "secret");
    spec.run(&["check"]).await;
    let insisting = spec.set("nats.tls.ca_file", ours.ca());
    locked_out(&insisting, &["the server does not use TLS on this port"]).await;
}

#[tokio::test]
async fn tls_first() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let mut server = server(tls(&ours, &ours, 4000, "handshake_first: true")).await;
    let options = ConnectOptions::new().add_root_certificates(ours.ca()).tls_first();
    let broker = Broker::connect_with(&server, options).await;
    story(&broker).await;
    let spec = DaemonSpec::new(server.url()).set("nats.tls.ca_file", ours.ca());
    let waiting = spec.run(&["check"]).await;
    assert_eq!(waiting.code, Some(1), "it may as well be a slow server: {waiting:?}");
    assert!(waiting.stdout.contains("set nats.tls.handshake_first"), "{waiting:?}");
    let spec = spec.set("nats.tls.handshake_first", "true");
    let_in(&spec, &broker).await;

    server.reconfigure(tls(&ours, &ours, 4000, "")).await;
    locked_out(&spec, &["the server does not use TLS on this port"]).await;
}

#[tokio::test]
async fn mutual_tls() {
    let folder = TempDir::new().unwrap();
    let (ours, other) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "other"));
    let server = server(tls(&ours, &ours, 4000, "verify: true")).await;
    let broker = through_tls(&server, &ours).await;
    story(&broker).await;
    let without = DaemonSpec::new(server.url()).set("nats.tls.ca_file", ours.ca());
    locked_out(&without, &["requires a client certificate (CertificateRequired)"]).await;
    for wrong in [other.issue("client", 4000), ours.issue("expired", 2020)] {
        let spec = DaemonSpec::new(server.url())
            .set("nats.tls.ca_file", ours.ca())
            .set("nats.tls.cert_file", wrong.cert)
            .set("nats.tls.key_file", wrong.key);
        locked_out(&spec, &["rejects the certificate in"]).await;
    }
    let client = ours.issue("client", 4000);
    let spec = without.set("nats.tls.cert_file", client.cert).set("nats.tls.key_file", client.key);
    let_in(&spec, &broker).await;
}

/// A daemon at work, whose server then takes other keys only: it says so, and goes on once the file is replaced.
async fn rotation(
    server: &mut NatsServer,
    spec: &DaemonSpec,
    broker: Broker,
    config: String,
    options: ConnectOptions,
    replace: impl FnOnce(),
) {
    story(&broker).await;
    let mut worker = spec.start();
    worker.ready().await;
    broker.acknowledged(1).await;
    server.reconfigure(config).await;
    worker.not_ready("the server rejects").await;
    worker.logged(&["WARN", "the server rejects"]).await;
    replace();
    worker.ready().await;
    let broker = Broker::connect_with(server, options).await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    spec.db().applied_once(2).await;
    worker.drain().await;
}

fn as_admin() -> ConnectOptions {
    ConnectOptions::with_user_and_password("admin".into(), "admin".into())
}

async fn new_password() {
    let config = |password: &str| users(&format!("{{user: worker, password: {password}}}"));
    let mut server = server(config("before")).await;
    let broker = admin(&server).await;
    let spec = DaemonSpec::new(server.url()).set("nats.user", "worker").with_secret("nats.password_file", "before");
    let replace = || drop(secret(spec.secret_file("nats.password_file"), "after"));
    rotation(&mut server, &spec, broker, config("after"), as_admin(), replace).await;
}

async fn new_token() {
    let config = |token: &str| format!("authorization {{ token: {token} }}\n");
    let mut server = server(config("before")).await;
    let broker = Broker::connect_with(&server, ConnectOptions::with_token("before".into())).await;
    let spec = DaemonSpec::new(server.url()).with_secret("nats.token_file", "before");
    let replace = || drop(secret(spec.secret_file("nats.token_file"), "after"));
    rotation(&mut server, &spec, broker, config("after"), ConnectOptions::with_token("after".into()), replace).await;
}

async fn new_nkey() {
    let (before, after) = (Nkey::new_user(), Nkey::new_user());
    let config = |key: &Nkey| users(&format!("{{nkey: {}}}", key.public_key()));
    let mut server = server(config(&before)).await;
    let broker = admin(&server).await;
    let spec = DaemonSpec::new(server.url()).with_secret("nats.nkey_file", &before.seed().unwrap());
    let replace = || drop(secret(spec.secret_file("nats.nkey_file"), &after.seed().unwrap()));
    rotation(&mut server, &spec, broker, config(&after), as_admin(), replace).await;
}

async fn new_client_certificate() {
    let folder = TempDir::new().unwrap();
    let (ours, next) = (Authority::new(folder.path(), "ours"), Authority::new(folder.path(), "next"));
    let mut server = server(tls(&ours, &ours, 4000, "verify: true")).await;
    let broker = through_tls(&server, &ours).await;
    let (before, after) = (ours.issue("client", 4000), next.issue("client", 4000));
    let spec = DaemonSpec::new(server.url())
        .set("nats.tls.ca_file", ours.ca())
        .set("nats.tls.cert_file", before.cert.clone())
        .set("nats.tls.key_file", before.key.clone());
    let options = ConnectOptions::new()
        .add_root_certificates(ours.ca())
        .add_client_certificate(after.cert.clone(), after.key.clone());
    let replace = || {
        std::fs::rename(&after.key, &before.key).unwrap();
        std::fs::rename(&after.cert, &before.cert).unwrap();
        // The test's own client needs them, too.
        std::fs::copy(&before.key, &after.key).unwrap();
        std::fs::copy(&before.cert, &after.cert).unwrap();
    };
    rotation(&mut server, &spec, broker, tls(&ours, &next, 4000, "verify: true"), options, replace).await;
}

#[tokio::test]
async fn a_new_key_counts_from_the_next_connect_on() {
    tokio::join!(new_password(), new_token(), new_nkey(), new_client_certificate());
}

#[tokio::test]
async fn expired_credentials_are_read_again_once_they_are_renewed() {
    let operator = Operator::new();
    let server = server(operator.config()).await;
    let options = ConnectOptions::with_credentials(&operator.user(None)).unwrap();
    let broker = Broker::connect_with(&server, options).await;
    story(&broker).await;
    let spec = DaemonSpec::new(server.url()).with_secret("nats.credentials_file", &operator.user(Some(3)));
    let mut worker = spec.start();
    broker.acknowledged(1).await;
    worker.not_ready("its JWT expired at 20").await;
    let file = secret(spec.secret_file("nats.credentials_file"), "half of it");
    worker.not_ready("does not have a user JWT").await;
    set_mode(&file, 0o604);
    worker.not_ready("is open to every user (mode 0604)").await;
    secret(file, &operator.user(None));
    worker.ready().await;
    broker.publish("Order Data 2").await;
    broker.acknowledged(2).await;
    spec.db().applied_once(2).await;
    worker.drain().await;
}

#[tokio::test]
async fn files_that_cannot_be_used_are_refused_at_the_start() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (one, another) = (ours.issue("one", 4000), ours.issue("another", 4000));
    let spec = || DaemonSpec::new("nats://127.0.0.1:9");
    let account = Nkey::new_account().seed().unwrap();
    let seed = Nkey::new_user().seed().unwrap();
    let half = &seed[..seed.len() / 2];
    for (key, text, words) in [
        ("nats.password_file", "", "is empty"),
        ("nats.token_file", "\n", "is empty"),
        ("nats.nkey_file", half, "does not have an NKey seed of a user (SU...)"),
        ("nats.nkey_file", account.as_str(), "does not have an NKey seed of a user (SU...)"),
        ("nats.credentials_file", seed.as_str(), "does not have a user JWT and an NKey seed"),
        ("nats.tls.ca_file", "hello", "does not have certificates (PEM)"),
    ] {
        let spec = spec().with_secret(key, text);
        let spec = if key == "nats.password_file" { spec.set("nats.user", "worker") } else { spec };
        refused(&spec, &[key, words, spec.secret_file(key).to_str().unwrap()]).await;
        if text.len() > 20 {
            let finished = spec.run(&["run"]).await;
            assert!(!format!("{finished:?}").contains(text), "{key}: the secret is shown");
        }
    }
    let with_key = |key: PathBuf| spec().set("nats.tls.cert_file", one.cert.clone()).set("nats.tls.key_file", key);
    refused(&with_key(one.cert.clone()), &["nats.tls.key_file", "does not have a private key"]).await;
    refused(&with_key(another.key), &["nats.tls.key_file", "does not match the certificate in", "one.pem"]).await;
    refused(&with_key(folder.path().join("none")), &["nats.tls.key_file", "cannot be read: No such file"]).await;
    refused(&spec().set("nats.token_file", folder.path()), &["nats.token_file", "is not a file"]).await;

    set_mode(&one.key, 0o644);
    let close = format!("chmod o= {}", one.key.display());
    refused(&with_key(one.key), &["nats.tls.key_file", "is open to every user (mode 0644)", &close]).await;
    for (mode, code) in [(0o644, 2), (0o604, 2), (0o602, 2), (0o640, 1), (0o440, 1), (0o400, 1)] {
        let spec = spec().with_secret("nats.token_file", "a token");
        set_mode(&spec.secret_file("nats.token_file"), mode);
        let checked = spec.run(&["check"]).await;
        assert_eq!(checked.code, Some(code), "{mode:o}: {checked:?}");
    }
}

/// A secret of a container platform: the command that closes a file elsewhere cannot work there.
#[tokio::test]
async fn the_advice_on_an_open_secret_of_a_read_only_volume_is_the_platforms() {
    let folder = TempDir::new().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "secret").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o444)).unwrap();
    let place = folder.path().display().to_string();
    let mount = format!("mount --bind '{place}' '{place}' && mount -o remount,bind,ro '{place}' && exec \"$0\" \"$@\"");
    let through = ["unshare", "--mount", "--map-root-user", "sh", "-c", &mount];
    let spec = DaemonSpec::new("nats://127.0.0.1:9").set("nats.token_file", &token);
    if !spec.command_through(&through, &["--version"]).output().is_ok_and(|tried| tried.status.success()) {
        eprintln!("NOT TESTED: a read-only mount cannot be made here; it takes user namespaces");
        return;
    }
    let finished = spec.command_through(&through, &["run"]).output().unwrap();
    let said = String::from_utf8(finished.stderr).unwrap();
    assert_eq!(finished.status.code(), Some(2), "{said}");
    assert!(said.contains("defaultMode: 0440") && !said.contains("chmod"), "{said}");
}

#[tokio::test]
async fn the_advice_on_an_open_secret_leaves_it_readable_for_us() {
    let with_file = DaemonSpec::new("nats://127.0.0.1:9").with_secret("nats.token_file", "a token");
    let with_url = DaemonSpec::new("").unset("nats.url");
    let settings = secret(with_url.folder().join("c.toml"), "[nats]\nurl = \"nats://worker:secret@127.0.0.1:9\"\n");
    let token = with_file.secret_file("nats.token_file");
    // `check` fails on a server that is not there.
    let cases: [(_, _, &[&str], _); 2] =
        [(&with_file, token, &["check"], 1), (&with_url, settings, &["--config", "c.toml", "config"], 0)];
    for (spec, file, arguments, code) in cases {
        set_mode(spec.folder(), 0o755);
        set_mode(&file, 0o644);
        let Some(refused) = spec.run_as_nobody(arguments).await else { return };
        assert_eq!(refused.code, Some(2), "{refused:?}");
        let said = format!("{}{}", refused.stdout, refused.stderr);
        let advice = said.split('`').nth(1).unwrap_or_else(|| panic!("no advice in {refused:?}"));
        assert!(Command::new("sh").args(["-c", advice]).current_dir(spec.folder()).status().unwrap().success());
        let followed = spec.run_as_nobody(arguments).await.unwrap();
        assert_eq!(followed.code, Some(code), "after {advice}: {followed:?}");
    }
}

#[tokio::test]
async fn a_password_in_a_settings_file_that_every_user_may_read_is_refused() {
    let spec = DaemonSpec::new("").unset("nats.url");
    let file = spec.folder().join("c.toml");
    std::fs::write(&file, "[nats]\nurl = \"nats://worker:secret@127.0.0.1:9\"\n").unwrap();
    set_mode(&file, 0o644);
    let arguments = ["--config", "c.toml", "config"];
    let finished = spec.run(&arguments).await;
    assert_eq!(finished.code, Some(2), "{finished:?}");
    assert!(finished.stderr.contains("nats.url (file c.toml)") && finished.stderr.contains("chmod o="), "{finished:?}");
    assert!(!finished.stderr.contains("secret@"), "{finished:?}");
    set_mode(&file, 0o640);
    spec.run_ok(&arguments).await;
}

/// What the daemon must be allowed to publish, and to subscribe to. docs/reference/permissions.md has the same.
pub const PUBLISH: [&str; 5] = [
    "$JS.API.STREAM.INFO.ORDERS",
    "$JS.API.CONSUMER.INFO.ORDERS.order-processor",
    "$JS.API.CONSUMER.MSG.NEXT.ORDERS.order-processor",
    "$JS.ACK.ORDERS.order-processor.>",
    "$JS.ACK.*.*.ORDERS.order-processor.>",
];
pub const SUBSCRIBE: &str = "_INBOX.order-processor.>";
pub const OPTIONAL: [&str; 2] =
    ["$JS.API.STREAM.MSG.GET.ORDERS", "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.ORDERS.order-processor"];

/// A user who may do this and nothing else.
fn user(name: &str, publish: &[&str], subscribe: &[&str]) -> String {
    format!(
        "{{user: {name}, password: {name}, permissions: {{publish: {{allow: {publish:?}}}, subscribe: {{allow: {subscribe:?}}}}}}}"
    )
}

fn logged_in(server: &NatsServer, name: &str) -> DaemonSpec {
    DaemonSpec::new(server.url()).set("nats.user", name).with_secret("nats.password_file", name)
}

/// Binding, processing, redelivery, a dead letter, a reconnect, the commands that look: with the least permissions.
async fn main_path(server: &mut NatsServer, config: &str, lines_allowed: &[&str]) {
    let broker = admin(server).await;
    broker.create(stream_config(), impatient_consumer_config()).await;
    let spec = logged_in(server, "worker").set("inbox.id_pointer", "/id");
    let order = |number: u64| format!("{{\"id\": {number}}}");
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish(order(1)).await;
    broker.acknowledged(1).await;
    // Held, and then delivered again to the next one.
    let writer = spec.db().lock().await;
    broker.publish(order(2)).await;
    worker.not_ready("database").await;
    worker.metric("held_deliveries", 1.0).await;
    worker.kill9();
    drop(writer);
    let mut worker = spec.start();
    broker.acknowledged(2).await;
    broker.publish("no JSON").await;
    spec.db().has("dead_letters", 1).await;
    broker.acknowledged(3).await;
    server.reconfigure(config).await;
    let broker = admin(server).await;
    // While one waits, its age is asked for.
    let writer = spec.db().lock().await;
    broker.publish(order(4)).await;
    for words in lines_allowed {
        worker.logged(&["INFO", words]).await;
    }
    drop(writer);
    broker.acknowledged(4).await;
    worker.ready().await;
    for command in ["check", "status"] {
        spec.run_ok(&[command]).await;
    }
    worker.drain().await;
    assert_eq!(spec.db().count("orders").await, 3);
    let log = worker.log();
    let said: Vec<&str> =
        log.lines().filter(|line| line.contains("permission") || line.contains("ermissions V")).collect();
    assert_eq!(said.len(), lines_allowed.len(), "each is said once: {said:?}");
    for (line, words) in said.iter().zip(lines_allowed) {
        assert!(line.contains("INFO") && line.contains(words), "{line}");
    }
}

#[tokio::test]
async fn the_least_permissions_are_enough_and_what_is_optional_is_said_once() {
    let config = users(&user("worker", &PUBLISH, &[SUBSCRIBE]));
    let mut server = server(config.as_str()).await;
    main_path(&mut server, &config, &["cannot receive max-deliveries advisories", "cannot read stored messages"]).await;
}

#[tokio::test]
async fn with_the_optional_permissions_nothing_is_missing() {
    let publish: Vec<&str> = PUBLISH.into_iter().chain([OPTIONAL[0]]).collect();
    let config = users(&user("worker", &publish, &[SUBSCRIBE, OPTIONAL[1]]));
    let mut server = server(config.as_str()).await;
    main_path(&mut server, &config, &[]).await;
}

#[tokio::test]
async fn each_permission_that_is_missing_is_named() {
    // The last form of the acknowledgement's subject is for other servers than this one.
    let lacks = [PUBLISH[0], PUBLISH[1], PUBLISH[2], PUBLISH[3], SUBSCRIBE];
    let lacking = lacks.iter().enumerate().map(|(n, lack)| {
        let publish: Vec<&str> = PUBLISH.into_iter().filter(|subject| subject != lack).collect();
        let subscribe: &[&str] = if *lack == SUBSCRIBE { &["nothing"] } else { &[SUBSCRIBE] };
        user(&format!("worker{n}"), &publish, subscribe)
    });
    let server = server(users(&lacking.collect::<Vec<_>>().join(", "))).await;
    let broker = admin(&server).await;
    story(&broker).await;
    let specs: Vec<_> = (0..lacks.len()).map(|n| logged_in(&server, &format!("worker{n}"))).collect();
    let mut workers: Vec<_> = specs.iter().map(DaemonSpec::start).collect();
    for (worker, lack) in workers.iter_mut().zip(lacks) {
        worker.not_ready(lack.trim_end_matches('>')).await;
        worker.logged(&["ERROR", "the server denies a subject", lack.trim_end_matches('>')]).await;
        let errors = worker.metrics().await.get("nats_errors_total{kind=\"permission\"}");
        assert!(errors >= Some(1.0), "{lack}: {errors:?}");
        worker.drain().await;
    }
}

/// A user lacks one permission for a command, and the command says which.
async fn lacking(spec: &DaemonSpec, command: &str, lack: &str) {
    let finished = spec.run(&command.split(' ').collect::<Vec<_>>()).await;
    assert_eq!(finished.code, Some(1), "{command}: {finished:?}");
    let said = format!("{}{}", finished.stdout, finished.stderr);
    let complaints: Vec<&str> =
        said.lines().filter(|line| line.contains("ermissions Violation") && !line.contains("WARN")).collect();
    let lack = lack.trim_end_matches('>');
    assert!(complaints.len() == 1 && complaints[0].contains(lack), "no {lack} in {command}: {finished:?}");
}

#[tokio::test]
async fn a_permission_that_a_command_lacks_is_named() {
    let least = |lack: &str| PUBLISH.into_iter().filter(|subject| *subject != lack).collect::<Vec<_>>();
    let cases = [
        ("setup", "$JS.API.STREAM.CREATE.ORDERS"),
        ("setup", PUBLISH[0]),
        ("setup", PUBLISH[1]),
        ("status", PUBLISH[1]),
        ("audit", PUBLISH[0]),
        ("audit", PUBLISH[1]),
        ("audit --patience 1s", "$JS.API.STREAM.MSG.GET.ORDERS"),
        ("publish --count 2", "ORDERS.new"),
        ("teardown --yes", "$JS.API.STREAM.DELETE.ORDERS"),
    ];
    let users_lacking =
        cases.iter().enumerate().map(|(n, (_, lack))| user(&format!("user{n}"), &least(lack), &[SUBSCRIBE]));
    let server = server(users(&users_lacking.collect::<Vec<_>>().join(", "))).await;
    let (first, others) = cases.split_first().unwrap();
    lacking(&logged_in(&server, "user0"), first.0, first.1).await;
    let broker = admin(&server).await;
    story(&broker).await;
    let as_user = |name: &str| server.url().replace("nats://", &format!("nats://{name}:{name}@"));
    // The audit has something to look at.
    let mut spec = DaemonSpec::new(as_user("admin"));
    spec.run_ok(&["run", "--until-idle"]).await;
    for (n, (command, lack)) in (1..).zip(others) {
        spec.change("nats.url", as_user(&format!("user{n}")));
        lacking(&spec, command, lack).await;
    }
    assert_eq!(broker.stream_info().await.state.messages, 1);
}

/// `check` tries what `run` does later, and takes nothing from anybody by it.
#[tokio::test]
async fn check_names_a_missing_permission_and_changes_nothing() {
    let lacks = [PUBLISH[0], PUBLISH[1], PUBLISH[2], PUBLISH[3], SUBSCRIBE];
    let users_lacking = lacks.iter().enumerate().map(|(n, lack)| {
        let publish: Vec<&str> = PUBLISH.into_iter().filter(|subject| subject != lack).collect();
        let subscribe: &[&str] = if *lack == SUBSCRIBE { &["nothing"] } else { &[SUBSCRIBE] };
        user(&format!("user{n}"), &publish, subscribe)
    });
    let complete = user("complete", &PUBLISH, &[SUBSCRIBE]);
    let server = server(users(&users_lacking.chain([complete]).collect::<Vec<_>>().join(", "))).await;
    let broker = admin(&server).await;
    story(&broker).await;
    broker.publish("Order Data 2").await;
    let held = broker.take_one().await;
    let before = broker.consumer_info().await;
    for (n, lack) in lacks.into_iter().enumerate() {
        lacking(&logged_in(&server, &format!("user{n}")), "check", lack).await;
    }
    let checked = logged_in(&server, "complete").run_ok(&["check"]).await;
    assert!(checked.stdout.contains("ok    permissions to pull and to acknowledge"), "{checked:?}");
    let after = broker.consumer_info().await;
    let figures = |info: consumer::Info| {
        let counts = (info.num_ack_pending, info.num_redelivered, info.num_waiting, info.num_pending);
        format!("{:?} {:?} {counts:?}", info.delivered, info.ack_floor)
    };
    assert_eq!(figures(after), figures(before));
    drop(held);
}

#[tokio::test]
async fn the_other_commands_need_what_is_documented_for_them() {
    let publisher = user("publisher", &["ORDERS.*"], &[SUBSCRIBE]);
    let operator = user(
        "operator",
        &[
            "$JS.API.STREAM.INFO.ORDERS",
            "$JS.API.STREAM.CREATE.ORDERS",
            "$JS.API.STREAM.DELETE.ORDERS",
            "$JS.API.CONSUMER.INFO.ORDERS.order-processor",
            "$JS.API.CONSUMER.CREATE.ORDERS.order-processor",
            "$JS.API.CONSUMER.DELETE.ORDERS.order-processor",
        ],
        &[SUBSCRIBE],
    );
    let server = server(users(&format!("{publisher}, {operator}"))).await;
    let operator = logged_in(&server, "operator");
    operator.run_ok(&["setup"]).await;
    logged_in(&server, "publisher").run_ok(&["publish", "--count", "3"]).await;
    let seen = operator.run(&["status", "--json"]).await.json();
    assert_eq!(seen["stream"]["last_seq"], 3, "{seen}");
    operator.run_ok(&["teardown", "--consumer-only", "--yes"]).await;
    operator.run_ok(&["teardown", "--yes"]).await;
}

/// Everything that the program says, at the loudest, with this way in.
async fn all_output(spec: DaemonSpec) -> String {
    let spec = spec.set("log.level", "trace,async_nats=trace,sqlx=trace");
    let mut said = String::new();
    for arguments in [
        &["check"][..],
        &["config"],
        &["config", "--json"],
        &["setup"],
        &["status"],
        &["status", "--json"],
        &["publish", "--count", "1"],
    ] {
        let finished = spec.run(arguments).await;
        said += &format!("{}{}", finished.stdout, finished.stderr);
    }
    let mut worker = spec.start();
    eventually("it serves", PATIENCE, async || worker.try_get("/livez").await).await;
    worker.logged(&["CONNECT"]).await;
    for path in ["/status", "/metrics", "/readyz", "/livez"] {
        said += &worker.get(path).await.1;
    }
    worker.drain().await;
    said + &worker.log()
}

#[tokio::test]
async fn secrets_are_in_no_output_at_any_log_level() {
    let folder = TempDir::new().unwrap();
    let ours = Authority::new(folder.path(), "ours");
    let (ours_key, other_key) = (Nkey::new_user(), Nkey::new_user());
    let users = users(&format!("{{user: worker, password: right-S3CRET}}, {{nkey: {}}}", ours_key.public_key()));
    let plain = server(users).await;
    let operator = Operator::new();
    let with_jwt = server(operator.config()).await;
    let with_tls = server(tls(&ours, &ours, 4000, "verify: true")).await;
    let client = ours.issue("client", 4000);
    let certificate = |spec: DaemonSpec| {
        spec.set("nats.tls.ca_file", ours.ca())
            .set("nats.tls.cert_file", client.cert.clone())
            .set("nats.tls.key_file", client.key.clone())
    };
    let credentials = [operator.user(None), Operator::new().user(None)];
    // Whole lines of base64: key, seed and JWT.
    let long_lines = |text: &str| text.lines().filter(|line| line.len() > 40).map(str::to_owned).collect::<Vec<_>>();
    let in_url = |user: &str| plain.url().replace("nats://", &format!("nats://{user}@"));
    let (ours_seed, other_seed) = (ours_key.seed().unwrap(), other_key.seed().unwrap());
    let secret = || vec!["S3CRET".to_owned()];
    // Each way of one server has the database that the others have worked with.
    let at = |url: String, server: &NatsServer| {
        let database = folder.path().join(format!("{}.db", server.address().replace(':', "-")));
        DaemonSpec::new(url).set("database.url", format!("sqlite://{}", database.display()))
    };
    let to = |server: &NatsServer| at(server.url(), server);
    let ways = [
        (at(in_url("worker:right-S3CRET"), &plain), secret()),
        (at(in_url("worker:wrong-S3CRET"), &plain), secret()),
        (at(in_url("token-S3CRET"), &plain), secret()),
        (to(&plain).set("nats.user", "worker").with_secret("nats.password_file", "right-S3CRET"), secret()),
        (to(&plain).set("nats.user", "worker").with_secret("nats.password_file", "wrong-S3CRET"), secret()),
        (to(&plain).with_secret("nats.token_file", "wrong-S3CRET"), secret()),
        (to(&plain).with_secret("nats.nkey_file", &ours_seed), vec![ours_seed.clone()]),
        (to(&plain).with_secret("nats.nkey_file", &other_seed), vec![other_seed.clone()]),
        (to(&with_jwt).with_secret("nats.credentials_file", &credentials[0]), long_lines(&credentials[0])),
        (to(&with_jwt).with_secret("nats.credentials_file", &credentials[1]), long_lines(&credentials[1])),
        (certificate(to(&with_tls)), long_lines(&std::fs::read_to_string(&client.key).unwrap())),
    ];
    for (spec, secrets) in ways {
        let said = all_output(spec).await;
        assert!(said.contains("TRACE") && !secrets.is_empty());
        for secret in secrets {
            let line = said.lines().find(|line| line.contains(&secret));
            assert_eq!(line, None, "{secret} is shown");
        }
    }
}

#[tokio::test]
async fn denied_acknowledgements_stay_visible_on_a_consumer_that_had_some() {
    let config = "authorization {\n  users: [\n    {user: admin, password: admin}\n    {user: worker, password: worker, permissions: {\n      \
                  publish: {allow: [\"$JS.API.>\"]}, subscribe: [\"_INBOX.>\"]}}\n  ]\n}\nno_auth_user: worker";
    let server = NatsServer::with(ServerSpec { config: config.into(), ..ServerSpec::default() }).await;
    let options = async_nats::ConnectOptions::with_user_and_password("admin".into(), "admin".into());
    let broker = Broker::connect_with(&server, options).await;
    broker.create(stream_config(), consumer_config()).await;
    broker.publish_numbered(1..=3).await;
    let mut spec = DaemonSpec::new(server.url().replace("//", "//admin:admin@"));
    spec.run_ok(&["run", "--until-idle"]).await;
    broker.acknowledged(3).await;

    spec.change("nats.url", server.url());
    broker.publish("Order Data 4").await;
    let mut worker = spec.start();
    worker.not_ready("acks: the server denies a subject").await;
    // So that it can be told when the daemon has looked at the consumer again.
    broker.publish("Order Data 5").await;
    worker.metric("stream_last_seq", 5.0).await;
    let (status, body) = worker.get("/readyz").await;
    assert!(status == 503 && body.contains("acks: the server denies a subject"), "{status} {body}");
    assert_eq!(broker.consumer_info().await.ack_floor.stream_sequence, 3);
    worker.drain().await;
}
