//! From what hyper, the byte counter and the kernel say to one error: the only place that decides a
//! [`Delivery`], and the only one that looks into errors of hyper, rustls and the system.
//!
//! # The rule
//!
//! No byte taken, or the request handed back: `NotSent`. Everything else: `Unknown`. hyper's own words
//! for the failure (incomplete message, connection reset, broken pipe, body write aborted) depend on
//! which side noticed first and prove nothing, so they all become one kind.

use std::error::Error as StdError;
use std::io;

use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind, Phase};
use crate::stats::CloseReason;
use crate::wire::meter::Traffic;
use crate::wire::outgoing::Upload;
use crate::wire::socket::Peek;

/// The error of an exchange that ended before its response head.
pub(crate) fn of_exchange(error: hyper::Error, traffic: Traffic, upload: &Upload) -> Error {
    let kind = if upload.has_failed() {
        ErrorKind::RequestBody
    } else if error.is_parse() {
        ErrorKind::Protocol
    } else {
        ErrorKind::ConnectionClosed
    };
    let phase = if upload.is_finished() {
        Phase::ResponseHead
    } else {
        Phase::Send
    };
    let delivery = if traffic.taken == 0 {
        Delivery::NotSent
    } else {
        Delivery::Unknown
    };
    Error::new(kind, phase)
        .with_delivery(delivery)
        .with_bytes_taken(traffic.taken)
        .with_response_started(traffic.received > 0)
        .with_source(error)
}

/// The error of an exchange whose request hyper handed back: nothing of it was written.
pub(crate) fn of_hand_back(error: hyper::Error) -> Error {
    Error::new(ErrorKind::ConnectionClosed, Phase::Send)
        .with_delivery(Delivery::NotSent)
        .with_source(error)
}

/// Why a connection ended that handed a request back, where hyper gave that reason to the request and
/// not to the connection's task: it does so for a request that was queued when it saw the end.
pub(crate) fn of_hand_back_end(error: &hyper::Error) -> Option<CloseReason> {
    let cause = error.source()?.downcast_ref::<hyper::Error>()?;
    Some(of_idle_error(cause))
}

/// The error of a response body that ended before its end. The head was delivered: whatever the
/// request did is done.
pub(crate) fn of_response_body(error: hyper::Error) -> Error {
    Error::new(ErrorKind::ResponseBody, Phase::ResponseBody)
        .with_delivery(Delivery::Unknown)
        .with_response_started(true)
        .with_source(error)
}

/// What a peek found, as the reason to close.
pub(crate) fn of_peek(peek: Peek) -> CloseReason {
    match peek {
        Peek::Readable => CloseReason::UnexpectedBytes,
        Peek::Closed | Peek::Broken(_) | Peek::Quiet => CloseReason::ProbeFoundClosed,
    }
}

/// How a connection's own task saw it end, for a connection that nobody was using.
pub(crate) fn of_end(result: &Result<(), hyper::Error>) -> CloseReason {
    match result {
        Ok(()) => CloseReason::PeerClosedIdle,
        Err(error) => of_idle_error(error),
    }
}

fn of_idle_error(error: &hyper::Error) -> CloseReason {
    match io_cause(error) {
        // TLS without close_notify: closed, if not politely.
        Some(io::ErrorKind::UnexpectedEof) => CloseReason::PeerClosedIdle,
        Some(_) => CloseReason::PeerResetIdle,
        // hyper has no predicate for "unexpected bytes"; it is the one error without a cause that an
        // idle connection can end with.
        None => CloseReason::UnexpectedBytes,
    }
}

/// A failed handshake, told apart by whether trying again can help.
#[cfg(feature = "tls")]
pub(crate) fn of_handshake(error: io::Error) -> Error {
    let kind = if is_certificate_failure(&error) {
        ErrorKind::Certificate
    } else {
        ErrorKind::Tls
    };
    Error::before_sending(kind, Phase::Handshake).with_source(error)
}

#[cfg(feature = "tls")]
fn is_certificate_failure(error: &io::Error) -> bool {
    use rustls::AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked,
        CertificateUnknown, UnknownCA, UnsupportedCertificate,
    };
    let Some(source) = error.get_ref() else {
        return false;
    };
    match source.downcast_ref::<rustls::Error>() {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => true,
        Some(rustls::Error::AlertReceived(alert)) => matches!(
            alert,
            AccessDenied
                | BadCertificate
                | CertificateExpired
                | CertificateRequired
                | CertificateRevoked
                | CertificateUnknown
                | UnknownCA
                | UnsupportedCertificate
        ),
        _ => false,
    }
}

fn io_cause(error: &hyper::Error) -> Option<io::ErrorKind> {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        source = cause.source();
    }
    None
}
