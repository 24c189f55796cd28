//! All that was learnt of one origin, and what of it is worth telling.
//!
//! Pure. Events come in through the methods here, and what changes by them is returned as a [`Lesson`]: the caller
//! tells it once the lock is released.

use std::iter;
use std::time::Duration;

use crate::clock::Instant;
use crate::profile::{CloseAge, Known, Profile, Source};
use crate::rules::cap::CapRule;
use crate::rules::dial_window::{DialId, DialWindow};
use crate::rules::idle::IdleRule;

/// What is known of one origin.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learnt {
    pub(crate) idle: IdleRule,
    pub(crate) cap: CapRule,
    pub(crate) window: DialWindow,
    warned: Warned,
}

/// What was complained of already.
#[derive(Clone, Copy, Debug, Default)]
struct Warned {
    idle: bool,
    cap: bool,
    loss: bool,
}

/// A change of what is known of an origin. `costly` where it costs the caller time and a setting of the server would
/// change that; so once an origin.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Lesson {
    /// Idle connections are trusted with what must not be sent twice up to this age; the server closes them after so
    /// long, as far as is known.
    Idle {
        trusted: Duration,
        closes_after: Option<Duration>,
        costly: bool,
    },
    /// The server closes connections after so many requests, or not any more.
    Cap { cap: Option<u32>, costly: bool },
    /// Dials have lost packets, so fewer of them are made at a time.
    Loss { window: usize, costly: bool },
}

/// A cap below this costs more than one request in a thousand a reconnect.
const LOW_CAP: u32 = 1_000;

/// An idle timeout below this is shorter than the pauses of much ordinary traffic.
const SHORT_IDLE: Duration = Duration::from_secs(5);

/// What is known of idle connections moves with each look. Less than an eighth of it is no news.
const NEWS: u32 = 8;

impl Learnt {
    /// Runs an event of the idle rule.
    pub(crate) fn idle(&mut self, event: impl FnOnce(&mut IdleRule)) -> Option<Lesson> {
        let before = self.what_is_known_of_idle();
        event(&mut self.idle);
        let is_short = self.idle.timeout().is_some_and(|time| time < SHORT_IDLE);
        let costly = is_short && !self.warned.idle;
        self.warned.idle |= is_short;
        self.idle_lesson(before, costly)
    }

    /// An idle connection was seen open at this age. Nearly every exchange is one.
    pub(crate) fn open(&mut self, age: Duration) -> Option<Lesson> {
        let before = self.what_is_known_of_idle();
        self.idle.open(age);
        self.idle_lesson(before, false)
    }

    fn what_is_known_of_idle(&self) -> (Duration, Option<Duration>) {
        (self.idle.trusted(), self.idle.closes_after())
    }

    fn idle_lesson(&self, before: (Duration, Option<Duration>), costly: bool) -> Option<Lesson> {
        let (trusted, closes_after) = self.what_is_known_of_idle();
        let is_news = |before: Duration, now: Duration| before.abs_diff(now) > before / NEWS;
        let has_moved = match (before.1, closes_after) {
            (Some(before), Some(now)) => is_news(before, now),
            (before, now) => before.is_some() != now.is_some(),
        };
        (costly || has_moved || is_news(before.0, trusted)).then_some(Lesson::Idle {
            trusted,
            closes_after,
            costly,
        })
    }

    /// Runs an event of the rule of the cap.
    pub(crate) fn cap(&mut self, event: impl FnOnce(&mut CapRule)) -> Option<Lesson> {
        let before = self.cap.cap();
        event(&mut self.cap);
        let cap = self.cap.cap();
        if cap == before {
            return None;
        }
        let is_low = cap.is_some_and(|cap| cap < LOW_CAP);
        let costly = is_low && !self.warned.cap;
        self.warned.cap |= is_low;
        Some(Lesson::Cap { cap, costly })
    }

    /// A dial has lost a packet.
    pub(crate) fn lost(&mut self, id: DialId, now: Instant) -> Option<Lesson> {
        if !self.window.lost(id, now) {
            return None;
        }
        // One may be any packet on any network.
        let is_lossy = self.window.is_lossy(now);
        let costly = is_lossy && !self.warned.loss;
        self.warned.loss |= is_lossy;
        let window = self.window.size();
        Some(Lesson::Loss { window, costly })
    }

