//! An HTTP client connection pool that never sends a request twice unless that is safe.
//!
//! Every pool hands out, once in a while, a connection that the server is about to close. The request fails,
//! and the caller has to know whether it may be sent again. This one answers that: it looks at a connection
//! with a system call before it is used, counts below TLS the bytes that the kernel took of each request, and
//! says in every [`Error`] what follows for its [`Delivery`]. A tower layer, [`RetryLayer`], sends again what
//! is safe to send again, and nothing else.
//!
//! # A first program
//!
//! ```
//! use http_body_util::BodyExt;
//! use idempool::{IdempotencyKey, Pool, ReplayBody, RetryLayer, RetryPolicy};
//! use tower::{ServiceBuilder, ServiceExt};
//!
//! async fn pay() -> Result<(), idempool::BoxError> {
//!     let pool = Pool::new();
//!     let client = ServiceBuilder::new()
//!         .layer(RetryLayer::new(RetryPolicy::default()))
//!         .service(pool.clone());
//!
//!     let key = IdempotencyKey::random(); // store it with the order, before the request is sent
//!     let request = http::Request::post("https://pay.example/payments")
//!         .body(ReplayBody::from(r#"{"amount":10}"#))?;
//!     let response = client.oneshot(key.attach(request)?).await?;
//!
//!     let status = response.status();
//!     let body = response.into_body().collect().await?.to_bytes();
//!     println!("{status}: {} bytes\n{}", body.len(), pool.stats());
//!     Ok(())
//! }
//! ```
//!
//! [`Pool`] is a tower service by itself. Without the layer it takes any [`http_body::Body`] and sends each
//! request once.
//!
//! # When a request fails
//!
//! | [`Error::delivery`] | what is certain | what to do |
//! |---|---|---|
//! | [`NotSent`](Delivery::NotSent) | no byte of it reached the kernel | send it again, or something else |
//! | [`Refused`](Delivery::Refused) | the server said that it did not act: 421 or 425 | the same |
//! | [`NotReceived`](Delivery::NotReceived) | almost nothing is open: the kernel saw no byte arrive (Linux) | look, then send it again; or opt in to have it sent again |
//! | [`Unknown`](Delivery::Unknown) | nothing: it may have been acted on | send it again only if it is idempotent, or with the same key; else ask the server |
//!
//! ```
//! use idempool::{Delivery, Error};
//!
//! fn may_be_placed_anew(error: &Error) -> bool {
//!     match error.delivery() {
//!         Delivery::NotSent | Delivery::Refused => true,
//!         // End of stream, reset, broken pipe: none of them says that the server did nothing.
//!         _ => false,
//!     }
//! }
//! # let _ = may_be_placed_anew;
//! ```
//!
//! A request of which no byte was taken does not even fail: the pool moves it to another connection, whatever
//! its method and its body, within bounds. [`RetryLayer`] goes further, by what the request is: [`Class`] says
//! how safe it is to send it twice, [`RetryPolicy`] how much of that is wanted, [`RetryBudget`] how much an
//! origin may see. [`Error::refusal`] tells why a request was not sent again.
//!
//! # Where to look
//!
//! * [`Pool`], [`Builder`]: connections, and the options with their defaults and reasons. [`Pool::close`],
//!   [`Pool::evict`]: their end.
//! * [`ResponseBody`]: gives its connection back before you see its end.
//! * [`RetryLayer`], [`RetryPolicy`], [`ReplayBody`], [`IdempotencyKey`]: sending again.
//! * [`Resolve`]: finding the addresses of a host.
//! * [`Stats`], [`Timings`]: what reuse saved, and why connections were closed.
//! * [`Profile`]: what was learnt of a server.
//! * [`FreshConnection`], [`TreatAsIdempotent`], [`RequestTimeout`]: marks on a request.
//!
//! `docs/delivery.md` in the repository has the whole decision table and the limits of each proof,
//! `docs/defaults.md` every number, `docs/architecture.md` the code, `docs/concurrency.md` who waits for whom.
//!
//! # What is not there
//!
//! HTTP/1.1 over TCP and TLS is all that is spoken: no HTTP/2 or HTTP/3 yet, no proxies, no `CONNECT`, no
//! protocol upgrades. No redirects, cookies, decompression or JSON: other tower layers do that.
//!
//! One pool has one TLS configuration: requests under different client certificates need a pool each.
//!
//! # Features
//!
//! * `aws-lc-rs` (default), `ring`: https, with that crypto provider.
//! * `platform-verifier` (default): the operating system's trust store.
//! * `tls` (part of each of them): https with a `rustls::ClientConfig` of your own.
//!
//! Without any of them https requests fail before anything is sent. A tokio runtime with I/O and time enabled
//! is needed in any case, from the first request on.

#![forbid(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod clock;
mod delivery;
mod error;
mod origin;
mod pool;
mod profile;
mod retry;
mod rules;
mod stats;
mod sync;
mod timings;
mod wire;

pub use delivery::{
    Delivery, FreshConnection, PeerEnd, RequestTimeout, ResendCount, TreatAsIdempotent,
};
pub use error::{Attempt, BoxError, EarlierAttempts, Error, ErrorKind, Phase};
pub use origin::Origin;
pub use pool::body::ResponseBody;
pub use pool::builder::Builder;
pub use pool::service::{Pool, ResponseFuture};
pub use profile::{CloseAge, Known, Profile, Source};
pub use retry::{
    Class, IdempotencyKey, InvalidKey, KeyForm, ReplayBody, Retry, RetryBudget, RetryFuture,
    RetryLayer, RetryPolicy,
};
pub use stats::{ByReason, CloseReason, OriginStats, Refusal, RetryReason, Stats};
pub use timings::{ConnectionFacts, DialTimings, Handshake, Timings};
pub use wire::resolve::{Resolve, Resolving};
