//! Time limits: which one it was, what it proves, and that nothing of what was given up comes back.
//!
//! No test asks how long something took: the limits are short, and what is asserted is what the error says and
//! what the peer saw.

use std::net::TcpListener;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt, StreamBody};
use idempool::{
    CloseReason, Delivery, Error, ErrorKind, IdempotencyKey, Phase, Pool, Refusal, ReplayBody,
    RequestTimeout, Retry, RetryPolicy, RetryReason,
};
use tower::ServiceExt;

use crate::support::{
    BOTH, Gate, Names, Peer, Scheme, builder, eventually, fetch, get, post, read, read_until_error,
    server_config,
};

/// Short, and long enough for a warm-up request on a busy machine.
const SHORT: Duration = Duration::from_millis(400);

/// A peer that answers with the request's own id, and with those that begin with `/slow` waits for the gate
/// first.
fn slow_peer(scheme: Scheme) -> (Peer, Gate) {
    let late = Gate::new();
    let gate = late.clone();
    let peer = Peer::start(scheme, move |conn| {
        while let Some(request) = conn.read_request() {
            conn.apply(&request);
            if request.id().starts_with("/slow") {
                gate.pass();
            }
            conn.reply(&request.id());
        }
    });
    (peer, late)
}

/// The connection is closed for its time, and nothing is held.
async fn one_timed_out(pool: &Pool, case: &str) {
    eventually(case, || {
        let stats = pool.stats();
        stats.closes.get(CloseReason::TimedOut) == 1 && stats.busy == 0
    })
    .await;
}

fn assert_timed_out(error: &Error, kind: ErrorKind, phase: Phase, case: &str) {
    assert_eq!(
        (error.kind(), error.phase()),
        (kind, phase),
        "{case}: {error:?}"
    );
    assert_eq!(error.delivery(), Delivery::Unknown, "{case}: {error:?}");
    assert!(
        error.is_timeout() && error.may_have_been_processed(),
        "{case}"
    );
    assert!(
        error.connection().is_some() && error.origin().is_some(),
        "{case}"
    );
}

/// ledgetech/lua-resty-http#138, appcues/mojito#32: the next request got the answer to the one before, at once
/// or a while later, when the connection was idle again.
#[tokio::test]
async fn a_request_that_ran_out_of_time_takes_its_connection_with_it() {
    for scheme in BOTH {
        for pause in [Duration::ZERO, Duration::from_millis(100)] {
            let case = format!("{scheme}, {pause:?}");
            let (peer, late) = slow_peer(scheme);
            let pool = builder().response_head_timeout(SHORT).build();
            fetch(&pool, get(&peer.url("/warm")))
                .await
                .expect("a response");
            let error = fetch(&pool, get(&peer.url("/slow")))
                .await
                .expect_err("too slow");
            let phase = Phase::ResponseHead;
            assert_timed_out(&error, ErrorKind::ResponseTimeout, phase, &case);
            assert!(
                error.bytes_taken() > 0 && !error.response_started(),
                "{case}"
            );
            assert!(error.elapsed().is_some(), "{case}");
            one_timed_out(&pool, &case).await;
            late.open();
            tokio::time::sleep(pause).await;
            for path in ["/one", "/two"] {
                let body = fetch(&pool, get(&peer.url(path))).await;
                assert_eq!(body.expect("a response"), path, "{case}");
            }
            let requests = peer.requests();
            let connections: Vec<_> = requests.iter().map(|request| request.connection).collect();
            assert_eq!(connections, [0, 0, 1, 1], "{case}");
        }
    }
}

/// The time to write counts, and the phase tells that it was not over.
#[tokio::test]
async fn an_upload_that_stalls_runs_out_of_time_in_its_sending() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            conn.read_head();
            conn.await_end();
        });
        let pool = builder().response_head_timeout(SHORT).build();
        let frames = futures_util::stream::iter([Ok::<_, Error>(http_body::Frame::data(
            Bytes::from("amount"),
        ))]);
        let stalls = futures_util::stream::pending();
        let body = StreamBody::new(futures_util::StreamExt::chain(frames, stalls));
        let request = http::Request::post(peer.url("/pay")).body(body).unwrap();
        let error = pool.send(request).await.expect_err("too slow");
        let case = scheme.to_string();
        assert_timed_out(&error, ErrorKind::ResponseTimeout, Phase::Send, &case);
        one_timed_out(&pool, &case).await;
    }
}

