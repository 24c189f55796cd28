//! A connection that nobody holds, as it lies on the shelf.

use std::net::SocketAddr;

use crate::stats::CloseReason;
use crate::timings::{DialTimings, Handshake};
use crate::wire::http1::Conn;

/// A connection and what is written on its card.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) id: u64,
    pub(crate) conn: Conn,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) dial: DialTimings,
    pub(crate) handshake: Option<Handshake>,
    /// Requests carried so far.
    pub(crate) served: u32,
}

impl Card {
    /// Closes the connection, which is idle: properly, in the background.
    pub(crate) fn close(self, reason: CloseReason) {
        self.conn.meter().close_because(reason);
    }
}
