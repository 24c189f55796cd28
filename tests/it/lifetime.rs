//! How long a connection may be used: its lifetime, its number of requests, its address, its origin's eviction.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use http_body_util::BodyExt;
use idempool::{
    Builder, CloseReason, ErrorKind, FreshConnection, Origin, Pool, Resolve, Resolving,
};

use crate::support::{
    BOTH, Ended, Gate, HeldClock, Peer, Scheme, builder, eventually, fetch, get, read,
};

const SECOND: Duration = Duration::from_secs(1);
const TEN: Duration = Duration::from_secs(10);

/// Without any limit in time, for tests that set one and move the clock.
fn patient() -> Builder {
    builder()
        .acquire_timeout(None)
        .connect_timeout(None)
        .response_head_timeout(None)
        .idle_timeout(None)
        .max_lifetime(None)
        .dial_window(false)
}

/// Answers every question with the addresses of those peers that it was told of last, and counts the questions.
#[derive(Default)]
struct Directory {
    addresses: Mutex<Vec<SocketAddr>>,
    asked: AtomicUsize,
}

impl Directory {
    fn of(peers: &[&Peer]) -> Arc<Directory> {
        let directory = Arc::new(Directory::default());
        directory.change_to(peers);
        directory
    }

    fn change_to(&self, peers: &[&Peer]) {
        *self.addresses.lock().unwrap() = peers.iter().map(|peer| peer.address()).collect();
    }
}

impl Resolve for Directory {
    fn resolve(&self, _host: &str, _port: u16) -> Resolving {
        self.asked.fetch_add(1, SeqCst);
        let addresses = self.addresses.lock().unwrap().clone();
        Box::pin(async move { Ok(addresses) })
    }
}

/// A target at the host whose addresses are in the directory.
fn listed(scheme: Scheme, path: &str) -> String {
    format!("{scheme}://localhost{path}")
}

/// A target at the peer's address, which no directory is asked for.
fn literal(scheme: Scheme, peer: &Peer, path: &str) -> String {
    format!("{scheme}://{}{path}", peer.address())
}

/// A peer that answers with its name, to `/slow` in two halves with the gate between them.
fn named(name: &'static str, scheme: Scheme, halfway: &Gate) -> Peer {
    let halfway = halfway.clone();
    Peer::start(scheme, move |conn| {
        while let Some(request) = conn.read_request() {
            if request.id() == "/slow" {
                conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl");
                halfway.pass();
                conn.send("ow");
            } else {
                conn.reply(name);
            }
        }
    })
}

/// A peer that answers nothing until the gate is open.
fn gathering(gate: &Gate) -> Peer {
    let gate = gate.clone();
    Peer::start(Scheme::Http, move |conn| {
        while conn.read_request().is_some() {
            gate.pass();
            conn.reply("ok");
        }
    })
}

/// Sends so many requests at a time, each of which keeps its connection until all have one.
async fn gather(clock: &HeldClock, pool: &Pool, url: &str, count: usize, gate: &Gate) {
    let spawn = |_| {
        let (pool, request) = (pool.clone(), get(url));
        tokio::spawn(async move { fetch(&pool, request).await })
    };
    let calls: Vec<_> = (0..count).map(spawn).collect();
    clock
        .until("each has a connection", || {
            pool.stats().busy == count as u64
        })
        .await;
    gate.open();
    for call in calls {
        call.await.expect("no panic").expect("a response");
    }
    assert_eq!(pool.stats().idle, count as u64);
}

fn closes(pool: &Pool, reason: CloseReason) -> u64 {
    pool.stats().closes.get(reason)
}

