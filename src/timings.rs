//! What an exchange cost, and on which connection it ran.
//!
//! Values only. [`Timings`] rides in the extensions of every response; [`ConnectionFacts`] is also kept
//! on every [`Error`](crate::Error) that happened on a connection.

use std::net::SocketAddr;
use std::time::Duration;

use crate::stats::RetryLedger;

/// How a TLS session came about.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Handshake {
    /// Certificates were exchanged and verified.
    Full,
    /// A ticket of an earlier session was accepted: cheaper for both sides.
    Resumed,
}

/// What it took to open one connection.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct DialTimings {
    /// Name resolution. Zero for a literal address.
    pub resolve: Duration,
    /// From the first SYN to an established connection, all addresses tried included.
    pub connect: Duration,
    /// The TLS handshake. Zero without TLS.
    pub handshake: Duration,
    /// Round trips before the first byte of a request could leave: 1 for TCP, and with TLS 1 more
    /// (TLS 1.3, or a resumed TLS 1.2 session), 2 (TLS 1.2, or TLS 1.3 with a retry of its hello) or
    /// 3. Name resolution is not counted.
    pub round_trips: u32,
}

impl DialTimings {
    /// The whole dial: resolution, connect and handshake.
    pub fn total(&self) -> Duration {
        self.resolve + self.connect + self.handshake
    }
}

/// The connection that an exchange ran on, as it was when the exchange began.
#[derive(Clone, Debug)]
pub struct ConnectionFacts {
    pub(crate) id: u64,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) served: u32,
    pub(crate) idle: Option<Duration>,
    pub(crate) dial: DialTimings,
    pub(crate) handshake: Option<Handshake>,
}

impl ConnectionFacts {
    /// A number that no other connection of the same pool has.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether the connection came out of the pool: it had carried a request before, or was opened for one
    /// that another connection then served.
    pub fn is_reused(&self) -> bool {
        self.idle.is_some()
    }

    /// How many requests the connection had carried before this one.
    pub fn requests_served(&self) -> u32 {
        self.served
    }

    /// How long the connection had been idle when this exchange took it, next to nothing where it came
    /// straight from another request; `None` if it was fresh.
    pub fn idle_age(&self) -> Option<Duration> {
        self.idle
    }

    /// The address at the other end.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// What opening this connection took, whether this request or an earlier one paid for it.
    pub fn dial(&self) -> DialTimings {
        self.dial
    }

    /// How its TLS session came about; `None` without TLS.
    pub fn handshake(&self) -> Option<Handshake> {
        self.handshake
    }
}

/// How long the parts of one exchange took. A response extension.
///
/// ```
/// # fn show<B>(response: &http::Response<B>) {
/// if let Some(timings) = response.extensions().get::<idempool::Timings>() {
///     println!("reused: {}, waited {:?}", timings.connection().is_reused(), timings.acquire());
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Timings {
    pub(crate) acquire: Duration,
    pub(crate) head: Duration,
    pub(crate) connection: ConnectionFacts,
    pub(crate) ledger: RetryLedger,
}

impl Timings {
    /// From the call to a connection ready to carry the request: zero or almost so when one was idle,
    /// else mostly the dial.
    pub fn acquire(&self) -> Duration {
        self.acquire
    }

    /// From the request's start on the connection to the response head.
    pub fn response_head(&self) -> Duration {
        self.head
    }

    /// The connection that carried the exchange.
    pub fn connection(&self) -> &ConnectionFacts {
        &self.connection
    }
}