/// Two limits run at a time: the error names the one that was over.
#[tokio::test]
async fn the_kind_of_the_error_says_which_limit_it_was() {
    let long = Duration::from_secs(60);
    for (head, whole, kind) in [
        (SHORT, long, ErrorKind::ResponseTimeout),
        (long, SHORT, ErrorKind::RequestTimeout),
    ] {
        let (peer, late) = slow_peer(Scheme::Http);
        let pool = builder()
            .response_head_timeout(head)
            .request_timeout(whole)
            .build();
        let sent = fetch(&pool, post(&peer.url("/slow"), "amount=10")).await;
        let error = sent.expect_err("too slow");
        assert_timed_out(&error, kind, Phase::ResponseHead, kind.as_str());
        one_timed_out(&pool, kind.as_str()).await;
        late.open();
    }
}

/// dotnet/runtime#110598: handshakes without an answer were waited for without limit, and the client did not
/// recover with the server.
#[tokio::test]
async fn a_handshake_without_an_answer_ends_in_time_and_the_client_recovers_with_the_server() {
    // The kernel accepts for it, and nobody says a word.
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let url = format!(
        "https://localhost:{}/",
        listener.local_addr().unwrap().port()
    );
    let pool = builder().connect_timeout(SHORT).build();
    for outcome in join_all((0..8).map(|_| fetch(&pool, get(&url)))).await {
        let error = outcome.expect_err("no answer");
        assert_eq!(error.kind(), ErrorKind::ConnectTimeout, "{error:?}");
        assert_eq!(error.phase(), Phase::Handshake, "{error:?}");
        assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    }
    assert_eq!(pool.stats().dialing, 0);
    let peer = Peer::start_on(
        listener,
        Scheme::Https,
        server_config(Names::Local),
        |conn| {
            conn.answer_requests(usize::MAX);
        },
    );
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
}

/// dotnet/runtime#68423: a time limit that was over before the dial failed looked like any other one.
#[tokio::test]
async fn a_request_that_runs_out_of_time_before_it_has_a_connection_was_not_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let url = format!(
        "https://localhost:{}/",
        listener.local_addr().unwrap().port()
    );
    let pool = builder().request_timeout(SHORT).build();
    let error = fetch(&pool, post(&url, "amount=10"))
        .await
        .expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::RequestTimeout, "{error:?}");
    assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    assert!(error.phase() <= Phase::Handshake, "{error:?}");
    assert!(error.origin().is_some() && error.connection().is_none());
    eventually("the dial is given up", || pool.stats().dialing == 0).await;
}

/// A body that drips never stalls; the whole request ends it all the same.
#[tokio::test]
async fn the_time_of_a_request_covers_its_response_body() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            if conn.read_request().is_none() || conn.index > 0 {
                return conn.reply("next");
            }
            conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for _ in 0..200 {
                conn.send("1\r\na\r\n");
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let pool = builder()
            .request_timeout(2 * SHORT)
            .body_idle_timeout(Duration::from_secs(60))
            .build();
        let response = pool.send(get(&peer.url("/"))).await.expect("a head");
        let (bytes, error) = read_until_error(response).await;
        let (case, error) = (scheme.to_string(), error.expect("too slow"));
        let phase = Phase::ResponseBody;
        assert_timed_out(&error, ErrorKind::RequestTimeout, phase, &case);
        assert!(!bytes.is_empty(), "{case}");
        one_timed_out(&pool, &case).await;
        let body = fetch(&pool, get(&peer.url("/next"))).await;
        assert_eq!(body.expect("a response"), "next", "{case}");
    }
}

