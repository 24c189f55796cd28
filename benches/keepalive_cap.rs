//! What a server's cap of requests on a connection costs at the slow end of the times: a cap of 100 beside no cap,
//! for idempool, hyper-util's client and reqwest in the same run, over http and https.
//!
//! `cargo bench --bench keepalive_cap`, three minutes; `-- --quick` for a look; `-- --server own` or `nginx` to choose
//! the server; `-- --threads 2` for another runtime. Every client is at its defaults, but for `TCP_NODELAY`, which
//! all set.
//!
//! # Server
//!
//! nginx where there is one (one worker, `keepalive_requests` 100 and a thousand million), else one of our own in a
//! process of its own, on one thread. Both answer 5 bytes, and resume TLS sessions by ticket. All clients have the
//! same root, the same provider (ring) and a session store each, as it comes. It holds eight tickets for a server, so
//! of more dials at a time some are full handshakes; how many is printed. The address is a literal: there are no
//! names to resolve.
//!
//! # Load
//!
//! Open: 16 callers, each with arrivals of its own, exponentially spread. A caller whose request is late takes the
//! next one when it is done, and an arrival's time counts from when it was due, not from when it was taken, so what
//! one slow request does to those behind it counts too. In all, a third of what idempool does in a closed loop of 16
//! without a cap over that scheme: the same rate for all clients. Both caps get the same arrivals.
//!
//! At such rates tokio's timers are too coarse (1 ms), and a thread that spins takes a core which is not there to
//! take. So on Linux each caller has a timerfd in the runtime's own epoll: an arrival is an event of the kernel as a
//! request from a socket would be, late by some ten microseconds, and costs one system call. How late with no client
//! in between is measured and printed ("alarm late by"). A caller that is behind asks for no alarm. Elsewhere tokio's
//! timer does it, and figures below a few milliseconds say nothing.
//!
//! By default the callers and all that the client does run on one thread, so that with two cores the server has the
//! other one. It also means that what a client does in the background is seen in full: a handshake holds up whoever
//! is due meanwhile. With `--threads 2` the runtime has two workers, which compete with the server for the cores.
//!
//! # Figures
//!
//! In each round every client has its turn over each scheme, with the cap and without, one right after the other and
//! in turn first, since the machine is never the same for long. A turn begins with several caps' worth of requests
//! that do not count. `p99_us` is the median over the rounds of each round's p99; `ratio` the median over the rounds
//! of the capped p99 by the uncapped one of the same round, which a slow round cannot spoil: it meets both.
//! `connections` counts what was opened for the measured requests with the cap: a hundredth of them at least.
//!
//! `reconnects_on_path` counts the measured requests with the cap that ran on the connection dialled for them, by the
//! response's `Timings`. A request that waited and was then handed somebody else's connection is none of those, so
//! beside it stands `acquire_p999_us`, the p99.9 of how long a request waited for a connection, whoever dialled it.
//! What came due behind it shows in the times only. The peers tell neither.
//!
//! `floor` is what no client can be better than, or hardly: idempool without a cap, and beside it a task that opens,
//! uses once and closes a connection (over https with a resumed session) as often as the cap would ask for it, evenly
//! spread and in nobody's way. What is between that and a client's own figure is the client's doing. The rest is the
//! work of the handshakes, on the client's thread and on the server's.
//!
//! Where the alarm is late by milliseconds, other programs have the processor, and so do the figures. Under
//! `chrt -r 20`, which the server inherits, most of that goes away.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::{BodyExt, Empty};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use idempool::{BoxError, Pool, Timings};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tower::Service;

const CALLERS: u64 = 16;
const CAP: u32 = 100;
const BODY: &str = "hello";
/// The hidden argument that makes this program the server, followed by where the certificate is.
const SERVE: &str = "--serve";

#[allow(clippy::disallowed_methods)] // a bench measures by the real clock
fn now() -> Instant {
    Instant::now()
}

