//! What the daemon costs over consuming and acknowledging with no database at all, in one run on one machine.
//!
//! A ratio counts, not an absolute time: machines differ and are shared. See `benches/README.md` for what each step brought.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed step ends the benchmark")]

#[path = "bench/calls.rs"]
mod calls;
#[path = "../tests/it/support/mod.rs"]
mod support;

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{self, PullConsumer};
use async_nats::jetstream::stream;
use futures_util::StreamExt;
use order_processor::config::Database;
use order_processor::store::Reader;
use sqlx::Connection;
use support::nats::{CONSUMER, STREAM, consumer_config, stream_config};
use support::{Broker, Daemon, DaemonSpec, NatsServer, eventually};

/// Longer than any phase takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(600);
const ORDER_BYTES: usize = 200;
const LATENCY_RATE: u64 = 1000;
/// Longer than `inbox.retention = "auto"` keeps an id.
const OLD_NS: i64 = 8 * 24 * 3600 * 1_000_000_000;

struct Plan {
    orders: u64,
    rounds: usize,
    latency_seconds: u64,
    /// Orders that wait when memory is measured.
    pending: u64,
    /// Ids that an old database holds, and how many of them are due to be pruned.
    ids: i64,
    prunable: i64,
}

/// What the ids of the orders are like.
#[derive(Clone, Copy)]
enum Ids {
    /// `order-000000000001` and so on: new rows of an index land beside each other.
    Rising,
    /// 128 random bits as hexadecimal text: new rows land anywhere.
    Random,
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let smoke = arguments.iter().any(|argument| argument == "--smoke");
    let phases: Vec<&str> =
        arguments.iter().map(String::as_str).filter(|argument| !argument.starts_with('-')).collect();
    let chosen = |phase| phases.is_empty() || phases.contains(&phase);
    let plan = match smoke {
        true => Plan { orders: 5_000, rounds: 1, latency_seconds: 1, pending: 5_000, ids: 20_000, prunable: 5_000 },
        false => Plan {
            orders: 200_000,
            rounds: 3,
            latency_seconds: 10,
            pending: 1_000_000,
            ids: 10_000_000,
            prunable: 1_000_000,
        },
    };
    let mut report = Report::default();
    if chosen("rates") {
        rates(&plan, &mut report).await;
    }
    if chosen("handlers") {
        handlers(&plan, &mut report).await;
    }
    if chosen("memory") {
        memory(&plan, &mut report).await;
    }
    if chosen("latency") {
        latency(&plan, &mut report).await;
    }
    if chosen("ids") {
        many_ids(&plan, &mut report).await;
    }
    if chosen("calls") {
        calls::calls(&plan, &mut report).await;
    }
    report.print(&plan);
}

/// The ceiling, new orders and duplicates.
async fn rates(plan: &Plan, report: &mut Report) {
    let (mut ceilings, mut fresh, mut again) = (Vec::new(), Vec::new(), Vec::new());
    let wide = wide();
    for round in 1..=plan.rounds {
        eprintln!("round {round} of {}", plan.rounds);
        let (server, broker) = server_for_millions().await;
        publish(&broker, 1..=plan.orders, Ids::Rising).await;
        ceilings.push(rate(plan.orders, without_database(&broker, &wide, plan.orders).await));

        let spec = DaemonSpec::new(server.url());
        fresh.push(rate(plan.orders, with_database(&broker, &spec, plan.orders).await.0));
        spec.db().applied_once(i64::try_from(plan.orders).unwrap()).await;

        // The same messages once more: what a server does that lost its acknowledgements in a crash.
        broker.jetstream.delete_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
        broker.jetstream.create_consumer_on_stream(wide.clone(), STREAM).await.unwrap();
        again.push(rate(plan.orders, with_database(&broker, &spec, plan.orders).await.0));
        spec.db().applied_once(i64::try_from(plan.orders).unwrap()).await;
    }
    let ceiling = median(&mut ceilings);
    report.rate("no database: consume and acknowledge", ceiling, ceiling);
    report.rate("the daemon, new orders", median(&mut fresh), ceiling);
    report.rate("the daemon, every order a duplicate", median(&mut again), ceiling);
}

