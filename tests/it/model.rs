//! The inbox on its real file against a plain map: random batches with repetitions, conflicts, failures and crashes, and after each
//! of them the tables and the outcomes must be those that the map says.
//!
//! The heart of it is [`Model::one`]: what must become of messages that come one after the other. The inbox takes them in bulk, in
//! savepoints or alone; none of that may show, but in how much a crash undoes.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use order_processor::config::{Database, OnConflict};
use order_processor::handler::orders::Orders;
use order_processor::handler::{Failure, Handler, Order};
use order_processor::model::delivery::{Delivery, Position, Raw};
use order_processor::model::id::Digest;
use order_processor::model::label::Label;
use order_processor::model::outcome::{Outcome, Reason};
use order_processor::model::plan::Plan;
use order_processor::store::{self, Connection, ErrorClass, Store, Tx};
use order_processor::worker::inbox::{Inbox, Outcomes};
use order_processor::worker::retry::RetryPolicy;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::FileFailurePersistence;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection as _};
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// `retry.min_delay`; longer than no delay and shorter than a test.
const MIN_DELAY: Duration = Duration::from_secs(1);
/// When the inbox ends a pass over single messages on a slow machine.
const SINGLES_BUDGET: Duration = Duration::from_secs(1);

/// One delivery of a batch. Few ids, so that they meet.
#[derive(Clone, Debug)]
struct Message {
    id: u8,
    /// Another order under the same id.
    other: bool,
    unreadable: bool,
    /// On top of the least that makes a suspect, or does not.
    deliveries_more: u64,
    run: Run,
}

/// What the handler does with a message.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Run {
    Well,
    Retry,
    Permanent,
    /// The database refuses a statement about it.
    Constraint,
    /// The database refuses it when it is committed.
    AtCommit,
    Panic,
    /// It fails together with others and not alone.
    InCompany,
}

#[derive(Clone, Debug)]
struct Step {
    batch: Vec<Message>,
    suspects: bool,
    draining: bool,
    max_deliver: Option<u64>,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// In the run of the handler of that number, its effect written and not committed; if there are fewer runs, between the
    /// commit and the acknowledgements. What a killed process leaves is a copy of its files; `in_place`: the connection is closed
    /// in the middle and the same file opened again.
    Killed {
        at_run: usize,
        in_place: bool,
    },
    /// While it writes: of what this step added to the WAL, only a part is there, in thousandths.
    KilledInWrite {
        written: usize,
    },
    /// The disk is full in the run of that number.
    DatabaseFails {
        at_run: usize,
    },
    /// Stopped after the batch, as it should be, and started again.
    Restarted,
}

fn messages() -> impl Strategy<Value = Message> {
    use Run::{AtCommit, Constraint, InCompany, Panic, Permanent, Retry, Well};
    let run = select(vec![
        Well, Well, Well, Well, Well, Well, Retry, Retry, Permanent, Constraint, AtCommit, Panic, InCompany,
    ]);
    (0..4_u8, prop::bool::weighted(0.15), prop::bool::weighted(0.08), 0..4_u64, run).prop_map(
        |(id, other, unreadable, deliveries_more, run)| Message { id, other, unreadable, deliveries_more, run },
    )
}

