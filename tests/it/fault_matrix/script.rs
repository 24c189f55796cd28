//! One case: a request, and what the server does to it.
//!
//! Pure: a seed and a number give a case, and nothing else goes into it. The first numbers walk through
//! every byte offset of small requests and responses; the rest is drawn.

use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;

/// What the client sends.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Kind {
    Get,
    Put,
    Delete,
    Post,
    /// With an idempotency key.
    Keyed,
    /// Without a key, but declared idempotent by its caller.
    Declared,
}

impl Kind {
    pub(crate) const ALL: [Kind; 6] = [
        Kind::Get,
        Kind::Put,
        Kind::Delete,
        Kind::Post,
        Kind::Keyed,
        Kind::Declared,
    ];

    pub(crate) fn method(self) -> &'static str {
        match self {
            Kind::Get => "GET",
            Kind::Put => "PUT",
            Kind::Delete => "DELETE",
            Kind::Post | Kind::Keyed | Kind::Declared => "POST",
        }
    }

    pub(crate) fn has_body(self) -> bool {
        !matches!(self, Kind::Get | Kind::Delete)
    }

    /// At least as many bytes as a small request of this kind has.
    fn reach(self, chunked: bool) -> usize {
        let head = match self {
            Kind::Get => 50,
            Kind::Delete => 53,
            Kind::Put | Kind::Post | Kind::Declared => 92,
            Kind::Keyed => 124,
        };
        head + if chunked { 22 } else { 0 }
    }
}

/// A message body.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Shape {
    pub(crate) big: bool,
    pub(crate) chunked: bool,
}

/// How the server ends a connection.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum End {
    /// Closes the socket: a FIN, or a reset where something was left unread.
    Close,
    Reset,
    /// Ends its own direction, reads on to the end, and closes then.
    HalfClose,
    /// Does nothing more until the client gives up.
    Stall,
    /// Sends this many bytes of a refusal although it has not read everything, and closes.
    Answer(usize),
}

/// What the server makes of what it has read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Act {
    Never,
    /// Once it has the whole request, be it before the fault or behind its own half-close.
    Whole,
    /// Of a part as well, as a streaming handler does.
    Part,
}

/// What the server does to one attempt.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fault {
    /// After `at` bytes of the request.
    Request { at: usize, then: End, act: Act },
    /// After `at` bytes of the response to a request that it has read, and acted on if `act`.
    Response { at: usize, then: End, act: bool },
    /// On an idle connection, before the request.
    Idle(Idle),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Idle {
    /// Closed long before.
    Close,
    Reset,
    /// Closed so long after the client set out, never reading: the two cross.
    CloseRace(Duration),
    ResetRace(Duration),
    /// The one case that looks like a full close and is not: half closed so long after the client set
    /// out, then read, acted on, and reset before the kernel's delayed acknowledgement.
    Hole(Duration),
}

impl Idle {
    fn is_race(self) -> bool {
        !matches!(self, Idle::Close | Idle::Reset)
    }
}

impl Fault {
    pub(crate) fn is_race(&self) -> bool {
        matches!(self, Fault::Idle(idle) if idle.is_race())
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Fault::Request { then, .. } => match then {
                End::Close => "request: close",
                End::Reset => "request: reset",
                End::HalfClose => "request: half-close, read on",
                End::Stall => "request: stall",
                End::Answer(_) => "request: early answer",
            },
            Fault::Response { then, .. } => match then {
                End::Close => "response: close",
                End::Reset => "response: reset",
                End::HalfClose => "response: half-close",
                End::Stall => "response: stall",
                End::Answer(_) => "response: answer",
            },
            Fault::Idle(Idle::Close) => "idle: close, seen",
            Fault::Idle(Idle::Reset) => "idle: reset, seen",
            Fault::Idle(Idle::CloseRace(_)) => "idle: close, crossing",
            Fault::Idle(Idle::ResetRace(_)) => "idle: reset, crossing",
            Fault::Idle(Idle::Hole(_)) => "idle: half-close, act, reset (the hole)",
        }
    }

    pub(crate) fn is_stall(&self) -> bool {
        matches!(
            self,
            Fault::Request {
                then: End::Stall,
                ..
            } | Fault::Response {
                then: End::Stall,
                ..
            }
        )
    }

    pub(crate) fn is_hole(&self) -> bool {
        matches!(self, Fault::Idle(Idle::Hole(_)))
    }
}

