//! From a name to a server, through the public API. How addresses race is tested beside the code, on a paused clock.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use idempool::{ErrorKind, Phase, Resolve, Resolving};
use tokio::net::TcpSocket;

use crate::support::{Peer, Scheme, builder, fetch, get, on_both_runtimes};

/// Answers every question with the same addresses, and counts the questions.
struct Always {
    addresses: Vec<SocketAddr>,
    asked: AtomicUsize,
}

impl Always {
    fn new(addresses: Vec<SocketAddr>) -> Arc<Always> {
        Arc::new(Always {
            addresses,
            asked: AtomicUsize::new(0),
        })
    }
}

impl Resolve for Always {
    fn resolve(&self, host: &str, port: u16) -> Resolving {
        assert_eq!((host, port), ("pay.example", 80));
        self.asked.fetch_add(1, Relaxed);
        let addresses = self.addresses.clone();
        Box::pin(async move { Ok(addresses) })
    }
}

/// A place where nobody listens, and nobody else can begin to.
fn dead() -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(([127, 0, 0, 1], 0).into())
        .expect("a free port");
    socket
}

// grpc/grpc-go#3795
#[test]
fn a_request_gets_past_an_address_where_nobody_listens() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Http);
        let dead = dead();
        let dead_address = dead.local_addr().expect("an address");
        let resolver = Always::new(vec![dead_address, peer.address()]);
        let pool = builder().resolver(Arc::clone(&resolver)).build();
        for _ in 0..3 {
            fetch(&pool, get("http://pay.example/"))
                .await
                .expect("a response");
        }
        assert_eq!(peer.accepted(), 1);
        // An idle connection needs no resolution.
        assert_eq!(resolver.asked.load(Relaxed), 1);
        assert_eq!(pool.stats().dials_failed, 0);
    });
}

#[tokio::test]
async fn a_literal_address_is_connected_to_without_a_resolution() {
    let peer = Peer::well_behaved(Scheme::Http);
    let resolver = Always::new(Vec::new());
    let pool = builder().resolver(Arc::clone(&resolver)).build();
    let url = format!("http://{}/", peer.address());
    fetch(&pool, get(&url)).await.expect("a response");
    assert_eq!(resolver.asked.load(Relaxed), 0);
}

#[tokio::test]
async fn an_answer_without_an_address_sends_nothing() {
    let pool = builder().resolver(Always::new(Vec::new())).build();
    let error = fetch(&pool, get("http://pay.example/"))
        .await
        .expect_err("no address");
    assert_eq!(error.kind(), ErrorKind::Resolve);
    assert_eq!(error.phase(), Phase::Resolve);
    assert_eq!(error.delivery(), idempool::Delivery::NotSent);
}
