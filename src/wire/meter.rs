//! Counts the bytes of one connection below TLS, and has the last look before a request's first byte.
//!
//! A [`Meter`] is shared by the connection's task, which reads and writes through [`Metered`], and by
//! whoever holds the lease, who asks it what an exchange left behind. It outlives the socket.
//!
//! # Invariants
//!
//! * `taken` grows only by what the kernel accepted, inside the same critical section as the call.
//! * Once [`Meter::seal`] has returned, no further byte reaches the kernel. A verdict of "no byte was
//!   taken" is therefore still true when it is acted on, although the connection's task may be in the
//!   middle of a write on another thread.
//! * A connection that was counted as opened is counted as closed once, when its last half is gone,
//!   under the first reason given.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use crate::clock::{Instant, now};
use crate::delivery::PeerEnd;
use crate::origin::Origin;
use crate::rules::split::Split;
use crate::stats::{CloseReason, Counters};
use crate::wire::socket::{
    Peek, acknowledge_now, peek, reset_on_close, shut_write, take_error, tcp_state,
};

/// The socket itself, and the first sign of its end. The connection's task owns it; the pool looks at it
/// through a `Weak`, so that nothing but the task keeps the descriptor open. Only an exchange that may
/// need the kernel's evidence holds it longer.
#[derive(Debug)]
pub(crate) struct Socket {
    half: OwnedWriteHalf,
    end: OnceLock<PeerEnd>,
}

impl Socket {
    pub(crate) fn stream(&self) -> &TcpStream {
        self.half.as_ref()
    }

    /// Looks into the receive queue.
    pub(crate) fn peek(&self) -> Peek {
        let found = peek(self.stream());
        match found {
            Peek::Closed => self.note_end(PeerEnd::Fin),
            Peek::Broken(kind) => self.note_error(kind),
            Peek::Quiet | Peek::Readable => {}
        }
        found
    }

    /// How the peer was first seen to end the connection.
    ///
    /// The kernel reports a reset once, to whoever asks first, and an end of stream ever after. So every
    /// call that can meet either notes it here.
    pub(crate) fn end(&self) -> Option<PeerEnd> {
        self.end.get().copied()
    }

    /// Whether it was our own kernel that ended the connection, because nothing came any more, and not
    /// a reset of the peer's. That leaves no other trace behind a FIN.
    pub(crate) fn gave_up(&self) -> bool {
        match take_error(self.stream()) {
            Ok(None) => false,
            Ok(Some(error)) => !is_end(error.kind()),
            Err(_) => true,
        }
    }

    /// If the peer has not acknowledged everything, makes the close a reset: what the kernel still holds is then
    /// thrown away, and does not arrive when the route heals, long after somebody has given it up. `true` if
    /// so.
    pub(crate) fn forget_unacknowledged(&self) -> bool {
        let is_open = tcp_state(self.stream()).is_some_and(|state| !state.settled);
        if is_open {
            reset_on_close(self.stream());
        }
        is_open
    }

    pub(crate) fn note_end(&self, end: PeerEnd) {
        // The first sign counts.
        let _ = self.end.set(end);
    }

    /// Notes an error that a read, a write or a peek met.
    pub(crate) fn note_error(&self, kind: io::ErrorKind) {
        // A broken pipe has two meanings, a reset behind a FIN or a FIN of our own: a peek tells.
        if kind == io::ErrorKind::ConnectionReset {
            self.note_end(PeerEnd::Reset);
        }
    }
}

/// What is known of one connection's bytes and of its end.
#[derive(Debug)]
pub(crate) struct Meter {
    gate: Mutex<Gate>,
    /// Bytes that hyper has read, above TLS.
    received: AtomicU64,
    /// Notified of the first of them, and of the end.
    first_byte: FirstByteReceived,
    /// Nobody wants an answer any more.
    parting: AtomicBool,
    watched: AtomicBool,
    drained: Notify,
    reason: Mutex<Reason>,
    opened: AtomicBool,
    counters: Arc<Counters>,
    secure: bool,
    /// Exchanges begun so far.
    exchanges: AtomicU32,
    /// What is known of how the origin sends its responses, and which origin that is.
    habit: OnceLock<(Origin, Arc<Split>)>,
}

