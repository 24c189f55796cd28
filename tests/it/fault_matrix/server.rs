//! The server: reads exactly so many bytes of a request, or writes so many of a response, and then does
//! what the script says.
//!
//! A [`Lane`] is one server with its two listeners; it has one case at a time. Each connection runs on a
//! thread of its own with blocking sockets, so that nothing the client's runtime does moves it. The first
//! connections to receive the case's request take its faults in turn; all others behave.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use socket2::SockRef;
use tokio::sync::Notify;

use super::ledger::{Attempt, Ledger};
use super::message::Incoming;
use super::script::{Act, Case, End, Fault, Idle, WHOLE};

/// Held for reading while a script closes a socket whose close must be there at once, for writing while the
/// process starts another one: until that executes its program it has a copy of every descriptor, and a close
/// closes nothing.
pub(crate) static FORKS: RwLock<()> = RwLock::new(());

/// How long a script waits for the client before that is a fault of the client's.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the client waits for a fault that is to cross it: the server's thread may have no processor.
const MOMENT: Duration = Duration::from_millis(20);

/// A server for one case at a time.
pub(crate) struct Lane {
    pub(crate) plain: SocketAddr,
    pub(crate) secure: Option<SocketAddr>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    running: Mutex<Running>,
    /// Connections that are in the middle of something.
    busy: AtomicUsize,
    /// An idle fault has its connection: it closed it, or waits for `go`.
    idle_taken: AtomicBool,
    go: AtomicBool,
    gone: AtomicBool,
    over: AtomicBool,
    moved: Notify,
}

#[derive(Default)]
struct Running {
    case: Option<Arc<Case>>,
    faults: VecDeque<Fault>,
    warming: bool,
    ledger: Ledger,
}

impl Lane {
    /// Starts a server on 127.0.0.`host`: addresses of its own, so that ports do not run out.
    pub(crate) fn start(host: u8, tls: Option<Arc<ServerConfig>>) -> Lane {
        let shared = Arc::new(Shared::default());
        let plain = listen(host, None, &shared);
        // A certificate is for one address.
        let secure = tls.map(|config| listen(1, Some(config), &shared));
        Lane {
            plain,
            secure,
            shared,
        }
    }

    /// Begins a case. The next request is a warm-up if the case wants a reused connection.
    pub(crate) fn begin(&self, case: &Arc<Case>) {
        let mut running = self.shared.running();
        *running = Running {
            case: Some(Arc::clone(case)),
            faults: case.faults.iter().copied().collect(),
            warming: case.reused,
            ledger: Ledger::default(),
        };
        self.shared.idle_taken.store(false, SeqCst);
        self.shared.go.store(false, SeqCst);
        self.shared.gone.store(false, SeqCst);
        self.shared.over.store(false, SeqCst);
    }

    /// The warm-up is answered. Waits for an idle fault to be in its place.
    pub(crate) async fn warmed(&self, is_idle: bool) {
        self.shared.running().warming = false;
        if is_idle {
            self.wait_until(|| self.shared.idle_taken.load(SeqCst))
                .await;
        }
    }

    /// The client is about to write its first byte. Starts the clock of a fault that is to cross it, and
    /// returns when that runs: from here on both are under way, each on a processor of its own.
    pub(crate) fn go(&self) {
        if !self.shared.go.swap(true, SeqCst) {
            wait_for(&self.shared.gone, MOMENT, std::hint::spin_loop);
        }
    }

    /// Lets the server go on without waiting for it: nothing crosses in this case.
    pub(crate) fn release(&self) {
        self.shared.go.store(true, SeqCst);
    }

    /// Waits until more than `earlier` of the case's faults have met their attempt.
    pub(crate) async fn fault_met(&self, earlier: usize) {
        let met = || {
            let running = self.shared.running();
            let faults = running.case.as_ref().map_or(0, |case| case.faults.len());
            faults - running.faults.len() > earlier
        };
        self.wait_until(met).await;
    }

    /// The client has its outcome. Waits for every connection to have done what it does, and gives the
    /// book.
    pub(crate) async fn finish(&self) -> Ledger {
        self.shared.over.store(true, SeqCst);
        self.shared.go.store(true, SeqCst);
        self.wait_until(|| self.shared.busy.load(SeqCst) == 0).await;
        std::mem::take(&mut self.shared.running().ledger)
    }

