//! An HTTP client connection pool that never sends a request twice unless that is safe.

mod clock;
mod delivery;
mod error;
mod origin;
mod pool;
mod retry;
mod rules;
mod stats;
mod timings;
mod wire;

pub use delivery::{Delivery, FreshConnection, PeerEnd, ResendCount, TreatAsIdempotent};
pub use error::{BoxError, Error, ErrorKind, Phase};
pub use origin::Origin;
pub use pool::body::ResponseBody;
pub use pool::builder::Builder;
pub use pool::service::{Pool, ResponseFuture};
pub use retry::{
    Class, IdempotencyKey, InvalidKey, KeyForm, ReplayBody, Retry, RetryBudget, RetryFuture,
    RetryLayer, RetryPolicy,
};
pub use stats::{ByReason, CloseReason, Refusal, RetryReason, Stats};
pub use timings::{ConnectionFacts, DialTimings, Handshake, Timings};
