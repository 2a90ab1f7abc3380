//! The figures of calls, by host. The hosts are those of the handler file, so that they are few and known at the start.

use std::time::Duration;

use ::metrics::{Counter, Gauge, Histogram};

use super::metrics::Metrics;
use crate::model::label::{Label, label};

pub(super) const DURATION: &str = "order_processor_call_duration_seconds";
const TOTAL: &str = "order_processor_calls_total";
const AWAY: &str = "order_processor_host_away";
/// The label with the host.
pub const HOST: &str = "host";

label! {
    /// What a call meant for its order.
    pub enum CallResult: "result" {
        Success = "success",
        Retry = "retry",
        DeadLetter = "dead-letter",
        /// The host was away: the order waits.
        Away = "away",
    }
}

/// The figures of one host, at zero.
pub struct HostMetrics {
    calls: Vec<Counter>,
    duration: Histogram,
    away: Gauge,
}

impl Metrics {
    /// The figures of this host. The name has no path, because everybody may read metrics.
    pub fn host(&self, name: &str) -> HostMetrics {
        self.register(|| {
            ::metrics::describe_counter!(
                TOTAL,
                "Calls that ended, by host and by result: success, retry, dead-letter, or away, when the order waits."
            );
            ::metrics::describe_histogram!(DURATION, "Time from the start of a call to its answer, or to its failure.");
            ::metrics::describe_gauge!(AWAY, "1 while the host is away and its orders wait.");
            let (host, key) = (name.to_owned(), CallResult::KEY);
            let counter = |result: &CallResult| ::metrics::counter!(TOTAL, HOST => host.clone(), key => result.name());
            HostMetrics {
                calls: CallResult::ALL.iter().map(counter).collect(),
                duration: ::metrics::histogram!(DURATION, HOST => host.clone()),
                away: ::metrics::gauge!(AWAY, HOST => host.clone()),
            }
        })
    }
}

impl HostMetrics {
    pub fn record(&self, result: CallResult, took: Duration) {
        self.calls[result.index()].increment(1);
        self.duration.record(took.as_secs_f64());
    }

    pub fn set_away(&self, away: bool) {
        self.away.set(if away { 1.0 } else { 0.0 });
    }
}
