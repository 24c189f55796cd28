//! One connection of the payment server: hyper over it, and how it ends.
//!
//! To lose an answer, the service returns an error instead of a response. hyper then writes nothing and
//! gives the socket back, so that the end of the connection is decided in one place, [`serve`], and is
//! the same with and without TLS. The idle timeout comes the same way: as hyper's error, with the
//! socket still open, so that it can be closed as TLS wants it (hyper alone would just drop it, and a
//! client could not tell a finished server from a cut line).

use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{broadcast, watch};
use tokio::time::timeout;
use tower::ServiceExt;

use super::crossing::Announced;
use super::routes::{Loss, Shared};
use super::stream::Stream;

/// What every connection of a server is served with.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    pub(crate) router: Router,
    pub(crate) shared: Arc<Shared>,
    pub(crate) tls: Option<Arc<ServerConfig>>,
    pub(crate) idle_timeout: Option<Duration>,
    /// Where a [`Crossing`](super::Crossing) is announced.
    pub(crate) crossings: broadcast::Sender<Announced>,
}

/// Serves one connection to its end, or until the other side of `stop` is gone.
pub(crate) async fn serve(service: Service, socket: TcpStream, mut stop: watch::Receiver<()>) {
    let Service {
        router,
        shared,
        tls,
        idle_timeout,
        crossings,
    } = service;
    let mut crossings = crossings.subscribe();
    let accepted = tokio::select! {
        accepted = Stream::accept(socket, tls) => accepted,
        _ = stop.changed() => return,
    };
    // A failed handshake is the client's to report; nothing was asked of this server.
    let Ok(stream) = accepted else { return };
    match stream.resumed() {
        None => {}
        Some(false) => count(&shared.tally.full_handshakes),
        Some(true) => count(&shared.tally.resumed_handshakes),
    }

    let loss = Arc::new(OnceLock::new());
    let respond = service_fn(|request: hyper::Request<Incoming>| {
        count(&shared.tally.requests);
        let response = router.clone().oneshot(request);
        let loss = loss.clone();
        async move {
            let Ok(response) = response.await;
            match response.extensions().get::<Loss>() {
                None => Ok(response),
                Some(how) => {
                    // Never set twice: the first one ends the connection.
                    let _ = loss.set(*how);
                    Err(Lost)
                }
            }
        }
    });
    // hyper starts this clock whenever it waits for a request head, so it also measures idleness.
    let mut connection = Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_timeout)
        .serve_connection(TokioIo::new(stream), respond);
    let ended = tokio::select! {
        // An error ends the connection like anything else: below.
        _ = &mut connection => End::Over,
        _ = stop.changed() => End::Stopped,
        Ok(announced) = crossings.recv() => End::Crossing(announced),
    };
    if let End::Stopped = ended {
        Pin::new(&mut connection).graceful_shutdown();
        let _ = (&mut connection).await;
    }
    let stream = connection.into_parts().io.into_inner();
    match ended {
        End::Crossing(announced) => announced.obey(stream).await,
        End::Over | End::Stopped => close(stream, loss.get().copied()).await,
    }
}

/// Why a connection is served no longer.
enum End {
    Over,
    Stopped,
    Crossing(Announced),
}

/// Ends a connection as asked. Errors are of no interest: it is over either way.
async fn close(mut stream: Stream, loss: Option<Loss>) {
    if loss == Some(Loss::Rst) {
        // Straight to close(): a shutdown first would send a FIN.
        let _ = stream.socket().set_zero_linger();
        return;
    }
    let _ = timeout(PATIENCE, stream.shutdown()).await;
    if loss == Some(Loss::Fin) {
        // Unread bytes (a body that nobody asked for) would turn the close into a reset.
        let mut sink = [0; 4096];
        let drain = async { while matches!(stream.read(&mut sink).await, Ok(1..)) {} };
        let _ = timeout(PATIENCE, drain).await;
    }
}

fn count(counter: &std::sync::atomic::AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The service's way to say: end the connection, write nothing.
#[derive(Debug)]
struct Lost;

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the answer is lost on purpose")
    }
}

impl std::error::Error for Lost {}

/// How long a closing connection waits for its peer. Local peers answer in microseconds.
const PATIENCE: Duration = Duration::from_secs(1);
