//! Ten thousand futures dropped at every await there is, while others wait for the same few connections.
//!
//! Where a number of polls leads to an await, the number is drawn; where it does not, the peer or the resolver says
//! nothing until somebody has been dropped there. After each batch nothing may be left of it, and the next request
//! must be served as if there had been none.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::{FutureExt, select_all};
use http_body_util::BodyExt;
use idempool::{CloseReason, Pool, Resolve, Resolving, Timings};
use tokio::task::JoinSet;

use crate::support::{
    BOTH, Gate, Peer, Scheme, builder, drop_after, eventually, fetch, get, on_both_runtimes, post,
    read,
};

const CONNECTIONS: usize = 4;
const TASKS: usize = 32;

fn limited(connections: usize) -> Pool {
    builder().max_connections_per_origin(connections).build()
}

/// Nothing is left: nobody waits, nothing is held, and every connection is idle or counted as closed.
async fn settled(pool: &Pool, case: &str) {
    eventually(case, || {
        let stats = pool.stats();
        let accounted = stats.closes.total() + stats.idle;
        let held = (stats.busy, stats.dialing, stats.closing, stats.waiting);
        held == (0, 0, 0, 0) && stats.connections_opened == accounted
    })
    .await;
}

/// The next request is served by an idle connection or by one dial, and by nothing that it had to wait for.
async fn serves_at_once(pool: &Pool, url: &str, case: &str) {
    let before = pool.stats();
    let response = pool.send(get(url)).await;
    let response = response.unwrap_or_else(|error| panic!("{case}: {error:?}"));
    let timings = response.extensions().get::<Timings>().expect("timings");
    let is_reused = timings.connection().is_reused();
    read(response).await.expect("a body");
    let after = pool.stats();
    let dials = after.connections_opened - before.connections_opened;
    assert_eq!(dials, u64::from(!is_reused), "{case}");
    assert!(!is_reused || before.idle > 0, "{case}: from where?");
    assert_eq!(after.dials_failed, before.dials_failed, "{case}");
}

/// Every wait of an exchange: in line, for a dial and its handshake, for the probe, while it writes, for the head and
/// the body, and for the connection's return, with small and large bodies.
#[test]
fn ten_thousand_exchanges_dropped_under_contention_leave_nothing_behind() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let at = Arc::new(Mutex::new(BTreeMap::new()));
    on_both_runtimes(|| batches(Arc::clone(&dropped), Arc::clone(&at)));
    println!(
        "storm: dropped={} by_polls={:?}",
        dropped.load(SeqCst),
        at.lock().unwrap()
    );
    assert!(dropped.load(SeqCst) >= 10_000);
}

async fn batches(dropped: Arc<AtomicUsize>, at: Arc<Mutex<BTreeMap<usize, usize>>>) {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            while let Some(request) = conn.read_request() {
                conn.apply(&request);
                conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n");
                conn.send("1\r\nb\r\n0\r\n\r\n");
                // Over TLS these are bytes on an idle connection: the next checkout has to wait for its probe.
                conn.send_key_update();
            }
        });
        let pool = limited(CONNECTIONS);
        for batch in 0..BATCHES {
            let mut tasks = JoinSet::new();
            for task in 0..TASKS {
                let (pool, url) = (pool.clone(), peer.url("/"));
                let (dropped, at) = (Arc::clone(&dropped), Arc::clone(&at));
                tasks.spawn(async move {
                    let mut random = Rng::with_seed((batch * TASKS + task) as u64);
                    let mut left = DROPS;
                    while left > 0 {
                        let polls = random.usize(1..=MOST_POLLS);
                        let size = [0, 0, 100, 200_000][random.usize(0..4)];
                        let exchange = async {
                            let id = random.u64(..).to_string();
                            let mut request = post(&url, vec![b'x'; size]);
                            let field = id.parse().expect("a field");
                            request.headers_mut().insert("x-id", field);
                            read(pool.send(request).await.expect("sent")).await
                        };
                        match drop_after(polls, exchange).await {
                            Some(body) => assert_eq!(body.expect("a body"), "ab"),
                            None => {
                                left -= 1;
                                dropped.fetch_add(1, SeqCst);
                                *at.lock().unwrap().entry(polls).or_default() += 1;
                            }
                        }
                    }
                });
            }
            while let Some(ended) = tasks.join_next().await {
                ended.expect("a task");
            }
            let case = format!("{scheme}, batch {batch}");
            settled(&pool, &case).await;
            serves_at_once(&pool, &peer.url("/after"), &case).await;
        }
    }
}

