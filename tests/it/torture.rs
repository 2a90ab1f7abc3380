//! Everything at once: worker and server are killed and frozen, and the network between them is cut, while orders keep coming.
//!
//! What happens in a round, and when, is drawn from the seed before anything is started: the same seed plays the same faults and
//! the same orders again. Only who wins each race differs, and so a seed that failed may have to be played more than once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::context::PublishError;
use async_nats::jetstream::{consumer, stream};
use fastrand::Rng;
use futures_util::future::join_all;
use sqlx::Row;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::support::daemon::Db;
use crate::support::nats::{PubAck, consumer_config, headers, stream_config};
use crate::support::{Broker, Daemon, DaemonSpec, FaultProxy, NatsServer, PATIENCE, ServerSpec, eventually};

/// Short, so that what a dead worker held comes again soon.
const ACK_WAIT: Duration = Duration::from_secs(1);
/// The server's own protection from repetitions; ours has to do without it.
const DUPLICATE_WINDOW: Duration = Duration::from_millis(150);
/// A publisher that has no receipt by then sends again.
const RECEIPT: Duration = Duration::from_secs(1);
/// After the last fault the work goes on, and is never without progress for this long. A worker that has gone silent is.
const SILENCE_MAX: Duration = Duration::from_secs(12);
/// Rounds between two waits for quiet, each with a full audit.
const AUDIT_EVERY: u32 = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make torture"]
async fn under_random_faults_nothing_is_lost_and_nothing_applied_twice() {
    let rounds: u32 = from_environment("ROUNDS").unwrap_or(60);
    let seed: u64 = from_environment("SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("torture: {rounds} rounds, seed {seed}");
    let began = Instant::now();
    let mut random = Rng::with_seed(seed);
    let mut place = Place { seed, round: 0 };

    // Its crashes must not cost it what it has confirmed: its own losses are not ours.
    let always = ServerSpec { jetstream: "sync_interval: always".into(), ..ServerSpec::default() };
    let server = NatsServer::with(always).await;
    let options = async_nats::ConnectOptions::new().reconnect_delay_callback(|_| Duration::from_millis(50));
    let broker = Broker::connect_with(&server, options).await;
    let stream = stream::Config { duplicate_window: DUPLICATE_WINDOW, ..stream_config() };
    broker.create(stream, consumer::pull::Config { ack_wait: ACK_WAIT, ..consumer_config() }).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let db = spec.db();
    let mut figures = Figures::default();
    let mut worker = WorkerSide { daemon: spec.start(), spec, seen: Seen::default(), before: Seen::default() };
    let mut server = ServerSide { server, proxy };
    let mut ledger = Ledger::default();
    let receipts = Notify::new();

    for number in 1..=rounds {
        place.round = number;
        let mut round = Round::draw(&mut random, number, ledger.orders.len());
        println!("{round}");
        tokio::join!(
            worker.suffer(&round.worker, &receipts),
            server.suffer(&round.server, &receipts),
            join_all(round.orders.iter_mut().map(|order| order.publish(&broker, &receipts))),
        );
        figures.count(&round);
        ledger.orders.append(&mut round.orders);
        if let Some(status) = worker.daemon.exited() {
            panic!("the worker has ended by itself: {status}");
        }
        ledger.check_floor(&broker, &db).await;
        if number % AUDIT_EVERY == 0 || number == rounds {
            figures.longest_wait = figures.longest_wait.max(quiet(&broker).await);
            ledger.check_all(&broker, &db).await;
        }
    }
    worker.look().await;
    worker.daemon.drain().await;
    // Once more over everything, now that nobody writes; and what the operators' own tool says to it.
    ledger.stored.clear();
    ledger.check_all(&broker, &db).await;
    worker.spec.run_ok(&["audit"]).await;
    figures.print(&ledger, worker.total(), began.elapsed());
}

fn from_environment<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Where we are, for whoever has to repeat it.
struct Place {
    seed: u64,
    round: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { seed, round } = self;
            eprintln!(
                "torture: failed in round {round} of seed {seed}; `make torture ROUNDS={round} SEED={seed}` plays it again"
            );
        }
    }
}

/// One round: what befalls the worker, what befalls the server and the network, and what is published, all at the same time.
struct Round {
    number: u32,
    /// One after the other, each with its moment.
    worker: Vec<(Moment, WorkerFault)>,
    server: Vec<(Moment, ServerFault)>,
    orders: Vec<Order>,
}

