//! Promises of the layer, against a scripted service on a paused clock.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Method, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use tower::{Service, ServiceExt};
use tower_layer::Layer;

use crate::clock::{self, Instant};
use crate::delivery::Repeatable;
use crate::error::{BoxError, Error, ErrorKind, Phase, Trace};
use crate::retry::*;
use crate::stats::{Counters, Refusal, RetryLedger, RetryReason};
use crate::timings::{ConnectionFacts, Timings};
use crate::{Delivery, FreshConnection, ResendCount, TreatAsIdempotent};

/// What the peer does with one attempt.
#[derive(Clone)]
enum Act {
    Answer(u16),
    /// An answer with one header field.
    AnswerWith(u16, &'static str, &'static str),
    /// Fails before anything was sent.
    NoConnection,
    HandBack,
    /// Reads the request and closes a connection that had carried others before.
    CloseReused,
    CloseFresh,
    /// Reads the request and breaks with an error of its own.
    Foreign,
    /// Reads the request and never answers.
    Stall,
    /// Answers without reading the request body.
    AnswerUnread(u16),
}

/// One attempt as it arrived.
#[derive(Clone, Debug)]
struct Seen {
    at: Instant,
    head: String,
    body: Bytes,
    fresh: bool,
    count: Option<u32>,
    repeatable: bool,
}

impl Seen {
    fn wire(&self) -> (&str, &Bytes) {
        (&self.head, &self.body)
    }
}

/// A service that plays a script; the last act repeats. A clone is not ready until it was asked.
struct Script {
    acts: Arc<Mutex<VecDeque<Act>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    counters: Arc<Counters>,
    ready: bool,
}

impl Clone for Script {
    fn clone(&self) -> Self {
        Script {
            acts: self.acts.clone(),
            seen: self.seen.clone(),
            counters: self.counters.clone(),
            ready: false,
        }
    }
}

impl Script {
    fn new(acts: impl IntoIterator<Item = Act>) -> Self {
        Script {
            acts: Arc::new(Mutex::new(acts.into_iter().collect())),
            seen: Arc::default(),
            counters: Arc::new(Counters::new()),
            ready: false,
        }
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn attempts(&self) -> usize {
        self.seen().len()
    }

    async fn send(
        &self,
        policy: RetryPolicy,
        request: Request<ReplayBody>,
    ) -> Result<Response<Full<Bytes>>, Error> {
        RetryLayer::new(policy)
            .layer(self.clone())
            .oneshot(request)
            .await
    }
}

impl Service<Request<ReplayBody>> for Script {
    type Response = Response<Full<Bytes>>;
    type Error = BoxError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.ready),
            "called without being ready"
        );
        let act = {
            let mut acts = self.acts.lock().unwrap();
            if acts.len() > 1 {
                acts.pop_front().unwrap()
            } else {
                acts[0].clone()
            }
        };
        let (seen, ledger) = (self.seen.clone(), RetryLedger(self.counters.clone()));
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let length = body.size_hint().exact();
            let mut one = Seen {
                at: clock::now(),
                head: format!(
                    "{} {} {:?} {:?} {length:?}",
                    parts.method,
                    parts.uri,
                    parts.version,
                    parts
                        .headers
                        .iter()
                        .map(|(n, v)| (n, v.as_bytes()))
                        .collect::<Vec<_>>()
                ),
                body: Bytes::new(),
                fresh: parts.extensions.get::<FreshConnection>().is_some(),
                count: parts.extensions.get::<ResendCount>().map(|count| count.0),
                repeatable: parts.extensions.get::<Repeatable>().is_some(),
            };
            if !matches!(
                act,
                Act::NoConnection | Act::HandBack | Act::AnswerUnread(_)
            ) {
                one.body = body.collect().await?.to_bytes();
            }
            seen.lock().unwrap().push(one);
            play(act, ledger).await
        })
    }
}

