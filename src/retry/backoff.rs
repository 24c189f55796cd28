//! How long to wait before the next attempt: exponential, with full jitter.
//!
//! Pure: the random source is an argument. Never more than the cap, never a panic on overflow.

use std::time::Duration;

/// Exponential growth from `base` to `cap`; the wait is drawn evenly from zero to there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Backoff {
    pub(crate) base: Duration,
    pub(crate) cap: Duration,
}

impl Backoff {
    /// The longest wait before the resend that `earlier` waits came before.
    pub(crate) fn ceiling(&self, earlier: u32) -> Duration {
        let factor = 2_u32.saturating_pow(earlier);
        self.base.saturating_mul(factor).min(self.cap)
    }

    /// Draws a wait. Full jitter: clients that failed together do not come back together.
    pub(crate) fn wait(&self, earlier: u32, rng: &mut fastrand::Rng) -> Duration {
        let ceiling = self.ceiling(earlier).as_nanos();
        Duration::from_nanos(rng.u64(0..=u64::try_from(ceiling).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff {
        base: Duration::from_millis(100),
        cap: Duration::from_secs(10),
    };

    /// Doubles each time and stops at the cap.
    #[test]
    fn ceiling_doubles_up_to_the_cap() {
        let millis = |n| BACKOFF.ceiling(n).as_millis();
        assert_eq!((millis(0), millis(1), millis(2)), (100, 200, 400));
        assert_eq!((millis(6), millis(7)), (6_400, 10_000));
    }

    #[test]
    fn ceiling_saturates_instead_of_overflowing() {
        assert_eq!(BACKOFF.ceiling(u32::MAX), BACKOFF.cap);
        let endless = Backoff {
            base: Duration::MAX,
            cap: Duration::MAX,
        };
        assert_eq!(endless.ceiling(40), Duration::MAX);
        endless.wait(40, &mut fastrand::Rng::with_seed(1));
    }

    /// Full jitter: evenly spread from zero to the ceiling.
    #[test]
    fn waits_spread_evenly_from_zero_to_the_ceiling() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut quarters = [0_u32; 4];
        for _ in 0..4_000 {
            let wait = BACKOFF.wait(2, &mut rng);
            assert!(wait <= Duration::from_millis(400));
            let quarter = usize::try_from(wait.as_millis() / 100)
                .expect("small")
                .min(3);
            quarters[quarter] += 1;
        }
        assert!(
            quarters.iter().all(|n| (850..1_150).contains(n)),
            "{quarters:?}"
        );
    }

    #[test]
    fn one_seed_gives_one_sequence() {
        let draw = || {
            let mut rng = fastrand::Rng::with_seed(42);
            [0, 1, 2].map(|n| BACKOFF.wait(n, &mut rng))
        };
        assert_eq!(draw(), draw());
    }
}