/// What the statements of a handler file cost over the built-in handler, in the same rounds.
async fn handlers(plan: &Plan, report: &mut Report) {
    const ONE: &str = "INSERT INTO sales VALUES (:id, :sku, :quantity, :stream_seq)";
    const MORE: [&str; 2] = [
        "INSERT INTO sold VALUES (:sku, :quantity) ON CONFLICT (sku) DO UPDATE SET quantity = quantity + excluded.quantity",
        "INSERT INTO log VALUES (:id, :published_at)",
    ];
    const PLAIN: &str = "seq INTEGER NOT NULL";
    const ONE_PERCENT: &str = "seq INTEGER NOT NULL CHECK (seq % 100 <> 7)";
    let cases = [
        ("built-in handler", None),
        ("one statement an order", Some((vec![ONE], PLAIN))),
        ("three statements an order", Some((vec![ONE, MORE[0], MORE[1]], PLAIN))),
        ("one statement, 1 % dead letters", Some((vec![ONE], ONE_PERCENT))),
    ];
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    for round in 1..=plan.rounds {
        eprintln!("handlers, round {round} of {}", plan.rounds);
        for ((_, case), rates) in cases.iter().zip(&mut rates) {
            let (server, broker) = server_for_millions().await;
            publish(&broker, 1..=plan.orders, Ids::Rising).await;
            let spec = DaemonSpec::new(server.url());
            let spec = match case {
                Some((statements, seq)) => with_handler_file(spec, statements, seq),
                None => spec,
            };
            rates.push(rate(plan.orders, with_database(&broker, &spec, plan.orders).await.0));
        }
    }
    let mut rates: Vec<f64> = rates.iter_mut().map(|rates| median(rates)).collect();
    let built_in = rates[0];
    for ((what, _), rate) in cases.iter().zip(rates.drain(..)) {
        report.rate(what, rate, built_in);
    }
}

fn with_handler_file(spec: DaemonSpec, statements: &[&str], seq: &str) -> DaemonSpec {
    let folder = spec.folder().join("migrations");
    std::fs::create_dir(&folder).unwrap();
    let tables = format!(
        "CREATE TABLE sales (id TEXT NOT NULL, sku TEXT NOT NULL, quantity INTEGER NOT NULL, {seq}) STRICT; \
         CREATE TABLE sold (sku TEXT PRIMARY KEY, quantity INTEGER NOT NULL) STRICT; \
         CREATE TABLE log (id TEXT NOT NULL, at INTEGER NOT NULL) STRICT;"
    );
    std::fs::write(folder.join("0001_shop.sql"), tables).unwrap();
    let mut file = "[sql]\nmigrations = \"migrations\"\n[[route]]\nsubject = \"ORDERS.*\"\n[route.params]\n\
                    sku = { json = \"/sku\", type = \"text\" }\nquantity = { json = \"/quantity\", type = \"integer\" }\n"
        .to_owned();
    for statement in statements {
        write!(file, "[[route.sql]]\nrun = \"{statement}\"\n").unwrap();
    }
    let path = spec.folder().join("handler.toml");
    std::fs::write(&path, file).unwrap();
    spec.set("handler.file", path)
}

fn wide() -> consumer::pull::Config {
    consumer::pull::Config { max_ack_pending: 10_000, ..consumer_config() }
}

/// A server of its own whose stream is large enough for every phase.
async fn server_for_millions() -> (NatsServer, Broker) {
    let server = NatsServer::start().await;
    let broker = Broker::connect(&server).await;
    let stream = stream::Config { max_bytes: 4 << 30, ..stream_config() };
    broker.create(stream, wide()).await;
    (server, broker)
}

