//! From what hyper, the byte counter and the kernel say to one error: the only place that decides a
//! [`Delivery`], and the only one that looks into errors of hyper, rustls and the system.
//!
//! # The rule
//!
//! No byte taken, or the request handed back: `NotSent`. Some taken, and the kernel's evidence that none
//! was received ([`of_kernel`]): `NotReceived`. Everything else: `Unknown`. hyper's own words for the
//! failure (incomplete message, connection reset, broken pipe, body write aborted) depend on which side
//! noticed first and prove nothing, so they all become one kind.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use tokio::time::sleep;

use crate::clock::{Instant, now};
use crate::delivery::{Delivery, PeerEnd};
use crate::error::{Error, ErrorKind, Phase, Trace};
use crate::stats::CloseReason;
use crate::wire::meter::{Socket, Traffic};
use crate::wire::outgoing::Upload;
use crate::wire::socket::{Peek, tcp_state};

/// Which time limit of an exchange was over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Limit {
    /// That of the response head.
    Head,
    /// That of the whole request.
    Request,
    /// That of the first acknowledgement.
    Ack,
}

/// The error of an exchange that ended before its response head, from what hyper and the byte counters
/// say. What the kernel says comes on top: [`of_kernel`].
pub(crate) fn of_exchange(
    error: hyper::Error,
    traffic: Traffic,
    upload: &Upload,
    elapsed: Duration,
) -> Error {
    let kind = if upload.has_failed() {
        ErrorKind::RequestBody
    } else if error.is_parse() {
        ErrorKind::Protocol
    } else {
        ErrorKind::ConnectionClosed
    };
    of_traffic(kind, traffic, upload, elapsed).with_source(error)
}

/// The error of an exchange that ran into a time limit before its response head. The traffic has to be sealed:
/// else what was not taken yet might be taken still.
///
/// What the kernel acknowledged is shown where it was noted, and changes nothing: what was taken may arrive
/// whenever it likes.
pub(crate) fn of_limit(
    limit: Limit,
    traffic: Traffic,
    upload: &Upload,
    elapsed: Duration,
    socket: Option<&Socket>,
) -> Error {
    let kind = match limit {
        Limit::Head => ErrorKind::ResponseTimeout,
        Limit::Request => ErrorKind::RequestTimeout,
        Limit::Ack => ErrorKind::Unacknowledged,
    };
    let error = of_traffic(kind, traffic, upload, elapsed);
    let Some(socket) = socket else {
        return error;
    };
    let error = error.with_peer_end(socket.end());
    let state = traffic.acked_before.zip(tcp_state(socket.stream()));
    match state {
        Some((before, state)) => {
            let acked = state.acked.saturating_sub(before);
            error.with_bytes_acked(acked.min(traffic.taken))
        }
        None => error,
    }
}

fn of_traffic(kind: ErrorKind, traffic: Traffic, upload: &Upload, elapsed: Duration) -> Error {
    let phase = if upload.is_finished() {
        Phase::ResponseHead
    } else {
        Phase::Send
    };
    let delivery = if traffic.taken == 0 {
        Delivery::NotSent
    } else {
        Delivery::Unknown
    };
    Error::new(kind, phase)
        .with_delivery(delivery)
        .with_trace(Trace {
            taken: traffic.taken,
            acked: None,
            received: traffic.received,
            peer_end: None,
            elapsed: Some(elapsed),
        })
}

