//! An HTTP endpoint that remembers every request, and answers, or does not, as its script says. On real sockets.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_util::sync::CancellationToken;

use super::keys::Certificate;
use super::{PATIENCE, at_least, eventually};

/// One request, as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
    pub at: Instant,
    /// The number of its connection, from 1.
    pub connection: usize,
}

impl Seen {
    /// The header `Idempotency-Key` without its quotes.
    pub fn key(&self) -> &str {
        self.headers["idempotency-key"].trim_matches('"')
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn attempt(&self) -> u32 {
        self.headers["order-attempt"].parse().unwrap()
    }
}

/// What the endpoint does with a request.
#[derive(Clone, Debug)]
pub enum Act {
    /// Status, further headers, body.
    Answer(u16, Vec<(&'static str, String)>, String),
    /// The same after a while.
    Slow(Duration, Box<Act>),
    /// Answers with 200 and closes the connection a moment later, without a word about it.
    AnswerAndClose,
    /// Closes the connection without an answer.
    Close,
    Hang,
    /// Sends this head and then a byte of the body now and then, for ever.
    Drip(u16),
    /// Sends this head and then as much body as the other side takes.
    Endless(u16),
}

impl Act {
    pub fn status(status: u16) -> Self {
        Self::Answer(status, vec![], String::new())
    }

    pub fn body(status: u16, body: &str) -> Self {
        Self::Answer(status, vec![], body.to_owned())
    }

    pub fn with(status: u16, header: &'static str, value: impl Into<String>) -> Self {
        Self::Answer(status, vec![(header, value.into())], String::new())
    }
}

type Script = Box<dyn Fn(&Seen) -> Act + Send + Sync>;

struct State {
    script: Mutex<Script>,
    seen: Mutex<Vec<Seen>>,
    running: AtomicUsize,
    most_running: AtomicUsize,
    connections: AtomicUsize,
    ended: CancellationToken,
}

/// It ends with this value.
pub struct Endpoint {
    state: Arc<State>,
    port: u16,
    task: JoinHandle<()>,
}

impl Endpoint {
    pub async fn start(script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Self {
        Self::start_on(0, script).await
    }

    /// On a port that was free before.
    pub async fn start_on(port: u16, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("the port is free");
        let (state, port) = (State::new(script), listener.local_addr().unwrap().port());
        let shared = state.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                stream.set_nodelay(true).ok();
                tokio::spawn(shared.clone().serve(stream));
            }
        });
        Self { state, port, task }
    }

    pub async fn start_tls(certificate: &Certificate, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Self {
        let chain = CertificateDer::pem_file_iter(&certificate.cert).unwrap().map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(&certificate.key).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (state, port) = (State::new(script), listener.local_addr().unwrap().port());
        let shared = state.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, shared) = (acceptor.clone(), shared.clone());
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        shared.serve(stream).await;
                    }
                });
            }
        });
        Self { state, port, task }
    }

    pub async fn start_unix(socket: &Path, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Self {
        let listener = UnixListener::bind(socket).expect("the socket is new");
        let state = State::new(script);
        let shared = state.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(shared.clone().serve(stream));
            }
        });
        Self { state, port: 0, task }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn host(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn url(&self) -> String {
        format!("{}/orders", self.host())
    }

    /// What it does from now on.
    pub fn now(&self, script: impl Fn(&Seen) -> Act + Send + Sync + 'static) {
        *self.state.script.lock().unwrap() = Box::new(script);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    /// How often each key was sent.
    pub fn keys(&self) -> BTreeMap<String, usize> {
        let mut keys = BTreeMap::new();
        self.seen().iter().for_each(|seen| *keys.entry(seen.key().to_owned()).or_default() += 1);
        keys
    }

    pub fn most_running(&self) -> usize {
        self.state.most_running.load(Ordering::SeqCst)
    }

    pub fn running(&self) -> usize {
        self.state.running.load(Ordering::SeqCst)
    }

    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Waits until it has seen this many requests.
    pub async fn called(&self, requests: usize) {
        let seen = || self.state.seen.lock().unwrap().len();
        eventually(&format!("{requests} requests"), PATIENCE, async || at_least(seen(), requests)).await;
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Its connections end too.
        self.task.abort();
        self.state.ended.cancel();
    }
}

impl State {
    fn new(script: impl Fn(&Seen) -> Act + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            script: Mutex::new(Box::new(script)),
            seen: Mutex::default(),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            ended: CancellationToken::new(),
        })
    }

    async fn serve(self: Arc<Self>, stream: impl AsyncRead + AsyncWrite + Unpin) {
        self.ended.run_until_cancelled(self.requests(stream)).await;
    }

    async fn requests(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let connection = self.connections.fetch_add(1, Ordering::SeqCst) + 1;
        let mut buffer = Vec::new();
        while let Some(seen) = read(&mut stream, &mut buffer, connection).await {
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_running.fetch_max(running, Ordering::SeqCst);
            self.seen.lock().unwrap().push(seen.clone());
            let act = (self.script.lock().unwrap())(&seen);
            let goes_on = self.act(&mut stream, act).await;
            if !goes_on {
                return;
            }
        }
    }

    /// Whether the connection stays open.
    async fn act(&self, stream: &mut (impl AsyncRead + AsyncWrite + Unpin), act: Act) -> bool {
        let act = match act {
            Act::Slow(time, act) => {
                tokio::time::sleep(time).await;
                *act
            }
            act => act,
        };
        // Before the answer is out: a client that has it may send the next one at once.
        if !matches!(act, Act::Hang) {
            self.running.fetch_sub(1, Ordering::SeqCst);
        }
        match act {
            Act::Answer(status, headers, body) => {
                let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
                let head = format!("HTTP/1.1 {status} X\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(head.as_bytes()).await.is_ok()
            }
            Act::AnswerAndClose => {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.ok();
                false
            }
            Act::Close | Act::Slow(..) => false,
            Act::Hang => {
                // Until the other side has had enough.
                while stream.read_u8().await.is_ok() {}
                self.running.fetch_sub(1, Ordering::SeqCst);
                false
            }
            Act::Drip(status) => {
                let head = format!("HTTP/1.1 {status} X\r\ncontent-length: 1000000\r\n\r\n");
                let mut open = stream.write_all(head.as_bytes()).await.is_ok();
                while open {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    open = stream.write_all(b"x").await.is_ok() && stream.flush().await.is_ok();
                }
                false
            }
            Act::Endless(status) => {
                let head = format!("HTTP/1.1 {status} X\r\n\r\n");
                let mut open = stream.write_all(head.as_bytes()).await.is_ok();
                while open {
                    open = stream.write_all(&[b'x'; 16 * 1024]).await.is_ok();
                }
                false
            }
        }
    }
}

async fn read(stream: &mut (impl AsyncRead + Unpin), buffer: &mut Vec<u8>, connection: usize) -> Option<Seen> {
    let end = loop {
        if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
    let mut lines = head.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let headers: BTreeMap<String, String> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length: usize = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    while buffer.len() < end + length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    let body = buffer[end..end + length].to_vec();
    buffer.drain(..end + length);
    Some(Seen { path, headers, body, at: Instant::now(), connection })
}