/// For the time of the whole request the reader's own pauses count.
#[tokio::test]
async fn a_reader_that_comes_too_late_is_told_so_although_there_are_bytes() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.read_request();
        conn.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf!");
        conn.await_end();
    });
    let pool = builder().request_timeout(SHORT).build();
    let response = pool.send(get(&peer.url("/"))).await.expect("a head");
    tokio::time::sleep(2 * SHORT).await;
    let (bytes, error) = read_until_error(response).await;
    let error = error.expect("too late");
    let phase = Phase::ResponseBody;
    assert_timed_out(&error, ErrorKind::RequestTimeout, phase, "late");
    assert_eq!(bytes, b"");
    one_timed_out(&pool, "late").await;
}

#[tokio::test]
async fn a_request_may_have_a_time_of_its_own() {
    let (peer, late) = slow_peer(Scheme::Http);
    let with = |path: &str, time| {
        let mut request = post(&peer.url(path), "amount=10");
        request.extensions_mut().insert(RequestTimeout(time));
        request
    };
    let patient = builder().build();
    let hasty = builder().request_timeout(SHORT).build();

    fetch(&patient, get(&peer.url("/warm")))
        .await
        .expect("a response");
    let error = fetch(&patient, with("/slow-1", Duration::ZERO)).await;
    let error = error.expect_err("no time at all");
    assert_eq!(error.kind(), ErrorKind::RequestTimeout);
    assert_eq!(error.delivery(), Delivery::NotSent);
    // The idle connection has not even been taken.
    assert_eq!((peer.effects("/slow-1"), patient.stats().idle), (0, 1));

    let error = fetch(&patient, with("/slow-2", SHORT)).await;
    let error = error.expect_err("too slow");
    let phase = Phase::ResponseHead;
    assert_timed_out(&error, ErrorKind::RequestTimeout, phase, "shorter");

    let unlimited = fetch(&hasty, with("/slow-3", Duration::MAX));
    let open = async {
        tokio::time::sleep(3 * SHORT).await;
        late.open();
    };
    let (body, ()) = tokio::join!(unlimited, open);
    assert_eq!(body.expect("longer"), "/slow-3");
}

/// http4s/http4s-netty#640: the rest of a body that timed out was read as the answer to the next request.
#[tokio::test]
async fn a_body_that_stalls_ends_with_an_error_and_takes_its_connection_with_it() {
    for scheme in BOTH {
        let late = Gate::new();
        let gate = late.clone();
        let peer = Peer::start(scheme, move |conn| {
            while let Some(request) = conn.read_request() {
                if request.id() != "/stalls" {
                    conn.reply(&request.id());
                    continue;
                }
                conn.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf!");
                gate.pass();
                conn.send("other");
            }
        });
        let pool = builder().body_idle_timeout(SHORT).build();
        fetch(&pool, get(&peer.url("/warm")))
            .await
            .expect("a response");
        let response = pool.send(get(&peer.url("/stalls"))).await.expect("a head");
        let (bytes, error) = read_until_error(response).await;
        let (case, error) = (scheme.to_string(), error.expect("it stalls"));
        assert_timed_out(&error, ErrorKind::BodyTimeout, Phase::ResponseBody, &case);
        assert_eq!(bytes, b"half!", "{case}");
        assert!(error.response_started(), "{case}");
        one_timed_out(&pool, &case).await;
        late.open();
        let body = fetch(&pool, get(&peer.url("/next"))).await;
        assert_eq!(body.expect("a response"), "/next", "{case}");
        assert_eq!(peer.accepted(), 2, "{case}");
    }
}

/// The time begins when the reader waits, ends when something comes, and begins anew.
#[tokio::test]
async fn only_the_silence_of_a_body_counts_and_not_the_pauses_of_its_reader() {
    let pieces = 10;
    let peer = Peer::start(Scheme::Http, move |conn| {
        while conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for _ in 0..pieces {
                std::thread::sleep(Duration::from_millis(120));
                conn.send("1\r\na\r\n");
            }
            conn.send("0\r\n\r\n");
        }
    });
    let limit = Duration::from_secs(1);
    let pool = builder().body_idle_timeout(limit).build();
    // All together it takes longer than the limit.
    let body = fetch(&pool, get(&peer.url("/steady"))).await;
    assert_eq!(body.expect("a response"), "a".repeat(pieces));
    let response = pool.send(get(&peer.url("/paused"))).await.expect("a head");
    let mut body = response.into_body();
    let first = body.frame().await.expect("a frame").expect("data");
    assert_eq!(first.into_data().expect("data"), "a");
    tokio::time::sleep(2 * limit).await;
    let rest = body.collect().await.expect("the rest").to_bytes();
    assert_eq!(rest, "a".repeat(pieces - 1));
    assert_eq!(peer.accepted(), 1);
}

