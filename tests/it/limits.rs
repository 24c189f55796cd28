//! The limits and the line, as a server and a caller see them: what is never exceeded, who is served next, and
//! what becomes of a request that is not served.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::future::{Future, pending, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::join_all;
use idempool::{
    CloseReason, Delivery, Error, ErrorKind, FreshConnection, Phase, Pool, ReplayBody, Resolve,
    Resolving, Retry, RetryPolicy,
};
use tokio::net::TcpSocket;
use tokio::sync::Barrier;
use tower::ServiceExt;

use crate::support::{
    BOTH, Conn, Gate, Peer, Scheme, builder, eventually, fetch, get, hold_runtime_until,
    on_both_runtimes, read,
};

/// Short, and long enough for the first request of a test on a busy machine.
const SHORT: Duration = Duration::from_millis(400);

/// How many connections a server has that the client has not closed yet. A script's own end comes too late for
/// that: the client may know of the server's close before the script's thread has counted it.
#[derive(Clone, Debug, Default)]
struct Census(Arc<Mutex<(usize, usize)>>);

impl Census {
    fn most(&self) -> usize {
        self.0.lock().unwrap().1
    }

    /// A script that counts its connection from the first byte to the client's close, or to one of its own.
    fn script(
        &self,
        answer: impl Fn(&mut Conn, &str) -> bool + Send + Sync + 'static,
    ) -> impl Fn(&mut Conn) + Send + Sync + 'static {
        let census = self.clone();
        move |conn| {
            {
                let mut counts = census.0.lock().unwrap();
                counts.0 += 1;
                counts.1 = counts.1.max(counts.0);
            }
            while let Some(request) = conn.read_request() {
                conn.apply(&request);
                if !answer(conn, &request.id()) {
                    break;
                }
            }
            census.0.lock().unwrap().0 -= 1;
        }
    }
}

/// Every name is one peer.
struct Everywhere(SocketAddr);

impl Resolve for Everywhere {
    fn resolve(&self, _: &str, _: u16) -> Resolving {
        let address = self.0;
        Box::pin(async move { Ok(vec![address]) })
    }
}

/// What a name leads to.
#[derive(Clone)]
enum Leads {
    To(SocketAddr),
    /// The answer does not come.
    Nowhere,
    /// No address, once the gate is open.
    Fails(Gate),
}

/// Leads the n-th question where the n-th entry says, and all later ones where the last one does.
struct Signpost {
    entries: Mutex<Vec<Leads>>,
    asked: AtomicUsize,
}

impl Signpost {
    fn new(entries: impl Into<Vec<Leads>>) -> Arc<Signpost> {
        Arc::new(Signpost {
            entries: Mutex::new(entries.into()),
            asked: AtomicUsize::new(0),
        })
    }

    fn turn(&self, leads: Leads) {
        *self.entries.lock().unwrap() = vec![leads];
    }

    fn asked(&self) -> usize {
        self.asked.load(SeqCst)
    }
}

impl Resolve for Signpost {
    fn resolve(&self, _: &str, _: u16) -> Resolving {
        let at = self.asked.fetch_add(1, SeqCst);
        let entries = self.entries.lock().unwrap();
        let leads = entries[at.min(entries.len() - 1)].clone();
        Box::pin(async move {
            match leads {
                Leads::To(address) => Ok(vec![address]),
                Leads::Nowhere => pending().await,
                Leads::Fails(gate) => {
                    eventually("the gate opens", || gate.is_open()).await;
                    Err(io::Error::other("the signpost is broken"))
                }
            }
        })
    }
}

/// A place where nobody listens, and nobody else can begin to.
fn dead() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(([127, 0, 0, 1], 0).into())
        .expect("a free port");
    socket
}

/// Polls a future once, which must not end by that.
async fn begin<F: Future + Unpin>(mut future: F) -> F {
    poll_fn(|cx| {
        let poll = std::pin::Pin::new(&mut future).poll(cx);
        assert!(poll.is_pending(), "it ended at once");
        Poll::Ready(())
    })
    .await;
    future
}

/// A request in a task of its own.
fn spawn(pool: &Pool, url: &str) -> tokio::task::JoinHandle<Result<String, Error>> {
    let (pool, request) = (pool.clone(), get(url));
    tokio::spawn(async move { fetch(&pool, request).await })
}

/// A peer that answers with the request's own id, and with those that begin with `/slow` waits for the gate
/// first.
fn slow_peer(scheme: Scheme, gate: &Gate) -> Peer {
    let gate = gate.clone();
    Peer::start(scheme, move |conn| {
        while let Some(request) = conn.read_request() {
            if request.id().starts_with("/slow") {
                gate.pass();
            }
            conn.reply(&request.id());
        }
    })
}

fn assert_not_sent(error: &Error, kind: ErrorKind, phase: Phase) {
    assert_eq!((error.kind(), error.phase()), (kind, phase), "{error:?}");
    assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    assert!(error.connection().is_none(), "{error:?}");
}