fn steps() -> impl Strategy<Value = Step> {
    let fault = prop_oneof![
        4 => Just(Fault::None),
        3 => (1..6_usize, any::<bool>()).prop_map(|(at_run, in_place)| Fault::Killed { at_run, in_place }),
        2 => (0..=1000_usize).prop_map(|written| Fault::KilledInWrite { written }),
        2 => (1..6_usize).prop_map(|at_run| Fault::DatabaseFails { at_run }),
        1 => Just(Fault::Restarted),
    ];
    let (suspects, draining) = (prop::bool::weighted(0.4), prop::bool::weighted(0.1));
    (vec(messages(), 1..6), suspects, draining, option::weighted(0.2, 1..7_u64), fault).prop_map(
        |(mut batch, suspects, draining, max_deliver, fault)| {
            let readable: Vec<u8> =
                batch.iter().filter(|message| !message.unreadable).map(|message| message.id).collect();
            for message in batch.iter_mut().filter(|message| message.unreadable) {
                // What the handler never sees is no suspect. And the inbox need not say which of two is first if the same
                // message comes readable and unreadable in one batch.
                message.unreadable = !suspects;
                message.id += if readable.contains(&message.id) { 4 } else { 0 };
            }
            Step { batch, suspects, draining, max_deliver, fault }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        max_shrink_time: 60_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_inbox_does_what_a_plain_map_says_whatever_comes_and_whenever_it_crashes(
        steps in vec(steps(), 1..10),
        max_attempts in 1..4_u32,
        on_conflict in select(vec![OnConflict::DeadLetter, OnConflict::Duplicate]),
    ) {
        play(&steps, max_attempts, on_conflict);
    }
}

#[test]
fn a_conflict_twice_in_a_batch_is_one_dead_letter_and_a_duplicate() {
    for suspects in [false, true] {
        let other = Message { other: true, ..plain(0) };
        play(
            &[Step { suspects, ..batch(&[plain(0)]) }, Step { suspects, ..batch(&[other.clone(), other]) }],
            3,
            OnConflict::DeadLetter,
        );
    }
}

#[test]
fn a_postponed_start_leaves_no_record_after_an_outcome_elsewhere() {
    let put_off = Step { suspects: true, fault: Fault::DatabaseFails { at_run: 1 }, ..batch(&[plain(0)]) };
    let later = Step { suspects: true, ..batch(&[plain(1)]) };
    play(&[put_off.clone(), batch(&[plain(0)]), later], 3, OnConflict::DeadLetter);
    play(&[put_off, Step { fault: Fault::Restarted, ..batch(&[plain(0)]) }], 3, OnConflict::DeadLetter);
}

fn plain(id: u8) -> Message {
    Message { id, other: false, unreadable: false, deliveries_more: 0, run: Run::Well }
}

fn batch(messages: &[Message]) -> Step {
    Step { batch: messages.to_vec(), suspects: false, draining: false, max_deliver: None, fault: Fault::None }
}

/// Runs `steps` on a file and in the model, and compares after each.
fn play(steps: &[Step], max_attempts: u32, on_conflict: OnConflict) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut bench = Bench::new(max_attempts, on_conflict).await;
        let mut model = Model { max_attempts, on_conflict: Some(on_conflict), ..Model::default() };
        for step in steps {
            if let Err(TooSlow) = bench.run(step, &mut model).await {
                return;
            }
        }
    });
}

impl Message {
    fn name(&self) -> String {
        format!("order {}", self.id)
    }

    fn payload(&self) -> String {
        payload(&self.name(), self.other)
    }

    fn delivered(&self, step: &Step) -> u64 {
        if step.suspects { 3 + self.deliveries_more } else { 1 + self.deliveries_more % 2 }
    }

    fn delivery(&self, step: &Step, index: usize) -> Delivery {
        let payload = self.payload();
        let position = Position {
            delivered: self.delivered(step),
            stream_seq: index as u64 + 1,
            consumer_seq: 1,
            published_ns: 1,
        };
        let digest = Digest::of("ORDERS.new", payload.as_bytes());
        let raw =
            Raw { subject: "ORDERS.new".into(), headers: vec![], payload: payload.into(), position, unreadable: None };
        let defect = self.unreadable.then(|| (Reason::Unreadable, "bytes".to_owned()));
        Delivery {
            raw,
            id: self.name().into(),
            digest,
            defect,
            missing_id: None,
            ignored: None,
            attempt: 1,
            plan: Plan::Apply,
            key: None,
        }
    }
}

fn payload(name: &str, other: bool) -> String {
    format!("{name}{}", if other { ", another one" } else { "" })
}

