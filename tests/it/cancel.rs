//! Futures dropped at every await, and what the pool looks like afterwards.

use std::time::Duration;

use http_body_util::BodyExt;
use idempool::{CloseReason, Pool};

use crate::support::{
    BOTH, Gate, Peer, Scheme, drop_after, eventually, fetch, get, on_both_runtimes, pool, post,
    read,
};

/// Nothing is held, and every connection ever opened is idle or counted as closed.
async fn settled(pool: &Pool, case: &str) {
    eventually(case, || {
        let stats = pool.stats();
        let accounted = stats.closes.total() + stats.idle;
        (stats.busy, stats.dialing) == (0, 0) && stats.connections_opened == accounted
    })
    .await;
}

/// Connect, handshake, write, head and body: each wait of a whole exchange, on a fresh and on a reused
/// connection, with a small and with a large body.
#[test]
fn an_exchange_dropped_at_any_await_leaves_the_pool_exact() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            for (reused, size) in [(false, 0), (true, 0), (false, 1 << 20), (true, 1 << 20)] {
                let peer = Peer::start(scheme, |conn| {
                    while let Some(request) = conn.read_request() {
                        conn.apply(&request);
                        conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
                        conn.send("1\r\na\r\n");
                        conn.send("1\r\nb\r\n0\r\n\r\n");
                    }
                });
                let pool = pool();
                let mut waits = 0;
                for polls in 1..200 {
                    if reused {
                        let body = fetch(&pool, get(&peer.url("/warm")))
                            .await
                            .expect("a response");
                        assert_eq!(body, "ab");
                    }
                    let url = peer.url(&format!("/drop-{polls}"));
                    let request = post(&url, vec![b'x'; size]);
                    let exchange = async { read(pool.send(request).await.expect("sent")).await };
                    let ended = drop_after(polls, exchange).await.is_some();
                    settled(
                        &pool,
                        &format!("{scheme} reused {reused} size {size} poll {polls}"),
                    )
                    .await;
                    assert!(peer.effects(&format!("/drop-{polls}")) <= 1);
                    if ended {
                        waits = polls;
                        break;
                    }
                }
                assert!(waits > 0, "the exchange never ended");
                assert_eq!(
                    fetch(&pool, get(&peer.url("/after")))
                        .await
                        .expect("a response"),
                    "ab"
                );
            }
        }
    });
}

/// The probe of a TLS connection waits for the connection's task: that wait can be dropped too.
#[tokio::test]
async fn a_checkout_dropped_in_its_probe_leaves_the_pool_exact() {
    for polls in 1..4 {
        let (now, done) = (Gate::new(), Gate::new());
        let gates = (now.clone(), done.clone());
        let peer = Peer::start(Scheme::Https, move |conn| {
            conn.answer_requests(1);
            if conn.index == 0 {
                gates.0.pass();
                conn.send_key_update();
                gates.1.open();
            }
            conn.answer_requests(usize::MAX);
        });
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        now.open();
        done.pass();
        drop_after(polls, pool.send(get(&peer.url("/dropped")))).await;
        settled(&pool, "the dropped checkout").await;
        fetch(&pool, get(&peer.url("/after")))
            .await
            .expect("a response");
    }
}

/// RFC 9112 has no way to take a request back, so its connection closes; no other one does.
#[tokio::test]
async fn a_dropped_request_closes_its_connection_and_nothing_else() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            while let Some(request) = conn.read_request() {
                if request.id() == "/silent" {
                    conn.await_end();
                    return;
                }
                let index = conn.index.to_string();
                conn.reply(&index);
            }
        });
        let pool = pool();
        let first = pool.send(get(&peer.url("/a"))).await.expect("a response");
        let second = pool.send(get(&peer.url("/b"))).await.expect("a response");
        read(first).await.expect("a body");
        read(second).await.expect("a body"); // connection 1 came back last
        let silent = tokio::spawn({
            let (pool, url) = (pool.clone(), peer.url("/silent"));
            async move { pool.send(get(&url)).await }
        });
        eventually("the request is read", || peer.requests().len() == 3).await;
        silent.abort();
        eventually("its connection closes", || {
            peer.ended().iter().any(|&(index, _)| index == 1)
        })
        .await;
        eventually("and is counted", || {
            pool.stats().closes.get(CloseReason::RequestDropped) == 1
        })
        .await;
        assert_eq!(
            fetch(&pool, get(&peer.url("/c")))
                .await
                .expect("a response"),
            "0"
        );
        assert_eq!((peer.accepted(), pool.stats().idle), (2, 1), "{scheme}");
    }
}

