//! How many connections come and go: no more than are needed, none twice, and none left behind.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use idempool::{Builder, CloseReason, ErrorKind, FreshConnection, Pool};

use crate::support::{
    BOTH, Gate, HeldClock, Peer, Scheme, builder, eventually, fetch, get, on_both_runtimes, pool,
    post, read, yield_until,
};

/// A task that sends a request and reads its response.
fn call(pool: &Pool, url: &str) -> tokio::task::JoinHandle<Result<String, idempool::Error>> {
    let (pool, request) = (pool.clone(), get(url));
    tokio::spawn(async move { fetch(&pool, request).await })
}

/// A peer that answers `/hold` only when the gate is open, and all else at once, with its connection's index.
fn holding(scheme: Scheme, gate: &Gate) -> Peer {
    let gate = gate.clone();
    Peer::start(scheme, move |conn| {
        while let Some(request) = conn.read_request() {
            if request.id() == "/hold" {
                gate.pass();
            }
            let index = conn.index.to_string();
            conn.reply(&index);
        }
    })
}

/// Opens so many connections at a time and leaves them idle.
async fn burst(pool: &Pool, peer: &Peer, gate: &Gate, count: usize) {
    let calls: Vec<_> = (0..count).map(|_| call(pool, &peer.url("/hold"))).collect();
    yield_until("each has a connection", || peer.requests().len() == count).await;
    gate.open();
    for call in calls {
        call.await.expect("no panic").expect("a response");
    }
    assert_eq!((peer.accepted(), pool.stats().idle), (count, count as u64));
}

/// RFC 9112 section 9.4, and what the option says.
#[test]
fn no_more_connections_are_open_at_a_time_than_an_origin_may_have() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let gate = Gate::new();
            let peer = holding(scheme, &gate);
            let pool = builder().max_connections_per_origin(2).build();
            let calls: Vec<_> = (0..10).map(|_| call(&pool, &peer.url("/hold"))).collect();
            eventually("two are served and the others wait", || {
                let stats = pool.stats();
                peer.requests().len() == 2 && (stats.busy, stats.waiting) == (2, 8)
            })
            .await;
            gate.open();
            for call in calls {
                call.await.expect("no panic").expect("a response");
            }
            assert_eq!((peer.accepted(), peer.most_open()), (2, 2), "{scheme}");
            assert_eq!(peer.requests().len(), 10, "{scheme}");
        }
    });
}

/// RFC 9112 section 9.3.2: nothing is pipelined, so one answer can never be taken for another.
#[test]
fn a_request_is_written_only_once_the_response_before_it_has_ended() {
    on_both_runtimes(|| async {
        let gates = [(); 2].map(|()| Gate::new());
        let [in_line, halfway] = gates.clone();
        let peer = Peer::start(Scheme::Http, move |conn| {
            conn.read_request();
            in_line.pass();
            assert!(!conn.has_unread_byte(), "written before the answer");
            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf!");
            halfway.pass();
            assert!(!conn.has_unread_byte(), "written into the answer");
            conn.send("whole");
            conn.answer_requests(usize::MAX);
        });
        let pool = builder().max_connections_per_origin(1).build();
        let (client, request) = (pool.clone(), get(&peer.url("/first")));
        let first = tokio::spawn(async move { client.send(request).await });
        eventually("the first is read", || peer.requests().len() == 1).await;
        let second = call(&pool, &peer.url("/second"));
        eventually("the second is in line", || pool.stats().waiting == 1).await;
        gates[0].open();
        let first = first.await.expect("no panic").expect("a head");
        let mut body = first.into_body();
        body.frame().await.expect("a frame").expect("data");
        gates[1].open();
        let rest = body.collect().await.expect("the rest").to_bytes();
        assert_eq!(rest, "whole");
        assert_eq!(second.await.expect("no panic").expect("a response"), "0");
        assert_eq!(peer.accepted(), 1);
    });
}

