//! The scenarios: what runs, and what is printed of it.

use std::time::Duration;

use crate::dials;
use crate::redeploy;
use crate::report::{Line, Table};
use crate::rules::plan::Limits;
use crate::server::{SERVERS, Server};
use crate::traffic::{Service, Shape, Traffic};
use crate::world::{Accepts, Policy, Setup, Tally, World, percent};

/// How much runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(crate) is_quick: bool,
    pub(crate) seed: u64,
    /// The part of requests that must not be sent twice.
    pub(crate) unkeyed: f64,
}

impl Default for Scale {
    fn default() -> Self {
        Scale {
            is_quick: false,
            seed: 1,
            unkeyed: 0.3,
        }
    }
}

impl Scale {
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.is_quick { quick } else { full }
    }

    pub(crate) fn traffic(&self, shape: Shape, requests: u64) -> Traffic {
        Traffic::new(shape, requests, self.unkeyed, self.seed)
    }

    /// A pool as `Pool::new` makes it, and a server in the same country.
    pub(crate) fn setup(&self, server: Server) -> Setup {
        Setup {
            servers: vec![server],
            redeploys: Vec::new(),
            accepts: Accepts {
                backlog: None,
                takes: Duration::ZERO,
                stalls: false,
            },
            rtt: ms(20),
            loss: 0.0,
            tls: false,
            service: Service::LogNormal(ms(20)),
            policy: Policy::Learnt,
            limits: Limits {
                connections: 512,
                connections_per_origin: 64,
                idle: 256,
                idle_per_origin: 64,
                dials_per_origin: 64,
                waiters_per_origin: usize::MAX,
                dial_window: true,
            },
            idle_timeout: Some(secs(90)),
            lifetime: secs(600),
            held: None,
            seed: self.seed,
        }
    }
}

/// A name, and what runs by it.
type Scenario = (&'static str, fn(&Scale));

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("idle", idle),
    ("timeout_sweep", timeout_sweep),
    ("cap", cap),
    ("redeploy", redeploy::redeploy),
    ("dials", dials::dials),
    ("origins", origins),
];

pub(crate) fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Stale connections met by ten thousand unkeyed requests.
fn stale_of_10_000(tally: &Tally) -> String {
    format!("{:.1}", 100.0 * percent(tally.stale_unkeyed, tally.unkeyed))
}

pub(crate) fn reuse(tally: &Tally) -> String {
    format!("{:.1}", tally.reuse_percent())
}