/// aio-libs/aiohttp#7864, ledgetech/lua-resty-http#138, KodeBarinn/kode-bridge#27: after a timeout, somebody else's
/// answer.
#[tokio::test]
async fn a_late_answer_never_reaches_the_next_request() {
    let late = Gate::new();
    let gate = late.clone();
    let peer = Peer::start(Scheme::Http, move |conn| {
        while let Some(request) = conn.read_request() {
            if request.id() == "/slow" {
                gate.pass();
            }
            conn.reply(&request.id());
        }
    });
    let pool = pool();
    fetch(&pool, get(&peer.url("/warm")))
        .await
        .expect("a response");
    let limit = Duration::from_millis(20);
    tokio::time::timeout(limit, pool.send(get(&peer.url("/slow"))))
        .await
        .expect_err("slow");
    late.open();
    for path in ["/one", "/two"] {
        assert_eq!(
            fetch(&pool, get(&peer.url(path)))
                .await
                .expect("a response"),
            path
        );
    }
    assert_eq!(peer.accepted(), 2);
}

/// aio-libs/aiohttp#7864: a storm of echoes with limits of every length; whoever gets an answer gets his own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_random_cancels_every_answer_is_the_callers_own() {
    let peer = Peer::start(Scheme::Http, |conn| {
        while let Some(request) = conn.read_request() {
            conn.apply(&request);
            let body = String::from_utf8(request.body).expect("text");
            conn.reply(&body);
        }
    });
    let pool = pool();
    let mut tasks = tokio::task::JoinSet::new();
    for seed in 0..8u64 {
        let (pool, url) = (pool.clone(), peer.url("/"));
        tasks.spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut answered = 0;
            for round in 0..120 {
                let id = format!("{seed}-{round}-{}", "x".repeat(random.usize(0..4096)));
                let mut request = post(&url, id.clone());
                request
                    .headers_mut()
                    .insert("x-id", format!("{seed}-{round}").parse().unwrap());
                let limit = Duration::from_micros(random.u64(1..1500));
                let exchange = async { fetch(&pool, request).await };
                if let Ok(result) = tokio::time::timeout(limit, exchange).await {
                    assert_eq!(result.expect("a response"), id);
                    answered += 1;
                }
            }
            answered
        });
    }
    let answered: Vec<i32> = tasks.join_all().await;
    assert!(
        answered.iter().sum::<i32>() > 0,
        "no request was fast enough to say anything"
    );
    settled(&pool, "after the storm").await;
    for id in peer.requests().iter().map(crate::support::Received::id) {
        assert!(peer.effects(&id) <= 1, "{id} took effect twice");
    }
    assert_eq!(
        fetch(&pool, post(&peer.url("/"), "last"))
            .await
            .expect("a response"),
        "last"
    );
}

/// A body dropped in its middle, too long to be worth reading on.
#[tokio::test]
async fn a_body_dropped_early_never_leaks_into_the_next_response() {
    let peer = Peer::start(Scheme::Http, |conn| {
        while let Some(request) = conn.read_request() {
            if request.id() == "/large" {
                conn.reply(&"old".repeat(400_000));
            } else {
                conn.reply("new");
            }
        }
    });
    let pool = pool();
    let response = pool
        .send(get(&peer.url("/large")))
        .await
        .expect("a response");
    let mut body = response.into_body();
    body.frame().await.expect("a frame").expect("data");
    drop(body);
    assert_eq!(
        fetch(&pool, get(&peer.url("/next")))
            .await
            .expect("a response"),
        "new"
    );
    eventually("counted", || {
        pool.stats().closes.get(CloseReason::BodyDropped) == 1
    })
    .await;
    assert_eq!(peer.accepted(), 2);
}

/// A peer that does not read must not keep what was given up: hyper would flush for ever.
#[tokio::test]
async fn a_dropped_upload_closes_its_connection_although_the_peer_does_not_read() {
    for scheme in BOTH {
        let leave = Gate::new();
        let gate = leave.clone();
        let peer = Peer::start(scheme, move |conn| {
            conn.read_head();
            gate.pass();
        });
        let pool = pool();
        let upload = pool.send(post(&peer.url("/upload"), vec![b'x'; 8 << 20]));
        let limit = Duration::from_millis(50);
        tokio::time::timeout(limit, upload)
            .await
            .expect_err("nobody reads");
        settled(&pool, "closed while the peer still holds its socket").await;
        assert_eq!(pool.stats().closes.get(CloseReason::RequestDropped), 1);
        leave.open();
    }
}

/// The same after an early answer that ends the connection.
#[tokio::test]
async fn an_upload_behind_a_final_answer_does_not_keep_its_connection() {
    let leave = Gate::new();
    let gate = leave.clone();
    let peer = Peer::start(Scheme::Http, move |conn| {
        conn.read_head();
        conn.reply_with("Connection: close\r\n", "");
        gate.pass();
    });
    let pool = pool();
    let upload = post(&peer.url("/upload"), vec![b'x'; 8 << 20]);
    let response = pool.send(upload).await.expect("an early answer");
    assert_eq!(response.status(), 200);
    settled(&pool, "closed while the peer still holds its socket").await;
    leave.open();
}
