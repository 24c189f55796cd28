//! Scene 2: the stale connection. The server closes one that the pool wants to use again.
//!
//! *Idle*: it closed a second ago. The pool knows, and the request never sees that connection.
//! *Race*: it closes as the request arrives. Nobody can know that beforehand; what matters is that all
//! such failures look the same, and that only what is safe is sent again.

use std::time::Duration;

use futures_util::future::try_join_all;
use http::{Method, Request, StatusCode};
use idempool::{Delivery, Error, ErrorKind, ReplayBody};
use serde_json::Value;

use crate::BoxError;
use crate::client::{Answer, Client};
use crate::report::{Column, Report, Row, or_dash};

use super::{Scheme, Stage};

/// Plays both cases over both schemes, with a GET and with a large POST.
pub(crate) async fn play(stage: &Stage, report: &mut Report<'_>) -> Result<(), BoxError> {
    report.title("2. The stale connection")?;
    let mut asked = Vec::new();
    for scheme in Scheme::BOTH {
        asked.extend([Method::GET, Method::POST].map(|method| (scheme, method)));
    }
    let idle = asked
        .iter()
        .map(|(scheme, method)| idle(stage, *scheme, method));
    // They all wait for the same two seconds.
    let mut rows = try_join_all(idle).await?;
    for retry_layer in [false, true] {
        for (scheme, method) in &asked {
            rows.push(race(stage, *scheme, method, retry_layer).await?);
        }
    }
    report.say(
        "Idle: the server closes after 1 s, the next request comes after 2 s, and none fails.\n\
         Race: the server closes at the first byte of the next request. POSTs are 1 MiB, unkeyed.",
    )?;
    report.rows(&rows)?;
    for row in &rows {
        row.check(report);
    }
    if let Some(error) = rows.iter().find_map(Met::error) {
        report.say("The first of these errors in its own words:")?;
        report.quote(error)?;
    }
    report.say(
        "All races give one kind of error, whichever way the close surfaced. The retry layer sends the\n\
         GET again on a fresh connection. The POST is the caller's to decide: a byte of it left, so\n\
         nobody on this side can know what the server did.",
    )?;
    Ok(())
}

async fn idle(stage: &Stage, scheme: Scheme, method: &Method) -> Result<Met, BoxError> {
    let target = stage.payment_server(scheme, Some(SERVER_IDLE)).await?;
    let client = Client::new(&target.base_url, target.pool()?.build());
    client.send_once(client.get("/hello")?).await?;
    tokio::time::sleep(PAUSE).await;
    let outcome = client.send_once(request(&client, method)?).await;
    let stats = client.stats();
    let accepted = target.connections().await?;
    target.stop().await;
    Ok(Met {
        case: Case::Idle,
        scheme,
        method: method.clone(),
        retry_layer: false,
        outcome,
        noticed_by: match (stats.closed_while_idle, stats.stale_caught_by_probe) {
            (1, 0) => Some("task"),
            (0, 1) => Some("probe"),
            _ => None,
        },
        opened: stats.connections_opened,
        accepted,
        effects: 0,
    })
}

async fn race(
    stage: &Stage,
    scheme: Scheme,
    method: &Method,
    retry_layer: bool,
) -> Result<Met, BoxError> {
    let server = stage.race_server(scheme).await?;
    let client = Client::new(server.base_url(), stage.pool()?);
    client.send_once(client.get("/hello")?).await?;
    tokio::time::sleep(BREATH).await;
    let request = request(&client, method)?;
    let outcome = if retry_layer {
        client.send(request).await
    } else {
        client.send_once(request).await
    };
    let counts = server.counts();
    if counts.raced != 1 {
        return Err(format!("the server raced {} connections, not 1", counts.raced).into());
    }
    Ok(Met {
        case: Case::Race,
        scheme,
        method: method.clone(),
        retry_layer,
        outcome,
        noticed_by: None,
        opened: client.stats().connections_opened,
        accepted: counts.connections,
        effects: counts.effects,
    })
}

fn request(client: &Client, method: &Method) -> Result<Request<ReplayBody>, BoxError> {
    if method == Method::POST {
        client.post("/upload", vec![b'x'; LARGE])
    } else {
        client.get("/hello")
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Case {
    Idle,
    Race,
}

impl Case {
    fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Race => "race",
        }
    }
}

