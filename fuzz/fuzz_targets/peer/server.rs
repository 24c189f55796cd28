//! The peer: runs the script of each connection over a real socket, marks every answer, and counts.
//!
//! # Invariants
//!
//! * A mark is written in the very step in which it is numbered, so that numbers are in the order of
//!   sending.
//! * A key takes effect once, whatever comes with it: the peer is a server that honours keys.
//! * Sockets are reset when they are dropped, unless the script closes them properly. A reset leaves no
//!   TIME_WAIT behind, of which thousands of runs would otherwise use up the local ports.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::Shutdown;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::StatusCode;
use socket2::SockRef;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;

use crate::script::{BODY, Connection, Framing, Op, Then};

/// What all connections know together.
#[derive(Debug, Default)]
pub struct Ledger {
    /// For each mark that was sent, by its number, the connection.
    pub marks: Vec<usize>,
    /// For each effect, the request and the connection.
    pub effects: Vec<(String, usize)>,
    /// Whether anything was sent that was not the first thing sent after a request was read: it may be
    /// on its way, and nobody waits for it.
    pub loose: bool,
    keys: HashSet<String>,
    /// The head of each request as it was read first.
    heads: HashMap<String, Vec<u8>>,
    /// How often each request's head was read.
    pub reads: HashMap<String, usize>,
    /// All bytes that each connection sent.
    sent: HashMap<usize, Vec<u8>>,
}

impl Ledger {
    fn mark(&mut self, connection: usize) -> String {
        let number = self.marks.len();
        self.marks.push(connection);
        let letter = |place: usize| char::from(b'a' + (number >> (4 * place) & 0xf) as u8);
        format!("<{}>", (0..MARK - 2).map(letter).collect::<String>())
    }

    /// How often the request took effect, but for connections on which the server claimed that it did
    /// not act on it: to believe that is right.
    pub fn effects_of(&self, id: &str) -> usize {
        let honest = |connection: &usize| {
            let sent = self.sent.get(connection).map_or(&[][..], Vec::as_slice);
            !sent.windows(3).any(|code| code == b"421" || code == b"425")
        };
        let of_request =
            |(applied, connection): &&(String, usize)| applied == id && honest(connection);
        self.effects.iter().filter(of_request).count()
    }
}

/// The length of a mark: angle brackets around letters, so that none looks like a status or a length.
pub const MARK: usize = 8;

/// The numbers of the whole marks in these bytes.
pub fn marks_in(bytes: &[u8]) -> Vec<usize> {
    let number = |window: &[u8]| {
        let letters = window.strip_prefix(b"<")?.strip_suffix(b">")?;
        let digit = |letter: &u8| matches!(letter, b'a'..=b'p').then(|| usize::from(letter - b'a'));
        let digits = letters.iter().rev().map(digit);
        digits
            .into_iter()
            .try_fold(0, |sum, digit| Some(sum << 4 | digit?))
    };
    bytes.windows(MARK).filter_map(number).collect()
}

/// Accepts connections for ever. Dropping it resets them all.
pub async fn listen(listener: TcpListener, scripts: Vec<Connection>, ledger: Arc<Mutex<Ledger>>) {
    let mut running = JoinSet::new();
    let mut scripts = scripts.into_iter();
    for index in 0.. {
        let Ok((stream, _)) = listener.accept().await else {
            return;
        };
        reset_when_dropped(&stream);
        let _ = stream.set_nodelay(true);
        let script = scripts.next().unwrap_or(Connection {
            ops: Vec::new(),
            then: Then::Serve,
        });
        let conn = Conn {
            index,
            stream,
            buffer: Vec::new(),
            request: None,
            answered: true,
            ledger: Arc::clone(&ledger),
        };
        running.spawn(conn.run(script));
    }
}

pub fn reset_when_dropped<'s>(stream: impl Into<SockRef<'s>>) {
    let _ = stream.into().set_linger(Some(Duration::ZERO));
}

struct Conn {
    index: usize,
    stream: TcpStream,
    buffer: Vec<u8>,
    request: Option<Reading>,
    /// Whether anything was sent since a request was read.
    answered: bool,
    ledger: Arc<Mutex<Ledger>>,
}

/// The request that was read last.
struct Reading {
    id: String,
    key: Option<String>,
    body_left: usize,
    applied: bool,
}

impl Conn {
    async fn run(mut self, script: Connection) {
        // A client that is gone ends the script.
        let _ = self.play(script).await;
    }

    async fn play(&mut self, script: Connection) -> io::Result<()> {
        for op in script.ops {
            match op {
                Op::ReadHead => self.read_head().await?,
                Op::ReadAll => self.read_all().await?,
                Op::Apply => self.apply(),
                Op::Answer(status) => self.answer(status).await?,
                Op::Head {
                    status,
                    old,
                    framing,
                    field,
                } => {
                    let version = if old { "1.0" } else { "1.1" };
                    let framing = framing_fields(framing);
                    let code = status.as_u16();
                    self.send(|mark| {
                        let mark = mark();
                        format!("HTTP/{version} {code} x\r\nX-Mark: {mark}\r\n{framing}{field}\r\n")
                    })
                    .await?;
                }
                Op::Marks(count) => {
                    self.send(|mark| (0..count).map(|_| mark()).collect())
                        .await?;
                }
                Op::Chunk => {
                    self.send(|mark| format!("{MARK:x}\r\n{}\r\n", mark()))
                        .await?
                }
                Op::Piece(piece) => self.send_raw(piece).await?,
                Op::Raw(mut raw) => {
                    // Nobody but the peer's own counter makes a mark.
                    raw.retain(|&b| b != b'<');
                    self.send_raw(&raw).await?;
                }
                Op::Turns(turns) => {
                    for _ in 0..turns {
                        yield_now().await;
                    }
                }
                Op::Wait(time) => sleep(Duration::from_millis(u64::from(time) * 4)).await,
                Op::Fin => SockRef::from(&self.stream).shutdown(Shutdown::Write)?,
            }
        }
        match script.then {
            Then::Serve => loop {
                self.read_all().await?;
                self.apply();
                self.answer(StatusCode::OK).await?;
                self.request = None;
            },
            Then::Close => SockRef::from(&self.stream).set_linger(None),
            Then::Rst => Ok(()),
            Then::Stall => std::future::pending().await,
            Then::Swallow => loop {
                self.buffer.clear();
                self.read_more().await?;
            },
        }
    }

