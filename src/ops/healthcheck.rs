//! `healthcheck`: asks `/readyz` of the daemon, for containers without curl.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// For connection, request and answer together.
const LIMIT: Duration = Duration::from_secs(3);

const READYZ: &str = "/readyz";

/// The answer is a few lines. A longer answer comes from another program that listens there.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// Succeeds only if the daemon that listens on `listen` is ready.
pub async fn run(listen: SocketAddr) -> Result<(), HealthcheckError> {
    let address = reachable(listen);
    timeout(LIMIT, ask(address)).await.unwrap_or(Err(HealthcheckError::Timeout { address, path: READYZ }))
}

#[derive(Debug, thiserror::Error)]
pub enum HealthcheckError {
    #[error("no answer from http://{address}{path} within {} s", LIMIT.as_secs())]
    Timeout { address: SocketAddr, path: &'static str },
    #[error("cannot connect to {address}")]
    Connect { address: SocketAddr, source: io::Error },
    #[error("asking http://{address}{path} failed")]
    Request { address: SocketAddr, path: &'static str, source: hyper::Error },
    #[error("not ready: {problems}")]
    NotReady { problems: String },
    #[error("http://{address}{path} answers {status}, which order-processor never does")]
    Stranger { address: SocketAddr, path: &'static str, status: StatusCode },
}

/// The body of `/status` of the daemon that listens on `listen`.
///
/// # Errors
/// [`HealthcheckError::Connect`] if no daemon runs.
pub(super) async fn status(listen: SocketAddr) -> Result<String, HealthcheckError> {
    let address = reachable(listen);
    let (status, body) = timeout(LIMIT, get(address, "/status"))
        .await
        .unwrap_or(Err(HealthcheckError::Timeout { address, path: "/status" }))?;
    if status == StatusCode::OK {
        Ok(body)
    } else {
        Err(HealthcheckError::Stranger { address, path: "/status", status })
    }
}

async fn ask(address: SocketAddr) -> Result<(), HealthcheckError> {
    match get(address, READYZ).await? {
        (StatusCode::OK, _) => Ok(()),
        (StatusCode::SERVICE_UNAVAILABLE, body) => {
            Err(HealthcheckError::NotReady { problems: body.trim_end().replace('\n', "; ") })
        }
        (status, _) => Err(HealthcheckError::Stranger { address, path: READYZ, status }),
    }
}

async fn get(address: SocketAddr, path: &'static str) -> Result<(StatusCode, String), HealthcheckError> {
    let stream = TcpStream::connect(address).await.map_err(|source| HealthcheckError::Connect { address, source })?;
    request(stream, address, path).await.map_err(|source| HealthcheckError::Request { address, path, source })
}

async fn request(stream: TcpStream, address: SocketAddr, path: &str) -> Result<(StatusCode, String), hyper::Error> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path)
        .header(HOST, address.to_string())
        .body(Empty::<Bytes>::new())
        .expect("the parts are constant, and an address is a valid header value");
    let exchange = async move {
        let response = sender.send_request(request).await?;
        Ok((response.status(), text(response).await))
    };
    // The connection moves the bytes, so it must run beside the exchange. The exchange reports an error that ends the
    // connection.
    let (answer, _ended) = tokio::join!(exchange, connection);
    answer
}

async fn text(response: Response<Incoming>) -> String {
    match Limited::new(response.into_body(), BODY_BYTES_MAX).collect().await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(error) => format!("(the reasons could not be read: {error})"),
    }
}

/// A server can listen on an address that means "every interface". A client cannot connect to such an address.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) => IpAddr::V4(if ip.is_unspecified() { Ipv4Addr::LOCALHOST } else { ip }),
        IpAddr::V6(ip) => IpAddr::V6(if ip.is_unspecified() { Ipv6Addr::LOCALHOST } else { ip }),
    };
    SocketAddr::new(ip, listen.port())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::ops::http;
    use crate::telemetry::health::Health;
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::status::Component;

    async fn daemon(health: Health) -> (SocketAddr, CancellationToken) {
        let listener = http::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        tokio::spawn(http::serve(listener, Arc::new(Metrics::new()), Arc::new(health), shutdown.clone()));
        (address, shutdown)
    }

    fn healthy() -> Health {
        let health = Health::new();
        health.report(Component::Nats, Ok(()));
        health.report(Component::Consumer, Ok(()));
        health.report(Component::Database, Ok(()));
        health
    }

    #[tokio::test]
    async fn a_ready_daemon_passes_also_when_it_listens_everywhere() {
        let (address, shutdown) = daemon(healthy()).await;
        let _stop = shutdown.drop_guard();
        run(address).await.unwrap();
        run(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port())).await.unwrap();
    }

    #[tokio::test]
    async fn a_daemon_that_is_not_ready_fails_with_its_problems() {
        let health = healthy();
        health.report(Component::Consumer, Err("no stream ORDERS".to_owned()));
        health.report(Component::Database, Err("disk full".to_owned()));
        let (address, shutdown) = daemon(health).await;
        let _stop = shutdown.drop_guard();
        let error = run(address).await.unwrap_err();
        assert_eq!(error.to_string(), "not ready: consumer: no stream ORDERS; database: disk full");
    }

    #[tokio::test]
    async fn nobody_listening_fails_with_the_address() {
        let listener = http::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let error = run(address).await.unwrap_err();
        assert!(matches!(error, HealthcheckError::Connect { .. }), "{error}");
        assert!(error.to_string().contains(&address.to_string()));
    }

    #[tokio::test]
    async fn a_port_that_never_answers_fails_in_time() {
        let listener = http::listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let error = run(listener.local_addr().unwrap()).await.unwrap_err();
        assert!(matches!(error, HealthcheckError::Timeout { .. }), "{error}");
    }

    #[test]
    fn only_the_unspecified_addresses_become_loopback() {
        for (listen, asked) in [
            ("0.0.0.0:9464", "127.0.0.1:9464"),
            ("[::]:9464", "[::1]:9464"),
            ("10.1.2.3:9464", "10.1.2.3:9464"),
            ("[fe80::1]:80", "[fe80::1]:80"),
        ] {
            assert_eq!(reachable(listen.parse().unwrap()), asked.parse().unwrap());
        }
    }
}