/// A request and its faults.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) number: usize,
    pub(crate) tls: bool,
    /// The first attempt goes on a connection that has served a request before.
    pub(crate) reused: bool,
    pub(crate) kind: Kind,
    pub(crate) upload: Shape,
    pub(crate) download: Shape,
    /// For the first attempt, and for the second one where there are two.
    pub(crate) faults: Vec<Fault>,
    /// Over TLS: with a close_notify, where there is a close.
    pub(crate) polite: bool,
    /// Connections without a fault close after their answer.
    pub(crate) frugal: bool,
}

const SMALL: Shape = Shape {
    big: false,
    chunked: false,
};
/// More than any message is long: the fault comes behind its last byte.
pub(crate) const WHOLE: usize = usize::MAX;
/// As many bytes as a small response has at least.
const RESPONSE_REACH: usize = 64;
const BIG: usize = 1 << 20;
const ENDS: [End; 3] = [End::Close, End::Reset, End::HalfClose];
/// Drawn cases behind the exhaustive ones.
const DRAWN: usize = 7_000;

/// One row of the exhaustive part: every offset once for each of these.
#[derive(Clone, Copy)]
struct Row {
    tls: bool,
    reused: bool,
    kind: Kind,
    upload: Shape,
    download: Shape,
    fault: Fault,
}

fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let mut rows = Vec::new();
        for tls in [false, true] {
            for reused in [false, true] {
                for chunked in [false, true] {
                    // Chunks on every second sort of connection: framing and connection do not meet.
                    if chunked && tls != reused {
                        continue;
                    }
                    for kind in Kind::ALL {
                        let shape = Shape {
                            big: false,
                            chunked,
                        };
                        let mut push = |upload, download, fault| {
                            rows.push(Row {
                                tls,
                                reused,
                                kind,
                                upload,
                                download,
                                fault,
                            });
                        };
                        for then in ENDS {
                            if kind.has_body() || !chunked {
                                for at in 0..=kind.reach(chunked) {
                                    let act = Act::Never;
                                    push(shape, SMALL, Fault::Request { at, then, act });
                                }
                                for act in [Act::Never, Act::Whole] {
                                    let at = WHOLE;
                                    push(shape, SMALL, Fault::Request { at, then, act });
                                }
                            }
                            for at in 0..=RESPONSE_REACH {
                                let act = true;
                                push(SMALL, shape, Fault::Response { at, then, act });
                            }
                        }
                    }
                }
            }
        }
        rows
    })
}

/// How many cases a run has.
pub(crate) fn cases() -> usize {
    rows().len() + DRAWN
}

