//! TLS below the pool (RFC 8446 section 6.1, RFC 9112 section 9.8): how it ends, what it hides, how it
//! fails.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use idempool::{CloseReason, Delivery, Error, ErrorKind, Phase, Pool};
use rustls::RootCertStore;
use tokio::runtime::Handle;

use crate::support::{
    Conn, Ended, Gate, Names, Peer, Scheme, builder, client_config, client_config_with, eventually,
    fetch, get, hold_runtime_until, on_both_runtimes, pool, post, server_config,
};

/// No connection came about: nothing was sent, and whoever counts connect failures sees one.
fn assert_not_connected(error: &Error, kind: ErrorKind, phase: Phase) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert_eq!(error.phase(), phase, "{error:?}");
    assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    assert!(error.is_connect(), "{error:?}");
    assert!(error.connection().is_none(), "{error:?}");
    assert_eq!(error.bytes_taken(), 0, "{error:?}");
}

async fn assert_all_ended_properly(peer: &Peer, connections: usize) {
    eventually("the server sees the ends", || {
        peer.ended().len() == connections
    })
    .await;
    let ended = peer.ended();
    assert!(
        ended.iter().all(|&(_, how)| how == Ended::Properly),
        "{ended:?}"
    );
}

/// RFC 8446 section 6.1.
#[test]
fn an_idle_timeout_says_close_notify_before_its_fin() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Https);
        let pool = builder().idle_timeout(Duration::from_millis(50)).build();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        assert_all_ended_properly(&peer, 1).await;
        eventually("counted", || {
            pool.stats().closes.get(CloseReason::IdleTimeout) == 1
        })
        .await;
    });
}

/// RFC 8446 section 6.1.
#[test]
fn a_dropped_pool_says_close_notify_before_its_fin() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Https);
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        drop(pool);
        assert_all_ended_properly(&peer, 1).await;
    });
}

/// RFC 8446 section 6.1.
#[test]
fn a_surplus_connection_says_close_notify_before_its_fin() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Https);
        let pool = builder().max_idle_per_origin(0).build();
        for _ in 0..5 {
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        }
        assert_all_ended_properly(&peer, 5).await;
    });
}

/// RFC 8446 section 6.1 holds where the other side is at fault, too.
#[test]
fn a_connection_given_up_for_unexpected_bytes_says_close_notify_before_its_fin() {
    on_both_runtimes(|| async {
        let peer = Peer::start(Scheme::Https, |conn| {
            if conn.answer_requests(1) {
                conn.send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n");
                conn.await_end();
            }
        });
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        assert_all_ended_properly(&peer, 1).await;
        eventually("counted", || {
            pool.stats().closes.get(CloseReason::UnexpectedBytes) == 1
        })
        .await;
    });
}

/// A socket closed before the peer's close_notify came answers that with a reset, which servers log.
#[tokio::test]
async fn a_close_notify_that_is_answered_leaves_no_reset_behind() {
    let tasks = Handle::current().metrics();
    let (our_side_is_gone, checked) = (Gate::new(), Gate::new());
    let gates = (our_side_is_gone.clone(), checked.clone());
    let peer = Peer::start(Scheme::Https, move |conn| {
        assert!(conn.answer_requests(1));
        assert_eq!(conn.await_end().0, Ended::Properly);
        conn.await_fin();
        conn.close_notify();
        // Only a side that is gone too early is caught by this wait; nobody else is failed by it.
        std::thread::sleep(Duration::from_millis(50));
        conn.fin();
        gates.0.pass();
        assert!(!conn.was_reset(), "a reset");
        gates.1.open();
    });
    let before = tasks.num_alive_tasks();
    let pool = pool();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    drop(pool);
    eventually("the connection's task ends", || {
        tasks.num_alive_tasks() == before
    })
    .await;
    our_side_is_gone.open();
    eventually("no reset was seen", || checked.is_open()).await;
}

/// RFC 8446 sections 4.6.1 and 4.6.3: a readable socket is not a dead connection.
#[tokio::test]
async fn messages_of_tls_itself_while_idle_do_not_cost_the_connection() {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let peer = Peer::start(Scheme::Https, move |conn| {
        while conn.answer_requests(1) {
            conn.send_key_update();
            count.fetch_add(1, SeqCst);
        }
    });
    let pool = pool();
    for round in 1..=20 {
        fetch(&pool, post(&peer.url("/"), "x"))
            .await
            .expect("a response");
        // Delivered, and not read yet by the connection's task.
        hold_runtime_until("a key update", || sent.load(SeqCst) == round);
    }
    assert_eq!(peer.accepted(), 1);
    assert_eq!(pool.stats().closes.total(), 0);
}

/// A peer that ends its direction of TLS and not of TCP behind the first response.
fn says_goodbye_in_tls_only(said: &Gate) -> Peer {
    let said = said.clone();
    Peer::start(Scheme::Https, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.answer_requests(1) {
            conn.close_notify();
            said.open();
            conn.await_end();
        }
    })
}

/// RFC 8446 section 6.1: half-close, so a write to it would seem to work.
#[tokio::test]
async fn an_idle_connection_ends_with_a_close_notify_alone() {
    let said = Gate::new();
    let peer = says_goodbye_in_tls_only(&said);
    let pool = pool();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    eventually("it leaves the pool", || pool.stats().idle == 0).await;
    assert_all_ended_properly(&peer, 1).await;
    eventually("counted", || {
        pool.stats().closes.get(CloseReason::PeerClosedIdle) == 1
    })
    .await;
}

