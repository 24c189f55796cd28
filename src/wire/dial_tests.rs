//! Dials over a network of words on a paused clock: a script says what the resolver answers, another one what
//! each address does. Times are exact. The last tests use real sockets.

use std::collections::VecDeque;
use std::future::ready;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::wire::resolve::{Resolve, Resolving};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn socket(text: &str) -> SocketAddr {
    SocketAddr::new(text.parse().expect("an address"), 80)
}

fn sockets(list: &[&str]) -> Vec<SocketAddr> {
    list.iter().map(|text| socket(text)).collect()
}

fn origin(uri: &str) -> Origin {
    Origin::of(&uri.parse().expect("a URI")).expect("an origin")
}

/// A resolver with an answer for each question; the last one stays.
#[derive(Default)]
struct Answers {
    script: Mutex<VecDeque<io::Result<Vec<SocketAddr>>>>,
    asked: AtomicUsize,
}

impl Resolve for Answers {
    fn resolve(&self, host: &str, port: u16) -> Resolving {
        assert_eq!((host, port), ("pay.example", 80));
        self.asked.fetch_add(1, Relaxed);
        let mut script = self.script.lock().expect("not poisoned");
        let answer = match script.len() {
            0 => Err(io::ErrorKind::NotFound.into()),
            1 => match &script[0] {
                Ok(found) => Ok(found.clone()),
                Err(error) => Err(error.kind().into()),
            },
            _ => script.pop_front().expect("not empty"),
        };
        Box::pin(ready(answer))
    }
}

/// What an address does, and after how much time.
#[derive(Clone, Copy)]
enum Does {
    Accepts(u64),
    Refuses(u64),
    Nothing,
}
use Does::{Accepts, Nothing, Refuses};

/// Counts as an open socket until it is dropped.
#[derive(Debug)]
struct Socket {
    _open: Arc<()>,
}

/// A dialer whose network is made of words.
struct World {
    dialer: Dialer,
    answers: Arc<Answers>,
    behaviour: HashMap<SocketAddr, Does>,
    /// Which address was connected to, and when.
    started: Mutex<Vec<(SocketAddr, Duration)>>,
    open: Arc<()>,
    birth: Instant,
}

impl World {
    /// Addresses of which nothing is said accept at once.
    fn new(answers: &[&[&str]], behaviour: &[(&str, Does)]) -> World {
        let script = answers.iter().map(|answer| Ok(sockets(answer)));
        let answers = Arc::new(Answers {
            script: Mutex::new(script.collect()),
            asked: AtomicUsize::new(0),
        });
        World {
            dialer: dialer(Resolver::new(Arc::clone(&answers)), Some(ms(10_000))),
            answers,
            behaviour: behaviour
                .iter()
                .map(|&(at, does)| (socket(at), does))
                .collect(),
            started: Mutex::default(),
            open: Arc::default(),
            birth: now(),
        }
    }

    fn with_limit(mut self, limit: Duration) -> World {
        self.dialer.connect_timeout = Some(limit);
        self
    }

    async fn dial(&self) -> Result<Opened<Socket>, Error> {
        self.dial_to(&origin("http://pay.example/"), &Stage::default())
            .await
    }

    async fn dial_to(&self, origin: &Origin, stage: &Stage) -> Result<Opened<Socket>, Error> {
        let connect = |to| self.connect(to);
        self.dialer
            .dial_by(origin, stage, ready(()), connect, |opened| {
                ready(Ok(opened))
            })
            .await
    }

