//! One task a connection: it drives hyper, sees the end when it comes, and keeps the connection's clock.
//!
//! There is no reaper that walks over all connections. Each task has one timer, set when the connection
//! opens and looked at when it fires: over its time, the connection leaves the shelf and closes; idle
//! but younger, the timer is set to the moment its time will be over; in use, to the earliest moment at
//! which it could be. So a check-in costs nothing, a connection wakes at most once in an idle timeout,
//! and a pool without connections has no timer at all, on every kind of runtime.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Sleep, sleep_until};

use crate::clock::now;
use crate::origin::Origin;
use crate::pool::card::{Connections, PoolSeat};
use crate::pool::desk::Trade;
use crate::pool::state::Shared;
use crate::rules::shelf::Expiry;
use crate::stats::Counters;
use crate::wire::http1::{Driver, End};
use crate::wire::meter::Meter;

/// What a connection's task needs to know of it. Keeps no pool alive.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) origin: Origin,
    pub(crate) shared: Weak<Shared>,
    pub(crate) seat: Arc<PoolSeat>,
    /// How long the connection can at least go on before its time may be over: the shorter of idle timeout
    /// and lifetime. `None` where there is neither.
    pub(crate) patience: Option<Duration>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.strike_off(self.seat.id());
        }
    }
}

/// Runs a connection until it is closed on both sides, as far as that is waited for.
///
/// Keeps its seat until then, although for the counts it is closed when the goodbye begins.
pub(crate) async fn keep(mut driver: Driver, kept: Kept, meter: Arc<Meter>) {
    let end = match kept.patience {
        None => (&mut driver).await,
        Some(patience) => {
            let mut timer = pin!(sleep_until(now() + patience));
            let mut armed = true;
            poll_fn(|cx| {
                if let Poll::Ready(end) = Pin::new(&mut driver).poll(cx) {
                    return Poll::Ready(end);
                }
                while armed && timer.as_mut().poll(cx).is_ready() {
                    armed = reset(timer.as_mut(), &kept.seat, patience);
                }
                Poll::Pending
            })
            .await
        }
    };
    if let End::Over(reason) = end {
        meter.end_seen_as(reason);
    }
    // Nobody may find it from now on. If somebody holds it, they will see for themselves.
    if let Some(card) = kept.seat.remove() {
        if let Some(shared) = kept.shared.upgrade() {
            Counters::add(&shared.counters.closed_while_idle);
        }
        tracing::debug!(
            server.address = kept.origin.host(),
            server.port = kept.origin.port(),
            "server closed an idle connection"
        );
        drop(card);
    }
    drop(meter);
    driver.leave(end).await;
    drop(kept);
}

/// The timer has fired. Closes the connection or sets the timer anew; `false` when it is needed no more.
fn reset(timer: Pin<&mut Sleep>, seat: &PoolSeat, patience: Duration) -> bool {
    match seat.expire() {
        Expiry::Due(card, reason) => {
            // The driver ends once its other half is gone.
            Connections::close(card, reason);
            false
        }
        Expiry::At(due) => {
            timer.reset(due);
            true
        }
        Expiry::NotIdle => {
            timer.reset(now() + patience);
            true
        }
    }
}
