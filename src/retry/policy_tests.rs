//! Promises of `policy.rs` and `table.rs`.

use std::time::Duration;

use http::{HeaderMap, StatusCode};
use proptest::prelude::*;

use super::*;
use crate::delivery::Delivery;
use crate::error::{ErrorKind, Phase, Trace};
use crate::retry::table::{classify_error, classify_response};
use crate::timings::ConnectionFacts;

const CLASSES: [Class; 4] = [Class::Safe, Class::Idempotent, Class::Keyed, Class::Unkeyed];

fn policy() -> RetryPolicy {
    RetryPolicy::default().jitter_seed(3)
}

fn situation(evidence: Evidence, class: Class) -> Situation {
    Situation {
        evidence,
        class,
        body_ready: true,
        already_retried: false,
        rejections_trusted: false,
        retry_after: None,
        time_left: None,
    }
}

fn connection(served: u32) -> ConnectionFacts {
    ConnectionFacts {
        id: 1,
        peer: None,
        served,
        idle: (served > 0).then_some(Duration::from_secs(1)),
        dial: Default::default(),
        handshake: None,
    }
}

fn error(kind: ErrorKind, phase: Phase) -> Error {
    Error::new(kind, phase)
}

fn status(code: u16) -> Evidence {
    classify_response(
        StatusCode::from_u16(code).expect("a status"),
        &HeaderMap::new(),
    )
}

/// The name of a cell, found by asking twice.
fn cell(policy: &RetryPolicy, situation: &Situation) -> &'static str {
    let mut history = History::default();
    let mut ask = || match policy.decide(situation, &history) {
        Decision::Stop(_) => None,
        Decision::Resend { wait, .. } => {
            history.add(situation.evidence, wait);
            Some(wait.is_zero())
        }
    };
    match (ask(), ask()) {
        (None, _) => "no",
        (Some(true), Some(true)) => "now",
        (Some(true), Some(false)) => "now,wait",
        (Some(true), None) => "now,once",
        (Some(false), Some(_)) => "wait",
        (Some(false), None) => "wait,once",
    }
}