#[derive(Debug, Default)]
struct Gate {
    taken: u64,
    sealed: bool,
    /// A write met the peer's end of the connection.
    gone: bool,
    /// The next write is the first of an exchange: look before it.
    look: bool,
    /// What a look found that stopped a write.
    found: Option<Peek>,
    interest: Interest,
    /// What the kernel had acknowledged before the exchange's first byte, with nothing outstanding.
    acked_before: Option<u64>,
    /// When the kernel took the first byte of an exchange whose silence matters.
    first_byte: Option<Instant>,
    /// What had been received then.
    received_before: u64,
}

#[derive(Debug, Default)]
struct Reason {
    /// Given by whoever decided to close, or saw why it broke.
    told: Option<CloseReason>,
    /// What the connection's task made of its end. Counts where nobody told.
    seen: Option<CloseReason>,
}

/// What an exchange may come to ask the kernel about its request. Each but the first costs a look at what was
/// acknowledged before its first byte.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Interest {
    #[default]
    Nothing,
    /// While it lasts: whether anything of it was acknowledged.
    Silence,
    /// When it has failed: whether anything of it was received.
    Delivery,
}

/// What the first byte of an exchange has come to, as far as can be told without asking the kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum FirstByte {
    /// It has not been written.
    Unwritten,
    /// Nothing was received since.
    Unanswered { since: Instant, acked_before: u64 },
    /// Something was received since, or the kernel cannot tell about it.
    Settled,
}

/// How far the counters were when an exchange began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    taken: u64,
    received: u64,
}

/// What an exchange left behind.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Traffic {
    /// Bytes of the request that the kernel took, below TLS.
    pub(crate) taken: u64,
    /// Bytes of the response that hyper read, above TLS.
    pub(crate) received: u64,
    /// What the last look saw, where that kept the request from being written.
    pub(crate) found: Option<Peek>,
    /// The kernel's count of acknowledged bytes before the request, where it can be relied on.
    pub(crate) acked_before: Option<u64>,
}

impl Meter {
    pub(crate) fn new(counters: Arc<Counters>, secure: bool) -> Arc<Self> {
        Arc::new(Meter {
            gate: Mutex::default(),
            received: AtomicU64::new(0),
            first_byte: FirstByteReceived::default(),
            parting: AtomicBool::new(false),
            watched: AtomicBool::new(false),
            drained: Notify::new(),
            reason: Mutex::default(),
            opened: AtomicBool::new(false),
            counters,
            secure,
            exchanges: AtomicU32::new(0),
            habit: OnceLock::new(),
        })
    }

    /// Lets the connection learn, with the others to its origin, how responses are sent there.
    pub(crate) fn learn(&self, origin: &Origin, split: Arc<Split>) {
        // Called once, when the connection is made.
        let _ = self.habit.set((origin.clone(), split));
    }

    /// The connection is established. `resumed` tells how, where there is TLS.
    pub(crate) fn open(&self, resumed: Option<bool>) {
        self.opened.store(true, Relaxed);
        self.counters.opened(resumed);
    }

    /// An exchange begins: the next write is its first, and is preceded by a look; where there is an interest,
    /// also by a note of what the kernel had acknowledged until then.
    pub(crate) fn begin(&self, interest: Interest) -> Mark {
        self.exchanges.fetch_add(1, Relaxed);
        let mut gate = self.gate();
        gate.look = true;
        gate.interest = interest;
        gate.acked_before = None;
        gate.first_byte = None;
        gate.received_before = self.received.load(Relaxed);
        Mark {
            taken: gate.taken,
            received: gate.received_before,
        }
    }

    /// Whether the kernel has taken a byte since the mark.
    pub(crate) fn has_taken_since(&self, mark: Mark) -> bool {
        self.gate().taken > mark.taken
    }

    /// What the first byte of this exchange has come to. Tells it only to an interest in its silence.
    pub(crate) fn first_byte(&self) -> FirstByte {
        let gate = self.gate();
        let Some(since) = gate.first_byte else {
            return FirstByte::Unwritten;
        };
        match gate.acked_before {
            Some(acked_before) if self.received.load(Relaxed) == gate.received_before => {
                FirstByte::Unanswered {
                    since,
                    acked_before,
                }
            }
            _ => FirstByte::Settled,
        }
    }

