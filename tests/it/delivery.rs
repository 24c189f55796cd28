//! What is known of a request whose connection broke: the kernel's evidence, over real sockets.
//!
//! A close can only cross a request where there is distance. On one machine the peer makes its own: its
//! kernel loses what the client sends (so nothing is acknowledged), the peer closes, and the client's
//! retransmission then finds nobody, just as a request does that was on its way when the close was sent.
#![cfg(target_os = "linux")]

use std::time::Duration;

use idempool::{
    Delivery, Error, ErrorKind, IdempotencyKey, PeerEnd, Pool, Refusal, ReplayBody, Retry,
    RetryPolicy, RetryReason, TreatAsIdempotent,
};
use tower::ServiceExt;

use crate::support::{BOTH, Conn, Gate, Peer, Scheme, fetch, get, pool};

/// How a script goes on once the request is on its way and lost.
type Then = fn(&mut Conn);

/// What a full close looks like; over TLS with a close_notify first.
fn closes(conn: &mut Conn) {
    conn.hear_again();
    conn.close_notify();
    conn.close();
}

fn closes_rudely(conn: &mut Conn) {
    conn.hear_again();
    conn.close();
}

/// The first connection answers once, then loses the next request and goes on as told, 100 ms later; the
/// others behave.
fn crossing(scheme: Scheme, then: Then) -> (Peer, Gate) {
    let deaf = Gate::new();
    let gate = deaf.clone();
    let peer = Peer::start(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.answer_requests(1) {
            conn.lose_what_comes();
            gate.open();
            // Nobody can tell the script that the request is out, since it must not see it. The client
            // sends at once when the gate opens; its retransmission comes 200 ms later, and again after.
            std::thread::sleep(Duration::from_millis(100));
            then(conn);
        }
    });
    (peer, deaf)
}

async fn send(
    pool: &Pool,
    gate: &Gate,
    policy: RetryPolicy,
    request: http::Request<ReplayBody>,
) -> Result<u16, Error> {
    crate::support::eventually("the peer is deaf", || gate.is_open()).await;
    let client = Retry::new(pool.clone(), policy);
    Ok(client.oneshot(request).await?.status().as_u16())
}

fn pay(peer: &Peer, size: usize) -> http::Request<ReplayBody> {
    let body = ReplayBody::from("x".repeat(size));
    http::Request::post(peer.url("/pay")).body(body).unwrap()
}

