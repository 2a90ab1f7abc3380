//! Every rule of the settings, through the same door as the program.

use super::sources::variable;
use super::*;
use std::os::unix::ffi::OsStringExt;

use proptest::prelude::*;
use proptest::sample::select;

/// Loads `toml` as the file `/…/c.toml`, with `env`.
fn load(toml: &str, env: &[(&str, &str)]) -> Result<Loaded, Problems> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, toml).unwrap();
    load_from(Some(&file), Path::new("/nonexistent"), env.iter().map(|(name, value)| (name.into(), value.into())))
}

fn problems(toml: &str, env: &[(&str, &str)]) -> Vec<String> {
    load(toml, env).expect_err("these settings are to be refused").lines().to_vec()
}

/// The only problem, which names a key, and its source by what follows `(`.
fn problem(toml: &str, env: &[(&str, &str)]) -> String {
    let problems = problems(toml, env);
    assert_eq!(problems.len(), 1, "{problems:#?}");
    assert_eq!(problems[0].lines().count(), 1, "{problems:#?}");
    problems[0].clone()
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

#[track_caller]
fn assert_holds(line: &str, parts: &[&str]) {
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line:?}");
    }
}

#[track_caller]
fn assert_refused(key: &str, value: &str, what: &str) {
    let line = problem("", &[(&variable(key), value)]);
    let allowed = Known::of(key).allowed();
    assert_holds(&line, &[&format!("{key} (environment {})", variable(key)), what, &allowed]);
}

fn config(env: &[(&str, &str)]) -> Config {
    load("", env).unwrap_or_else(|problems| panic!("{problems}")).config
}

#[test]
fn the_defaults_are_those_of_the_design() {
    let config = load_from(None, Path::new("/nonexistent"), []).unwrap().config;
    let expected = Config {
        nats: Nats {
            url: "nats://127.0.0.1:4222".into(),
            auth: Auth::None,
            domain: None,
            api_prefix: "$JS.API".into(),
            tls: Tls::default(),
        },
        consumer: ConsumerNames { stream: "ORDERS".into(), name: "order-processor".into() },
        batch: Batch { max_messages: 2000, max_bytes: 8 << 20 },
        retry: Retry { max_attempts: 5, min_delay: secs(1), max_delay: secs(300) },
        inbox: InboxSettings {
            on_conflict: OnConflict::DeadLetter,
            id_pointer: None,
            id_scope: IdScope::Subject,
            on_missing_id: OnMissingId::Place,
            retention: Retention::Auto,
        },
        database: Database::Sqlite("order-processor.db".into()),
        handler: HandlerSettings::default(),
        audit: AuditSettings { every: Some(secs(3600)) },
        http: Http { listen: ([127, 0, 0, 1], 9464).into() },
        shutdown: Shutdown { timeout: secs(25) },
        log: Log { level: "info".into(), format: LogFormat::Auto },
    };
    assert_eq!(config, expected);
}

/// The assignments of default.toml, the optional ones (`#key = …`) included, in order.
fn default_toml_keys() -> Vec<String> {
    let (mut section, mut keys) = (String::new(), Vec::new());
    for line in DEFAULT_TOML.lines() {
        let line = line.strip_prefix('#').unwrap_or(line);
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if let Some((key, _)) = line.split_once(" = ").filter(|_| !line.starts_with(' ')) {
            keys.push(format!("{section}.{key}"));
        }
    }
    keys
}

#[test]
fn default_toml_and_the_settings_have_the_same_keys_in_the_same_order() {
    let known: Vec<&str> = SETTINGS.iter().map(|setting| setting.key).collect();
    assert_eq!(default_toml_keys(), known);
    let settings = load("", &[]).unwrap().settings;
    assert_eq!(settings.iter().map(|setting| setting.key).collect::<Vec<_>>(), known);
}

/// The comment above a key, or above the keys that it stands with.
fn comment_above(key: &str) -> String {
    let (section, name) = key.rsplit_once('.').unwrap();
    let lines: Vec<&str> = DEFAULT_TOML.lines().skip_while(|line| *line != format!("[{section}]")).collect();
    let at = lines.iter().position(|line| line.starts_with(&format!("{name} = "))).unwrap();
    let start = lines[..at].iter().rposition(|line| line.is_empty() || line.starts_with('['));
    let above = &lines[start.map_or(0, |start| start + 1)..at];
    let last = above.iter().rposition(|line| line.starts_with('#')).unwrap();
    let first = above[..last].iter().rposition(|line| !line.starts_with('#')).map_or(0, |before| before + 1);
    above[first..=last].iter().map(|line| line.trim_start_matches('#')).collect()
}

