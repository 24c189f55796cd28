//! The one error type: why a request failed, how far it got, and what is known of its delivery.
//!
//! Made on the wire and in the pool, read by the retry layer and by users. It never says more than
//! the evidence: an [`Error`] without evidence has [`Delivery::Unknown`].

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::delivery::{Delivery, PeerEnd};
use crate::origin::Origin;
use crate::stats::{Refusal, RetryLedger, RetryReason};
use crate::timings::ConnectionFacts;

/// Any error that may cross a thread.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// What went wrong.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request cannot be sent as it is: no host, an unknown scheme, two idempotency keys, `CONNECT`.
    InvalidRequest,
    /// The host name could not be resolved.
    Resolve,
    /// No address of the origin accepted the connection.
    Connect,
    /// Resolution, connect and handshake together took longer than the connect timeout.
    ConnectTimeout,
    /// No connection was to be had within the acquire timeout.
    AcquireTimeout,
    /// As many requests as may wait for a connection were waiting already.
    Overloaded,
    /// The pool was closed: before the request, or while it was under way.
    PoolClosed,
    /// The TLS handshake failed, or TLS is not available.
    Tls,
    /// The server's certificate, or ours, was refused. Trying again does not help.
    Certificate,
    /// The connection was closed or reset before a complete response head. One kind, however the
    /// failure surfaced: end of stream, reset, broken pipe, TLS truncation.
    ConnectionClosed,
    /// A reused connection did not acknowledge a byte of the request within the acknowledgement timeout.
    Unacknowledged,
    /// The response head did not come within the response head timeout.
    ResponseTimeout,
    /// The response body brought nothing for as long as the body idle timeout.
    BodyTimeout,
    /// The whole request took longer than the request timeout.
    RequestTimeout,
    /// What arrived is not an HTTP response, or one that must not be trusted.
    Protocol,
    /// The caller's request body returned an error.
    RequestBody,
    /// The response body ended early or broke.
    ResponseBody,
    /// The retry policy's deadline passed.
    Deadline,
    /// A service below the retry layer returned an error that idempool knows nothing about.
    Service,
}

