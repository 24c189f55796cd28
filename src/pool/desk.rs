//! The desk: the plan of a pool behind its one lock, and the guards that own what it has promised.
//!
//! Every event goes to the plan under the lock, and what follows from it is done after the lock is released:
//! those in line are told, connections are closed. Generic over what is traded, so that a model checker can
//! drive it (`desk_loom.rs`).
//!
//! # Invariants
//!
//! * The lock is held for moves of values only: no `await`, no system call, no waker, no drop of a connection.
//! * What is promised to somebody is owned by a guard from before the lock is released: a connection by
//!   [`Held`], leave to dial by [`Permit`], a place in line by [`Spot`], a seat by [`Seat`]. Whoever drops one, or
//!   never hears of it, gives it back: the next in line has it then.

use std::fmt;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::{Instant, Stamp, stamp};
use crate::error::DialFailure;
use crate::rules::dial_window::DialId;
use crate::rules::learnt::{Learnt, Lesson};
use crate::rules::plan::{
    Answer, Asks, Dialer, Effects, Limits, NOBODY, Need, Place, Plan, Survey, Ticket, Told, Word,
};
use crate::rules::shelf::{Expiry, Item};
use crate::stats::CloseReason;
use crate::sync::{Mutex, MutexGuard};

/// What is traded at a desk: connections for keys, with those who wait.
pub(crate) trait Trade: Sized {
    type Key: Clone + Eq + Hash;
    type Item: Item;
    type Line: Line<Self>;

    fn close(item: Self::Item, reason: CloseReason);

    /// Something was learnt of what goes by this key.
    fn learnt(key: &Self::Key, lesson: Lesson);
}

/// The way to somebody who waits.
pub(crate) trait Line<R: Trade>: Clone {
    /// Brings news, or drops them where nobody listens any more.
    fn tell(&self, news: News<R>);
}

/// What somebody in line hears.
pub(crate) enum News<R: Trade> {
    /// A connection, and since when it was idle if it was.
    Connection(Held<R>),
    MayDial(Permit<R>),
    /// To a dial that has [knocked](Permit::knock): it may connect.
    Begin,
    /// To a dial that has knocked: it is to [call](Permit::call) then.
    Call(Instant),
    Closed,
}

/// What asking at the desk leads to.
pub(crate) enum Asked<R: Trade> {
    Reuse(Held<R>),
    InLine(Spot<R>),
    Overloaded,
    Closed,
}

type Fx<R> = Effects<<R as Trade>::Key, <R as Trade>::Item, <R as Trade>::Line>;
/// What can happen to a dial.
type DialEvent<R> = fn(&mut PlanOf<R>, Place, DialId, Stamp, &mut Fx<R>);
type PlanOf<R> = Plan<<R as Trade>::Key, <R as Trade>::Item, <R as Trade>::Line>;

/// A pool's plan, and its lock.
pub(crate) struct Desk<R: Trade> {
    plan: Mutex<PlanOf<R>>,
    /// The next ticket, and the next number of a connection.
    next: AtomicU64,
    /// How often idle connections were too old for who asked.
    too_old: AtomicU64,
    /// Somebody may be waiting for the last connection to close, or for the end of the pool.
    changed: Notify,
}

impl<R: Trade> Desk<R> {
    pub(crate) fn new(limits: Limits, idle_timeout: Option<Duration>) -> Arc<Self> {
        Arc::new(Desk {
            plan: Mutex::new(Plan::new(limits, idle_timeout)),
            next: AtomicU64::new(1),
            too_old: AtomicU64::new(0),
            changed: Notify::new(),
        })
    }

    fn plan(&self) -> MutexGuard<'_, PlanOf<R>> {
        // Nothing that is run under the lock can leave it half done.
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an event under the lock, and does what follows from it after.
    fn event<A>(self: &Arc<Self>, event: impl FnOnce(&mut PlanOf<R>, &mut Fx<R>) -> A) -> A {
        let (answer, spare) = self.event_with_spare(event);
        debug_assert!(spare.is_none(), "only who can dial is given a spare dial");
        answer
    }