/// When a fault strikes, after the end of the one before it.
#[derive(Clone, Copy)]
struct Moment {
    pause: Duration,
    /// So long after the next receipt of a publisher: the server delivers that order, the worker commits it.
    after_receipt: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum WorkerFault {
    /// SIGKILL. The next one has this `batch.max_messages`.
    Kill {
        next_batch: usize,
    },
    /// SIGTERM, and it must end with 0. Only while the server can be reached.
    Drain {
        next_batch: usize,
    },
    Freeze(Duration),
}

#[derive(Clone, Copy, Debug)]
enum ServerFault {
    Kill {
        down: Duration,
    },
    Freeze(Duration),
    Cut,
    Refuse(Duration),
    /// What was held up goes through at the end, or is lost with the connection.
    Stall {
        what: Stalled,
        time: Duration,
        then_cut: bool,
    },
    Slow {
        delay: Duration,
        time: Duration,
    },
}

#[derive(Clone, Copy, Debug)]
enum Stalled {
    All,
    ToServer,
    ToClient,
}

/// An order as its publisher means it. No two have the same text.
struct Order {
    round: u32,
    id: Option<String>,
    text: String,
    /// When in its round.
    at: Duration,
    /// It is sent once more after the duplicate window.
    repeated: bool,
    /// The sequences in the server's receipts.
    receipts: Vec<u64>,
}

impl Round {
    fn draw(random: &mut Rng, number: u32, orders_before: usize) -> Self {
        let server = match random.u8(0..10) {
            0..3 => 0,
            3..8 => 1,
            _ => 2,
        };
        let server: Vec<_> = (0..server).map(|_| (Moment::draw(random), ServerFault::draw(random))).collect();
        let worker: Vec<_> = (0..random.u8(u8::from(server.is_empty())..4))
            .map(|_| (Moment::draw(random), WorkerFault::draw(random, server.is_empty())))
            .collect();
        let orders = (0..random.usize(30..90)).map(|n| Order::draw(random, number, orders_before + n + 1)).collect();
        Self { number, worker, server, orders }
    }
}

impl std::fmt::Display for Round {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "round {}: {} orders", self.number, self.orders.len())?;
        for (moment, fault) in &self.worker {
            write!(f, "; worker {moment} {fault:?}")?;
        }
        for (moment, fault) in &self.server {
            write!(f, "; server {moment} {fault:?}")?;
        }
        Ok(())
    }
}

impl Moment {
    fn draw(random: &mut Rng) -> Self {
        let pause = Duration::from_micros(random.u64(0..400_000));
        let after_receipt = (random.u8(0..4) > 0).then(|| Duration::from_micros(random.u64(0..20_000)));
        Self { pause, after_receipt }
    }

    async fn come(self, receipts: &Notify) {
        // There may be no more of them in this round.
        const PATIENCE: Duration = Duration::from_millis(200);
        sleep(self.pause).await;
        if let Some(delay) = self.after_receipt {
            timeout(PATIENCE, receipts.notified()).await.ok();
            sleep(delay).await;
        }
    }
}

impl std::fmt::Display for Moment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "after {:?}", self.pause)?;
        self.after_receipt.map_or(Ok(()), |delay| write!(f, " and a receipt and {delay:?}"))
    }
}

/// Mostly short; sometimes longer than `ack_wait`, and sometimes longer than the worker waits for a heartbeat.
fn time(random: &mut Rng) -> Duration {
    Duration::from_millis(if random.u8(0..6) == 0 { random.u64(1_100..3_000) } else { random.u64(10..400) })
}

impl WorkerFault {
    fn draw(random: &mut Rng, server_is_well: bool) -> Self {
        // Small batches make many moments: each has its claim, its commit and its acknowledgements.
        let next_batch = [1, 2, 4, 16, 1000][random.usize(..5)];
        match random.u8(0..10) {
            0..7 => Self::Kill { next_batch },
            7..9 if server_is_well => Self::Drain { next_batch },
            _ => Self::Freeze(time(random)),
        }
    }
}

impl ServerFault {
    fn draw(random: &mut Rng) -> Self {
        let time = time(random);
        match random.u8(0..10) {
            0..3 => Self::Kill { down: Duration::from_millis(random.u64(0..300)) },
            3 => Self::Freeze(time),
            4..6 => Self::Cut,
            6 => Self::Refuse(time),
            7 => Self::Slow { delay: Duration::from_millis(random.u64(5..50)), time },
            _ => {
                let what = [Stalled::All, Stalled::ToServer, Stalled::ToClient][random.usize(..3)];
                Self::Stall { what, time, then_cut: random.bool() }
            }
        }
    }
}