/// The page `docs/reference/settings.md` is made from these comments, and another test compares the two.
#[test]
fn default_toml_names_the_bounds_that_the_parsers_enforce() {
    let mut checked = 0;
    for Known { key, bounds, .. } in &SETTINGS {
        let Some(Bounds { least, most }) = bounds else { continue };
        let comment = comment_above(key);
        let words: Vec<&str> = comment.split([' ', ',', '.', ':', ';']).collect();
        for bound in [least, most] {
            assert!(words.contains(bound), "{key}: no {bound} in {comment:?}");
        }
        let allowed = Known::of(key).allowed();
        assert!(allowed.contains(&format!("to {most}")) && !allowed.contains('{'), "{key}: {allowed}");
        // The bounds themselves are accepted, and a value outside is not. For retry.min_delay its companion must not be less.
        let also = if *key == "retry.min_delay" { "max_delay = '24h'\n" } else { "" };
        let (section, name) = key.rsplit_once('.').unwrap();
        let with = |value: &str| {
            let quoted = if value.parse::<u32>().is_ok() { value.to_owned() } else { format!("'{value}'") };
            let also = if *key == "retry.max_delay" { "min_delay = '1ms'\n" } else { also };
            load(&format!("[{section}]\n{also}{name} = {quoted}\n"), &[])
        };
        for accepted in [least, most] {
            assert!(with(accepted).is_ok(), "{key} = {accepted}: {:?}", with(accepted).err());
        }
        for outside in ["0", "0s", "11y", "2GiB", "10001"] {
            assert!(with(outside).is_err(), "{key} = {outside}");
        }
        checked += 1;
    }
    assert!(checked >= 8, "{checked}");
}

#[test]
fn each_optional_line_of_default_toml_is_accepted_once_its_hash_is_removed() {
    let ways_in = ["credentials_file", "nkey_file", "token_file", "user,password_file"];
    for (way_in, other_place) in ways_in.into_iter().zip(["domain", "api_prefix"].into_iter().cycle()) {
        let wanted = |key: &str| {
            let others = ways_in.iter().filter(|way| **way != way_in);
            key != other_place && !others.flat_map(|way| way.split(',')).any(|other| other == key)
        };
        let uncommented = |line: &str| match line.strip_prefix('#').and_then(|line| line.split_once(" = ")) {
            Some((key, value)) if !key.starts_with(' ') && wanted(key) => format!("{key} = {value}\n"),
            _ => format!("{line}\n"),
        };
        let toml: String = DEFAULT_TOML.lines().map(uncommented).collect();
        let config = load(&toml, &[]).unwrap_or_else(|problems| panic!("{problems}")).config;
        assert_ne!(config.nats.auth, Auth::None);
        let place = if other_place == "domain" { "JS.orders.API" } else { "$JS.hub.API" };
        assert_eq!(config.nats.api_prefix, place);
        assert!(config.nats.tls.cert_file.is_some() && config.inbox.id_pointer.is_some());
    }
}

#[test]
fn the_environment_wins_over_the_file_and_the_file_over_the_default() {
    let toml = "[batch]\nmax_messages = 7\n[retry]\nmax_attempts = 8";
    let loaded = load(toml, &[("ORDER_PROCESSOR__BATCH__MAX_MESSAGES", "9")]).unwrap();
    assert_eq!(loaded.config.batch.max_messages, 9);
    assert_eq!(loaded.config.retry.max_attempts, 8);
    let setting = |key: &str| loaded.settings.iter().find(|setting| setting.key == key).unwrap();
    assert_eq!(setting("batch.max_messages").value, "9");
    assert_eq!(setting("batch.max_messages").source, "environment ORDER_PROCESSOR__BATCH__MAX_MESSAGES");
    assert!(setting("retry.max_attempts").source.starts_with("file /"));
    assert!(setting("retry.max_attempts").source.ends_with("/c.toml"));
    assert_eq!(setting("shutdown.timeout").source, "default");
    assert_eq!((setting("nats.user").value.as_str(), setting("nats.user").source.as_str()), ("", "default"));
}

