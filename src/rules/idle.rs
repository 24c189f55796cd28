//! How long a server keeps an idle connection, learnt from what it says and from what it does.
//!
//! Two answers. The *trusted age* is for requests that nothing makes safe to send twice: on an idle connection
//! younger than that they almost certainly meet an open one. The *limit* is for all: beyond it no request is sent on
//! an idle connection. Both are only ever shorter than what the caller allows. Pure.
//!
//! # The rule
//!
//! * With nothing known, an age of [`UNKNOWN`] is trusted.
//! * An idle connection that was seen open at some age shows that the server waits for longer than that: from then
//!   on that age is trusted.
//! * An announced timeout, less [a little](margin_for_all), is the limit. It is trusted less a [`margin`], and the age at
//!   which the server was seen to close less a [`margin_of_close`]. They cap everything: the shortest close of the last
//!   [`CLOSES`] counts, at once.
//! * A server that has changed its mind upwards is believed slowly: when it has closed [`CLOSES`] times later, or when
//!   connections were seen open at more than that age [`CONTRADICTIONS`] times.

use std::collections::VecDeque;
use std::time::Duration;

use crate::profile::Source;

/// gunicorn closes after 2 s, and few servers sooner.
const UNKNOWN: Duration = Duration::from_secs(1);

/// How many of the last closes are remembered.
const CLOSES: usize = 4;

/// A connection that is closed sooner than this was closed behind an answer, and by no idle timeout.
const BEHIND_AN_ANSWER: Duration = Duration::from_millis(100);

/// Two closes whose ages differ by no more than this part are of the same timeout.
const AGREE: u32 = 8;

/// How often connections must be seen open at an age at which the server has closed before that close is forgotten.
/// Several servers behind one name may each have their own timeout, so once is not enough.
const CONTRADICTIONS: u32 = 64;

/// How much earlier than announced no request is sent any more. One that may be repeated comes to no harm by a close, but
/// costs a round trip more than a dial. But not more than half.
fn margin_for_all(time: Duration) -> Duration {
    Duration::from_millis(500).min(time / 2)
}

/// How much earlier than announced a server may close: its clock may tick in seconds, and our request takes half a round
/// trip. A second or a fifth, but not more than half.
fn margin(time: Duration) -> Duration {
    Duration::from_secs(1).max(time / 5).min(time / 2)
}

/// How much earlier than it was once seen to close a server may close the next time. That close may have come late by
/// a second and the news of it by a round trip, as from Node: a second and a quarter. Or the next may come early, as
/// Squid's does, after 0.65 of its time: two fifths. But not more than three fifths: a server of 1 s that was seen to
/// close after 2, and a little, is still trusted for less than 1.
fn margin_of_close(age: Duration) -> Duration {
    Duration::from_millis(1_250)
        .max(age * 2 / 5)
        .min(age * 3 / 5)
}

/// An idle connection that the server has closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Close {
    /// How long it had been idle.
    pub(crate) age: Duration,
    /// It was found closed, so that is the most that it can have been.
    pub(crate) at_most: bool,
}

impl Close {
    /// The age that it leaves to be trusted.
    fn trusted(self) -> Duration {
        self.age - margin_of_close(self.age)
    }
}

/// What is known of one origin.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct IdleRule {
    announced: Option<Duration>,
    /// The ages of idle connections that the server has closed, newest last.
    closes: VecDeque<Close>,
    /// The longest age at which an idle connection was seen open.
    open: Option<Duration>,
    contradictions: u32,
    observations: u64,
}

impl IdleRule {
    /// A response announced a timeout.
    pub(crate) fn announce(&mut self, timeout: Duration) {
        self.announced = Some(timeout);
    }

    /// The server has closed a connection that had been idle for so long, or at most for so long where it was found
    /// closed.
    pub(crate) fn closed(&mut self, age: Duration, at_most: bool) {
        self.observations += 1;
        self.contradictions = 0;
        if self.closes.len() >= CLOSES {
            self.closes.pop_front();
        }
        self.closes.push_back(Close { age, at_most });
        // What was seen before may have been another configuration.
        self.open = self.open.map(|open| open.min(age - margin_of_close(age)));
    }

