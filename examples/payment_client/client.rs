//! The client: a pool, a retry layer around it, and how to pay with them. The part to copy.
//!
//! Three habits make it safe. A key exists, and is written down, before its request is sent. A body can
//! be sent again. A failure is judged by its [`delivery`](Error::delivery), never by its text.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use idempool::{
    Delivery, Error, IdempotencyKey, InvalidKey, Pool, ReplayBody, ResendCount, ResponseBody,
    Retry, RetryLayer, RetryPolicy, Stats,
};
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};
use tower::{ServiceBuilder, ServiceExt};

use crate::BoxError;

/// A client of one payment server. Cheap to clone; clones share the connections.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pool: Pool,
    service: Retry<Pool>,
    base_url: String,
}

impl Client {
    /// Puts the retry layer around a pool. What any tower stack has goes between or above the two.
    pub(crate) fn new(base_url: &str, pool: Pool) -> Self {
        Self::with_policy(base_url, pool, RetryPolicy::default())
    }

    /// The same with a policy of the caller's own, but for the deadline: that is everybody's.
    pub(crate) fn with_policy(base_url: &str, pool: Pool, policy: RetryPolicy) -> Self {
        let service = ServiceBuilder::new()
            .layer(RetryLayer::new(policy.deadline(PATIENCE)))
            .service(pool.clone());
        Self {
            pool,
            service,
            base_url: base_url.to_owned(),
        }
    }

    /// A GET.
    pub(crate) fn get(&self, path: &str) -> Result<Request<ReplayBody>, BoxError> {
        let request = Request::get(format!("{}{path}", self.base_url)).body(ReplayBody::empty())?;
        Ok(request)
    }

    /// A POST of these bytes, whose effect nothing makes repeatable.
    pub(crate) fn post(
        &self,
        path: &str,
        body: impl Into<ReplayBody>,
    ) -> Result<Request<ReplayBody>, BoxError> {
        let request = Request::post(format!("{}{path}", self.base_url)).body(body.into())?;
        Ok(request)
    }

    /// The POST of an order. All that can go wrong before a byte is sent goes wrong here.
    pub(crate) fn payment(
        &self,
        path: &str,
        order: &Order,
    ) -> Result<Request<ReplayBody>, BoxError> {
        let mut request = self.post(path, format!("amount={}", order.amount))?;
        request.headers_mut().insert(CONTENT_TYPE, FORM);
        match &order.key {
            Some(key) => Ok(key.attach(request)?),
            None => Ok(request),
        }
    }

    /// Sends a request, again where that is safe, and reads the whole answer.
    pub(crate) async fn send(&self, request: Request<ReplayBody>) -> Result<Answer, Error> {
        let response = self.service.clone().oneshot(request).await?;
        Answer::read(response).await
    }

    /// Sends a request past the retry layer: what one attempt comes to.
    pub(crate) async fn send_once(&self, request: Request<ReplayBody>) -> Result<Answer, Error> {
        let response = self.pool.send(request).await?;
        Answer::read(response).await
    }

    /// What the pool has done so far. The retry layer's decisions are counted there too.
    pub(crate) fn stats(&self) -> Stats {
        self.pool.stats()
    }
}

/// An order to pay, as a program has it in its database before anything is sent.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// In minor units.
    amount: u64,
    key: Option<IdempotencyKey>,
}

impl Order {
    /// An order with a new key: it may be sent any number of times, and the server pays it once.
    pub(crate) fn keyed(amount: u64) -> Self {
        Self {
            amount,
            key: Some(IdempotencyKey::random()),
        }
    }

    /// An order without a key: it is sent again only on proof that it had no effect, unless the policy
    /// takes less.
    pub(crate) fn unkeyed(amount: u64) -> Self {
        Self { amount, key: None }
    }

    /// The order of an earlier run, with the key that was written down then.
    pub(crate) fn restored(amount: u64, key: &str) -> Result<Self, InvalidKey> {
        let key = Some(IdempotencyKey::new(key)?);
        Ok(Self { amount, key })
    }

    /// The key, to be written down with the order before it is sent.
    pub(crate) fn key(&self) -> Option<&str> {
        self.key.as_ref().map(IdempotencyKey::as_str)
    }
}

/// An answer with its body, read to the end so that the connection can be used again.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// Whether the server kept this answer from an earlier request with the same key.
    pub(crate) is_replayed: bool,
    /// How often the request was sent, this answer's own attempt included.
    pub(crate) attempts: u32,
    pub(crate) body: Bytes,
}

impl Answer {
    async fn read(response: Response<ResponseBody>) -> Result<Self, Error> {
        let (head, body) = response.into_parts();
        let resends = head.extensions.get::<ResendCount>();
        let replayed = head.headers.get("idempotent-replayed");
        Ok(Self {
            status: head.status,
            is_replayed: replayed.is_some_and(|value| value == "true"),
            attempts: 1 + resends.map_or(0, |count| count.0),
            body: body.collect().await?.to_bytes(),
        })
    }
}

/// What to do about a payment that failed. The one question is whether it may have been made.
pub(crate) fn what_now(error: &Error) -> &'static str {
    match error.delivery() {
        Delivery::NotSent | Delivery::Refused => "not paid: order again at any time",
        // Evidence, no proof: enough to expect it, not enough to pay by it.
        Delivery::NotReceived => "almost certainly not paid: look, then order again",
        // `Unknown`, and whatever a later version knows to tell apart from those above.
        _ => "may have been paid: look before ordering",
    }
}

/// TLS that trusts these authorities and no others. Each call begins without sessions to resume.
pub(crate) fn trust(
    authorities: impl IntoIterator<Item = CertificateDer<'static>>,
) -> Result<ClientConfig, BoxError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority)?;
    }
    // Named, because a build may hold two providers and rustls then picks neither.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(config)
}

const FORM: http::HeaderValue = http::HeaderValue::from_static("application/x-www-form-urlencoded");

/// How long a payment may take, all attempts and waits together: about what a person waits for.
const PATIENCE: Duration = Duration::from_secs(20);