#[test]
fn every_key_can_be_set_from_the_environment() {
    let config = config(&[
        ("ORDER_PROCESSOR__NATS__URL", "tls://a:1, nats://[::1]:2"),
        ("ORDER_PROCESSOR__NATS__USER", "0123"),
        ("ORDER_PROCESSOR__NATS__PASSWORD_FILE", "/run/p"),
        ("ORDER_PROCESSOR__NATS__TLS__CA_FILE", "ca.pem"),
        ("ORDER_PROCESSOR__INBOX__ON_CONFLICT", "duplicate"),
        ("ORDER_PROCESSOR__INBOX__ID_POINTER", "/a~1b/~0/0"),
        ("ORDER_PROCESSOR__INBOX__RETENTION", "30d"),
        ("ORDER_PROCESSOR__BATCH__MAX_BYTES", "512KiB"),
        ("ORDER_PROCESSOR__DATABASE__URL", "sqlite:///var/lib/o.db"),
        ("ORDER_PROCESSOR__HTTP__LISTEN", "[::]:0"),
        ("ORDER_PROCESSOR__LOG__LEVEL", "info, async_nats=warn"),
        ("ORDER_PROCESSOR__LOG__FORMAT", "json"),
    ]);
    assert_eq!(config.nats.url, "tls://a:1,nats://[::1]:2");
    assert_eq!(config.nats.auth, Auth::UserPassword { user: "0123".into(), password_file: "/run/p".into() });
    assert_eq!(config.nats.tls.ca_file, Some("ca.pem".into()));
    assert_eq!(config.inbox.on_conflict, OnConflict::Duplicate);
    assert_eq!(config.inbox.id_pointer.as_deref(), Some("/a~1b/~0/0"));
    assert_eq!(config.inbox.retention, Retention::For(secs(30 * 86_400)));
    assert_eq!(config.batch.max_bytes, 512 << 10);
    assert_eq!(config.database, Database::Sqlite("/var/lib/o.db".into()));
    assert_eq!(config.http.listen.to_string(), "[::]:0");
    assert_eq!(config.log, Log { level: "info,async_nats=warn".into(), format: LogFormat::Json });
}

#[test]
fn unknown_key_is_refused_with_its_source_and_the_nearest_known_key() {
    let line = problem("[nats]\nulr = 'nats://u:hunter2@h'", &[]);
    assert_holds(&line, &["nats.ulr (file /", "c.toml)", "unknown key", "did you mean nats.url?"]);
    let line = problem("", &[("ORDER_PROCESSOR__NATS__PASSWORD", "hunter2")]);
    assert_holds(&line, &["nats.password (environment ORDER_PROCESSOR__NATS__PASSWORD)"]);
    assert_holds(&line, &["did you mean nats.password_file (ORDER_PROCESSOR__NATS__PASSWORD_FILE)?"]);
    assert!(!line.contains("hunter2"), "{line}");
}

#[test]
fn unknown_section_is_refused_in_both_sources() {
    assert_holds(&problem("[natz]\na = 1\nb = 2", &[]), &["natz (file", "unknown section", "did you mean nats?"]);
    assert_holds(&problem("[Retry]\nmax_attempts = 1", &[]), &["Retry (file", "did you mean retry?"]);
    assert_holds(
        &problem("[zzzzzzzz]", &[]),
        &["unknown section; the sections are nats, nats.tls, consumer,", "A handler is Rust code"],
    );
    let line = problem("", &[("ORDER_PROCESSOR__BATHC__MAX_BYTES", "1MiB")]);
    assert_holds(&line, &["bathc.max_bytes", "did you mean batch.max_bytes"]);
    assert_holds(&problem("", &[("ORDER_PROCESSOR__", "x")]), &["(environment ORDER_PROCESSOR__)", "unknown key"]);
}

#[test]
fn a_quoted_dotted_key_is_not_the_key_it_looks_like() {
    assert_holds(&problem("'nats.url' = 'nats://h'", &[]), &["\"nats.url\" (file", "unknown key"]);
}

#[test]
fn a_value_for_a_section_and_a_table_for_a_value_are_refused() {
    let line = problem("nats = 'nats://u:hunter2@h'", &[]);
    assert_holds(&line, &["nats (file", "is a section, not a value", "nats.url"]);
    assert!(!line.contains("hunter2"), "{line}");
    assert_holds(&problem("", &[("ORDER_PROCESSOR__NATS__TLS", "on")]), &["nats.tls (environment", "is a section"]);
    assert_holds(&problem("[[nats]]", &[]), &["nats (file", "is a section"]);
    assert_holds(&problem("[http.listen]\nport = 1", &[]), &["http.listen (file", "is a table"]);
    let both = problems("nats = 5\n[retry]\nmax_attempts = 0", &[]);
    assert_eq!(both.len(), 2, "{both:#?}");
}

