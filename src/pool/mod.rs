//! The pool: who holds which connection, and the locks that this takes.
//!
//! Decisions are made under an origin's lock and acted on after it: no guard meets an `await`, a peek or
//! a close. Each promise is owned by a guard ([`lease::Lease`], the dial's gauge) from before the next
//! `await`, and its `Drop` gives it back.

pub(crate) mod body;
pub(crate) mod builder;
pub(crate) mod card;
pub(crate) mod desk;
pub(crate) mod keeper;
pub(crate) mod lease;
pub(crate) mod lessons;
pub(crate) mod service;
pub(crate) mod state;
