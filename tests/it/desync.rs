//! Bytes in the wrong place (RFC 9112 sections 6.3 and 9.2): no request gets what was not meant for it.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use idempool::{CloseReason, Delivery, Error, ErrorKind, Pool, ResponseBody};
use tokio::sync::mpsc;

use crate::support::{
    BOTH, Conn, Gate, Logs, Peer, Scheme, builder, eventually, fetch, get, hold_runtime_until,
    on_both_runtimes, pool, post, read,
};

const FORGED: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged";
const TIMEOUT_408: &str =
    "HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 4\r\n\r\nlate";

async fn closed_once_for(pool: &Pool, reason: CloseReason) {
    eventually(reason.as_str(), || pool.stats().closes.get(reason) == 1).await;
    assert_eq!(pool.stats().closes.total(), 1);
}

/// A peer whose first connection runs this after one request was read, and whose others behave.
fn first_answers(scheme: Scheme, answer: impl Fn(&mut Conn) + Send + Sync + 'static) -> Peer {
    Peer::start(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.read_request().is_some() {
            answer(conn);
        }
    })
}

/// RFC 9112 section 6.3, last paragraph; spring-projects/spring-boot#42058, jaseci-labs/jac#8119.
#[tokio::test]
async fn bytes_behind_a_response_in_the_same_segment_are_never_a_response() {
    for scheme in BOTH {
        for (real, body) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
            ("HTTP/1.1 204 No Content\r\n\r\n", ""),
            ("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "abc"),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
                "abc",
            ),
        ] {
            for surplus in [FORGED, "123", "\0"] {
                let row = format!("{scheme} {real:?} {surplus:?}");
                let peer = first_answers(scheme, move |conn| {
                    conn.send(format!("{real}{surplus}"));
                    conn.await_end();
                });
                let pool = pool();
                let first = fetch(&pool, get(&peer.url("/"))).await.expect(&row);
                assert_eq!(first, body, "{row}");
                let second = fetch(&pool, post(&peer.url("/pay"), "x")).await;
                assert_eq!(second.expect(&row), "1", "{row}");
                assert_eq!(peer.effects("/pay"), 1, "{row}");
                closed_once_for(&pool, CloseReason::UnexpectedBytes).await;
            }
        }
    }
}

/// RFC 9112 section 9.2: as above, in a segment of its own, once the connection is idle.
#[tokio::test]
async fn bytes_that_come_while_idle_are_never_a_response() {
    for scheme in BOTH {
        for surplus in [FORGED, TIMEOUT_408, "x"] {
            let response_is_read = Gate::new();
            let gate = response_is_read.clone();
            let peer = first_answers(scheme, move |conn| {
                conn.reply("real");
                gate.pass();
                conn.send(surplus);
                conn.await_end();
            });
            let pool = pool();
            let first = fetch(&pool, get(&peer.url("/"))).await;
            assert_eq!(first.expect("a response"), "real");
            response_is_read.open();
            closed_once_for(&pool, CloseReason::UnexpectedBytes).await;
            assert_eq!(pool.stats().idle, 0);
            let second = fetch(&pool, post(&peer.url("/pay"), "x")).await;
            assert_eq!(second.expect("a response"), "1");
            assert_eq!(peer.effects("/pay"), 1);
        }
    }
}

/// As above, where the checkout comes before the connection's task has read them.
#[tokio::test]
async fn bytes_that_nobody_has_read_yet_keep_a_request_off_the_connection() {
    for scheme in BOTH {
        let sent = Gate::new();
        let gate = sent.clone();
        let peer = first_answers(scheme, move |conn| {
            conn.reply("real");
            conn.send(FORGED);
            gate.open();
            conn.await_end();
        });
        let pool = pool();
        let response = pool.send(get(&peer.url("/"))).await.expect("a response");
        hold_runtime_until("bytes behind the response", || sent.is_open());
        assert_eq!(read(response).await.expect("a body"), "real");
        let second = fetch(&pool, post(&peer.url("/pay"), "x")).await;
        assert_eq!(second.expect("a response"), "1", "{scheme}");
        assert_eq!(peer.effects("/pay"), 1, "{scheme}");
        closed_once_for(&pool, CloseReason::UnexpectedBytes).await;
    }
}

