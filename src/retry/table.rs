//! The decision table: what is known of a failure, by what the request is, gives a verdict.
//!
//! Decides what is safe, and reads the evidence for it out of errors and responses; never how often or
//! after what wait: that is `policy`. Pure.
//!
//! # Invariants
//!
//! * In the column of [`Class::Unkeyed`], only proof of no effect has another verdict than `No`.

use http::{HeaderMap, StatusCode};

use crate::delivery::Delivery;
use crate::error::{Error, ErrorKind, Phase};
use crate::retry::idempotency::Class;
use crate::stats::RetryReason;

/// What is known of an attempt that did not succeed. One row of the table each.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Evidence {
    /// No connection came about.
    NoConnection,
    /// There was a connection, and nothing was sent on it.
    Unsent,
    /// The server said without a status that it did not act on the request.
    Refused,
    /// The kernel's evidence says that no byte of it was received.
    NotReceived,
    /// The connection ended while the request was still being written: the server never had all of it.
    Incomplete,
    Misdirected,
    TooEarly,
    /// A reused connection ended before any byte of a response, or acknowledged nothing of the request.
    StaleConnection,
    /// A fresh connection ended before any byte of a response.
    FreshConnection,
    /// Nothing is known: a time limit, or an error of some other service.
    Lost,
    /// A response began, and its head never ended.
    HeadTruncated,
    /// The response head had been delivered.
    Committed,
    NotHttp,
    RequestTimeout,
    TooManyRequests,
    Unavailable,
    BadGateway,
    GatewayTimeout,
    ServerError,
    /// The server says in a field of its own that the request should be sent again.
    AskedBack,
    /// The same field says that it should not.
    PushedBack,
    /// A server error that is marked as the stored answer for this key.
    Replayed,
    Conflict,
    /// Any other response: an answer, good or bad.
    Answered,
    /// Certificate refused, request or its body invalid, deadline passed.
    Final,
}

/// What the table says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Verdict {
    /// At once.
    Now,
    /// At once, and not a second time.
    NowOnce,
    /// At once the first time, later after a wait.
    NowThenWait,
    /// After a wait.
    Wait,
    /// After a wait, and not a second time.
    WaitOnce,
    /// At once if the policy says so, else not.
    NowIf(OptIn),
    /// After a wait if the policy says so, else not.
    WaitIf(OptIn),
    /// Not.
    No,
}

/// What a policy may opt in to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OptIn {
    /// To trust the kernel's evidence.
    NotReceived,
    /// To trust that nobody acts on a part of a request.
    Incomplete,
    /// To trust that the origin turns requests away before it acts on them.
    Rejections,
    /// To ask again after a 500.
    ServerError,
}

