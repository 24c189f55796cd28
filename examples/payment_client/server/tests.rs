//! What the server promises, asked over sockets.

mod client;
mod crash;
mod faults;
mod keys;
mod storage;

use super::{Options, PaymentServer};

/// A server on a database of its own, which lives as long as the directory.
async fn start(change: impl FnOnce(&mut Options)) -> (PaymentServer, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut options = Options::new(directory.path().join("ledger.db"));
    change(&mut options);
    let server = PaymentServer::start(options)
        .await
        .expect("the server starts");
    (server, directory)
}

/// The database as another process sees it.
fn open(directory: &tempfile::TempDir) -> rusqlite::Connection {
    rusqlite::Connection::open(directory.path().join("ledger.db")).expect("the database opens")
}

async fn payments(server: &PaymentServer) -> u64 {
    server.counts().await.expect("counts").payments
}
