//! The pool's key: scheme, host and port of a request ([RFC 9110 section 4.3.1]).
//!
//! Two URIs that name the same origin in other spellings (case of the host, default port written out,
//! user information) give equal values; two different origins never do.
//!
//! [RFC 9110 section 4.3.1]: https://www.rfc-editor.org/rfc/rfc9110.html#section-4.3.1

use std::fmt;
use std::sync::Arc;

use http::Uri;
use http::uri::{Authority, Scheme};

/// Scheme, host and port: the unit by which connections are kept and counted.
///
/// Cheap to clone. `Display` gives the origin's URI without a path, the default port left out.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Origin {
    secure: bool,
    /// Lower case, IPv6 literals without their brackets.
    host: Arc<str>,
    port: u16,
}

impl Origin {
    /// Reads the origin of an absolute URI.
    ///
    /// `None` when the URI has no scheme or host, a scheme other than `http` and `https`, or port 0.
    ///
    /// ```
    /// let origin = idempool::Origin::of(&"https://Pay.Example:443/payments".parse().unwrap()).unwrap();
    /// assert_eq!(origin.to_string(), "https://pay.example");
    /// ```
    pub fn of(uri: &Uri) -> Option<Origin> {
        Origin::from_parts(uri.scheme()?, uri.authority()?)
    }

    pub(crate) fn from_parts(scheme: &Scheme, authority: &Authority) -> Option<Origin> {
        let secure = if *scheme == Scheme::HTTPS {
            true
        } else if *scheme == Scheme::HTTP {
            false
        } else {
            return None;
        };
        let host = authority.host();
        let host = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host);
        if host.is_empty() {
            return None;
        }
        // `port_u16` is `None` for "no port" and for "not a port" alike; the latter must not become 443.
        let port = match authority.port() {
            Some(port) => port.as_u16(),
            None if authority.as_str().ends_with(':') || !has_port(authority) => {
                default_port(secure)
            }
            None => return None,
        };
        if port == 0 {
            return None;
        }
        let host: Arc<str> = if host.bytes().any(|b| b.is_ascii_uppercase()) {
            host.to_ascii_lowercase().into()
        } else {
            host.into()
        };
        Some(Origin { secure, host, port })
    }

    /// Whether connections to this origin use TLS.
    pub fn is_https(&self) -> bool {
        self.secure
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.secure { "https" } else { "http" }
    }

    /// The host in lower case; an IPv6 literal without its brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, the scheme's default filled in.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The value of a `Host` field for this origin: host, and the port where it is not the default.
    pub(crate) fn host_header(&self) -> String {
        let mut value = String::with_capacity(self.host.len() + 8);
        if self.host.contains(':') {
            value.push('[');
            value.push_str(&self.host);
            value.push(']');
        } else {
            value.push_str(&self.host);
        }
        if self.port != default_port(self.secure) {
            value.push(':');
            value.push_str(&self.port.to_string());
        }
        value
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme(), self.host_header())
    }
}

fn default_port(secure: bool) -> u16 {
    if secure { 443 } else { 80 }
}

fn has_port(authority: &Authority) -> bool {
    let text = authority.as_str();
    let after_user = text.rsplit_once('@').map_or(text, |(_, rest)| rest);
    let after_host = after_user
        .rsplit_once(']')
        .map_or(after_user, |(_, rest)| rest);
    after_host.contains(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(uri: &str) -> Option<Origin> {
        Origin::of(&uri.parse().expect("a URI"))
    }

    #[test]
    fn spellings_of_one_origin_are_equal() {
        let plain = origin("https://pay.example/a");
        assert!(plain.is_some());
        for uri in [
            "https://PAY.example/b?c",
            "https://pay.example:443",
            "HTTPS://pay.example:/",
            "https://user:secret@pay.example/",
        ] {
            assert_eq!(origin(uri), plain, "{uri}");
        }
    }

    #[test]
    fn scheme_host_and_port_each_make_another_origin() {
        let base = origin("https://pay.example/");
        for uri in [
            "http://pay.example:443/",
            "https://pay.example:444/",
            "https://pay2.example/",
        ] {
            assert_ne!(origin(uri), base, "{uri}");
        }
    }

    #[test]
    fn what_is_not_an_http_origin_is_none() {
        for uri in [
            "/path",
            "ftp://pay.example/",
            "pay.example:443",
            "http://pay.example:0/",
        ] {
            assert_eq!(origin(uri), None, "{uri}");
        }
    }

    #[test]
    fn an_ipv6_literal_keeps_its_brackets_on_the_wire_only() {
        let origin = origin("http://[::1]:8080/x").expect("an origin");
        assert_eq!(origin.host(), "::1");
        assert_eq!(origin.host_header(), "[::1]:8080");
        assert_eq!(origin.to_string(), "http://[::1]:8080");
    }

    #[test]
    fn user_information_never_reaches_the_host_field() {
        let origin = origin("http://user:secret@pay.example:8080/").expect("an origin");
        assert_eq!(origin.host_header(), "pay.example:8080");
    }
}
