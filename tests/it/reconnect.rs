//! Connections that break, servers that restart or shut down: deliveries flow again within seconds.

use std::time::{Duration, Instant};

use async_nats::jetstream::consumer;
use async_nats::jetstream::stream;
use sqlx::Connection;

use crate::support::nats::{consumer_config, headers, stream_config};
use crate::support::{
    Broker, DaemonSpec, FaultProxy, NatsServer, PATIENCE, ServerSpec, at_least, equal, eventually, free_port,
};

/// A stall of pulling would be half a minute; a loaded machine takes a second or two.
const GAP_MAX: Duration = Duration::from_secs(10);

/// What was on its way when a connection broke comes again soon.
fn two_seconds() -> consumer::pull::Config {
    consumer::pull::Config { ack_wait: Duration::from_secs(2), ..consumer_config() }
}

/// Publishes ten orders and measures the time until the databases have `orders` in all.
async fn flow_again(broker: &Broker, specs: &[&DaemonSpec], orders: u64) -> Duration {
    let began = Instant::now();
    broker.publish_numbered(orders - 9..=orders).await;
    eventually("the orders are applied", PATIENCE, async || {
        let mut applied = 0;
        for spec in specs {
            applied += spec.db().count("orders").await.unsigned_abs();
        }
        equal(applied, orders)
    })
    .await;
    began.elapsed()
}

fn assert_short(what: &str, gaps: &[Duration]) {
    println!("{what}: deliveries flowed again after {gaps:?}");
    assert!(gaps.iter().all(|gap| *gap < GAP_MAX), "{what}: {gaps:?}");
}

#[tokio::test]
async fn after_every_reconnect_deliveries_flow_again_at_once() {
    let (server, broker) = Broker::with(two_seconds()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let spec = DaemonSpec::new(proxy.url());
    let mut worker = spec.start();
    worker.ready().await;
    let mut gaps = Vec::new();
    for cut in 1..=5 {
        proxy.cut();
        gaps.push(flow_again(&broker, &[&spec], cut * 10).await);
    }
    assert_short("one worker, five cuts", &gaps);

    // Busy with a commit, it polls nothing while the connection comes and goes.
    let writer = spec.db().lock().await;
    broker.publish_numbered(51..=60).await;
    worker.metric("held_deliveries", 10.0).await;
    for _ in 1..=4 {
        let before = worker.metrics().await.get("nats_reconnects_total").unwrap();
        proxy.cut();
        eventually("it is connected again", PATIENCE, async || {
            at_least(worker.metrics().await.get("nats_reconnects_total"), Some(before + 1.0))
        })
        .await;
    }
    writer.close().await.unwrap();
    let gap = flow_again(&broker, &[&spec], 70).await;
    assert_short("busy over four reconnects", &[gap]);
    broker.acknowledged(70).await;
    spec.db().applied_once(70).await;
    worker.drain().await;
}

#[tokio::test]
async fn two_workers_get_deliveries_at_once_after_every_reconnect() {
    let (server, broker) = Broker::with(two_seconds()).await;
    let proxy = FaultProxy::start(server.address()).await;
    let specs = [DaemonSpec::new(proxy.url()), DaemonSpec::new(proxy.url())];
    let mut workers = specs.each_ref().map(DaemonSpec::start);
    for worker in &mut workers {
        worker.ready().await;
    }
    let mut gaps = Vec::new();
    for cut in 1..=5 {
        proxy.cut();
        gaps.push(flow_again(&broker, &specs.each_ref(), cut * 10).await);
    }
    assert_short("two workers, five cuts", &gaps);
    broker.acknowledged(50).await;
    for worker in &mut workers {
        assert_eq!(worker.metrics().await.get("messages_expired_total"), Some(0.0), "the other one has the rest");
        worker.drain().await;
    }
}

/// Three servers that hold the stream together.
async fn cluster() -> Vec<NatsServer> {
    let routes = [(); 3].map(|()| free_port());
    let urls = routes.map(|port| format!("nats-route://127.0.0.1:{port}")).join(", ");
    let mut servers = Vec::new();
    for (number, port) in routes.iter().enumerate() {
        let config = format!(
            "server_name: s{number}\nlame_duck_grace_period: \"1s\"\nlame_duck_duration: \"30s\"\n\
             cluster {{\n  name: c\n  listen: \"127.0.0.1:{port}\"\n  routes: [{urls}]\n}}\n"
        );
        servers.push(NatsServer::with(ServerSpec { config, ..ServerSpec::default() }).await);
    }
    servers
}

#[tokio::test]
async fn lame_duck_mode_moves_the_worker_to_another_server_and_loses_nothing() {
    let servers = cluster().await;
    let broker = Broker::connect(&servers[2]).await;
    let replicated = stream::Config { num_replicas: 3, ..stream_config() };
    eventually("the cluster takes a stream", PATIENCE, async || {
        broker.jetstream.create_stream(replicated.clone()).await.map(drop).map_err(|error| error.to_string())
    })
    .await;
    broker.create_consumer(two_seconds()).await;
    // The other servers of the cluster it learns from this one.
    let spec = DaemonSpec::new(servers[0].url());
    let mut worker = spec.start();
    worker.ready().await;
    broker.publish_numbered(1..=100).await;
    broker.acknowledged(100).await;

    servers[0].lame_duck();
    let mut sent: u32 = 100;
    let mut unready = 0;
    eventually("it is connected to another server", PATIENCE, async || {
        sent += 1;
        let id = format!("order-{sent}");
        // While leaders change nobody takes a message; a publisher tries again.
        eventually("the stream takes an order", PATIENCE, async || {
            let (headers, payload) = (headers(&[("Nats-Msg-Id", &id)]), "Order Data".into());
            let publish = broker.jetstream.publish_with_headers("ORDERS.new", headers, payload).await;
            publish.map_err(|error| error.to_string())?.await.map_err(|error| error.to_string())
        })
        .await;
        unready += u32::from(worker.get("/readyz").await.0 != 200);
        at_least(worker.lines(&["INFO", "connected to the server"]), 2)
    })
    .await;
    broker.acknowledged(u64::from(sent)).await;
    spec.db().applied_once(i64::from(sent)).await;
    println!("{unready} of {} looks at the readiness said no", sent - 100);
    worker.logged(&["WARN", "lame duck mode"]).await;
    worker.ready().await;
    worker.drain().await;
}
