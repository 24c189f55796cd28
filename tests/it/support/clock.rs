//! Time that moves by hand only.

use std::sync::mpsc;
use std::time::Duration;

/// Keeps tokio's clock where it is until it is moved by hand: with a blocking task at work it does not
/// jump ahead when all wait for the network. Needs a current-thread runtime.
///
/// While it lives, nothing may wait for the clock without moving it: [`until`](HeldClock::until) is the
/// [`eventually`](super::eventually) of these tests.
pub(crate) struct HeldClock {
    /// Dropped, it ends the blocking task.
    _end: mpsc::Sender<()>,
}

impl HeldClock {
    pub(crate) fn start() -> HeldClock {
        tokio::time::pause();
        let (end, held) = mpsc::channel::<()>();
        tokio::task::spawn_blocking(move || held.recv());
        HeldClock { _end: end }
    }

    pub(crate) async fn advance(&self, time: Duration) {
        tokio::time::advance(time).await;
        // The tasks whose timers fired do what they do.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    /// Waits for what another thread or the kernel is about to do, while the clock stands still.
    pub(crate) async fn until(&self, what: &str, holds: impl FnMut() -> bool) {
        yield_until(what, holds).await;
    }
}

/// As [`eventually`](super::eventually), without a look at tokio's clock. Fails after ten seconds at the earliest.
pub(crate) async fn yield_until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..50_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_micros(200));
        tokio::task::yield_now().await;
    }
    panic!("never happened: {what}");
}