/// The decision table. Every resend goes to a fresh connection.
///
/// Left out, because HTTP/1.1 has no such evidence: GOAWAY and `RST_STREAM` of HTTP/2. Its
/// `REFUSED_STREAM` has its row.
pub(crate) fn verdict(evidence: Evidence, class: Class) -> Verdict {
    use OptIn::{Incomplete, NotReceived, Rejections, ServerError};
    use Verdict::{No, Now, NowIf, NowOnce, NowThenWait, Wait, WaitIf, WaitOnce};
    #[rustfmt::skip]
    let [safe, idempotent, keyed, unkeyed] = match evidence {
        // Never sent, or not acted on: safe whatever the method (RFC 9110 section 9.2.2).
        Evidence::Unsent          => [Now,      Now,      Now,         Now    ],
        Evidence::NoConnection    => [Wait,     Wait,     Wait,        Wait   ],
        Evidence::Refused         => [NowOnce,  NowOnce,  NowOnce,     NowOnce],
        Evidence::Misdirected     => [NowOnce,  NowOnce,  NowOnce,     NowOnce], // 9110 15.5.20
        Evidence::TooEarly        => [NowOnce,  NowOnce,  NowOnce,     NowOnce], // 8470 5.2
        // Strong evidence, not proof.
        Evidence::NotReceived     => [Now,      Now,      Now,         NowIf(NotReceived)],
        Evidence::Incomplete      => [Now,      Now,      Now,         NowIf(Incomplete)], // 9112 6.3, 8
        // Ambiguous. A failed automatic retry is not retried (9110 9.2.2), but see `keyed_beyond_one`.
        Evidence::StaleConnection => [NowOnce,  NowOnce,  NowThenWait, No     ], // 9112 9.3.1
        Evidence::FreshConnection => [WaitOnce, WaitOnce, Wait,        No     ],
        Evidence::Lost            => [WaitOnce, WaitOnce, Wait,        No     ],
        Evidence::HeadTruncated   => [WaitOnce, WaitOnce, Wait,        No     ],
        // Delivered, or not to be trusted.
        Evidence::Committed       => [No,       No,       No,          No     ],
        Evidence::NotHttp         => [No,       No,       No,          No     ],
        // Answered. 429 and 503 do not say that the request had no effect (9110 15.6.4, 6585 4).
        Evidence::RequestTimeout  => [NowOnce,  NowOnce,  Wait,        WaitIf(Rejections)], // 15.5.9
        Evidence::TooManyRequests => [Wait,     Wait,     Wait,        WaitIf(Rejections)],
        Evidence::Unavailable     => [Wait,     Wait,     Wait,        WaitIf(Rejections)],
        Evidence::BadGateway      => [Wait,     Wait,     Wait,        No     ],
        Evidence::GatewayTimeout  => [Wait,     Wait,     Wait,        No     ],
        Evidence::ServerError     => [WaitIf(ServerError), WaitIf(ServerError), Wait, No],
        // A server's own field overrides its status, and not what is safe.
        Evidence::AskedBack       => [Wait,     Wait,     Wait,        No     ],
        Evidence::PushedBack      => [No,       No,       No,          No     ],
        Evidence::Replayed        => [No,       No,       No,          No     ],
        Evidence::Conflict        => [No,       No,       No,          No     ], // three meanings
        Evidence::Answered        => [No,       No,       No,          No     ],
        Evidence::Final           => [No,       No,       No,          No     ],
    };
    match class {
        Class::Safe => safe,
        Class::Idempotent => idempotent,
        Class::Keyed => keyed,
        Class::Unkeyed => unkeyed,
    }
}

impl Evidence {
    /// What to count a resend under. `None` where no cell of the row allows one.
    pub(crate) fn reason(self) -> Option<RetryReason> {
        Some(match self {
            Evidence::NoConnection | Evidence::Unsent | Evidence::Refused => RetryReason::NotSent,
            Evidence::Misdirected => RetryReason::Misdirected,
            Evidence::TooEarly => RetryReason::TooEarly,
            Evidence::NotReceived => RetryReason::NotReceived,
            Evidence::Incomplete => RetryReason::Incomplete,
            Evidence::StaleConnection => RetryReason::StaleConnection,
            Evidence::FreshConnection | Evidence::Lost | Evidence::HeadTruncated => {
                RetryReason::NoResponse
            }
            Evidence::RequestTimeout => RetryReason::RequestTimeout,
            Evidence::TooManyRequests => RetryReason::TooManyRequests,
            Evidence::Unavailable => RetryReason::Unavailable,
            Evidence::BadGateway => RetryReason::BadGateway,
            Evidence::GatewayTimeout => RetryReason::GatewayTimeout,
            Evidence::ServerError => RetryReason::ServerError,
            Evidence::AskedBack => RetryReason::AskedBack,
            Evidence::Committed
            | Evidence::NotHttp
            | Evidence::PushedBack
            | Evidence::Replayed
            | Evidence::Conflict
            | Evidence::Answered
            | Evidence::Final => return None,
        })
    }

    /// Whether the attempt is proven to have had no effect: free of budget and attempt count.
    pub(crate) fn is_proof_of_no_effect(self) -> bool {
        matches!(self, Evidence::NoConnection | Evidence::Unsent) || self.is_refusal()
    }