/// What the tables hold. A message is known by its id and its payload.
#[derive(Clone, Debug, Default, PartialEq)]
struct Tables {
    processed: BTreeMap<String, String>,
    orders: BTreeMap<String, String>,
    dead: BTreeMap<(String, String), &'static str>,
    /// Failed and started runs.
    attempts: BTreeMap<String, (u32, u32)>,
}

/// An outcome without its texts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Said {
    Applied,
    Duplicate,
    Retry { failed: u32 },
    Dead(Reason),
}

/// Why a batch did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stop {
    Killed,
    DatabaseFailed,
}

#[derive(Default)]
struct Model {
    max_attempts: u32,
    on_conflict: Option<OnConflict>,
    tables: Tables,
    /// What was durable before the step, and after each commit in it.
    commits: Vec<Tables>,
    /// The message whose recorded run ended in no outcome, as the process remembers.
    begun: Option<String>,
    runs: usize,
}

impl Model {
    /// What comes of a step, `None` for a message that is left for later.
    fn process(&mut self, step: &Step) -> Result<Vec<Option<Said>>, Stop> {
        self.commits = vec![self.tables.clone()];
        self.runs = 0;
        // How many a pass over single messages gets to.
        let singles = if step.draining { 1 } else { usize::MAX };
        let said = if step.suspects { self.suspects(step, singles) } else { self.batch(step, singles) };
        if let Err(stop) = said {
            self.tables = self.commits[self.commits.len() - 1].clone();
            if stop == Stop::Killed {
                self.begun = None;
            }
        }
        said
    }

    fn batch(&mut self, step: &Step, singles: usize) -> Result<Vec<Option<Said>>, Stop> {
        let batch = &step.batch;
        let readable = || batch.iter().filter(|message| !message.unreadable);
        let clash = readable().any(|one| readable().any(|two| one.id == two.id && one.other != two.other));
        if !clash {
            let new: Vec<&Message> = readable().filter(|message| self.is_new(message)).collect();
            let new: BTreeMap<u8, &Message> = new.into_iter().rev().map(|first| (first.id, first)).collect();
            if !new.is_empty() {
                self.run(step)?;
            }
            let fails = |message: &&Message| match message.run {
                Run::Well => false,
                Run::InCompany => new.len() > 1,
                Run::Retry | Run::Permanent | Run::Constraint | Run::AtCommit | Run::Panic => true,
            };
            if !new.values().any(fails) {
                let said = batch.iter().map(|message| Some(self.one(message, step, Attempt::Silent).expect("silent")));
                let said = said.collect();
                self.commit();
                return Ok(said);
            }
            if let [only] = &batch[..] {
                let said = self.failed(only, step, false);
                self.commit();
                return Ok(vec![Some(said)]);
            }
        }
        // All in one transaction, unless the commit is refused: then each in its own.
        let before = self.tables.clone();
        let mut said = vec![None; batch.len()];
        let mut refused = false;
        for (message, said) in batch.iter().zip(&mut said).take(singles) {
            let one = self.one(message, step, Attempt::Uncommitted)?;
            refused |= one == Said::Applied && message.run == Run::AtCommit;
            *said = Some(one);
        }
        if refused {
            self.tables = before;
            for (message, said) in batch.iter().zip(&mut said).take(singles) {
                *said = Some(self.one(message, step, Attempt::InBatch)?);
                self.commit();
            }
        }
        self.commit();
        Ok(said)
    }

    fn suspects(&mut self, step: &Step, mut singles: usize) -> Result<Vec<Option<Said>>, Stop> {
        let open: Vec<bool> = step.batch.iter().map(|message| self.is_new(message)).collect();
        let mut said = vec![None; step.batch.len()];
        for ((message, said), _) in step.batch.iter().zip(&mut said).zip(&open).filter(|(_, open)| !**open) {
            *said = Some(self.one(message, step, Attempt::Silent)?);
        }
        self.commit();
        for ((message, said), _) in step.batch.iter().zip(&mut said).zip(&open).filter(|(_, open)| **open) {
            if singles == 0 {
                break;
            }
            singles -= 1;
            *said = Some(self.alone(message, step)?);
        }
        Ok(said)
    }

