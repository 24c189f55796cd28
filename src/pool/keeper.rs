//! One task a connection: it drives hyper, sees the end when it comes, and keeps the idle clock.
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

use tokio::time::{Sleep, sleep_until};

use crate::clock::now;
use crate::pool::state::Host;
use crate::rules::shelf::Expiry;
use crate::stats::{CloseReason, Counters};
use crate::wire::http1::{Driver, End};
use crate::wire::meter::Meter;

/// Runs a connection until it is closed.
///
/// Holds the host weakly: a connection does not keep its pool alive.
pub(crate) async fn keep(mut driver: Driver, id: u64, host: Weak<Host>, meter: Arc<Meter>) {
    let timeout = host.upgrade().and_then(|host| host.config.idle_timeout);
    let end = match timeout {
        None => (&mut driver).await,
        Some(timeout) => {
            let mut timer = pin!(sleep_until(now() + timeout));
            let mut armed = true;
            poll_fn(|cx| {
                if let Poll::Ready(end) = Pin::new(&mut driver).poll(cx) {
                    return Poll::Ready(end);
                }
                while armed && timer.as_mut().poll(cx).is_ready() {
                    armed = reset(timer.as_mut(), id, &host, timeout);
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
    if let Some(host) = host.upgrade()
        && let Some(card) = host.remove(id)
    {
        Counters::add(&host.counters.closed_while_idle);
        tracing::debug!(
            server.address = host.origin.host(),
            server.port = host.origin.port(),
            "server closed an idle connection"
        );
        drop(card);
    }
    drop(meter);
    match end {
        End::Aborted => {}
        End::Over(_) => driver.linger().await,
    }
}

/// The timer has fired. Closes the connection or sets the timer anew; `false` when it is needed no more.
fn reset(timer: Pin<&mut Sleep>, id: u64, host: &Weak<Host>, timeout: std::time::Duration) -> bool {
    let Some(host) = host.upgrade() else {
        return false;
    };
    let now = now();
    match host.expire(id, now) {
        Expiry::Due(card) => {
            // The driver ends once its other half is gone.
            card.close(CloseReason::IdleTimeout);
            false
        }
        Expiry::At(due) => {
            timer.reset(due);
            true
        }
        Expiry::NotIdle => {
            timer.reset(now + timeout);
            true
        }
    }
}
