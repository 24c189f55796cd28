//! Does a server send the head and the body of a response apart, and wait for our acknowledgement in between?
//!
//! A server that writes head and body in two calls with Nagle's algorithm on holds the second back until the first
//! is acknowledged. On a connection that has been in use the kernel delays that acknowledgement, by 40 ms on Linux.
//! So every request on a reused connection waits 40 ms for nothing, which on a fresh one it would not. What such a
//! server needs is an acknowledgement at once; what all others need is to be left alone.
//!
//! Pure: the gap between two reads comes in as an argument.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// What is known of one origin.
#[derive(Debug, Default)]
pub(crate) struct Split {
    stalls: AtomicU32,
}

/// The kernel's shortest delay is 40 ms. A little less, for a clock that was read late the first time.
const SHORTEST: Duration = Duration::from_millis(35);
/// The longest is 200 ms, and a machine may be late.
const LONGEST: Duration = Duration::from_millis(250);
/// One may be a server that had to think. Two in a row of the same length are its habit.
const ENOUGH: u32 = 2;

impl Split {
    /// Whether responses of this origin are to be acknowledged as soon as they begin.
    pub(crate) fn is_known(&self) -> bool {
        self.stalls.load(Relaxed) >= ENOUGH
    }

    /// Takes in the gap between the first two reads of a response on a reused connection. `true` if that makes it
    /// known.
    pub(crate) fn gap(&self, gap: Duration) -> bool {
        if self.is_known() {
            return false;
        }
        if !(SHORTEST..=LONGEST).contains(&gap) {
            // Only in a row.
            self.stalls.store(0, Relaxed);
            return false;
        }
        self.stalls.fetch_add(1, Relaxed) + 1 == ENOUGH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(gaps: &[u64]) -> (bool, usize) {
        let split = Split::default();
        let gaps = gaps.iter().copied().map(Duration::from_millis);
        let told = gaps.filter(|&gap| split.gap(gap)).count();
        (split.is_known(), told)
    }

    #[test]
    fn two_stalls_in_a_row_are_a_habit_and_told_once() {
        assert_eq!(after(&[44, 41]), (true, 1));
        assert_eq!(after(&[44, 41, 44, 0, 0]), (true, 1));
    }

    #[test]
    fn a_server_that_thinks_or_sends_at_once_has_no_such_habit() {
        assert_eq!(after(&[44]), (false, 0));
        assert_eq!(after(&[44, 1, 44, 1]), (false, 0));
        assert_eq!(after(&[500, 900, 2_000]), (false, 0));
        assert_eq!(after(&[0, 5, 20, 30]), (false, 0));
    }
}
