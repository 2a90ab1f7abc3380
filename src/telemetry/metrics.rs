//! Every number that Prometheus may read, as handles in one value.
//!
//! The recorder belongs to that value and is never made the global one: several daemons can live in one process without
//! adding to each other's counters, and a cached handle costs a few nanoseconds where the macros look it up each time.

use std::marker::PhantomData;

use ::metrics::{Counter, Gauge, Histogram, SharedString};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use metrics_process::Collector;

use crate::model::label::{Label, label};
use crate::model::outcome::{AckKind, OutcomeKind, Reason};
use crate::store::ErrorClass;
use crate::telemetry::calls;
use crate::telemetry::status::Component;

/// Declares [`Metrics`] as `field: kind = exposed name, help text`. One list, so that no metric can lack its help text
/// or be absent until its first use, which would keep alerts on it from ever firing.
macro_rules! declare_metrics {
    ($($field:ident: $kind:ty = $name:literal, $help:literal;)*) => {
        /// The metrics of one daemon; all of them are exposed, at zero, from the start.
        pub struct Metrics {
            $(#[doc = $help] pub $field: $kind,)*
            recorder: PrometheusRecorder,
            process: Collector,
        }

        impl Metrics {
            /// Registers every metric with a recorder of its own.
            pub fn new() -> Self {
                let recorder = build_recorder();
                let process = Collector::default();
                ::metrics::with_local_recorder(&recorder, || {
                    process.describe();
                    register_build_info();
                });
                Self {
                    $($field: ::metrics::with_local_recorder(&recorder, || <$kind>::register($name, $help)),)*
                    recorder,
                    process,
                }
            }
        }
    };
}

declare_metrics! {
    deliveries: Counter = "order_processor_deliveries_total",
        "Deliveries received from the server, redeliveries included.";
    redeliveries: CounterBy<SeenBy> = "order_processor_redeliveries_total",
        "Repetitions: server counts redeliveries (delivered above 1), inbox counts messages with a known id, also those that a publisher sent twice.";
    outcomes: CounterBy<OutcomeKind> = "order_processor_outcomes_total",
        "What the messages came to, counted once the outcome was durable.";
    acks: CounterBy<AckKind> = "order_processor_acks_total",
        "Acknowledgements sent to the server, by kind.";
    conflicts_dropped: Counter = "order_processor_conflicts_dropped_total",
        "Messages with another subject or payload under a used id, dropped because inbox.on_conflict is duplicate.";
    missing_ids: Counter = "order_processor_missing_ids_total",
        "Messages without the id that inbox.id_pointer or inbox.id_scope expects, identified by their place in the stream instead.";
    dead_letters_total: CounterBy<Reason> = "order_processor_dead_letters_total",
        "Messages put into the dead letters since the start, by reason.";
    nats_reconnects: Counter = "order_processor_nats_reconnects_total",
        "Connections to the server made again after the first one.";
    nats_errors: CounterBy<NatsErrorKind> = "order_processor_nats_errors_total",
        "Errors of the connection, of pulls and of requests to the server, by kind.";
    consumer_rebinds: Counter = "order_processor_consumer_rebinds_total",
        "Times that the consumer was bound again because it or its stream was deleted, recreated or reset.";
    messages_expired: Counter = "order_processor_messages_expired_total",
        "Messages that were gone from the stream, by its limits, a purge or a deletion, before they were processed.";
    stream_rewinds: Counter = "order_processor_stream_rewinds_total",
        "Times that the stream ended before it did earlier: its tail was lost, or it was restored.";
    db_errors: CounterBy<ErrorClass> = "order_processor_db_errors_total",
        "Errors of the database, by class.";
    ids_pruned: Counter = "order_processor_ids_pruned_total",
        "Processed ids removed because their message can no longer be delivered again.";
    outbox_published: Counter = "order_processor_outbox_published_total",
        "Messages of the outbox that their stream has stored, or had before.";
    outbox_duplicates: Counter = "order_processor_outbox_duplicates_total",
        "New messages of the outbox that were not stored, because the stream had a message with the same id.";
    outbox_to_own_consumer: Counter = "order_processor_outbox_to_own_consumer_total",
        "Messages of the outbox to the consumer of this daemon: they come back as orders.";
    log_lines_dropped: Counter = "order_processor_log_lines_dropped_total",
        "Lines of the log that were dropped because stderr was full or failed.";

    consumer_ack_floor_stream_seq: Gauge = "order_processor_consumer_ack_floor_stream_seq",
        "Stream sequence up to which everything is acknowledged, as the server reports it.";
    consumer_ack_floor_consumer_seq: Gauge = "order_processor_consumer_ack_floor_consumer_seq",
        "Consumer sequence up to which everything is acknowledged, as the server reports it.";
    consumer_delivered_stream_seq: Gauge = "order_processor_consumer_delivered_stream_seq",
        "Highest stream sequence that the server delivered to the consumer.";
    consumer_num_pending: Gauge = "order_processor_consumer_num_pending",
        "Messages in the stream that the server has not delivered to the consumer yet.";
    consumer_num_ack_pending: Gauge = "order_processor_consumer_num_ack_pending",
        "Messages delivered and not acknowledged yet, as the server reports it.";
    consumer_num_redelivered: Gauge = "order_processor_consumer_num_redelivered",
        "Messages not acknowledged yet that were delivered more than once, as the server reports it.";
    consumer_num_waiting: Gauge = "order_processor_consumer_num_waiting",
        "Pull requests that wait at the server.";
    other_pulls: Gauge = "order_processor_other_pulls",
        "Pull requests on the consumer that are not from this daemon: another client gets a part of the orders.";
    consumer_max_ack_pending: Gauge = "order_processor_consumer_max_ack_pending",
        "Messages that may be delivered and not acknowledged at a time, as the consumer is configured; 0 for no limit.";
    consumer_paused: Gauge = "order_processor_consumer_paused",
        "1 while the server has paused the consumer and delivers nothing.";
    stream_first_seq: Gauge = "order_processor_stream_first_seq",
        "Sequence of the first message that the stream still holds.";
    stream_last_seq: Gauge = "order_processor_stream_last_seq",
        "Sequence of the last message of the stream.";
    consumer_info_timestamp_seconds: Gauge = "order_processor_consumer_info_timestamp_seconds",
        "Unix time at which the server's report on consumer and stream was taken; 0 before the first.";
    committed_stream_seq: Gauge = "order_processor_committed_stream_seq",
        "Highest stream sequence whose outcome this process has committed.";
    held_deliveries: Gauge = "order_processor_held_deliveries",
        "Deliveries received and not acknowledged yet by this process.";
    parked_messages: Gauge = "order_processor_parked_messages",
        "Messages that failed and wait for their retry, handed back by this process.";
    missing_messages: Gauge = "order_processor_missing_messages",
        "Messages that the ack floor has passed and that are neither processed nor dead letters, by the last audit.";
    audited_through_stream_seq: Gauge = "order_processor_audited_through_stream_seq",
        "Stream sequence up to which the daemon has checked that no message is missing, or counted it as missing.";
    oldest_pending_seconds: Gauge = "order_processor_oldest_pending_seconds",
        "Age of the oldest message that the ack floor has not passed; 0 when there is none.";
    dead_letters: Gauge = "order_processor_dead_letters",
        "Dead letters in the database.";
    processed_ids: Gauge = "order_processor_processed_ids",
        "Processed ids in the database.";
    outbox_rows: Gauge = "order_processor_outbox_rows",
        "Messages in the outbox that are not published yet.";
    outbox_oldest_seconds: Gauge = "order_processor_outbox_oldest_seconds",
        "Age of the oldest message in the outbox; 0 when there is none.";
    database_bytes: Gauge = "order_processor_database_bytes",
        "Size of the database file.";
    wal_bytes: Gauge = "order_processor_wal_bytes",
        "Size of the database's write-ahead log.";
    nats_connected: Gauge = "order_processor_nats_connected",
        "1 while connected to the server.";
    ready: Gauge = "order_processor_ready",
        "1 while /readyz answers ready.";
    problem: GaugeBy<Component> = "order_processor_problem",
        "1 while this component keeps the daemon from being ready, as /readyz lists it.";
    draining: Gauge = "order_processor_draining",
        "1 from the first signal to stop.";
    paused: Gauge = "order_processor_paused",
        "1 while an operator's pause keeps the daemon from its work.";
    last_commit_timestamp_seconds: Gauge = "order_processor_last_commit_timestamp_seconds",
        "Unix time of the last commit of this process; 0 before the first.";

    commit_duration_seconds: Histogram = "order_processor_commit_duration_seconds",
        "Time from the start of a batch's transaction to its durable commit.";
    commit_batch_messages: Histogram = "order_processor_commit_batch_messages",
        "Messages in one commit.";
    end_to_end_seconds: Histogram = "order_processor_end_to_end_seconds",
        "Time from the publication of a message to the commit of its outcome.";
    shutdown_duration_seconds: Histogram = "order_processor_shutdown_duration_seconds",
        "Time from the first signal to stop to the end of the drain.";
}

impl Metrics {
    /// The text exposition, with a fresh look at the process itself. Takes milliseconds: not for an async thread.
    pub fn render(&self) -> String {
        ::metrics::with_local_recorder(&self.recorder, || self.process.collect());
        self.recorder.handle().render()
    }

    /// Runs `register` with the recorder of these metrics.
    pub(super) fn register<T>(&self, register: impl FnOnce() -> T) -> T {
        ::metrics::with_local_recorder(&self.recorder, register)
    }

    /// Folds the samples of the histograms into their buckets. To be called every few seconds: without it, or a scrape,
    /// samples pile up in memory.
    pub fn upkeep(&self) {
        self.recorder.handle().run_upkeep();
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// One counter for every value of a label.
pub struct CounterBy<L: Label> {
    counters: Vec<Counter>,
    label: PhantomData<L>,
}

impl<L: Label> CounterBy<L> {
    /// The index cannot be out of range: there is a counter for each of [`Label::ALL`], and a test holds the two
    /// together.
    pub fn increment(&self, label: L, by: u64) {
        self.counters[label.index()].increment(by);
    }
}

/// One gauge for every value of a label.
pub struct GaugeBy<L: Label> {
    gauges: Vec<Gauge>,
    label: PhantomData<L>,
}

impl<L: Label> GaugeBy<L> {
    /// For the index see [`CounterBy::increment`].
    pub fn set(&self, label: L, value: f64) {
        self.gauges[label.index()].set(value);
    }
}

/// A kind of metric that the local recorder can be asked for.
trait Register {
    fn register(name: &'static str, help: &'static str) -> Self;
}

impl Register for Counter {
    fn register(name: &'static str, help: &'static str) -> Self {
        ::metrics::describe_counter!(name, help);
        ::metrics::counter!(name)
    }
}

impl Register for Gauge {
    fn register(name: &'static str, help: &'static str) -> Self {
        ::metrics::describe_gauge!(name, help);
        ::metrics::gauge!(name)
    }
}

impl Register for Histogram {
    fn register(name: &'static str, help: &'static str) -> Self {
        ::metrics::describe_histogram!(name, help);
        ::metrics::histogram!(name)
    }
}

impl<L: Label> Register for CounterBy<L> {
    fn register(name: &'static str, help: &'static str) -> Self {
        ::metrics::describe_counter!(name, help);
        let counters = L::ALL.iter().map(|label| ::metrics::counter!(name, L::KEY => label.name())).collect();
        Self { counters, label: PhantomData }
    }
}

impl<L: Label> Register for GaugeBy<L> {
    fn register(name: &'static str, help: &'static str) -> Self {
        ::metrics::describe_gauge!(name, help);
        let gauges = L::ALL.iter().map(|label| ::metrics::gauge!(name, L::KEY => label.name())).collect();
        Self { gauges, label: PhantomData }
    }
}

fn register_build_info() {
    const NAME: &str = "order_processor_build_info";
    ::metrics::describe_gauge!(NAME, "1, with the version as a label.");
    ::metrics::gauge!(NAME, "version" => SharedString::const_str(env!("CARGO_PKG_VERSION"))).set(1.0);
}

/// From one fsync of a good disk to the patience of an operator.
const DURATION_SECONDS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

const BATCH_MESSAGES: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0];

/// A worker that was off over night finds orders that are hours old.
const END_TO_END_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
    14_400.0, 43_200.0, 86_400.0,
];

/// Without buckets of its own a histogram is exposed as a summary, which cannot be added up over instances.
fn build_recorder() -> PrometheusRecorder {
    let buckets = [
        ("order_processor_commit_duration_seconds", DURATION_SECONDS),
        ("order_processor_commit_batch_messages", BATCH_MESSAGES),
        ("order_processor_end_to_end_seconds", END_TO_END_SECONDS),
        ("order_processor_shutdown_duration_seconds", DURATION_SECONDS),
        (calls::DURATION, DURATION_SECONDS),
    ];
    buckets
        .into_iter()
        .fold(PrometheusBuilder::new(), |builder, (name, bounds)| {
            builder
                .set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)
                .expect("only an empty list of bounds is refused, and none of these is empty")
        })
        .build_recorder()
}

