//! Who the client is on each connection, where that is a matter of its TLS configuration: nobody's requests travel
//! under another's name.
//!
//! The configurations are made from one another, as programs make them, and so share rustls's store of sessions.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use futures_util::future::join_all;
use idempool::{FreshConnection, Pool};
use rustls::ClientConfig;
use rustls::server::{ServerSessionMemoryCache, StoresServerSessions};
use rustls::version::{TLS12, TLS13};

use crate::support::{
    Identity, Peer, Scheme, client_config_of, fetch, get, server_config_asking_for_identity,
};

/// A peer that answers with the name of the client's certificate.
fn who_are_you(store: Arc<Sessions>, version: &'static rustls::SupportedProtocolVersion) -> Peer {
    let config = server_config_asking_for_identity(version, store);
    Peer::start_with(Scheme::Https, config, |conn| {
        while conn.read_request().is_some() {
            let certificate = conn.client_certificate();
            let name = certificate.map_or("nobody", |it| Identity::of(&it));
            conn.reply(name);
        }
    })
}

/// The server's sessions, and each name under which the client has asked for one.
#[derive(Debug)]
struct Sessions {
    store: Arc<ServerSessionMemoryCache>,
    asked: Mutex<Vec<Vec<u8>>>,
}

impl Sessions {
    fn new() -> Arc<Sessions> {
        Arc::new(Sessions {
            store: ServerSessionMemoryCache::new(1024),
            asked: Mutex::default(),
        })
    }
}

impl StoresServerSessions for Sessions {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        self.store.put(key, value)
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.asked.lock().unwrap().push(key.to_vec());
        self.store.get(key)
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.asked.lock().unwrap().push(key.to_vec());
        // Kept, so that the server would accept it a second time.
        self.store.get(key)
    }

    fn can_cache(&self) -> bool {
        true
    }
}

/// The same configuration under another identity: one store of sessions for all.
fn under(identity: Identity, base: &ClientConfig) -> Pool {
    let mut config = base.clone();
    config.client_auth_cert_resolver = client_config_of(identity).client_auth_cert_resolver;
    Pool::builder().tls_config(config).build()
}

/// curl/curl#5617, curl/curl#21667, oven-sh/bun#26125, apache/apisix#13587: a connection or a session that was
/// opened under one identity carried the requests of another.
#[tokio::test]
async fn pools_with_different_client_certificates_share_neither_connections_nor_sessions() {
    for version in [&TLS12, &TLS13] {
        let peer = who_are_you(Sessions::new(), version);
        let base = client_config_of(Identity::Nobody);
        let identities = [Identity::A, Identity::B, Identity::Nobody];
        let pools = identities.map(|identity| under(identity, &base));
        for round in 0..4 {
            for (identity, pool) in identities.iter().zip(&pools) {
                let mut request = get(&peer.url("/"));
                // Reused at first, dialled anew in every other round.
                if round % 2 == 1 {
                    request.extensions_mut().insert(FreshConnection);
                }
                let name = fetch(pool, request).await.expect("a response");
                assert_eq!(name, identity.name(), "{version:?}, round {round}");
            }
        }
        for (identity, pool) in identities.iter().zip(&pools) {
            let stats = pool.stats();
            // Its first one cannot have been resumed but from another's.
            assert!(stats.tls_full >= 1, "{identity:?}, {version:?}: {stats}");
            assert_eq!(stats.connections_opened, 3, "{identity:?}, {version:?}");
        }
    }
}

/// The sessions are there to be had: what keeps them apart is whose they are.
#[tokio::test]
async fn a_pool_resumes_its_own_sessions_under_its_own_identity() {
    for version in [&TLS12, &TLS13] {
        for identity in [Identity::A, Identity::B, Identity::Nobody] {
            let peer = who_are_you(Sessions::new(), version);
            let pool = under(identity, &client_config_of(Identity::Nobody));
            for _ in 0..3 {
                let mut request = get(&peer.url("/"));
                request.extensions_mut().insert(FreshConnection);
                let name = fetch(&pool, request).await.expect("a response");
                assert_eq!(name, identity.name(), "{version:?}");
            }
            let stats = pool.stats();
            let handshakes = (stats.tls_full, stats.tls_resumed);
            assert_eq!(handshakes, (1, 2), "{identity:?}, {version:?}");
        }
    }
}

/// RFC 8446 appendix C.4: whoever listens on the way could tell that two connections are of the same client.
#[tokio::test]
async fn no_ticket_is_shown_on_two_connections() {
    let sessions = Sessions::new();
    let peer = who_are_you(Arc::clone(&sessions), &TLS13);
    let pool = under(Identity::A, &client_config_of(Identity::Nobody));
    for _ in 0..5 {
        let burst = (0..10).map(|_| {
            let mut request = get(&peer.url("/"));
            request.extensions_mut().insert(FreshConnection);
            fetch(&pool, request)
        });
        for outcome in join_all(burst).await {
            outcome.expect("a response");
        }
    }
    let asked = sessions.asked.lock().unwrap();
    let different: HashSet<_> = asked.iter().collect();
    assert!(asked.len() >= 10, "too few to tell: {}", asked.len());
    assert_eq!(different.len(), asked.len());
}
