//! The right to use a connection for one exchange, and the way to it: an idle one, a place in line, a dial.
//!
//! # Invariants
//!
//! * A lease counts as busy from the moment it exists until it is put back or closed, whatever happens
//!   to the future that holds it.
//! * A connection goes back only through [`Lease::put_back`], which is called once hyper has said that
//!   it is ready, or untouched, if it was dropped before its exchange began. A lease that is dropped after that
//!   closes its connection.
//! * A dial is a task of its own, begun in the runtime of the request that it is for. It outlives the request
//!   for as long as [`LOST_DIAL_PATIENCE`], and what it brings goes to whoever is next.

use std::future::{pending, poll_fn};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, sleep_until, timeout};
use tracing::{Instrument, Span};

use crate::clock::{Instant, now, stamp};
use crate::error::{DialFailure, Error, ErrorKind, Phase};
use crate::origin::Origin;
use crate::pool::card::{Card, Ear, PoolHeld, PoolPermit, PoolSeat, PoolUnproven};
use crate::pool::desk::{Asked, News};
use crate::pool::keeper::{Kept, keep};
use crate::pool::state::Shared;
use crate::rules::cap::Countdown;
use crate::rules::plan::{Asks, Need, Ticket};
use crate::stats::{CloseReason, Counters};
use crate::timings::{ConnectionFacts, Handshake};
use crate::wire::dial::{Dialed, Sign, Stage};
use crate::wire::http1::{Conn, Probe};
use crate::wire::meter::{FirstByteReceived, Socket};

/// The right to use a connection for one exchange.
#[derive(Debug)]
pub(crate) struct Lease {
    shared: Arc<Shared>,
    origin: Origin,
    /// `None` once it was given away.
    held: Option<PoolHeld>,
    facts: ConnectionFacts,
    /// The connection was given to an exchange: it is not what it was.
    begun: bool,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    /// Its place in line, should it have to wait.
    pub(crate) ticket: Ticket,
    /// It had a connection before, which was no good: it is not turned away.
    pub(crate) again: bool,
    pub(crate) need: Need,
    /// When the wait for it must end, and what it is then called.
    pub(crate) until: Option<(Instant, ErrorKind)>,
}

impl Lease {
    /// Finds a connection for an exchange: the newest idle one that is alive, else whichever comes first of
    /// one that is given back and one that is opened for it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future passes on what it had got or was about to get.
    pub(crate) async fn acquire(
        shared: &Arc<Shared>,
        origin: &Origin,
        wish: Wish,
    ) -> Result<Lease, Error> {
        let mut again = wish.again;
        // The seat of a connection that was found dead, so that nobody behind gets it before this one is back
        // in line.
        let mut seat = None;
        if let Some((until, kind)) = wish.until
            && now() >= until
        {
            return Err(Error::before_sending(kind, Phase::Queue));
        }
        loop {
            let lease = match shared.desk.reuse(origin, wish.need) {
                Some(held) => Lease::new(shared, origin, held)?,
                None => in_line(shared, origin, Wish { again, ..wish }, seat.take()).await?,
            };
            if !lease.facts.is_reused() {
                return Ok(lease);
            }
            match lease.if_alive().await {
                Ok(lease) => return Ok(lease),
                Err(of_the_dead) => seat = of_the_dead,
            }
            again = true;
        }
    }

    fn new(shared: &Arc<Shared>, origin: &Origin, mut held: PoolHeld) -> Result<Lease, Error> {
        let idle = held.since().map(|since| since.until(stamp()));
        if let Some(spare) = held.take_spare() {
            start_spare(shared, origin, spare);
        }
        let Some(card) = held.item() else {
            // What is handed out has not been given away.
            return Err(Error::before_sending(ErrorKind::Connect, Phase::Queue));
        };
        let facts = ConnectionFacts {
            id: card.seat.id(),
            peer: card.peer,
            served: card.served,
            idle,
            dial: card.dial,
            handshake: card.handshake,
        };
        Ok(Lease {
            shared: Arc::clone(shared),
            origin: origin.clone(),
            held: Some(held),
            facts,
            begun: false,
        })
    }

    /// Gives the lease back if its connection is alive, else the seat, which is not free before that is dropped.
    async fn if_alive(self) -> Result<Lease, Option<Arc<PoolSeat>>> {
        let Some(card) = self.held.as_ref().and_then(PoolHeld::item) else {
            return Err(None);
        };
        let dead = match card.conn.probe(self.shared.config.probe_patience).await {
            Probe::Quiet => return Ok(self),
            Probe::Ended => None,
            Probe::Dead(reason) => Some(reason),
        };
        let seat = Arc::clone(&card.seat);
        let counters = &self.shared.counters;
        match dead {
            None => {
                self.found_closed();
                // Its task saw it first, and found it in our hands.
                Counters::add(&counters.closed_while_idle);
                self.leave_to_its_end();
            }
            Some(reason) => {
                if reason == CloseReason::ProbeFoundClosed {
                    self.found_closed();
                }
                Counters::add(&counters.stale_by_probe);
                tracing::debug!(
                    server.address = self.origin.host(),
                    server.port = self.origin.port(),
                    reason = reason.as_str(),
                    "stale connection caught at checkout"
                );
                self.close(reason);
            }
        }
        Err(Some(seat))
    }