    /// The same for an event that may lead to a dial which nobody in line asked for.
    fn event_with_spare<A>(
        self: &Arc<Self>,
        event: impl FnOnce(&mut PlanOf<R>, &mut Fx<R>) -> A,
    ) -> (A, Option<Permit<R>>) {
        let mut fx = Effects::none();
        let answer = event(&mut self.plan(), &mut fx);
        let spare = self.carry_out(fx);
        (answer, spare)
    }

    fn carry_out(self: &Arc<Self>, fx: Fx<R>) -> Option<Permit<R>> {
        for told in fx.told {
            let Told {
                who,
                place,
                ticket,
                word,
            } = told;
            who.tell(match word {
                Word::Connection(item, since) => {
                    News::Connection(Held::new(self, place, item, since))
                }
                Word::Dial(dial) => News::MayDial(Permit::new(self, place, ticket, dial)),
                Word::Begin => News::Begin,
                Word::Call(at) => News::Call(at),
                Word::Closed => News::Closed,
            });
        }
        for (item, reason) in fx.closed {
            R::close(item, reason);
        }
        if let Some((key, lesson)) = fx.lesson {
            R::learnt(&key, lesson);
        }
        let spare = fx.spare;
        spare.map(|(place, dial)| Permit::new(self, place, NOBODY, dial))
    }

    /// A place in line that is after all those given out before.
    pub(crate) fn ticket(&self) -> Ticket {
        self.next.fetch_add(1, Relaxed)
    }

    /// Takes the newest idle connection that will do.
    pub(crate) fn reuse(self: &Arc<Self>, key: &R::Key, need: Need) -> Option<Held<R>> {
        let now = stamp();
        let (found, spare) = self.event_with_spare(|plan, fx| plan.reuse(key, need, now, fx));
        let (place, item, since) = found?;
        Some(Held::reused(self, place, item, since, spare))
    }

    /// Asks for a connection: an idle one at once, else a place in line.
    pub(crate) fn ask(self: &Arc<Self>, key: &R::Key, asks: Asks<R::Line>) -> Asked<R> {
        let (now, ticket) = (stamp(), asks.ticket);
        // The spot is made after the lock is released; until then nobody can cancel it but this call, which
        // does not end before.
        let asks = |plan: &mut PlanOf<R>, fx: &mut Fx<R>| {
            let answer = plan.ask(key, asks, now, fx);
            (answer, fx.too_old)
        };
        let ((answer, too_old), spare) = self.event_with_spare(asks);
        if too_old {
            self.too_old.fetch_add(1, Relaxed);
        }
        match answer {
            Answer::Reuse(place, item, since) => {
                Asked::Reuse(Held::reused(self, place, item, since, spare))
            }
            Answer::InLine(place) => Asked::InLine(Spot {
                desk: Arc::clone(self),
                place,
                ticket,
                too_old,
            }),
            Answer::Overloaded => Asked::Overloaded,
            Answer::Closed => Asked::Closed,
        }
    }

    /// Closes the idle connections of an origin that have come to their end.
    pub(crate) fn sweep(self: &Arc<Self>, key: &R::Key) {
        let now = stamp();
        self.event(|plan, fx| plan.sweep(key, now, fx));
    }

    /// Begins the end of the pool.
    pub(crate) fn close(self: &Arc<Self>) {
        self.event(|plan, fx| plan.close(fx));
        self.changed.notify_waiters();
    }

    /// The last handle of the pool is gone.
    pub(crate) fn retire(self: &Arc<Self>) {
        self.event(|plan, fx| plan.retire(fx));
    }

    /// Resolves once the pool is closed.
    pub(crate) async fn closed(&self) {
        self.until(Plan::is_closed).await;
    }

    /// Resolves once there is no connection any more, nor one being opened.
    pub(crate) async fn emptied(&self) {
        self.until(|plan| plan.seats() == 0).await;
    }

