//! The daemons and the endpoints in `examples/`, as processes.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::nats::headers;
use crate::support::{Broker, DaemonSpec, Db, PATIENCE, eventually, free_port};

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

/// An endpoint of `examples/endpoints` on a free port, until it is dropped.
struct Endpoint {
    child: Child,
    port: u16,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Endpoint {
    async fn start(program: &str, script: &str, store: &Path) -> Option<Self> {
        let port = free_port();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/endpoints").join(script);
        let child = Command::new(program).arg(script).arg(port.to_string()).arg(store).stdout(Stdio::null()).spawn();
        let Ok(child) = child else {
            eprintln!("NOT TESTED: there is no {program} here");
            return None;
        };
        eventually("the endpoint listens", PATIENCE, async || TcpStream::connect(("127.0.0.1", port)).await.map(drop))
            .await;
        Some(Self { child, port })
    }

    /// The answer to a request with this key.
    async fn post(&self, key: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let length = body.len();
        let head = "POST /orders HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n";
        let request = format!("{head}Idempotency-Key: \"{key}\"\r\nContent-Length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        // Python closes only after a request with this header, which is the end of the answer.
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

/// Sends orders through the daemon. One of them is not an order, and all come twice.
async fn shop(program: &str, script: &str, sales: impl AsyncFn(&Path) -> String) {
    let (server, broker) = Broker::story().await;
    let spec = DaemonSpec::new(server.url());
    let store = spec.folder().join("sales");
    let Some(endpoint) = Endpoint::start(program, script, &store).await else { return };
    let file = spec.folder().join("handler.toml");
    let url = format!("http://127.0.0.1:{}/orders", endpoint.port);
    std::fs::write(&file, format!("[[route]]\nsubject = \"ORDERS.>\"\n[route.http]\nurl = \"{url}\"\n")).unwrap();
    let spec = spec.set("handler.file", file);
    for (id, payload) in [("o-1", r#"{"customer": "anna", "cents": 1250}"#), ("o-2", "Order Data 2")] {
        broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", id)]), payload.into()).await;
    }
    let mut daemon = spec.start();
    broker.acknowledged(2).await;
    daemon.drain().await;
    assert_eq!(spec.db().texts("SELECT id FROM processed_ids").await, ["o-1"]);
    let error = &spec.db().texts("SELECT error FROM dead_letters").await[0];
    assert!(error.contains("HTTP 422") && error.contains("whole number at cents"), "{error}");
    let again = endpoint.post("o-1", r#"{"customer": "anna", "cents": 1250}"#).await;
    assert!(again.starts_with("HTTP/1.1 200") && again.ends_with("known"), "{again}");
    assert_eq!(sales(&store).await, "o-1 anna 1250");
}

#[tokio::test]
async fn the_endpoint_in_python_stores_each_order_once() {
    shop("python3", "shop.py", async |store| {
        Db::at(store.to_owned()).texts("SELECT key || ' ' || customer || ' ' || cents FROM sales").await.join("\n")
    })
    .await;
}

#[tokio::test]
async fn the_endpoint_in_node_stores_each_order_once() {
    shop("node", "shop.mjs", async |store| {
        let lines = std::fs::read_to_string(store).unwrap();
        let sales = lines.lines().filter(|line| !line.is_empty()).map(|line| {
            let sale: serde_json::Value = serde_json::from_str(line).unwrap();
            format!("{} {} {}", sale["key"].as_str().unwrap(), sale["customer"].as_str().unwrap(), sale["cents"])
        });
        sales.collect::<Vec<_>>().join("\n")
    })
    .await;
}
