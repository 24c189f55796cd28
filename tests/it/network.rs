//! What the kernel's evidence is worth over a network with distance, where a close can cross a request.
//!
//! On loopback a close arrives before the call that makes it returns, so a request either meets it or
//! precedes it. Here every frame is 20 ms under way, and the wire holds the server's close until the
//! client's request is under way too. Linux only; needs the right to make network namespaces.

mod hosts;
mod namespaces;
mod relay;

use std::time::Duration;

use http::{Method, Request};
use idempool::{
    Error, ErrorKind, IdempotencyKey, Origin, Pool, ReplayBody, ResendCount, RetryLayer,
    RetryPolicy, Source, Timings,
};
use tower::{ServiceBuilder, ServiceExt};

use self::hosts::{Crossing, DELAY, Network};
use self::relay::Loss;
use crate::support::{
    Conn, Logs, Peer, Received, Scheme, eventually, fetch, get, hold_runtime_until, pool, post,
    read,
};

/// What a server does with its first connection once that has served a request.
type Script = fn(&mut Conn, &Crossing);

/// When the second request is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Written {
    /// While what the server does is under way.
    Crossing,
    /// When the connection's task has had the time to see what the server did.
    AfterTheTaskSaw,
    /// When the client's kernel knows, and no task does.
    AfterTheKernelSaw,
    /// Before the server does anything; it acts on what it gets.
    Before,
}

/// What the caller gets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Verdict {
    /// An answer, over a connection of its own.
    Answer,
    /// A failure with this delivery.
    Failure(&'static str),
}

/// How much of the request the client's kernel knows to have arrived when the verdict is made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Acked {
    Nothing,
    Something,
    /// It depends on who is faster, and decides nothing.
    Open,
}

#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    scheme: Scheme,
    body: usize,
    script: Script,
    written: Written,
    verdict: Verdict,
    acked: Acked,
    /// How often the server acted on the request.
    applied: usize,
}

/// What the verdict is called, where the evidence is strong.
const NOT_RECEIVED: Verdict = Verdict::Failure("not_received");
const UNKNOWN: Verdict = Verdict::Failure("unknown");

/// The caller takes the evidence for enough.
fn opted_in() -> RetryPolicy {
    policy().resend_not_received(true)
}

const SMALL: usize = 9;
/// More than the kernel takes at once.
const LARGE: usize = 1 << 20;

/// The commonest of them.
const CROSSED: Row = Row {
    name: "closes",
    scheme: Scheme::Http,
    body: SMALL,
    script: closes,
    written: Written::Crossing,
    verdict: NOT_RECEIVED,
    acked: Acked::Nothing,
    applied: 0,
};

