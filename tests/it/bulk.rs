//! Much at once: large messages, and the same ones again and again.

use std::time::Instant;

use async_nats::HeaderMap;

use crate::support::{Broker, Daemon, DaemonSpec};

/// The most memory that the process has had so far.
fn memory_peak(worker: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", worker.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn memory_is_bounded_by_the_bytes_of_a_batch() {
    const MIB: usize = 1024 * 1024;
    const MESSAGES: u64 = 200;
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("batch.max_bytes", "8MiB");
    // As large as the server allows: the subject counts as well.
    let payload = vec![b'x'; MIB - 1024];
    let mut worker = spec.start();
    worker.ready().await;
    let before = memory_peak(&worker);
    worker.freeze();
    for _ in 0..MESSAGES {
        broker.publish_to("ORDERS.new", HeaderMap::new(), payload.clone()).await;
    }
    worker.thaw();
    broker.acknowledged(MESSAGES).await;
    let grown = memory_peak(&worker) - before;
    println!("{} MiB at rest, {} MiB more for {MESSAGES} messages of 1 MiB", before / MIB as u64, grown / MIB as u64);
    // One batch that waits, one in its transaction, the copies on the way in and out: about six times, never all of it.
    assert!(grown < 10 * 8 * MIB as u64, "{grown} bytes more");
    spec.db().applied_once(i64::try_from(MESSAGES).unwrap()).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_hundred_thousand_duplicates_in_a_row_are_acknowledged_without_effect() {
    const ORDERS: u64 = 5_000;
    const TIMES: u64 = 20;
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url()).set("inbox.id_pointer", "/id");
    // Without a Nats-Msg-Id the server stores each as a message of its own.
    for _ in 0..TIMES {
        for id in 0..ORDERS {
            broker.client.publish("ORDERS.new", format!("{{\"id\":{id}}}").into()).await.unwrap();
        }
        broker.client.flush().await.unwrap();
    }
    let began = Instant::now();
    let mut worker = spec.start();
    broker.acknowledged(ORDERS * TIMES).await;
    println!("{} messages in {:?}", ORDERS * TIMES, began.elapsed());
    spec.db().applied_once(i64::try_from(ORDERS).unwrap()).await;
    worker.metric("outcomes_total{outcome=\"duplicate\"}", (ORDERS * (TIMES - 1)) as f64).await;
    worker.ready().await;
    worker.drain().await;
}
