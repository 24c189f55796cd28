//! Opens connections: name resolution, TCP to the first address that answers, TLS.
//!
//! Addresses are raced as [RFC 8305] says: the next one started 250 ms after the one before or as soon as that
//! has failed, the first to connect wins. In which order they are tried is decided in `rules/addresses.rs`. An
//! attempt that was started goes on until it ends by itself or another one has won: no address has a time limit
//! of its own. Only connections race, never requests. One time limit covers all of it.
//!
//! The last address may get a second attempt beside the first, 250 ms later: where a handshake is known to take far
//! less, the SYN was lost, and the kernel repeats it only after a second. Further away only the loss is reported.
//!
//! Between the look-up and the first SYN a dial waits for its turn, which is not its to say.
//!
//! # Invariants
//!
//! * A dial holds the [`Address`] of each attempt from before it starts until it has ended; the connection that
//!   comes of it holds its own from then on.
//! * At most one socket leaves a dial. Whatever else was connected is closed when the dial ends.
//! * TCP Fast Open stays off: data in a SYN may be delivered twice ([RFC 7413 section 6.3.1]).
//! * The lock of the books is held for arithmetic only, never over an `await`.
//!
//! [RFC 7413 section 6.3.1]: https://www.rfc-editor.org/rfc/rfc7413.html#section-6.3.1
//! [RFC 8305]: https://www.rfc-editor.org/rfc/rfc8305.html

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use crate::clock::{Instant, now};
use crate::error::{Error, ErrorKind, Phase};
use crate::origin::Origin;
use crate::rules::addresses::{Address, Book, Order};
use crate::rules::split::Split;
use crate::stats::{CloseReason, Counters};
use crate::timings::{DialTimings, Handshake};
use crate::wire::http1::{Conn, Driver, establish};
use crate::wire::meter::{Meter, Metered};
use crate::wire::resolve::Resolver;
use crate::wire::socket::{SocketOptions, tcp_state};
use crate::wire::tls::{Stream, TlsClient};

/// Opens connections for a pool. Clones share what is known of the addresses.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    connect_timeout: Option<Duration>,
    options: SocketOptions,
    tls: TlsClient,
    resolver: Resolver,
    books: Books,
}

/// A connection that was just opened.
#[derive(Debug)]
pub(crate) struct Dialed {
    pub(crate) conn: Conn,
    pub(crate) driver: Driver,
    pub(crate) peer: Option<SocketAddr>,
    /// To be held for as long as the connection is open: that is how connections to an address are counted.
    pub(crate) address: Arc<Address>,
    pub(crate) timings: DialTimings,
    pub(crate) handshake: Option<Handshake>,
}

/// A socket that has just connected, and what that took.
#[derive(Debug)]
struct Opened<T> {
    socket: T,
    address: Arc<Address>,
    resolve: Duration,
    connect: Duration,
    /// Of this, the attempt that has won.
    attempt: Duration,
}

/// What a dial has tried, for whoever takes the outcome down once it is over, however it ended.
#[derive(Debug, Default)]
struct Progress {
    tried: Vec<SocketAddr>,
    connected: Option<SocketAddr>,
}

impl Dialer {
    pub(crate) fn new(
        connect_timeout: Option<Duration>,
        options: SocketOptions,
        tls: TlsClient,
        resolver: Resolver,
    ) -> Self {
        Dialer {
            connect_timeout,
            options,
            tls,
            resolver,
            books: Books::default(),
        }
    }

    /// Opens a connection to the origin: looks its name up, waits for its `turn`, connects. `stage` tells whoever else has
    /// it how far that is. The wait is no part of the connect timeout.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up whatever was being opened.
    pub(crate) async fn dial(
        &self,
        origin: &Origin,
        counters: &Arc<Counters>,
        stage: &Stage,
        turn: impl Future<Output = ()>,
    ) -> Result<Dialed, Error> {
        let finish = |opened| self.finish(origin, counters, stage, opened);
        self.dial_by(origin, stage, turn, connect_tcp, finish).await
    }

