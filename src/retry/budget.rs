//! How much retrying one origin may see, as a share of the requests that go there.
//!
//! Decides whether one more retry may be spent; never whether it would be safe. Exact integer
//! arithmetic in millionths of a retry: a ratio of 0.4 is 400 retries for 1,000 requests, not 500.
//!
//! # Invariants
//!
//! * In any window: retries <= ratio x requests + reserve.
//! * The table of origins never grows beyond [`MAX_ORIGINS`].

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::Instant;
use crate::origin::Origin;

/// A budget of retries per origin, shared by all clones.
///
/// Retries help when failures are rare and hurt when a server is overloaded: then each request
/// becomes several. The budget lets every request deposit a fraction of a retry at its origin and
/// every retry withdraw a whole one, over a sliding window. A request that was never sent costs
/// nothing when it is sent again. Requests without an absolute URI share one account.
///
/// It remembers the 1,024 origins used last; an origin beyond that starts anew.
///
/// # Default
/// One retry for five requests (0.2), ten retries a second on top so that a client with little
/// traffic can retry at all, over 10 s: the numbers of Finagle, where they have run for years.
///
/// ```
/// use std::time::Duration;
/// use idempool::{RetryBudget, RetryPolicy};
///
/// let budget = RetryBudget::new(0.1, 2, Duration::from_secs(30));
/// let payments = RetryPolicy::default().budget(budget.clone());
/// let refunds = RetryPolicy::default().budget(budget); // spends from the same accounts
/// # drop((payments, refunds));
/// ```
#[derive(Clone)]
pub struct RetryBudget(Arc<Inner>);

struct Inner {
    /// Millionths of a retry that one request deposits.
    deposit: u64,
    /// Millionths of a retry that are there without any request.
    reserve: u64,
    slot: Duration,
    accounts: Mutex<HashMap<Option<Origin>, Account>>,
}

impl RetryBudget {
    /// Creates a budget of `ratio` retries per request, and `min_per_second` retries a second on top,
    /// both over a sliding `window`.
    ///
    /// A ratio of zero and a minimum of zero allow no retry but those that the budget does not count.
    /// The ratio is rounded to a millionth.
    ///
    /// # Panics
    /// Panics if `ratio` is not between 0 and 1,000, or `window` not between 1 s and 1 h.
    pub fn new(ratio: f64, min_per_second: u32, window: Duration) -> Self {
        assert!(
            (0.0..=1_000.0).contains(&ratio),
            "a retry ratio is between 0 and 1,000"
        );
        let hour = Duration::from_secs(3_600);
        assert!(
            (Duration::from_secs(1)..=hour).contains(&window),
            "a retry budget's window is between 1 s and 1 h"
        );
        // At most 10^9, checked above.
        #[allow(clippy::cast_possible_truncation)]
        let deposit = (ratio * WHOLE as f64).round() as u64;
        let millis = u64::try_from(window.as_millis()).unwrap_or(u64::MAX);
        let reserve = u64::from(min_per_second)
            .saturating_mul(millis)
            .saturating_mul(WHOLE / 1_000);
        RetryBudget(Arc::new(Inner {
            deposit,
            reserve,
            slot: window / SLOTS_U32,
            accounts: Mutex::default(),
        }))
    }

    /// Notes one logical request, however often it will be sent.
    pub(crate) fn deposit(&self, origin: Option<&Origin>, now: Instant) {
        self.with(origin, now, |account, inner| {
            let slot = account.current();
            slot.deposited = slot.deposited.saturating_add(inner.deposit);
        });
    }

    /// Takes one retry, if there is one.
    pub(crate) fn withdraw(&self, origin: Option<&Origin>, now: Instant) -> bool {
        self.with(origin, now, |account, inner| {
            let (deposited, withdrawn) = account.totals();
            let allowed = deposited.saturating_add(inner.reserve);
            let affordable = withdrawn.saturating_add(WHOLE) <= allowed;
            if affordable {
                let slot = account.current();
                slot.withdrawn = slot.withdrawn.saturating_add(WHOLE);
            }
            affordable
        })
    }

    fn with<T>(
        &self,
        origin: Option<&Origin>,
        now: Instant,
        act: impl FnOnce(&mut Account, &Inner) -> T,
    ) -> T {
        let inner = &*self.0;
        // The accounts are whole numbers, each valid by itself: a panic elsewhere spoils nothing.
        let mut accounts = inner
            .accounts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let key = origin.cloned();
        if accounts.len() >= MAX_ORIGINS && !accounts.contains_key(&key) {
            let oldest = accounts.iter().min_by_key(|(_, account)| account.used);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                accounts.remove(&oldest);
            }
        }
        let account = accounts.entry(key).or_insert_with(|| Account::new(now));
        account.advance(now, inner.slot);
        act(account, inner)
    }
}

impl Default for RetryBudget {
    fn default() -> Self {
        RetryBudget::new(0.2, 10, Duration::from_secs(10))
    }
}

impl fmt::Debug for RetryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryBudget")
            .field("deposit_millionths", &self.0.deposit)
            .field("reserve_millionths", &self.0.reserve)
            .field("window", &(self.0.slot * SLOTS_U32))
            .finish_non_exhaustive()
    }
}

