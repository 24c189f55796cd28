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
//! * Beyond that, one may begin whenever none has begun or proved itself for [`PACE`], unless a handshake is late; more
//!   seldom where there was [too much loss](DialWindow::is_lossy) lately.
//! * The window grows by each dial that is proved as soon as the distance allows, up to [`PROMPT_MOST`]: nobody stood in
//!   a queue there. And half as many as were unproven when one was proved without loss may be so at once from then on.
//! * Loss halves the window, though not below its [beginning](START). Each dial that proves itself makes up for a part of
//!   it.
//!
//! # Invariants
//!
//! * At least [`START`] dials may be unproven, whatever happens: an origin is never cut off.
//! * Every dial that began ends by one of [`proven`](DialWindow::proven), [`lost`](DialWindow::lost) and
//!   [`ended`](DialWindow::ended); what ends twice or was never begun changes nothing.

use std::time::Duration;

use crate::clock::Instant;

/// Unproven dials at the beginning. Of a queue of five, four at a time lost none, eight lost some.
const START: usize = 4;

/// A proof takes two round trips. One that takes no longer than three handshakes and this much has not waited.
const PROMPT: Duration = Duration::from_micros(250);

/// What prompt proofs alone make of the window.
const PROMPT_MOST: usize = 8;

/// The largest window.
const MOST: usize = 256;

/// Between two dials beyond the window: 64 of them take less than two round trips over 50 ms.
const PACE: Duration = Duration::from_millis(1);

/// The same where a handshake takes less than [`NEAR`]. Nothing is proven there for no other reason than that the server
/// thinks, or does not accept.
const PACE_NEARBY: Duration = Duration::from_millis(2);

/// The same where there is [too much loss](DialWindow::is_lossy). Not never: a server that thinks proves nothing for
/// long.
const PACE_AT_LOSS: Duration = Duration::from_millis(50);

/// What is near.
const NEAR: Duration = Duration::from_millis(1);

/// A handshake is the work of two kernels. One that takes longer than four of the shortest and this much was lost, or
/// the server is too busy even for that.
const LATE: Duration = Duration::from_millis(3);

/// Each longer handshake makes the shortest longer by this part of the difference.
const AGEING: u32 = 16;

/// For so long it stops the pace. The kernel repeats a SYN after a second, and one may be any packet on any network.
const LATE_COUNTS: Duration = Duration::from_millis(100);

/// How many proven dials make up for a lost one.
const FORGIVING: u32 = 8;

