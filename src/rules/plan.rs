//! Who gets which connection: limits, the line of those who wait, and what comes next after each event.
//!
//! One value for a whole pool, driven by events and told the time; what is to be done is returned as
//! [`Effects`] and done by the caller once the lock is released. Pure and generic over origins, connections
//! and those who wait, so that a model test drives it with numbers.
//!
//! # Words
//!
//! A *seat* is the right to have one connection open. It is taken when a dial is allowed and given back when the
//! connection is closed on both sides, so a connection in the course of closing still has one. A *ticket* is a
//! place in line; a lower one is served first. A dial has a seat from the beginning; when it knows where to connect to it
//! *knocks* at its origin's gate, and connects when it is let through.
//!
//! # Invariants
//!
//! * Never more seats than [`Limits::connections`] in all and [`Limits::connections_per_origin`] for an origin,
//!   nor more dials than [`Limits::dials_per_origin`].
//! * `seats = idle + busy + dialing + closing`, for each origin and in all.
//! * Nobody waits for a connection while one that they could use is idle, and nobody without a dial of their
//!   own waits while both a seat and a dial are free, but for as many as dials are under way that were begun ahead of
//!   time.
//! * A dial that has knocked at the gate of its origin begins as soon as the [dial window](crate::rules::dial_window)
//!   is open, in the order of the dials. Where only time opens it, the first of them has been told when to call.
//! * First come, first served: a connection that comes back goes to the first in line who can use it, a free seat
//!   to the first in line whose origin may have one more. A dial belongs to one ticket; its failure concerns
//!   that one only, and what it brings goes to the first in line if its owner has been served otherwise.
//! * A connection that is opened ahead of time, because another one is near its end, takes no seat and no dial from
//!   anybody in line, and closes nothing.
//! * With all seats taken, an origin whose first in line came earlier, and which has no connection at all or has
//!   waited for [`PATIENCE`], gets the next seat that another origin's connection leaves.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Duration;

use crate::clock::{Instant, Stamp};
use crate::error::DialFailure;
use crate::rules::cap::is_near;
use crate::rules::demand::Demand;
use crate::rules::dial_window::{DialId, DialWindow, Leave};
use crate::rules::idle::IdleRule;
use crate::rules::learnt::{Learnt, Lesson};
use crate::rules::shelf::{Expiry, Item, Shelf};
use crate::stats::CloseReason;

/// How much of everything there may be at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections in all, those being opened and closed included.
    pub(crate) connections: usize,
    /// The same, for one origin.
    pub(crate) connections_per_origin: usize,
    pub(crate) idle: usize,
    pub(crate) idle_per_origin: usize,
    /// Dials in progress to one origin.
    pub(crate) dials_per_origin: usize,
    /// Requests that wait for a connection to one origin without a dial of their own.
    pub(crate) waiters_per_origin: usize,
    /// Whether the dials of an origin that have not proved themselves are limited by what was learnt of it.
    pub(crate) dial_window: bool,
}

impl Limits {
    /// Whether a connection may carry a second request at all.
    fn allow_reuse(&self) -> bool {
        self.idle > 0 && self.idle_per_origin > 0
    }
}

/// How long an origin that has connections of its own waits for one of them to come back before another
/// origin's is closed for it. Short waits are the normal state at the limit, and to close a connection for each
/// would cost a dial each time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// Of how many origins without a connection what was learnt is kept.
const REMEMBERED: usize = 1024;

/// How long a connection that has carried nothing is trusted with a request that must not be sent twice. Servers close
/// those by other clocks than idle ones, some after 5 s.
const UNUSED_TRUSTED: Duration = Duration::from_secs(1);

/// How long a connection may have been idle to be used before a newer one because it has carried more: they come to their
/// end together where many are at work all the time. Where there are pauses, a worn one that is used first would only
/// come to its end before the next peak.
const USED_UP_WITHIN: Duration = Duration::from_millis(10);

/// Between two dials that are begun because connections are near their end.
const SPARE_GAP: Duration = Duration::from_millis(1);

/// A place in line. Lower ones came earlier.
pub(crate) type Ticket = u64;

/// Where an origin's state is kept. Valid as long as the origin has a seat or somebody in line.
pub(crate) type Place = usize;

/// What those who wait are told.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Word<T> {
    /// Here is a connection; where it was idle, since when. They are in line no more.
    Connection(T, Option<Stamp>),
    /// They may dial, and stay in line. They have a seat, and count as dialling until the dial's end is
    /// reported.
    Dial(DialId),
    /// To a dial that has knocked: it may connect.
    Begin,
    /// To a dial that has knocked: it is to [call](Plan::call) then. Perhaps somebody may connect.
    Call(Instant),
    /// The pool was closed. They are in line no more.
    Closed,
}

/// What is to be done once the lock is released.
#[derive(Debug)]
#[must_use]
pub(crate) struct Effects<K, T, W> {
    pub(crate) told: Vec<Told<T, W>>,
    pub(crate) closed: Vec<(T, CloseReason)>,
    /// Those who have left the line and are told nothing.
    pub(crate) gone: Vec<W>,
    /// The idle connections were too old for who asked.
    pub(crate) too_old: bool,
    /// A dial that nobody in line asked for, because a connection is near its end.
    pub(crate) spare: Option<(Place, DialId)>,
    /// What was learnt by it that is worth telling.
    pub(crate) lesson: Option<(K, Lesson)>,
}

