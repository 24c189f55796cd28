//! Connections that the server has closed while they were idle: who notices, and that no request pays
//! for it.

use idempool::{CloseReason, Delivery, ErrorKind, Phase};

use crate::support::{BOTH, Conn, Gate, Peer, Scheme, eventually, fetch, get, pool, post};

/// How a script ends its connection.
type End = fn(&mut Conn);

/// A peer whose first connection answers one request, waits for the gate, and then ends as told. Its
/// other connections behave. The second gate opens once the end is on its way.
fn ends_while_idle(
    scheme: Scheme,
    end: impl Fn(&mut Conn) + Send + Sync + 'static,
) -> (Peer, Gate, Gate) {
    let (now, done) = (Gate::new(), Gate::new());
    let gates = (now.clone(), done.clone());
    let peer = Peer::start(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
            return;
        }
        conn.answer_requests(1);
        gates.0.pass();
        end(conn);
        gates.1.open();
        if conn.index == 0 {
            // Keeps what was not closed open until the client has gone.
            conn.await_end();
        }
    });
    (peer, now, done)
}

/// A server's close that arrives while nobody looks is seen by the connection's own task.
#[tokio::test]
async fn a_close_while_idle_is_noticed_at_once_and_costs_no_request() {
    for scheme in BOTH {
        let (peer, now, _) = ends_while_idle(scheme, Conn::fin);
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        now.open();
        eventually("the task sees the end", || pool.stats().idle == 0).await;
        fetch(&pool, post(&peer.url("/pay"), "amount=10"))
            .await
            .expect("a response");
        let stats = pool.stats();
        assert_eq!(
            (stats.closed_while_idle, stats.stale_caught_by_probe),
            (1, 0),
            "{scheme}"
        );
        assert_eq!((peer.accepted(), peer.effects("/pay")), (2, 1), "{scheme}");
        eventually("it is counted", || {
            pool.stats().closes.get(CloseReason::PeerClosedIdle) == 1
        })
        .await;
    }
}

/// The runtime is kept from running the connection's task, as a busy one would; only the kernel knows.
#[tokio::test]
async fn what_the_task_had_no_time_to_see_the_probe_catches() {
    let ends: [(&str, End, CloseReason); 3] = [
        ("fin", Conn::fin, CloseReason::ProbeFoundClosed),
        (
            "rst",
            |conn| reset_and_stay_away(conn),
            CloseReason::ProbeFoundClosed,
        ),
        (
            "chatter",
            |conn| conn.send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"),
            CloseReason::UnexpectedBytes,
        ),
    ];
    for (name, end, reason) in ends {
        let (peer, now, done) = ends_while_idle(Scheme::Http, end);
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        now.open();
        done.pass(); // blocks this thread, and with it the runtime
        fetch(&pool, post(&peer.url("/pay"), "amount=10"))
            .await
            .expect("a response");
        let stats = pool.stats();
        assert_eq!(
            (stats.stale_caught_by_probe, stats.closed_while_idle),
            (1, 0),
            "{name}"
        );
        assert_eq!((peer.accepted(), peer.effects("/pay")), (2, 1), "{name}");
        eventually(name, || pool.stats().closes.get(reason) == 1).await;
    }
}

fn reset_and_stay_away(conn: &mut Conn) {
    conn.rst();
    conn.index = usize::MAX;
}

/// Over TLS as over TCP, polite or not.
#[tokio::test]
async fn an_end_over_tls_is_caught_before_a_request_is_written() {
    let ends: [(&str, End); 4] = [
        ("close_notify and FIN", |conn| {
            conn.close_notify();
            conn.fin();
        }),
        ("close_notify alone", Conn::close_notify),
        ("FIN alone", Conn::fin),
        ("reset", |conn| reset_and_stay_away(conn)),
    ];
    for (name, end) in ends {
        let (peer, now, done) = ends_while_idle(Scheme::Https, end);
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        now.open();
        done.pass();
        fetch(&pool, post(&peer.url("/pay"), "amount=10"))
            .await
            .expect("a response");
        assert_eq!((peer.accepted(), peer.effects("/pay")), (2, 1), "{name}");
        let stats = pool.stats();
        let noticed = stats.stale_caught_by_probe + stats.closed_while_idle + stats.handed_back;
        assert_eq!(noticed, 1, "{name}: {stats}");
    }
}

/// RFC 8446 section 4.6: bytes of TLS's own may arrive at any time.
#[tokio::test]
async fn bytes_of_tls_itself_do_not_cost_a_connection() {
    let (now, done) = (Gate::new(), Gate::new());
    let gates = (now.clone(), done.clone());
    let peer = Peer::start(Scheme::Https, move |conn| {
        conn.answer_requests(1);
        gates.0.pass();
        conn.send_key_update();
        gates.1.open();
        conn.answer_requests(usize::MAX);
    });
    let pool = pool();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    now.open();
    done.pass();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    let stats = pool.stats();
    assert_eq!((peer.accepted(), stats.connections_saved), (1, 1));
    assert_eq!(stats.stale_caught_by_probe, 0);
}

