//! What is refused at the start: all problems at once, with the place and the nearest right name.

use crate::sql::{SALES, Shop, TABLES, with_files};
use crate::support::DaemonSpec;

/// The problems of a file, without its path.
async fn problems(file: &str, tables: &str) -> Vec<String> {
    let spec = with_files(DaemonSpec::new("nats://127.0.0.1:1"), file, tables);
    let refused = spec.run(&["run", "--until-idle"]).await;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(!spec.database().exists());
    let path = format!("{}: ", spec.folder().join("handler.toml").display());
    let lines = refused.stderr.lines();
    lines.map(|line| line.trim_start_matches("order-processor: ").replace(&path, "")).collect()
}

#[tokio::test]
async fn everything_that_is_wrong_with_a_file_is_said_at_once() {
    let file = r#"
[sql]
migration = "migrations"
timeout = "soon"

[[route]]
subject = "ORDERS.*"
[route.params]
cents = { json = "cents", type = "integer" }
total = { json = "/total" }
name = { json = "/name", type = "string" }
unused = { json = "/unused", type = "text" }
id = { header = "X-Id" }
[[route.sql]]
run = "INSERT INTO sales (id, cents) VALUES (:id, :cent)"
[[route.sql]]
run = "SELECT ?1"
[[route.sql]]
run = "SELECT 1; SELECT 2"
expect = "two"
[[route.sql]]
run = "DELETE FROM sale"

[[route]]
subject = "ORDERS..x"
ignore = false

[[route]]
subject = "ORDERS.new"
sql = []
record = true

[[routes]]
subject = "ORDERS.old"
"#;
    assert_eq!(
        problems(file, TABLES).await,
        [
            "unknown key \"routes\", did you mean \"route\"?; known are: sql, route",
            "sql: unknown key \"migration\", did you mean \"migrations\"?; known are: migrations, timeout",
            "sql: timeout must be a duration such as \"10s\", from 10ms to 1h",
            "route 1: params: cents: json: \"cents\" is not a JSON pointer such as \"/order/id\"",
            "route 1: params: id: the name is the one of a built-in parameter; choose another name",
            "route 1: params: name: type \"string\" is not one of text, integer, real, bool, json, blob",
            "route 1: params: total: a value from `json` needs a type: text, integer, real, bool, json or blob",
            "route 1, statement 1: unknown parameter :cent",
            "route 1, statement 2: \"?1\" is not a parameter; write a name such as :id",
            "route 1, statement 3: expect \"two\" is not none, one, some or any",
            "route 1, statement 3: it has more than one statement; write one [[route.sql]] for each",
            "route 2: subject must be a subject such as ORDERS.new, ORDERS.* or ORDERS.>",
            "route 2: ignore can only be true; remove it, or write ignore = true",
            "route 3: it needs exactly one of [[route.sql]], [route.http], record = true, ignore = true",
            "route 1, statement 4: no such table: sale",
        ]
    );
}

