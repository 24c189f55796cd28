//! How much an origin is in use now: whether a connection that is opened ahead of time will be wanted soon.
//!
//! Two answers about the last moments: the most connections that were in use at a time, and whether requests follow
//! one another at all. A quiet origin has no demand, and nothing is opened for it. Pure.

use std::time::Duration;

use crate::clock::Instant;

/// Looks back for at least as long, and for a few times as long at most.
const WINDOW: Duration = Duration::from_secs(1);

/// So many requests in that time: the one that asks, and one before it.
const FOLLOWING: u32 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Span {
    peak: usize,
    requests: u32,
}

/// How much one origin is in use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demand {
    began: Option<Instant>,
    now: Span,
    before: Span,
}

impl Demand {
    /// A request has begun or waits; with it so many do.
    pub(crate) fn note(&mut self, at_a_time: usize, now: Instant) {
        self.turn(now);
        self.now.peak = self.now.peak.max(at_a_time);
        self.now.requests = self.now.requests.saturating_add(1);
    }

    /// Whether more than so many connections will be wanted soon.
    pub(crate) fn exceeds(&mut self, usable: usize, now: Instant) -> bool {
        self.turn(now);
        let requests = self.now.requests.saturating_add(self.before.requests);
        requests >= FOLLOWING && self.now.peak.max(self.before.peak) > usable
    }

    fn turn(&mut self, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let age = now.saturating_duration_since(began);
        if age < WINDOW {
            return;
        }
        self.before = match age < 2 * WINDOW {
            true => self.now,
            false => Span::default(),
        };
        self.now = Span::default();
        self.began = Some(now);
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
