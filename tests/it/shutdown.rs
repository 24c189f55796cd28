//! The end of a pool: what closes at once, what may finish, what is cut, and who is told what.

use std::future::{Future, poll_fn};
use std::net::TcpListener;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::join_all;
use idempool::{
    CloseReason, Delivery, Error, ErrorKind, Phase, Pool, ReplayBody, Retry, RetryPolicy,
};
use tower::ServiceExt;

use crate::support::{
    BOTH, Ended, Gate, Peer, Scheme, builder, eventually, fetch, get, on_both_runtimes, pool, read,
    read_until_error,
};

/// A grace that no test waits for.
const AN_HOUR: Duration = Duration::from_secs(60 * 60);

/// A peer that answers `/slow` once the gate is open, and `/half` in two halves with the gate between them.
fn halting(scheme: Scheme, gate: &Gate) -> Peer {
    let gate = gate.clone();
    Peer::start(scheme, move |conn| {
        while let Some(request) = conn.read_request() {
            conn.apply(&request);
            match request.id().as_str() {
                "/slow" => {
                    gate.pass();
                    conn.reply("slow");
                }
                "/half" => {
                    conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nha");
                    gate.pass();
                    conn.send("lf");
                }
                id => conn.reply(id),
            }
        }
    })
}

fn spawn(pool: &Pool, url: &str) -> tokio::task::JoinHandle<Result<String, Error>> {
    let (pool, request) = (pool.clone(), get(url));
    tokio::spawn(async move { fetch(&pool, request).await })
}

fn spawn_close(pool: &Pool, grace: Duration) -> tokio::task::JoinHandle<()> {
    let pool = pool.clone();
    tokio::spawn(async move { pool.close(grace).await })
}

/// Waits until a close that was begun elsewhere has taken hold. No connection is taken by asking.
async fn is_closed(pool: &Pool) {
    loop {
        // Nobody listens there, so what the answer is does not depend on a server.
        match fetch(pool, get("http://127.0.0.1:1/")).await {
            Err(error) if error.kind() == ErrorKind::PoolClosed => return,
            _ => tokio::task::yield_now().await,
        }
    }
}

fn assert_turned_away(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::PoolClosed, "{error:?}");
    assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    assert!(error.connection().is_none(), "{error:?}");
}

/// line/armeria#5470, lysine-dev/okhttp#3372; envoyproxy/nighthawk#1558: idle connections were waited for, for
/// ever.
#[test]
fn closing_the_pool_ends_what_is_idle_at_once() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::well_behaved(scheme);
            let pool = pool();
            let fill = (0..3).map(|_| pool.send(get(&peer.url("/"))));
            for head in join_all(fill).await {
                read(head.expect("a head")).await.expect("a body");
            }
            let opened = pool.stats().connections_opened;
            pool.close(AN_HOUR).await;
            let stats = pool.stats();
            assert!(stats.origins.is_empty(), "{scheme}: {stats}");
            assert_eq!(stats.closes.get(CloseReason::PoolClosed), opened);
            assert_eq!(stats.closes.total(), opened, "{scheme}");
            // Over TLS that is: with a close_notify.
            let ended = peer.ended();
            assert_eq!(ended.len() as u64, opened, "{scheme}");
            let properly = ended.iter().all(|&(_, how)| how == Ended::Properly);
            assert!(properly, "{scheme}: {ended:?}");
        }
    });
}

/// Netflix/zuul#1483, lysine-dev/okhttp#4030; envoyproxy/nighthawk#1558: the end comes with the last exchange, not
/// with the grace.
#[test]
fn what_ends_within_the_grace_is_answered_and_the_close_ends_with_it() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let late = Gate::new();
            let peer = halting(scheme, &late);
            let pool = pool();
            let half = pool.send(get(&peer.url("/half"))).await.expect("a head");
            let slow = spawn(&pool, &peer.url("/slow"));
            eventually("both are under way", || peer.requests().len() == 2).await;
            let close = spawn_close(&pool, AN_HOUR);
            is_closed(&pool).await;
            assert_eq!(pool.stats().busy, 2, "{scheme}");
            assert!(!close.is_finished(), "{scheme}");
            late.open();
            assert_eq!(slow.await.unwrap().expect("a response"), "slow");
            // One body is still unread, and its connection open.
            assert!(!close.is_finished(), "{scheme}");
            assert_eq!(read(half).await.expect("a body"), "half");
            close.await.unwrap();
            let stats = pool.stats();
            assert!(stats.origins.is_empty(), "{scheme}: {stats}");
            assert_eq!(stats.closes.get(CloseReason::PoolClosed), 2, "{scheme}");
            let ended = peer.ended();
            assert_eq!(ended.len(), 2, "{scheme}");
            let properly = ended.iter().all(|&(_, how)| how == Ended::Properly);
            assert!(properly, "{scheme}: {ended:?}");
        }
    });
}