/// RFC 9110 section 15.5.9; encode/httpx#145. derailed/k9s#234: it was printed over the user's terminal.
#[tokio::test]
async fn a_408_on_an_idle_connection_is_discarded_without_a_word() {
    let logs = Logs::capture();
    for scheme in BOTH {
        let response_is_read = Gate::new();
        let gate = response_is_read.clone();
        let peer = first_answers(scheme, move |conn| {
            conn.reply("real");
            gate.pass();
            conn.send(TIMEOUT_408);
            conn.close_notify();
            conn.fin();
            conn.await_end();
        });
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        response_is_read.open();
        closed_once_for(&pool, CloseReason::UnexpectedBytes).await;
        assert_eq!(pool.stats().closed_while_idle, 1);
        let second = fetch(&pool, post(&peer.url("/pay"), "x")).await;
        assert_eq!(second.expect("a response"), "1", "{scheme}");
        assert_eq!(peer.effects("/pay"), 1, "{scheme}");
        assert_eq!(pool.stats().requests_failed, 0, "{scheme}");
    }
    assert_eq!(logs.above_debug(), [""; 0]);
    assert!(!logs.debug().is_empty(), "the capture works");
}

/// Moves the call on only while every connection that the pool has begun to open was greeted by the peer, so
/// that the greeting is there before the request. Dials and connections have tasks of their own, which go on.
async fn send_after_greeting(
    pool: &Pool,
    greeted: &AtomicUsize,
    request: Request<Full<Bytes>>,
) -> Result<Response<ResponseBody>, Error> {
    let mut call = pin!(pool.send(request));
    loop {
        let stats = pool.stats();
        let begun = stats.connections_opened + stats.dialing;
        eventually("a greeting", || greeted.load(SeqCst) as u64 >= begun).await;
        tokio::task::yield_now().await;
        let poll = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
        if let Poll::Ready(result) = poll {
            return result;
        }
    }
}

/// RFC 9112 section 9.2, between connect and the first write: the request was never written there.
#[tokio::test]
async fn a_request_is_not_written_to_a_connection_that_spoke_first() {
    let greeted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&greeted);
    let peer = Peer::start(Scheme::Http, move |conn| {
        if conn.index == 0 {
            conn.send(TIMEOUT_408);
            count.fetch_add(1, SeqCst);
            assert_eq!(conn.await_end().1, 0, "bytes of the request");
        } else {
            count.fetch_add(1, SeqCst);
            conn.answer_requests(usize::MAX);
        }
    });
    let pool = pool();
    let by_address = format!("http://{}/pay", peer.address());
    let response = send_after_greeting(&pool, &greeted, post(&by_address, "amount=10")).await;
    assert_eq!(
        read(response.expect("a response")).await.expect("a body"),
        "1"
    );
    assert_eq!(peer.effects("/pay"), 1);
    let received = &peer.requests()[0];
    assert_eq!(
        (received.connection, &received.body[..]),
        (1, &b"amount=10"[..])
    );
    assert_eq!(pool.stats().handed_back, 1);
    closed_once_for(&pool, CloseReason::UnexpectedBytes).await;
}

/// As above, where every connection is like that: bounded, and safe to send again by hand.
#[tokio::test]
async fn a_server_that_always_speaks_first_is_not_dialled_for_ever() {
    let greeted = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&greeted);
    let peer = Peer::start(Scheme::Http, move |conn| {
        conn.send(TIMEOUT_408);
        count.fetch_add(1, SeqCst);
        assert_eq!(conn.await_end().1, 0, "bytes of the request");
    });
    let pool = pool();
    let by_address = format!("http://{}/pay", peer.address());
    let error = send_after_greeting(&pool, &greeted, post(&by_address, "amount=10"))
        .await
        .expect_err("no connection is any good");
    assert_eq!(error.delivery(), Delivery::NotSent);
    assert_eq!(error.kind(), ErrorKind::ConnectionClosed);
    assert_eq!((error.bytes_taken(), error.response_started()), (0, false));
    assert!(peer.accepted() <= 3, "{}", peer.accepted());
    let connections = pool.stats().connections_opened;
    eventually("all are closed for that", || {
        pool.stats().closes.get(CloseReason::UnexpectedBytes) == connections
    })
    .await;
}