/// Seven kinds of traffic, with gaps around the server's idle timeout.
fn around(timeout: Duration) -> [(&'static str, Shape); 7] {
    let just_before = timeout.mul_f64(0.97);
    let bursts = Shape::Bursts {
        size: 8,
        pause: timeout.mul_f64(0.7),
    };
    let on_off = Shape::OnOff {
        gap: timeout / 10,
        on: timeout * 2,
        off: timeout * 2,
    };
    [
        ("regular_before", Shape::Regular { gap: just_before }),
        ("regular_at", Shape::Regular { gap: timeout }),
        ("poisson", Shape::Poisson { gap: timeout / 4 }),
        ("poisson_sparse", Shape::Poisson { gap: timeout }),
        ("bursts", bursts),
        ("on_off", on_off),
        ("day", Shape::Day { gap: timeout / 3 }),
    ]
}

/// What goes by one name in a table, under each policy.
type Sums = Vec<(String, [Tally; 3])>;

fn add(sums: &mut Sums, name: &str, policy: usize, tally: &Tally) {
    let at = sums.iter().position(|(known, _)| known == name);
    let at = at.unwrap_or_else(|| {
        sums.push((name.to_owned(), Default::default()));
        sums.len() - 1
    });
    sums[at].1[policy].add(tally);
}

fn idle(scale: &Scale) {
    let requests = scale.pick(5_000, 400);
    let (mut by_server, mut by_shape, mut all) = (Sums::new(), Sums::new(), Sums::new());
    for server in SERVERS {
        for (shape_name, shape) in around(server.scale()) {
            for (at, policy) in Policy::ALL.into_iter().enumerate() {
                let setup = Setup {
                    policy,
                    ..scale.setup(*server)
                };
                let tally = World::new(setup, scale.traffic(shape, requests)).run();
                add(&mut by_server, server.name, at, &tally);
                add(&mut by_shape, shape_name, at, &tally);
                add(&mut all, "all", at, &tally);
                Line::new("idle", server.name, shape_name)
                    .with("policy", policy.name())
                    .with("too_old", tally.too_old)
                    .print(&tally, scale.seed);
            }
        }
    }
    for (what, sums) in [("server", by_server), ("traffic", by_shape), ("", all)] {
        let mut table = Table::new(&[
            what,
            "reuse %: learnt",
            "caller's limit",
            "fresh for unkeyed",
            "stale of 10,000 unkeyed: learnt",
            "caller's limit",
            "fresh for unkeyed",
            "stale repeatable: learnt",
            "caller's limit",
        ]);
        for (name, tallies) in &sums {
            let mut cells = vec![name.clone()];
            cells.extend(tallies.iter().map(reuse));
            cells.extend(tallies.iter().map(stale_of_10_000));
            let repeatable = tallies.iter().take(2);
            cells.extend(repeatable.map(|tally| tally.stale_repeatable.to_string()));
            table.row(cells);
        }
        table.print(match what {
            "server" => "Idle connections, all traffics together, by server",
            "traffic" => "Idle connections, all servers together, by traffic",
            _ => "Idle connections, all servers and traffics together",
        });
    }
}

fn timeout_sweep(scale: &Scale) {
    let requests = scale.pick(4_000, 200);
    let shapes = [
        Shape::Poisson { gap: secs(2) },
        Shape::Poisson { gap: secs(20) },
        Shape::Bursts {
            size: 8,
            pause: secs(30),
        },
        Shape::OnOff {
            gap: secs(1),
            on: secs(60),
            off: secs(120),
        },
        Shape::Day { gap: secs(5) },
    ];
    let mut table = Table::new(&[
        "idle timeout",
        "reuse %",
        "stale of 10,000 unkeyed",
        "stale repeatable",
        "dials",
        "idle on average",
        "closed by the server",
    ]);
    for timeout in [15, 30, 60, 90, 120, 300] {
        let mut sum = Tally::default();
        for server in SERVERS {
            for shape in shapes {
                let setup = Setup {
                    idle_timeout: Some(secs(timeout)),
                    ..scale.setup(*server)
                };
                sum.add(&World::new(setup, scale.traffic(shape, requests)).run());
            }
        }
        Line::new("timeout_sweep", "all", "all")
            .with("idle_timeout_s", timeout)
            .with("server_closes", sum.server_closes)
            .print(&sum, scale.seed);
        table.row(vec![
            format!("{timeout} s"),
            reuse(&sum),
            stale_of_10_000(&sum),
            sum.stale_repeatable.to_string(),
            sum.dials().to_string(),
            format!("{:.2}", sum.idle_average()),
            sum.server_closes.to_string(),
        ]);
    }
    table.print("The caller's idle timeout, all servers and traffics together");
}

fn cap(scale: &Scale) {
    let requests = scale.pick(50_000, 4_000);
    let shapes = [
        ("steady", Shape::Poisson { gap: ms(20) }),
        ("one_a_second", Shape::Poisson { gap: secs(1) }),
        ("quiet", Shape::Poisson { gap: secs(3) }),
        (
            "bursts_16",
            Shape::Bursts {
                size: 16,
                pause: ms(500),
            },
        ),
        (
            "rare_bursts_16",
            Shape::Bursts {
                size: 16,
                pause: secs(5),
            },
        ),
    ];
    let mut table = Table::new(&[
        "server",
        "traffic",
        "said close",
        "dialled ahead",
        "of these never used",
        "dials on the path",
        "the same without a cap",
        "mean wait",
    ]);
    let tomcat = Server::by_name("tomcat").unwrap_or(Server::never_closes());
    let nginx = Server::by_name("nginx").unwrap_or(tomcat);
    let announces = Server::by_name("apache_announces").unwrap_or(tomcat);
    for server in [tomcat.with_cap(Some(10)), tomcat, announces, nginx] {
        let name = match server.closes_after(10) {
            true => "cap_10",
            false => server.name,
        };
        for (shape_name, shape) in shapes {
            let setup = scale.setup(server);
            let tally = World::new(setup, scale.traffic(shape, requests)).run();
            let setup = scale.setup(server.with_cap(None));
            let without = World::new(setup, scale.traffic(shape, requests)).run();
            let wasted = tally.spare_dials - tally.spares_used;
            let wait = tally.waited.div_f64(count(tally.requests)).as_secs_f64() * 1e3;
            Line::new("cap", name, shape_name)
                .with("said_close", tally.said_close)
                .with("spares_wasted", wasted)
                .with("on_path_without_cap", without.on_path_dials)
                .with("mean_wait_ms", format!("{wait:.3}"))
                .print(&tally, scale.seed);
            table.row(vec![
                name.to_owned(),
                shape_name.to_owned(),
                tally.said_close.to_string(),
                tally.spare_dials.to_string(),
                wasted.to_string(),
                tally.on_path_dials.to_string(),
                without.on_path_dials.to_string(),
                format!("{wait:.3} ms"),
            ]);
        }
    }
    table.print("Servers that close after a number of requests");
}

pub(crate) fn count(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Under the limits of `Pool::new`, 64 connections to an origin, 512 in all and 256 of them idle; and where these are
/// short, four times as many.
fn origins(scale: &Scale) {
    let requests = scale.pick(200_000, 10_000);
    let mut table = Table::new(&[
        "origins",
        "traffic",
        "idle limit",
        "reuse %",
        "stale of 10,000 unkeyed",
        "dials",
        "idle on average",
        "at most",
        "origins learnt of",
    ]);
    let day = Shape::Day {
        gap: secs(24 * 60 * 60).div_f64(count(requests)),
    };
    let busy = Shape::Poisson { gap: ms(10) };
    for origins in [1, 100, 10_000, 100_000] {
        for (name, shape, times) in [("day", day, 1), ("busy", busy, 1), ("busy", busy, 4)] {
            let base = scale.setup(Server::never_closes());
            let limits = Limits {
                connections: base.limits.connections * times,
                idle: base.limits.idle * times,
                ..base.limits
            };
            let setup = Setup {
                servers: SERVERS.to_vec(),
                limits,
                ..base
            };
            let traffic = scale.traffic(shape, requests).over(origins);
            let mut world = World::new(setup, traffic);
            world.run_until(Duration::MAX);
            let learnt = (0..origins).filter(|&origin| world.learnt(origin).is_some());
            let learnt = learnt.count();
            let tally = world.tally();
            Line::new("origins", "all", name)
                .with("origins", origins)
                .with("max_idle", limits.idle)
                .with("learnt_of", learnt)
                .print(tally, scale.seed);
            table.row(vec![
                origins.to_string(),
                name.to_owned(),
                limits.idle.to_string(),
                reuse(tally),
                stale_of_10_000(tally),
                tally.dials().to_string(),
                format!("{:.1}", tally.idle_average()),
                tally.idle_max.to_string(),
                learnt.to_string(),
            ]);
        }
    }
    table.print("Many origins, each with a server of another kind");
}
