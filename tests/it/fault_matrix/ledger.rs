//! What the server saw and did in one case: the judge's book.
//!
//! Effects are counted where they happen, keys are deduplicated as a correct payment server does, and
//! every attempt is compared with what the client was given to send.

use std::collections::HashMap;

use super::script::Fault;

/// One attempt as the server saw it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempt {
    /// Bytes of the request that the application read, above TLS.
    pub(crate) read: usize,
    /// As much of the head as there was.
    pub(crate) head: String,
    pub(crate) complete: bool,
    pub(crate) fault: Option<Fault>,
    /// The server closed its side, and found nothing to read between that and the full close.
    pub(crate) closed_unread: bool,
    /// A whole response head was written.
    pub(crate) head_answered: bool,
    /// An early refusal was sent in full.
    pub(crate) refused: bool,
}

/// All of one case.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    /// By the request's id.
    effects: HashMap<String, u32>,
    /// Keys that were acted on, each with the id whose answer is stored.
    stored: HashMap<String, String>,
    pub(crate) attempts: Vec<Attempt>,
    /// Promises that were seen broken on the server's side.
    pub(crate) wrongs: Vec<String>,
}

impl Ledger {
    /// Acts on a request, unless its key was acted on before.
    pub(crate) fn act(&mut self, id: &str, key: Option<&str>) {
        if let Some(key) = key {
            if let Some(first) = self.stored.get(key) {
                if first != id {
                    self.wrongs
                        .push(format!("key {key} of {first} came with {id}"));
                }
                return;
            }
            self.stored.insert(key.to_owned(), id.to_owned());
        }
        *self.effects.entry(id.to_owned()).or_default() += 1;
    }

    pub(crate) fn effects(&self, id: &str) -> u32 {
        self.effects.get(id).copied().unwrap_or(0)
    }

    /// Notes an attempt. Attempts of one request are the same byte for byte, as far as each one got.
    pub(crate) fn note(&mut self, attempt: Attempt) {
        let head = &attempt.head;
        let differs =
            |other: &Attempt| !other.head.starts_with(&**head) && !head.starts_with(&*other.head);
        if self.attempts.iter().any(differs) {
            self.wrongs
                .push("two attempts differ in their heads".into());
        }
        self.attempts.push(attempt);
    }

    pub(crate) fn bytes_read(&self) -> usize {
        self.attempts.iter().map(|attempt| attempt.read).sum()
    }
}