/// Publishes with receipts.
async fn publish(broker: &Broker, numbers: std::ops::RangeInclusive<u64>, ids: Ids) {
    const IN_FLIGHT: usize = 1000;
    let numbers: Vec<u64> = numbers.collect();
    for some in numbers.chunks(IN_FLIGHT) {
        let mut receipts = Vec::with_capacity(some.len());
        for number in some {
            receipts.push(order(broker, *number, ids).await);
        }
        for receipt in receipts {
            receipt.await.unwrap();
        }
    }
}

async fn order(broker: &Broker, number: u64, ids: Ids) -> async_nats::jetstream::context::PublishAckFuture {
    let id = match ids {
        Ids::Rising => format!("order-{number:012}"),
        Ids::Random => format!("{:032x}", fastrand::u128(..)),
    };
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", id.as_str());
    let mut payload = format!("{{\"id\":\"ord-{number:012}\",\"sku\":\"MUG-BLUE\",\"quantity\":2,\"note\":\"");
    payload.extend(std::iter::repeat_n('x', ORDER_BYTES - 2 - payload.len()));
    payload.push_str("\"}");
    broker.jetstream.publish_with_headers("ORDERS.new", headers, payload.into()).await.unwrap()
}

/// The ceiling: the client's own pull stream, each message acknowledged, nothing done.
async fn without_database(broker: &Broker, config: &consumer::pull::Config, orders: u64) -> Duration {
    const NAME: &str = "ceiling";
    let config = consumer::pull::Config { durable_name: Some(NAME.to_owned()), ..config.clone() };
    let consumer: PullConsumer = broker.jetstream.create_consumer_on_stream(config, STREAM).await.unwrap();
    let began = Instant::now();
    let mut messages = consumer.stream().max_messages_per_batch(2000).messages().await.unwrap();
    for _ in 0..orders {
        messages.next().await.unwrap().unwrap().ack().await.unwrap();
    }
    drop(messages);
    acknowledged(broker, NAME, orders).await;
    let took = began.elapsed();
    broker.jetstream.delete_consumer_from_stream(NAME, STREAM).await.unwrap();
    took
}

/// The daemon's own binary, from its start, and the most memory that it had.
async fn with_database(broker: &Broker, spec: &DaemonSpec, orders: u64) -> (Duration, u64) {
    let began = Instant::now();
    let mut daemon = spec.start();
    acknowledged(broker, CONSUMER, orders).await;
    let took = began.elapsed();
    let peak = resident_peak(&daemon);
    daemon.drain().await;
    (took, peak)
}

/// An acknowledgement counts when the server has it.
async fn acknowledged(broker: &Broker, consumer: &str, orders: u64) {
    eventually("everything is acknowledged", PATIENCE, async || {
        let found = broker.jetstream.get_consumer_from_stream::<consumer::pull::Config, _, _>(consumer, STREAM).await;
        let floor = found.unwrap().cached_info().ack_floor.stream_sequence;
        if floor == orders { Ok(()) } else { Err(floor) }
    })
    .await;
}

/// The most memory that the daemon has with a long backlog before it.
async fn memory(plan: &Plan, report: &mut Report) {
    eprintln!("memory");
    let (server, broker) = server_for_millions().await;
    publish(&broker, 1..=plan.pending, Ids::Rising).await;
    let (took, bytes) = with_database(&broker, &DaemonSpec::new(server.url()), plan.pending).await;
    report.row(&format!("peak resident, {} orders pending", plan.pending), &mebibytes(bytes), "");
    report.row(&format!("{} orders, in a row", plan.pending), &format!("{:.0}/s", rate(plan.pending, took)), "");
}

/// From publish to durable, at a fixed rate and for orders that come alone.
async fn latency(plan: &Plan, report: &mut Report) {
    for (what, rate) in [("at 1,000 orders/s", LATENCY_RATE), ("lone orders, 20/s", 20)] {
        eprintln!("latency {what}");
        let (server, broker) = Broker::with(consumer_config()).await;
        let spec = DaemonSpec::new(server.url());
        let mut daemon = spec.start();
        daemon.ready().await;
        at_rate(plan, report, &broker, &daemon, rate, what).await;
        if rate == LATENCY_RATE {
            idle(&daemon, plan, report).await;
        }
        daemon.drain().await;
    }
}