/// Which connection will do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Need {
    Any,
    /// One that has been idle for less than the origin's [trusted age](IdleRule::trusted).
    Young,
    /// One that has carried nothing yet.
    Fresh,
}

impl Need {
    /// Whether this connection, idle since then, will do.
    fn is_met(self, item: &impl Item, since: Stamp, now: Stamp, rule: &IdleRule) -> bool {
        match self {
            Need::Any => true,
            Need::Young if item.is_unused() => since.until(now) < UNUSED_TRUSTED,
            Need::Young => since.until(now) < rule.trusted(),
            Need::Fresh => item.is_unused(),
        }
    }
}

/// Somebody in line, and what they are told.
#[derive(Debug)]
pub(crate) struct Told<T, W> {
    pub(crate) who: W,
    pub(crate) place: Place,
    pub(crate) ticket: Ticket,
    pub(crate) word: Word<T>,
}

impl<K, T, W> Effects<K, T, W> {
    pub(crate) fn none() -> Self {
        Effects {
            told: Vec::new(),
            closed: Vec::new(),
            gone: Vec::new(),
            too_old: false,
            spare: None,
            lesson: None,
        }
    }

    fn close(&mut self, item: T, reason: CloseReason) {
        self.closed.push((item, reason));
    }
}

/// A request that asks to be put in line.
#[derive(Debug)]
pub(crate) struct Asks<W> {
    pub(crate) who: W,
    pub(crate) ticket: Ticket,
    pub(crate) need: Need,
    /// It had been in line before, and what it got was no good: it is not turned away.
    pub(crate) again: bool,
}

/// A dial, and whose it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Dialer {
    pub(crate) place: Place,
    /// Its owner's, or [`NOBODY`].
    pub(crate) ticket: Ticket,
    pub(crate) dial: DialId,
}

/// The ticket of a dial that nobody in line asked for.
pub(crate) const NOBODY: Ticket = 0;

/// What asking for a connection leads to.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Answer<T> {
    /// An idle connection, which counts as busy from now on, and since when it was idle.
    Reuse(Place, T, Stamp),
    InLine(Place),
    /// Too many wait already.
    Overloaded,
    Closed,
}

/// How many connections are in which state.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Gauges {
    pub(crate) idle: usize,
    pub(crate) busy: usize,
    pub(crate) dialing: usize,
    pub(crate) closing: usize,
    /// Requests that wait for a connection, those with a dial of their own included.
    pub(crate) waiting: usize,
}

/// One origin as it is now.
#[derive(Clone, Debug)]
pub(crate) struct Survey<K> {
    pub(crate) key: K,
    pub(crate) gauges: Gauges,
    /// When the oldest connection was established.
    pub(crate) oldest: Option<Instant>,
    /// Since when the longest idle one has been idle.
    pub(crate) longest_idle: Option<Instant>,
    /// Since when the first in line has waited.
    pub(crate) longest_wait: Option<Instant>,
}

#[derive(Debug)]
struct Waiter<W> {
    who: W,
    need: Need,
    since: Instant,
    /// The dial of its own, if it has one. Its ticket may have had others before.
    dial: Option<DialId>,
}

#[derive(Debug)]
struct Origin<K, T, W> {
    key: K,
    shelf: Shelf<T>,
    busy: usize,
    dialing: usize,
    seats: usize,
    line: BTreeMap<Ticket, Waiter<W>>,
    /// Those in line who have no dial of their own.
    undialed: BTreeSet<Ticket>,
    /// The ticket under which the origin is in [`Plan::starved`].
    starved_as: Option<Ticket>,
    /// When each open connection was established.
    born: Vec<(u64, Instant)>,
    last_failure: Option<(Instant, DialFailure)>,
    learnt: Learnt,
    demand: Demand,
    /// Open connections that are near their end.
    ending: Vec<u64>,
    /// Dials that nobody in line asked for.
    spares: usize,
    /// When the last of them began.
    last_spare: Option<Instant>,
    /// Dials that may not connect yet.
    gate: BTreeMap<DialId, W>,
    /// Which of them calls when the pace of the dial window allows one more, and when that is.
    caller: Option<(DialId, Instant)>,
}

impl<K: Clone, T: Item, W: Clone> Origin<K, T, W> {
    fn gauges(&self) -> Gauges {
        let idle = self.shelf.len();
        Gauges {
            idle,
            busy: self.busy,
            dialing: self.dialing,
            closing: self.seats - idle - self.busy - self.dialing,
            waiting: self.line.len(),
        }
    }

    /// How many more dials the origin's own limits allow.
    fn room(&self, limits: &Limits) -> usize {
        let seats = limits.connections_per_origin - self.seats;
        seats.min(limits.dials_per_origin - self.dialing)
    }

