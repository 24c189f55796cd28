//! A peer that does exactly what its script says, and counts.
//!
//! Every accepted connection runs the script on a thread of its own with blocking sockets, so that
//! nothing the client's runtime does, or fails to do, moves it. A script reads like the story it comes
//! from:
//!
//! ```text
//! Peer::start(Scheme::Http, |conn| {
//!     conn.answer_requests(1);
//!     conn.await_first_byte();
//!     conn.rst();
//! })
//! ```

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::server::Acceptor;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::SockRef;

use super::tls::{Names, server_config};

/// How long a script waits for the client before it fails.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Scheme {
    Http,
    Https,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        })
    }
}

/// A server that runs a script for each connection.
#[derive(Debug)]
pub(crate) struct Peer {
    scheme: Scheme,
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    accepted: AtomicUsize,
    open: AtomicUsize,
    most_open: AtomicUsize,
    requests: Mutex<Vec<Received>>,
    effects: Mutex<HashMap<String, Vec<Vec<u8>>>>,
    ended: Mutex<Vec<(usize, Ended)>>,
    offered: Mutex<Vec<Vec<String>>>,
    failures: Mutex<Vec<String>>,
}

impl Peer {
    /// Starts a peer on a free port. The script is called with each accepted connection.
    pub(crate) fn start(
        scheme: Scheme,
        script: impl Fn(&mut Conn) + Send + Sync + 'static,
    ) -> Peer {
        Peer::start_with(scheme, server_config(Names::Local), script)
    }

    /// As [`start`](Peer::start), with a TLS configuration of its own.
    pub(crate) fn start_with(
        scheme: Scheme,
        config: Arc<ServerConfig>,
        script: impl Fn(&mut Conn) + Send + Sync + 'static,
    ) -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        Peer::start_on(listener, scheme, config, script)
    }

    /// As [`start_with`](Peer::start_with), on a listener that the test has made.
    pub(crate) fn start_on(
        listener: TcpListener,
        scheme: Scheme,
        config: Arc<ServerConfig>,
        script: impl Fn(&mut Conn) + Send + Sync + 'static,
    ) -> Peer {
        Peer::serve(listener, scheme, config, |_| (), script)
    }

    /// A peer over TLS whose connections, each with its index, pass a door before their handshake.
    pub(crate) fn start_behind(
        door: impl Fn(usize) + Send + Sync + 'static,
        script: impl Fn(&mut Conn) + Send + Sync + 'static,
    ) -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let config = server_config(Names::Local);
        Peer::serve(listener, Scheme::Https, config, door, script)
    }

    fn serve(
        listener: TcpListener,
        scheme: Scheme,
        config: Arc<ServerConfig>,
        door: impl Fn(usize) + Send + Sync + 'static,
        script: impl Fn(&mut Conn) + Send + Sync + 'static,
    ) -> Peer {
        let address = listener.local_addr().expect("address");
        let shared = Arc::new(Shared::default());
        let state = Arc::clone(&shared);
        let (door, script) = (Arc::new(door), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let index = state.accepted.fetch_add(1, SeqCst);
                let open = state.open.fetch_add(1, SeqCst) + 1;
                state.most_open.fetch_max(open, SeqCst);
                let (state, script) = (Arc::clone(&state), Arc::clone(&script));
                let door = Arc::clone(&door);
                let config = Arc::clone(&config);
                std::thread::spawn(move || {
                    let run = AssertUnwindSafe(|| {
                        door(index);
                        let wire = match scheme {
                            Scheme::Http => Some(Wire::Plain(stream)),
                            Scheme::Https => shake_hands(stream, config, &state),
                        };
                        if let Some(wire) = wire {
                            script(&mut Conn::new(wire, index, &state));
                        }
                    });
                    if let Err(panic) = catch_unwind(run) {
                        let text = panic.downcast_ref::<String>().cloned();
                        let text = text.or(panic.downcast_ref::<&str>().map(ToString::to_string));
                        let text = format!("connection {index}: {}", text.unwrap_or_default());
                        state.failures.lock().unwrap().push(text);
                    }
                    state.open.fetch_sub(1, SeqCst);
                });
            }
        });
        Peer {
            scheme,
            address,
            shared,
        }
    }

    /// A peer that answers every request properly and keeps its connections open.
    pub(crate) fn well_behaved(scheme: Scheme) -> Peer {
        Peer::start(scheme, |conn| {
            conn.answer_requests(usize::MAX);
        })
    }

    pub(crate) fn url(&self, path: &str) -> String {
        if self.address.ip().is_loopback() {
            format!("{}://localhost:{}{path}", self.scheme, self.address.port())
        } else {
            format!("{}://{}{path}", self.scheme, self.address)
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections were accepted.
    pub(crate) fn accepted(&self) -> usize {
        self.shared.accepted.load(SeqCst)
    }

    /// How many connections run their script now.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }

    /// How many connections were open at the same time at most.
    pub(crate) fn most_open(&self) -> usize {
        self.shared.most_open.load(SeqCst)
    }

    /// Every request that was read completely, in order.
    pub(crate) fn requests(&self) -> Vec<Received> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// How often the effect of the request with this id took place.
    pub(crate) fn effects(&self, id: &str) -> usize {
        self.shared
            .effects
            .lock()
            .unwrap()
            .get(id)
            .map_or(0, Vec::len)
    }

    /// The protocols that the client offered (ALPN), for each TLS connection.
    pub(crate) fn offered(&self) -> Vec<Vec<String>> {
        self.shared.offered.lock().unwrap().clone()
    }

    /// How many sockets of the client are connected to this peer, or half closed and forgotten.
    #[cfg(target_os = "linux")]
    pub(crate) fn client_sockets(&self) -> usize {
        const TIME_WAIT: &str = "06";
        let remote = format!("0100007F:{:04X}", self.address.port());
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the socket table");
        let fields = |line: &str| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let is_client = |line: &&str| {
            let fields = fields(line);
            fields.get(2) == Some(&remote) && fields.get(3).is_some_and(|state| state != TIME_WAIT)
        };
        table.lines().filter(is_client).count()
    }

    /// How the client ended each connection whose script waited for that.
    pub(crate) fn ended(&self) -> Vec<(usize, Ended)> {
        self.shared.ended.lock().unwrap().clone()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let failures = self.shared.failures.lock().unwrap();
        if !failures.is_empty() && !std::thread::panicking() {
            panic!("the peer's script failed: {}", failures.join("; "));
        }
    }
}

/// A request as the peer read it.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) connection: usize,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Received {
    /// The value of a field, by its lower-case name.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (field, value) = line.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    pub(crate) fn request_line(&self) -> &str {
        self.head.lines().next().unwrap_or_default()
    }

    /// What the tests tell their requests apart by: the `x-id` field, else the target.
    pub(crate) fn id(&self) -> String {
        let target = self.request_line().split(' ').nth(1).unwrap_or_default();
        self.field("x-id").unwrap_or(target).to_owned()
    }
}