/// line/armeria#5470, lysine-dev/okhttp#3372, Netflix/zuul#1483: a server that does not come to an end holds up
/// nobody's.
#[test]
fn what_does_not_end_within_the_grace_is_cut_and_not_repeated() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let never = Gate::new();
            let peer = halting(scheme, &never);
            let pool = pool();
            let half = pool.send(get(&peer.url("/half"))).await.expect("a head");
            // Nothing but the end of the pool keeps the layer from sending it again.
            let client = Retry::new(pool.clone(), RetryPolicy::default());
            let request = http::Request::get(peer.url("/slow"));
            let request = request.body(ReplayBody::empty()).unwrap();
            let slow = tokio::spawn(client.oneshot(request));
            eventually("both are under way", || peer.requests().len() == 2).await;
            let half = tokio::spawn(read_until_error(half));
            pool.close(Duration::from_millis(20)).await;
            let error = slow.await.unwrap().expect_err("cut");
            assert_eq!(error.kind(), ErrorKind::PoolClosed, "{scheme}: {error:?}");
            assert_eq!(error.delivery(), Delivery::Unknown, "{scheme}: {error:?}");
            assert!(error.connection().is_some(), "{scheme}");
            let (bytes, error) = half.await.unwrap();
            let error = error.expect("cut");
            assert_eq!(error.kind(), ErrorKind::PoolClosed, "{scheme}: {error:?}");
            assert_eq!(error.phase(), Phase::ResponseBody, "{scheme}: {error:?}");
            assert_eq!(bytes, b"ha", "{scheme}");
            eventually("nothing is held", || pool.stats().origins.is_empty()).await;
            let stats = pool.stats();
            assert_eq!(stats.closes.get(CloseReason::PoolClosed), 2, "{scheme}");
            assert_eq!((stats.requests, stats.retries.total()), (2, 0), "{scheme}");
            never.open();
            eventually("the peer sees the ends", || peer.open() == 0).await;
            assert_eq!(peer.effects("/slow"), 1, "{scheme}");
        }
    });
}

/// line/armeria#5470, lysine-dev/okhttp#4030: what has not begun does not begin any more, for any handle.
#[test]
fn a_closed_pool_turns_away_who_waits_and_who_comes() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let late = Gate::new();
            let peer = halting(scheme, &late);
            let pool = builder().max_connections_per_origin(1).build();
            let earlier_clone = pool.clone();
            let busy = spawn(&pool, &peer.url("/slow"));
            eventually("it is under way", || peer.requests().len() == 1).await;
            let waits = spawn(&pool, &peer.url("/waits"));
            eventually("it waits", || pool.stats().waiting == 1).await;
            let close = spawn_close(&pool, AN_HOUR);
            // Although the connection that it waits for is still busy.
            assert_turned_away(&waits.await.unwrap().expect_err("closed"));
            for handle in [&pool, &earlier_clone, &pool.clone()] {
                let before = pool.stats().requests;
                let client = Retry::new(handle.clone(), RetryPolicy::default());
                let request = http::Request::get(peer.url("/comes"));
                let request = request.body(ReplayBody::empty()).unwrap();
                let error = client.oneshot(request).await.expect_err("closed");
                assert_turned_away(&error);
                assert_eq!(pool.stats().requests, before + 1, "{scheme}");
            }
            late.open();
            assert_eq!(busy.await.unwrap().expect("a response"), "slow");
            close.await.unwrap();
            assert_eq!(peer.requests().len(), 1, "{scheme}");
        }
    });
}