    fn connect(&self, to: SocketAddr) -> impl Future<Output = io::Result<Socket>> + use<> {
        let mut started = self.started.lock().expect("not poisoned");
        started.push((to, now() - self.birth));
        let does = self.behaviour.get(&to).copied().unwrap_or(Accepts(0));
        let open = Arc::clone(&self.open);
        async move {
            match does {
                Accepts(after) => sleep(ms(after)).await,
                Refuses(after) => {
                    sleep(ms(after)).await;
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                Nothing => std::future::pending().await,
            }
            // Connected as far as the kernel is concerned; whether anybody looks is another matter.
            Ok(Socket { _open: open })
        }
    }

    /// The attempts since the last call, with their times from the beginning of the world.
    fn attempts(&self) -> Vec<(SocketAddr, Duration)> {
        std::mem::take(&mut self.started.lock().expect("not poisoned"))
    }

    fn tried(&self) -> Vec<SocketAddr> {
        self.attempts().into_iter().map(|(to, _)| to).collect()
    }

    fn asked(&self) -> usize {
        self.answers.asked.load(Relaxed)
    }

    fn age(&self) -> Duration {
        now() - self.birth
    }

    fn open_sockets(&self) -> usize {
        Arc::strong_count(&self.open) - 1
    }

    fn is_anything_held(&self) -> bool {
        let books = self.dialer.books.lock();
        books.values().any(|known| known.book.is_used())
    }
}

fn dialer(resolver: Resolver, connect_timeout: Option<Duration>) -> Dialer {
    let options = SocketOptions {
        nodelay: true,
        keepalive: None,
        user_timeout: None,
    };
    #[cfg(feature = "tls")]
    let tls = TlsClient::new(None);
    #[cfg(not(feature = "tls"))]
    let tls = TlsClient;
    Dialer::new(connect_timeout, options, tls, resolver)
}

// xroche/httrack#418, dotnet/corefx#29792; RFC 8305 section 5.
#[tokio::test(start_paused = true)]
async fn a_silent_address_is_followed_by_the_next_after_a_quarter_of_a_second() {
    let world = World::new(
        &[&["::1", "127.0.0.1"]],
        &[("::1", Nothing), ("127.0.0.1", Accepts(20))],
    );
    let opened = world.dial().await.expect("the second answers");
    assert_eq!(opened.address.socket_addr(), socket("127.0.0.1"));
    let expected = [(socket("::1"), ms(0)), (socket("127.0.0.1"), ms(250))];
    assert_eq!(world.attempts(), expected);
    assert_eq!(opened.connect, ms(270));
}

// xroche/httrack#418: a black hole delays one dial, not all.
#[tokio::test(start_paused = true)]
async fn an_address_that_was_overtaken_is_tried_last_for_a_while() {
    let world = World::new(&[&["::1", "127.0.0.1"]], &[("::1", Nothing)]);
    world.dial().await.expect("the second answers");
    world.attempts();
    world.dial().await.expect("the second answers");
    assert_eq!(world.tried(), sockets(&["127.0.0.1"]));
    sleep(ms(31_000)).await;
    world.dial().await.expect("the second answers");
    assert_eq!(world.tried(), sockets(&["::1", "127.0.0.1"]));
}

#[tokio::test(start_paused = true)]
async fn an_address_that_had_no_time_to_lose_the_race_is_not_put_last() {
    // The first is refused, so that the other two start within a millisecond.
    let behaviour = [
        ("127.0.0.1", Refuses(251)),
        ("127.0.0.2", Accepts(100)),
        ("127.0.0.3", Accepts(50)),
    ];
    let world = World::new(&[&["127.0.0.1", "127.0.0.2", "127.0.0.3"]], &behaviour);
    let _third = world.dial().await.expect("the third is the fastest");
    assert_eq!(world.tried().len(), 3);
    world.dial().await.expect("the second answers");
    assert_eq!(world.tried(), sockets(&["127.0.0.2"]));
}

// grpc/grpc-go#3795
#[tokio::test(start_paused = true)]
async fn a_dead_address_is_followed_by_the_next_at_once() {
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &[("127.0.0.1", Refuses(0))]);
    let opened = world.dial().await.expect("the second answers");
    assert_eq!(opened.address.socket_addr(), socket("127.0.0.2"));
    assert_eq!(world.age(), ms(0));
    assert_eq!(world.tried(), sockets(&["127.0.0.1", "127.0.0.2"]));
    assert_eq!(world.asked(), 1);
}

// grpc/grpc-go#3795: the dead one is remembered for a short time.
#[tokio::test(start_paused = true)]
async fn a_dead_address_is_tried_last_for_a_while() {
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &[("127.0.0.1", Refuses(0))]);
    let mut held = vec![world.dial().await.expect("the second answers")];
    world.attempts();
    // Although it has fewer connections.
    for _ in 0..3 {
        held.push(world.dial().await.expect("the second answers"));
    }
    assert_eq!(world.tried(), vec![socket("127.0.0.2"); 3]);
    sleep(ms(31_000)).await;
    held.push(world.dial().await.expect("the second answers"));
    assert_eq!(world.tried(), sockets(&["127.0.0.1", "127.0.0.2"]));
}