/// Out of the daemon's own histogram.
async fn at_rate(plan: &Plan, report: &mut Report, broker: &Broker, daemon: &Daemon, rate: u64, what: &str) {
    let orders = rate * plan.latency_seconds;
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::try_from(rate).unwrap());
    let mut receipts = Vec::new();
    for number in 1..=orders {
        ticks.tick().await;
        // The client waits once 5,000 receipts are open, so each is taken as it comes.
        receipts.push(tokio::spawn(order(broker, number, Ids::Random).await.into_future()));
    }
    for receipt in receipts {
        receipt.await.unwrap().unwrap();
    }
    daemon.metric("end_to_end_seconds_count", orders as f64).await;
    let (_, text) = daemon.get("/metrics").await;
    let buckets = buckets(&text);
    for (name, quantile) in [("median", 0.5), ("p99", 0.99)] {
        report.row(&format!("published to durable, {what}, {name}"), &within(&buckets, quantile), "");
    }
}

/// What becomes of it all when the database is old: it holds many random ids, and random ids keep arriving.
async fn many_ids(plan: &Plan, report: &mut Report) {
    eprintln!("{} ids", plan.ids);
    let (server, broker) = server_for_millions().await;
    publish(&broker, 1..=plan.orders, Ids::Random).await;
    let (young, _) = with_database(&broker, &DaemonSpec::new(server.url()), plan.orders).await;
    report.row("random ids, empty database", &format!("{:.0}/s", rate(plan.orders, young)), "");

    let (server, broker) = server_for_millions().await;
    let spec = DaemonSpec::new(server.url());
    seed(&spec, plan.ids).await;
    let began = Instant::now();
    let mut daemon = spec.start();
    daemon.ready().await;
    report.row(
        &format!("from start to ready, {} ids", plan.ids),
        &format!("{:.2} s", began.elapsed().as_secs_f64()),
        "",
    );
    report.row(&format!("resident when ready, {} ids", plan.ids), &mebibytes(resident_peak(&daemon)), "");
    let newest = spec.db().texts("SELECT id FROM processed_ids ORDER BY row DESC LIMIT 1").await.remove(0);
    let oldest = spec.db().texts("SELECT id FROM processed_ids ORDER BY row LIMIT 1").await.remove(0);
    for (what, id) in [("the newest", &*newest), ("the oldest", &oldest), ("one that is not there", "no such id")] {
        let took_ms = find_ms(&spec, id).await;
        report.row(&format!("find {what} of {} ids", plan.ids), &format!("{took_ms:.1} ms"), "");
    }
    daemon.drain().await;
    publish(&broker, 1..=plan.orders, Ids::Random).await;
    let (old, bytes) = with_database(&broker, &spec, plan.orders).await;
    let of_its_own = format!("{:.2} of its own", young.as_secs_f64() / old.as_secs_f64());
    report.row(
        &format!("random ids, {} there before", plan.ids),
        &format!("{:.0}/s", rate(plan.orders, old)),
        &of_its_own,
    );
    report.row(&format!("peak resident, {} ids", plan.ids), &mebibytes(bytes), "");

    let mut connection = spec.db().open_to_write().await;
    let age = "UPDATE processed_ids SET processed_at = processed_at - ? WHERE rowid <= ?";
    sqlx::query(age).bind(OLD_NS).bind(plan.prunable).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let mut daemon = spec.start();
    daemon.ready().await;
    at_rate(plan, report, &broker, &daemon, LATENCY_RATE, "at 1,000 orders/s while old ids are pruned").await;
    let pruned = daemon.metrics().await.get("ids_pruned_total").unwrap();
    report.row("ids pruned meanwhile", &format!("{pruned}"), "");
    daemon.drain().await;
}

/// How long the database takes for the command `find`, the opening included: the median of a few.
async fn find_ms(spec: &DaemonSpec, id: &str) -> f64 {
    let mut took = Vec::new();
    for _ in 0..5 {
        let began = Instant::now();
        Reader::open(&Database::Sqlite(spec.database())).await.unwrap().find(id).await.unwrap();
        took.push(began.elapsed().as_secs_f64() * 1e3);
    }
    median(&mut took)
}