    async fn until(&self, holds: impl Fn(&PlanOf<R>) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if holds(&self.plan()) {
                return;
            }
            changed.await;
        }
    }

    /// How often idle connections were too old for a request that must not be sent twice.
    pub(crate) fn too_old(&self) -> u64 {
        self.too_old.load(Relaxed)
    }

    /// What was learnt of an origin.
    pub(crate) fn learnt(&self, key: &R::Key) -> Option<Learnt> {
        self.plan().learnt(key).cloned()
    }

    pub(crate) fn survey(&self) -> Vec<Survey<R::Key>> {
        self.plan().survey()
    }
}

impl<R: Trade> fmt::Debug for Desk<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").finish_non_exhaustive()
    }
}

/// A connection in somebody's hands. Counts as busy until it is put back or leaves.
pub(crate) struct Held<R: Trade> {
    desk: Arc<Desk<R>>,
    place: Place,
    /// `None` once it was given away.
    item: Option<R::Item>,
    since: Option<Stamp>,
    /// How long it had been idle, once it has answered.
    survived: Option<Duration>,
    /// Leave to dial another one, because this one is near its end.
    spare: Option<Permit<R>>,
}

impl<R: Trade> Held<R> {
    fn new(desk: &Arc<Desk<R>>, place: Place, item: R::Item, since: Option<Stamp>) -> Self {
        Held {
            desk: Arc::clone(desk),
            place,
            item: Some(item),
            since,
            survived: None,
            spare: None,
        }
    }

    /// One that was idle, with leave to dial another if it is near its end.
    fn reused(
        desk: &Arc<Desk<R>>,
        place: Place,
        item: R::Item,
        since: Stamp,
        spare: Option<Permit<R>>,
    ) -> Self {
        let mut held = Held::new(desk, place, item, Some(since));
        held.spare = spare;
        held
    }

    /// Since when the connection was idle; `None` if it comes straight from its dial.
    pub(crate) fn since(&self) -> Option<Stamp> {
        self.since
    }

    pub(crate) fn item(&self) -> Option<&R::Item> {
        self.item.as_ref()
    }

    pub(crate) fn item_mut(&mut self) -> Option<&mut R::Item> {
        self.item.as_mut()
    }

    /// Gives the connection back after an exchange, before which it had been idle for so long.
    pub(crate) fn put_back(mut self, idle: Option<Duration>) {
        self.since = None;
        self.survived = idle;
    }

    /// Leave to dial another one. To be used at once: until then it counts as a dial.
    pub(crate) fn take_spare(&mut self) -> Option<Permit<R>> {
        self.spare.take()
    }

    /// The connection was found closed after it had been idle for so long, or for less.
    pub(crate) fn found_closed(&self, idle: Duration) {
        self.desk
            .event(|plan, fx| plan.found_closed(self.place, idle, fx));
    }

    /// The server announces on it how long it keeps idle connections.
    pub(crate) fn announced_idle(&self, timeout: Duration) {
        self.desk
            .event(|plan, fx| plan.announced_idle(self.place, timeout, fx));
    }

    /// The server announces on it how many requests a connection carries.
    pub(crate) fn announced_cap(&self, cap: u32) {
        self.desk
            .event(|plan, fx| plan.announced_cap(self.place, cap, fx));
    }

    /// The server will close it after this exchange, its `count`th; `by_habit` if that may be for the count's sake.
    /// Gives leave to dial another one, where one is wanted.
    pub(crate) fn said_close(&self, count: u32, by_habit: bool) -> Option<Permit<R>> {
        let id = self.item.as_ref()?.id();
        let (place, now) = (self.place, stamp());
        let said = |plan: &mut PlanOf<R>, fx: &mut Fx<R>| {
            plan.said_close(place, id, count, by_habit, now, fx);
        };
        self.desk.event_with_spare(said).1
    }

