//! Many connections at once to one server, each kept open: how long it takes, and how often the server's kernel has no
//! room for a handshake.

use std::time::Duration;

use crate::report::{Line, Table};
use crate::rules::plan::Limits;
use crate::scenarios::{Scale, ms, secs};
use crate::server::Server;
use crate::traffic::{Service, Shape, Traffic};
use crate::world::{Accepts, Setup, Tally, World};

/// What holds dials back.
#[derive(Clone, Copy, Debug)]
enum Hold {
    Window,
    Nothing,
    /// No more than four handshakes at a time.
    Four,
}

impl Hold {
    const ALL: [Hold; 3] = [Hold::Window, Hold::Nothing, Hold::Four];

    fn name(self) -> &'static str {
        match self {
            Hold::Window => "window",
            Hold::Nothing => "none",
            Hold::Four => "four",
        }
    }
}

/// A name, how many connections, and how many requests at a time.
type Storm = (&'static str, u64, u64);

const STORMS: [Storm; 3] = [
    ("64_at_once", 64, 64),
    ("1000_by_64", 1_000, 64),
    ("1000_at_once", 1_000, 1_000),
];

/// How many may wait, how long one accept takes, and whether some take longer.
const SERVERS: [(&str, Accepts); 3] = [
    (
        "backlog_5",
        Accepts {
            backlog: Some(5),
            takes: Duration::from_micros(400),
            stalls: true,
        },
    ),
    (
        "backlog_128",
        Accepts {
            backlog: Some(128),
            takes: Duration::from_micros(400),
            stalls: true,
        },
    ),
    (
        "healthy",
        Accepts {
            backlog: Some(4_096),
            takes: Duration::from_micros(20),
            stalls: false,
        },
    ),
];

/// Between client and server.
#[derive(Clone, Copy, Debug)]
struct Path {
    tls: bool,
    rtt: Duration,
    /// From the whole request to the response.
    think: Duration,
    loss_percent: f64,
}

impl Path {
    fn rtt_ms(&self) -> String {
        format!("{}", self.rtt.as_secs_f64() * 1e3)
    }

    /// The tables say what one thing at a time does, near and far. The lines say all.
    fn is_shown(&self) -> bool {
        let differences = [self.tls, !self.think.is_zero(), self.loss_percent > 0.0];
        let differences = differences.iter().filter(|differs| **differs).count();
        let is_middle = self.rtt == ms(1) || self.rtt == ms(50);
        differences == 0 || (differences == 1 && is_middle && self.loss_percent != 0.1)
    }

    fn protocol(&self) -> &'static str {
        if self.tls { "tls" } else { "plain" }
    }
}

pub(crate) fn dials(scale: &Scale) {
    let rtts = scale.pick(&[100, 1_000, 10_000, 50_000][..], &[100, 50_000][..]);
    let thinks = scale.pick(&[0, 100][..], &[0][..]);
    let losses = scale.pick(&[0.0, 0.1, 1.0][..], &[0.0, 1.0][..]);
    let mut paths = Vec::new();
    for tls in [false, true] {
        for &think in thinks {
            for &loss_percent in losses {
                paths.extend(rtts.iter().map(|&rtt| Path {
                    tls,
                    rtt: Duration::from_micros(rtt),
                    think: ms(think),
                    loss_percent,
                }));
            }
        }
    }
    for (name, accepts) in SERVERS {
        let mut table = Table::new(&[
            "connections",
            "over",
            "RTT",
            "think",
            "loss %",
            "seconds: window",
            "none",
            "four",
            "overflows: window",
            "none",
            "four",
        ]);
        for storm in STORMS {
            for path in &paths {
                let results = Hold::ALL.map(|hold| median(scale, storm, accepts, *path, hold));
                for (hold, tally) in Hold::ALL.into_iter().zip(&results) {
                    Line::new("dials", name, storm.0)
                        .with("hold", hold.name())
                        .with("over", path.protocol())
                        .with("rtt_ms", path.rtt_ms())
                        .with("think_ms", path.think.as_millis())
                        .with("loss_percent", path.loss_percent)
                        .with("seconds", time(tally))
                        .with("unanswered", unanswered(tally, storm))
                        .with("overflows", tally.overflows)
                        .print(tally, scale.seed);
                }
                if !path.is_shown() {
                    continue;
                }
                let mut cells = vec![
                    storm.0.to_owned(),
                    path.protocol().to_owned(),
                    format!("{} ms", path.rtt_ms()),
                    format!("{} ms", path.think.as_millis()),
                    path.loss_percent.to_string(),
                ];
                cells.extend(results.iter().map(|tally| shown(tally, storm)));
                cells.extend(results.iter().map(|tally| tally.overflows.to_string()));
                table.row(cells);
            }
        }
        table.print(&format!("Many connections at once: {name}"));
    }
}

/// A storm that takes longer is broken off.
const PATIENCE: Duration = Duration::from_secs(60);

/// Until the last response of those that came.
fn time(tally: &Tally) -> String {
    format!("{:.3}", tally.last_response.as_secs_f64())
}

fn unanswered(tally: &Tally, (_, connections, _): Storm) -> usize {
    let answered = tally.response_times.len();
    usize::try_from(connections).unwrap_or(usize::MAX) - answered
}

fn shown(tally: &Tally, storm: Storm) -> String {
    match unanswered(tally, storm) {
        0 => time(tally),
        missing => format!(">60 ({missing} left)"),
    }
}

/// Of a few runs the one that is in the middle.
fn median(scale: &Scale, storm: Storm, accepts: Accepts, path: Path, hold: Hold) -> Tally {
    let (_, connections, at_once) = storm;
    let turns = scale.pick(5, 1);
    let mut tallies: Vec<_> = (0..turns)
        .map(|turn| {
            let base = scale.setup(Server::never_closes());
            let dials_per_origin = match hold {
                Hold::Four => 4,
                Hold::Window | Hold::Nothing => usize::MAX,
            };
            let setup = Setup {
                accepts,
                rtt: path.rtt,
                loss: path.loss_percent / 100.0,
                tls: path.tls,
                service: Service::Fixed(path.think),
                limits: Limits {
                    connections: usize::MAX,
                    connections_per_origin: usize::MAX,
                    dials_per_origin,
                    dial_window: matches!(hold, Hold::Window),
                    ..base.limits
                },
                lifetime: secs(1_000_000),
                held: Some(connections - at_once),
                seed: scale.seed + turn,
                ..base
            };
            let at_zero = Shape::Poisson {
                gap: Duration::ZERO,
            };
            let traffic = Traffic::new(at_zero, at_once, 0.0, scale.seed);
            let mut world = World::new(setup, traffic);
            world.run_until(PATIENCE);
            world.tally().clone()
        })
        .collect();
    tallies.sort_by_key(|tally| (unanswered(tally, storm), tally.last_response));
    tallies.swap_remove(tallies.len() / 2)
}