/// The sliding window of one origin: a ring of slots, the current one at `at`.
struct Account {
    slots: [Slot; SLOTS],
    at: usize,
    /// When the current slot began.
    since: Instant,
    used: Instant,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    deposited: u64,
    withdrawn: u64,
}

impl Account {
    fn new(now: Instant) -> Self {
        Account {
            slots: [Slot::default(); SLOTS],
            at: 0,
            since: now,
            used: now,
        }
    }

    /// Forgets the slots that have left the window.
    fn advance(&mut self, now: Instant, slot: Duration) {
        self.used = self.used.max(now);
        for _ in 0..SLOTS {
            if now.saturating_duration_since(self.since) < slot {
                return;
            }
            self.at = (self.at + 1) % SLOTS;
            self.slots[self.at] = Slot::default();
            self.since += slot;
        }
        // More than a whole window has passed: all slots are empty, and the ring starts here.
        if now.saturating_duration_since(self.since) >= slot {
            self.since = now;
        }
    }

    fn current(&mut self) -> &mut Slot {
        &mut self.slots[self.at]
    }

    fn totals(&self) -> (u64, u64) {
        self.slots
            .iter()
            .fold((0, 0), |(deposited, withdrawn), slot| {
                (
                    slot.deposited.saturating_add(deposited),
                    slot.withdrawn.saturating_add(withdrawn),
                )
            })
    }
}

/// One retry.
const WHOLE: u64 = 1_000_000;

/// Fine enough that the window slides and does not jump, coarse enough to be summed at each retry.
const SLOTS: usize = 10;
const SLOTS_U32: u32 = 10;

/// Bounds memory (about 250 bytes each) for a client that meets hosts without end, such as a crawler.
const MAX_ORIGINS: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const WINDOW: Duration = Duration::from_secs(10);

    fn origin(n: usize) -> Option<Origin> {
        Origin::of(&format!("http://host{n}.example").parse().expect("a URI"))
    }

    /// Every one of 1,000 requests fails and asks for a retry (R-22).
    fn spent(ratio: f64) -> usize {
        let budget = RetryBudget::new(ratio, 0, WINDOW);
        let now = clock::now();
        (0..1_000)
            .filter(|_| {
                budget.deposit(None, now);
                budget.withdraw(None, now)
            })
            .count()
    }

    /// No rounding of the ratio to 1/n (R-22).
    #[test]
    fn ratio_is_exact() {
        for (ratio, retries) in [
            (0.0, 0),
            (0.15, 150),
            (0.333, 333),
            (0.4, 400),
            (0.51, 510),
            (0.7, 700),
            (0.99, 990),
            (1.0, 1_000),
        ] {
            assert_eq!(spent(ratio), retries, "ratio {ratio}");
        }
    }

    #[test]
    fn reserve_is_there_without_any_request() {
        let budget = RetryBudget::new(0.0, 3, WINDOW);
        let now = clock::now();
        assert_eq!((0..100).filter(|_| budget.withdraw(None, now)).count(), 30);
    }

    #[test]
    fn reserve_comes_back_after_the_window_and_not_before() {
        let budget = RetryBudget::new(0.0, 1, WINDOW);
        let now = clock::now();
        assert_eq!((0..20).filter(|_| budget.withdraw(None, now)).count(), 10);
        assert!(!budget.withdraw(None, now + Duration::from_millis(9_999)));
        assert!(budget.withdraw(None, now + WINDOW));
    }

    #[test]
    fn deposits_leave_with_the_window() {
        let budget = RetryBudget::new(1.0, 0, WINDOW);
        let now = clock::now();
        budget.deposit(None, now);
        budget.deposit(None, now);
        assert!(budget.withdraw(None, now + Duration::from_secs(9)));
        assert!(!budget.withdraw(None, now + Duration::from_secs(3_600)));
    }

    #[test]
    fn origins_do_not_spend_each_others_retries() {
        let budget = RetryBudget::new(1.0, 0, WINDOW);
        let now = clock::now();
        budget.deposit(origin(1).as_ref(), now);
        assert!(!budget.withdraw(origin(2).as_ref(), now));
        assert!(budget.clone().withdraw(origin(1).as_ref(), now));
        assert!(!budget.withdraw(origin(1).as_ref(), now));
    }

    #[test]
    fn table_keeps_the_origins_used_last() {
        let budget = RetryBudget::new(1.0, 0, WINDOW);
        let start = clock::now();
        for n in 0..=MAX_ORIGINS {
            let now = start + Duration::from_micros(u64::try_from(n).expect("small"));
            budget.deposit(origin(n).as_ref(), now);
        }
        let now = start + Duration::from_millis(10);
        assert_eq!(
            budget.0.accounts.lock().expect("no panic").len(),
            MAX_ORIGINS
        );
        assert!(
            budget.withdraw(origin(1).as_ref(), now),
            "the second is still known"
        );
        assert!(
            !budget.withdraw(origin(0).as_ref(), now),
            "the first has left"
        );
    }

    #[test]
    #[should_panic(expected = "between 0 and 1,000")]
    fn a_ratio_that_is_no_number_is_refused() {
        RetryBudget::new(f64::NAN, 0, WINDOW);
    }
}
