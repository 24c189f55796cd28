//! The bounds and behaviour that clients built on tower expect of a service.

use std::fmt::Debug;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full};
use idempool::{BoxError, Error, Pool, ReplayBody, ResponseBody, Retry, RetryLayer, RetryPolicy};
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_http::follow_redirect::FollowRedirectLayer;
use tower_http::set_header::SetRequestHeaderLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;

use crate::support::{Peer, Scheme, pool, read};

/// What tonic, kube, octocrab and adapters of object_store and the AWS SDK ask for, in one place.
#[test]
fn the_pool_meets_the_bounds_of_the_ecosystem() {
    fn client<S, B>(_: &S)
    where
        S: Service<Request<B>, Response = Response<ResponseBody>, Error = Error>,
        S: Clone + Debug + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
    }
    fn body<B>()
    where
        B: http_body::Body<Data = Bytes, Error = Error> + Send + Sync + Unpin + Default + 'static,
    {
    }
    fn error<E: std::error::Error + Send + Sync + 'static>() {}
    let pool = pool();
    client::<Pool, Full<Bytes>>(&pool);
    client::<Pool, Empty<&'static [u8]>>(&pool);
    // tonic's body cannot be shared between threads.
    client::<Pool, UnsyncBoxBody<Bytes, BoxError>>(&pool);
    client::<Retry<Pool>, ReplayBody>(&Retry::new(pool.clone(), RetryPolicy::default()));
    body::<ResponseBody>();
    error::<Error>();
}

#[tokio::test]
async fn the_pool_runs_under_the_layers_of_tower_http() {
    let peer = Peer::start(Scheme::Http, |conn| {
        while let Some(request) = conn.read_request() {
            match request.id().as_str() {
                "/moved" => conn.send(
                    "HTTP/1.1 302 Found\r\nLocation: /here\r\nContent-Length: 2048\r\n\r\n"
                        .to_owned()
                        + &"x".repeat(2048),
                ),
                _ => conn.reply(request.field("x-layer").unwrap_or("none")),
            }
        }
    });
    let name = HeaderName::from_static("x-layer");
    let client = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(FollowRedirectLayer::new())
        .layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            Duration::from_secs(10),
        ))
        .layer(SetRequestHeaderLayer::overriding(
            name,
            HeaderValue::from_static("set"),
        ))
        .layer(RetryLayer::new(RetryPolicy::default()))
        .service(pool());
    let request = Request::get(peer.url("/moved"))
        .body(ReplayBody::empty())
        .unwrap();
    let response = client.oneshot(request).await.expect("a response");
    assert_eq!(response.status(), 200);
    let body = response
        .into_body()
        .collect()
        .await
        .expect("a body")
        .to_bytes();
    assert_eq!(body, "set");
    // cloudflare/pingora#866, cloudflare/pingora#952: the body of a redirect is drained, its connection used again.
    assert_eq!(peer.accepted(), 1);
}

#[tokio::test]
async fn the_pool_can_be_boxed_and_called_from_many_tasks() {
    let peer = Peer::well_behaved(Scheme::Http);
    let boxed: BoxCloneSyncService<Request<Full<Bytes>>, Response<ResponseBody>, Error> =
        BoxCloneSyncService::new(pool());
    let tasks = (0..20).map(|_| {
        let (client, url) = (boxed.clone(), peer.url("/"));
        tokio::spawn(async move {
            let request = Request::get(url).body(Full::default()).unwrap();
            read(client.oneshot(request).await.expect("a response"))
                .await
                .expect("a body")
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("it ends");
    }
    assert_eq!(peer.requests().len(), 20);
}
