//! One HTTP/1.1 connection in its two halves, and one exchange over it.
//!
//! [`Conn`] sends; whoever holds it owns the connection's next exchange. [`Driver`] runs hyper and is
//! polled by the connection's own task, which is why the end of a connection is seen when it comes and
//! not when somebody looks. Dropping a `Conn` between exchanges closes the connection properly;
//! dropping an exchange stops it at once, since HTTP/1.1 has no other way to give up a request.

use std::future::{Future, pending};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Response;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::sync::oneshot;
use tokio::time::{Sleep, sleep, sleep_until, timeout};

use crate::clock::{Instant, now};
use crate::delivery::PeerEnd;
use crate::error::Error;
use crate::stats::CloseReason;
use crate::wire::evidence::{self, Limit};
use crate::wire::meter::{FirstByte, Interest, Meter, Socket};
use crate::wire::outgoing::{OutBody, Outgoing, Recall};
use crate::wire::socket::{Peek, tcp_state};
use crate::wire::tls::Stream;

/// The half that sends.
#[derive(Debug)]
pub(crate) struct Conn {
    sender: http1::SendRequest<OutBody>,
    meter: Arc<Meter>,
    socket: Weak<Socket>,
    stop: Stop,
    secure: bool,
}

/// The way to end a connection where it stands, for whoever holds it and for the end of the pool.
#[derive(Clone, Debug)]
pub(crate) struct Stop {
    sender: Arc<Mutex<Option<oneshot::Sender<Parting>>>>,
    meter: Weak<Meter>,
}

/// What becomes of a connection that was stopped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Parting {
    /// Its socket stays until the peer has closed too, within bounds.
    Linger,
    /// Its socket goes at once.
    Now,
    /// Its socket goes at once and the peer is told with a reset, which it does not answer: what is waited for is
    /// the time in which it hears of it.
    Reset,
}

impl Stop {
    fn take(&self) -> Option<oneshot::Sender<Parting>> {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.take()
    }

    fn send(&self, parting: Parting) {
        // The task may be gone already.
        let _ = self.take().map(|sender| sender.send(parting));
    }

    /// Ends the connection at once, without a goodbye.
    pub(crate) fn now(&self, reason: CloseReason) {
        if let Some(meter) = self.meter.upgrade() {
            meter.close_because(reason);
        }
        self.send(Parting::Now);
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        // Tells the task that nobody will send on it any more.
        drop(self.stop.take());
    }
}

/// What the probe says of an idle connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Probe {
    /// Nothing speaks against it.
    Quiet,
    /// Its own task has already seen it end.
    Ended,
    /// It must not be used.
    Dead(CloseReason),
}

/// How long an exchange may wait for its response head. `None`: without limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// From the moment the connection is given the request.
    pub(crate) head: Option<Duration>,
    /// When the time of the whole request is over.
    pub(crate) request: Option<Instant>,
    /// How long the peer's kernel may leave all of the request unacknowledged, from its first byte.
    pub(crate) ack: Option<Duration>,
}

/// What a look for the first acknowledgement says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Look {
    /// It is late.
    Late,
    /// It is too early to say.
    Again(Instant),
    /// It is there, or what is to be said about it is not for this look to say.
    Done,
}

/// An exchange that ended without a response head.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// The request, as it was, where no byte of it was taken.
    pub(crate) again: Option<Box<Outgoing>>,
}

/// Makes both halves over an established stream.
pub(crate) async fn establish(
    stream: Stream,
    socket: Arc<Socket>,
    meter: Arc<Meter>,
    secure: bool,
) -> Result<(Conn, Driver), hyper::Error> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let (stop, stopped) = oneshot::channel();
    let stop = Stop {
        sender: Arc::new(Mutex::new(Some(stop))),
        meter: Arc::downgrade(&meter),
    };
    let conn = Conn {
        sender,
        meter: Arc::clone(&meter),
        socket: Arc::downgrade(&socket),
        stop,
        secure,
    };
    let driver = Driver {
        connection: Some(connection),
        stopped: Some(stopped),
        parting: None,
        socket,
        meter,
    };
    Ok((conn, driver))
}