/// Dead candidates cost nothing but a look each: no error, no resend, one dial.
#[tokio::test]
async fn a_whole_shelf_of_dead_connections_costs_one_dial() {
    let (now, done) = (Gate::new(), Gate::new());
    let gates = (now.clone(), done.clone());
    let dead = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&dead);
    let peer = Peer::start(Scheme::Http, move |conn| {
        if conn.index >= 5 {
            conn.answer_requests(usize::MAX);
            return;
        }
        conn.answer_requests(1);
        gates.0.pass();
        conn.close();
        if count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 4 {
            gates.1.open();
        }
    });
    let pool = pool();
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(pool.send(get(&peer.url("/"))).await.expect("a response"));
    }
    for response in held {
        crate::support::read(response).await.expect("a body");
    }
    assert_eq!(pool.stats().idle, 5);
    now.open();
    done.pass();
    fetch(&pool, post(&peer.url("/pay"), "amount=10"))
        .await
        .expect("a response");
    // Once the first was caught the payment trusts none of the others, and their tasks find them closed.
    eventually("each is noticed", || {
        let stats = pool.stats();
        stats.stale_caught_by_probe + stats.closed_while_idle == 5
    })
    .await;
    let stats = pool.stats();
    assert!(stats.stale_caught_by_probe >= 1, "{stats}");
    assert_eq!(
        (peer.accepted(), stats.idle, stats.requests_failed),
        (6, 1, 0)
    );
    assert_eq!(peer.effects("/pay"), 1);
}

/// What no check can prevent: the close crosses the request. One kind of error and one delivery, however
/// the failure surfaces: end of stream, reset, broken pipe, TLS truncation.
#[tokio::test]
async fn a_close_that_crosses_the_request_is_the_same_error_in_every_guise() {
    let ends: [(&str, End); 3] = [
        ("close", Conn::close),
        ("reset", Conn::rst),
        ("fin, then close", |conn| {
            conn.fin();
            conn.close();
        }),
    ];
    for scheme in BOTH {
        for (end_name, end) in ends {
            for (method, body) in [("GET", Vec::new()), ("POST", vec![b'x'; 1 << 20])] {
                let case = format!("{method} over {scheme}, {end_name}");
                let peer = Peer::start(scheme, move |conn| {
                    if conn.answer_requests(1) && conn.index == 0 {
                        conn.await_first_byte();
                        end(conn);
                    }
                });
                let pool = pool();
                fetch(&pool, get(&peer.url("/"))).await.expect("a response");
                let mut request = post(&peer.url("/second"), body);
                *request.method_mut() = method.parse().unwrap();
                let error = fetch(&pool, request)
                    .await
                    .expect_err("the close crosses it");
                assert_eq!(
                    error.kind(),
                    ErrorKind::ConnectionClosed,
                    "{case}: {error:?}"
                );
                assert_eq!(error.delivery(), Delivery::Unknown, "{case}: {error:?}");
                assert_eq!(error.is_reused(), Some(true), "{case}");
                assert!(error.idle_age().is_some(), "{case}");
                assert!(error.bytes_taken() > 0, "{case}");
                assert!(!error.response_started(), "{case}");
                assert!(error.phase() == Phase::Send || error.phase() == Phase::ResponseHead);
                assert!(
                    error.may_have_been_processed() && !error.is_connect(),
                    "{case}"
                );
                let connection = error.connection().expect("it was on one");
                assert_eq!(connection.requests_served(), 1, "{case}");
                let stats = pool.stats();
                assert_eq!(
                    (stats.stale_after_write, stats.requests_failed),
                    (1, 1),
                    "{case}"
                );
                assert_eq!((stats.busy, stats.dialing), (0, 0), "{case}");
                assert_eq!(
                    peer.accepted(),
                    1,
                    "{case}: the pool itself never sends it again"
                );
            }
        }
    }
}

/// A31: once the kernel took a byte, "not processed" must not be claimed.
#[tokio::test]
async fn a_request_that_was_read_and_applied_is_never_called_not_sent() {
    let ends: [(&str, End); 2] = [("close", Conn::close), ("reset", Conn::rst)];
    for scheme in BOTH {
        for reused in [false, true] {
            for (name, end) in ends {
                let peer = Peer::start(scheme, move |conn| {
                    if reused && !conn.answer_requests(1) {
                        return;
                    }
                    if let Some(request) = conn.read_request() {
                        conn.apply(&request);
                        end(conn);
                    }
                });
                let pool = pool();
                if reused {
                    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
                }
                let error = fetch(&pool, post(&peer.url("/pay"), "amount=10"))
                    .await
                    .expect_err("no answer");
                assert_eq!(
                    error.delivery(),
                    Delivery::Unknown,
                    "{scheme} {name} {reused}"
                );
                assert_eq!(
                    error.kind(),
                    ErrorKind::ConnectionClosed,
                    "{scheme} {name} {reused}"
                );
                assert_eq!(error.is_reused(), Some(reused));
                assert_eq!(error.phase(), Phase::ResponseHead);
                assert_eq!(peer.effects("/pay"), 1);
            }
        }
    }
}

/// The caller's own body failing is told apart from the connection failing.
#[tokio::test]
async fn a_request_body_that_fails_is_the_callers_error() {
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        let parts = [
            Ok(http_body::Frame::data(bytes::Bytes::from("amount"))),
            Err("disk on fire"),
        ];
        let body = http_body_util::StreamBody::new(futures_util::stream::iter(parts));
        let request = http::Request::post(peer.url("/pay")).body(body).unwrap();
        let error = pool.send(request).await.expect_err("the body fails");
        assert_eq!(error.kind(), ErrorKind::RequestBody, "{scheme}: {error:?}");
        let mut causes = std::iter::successors(std::error::Error::source(&error), |e| e.source());
        assert!(
            causes.any(|cause| cause.to_string() == "disk on fire"),
            "{error:?}"
        );
        assert_eq!(peer.effects("/pay"), 0);
        assert_eq!((pool.stats().busy, pool.stats().stale_after_write), (0, 0));
        // The connection carried a part of a request: it is not for the next one.
        fetch(&pool, get(&peer.url("/next")))
            .await
            .expect("a response");
        assert_eq!(peer.accepted(), 2);
    }
}