    async fn wait_until(&self, holds: impl Fn() -> bool) {
        loop {
            let moved = self.shared.moved.notified();
            if holds() {
                return;
            }
            moved.await;
        }
    }
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_idle(&self) -> Option<Idle> {
        let mut running = self.running();
        match running.faults.front() {
            Some(&Fault::Idle(idle)) => {
                running.faults.pop_front();
                Some(idle)
            }
            _ => None,
        }
    }

    fn wrong(&self, what: impl Into<String>) {
        self.running().ledger.wrongs.push(what.into());
    }
}

/// While it lives, the case is not over.
struct Busy<'a>(&'a Shared);

impl<'a> Busy<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.busy.fetch_add(1, SeqCst);
        Busy(shared)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, SeqCst);
        self.0.moved.notify_one();
    }
}

fn listen(host: u8, tls: Option<Arc<ServerConfig>>, shared: &Arc<Shared>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, host), 0)).expect("bind");
    let address = listener.local_addr().expect("address");
    let shared = Arc::clone(shared);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (tls, shared) = (tls.clone(), Arc::clone(&shared));
            std::thread::spawn(move || {
                if let Some(wire) = Wire::open(stream, tls) {
                    serve(wire, &shared);
                }
            });
        }
    });
    address
}

fn serve(mut wire: Wire, shared: &Shared) {
    let mut warmed = false;
    loop {
        if warmed && let Some(idle) = shared.take_idle() {
            let _busy = Busy::new(shared);
            return run_idle(wire, idle, shared);
        }
        if !wire.wait_for_request() {
            return;
        }
        let _busy = Busy::new(shared);
        let (case, warming, fault) = {
            let mut running = shared.running();
            let warming = running.warming;
            let fault = (!warming).then(|| running.faults.pop_front()).flatten();
            shared.moved.notify_one();
            let Some(case) = running.case.clone() else {
                return;
            };
            (case, warming, fault)
        };
        let mut exchange = Exchange {
            case: &case,
            shared,
            incoming: Incoming::default(),
            attempt: Attempt {
                fault,
                ..Attempt::default()
            },
        };
        match fault {
            _ if warming => {
                exchange.read(&mut wire, WHOLE);
                if wire.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").is_err() {
                    return;
                }
                warmed = true;
            }
            Some(Fault::Request { at, then, act }) => {
                return exchange.stop_in_request(wire, at, then, act);
            }
            Some(Fault::Response { at, then, act }) => {
                return exchange.stop_in_response(wire, at, then, act);
            }
            Some(Fault::Idle(_)) => return shared.wrong("an idle fault met a request"),
            None => {
                exchange.read(&mut wire, WHOLE);
                if !exchange.incoming.is_complete() {
                    return exchange.note();
                }
                exchange.act(Act::Whole);
                exchange.note();
                let (response, _) = case.response(case.frugal);
                if wire.write_all(&response).is_err() || case.frugal {
                    return wire.close(case.polite);
                }
            }
        }
    }
}

/// One request on its way in, and what becomes of it.
struct Exchange<'a> {
    case: &'a Case,
    shared: &'a Shared,
    incoming: Incoming,
    attempt: Attempt,
}

