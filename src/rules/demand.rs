//! How much an origin is in use now: whether a connection that is opened ahead of time will be wanted soon.
//!
//! Two answers: the most connections that were in use at a time lately, and whether requests follow one another at all.
//! A quiet origin has no demand, and nothing is opened for it. Pure.

use std::time::Duration;

use crate::clock::Instant;

/// How far back the requests count that follow one another: for at least as long, and for a few times as long at most.
const FOLLOWING: Duration = Duration::from_secs(1);

/// So many in that time: the one that asks, and one before it.
const FOLLOW: usize = 2;

/// How far back the use counts, in the same way. Longer: what was needed at a time once is needed again.
const USE: Duration = Duration::from_secs(8);

/// Something of now and of the time before, in two spans of at least so long.
#[derive(Clone, Copy, Debug, Default)]
struct Spans {
    began: Option<Instant>,
    now: usize,
    before: usize,
}

impl Spans {
    fn turn(&mut self, span: Duration, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let age = now.saturating_duration_since(began);
        if age < span {
            return;
        }
        self.before = if age < 2 * span { self.now } else { 0 };
        self.now = 0;
        self.began = Some(now);
    }
}

/// How much one origin is in use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    requests: Spans,
    peaks: Spans,
}

impl Demand {
    /// A request has begun or waits; with it so many do.
    pub(crate) fn note(&mut self, at_a_time: usize, now: Instant) {
        self.turn(now);
        self.requests.now = self.requests.now.saturating_add(1);
        self.peaks.now = self.peaks.now.max(at_a_time);
    }

    /// Whether more than so many connections will be wanted soon.
    pub(crate) fn exceeds(&mut self, usable: usize, now: Instant) -> bool {
        self.turn(now);
        let requests = self.requests.now.saturating_add(self.requests.before);
        requests >= FOLLOW && self.peaks.now.max(self.peaks.before) > usable
    }

    fn turn(&mut self, now: Instant) {
        self.requests.turn(FOLLOWING, now);
        self.peaks.turn(USE, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::now;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_quiet_origin_has_no_demand() {
        let (mut demand, start) = (Demand::default(), now());
        assert!(!demand.exceeds(0, start));
        for request in 0..5 {
            let now = start + ms(2_500) * request;
            demand.note(1, now);
            assert!(!demand.exceeds(0, now), "request {request}");
        }
    }

    #[test]
    fn what_was_in_use_at_a_time_is_wanted_again_soon() {
        let (mut demand, start) = (Demand::default(), now());
        demand.note(1, start);
        demand.note(2, start + ms(1));
        demand.note(1, start + ms(2));
        for later in [10, 900, 1_100, 1_900] {
            assert!(demand.exceeds(1, start + ms(later)), "{later}");
            assert!(!demand.exceeds(2, start + ms(later)), "{later}");
        }
        assert!(!demand.exceeds(0, start + ms(4_000)), "long ago");
    }

    #[test]
    fn one_request_after_the_other_wants_one_connection() {
        let (mut demand, start) = (Demand::default(), now());
        for request in 0..20 {
            demand.note(1, start + ms(300) * request);
        }
        assert!(demand.exceeds(0, start + ms(6_000)));
        assert!(!demand.exceeds(1, start + ms(6_000)));
    }
}
