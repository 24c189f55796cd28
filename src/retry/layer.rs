//! The tower layer that sends a request again where the policy says so.
//!
//! It does what [`RetryPolicy`] decides and nothing else: no rule lives here. It works over any tower
//! service of requests with a [`ReplayBody`], and knows a pool only by the errors and extensions that
//! come back.
//!
//! # Invariants
//!
//! * A response is dropped before the wait for the next attempt, so a wait holds no connection.
//! * Nothing runs outside the future: to drop it is to stop everything.
//! * What has been through one retry layer is final for every layer above.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, Request, Response};
use tower_layer::Layer;
use tower_service::Service;

use crate::clock::{self, Instant};
use crate::delivery::{Delivery, FreshConnection, Repeatable, ResendCount};
use crate::error::{Attempt, BoxError, EarlierAttempts, Error, ErrorKind, Phase};
use crate::origin::Origin;
use crate::retry::idempotency::{Class, IdempotencyKey};
use crate::retry::policy::{Decision, History, RetryPolicy, Situation};
use crate::retry::replay::{Replay, ReplayBody};
use crate::retry::retry_after::retry_after;
use crate::retry::table::{Evidence, classify_error};
use crate::stats::{Refusal, RetryLedger};
use crate::timings::Timings;

/// Puts a [`Retry`] around a service.
///
/// ```
/// use idempool::{ReplayBody, RetryLayer, RetryPolicy};
/// use tower::{ServiceBuilder, ServiceExt};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// let service = ServiceBuilder::new()
///     .layer(RetryLayer::new(RetryPolicy::default()))
///     .service_fn(|_: http::Request<ReplayBody>| async {
///         Ok::<_, std::io::Error>(http::Response::new(()))
///     });
/// let request = http::Request::get("http://pay.example/").body(ReplayBody::empty())?;
/// assert_eq!(service.oneshot(request).await?.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryLayer {
    policy: Arc<RetryPolicy>,
}

impl RetryLayer {
    /// Creates a layer; all services it is put around share the policy's budget.
    pub fn new(policy: RetryPolicy) -> Self {
        RetryLayer {
            policy: Arc::new(policy),
        }
    }
}

impl<S> Layer<S> for RetryLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        Retry {
            inner,
            policy: self.policy.clone(),
        }
    }
}

/// A service that sends failed requests again, where that is safe and the policy wants it.
///
/// Every attempt has the same method, target, version, header and body. Each resend carries the
/// extensions [`FreshConnection`] and [`ResendCount`]. The caller gets the last real outcome, never one
/// made up here; only the deadline makes an error of its own.
///
/// A response carries [`ResendCount`] in its extensions, and [`Refusal`] if it is a failure that was
/// not retried. An error tells the same by [`Error::resends`] and [`Error::refusal`], and its
/// [`delivery`](Error::delivery) is that of the *whole*: the least safe one of all its attempts.
///
/// Retry layers do not multiply: what comes out of one is final for every other one above it, which
/// notes [`Refusal::AlreadyRetried`] where it would have acted.
///
/// # Cancel safety
/// To drop the future drops the attempt or the wait that it is in. Nothing is sent afterwards. Whether
/// the dropped attempt had an effect is unknown, as with any request.
#[derive(Clone, Debug)]
pub struct Retry<S> {
    inner: S,
    policy: Arc<RetryPolicy>,
}

impl<S> Retry<S> {
    /// Creates the service without a layer.
    pub fn new(inner: S, policy: RetryPolicy) -> Self {
        Retry {
            inner,
            policy: Arc::new(policy),
        }
    }
}

impl<S, B> Service<Request<ReplayBody>> for Retry<S>
where
    S: Service<Request<ReplayBody>, Response = Response<B>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = Response<B>;
    type Error = Error;
    type Future = RetryFuture<B>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx).map_err(own)
    }

    fn call(&mut self, request: Request<ReplayBody>) -> RetryFuture<B> {
        // The clone that was polled ready is the one to call; the new one is not ready yet.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        RetryFuture(Box::pin(run(ready, self.policy.clone(), request)))
    }
}

/// The future of a [`Retry`].
pub struct RetryFuture<B>(Pin<Box<dyn Future<Output = Result<Response<B>, Error>> + Send>>);

impl<B> Future for RetryFuture<B> {
    type Output = Result<Response<B>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl<B> fmt::Debug for RetryFuture<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryFuture").finish_non_exhaustive()
    }
}

/// A response extension: this response has been through a retry layer.
#[derive(Clone, Copy)]
struct Passed;

