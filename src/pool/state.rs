//! What the pool knows of each origin, under that origin's lock.
//!
//! Two locks: the table of origins, and one for each origin's [`Host`]. The table's is never held while
//! a host's is taken, except to ask whether a host is unused. Connections that must go are returned from under the
//! lock and closed after it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use crate::clock::{Instant, now};
use crate::origin::Origin;
use crate::pool::builder::Config;
use crate::pool::card::Card;
use crate::rules::shelf::{Expiry, Shelf};
use crate::stats::{CloseReason, Counters, Stats};
use crate::timings::DialTimings;

/// Everything that the handles of one pool share.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) counters: Arc<Counters>,
    hosts: RwLock<HashMap<Origin, Arc<Host>>>,
    next_id: Arc<AtomicU64>,
}

/// Origins kept although nothing is open to them any more, for what is known of their dials. Beyond
/// this many the unused ones are forgotten.
const MAX_UNUSED_ORIGINS: usize = 1024;

impl Shared {
    pub(crate) fn new(config: Config) -> Self {
        Shared {
            config: Arc::new(config),
            counters: Arc::new(Counters::new()),
            hosts: RwLock::default(),
            next_id: Arc::new(AtomicU64::new(1)),
        }
    }

    /// The state of an origin, made at its first request.
    pub(crate) fn host(&self, origin: &Origin) -> Arc<Host> {
        let known = self
            .hosts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(origin)
            .cloned();
        if let Some(host) = known {
            return host;
        }
        let mut hosts = self.hosts.write().unwrap_or_else(PoisonError::into_inner);
        if hosts.len() >= MAX_UNUSED_ORIGINS && !hosts.contains_key(origin) {
            // A host that somebody holds, or that holds something, is in use.
            hosts.retain(|_, host| Arc::strong_count(host) > 1 || !host.is_unused());
        }
        let make = || Host::new(origin.clone(), self);
        Arc::clone(hosts.entry(origin.clone()).or_insert_with(make))
    }

    fn all_hosts(&self) -> Vec<Arc<Host>> {
        let hosts = self.hosts.read().unwrap_or_else(PoisonError::into_inner);
        hosts.values().cloned().collect()
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.counters.snapshot();
        for host in self.all_hosts() {
            let gauges = host.gauges();
            stats.idle += gauges.idle as u64;
            stats.busy += gauges.busy as u64;
            stats.dialing += gauges.dialing as u64;
        }
        stats
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut origins = self.all_hosts();
        origins.sort_by(|a, b| a.origin.cmp(&b.origin));
        let lines = origins
            .iter()
            .map(|host| (host.origin.to_string(), host.gauges()));
        f.debug_map().entries(lines).finish()
    }
}

impl Drop for Shared {
    /// The last handle is gone: idle connections close, busy ones when their exchange is over.
    fn drop(&mut self) {
        for host in self.all_hosts() {
            host.retire();
        }
    }
}

/// How many connections of one origin are in which state.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Gauges {
    pub(crate) idle: usize,
    pub(crate) busy: usize,
    pub(crate) dialing: usize,
}

/// One origin of one pool.
pub(crate) struct Host {
    pub(crate) origin: Origin,
    pub(crate) config: Arc<Config>,
    pub(crate) counters: Arc<Counters>,
    next_id: Arc<AtomicU64>,
    state: Mutex<State>,
}

struct State {
    shelf: Shelf<Card>,
    busy: usize,
    dialing: usize,
    /// The pool is gone: nothing is put on the shelf any more.
    retired: bool,
    cost: Cost,
}

/// What opening a connection to this origin has cost on average.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    dials: u32,
    time: Duration,
    round_trips: u32,
}

impl Host {
    fn new(origin: Origin, shared: &Shared) -> Arc<Self> {
        let config = Arc::clone(&shared.config);
        Arc::new(Host {
            origin,
            counters: Arc::clone(&shared.counters),
            next_id: Arc::clone(&shared.next_id),
            state: Mutex::new(State {
                shelf: Shelf::new(config.idle_timeout, config.limits.idle_per_origin),
                busy: 0,
                dialing: 0,
                retired: false,
                cost: Cost::default(),
            }),
            config,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is run under the lock can leave it half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Takes the newest idle connection, which from now on counts as busy.
    pub(crate) fn take(&self, now: Instant) -> Option<(Card, Duration)> {
        let mut state = self.state();
        let taken = state.shelf.take(now)?;
        state.busy += 1;
        Some(taken)
    }

    /// Puts a busy connection back. What has no place is returned, with the reason to close it.
    pub(crate) fn put_back(&self, card: Card) -> Option<(Card, CloseReason)> {
        let now = now();
        let mut state = self.state();
        state.busy -= 1;
        if state.retired {
            return Some((card, CloseReason::PoolDropped));
        }
        let id = card.id;
        let surplus = state.shelf.put(id, card, now)?;
        Some((surplus, CloseReason::IdleLimit))
    }

    /// A busy connection will not come back.
    pub(crate) fn forget_busy(&self) {
        self.state().busy -= 1;
    }

    pub(crate) fn dial_started(&self) {
        self.state().dialing += 1;
    }

    /// A dial has ended. With a connection, that counts as busy from now on.
    pub(crate) fn dial_ended(&self, opened: Option<DialTimings>) {
        let mut state = self.state();
        state.dialing -= 1;
        if let Some(timings) = opened {
            state.busy += 1;
            let cost = &mut state.cost;
            cost.dials = cost.dials.saturating_add(1);
            cost.time = cost.time.saturating_add(timings.total());
            cost.round_trips = cost.round_trips.saturating_add(timings.round_trips);
        }
    }

    /// A request was answered over a connection that was already open.
    pub(crate) fn note_saved(&self) {
        let cost = self.state().cost;
        let dials = cost.dials.max(1);
        let round_trips = cost.round_trips.div_ceil(dials);
        self.counters
            .saved(round_trips, cost.time / dials, self.origin.is_https());
    }

    /// Takes this very connection off the shelf, if it is idle.
    pub(crate) fn remove(&self, id: u64) -> Option<Card> {
        self.state().shelf.remove(id)
    }

    /// Asks whether the time of this idle connection is over, and takes it off the shelf if so.
    pub(crate) fn expire(&self, id: u64, now: Instant) -> Expiry<Card> {
        self.state().shelf.expire(id, now)
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let state = self.state();
        Gauges {
            idle: state.shelf.len(),
            busy: state.busy,
            dialing: state.dialing,
        }
    }

    fn is_unused(&self) -> bool {
        self.gauges() == Gauges::default()
    }

    fn retire(&self) {
        let idle = {
            let mut state = self.state();
            state.retired = true;
            state.shelf.clear()
        };
        for card in idle {
            card.close(CloseReason::PoolDropped);
        }
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("origin", &self.origin)
            .field("gauges", &self.gauges())
            .finish_non_exhaustive()
    }
}
