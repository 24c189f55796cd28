//! An HTTP client connection pool that never sends a request twice unless that is safe.

mod clock;
mod delivery;
mod error;
mod origin;
mod stats;
mod timings;

pub use delivery::{Delivery, FreshConnection, ResendCount, TreatAsIdempotent};
pub use error::{BoxError, Error, ErrorKind, Phase};
pub use origin::Origin;
pub use stats::{ByReason, CloseReason, Refusal, RetryReason, Stats};
pub use timings::{ConnectionFacts, DialTimings, Handshake, Timings};
