//! A payment server that pays once a key, with the faults that make keys necessary.
//!
//! Follows draft-ietf-httpapi-idempotency-key-header: a key counts for one account and one operation,
//! and its first answer is kept in the same SQLite transaction as the payment itself.
//!
//! | Request | Answer |
//! |---|---|
//! | `GET /hello` | 200 `hello` |
//! | `POST /hello`, `POST /upload` | 200; takes up to 1 MiB, pays nothing |
//! | `GET /idempotency` | 200; how keys are treated, for people |
//! | `GET /payments` | 200 `{"payments":N,"requests":M,"connections":C}` |
//! | `POST /payments`, `POST /payouts` | 201, or 402 above the limit; `amount=10` is a whole body |
//! | `POST /payments?lose=1` | pays, then closes without an answer (FIN) |
//! | `POST /payments?lose=rst` | pays, then resets the connection |
//! | `POST /payments?lose=early` | closes before the body is read; pays nothing |
//!
//! On Linux, [`PaymentServer::cross`] has a close cross a request.
//!
//! A lost answer is lost once: the same key finds it stored and gets it replayed.

mod claim;
mod connection;
mod crossing;
mod key;
mod payment;
mod problem;
mod routes;
mod store;
mod stream;
#[cfg(test)]
mod tests;
mod wire;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use connection::{Service, serve};
pub(crate) use crossing::Crossing;
use routes::{Shared, Tally, router};
use store::{Store, StoreError};
pub(crate) use stream::Certificates;
pub(crate) use wire::RaceServer;

/// What can go wrong before a server runs.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How a [`PaymentServer`] is started.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The SQLite file. Made if absent; what it holds is kept.
    pub(crate) database: PathBuf,
    /// Serves https with this; see [`Certificates::server_config`].
    pub(crate) tls: Option<Arc<ServerConfig>>,
    /// Closes a connection on which no request arrives for this long.
    pub(crate) idle_timeout: Option<Duration>,
    /// Answers 400 to a payment without a key.
    pub(crate) require_keys: bool,
    /// How long an answer is kept, in whole seconds; zero: it expires at once.
    pub(crate) retention: Duration,
    /// How long to wait for another process that writes to the file, before a 503.
    pub(crate) lock_timeout: Duration,
}

impl Options {
    /// http, no idle timeout, keys optional, answers kept for 24 h (longer than any client retries),
    /// 5 s for the lock (SQLite's usual value).
    pub(crate) fn new(database: impl Into<PathBuf>) -> Self {
        Self {
            database: database.into(),
            tls: None,
            idle_timeout: None,
            require_keys: false,
            retention: Duration::from_secs(24 * 60 * 60),
            lock_timeout: Duration::from_secs(5),
        }
    }
}

/// A running server. Stops when it is dropped; [`PaymentServer::stop`] also waits for it.
#[derive(Debug)]
pub(crate) struct PaymentServer {
    address: SocketAddr,
    base_url: String,
    shared: Arc<Shared>,
    crossings: broadcast::Sender<crossing::Announced>,
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
}

/// What a [`PaymentServer`] has seen, and what its database holds.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Counts {
    /// TCP connections accepted.
    pub(crate) connections: u64,
    /// TLS handshakes that exchanged certificates.
    pub(crate) full_handshakes: u64,
    /// TLS handshakes that resumed an earlier session.
    pub(crate) resumed_handshakes: u64,
    /// Request heads read, whatever became of them.
    pub(crate) requests: u64,
    /// Payments in the ledger, over all accounts; a declined one is none.
    pub(crate) payments: u64,
    /// Answers kept under a key.
    pub(crate) stored_answers: u64,
}

impl PaymentServer {
    /// Opens the database and listens on a free port of the loopback address.
    ///
    /// # Errors
    /// When the database cannot be opened, or no port is free.
    pub(crate) async fn start(options: Options) -> Result<Self, BoxError> {
        let Options {
            database,
            tls,
            idle_timeout,
            require_keys,
            retention,
            lock_timeout,
        } = options;
        // Blocks, once, before anything is served.
        let store = Store::open(&database, lock_timeout)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let base_url = wire::base_url(address, tls.is_some());
        let shared = Arc::new(Shared {
            store,
            require_keys,
            retention_seconds: i64::try_from(retention.as_secs())?,
            running: claim::Running::default(),
            tally: Tally::default(),
        });
        let (crossings, _) = broadcast::channel(1);
        let service = Service {
            router: router(shared.clone()),
            shared: shared.clone(),
            tls,
            idle_timeout,
            crossings: crossings.clone(),
        };
        let (stop, stopped) = watch::channel(());
        let accepting = tokio::spawn(accept(listener, service, stopped));
        Ok(Self {
            address,
            base_url,
            shared,
            crossings,
            stop,
            accepting,
        })
    }

    /// Where it listens; for clients that speak TCP themselves.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Scheme, host and port, without a slash at the end.
    pub(crate) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Counts now.
    pub(crate) async fn counts(&self) -> Result<Counts, StoreError> {
        let (payments, stored_answers) = self.shared.store.counts().await?;
        let tally = &self.shared.tally;
        Ok(Counts {
            connections: tally.connections.load(Ordering::Relaxed),
            full_handshakes: tally.full_handshakes.load(Ordering::Relaxed),
            resumed_handshakes: tally.resumed_handshakes.load(Ordering::Relaxed),
            requests: tally.requests.load(Ordering::Relaxed),
            payments,
            stored_answers,
        })
    }

    /// Stops hearing what comes on its open connections, and closes them when the result is dropped.
    ///
    /// They should be idle; a running request would end without an answer.
    ///
    /// # Errors
    /// When it is not on Linux.
    pub(crate) async fn cross(&self) -> io::Result<Crossing> {
        Crossing::begin(&self.crossings).await
    }

    /// Replaces expired keys by tombstones and says how many.
    #[cfg_attr(
        not(test),
        expect(
            dead_code,
            reason = "for a server that outlives its keys; the scenes' live for seconds"
        )
    )]
    pub(crate) async fn purge(&self) -> Result<usize, StoreError> {
        self.shared.store.purge().await
    }

    /// Stops accepting, lets running requests finish for up to a second, and waits for that.
    pub(crate) async fn stop(self) {
        drop(self.stop);
        // A panic in there was printed by its own thread.
        let _ = self.accepting.await;
    }
}

async fn accept(listener: TcpListener, service: Service, mut stop: watch::Receiver<()>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => {
                    service.shared.tally.connections.fetch_add(1, Ordering::Relaxed);
                    connections.spawn(serve(service.clone(), socket, stop.clone()));
                }
                // Out of descriptors, most likely: let some be closed.
                Err(_) => sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
            _ = stop.changed() => break,
        }
    }
    drop(listener);
    let finish = async { while connections.join_next().await.is_some() {} };
    let _ = timeout(Duration::from_secs(1), finish).await;
}
