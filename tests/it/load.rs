//! Twenty thousand requests of five hundred tasks over ten connections, while callers give up and the server fails.
//!
//! What each request is and what becomes of it follows from one seed and its number alone; the seed is printed, and
//! `IDEMPOOL_SEED` sets it. The server counts for itself: a connection is open from the moment it was accepted until
//! the server has closed it, or has seen it end and closed it then.

// The waits are measured by the clock that the pool's own timers run on.
#![allow(clippy::disallowed_methods)]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use http::Request;
use http_body_util::{BodyExt, Full};
use idempool::{Error, ErrorKind, Pool, RequestTimeout, Timings};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::support::{drop_after, eventually};

const TASKS: u64 = 500;
/// On each of the two runtimes.
const REQUESTS: u64 = 10_000;
const CONNECTIONS: usize = 10;
const ACQUIRE_TIMEOUT: Duration = Duration::from_millis(500);
/// How much later than that a request may learn of it, beside what the machine takes for itself.
const GRACE: Duration = Duration::from_millis(50);

/// What the server does with a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Deed {
    Answer,
    Slow,
    SlowBody,
    /// With `Connection: close`.
    LastAnswer,
    CloseBefore,
    CloseWithin,
    ResetBefore,
    ResetWithin,
    /// Until the client closes.
    StallBefore,
    StallWithin,
}

impl Deed {
    /// Each deed, and how many of a hundred requests meet it.
    const ALL: [(Deed, u32); 10] = [
        (Deed::Answer, 64),
        (Deed::Slow, 6),
        (Deed::SlowBody, 6),
        (Deed::LastAnswer, 6),
        (Deed::CloseBefore, 4),
        (Deed::CloseWithin, 4),
        (Deed::ResetBefore, 2),
        (Deed::ResetWithin, 2),
        (Deed::StallBefore, 3),
        (Deed::StallWithin, 3),
    ];

    fn any(random: &mut Rng) -> Deed {
        let mut left = random.u32(0..100);
        for (deed, share) in Deed::ALL {
            match left.checked_sub(share) {
                Some(rest) => left = rest,
                None => return deed,
            }
        }
        unreachable!("the shares add up to a hundred")
    }

    fn is_fault(self) -> bool {
        !matches!(
            self,
            Deed::Answer | Deed::Slow | Deed::SlowBody | Deed::LastAnswer
        )
    }

    fn is_stall(self) -> bool {
        matches!(self, Deed::StallBefore | Deed::StallWithin)
    }
}

/// How far the client goes.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Never,
    /// Drops the exchange when it has been polled so many times.
    Polls(usize),
    /// Drops it when so much time has passed, wherever it is.
    Time(Duration),
    /// Drops it so long after the server has read the request.
    Arrival(Duration),
    /// Drops the body after so many frames.
    Body(usize),
}

impl Cut {
    fn any(random: &mut Rng) -> Cut {
        match random.u32(0..100) {
            0..5 => Cut::Polls(random.usize(1..9)),
            5..10 => Cut::Time(Duration::from_micros(20 << random.u32(0..14))),
            10..15 => Cut::Arrival(Duration::from_micros(random.u64(0..6_000))),
            15..22 => Cut::Body(random.usize(0..2)),
            _ => Cut::Never,
        }
    }
}

/// One request, as its number and the seed have it.
#[derive(Clone, Copy, Debug)]
struct Plan {
    id: u64,
    deed: Deed,
    pause: Duration,
    upload: usize,
    answer: usize,
    cut: Cut,
    /// Over all of the exchange, where nobody else ends it.
    limit: Option<Duration>,
}

impl Plan {
    fn new(seed: u64, id: u64) -> Plan {
        let mut random = Rng::with_seed(seed.wrapping_mul(1_000_003).wrapping_add(id));
        let deed = Deed::any(&mut random);
        let mut plan = Plan {
            id,
            deed,
            pause: Duration::from_micros(random.u64(500..6_000)),
            upload: match random.u32(0..10) {
                0 => 20_000,
                _ => 0,
            },
            answer: match random.u32(0..20) {
                // More than the pool reads to save a connection, and more than it reads to say goodbye.
                0 => random.usize(20_000..300_000),
                _ => random.usize(0..2_000),
            },
            cut: Cut::any(&mut random),
            limit: None,
        };
        if deed.is_stall() {
            if random.u32(0..10) == 0 {
                plan.cut = Cut::Never;
                plan.limit = Some(Duration::from_millis(200));
            } else {
                plan.cut = Cut::Arrival(plan.pause);
            }
        }
        plan
    }

