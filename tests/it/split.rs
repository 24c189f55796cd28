//! Servers that send head and body apart, and wait for an acknowledgement in between.

use idempool::Pool;

use crate::support::{BOTH, Conn, Logs, Peer, Scheme, builder, fetch, get};

/// Answers in two writes, with Nagle's algorithm as the caller wants it.
fn in_two_parts(scheme: Scheme, nagle: bool) -> Peer {
    Peer::start(scheme, move |conn: &mut Conn| {
        if nagle {
            conn.hold_small_writes();
        }
        while conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
            conn.send("hello");
        }
    })
}

async fn ask(pool: &Pool, peer: &Peer) -> u64 {
    let body = fetch(pool, get(&peer.url("/"))).await;
    assert_eq!(body.expect("a response"), "hello");
    pool.stats().acks_hastened
}

/// okhttp#7173, psf/requests#2957: 40 ms for each request on a reused connection, next to nothing on a fresh one.
/// The server can be told from its first answers; how often depends on how busy this machine is.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_server_that_waits_for_an_acknowledgement_gets_it_at_once_from_the_third_answer_on() {
    for scheme in BOTH {
        let logs = Logs::capture();
        let peer = in_two_parts(scheme, true);
        let pool = builder().build();
        let mut asked = 0;
        while ask(&pool, &peer).await == 0 {
            asked += 1;
            assert!(asked < 100, "{scheme}: it is never learnt");
        }
        assert!(
            asked >= 3,
            "{scheme}: the first answers are not enough to know"
        );
        for more in 2..10 {
            assert_eq!(ask(&pool, &peer).await, more, "{scheme}");
        }
        assert_eq!(peer.accepted(), 1);
        let told = logs.above_debug();
        assert_eq!(told.len(), 1, "{scheme}: told once: {told:?}");
        assert!(told[0].contains("TCP_NODELAY"), "{told:?}");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn what_was_learnt_from_one_connection_holds_for_all_to_its_origin() {
    let peer = in_two_parts(Scheme::Http, true);
    let pool = builder().build();
    while ask(&pool, &peer).await == 0 {}
    let before = pool.stats();
    let first = pool.send(get(&peer.url("/"))).await.expect("a response");
    // The connection is in use, so this one needs another, whose second answer comes in two parts too.
    ask(&pool, &peer).await;
    assert_eq!(
        pool.stats().connections_opened,
        before.connections_opened + 1
    );
    let known = pool.stats().acks_hastened;
    assert_eq!(ask(&pool, &peer).await, known + 1);
    drop(first);
}

#[tokio::test]
async fn a_server_that_does_not_wait_is_left_alone() {
    let logs = Logs::capture();
    for scheme in BOTH {
        let in_one = Peer::well_behaved(scheme);
        let in_two = in_two_parts(scheme, false);
        let pool = builder().build();
        for _ in 0..20 {
            fetch(&pool, get(&in_one.url("/")))
                .await
                .expect("a response");
            assert_eq!(ask(&pool, &in_two).await, 0, "{scheme}");
        }
    }
    assert_eq!(logs.above_debug(), [""; 0]);
}