/// Puts random ids of processed messages into the database of a daemon that is not running.
async fn seed(spec: &DaemonSpec, ids: i64) {
    const STEP: i64 = 1_000_000;
    let mut daemon = spec.start();
    daemon.ready().await;
    daemon.drain().await;
    let mut connection = spec.db().open_to_write().await;
    let now_ns = i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos()).unwrap();
    let insert = "WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < ?) \
         INSERT INTO processed_ids (id, stream_seq, digest, processed_at) \
         SELECT lower(hex(randomblob(16))), 0, randomblob(16), ? FROM number";
    for first in (0..ids).step_by(usize::try_from(STEP).unwrap()) {
        sqlx::query(insert).bind(STEP.min(ids - first)).bind(now_ns).execute(&mut connection).await.unwrap();
    }
    connection.close().await.unwrap();
    // What was put in by hand is indexed at the next start.
    let mut daemon = spec.start();
    daemon.ready().await;
    daemon.drain().await;
}

async fn idle(daemon: &Daemon, plan: &Plan, report: &mut Report) {
    let (before, began) = (cpu(daemon), Instant::now());
    tokio::time::sleep(Duration::from_secs(plan.latency_seconds)).await;
    let share = (cpu(daemon) - before).as_secs_f64() / began.elapsed().as_secs_f64() * 100.0;
    report.row("idle CPU", &format!("{share:.2} %"), "");
}

/// Upper bound in milliseconds and cumulative count of each bucket.
fn buckets(metrics: &str) -> Vec<(f64, f64)> {
    let line = |line: &str| {
        let (bound, count) =
            line.strip_prefix("order_processor_end_to_end_seconds_bucket{le=\"")?.split_once("\"} ")?;
        Some((bound.parse::<f64>().unwrap_or(f64::INFINITY) * 1000.0, count.parse().ok()?))
    };
    metrics.lines().filter_map(line).collect()
}

fn within(buckets: &[(f64, f64)], quantile: f64) -> String {
    let all = buckets.last().map_or(0.0, |(_, count)| *count);
    let bucket = buckets.iter().find(|(_, count)| *count >= all * quantile);
    bucket.map_or("?".to_owned(), |(bound, _)| format!("≤ {bound} ms"))
}

fn resident_peak(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024
}

/// User and system time, at the kernel's 100 ticks a second.
fn cpu(daemon: &Daemon) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).unwrap();
    let fields = stat.rsplit(") ").next().unwrap();
    let ticks: u64 = fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    Duration::from_millis(ticks * 10)
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.0} MiB", bytes as f64 / 1024.0 / 1024.0)
}

fn rate(orders: u64, took: Duration) -> f64 {
    orders as f64 / took.as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[derive(Default)]
struct Report {
    rows: Vec<[String; 3]>,
}

impl Report {
    fn row(&mut self, what: &str, value: &str, ratio: &str) {
        self.rows.push([what.to_owned(), value.to_owned(), ratio.to_owned()]);
    }

    fn rate(&mut self, what: &str, rate: f64, ceiling: f64) {
        self.row(what, &format!("{rate:.0}/s"), &format!("{:.2}", rate / ceiling));
    }

    /// A Markdown table, then the same as JSON on one line.
    fn print(&self, plan: &Plan) {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or("?");
        let mut table = format!(
            "\n{} orders of {ORDER_BYTES} bytes, {} rounds (median), {cores} cores beside the server, load {load}\n\n\
             | what | value | of the ceiling |\n|---|---:|---:|\n",
            plan.orders, plan.rounds
        );
        for [what, value, ratio] in &self.rows {
            writeln!(table, "| {what} | {value} | {ratio} |").unwrap();
        }
        println!("{table}");
        println!("{}", serde_json::json!({ "orders": plan.orders, "cores": cores, "load": load, "rows": self.rows }));
    }
}
