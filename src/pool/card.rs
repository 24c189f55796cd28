//! A connection that can carry an exchange, and what is written on its card.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::{Instant, Stamp};
use crate::origin::Origin;
use crate::pool::desk::{Desk, Held, Line, News, Permit, Seat, Trade, Unproven};
use crate::pool::lessons;
use crate::rules::addresses::Address;
use crate::rules::cap::Countdown;
use crate::rules::learnt::Lesson;
use crate::rules::shelf::Item;
use crate::stats::CloseReason;
use crate::timings::{DialTimings, Handshake};
use crate::wire::http1::Conn;

/// What is traded at a pool's desk.
#[derive(Debug)]
pub(crate) struct Connections;

pub(crate) type PoolDesk = Desk<Connections>;
pub(crate) type PoolHeld = Held<Connections>;
pub(crate) type PoolPermit = Permit<Connections>;
pub(crate) type PoolSeat = Seat<Connections>;
pub(crate) type PoolUnproven = Unproven<Connections>;

impl Trade for Connections {
    type Key = Origin;
    type Item = Card;
    type Line = Ear;

    /// Closes the connection, which is idle: properly, in the background.
    fn close(card: Card, reason: CloseReason) {
        card.conn.meter().close_because(reason);
    }

    fn learnt(origin: &Origin, lesson: Lesson) {
        lessons::tell(origin, lesson);
    }
}

/// The way to a request that waits for its connection.
#[derive(Clone, Debug)]
pub(crate) struct Ear(pub(crate) tokio::sync::mpsc::UnboundedSender<News<Connections>>);

impl Line<Connections> for Ear {
    fn tell(&self, news: News<Connections>) {
        // Nobody listens: dropped, and so passed on.
        let _ = self.0.send(news);
    }
}

/// A connection and what is written on its card.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) conn: Conn,
    pub(crate) peer: Option<SocketAddr>,
    /// The entry of its address in the origin's book, which counts those who hold it.
    pub(crate) address: Arc<Address>,
    pub(crate) dial: DialTimings,
    pub(crate) handshake: Option<Handshake>,
    /// Requests carried so far.
    pub(crate) served: u32,
    /// The idle timeout that the server announced on it last.
    pub(crate) announced: Option<Duration>,
    /// What the server announces of how many requests it may carry, and how many that are in all.
    pub(crate) countdown: Countdown,
    pub(crate) announced_cap: Option<u32>,
    /// How many it may carry.
    pub(crate) most: Option<u32>,
    /// When it was established.
    pub(crate) born: Stamp,
    /// How long it may live.
    pub(crate) lifetime: Option<Duration>,
    pub(crate) seat: Arc<PoolSeat>,
}

impl Item for Card {
    fn id(&self) -> u64 {
        self.seat.id()
    }

    fn over(&self, now: Stamp) -> Option<CloseReason> {
        if self.most.is_some_and(|most| self.served >= most) {
            return Some(CloseReason::RequestLimit);
        }
        let age = self.born.until(now);
        if self.lifetime.is_some_and(|lifetime| age >= lifetime) {
            return Some(CloseReason::Lifetime);
        }
        self.address.retired()
    }

    fn ends(&self) -> Option<Instant> {
        self.lifetime.map(|lifetime| self.born.at + lifetime)
    }

    fn served(&self) -> u32 {
        self.served
    }

    fn most(&self) -> Option<u32> {
        self.most
    }
}