    pub(crate) fn is_refusal(self) -> bool {
        matches!(
            self,
            Evidence::Refused | Evidence::Misdirected | Evidence::TooEarly
        )
    }

    /// Whether it is a communication failure that leaves the effect open.
    pub(crate) fn is_ambiguous(self) -> bool {
        matches!(
            self,
            Evidence::NotReceived
                | Evidence::Incomplete
                | Evidence::StaleConnection
                | Evidence::FreshConnection
                | Evidence::Lost
                | Evidence::HeadTruncated
        )
    }

    /// What an attempt that ended like this tells of its delivery.
    pub(crate) fn delivery(self) -> Delivery {
        match self {
            Evidence::NoConnection | Evidence::Unsent => Delivery::NotSent,
            Evidence::NotReceived => Delivery::NotReceived,
            evidence if evidence.is_refusal() => Delivery::Refused,
            _ => Delivery::Unknown,
        }
    }
}

/// Reads the evidence in an error.
pub(crate) fn classify_error(error: &Error) -> Evidence {
    match error.kind() {
        ErrorKind::Certificate
        | ErrorKind::InvalidRequest
        | ErrorKind::RequestBody
        | ErrorKind::Deadline
        // Limits of the caller's own: to ask again at once is what they are there to stop.
        | ErrorKind::AcquireTimeout
        | ErrorKind::Overloaded
        | ErrorKind::PoolClosed => return Evidence::Final,
        ErrorKind::RequestTimeout if error.phase() == Phase::Queue => return Evidence::Final,
        ErrorKind::Protocol => return Evidence::NotHttp,
        _ if error.phase() == Phase::ResponseBody => return Evidence::Committed,
        ErrorKind::ResponseBody => return Evidence::Committed,
        _ => {}
    }
    match (error.delivery(), error.kind()) {
        (Delivery::NotSent, _) if error.is_connect() => Evidence::NoConnection,
        (Delivery::NotSent, _) => Evidence::Unsent,
        (Delivery::Refused, _) => Evidence::Refused,
        (Delivery::NotReceived, _) => Evidence::NotReceived,
        (Delivery::Unknown, ErrorKind::ConnectionClosed)
            if error.phase() == Phase::Send && !error.response_started() =>
        {
            Evidence::Incomplete
        }
        (Delivery::Unknown, ErrorKind::ConnectionClosed) => {
            match (error.response_started(), error.is_reused()) {
                (true, _) => Evidence::HeadTruncated,
                (false, Some(true)) => Evidence::StaleConnection,
                (false, Some(false)) => Evidence::FreshConnection,
                (false, None) => Evidence::Lost,
            }
        }
        (Delivery::Unknown, ErrorKind::Unacknowledged) if error.is_reused() == Some(true) => {
            Evidence::StaleConnection
        }
        (Delivery::Unknown, _) => Evidence::Lost,
    }
}

/// Reads the evidence in a response.
pub(crate) fn classify_response(status: StatusCode, headers: &HeaderMap) -> Evidence {
    if status.is_server_error() && is_replayed(headers) {
        return Evidence::Replayed;
    }
    match status {
        StatusCode::MISDIRECTED_REQUEST => Evidence::Misdirected,
        StatusCode::TOO_EARLY => Evidence::TooEarly,
        StatusCode::REQUEST_TIMEOUT => Evidence::RequestTimeout,
        StatusCode::CONFLICT => Evidence::Conflict,
        StatusCode::TOO_MANY_REQUESTS => Evidence::TooManyRequests,
        StatusCode::INTERNAL_SERVER_ERROR => Evidence::ServerError,
        StatusCode::BAD_GATEWAY => Evidence::BadGateway,
        StatusCode::SERVICE_UNAVAILABLE => Evidence::Unavailable,
        StatusCode::GATEWAY_TIMEOUT => Evidence::GatewayTimeout,
        _ => Evidence::Answered,
    }
}

fn is_replayed(headers: &HeaderMap) -> bool {
    headers
        .get_all("idempotent-replayed")
        .iter()
        .any(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"true"))
}
