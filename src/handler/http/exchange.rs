//! One request and its answer, on a connection of the pool or on a new one, within one deadline.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::{Response, StatusCode};
use tokio::time::{Instant, timeout_at};

use super::answer::{Body, Received};
use super::connect::HttpConnection;
use super::request::Outgoing;

/// A connection ends after this time, so that a change of the address or of a file is seen within a minute.
const LIFE_MAX: Duration = Duration::from_secs(60);
/// Many servers close a connection that is idle for 5 s.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// The rest of a body that nobody needs is read for this long, so that the connection can be used again.
const REST_PATIENCE: Duration = Duration::from_secs(1);
const BODY_BYTES_MAX: usize = 64 * 1024;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Lost {
    /// The endpoint has seen nothing of the request.
    NotSent(String),
    /// The connection ended before the first byte of an answer. On a connection that was used before, the endpoint has probably
    /// closed it earlier.
    Silent(String),
    Unanswered(String),
}

/// Connections that are open and idle.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<HttpConnection>>);

impl Pool {
    /// A connection on which a call of this length still ends within [`LIFE_MAX`].
    pub fn take(&self, timeout: Duration) -> Option<HttpConnection> {
        let mut idle = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        idle.retain(|connection| {
            let fresh = now.duration_since(connection.idle_since) < IDLE_MAX;
            fresh && now.duration_since(connection.opened) + timeout <= LIFE_MAX && !connection.sender.is_closed()
        });
        // The one that was used last: the others become idle and end.
        idle.pop()
    }

    fn give_back(&self, mut connection: HttpConnection) {
        connection.idle_since = Instant::now();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }
}

/// Sends the request and reads the answer. A connection that can be used again goes back to the pool.
pub(super) async fn exchange(
    mut connection: HttpConnection,
    pool: &Pool,
    request: Outgoing,
    needs_body: impl Fn(StatusCode) -> bool,
    deadline: Instant,
) -> Result<Received, Lost> {
    let sending = async {
        connection.sender.ready().await.map_err(|error| Lost::NotSent(lost(&error)))?;
        connection.sender.try_send_request(request).await.map_err(|mut error| {
            let never_sent = error.take_message().is_some();
            let error = error.into_error();
            match (never_sent, error.is_parse()) {
                (true, _) => Lost::NotSent(lost(&error)),
                (false, true) => Lost::Unanswered(format!("the answer is not HTTP: {error}")),
                (false, false) => Lost::Silent(lost(&error)),
            }
        })
    };
    let timed_out = |_| Lost::Unanswered("no answer within the timeout".to_owned());
    let response = timeout_at(deadline, sending).await.map_err(timed_out)??;
    let needs_body = needs_body(response.status());
    let is_failure = !response.status().is_success();
    let (received, is_whole) = receive(response, needs_body || is_failure, deadline).await;
    if is_whole {
        pool.give_back(connection);
    }
    if let (true, Body::Part(_, CUT_BY_TIME | CUT_BY_LOSS)) = (needs_body, &received.body) {
        return Err(Lost::Unanswered("the answer is incomplete".to_owned()));
    }
    Ok(received)
}

const CUT_BY_TIME: &str = "did not end within the timeout";
const CUT_BY_LOSS: &str = "ended too early, because the connection was lost";

/// Reads the body up to its limit. `wanted`: somebody looks at it, so it may take until the deadline.
async fn receive(response: Response<Incoming>, wanted: bool, deadline: Instant) -> (Received, bool) {
    let (head, mut body) = response.into_parts();
    let patience = if wanted { deadline } else { deadline.min(Instant::now() + REST_PATIENCE) };
    let mut bytes = Vec::new();
    let cut = loop {
        match timeout_at(patience, body.frame()).await {
            Ok(None) => break None,
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else { continue };
                let room = BODY_BYTES_MAX - bytes.len();
                bytes.extend_from_slice(&data[..data.len().min(room)]);
                if data.len() > room {
                    break Some("has more than 64 KiB");
                }
            }
            Ok(Some(Err(_))) => break Some(CUT_BY_LOSS),
            Err(_) => break Some(CUT_BY_TIME),
        }
    };
    let body = match cut {
        None => Body::Whole(bytes),
        Some(why) => Body::Part(bytes, why),
    };
    (Received { status: head.status, headers: head.headers, body }, cut.is_none())
}

fn lost(error: &hyper::Error) -> String {
    format!("the connection was lost before the answer: {}", crate::model::text::chain(error))
}
