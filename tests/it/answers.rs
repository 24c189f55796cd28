//! Answers that come before the request is out, or just before the connection breaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use idempool::{CloseReason, Delivery, ErrorKind, Phase, Pool, ReplayBody, Retry, RetryPolicy};
use tower::ServiceExt;

use crate::support::{
    BOTH, Conn, Gate, Peer, Scheme, builder, eventually, fetch, get, on_both_runtimes, pool, post,
    read,
};

/// How a script ends its connection.
type End = fn(&mut Conn);

const TOO_LARGE: &str =
    "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 9\r\n\r\ntoo large";

/// RFC 9112 section 9.5; psf/requests#2422, lysine-dev/okhttp#1001: the caller gets the answer, not a
/// broken pipe, and the upload stops.
#[test]
fn an_early_answer_wins_over_the_write_that_fails_after_it() {
    on_both_runtimes(|| async {
        let ends: [(&str, End); 3] = [
            ("closes with the rest unread", Conn::close),
            ("resets", Conn::rst),
            ("half-closes and reads on", |conn| {
                conn.fin();
                conn.await_end();
            }),
        ];
        for scheme in BOTH {
            for reused in [false, true] {
                for (name, end) in ends {
                    let case = format!("{scheme}, reused {reused}, {name}");
                    let peer = Peer::start(scheme, move |conn| {
                        if conn.index > 0 || (reused && !conn.answer_requests(1)) {
                            conn.answer_requests(usize::MAX);
                            return;
                        }
                        conn.read_head();
                        conn.read_body_bytes(64 * 1024);
                        conn.send(TOO_LARGE);
                        end(conn);
                    });
                    let pool = pool();
                    if reused {
                        fetch(&pool, get(&peer.url("/warm")))
                            .await
                            .expect("a response");
                    }
                    let upload = post(&peer.url("/upload"), vec![b'x'; 10 << 20]);
                    let response = pool.send(upload).await;
                    let response = response.unwrap_or_else(|error| panic!("{case}: {error:?}"));
                    assert_eq!(response.status(), 413, "{case}");
                    assert_eq!(
                        read(response).await.expect("its body"),
                        "too large",
                        "{case}"
                    );
                    // The connection carried half a request: not for the next one.
                    fetch(&pool, get(&peer.url("/next")))
                        .await
                        .expect("a response");
                    assert_eq!(peer.accepted(), 2, "{case}");
                    eventually(&case, || pool.stats().closes.total() == 1).await;
                    assert_eq!(pool.stats().requests_failed, 0, "{case}");
                }
            }
        }
    });
}

/// Without an answer the broken write is a closed connection like any other.
#[tokio::test]
async fn a_write_that_fails_without_an_answer_is_a_closed_connection() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            conn.read_head();
            conn.close();
        });
        let pool = pool();
        let upload = post(&peer.url("/upload"), vec![b'x'; 10 << 20]);
        let error = pool.send(upload).await.expect_err("no answer");
        assert_eq!(error.kind(), ErrorKind::ConnectionClosed, "{scheme}");
        assert_eq!(error.delivery(), Delivery::Unknown, "{scheme}");
        assert!(error.bytes_taken() > 0 && !error.response_started());
        eventually("closed", || {
            pool.stats().closes.get(CloseReason::ExchangeFailed) == 1
        })
        .await;
    }
}

/// An answer that lies in the receive buffer when the reset comes is read before the reset is.
#[tokio::test]
async fn an_answer_that_arrived_before_the_reset_is_delivered() {
    for scheme in BOTH {
        let (sent, done) = (Gate::new(), Gate::new());
        let gates = (sent.clone(), done.clone());
        let peer = Peer::start(scheme, move |conn| {
            if let Some(request) = conn.read_request() {
                conn.apply(&request);
                conn.reply("paid");
                conn.rst();
                gates.0.open();
                gates.1.pass();
            }
        });
        let pool = pool();
        let pay = pool.send(post(&peer.url("/pay"), "amount=10"));
        tokio::pin!(pay);
        // One poll sends it (after the dial); then the runtime sleeps until both have arrived.
        let first = tokio::select! {
            biased;
            result = &mut pay => Some(result),
            () = eventually("the answer is out", || sent.is_open()) => None,
        };
        let result = match first {
            Some(result) => result,
            None => pay.await,
        };
        done.open();
        let response = result.expect("it was answered");
        assert_eq!(read(response).await.expect("its body"), "paid", "{scheme}");
        assert_eq!(peer.effects("/pay"), 1);
    }
}

/// A body that tells whether anybody has asked for it.
fn watched(text: &'static str) -> (ReplayBody, Arc<AtomicBool>) {
    let asked = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&asked);
    let frames = futures_util::stream::once(async move {
        flag.store(true, SeqCst);
        Ok::<_, idempool::BoxError>(http_body::Frame::data(bytes::Bytes::from(text)))
    });
    (
        ReplayBody::once(http_body_util::StreamBody::new(frames)),
        asked,
    )
}

fn pay(peer: &Peer, body: ReplayBody) -> http::Request<ReplayBody> {
    http::Request::post(peer.url("/pay")).body(body).unwrap()
}

/// A pool that asks, and has one idle connection to the peer.
async fn asking(peer: &Peer, patience: Duration) -> Pool {
    let pool = builder().expect_continue(patience).build();
    fetch(&pool, get(&peer.url("/warm")))
        .await
        .expect("a response");
    pool
}

const LONG: Duration = Duration::from_secs(60);