#[test]
fn all_problems_come_at_once_each_with_its_source() {
    let toml = "[nats]\nurl = 5\nulr = 1\n[retry]\nmin_delay = 30\n[consumer]\nstream = 'a b'";
    let env = [("ORDER_PROCESSOR__BATCH__MAX_MESSAGES", "0"), ("ORDER_PROCESSOR__LOG__FORMAT", "xml")];
    let lines = problems(toml, &env);
    assert_eq!(lines.len(), 6, "{lines:#?}");
    assert_holds(&lines[0], &["nats.ulr (file"]);
    assert_holds(&lines[1], &["nats.url (file", "5 is not text; put it in quotes"]);
    assert_holds(&lines[2], &["consumer.stream (file", "\"a b\""]);
    assert_holds(&lines[3], &["batch.max_messages (environment", "\"0\" is out of range", "1 to 10000"]);
    assert_holds(&lines[4], &["retry.min_delay (file", "30 has no unit"]);
    assert_holds(&lines[5], &["log.format (environment", "\"xml\"", "\"auto\", \"text\" or \"json\""]);
    assert_eq!(load(toml, &env).unwrap_err().to_string().lines().count(), 6);
}

#[test]
fn every_bound_is_where_its_message_says() {
    let bounds = [
        ("batch.max_messages", ["0", "1", "10000", "10001"]),
        ("batch.max_bytes", ["65535", "64KiB", "1GiB", "1073741825"]),
        ("retry.max_attempts", ["0", "1", "1000", "1001"]),
        ("retry.min_delay", ["999us", "1ms", "5m", "5m 1ms"]),
        ("retry.max_delay", ["999ms", "1s", "24h", "24h 1ms"]),
        ("inbox.retention", ["59m", "1h", "10y", "10y 1s"]),
        ("audit.every", ["999ms", "1s", "7d", "7d 1s"]),
        ("shutdown.timeout", ["999ms", "1s", "1h", "61m"]),
    ];
    for (key, [below, lowest, highest, above]) in bounds {
        config(&[(&variable(key), lowest)]);
        config(&[(&variable(key), highest)]);
        assert!(load("", &[(&variable(key), below)]).is_err(), "{key} = {below}");
        assert!(load("", &[(&variable(key), above)]).is_err(), "{key} = {above}");
    }
}

#[test]
fn min_delay_above_max_delay_is_refused_with_both_sources() {
    let line = problem("[retry]\nmin_delay = '10m'", &[("ORDER_PROCESSOR__RETRY__MAX_DELAY", "1m")]);
    assert_holds(&line, &["retry.max_delay (environment", "\"1m\" is less than retry.min_delay (file /"]);
}

#[test]
fn a_number_that_is_not_whole_is_refused_and_never_rounded() {
    assert_holds(&problem("[retry]\nmax_attempts = 2.6", &[]), &["2.6 is not a whole number"]);
    assert_holds(&problem("[batch]\nmax_bytes = 1e6", &[]), &["is not a whole number"]);
    assert_refused("retry.max_attempts", "2.6", "is not a whole number");
    assert_refused("retry.max_attempts", "1e2", "is not a whole number");
    assert_refused("retry.max_attempts", "99999999999999999999", "is out of range");
    assert_refused("batch.max_bytes", "1.5MiB", "does not begin with a whole number");
}

#[test]
fn a_value_of_the_wrong_type_is_refused_with_what_to_write_instead() {
    assert_holds(&problem("[retry]\nmax_attempts = '5'", &[]), &["\"5\" is text", "write it without quotes"]);
    assert_holds(&problem("[retry]\nmax_attempts = true", &[]), &["true is not a number"]);
    assert_holds(&problem("[consumer]\nname = 5", &[]), &["5 is not text; put it in quotes"]);
    assert_holds(&problem("[nats]\nurl = ['nats://a']", &[]), &["a list where one text is wanted", "commas"]);
}

#[test]
fn empty_and_padded_values_are_refused() {
    for setting in &SETTINGS {
        assert_refused(setting.key, "", "is empty; unset the variable");
    }
    assert_holds(&problem("[consumer]\nname = ''", &[]), &["is empty; remove the key"]);
    assert_refused("shutdown.timeout", "25s\n", "\"25s\\n\" begins or ends with white space");
    assert_refused("nats.user", "a\u{1b}[2Jb", "control character");
}

