//! Servers that close a connection after a number of requests, and connections that are opened before they do.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempool::{CloseReason, Origin, Pool, Profile, Source, Timings};

use crate::support::{
    BOTH, Conn, HeldClock, Logs, Peer, Scheme, builder, eventually, fetch, get, post, read,
};

const CAP: u32 = 20;

/// Says close on the last response that a connection carries, and closes it.
fn capped(scheme: Scheme, cap: u32) -> Peer {
    Peer::start(scheme, move |conn: &mut Conn| {
        serve(conn, cap, |_| String::new())
    })
}

fn serve(conn: &mut Conn, cap: u32, field: impl Fn(u32) -> String) {
    for count in 1..=cap {
        let Some(request) = conn.read_request() else {
            return;
        };
        conn.apply(&request);
        if count == cap {
            conn.reply_with("Connection: close\r\n", "ok");
            return conn.close();
        }
        conn.reply_with(&field(count), "ok");
    }
}

fn profile(pool: &Pool, peer: &Peer) -> Profile {
    let origin = Origin::of(&peer.url("/").parse().expect("a URI")).expect("an origin");
    pool.profile(&origin).expect("known")
}

/// Whether the request was answered on a connection that was there before.
async fn is_reused(pool: &Pool, peer: &Peer) -> bool {
    let response = pool.send(get(&peer.url("/"))).await.expect("a response");
    let timings = response.extensions().get::<Timings>().expect("timings");
    let reused = timings.connection().is_reused();
    read(response).await.expect("a body");
    reused
}

/// One request after the other until two connections have come to their end.
async fn learn(pool: &Pool, peer: &Peer) {
    while profile_cap(pool, peer).is_none() {
        is_reused(pool, peer).await;
    }
    eventually("nothing is being opened", || pool.stats().dialing == 0).await;
}

fn profile_cap(pool: &Pool, peer: &Peer) -> Option<u32> {
    let origin = Origin::of(&peer.url("/").parse().expect("a URI")).expect("an origin");
    let profile = pool.profile(&origin)?;
    profile.request_cap.map(|cap| cap.value)
}

/// envoyproxy/envoy#6392 and others: every hundredth request pays for a new connection. Here none does once the cap is
/// known, one request after the other.
#[tokio::test]
async fn once_the_cap_is_known_no_request_waits_for_a_new_connection() {
    for scheme in BOTH {
        let peer = capped(scheme, CAP);
        let pool = builder().build();
        learn(&pool, &peer).await;
        let known = profile(&pool, &peer).request_cap.expect("a cap");
        assert_eq!((known.value, known.source), (CAP, Source::Seen), "{scheme}");

        let before = pool.stats();
        for request in 0..10 * CAP {
            if pool.stats().dialing > 0 {
                // A request that takes no time leaves none for the dial beside it.
                eventually("it is opened", || pool.stats().dialing == 0).await;
            }
            assert!(is_reused(&pool, &peer).await, "{scheme} {request}");
        }
        let after = pool.stats();
        let opened = after.connections_opened - before.connections_opened;
        assert_eq!(after.dialed_ahead - before.dialed_ahead, opened);
        assert!(
            (9..=12).contains(&opened),
            "{scheme}: {opened} for ten caps"
        );
        assert!(after.idle + after.closing <= 3, "{scheme}: {after}");
    }
}

/// rustls resumes: the replacement costs no certificates.
#[tokio::test]
async fn a_connection_that_is_opened_ahead_resumes_the_session() {
    let peer = capped(Scheme::Https, CAP);
    let pool = builder().build();
    learn(&pool, &peer).await;
    for _ in 0..3 * CAP {
        is_reused(&pool, &peer).await;
    }
    let stats = pool.stats();
    assert_eq!(stats.tls_full, 1, "{stats}");
    assert!(stats.tls_resumed >= 4, "{stats}");
}

/// A response that says close is the last sign: the next connection is opened while the body is still being read.
#[tokio::test]
async fn a_response_that_says_close_starts_the_next_connection_at_once() {
    let peer = Peer::start(Scheme::Http, |conn| {
        for count in 0.. {
            if conn.read_request().is_none() {
                return;
            }
            if conn.index == 0 && count == 2 {
                conn.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n");
                // Not before somebody has come.
                conn.await_end();
                return;
            }
            conn.reply("ok");
        }
    });
    let pool = builder().build();
    for _ in 0..2 {
        is_reused(&pool, &peer).await;
    }
    let last = pool.send(get(&peer.url("/"))).await.expect("a head");
    eventually("the next one is open", || pool.stats().idle == 1).await;
    assert_eq!(pool.stats().dialed_ahead, 1);
    assert!(is_reused(&pool, &peer).await);
    drop(last);
}

/// A quiet origin gets none: its next request may be long in coming.
#[tokio::test]
async fn nothing_is_opened_ahead_for_a_quiet_origin() {
    let clock = HeldClock::start();
    let peer = capped(Scheme::Http, 4);
    let pool = builder()
        .connect_timeout(None)
        .acquire_timeout(None)
        .response_head_timeout(None)
        .idle_timeout(None)
        .max_lifetime(None)
        .build();
    for _ in 0..40 {
        is_reused(&pool, &peer).await;
        clock.advance(Duration::from_secs(5)).await;
    }
    let stats = pool.stats();
    assert_eq!(profile_cap(&pool, &peer), Some(4));
    assert_eq!(
        (stats.dialed_ahead, stats.connections_opened),
        (0, 10),
        "{stats}"
    );
}