const BATCHES: usize = 8;
/// Of one task in one batch: 10,240 in all, over both schemes and on both runtimes.
const DROPS: usize = 10;
/// As many as an exchange takes, in line and with a dial of its own; more are rare.
const MOST_POLLS: usize = 8;

/// Says where a name is only when told to.
struct Mute {
    asked: AtomicUsize,
    answer: Mutex<Option<SocketAddr>>,
}

impl Mute {
    fn new() -> Arc<Mute> {
        Arc::new(Mute {
            asked: AtomicUsize::new(0),
            answer: Mutex::new(None),
        })
    }

    fn says(&self, address: SocketAddr) {
        *self.answer.lock().unwrap() = Some(address);
    }
}

impl Resolve for Mute {
    fn resolve(&self, _host: &str, _port: u16) -> Resolving {
        self.asked.fetch_add(1, SeqCst);
        let answer = *self.answer.lock().unwrap();
        Box::pin(async move {
            match answer {
                Some(address) => Ok(vec![address]),
                None => std::future::pending().await,
            }
        })
    }
}

/// Sends from all tasks at once, and drops them all once it holds.
async fn drop_all_when(pool: &Pool, url: &str, what: &str, holds: impl FnMut() -> bool) {
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let (pool, request) = (pool.clone(), get(url));
        tasks.spawn(async move { fetch(&pool, request).await });
    }
    eventually("all of them wait", || pool.stats().requests >= TASKS as u64).await;
    eventually(what, holds).await;
    tasks.shutdown().await;
}

#[test]
fn requests_dropped_while_their_name_is_looked_up_leave_nothing_behind() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Http);
        let resolver = Mute::new();
        let pool = builder()
            .max_connections_per_origin(CONNECTIONS)
            .resolver(Arc::clone(&resolver))
            // So that nothing ends these dials but that nobody waits for them.
            .connect_timeout(None)
            .build();
        let url = "http://pay.example/";
        drop_all_when(&pool, url, "the names are asked for", || {
            resolver.asked.load(SeqCst) == CONNECTIONS
        })
        .await;
        assert_eq!(pool.stats().waiting, 0);
        settled(&pool, "the lookups").await;
        resolver.says(peer.address());
        serves_at_once(&pool, url, "after the lookups").await;
    });
}

#[test]
fn requests_dropped_in_their_handshake_leave_nothing_behind() {
    on_both_runtimes(|| async {
        // It takes the ClientHello and says nothing.
        let silent = Peer::start(Scheme::Http, |conn| {
            conn.await_end();
        });
        let peer = Peer::well_behaved(Scheme::Https);
        let resolver = Mute::new();
        resolver.says(silent.address());
        let pool = builder()
            .max_connections_per_origin(CONNECTIONS)
            .resolver(Arc::clone(&resolver))
            // So that nothing ends these dials but that nobody waits for them.
            .connect_timeout(None)
            .build();
        let url = "https://localhost/";
        drop_all_when(&pool, url, "the handshakes begin", || {
            silent.open() == CONNECTIONS
        })
        .await;
        settled(&pool, "the handshakes").await;
        assert_eq!(silent.most_open(), CONNECTIONS);
        resolver.says(peer.address());
        serves_at_once(&pool, url, "after the handshakes").await;
    });
}

/// Answers the first connections with these bytes and no more, the later ones properly.
fn stops_after(scheme: Scheme, answer: &'static str) -> Peer {
    Peer::start(scheme, move |conn| {
        if conn.index >= CONNECTIONS {
            conn.answer_requests(usize::MAX);
            return;
        }
        if conn.read_request().is_some() {
            conn.send(answer);
            conn.await_end();
        }
    })
}

