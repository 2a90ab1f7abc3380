//! A new connection to a host: resolve, connect, TLS, and the client of HTTP/1.1 on it. No proxies.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;

use super::files::{self, Files, Paths};
use super::target::Address;
use crate::model::text::chain;

/// The head of an answer may have so many bytes.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// A connection with the secrets that were read for it.
pub(super) struct HttpConnection {
    pub sender: SendRequest<Full<Bytes>>,
    pub files: Arc<Files>,
    pub opened: Instant,
    pub idle_since: Instant,
    driver: JoinHandle<()>,
}

impl Drop for HttpConnection {
    fn drop(&mut self) {
        // An answer may still be on its way, for example a body that was cut off.
        self.driver.abort();
    }
}

/// # Errors
/// Why nothing was sent. The text names neither paths nor secrets.
pub(super) async fn connect(
    address: &Address,
    paths: &Arc<Paths>,
    deadline: Instant,
) -> Result<HttpConnection, String> {
    let opened = Instant::now();
    let paths = paths.clone();
    let reading = tokio::task::spawn_blocking(move || files::read(&paths));
    let files = Arc::new(timeout_at(deadline, reading).await.map_err(|_| TOO_LATE)?.map_err(|_| STOPPED)??);
    let connecting = async {
        let (sender, driver) = match address {
            Address::Unix(socket) => handshake(unix(socket).await?).await?,
            Address::Tcp { host, port, tls } => {
                let stream = tcp(host, *port, deadline).await?;
                match (tls, &files.tls) {
                    (Some(name), Some(config)) => {
                        let connector = TlsConnector::from(config.clone());
                        let stream = connector.connect(name.clone(), stream).await;
                        handshake(stream.map_err(|error| format!("TLS failed: {error}"))?).await?
                    }
                    (Some(_), None) | (None, _) => handshake(stream).await?,
                }
            }
        };
        Ok::<_, String>((sender, driver))
    };
    let (sender, driver) = timeout_at(deadline, connecting).await.map_err(|_| TOO_LATE)??;
    Ok(HttpConnection { sender, files, opened, idle_since: opened, driver })
}

const TOO_LATE: &str = "cannot connect: no connection within the timeout";
const STOPPED: &str = "cannot connect: the daemon stops";

async fn unix(socket: &PathBuf) -> Result<UnixStream, String> {
    UnixStream::connect(socket).await.map_err(|error| refused(&error))
}

/// Tries the addresses of the name one after the other. Each gets its share of the time that is left.
async fn tcp(host: &str, port: u16, deadline: Instant) -> Result<TcpStream, String> {
    let found = lookup_host((host, port)).await.map_err(|error| format!("cannot resolve the name: {error}"))?;
    let addresses: Vec<SocketAddr> = found.collect();
    let mut why = "cannot resolve the name: it has no address".to_owned();
    for (index, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(addresses.len() - index).unwrap_or(u32::MAX);
        match timeout_at(Instant::now() + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // Only a delay: the request goes out in one piece.
                stream.set_nodelay(true).map_err(|error| refused(&error))?;
                return Ok(stream);
            }
            Ok(Err(error)) => why = refused(&error),
            Err(_) => why = TOO_LATE.to_owned(),
        }
    }
    Err(why)
}

fn refused(error: &io::Error) -> String {
    format!("cannot connect: {error}")
}

async fn handshake<S>(stream: S) -> Result<(SendRequest<Full<Bytes>>, JoinHandle<()>), String>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    TokioIo<S>: Read + Write,
{
    let handshake =
        Builder::new().title_case_headers(true).max_buf_size(HEAD_BYTES_MAX).handshake(TokioIo::new(stream));
    let (sender, connection) = handshake.await.map_err(|error| format!("cannot connect: {}", chain(&error)))?;
    // Its errors reach the request that is under way.
    let driver = tokio::spawn(async move { drop(connection.await) });
    Ok((sender, driver))
}