#[test]
fn durations_and_sizes_need_a_known_unit() {
    assert_refused("shutdown.timeout", "25", "has no unit; write for example \"25s\"");
    assert_refused("shutdown.timeout", "25parsec", "is not a duration: unknown time unit \"parsec\"");
    assert_refused("batch.max_bytes", "8M", "unknown unit; known are KiB");
    assert_refused("batch.max_bytes", "MiB", "does not begin with a whole number");
    assert_refused("batch.max_bytes", "99999999999GiB", "is out of range");
    assert_refused("inbox.retention", "never", "is not a duration");
    assert_refused("audit.every", "never", "is not a duration");
    assert_eq!(config(&[("ORDER_PROCESSOR__AUDIT__EVERY", "off")]).audit.every, None);
    for (size, bytes) in
        [("64KB", None), ("100KB", Some(100_000)), ("2 MiB", Some(2 << 20)), ("1GB", Some(1_000_000_000))]
    {
        let loaded = load("", &[("ORDER_PROCESSOR__BATCH__MAX_BYTES", size)]);
        assert_eq!(loaded.ok().map(|loaded| loaded.config.batch.max_bytes), bytes, "{size}");
    }
    assert_eq!(load("[batch]\nmax_bytes = 65536", &[]).unwrap().config.batch.max_bytes, 65_536);
}

#[test]
fn servers_that_the_client_could_not_use_are_refused() {
    for (url, what) in [
        ("127.0.0.1:4222", "does not begin with nats:// or tls:// (server 1 of 1)"),
        ("nats://a,http://b", "does not begin with nats:// or tls:// (server 2 of 2)"),
        ("nats://a,,nats://b", "nothing between two commas (server 2 of 3)"),
        ("nats://", "host"),
        ("nats://a:0", "port 0"),
        ("nats://a:x", "cannot be one"),
        ("nats://a/b", "has a path"),
        ("nats://a b", "white space"),
        ("nats://@a", "no user before it"),
        (
            "nats://x:y@a,nats://b,nats://z:y@c",
            "has another user than a server before it; all take the same login (server 3 of 3)",
        ),
        ("nats://x:y@a,nats://x:z@b", "has another user"),
        ("nats://x:y@a,nats://x@b", "has another user"),
    ] {
        assert_refused("nats.url", url, what);
    }
    for url in ["nats://x:y@a,nats://x:y@b", "nats://a,tls://x:y@b"] {
        load("", &[("ORDER_PROCESSOR__NATS__URL", url)]).unwrap();
    }
}

#[test]
fn names_pointers_databases_and_addresses_are_checked() {
    for name in ["a.b", "a b", "*", "a>", "a/b", "a\\b", &"x".repeat(256)] {
        assert_refused("consumer.stream", name, "");
        assert_refused("consumer.name", name, "");
    }
    assert_refused("inbox.id_pointer", "id", "does not begin with /");
    assert_refused("inbox.id_pointer", "/a~2", "holds a ~");
    assert_refused("inbox.id_pointer", "/a~", "holds a ~");
    assert_refused("inbox.id_scope", "tenant", "is not one of these");
    assert_refused("inbox.id_scope", "header:", "names no header");
    assert_refused("inbox.id_scope", "header:X Tenant", "a character that the name of a header cannot have");
    assert_refused("inbox.id_scope", "header:nats-msg-id", "names a header of the server");
    assert_refused("inbox.on_missing_id", "drop", "is neither");
    assert_refused("database.url", "postgres://db/orders", "not supported yet");
    assert_refused("database.url", "orders.db", "\"orders.db\" does not begin with sqlite://");
    assert_refused("database.url", "sqlite://a.db?mode=rwc", "options");
    assert_refused("database.url", "sqlite://:memory:", "forget");
    assert_refused("database.url", "sqlite://", "names no file");
    assert_refused("http.listen", "localhost:9464", "is not an IP address and port");
    assert_refused("http.listen", "127.0.0.1", "is not an IP address and port");
    assert_refused("inbox.on_conflict", "drop", "\"drop\" is neither");
}

#[test]
fn a_misspelt_log_level_is_refused_and_not_taken_for_a_target() {
    assert_refused("log.level", "inof", "\"inof\", which is neither a level");
    assert_refused("log.level", "info,async_nats=wran", "\"async_nats=wran\", which is neither a level");
    assert_refused("log.level", "info,", "\"\", which is neither a level");
    assert_eq!(config(&[("ORDER_PROCESSOR__LOG__LEVEL", "off, a::b=trace")]).log.level, "off,a::b=trace");
}