    /// Retires all addresses of the origin, so that what is open to them now carries no further request. A later
    /// dial begins with a new answer of the resolver and without a memory of failures.
    pub(crate) fn evict(&self, origin: &Origin) {
        self.books.evict(origin);
    }

    /// Whether the origin is known to send its responses in two parts.
    pub(crate) fn splits(&self, origin: &Origin) -> bool {
        let books = self.books.lock();
        books
            .get(origin)
            .is_some_and(|known| known.split.is_known())
    }

    /// A dial, whatever connects and whatever makes a connection of the result: tests have no need of a network.
    async fn dial_by<T, C, D, F>(
        &self,
        origin: &Origin,
        stage: &Stage,
        turn: impl Future<Output = ()>,
        connect: impl Fn(SocketAddr) -> C,
        finish: impl FnOnce(Opened<T>) -> F,
    ) -> Result<D, Error>
    where
        C: Future<Output = io::Result<T>>,
        F: Future<Output = Result<D, Error>>,
    {
        let asked = now();
        let limit = self.connect_timeout;
        let order = within(limit, stage, self.look_up(origin, stage, &[])).await?;
        let resolve = now() - asked;
        turn.await;
        let mut progress = Progress::default();
        let dialing = async {
            let opened = self.open(origin, order, resolve, stage, &mut progress, &connect);
            finish(opened.await?).await
        };
        let left = limit.map(|limit| limit.saturating_sub(resolve));
        let result = within(left, stage, dialing).await;
        match (&result, progress.connected) {
            (Ok(_), Some(socket)) => self.books.worked(origin, socket),
            // It accepts connections and does nothing with them.
            (Err(_), Some(socket)) => self.books.failed(origin, &[socket]),
            // Some of them were still being connected to when the time was over: they failed by that.
            (_, None) => self.books.failed(origin, &progress.tried),
        }
        result
    }

    /// TCP, after a resolution that took so long. When no address of the answer can be connected to, the name may lead
    /// elsewhere by now, so it is resolved once more, for addresses that were not tried yet.
    async fn open<T, C>(
        &self,
        origin: &Origin,
        order: Order,
        resolve: Duration,
        stage: &Stage,
        progress: &mut Progress,
        connect: &impl Fn(SocketAddr) -> C,
    ) -> Result<Opened<T>, Error>
    where
        C: Future<Output = io::Result<T>>,
    {
        let started = now();
        let mut again_for = Duration::ZERO;
        stage.enter(Phase::Connect);
        let mut result = self.race(origin, order, stage, progress, connect).await;
        if result.is_err() && literal(origin).is_none() {
            let asked = now();
            let again = self.look_up(origin, stage, &progress.tried).await;
            again_for = now() - asked;
            stage.enter(Phase::Connect);
            // Where that brings nothing new, what went wrong before stands.
            if let Ok(order) = again
                && !order.is_empty()
            {
                result = self.race(origin, order, stage, progress, connect).await;
            }
        }
        let (socket, address, attempt) = result.map_err(|error| {
            Error::before_sending(ErrorKind::Connect, Phase::Connect).with_source(error)
        })?;
        Ok(Opened {
            socket,
            address,
            resolve: resolve + again_for,
            connect: (now() - started).saturating_sub(again_for),
            attempt,
        })
    }

    /// Resolves the origin's name and says in which order to try the addresses that were not tried yet.
    async fn look_up(
        &self,
        origin: &Origin,
        stage: &Stage,
        tried: &[SocketAddr],
    ) -> Result<Order, Error> {
        stage.enter(Phase::Resolve);
        let failed = |source: io::Error| {
            Error::before_sending(ErrorKind::Resolve, Phase::Resolve).with_source(source)
        };
        let asked = now();
        let found = match literal(origin) {
            Some(address) => vec![address],
            None => {
                let resolving = self.resolver.resolve(origin.host(), origin.port());
                resolving.await.map_err(failed)?
            }
        };
        if found.is_empty() {
            return Err(failed(io::Error::new(
                io::ErrorKind::NotFound,
                "no address",
            )));
        }
        let (order, any_gone) = self.books.answer(origin, &found, asked, tried);
        if any_gone {
            stage.note_retired();
        }
        Ok(order)
    }

