//! Connections that wait: who closes them, when, and that nothing of them stays (RFC 9112 section 9.5).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use futures_util::future::join_all;
use idempool::{CloseReason, Pool};
use tokio::runtime::Handle;

use crate::support::{
    BOTH, Conn, Ended, Gate, HeldClock, Logs, Peer, Scheme, builder, eventually, fetch, get,
    hold_runtime_until, on_both_runtimes, pool, post, read,
};

/// Whatever happened: every connection that was opened is open or counted as closed.
async fn assert_every_connection_is_accounted_for(pool: &Pool) {
    eventually("opened = closed + idle + busy", || {
        let stats = pool.stats();
        stats.connections_opened == stats.closes.total() + stats.idle + stats.busy
    })
    .await;
}

/// hyperium/hyper#2420, seanmonstar/reqwest#1162: hosts contacted once kept their descriptors for ever.
#[test]
fn idle_connections_close_after_their_time_without_any_further_call() {
    on_both_runtimes(|| async {
        let peers: Vec<_> = (0..20).map(|n| Peer::well_behaved(BOTH[n % 2])).collect();
        let pool = builder().idle_timeout(Duration::from_millis(150)).build();
        for peer in &peers {
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        }
        eventually("each server sees an end", || {
            peers.iter().all(|peer| peer.ended().len() == 1)
        })
        .await;
        for peer in &peers {
            assert_eq!(peer.ended(), [(0, Ended::Properly)]);
        }
        assert_every_connection_is_accounted_for(&pool).await;
        let stats = pool.stats();
        assert_eq!((stats.idle, stats.busy), (0, 0));
        assert_eq!(stats.closes.get(CloseReason::IdleTimeout), 20);
        assert_eq!(stats.closes.total(), 20);
    });
}

/// curl/curl#4013: ages were compared in another unit than they were set in.
#[tokio::test]
async fn the_idle_time_counts_from_the_last_use() {
    let clock = HeldClock::start();
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder()
        .idle_timeout(Duration::from_secs(10))
        .connect_timeout(None)
        .build();
    for _ in 0..5 {
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        clock.advance(Duration::from_secs(9)).await;
        assert_eq!(pool.stats().idle, 1);
    }
    assert_eq!(peer.accepted(), 1);
    clock.advance(Duration::from_secs(2)).await;
    let stats = pool.stats();
    assert_eq!(
        (stats.idle, stats.closes.get(CloseReason::IdleTimeout)),
        (0, 1)
    );
}

/// A response may take longer than a connection may wait.
#[tokio::test]
async fn the_idle_time_does_not_run_during_an_exchange() {
    let clock = HeldClock::start();
    let head_is_read = Gate::new();
    let gate = head_is_read.clone();
    let peer = Peer::start(Scheme::Http, move |conn| {
        if conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl");
            gate.pass();
            conn.send("ow");
            conn.answer_requests(usize::MAX);
        }
    });
    let pool = builder()
        .idle_timeout(Duration::from_secs(10))
        .connect_timeout(None)
        .build();
    let response = pool.send(get(&peer.url("/"))).await.expect("a head");
    clock.advance(Duration::from_secs(60)).await;
    head_is_read.open();
    assert_eq!(read(response).await.expect("a body"), "slow");
    clock.advance(Duration::from_secs(9)).await;
    assert_eq!(
        fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
        "0"
    );
}

/// A peer that answers `/slow` in two halves with the gate between them.
fn halting(halfway: &Gate) -> Peer {
    let halfway = halfway.clone();
    Peer::start(Scheme::Https, move |conn| {
        while let Some(request) = conn.read_request() {
            if request.id() == "/slow" {
                conn.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl");
                halfway.pass();
                conn.send("ow");
            } else {
                conn.reply("quick");
            }
        }
    })
}

#[test]
fn dropping_the_last_pool_closes_what_is_idle_and_lets_a_response_finish() {
    on_both_runtimes(|| async {
        let halfway = Gate::new();
        let peer = halting(&halfway);
        let pool = pool();
        let slow = pool.send(get(&peer.url("/slow"))).await.expect("a head");
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        drop(pool);
        eventually("the idle one ends", || {
            peer.ended() == [(1, Ended::Properly)]
        })
        .await;
        halfway.open();
        assert_eq!(read(slow).await.expect("a body"), "slow");
        eventually("the other one ends", || {
            peer.ended() == [(1, Ended::Properly), (0, Ended::Properly)]
        })
        .await;
    });
}

#[tokio::test]
async fn a_clone_keeps_the_connections_of_a_dropped_pool() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    let clone = pool.clone();
    drop(pool);
    fetch(&clone, get(&peer.url("/")))
        .await
        .expect("a response");
    assert_eq!(peer.accepted(), 1);
    assert_eq!(clone.stats().closes.total(), 0);
}

/// hyperium/hyper#4100: a reaper spun for ever on an empty pool.
#[test]
fn a_pool_without_connections_has_no_task_and_no_timer() {
    on_both_runtimes(|| async {
        let tasks = Handle::current().metrics();
        let before = tasks.num_alive_tasks();
        let pool = builder().idle_timeout(Duration::from_millis(50)).build();
        assert_eq!(tasks.num_alive_tasks(), before);
        let peer = Peer::well_behaved(Scheme::Http);
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        eventually("the connection and its task are gone", || {
            pool.stats().idle == 0 && tasks.num_alive_tasks() == before
        })
        .await;
    });
}