/// As much as is sent at once at the beginning: ten segments.
const FIRST_FLIGHT: u64 = 14_000;

impl Conn {
    pub(crate) fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Whether anything of the first that was sent on it had to be sent again; `None` where nobody knows, or where so much
    /// was acknowledged that it says nothing of how the server accepts.
    pub(crate) fn has_lost(socket: &Weak<Socket>) -> Option<bool> {
        let socket = socket.upgrade()?;
        let state = tcp_state(socket.stream())?;
        (state.acked < FIRST_FLIGHT).then_some(state.has_lost)
    }

    pub(crate) fn socket(&self) -> &Weak<Socket> {
        &self.socket
    }

    /// Whether hyper can take another request: the exchange before is over in both directions.
    pub(crate) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Waits until hyper can take another request. `Err` when it never will.
    pub(crate) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.sender.poll_ready(cx)
    }

    /// Asks the kernel whether the connection is still good.
    ///
    /// Over TLS, bytes that can be read may be a session ticket as well as the end. The connection's
    /// task reads them; this waits for that, at most for `patience`, and looks again.
    pub(crate) async fn probe(&self, patience: Duration) -> Probe {
        match self.look() {
            Probe::Dead(CloseReason::UnexpectedBytes) if self.secure => {}
            verdict => return verdict,
        }
        let cleared = async {
            loop {
                let still_readable = || self.look() == Probe::Dead(CloseReason::UnexpectedBytes);
                self.meter.drained(still_readable).await;
                match self.look() {
                    Probe::Dead(CloseReason::UnexpectedBytes) => {}
                    verdict => return verdict,
                }
            }
        };
        match timeout(patience, cleared).await {
            Ok(verdict) => verdict,
            Err(_) => Probe::Dead(CloseReason::ProbeInconclusive),
        }
    }

    fn look(&self) -> Probe {
        if self.sender.is_closed() {
            return Probe::Ended;
        }
        // The task drops the socket when it is done with it.
        let Some(socket) = self.socket.upgrade() else {
            return Probe::Ended;
        };
        match socket.peek() {
            Peek::Quiet => Probe::Quiet,
            found => Probe::Dead(evidence::of_peek(found)),
        }
    }

    /// Sends one request and waits for its response head, within the limits. See [`Outgoing::depart`] for
    /// `expect`.
    ///
    /// After an exchange that ran into a limit the connection must be [aborted](Conn::abort): it is sealed, and
    /// the answer may come yet. What the peer has not acknowledged of the request is thrown away then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes the connection, and only it.
    pub(crate) async fn exchange(
        &mut self,
        outgoing: Outgoing,
        expect: Option<Duration>,
        limits: Limits,
    ) -> Result<(Response<Incoming>, Recall), Failed> {
        let started = now();
        // What TCP knows of a connection is gone with its socket, so that has to outlast hyper.
        let wants_evidence = outgoing.wants_evidence;
        let socket = if wants_evidence {
            self.socket.upgrade()
        } else {
            None
        };
        let mark = self.meter.begin(match limits.ack {
            _ if wants_evidence => Interest::Delivery,
            Some(_) => Interest::Silence,
            None => Interest::Nothing,
        });
        let (request, recall) = outgoing.depart(&self.meter, mark, expect);
        let mut sending = pin!(self.sender.try_send_request(request));
        let sent = tokio::select! {
            biased;
            sent = &mut sending => sent,
            limit = self.over(limits, started) => {
                // From here on nothing more is written, so the count is final; then what it says is said.
                let traffic = self.meter.seal(mark);
                let socket = self.socket.upgrade();
                let (upload, elapsed) = (recall.upload(), now() - started);
                let error = evidence::of_limit(limit, traffic, upload, elapsed, socket.as_deref());
                if socket.is_some_and(|socket| socket.forget_unacknowledged()) {
                    // Nobody is there to say goodbye to, and what the kernel holds must not arrive any more.
                    self.stop.send(Parting::Reset);
                }
                return Err(Failed { error, again: None });
            }
        };
        let mut failure = match sent {
            Ok(response) => return Ok((response, recall)),
            Err(failure) => failure,
        };
        if let Some(request) = failure.take_message() {
            let error = failure.into_error();
            if let Some(reason) = evidence::of_hand_back_end(&error) {
                self.meter.close_because(reason);
            }
            return Err(Failed {
                error: evidence::of_hand_back(error),
                again: Some(Box::new(recall.handed_back(request))),
            });
        }
        // From here on nothing more is written, so the count is final.
        let traffic = self.meter.seal(mark);
        if let Some(found) = traffic.found {
            self.meter.close_because(evidence::of_peek(found));
        }
        let (error, elapsed) = (failure.into_error(), now() - started);
        let error = evidence::of_exchange(error, traffic, recall.upload(), elapsed);
        let error = evidence::of_kernel(error, traffic, socket.as_deref(), limits.request).await;
        let may_go_again = traffic.taken == 0 && !recall.upload().has_failed();
        let again = if may_go_again {
            // hyper lets go of the body when its connection ends, which it is about to.
            timeout(RECALL_WAIT, recall.back()).await.ok().flatten()
        } else {
            None
        };
        Err(Failed {
            error,
            again: again.map(Box::new),
        })
    }

    /// Resolves when one of the limits is over. One timer serves them all, set to whichever comes first; where
    /// there is no limit, there is none.
    async fn over(&self, limits: Limits, started: Instant) -> Limit {
        let after = |time: Option<Duration>| started.checked_add(time?);
        let (head, mut ack) = (after(limits.head), after(limits.ack));
        loop {
            let all = [
                (head, Limit::Head),
                (limits.request, Limit::Request),
                (ack, Limit::Ack),
            ];
            let set = all.into_iter().filter_map(|(at, limit)| Some((at?, limit)));
            let Some((at, limit)) = set.min_by_key(|&(at, _)| at) else {
                return pending().await;
            };
            sleep_until(at).await;
            match limits.ack {
                Some(patience) if limit == Limit::Ack => match self.look_for_ack(patience) {
                    Look::Late => return limit,
                    Look::Again(at) => ack = Some(at),
                    Look::Done => ack = None,
                },
                _ => return limit,
            }
        }
    }

    /// Asks the kernel once whether anything of the request was acknowledged.
    fn look_for_ack(&self, patience: Duration) -> Look {
        let again = |from: Instant| from.checked_add(patience).map_or(Look::Done, Look::Again);
        let acked_before = match self.meter.first_byte() {
            FirstByte::Unwritten => return again(now()),
            FirstByte::Settled => return Look::Done,
            FirstByte::Unanswered { since, .. } if now() - since < patience => return again(since),
            FirstByte::Unanswered { acked_before, .. } => acked_before,
        };
        let socket = self.socket.upgrade();
        let Some(state) = socket.and_then(|socket| tcp_state(socket.stream())) else {
            return Look::Done;
        };
        // Whatever was acknowledged, the server has it, and how long it takes to answer is its own affair. Where
        // the connection has ended, its task says so.
        if state.acked == acked_before && !state.settled && !state.closed {
            Look::Late
        } else {
            Look::Done
        }
    }

    /// Drops the connection where it stands, a running upload included. The socket stays, silent, until the
    /// peer has closed too, within bounds: so long the peer still has a connection.
    pub(crate) fn abort(self) {
        self.stop.send(Parting::Linger);
    }

    /// The way to end the connection for somebody who does not hold it.
    pub(crate) fn stop(&self) -> Stop {
        self.stop.clone()
    }
}