impl ErrorKind {
    /// The name used in logs (OpenTelemetry's `error.type`).
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::InvalidRequest => "invalid_request",
            ErrorKind::Resolve => "resolve",
            ErrorKind::Connect => "connect",
            ErrorKind::ConnectTimeout => "connect_timeout",
            ErrorKind::AcquireTimeout => "acquire_timeout",
            ErrorKind::Overloaded => "overloaded",
            ErrorKind::PoolClosed => "pool_closed",
            ErrorKind::Tls => "tls",
            ErrorKind::Certificate => "certificate",
            ErrorKind::ConnectionClosed => "connection_closed",
            ErrorKind::Unacknowledged => "unacknowledged",
            ErrorKind::ResponseTimeout => "response_timeout",
            ErrorKind::BodyTimeout => "body_timeout",
            ErrorKind::RequestTimeout => "request_timeout",
            ErrorKind::Protocol => "protocol",
            ErrorKind::RequestBody => "request_body",
            ErrorKind::ResponseBody => "response_body",
            ErrorKind::Deadline => "deadline",
            ErrorKind::Service => "service",
        }
    }

    fn sentence(self) -> &'static str {
        match self {
            ErrorKind::InvalidRequest => "the request cannot be sent",
            ErrorKind::Resolve => "the host name could not be resolved",
            ErrorKind::Connect => "no address accepted the connection",
            ErrorKind::ConnectTimeout => "connecting took too long",
            ErrorKind::AcquireTimeout => "no connection was free in time",
            ErrorKind::Overloaded => "too many requests wait for a connection",
            ErrorKind::PoolClosed => "the pool is closed",
            ErrorKind::Tls => "the TLS handshake failed",
            ErrorKind::Certificate => "a certificate was refused",
            ErrorKind::ConnectionClosed => "the connection closed before a response",
            ErrorKind::Unacknowledged => "the connection acknowledged nothing",
            ErrorKind::ResponseTimeout => "the response did not begin in time",
            ErrorKind::BodyTimeout => "the response body stalled",
            ErrorKind::RequestTimeout => "the request took too long",
            ErrorKind::Protocol => "the response is not valid HTTP",
            ErrorKind::RequestBody => "the request body failed",
            ErrorKind::ResponseBody => "the response body ended early",
            ErrorKind::Deadline => "the deadline passed",
            ErrorKind::Service => "the inner service failed",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How far the request had got.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum Phase {
    /// Before any I/O.
    Prepare,
    /// In line for a connection.
    Queue,
    /// Resolving the host name.
    Resolve,
    /// Connecting over TCP.
    Connect,
    /// In the TLS handshake.
    Handshake,
    /// Writing the request: its body was not handed over completely.
    Send,
    /// Waiting for the response head, the whole request handed over.
    ResponseHead,
    /// Reading the response body.
    ResponseBody,
    /// Between two attempts.
    Backoff,
    /// Nothing is known: the error is not idempool's own.
    Unknown,
}

impl Phase {
    /// The name used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Prepare => "prepare",
            Phase::Queue => "queue",
            Phase::Resolve => "resolve",
            Phase::Connect => "connect",
            Phase::Handshake => "handshake",
            Phase::Send => "send",
            Phase::ResponseHead => "response_head",
            Phase::ResponseBody => "response_body",
            Phase::Backoff => "backoff",
            Phase::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a request failed, and how far it can have got.
///
/// Ask [`delivery`](Error::delivery) before sending anything again by hand. `Display` prints this level
/// only, in one line for a log; walk `source` for the cause. Neither the wording nor the types in the
/// source chain are part of the API.
pub struct Error(Box<Inner>);

/// One attempt that was followed by another: what it came to, and why the request was sent again.
///
/// [`Error::earlier_attempts`] lists them for a request that failed in the end, the response extension
/// [`EarlierAttempts`] for one that was answered.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Attempt {
    /// The status of its response, if it had one.
    pub status: Option<http::StatusCode>,
    /// What went wrong, if it had no response.
    pub kind: Option<ErrorKind>,
    /// What was known of its delivery.
    pub delivery: Delivery,
    /// Whether its connection had carried a request before. `None` if it had no connection, or if that is
    /// not known.
    pub reused: Option<bool>,
    /// How many bytes of the request the kernel had taken.
    pub bytes_taken: u64,
    /// Why the request was sent again.
    pub reason: RetryReason,
    /// The wait before it was.
    pub wait: Duration,
}

/// A response extension: the attempts before the one that was answered, in order. Set by the retry layer
/// where there were any.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EarlierAttempts(pub std::sync::Arc<[Attempt]>);

/// What one attempt left behind on its connection.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Trace {
    /// Bytes of the request that the kernel took, below TLS.
    pub(crate) taken: u64,
    /// Of these, the ones that the peer's kernel acknowledged; `None` where nobody asked.
    pub(crate) acked: Option<u64>,
    /// Bytes of the response that arrived, above TLS.
    pub(crate) received: u64,
    pub(crate) peer_end: Option<PeerEnd>,
    /// From the start of the exchange to its failure.
    pub(crate) elapsed: Option<Duration>,
}

/// A dial that failed, for those whose dial it was not.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct DialFailure {
    text: std::sync::Arc<str>,
}

impl DialFailure {
    /// Takes down what an error says of itself and of its causes.
    pub(crate) fn of(error: &Error) -> Self {
        let mut text = error.kind().sentence().to_owned();
        let mut cause = StdError::source(error);
        while let Some(source) = cause {
            text.push_str(": ");
            text.push_str(&source.to_string());
            cause = source.source();
        }
        DialFailure { text: text.into() }
    }
}

impl fmt::Display for DialFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the last dial to the origin failed: {}", self.text)
    }
}

impl StdError for DialFailure {}

