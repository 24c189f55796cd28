//! The counts: what the pool saved, and why each connection closed.
//!
//! [`Counters`] are the live atomics, [`Stats`] is a value read from them. Every connection that was
//! opened is, at any time, either open or counted under exactly one [`CloseReason`]; every request is
//! counted once, however many connections it took.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::origin::Origin;

/// Declares an enum of reasons together with its stable names and its number of variants.
macro_rules! reasons {
    (
        $(#[$meta:meta])*
        $name:ident { $( $(#[$vmeta:meta])* $variant:ident = $text:literal, )+ }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[non_exhaustive]
        pub enum $name { $( $(#[$vmeta])* $variant, )+ }

        impl $name {
            pub(crate) const ALL: &'static [$name] = &[ $( $name::$variant, )+ ];

            /// The name used in logs, in metrics and in `Display`.
            pub fn as_str(self) -> &'static str {
                match self { $( $name::$variant => $text, )+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

reasons! {
    /// Why a connection was closed. Each one is a counter.
    CloseReason {
        /// It had been idle for the idle timeout.
        IdleTimeout = "idle_timeout",
        /// The server closed it while it was idle, and its own task saw that at once.
        PeerClosedIdle = "peer_closed_idle",
        /// The server reset it while it was idle.
        PeerResetIdle = "peer_reset_idle",
        /// Bytes that nobody had asked for arrived: behind a response, while it was idle, or before a
        /// request was written ([RFC 9112 section 9.2]).
        ///
        /// [RFC 9112 section 9.2]: https://www.rfc-editor.org/rfc/rfc9112.html#section-9.2
        UnexpectedBytes = "unexpected_bytes",
        /// The probe at checkout found that the server had closed or reset it.
        ProbeFoundClosed = "probe_found_closed",
        /// The probe found bytes on a TLS connection, and its task did not clear them up in time.
        ProbeInconclusive = "probe_inconclusive",
        /// The response said so: `Connection: close`, or HTTP/1.0 without `keep-alive`.
        ResponseSaidClose = "response_said_close",
        /// The request said so with `Connection: close`.
        RequestSaidClose = "request_said_close",
        /// The response's framing allows no further message: delimited by the close, an HTTP/1.0
        /// message with `Transfer-Encoding`, a protocol switch.
        Framing = "framing",
        /// The exchange failed: closed, reset, or not HTTP.
        ExchangeFailed = "exchange_failed",
        /// The caller dropped the request before its response head.
        RequestDropped = "request_dropped",
        /// The caller dropped a response body of which more was left than is worth reading.
        BodyDropped = "body_dropped",
        /// The response ended while the request's body was still being sent.
        UploadUnfinished = "upload_unfinished",
        /// Enough idle connections were kept already.
        IdleLimit = "idle_limit",
        /// An idle connection made room for one to another origin, or for a fresh one.
        MadeRoom = "made_room",
        /// It had existed for its lifetime.
        Lifetime = "lifetime",
        /// It had carried as many requests as a connection may.
        RequestLimit = "request_limit",
        /// The host's name does not lead to its address any more.
        AddressGone = "address_gone",
        /// Its origin was evicted.
        Evicted = "evicted",
        /// A time limit of the exchange on it was over.
        TimedOut = "timed_out",
        /// The pool was closed.
        PoolClosed = "pool_closed",
        /// The last handle of the pool was dropped.
        PoolDropped = "pool_dropped",
        /// The runtime that drove the connection was shut down.
        RuntimeGone = "runtime_gone",
    }
}

reasons! {
    /// Why the retry layer sent a request again.
    RetryReason {
        /// No byte of it had been sent.
        NotSent = "not_sent",
        /// The kernel's evidence said that no byte of it had been received.
        NotReceived = "not_received",
        /// The connection broke before all of it was written.
        Incomplete = "incomplete",
        /// A reused connection broke before the response.
        StaleConnection = "stale_connection",
        /// A fresh connection broke before the response, or nothing is known of the connection.
        NoResponse = "no_response",
        /// 421 Misdirected Request.
        Misdirected = "misdirected_421",
        /// 425 Too Early.
        TooEarly = "too_early_425",
        /// 408 Request Timeout.
        RequestTimeout = "request_timeout_408",
        /// 429 Too Many Requests.
        TooManyRequests = "too_many_requests_429",
        /// 500 Internal Server Error.
        ServerError = "server_error_500",
        /// 502 Bad Gateway.
        BadGateway = "bad_gateway_502",
        /// 503 Service Unavailable.
        Unavailable = "unavailable_503",
        /// 504 Gateway Timeout.
        GatewayTimeout = "gateway_timeout_504",
        /// The server asked for it in a field of its own.
        AskedBack = "asked_back",
    }
}

reasons! {
    /// Why the retry layer did not send a failed request again.
    Refusal {
        /// Neither its method nor a key makes it idempotent, and there is no proof that it had no
        /// effect.
        MethodNotIdempotent = "method_not_idempotent",
        /// Its body was a one-shot stream that has been read from.
        BodyNotReplayable = "body_not_replayable",
        /// The retry budget is spent.
        Budget = "budget",
        /// The deadline has passed, or would pass before the next attempt could start.
        Deadline = "deadline",
        /// The server asked for a longer wait than the policy allows.
        RetryAfterTooLong = "retry_after_too_long",
        /// As many attempts were made as the policy allows.
        Attempts = "attempts",
        /// The response had begun: its head may have been acted on already.
        Committed = "committed",
        /// A retry layer further down has already sent it again.
        AlreadyRetried = "already_retried",
    }
}

/// Live counters, shared by a pool, its connections and the retry layers above it.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) requests: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) opened: AtomicU64,
    pub(crate) dials_failed: AtomicU64,
    pub(crate) reused: AtomicU64,
    pub(crate) tls_full: AtomicU64,
    pub(crate) tls_resumed: AtomicU64,
    pub(crate) tls_saved: AtomicU64,
    pub(crate) round_trips_saved: AtomicU64,
    nanos_saved: AtomicU64,
    nanos_distrusted: AtomicU64,
    pub(crate) stale_by_probe: AtomicU64,
    pub(crate) closed_while_idle: AtomicU64,
    pub(crate) stale_after_write: AtomicU64,
    pub(crate) handed_back: AtomicU64,
    pub(crate) acks_hastened: AtomicU64,
    pub(crate) dialed_ahead: AtomicU64,
    closes: [AtomicU64; CloseReason::ALL.len()],
    retries: [AtomicU64; RetryReason::ALL.len()],
    refusals: [AtomicU64; Refusal::ALL.len()],
}

impl Counters {
    pub(crate) fn new() -> Self {
        fn zeroes<const N: usize>() -> [AtomicU64; N] {
            std::array::from_fn(|_| AtomicU64::new(0))
        }
        Counters {
            requests: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            dials_failed: AtomicU64::new(0),
            reused: AtomicU64::new(0),
            tls_full: AtomicU64::new(0),
            tls_resumed: AtomicU64::new(0),
            tls_saved: AtomicU64::new(0),
            round_trips_saved: AtomicU64::new(0),
            nanos_saved: AtomicU64::new(0),
            nanos_distrusted: AtomicU64::new(0),
            stale_by_probe: AtomicU64::new(0),
            closed_while_idle: AtomicU64::new(0),
            stale_after_write: AtomicU64::new(0),
            handed_back: AtomicU64::new(0),
            acks_hastened: AtomicU64::new(0),
            dialed_ahead: AtomicU64::new(0),
            closes: zeroes(),
            retries: zeroes(),
            refusals: zeroes(),
        }
    }

    pub(crate) fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    /// One more connection is established. `resumed` tells how its session came about, with TLS.
    pub(crate) fn opened(&self, resumed: Option<bool>) {
        Self::add(&self.opened);
        match resumed {
            Some(false) => Self::add(&self.tls_full),
            Some(true) => Self::add(&self.tls_resumed),
            None => {}
        }
    }

    /// One more request was answered over a connection that was already open. `round_trips` and `time`
    /// are what opening it had cost, `secure` whether that includes a handshake.
    pub(crate) fn saved(&self, round_trips: u32, time: Duration, secure: bool) {
        Self::add(&self.reused);
        if secure {
            Self::add(&self.tls_saved);
        }
        self.round_trips_saved
            .fetch_add(round_trips.into(), Relaxed);
        self.nanos_saved.fetch_add(nanos(time), Relaxed);
    }

    /// A request that found only connections too old to trust has waited so long for another.
    pub(crate) fn distrusted(&self, time: Duration) {
        self.nanos_distrusted.fetch_add(nanos(time), Relaxed);
    }

    pub(crate) fn closed(&self, reason: CloseReason) {
        Self::add(&self.closes[reason as usize]);
    }

    pub(crate) fn retried(&self, reason: RetryReason) {
        Self::add(&self.retries[reason as usize]);
    }

    pub(crate) fn refused(&self, refusal: Refusal) {
        Self::add(&self.refusals[refusal as usize]);
    }

    /// Reads every counter. Not one instant: counters that move meanwhile may disagree by a few.
    pub(crate) fn snapshot(&self) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        Stats {
            requests: read(&self.requests),
            requests_failed: read(&self.failed),
            connections_opened: read(&self.opened),
            connections_saved: read(&self.reused),
            dials_failed: read(&self.dials_failed),
            tls_full: read(&self.tls_full),
            tls_resumed: read(&self.tls_resumed),
            tls_saved: read(&self.tls_saved),
            round_trips_saved: read(&self.round_trips_saved),
            time_saved: Duration::from_nanos(read(&self.nanos_saved)),
            stale_caught_by_probe: read(&self.stale_by_probe),
            closed_while_idle: read(&self.closed_while_idle),
            stale_after_write: read(&self.stale_after_write),
            handed_back: read(&self.handed_back),
            acks_hastened: read(&self.acks_hastened),
            dialed_ahead: read(&self.dialed_ahead),
            too_old_to_trust: 0,
            waited_for_trust: Duration::from_nanos(read(&self.nanos_distrusted)),
            closes: ByReason::read(CloseReason::ALL, &self.closes),
            retries: ByReason::read(RetryReason::ALL, &self.retries),
            refusals: ByReason::read(Refusal::ALL, &self.refusals),
            idle: 0,
            busy: 0,
            dialing: 0,
            closing: 0,
            waiting: 0,
            origins: Vec::new(),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Where the retry layer notes its decisions, so that the pool's statistics can show them.
///
/// It travels on the pool's responses and errors. The layer needs no other link to the pool, and works
/// without it over services that know nothing of idempool.
#[derive(Clone, Debug)]
pub(crate) struct RetryLedger(pub(crate) Arc<Counters>);

/// Counts by reason; reasons that never happened are left out.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ByReason<R>(Vec<(R, u64)>);

impl<R: Copy + Eq> ByReason<R> {
    fn read(all: &[R], counters: &[AtomicU64]) -> Self {
        let counts = all
            .iter()
            .copied()
            .zip(counters.iter().map(|c| c.load(Relaxed)));
        ByReason(counts.filter(|&(_, count)| count > 0).collect())
    }

    /// How often this reason was counted.
    pub fn get(&self, reason: R) -> u64 {
        self.0
            .iter()
            .find(|(r, _)| *r == reason)
            .map_or(0, |&(_, count)| count)
    }

    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|&(_, count)| count).sum()
    }

    /// The reasons that happened, in the order of their declaration.
    pub fn iter(&self) -> impl Iterator<Item = (R, u64)> + '_ {
        self.0.iter().copied()
    }
}

/// What a pool has done and saved since it was built. A value: it does not change after it was read.
///
/// `Display` prints it for a person. The gauges (`idle`, `busy`, `dialing`, `closing`, `waiting`) and `origins` are
/// of this moment, all else counts from the pool's beginning.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Requests that callers handed to the pool. A resend by the retry layer counts again.
    pub requests: u64,
    /// Of these, the ones that ended in an error before their response head.
    pub requests_failed: u64,
    /// Connections that were established, TLS included.
    pub connections_opened: u64,
    /// Requests that were answered over a connection that had carried another one before: each saved
    /// a dial.
    pub connections_saved: u64,
    /// Dials that failed in name resolution, connect or handshake.
    pub dials_failed: u64,
    /// TLS handshakes with certificates.
    pub tls_full: u64,
    /// TLS handshakes that resumed an earlier session.
    pub tls_resumed: u64,
    /// TLS handshakes that reuse made unnecessary.
    pub tls_saved: u64,
    /// Round trips that reuse made unnecessary: those that opening the reused connection had taken, for
    /// each connection saved.
    pub round_trips_saved: u64,
    /// What opening the reused connection had taken, for each connection saved.
    pub time_saved: Duration,
    /// Idle connections that the server had closed and the probe at checkout caught.
    pub stale_caught_by_probe: u64,
    /// Idle connections that the server closed, reset or wrote to, seen by their own task.
    pub closed_while_idle: u64,
    /// Reused connections that broke after a byte of the request was written: what no check can
    /// prevent.
    pub stale_after_write: u64,
    /// Times that the pool itself moved a request of which no byte was sent to another connection.
    pub handed_back: u64,
    /// Responses whose beginning was acknowledged at once because their server waits for that: each saved a
    /// delay of 40 ms (Linux and Android).
    pub acks_hastened: u64,
    /// Connections that were dialled before a request needed them, because another one was about to be closed by the
    /// server or had carried almost as many requests as it may.
    pub dialed_ahead: u64,
    /// Times that a request which must not be sent twice found idle connections that had been idle for too long
    /// to be trusted with it, and went on another.
    pub too_old_to_trust: u64,
    /// How long these requests waited for the other connection, in all: what the caution cost.
    pub waited_for_trust: Duration,
    /// Connections closed, by reason.
    pub closes: ByReason<CloseReason>,
    /// Requests sent again by a retry layer above this pool, by reason.
    pub retries: ByReason<RetryReason>,
    /// Failed requests that a retry layer did not send again, by reason.
    pub refusals: ByReason<Refusal>,
    /// Connections that wait for a request now.
    pub idle: u64,
    /// Connections that carry an exchange now, bodies being drained included.
    pub busy: u64,
    /// Connections being opened now.
    pub dialing: u64,
    /// Connections that are closed on our side now and wait, for a second at most, for the other side to
    /// close. They count against the limits.
    pub closing: u64,
    /// Requests that wait for a connection now, whether it is being opened for them or not.
    pub waiting: u64,
    /// Each origin that has a connection or a waiting request now, in order.
    pub origins: Vec<OriginStats>,
}

/// One origin of a pool at one moment.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct OriginStats {
    /// The origin.
    pub origin: Origin,
    /// Connections that wait for a request.
    pub idle: u64,
    /// Connections that carry an exchange.
    pub busy: u64,
    /// Connections being opened.
    pub dialing: u64,
    /// Connections that are closed on our side and wait for the other.
    pub closing: u64,
    /// Requests that wait for a connection.
    pub waiting: u64,
    /// How long ago the oldest open connection was established.
    pub oldest_connection: Option<Duration>,
    /// How long the connection that was used longest ago has been idle.
    pub longest_idle: Option<Duration>,
    /// How long the first in line has waited.
    pub longest_wait: Option<Duration>,
}

impl OriginStats {
    /// What is not zero, in one line.
    pub(crate) fn gauges(&self) -> impl fmt::Debug + '_ {
        struct Gauges<'a>(&'a OriginStats);
        impl fmt::Debug for Gauges<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0.line())
            }
        }
        Gauges(self)
    }

    fn line(&self) -> String {
        let age = |age: Option<Duration>, what: &str| {
            age.map(|age| format!(", {what} {age:.1?}"))
                .unwrap_or_default()
        };
        format!(
            "{} idle, {} busy, {} dialing, {} closing, {} waiting{}{}{}",
            self.idle,
            self.busy,
            self.dialing,
            self.closing,
            self.waiting,
            age(self.oldest_connection, "oldest"),
            age(self.longest_idle, "idle for up to"),
            age(self.longest_wait, "waiting for up to"),
        )
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "requests     {} ({} failed)",
            self.requests, self.requests_failed
        )?;
        writeln!(
            f,
            "connections  {} opened, {} saved; {} dials failed",
            self.connections_opened, self.connections_saved, self.dials_failed
        )?;
        writeln!(
            f,
            "now          {} idle, {} busy, {} dialing, {} closing; {} requests waiting",
            self.idle, self.busy, self.dialing, self.closing, self.waiting
        )?;
        writeln!(
            f,
            "tls          {} full, {} resumed, {} saved",
            self.tls_full, self.tls_resumed, self.tls_saved
        )?;
        writeln!(
            f,
            "saved        {} round trips, {:.1?}",
            self.round_trips_saved, self.time_saved
        )?;
        write!(
            f,
            "stale        {} closed while idle, {} caught by the probe, {} met after writing; {} handed back unsent",
            self.closed_while_idle,
            self.stale_caught_by_probe,
            self.stale_after_write,
            self.handed_back
        )?;
        if self.too_old_to_trust > 0 {
            write!(
                f,
                "; {} too old to trust, which cost {:.1?}",
                self.too_old_to_trust, self.waited_for_trust
            )?;
        }
        if self.acks_hastened > 0 {
            write!(
                f,
                "\nsplit        {} responses came in two parts and were acknowledged at once",
                self.acks_hastened
            )?;
        }
        if self.dialed_ahead > 0 {
            write!(
                f,
                "\nahead        {} dialled before they were needed",
                self.dialed_ahead
            )?;
        }
        line(f, "closed", &self.closes)?;
        line(f, "retried", &self.retries)?;
        line(f, "not retried", &self.refusals)?;
        for origin in self.origins.iter().take(ORIGINS_SHOWN) {
            write!(f, "\n{}  {}", origin.origin, origin.line())?;
        }
        match self.origins.len().saturating_sub(ORIGINS_SHOWN) {
            0 => Ok(()),
            more => write!(f, "\nand {more} more origins"),
        }
    }
}

/// As many as a person reads.
const ORIGINS_SHOWN: usize = 10;

fn line<R: Copy + Eq + fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    counts: &ByReason<R>,
) -> fmt::Result {
    if counts.total() == 0 {
        return Ok(());
    }
    write!(f, "\n{title:<11}  {}", counts.total())?;
    for (at, (reason, count)) in counts.iter().enumerate() {
        let before = if at == 0 { ": " } else { ", " };
        write!(f, "{before}{count} {reason}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_counter_and_name() {
        let counters = Counters::new();
        for (at, &reason) in CloseReason::ALL.iter().enumerate() {
            for _ in 0..=at {
                counters.closed(reason);
            }
        }
        let stats = counters.snapshot();
        let mut names = std::collections::HashSet::new();
        for (at, &reason) in CloseReason::ALL.iter().enumerate() {
            assert_eq!(stats.closes.get(reason), at as u64 + 1, "{reason}");
            assert!(names.insert(reason.as_str()), "{reason} is named twice");
        }
    }

    #[test]
    fn a_saved_connection_saves_what_a_dial_to_its_origin_costs() {
        let counters = Counters::new();
        counters.saved(2, Duration::from_millis(31), true);
        counters.saved(2, Duration::from_millis(31), true);
        let stats = counters.snapshot();
        assert_eq!(stats.connections_saved, 2);
        assert_eq!(stats.tls_saved, 2);
        assert_eq!(stats.round_trips_saved, 4);
        assert_eq!(stats.time_saved, Duration::from_millis(62));
    }

    #[test]
    fn display_leaves_out_what_never_happened() {
        let counters = Counters::new();
        assert!(!counters.snapshot().to_string().contains("retried"));
        counters.retried(RetryReason::StaleConnection);
        counters.refused(Refusal::MethodNotIdempotent);
        let text = counters.snapshot().to_string();
        assert!(
            text.contains("retried      1: 1 stale_connection"),
            "{text}"
        );
        assert!(
            text.contains("not retried  1: 1 method_not_idempotent"),
            "{text}"
        );
    }
}
