//! A client with retries over a pool, against a peer that does whatever the input says.
//!
//! Both run on one thread over real loopback sockets, on a paused clock: it moves on only when nothing
//! else can happen, so that stalls and timeouts cost no time. A new runtime for each input begins at
//! the same instant and leaves no task behind.
//!
//! Promises checked, for any script:
//!
//! * Nothing panics, in any task.
//! * A request without a key has at most one effect; with one too, at a server that honours keys; an
//!   idempotent one no more than its attempts.
//! * An error that says "not processed" means: no effect, then or later.
//! * All attempts of a request have the same head, and the body that was given.
//! * No byte that was there before a request began is part of its answer, and no answer has parts of
//!   two connections. What a peer sends between the request's first byte and reading it cannot be told
//!   from an early answer, by anybody: nothing is promised of it. The clock of "before" is the barrier
//!   between two requests; without one there is no promise either.
//! * In the end nothing is busy or being dialled, and every connection that was opened is idle or was
//!   counted as closed, once.

#![no_main]

mod script;
mod server;

use std::net::TcpListener;
use std::pin::pin;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use idempool::{
    Class, Error, IdempotencyKey, Pool, ReplayBody, ResponseBody, Retry, RetryLayer, RetryPolicy,
    Stats,
};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::Runtime;
use tokio::signal::unix::SignalKind;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tower_layer::Layer;
use tower_service::Service;

use script::{BODY, Barrier, Call, Script, Usage};
use server::{Ledger, listen, marks_in, reset_when_dropped};

/// One for all runs: a port that changes would meet what the kernel still keeps of earlier ones.
static LISTENER: LazyLock<TcpListener> = LazyLock::new(|| {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("nonblocking");
    listener
});

/// Of the paused clock: longer than all that the pool and the policy wait for.
const LONG: Duration = Duration::from_secs(3);

/// What the kernel gets to deliver over loopback. It mostly has by the time a write returns; this is
/// for the times at which it has left the work to a thread of its own.
const DELIVERY: Duration = Duration::from_micros(300);

fuzz_target!(
    init: {
        // A write to a closed connection is an error here too. The handler outlives its runtime.
        let pipe = || tokio::signal::unix::signal(SignalKind::pipe()).map(drop);
        runtime().block_on(async { pipe() }).expect("a handler");
    },
    |script: Script| run(script)
);

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

fn run(script: Script) {
    let runtime = runtime();
    runtime.block_on(play(script));
    drop(runtime);
    // What was dialled and never accepted must not meet the next run.
    while let Ok((stream, _)) = LISTENER.accept() {
        reset_when_dropped(&stream);
    }
}

async fn play(script: Script) {
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let listener = LISTENER.try_clone().expect("a descriptor");
    let address = listener.local_addr().expect("an address");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    let peer = tokio::spawn(listen(listener, script.connections, Arc::clone(&ledger)));

    let pool = Pool::builder()
        .idle_timeout(Duration::from_millis(500))
        .max_idle_per_origin(2)
        .build();
    let policy = RetryPolicy::default()
        .backoff(Duration::from_millis(1), Duration::from_millis(5))
        .jitter_seed(7)
        .retry_500(true)
        .budget(None)
        .deadline(LONG);
    let mut client = RetryLayer::new(policy.clone()).layer(pool.clone());
    let mut floor = 0;
    let mut ended = Vec::new();
    for (number, call) in script.requests.into_iter().enumerate() {
        if pass(call.before).await {
            let mut ledger = ledger.lock().unwrap();
            if std::mem::take(&mut ledger.loose) {
                std::thread::sleep(DELIVERY);
            }
            floor = ledger.marks.len();
        }
        let id = number.to_string();
        let request = request(&format!("http://{address}/"), &id, &call);
        let class = policy.class_of(&request).expect("a readable key");
        let outcome = exchange(&mut client, request, call.usage).await;
        if let Some(Ok(answer)) = &outcome {
            check_answer(answer, &call.method, floor, &ledger.lock().unwrap());
        }
        ended.push((id, call.keyed, class, outcome));
    }
    drop(client);

    eventually("nothing is held", &pool, |stats| {
        (stats.busy, stats.dialing) == (0, 0)
    })
    .await;
    eventually("each close is counted", &pool, |stats| {
        stats.connections_opened == stats.closes.total() + stats.idle
    })
    .await;
    peer.abort();
    eventually("everything is closed", &pool, |stats| {
        (stats.idle, stats.connections_opened) == (0, stats.closes.total())
    })
    .await;

    // Only now: what was sent may have taken effect after its request was given up.
    let ledger = ledger.lock().unwrap();
    for (id, keyed, class, outcome) in &ended {
        check_effects(&ledger, id, *keyed, *class, outcome.as_ref());
    }
}