    /// Notes that the server has closed it. Late, perhaps: its task had not seen it yet. So the age is an upper bound.
    pub(crate) fn found_closed(&self) {
        let has_served = self.facts.served > 0;
        if let (Some(held), Some(idle), true) = (&self.held, self.facts.idle, has_served) {
            held.found_closed(idle);
        }
    }

    /// Notes what the server announces of its idle timeout, if that is news.
    pub(crate) fn announced_idle(&mut self, timeout: Duration) {
        if let Some(held) = &mut self.held
            && let Some(card) = held.item_mut()
            && card.announced.replace(timeout) != Some(timeout)
        {
            held.announced_idle(timeout);
        }
    }

    /// Notes what the server announces of how many requests a connection carries, if that is news.
    pub(crate) fn announced_max(&mut self, max: u32) {
        if let Some(held) = &mut self.held
            && let Some(card) = held.item_mut()
        {
            let cap = card.countdown.read(max, card.served.saturating_add(1));
            if card.announced_cap.replace(cap) != Some(cap) {
                held.announced_cap(cap);
            }
        }
    }

    /// The response says that the connection closes after it, perhaps because of the number of requests. Dials another
    /// one where one is wanted.
    pub(crate) fn said_close(&self, by_habit: bool) {
        let count = self.facts.served.saturating_add(1);
        let spare = self
            .held
            .as_ref()
            .and_then(|held| held.said_close(count, by_habit));
        if let Some(spare) = spare {
            start_spare(&self.shared, &self.origin, spare);
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(crate) fn facts(&self) -> &ConnectionFacts {
        &self.facts
    }

    /// The connection. `None` only after the lease was given away, which takes it by value.
    pub(crate) fn conn(&mut self) -> Option<&mut Conn> {
        self.held
            .as_mut()
            .and_then(PoolHeld::item_mut)
            .map(|card| &mut card.conn)
    }

    /// The connection, for its exchange. Whatever happens from now on, it does not go back as it was.
    pub(crate) fn begin(&mut self) -> Option<&mut Conn> {
        self.begun = true;
        self.conn()
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
        if let Some(card) = self.held.as_ref().and_then(PoolHeld::item) {
            card.conn.meter().close_because(reason);
        }
    }

    /// Gives the connection back: the next exchange may have it.
    pub(crate) fn put_back(mut self) {
        let Some(mut held) = self.held.take() else {
            return;
        };
        if let Some(card) = held.item_mut() {
            card.served = card.served.saturating_add(1);
        }
        held.put_back(self.facts.idle);
    }

    /// Closes the connection: what hyper still has to send is sent, within bounds.
    pub(crate) fn close(self, reason: CloseReason) {
        self.close_because(reason);
        self.leave_to_its_end();
    }

    /// Closes the connection where it stands, although hyper is still sending on it.
    pub(crate) fn abort(mut self, reason: CloseReason) {
        self.close_because(reason);
        if let Some(card) = self.take() {
            card.conn.abort();
        }
    }

    /// Lets go of a connection that has ended by itself; its task knows why.
    pub(crate) fn leave_to_its_end(mut self) {
        drop(self.take());
    }

    fn take(&mut self) -> Option<Card> {
        self.held.take().and_then(PoolHeld::leave)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.begun {
            // Goes back as it was.
            return;
        }
        // Counts only where no reason was given: the exchange was dropped.
        self.close_because(CloseReason::RequestDropped);
        if let Some(card) = self.take() {
            // Nobody wants the rest of the request to be sent, and a peer that does not read must not
            // keep the connection.
            card.conn.abort();
        }
    }
}

/// A dial that was begun for a request in line.
struct Dial {
    stage: Arc<Stage>,
    /// Brings the error. Closed without one once the connection has been handed over.
    failed: oneshot::Receiver<Error>,
}

/// Waits in line for whichever comes first: a connection that is given back, or a dial of its own.
///
/// `seat` is that of a connection that the same request had got and could not use. It is let go once the request is
/// in line, so that it is the first to have it.
///
/// # Cancel safety
///
/// Dropping the future leaves the line. What it had been given is passed on, its dial is finished and pooled.
async fn in_line(
    shared: &Arc<Shared>,
    origin: &Origin,
    wish: Wish,
    seat: Option<Arc<PoolSeat>>,
) -> Result<Lease, Error> {
    let (ear, mut news) = mpsc::unbounded_channel();
    let asks = Asks {
        who: Ear(ear),
        ticket: wish.ticket,
        need: wish.need,
        again: wish.again,
    };
    // Dropped before the news are: whoever leaves the line is told nothing more.
    let spot = match shared.desk.ask(origin, asks) {
        Asked::Reuse(held) => return Lease::new(shared, origin, held),
        Asked::InLine(spot) => spot,
        Asked::Overloaded => {
            return Err(Error::before_sending(ErrorKind::Overloaded, Phase::Queue));
        }
        Asked::Closed => return Err(pool_closed()),
    };
    drop(seat);
    let asked = now();
    let mut dial: Option<Dial> = None;
    let out_of_patience = async {
        match wish.until {
            Some((until, kind)) => {
                sleep_until(until).await;
                kind
            }
            None => pending().await,
        }
    };
    tokio::pin!(out_of_patience);
    loop {
        let heard = tokio::select! {
            biased;
            // Out of line without news: the dial has failed, and its error is on its way.
            Some(heard) = news.recv() => Some(heard),
            ended = dial_ended(&mut dial) => match ended {
                Some(error) => return Err(error),
                // Out of line: by what it has brought, or by a connection that came back, of which another
                // thread is about to tell. Nobody is left to tell anything only where its runtime is gone.
                None => news.recv().await,
            },
            kind = &mut out_of_patience => {
                let phase = dial.map_or(Phase::Queue, |dial| dial.stage.phase());
                let error = Error::before_sending(kind, phase);
                return Err(match spot.give_up() {
                    Some(failure) => error.with_source(failure),
                    None => error,
                });
            }
        };
        match heard {
            Some(News::Connection(held)) => {
                if spot.too_old() {
                    shared.counters.distrusted(now() - asked);
                }
                return Lease::new(shared, origin, held);
            }
            Some(News::MayDial(permit)) => dial = Some(start_dial(shared, origin, permit, false)),
            // That is for dials.
            Some(News::Begin | News::Call(_)) => {}
            Some(News::Closed) => return Err(pool_closed()),
            None => {
                let error = Error::before_sending(ErrorKind::Connect, Phase::Connect);
                return Err(error.with_source("the task that dialled ended: its runtime was shut down, or the resolver panicked"));
            }
        }
    }
}

async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

fn pool_closed() -> Error {
    Error::before_sending(ErrorKind::PoolClosed, Phase::Prepare)
}

async fn dial_ended(dial: &mut Option<Dial>) -> Option<Error> {
    match dial {
        Some(dial) => (&mut dial.failed).await.ok(),
        None => pending().await,
    }
}

fn start_dial(shared: &Arc<Shared>, origin: &Origin, permit: PoolPermit, is_spare: bool) -> Dial {
    let reports = permit.reports();
    let stage = Arc::new(Stage::reporting(move |sign| match sign {
        Sign::Connected(took) => reports.connected(took),
        Sign::Lost => reports.lost(),
    }));
    let (failing, failed) = oneshot::channel();
    let dial = dial(
        Arc::clone(shared),
        origin.clone(),
        permit,
        Arc::clone(&stage),
        failing,
        is_spare,
    );
    // The span of a request is not kept open beyond it.
    let dial = match is_spare {
        true => dial.instrument(Span::none()),
        false => dial.in_current_span(),
    };
    tokio::spawn(async move {
        if let Some(proof) = dial.await {
            proof.wait().await;
        }
    });
    Dial { stage, failed }
}

/// Dials because another connection is near its end. Nobody waits for it: what it brings is pooled.
fn start_spare(shared: &Arc<Shared>, origin: &Origin, permit: PoolPermit) {
    Counters::add(&shared.counters.dialed_ahead);
    drop(start_dial(shared, origin, permit, true));
}

/// How long a dial goes on that nobody waits for any more: it may still be of use, and a lost SYN comes again
/// after a second; but requests that are given up one after the other must not pile up dials into a void.
const LOST_DIAL_PATIENCE: Duration = Duration::from_secs(2);

async fn dial(
    shared: Arc<Shared>,
    origin: Origin,
    permit: PoolPermit,
    stage: Arc<Stage>,
    mut failing: oneshot::Sender<Error>,
    is_spare: bool,
) -> Option<Proof> {
    let dialer = &shared.config.dialer;
    let result = tokio::select! {
        biased;
        result = dialer.dial(&origin, &shared.counters, &stage, turn(&permit, &stage)) => result,
        () = lost(&shared, &mut failing, is_spare, &stage) => return None,
    };
    if stage.addresses_retired() {
        shared.desk.sweep(&origin);
    }
    match result {
        Ok(dialed) => {
            let first_byte = dialed.conn.meter().first_byte_received();
            let socket = dialed.conn.socket().clone();
            // The dial has looked after TCP's handshake; a plain one has sent nothing since.
            if origin.is_https() && Conn::has_lost(&socket) == Some(true) {
                permit.reports().lost();
            }
            let card = open(&shared, &origin, &permit, dialed);
            let unproven = permit.opened(card, origin.is_https())?;
            Some(Proof {
                unproven,
                first_byte,
                socket,
            })
        }
        Err(error) => {
            Counters::add(&shared.counters.dials_failed);
            permit.failed(DialFailure::of(&error));
            // Whoever has been served otherwise does not hear of it.
            let _ = failing.send(error);
            None
        }
    }
}

/// How long a connection on which the server has sent nothing says anything of how the server accepts. By then the
/// kernel has repeated twice what was lost.
const PROOF_PATIENCE: Duration = Duration::from_secs(1);

/// After so long the kernel has repeated a request that got no acknowledgement, so that a loss can be seen.
const FIRST_REPEAT: Duration = Duration::from_millis(250);

/// A connection on which the server has sent nothing yet.
struct Proof {
    unproven: PoolUnproven,
    first_byte: FirstByteReceived,
    socket: Weak<Socket>,
}

impl Proof {
    /// Waits for the first byte, or for a sign that something was lost.
    async fn wait(self) {
        let has_lost = || Conn::has_lost(&self.socket) == Some(true);
        let mut proof = timeout(FIRST_REPEAT, self.first_byte.wait()).await;
        if proof.is_err() && !has_lost() {
            proof = timeout(PROOF_PATIENCE - FIRST_REPEAT, self.first_byte.wait()).await;
        }
        if has_lost() {
            self.unproven.lost();
        } else if proof == Ok(true) {
            self.unproven.proven();
        }
    }
}

/// Waits until the dial may connect.
async fn turn(permit: &PoolPermit, stage: &Stage) {
    if permit.enter() {
        return;
    }
    let (ear, mut news) = mpsc::unbounded_channel();
    stage.wait(true);
    permit.knock(Ear(ear));
    let mut call = None;
    loop {
        tokio::select! {
            biased;
            heard = news.recv() => match heard {
                Some(News::Call(at)) => call = Some(at),
                // Nobody is left to tell it only where the pool is gone.
                _ => return stage.wait(false),
            },
            () = reached(call) => {
                call = None;
                permit.call();
            }
        }
    }
}

/// Resolves when a dial that nobody waits for has gone on for long enough. One that still waits for its turn is not
/// wanted at all any more, but for a spare one.
async fn lost(
    shared: &Shared,
    failing: &mut oneshot::Sender<Error>,
    is_spare: bool,
    stage: &Stage,
) {
    failing.closed().await;
    let is_idle = async {
        match is_spare {
            true => pending().await,
            false => stage.waiting().await,
        }
    };
    tokio::select! {
        () = is_idle => {}
        () = sleep(LOST_DIAL_PATIENCE) => {}
        () = shared.desk.closed() => {}
    }
}

/// Starts the task of a new connection.
fn open(shared: &Arc<Shared>, origin: &Origin, permit: &PoolPermit, dialed: Dialed) -> Card {
    tracing::debug!(
        server.address = origin.host(),
        server.port = origin.port(),
        network.peer.address = dialed.peer.map(|peer| tracing::field::display(peer.ip())),
        network.peer.port = dialed.peer.map(|peer| peer.port()),
        tls.resumed = dialed.handshake.map(|kind| kind == Handshake::Resumed),
        took = ?dialed.timings.total(),
        "connection opened"
    );
    let config = &shared.config;
    let lifetime = config.max_lifetime.map(jittered);
    let seat = permit.seat();
    shared.enlist(seat.id(), dialed.conn.stop());
    let kept = Kept {
        origin: origin.clone(),
        shared: Arc::downgrade(shared),
        seat: Arc::clone(seat),
        patience: config.idle_timeout.into_iter().chain(lifetime).min(),
    };
    let meter = Arc::clone(dialed.conn.meter());
    tokio::spawn(keep(dialed.driver, kept, meter));
    Card {
        conn: dialed.conn,
        peer: dialed.peer,
        address: dialed.address,
        dial: dialed.timings,
        handshake: dialed.handshake,
        served: 0,
        announced: None,
        countdown: Countdown::default(),
        announced_cap: None,
        most: config.max_requests_per_connection,
        born: stamp(),
        lifetime,
        seat: Arc::clone(seat),
    }
}

/// Up to a tenth more or less, so that what was opened together does not end together.
fn jittered(lifetime: Duration) -> Duration {
    lifetime.mul_f64(0.9 + 0.2 * fastrand::f64())
}
