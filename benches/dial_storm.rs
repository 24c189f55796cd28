//! What it takes to open many connections at once, beside hyper-util's client in the same run.
//!
//! `64_at_once` and `all_at_once`: 1,000 connections to a server whose line of connections that wait to be accepted
//! holds five, each kept open. That is Python's `ThreadingHTTPServer` as it is born, or where there is no `python3` a
//! thread of this process with the same backlog. What does not fit in the line the kernel drops, and whoever was
//! dropped waits for its own clock: a second and more for a connection, or for its request, if the connection looks
//! open from this side. What counts is the time until the last response head, and how often the kernel dropped.
//! The kernel's counts are those of a whole network namespace. Each row has one of its own where that can be made
//! (`namespace=own`; on Linux, with root and `ip`). Elsewhere, with `namespace=shared`, other programs count in them
//! too, and so may what the row before has left behind.
//!
//! `cold_burst`: 64 requests at once on a new client, to a server that accepts and answers at once. Here a client
//! that holds connections back can only lose. The variants take turns (A B C C B A …), so that whatever else the
//! machine does meets all of them, and each ratio is one of two bursts of the same turn. `idempool_again` is the same
//! pool as `idempool`: how far its ratio is from one is how far the others can be trusted.
//!
//! `cold_burst_50ms`: the same over a network on which a segment needs 25 ms each way, the first SYN included. It is
//! that of the tests; where it cannot be made (root and `ip` are needed, on Linux), a line says so.
//!
//! No server here sends more than a head, so no connection can be used twice, whatever the client does with bodies.
//! `cargo bench --bench dial_storm`; `-- --quick` leaves the peers out of the storm, gives a row 10 s at most, and
//! plays a fifth of the bursts.

#[cfg(target_os = "linux")]
mod fault_matrix {
    //! What the tests' network asks for while it starts a program. Nobody here minds.
    pub(crate) static FORKS: std::sync::RwLock<()> = std::sync::RwLock::new(());
}
#[cfg(target_os = "linux")]
#[allow(dead_code, clippy::unwrap_used)] // a part of the tests, which need more of it and fail by panicking
#[path = "../tests/it/network/namespaces.rs"]
mod namespaces;
#[path = "support/python.rs"]
mod python;
#[cfg(target_os = "linux")]
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../tests/it/network/relay.rs"]
mod relay;

use std::any::Any;
use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Uri};
use http_body_util::Empty;
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use idempool::{BoxError, Builder, Pool};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Of a storm.
const CONNECTIONS: usize = 1_000;
const MODES: [(&str, usize); 2] = [("64_at_once", 64), ("all_at_once", CONNECTIONS)];
/// Of a burst.
const BURST: usize = 64;
/// `socketserver.TCPServer.request_queue_size`.
const PYTHONS_BACKLOG: i32 = 5;
/// More than come at once.
const HEALTHY_BACKLOG: i32 = 1_024;
const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
/// What a row of the storm may take. A client without a window needs 20 to 60 s.
const ROW: Duration = Duration::from_secs(60);
const QUICK_ROW: Duration = Duration::from_secs(10);
/// What all rows of the storm may take together; the last ones get less than [`ROW`] then.
const STORM: Duration = Duration::from_secs(200);

/// Who takes part, by name. Another configuration of the pool is another line.
const VARIANTS: &[(&str, Kind)] = &[
    ("idempool", Kind::Idempool(|pool| pool)),
    ("hyper-util", Kind::HyperUtil),
    (NO_WINDOW, Kind::Idempool(|pool| pool.dial_window(false))),
    (AGAIN, Kind::Idempool(|pool| pool)),
];
/// The control. It has no place in the storm, whose rows are too few to be compared with themselves.
const AGAIN: &str = "idempool_again";
/// What a dial window costs a healthy server. In a storm it does as badly as the others.
const NO_WINDOW: &str = "no_window";

#[derive(Clone, Copy)]
enum Kind {
    /// What is added to a builder without limits.
    Idempool(fn(Builder) -> Builder),
    HyperUtil,
}

