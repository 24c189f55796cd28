//! What a request costs over a pooled connection, beside hyper-util's client in the same run.
//!
//! The server is a thread of this process that answers every head it reads with the same few bytes, so
//! that what differs is the client. Read the ratio, not the times: `cargo bench --bench checkout`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use http::{Request, Uri};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use idempool::Pool;

fn server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.set_nodelay(true);
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                // A GET is one segment here: every read is a request.
                while stream.read(&mut bytes).is_ok_and(|read| read > 0) {
                    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
                    if stream.write_all(answer).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

fn request(uri: &Uri) -> Request<Empty<Bytes>> {
    Request::get(uri.clone())
        .body(Empty::new())
        .expect("a request")
}

fn checkout(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let uri: Uri = format!("http://{}/hello", server()).parse().expect("a URI");
    let mut group = criterion.benchmark_group("sequential_get");

    let pool = Pool::builder().build();
    group.bench_function("idempool", |bencher| {
        bencher.to_async(&runtime).iter(|| async {
            let response = pool.send(request(&uri)).await.expect("a response");
            response.into_body().collect().await.expect("a body")
        });
    });
    assert_eq!(
        pool.stats().connections_opened,
        1,
        "every request but the first reuses"
    );

    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .build(connector);
    group.bench_function("hyper-util", |bencher| {
        bencher.to_async(&runtime).iter(|| async {
            let response = client.request(request(&uri)).await.expect("a response");
            response.into_body().collect().await.expect("a body")
        });
    });
    group.finish();
}

criterion_group!(benches, checkout);
criterion_main!(benches);