/// RFC 9110 section 10.1.1.
#[tokio::test]
async fn a_server_that_says_continue_is_sent_the_body() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            conn.answer_requests(1);
            while let Some(request) = conn.read_request_after(|conn, head| {
                assert!(head.contains("expect: 100-continue\r\n"), "{head}");
                conn.send("HTTP/1.1 100 Continue\r\n\r\n");
            }) {
                conn.apply(&request);
                conn.reply("paid");
            }
        });
        let pool = asking(&peer, LONG).await;
        let (body, asked) = watched("amount=10");
        let response = pool.send(pay(&peer, body)).await.expect("a response");
        assert_eq!(read(response).await.expect("its body"), "paid");
        assert!(asked.load(SeqCst));
        assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1), "{scheme}");
    }
}

/// The server may not know the question: it is not waited for without end.
#[tokio::test]
async fn a_server_that_says_nothing_is_sent_the_body_in_the_end() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = asking(&peer, Duration::from_millis(20)).await;
    let (body, _) = watched("amount=10");
    pool.send(pay(&peer, body)).await.expect("a response");
    assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1));
}

/// The answer came without the body, so the body stays whole, and the connection is not for the next.
#[tokio::test]
async fn a_final_answer_instead_of_continue_leaves_the_body_untouched() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            if conn.answer_requests(1) && conn.read_head().is_some() {
                conn.send("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n");
                let (_, bytes) = conn.await_end();
                assert_eq!(bytes, 0, "a body that nobody asked for");
            }
        });
        let pool = asking(&peer, LONG).await;
        let (body, asked) = watched("amount=10");
        let response = pool.send(pay(&peer, body)).await.expect("a response");
        assert_eq!(response.status(), 401, "{scheme}");
        assert!(!asked.load(SeqCst), "{scheme}");
        eventually("closed", || pool.stats().closes.total() == 1).await;
        eventually("the script has seen it", || peer.open() == 0).await;
    }
}

/// RFC 9110 section 10.1.1: once more, without the expectation.
#[tokio::test]
async fn a_refused_expectation_is_dropped_and_the_request_sent_once() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            while let Some(head) = conn.read_head() {
                if head.contains("expect:") {
                    conn.send("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n");
                    conn.await_end();
                    return;
                }
                let request = conn.read_body_of(head).expect("a body");
                conn.apply(&request);
                conn.reply("paid");
            }
        });
        let pool = asking(&peer, LONG).await;
        let (body, _) = watched("amount=10");
        let response = pool.send(pay(&peer, body)).await.expect("a response");
        assert_eq!(read(response).await.expect("its body"), "paid", "{scheme}");
        assert_eq!(peer.effects("/pay"), 1);
        let sent = peer.requests().pop().expect("a request");
        assert_eq!(sent.body, b"amount=10");
        assert_eq!(sent.field("expect"), None);
    }
}

/// A 417 after the body was asked for and sent is an answer like any other.
#[tokio::test]
async fn a_417_behind_the_body_is_the_answer() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.answer_requests(1);
        let asked = |conn: &mut Conn, _: &str| conn.send("HTTP/1.1 100 Continue\r\n\r\n");
        while let Some(request) = conn.read_request_after(asked) {
            conn.apply(&request);
            conn.send("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let pool = asking(&peer, LONG).await;
    let (body, _) = watched("amount=10");
    let response = pool.send(pay(&peer, body)).await.expect("a response");
    assert_eq!(response.status(), 417);
    assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1));
}

/// snoyberg/http-client#114: a stale connection breaks before an unrepeatable body is spent.
#[tokio::test]
async fn a_stale_connection_breaks_before_the_body_and_the_body_can_go_again() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            if conn.index > 0 {
                conn.answer_requests(usize::MAX);
            } else if conn.answer_requests(1) && conn.read_head().is_some() {
                conn.close();
            }
        });
        let pool = asking(&peer, LONG).await;
        let (body, asked) = watched("amount=10");
        let error = pool.send(pay(&peer, body)).await.expect_err("it closed");
        assert_eq!(
            (error.delivery(), error.phase()),
            (Delivery::Unknown, Phase::Send)
        );
        assert!(!asked.load(SeqCst), "{scheme}");
        assert_eq!(peer.effects("/pay"), 0);

        // Whoever knows that the server acts on whole requests only can have it sent again.
        let peer = Peer::start(scheme, |conn| {
            if conn.index > 0 {
                conn.answer_requests(usize::MAX);
            } else if conn.answer_requests(1) && conn.read_head().is_some() {
                conn.close();
            }
        });
        let pool = asking(&peer, LONG).await;
        let policy = RetryPolicy::default().resend_incomplete(true);
        let client = Retry::new(pool.clone(), policy);
        let (body, _) = watched("amount=10");
        let response = client.oneshot(pay(&peer, body)).await.expect("a response");
        assert_eq!(response.status(), 200);
        assert_eq!((peer.accepted(), peer.effects("/pay")), (2, 1), "{scheme}");
    }
}

/// Who may be sent again anyway does not ask, nor who is on a fresh connection, nor who has no body.
#[tokio::test]
async fn only_who_gains_by_it_asks() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder().expect_continue(LONG).build();
    let url = peer.url("/");
    let mut put = post(&url, "x");
    *put.method_mut() = http::Method::PUT;
    let keyed = idempool::IdempotencyKey::random()
        .attach(post(&url, "x"))
        .unwrap();
    for request in [post(&url, "fresh"), get(&url), put, keyed, post(&url, "")] {
        fetch(&pool, request).await.expect("a response");
    }
    assert!(
        peer.requests()
            .iter()
            .all(|request| request.field("expect").is_none())
    );
    assert_eq!((peer.accepted(), peer.requests().len()), (1, 5));
}