#[derive(Clone)]
enum Client {
    Idempool(Pool),
    HyperUtil(legacy::Client<HttpConnector, Empty<Bytes>>),
}

/// A response whose body nobody reads: while this lives, its connection is open.
struct Held {
    headers: HeaderMap,
    _body: Box<dyn Any + Send>,
}

impl Kind {
    fn is_ours(self) -> bool {
        matches!(self, Kind::Idempool(_))
    }

    fn client(self) -> Client {
        match self {
            Kind::Idempool(configure) => Client::Idempool(configure(without_limits()).build()),
            Kind::HyperUtil => {
                let mut connector = HttpConnector::new();
                connector.set_nodelay(true);
                let client = legacy::Client::builder(TokioExecutor::new())
                    .pool_timer(TokioTimer::new())
                    .build(connector);
                Client::HyperUtil(client)
            }
        }
    }
}

/// No limit of ours decides here, and none that hyper-util's client does not have.
fn without_limits() -> Builder {
    Pool::builder()
        .max_connections(2 * CONNECTIONS)
        .max_connections_per_origin(2 * CONNECTIONS)
        .max_idle(2 * CONNECTIONS)
        .max_idle_per_origin(2 * CONNECTIONS)
        .max_pending_dials(2 * CONNECTIONS)
        .acquire_timeout(None)
        .connect_timeout(None)
        .response_head_timeout(None)
        // Its 30 s would end a connection that looks open only from here, instead of waiting as the peers do.
        .tcp_user_timeout(None)
}

impl Client {
    /// Asks, and returns with the head.
    async fn ask(&self, uri: &Uri) -> Result<Held, BoxError> {
        let request = Request::get(uri.clone()).body(Empty::new())?;
        let (head, body): (_, Box<dyn Any + Send>) = match self {
            Client::Idempool(pool) => {
                let (head, body) = pool.send(request).await?.into_parts();
                (head, Box::new(body))
            }
            Client::HyperUtil(client) => {
                let (head, body) = client.request(request).await?.into_parts();
                (head, Box::new(body))
            }
        };
        Ok(Held {
            headers: head.headers,
            _body: body,
        })
    }
}

/// How the servers tell connections apart.
const PORT: &str = "client-port";

