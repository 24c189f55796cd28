//! After how many requests a server closes a connection, learnt from what it says and from what it does.
//!
//! Many servers end a connection after a number of requests (nginx 1,000, Apache and Tomcat 100). Whoever asks next
//! pays for a new one, unless it was opened before. This rule says when. It never keeps a request off a connection:
//! a server that does not close after all goes on being used. Pure.
//!
//! # The rule
//!
//! * `Connection: close` at the same count [`AGREE`] times in a row is a cap. One at another count begins anew, and a
//!   connection that is kept beyond the count shows that there is none.
//! * An announced cap (`Keep-Alive: max=`) counts at once, and the lower of the two where there are two. See
//!   [`Countdown`] for what the number means.

/// So many closes at the same count are a habit. One may be a server that restarts.
const AGREE: u32 = 2;

/// What is known of one origin.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct CapRule {
    announced: Option<u32>,
    /// At which count the server closed last, and how often in a row.
    closed: Option<(u32, u32)>,
    observations: u64,
}

impl CapRule {
    /// A response announced that its connection may carry so many requests in all.
    pub(crate) fn announce(&mut self, cap: u32) {
        self.observations += 1;
        self.announced = Some(cap);
    }

    /// A response that said close was the `count`th on its connection.
    pub(crate) fn closed(&mut self, count: u32) {
        self.observations += 1;
        self.closed = match self.closed {
            Some((at, times)) if at == count => Some((at, times.saturating_add(1))),
            _ => Some((count, 1)),
        };
    }

    /// A connection that has carried so many requests is kept.
    pub(crate) fn kept(&mut self, count: u32) {
        if self.closed.is_some_and(|(at, _)| count >= at) {
            self.observations += 1;
            self.closed = None;
        }
        if self.announced.is_some_and(|announced| count > announced) {
            self.observations += 1;
            self.announced = None;
        }
    }

    /// How many requests a connection carries.
    pub(crate) fn cap(&self) -> Option<u32> {
        self.announced.into_iter().chain(self.seen()).min()
    }

    /// How many it was seen to carry, each time.
    pub(crate) fn seen(&self) -> Option<u32> {
        let habit = self.closed.filter(|&(_, times)| times >= AGREE);
        habit.map(|(count, _)| count)
    }

    pub(crate) fn announced(&self) -> Option<u32> {
        self.announced
    }

    pub(crate) fn observations(&self) -> u64 {
        self.observations
    }
}

/// Reads the `max=` of one connection's responses.
///
/// Apache counts down what is left, with 100 on the first response of a connection that carries 101. Node.js says the
/// same number each time, and means all. The first response does not tell which; then the lower number counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Countdown {
    last: Option<u32>,
    falls: bool,
}

impl Countdown {
    /// The `count`th response says `max`. Gives how many requests the connection carries in all.
    pub(crate) fn read(&mut self, max: u32, count: u32) -> u32 {
        self.falls |= self.last.is_some_and(|last| max < last);
        self.last = Some(max);
        if self.falls {
            count.saturating_add(max)
        } else {
            max.max(1)
        }
    }
}

/// Whether a connection that now carries its `count`th request is so near its cap that another one should be opened.
///
/// A dial takes two to four round trips and a request at least one, so a few requests ahead are enough at any
/// distance. A fifth of the cap leaves time for the dials of many connections that come near their end together to begin
/// one after the other.
pub(crate) fn is_near(count: u32, cap: u32) -> bool {
    // Half of a small cap: else a connection would be near its end from the beginning.
    let ahead = (cap / 5).clamp(4, 64).min(cap / 2);
    count.saturating_add(ahead) >= cap
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(closes: &[u32]) -> CapRule {
        let mut rule = CapRule::default();
        closes.iter().for_each(|&count| rule.closed(count));
        rule
    }

    #[test]
    fn two_closes_at_the_same_count_are_a_cap_and_one_is_not() {
        assert_eq!(rule(&[100]).cap(), None);
        assert_eq!(rule(&[100, 100]).cap(), Some(100));
        assert_eq!(rule(&[100, 37]).cap(), None);
        assert_eq!(rule(&[37, 100, 100]).cap(), Some(100));
    }

    #[test]
    fn one_close_at_another_count_ends_the_belief() {
        assert_eq!(rule(&[100, 100, 100, 60]).cap(), None);
        assert_eq!(rule(&[100, 100, 60, 60]).cap(), Some(60));
    }

    #[test]
    fn a_connection_that_is_kept_beyond_the_cap_ends_the_belief() {
        let mut rule = rule(&[100, 100]);
        rule.kept(99);
        assert_eq!(rule.cap(), Some(100));
        rule.kept(100);
        assert_eq!(rule.cap(), None);

        rule.announce(50);
        rule.kept(50);
        assert_eq!(rule.cap(), Some(50));
        rule.kept(51);
        assert_eq!(rule.cap(), None);
    }

    #[test]
    fn an_announced_cap_counts_at_once_and_the_lower_of_two() {
        let mut rule = rule(&[100, 100]);
        rule.announce(200);
        assert_eq!((rule.cap(), rule.seen()), (Some(100), Some(100)));
        rule.announce(50);
        assert_eq!((rule.cap(), rule.seen()), (Some(50), Some(100)));
    }

    /// Apache: `max=100` on the first of 101 responses.
    #[test]
    fn a_number_that_falls_is_what_is_left() {
        let mut countdown = Countdown::default();
        assert_eq!(countdown.read(100, 1), 100, "not known yet: the lower one");
        for count in 2..=100 {
            assert_eq!(countdown.read(101 - count, count), 101);
        }
    }

    /// Node.js: the same number each time.
    #[test]
    fn a_number_that_stays_is_what_there_is() {
        let mut countdown = Countdown::default();
        for count in 1..=30 {
            assert_eq!(countdown.read(30, count), 30);
        }
        assert_eq!(
            countdown.read(30, 31),
            30,
            "kept beyond it, which is no news"
        );
    }

    #[test]
    fn a_connection_is_near_its_end_a_fifth_before_it() {
        let first = |cap| (1..=cap).find(|&count| is_near(count, cap));
        assert_eq!(first(100), Some(80));
        assert_eq!(first(1000), Some(936));
        assert_eq!(first(20), Some(16));
        assert_eq!(first(3), Some(2));
        assert_eq!(first(1), Some(1));
    }

    proptest! {
        /// Whatever was seen: a cap that is not announced rests on two closes at that count, with nothing between
        /// that speaks against it.
        #[test]
        fn a_cap_rests_on_two_agreeing_closes(
            events in proptest::collection::vec((any::<bool>(), 1u32..5), 0..40),
        ) {
            let mut rule = CapRule::default();
            let mut agreeing: Vec<u32> = Vec::new();
            for (closes, count) in events {
                if closes {
                    rule.closed(count);
                    if agreeing.first() != Some(&count) {
                        agreeing.clear();
                    }
                    agreeing.push(count);
                } else {
                    rule.kept(count);
                    if agreeing.first().is_some_and(|&at| count >= at) {
                        agreeing.clear();
                    }
                }
                let expected = (agreeing.len() >= 2).then(|| agreeing[0]);
                prop_assert_eq!(rule.cap(), expected);
            }
        }
    }
}