/// How long to wait for hyper to let go of a request that can be called back. It does so within the poll in
/// which it reports the failure; the bound is for a runtime that is being shut down.
pub(crate) const RECALL_WAIT: Duration = Duration::from_secs(1);

/// The half that runs hyper. Resolves when the connection has ended.
#[derive(Debug)]
pub(crate) struct Driver {
    connection: Option<http1::Connection<TokioIo<Stream>, OutBody>>,
    stopped: Option<oneshot::Receiver<Parting>>,
    /// Runs from the moment the other half is gone: hyper then sends what it still has, which takes
    /// for ever if the peer does not read.
    parting: Option<Pin<Box<Sleep>>>,
    socket: Arc<Socket>,
    meter: Arc<Meter>,
}

impl Driver {
    /// Leaves a connection that has ended like this.
    pub(crate) async fn leave(self, end: End) {
        match end {
            End::Stopped(Parting::Now) => {}
            End::Stopped(Parting::Reset) => {
                drop(self);
                sleep(RESET_TIME).await;
            }
            End::Stopped(Parting::Linger) | End::Over(_) => self.linger().await,
        }
    }

    /// Says goodbye to the peer: waits, within bounds, for it to close its side too.
    ///
    /// A socket that is closed with bytes unread, or to which bytes still come, answers with a reset.
    /// Over TLS there is such a byte almost always: the peer's own close_notify.
    async fn linger(self) {
        let Driver { socket, meter, .. } = self;
        // For the counts it is closed now.
        drop(meter);
        // Ours is out, or there is nobody to send it to.
        let _ = crate::wire::socket::shut_write(socket.stream());
        let deadline: Instant = now() + LINGER_TIME;
        let mut scrap = [0; 1024];
        let mut left = LINGER_BYTES;
        let goodbye = async {
            while left > 0 {
                if socket.stream().readable().await.is_err() {
                    return true;
                }
                match socket.stream().try_read(&mut scrap) {
                    Ok(0) => {
                        socket.note_end(PeerEnd::Fin);
                        return true;
                    }
                    Ok(read) => left = left.saturating_sub(read),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        socket.note_error(error.kind());
                        return true;
                    }
                }
            }
            false
        };
        // Either way the socket closes now, and what it still holds is for nobody.
        let ended = tokio::time::timeout_at(deadline, goodbye).await;
        socket.forget_unacknowledged();
        drop(socket);
        if ended == Ok(false) {
            // The kernel has reset it: more has come than was read.
            sleep(RESET_TIME).await;
        }
    }
}