    /// A message that may be killing the process: its start is made durable before it runs.
    fn alone(&mut self, message: &Message, step: &Step) -> Result<Said, Stop> {
        let name = message.name();
        let started = self.tables.attempts.get(&name).map_or(0, |(_, started)| *started);
        // The outcome of another order under this id takes the record along.
        if self.begun.as_ref() != Some(&name) || started == 0 {
            self.end_of_begun();
            if started >= self.max_attempts {
                let said = self.bury(message, Reason::CrashLoop);
                self.tables.attempts.remove(&name);
                self.commit();
                return Ok(said);
            }
            self.tables.attempts.entry(name.clone()).or_default().1 += 1;
        }
        self.commit();
        self.begun = Some(name);
        let said = self.one(message, step, Attempt::Recorded)?;
        self.commit();
        self.begun = None;
        Ok(said)
    }

    /// This process lives, so what it began and put off was no crash.
    fn end_of_begun(&mut self) {
        if let Some(attempts) = self.begun.take().and_then(|begun| self.tables.attempts.get_mut(&begun)) {
            attempts.1 = attempts.1.saturating_sub(1);
        }
    }

    /// The whole contract: what becomes of a message that comes after all others that came before.
    fn one(&mut self, message: &Message, step: &Step, attempt: Attempt) -> Result<Said, Stop> {
        let (name, payload) = (message.name(), message.payload());
        let said = if self.tables.dead.contains_key(&(name.clone(), payload.clone())) {
            Said::Duplicate
        } else if let Some(known) = self.tables.processed.get(&name) {
            if *known == payload || self.on_conflict == Some(OnConflict::Duplicate) {
                Said::Duplicate
            } else {
                self.bury(message, Reason::Conflict)
            }
        } else if message.unreadable {
            self.bury(message, Reason::Unreadable)
        } else {
            if attempt != Attempt::Silent {
                self.run(step)?;
            }
            let succeeds = match message.run {
                Run::Well | Run::InCompany => true,
                Run::AtCommit => attempt == Attempt::Uncommitted,
                Run::Retry | Run::Permanent | Run::Constraint | Run::Panic => false,
            };
            if !succeeds {
                return Ok(self.failed(message, step, attempt == Attempt::Recorded));
            }
            self.tables.processed.insert(name.clone(), payload.clone());
            self.tables.orders.insert(name.clone(), payload);
            Said::Applied
        };
        self.tables.attempts.remove(&name);
        Ok(said)
    }

    fn failed(&mut self, message: &Message, step: &Step, recorded: bool) -> Said {
        let name = message.name();
        let (failed, started) = self.tables.attempts.remove(&name).unwrap_or_default();
        let (failed, started) = (failed + 1, if recorded { started - 1 } else { started });
        let reason = match message.run {
            Run::Permanent | Run::Constraint | Run::AtCommit => Reason::Permanent,
            _ if failed >= self.max_attempts => Reason::AttemptsExhausted,
            _ if step.max_deliver.is_some_and(|max| message.delivered(step) >= max) => Reason::LastDelivery,
            _ => {
                self.tables.attempts.insert(name, (failed, started));
                return Said::Retry { failed };
            }
        };
        self.bury(message, reason)
    }

    fn bury(&mut self, message: &Message, reason: Reason) -> Said {
        self.tables.dead.insert((message.name(), message.payload()), reason.name());
        Said::Dead(reason)
    }

    fn is_new(&self, message: &Message) -> bool {
        let key = (message.name(), message.payload());
        !self.tables.dead.contains_key(&key) && !self.tables.processed.contains_key(&key.0)
    }

    /// A run of the handler: the place of a crash.
    fn run(&mut self, step: &Step) -> Result<(), Stop> {
        self.runs += 1;
        match step.fault {
            Fault::Killed { at_run, .. } if at_run == self.runs => Err(Stop::Killed),
            Fault::DatabaseFails { at_run } if at_run == self.runs => Err(Stop::DatabaseFailed),
            _ => Ok(()),
        }
    }