/// Lets happen what is to happen before the next request. `true` if it is a barrier.
async fn pass(barrier: Barrier) -> bool {
    match barrier {
        Barrier::None => return false,
        Barrier::Hold => {}
        Barrier::Turns(turns) => {
            for _ in 0..turns {
                yield_now().await;
            }
        }
        Barrier::Wait(time) => sleep(Duration::from_millis(u64::from(time) * 16)).await,
    }
    true
}

fn request(url: &str, id: &str, call: &Call) -> Request<ReplayBody> {
    let request = Request::builder()
        .method(call.method.clone())
        .uri(url)
        .header("x-id", id)
        .body(ReplayBody::from(Bytes::from_static(&BODY[..call.body])))
        .expect("a valid request");
    if !call.keyed {
        return request;
    }
    let key = IdempotencyKey::new(&format!("key of {id}")).expect("a valid key");
    key.attach(request).expect("no key yet")
}

/// What was received of a response.
struct Answer {
    head: http::response::Parts,
    body: Vec<u8>,
}

/// `None` if the request was cancelled.
async fn exchange(
    client: &mut Retry<Pool>,
    request: Request<ReplayBody>,
    usage: Usage,
) -> Option<Result<Answer, Error>> {
    let ready = std::future::poll_fn(|cx| client.poll_ready(cx)).await;
    ready.expect("a pool is always ready");
    let mut exchange = pin!(client.call(request));
    let response = match usage {
        Usage::Cancel(turns) => tokio::select! {
            biased;
            response = &mut exchange => response,
            () = async { for _ in 0..turns { yield_now().await } } => return None,
        },
        _ => exchange.await,
    };
    match response {
        Ok(response) => Some(Ok(receive(response, usage).await)),
        Err(error) => Some(Err(error)),
    }
}

/// Receives the body as far as it goes: its own errors say nothing that is not known already.
async fn receive(response: Response<ResponseBody>, usage: Usage) -> Answer {
    let (head, mut incoming) = response.into_parts();
    let mut body = Vec::new();
    let most = match usage {
        Usage::DropBody => 0,
        Usage::ReadOneFrame => 1,
        _ => usize::MAX,
    };
    for _ in 0..most {
        match timeout(LONG, incoming.frame()).await {
            Ok(Some(Ok(frame))) => body.extend(frame.into_data().unwrap_or_default()),
            _ => break,
        }
    }
    Answer { head, body }
}

fn check_answer(answer: &Answer, method: &Method, floor: usize, ledger: &Ledger) {
    let fields = answer.head.headers.values();
    let mut marks: Vec<_> = fields
        .flat_map(|value| marks_in(value.as_bytes()))
        .collect();
    marks.extend(marks_in(&answer.body));
    let from = |mark: &usize| *ledger.marks.get(*mark).expect("a mark that was sent");
    for mark in &marks {
        assert!(
            *mark >= floor,
            "an answer from before the request: {:?}",
            answer.head
        );
        assert_eq!(from(mark), from(&marks[0]), "an answer of two connections");
    }
    if *method == Method::HEAD {
        assert_eq!(answer.body, b"", "an answer to HEAD with content");
    }
}

fn check_effects(
    ledger: &Ledger,
    id: &str,
    keyed: bool,
    class: Class,
    outcome: Option<&Result<Answer, Error>>,
) {
    let effects = ledger.effects_of(id);
    let most = match class {
        Class::Unkeyed | Class::Keyed => 1,
        _ if keyed => 1,
        // `RetryPolicy::max_attempts`.
        _ => 3,
    };
    assert!(
        effects <= most,
        "{effects} effects of a request that is {class}"
    );
    // Those, and `RetryPolicy::max_unsent`.
    let reads = ledger.reads.get(id).copied().unwrap_or_default();
    assert!(reads <= 6, "sent {reads} times");
    if let Some(Err(error)) = outcome
        && !error.may_have_been_processed()
    {
        assert_eq!(effects, 0, "it took effect: {error:?}");
    }
}

/// Waits on the paused clock, and then on the real one too: the kernel knows no other.
async fn eventually(what: &str, pool: &Pool, holds: impl Fn(&Stats) -> bool) {
    for round in 0..1000 {
        let stats = pool.stats();
        if holds(&stats) {
            return;
        }
        yield_now().await;
        if round > 10 {
            sleep(Duration::from_millis(10)).await;
        }
        if round > 500 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    panic!("never happened: {what}: {pool:?} {}", pool.stats());
}
