//! What is known of a request whose connection broke: the kernel's evidence, over real sockets.
//!
//! A close can only cross a request where there is distance. On one machine the peer makes its own: its
//! kernel loses what the client sends (so nothing is acknowledged), the peer closes, and the client's
//! retransmission then finds nobody, just as a request does that was on its way when the close was sent.
#![cfg(target_os = "linux")]

use std::time::Duration;

use bytes::Bytes;
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
    conn.close_notify();
    conn.hear_again_and_close();
}

fn closes_rudely(conn: &mut Conn) {
    conn.hear_again_and_close();
}

/// A peer whose first connection answers once, then loses the next request and goes on as told once that
/// is out. Its other connections behave.
struct Crossing {
    peer: Peer,
    deaf: Gate,
    out: Gate,
    pool: Pool,
}

impl Crossing {
    /// With one idle connection.
    async fn start(scheme: Scheme, then: Then) -> Crossing {
        let (deaf, out) = (Gate::new(), Gate::new());
        let gates = (deaf.clone(), out.clone());
        let peer = Peer::start(scheme, move |conn| {
            if conn.index > 0 {
                conn.answer_requests(usize::MAX);
            } else if conn.answer_requests(1) {
                conn.lose_what_comes();
                gates.0.open();
                gates.1.pass();
                // The request's body was asked for, so its first write is next. It is sent again 200 ms
                // after that, and that must come behind what the script does now.
                std::thread::sleep(Duration::from_millis(50));
                then(conn);
            }
        });
        let pool = pool();
        fetch(&pool, get(&peer.url("/warm")))
            .await
            .expect("a response");
        crate::support::eventually("the peer is deaf", || deaf.is_open()).await;
        Crossing {
            peer,
            deaf,
            out,
            pool,
        }
    }

    /// A payment whose body tells when it is asked for.
    fn pay(&self, size: usize) -> http::Request<ReplayBody> {
        let out = self.out.clone();
        let body = ReplayBody::from_fn(move || {
            let out = out.clone();
            let frames = futures_util::stream::once(async move {
                out.open();
                Ok::<_, idempool::BoxError>(http_body::Frame::data(Bytes::from("x".repeat(size))))
            });
            http_body_util::StreamBody::new(frames)
        });
        http::Request::post(self.peer.url("/pay"))
            .body(body)
            .unwrap()
    }

    async fn send(
        &self,
        policy: RetryPolicy,
        request: http::Request<ReplayBody>,
    ) -> Result<u16, Error> {
        assert!(self.deaf.is_open());
        let client = Retry::new(self.pool.clone(), policy);
        Ok(client.oneshot(request).await?.status().as_u16())
    }
}

/// How often a crossing is arranged anew when the machine was too slow for it. That shows as a verdict of
/// `Unknown`, which is always allowed; what is more than that is never tried again.
const TRIES: usize = 5;

/// Linux's FIN carries an acknowledgement: it left before a byte of the request had come.
#[tokio::test]
async fn a_close_that_crosses_the_request_is_not_received() {
    for scheme in BOTH {
        for (name, then) in [("polite", closes as Then), ("rude", closes_rudely)] {
            for size in [10, 1 << 20] {
                let case = format!("{scheme} {name} {size}");
                let mut tries = 0;
                let (crossing, error) = loop {
                    let crossing = Crossing::start(scheme, then).await;
                    let sent = crossing.send(RetryPolicy::default(), crossing.pay(size));
                    let error = sent.await.expect_err("told to the caller");
                    tries += 1;
                    if error.delivery() != Delivery::Unknown || tries == TRIES {
                        break (crossing, error);
                    }
                };
                assert_eq!(error.delivery(), Delivery::NotReceived, "{case}: {error:?}");
                assert_eq!(error.kind(), ErrorKind::ConnectionClosed, "{case}");
                assert_eq!(error.bytes_acked(), Some(0), "{case}");
                assert_eq!(error.peer_end(), Some(PeerEnd::Fin), "{case}");
                assert!(error.bytes_taken() > 0, "{case}");
                assert_eq!(error.is_reused(), Some(true), "{case}");
                // Strong, but no proof: the caller has not opted in.
                assert!(error.may_have_been_processed(), "{case}");
                let refusal = error.refusal();
                assert_eq!(refusal, Some(Refusal::MethodNotIdempotent), "{case}");
                let peer = &crossing.peer;
                assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 0), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn whoever_trusts_the_evidence_has_the_request_sent_again() {
    for scheme in BOTH {
        for size in [10, 1 << 20] {
            let case = format!("{scheme} {size}");
            let policy = RetryPolicy::default().resend_not_received(true);
            let mut tries = 0;
            let (crossing, outcome) = loop {
                let crossing = Crossing::start(scheme, closes).await;
                let outcome = crossing.send(policy.clone(), crossing.pay(size)).await;
                assert!(crossing.peer.effects("/pay") <= 1, "{case}");
                tries += 1;
                if outcome.is_ok() || tries == TRIES {
                    break (crossing, outcome);
                }
            };
            assert_eq!(outcome.expect("an answer"), 200, "{case}");
            let peer = &crossing.peer;
            assert_eq!((peer.accepted(), peer.effects("/pay")), (2, 1), "{case}");
            let retries = crossing.pool.stats().retries;
            assert_eq!(retries.get(RetryReason::NotReceived), 1, "{case}");
        }
    }
}

/// Who may be sent again anyway is, and costs no look at the kernel's counts.
#[tokio::test]
async fn what_is_safe_to_send_again_does_not_ask_the_kernel() {
    let put = |crossing: &Crossing| {
        let mut request = crossing.pay(10);
        *request.method_mut() = http::Method::PUT;
        request
    };
    let keyed = |crossing: &Crossing| IdempotencyKey::random().attach(crossing.pay(10)).unwrap();
    let marked = |crossing: &Crossing| {
        let mut request = crossing.pay(10);
        request.extensions_mut().insert(TreatAsIdempotent);
        request
    };
    type Make<'a> = &'a dyn Fn(&Crossing) -> http::Request<ReplayBody>;
    let requests: [Make<'_>; 3] = [&put, &keyed, &marked];
    for request in requests {
        let crossing = Crossing::start(Scheme::Http, closes).await;
        let status = crossing
            .send(RetryPolicy::default(), request(&crossing))
            .await;
        assert_eq!(status.expect("an answer"), 200);
        assert_eq!(crossing.peer.effects("/pay"), 1);

        let crossing = Crossing::start(Scheme::Http, closes).await;
        let sent = crossing.send(RetryPolicy::none(), request(&crossing));
        let error = sent.await.expect_err("once");
        assert_eq!(error.delivery(), Delivery::Unknown);
        assert_eq!(error.bytes_acked(), None);
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
            let crossing = Crossing::start(scheme, then).await;
            let policy = RetryPolicy::default().resend_not_received(true);
            let error = crossing.send(policy, crossing.pay(10)).await;
            let error = error.expect_err("no answer");
            assert_eq!(
                error.delivery(),
                Delivery::Unknown,
                "{scheme} {name}: {error:?}"
            );
            assert!(crossing.peer.effects("/pay") <= 1, "{scheme} {name}");
            assert_eq!(crossing.peer.accepted(), 1, "{scheme} {name}");
        }
    }
}
