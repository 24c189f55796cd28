//! The retry layer over the pool, against servers that count effects: the judge of what is safe.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use idempool::{
    Class, Delivery, Error, ErrorKind, IdempotencyKey, Pool, Refusal, ReplayBody, ResendCount,
    ResponseBody, Retry, RetryLayer, RetryPolicy, RetryReason,
};
use tower::{ServiceBuilder, ServiceExt};

use crate::support::{
    BOTH, Conn, Peer, Received, Scheme, eventually, fetch, get, on_both_runtimes, pool,
};

/// Quick waits, so that the tests are quick; all else as by default.
fn policy() -> RetryPolicy {
    RetryPolicy::default()
        .backoff(Duration::from_millis(1), Duration::from_millis(5))
        .jitter_seed(7)
}

fn client(pool: &Pool) -> Retry<Pool> {
    ServiceBuilder::new()
        .layer(RetryLayer::new(policy()))
        .service(pool.clone())
}

fn request(method: Method, url: &str, body: impl Into<ReplayBody>) -> Request<ReplayBody> {
    Request::builder()
        .method(method)
        .uri(url)
        .body(body.into())
        .unwrap()
}

async fn send(pool: &Pool, request: Request<ReplayBody>) -> Result<Response<Bytes>, Error> {
    let response = client(pool).oneshot(request).await?;
    let (parts, body) = response.into_parts();
    Ok(Response::from_parts(
        parts,
        body.collect().await?.to_bytes(),
    ))
}

/// The first connection answers one request and ends as told at the first byte of the second; all
/// others behave.
fn crosses_the_second(scheme: Scheme, end: fn(&mut Conn)) -> Peer {
    Peer::start(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.answer_requests(1) {
            conn.await_first_byte();
            end(conn);
        }
    })
}

/// The first request is applied and its connection ends without an answer; later ones are answered, with
/// the stored answer where the key was seen.
fn loses_the_first_answer(scheme: Scheme, end: fn(&mut Conn)) -> Peer {
    let answers = Arc::new(Mutex::new(Vec::<String>::new()));
    Peer::start(scheme, move |conn| {
        while let Some(request) = conn.read_request() {
            let key = request.field("idempotency-key").map(ToOwned::to_owned);
            let seen = {
                let mut answers = answers.lock().unwrap();
                let seen = key.as_ref().is_some_and(|key| answers.contains(key));
                answers.extend(key);
                seen
            };
            if !seen {
                conn.apply(&request);
            }
            if conn.index == 0 {
                return end(conn);
            }
            conn.reply("paid");
        }
    })
}

/// hyperium/hyper#2136 and #3553: the race that no check can win, won by what may be sent again.
#[test]
fn an_idempotent_request_survives_a_close_that_crosses_it() {
    on_both_runtimes(|| async {
        let methods = [
            Method::GET,
            Method::HEAD,
            Method::OPTIONS,
            Method::PUT,
            Method::DELETE,
            Method::QUERY,
        ];
        for scheme in BOTH {
            for end in [Conn::close as fn(&mut Conn), Conn::rst] {
                for method in methods.clone() {
                    let peer = crosses_the_second(scheme, end);
                    let pool = pool();
                    fetch(&pool, get(&peer.url("/warm")))
                        .await
                        .expect("a response");
                    let url = peer.url("/second");
                    let response = send(&pool, request(method.clone(), &url, "")).await;
                    let response = response.unwrap_or_else(|error| panic!("{method}: {error}"));
                    assert_eq!(
                        response.extensions().get(),
                        Some(&ResendCount(1)),
                        "{method}"
                    );
                    assert_eq!(
                        (peer.accepted(), peer.effects("/second")),
                        (2, 1),
                        "{method}"
                    );
                    let stats = pool.stats();
                    assert_eq!(
                        stats.retries.get(RetryReason::StaleConnection),
                        1,
                        "{method}"
                    );
                }
            }
        }
    });
}