label! {
    /// Who noticed that a delivery was not the first of its message.
    pub enum SeenBy: "seen_by" {
        /// The server: `delivered` > 1.
        Server = "server",
        /// The inbox: the id was processed before.
        Inbox = "inbox",
    }
}

label! {
    /// Where an error of the server or of the way to it showed.
    pub enum NatsErrorKind: "kind" {
        /// We read too slowly and the client dropped messages.
        SlowConsumer = "slow_consumer",
        /// The server refuses us a subject.
        Permission = "permission",
        /// Any other error that the server sent.
        Server = "server",
        /// An error of the client itself.
        Client = "client",
        /// The server's heartbeat on a pull stayed away.
        Heartbeat = "heartbeat",
        /// A pull ended with an error.
        Pull = "pull",
        /// A request to the JetStream API failed.
        Request = "request",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTERS: &[&str] = &[
        "deliveries_total",
        "redeliveries_total",
        "outcomes_total",
        "acks_total",
        "conflicts_dropped_total",
        "missing_ids_total",
        "dead_letters_total",
        "nats_reconnects_total",
        "nats_errors_total",
        "consumer_rebinds_total",
        "messages_expired_total",
        "stream_rewinds_total",
        "db_errors_total",
        "ids_pruned_total",
        "outbox_published_total",
        "outbox_duplicates_total",
        "outbox_to_own_consumer_total",
        "log_lines_dropped_total",
    ];

    const GAUGES: &[&str] = &[
        "consumer_ack_floor_stream_seq",
        "consumer_ack_floor_consumer_seq",
        "consumer_delivered_stream_seq",
        "consumer_num_pending",
        "consumer_num_ack_pending",
        "consumer_num_redelivered",
        "consumer_num_waiting",
        "other_pulls",
        "consumer_max_ack_pending",
        "consumer_paused",
        "stream_first_seq",
        "stream_last_seq",
        "consumer_info_timestamp_seconds",
        "committed_stream_seq",
        "held_deliveries",
        "parked_messages",
        "missing_messages",
        "audited_through_stream_seq",
        "oldest_pending_seconds",
        "dead_letters",
        "processed_ids",
        "outbox_rows",
        "outbox_oldest_seconds",
        "database_bytes",
        "wal_bytes",
        "nats_connected",
        "ready",
        "problem",
        "draining",
        "paused",
        "last_commit_timestamp_seconds",
        "build_info",
    ];

    const HISTOGRAMS: &[&str] =
        &["commit_duration_seconds", "commit_batch_messages", "end_to_end_seconds", "shutdown_duration_seconds"];

    fn assert_declared(text: &str, name: &str, kind: &str) {
        let helps = text.lines().filter(|line| line.starts_with(&format!("# HELP order_processor_{name} "))).count();
        let types = text.lines().filter(|line| *line == format!("# TYPE order_processor_{name} {kind}")).count();
        assert_eq!((helps, types), (1, 1), "{name}: {kind}");
    }

    #[test]
    fn every_metric_is_exposed_at_zero_with_help_from_the_start() {
        let text = Metrics::new().render();
        for name in COUNTERS {
            assert_declared(&text, name, "counter");
        }
        for name in GAUGES {
            assert_declared(&text, name, "gauge");
        }
        for name in HISTOGRAMS {
            assert_declared(&text, name, "histogram");
            assert!(text.contains(&format!("\norder_processor_{name}_bucket{{le=\"+Inf\"}} 0\n")), "{name}");
        }
        let ours = text.lines().filter(|line| line.starts_with("order_processor_"));
        for line in ours.filter(|line| !line.contains("build_info")) {
            assert!(line.ends_with(" 0"), "{line}");
        }
        let declared = text.lines().filter(|line| line.starts_with("# TYPE order_processor_")).count();
        assert_eq!(declared, COUNTERS.len() + GAUGES.len() + HISTOGRAMS.len(), "nothing beyond the list");
    }

    #[test]
    fn the_build_and_the_process_are_exposed_with_help() {
        let text = Metrics::new().render();
        let build = format!("order_processor_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
        assert!(text.lines().any(|line| line == build));
        for name in ["process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"] {
            assert!(text.contains(&format!("# HELP {name} ")), "{name}");
            assert!(text.contains(&format!("\n{name} ")), "{name}");
        }
    }

    fn assert_label<L: Label>(text: &str, metric: &str) {
        for (index, label) in L::ALL.iter().enumerate() {
            assert_eq!(label.index(), index, "{metric}: ALL is in the order of index");
            let series = format!("order_processor_{metric}{{{}=\"{}\"}} 0", L::KEY, label.name());
            assert!(text.lines().any(|line| line == series), "{series}");
        }
    }

    #[test]
    fn every_value_of_a_label_is_a_series_at_zero_from_the_start() {
        let text = Metrics::new().render();
        assert_label::<SeenBy>(&text, "redeliveries_total");
        assert_label::<OutcomeKind>(&text, "outcomes_total");
        assert_label::<AckKind>(&text, "acks_total");
        assert_label::<Reason>(&text, "dead_letters_total");
        assert_label::<NatsErrorKind>(&text, "nats_errors_total");
        assert_label::<ErrorClass>(&text, "db_errors_total");
        assert_label::<Component>(&text, "problem");
    }

    #[test]
    fn two_values_in_one_process_count_apart() {
        let (one, other) = (Metrics::new(), Metrics::new());
        one.deliveries.increment(3);
        one.db_errors.increment(ErrorClass::Full, 2);
        one.commit_batch_messages.record(3.0);
        one.upkeep();
        let text = one.render();
        assert!(text.contains("order_processor_deliveries_total 3\n"));
        assert!(text.contains("order_processor_db_errors_total{class=\"full\"} 2\n"));
        assert!(text.contains("order_processor_commit_batch_messages_bucket{le=\"2\"} 0\n"));
        assert!(text.contains("order_processor_commit_batch_messages_bucket{le=\"5\"} 1\n"));
        assert!(other.render().contains("order_processor_deliveries_total 0\n"));
    }
}
