//! The idle connections of one origin, and which of them is next.
//!
//! Pure and generic over what is kept, so that a model test drives it with numbers. It never closes
//! anything: what must go is returned, and the caller closes it once the lock is released.
//!
//! # Invariants
//!
//! * Ordered by the time at which each item became idle, oldest first.
//! * An item is handed out at most once: everything that returns one moves it out.
//! * Never more than `limit` items after [`Shelf::put`].

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::{Instant, Stamp};
use crate::stats::CloseReason;

/// What is kept: something that may come to its end while it lies there.
pub(crate) trait Item {
    fn id(&self) -> u64;

    /// Why it must not be used any more, if so.
    fn over(&self, now: Stamp) -> Option<CloseReason>;

    /// When it will be over by itself.
    fn ends(&self) -> Option<Instant>;

    /// How many requests it has carried.
    fn served(&self) -> u32;

    /// How many it may carry, where the caller says so.
    fn most(&self) -> Option<u32>;

    /// Whether it has never carried anything.
    fn is_unused(&self) -> bool {
        self.served() == 0
    }
}

#[derive(Debug)]
struct Idle<T> {
    since: Stamp,
    item: T,
}

/// An item that was taken off the shelf.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Taken<T> {
    pub(crate) item: T,
    pub(crate) since: Stamp,
    /// Why it must be closed and not used, if so.
    pub(crate) over: Option<CloseReason>,
}

/// What a look at the shelf by a connection's own timer found.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Expiry<T> {
    /// Its time is over. It is off the shelf.
    Due(T, CloseReason),
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

impl<T: Item> Shelf<T> {
    pub(crate) fn new(timeout: Option<Duration>, limit: usize) -> Self {
        Shelf {
            idle: VecDeque::new(),
            timeout,
            limit,
        }
    }

    /// Puts an item on the shelf that has been idle since then. Returns the one that must make room: the
    /// longest idle one, or this one where none may be kept.
    pub(crate) fn put(&mut self, item: T, since: Stamp) -> Option<T> {
        if self.limit == 0 {
            return Some(item);
        }
        // Almost always the newest; one that was taken and released unused keeps its age.
        let newer = self.idle.iter().rev();
        let newer = newer.take_while(|idle| idle.since.at > since.at).count();
        let at = self.idle.len() - newer;
        self.idle.insert(at, Idle { since, item });
        if self.idle.len() > self.limit {
            return self.idle.pop_front().map(|idle| idle.item);
        }
        None
    }

    /// Takes the most recently used item if it will do or if its time is over, and says which. Whoever finds one
    /// that is over asks again.
    pub(crate) fn take(
        &mut self,
        now: Stamp,
        will_do: impl FnOnce(&T, Stamp) -> bool,
    ) -> Option<Taken<T>> {
        let newest = self.idle.back()?;
        let over = self.over(&newest.item, newest.since, now);
        if over.is_none() && !will_do(&newest.item, newest.since) {
            return None;
        }
        let Idle { since, item } = self.idle.pop_back()?;
        Some(Taken { item, since, over })
    }

    /// Takes the item that has carried most, of those that have been idle for less than `within`; of equals the most
    /// recently used.
    pub(crate) fn take_most_used(&mut self, within: Duration, now: Stamp) -> Option<Taken<T>> {
        let recent = self.idle.iter().enumerate().rev();
        let recent = recent.take_while(|(_, idle)| idle.since.until(now) < within);
        // The last of equals wins, and the newest must.
        let (at, _) = recent.max_by_key(|(at, idle)| (idle.item.served(), *at))?;
        let Idle { since, item } = self.idle.remove(at)?;
        let over = self.over(&item, since, now);
        Some(Taken { item, since, over })
    }

    /// How many requests an item may carry, where the caller says so: it is the same for all.
    pub(crate) fn most(&self) -> Option<u32> {
        self.idle.back().and_then(|newest| newest.item.most())
    }

    fn over(&self, item: &T, since: Stamp, now: Stamp) -> Option<CloseReason> {
        let age = since.until(now);
        match self.timeout {
            Some(timeout) if age >= timeout => Some(CloseReason::IdleTimeout),
            _ => item.over(now),
        }
    }

    /// Takes the longest idle item.
    pub(crate) fn take_oldest(&mut self) -> Option<T> {
        self.idle.pop_front().map(|idle| idle.item)
    }

    /// Since when the longest idle item has been idle, of those that have carried anything.
    pub(crate) fn oldest_used(&self) -> Option<Stamp> {
        let mut used = self.idle.iter().filter(|idle| !idle.item.is_unused());
        used.next().map(|idle| idle.since)
    }