    fn request(&self, server: &Server) -> Request<Full<Bytes>> {
        let Plan {
            id,
            deed,
            pause,
            answer,
            ..
        } = self;
        let place = Deed::ALL.iter().position(|(known, _)| known == deed);
        let place = place.expect("a deed");
        let pause = pause.as_micros();
        let url = format!("http://{}/{id}/{place}/{pause}/{answer}", server.address);
        let mut request = Request::post(url)
            .body(Full::from(vec![b'x'; self.upload]))
            .expect("a valid request");
        if let Some(limit) = self.limit {
            request.extensions_mut().insert(RequestTimeout(limit));
        }
        request
    }
}

/// The answer to a request: its number again and again.
fn answer(id: u64, size: usize) -> String {
    let unit = format!("{id} ");
    let mut text = unit.repeat(size / unit.len() + 1);
    text.truncate(size);
    format!("{id}:{text}")
}

#[derive(Default)]
struct Counts {
    open: AtomicUsize,
    most_open: AtomicUsize,
    accepted: AtomicUsize,
    /// Bytes that came while an answer was under way.
    unasked: AtomicUsize,
    /// Whom to tell that a request was read.
    arrivals: Mutex<HashMap<u64, oneshot::Sender<()>>>,
}

/// The server, on a thread of its own.
struct Server {
    address: SocketAddr,
    counts: Arc<Counts>,
    stop: Option<oneshot::Sender<()>>,
}

impl Server {
    fn start() -> Server {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        listener.set_nonblocking(true).expect("a socket for tokio");
        let address = listener.local_addr().expect("address");
        let counts = Arc::new(Counts::default());
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&counts);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                // A task like those of the connections, so that what happened first is seen first.
                let accepting = tokio::spawn(accept(listener, shared));
                let _ = stopped.await;
                accepting.abort();
            });
        });
        Server {
            address,
            counts,
            stop: Some(stop),
        }
    }

    fn open(&self) -> usize {
        self.counts.open.load(SeqCst)
    }

    /// Has somebody told when this request was read.
    fn expect(&self, id: u64, tell: oneshot::Sender<()>) {
        self.counts.arrivals.lock().unwrap().insert(id, tell);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
    }
}

async fn accept(listener: TcpListener, counts: Arc<Counts>) {
    while let Ok((stream, _)) = listener.accept().await {
        counts.accepted.fetch_add(1, SeqCst);
        let open = counts.open.fetch_add(1, SeqCst) + 1;
        counts.most_open.fetch_max(open, SeqCst);
        tokio::spawn(serve(stream, Arc::clone(&counts)));
    }
}

/// What the server does with a connection after an answer.
enum Then {
    Stay,
    Close,
    Reset,
}

async fn serve(mut stream: TcpStream, counts: Arc<Counts>) {
    stream.set_nodelay(true).expect("nodelay");
    let (mut input, mut output) = stream.split();
    let mut received = Vec::new();
    let then = loop {
        let Some(target) = read_request(&mut input, &mut received).await else {
            break Then::Close;
        };
        let mut numbers = target.split('/').skip(1).map(|n| n.parse().expect("u64"));
        let mut number = || -> u64 { numbers.next().expect("a number") };
        let (id, place, pause, size) = (number(), number(), number(), number());
        let deed = Deed::ALL[usize::try_from(place).expect("a place")].0;
        let pause = Duration::from_micros(pause);
        let text = answer(id, usize::try_from(size).expect("a size"));
        if let Some(arrival) = counts.arrivals.lock().unwrap().remove(&id) {
            let _ = arrival.send(());
        }
        // It sees the client's end at once, whatever it is at.
        let then = tokio::select! {
            biased;
            () = gone(&mut input, &mut received, &counts) => Then::Close,
            then = obey(deed, pause, &text, &mut output) => then,
        };
        if !matches!(then, Then::Stay) {
            break then;
        }
    };
    if let Then::Reset = then {
        let socket = SockRef::from(&stream);
        socket.set_linger(Some(Duration::ZERO)).expect("linger");
    }
    // Closed before it is counted, and nobody is accepted in between: the thread is the only one.
    drop(stream);
    counts.open.fetch_sub(1, SeqCst);
}