    /// Lets through who may connect now, and tells the first of the others when to call.
    fn attend(&mut self, place: Place, now: Instant, fx: &mut Effects<K, T, W>) {
        let window = &mut self.learnt.window;
        let mut tell = |who, word| {
            fx.told.push(Told {
                who,
                place,
                ticket: NOBODY,
                word,
            });
        };
        while let Some(first) = self.gate.first_entry() {
            let dial = *first.key();
            match window.leave(now) {
                Leave::Now => {
                    window.began(dial, now);
                    tell(first.remove(), Word::Begin);
                }
                Leave::At(at) => {
                    let is_told = |(caller, then)| caller == dial && then <= at;
                    if !self.caller.is_some_and(is_told) {
                        self.caller = Some((dial, at));
                        tell(first.get().clone(), Word::Call(at));
                    }
                    return;
                }
            }
        }
    }

    /// Something was learnt by this event, if it was.
    fn note(&self, lesson: Option<Lesson>, fx: &mut Effects<K, T, W>) {
        fx.lesson = lesson.map(|lesson| (self.key.clone(), lesson));
    }

    /// Who in line is the first without a dial, if more are than dials are under way that nobody asked for. Those end
    /// before one would that begins now.
    fn first_undialed(&self) -> Option<Ticket> {
        let first = self.undialed.first().copied();
        first.filter(|_| self.undialed.len() > self.spares)
    }

    fn dial_over(&mut self, ticket: Ticket) {
        self.dialing -= 1;
        if ticket == NOBODY {
            self.spares -= 1;
        }
    }

    /// An open connection that is nobody's any more is closed.
    fn discard(&mut self, item: T, reason: CloseReason, fx: &mut Effects<K, T, W>) {
        self.forget_end(item.id());
        fx.close(item, reason);
    }

    fn forget_end(&mut self, id: u64) {
        self.ending.retain(|&ending| ending != id);
    }

    /// One more connection is in use, or somebody waits for one.
    fn note_demand(&mut self, now: Instant) {
        self.demand.note(self.busy + self.line.len(), now);
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    Open,
    /// All handles are gone: what is under way finishes, nothing is kept.
    Retired,
    /// Nothing new begins.
    Closed,
}

/// The whole pool as a value.
#[derive(Debug)]
pub(crate) struct Plan<K, T, W> {
    limits: Limits,
    idle_timeout: Option<Duration>,
    places: HashMap<K, Place>,
    /// What was learnt of origins that have no connection now, and in which order they were left.
    remembered: HashMap<K, (u64, Learnt)>,
    left: BTreeMap<u64, K>,
    /// The next in that order, and the next dial.
    next: u64,
    origins: Vec<Option<Origin<K, T, W>>>,
    vacant: Vec<Place>,
    /// Origins with somebody in line who has no dial although the origin's own limits would allow one, by
    /// the first such ticket.
    starved: BTreeSet<(Ticket, Place)>,
    /// Sums over all origins.
    seats: usize,
    idle: usize,
    busy: usize,
    dialing: usize,
    mode: Mode,
}

impl<K: Clone + Eq + Hash, T: Item, W: Clone> Plan<K, T, W> {
    pub(crate) fn new(limits: Limits, idle_timeout: Option<Duration>) -> Self {
        Plan {
            limits,
            idle_timeout,
            places: HashMap::new(),
            remembered: HashMap::new(),
            left: BTreeMap::new(),
            next: 0,
            origins: Vec::new(),
            vacant: Vec::new(),
            starved: BTreeSet::new(),
            seats: 0,
            idle: 0,
            busy: 0,
            dialing: 0,
            mode: Mode::Open,
        }
    }

    /// Takes an idle connection, which counts as busy from now on; `None` if there is none to be had.
    pub(crate) fn reuse(
        &mut self,
        key: &K,
        need: Need,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) -> Option<(Place, T, Stamp)> {
        let place = *self.places.get(key)?;
        let (item, since) = self.take(place, need, now, fx)?;
        Some((place, item, since))
    }

    /// Asks for a connection: an idle one at once, else a place in line. What the asker may do then (to dial,
    /// most of the time) it is told like everybody in line.
    pub(crate) fn ask(
        &mut self,
        key: &K,
        asks: Asks<W>,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) -> Answer<T> {
        if self.mode == Mode::Closed {
            return Answer::Closed;
        }
        let place = self.place_of(key);
        if let Some((item, since)) = self.take(place, asks.need, now, fx) {
            return Answer::Reuse(place, item, since);
        }
        if asks.need == Need::Young
            && let Some(origin) = self.origin(place)
            && let Some(oldest) = origin.shelf.oldest_used()
        {
            // Too old for this one. That they are open still is worth knowing for the next.
            let lesson = origin.learnt.open(oldest.until(now));
            origin.note(lesson, fx);
            fx.too_old = true;
        }
        let limit = self.limits.waiters_per_origin;
        let Some(origin) = self.origin(place) else {
            return Answer::Closed;
        };
        let waiter = Waiter {
            who: asks.who,
            need: asks.need,
            since: now.at,
            dial: None,
        };
        origin.line.insert(asks.ticket, waiter);
        origin.undialed.insert(asks.ticket);
        origin.note_demand(now.at);
        self.settle(place, fx);
        let Some(origin) = self.origin(place) else {
            return Answer::Closed;
        };
        let is_surplus =
            origin.undialed.contains(&asks.ticket) && origin.undialed.len() > limit && !asks.again;
        if is_surplus {
            self.cancel(place, asks.ticket, fx);
            return Answer::Overloaded;
        }
        Answer::InLine(place)
    }