impl Order {
    fn draw(random: &mut Rng, round: u32, number: usize) -> Self {
        // In bursts, so that there is something to do at most moments and nothing at some.
        let at = Duration::from_millis(random.u64(0..10) * 100);
        let repeated = random.u8(0..10) == 0;
        let id = (repeated || random.u8(0..5) > 0).then(|| format!("order-{number}"));
        Self { round, id, text: format!("Order Data {number}"), at, repeated, receipts: Vec::new() }
    }

    /// Sends until there is a receipt. Without an id it is sent only once: nobody could tell a second one from another order.
    async fn publish(&mut self, broker: &Broker, receipts: &Notify) {
        sleep(self.at).await;
        let Some(id) = &self.id else {
            self.receipts.extend(self.send(broker, HeaderMap::new(), receipts).await.map(|stored| stored.stream_seq));
            return;
        };
        let headers = headers(&[("Nats-Msg-Id", id)]);
        let send = async || self.send(broker, headers.clone(), receipts).await;
        let stored = eventually(&format!("{self} is stored"), PATIENCE, send).await;
        let mut sequences = vec![stored.stream_seq];
        if self.repeated {
            sleep(DUPLICATE_WINDOW).await;
            let send_anew = async || {
                let stored = send().await?;
                if stored.duplicate { Err("a duplicate".to_owned()) } else { Ok(stored) }
            };
            let stored = eventually(&format!("{self} is stored once more"), PATIENCE, send_anew).await;
            sequences.push(stored.stream_seq);
        }
        self.receipts = sequences;
    }

    async fn send(&self, broker: &Broker, headers: HeaderMap, receipts: &Notify) -> Result<PubAck, String> {
        let sending = async {
            let text = self.text.clone().into();
            let receipt = broker.jetstream.publish_with_headers("ORDERS.new", headers, text).await?.await?;
            receipts.notify_waiters();
            Ok(PubAck { stream_seq: receipt.sequence, duplicate: receipt.duplicate })
        };
        let sent: Result<_, PublishError> = timeout(RECEIPT, sending).await.map_err(|_| "no receipt")?;
        sent.map_err(|error| error.to_string())
    }
}

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let id = self.id.as_deref().unwrap_or("no id");
        write!(f, "{:?} ({id}, round {}, stored at {:?})", self.text, self.round, self.receipts)
    }
}

/// The worker and what its metrics said, also those of the ones before it.
struct WorkerSide {
    daemon: Daemon,
    spec: DaemonSpec,
    seen: Seen,
    before: Seen,
}

/// At least so many: what a killed worker counted after the last look is unknown.
#[derive(Clone, Copy, Default)]
struct Seen {
    redelivered: f64,
    duplicates: f64,
}

impl WorkerSide {
    async fn suffer(&mut self, faults: &[(Moment, WorkerFault)], receipts: &Notify) {
        for (moment, fault) in faults {
            self.look().await;
            moment.come(receipts).await;
            match *fault {
                WorkerFault::Kill { next_batch } => {
                    self.daemon.kill9();
                    self.start(next_batch);
                }
                WorkerFault::Drain { next_batch } => {
                    // Before that it has not yet told the kernel what to do with the signal.
                    eventually("the worker has begun", PATIENCE, async || self.daemon.try_get("/livez").await).await;
                    self.daemon.drain().await;
                    self.start(next_batch);
                }
                WorkerFault::Freeze(time) => {
                    self.daemon.freeze();
                    sleep(time).await;
                    self.daemon.thaw();
                }
            }
        }
    }

    fn start(&mut self, batch: usize) {
        self.before = self.total();
        self.seen = Seen::default();
        self.spec.change("batch.max_messages", batch.to_string());
        self.daemon = self.spec.start();
    }

    async fn look(&mut self) {
        const PATIENCE: Duration = Duration::from_millis(200);
        let Ok(Ok(metrics)) = timeout(PATIENCE, self.daemon.try_metrics()).await else { return };
        let get = |name| metrics.get(name).unwrap_or_default();
        self.seen = Seen {
            redelivered: get("redeliveries_total{seen_by=\"server\"}"),
            duplicates: get("outcomes_total{outcome=\"duplicate\"}"),
        };
    }

    fn total(&self) -> Seen {
        Seen {
            redelivered: self.before.redelivered + self.seen.redelivered,
            duplicates: self.before.duplicates + self.seen.duplicates,
        }
    }
}

