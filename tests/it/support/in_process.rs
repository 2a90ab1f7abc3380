//! A worker inside the test process with a handler that fails on demand, where the test must see the handler's runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{self, PullConsumer};
use async_nats::jetstream::stream;
use async_trait::async_trait;
use futures_util::StreamExt;
use order_processor::config::Config;
use order_processor::handler::{Failure, Handler, Order};
use order_processor::model::delivery::Delivery;
use order_processor::store::{Connection, Store, Tx};
use order_processor::telemetry::Telemetry;
use order_processor::telemetry::status::Component;
use order_processor::worker::worker::{Ended, Until, Worker, WorkerError};
use sqlx::Row;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::nats::{CONSUMER, STREAM, headers, stream_config};
use super::{Broker, DaemonSpec, NatsServer, PATIENCE, at_least, equal, eventually};

/// How long an order beginning with `slow` takes: three times the `ack_wait` of an impatient consumer.
pub const SLOW: Duration = Duration::from_secs(3);

impl DaemonSpec {
    /// The settings of this daemon, as it would read them.
    pub fn config(&self) -> Config {
        Config::load(None, self.environment()).expect("the settings are right").config
    }
}

/// Writes each order into its own table `effects`, then does what the first word of the payload says: see [`Clerk::act`].
pub struct Clerk {
    /// What fails until mended does not fail any more.
    mended: AtomicBool,
    /// Each order that begins with `plug` takes a permit.
    gate: Semaphore,
    runs: Mutex<Vec<Run>>,
}

/// One call of the handler.
#[derive(Clone, Debug)]
pub struct Run {
    pub began: Instant,
    pub slice: Vec<Seen>,
}

#[derive(Clone, Debug)]
pub struct Seen {
    pub id: String,
    pub stream_seq: u64,
    pub delivered: u64,
    pub payload: String,
}

#[async_trait]
impl Handler for Clerk {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        let slice: Vec<Seen> = orders.iter().map(|order| Seen::of(order.delivery)).collect();
        self.runs.lock().unwrap().push(Run { began: Instant::now(), slice: slice.clone() });
        for seen in &slice {
            execute(tx, "INSERT INTO effects (id, payload) VALUES (?1, ?2)", seen).await?;
            self.act(tx, seen).await?;
        }
        Ok(())
    }
}

impl Clerk {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { mended: AtomicBool::new(false), gate: Semaphore::new(0), runs: Mutex::default() })
    }

    async fn act(&self, tx: &mut Tx<'_>, seen: &Seen) -> Result<(), Failure> {
        let mended = self.mended.load(Ordering::SeqCst);
        match seen.payload.split(' ').next().unwrap_or_default() {
            "plug" => self.gate.acquire().await.expect("the gate is never closed").forget(),
            "slow" => tokio::time::sleep(SLOW).await,
            "crash" => std::process::abort(),
            "permanent" => return Err(Failure::Permanent("no such product".to_owned())),
            "retry" if !mended => return Err(Failure::Retry("out of stock".to_owned())),
            "panic" if !mended => panic!("drawer {} is stuck", seen.stream_seq),
            "orphan" => execute(tx, "INSERT INTO children (id, parent) VALUES (?1, ?2)", seen).await?,
            "ledger" => execute(tx, "INSERT INTO ledger (id) VALUES (?1)", seen).await?,
            _ => {}
        }
        Ok(())
    }

    pub fn mend(&self) {
        self.mended.store(true, Ordering::SeqCst);
    }

    /// Lets this many plugs pass, now or when they come.
    pub fn let_pass(&self, plugs: usize) {
        self.gate.add_permits(plugs);
    }

    pub fn runs(&self) -> Vec<Run> {
        self.runs.lock().unwrap().clone()
    }

    pub fn runs_of(&self, payload: &str) -> Vec<Run> {
        self.runs().into_iter().filter(|run| run.slice.iter().any(|seen| seen.payload == payload)).collect()
    }

    /// The times between the runs of one order.
    pub fn gaps(&self, payload: &str) -> Vec<Duration> {
        self.runs_of(payload).windows(2).map(|runs| runs[1].began - runs[0].began).collect()
    }

    /// Waits until this many runs have begun.
    pub async fn began(&self, runs: usize) {
        eventually(&format!("{runs} runs have begun"), PATIENCE, async || at_least(self.runs().len(), runs)).await;
    }
}