/// Reads a request, and gives its target. `None` when the client has closed.
async fn read_request(
    input: &mut (impl AsyncRead + Unpin),
    received: &mut Vec<u8>,
) -> Option<String> {
    let end = loop {
        if let Some(end) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end + 4;
        }
        if input.read_buf(received).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(received.drain(..end).collect()).expect("an ASCII head");
    let target = head.split(' ').nth(1).expect("a target").to_owned();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse().expect("a length"))
    });
    let length = length.unwrap_or(0);
    while received.len() < length {
        if input.read_buf(received).await.ok()? == 0 {
            return None;
        }
    }
    received.drain(..length);
    Some(target)
}

async fn gone(input: &mut (impl AsyncRead + Unpin), received: &mut Vec<u8>, counts: &Counts) {
    while input.read_buf(received).await.is_ok_and(|read| read > 0) {
        counts.unasked.fetch_add(1, SeqCst);
    }
}

async fn obey(
    deed: Deed,
    pause: Duration,
    text: &str,
    output: &mut (impl AsyncWrite + Unpin),
) -> Then {
    match deed {
        Deed::CloseBefore => return Then::Close,
        Deed::ResetBefore => return Then::Reset,
        Deed::StallBefore => std::future::pending().await,
        Deed::Slow => sleep(pause).await,
        _ => {}
    }
    let close = match deed {
        Deed::LastAnswer => "Connection: close\r\n",
        _ => "",
    };
    let (first, rest) = text.split_at(text.len() / 2);
    let mut message = match text.len() % 2 {
        0 => format!(
            "HTTP/1.1 200 OK\r\n{close}Content-Length: {}\r\n\r\n{first}",
            text.len()
        ),
        _ => format!(
            "HTTP/1.1 200 OK\r\n{close}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{text}",
            text.len()
        ),
    };
    let mut rest = rest.to_owned();
    if text.len() % 2 == 1 {
        message.truncate(message.len() - rest.len());
        rest.push_str("\r\n0\r\n\r\n");
    }
    let whole = matches!(deed, Deed::Answer | Deed::Slow | Deed::LastAnswer);
    if whole {
        message.push_str(&rest);
    }
    if output.write_all(message.as_bytes()).await.is_err() {
        return Then::Close;
    }
    match deed {
        Deed::CloseWithin => return Then::Close,
        Deed::ResetWithin => return Then::Reset,
        Deed::StallWithin => std::future::pending().await,
        Deed::SlowBody => {
            sleep(pause).await;
            if output.write_all(rest.as_bytes()).await.is_err() {
                return Then::Close;
            }
        }
        _ => {}
    }
    match deed {
        Deed::LastAnswer => Then::Close,
        _ => Then::Stay,
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    Answered,
    Cancelled,
    Faulted,
    TimedOutInLine,
}

/// A wait for a connection that was longer than it should have been.
struct Wait {
    from: Instant,
    to: Instant,
    time: Duration,
}

/// What the tasks share.
struct Run {
    pool: Pool,
    server: Server,
    seed: u64,
    next: AtomicU64,
    long_waits: Mutex<Vec<Wait>>,
    /// When the machine was late, and by how much, for a task that only sleeps.
    delays: Mutex<Vec<(Instant, Duration)>>,
    is_over: AtomicBool,
}

impl Run {
    fn note_wait(&self, from: Instant, time: Duration) {
        if time > ACQUIRE_TIMEOUT + GRACE {
            let to = Instant::now();
            self.long_waits
                .lock()
                .unwrap()
                .push(Wait { from, to, time });
        }
    }

    /// The exchange, up to so many frames of its body. `None` if it was left there.
    async fn exchange(&self, plan: &Plan, frames: usize) -> Result<Option<String>, Error> {
        let from = Instant::now();
        let sent = self.pool.send(plan.request(&self.server)).await;
        let response = match sent {
            Ok(response) => response,
            Err(error) => {
                if error.kind() == ErrorKind::AcquireTimeout {
                    self.note_wait(from, from.elapsed());
                }
                return Err(error);
            }
        };
        let timings = response.extensions().get::<Timings>().expect("timings");
        self.note_wait(from, timings.acquire());
        let mut body = response.into_body();
        let mut bytes = Vec::new();
        let mut left = frames;
        loop {
            if left == 0 {
                return Ok(None);
            }
            left -= 1;
            match body.frame().await {
                Some(frame) => bytes.extend(frame?.into_data().unwrap_or_default()),
                None => return Ok(Some(String::from_utf8(bytes).expect("text"))),
            }
        }
    }

    /// The exchange as far as the plan goes. `None` where the client gave up.
    async fn as_planned(&self, plan: &Plan) -> Option<Result<String, Error>> {
        let frames = match plan.cut {
            Cut::Body(frames) => frames,
            _ => usize::MAX,
        };
        let exchange = self.exchange(plan, frames);
        let result = match plan.cut {
            Cut::Never | Cut::Body(_) => Some(exchange.await),
            Cut::Polls(polls) => drop_after(polls, exchange).await,
            Cut::Time(time) => tokio::time::timeout(time, exchange).await.ok(),
            Cut::Arrival(time) => {
                let (tell, arrived) = oneshot::channel();
                self.server.expect(plan.id, tell);
                let late = async {
                    match arrived.await {
                        Ok(()) => sleep(time).await,
                        Err(_) => std::future::pending().await,
                    }
                };
                let mut exchange = pin!(exchange);
                tokio::select! {
                    result = &mut exchange => Some(result),
                    () = late => None,
                }
            }
        };
        result?.transpose()
    }

    async fn one(&self, plan: &Plan) -> Outcome {
        match self.as_planned(plan).await {
            None => Outcome::Cancelled,
            Some(Ok(text)) => {
                assert!(!plan.deed.is_fault(), "nobody noticed: {plan:?}");
                assert!(
                    text == answer(plan.id, plan.answer),
                    "somebody else's answer: {plan:?}"
                );
                Outcome::Answered
            }
            Some(Err(error)) if error.kind() == ErrorKind::AcquireTimeout => {
                Outcome::TimedOutInLine
            }
            Some(Err(error)) => {
                assert!(plan.deed.is_fault(), "no answer: {plan:?}: {error:?}");
                Outcome::Faulted
            }
        }
    }

    async fn task(self: Arc<Self>) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        loop {
            let id = self.next.fetch_add(1, SeqCst);
            if id >= REQUESTS {
                return outcomes;
            }
            outcomes.push(self.one(&Plan::new(self.seed, id)).await);
        }
    }

    /// Holds every connection for longer than anybody waits, so that there are waits that come to their end
    /// however fast the machine is.
    async fn hold_all_connections(self: &Arc<Self>) -> Vec<impl Sized + use<>> {
        let mut held = Vec::new();
        for number in 0..CONNECTIONS as u64 {
            let plan = Plan {
                deed: Deed::StallWithin,
                cut: Cut::Never,
                limit: None,
                ..Plan::new(self.seed, REQUESTS + number)
            };
            let sent = self.pool.send(plan.request(&self.server)).await;
            held.push(sent.expect("a response head"));
        }
        held
    }

    /// Notes for how long this runtime leaves alone who wants to go on.
    async fn watch_the_machine(self: Arc<Self>) {
        while !self.is_over.load(SeqCst) {
            let due = Instant::now() + Duration::from_millis(1);
            sleep_until(due).await;
            self.delays.lock().unwrap().push((due, due.elapsed()));
        }
    }

    /// Waits that were too long, those not counted during which the machine was late by as much.
    fn late_waiters(&self) -> usize {
        let delays = self.delays.lock().unwrap();
        let is_late = |wait: &&Wait| {
            let overlapping = delays
                .iter()
                .filter(|(due, delay)| *due <= wait.to && *due + *delay >= wait.from);
            let worst = overlapping.map(|(_, delay)| *delay).max();
            // Twice: hundreds of waits end at the same time, and the last of them has all others before it.
            let is_late = wait.time > ACQUIRE_TIMEOUT + GRACE + 2 * worst.unwrap_or_default();
            if is_late {
                println!(
                    "load: waited {:?}, the machine was late by {worst:?}",
                    wait.time
                );
            }
            is_late
        };
        self.long_waits
            .lock()
            .unwrap()
            .iter()
            .filter(is_late)
            .count()
    }
}