/// The server, and the network between it and the worker. Publishers have another one.
struct ServerSide {
    server: NatsServer,
    proxy: FaultProxy,
}

impl ServerSide {
    async fn suffer(&mut self, faults: &[(Moment, ServerFault)], receipts: &Notify) {
        let proxy = &self.proxy;
        for (moment, fault) in faults {
            moment.come(receipts).await;
            match *fault {
                ServerFault::Kill { down } => {
                    self.server.kill9();
                    sleep(down).await;
                    self.server.restart().await;
                }
                ServerFault::Freeze(time) => {
                    self.server.freeze();
                    sleep(time).await;
                    self.server.thaw();
                }
                ServerFault::Cut => proxy.cut(),
                ServerFault::Refuse(time) => {
                    proxy.refuse();
                    sleep(time).await;
                    proxy.heal();
                }
                ServerFault::Stall { what, time, then_cut } => {
                    match what {
                        Stalled::All => proxy.stall(),
                        Stalled::ToServer => proxy.stall_to_server(),
                        Stalled::ToClient => proxy.stall_to_client(),
                    }
                    sleep(time).await;
                    if then_cut {
                        proxy.cut();
                    }
                    proxy.heal();
                }
                ServerFault::Slow { delay, time } => {
                    proxy.delay(delay);
                    sleep(time).await;
                    proxy.heal();
                }
            }
        }
    }
}

/// Waits until the server has delivered everything and has every acknowledgement. How long that took.
async fn quiet(broker: &Broker) -> Duration {
    let began = Instant::now();
    let mut fewest = u64::MAX;
    while fewest > 0 {
        fewest = eventually("fewer messages are left", SILENCE_MAX, async || {
            let info = broker.try_consumer_info().await?;
            let left = info.num_pending + info.num_ack_pending as u64;
            if left < fewest { Ok(left) } else { Err(format!("{left}, {info:?}")) }
        })
        .await;
    }
    let (consumer, stream) = (broker.consumer_info().await, broker.stream_info().await);
    assert_eq!(consumer.ack_floor.stream_sequence, stream.state.last_sequence, "ack floor, last sequence");
    began.elapsed()
}

/// What was published, what the stream has of it, and what was applied.
#[derive(Default)]
struct Ledger {
    orders: Vec<Order>,
    /// The texts in the stream; the first has sequence 1.
    stored: Vec<String>,
    /// How often each text is in the table.
    applied: HashMap<String, u32>,
    last_row: i64,
}

impl Ledger {
    /// At any time: nothing below the ack floor is unapplied, nothing is applied twice, nothing is given up.
    async fn check_floor(&mut self, broker: &Broker, db: &Db) {
        // Before the look at the table: what is acknowledged by now must be there by then.
        let floor = eventually("the consumer can be asked", PATIENCE, async || broker.try_consumer_info().await).await;
        let floor = floor.ack_floor.stream_sequence;
        self.read_applied(db).await;
        let passed = |order: &&Order| order.receipts.iter().any(|seq| *seq <= floor);
        let acknowledged = self.orders.iter().filter(passed);
        none(
            &format!("below the ack floor {floor}, and not applied"),
            acknowledged.filter(|order| self.times(order) == 0),
        );
        none("applied more than once", self.orders.iter().filter(|order| self.times(order) > 1));
        none("dead letters", db.texts("SELECT id || ': ' || reason || ', ' || error FROM dead_letters").await);
    }

    /// When all is quiet: publishers, stream and tables agree about every single order.
    async fn check_all(&mut self, broker: &Broker, db: &Db) {
        self.check_floor(broker, db).await;
        self.read_stored(broker).await;
        let text_at = |seq: u64| usize::try_from(seq - 1).ok().and_then(|index| self.stored.get(index));
        let is_lost = |order: &&Order| order.receipts.iter().any(|seq| text_at(*seq) != Some(&order.text));
        none("confirmed by the server, and not in its stream", self.orders.iter().filter(is_lost));

        let by_text: HashMap<&str, &Order> = self.orders.iter().map(|order| (order.text.as_str(), order)).collect();
        let in_stream: HashMap<&str, usize> =
            self.stored.iter().zip(1..).map(|(text, seq)| (text.as_str(), seq)).collect();
        let name = |text: &str| {
            by_text.get(text).map_or_else(|| format!("{text:?}, never published"), |order| order.to_string())
        };
        let missing = in_stream.iter().filter(|(text, _)| !self.applied.contains_key(**text));
        none("in the stream, and not applied", missing.map(|(text, seq)| format!("{} at {seq}", name(text))));
        let invented = self.applied.keys().filter(|text| !in_stream.contains_key(text.as_str()));
        none("applied, and not in the stream", invented.map(|text| name(text)));

        none(
            "ids of orders that are not processed ids",
            db.texts("SELECT id FROM orders EXCEPT SELECT id FROM processed_ids").await,
        );
        none(
            "processed ids without an order",
            db.texts("SELECT id FROM processed_ids EXCEPT SELECT id FROM orders").await,
        );
        assert_eq!(db.count("processed_ids").await, db.count("orders").await, "processed ids, orders");
        none("attempts left on record", db.texts("SELECT id FROM attempts").await);
    }

