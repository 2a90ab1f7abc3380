//! JetStream in another domain, or behind the prefix under which another account exports it.

use std::time::Duration;

use async_nats::ConnectOptions;

use crate::support::nats::{ServerSpec, consumer_config, stream_config};
use crate::support::{Broker, Daemon, DaemonSpec, NatsServer, PATIENCE, equal, eventually, free_port};

/// A hub, and a leaf node with its own JetStream.
async fn hub_and_leaf() -> (NatsServer, NatsServer) {
    let port = free_port();
    let hub = NatsServer::with(ServerSpec {
        config: format!("server_name: hub\nleafnodes {{ listen: \"127.0.0.1:{port}\" }}"),
        jetstream: "domain: hub".into(),
    });
    let hub = hub.await;
    let leaf = NatsServer::with(ServerSpec {
        config: format!("server_name: leaf\nleafnodes {{ remotes: [ {{ url: \"nats-leaf://127.0.0.1:{port}\" }} ] }}"),
        jetstream: "domain: leaf".into(),
    });
    (hub, leaf.await)
}

/// The whole life of some orders: every command, the pulls and the acknowledgements.
async fn works(spec: &DaemonSpec, broker: &Broker) {
    eventually("JetStream is there", PATIENCE, async || {
        let checked = spec.run(&["check"]).await;
        if checked.code == Some(0) { Ok(()) } else { Err(checked) }
    })
    .await;
    broker.publish_numbered(1..=5).await;
    let mut worker: Daemon = spec.start();
    worker.ready().await;
    broker.acknowledged(5).await;
    spec.db().applied_once(5).await;
    spec.run_ok(&["status"]).await;
    spec.run_ok(&["audit"]).await;
    worker.drain().await;
}

#[tokio::test]
async fn a_daemon_on_a_leaf_node_processes_the_stream_of_the_hub() {
    let (hub, leaf) = hub_and_leaf().await;
    let broker = Broker::connect(&hub).await;
    broker.create(stream_config(), consumer_config()).await;
    let spec = DaemonSpec::new(leaf.url());

    // Without the setting, nothing is created on the leaf, where it would get a copy of each order.
    let checked = spec.run(&["check"]).await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(checked.stdout.contains("stream ORDERS does not exist in JetStream domain leaf"), "{checked:?}");
    assert!(checked.stdout.contains("nats.domain"), "{checked:?}");
    let setup = spec.run(&["setup"]).await;
    assert_eq!(setup.code, Some(1), "{setup:?}");
    assert!(setup.stderr.contains("JetStream domain leaf") && setup.stderr.contains("nats.domain"), "{setup:?}");
    Broker::connect(&leaf).await.jetstream.get_stream("ORDERS").await.unwrap_err();

    let spec = spec.set("nats.domain", "hub");
    works(&spec, &broker).await;
    spec.run_ok(&["publish", "--count", "2"]).await;
    spec.run_ok(&["run", "--until-idle"]).await;
    spec.db().applied_once(7).await;
    spec.run_ok(&["setup", "--update", "--ack-wait", "40s"]).await;
    assert_eq!(broker.consumer_info().await.config.ack_wait, Duration::from_secs(40));
}

#[tokio::test]
async fn setup_creates_a_stream_in_the_domain_that_is_set() {
    let (hub, leaf) = hub_and_leaf().await;
    let spec = DaemonSpec::new(leaf.url()).set("nats.domain", "leaf");
    spec.run_ok(&["setup"]).await;
    Broker::connect(&leaf).await.consumer_info().await;
    Broker::connect(&hub).await.jetstream.get_stream("ORDERS").await.unwrap_err();
}

#[tokio::test]
async fn a_daemon_processes_the_stream_that_another_account_exports() {
    let config = r#"
accounts {
  ORDERS: {
    jetstream: enabled, users: [ {user: owner, password: owner} ]
    exports: [ {service: "$JS.API.>", response_type: stream}, {service: "$JS.ACK.ORDERS.order-processor.>"} ]
  }
  SHOP: {
    users: [ {user: shop, password: shop} ]
    imports: [
      {service: {account: ORDERS, subject: "$JS.API.>"}, to: "JS.orders.API.>"}
      {service: {account: ORDERS, subject: "$JS.ACK.ORDERS.order-processor.>"}}
    ]
  }
}"#;
    let server = NatsServer::with(ServerSpec { config: config.into(), ..ServerSpec::default() }).await;
    let owner = ConnectOptions::with_user_and_password("owner".into(), "owner".into());
    let broker = Broker::connect_with(&server, owner).await;
    broker.create(stream_config(), consumer_config()).await;
    let spec = DaemonSpec::new(server.url().replace("nats://", "nats://shop:shop@"));
    let checked = spec.run(&["check"]).await;
    assert!(checked.stdout.contains("nats.api_prefix"), "{checked:?}");
    works(&spec.set("nats.api_prefix", "JS.orders.API"), &broker).await;
}

#[tokio::test]
async fn a_domain_and_a_prefix_together_are_refused() {
    let spec = DaemonSpec::new("nats://127.0.0.1:9").set("nats.domain", "hub").set("nats.api_prefix", "JS.orders.API");
    let finished = spec.run(&["check"]).await;
    assert_eq!(finished.code, Some(2), "{finished:?}");
    assert!(finished.stderr.contains("set together with nats.domain"), "{finished:?}");
    assert!(equal(finished.complaints().len(), 1).is_ok(), "{finished:?}");
}