    /// Somebody in line does not want to wait any longer. Gives the last dial to the origin that failed while
    /// they did.
    pub(crate) fn cancel(
        &mut self,
        place: Place,
        ticket: Ticket,
        fx: &mut Effects<K, T, W>,
    ) -> Option<DialFailure> {
        let origin = self.origin(place)?;
        // They may have been served already, and the place may be another origin's by now.
        let waiter = origin.line.remove(&ticket)?;
        origin.undialed.remove(&ticket);
        let failure = origin.last_failure.as_ref();
        let failure = failure.filter(|(at, _)| *at >= waiter.since);
        let failure = failure.map(|(_, failure)| failure.clone());
        fx.gone.push(waiter.who);
        self.settle(place, fx);
        self.forget_if_unused(place);
        failure
    }

    /// A dial knows where to connect to. `true` if it may at once: else it is to [knock](Plan::knock).
    pub(crate) fn enter(&mut self, by: Dialer, now: Stamp) -> bool {
        let has_window = self.limits.dial_window;
        let Some(origin) = self.origin(by.place) else {
            return true;
        };
        if !has_window {
            return true;
        }
        let is_open = origin.gate.is_empty() && origin.learnt.window.leave(now.at) == Leave::Now;
        if is_open {
            origin.learnt.window.began(by.dial, now.at);
        }
        is_open
    }

    /// A dial asks to be told when it may connect.
    pub(crate) fn knock(&mut self, by: Dialer, who: W, now: Stamp, fx: &mut Effects<K, T, W>) {
        if let Some(origin) = self.origin(by.place) {
            origin.gate.insert(by.dial, who);
            origin.attend(by.place, now.at, fx);
        }
    }

    /// The time has come at which a dial was to call.
    pub(crate) fn call(&mut self, by: Dialer, now: Stamp, fx: &mut Effects<K, T, W>) {
        if let Some(origin) = self.origin(by.place) {
            if origin.caller.is_some_and(|(caller, _)| caller == by.dial) {
                origin.caller = None;
            }
            origin.attend(by.place, now.at, fx);
        }
    }

    /// The TCP handshake of a dial is over, which took so long.
    pub(crate) fn connected(
        &mut self,
        place: Place,
        dial: DialId,
        took: Duration,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        // Perhaps it was the one that was late.
        self.at_the_window(place, now, fx, |window| window.connected(dial, took));
    }

    /// The server has sent the first byte on what a dial has opened.
    pub(crate) fn proven(
        &mut self,
        place: Place,
        dial: DialId,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        self.at_the_window(place, now, fx, |window| window.proven(dial, now.at));
    }

    /// A dial, or the first request on what it has opened, has lost a packet.
    pub(crate) fn dial_lost(
        &mut self,
        place: Place,
        dial: DialId,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        if let Some(origin) = self.origin(place) {
            let lesson = origin.learnt.lost(dial, now.at);
            origin.note(lesson, fx);
            origin.attend(place, now.at, fx);
        }
    }

    /// A dial, or what it has opened, says nothing any more of how the server accepts.
    pub(crate) fn dial_ended(
        &mut self,
        place: Place,
        dial: DialId,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        self.at_the_window(place, now, fx, |window| window.ended(dial));
    }

    /// Something has happened to a dial, by which others may be let through.
    fn at_the_window(
        &mut self,
        place: Place,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
        event: impl FnOnce(&mut DialWindow),
    ) {
        if let Some(origin) = self.origin(place) {
            event(&mut origin.learnt.window);
            origin.attend(place, now.at, fx);
        }
    }

    /// A dial has brought a connection: for its owner, else for whoever is next. `is_proven` if the server has sent
    /// something on it.
    pub(crate) fn dialed(
        &mut self,
        by: Dialer,
        item: T,
        is_proven: bool,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        let Dialer {
            place,
            ticket,
            dial,
        } = by;
        let Some(origin) = self.origin(place) else {
            return fx.close(item, CloseReason::PoolDropped);
        };
        if is_proven {
            origin.learnt.window.proven(dial, now.at);
            origin.attend(place, now.at, fx);
        }
        origin.dial_over(ticket);
        origin.born.push((item.id(), now.at));
        if let Some(owner) = origin.line.remove(&ticket) {
            origin.undialed.remove(&ticket);
            origin.busy += 1;
            fx.told.push(Told {
                who: owner.who,
                place,
                ticket,
                word: Word::Connection(item, None),
            });
            self.busy += 1;
            self.dialing -= 1;
            return self.settle(place, fx);
        }
        self.dialing -= 1;
        self.offer(place, item, now, now, fx);
    }

