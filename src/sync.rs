//! The lock of the desk, which a model checker can take the place of.
//!
//! `RUSTFLAGS="--cfg idempool_loom" cargo test --lib loom` runs the desk's tests under loom, which tries every
//! order in which threads can meet at it. Everything else uses std's locks directly.

#[cfg(all(test, idempool_loom))]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(all(test, idempool_loom)))]
pub(crate) use std::sync::{Mutex, MutexGuard};