#[tokio::test(start_paused = true)]
async fn an_address_that_works_again_is_not_tried_last_any_more() {
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &[("127.0.0.2", Refuses(0))]);
    let back = socket("127.0.0.1");
    world
        .dialer
        .books
        .answer(&origin("http://pay.example/"), &[back], now(), &[]);
    world
        .dialer
        .books
        .failed(&origin("http://pay.example/"), &[back]);
    let _held = world.dial().await.expect("the first works again");
    assert_eq!(world.tried(), sockets(&["127.0.0.2", "127.0.0.1"]));
    // Although it has more connections than the one that fails.
    world.dial().await.expect("the first works again");
    assert_eq!(world.tried(), sockets(&["127.0.0.1"]));
}

// nodejs/node#54359
#[tokio::test(start_paused = true)]
async fn a_slow_address_is_not_cut_by_the_start_of_the_next() {
    let slow = [("127.0.0.1", Accepts(400)), ("127.0.0.2", Accepts(400))];
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &slow);
    let opened = world.dial().await.expect("both answer");
    assert_eq!(opened.address.socket_addr(), socket("127.0.0.1"));
    assert_eq!(world.age(), ms(400));
    assert_eq!(world.tried().len(), 2, "the second was not started");
}

// hyperium/hyper#1972
#[tokio::test(start_paused = true)]
async fn the_time_limit_is_not_divided_by_the_number_of_addresses() {
    let list: Vec<String> = (1..=8).map(|n| format!("127.0.0.{n}")).collect();
    let list: Vec<&str> = list.iter().map(String::as_str).collect();
    let behaviour: Vec<_> = list.iter().map(|&at| (at, Accepts(300))).collect();
    let world = World::new(&[&list], &behaviour).with_limit(ms(1000));
    world.dial().await.expect("each of them answers");
    assert_eq!(world.age(), ms(300));
}

/// Dials where a handshake is known to take so long. Gives the times of the attempts, and the signs of loss.
async fn dial_known(world: &World, handshake: Duration) -> (Vec<(SocketAddr, Duration)>, usize) {
    let origin = origin("http://pay.example/");
    world.dialer.books.lock().entry(origin.clone()).or_default();
    world.dialer.books.connected(&origin, handshake);
    let losses = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&losses);
    let stage = Stage::reporting(move |sign| {
        if sign == Sign::Lost {
            counted.fetch_add(1, Relaxed);
        }
    });
    // Whether it succeeds shows in what was tried.
    drop(world.dial_to(&origin, &stage).await);
    (world.attempts(), losses.load(Relaxed))
}

// envoyproxy/envoy#7535: the kernel would repeat the SYN only after a second.
#[tokio::test(start_paused = true)]
async fn the_last_address_gets_one_second_attempt_where_a_handshake_takes_far_less() {
    let silent = World::new(&[&["127.0.0.1"]], &[("127.0.0.1", Nothing)]);
    let at = |time| (socket("127.0.0.1"), ms(time));
    let (attempts, losses) = dial_known(&silent, ms(30)).await;
    assert_eq!(attempts, [at(0), at(250)]);
    assert_eq!(losses, 1);
}

#[tokio::test(start_paused = true)]
async fn an_address_further_off_gets_no_second_attempt_and_its_loss_is_seen() {
    let silent = World::new(&[&["127.0.0.1"]], &[("127.0.0.1", Nothing)]);
    let (attempts, losses) = dial_known(&silent, ms(31)).await;
    assert_eq!((attempts.len(), losses), (1, 1));
}

/// The second began a few milliseconds before the first was refused.
#[tokio::test(start_paused = true)]
async fn an_attempt_that_has_just_begun_is_not_repeated_when_another_one_fails() {
    let behaviour = [("127.0.0.1", Refuses(255)), ("127.0.0.2", Accepts(20))];
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &behaviour);
    let (attempts, losses) = dial_known(&world, ms(20)).await;
    let expected = [(socket("127.0.0.1"), ms(0)), (socket("127.0.0.2"), ms(250))];
    assert_eq!(attempts, expected);
    assert_eq!(losses, 0);
}