async fn play(act: Act, ledger: RetryLedger) -> Result<Response<Full<Bytes>>, BoxError> {
    let connection = |served| ConnectionFacts {
        id: 1,
        peer: None,
        served,
        idle: (served > 0).then_some(Duration::from_secs(1)),
        dial: Default::default(),
        handshake: None,
    };
    let closed = |served| {
        Error::new(ErrorKind::ConnectionClosed, Phase::ResponseHead)
            .with_trace(Trace {
                taken: 100,
                ..Trace::default()
            })
            .with_connection(connection(served))
    };
    let error = match act {
        Act::Answer(status) | Act::AnswerUnread(status) | Act::AnswerWith(status, ..) => {
            let mut response = Response::builder().status(status);
            if let Act::AnswerWith(_, name, value) = act {
                response = response.header(name, value);
            }
            let timings = Timings {
                acquire: Duration::ZERO,
                head: Duration::ZERO,
                connection: connection(0),
                ledger,
            };
            let body = Full::new(Bytes::from(format!("answer {status}")));
            return Ok(response.extension(timings).body(body).expect("a response"));
        }
        Act::Stall => return std::future::pending().await,
        Act::Foreign => return Err("a foreign error".into()),
        Act::NoConnection => Error::before_sending(ErrorKind::Connect, Phase::Connect),
        Act::HandBack => Error::before_sending(ErrorKind::ConnectionClosed, Phase::Send),
        Act::CloseReused => closed(3),
        Act::CloseFresh => closed(0),
    };
    Err(Box::new(error.with_ledger(ledger)))
}

fn policy() -> RetryPolicy {
    RetryPolicy::default().jitter_seed(1)
}

fn request(method: Method) -> Request<ReplayBody> {
    Request::builder()
        .method(method)
        .uri("http://pay.example/payments?x=1")
        .header("signature", "abc")
        .body("amount=10".into())
        .expect("a request")
}

fn get() -> Request<ReplayBody> {
    request(Method::GET)
}

fn post() -> Request<ReplayBody> {
    request(Method::POST)
}

fn keyed() -> Request<ReplayBody> {
    IdempotencyKey::new("k-1")
        .expect("a key")
        .attach(post())
        .expect("no key yet")
}

/// RFC 9110 section 9.2.2 (R-02, B11).
#[tokio::test(start_paused = true)]
async fn post_without_key_is_not_sent_again_once_it_was_read() {
    for act in [Act::CloseReused, Act::CloseFresh, Act::Foreign] {
        let peer = Script::new([act]);
        let error = peer.send(policy(), post()).await.expect_err("closed");
        assert_eq!(peer.attempts(), 1);
        assert_eq!(error.refusal(), Some(Refusal::MethodNotIdempotent));
        assert_eq!(error.delivery(), Delivery::Unknown);
    }
    for status in [408, 429, 500, 502, 503, 504] {
        let peer = Script::new([Act::Answer(status)]);
        let response = peer.send(policy(), post()).await.expect("an answer");
        assert_eq!((peer.attempts(), response.status().as_u16()), (1, status));
    }
}

/// The caller knows better (RFC 9110 section 9.2.2; B11, B27).
#[tokio::test(start_paused = true)]
async fn post_that_the_caller_calls_idempotent_is_sent_again() {
    let peer = Script::new([Act::CloseReused, Act::Answer(200)]);
    let mut marked = post();
    marked.extensions_mut().insert(TreatAsIdempotent);
    let response = peer.send(policy(), marked).await.expect("an answer");
    assert_eq!((peer.attempts(), response.status().as_u16()), (2, 200));
}

/// The server did not act on it (RFC 9110 section 15.5.20, RFC 8470 section 5.2; ).
#[tokio::test(start_paused = true)]
async fn post_that_the_server_refused_is_sent_again_once() {
    for status in [421, 425] {
        let peer = Script::new([Act::Answer(status), Act::Answer(201)]);
        let response = peer.send(policy(), post()).await.expect("an answer");
        assert_eq!((peer.attempts(), response.status().as_u16()), (2, 201));
        let peer = Script::new([Act::Answer(status)]);
        let response = peer.send(policy(), post()).await.expect("an answer");
        assert_eq!((peer.attempts(), response.status().as_u16()), (2, status));
    }
}