#[rustfmt::skip]
fn rows() -> Vec<Row> {
    use Acked::{Nothing, Open, Something};
    use Scheme::{Http, Https};
    use Written::{AfterTheKernelSaw, AfterTheTaskSaw, Before, Crossing};
    let row = |name, scheme, body, script, written, verdict, acked, applied| Row {
        name, scheme, body, script, written, verdict, acked, applied,
    };
    vec![
        row("closes when idle, seen by the task", Http, SMALL, closes_first, AfterTheTaskSaw, Verdict::Answer, Open, 1),
        row("closes when idle, seen by the kernel", Http, SMALL, closes_first, AfterTheKernelSaw, Verdict::Answer, Open, 1),
        row("closes", Http, SMALL, closes, Crossing, NOT_RECEIVED, Nothing, 0),
        row("closes, large body", Http, LARGE, closes, Crossing, NOT_RECEIVED, Nothing, 0),
        row("half-closes, reads, acts", Http, SMALL, half_closes_and_acts, Crossing, UNKNOWN, Something, 1),
        row("half-closes, reads, throws away", Http, SMALL, lingers, Crossing, UNKNOWN, Something, 0),
        row("half-closes, reads, acts, closes; its ACKs are lost", Http, SMALL, half_closes_acts_and_closes, Crossing, UNKNOWN, Open, 1),
        row("half-closes, reads, acts, closes; its ACKs are lost", Https, SMALL, half_closes_acts_and_closes, Crossing, UNKNOWN, Open, 1),
        row("reads, acts, closes", Http, SMALL, acts_and_closes, Before, UNKNOWN, Something, 1),
        row("reads, acts, resets", Http, SMALL, acts_and_resets, Before, UNKNOWN, Open, 1),
        row("closes with the request unread", Http, SMALL, closes_unread, Before, UNKNOWN, Open, 0),
        row("resets when idle", Http, SMALL, resets, Crossing, UNKNOWN, Nothing, 0),
        row("reads a part, acts, closes", Http, 100_000, acts_on_a_part, Before, UNKNOWN, Open, 1),
        row("reads, acts, closes; its ACKs are lost", Http, SMALL, acts_and_closes_unacknowledged, Before, UNKNOWN, Something, 1),
        row("says close_notify and closes", Https, SMALL, says_goodbye_and_closes, Crossing, NOT_RECEIVED, Nothing, 0),
        row("closes without close_notify", Https, SMALL, closes, Crossing, NOT_RECEIVED, Nothing, 0),
        row("reads, acts, closes over TLS", Https, SMALL, acts_and_closes, Before, UNKNOWN, Something, 1),
    ]
}

fn closes_first(conn: &mut Conn, crossing: &Crossing) {
    crossing.server_goes_first(|| conn.close());
}

fn closes(conn: &mut Conn, crossing: &Crossing) {
    crossing.server_does(|| conn.close());
}

fn says_goodbye_and_closes(conn: &mut Conn, crossing: &Crossing) {
    crossing.server_does(|| {
        conn.close_notify();
        conn.close();
    });
}

fn resets(conn: &mut Conn, crossing: &Crossing) {
    crossing.server_does(|| conn.rst());
}

/// Against RFC 9112 section 9.6: it acts on a request that it can no longer answer.
fn half_closes_and_acts(conn: &mut Conn, crossing: &Crossing) {
    crossing.server_does(|| conn.fin());
    acts(conn);
    conn.await_end();
}

/// RFC 9112 section 9.6, the lingering close of careful servers.
fn lingers(conn: &mut Conn, crossing: &Crossing) {
    crossing.server_does(|| conn.fin());
    conn.await_end();
}

fn acts_and_closes(conn: &mut Conn, _: &Crossing) {
    acts(conn);
    conn.close();
}

fn acts_and_closes_unacknowledged(conn: &mut Conn, crossing: &Crossing) {
    crossing.rules().lose(Loss::PureAcks);
    acts_and_closes(conn, crossing);
}

fn acts_and_resets(conn: &mut Conn, _: &Crossing) {
    acts(conn);
    conn.rst();
}

fn acts(conn: &mut Conn) {
    let request = conn.read_request().expect("a request");
    conn.apply(&request);
}

fn closes_unread(conn: &mut Conn, _: &Crossing) {
    conn.await_first_byte();
    conn.close();
}

fn acts_on_a_part(conn: &mut Conn, _: &Crossing) {
    let head = conn.read_head().expect("a head");
    conn.await_unread_byte();
    let (connection, body) = (conn.index, Vec::new());
    conn.apply(&Received {
        connection,
        head,
        body,
    });
    conn.close();
}

/// The first connection answers one request and then does as told; the others behave.
fn serve(network: &Network, scheme: Scheme, script: Script) -> (Peer, Crossing) {
    let crossing = network.crossing();
    let servers = crossing.clone();
    let peer = network.serve(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.answer_requests(1) {
            script(conn, &servers);
        }
    });
    (peer, crossing)
}

/// A pool with one idle connection, which has served one request.
async fn warm(peer: &Peer) -> Pool {
    let pool = pool();
    fetch(&pool, get(&peer.url("/warm")))
        .await
        .expect("a response");
    eventually("it is idle", || pool.stats().idle == 1).await;
    pool
}

