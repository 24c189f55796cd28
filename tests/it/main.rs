//! Promises kept over real sockets, against servers that are scripted and that count.

mod support;

mod cancel;
mod persistence;
mod stale;