struct Inner {
    kind: ErrorKind,
    delivery: Delivery,
    phase: Phase,
    trace: Trace,
    connection: Option<ConnectionFacts>,
    origin: Option<Origin>,
    resends: u32,
    refusal: Option<Refusal>,
    passed: bool,
    earlier: Vec<Attempt>,
    ledger: Option<RetryLedger>,
    source: Option<BoxError>,
}

impl Error {
    /// Nothing is claimed but the kind: the delivery is `Unknown` until evidence says otherwise.
    pub(crate) fn new(kind: ErrorKind, phase: Phase) -> Self {
        Error(Box::new(Inner {
            kind,
            delivery: Delivery::Unknown,
            phase,
            trace: Trace::default(),
            connection: None,
            origin: None,
            resends: 0,
            refusal: None,
            passed: false,
            earlier: Vec::new(),
            ledger: None,
            source: None,
        }))
    }

    /// An error of the time before any connection was there: nothing was sent.
    pub(crate) fn before_sending(kind: ErrorKind, phase: Phase) -> Self {
        Error::new(kind, phase).with_delivery(Delivery::NotSent)
    }

    pub(crate) fn invalid(reason: impl Into<BoxError>) -> Self {
        Error::before_sending(ErrorKind::InvalidRequest, Phase::Prepare).with_source(reason)
    }

    /// Takes an error of some service: one of ours keeps all it knows, any other is `Unknown`.
    ///
    /// Only an error that *is* ours is believed, never one that merely has ours as its source: what
    /// wraps it may have sent the request more than once.
    pub(crate) fn from_service(error: BoxError) -> Self {
        match error.downcast::<Error>() {
            Ok(own) => *own,
            Err(foreign) => Error::new(ErrorKind::Service, Phase::Unknown).with_source(foreign),
        }
    }

    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    pub(crate) fn with_delivery(mut self, delivery: Delivery) -> Self {
        self.0.delivery = delivery;
        self
    }

    pub(crate) fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    pub(crate) fn with_trace(mut self, trace: Trace) -> Self {
        self.0.trace = trace;
        self
    }

    pub(crate) fn with_peer_end(mut self, end: Option<PeerEnd>) -> Self {
        self.0.trace.peer_end = end;
        self
    }

    pub(crate) fn with_bytes_acked(mut self, acked: u64) -> Self {
        self.0.trace.acked = Some(acked);
        self
    }

    pub(crate) fn with_connection(mut self, connection: ConnectionFacts) -> Self {
        self.0.connection = Some(connection);
        self
    }

    pub(crate) fn with_origin(mut self, origin: &Origin) -> Self {
        self.0.origin = Some(origin.clone());
        self
    }

    pub(crate) fn with_ledger(mut self, ledger: RetryLedger) -> Self {
        self.0.ledger = Some(ledger);
        self
    }

    pub(crate) fn with_resends(mut self, resends: u32) -> Self {
        self.0.resends = resends;
        self
    }

    pub(crate) fn with_refusal(mut self, refusal: Refusal) -> Self {
        self.0.refusal = Some(refusal);
        self
    }

    pub(crate) fn with_earlier_attempts(mut self, earlier: Vec<Attempt>) -> Self {
        self.0.earlier = earlier;
        self
    }

    /// Marks the error as having been through a retry layer: final for every other one above.
    pub(crate) fn with_passed(mut self) -> Self {
        self.0.passed = true;
        self
    }

    pub(crate) fn has_passed(&self) -> bool {
        self.0.passed
    }

