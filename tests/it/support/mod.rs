//! What the tests are written in: a scripted peer, certificates for it, and a client for it.

mod clock;
mod logs;
mod peer;
mod tls;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use idempool::{Builder, Pool, ResponseBody};

pub(crate) use clock::{HeldClock, yield_until};
pub(crate) use logs::Logs;
pub(crate) use peer::{Conn, Ended, Gate, Peer, Received, Scheme};
pub(crate) use tls::{
    Identity, Names, client_config, client_config_of, client_config_with, server_config,
    server_config_asking_for_identity,
};

/// Both schemes, for promises that hold over each.
pub(crate) const BOTH: [Scheme; 2] = [Scheme::Http, Scheme::Https];

/// A pool that trusts the scripted peers, with everything else at its default.
pub(crate) fn pool() -> Pool {
    builder().build()
}

/// The builder of such a pool.
pub(crate) fn builder() -> Builder {
    Pool::builder().tls_config(client_config())
}

/// A GET without anything special.
pub(crate) fn get(url: &str) -> Request<Full<Bytes>> {
    Request::get(url)
        .body(Full::default())
        .expect("a valid request")
}

/// A POST with this body.
pub(crate) fn post(url: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(url)
        .body(Full::new(body.into()))
        .expect("a valid request")
}

/// Reads a response to its end.
pub(crate) async fn read(response: Response<ResponseBody>) -> Result<Bytes, idempool::Error> {
    Ok(response.into_body().collect().await?.to_bytes())
}

/// Reads a response as far as it goes: what came, and the error that ended it, if one did.
pub(crate) async fn read_until_error(
    response: Response<ResponseBody>,
) -> (Vec<u8>, Option<idempool::Error>) {
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => bytes.extend(frame.into_data().unwrap_or_default()),
            Err(error) => return (bytes, Some(error)),
        }
    }
    assert!(body.is_end_stream(), "an end that is not one");
    (bytes, None)
}

/// Sends a request, reads the whole response, and gives its body as text.
pub(crate) async fn fetch(
    pool: &Pool,
    request: Request<Full<Bytes>>,
) -> Result<String, idempool::Error> {
    let body = read(pool.send(request).await?).await?;
    Ok(String::from_utf8(body.to_vec()).expect("text"))
}

/// Polls the future so many times, each time when it was woken, and drops it. `None` unless it ended first.
pub(crate) async fn drop_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            // Dropped where it stands: right after the poll in which it began to wait.
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Waits for what another thread or the kernel is about to do. Fails after ten seconds, which no
/// machine that can run the tests needs.
#[allow(clippy::disallowed_methods)]
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(
            started.elapsed() < Duration::from_secs(10),
            "never happened: {what}"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// As [`eventually`], but stops the runtime's thread meanwhile: nothing of the pool's moves, so that
/// what the kernel was told is there before any task has seen it.
pub(crate) fn hold_runtime_until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("never happened: {what}");
}

/// Runs a test body on a current-thread and on a multi-thread runtime.
pub(crate) fn on_both_runtimes<F>(test: impl Fn() -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let current = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    current.expect("a runtime").block_on(test());
    let multi = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let multi = multi.expect("a runtime");
    // As a task, so that it runs on a worker and not beside them.
    multi
        .block_on(multi.spawn(test()))
        .expect("the test passes");
}