/// seanmonstar/reqwest#342: requests that timed out left their sockets open, up to the limit of descriptors.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_thousand_timeouts_leave_no_socket_behind() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.read_request();
        conn.await_end();
    });
    let pool = builder()
        .response_head_timeout(Duration::from_millis(20))
        .build();
    for _ in 0..20 {
        let batch = (0..50).map(|_| fetch(&pool, post(&peer.url("/pay"), "amount=10")));
        for outcome in join_all(batch).await {
            let error = outcome.expect_err("no answer");
            assert_eq!(error.kind(), ErrorKind::ResponseTimeout, "{error:?}");
        }
    }
    eventually("all are closed", || peer.client_sockets() == 0).await;
    let stats = pool.stats();
    assert_eq!((stats.busy, stats.dialing, stats.idle), (0, 0, 0));
    assert_eq!(stats.closes.get(CloseReason::TimedOut), 1000);
}

/// A time limit says nothing of the effect: what may be sent again is what the table says of a lost answer.
#[tokio::test]
async fn after_a_time_limit_only_what_is_safe_twice_is_sent_again() {
    let pay = |peer: &Peer| {
        http::Request::post(peer.url("/pay"))
            .body(ReplayBody::from("amount=10"))
            .unwrap()
    };
    for keyed in [false, true] {
        let peer = Peer::start(Scheme::Http, |conn| match conn.read_request() {
            Some(request) if conn.index > 0 => {
                conn.apply(&request);
                conn.reply("paid");
            }
            _ => {
                conn.await_end();
            }
        });
        let pool = builder().response_head_timeout(SHORT).build();
        let client = Retry::new(pool.clone(), RetryPolicy::default());
        if keyed {
            let request = IdempotencyKey::random().attach(pay(&peer)).unwrap();
            let response = client.oneshot(request).await.expect("an answer");
            assert_eq!(read(response).await.expect("a body"), "paid");
            let requests = peer.requests();
            assert_eq!(requests.len(), 2);
            let keys = requests.iter().map(|it| it.field("idempotency-key"));
            let keys: Vec<_> = keys.collect();
            assert!(keys[0].is_some() && keys[0] == keys[1], "{keys:?}");
            assert_eq!(pool.stats().retries.get(RetryReason::NoResponse), 1);
        } else {
            let error = client.oneshot(pay(&peer)).await.expect_err("no answer");
            assert_eq!(error.kind(), ErrorKind::ResponseTimeout);
            assert_eq!(error.refusal(), Some(Refusal::MethodNotIdempotent));
            assert_eq!(peer.accepted(), 1);
        }
    }
}

/// Connections into which a request goes and from which nothing comes: no end, no reset, no acknowledgement, as
/// behind a load balancer that has forgotten them.
#[cfg(target_os = "linux")]
mod black_hole {
    use http_body_util::Full;
    use idempool::EarlierAttempts;
    use socket2::{SockFilter, SockRef};

    use super::*;
    use crate::support::{Conn, Ended};

    /// How a script goes on once the route heals.
    type Then = fn(&mut Conn);

    /// A peer whose first connection answers once and then hears nothing until the route heals. Its other
    /// connections behave.
    struct Hole {
        peer: Peer,
        pool: Pool,
        heal: Gate,
    }

    impl Hole {
        /// With one idle connection, which is the first one.
        async fn start(scheme: Scheme, pool: Pool, then: Then) -> Hole {
            let (deaf, heal) = (Gate::new(), Gate::new());
            let gates = (deaf.clone(), heal.clone());
            let peer = Peer::start(scheme, move |conn| {
                if conn.index > 0 {
                    conn.answer_requests(usize::MAX);
                } else if conn.answer_requests(1) {
                    conn.lose_what_comes();
                    gates.0.open();
                    gates.1.pass();
                    conn.hear_again();
                    then(conn);
                }
            });
            fetch(&pool, get(&peer.url("/warm")))
                .await
                .expect("a response");
            eventually("the peer is deaf", || deaf.is_open()).await;
            Hole { peer, pool, heal }
        }

