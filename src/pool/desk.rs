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

use crate::clock::{Stamp, stamp};
use crate::error::DialFailure;
use crate::rules::idle::IdleRule;
use crate::rules::plan::{
    Answer, Asks, Effects, Limits, Need, Place, Plan, Survey, Ticket, Told, Word,
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
    Closed,
}

/// What asking at the desk leads to.
pub(crate) enum Asked<R: Trade> {
    Reuse(Held<R>),
    InLine(Spot<R>),
    Overloaded,
    Closed,
}

type Fx<R> = Effects<<R as Trade>::Item, <R as Trade>::Line>;
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
        let mut fx = Effects::none();
        let answer = event(&mut self.plan(), &mut fx);
        self.carry_out(fx);
        answer
    }

    fn carry_out(self: &Arc<Self>, fx: Fx<R>) {
        if fx.too_old {
            self.too_old.fetch_add(1, Relaxed);
        }
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
                Word::Dial => News::MayDial(Permit::new(self, place, ticket)),
                Word::Closed => News::Closed,
            });
        }
        for (item, reason) in fx.closed {
            R::close(item, reason);
        }
    }

    /// A place in line that is after all those given out before.
    pub(crate) fn ticket(&self) -> Ticket {
        self.next.fetch_add(1, Relaxed)
    }

    /// Takes the newest idle connection that will do.
    pub(crate) fn reuse(self: &Arc<Self>, key: &R::Key, need: Need) -> Option<Held<R>> {
        let now = stamp();
        let (place, item, since) = self.event(|plan, fx| plan.reuse(key, need, now, fx))?;
        Some(Held::new(self, place, item, Some(since)))
    }

    /// Asks for a connection: an idle one at once, else a place in line.
    pub(crate) fn ask(self: &Arc<Self>, key: &R::Key, asks: Asks<R::Line>) -> Asked<R> {
        let (now, ticket) = (stamp(), asks.ticket);
        // The spot is made after the lock is released; until then nobody can cancel it but this call, which
        // does not end before.
        match self.event(|plan, fx| plan.ask(key, asks, now, fx)) {
            Answer::Reuse(place, item, since) => {
                Asked::Reuse(Held::new(self, place, item, Some(since)))
            }
            Answer::InLine(place) => Asked::InLine(Spot {
                desk: Arc::clone(self),
                place,
                ticket,
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
    pub(crate) fn learnt(&self, key: &R::Key) -> Option<IdleRule> {
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
}

impl<R: Trade> Held<R> {
    fn new(desk: &Arc<Desk<R>>, place: Place, item: R::Item, since: Option<Stamp>) -> Self {
        Held {
            desk: Arc::clone(desk),
            place,
            item: Some(item),
            since,
            survived: None,
        }
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

    /// The connection was found closed after it had been idle for so long, or for less.
    pub(crate) fn found_closed(&self, idle: Duration) {
        self.desk.plan().found_closed(self.place, idle);
    }

    /// The server announces on it how long it keeps idle connections.
    pub(crate) fn announced(&self, timeout: Duration) {
        self.desk.plan().announced(self.place, timeout);
    }

    /// Takes the connection out of the pool. It keeps its seat until that is dropped.
    pub(crate) fn leave(mut self) -> Option<R::Item> {
        let item = self.item.take();
        if item.is_some() {
            self.desk.plan().leave(self.place);
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
}

impl<R: Trade> Spot<R> {
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
    place: Place,
    ticket: Ticket,
    is_over: bool,
    // Dropped last, with what is left of the permit: the seat is free once the dial counts no more.
    seat: Arc<Seat<R>>,
}

impl<R: Trade> Permit<R> {
    fn new(desk: &Arc<Desk<R>>, place: Place, ticket: Ticket) -> Self {
        let seat = Seat {
            desk: Arc::downgrade(desk),
            place,
            id: desk.next.fetch_add(1, Relaxed),
        };
        Permit {
            desk: Arc::clone(desk),
            place,
            ticket,
            is_over: false,
            seat: Arc::new(seat),
        }
    }

    /// The seat of the connection to be opened. All that keep it open hold a clone.
    pub(crate) fn seat(&self) -> &Arc<Seat<R>> {
        &self.seat
    }

    /// The dial has brought a connection: for its owner, else for whoever is next.
    pub(crate) fn opened(mut self, item: R::Item) {
        self.is_over = true;
        let now = stamp();
        self.desk
            .event(|plan, fx| plan.dialed(self.place, self.ticket, item, now, fx));
    }

    /// The dial has failed.
    pub(crate) fn failed(mut self, failure: DialFailure) {
        self.end(Some(failure));
    }

    fn end(&mut self, failure: Option<DialFailure>) {
        if !std::mem::replace(&mut self.is_over, true) {
            let now = stamp();
            self.desk
                .event(|plan, fx| plan.dial_failed(self.place, self.ticket, failure, now, fx));
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
        desk.plan().remove(self.place, self.id, now)
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
