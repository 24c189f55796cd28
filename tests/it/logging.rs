//! What is logged, at which level, and what never is.

use std::time::Duration;

use http::Request;
use idempool::{IdempotencyKey, ReplayBody, RetryLayer, RetryPolicy};
use tower::{ServiceBuilder, ServiceExt};

use crate::support::{BOTH, Logs, Peer, Scheme, get, pool};

/// Keys and bodies are the caller's secrets; so is what stands in a query.
#[tokio::test]
async fn keys_bodies_and_queries_are_never_logged() {
    let logs = Logs::capture();
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            conn.read_request();
            if conn.index == 0 {
                return conn.close();
            }
            conn.reply("secret-answer");
            conn.await_end();
        });
        let pool = pool();
        let policy =
            RetryPolicy::default().backoff(Duration::from_millis(1), Duration::from_millis(1));
        let client = ServiceBuilder::new()
            .layer(RetryLayer::new(policy))
            .service(pool.clone());
        let request = Request::post(peer.url("/pay?token=secret-query"))
            .header("authorization", "secret-token")
            .body(ReplayBody::from("secret-body"))
            .unwrap();
        let request = IdempotencyKey::new("secret-key")
            .unwrap()
            .attach(request)
            .unwrap();
        client
            .oneshot(request)
            .await
            .expect("the second attempt is answered");
        let shown = format!("{pool:?} {}", pool.stats());
        assert!(!shown.contains("secret"), "{shown}");
    }
    let text = logs.text();
    assert!(
        text.contains("resend_count"),
        "the resend itself is logged: {text}"
    );
    assert!(!text.contains("secret"), "{text}");
}

/// The names that OpenTelemetry has for them.
#[tokio::test]
async fn a_request_has_a_span_with_the_fields_of_open_telemetry() {
    let logs = Logs::capture();
    let peer = Peer::well_behaved(Scheme::Http);
    let request = get(&peer.url("/hello"));
    pool().send(request).await.expect("a response");
    let text = logs.text();
    for field in [
        "http.client.request",
        "http.request.method",
        "server.address",
        "server.port",
        "http.response.status_code",
        "network.peer.address",
    ] {
        assert!(text.contains(field), "{field} is missing: {text}");
    }
}