    /// Takes the connection out of the pool. It keeps its seat until that is dropped.
    pub(crate) fn leave(mut self) -> Option<R::Item> {
        let item = self.item.take();
        if let Some(item) = &item {
            self.desk.plan().leave(self.place, item.id());
        }
        item
    }
}

impl<R: Trade> Drop for Held<R> {
    /// Back to the pool, as it was: whoever takes it next looks at it first.
    fn drop(&mut self) {
        if let Some(item) = self.item.take() {
            let now = stamp();
            let since = self.since.unwrap_or(now);
            let (place, survived) = (self.place, self.survived);
            self.desk
                .event(|plan, fx| plan.put_back(place, item, since, survived, now, fx));
        }
    }
}

/// A place in line. Dropping it leaves the line.
pub(crate) struct Spot<R: Trade> {
    desk: Arc<Desk<R>>,
    place: Place,
    ticket: Ticket,
    too_old: bool,
}

impl<R: Trade> Spot<R> {
    /// Whether there were idle connections, and all too old for this one.
    pub(crate) fn too_old(&self) -> bool {
        self.too_old
    }

    /// Leaves the line, and tells which dial to the origin failed last meanwhile.
    pub(crate) fn give_up(self) -> Option<DialFailure> {
        self.cancel()
    }

    fn cancel(&self) -> Option<DialFailure> {
        self.desk
            .event(|plan, fx| plan.cancel(self.place, self.ticket, fx))
    }
}

impl<R: Trade> Drop for Spot<R> {
    fn drop(&mut self) {
        // What failed is of no interest to somebody who leaves.
        let _ = self.cancel();
    }
}

/// Leave to dial. Counts as dialling until its end is reported; dropped, it is a dial that came to nothing.
pub(crate) struct Permit<R: Trade> {
    desk: Arc<Desk<R>>,
    by: Dialer,
    is_over: bool,
    // Dropped last, with what is left of the permit: the seat is free once the dial counts no more.
    seat: Arc<Seat<R>>,
}

impl<R: Trade> Permit<R> {
    fn new(desk: &Arc<Desk<R>>, place: Place, ticket: Ticket, dial: DialId) -> Self {
        let seat = Seat {
            desk: Arc::downgrade(desk),
            place,
            id: desk.next.fetch_add(1, Relaxed),
        };
        Permit {
            desk: Arc::clone(desk),
            by: Dialer {
                place,
                ticket,
                dial,
            },
            is_over: false,
            seat: Arc::new(seat),
        }
    }

    /// The seat of the connection to be opened. All that keep it open hold a clone.
    pub(crate) fn seat(&self) -> &Arc<Seat<R>> {
        &self.seat
    }

    /// Whether the dial may connect at once.
    pub(crate) fn enter(&self) -> bool {
        let now = stamp();
        self.desk.plan().enter(self.by, now)
    }

    /// Asks when the dial may connect, if not at once. `who` is told.
    pub(crate) fn knock(&self, who: R::Line) {
        let now = stamp();
        self.desk
            .event(|plan, fx| plan.knock(self.by, who, now, fx));
    }

    /// The time has come at which this dial was to call.
    pub(crate) fn call(&self) {
        let now = stamp();
        self.desk.event(|plan, fx| plan.call(self.by, now, fx));
    }

    /// The way to report how far the dial is.
    pub(crate) fn reports(&self) -> Reports<R> {
        Reports {
            desk: Arc::downgrade(&self.desk),
            by: self.by,
        }
    }

    /// The dial has brought a connection: for its owner, else for whoever is next. `is_proven` if the server has sent
    /// something on it; otherwise what is returned waits for that.
    pub(crate) fn opened(mut self, item: R::Item, is_proven: bool) -> Option<Unproven<R>> {
        self.is_over = true;
        let (by, now) = (self.by, stamp());
        self.desk
            .event(|plan, fx| plan.dialed(by, item, is_proven, now, fx));
        (!is_proven).then(|| Unproven(Some(self.reports())))
    }