/// A server that keeps no connection at all gets none that waits: it may be in its way.
#[tokio::test]
async fn nothing_is_opened_ahead_where_each_response_says_close() {
    let peer = capped(Scheme::Http, 1);
    let pool = builder().build();
    for _ in 0..20 {
        assert!(!is_reused(&pool, &peer).await);
    }
    assert_eq!(pool.stats().dialed_ahead, 0);
}

/// Apache counts down what is left, with 100 on the first of 101 responses; Node.js says the same number each time. An
/// announced cap is believed at once, and holds for connections that never came to their end.
#[tokio::test]
async fn an_announced_cap_is_acted_on_before_it_is_met() {
    let counting_down: fn(u32) -> String =
        |count| format!("Keep-Alive: timeout=60, max={}\r\n", CAP - count);
    let constant: fn(u32) -> String = |_| format!("Keep-Alive: max={CAP}\r\n");
    for field in [counting_down, constant] {
        let peer = Peer::start(Scheme::Http, move |conn: &mut Conn| serve(conn, CAP, field));
        let pool = builder().build();
        for _ in 0..CAP - 1 {
            is_reused(&pool, &peer).await;
        }
        let cap = profile(&pool, &peer).request_cap.expect("a cap");
        assert_eq!((cap.value, cap.source), (CAP, Source::Hint));
        eventually("the next one is open", || pool.stats().idle == 2).await;
        for _ in 0..2 {
            assert!(is_reused(&pool, &peer).await);
        }
    }
}

/// Many at a time: each connection that nears its end is replaced, and no more than were in use at a time.
#[tokio::test]
async fn with_many_at_a_time_as_many_are_opened_ahead_as_end() {
    let peer = Arc::new(capped(Scheme::Http, CAP));
    let pool = builder().build();
    learn(&pool, &peer).await;
    let served: Arc<Mutex<HashMap<u64, u32>>> = Arc::default();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (pool, peer, served) = (pool.clone(), Arc::clone(&peer), Arc::clone(&served));
            tokio::spawn(async move {
                for _ in 0..10 * CAP {
                    let response = pool.send(get(&peer.url("/"))).await.expect("a response");
                    let timings = response.extensions().get::<Timings>().expect("timings");
                    let id = timings.connection().id();
                    *served.lock().expect("no panic").entry(id).or_default() += 1;
                    read(response).await.expect("a body");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a task");
    }
    let served = served.lock().expect("no panic");
    assert!(served.values().all(|&count| count <= CAP), "{served:?}");
    let stats = pool.stats();
    assert!(stats.dialed_ahead > 0, "{stats}");
    // Not one connection more at a time than twice what is used at a time.
    assert!(peer.most_open() <= 16 + 1, "{}", peer.most_open());
    assert_eq!(stats.requests_failed, 0, "{stats}");
}

/// The caller's own limit is a cap too.
#[tokio::test]
async fn the_callers_own_limit_of_requests_is_replaced_ahead_too() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder().max_requests_per_connection(10).build();
    let mut fresh = 0;
    for _ in 0..100 {
        if pool.stats().dialing > 0 {
            eventually("it is opened", || pool.stats().dialing == 0).await;
        }
        fresh += u32::from(!is_reused(&pool, &peer).await);
    }
    assert_eq!(fresh, 1, "the very first");
    let closed = pool.stats().closes.get(CloseReason::RequestLimit);
    assert!((9..=10).contains(&closed), "each is used up: {closed}");
    let cap = profile(&pool, &peer).request_cap.expect("a cap");
    assert_eq!((cap.value, cap.source), (10, Source::Caller));
}

/// Closes at different counts are no cap, and nothing is opened ahead before a response says close.
#[tokio::test]
async fn closes_at_different_counts_are_no_cap() {
    let peer = Peer::start(Scheme::Http, |conn| {
        let cap = u32::try_from(conn.index).expect("few") % 5 + 5;
        serve(conn, cap, |_| String::new());
    });
    let pool = builder().build();
    for _ in 0..100 {
        is_reused(&pool, &peer).await;
        assert_eq!(profile_cap(&pool, &peer), None);
    }
}

/// A server that closes because of an error says nothing of a cap.
#[tokio::test]
async fn an_error_that_says_close_is_no_sign_of_a_cap() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.read_request();
        conn.reply("ok");
        conn.read_request();
        let head =
            "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        conn.send(head);
    });
    let pool = builder().build();
    for _ in 0..6 {
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        fetch(&pool, post(&peer.url("/"), "x"))
            .await
            .expect("a response");
    }
    assert_eq!(profile_cap(&pool, &peer), None);
}

/// Told once, with what to change.
#[tokio::test]
async fn a_low_cap_is_complained_of_once_an_origin() {
    let logs = Logs::capture();
    let peer = capped(Scheme::Http, CAP);
    let pool = builder().build();
    for _ in 0..6 * CAP {
        is_reused(&pool, &peer).await;
    }
    let told = logs.above_debug();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("keepalive_requests"), "{told:?}");
    let changes = logs.debug();
    let changes: Vec<_> = changes
        .iter()
        .filter(|line| line.contains("profile changed: requests per connection"))
        .collect();
    assert_eq!(changes.len(), 1, "{changes:?}");
}