    fn commit(&mut self) {
        self.commits.push(self.tables.clone());
    }
}

/// How a message is run.
#[derive(Clone, Copy, PartialEq)]
enum Attempt {
    /// As a part of a batch whose one run is counted elsewhere.
    Silent,
    /// In a savepoint, the commit still to come.
    Uncommitted,
    /// In a transaction of its own.
    InBatch,
    /// The same, its start on record.
    Recorded,
}

/// The machine took so long that the inbox left messages for later, and the model does not know which.
struct TooSlow;

/// The real thing: a file, an inbox on it, and a handler that does as it is told.
struct Bench {
    folder: TempDir,
    /// `None` only while it is replaced.
    inbox: Option<Inbox>,
    clerk: Arc<Clerk>,
    retry: RetryPolicy,
    on_conflict: OnConflict,
}

impl Bench {
    async fn new(max_attempts: u32, on_conflict: OnConflict) -> Self {
        let retry = RetryPolicy { max_attempts, min_delay: MIN_DELAY, max_delay: MIN_DELAY * 60 };
        let clerk = Arc::new(Clerk::default());
        let mut bench = Self { folder: tempfile::tempdir().unwrap(), inbox: None, clerk, retry, on_conflict };
        bench.open().await;
        let mut tx = bench.inbox.as_mut().unwrap().store().begin().await.unwrap();
        for table in [
            "CREATE TABLE goods (name TEXT PRIMARY KEY) STRICT",
            "CREATE TABLE lines (good TEXT NOT NULL REFERENCES goods DEFERRABLE INITIALLY DEFERRED) STRICT",
        ] {
            let Connection::Sqlite(connection) = tx.connection();
            sqlx::query(table).execute(connection).await.unwrap();
        }
        tx.commit().await.unwrap();
        bench
    }

    fn database(&self) -> PathBuf {
        self.folder.path().join("orders.db")
    }

    async fn open(&mut self) {
        let mut store = Store::open(&Database::Sqlite(self.database())).await.unwrap();
        // So that ids are met in memory, in sealed segments, and on the way from the one to the other.
        store.seal_after(2);
        self.inbox = Some(Inbox::new(store, self.clerk.clone(), self.retry, self.on_conflict));
    }

    /// Runs a step on the file and in the model, and compares.
    async fn run(&mut self, step: &Step, model: &mut Model) -> Result<(), TooSlow> {
        let batch: Vec<Delivery> =
            step.batch.iter().enumerate().map(|(index, message)| message.delivery(step, index)).collect();
        self.clerk.prepare(step);
        let wal_before = std::fs::read(wal(&self.database())).unwrap_or_default();
        let began = Instant::now();
        let (ended, copy) = self.process(step, &batch).await;

        if let Some(Ok(outcomes)) = &ended
            && outcomes.iter().any(Option::is_none)
            && !step.draining
        {
            assert!(began.elapsed() >= SINGLES_BUDGET, "messages are left over without need: {outcomes:?}");
            return Err(TooSlow);
        }
        match (model.process(step), ended) {
            (Ok(expected), Some(Ok(outcomes))) => {
                let said = outcomes.iter().zip(&expected).map(|(outcome, expected)| said(outcome.as_ref()?, *expected));
                assert_eq!(said.collect::<Vec<_>>(), expected, "{outcomes:#?}");
            }
            (Err(Stop::DatabaseFailed), Some(Err(error))) => assert_eq!(error.class, ErrorClass::Full, "{error}"),
            (Err(Stop::Killed), None) => {}
            (expected, ended) => panic!("expected {expected:?}, and it ended with {ended:?}"),
        }
        self.crash(step, copy, &wal_before, model).await;
        assert_eq!(Tables::read(&self.database()).await, model.tables, "after this step");
        Ok(())
    }