type Farewell = fn(&mut Conn);

/// A peer whose first connection is ended like this once the gate is open, and whose others behave.
fn first_ends(scheme: Scheme, gate: &Gate, end: Farewell) -> Peer {
    let gate = gate.clone();
    Peer::start(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.answer_requests(1) {
            gate.pass();
            end(conn);
        }
    })
}

/// RFC 9112 section 9.5: "SHOULD watch for and respond to" the other side's close.
#[test]
fn a_close_by_the_server_while_idle_is_seen_and_answered_at_once() {
    let ends: [(Scheme, Farewell); 3] = [
        (Scheme::Http, |conn| {
            conn.fin();
            conn.await_end();
        }),
        (Scheme::Https, |conn| {
            conn.close_notify();
            conn.fin();
            conn.await_end();
        }),
        // Without close_notify: impolite, and a close all the same.
        (Scheme::Https, |conn| {
            conn.fin();
            conn.await_end();
        }),
    ];
    on_both_runtimes(move || async move {
        for (scheme, end) in ends {
            let idle = Gate::new();
            let peer = first_ends(scheme, &idle, end);
            let pool = pool();
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
            assert_eq!(pool.stats().idle, 1);
            idle.open();
            eventually("we close too", || peer.ended() == [(0, Ended::Properly)]).await;
            eventually("it is counted", || {
                pool.stats().closes.get(CloseReason::PeerClosedIdle) == 1
            })
            .await;
            let stats = pool.stats();
            assert_eq!((stats.idle, stats.closed_while_idle), (0, 1), "{scheme}");
            assert_eq!(stats.stale_caught_by_probe, 0, "{scheme}");
            assert_every_connection_is_accounted_for(&pool).await;
        }
    });
}

/// nodejs/node#3595: a reset on an idle socket took the process down.
#[tokio::test]
async fn a_reset_while_idle_is_a_close_like_any_other() {
    let logs = Logs::capture();
    for scheme in BOTH {
        let idle = Gate::new();
        let peer = first_ends(scheme, &idle, Conn::rst);
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        idle.open();
        eventually("it is counted", || {
            pool.stats().closes.get(CloseReason::PeerResetIdle) == 1
        })
        .await;
        let answer = fetch(&pool, post(&peer.url("/pay"), "x")).await;
        assert_eq!(answer.expect("a response"), "1", "{scheme}");
        assert_eq!(peer.effects("/pay"), 1, "{scheme}");
        assert_eq!(pool.stats().closed_while_idle, 1, "{scheme}");
        assert_every_connection_is_accounted_for(&pool).await;
    }
    assert_eq!(logs.above_debug(), [""; 0]);
    assert!(!logs.debug().is_empty(), "the capture works");
}

/// smg-project/smg#2162: the server closes all that is idle, then comes a burst of POSTs.
async fn assert_burst_survives(scheme: Scheme, has_noticed: bool) {
    const BURST: usize = 64;
    let (idle, ended) = (Gate::new(), Arc::new(AtomicUsize::new(0)));
    let (gate, count) = (idle.clone(), Arc::clone(&ended));
    let peer = Peer::start(scheme, move |conn| {
        if conn.index >= BURST {
            conn.answer_requests(usize::MAX);
        } else if conn.answer_requests(1) {
            gate.pass();
            conn.close_notify();
            conn.fin();
            count.fetch_add(1, SeqCst);
            conn.await_end();
        }
    });
    let pool = pool();
    let heads = join_all((0..BURST).map(|_| pool.send(get(&peer.url("/"))))).await;
    for head in heads {
        read(head.expect("a head")).await.expect("a body");
    }
    assert_eq!(pool.stats().idle, BURST as u64);
    assert_eq!(peer.most_open(), BURST);
    idle.open();
    if has_noticed {
        eventually("all leave the pool", || pool.stats().idle == 0).await;
    } else {
        hold_runtime_until("all are closed", || ended.load(SeqCst) == BURST);
    }
    let targets: Vec<_> = (0..BURST).map(|n| format!("/pay/{n}")).collect();
    let calls = targets
        .iter()
        .map(|target| fetch(&pool, post(&peer.url(target), "amount=10")));
    for answer in join_all(calls).await {
        answer.expect("a response");
    }
    for target in &targets {
        assert_eq!(peer.effects(target), 1, "{target}");
    }
    // Once the first was caught the payments trust none of the others: these make room, or their tasks find them
    // closed.
    eventually("each is noticed", || {
        let stats = pool.stats();
        let made_room = stats.closes.get(CloseReason::MadeRoom);
        stats.stale_caught_by_probe + stats.closed_while_idle + made_room == BURST as u64
    })
    .await;
    let stats = pool.stats();
    assert_eq!((stats.requests_failed, stats.stale_after_write), (0, 0));
    assert_every_connection_is_accounted_for(&pool).await;
}