/// aio-libs/aiohttp#4948, reactor/reactor-netty#922, lysine-dev/okhttp#9218,
/// AsyncHttpClient/async-http-client#937, fanout/zurl#11, zalando-stups/put-it-to-rest#2: a connection that is
/// always in use stayed with a server that the name had left.
#[tokio::test]
async fn a_changed_address_is_followed_within_a_lifetime() {
    let clock = HeldClock::start();
    for scheme in BOTH {
        let gate = Gate::new();
        let old = named("old", scheme, &gate);
        let new = named("new", scheme, &gate);
        let directory = Directory::of(&[&old]);
        let pool = patient()
            .max_lifetime(TEN)
            .resolver(Arc::clone(&directory))
            .build();
        let mut answers = Vec::new();
        for second in 0..15 {
            if second == 2 {
                directory.change_to(&[&new]);
            }
            let answer = fetch(&pool, get(&listed(scheme, "/"))).await;
            answers.push(answer.expect("a response"));
            clock.advance(SECOND).await;
        }
        // Its lifetime is up to a tenth shorter or longer.
        assert_eq!(answers[..9], ["old"; 9], "{scheme}");
        assert_eq!(answers[11..], ["new"; 4], "{scheme}");
        clock
            .until("the old one sees the end", || {
                old.ended() == [(0, Ended::Properly)]
            })
            .await;
        assert_eq!(closes(&pool, CloseReason::Lifetime), 1, "{scheme}");
        assert_eq!(directory.asked.load(SeqCst), 2, "{scheme}");
    }
}

/// datalust/serilog-sinks-seq#178: a lifetime that has to be asked for is asked for after the outage. And
/// curl/curl#4013: it is in the unit that it is set in.
#[tokio::test]
async fn a_pool_that_was_told_nothing_ends_its_connections_after_ten_minutes() {
    let clock = HeldClock::start();
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder().idle_timeout(None).build();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    clock.advance(539 * SECOND).await;
    assert_eq!(pool.stats().idle, 1);
    clock.advance(122 * SECOND).await;
    let stats = pool.stats();
    assert_eq!(
        (stats.idle, stats.closes.get(CloseReason::Lifetime)),
        (0, 1)
    );
}

/// datalust/serilog-sinks-seq#178, curl/curl#18527: what was opened together is not dialled anew together.
#[tokio::test]
async fn connections_opened_together_do_not_end_together() {
    const CROWD: usize = 100;
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gathering(&gate);
    let pool = patient()
        .max_connections_per_origin(CROWD)
        .max_idle_per_origin(CROWD)
        .max_lifetime(10 * TEN)
        .build();
    let url = literal(Scheme::Http, &peer, "/");
    gather(&clock, &pool, &url, CROWD, &gate).await;
    let mut ends = Vec::new();
    for _ in 0..110 {
        let before = closes(&pool, CloseReason::Lifetime);
        clock.advance(SECOND).await;
        ends.push(closes(&pool, CloseReason::Lifetime) - before);
    }
    assert_eq!(ends.iter().sum::<u64>(), CROWD as u64, "{ends:?}");
    assert!(ends[..89].iter().all(|&ends| ends == 0), "{ends:?}");
    // Five in a second on average; chance makes it 25 once in a thousand million runs.
    assert!(ends.iter().all(|&ends| ends < 25), "{ends:?}");
    clock
        .until("the server sees each end", || peer.ended().len() == CROWD)
        .await;
}

/// curl/curl#7751.
#[tokio::test]
async fn an_exchange_under_way_is_not_cut_by_the_end_of_its_connections_life() {
    let clock = HeldClock::start();
    for scheme in BOTH {
        let halfway = Gate::new();
        let peer = named("new", scheme, &halfway);
        let pool = patient().max_lifetime(TEN).build();
        let slow = pool.send(get(&peer.url("/slow"))).await.expect("a head");
        clock.advance(6 * TEN).await;
        assert_eq!(pool.stats().busy, 1, "{scheme}");
        halfway.open();
        assert_eq!(read(slow).await.expect("a body"), "slow", "{scheme}");
        clock
            .until("and then it closes", || {
                closes(&pool, CloseReason::Lifetime) == 1
            })
            .await;
        let next = fetch(&pool, get(&peer.url("/"))).await;
        assert_eq!(next.expect("a response"), "new", "{scheme}");
        assert_eq!(peer.accepted(), 2, "{scheme}");
    }
}