/// RFC 9110 section 9.2.2: no proof, no method, no key: the caller decides.
#[tokio::test]
async fn an_unkeyed_request_is_told_to_the_caller_and_not_sent_again() {
    let extension = Method::from_bytes(b"get").unwrap(); // names are case-sensitive
    for scheme in BOTH {
        for method in [Method::POST, Method::PATCH, extension.clone()] {
            for body in ["amount=10".to_owned(), "x".repeat(1 << 20)] {
                let peer = crosses_the_second(scheme, Conn::close);
                let pool = pool();
                fetch(&pool, get(&peer.url("/warm")))
                    .await
                    .expect("a response");
                let error = send(&pool, request(method.clone(), &peer.url("/pay"), body))
                    .await
                    .expect_err("the close crosses it");
                assert_eq!(error.delivery(), Delivery::Unknown);
                assert_eq!(error.kind(), ErrorKind::ConnectionClosed);
                assert_eq!(
                    error.refusal(),
                    Some(Refusal::MethodNotIdempotent),
                    "{method}"
                );
                assert_eq!((peer.accepted(), error.resends()), (1, 0), "{method}");
                let refusals = pool.stats().refusals;
                assert_eq!(refusals.get(Refusal::MethodNotIdempotent), 1);
            }
        }
    }
}

/// The server took the payment and the answer is lost: with a key, one payment and its answer.
#[tokio::test]
async fn a_lost_answer_is_fetched_by_key_and_the_payment_made_once() {
    for scheme in BOTH {
        for end in [Conn::close as fn(&mut Conn), Conn::rst, Conn::fin] {
            let peer = loses_the_first_answer(scheme, end);
            let pool = pool();
            let key = IdempotencyKey::random();
            let plain = request(Method::POST, &peer.url("/pay"), "amount=10");
            let response = send(&pool, key.attach(plain).expect("no key yet")).await;
            assert_eq!(response.expect("the stored answer").body(), "paid");
            assert_eq!(peer.effects("/pay"), 1);
            let [first, second] = &peer.requests()[..] else {
                panic!("two requests")
            };
            // Byte for byte the same, the key included.
            assert_eq!((&first.head, &first.body), (&second.head, &second.body));
            let sent = first.field("idempotency-key").map(ToOwned::to_owned);
            assert_eq!(sent, Some(format!("\"{}\"", key.as_str())));
        }
    }
}

/// The same without a key: one payment, and the caller knows that he does not know.
#[tokio::test]
async fn a_lost_answer_without_a_key_is_unknown_and_the_payment_made_once() {
    for scheme in BOTH {
        for end in [Conn::close as fn(&mut Conn), Conn::rst] {
            let peer = loses_the_first_answer(scheme, end);
            let pool = pool();
            let error = send(&pool, request(Method::POST, &peer.url("/pay"), "amount=10"))
                .await
                .expect_err("no answer");
            assert_eq!(error.delivery(), Delivery::Unknown);
            assert!(error.may_have_been_processed());
            assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1));
        }
    }
}

/// The siblings of a connection that just died are suspect: none of them is tried with a request that
/// was sent once.
#[tokio::test]
async fn a_resend_goes_on_a_fresh_connection_past_idle_ones() {
    let peer = Peer::start(Scheme::Http, |conn| {
        if conn.index < 5 {
            conn.answer_requests(1);
            // The second request on any of the first five meets a close.
            if conn.read_head().is_some() {
                conn.close();
            }
        } else {
            conn.answer_requests(usize::MAX);
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
    let response = send(&pool, request(Method::GET, &peer.url("/"), ""))
        .await
        .expect("a response");
    assert_eq!(response.body(), "5");
    assert_eq!(response.extensions().get(), Some(&ResendCount(1)));
}

/// A failed automatic retry is not retried (RFC 9110 section 9.2.2), and the dials are bounded.
#[tokio::test]
async fn a_server_that_never_answers_is_asked_twice_and_no_more() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.read_request();
        conn.close();
    });
    let pool = pool();
    let error = send(&pool, request(Method::GET, &peer.url("/"), ""))
        .await
        .expect_err("never");
    assert_eq!((peer.accepted(), error.resends()), (2, 1));
    assert_eq!(error.refusal(), Some(Refusal::Attempts));
    assert_eq!(error.delivery(), Delivery::Unknown);
}

/// Proof that nothing was sent allows any method, and ends too.
#[tokio::test]
async fn a_refused_connection_is_tried_again_for_any_method_and_then_told() {
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let pool = pool();
    let url = format!("http://{closed}/pay");
    let error = send(&pool, request(Method::POST, &url, "amount=10"))
        .await
        .expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Connect);
    assert_eq!(error.delivery(), Delivery::NotSent);
    assert!(error.is_connect() && !error.may_have_been_processed());
    assert_eq!(error.resends(), 3);
    let stats = pool.stats();
    assert_eq!((stats.dials_failed, stats.connections_opened), (4, 0));
}