/// A failed automatic retry is not retried (RFC 9110 section 9.2.2; R-04).
#[tokio::test(start_paused = true)]
async fn server_that_always_closes_sees_a_get_twice_and_a_keyed_post_up_to_the_cap() {
    for (request, attempts) in [(get(), 2), (request(Method::PUT), 2), (keyed(), 3)] {
        let peer = Script::new([Act::CloseReused, Act::CloseFresh]);
        let error = peer.send(policy(), request).await.expect_err("closed");
        assert_eq!(peer.attempts(), attempts);
        assert_eq!(error.refusal(), Some(Refusal::Attempts));
        assert_eq!(usize::try_from(error.resends()).unwrap() + 1, attempts);
    }
}

/// Idle siblings of a dead connection are suspect.
#[tokio::test(start_paused = true)]
async fn every_resend_asks_for_a_fresh_connection_and_counts_itself() {
    let peer = Script::new([Act::CloseReused, Act::Answer(503), Act::Answer(200)]);
    peer.send(policy(), keyed()).await.expect("an answer");
    let marks: Vec<_> = peer
        .seen()
        .iter()
        .map(|seen| (seen.fresh, seen.count))
        .collect();
    assert_eq!(marks, [(false, Some(0)), (true, Some(1)), (true, Some(2))]);
}

/// The mark lets the pool give up a connection that looks dead, for the layer to send the request elsewhere. So
/// it is a promise.
#[tokio::test(start_paused = true)]
async fn request_is_called_repeatable_only_where_this_layer_would_send_it_again() {
    let once = |method| {
        let mut request = request(method);
        *request.body_mut() = ReplayBody::once(Full::new(Bytes::from("amount=10")));
        request
    };
    let rows = [
        ("safe", get(), policy(), vec![true, true, false]),
        (
            "idempotent",
            request(Method::PUT),
            policy(),
            vec![true, true, false],
        ),
        ("keyed", keyed(), policy(), vec![true, true, false]),
        ("unkeyed", post(), policy(), vec![false]),
        (
            "a stream that exists once",
            once(Method::PUT),
            policy(),
            vec![false],
        ),
        (
            "the policy has one attempt",
            get(),
            RetryPolicy::none(),
            vec![false],
        ),
    ];
    for (name, request, policy, expected) in rows {
        let peer = Script::new([Act::Answer(502)]);
        // What a layer further out promised does not count: it will not act.
        let outer = Retry::new(Retry::new(peer.clone(), policy), self::policy());
        outer.oneshot(request).await.expect("an answer");
        let marks: Vec<_> = peer.seen().iter().map(|seen| seen.repeatable).collect();
        assert_eq!(marks, expected, "{name}");
    }
}

/// After a stale connection at once, after a fresh one not before a wait (I-13).
#[tokio::test(start_paused = true)]
async fn resend_after_a_stale_connection_is_immediate_and_after_a_fresh_one_waits() {
    for (act, immediate) in [(Act::CloseReused, true), (Act::CloseFresh, false)] {
        let peer = Script::new([act, Act::Answer(200)]);
        peer.send(policy(), keyed()).await.expect("an answer");
        let seen = peer.seen();
        assert_eq!(seen[1].at == seen[0].at, immediate);
    }
}

/// No retry once a response head was delivered.
#[tokio::test(start_paused = true)]
async fn request_whose_response_was_delivered_is_not_sent_again() {
    let sent = Arc::new(Mutex::new(0));
    let count = sent.clone();
    let broken = tower::service_fn(move |_: Request<ReplayBody>| {
        *count.lock().unwrap() += 1;
        async { Err::<Response<()>, _>(Error::new(ErrorKind::ResponseBody, Phase::ResponseBody)) }
    });
    let error = Retry::new(broken, policy())
        .oneshot(get())
        .await
        .expect_err("broken");
    assert_eq!(*sent.lock().unwrap(), 1);
    assert_eq!(error.refusal(), Some(Refusal::Committed));
}

/// A body that was read is not replayed as an empty one (R-08, B21, B22).
#[tokio::test(start_paused = true)]
async fn one_shot_body_that_was_read_ends_the_retries_with_the_answer() {
    let peer = Script::new([Act::Answer(503), Act::Answer(200)]);
    let body = ReplayBody::once(Full::new(Bytes::from_static(b"stream")));
    let response = peer
        .send(policy(), get().map(|_| body))
        .await
        .expect("an answer");
    assert_eq!((peer.attempts(), response.status().as_u16()), (1, 503));
    assert_eq!(
        response.extensions().get(),
        Some(&Refusal::BodyNotReplayable)
    );
}

