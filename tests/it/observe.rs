//! What a pool shows of itself: each origin as it is now, and why each connection closed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use idempool::{Builder, CloseReason, OriginStats, Pool, Resolve, Resolving};

use crate::support::{
    BOTH, Conn, Gate, Logs, Peer, Scheme, builder, eventually, fetch, get, pool, read,
};

fn spawn(pool: &Pool, url: &str) -> tokio::task::JoinHandle<()> {
    let (pool, request) = (pool.clone(), get(url));
    tokio::spawn(async move {
        fetch(&pool, request).await.expect("a response");
    })
}

/// The origin of this peer, which must have something to show.
fn origin_of(pool: &Pool, peer: &Peer) -> OriginStats {
    let origins = pool.stats().origins;
    let port = peer.address().port();
    let found = origins.into_iter().find(|it| it.origin.port() == port);
    found.expect("a known origin")
}

/// line/armeria#3493, zalando/riptide#521, linkerd/linkerd-viz#42: nobody could see what a pool was at.
#[tokio::test]
async fn the_statistics_show_each_origin_as_it_is() {
    let gate = Gate::new();
    let (late, mute) = (gate.clone(), gate.clone());
    let busy_peer = Peer::start(Scheme::Http, move |conn| {
        while let Some(request) = conn.read_request() {
            if request.id() == "/slow" {
                late.pass();
            }
            conn.reply("x");
        }
    });
    // Its TCP answers, and its TLS does not.
    let mute_peer = Peer::start(Scheme::Http, move |_| mute.pass());
    let pool = builder().max_connections_per_origin(2).build();
    let both = [(); 2].map(|()| pool.send(get(&busy_peer.url("/"))));
    for head in join_all(both).await {
        read(head.expect("a head")).await.expect("a body");
    }
    let slow = spawn(&pool, &busy_peer.url("/slow"));
    eventually("one is busy", || pool.stats().busy == 1).await;
    let now = origin_of(&pool, &busy_peer);
    assert_eq!((now.idle, now.busy, now.dialing), (1, 1, 0));
    assert_eq!((now.closing, now.waiting), (0, 0));
    assert_eq!(now.longest_wait, None);

    let more = spawn(&pool, &busy_peer.url("/slow"));
    eventually("two are busy", || pool.stats().busy == 2).await;
    let third = spawn(&pool, &busy_peer.url("/"));
    eventually("one waits", || pool.stats().waiting == 1).await;
    let url = mute_peer.url("/").replace("http://", "https://");
    let dials: Vec<_> = (0..5)
        .map(|_| {
            let (pool, request) = (pool.clone(), get(&url));
            tokio::spawn(async move { fetch(&pool, request).await.map(drop) })
        })
        .collect();
    eventually("six wait", || pool.stats().waiting == 6).await;
    let now = origin_of(&pool, &busy_peer);
    assert_eq!((now.idle, now.busy, now.dialing), (0, 2, 0));
    assert_eq!((now.closing, now.waiting), (0, 1));
    assert!(now.oldest_connection.is_some() && now.longest_idle.is_none());
    assert!(now.longest_wait.is_some());
    let now = origin_of(&pool, &mute_peer);
    assert_eq!((now.idle, now.busy, now.dialing), (0, 0, 2));
    assert_eq!((now.closing, now.waiting), (0, 5));
    assert_eq!((now.oldest_connection, now.longest_idle), (None, None));
    let stats = pool.stats();
    assert_eq!((stats.busy, stats.dialing, stats.waiting), (2, 2, 6));
    assert_eq!(stats.origins.len(), 2);

    let port = |peer: &Peer| peer.address().port();
    for shown in [format!("{pool:?}"), stats.to_string()] {
        for (port, gauges) in [
            (
                port(&busy_peer),
                "0 idle, 2 busy, 0 dialing, 0 closing, 1 waiting",
            ),
            (
                port(&mute_peer),
                "0 idle, 0 busy, 2 dialing, 0 closing, 5 waiting",
            ),
        ] {
            let is_there = shown.contains(&port.to_string()) && shown.contains(gauges);
            assert!(is_there, "{gauges}: {shown}");
        }
        assert!(shown.contains("oldest") && shown.contains("waiting for up to"));
    }
    gate.open();
    for call in [slow, more, third] {
        call.await.unwrap();
    }
    for call in dials {
        call.await.unwrap().expect_err("no handshake");
    }
    eventually("the other origin is forgotten", || {
        pool.stats().origins.len() == 1
    })
    .await;
}