async fn run<S, B>(
    mut service: S,
    policy: Arc<RetryPolicy>,
    request: Request<ReplayBody>,
) -> Result<Response<B>, Error>
where
    S: Service<Request<ReplayBody>, Response = Response<B>>,
    S::Error: Into<BoxError>,
{
    let class = policy.class_of(&request).map_err(Error::with_passed)?;
    let (parts, body) = request.into_parts();
    if let Some(key) = parts.extensions.get::<IdempotencyKey>()
        && let Some(payload) = body.whole()
    {
        key.bind(&parts.method, parts.uri.path(), payload)
            .map_err(Error::with_passed)?;
    }
    let (mut body, replay) = body.split();
    let mut course = Course::begin(&policy, class, &parts, replay);
    let mut ready = true;
    loop {
        if course.is_late() {
            return Err(course.deadline_error(false));
        }
        if !ready {
            let readiness = std::future::poll_fn(|cx| service.poll_ready(cx));
            match course.in_time(readiness).await {
                Some(Ok(())) => {}
                // Not this attempt's failure to retry: the service itself is broken.
                Some(Err(error)) => return Err(course.finish_error(own(error), None)),
                None => return Err(course.deadline_error(false)),
            }
        }
        ready = false;
        let attempt = course.attempt(&parts, body);
        let exchange = service.call(attempt);
        let Some(outcome) = course.in_time(exchange).await else {
            course.worst = Delivery::Unknown;
            return Err(course.deadline_error(true));
        };
        let outcome = outcome.map_err(own);
        let (next, wait) = match course.judge(&outcome) {
            Next::Return(refusal) => return course.finish(outcome, refusal),
            Next::Resend { body, wait } => (body, wait),
        };
        course.last_error = outcome.err();
        body = next;
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

/// One logical request on its way.
struct Course<'p> {
    policy: &'p RetryPolicy,
    class: Class,
    origin: Option<Origin>,
    replay: Replay,
    deadline: Option<Instant>,
    history: History,
    /// The least safe delivery of all attempts that ended.
    worst: Delivery,
    /// The error before the attempt that runs, to show where the time went.
    last_error: Option<Error>,
    /// All attempts but the one that runs.
    earlier: Vec<Attempt>,
}

enum Next {
    Return(Option<Refusal>),
    Resend { body: ReplayBody, wait: Duration },
}

impl<'p> Course<'p> {
    fn begin(policy: &'p RetryPolicy, class: Class, parts: &Parts, replay: Replay) -> Self {
        let now = clock::now();
        let origin = Origin::of(&parts.uri);
        if let Some(budget) = policy.shared_budget() {
            budget.deposit(origin.as_ref(), now);
        }
        Course {
            policy,
            class,
            origin,
            replay,
            deadline: policy.limit().and_then(|limit| now.checked_add(limit)),
            history: History::default(),
            worst: Delivery::NotSent,
            last_error: None,
            earlier: Vec::new(),
        }
    }

    fn is_late(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| clock::now() >= deadline)
    }

    /// `None` when the deadline comes first.
    async fn in_time<F: Future>(&self, future: F) -> Option<F::Output> {
        match self.deadline {
            Some(deadline) => tokio::time::timeout_at(deadline, future).await.ok(),
            None => Some(future.await),
        }
    }

    /// The request as it was given, but for the extensions, which are not on the wire.
    fn attempt(&self, parts: &Parts, body: ReplayBody) -> Request<ReplayBody> {
        let mut request = Request::from_parts(parts.clone(), body);
        let extensions = request.extensions_mut();
        extensions.insert(ResendCount(self.history.resends));
        if self.history.resends > 0 {
            extensions.insert(FreshConnection);
        }
        let is_repeatable = self.class != Class::Unkeyed
            && self.replay.is_lasting()
            && self.policy.allows_another(&self.history);
        if is_repeatable {
            extensions.insert(Repeatable);
        } else {
            // A layer above would not send it again either, once it has been through this one.
            extensions.remove::<Repeatable>();
        }
        request
    }

    /// Decides, and notes the decision wherever it is counted.
    fn judge<B>(&mut self, outcome: &Result<Response<B>, Error>) -> Next {
        let now = clock::now();
        let (evidence, asked, passed) = match outcome {
            Ok(response) => (
                self.policy
                    .evidence_of(response.status(), response.headers()),
                wait_asked_for(response.headers()),
                response.extensions().get::<Passed>().is_some(),
            ),
            Err(error) => (classify_error(error), None, error.has_passed()),
        };
        self.worst = self.worst.max(match outcome {
            Ok(_) => evidence.delivery(),
            Err(error) => error.delivery(),
        });
        let situation = Situation {
            evidence,
            class: self.class,
            body_ready: self.replay.is_ready(),
            already_retried: passed,
            rejections_trusted: self.policy.trusts_rejections_of(self.origin.as_ref()),
            retry_after: asked,
            time_left: self.deadline.map(|at| at.saturating_duration_since(now)),
        };
        let refusal = match self.policy.decide(&situation, &self.history) {
            Decision::Stop(refusal) => refusal,
            Decision::Resend { wait, reason } => match self.afford(evidence, now) {
                Err(refusal) => Some(refusal),
                Ok(body) => {
                    self.history.add(evidence, wait);
                    let error = outcome.as_ref().err();
                    self.earlier.push(Attempt {
                        status: outcome.as_ref().ok().map(Response::status),
                        kind: error.map(Error::kind),
                        delivery: error.map_or(evidence.delivery(), Error::delivery),
                        reused: match outcome {
                            Ok(response) => {
                                let timings = response.extensions().get::<Timings>();
                                timings.map(|timings| timings.connection().is_reused())
                            }
                            Err(error) => error.is_reused(),
                        },
                        bytes_taken: error.map_or(0, Error::bytes_taken),
                        reason,
                        wait,
                    });
                    if let Some(ledger) = ledger(outcome) {
                        ledger.0.retried(reason);
                    }
                    tracing::debug!(
                        "http.request.resend_count" = self.history.resends,
                        "http.response.status_code" = status(outcome),
                        "error.type" = error_type(outcome),
                        "server.address" = self.origin.as_ref().map(Origin::host),
                        class = self.class.as_str(),
                        reason = reason.as_str(),
                        wait = ?wait,
                        "sending the request again"
                    );
                    return Next::Resend { body, wait };
                }
            },
        };
        // What an inner layer refused keeps that layer's reason, and was counted there.
        let refusal = refusal.filter(|_| !(passed && refusal_of(outcome).is_some()));
        if let Some(refusal) = refusal {
            if let Some(ledger) = ledger(outcome) {
                ledger.0.refused(refusal);
            }
            tracing::debug!(
                "idempool.retry.refused" = refusal.as_str(),
                "http.request.resend_count" = self.history.resends,
                "http.response.status_code" = status(outcome),
                "error.type" = error_type(outcome),
                "server.address" = self.origin.as_ref().map(Origin::host),
                class = self.class.as_str(),
                "not sending the request again"
            );
        }
        Next::Return(refusal)
    }

    /// The budget first: to make the next body takes a one-shot stream from the attempt before, which
    /// may still be sending it behind the response that we are about to return.
    fn afford(&self, evidence: Evidence, now: Instant) -> Result<ReplayBody, Refusal> {
        let affordable = evidence.is_proof_of_no_effect()
            || self
                .policy
                .shared_budget()
                .is_none_or(|budget| budget.withdraw(self.origin.as_ref(), now));
        if !affordable {
            return Err(Refusal::Budget);
        }
        self.replay.next().ok_or(Refusal::BodyNotReplayable)
    }

    fn finish<B>(
        &self,
        outcome: Result<Response<B>, Error>,
        refusal: Option<Refusal>,
    ) -> Result<Response<B>, Error> {
        let mut response = outcome.map_err(|error| self.finish_error(error, refusal))?;
        let extensions = response.extensions_mut();
        let before = extensions.get::<ResendCount>().map_or(0, |count| count.0);
        extensions.insert(ResendCount(before.saturating_add(self.history.resends)));
        extensions.insert(Passed);
        if !self.earlier.is_empty() {
            extensions.insert(EarlierAttempts(self.earlier.clone().into()));
        }
        if let Some(refusal) = refusal {
            extensions.insert(refusal);
        }
        Ok(response)
    }

    fn finish_error(&self, error: Error, refusal: Option<Refusal>) -> Error {
        let resends = error.resends().saturating_add(self.history.resends);
        let delivery = self.worst.max(error.delivery());
        let error = error
            .with_resends(resends)
            .with_delivery(delivery)
            .with_passed();
        let error = match self.earlier.is_empty() {
            true => error,
            false => error.with_earlier_attempts(self.earlier.clone()),
        };
        match refusal {
            Some(refusal) => error.with_refusal(refusal),
            None => error,
        }
    }

    fn deadline_error(&mut self, in_exchange: bool) -> Error {
        let phase = match self.history.resends {
            _ if in_exchange => Phase::Unknown,
            0 => Phase::Prepare,
            _ => Phase::Backoff,
        };
        let mut error = Error::new(ErrorKind::Deadline, phase).with_delivery(self.worst);
        if let Some(origin) = &self.origin {
            error = error.with_origin(origin);
        }
        if let Some(cause) = self.last_error.take() {
            error = error.with_source(cause);
        }
        self.finish_error(error, Some(Refusal::Deadline))
    }
}

fn own(error: impl Into<BoxError>) -> Error {
    Error::from_service(error.into())
}

fn wait_asked_for(headers: &HeaderMap) -> Option<Duration> {
    retry_after(headers, clock::wall())
}

fn ledger<B>(outcome: &Result<Response<B>, Error>) -> Option<&RetryLedger> {
    match outcome {
        Ok(response) => response.extensions().get::<Timings>().map(|t| &t.ledger),
        Err(error) => error.ledger(),
    }
}

fn refusal_of<B>(outcome: &Result<Response<B>, Error>) -> Option<Refusal> {
    match outcome {
        Ok(response) => response.extensions().get().copied(),
        Err(error) => error.refusal(),
    }
}

fn status<B>(outcome: &Result<Response<B>, Error>) -> Option<u16> {
    outcome
        .as_ref()
        .ok()
        .map(|response| response.status().as_u16())
}

fn error_type<B>(outcome: &Result<Response<B>, Error>) -> Option<&'static str> {
    outcome.as_ref().err().map(|error| error.kind().as_str())
}