/// The connections that this thread's host has to the peer, by the kernel's table, in this state.
fn sockets_in(state: &str, peer: &Peer) -> usize {
    let table = std::fs::read_to_string("/proc/thread-self/net/tcp").expect("the socket table");
    let port = format!(":{:04X}", peer.address().port());
    let is_one = |line: &&str| {
        let mut fields = line.split_whitespace().skip(2);
        fields.next().is_some_and(|remote| remote.ends_with(&port)) && fields.next() == Some(state)
    };
    table.lines().filter(is_one).count()
}

const CLOSE_WAIT: &str = "08";

/// What happened in a row.
#[derive(Debug)]
struct Seen {
    result: Result<String, Error>,
    applied: usize,
    accepted: usize,
}

/// Plays a row. `send` sends the second request.
///
/// For its evidence the pool waits 200 ms, which a machine that is busy enough can outlast; the verdict is
/// then the cautious one. So a row that expects the bold one has a few chances. It is never the other way
/// round: where nothing may be claimed, no slowness makes it so.
fn play(
    network: &Network,
    row: &Row,
    send: impl AsyncFn(&Pool, &str, Vec<u8>) -> Result<String, Error> + Send + Sync,
) -> Seen {
    for _ in 0..4 {
        let seen = play_once(network, row, &send);
        let verdict = seen
            .result
            .as_ref()
            .map_err(|error| error.delivery().as_str());
        if row.verdict != NOT_RECEIVED || verdict != Err("unknown") {
            return seen;
        }
    }
    play_once(network, row, &send)
}

fn play_once(
    network: &Network,
    row: &Row,
    send: impl AsyncFn(&Pool, &str, Vec<u8>) -> Result<String, Error> + Send + Sync,
) -> Seen {
    network.rules().lose(Loss::Nothing);
    let (peer, crossing) = serve(network, row.scheme, row.script);
    let body = vec![b'x'; row.body];
    let result = network.as_client(async || {
        let pool = warm(&peer).await;
        match row.written {
            Written::Before => {}
            Written::Crossing => crossing.client_is_ready(),
            Written::AfterTheTaskSaw => {
                crossing.client_is_ready();
                eventually("the task sees it", || pool.stats().idle == 0).await;
            }
            Written::AfterTheKernelSaw => {
                crossing.client_is_ready();
                hold_runtime_until("the kernel sees it", || sockets_in(CLOSE_WAIT, &peer) == 1);
            }
        }
        let result = send(&pool, &peer.url("/pay"), body).await;
        // So that every script comes to its end, and the ledger with it.
        drop(pool);
        eventually("the server is done", || peer.open() == 0).await;
        result
    });
    Seen {
        result,
        applied: peer.effects("/pay"),
        accepted: peer.accepted(),
    }
}

/// The measurements that the rule was made from, as a table. An unkeyed POST on a reused connection.
#[test]
fn the_kernels_evidence_is_as_strong_as_the_way_in_which_the_server_left() {
    let Some(network) = Network::up("the table of the kernel's evidence") else {
        return;
    };
    for row in rows() {
        let seen = play(&network, &row, async |pool, url, body| {
            fetch(pool, post(url, body)).await
        });
        let case = format!(
            "{} ({}, {} bytes): {seen:?}",
            row.name, row.scheme, row.body
        );
        let verdict = match &seen.result {
            Ok(_) => Verdict::Answer,
            Err(error) => Verdict::Failure(error.delivery().as_str()),
        };
        assert_eq!(verdict, row.verdict, "{case}");
        assert_eq!(seen.applied, row.applied, "{case}");
        match &seen.result {
            Ok(connection) => assert_eq!((connection.as_str(), seen.accepted), ("1", 2), "{case}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionClosed, "{case}");
                assert_eq!(error.is_reused(), Some(true), "{case}");
                assert!(error.bytes_taken() > 0, "{case}");
                match (row.acked, error.bytes_acked()) {
                    (Acked::Nothing, Some(0)) | (Acked::Open, Some(_)) => {}
                    (Acked::Something, Some(acked)) if acked > 0 => {}
                    (wanted, acked) => panic!("{wanted:?} acknowledged, not {acked:?}: {case}"),
                }
                assert_eq!(seen.accepted, 1, "{case}: sent again by the pool itself");
            }
        }
    }
}

