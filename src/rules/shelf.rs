//! The idle connections of one origin, and which of them is next.
//!
//! Pure and generic over what is kept, so that a model test drives it with numbers. It never closes
//! anything: what must go is returned, and the caller closes it once the lock is released.
//!
//! # Invariants
//!
//! * Ordered by the time at which each item became idle, oldest first.
//! * An item is handed out at most once: [`Shelf::take`] and [`Shelf::remove`] move it out.
//! * Never more than `limit` items after [`Shelf::put`].

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Instant;

#[derive(Debug)]
struct Idle<T> {
    id: u64,
    since: Instant,
    item: T,
}

/// What a look at the shelf by a connection's own timer found.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Expiry<T> {
    /// Its time is over. It is off the shelf.
    Due(T),
    /// It is idle and has until then.
    At(Instant),
    /// It is not on the shelf: in use, or gone.
    NotIdle,
}

/// Idle items, oldest first.
#[derive(Debug)]
pub(crate) struct Shelf<T> {
    idle: VecDeque<Idle<T>>,
    timeout: Option<Duration>,
    limit: usize,
}

impl<T> Shelf<T> {
    pub(crate) fn new(timeout: Option<Duration>, limit: usize) -> Self {
        Shelf {
            idle: VecDeque::new(),
            timeout,
            limit,
        }
    }

    /// Puts an item on the shelf. Returns the one that must make room: the longest idle one, or this
    /// one where none may be kept.
    pub(crate) fn put(&mut self, id: u64, item: T, now: Instant) -> Option<T> {
        if self.limit == 0 {
            return Some(item);
        }
        let surplus = if self.idle.len() >= self.limit {
            self.idle.pop_front().map(|idle| idle.item)
        } else {
            None
        };
        self.idle.push_back(Idle {
            id,
            since: now,
            item,
        });
        surplus
    }

    /// Takes the most recently used item that is not over its time, and how long it has been idle.
    pub(crate) fn take(&mut self, now: Instant) -> Option<(T, Duration)> {
        // The newest is last. If its time is over, so is everybody's; their own timers fetch them.
        let newest = self.idle.back()?;
        let age = now.saturating_duration_since(newest.since);
        if self.timeout.is_some_and(|timeout| age >= timeout) {
            return None;
        }
        self.idle.pop_back().map(|idle| (idle.item, age))
    }

    /// Takes this very item off the shelf, if it is there.
    pub(crate) fn remove(&mut self, id: u64) -> Option<T> {
        let at = self.idle.iter().position(|idle| idle.id == id)?;
        self.idle.remove(at).map(|idle| idle.item)
    }

    /// Asks for one item whether its time is over.
    pub(crate) fn expire(&mut self, id: u64, now: Instant) -> Expiry<T> {
        let Some(timeout) = self.timeout else {
            return Expiry::NotIdle;
        };
        let Some(at) = self.idle.iter().position(|idle| idle.id == id) else {
            return Expiry::NotIdle;
        };
        let due = self.idle[at].since + timeout;
        if now < due {
            return Expiry::At(due);
        }
        match self.idle.remove(at) {
            Some(idle) => Expiry::Due(idle.item),
            None => Expiry::NotIdle,
        }
    }