/// A peer that is alive closes within a round trip.
const LINGER_TIME: Duration = Duration::from_secs(1);
/// A reset is not answered, so nothing tells when the peer has closed. Longer than most round trips and than a
/// server's loop takes to come round, so that the next connection does not meet this one there.
const RESET_TIME: Duration = Duration::from_millis(50);
/// More than alerts and tickets is a peer that does not mean to stop.
const LINGER_BYTES: usize = 16 * 1024;

/// How a connection ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum End {
    /// It was told to stop where it stood.
    Stopped(Parting),
    /// hyper is done with it; for a connection that nobody used, this is what happened.
    Over(CloseReason),
}

impl Future for Driver {
    type Output = End;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<End> {
        if let Some(stopped) = &mut self.stopped
            && let Poll::Ready(result) = Pin::new(stopped).poll(cx)
        {
            self.stopped = None;
            if let Ok(parting) = result {
                self.connection = None;
                return Poll::Ready(End::Stopped(parting));
            }
            self.meter.part();
            self.parting = Some(Box::pin(sleep(LINGER_TIME)));
        }
        if let Some(parting) = &mut self.parting
            && parting.as_mut().poll(cx).is_ready()
        {
            self.connection = None;
            return Poll::Ready(End::Stopped(Parting::Now));
        }
        let Some(connection) = &mut self.connection else {
            return Poll::Ready(End::Over(CloseReason::PeerClosedIdle));
        };
        match Pin::new(connection).poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                // Dropped now, not with the driver: requests still queued come back only then.
                self.connection = None;
                if let Err(error) = &result {
                    tracing::debug!(%error, "connection ended");
                }
                Poll::Ready(End::Over(evidence::of_end(&result)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use bytes::Bytes;
    use http::{HeaderMap, HeaderValue, Method, Version};
    use http_body::Frame;
    use http_body_util::{BodyExt, StreamBody};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::delivery::Delivery;
    use crate::error::ErrorKind;
    use crate::stats::Counters;
    use crate::wire::meter::Metered;
    use crate::wire::outgoing::Head;

    async fn connection() -> (Conn, Driver, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let meter = Meter::new(Arc::new(Counters::new()), false);
        let stream = Metered::new(client.expect("connect"), Arc::clone(&meter));
        let socket = Arc::clone(stream.socket());
        let stream = Stream::plain(stream, Arc::clone(&meter));
        let halves = establish(stream, socket, meter, false).await;
        let (conn, driver) = halves.expect("http/1.1 has no handshake");
        (conn, driver, accepted.expect("accept").0)
    }

    /// A one-shot body of two frames and trailers, of a kind that nobody could clone.
    fn upload() -> Outgoing {
        let trailers =
            HeaderMap::from_iter([(http::header::EXPIRES, HeaderValue::from_static("never"))]);
        let frames = [
            Frame::data(Bytes::from("amount")),
            Frame::data(Bytes::from("=10")),
            Frame::trailers(trailers),
        ];
        let frames = frames.map(Ok::<_, Infallible>);
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let head = Head {
            method: Method::POST,
            uri: "/pay".parse().expect("a target"),
            version: Version::HTTP_11,
            headers: HeaderMap::from_iter([(
                http::header::HOST,
                HeaderValue::from_static("localhost"),
            )]),
            extensions: http::Extensions::new(),
        };
        Outgoing {
            head,
            body: OutBody::new(body),
            wants_evidence: true,
            is_repeatable: false,
        }
    }

    fn repeatable() -> Outgoing {
        Outgoing {
            wants_evidence: false,
            is_repeatable: true,
            ..upload()
        }
    }

    async fn sent_whole(outgoing: Outgoing) {
        assert_eq!(outgoing.head.method, Method::POST);
        assert_eq!(outgoing.head.headers.len(), 1);
        let body = outgoing.body.collect().await.expect("the body");
        let trailers = body.trailers().cloned();
        assert_eq!(trailers.map(|trailers| trailers.len()), Some(1));
        assert_eq!(body.to_bytes(), "amount=10");
    }

    /// hyper has encoded the head and polled the body by then; nothing of it may be missing.
    #[tokio::test]
    async fn a_request_that_finds_its_connection_dead_comes_back_whole() {
        let (mut conn, driver, server) = connection().await;
        drop(server);
        // This thread, and so the reactor, sees nothing of it until the first write looks.
        let driver = tokio::spawn(driver);
        let failed = conn
            .exchange(upload(), None, Limits::default())
            .await
            .expect_err("dead");
        assert_eq!(failed.error.delivery(), Delivery::NotSent);
        assert_eq!(failed.error.kind(), ErrorKind::ConnectionClosed);
        assert_eq!(failed.error.bytes_taken(), 0);
        sent_whole(*failed.again.expect("nothing left")).await;
        driver.await.expect("it ends");
    }

    #[tokio::test]
    async fn a_request_behind_unasked_bytes_comes_back_whole_and_is_not_answered_by_them() {
        let (mut conn, driver, mut server) = connection().await;
        let forged = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        server.write_all(forged).await.expect("write");
        tokio::spawn(driver);
        let failed = conn
            .exchange(upload(), None, Limits::default())
            .await
            .expect_err("not an answer");
        assert_eq!(failed.error.delivery(), Delivery::NotSent);
        sent_whole(*failed.again.expect("nothing left")).await;
        drop(conn);
        let mut received = Vec::new();
        let _ = server.read_to_end(&mut received).await;
        assert_eq!(received, b"", "the server was sent something");
    }

    /// A request that came back goes out again byte for byte, its one-shot body included.
    #[tokio::test]
    async fn a_request_that_came_back_goes_out_as_if_nothing_had_happened() {
        let (mut dead, driver, server) = connection().await;
        drop(server);
        tokio::spawn(driver);
        let failed = dead
            .exchange(upload(), None, Limits::default())
            .await
            .expect_err("dead");
        let again = failed.again.expect("nothing left");

        let (mut conn, driver, mut server) = connection().await;
        tokio::spawn(driver);
        let answer = async {
            let mut received = Vec::new();
            while !received.ends_with(b"\r\n0\r\nexpires: never\r\n\r\n")
                && !received.ends_with(b"0\r\n\r\n")
            {
                assert!(server.read_buf(&mut received).await.expect("read") > 0);
            }
            server
                .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
                .await
                .expect("write");
            String::from_utf8(received).expect("text")
        };
        let (result, received) =
            tokio::join!(conn.exchange(*again, None, Limits::default()), answer);
        let (response, recall) = result.expect("an answer");
        assert_eq!(response.status(), 204);
        assert!(recall.upload().is_finished());
        assert!(
            received.starts_with("POST /pay HTTP/1.1\r\nhost: localhost\r\n"),
            "{received}"
        );
        assert!(
            received.contains("6\r\namount\r\n3\r\n=10\r\n0\r\n"),
            "{received}"
        );
    }

    /// A byte was taken: it is not ours to send again, and nothing is kept of it.
    #[tokio::test]
    async fn a_request_of_which_a_byte_was_taken_does_not_come_back() {
        let (mut conn, driver, mut server) = connection().await;
        tokio::spawn(driver);
        let close = async {
            let mut byte = [0];
            server.read_exact(&mut byte).await.expect("read");
            drop(server);
        };
        let (result, ()) = tokio::join!(conn.exchange(upload(), None, Limits::default()), close);
        let failed = result.expect_err("closed");
        assert_eq!(failed.error.delivery(), Delivery::Unknown);
        assert!(failed.error.bytes_taken() > 0);
        assert!(failed.again.is_none());
    }

    /// The connection's task, which would have written it, comes too late.
    #[tokio::test(start_paused = true)]
    async fn a_limit_that_is_over_before_the_first_byte_proves_that_nothing_was_sent() {
        for limit in [Limit::Head, Limit::Request] {
            let (mut conn, driver, mut server) = connection().await;
            let time = Duration::from_millis(20);
            let limits = match limit {
                Limit::Request => Limits {
                    request: Some(now() + time),
                    ..Limits::default()
                },
                _ => Limits {
                    head: Some(time),
                    ..Limits::default()
                },
            };
            let failed = conn.exchange(upload(), None, limits).await;
            let failed = failed.expect_err("too late");
            let kind = match limit {
                Limit::Request => ErrorKind::RequestTimeout,
                _ => ErrorKind::ResponseTimeout,
            };
            assert_eq!(failed.error.kind(), kind);
            assert_eq!(failed.error.delivery(), Delivery::NotSent);
            assert!(failed.again.is_none());
            driver.await;
            drop(conn);
            let mut received = Vec::new();
            let _ = server.read_to_end(&mut received).await;
            assert_eq!(received, b"", "the server was sent something");
        }
    }

    /// What nobody has sent cannot be acknowledged.
    #[tokio::test(start_paused = true)]
    async fn a_request_that_was_not_written_is_not_missing_its_acknowledgement() {
        let (mut conn, _driver, _server) = connection().await;
        let limits = Limits {
            head: Some(Duration::from_secs(60)),
            ack: Some(Duration::from_secs(1)),
            ..Limits::default()
        };
        let failed = conn.exchange(repeatable(), None, limits).await;
        let error = failed.expect_err("nobody writes it").error;
        assert_eq!(error.kind(), ErrorKind::ResponseTimeout);
        assert_eq!(error.delivery(), Delivery::NotSent);
    }

    /// A reset in the middle of a goodbye is nobody's problem; a goodbye without end is.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_never_closes_is_waited_for_within_bounds() {
        let (conn, mut driver, server) = connection().await;
        drop(conn);
        let end = (&mut driver).await;
        assert!(matches!(end, End::Over(_)));
        driver.linger().await;
        drop(server);
    }
}