// ---------------------------------------------------------------------------------------------------------------
// The servers
// ---------------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Scheme {
    Http,
    Https,
}

impl Scheme {
    fn name(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }
}

/// Where a server listens: for each scheme first with the cap, then without.
struct Ports {
    http: [u16; 2],
    https: [u16; 2],
}

/// Another process, which ends when its standard input does: also when this one is killed.
struct Server {
    name: &'static str,
    child: Child,
    ports: Ports,
    root: CertificateDer<'static>,
    /// Certificate, key and configuration. Goes with the server.
    dir: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        for _ in 0..200 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes `cert.pem` and `key.pem` for 127.0.0.1, and gives back who signed them.
fn certify(dir: &Path) -> CertificateDer<'static> {
    let mut params = CertificateParams::new(Vec::new()).expect("params");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("a key");
    let root = CertifiedIssuer::self_signed(params, key).expect("a root");
    let key = KeyPair::generate().expect("a key");
    let leaf = CertificateParams::new(vec![Ipv4Addr::LOCALHOST.to_string()])
        .expect("params")
        .signed_by(&key, &root)
        .expect("a leaf");
    std::fs::write(dir.join("cert.pem"), leaf.pem()).expect("a file");
    std::fs::write(dir.join("key.pem"), key.serialize_pem()).expect("a file");
    root.der().clone()
}

/// Four ports that were free a moment ago.
fn free_ports() -> Ports {
    let listeners = [(); 4].map(|()| TcpListener::bind("127.0.0.1:0").expect("bind"));
    let [a, b, c, d] = listeners.map(|it| it.local_addr().expect("address").port());
    Ports {
        http: [a, b],
        https: [c, d],
    }
}

/// nginx, if it is there and starts.
fn nginx() -> Option<Server> {
    // Somebody may take a port before nginx does.
    (0..3).find_map(|_| start_nginx())
}

fn start_nginx() -> Option<Server> {
    let found = Command::new("nginx")
        .arg("-v")
        .stderr(Stdio::null())
        .status();
    found.ok().filter(std::process::ExitStatus::success)?;
    let dir = TempDir::new().expect("a directory");
    let root = certify(dir.path());
    let ports = free_ports();
    let at = dir.path().display();
    let mut servers = String::new();
    for (of_scheme, tls) in [(ports.http, ""), (ports.https, " ssl")] {
        for (port, requests) in of_scheme.into_iter().zip([CAP, 1_000_000_000]) {
            servers += &format!(
                "server {{ listen 127.0.0.1:{port}{tls}; keepalive_requests {requests}; \
                 location / {{ default_type text/plain; return 200 \"{BODY}\"; }} }}\n"
            );
        }
    }
    // Longer than the run: an idle connection is not what this is about.
    let config = format!(
        "worker_processes 1;\ndaemon off;\npid {at}/pid;\nerror_log {at}/error.log crit;\n\
         events {{ worker_connections 1024; }}\n\
         http {{\naccess_log off;\nkeepalive_timeout 1h;\nkeepalive_time 10h;\n\
         ssl_certificate {at}/cert.pem;\nssl_certificate_key {at}/key.pem;\n\
         ssl_protocols TLSv1.2 TLSv1.3;\nssl_session_cache off;\nssl_session_tickets on;\n\
         client_body_temp_path {at}/body;\nproxy_temp_path {at}/proxy;\nfastcgi_temp_path {at}/fastcgi;\n\
         uwsgi_temp_path {at}/uwsgi;\nscgi_temp_path {at}/scgi;\n{servers}}}\n"
    );
    let config_at = dir.path().join("nginx.conf");
    std::fs::write(&config_at, config).expect("a file");
    // nginx has no eye on its standard input, so the shell has.
    let watch = "nginx -e \"$0/error.log\" -p \"$0\" -c \"$0/nginx.conf\" & cat; kill $!; wait $!";
    let mut server = Server {
        name: "nginx",
        child: Command::new("sh")
            .args(["-c", watch])
            .arg(dir.path())
            .stdin(Stdio::piped())
            .spawn()
            .ok()?,
        ports,
        root,
        dir,
    };
    let last = SocketAddr::from((Ipv4Addr::LOCALHOST, server.ports.https[1]));
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(20));
        if server.dir.path().join("pid").exists() && TcpStream::connect(last).is_ok() {
            return Some(server);
        }
        if !matches!(server.child.try_wait(), Ok(None)) {
            break;
        }
    }
    None
}