#[test]
fn requests_dropped_in_half_a_head_or_half_a_body_leave_nothing_behind() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            for answer in [
                "",
                "HTTP/1.1 200 OK\r\nContent-",
                "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n",
                "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
            ] {
                let peer = stops_after(scheme, answer);
                let pool = limited(CONNECTIONS);
                let case = format!("{scheme}, {answer:?}");
                drop_all_when(&pool, &peer.url("/"), &case, || {
                    peer.requests().len() == CONNECTIONS
                })
                .await;
                settled(&pool, &case).await;
                serves_at_once(&pool, &peer.url("/after"), &case).await;
            }
        }
    });
}

/// golang/go#65705: with one connection, a request dropped while its body was written kept the next one waiting.
#[test]
fn an_upload_dropped_as_it_is_written_gives_its_only_connection_to_the_next() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::start(scheme, |conn| {
                if conn.index == 0 {
                    conn.read_head();
                    conn.await_end();
                    return;
                }
                conn.answer_requests(usize::MAX);
            });
            let pool = limited(1);
            let upload = tokio::spawn({
                let (pool, request) = (pool.clone(), post(&peer.url("/"), vec![b'x'; 64 << 20]));
                async move { pool.send(request).await }
            });
            eventually("it is being written", || pool.stats().busy == 1).await;
            let next = tokio::spawn({
                let (pool, request) = (pool.clone(), get(&peer.url("/next")));
                async move { fetch(&pool, request).await }
            });
            eventually("the next is in line", || pool.stats().waiting == 1).await;
            upload.abort();
            let body = next.await.expect("the task");
            assert_eq!(body.expect("a response"), "1", "{scheme}");
            settled(&pool, "the upload").await;
            assert_eq!(pool.stats().closes.get(CloseReason::RequestDropped), 1);
        }
    });
}

/// encode/httpcore#830, dotnet/corefx#32262: whoever leaves the line leaves it, wherever they stood, and with whatever
/// they had been handed.
#[test]
fn a_request_dropped_anywhere_in_line_is_missed_by_nobody() {
    const LINE: usize = 6;
    on_both_runtimes(|| async {
        for leaver in 0..LINE {
            for handed in [false, true] {
                let peer = Peer::well_behaved(Scheme::Http);
                let pool = limited(1);
                let first = pool.send(get(&peer.url("/"))).await.expect("a response");
                let mut line = Vec::new();
                for place in 0..LINE {
                    let (pool, url) = (pool.clone(), peer.url(&format!("/{place}")));
                    let mut request = Box::pin(async move { fetch(&pool, get(&url)).await });
                    // As far as the line, and kept there.
                    assert!((&mut request).now_or_never().is_none());
                    line.push(request);
                }
                assert_eq!(pool.stats().waiting, LINE as u64);
                if handed {
                    // The first in line has been handed the connection and has not looked yet.
                    read(first).await.expect("a body");
                    drop(line.remove(leaver));
                } else {
                    drop(line.remove(leaver));
                    assert_eq!(pool.stats().waiting, LINE as u64 - 1);
                    read(first).await.expect("a body");
                }
                for request in line {
                    assert_eq!(request.await.expect("a response"), "0");
                }
                settled(&pool, "the line").await;
                assert_eq!(pool.stats().waiting, 0);
                assert_eq!(peer.accepted(), 1, "place {leaver}, handed {handed}");
            }
        }
    });
}

/// encode/httpcore#785: all tasks cancelled after the first success, and then nobody was served any more.
#[test]
fn after_all_tasks_but_the_first_were_cancelled_the_next_request_is_served() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::well_behaved(scheme);
            let pool = limited(CONNECTIONS);
            for round in 0..25 {
                let mut tasks = JoinSet::new();
                for _ in 0..100 {
                    let (pool, request) = (pool.clone(), get(&peer.url("/")));
                    tasks.spawn(async move { fetch(&pool, request).await });
                }
                let first = tasks.join_next().await.expect("a task").expect("its end");
                first.expect("a response");
                tasks.shutdown().await;
                let next = fetch(&pool, get(&peer.url("/next"))).await;
                next.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
            }
            settled(&pool, "the rounds").await;
            serves_at_once(&pool, &peer.url("/after"), "after the rounds").await;
        }
    });
}