/// What stands below an error, joined.
fn causes(error: &Error) -> String {
    let mut text = String::new();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}

/// seanmonstar/reqwest#1517: no bound, until "too many open files". seanmonstar/reqwest#2445: what counts is how
/// many there are, not how many are being opened.
#[test]
fn a_burst_is_served_whole_by_as_many_connections_as_are_allowed() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let all_wait = Gate::new();
            let gate = all_wait.clone();
            let peer = Peer::start(scheme, move |conn| {
                gate.pass();
                conn.answer_requests(usize::MAX);
            });
            let pool = builder().max_connections_per_origin(10).build();
            let burst = (0..300).map(|_| spawn(&pool, &peer.url("/")));
            let burst: Vec<_> = burst.collect();
            eventually("ten are under way, all others in line", || {
                let stats = pool.stats();
                (stats.busy, stats.dialing, stats.waiting) == (10, 0, 290)
            })
            .await;
            eventually("they have arrived", || peer.open() == 10).await;
            all_wait.open();
            for outcome in join_all(burst).await {
                outcome.unwrap().expect("a response");
            }
            assert_eq!((peer.accepted(), peer.most_open()), (10, 10), "{scheme}");
            let stats = pool.stats();
            assert_eq!((stats.waiting, stats.requests_failed), (0, 0), "{scheme}");
        }
    });
}

/// seanmonstar/reqwest#2445: a limit on dials alone lets long responses pile up.
#[tokio::test]
async fn long_responses_count_against_the_limit_to_their_end() {
    for scheme in BOTH {
        let (first_ends, rest_ends) = (Gate::new(), Gate::new());
        let gates = (first_ends.clone(), rest_ends.clone());
        let peer = Peer::start(scheme, move |conn| {
            while let Some(request) = conn.read_request() {
                conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlo");
                match request.id().as_str() {
                    "/long/0" => gates.0.pass(),
                    "/one-more" => {}
                    _ => gates.1.pass(),
                }
                conn.send("ng");
            }
        });
        let pool = builder().max_connections_per_origin(10).build();
        let long = (0..10).map(|n| pool.send(get(&peer.url(&format!("/long/{n}")))));
        let mut long = join_all(long).await.into_iter();
        let first = long.next().expect("the first").expect("a head");
        let one_more = spawn(&pool, &peer.url("/one-more"));
        eventually("it waits", || pool.stats().waiting == 1).await;
        assert_eq!((peer.accepted(), pool.stats().busy), (10, 10), "{scheme}");
        first_ends.open();
        assert_eq!(read(first).await.expect("a body"), "long", "{scheme}");
        assert_eq!(one_more.await.unwrap().expect("a response"), "long");
        assert_eq!(peer.accepted(), 10, "{scheme}");
        rest_ends.open();
        for response in long {
            read(response.expect("a head")).await.expect("a body");
        }
    }
}

/// seanmonstar/reqwest#1089: how many connect and how many wait are two questions.
#[tokio::test]
async fn one_request_more_than_may_wait_is_turned_away_at_once_and_not_repeated() {
    let late = Gate::new();
    let peer = slow_peer(Scheme::Http, &late);
    let pool = builder()
        .max_connections_per_origin(1)
        .max_waiters(2)
        .build();
    let served: Vec<_> = (0..3)
        .map(|n| spawn(&pool, &peer.url(&format!("/slow/{n}"))))
        .collect();
    eventually("one is under way, two wait", || {
        let stats = pool.stats();
        (stats.busy, stats.waiting) == (1, 2)
    })
    .await;
    let client = Retry::new(pool.clone(), RetryPolicy::default());
    let request = http::Request::get(peer.url("/surplus"));
    let request = request.body(ReplayBody::empty()).unwrap();
    // Nothing is let go meanwhile: it has not waited for anybody.
    let error = client.oneshot(request).await.expect_err("too many");
    assert_not_sent(&error, ErrorKind::Overloaded, Phase::Queue);
    let stats = pool.stats();
    assert_eq!((stats.requests, stats.retries.total()), (4, 0));
    assert_eq!((stats.busy, stats.waiting), (1, 2));
    late.open();
    for (n, outcome) in join_all(served).await.into_iter().enumerate() {
        let body = outcome.unwrap().expect("a response");
        assert_eq!(body, format!("/slow/{n}"));
    }
    assert_eq!((peer.accepted(), peer.requests().len()), (1, 3));
}

