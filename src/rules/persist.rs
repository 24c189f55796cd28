//! May a connection carry another request after this response? ([RFC 9112 section 9.3])
//!
//! Decided from the version and the fields of the *final* response head, which is the latest message
//! received: an earlier 1xx does not count. hyper decides the same for itself; where the two differ,
//! the stricter wins, because a connection is only kept when both agree.
//!
//! [RFC 9112 section 9.3]: https://www.rfc-editor.org/rfc/rfc9112.html#section-9.3

use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, TRANSFER_ENCODING};
use http::{Method, StatusCode, Version};

use crate::stats::CloseReason;

/// Whether a connection may be kept once the response has been read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Persistence {
    /// It may carry another request.
    Keep,
    /// It must be closed after this response, for this reason.
    Close(CloseReason),
}

/// Decides for a response to a request of this method, which said close or did not.
pub(crate) fn after_response(
    method: &Method,
    request_said_close: bool,
    status: StatusCode,
    version: Version,
    headers: &HeaderMap,
) -> Persistence {
    use Persistence::{Close, Keep};

    // Another protocol from here on, or a tunnel.
    if status == StatusCode::SWITCHING_PROTOCOLS
        || (*method == Method::CONNECT && status.is_success())
    {
        return Close(CloseReason::Framing);
    }
    if request_said_close {
        return Close(CloseReason::RequestSaidClose);
    }
    if has_connection_option(headers, "close") {
        return Close(CloseReason::ResponseSaidClose);
    }
    if version < Version::HTTP_11 {
        // RFC 9112 section 6.1: such a message has faulty framing even with a Content-Length.
        if headers.contains_key(TRANSFER_ENCODING) {
            return Close(CloseReason::Framing);
        }
        if !has_connection_option(headers, "keep-alive") {
            return Close(CloseReason::ResponseSaidClose);
        }
    }
    if ends_at_its_head(method, status) {
        return Keep;
    }
    match (
        headers.contains_key(TRANSFER_ENCODING),
        headers.contains_key(CONTENT_LENGTH),
    ) {
        // Both: perhaps an attempt at smuggling (section 6.3 rule 3). Neither: ends with the close.
        (true, true) | (false, false) => Close(CloseReason::Framing),
        (true, false) if chunked_is_last(headers) => Keep,
        (true, false) => Close(CloseReason::Framing),
        (false, true) => Keep,
    }
}

/// Whether a `Connection` field, any line of it, lists this option in any case.
pub(crate) fn has_connection_option(headers: &HeaderMap, option: &str) -> bool {
    headers.get_all(CONNECTION).iter().any(|line| {
        line.as_bytes()
            .split(|&byte| byte == b',')
            .any(|item| item.trim_ascii().eq_ignore_ascii_case(option.as_bytes()))
    })
}

/// RFC 9112 section 6.3 rule 1: no body, whatever the fields say.
fn ends_at_its_head(method: &Method, status: StatusCode) -> bool {
    *method == Method::HEAD
        || status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
}

fn chunked_is_last(headers: &HeaderMap) -> bool {
    let last_line = headers.get_all(TRANSFER_ENCODING).iter().next_back();
    last_line
        .and_then(|line| line.as_bytes().rsplit(|&byte| byte == b',').next())
        .is_some_and(|coding| coding.trim_ascii().eq_ignore_ascii_case(b"chunked"))
}

#[cfg(test)]
mod tests {
    use http::header::{HeaderName, HeaderValue};

    use super::*;

