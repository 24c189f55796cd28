//! The pool as a service: from a request to a response or to one error.
//!
//! The pool itself sends a request again only when no byte of it was taken, which is not a second
//! sending but the first one, elsewhere. All other resends are the retry layer's decision.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HOST, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::uri::{Authority, PathAndQuery};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use hyper::body::Incoming;
use tokio::time::timeout;
use tower_service::Service;
use tracing::Instrument;

use crate::clock::{Instant, now};
use crate::delivery::{
    FreshConnection, Repeatable, RequestTimeout, ResendCount, TreatAsIdempotent,
};
use crate::error::{BoxError, Error, ErrorKind, Phase};
use crate::origin::Origin;
use crate::pool::body::{After, ResponseBody};
use crate::pool::builder::{Builder, Config};
use crate::pool::lease::{Lease, Wish};
use crate::pool::state::Shared;
use crate::profile::Profile;
use crate::rules::hint;
use crate::rules::persist::{self, Persistence};
use crate::rules::plan::Need;
use crate::stats::{CloseReason, Counters, RetryLedger, Stats};
use crate::timings::Timings;
use crate::wire::http1::{Failed, Limits, RECALL_WAIT};
use crate::wire::outgoing::{Head, OutBody, Outgoing, Upload};

/// A pool of HTTP/1.1 connections. Cheap to clone; all clones share the connections.
///
/// It is a [`tower_service::Service`], always ready. Requests go to the origin that their absolute URI
/// names, or the `Host` field of a request in origin form.
///
/// When the last clone is dropped, idle connections are closed; exchanges that are under way finish.
///
/// # Cancel safety
///
/// Dropping a call closes the connection it was on, and nothing else. Dropping a response body keeps
/// the connection where reading on is cheap ([`Builder::drain`]).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// # async fn get() -> Result<(), idempool::Error> {
/// let pool = idempool::Pool::builder()
///     .idle_timeout(Duration::from_secs(30))
///     .build();
/// let request = http::Request::get("http://pay.example/payments")
///     .body(idempool::ReplayBody::empty())
///     .expect("a valid request");
/// let response = pool.send(request).await?;
/// println!("{}\n{}", response.status(), pool.stats());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Pool {
    handle: Arc<Handle>,
}

/// What all clones of a pool have in common. Requests under way hold what they need and not this.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    /// The last clone is gone: idle connections close, busy ones when their exchange is over.
    fn drop(&mut self) {
        self.shared.desk.retire();
    }
}

impl Pool {
    /// Begins a pool with the options that [`Builder`] describes.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// A pool with all defaults.
    pub fn new() -> Pool {
        Pool::builder().build()
    }

    /// Sends a request and waits for the head of its response. The same as the service's `call`.
    ///
    /// # Errors
    ///
    /// One [`Error`], which says what is known of the request's [delivery](Error::delivery).
    pub async fn send<B>(&self, request: Request<B>) -> Result<Response<ResponseBody>, Error>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        send(&self.handle.shared, request).await
    }

    /// What the pool has done and saved so far, and what it holds now.
    pub fn stats(&self) -> Stats {
        self.handle.shared.stats()
    }

    /// What the pool has learnt of an origin. `None` before the first connection, and for an origin that was forgotten:
    /// of those without a connection the last 1,024 are remembered.
    pub fn profile(&self, origin: &Origin) -> Option<Profile> {
        let shared = &self.handle.shared;
        let learnt = shared.desk.learnt(origin)?;
        let config = &shared.config;
        let (idle, most) = (config.idle_timeout, config.max_requests_per_connection);
        Some(learnt.profile(idle, most, config.dialer.splits(origin)))
    }

    /// Closes the connections to an origin: idle ones now, the others when their exchange is over. The next
    /// request resolves its name and connects anew.
    ///
    /// For whoever knows that the servers behind a name have changed before the pool can: it learns so from the
    /// answers of the resolver, which it asks at each dial, and from [`Builder::max_lifetime`].
    pub fn evict(&self, origin: &Origin) {
        let shared = &self.handle.shared;
        shared.config.dialer.evict(origin);
        shared.desk.sweep(origin);
    }

    /// Closes the pool, for all its clones: exchanges that are under way may finish within `grace`, and what is
    /// left then is cut. Resolves when nothing is open any more.
    ///
    /// From the call on, new requests and those that wait for a connection fail with
    /// [`ErrorKind::PoolClosed`], which no retry layer repeats, and idle connections close: over TLS with a
    /// close_notify, and waiting for the server to close too, for a second at most. An exchange, or a
    /// response body that is still read, ends with the same kind of error when it is cut; what that says of the
    /// request's [delivery](Error::delivery) is said as for any broken connection. A body that somebody holds and does
    /// not read hears of it when it is read; it is waited for no longer than a second beyond the grace.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the pool closed to new requests, and cuts nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// # async fn stop(pool: idempool::Pool) {
    /// pool.close(std::time::Duration::from_secs(10)).await;
    /// # }
    /// ```
    pub async fn close(&self, grace: Duration) {
        let shared = &self.handle.shared;
        shared.desk.close();
        if timeout(grace, shared.desk.emptied()).await.is_err() {
            shared.cut();
            // What was cut takes no time. A goodbye that had begun before has a second of its own.
            let _ = timeout(GOODBYE, shared.desk.emptied()).await;
        }
    }
}

