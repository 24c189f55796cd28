//! The pool's rules in virtual time: traffic of several shapes against models of the servers that are met in the
//! field. `docs/defaults.md` takes its numbers from here.
//!
//! `cargo bench --bench simulation --no-default-features -- [scenario] [--quick] [--seed N] [--unkeyed PERCENT]`.
//! Without a scenario all of them run. The same seed gives the same output, on any machine.
//!
//! * `idle`: what learning the server's idle timeout is worth, beside two simpler rules.
//! * `timeout_sweep`: the caller's idle timeout.
//! * `cap`: servers that close after a number of requests, and the connections that are dialled ahead for it.
//! * `redeploy`: servers that start anew, with the same idle timeout or another one.
//! * `dials`: many connections at once, to servers with a short and a long line.
//! * `origins`: up to 100,000 origins under the default limits.
//!
//! The rules are the library's own source files, compiled into this program: they are private, and need nothing but
//! the time.

/// A part of the library, of which only the rules are used here.
macro_rules! of_the_library {
    ($($path:literal $name:ident;)*) => {$(
        // The rest of each file, and what only its tests import.
        #[allow(dead_code, unreachable_pub, unused_imports, missing_docs)]
        #[path = $path]
        mod $name;
    )*};
}

of_the_library! {
    "../../src/clock.rs" clock;
    "../../src/delivery.rs" delivery;
    "../../src/error.rs" error;
    "../../src/origin.rs" origin;
    "../../src/profile.rs" profile;
    "../../src/rules/mod.rs" rules;
    "../../src/stats.rs" stats;
    "../../src/timings.rs" timings;
}

mod dials;
mod redeploy;
mod report;
mod scenarios;
mod server;
mod traffic;
mod world;

use lexopt::prelude::*;
use scenarios::{SCENARIOS, Scale};

fn main() -> Result<(), lexopt::Error> {
    let mut scale = Scale::default();
    let mut wanted = None;
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("quick") => scale.is_quick = true,
            Long("seed") => scale.seed = arguments.value()?.parse()?,
            Long("unkeyed") => scale.unkeyed = arguments.value()?.parse::<f64>()? / 100.0,
            // cargo passes it, and it says nothing here.
            Long("bench") => {}
            Value(name) if wanted.is_none() => wanted = Some(name.string()?),
            other => return Err(other.unexpected()),
        }
    }
    let chosen = SCENARIOS
        .iter()
        .filter(|(name, _)| wanted.as_deref().is_none_or(|wanted| wanted == *name));
    let mut any = false;
    for (_, run) in chosen {
        run(&scale);
        any = true;
    }
    match any {
        true => Ok(()),
        false => Err(format!("there is no scenario {}", wanted.unwrap_or_default()).into()),
    }
}