        fn request(&self, method: &str) -> http::Request<ReplayBody> {
            http::Request::builder()
                .method(method)
                .uri(self.peer.url("/pay"))
                .body(ReplayBody::from("amount=10"))
                .unwrap()
        }

        fn client(&self) -> Retry<Pool> {
            Retry::new(self.pool.clone(), RetryPolicy::default())
        }
    }

    const ACK: Duration = Duration::from_millis(300);

    fn watching() -> Pool {
        builder().ack_timeout(ACK).build()
    }

    /// Nothing that the client gave up is in its kernel any more: it sends nothing, and answers with a reset.
    fn hears_nothing_late(conn: &mut Conn) {
        // It was given up after 0.3 or 0.4 s, and would be sent again after 0.6 and after 1.4 s.
        std::thread::sleep(Duration::from_millis(1500));
        conn.send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n");
        assert_eq!(conn.await_end(), (Ended::Reset, 0), "it came late");
    }

    /// lysine-dev/okhttp#3261, golang/go#60301: a connection that was forgotten on the way held its request for
    /// minutes.
    #[tokio::test]
    async fn what_is_safe_twice_leaves_a_black_hole_and_is_answered_elsewhere() {
        let one = |scheme, method| async move {
            let case = format!("{method} over {scheme}");
            let hole = Hole::start(scheme, watching(), hears_nothing_late).await;
            let mut request = hole.request(method);
            if method == "POST" {
                request = IdempotencyKey::random().attach(request).unwrap();
            }
            let response = hole.client().oneshot(request).await;
            let response = response.expect("an answer");
            let earlier = response.extensions().get::<EarlierAttempts>();
            let EarlierAttempts(earlier) = earlier.expect("one").clone();
            assert_eq!(read(response).await.expect("a body"), "1", "{case}");
            assert_eq!(earlier.len(), 1, "{case}");
            assert_eq!(earlier[0].kind, Some(ErrorKind::Unacknowledged), "{case}");
            assert_eq!(earlier[0].delivery, Delivery::Unknown, "{case}");
            assert_eq!(earlier[0].reused, Some(true), "{case}");
            assert!(earlier[0].bytes_taken > 0, "{case}");
            let retries = hole.pool.stats().retries;
            assert_eq!(retries.get(RetryReason::StaleConnection), 1, "{case}");
            one_timed_out(&hole.pool, &case).await;

            hole.heal.open();
            eventually("the first one is at its end", || {
                hole.peer.ended().iter().any(|&(index, _)| index == 0)
            })
            .await;
            assert_eq!(hole.peer.effects("/pay"), 1, "{case}");
            assert_eq!(hole.peer.accepted(), 2, "{case}");
        };
        let methods = ["GET", "PUT", "POST"];
        let cases = BOTH.map(|scheme| methods.map(|method| one(scheme, method)));
        join_all(cases.into_iter().flatten()).await;
    }