impl Builder {
    /// Makes the pool. It opens nothing until the first request.
    pub fn build(self) -> Pool {
        Pool {
            handle: Arc::new(Handle {
                shared: Arc::new(Shared::new(self.config())),
            }),
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Pool::new()
    }
}

/// Shows, for each origin, how many connections are idle, busy, being dialled and closing, how many requests
/// wait, and how long all that has been so.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.handle.shared).finish()
    }
}

impl<B> Service<Request<B>> for Pool
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody>;
    type Error = Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> ResponseFuture {
        let shared = Arc::clone(&self.handle.shared);
        ResponseFuture(Box::pin(async move { send(&shared, request).await }))
    }
}

/// The response head to come. Dropping it closes the connection that the request was on.
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture(
    Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Error>> + Send>>,
);

impl Future for ResponseFuture {
    type Output = Result<Response<ResponseBody>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// How long a closed pool waits for the last goodbyes once all else is over.
const GOODBYE: Duration = Duration::from_secs(1);

/// A request with this field may be sent again whatever happens.
const KEY_FIELD: HeaderName = HeaderName::from_static("idempotency-key");

/// How many idle connections may fail a request of which nothing was sent before it gets a new one. The
/// probe makes even the first such failure rare.
const MOVES_TO_IDLE: u32 = 2;
/// How many new connections such a request may then try: a server that accepts and closes at once must
/// not be dialled for ever.
const MOVES_TO_FRESH: u32 = 2;

async fn send<B>(shared: &Arc<Shared>, request: Request<B>) -> Result<Response<ResponseBody>, Error>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    Counters::add(&shared.counters.requests);
    let resends = request
        .extensions()
        .get::<ResendCount>()
        .map_or(0, |count| count.0);
    let result = match prepare(request, &shared.config) {
        Err(error) => Err(error),
        Ok((origin, outgoing, must_be_fresh, time)) => {
            let span = tracing::debug_span!(
                "http.client.request",
                http.request.method = outgoing.head.method.as_str(),
                server.address = origin.host(),
                server.port = origin.port(),
                url.scheme = origin.scheme(),
                http.request.resend_count = (resends > 0).then_some(resends),
                http.response.status_code = tracing::field::Empty,
                network.peer.address = tracing::field::Empty,
                error.r#type = tracing::field::Empty,
                idempool.delivery = tracing::field::Empty,
            );
            let result = send_to(shared, &origin, outgoing, must_be_fresh, time)
                .instrument(span.clone())
                .await;
            record(&span, &result);
            result.map_err(|error| error.with_origin(&origin))
        }
    };
    result.map_err(|error| {
        Counters::add(&shared.counters.failed);
        error.with_ledger(RetryLedger(Arc::clone(&shared.counters)))
    })
}

fn record(span: &tracing::Span, result: &Result<Response<ResponseBody>, Error>) {
    if span.is_disabled() {
        return;
    }
    let peer = |facts: &crate::timings::ConnectionFacts| facts.peer_addr().map(|peer| peer.ip());
    match result {
        Ok(response) => {
            span.record("http.response.status_code", response.status().as_u16());
            let timings = response.extensions().get::<Timings>();
            if let Some(address) = timings.and_then(|timings| peer(timings.connection())) {
                span.record("network.peer.address", tracing::field::display(address));
            }
        }
        Err(error) => {
            span.record("error.type", error.kind().as_str());
            span.record("idempool.delivery", error.delivery().as_str());
            if let Some(address) = error.connection().and_then(peer) {
                span.record("network.peer.address", tracing::field::display(address));
            }
        }
    }
}

