//! `kill -9` at each step of a payment, on a real process.
//!
//! A trigger that never ends holds the server inside its transaction, so the moment of death is exact.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};

use super::client::{Got, Wire, keyed, once};
use super::{Options, PaymentServer, open, payments, start};

/// A server in a process of its own: this test binary again. Killed when dropped, as by `kill -9`.
struct Victim {
    process: Child,
    base_url: String,
}

impl Victim {
    fn start(directory: &tempfile::TempDir) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "--nocapture", "server::tests::crash::victim"])
            .env(DATABASE, directory.path().join("ledger.db"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(process.stdout.take().expect("its output")).lines();
        let base_url = lines
            .map_while(Result::ok)
            .find_map(|line| line.find("http://").map(|at| line[at..].to_owned()))
            .expect("its URL");
        Self { process, base_url }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // `kill` is SIGKILL. An error means that it is dead already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Not a promise but the process that the tests here start and kill; by itself it does nothing.
#[tokio::test]
async fn victim() {
    let Some(database) = std::env::var_os(DATABASE) else {
        return;
    };
    let server = PaymentServer::start(Options::new(database))
        .await
        .expect("the server starts");
    println!("{}", server.base_url());
    // Until the parent is gone, in case that it could not kill.
    let wait = || std::io::stdin().read_to_end(&mut Vec::new());
    let _ = tokio::task::spawn_blocking(wait).await;
}

#[tokio::test]
async fn payment_killed_before_its_commit_is_made_once_by_the_retry() {
    for step in [
        "INSERT ON idem_key",
        "INSERT ON payment",
        "INSERT ON ledger_entry",
        "UPDATE ON idem_key",
    ] {
        let (server, directory) = start(|_| {}).await;
        let other = open(&directory);
        let hang = format!(
            "CREATE TRIGGER hang AFTER {step} BEGIN
               SELECT count(*) FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n)
                                     SELECT i FROM n);
             END"
        );
        other.execute_batch(&hang).expect("a trigger");
        let victim = Victim::start(&directory);
        let mut wire = Wire::tcp(&victim.base_url).await;
        wire.send(keyed("/payments").as_bytes()).await;
        wait_until_locked(&other).await;
        drop(victim);
        assert!(matches!(wire.read().await, Got::Fin | Got::Rst), "{step}");
        assert_eq!(payments(&server).await, 0, "{step}");

        other
            .execute_batch("DROP TRIGGER hang")
            .expect("no trigger");
        let retry = once(server.base_url(), &keyed("/payments")).await.reply();
        assert_eq!((retry.status, retry.replayed()), (201, false), "{step}");
        let entries: (i64, i64) = other
            .query_row(
                "SELECT count(*), sum(amount_minor) FROM ledger_entry",
                [],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .expect("the ledger");
        assert_eq!((payments(&server).await, entries), (1, (2, 0)), "{step}");
    }
}

#[tokio::test]
async fn payment_killed_after_its_commit_is_replayed_to_the_retry() {
    let (server, directory) = start(|_| {}).await;
    let victim = Victim::start(&directory);
    assert_eq!(
        once(&victim.base_url, &keyed("/payments?lose=1")).await,
        Got::Fin
    );
    drop(victim);
    let retry = once(server.base_url(), &keyed("/payments")).await.reply();
    assert_eq!((retry.status, retry.replayed()), (201, true));
    assert_eq!(payments(&server).await, 1);
}

/// Waits until another process is inside a transaction.
async fn wait_until_locked(connection: &Connection) {
    connection.busy_timeout(Duration::ZERO).expect("no waiting");
    loop {
        match connection.execute_batch("BEGIN IMMEDIATE; ROLLBACK") {
            Ok(()) => tokio::time::sleep(Duration::from_millis(2)).await,
            Err(error) => {
                assert_eq!(
                    error.sqlite_error_code(),
                    Some(ErrorCode::DatabaseBusy),
                    "{error}"
                );
                break;
            }
        }
    }
    connection
        .busy_timeout(Duration::from_secs(5))
        .expect("waiting again");
}

/// Tells the victim its database.
const DATABASE: &str = "PAYMENT_CLIENT_VICTIM_DATABASE";