/// Linux's FIN carries an acknowledgement: it left before a byte of the request had come.
#[tokio::test]
async fn a_close_that_crosses_the_request_is_not_received() {
    for scheme in BOTH {
        for (name, then) in [("polite", closes as Then), ("rude", closes_rudely)] {
            for size in [10, 1 << 20] {
                let case = format!("{scheme} {name} {size}");
                let (peer, deaf) = crossing(scheme, then);
                let pool = pool();
                fetch(&pool, get(&peer.url("/warm")))
                    .await
                    .expect("a response");
                let error = send(&pool, &deaf, RetryPolicy::default(), pay(&peer, size))
                    .await
                    .expect_err("told to the caller");
                assert_eq!(error.delivery(), Delivery::NotReceived, "{case}: {error:?}");
                assert_eq!(error.kind(), ErrorKind::ConnectionClosed, "{case}");
                assert_eq!(error.bytes_acked(), Some(0), "{case}");
                assert_eq!(error.peer_end(), Some(PeerEnd::Fin), "{case}");
                assert!(
                    error.bytes_taken() > 0 && error.is_reused() == Some(true),
                    "{case}"
                );
                // Strong, but no proof: the caller has not opted in.
                assert!(error.may_have_been_processed(), "{case}");
                assert_eq!(
                    error.refusal(),
                    Some(Refusal::MethodNotIdempotent),
                    "{case}"
                );
                assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 0), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn whoever_trusts_the_evidence_has_the_request_sent_again() {
    for scheme in BOTH {
        for size in [10, 1 << 20] {
            let (peer, deaf) = crossing(scheme, closes);
            let pool = pool();
            fetch(&pool, get(&peer.url("/warm")))
                .await
                .expect("a response");
            let policy = RetryPolicy::default().resend_not_received(true);
            let status = send(&pool, &deaf, policy, pay(&peer, size))
                .await
                .expect("an answer");
            assert_eq!(status, 200, "{scheme} {size}");
            assert_eq!(
                (peer.accepted(), peer.effects("/pay")),
                (2, 1),
                "{scheme} {size}"
            );
            assert_eq!(pool.stats().retries.get(RetryReason::NotReceived), 1);
        }
    }
}

/// Who may be sent again anyway is, and costs no look at the kernel's counts.
#[tokio::test]
async fn what_is_safe_to_send_again_does_not_ask_the_kernel() {
    let get = |peer: &Peer| {
        http::Request::get(peer.url("/pay"))
            .body(ReplayBody::empty())
            .unwrap()
    };
    let keyed = |peer: &Peer| IdempotencyKey::random().attach(pay(peer, 10)).unwrap();
    let marked = |peer: &Peer| {
        let mut request = pay(peer, 10);
        request.extensions_mut().insert(TreatAsIdempotent);
        request
    };
    type Make<'a> = &'a dyn Fn(&Peer) -> http::Request<ReplayBody>;
    let requests: [Make<'_>; 3] = [&get, &keyed, &marked];
    for request in requests {
        let (peer, deaf) = crossing(Scheme::Http, closes);
        let pool = pool();
        fetch(&pool, crate::support::get(&peer.url("/warm")))
            .await
            .expect("a response");
        let status = send(&pool, &deaf, RetryPolicy::default(), request(&peer)).await;
        assert_eq!(status.expect("an answer"), 200);
        assert_eq!(peer.effects("/pay"), 1);

        let (peer, deaf) = crossing(Scheme::Http, closes);
        let pool = self::pool();
        fetch(&pool, crate::support::get(&peer.url("/warm")))
            .await
            .expect("a response");
        let error = send(&pool, &deaf, RetryPolicy::none(), request(&peer))
            .await
            .expect_err("once");
        assert_eq!(
            (error.delivery(), error.bytes_acked()),
            (Delivery::Unknown, None)
        );
    }
}

/// End of stream, reset, or nothing acknowledged: none of them alone is evidence.
#[tokio::test]
async fn whatever_else_happens_is_unknown() {
    let others: [(&str, Then); 4] = [
        ("resets", |conn| {
            conn.hear_again();
            conn.rst();
        }),
        ("half-closes, hears the retransmission, acts", |conn| {
            conn.fin();
            conn.hear_again();
            if let Some(request) = conn.read_request() {
                conn.apply(&request);
            }
            conn.await_end();
        }),
        ("half-closes and stays deaf", |conn| {
            conn.fin();
            std::thread::sleep(Duration::from_millis(1500));
            conn.close();
        }),
        ("hears the retransmission, acts, closes", |conn| {
            conn.hear_again();
            if let Some(request) = conn.read_request() {
                conn.apply(&request);
            }
            conn.close();
        }),
    ];
    for scheme in BOTH {
        for (name, then) in others {
            let (peer, deaf) = crossing(scheme, then);
            let pool = pool();
            fetch(&pool, get(&peer.url("/warm")))
                .await
                .expect("a response");
            let policy = RetryPolicy::default().resend_not_received(true);
            let error = send(&pool, &deaf, policy, pay(&peer, 10))
                .await
                .expect_err("no answer");
            assert_eq!(
                error.delivery(),
                Delivery::Unknown,
                "{scheme} {name}: {error:?}"
            );
            assert!(peer.effects("/pay") <= 1, "{scheme} {name}");
            assert_eq!(peer.accepted(), 1, "{scheme} {name}");
        }
    }
}