/// The head leaves in one write, so Nagle's algorithm plays no part. The thread then waits for the client's end.
/// It ends with its input, also where the bench is killed.
const PYTHON: &str = "
import os, sys, threading
from http.server import *
class Head(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True
    def do_GET(self):
        self.send_response(200)
        self.send_header('Content-Length', '5')
        self.send_header('Client-Port', str(self.client_address[1]))
        self.end_headers()
        self.rfile.read(1)
    def log_message(self, *args): pass
server = ThreadingHTTPServer(('127.0.0.1', 0), Head)
print(server.server_port, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
";

/// The standard library's listeners have a backlog of their own choice.
fn listen(host: [u8; 4], backlog: i32) -> (TcpListener, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let any = SocketAddr::from((host, 0));
    socket.bind(&any.into()).expect("bind");
    socket.listen(backlog).expect("listen");
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().expect("address");
    (listener, address)
}

fn head(port: u16) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nClient-Port: {port}\r\n\r\n")
}

/// Does as the Python server does: a thread accepts, and each connection has one.
fn stand_in() -> SocketAddr {
    fn serve(mut stream: TcpStream, port: u16) -> std::io::Result<()> {
        let mut bytes = [0; 4096];
        // A GET is one segment here: the first read is the request.
        if stream.read(&mut bytes)? > 0 {
            stream.write_all(head(port).as_bytes())?;
            while stream.read(&mut bytes)? > 0 {}
        }
        Ok(())
    }
    let (listener, address) = listen(LOOPBACK, PYTHONS_BACKLOG);
    std::thread::spawn(move || {
        while let Ok((stream, from)) = listener.accept() {
            std::thread::spawn(move || serve(stream, from.port()));
        }
    });
    address
}

/// Answers at once, on a thread of its own.
struct Healthy {
    address: SocketAddr,
    open: Arc<AtomicUsize>,
}

impl Healthy {
    fn start(host: [u8; 4]) -> Healthy {
        let (listener, address) = listen(host, HEALTHY_BACKLOG);
        listener.set_nonblocking(true).expect("a socket for tokio");
        let open = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&open);
        std::thread::spawn(move || runtime().block_on(accept(listener, counted)));
        Healthy { address, open }
    }

    /// Until the last burst is gone, so that it takes no time from the next.
    fn rest(&self) {
        while self.open.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

async fn accept(listener: TcpListener, open: Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    while let Ok((mut stream, from)) = listener.accept().await {
        open.fetch_add(1, Ordering::SeqCst);
        let open = Arc::clone(&open);
        tokio::spawn(async move {
            let _ = stream.set_nodelay(true);
            let mut bytes = [0; 4096];
            // A GET is one segment here: the first read is the request.
            if stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {
                let _ = stream.write_all(head(from.port()).as_bytes()).await;
                while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
            }
            // Resets, so that thousands of connections do not use up the ports for a minute.
            let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
            drop(stream);
            open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

/// Of the kernel, for the network namespace of this thread. `None` where it does not tell.
struct Counts([Option<u64>; 4]);

impl Counts {
    const NAMES: [&str; 4] = [
        "ListenOverflows",
        "ListenDrops",
        "TCPTimeouts",
        "TCPSynRetrans",
    ];

    fn now() -> Counts {
        let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap_or_default();
        let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
        // A line of names, and one of values.
        let (names, values) = (lines.next(), lines.next());
        let pairs = || {
            let (names, values) = (names.unwrap_or_default(), values.unwrap_or_default());
            names.split(' ').zip(values.split(' '))
        };
        Counts(Counts::NAMES.map(|wanted| {
            let (_, value) = pairs().find(|&(name, _)| name == wanted)?;
            value.parse().ok()
        }))
    }

    /// What was counted since, for the row.
    fn since(&self, before: &Counts) -> [String; 4] {
        std::array::from_fn(|index| match (self.0[index], before.0[index]) {
            (Some(after), Some(before)) => (after - before).to_string(),
            _ => "unknown".to_owned(),
        })
    }
}

/// What came of a storm.
struct Storm {
    /// From the start to the last head, unless the time was over first.
    took: Option<Duration>,
    /// Of each head that came, from the call on. Lowest first.
    times: Vec<Duration>,
    failed: usize,
}

impl Storm {
    /// In milliseconds, of all requests of the storm. `over`: so many never got their head.
    fn per_mille(&self, per_mille: usize) -> String {
        let index = ((CONNECTIONS * per_mille).div_ceil(1_000)).saturating_sub(1);
        match self.times.get(index) {
            Some(time) => format!("{:.1}", time.as_secs_f64() * 1e3),
            None => "over".to_owned(),
        }
    }
}

/// So many tasks share the work; each opens its next connection when its last request was answered.
#[allow(clippy::disallowed_methods)] // a bench measures by the real clock
async fn storm(client: Client, address: SocketAddr, tasks: usize, limit: Duration) -> Storm {
    let uri: Uri = format!("http://{address}/head").parse().expect("a URI");
    let begun = Arc::new(AtomicUsize::new(0));
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let started = Instant::now();
    // They end with this, also where the time is over.
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let (client, uri) = (client.clone(), uri.clone());
        let (begun, sender) = (Arc::clone(&begun), sender.clone());
        running.spawn(async move {
            while begun.fetch_add(1, Ordering::SeqCst) < CONNECTIONS {
                let called = Instant::now();
                let result = client.ask(&uri).await;
                let came = Instant::now();
                let _ = sender.send((result, came - called, came - started));
            }
        });
    }
    drop(sender);
    let mut open = Vec::new();
    let (mut times, mut last, mut failed) = (Vec::new(), Duration::ZERO, 0);
    let all_ended = tokio::time::timeout(limit, async {
        while let Some((result, time, at)) = receiver.recv().await {
            match result {
                Ok(held) => {
                    open.push(held);
                    times.push(time);
                    last = at;
                }
                Err(error) => {
                    if failed == 0 {
                        println!("dial_storm: the first request that failed: {error}");
                    }
                    failed += 1;
                }
            }
        }
    })
    .await;
    let ports: HashSet<_> = open.iter().map(|held| &held.headers[PORT]).collect();
    assert_eq!(ports.len(), open.len(), "a connection was used twice");
    times.sort_unstable();
    Storm {
        took: all_ended.is_ok().then_some(last),
        times,
        failed,
    }
}

/// One row, on a server and a runtime of its own.
fn storm_row(
    (name, kind): (&str, Kind),
    (mode, tasks): (&str, usize),
    limit: Duration,
    namespace: &str,
) {
    let (python, server, address) = match python::start(PYTHON) {
        Some((python, address)) => (Some(python), "http.server", address),
        None => (None, "stand_in", stand_in()),
    };
    let runtime = runtime();
    let before = Counts::now();
    let storm = runtime.block_on(async { storm(kind.client(), address, tasks, limit).await });
    let [overflows, drops, timeouts, syn_retrans] = Counts::now().since(&before);
    drop(python);
    drop(runtime);
    let seconds = match storm.took {
        Some(took) => format!("{:.2}", took.as_secs_f64()),
        None => format!(">{:.0}", limit.as_secs_f64()),
    };
    println!(
        "dial_storm: client={name} mode={mode} connections={CONNECTIONS} seconds={seconds} overflows={overflows} \
         drops={drops} timeouts={timeouts} syn_retrans={syn_retrans} p50_ms={} p99_ms={} max_ms={} answered={} \
         failed={} server={server} namespace={namespace}",
        storm.per_mille(500),
        storm.per_mille(990),
        storm.per_mille(1_000),
        storm.times.len(),
        storm.failed,
    );
}

#[allow(clippy::disallowed_methods)]
fn storms(quick: bool) {
    if let Err(limit) = descriptors(2 * CONNECTIONS + 200) {
        println!("dial_storm: skipped the storm: a process may open {limit} descriptors only");
        return;
    }
    if python::start(PYTHON).is_none() {
        println!("dial_storm: skipped http.server, a stand-in serves: there is no python3");
    }
    let started = Instant::now();
    for &(name, kind) in VARIANTS {
        if name == AGAIN || name == NO_WINDOW || (quick && !kind.is_ours()) {
            continue;
        }
        for mode in MODES {
            let limit = match quick {
                true => QUICK_ROW,
                false => STORM.saturating_sub(started.elapsed()).min(ROW),
            };
            apart(|namespace| storm_row((name, kind), mode, limit, namespace));
        }
    }
}

/// Runs this in a network namespace of its own, if one can be made, and tells it whether that is so.
#[cfg(target_os = "linux")]
fn apart(row: impl FnOnce(&str) + Send) {
    let made = namespaces::Namespace::new().and_then(|namespace| {
        namespace.ip("link set dev lo up\n")?;
        Ok(namespace)
    });
    match made {
        Ok(namespace) => namespace.enter(|| row("own")),
        Err(_) => row("shared"),
    }
}

#[cfg(not(target_os = "linux"))]
fn apart(row: impl FnOnce(&str) + Send) {
    row("shared");
}

/// Sees to it that so many descriptors may be open, in this process and in those it starts.
/// The error says how many may.
#[cfg(target_os = "linux")]
fn descriptors(wanted: usize) -> Result<(), u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let wanted = wanted as u64;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    if soft >= wanted {
        return Ok(());
    }
    if hard < wanted {
        return Err(hard);
    }
    setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).map_err(|_| soft)
}

/// Elsewhere nothing tells; where there are too few, requests fail, and the row says how many.
#[cfg(not(target_os = "linux"))]
fn descriptors(_wanted: usize) -> Result<(), u64> {
    Ok(())
}

/// Milliseconds until all heads of a burst are in, on a new client and a new runtime.
#[allow(clippy::disallowed_methods)]
fn burst(kind: Kind, server: &Healthy) -> f64 {
    server.rest();
    let uri: Uri = format!("http://{}/head", server.address)
        .parse()
        .expect("a URI");
    let runtime = runtime();
    let (took, open) = runtime.block_on(async {
        let client = kind.client();
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..BURST {
            let (client, uri) = (client.clone(), uri.clone());
            tasks.spawn(async move { client.ask(&uri).await });
        }
        let mut open = Vec::with_capacity(BURST);
        while let Some(ended) = tasks.join_next().await {
            open.push(ended.expect("a task").expect("a head"));
        }
        (started.elapsed(), open)
    });
    let ports: HashSet<_> = open.iter().map(|held| &held.headers[PORT]).collect();
    assert_eq!(ports.len(), BURST, "a connection was used twice");
    took.as_secs_f64() * 1e3
}

/// The lower quartile, the median and the upper quartile.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_unstable_by(f64::total_cmp);
    let quartile = values.len() / 4;
    let [low, middle, high] = [quartile, values.len() / 2, values.len() - 1 - quartile];
    [values[low], values[middle], values[high]]
}

fn bursts(mode: &str, server: &Healthy, turns: usize) {
    for &(_, kind) in VARIANTS {
        // The first burst of a process pays for what the others find.
        burst(kind, server);
    }
    let mut times = vec![Vec::with_capacity(turns); VARIANTS.len()];
    for turn in 0..turns {
        let mut order: Vec<_> = (0..VARIANTS.len()).collect();
        if turn % 2 == 1 {
            order.reverse();
        }
        for variant in order {
            times[variant].push(burst(VARIANTS[variant].1, server));
        }
    }
    // The median of the turns' ratios to this variant.
    let ratio = |variant: usize, to: &str| {
        let to = VARIANTS.iter().position(|&(name, _)| name == to);
        let to = to.expect("a variant");
        let pairs = times[variant].iter().zip(&times[to]);
        quartiles(pairs.map(|(one, other)| one / other).collect())[1]
    };
    for (variant, (name, _)) in VARIANTS.iter().enumerate() {
        let [low, median, high] = quartiles(times[variant].clone());
        println!(
            "dial_storm: client={name} mode={mode} connections={BURST} median_ms={median:.2} \
             ratio_to_hyper_util={:.2} ratio_to_idempool={:.2} quartile1_ms={low:.2} quartile3_ms={high:.2} \
             bursts={turns}",
            ratio(variant, "hyper-util"),
            ratio(variant, "idempool"),
        );
    }
}

/// The hosts of the tests' network: a client, a server, and a relay between them that takes its time.
#[cfg(target_os = "linux")]
fn bursts_over_a_distance(turns: usize) -> Result<(), String> {
    use namespaces::Namespace;
    const SERVER: [u8; 4] = [192, 0, 2, 2];
    const ONE_WAY: Duration = Duration::from_millis(25);
    let (client, between, server) = (Namespace::new()?, Namespace::new()?, Namespace::new()?);
    namespaces::join(&client, &between, &server)?;
    let relay = between.enter(|| relay::Relay::start("to-client", "to-server", ONE_WAY))?;
    let server = server.enter(|| Healthy::start(SERVER));
    client.enter(|| bursts("cold_burst_50ms", &server, turns));
    drop(relay);
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn bursts_over_a_distance(_turns: usize) -> Result<(), String> {
    Err("Linux".to_owned())
}

fn main() {
    // cargo passes `--bench`, which says nothing here.
    let quick = std::env::args().any(|argument| argument == "--quick");
    let turns = if quick { 40 } else { 200 };
    bursts("cold_burst", &Healthy::start(LOOPBACK), turns);
    // At 100 ms and more each, a fifth says as much.
    if let Err(missing) = bursts_over_a_distance(turns / 5) {
        println!("dial_storm: skipped cold_burst_50ms: it needs {missing}");
    }
    storms(quick);
}