/// Quick waits, so that the tests are quick; all else as by default.
fn policy() -> RetryPolicy {
    RetryPolicy::default().backoff(Duration::from_millis(1), Duration::from_millis(5))
}

async fn send_with(
    policy: RetryPolicy,
    pool: &Pool,
    request: Request<ReplayBody>,
) -> Result<(u32, String), Error> {
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(policy))
        .service(pool.clone());
    let response = client.oneshot(request).await?;
    let resends = response
        .extensions()
        .get::<ResendCount>()
        .map_or(0, |count| count.0);
    let body = read(response).await?;
    Ok((resends, String::from_utf8(body.to_vec()).expect("text")))
}

fn request(method: &Method, url: &str, body: Vec<u8>) -> Request<ReplayBody> {
    let request = Request::builder().method(method).uri(url);
    request
        .body(ReplayBody::from(body))
        .expect("a valid request")
}

/// The judge of the opt-in: whatever the server does short of the known hole, nothing happens twice. And
/// what never got there does happen.
#[test]
fn opted_in_a_post_is_sent_again_where_it_was_not_received_and_takes_effect_once_at_most() {
    let Some(network) = Network::up("the table of the kernel's evidence, opted in") else {
        return;
    };
    for row in rows() {
        let seen = play(&network, &row, async |pool, url, body| {
            let request = request(&Method::POST, url, body);
            send_with(opted_in(), pool, request)
                .await
                .map(|(_, body)| body)
        });
        let case = format!(
            "{} ({}, {} bytes): {seen:?}",
            row.name, row.scheme, row.body
        );
        let recovers = row.verdict == Verdict::Answer || row.verdict == NOT_RECEIVED;
        assert_eq!(seen.result.is_ok(), recovers, "{case}");
        let effects = if recovers { 1 } else { row.applied };
        assert_eq!(seen.applied, effects, "{case}");
        assert_eq!(seen.accepted, if recovers { 2 } else { 1 }, "{case}");
    }
}

/// A close that crosses the request on its way, and what each kind of request makes of it by default.
#[test]
fn a_close_that_crosses_is_recovered_from_without_asking_where_a_resend_is_safe() {
    let Some(network) = Network::up("recovery from a close that crosses the request") else {
        return;
    };
    let key = || Some(IdempotencyKey::random());
    let cases = [
        (Method::GET, None, true),
        (Method::PUT, None, true),
        (Method::POST, None, false),
        (Method::POST, key(), true),
    ];
    for scheme in [Scheme::Http, Scheme::Https] {
        for (method, key, recovers) in &cases {
            let row = Row { scheme, ..CROSSED };
            let case = format!("{method} over {scheme}, key: {key:?}");
            let seen = play(&network, &row, async |pool, url, body| {
                let mut request = request(method, url, body);
                if let Some(key) = key {
                    request = key.attach(request)?;
                }
                let (resends, body) = send_with(policy(), pool, request).await?;
                assert_eq!(resends, 1, "{case}");
                Ok(body)
            });
            assert_eq!(seen.result.is_ok(), *recovers, "{case}: {seen:?}");
            assert_eq!(seen.applied, usize::from(*recovers), "{case}: {seen:?}");
            assert_eq!(
                seen.accepted,
                1 + usize::from(*recovers),
                "{case}: {seen:?}"
            );
            if let Err(error) = &seen.result {
                let delivery = Verdict::Failure(error.delivery().as_str());
                assert_eq!((delivery, error.resends()), (NOT_RECEIVED, 0), "{case}");
            }
        }
    }
}

