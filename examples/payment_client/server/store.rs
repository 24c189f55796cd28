//! The ledger: one SQLite file, one connection, one thread.
//!
//! `rusqlite` blocks, so it gets a thread of its own instead of `spawn_blocking`: a SQLite database
//! has one writer at a time anyway, and a queue in front of it costs less than a pool of threads that
//! wait for the same lock. Work is sent as closures and goes on when the request that sent it is
//! dropped, so a client that leaves cannot tear a payment in two.
//!
//! # Invariants
//!
//! * Claim, payment, ledger entries and stored answer are one transaction. Between "paid" and
//!   "answer stored" there is no moment in which the process could die.
//! * The unique indices hold whatever the code does: one row a key, one payment a key, two entries a
//!   payment.
//! * Only the database's clock decides what has expired, so two servers on one file agree.

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, TransactionBehavior, params};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;

/// Sends work to the thread that owns the database.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    jobs: mpsc::Sender<Job>,
}

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

/// Why the database did not do it.
#[derive(Debug)]
pub(crate) enum StoreError {
    /// Another process held the write lock for longer than the limit. Nothing was done.
    Busy,
    /// A statement failed and all was rolled back. If it was the commit itself, on a failing disk,
    /// only a retry with the same key can tell.
    Failed(rusqlite::Error),
    /// The thread is gone.
    Stopped,
}

impl Store {
    /// Opens the file, creates what is missing, and starts the thread. It ends with the last clone.
    pub(crate) fn open(path: &Path, lock_timeout: Duration) -> Result<Self, StoreError> {
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(lock_timeout)?;
        // WAL: other processes may read while this one writes. FULL: a commit is on the disk before
        // its answer leaves, otherwise a power cut could undo a payment that a client was told of.
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        connection.execute_batch(SCHEMA)?;
        let (jobs, queue) = mpsc::channel::<Job>();
        thread::Builder::new()
            .name("ledger".to_owned())
            .spawn(move || {
                for job in queue {
                    job(&mut connection);
                }
            })
            .map_err(|_| StoreError::Stopped)?;
        Ok(Self { jobs })
    }

    /// Runs `work` on the database's thread.
    ///
    /// # Cancel safety
    /// Work that was sent is done, also when this future is dropped.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (done, result) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            // Nobody listens when the request was dropped; the work itself is done.
            let _ = done.send(work(connection));
        });
        self.jobs.send(job).map_err(|_| StoreError::Stopped)?;
        Ok(result.await.map_err(|_| StoreError::Stopped)??)
    }

    /// Payments made, and answers kept.
    pub(crate) async fn counts(&self) -> Result<(u64, u64), StoreError> {
        self.run(|connection| {
            connection.query_row(
                "SELECT (SELECT count(*) FROM payment WHERE status = 'succeeded'),
                        (SELECT count(*) FROM idem_key WHERE answer_status IS NOT NULL)",
                [],
                |row| {
                    Ok((
                        row.get::<_, i64>(0)?.unsigned_abs(),
                        row.get::<_, i64>(1)?.unsigned_abs(),
                    ))
                },
            )
        })
        .await
    }

    /// Turns expired keys into tombstones and says how many.
    ///
    /// The answer and the key's text go; the tombstone stays, because a late retry that were taken for
    /// a new request would be a double charge. Tombstones are small (a hash each) and kept for good.
    pub(crate) async fn purge(&self) -> Result<usize, StoreError> {
        self.run(|connection| {
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let expired = {
                let mut statement = tx.prepare(
                    "SELECT id, account_id, operation, key_text, fingerprint FROM idem_key
                     WHERE answer_status IS NOT NULL AND expires_at <= unixepoch()",
                )?;
                let rows = statement.query_map([], |row| {
                    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
                })?;
                rows.collect::<rusqlite::Result<Vec<(i64, String, String, String, Vec<u8>)>>>()?
            };
            for (id, account, operation, key, fingerprint) in &expired {
                tx.execute(
                    "INSERT INTO key_tombstone
                       (account_id, operation, key_hash, fingerprint, payment_id, purged_at)
                     VALUES (?1, ?2, ?3, ?4, (SELECT id FROM payment WHERE idem_id = ?5), unixepoch())",
                    params![account, operation, key_hash(key), fingerprint, id],
                )?;
                tx.execute("DELETE FROM idem_key WHERE id = ?1", params![id])?;
            }
            tx.commit()?;
            Ok(expired.len())
        })
        .await
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy,
            _ => Self::Failed(error),
        }
    }
}

impl std::fmt::Display for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Busy => f.write_str("the database stayed locked"),
            Self::Failed(_) => f.write_str("the database failed"),
            Self::Stopped => f.write_str("the database thread is gone"),
        }
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Failed(error) => Some(error),
            Self::Busy | Self::Stopped => None,
        }
    }
}

/// What a tombstone keeps of a key.
pub(crate) fn key_hash(key: &str) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// No lease and no `in progress` state: the effect is local, so the claim commits with its answer or
/// not at all. A server that calls a payment provider needs both, and an outbox.
const SCHEMA: &str = "
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS idem_key (
  -- AUTOINCREMENT: the id of a purged key is never given out again, so payment.idem_id stays unique.
  id             INTEGER PRIMARY KEY AUTOINCREMENT,
  account_id     TEXT NOT NULL,
  operation      TEXT NOT NULL,
  key_text       TEXT NOT NULL CHECK (length(key_text) BETWEEN 1 AND 255),
  fingerprint    BLOB NOT NULL CHECK (length(fingerprint) = 32),
  answer_status  INTEGER,
  answer_type    TEXT,
  answer_body    BLOB,
  created_at     INTEGER NOT NULL DEFAULT (unixepoch()),
  expires_at     INTEGER NOT NULL,
  UNIQUE (account_id, operation, key_text),
  CHECK ((answer_status IS NULL) = (answer_body IS NULL)
     AND (answer_status IS NULL) = (answer_type IS NULL))
) STRICT;
CREATE TABLE IF NOT EXISTS payment (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  -- The real guard: one payment a claim, whatever the code does. NULL when the client sent no key.
  idem_id      INTEGER UNIQUE,
  account_id   TEXT NOT NULL,
  operation    TEXT NOT NULL,
  amount_minor INTEGER NOT NULL CHECK (amount_minor > 0),
  currency     TEXT NOT NULL,
  payee        TEXT NOT NULL,
  status       TEXT NOT NULL CHECK (status IN ('succeeded', 'declined'))
) STRICT;
CREATE TABLE IF NOT EXISTS ledger_entry (
  id           INTEGER PRIMARY KEY AUTOINCREMENT,
  payment_id   INTEGER NOT NULL REFERENCES payment (id),
  leg          TEXT NOT NULL CHECK (leg IN ('debit', 'credit')),
  amount_minor INTEGER NOT NULL,
  UNIQUE (payment_id, leg),
  CHECK ((leg = 'debit') = (amount_minor < 0))
) STRICT;
CREATE TABLE IF NOT EXISTS key_tombstone (
  account_id  TEXT NOT NULL,
  operation   TEXT NOT NULL,
  key_hash    BLOB NOT NULL,
  fingerprint BLOB NOT NULL,
  payment_id  INTEGER REFERENCES payment (id),
  purged_at   INTEGER NOT NULL,
  PRIMARY KEY (account_id, operation, key_hash)
) STRICT;
COMMIT;
";
