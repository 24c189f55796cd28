//! The race that no header can prevent: the server closes while the next request is under way.
//!
//! A real server does it when its idle timeout ends at that moment. This one does it every time: it
//! answers the first request of a connection, waits for the first byte of the second, and drops the
//! connection. It speaks just enough HTTP/1.1 for that: GET and POST with `Content-Length`.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::stream::Stream;

/// A listener whose connections carry one request each, and end at the second one's first byte.
///
/// Stops when it is dropped.
#[derive(Debug)]
pub(crate) struct RaceServer {
    base_url: String,
    tally: Arc<Tally>,
    _stop: watch::Sender<()>,
}

/// What a [`RaceServer`] has seen.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct RaceCounts {
    /// Connections accepted.
    pub(crate) connections: u64,
    /// Requests answered: the first of each connection.
    pub(crate) answered: u64,
    /// POSTs that arrived whole, so that a server could have acted on them.
    pub(crate) effects: u64,
    /// Connections dropped at the first byte of a second request.
    pub(crate) raced: u64,
}

#[derive(Debug, Default)]
struct Tally {
    connections: AtomicU64,
    answered: AtomicU64,
    effects: AtomicU64,
    raced: AtomicU64,
}

impl RaceServer {
    /// Listens on a free port of the loopback address, over TLS when a configuration is given.
    pub(crate) async fn start(tls: Option<Arc<ServerConfig>>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let base_url = base_url(listener.local_addr()?, tls.is_some());
        let tally = Arc::new(Tally::default());
        let (stop, stopped) = watch::channel(());
        tokio::spawn(accept(listener, tls, tally.clone(), stopped));
        Ok(Self {
            base_url,
            tally,
            _stop: stop,
        })
    }

    /// Scheme, host and port, without a slash at the end.
    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    pub(crate) fn counts(&self) -> RaceCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RaceCounts {
            connections: read(&self.tally.connections),
            answered: read(&self.tally.answered),
            effects: read(&self.tally.effects),
            raced: read(&self.tally.raced),
        }
    }
}

/// The URL of a loopback listener. Over TLS it names `localhost`, as most clients want a DNS name.
pub(crate) fn base_url(address: SocketAddr, tls: bool) -> String {
    if tls {
        format!("https://localhost:{}", address.port())
    } else {
        format!("http://{address}")
    }
}

async fn accept(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    tally: Arc<Tally>,
    mut stop: watch::Receiver<()>,
) {
    // Dropped, and its connections with it, when the server is.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => {
                    tally.connections.fetch_add(1, Ordering::Relaxed);
                    let (tls, tally) = (tls.clone(), tally.clone());
                    // A client that breaks off, or does not speak HTTP, only ends its connection.
                    connections.spawn(async move { drop(race(socket, tls, &tally).await) });
                }
                // Out of descriptors, most likely: let some be closed.
                Err(_) => sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
            _ = stop.changed() => return,
        }
    }
}

async fn race(socket: TcpStream, tls: Option<Arc<ServerConfig>>, tally: &Tally) -> io::Result<()> {
    let mut stream = Stream::accept(socket, tls).await?;
    let Some(request) = read_request(&mut stream).await? else {
        return Ok(());
    };
    let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
    let response = if request.post {
        let nth = count(&tally.effects) + 1;
        respond("201 Created", &format!("payment {nth} done"))
    } else {
        respond("200 OK", "hello")
    };
    // Before the write, so that a client which has the answer also sees it counted.
    count(&tally.answered);
    stream.write_all(response.as_bytes()).await?;
    stream.flush().await?;
    if stream.read(&mut [0]).await? == 1 {
        count(&tally.raced);
        // Dropped as it is, like by a process that exits: what is unread makes it a reset.
    }
    Ok(())
}

struct Request {
    post: bool,
}

/// Reads one request with its body; `None` when the client closed before sending one.
async fn read_request(stream: &mut Stream) -> io::Result<Option<Request>> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if bytes.len() > MAX_HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return if bytes.is_empty() {
                Ok(None)
            } else {
                Err(io::ErrorKind::UnexpectedEof.into())
            };
        }
    };
    let head = std::str::from_utf8(&bytes[..head_end]).map_err(|_| io::ErrorKind::InvalidData)?;
    let mut length = 0;
    for line in head.lines() {
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value
                .trim()
                .parse::<u64>()
                .map_err(|_| io::ErrorKind::InvalidData)?;
        }
    }
    let post = head.starts_with("POST ");
    let buffered = (bytes.len() - head_end) as u64;
    if buffered > length {
        // A second request already, before the first was answered: this listener takes no pipelining.
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut rest = stream.take(length - buffered);
    if tokio::io::copy(&mut rest, &mut tokio::io::sink()).await? < length - buffered {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Request { post }))
}

fn respond(status: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

/// Longest request head, in bytes; what most servers take.
const MAX_HEAD: usize = 16 * 1024;