    /// As the pool's user sees it: together with what they allow.
    pub(crate) fn profile(
        &self,
        idle_timeout: Option<Duration>,
        max_requests: Option<u32>,
        splits_responses: bool,
    ) -> Profile {
        let Learnt {
            idle, cap, window, ..
        } = self;
        let idle_known = |value, source| Known {
            value,
            source,
            observations: idle.observations(),
        };
        let trusted = idle_known(idle.trusted(), idle.source());
        let caller = idle_timeout.map(|timeout| idle_known(timeout, Source::Caller));
        let hint = idle.limit().map(|limit| idle_known(limit, Source::Hint));
        let seen = cap.seen().map(|cap| (cap, Source::Seen));
        let announced = cap.announced().map(|cap| (cap, Source::Hint));
        let most = max_requests.map(|most| (most, Source::Caller));
        let caps = [seen, announced, most].into_iter().flatten();
        let cap_known = |(value, source)| Known {
            value,
            source,
            observations: cap.observations(),
        };
        Profile {
            // Of equals the first: what was seen says most.
            idle_limit: hint
                .into_iter()
                .chain(caller)
                .min_by_key(|known| known.value),
            trusted_idle_age: iter::once(trusted)
                .chain(caller)
                .min_by_key(|known| known.value)
                .unwrap_or(trusted),
            request_cap: caps.min_by_key(|&(cap, _)| cap).map(cap_known),
            unproven_dials: Known {
                value: window.size(),
                source: match window.is_blank() {
                    true => Source::Default,
                    false => Source::Seen,
                },
                observations: window.observations(),
            },
            splits_responses,
            announced_idle_timeout: idle.announced(),
            shortest_close: idle.shortest_close().map(|close| CloseAge {
                age: close.age,
                at_most: close.at_most,
            }),
            longest_open: idle.longest_open(),
        }
    }