/// envoyproxy/nighthawk#1558: nothing that is being opened holds up the end either.
#[test]
fn closing_the_pool_gives_up_its_dials() {
    on_both_runtimes(|| async {
        // The kernel accepts for it, and nobody says a word.
        let mute = TcpListener::bind("127.0.0.1:0").expect("bind");
        let url = format!("https://localhost:{}/", mute.local_addr().unwrap().port());
        let pool = builder()
            .connect_timeout(None)
            .acquire_timeout(None)
            .build();
        let dials = spawn(&pool, &url);
        eventually("it dials", || pool.stats().dialing == 1).await;
        pool.close(AN_HOUR).await;
        assert_turned_away(&dials.await.unwrap().expect_err("closed"));
        assert!(pool.stats().origins.is_empty());
    });
}

#[tokio::test]
async fn dropping_the_close_cuts_nothing_and_opens_nothing_again() {
    for scheme in BOTH {
        let late = Gate::new();
        let peer = halting(scheme, &late);
        let pool = pool();
        let slow = spawn(&pool, &peer.url("/slow"));
        eventually("it is under way", || peer.requests().len() == 1).await;
        {
            let mut close = pin!(pool.close(Duration::from_millis(1)));
            poll_fn(|cx| {
                assert!(close.as_mut().poll(cx).is_pending());
                Poll::Ready(())
            })
            .await;
        }
        // The grace is over, and nobody is there to say so.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let error = fetch(&pool, get(&peer.url("/"))).await;
        assert_turned_away(&error.expect_err("closed"));
        late.open();
        assert_eq!(slow.await.unwrap().expect("a response"), "slow");
        eventually("it ends by itself", || pool.stats().origins.is_empty()).await;
        // A second close has nothing left to do.
        pool.close(AN_HOUR).await;
    }
}

/// seanmonstar/reqwest#1148, hyperium/hyper#2892: what ran the only connection is gone, and somebody in another
/// runtime waits for it.
#[test]
fn a_request_in_line_outlives_the_runtime_that_had_the_only_connection() {
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime")
    };
    for scheme in BOTH {
        // The first runtime's connection is busy, or being opened.
        for is_dial in [false, true] {
            let never = Gate::new();
            let peer = halting(scheme, &never);
            let mute = TcpListener::bind("127.0.0.1:0").expect("bind");
            let pool = builder().max_connections(1).build();
            let (first, second) = (runtime(), runtime());
            let url = match is_dial {
                false => peer.url("/slow"),
                true => format!("https://localhost:{}/", mute.local_addr().unwrap().port()),
            };
            let one = pool.clone();
            first.spawn(async move { fetch(&one, get(&url)).await });
            second.block_on(eventually("it has the seat", || {
                pool.stats().dialing == u64::from(is_dial)
                    && peer.requests().len() == usize::from(!is_dial)
            }));
            let (two, request) = (pool.clone(), get(&peer.url("/waits")));
            let waits = second.spawn(async move { fetch(&two, request).await });
            second.block_on(eventually("the other waits", || {
                pool.stats().waiting == 1 + u64::from(is_dial)
            }));
            drop(first);
            let body = second.block_on(waits).unwrap().expect("a response");
            assert_eq!(body, "/waits", "{scheme}, dial: {is_dial}");
            let stats = pool.stats();
            assert_eq!((stats.busy, stats.dialing, stats.waiting), (0, 0, 0));
            never.open();
        }
    }
}

/// hyperium/hyper#3948, hyperium/hyper#3993: pools made of parts have types that nobody can write down.
#[tokio::test]
async fn a_pool_has_a_type_that_can_be_named_in_a_struct() {
    #[derive(Clone, Debug)]
    struct App {
        client: Pool,
        retrying: Retry<Pool>,
    }
    let peer = Peer::well_behaved(Scheme::Http);
    let client = pool();
    let retrying = Retry::new(client.clone(), RetryPolicy::default());
    let app = App { client, retrying };
    let app = app.clone();
    fetch(&app.client, get(&peer.url("/")))
        .await
        .expect("a response");
    let request = http::Request::get(peer.url("/"));
    let request = request.body(ReplayBody::empty()).unwrap();
    let response = app.retrying.oneshot(request).await.expect("a response");
    assert_eq!(read(response).await.expect("a body"), "0");
}
