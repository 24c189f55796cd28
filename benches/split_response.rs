//! What a request takes at a server that sends head and body apart with Nagle's algorithm on, beside hyper-util's
//! client in the same run.
//!
//! The server is a thread of this process with blocking sockets, as they are born; where there is a `python3`, its
//! `http.server` as well, told to speak HTTP/1.1. Sequential requests on one connection.
//! `cargo bench --bench split_response`; `--quick` for a tenth of it.

#[path = "support/python.rs"]
mod python;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use bytes::Bytes;
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
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                // A GET is one segment here: every read is a request.
                while stream.read(&mut bytes).is_ok_and(|read| read > 0) {
                    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
                    if stream.write_all(head).is_err() || stream.write_all(b"hello").is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

const PYTHON: &str = "
from http.server import *
class Hello(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        self.send_response(200)
        self.send_header('Content-Length', '5')
        self.end_headers()
        self.wfile.write(b'hello')
    def log_message(self, *args): pass
server = ThreadingHTTPServer(('127.0.0.1', 0), Hello)
print(server.server_port, flush=True)
server.serve_forever()
";

fn request(uri: &Uri) -> Request<Empty<Bytes>> {
    Request::get(uri.clone())
        .body(Empty::new())
        .expect("a request")
}

fn print(server: &str, client: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>().as_secs_f64() / times.len() as f64;
    println!(
        "split_response: client={client} server={server} requests={} p50_us={:.1} mean_us={:.1}",
        times.len(),
        times[times.len() / 2].as_secs_f64() * 1e6,
        mean * 1e6
    );
}

#[allow(clippy::disallowed_methods)] // a bench measures by the real clock
async fn compare(server: &str, address: SocketAddr, requests: usize) {
    let uri: Uri = format!("http://{address}/hello").parse().expect("a URI");
    let pool = Pool::new();
    let mut times = Vec::new();
    for _ in 0..requests {
        let started = Instant::now();
        let response = pool.send(request(&uri)).await.expect("a response");
        response.into_body().collect().await.expect("a body");
        times.push(started.elapsed());
    }
    print(server, "idempool", times);

    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .build(connector);
    let mut times = Vec::new();
    // At 40 ms each, a tenth says as much.
    for _ in 0..requests / 10 {
        let started = Instant::now();
        let response = client.request(request(&uri)).await.expect("a response");
        response.into_body().collect().await.expect("a body");
        times.push(started.elapsed());
    }
    print(server, "hyper-util", times);
}

fn main() {
    let is_quick = std::env::args().any(|argument| argument == "--quick");
    let requests = if is_quick { 200 } else { 2_000 };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(compare("two_writes", server(), requests));
    match python::start(PYTHON) {
        Some((python, address)) => {
            runtime.block_on(compare("http.server", address, requests));
            drop(python);
        }
        None => println!("split_response: skipped http.server: there is no python3"),
    }
}