    /// The outcomes; `None` if the process was killed on the way, with what it left if that is elsewhere.
    async fn process(
        &mut self,
        step: &Step,
        batch: &[Delivery],
    ) -> (Option<Result<Outcomes, store::Error>>, Option<TempDir>) {
        let draining = CancellationToken::new();
        if step.draining {
            draining.cancel();
        }
        let database = self.database();
        let inbox = self.inbox.as_mut().unwrap();
        inbox.max_deliver = step.max_deliver;
        let process = std::pin::pin!(inbox.process(batch, &draining));
        tokio::select! {
            biased;
            ended = process => (Some(ended), None),
            // The transaction is still open here, and dropped at the end.
            () = self.clerk.in_the_middle.notified() => match step.fault {
                Fault::Killed { in_place: false, .. } => (None, Some(copy_of(&database, usize::MAX))),
                _ => (None, None),
            },
        }
    }

    /// What happens after the batch, or because of what happened in it.
    async fn crash(&mut self, step: &Step, copy: Option<TempDir>, wal_before: &[u8], model: &mut Model) {
        match step.fault {
            Fault::None | Fault::DatabaseFails { .. } => return,
            Fault::Killed { .. } => {
                self.inbox = None;
                if let Some(copy) = copy {
                    self.folder = copy;
                }
                model.begun = None;
            }
            Fault::KilledInWrite { written } => {
                let wal_after = std::fs::read(wal(&self.database())).unwrap();
                let left = match wal_after.strip_prefix(wal_before) {
                    Some(added) => wal_before.len() + added.len() * written / 1000,
                    // It began at its start again: what is gone by that cannot be cut off.
                    None => usize::MAX,
                };
                let copy = copy_of(&self.database(), left);
                self.inbox = None;
                self.folder = copy;
                let tables = Tables::read(&self.database()).await;
                assert!(model.commits.contains(&tables), "{tables:#?} is none of {:#?}", model.commits);
                model.tables = tables;
                model.begun = None;
            }
            Fault::Restarted => {
                self.inbox.take().unwrap().close().await.unwrap();
                model.end_of_begun();
            }
        }
        self.open().await;
    }
}

/// The outcome without its texts; a delay must be that of the attempt that is expected.
fn said(outcome: &Outcome, expected: Option<Said>) -> Option<Said> {
    Some(match (outcome, expected) {
        (Outcome::Applied, _) => Said::Applied,
        (Outcome::Duplicate | Outcome::Dropped, _) => Said::Duplicate,
        (Outcome::DeadLettered { reason, .. }, _) => Said::Dead(*reason),
        (Outcome::Retry { delay, .. }, Some(Said::Retry { failed })) => {
            let delays = MIN_DELAY.mul_f64(0.8)..=MIN_DELAY.mul_f64(1.2);
            assert!(delays.contains(&(*delay / 2_u32.pow(failed - 1))), "{delay:?} after {failed} failures");
            Said::Retry { failed }
        }
        (Outcome::Ignored(_), _) => unreachable!("every message of the model is an order"),
        (Outcome::Retry { .. }, _) => Said::Retry { failed: 0 },
    })
}

fn wal(database: &Path) -> PathBuf {
    database.with_extension("db-wal")
}

/// The files that a killed process leaves, of the WAL only that many bytes.
fn copy_of(database: &Path, wal_bytes: usize) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("orders.db");
    std::fs::copy(database, &copy).unwrap();
    let mut bytes = std::fs::read(wal(database)).unwrap_or_default();
    bytes.truncate(wal_bytes);
    std::fs::write(wal(&copy), bytes).unwrap();
    folder
}