    /// Takes everything off the shelf.
    pub(crate) fn clear(&mut self) -> Vec<T> {
        self.idle.drain(..).map(|idle| idle.item).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.idle.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::now;

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    /// RFC 9112 says nothing about the order; newest first lets a surplus grow old and leave.
    #[test]
    fn the_most_recently_used_is_taken_first() {
        let start = now();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        for id in 0..3 {
            assert_eq!(shelf.put(id, id, start + seconds(id)), None);
        }
        let order: Vec<_> = std::iter::from_fn(|| shelf.take(start + seconds(3))).collect();
        assert_eq!(order, [(2, seconds(1)), (1, seconds(2)), (0, seconds(3))]);
    }

    #[test]
    fn an_item_is_not_taken_once_its_time_is_over() {
        let start = now();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        shelf.put(1, 'a', start);
        assert_eq!(shelf.take(start + TIMEOUT), None);
        assert_eq!(shelf.expire(1, start + TIMEOUT), Expiry::Due('a'));
        assert_eq!(shelf.len(), 0);
    }

    #[test]
    fn a_timer_that_comes_too_early_learns_when_to_come_back() {
        let start = now();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        shelf.put(1, 'a', start + seconds(4));
        assert_eq!(
            shelf.expire(1, start + TIMEOUT),
            Expiry::At(start + seconds(14))
        );
        assert_eq!(shelf.expire(2, start + TIMEOUT), Expiry::NotIdle);
    }

    #[test]
    fn without_a_timeout_nothing_grows_too_old() {
        let start = now();
        let mut shelf = Shelf::new(None, 8);
        shelf.put(1, 'a', start);
        let later = start + seconds(1_000_000);
        assert_eq!(shelf.expire(1, later), Expiry::NotIdle);
        assert_eq!(shelf.take(later), Some(('a', seconds(1_000_000))));
    }

    #[test]
    fn the_longest_idle_makes_room() {
        let start = now();
        let mut shelf = Shelf::new(Some(TIMEOUT), 2);
        assert_eq!(shelf.put(1, 1, start), None);
        assert_eq!(shelf.put(2, 2, start), None);
        assert_eq!(shelf.put(3, 3, start), Some(1));
        assert_eq!(shelf.len(), 2);
    }

    #[test]
    fn a_shelf_of_no_places_returns_what_it_is_given() {
        let mut shelf = Shelf::new(Some(TIMEOUT), 0);
        assert_eq!(shelf.put(1, 'a', now()), Some('a'));
        assert_eq!(shelf.len(), 0);
    }

    #[derive(Clone, Debug)]
    enum Event {
        Put,
        Take,
        Remove(u64),
        Expire(u64),
        Wait(u64),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => Just(Event::Put),
            2 => Just(Event::Take),
            1 => (0u64..40).prop_map(Event::Remove),
            1 => (0u64..40).prop_map(Event::Expire),
            2 => (0u64..6).prop_map(Event::Wait),
        ]
    }

    proptest! {
        /// Against a plain list: nothing is lost, nothing is handed out twice or too old, the limit holds.
        #[test]
        fn every_item_leaves_exactly_once_and_never_too_old(
            events in proptest::collection::vec(event(), 0..120),
            limit in 0usize..5,
        ) {
            let mut now = now();
            let mut shelf = Shelf::new(Some(TIMEOUT), limit);
            let mut model: Vec<(u64, Instant)> = Vec::new();
            let mut next = 0;
            for event in events {
                match event {
                    Event::Put => {
                        let out = shelf.put(next, next, now);
                        model.push((next, now));
                        let expected = (model.len() > limit).then(|| model.remove(0).0);
                        prop_assert_eq!(out, expected);
                        next += 1;
                    }
                    Event::Take => {
                        let fresh = |since: Instant| now.duration_since(since) < TIMEOUT;
                        let expected = model.last().copied().filter(|&(_, since)| fresh(since));
                        if expected.is_some() {
                            model.pop();
                        }
                        let out = shelf.take(now);
                        prop_assert_eq!(out.map(|(item, _)| item), expected.map(|(id, _)| id));
                        if let (Some((_, age)), Some((_, since))) = (out, expected) {
                            prop_assert_eq!(age, now.duration_since(since));
                        }
                    }
                    Event::Remove(id) => {
                        let at = model.iter().position(|&(other, _)| other == id);
                        let expected = at.map(|at| model.remove(at).0);
                        prop_assert_eq!(shelf.remove(id), expected);
                    }
                    Event::Expire(id) => {
                        let at = model.iter().position(|&(other, _)| other == id);
                        let expected = match at {
                            None => Expiry::NotIdle,
                            Some(at) if now < model[at].1 + TIMEOUT => Expiry::At(model[at].1 + TIMEOUT),
                            Some(at) => Expiry::Due(model.remove(at).0),
                        };
                        prop_assert_eq!(shelf.expire(id, now), expected);
                    }
                    Event::Wait(s) => now += seconds(s),
                }
                prop_assert_eq!(shelf.len(), model.len());
                prop_assert!(shelf.len() <= limit);
            }
        }
    }
}
