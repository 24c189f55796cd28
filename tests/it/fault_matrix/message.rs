//! A request as far as it was read: head, framing and body, whatever byte it stops at.

use std::io::{self, Read};

/// What came in so far.
#[derive(Default)]
pub(crate) struct Incoming {
    raw: Vec<u8>,
    /// Where the body begins, once the head is there.
    head_end: Option<usize>,
    framing: Framing,
    /// The content of the chunks, without their framing.
    content: Vec<u8>,
    complete: bool,
}

#[derive(Clone, Copy, Default)]
enum Framing {
    #[default]
    None,
    Length(usize),
    /// The next chunk's size line begins here.
    Size {
        at: usize,
    },
    /// So much of a chunk is still to come.
    Chunk {
        at: usize,
        left: usize,
    },
    /// Only the empty line behind the last chunk.
    Last {
        at: usize,
    },
}

impl Incoming {
    /// Reads until `at` bytes are there, or the whole request, or nothing more comes. Never a byte more.
    pub(crate) fn read_to(&mut self, from: &mut impl Read, at: usize) -> io::Result<()> {
        while !self.complete && self.raw.len() < at {
            let had = self.raw.len();
            let wanted = (at - had).min(64 * 1024);
            self.raw.resize(had + wanted, 0);
            let read = from.read(&mut self.raw[had..]);
            self.raw
                .truncate(had + read.as_ref().map_or(0, |read| *read));
            if read? == 0 {
                return Ok(());
            }
            self.parse();
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.raw.len()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    pub(crate) fn has_head(&self) -> bool {
        self.head_end.is_some()
    }

    /// The head, or as much of it as there is.
    pub(crate) fn head(&self) -> &[u8] {
        &self.raw[..self.head_end.unwrap_or(self.raw.len())]
    }

    /// The target, once it is certain where it ends.
    pub(crate) fn path(&self) -> Option<String> {
        let text = String::from_utf8_lossy(self.head());
        let (_, rest) = text.split_once(' ')?;
        Some(rest.split_once(' ')?.0.to_owned())
    }

    /// The value of a field, by its lower-case name.
    pub(crate) fn field(&self, name: &str) -> Option<String> {
        let text = String::from_utf8_lossy(self.head());
        text.lines().skip(1).find_map(|line| {
            let (field, value) = line.split_once(':')?;
            field
                .eq_ignore_ascii_case(name)
                .then(|| value.trim().to_owned())
        })
    }

    /// The content, or as much of it as there is.
    pub(crate) fn body(&self) -> &[u8] {
        match (self.framing, self.head_end) {
            (Framing::Length(_), Some(start)) => &self.raw[start..],
            _ => &self.content,
        }
    }

    fn parse(&mut self) {
        if self.head_end.is_none() {
            let end = self.raw.windows(4).position(|four| four == b"\r\n\r\n");
            let Some(end) = end.map(|end| end + 4) else {
                return;
            };
            self.head_end = Some(end);
            let length = self.field("content-length");
            self.framing = if self.field("transfer-encoding").is_some() {
                Framing::Size { at: end }
            } else if let Some(length) = length.and_then(|length| length.parse().ok()) {
                Framing::Length(length)
            } else {
                Framing::None
            };
        }
        let start = self.head_end.unwrap_or_default();
        loop {
            self.framing = match self.framing {
                Framing::None => {
                    self.complete = true;
                    return;
                }
                Framing::Length(length) => {
                    self.complete = self.raw.len() >= start + length;
                    return;
                }
                Framing::Size { at } => {
                    let line = self.raw[at..].windows(2).position(|two| two == b"\r\n");
                    let Some(line) = line.map(|length| at + length) else {
                        return;
                    };
                    let text = String::from_utf8_lossy(&self.raw[at..line]);
                    let size = usize::from_str_radix(&text, 16).expect("a chunk size");
                    match size {
                        0 => Framing::Last { at: line + 2 },
                        left => Framing::Chunk { at: line + 2, left },
                    }
                }
                Framing::Chunk { at, left } => {
                    let there = &self.raw[at..];
                    let there = &there[..left.min(there.len())];
                    self.content.extend_from_slice(there);
                    let (at, left) = (at + there.len(), left - there.len());
                    if left > 0 || self.raw.len() < at + 2 {
                        self.framing = Framing::Chunk { at, left };
                        return;
                    }
                    Framing::Size { at: at + 2 }
                }
                Framing::Last { at } => {
                    self.complete = self.raw.len() >= at + 2;
                    return;
                }
            };
        }
    }
}
