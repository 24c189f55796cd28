//! How many requests each client still gets answered when its pooled connections fail, and at what price.
//!
//! Runs the part of the fault matrix (`tests/it/fault_matrix`) that is plain HTTP over a reused connection
//! over several clients, one after the other: the same seed, the same cases, the same server and ledger.
//! Stalls are left out: what becomes of them is a matter of timeouts.
//!
//! Groups are made by what the server did and read, never by what a client says of itself.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use http::Request;
use idempool::{Pool, TreatAsIdempotent};

#[allow(dead_code, reason = "the matrix looks at more of it")]
#[path = "../../../tests/it/fault_matrix/ledger.rs"]
mod ledger;
#[path = "../../../tests/it/fault_matrix/message.rs"]
mod message;
mod peers;
#[allow(dead_code, reason = "the matrix has stalls and TLS as well")]
#[path = "../../../tests/it/fault_matrix/script.rs"]
mod script;
#[allow(dead_code, reason = "the matrix has stalls and TLS as well")]
#[path = "../../../tests/it/fault_matrix/server.rs"]
mod server;

use ledger::{Attempt, Ledger};
use peers::{Answer, Peer, Upload};
use script::{Case, Fault, Idle, Kind};
use server::Lane;

/// A case takes a millisecond; a client that takes this long for one hangs.
const HANG: Duration = Duration::from_secs(10);
/// `--quick` takes one case in so many: a few seconds a client.
const QUICK: usize = 4;

fn main() {
    let (mut seed, mut step, mut apart) = (fastrand::u64(..), 1, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match &*argument {
            "--quick" => step = QUICK,
            "--thread" => apart = true,
            "--seed" => {
                let number = arguments.next().and_then(|text| text.parse().ok());
                seed = number.expect("--seed is followed by a number");
            }
            other => panic!("not one of --quick, --thread, --seed N: {other}"),
        }
    }
    let cases: Vec<_> = (0..script::cases())
        .map(|number| Case::of(seed, number))
        .filter(|case| !case.tls && case.reused && !case.faults.iter().any(Fault::is_stall))
        .step_by(step)
        .map(Arc::new)
        .collect();
    println!(
        "recovery: seed={seed}, {} cases a client, thread={apart}\n",
        cases.len()
    );
    let run = Run { cases, apart };
    let tallies = [
        run.over(1, "reqwest", false, peers::reqwest),
        run.over(2, "hyper-util", false, peers::hyper_util),
        run.over(3, "idempool-pool", true, Pool::new),
        run.over(4, "idempool-retry", true, || peers::retrying(false)),
        run.over(5, "idempool-retry-not-received", true, || {
            peers::retrying(true)
        }),
    ];
    print_table(&tallies);
    for tally in &tallies {
        println!("{}", tally.line(seed, run.apart));
    }
}

/// What is counted together.
#[derive(Clone, Copy)]
enum Group {
    /// Unkeyed, the connection closed before the client set out: nothing can have been sent.
    NotSent,
    /// Unkeyed, never received, the close crossing it: both set out as the client has the request in hand
    /// and asks for its body.
    NotReceived,
    /// The same, but both set out as the request is given to the client.
    AtCall,
    /// Idempotent, declared so, or keyed, with one fault before the head of an answer.
    Idempotent,
}

impl Group {
    fn of(case: &Case, ledger: &Ledger) -> Option<Group> {
        if case.faults.len() > 1 {
            return None;
        }
        let any = |holds: fn(&Attempt) -> bool| ledger.attempts.iter().any(holds);
        match (case.kind, case.faults[0]) {
            (Kind::Post, Fault::Idle(Idle::Close | Idle::Reset)) => Some(Group::NotSent),
            (Kind::Post, Fault::Idle(Idle::CloseRace(_))) if any(|a| a.closed_unread) => {
                Some(match starts_at_call(case) {
                    true => Group::AtCall,
                    false => Group::NotReceived,
                })
            }
            (Kind::Post, _) => None,
            _ => (!any(|a| a.head_answered)).then_some(Group::Idempotent),
        }
    }
}

