//! The retry layer: whether, when and how often a failed request is sent again.
//!
//! Decides from evidence (an [`Error`](crate::Error) or a response) and from what the request is
//! ([`Class`]). It never looks into the pool: everything it knows arrives in errors, in response
//! extensions, or in the request itself, so it works over any tower service.
//!
//! * `idempotency`, `sf`: what kind of request it is, and the key that makes a POST repeatable.
//! * `replay`: a body that can be sent again, and knows when it cannot.
//! * `retry_after`, `backoff`, `budget`: how long to wait, and how much retrying an origin may see.
//! * `table`: what is safe: the decision table, and how evidence is read. Pure.
//! * `policy`: how much of it is wanted. Pure.
//! * `layer`: the tower service that does what the table says.

mod backoff;
mod budget;
mod idempotency;
mod layer;
mod policy;
mod replay;
mod retry_after;
mod sf;
mod table;

#[cfg(test)]
mod tests;

pub use budget::RetryBudget;
pub use idempotency::{Class, IdempotencyKey, InvalidKey, KeyForm};
pub use layer::{Retry, RetryFuture, RetryLayer};
pub use policy::RetryPolicy;
pub use replay::ReplayBody;