impl Exchange<'_> {
    fn read(&mut self, wire: &mut Wire, at: usize) {
        if let Err(error) = self.incoming.read_to(wire, at)
            && error.kind() == io::ErrorKind::WouldBlock
        {
            self.shared
                .wrong("the server waited in vain for the client");
        }
    }

    fn act(&mut self, act: Act) {
        let ready = match act {
            Act::Never => false,
            Act::Whole => self.incoming.is_complete(),
            // A handler runs once it has the head; one that needs no key needs no more than the target.
            Act::Part => self.case.key().is_none() || self.incoming.has_head(),
        };
        if let Some(path) = self.incoming.path().filter(|_| ready) {
            let key = self.incoming.field("idempotency-key");
            self.shared.running().ledger.act(&path, key.as_deref());
        }
    }

    /// Into the book with it, compared with what it should have been.
    fn note(&mut self) {
        self.attempt.read = self.incoming.len();
        self.attempt.head = String::from_utf8_lossy(self.incoming.head()).into_owned();
        self.attempt.complete = self.incoming.is_complete();
        let case = self.case;
        let mut wrongs = Vec::new();
        if self.incoming.path().is_some_and(|path| path != case.path()) {
            wrongs.push("a request of another case".to_owned());
        }
        if self.incoming.has_head() && self.incoming.field("idempotency-key") != case.key() {
            wrongs.push("an attempt has another key, or none".to_owned());
        }
        let body = case.body();
        let got = self.incoming.body();
        let right = match self.attempt.complete {
            true => got == &body[..],
            false => body.starts_with(got),
        };
        if !right {
            wrongs.push(format!("a wrong body of {} bytes", got.len()));
        }
        if self.attempt.complete
            && case
                .request_reach()
                .is_some_and(|reach| self.incoming.len() > reach)
        {
            wrongs.push("the matrix does not reach the end of this request".to_owned());
        }
        let mut running = self.shared.running();
        running.ledger.wrongs.append(&mut wrongs);
        running.ledger.note(std::mem::take(&mut self.attempt));
    }

    fn stop_in_request(mut self, mut wire: Wire, at: usize, then: End, act: Act) {
        self.read(&mut wire, at);
        self.act(act);
        match then {
            End::Close => {
                self.note();
                wire.close(self.case.polite);
            }
            End::Reset => {
                self.note();
                wire.reset();
            }
            End::HalfClose => {
                wire.end_writing(self.case.polite);
                let had = self.incoming.is_complete() || act == Act::Part;
                self.read(&mut wire, WHOLE);
                if !had {
                    self.act(act);
                }
                self.note();
            }
            End::Stall => {
                self.note();
                self.wait_for_the_end();
            }
            End::Answer(length) => {
                let refusal = refusal(self.case);
                let length = length.min(refusal.len());
                let id = format!("c{}", self.case.number).len();
                self.attempt.head_answered = length >= refusal.len() - id;
                self.attempt.refused = length == refusal.len();
                self.note();
                let _ = wire.write_all(&refusal[..length]);
                wire.close(self.case.polite);
            }
        }
    }

    fn stop_in_response(mut self, mut wire: Wire, at: usize, then: End, act: bool) {
        self.read(&mut wire, WHOLE);
        let (response, head) = self.case.response(false);
        let at = at.min(response.len());
        // Who answers in full has acted.
        if act || at == response.len() {
            self.act(Act::Whole);
        }
        self.attempt.head_answered = at >= head;
        self.note();
        let _ = wire.write_all(&response[..at]);
        match then {
            End::Close | End::Answer(_) => wire.close(self.case.polite),
            End::Reset => wire.reset(),
            End::HalfClose => {
                wire.end_writing(self.case.polite);
                wire.read_to_end();
            }
            End::Stall => self.wait_for_the_end(),
        }
    }

    /// Until the client has given up.
    fn wait_for_the_end(&self) {
        wait_for(&self.shared.over, PATIENCE, || {
            std::thread::sleep(Duration::from_millis(1));
        });
    }
}

fn run_idle(mut wire: Wire, idle: Idle, shared: &Shared) {
    let Some(case) = shared.running().case.clone() else {
        return;
    };
    let taken = || {
        shared.idle_taken.store(true, SeqCst);
        shared.moved.notify_one();
    };
    let mut attempt = Attempt {
        fault: Some(Fault::Idle(idle)),
        ..Attempt::default()
    };
    let cross = |delay: Duration| {
        taken();
        wait_for(&shared.go, PATIENCE, std::hint::spin_loop);
        shared.gone.store(true, SeqCst);
        spin(delay);
    };
    match idle {
        Idle::Close | Idle::Reset => {
            attempt.closed_unread = true;
            shared.running().ledger.note(attempt);
            {
                let _no_fork = FORKS.read();
                match idle {
                    Idle::Close => wire.close(case.polite),
                    _ => wire.reset(),
                }
            }
            taken();
        }
        Idle::CloseRace(delay) => {
            cross(delay);
            // In two steps, so that it is known what was there first: what is not to be read now has
            // not been received before our FIN, and nobody will ever read it.
            let no_fork = FORKS.read();
            wire.end_writing(case.polite);
            attempt.closed_unread = wire.is_quiet();
            drop(wire);
            drop(no_fork);
            shared.running().ledger.note(attempt);
        }
        Idle::ResetRace(delay) => {
            cross(delay);
            wire.reset();
            shared.running().ledger.note(attempt);
        }
        Idle::Hole(delay) => {
            cross(delay);
            wire.end_writing(false);
            let mut exchange = Exchange {
                case: &case,
                shared,
                incoming: Incoming::default(),
                attempt,
            };
            exchange.read(&mut wire, WHOLE);
            exchange.act(Act::Whole);
            exchange.note();
            // The client has to see the FIN before the reset, and no acknowledgement: this is well
            // within the 40 ms that Linux delays one at least.
            spin(10 * delay);
            wire.reset();
        }
    }
}