/// encode/httpx#1461: the first answer wins, the losers are dropped, and their sockets stayed open.
#[test]
fn the_losers_of_a_race_leave_no_socket_open() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Http);
        let pool = limited(CONNECTIONS);
        for _ in 0..50 {
            let racers = (0..10).map(|_| Box::pin(fetch(&pool, get(&peer.url("/")))));
            let (winner, _, losers) = select_all(racers).await;
            winner.expect("a response");
            drop(losers);
        }
        settled(&pool, "the races").await;
        let idle = pool.stats().idle;
        #[cfg(target_os = "linux")]
        eventually("no other socket", || peer.client_sockets() as u64 == idle).await;
        eventually("the peer knows", || peer.open() as u64 == idle).await;
    });
}

/// plabayo/rama#868, encode/httpcore#550: a connection whose request was dropped before its answer is broken, and
/// must neither be reused nor be counted for ever.
#[test]
fn a_connection_that_owes_an_answer_is_never_handed_to_the_next() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::start(scheme, |conn| {
                while let Some(request) = conn.read_request() {
                    if request.id() == "/dropped" {
                        conn.await_end();
                        return;
                    }
                    conn.reply(&request.id());
                }
            });
            let pool = limited(1);
            for round in 0..20 {
                let dropped = tokio::spawn({
                    let (pool, request) = (pool.clone(), get(&peer.url("/dropped")));
                    async move { fetch(&pool, request).await }
                });
                eventually("it is read", || {
                    let requests = peer.requests();
                    requests
                        .iter()
                        .filter(|read| read.id() == "/dropped")
                        .count()
                        == round + 1
                })
                .await;
                dropped.abort();
                let id = format!("/{round}");
                let next = fetch(&pool, get(&peer.url(&id))).await;
                assert_eq!(next.expect("a response"), id);
            }
            settled(&pool, "the rounds").await;
        }
    });
}

/// The rest of a body that was dropped is read in the background: while it is, the connection is nobody's, and when
/// the rest does not come, it makes way.
#[test]
fn bodies_dropped_early_give_their_connections_to_those_in_line() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let rest = Gate::new();
            let gate = rest.clone();
            let peer = Peer::start(scheme, move |conn| {
                while let Some(request) = conn.read_request() {
                    match request.id().as_str() {
                        "/late" => {
                            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab");
                            gate.pass();
                            conn.send("cd");
                        }
                        "/never" => {
                            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab");
                            conn.await_end();
                            return;
                        }
                        id => conn.reply(id),
                    }
                }
            });
            let draining = |time| {
                let pool = builder().max_connections_per_origin(1);
                pool.drain(1024, time).build()
            };
            let begin = async |pool: &Pool, path| {
                let response = pool.send(get(&peer.url(path))).await;
                let mut body = response.expect("a head").into_body();
                body.frame().await.expect("a frame").expect("data");
            };
            let pool = draining(Duration::from_secs(5));
            begin(&pool, "/late").await;
            let next = tokio::spawn({
                let (pool, request) = (pool.clone(), get(&peer.url("/next")));
                async move { fetch(&pool, request).await }
            });
            eventually("the next is in line", || pool.stats().waiting == 1).await;
            assert_eq!(pool.stats().busy, 1, "it reads on");
            rest.open();
            let next = next.await.expect("the task");
            assert_eq!(next.expect("a response"), "/next");
            assert_eq!(peer.accepted(), 1, "{scheme}: the same connection");

            let pool = draining(Duration::from_millis(20));
            begin(&pool, "/never").await;
            let next = fetch(&pool, get(&peer.url("/next"))).await;
            assert_eq!(next.expect("a response"), "/next");
            settled(&pool, "the drains").await;
            assert_eq!(pool.stats().closes.get(CloseReason::BodyDropped), 1);
        }
    });
}
