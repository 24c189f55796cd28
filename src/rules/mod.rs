//! Decisions without I/O, locks, clocks or awaits: everything comes in as an argument.

pub(crate) mod addresses;
pub(crate) mod cap;
pub(crate) mod demand;
pub(crate) mod dial_window;
pub(crate) mod hint;
pub(crate) mod idle;
pub(crate) mod learnt;
pub(crate) mod persist;
pub(crate) mod plan;
pub(crate) mod shelf;
pub(crate) mod split;
