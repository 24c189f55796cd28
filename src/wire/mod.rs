//! The only I/O: sockets, TLS, hyper, and the evidence that they leave.
//!
//! Nothing here knows the pool or its locks. A connection comes in two halves: [`http1::Conn`],
//! which sends requests and belongs to whoever holds the lease, and [`http1::Driver`], which runs
//! hyper and belongs to the connection's own task.

pub(crate) mod dial;
pub(crate) mod evidence;
pub(crate) mod http1;
pub(crate) mod meter;
pub(crate) mod outgoing;
pub(crate) mod resolve;
pub(crate) mod socket;
pub(crate) mod tls;