    /// A dial has failed, which is its owner's to hear from whoever dialled. Its seat is given back apart.
    pub(crate) fn dial_failed(
        &mut self,
        by: Dialer,
        failure: Option<DialFailure>,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        let Dialer {
            place,
            ticket,
            dial,
        } = by;
        let Some(origin) = self.origin(place) else {
            return;
        };
        origin.gate.remove(&dial);
        origin.learnt.window.ended(dial);
        origin.attend(place, now.at, fx);
        origin.dial_over(ticket);
        // Who was served otherwise and has come back into line has another dial, or none.
        let is_own = |waiter: &Waiter<W>| waiter.dial == Some(dial);
        if origin.line.get(&ticket).is_some_and(is_own) {
            let owner = origin.line.remove(&ticket);
            fx.gone.extend(owner.map(|owner| owner.who));
        }
        if let Some(failure) = failure {
            origin.last_failure = Some((now.at, failure));
        }
        self.dialing -= 1;
        self.settle(place, fx);
    }

    /// A busy connection can carry the next exchange; it has been idle since then. `survived` is how long it had
    /// been idle before the exchange that it has just answered.
    pub(crate) fn put_back(
        &mut self,
        place: Place,
        item: T,
        since: Stamp,
        survived: Option<Duration>,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        if let Some(origin) = self.origin(place) {
            let idle = survived.and_then(|age| origin.learnt.open(age));
            // A connection that goes back as it was says nothing.
            let cap = survived.and_then(|_| origin.learnt.cap(|cap| cap.kept(item.served())));
            origin.note(cap.or(idle), fx);
            origin.busy -= 1;
            self.busy -= 1;
        }
        self.offer(place, item, since, now, fx);
    }

    /// A busy connection will not come back. It keeps its seat until it is closed.
    pub(crate) fn leave(&mut self, place: Place, id: u64) {
        if let Some(origin) = self.origin(place) {
            origin.forget_end(id);
            origin.busy -= 1;
            self.busy -= 1;
        }
    }

    /// A connection is closed on both sides, or its dial has failed.
    pub(crate) fn seat_freed(&mut self, place: Place, id: Option<u64>, fx: &mut Effects<K, T, W>) {
        let Some(origin) = self.origin(place) else {
            return;
        };
        origin.seats -= 1;
        if let Some(at) = origin.born.iter().position(|(born, _)| Some(*born) == id) {
            origin.born.swap_remove(at);
        }
        self.seats -= 1;
        self.settle(place, fx);
        self.forget_if_unused(place);
    }

    /// The server has closed this very connection: takes it off the shelf, if it is idle.
    pub(crate) fn remove(
        &mut self,
        place: Place,
        id: u64,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) -> Option<T> {
        let origin = self.origin(place)?;
        let (item, since) = origin.shelf.remove(id)?;
        origin.forget_end(id);
        // Connections that have carried nothing are closed by other clocks.
        if !item.is_unused() {
            let age = since.until(now);
            let lesson = origin.learnt.idle(|idle| idle.closed(age, false));
            origin.note(lesson, fx);
        }
        self.idle -= 1;
        Some(item)
    }

    /// A connection was found closed that had been idle for so long, or for less.
    pub(crate) fn found_closed(&mut self, place: Place, age: Duration, fx: &mut Effects<K, T, W>) {
        self.learn(place, fx, |learnt| {
            learnt.idle(|idle| idle.closed(age, true))
        });
    }

    /// The server announces its idle timeout.
    pub(crate) fn announced_idle(
        &mut self,
        place: Place,
        timeout: Duration,
        fx: &mut Effects<K, T, W>,
    ) {
        self.learn(place, fx, |learnt| {
            learnt.idle(|idle| idle.announce(timeout))
        });
    }

    /// The server announces how many requests a connection carries.
    pub(crate) fn announced_cap(&mut self, place: Place, cap: u32, fx: &mut Effects<K, T, W>) {
        self.learn(place, fx, |learnt| learnt.cap(|rule| rule.announce(cap)));
    }

    /// A busy connection will be closed after this exchange, its `count`th: the response says so. `by_habit` if it
    /// may be because of the count.
    pub(crate) fn said_close(
        &mut self,
        place: Place,
        id: u64,
        count: u32,
        by_habit: bool,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        if by_habit {
            self.learn(place, fx, |learnt| learnt.cap(|cap| cap.closed(count)));
        }
        // A server that closes after the first keeps none, and one that waits may be in its way.
        if count > 1 {
            self.near_end(place, id, true, now.at, fx);
        }
    }

    fn learn(
        &mut self,
        place: Place,
        fx: &mut Effects<K, T, W>,
        event: impl FnOnce(&mut Learnt) -> Option<Lesson>,
    ) {
        if let Some(origin) = self.origin(place) {
            let lesson = event(&mut origin.learnt);
            origin.note(lesson, fx);
        }
    }