// grpc/grpc-go#3353
#[tokio::test(start_paused = true)]
async fn when_everybody_refuses_the_name_is_resolved_again_in_the_same_dial() {
    let world = World::new(
        &[&["127.0.0.1"], &["127.0.0.1", "127.0.0.2"]],
        &[("127.0.0.1", Refuses(5))],
    );
    let opened = world.dial().await.expect("the new address answers");
    assert_eq!(opened.address.socket_addr(), socket("127.0.0.2"));
    assert_eq!(world.tried(), sockets(&["127.0.0.1", "127.0.0.2"]));
    assert_eq!(world.asked(), 2);
}

// grpc/grpc-go#3353: and no more often than once.
#[tokio::test(start_paused = true)]
async fn when_the_new_answer_has_no_new_address_the_last_error_stands() {
    for again in [
        Ok(sockets(&["127.0.0.1"])),
        Ok(Vec::new()),
        Err(io::ErrorKind::TimedOut.into()),
    ] {
        let world = World::new(&[&["127.0.0.1"]], &[("127.0.0.1", Refuses(5))]);
        world
            .answers
            .script
            .lock()
            .expect("not poisoned")
            .push_back(again);
        let error = world.dial().await.expect_err("nobody answers");
        assert_eq!(
            (error.kind(), error.phase()),
            (ErrorKind::Connect, Phase::Connect)
        );
        let source =
            std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(
            source.map(io::Error::kind),
            Some(io::ErrorKind::ConnectionRefused)
        );
        assert_eq!(world.tried(), sockets(&["127.0.0.1"]));
        assert_eq!(world.asked(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_name_without_an_address_fails_before_anything_is_connected() {
    let error = World::new(&[&[]], &[])
        .dial()
        .await
        .expect_err("no address");
    assert_eq!(
        (error.kind(), error.phase()),
        (ErrorKind::Resolve, Phase::Resolve)
    );

    let world = World::new(&[], &[]);
    let refused = io::ErrorKind::PermissionDenied;
    world
        .answers
        .script
        .lock()
        .expect("not poisoned")
        .push_back(Err(refused.into()));
    let error = world.dial().await.expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Resolve);
    let source =
        std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
    assert_eq!(
        source.map(io::Error::kind),
        Some(refused),
        "the resolver's own error"
    );
}

// connectrpc/connect-go#782, istio/istio#7878, valyala/fasthttp#1236
#[tokio::test(start_paused = true)]
async fn dials_at_the_same_time_spread_over_the_addresses() {
    let list = ["127.0.0.1", "127.0.0.2", "127.0.0.3"];
    let slow: Vec<_> = list.iter().map(|&at| (at, Accepts(50))).collect();
    let world = World::new(&[&list], &slow);
    let (a, b, c, d, e, f) = tokio::join!(
        world.dial(),
        world.dial(),
        world.dial(),
        world.dial(),
        world.dial(),
        world.dial()
    );
    let mut reached: Vec<_> = [a, b, c, d, e, f]
        .into_iter()
        .map(|opened| opened.expect("all answer").address.socket_addr())
        .collect();
    reached.sort();
    assert_eq!(
        reached,
        sockets(&[list[0], list[0], list[1], list[1], list[2], list[2]])
    );
    assert_eq!(world.attempts().len(), 6);
}

// elixir-grpc/grpc#355
#[tokio::test(start_paused = true)]
async fn an_address_that_is_added_gets_the_next_connections() {
    let old = ["127.0.0.1", "127.0.0.2"];
    let all = ["127.0.0.1", "127.0.0.2", "127.0.0.3"];
    let world = World::new(&[&old, &old, &old, &old, &all], &[]);
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(world.dial().await.expect("all answer"));
    }
    world.attempts();
    for _ in 0..2 {
        held.push(world.dial().await.expect("all answer"));
    }
    assert_eq!(world.tried(), vec![socket("127.0.0.3"); 2]);
}

// grpc/grpc#20146, grpc/grpc#12295
#[tokio::test(start_paused = true)]
async fn a_connection_to_an_address_that_is_gone_is_told_so() {
    let world = World::new(&[&["127.0.0.1"], &["127.0.0.2"]], &[]);
    let pay = origin("http://pay.example/");
    let stages: [Stage; 3] = Default::default();
    let mut held = Vec::new();
    for stage in &stages {
        held.push(world.dial_to(&pay, stage).await.expect("both answer"));
    }
    assert_eq!(held[0].address.socket_addr(), socket("127.0.0.1"));
    let retired: Vec<_> = held.iter().map(|opened| opened.address.retired()).collect();
    assert_eq!(retired, [Some(CloseReason::AddressGone), None, None]);
    let told: Vec<_> = stages.iter().map(Stage::addresses_retired).collect();
    assert_eq!(
        told,
        [false, false, true],
        "by the second answer without it, and once"
    );
}

// grpc/grpc#20146: also a dial that fails tells.
#[tokio::test(start_paused = true)]
async fn a_dial_that_fails_tells_of_addresses_that_are_gone() {
    let world = World::new(
        &[&["127.0.0.1"], &["127.0.0.2"]],
        &[("127.0.0.2", Refuses(0))],
    );
    let held = world.dial().await.expect("the first answers");
    let stage = Stage::default();
    let failed = world.dial_to(&origin("http://pay.example/"), &stage).await;
    failed.expect_err("the second does not");
    assert!(stage.addresses_retired(), "it resolved twice");
    assert_eq!(held.address.retired(), Some(CloseReason::AddressGone));
}

// grpc/grpc-go#4513
#[tokio::test(start_paused = true)]
async fn an_eviction_tells_every_connection_of_that_origin_only() {
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &[]);
    let named = origin("http://pay.example/");
    let literal = origin("http://[::1]/");
    let stage = Stage::default();
    let first = world.dial_to(&named, &stage).await.expect("all answer");
    let second = world.dial_to(&named, &stage).await.expect("all answer");
    let other = world.dial_to(&literal, &stage).await.expect("all answer");
    let retired = || [&first, &second, &other].map(|opened| opened.address.retired());

    world.dialer.evict(&named);
    let evicted = Some(CloseReason::Evicted);
    assert_eq!(retired(), [evicted, evicted, None]);
    let later = world.dial_to(&named, &stage).await.expect("all answer");
    assert_eq!(later.address.retired(), None);

    world.dialer.evict(&literal);
    assert_eq!(retired(), [evicted; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_literal_address_never_reaches_the_resolver() {
    let world = World::new(&[], &[("127.0.0.9", Refuses(0))]);
    for (uri, address) in [("http://127.0.0.1/", "127.0.0.1"), ("http://[::1]/", "::1")] {
        let opened = world.dial_to(&origin(uri), &Stage::default()).await;
        assert_eq!(
            opened.expect("it answers").address.socket_addr(),
            socket(address)
        );
    }
    let error = world
        .dial_to(&origin("http://127.0.0.9/"), &Stage::default())
        .await;
    assert_eq!(error.expect_err("it refuses").kind(), ErrorKind::Connect);
    assert_eq!(world.asked(), 0);
}

// RFC 8305 section 5: the others are to be cancelled.
#[tokio::test(start_paused = true)]
async fn no_loser_of_a_race_stays_open() {
    // Both have connected when the dial looks next.
    let both = [("127.0.0.1", Accepts(300)), ("127.0.0.2", Accepts(50))];
    let world = World::new(&[&["127.0.0.1", "127.0.0.2"]], &both);
    let opened = world.dial().await.expect("both answer");
    assert_eq!(world.attempts().len(), 2);
    assert_eq!(world.open_sockets(), 1);
    drop(opened);
    assert_eq!(world.open_sockets(), 0);
    assert!(!world.is_anything_held());
}

#[tokio::test(start_paused = true)]
async fn a_dial_that_is_dropped_holds_no_address() {
    let world = World::new(
        &[&["127.0.0.1", "127.0.0.2"]],
        &[("127.0.0.1", Nothing), ("127.0.0.2", Nothing)],
    );
    let cut = timeout(ms(300), world.dial()).await;
    cut.expect_err("nobody answers");
    assert_eq!(world.attempts().len(), 2);
    assert!(!world.is_anything_held());
}

#[tokio::test(start_paused = true)]
async fn a_dial_tells_its_phase_to_whoever_waits_for_it() {
    let world = World::new(&[&["127.0.0.1"]], &[("127.0.0.1", Accepts(100))]);
    let pay = origin("http://pay.example/");
    let stage = Stage::default();
    assert_eq!(stage.phase(), Phase::Resolve);
    let dial = world.dial_to(&pay, &stage);
    tokio::pin!(dial);
    timeout(ms(50), dial.as_mut())
        .await
        .expect_err("it is not there yet");
    assert_eq!(stage.phase(), Phase::Connect);
    dial.await.expect("it answers");
}

#[tokio::test(start_paused = true)]
async fn an_address_that_used_up_the_time_limit_is_tried_last() {
    let world = World::new(&[&["::1", "127.0.0.1"]], &[("::1", Nothing)]).with_limit(ms(200));
    let error = world
        .dial()
        .await
        .expect_err("the second had no time to start");
    assert_eq!(
        (error.kind(), error.phase()),
        (ErrorKind::ConnectTimeout, Phase::Connect)
    );
    world.attempts();
    world.dial().await.expect("the second answers");
    assert_eq!(world.tried(), sockets(&["127.0.0.1"]));
}

#[tokio::test(start_paused = true)]
async fn an_address_that_breaks_its_handshakes_off_is_tried_last() {
    let world = World::new(&[&["::1", "127.0.0.1"]], &[]);
    let pay = origin("http://pay.example/");
    let connect = |to| world.connect(to);
    let stage = Stage::default();
    let broken = |_| ready(Err(Error::before_sending(ErrorKind::Tls, Phase::Handshake)));
    let dial = world
        .dialer
        .dial_by::<_, _, (), _>(&pay, &stage, ready(()), connect, broken);
    assert_eq!(dial.await.expect_err("no handshake").kind(), ErrorKind::Tls);
    world.attempts();
    world.dial().await.expect("both answer");
    assert_eq!(world.tried(), sockets(&["127.0.0.1"]));
}

#[tokio::test(start_paused = true)]
async fn of_very_many_origins_those_in_use_are_remembered() {
    let world = World::new(&[], &[]);
    let stage = Stage::default();
    let used = origin("http://127.0.0.1/");
    let held = world.dial_to(&used, &stage).await.expect("it answers");
    for n in 0..2000u16 {
        let uri = format!("http://10.0.{}.{}/", n / 256, n % 256);
        world
            .dial_to(&origin(&uri), &stage)
            .await
            .expect("it answers");
        assert!(world.dialer.books.lock().len() <= MAX_UNUSED_BOOKS);
    }
    world.dialer.evict(&used);
    assert_eq!(held.address.retired(), Some(CloseReason::Evicted));
}

/// Dials a listener by name, over real sockets.
async fn dial_for_real(resolve: impl Fn(SocketAddr) -> Vec<SocketAddr>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("bind");
    let live = listener.local_addr().expect("address");
    let answers = Answers {
        script: Mutex::new([Ok(resolve(live))].into()),
        asked: AtomicUsize::new(0),
    };
    let dialer = dialer(Resolver::new(answers), Some(ms(10_000)));
    let counters = Arc::new(Counters::new());
    let pay = origin("http://pay.example/");
    let dialed = dialer
        .dial(&pay, &counters, &Stage::default(), ready(()))
        .await
        .expect("it listens");
    assert_eq!(dialed.peer, Some(live));
    assert_eq!(dialed.address.socket_addr(), live);
}

#[tokio::test]
async fn a_refused_socket_is_followed_by_the_next() {
    // Bound, so that nobody else listens there; not listening itself.
    let nobody = tokio::net::TcpSocket::new_v4().expect("a socket");
    nobody
        .bind(([127, 0, 0, 1], 0).into())
        .expect("a free port");
    let dead = nobody.local_addr().expect("an address");
    dial_for_real(|live| vec![dead, live]).await;
}

// RFC 7413 section 6.3.1: data in a SYN may be delivered twice.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_connection_is_opened_without_tcp_fast_open() {
    use nix::sys::socket::{getsockopt, sockopt::TcpFastOpenConnect};

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("bind");
    let live = listener.local_addr().expect("address");
    let dialer = dialer(Resolver::system(), None);
    let here = origin(&format!("http://{live}/"));
    let stage = Stage::default();
    let dial = dialer.dial_by(&here, &stage, ready(()), connect_tcp, |opened| {
        ready(Ok(opened))
    });
    let opened = dial.await.expect("it listens");
    dialer.options.apply(&opened.socket);
    let is_on = getsockopt(&opened.socket, TcpFastOpenConnect);
    assert_eq!(is_on, Ok(false));
}