/// RFC 9293 section 3.6.1 has each connection that we close first keep its port for minutes; what fails must not
/// hold more.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn two_thousand_failing_requests_hold_no_more_sockets_than_there_may_be_connections() {
    const LIMIT: usize = 16;
    let all_there = Gate::new();
    let gate = all_there.clone();
    let peer = Peer::start(Scheme::Http, move |conn| {
        conn.read_request();
        gate.pass();
        match conn.index % 3 {
            0 => conn.rst(),
            1 => conn.close(),
            _ => {
                conn.send("garbage\r\n\r\n");
                conn.await_end();
            }
        }
    });
    let pool = builder().max_connections_per_origin(LIMIT).build();
    let batch = || Vec::from_iter((0..50).map(|_| call(&pool, &peer.url("/"))));
    let mut calls = batch();
    eventually("those that may be are open, the others wait", || {
        let stats = pool.stats();
        let is_quiet = stats.dialing == 0 && peer.requests().len() as u64 == stats.busy;
        is_quiet && stats.busy + stats.waiting == 50
    })
    .await;
    let mut most = peer.client_sockets();
    all_there.open();
    for round in 1..40 {
        for call in std::mem::replace(&mut calls, batch()) {
            call.await.expect("no panic").expect_err("no answer");
        }
        // While the next ones are under way. The table of all sockets is long, and takes its time to read.
        if round % 4 == 0 {
            most = most.max(peer.client_sockets());
        }
    }
    for call in calls {
        call.await.expect("no panic").expect_err("no answer");
    }
    assert!(most <= LIMIT, "{most} sockets");
    eventually("all are gone", || peer.client_sockets() == 0).await;
    let stats = pool.stats();
    assert_eq!((stats.requests, stats.requests_failed), (2_000, 2_000));
    assert_eq!((stats.idle, stats.busy, stats.dialing), (0, 0, 0));
}

/// zalando/riptide#882: the decoder threw, and the connection stayed lent for ever.
#[test]
fn a_panic_of_whoever_reads_a_body_gives_the_place_of_its_connection_back() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::start(scheme, |conn| {
                while let Some(request) = conn.read_request() {
                    if request.id() != "/" {
                        conn.reply("next");
                        continue;
                    }
                    conn.send("HTTP/1.1 200 OK\r\nContent-Length: 10485760\r\n\r\nnot JSON");
                    conn.await_end();
                    return;
                }
            });
            let pool = builder().max_connections_per_origin(1).build();
            let (client, request) = (pool.clone(), get(&peer.url("/")));
            let decoder = tokio::spawn(async move {
                let response = client.send(request).await.expect("a head");
                let mut body = response.into_body();
                body.frame().await.expect("a frame").expect("data");
                // Unwinds as a panic does, without its message on the terminal.
                std::panic::resume_unwind(Box::new("not JSON"));
            });
            let ended: Result<(), _> = decoder.await;
            assert!(ended.expect_err("it panics").is_panic());
            let next = fetch(&pool, get(&peer.url("/next"))).await;
            assert_eq!(next.expect("a response"), "next", "{scheme}");
            eventually("it is counted", || {
                pool.stats().closes.get(CloseReason::BodyDropped) == 1
            })
            .await;
        }
    });
}

/// A request body whose second frame panics.
struct Panics(bool);

impl Body for Panics {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if std::mem::replace(&mut self.0, true) {
            std::panic::resume_unwind(Box::new("the encoder"));
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from("amount")))))
    }
}