    /// A connection in use is near its end, or has come to it. While there is demand, another one is opened in its place.
    fn near_end(
        &mut self,
        place: Place,
        id: u64,
        is_last_chance: bool,
        now: Instant,
        fx: &mut Effects<K, T, W>,
    ) {
        let (limits, seats) = (self.limits, self.seats);
        let elsewhere = self.idle + self.dialing;
        let is_open = self.mode == Mode::Open && limits.allow_reuse();
        let Some(origin) = self.origin(place) else {
            return;
        };
        if !origin.ending.contains(&id) {
            origin.ending.push(id);
        }
        let gauges = origin.gauges();
        let usable = gauges.idle + gauges.busy + gauges.dialing;
        let usable = usable.saturating_sub(origin.ending.len());
        // One handshake after the other: together they would hold up whoever is due meanwhile.
        let is_apart = origin.last_spare.is_none_or(|last| now >= last + SPARE_GAP);
        // Who is in line dials for themselves.
        let may_dial = (is_apart || is_last_chance)
            && origin.undialed.is_empty()
            && origin.room(&limits) > 0
            && seats < limits.connections
            && origin.gate.is_empty();
        // All that are open come back one day, but for one that says close now. None of them is to be closed for it.
        let comes_back = gauges.busy - usize::from(is_last_chance);
        let may_keep = gauges.idle + gauges.dialing + comes_back < limits.idle_per_origin
            && elsewhere + comes_back < limits.idle;
        if is_open && may_dial && may_keep && origin.demand.exceeds(usable, now) {
            origin.spares += 1;
            origin.last_spare = Some(now);
            let dial = self.begin_dial(place);
            fx.spare = Some((place, dial));
        }
    }

    /// Takes a seat for a dial.
    fn begin_dial(&mut self, place: Place) -> DialId {
        self.next += 1;
        let dial = self.next;
        if let Some(origin) = self.origin(place) {
            origin.seats += 1;
            origin.dialing += 1;
            self.seats += 1;
            self.dialing += 1;
        }
        dial
    }

    /// What was learnt of an origin.
    pub(crate) fn learnt(&self, key: &K) -> Option<&Learnt> {
        let now_used = self
            .places
            .get(key)
            .and_then(|&place| self.origins[place].as_ref());
        match now_used {
            Some(origin) => Some(&origin.learnt),
            None => self.remembered.get(key).map(|(_, learnt)| learnt),
        }
    }

    /// Asks whether the time of this idle connection is over, and takes it off the shelf if so.
    pub(crate) fn expire(&mut self, place: Place, id: u64, now: Stamp) -> Expiry<T> {
        let Some(origin) = self.origin(place) else {
            return Expiry::NotIdle;
        };
        let expiry = origin.shelf.expire(id, now);
        if matches!(expiry, Expiry::Due(..)) {
            origin.forget_end(id);
            self.idle -= 1;
        }
        expiry
    }

    /// Closes the idle connections of an origin that have come to their end.
    pub(crate) fn sweep(&mut self, key: &K, now: Stamp, fx: &mut Effects<K, T, W>) {
        let Some(&place) = self.places.get(key) else {
            return;
        };
        if let Some(origin) = self.origin(place) {
            let swept = origin.shelf.sweep(now);
            let count = swept.len();
            for (item, reason) in swept {
                origin.discard(item, reason, fx);
            }
            self.idle -= count;
        }
    }

    /// Begins the end: nobody waits any more, nothing idle stays, and what comes back is closed.
    pub(crate) fn close(&mut self, fx: &mut Effects<K, T, W>) {
        self.mode = Mode::Closed;
        self.starved.clear();
        for place in 0..self.origins.len() {
            let Some(origin) = &mut self.origins[place] else {
                continue;
            };
            origin.undialed.clear();
            origin.ending.clear();
            origin.starved_as = None;
            for (ticket, waiter) in std::mem::take(&mut origin.line) {
                fx.told.push(Told {
                    who: waiter.who,
                    place,
                    ticket,
                    word: Word::Closed,
                });
            }
            let idle = origin.shelf.clear();
            self.idle -= idle.len();
            let idle = idle.into_iter();
            fx.closed
                .extend(idle.map(|item| (item, CloseReason::PoolClosed)));
            self.forget_if_unused(place);
        }
    }

    /// All handles are gone: idle connections close, and nothing is kept from now on.
    pub(crate) fn retire(&mut self, fx: &mut Effects<K, T, W>) {
        if self.mode == Mode::Open {
            self.mode = Mode::Retired;
        }
        for origin in self.origins.iter_mut().flatten() {
            origin.ending.clear();
            let idle = origin.shelf.clear();
            self.idle -= idle.len();
            let idle = idle.into_iter();
            fx.closed
                .extend(idle.map(|item| (item, CloseReason::PoolDropped)));
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.mode == Mode::Closed
    }

    /// How many connections there are, those being opened and closed included.
    pub(crate) fn seats(&self) -> usize {
        self.seats
    }

    /// Each origin that has a connection or somebody in line.
    pub(crate) fn survey(&self) -> Vec<Survey<K>> {
        let origins = self.origins.iter().flatten();
        let survey = |origin: &Origin<K, T, W>| Survey {
            key: origin.key.clone(),
            gauges: origin.gauges(),
            oldest: origin.born.iter().map(|(_, at)| *at).min(),
            longest_idle: origin.shelf.oldest(),
            longest_wait: origin.line.values().next().map(|waiter| waiter.since),
        };
        origins.map(survey).collect()
    }

    fn origin(&mut self, place: Place) -> Option<&mut Origin<K, T, W>> {
        self.origins.get_mut(place)?.as_mut()
    }

    fn place_of(&mut self, key: &K) -> Place {
        if let Some(&place) = self.places.get(key) {
            return place;
        }
        let remembered = self.remembered.remove(key);
        let learnt = remembered.map(|(left, learnt)| {
            self.left.remove(&left);
            learnt
        });
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.origins.push(None);
            self.origins.len() - 1
        });
        self.origins[place] = Some(Origin {
            key: key.clone(),
            shelf: Shelf::new(self.idle_timeout, self.limits.idle_per_origin),
            busy: 0,
            dialing: 0,
            seats: 0,
            line: BTreeMap::new(),
            undialed: BTreeSet::new(),
            starved_as: None,
            born: Vec::new(),
            last_failure: None,
            learnt: learnt.unwrap_or_default(),
            demand: Demand::default(),
            ending: Vec::new(),
            spares: 0,
            last_spare: None,
            gate: BTreeMap::new(),
            caller: None,
        });
        self.places.insert(key.clone(), place);
        place
    }

