//! Answers that come before the request is out, or just before the connection breaks.

use idempool::{CloseReason, Delivery, ErrorKind};

use crate::support::{
    BOTH, Conn, Gate, Peer, eventually, fetch, get, on_both_runtimes, pool, post, read,
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
