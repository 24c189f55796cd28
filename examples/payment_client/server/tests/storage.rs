//! What a crash, a full disk or a second process leaves behind.

use std::time::Duration;

use super::client::{Got, keyed, once};
use super::{Options, PaymentServer, open, payments, start};

#[tokio::test]
async fn answer_outlives_the_server_that_gave_it() {
    let (server, directory) = start(|_| {}).await;
    // The process is gone between the commit and the answer.
    assert_eq!(
        once(server.base_url(), &keyed("/payments?lose=1")).await,
        Got::Fin
    );
    server.stop().await;

    let options = Options::new(directory.path().join("ledger.db"));
    let server = PaymentServer::start(options)
        .await
        .expect("the server starts again");
    let retry = once(server.base_url(), &keyed("/payments")).await.reply();
    assert_eq!((retry.status, retry.replayed()), (201, true));
    assert_eq!(retry.json()["payment"], 1);
    assert_eq!(payments(&server).await, 1);
}

#[tokio::test]
async fn two_servers_on_one_database_share_its_keys() {
    let (one, directory) = start(|_| {}).await;
    let options = Options::new(directory.path().join("ledger.db"));
    let two = PaymentServer::start(options)
        .await
        .expect("a second server");
    let first = once(one.base_url(), &keyed("/payments")).await.reply();
    let again = once(two.base_url(), &keyed("/payments")).await.reply();
    assert_eq!((first.replayed(), again.replayed()), (false, true));
    assert_eq!(again.body, first.body);
    assert_eq!((payments(&one).await, payments(&two).await), (1, 1));
}

#[tokio::test]
async fn transaction_that_fails_midway_leaves_the_key_free() {
    let steps = [
        "INSERT ON payment",
        "INSERT ON ledger_entry",
        "UPDATE ON idem_key",
    ];
    for step in steps {
        let (server, directory) = start(|_| {}).await;
        let other = open(&directory);
        let trigger =
            format!("CREATE TRIGGER fail BEFORE {step} BEGIN SELECT RAISE(FAIL, 'no'); END");
        other.execute_batch(&trigger).expect("a trigger");
        let failed = once(server.base_url(), &keyed("/payments")).await.reply();
        assert_eq!(
            (failed.status, failed.problem().as_str()),
            (500, "internal"),
            "{step}"
        );
        let left: i64 = other
            .query_row(
                "SELECT (SELECT count(*) FROM idem_key) + (SELECT count(*) FROM payment)
                      + (SELECT count(*) FROM ledger_entry)",
                [],
                |row| row.get(0),
            )
            .expect("a count");
        assert_eq!(left, 0, "{step}");

        other
            .execute_batch("DROP TRIGGER fail")
            .expect("no trigger");
        let retry = once(server.base_url(), &keyed("/payments")).await.reply();
        assert_eq!((retry.status, retry.replayed()), (201, false), "{step}");
        assert_eq!(payments(&server).await, 1, "{step}");
    }
}

#[tokio::test]
async fn ledger_locked_for_too_long_is_503_and_leaves_the_key_free() {
    let (server, directory) =
        start(|options| options.lock_timeout = Duration::from_millis(20)).await;
    let other = open(&directory);
    other.execute_batch("BEGIN IMMEDIATE").expect("the lock");
    let refused = once(server.base_url(), &keyed("/payments")).await.reply();
    assert_eq!(
        (refused.status, refused.problem().as_str()),
        (503, "overloaded")
    );
    assert_eq!(refused.field("retry-after"), Some("1"));

    other
        .execute_batch("ROLLBACK")
        .expect("the lock is given back");
    let retry = once(server.base_url(), &keyed("/payments")).await.reply();
    assert_eq!((retry.status, retry.replayed()), (201, false));
}

#[tokio::test]
async fn schema_refuses_a_second_payment_for_a_key() {
    let (server, directory) = start(|_| {}).await;
    assert_eq!(
        once(server.base_url(), &keyed("/payments"))
            .await
            .reply()
            .status,
        201
    );
    let other = open(&directory);
    let twice = [
        "INSERT INTO payment (idem_id, account_id, operation, amount_minor, currency, payee, status)
         SELECT idem_id, account_id, operation, amount_minor, currency, payee, status FROM payment",
        "INSERT INTO ledger_entry (payment_id, leg, amount_minor)
         SELECT payment_id, leg, amount_minor FROM ledger_entry",
        "INSERT INTO idem_key (account_id, operation, key_text, fingerprint, expires_at)
         SELECT account_id, operation, key_text, fingerprint, expires_at FROM idem_key",
    ];
    for statement in twice {
        let error = other.execute(statement, []).expect_err(statement);
        let code = error.sqlite_error_code();
        assert_eq!(
            code,
            Some(rusqlite::ErrorCode::ConstraintViolation),
            "{error}"
        );
    }
}