/// jaseci-labs/jac#8119, the third case, and the closes that are like it: after the checkout has looked,
/// before the first byte is written.
#[tokio::test]
async fn what_arrives_between_checkout_and_first_write_keeps_the_request_off_the_connection() {
    type Story = (Scheme, fn(&mut Conn));
    let stories: [Story; 5] = [
        (Scheme::Http, |conn| conn.send(FORGED)),
        (Scheme::Http, Conn::fin),
        (Scheme::Http, Conn::rst),
        (Scheme::Https, Conn::fin),
        (Scheme::Https, Conn::rst),
    ];
    for (row, (scheme, happens)) in stories.into_iter().enumerate() {
        let (checked_out, happened) = (Gate::new(), Gate::new());
        let gates = (checked_out.clone(), happened.clone());
        let peer = first_answers(scheme, move |conn| {
            conn.reply("first");
            gates.0.pass();
            happens(conn);
            gates.1.open();
            assert_eq!(conn.await_end().1, 0, "bytes of the request");
        });
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        let mut call = pin!(pool.send(post(&peer.url("/pay"), "amount=10")));
        let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await;
        assert!(
            !polled,
            "row {row}: the request is handed to the connection's task"
        );
        assert_eq!((pool.stats().idle, pool.stats().busy), (0, 1), "row {row}");
        checked_out.open();
        hold_runtime_until("the server's move", || happened.is_open());
        let response = call.await.expect("a response");
        assert_eq!(read(response).await.expect("a body"), "1", "row {row}");
        assert_eq!(peer.effects("/pay"), 1, "row {row}");
        let received = peer.requests();
        assert_eq!(received[1].body, b"amount=10", "row {row}");
        assert_eq!(pool.stats().handed_back, 1, "row {row}");
        assert_eq!(pool.stats().requests_failed, 0, "row {row}");
        eventually("the first is closed", || pool.stats().closes.total() == 1).await;
    }
}

/// lysine-dev/okhttp#8472: the answer was there, was dropped as stale, and the request sent again.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_response_with_a_fin_behind_it_is_delivered_and_nothing_is_sent_again() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            if conn.answer_requests(1)
                && let Some(request) = conn.read_request()
            {
                conn.apply(&request);
                conn.send_with_fin("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npaid");
                conn.await_end();
            }
        });
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        let answer = fetch(&pool, post(&peer.url("/pay"), "amount=10")).await;
        assert_eq!(answer.expect("a response"), "paid", "{scheme}");
        assert_eq!(peer.effects("/pay"), 1, "{scheme}");
        assert_eq!((peer.accepted(), peer.requests().len()), (1, 2), "{scheme}");
    }
}

/// An upload that never ends by itself, and the hand that feeds it.
fn endless_upload() -> (
    mpsc::Sender<Bytes>,
    StreamBody<impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>,
) {
    let (feed, mut food) = mpsc::channel(1);
    let frames = futures_util::stream::poll_fn(move |cx| {
        food.poll_recv(cx)
            .map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    });
    (feed, StreamBody::new(frames))
}

/// A peer whose first connection answers a head and reads no body until it is told to.
fn answers_early(go_on: &Gate) -> Peer {
    let go_on = go_on.clone();
    Peer::start(Scheme::Http, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.read_head().is_some() {
            conn.reply("early");
            go_on.pass();
            conn.await_end();
        }
    })
}

/// RFC 9112 section 9.5: the framing of the unfinished request is still open.
#[tokio::test]
async fn a_connection_whose_upload_is_unfinished_carries_no_other_request() {
    let closed = Gate::new();
    let peer = answers_early(&closed);
    let pool = pool();
    let (feed, upload) = endless_upload();
    feed.send(Bytes::from_static(b"first")).await.expect("room");
    let request = Request::post(peer.url("/")).body(upload).unwrap();
    let response = pool.send(request).await.expect("a response");
    assert_eq!(read(response).await.expect("a body"), "early");
    assert_eq!(
        fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
        "1"
    );
    // The upload stops: nobody takes from it any more.
    feed.closed().await;
    closed_once_for(&pool, CloseReason::UploadUnfinished).await;
    closed.open();
    assert_eq!(peer.accepted(), 2);
}

/// As above, with all of the body handed over and more of it than the kernel takes.
#[tokio::test]
async fn a_connection_whose_upload_is_stuck_in_the_kernel_carries_no_other_request() {
    let closed = Gate::new();
    let peer = answers_early(&closed);
    let pool = pool();
    let request = post(&peer.url("/"), vec![0; 32 * 1024 * 1024]);
    let response = pool.send(request).await.expect("a response");
    assert_eq!(read(response).await.expect("a body"), "early");
    assert_eq!(
        fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
        "1"
    );
    closed_once_for(&pool, CloseReason::UploadUnfinished).await;
    closed.open();
    assert_eq!(peer.accepted(), 2);
}

/// lalinsky/dusty#114, apache/httpcomponents-client#371.
#[test]
fn a_small_rest_of_a_dropped_body_is_read_and_its_connection_kept() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let dropped = Gate::new();
            let gate = dropped.clone();
            let peer = Peer::start(scheme, move |conn| {
                if conn.read_request().is_some() {
                    conn.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n0123456789");
                    gate.pass();
                    conn.send("old bytes ".repeat(9));
                    conn.answer_requests(usize::MAX);
                }
            });
            // Time for a machine that is busy with other things.
            let pool = builder().drain(64 * 1024, Duration::from_secs(8)).build();
            drop(pool.send(get(&peer.url("/"))).await.expect("a response"));
            dropped.open();
            eventually("the connection is back", || pool.stats().idle == 1).await;
            assert_eq!(
                fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
                "0"
            );
            assert_eq!(peer.accepted(), 1, "{scheme}");
        }
    });
}