/// seanmonstar/reqwest#2424: with very many hosts, a limit for each is none.
#[tokio::test]
async fn of_many_origins_those_used_last_keep_an_idle_connection() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder()
        .max_idle(20)
        .resolver(Everywhere(peer.address()))
        .build();
    for n in 0..60 {
        let url = format!("http://h{n:02}.example/");
        fetch(&pool, get(&url)).await.expect("a response");
        assert!(pool.stats().idle <= 20);
    }
    let stats = pool.stats();
    assert_eq!((stats.idle, stats.busy), (20, 0));
    let kept = stats.origins.iter().filter(|origin| origin.idle > 0);
    let kept: Vec<_> = kept.map(|origin| origin.origin.host().to_owned()).collect();
    let last: Vec<_> = (40..60).map(|n| format!("h{n}.example")).collect();
    assert_eq!(kept, last);
    eventually("the others are closed", || {
        peer.ended().len() == 40 && pool.stats().closes.get(CloseReason::IdleLimit) == 40
    })
    .await;
    assert_eq!(pool.stats().closes.total(), 40);
}

/// seanmonstar/reqwest#2424: the limit of all is nobody's dead end.
#[tokio::test]
async fn at_the_limit_of_all_an_idle_connection_of_another_origin_makes_room() {
    let census = Census::default();
    let peer = Peer::start(
        Scheme::Http,
        census.script(|conn, id| {
            conn.reply(id);
            true
        }),
    );
    let pool = builder()
        .max_connections(2)
        .resolver(Everywhere(peer.address()))
        .build();
    for host in ["a", "b", "c"] {
        let url = format!("http://{host}.example/");
        fetch(&pool, get(&url)).await.expect("a response");
    }
    let stats = pool.stats();
    let hosts = stats.origins.iter().map(|origin| origin.origin.host());
    assert_eq!(hosts.collect::<Vec<_>>(), ["b.example", "c.example"]);
    assert_eq!(stats.closes.get(CloseReason::MadeRoom), 1);
    assert_eq!((stats.closes.total(), census.most()), (1, 2));
}

/// seanmonstar/reqwest#2424, golang/go#32336: with all busy the next one waits, and none waits for ever.
#[tokio::test]
async fn at_the_limit_of_all_other_origins_wait_for_their_turn() {
    for limit in [1, 2] {
        let (census, late) = (Census::default(), Gate::new());
        let gate = late.clone();
        let peer = Peer::start(
            Scheme::Http,
            census.script(move |conn, id| {
                if id.starts_with("/slow") {
                    gate.pass();
                }
                conn.reply(id);
                true
            }),
        );
        let pool = builder()
            .max_connections(limit)
            .resolver(Everywhere(peer.address()))
            .build();
        let mut all = Vec::new();
        for n in 0..limit {
            all.push(spawn(&pool, &format!("http://slow{n}.example/slow")));
            eventually("it is under way", || peer.requests().len() == n + 1).await;
        }
        for n in 0..6 {
            let host = ["a", "b", "c"][n % 3];
            all.push(spawn(&pool, &format!("http://{host}.example/{n}")));
            eventually("it waits", || pool.stats().waiting == n as u64 + 1).await;
        }
        late.open();
        for outcome in join_all(all).await {
            outcome.unwrap().expect("a response");
        }
        let served = peer.requests();
        let served: Vec<_> = served.iter().skip(limit).map(|it| it.id()).collect();
        // Two at a time are read by the server in an order of its own.
        if limit == 1 {
            assert_eq!(served, ["/0", "/1", "/2", "/3", "/4", "/5"]);
        }
        assert_eq!((served.len(), census.most()), (6, limit));
        assert_eq!(pool.stats().waiting, 0);
    }
}

/// seanmonstar/reqwest#2825: a permit for each way in which a connection can end.
#[tokio::test]
async fn whatever_becomes_of_a_connection_its_seat_is_free_again() {
    let peer = Peer::start(Scheme::Http, |conn| {
        while let Some(request) = conn.read_request() {
            match request.id().as_str() {
                "/error" => return conn.close(),
                "/reset" => return conn.rst(),
                "/silent" => {
                    conn.await_end();
                    return;
                }
                "/unread" => {
                    conn.reply(&"x".repeat(1_000_000));
                }
                "/switch" => {
                    conn.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n");
                    conn.await_end();
                    return;
                }
                "/close" => conn.reply_with("Connection: close\r\n", "x"),
                id => conn.reply(id),
            }
        }
    });
    let dead = dead();
    let to_dead = dead.local_addr().expect("an address");
    let no_tls = Peer::start(Scheme::Http, |conn| {
        conn.await_first_byte();
        conn.close();
    });
    let signpost = Signpost::new([Leads::To(peer.address())]);
    let pool = builder()
        .max_connections(1)
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    for round in 0..3 {
        for case in [
            "/",
            "/error",
            "/reset",
            "/silent",
            "/unread",
            "/switch",
            "/close",
            "refused",
            "no handshake",
        ] {
            let url = match case {
                "refused" => {
                    signpost.turn(Leads::To(to_dead));
                    "http://refused.example/".to_owned()
                }
                "no handshake" => {
                    signpost.turn(Leads::To(no_tls.address()));
                    "https://pay.example/".to_owned()
                }
                path => format!("http://pay.example{path}"),
            };
            let call = pool.send(get(&url));
            match case {
                "/silent" => {
                    let mut call = pin!(call);
                    let seen = peer.requests().len();
                    tokio::select! {
                        _ = &mut call => panic!("an answer"),
                        () = eventually("it is under way", || peer.requests().len() > seen) => {}
                    }
                }
                "/unread" | "/switch" => drop(call.await),
                "/error" | "/reset" | "refused" | "no handshake" => {
                    call.await.expect_err(case);
                }
                _ => {
                    read(call.await.expect(case)).await.expect(case);
                }
            }
            signpost.turn(Leads::To(peer.address()));
            let next = fetch(&pool, get("http://pay.example/next")).await;
            assert_eq!(next.expect(case), "/next", "{case}, round {round}");
        }
    }
    let stats = pool.stats();
    assert_eq!((stats.busy, stats.dialing, stats.waiting), (0, 0, 0));
}

