//! `/metrics`, `/livez`, `/readyz` and `/status` over HTTP. Shows what [`Health`] and [`Metrics`] contain and decides nothing.
//!
//! A client that can reach the port can do no harm: connections are limited in number and time, each serves one request, and a new
//! connection closes the oldest one at the limit.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::telemetry::Reminder;
use crate::telemetry::health::Health;
use crate::telemetry::metrics::Metrics;

/// Prometheus, a probe and an operator need three connections. At this limit, a new connection closes the oldest one. An answer takes
/// milliseconds, so the client of the oldest connection sends no request or does not read. No other client has to wait for it.
const CONNECTIONS_MAX: usize = 64;

/// How long a client may take over its request line and headers.
const HEADER_LIMIT: Duration = Duration::from_secs(3);

/// How long a connection may last in all, even if the client does not read the answer.
const CONNECTION_LIMIT: Duration = Duration::from_secs(15);

/// Request line and headers together; the smallest that hyper allows.
const HEADER_BYTES_MAX: usize = 8 * 1024;

/// The pause after a failed accept. Without the pause, a process that has no file descriptors left would repeat the error in a loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How long open connections may take after the stop of the server.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// Answers until `shutdown`, which must come after the drain: `/readyz` answers 503 while the daemon drains.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, health: Arc<Health>, shutdown: CancellationToken) {
    let router = router(metrics, health);
    let mut connections = JoinSet::new();
    let mut oldest_first: VecDeque<AbortHandle> = VecDeque::new();
    let mut reminder = Reminder::default();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => break,
            Some(ended) = connections.join_next() => report_panic(ended),
            accepted = listener.accept() => {
                oldest_first.retain(|connection| !connection.is_finished());
                if (accepted.is_err() || oldest_first.len() >= CONNECTIONS_MAX)
                    && let Some(oldest) = oldest_first.pop_front()
                {
                    oldest.abort();
                }
                match accepted {
                    Ok((stream, _)) => {
                        oldest_first.push_back(connections.spawn(serve_connection(stream, router.clone())));
                    }
                    Err(error) => {
                        if reminder.is_due(&error.to_string()) {
                            tracing::warn!(%error, "cannot accept an HTTP connection; probes may get no answer");
                        }
                        shutdown.run_until_cancelled(sleep(ACCEPT_PAUSE)).await;
                    }
                }
            }
        }
    }
    drop(listener);
    let rest = async {
        while let Some(ended) = connections.join_next().await {
            report_panic(ended);
        }
    };
    if timeout(STOP_LIMIT, rest).await.is_err() {
        tracing::debug!("HTTP connections were cut off at the end");
    }
}

/// Binds the port. Called first, so that a port in use ends the start before anything else begins.
pub async fn listen(listen: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(listen).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse(listen),
        _ => ListenError::Other { listen, source },
    })
}

/// The port cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    // The advice names the other daemon first: another port would let a second daemon of the same consumer start.
    #[error(
        "cannot listen on {0}, the value of http.listen: another process has the port; if that is a daemon of the same consumer, \
         do not start a second one; otherwise stop that process, or change http.listen"
    )]
    InUse(SocketAddr),
    #[error("cannot listen on {listen}, the value of http.listen")]
    Other { listen: SocketAddr, source: io::Error },
}

#[derive(Clone)]
struct Served {
    metrics: Arc<Metrics>,
    health: Arc<Health>,
}

/// `get` answers HEAD as well, and every other method with 405.
fn router(metrics: Arc<Metrics>, health: Arc<Health>) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .with_state(Served { metrics, health })
}