/// RFC 9112 section 9.3: read to the end or closed, so more than is worth reading closes.
#[tokio::test]
async fn a_large_rest_of_a_dropped_body_closes_its_connection() {
    let known = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n",
        10 * 1024 * 1024
    );
    let unknown = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
    for (head, piece) in [
        (known, "x".repeat(16 * 1024)),
        (unknown, format!("4000\r\n{}\r\n", "x".repeat(16 * 1024))),
    ] {
        let peer = first_answers(Scheme::Http, move |conn| {
            conn.send(&head);
            for _ in 0..64 {
                conn.send(&piece);
            }
            conn.await_end();
        });
        // It is the size that closes it.
        let time = Duration::from_secs(3600);
        let pool = builder().drain(64 * 1024, time).build();
        drop(pool.send(get(&peer.url("/"))).await.expect("a response"));
        let next = fetch(&pool, get(&peer.url("/"))).await;
        assert_eq!(next.expect("a response"), "1");
        closed_once_for(&pool, CloseReason::BodyDropped).await;
        assert_eq!((pool.stats().idle, pool.stats().busy), (1, 0));
    }
}

/// However little is left, it is not waited for long.
#[tokio::test]
async fn a_dropped_body_that_stalls_closes_its_connection() {
    let peer = first_answers(Scheme::Http, |conn| {
        conn.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n0123456789");
        conn.await_end();
    });
    let pool = builder()
        .drain(64 * 1024, Duration::from_millis(20))
        .build();
    drop(pool.send(get(&peer.url("/"))).await.expect("a response"));
    closed_once_for(&pool, CloseReason::BodyDropped).await;
    eventually("the server sees the end", || peer.ended().len() == 1).await;
    assert_eq!(
        fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
        "1"
    );
}

/// A drain of zero bytes means that nothing is read on.
#[tokio::test]
async fn with_draining_switched_off_a_dropped_body_closes_its_connection() {
    let peer = first_answers(Scheme::Http, |conn| {
        conn.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n0123456789");
        conn.await_end();
    });
    let pool = builder().drain(0, Duration::from_secs(8)).build();
    drop(pool.send(get(&peer.url("/"))).await.expect("a response"));
    closed_once_for(&pool, CloseReason::BodyDropped).await;
    assert_eq!(pool.stats().busy, 0);
}

/// A peer that answers each request with its target, twenty times over.
fn echoing(scheme: Scheme) -> Peer {
    Peer::start(scheme, |conn| {
        while let Some(request) = conn.read_request() {
            conn.reply(&request.id().repeat(20));
        }
    })
}

/// akka/akka-core#17403, scylladb/seastar#2759: the next request read what was left of the one before.
#[test]
fn a_request_after_a_dropped_body_gets_its_own_response() {
    on_both_runtimes(|| async {
        let peer = echoing(Scheme::Http);
        let pool = pool();
        for round in 0..200 {
            let target = format!("/{round}");
            let response = pool.send(get(&peer.url(&target))).await.expect("a head");
            if round % 2 == 0 {
                drop(response);
            } else {
                assert_eq!(read(response).await.expect("a body"), target.repeat(20));
            }
        }
    });
}

/// hyperium/hyper#1353.
#[test]
fn two_hundred_dropped_bodies_leak_nothing() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = echoing(scheme);
            let pool = pool();
            for round in 0..200 {
                let target = format!("/{round}");
                drop(pool.send(get(&peer.url(&target))).await.expect("a head"));
            }
            eventually("all settle", || pool.stats().busy == 0).await;
            let settled = || {
                let stats = pool.stats();
                stats.connections_opened == stats.closes.total() + stats.idle
                    && peer.open() as u64 == stats.idle
            };
            eventually("both sides agree on what is open", settled).await;
        }
    });
}

/// Where there is no runtime there is nobody to read on.
#[test]
fn a_body_dropped_outside_any_runtime_closes_its_connection() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("a runtime");
    let peer = first_answers(Scheme::Http, |conn| {
        conn.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n0123456789");
        conn.await_end();
    });
    let pool = pool();
    let response = runtime.block_on(pool.send(get(&peer.url("/"))));
    let response = response.expect("a head");
    let dropping = std::thread::spawn(move || drop(response));
    dropping.join().expect("no panic");
    assert_eq!(pool.stats().busy, 0);
    runtime.block_on(async {
        closed_once_for(&pool, CloseReason::BodyDropped).await;
        assert_eq!(
            fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
            "1"
        );
    });
}