#[tokio::test(start_paused = true)]
async fn one_shot_body_that_nobody_read_goes_with_the_next_attempt() {
    for act in [Act::NoConnection, Act::HandBack, Act::AnswerUnread(425)] {
        let peer = Script::new([act, Act::Answer(201)]);
        let body = ReplayBody::once(Full::new(Bytes::from_static(b"stream")));
        let response = peer
            .send(policy(), post().map(|_| body))
            .await
            .expect("an answer");
        assert_eq!((peer.attempts(), response.status().as_u16()), (2, 201));
        assert_eq!(peer.seen()[1].body, "stream");
    }
}

/// Not the old length with a new body (B26).
#[tokio::test(start_paused = true)]
async fn factory_body_of_another_length_is_not_sent() {
    let calls = Mutex::new(0);
    let body = ReplayBody::from_fn(move || {
        let mut calls = calls.lock().unwrap();
        *calls += 1;
        Full::new(Bytes::from("x".repeat(*calls)))
    });
    let peer = Script::new([Act::Answer(503), Act::Answer(200)]);
    let response = peer
        .send(policy(), get().map(|_| body))
        .await
        .expect("an answer");
    assert_eq!((peer.attempts(), response.status().as_u16()), (1, 503));
}

/// Same method, target, header, key, body and length; the key is on the first attempt already and is
/// never replaced (R-09, I-09, B18, B19, B26).
#[tokio::test(start_paused = true)]
async fn every_attempt_is_the_same_to_the_byte() {
    let factory = || Full::new(Bytes::from_static(b"amount=10"));
    for body in [ReplayBody::from("amount=10"), ReplayBody::from_fn(factory)] {
        let peer = Script::new([Act::CloseReused, Act::Answer(503), Act::Answer(200)]);
        peer.send(policy(), keyed().map(|_| body))
            .await
            .expect("an answer");
        let seen = peer.seen();
        assert_eq!(seen.len(), 3);
        assert_eq!(seen[0].body, "amount=10");
        assert!(seen[0].head.contains("idempotency-key"));
        assert!(
            seen.iter().all(|attempt| attempt.wire() == seen[0].wire()),
            "{seen:?}"
        );
    }
}

/// The deadline spans attempts and waits.
#[tokio::test(start_paused = true)]
async fn wait_that_would_outlast_the_deadline_is_not_begun() {
    let peer = Script::new([Act::AnswerWith(503, "retry-after", "1")]);
    let start = clock::now();
    let policy = policy().deadline(Duration::from_millis(300));
    let response = peer.send(policy, get()).await.expect("an answer");
    assert_eq!((response.status().as_u16(), clock::now()), (503, start));
    assert_eq!(response.extensions().get(), Some(&Refusal::Deadline));
}

#[tokio::test(start_paused = true)]
async fn attempt_that_runs_into_the_deadline_is_cut_and_its_delivery_unknown() {
    let peer = Script::new([Act::NoConnection, Act::Stall]);
    let start = clock::now();
    let policy = policy().deadline(Duration::from_secs(2));
    let error = peer.send(policy, get()).await.expect_err("too late");
    assert_eq!(clock::now() - start, Duration::from_secs(2));
    assert_eq!(error.kind(), ErrorKind::Deadline);
    assert_eq!(error.delivery(), Delivery::Unknown);
    assert_eq!(
        (error.resends(), error.refusal()),
        (1, Some(Refusal::Deadline))
    );
}

#[tokio::test(start_paused = true)]
async fn no_attempt_starts_after_the_deadline() {
    let peer = Script::new([Act::Answer(200)]);
    let error = peer
        .send(policy().deadline(Duration::ZERO), get())
        .await
        .expect_err("too late");
    assert_eq!((peer.attempts(), error.delivery()), (0, Delivery::NotSent));
    assert_eq!(error.kind(), ErrorKind::Deadline);
}

