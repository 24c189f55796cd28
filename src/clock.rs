//! The only file that asks what time it is.
//!
//! Everything else takes `now` as an argument or calls [`now`], whose clock a test can pause
//! (`tokio::time::pause`). `.clippy.toml` holds the rest of the crate to that.

use std::time::{Duration, SystemTime};

pub(crate) use tokio::time::Instant;

/// The monotonic clock. It stops while the machine is suspended.
#[allow(clippy::disallowed_methods)]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The wall clock, for dates that a server sent (`Retry-After`).
#[allow(clippy::disallowed_methods)]
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}

/// Both clocks at once, for ages that have to survive a suspended machine.
pub(crate) fn stamp() -> Stamp {
    Stamp {
        at: now(),
        wall: wall(),
    }
}

/// A moment on both clocks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Stamp {
    pub(crate) at: Instant,
    pub(crate) wall: SystemTime,
}

impl Stamp {
    /// How much time lies between this moment and a later one.
    ///
    /// What the monotonic clock says, unless the wall clock says more by [`CLOCK_GAP`]: then the machine was
    /// suspended in between, and the server's clock went on. A wall clock that was set forward looks the same and
    /// costs some connections their reuse; one that was set back changes nothing.
    pub(crate) fn until(self, later: Stamp) -> Duration {
        let steady = later.at.saturating_duration_since(self.at);
        let wall = later.wall.duration_since(self.wall).unwrap_or_default();
        if wall > steady + CLOCK_GAP {
            wall
        } else {
            steady
        }
    }
}

/// More than a clock is ever slewed by between two uses of a connection, less than any suspension that a
/// server's idle timeout would notice.
const CLOCK_GAP: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn later(than: Stamp, steady: u64, wall: i64) -> Stamp {
        let moved = Duration::from_secs(wall.unsigned_abs());
        Stamp {
            at: than.at + Duration::from_secs(steady),
            wall: match wall < 0 {
                true => than.wall - moved,
                false => than.wall + moved,
            },
        }
    }

    /// The monotonic clock stands still while the lid is closed.
    #[test]
    fn time_in_which_the_machine_was_suspended_counts() {
        let start = stamp();
        let slept_an_hour = later(start, 10, 3_610);
        assert_eq!(start.until(slept_an_hour), Duration::from_secs(3_610));
    }

    #[test]
    fn a_wall_clock_that_is_set_back_or_a_little_off_changes_nothing() {
        let start = stamp();
        for wall in [-3_600, 0, 12, 15] {
            let age = start.until(later(start, 10, wall));
            assert_eq!(age, Duration::from_secs(10), "{wall}");
        }
    }
}