    /// Since when the longest idle item has been idle.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.idle.front().map(|idle| idle.since.at)
    }

    /// Takes this very item off the shelf, if it is there, and says since when it was.
    pub(crate) fn remove(&mut self, id: u64) -> Option<(T, Stamp)> {
        let at = self.position(id)?;
        self.idle.remove(at).map(|idle| (idle.item, idle.since))
    }

    fn position(&self, id: u64) -> Option<usize> {
        self.idle.iter().position(|idle| idle.item.id() == id)
    }

    /// Asks for one item whether its time is over.
    pub(crate) fn expire(&mut self, id: u64, now: Stamp) -> Expiry<T> {
        let Some(at) = self.position(id) else {
            return Expiry::NotIdle;
        };
        let Idle { since, item } = &self.idle[at];
        if let Some(reason) = self.over(item, *since, now) {
            return match self.idle.remove(at) {
                Some(idle) => Expiry::Due(idle.item, reason),
                None => Expiry::NotIdle,
            };
        }
        let too_idle = self.timeout.map(|timeout| since.at + timeout);
        match too_idle.into_iter().chain(item.ends()).min() {
            Some(due) => Expiry::At(due),
            None => Expiry::NotIdle,
        }
    }

    /// Takes every item off the shelf that must not be used any more.
    pub(crate) fn sweep(&mut self, now: Stamp) -> Vec<(T, CloseReason)> {
        let mut swept = Vec::new();
        let mut at = 0;
        while let Some(Idle { since, item }) = self.idle.get(at) {
            match self.over(item, *since, now) {
                None => at += 1,
                Some(reason) => swept.extend(self.idle.remove(at).map(|idle| (idle.item, reason))),
            }
        }
        swept
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
    use crate::clock::stamp;

    const TIMEOUT: Duration = Duration::from_secs(10);

    /// A number, and the moment at which its life ends.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    struct Thing(u64, Option<Instant>);

    impl Item for Thing {
        fn id(&self) -> u64 {
            self.0
        }

        fn over(&self, now: Stamp) -> Option<CloseReason> {
            self.1
                .is_some_and(|end| now.at >= end)
                .then_some(CloseReason::Lifetime)
        }

        fn ends(&self) -> Option<Instant> {
            self.1
        }

        fn served(&self) -> u32 {
            1
        }

        fn most(&self) -> Option<u32> {
            None
        }
    }

    fn any(_: &Thing, _: Stamp) -> bool {
        true
    }

    fn thing(id: u64) -> Thing {
        Thing(id, None)
    }

    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn after(start: Stamp, s: u64) -> Stamp {
        Stamp {
            at: start.at + seconds(s),
            wall: start.wall + seconds(s),
        }
    }

    /// RFC 9112 says nothing about the order; newest first lets a surplus grow old and leave.
    /// lysine-dev/okhttp#1397, nodejs/node#33278
    #[test]
    fn the_most_recently_used_is_taken_first() {
        let start = stamp();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        for id in 0..3 {
            assert_eq!(shelf.put(thing(id), after(start, id)), None);
        }
        let now = after(start, 3);
        let order: Vec<_> = std::iter::from_fn(|| shelf.take(now, any))
            .map(|taken| (taken.item.0, taken.since.until(now), taken.over))
            .collect();
        let expected = [
            (2, seconds(1), None),
            (1, seconds(2), None),
            (0, seconds(3), None),
        ];
        assert_eq!(order, expected);
    }

    #[test]
    fn an_item_whose_idle_time_is_over_is_for_closing() {
        let start = stamp();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        shelf.put(thing(1), start);
        shelf.put(thing(2), start);
        let taken = shelf.take(after(start, 10), any).expect("it is there");
        assert_eq!(taken.over, Some(CloseReason::IdleTimeout));
        let due = Expiry::Due(thing(1), CloseReason::IdleTimeout);
        assert_eq!(shelf.expire(1, after(start, 10)), due);
        assert_eq!(shelf.len(), 0);
    }

    #[test]
    fn a_suspended_machine_does_not_keep_an_item_young() {
        let start = stamp();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        shelf.put(thing(1), start);
        let woken = Stamp {
            at: start.at + seconds(1),
            wall: start.wall + seconds(600),
        };
        let taken = shelf.take(woken, any).expect("it is there");
        assert_eq!(taken.over, Some(CloseReason::IdleTimeout));
    }

    /// curl/curl#7751
    #[test]
    fn a_life_that_is_over_ends_an_item_on_the_shelf_and_at_hand_over() {
        let start = stamp();
        let mut shelf = Shelf::new(None, 8);
        let mortal = |id| Thing(id, Some(start.at + seconds(5)));
        shelf.put(mortal(1), start);
        shelf.put(mortal(2), start);
        assert_eq!(
            shelf.expire(1, after(start, 4)),
            Expiry::At(start.at + seconds(5))
        );
        let due = Expiry::Due(mortal(1), CloseReason::Lifetime);
        assert_eq!(shelf.expire(1, after(start, 5)), due);
        let taken = shelf.take(after(start, 5), any).expect("it is there");
        assert_eq!(taken.over, Some(CloseReason::Lifetime));
    }

    #[test]
    fn a_timer_that_comes_too_early_learns_when_to_come_back() {
        let start = stamp();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        shelf.put(thing(1), after(start, 4));
        let now = after(start, 10);
        assert_eq!(shelf.expire(1, now), Expiry::At(after(start, 14).at));
        assert_eq!(shelf.expire(2, now), Expiry::NotIdle);
    }

    #[test]
    fn without_a_timeout_nothing_grows_too_old() {
        let start = stamp();
        let mut shelf = Shelf::new(None, 8);
        shelf.put(thing(1), start);
        let later = after(start, 1_000_000);
        assert_eq!(shelf.expire(1, later), Expiry::NotIdle);
        assert_eq!(shelf.take(later, any).expect("it is there").over, None);
    }

    #[test]
    fn the_longest_idle_makes_room() {
        let start = stamp();
        let mut shelf = Shelf::new(Some(TIMEOUT), 2);
        assert_eq!(shelf.put(thing(1), start), None);
        assert_eq!(shelf.put(thing(2), start), None);
        assert_eq!(shelf.put(thing(3), start), Some(thing(1)));
        assert_eq!(shelf.len(), 2);
    }

    #[test]
    fn an_item_that_was_released_unused_keeps_its_idle_age() {
        let start = stamp();
        let mut shelf = Shelf::new(Some(TIMEOUT), 8);
        shelf.put(thing(1), start);
        let taken = shelf.take(after(start, 1), any).expect("it is there");
        shelf.put(thing(2), after(start, 2));
        shelf.put(taken.item, taken.since);
        assert_eq!(shelf.oldest(), Some(start.at));
        assert_eq!(shelf.take_oldest(), Some(thing(1)));
    }

    #[test]
    fn a_shelf_of_no_places_returns_what_it_is_given() {
        let mut shelf = Shelf::new(Some(TIMEOUT), 0);
        assert_eq!(shelf.put(thing(1), stamp()), Some(thing(1)));
        assert_eq!(shelf.len(), 0);
    }

    #[derive(Clone, Debug)]
    enum Event {
        Put,
        Take,
        Remove(u64),
        Expire(u64),
        Sweep,
        Wait(u64),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            3 => Just(Event::Put),
            2 => Just(Event::Take),
            1 => (0u64..40).prop_map(Event::Remove),
            1 => (0u64..40).prop_map(Event::Expire),
            1 => Just(Event::Sweep),
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
            let mut now = stamp();
            let mut shelf = Shelf::new(Some(TIMEOUT), limit);
            let mut model: Vec<(u64, Stamp)> = Vec::new();
            let mut next = 0;
            let is_over = |since: Stamp, now: Stamp| since.until(now) >= TIMEOUT;
            for event in events {
                match event {
                    Event::Put => {
                        let out = shelf.put(thing(next), now);
                        model.push((next, now));
                        let expected = (model.len() > limit).then(|| model.remove(0).0);
                        prop_assert_eq!(out.map(|thing| thing.0), expected);
                        next += 1;
                    }
                    Event::Take => {
                        let expected = model.pop();
                        let out = shelf.take(now, any);
                        prop_assert_eq!(
                            out.map(|taken| (taken.item.0, taken.since, taken.over.is_some())),
                            expected.map(|(id, since)| (id, since, is_over(since, now)))
                        );
                    }
                    Event::Remove(id) => {
                        let at = model.iter().position(|&(other, _)| other == id);
                        let expected = at.map(|at| model.remove(at).0);
                        prop_assert_eq!(shelf.remove(id).map(|(thing, _)| thing.0), expected);
                    }
                    Event::Expire(id) => {
                        let at = model.iter().position(|&(other, _)| other == id);
                        let expected = match at {
                            None => Expiry::NotIdle,
                            Some(at) if !is_over(model[at].1, now) => {
                                Expiry::At(model[at].1.at + TIMEOUT)
                            }
                            Some(at) => {
                                Expiry::Due(thing(model.remove(at).0), CloseReason::IdleTimeout)
                            }
                        };
                        prop_assert_eq!(shelf.expire(id, now), expected);
                    }
                    Event::Sweep => {
                        let swept: Vec<_> = shelf.sweep(now).into_iter().map(|(item, _)| item.0).collect();
                        let expected: Vec<_> = model
                            .extract_if(.., |(_, since)| is_over(*since, now))
                            .map(|(id, _)| id)
                            .collect();
                        prop_assert_eq!(swept, expected);
                    }
                    Event::Wait(s) => now = after(now, s),
                }
                prop_assert_eq!(shelf.len(), model.len());
                prop_assert!(shelf.len() <= limit);
            }
        }
    }
}
