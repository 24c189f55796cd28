//! How many connections to one origin may be on their way at a time.
//!
//! That `connect` returns says that two kernels shook hands, not that the server has accepted. Where its queue of
//! those who wait to be accepted is full, the kernel drops what comes: a SYN is repeated after a second, and after
//! the loss of the last packet of the handshake the *request* is repeated, for many seconds, on a connection that
//! looks established. A queue can be as short as five. So no more than a few dials are *unproven* at a time. What
//! proves one is the first byte from the server, which over TLS is part of the handshake.
//!
//! A healthy server must not notice. A distant one proves nothing for two round trips, and one that thinks proves
//! nothing until it has thought; so beside the window there is a *pace*, at which further dials begin as long as
//! nothing speaks against it. What does is a handshake that is late, which shows at once, and loss. Pure.
//!
//! # The rule
//!
//! * A dial may begin when fewer than [`size`](DialWindow::size) are unproven.
//! * Beyond that, one may begin whenever none has begun or proved itself for [`PACE`], and more often where the window
//!   is larger, unless a handshake is late or there was [too much loss](DialWindow::is_lossy) lately.
//! * Half as many as were unproven when one was proved without loss may be so at once from then on.
//! * Loss halves the window, though one loss alone not below its [beginning](START). Each dial that proves itself
//!   makes up for a part of it.
//!
//! # Invariants
//!
//! * At least [`LEAST`] dials may be unproven, whatever happens: an origin is never cut off.
//! * Every dial that began ends by one of [`proven`](DialWindow::proven), [`lost`](DialWindow::lost) and
//!   [`ended`](DialWindow::ended); what ends twice or was never begun changes nothing.

use std::time::Duration;

use crate::clock::Instant;

/// Unproven dials at the beginning. Of a queue of five, four at a time lost none, eight lost some.
const START: usize = 4;

/// After loss.
const LEAST: usize = 2;

/// The largest window.
const MOST: usize = 256;

/// Between two dials beyond a window of its first size: 64 of them take less than two round trips over 50 ms.
const PACE: Duration = Duration::from_millis(1);

/// The same where a handshake takes less than [`NEAR`]. Nothing is proven there for no other reason than that the server
/// thinks, or does not accept.
const PACE_NEARBY: Duration = Duration::from_millis(2);
const NEAR: Duration = Duration::from_millis(1);

/// A handshake is the work of two kernels. One that takes longer than four of the shortest and this much was lost, or
/// the server is too busy even for that.
const LATE: Duration = Duration::from_millis(3);

/// How many proven dials make up for a lost one.
const FORGIVING: u32 = 32;

/// So much loss, in lost dials not made up for, ends the pace. One alone may be any packet on any network.
const TOO_MUCH: u32 = 2;

/// After so long without a loss there was none.
const FORGOTTEN: Duration = Duration::from_secs(60);

/// One dial of all in a pool.
pub(crate) type DialId = u64;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Dial {
    id: DialId,
    began: Instant,
    connected: bool,
}

/// When a dial may begin.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Leave {
    Now,
    /// Then, if nothing happens before.
    At(Instant),
    /// Once something has happened to another one.
    Later,
}

/// The dials to one origin that have not proved themselves, and what was learnt from those before.
#[derive(Clone, Debug)]
pub(crate) struct DialWindow {
    /// In the order in which they began.
    unproven: Vec<Dial>,
    size: usize,
    /// The shortest handshake of TCP.
    handshake: Option<Duration>,
    /// When the pace allows the next one.
    paced: Option<Instant>,
    /// Loss that was not made up for, in parts of a lost dial.
    loss: u32,
    last_loss: Option<Instant>,
    losses: u64,
    proofs: u64,
}

impl Default for DialWindow {
    fn default() -> Self {
        DialWindow {
            unproven: Vec::new(),
            size: START,
            handshake: None,
            paced: None,
            loss: 0,
            last_loss: None,
            losses: 0,
            proofs: 0,
        }
    }
}

impl DialWindow {
    /// Whether one more dial may begin.
    pub(crate) fn leave(&self, now: Instant) -> Leave {
        if self.unproven.len() < self.size {
            return Leave::Now;
        }
        if self.is_late(now) {
            return Leave::Later;
        }
        if self.is_lossy(now) {
            let forgotten = self.last_loss.map(|at| at + FORGOTTEN);
            return forgotten.map_or(Leave::Later, Leave::At);
        }
        match self.paced {
            Some(at) if at > now => Leave::At(at),
            _ => Leave::Now,
        }
    }

    /// A dial begins.
    pub(crate) fn began(&mut self, id: DialId, now: Instant) {
        // What was not used in time is lost, but for a timer that was late.
        let due = self.paced.unwrap_or(now).max(now - 2 * PACE);
        let is_within = self.unproven.len() < self.size;
        self.paced = Some(if is_within { now } else { due } + self.gap());
        self.unproven.push(Dial {
            id,
            began: now,
            connected: false,
        });
    }