/// This program again, as the server.
fn own() -> Server {
    let dir = TempDir::new().expect("a directory");
    let root = certify(dir.path());
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .arg(SERVE)
        .arg(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a server");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output"))
        .read_line(&mut line)
        .expect("its ports");
    let ports: Vec<u16> = line
        .split_whitespace()
        .map(|port| port.parse().expect("a port"))
        .collect();
    let [a, b, c, d] = ports[..] else {
        panic!("the server has {} ports", ports.len())
    };
    Server {
        name: "own",
        child,
        ports: Ports {
            http: [a, b],
            https: [c, d],
        },
        root,
        dir,
    }
}

/// What the other process does: prints its four ports and serves until its standard input ends.
fn serve(dir: &Path) {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let certificate = CertificateDer::from_pem_file(dir.join("cert.pem")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(dir.join("key.pem")).expect("a key");
    let mut tls =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .expect("a server config");
    tls.ticketer = rustls::crypto::ring::Ticketer::new().expect("a ticketer");
    let tls = TlsAcceptor::from(Arc::new(tls));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let mut ports = Vec::new();
        for tls in [None, Some(tls)] {
            for cap in [CAP, u32::MAX] {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
                let listener = listener.expect("bind");
                let port = listener.local_addr().expect("address").port();
                ports.push(port.to_string());
                tokio::spawn(accept(listener, cap, tls.clone()));
            }
        }
        println!("{}", ports.join(" "));
        std::future::pending::<()>().await;
    });
}

async fn accept(listener: tokio::net::TcpListener, cap: u32, tls: Option<TlsAcceptor>) {
    while let Ok((socket, _)) = listener.accept().await {
        let _ = socket.set_nodelay(true);
        let tls = tls.clone();
        tokio::spawn(async move {
            match tls {
                None => answer(socket, cap).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(socket).await {
                        answer(stream, cap).await;
                    }
                }
            }
        });
    }
}

/// Answers up to `cap` requests, and says with the last answer that it is the last.
async fn answer(mut stream: impl AsyncRead + AsyncWrite + Unpin, cap: u32) {
    let kept = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    let last = kept.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
    let mut bytes = [0; 4096];
    for served in 1..=cap {
        // A GET is one segment here: every read is a request.
        if !stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {
            return;
        }
        let answer = if served < cap { &kept } else { &last };
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
    let _ = stream.shutdown().await;
    // Closed with something unread, the connection would be reset.
    let rest = async { while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {} };
    let _ = tokio::time::timeout(Duration::from_secs(1), rest).await;
}

// ---------------------------------------------------------------------------------------------------------------
// The clients
// ---------------------------------------------------------------------------------------------------------------

/// Counts what passes through a connector.
#[derive(Clone)]
struct Counted<S> {
    inner: S,
    dials: Arc<AtomicU64>,
}

impl<S: Service<R>, R> Service<R> for Counted<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.dials.fetch_add(1, Ordering::Relaxed);
        self.inner.call(request)
    }
}

type HyperUtil = legacy::Client<HttpsConnector<Counted<HttpConnector>>, Empty<Bytes>>;

