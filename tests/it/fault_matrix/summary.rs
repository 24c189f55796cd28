//! What a run came to: counts for people, and one line for machines.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::client::HAS_NOT_RECEIVED;
use super::judge::{Broken, Outcome, Recovery, Report, recovery};
use super::ledger::Ledger;
use super::script::{Case, Fault};

/// Counts of one lane, or of all.
#[derive(Default)]
pub(crate) struct Summary {
    cases: u64,
    faults: u64,
    /// Faults that no attempt met: the client was done before.
    missed: u64,
    resends: u64,
    /// By a heading and a name below it.
    counts: BTreeMap<(&'static str, String), u64>,
    broken: Vec<Broken>,
    /// So many recovered, of so many.
    recovered: BTreeMap<Recovery, (u64, u64)>,
    /// The hole: unkeyed requests that were acted on and then called not received, or sent again.
    hole: u64,
}

impl Summary {
    pub(crate) fn add(
        &mut self,
        case: &Case,
        report: &Report,
        ledger: &Ledger,
        broken: &[(Broken, String)],
    ) {
        self.cases += 1;
        self.resends += u64::from(report.resends);
        for fault in &case.faults {
            let met = |attempt: &super::ledger::Attempt| attempt.fault == Some(*fault);
            if ledger.attempts.iter().any(met) {
                self.faults += 1;
                self.count("fault", fault.name());
            } else {
                self.missed += 1;
            }
            if let Fault::Idle(_) = fault {
                let race = match (&report.outcome, report.after_not_received) {
                    (_, 1..) => "resent: not received",
                    (Outcome::Answer { .. }, 0) => "answered",
                    (Outcome::Failed { verdict, .. }, 0) => verdict,
                    (Outcome::GaveUp, 0) => "given up",
                };
                if case.kind == super::script::Kind::Post {
                    let unread = ledger.attempts.iter().any(|attempt| attempt.closed_unread);
                    let unread = if unread { ", never received" } else { "" };
                    self.count(
                        "idle fault and an unkeyed request",
                        format!("{}{unread}: {race}", fault.name()),
                    );
                }
            }
        }
        self.count("verdict", report.verdict());
        let scheme = if case.tls { "https" } else { "http" };
        let reuse = if case.reused { "reused" } else { "fresh" };
        self.count("connection", format!("{scheme}, {reuse}"));
        let effects = ledger.effects(&case.path());
        self.count("effects", format!("{:?}: {effects}", case.kind));
        self.broken.extend(broken.iter().map(|(broken, _)| broken));
        if let Some(recovery) = recovery(case, report, ledger) {
            let (recovered, all) = self.recovered.entry(recovery).or_default();
            *recovered += u64::from(report.succeeded());
            *all += 1;
        }
        let called = report.verdict() == "not_received" || report.after_not_received > 0;
        self.hole += u64::from(case.has_hole() && called && effects > 0);
    }

    fn count(&mut self, heading: &'static str, name: impl Into<String>) {
        *self.counts.entry((heading, name.into())).or_default() += 1;
    }

    pub(crate) fn merge(&mut self, other: Summary) {
        self.cases += other.cases;
        self.faults += other.faults;
        self.missed += other.missed;
        self.resends += other.resends;
        self.hole += other.hole;
        self.broken.extend(other.broken);
        for (what, count) in other.counts {
            *self.counts.entry(what).or_default() += count;
        }
        for (what, (recovered, all)) in other.recovered {
            let sum = self.recovered.entry(what).or_default();
            sum.0 += recovered;
            sum.1 += all;
        }
    }

    pub(crate) fn faults(&self) -> u64 {
        self.faults
    }

    /// Whether everything was recovered that can be.
    pub(crate) fn all_recovered(&self, what: Recovery) -> bool {
        let (recovered, all) = self.recovered.get(&what).copied().unwrap_or_default();
        recovered == all
    }

    fn broken(&self, what: Broken) -> usize {
        self.broken.iter().filter(|broken| **broken == what).count()
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        let mut last = "";
        for ((heading, name), count) in &self.counts {
            if *heading != last {
                let _ = writeln!(text, "{heading}");
                last = heading;
            }
            let _ = writeln!(text, "  {count:>7}  {name}");
        }
        for (what, (recovered, all)) in &self.recovered {
            let _ = writeln!(text, "recovered {what:?}: {recovered} of {all}");
        }
        let _ = write!(
            text,
            "{} faults met an attempt, {} did not; {} resends; the hole opened {} times",
            self.faults, self.missed, self.resends, self.hole
        );
        text
    }

    /// For machines.
    pub(crate) fn line(&self, seed: u64) -> String {
        let percent = |what| match self.recovered.get(&what) {
            None => "n/a".to_owned(),
            Some((recovered, all)) if recovered == all => "100%".to_owned(),
            Some((recovered, all)) => {
                let tenths = recovered * 1000 / all;
                format!("{}.{}%", tenths / 10, tenths % 10)
            }
        };
        let not_received = if HAS_NOT_RECEIVED {
            percent(Recovery::NotReceived)
        } else {
            "n/a".to_owned()
        };
        format!(
            "fault_matrix: cases={} double_effects={} lost_keyed={} wrong_not_sent={} \
             wrong_not_received={} recovered_not_sent={} recovered_not_received={not_received} \
             recovered_idempotent={} seed={seed} faults={} other_broken={} hole={}",
            self.cases,
            self.broken(Broken::DoubleEffect),
            self.broken(Broken::LostKeyed),
            self.broken(Broken::WrongNotSent),
            self.broken(Broken::WrongNotReceived),
            percent(Recovery::NotSent),
            percent(Recovery::Idempotent),
            self.faults,
            self.broken(Broken::Attempt)
                + self.broken(Broken::Answer)
                + self.broken(Broken::Resend),
            self.hole,
        )
    }
}
