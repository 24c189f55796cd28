//! Servers that start anew: all that is idle closes at once, at any age, and the idle timeout may be another one after.

use std::time::Duration;

use crate::report::{Line, Table};
use crate::scenarios::{Scale, count, ms, reuse, secs};
use crate::server::Server;
use crate::traffic::{Shape, Traffic};
use crate::world::{Setup, Tally, World, percent};

/// What one redeploy led to.
struct Recovery {
    after: Tally,
    /// Until the trusted age was what it should be, if it was before the next redeploy.
    requests: Option<u64>,
    took: Option<Duration>,
    /// The trusted age before, right after, and at the end.
    trusted: [Duration; 3],
}

/// So far apart.
const EVERY: Duration = Duration::from_secs(1_800);

pub(crate) fn redeploy(scale: &Scale) {
    let restarts = scale.pick(20, 4);
    let shapes = [
        ("gap_200ms", Shape::Poisson { gap: ms(200) }),
        ("gap_3s", Shape::Poisson { gap: secs(3) }),
        ("gap_20s", Shape::Poisson { gap: secs(20) }),
        (
            "bursts_8",
            Shape::Bursts {
                size: 8,
                pause: secs(20),
            },
        ),
    ];
    let mut table = Table::new(&[
        "idle timeout",
        "traffic",
        "redeploys",
        "trusted: before",
        "just after",
        "half an hour later",
        "recovered",
        "after requests",
        "seconds",
        "stale unkeyed",
        "stale repeatable",
        "% of unkeyed too late for reuse",
        "without redeploys",
        "reuse %",
        "without redeploys",
    ]);
    let nginx = Server::by_name("nginx").unwrap_or(Server::never_closes());
    let minute = Server::never_closes().with_idle(secs(60));
    let five = minute.with_idle(secs(5));
    for (name, first, second) in [("75s", nginx, nginx), ("60s_5s", minute, five)] {
        for (shape_name, shape) in shapes {
            let server_of = |number| if number % 2 == 1 { second } else { first };
            let redeploys: Vec<_> = (1..=restarts)
                .map(|number| (EVERY * number, server_of(number)))
                .collect();
            let end = EVERY * (restarts + 1);
            let forever = || scale.traffic(shape, u64::MAX);
            let setup = scale.setup(first);
            let mut undisturbed = World::new(setup.clone(), forever());
            undisturbed.run_until(end);
            let recoveries = follow(Setup { redeploys, ..setup }, forever(), end);
            for (number, recovery) in recoveries.iter().enumerate() {
                let [before, right_after, at_end] = recovery.trusted;
                Line::new("redeploy", name, shape_name)
                    .with("redeploy", number + 1)
                    .with("trusted_before_s", seconds(before))
                    .with("trusted_after_s", seconds(right_after))
                    .with("trusted_at_end_s", seconds(at_end))
                    .with("until_requests", or_never(recovery.requests))
                    .with("until_s", or_never(recovery.took.map(seconds)))
                    .with("too_old", recovery.after.too_old)
                    .with("unkeyed", recovery.after.unkeyed)
                    .print(&recovery.after, scale.seed);
            }
            let changes: &[(&str, usize)] = match name {
                "75s" => &[("75 s, the same", 2)],
                _ => &[("60 s -> 5 s", 0), ("5 s -> 60 s", 1)],
            };
            for &(change, parity) in changes {
                let numbered = recoveries.iter().enumerate();
                let looked_at: Vec<_> = numbered
                    .filter(|(number, _)| parity == 2 || number % 2 == parity)
                    .map(|(_, recovery)| recovery)
                    .collect();
                let mut cells = vec![change.to_owned(), shape_name.to_owned()];
                cells.extend(summary(&looked_at, undisturbed.tally()));
                if change.ends_with("-> 5 s") {
                    // What was trusted before must not be any more.
                    cells[6..9].fill("-".to_owned());
                }
                table.row(cells);
            }
        }
    }
    table.print("Servers that start anew each half an hour, means over all redeploys");
}

fn summary(recoveries: &[&Recovery], undisturbed: &Tally) -> Vec<String> {
    let mut sum = Tally::default();
    recoveries
        .iter()
        .for_each(|recovery| sum.add(&recovery.after));
    let trusted = |at: usize| {
        let ages = recoveries
            .iter()
            .map(|recovery| recovery.trusted[at].as_secs_f64());
        format!("{:.1} s", mean(ages))
    };
    let recovered = || recoveries.iter().filter(|recovery| recovery.took.is_some());
    let requests = recovered()
        .filter_map(|recovery| recovery.requests)
        .map(count);
    let took = recovered().filter_map(|recovery| recovery.took);
    let took = took.map(|took| took.as_secs_f64());
    let too_old = |tally: &Tally| format!("{:.1}", percent(tally.too_old, tally.unkeyed));
    vec![
        recoveries.len().to_string(),
        trusted(0),
        trusted(1),
        trusted(2),
        recovered().count().to_string(),
        format!("{:.0}", mean(requests)),
        format!("{:.0}", mean(took)),
        sum.stale_unkeyed.to_string(),
        sum.stale_repeatable.to_string(),
        too_old(&sum),
        too_old(undisturbed),
        reuse(&sum),
        reuse(undisturbed),
    ]
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, number) = values.fold((0.0, 0.0), |(sum, number), value| {
        (sum + value, number + 1.0)
    });
    if number > 0.0 { sum / number } else { 0.0 }
}

fn seconds(time: Duration) -> String {
    format!("{:.2}", time.as_secs_f64())
}

fn or_never(value: Option<impl ToString>) -> String {
    value.map_or("never".to_owned(), |value| value.to_string())
}

/// Runs to the end, and watches the trusted age after each redeploy until it is four fifths of what it was before the
/// first one.
fn follow(setup: Setup, traffic: Traffic, end: Duration) -> Vec<Recovery> {
    const LOOK: Duration = Duration::from_secs(1);
    let mut times: Vec<_> = setup.redeploys.iter().map(|(at, _)| *at).collect();
    let redeploys = times.clone();
    times.push(end);
    let mut world = World::new(setup, traffic);
    let trusted = |world: &World| {
        let learnt = world.learnt(0);
        learnt.map_or(Duration::ZERO, |learnt| learnt.idle.trusted())
    };
    let mut recoveries = Vec::new();
    let mut wanted = Duration::ZERO;
    for (number, redeploy) in redeploys.iter().enumerate() {
        world.run_until(*redeploy);
        let before = (world.tally().clone(), trusted(&world));
        if number == 0 {
            wanted = before.1.mul_f64(0.8);
        }
        // The connections that were open have had the time to close.
        world.run_until(*redeploy + LOOK);
        let right_after = trusted(&world);
        let (mut requests, mut took) = (None, None);
        while world.now() < times[number + 1] {
            if requests.is_none() && trusted(&world) >= wanted {
                requests = Some(world.tally().requests - before.0.requests);
                took = Some(world.now() - *redeploy);
            }
            let next = (world.now() + LOOK).min(times[number + 1]);
            world.run_until(next);
        }
        recoveries.push(Recovery {
            after: world.tally().since(&before.0),
            requests,
            took,
            trusted: [before.1, right_after, trusted(&world)],
        });
    }
    recoveries
}