    /// TCP has shaken hands, which took so long.
    pub(crate) fn connected(&mut self, id: DialId, took: Duration) {
        if let Some(dial) = self.unproven.iter_mut().find(|dial| dial.id == id) {
            dial.connected = true;
            let shortest = self.handshake.map_or(took, |shortest| shortest.min(took));
            self.handshake = Some(shortest);
        }
    }

    /// The server has sent something.
    pub(crate) fn proven(&mut self, id: DialId, now: Instant) {
        let at_once = self.unproven.len();
        if !self.take(id) {
            return;
        }
        self.proofs += 1;
        self.paced = self.paced.max(Some(now + self.gap()));
        self.loss = self.loss.saturating_sub(1);
        if self.loss == 0 || !self.is_recent(now) {
            self.loss = 0;
            let proven = (at_once / 2).min(MOST);
            self.size = self.size.max(START).max(proven);
        }
    }

    /// The dial has lost a packet. `true` if that is news: for each dial it is so once.
    pub(crate) fn lost(&mut self, id: DialId, now: Instant) -> bool {
        if !self.take(id) {
            return false;
        }
        if !self.is_recent(now) {
            self.loss = 0;
        }
        self.losses += 1;
        self.last_loss = Some(now);
        self.loss = self.loss.saturating_add(FORGIVING);
        let floor = if self.is_lossy(now) { LEAST } else { START };
        self.size = (self.size / 2).max(floor).min(self.size);
        true
    }

    /// The dial is over, or has taken so long that it says nothing any more.
    pub(crate) fn ended(&mut self, id: DialId) {
        self.take(id);
    }

    fn gap(&self) -> Duration {
        let start = u32::try_from(START).unwrap_or(1);
        let size = u32::try_from(self.size).unwrap_or(start).max(start);
        let is_near = self.handshake.is_some_and(|shortest| shortest < NEAR);
        let pace = if is_near { PACE_NEARBY } else { PACE };
        pace * start / size
    }

    fn take(&mut self, id: DialId) -> bool {
        let at = self.unproven.iter().position(|dial| dial.id == id);
        at.map(|at| self.unproven.remove(at)).is_some()
    }

    /// A handshake takes too long.
    fn is_late(&self, now: Instant) -> bool {
        let Some(shortest) = self.handshake else {
            // How long one takes there is not known yet.
            return false;
        };
        let pending = self.unproven.iter().find(|dial| !dial.connected);
        pending.is_some_and(|dial| now > dial.began + 4 * shortest + LATE)
    }

    /// Whether so much was lost lately that it is no accident.
    pub(crate) fn is_lossy(&self, now: Instant) -> bool {
        // A little less, for what a proof in between has made up for.
        self.is_recent(now) && self.loss > (TOO_MUCH - 1) * FORGIVING
    }

    fn is_recent(&self, now: Instant) -> bool {
        self.last_loss.is_some_and(|at| now < at + FORGOTTEN)
    }

    /// How many may be unproven at a time, before the pace.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// How many may begin at once, where one may.
    pub(crate) fn room(&self) -> usize {
        self.size.saturating_sub(self.unproven.len()).max(1)
    }

    pub(crate) fn observations(&self) -> u64 {
        self.proofs + self.losses
    }

    /// Whether it is as in the beginning, but for what any dial leaves behind.
    pub(crate) fn is_blank(&self) -> bool {
        self.size == START && self.losses == 0
    }