    /// Connects to the first address that answers. The error is that of the last one that did not.
    async fn race<T, C>(
        &self,
        origin: &Origin,
        mut order: Order,
        stage: &Stage,
        progress: &mut Progress,
        connect: &impl Fn(SocketAddr) -> C,
    ) -> io::Result<(T, Arc<Address>, Duration)>
    where
        C: Future<Output = io::Result<T>>,
    {
        let mut running: Vec<Attempt<C>> = Vec::new();
        let mut last = io::Error::new(io::ErrorKind::NotFound, "no address");
        let mut may_be_lost = true;
        let mut is_late = false;
        loop {
            // Of the attempt before: another one that begins now has its own time.
            let was_late = std::mem::take(&mut is_late);
            let next = match order.next() {
                None if was_late && may_be_lost => {
                    // The last one is being tried for longer than a handshake takes there.
                    match (running.last(), self.books.handshake(origin)) {
                        (Some(attempt), Some(handshake)) => {
                            let patience = ATTEMPT_DELAY.max(4 * handshake);
                            let is_lost = now() >= attempt.started + patience;
                            may_be_lost = !is_lost;
                            if is_lost {
                                stage.report(Sign::Lost);
                            }
                            let again = is_lost && handshake <= NEAR;
                            again.then(|| Arc::clone(&attempt.address))
                        }
                        _ => None,
                    }
                }
                next => next,
            };
            if let Some(address) = next {
                let socket = address.socket_addr();
                progress.tried.push(socket);
                running.push(Attempt {
                    address,
                    started: now(),
                    connecting: Box::pin(connect(socket)),
                });
            } else if running.is_empty() {
                return Err(last);
            }
            let more = !order.is_empty() || may_be_lost;
            let next_start = async {
                if more {
                    sleep(ATTEMPT_DELAY).await;
                } else {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                biased;
                (ended, result) = first_to_end(&mut running) => match result {
                    Ok(socket) => {
                        progress.connected = Some(ended.address.socket_addr());
                        // Who lost in spite of a whole delay's start is tried last for a while, as if it had failed.
                        // Else a black hole at the head of the list would delay every dial.
                        let is_overtaken = |other: &&Attempt<C>| {
                            ended.started.saturating_duration_since(other.started) >= ATTEMPT_DELAY
                                && other.address.socket_addr() != ended.address.socket_addr()
                        };
                        let overtaken = running.iter().filter(is_overtaken);
                        let overtaken: Vec<_> = overtaken.map(|other| other.address.socket_addr()).collect();
                        self.books.failed(origin, &overtaken);
                        return Ok((socket, ended.address, now() - ended.started));
                    }
                    Err(error) => {
                        self.books.failed(origin, &[ended.address.socket_addr()]);
                        last = error;
                    }
                },
                () = next_start => is_late = true,
            }
        }
    }

    /// Makes a connection of a socket: options, TLS, hyper's handshake, which does no I/O.
    async fn finish(
        &self,
        origin: &Origin,
        counters: &Arc<Counters>,
        stage: &Stage,
        opened: Opened<TcpStream>,
    ) -> Result<Dialed, Error> {
        let Opened {
            socket,
            address,
            resolve,
            connect,
            attempt,
        } = opened;
        let state = tcp_state(&socket);
        if state.is_some_and(|state| state.has_lost) {
            stage.report(Sign::Lost);
        } else {
            // The kernel knows it better than a task that may have been woken late.
            let handshake = state.map(|state| state.rtt).filter(|rtt| !rtt.is_zero());
            let handshake = handshake.unwrap_or(attempt);
            self.books.connected(origin, handshake);
            stage.report(Sign::Connected(handshake));
        }
        self.options.apply(&socket);
        let meter = Meter::new(Arc::clone(counters), origin.is_https());
        meter.learn(origin, self.books.split(origin));
        let stream = Metered::new(socket, Arc::clone(&meter));
        let shared = Arc::clone(stream.socket());
        let peer = stream.peer_addr();
        let mut timings = DialTimings {
            resolve,
            connect,
            handshake: Duration::ZERO,
            round_trips: 1,
        };
        let mut handshake = None;
        let stream = if origin.is_https() {
            stage.enter(Phase::Handshake);
            let (stream, secured) = self.tls.secure(origin, stream, Arc::clone(&meter)).await?;
            timings.handshake = secured.took;
            timings.round_trips += secured.round_trips;
            handshake = Some(secured.handshake);
            stream
        } else {
            Stream::plain(stream, Arc::clone(&meter))
        };
        let (conn, driver) = establish(stream, shared, Arc::clone(&meter), origin.is_https())
            .await
            .map_err(|error| {
                Error::before_sending(ErrorKind::Connect, Phase::Connect).with_source(error)
            })?;
        meter.open(handshake.map(|kind| kind == Handshake::Resumed));
        Ok(Dialed {
            conn,
            driver,
            peer,
            address,
            timings,
            handshake,
        })
    }
}

/// A handshake that takes no longer than this is far shorter than the delay after which a second attempt begins.
const NEAR: Duration = Duration::from_millis(30);

/// A part of a dial, within what is left of its time.
async fn within<T>(
    limit: Option<Duration>,
    stage: &Stage,
    part: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match limit {
        None => part.await,
        Some(limit) => timeout(limit, part).await.unwrap_or_else(|elapsed| {
            let error = Error::before_sending(ErrorKind::ConnectTimeout, stage.phase());
            Err(error.with_source(elapsed))
        }),
    }
}

/// RFC 8305 section 5: the recommended delay between two attempts.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Nothing is set before connecting, TCP Fast Open least of all.
async fn connect_tcp(to: SocketAddr) -> io::Result<TcpStream> {
    TcpStream::connect(to).await
}

/// A connection that is being opened to one address.
struct Attempt<C> {
    address: Arc<Address>,
    started: Instant,
    connecting: Pin<Box<C>>,
}

/// Resolves when one of the attempts has ended, and takes it out.
async fn first_to_end<C: Future>(running: &mut Vec<Attempt<C>>) -> (Attempt<C>, C::Output) {
    poll_fn(|cx| {
        for at in 0..running.len() {
            if let Poll::Ready(result) = running[at].connecting.as_mut().poll(cx) {
                return Poll::Ready((running.remove(at), result));
            }
        }
        Poll::Pending
    })
    .await
}

/// The address of an origin whose host is one.
fn literal(origin: &Origin) -> Option<SocketAddr> {
    let address: IpAddr = origin.host().parse().ok()?;
    Some(SocketAddr::new(address, origin.port()))
}

/// What a dial shows of how the server takes connections.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Sign {
    /// TCP has shaken hands without a loss, which took so long.
    Connected(Duration),
    /// A packet was lost.
    Lost,
}

