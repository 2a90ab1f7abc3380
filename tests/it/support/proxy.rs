//! A TCP proxy in front of the server that misbehaves on command: a network with faults, without needing root.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Forwards between clients and the server. It ends, with its connections, when this value does.
pub struct FaultProxy {
    port: u16,
    faults: Arc<watch::Sender<Faults>>,
    accepting: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// Every connection that is older than this number of cuts is closed.
    cuts: u64,
    /// New connections are closed at once.
    refuse: bool,
    stall_to_server: bool,
    stall_to_client: bool,
    delay: Duration,
    /// What gets through in each direction; 0 stands for no limit.
    bytes_per_second: u32,
    /// Data gets through in pieces of so many bytes, with a moment between them; 0 stands for as it comes.
    piece_bytes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToServer,
    ToClient,
}

impl FaultProxy {
    /// `upstream` is the server's `host:port`.
    pub async fn start(upstream: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
        let port = listener.local_addr().expect("a bound listener has an address").port();
        let faults = Arc::new(watch::Sender::new(Faults::default()));
        let accepting = tokio::spawn(accept(listener, upstream, Arc::clone(&faults)));
        Self { port, faults, accepting }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Closes all connections; new ones are served.
    pub fn cut(&self) {
        self.faults.send_modify(|faults| faults.cuts += 1);
    }

    /// Closes all connections, and new ones at once, until [`heal`](Self::heal).
    pub fn refuse(&self) {
        self.faults.send_modify(|faults| {
            faults.cuts += 1;
            faults.refuse = true;
        });
    }

    /// Connections stay, and nothing gets through in either direction until [`heal`](Self::heal): a dead cable.
    pub fn stall(&self) {
        self.faults.send_modify(|faults| {
            faults.stall_to_server = true;
            faults.stall_to_client = true;
        });
    }

    /// Half of [`stall`](Self::stall): deliveries arrive, acknowledgements and pulls do not.
    pub fn stall_to_server(&self) {
        self.faults.send_modify(|faults| faults.stall_to_server = true);
    }

    /// The other half: acknowledgements and pulls arrive, deliveries do not.
    pub fn stall_to_client(&self) {
        self.faults.send_modify(|faults| faults.stall_to_client = true);
    }

    /// Every piece of data is held up by this long, in each direction.
    pub fn delay(&self, delay: Duration) {
        self.faults.send_modify(|faults| faults.delay = delay);
    }

    /// A thin line: no more than this gets through, in each direction and on each connection.
    pub fn throttle(&self, bytes_per_second: u32) {
        self.faults.send_modify(|faults| faults.bytes_per_second = bytes_per_second);
    }

    /// What was sent at once arrives in pieces of this size, one after the other.
    pub fn break_up(&self, piece_bytes: usize) {
        self.faults.send_modify(|faults| faults.piece_bytes = piece_bytes);
    }

    /// Forwards again. What was held up by a stall goes through first: TCP loses nothing.
    pub fn heal(&self) {
        self.faults.send_modify(|faults| *faults = Faults { cuts: faults.cuts, ..Faults::default() });
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, upstream: String, faults: Arc<watch::Sender<Faults>>) {
    // An accept error is over with its connection; the client tries again.
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        if !faults.borrow().refuse {
            tokio::spawn(serve(client, upstream.clone(), faults.subscribe()));
        }
    }
}

async fn serve(client: TcpStream, upstream: String, mut faults: watch::Receiver<Faults>) {
    let born_at = faults.borrow().cuts;
    // No upstream is what a client sees when the server is down: its connection is closed.
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let to_server = forward(client_read, server_write, Direction::ToServer, faults.clone());
    let to_client = forward(server_read, client_write, Direction::ToClient, faults.clone());
    tokio::select! {
        () = to_server => {}
        () = to_client => {}
        _ = faults.wait_for(|faults| faults.cuts > born_at) => {}
    }
}

async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    direction: Direction,
    mut faults: watch::Receiver<Faults>,
) {
    let stalled = |faults: &Faults| match direction {
        Direction::ToServer => faults.stall_to_server,
        Direction::ToClient => faults.stall_to_client,
    };
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
        // Checked after the read: what arrives during a stall is kept, not lost.
        if faults.wait_for(|faults| !stalled(faults)).await.is_err() {
            return;
        }
        let Faults { mut delay, bytes_per_second, piece_bytes, .. } = *faults.borrow();
        if bytes_per_second > 0 {
            delay += Duration::from_secs_f64(length as f64 / f64::from(bytes_per_second));
        }
        tokio::time::sleep(delay).await;
        let piece_bytes = if piece_bytes == 0 { length } else { piece_bytes };
        for piece in buffer[..length].chunks(piece_bytes) {
            if to.write_all(piece).await.is_err() {
                return;
            }
            if piece_bytes < length {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}
