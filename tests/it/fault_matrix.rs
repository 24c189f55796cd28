//! The fault matrix: a server that closes, half-closes, resets, stalls or answers in part at every byte
//! of the request that it reads and of the response that it writes, and that counts effects.
//!
//! ```text
//! cargo test --test it fault_matrix -- --nocapture
//! ```
//!
//! prints a summary. A run is made from one seed, random unless `IDEMPOOL_SEED` gives it. A case that
//! breaks a promise prints `IDEMPOOL_SEED=… IDEMPOOL_CASE=…`, and with both set runs alone; a range of cases,
//! as in `IDEMPOOL_CASE=200..300`, runs by itself too.

mod client;
mod judge;
mod ledger;
mod message;
mod script;
mod server;
mod summary;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::Client;
use judge::{Recovery, judge};
use script::Case;
use server::Lane;

pub(crate) use server::FORKS;
use summary::Summary;

use crate::support::{Names, server_config};

/// Servers with a client each that run at the same time: more than there are processors, because a case
/// waits more than it computes.
const LANES: u8 = 8;
/// A case takes milliseconds; one that takes this long hangs.
const HANG: Duration = Duration::from_secs(30);
/// After so many broken cases, more tell nothing new.
const ENOUGH: usize = 20;

#[test]
fn no_fault_at_any_byte_makes_a_second_effect_or_a_wrong_verdict() {
    let seed = chosen_seed().unwrap_or_else(|| fastrand::u64(..));
    let run = Arc::new(Run {
        seed,
        cases: chosen().unwrap_or(0..script::cases()),
        next: AtomicUsize::new(0),
        failures: Mutex::default(),
    });
    println!(
        "fault_matrix: IDEMPOOL_SEED={seed}, {} cases",
        run.cases.len()
    );
    let lanes: Vec<_> = (0..LANES)
        .map(|lane| {
            let run = Arc::clone(&run);
            std::thread::spawn(move || run.lane(lane))
        })
        .collect();
    let mut summary = Summary::default();
    for lane in lanes {
        summary.merge(lane.join().expect("a lane"));
    }
    println!("{}", summary.table());
    println!("{}", summary.line(seed));
    let failures = run.failures.lock().unwrap();
    assert!(
        failures.is_empty(),
        "broken promises:\n{}",
        failures.join("\n")
    );
    assert!(
        summary.all_recovered(Recovery::NotSent),
        "{}",
        summary.line(seed)
    );
    #[cfg(target_os = "linux")]
    assert!(
        summary.all_recovered(Recovery::NotReceived),
        "{}",
        summary.line(seed)
    );
    assert!(
        summary.all_recovered(Recovery::Idempotent),
        "{}",
        summary.line(seed)
    );
    if run.cases == (0..script::cases()) {
        assert!(summary.faults() >= 20_000, "{}", summary.line(seed));
    }
}

fn chosen_seed() -> Option<u64> {
    let text = std::env::var("IDEMPOOL_SEED").ok()?;
    Some(text.parse().expect("IDEMPOOL_SEED is a number"))
}

/// One case, or a range of them: `5` or `200..300`.
fn chosen() -> Option<Range<usize>> {
    let text = std::env::var("IDEMPOOL_CASE").ok()?;
    let number = |text: &str| text.parse().unwrap_or_else(|_| panic!("no case: {text}"));
    Some(match text.split_once("..") {
        Some((first, end)) => number(first)..number(end),
        None => number(&text)..number(&text) + 1,
    })
}

/// What the lanes share.
struct Run {
    seed: u64,
    cases: Range<usize>,
    next: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Run {
    /// Half of the lanes have the client on one thread, the others on several.
    fn lane(self: Arc<Self>, number: u8) -> Summary {
        let server = Lane::start(number + 1, Some(server_config(Names::Local)));
        let lane = Arc::new(server);
        let cases = async move { self.take_cases(&Client::new(&lane)).await };
        if number.is_multiple_of(2) {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            return runtime.expect("a runtime").block_on(cases);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        let runtime = runtime.expect("a runtime");
        // As a task, so that it runs on a worker and not beside them.
        let cases = runtime.spawn(cases);
        runtime.block_on(cases).expect("a lane")
    }

    async fn take_cases(&self, client: &Client) -> Summary {
        let mut summary = Summary::default();
        loop {
            let number = self.cases.start + self.next.fetch_add(1, Relaxed);
            if number >= self.cases.end || self.failures.lock().unwrap().len() >= ENOUGH {
                return summary;
            }
            let case = Arc::new(Case::of(self.seed, number));
            let Ok((report, ledger)) = tokio::time::timeout(HANG, client.run(&case)).await else {
                self.fail(&case, "it hangs");
                return summary;
            };
            let broken = judge(&case, &report, &ledger);
            for (what, why) in &broken {
                let attempts = &ledger.attempts;
                self.fail(
                    &case,
                    &format!("{what:?}: {why}\n  {report:?}\n  {attempts:?}"),
                );
            }
            summary.add(&case, &report, &ledger, &broken);
            if !broken.is_empty() {
                continue;
            }
            let wanted = judge::recovery(&case, &report, &ledger);
            let lost = matches!(wanted, Some(Recovery::NotSent | Recovery::Idempotent));
            if lost && !report.succeeded() {
                let attempts = &ledger.attempts;
                self.fail(
                    &case,
                    &format!("not recovered\n  {report:?}\n  {attempts:?}"),
                );
            }
        }
    }

    fn fail(&self, case: &Case, why: &str) {
        let again = format!("IDEMPOOL_SEED={} IDEMPOOL_CASE={}", self.seed, case.number);
        let failure = format!("{again} {why}\n  {case:?}");
        println!("{failure}");
        self.failures.lock().unwrap().push(failure);
    }
}