/// The whole table: evidence by class by body. The evidence is made the way the wire makes it.
#[test]
fn every_cell_of_the_decision_table_holds() {
    let unsent = |kind, phase| classify_error(&Error::before_sending(kind, phase));
    let closed = |served, started| {
        classify_error(
            &error(ErrorKind::ConnectionClosed, Phase::ResponseHead)
                .with_trace(Trace {
                    taken: 100,
                    received: u64::from(started),
                    ..Trace::default()
                })
                .with_connection(connection(served)),
        )
    };
    let silent = |served| {
        classify_error(
            &error(ErrorKind::Unacknowledged, Phase::Send).with_connection(connection(served)),
        )
    };
    let bare = |kind, phase| classify_error(&error(kind, phase));
    let mut marked = HeaderMap::new();
    marked.insert("idempotent-replayed", "true".parse().expect("a value"));
    let replayed = |code| classify_response(StatusCode::from_u16(code).expect("a status"), &marked);
    let refused = classify_error(
        &error(ErrorKind::ConnectionClosed, Phase::Send).with_delivery(Delivery::Refused),
    );

    let no = ["no"; 4];
    let wait_but_unkeyed = ["wait", "wait", "wait", "no"];
    let ambiguous = ["wait,once", "wait,once", "wait", "no"];
    // Row of the table, its source, evidence, and the cells for safe, idempotent, keyed, unkeyed.
    let rows = [
        (
            "handed back, 9110 9.2.2",
            unsent(ErrorKind::ConnectionClosed, Phase::Send),
            ["now"; 4],
        ),
        (
            "resolve, 9110 9.2.2",
            unsent(ErrorKind::Resolve, Phase::Resolve),
            ["wait"; 4],
        ),
        (
            "connect, 9110 9.2.2",
            unsent(ErrorKind::Connect, Phase::Connect),
            ["wait"; 4],
        ),
        (
            "slow connect, 9110 9.2.2",
            unsent(ErrorKind::ConnectTimeout, Phase::Connect),
            ["wait"; 4],
        ),
        (
            "handshake, 9110 9.2.2",
            unsent(ErrorKind::Tls, Phase::Handshake),
            ["wait"; 4],
        ),
        ("refused, 9110 9.2.2", refused, ["now,once"; 4]),
        ("421, 9110 15.5.20", status(421), ["now,once"; 4]),
        ("425, 8470 5.2", status(425), ["now,once"; 4]),
        (
            "not received, evidence of the kernel",
            classify_error(
                &error(ErrorKind::ConnectionClosed, Phase::ResponseHead)
                    .with_delivery(Delivery::NotReceived),
            ),
            ["now", "now", "now", "no"],
        ),
        (
            "incomplete on the wire, 9112 8",
            bare(ErrorKind::ConnectionClosed, Phase::Send),
            ["now", "now", "now", "no"],
        ),
        (
            "stale connection, 9112 9.3.1",
            closed(2, false),
            ["now,once", "now,once", "now,wait", "no"],
        ),
        (
            "reused connection that acknowledges nothing",
            silent(2),
            ["now,once", "now,once", "now,wait", "no"],
        ),
        ("fresh connection, 9112 9.3.1", closed(0, false), ambiguous),
        (
            "no response in time",
            bare(ErrorKind::ResponseTimeout, Phase::ResponseHead),
            ambiguous,
        ),
        (
            "no response in time, upload unfinished",
            bare(ErrorKind::ResponseTimeout, Phase::Send),
            ambiguous,
        ),
        (
            "request too slow",
            bare(ErrorKind::RequestTimeout, Phase::ResponseHead),
            ambiguous,
        ),
        (
            "request too slow, nothing sent, 9110 9.2.2",
            unsent(ErrorKind::RequestTimeout, Phase::Send),
            ["now"; 4],
        ),
        (
            "request too long in line",
            unsent(ErrorKind::RequestTimeout, Phase::Queue),
            no,
        ),
        (
            "no connection in time",
            unsent(ErrorKind::AcquireTimeout, Phase::Queue),
            no,
        ),
        (
            "too many in line",
            unsent(ErrorKind::Overloaded, Phase::Queue),
            no,
        ),
        (
            "pool closed",
            unsent(ErrorKind::PoolClosed, Phase::Prepare),
            no,
        ),
        (
            "request too slow in the body",
            bare(ErrorKind::RequestTimeout, Phase::ResponseBody),
            no,
        ),
        (
            "body stalled",
            bare(ErrorKind::BodyTimeout, Phase::ResponseBody),
            no,
        ),
        (
            "foreign error, 9110 9.2.2",
            bare(ErrorKind::Service, Phase::Unknown),
            ambiguous,
        ),
        (
            "closed, connection unknown",
            bare(ErrorKind::ConnectionClosed, Phase::ResponseHead),
            ambiguous,
        ),
        (
            "connect without proof",
            bare(ErrorKind::Connect, Phase::Connect),
            ambiguous,
        ),
        ("head truncated, reused", closed(2, true), ambiguous),
        ("head truncated, fresh", closed(0, true), ambiguous),
        (
            "body truncated",
            bare(ErrorKind::ResponseBody, Phase::ResponseBody),
            no,
        ),
        (
            "closed in the body",
            bare(ErrorKind::ConnectionClosed, Phase::ResponseBody),
            no,
        ),
        (
            "not HTTP, 9112 11.2",
            bare(ErrorKind::Protocol, Phase::ResponseHead),
            no,
        ),
        (
            "408, 9110 15.5.9",
            status(408),
            ["now,once", "now,once", "wait", "no"],
        ),
        ("429, 6585 4", status(429), wait_but_unkeyed),
        ("503, 9110 15.6.4", status(503), wait_but_unkeyed),
        ("502, 9110 15.6.3", status(502), wait_but_unkeyed),
        ("504, 9110 15.6.5", status(504), wait_but_unkeyed),
        ("500, 9110 15.6.1", status(500), ["no", "no", "wait", "no"]),
        ("500 stored", replayed(500), no),
        ("503 stored", replayed(503), no),
        ("409, 9110 15.5.10", status(409), no),
        (
            "certificate",
            unsent(ErrorKind::Certificate, Phase::Handshake),
            no,
        ),
        (
            "invalid request",
            unsent(ErrorKind::InvalidRequest, Phase::Prepare),
            no,
        ),
        (
            "request body",
            bare(ErrorKind::RequestBody, Phase::Send),
            no,
        ),
        ("deadline", bare(ErrorKind::Deadline, Phase::Unknown), no),
    ];
    let answers = [
        200, 201, 204, 301, 304, 307, 400, 401, 403, 404, 407, 410, 411, 412, 413, 417, 422, 426,
        501, 505, 507, 511, 599,
    ];
    let answers = answers.map(|code| ("an answer, 9110 15", status(code), no));

    for (row, evidence, cells) in rows.into_iter().chain(answers) {
        for (class, wanted) in CLASSES.into_iter().zip(cells) {
            // Replayable and unread one-shot bodies are the same here; a read one is never sent again.
            for (body, body_ready, wanted) in [
                ("replayable or unread", true, wanted),
                ("read", false, "no"),
            ] {
                let situation = Situation {
                    body_ready,
                    ..situation(evidence, class)
                };
                let found = cell(&policy(), &situation);
                assert_eq!(
                    found, wanted,
                    "row {row} ({evidence:?}), {class}, body {body}"
                );
            }
        }
    }
}