/// The hole: a server that shuts its side, still reads a request and acts on it, and then is gone before it
/// has acknowledged it. To the client's kernel this is the same as a server that had gone before: a FIN
/// that acknowledges nothing, then a reset.
///
/// Such a server breaks RFC 9112 section 9.6 (after its close it must not act on another request), and it
/// has the time of a delayed acknowledgement, 40 ms, to do it in; here the acknowledgements are lost
/// instead, so that no clock decides. It is why the verdict is evidence and not proof, and why nobody's
/// unkeyed request is sent again on it who did not ask for that: who did has the effect twice.
#[test]
fn the_known_hole_of_the_kernels_evidence() {
    let Some(network) = Network::up("the known hole of the kernel's evidence") else {
        return;
    };
    for (name, scheme, script) in HOLES {
        let row = Row {
            name,
            scheme,
            script,
            applied: 1,
            ..CROSSED
        };
        for (policy, effects) in [(policy(), 1), (opted_in(), 2)] {
            let seen = play(&network, &row, async |pool, url, body| {
                let request = request(&Method::POST, url, body);
                let sent = send_with(policy.clone(), pool, request).await;
                sent.map(|(_, body)| body)
            });
            let case = format!("{name} ({scheme}): {seen:?}");
            assert_eq!(seen.applied, effects, "{case}");
            match &seen.result {
                Ok(connection) => assert_eq!((connection.as_str(), effects), ("1", 2), "{case}"),
                Err(error) => {
                    let verdict = Verdict::Failure(error.delivery().as_str());
                    assert_eq!((verdict, effects), (row.verdict, 1), "{case}");
                }
            }
        }
    }
}

const HOLES: [(&str, Scheme, Script); 2] = [
    (
        "half-closes, reads, acts, resets",
        Scheme::Https,
        half_closes_acts_and_resets,
    ),
    (
        "half-closes, reads, acts, resets",
        Scheme::Http,
        half_closes_acts_and_resets,
    ),
];

fn half_closes_acts_and_resets(conn: &mut Conn, crossing: &Crossing) {
    crossing.rules().lose(Loss::PureAcks);
    crossing.server_does(|| conn.fin());
    acts(conn);
    conn.rst();
}

fn half_closes_acts_and_closes(conn: &mut Conn, crossing: &Crossing) {
    crossing.rules().lose(Loss::PureAcks);
    crossing.server_does(|| conn.fin());
    acts(conn);
    conn.close();
}

/// What the other tests stand on.
#[test]
fn the_network_has_its_distance_and_carries_what_it_is_given() {
    let Some(network) = Network::up("the network with distance itself") else {
        return;
    };
    for scheme in [Scheme::Http, Scheme::Https] {
        let peer = network.serve(scheme, |conn| {
            conn.answer_requests(usize::MAX);
        });
        let body: Vec<u8> = (0..=250).cycle().take(LARGE).collect();
        network.as_client(async || {
            let pool = pool();
            let response = pool
                .send(post(&peer.url("/"), body.clone()))
                .await
                .expect("a response");
            let facts = response.extensions().get::<Timings>().expect("facts");
            assert!(facts.connection().dial().connect >= 2 * DELAY, "{facts:?}");
        });
        assert!(
            peer.requests()[0].body == body,
            "{scheme}: not what was sent"
        );
    }
}

/// envoyproxy/envoy#7535: a lost SYN costs a second, the kernel's first patience. Where a handshake is known to take far
/// less, a second dial is made beside the first; here only that one can come through.
#[test]
fn a_lost_syn_is_covered_by_a_second_dial_where_the_server_is_near() {
    let near = Duration::from_millis(1);
    let Some(network) = Network::up_with("a lost SYN", near) else {
        return;
    };
    let peer = network.serve(Scheme::Http, |conn| {
        conn.answer_requests(1);
    });
    network.as_client(async || {
        let pool = pool();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        eventually("it is closed", || pool.stats().idle == 0).await;
        network.rules().lose(Loss::NextClientPort);
        let answer = fetch(&pool, get(&peer.url("/"))).await;
        assert_eq!(answer.expect("by the second dial"), "1");
    });
}