impl Seen {
    fn of(delivery: &Delivery) -> Self {
        Self {
            id: delivery.id.to_string(),
            stream_seq: delivery.raw.position.stream_seq,
            delivered: delivery.raw.position.delivered,
            payload: String::from_utf8_lossy(&delivery.raw.payload).into_owned(),
        }
    }
}

async fn execute(tx: &mut Tx<'_>, sql: &'static str, seen: &Seen) -> Result<(), Failure> {
    let statement = sqlx::query(sql).bind(&seen.id).bind(&seen.payload);
    let Connection::Sqlite(connection) = tx.connection();
    statement.execute(connection).await?;
    Ok(())
}

/// A server with stream and consumer, and the place of one daemon.
pub struct Bench {
    pub broker: Broker,
    pub spec: DaemonSpec,
    _server: NatsServer,
}

impl Bench {
    pub async fn new(consumer: consumer::pull::Config, settings: &[(&str, &str)]) -> Self {
        let server = NatsServer::start().await;
        let broker = Broker::connect(&server).await;
        // The least that the server allows: the tests want repetitions to reach the worker.
        let stream = stream::Config { duplicate_window: Duration::from_millis(100), ..stream_config() };
        broker.create(stream, consumer).await;
        let spec = DaemonSpec::new(server.url());
        let spec = settings.iter().fold(spec, |spec, (key, value)| spec.set(key, *value));
        Self { broker, spec, _server: server }
    }

    /// Starts a worker in this process.
    pub async fn start<H: Handler>(&self, handler: &Arc<H>) -> Running {
        self.start_with_pause(handler, CancellationToken::new()).await
    }

    pub async fn start_with_pause<H: Handler>(&self, handler: &Arc<H>, pause: CancellationToken) -> Running {
        let config = self.spec.config();
        let store = Store::open(&config.database).await.expect("the database can be opened");
        make_effects(&mut self.spec.db().open_to_write().await).await;
        let telemetry = Arc::new(Telemetry::new());
        telemetry.health.report(Component::Database, Ok(()));
        let worker = Worker::new(Arc::new(config), store, handler.clone(), telemetry.clone(), Until::Stopped);
        let stop = CancellationToken::new();
        Running { task: tokio::spawn(worker.run(stop.clone(), pause.cancelled_owned())), stop, telemetry }
    }

    /// Publishes these behind a plug, and pulls the plug when the worker holds all of them: they are one batch.
    pub async fn one_batch(&self, worker: &Running, clerk: &Clerk, texts: &[&str]) {
        self.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", "plug")]), b"plug".to_vec()).await;
        clerk.began(1).await;
        for text in texts {
            self.broker.publish_to("ORDERS.new", HeaderMap::new(), (*text).into()).await;
        }
        worker.held(1 + texts.len()).await;
        clerk.let_pass(1);
        clerk.began(2).await;
        assert!(clerk.runs()[1].slice.len() > 1, "they are one batch: {:?}", clerk.runs());
    }

    /// Plays another worker, one that takes these messages and hands them back in this order.
    pub async fn hand_back(&self, stream_seqs: &[u64]) {
        let consumer: PullConsumer = self.broker.jetstream.get_consumer_from_stream(CONSUMER, STREAM).await.unwrap();
        let messages = consumer.fetch().max_messages(stream_seqs.len()).messages().await.unwrap();
        let messages: Vec<_> = messages.map(Result::unwrap).collect().await;
        for stream_seq in stream_seqs {
            let message = messages.iter().find(|message| message.info().unwrap().stream_sequence == *stream_seq);
            message.expect("it was delivered").double_ack_with(AckKind::Nak(None)).await.unwrap();
        }
    }

    /// Watches what the server says of terminated messages.
    pub async fn terminations(&self) -> Terminations {
        let subject = format!("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{STREAM}.{CONSUMER}");
        let advisories = self.broker.client.subscribe(subject).await.unwrap();
        self.broker.client.flush().await.unwrap();
        Terminations(advisories)
    }

    /// The payloads with an effect.
    pub async fn effects(&self) -> Vec<String> {
        self.spec.db().texts("SELECT payload FROM effects ORDER BY payload").await
    }

    /// As many effects as ids, and none twice.
    pub async fn applied_once(&self, orders: i64) {
        let db = self.spec.db();
        assert_eq!(db.count("effects").await, orders, "effects: {:?}", self.effects().await);
        assert_eq!(db.scalar("SELECT count(DISTINCT id) FROM effects").await, orders, "different ids in effects");
        assert_eq!(db.count("processed_ids").await, orders, "processed ids");
    }