/// A one-shot stream that was read from is gone: refused, never truncated.
#[tokio::test]
async fn a_stream_that_was_read_from_is_not_sent_again() {
    let peer = loses_the_first_answer(Scheme::Http, Conn::close);
    let pool = pool();
    let chunks =
        ["amount", "=10"].map(|text| Ok::<_, Error>(http_body::Frame::data(Bytes::from(text))));
    let stream = http_body_util::StreamBody::new(futures_util::stream::iter(chunks));
    let put = Request::put(peer.url("/pay"))
        .body(ReplayBody::once(stream))
        .unwrap();
    let error = send(&pool, put).await.expect_err("no answer");
    assert_eq!(error.refusal(), Some(Refusal::BodyNotReplayable));
    assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1));
}

/// What is thrown away is read on within bounds, or its connection closed; the wait holds nothing.
#[tokio::test]
async fn a_discarded_response_does_not_hold_its_connection() {
    for size in [100, 4 << 20] {
        let peer = Peer::start(Scheme::Http, move |conn| {
            while conn.read_request().is_some() {
                if conn.index == 0 {
                    let body = "x".repeat(size);
                    conn.send(format!(
                        "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nContent-Length: {size}\r\n\r\n{body}"
                    ));
                } else {
                    conn.reply("ok");
                }
            }
        });
        let pool = pool();
        let response = send(&pool, request(Method::GET, &peer.url("/"), ""))
            .await
            .expect("in the end");
        assert_eq!(response.body(), "ok");
        assert_eq!(pool.stats().retries.get(RetryReason::Unavailable), 1);
        eventually("nothing is held", || pool.stats().busy == 0).await;
        assert_eq!(pool.stats().idle, if size == 100 { 2 } else { 1 });
    }
}

/// A head that was delivered may have been acted on.
#[tokio::test]
async fn a_body_that_breaks_off_is_never_asked_for_again() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.read_request();
        conn.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
        conn.close();
    });
    let pool = pool();
    let error = send(&pool, request(Method::GET, &peer.url("/"), ""))
        .await
        .expect_err("half");
    assert_eq!(error.kind(), ErrorKind::ResponseBody);
    assert_eq!(peer.accepted(), 1);
}

/// lysine-dev/okhttp#8472: an answer that came with the end of its connection is an answer.
#[tokio::test]
async fn an_answer_in_the_same_breath_as_the_close_is_delivered() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.answer_requests(1);
        if let Some(request) = conn.read_request() {
            conn.apply(&request);
            conn.reply("last words");
            conn.close();
        }
    });
    let pool = pool();
    fetch(&pool, get(&peer.url("/warm")))
        .await
        .expect("a response");
    let response = send(&pool, request(Method::POST, &peer.url("/pay"), "amount=10")).await;
    assert_eq!(response.expect("it was answered").body(), "last words");
    assert_eq!((peer.accepted(), peer.effects("/pay")), (1, 1));
}

/// Two keys, or one that cannot be read: nothing goes out.
#[tokio::test]
async fn a_request_with_a_doubtful_key_never_reaches_the_server() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    for keys in [
        &["\"a\"", "\"b\""][..],
        &["not-quoted"],
        &["\"a\", \"b\""],
        &["\"\""],
    ] {
        let mut doubtful = request(Method::POST, &peer.url("/pay"), "amount=10");
        for key in keys {
            doubtful
                .headers_mut()
                .append("idempotency-key", key.parse().unwrap());
        }
        let error = send(&pool, doubtful).await.expect_err("doubtful");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{keys:?}");
        assert_eq!(error.delivery(), Delivery::NotSent, "{keys:?}");
    }
    assert_eq!((peer.accepted(), pool.stats().requests), (0, 0));
}

/// Over a service that is not ours nothing is known of a failure, and nothing is assumed.
#[tokio::test]
async fn a_timeout_of_another_layer_is_unknown() {
    let peer = Peer::start(Scheme::Http, |conn| {
        while let Some(request) = conn.read_request() {
            conn.apply(&request);
            if request.id() == "/fast" {
                conn.reply("ok");
            }
        }
    });
    let pool = pool();
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(policy()))
        .timeout(Duration::from_millis(30))
        .service(pool.clone());
    let call = |request| client.clone().oneshot(request);
    let post = request(Method::POST, &peer.url("/pay"), "amount=10");
    let error = call(post)
        .await
        .map(|_: Response<ResponseBody>| ())
        .expect_err("slow");
    assert_eq!(
        (error.kind(), error.delivery()),
        (ErrorKind::Service, Delivery::Unknown)
    );
    assert_eq!((error.resends(), peer.effects("/pay")), (0, 1));
    let error = call(request(Method::GET, &peer.url("/slow"), ""))
        .await
        .map(|_| ())
        .expect_err("slow");
    assert_eq!((error.resends(), peer.effects("/slow")), (1, 2));
    assert!(
        call(request(Method::GET, &peer.url("/fast"), ""))
            .await
            .is_ok()
    );
}