    fn verdict(
        method: &Method,
        status: u16,
        version: Version,
        fields: &[(&str, &str)],
    ) -> Persistence {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(
                HeaderName::from_bytes(name.as_bytes()).expect("a name"),
                HeaderValue::from_str(value).expect("a value"),
            );
        }
        let status = StatusCode::from_u16(status).expect("a status");
        after_response(method, false, status, version, &headers)
    }

    #[test]
    fn each_row_of_the_persistence_rules_holds() {
        use CloseReason::{Framing, ResponseSaidClose};
        use Persistence::{Close, Keep};
        const V10: Version = Version::HTTP_10;
        const V11: Version = Version::HTTP_11;
        type Row = (
            &'static str,
            Method,
            u16,
            Version,
            &'static [(&'static str, &'static str)],
            Persistence,
        );
        let rows: &[Row] = &[
            (
                "9.3: 1.1 persists",
                Method::GET,
                200,
                V11,
                &[("content-length", "0")],
                Keep,
            ),
            (
                "9.6: close",
                Method::GET,
                200,
                V11,
                &[("content-length", "0"), ("connection", "close")],
                Close(ResponseSaidClose),
            ),
            (
                "9110 7.6.1: any case",
                Method::GET,
                200,
                V11,
                &[("content-length", "0"), ("connection", "CLOSE")],
                Close(ResponseSaidClose),
            ),
            (
                "anywhere in the list",
                Method::GET,
                200,
                V11,
                &[("content-length", "0"), ("connection", "foo , Close,bar")],
                Close(ResponseSaidClose),
            ),
            (
                "on any line",
                Method::GET,
                200,
                V11,
                &[
                    ("content-length", "0"),
                    ("connection", "foo"),
                    ("connection", "close"),
                ],
                Close(ResponseSaidClose),
            ),
            (
                "only whole options",
                Method::GET,
                200,
                V11,
                &[("content-length", "0"), ("connection", "closed, not-close")],
                Keep,
            ),
            (
                "9.3: 1.0 does not persist",
                Method::GET,
                200,
                V10,
                &[("content-length", "0")],
                Close(ResponseSaidClose),
            ),
            (
                "C.2.2: 1.0 with keep-alive",
                Method::GET,
                200,
                V10,
                &[("content-length", "0"), ("connection", "Keep-Alive")],
                Keep,
            ),
            (
                "9.6: close beats keep-alive",
                Method::GET,
                200,
                V11,
                &[("content-length", "0"), ("connection", "keep-alive, close")],
                Close(ResponseSaidClose),
            ),
            (
                "6.1: 1.0 with a transfer coding",
                Method::GET,
                200,
                V10,
                &[
                    ("connection", "keep-alive"),
                    ("transfer-encoding", "chunked"),
                    ("content-length", "3"),
                ],
                Close(Framing),
            ),
            (
                "6.3(8): delimited by the close",
                Method::GET,
                200,
                V11,
                &[],
                Close(Framing),
            ),
            (
                "6.3(3): length and coding",
                Method::GET,
                200,
                V11,
                &[("content-length", "3"), ("transfer-encoding", "chunked")],
                Close(Framing),
            ),
            (
                "6.3(4): chunked not last",
                Method::GET,
                200,
                V11,
                &[("transfer-encoding", "chunked, gzip")],
                Close(Framing),
            ),
            (
                "6.3(4): chunked last",
                Method::GET,
                200,
                V11,
                &[("transfer-encoding", "gzip, Chunked")],
                Keep,
            ),
            ("6.3(1): HEAD", Method::HEAD, 200, V11, &[], Keep),
            ("6.3(1): 204", Method::GET, 204, V11, &[], Keep),
            ("6.3(1): 304", Method::GET, 304, V11, &[], Keep),
            (
                "7.8: protocol switch",
                Method::GET,
                101,
                V11,
                &[("content-length", "0")],
                Close(Framing),
            ),
            (
                "9.3.6: tunnel",
                Method::CONNECT,
                200,
                V11,
                &[("content-length", "0")],
                Close(Framing),
            ),
        ];
        for (name, method, status, version, fields, expected) in rows {
            assert_eq!(
                verdict(method, *status, *version, fields),
                *expected,
                "{name}"
            );
        }
    }

    #[test]
    fn a_request_that_said_close_decides_whatever_the_response_says() {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        headers.insert(CONNECTION, HeaderValue::from_static("keep-alive"));
        let verdict = after_response(
            &Method::GET,
            true,
            StatusCode::OK,
            Version::HTTP_11,
            &headers,
        );
        assert_eq!(verdict, Persistence::Close(CloseReason::RequestSaidClose));
    }
}
