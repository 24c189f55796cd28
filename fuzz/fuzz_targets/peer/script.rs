//! What one run does: the client's requests, and what each connection of the peer does.
//!
//! Pure: bytes in, a value out. Every decision is one byte, taken modulo the number of choices, in this
//! order:
//!
//! ```text
//! number of requests - 1, then for each request:
//!     method, body, keyed, barrier before it, use of the response
//! then operations of the first connection up to an `Op::Next`, which says how it goes on; then those
//! of the second connection, and so on to the end of the input
//! ```

use arbitrary::{Arbitrary, Result, Unstructured};
use http::{Method, StatusCode};

/// More requests or connections find nothing that fewer do not, and cost time.
const MAX_REQUESTS: u8 = 5;
const MAX_CONNECTIONS: usize = 8;
const MAX_OPS: usize = 16;
const MAX_RAW: u8 = 24;

#[derive(Clone, Debug)]
pub struct Script {
    pub requests: Vec<Call>,
    /// Connections beyond these serve properly.
    pub connections: Vec<Connection>,
}

#[derive(Clone, Debug)]
pub struct Call {
    pub method: Method,
    pub body: usize,
    pub keyed: bool,
    pub before: Barrier,
    pub usage: Usage,
}

/// What happens between two requests.
#[derive(Clone, Copy, Debug)]
pub enum Barrier {
    /// Nothing: whatever is under way stays so.
    None,
    /// The kernel delivers, and no task sees it before the request.
    Hold,
    /// The tasks run so many times, then as `Hold`.
    Turns(u8),
    /// The paused clock moves on, then as `Hold`.
    Wait(u8),
}

/// What the client does with a request that runs, or with its response.
#[derive(Clone, Copy, Debug)]
pub enum Usage {
    Read,
    DropBody,
    ReadOneFrame,
    /// Drops the request after so many turns.
    Cancel(u8),
}

#[derive(Clone, Debug)]
pub struct Connection {
    pub ops: Vec<Op>,
    pub then: Then,
}

/// How a connection goes on after its operations.
#[derive(Clone, Copy, Debug)]
pub enum Then {
    /// Answers every request properly.
    Serve,
    Close,
    Rst,
    /// Neither reads nor writes.
    Stall,
    /// Reads and never answers.
    Swallow,
}

#[derive(Clone, Debug)]
pub enum Op {
    /// Reads a head, past what is left of the request before.
    ReadHead,
    /// Reads the rest of the request; with its head, if there is none yet.
    ReadAll,
    /// The request that was read last takes effect.
    Apply,
    /// A complete and correct response.
    Answer(StatusCode),
    /// A response head, up to and with its empty line.
    Head {
        status: StatusCode,
        old: bool,
        framing: Framing,
        field: &'static str,
    },
    /// So many marks, as they are.
    Marks(u8),
    /// A chunk of one mark.
    Chunk,
    /// Something that confuses a parser.
    Piece(&'static [u8]),
    Raw(Vec<u8>),
    /// Lets the other tasks run.
    Turns(u8),
    /// Milliseconds of the paused clock.
    Wait(u8),
    Fin,
}

#[derive(Clone, Copy, Debug)]
pub enum Framing {
    None,
    /// As many marks, and so many bytes more.
    Length(u8, u8),
    TwoLengths,
    Chunked,
    ChunkedAndLength,
}

const STATUS: [u16; 20] = [
    200, 200, 200, 100, 103, 101, 204, 206, 304, 302, 400, 408, 409, 421, 425, 429, 500, 502, 503,
    504,
];

const FIELDS: [&str; 12] = [
    "",
    "Connection: close\r\n",
    "Connection: keep-alive\r\n",
    "Retry-After: 0\r\n",
    "Retry-After: 1\r\n",
    "Retry-After: 99999999999999999999\r\n",
    "Retry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\n",
    "Idempotent-Replayed: true\r\n",
    "Upgrade: x\r\nConnection: upgrade\r\n",
    "Keep-Alive: timeout=0\r\n",
    "Trailer: x\r\n",
    "X: a\r\n b\r\n",
];

const PIECES: [&[u8]; 16] = [
    b"\r\n",
    b"\r\n\r\n",
    b"\n",
    b"\0",
    b" ",
    b"0\r\n\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"8;x=\"\r\n\"\r\n",
    b"FFFFFFFFFFFFFFFFF\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/2.0 200 OK\r\n\r\n",
    b"Content-Length: 8\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n",
];

impl<'a> Arbitrary<'a> for Script {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let mut requests = Vec::new();
        for _ in 0..=byte(u)? % MAX_REQUESTS {
            requests.push(Call::arbitrary(u)?);
        }
        let mut connections = Vec::new();
        while !u.is_empty() && connections.len() < MAX_CONNECTIONS {
            connections.push(Connection::arbitrary(u)?);
        }
        Ok(Script {
            requests,
            connections,
        })
    }
}

