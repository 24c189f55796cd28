//! One row of the scene: a series of requests in one mode, and the two counts of it.

use std::time::Duration;

use idempool::Stats;
use serde_json::Value;

use crate::report::{Column, Report, Row, count, micros, or_dash};
use crate::scenes::witness::Counts;

/// Whether connections are kept.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    Pooled,
    Fresh,
}

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Self::Pooled => "pooled",
            Self::Fresh => "fresh",
        }
    }
}

/// A series of equal requests, one after the other.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) scheme: &'static str,
    pub(super) mode: Mode,
    pub(super) requests: u32,
    pub(super) median: Duration,
    pub(super) p99: Duration,
    pub(super) stats: Stats,
    pub(super) server: Option<Counts>,
    pub(super) time_wait: Option<u64>,
    pub(super) is_built_in: bool,
}

impl Measured {
    pub(super) fn check(&self, report: &mut Report<'_>) {
        let (stats, requests) = (&self.stats, u64::from(self.requests));
        let name = |what: &str| format!("reuse, {} {}: {what}", self.scheme, self.mode.as_str());
        report.expect(stats.requests == requests, || {
            let sent = stats.requests;
            name(&format!("{requests} requests became {sent}"))
        });
        let connections = match self.mode {
            Mode::Fresh => Some(requests),
            // A server of the user's own may close connections when it likes.
            Mode::Pooled => self.is_built_in.then_some(1),
        };
        report.expect(
            connections.is_none_or(|expected| stats.connections_opened == expected),
            || name(&format!("{} connections opened", stats.connections_opened)),
        );
        let Some(server) = self.server else { return };
        report.agree(&name("requests"), stats.requests, server.requests);
        report.agree(
            &name("connections"),
            stats.connections_opened,
            server.connections,
        );
        if let Some(theirs) = server.handshakes {
            report.agree(&name("full handshakes"), stats.tls_full, theirs.full);
            report.agree(
                &name("resumed handshakes"),
                stats.tls_resumed,
                theirs.resumed,
            );
        }
    }
}

impl Row for Measured {
    const COLUMNS: &'static [Column] = &[
        Column::Left("scheme"),
        Column::Left("mode"),
        Column::Right("requests"),
        Column::Right("median"),
        Column::Right("p99"),
        Column::Right("connections\npool / server"),
        Column::Right("TLS full+resumed\npool / server"),
        Column::Right("TIME_WAIT\nleft"),
    ];

    fn cells(&self) -> Vec<String> {
        let (stats, server) = (&self.stats, self.server);
        let connections = server.map(|server| count(server.connections));
        let both = |full, resumed| format!("{}+{}", count(full), count(resumed));
        let handshakes = server.and_then(|server| server.handshakes);
        let handshakes = handshakes.map(|server| both(server.full, server.resumed));
        vec![
            self.scheme.to_owned(),
            self.mode.as_str().to_owned(),
            count(self.requests.into()),
            format!("{:.1?}", self.median),
            format!("{:.1?}", self.p99),
            format!(
                "{} / {}",
                count(stats.connections_opened),
                or_dash(connections)
            ),
            format!(
                "{} / {}",
                both(stats.tls_full, stats.tls_resumed),
                or_dash(handshakes)
            ),
            or_dash(self.time_wait.map(count)),
        ]
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let (stats, server) = (&self.stats, self.server);
        vec![
            ("scene", "reuse".into()),
            ("scheme", self.scheme.into()),
            ("mode", self.mode.as_str().into()),
            ("requests", self.requests.into()),
            ("connections_opened", stats.connections_opened.into()),
            ("connections_saved", stats.connections_saved.into()),
            ("tls_full", stats.tls_full.into()),
            ("tls_saved", stats.tls_saved.into()),
            ("median_us", micros(self.median).into()),
            ("p99_us", micros(self.p99).into()),
            ("tls_resumed", stats.tls_resumed.into()),
            ("round_trips_saved", stats.round_trips_saved.into()),
            ("time_saved_us", micros(stats.time_saved).into()),
            ("time_wait", self.time_wait.into()),
            (
                "server_requests",
                server.map(|server| server.requests).into(),
            ),
            (
                "server_connections",
                server.map(|server| server.connections).into(),
            ),
        ]
    }
}