    /// Nothing is open to the origin any more: what remains is what was learnt.
    pub(crate) fn clear(&mut self) {
        self.unproven.clear();
        self.paced = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::now;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Dials as fast as it may until so many are unproven or time is up. Gives how many there are then.
    fn dial(window: &mut DialWindow, from: DialId, start: Instant, time: Duration) -> u64 {
        let (mut id, mut now) = (from, start);
        loop {
            match window.leave(now) {
                Leave::Now => {
                    window.began(id, now);
                    id += 1;
                }
                Leave::At(at) if at <= start + time => now = at,
                _ => return id - from,
            }
        }
    }

    fn proven(window: &mut DialWindow, ids: impl Iterator<Item = DialId>, now: Instant) {
        for id in ids {
            window.connected(id, ms(50));
            window.proven(id, now);
        }
    }

    #[test]
    fn four_begin_at_once_and_the_next_a_millisecond_apart() {
        let (mut window, now) = (DialWindow::default(), now());
        assert_eq!(dial(&mut window, 0, now, ms(0)), 4);
        assert_eq!(window.leave(now), Leave::At(now + PACE));
        assert_eq!(dial(&mut window, 4, now, ms(10)), 10);
    }

    #[test]
    fn a_dial_that_has_proved_itself_makes_place_for_the_next() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(0));
        proven(&mut window, 0..2, now);
        assert_eq!(dial(&mut window, 4, now, ms(0)), 2);
    }

    /// Over 50 ms nothing is proven for 100 ms: by then all of 64 have begun.
    #[test]
    fn a_burst_of_64_to_a_distant_server_begins_within_two_round_trips() {
        let (mut window, now) = (DialWindow::default(), now());
        assert_eq!(dial(&mut window, 0, now, ms(60)), 64);
    }

    #[test]
    fn a_handshake_that_is_late_stops_the_pace_until_it_is_over() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(0));
        for id in 0..3 {
            window.connected(id, ms(1));
        }
        // The fourth has four of the shortest, and 3 ms.
        assert_eq!(window.leave(now + ms(7)), Leave::Now);
        assert_eq!(window.leave(now + ms(8)), Leave::Later);
        window.connected(3, ms(9));
        assert_eq!(window.leave(now + ms(9)), Leave::Now);
    }

    #[test]
    fn what_was_proven_at_once_may_be_half_as_many_at_once_from_then_on() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(36));
        proven(&mut window, 0..40, now + ms(100));
        assert_eq!(window.size(), 20);
        assert_eq!(dial(&mut window, 40, now + ms(100), ms(0)), 20);
        // And the pace is as much faster: five in a millisecond.
        assert_eq!(dial(&mut window, 60, now + ms(100), ms(10)), 50);
    }

    #[test]
    fn nearby_the_pace_is_half_as_fast() {
        let (mut window, now) = (DialWindow::default(), now());
        window.began(100, now);
        window.connected(100, Duration::from_micros(50));
        window.ended(100);
        dial(&mut window, 0, now, ms(0));
        for id in 0..4 {
            window.connected(id, ms(1));
        }
        assert_eq!(window.leave(now), Leave::At(now + ms(2)));
    }

    #[test]
    fn each_proof_puts_the_pace_off() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(1));
        assert_eq!(window.unproven.len(), 5);
        let later = now + Duration::from_micros(1_500);
        proven(&mut window, 0..1, later);
        assert_eq!(window.leave(later), Leave::At(later + PACE));
    }

    #[test]
    fn one_loss_halves_the_window_but_not_below_its_beginning() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(36));
        proven(&mut window, 0..40, now);
        window.began(40, now);
        assert!(window.lost(40, now));
        assert_eq!(window.size(), 10);
        let mut window = DialWindow::default();
        window.began(0, now);
        window.lost(0, now);
        assert_eq!(window.size(), START);
        assert!(!window.is_lossy(now), "any packet on any network");
        assert!(!window.lost(0, now), "each dial once");
    }

    #[test]
    fn two_losses_end_the_pace_and_halve_the_window_to_two() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(0));
        window.lost(0, now);
        window.lost(1, now);
        assert_eq!(window.size(), 2);
        assert!(window.is_lossy(now));
        assert_eq!(window.leave(now), Leave::At(now + FORGOTTEN));
        proven(&mut window, 2..3, now);
        assert_eq!(window.leave(now), Leave::Now, "one of two is unproven");
    }

    #[test]
    fn what_proves_itself_makes_up_for_a_loss_and_so_does_time() {
        let (mut window, start) = (DialWindow::default(), now());
        for id in 0..2 {
            window.began(id, start);
            window.lost(id, start);
        }
        let mut later = window.clone();
        for id in 2..66 {
            assert_eq!(window.size(), 2, "{id}");
            window.began(id, start);
            proven(&mut window, id..=id, start);
        }
        assert_eq!((window.size(), window.is_lossy(start)), (START, false));

        later.began(2, start + FORGOTTEN);
        proven(&mut later, 2..3, start + FORGOTTEN);
        assert_eq!(later.size(), START);
    }

    proptest! {
        /// Whatever happens: an origin is never cut off, the window stays within its bounds, and where nobody is on
        /// the way one may begin.
        #[test]
        fn an_origin_is_never_cut_off(
            events in proptest::collection::vec((0u8..6, 0u64..40, 0u64..5_000), 0..200),
        ) {
            let (mut window, mut now) = (DialWindow::default(), now());
            let mut next = 0;
            for (kind, id, time) in events {
                match kind {
                    0 => now += ms(time),
                    1 => window.connected(id, ms(time)),
                    2 => window.proven(id, now),
                    3 => { window.lost(id, now); }
                    4 => window.ended(id),
                    _ => if window.leave(now) == Leave::Now {
                        window.began(next, now);
                        next += 1;
                    }
                }
                prop_assert!((LEAST..=MOST).contains(&window.size()));
                prop_assert!(window.unproven.len() >= LEAST || window.leave(now) == Leave::Now);
                if let Leave::At(at) = window.leave(now) {
                    prop_assert!(at > now);
                }
            }
        }
    }
}