/// How the client ended a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Ended {
    /// A FIN; over TLS a close_notify before it.
    Properly,
    /// Over TLS: a FIN without a close_notify.
    Truncated,
    /// A reset.
    Reset,
}

enum Wire {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ServerConnection, TcpStream>>),
}

/// Shakes hands, and notes which protocols the client offers. `None` when it comes to nothing, which is
/// no failure of the script.
fn shake_hands(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
    shared: &Arc<Shared>,
) -> Option<Wire> {
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("read timeout");
    let mut acceptor = Acceptor::default();
    let hello = loop {
        if acceptor.read_tls(&mut stream).ok()? == 0 {
            return None;
        }
        if let Some(hello) = acceptor.accept().ok()? {
            break hello;
        }
    };
    let offered = hello.client_hello().alpn().into_iter().flatten();
    let offered = offered.map(|name| String::from_utf8_lossy(name).into_owned());
    shared.offered.lock().unwrap().push(offered.collect());
    let session = match hello.into_connection(config) {
        Ok(session) => session,
        Err((_, mut alert)) => {
            let _ = alert.write_all(&mut stream);
            return None;
        }
    };
    let mut tls = StreamOwned::new(session, stream);
    while tls.conn.is_handshaking() {
        tls.conn.complete_io(&mut tls.sock).ok()?;
    }
    Some(Wire::Tls(Box::new(tls)))
}

/// One accepted connection, in the hands of the script.
pub(crate) struct Conn {
    /// Which accepted connection this is, from 0.
    pub(crate) index: usize,
    wire: Wire,
    buffer: Vec<u8>,
    shared: Arc<Shared>,
}

