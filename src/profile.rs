//! What a pool has learnt of a server, as a value: what it goes by, where that comes from, and how much it rests on.

use std::fmt;
use std::time::Duration;

/// What a pool has learnt of one origin ([`Pool::profile`](crate::Pool::profile)). A value: it does not change after it
/// was read.
///
/// What is learnt only ever shortens what the [`Builder`](crate::Builder) allows.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Profile {
    /// From this age on no request is sent on an idle connection. `None`: there is no such age.
    pub idle_limit: Option<Known<Duration>>,
    /// From this age on an idle connection is not trusted with a request that must not be sent twice: one without a
    /// key and of a method that is not idempotent.
    pub trusted_idle_age: Known<Duration>,
    /// How many requests a connection carries. `None`: as far as is known, any number.
    pub request_cap: Option<Known<u32>>,
    /// How many dials may be on their way at a time of which the server has not answered the first byte. Beyond that
    /// they begin one after the other.
    pub unproven_dials: Known<usize>,
    /// Whether the server sends head and body apart and waits for an acknowledgement in between.
    pub splits_responses: bool,
    /// The last `Keep-Alive: timeout` of a response.
    pub announced_idle_timeout: Option<Duration>,
    /// Of the last four idle connections that the server has closed the one that was youngest.
    pub shortest_close: Option<CloseAge>,
    /// The longest idle age at which a connection was seen open since the last close.
    pub longest_open: Option<Duration>,
}

/// A value, and what it rests on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Known<T> {
    /// The value.
    pub value: T,
    /// Where it comes from.
    pub source: Source,
    /// How many observations of the server there were that bear on it, whether they have made it what it is or not.
    pub observations: u64,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Source {
    /// Nothing is known: where the pool begins.
    Default,
    /// The [`Builder`](crate::Builder), whether it was set there or left as it was.
    Caller,
    /// The server announces it.
    Hint,
    /// The server was seen to do so.
    Seen,
}

impl Source {
    /// The name used in logs and in `Display`.
    pub fn as_str(self) -> &'static str {
        match self {
            Source::Default => "default",
            Source::Caller => "caller",
            Source::Hint => "hint",
            Source::Seen => "seen",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How long an idle connection had been idle when the server closed it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct CloseAge {
    /// The age.
    pub age: Duration,
    /// It was found closed when it was about to be used, so that this is the most that it can have been. Otherwise its
    /// end was seen when it came.
    pub at_most: bool,
}

/// For a person: each value with its source.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.idle_limit {
            Some(limit) => write!(f, "idle limit        {limit}")?,
            None => f.write_str("idle limit        none")?,
        }
        write!(f, "\ntrusted idle age  {}", self.trusted_idle_age)?;
        match self.request_cap {
            Some(Known {
                value,
                source,
                observations,
            }) => write!(
                f,
                "\nrequest cap       {value} ({source}, {observations} observations)"
            )?,
            None => f.write_str("\nrequest cap       none")?,
        }
        let Known {
            value,
            source,
            observations,
        } = self.unproven_dials;
        write!(
            f,
            "\nunproven dials    {value} ({source}, {observations} observations)"
        )?;
        let splits = if self.splits_responses { "yes" } else { "no" };
        write!(f, "\nsplit responses   {splits}")
    }
}

impl fmt::Display for Known<Duration> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Known {
            value,
            source,
            observations,
        } = self;
        write!(f, "{value:.1?} ({source}, {observations} observations)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_each_value_with_its_source() {
        let profile = Profile {
            idle_limit: Some(Known {
                value: Duration::from_secs(4),
                source: Source::Hint,
                observations: 3,
            }),
            trusted_idle_age: Known {
                value: Duration::from_secs(1),
                source: Source::Default,
                observations: 0,
            },
            request_cap: Some(Known {
                value: 100,
                source: Source::Seen,
                observations: 2,
            }),
            unproven_dials: Known {
                value: 4,
                source: Source::Default,
                observations: 1,
            },
            splits_responses: false,
            announced_idle_timeout: Some(Duration::from_secs(5)),
            shortest_close: None,
            longest_open: None,
        };
        assert_eq!(
            profile.to_string(),
            "idle limit        4.0s (hint, 3 observations)\n\
             trusted idle age  1.0s (default, 0 observations)\n\
             request cap       100 (seen, 2 observations)\n\
             unproven dials    4 (default, 1 observations)\n\
             split responses   no"
        );
    }
}