/// curl/curl#7751: however long the handshake took.
#[tokio::test]
async fn a_lifetime_counts_from_the_end_of_the_handshake() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let door = gate.clone();
    let peer = Peer::start_behind(
        move |_| door.pass(),
        |conn| {
            conn.answer_requests(usize::MAX);
        },
    );
    let pool = patient().max_lifetime(TEN).build();
    let (client, request) = (pool.clone(), get(&peer.url("/")));
    let first = tokio::spawn(async move { fetch(&client, request).await });
    clock
        .until("it waits for the handshake", || peer.accepted() == 1)
        .await;
    clock.advance(6 * TEN).await;
    gate.open();
    first.await.expect("no panic").expect("a response");
    clock.advance(8 * SECOND).await;
    let second = fetch(&pool, get(&peer.url("/"))).await;
    assert_eq!(second.expect("a response"), "0");
    clock.advance(4 * SECOND).await;
    assert_eq!(closes(&pool, CloseReason::Lifetime), 1);
}

/// curl/curl#22671: a connection that is wanted without a pause is looked at all the same, when it is handed on.
#[tokio::test]
async fn who_waits_in_line_is_not_given_a_connection_whose_life_is_over() {
    let clock = HeldClock::start();
    for scheme in BOTH {
        let halfway = Gate::new();
        let peer = named("new", scheme, &halfway);
        let pool = patient()
            .max_connections_per_origin(1)
            .max_lifetime(TEN)
            .build();
        let slow = pool.send(get(&peer.url("/slow"))).await.expect("a head");
        let (client, request) = (pool.clone(), get(&peer.url("/")));
        let next = tokio::spawn(async move { fetch(&client, request).await });
        clock
            .until("it is in line", || pool.stats().waiting == 1)
            .await;
        clock.advance(6 * TEN).await;
        halfway.open();
        assert_eq!(read(slow).await.expect("a body"), "slow", "{scheme}");
        next.await.expect("no panic").expect("a response");
        let connections: Vec<_> = peer.requests().iter().map(|it| it.connection).collect();
        assert_eq!(connections, [0, 1], "{scheme}");
        assert_eq!(closes(&pool, CloseReason::Lifetime), 1, "{scheme}");
    }
}

type Set = fn(Builder) -> Builder;

/// curl/curl#4013: a limit of a second was over after a thousand. The idle time and the lifetime have tests of
/// their own.
#[tokio::test]
async fn each_time_limit_is_in_the_unit_that_it_is_set_in() {
    let clock = HeldClock::start();
    // The kernel accepts for it, and nobody says a word.
    let mute = TcpListener::bind("127.0.0.1:0").expect("bind");
    let mute = format!("https://{}/", mute.local_addr().expect("an address"));
    let silent = Peer::start(Scheme::Http, |conn| {
        conn.read_request();
        conn.await_end();
    });
    let silent_url = silent.url("/");
    let rows: [(&str, Set, ErrorKind); 5] = [
        (
            &mute,
            |builder| builder.connect_timeout(TEN),
            ErrorKind::ConnectTimeout,
        ),
        (
            &mute,
            |builder| builder.acquire_timeout(TEN),
            ErrorKind::AcquireTimeout,
        ),
        (
            &mute,
            |builder| builder.request_timeout(TEN),
            ErrorKind::RequestTimeout,
        ),
        (
            &silent_url,
            |builder| builder.request_timeout(TEN),
            ErrorKind::RequestTimeout,
        ),
        (
            &silent_url,
            |builder| builder.response_head_timeout(TEN),
            ErrorKind::ResponseTimeout,
        ),
    ];
    let mut heard = 0;
    for (url, set, kind) in rows {
        let pool = set(patient()).build();
        let (client, request) = (pool.clone(), get(url));
        let call = tokio::spawn(async move { fetch(&client, request).await });
        if url == silent_url {
            heard += 1;
        }
        clock
            .until("it waits", || {
                pool.stats().dialing + pool.stats().busy == 1 && silent.requests().len() == heard
            })
            .await;
        clock.advance(9 * SECOND).await;
        assert!(!call.is_finished(), "{kind} for {url} is over too early");
        clock.advance(2 * SECOND).await;
        clock.until(kind.as_str(), || call.is_finished()).await;
        let error = call.await.expect("no panic").expect_err("no answer");
        assert_eq!(error.kind(), kind, "{url}");
    }
}