    async fn read_more(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn read_head(&mut self) -> io::Result<()> {
        self.read_body().await?;
        let end = loop {
            let end = self
                .buffer
                .windows(4)
                .position(|bytes| bytes == b"\r\n\r\n");
            match end {
                Some(end) => break end + 4,
                None => self.read_more().await?,
            }
        };
        let head: Vec<u8> = self.buffer.drain(..end).collect();
        let text = std::str::from_utf8(&head).expect("an ASCII head");
        let field = |name: &str| {
            text.lines().skip(1).find_map(|line| {
                let (field, value) = line.split_once(": ")?;
                field.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
        };
        let id = field("x-id").expect("a whole request");
        assert!(
            text.ends_with("\r\n\r\n") && text.contains(" HTTP/1.1\r\n"),
            "{text}"
        );
        self.request = Some(Reading {
            key: field("idempotency-key"),
            body_left: field("content-length")
                .map_or(0, |length| length.parse().expect("a length")),
            applied: false,
            id: id.clone(),
        });
        self.answered = false;
        let mut ledger = self.ledger.lock().unwrap();
        *ledger.reads.entry(id.clone()).or_default() += 1;
        let first = ledger.heads.entry(id).or_insert_with(|| head.clone());
        assert!(*first == head, "a request changed between two attempts");
        Ok(())
    }

    async fn read_body(&mut self) -> io::Result<()> {
        loop {
            let Some(request) = &mut self.request else {
                return Ok(());
            };
            let take = request.body_left.min(self.buffer.len());
            // One comparison of memory: a loop over megabytes is slow with the fuzzer's counters in it.
            assert!(self.buffer[..take] == BODY[..take], "a strange body");
            self.buffer.drain(..take);
            request.body_left -= take;
            if request.body_left == 0 {
                return Ok(());
            }
            self.read_more().await?;
        }
    }

    async fn read_all(&mut self) -> io::Result<()> {
        if self
            .request
            .as_ref()
            .is_none_or(|request| request.body_left == 0)
        {
            self.read_head().await?;
        }
        self.read_body().await
    }

    fn apply(&mut self) {
        let Some(request) = self.request.as_mut().filter(|request| !request.applied) else {
            return;
        };
        request.applied = true;
        let mut ledger = self.ledger.lock().unwrap();
        let is_new = match &request.key {
            Some(key) => ledger.keys.insert(key.clone()),
            None => true,
        };
        if is_new {
            ledger.effects.push((request.id.clone(), self.index));
        }
    }

    async fn answer(&mut self, status: StatusCode) -> io::Result<()> {
        let code = status.as_u16();
        self.send(|mark| {
            let (in_head, in_body) = (mark(), mark());
            format!(
                "HTTP/1.1 {code} x\r\nX-Mark: {in_head}\r\nContent-Length: {MARK}\r\n\r\n{in_body}"
            )
        })
        .await
    }

    async fn send(
        &mut self,
        make: impl Fn(&mut dyn FnMut() -> String) -> String,
    ) -> io::Result<()> {
        loop {
            self.stream.writable().await?;
            let bytes = {
                let mut ledger = self.ledger.lock().unwrap();
                make(&mut || ledger.mark(self.index))
            };
            if self.try_send(bytes.as_bytes())? {
                return Ok(());
            }
        }
    }

    async fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        loop {
            self.stream.writable().await?;
            if self.try_send(bytes)? {
                return Ok(());
            }
        }
    }

    /// `false` if the kernel wants none of it now. It never takes a part of so little.
    fn try_send(&mut self, bytes: &[u8]) -> io::Result<bool> {
        if bytes.is_empty() {
            return Ok(true);
        }
        match self.stream.try_write(bytes) {
            Ok(sent) if sent < bytes.len() => Err(io::ErrorKind::WriteZero.into()),
            Ok(_) => {
                let mut ledger = self.ledger.lock().unwrap();
                ledger.loose |= std::mem::replace(&mut self.answered, true);
                ledger.sent.entry(self.index).or_default().extend(bytes);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn framing_fields(framing: Framing) -> String {
    match framing {
        Framing::None => String::new(),
        Framing::Length(marks, more) => {
            let length = usize::from(marks) * MARK + usize::from(more);
            format!("Content-Length: {length}\r\n")
        }
        Framing::TwoLengths => format!("Content-Length: {MARK}\r\nContent-Length: 0\r\n"),
        Framing::Chunked => "Transfer-Encoding: chunked\r\n".to_owned(),
        Framing::ChunkedAndLength => {
            format!("Transfer-Encoding: chunked\r\nContent-Length: {MARK}\r\n")
        }
    }
}