async fn send_to(
    shared: &Arc<Shared>,
    origin: &Origin,
    mut outgoing: Outgoing,
    must_be_fresh: bool,
    time: Option<Duration>,
) -> Result<Response<ResponseBody>, Error> {
    let called = now();
    let deadline = time.and_then(|time| called.checked_add(time));
    let patience = shared.config.acquire_timeout;
    let patience = patience.and_then(|patience| called.checked_add(patience));
    let until = [
        deadline.map(|at| (at, ErrorKind::RequestTimeout)),
        patience.map(|at| (at, ErrorKind::AcquireTimeout)),
    ];
    let until = until.into_iter().flatten().min_by_key(|(at, _)| *at);
    // One place in line, however often the request moves on.
    let ticket = shared.desk.ticket();
    let (mut moves_to_idle, mut moves_to_fresh) = (0, 0);
    let mut may_expect = outgoing.may_expect();
    loop {
        let need = match outgoing.wants_evidence {
            _ if must_be_fresh || moves_to_idle >= MOVES_TO_IDLE || moves_to_fresh > 0 => {
                Need::Fresh
            }
            // Nothing makes it safe to send twice, so a stale connection costs more than a dial.
            true => Need::Young,
            false => Need::Any,
        };
        let wish = Wish {
            ticket,
            again: moves_to_idle + moves_to_fresh > 0,
            need,
            until,
        };
        let mut lease = Lease::acquire(shared, origin, wish).await?;
        let method = outgoing.head.method.clone();
        let said_close = persist::has_connection_option(&outgoing.head.headers, "close");
        let sent = now();
        let is_reused = lease.facts().is_reused();
        let Some(conn) = lease.begin() else {
            // A new lease has its connection. There is no proof for what must not happen.
            return Err(Error::new(ErrorKind::ConnectionClosed, Phase::Unknown));
        };
        let expect = shared
            .config
            .expect_continue
            .filter(|_| may_expect && is_reused);
        let watch = shared.config.ack_timeout;
        let limits = Limits {
            head: shared.config.response_head_timeout,
            request: deadline,
            // A fresh connection has just shown that somebody is there.
            ack: watch.filter(|_| is_reused && outgoing.is_repeatable),
        };
        match conn.exchange(outgoing, expect, limits).await {
            Ok((response, recall)) => {
                let refuses_to_be_asked = expect.is_some()
                    && response.status() == StatusCode::EXPECTATION_FAILED
                    && !recall.upload().has_begun();
                if refuses_to_be_asked {
                    // The server reads no body that it was not sent. RFC 9110 section 10.1.1: without the
                    // expectation, then.
                    drop(response);
                    lease.abort(CloseReason::UploadUnfinished);
                    may_expect = false;
                    if let Ok(Some(again)) = timeout(RECALL_WAIT, recall.back()).await {
                        outgoing = again;
                        continue;
                    }
                    return Err(Error::new(ErrorKind::RequestBody, Phase::Send));
                }
                let upload = recall.upload().clone();
                let timings = Timings {
                    acquire: sent - called,
                    head: now() - sent,
                    connection: lease.facts().clone(),
                    ledger: RetryLedger(Arc::clone(&shared.counters)),
                };
                return Ok(answer(
                    response, lease, &method, said_close, upload, timings, deadline,
                )
                .await);
            }
            Err(Failed { error, again }) => {
                let error = error.with_connection(lease.facts().clone());
                if shared.is_cut() {
                    // The pool's own end; what is known of the delivery stays.
                    return Err(error.with_kind(ErrorKind::PoolClosed));
                }
                if error.bytes_taken() > 0
                    && is_reused
                    && error.kind() == ErrorKind::ConnectionClosed
                {
                    Counters::add(&shared.counters.stale_after_write);
                    // Who calls in step with the server's timeout sees no other close. A server that fails at the
                    // request itself looks the same; then too short an age is trusted for a while, which is safe.
                    lease.found_closed();
                }
                if again.is_some() {
                    // Nothing happened on it, so how it ended is for its task to say.
                    lease.leave_to_its_end();
                } else if error.is_timeout() {
                    // The answer may come yet, and must find nobody.
                    lease.abort(CloseReason::TimedOut);
                } else {
                    lease.close(CloseReason::ExchangeFailed);
                }
                let moves = if is_reused {
                    &mut moves_to_idle
                } else {
                    &mut moves_to_fresh
                };
                *moves += 1;
                match again {
                    Some(request) if moves_to_fresh < MOVES_TO_FRESH => {
                        Counters::add(&shared.counters.handed_back);
                        tracing::debug!(%error, "request moves on, unsent");
                        outgoing = *request;
                    }
                    _ => return Err(error),
                }
            }
        }
    }
}