    /// An idle connection was seen open at this age.
    pub(crate) fn open(&mut self, age: Duration) {
        self.observations += 1;
        self.open = self.open.max(Some(age));
        let Some(Close { age: shortest, .. }) = self.shortest_close() else {
            return;
        };
        if age <= shortest {
            return;
        }
        self.contradictions += 1;
        if self.contradictions >= CONTRADICTIONS {
            self.contradictions = 0;
            self.closes.retain(|close| close.age > shortest);
        }
    }

    /// The age below which an idle connection is trusted with a request that must not be sent twice.
    pub(crate) fn trusted(&self) -> Duration {
        let trusted = self.open.map_or(UNKNOWN, |open| open.max(UNKNOWN));
        let closes = self.shortest_close().map(Close::trusted);
        let known = self.announced_trusted().into_iter().chain(closes);
        known.fold(trusted, Duration::min)
    }

    fn announced_trusted(&self) -> Option<Duration> {
        self.announced.map(|time| time - margin(time))
    }

    /// Where the trusted age comes from.
    pub(crate) fn source(&self) -> Source {
        let trusted = self.trusted();
        if self.announced_trusted() == Some(trusted) {
            return Source::Hint;
        }
        let close = self.shortest_close().map(Close::trusted);
        if close == Some(trusted) || self.open.is_some_and(|open| open >= UNKNOWN) {
            return Source::Seen;
        }
        Source::Default
    }

    /// The age from which on an idle connection is not used for any request.
    pub(crate) fn limit(&self) -> Option<Duration> {
        self.announced.map(|time| time - margin_for_all(time))
    }

    pub(crate) fn announced(&self) -> Option<Duration> {
        self.announced
    }

    /// Of the closes that are remembered the one at the lowest age.
    pub(crate) fn shortest_close(&self) -> Option<Close> {
        self.closes.iter().min_by_key(|close| close.age).copied()
    }

    /// After how long the server closes, as far as is known: what it announces, or the shortest close seen.
    pub(crate) fn closes_after(&self) -> Option<Duration> {
        let seen = self.shortest_close().map(|close| close.age);
        self.announced.into_iter().chain(seen).min()
    }

    /// The server's idle timeout, where that is more than a guess: announced, or the age at which it closed twice.
    pub(crate) fn timeout(&self) -> Option<Duration> {
        let ages = self.closes.iter().map(|close| close.age);
        let mut ages: Vec<_> = ages.filter(|&age| age >= BEHIND_AN_ANSWER).collect();
        ages.sort_unstable();
        let twice = ages
            .windows(2)
            .find(|pair| pair[1] - pair[0] <= pair[0] / AGREE);
        self.announced
            .into_iter()
            .chain(twice.map(|pair| pair[0]))
            .min()
    }

    pub(crate) fn longest_open(&self) -> Option<Duration> {
        self.open
    }

    pub(crate) fn observations(&self) -> u64 {
        self.observations
    }