impl Tables {
    async fn read(database: &Path) -> Self {
        let mut connection = SqliteConnectOptions::new().filename(database).connect().await.unwrap();
        let mut tables = Self::default();
        let rows: Vec<(String, Vec<u8>)> =
            sqlx::query_as("SELECT id, digest FROM processed_ids").fetch_all(&mut connection).await.unwrap();
        for (id, digest) in rows {
            let payloads = [false, true].map(|other| payload(&id, other));
            let payload =
                payloads.into_iter().find(|payload| Digest::of("ORDERS.new", payload.as_bytes()).0[..] == digest);
            tables.processed.insert(id, payload.expect("the digest of the subject and a payload of this test"));
        }
        let rows: Vec<(String, Vec<u8>)> =
            sqlx::query_as("SELECT id, payload FROM orders").fetch_all(&mut connection).await.unwrap();
        for (id, payload) in rows {
            let twice = tables.orders.insert(id.clone(), String::from_utf8(payload).unwrap());
            assert_eq!(twice, None, "{id} is applied twice");
        }
        let rows: Vec<(String, Vec<u8>, String)> =
            sqlx::query_as("SELECT id, payload, reason FROM dead_letters").fetch_all(&mut connection).await.unwrap();
        for (id, payload, reason) in rows {
            let reason = Reason::ALL.iter().find(|known| known.name() == reason).expect("a known reason").name();
            tables.dead.insert((id, String::from_utf8(payload).unwrap()), reason);
        }
        let rows: Vec<(String, u32, u32)> =
            sqlx::query_as("SELECT id, failed, started FROM attempts").fetch_all(&mut connection).await.unwrap();
        tables.attempts = rows.into_iter().map(|(id, failed, started)| (id, (failed, started))).collect();
        let lines: i64 = sqlx::query_scalar("SELECT count(*) FROM lines").fetch_one(&mut connection).await.unwrap();
        assert_eq!(lines, 0, "the effect of a message that failed is left");
        connection.close().await.unwrap();
        tables
    }
}

/// A handler that does with each message what the step says.
#[derive(Default)]
struct Clerk {
    script: Mutex<Script>,
    in_the_middle: Notify,
}

#[derive(Default)]
struct Script {
    runs: usize,
    fault: Option<Fault>,
    by_stream_seq: HashMap<u64, Run>,
}

impl Clerk {
    fn prepare(&self, step: &Step) {
        let by_stream_seq = (1..).zip(&step.batch).map(|(seq, message)| (seq, message.run)).collect();
        *self.script.lock().unwrap() = Script { runs: 0, fault: Some(step.fault), by_stream_seq };
    }

    fn next(&self, deliveries: &[&Delivery]) -> (Option<Stop>, Vec<Run>) {
        let mut script = self.script.lock().unwrap();
        script.runs += 1;
        let stop = match script.fault {
            Some(Fault::Killed { at_run, .. }) if at_run == script.runs => Some(Stop::Killed),
            Some(Fault::DatabaseFails { at_run }) if at_run == script.runs => Some(Stop::DatabaseFailed),
            _ => None,
        };
        (stop, deliveries.iter().map(|delivery| script.by_stream_seq[&delivery.raw.position.stream_seq]).collect())
    }
}

#[async_trait]
impl Handler for Clerk {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        let deliveries: Vec<&Delivery> = orders.iter().map(|order| order.delivery).collect();
        let (stop, runs) = self.next(&deliveries);
        // The effect first, so that there is something to undo.
        Orders.apply(tx, orders).await?;
        match stop {
            Some(Stop::Killed) => {
                self.in_the_middle.notify_one();
                std::future::pending::<()>().await;
            }
            Some(Stop::DatabaseFailed) => {
                return Err(Failure::Store(store::Error::new("testing", ErrorClass::Full, "no room")));
            }
            None => {}
        }
        let Connection::Sqlite(connection) = tx.connection();
        for run in &runs {
            match run {
                Run::Well => {}
                Run::InCompany if runs.len() == 1 => {}
                Run::Retry | Run::InCompany => return Err(Failure::Retry("busy".to_owned())),
                Run::Permanent => return Err(Failure::Permanent("unknown product".to_owned())),
                Run::Constraint => {
                    sqlx::query("INSERT INTO lines VALUES (NULL)").execute(&mut *connection).await?;
                }
                Run::AtCommit => {
                    sqlx::query("INSERT INTO lines VALUES ('unknown')").execute(&mut *connection).await?;
                }
                // Without the message that the hook of a panic would print for each.
                Run::Panic => std::panic::resume_unwind(Box::new("a bug")),
            }
        }
        Ok(())
    }
}