    /// Whether there is nothing in it that is worth keeping.
    pub(crate) fn is_blank(&self) -> bool {
        self.idle.is_blank() && self.cap == CapRule::default() && self.window.is_ordinary()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::now;

    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn is_costly(lesson: Option<Lesson>) -> Option<bool> {
        lesson.map(|lesson| match lesson {
            Lesson::Idle { costly, .. }
            | Lesson::Cap { costly, .. }
            | Lesson::Loss { costly, .. } => costly,
        })
    }

    #[test]
    fn a_low_cap_is_complained_of_once() {
        let mut learnt = Learnt::default();
        let mut close = |count| is_costly(learnt.cap(|cap| cap.closed(count)));
        assert_eq!(close(100), None);
        assert_eq!(close(100), Some(true));
        assert_eq!(close(100), None, "no news");
        assert_eq!(close(50), Some(false), "no cap any more");
        assert_eq!(close(50), Some(false), "known, and complained of");
    }

    #[test]
    fn a_cap_that_hardly_costs_anything_is_told_and_not_complained_of() {
        let mut learnt = Learnt::default();
        assert_eq!(
            is_costly(learnt.cap(|cap| cap.announce(1_000))),
            Some(false)
        );
    }

    #[test]
    fn a_short_idle_timeout_is_complained_of_once() {
        let mut learnt = Learnt::default();
        let announce = |idle: &mut IdleRule| idle.announce(seconds(2));
        assert_eq!(is_costly(learnt.idle(announce)), Some(true));
        assert_eq!(is_costly(learnt.idle(announce)), None);
        let mut learnt = Learnt::default();
        assert_eq!(
            is_costly(learnt.idle(|idle| idle.announce(seconds(5)))),
            Some(false)
        );
    }

    /// A server that restarts closes at any age, once.
    #[test]
    fn one_close_is_told_and_not_complained_of() {
        let mut learnt = Learnt::default();
        let close = |idle: &mut IdleRule| idle.closed(seconds(2), false);
        assert_eq!(is_costly(learnt.idle(close)), Some(false));
        assert_eq!(is_costly(learnt.idle(close)), Some(true));
    }

    #[test]
    fn an_age_that_grows_a_little_is_no_news() {
        let mut learnt = Learnt::default();
        let mut open = |age| learnt.open(seconds(age)).is_some();
        assert!(open(20));
        assert!(!open(20));
        assert!(!open(22));
        assert!(open(26));
    }

    #[test]
    fn loss_is_complained_of_once_it_is_no_accident() {
        let (mut learnt, now) = (Learnt::default(), now());
        for id in 1..=5 {
            learnt.window.began(id, now);
            assert_eq!(is_costly(learnt.lost(id, now)), Some(id == 4), "{id}");
        }
        assert_eq!(learnt.lost(5, now), None, "told before");
    }

    fn told<T>(known: Option<Known<T>>) -> Option<(T, Source)> {
        known.map(|known| (known.value, known.source))
    }

    #[test]
    fn the_profile_shows_the_shorter_of_what_the_caller_allows_and_the_server_announces() {
        let limit = |announced: Option<u64>, callers: Option<u64>| {
            let mut learnt = Learnt::default();
            if let Some(announced) = announced {
                learnt.idle(|idle| idle.announce(seconds(announced)));
            }
            told(learnt.profile(callers.map(seconds), None, false).idle_limit)
        };
        let half = Duration::from_millis(500);
        assert_eq!(limit(None, None), None);
        assert_eq!(limit(None, Some(90)), Some((seconds(90), Source::Caller)));
        assert_eq!(
            limit(Some(5), None),
            Some((half + seconds(4), Source::Hint))
        );
        assert_eq!(
            limit(Some(5), Some(90)),
            Some((half + seconds(4), Source::Hint))
        );
        assert_eq!(limit(Some(60), Some(9)), Some((seconds(9), Source::Caller)));
    }

    #[test]
    fn the_profile_shows_where_the_trusted_age_comes_from() {
        let trusted = |learnt: &Learnt, callers: u64| {
            let profile = learnt.profile(Some(seconds(callers)), None, false);
            told(Some(profile.trusted_idle_age)).expect("always")
        };
        let mut learnt = Learnt::default();
        assert_eq!(trusted(&learnt, 90), (seconds(1), Source::Default));
        assert_eq!(trusted(&learnt, 0), (seconds(0), Source::Caller));
        learnt.open(seconds(30));
        assert_eq!(trusted(&learnt, 90), (seconds(30), Source::Seen));
        assert_eq!(trusted(&learnt, 9), (seconds(9), Source::Caller));
        learnt.idle(|idle| idle.announce(seconds(10)));
        assert_eq!(trusted(&learnt, 90), (seconds(8), Source::Hint));
        learnt.idle(|idle| idle.closed(seconds(5), false));
        assert_eq!(trusted(&learnt, 90), (seconds(3), Source::Seen));
    }

    #[test]
    fn the_profile_shows_the_lowest_cap_and_where_it_comes_from() {
        let cap = |learnt: &Learnt, most| told(learnt.profile(None, most, false).request_cap);
        let mut learnt = Learnt::default();
        assert_eq!(cap(&learnt, None), None);
        assert_eq!(cap(&learnt, Some(200)), Some((200, Source::Caller)));
        learnt.cap(|cap| cap.announce(100));
        assert_eq!(cap(&learnt, Some(200)), Some((100, Source::Hint)));
        for _ in 0..2 {
            learnt.cap(|cap| cap.closed(50));
        }
        assert_eq!(cap(&learnt, Some(200)), Some((50, Source::Seen)));
        assert_eq!(cap(&learnt, Some(20)), Some((20, Source::Caller)));
    }

    #[test]
    fn each_kind_of_lesson_is_worth_keeping() {
        let now = now();
        let lessons: [fn(&mut Learnt, Instant); 3] = [
            |learnt, _| learnt.idle.open(seconds(3)),
            |learnt, _| learnt.cap.closed(100),
            |learnt, now| {
                learnt.window.began(1, now);
                learnt.lost(1, now);
            },
        ];
        assert!(Learnt::default().is_blank());
        for (at, learn) in lessons.into_iter().enumerate() {
            let mut learnt = Learnt::default();
            learn(&mut learnt, now);
            assert!(!learnt.is_blank(), "{at}");
        }
    }
}