/// A server that does not close its side holds the seat, and that can be seen.
#[tokio::test]
async fn a_connection_that_waits_for_the_servers_close_is_shown_as_closing() {
    let leave = Gate::new();
    let gate = leave.clone();
    let peer = Peer::start(Scheme::Http, move |conn| {
        conn.answer_requests(usize::MAX);
        gate.pass();
    });
    let pool = builder().max_idle_per_origin(0).build();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    let now = origin_of(&pool, &peer);
    assert_eq!((now.idle, now.busy, now.closing), (0, 0, 1));
    leave.open();
    eventually("its seat is free", || pool.stats().origins.is_empty()).await;
}

/// restatedev/restate#4673: a duration that is known at the end says nothing of a connection that lives long.
#[tokio::test]
async fn the_age_of_an_open_connection_is_shown() {
    const WHILE: Duration = Duration::from_millis(30);
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    let origin = || origin_of(&pool, &peer);
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    tokio::time::sleep(WHILE).await;
    let (age, idle) = (origin().oldest_connection, origin().longest_idle);
    assert!(
        age >= Some(WHILE) && idle >= Some(WHILE),
        "{age:?}, {idle:?}"
    );
    // Used again, it has been idle for a shorter time than it has existed.
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    tokio::time::sleep(WHILE).await;
    let now = origin();
    assert!(now.oldest_connection >= Some(2 * WHILE), "{now:?}");
    assert!(now.longest_idle < now.oldest_connection, "{now:?}");
}

/// A way in which a connection ends, and the reason that is counted for it.
struct Ending {
    reason: CloseReason,
    options: fn(Builder) -> Builder,
    /// What the peer does on the first connection once it has read the request.
    script: fn(&mut Conn),
    act: fn(&Pool),
}

/// AmberFog/foghttp#75: that connections went away was seen, and not why.
#[tokio::test]
async fn each_close_is_counted_under_its_reason() {
    const SOON: Duration = Duration::from_millis(30);
    let as_it_is: fn(Builder) -> Builder = |builder| builder;
    let reply: fn(&mut Conn) = |conn| {
        conn.reply("x");
        conn.await_end();
    };
    let nothing: fn(&Pool) = |_| {};
    let ending = |reason| Ending {
        reason,
        options: as_it_is,
        script: reply,
        act: nothing,
    };
    let endings = [
        Ending {
            options: |builder| builder.idle_timeout(SOON),
            ..ending(CloseReason::IdleTimeout)
        },
        Ending {
            options: |builder| builder.max_lifetime(SOON),
            ..ending(CloseReason::Lifetime)
        },
        Ending {
            options: |builder| builder.max_requests_per_connection(1),
            ..ending(CloseReason::RequestLimit)
        },
        Ending {
            options: |builder| builder.max_idle_per_origin(0),
            ..ending(CloseReason::IdleLimit)
        },
        Ending {
            script: |conn| {
                conn.reply("x");
                // The response is read by then, whatever the machine is busy with.
                std::thread::sleep(SOON);
                conn.close_notify();
                conn.fin();
                conn.await_end();
            },
            ..ending(CloseReason::PeerClosedIdle)
        },
        Ending {
            script: |conn| {
                conn.reply("x");
                std::thread::sleep(SOON);
                conn.rst();
            },
            ..ending(CloseReason::PeerResetIdle)
        },
        Ending {
            script: |conn| {
                conn.reply("x");
                conn.send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n");
                conn.await_end();
            },
            ..ending(CloseReason::UnexpectedBytes)
        },
        Ending {
            script: Conn::close,
            ..ending(CloseReason::ExchangeFailed)
        },
        Ending {
            script: |conn| {
                conn.send("no HTTP\r\n\r\n");
                conn.await_end();
            },
            ..ending(CloseReason::ExchangeFailed)
        },
        Ending {
            script: |conn| {
                conn.reply_with("Connection: close\r\n", "x");
                conn.await_end();
            },
            ..ending(CloseReason::ResponseSaidClose)
        },
        Ending {
            script: |conn| {
                conn.send("HTTP/1.1 200 OK\r\n\r\nx");
                conn.close_notify();
                conn.fin();
            },
            ..ending(CloseReason::Framing)
        },
        Ending {
            options: |builder| builder.response_head_timeout(SOON),
            script: |conn| {
                conn.await_end();
            },
            ..ending(CloseReason::TimedOut)
        },
        Ending {
            act: |pool| pool.evict(&pool.stats().origins[0].origin),
            ..ending(CloseReason::Evicted)
        },
        Ending {
            act: |pool| {
                let pool = pool.clone();
                tokio::spawn(async move { pool.close(SOON).await });
            },
            ..ending(CloseReason::PoolClosed)
        },
    ];
    for scheme in BOTH {
        for ending in &endings {
            let script = ending.script;
            let peer = Peer::start(scheme, move |conn| {
                if conn.read_request().is_some() {
                    script(conn);
                }
            });
            let pool = (ending.options)(builder()).build();
            let _ = fetch(&pool, get(&peer.url("/"))).await;
            (ending.act)(&pool);
            let (case, closes) = (ending.reason.as_str(), || pool.stats().closes);
            eventually(case, || closes().total() == 1).await;
            assert_eq!(closes().get(ending.reason), 1, "{scheme}: {:?}", closes());
        }
    }
}