/// An early refusal: the server has acted on what it has or not, and wants no more.
fn refusal(case: &Case) -> Vec<u8> {
    let id = format!("c{}", case.number);
    format!(
        "HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{id}",
        id.len()
    )
    .into_bytes()
}

#[allow(clippy::disallowed_methods)]
fn wait_for(flag: &AtomicBool, longest: Duration, pause: impl Fn()) {
    let started = Instant::now();
    while !flag.load(SeqCst) && started.elapsed() < longest {
        pause();
    }
}

#[allow(clippy::disallowed_methods)]
fn spin(time: Duration) {
    let started = Instant::now();
    while started.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// One connection of the server's.
enum Wire {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ServerConnection, TcpStream>>),
}

impl Wire {
    fn open(stream: TcpStream, tls: Option<Arc<ServerConfig>>) -> Option<Wire> {
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.set_write_timeout(Some(PATIENCE)).ok()?;
        let Some(config) = tls else {
            return Some(Wire::Plain(stream));
        };
        let mut stream = StreamOwned::new(ServerConnection::new(config).ok()?, stream);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).ok()?;
        }
        Some(Wire::Tls(Box::new(stream)))
    }

    fn tcp(&self) -> &TcpStream {
        match self {
            Wire::Plain(stream) => stream,
            Wire::Tls(stream) => &stream.sock,
        }
    }

    /// Waits for the first byte of a request and leaves it unread. `false` when there will be none.
    fn wait_for_request(&mut self) -> bool {
        /// A TLS 1.3 record of this length is an alert: two bytes, their type, and a tag.
        const ALERT: u16 = 2 + 1 + 16;
        if let Wire::Tls(stream) = self {
            let state = stream.conn.process_new_packets();
            if state.is_ok_and(|state| state.plaintext_bytes_to_read() > 0) {
                return true;
            }
        }
        let mut header = [0; 5];
        match (self.tcp().peek(&mut header), self) {
            (Ok(0) | Err(_), _) => false,
            (Ok(_), Wire::Plain(_)) => true,
            (Ok(_), Wire::Tls(_)) => u16::from_be_bytes([header[3], header[4]]) != ALERT,
        }
    }

    fn is_quiet(&self) -> bool {
        let _ = self.tcp().set_nonblocking(true);
        let peeked = self.tcp().peek(&mut [0]);
        matches!(peeked, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    fn close(mut self, polite: bool) {
        if polite {
            self.say_goodbye();
        }
    }

    fn reset(self) {
        let _ = SockRef::from(self.tcp()).set_linger(Some(Duration::ZERO));
    }

    fn end_writing(&mut self, polite: bool) {
        if polite {
            self.say_goodbye();
        }
        let _ = self.tcp().shutdown(Shutdown::Write);
    }

    fn say_goodbye(&mut self) {
        if let Wire::Tls(stream) = self {
            stream.conn.send_close_notify();
            let _ = stream.flush();
        }
    }

    fn read_to_end(&mut self) {
        let mut scrap = [0; 4096];
        while self.read(&mut scrap).is_ok_and(|read| read > 0) {}
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Wire::Plain(stream) => stream.read(buffer),
            Wire::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Wire::Plain(stream) => stream.write(bytes),
            Wire::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Wire::Plain(stream) => stream.flush(),
            Wire::Tls(stream) => stream.flush(),
        }
    }
}
