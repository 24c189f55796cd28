//! The promises, asked of one case: what the client was told against what the server did. Pure.

use bytes::Bytes;

use super::ledger::Ledger;
use super::script::{Case, Fault, Idle, Kind};

/// What the caller got.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Answer {
        status: u16,
        /// Nothing missing, nothing added, nobody else's.
        own: bool,
        length: usize,
    },
    Failed {
        /// The delivery that the error claims.
        verdict: &'static str,
        /// Bytes of it that the server's kernel acknowledged.
        acked: u64,
        text: String,
    },
    /// The caller's own patience ended, in the middle of a response body.
    GaveUp,
}

impl Outcome {
    /// An answer, compared with the one that the case has.
    pub(crate) fn of_answer(case: &Case, status: u16, body: &Bytes) -> Outcome {
        let own = match status {
            200 => *body == case.answer(),
            _ => *body == format!("c{}", case.number),
        };
        let length = body.len();
        Outcome::Answer {
            status,
            own,
            length,
        }
    }
}

/// The client's side of a case.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) outcome: Outcome,
    pub(crate) resends: u32,
    /// Resends that rested on the kernel's evidence.
    pub(crate) after_not_received: u64,
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Broken {
    DoubleEffect,
    LostKeyed,
    WrongNotSent,
    WrongNotReceived,
    /// Another key, another head, another body than it should have been.
    Attempt,
    /// A short answer, or somebody else's.
    Answer,
    /// Sent again although nothing allowed it.
    Resend,
}

impl Report {
    pub(crate) fn succeeded(&self) -> bool {
        matches!(self.outcome, Outcome::Answer { status: 200, .. })
    }

    pub(crate) fn verdict(&self) -> &'static str {
        match &self.outcome {
            Outcome::Answer { status: 200, .. } => "answered",
            Outcome::Answer { .. } => "answered, not a success",
            Outcome::Failed { verdict, .. } => verdict,
            Outcome::GaveUp => "given up by the caller",
        }
    }
}

/// Every promise that this case broke.
pub(crate) fn judge(case: &Case, report: &Report, ledger: &Ledger) -> Vec<(Broken, String)> {
    let mut broken = Vec::new();
    let mut found = |what, why: String| broken.push((what, why));
    let effects = ledger.effects(&case.path());
    let read = ledger.bytes_read();
    let reached = ledger.attempts.iter().filter(|a| a.read > 0).count();
    for wrong in &ledger.wrongs {
        found(Broken::Attempt, wrong.clone());
    }
    // One ambiguous resend is allowed to idempotent requests (RFC 9110 section 9.2.2).
    let most = match case.kind {
        Kind::Post | Kind::Keyed => 1,
        Kind::Get | Kind::Put | Kind::Delete | Kind::Declared => 2,
    };
    let exempt = case.kind == Kind::Post && case.has_hole();
    if effects > most && !exempt {
        found(Broken::DoubleEffect, format!("{effects} effects"));
    }
    if case.kind == Kind::Post && reached > 1 && !exempt {
        found(Broken::Resend, format!("{reached} attempts were received"));
    }
    match &report.outcome {
        Outcome::Answer {
            status: 200,
            own,
            length,
        } => {
            if !own {
                found(Broken::Answer, format!("a wrong answer of {length} bytes"));
            }
            if case.kind == Kind::Keyed && effects != 1 {
                found(
                    Broken::LostKeyed,
                    format!("a success with {effects} effects"),
                );
            }
            if effects == 0 {
                found(Broken::Answer, "a success without an effect".into());
            }
        }
        Outcome::Answer { status, own, .. } => {
            let refused = ledger.attempts.iter().any(|attempt| attempt.refused);
            if *status != 413 || !refused || !own {
                found(
                    Broken::Answer,
                    format!("an answer {status} that is not its own"),
                );
            }
        }
        Outcome::Failed { verdict, text, .. } => {
            let seen = || format!("{effects} effects, {read} bytes read: {text}");
            if *verdict == "not_sent" && (effects > 0 || read > 0) {
                found(Broken::WrongNotSent, seen());
            }
            if *verdict == "not_received" && effects > 0 && !case.has_hole() {
                found(Broken::WrongNotReceived, seen());
            }
        }
        Outcome::GaveUp => {}
    }
    broken
}

/// Which recovery a case measures.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) enum Recovery {
    /// Unkeyed, never received, and provably never sent.
    NotSent,
    /// Unkeyed, and never received, but it had left: the close crossed it.
    NotReceived,
    /// Idempotent or keyed, with one fault, before it was answered.
    Idempotent,
}

/// Which recovery this case measures, if any.
pub(crate) fn recovery(case: &Case, report: &Report, ledger: &Ledger) -> Option<Recovery> {
    if case.faults.len() > 1 {
        return None;
    }
    if case.kind != Kind::Post {
        let committed = |attempt: &super::ledger::Attempt| attempt.head_answered;
        let committed = ledger.attempts.iter().any(committed);
        return (!committed).then_some(Recovery::Idempotent);
    }
    match case.faults[0] {
        Fault::Idle(Idle::Close | Idle::Reset) => Some(Recovery::NotSent),
        Fault::Idle(Idle::CloseRace(_)) => {
            let mut attempts = ledger.attempts.iter();
            if !attempts.any(|attempt| attempt.closed_unread) {
                return None;
            }
            // It came between the last look and the close: the server's kernel had it, if nobody else.
            if matches!(report.outcome, Outcome::Failed { acked, .. } if acked > 0) {
                return None;
            }
            let proven = matches!(
                report.outcome,
                Outcome::Answer { .. }
                    | Outcome::Failed {
                        verdict: "not_sent",
                        ..
                    }
            );
            if proven && report.after_not_received == 0 {
                Some(Recovery::NotSent)
            } else {
                Some(Recovery::NotReceived)
            }
        }
        _ => None,
    }
}