/// What a name leads to, for as long as it does.
struct Moving(Mutex<Vec<std::net::SocketAddr>>);

impl Resolve for Moving {
    fn resolve(&self, _: &str, _: u16) -> Resolving {
        let addresses = self.0.lock().unwrap().clone();
        Box::pin(async move { Ok(addresses) })
    }
}

/// MarketSquare/robotframework-requests#67: "Resetting dropped connection" alarmed people about nothing.
#[tokio::test]
async fn connections_that_come_and_go_are_no_news_to_who_logs_no_debugging_output() {
    const SOON: Duration = Duration::from_millis(30);
    let logs = Logs::capture();
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        for builder in [
            builder().idle_timeout(SOON),
            builder().max_lifetime(SOON),
            builder().max_idle_per_origin(0),
            builder().max_requests_per_connection(1),
        ] {
            let pool = builder.build();
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
            eventually("it is closed", || pool.stats().origins.is_empty()).await;
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        }
        let closing = Peer::start(scheme, |conn| {
            if conn.answer_requests(1) {
                conn.close_notify();
                conn.fin();
                conn.await_end();
            }
        });
        let pool = pool();
        for round in 1..=10 {
            let request = get(&closing.url("/"));
            fetch(&pool, request).await.expect("a response");
            // The next request does not race with the close: it has arrived.
            eventually("the close", || closing.ended().len() == round).await;
        }
    }
    // A name that leads elsewhere, and its connections with it.
    let (old, new) = (
        Peer::well_behaved(Scheme::Http),
        Peer::well_behaved(Scheme::Http),
    );
    let moving = Arc::new(Moving(Mutex::new(vec![old.address()])));
    let resolver: Arc<dyn Resolve> = Arc::clone(&moving) as _;
    let pool = builder().resolver(resolver).build();
    let both = [(); 2].map(|()| pool.send(get("http://pay.example/")));
    for head in join_all(both).await {
        read(head.expect("a head")).await.expect("a body");
    }
    *moving.0.lock().unwrap() = vec![new.address()];
    let is_gone = || pool.stats().closes.get(CloseReason::AddressGone) > 0;
    for _ in 0..10 {
        let mut fresh = get("http://pay.example/");
        fresh.extensions_mut().insert(idempool::FreshConnection);
        fetch(&pool, fresh).await.expect("a response");
    }
    assert!(is_gone(), "{}", pool.stats());
    pool.close(SOON).await;
    assert_eq!(logs.above_debug(), [""; 0]);
    assert!(!logs.debug().is_empty(), "the capture works");
}
