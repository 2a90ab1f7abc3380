//! Whether the server permits what a bound daemon does. The check takes no message away from another client.

use std::time::Duration;

use super::connection::CommandClient;
use super::error::Error;
use super::link::Link;
use super::look::look;
use crate::config::{self, Config};

/// Inside the client, the answer to a later request may overtake a denial by at most so much.
const DENIED_WITHIN: Duration = Duration::from_millis(200);

/// Makes the subscriptions of the daemon, beside the one for replies that the command has: a server may limit their number.
///
/// # Errors
/// [`Error::Denied`] if the server refuses one of them.
pub async fn to_subscribe(command: &CommandClient, config: &Config) -> Result<(), Error> {
    let tried = async {
        let _link = Link::new(config, command.client.clone()).await?;
        // A subscription has no answer, so a request follows that has one.
        look(&command.client, &config.consumer.stream, &config.consumer.name).await?;
        tokio::time::sleep(DENIED_WITHIN).await;
        Ok(())
    };
    command.denials.answer(tried).await?
}

/// Sends a pull that the server must refuse: its heartbeat is longer than the server allows.
///
/// # Errors
/// [`Error::Denied`] without the permission.
pub async fn to_pull(command: &CommandClient, names: &config::ConsumerNames) -> Result<(), Error> {
    const REFUSED: &str = r#"{"batch":1,"expires":1000000000,"idle_heartbeat":1000000000}"#;
    let subject = command.client.api(&format!("CONSUMER.MSG.NEXT.{}.{}", names.stream, names.name));
    let answer = command.denials.answer(command.client.request(subject, REFUSED.into())).await?;
    let no_answer = |error: String| Error::NoAnswer { asked: "a pull", error };
    answer.map(|_| ()).map_err(|error| no_answer(error.to_string()))
}

/// Sends in-progress for message 0. No such message exists, so this changes nothing (nats-server 2.15; an ack would count as
/// activity).
///
/// # Errors
/// [`Error::Denied`] without the permission.
pub async fn to_acknowledge(command: &CommandClient, names: &config::ConsumerNames) -> Result<(), Error> {
    let subject = format!("$JS.ACK.{}.{}.1.0.0.0.0", names.stream, names.name);
    let tried = async {
        command.client.publish(subject, "+WPI".into()).await.map_err(|_| Error::ClientDead)?;
        // An acknowledgement has no answer, so a request follows that has one.
        look(&command.client, &names.stream, &names.name).await?;
        tokio::time::sleep(DENIED_WITHIN).await;
        Ok(())
    };
    command.denials.answer(tried).await?
}
