//! The right to use a connection for one exchange.
//!
//! # Invariants
//!
//! * A lease counts as busy from the moment it exists until it is put back or closed, whatever happens
//!   to the future that holds it.
//! * A connection goes back only through [`Lease::put_back`], which is called once hyper has said that
//!   it is ready. A lease that is dropped closes its connection.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::clock::now;
use crate::error::Error;
use crate::pool::card::Card;
use crate::pool::keeper::keep;
use crate::pool::state::Host;
use crate::stats::{CloseReason, Counters};
use crate::timings::{ConnectionFacts, DialTimings, Handshake};
use crate::wire::http1::{Conn, Probe};

/// The right to use a connection for one exchange.
#[derive(Debug)]
pub(crate) struct Lease {
    host: Arc<Host>,
    /// `None` once it was given away.
    card: Option<Card>,
    facts: ConnectionFacts,
}

impl Lease {
    /// Finds a connection for an exchange: the newest idle one that is alive, else a new one.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connection that it was looking at or opening, and no other.
    pub(crate) async fn acquire(host: &Arc<Host>, must_be_fresh: bool) -> Result<Lease, Error> {
        if !must_be_fresh {
            while let Some((card, idle)) = host.take(now()) {
                let lease = Lease::new(host, card, Some(idle));
                if let Some(lease) = lease.if_alive().await {
                    return Ok(lease);
                }
            }
        }
        Lease::dial(host).await
    }

    fn new(host: &Arc<Host>, card: Card, idle: Option<Duration>) -> Lease {
        let facts = ConnectionFacts {
            id: card.id,
            peer: card.peer,
            served: card.served,
            idle,
            dial: card.dial,
            handshake: card.handshake,
        };
        Lease {
            host: Arc::clone(host),
            card: Some(card),
            facts,
        }
    }

    async fn if_alive(self) -> Option<Lease> {
        let card = self.card.as_ref()?;
        let verdict = card.conn.probe(self.host.config.probe_patience).await;
        let counters = &self.host.counters;
        match verdict {
            Probe::Quiet => return Some(self),
            Probe::Ended => {
                // Its task saw it first, and found it in our hands.
                Counters::add(&counters.closed_while_idle);
                self.leave_to_its_end();
            }
            Probe::Dead(reason) => {
                Counters::add(&counters.stale_by_probe);
                tracing::debug!(
                    server.address = self.host.origin.host(),
                    server.port = self.host.origin.port(),
                    reason = reason.as_str(),
                    "stale connection caught at checkout"
                );
                self.close(reason);
            }
        }
        None
    }

    async fn dial(host: &Arc<Host>) -> Result<Lease, Error> {
        let mut dialing = Dialing::start(host);
        let result = host.config.dialer.dial(&host.origin, &host.counters).await;
        let dialed = result.inspect_err(|_| Counters::add(&host.counters.dials_failed))?;
        dialing.opened = Some(dialed.timings);
        drop(dialing);
        let id = host.new_id();
        tracing::debug!(
            server.address = host.origin.host(),
            server.port = host.origin.port(),
            network.peer.address = dialed.peer.map(|peer| tracing::field::display(peer.ip())),
            network.peer.port = dialed.peer.map(|peer| peer.port()),
            tls.resumed = dialed.handshake.map(|kind| kind == Handshake::Resumed),
            took = ?dialed.timings.total(),
            "connection opened"
        );
        let meter = Arc::clone(dialed.conn.meter());
        tokio::spawn(keep(dialed.driver, id, Arc::downgrade(host), meter));
        let card = Card {
            id,
            conn: dialed.conn,
            peer: dialed.peer,
            dial: dialed.timings,
            handshake: dialed.handshake,
            served: 0,
        };
        Ok(Lease::new(host, card, None))
    }

    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    pub(crate) fn facts(&self) -> &ConnectionFacts {
        &self.facts
    }

    /// The connection. `None` only after the lease was given away, which takes it by value.
    pub(crate) fn conn(&mut self) -> Option<&mut Conn> {
        self.card.as_mut().map(|card| &mut card.conn)
    }

    /// Waits until hyper can take another request. `false` when it never will.
    pub(crate) async fn until_ready(&mut self) -> bool {
        poll_fn(|cx| match self.conn() {
            Some(conn) => conn.poll_ready(cx).map(|result| result.is_ok()),
            None => Poll::Ready(false),
        })
        .await
    }

    /// Notes why the connection will be closed, before it is.
    pub(crate) fn close_because(&self, reason: CloseReason) {
        if let Some(card) = &self.card {
            card.conn.meter().close_because(reason);
        }
    }

    /// Gives the connection back: the next exchange may have it.
    pub(crate) fn put_back(mut self) {
        let Some(mut card) = self.card.take() else {
            return;
        };
        card.served = card.served.saturating_add(1);
        if let Some((surplus, reason)) = self.host.put_back(card) {
            surplus.close(reason);
        }
    }

    /// Closes the connection: what hyper still has to send is sent, within bounds.
    pub(crate) fn close(self, reason: CloseReason) {
        self.close_because(reason);
        self.leave_to_its_end();
    }

    /// Closes the connection where it stands, although hyper is still sending on it.
    pub(crate) fn abort(mut self, reason: CloseReason) {
        self.close_because(reason);
        if let Some(card) = self.card.take() {
            self.host.forget_busy();
            card.conn.abort();
        }
    }

    /// Lets go of a connection that has ended by itself; its task knows why.
    pub(crate) fn leave_to_its_end(mut self) {
        if self.card.take().is_some() {
            self.host.forget_busy();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(card) = self.card.take() {
            // Counts only where no reason was given: the exchange was dropped.
            card.conn.meter().close_because(CloseReason::RequestDropped);
            self.host.forget_busy();
            // Nobody wants the rest of the request to be sent, and a peer that does not read must not
            // keep the connection.
            card.conn.abort();
        }
    }
}

/// A dial in progress, counted as such until it is dropped.
struct Dialing<'a> {
    host: &'a Host,
    opened: Option<DialTimings>,
}

impl<'a> Dialing<'a> {
    fn start(host: &'a Host) -> Self {
        host.dial_started();
        Dialing { host, opened: None }
    }
}

impl Drop for Dialing<'_> {
    fn drop(&mut self) {
        self.host.dial_ended(self.opened);
    }
}