/// A client with the one address that it asks.
#[derive(Clone)]
enum Client {
    Idempool(Pool, Uri),
    HyperUtil(HyperUtil, Uri, Arc<AtomicU64>),
    Reqwest(reqwest::Client, reqwest::Url, Arc<AtomicU64>),
    /// idempool without a cap; while its turn lasts, a task beside it dials each so often.
    Floor {
        pool: Pool,
        uri: Uri,
        port: u16,
        tls: Option<TlsConnector>,
    },
}

/// What idempool says of how a request came to its connection. The peers say nothing.
#[derive(Clone, Copy, Default)]
struct Acquired {
    /// On the connection that was dialled for it.
    by_own_dial: bool,
    waited: Duration,
}

const NAMES: [&str; 4] = ["idempool", "hyper-util", "reqwest", FLOOR];
const FLOOR: &str = "floor";

impl Client {
    fn new(name: &str, scheme: Scheme, port: u16, root: &CertificateDer<'static>) -> Self {
        let address = format!("{}://127.0.0.1:{port}/", scheme.name());
        let uri: Uri = address.parse().expect("a URI");
        let mut roots = RootCertStore::empty();
        roots.add(root.clone()).expect("a root");
        // A session store of its own, which is on by default.
        let tls =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
        let dials = Arc::new(AtomicU64::new(0));
        match name {
            "idempool" => Self::Idempool(Pool::builder().tls_config(tls).build(), uri),
            FLOOR => Self::Floor {
                pool: Pool::builder().tls_config(tls.clone()).build(),
                uri,
                port,
                tls: (scheme == Scheme::Https).then(|| TlsConnector::from(Arc::new(tls))),
            },
            "hyper-util" => {
                let mut inner = HttpConnector::new();
                inner.set_nodelay(true);
                inner.enforce_http(false);
                let counted = Counted {
                    inner,
                    dials: Arc::clone(&dials),
                };
                let connector = HttpsConnectorBuilder::new()
                    .with_tls_config(tls)
                    .https_or_http()
                    .enable_http1()
                    .wrap_connector(counted);
                let client = legacy::Client::builder(TokioExecutor::new())
                    .pool_timer(TokioTimer::new())
                    .build(connector);
                Self::HyperUtil(client, uri, dials)
            }
            _ => {
                let counter = Arc::clone(&dials);
                let client = reqwest::Client::builder()
                    .tls_backend_preconfigured(tls)
                    .tcp_nodelay(true)
                    .no_proxy()
                    .connector_layer(tower::layer::layer_fn(move |inner| Counted {
                        inner,
                        dials: Arc::clone(&counter),
                    }))
                    .build()
                    .expect("a client");
                Self::Reqwest(client, address.parse().expect("a URL"), dials)
            }
        }
    }

    /// One request, to the end of its body.
    async fn ask(&self) -> Result<Acquired, BoxError> {
        let (body, acquired) = match self {
            Self::Idempool(pool, uri) | Self::Floor { pool, uri, .. } => {
                let request = Request::get(uri.clone()).body(Empty::<Bytes>::new())?;
                let response = pool.send(request).await?;
                let timings = response.extensions().get::<Timings>();
                let acquired = timings.map(|timings| Acquired {
                    by_own_dial: !timings.connection().is_reused(),
                    waited: timings.acquire(),
                });
                (response.into_body().collect().await?.to_bytes(), acquired)
            }
            Self::HyperUtil(client, uri, _) => {
                let request = Request::get(uri.clone()).body(Empty::new())?;
                let response = client.request(request).await?;
                (response.into_body().collect().await?.to_bytes(), None)
            }
            Self::Reqwest(client, url, _) => {
                let response = client.get(url.clone()).send().await?;
                (response.bytes().await?, None)
            }
        };
        assert_eq!(body, BODY, "another body");
        Ok(acquired.unwrap_or_default())
    }

    /// How many connections it has opened so far.
    fn connections(&self) -> u64 {
        match self {
            Self::Idempool(pool, _) | Self::Floor { pool, .. } => pool.stats().connections_opened,
            Self::HyperUtil(_, _, dials) | Self::Reqwest(_, _, dials) => {
                dials.load(Ordering::Relaxed)
            }
        }
    }
}