    /// Whether anything was learnt that is worth keeping.
    pub(crate) fn is_blank(&self) -> bool {
        *self == IdleRule::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(s: f64) -> Duration {
        Duration::from_secs_f64(s)
    }

    #[test]
    fn with_nothing_known_a_second_is_trusted() {
        let rule = IdleRule::default();
        assert_eq!(rule.trusted(), seconds(1.0));
        assert_eq!(rule.limit(), None);
    }

    #[test]
    fn an_age_that_was_survived_is_trusted_from_then_on() {
        let mut rule = IdleRule::default();
        rule.open(seconds(0.3));
        assert_eq!(rule.trusted(), seconds(1.0));
        rule.open(seconds(9.0));
        rule.open(seconds(4.0));
        assert_eq!(rule.trusted(), seconds(9.0));
    }

    /// Node announces 5 and closes at 6, Squid closes after 0.65 of 1: less a margin in both cases.
    #[test]
    fn an_announced_timeout_limits_all_requests_less_a_margin() {
        for (announced, limit, trusted) in [
            (5.0, 4.5, 4.0),
            (60.0, 59.5, 48.0),
            (1.0, 0.5, 0.5),
            (2.0, 1.5, 1.0),
            (0.0, 0.0, 0.0),
        ] {
            let mut rule = IdleRule::default();
            rule.open(seconds(3_600.0));
            rule.announce(seconds(announced));
            assert_eq!(rule.limit(), Some(seconds(limit)), "{announced}");
            assert_eq!(rule.trusted(), seconds(trusted), "{announced}");
        }
    }

    #[test]
    fn a_close_lowers_the_trusted_age_at_once() {
        let mut rule = IdleRule::default();
        rule.open(seconds(30.0));
        rule.closed(seconds(5.0), false);
        assert_eq!(rule.trusted(), seconds(3.0));
        rule.closed(seconds(2.0), false);
        assert_eq!(rule.trusted(), seconds(0.8));
        rule.closed(seconds(30.0), false);
        assert_eq!(
            rule.trusted(),
            seconds(0.8),
            "the shortest of the last counts"
        );
    }

    /// One close, seen as late as the server ever closes, keeps what is trusted below the earliest, a quarter of a
    /// second of network included.
    #[test]
    fn one_close_teaches_enough_of_a_server_with_a_coarse_clock() {
        for timeout in [1.0, 2.0, 5.0, 10.0, 60.0] {
            for (earliest, latest) in [(0.65 * timeout, timeout), (timeout, timeout + 1.0)] {
                let mut rule = IdleRule::default();
                rule.closed(seconds(latest + 0.25), false);
                rule.open(seconds(latest));
                assert!(
                    rule.trusted() <= seconds(earliest),
                    "{earliest} to {latest}: {rule:?}"
                );
            }
        }
    }

    #[test]
    fn a_server_that_closes_later_now_is_believed_after_a_number_of_closes() {
        let mut rule = IdleRule::default();
        rule.closed(seconds(2.0), false);
        for _ in 0..CLOSES {
            assert_eq!(rule.closes_after(), Some(seconds(2.0)));
            rule.closed(seconds(60.0), false);
        }
        assert_eq!(rule.closes_after(), Some(seconds(60.0)));
    }

    #[test]
    fn a_server_that_does_not_close_any_more_is_believed_after_a_number_of_looks() {
        let mut rule = IdleRule::default();
        rule.closed(seconds(2.0), false);
        for _ in 0..CONTRADICTIONS {
            assert_eq!(rule.trusted(), seconds(0.8));
            rule.open(seconds(20.0));
        }
        assert_eq!(rule.trusted(), seconds(20.0));
    }

    #[test]
    fn an_age_that_a_close_has_refuted_is_not_trusted_again_before_it_is_seen() {
        let mut rule = IdleRule::default();
        rule.open(seconds(30.0));
        rule.closed(seconds(5.0), false);
        let trusted = rule.trusted();
        for _ in 0..CLOSES {
            rule.closed(seconds(60.0), false);
        }
        assert_eq!(rule.trusted(), trusted);
        rule.open(seconds(20.0));
        assert_eq!(rule.trusted(), seconds(20.0));
    }

    proptest! {
        /// Whatever was seen: never trusted to within the margin of a close that is remembered, nor of what was
        /// announced.
        #[test]
        fn nothing_is_trusted_beyond_what_was_seen_or_said(
            events in proptest::collection::vec((0u8..3, 0u64..100_000), 0..60),
        ) {
            let mut rule = IdleRule::default();
            for (kind, ms) in events {
                let age = Duration::from_millis(ms);
                match kind {
                    0 => rule.open(age),
                    1 => rule.closed(age, false),
                    _ => rule.announce(age),
                }
                if kind == 1 {
                    prop_assert!(rule.trusted() <= age - margin_of_close(age));
                }
                if let Some(announced) = rule.announced() {
                    prop_assert!(rule.trusted() <= announced - margin(announced));
                }
                if let Some(close) = rule.shortest_close() {
                    prop_assert!(rule.trusted() <= close.age - margin_of_close(close.age));
                }
                prop_assert!(rule.closes.len() <= CLOSES);
            }
        }
    }
}