/// Where a dial is and what it found, readable by others than the one who waits for it, and after it was dropped.
#[derive(Default)]
pub(crate) struct Stage {
    phase: AtomicU8,
    addresses_retired: AtomicBool,
    waits: AtomicBool,
    changed: Notify,
    reports: Option<Box<dyn Fn(Sign) + Send + Sync>>,
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stage").field(&self.phase()).finish()
    }
}

impl Stage {
    /// Has told what the dial shows, as it shows.
    pub(crate) fn reporting(reports: impl Fn(Sign) + Send + Sync + 'static) -> Self {
        Stage {
            reports: Some(Box::new(reports)),
            ..Stage::default()
        }
    }

    fn report(&self, sign: Sign) {
        if let Some(reports) = &self.reports {
            reports(sign);
        }
    }

    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
    }

    /// What the dial is at: resolving before it has begun.
    pub(crate) fn phase(&self) -> Phase {
        let reached = self.phase.load(Relaxed);
        let stages = [Phase::Resolve, Phase::Connect, Phase::Handshake];
        let found = stages.into_iter().find(|&phase| phase as u8 == reached);
        found.unwrap_or(Phase::Resolve)
    }

    /// It waits for its turn, or waits no more.
    pub(crate) fn wait(&self, waits: bool) {
        self.waits.store(waits, Release);
        self.changed.notify_one();
    }

    /// Resolves while it waits for its turn. For one who asks.
    pub(crate) async fn waiting(&self) {
        while !self.waits.load(Acquire) {
            self.changed.notified().await;
        }
    }

    fn note_retired(&self) {
        self.addresses_retired.store(true, Release);
    }

    /// Whether the dial found out that addresses are gone: idle connections to them should close. It can find so
    /// and fail.
    pub(crate) fn addresses_retired(&self) -> bool {
        self.addresses_retired.load(Acquire)
    }
}