/// Every second crossing begins at the call, so that no client is looked at in one window only.
fn starts_at_call(case: &Case) -> bool {
    case.number.is_multiple_of(2) && !case.has_hole()
}

/// Counts of one client.
struct Tally {
    client: &'static str,
    /// Its errors say whether the server may have got the request.
    tells_delivery: bool,
    cases: usize,
    /// Unkeyed requests that the server acted on more than once, and those of them in the hole: the one
    /// exchange that looks like a full close and is not.
    doubles: usize,
    doubles_in_hole: usize,
    answered: usize,
    /// Recovered, and of how many, by [`Group`].
    groups: [(usize, usize); 4],
}

/// What is the same for all clients.
struct Run {
    cases: Vec<Arc<Case>>,
    /// A client's own tasks have a thread beside the caller's.
    apart: bool,
}

impl Run {
    /// Runs all cases over one client, against a server on 127.0.0.`host`.
    fn over<P: Peer>(
        &self,
        host: u8,
        client: &'static str,
        tells_delivery: bool,
        peer: impl Fn() -> P,
    ) -> Tally {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let mut tally = Tally {
            client,
            tells_delivery,
            cases: self.cases.len(),
            doubles: 0,
            doubles_in_hole: 0,
            answered: 0,
            groups: Default::default(),
        };
        let lane = Arc::new(Lane::start(host, None));
        let all = async {
            self.expect_reuse(client, &peer).await;
            for case in &self.cases {
                // A pool of its own for each case: what is idle in it is the warmed connection, no other.
                let (answer, ledger) = self.send(&peer(), case, &lane).await;
                tally.add(case, &answer, &ledger);
            }
        };
        if self.apart {
            let handle = runtime.handle().clone();
            std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
            handle.block_on(all);
        } else {
            runtime.block_on(all);
        }
        tally
    }

    /// Sends one case's request on a connection that has served another one.
    async fn send(&self, peer: &impl Peer, case: &Arc<Case>, lane: &Arc<Lane>) -> (Answer, Ledger) {
        lane.begin(case);
        let request = |method, path: &str, body| {
            Request::builder()
                .method(method)
                .uri(format!("http://{}{path}", lane.plain))
                // reqwest sends it anyway; with it all heads are the same.
                .header("accept", "*/*")
                .body(body)
                .expect("a request")
        };
        let warm = peer.send(request("GET", "/warm", Upload::empty())).await;
        warm.expect("the warm-up is answered");
        let fault = case.faults[0];
        self.settle().await;
        lane.warmed(matches!(fault, Fault::Idle(_))).await;
        self.settle().await;
        // `go` waits for the other side of a crossing, so it is for crossings only.
        let at_call = fault.is_race() && starts_at_call(case);
        let at_body = fault.is_race() && !at_call;
        let upload = Upload::of(case, at_body.then(|| Arc::clone(lane)));
        let mut request = request(case.kind.method(), &case.path(), upload);
        if case.kind == Kind::Declared {
            request.extensions_mut().insert(TreatAsIdempotent);
        }
        if let Some(key) = case.key() {
            let key = key.parse().expect("a field value");
            request.headers_mut().insert("idempotency-key", key);
        }
        if at_call {
            lane.go();
        }
        let answer = match tokio::time::timeout(HANG, peer.send(request)).await {
            Ok(answer) => answer,
            Err(_) => panic!("a client hangs: {case:?}"),
        };
        (answer, lane.finish().await)
    }

    /// Lets the client's own tasks run until its connection is back in the pool, or seen to be closed.
    async fn settle(&self) {
        if self.apart {
            // Blocks this thread; theirs runs.
            std::thread::sleep(Duration::from_micros(300));
        }
        // Each turn lets every ready task run once; clients need two or three. `expect_reuse` looks after it.
        for _ in 0..32 {
            tokio::task::yield_now().await;
        }
    }