/// curl/curl#4013.
#[tokio::test]
async fn the_time_of_a_body_is_in_the_unit_that_it_is_set_in() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = named("stalls", Scheme::Http, &gate);
    let pool = patient().body_idle_timeout(TEN).build();
    let response = pool.send(get(&peer.url("/slow"))).await.expect("a head");
    let mut body = response.into_body();
    body.frame().await.expect("a frame").expect("data");
    let rest = tokio::spawn(body.collect());
    // The reader begins to wait.
    clock.advance(Duration::ZERO).await;
    clock.advance(9 * SECOND).await;
    assert!(!rest.is_finished());
    clock.advance(2 * SECOND).await;
    clock.until("it is over", || rest.is_finished()).await;
    let error = rest.await.expect("no panic").expect_err("it stalls");
    assert_eq!(error.kind(), ErrorKind::BodyTimeout);
    gate.open();
}

/// The reverse of nginx's `keepalive_requests`: a client that limits itself meets no error by it.
#[tokio::test]
async fn a_connection_carries_as_many_requests_as_it_may_and_no_more() {
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        let pool = builder().max_requests_per_connection(3).build();
        let mut answers = Vec::new();
        for _ in 0..10 {
            let answer = fetch(&pool, get(&peer.url("/"))).await;
            answers.push(answer.expect("a response"));
        }
        let by_threes = ["0", "0", "0", "1", "1", "1", "2", "2", "2", "3"];
        assert_eq!(answers, by_threes, "{scheme}");
        eventually("each closes after its last", || {
            closes(&pool, CloseReason::RequestLimit) == 3 && peer.ended().len() == 3
        })
        .await;
        assert_eq!(pool.stats().idle, 1, "{scheme}");
    }
}

/// Also those that others wait for.
#[tokio::test]
async fn who_waits_in_line_is_not_given_a_connection_that_has_carried_enough() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder()
        .max_connections_per_origin(4)
        .max_requests_per_connection(3)
        .build();
    let calls = (0..60).map(|_| fetch(&pool, get(&peer.url("/"))));
    for answer in join_all(calls).await {
        answer.expect("a response");
    }
    let mut carried = vec![0; peer.accepted()];
    for request in peer.requests() {
        carried[request.connection] += 1;
    }
    assert!(carried.iter().all(|&requests| requests <= 3), "{carried:?}");
    assert_eq!(carried.iter().sum::<usize>(), 60);
    assert_eq!(pool.stats().requests_failed, 0);
}

/// grpc/grpc-go#4513: whoever knew that the servers had moved could do nothing but restart.
#[tokio::test]
async fn an_eviction_closes_the_idle_connections_at_once_and_a_busy_one_after_its_exchange() {
    for scheme in BOTH {
        let halfway = Gate::new();
        let old = named("old", scheme, &halfway);
        let new = named("new", scheme, &halfway);
        let other = Peer::well_behaved(scheme);
        let directory = Directory::of(&[&old]);
        let pool = builder().resolver(Arc::clone(&directory)).build();
        let slow = pool.send(get(&listed(scheme, "/slow"))).await;
        let slow = slow.expect("a head");
        for url in [listed(scheme, "/"), literal(scheme, &other, "/")] {
            fetch(&pool, get(&url)).await.expect("a response");
        }
        directory.change_to(&[&new]);

        let uri = listed(scheme, "/").parse().expect("a URI");
        pool.evict(&Origin::of(&uri).expect("an origin"));
        assert_eq!((pool.stats().idle, pool.stats().busy), (1, 1), "{scheme}");
        eventually("the idle one ends", || {
            old.ended() == [(1, Ended::Properly)] && closes(&pool, CloseReason::Evicted) == 1
        })
        .await;
        let next = fetch(&pool, get(&listed(scheme, "/"))).await;
        assert_eq!(next.expect("a response"), "new", "{scheme}");
        assert_eq!(directory.asked.load(SeqCst), 3, "{scheme}");

        halfway.open();
        assert_eq!(read(slow).await.expect("a body"), "slow", "{scheme}");
        eventually("the busy one ends", || {
            old.ended().len() == 2 && closes(&pool, CloseReason::Evicted) == 2
        })
        .await;
        let elsewhere = fetch(&pool, get(&literal(scheme, &other, "/"))).await;
        assert_eq!(elsewhere.expect("a response"), "0", "{scheme}");
        assert_eq!(pool.stats().closes.total(), 2, "{scheme}");
    }
}

