//! The only file that asks what time it is.
//!
//! Everything else takes `now` as an argument or calls [`now`], whose clock a test can pause
//! (`tokio::time::pause`). `.clippy.toml` holds the rest of the crate to that.

use std::time::SystemTime;

pub(crate) use tokio::time::Instant;

/// The monotonic clock. It stops while the machine is suspended.
#[allow(clippy::disallowed_methods)]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The wall clock, for dates that a server sent (`Retry-After`).
#[allow(clippy::disallowed_methods)]
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}