impl<'a> Arbitrary<'a> for Call {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let methods = [
            Method::POST,
            Method::GET,
            Method::PUT,
            Method::HEAD,
            Method::DELETE,
            Method::PATCH,
            Method::OPTIONS,
        ];
        Ok(Call {
            method: pick(u, &methods)?,
            body: match byte(u)? {
                0 => 0,
                // More than the buffers of both kernels: the upload waits for its reader.
                0xff => LARGE_BODY,
                size => size.into(),
            },
            keyed: byte(u)? % 2 == 1,
            before: match byte(u)? {
                n if n % 4 == 0 => Barrier::None,
                n if n % 4 == 1 => Barrier::Hold,
                n if n % 4 == 2 => Barrier::Turns(n / 4),
                n => Barrier::Wait(n / 4),
            },
            usage: match byte(u)? {
                n if n % 8 < 5 => Usage::Read,
                n if n % 8 == 5 => Usage::DropBody,
                n if n % 8 == 6 => Usage::ReadOneFrame,
                n => Usage::Cancel(n / 8),
            },
        })
    }
}

const LARGE_BODY: usize = 4 << 20;

/// All that any request sends.
pub static BODY: [u8; LARGE_BODY] = [b'x'; LARGE_BODY];

impl<'a> Arbitrary<'a> for Connection {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Self> {
        let mut ops = Vec::new();
        while !u.is_empty() && ops.len() < MAX_OPS {
            match op(u)? {
                Some(op) => ops.push(op),
                None => break,
            }
        }
        let then = [
            Then::Serve,
            Then::Serve,
            Then::Close,
            Then::Rst,
            Then::Stall,
            Then::Swallow,
        ];
        let then = pick(u, &then)?;
        Ok(Connection { ops, then })
    }
}

/// `None` ends the connection's operations.
fn op(u: &mut Unstructured<'_>) -> Result<Option<Op>> {
    Ok(Some(match byte(u)? % 14 {
        0 => Op::ReadAll,
        1 => Op::Apply,
        2 => Op::Answer(status(u)?),
        3 => return Ok(None),
        4 => Op::ReadHead,
        5 | 6 => Op::Head {
            status: status(u)?,
            old: byte(u)? % 8 == 7,
            framing: match byte(u)? {
                n if n % 8 == 0 => Framing::None,
                n if n % 8 < 5 => Framing::Length(n / 8 % 4, n / 32),
                n if n % 8 == 5 => Framing::TwoLengths,
                n if n % 8 == 6 => Framing::Chunked,
                _ => Framing::ChunkedAndLength,
            },
            field: pick(u, &FIELDS)?,
        },
        7 => Op::Marks(byte(u)? % 4),
        8 => Op::Chunk,
        9 => Op::Piece(pick(u, &PIECES)?),
        10 => {
            let length = byte(u)? % MAX_RAW;
            let take = usize::from(length).min(u.len());
            Op::Raw(u.bytes(take)?.to_vec())
        }
        11 => Op::Turns(byte(u)? % 32),
        12 => Op::Wait(byte(u)?),
        _ => Op::Fin,
    }))
}

fn status(u: &mut Unstructured<'_>) -> Result<StatusCode> {
    let code = pick(u, &STATUS)?;
    Ok(StatusCode::from_u16(code).expect("a valid status"))
}

fn pick<T: Clone>(u: &mut Unstructured<'_>, from: &[T]) -> Result<T> {
    Ok(from[usize::from(byte(u)?) % from.len()].clone())
}

/// Zero when the input has ended.
fn byte(u: &mut Unstructured<'_>) -> Result<u8> {
    u8::arbitrary(u)
}