/// grpc/grpc#20146, grpc/grpc#12295: users rotated their channels by hand to get rid of servers that had left.
#[tokio::test]
async fn connections_to_an_address_that_is_gone_close_once_they_are_idle() {
    for scheme in BOTH {
        let halfway = Gate::new();
        let old = named("old", scheme, &halfway);
        let new = named("new", scheme, &halfway);
        let directory = Directory::of(&[&old]);
        let pool = builder().resolver(Arc::clone(&directory)).build();
        let slow = pool.send(get(&listed(scheme, "/slow"))).await;
        let slow = slow.expect("a head");
        let idle = fetch(&pool, get(&listed(scheme, "/"))).await;
        assert_eq!(idle.expect("a response"), "old", "{scheme}");

        directory.change_to(&[&new]);
        for gone in [0, 1] {
            assert_eq!(closes(&pool, CloseReason::AddressGone), 0, "{scheme}");
            let mut request = get(&listed(scheme, "/"));
            request.extensions_mut().insert(FreshConnection);
            let answer = fetch(&pool, request).await;
            assert_eq!(answer.expect("a response"), "new", "{scheme}");
            // One answer may be a part of a longer list; two are believed.
            eventually("the idle one ends", || old.ended().len() == gone).await;
        }
        eventually("it is counted", || {
            closes(&pool, CloseReason::AddressGone) == 1
        })
        .await;
        assert_eq!(pool.stats().busy, 1, "{scheme}");
        halfway.open();
        assert_eq!(read(slow).await.expect("a body"), "slow", "{scheme}");
        eventually("the busy one ends", || {
            old.ended().len() == 2 && closes(&pool, CloseReason::AddressGone) == 2
        })
        .await;
        assert_eq!(pool.stats().idle, 2, "{scheme}");
    }
}

/// elixir-grpc/grpc#355, connectrpc/connect-go#782, istio/istio#7878: what is added gets no load from clients that
/// keep their connections. valyala/fasthttp#1236: the order of reuse decided which server had the load.
#[tokio::test]
async fn connections_spread_over_the_addresses_and_over_new_ones_within_a_lifetime() {
    const CROWD: usize = 12;
    let clock = HeldClock::start();
    let rounds = [Gate::new(), Gate::new()];
    let [first, second, third] = [(); 3].map(|()| {
        let rounds = rounds.clone();
        Peer::start(Scheme::Http, move |conn| {
            while let Some(request) = conn.read_request() {
                rounds[usize::from(request.id() == "/1")].pass();
                conn.reply("ok");
            }
        })
    });
    let directory = Directory::of(&[&first, &second]);
    let pool = patient()
        .max_lifetime(5 * SECOND)
        .resolver(Arc::clone(&directory))
        .build();
    let accepted = || [&first, &second, &third].map(Peer::accepted);
    let url = listed(Scheme::Http, "/0");
    gather(&clock, &pool, &url, CROWD, &rounds[0]).await;
    assert_eq!(accepted(), [6, 6, 0]);
    directory.change_to(&[&first, &second, &third]);
    clock.advance(6 * SECOND).await;
    assert_eq!(closes(&pool, CloseReason::Lifetime), CROWD as u64);
    let url = listed(Scheme::Http, "/1");
    gather(&clock, &pool, &url, CROWD, &rounds[1]).await;
    assert_eq!(accepted(), [10, 10, 4]);
}
