//! One key, one payment.

use std::time::Duration;

use tokio::task::JoinSet;

use super::client::{KEY, Wire, keyed, once, post};
use super::{open, payments, start};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundred_concurrent_requests_with_one_key_make_one_payment() {
    let (server, directory) = start(|_| {}).await;
    let mut clients = JoinSet::new();
    for _ in 0..100 {
        let url = server.base_url().to_owned();
        clients.spawn(async move { once(&url, &keyed("/payments")).await.reply() });
    }
    let replies = clients.join_all().await;
    let (answered, waiting): (Vec<_>, Vec<_>) =
        replies.iter().partition(|reply| reply.status == 201);
    assert_eq!(answered.iter().filter(|reply| !reply.replayed()).count(), 1);
    assert!(answered.iter().all(|reply| reply.body == answered[0].body));
    for reply in waiting {
        assert_eq!(
            (reply.status, reply.problem().as_str()),
            (409, "in-progress")
        );
    }
    let retry = once(server.base_url(), &keyed("/payments")).await.reply();
    assert_eq!((retry.replayed(), &retry.body), (true, &answered[0].body));
    let ledger: (i64, i64, i64) = open(&directory)
        .query_row(
            "SELECT count(*), sum(amount_minor), max(amount_minor) FROM ledger_entry",
            [],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .expect("the ledger");
    assert_eq!((payments(&server).await, ledger), (1, (2, 0, 10)));
}

#[tokio::test]
async fn duplicate_is_409_and_other_payload_422_while_the_first_runs() {
    let (server, directory) = start(|_| {}).await;
    // Another writer keeps the ledger locked, so the first request stays in the middle of its work.
    let other = open(&directory);
    other.execute_batch("BEGIN IMMEDIATE").expect("the lock");
    let (mut one, mut two) = (
        Wire::tcp(server.base_url()).await,
        Wire::tcp(server.base_url()).await,
    );
    one.send(keyed("/payments").as_bytes()).await;
    two.send(keyed("/payments").as_bytes()).await;
    // Which of the two came first is the server's affair; the other one is told at once.
    let (duplicate, mut first) = tokio::select! {
        got = one.read() => (got.reply(), two),
        got = two.read() => (got.reply(), one),
    };
    assert_eq!(
        (duplicate.status, duplicate.problem().as_str()),
        (409, "in-progress")
    );
    assert_eq!(duplicate.field("retry-after"), Some("1"));

    let changed = once(server.base_url(), &post("/payments", &[KEY], "amount=11"))
        .await
        .reply();
    assert_eq!(
        (changed.status, changed.problem().as_str()),
        (422, "key-reused")
    );

    other
        .execute_batch("ROLLBACK")
        .expect("the lock is given back");
    let answer = first.read().await.reply();
    assert_eq!((answer.status, answer.replayed()), (201, false));
    assert_eq!(payments(&server).await, 1);
}

#[tokio::test]
async fn other_payload_is_422_after_the_first_was_answered() {
    let (server, _directory) = start(|_| {}).await;
    assert_eq!(
        once(server.base_url(), &keyed("/payments"))
            .await
            .reply()
            .status,
        201
    );
    let json = "Content-Type: application/json";
    let changed = [
        post("/payments", &[KEY], "amount=11"),
        post("/payments", &[KEY], "amount=010"),
        post("/payments", &[KEY, json], r#"{"amount":10}"#),
    ];
    for request in changed {
        let reply = once(server.base_url(), &request).await.reply();
        assert_eq!(
            (reply.status, reply.problem().as_str()),
            (422, "key-reused"),
            "{request}"
        );
    }
    assert_eq!(payments(&server).await, 1);
}

#[tokio::test]
async fn malformed_key_is_400_and_pays_nothing() {
    let (server, _directory) = start(|_| {}).await;
    let long = format!("Idempotency-Key: \"{}\"", "k".repeat(256));
    let rows: [&[&str]; 7] = [
        &["Idempotency-Key: k"],
        &["Idempotency-Key: 8e03978e-40d5-43dd-bc93-6894a57f9324"],
        &["Idempotency-Key: \"k"],
        &["Idempotency-Key: "],
        &["Idempotency-Key: \"\""],
        &[&long],
        &[KEY, KEY],
    ];
    for fields in rows {
        let reply = once(server.base_url(), &post("/payments", fields, "amount=10"))
            .await
            .reply();
        assert_eq!(
            (reply.status, reply.problem().as_str()),
            (400, "key-malformed"),
            "{fields:?}"
        );
    }
    assert_eq!(payments(&server).await, 0);
}

#[tokio::test]
async fn same_key_counts_anew_for_another_account_or_operation() {
    let (server, _directory) = start(|_| {}).await;
    let requests = [
        keyed("/payments"),
        keyed("/payouts"),
        post("/payments", &[KEY, "Account: a"], "amount=10"),
        // Another payload too: what it may not do to a key of its own account, it may here.
        post("/payments", &[KEY, "Account: b"], "amount=99"),
    ];
    let mut bodies = Vec::new();
    for request in &requests {
        let reply = once(server.base_url(), request).await.reply();
        assert_eq!((reply.status, reply.replayed()), (201, false), "{request}");
        bodies.push(reply.body);
    }
    for (request, body) in requests.iter().zip(bodies) {
        let reply = once(server.base_url(), request).await.reply();
        assert!(reply.replayed(), "{request}");
        assert_eq!(reply.body, body);
    }
    assert_eq!(payments(&server).await, 4);
}

#[tokio::test]
async fn expired_key_is_an_error_before_and_after_the_purge() {
    let (server, directory) = start(|options| options.retention = Duration::ZERO).await;
    assert_eq!(
        once(server.base_url(), &keyed("/payments"))
            .await
            .reply()
            .status,
        201
    );
    for purged in [1, 0] {
        let late = once(server.base_url(), &keyed("/payments")).await.reply();
        assert_eq!((late.status, late.problem().as_str()), (422, "key-expired"));
        let other = once(server.base_url(), &post("/payments", &[KEY], "amount=11"))
            .await
            .reply();
        assert_eq!(
            (other.status, other.problem().as_str()),
            (422, "key-reused")
        );
        assert_eq!(server.purge().await.expect("a purge"), purged);
    }
    let kept: (i64, i64) = open(&directory)
        .query_row(
            "SELECT count(*), payment_id FROM key_tombstone",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .expect("the tombstone");
    let counts = server.counts().await.expect("counts");
    assert_eq!(
        (kept, counts.payments, counts.stored_answers),
        ((1, 1), 1, 0)
    );
}

#[tokio::test]
async fn replay_is_identical_but_for_its_marker() {
    let (server, _directory) = start(|_| {}).await;
    for (body, status, paid) in [("amount=10", 201, 1), ("amount=1000001", 402, 0)] {
        let key = format!("Idempotency-Key: \"{body}\"");
        let request = post("/payments", &[&key], body);
        let before = payments(&server).await;
        let first = once(server.base_url(), &request).await.reply();
        let again = once(server.base_url(), &request).await.reply();
        assert_eq!((first.status, first.replayed()), (status, false), "{body}");
        assert_eq!((again.status, again.replayed()), (status, true), "{body}");
        assert_eq!(again.body, first.body);
        assert_eq!(again.field("content-type"), first.field("content-type"));
        assert_eq!(payments(&server).await - before, paid);
    }
}

#[tokio::test]
async fn each_post_without_a_key_is_a_payment_of_its_own() {
    let (server, _directory) = start(|_| {}).await;
    for nth in 1..=3 {
        let reply = once(server.base_url(), &post("/payments", &[], "amount=10"))
            .await
            .reply();
        assert_eq!((reply.status, &reply.json()["payment"]), (201, &nth.into()));
    }
    let counts = server.counts().await.expect("counts");
    assert_eq!((counts.payments, counts.stored_answers), (3, 0));
}

#[tokio::test]
async fn missing_key_is_400_where_keys_are_required() {
    let (server, _directory) = start(|options| options.require_keys = true).await;
    let reply = once(server.base_url(), &post("/payments", &[], "amount=10"))
        .await
        .reply();
    assert_eq!(
        (reply.status, reply.problem().as_str()),
        (400, "key-missing")
    );
    assert_eq!(
        once(server.base_url(), &keyed("/payments"))
            .await
            .reply()
            .status,
        201
    );
    assert_eq!(payments(&server).await, 1);
}

#[tokio::test]
async fn refused_body_does_not_use_up_its_key() {
    let (server, _directory) = start(|_| {}).await;
    let refused = [
        (post("/payments", &[KEY], "amount=0"), 400, "body-invalid"),
        (
            post("/payments", &[KEY, "Content-Type: text/plain"], "amount=10"),
            415,
            "media-type",
        ),
        (
            post("/payments", &[KEY], &"x".repeat(70_000)),
            413,
            "too-large",
        ),
        (
            post("/payments", &[KEY, "Account: a b"], "amount=10"),
            400,
            "account-malformed",
        ),
    ];
    for (request, status, problem) in refused {
        let reply = once(server.base_url(), &request).await.reply();
        assert_eq!((reply.status, reply.problem().as_str()), (status, problem));
    }
    let reply = once(server.base_url(), &keyed("/payments")).await.reply();
    assert_eq!((reply.status, reply.replayed()), (201, false));
}