async fn metrics_text(State(Served { metrics, health }): State<Served>) -> Response {
    let rendered = tokio::task::spawn_blocking(move || {
        health.record(&metrics);
        metrics.render()
    });
    match rendered.await {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot render the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn livez(State(Served { health, .. }): State<Served>) -> Response {
    match health.is_live() {
        Ok(()) => "live\n".into_response(),
        Err(cause) => (StatusCode::SERVICE_UNAVAILABLE, format!("{cause}\n")).into_response(),
    }
}

async fn readyz(State(Served { health, .. }): State<Served>) -> Response {
    let problems = health.problems();
    if problems.is_empty() {
        return "ready\n".into_response();
    }
    let lines: String = problems.iter().map(|problem| format!("{problem}\n")).collect();
    (StatusCode::SERVICE_UNAVAILABLE, lines).into_response()
}

async fn status(State(Served { health, .. }): State<Served>) -> Response {
    match serde_json::to_string(&health.status()) {
        Ok(json) => ([(CONTENT_TYPE, "application/json")], json + "\n").into_response(),
        Err(error) => {
            tracing::error!(%error, "cannot write the status as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// One request, one answer. A connection that stays open would need another limit, and a scrape every few seconds gains nothing
/// from it.
async fn serve_connection(stream: TcpStream, router: Router) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .max_buf_size(HEADER_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match timeout(CONNECTION_LIMIT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "the HTTP connection failed"),
        Err(_) => tracing::debug!("the HTTP connection took too long"),
    }
}

fn report_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "the task of an HTTP connection failed");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Instant;

    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::task::JoinHandle;
    use tokio_util::sync::DropGuard;

    use super::*;
    use crate::telemetry::status::Component;

    struct TestServer {
        address: SocketAddr,
        health: Arc<Health>,
        shutdown: CancellationToken,
        task: JoinHandle<()>,
        _stop: DropGuard,
    }

    async fn start() -> TestServer {
        start_with(Health::new()).await
    }

    async fn start_with(health: Health) -> TestServer {
        let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Arc::new(health);
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(serve(listener, Arc::new(Metrics::new()), Arc::clone(&health), shutdown.clone()));
        let _stop = shutdown.clone().drop_guard();
        TestServer { address, health, shutdown, task, _stop }
    }

    impl TestServer {
        async fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).await.unwrap()
        }

        /// Sends the bytes and reads until the server closes.
        async fn send(&self, request: &[u8]) -> String {
            let mut stream = self.connect().await;
            stream.write_all(request).await.unwrap();
            read_to_end(&mut stream).await
        }

        async fn ask(&self, method: &str, path: &str) -> String {
            self.send(format!("{method} {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).await
        }

        fn become_ready(&self) {
            self.health.report(Component::Nats, Ok(()));
            self.health.report(Component::Consumer, Ok(()));
            self.health.report(Component::Database, Ok(()));
        }
    }

    /// A reset counts as closed: that is what a client gets whose request was cut short.
    async fn read_to_end(stream: &mut TcpStream) -> String {
        let mut answer = Vec::new();
        match stream.read_to_end(&mut answer).await {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
        String::from_utf8(answer).unwrap()
    }

    fn status_of(answer: &str) -> &str {
        answer.split(' ').nth(1).unwrap_or("none")
    }

    fn body_of(answer: &str) -> &str {
        answer.split_once("\r\n\r\n").unwrap().1
    }

    #[tokio::test]
    async fn readyz_names_every_problem_on_a_line_and_then_says_ready() {
        let server = start().await;
        server.become_ready();
        server.health.report(Component::Database, Err("disk full".to_owned()));
        server.health.report(Component::Acks, Err("permission violation".to_owned()));
        let answer = server.ask("GET", "/readyz").await;
        assert_eq!(status_of(&answer), "503");
        assert_eq!(body_of(&answer), "acks: permission violation\ndatabase: disk full\n");
        server.health.report(Component::Database, Ok(()));
        server.health.report(Component::Acks, Ok(()));
        let answer = server.ask("GET", "/readyz").await;
        assert_eq!((status_of(&answer), body_of(&answer)), ("200", "ready\n"));
    }

    #[tokio::test]
    async fn metrics_are_prometheus_text_and_agree_with_readyz() {
        let server = start().await;
        server.become_ready();
        let answer = server.ask("GET", "/metrics").await;
        assert_eq!(status_of(&answer), "200");
        assert!(answer.contains("\r\ncontent-type: text/plain; version=0.0.4\r\n"), "{answer}");
        assert!(body_of(&answer).contains("\norder_processor_ready 1\n"));
    }

    #[tokio::test]
    async fn status_is_json_and_livez_answers() {
        let server = start().await;
        let answer = server.ask("GET", "/status").await;
        assert!(answer.contains("\r\ncontent-type: application/json\r\n"), "{answer}");
        let status: serde_json::Value = serde_json::from_str(body_of(&answer)).unwrap();
        assert_eq!(status["ready"], false);
        assert_eq!(status["problems"][0]["component"], "nats");
        assert_eq!(status_of(&server.ask("GET", "/livez").await), "200");
    }

    #[tokio::test]
    async fn livez_is_503_once_the_loop_no_longer_ticks() {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = Arc::clone(&now);
        let server = start_with(Health::with_clock(move || *clock.lock().unwrap())).await;
        server.health.tick();
        assert_eq!(status_of(&server.ask("GET", "/livez").await), "200");
        *now.lock().unwrap() += Duration::from_secs(11);
        let answer = server.ask("GET", "/livez").await;
        assert_eq!((status_of(&answer), body_of(&answer)), ("503", "loop: the main loop has not run for 11 s\n"));
    }

    #[tokio::test]
    async fn head_has_the_status_and_no_body() {
        let server = start().await;
        for (path, status) in [("/metrics", "200"), ("/livez", "200"), ("/readyz", "503"), ("/status", "200")] {
            let answer = server.ask("HEAD", path).await;
            assert_eq!((status_of(&answer), body_of(&answer)), (status, ""), "{path}");
        }
    }

    #[tokio::test]
    async fn other_paths_are_404_and_other_methods_405() {
        let server = start().await;
        for path in ["/", "/health", "/metrics/", "/readyz/x"] {
            assert_eq!(status_of(&server.ask("GET", path).await), "404", "{path}");
        }
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            assert_eq!(status_of(&server.ask(method, "/readyz").await), "405", "{method}");
        }
    }

    #[tokio::test]
    async fn malformed_and_oversized_requests_are_refused() {
        let server = start().await;
        assert_eq!(status_of(&server.send(b"\x16\x03\x01\x00\xa5\r\n\r\n").await), "400");
        let long = format!("GET /livez HTTP/1.1\r\nHost: test\r\nX: {}\r\n\r\n", "x".repeat(4 * HEADER_BYTES_MAX));
        let answer = server.send(long.as_bytes()).await;
        assert!(["431", "none"].contains(&status_of(&answer)), "{answer}");
        assert_eq!(status_of(&server.ask("GET", "/livez").await), "200");
    }

    #[tokio::test]
    async fn a_request_body_is_not_waited_for() {
        let server = start().await;
        let answer = server.send(b"GET /livez HTTP/1.1\r\nHost: test\r\nContent-Length: 1000000\r\n\r\n").await;
        assert_eq!(status_of(&answer), "200");
    }

    #[tokio::test]
    async fn clients_that_take_every_connection_make_room_for_one_that_asks() {
        let server = start().await;
        let mut silent = VecDeque::new();
        for _ in 0..4 * CONNECTIONS_MAX {
            let mut stream = server.connect().await;
            stream.write_all(b"GET /livez HTTP/1.1\r\nHost: ").await.unwrap();
            silent.push_back(stream);
        }
        let answer = timeout(HEADER_LIMIT * 3, server.ask("GET", "/livez")).await.expect("served");
        assert_eq!(status_of(&answer), "200");
        let mut youngest = silent.pop_back().unwrap();
        let still_open = youngest.read(&mut [0]).now_or_never();
        assert!(still_open.is_none(), "nobody had to wait for the header limit: {still_open:?}");
        for mut stream in [silent.pop_front().unwrap(), youngest] {
            timeout(HEADER_LIMIT * 3, read_to_end(&mut stream)).await.expect("a silent client is closed in the end");
        }
    }

    #[tokio::test]
    async fn a_port_in_use_is_an_error_that_names_address_and_setting() {
        let server = start().await;
        let error = listen(server.address).await.unwrap_err();
        let begin =
            format!("cannot listen on {}, the value of http.listen: another process has the port", server.address);
        assert!(error.to_string().starts_with(&begin), "{error}");
    }

    #[tokio::test]
    async fn the_server_ends_at_shutdown_also_with_a_silent_client() {
        let server = start().await;
        let _silent = server.connect().await;
        server.shutdown.cancel();
        timeout(STOP_LIMIT * 5, server.task).await.expect("ends in time").unwrap();
    }
}