impl Conn {
    fn new(wire: Wire, index: usize, shared: &Arc<Shared>) -> Conn {
        let conn = Conn {
            index,
            wire,
            buffer: Vec::new(),
            shared: Arc::clone(shared),
        };
        conn.tcp().set_nodelay(true).expect("nodelay");
        conn.tcp()
            .set_read_timeout(Some(PATIENCE))
            .expect("read timeout");
        conn
    }

    fn tcp(&self) -> &TcpStream {
        match &self.wire {
            Wire::Plain(stream) => stream,
            Wire::Tls(stream) => &stream.sock,
        }
    }

    /// Over TLS: the certificate that the client has shown, on this connection or on the one that it resumes.
    pub(crate) fn client_certificate(&self) -> Option<CertificateDer<'static>> {
        match &self.wire {
            Wire::Plain(_) => None,
            Wire::Tls(stream) => Some(stream.conn.peer_certificates()?.first()?.clone()),
        }
    }

    fn read_more(&mut self) -> io::Result<usize> {
        let mut bytes = [0; 16 * 1024];
        let read = match &mut self.wire {
            Wire::Plain(stream) => stream.read(&mut bytes),
            Wire::Tls(stream) => stream.read(&mut bytes),
        }?;
        self.buffer.extend_from_slice(&bytes[..read]);
        Ok(read)
    }

    /// Reads a request head. `None` when the client closes instead.
    pub(crate) fn read_head(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self
                .buffer
                .windows(4)
                .position(|bytes| bytes == b"\r\n\r\n")
            {
                let head = self.buffer.drain(..end + 4).collect::<Vec<_>>();
                return Some(String::from_utf8(head).expect("an ASCII head"));
            }
            match self.read_more() {
                Ok(0) => {
                    self.note_end(Ended::Properly);
                    return None;
                }
                Ok(_) => {}
                Err(error) => {
                    self.note_end(ended_by(&error));
                    return None;
                }
            }
        }
    }

    /// How many bytes were read beyond what was asked for.
    pub(crate) fn buffered(&self) -> usize {
        self.buffer.len()
    }

    /// Reads so many bytes of a body, and throws them away.
    pub(crate) fn read_body_bytes(&mut self, count: usize) {
        while self.buffer.len() < count {
            assert!(self.read_more().expect("the body") > 0, "the client closed");
        }
        self.buffer.drain(..count);
    }

    /// As [`read_request`](Conn::read_request); `None` also when nothing comes within this time.
    pub(crate) fn read_request_within(&mut self, time: Duration) -> Option<Received> {
        self.tcp().set_read_timeout(Some(time)).expect("a timeout");
        if !matches!(self.tcp().peek(&mut [0]), Ok(1)) {
            return None;
        }
        self.tcp()
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout");
        self.read_request()
    }

    /// Reads a whole request. `None` when the client closes instead.
    pub(crate) fn read_request(&mut self) -> Option<Received> {
        self.read_request_after(|_, _| ())
    }

    /// Reads a whole request, and does something once its head is there.
    pub(crate) fn read_request_after(
        &mut self,
        between: impl FnOnce(&mut Conn, &str),
    ) -> Option<Received> {
        let head = self.read_head()?;
        between(self, &head);
        self.read_body_of(head)
    }

    /// Reads the rest of a request whose head was read.
    pub(crate) fn read_body_of(&mut self, head: String) -> Option<Received> {
        let mut request = Received {
            connection: self.index,
            head,
            body: Vec::new(),
        };
        if let Some(length) = request.field("content-length") {
            let length: usize = length.parse().expect("a length");
            while self.buffer.len() < length {
                if self.read_more().ok()? == 0 {
                    return None;
                }
            }
            request.body = self.buffer.drain(..length).collect();
        } else if request.field("transfer-encoding").is_some() {
            request.body = self.read_chunked()?;
        }
        self.shared.requests.lock().unwrap().push(request.clone());
        Some(request)
    }

    fn read_line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|bytes| bytes == b"\r\n") {
                let line = self.buffer.drain(..end + 2).collect::<Vec<_>>();
                return Some(String::from_utf8(line[..end].to_vec()).expect("ASCII"));
            }
            if self.read_more().ok()? == 0 {
                return None;
            }
        }
    }

    fn read_chunked(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let size = self.read_line()?;
            let size = usize::from_str_radix(size.trim(), 16).expect("a chunk size");
            if size == 0 {
                while !self.read_line()?.is_empty() {}
                return Some(body);
            }
            while self.buffer.len() < size + 2 {
                if self.read_more().ok()? == 0 {
                    return None;
                }
            }
            body.extend(self.buffer.drain(..size));
            self.buffer.drain(..2);
        }
    }

    /// The request takes effect: from now on it is in the ledger.
    pub(crate) fn apply(&mut self, request: &Received) {
        let mut effects = self.shared.effects.lock().unwrap();
        effects
            .entry(request.id())
            .or_default()
            .push(request.body.clone());
    }

    /// Turns Nagle's algorithm on, which is how a socket is born: a small write waits for the acknowledgement of
    /// the one before.
    pub(crate) fn hold_small_writes(&self) {
        self.tcp().set_nodelay(false).expect("nodelay");
    }

    /// Sends bytes as they are. A client that is gone is no failure.
    pub(crate) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        let _ = match &mut self.wire {
            Wire::Plain(stream) => stream.write_all(bytes),
            Wire::Tls(stream) => stream.write_all(bytes).and_then(|()| stream.flush()),
        };
    }

    /// Answers 200 with this body and its length.
    pub(crate) fn reply(&mut self, body: &str) {
        self.reply_with("", body);
    }

    /// Answers 200 with more fields, each ended by CRLF.
    pub(crate) fn reply_with(&mut self, fields: &str, body: &str) {
        let length = body.len();
        self.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{fields}\r\n{body}"
        ));
    }

    /// Reads, applies and answers as many requests; the answer is the connection's index. `false` when
    /// the client closed before.
    pub(crate) fn answer_requests(&mut self, count: usize) -> bool {
        for _ in 0..count {
            let Some(request) = self.read_request() else {
                return false;
            };
            self.apply(&request);
            let index = self.index.to_string();
            self.reply(&index);
        }
        true
    }

    /// Waits until a byte is there to be read, and leaves it there.
    pub(crate) fn await_first_byte(&mut self) {
        if !self.has_bytes() {
            let mut byte = [0];
            assert_eq!(
                self.tcp().peek(&mut byte).expect("a byte"),
                1,
                "the client closed"
            );
        }
    }

    /// Waits until the kernel holds a byte that was not read, beyond whatever was.
    pub(crate) fn await_unread_byte(&mut self) {
        let peeked = self.tcp().peek(&mut [0]).expect("a byte");
        assert_eq!(peeked, 1, "the client closed");
    }

    /// Whether a byte is there that was not read, in the kernel or already taken from it. Over TCP only.
    pub(crate) fn has_unread_byte(&self) -> bool {
        let tcp = self.tcp();
        tcp.set_nonblocking(true).expect("nonblocking");
        let peeked = tcp.peek(&mut [0]);
        tcp.set_nonblocking(false).expect("blocking");
        !self.buffer.is_empty() || peeked.is_ok_and(|bytes| bytes > 0)
    }

    /// As [`await_first_byte`](Conn::await_first_byte), for scripts that do not mind a client that closes.
    pub(crate) fn await_first_byte_or_end(&mut self) {
        if !self.has_bytes() {
            let _ = self.tcp().peek(&mut [0]);
        }
    }

    /// Whether bytes of the client have been taken from the socket already. TLS takes them with the end
    /// of its handshake.
    fn has_bytes(&mut self) -> bool {
        let in_tls = match &mut self.wire {
            Wire::Plain(_) => false,
            Wire::Tls(stream) => {
                let state = stream.conn.process_new_packets();
                state.is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
            }
        };
        in_tls || !self.buffer.is_empty()
    }

    /// Reads whatever comes until the client closes, notes how it did, and tells how many bytes came.
    pub(crate) fn await_end(&mut self) -> (Ended, usize) {
        let mut bytes = std::mem::take(&mut self.buffer).len();
        loop {
            match self.read_more() {
                Ok(0) => {
                    self.note_end(Ended::Properly);
                    return (Ended::Properly, bytes);
                }
                Ok(_) => bytes += std::mem::take(&mut self.buffer).len(),
                Err(error) => {
                    let ended = ended_by(&error);
                    self.note_end(ended);
                    return (ended, bytes);
                }
            }
        }
    }

    fn note_end(&self, ended: Ended) {
        self.shared.ended.lock().unwrap().push((self.index, ended));
    }

    /// Ends our direction with a bare FIN; over TLS without a close_notify.
    pub(crate) fn fin(&mut self) {
        let _ = self.tcp().shutdown(Shutdown::Write);
    }

    /// Sends bytes and a FIN in one segment.
    #[cfg(target_os = "linux")]
    pub(crate) fn send_with_fin(&mut self, bytes: impl AsRef<[u8]>) {
        SockRef::from(self.tcp()).set_tcp_cork(true).expect("cork");
        self.send(bytes);
        self.fin();
    }

    /// Waits for the client's FIN on TCP, below TLS.
    pub(crate) fn await_fin(&mut self) {
        let mut bytes = [0; 1024];
        let mut tcp = self.tcp();
        while tcp.read(&mut bytes).expect("a FIN, and no reset") > 0 {}
    }

    /// Whether the client's side has answered anything with a reset.
    pub(crate) fn was_reset(&self) -> bool {
        self.tcp().take_error().expect("a socket").is_some()
    }

    /// Makes the kernel lose whatever comes for this connection, as a network would. Nothing of it is
    /// acknowledged, and the client sends it again after 200 ms.
    #[cfg(target_os = "linux")]
    pub(crate) fn lose_what_comes(&self) {
        // One instruction of classic BPF: keep 0 bytes of the packet.
        let drop_all = [socket2::SockFilter::new(0x06, 0, 0, 0)];
        SockRef::from(self.tcp())
            .attach_filter(&drop_all)
            .expect("a filter");
    }

    /// Ends [`lose_what_comes`](Conn::lose_what_comes).
    #[cfg(target_os = "linux")]
    pub(crate) fn hear_again(&self) {
        SockRef::from(self.tcp())
            .detach_filter()
            .expect("the filter");
    }

    /// Ends [`lose_what_comes`](Conn::lose_what_comes) and closes in the same breath: between the two nothing
    /// may be heard.
    #[cfg(target_os = "linux")]
    pub(crate) fn hear_again_and_close(&mut self) {
        let dead = stand_in();
        let _no_fork = crate::fault_matrix::FORKS.read();
        self.hear_again();
        self.wire = Wire::Plain(dead);
    }

    /// Over TLS: says close_notify, and nothing on TCP.
    pub(crate) fn close_notify(&mut self) {
        if let Wire::Tls(stream) = &mut self.wire {
            stream.conn.send_close_notify();
            let _ = stream.flush();
        }
    }

    /// Over TLS: sends a message of TLS's own (a key update), as servers may whenever they like.
    pub(crate) fn send_key_update(&mut self) {
        if let Wire::Tls(stream) = &mut self.wire {
            stream.conn.refresh_traffic_keys().expect("TLS 1.3");
            let _ = stream.flush();
        }
    }

    /// Resets the connection.
    pub(crate) fn rst(&mut self) {
        SockRef::from(self.tcp())
            .set_linger(Some(Duration::ZERO))
            .expect("linger");
        self.close();
    }

    /// Closes the socket at once, in both directions.
    pub(crate) fn close(&mut self) {
        // The only copy of the descriptor leaves with the old wire.
        let dead = stand_in();
        let _no_fork = crate::fault_matrix::FORKS.read();
        self.wire = Wire::Plain(dead);
    }
}

/// A socket for a connection that has none any more.
fn stand_in() -> TcpStream {
    let dead = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| TcpStream::connect(listener.local_addr()?));
    dead.expect("a stand-in socket")
}

fn ended_by(error: &io::Error) -> Ended {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Ended::Truncated,
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Ended::Reset,
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            panic!("the client neither sent nor closed for {PATIENCE:?}")
        }
        _ => panic!("unexpected end: {error}"),
    }
}

/// A door between the test and a script.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(crate) fn new() -> Gate {
        Gate::default()
    }

    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.0.0.lock().unwrap()
    }

    /// Blocks the script until the gate is open.
    pub(crate) fn pass(&self) {
        let guard = self.0.0.lock().unwrap();
        let wait = self.0.1.wait_timeout_while(guard, PATIENCE, |open| !*open);
        assert!(!wait.unwrap().1.timed_out(), "nobody opened the gate");
    }
}
