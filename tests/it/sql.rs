//! The SQL handler: a handler file and the user's own tables, from the outside.

use crate::support::nats::headers;
use crate::support::{Broker, DaemonSpec, NatsServer};

mod check;
mod failures;
mod kills;
mod orders;
mod same;

/// The user's tables in most tests.
pub const TABLES: &str = "
CREATE TABLE sales (id TEXT PRIMARY KEY, cents INTEGER NOT NULL CHECK (cents >= 0), note TEXT, tenant TEXT, region TEXT) STRICT;
CREATE TABLE stock (sku TEXT PRIMARY KEY, qty INTEGER NOT NULL) STRICT;
";

/// One statement for each order.
pub const SALES: &str = r#"
[sql]
migrations = "migrations"

[[route]]
subject = "ORDERS.*"
[route.params]
cents = { json = "/cents", type = "integer" }
[[route.sql]]
run = "INSERT INTO sales (id, cents) VALUES (:id, :cents)"
"#;

/// A server, and the place of a daemon with a handler file.
pub struct Shop {
    pub broker: Broker,
    pub spec: DaemonSpec,
    _server: NatsServer,
}

impl Shop {
    pub async fn open(file: &str, tables: &str) -> Self {
        let (server, broker) = Broker::story().await;
        let spec = with_files(DaemonSpec::new(server.url()), file, tables);
        Self { broker, spec, _server: server }
    }

    pub async fn order(&self, id: &str, payload: &str) {
        self.broker.publish_to("ORDERS.new", headers(&[("Nats-Msg-Id", id)]), payload.into()).await;
    }

    /// Processes what is pending.
    pub async fn work(&self) {
        self.spec.run_ok(&["run", "--until-idle"]).await;
    }

    pub async fn texts(&self, sql: &str) -> Vec<String> {
        self.spec.db().texts(sql).await
    }

    /// `reason: error` of each dead letter, by its id.
    pub async fn letters(&self) -> Vec<String> {
        self.texts("SELECT reason || ': ' || error FROM dead_letters ORDER BY id").await
    }
}

/// Puts a handler file and one migration beside the database.
pub fn with_files(spec: DaemonSpec, file: &str, tables: &str) -> DaemonSpec {
    let path = spec.folder().join("handler.toml");
    std::fs::write(&path, file).unwrap();
    let migrations = spec.folder().join("migrations");
    std::fs::create_dir_all(&migrations).unwrap();
    std::fs::write(migrations.join("0001_shop.sql"), tables).unwrap();
    spec.set("handler.file", path.as_os_str())
}