/// aio-libs/aiohttp#9670: a wake-up that met a request just out of time was lost, and so was its connection.
#[tokio::test]
async fn requests_that_stop_waiting_at_any_moment_take_no_connection_with_them() {
    for scheme in BOTH {
        let is_slow = Arc::new(AtomicBool::new(true));
        let slow = Arc::clone(&is_slow);
        let peer = Peer::start(scheme, move |conn| {
            while let Some(request) = conn.read_request() {
                if slow.load(SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                conn.reply(&request.id());
            }
        });
        let pool = builder().max_connections_per_origin(2).build();
        for round in 0..3 {
            let calls = (0..50).map(|n: u64| {
                // From before the first answer to after the tenth.
                let patience = Duration::from_millis(1 + (n * 7 + round) % 50);
                tokio::time::timeout(patience, fetch(&pool, get(&peer.url("/slow"))))
            });
            join_all(calls).await;
        }
        is_slow.store(false, SeqCst);
        let calls = (0..50).map(|_| fetch(&pool, get(&peer.url("/fast"))));
        for outcome in join_all(calls).await {
            assert_eq!(outcome.expect("a response"), "/fast", "{scheme}");
        }
        let stats = pool.stats();
        assert_eq!((stats.waiting, stats.busy), (0, 0), "{scheme}");
        assert!(stats.idle > 0 && stats.idle <= 2, "{scheme}: {stats}");
    }
}

/// aio-libs/aiohttp#4936: a newcomer took the place of somebody who had been woken for it, who then dialled on
/// top of it. golang/go#32336: or nobody was woken. Every answer brings a newcomer here.
#[tokio::test]
async fn at_a_limit_of_one_all_take_turns_and_never_two_at_once() {
    for scheme in BOTH {
        let census = Census::default();
        let peer = Peer::start(
            scheme,
            census.script(|conn, id| {
                // A seat that comes back with a connection in it, and one without, in turns.
                let closes = id.ends_with('0') || id.ends_with('3');
                if closes {
                    conn.reply_with("Connection: close\r\n", id);
                    conn.await_end();
                } else {
                    conn.reply(id);
                }
                !closes
            }),
        );
        let pool = builder().max_connections_per_origin(1).build();
        let callers = (0..5).map(|caller| {
            let (pool, peer) = (&pool, &peer);
            async move {
                for turn in 0..10 {
                    let path = format!("/{turn}/{caller}");
                    let body = fetch(pool, get(&peer.url(&path))).await;
                    assert_eq!(body.expect("a response"), path);
                }
            }
        });
        join_all(callers).await;
        let served: Vec<_> = peer.requests().iter().map(|it| it.id()).collect();
        let turns = (0..10).flat_map(|turn| (0..5).map(move |it| format!("/{turn}/{it}")));
        assert_eq!(served, turns.collect::<Vec<_>>(), "{scheme}");
        assert_eq!(census.most(), 1, "{scheme}");
    }
}

/// aio-libs/aiohttp#1623: responses that nobody read held the limit for ever.
#[tokio::test]
async fn bodies_dropped_unread_let_the_line_go_on() {
    for scheme in BOTH {
        for size in [10, 10_000, 1_000_000] {
            let peer = Peer::start(scheme, move |conn| {
                while conn.read_request().is_some() {
                    conn.reply(&"x".repeat(size));
                }
            });
            let pool = builder().max_connections_per_origin(2).build();
            let calls = (0..100).map(|_| pool.send(get(&peer.url("/"))));
            let calls = calls.map(|call| async { drop(call.await.expect("a head")) });
            join_all(calls).await;
            eventually("all settle", || {
                let stats = pool.stats();
                (stats.busy, stats.waiting) == (0, 0)
            })
            .await;
            assert_eq!(peer.requests().len(), 100, "{scheme}, {size}");
        }
    }
}

/// golang/go#33850: with the limit reached and no connection ever ending, what had waited was kept.
#[tokio::test]
async fn of_requests_that_stopped_waiting_nothing_is_kept() {
    let late = Gate::new();
    let peer = slow_peer(Scheme::Http, &late);
    let pool = builder().max_connections_per_origin(1).build();
    let busy = spawn(&pool, &peer.url("/slow"));
    eventually("it is under way", || peer.requests().len() == 1).await;
    let mark = Arc::new(());
    for _ in 0..10 {
        let calls = (0..1_000).map(|_| {
            let mut request = get(&peer.url("/"));
            request.extensions_mut().insert(Arc::clone(&mark));
            begin(Box::pin(pool.send(request)))
        });
        let calls = join_all(calls).await;
        assert_eq!(pool.stats().waiting, 1_000);
        assert!(Arc::strong_count(&mark) > 1_000);
        drop(calls);
        assert_eq!(pool.stats().waiting, 0);
        assert_eq!(Arc::strong_count(&mark), 1);
    }
    late.open();
    busy.await.unwrap().expect("a response");
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    assert_eq!((peer.accepted(), peer.requests().len()), (1, 2));
}

/// Places where a dial neither succeeds nor fails, and what keeps them so.
fn black_holes() -> Vec<(&'static str, String, Box<dyn std::any::Any>)> {
    // The kernel accepts for it, and nobody says a word.
    let mute = TcpListener::bind("127.0.0.1:0").expect("bind");
    let url = format!("https://localhost:{}/", mute.local_addr().unwrap().port());
    let mut holes: Vec<(_, _, Box<dyn std::any::Any>)> = vec![("TLS", url, Box::new(mute))];
    if cfg!(target_os = "linux") {
        // A listener with no room for another connection lets every SYN fall.
        let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let full = full.expect("a socket");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        full.bind(&any.into()).expect("bind");
        full.listen(0).expect("listen");
        let address = full.local_addr().expect("an address");
        let address = address.as_socket().expect("of IP");
        let connect = || std::net::TcpStream::connect_timeout(&address, SHORT).ok();
        let inside: Vec<_> = std::iter::from_fn(connect).collect();
        let url = format!("http://{address}/");
        holes.push(("TCP", url, Box::new((full, inside))));
    }
    holes
}

/// golang/go#76784: requests that were given up left their dials behind, without bound.
#[tokio::test]
async fn requests_given_up_before_a_black_hole_pile_up_neither_dials_nor_waiters() {
    for (name, url, hole) in black_holes() {
        let pool = builder().max_pending_dials(4).build();
        for _ in 0..20 {
            let calls = (0..100).map(|_| {
                let patience = Duration::from_millis(5);
                tokio::time::timeout(patience, fetch(&pool, get(&url)))
            });
            for outcome in join_all(calls).await {
                outcome.expect_err("no connection");
            }
            let stats = pool.stats();
            assert!(stats.dialing <= 4, "{name}: {stats}");
            assert_eq!(stats.waiting, 0, "{name}: {stats}");
        }
        eventually("the dials are given up", || {
            let stats = pool.stats();
            stats.dialing == 0 && stats.origins.is_empty()
        })
        .await;
        assert_eq!(pool.stats().connections_opened, 0, "{name}");
        drop(hole);
    }
}

/// urllib3/urllib3#2481: to wait in line is none of connect, write or read.
#[tokio::test]
async fn a_request_that_waited_its_time_in_line_was_not_sent() {
    let late = Gate::new();
    let peer = slow_peer(Scheme::Http, &late);
    let pool = builder()
        .max_connections_per_origin(1)
        .acquire_timeout(SHORT)
        .connect_timeout(Duration::from_secs(60))
        .build();
    let busy = spawn(&pool, &peer.url("/slow"));
    eventually("it is under way", || peer.requests().len() == 1).await;
    let client = Retry::new(pool.clone(), RetryPolicy::default());
    let request = http::Request::get(peer.url("/"));
    let request = request.body(ReplayBody::empty()).unwrap();
    let error = client.oneshot(request).await.expect_err("no connection");
    assert_not_sent(&error, ErrorKind::AcquireTimeout, Phase::Queue);
    assert!(error.is_timeout(), "{error:?}");
    // A layer above does not wait once more.
    assert_eq!(pool.stats().requests, 2);
    late.open();
    assert_eq!(busy.await.unwrap().expect("a response"), "/slow");
    assert_eq!((peer.accepted(), peer.requests().len()), (1, 1));
}

/// A peer each of whose connections answers one request and closes once the answer was read, before the client's
/// runtime does anything else: the next in line is handed what is dead by then.
struct Dying {
    peer: Peer,
    turns: Vec<Gate>,
    read: Vec<Gate>,
    closed: Vec<Gate>,
}

impl Dying {
    fn start(scheme: Scheme, connections: usize) -> Arc<Dying> {
        let gates = || (0..connections).map(|_| Gate::new()).collect::<Vec<_>>();
        let (turns, read, closed) = (gates(), gates(), gates());
        let (its_turns, its_read, its_closed) = (turns.clone(), read.clone(), closed.clone());
        let peer = Peer::start(scheme, move |conn| {
            if conn.read_request().is_some() {
                its_turns[conn.index].pass();
                conn.reply(&conn.index.to_string());
                its_read[conn.index].pass();
                conn.close_notify();
                conn.fin();
                its_closed[conn.index].open();
                conn.await_end();
            }
        });
        Arc::new(Dying {
            peer,
            turns,
            read,
            closed,
        })
    }

    /// Sends a request. The moment that its answer has been read, its connection dies.
    async fn fetch(&self, pool: &Pool, url: &str) -> Result<(), Error> {
        let index = fetch(pool, get(url)).await?;
        let index: usize = index.parse().expect("a number");
        self.read[index].open();
        hold_runtime_until("the end", || self.closed[index].is_open());
        Ok(())
    }
}

/// How many connections were found dead by those who had got them.
fn found_dead(pool: &Pool) -> u64 {
    let stats = pool.stats();
    stats.stale_caught_by_probe + stats.closed_while_idle
}

/// encode/httpcore#822: each wake-up began the wait anew. Here one comes every quarter of the time, for more
/// than twice the time.
#[tokio::test]
async fn the_whole_wait_counts_however_often_it_is_interrupted() {
    const CONNECTIONS: usize = 9;
    let dying = Dying::start(Scheme::Http, CONNECTIONS);
    let mut leads = vec![Leads::To(dying.peer.address()); CONNECTIONS];
    leads.push(Leads::Nowhere);
    let signpost = Signpost::new(leads);
    let pool = builder()
        .max_connections_per_origin(CONNECTIONS)
        .acquire_timeout(4 * SHORT)
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    let url = "http://pay.example/";
    let busy = (0..CONNECTIONS).map(|_| {
        let (dying, pool) = (Arc::clone(&dying), pool.clone());
        tokio::spawn(async move { dying.fetch(&pool, url).await })
    });
    let busy: Vec<_> = busy.collect();
    eventually("all are under way", || {
        dying.peer.requests().len() == CONNECTIONS
    })
    .await;
    let waits = spawn(&pool, url);
    eventually("it waits", || pool.stats().waiting == 1).await;
    for (n, turn) in dying.turns.iter().enumerate() {
        turn.open();
        tokio::time::sleep(SHORT).await;
        assert!(n > 0 || found_dead(&pool) == 1, "it was handed nothing");
    }
    assert!(waits.is_finished(), "its clock began anew");
    let error = waits.await.unwrap().expect_err("no connection");
    assert_eq!(error.kind(), ErrorKind::AcquireTimeout, "{error:?}");
    assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    for outcome in join_all(busy).await {
        outcome.unwrap().expect("a response");
    }
}

/// encode/httpcore#822: whoever is handed a connection that is dead keeps the place in line.
#[tokio::test]
async fn whoever_is_handed_a_dead_connection_is_served_next_all_the_same() {
    const CALLS: usize = 30;
    for scheme in BOTH {
        let dying = Dying::start(scheme, CALLS);
        dying.turns.iter().for_each(Gate::open);
        let pool = builder().max_connections_per_origin(1).build();
        let paths: Vec<_> = (0..CALLS).map(|n| format!("/{n}")).collect();
        let calls = paths.iter().map(|path| {
            let (dying, pool, url) = (&dying, &pool, dying.peer.url(path));
            async move { dying.fetch(pool, &url).await }
        });
        for outcome in join_all(calls).await {
            outcome.expect("a response");
        }
        let served: Vec<_> = dying.peer.requests().iter().map(|it| it.id()).collect();
        assert_eq!(served, paths, "{scheme}");
        assert!(found_dead(&pool) >= CALLS as u64 - 1, "{scheme}");
    }
}

/// urllib3/urllib3#644: each failure took a place with it, until none was left.
#[tokio::test]
async fn connect_failures_use_up_no_place() {
    let peer = Peer::well_behaved(Scheme::Http);
    let dead = dead();
    let signpost = Signpost::new([Leads::To(dead.local_addr().expect("an address"))]);
    let pool = builder()
        .max_connections(1)
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    let url = "http://pay.example/";
    for _ in 0..50 {
        let error = fetch(&pool, get(url)).await.expect_err("refused");
        assert_not_sent(&error, ErrorKind::Connect, Phase::Connect);
    }
    for outcome in join_all((0..50).map(|_| fetch(&pool, get(url)))).await {
        let error = outcome.expect_err("refused");
        assert_not_sent(&error, ErrorKind::Connect, Phase::Connect);
    }
    signpost.turn(Leads::To(peer.address()));
    fetch(&pool, get(url)).await.expect("a response");
    let stats = pool.stats();
    assert_eq!((stats.dials_failed, stats.connections_opened), (100, 1));
}

/// dotnet/corefx#29410: without reuse the limit was not looked at.
#[tokio::test]
async fn the_limit_holds_where_reuse_is_off() {
    for scheme in BOTH {
        let census = Census::default();
        let peer = Peer::start(
            scheme,
            census.script(|conn, id| {
                conn.reply(id);
                true
            }),
        );
        let pool = builder()
            .max_idle_per_origin(0)
            .max_connections_per_origin(1)
            .build();
        let calls = (0..30).map(|_| fetch(&pool, get(&peer.url("/"))));
        for outcome in join_all(calls).await {
            outcome.expect("a response");
        }
        assert_eq!((peer.accepted(), census.most()), (30, 1), "{scheme}");
        eventually("all are closed", || {
            pool.stats().closes.get(CloseReason::IdleLimit) == 30
        })
        .await;
    }
}

/// dotnet/runtime#60654: a failed dial failed whoever was first in line, not whom it was for.
#[tokio::test]
async fn a_failed_dial_fails_its_own_request_and_no_other() {
    for limit in [1, 2] {
        let (late, fails) = (Gate::new(), Gate::new());
        let peer = slow_peer(Scheme::Http, &late);
        let mut leads = vec![Leads::To(peer.address()); limit];
        leads[limit - 1] = Leads::Fails(fails.clone());
        leads.push(Leads::To(peer.address()));
        let signpost = Signpost::new(leads);
        let pool = builder()
            .max_connections_per_origin(limit)
            .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
            .build();
        let busy = (1..limit).map(|_| spawn(&pool, "http://pay.example/slow"));
        let busy: Vec<_> = busy.collect();
        eventually("they are under way", || peer.requests().len() == limit - 1).await;
        let unlucky = spawn(&pool, "http://pay.example/unlucky");
        eventually("it dials", || signpost.asked() == limit).await;
        let behind = spawn(&pool, "http://pay.example/behind");
        eventually("it waits behind", || pool.stats().waiting == 2).await;
        fails.open();
        let error = unlucky.await.unwrap().expect_err("its dial failed");
        assert_not_sent(&error, ErrorKind::Resolve, Phase::Resolve);
        let body = behind.await.unwrap().expect("a response");
        assert_eq!(body, "/behind", "limit {limit}");
        late.open();
        for outcome in join_all(busy).await {
            outcome.unwrap().expect("a response");
        }
    }
}

/// dotnet/runtime#60654, golang/go#66442: served by another connection, a request does not hear of the failure of
/// its own dial.
#[tokio::test]
async fn a_request_that_was_served_otherwise_never_hears_of_its_failed_dial() {
    let (late, fails) = (Gate::new(), Gate::new());
    let peer = slow_peer(Scheme::Http, &late);
    let signpost = Signpost::new([Leads::To(peer.address()), Leads::Fails(fails.clone())]);
    let pool = builder()
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    let busy = spawn(&pool, "http://pay.example/slow");
    eventually("it is under way", || peer.requests().len() == 1).await;
    let dials = spawn(&pool, "http://pay.example/dials");
    eventually("it dials", || signpost.asked() == 2).await;
    late.open();
    busy.await.unwrap().expect("a response");
    assert_eq!(dials.await.unwrap().expect("a response"), "/dials");
    fails.open();
    eventually("the dial has failed", || pool.stats().dials_failed == 1).await;
    let stats = pool.stats();
    assert_eq!((stats.requests_failed, stats.idle), (0, 1));
    assert_eq!(peer.accepted(), 1);
}

/// dotnet/runtime#66990: each of many requests that nobody waited for any more had a dial of its own first.
#[tokio::test]
async fn requests_that_were_given_up_are_not_dialled_for() {
    let peer = Peer::well_behaved(Scheme::Http);
    let signpost = Signpost::new([Leads::Nowhere]);
    let pool = builder()
        .max_connections_per_origin(2)
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    let url = "http://pay.example/";
    let given_up = (0..1_000).map(|_| begin(Box::pin(fetch(&pool, get(url)))));
    let given_up = join_all(given_up).await;
    eventually("two dial", || signpost.asked() == 2).await;
    drop(given_up);
    signpost.turn(Leads::To(peer.address()));
    fetch(&pool, get(url)).await.expect("a response");
    assert_eq!((signpost.asked(), peer.accepted()), (3, 1));
}

/// dotnet/runtime#114957: requests to a dead server timed out one behind the other. No dial here ends before all
/// have begun.
#[tokio::test]
async fn requests_to_a_dead_server_fail_side_by_side() {
    struct Together(Arc<Barrier>);
    impl Resolve for Together {
        fn resolve(&self, _: &str, _: u16) -> Resolving {
            let all = Arc::clone(&self.0);
            Box::pin(async move {
                all.wait().await;
                Err(io::Error::other("nobody is there"))
            })
        }
    }
    let together = Together(Arc::new(Barrier::new(10)));
    let pool = builder().resolver(together).build();
    let calls = (0..10).map(|_| fetch(&pool, get("http://pay.example/")));
    for outcome in join_all(calls).await {
        let error = outcome.expect_err("nobody is there");
        assert_not_sent(&error, ErrorKind::Resolve, Phase::Resolve);
    }
    assert_eq!(pool.stats().dials_failed, 10);
}

/// akka/akka-http#4128: the retries of failed dials were not the request's time.
#[tokio::test]
async fn a_request_fails_no_later_than_its_acquire_timeout_whatever_dials_do() {
    // Each failure lets the next in line dial, and the last dial never ends.
    let open = Gate::new();
    open.open();
    let mut leads = vec![Leads::Fails(open); 5];
    leads.push(Leads::Nowhere);
    let signpost = Signpost::new(leads);
    let pool = builder()
        .max_connections_per_origin(1)
        .acquire_timeout(SHORT)
        .connect_timeout(None)
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    let calls = (0..10).map(|_| fetch(&pool, get("http://pay.example/")));
    // Ten times its limit, where a limit for each dial would never be over.
    let outcomes = tokio::time::timeout(10 * SHORT, join_all(calls)).await;
    let outcomes = outcomes.expect("all have failed");
    for (n, outcome) in outcomes.into_iter().enumerate() {
        let error = outcome.expect_err("no connection");
        match n {
            0..5 => assert_not_sent(&error, ErrorKind::Resolve, Phase::Resolve),
            5 => assert_not_sent(&error, ErrorKind::AcquireTimeout, Phase::Resolve),
            _ => assert_not_sent(&error, ErrorKind::AcquireTimeout, Phase::Queue),
        }
        if n >= 5 {
            // dotnet/runtime#68423
            assert!(causes(&error).contains("the signpost is broken"), "{n}");
        }
    }
    eventually("the dial is given up", || pool.stats().origins.is_empty()).await;
    assert_eq!(signpost.asked(), 6);
}

/// dotnet/runtime#68423: the time was over, and nobody said for what.
#[tokio::test]
async fn an_acquire_timeout_tells_what_the_dial_was_at() {
    for (name, url, _hole) in black_holes() {
        let pool = builder()
            .acquire_timeout(SHORT)
            .connect_timeout(None)
            .build();
        let error = fetch(&pool, get(&url)).await.expect_err("no connection");
        let phase = match name {
            "TLS" => Phase::Handshake,
            _ => Phase::Connect,
        };
        assert_not_sent(&error, ErrorKind::AcquireTimeout, phase);
        assert!(error.source().is_none(), "{name}: nothing has failed yet");
    }
}

/// dotnet/runtime#68423: somebody else's dial had failed with what this request would have met too.
#[tokio::test]
async fn an_acquire_timeout_names_the_dial_that_failed_meanwhile() {
    let (late, fails) = (Gate::new(), Gate::new());
    let peer = slow_peer(Scheme::Http, &late);
    let leads = [
        Leads::To(peer.address()),
        Leads::Fails(fails.clone()),
        Leads::Nowhere,
    ];
    let signpost = Signpost::new(leads);
    let pool = builder()
        .max_connections_per_origin(2)
        .acquire_timeout(2 * SHORT)
        .resolver(Arc::clone(&signpost) as Arc<dyn Resolve>)
        .build();
    let busy = spawn(&pool, "http://pay.example/slow");
    eventually("it is under way", || peer.requests().len() == 1).await;
    let unlucky = spawn(&pool, "http://pay.example/unlucky");
    eventually("it dials", || signpost.asked() == 2).await;
    let waits = spawn(&pool, "http://pay.example/waits");
    eventually("it waits", || pool.stats().waiting == 2).await;
    fails.open();
    unlucky.await.unwrap().expect_err("its dial failed");
    let error = waits.await.unwrap().expect_err("no connection");
    assert_not_sent(&error, ErrorKind::AcquireTimeout, Phase::Resolve);
    assert!(
        causes(&error).contains("the signpost is broken"),
        "{error:?}"
    );
    late.open();
    busy.await.unwrap().expect("a response");
}

/// A resend waits for a connection that nothing was sent on yet, with idle ones all around it.
#[tokio::test]
async fn a_request_that_must_be_fresh_is_made_room_for_by_an_idle_connection() {
    for scheme in BOTH {
        for limit in [1, 2] {
            let peer = Peer::well_behaved(scheme);
            let pool = builder().max_connections(limit).build();
            let fill = (0..limit).map(|_| pool.send(get(&peer.url("/"))));
            for head in join_all(fill).await {
                read(head.expect("a head")).await.expect("a body");
            }
            let before = peer.accepted();
            assert_eq!(pool.stats().idle, before as u64);
            let fresh = (0..6).map(|_| {
                let mut request = get(&peer.url("/fresh"));
                request.extensions_mut().insert(FreshConnection);
                fetch(&pool, request)
            });
            let served = join_all(fresh).await;
            let served = served.into_iter().map(|body| body.expect("a response"));
            let on: BTreeSet<usize> = served.map(|index| index.parse().unwrap()).collect();
            let (first, count) = (on.first().copied(), on.len());
            assert_eq!((first, count), (Some(before), 6), "{scheme}, {limit}");
            let made_room = pool.stats().closes.get(CloseReason::MadeRoom);
            assert!(made_room >= 6 - limit as u64, "{scheme}, {limit}");
        }
    }
}
