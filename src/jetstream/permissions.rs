//! Whether the server permits what a daemon does once it is bound. Found out without taking a message from anybody.

use std::time::Duration;

use super::connection::Visit;
use super::consumer::BindError;
use crate::config;

/// The answer to what was asked after it may overtake a denial inside the client, by this much at the most.
const HEARD_WITHIN: Duration = Duration::from_millis(200);

/// Pulls as the daemon does, with a request that the server must refuse: its heartbeat is longer than it allows.
///
/// # Errors
/// [`BindError::Denied`] when it is not permitted.
pub async fn to_pull(visit: &Visit, names: &config::Consumer) -> Result<(), BindError> {
    const REFUSED: &str = r#"{"batch":1,"expires":1000000000,"idle_heartbeat":1000000000}"#;
    let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", names.stream, names.name);
    let answer = visit.denials.answer(visit.client.request(subject, REFUSED.into())).await?;
    let no_answer = |error: String| BindError::NoAnswer { asked: "a pull", error };
    answer.map(|_| ()).map_err(|error| no_answer(error.to_string()))
}

/// Tells the server that we are at work on message 0. There is none, and the server leaves everything as it is
/// (nats-server 2.15: an ack would be noted as activity).
///
/// # Errors
/// [`BindError::Denied`] when it is not permitted.
pub async fn to_acknowledge(visit: &Visit, names: &config::Consumer) -> Result<(), BindError> {
    let subject = format!("$JS.ACK.{}.{}.1.0.0.0.0", names.stream, names.name);
    let tried = async {
        visit.client.publish(subject, "+WPI".into()).await.map_err(|_| BindError::ClientDead)?;
        // An acknowledgement has no answer of its own.
        super::consumer::look(&visit.client, &names.stream, &names.name).await?;
        tokio::time::sleep(HEARD_WITHIN).await;
        Ok(())
    };
    visit.denials.answer(tried).await?
}