    /// The dial has failed.
    pub(crate) fn failed(mut self, failure: DialFailure) {
        self.end(Some(failure));
    }

    fn end(&mut self, failure: Option<DialFailure>) {
        if !std::mem::replace(&mut self.is_over, true) {
            let (by, now) = (self.by, stamp());
            self.desk
                .event(|plan, fx| plan.dial_failed(by, failure, now, fx));
        }
    }
}

/// The way to report how far a dial is. Reports of a dial that is over change nothing.
pub(crate) struct Reports<R: Trade> {
    desk: Weak<Desk<R>>,
    by: Dialer,
}

impl<R: Trade> Reports<R> {
    /// The TCP handshake is over, which took so long.
    pub(crate) fn connected(&self, took: Duration) {
        self.report(|plan, place, dial, now, fx| plan.connected(place, dial, took, now, fx));
    }

    /// The dial, or the first request on its connection, has lost a packet.
    pub(crate) fn lost(&self) {
        self.report(PlanOf::<R>::dial_lost);
    }

    fn report(&self, event: impl FnOnce(&mut PlanOf<R>, Place, DialId, Stamp, &mut Fx<R>)) {
        if let Some(desk) = self.desk.upgrade() {
            let (Dialer { place, dial, .. }, now) = (self.by, stamp());
            desk.event(|plan, fx| event(plan, place, dial, now, fx));
        }
    }
}

/// A connection on which the server has not sent anything yet. Dropped, it says nothing of how the server accepts.
pub(crate) struct Unproven<R: Trade>(Option<Reports<R>>);

impl<R: Trade> Unproven<R> {
    /// The server has sent its first byte.
    pub(crate) fn proven(self) {
        self.ends(PlanOf::<R>::proven);
    }

    /// A packet was lost.
    pub(crate) fn lost(self) {
        self.ends(PlanOf::<R>::dial_lost);
    }

    fn ends(mut self, how: DialEvent<R>) {
        if let Some(reports) = self.0.take() {
            reports.report(how);
        }
    }
}

impl<R: Trade> Drop for Unproven<R> {
    fn drop(&mut self) {
        if let Some(reports) = self.0.take() {
            reports.report(PlanOf::<R>::dial_ended);
        }
    }
}

impl<R: Trade> Drop for Permit<R> {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// The right to have one connection open. Free again when its last holder drops it: whoever has the connection,
/// and its task, which waits for the other side to close.
pub(crate) struct Seat<R: Trade> {
    desk: Weak<Desk<R>>,
    place: Place,
    id: u64,
}

impl<R: Trade> Seat<R> {
    /// A number that no other connection of the pool has.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The server has closed the connection. Takes it off the shelf, if it is idle: nobody may find it from now on.
    pub(crate) fn remove(&self) -> Option<R::Item> {
        let desk = self.desk.upgrade()?;
        let now = stamp();
        desk.event(|plan, fx| plan.remove(self.place, self.id, now, fx))
    }

    /// Asks whether the connection's time is over while it is idle, and takes it off the shelf if so.
    pub(crate) fn expire(&self) -> Expiry<R::Item> {
        match self.desk.upgrade() {
            Some(desk) => desk.plan().expire(self.place, self.id, stamp()),
            None => Expiry::NotIdle,
        }
    }
}

impl<R: Trade> Drop for Seat<R> {
    fn drop(&mut self) {
        let Some(desk) = self.desk.upgrade() else {
            return;
        };
        desk.event(|plan, fx| plan.seat_freed(self.place, Some(self.id), fx));
        desk.changed.notify_waiters();
    }
}

impl<R: Trade> fmt::Debug for Held<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl<R: Trade> fmt::Debug for Permit<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit")
            .field("by", &self.by)
            .finish_non_exhaustive()
    }
}

impl<R: Trade> fmt::Debug for Seat<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, idempool_loom))]
#[path = "desk_loom.rs"]
mod loom_tests;
