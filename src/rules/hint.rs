//! Reads `Keep-Alive`, in which some servers say for how long they keep an idle connection, and how many requests one
//! may carry.
//!
//! There is no standard for it any more ([RFC 9110 section 7.6.1] leaves it to old agreements), and it is a hint and no
//! promise: servers close earlier and later than they say. It may shorten a limit and never lengthen one.
//!
//! [RFC 9110 section 7.6.1]: https://www.rfc-editor.org/rfc/rfc9110.html#section-7.6.1

use std::time::Duration;

use http::HeaderMap;
use http::header::HeaderName;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// The idle timeout that a response announces. Of several the shortest; what cannot be read says nothing.
pub(crate) fn timeout(headers: &HeaderMap) -> Option<Duration> {
    lowest(headers, b"timeout").map(Duration::from_secs)
}

/// How many requests a response says its connection may carry, or may carry yet: servers differ in what they mean
/// ([`Countdown`](crate::rules::cap::Countdown)). Of several the lowest; what cannot be read says nothing.
pub(crate) fn max(headers: &HeaderMap) -> Option<u32> {
    // More than a connection ever carries is no cap.
    lowest(headers, b"max").and_then(|max| max.try_into().ok())
}

fn lowest(headers: &HeaderMap, name: &[u8]) -> Option<u64> {
    let lines = headers.get_all(KEEP_ALIVE).iter();
    let parameters = lines.flat_map(|line| line.as_bytes().split(|&byte| byte == b','));
    parameters
        .filter_map(|parameter| number(parameter, name))
        .min()
}

fn number(parameter: &[u8], wanted: &[u8]) -> Option<u64> {
    let at = parameter.iter().position(|&byte| byte == b'=')?;
    let (name, value) = (&parameter[..at], &parameter[at + 1..]);
    if !name.trim_ascii().eq_ignore_ascii_case(wanted) {
        return None;
    }
    let value = value.trim_ascii();
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    // A number too large for a number is longer than any limit of ours.
    std::str::from_utf8(value).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn read(lines: &[&'static str]) -> Option<u64> {
        let lines = lines
            .iter()
            .map(|line| (KEEP_ALIVE, HeaderValue::from_static(line)));
        timeout(&lines.collect()).map(|time| time.as_secs())
    }

    #[test]
    fn a_timeout_is_read_in_every_usual_spelling() {
        for line in [
            "timeout=5",
            "timeout=5, max=100",
            "max=100,Timeout = 5 ",
            "TIMEOUT=5",
        ] {
            assert_eq!(read(&[line]), Some(5), "{line}");
        }
        assert_eq!(read(&["timeout=60", "max=3, timeout=5"]), Some(5));
        assert_eq!(read(&["timeout=0"]), Some(0));
    }

    #[test]
    fn a_number_of_requests_is_read_beside_the_timeout() {
        let read = |line| {
            max(&HeaderMap::from_iter([(
                KEEP_ALIVE,
                HeaderValue::from_static(line),
            )]))
        };
        assert_eq!(read("timeout=5, max=100"), Some(100));
        assert_eq!(read("Max = 3,timeout=5, max=7"), Some(3));
        for line in ["timeout=5", "max=", "max=x", "max=-1", "max=99999999999"] {
            assert_eq!(read(line), None, "{line}");
        }
    }

    /// Malformed values are ignored.
    #[test]
    fn what_cannot_be_read_says_nothing() {
        for line in [
            "",
            "timeout",
            "timeout=",
            "timeout=abc",
            "timeout=-5",
            "timeout=5s",
            "timeout=99999999999999999999",
            "max=100",
            "300",
        ] {
            assert_eq!(read(&[line]), None, "{line}");
        }
        assert_eq!(read(&[]), None);
    }
}
