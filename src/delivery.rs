//! What is known of a request's delivery, and the marks that steer how it may be sent.
//!
//! Words only: no I/O, no decision. The wire makes a [`Delivery`] from evidence, the retry layer
//! acts on it, and neither knows the other.

use std::fmt;
use std::time::Duration;

/// What is known of a failed request's delivery. Ordered: a later one is less safe to send again.
///
/// It is made from evidence and never from hope: where the proof is missing, it is
/// [`Delivery::Unknown`]. The pool says it of one attempt; after a retry layer it is that of all attempts
/// together ([`Error::delivery`](crate::Error::delivery)).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum Delivery {
    /// No byte of the request reached the kernel: it may be sent again whatever its method.
    ///
    /// Proven by: the request was refused before any I/O; name resolution, connect or handshake failed;
    /// hyper handed the request back before it wrote any of it; or the byte counter below TLS shows that
    /// the socket took nothing.
    NotSent,
    /// The server said that it did not act on the request: 421 ([RFC 9110 section 15.5.20]) or 425
    /// ([RFC 8470 section 5.2]).
    ///
    /// Such a response is returned as a response. An error has this delivery where a retry layer went on
    /// from one, and then its deadline passed or the next attempt sent nothing.
    ///
    /// [RFC 9110 section 15.5.20]: https://www.rfc-editor.org/rfc/rfc9110.html#section-15.5.20
    /// [RFC 8470 section 5.2]: https://www.rfc-editor.org/rfc/rfc8470.html#section-5.2
    Refused,
    /// Strong evidence, not proof, that no byte of the request reached the server: it had closed its side
    /// for good, and its kernel had acknowledged nothing of the request when it did. Linux only, and only
    /// for requests that nothing else makes safe to send again.
    ///
    /// The server's FIN carries an acknowledgement that covers no byte of the request, and the connection
    /// was then reset without one: so the FIN had left before the request came, and nobody was there to
    /// read it. A server that half-closes, reads on, acts and aborts within its own acknowledgement delay
    /// looks the same. To send such a request again is therefore the caller's choice:
    /// [`RetryPolicy::resend_not_received`](crate::RetryPolicy::resend_not_received).
    NotReceived,
    /// The request may or may not have been acted on. Only an idempotent method or an idempotency
    /// key makes it safe to send again ([RFC 9110 section 9.2.2]).
    ///
    /// [RFC 9110 section 9.2.2]: https://www.rfc-editor.org/rfc/rfc9110.html#section-9.2.2
    Unknown,
}

impl Delivery {
    /// Whether the evidence rules out that the server acted on the request.
    ///
    /// `true` means that the request may be sent again whatever its method.
    pub fn is_proof_of_no_effect(self) -> bool {
        match self {
            Delivery::NotSent | Delivery::Refused => true,
            Delivery::NotReceived | Delivery::Unknown => false,
        }
    }

    /// The name used in logs and in machine-readable output: `not_sent`, `refused`,
    /// `not_received`, `unknown`.
    pub fn as_str(self) -> &'static str {
        match self {
            Delivery::NotSent => "not_sent",
            Delivery::Refused => "refused",
            Delivery::NotReceived => "not_received",
            Delivery::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request extension: this request must go on a freshly dialled connection.
///
/// The retry layer puts it on every attempt after the first, because the idle siblings of a connection
/// that just died are suspect too. A caller may use it for a request that must not meet a stale
/// connection at any price:
///
/// ```
/// # fn main() -> Result<(), http::Error> {
/// let request = http::Request::post("https://pay.example/payments")
///     .extension(idempool::FreshConnection)
///     .body(idempool::ReplayBody::from("amount=10"))?;
/// # drop(request); Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FreshConnection;

/// A request extension: how long this request may take, in place of the pool's
/// [`request_timeout`](crate::Builder::request_timeout).
///
/// Zero fails at once, before anything is sent. `Duration::MAX` is no limit. Under a retry layer it is each
/// attempt's time, as the pool's option is.
///
/// ```
/// use std::time::Duration;
///
/// # fn main() -> Result<(), http::Error> {
/// let request = http::Request::get("https://pay.example/report")
///     .extension(idempool::RequestTimeout(Duration::from_secs(5)))
///     .body(idempool::ReplayBody::empty())?;
/// # drop(request); Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RequestTimeout(pub Duration);

/// A request extension: the caller states that this request is idempotent although its method is not.
///
/// It puts nothing on the wire. Use it for a POST that is really a query, or for one whose effect the
/// server deduplicates by something in its body. The retry layer then treats the request as
/// [`Class::Idempotent`](crate::Class::Idempotent), as [RFC 9110 section 9.2.2] allows to a client
/// that "knows the request semantics are actually idempotent".
///
/// [RFC 9110 section 9.2.2]: https://www.rfc-editor.org/rfc/rfc9110.html#section-9.2.2
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TreatAsIdempotent;

/// A request extension: which resend of a logical request this is. Set by the retry layer.
///
/// Zero is the first attempt. Named after OpenTelemetry's `http.request.resend_count`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ResendCount(pub u32);

/// A request extension: the retry layer will send this request again if its connection fails, as far as its
/// budget reaches. So evidence of its delivery is not worth a system call, and it need not wait for a
/// connection that looks dead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repeatable;

/// How the other side of a connection was seen to end it, at the first sign.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum PeerEnd {
    /// A FIN: it had nothing more to send. It may still have been reading.
    Fin,
    /// A reset without a FIN before it. What it had read until then is not known: a reset carries no
    /// acknowledgement that counts.
    Reset,
}

impl PeerEnd {
    /// The name used in logs: `fin`, `reset`.
    pub fn as_str(self) -> &'static str {
        match self {
            PeerEnd::Fin => "fin",
            PeerEnd::Reset => "reset",
        }
    }
}

impl fmt::Display for PeerEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_are_ordered_by_how_unsafe_a_resend_is() {
        assert!(Delivery::NotSent < Delivery::Refused);
        assert!(Delivery::Refused < Delivery::NotReceived);
        assert!(Delivery::NotReceived < Delivery::Unknown);
    }

    #[test]
    fn strong_evidence_is_no_proof() {
        assert!(Delivery::NotSent.is_proof_of_no_effect());
        assert!(Delivery::Refused.is_proof_of_no_effect());
        assert!(!Delivery::NotReceived.is_proof_of_no_effect());
        assert!(!Delivery::Unknown.is_proof_of_no_effect());
    }
}