/// As above, where the checkout comes before the connection's task has read the close_notify.
#[tokio::test]
async fn a_close_notify_that_nobody_has_read_yet_keeps_a_request_off_the_connection() {
    let said = Gate::new();
    let peer = says_goodbye_in_tls_only(&said);
    let pool = pool();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    hold_runtime_until("a close_notify", || said.is_open());
    let answer = fetch(&pool, post(&peer.url("/pay"), "amount=10")).await;
    assert_eq!(answer.expect("a response"), "1");
    assert_eq!(peer.effects("/pay"), 1);
}

/// RFC 7301 section 3.1: what is offered is what is spoken.
#[tokio::test]
async fn http_1_1_is_offered_and_nothing_else() {
    let peer = Peer::well_behaved(Scheme::Https);
    let mut config = client_config();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let pool = Pool::builder().tls_config(config).build();
    fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    assert_eq!(peer.offered(), [["http/1.1"]]);
}

/// RFC 7301 section 3.2: no_application_protocol.
#[tokio::test]
async fn a_server_that_insists_on_h2_fails_the_handshake() {
    let mut config = (*server_config(Names::Local)).clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let peer = Peer::start_with(Scheme::Https, Arc::new(config), |_| {});
    let pool = pool();
    let request = post(&peer.url("/"), "amount=10");
    let error = pool.send(request).await.expect_err("no common protocol");
    assert_not_connected(&error, ErrorKind::Tls, Phase::Handshake);
}

/// RFC 8446 section 2.2.
#[tokio::test]
async fn a_second_connection_resumes_the_session_of_the_first() {
    let peer = Peer::well_behaved(Scheme::Https);
    let pool = builder().max_idle_per_origin(0).build();
    for _ in 0..3 {
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    }
    let stats = pool.stats();
    assert_eq!((stats.tls_full, stats.tls_resumed), (1, 2));
    assert_eq!((stats.connections_opened, stats.tls_saved), (3, 0));
}

/// RFC 9110 section 4.3.4: final, so not tried again.
#[tokio::test]
async fn a_certificate_that_is_not_trusted_fails_at_once() {
    let peer = Peer::well_behaved(Scheme::Https);
    let trusts_nobody = client_config_with(RootCertStore::empty());
    let pool = Pool::builder().tls_config(trusts_nobody).build();
    let error = pool.send(get(&peer.url("/"))).await.expect_err("untrusted");
    assert_not_connected(&error, ErrorKind::Certificate, Phase::Handshake);
    let stats = pool.stats();
    assert_eq!((peer.accepted(), stats.dials_failed), (1, 1));
    assert_eq!((stats.connections_opened, stats.dialing), (0, 0));
}

/// RFC 9110 section 4.3.4.
#[tokio::test]
async fn a_certificate_for_somebody_else_fails_at_once() {
    let config = server_config(Names::Other);
    let peer = Peer::start_with(Scheme::Https, config, |_| {});
    let pool = pool();
    let error = pool
        .send(get(&peer.url("/")))
        .await
        .expect_err("a stranger");
    assert_not_connected(&error, ErrorKind::Certificate, Phase::Handshake);
    assert_eq!(peer.accepted(), 1);
}

/// The peer's TCP answers and its TLS does not.
#[tokio::test]
async fn the_connect_timeout_covers_the_handshake() {
    let peer = Peer::start(Scheme::Http, |conn| {
        conn.await_end();
    });
    let pool = builder().connect_timeout(Duration::from_millis(50)).build();
    let url = peer.url("/").replace("http://", "https://");
    let error = pool.send(post(&url, "x")).await.expect_err("no handshake");
    assert_not_connected(&error, ErrorKind::ConnectTimeout, Phase::Handshake);
    assert!(error.is_timeout());
    eventually("it is given up", || peer.open() == 0).await;
    assert_eq!(pool.stats().dialing, 0);
}

#[tokio::test]
async fn a_peer_that_breaks_the_handshake_off_was_sent_nothing() {
    let breaks: [fn(&mut Conn); 3] = [Conn::fin, Conn::rst, |conn| {
        conn.send("HTTP/1.1 400 Bad Request\r\n\r\n");
    }];
    for end in breaks {
        let peer = Peer::start(Scheme::Http, move |conn| {
            conn.await_first_byte();
            end(conn);
        });
        let pool = pool();
        let url = peer.url("/").replace("http://", "https://");
        let error = pool.send(post(&url, "x")).await.expect_err("no handshake");
        assert_not_connected(&error, ErrorKind::Tls, Phase::Handshake);
        assert_eq!(peer.accepted(), 1);
    }
}

#[tokio::test]
async fn a_port_that_refuses_is_a_connect_failure() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = listener.local_addr().expect("address");
    drop(listener);
    let pool = pool();
    for scheme in ["http", "https"] {
        let request = post(&format!("{scheme}://{address}/"), "x");
        let error = pool.send(request).await.expect_err("refused");
        assert_not_connected(&error, ErrorKind::Connect, Phase::Connect);
    }
    assert_eq!(pool.stats().dials_failed, 2);
}

/// RFC 6761 section 6.4. The label is longer than a name may have, so that no name server is asked.
#[tokio::test]
async fn a_name_that_does_not_exist_is_a_resolve_failure() {
    let url = format!("http://{}.invalid/", "x".repeat(64));
    let error = pool()
        .send(post(&url, "x"))
        .await
        .expect_err("no such name");
    assert_not_connected(&error, ErrorKind::Resolve, Phase::Resolve);
}
