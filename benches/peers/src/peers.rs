//! The clients, each behind one function: send this request once as you are, and give what came back.
//!
//! No client is given anything that its own documentation does not offer. They all send the same bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use idempool::{BoxError, Pool, ReplayBody, Retry, RetryPolicy};
use tower::ServiceExt;

use super::script::Case;
use super::server::Lane;

/// A status and a whole body, or why there is none.
pub(crate) type Answer = Result<(StatusCode, Bytes), BoxError>;

/// One client with a connection pool.
pub(crate) trait Peer {
    /// Sends a request and reads its answer to the end.
    async fn send(&self, request: Request<Upload>) -> Answer;
}

/// Its errors say nothing of delivery: `is_connect`, `is_timeout` and the like name the step that failed.
pub(crate) fn reqwest() -> reqwest::Client {
    // The environment of whoever runs this is not to matter.
    let client = reqwest::Client::builder().no_proxy().build();
    client.expect("a client without options that can fail")
}

impl Peer for reqwest::Client {
    async fn send(&self, request: Request<Upload>) -> Answer {
        let request = reqwest::Request::try_from(request.map(reqwest::Body::wrap))?;
        let response = self.execute(request).await?;
        Ok((response.status(), response.bytes().await?))
    }
}

/// Its errors say nothing of delivery either.
pub(crate) type HyperUtil = legacy::Client<HttpConnector, Upload>;

pub(crate) fn hyper_util() -> HyperUtil {
    let mut connector = HttpConnector::new();
    // As the other clients do by themselves.
    connector.set_nodelay(true);
    legacy::Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .build(connector)
}

impl Peer for HyperUtil {
    async fn send(&self, request: Request<Upload>) -> Answer {
        whole(self.request(request).await?).await
    }
}

impl Peer for Pool {
    async fn send(&self, request: Request<Upload>) -> Answer {
        whole(Pool::send(self, request).await?).await
    }
}

/// The pool below a retry layer: quick waits to save time, and no budget, since every request here meets
/// a fault. All else is as it comes, but for the one option.
pub(crate) fn retrying(resend_not_received: bool) -> Retry<Pool> {
    const QUICK: Duration = Duration::from_micros(50);
    let policy = RetryPolicy::default()
        .backoff(QUICK, QUICK)
        .budget(None)
        .resend_not_received(resend_not_received);
    Retry::new(Pool::new(), policy)
}

impl Peer for Retry<Pool> {
    async fn send(&self, request: Request<Upload>) -> Answer {
        let request = request.map(|upload| match upload.is_end_stream() {
            true => ReplayBody::empty(),
            false => ReplayBody::from_fn(move || upload.clone()),
        });
        whole(self.clone().oneshot(request).await?).await
    }
}

async fn whole<B>(response: Response<B>) -> Answer
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    let status = response.status();
    let body = response.into_body().collect().await.map_err(Into::into)?;
    Ok((status, body.to_bytes()))
}

/// A request body; where `race` is set, the first look at it says that the request is about to go.
#[derive(Clone)]
pub(crate) struct Upload {
    frames: VecDeque<Bytes>,
    is_sized: bool,
    race: Option<Arc<Lane>>,
}

impl Upload {
    pub(crate) fn empty() -> Upload {
        Upload {
            frames: VecDeque::new(),
            is_sized: true,
            race: None,
        }
    }

    pub(crate) fn of(case: &Case, race: Option<Arc<Lane>>) -> Upload {
        let bytes = case.body();
        let piece = match (case.upload.chunked, case.upload.big) {
            (false, _) => bytes.len().max(1),
            (true, false) => 6,
            (true, true) => 50_000,
        };
        let starts = (0..bytes.len()).step_by(piece);
        let frames = starts.map(|start| bytes.slice(start..bytes.len().min(start + piece)));
        Upload {
            frames: frames.collect(),
            is_sized: !case.upload.chunked,
            race,
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(lane) = self.race.take() {
            lane.go();
        }
        Poll::Ready(self.frames.pop_front().map(|frame| Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if !self.is_sized {
            return SizeHint::default();
        }
        let left: usize = self.frames.iter().map(Bytes::len).sum();
        SizeHint::with_exact(left as u64)
    }
}
