//! Scene 1: what reuse saves. The same GETs, on one connection and with a connection each.
//!
//! Every figure of the pool is held against the server's own count. Times are shown, never judged.

mod measured;

use std::time::Duration;

use http::StatusCode;

use crate::BoxError;
use crate::client::Client;
use crate::report::{Report, count};

use super::witness::Witness;
use super::{Target, now};
use measured::{Measured, Mode};

/// Plays the scene on each server, `requests` for each row.
pub(crate) async fn play(
    targets: &[Target],
    requests: u32,
    report: &mut Report<'_>,
) -> Result<(), BoxError> {
    report.title("1. What reuse saves")?;
    let mut rows = Vec::new();
    for target in targets {
        let requests = affordable(target, requests, report).await?;
        for mode in [Mode::Pooled, Mode::Fresh] {
            let row = measure(target, mode, requests).await?;
            row.check(report);
            rows.push(row);
        }
    }
    report.say(
        "GET /hello, one after the other. pooled: on one connection. fresh: max_idle_per_origin(0), so a\n\
         connection each. \"pool / server\" is the pool's own count beside the server's.",
    )?;
    report.rows(&rows)?;
    for row in rows.iter().filter(|row| row.mode == Mode::Pooled) {
        report.say(&format!(
            "Over {} reuse saved {} connections, {} round trips and, at what a dial took here, \
             {:.1?}.",
            row.scheme,
            count(row.stats.connections_saved),
            count(row.stats.round_trips_saved),
            row.stats.time_saved,
        ))?;
    }
    report.say(
        "On loopback a round trip is nearly free. Over a distance of 50 ms each costs 50 ms.",
    )?;
    Ok(())
}

/// How many requests the server answers in bearable time.
async fn affordable(
    target: &Target,
    requests: u32,
    report: &mut Report<'_>,
) -> Result<u32, BoxError> {
    let client = Client::new(&target.base_url, target.pool()?.build());
    let sample = ask(&client, SAMPLE).await?;
    let median = percentile(&sample, 50);
    if median <= SLOW || requests <= FEW {
        return Ok(requests);
    }
    report.say(&format!(
        "A reused connection takes {median:.1?} a request here, so {FEW} requests instead of {}.\n\
         About 40 ms each is typical of a server that writes head and body separately without\n\
         TCP_NODELAY: Nagle's algorithm holds the body back until the head is acknowledged, and the\n\
         client's kernel delays that. The server should set TCP_NODELAY, or write both at once.",
        count(requests.into())
    ))?;
    Ok(FEW)
}

async fn measure(target: &Target, mode: Mode, requests: u32) -> Result<Measured, BoxError> {
    let witness = Witness::new(target)?;
    let before = witness.read().await?;
    // What ran before closes its connections in the background.
    tokio::time::sleep(SETTLE).await;
    let time_wait = time_wait(target.port);
    let pool = match mode {
        Mode::Pooled => target.pool()?.build(),
        Mode::Fresh => target.pool()?.max_idle_per_origin(0).build(),
    };
    let client = Client::new(&target.base_url, pool);
    let times = ask(&client, requests).await?;
    let stats = client.stats();
    drop(client);
    tokio::time::sleep(SETTLE).await;
    let after = witness.read().await?;
    Ok(Measured {
        scheme: target.scheme.as_str(),
        mode,
        requests,
        median: percentile(&times, 50),
        p99: percentile(&times, 99),
        stats,
        server: after.zip(before).map(|(after, before)| after.since(before)),
        // Older ones may have ended meanwhile; then this is too low, never too high.
        time_wait: self::time_wait(target.port)
            .zip(time_wait)
            .map(|(after, before)| after.saturating_sub(before)),
        is_built_in: target.built_in.is_some(),
    })
}

/// Sends requests one after the other; their times, sorted.
async fn ask(client: &Client, requests: u32) -> Result<Vec<Duration>, BoxError> {
    let mut times = Vec::new();
    for _ in 0..requests {
        let begun = now();
        let answer = client.send(client.get("/hello")?).await?;
        times.push(begun.elapsed());
        if answer.status != StatusCode::OK {
            return Err(format!("GET /hello was answered {}", answer.status).into());
        }
    }
    times.sort_unstable();
    Ok(times)
}

/// The smallest time that is not exceeded by so many percent of the requests. Zero if there are none.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100);
    let at = rank.saturating_sub(1);
    sorted.get(at).copied().unwrap_or_default()
}

/// Ends of connections to this port that the kernel still remembers. `None` where it does not tell.
///
/// Mostly one for each connection: the end that closed first. Both, if they closed at once.
fn time_wait(port: u16) -> Option<u64> {
    const TIME_WAIT: &str = "06";
    let port = format!(":{port:04X}");
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    if tables.iter().all(Result::is_err) {
        return None;
    }
    let connections = tables
        .iter()
        .flatten()
        .flat_map(|table| table.lines().skip(1));
    let left = connections.filter(|line| {
        let mut columns = line.split_whitespace().skip(1);
        let (local, remote, state) = (columns.next(), columns.next(), columns.next());
        let is_ours = [local, remote]
            .iter()
            .flatten()
            .any(|end| end.ends_with(&port));
        is_ours && state == Some(TIME_WAIT)
    });
    u64::try_from(left.count()).ok()
}

/// Requests that show how slow the server is: more than the acknowledgements that a new connection
/// gets at once.
const SAMPLE: u32 = 30;
/// Half of the delayed acknowledgement's 40 ms: no server on this machine takes that long by itself.
const SLOW: Duration = Duration::from_millis(20);
/// Requests to a slow server: some two seconds.
const FEW: u32 = 50;
/// Closing a connection on this machine takes microseconds.
const SETTLE: Duration = Duration::from_millis(50);