/// The same further off: the kernel repeats the SYN, and no second dial burdens the server.
#[test]
fn a_lost_syn_is_left_to_the_kernel_where_the_server_is_far() {
    let far = Duration::from_millis(40);
    let Some(network) = Network::up_with("a lost SYN far off", far) else {
        return;
    };
    let peer = network.serve(Scheme::Http, |conn| {
        conn.answer_requests(1);
    });
    network.as_client(async || {
        let builder = crate::support::builder();
        let pool = builder.connect_timeout(Duration::from_secs(2)).build();
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        eventually("it is closed", || pool.stats().idle == 0).await;
        network.rules().lose(Loss::NextClientPort);
        let error = fetch(&pool, get(&peer.url("/"))).await;
        let error = error.expect_err("that port hears nothing");
        assert_eq!(error.kind(), ErrorKind::ConnectTimeout);
    });
}

/// Dials that lose packets one after the other are no accident: the window notices, and somebody is told, once.
#[test]
fn dials_that_lose_packets_are_noticed_and_told_of() {
    let near = Duration::from_millis(1);
    let Some(network) = Network::up_with("lost SYNs", near) else {
        return;
    };
    let peer = network.serve(Scheme::Http, |conn| {
        conn.answer_requests(1);
    });
    network.as_client(async || {
        let logs = Logs::capture();
        let pool = pool();
        let origin = Origin::of(&peer.url("/").parse().expect("a URI")).expect("an origin");
        let window = || {
            let dials = pool.profile(&origin)?.unproven_dials;
            Some((dials.value, dials.source))
        };
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        eventually("it is closed", || pool.stats().idle == 0).await;
        for losses in 1..=4 {
            eventually("none is left", || pool.stats().idle == 0).await;
            assert_eq!(logs.above_debug(), [""; 0], "before loss {losses}");
            network.rules().lose(Loss::NextClientPort);
            fetch(&pool, get(&peer.url("/")))
                .await
                .expect("by the second dial");
        }
        assert_eq!(window(), Some((4, Source::Seen)));
        let lines = logs.above_debug();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("listen backlog"), "{lines:?}");
    });
}

/// A kernel that gives up leaves the same state behind as a reset: closed, nothing acknowledged. Behind a
/// FIN, over a way that is dead since, it says nothing of a server that may still have read.
#[test]
fn a_connection_that_our_own_kernel_gave_up_is_no_evidence() {
    let far = Duration::from_millis(125);
    let Some(network) = Network::up_with("a connection that is given up", far) else {
        return;
    };
    let (peer, crossing) = serve(&network, Scheme::Http, |conn, crossing| {
        conn.answer_requests(STEADY);
        crossing.rules().lose(Loss::AfterFin);
        crossing.server_does(|| conn.fin());
        acts(conn);
    });
    let error = network.as_client(async || {
        let builder = crate::support::builder();
        let pool = builder.tcp_user_timeout(Duration::from_millis(100)).build();
        for _ in 0..=STEADY {
            fetch(&pool, get(&peer.url("/warm")))
                .await
                .expect("a response");
        }
        eventually("it is idle", || pool.stats().idle == 1).await;
        crossing.client_is_ready();
        let error = fetch(&pool, post(&peer.url("/pay"), "amount=10")).await;
        eventually("the server is done", || peer.open() == 0).await;
        error.expect_err("no answer can come")
    });
    assert_eq!(
        (error.delivery().as_str(), peer.effects("/pay")),
        ("unknown", 1),
        "{error:?}"
    );
}

/// As many round trips make the kernel sure of the distance, and its patience short.
const STEADY: usize = 14;