#[tokio::test]
async fn a_burst_after_the_server_closed_all_that_was_idle_meets_no_error() {
    assert_burst_survives(Scheme::Http, true).await;
    assert_burst_survives(Scheme::Https, true).await;
}

/// The closes have arrived, and no task has had its turn to see them: the checkout does.
#[tokio::test]
async fn a_burst_before_anybody_saw_the_closes_meets_no_error() {
    assert_burst_survives(Scheme::Http, false).await;
    assert_burst_survives(Scheme::Https, false).await;
}

/// A peer that closes behind each answer although the answer promises to go on.
fn closing_behind(scheme: Scheme, answer: &'static str) -> Peer {
    Peer::start(scheme, move |conn| {
        if conn.read_request().is_some() {
            conn.send(answer);
            conn.close_notify();
            conn.fin();
            conn.await_end();
        }
    })
}

/// aio-libs/aiohttp#3507 (204), tachyonmcp/tachyon#7 (403).
#[tokio::test]
async fn a_server_that_closes_behind_a_keep_alive_answer_costs_a_dial_and_no_error() {
    for scheme in BOTH {
        for answer in [
            "HTTP/1.1 204 No Content\r\nConnection: keep-alive\r\n\r\n",
            "HTTP/1.1 403 Forbidden\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nno",
        ] {
            let peer = closing_behind(scheme, answer);
            let pool = pool();
            for round in 1..=100 {
                fetch(&pool, get(&peer.url("/"))).await.expect("a response");
                // The next request does not race with the close: it has arrived.
                eventually("the close", || peer.ended().len() == round).await;
            }
            assert_eq!((peer.accepted(), peer.requests().len()), (100, 100));
            assert_every_connection_is_accounted_for(&pool).await;
            assert_eq!(pool.stats().requests_failed, 0);
        }
    }
}

/// hyperium/hyper#1389: every other connection stayed in CLOSE_WAIT.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_thousand_closes_by_the_server_leave_no_socket_behind() {
    let peer = closing_behind(
        Scheme::Http,
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    );
    let pool = pool();
    for round in 1..=1_000 {
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        eventually("the close", || peer.ended().len() == round).await;
    }
    eventually("all sockets are gone", || peer.client_sockets() == 0).await;
    assert_every_connection_is_accounted_for(&pool).await;
    let stats = pool.stats();
    assert_eq!(
        (stats.connections_opened, stats.closes.total()),
        (1_000, 1_000)
    );
    assert_eq!((stats.idle, stats.busy), (0, 0));
}

/// seanmonstar/reqwest#1148, hyperium/hyper#2892: a client in a static, used by one test after the other, panicked.
/// What ran the connections is gone; what they were promised to is not.
#[test]
fn a_pool_that_outlives_its_runtime_dials_anew_on_the_next() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    };
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        let pool = pool();
        for index in ["0", "1", "2"] {
            let runtime = runtime();
            let answer = runtime.block_on(fetch(&pool, post(&peer.url("/"), "x")));
            assert_eq!(answer.expect("a response"), index);
        }
        runtime().block_on(async {
            assert_eq!(
                fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
                "3"
            );
            assert_eq!(pool.stats().closes.get(CloseReason::RuntimeGone), 3);
            assert_eq!((pool.stats().idle, pool.stats().busy), (1, 0));
            assert_every_connection_is_accounted_for(&pool).await;
        });
    }
}

/// Every way in which an exchange can end, in one pool, at the same time.
#[test]
fn every_connection_is_accounted_for_once_all_is_settled() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::start(scheme, |conn| {
                while let Some(request) = conn.read_request() {
                    match request.id().as_str() {
                        "/close" => conn.reply_with("Connection: close\r\n", "ok"),
                        "/fin" => {
                            conn.reply("ok");
                            return conn.fin();
                        }
                        "/rst" => return conn.rst(),
                        "/short" => {
                            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok");
                            return conn.fin();
                        }
                        "/garbage" => conn.send("garbage\r\n\r\n"),
                        "/surplus" => {
                            conn.reply("ok");
                            conn.send("surplus");
                        }
                        _ => conn.reply("ok"),
                    }
                }
            });
            let pool = pool();
            let kinds = [
                "/", "/close", "/fin", "/rst", "/short", "/garbage", "/surplus", "/drop", "/",
            ];
            let one = |n: usize| {
                let (pool, kind) = (&pool, kinds[n % kinds.len()]);
                let request = get(&peer.url(kind));
                async move {
                    match pool.send(request).await {
                        Ok(response) if kind == "/drop" => drop(response),
                        Ok(response) => drop(read(response).await),
                        Err(_) => {}
                    }
                }
            };
            for _ in 0..5 {
                join_all((0..27).map(one)).await;
            }
            // A dial whose request another connection has served goes on by itself.
            eventually("all settle", || {
                let stats = pool.stats();
                stats.busy + stats.dialing == 0
            })
            .await;
            assert_every_connection_is_accounted_for(&pool).await;
            let stats = pool.stats();
            assert_eq!((stats.requests, stats.dialing), (135, 0), "{scheme}");
        }
    });
}