#[tokio::test]
async fn what_would_end_the_transaction_or_touch_our_tables_is_refused() {
    for (run, problem) in [
        ("COMMIT", "a statement cannot begin with COMMIT"),
        ("PRAGMA synchronous = OFF", "a statement cannot begin with PRAGMA"),
        ("ATTACH 'x.db' AS x", "a statement cannot begin with ATTACH"),
        ("CREATE TABLE x (id)", "a statement cannot begin with CREATE"),
        ("INSERT OR ROLLBACK INTO sales (id, cents) VALUES (:id, 1)", "it can roll back the whole batch"),
        ("INSERT INTO harsh VALUES (:id)", "it can roll back the whole batch"),
        ("INSERT INTO raised VALUES (:id)", "it can roll back the whole batch"),
        ("DELETE FROM processed_ids", "it writes processed_ids, a table of order-processor"),
        ("UPDATE attempts SET failed = 0", "it writes attempts, a table of order-processor"),
        ("INSERT INTO watched VALUES (:id)", "it writes dead_letters, a table of order-processor"),
        ("DELETE FROM outbox", "it changes or deletes rows of outbox"),
        ("UPDATE outbox SET subject = 'x'", "it changes or deletes rows of outbox"),
        (
            "INSERT OR REPLACE INTO outbox (row, subject, payload) VALUES (1, 'x', 'y')",
            "it changes or deletes rows of outbox",
        ),
        ("UPDATE sqlite_sequence SET seq = 0", "it uses sqlite_sequence"),
        ("INSERT INTO salez (id) VALUES (:id)", "no such table: salez, did you mean \"sales\"?"),
        (
            "INSERT INTO sales (id, cent) VALUES (:id, 1)",
            "table sales has no column named cent, did you mean \"cents\"?",
        ),
        ("INSERT INTO sales (id) VALUES (:idd)", "unknown parameter :idd, did you mean \"id\"?"),
        ("INSERT INTO sales (id) VALUES (@id)", "\"@id\" is not a parameter; write a name such as :id"),
    ] {
        let tables = format!(
            "{TABLES} CREATE TABLE harsh (id TEXT UNIQUE ON CONFLICT ROLLBACK); CREATE TABLE raised (id TEXT); \
             CREATE TRIGGER raises BEFORE INSERT ON raised BEGIN SELECT RAISE(ROLLBACK, 'no'); END; \
             CREATE TABLE watched (id TEXT); \
             CREATE TRIGGER watches AFTER INSERT ON watched BEGIN DELETE FROM dead_letters; END;"
        );
        let file =
            format!("[sql]\nmigrations = \"migrations\"\n[[route]]\nsubject = \">\"\n[[route.sql]]\nrun = \"{run}\"\n");
        let problems = problems(&file, &tables).await;
        let expected = format!("route 1, statement 1: {problem}");
        assert!(problems.len() == 1 && problems[0].starts_with(&expected), "{run}: {problems:?}");
    }
}

#[tokio::test]
async fn what_a_migration_must_not_do_is_refused() {
    for (sql, problem) in [
        ("CREATE TABLE a (id); COMMIT; CREATE TABLE b (id);", "statement 2: COMMIT is not allowed"),
        ("DELETE FROM processed_ids;", "statement 1: it writes processed_ids"),
        ("ALTER TABLE dead_letters ADD COLUMN mine TEXT;", "it changes a table of order-processor"),
        ("CREATE INDEX mine ON processed_ids (stream_seq);", "it changes a table of order-processor"),
        ("CREATE TRIGGER t AFTER INSERT ON attempts BEGIN SELECT 1; END;", "it changes a table of order-processor"),
        ("CREATE TABLE a (id); CREATE TABEL b (id);", "statement 2: near \"TABEL\": syntax error"),
    ] {
        let problems = problems(SALES, sql).await;
        assert!(problems[0].contains(&format!("migration 0001_shop.sql: {problem}")), "{sql}: {problems:?}");
    }
}

#[tokio::test]
async fn a_route_that_no_order_reaches_is_refused() {
    let file = "[[route]]\nsubject = \"ORDERS.>\"\nrecord = true\n[[route]]\nsubject = \"ORDERS.*\"\nignore = true\n";
    assert_eq!(
        problems(file, "").await,
        ["route 2: no order reaches it: route 1 takes all with subject ORDERS.>; put the narrower route first"]
    );
}

