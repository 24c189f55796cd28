//! What the server answers when it refuses: problem details ([RFC 9457]).
//!
//! Each case has a `type` of its own, absolute and stable: that is what a client may decide on. The
//! wording of `detail` is for people. None of these answers is ever stored under a key, because none
//! of them has had an effect; the same key may be sent again once the cause is gone.
//!
//! [RFC 9457]: https://www.rfc-editor.org/rfc/rfc9457.html

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use serde_json::json;

/// One reason for not making a payment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Problem {
    /// This server was told to take no payment without a key.
    KeyMissing,
    /// Not one structured-field string, or not one that the policy takes.
    KeyMalformed(&'static str),
    /// The key belongs to a request with another payload.
    KeyReused,
    /// The first request with this key is still running.
    InProgress,
    /// The key is older than its retention: the answer is gone, the payment is not.
    KeyExpired,
    /// The `Account` field is not usable as a name.
    AccountMalformed,
    /// The body does not describe a payment.
    BodyInvalid(&'static str),
    /// The body is neither a form nor JSON.
    MediaType,
    /// The body is larger than this route takes.
    TooLarge,
    /// The database stayed locked; the transaction never began.
    Overloaded,
    /// The transaction failed and was rolled back.
    Internal,
}

impl Problem {
    /// The last path segment of `type`, the status, the title, and the detail.
    fn parts(self) -> (&'static str, StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::KeyMissing => (
                "key-missing",
                S::BAD_REQUEST,
                "Idempotency-Key is required",
                "Send one Idempotency-Key field, a quoted string that was never used before.",
            ),
            Self::KeyMalformed(why) => (
                "key-malformed",
                S::BAD_REQUEST,
                "Idempotency-Key is malformed",
                why,
            ),
            Self::KeyReused => (
                "key-reused",
                S::UNPROCESSABLE_ENTITY,
                "Idempotency-Key belongs to another payload",
                "A new payment needs a new key; a retry needs the same payload, byte for byte.",
            ),
            Self::InProgress => (
                "in-progress",
                S::CONFLICT,
                "A request with this Idempotency-Key is still running",
                "Send the same request with the same key again, later.",
            ),
            // Not 410: that would say that /payments itself is gone (RFC 9110 section 15.5.11).
            Self::KeyExpired => (
                "key-expired",
                S::UNPROCESSABLE_ENTITY,
                "Idempotency-Key has expired",
                "The payment was made; its answer is no longer kept. Look it up, do not pay again.",
            ),
            Self::AccountMalformed => (
                "account-malformed",
                S::BAD_REQUEST,
                "Account is malformed",
                "Send at most one Account field: 1 to 64 letters, digits, '-' or '_'.",
            ),
            Self::BodyInvalid(why) => (
                "body-invalid",
                S::BAD_REQUEST,
                "The body does not describe a payment",
                why,
            ),
            Self::MediaType => (
                "media-type",
                S::UNSUPPORTED_MEDIA_TYPE,
                "The media type is not supported",
                "Send application/x-www-form-urlencoded or application/json.",
            ),
            Self::TooLarge => (
                "too-large",
                S::PAYLOAD_TOO_LARGE,
                "The body is too large",
                "A payment takes 64 KiB at most, an upload 1 MiB.",
            ),
            Self::Overloaded => (
                "overloaded",
                S::SERVICE_UNAVAILABLE,
                "The ledger is busy",
                "No payment was begun. Send the same request with the same key again, later.",
            ),
            Self::Internal => (
                "internal",
                S::INTERNAL_SERVER_ERROR,
                "The payment failed",
                "The transaction was given up. Only a retry with the same key is safe.",
            ),
        }
    }

    /// The `type` of this problem.
    pub(crate) fn type_url(self) -> String {
        format!("{TYPES}{}", self.parts().0)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response<Body> {
        let (_, status, title, detail) = self.parts();
        let body = json!({
            "type": self.type_url(),
            "title": title,
            "status": status.as_u16(),
            "detail": detail,
        });
        let mut response = (status, body.to_string()).into_response();
        let headers = response.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        if matches!(self, Self::InProgress | Self::Overloaded) {
            // One second: a payment here takes milliseconds, and the field knows no shorter wait.
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Where the types live. A reserved name (RFC 2606): nothing is to be fetched there.
const TYPES: &str = "https://payments.example/problems/";