    /// Nothing makes it safe to send these twice, or nobody is there to do it: they wait, and the route may heal.
    #[tokio::test]
    async fn what_will_not_be_sent_again_waits_for_the_route_to_heal() {
        let answers: Then = |conn| {
            conn.answer_requests(usize::MAX);
        };
        let one = |name, make: fn(&Hole) -> http::Request<ReplayBody>, layered| async move {
            let hole = Hole::start(Scheme::Http, watching(), answers).await;
            let request = make(&hole);
            let (client, pool) = (hole.client(), hole.pool.clone());
            let exchange = tokio::spawn(async move {
                match layered {
                    true => client.oneshot(request).await,
                    false => pool.send(request).await,
                }
            });
            tokio::time::sleep(3 * ACK).await;
            assert!(!exchange.is_finished(), "{name}");
            hole.heal.open();
            let response = exchange.await.unwrap().expect(name);
            assert_eq!(read(response).await.expect("a body"), "0", "{name}");
            let peer = &hole.peer;
            assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1), "{name}");
        };
        tokio::join!(
            one("an unkeyed POST", |hole| hole.request("POST"), true),
            one("a GET without a layer", |hole| hole.request("GET"), false),
            one(
                "a PUT of a stream that exists once",
                |hole| {
                    let body = ReplayBody::once(Full::new(Bytes::from("amount=10")));
                    hole.request("PUT").map(|_| body)
                },
                true,
            ),
        );
    }

    /// It was opened a moment ago, so somebody was there; and another one would be no better.
    #[tokio::test]
    async fn a_fresh_connection_is_not_given_up_for_its_silence() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        // Loses every segment with content: handshakes are 60 bytes at most. Accepted sockets inherit it.
        let lose_content = [
            SockFilter::new(0x80, 0, 0, 0),  // load the length
            SockFilter::new(0x25, 0, 1, 60), // more than that?
            SockFilter::new(0x06, 0, 0, 0),  // keep nothing
            SockFilter::new(0x06, 0, 0, u32::MAX),
        ];
        SockRef::from(&listener)
            .attach_filter(&lose_content)
            .expect("a filter");
        let heal = Gate::new();
        let gate = heal.clone();
        let config = server_config(Names::Local);
        let peer = Peer::start_on(listener, Scheme::Http, config, move |conn| {
            gate.pass();
            conn.hear_again();
            conn.answer_requests(usize::MAX);
        });
        let request = http::Request::get(peer.url("/pay"));
        let request = request.body(ReplayBody::empty()).unwrap();
        let client = Retry::new(watching(), RetryPolicy::default());
        let exchange = tokio::spawn(client.oneshot(request));
        tokio::time::sleep(3 * ACK).await;
        assert!(!exchange.is_finished());
        heal.open();
        let response = exchange.await.unwrap().expect("an answer");
        assert_eq!(read(response).await.expect("a body"), "0");
        assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1));
    }

    /// Acknowledged: the server has it, and how long it takes is its own affair.
    #[tokio::test]
    async fn a_slow_server_that_acknowledges_is_waited_for() {
        for scheme in BOTH {
            let peer = Peer::start(scheme, |conn| {
                while let Some(request) = conn.read_request() {
                    conn.apply(&request);
                    if request.id() == "/slow" {
                        std::thread::sleep(4 * ACK);
                    }
                    conn.reply("done");
                }
            });
            let pool = watching();
            fetch(&pool, get(&peer.url("/warm")))
                .await
                .expect("a response");
            let request = http::Request::get(peer.url("/slow"));
            let request = request.body(ReplayBody::empty()).unwrap();
            let client = Retry::new(pool.clone(), RetryPolicy::default());
            let response = client.oneshot(request).await.expect("an answer");
            assert_eq!(read(response).await.expect("a body"), "done", "{scheme}");
            assert_eq!((peer.accepted(), peer.effects("/slow")), (1, 1), "{scheme}");
            assert_eq!(pool.stats().retries.total(), 0, "{scheme}");
        }
    }

    /// The kernel would go on sending it for half a minute, and the caller has long placed it anew.
    #[tokio::test]
    async fn a_payment_that_was_given_up_in_a_black_hole_does_not_arrive_late() {
        let one = |scheme: Scheme| async move {
            let pool = builder().response_head_timeout(SHORT).build();
            let hole = Hole::start(scheme, pool, hears_nothing_late).await;
            let sent = hole.client().oneshot(hole.request("POST")).await;
            let (case, error) = (scheme.to_string(), sent.expect_err("no answer"));
            let phase = Phase::ResponseHead;
            assert_timed_out(&error, ErrorKind::ResponseTimeout, phase, &case);
            assert_eq!(error.bytes_acked(), Some(0), "{case}");
            one_timed_out(&hole.pool, &case).await;
            hole.heal.open();
            eventually("the first one is at its end", || {
                hole.peer.ended().contains(&(0, Ended::Reset))
            })
            .await;
            let peer = &hole.peer;
            assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 0), "{case}");
        };
        join_all(BOTH.map(one)).await;
    }
}
