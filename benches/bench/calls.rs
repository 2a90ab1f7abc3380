//! Orders that are called for over HTTP: at an endpoint that answers immediately, and at a slow one.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::support::DaemonSpec;
use super::{Ids, Plan, Report, mebibytes, publish, rate, server_for_millions, with_database};

const CONCURRENCY: u64 = 16;
const SLOW: Duration = Duration::from_millis(20);

pub async fn calls(plan: &Plan, report: &mut Report) {
    for (what, latency) in [("an endpoint that answers immediately", Duration::ZERO), ("one that takes 20 ms", SLOW)] {
        eprintln!("calls of {what}");
        // As many orders as a slow endpoint answers in 10 s.
        let possible = if latency.is_zero() { u64::MAX } else { CONCURRENCY * 1000 / 20 * 10 };
        let orders = plan.orders.min(possible);
        let (server, broker) = server_for_millions().await;
        publish(&broker, 1..=orders, Ids::Rising).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/orders", listener.local_addr().unwrap());
        let endpoint = tokio::spawn(serve(listener, latency));
        let spec = DaemonSpec::new(server.url());
        let file = spec.folder().join("handler.toml");
        let route =
            format!("[[route]]\nsubject = \"ORDERS.*\"\n[route.http]\nurl = \"{url}\"\nconcurrency = {CONCURRENCY}\n");
        std::fs::write(&file, route).unwrap();
        let spec = spec.set("handler.file", file);
        let (took, bytes) = with_database(&broker, &spec, orders).await;
        let possible = CONCURRENCY as f64 / latency.as_secs_f64();
        let share = if latency.is_zero() {
            String::new()
        } else {
            format!("{:.2} of 16 / 20 ms", rate(orders, took) / possible)
        };
        report.row(
            &format!("calls of {what}, {CONCURRENCY} at a time"),
            &format!("{:.0}/s", rate(orders, took)),
            &share,
        );
        report.row("peak resident", &mebibytes(bytes), "");
        endpoint.abort();
    }
}

async fn serve(listener: TcpListener, latency: Duration) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer(stream, latency));
    }
}

/// The requests are small and come one at a time, so each of them is found by its length alone.
async fn answer(mut stream: TcpStream, latency: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(4096);
    loop {
        let head = loop {
            if let Some(head) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break head + 4;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse::<usize>().ok());
        while buffer.len() < head + length.unwrap_or(0) {
            stream.read_buf(&mut buffer).await?;
        }
        buffer.clear();
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await?;
    }
}
