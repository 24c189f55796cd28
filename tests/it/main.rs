//! Promises kept over real sockets, against servers that are scripted and that count.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;

mod cancel;
mod persistence;
mod retry;
mod stale;
