//! Opens connections: name resolution, TCP to the first address that answers, TLS.
//!
//! Addresses are raced as [RFC 8305] says: families interleaved, the next one started 250 ms after the
//! one before or as soon as that has failed, the first to connect wins. Only connections race, never
//! requests. One time limit covers all of it.
//!
//! [RFC 8305]: https://www.rfc-editor.org/rfc/rfc8305.html

use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::clock::now;
use crate::error::{Error, ErrorKind, Phase};
use crate::origin::Origin;
use crate::stats::Counters;
use crate::timings::{DialTimings, Handshake};
use crate::wire::http1::{Conn, Driver, establish};
use crate::wire::meter::{Meter, Metered};
use crate::wire::socket::SocketOptions;
use crate::wire::tls::{Stream, TlsClient};

/// Opens connections for a pool.
#[derive(Clone, Debug)]
pub(crate) struct Dialer {
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) options: SocketOptions,
    pub(crate) tls: TlsClient,
}

/// A connection that was just opened.
#[derive(Debug)]
pub(crate) struct Dialed {
    pub(crate) conn: Conn,
    pub(crate) driver: Driver,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) timings: DialTimings,
    pub(crate) handshake: Option<Handshake>,
}

impl Dialer {
    /// Opens a connection to the origin.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up whatever was being opened.
    pub(crate) async fn dial(
        &self,
        origin: &Origin,
        counters: &Arc<Counters>,
        stage: &Stage,
    ) -> Result<Dialed, Error> {
        let dialing = self.dial_without_limit(origin, counters, stage);
        let Some(limit) = self.connect_timeout else {
            return dialing.await;
        };
        match timeout(limit, dialing).await {
            Ok(result) => result,
            Err(elapsed) => {
                let error = Error::before_sending(ErrorKind::ConnectTimeout, stage.phase());
                Err(error.with_source(elapsed))
            }
        }
    }

    async fn dial_without_limit(
        &self,
        origin: &Origin,
        counters: &Arc<Counters>,
        stage: &Stage,
    ) -> Result<Dialed, Error> {
        let started = now();
        stage.enter(Phase::Resolve);
        let addresses = resolve(origin).await?;
        let resolved = now();

        stage.enter(Phase::Connect);
        let socket = connect(addresses).await.map_err(|error| {
            Error::before_sending(ErrorKind::Connect, Phase::Connect).with_source(error)
        })?;
        self.options.apply(&socket);
        let connected = now();

        let meter = Meter::new(Arc::clone(counters), origin.is_https());
        let stream = Metered::new(socket, Arc::clone(&meter));
        let shared = Arc::clone(stream.socket());
        let peer = stream.peer_addr();
        let mut timings = DialTimings {
            resolve: resolved - started,
            connect: connected - resolved,
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
            timings,
            handshake,
        })
    }
}

/// Where a dial is, readable after it was dropped by its time limit.
#[derive(Debug, Default)]
pub(crate) struct Stage(AtomicU8);

impl Stage {
    fn enter(&self, phase: Phase) {
        self.0.store(phase as u8, Relaxed);
    }

    pub(crate) fn phase(&self) -> Phase {
        let reached = self.0.load(Relaxed);
        let stages = [Phase::Resolve, Phase::Connect, Phase::Handshake];
        let found = stages.into_iter().find(|&phase| phase as u8 == reached);
        found.unwrap_or(Phase::Resolve)
    }
}

async fn resolve(origin: &Origin) -> Result<Vec<SocketAddr>, Error> {
    if let Ok(address) = origin.host().parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, origin.port())]);
    }
    let failed = |source: io::Error| {
        Error::before_sending(ErrorKind::Resolve, Phase::Resolve).with_source(source)
    };
    let found = tokio::net::lookup_host((origin.host(), origin.port())).await;
    let addresses = interleave(found.map_err(failed)?);
    if addresses.is_empty() {
        return Err(failed(io::Error::new(
            io::ErrorKind::NotFound,
            "no address",
        )));
    }
    Ok(addresses)
}

/// Alternates between the families, beginning with that of the first address: the resolver's
/// preference (RFC 8305 section 4).
fn interleave(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut addresses = addresses.peekable();
    let Some(first_is_v6) = addresses.peek().map(SocketAddr::is_ipv6) else {
        return Vec::new();
    };
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.partition(|address| address.is_ipv6() == first_is_v6);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut order = Vec::new();
    loop {
        let pair = (first.next(), second.next());
        if pair == (None, None) {
            return order;
        }
        order.extend(pair.0);
        order.extend(pair.1);
    }
}

/// RFC 8305 section 5: the recommended delay between two attempts.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

type Attempt = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>;

/// Connects to the first address that answers. The error is that of the last one that did not.
async fn connect(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut waiting = addresses.into_iter();
    let mut running: Vec<Attempt> = Vec::new();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no address");
    loop {
        let more = match waiting.next() {
            Some(address) => {
                running.push(Box::pin(TcpStream::connect(address)));
                waiting.len() > 0
            }
            None if running.is_empty() => return Err(last),
            None => false,
        };
        let next_start = async {
            if more {
                sleep(ATTEMPT_DELAY).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            result = first_to_end(&mut running) => match result {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            },
            () = next_start => {}
        }
    }
}

/// Resolves when one of the attempts has ended, and takes it out.
async fn first_to_end(running: &mut Vec<Attempt>) -> io::Result<TcpStream> {
    poll_fn(|cx| {
        for at in 0..running.len() {
            if let Poll::Ready(result) = running[at].as_mut().poll(cx) {
                drop(running.remove(at));
                return Poll::Ready(result);
            }
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        let parse = |text: &&str| SocketAddr::new(text.parse().expect("an address"), 80);
        list.iter().map(parse).collect()
    }

    #[test]
    fn families_alternate_from_the_resolvers_first() {
        let found = addresses(&["::1", "::2", "::3", "127.0.0.1", "127.0.0.2"]);
        let order = addresses(&["::1", "127.0.0.1", "::2", "127.0.0.2", "::3"]);
        assert_eq!(interleave(found.into_iter()), order);
    }

    #[tokio::test]
    async fn a_refused_address_is_followed_by_the_next_at_once() {
        let live = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("bind");
        let dead = {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
                .await
                .expect("bind");
            listener.local_addr().expect("address")
        };
        let live = live.local_addr().expect("address");
        let stream = connect(vec![dead, live]).await.expect("the second answers");
        assert_eq!(stream.peer_addr().expect("peer"), live);
    }

    #[tokio::test]
    async fn when_no_address_answers_the_error_is_the_last_ones() {
        let dead = {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
                .await
                .expect("bind");
            listener.local_addr().expect("address")
        };
        let error = connect(vec![dead, dead])
            .await
            .expect_err("nobody is there");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