    /// Asserts that a second request takes the first one's connection, or all that is counted here is void.
    async fn expect_reuse<P: Peer>(&self, client: &str, peer: impl Fn() -> P) {
        const ROUNDS: usize = 100;
        static ACCEPTED: AtomicUsize = AtomicUsize::new(0);
        ACCEPTED.store(0, Relaxed);
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let address = listener.local_addr().expect("address");
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten().take(2 * ROUNDS) {
                ACCEPTED.fetch_add(1, Relaxed);
                std::thread::spawn(move || {
                    // A GET is one segment here: every read is a request.
                    while stream.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {
                        let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n");
                    }
                });
            }
        });
        for _ in 0..ROUNDS {
            let peer = peer();
            for _ in 0..2 {
                let request = Request::get(format!("http://{address}/")).body(Upload::empty());
                let answer = peer.send(request.expect("a request")).await;
                answer.expect("an answer");
                self.settle().await;
            }
        }
        assert_eq!(ACCEPTED.load(Relaxed), ROUNDS, "{client} does not reuse");
    }
}

fn print_table(tallies: &[Tally]) {
    println!(
        "{:<28} {:>6} {:>9} {:>7} {:>9} {:>7}  {:>19} {:>19} {:>19} {:>19}  errors give delivery",
        "client",
        "cases",
        "double",
        "in the",
        "answered",
        "failed",
        "not sent",
        "crossing, at body",
        "crossing, at call",
        "idempotent",
    );
    println!(
        "{:<28} {:>6} {:>9} {:>7} {:>9} {:>7}  {:>19} {:>19} {:>19} {:>19}",
        "", "", "effects", "hole", "", "", "unkeyed", "unkeyed", "unkeyed", "one fault",
    );
    for tally in tallies {
        let groups = tally.groups.map(|(good, all)| {
            let percent = percent((good, all));
            format!("{good}/{all} {percent:>6}%")
        });
        let [not_sent, at_body, at_call, idempotent] = groups;
        let Tally {
            client,
            cases,
            doubles,
            doubles_in_hole,
            answered,
            ..
        } = tally;
        println!(
            "{client:<28} {cases:>6} {doubles:>9} {doubles_in_hole:>7} {answered:>9} {:>7}  \
             {not_sent:>19} {at_body:>19} {at_call:>19} {idempotent:>19}  {}",
            cases - answered,
            if tally.tells_delivery { "yes" } else { "no" },
        );
    }
    println!();
}

fn percent((good, all): (usize, usize)) -> String {
    // Rounded down: 100 means all of them.
    let permille = good * 1000 / all.max(1);
    format!("{}.{}", permille / 10, permille % 10)
}

impl Tally {
    fn add(&mut self, case: &Case, answer: &Answer, ledger: &Ledger) {
        let recovered = matches!(answer, Ok((status, _)) if *status == 200);
        if let Ok((_, body)) = answer
            && recovered
        {
            let client = self.client;
            assert_eq!(
                *body,
                case.answer(),
                "{client} got a wrong answer: {case:?}"
            );
        }
        self.answered += usize::from(recovered);
        if case.kind == Kind::Post && ledger.effects(&case.path()) > 1 {
            self.doubles += 1;
            self.doubles_in_hole += usize::from(case.has_hole());
        }
        if let Some(group) = Group::of(case, ledger) {
            let (good, all) = &mut self.groups[group as usize];
            *good += usize::from(recovered);
            *all += 1;
        }
    }

    /// For machines.
    fn line(&self, seed: u64, apart: bool) -> String {
        let [not_sent, at_body, at_call, idempotent] = self.groups.map(percent);
        format!(
            "recovery: client={} cases={} double_effects={} in_hole={} recovered_not_sent={not_sent}% \
             recovered_not_received={at_body}% recovered_at_call={at_call}% \
             recovered_idempotent={idempotent}% thread={apart} seed={seed}",
            self.client, self.cases, self.doubles, self.doubles_in_hole,
        )
    }
}
