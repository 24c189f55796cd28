//! The client under test: a retry layer over a pool, with quick waits and no budget.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use idempool::{
    BoxError, FreshConnection, Pool, ReplayBody, ResendCount, ResponseBody, RetryLayer,
    RetryPolicy, RetryReason, TreatAsIdempotent,
};
use tokio::time::timeout;
use tower::{Layer, Service, ServiceExt};

use super::judge::{Outcome, Report};
use super::ledger::Ledger;
use super::script::{Case, Fault, Kind};
use super::server::Lane;
use crate::support::builder;

/// Linux only: elsewhere nothing is known of the kernel's acknowledgements.
pub(crate) const HAS_NOT_RECEIVED: bool = cfg!(target_os = "linux");

/// One pool, for all cases of a lane.
pub(crate) struct Client {
    pool: Pool,
    lane: Arc<Lane>,
}

impl Client {
    pub(crate) fn new(lane: &Arc<Lane>) -> Client {
        // The server leaves many a broken connection open for a while, and so long it has its seat: thousands of
        // faults in a row must not wait for each other.
        let pool = builder()
            .max_connections(10_000)
            .max_connections_per_origin(10_000)
            .max_idle_per_origin(3)
            .build();
        let lane = Arc::clone(lane);
        Client { pool, lane }
    }

    /// Runs a case to its end and gives what the client was told and what the server saw.
    pub(crate) async fn run(&self, case: &Arc<Case>) -> (Report, Ledger) {
        self.lane.begin(case);
        let is_idle = matches!(case.faults[0], Fault::Idle(_));
        if case.reused {
            let warm = Request::get(self.url(case, "/warm"))
                .extension(FreshConnection)
                .body(ReplayBody::empty())
                .expect("a request");
            let response = self.pool.send(warm).await.expect("the warm-up is answered");
            response.into_body().collect().await.expect("an empty body");
            self.lane.warmed(is_idle).await;
        }
        let request = self.request(case);
        let after_not_received = || self.pool.stats().retries.get(RetryReason::NotReceived);
        let before = after_not_received();
        if !case.faults[0].is_race() {
            self.lane.release();
        }
        let (outcome, resends) = self.send(case, request).await;
        let after_not_received = after_not_received() - before;
        let ledger = self.lane.finish().await;
        let report = Report {
            outcome,
            resends,
            after_not_received,
        };
        (report, ledger)
    }

    fn url(&self, case: &Case, path: &str) -> String {
        match self.lane.secure.filter(|_| case.tls) {
            Some(address) => format!("https://{address}{path}"),
            None => format!("http://{}{path}", self.lane.plain),
        }
    }

    fn request(&self, case: &Case) -> Request<ReplayBody> {
        let mut request = Request::builder()
            .method(case.kind.method())
            .uri(self.url(case, &case.path()));
        if !case.reused {
            request = request.extension(FreshConnection);
        }
        if case.kind == Kind::Declared {
            request = request.extension(TreatAsIdempotent);
        }
        if let Some(key) = case.key() {
            request = request.header("idempotency-key", key);
        }
        request.body(self.body(case)).expect("a request")
    }

    fn body(&self, case: &Case) -> ReplayBody {
        let bytes = case.body();
        let race = case.faults[0].is_race().then(|| Arc::clone(&self.lane));
        if bytes.is_empty() || (!case.upload.chunked && race.is_none()) {
            return bytes.into();
        }
        let piece = match (case.upload.chunked, case.upload.big) {
            (false, _) => bytes.len(),
            (true, false) => 6,
            (true, true) => 50_000,
        };
        let is_sized = !case.upload.chunked;
        ReplayBody::from_fn(move || {
            let starts = (0..bytes.len()).step_by(piece);
            let frames = starts.map(|start| bytes.slice(start..bytes.len().min(start + piece)));
            Upload {
                frames: frames.collect(),
                is_sized,
                race: race.clone(),
            }
        })
    }

    async fn send(&self, case: &Case, request: Request<ReplayBody>) -> (Outcome, u32) {
        let policy = RetryPolicy::default()
            .backoff(Duration::from_micros(50), Duration::from_micros(50))
            .jitter_seed(case.number as u64)
            .budget(None)
            .resend_not_received(true);
        let layer = RetryLayer::new(policy);
        let stalls = case.faults.iter().any(Fault::is_stall);
        let result = if stalls {
            let limited = Limited {
                pool: self.pool.clone(),
                lane: Arc::clone(&self.lane),
                stalls: case.faults.iter().map(Fault::is_stall).collect(),
            };
            layer.layer(limited).oneshot(request).await
        } else {
            layer.layer(self.pool.clone()).oneshot(request).await
        };
        let response = match result {
            Ok(response) => response,
            Err(error) => return (failed(&error), error.resends()),
        };
        let resends = response.extensions().get();
        let resends = resends.map_or(0, |ResendCount(resends)| *resends);
        let status = response.status().as_u16();
        let reading = response.into_body().collect();
        let read = if stalls {
            match timeout(STALL, reading).await {
                Ok(read) => read,
                Err(_) => return (Outcome::GaveUp, resends),
            }
        } else {
            reading.await
        };
        let outcome = match read {
            Ok(body) => Outcome::of_answer(case, status, &body.to_bytes()),
            Err(error) => failed(&error),
        };
        (outcome, resends)
    }
}

fn failed(error: &idempool::Error) -> Outcome {
    Outcome::Failed {
        verdict: error.delivery().as_str(),
        acked: error.bytes_acked().unwrap_or_default(),
        text: error.to_string(),
    }
}

/// Any body; the first look at it says that the request is about to go.
struct Upload {
    frames: VecDeque<Bytes>,
    is_sized: bool,
    race: Option<Arc<Lane>>,
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

/// How long a client waits for a server that has stopped.
const STALL: Duration = Duration::from_millis(25);

/// A pool with a limit on the time of those attempts that meet a stall, from there on.
#[derive(Clone)]
struct Limited {
    pool: Pool,
    lane: Arc<Lane>,
    stalls: Vec<bool>,
}

impl Service<Request<ReplayBody>> for Limited {
    type Response = Response<ResponseBody>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let resend = request.extensions().get().map_or(0, |ResendCount(n)| *n);
            let attempt = usize::try_from(resend).expect("few");
            let is_limited = this.stalls.get(attempt) == Some(&true);
            let too_long = async {
                if is_limited {
                    this.lane.fault_met(attempt).await;
                    tokio::time::sleep(STALL).await;
                } else {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                result = this.pool.send(request) => Ok(result?),
                () = too_long => Err("the attempt took too long".into()),
            }
        })
    }
}
