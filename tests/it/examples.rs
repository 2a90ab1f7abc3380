//! The daemons in `examples/`, as processes.

use std::path::Path;
use std::process::Command;

use crate::support::{Broker, DaemonSpec};

#[tokio::test]
async fn totals_adds_up_each_order_once_and_keeps_bad_ones() {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let binary = Path::new(env!("CARGO_BIN_EXE_order-processor")).with_file_name("examples").join("totals");
    assert!(binary.exists(), "{} is missing: run `cargo build --example totals`", binary.display());
    for payload in [r#"{"customer": "anna", "cents": 1250}"#, "Order Data 2", r#"{"customer": "anna", "cents": 750}"#] {
        broker.publish(payload).await;
    }
    let mut command = Command::new(binary);
    command.arg("run").env_clear().envs(spec.environment()).current_dir(spec.folder());
    let mut worker = spec.spawn(command, None);
    broker.acknowledged(3).await;
    worker.drain().await;
    assert_eq!(spec.db().texts("SELECT customer || ' ' || cents FROM totals").await, ["anna 2000"]);
    assert_eq!(spec.db().texts("SELECT error FROM dead_letters").await, ["the order is not JSON"]);
    assert_eq!(spec.db().count("processed_ids").await, 2);
}