    fn forget_if_unused(&mut self, place: Place) {
        let Some(origin) = self.origin(place) else {
            return;
        };
        if origin.seats > 0 || !origin.line.is_empty() {
            return;
        }
        let key = origin.key.clone();
        let mut learnt = std::mem::take(&mut origin.learnt);
        self.places.remove(&key);
        self.origins[place] = None;
        self.vacant.push(place);
        if learnt.is_blank() {
            return;
        }
        learnt.window.clear();
        if self.remembered.len() >= REMEMBERED
            && let Some((_, longest_ago)) = self.left.pop_first()
        {
            self.remembered.remove(&longest_ago);
        }
        self.next += 1;
        self.left.insert(self.next, key.clone());
        self.remembered.insert(key, (self.next, learnt));
    }

    /// The newest idle connection that will do and whose time is not over; what is found over closes. Where connections
    /// carry a limited number of requests, the one that has carried most, of those in use lately.
    fn take(
        &mut self,
        place: Place,
        need: Need,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) -> Option<(T, Stamp)> {
        if need == Need::Fresh {
            return None;
        }
        loop {
            let origin = self.origin(place)?;
            let rule = &origin.learnt.idle;
            let is_beyond = |item: &T, since: Stamp| {
                let limit = rule.limit().filter(|_| !item.is_unused());
                limit.is_some_and(|limit| since.until(now) >= limit)
            };
            let within = match need {
                Need::Young => USED_UP_WITHIN.min(rule.trusted()),
                _ => USED_UP_WITHIN,
            };
            let cap = origin
                .learnt
                .cap
                .cap()
                .into_iter()
                .chain(origin.shelf.most());
            let cap = cap.min();
            // One after the other is used up, so that they do not come to their end together.
            let most_used = cap.and_then(|_| origin.shelf.take_most_used(within, now));
            // What is too old for this one stays, and all others are older.
            let newest = |shelf: &mut Shelf<T>| {
                shelf.take(now, |item, since| {
                    is_beyond(item, since) || need.is_met(item, since, now, rule)
                })
            };
            let mut taken = match most_used {
                Some(taken) => taken,
                None => newest(&mut origin.shelf)?,
            };
            if is_beyond(&taken.item, taken.since) {
                taken.over.get_or_insert(CloseReason::IdleTimeout);
            }
            if let Some(reason) = taken.over {
                origin.discard(taken.item, reason, fx);
                self.idle -= 1;
                continue;
            }
            origin.busy += 1;
            origin.note_demand(now.at);
            let count = taken.item.served().saturating_add(1);
            // Where one request is all, each connection is near its end, and one that waits may be in the way.
            let is_near_end = cap.is_some_and(|cap| cap > 1 && is_near(count, cap));
            self.idle -= 1;
            self.busy += 1;
            if is_near_end {
                self.near_end(place, taken.item.id(), false, now.at, fx);
            }
            return Some((taken.item, taken.since));
        }
    }

    /// A connection that nobody holds goes to whoever is next, to the shelf, or to its end.
    fn offer(
        &mut self,
        place: Place,
        item: T,
        since: Stamp,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        let end = match self.mode {
            Mode::Closed => Some(CloseReason::PoolClosed),
            _ if !item.is_unused() && !self.limits.allow_reuse() => Some(CloseReason::IdleLimit),
            _ => item.over(now),
        };
        let end = match end {
            None if self.must_yield(place, now.at) => Some(CloseReason::MadeRoom),
            end => end,
        };
        match end {
            None => self.hand_over(place, item, since, now, fx),
            Some(reason) => match self.origin(place) {
                Some(origin) => origin.discard(item, reason, fx),
                None => fx.close(item, reason),
            },
        }
        self.settle(place, fx);
    }