/// One client over one scheme: with the cap, and without.
struct Pair {
    client: &'static str,
    scheme: Scheme,
    capped: Client,
    uncapped: Client,
}

// ---------------------------------------------------------------------------------------------------------------
// The load
// ---------------------------------------------------------------------------------------------------------------

/// Wakes a caller when its next request is due.
#[cfg(target_os = "linux")]
mod alarm {
    use std::os::fd::{AsFd, AsRawFd, RawFd};
    use std::time::Instant;

    use nix::sys::time::TimeSpec;
    use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
    use tokio::io::unix::AsyncFd;

    struct Timer(TimerFd);

    impl AsRawFd for Timer {
        fn as_raw_fd(&self) -> RawFd {
            self.0.as_fd().as_raw_fd()
        }
    }

    pub(super) struct Alarm(AsyncFd<Timer>);

    impl Alarm {
        // Its successor is unsafe, for what gives its descriptor away. This keeps it.
        #[allow(deprecated)]
        pub(super) fn new() -> Self {
            let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
            let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags).expect("a timer");
            Self(AsyncFd::new(Timer(timer)).expect("a runtime"))
        }

        pub(super) async fn wait_until(&self, due: Instant) {
            loop {
                let left = due.saturating_duration_since(super::now());
                if left.is_zero() {
                    return;
                }
                let once = Expiration::OneShot(TimeSpec::from_duration(left));
                let timer = self.0.get_ref();
                timer
                    .0
                    .set(once, TimerSetTimeFlags::empty())
                    .expect("a time");
                // Not read: to set it again is enough, as the runtime's epoll reports edges.
                let mut ready = self.0.readable().await.expect("a runtime");
                ready.clear_ready();
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod alarm {
    use std::time::Instant;

    pub(super) struct Alarm;

    impl Alarm {
        pub(super) fn new() -> Self {
            Self
        }

        pub(super) async fn wait_until(&self, due: Instant) {
            if due > super::now() {
                tokio::time::sleep_until(due.into()).await;
            }
        }
    }
}

use alarm::Alarm;

/// How long things last, and how often.
#[derive(Clone, Copy)]
struct Plan {
    rounds: u64,
    closed_loop: Duration,
    warm_up: Duration,
    measured: Duration,
}

/// What one turn saw of its measured part.
#[derive(Default)]
struct Seen {
    /// From when a request was due to the end of its body, sorted.
    nanos: Vec<u64>,
    /// How long each waited for its connection, sorted.
    waits: Vec<u64>,
    own_dials: u64,
    failed: u64,
    connections: u64,
}

#[allow(clippy::cast_possible_truncation)] // 500 years
fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// One caller with its arrivals. Without a client only the alarm is measured.
async fn call(
    client: Option<Client>,
    seed: u64,
    gap: Duration,
    start: Instant,
    plan: Plan,
) -> Seen {
    let mut seen = Seen::default();
    let mut random = fastrand::Rng::with_seed(seed);
    let alarm = Alarm::new();
    let counted_from = start + plan.warm_up;
    let end = counted_from + plan.measured;
    let mut due = start;
    loop {
        // Exponential, so that all callers' arrivals together are a Poisson process.
        due += gap.mul_f64(-(1.0 - random.f64()).ln());
        if due >= end {
            return seen;
        }
        alarm.wait_until(due).await;
        let outcome = match &client {
            Some(client) => client.ask().await,
            None => Ok(Acquired::default()),
        };
        let took = due.elapsed();
        if due >= counted_from {
            match outcome {
                Ok(acquired) => {
                    seen.nanos.push(nanos(took));
                    seen.waits.push(nanos(acquired.waited));
                    seen.own_dials += u64::from(acquired.by_own_dial);
                }
                Err(_) => seen.failed += 1,
            }
        }
    }
}

/// One client's turn at `rate` requests a second.
async fn turn(client: Option<&Client>, seed: u64, rate: f64, plan: Plan) -> Seen {
    let callers = u32::try_from(CALLERS).expect("few");
    let gap = Duration::from_secs_f64(f64::from(callers) / rate);
    let start = now() + Duration::from_millis(1);
    let mut apart = JoinSet::new();
    if let Some(Client::Floor { port, tls, .. }) = client {
        let every = Duration::from_secs_f64(f64::from(CAP) / rate);
        apart.spawn(dial_apart(*port, tls.clone(), every));
    }
    let mut calls = JoinSet::new();
    for caller in 0..CALLERS {
        let seed = seed * CALLERS + caller;
        calls.spawn(call(client.cloned(), seed, gap, start, plan));
    }
    tokio::time::sleep_until((start + plan.warm_up).into()).await;
    let connections = client.map_or(0, Client::connections);
    let mut all = Seen::default();
    while let Some(seen) = calls.join_next().await {
        let seen = seen.expect("a caller");
        all.nanos.extend(seen.nanos);
        all.waits.extend(seen.waits);
        all.own_dials += seen.own_dials;
        all.failed += seen.failed;
    }
    all.connections = client.map_or(0, Client::connections) - connections;
    all.nanos.sort_unstable();
    all.waits.sort_unstable();
    assert!(!all.nanos.is_empty(), "no request succeeded");
    all
}

/// The work of a new connection each so often, and none of a pool: what the floor adds to requests without a cap.
async fn dial_apart(port: u16, tls: Option<TlsConnector>, every: Duration) {
    let alarm = Alarm::new();
    let mut due = now();
    loop {
        due += every;
        alarm.wait_until(due).await;
        // Whatever fails costs less than what does not.
        let _ = dial_once(port, tls.as_ref()).await;
    }
}

async fn dial_once(port: u16, tls: Option<&TlsConnector>) -> std::io::Result<()> {
    let mut stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    stream.set_nodelay(true)?;
    // One request, so that the ticket for the next handshake is read.
    let get = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let mut bytes = [0; 2048];
    match tls {
        None => {
            stream.write_all(get).await?;
            // One segment has the whole answer.
            let _ = stream.read(&mut bytes).await?;
        }
        Some(tls) => {
            let mut stream = tls.connect(Ipv4Addr::LOCALHOST.into(), stream).await?;
            stream.write_all(get).await?;
            let _ = stream.read(&mut bytes).await?;
            stream.shutdown().await?;
        }
    }
    Ok(())
}

/// As many requests as go in `time`, from as many callers, a second.
async fn closed_loop(client: &Client, time: Duration) -> f64 {
    let start = now();
    let mut calls = JoinSet::new();
    for _ in 0..CALLERS {
        let client = client.clone();
        calls.spawn(async move {
            let mut asked = 0_u32;
            while start.elapsed() < time {
                // What the warm-up fails in, the turns will show.
                asked += u32::from(client.ask().await.is_ok());
            }
            asked
        });
    }
    let asked: u32 = calls.join_all().await.into_iter().sum();
    f64::from(asked) / start.elapsed().as_secs_f64()
}

// ---------------------------------------------------------------------------------------------------------------
// The figures
// ---------------------------------------------------------------------------------------------------------------

/// Of sorted times, in microseconds.
#[allow(clippy::cast_precision_loss)]
fn quantile(sorted: &[u64], thousandths: usize) -> f64 {
    let rank = (sorted.len() * thousandths).div_ceil(1000).max(1);
    sorted[rank - 1] as f64 / 1000.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The median over the rounds of one quantile.
fn over_rounds(rounds: &[Seen], of: fn(&Seen) -> &[u64], thousandths: usize) -> f64 {
    let each = rounds.iter().map(of);
    median(each.map(|sorted| quantile(sorted, thousandths)).collect())
}

/// What came of one pair's turns.
#[derive(Default)]
struct Rounds {
    capped: Vec<Seen>,
    uncapped: Vec<Seen>,
}

impl Rounds {
    fn print(&self, pair: &Pair, server: &str) {
        let both = self.capped.iter().zip(&self.uncapped);
        let mut ratios: Vec<_> = both
            .map(|(capped, uncapped)| quantile(&capped.nanos, 990) / quantile(&uncapped.nanos, 990))
            .collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let quartile = ratios.len() / 4;
        let sum = |of: fn(&Seen) -> u64| self.capped.iter().map(of).sum::<u64>();
        let both = self.capped.iter().chain(&self.uncapped);
        let failed: u64 = both.map(|seen| seen.failed).sum();
        let (own_dials, acquire) = match pair.capped {
            Client::Idempool(..) | Client::Floor { .. } => {
                let acquire = over_rounds(&self.capped, |seen| &seen.waits, 999);
                (
                    sum(|seen| seen.own_dials).to_string(),
                    format!("{acquire:.1}"),
                )
            }
            _ => ("-".to_owned(), "-".to_owned()),
        };
        let [capped, uncapped] = [&self.capped, &self.uncapped]
            .map(|rounds| [500, 990, 999].map(|it| over_rounds(rounds, |seen| &seen.nanos, it)));
        println!(
            "keepalive_cap: client={} scheme={} cap={CAP} server={server} p99_us={:.1} uncapped_p99_us={:.1} \
             ratio={:.2} p999_us={:.1} reconnects_on_path={own_dials} acquire_p999_us={acquire} \
             uncapped_p999_us={:.1} p50_us={:.1} uncapped_p50_us={:.1} ratio_quartiles={:.2}-{:.2} requests={} \
             connections={} failed={failed}",
            pair.client,
            pair.scheme.name(),
            capped[1],
            uncapped[1],
            ratios[ratios.len() / 2],
            capped[2],
            uncapped[2],
            capped[0],
            uncapped[0],
            ratios[quartile],
            ratios[ratios.len() - 1 - quartile],
            sum(|seen| seen.nanos.len() as u64),
            sum(|seen| seen.connections),
        );
    }
}

/// What the command line asks for.
struct Wanted {
    plan: Plan,
    server: Option<String>,
    threads: usize,
}

const FULL: Plan = Plan {
    rounds: 9,
    closed_loop: Duration::from_millis(500),
    warm_up: Duration::from_millis(250),
    measured: Duration::from_millis(1200),
};

const QUICK: Plan = Plan {
    rounds: 3,
    closed_loop: Duration::from_millis(200),
    warm_up: Duration::from_millis(200),
    measured: Duration::from_millis(500),
};

fn wanted() -> Result<Wanted, lexopt::Error> {
    use lexopt::prelude::*;
    let mut wanted = Wanted {
        plan: FULL,
        server: None,
        threads: 1,
    };
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("quick") => wanted.plan = QUICK,
            Long("server") => {
                wanted.server = Some(arguments.value()?.parse_with(|name| match name {
                    "own" | "nginx" => Ok(name.to_owned()),
                    _ => Err("it is own or nginx"),
                })?);
            }
            Long("threads") => wanted.threads = arguments.value()?.parse()?,
            // cargo passes it; it says nothing here.
            Long("bench") => {}
            _ => return Err(argument.unexpected()),
        }
    }
    Ok(wanted)
}

fn runtime(threads: usize) -> Runtime {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().expect("a runtime")
}

/// Opens the connections and learns the caps. The rate for a scheme is a third of what idempool did without a cap.
fn warm_up(runtime: &Runtime, pairs: &[Pair], scheme: Scheme, plan: Plan) -> f64 {
    let mut rate = 0.0;
    for pair in pairs.iter().filter(|pair| pair.scheme == scheme) {
        for client in [&pair.capped, &pair.uncapped] {
            runtime.block_on(closed_loop(client, plan.closed_loop));
        }
        if let Client::Idempool(..) = pair.uncapped {
            // The best of five: what else the machine does can only make it less.
            let runs =
                (0..5).map(|_| runtime.block_on(closed_loop(&pair.uncapped, plan.closed_loop)));
            let capacity = runs.fold(0.0, f64::max);
            rate = capacity / 3.0;
            println!(
                "{}: {capacity:.0} requests/s in a closed loop of {CALLERS}, so {rate:.0}/s",
                scheme.name()
            );
        }
    }
    let alarms = runtime.block_on(turn(None, 0, rate, plan));
    println!(
        "{}: alarm late by {:.1} us (p50), {:.1} us (p99), {:.1} us (p99.9) with no client",
        scheme.name(),
        quantile(&alarms.nanos, 500),
        quantile(&alarms.nanos, 990),
        quantile(&alarms.nanos, 999),
    );
    rate
}

fn main() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == SERVE) {
        return serve(arguments.next().expect("a directory").as_ref());
    }
    let Wanted {
        plan,
        server,
        threads,
    } = wanted().expect("--quick, --server own|nginx, --threads N");
    let server = match server.as_deref() {
        Some("own") => own(),
        Some(_) => nginx().expect("no nginx that starts"),
        None => nginx().unwrap_or_else(own),
    };
    println!(
        "server {}, client on {threads} thread(s), {} rounds of {:?}, {} cores",
        server.name,
        plan.rounds,
        plan.measured,
        std::thread::available_parallelism().map_or(0, usize::from),
    );
    let runtime = runtime(threads);
    let mut pairs = Vec::new();
    for (scheme, ports) in [
        (Scheme::Http, server.ports.http),
        (Scheme::Https, server.ports.https),
    ] {
        for name in NAMES {
            // The connectors ask for the runtime when they are made.
            let _entered = runtime.enter();
            // The floor has no cap; what it does instead is only done in its capped turns.
            let names = if name == FLOOR {
                [FLOOR, "idempool"]
            } else {
                [name; 2]
            };
            let ports = if name == FLOOR { [ports[1]; 2] } else { ports };
            let [capped, uncapped] =
                [0, 1].map(|at| Client::new(names[at], scheme, ports[at], &server.root));
            pairs.push(Pair {
                client: name,
                scheme,
                capped,
                uncapped,
            });
        }
    }
    let rates = [Scheme::Http, Scheme::Https].map(|it| warm_up(&runtime, &pairs, it, plan));
    let mut results: Vec<_> = pairs.iter().map(|_| Rounds::default()).collect();
    let mut order: Vec<_> = (0..pairs.len()).collect();
    for round in 0..plan.rounds {
        for &at in &order {
            let pair = &pairs[at];
            let rate = rates[usize::from(pair.scheme == Scheme::Https)];
            let mut take = |is_capped| {
                let client = if is_capped {
                    &pair.capped
                } else {
                    &pair.uncapped
                };
                let seen = runtime.block_on(turn(Some(client), round, rate, plan));
                let of = &mut results[at];
                if is_capped {
                    &mut of.capped
                } else {
                    &mut of.uncapped
                }
                .push(seen);
            };
            let capped_first = round % 2 == 0;
            take(capped_first);
            take(!capped_first);
        }
        order.rotate_left(1);
    }
    for pair in &pairs {
        if let (Client::Idempool(pool, _), Scheme::Https) = (&pair.capped, pair.scheme) {
            let stats = pool.stats();
            let (full, resumed) = (stats.tls_full, stats.tls_resumed);
            println!("idempool https with the cap: {full} full handshakes, {resumed} resumed");
        }
    }
    for (pair, rounds) in pairs.iter().zip(&results) {
        rounds.print(pair, server.name);
    }
}