/// One seeded storm of scripts. Whatever the server does, and wherever it stops: an unkeyed request has
/// at most one effect, a keyed one exactly one once it is answered, and every answer is the caller's own.
#[test]
fn after_any_script_the_server_counts_no_second_effect() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            storm(scheme).await;
        }
    });
}

async fn storm(scheme: Scheme) {
    let seen = Arc::new(Mutex::new(std::collections::HashSet::new()));
    let peer = Peer::start(scheme, move |conn| {
        let mut random = fastrand::Rng::with_seed(conn.index as u64);
        loop {
            // Sometimes while idle, sometimes at the first byte, sometimes in the middle.
            match random.u8(0..12) {
                0 => return conn.close(),
                1 => {
                    conn.await_first_byte_or_end();
                    return conn.close();
                }
                2 => {
                    conn.await_first_byte_or_end();
                    return conn.rst();
                }
                3 => {
                    conn.read_head();
                    return conn.rst();
                }
                _ => {}
            }
            let Some(request) = conn.read_request() else {
                return;
            };
            let key = request.field("idempotency-key").map(ToOwned::to_owned);
            let act = |conn: &mut Conn, request: &Received| {
                let is_new = |key: &String| seen.lock().unwrap().insert(key.clone());
                if key.as_ref().is_none_or(is_new) {
                    conn.apply(request);
                }
            };
            match random.u8(0..12) {
                0 => {
                    act(conn, &request);
                    return conn.close();
                }
                1 => {
                    act(conn, &request);
                    return conn.rst();
                }
                2 => {
                    act(conn, &request);
                    conn.send("HTTP/1.1 200 OK\r\nContent-");
                    return conn.close();
                }
                3 => {
                    act(conn, &request);
                    conn.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
                    return conn.rst();
                }
                4 => {
                    act(conn, &request);
                    conn.reply_with("Connection: close\r\n", &request.id());
                    return conn.close();
                }
                5 => conn.send("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"),
                _ => {
                    act(conn, &request);
                    conn.reply(&request.id());
                }
            }
        }
    });
    let pool = pool();
    let mut random = fastrand::Rng::with_seed(11);
    let (mut answered, mut keyed_answered) = (0, 0);
    for round in 0..250 {
        let id = format!("{round}");
        let method = random
            .choice([Method::POST, Method::POST, Method::PUT, Method::GET])
            .unwrap();
        let keyed = method == Method::POST && random.bool();
        let size = if random.u8(0..10) == 0 {
            300_000
        } else {
            random.usize(0..200)
        };
        let mut sent = request(method.clone(), &peer.url("/"), "x".repeat(size));
        sent.headers_mut().insert("x-id", id.parse().unwrap());
        if keyed {
            sent = IdempotencyKey::random().attach(sent).expect("no key yet");
        }
        let class = policy().class_of(&sent).expect("a fine key");
        let outcome = send(&pool, sent).await;
        let effects = peer.effects(&id);
        let case = format!("{scheme} {round} {method} {class}: {outcome:?}");
        match class {
            Class::Unkeyed | Class::Keyed => assert!(effects <= 1, "twice: {case}"),
            // Sent again by right: the method says that it makes no difference.
            _ => assert!(effects <= 3, "{case}"),
        }
        match outcome {
            Ok(response) if response.status() == 200 => {
                answered += 1;
                keyed_answered += usize::from(keyed);
                assert!(effects >= 1, "answered without an effect: {case}");
                let own = method == Method::HEAD || *response.body() == id;
                assert!(own, "somebody else's answer: {case}");
            }
            Ok(_) => {}
            Err(error) if !error.may_have_been_processed() => {
                assert_eq!(effects, 0, "called not sent: {case}");
            }
            Err(_) => {}
        }
    }
    assert!(
        answered > 100 && keyed_answered > 20,
        "the storm was too strong: {answered}"
    );
    eventually("nothing is held", || pool.stats().busy == 0).await;
}