    /// Whether a request is out whose delivery the kernel may have to tell, and no byte of a response is
    /// in. Then nothing else may be written: a peer that is gone would answer it with a reset, which
    /// must come from the request alone to say something of it.
    #[cfg(feature = "tls")]
    pub(crate) fn needs_silence(&self) -> bool {
        let gate = self.gate();
        gate.interest == Interest::Delivery
            && gate.acked_before.is_some()
            && self.received.load(Relaxed) == gate.received_before
    }

    /// Ends all writing and says what there was since the mark.
    pub(crate) fn seal(&self, mark: Mark) -> Traffic {
        let mut gate = self.gate();
        gate.sealed = true;
        Traffic {
            taken: gate.taken - mark.taken,
            received: self.received.load(Relaxed) - mark.received,
            found: gate.found,
            acked_before: gate.acked_before,
        }
    }

    /// Notes why the connection is being closed. The first reason stays.
    pub(crate) fn close_because(&self, reason: CloseReason) {
        self.reason().told.get_or_insert(reason);
    }

    /// Notes what the connection's task saw of its end. Counts only where nobody said why.
    pub(crate) fn end_seen_as(&self, reason: CloseReason) {
        self.reason().seen.get_or_insert(reason);
    }

    /// The half that sends is gone: an answer has no reader any more.
    pub(crate) fn part(&self) {
        self.parting.store(true, Relaxed);
    }

    /// Resolves when the connection's task has read all there was to read.
    ///
    /// Calls `still` once it listens, and resolves at once if that says `false`: so that bytes which
    /// are gone by then are not waited for.
    pub(crate) async fn drained(&self, still: impl FnOnce() -> bool) {
        let drained = self.drained.notified();
        tokio::pin!(drained);
        drained.as_mut().enable();
        self.watched
            .store(true, std::sync::atomic::Ordering::SeqCst);
        if still() {
            drained.await;
        }
    }

    pub(crate) fn note_received(&self, bytes: usize) {
        if self.received.fetch_add(bytes as u64, Relaxed) == 0 {
            self.first_byte.0.has_come.store(true, Relaxed);
            self.first_byte.0.changed.notify_one();
        }
    }

    /// The way to wait for the first byte that is received, which keeps nothing open.
    pub(crate) fn first_byte_received(&self) -> FirstByteReceived {
        self.first_byte.clone()
    }

    fn gate(&self) -> std::sync::MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reason(&self) -> std::sync::MutexGuard<'_, Reason> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.first_byte.0.changed.notify_one();
        if !self.opened.load(Relaxed) {
            return;
        }
        let reason = {
            let reason = self.reason();
            reason.told.or(reason.seen)
        };
        let reason = reason.unwrap_or(CloseReason::RuntimeGone);
        self.counters.closed(reason);
        tracing::debug!(reason = reason.as_str(), "connection closed");
    }
}

/// Waits for the first byte that a connection receives.
#[derive(Clone, Debug, Default)]
pub(crate) struct FirstByteReceived(Arc<FirstByteState>);

#[derive(Debug, Default)]
struct FirstByteState {
    has_come: AtomicBool,
    changed: Notify,
}

impl FirstByteReceived {
    /// Resolves when a byte has come, or when the connection has gone without one: `true` for the first. For one who
    /// waits.
    pub(crate) async fn wait(&self) -> bool {
        self.0.changed.notified().await;
        self.0.has_come.load(Relaxed)
    }
}

/// The counting stream between the socket and what reads and writes it.
#[derive(Debug)]
pub(crate) struct Metered {
    read: OwnedReadHalf,
    read_ended: bool,
    /// The exchange whose response was read from last, and when its first bytes came if nothing has followed.
    answered: u32,
    began: Option<Instant>,
    socket: Arc<Socket>,
    meter: Arc<Meter>,
}

impl Metered {
    pub(crate) fn new(stream: TcpStream, meter: Arc<Meter>) -> Self {
        // The read half keeps tokio's fast path (no second read to learn that the first took all);
        // the write half is what can be shared.
        let (read, write) = stream.into_split();
        let socket = Arc::new(Socket {
            half: write,
            end: OnceLock::new(),
        });
        Metered {
            read,
            read_ended: false,
            answered: 0,
            began: None,
            socket,
            meter,
        }
    }