#[test]
fn at_most_one_way_to_log_in() {
    let line = problem("[nats]\nnkey_file = 'n'", &[("ORDER_PROCESSOR__NATS__TOKEN_FILE", "t")]);
    assert_holds(&line, &["nats.nkey_file (file /", "nats.token_file (environment ORDER", "more than one way"]);
    let line = problem("[nats]\nurl = 'nats://u:hunter2@h'\ntoken_file = 't'", &[]);
    assert_holds(&line, &["nats.url (file", "nats.token_file (file", "more than one way"]);
    assert!(!line.contains("hunter2"), "{line}");
    let line = problem("[nats]\nuser = 'u'\npassword_file = 'p'\ntoken_file = 't'", &[]);
    assert_holds(&line, &["nats.user", "nats.password_file", "nats.token_file", "more than one way"]);
}

#[test]
fn what_belongs_together_is_refused_alone() {
    assert_holds(&problem("[nats]\nuser = 'u'", &[]), &["nats.user (file", "without nats.password_file"]);
    assert_refused("nats.password_file", "p", "without nats.user");
    assert_refused("nats.tls.cert_file", "c", "without nats.tls.key_file");
    assert_refused("nats.tls.key_file", "k", "without nats.tls.cert_file");
}

#[test]
fn kubernetes_service_links_do_not_matter() {
    let expected = config(&[]);
    let links = [
        ("ORDER_PROCESSOR_PORT", "tcp://10.0.0.1:80"),
        ("ORDER_PROCESSOR_SERVICE_HOST", "10.0.0.1"),
        ("ORDER_PROCESSOR_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
        ("ORDER_PROCESSOR_LOG_SERVICE_HOST", "10.0.0.1"),
        ("ORDER_PROCESSOR_IMAGE__TAG", "1"),
    ];
    assert_eq!(config(&links), expected);
}

#[test]
fn a_variable_with_one_underscore_too_few_is_refused_rather_than_ignored() {
    let line = problem("", &[("ORDER_PROCESSOR_BATCH__MAX_MESSAGES", "3")]);
    assert_holds(&line, &["environment ORDER_PROCESSOR_BATCH__MAX_MESSAGES: unknown key"]);
    let single = problem("", &[("ORDER_PROCESSOR_NATS_URL", "nats://a")]);
    assert_holds(&single, &["environment ORDER_PROCESSOR_NATS_URL: unknown key", "ORDER_PROCESSOR__NATS__URL?"]);
    assert_holds(&line, &["did you mean ORDER_PROCESSOR__BATCH__MAX_MESSAGES?"]);
    let line = problem("", &[("order_processor_nats__tls__ca_fil", "hunter2")]);
    assert_holds(&line, &["did you mean ORDER_PROCESSOR__NATS__TLS__CA_FILE?"]);
    assert!(!line.contains("hunter2"), "{line}");
}

#[test]
fn a_variable_in_small_letters_is_refused_rather_than_ignored() {
    assert_holds(&problem("", &[("order_processor__nats__url", "nats://h")]), &["capital letters"]);
    assert_holds(&problem("", &[("ORDER_PROCESSOR__NATS.URL", "nats://h")]), &["capital letters"]);
}

#[test]
fn non_unicode_variables_matter_only_under_our_prefix() {
    let bytes = |text: &[u8]| OsString::from_vec(text.to_vec());
    let load = |name: &[u8], value: &[u8]| load_from(None, Path::new("/nonexistent"), [(bytes(name), bytes(value))]);
    assert!(load(b"OTHER\xff", b"\xff").is_ok());
    let line = load(b"ORDER_PROCESSOR__NATS__USER", b"hunter2\xff").unwrap_err().to_string();
    assert_eq!(line, "environment ORDER_PROCESSOR__NATS__USER: (value not shown) is not Unicode text");
    let line = load(b"ORDER_PROCESSOR__NATS__US\xffER", b"x").unwrap_err().to_string();
    assert_holds(&line, &["environment ORDER_PROCESSOR__NATS__US", "capital letters"]);
}

#[test]
fn a_file_that_is_not_toml_is_one_problem_with_its_line_and_without_its_text() {
    let line = problem("[nats]\nurl = nats://u:hunter2@h\n", &[]);
    assert_holds(&line, &["c.toml: is not TOML", "line 2"]);
    assert!(!line.contains("hunter2"), "{line}");
    let line = problem("[nats]\n\n[nats]\n", &[]);
    assert_holds(&line, &["is not TOML", "line 3"]);
    assert_holds(&problem("[retry]\nmax_attempts = 99999999999999999999", &[]), &["is not TOML", "too large"]);
}

#[test]
fn a_file_that_cannot_be_read_is_one_problem() {
    let missing = Path::new("/nonexistent/c.toml");
    let line = load_from(Some(missing), missing, []).unwrap_err().to_string();
    assert_holds(&line, &["file /nonexistent/c.toml: cannot be read: No such file"]);
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(load_from(None, directory.path(), []).unwrap_err().lines().len(), 1);
}

#[test]
fn the_system_file_is_read_if_it_exists_and_no_other_is_named() {
    let system_file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(system_file.path(), "[retry]\nmax_attempts = 6").unwrap();
    assert_eq!(load_from(None, system_file.path(), []).unwrap().config.retry.max_attempts, 6);
    let named = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(load_from(Some(named.path()), system_file.path(), []).unwrap().config.retry.max_attempts, 5);
}

#[test]
fn passwords_in_urls_are_never_printed() {
    for url in
        ["nats://u:hunter2@a:1,tls://u:hunter2@b", "nats://u:x@hunter2@a, nats://u:x@hunter2@c", "nats://hunter2@a"]
    {
        let loaded = load("", &[("ORDER_PROCESSOR__NATS__URL", url)]).unwrap();
        assert!(loaded.config.nats.url.contains("hunter2"));
        for printed in [format!("{loaded:?}"), format!("{loaded:#?}"), loaded.config.nats.redacted_url()] {
            assert!(!printed.contains("hunter2") && printed.contains("***@a"), "{printed}");
        }
    }
    let not_one_login = ["nats://u:hunter2@a:1,tls://hunter2@b", "nats://u:x@hunter2@a, nats://:hunter2@c"];
    let malformed =
        ["nats://u:hunter2", "hunter2", "nats://u:hun,ter2@a", "nats://u:1/hunter2@a", "nats://u:x@a:hunter2"];
    for url in not_one_login.into_iter().chain(malformed) {
        let printed = format!("{0} {0:?}", load("", &[("ORDER_PROCESSOR__NATS__URL", url)]).unwrap_err());
        assert!(!printed.contains("hunter2") && !printed.contains("ter2"), "{printed}");
    }
    for url in ["postgres://u:hunter2@h/d", "sqlite://a?key=hunter2", "hunter2@h"] {
        let printed = problem("", &[("ORDER_PROCESSOR__DATABASE__URL", url)]);
        assert!(!printed.contains("hunter2"), "{printed}");
    }
}

/// What somebody could write for any key: right for one of them, nearly right, or anything.
fn values() -> impl Strategy<Value = String> {
    prop_oneof![
        "[0-9]{1,11}",
        "[0-9]{1,6} ?(ns|us|ms|s|m|h|d|w|y|B|KB|KiB|MB|MiB|GB|GiB|parsec)( [0-9]{1,3}(ms|s))?",
        "(nats|tls|http)://([a-z@%:]{0,5})([a-z]{1,3}|\\[::1\\])(:[0-9]{1,6})?(, ?nats://[a-z]{0,2})?",
        "(sqlite|postgres):///?[a-z.~?:%/ ]{0,6}",
        "/[a-z~01/]{0,5}",
        "(127.0.0.1|\\[::\\]|localhost):[0-9]{1,6}",
        select(vec![
            "auto",
            "text",
            "json",
            "dead-letter",
            "duplicate",
            "off",
            "info,a=debug",
            "warn, b::c=trace",
            "inof"
        ])
        .prop_map(str::to_owned),
        "[A-Za-z_-]{1,9}",
        ".{0,12}",
    ]
}

fn keys() -> impl Strategy<Value = &'static str> {
    select(SETTINGS.map(|setting| setting.key).to_vec())
}