/// Adds to an error what the kernel knows of the request's delivery, which it may take a moment to learn.
///
/// # The rule
///
/// `NotReceived` where all of this holds, else what it was before:
///
/// 1. The connection closed before any byte of a response.
/// 2. Before the request's first byte nothing was outstanding, and the count of acknowledged bytes was
///    noted.
/// 3. The peer's FIN came before any reset. Unlike a reset, a FIN carries an acknowledgement that the
///    kernel processes.
/// 4. The connection then ended by a reset: the peer had closed for good, and nobody was left to read.
///    A peer that has only closed its sending side answers with acknowledgements instead.
/// 5. When it had ended, not one more byte was acknowledged than before.
///
/// At the end of the stream itself nothing can be said: a half-closed peer acknowledges what it reads
/// only after its delay. So this waits for the reset: four round trips, but at least 300 ms, which is more
/// than a delayed acknowledgement (40 ms on Linux) and long enough for one retransmission (200 ms), and at
/// most a second; and not beyond `until`, when the caller's time is over.
pub(crate) async fn of_kernel(
    error: Error,
    traffic: Traffic,
    socket: Option<&Socket>,
    until: Option<Instant>,
) -> Error {
    let Some(socket) = socket else {
        return error;
    };
    // The first look notes how it ended, if nobody has met that yet.
    socket.peek();
    let mut error = error.with_peer_end(socket.end());
    let is_open_question = error.kind() == ErrorKind::ConnectionClosed
        && error.delivery() == Delivery::Unknown
        && !error.response_started();
    let Some(before) = traffic.acked_before.filter(|_| is_open_question) else {
        return error;
    };
    let started = now();
    let mut pause = SHORTEST_PAUSE;
    loop {
        let Some(state) = tcp_state(socket.stream()) else {
            return error;
        };
        let acked = state.acked.saturating_sub(before);
        socket.peek();
        // Our own FIN is none of the request's bytes.
        let of_request = acked.min(traffic.taken);
        error = error
            .with_peer_end(socket.end())
            .with_bytes_acked(of_request);
        if acked > 0 || socket.end() == Some(PeerEnd::Reset) {
            return error;
        }
        if state.closed {
            let is_fin = socket.end() == Some(PeerEnd::Fin);
            return if is_fin && !socket.gave_up() {
                error.with_delivery(Delivery::NotReceived)
            } else {
                error
            };
        }
        let patience = (4 * state.rtt).clamp(LEAST_PATIENCE, MOST_PATIENCE);
        let looked = now();
        if looked - started >= patience || until.is_some_and(|until| looked >= until) {
            return error;
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

const LEAST_PATIENCE: Duration = Duration::from_millis(300);
const MOST_PATIENCE: Duration = Duration::from_secs(1);
/// On loopback the reset is there before the first look.
const SHORTEST_PAUSE: Duration = Duration::from_micros(500);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// The error of an exchange whose request hyper handed back: nothing of it was written.
pub(crate) fn of_hand_back(error: hyper::Error) -> Error {
    Error::new(ErrorKind::ConnectionClosed, Phase::Send)
        .with_delivery(Delivery::NotSent)
        .with_source(error)
}

/// Why a connection ended that handed a request back, where hyper gave that reason to the request and
/// not to the connection's task: it does so for a request that was queued when it saw the end.
pub(crate) fn of_hand_back_end(error: &hyper::Error) -> Option<CloseReason> {
    let cause = error.source()?.downcast_ref::<hyper::Error>()?;
    Some(of_idle_error(cause))
}

/// The error of a response body that ended before its end. The head was delivered: whatever the
/// request did is done.
pub(crate) fn of_response_body(error: hyper::Error) -> Error {
    Error::new(ErrorKind::ResponseBody, Phase::ResponseBody).with_source(error)
}

/// The error of a response body that ran into a time limit, which its kind names.
pub(crate) fn of_body_limit(kind: ErrorKind) -> Error {
    Error::new(kind, Phase::ResponseBody)
}

/// What a peek found, as the reason to close.
pub(crate) fn of_peek(peek: Peek) -> CloseReason {
    match peek {
        Peek::Readable => CloseReason::UnexpectedBytes,
        Peek::Closed | Peek::Broken(_) | Peek::Quiet => CloseReason::ProbeFoundClosed,
    }
}

/// How a connection's own task saw it end, for a connection that nobody was using.
pub(crate) fn of_end(result: &Result<(), hyper::Error>) -> CloseReason {
    match result {
        Ok(()) => CloseReason::PeerClosedIdle,
        Err(error) => of_idle_error(error),
    }
}

fn of_idle_error(error: &hyper::Error) -> CloseReason {
    match io_cause(error) {
        // TLS without close_notify: closed, if not politely.
        Some(io::ErrorKind::UnexpectedEof) => CloseReason::PeerClosedIdle,
        Some(_) => CloseReason::PeerResetIdle,
        // hyper has no predicate for "unexpected bytes"; it is the one error without a cause that an
        // idle connection can end with.
        None => CloseReason::UnexpectedBytes,
    }
}

/// A failed handshake, told apart by whether trying again can help.
#[cfg(feature = "tls")]
pub(crate) fn of_handshake(error: io::Error) -> Error {
    let kind = if is_certificate_failure(&error) {
        ErrorKind::Certificate
    } else {
        ErrorKind::Tls
    };
    Error::before_sending(kind, Phase::Handshake).with_source(error)
}

#[cfg(feature = "tls")]
fn is_certificate_failure(error: &io::Error) -> bool {
    use rustls::AlertDescription::{
        AccessDenied, BadCertificate, CertificateExpired, CertificateRequired, CertificateRevoked,
        CertificateUnknown, UnknownCA, UnsupportedCertificate,
    };
    let Some(source) = error.get_ref() else {
        return false;
    };
    match source.downcast_ref::<rustls::Error>() {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => true,
        Some(rustls::Error::AlertReceived(alert)) => matches!(
            alert,
            AccessDenied
                | BadCertificate
                | CertificateExpired
                | CertificateRequired
                | CertificateRevoked
                | CertificateUnknown
                | UnknownCA
                | UnsupportedCertificate
        ),
        _ => false,
    }
}

fn io_cause(error: &hyper::Error) -> Option<io::ErrorKind> {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return Some(io.kind());
        }
        source = cause.source();
    }
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::stats::Counters;
    use crate::wire::meter::{Meter, Metered};

    struct Crossing {
        socket: Arc<Socket>,
        server: TcpStream,
        traffic: Traffic,
        _client: Metered,
    }

    const REQUEST: &[u8] = b"POST /pay";

    /// A connection with nothing outstanding, and the note that an exchange makes before its first byte.
    async fn connection() -> Crossing {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let meter = Meter::new(Arc::new(Counters::new()), false);
        let client = Metered::new(client.expect("connect"), meter);
        let socket = Arc::clone(client.socket());
        let before = tcp_state(socket.stream()).expect("Linux tells");
        assert!(before.settled);
        Crossing {
            socket,
            server: accepted.expect("accept").0,
            traffic: Traffic {
                taken: REQUEST.len() as u64,
                received: 0,
                found: None,
                acked_before: Some(before.acked),
            },
            _client: client,
        }
    }

    impl Crossing {
        fn write(&self) {
            let written = self.socket.stream().try_write(REQUEST).expect("room");
            assert_eq!(written, REQUEST.len());
        }

        async fn until_end_is_seen(&self) {
            while !matches!(self.socket.peek(), Peek::Closed | Peek::Broken(_)) {
                tokio::task::yield_now().await;
            }
        }
    }

    fn closed() -> Error {
        Error::new(ErrorKind::ConnectionClosed, Phase::ResponseHead)
    }

    #[tokio::test]
    async fn a_request_that_met_a_closed_server_was_not_received() {
        let Crossing {
            socket,
            server,
            traffic,
            _client,
        } = connection().await;
        drop(server);
        // The FIN is here, the request leaves all the same: as when they cross.
        while socket.peek() != Peek::Closed {
            tokio::task::yield_now().await;
        }
        socket.stream().try_write(REQUEST).expect("room");
        let error = of_kernel(closed(), traffic, Some(&socket), None).await;
        assert_eq!(error.delivery(), Delivery::NotReceived);
        assert_eq!(error.bytes_acked(), Some(0));
        assert_eq!(error.peer_end(), Some(PeerEnd::Fin));
    }

    #[tokio::test]
    async fn a_half_closed_server_may_have_read_the_request() {
        let mut crossing = connection().await;
        crossing.server.shutdown().await.expect("half-close");
        crossing.until_end_is_seen().await;
        crossing.write();
        let verdict = of_kernel(closed(), crossing.traffic, Some(&crossing.socket), None);
        let mut request = [0; REQUEST.len()];
        let (error, read) = tokio::join!(verdict, crossing.server.read_exact(&mut request));
        read.expect("it reads on");
        assert_eq!(error.delivery(), Delivery::Unknown);
        assert_eq!(error.bytes_acked(), Some(REQUEST.len() as u64));
    }

    #[tokio::test]
    async fn a_server_that_reads_and_closes_may_have_acted() {
        let mut crossing = connection().await;
        crossing.write();
        crossing
            .server
            .read_exact(&mut [0; REQUEST.len()])
            .await
            .expect("read");
        let Crossing {
            socket,
            server,
            traffic,
            _client,
        } = crossing;
        drop(server);
        let error = of_kernel(closed(), traffic, Some(&socket), None).await;
        assert_eq!(error.delivery(), Delivery::Unknown);
    }

    /// The trap of "nothing was acknowledged": a reset swallows the acknowledgement.
    #[tokio::test]
    async fn a_server_that_reads_and_resets_may_have_acted() {
        let mut crossing = connection().await;
        crossing.write();
        crossing
            .server
            .read_exact(&mut [0; REQUEST.len()])
            .await
            .expect("read");
        let Crossing {
            socket,
            server,
            traffic,
            _client,
        } = crossing;
        server.set_zero_linger().expect("linger");
        drop(server);
        let error = of_kernel(closed(), traffic, Some(&socket), None).await;
        assert_eq!(error.delivery(), Delivery::Unknown);
        assert_eq!(error.peer_end(), Some(PeerEnd::Reset));
    }

    #[tokio::test]
    async fn without_a_note_from_before_or_with_a_response_begun_nothing_is_claimed() {
        for (acked_before, received) in [(None, 0), (Some(1), 5)] {
            let Crossing {
                socket,
                server,
                traffic,
                _client,
            } = connection().await;
            drop(server);
            while socket.peek() != Peek::Closed {
                tokio::task::yield_now().await;
            }
            socket.stream().try_write(REQUEST).expect("room");
            let trace = Trace {
                received,
                ..Trace::default()
            };
            let traffic = Traffic {
                acked_before,
                ..traffic
            };
            let error = of_kernel(closed().with_trace(trace), traffic, Some(&socket), None).await;
            assert_eq!(error.delivery(), Delivery::Unknown);
        }
    }
}