/// RFC 9110 section 10.2.3.
#[tokio::test(start_paused = true)]
async fn retry_after_is_waited_for_and_never_cut_short() {
    for status in [429, 503] {
        let peer = Script::new([
            Act::AnswerWith(status, "retry-after", "7"),
            Act::Answer(200),
        ]);
        peer.send(policy(), get()).await.expect("an answer");
        let seen = peer.seen();
        let waited = seen[1].at - seen[0].at;
        assert!(waited >= Duration::from_secs(7), "{waited:?}");
        assert!(waited < Duration::from_millis(7_200), "{waited:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_beyond_the_limit_returns_the_answer_at_once() {
    let peer = Script::new([Act::AnswerWith(503, "retry-after", "120")]);
    let start = clock::now();
    let policy = policy().max_retry_after(Duration::from_secs(5));
    let response = peer.send(policy, get()).await.expect("an answer");
    assert_eq!((peer.attempts(), clock::now()), (1, start));
    assert_eq!(
        response.extensions().get(),
        Some(&Refusal::RetryAfterTooLong)
    );
}

/// Exactly the ratio, over all clones.
#[tokio::test(start_paused = true)]
async fn budget_bounds_the_retries_of_all_clones() {
    for (ratio, retries) in [(0.15, 150), (0.4, 400), (0.7, 700)] {
        let peer = Script::new([Act::Answer(503)]);
        let policy = policy()
            .backoff(Duration::ZERO, Duration::ZERO)
            .budget(RetryBudget::new(ratio, 0, Duration::from_secs(10)));
        for _ in 0..1_000 {
            peer.send(policy.clone(), get()).await.expect("an answer");
        }
        assert_eq!(peer.attempts(), 1_000 + retries);
    }
}

/// A server may answer before it has read the body, and go on reading.
#[tokio::test(start_paused = true)]
async fn answer_returned_for_want_of_budget_leaves_its_upload_alone() {
    let upload = Arc::new(Mutex::new(None));
    let keep = upload.clone();
    let early = tower::service_fn(move |request: Request<ReplayBody>| {
        *keep.lock().unwrap() = Some(request.into_body());
        async {
            Ok::<_, Error>(
                Response::builder()
                    .status(503)
                    .body(())
                    .expect("a response"),
            )
        }
    });
    let policy = policy().budget(RetryBudget::new(0.0, 0, Duration::from_secs(10)));
    let body = ReplayBody::once(Full::new(Bytes::from_static(b"stream")));
    let answer = Retry::new(early, policy)
        .oneshot(get().map(|_| body))
        .await
        .expect("an answer");
    assert_eq!(answer.extensions().get(), Some(&Refusal::Budget));
    let rest = upload.lock().unwrap().take().expect("one attempt");
    assert_eq!(
        rest.collect().await.expect("the stream").to_bytes(),
        "stream"
    );
}

/// Free of budget and attempt count, but not for ever.
#[tokio::test(start_paused = true)]
async fn request_that_never_left_costs_no_budget_and_ends_at_its_own_cap() {
    let no_budget = RetryBudget::new(0.0, 0, Duration::from_secs(10));
    for act in [Act::NoConnection, Act::HandBack] {
        let peer = Script::new([act]);
        let policy = policy()
            .max_attempts(1)
            .max_unsent(5)
            .budget(no_budget.clone());
        let error = peer.send(policy, post()).await.expect_err("no connection");
        assert_eq!((peer.attempts(), error.resends()), (6, 5));
        assert_eq!(error.delivery(), Delivery::NotSent);
        assert_eq!(error.refusal(), Some(Refusal::Attempts));
    }
}

/// Three attempts in all; the last real answer is returned and readable.
#[tokio::test(start_paused = true)]
async fn last_answer_is_returned_with_its_body_after_the_last_attempt() {
    let peer = Script::new([Act::Answer(502), Act::Answer(504), Act::Answer(503)]);
    let response = peer.send(policy(), get()).await.expect("an answer");
    assert_eq!(peer.attempts(), 3);
    assert_eq!(response.extensions().get(), Some(&ResendCount(2)));
    assert_eq!(response.extensions().get(), Some(&Refusal::Attempts));
    let body = response
        .into_body()
        .collect()
        .await
        .expect("a body")
        .to_bytes();
    assert_eq!(body, "answer 503");
}

/// One retrying layer.
#[tokio::test(start_paused = true)]
async fn nested_layers_do_not_multiply() {
    for act in [Act::Answer(503), Act::NoConnection] {
        let peer = Script::new([act.clone()]);
        let layer = RetryLayer::new(policy().max_unsent(2));
        let nested = layer.layer(layer.layer(layer.layer(peer.clone())));
        let outcome = nested.oneshot(get()).await;
        assert_eq!(peer.attempts(), 3);
        match outcome {
            Ok(response) => {
                assert_eq!(response.extensions().get(), Some(&ResendCount(2)));
                assert_eq!(response.extensions().get(), Some(&Refusal::Attempts));
            }
            Err(error) => assert_eq!(
                (error.resends(), error.refusal()),
                (2, Some(Refusal::Attempts))
            ),
        }
        assert_eq!(peer.counters.snapshot().refusals.total(), 1, "counted once");
    }
}

#[tokio::test(start_paused = true)]
async fn outer_layer_that_would_have_acted_says_that_it_was_not_its_turn() {
    let peer = Script::new([Act::Answer(500)]);
    let inner = Retry::new(peer.clone(), policy());
    let outer = Retry::new(inner, policy().retry_500(true));
    let response = outer.oneshot(get()).await.expect("an answer");
    assert_eq!(peer.attempts(), 1);
    assert_eq!(response.extensions().get(), Some(&Refusal::AlreadyRetried));
}

/// Nothing goes on in the background.
#[tokio::test(start_paused = true)]
async fn dropped_future_sends_nothing_more() {
    let peer = Script::new([Act::AnswerWith(503, "retry-after", "5"), Act::Answer(200)]);
    let call = peer.send(policy(), get());
    assert!(
        tokio::time::timeout(Duration::from_secs(1), call)
            .await
            .is_err()
    );
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(peer.attempts(), 1);
}

/// A wait holds no connection: the response is dropped first.
#[tokio::test(start_paused = true)]
async fn discarded_answer_is_dropped_before_the_wait() {
    let alive = Arc::new(());
    let inside = alive.clone();
    let busy = tower::service_fn(move |_: Request<ReplayBody>| {
        let response = Response::builder().status(503).header("retry-after", "5");
        let response = response.body(inside.clone()).expect("a response");
        async { Ok::<_, Error>(response) }
    });
    let retry = Retry::new(busy, policy());
    let call = tokio::spawn(retry.oneshot(get()));
    tokio::time::sleep(Duration::from_secs(1)).await;
    // This handle and the one in the service that waits; the answer would have a third.
    let held = Arc::strong_count(&alive);
    call.abort();
    let _ = call.await;
    assert_eq!(held, 2);
}

/// Two keys, or one that cannot be read: nothing goes out (I-03).
#[tokio::test(start_paused = true)]
async fn request_whose_key_is_not_certain_is_not_sent() {
    let mut doubled = keyed();
    doubled
        .headers_mut()
        .append("idempotency-key", "\"k-2\"".parse().unwrap());
    let mut malformed = post();
    malformed
        .headers_mut()
        .insert("idempotency-key", "k-1".parse().unwrap());
    for request in [doubled, malformed] {
        for policy in [policy(), RetryPolicy::none()] {
            let peer = Script::new([Act::Answer(200)]);
            let request = clone(&request);
            let error = peer.send(policy, request).await.expect_err("refused");
            assert_eq!(peer.attempts(), 0);
            assert_eq!(error.kind(), ErrorKind::InvalidRequest);
            assert_eq!(error.delivery(), Delivery::NotSent);
        }
    }
}

fn clone(request: &Request<ReplayBody>) -> Request<ReplayBody> {
    let mut copy = post();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

/// Exactly one attempt in every failure (B14).
#[tokio::test(start_paused = true)]
async fn policy_none_makes_one_attempt_whatever_happens() {
    let acts = [
        Act::NoConnection,
        Act::HandBack,
        Act::CloseReused,
        Act::CloseFresh,
        Act::Foreign,
        Act::Answer(408),
        Act::Answer(421),
        Act::Answer(425),
        Act::Answer(429),
        Act::Answer(500),
        Act::Answer(503),
    ];
    for act in acts {
        for request in [get(), keyed(), post()] {
            let peer = Script::new([act.clone()]);
            let _ = peer.send(RetryPolicy::none(), request).await;
            assert_eq!(peer.attempts(), 1);
        }
    }
}

/// A stored failure does not change by asking again (I-14).
#[tokio::test(start_paused = true)]
async fn stored_answer_is_final_and_a_new_failure_is_not() {
    let peer = Script::new([Act::AnswerWith(500, "idempotent-replayed", "true")]);
    peer.send(policy(), keyed()).await.expect("an answer");
    assert_eq!(peer.attempts(), 1);
    let peer = Script::new([Act::Answer(500), Act::Answer(201)]);
    let response = peer.send(policy(), keyed()).await.expect("an answer");
    assert_eq!((peer.attempts(), response.status().as_u16()), (2, 201));
}

/// A later attempt that was never sent proves nothing about an earlier one that was.
#[tokio::test(start_paused = true)]
async fn error_tells_the_least_safe_delivery_of_all_attempts() {
    let peer = Script::new([Act::CloseReused, Act::NoConnection]);
    let error = peer
        .send(policy(), keyed())
        .await
        .expect_err("no connection");
    assert_eq!(error.kind(), ErrorKind::Connect);
    assert_eq!(error.delivery(), Delivery::Unknown);
    assert!(error.may_have_been_processed());
}

/// Every resend and every refusal has its reason in the pool's statistics (B30).
#[tokio::test(start_paused = true)]
async fn decisions_are_counted_by_reason() {
    let peer = Script::new([Act::CloseReused, Act::Answer(503), Act::Answer(503)]);
    peer.send(policy(), keyed()).await.expect("an answer");
    let stats = peer.counters.snapshot();
    assert_eq!(stats.retries.get(RetryReason::StaleConnection), 1);
    assert_eq!(stats.retries.get(RetryReason::Unavailable), 1);
    assert_eq!(stats.refusals.get(Refusal::Attempts), 1);
    assert_eq!((stats.retries.total(), stats.refusals.total()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn key_in_another_field_is_found_where_it_was_attached() {
    let field = HeaderName::from_static("paypal-request-id");
    let key = IdempotencyKey::raw("k-1").expect("a key");
    let request = key.attach_as(field.clone(), post()).expect("no key yet");
    let peer = Script::new([Act::CloseReused, Act::Answer(201)]);
    peer.send(policy(), request).await.expect("an answer");
    assert_eq!(peer.attempts(), 2);

    let mut by_hand = post();
    by_hand
        .headers_mut()
        .insert(field.clone(), "k-1".parse().unwrap());
    let peer = Script::new([Act::CloseReused, Act::Answer(201)]);
    let policy = policy().key_header(field).key_form(KeyForm::Raw);
    peer.send(policy, by_hand).await.expect("an answer");
    assert_eq!(peer.attempts(), 2);
}

proptest! {
    /// Whatever the peer does: a POST without a key is read, without the server's word that it was not
    /// acted on, at most once, and that attempt is the last one.
    #[test]
    fn unkeyed_post_has_at_most_one_attempt_of_open_effect(
        script in proptest::collection::vec(0_usize..11, 1..8)
    ) {
        let acts = [
            Act::NoConnection, Act::HandBack, Act::Answer(421), Act::Answer(425),
            Act::CloseReused, Act::CloseFresh, Act::Foreign, Act::Answer(408), Act::Answer(503),
            Act::Answer(500), Act::Answer(201),
        ];
        let last = script.len() - 1;
        let peer = Script::new(script.iter().map(|&at| acts[at].clone()));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let policy = policy().max_attempts(10).max_unsent(10).retry_500(true);
        let _ = runtime.block_on(peer.send(policy, post()));
        let open: Vec<_> = (0..peer.attempts()).filter(|&n| script[n.min(last)] >= 4).collect();
        prop_assert!(open.is_empty() || open == [peer.attempts() - 1], "{:?} of {:?}", open, script);
    }
}

/// A server's own word overrides its status, never what is safe.
#[tokio::test(start_paused = true)]
async fn pushback_field_overrides_the_status_and_not_what_is_safe() {
    let policy = policy().pushback_header(HeaderName::from_static("stripe-should-retry"));
    // (method, status, the server's word, attempts)
    let rows = [
        (Method::GET, 503, "false", 1),
        (Method::GET, 503, "true", 3),
        (Method::GET, 409, "true", 3),
        (Method::GET, 200, "true", 1),
        (Method::POST, 503, "true", 1),
        (Method::GET, 503, "perhaps", 3),
    ];
    for (method, status, word, attempts) in rows {
        let script = Script::new([Act::AnswerWith(status, "stripe-should-retry", word)]);
        let response = script.send(policy.clone(), request(method.clone())).await;
        assert_eq!(response.expect("answered").status(), status);
        assert_eq!(script.attempts(), attempts, "{method} {status} {word}");
    }
}

/// RFC 9110 section 9.2.2: a proxy must not.
#[tokio::test(start_paused = true)]
async fn proxy_sends_a_non_idempotent_request_again_on_proof_only() {
    let policy = policy()
        .proxy(true)
        .resend_not_received(true)
        .resend_incomplete(true);
    let marked = || {
        let mut request = post();
        request.extensions_mut().insert(TreatAsIdempotent);
        request
    };
    for make in [&keyed as &dyn Fn() -> Request<ReplayBody>, &marked] {
        let acts = [
            (Act::CloseReused, 1),
            (Act::CloseFresh, 1),
            (Act::HandBack, 4),
        ];
        for (act, attempts) in acts {
            let script = Script::new([act]);
            let outcome = script.send(policy.clone(), make()).await;
            outcome.expect_err("it never answers");
            assert_eq!(script.attempts(), attempts);
        }
    }
}

/// Whoever gets the last outcome can see what went before it.
#[tokio::test(start_paused = true)]
async fn earlier_attempts_are_told_with_the_last_outcome() {
    let script = Script::new([Act::CloseReused, Act::Answer(503), Act::CloseFresh]);
    let error = script.send(policy(), keyed()).await;
    let error = error.expect_err("the third attempt is the last");
    let [first, second] = error.earlier_attempts() else {
        panic!("two attempts before the last: {error:?}");
    };
    assert_eq!(first.kind, Some(ErrorKind::ConnectionClosed));
    assert_eq!((first.status, first.reused), (None, Some(true)));
    assert_eq!(first.reason, RetryReason::StaleConnection);
    assert_eq!(
        (first.delivery, first.wait),
        (Delivery::Unknown, Duration::ZERO)
    );
    assert_eq!(second.status.map(|status| status.as_u16()), Some(503));
    assert_eq!(
        (second.kind, second.reason),
        (None, RetryReason::Unavailable)
    );

    let script = Script::new([Act::Answer(503), Act::Answer(200)]);
    let response = script.send(policy(), get()).await.expect("answered");
    let earlier = response.extensions().get::<crate::EarlierAttempts>();
    assert_eq!(earlier.map(|earlier| earlier.0.len()), Some(1));
}

/// The draft, section 2.2: a key names one payload.
#[tokio::test(start_paused = true)]
async fn key_that_went_out_on_another_payload_is_refused() {
    let key = IdempotencyKey::random();
    let order = |path: &str, body: &'static str| {
        let request = Request::post(format!("http://pay.example{path}"));
        let request = request.body(ReplayBody::from(body)).expect("a request");
        key.attach(request).expect("no key yet")
    };
    let script = Script::new([Act::Answer(201)]);
    script
        .send(policy(), order("/pay", "amount=10"))
        .await
        .expect("the first");
    script
        .send(policy(), order("/pay", "amount=10"))
        .await
        .expect("a repetition");
    for (path, body) in [("/pay", "amount=11"), ("/payouts", "amount=10")] {
        let error = script
            .send(policy(), order(path, body))
            .await
            .expect_err("another payload");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert_eq!(error.delivery(), Delivery::NotSent);
    }
    assert_eq!(script.attempts(), 2);
}