/// How a request fared whose connection had gone stale.
#[derive(Debug)]
struct Met {
    case: Case,
    scheme: Scheme,
    method: Method,
    retry_layer: bool,
    outcome: Result<Answer, Error>,
    /// Who saw that the idle connection was closed; exactly one of them may.
    noticed_by: Option<&'static str>,
    /// Connections by the pool's count.
    opened: u64,
    /// Connections by the server's count.
    accepted: u64,
    /// POSTs that reached the server whole.
    effects: u64,
}

impl Met {
    fn check(&self, report: &mut Report<'_>) {
        let is_answered = self
            .outcome
            .as_ref()
            .is_ok_and(|answer| answer.status == StatusCode::OK);
        let is_told = self.error().is_some_and(|error| {
            error.kind() == ErrorKind::ConnectionClosed && error.delivery() == Delivery::Unknown
        });
        let ends_well = match self.case {
            Case::Idle => is_answered && self.noticed_by.is_some(),
            Case::Race if self.retry_layer && self.method == Method::GET => is_answered,
            Case::Race => is_told,
        };
        // A second connection only where the request went on one; and no POST may have had an effect.
        let accepted = if is_answered { 2 } else { 1 };
        let name = self.name();
        report.expect(
            ends_well && self.accepted == accepted && self.effects == 0,
            || {
                let (connections, effects) = (self.accepted, self.effects);
                let outcome = match &self.outcome {
                    Ok(answer) => answer.status.to_string(),
                    Err(error) => error.to_string(),
                };
                format!("{name}: {outcome}; {connections} connections, {effects} POSTs arrived")
            },
        );
        report.agree(&format!("{name}: connections"), self.opened, self.accepted);
    }

    fn name(&self) -> String {
        let (case, scheme, method) = (self.case.as_str(), self.scheme.as_str(), &self.method);
        let layer = if self.retry_layer { "with" } else { "without" };
        format!("{case}, {method} over {scheme} {layer} retry layer")
    }

    fn outcome(&self) -> &'static str {
        if self.outcome.is_ok() { "ok" } else { "error" }
    }

    fn error(&self) -> Option<&Error> {
        self.outcome.as_ref().err()
    }
}

impl Row for Met {
    const COLUMNS: &'static [Column] = &[
        Column::Left("case"),
        Column::Left("scheme"),
        Column::Left("method"),
        Column::Left("retry\nlayer"),
        Column::Left("outcome"),
        Column::Left("delivery"),
        Column::Right("bytes\ntaken"),
        Column::Right("idle\nage"),
        Column::Left("noticed\nby"),
    ];

    fn cells(&self) -> Vec<String> {
        let error = self.error();
        let idle = error.and_then(Error::idle_age);
        vec![
            self.case.as_str().to_owned(),
            self.scheme.as_str().to_owned(),
            self.method.to_string(),
            if self.retry_layer { "yes" } else { "no" }.to_owned(),
            error.map_or("ok", |error| error.kind().as_str()).to_owned(),
            or_dash(error.map(Error::delivery)),
            or_dash(error.map(Error::bytes_taken)),
            or_dash(idle.map(|idle| format!("{idle:.0?}"))),
            or_dash(self.noticed_by),
        ]
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let error = self.error();
        vec![
            ("scene", "stale".into()),
            ("case", self.case.as_str().into()),
            ("scheme", self.scheme.as_str().into()),
            ("method", self.method.as_str().into()),
            ("retry_layer", self.retry_layer.into()),
            ("outcome", self.outcome().into()),
            ("kind", error.map(|error| error.kind().as_str()).into()),
            (
                "delivery",
                error.map(|error| error.delivery().as_str()).into(),
            ),
            ("noticed_by", self.noticed_by.into()),
            ("bytes_taken", error.map(Error::bytes_taken).into()),
        ]
    }
}

/// The shortest idle timeout in common use is five times this; the scene need not take that long.
const SERVER_IDLE: Duration = Duration::from_secs(1);
/// When the next request comes: long after the server closed.
const PAUSE: Duration = Duration::from_secs(2);
/// Before a race, so that the idle age that the error tells is one to recognise.
const BREATH: Duration = Duration::from_millis(50);
/// More than the socket buffers take at once, so that the close meets a request half written.
const LARGE: usize = 1024 * 1024;
