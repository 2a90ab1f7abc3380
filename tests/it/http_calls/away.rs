//! A host that is away: nothing is spent, its orders wait, and it resumes by itself.

use std::time::Instant;

use super::*;

#[tokio::test]
async fn an_endpoint_that_is_away_for_a_while_spends_no_attempt() {
    let endpoint = Endpoint::start(|_| Act::status(200)).await;
    let (port, host) = (endpoint.port(), endpoint.host());
    let shop = Shop::new(&endpoint.url(), "", &[("retry.max_attempts", "1")]).await;
    shop.publish(1..=5).await;
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(5).await;
    drop(endpoint);
    shop.publish(6..=40).await;
    daemon.not_ready(&format!("handler: {host} is away: cannot connect: ")).await;
    daemon.metric(&format!("host_away{{host=\"{host}\"}}"), 1.0).await;
    // Several probes fail.
    tokio::time::sleep(Duration::from_secs(4)).await;
    shop.no_attempts().await;
    let endpoint = Endpoint::start_on(port, |_| Act::status(200)).await;
    shop.broker.acknowledged(40).await;
    daemon.metric(&format!("host_away{{host=\"{host}\"}}"), 0.0).await;
    assert_eq!(daemon.get("/readyz").await.0, 200);
    assert_eq!(shop.broker.consumer_info().await.delivered.consumer_sequence, 40, "each was delivered once");
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(6..=40));
    shop.no_attempts().await;
    assert_eq!(daemon.lines(&["a host is away"]), 1, "one line a minute");
}

#[tokio::test]
async fn an_endpoint_that_times_out_is_away_and_a_poison_order_is_not() {
    let endpoint = Endpoint::start(|_| Act::Hang).await;
    let shop = Shop::new(&endpoint.url(), "timeout = \"500ms\"\n", &[("retry.max_attempts", "2")]).await;
    shop.publish(1..=20).await;
    let mut daemon = shop.spec.start();
    daemon.not_ready("is away: no answer within the timeout").await;
    endpoint.called(18).await;
    shop.no_attempts().await;
    // One order still hangs, the others pass.
    endpoint.now(|seen| if seen.key() == "o-7" { Act::Hang } else { Act::status(200) });
    shop.processed(19).await;
    for n in 21..=200 {
        if shop.spec.db().count("dead_letters").await == 1 {
            break;
        }
        shop.order(&format!("o-{n}")).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    shop.letters(1).await;
    daemon.drain().await;
    assert_eq!(shop.spec.db().texts("SELECT id FROM dead_letters").await, ["o-7"]);
}

#[tokio::test]
async fn retry_after_is_obeyed_by_all_orders_of_the_host() {
    let busy = |value: &'static str| move |_: &_| Act::with(503, "Retry-After", value);
    let endpoint = Endpoint::start(busy("4")).await;
    let shop = Shop::new(&endpoint.url(), "concurrency = 2\n", &[("retry.max_attempts", "1")]).await;
    shop.publish(1..=10).await;
    let mut daemon = shop.spec.start();
    daemon.not_ready("is away: HTTP 503").await;
    endpoint.called(3).await;
    let seen = endpoint.seen();
    let wait = seen[2].at - seen[0].at;
    assert!((Duration::from_millis(3_900)..Duration::from_secs(8)).contains(&wait), "{wait:?}");
    // Rubbish, a date in the past: the daemon's own time, from one second on.
    let rubbish = ["soon", "Sun, 06 Nov 1994 08:49:37 GMT"];
    endpoint.now(move |seen| Act::with(429, "Retry-After", rubbish[usize::from(seen.key() == "o-4")]));
    endpoint.called(4).await;
    endpoint.now(|_| Act::status(200));
    shop.broker.acknowledged(10).await;
    shop.no_attempts().await;
    daemon.drain().await;
}

#[tokio::test]
async fn each_probe_is_another_order() {
    let endpoint = Endpoint::start(|seen| if seen.key() == "o-1" { Act::Hang } else { Act::status(200) }).await;
    let shop = Shop::new(&endpoint.url(), "timeout = \"300ms\"\nconcurrency = 1\n", &[]).await;
    shop.publish(1..=10).await;
    let mut daemon = shop.spec.start();
    shop.processed(9).await;
    daemon.drain().await;
    let keys: Vec<String> = endpoint.seen().iter().take(3).map(|seen| seen.key().to_owned()).collect();
    assert_eq!(keys[..2], ["o-1", "o-2"]);
}

#[tokio::test]
async fn pulling_stops_when_half_of_the_prefetch_waits() {
    let endpoint = Endpoint::start(|_| Act::status(503)).await;
    let file = format!(
        "[[route]]\nsubject = \"ORDERS.new\"\n[route.http]\nurl = \"{}\"\n[[route]]\nsubject = \"ORDERS.*\"\nrecord = true\n",
        endpoint.url()
    );
    let shop = Shop::with_file(&file, &[("batch.max_messages", "20")], consumer_config()).await;
    shop.publish(1..=5).await;
    let mut daemon = shop.spec.start();
    daemon.not_ready("5 orders wait").await;
    // Other routes continue.
    shop.broker.publish_to("ORDERS.other", headers(&[]), b"other".to_vec()).await;
    shop.spec.db().has("orders", 1).await;
    shop.publish(6..=60).await;
    eventually("pulling stops", PATIENCE, async || at_least(shop.broker.consumer_info().await.num_ack_pending, 10))
        .await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let out = shop.broker.consumer_info().await.num_ack_pending;
        assert!(out <= 30, "{out} deliveries are held");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    endpoint.now(|_| Act::status(200));
    shop.broker.acknowledged(61).await;
    shop.no_attempts().await;
    daemon.drain().await;
}