/// Makes the caller's response: decides what becomes of the connection, and rides the lease in the body.
async fn answer(
    response: Response<Incoming>,
    mut lease: Lease,
    method: &Method,
    said_close: bool,
    upload: Upload,
    timings: Timings,
    deadline: Option<Instant>,
) -> Response<ResponseBody> {
    let facts = lease.facts();
    if facts.served > 0 {
        let (dial, secure) = (facts.dial, facts.handshake.is_some());
        let counters = &lease.shared().counters;
        counters.saved(dial.round_trips, dial.total(), secure);
    }
    let (mut parts, incoming) = response.into_parts();
    if let Some(timeout) = hint::timeout(&parts.headers) {
        lease.announced_idle(timeout);
    }
    if let Some(max) = hint::max(&parts.headers) {
        lease.announced_max(max);
    }
    let persistence = persist::after_response(
        method,
        said_close,
        parts.status,
        parts.version,
        &parts.headers,
    );
    if persistence == Persistence::Close(CloseReason::ResponseSaidClose) {
        // A server that has met an error closes for that.
        let is_error = parts.status.is_client_error() || parts.status.is_server_error();
        lease.said_close(!is_error);
    }
    parts.extensions.insert(timings);
    let after = After::new(lease, persistence, upload);
    let body = if incoming.is_end_stream() {
        after.settle().await;
        ResponseBody::default()
    } else {
        ResponseBody::reading(incoming, after, deadline)
    };
    Response::from_parts(parts, body)
}

/// A request that is ready for the wire: where it goes, what goes, whether its connection must be fresh, and
/// how long it may take.
type Prepared = (Origin, Outgoing, bool, Option<Duration>);

/// Brings a request into the form for the wire, and finds its origin.
fn prepare<B>(request: Request<B>, config: &Config) -> Result<Prepared, Error>
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let (parts, body) = request.into_parts();
    let (method, mut headers) = (parts.method, parts.headers);
    if method == Method::CONNECT {
        return Err(Error::invalid(
            "CONNECT makes a tunnel, which a pool cannot share",
        ));
    }
    if headers.get_all(HOST).iter().count() > 1 {
        return Err(Error::invalid("more than one Host field"));
    }
    let scheme = parts.uri.scheme().unwrap_or(&config.default_scheme);
    let origin = match parts.uri.authority() {
        Some(authority) => Origin::from_parts(scheme, authority),
        None => {
            let host = headers.get(HOST).ok_or_else(|| Error::invalid("no host"))?;
            let authority = Authority::try_from(host.as_bytes()).map_err(Error::invalid)?;
            Origin::from_parts(scheme, &authority)
        }
    };
    let origin = origin.ok_or_else(|| Error::invalid("not an http or https URI with a host"))?;
    if !headers.contains_key(HOST) {
        let host = HeaderValue::try_from(origin.host_header()).map_err(Error::invalid)?;
        headers.insert(HOST, host);
    }
    let path = parts.uri.into_parts().path_and_query;
    let path = path.filter(|path| !path.as_str().is_empty());
    let uri = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));

    let mut body = OutBody::new(body);
    // RFC 9110 section 8.6: a method that gives content a meaning says so when there is none.
    let expects_content =
        method == Method::POST || method == Method::PUT || method == Method::PATCH;
    let is_framed = headers.contains_key(CONTENT_LENGTH) || headers.contains_key(TRANSFER_ENCODING);
    if expects_content && body.is_end_stream() && !is_framed {
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    let declared = headers
        .get(CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok());
    body.declare(declared.and_then(|length| length.parse().ok()));
    let version = match parts.version {
        Version::HTTP_09 | Version::HTTP_10 => Version::HTTP_10,
        _ => Version::HTTP_11,
    };
    let mut extensions = parts.extensions;
    // Two different things: the one may be sent again by whoever likes to, the other will be.
    let is_repeatable = extensions.remove::<Repeatable>().is_some();
    let is_safe_twice = is_repeatable
        || method.is_idempotent()
        || headers.contains_key(KEY_FIELD)
        || extensions.get::<TreatAsIdempotent>().is_some();
    let own_time = extensions.remove::<RequestTimeout>();
    let time = own_time.map(|RequestTimeout(time)| time);
    let must_be_fresh = extensions.remove::<FreshConnection>().is_some();
    let head = Head {
        method,
        uri,
        version,
        headers,
        extensions,
    };
    let outgoing = Outgoing {
        head,
        body,
        wants_evidence: !is_safe_twice,
        is_repeatable,
    };
    Ok((
        origin,
        outgoing,
        must_be_fresh,
        time.or(config.request_timeout),
    ))
}