/// zalando/riptide#882, in the other direction.
#[test]
fn a_panic_of_a_request_body_gives_the_place_of_its_connection_back() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::start(scheme, |conn| {
                if conn.index == 0 {
                    conn.await_end();
                } else {
                    conn.answer_requests(usize::MAX);
                }
            });
            let pool = builder().max_connections_per_origin(1).build();
            let request = http::Request::post(peer.url("/")).body(Panics(false));
            let client = pool.clone();
            let sent = tokio::spawn(async move { client.send(request.expect("a request")).await });
            let error = sent.await.expect("it is the connection's task that panics");
            let error = error.expect_err("half a request");
            assert_eq!(error.kind(), ErrorKind::RequestBody, "{error:?}");
            // A body that panicked is not asked again, on whatever connection.
            assert_eq!(pool.stats().connections_opened, 1, "{scheme}");
            let next = fetch(&pool, get(&peer.url("/next"))).await;
            assert_eq!(next.expect("a response"), "1", "{scheme}");
            let stats = pool.stats();
            assert_eq!((stats.idle, stats.busy), (1, 0), "{scheme}");
        }
    });
}

type Set = fn(Builder) -> Builder;

/// smithy-lang/smithy-rs#4282, hyperium/hyper#3640, linkerd/linkerd2-proxy#4004: an idle time that was set, and
/// nobody who looked at it.
#[tokio::test]
async fn no_other_option_makes_the_idle_time_inert() {
    let clock = HeldClock::start();
    let minutes = Duration::from_secs(600);
    let others: [(&str, Set); 6] = [
        ("all else at its default", |builder| builder),
        ("no lifetime", |builder| builder.max_lifetime(None)),
        ("a long lifetime", |builder| {
            builder.max_lifetime(Duration::from_secs(86_400))
        }),
        ("no other limit", |builder| {
            builder
                .max_lifetime(None)
                .acquire_timeout(None)
                .response_head_timeout(None)
                .ack_timeout(None)
        }),
        ("one idle connection", |builder| {
            builder.max_idle(1).max_idle_per_origin(1)
        }),
        ("no keep-alive", |builder| builder.tcp_keepalive(None)),
    ];
    for (name, set) in others {
        let peer = Peer::well_behaved(Scheme::Http);
        let builder = builder().connect_timeout(None).idle_timeout(minutes / 2);
        let pool = set(builder).build();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        clock.advance(minutes / 2 - Duration::from_secs(1)).await;
        assert_eq!(pool.stats().idle, 1, "{name}");
        clock.advance(Duration::from_secs(2)).await;
        let stats = pool.stats();
        let closes = stats.closes.get(CloseReason::IdleTimeout);
        assert_eq!((stats.idle, closes), (0, 1), "{name}");
    }
}

/// The same: in a runtime without timers, nothing that needs one begins.
#[test]
fn a_runtime_without_timers_keeps_no_connection_that_would_never_leave() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .expect("a runtime");
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder()
        .acquire_timeout(None)
        .connect_timeout(None)
        .response_head_timeout(None)
        .max_lifetime(None)
        .build();
    let url = format!("http://{}/", peer.address());
    let outcome = runtime.block_on(async { call(&pool, &url).await });
    assert!(
        !matches!(outcome, Ok(Ok(_))),
        "served, and nobody looks at the clock"
    );
    assert_eq!((pool.stats().idle, pool.stats().busy), (0, 0));
}

/// hyperium/hyper#1433: "connection was not ready, this is a hyper bug".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_connection_is_handed_out_before_it_is_ready() {
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        // A machine that is busy with other things takes its time to read session tickets.
        let pool = builder()
            .connect_timeout(None)
            .acquire_timeout(None)
            .probe_patience(Duration::from_secs(60))
            .build();
        let calls: Vec<_> = (0..1_000).map(|_| call(&pool, &peer.url("/"))).collect();
        for call in calls {
            call.await.expect("no panic").expect("a response");
        }
        let stats = pool.stats();
        assert_eq!(stats.requests_failed + stats.handed_back, 0, "{scheme}");
        assert_eq!(stats.closes.total(), 0, "{scheme}, {stats}");
        assert!(stats.connections_opened <= 64, "{scheme}");
    }
}