    /// No attempt is on record and nothing is dead.
    pub async fn no_failures(&self) {
        assert_eq!(self.spec.db().count("attempts").await, 0, "attempts");
        assert_eq!(self.spec.db().count("dead_letters").await, 0, "dead letters");
    }

    /// No run is on record as begun and not ended.
    pub async fn no_open_runs(&self) {
        let open = self.spec.db().scalar("SELECT coalesce(sum(started), 0) FROM attempts").await;
        assert_eq!(open, 0, "runs without an end");
    }

    /// The one dead letter that there must be.
    pub async fn dead_letter(&self) -> sqlx::sqlite::SqliteRow {
        let mut rows = self.spec.db().rows("SELECT * FROM dead_letters").await;
        assert_eq!(rows.len(), 1, "dead letters");
        rows.remove(0)
    }
}

/// A worker in this process. It goes with the test's runtime.
pub struct Running {
    pub stop: CancellationToken,
    pub task: JoinHandle<Result<Ended, WorkerError>>,
    pub telemetry: Arc<Telemetry>,
}

impl Running {
    pub async fn ready(&self) {
        eventually("the worker is ready", PATIENCE, async || equal(self.telemetry.health.problems(), vec![])).await;
    }

    /// Waits until a problem says this.
    pub async fn not_ready(&self, because: &str) {
        eventually(&format!("not ready, because {because}"), PATIENCE, async || {
            let problems = self.telemetry.health.problems();
            if problems.iter().any(|problem| problem.to_string().contains(because)) { Ok(()) } else { Err(problems) }
        })
        .await;
    }

    pub async fn held(&self, deliveries: usize) {
        let what = format!("{deliveries} deliveries are held");
        eventually(&what, PATIENCE, async || equal(self.telemetry.health.status().held, deliveries)).await;
    }

    pub async fn draining(&self) {
        eventually("the worker drains", PATIENCE, async || equal(self.telemetry.health.status().draining, true)).await;
    }

    /// Waits until a counter has got this far.
    pub async fn metric(&self, name: &str, value: f64) {
        let prefix = format!("order_processor_{name} ");
        eventually(&format!("{name} >= {value}"), PATIENCE, async || {
            let text = self.telemetry.metrics.render();
            let seen = text.lines().find_map(|line| line.strip_prefix(&prefix)).and_then(|seen| seen.parse().ok());
            at_least(seen, Some(value))
        })
        .await;
    }

    /// Stops it, and asserts the clean end that must follow.
    pub async fn drain(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(PATIENCE, self.task).await.expect("the drain ends");
        ended.expect("the worker does not panic").expect("the worker drains");
    }

    /// Stops it, and asserts that its deadline passes before it has drained.
    pub async fn cut_off(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(PATIENCE, self.task).await.expect("the deadline ends it");
        assert!(matches!(ended.expect("the worker does not panic"), Err(WorkerError::Deadline(_))));
    }
}

/// Advisories of terminated messages.
pub struct Terminations(async_nats::Subscriber);

impl Terminations {
    /// Stream sequence and reason of the next one.
    pub async fn next(&mut self) -> (u64, String) {
        let message = tokio::time::timeout(PATIENCE, self.0.next()).await.expect("an advisory comes").unwrap();
        let advisory: serde_json::Value = serde_json::from_slice(&message.payload).unwrap();
        (advisory["stream_seq"].as_u64().unwrap(), advisory["reason"].as_str().unwrap_or_default().to_owned())
    }
}

/// The table of the [`Clerk`]. No constraint keeps an effect from being there twice: the inbox has to.
pub async fn make_effects(connection: &mut sqlx::SqliteConnection) {
    let sql = "CREATE TABLE IF NOT EXISTS effects \
               (id TEXT NOT NULL, payload TEXT NOT NULL CHECK (payload NOT LIKE 'forbidden%')) STRICT";
    // A deferred foreign key is checked by the COMMIT and not by the statement.
    let children = "CREATE TABLE IF NOT EXISTS children \
                    (id TEXT NOT NULL, parent TEXT NOT NULL REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED) STRICT";
    for sql in [sql, "CREATE TABLE IF NOT EXISTS parents (id TEXT NOT NULL PRIMARY KEY) STRICT", children] {
        sqlx::query(sql).execute(&mut *connection).await.expect("the table can be made");
    }
}