#[tokio::test]
async fn check_and_handler_check_find_the_same_without_a_change() {
    let shop = Shop::open(SALES, TABLES).await;
    let spec = &shop.spec;
    let file = spec.folder().join("handler.toml");
    let file = file.to_str().unwrap();
    assert_eq!(spec.run_ok(&["handler", "check", file]).await.stdout, format!("ok    {file}: 1 route\n"));
    assert_eq!(spec.run_ok(&["handler", "check"]).await.stdout, format!("ok    {file}: 1 route\n"));
    let good = spec.run_ok(&["check"]).await.stdout;
    assert!(good.contains(&format!("ok    handler     {file}: 1 route")), "{good}");
    assert!(!spec.database().exists());

    // A table that only the database has.
    shop.work().await;
    spec.db().execute("CREATE TABLE by_hand (id TEXT)").await;
    std::fs::write(
        file,
        SALES.replace("INTO sales (id, cents) VALUES (:id, :cents)", "INTO by_hand VALUES (:id || :cents)"),
    )
    .unwrap();
    assert_eq!(spec.run(&["handler", "check"]).await.code, Some(2));
    let database = spec.database();
    spec.run_ok(&["handler", "check", "--database", database.to_str().unwrap()]).await;
    let missing = spec.run(&["handler", "check", "--database", "/nowhere/x.db"]).await;
    assert_eq!(missing.code, Some(2), "{}", missing.stderr);
    std::fs::write(file, "[[route]]\nsubject = \">\"\n").unwrap();
    let refused = spec.run(&["check"]).await;
    assert_eq!(refused.code, Some(2));
    assert!(refused.stdout.contains("FAIL  handler     "), "{}", refused.stdout);
}

#[tokio::test]
async fn the_example_of_init_passes_the_check_and_shows_what_an_order_does() {
    let spec = DaemonSpec::new("nats://127.0.0.1:1");
    let folder = spec.folder().join("shop");
    let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let folder_text = folder.to_str().unwrap();
    let written = spec.run_ok(&["handler", "init", "sql", folder_text]).await.stdout;
    assert!(
        written.contains("wrote ") && written.ends_with(&format!("handler check {}\n", at("handler.toml"))),
        "{written}"
    );
    assert_eq!(spec.run(&["handler", "init", "sql", folder_text]).await.code, Some(1), "nothing is replaced");
    spec.run_ok(&["handler", "check", &at("handler.toml")]).await;
    let (file, order) = (at("handler.toml"), at("order.json"));
    let tried = ["handler", "try", &file, "--subject", "ORDERS.new", "--payload", &order, "--id", "o-1"];
    assert_eq!(
        spec.run_ok(&tried).await.stdout,
        "id          o-1\nroute       route 1 (ORDERS.*)\nparameter   :cents integer 250\nparameter   :note NULL\n\
         parameter   :sku text apple\nparameter   :id text o-1\nstatement 1 1 row\nstatement 2 1 row\nnothing was changed\n"
    );
    std::fs::write(&order, "Order Data 1").unwrap();
    let refused = spec.run(&tried).await;
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.stdout.contains("dead letter undecodable: route 1: the payload is not valid JSON"),
        "{}",
        refused.stdout
    );
    assert!(!spec.database().exists());

    let http = spec.folder().join("calls");
    spec.run_ok(&["handler", "init", "http", http.to_str().unwrap()]).await;
    let (file, order) = (http.join("handler.toml"), http.join("order.json"));
    let shown = spec
        .run_ok(&[
            "handler",
            "try",
            file.to_str().unwrap(),
            "--subject",
            "ORDERS.new",
            "--payload",
            order.to_str().unwrap(),
        ])
        .await;
    assert!(shown.stdout.contains("request     POST http://127.0.0.1:8080/orders\n"), "{}", shown.stdout);
    assert!(shown.stdout.contains("call        not made; --call makes it\n"), "{}", shown.stdout);
}

#[tokio::test]
async fn check_warns_of_subjects_of_the_consumer_that_no_route_takes() {
    let shop = Shop::open(&SALES.replace("ORDERS.*", "ORDERS.new"), TABLES).await;
    let found = shop.spec.run_ok(&["check"]).await.stdout;
    assert!(found.contains("has no route that takes every order with subject ORDERS.*"), "{found}");
    let file = format!("{SALES}[[route]]\nsubject = \"ORDERS.>\"\nrecord = true\n");
    std::fs::write(shop.spec.folder().join("handler.toml"), file).unwrap();
    let found = shop.spec.run_ok(&["check"]).await.stdout;
    assert!(!found.contains("has no route"), "{found}");
}
