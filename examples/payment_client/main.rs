//! An HTTP client that pays once: what its pool saves, what a stale connection does to it, and which
//! failed payment it may send again.
//!
//! `cargo run --release --example payment_client` needs nothing else; `--help` lists the options.
//! The code to copy is in `client.rs`. The server that it plays against is in `server`.

mod args;
mod client;
mod report;
mod scenes;
mod server;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::process::ExitCode;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::runtime::{Builder, Runtime};

use args::{Args, HELP, Server};
use report::{Format, Report};
use scenes::{Scheme, Stage, Target, retry, reuse, stale};
use server::BoxError;

fn main() -> ExitCode {
    let (format, server) = match Args::read(std::env::args_os().skip(1)) {
        Ok(Args::Play { format, server }) => (format, server),
        Ok(Args::Help) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("{error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match play(format, server.as_ref(), REQUESTS, &mut io::stdout()) {
        Ok(failures) if failures.is_empty() => ExitCode::SUCCESS,
        Ok(failures) => {
            // With tables they were printed among them.
            if format == Format::Json {
                failures.iter().for_each(|failure| eprintln!("{failure}"));
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            eprint!("the scenes could not be played to the end: {error}");
            let first = error.source();
            for cause in std::iter::successors(first, |cause| cause.source()) {
                eprint!(": {cause}");
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}

/// Plays all scenes and gives back what was not as it should be.
///
/// Client and servers have a runtime and a thread each. On one they would take turns, and the time of
/// the one would be counted as the other's.
fn play(
    format: Format,
    server: Option<&Server>,
    requests: u32,
    out: &mut dyn Write,
) -> Result<Vec<String>, BoxError> {
    let servers = Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let client = Builder::new_current_thread().enable_all().build()?;
    let mut report = Report::new(out, format);
    client.block_on(async {
        match server {
            Some(server) => play_on(server, requests, &mut report).await,
            None => play_built_in(&servers, requests, &mut report).await,
        }
    })?;
    Ok(report.finish()?)
}

async fn play_built_in(
    servers: &Runtime,
    requests: u32,
    report: &mut Report<'_>,
) -> Result<(), BoxError> {
    report.say("All on this machine, over loopback; client and servers have a thread each.")?;
    let stage = Stage::new(servers.handle().clone())?;
    let mut targets = Vec::new();
    for scheme in Scheme::BOTH {
        targets.push(stage.payment_server(scheme, None).await?);
    }
    reuse::play(&targets, requests, report).await?;
    stale::play(&stage, report).await?;
    retry::play(&targets[0], report).await?;
    for target in targets {
        target.stop().await;
    }
    Ok(())
}

async fn play_on(server: &Server, requests: u32, report: &mut Report<'_>) -> Result<(), BoxError> {
    let authorities: Result<Vec<_>, _> = match &server.authorities {
        Some(file) => CertificateDer::pem_file_iter(file)?.collect(),
        None => Ok(Vec::new()),
    };
    let target = Target {
        base_url: server.origin.to_string(),
        scheme: match server.origin.is_https() {
            true => Scheme::Https,
            false => Scheme::Http,
        },
        port: server.origin.port(),
        authorities: authorities?,
        built_in: None,
    };
    report.say(&format!("On {}.", target.base_url))?;
    reuse::play(std::slice::from_ref(&target), requests, report).await?;
    report.title("2. The stale connection")?;
    report.say(
        "Skipped: it needs a server that closes at a known moment, so only the built-in one.",
    )?;
    retry::play(&target, report).await
}

/// Enough for a 99th percentile that is not one request's bad luck.
const REQUESTS: u32 = 1_000;