    pub(crate) fn ledger(&self) -> Option<&RetryLedger> {
        self.0.ledger.as_ref()
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What is known of the request's delivery. After resends, of all its attempts together: the
    /// least safe one. All else that the error tells is of the last attempt.
    pub fn delivery(&self) -> Delivery {
        self.0.delivery
    }

    /// How far the request had got.
    pub fn phase(&self) -> Phase {
        self.0.phase
    }

    /// How many bytes of the request the kernel took, counted below TLS (so with its framing).
    ///
    /// Taken is not received: the bytes may never have left this machine. Zero proves nothing by itself:
    /// it is also what errors say that did not count, those of a response body, of a deadline and of other
    /// services. Whether nothing was sent is for [`delivery`](Error::delivery) to say.
    pub fn bytes_taken(&self) -> u64 {
        self.0.trace.taken
    }

    /// How many of them the peer's kernel had acknowledged when the attempt failed. `None` where that was
    /// not looked up (see [`Delivery::NotReceived`]) or the system does not tell.
    ///
    /// Acknowledged is not read: the bytes lie in the next kernel on the way, perhaps a proxy's. Zero does
    /// not mean unread either: acknowledgements are delayed, and a reset swallows them.
    pub fn bytes_acked(&self) -> Option<u64> {
        self.0.trace.acked
    }

    /// How many bytes of a response arrived, above TLS.
    pub fn response_bytes(&self) -> u64 {
        self.0.trace.received
    }

    /// Whether at least one byte of the response arrived.
    pub fn response_started(&self) -> bool {
        self.response_bytes() > 0 || self.phase() == Phase::ResponseBody
    }

    /// How the server ended the connection, where it did and that was seen.
    pub fn peer_end(&self) -> Option<PeerEnd> {
        self.0.trace.peer_end
    }

    /// From the moment the request was given to its connection until it failed. `None` if it never was.
    pub fn elapsed(&self) -> Option<Duration> {
        self.0.trace.elapsed
    }

    /// The connection the request was on; `None` if it never got one, or if the error is not the
    /// pool's own.
    pub fn connection(&self) -> Option<&ConnectionFacts> {
        self.0.connection.as_ref()
    }

    /// Whether the connection had carried a request before. `None` if there was no connection.
    pub fn is_reused(&self) -> Option<bool> {
        self.connection().map(ConnectionFacts::is_reused)
    }

    /// How long the connection had been idle before it was reused.
    pub fn idle_age(&self) -> Option<Duration> {
        self.connection().and_then(ConnectionFacts::idle_age)
    }

    /// Where the request was going.
    pub fn origin(&self) -> Option<&Origin> {
        self.0.origin.as_ref()
    }

    /// How often a retry layer had sent the request again before this error.
    pub fn resends(&self) -> u32 {
        self.0.resends
    }

    /// The attempts before the last one, in order, as a retry layer saw them. All else that the error tells,
    /// except its delivery, is of the last one.
    pub fn earlier_attempts(&self) -> &[Attempt] {
        &self.0.earlier
    }

    /// Why a retry layer did not send the request again. `None` if none was asked, or if there was
    /// nothing to decide.
    pub fn refusal(&self) -> Option<Refusal> {
        self.0.refusal
    }

    /// Whether the server may have acted on the request: `false` only where the evidence rules it out.
    pub fn may_have_been_processed(&self) -> bool {
        !self.delivery().is_proof_of_no_effect()
    }

    /// Whether no connection could be made: resolution, connect, handshake or their timeout.
    pub fn is_connect(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::Resolve
                | ErrorKind::Connect
                | ErrorKind::ConnectTimeout
                | ErrorKind::Tls
                | ErrorKind::Certificate
        )
    }