/// What is printed of a run.
#[derive(Default)]
struct Report {
    requests: usize,
    most: usize,
    late_waiters: usize,
    answered: usize,
    cancelled: usize,
    faulted: usize,
    timed_out: usize,
    leaked: i128,
    connections: usize,
}

impl Report {
    fn add(&mut self, other: &Report) {
        self.requests += other.requests;
        self.most = self.most.max(other.most);
        self.late_waiters += other.late_waiters;
        self.answered += other.answered;
        self.cancelled += other.cancelled;
        self.faulted += other.faulted;
        self.timed_out += other.timed_out;
        self.leaked += other.leaked;
        self.connections += other.connections;
    }

    fn print(&self, runtime: &str, seed: u64) {
        println!(
            "load: requests={} max_server_connections={} late_waiters={} failed={} leaked={} answered={} \
             cancelled={} faulted={} timed_out_in_line={} connections={} runtime={runtime} seed={seed}",
            self.requests,
            self.most,
            self.late_waiters,
            self.requests - self.answered,
            self.leaked,
            self.answered,
            self.cancelled,
            self.faulted,
            self.timed_out,
            self.connections,
        );
    }
}

async fn run(runtime: &'static str, seed: u64) -> Report {
    let run = Arc::new(Run {
        pool: Pool::builder()
            .max_connections_per_origin(CONNECTIONS)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            // Stalls are many here, and the rest of a stalled body is waited for for so long.
            .drain(64 * 1024, Duration::from_millis(5))
            .build(),
        server: Server::start(),
        seed,
        next: AtomicU64::new(0),
        long_waits: Mutex::default(),
        delays: Mutex::default(),
        is_over: AtomicBool::new(false),
    });
    let watch = tokio::spawn(Arc::clone(&run).watch_the_machine());
    let held = run.hold_all_connections().await;
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        tasks.spawn(Arc::clone(&run).task());
    }
    sleep(2 * ACQUIRE_TIMEOUT).await;
    drop(held);
    let mut outcomes = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        outcomes.extend(ended.expect("a task"));
    }
    run.is_over.store(true, SeqCst);
    watch.await.expect("the watch");

    let mut stats = run.pool.stats();
    eventually("nothing is held any more", || {
        stats = run.pool.stats();
        (stats.busy, stats.dialing, stats.closing, stats.waiting) == (0, 0, 0, 0)
    })
    .await;
    let count = |wanted| {
        outcomes
            .iter()
            .filter(|outcome| **outcome == wanted)
            .count()
    };
    let accounted = stats.closes.total() + stats.idle;
    let counts = &run.server.counts;
    let report = Report {
        requests: outcomes.len(),
        most: counts.most_open.load(SeqCst),
        late_waiters: run.late_waiters(),
        answered: count(Outcome::Answered),
        cancelled: count(Outcome::Cancelled),
        faulted: count(Outcome::Faulted),
        timed_out: count(Outcome::TimedOutInLine),
        leaked: i128::from(stats.connections_opened) - i128::from(accounted),
        connections: counts.accepted.load(SeqCst),
    };
    report.print(runtime, seed);
    assert_eq!(report.requests as u64, REQUESTS);
    assert_eq!(
        report.most, CONNECTIONS,
        "connections that the server saw at once"
    );
    assert_eq!(report.late_waiters, 0, "somebody waited for too long");
    assert_eq!(
        report.leaked, 0,
        "connections that nobody has and nobody closed"
    );
    assert_eq!(counts.unasked.load(SeqCst), 0, "a request behind a request");
    assert!(report.answered > 0, "no request was answered");
    assert!(report.timed_out > 0, "nobody's wait came to its end");

    let run = Arc::into_inner(run).expect("the tasks are over");
    drop(run.pool);
    eventually("the server has no connection any more", || {
        run.server.open() == 0
    })
    .await;
    report
}

/// Whatever its clients and its server do, the pool keeps its limit, its time limits and its books.
#[test]
fn under_cancels_and_faults_the_limit_the_line_and_the_books_are_kept() {
    let seed = std::env::var("IDEMPOOL_SEED");
    let seed = seed.map_or_else(|_| fastrand::u64(..), |seed| seed.parse().expect("a seed"));
    println!("load: IDEMPOOL_SEED={seed}");
    let current = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let mut total = current.block_on(run("current_thread", seed));
    let multi = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    // As a task, so that it runs on a worker and not beside them.
    let ended = multi.block_on(multi.spawn(run("multi_thread", seed)));
    total.add(&ended.expect("the test passes"));
    total.print("both", seed);
}
