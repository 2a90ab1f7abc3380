//! Processes that are killed between a call and its commit, and databases that fail there.

use super::*;

#[tokio::test]
async fn killed_between_200_and_commit_is_called_again_with_the_same_key() {
    let endpoint = Endpoint::start(|_| Act::Slow(Duration::from_secs(1), Act::status(200).into())).await;
    let shop = Shop::new(&endpoint.url(), "", &[]).await;
    shop.publish(1..=3).await;
    let mut daemon = shop.spec.start();
    endpoint.called(3).await;
    let lock = shop.spec.db().lock().await;
    eventually("all are answered", PATIENCE, async || equal(endpoint.running(), 0)).await;
    daemon.not_ready("database: ").await;
    daemon.kill9();
    drop(lock);
    let mut daemon = shop.spec.start();
    shop.broker.acknowledged(3).await;
    daemon.drain().await;
    shop.processed(3).await;
    assert_eq!(endpoint.keys(), (1..=3).map(|n| (format!("o-{n}"), 2)).collect());
    assert!(endpoint.seen().iter().all(|seen| seen.attempt() == 1), "a restart is not an attempt");
}

#[tokio::test]
async fn a_database_that_is_locked_after_200_commits_later_without_a_second_call() {
    let endpoint = Endpoint::start(|_| Act::Slow(Duration::from_secs(2), Act::status(200).into())).await;
    let shop = Shop::new(&endpoint.url(), "", &[]).await;
    shop.publish(1..=3).await;
    let mut daemon = shop.spec.start();
    endpoint.called(3).await;
    // No transaction is open during a call.
    let lock = shop.spec.db().lock().await;
    daemon.not_ready("database: ").await;
    shop.publish(4..=4).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    drop(lock);
    shop.broker.acknowledged(4).await;
    daemon.drain().await;
    assert_eq!(endpoint.keys(), once(1..=4));
    shop.no_attempts().await;
}