    /// Whether a time limit was the cause.
    pub fn is_timeout(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::ConnectTimeout
                | ErrorKind::AcquireTimeout
                | ErrorKind::Unacknowledged
                | ErrorKind::ResponseTimeout
                | ErrorKind::BodyTimeout
                | ErrorKind::RequestTimeout
                | ErrorKind::Deadline
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind().sentence())?;
        if let Some(origin) = self.origin() {
            write!(f, " ({origin})")?;
        }
        if let Some(connection) = self.connection() {
            f.write_str(": ")?;
            if self.phase() != Phase::ResponseBody {
                write!(f, "{} bytes taken", self.bytes_taken())?;
            }
            if let Some(acked) = self.bytes_acked() {
                write!(f, ", {acked} acknowledged")?;
            }
            if let Some(end) = self.peer_end() {
                write!(f, ", {end} seen")?;
            }
            if self.phase() != Phase::ResponseBody {
                f.write_str(" ")?;
            }
            f.write_str("on ")?;
            match connection.idle_age() {
                Some(idle) => write!(
                    f,
                    "a reused connection ({} served, idle {idle:.1?})",
                    connection.requests_served()
                )?,
                None => f.write_str("a fresh connection")?,
            }
        }
        write!(f, "; delivery {}", self.delivery())?;
        if self.resends() > 0 {
            write!(f, " after {} resends", self.resends())?;
        }
        if let Some(refusal) = self.refusal() {
            write!(f, "; not sent again: {refusal}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Error");
        debug
            .field("kind", &self.kind())
            .field("delivery", &self.delivery())
            .field("phase", &self.phase())
            .field("trace", &self.0.trace);
        if let Some(origin) = self.origin() {
            debug.field("origin", origin);
        }
        if let Some(connection) = self.connection() {
            debug.field("connection", connection);
        }
        if self.resends() > 0 {
            debug.field("resends", &self.resends());
        }
        if !self.earlier_attempts().is_empty() {
            debug.field("earlier_attempts", &self.earlier_attempts());
        }
        if let Some(refusal) = self.refusal() {
            debug.field("refusal", &refusal);
        }
        if let Some(source) = &self.0.source {
            debug.field("source", source);
        }
        debug.finish_non_exhaustive()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_without_evidence_is_unknown() {
        let error = Error::new(ErrorKind::ConnectionClosed, Phase::ResponseHead);
        assert_eq!(error.delivery(), Delivery::Unknown);
        assert!(error.may_have_been_processed());
    }

    #[test]
    fn a_foreign_error_is_unknown_and_keeps_its_cause() {
        let error = Error::from_service("boom".into());
        assert_eq!(error.kind(), ErrorKind::Service);
        assert_eq!(error.delivery(), Delivery::Unknown);
        assert_eq!(
            error.source().map(ToString::to_string).as_deref(),
            Some("boom")
        );
    }

    #[test]
    fn an_error_of_ours_comes_back_out_of_a_box_as_it_was() {
        let boxed: BoxError = Box::new(Error::before_sending(ErrorKind::Connect, Phase::Connect));
        let error = Error::from_service(boxed);
        assert_eq!(
            (error.kind(), error.delivery()),
            (ErrorKind::Connect, Delivery::NotSent)
        );
    }

    #[test]
    fn an_error_of_ours_inside_another_one_is_not_believed() {
        #[derive(Debug)]
        struct Wrapped(Error);
        impl fmt::Display for Wrapped {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("wrapped")
            }
        }
        impl StdError for Wrapped {
            fn source(&self) -> Option<&(dyn StdError + 'static)> {
                Some(&self.0)
            }
        }
        let inner = Error::before_sending(ErrorKind::Connect, Phase::Connect);
        let error = Error::from_service(Box::new(Wrapped(inner)));
        assert_eq!(error.delivery(), Delivery::Unknown);
    }

    #[test]
    fn display_is_one_line_that_says_what_happened() {
        let error = Error::new(ErrorKind::ConnectionClosed, Phase::ResponseHead)
            .with_trace(Trace {
                taken: 183,
                acked: Some(0),
                peer_end: Some(PeerEnd::Fin),
                ..Trace::default()
            })
            .with_connection(ConnectionFacts {
                id: 7,
                peer: None,
                served: 3,
                idle: Some(Duration::from_secs(2)),
                dial: Default::default(),
                handshake: None,
            })
            .with_refusal(Refusal::MethodNotIdempotent);
        assert_eq!(
            error.to_string(),
            "the connection closed before a response: 183 bytes taken, 0 acknowledged, fin seen on a \
             reused connection (3 served, idle 2.0s); delivery unknown; not sent again: method_not_idempotent"
        );
    }
}
