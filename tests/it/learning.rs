//! What the pool learns of how a server keeps idle connections, and which requests it trusts to them.

use std::time::Duration;

use http::Request;
use http_body_util::Full;
use idempool::{IdempotencyKey, Origin, Pool, Profile};

use crate::support::{HeldClock, Peer, Scheme, builder, eventually, fetch, get, post};

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// No timer of the pool's own comes in between.
fn patient() -> Pool {
    builder()
        .connect_timeout(None)
        .acquire_timeout(None)
        .response_head_timeout(None)
        .build()
}

fn profile(pool: &Pool, peer: &Peer) -> Profile {
    let origin = Origin::of(&peer.url("/").parse().expect("a URI")).expect("an origin");
    pool.profile(&origin).expect("known")
}

/// Which of the peer's connections answers.
async fn ask(pool: &Pool, request: Request<Full<bytes::Bytes>>) -> String {
    fetch(pool, request).await.expect("a response")
}

/// With nothing known, only a payment that could not be repeated is kept off a connection that was idle for more
/// than a second.
#[tokio::test]
async fn an_unkeyed_request_does_not_go_on_a_connection_too_old_to_trust() {
    let clock = HeldClock::start();
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = patient();
    ask(&pool, get(&peer.url("/"))).await;
    clock.advance(seconds(0.9)).await;
    ask(&pool, post(&peer.url("/pay"), "x")).await;
    assert_eq!((peer.accepted(), pool.stats().too_old_to_trust), (1, 0));

    clock.advance(seconds(1.5)).await;
    let key = IdempotencyKey::random();
    let keyed = key.attach(post(&peer.url("/keyed"), "x")).expect("a key");
    ask(&pool, keyed).await;
    clock.advance(seconds(1.6)).await;
    ask(&pool, get(&peer.url("/"))).await;
    assert_eq!(peer.accepted(), 1, "what may be repeated takes the old one");

    clock.advance(seconds(1.7)).await;
    ask(&pool, post(&peer.url("/pay"), "x")).await;
    assert_eq!((peer.accepted(), pool.stats().too_old_to_trust), (2, 1));
}

/// What was seen to survive is trusted the next time.
#[tokio::test]
async fn an_age_at_which_a_connection_was_seen_open_is_trusted_from_then_on() {
    let clock = HeldClock::start();
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = patient();
    ask(&pool, get(&peer.url("/"))).await;
    clock.advance(seconds(20.0)).await;
    ask(&pool, get(&peer.url("/"))).await;
    assert_eq!(profile(&pool, &peer).longest_open, Some(seconds(20.0)));
    clock.advance(seconds(19.0)).await;
    ask(&pool, post(&peer.url("/pay"), "x")).await;
    assert_eq!((peer.accepted(), pool.stats().too_old_to_trust), (1, 0));
}

/// An announced timeout shortens the reuse for all, less a margin; one that is longer than the caller's own limit
/// does not lengthen that, and one that cannot be read says nothing.
#[tokio::test]
async fn an_announced_timeout_shortens_the_reuse_less_a_margin() {
    for (announced, age, reused) in [
        ("timeout=5", 3.9, true),
        ("timeout=5", 4.1, false),
        ("timeout=5, max=100", 4.5, false),
        ("timeout=999999", 89.0, true),
        ("timeout=999999", 90.0, false),
        ("timeout=abc", 89.0, true),
    ] {
        let clock = HeldClock::start();
        let peer = Peer::start(Scheme::Http, move |conn| {
            while conn.read_request().is_some() {
                conn.reply_with(&format!("Keep-Alive: {announced}\r\n"), "ok");
            }
        });
        let pool = patient();
        ask(&pool, get(&peer.url("/"))).await;
        clock.advance(seconds(age)).await;
        ask(&pool, get(&peer.url("/"))).await;
        assert_eq!(peer.accepted() == 1, reused, "{announced} after {age} s");
        drop(clock);
        tokio::time::resume();
    }
}

/// Real closes: the age of the first one that is seen is learnt at once, and no unkeyed request meets the next.
#[tokio::test]
async fn after_the_first_close_seen_no_unkeyed_request_meets_a_stale_connection() {
    const KEPT_FOR: Duration = Duration::from_millis(400);
    let peer = Peer::start(Scheme::Http, |conn| {
        while let Some(request) = conn.read_request_within(KEPT_FOR) {
            conn.apply(&request);
            conn.reply("ok");
        }
    });
    let pool = builder().build();
    ask(&pool, get(&peer.url("/"))).await;
    eventually("the first close is seen", || {
        pool.stats().closed_while_idle == 1
    })
    .await;
    let learnt = profile(&pool, &peer);
    let close = learnt.shortest_close.expect("a close");
    assert!(close.age >= KEPT_FOR && !close.at_most, "{close:?}");
    assert!(learnt.trusted_idle_age.value <= close.age / 2, "{learnt:?}");
    for gap in [100, 350, 390, 395, 400, 405, 410, 450, 150, 398, 402, 50] {
        tokio::time::sleep(Duration::from_millis(gap)).await;
        ask(&pool, post(&peer.url(&format!("/pay-{gap}")), "x")).await;
        assert_eq!(peer.effects(&format!("/pay-{gap}")), 1);
    }
    let stats = pool.stats();
    assert_eq!((stats.stale_after_write, stats.requests_failed), (0, 0));
    assert!(stats.too_old_to_trust > 0, "{stats}");
}

/// What was learnt outlives the connections it was learnt from.
#[tokio::test]
async fn what_was_learnt_is_remembered_without_a_connection() {
    let peer = Peer::start(Scheme::Http, |conn| {
        if conn.read_request().is_some() {
            conn.reply_with("Keep-Alive: timeout=7\r\n", "ok");
        }
    });
    let pool = builder().build();
    ask(&pool, get(&peer.url("/"))).await;
    eventually("nothing is left", || pool.stats().origins.is_empty()).await;
    assert_eq!(
        profile(&pool, &peer).announced_idle_timeout,
        Some(seconds(7.0))
    );
}
