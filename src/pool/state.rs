//! What the handles of one pool, its requests and its connections share.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock::now;
use crate::pool::builder::Config;
use crate::pool::card::PoolDesk;
use crate::stats::{CloseReason, Counters, OriginStats, Stats};
use crate::wire::http1::Stop;

/// Everything that belongs to one pool.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) counters: Arc<Counters>,
    pub(crate) desk: Arc<PoolDesk>,
    /// The way to stop each connection, for the end of the pool.
    stops: Mutex<HashMap<u64, Stop>>,
    is_cut: AtomicBool,
}

impl Shared {
    pub(crate) fn new(config: Config) -> Self {
        Shared {
            desk: PoolDesk::new(config.limits, config.idle_timeout),
            counters: Arc::new(Counters::new()),
            stops: Mutex::default(),
            is_cut: AtomicBool::new(false),
            config,
        }
    }

    fn stops(&self) -> MutexGuard<'_, HashMap<u64, Stop>> {
        self.stops.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection is open: from now on the end of the pool ends it.
    pub(crate) fn enlist(&self, id: u64, stop: Stop) {
        self.stops().insert(id, stop.clone());
        if self.is_cut() {
            // It came too late for the others' end.
            stop.now(CloseReason::PoolClosed);
        }
    }

    /// A connection has ended.
    pub(crate) fn strike_off(&self, id: u64) {
        let stop = self.stops().remove(&id);
        drop(stop);
    }

    /// Ends every connection where it stands.
    pub(crate) fn cut(&self) {
        self.is_cut.store(true, SeqCst);
        let stops: Vec<_> = self.stops().values().cloned().collect();
        for stop in stops {
            stop.now(CloseReason::PoolClosed);
        }
    }

    /// Whether the pool has ended what did not end by itself.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(SeqCst)
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = self.counters.snapshot();
        stats.origins = self.origins();
        stats.too_old_to_trust = self.desk.too_old();
        for origin in &stats.origins {
            stats.idle += origin.idle;
            stats.busy += origin.busy;
            stats.dialing += origin.dialing;
            stats.closing += origin.closing;
            stats.waiting += origin.waiting;
        }
        stats
    }

    fn origins(&self) -> Vec<OriginStats> {
        let now = now();
        let age = |since| now.saturating_duration_since(since);
        let surveys = self.desk.survey().into_iter().map(|survey| OriginStats {
            origin: survey.key,
            idle: survey.gauges.idle as u64,
            busy: survey.gauges.busy as u64,
            dialing: survey.gauges.dialing as u64,
            closing: survey.gauges.closing as u64,
            waiting: survey.gauges.waiting as u64,
            oldest_connection: survey.oldest.map(age),
            longest_idle: survey.longest_idle.map(age),
            longest_wait: survey.longest_wait.map(age),
        });
        let mut origins: Vec<_> = surveys.collect();
        origins.sort_by(|a, b| a.origin.cmp(&b.origin));
        origins
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origins = self.origins();
        let lines = origins
            .iter()
            .map(|origin| (origin.origin.to_string(), origin.gauges()));
        f.debug_map().entries(lines).finish()
    }
}
