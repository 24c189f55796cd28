//! How many connections are on their way at a time, and what opens the way for more.

use std::time::Duration;

use idempool::{Origin, Pool, Profile, Source};
use tokio::task::JoinHandle;

use crate::support::{BOTH, Gate, HeldClock, Peer, Scheme, builder, fetch, get};

/// Accepts at once, and answers once the gate is open.
fn gated(scheme: Scheme, gate: &Gate) -> Peer {
    let gate = gate.clone();
    Peer::start(scheme, move |conn| {
        while conn.read_request().is_some() {
            gate.pass();
            conn.reply("ok");
        }
    })
}

fn patient() -> Pool {
    builder()
        .acquire_timeout(None)
        .connect_timeout(None)
        .response_head_timeout(None)
        .max_lifetime(None)
        .build()
}

fn burst(pool: &Pool, peer: &Peer, count: usize) -> Vec<JoinHandle<()>> {
    let calls = (0..count).map(|_| {
        let (pool, request) = (pool.clone(), get(&peer.url("/")));
        tokio::spawn(async move {
            fetch(&pool, request).await.expect("a response");
        })
    });
    calls.collect()
}

fn profile(pool: &Pool, peer: &Peer) -> Profile {
    let origin = Origin::of(&peer.url("/").parse().expect("a URI")).expect("an origin");
    pool.profile(&origin).expect("known")
}

/// That a connection is established does not say that it was accepted. Without a byte from the server four are made at
/// a time, and further ones as time goes by.
#[tokio::test]
async fn without_an_answer_four_are_dialled_at_once_and_one_more_each_millisecond() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gated(Scheme::Http, &gate);
    let pool = patient();
    let calls = burst(&pool, &peer, 30);
    clock
        .until("four are in use", || pool.stats().busy == 4)
        .await;
    let stats = pool.stats();
    assert_eq!((stats.dialing, stats.waiting), (26, 26), "{stats}");
    assert_eq!(peer.accepted(), 4, "the others have sent no SYN");
    let mut milliseconds = 0;
    while pool.stats().busy < 30 {
        clock.advance(Duration::from_millis(1)).await;
        milliseconds += 1;
        assert!(peer.accepted() <= 4 + milliseconds, "{}", pool.stats());
        assert!(milliseconds < 100, "{}", pool.stats());
    }
    gate.open();
    for call in calls {
        call.await.expect("no panic");
    }
}

/// Each first byte lets the next begin, without any time going by.
#[tokio::test]
async fn each_answer_lets_the_next_begin() {
    let clock = HeldClock::start();
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        let pool = patient();
        let calls = burst(&pool, &peer, 30);
        for call in calls {
            call.await.expect("no panic");
        }
        let dials = profile(&pool, &peer).unproven_dials;
        assert!((4..=8).contains(&dials.value), "{scheme}: {dials:?}");
    }
    drop(clock);
}

/// Over TLS the handshake is the proof: what the server does with the request says nothing.
#[tokio::test]
async fn a_tls_handshake_is_proof_enough() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gated(Scheme::Https, &gate);
    let pool = patient();
    let calls = burst(&pool, &peer, 20);
    clock
        .until("all are in use", || pool.stats().busy == 20)
        .await;
    gate.open();
    for call in calls {
        call.await.expect("no panic");
    }
}

/// Whoever holds futures that it does not poll holds up nobody else: a dial waits for its turn in a task of its own.
#[tokio::test]
async fn futures_that_nobody_polls_hold_up_no_request() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder().acquire_timeout(Duration::from_secs(5)).build();
    let mut calls: Vec<_> = (0..12)
        .map(|_| Box::pin(fetch(&pool, get(&peer.url("/")))))
        .collect();
    for call in &mut calls {
        // Once, so that each is in line.
        let polled = futures_util::future::poll_immediate(call).await;
        assert!(polled.is_none());
    }
    for _ in 0..3 {
        let answer = fetch(&pool, get(&peer.url("/"))).await;
        answer.expect("a response, whoever sleeps");
    }
    drop(calls);
}