/// One attempt, whatever happens (B14).
#[test]
fn policy_none_never_resends() {
    for evidence in every_evidence() {
        for class in CLASSES {
            let found = cell(&RetryPolicy::none(), &situation(evidence, class));
            assert_eq!(found, "no", "{evidence:?} {class}");
        }
    }
}

fn every_evidence() -> [Evidence; 21] {
    use Evidence as E;
    [
        E::NoConnection,
        E::Unsent,
        E::Refused,
        E::Misdirected,
        E::TooEarly,
        E::StaleConnection,
        E::FreshConnection,
        E::Lost,
        E::HeadTruncated,
        E::Committed,
        E::NotHttp,
        E::RequestTimeout,
        E::TooManyRequests,
        E::Unavailable,
        E::BadGateway,
        E::GatewayTimeout,
        E::ServerError,
        E::Replayed,
        E::Conflict,
        E::Answered,
        E::Final,
    ]
}

#[test]
fn server_error_is_retried_for_idempotent_requests_on_request_only() {
    let policy = policy().retry_500(true);
    let cells = CLASSES.map(|class| cell(&policy, &situation(Evidence::ServerError, class)));
    assert_eq!(cells, ["wait", "wait", "wait", "no"]);
}

/// RFC 9110 section 9.2.2: a failed automatic retry is not retried.
#[test]
fn second_ambiguous_failure_ends_it_unless_keyed() {
    for second in [
        Evidence::FreshConnection,
        Evidence::Lost,
        Evidence::HeadTruncated,
    ] {
        let mut history = History::default();
        history.add(Evidence::StaleConnection, Duration::ZERO);
        let ask = |policy: &RetryPolicy, class| {
            matches!(
                policy.decide(&situation(second, class), &history),
                Decision::Resend { .. }
            )
        };
        assert!(
            !ask(&policy(), Class::Safe) && !ask(&policy(), Class::Idempotent),
            "{second:?}"
        );
        assert!(ask(&policy(), Class::Keyed));
        assert!(!ask(
            &policy().second_ambiguous_retry_for_keyed(false),
            Class::Keyed
        ));
    }
}

/// The method is blamed only where another one would have been sent again (B30).
#[test]
fn refusal_names_the_method_only_for_a_failure_that_could_have_been_retried() {
    let ask = |evidence| policy().decide(&situation(evidence, Class::Unkeyed), &History::default());
    for evidence in [
        Evidence::Lost,
        Evidence::Unavailable,
        Evidence::StaleConnection,
    ] {
        assert_eq!(
            ask(evidence),
            Decision::Stop(Some(Refusal::MethodNotIdempotent))
        );
    }
    for evidence in [
        Evidence::Answered,
        Evidence::Conflict,
        Evidence::ServerError,
        Evidence::Final,
    ] {
        assert_eq!(ask(evidence), Decision::Stop(None), "{evidence:?}");
    }
    assert_eq!(
        ask(Evidence::Committed),
        Decision::Stop(Some(Refusal::Committed))
    );
}

/// RFC 9110 section 10.2.3: jitter only adds.
#[test]
fn wait_is_never_shorter_than_asked_for() {
    let asked = Duration::from_secs(3);
    let policy = policy();
    let mut waits = Vec::new();
    for _ in 0..100 {
        let situation = Situation {
            retry_after: Some(asked),
            ..situation(Evidence::Unavailable, Class::Safe)
        };
        match policy.decide(&situation, &History::default()) {
            Decision::Resend { wait, .. } => waits.push(wait),
            stop => panic!("{stop:?}"),
        }
    }
    assert!(
        waits
            .iter()
            .all(|wait| (asked..=asked + Duration::from_millis(100)).contains(wait))
    );
    waits.sort();
    waits.dedup();
    assert!(waits.len() > 90, "the clients spread");
}

