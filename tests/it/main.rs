//! Promises kept over real sockets, against servers that are scripted and that count.

// Helpers fail by panicking, as tests do.
#![allow(clippy::unwrap_used)]

mod support;

mod answers;
mod cancel;
mod cap;
mod churn;
mod delivery;
mod desync;
mod ecosystem;
mod fault_matrix;
mod identity;
mod idle;
mod incomplete;
mod layering;
mod learning;
mod lifetime;
mod limits;
mod load;
mod logging;
#[cfg(target_os = "linux")]
mod network;
mod observe;
mod persistence;
mod resolve;
mod retry;
mod shutdown;
mod split;
mod stale;
mod storm;
mod timeouts;
mod tls;
mod window;