/// What is known of the addresses of each origin.
#[derive(Clone, Debug, Default)]
struct Books(Arc<Mutex<HashMap<Origin, Known>>>);

/// Books kept although nothing is open to their addresses any more, for what is known of failures; as many as
/// the pool keeps unused origins. Beyond this many those are forgotten.
const MAX_UNUSED_BOOKS: usize = 1024;

/// What is known of an origin.
#[derive(Debug, Default)]
struct Known {
    book: Book,
    split: Arc<Split>,
    /// How long the last TCP handshake took that lost nothing.
    handshake: Option<Duration>,
}

impl Books {
    fn lock(&self) -> MutexGuard<'_, HashMap<Origin, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in an answer. Returns what to try, and whether an address is gone by it.
    fn answer(
        &self,
        origin: &Origin,
        found: &[SocketAddr],
        asked: Instant,
        tried: &[SocketAddr],
    ) -> (Order, bool) {
        let mut books = self.lock();
        if books.len() >= MAX_UNUSED_BOOKS && !books.contains_key(origin) {
            books.retain(|_, known| known.book.is_used());
        }
        let book = &mut books.entry(origin.clone()).or_default().book;
        let now = now();
        let any_gone = book.answer(found, asked, now);
        (book.order(now, tried), any_gone)
    }

    fn failed(&self, origin: &Origin, sockets: &[SocketAddr]) {
        if sockets.is_empty() {
            return;
        }
        if let Some(known) = self.lock().get_mut(origin) {
            let now = now();
            for &socket in sockets {
                known.book.failed(socket, now);
            }
        }
    }

    fn worked(&self, origin: &Origin, socket: SocketAddr) {
        if let Some(known) = self.lock().get_mut(origin) {
            known.book.worked(socket);
        }
    }

    fn connected(&self, origin: &Origin, took: Duration) {
        if let Some(known) = self.lock().get_mut(origin) {
            known.handshake = Some(took);
        }
    }

    /// How long the last TCP handshake took that lost nothing.
    fn handshake(&self, origin: &Origin) -> Option<Duration> {
        self.lock().get(origin).and_then(|known| known.handshake)
    }

    fn evict(&self, origin: &Origin) {
        if let Some(mut known) = self.lock().remove(origin) {
            known.book.retire_all(CloseReason::Evicted);
        }
    }

    /// How the origin sends its responses, to be learnt by all connections to it together.
    fn split(&self, origin: &Origin) -> Arc<Split> {
        Arc::clone(&self.lock().entry(origin.clone()).or_default().split)
    }
}

#[cfg(test)]
#[path = "dial_tests.rs"]
mod tests;
