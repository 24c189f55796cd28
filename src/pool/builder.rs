//! The options of a pool, each with its default and the reason for it.

use std::time::Duration;

use http::uri::Scheme;

use crate::rules::plan::Limits;
use crate::wire::dial::Dialer;
use crate::wire::resolve::{Resolve, Resolver};
use crate::wire::socket::SocketOptions;
use crate::wire::tls::TlsClient;

/// What the pool itself needs of its options; the rest is the dialer's.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) limits: Limits,
    pub(crate) acquire_timeout: Option<Duration>,
    pub(crate) idle_timeout: Option<Duration>,
    pub(crate) max_lifetime: Option<Duration>,
    pub(crate) max_requests_per_connection: Option<u32>,
    pub(crate) response_head_timeout: Option<Duration>,
    pub(crate) body_idle_timeout: Option<Duration>,
    pub(crate) request_timeout: Option<Duration>,
    pub(crate) ack_timeout: Option<Duration>,
    pub(crate) drain_bytes: u64,
    pub(crate) drain_time: Duration,
    pub(crate) probe_patience: Duration,
    pub(crate) default_scheme: Scheme,
    pub(crate) expect_continue: Option<Duration>,
    pub(crate) dialer: Dialer,
}

/// Builds a [`Pool`](crate::Pool). See each method for its default and the reason for it.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    limits: Limits,
    acquire_timeout: Option<Duration>,
    idle_timeout: Option<Duration>,
    max_lifetime: Option<Duration>,
    max_requests_per_connection: Option<u32>,
    response_head_timeout: Option<Duration>,
    body_idle_timeout: Option<Duration>,
    request_timeout: Option<Duration>,
    ack_timeout: Option<Duration>,
    connect_timeout: Option<Duration>,
    drain_bytes: u64,
    drain_time: Duration,
    probe_patience: Duration,
    default_scheme: Scheme,
    expect_continue: Option<Duration>,
    options: SocketOptions,
    resolver: Resolver,
    #[cfg(feature = "tls")]
    tls: Option<rustls::ClientConfig>,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Builder {
            limits: Limits {
                connections: 512,
                connections_per_origin: 64,
                idle: 256,
                idle_per_origin: 64,
                dials_per_origin: 64,
                dial_window: true,
                waiters_per_origin: usize::MAX,
            },
            acquire_timeout: Some(Duration::from_secs(15)),
            idle_timeout: Some(Duration::from_secs(90)),
            max_lifetime: Some(Duration::from_secs(10 * 60)),
            max_requests_per_connection: None,
            response_head_timeout: Some(Duration::from_secs(120)),
            body_idle_timeout: None,
            request_timeout: None,
            ack_timeout: Some(Duration::from_secs(3)),
            connect_timeout: Some(Duration::from_secs(10)),
            drain_bytes: 64 * 1024,
            drain_time: Duration::from_millis(100),
            probe_patience: Duration::from_millis(10),
            default_scheme: Scheme::HTTP,
            expect_continue: None,
            options: SocketOptions {
                nodelay: true,
                keepalive: Some(Duration::from_secs(60)),
                user_timeout: Some(Duration::from_secs(30)),
            },
            resolver: Resolver::system(),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Sets how long an idle connection may wait and still be reused.
    ///
    /// Counts from the end of the last response. A connection is closed when its time is over, whether
    /// or not the pool is used then. `None` means no limit of ours: connections stay until the server
    /// closes them.
    ///
    /// Set it shorter than the server's own idle timeout: then the pool closes first, and no request can
    /// meet a close that is on its way.
    ///
    /// # Default
    /// 90 s, as in `hyper-util`, so that moving to this pool changes nothing.
    ///
    /// # Panics
    /// Panics if `timeout` is zero. To switch reuse off, set
    /// [`max_idle_per_origin(0)`](Builder::max_idle_per_origin).
    pub fn idle_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        let timeout = timeout.into();
        assert!(
            timeout != Some(Duration::ZERO),
            "an idle timeout of zero; to switch reuse off, set max_idle_per_origin(0)"
        );
        self.idle_timeout = timeout;
        self
    }

    /// Sets how many connections to one origin may exist at a time: idle, in use, being opened, and closed
    /// ones whose other side has not closed yet (waited for at most a second).
    ///
    /// A request beyond that waits in line, first come, first served, until a connection comes back or
    /// [`acquire_timeout`](Builder::acquire_timeout) is over.
    ///
    /// # Default
    /// 64: as many as are kept idle, so that none is opened to be thrown away; enough for several thousand
    /// requests a second at a response time of 20 ms, and a bound on what one slow server can hold.
    ///
    /// # Panics
    /// Panics if `max` is zero.
    pub fn max_connections_per_origin(mut self, max: usize) -> Self {
        assert!(max > 0, "no connection to an origin allowed");
        self.limits.connections_per_origin = max;
        self
    }

    /// Sets how many connections may exist at a time to all origins together, counted as in
    /// [`max_connections_per_origin`](Builder::max_connections_per_origin).
    ///
    /// At the limit the connection that has been idle longest, to whatever origin, makes room; where none is
    /// idle, requests wait in line.
    ///
    /// # Default
    /// 512: half of the 1,024 descriptors that a process gets by default on Linux.
    ///
    /// # Panics
    /// Panics if `max` is zero.
    pub fn max_connections(mut self, max: usize) -> Self {
        assert!(max > 0, "no connection allowed");
        self.limits.connections = max;
        self
    }

    /// Sets how many idle connections are kept for one origin.
    ///
    /// When one more comes back, the one that has been idle longest is closed. Zero switches reuse off:
    /// each request then has a connection of its own, closed after its response, also while others wait in line.
    ///
    /// # Default
    /// 64: the limit of connections to an origin, so that a burst keeps what it has opened until the idle
    /// timeout.
    pub fn max_idle_per_origin(mut self, max: usize) -> Self {
        self.limits.idle_per_origin = max;
        self
    }

    /// Sets how many idle connections are kept in all. When one more comes back, the one that has been idle
    /// longest is closed, to whatever origin. Zero switches reuse off, as in
    /// [`max_idle_per_origin`](Builder::max_idle_per_origin).
    ///
    /// # Default
    /// 256: half of the limit of connections, so that a client of very many origins keeps room to open more.
    pub fn max_idle(mut self, max: usize) -> Self {
        self.limits.idle = max;
        self
    }

    /// Sets how many connections to one origin may be in the course of being opened at a time.
    ///
    /// # Default
    /// 64, as many as may exist: on its own it holds nothing back. Lower it where a burst of TLS handshakes
    /// is too much for the server.
    ///
    /// # Panics
    /// Panics if `max` is zero.
    pub fn max_pending_dials(mut self, max: usize) -> Self {
        assert!(max > 0, "no dial allowed");
        self.limits.dials_per_origin = max;
        self
    }

    /// Sets whether the pool limits by itself how many connections to one origin are on their way at a time on which
    /// the server has not sent a byte yet.
    ///
    /// That a connection is established says that two kernels shook hands, not that the server has accepted it. A
    /// server with a short queue of those it has yet to accept loses packets in a burst, and each costs a request
    /// one to many seconds. So at first four dials are made at a time, and further ones begin a millisecond apart,
    /// as long as nothing is late or lost. What was learnt shows in [`Pool::profile`](crate::Pool::profile).
    ///
    /// # Default
    /// On. A burst of 64 to a healthy server takes as long as without it on a near network, and less than two round
    /// trips longer over 50 ms of distance. To one nearby that speaks plain HTTP and takes a while to answer the first
    /// burst takes up to twice as long, since nothing proves that it accepts. Switch it off where the servers are known
    /// to accept faster than this client dials, and bursts are large.
    pub fn dial_window(mut self, on: bool) -> Self {
        self.limits.dial_window = on;
        self
    }

    /// Sets how many requests to one origin may wait in line, those with a dial of their own not counted. One
    /// more fails at once with [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded). Zero: nobody waits.
    /// `None`: no bound.
    ///
    /// # Default
    /// `None`: [`acquire_timeout`](Builder::acquire_timeout) bounds the line by time. A service that had
    /// better refuse than be late sets a bound.
    pub fn max_waiters(mut self, max: impl Into<Option<usize>>) -> Self {
        self.limits.waiters_per_origin = max.into().unwrap_or(usize::MAX);
        self
    }

    /// Sets how long a request may wait for its connection: in line, for its own dial, and for the check of
    /// an idle one, counted from the call over all of it.
    ///
    /// When it is over, the request fails with
    /// [`ErrorKind::AcquireTimeout`](crate::ErrorKind::AcquireTimeout): nothing was sent.
    /// [`phase`](crate::Error::phase) tells what it was waiting for, and the error's source is the last dial to the
    /// origin that failed meanwhile, if one did. `None`: no limit.
    ///
    /// # Default
    /// 15 s: longer than the connect timeout, so that a dial that fails says why itself.
    ///
    /// # Panics
    /// Panics if `timeout` is zero.
    pub fn acquire_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.acquire_timeout = positive(timeout.into(), "an acquire timeout");
        self
    }

    /// Sets for how long a connection may be used, from the end of its handshake. `None`: for ever.
    ///
    /// Each connection gets its own limit, up to 10 % shorter or longer, so that those opened together do not
    /// end together. One that is over it closes when its exchange ends; an exchange is never cut.
    ///
    /// # Default
    /// 10 minutes: a client then follows a change of addresses in that time, checks certificates anew, and
    /// spends next to nothing on it.
    ///
    /// # Panics
    /// Panics if `lifetime` is zero.
    pub fn max_lifetime(mut self, lifetime: impl Into<Option<Duration>>) -> Self {
        self.max_lifetime = positive(lifetime.into(), "a lifetime");
        self
    }

    /// Sets how many requests a connection may carry. It closes after the response of the last one. `None`:
    /// any number.
    ///
    /// # Default
    /// `None`: the limit is the server's to set, and it says so with `Connection: close`.
    ///
    /// # Panics
    /// Panics if `max` is zero.
    pub fn max_requests_per_connection(mut self, max: impl Into<Option<u32>>) -> Self {
        let max = max.into();
        assert!(max != Some(0), "no request on a connection allowed");
        self.max_requests_per_connection = max;
        self
    }

    /// Sets how long a request may wait for its response head, from the moment it is given to its connection.
    /// The time to write it counts.
    ///
    /// When it is over, the request fails with
    /// [`ErrorKind::ResponseTimeout`](crate::ErrorKind::ResponseTimeout) and its connection closes. `None`: no
    /// limit.
    ///
    /// # Default
    /// 120 s: longer than proxies and load balancers commonly wait (60 to 100 s), since to give up a payment
    /// too early turns a late answer into an unknown one; and a server that never answers does not hold a
    /// connection for ever.
    ///
    /// # Panics
    /// Panics if `timeout` is zero.
    pub fn response_head_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.response_head_timeout = positive(timeout.into(), "a response head timeout");
        self
    }

    /// Sets how long a response body may bring nothing while its reader waits. The reader's own pauses do not
    /// count.
    ///
    /// When it is over, the body ends with [`ErrorKind::BodyTimeout`](crate::ErrorKind::BodyTimeout) and its
    /// connection closes. `None`: no limit.
    ///
    /// # Default
    /// `None`: streams of events are silent for as long as nothing happens.
    ///
    /// # Panics
    /// Panics if `timeout` is zero.
    pub fn body_idle_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.body_idle_timeout = positive(timeout.into(), "a body idle timeout");
        self
    }

    /// Sets how long a whole request may take, from the call to the end of the response body.
    ///
    /// When it is over, whatever the request was at fails with
    /// [`ErrorKind::RequestTimeout`](crate::ErrorKind::RequestTimeout), and [`phase`](crate::Error::phase) tells
    /// what that was. Its connection closes, if it had one; that of a response body when somebody reads on. Each
    /// attempt of a retry layer has this time for itself;
    /// [`RetryPolicy::deadline`](crate::RetryPolicy::deadline) bounds them together. `None`: no limit.
    ///
    /// The extension [`RequestTimeout`](crate::RequestTimeout) sets another time for one request.
    ///
    /// # Default
    /// `None`: how long an operation may take only its caller knows.
    ///
    /// # Panics
    /// Panics if `timeout` is zero.
    pub fn request_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.request_timeout = positive(timeout.into(), "a request timeout");
        self
    }

    /// Sets how long a reused connection may leave a request wholly unacknowledged before it counts as dead
    /// (Linux and Android only), for requests that a retry layer above may send again. The request then fails
    /// with [`ErrorKind::Unacknowledged`](crate::ErrorKind::Unacknowledged), for the layer to send it on a fresh
    /// connection. Other requests wait on: the route may heal, and
    /// [`tcp_user_timeout`](Builder::tcp_user_timeout) bounds it. `None`: never.
    ///
    /// # Default
    /// 3 s: by then the kernel has sent it four times in vain (after 0.2, 0.6, 1.4 and 3 s).
    ///
    /// # Panics
    /// Panics if `timeout` is zero.
    pub fn ack_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.ack_timeout = positive(timeout.into(), "an acknowledgement timeout");
        self
    }

    /// Sets how long opening a connection may take: name resolution, TCP and TLS together.
    ///
    /// When it is over, the request fails with
    /// [`ErrorKind::ConnectTimeout`](crate::ErrorKind::ConnectTimeout), and
    /// [`phase`](crate::Error::phase) tells where it was. Nothing was sent then. `None` means no limit.
    ///
    /// # Default
    /// 10 s: longer than three lost SYNs (1 + 2 + 4 s), shorter than most callers' patience.
    ///
    /// # Panics
    /// Panics if `timeout` is zero.
    pub fn connect_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.connect_timeout = positive(timeout.into(), "a connect timeout");
        self
    }

    /// Sets what finds the addresses of a host. Literal addresses never reach it.
    ///
    /// It is asked for each dial, and once more within the dial when no address of its answer can be connected to.
    /// Nothing is cached here: a resolver that should remember does so itself. All addresses are tried, the next one
    /// 250 ms after the one before or at once when that has failed; see [`Resolve::resolve`] for their order.
    ///
    /// # Default
    /// The system's (`getaddrinfo`), which reads the hosts file, knows the local network's names, and caches where the
    /// system does.
    pub fn resolver(mut self, resolver: impl Resolve) -> Self {
        self.resolver = Resolver::new(resolver);
        self
    }

    /// Sets the TLS configuration of all https connections: roots, client certificate, provider.
    ///
    /// ALPN is set to `http/1.1` whatever the configuration says, since that is what the pool speaks.
    /// The sessions that it keeps for resumption are this pool's alone if the configuration is.
    ///
    /// # Default
    /// With the features `platform-verifier` and `aws-lc-rs` or `ring`: the operating system's trust
    /// store, TLS 1.2 and 1.3, tickets for 256 servers. It is made when the first https connection is
    /// opened. Without those features an https request needs this option.
    #[cfg(feature = "tls")]
    pub fn tls_config(mut self, config: rustls::ClientConfig) -> Self {
        self.tls = Some(config);
        self
    }

    /// Sets `TCP_NODELAY`.
    ///
    /// # Default
    /// On. Off, the kernel holds back a small segment until the one before is acknowledged, which costs
    /// 40 ms where it meets a delayed acknowledgement, and splits a request in two: then a part of it
    /// may have been delivered where all or nothing would have been.
    pub fn tcp_nodelay(mut self, nodelay: bool) -> Self {
        self.options.nodelay = nodelay;
        self
    }

    /// Sets after how much silence the kernel begins to ask whether the peer is still there
    /// (`SO_KEEPALIVE`, every 15 s from then on). `None` switches it off.
    ///
    /// # Default
    /// 60 s: below the 350 s after which cloud load balancers and NAT gateways forget a connection
    /// silently, so that idle connections stay known to them, and below the idle timeout.
    ///
    /// # Panics
    /// Panics if `time` is less than a second, the kernel's unit.
    pub fn tcp_keepalive(mut self, time: impl Into<Option<Duration>>) -> Self {
        let time = time.into();
        assert!(
            time.is_none_or(|time| time >= Duration::from_secs(1)),
            "a keep-alive time under one second"
        );
        self.options.keepalive = time;
        self
    }

    /// Sets how long sent bytes may stay unacknowledged before the kernel gives the connection up
    /// (`TCP_USER_TIMEOUT`, Linux and Android only; elsewhere without effect). `None` leaves the
    /// kernel's own limit, about 15 minutes.
    ///
    /// # Default
    /// 30 s: a request into a black hole fails within half a minute and not in a quarter of an hour;
    /// long enough for a route that heals.
    pub fn tcp_user_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.options.user_timeout = timeout.into();
        self
    }

    /// Sets what may be spent on the rest of a response body that the caller dropped early, to keep its
    /// connection: at most so many bytes and so much time. What does not end within both closes the
    /// connection. It happens in the background and never delays the caller. Zero bytes: never read on.
    ///
    /// The time also bounds the wait for a connection whose response has ended and which is not ready yet: in
    /// the background while the upload still runs, else before the end of the body is shown.
    ///
    /// # Default
    /// 64 KiB and 100 ms: about what opening a new TLS connection costs over 50 ms of distance.
    pub fn drain(mut self, bytes: u64, time: Duration) -> Self {
        self.drain_bytes = bytes;
        self.drain_time = time;
        self
    }

    /// Sets how long a checkout waits for a connection's task to read bytes that arrived over TLS while
    /// it was idle: session tickets are harmless, a close_notify is not, and only reading them tells.
    /// When it is over, the connection is closed and the next one is tried.
    ///
    /// # Default
    /// 10 ms: the task needs microseconds; a machine too busy for that had better dial anew.
    pub fn probe_patience(mut self, patience: Duration) -> Self {
        self.probe_patience = patience;
        self
    }

    /// Sets the scheme of requests in origin form (`/path` with a `Host` field), which name none.
    /// Requests with an absolute URI are not touched.
    ///
    /// # Default
    /// `http`, as [RFC 9112 section 3.3] reconstructs it for a connection that is not secured.
    ///
    /// [RFC 9112 section 3.3]: https://www.rfc-editor.org/rfc/rfc9112.html#section-3.3
    pub fn default_scheme(mut self, scheme: Scheme) -> Self {
        self.default_scheme = scheme;
        self
    }

    /// Sets whether a request with a body, which nothing makes safe to send twice, first asks on a reused
    /// connection whether the server is there (`Expect: 100-continue`, [RFC 9110 section 10.1.1]), and how
    /// long it waits for the answer before it sends the body all the same.
    ///
    /// A stale connection then breaks before the body has left: what the server could act on it never had,
    /// and a one-shot body is still whole. The price is a round trip for each such request, or the whole
    /// wait where the server does not know the question. A server that refuses the expectation (417) is
    /// asked again without it. Requests with an `Expect` field of their own are left alone; on the others a
    /// callback set with `hyper::ext::on_informational` is replaced.
    ///
    /// # Default
    /// `None`: not asked. Where it is, 1 s is what RFC 9110 leaves open and most clients wait.
    ///
    /// [RFC 9110 section 10.1.1]: https://www.rfc-editor.org/rfc/rfc9110.html#section-10.1.1
    pub fn expect_continue(mut self, patience: impl Into<Option<Duration>>) -> Self {
        self.expect_continue = patience.into();
        self
    }

    pub(crate) fn config(self) -> Config {
        #[cfg(feature = "tls")]
        let tls = TlsClient::new(self.tls);
        #[cfg(not(feature = "tls"))]
        let tls = TlsClient;
        Config {
            limits: self.limits,
            acquire_timeout: self.acquire_timeout,
            idle_timeout: self.idle_timeout,
            max_lifetime: self.max_lifetime,
            max_requests_per_connection: self.max_requests_per_connection,
            response_head_timeout: self.response_head_timeout,
            body_idle_timeout: self.body_idle_timeout,
            request_timeout: self.request_timeout,
            ack_timeout: self.ack_timeout,
            drain_bytes: self.drain_bytes,
            drain_time: self.drain_time,
            probe_patience: self.probe_patience,
            default_scheme: self.default_scheme,
            expect_continue: self.expect_continue,
            dialer: Dialer::new(self.connect_timeout, self.options, tls, self.resolver),
        }
    }
}

fn positive(time: Option<Duration>, what: &str) -> Option<Duration> {
    assert!(time != Some(Duration::ZERO), "{what} of zero");
    time
}