/// golang/go#13801, yarpc/yarpc-go#763, filecoin-project/go-jsonrpc#40, wailsapp/wails#5933: workers that kept two
/// connections between them ran the machine out of ports.
#[test]
fn ten_workers_need_ten_connections_however_much_they_send() {
    on_both_runtimes(|| async {
        let gate = Gate::new();
        let peer = holding(Scheme::Http, &gate);
        let pool = pool();
        burst(&pool, &peer, &gate, 10).await;
        let url = peer.url("/");
        let workers = (0..10).map(|_| {
            let (pool, url) = (pool.clone(), url.clone());
            tokio::spawn(async move {
                for _ in 0..500 {
                    fetch(&pool, get(&url)).await.expect("a response");
                }
            })
        });
        for worker in workers.collect::<Vec<_>>() {
            worker.await.expect("no panic");
        }
        assert_eq!(peer.accepted(), 10);
        assert_eq!(pool.stats().closes.total(), 0);
    });
}

/// envoyproxy/envoy#5057: hundreds of handshakes at a time were more than the server could bear.
#[tokio::test]
async fn no_more_handshakes_are_under_way_than_dials_may_be() {
    const DIALS: usize = 8;
    let (gate, at_door) = (Gate::new(), Arc::new(AtomicUsize::new(0)));
    let (door, count) = (gate.clone(), Arc::clone(&at_door));
    let peer = Peer::start_behind(
        move |_| {
            count.fetch_add(1, SeqCst);
            door.pass();
        },
        |conn| {
            conn.answer_requests(usize::MAX);
        },
    );
    let pool = builder()
        .connect_timeout(None)
        .acquire_timeout(None)
        .max_connections_per_origin(200)
        .max_pending_dials(DIALS)
        .build();
    let calls: Vec<_> = (0..200).map(|_| call(&pool, &peer.url("/"))).collect();
    eventually("all are waiting", || {
        pool.stats().waiting == 200 && at_door.load(SeqCst) == DIALS
    })
    .await;
    assert_eq!((pool.stats().dialing, peer.accepted()), (8, DIALS));
    gate.open();
    let watch = async {
        while calls.iter().any(|call| !call.is_finished()) {
            let dialing = pool.stats().dialing;
            assert!(dialing <= 8, "{dialing}");
            tokio::task::yield_now().await;
        }
    };
    watch.await;
    for answer in join_all(calls).await {
        answer.expect("no panic").expect("a response");
    }
    assert_eq!(peer.requests().len(), 200);
}

/// nodejs/node#33278, eclipse-vertx/vert.x#2415: in turn, one request a second keeps a whole burst's connections.
#[tokio::test]
async fn after_a_burst_the_pool_shrinks_to_what_is_used() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = holding(Scheme::Http, &gate);
    let pool = builder()
        .connect_timeout(None)
        .idle_timeout(Duration::from_secs(10))
        .dial_window(false)
        .build();
    burst(&pool, &peer, &gate, 30).await;
    for _ in 0..11 {
        clock.advance(Duration::from_secs(1)).await;
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    }
    let stats = pool.stats();
    assert_eq!(stats.closes.get(CloseReason::IdleTimeout), 29);
    assert_eq!((stats.idle, peer.accepted()), (1, 30));
    clock
        .until("the server sees them go", || peer.ended().len() == 29)
        .await;
}

/// A peer that says `close` with the hundredth response of each connection, as nginx does by default.
fn closing_each_hundredth(scheme: Scheme) -> Peer {
    Peer::start(scheme, |conn| {
        conn.answer_requests(99);
        if conn.read_request().is_some() {
            conn.reply_with("Connection: close\r\n", "the last");
            conn.close_notify();
            conn.fin();
            conn.await_end();
        }
    })
}