    pub(crate) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    pub(crate) fn peer_addr(&self) -> Option<SocketAddr> {
        self.socket.stream().peer_addr().ok()
    }

    /// Bytes of a response have come. Acknowledges them at once where the server is known to wait for that, and
    /// notices where it does.
    fn note_read(&mut self) {
        let exchange = self.meter.exchanges.load(Relaxed);
        // On a fresh connection the kernel acknowledges at once by itself.
        let Some((origin, split)) = self.meter.habit.get().filter(|_| exchange > 1) else {
            return;
        };
        if exchange != self.answered {
            self.answered = exchange;
            if split.is_known() {
                acknowledge_now(self.socket.stream());
                Counters::add(&self.meter.counters.acks_hastened);
            } else {
                self.began = Some(now());
            }
        } else if let Some(began) = self.began.take()
            && split.gap(now() - began)
        {
            tracing::warn!(
                server.address = origin.host(),
                server.port = origin.port(),
                "each response comes in two parts, the second only after an acknowledgement that is delayed by 40 ms: \
                 set TCP_NODELAY on the server, or send head and body in one write"
            );
        }
    }

    /// Writes what the kernel takes without waiting, for the farewell of a connection that is dropped.
    #[cfg(feature = "tls")]
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        // Behind a verdict, and behind our own FIN, there is nothing to say and nothing to learn.
        let is_over = {
            let gate = self.meter.gate();
            gate.sealed || gate.gone
        };
        if is_over {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        self.socket.stream().try_write(bytes)
    }