impl Case {
    /// The case of this number.
    pub(crate) fn of(seed: u64, number: usize) -> Case {
        let mixed = seed ^ (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut random = fastrand::Rng::with_seed(mixed);
        let row = match rows().get(number) {
            Some(row) => walked(*row, &mut random),
            None => drawn(&mut random),
        };
        let mut faults = vec![row.fault];
        let is_idle = matches!(row.fault, Fault::Idle(_));
        if number >= rows().len() && !is_idle && random.u8(0..4) == 0 {
            faults.push(any_fault(row.kind, row.upload, row.download, &mut random));
        }
        Case {
            number,
            tls: row.tls,
            reused: row.reused,
            kind: row.kind,
            upload: row.upload,
            download: row.download,
            faults,
            polite: random.bool(),
            frugal: random.u8(0..8) > 0,
        }
    }

    pub(crate) fn path(&self) -> String {
        format!("/{}", self.number)
    }

    /// As it stands in the field.
    pub(crate) fn key(&self) -> Option<String> {
        (self.kind == Kind::Keyed).then(|| format!("\"k-{}\"", self.number))
    }

    /// What the client sends.
    pub(crate) fn body(&self) -> Bytes {
        let length = match (self.kind.has_body(), self.upload.big) {
            (false, _) => 0,
            (true, false) => 10 + self.number % 3,
            (true, true) => BIG,
        };
        let start = self.number.wrapping_mul(7919) % BIG;
        noise().slice(start..start + length)
    }

    /// What the server answers.
    pub(crate) fn answer(&self) -> Bytes {
        let mut answer = format!("c{}", self.number).into_bytes();
        if self.download.big {
            let start = self.number.wrapping_mul(104_729) % BIG;
            answer.extend_from_slice(&noise()[start..start + BIG]);
        }
        answer.into()
    }

    /// The response in full, as it goes on the wire, and how long its head is.
    pub(crate) fn response(&self, close: bool) -> (Vec<u8>, usize) {
        let answer = self.answer();
        let close = if close { "connection: close\r\n" } else { "" };
        let mut wire = if self.download.chunked {
            format!("HTTP/1.1 200 OK\r\n{close}transfer-encoding: chunked\r\n\r\n")
        } else {
            let length = answer.len();
            format!("HTTP/1.1 200 OK\r\n{close}content-length: {length}\r\n\r\n")
        }
        .into_bytes();
        let head = wire.len();
        if self.download.chunked {
            for chunk in answer.chunks(if self.download.big { 60_000 } else { 3 }) {
                wire.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\n\r\n");
        } else {
            wire.extend_from_slice(&answer);
        }
        (wire, head)
    }

    /// Whether offset `at` of this case's request is meant to be every one.
    pub(crate) fn request_reach(&self) -> Option<usize> {
        (!self.upload.big).then(|| self.kind.reach(self.upload.chunked))
    }

    pub(crate) fn has_hole(&self) -> bool {
        self.faults.iter().any(Fault::is_hole)
    }
}

/// An exhaustive row; what it leaves open is drawn.
fn walked(mut row: Row, random: &mut fastrand::Rng) -> Row {
    if let Fault::Request { at, then, act } = &mut row.fault
        && *at != WHOLE
    {
        *act = match (then, random.u8(0..4)) {
            (_, 0) => Act::Part,
            (_, 1) => Act::Never,
            _ => Act::Whole,
        };
    }
    row
}

fn drawn(random: &mut fastrand::Rng) -> Row {
    let one_of = |random: &mut fastrand::Rng, of: u8| random.u8(0..of) == 0;
    let kind = match random.u8(0..10) {
        0..4 => Kind::Post,
        4..6 => Kind::Keyed,
        _ => Kind::ALL[random.usize(0..6)],
    };
    let upload = Shape {
        big: kind.has_body() && one_of(random, 6),
        chunked: kind.has_body() && random.bool(),
    };
    let download = Shape {
        big: one_of(random, 8),
        chunked: random.bool(),
    };
    let mut row = Row {
        tls: one_of(random, 3),
        reused: random.bool(),
        kind,
        upload,
        download,
        fault: any_fault(kind, upload, download, random),
    };
    if random.u8(0..10) < 4 {
        let delay = Duration::from_micros(random.u64(0..RACE_MICROS));
        let idle = match random.u8(0..12) {
            0 => Idle::Close,
            1 => Idle::Reset,
            2 => Idle::ResetRace(delay),
            3 => Idle::Hole(delay),
            _ => Idle::CloseRace(delay),
        };
        row.fault = Fault::Idle(idle);
        row.reused = true;
        row.tls &= !matches!(idle, Idle::Hole(_));
        if idle.is_race() {
            // What is asked for its body says when it is about to go.
            row.upload.big = false;
            if !row.kind.has_body() {
                row.kind = Kind::Post;
            }
        }
    }
    row
}

/// About the time from the client's first look at a request body to the first byte out, in a debug build.
const RACE_MICROS: u64 = 60;

fn any_fault(kind: Kind, upload: Shape, download: Shape, random: &mut fastrand::Rng) -> Fault {
    let then = match random.u8(0..40) {
        0 => End::Stall,
        1..6 => End::Answer(if random.bool() {
            WHOLE
        } else {
            random.usize(0..70)
        }),
        other => ENDS[usize::from(other) % 3],
    };
    let upload_reach = kind.reach(upload.chunked) + if upload.big { BIG + 500 } else { 0 };
    if random.bool() || matches!(then, End::Answer(_)) {
        Fault::Request {
            at: random.usize(0..=upload_reach),
            then,
            act: [Act::Never, Act::Whole, Act::Part][random.usize(0..3)],
        }
    } else {
        let big = if download.big { BIG } else { 0 };
        Fault::Response {
            at: random.usize(0..=RESPONSE_REACH + big),
            then,
            act: random.u8(0..4) > 0,
        }
    }
}

/// Bytes of which no two stretches are alike.
fn noise() -> &'static Bytes {
    static NOISE: OnceLock<Bytes> = OnceLock::new();
    NOISE.get_or_init(|| {
        let mut noise = vec![0; 2 * BIG];
        fastrand::Rng::with_seed(1).fill(&mut noise);
        noise.into()
    })
}