/// jinhailang/blog#37, igrigorik/em-http-request#225.
#[tokio::test]
async fn a_server_that_limits_its_connections_costs_a_dial_for_each_and_no_error() {
    for scheme in BOTH {
        let peer = closing_each_hundredth(scheme);
        let pool = pool();
        for _ in 0..450 {
            fetch(&pool, post(&peer.url("/"), "x"))
                .await
                .expect("a response");
        }
        assert_eq!((peer.accepted(), peer.requests().len()), (5, 450));
        let stats = pool.stats();
        assert_eq!(stats.closes.get(CloseReason::ResponseSaidClose), 4);
        assert_eq!((stats.requests_failed, stats.handed_back), (0, 0));
    }
}

/// The same with others at work meanwhile.
#[test]
fn a_server_that_limits_its_connections_fails_none_of_many_workers() {
    on_both_runtimes(|| async {
        let peer = closing_each_hundredth(Scheme::Http);
        let pool = pool();
        let workers = (0..4).map(|_| {
            let (pool, url) = (pool.clone(), peer.url("/"));
            tokio::spawn(async move {
                for _ in 0..250 {
                    fetch(&pool, post(&url, "x")).await.expect("a response");
                }
            })
        });
        for worker in workers.collect::<Vec<_>>() {
            worker.await.expect("no panic");
        }
        assert_eq!(peer.requests().len(), 1_000);
        let stats = pool.stats();
        assert_eq!((stats.requests_failed, stats.handed_back), (0, 0));
        assert_eq!(
            stats.closes.get(CloseReason::ResponseSaidClose),
            stats.closes.total()
        );
    });
}

/// oven-sh/bun#36598, rustls/rustls#2204: none or every other connection resumed its session.
#[tokio::test]
async fn every_new_connection_but_the_first_resumes_a_session() {
    let peer = Peer::well_behaved(Scheme::Https);
    let pool = pool();
    for _ in 0..20 {
        let mut request = get(&peer.url("/"));
        request.extensions_mut().insert(FreshConnection);
        fetch(&pool, request).await.expect("a response");
    }
    let stats = pool.stats();
    assert_eq!(peer.accepted(), 20);
    assert_eq!((stats.tls_full, stats.tls_resumed), (1, 19));
}

/// golang/go#66442: a connection comes back while another is dialled for the same request. The dial was cancelled,
/// and the next request had to begin it anew.
#[tokio::test]
async fn a_dial_that_is_not_needed_any_more_is_finished_and_used_by_the_next_request() {
    // So that no dial is given up for its age.
    let clock = HeldClock::start();
    let (free, open) = (Gate::new(), Gate::new());
    let (first, door) = (free.clone(), open.clone());
    let peer = Peer::start_behind(
        move |index| {
            if index == 1 {
                door.pass();
            }
        },
        move |conn| {
            while let Some(request) = conn.read_request() {
                if request.id() == "/first" {
                    first.pass();
                }
                let index = conn.index.to_string();
                conn.reply(&index);
            }
        },
    );
    let pool = builder()
        .connect_timeout(None)
        .acquire_timeout(None)
        .build();
    let first = call(&pool, &peer.url("/first"));
    clock
        .until("the first is read", || peer.requests().len() == 1)
        .await;
    let second = call(&pool, &peer.url("/second"));
    clock
        .until("a dial is under way for the second", || {
            peer.accepted() == 2
        })
        .await;
    free.open();
    for call in [first, second] {
        assert_eq!(call.await.expect("no panic").expect("a response"), "0");
    }
    assert_eq!((pool.stats().dialing, pool.stats().idle), (1, 1));
    open.open();
    clock
        .until("what was dialled is kept", || pool.stats().idle == 2)
        .await;
    let busy = pool.send(get(&peer.url("/third"))).await.expect("a head");
    let fourth = fetch(&pool, get(&peer.url("/fourth"))).await;
    assert_eq!(read(busy).await.expect("a body"), "1");
    assert_eq!(fourth.expect("a response"), "0");
    assert_eq!((peer.accepted(), pool.stats().dials_failed), (2, 0));
}