/// A dial that has not begun is given up with its request: the server hears nothing of it.
#[tokio::test]
async fn a_dial_that_waits_for_its_turn_is_given_up_with_its_request() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gated(Scheme::Http, &gate);
    let pool = patient();
    let calls = burst(&pool, &peer, 10);
    clock
        .until("four are in use", || pool.stats().busy == 4)
        .await;
    for call in calls {
        call.abort();
    }
    clock
        .until("all are gone", || {
            (pool.stats().dialing, pool.stats().busy) == (0, 0)
        })
        .await;
    clock.advance(Duration::from_millis(50)).await;
    assert_eq!(peer.accepted(), 4);
    gate.open();
}

/// Who switches it off gets all at once.
#[tokio::test]
async fn without_the_window_all_are_dialled_at_once() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gated(Scheme::Http, &gate);
    let pool = builder()
        .acquire_timeout(None)
        .connect_timeout(None)
        .response_head_timeout(None)
        .dial_window(false)
        .build();
    let calls = burst(&pool, &peer, 30);
    clock
        .until("all are in use", || pool.stats().busy == 30)
        .await;
    gate.open();
    for call in calls {
        call.await.expect("no panic");
    }
}

/// What a burst has shown is remembered: half as many at once the next time.
#[tokio::test]
async fn what_was_taken_at_once_is_a_measure_for_the_next_burst() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gated(Scheme::Http, &gate);
    let pool = patient();
    let calls = burst(&pool, &peer, 20);
    while pool.stats().busy < 20 {
        clock.advance(Duration::from_millis(1)).await;
    }
    gate.open();
    for call in calls {
        call.await.expect("no panic");
    }
    clock
        .until("all are proven", || {
            profile(&pool, &peer).unproven_dials.observations == 20
        })
        .await;
    let dials = profile(&pool, &peer).unproven_dials;
    assert_eq!((dials.value, dials.source), (10, Source::Seen));
}

/// Who waits for its turn and gives up passes the turn on.
#[tokio::test]
async fn who_gives_up_while_it_waits_for_its_turn_passes_it_on() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let peer = gated(Scheme::Http, &gate);
    let pool = patient();
    let mut calls = burst(&pool, &peer, 6);
    clock
        .until("four are in use", || pool.stats().busy == 4)
        .await;
    clock.until("two wait", || pool.stats().waiting == 2).await;
    // The first of the two is the one that was told when to ask again.
    for call in calls.drain(..5) {
        call.abort();
    }
    clock
        .until("four are gone", || pool.stats().waiting == 1)
        .await;
    clock.advance(Duration::from_millis(2)).await;
    clock
        .until("the last has its own", || {
            (pool.stats().busy, pool.stats().waiting) == (1, 0)
        })
        .await;
    gate.open();
    for call in calls {
        call.await.expect("no panic");
    }
}

/// What ends without a byte has neither proved itself nor lost anything, and is waited for no longer.
#[tokio::test]
async fn a_connection_that_ends_without_an_answer_lets_the_next_begin() {
    let clock = HeldClock::start();
    let gate = Gate::new();
    let closing = gate.clone();
    let peer = Peer::start(Scheme::Http, move |conn| {
        conn.read_request();
        closing.pass();
    });
    let pool = patient();
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let (pool, request) = (pool.clone(), get(&peer.url("/")));
            tokio::spawn(async move { fetch(&pool, request).await })
        })
        .collect();
    clock
        .until("four are in use and one waits", || {
            (pool.stats().busy, pool.stats().waiting) == (4, 1)
        })
        .await;
    gate.open();
    let is_over = || calls.iter().all(JoinHandle::is_finished);
    clock.until("all five were sent", is_over).await;
    for call in calls {
        call.await.expect("no panic").expect_err("no answer");
    }
}
