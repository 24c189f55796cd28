//! Pays once a key: the claim, the payment and the answer, in one transaction.
//!
//! ```text
//! absent --pay--> answered --purge, after expires_at--> tombstone
//! ```
//!
//! A process that dies in [`pay`] leaves `absent`; one that dies after it leaves `answered`. There is
//! nothing in between for a retry to find.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use serde_json::json;

use super::payment::Payment;
use super::problem::Problem;
use super::store::key_hash;

/// Where a key counts: the same text for another account or another operation is another key.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Scope {
    pub(crate) account: String,
    /// Method and route. The query is not part of it: here it only says how to lose the answer.
    pub(crate) operation: &'static str,
}

/// What a client was told, or is to be told.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) body: Vec<u8>,
}

/// What became of one request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Outcome {
    /// Decided now, and stored when there is a key.
    Decided(Answer),
    /// Decided by an earlier request.
    Replayed(Answer),
    /// The key stands for another payload.
    Reused,
    /// The key's answer is no longer kept.
    Expired,
}

/// Makes the payment unless `key` says that it was made.
pub(crate) fn pay(
    connection: &mut Connection,
    scope: &Scope,
    payment: &Payment,
    key: Option<(&str, &[u8; 32])>,
    retention_seconds: i64,
) -> rusqlite::Result<Outcome> {
    // IMMEDIATE takes the write lock first, so that nothing read below can change before the commit.
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let claim = match key {
        None => None,
        Some((key, fingerprint)) => match claim(&tx, scope, key, fingerprint, retention_seconds)? {
            Ok(id) => Some(id),
            // Dropping `tx` rolls back; there was nothing to keep.
            Err(outcome) => return Ok(outcome),
        },
    };
    let answer = decide(&tx, scope, payment, claim)?;
    if let Some(id) = claim {
        tx.execute(
            "UPDATE idem_key SET answer_status = ?2, answer_type = ?3, answer_body = ?4 WHERE id = ?1",
            params![id, answer.status, answer.content_type, answer.body],
        )?;
    }
    tx.commit()?;
    Ok(Outcome::Decided(answer))
}

/// Inserts the key if it is absent; otherwise says what the earlier request left.
fn claim(
    tx: &Transaction<'_>,
    scope: &Scope,
    key: &str,
    fingerprint: &[u8; 32],
    retention_seconds: i64,
) -> rusqlite::Result<Result<i64, Outcome>> {
    let Scope { account, operation } = scope;
    let buried: Option<Vec<u8>> = tx
        .query_row(
            "SELECT fingerprint FROM key_tombstone
             WHERE account_id = ?1 AND operation = ?2 AND key_hash = ?3",
            params![account, operation, key_hash(key)],
            |row| row.get(0),
        )
        .optional()?;
    if let Some(earlier) = buried {
        return Ok(Err(if earlier == fingerprint {
            Outcome::Expired
        } else {
            Outcome::Reused
        }));
    }
    let inserted = tx
        .query_row(
            "INSERT INTO idem_key (account_id, operation, key_text, fingerprint, expires_at)
             VALUES (?1, ?2, ?3, ?4, unixepoch() + ?5)
             ON CONFLICT (account_id, operation, key_text) DO NOTHING
             RETURNING id",
            params![account, operation, key, fingerprint, retention_seconds],
            |row| row.get(0),
        )
        .optional()?;
    if let Some(id) = inserted {
        return Ok(Ok(id));
    }
    // The fingerprint is compared first: a stranger's payload learns nothing of the answer.
    let (earlier, expired, answer) = tx.query_row(
        "SELECT fingerprint, expires_at <= unixepoch(), answer_status, answer_type, answer_body
         FROM idem_key WHERE account_id = ?1 AND operation = ?2 AND key_text = ?3",
        params![account, operation, key],
        |row| {
            let answer = Answer {
                status: row.get(2)?,
                content_type: row.get(3)?,
                body: row.get(4)?,
            };
            Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, bool>(1)?, answer))
        },
    )?;
    Ok(Err(if earlier != fingerprint {
        Outcome::Reused
    } else if expired {
        Outcome::Expired
    } else {
        Outcome::Replayed(answer)
    }))
}

/// Books the payment, or declines it. Both are final, so both are worth storing.
fn decide(
    tx: &Transaction<'_>,
    scope: &Scope,
    payment: &Payment,
    claim: Option<i64>,
) -> rusqlite::Result<Answer> {
    let Payment {
        amount,
        currency,
        payee,
    } = payment;
    let declined = *amount > CREDIT_LIMIT;
    let status = if declined { "declined" } else { "succeeded" };
    let id: i64 = tx.query_row(
        "INSERT INTO payment (idem_id, account_id, operation, amount_minor, currency, payee, status)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) RETURNING id",
        params![claim, scope.account, scope.operation, amount, currency, payee, status],
        |row| row.get(0),
    )?;
    if !declined {
        for (leg, signed) in [("debit", -amount), ("credit", *amount)] {
            tx.execute(
                "INSERT INTO ledger_entry (payment_id, leg, amount_minor) VALUES (?1, ?2, ?3)",
                params![id, leg, signed],
            )?;
        }
    }
    let body = json!({
        "payment": id, "amount": amount, "currency": currency, "payee": payee, "status": status,
    });
    Ok(Answer {
        status: if declined { 402 } else { 201 },
        content_type: "application/json".to_owned(),
        body: body.to_string().into_bytes(),
    })
}

/// Largest payment that is not declined, in minor units. Chosen so that a test can go over it.
const CREDIT_LIMIT: i64 = 1_000_000;

/// The keyed requests that this process is working on.
///
/// Not what makes a payment happen once: that is the unique index. It lets a duplicate be told `409`
/// at once instead of waiting in the queue behind its twin.
#[derive(Clone, Debug, Default)]
pub(crate) struct Running(Arc<Mutex<Fingerprints>>);

/// By scope and key.
type Fingerprints = HashMap<(Scope, String), [u8; 32]>;

impl Running {
    /// Enters a request, or says why it has to stay out.
    pub(crate) fn enter(
        &self,
        scope: &Scope,
        key: &str,
        fingerprint: [u8; 32],
    ) -> Result<Entered, Problem> {
        let entry = (scope.clone(), key.to_owned());
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match running.entry(entry.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(fingerprint);
                Ok(Entered {
                    running: self.clone(),
                    entry,
                })
            }
            Entry::Occupied(other) if *other.get() == fingerprint => Err(Problem::InProgress),
            Entry::Occupied(_) => Err(Problem::KeyReused),
        }
    }
}

/// The promise that a request is being worked on. `Drop` gives it back.
#[derive(Debug)]
pub(crate) struct Entered {
    running: Running,
    entry: (Scope, String),
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.running
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.entry);
    }
}