#[test]
fn endless_retry_after_is_refused_and_not_waited_for() {
    let situation = Situation {
        retry_after: Some(Duration::from_secs(u64::MAX)),
        ..situation(Evidence::Unavailable, Class::Safe)
    };
    assert_eq!(
        policy().decide(&situation, &History::default()),
        Decision::Stop(Some(Refusal::RetryAfterTooLong))
    );
    policy()
        .max_retry_after(Duration::MAX)
        .decide(&situation, &History::default());
}

/// Undeclared origin: a general client cannot assume that a key is honoured (I-08).
#[test]
fn key_counts_only_at_the_declared_origins() {
    let policy = policy().keyed_origins(Origin::of(&"https://pay.example".parse().expect("a URI")));
    let class = |uri: &str| {
        let request = Request::post(uri)
            .header("idempotency-key", "\"k\"")
            .body(());
        policy
            .class_of(&request.expect("a request"))
            .expect("one key")
    };
    assert_eq!(class("https://pay.example/payments"), Class::Keyed);
    assert_eq!(class("https://other.example/payments"), Class::Unkeyed);
    assert_eq!(class("/payments"), Class::Unkeyed);
}

proptest! {
    /// The one promise of the crate, over any course of events.
    #[test]
    fn unkeyed_request_is_sent_again_on_proof_only(course in proptest::collection::vec(0_usize..21, 1..12)) {
        let policy = policy().max_attempts(20).max_unsent(20).retry_500(true);
        let mut history = History::default();
        for at in course {
            let evidence = every_evidence()[at];
            match policy.decide(&situation(evidence, Class::Unkeyed), &history) {
                Decision::Stop(_) => break,
                Decision::Resend { wait, .. } => {
                    prop_assert!(evidence.delivery().is_proof_of_no_effect(), "{:?}", evidence);
                    history.add(evidence, wait);
                }
            }
        }
    }

    #[test]
    fn attempts_never_exceed_the_two_caps(
        course in proptest::collection::vec(0_usize..21, 1..40),
        class in 0_usize..4,
        attempts in 1_u32..6,
        unsent in 0_u32..6,
    ) {
        let policy = policy().max_attempts(attempts).max_unsent(unsent).retry_500(true);
        let mut history = History::default();
        for at in course {
            let evidence = every_evidence()[at];
            if let Decision::Resend { wait, .. } =
                policy.decide(&situation(evidence, CLASSES[class]), &history)
            {
                history.add(evidence, wait);
            }
        }
        prop_assert!(history.resends < attempts + unsent);
        prop_assert!(history.counted < attempts && history.unsent <= unsent);
    }
}

/// What a policy may opt in to for unkeyed requests, and what nobody can.
#[test]
fn an_opt_in_opens_its_own_row_and_no_other() {
    let rows = [
        Evidence::NotReceived,
        Evidence::Incomplete,
        Evidence::RequestTimeout,
        Evidence::TooManyRequests,
        Evidence::Unavailable,
        Evidence::StaleConnection,
        Evidence::FreshConnection,
        Evidence::Lost,
        Evidence::HeadTruncated,
        Evidence::Committed,
        Evidence::BadGateway,
        Evidence::ServerError,
    ];
    let opened = |policy: &RetryPolicy, rejections_trusted: bool| -> Vec<Evidence> {
        let is_open = |&evidence: &Evidence| {
            let situation = Situation {
                rejections_trusted,
                ..situation(evidence, Class::Unkeyed)
            };
            let decision = policy.decide(&situation, &History::default());
            matches!(decision, Decision::Resend { .. })
        };
        rows.into_iter().filter(is_open).collect()
    };
    use Evidence::{Incomplete, NotReceived, RequestTimeout, TooManyRequests, Unavailable};
    assert_eq!(opened(&policy(), false), []);
    assert_eq!(
        opened(&policy().resend_not_received(true), false),
        [NotReceived]
    );
    assert_eq!(
        opened(&policy().resend_incomplete(true), false),
        [Incomplete]
    );
    let rejections = [RequestTimeout, TooManyRequests, Unavailable];
    assert_eq!(opened(&policy(), true), rejections);
    assert_eq!(opened(&policy().retry_500(true), false), []);
}

/// The origin decides whether its rejections are trusted; another one's are not.
#[test]
fn rejections_are_trusted_by_origin() {
    let origin = |uri: &str| Origin::of(&uri.parse().expect("a URI")).expect("an origin");
    let policy = policy().trusted_rejections([origin("https://pay.example")]);
    assert!(policy.trusts_rejections_of(Some(&origin("https://pay.example:443/x"))));
    assert!(!policy.trusts_rejections_of(Some(&origin("http://pay.example"))));
    assert!(!policy.trusts_rejections_of(None));
}
