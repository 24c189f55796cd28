//! The URLs, and what each does. Nothing here knows of sockets: a handler that wants its answer lost
//! says so with a [`Loss`] in the response, and the connection sees to it.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use axum::response::IntoResponse;
use axum::routing::get;
use http_body_util::LengthLimitError;
use serde_json::json;

use super::claim::{Answer, Outcome, Running, Scope, pay};
use super::key::{read_account, read_key};
use super::payment::{Payment, fingerprint};
use super::problem::Problem;
use super::store::{Store, StoreError};

/// Response extension: this answer must not reach the client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Loss {
    /// The connection ends as if the server had simply closed it.
    Fin,
    /// The connection is reset.
    Rst,
}

/// What the handlers share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) store: Store,
    pub(crate) require_keys: bool,
    pub(crate) retention_seconds: i64,
    pub(crate) running: Running,
    pub(crate) tally: Tally,
}

/// What only the network side can count.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) connections: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) full_handshakes: AtomicU64,
    pub(crate) resumed_handshakes: AtomicU64,
}

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/hello", get(|| async { "hello" }).post(upload))
        .route("/upload", axum::routing::post(upload))
        .route("/idempotency", get(|| async { SPECIFICATION }))
        .route(
            "/payments",
            get(counts).post(|state, request| payment("POST /payments", state, request)),
        )
        // The same thing under another name: shows that a key counts for one operation only.
        .route(
            "/payouts",
            axum::routing::post(|state, request| payment("POST /payouts", state, request)),
        )
        .with_state(shared)
}

async fn counts(State(shared): State<Arc<Shared>>) -> Result<Response<Body>, Problem> {
    let (payments, _) = shared.store.counts().await.map_err(problem)?;
    let body = json!({
        "payments": payments,
        "requests": shared.tally.requests.load(Ordering::Relaxed),
        "connections": shared.tally.connections.load(Ordering::Relaxed),
    });
    Ok(([(CONTENT_TYPE, "application/json")], body.to_string()).into_response())
}

async fn upload(request: Request<Body>) -> Result<String, Problem> {
    let body = read_body(request.into_body(), MAX_UPLOAD).await?;
    Ok(format!("{} bytes", body.len()))
}

async fn payment(
    operation: &'static str,
    State(shared): State<Arc<Shared>>,
    request: Request<Body>,
) -> Result<Response<Body>, Problem> {
    let (head, body) = request.into_parts();
    let lose = head
        .uri
        .query()
        .and_then(|query| query.split('&').find_map(|p| p.strip_prefix("lose=")))
        .filter(|how| !how.is_empty());
    if lose == Some("early") {
        return Ok(lost(Loss::Fin));
    }
    // All that can be refused is refused before the key is claimed, so that a refusal costs no key.
    let scope = Scope {
        account: read_account(&head.headers)?,
        operation,
    };
    let key = read_key(&head.headers)?;
    if key.is_none() && shared.require_keys {
        return Err(Problem::KeyMissing);
    }
    let body = read_body(body, MAX_PAYMENT).await?;
    let payment = Payment::read(&head.headers, &body)?;
    let fingerprint = fingerprint(operation, &head.headers, &body);
    let entered = match &key {
        Some(key) => Some(shared.running.enter(&scope, key, fingerprint)?),
        None => None,
    };
    let retention = shared.retention_seconds;
    let outcome = shared
        .store
        .run(move |connection| {
            // Moved along: the key stays taken until the transaction ends, also without its client.
            let _entered = entered;
            let key = key.as_deref().map(|key| (key, &fingerprint));
            pay(connection, &scope, &payment, key, retention)
        })
        .await
        .map_err(problem)?;
    match (outcome, lose) {
        (Outcome::Decided(_), Some("rst")) => Ok(lost(Loss::Rst)),
        (Outcome::Decided(_), Some(_)) => Ok(lost(Loss::Fin)),
        (Outcome::Decided(answer), None) => answer.into_response(false),
        (Outcome::Replayed(answer), _) => answer.into_response(true),
        (Outcome::Reused, _) => Err(Problem::KeyReused),
        (Outcome::Expired, _) => Err(Problem::KeyExpired),
    }
}

impl Answer {
    fn into_response(self, replayed: bool) -> Result<Response<Body>, Problem> {
        let status = StatusCode::from_u16(self.status).map_err(|_| Problem::Internal)?;
        let content_type =
            HeaderValue::try_from(self.content_type).map_err(|_| Problem::Internal)?;
        let mut response = (status, self.body).into_response();
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        if replayed {
            response
                .headers_mut()
                .insert(REPLAYED, HeaderValue::from_static("true"));
        }
        Ok(response)
    }
}

fn lost(how: Loss) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    response.extensions_mut().insert(how);
    response
}

async fn read_body(body: Body, limit: usize) -> Result<Bytes, Problem> {
    to_bytes(body, limit).await.map_err(|error| {
        let cause = error.source();
        if cause.is_some_and(|cause| cause.is::<LengthLimitError>()) {
            Problem::TooLarge
        } else {
            Problem::BodyInvalid("The body ended early.")
        }
    })
}

fn problem(error: StoreError) -> Problem {
    match error {
        // 503 and not 409: SQLite's lock is for the whole file, so it tells nothing of this key.
        StoreError::Busy => Problem::Overloaded,
        StoreError::Failed(_) | StoreError::Stopped => {
            tracing::error!(cause = error.source(), "{error}");
            Problem::Internal
        }
    }
}

/// Marks an answer that was stored earlier; the name that several payment APIs use.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// A payment is a few hundred bytes; the rest is room for odd clients.
const MAX_PAYMENT: usize = 64 * 1024;

/// Enough to fill every socket buffer on the way.
const MAX_UPLOAD: usize = 1024 * 1024;

/// The draft has a server publish how it treats keys, expiry included (section 2.5.2).
const SPECIFICATION: &str = "\
Idempotency-Key: one structured-field string of 1 to 255 characters, e.g. \"8e03978e-40d5\".
Where: POST /payments, POST /payouts. A key counts for one account and one operation.
Kept: the first decided answer (201, 402), for 24 hours unless this server was started otherwise.
Again, same payload: the stored answer with Idempotent-Replayed: true.
Again, while the first runs: 409 with Retry-After. Again, other payload: 422 key-reused.
Again, after expiry: 422 key-expired; no payment is made.
Not kept: 400, 409, 413, 415, 422, 500, 503. The same key may be sent again; it pays once at most.
";