    fn hand_over(
        &mut self,
        place: Place,
        item: T,
        since: Stamp,
        now: Stamp,
        fx: &mut Effects<K, T, W>,
    ) {
        let is_retired = self.mode == Mode::Retired;
        let limits = self.limits;
        let is_full = self.seats >= limits.connections;
        let Some(origin) = self.origin(place) else {
            return fx.close(item, CloseReason::PoolDropped);
        };
        let mut next = None;
        for (&ticket, waiter) in &origin.line {
            if waiter.need.is_met(&item, since, now, &origin.learnt.idle) {
                next = Some(ticket);
                break;
            }
            if waiter.dial.is_none() && (is_full || origin.seats >= limits.connections_per_origin) {
                // First in line, and needs the seat for a connection of its own.
                return origin.discard(item, CloseReason::MadeRoom, fx);
            }
        }
        let served = next.and_then(|ticket| Some((ticket, origin.line.remove(&ticket)?)));
        if let Some((ticket, waiter)) = served {
            origin.undialed.remove(&ticket);
            origin.busy += 1;
            self.busy += 1;
            fx.told.push(Told {
                who: waiter.who,
                place,
                ticket,
                word: Word::Connection(item, Some(since)),
            });
            return;
        }
        if is_retired {
            return origin.discard(item, CloseReason::PoolDropped, fx);
        }
        if let Some(surplus) = origin.shelf.put(item, since) {
            return origin.discard(surplus, CloseReason::IdleLimit, fx);
        }
        self.idle += 1;
        if self.idle > self.limits.idle {
            self.evict_oldest(CloseReason::IdleLimit, fx);
        }
    }

    /// Whether a connection of this origin must leave its seat to another origin, although somebody in line
    /// could use it here.
    fn must_yield(&mut self, place: Place, now: Instant) -> bool {
        // The connection in hand has a seat and is in none of the other states.
        let others_closing = self.closing() - 1;
        if self.seats < self.limits.connections || others_closing > 0 {
            return false;
        }
        let Some(origin) = self.origin(place) else {
            return false;
        };
        let Some(own) = origin.line.keys().next().copied() else {
            // Nobody here wants it: it goes to the shelf, and the longest idle one makes room.
            return false;
        };
        self.starved.range(..(own, 0)).any(|(ticket, other)| {
            let other = self.origins.get(*other).and_then(Option::as_ref);
            other.is_some_and(|other| {
                let since = other.line.get(ticket).map(|waiter| waiter.since);
                other.seats == 0 || since.is_some_and(|since| now >= since + PATIENCE)
            })
        })
    }

    fn closing(&self) -> usize {
        self.seats - self.idle - self.busy - self.dialing
    }

    /// Brings the line of this origin up to date, and lets dial whoever may.
    fn settle(&mut self, place: Place, fx: &mut Effects<K, T, W>) {
        self.refresh(place, fx);
        while let Some(&(ticket, place)) = self.starved.first() {
            if self.seats >= self.limits.connections {
                self.make_room(fx);
                return;
            }
            let Some(origin) = self.origin(place) else {
                self.starved.pop_first();
                continue;
            };
            origin.undialed.remove(&ticket);
            if origin.line.contains_key(&ticket) {
                let dial = self.begin_dial(place);
                if let Some(origin) = self.origin(place)
                    && let Some(waiter) = origin.line.get_mut(&ticket)
                {
                    waiter.dial = Some(dial);
                    fx.told.push(Told {
                        who: waiter.who.clone(),
                        place,
                        ticket,
                        word: Word::Dial(dial),
                    });
                }
            }
            self.refresh(place, fx);
        }
    }

    /// Notes whether somebody in line at this origin could dial if only there were a seat.
    fn refresh(&mut self, place: Place, fx: &mut Effects<K, T, W>) {
        let limits = self.limits;
        let Some(origin) = self.origins.get_mut(place).and_then(Option::as_mut) else {
            return;
        };
        if let Some(ticket) = origin.starved_as.take() {
            self.starved.remove(&(ticket, place));
        }
        let Some(ticket) = origin.first_undialed() else {
            return;
        };
        if origin.room(&limits) > 0 {
            origin.starved_as = Some(ticket);
            self.starved.insert((ticket, place));
            return;
        }
        // Only those wait beside idle connections for whom these are too old: one of them makes room.
        let gauges = origin.gauges();
        let is_full = origin.seats >= limits.connections_per_origin;
        if is_full
            && gauges.closing == 0
            && let Some(item) = origin.shelf.take_oldest()
        {
            origin.discard(item, CloseReason::MadeRoom, fx);
            self.idle -= 1;
        }
    }

    /// All seats are taken: closes as many of the longest idle connections as there are dials that wait for a
    /// seat and none that is on its way.
    fn make_room(&mut self, fx: &mut Effects<K, T, W>) {
        let origins = &self.origins;
        let wanted = self.starved.iter().map(|(_, place)| {
            let origin = origins.get(*place).and_then(Option::as_ref);
            origin.map_or(0, |origin| {
                let wait = origin.undialed.len().saturating_sub(origin.spares);
                wait.min(origin.room(&self.limits))
            })
        });
        let wanted: usize = wanted.sum();
        while self.closing() < wanted && self.evict_oldest(CloseReason::MadeRoom, fx) {}
    }

    /// Closes the connection that has been idle longest, whatever its origin. `false` if none is idle.
    fn evict_oldest(&mut self, reason: CloseReason, fx: &mut Effects<K, T, W>) -> bool {
        let origins = self.origins.iter_mut().flatten();
        let oldest = origins
            .filter(|origin| origin.shelf.len() > 0)
            .min_by_key(|origin| origin.shelf.oldest());
        let Some(origin) = oldest else {
            return false;
        };
        let Some(item) = origin.shelf.take_oldest() else {
            return false;
        };
        origin.discard(item, reason, fx);
        self.idle -= 1;
        true
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
