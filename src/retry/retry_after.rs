//! Reads `Retry-After` ([RFC 9110 section 10.2.3]).
//!
//! Decides how long the server asked us to stay away; never how long we then wait. Pure: the wall clock
//! is an argument.
//!
//! [RFC 9110 section 10.2.3]: https://www.rfc-editor.org/rfc/rfc9110.html#section-10.2.3

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::RETRY_AFTER;

/// The wait that a response asks for. `None` without a valid field.
///
/// Of several lines the longest wait counts, so that a retry is never early. A date in the past is
/// zero, a number too large for us is the longest wait there is, anything else is ignored.
pub(crate) fn retry_after(headers: &HeaderMap, wall: SystemTime) -> Option<Duration> {
    headers
        .get_all(RETRY_AFTER)
        .iter()
        .filter_map(|value| parse(value.to_str().ok()?, wall))
        .max()
}

fn parse(value: &str, wall: SystemTime) -> Option<Duration> {
    let value = value.trim_matches([' ', '\t']);
    if value.is_empty() {
        return None;
    }
    if value.bytes().all(|b| b.is_ascii_digit()) {
        // Only digits are left, so the one way to fail is a number too large.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(wall).unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1994-11-06 08:49:37 UTC, the date of RFC 9110's own examples.
    fn example() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777)
    }

    fn read(lines: &[&str]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(RETRY_AFTER, line.parse().expect("a field value"));
        }
        retry_after(&headers, example() - Duration::from_secs(30))
    }

    /// RFC 9110 sections 10.2.3 and 5.6.7: seconds, or any of the three date forms.
    #[test]
    fn seconds_and_all_three_date_forms_are_read() {
        let half_minute = Some(Duration::from_secs(30));
        for line in [
            "30",
            "030",
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
        ] {
            assert_eq!(read(&[line]), half_minute, "{line}");
        }
    }

    #[test]
    fn a_date_in_the_past_is_no_wait() {
        assert_eq!(
            read(&["Sat, 05 Nov 1994 08:49:37 GMT"]),
            Some(Duration::ZERO)
        );
    }

    #[test]
    fn bad_values_are_ignored() {
        for line in [
            "",
            "-1",
            "+1",
            "1.5",
            "1s",
            "soon",
            "1, 2",
            "0x10",
            "Sun, 06 Nov 1994",
        ] {
            assert_eq!(read(&[line]), None, "{line:?}");
        }
    }

    #[test]
    fn a_number_too_large_saturates() {
        let line = "9".repeat(40);
        assert_eq!(read(&[&line]), Some(Duration::from_secs(u64::MAX)));
    }

    /// Never early: the longest valid line counts.
    #[test]
    fn of_several_lines_the_longest_wait_counts() {
        assert_eq!(
            read(&["5", "nonsense", "60", "10"]),
            Some(Duration::from_secs(60))
        );
    }
}