/// So much loss, in lost dials not made up for, slows the pace. Less may be any packets on any network.
const TOO_MUCH: u32 = 4;

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
        let allowed = [self.paced, self.late_until(now)];
        match allowed.into_iter().flatten().max() {
            Some(at) if at > now => Leave::At(at),
            _ => Leave::Now,
        }
    }

    /// A dial begins.
    pub(crate) fn began(&mut self, id: DialId, now: Instant) {
        // What was not used in time is lost, but for a timer that was late.
        let due = self.paced.unwrap_or(now).max(now - 2 * PACE);
        let is_within = self.unproven.len() < self.size;
        self.paced = Some(if is_within { now } else { due } + self.gap(now));
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
            self.handshake = Some(match self.handshake {
                // The origin may be further away from now on.
                Some(shortest) if took > shortest => shortest + (took - shortest) / AGEING,
                _ => took,
            });
        }
    }

    /// The server has sent something.
    pub(crate) fn proven(&mut self, id: DialId, now: Instant) {
        let at_once = self.unproven.len();
        let Some(dial) = self.take(id) else {
            return;
        };
        self.proofs += 1;
        self.paced = self.paced.max(Some(now + self.gap(now)));
        self.loss = self.loss.saturating_sub(1);
        if self.loss == 0 || !self.is_recent(now) {
            self.loss = 0;
            let took = now.saturating_duration_since(dial.began);
            let is_prompt = self
                .handshake
                .is_some_and(|shortest| took <= 3 * shortest + PROMPT);
            if is_prompt && self.size < PROMPT_MOST {
                self.size += 1;
            }
            let proven = (at_once / 2).min(MOST);
            self.size = self.size.max(proven);
        }
    }

    /// The dial has lost a packet. `true` if that is news: for each dial it is so once.
    pub(crate) fn lost(&mut self, id: DialId, now: Instant) -> bool {
        if self.take(id).is_none() {
            return false;
        }
        if !self.is_recent(now) {
            self.loss = 0;
        }
        self.losses += 1;
        self.last_loss = Some(now);
        self.loss = self.loss.saturating_add(FORGIVING);
        self.size = (self.size / 2).max(START);
        true
    }

    /// The dial is over, or has taken so long that it says nothing any more.
    pub(crate) fn ended(&mut self, id: DialId) {
        self.take(id);
    }

    fn gap(&self, now: Instant) -> Duration {
        match self.handshake {
            _ if self.is_lossy(now) => PACE_AT_LOSS,
            Some(shortest) if shortest < NEAR => PACE_NEARBY,
            _ => PACE,
        }
    }

    fn take(&mut self, id: DialId) -> Option<Dial> {
        let at = self.unproven.iter().position(|dial| dial.id == id)?;
        Some(self.unproven.remove(at))
    }

    /// Until when a handshake that takes too long stops the pace, if one does.
    fn late_until(&self, now: Instant) -> Option<Instant> {
        // Without that it is not known yet how long one takes there.
        let patience = 4 * self.handshake? + LATE;
        let old = self.unproven.iter();
        let old = old.take_while(|dial| now > dial.began + patience);
        let late = old.filter(|dial| !dial.connected);
        let until = late.map(|dial| dial.began + patience + LATE_COUNTS);
        until.last().filter(|&until| until > now)
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

    pub(crate) fn observations(&self) -> u64 {
        self.proofs + self.losses
    }

    /// Whether it is as in the beginning, but for what any dial leaves behind.
    pub(crate) fn is_blank(&self) -> bool {
        self.size == START && self.losses == 0
    }

    /// Whether it is hardly worth to be remembered without a connection: a few dials would show the same.
    pub(crate) fn is_ordinary(&self) -> bool {
        self.size <= PROMPT_MOST && self.losses == 0
    }

    /// Nothing is open to the origin any more: what remains is what was learnt.
    pub(crate) fn clear(&mut self) {
        self.unproven = Vec::new();
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

    /// Dials as fast as it may until time is up. Gives how many have begun.
    fn dial(window: &mut DialWindow, from: DialId, start: Instant, time: Duration) -> u64 {
        let (mut id, mut now) = (from, start);
        loop {
            match window.leave(now) {
                Leave::Now => {
                    window.began(id, now);
                    id += 1;
                }
                Leave::At(at) if at <= start + time => now = at,
                Leave::At(_) => return id - from,
            }
        }
    }

    /// These have shaken hands in so long.
    fn connected(window: &mut DialWindow, ids: std::ops::Range<DialId>, took: Duration) {
        ids.for_each(|id| window.connected(id, took));
    }

    fn proven(window: &mut DialWindow, ids: std::ops::Range<DialId>, now: Instant) {
        ids.for_each(|id| window.proven(id, now));
    }

    fn lost(window: &mut DialWindow, ids: std::ops::Range<DialId>, now: Instant) {
        for id in ids {
            window.began(id, now);
            assert!(window.lost(id, now));
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
    fn nearby_the_pace_is_half_as_fast() {
        let (mut window, now) = (DialWindow::default(), now());
        window.began(100, now);
        window.connected(100, Duration::from_micros(50));
        window.ended(100);
        dial(&mut window, 0, now, ms(0));
        connected(&mut window, 0..4, ms(0));
        assert_eq!(window.leave(now), Leave::At(now + ms(2)));
    }

    #[test]
    fn a_dial_that_has_proved_itself_makes_place_for_the_next() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(0));
        proven(&mut window, 0..2, now + ms(90));
        assert_eq!(dial(&mut window, 4, now + ms(90), ms(0)), 2);
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

    /// Over 50 ms nothing is proven for 100 ms: by then all of 64 have begun.
    #[test]
    fn a_burst_of_64_to_a_distant_server_begins_within_two_round_trips() {
        let (mut window, now) = (DialWindow::default(), now());
        assert_eq!(dial(&mut window, 0, now, ms(60)), 64);
    }

    #[test]
    fn a_handshake_that_is_late_stops_the_pace_for_a_while_or_until_it_is_over() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(0));
        connected(&mut window, 0..3, ms(1));
        // The fourth has four of the shortest, and 3 ms.
        assert_eq!(window.leave(now + ms(7)), Leave::Now);
        let until = Leave::At(now + ms(7) + LATE_COUNTS);
        assert_eq!(window.leave(now + ms(8)), until);
        let mut over = window.clone();
        over.connected(3, ms(9));
        assert_eq!(over.leave(now + ms(9)), Leave::Now);
        assert_eq!(window.leave(now + ms(7) + LATE_COUNTS), Leave::Now);
    }

    /// A name that leads further away from now on.
    #[test]
    fn a_longer_handshake_is_believed_in_time() {
        let (mut window, now) = (DialWindow::default(), now());
        for id in 0..100 {
            let took = if id == 0 { ms(1) } else { ms(80) };
            window.began(id, now);
            window.connected(id, took);
            window.ended(id);
        }
        window.began(100, now);
        assert_eq!(window.late_until(now + ms(300)), None);
    }

    #[test]
    fn what_was_proven_at_once_may_be_half_as_many_at_once_from_then_on() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(36));
        connected(&mut window, 0..40, ms(1));
        proven(&mut window, 0..40, now + ms(90));
        assert_eq!(window.size(), 20);
        assert_eq!(dial(&mut window, 40, now + ms(100), ms(0)), 20);
    }

    /// Two round trips: nobody stood in a queue.
    #[test]
    fn prompt_proofs_make_the_window_larger_up_to_a_bound() {
        let (mut window, now) = (DialWindow::default(), now());
        for id in 0..20 {
            window.began(id, now);
            window.connected(id, ms(10));
            window.proven(id, now + ms(20));
        }
        assert_eq!(window.size(), PROMPT_MOST);

        let mut slow = DialWindow::default();
        for id in 0..20 {
            slow.began(id, now);
            slow.connected(id, ms(10));
            slow.proven(id, now + ms(31));
        }
        assert_eq!(slow.size(), START);
    }

    #[test]
    fn loss_halves_the_window_but_not_below_its_beginning() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(36));
        proven(&mut window, 0..40, now + ms(90));
        for (id, size) in [(40, 10), (41, 5), (42, 4), (43, 4)] {
            lost(&mut window, id..id + 1, now);
            assert_eq!(window.size(), size);
        }
        assert!(!window.lost(43, now), "each dial once");
    }

    #[test]
    fn four_losses_slow_the_pace_and_three_may_be_any_packets() {
        let (mut window, now) = (DialWindow::default(), now());
        lost(&mut window, 0..3, now);
        assert!(!window.is_lossy(now));
        lost(&mut window, 3..4, now);
        assert!(window.is_lossy(now));
        dial(&mut window, 4, now, ms(0));
        assert_eq!(window.unproven.len(), 4);
        assert_eq!(dial(&mut window, 8, now, ms(500)), 10);
    }

    #[test]
    fn what_proves_itself_makes_up_for_loss_and_so_does_time() {
        let (mut window, start) = (DialWindow::default(), now());
        lost(&mut window, 0..4, start);
        for id in 4..12 {
            assert!(window.is_lossy(start), "{id}");
            window.began(id, start);
            window.proven(id, start);
        }
        assert!(!window.is_lossy(start));

        let (mut window, start) = (DialWindow::default(), now());
        lost(&mut window, 0..4, start);
        assert!(!window.is_lossy(start + FORGOTTEN));
    }

    #[test]
    fn what_the_pace_allows_and_nobody_uses_is_lost() {
        let (mut window, now) = (DialWindow::default(), now());
        dial(&mut window, 0, now, ms(0));
        // But for a timer that was late.
        assert_eq!(dial(&mut window, 4, now + ms(500), ms(0)), 3);
    }

    #[test]
    fn two_losses_far_apart_are_two_accidents() {
        let (mut window, start) = (DialWindow::default(), now());
        for (id, now) in [(0, start), (1, start + FORGOTTEN)] {
            window.began(id, now);
            assert!(window.lost(id, now));
            assert_eq!((window.size(), window.is_lossy(now)), (START, false));
        }
    }

    proptest! {
        /// Whatever happens: an origin is never cut off, the window stays within its bounds, and where few are on
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
                prop_assert!((START..=MOST).contains(&window.size()));
                prop_assert!(window.unproven.len() >= START || window.leave(now) == Leave::Now);
                if let Leave::At(at) = window.leave(now) {
                    prop_assert!(at > now);
                }
            }
        }
    }
}