/// A number in TOML without quotes, as the keys for numbers want it; text as a TOML string.
fn as_toml(value: &str) -> String {
    let is_number = !value.is_empty() && value.len() < 18 && value.bytes().all(|byte| byte.is_ascii_digit());
    match value.parse::<u64>() {
        Ok(number) if is_number => number.to_string(),
        _ => toml_text(value),
    }
}

fn toml_text(value: &str) -> String {
    let escaped: String = value.chars().map(|c| format!("\\U{:08X}", u32::from(c))).collect();
    format!("\"{escaped}\"")
}

proptest! {
    // Each case reads all the settings once or twice: some milliseconds.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_value_is_accepted_and_printed_as_it_was_meant_or_refused_by_its_key(
        given in proptest::collection::btree_map(keys(), values(), 1..4),
        in_file in any::<bool>(),
    ) {
        let env: Vec<_> = given.iter().map(|(key, value)| (variable(key), value.clone())).collect();
        let env: Vec<_> = env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let toml: String = given.iter().map(|(key, value)| format!("{key} = {}\n", as_toml(value))).collect();
        let loaded = if in_file { load(&toml, &[]) } else { load("", &env) };
        match loaded {
            Ok(loaded) => {
                let is_url = |key| key == "nats.url";
                let printed = loaded.settings.iter().filter(|setting| !setting.value.is_empty() && !is_url(setting.key));
                let mut again: Vec<_> = printed.map(|setting| (variable(setting.key), setting.value.clone())).collect();
                // Printed without its password.
                again.push((variable("nats.url"), loaded.config.nats.url.clone()));
                let again: Vec<_> = again.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
                prop_assert_eq!(load("", &again).map(|again| again.config).map_err(|problems| problems.to_string()), Ok(loaded.config));
            }
            Err(problems) => {
                let is_quoted = |line: &str| line.starts_with("environment ") && line.contains("stands in quotation marks");
                for line in problems.lines().iter().filter(|line| !is_quoted(line)) {
                    let source = if in_file { " (file /" } else { " (environment ORDER_PROCESSOR__" };
                    // Of two settings that contradict each other, either may come first.
                    prop_assert!(given.keys().any(|key| line.contains(&format!("{key}{source}"))), "{line}");
                    prop_assert!(line.contains("allowed: ") || line.contains("close it with `"), "{line}");
                    prop_assert!(!line.contains(char::is_control), "{line:?}");
                }
            }
        }
    }

    #[test]
    fn no_file_and_no_variable_makes_the_reader_panic(
        toml in "(\\[(nats|nats.tls|log|x)\\]\n|(url|level|tls|max_bytes|'a.b') = ('.{0,5}'|[0-9.]{1,4}|\\[1\\]|\\{\\}|true)\n|.{0,5}){0,6}",
        name in "(ORDER_PROCESSOR__|order_processor__|ORDER_PROCESSOR_)[A-Z_]{0,8}",
        value in ".{0,5}",
    ) {
        if let Err(problems) = load(&toml, &[(&name, &value)]) {
            prop_assert!(!problems.lines().is_empty());
            for line in problems.lines() {
                prop_assert!(line.contains("file /") || line.contains(&format!("environment {name}")), "{line}");
                prop_assert!(!line.contains(char::is_control), "{line:?}");
            }
        }
    }

    #[test]
    fn a_password_in_a_url_is_never_printed(
        user in "[a-z]{0,3}",
        before in "(|x@|[a-z:@%,/?#. ]{0,3})",
        after in "[a-z:@%,/?#. ]{0,3}",
        rest in "(@h|@h:1|@h:99999|@|h|@h/x|)",
    ) {
        // Behind the last @ it would be the host.
        prop_assume!(!before.contains('@') || after.contains('@') || rest.contains('@'));
        let url = format!("nats://{user}:{before}hunter2{after}{rest}");
        let printed = match load("", &[("ORDER_PROCESSOR__NATS__URL", &url)]) {
            Ok(loaded) => format!("{loaded:?}"),
            Err(problems) => problems.to_string(),
        };
        prop_assert!(!printed.contains("hunter2"), "{printed}");
    }

    #[test]
    fn every_duration_and_size_in_range_is_taken_for_what_it_is(
        millis in 1000..=3_600_000_u64,
        (number, unit, factor) in (0..=u64::MAX, select(UNITS)).prop_map(|(number, (unit, factor))| (number / factor, unit, factor)),
    ) {
        let timeout = Duration::from_millis(millis);
        let written = humantime::format_duration(timeout).to_string();
        prop_assert_eq!(config(&[("ORDER_PROCESSOR__SHUTDOWN__TIMEOUT", &written)]).shutdown.timeout, timeout);
        prop_assert_eq!(format!("{number}{unit}").parse(), Ok(ByteSize(number * factor)));
        let too_many = u128::from(u64::MAX) / u128::from(factor) + 1 + u128::from(number);
        let too_large = format!("{too_many}{unit}").parse::<ByteSize>();
        prop_assert!(too_large.is_err());
    }

    #[test]
    fn no_text_makes_the_reader_of_sizes_panic(text in "([0-9]{0,22})(.{0,4})") {
        if let Ok(ByteSize(bytes)) = text.parse() {
            prop_assert!(text.starts_with(|c: char| c.is_ascii_digit()));
            prop_assert_eq!(bytes.to_string().parse(), Ok(ByteSize(bytes)));
        }
    }
}

const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("B", 1),
    ("KB", 1000),
    (" KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    (" GiB", 1 << 30),
];