    /// Runs one write call under the gate.
    fn metered(&self, write: impl FnOnce(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        let stream = self.socket.stream();
        let mut gate = self.meter.gate();
        if gate.gone {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if gate.sealed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if gate.look {
            // The checkout looked too, but a task switch ago. Here is the last instant at which
            // "nothing was sent" is still certain, and at which bytes that are already there cannot
            // be the answer to what is about to be written.
            match self.socket.peek() {
                Peek::Quiet => {}
                Peek::Readable if self.meter.secure => {}
                found => {
                    gate.sealed = true;
                    gate.found = Some(found);
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
            gate.look = false;
            if gate.interest != Interest::Nothing {
                let before = tcp_state(stream).filter(|state| state.settled);
                gate.acked_before = before.map(|state| state.acked);
            }
        }
        match write(stream) {
            Ok(taken) => {
                gate.taken += taken as u64;
                if gate.interest == Interest::Silence && taken > 0 {
                    gate.first_byte.get_or_insert_with(now);
                }
                Ok(taken)
            }
            Err(error) => {
                self.socket.note_error(error.kind());
                gate.gone |= is_end(error.kind());
                Err(error)
            }
        }
    }

    fn may_have_an_answer(&self) -> bool {
        !self.read_ended && !self.meter.parting.load(Relaxed)
    }

    fn poll_metered(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.socket.stream().poll_write_ready(cx))?;
            match self.metered(&write) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The peer is gone, but its answer may be there (RFC 9112 section 9.5), and hyper reads no
                // further once a write has failed. So the write does not end until the reader has come
                // to the end of the stream, which a dead socket always has, and which wakes it.
                Err(error) if is_end(error.kind()) && self.may_have_an_answer() => {
                    return Poll::Pending;
                }
                result => return Poll::Ready(result),
            }
        }
    }
}

/// Whether an error of a write means that the peer has ended the connection.
fn is_end(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let has_room = buf.remaining() > 0;
        let poll = Pin::new(&mut self.read).poll_read(cx, buf);
        match &poll {
            Poll::Ready(Ok(())) if has_room && buf.filled().len() == before => {
                self.socket.note_end(PeerEnd::Fin);
                self.read_ended = true;
            }
            Poll::Ready(Err(error)) => {
                self.socket.note_error(error.kind());
                self.read_ended = true;
            }
            Poll::Ready(Ok(())) if buf.filled().len() > before => self.note_read(),
            _ => {}
        }
        if poll.is_pending() && self.meter.watched.load(std::sync::atomic::Ordering::SeqCst) {
            self.meter.drained.notify_waiters();
        }
        poll
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_metered(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_metered(cx, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match shut_write(self.socket.stream()) {
            // The peer was faster.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            result => Poll::Ready(result),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn metered(secure: bool) -> (Metered, Arc<Meter>, TcpStream, Arc<Counters>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let counters = Arc::new(Counters::new());
        let meter = Meter::new(Arc::clone(&counters), secure);
        meter.open(None);
        let stream = Metered::new(client.expect("connect"), Arc::clone(&meter));
        (stream, meter, accepted.expect("accept").0, counters)
    }

    async fn until_not_quiet(stream: &Metered) {
        while peek(stream.socket.stream()) == Peek::Quiet {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_the_kernel_took_is_counted_from_the_mark() {
        let (mut stream, meter, _server, _) = metered(false).await;
        stream.write_all(b"before").await.expect("write");
        let mark = meter.begin(Interest::Nothing);
        assert!(!meter.has_taken_since(mark));
        stream.write_all(b"request").await.expect("write");
        assert!(meter.has_taken_since(mark));
        assert_eq!(meter.seal(mark).taken, 7);
    }

    #[tokio::test]
    async fn nothing_is_written_once_the_verdict_is_asked_for() {
        let (mut stream, meter, mut server, _) = metered(false).await;
        let mark = meter.begin(Interest::Nothing);
        assert_eq!(meter.seal(mark).taken, 0);
        let error = stream.write_all(b"too late").await.expect_err("sealed");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        drop(stream);
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.expect("read");
        assert_eq!(received, b"");
    }

    #[tokio::test]
    async fn a_closed_connection_takes_no_byte_of_a_request() {
        let (mut stream, meter, server, _) = metered(false).await;
        drop(server);
        until_not_quiet(&stream).await;
        let mark = meter.begin(Interest::Nothing);
        stream.write_all(b"request").await.expect_err("closed");
        let traffic = meter.seal(mark);
        assert_eq!((traffic.taken, traffic.found), (0, Some(Peek::Closed)));
    }

    /// RFC 9112 section 9.2: bytes that were there before the request are not its response.
    #[tokio::test]
    async fn bytes_that_were_there_before_stop_a_request_on_plain_tcp_only() {
        for (secure, taken) in [(false, 0), (true, 7)] {
            let (mut stream, meter, mut server, _) = metered(secure).await;
            server.write_all(b"unasked").await.expect("write");
            until_not_quiet(&stream).await;
            let mark = meter.begin(Interest::Nothing);
            let result = stream.write_all(b"request").await;
            assert_eq!(result.is_ok(), secure);
            assert_eq!(meter.seal(mark).taken, taken);
        }
    }

    #[tokio::test]
    async fn only_the_first_write_of_an_exchange_is_preceded_by_a_look() {
        let (mut stream, meter, mut server, _) = metered(false).await;
        let mark = meter.begin(Interest::Nothing);
        stream.write_all(b"head").await.expect("write");
        server.write_all(b"early answer").await.expect("write");
        until_not_quiet(&stream).await;
        stream
            .write_all(b"body")
            .await
            .expect("an early answer does not stop the body");
        assert_eq!(meter.seal(mark).taken, 8);
    }

    #[tokio::test]
    async fn a_close_is_counted_once_under_the_first_reason_told() {
        let (stream, meter, _server, counters) = metered(false).await;
        meter.end_seen_as(CloseReason::PeerClosedIdle);
        meter.close_because(CloseReason::ResponseSaidClose);
        meter.close_because(CloseReason::PoolDropped);
        drop(stream);
        assert_eq!(counters.snapshot().closes.total(), 0);
        drop(meter);
        let closes = counters.snapshot().closes;
        assert_eq!(
            (closes.total(), closes.get(CloseReason::ResponseSaidClose)),
            (1, 1)
        );
    }

    #[tokio::test]
    async fn a_waiter_hears_when_everything_was_read() {
        let (mut stream, meter, mut server, _) = metered(true).await;
        server.write_all(b"ticket").await.expect("write");
        until_not_quiet(&stream).await;
        let reader = tokio::spawn(async move {
            let mut bytes = [0; 6];
            stream.read_exact(&mut bytes).await.expect("read");
            // Reads on, as hyper does on an idle connection.
            let _ = stream.read(&mut bytes).await;
        });
        meter.drained(|| true).await;
        meter.drained(|| false).await;
        reader.abort();
    }
}