    fn times(&self, order: &Order) -> u32 {
        self.applied.get(&order.text).copied().unwrap_or_default()
    }

    async fn read_applied(&mut self, db: &Db) {
        if db.count("orders").await == 0 {
            return;
        }
        let sql =
            format!("SELECT rowid, CAST(payload AS TEXT) FROM orders WHERE rowid > {} ORDER BY rowid", self.last_row);
        for row in db.rows(&sql).await {
            self.last_row = row.get(0);
            *self.applied.entry(row.get(1)).or_default() += 1;
        }
    }

    async fn read_stored(&mut self, broker: &Broker) {
        let stream = broker.jetstream.get_stream("ORDERS").await.expect("the stream exists");
        for seq in self.stored.len() as u64 + 1..=stream.cached_info().state.last_sequence {
            let message = stream.get_raw_message(seq).await.unwrap_or_else(|error| panic!("message {seq}: {error}"));
            self.stored.push(String::from_utf8(message.payload.into()).expect("texts were published"));
        }
    }
}

fn none(what: &str, offenders: impl IntoIterator<Item: std::fmt::Display>) {
    const SHOWN: usize = 20;
    let offenders: Vec<String> = offenders.into_iter().map(|offender| offender.to_string()).collect();
    let shown = offenders.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("\n  ");
    assert!(offenders.is_empty(), "{} {what}:\n  {shown}", offenders.len());
}

/// What there was, for the table at the end.
#[derive(Default)]
struct Figures {
    rounds: u32,
    worker_kills: u32,
    worker_stops: u32,
    worker_freezes: u32,
    server_kills: u32,
    server_freezes: u32,
    cuts: u32,
    stalls: u32,
    longest_wait: Duration,
}

impl Figures {
    fn count(&mut self, round: &Round) {
        self.rounds += 1;
        for (_, fault) in &round.worker {
            *match fault {
                WorkerFault::Kill { .. } => &mut self.worker_kills,
                WorkerFault::Drain { .. } => &mut self.worker_stops,
                WorkerFault::Freeze(_) => &mut self.worker_freezes,
            } += 1;
        }
        for (_, fault) in &round.server {
            *match fault {
                ServerFault::Kill { .. } => &mut self.server_kills,
                ServerFault::Freeze(_) => &mut self.server_freezes,
                ServerFault::Cut | ServerFault::Refuse(_) => &mut self.cuts,
                ServerFault::Stall { .. } | ServerFault::Slow { .. } => &mut self.stalls,
            } += 1;
        }
    }

    fn print(&self, ledger: &Ledger, seen: Seen, took: Duration) {
        let repeated = ledger.orders.iter().filter(|order| order.repeated).count();
        let unsure = ledger.orders.iter().filter(|order| order.receipts.is_empty()).count();
        println!("\nnothing lost, nothing twice:");
        let line = |what: &str, figure: &dyn std::fmt::Display| println!("{figure:>8}  {what}");
        line("rounds", &self.rounds);
        line("kills of the worker", &self.worker_kills);
        line("kills of the server", &self.server_kills);
        line("clean stops of the worker", &self.worker_stops);
        line("freezes of the worker", &self.worker_freezes);
        line("freezes of the server", &self.server_freezes);
        line("cuts of the network", &self.cuts);
        line("stalls and delays of the network", &self.stalls);
        line("orders published", &ledger.orders.len());
        line("of them repeated after the duplicate window", &repeated);
        line("of them without id and without receipt", &unsure);
        line("messages in the stream", &ledger.stored.len());
        line("orders applied, each once", &ledger.applied.len());
        line("redeliveries, at least", &seen.redelivered);
        line("duplicates met by the worker, at least", &seen.duplicates);
        line("s, the longest wait for quiet", &format!("{:.1}", self.longest_wait.as_secs_f64()));
        line("s in all", &took.as_secs());
    }
}
