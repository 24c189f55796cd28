//! A pool, its servers and the network between them in virtual time.
//!
//! The pool is the library's own [`Plan`], driven by the events by which `src/pool` drives it and in the same order.
//! What is a model here is all around it: when a packet arrives, when a server closes, what a kernel does with a
//! handshake for which it has no room.
//!
//! # What the model leaves out
//!
//! * Requests and responses are one packet each. Of all work only what a client needs for a packet takes time
//!   ([`PACKET`]), so that what begins at once arrives one after the other; and the server's accepts.
//! * Nothing times out on the client: no connect timeout, no acquire timeout.
//! * A stale repeatable request is sent again at once, as by a retry layer; an unkeyed one has failed.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use crate::clock::{Instant, Stamp, stamp};
use crate::rules::cap::Countdown;
use crate::rules::learnt::Learnt;
use crate::rules::plan::{Answer, Asks, Dialer, Effects, Limits, NOBODY, Need, Plan, Told, Word};
use crate::rules::shelf::{Expiry, Item};
use crate::server::Server;
use crate::stats::CloseReason;
use crate::traffic::{Arrival, Service, Traffic};

/// Since the beginning of a run.
type Time = Duration;

/// What runs.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Taken in turn by the origins.
    pub(crate) servers: Vec<Server>,
    /// Then every server closes what is idle, says close on what is not, and is another one from then on.
    pub(crate) redeploys: Vec<(Time, Server)>,
    pub(crate) accepts: Accepts,
    pub(crate) rtt: Duration,
    /// The part of packets that is lost.
    pub(crate) loss: f64,
    pub(crate) tls: bool,
    pub(crate) service: Service,
    pub(crate) policy: Policy,
    pub(crate) limits: Limits,
    pub(crate) idle_timeout: Option<Duration>,
    /// Of a connection, a tenth more or less.
    pub(crate) lifetime: Duration,
    /// A response is never read to its end, so its connection stays in use, and the next of so many requests begins.
    pub(crate) held: Option<u64>,
    pub(crate) seed: u64,
}

/// How a server accepts connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accepts {
    /// How many may wait to be accepted. `None`: any number, and none waits.
    pub(crate) backlog: Option<usize>,
    /// For one connection.
    pub(crate) takes: Duration,
    /// One accept in a hundred takes 10 to 50 ms longer.
    pub(crate) stalls: bool,
}

/// By which rule a request gets an idle connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Policy {
    /// The library's.
    Learnt,
    /// Any connection within the caller's idle timeout, as in other pools. What the server says is not heard.
    CallersLimit,
    /// The library's, but what must not be sent twice has a new connection each time.
    FreshForUnkeyed,
}

impl Policy {
    pub(crate) const ALL: [Policy; 3] = [
        Policy::Learnt,
        Policy::CallersLimit,
        Policy::FreshForUnkeyed,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Policy::Learnt => "learnt",
            Policy::CallersLimit => "callers_limit",
            Policy::FreshForUnkeyed => "fresh_for_unkeyed",
        }
    }
}

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) unkeyed: u64,
    /// On a connection, those sent again included.
    pub(crate) exchanges: u64,
    /// Of these, on a connection that had carried a request.
    pub(crate) reused: u64,
    /// Written to a connection that the server had closed.
    pub(crate) stale_unkeyed: u64,
    pub(crate) stale_repeatable: u64,
    /// Caught before anything was written.
    pub(crate) probed: u64,
    /// Idle connections were too old for a request.
    pub(crate) too_old: u64,
    /// Dials that a request waited for.
    pub(crate) on_path_dials: u64,
    /// Dials ahead of time, and how many of their connections carried a request.
    pub(crate) spare_dials: u64,
    pub(crate) spares_used: u64,
    pub(crate) server_closes: u64,
    pub(crate) said_close: u64,
    /// Handshakes for which the server's kernel had no room.
    pub(crate) overflows: u64,
    /// From the call to a connection, of all requests.
    pub(crate) waited: Duration,
    pub(crate) idle_max: usize,
    pub(crate) last_response: Time,
    /// From call to response.
    pub(crate) response_times: Vec<Duration>,
    idle_time: f64,
    until: Time,
}

impl Tally {
    pub(crate) fn dials(&self) -> u64 {
        self.on_path_dials + self.spare_dials
    }

    pub(crate) fn reuse_percent(&self) -> f64 {
        percent(self.reused, self.exchanges)
    }

    pub(crate) fn idle_average(&self) -> f64 {
        self.idle_time / self.until.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Both together.
    pub(crate) fn add(&mut self, other: &Tally) {
        self.requests += other.requests;
        self.unkeyed += other.unkeyed;
        self.exchanges += other.exchanges;
        self.reused += other.reused;
        self.stale_unkeyed += other.stale_unkeyed;
        self.stale_repeatable += other.stale_repeatable;
        self.probed += other.probed;
        self.too_old += other.too_old;
        self.on_path_dials += other.on_path_dials;
        self.spare_dials += other.spare_dials;
        self.spares_used += other.spares_used;
        self.server_closes += other.server_closes;
        self.said_close += other.said_close;
        self.overflows += other.overflows;
        self.waited += other.waited;
        self.idle_max = self.idle_max.max(other.idle_max);
        self.idle_time += other.idle_time;
        self.until += other.until;
    }

    /// What is here and was not there.
    pub(crate) fn since(&self, before: &Tally) -> Tally {
        Tally {
            requests: self.requests - before.requests,
            unkeyed: self.unkeyed - before.unkeyed,
            exchanges: self.exchanges - before.exchanges,
            reused: self.reused - before.reused,
            stale_unkeyed: self.stale_unkeyed - before.stale_unkeyed,
            stale_repeatable: self.stale_repeatable - before.stale_repeatable,
            probed: self.probed - before.probed,
            too_old: self.too_old - before.too_old,
            on_path_dials: self.on_path_dials - before.on_path_dials,
            spare_dials: self.spare_dials - before.spare_dials,
            spares_used: self.spares_used - before.spares_used,
            server_closes: self.server_closes - before.server_closes,
            said_close: self.said_close - before.said_close,
            overflows: self.overflows - before.overflows,
            waited: self.waited - before.waited,
            idle_time: self.idle_time - before.idle_time,
            until: self.until - before.until,
            response_times: self.response_times[before.response_times.len()..].to_vec(),
            idle_max: self.idle_max,
            last_response: self.last_response,
        }
    }
}

/// `part` of `all`, in percent.
pub(crate) fn percent(part: u64, all: u64) -> f64 {
    part as f64 * 100.0 / all.max(1) as f64
}

/// A connection as the plan sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Thing {
    id: u64,
    served: u32,
    ends: Instant,
}

impl Item for Thing {
    fn id(&self) -> u64 {
        self.id
    }

    fn over(&self, now: Stamp) -> Option<CloseReason> {
        (now.at >= self.ends).then_some(CloseReason::Lifetime)
    }

    fn ends(&self) -> Option<Instant> {
        Some(self.ends)
    }

    fn served(&self) -> u32 {
        self.served
    }

    fn most(&self) -> Option<u32> {
        None
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Dialing,
    Busy,
    Idle,
    Closing,
}

/// Whether the plan waits for the first byte on a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Proof {
    Wanted,
    Over,
}

/// What a client's segment carries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Data {
    Nothing,
    Hello,
    Request,
}

/// A connection, from its dial to the end of its seat.
#[derive(Debug)]
struct Link {
    origin: u32,
    by: Dialer,
    state: State,
    began: Time,
    thing: Thing,
    /// The client's kernel has sent something twice.
    has_lost: bool,
    is_connected: bool,
    proof: Proof,
    /// At the server: in the queue or accepted.
    is_established: bool,
    is_accepted: bool,
    /// What the client has sent last, and whether the server has it.
    sent: Data,
    is_delivered: bool,
    /// Counts what was sent, so that an old timer is known.
    segment: u64,
    /// How many redeploys the server had seen by its beginning.
    epoch: usize,
    /// When the server closes it, as things are: it answers nothing from then on.
    closes: Option<Time>,
    /// When the client's task sees that.
    fin: Option<Time>,
    /// When it looks for that next.
    looks: Option<Time>,
    request: Option<u64>,
    /// How long it had been idle before its exchange.
    idle: Option<Duration>,
    announced: Option<Duration>,
    countdown: Countdown,
    announced_cap: Option<u32>,
    /// When it calls at the gate.
    call: Option<Time>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    origin: u32,
    is_unkeyed: bool,
    called: Time,
    in_line: bool,
    /// Its dial, for as long as that waits at the gate.
    at_gate: Option<u64>,
}

#[derive(Debug, Default)]
struct Queue {
    links: VecDeque<u64>,
    is_busy: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive(Arrival),
    Call(u64),
    /// The client's kernel repeats a SYN that has met no answer.
    SynTimer(u64, u32),
    /// A dial looks whether it needs a second attempt.
    Repeat(u64),
    Syn(u64),
    SynAck(u64),
    /// The server's kernel repeats what has not ended the handshake.
    SynAckTimer(u64, u32),
    Segment(u64, u64),
    DataTimer(u64, u64, u32),
    Accept(u32),
    HelloDone(u64),
    Response(u64),
    ProofDue(u64, bool),
    Fin(u64),
    StaleEnd(u64),
    Keeper(u64),
    SeatFreed(u64),
}

#[derive(Debug)]
struct Due {
    at: Time,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    /// The greatest is what comes first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

/// From the arrival of a FIN until the connection's task has run. In between only a probe sees it.
const LAG: Duration = Duration::from_micros(100);

/// A client has one processor, and this is what a packet costs it.
const PACKET: Duration = Duration::from_micros(10);

/// Linux looks at a timer on the next of its ticks, which are the coarser the longer the timer is: at 250 a second an
/// eighth of it at most.
fn on_a_tick(at: Time, timer: Duration) -> Time {
    let mut tick = Duration::from_millis(4);
    while timer >= tick * 64 {
        tick *= 8;
    }
    let ticks = at.as_nanos().div_ceil(tick.as_nanos());
    tick * u32::try_from(ticks).unwrap_or(u32::MAX)
}

/// The shortest time after which a kernel sends again what was not acknowledged.
const REPEATED: Duration = Duration::from_millis(200);

/// A SYN is sent again after so long.
const SYN_REPEATED: Duration = Duration::from_secs(1);

/// `tcp_synack_retries`.
const SYN_ACKS_REPEATED: u32 = 5;

/// As in `wire/dial.rs`: after so long a dial counts as lost where handshakes take far less, and there is a second
/// attempt where they are known to take no more than that.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
const NEAR: Duration = Duration::from_millis(30);

/// As in `pool/lease.rs`.
const FIRST_REPEAT: Duration = Duration::from_millis(250);
const PROOF_PATIENCE: Duration = Duration::from_secs(1);

/// A server's part of a TLS handshake.
const SIGNATURE: Duration = Duration::from_micros(500);

type Fx = Effects<u32, Thing, u64>;

/// One run.
#[derive(Debug)]
pub(crate) struct World {
    setup: Setup,
    plan: Plan<u32, Thing, u64>,
    traffic: Traffic,
    base: Stamp,
    now: Time,
    events: BinaryHeap<Due>,
    next: u64,
    links: HashMap<u64, Link>,
    requests: HashMap<u64, Request>,
    queues: HashMap<u32, Queue>,
    /// The last handshake of each origin that lost nothing.
    handshakes: HashMap<u32, Duration>,
    rng: fastrand::Rng,
    idle: usize,
    /// When the client's processor has sent all that is to be sent.
    sends_until: Time,
    /// An arrival is among the events.
    expects: bool,
    tally: Tally,
}

impl World {
    pub(crate) fn new(setup: Setup, traffic: Traffic) -> Self {
        let mut world = World {
            plan: Plan::new(setup.limits, setup.idle_timeout),
            traffic,
            base: stamp(),
            now: Time::ZERO,
            events: BinaryHeap::new(),
            next: 0,
            links: HashMap::new(),
            requests: HashMap::new(),
            queues: HashMap::new(),
            handshakes: HashMap::new(),
            rng: fastrand::Rng::with_seed(setup.seed ^ 0x5eed),
            idle: 0,
            sends_until: Time::ZERO,
            expects: false,
            tally: Tally::default(),
            setup,
        };
        world.expect_next();
        world
    }

    /// Runs to the last response, and gives what came of it.
    pub(crate) fn run(mut self) -> Tally {
        self.run_until(Time::MAX);
        self.tally
    }

    /// Runs to this moment, or to the last response if that is earlier. `true` while there is more.
    pub(crate) fn run_until(&mut self, end: Time) -> bool {
        while self.expects || !self.requests.is_empty() {
            match self.events.peek() {
                Some(due) if due.at <= end => {}
                Some(_) => {
                    self.pass_to(end);
                    return true;
                }
                None => return false,
            }
            if let Some(Due { at, event, .. }) = self.events.pop() {
                self.pass_to(at);
                self.handle(event);
            }
        }
        false
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn learnt(&self, origin: u32) -> Option<&Learnt> {
        self.plan.learnt(&origin)
    }

    fn pass_to(&mut self, at: Time) {
        let passed = (at - self.now).as_secs_f64();
        if passed > 0.0 {
            let idle = u32::try_from(self.idle).unwrap_or(u32::MAX);
            self.tally.idle_time += passed * f64::from(idle);
            self.tally.idle_max = self.tally.idle_max.max(self.idle);
        }
        self.now = at;
        self.tally.until = at;
    }

    fn stamp(&self) -> Stamp {
        Stamp {
            at: self.base.at + self.now,
            wall: self.base.wall + self.now,
        }
    }

    fn schedule(&mut self, after: Duration, event: Event) {
        self.next += 1;
        self.events.push(Due {
            at: self.now + after,
            number: self.next,
            event,
        });
    }

    fn schedule_at(&mut self, at: Time, event: Event) {
        self.schedule(at.saturating_sub(self.now), event);
    }

    /// How long a packet takes.
    fn one_way(&self) -> Duration {
        self.setup.rtt / 2
    }

    /// A packet of the client is on its way.
    fn send_packet(&mut self, event: Event) {
        self.sends_until = self.sends_until.max(self.now) + PACKET;
        let arrives = self.sends_until + self.one_way();
        if !self.is_lost() {
            self.schedule_at(arrives, event);
        }
    }

    /// A timer of the client's kernel.
    fn set_timer(&mut self, after: Duration, event: Event) {
        let at = on_a_tick(self.now + after, after);
        self.schedule_at(at, event);
    }

    fn is_lost(&mut self) -> bool {
        self.setup.loss > 0.0 && self.rng.f64() < self.setup.loss
    }

    fn hears_the_server(&self) -> bool {
        self.setup.policy != Policy::CallersLimit
    }

    /// The server of an origin at a moment, and how often it was started anew by then.
    fn server(&self, origin: u32, at: Time) -> (Server, usize) {
        let epoch = self
            .setup
            .redeploys
            .partition_point(|(time, _)| *time <= at);
        let server = match epoch {
            0 => self.setup.servers[origin as usize % self.setup.servers.len()],
            epoch => self.setup.redeploys[epoch - 1].1,
        };
        (server, epoch)
    }

    /// When the server closes a connection that is idle from then on.
    fn closing_time(&mut self, id: u64, since: Time, is_unused: bool) -> Option<Time> {
        let origin = self.links.get(&id)?.origin;
        let (server, epoch) = self.server(origin, since);
        let keeps = server.keeps(id, is_unused, &mut self.rng);
        let redeploy = self.setup.redeploys.get(epoch).map(|(time, _)| *time);
        keeps
            .map(|keeps| since + keeps)
            .into_iter()
            .chain(redeploy)
            .min()
    }

    /// Runs an event of the plan, and does what follows from it.
    fn event<A>(
        &mut self,
        origin: u32,
        event: impl FnOnce(&mut Plan<u32, Thing, u64>, Stamp, &mut Fx) -> A,
    ) -> A {
        let (now, mut fx) = (self.stamp(), Effects::none());
        let answer = event(&mut self.plan, now, &mut fx);
        self.carry_out(origin, fx);
        answer
    }

    fn carry_out(&mut self, origin: u32, fx: Fx) {
        self.tally.too_old += u64::from(fx.too_old);
        for Told {
            who,
            place,
            ticket,
            word,
        } in fx.told
        {
            if ticket == NOBODY {
                self.at_the_gate(who, &word);
                continue;
            }
            let Some(request) = self.requests.get_mut(&who) else {
                continue;
            };
            match word {
                Word::Connection(thing, since) => {
                    request.in_line = false;
                    let not_wanted = request.at_gate.take();
                    self.give_up(not_wanted);
                    self.begin_or_ask_again(who, thing, since);
                }
                Word::Dial(dial) => {
                    self.tally.on_path_dials += 1;
                    let origin = request.origin;
                    self.dial(
                        origin,
                        Dialer {
                            place,
                            ticket,
                            dial,
                        },
                    );
                }
                Word::Closed | Word::Begin | Word::Call(_) => {}
            }
        }
        for (thing, _) in fx.closed {
            self.close(thing.id, self.setup.rtt);
        }
        if let Some((place, dial)) = fx.spare {
            self.tally.spare_dials += 1;
            self.dial(
                origin,
                Dialer {
                    place,
                    ticket: NOBODY,
                    dial,
                },
            );
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive(arrival) => {
                self.expect_next();
                self.call(arrival.origin, arrival.is_unkeyed);
            }
            Event::Call(id) => {
                if let Some(&Link {
                    origin, by, call, ..
                }) = self.links.get(&id)
                    && call == Some(self.now)
                {
                    self.event(origin, |plan, now, fx| plan.call(by, now, fx));
                }
            }
            Event::SynTimer(id, times) => self.repeat_syn(id, times),
            Event::Repeat(id) => self.second_attempt(id),
            Event::Syn(id) => self.syn_arrives(id),
            Event::SynAck(id) => self.syn_ack_arrives(id),
            Event::SynAckTimer(id, times) => self.repeat_syn_ack(id, times),
            Event::Segment(id, segment) => self.segment_arrives(id, segment),
            Event::DataTimer(id, segment, times) => self.repeat_data(id, segment, times),
            Event::Accept(origin) => {
                if let Some(queue) = self.queues.get_mut(&origin) {
                    queue.is_busy = false;
                }
                self.accept(origin);
            }
            Event::HelloDone(id) => self.opened(id, true),
            Event::Response(id) => self.response_arrives(id),
            Event::ProofDue(id, is_last) => self.ask_for_proof(id, is_last),
            Event::Fin(id) => self.fin_arrives(id),
            Event::StaleEnd(id) => self.stale_ends(id),
            Event::Keeper(id) => self.look_at_the_clock(id),
            Event::SeatFreed(id) => self.free_seat(id),
        }
    }

    fn expect_next(&mut self) {
        let next = self.traffic.next();
        self.expects = next.is_some();
        if let Some(arrival) = next {
            self.schedule_at(arrival.at, Event::Arrive(arrival));
        }
    }

    // A request and its way to a connection.

    fn call(&mut self, origin: u32, is_unkeyed: bool) {
        self.tally.requests += 1;
        self.tally.unkeyed += u64::from(is_unkeyed);
        let request = Request {
            origin,
            is_unkeyed,
            called: self.now,
            in_line: false,
            at_gate: None,
        };
        self.next += 1;
        let id = self.next;
        self.requests.insert(id, request);
        self.acquire(id, false, None);
    }

    /// As `Lease::acquire`: an idle connection, else a place in line. `dead` is the connection that the request got
    /// before; its seat is let go once the request is in line.
    fn acquire(&mut self, id: u64, mut again: bool, mut dead: Option<u64>) {
        let Some(&Request {
            origin, is_unkeyed, ..
        }) = self.requests.get(&id)
        else {
            return;
        };
        let need = match (is_unkeyed, self.setup.policy) {
            (true, Policy::Learnt) => Need::Young,
            (true, Policy::FreshForUnkeyed) => Need::Fresh,
            (false, _) | (true, Policy::CallersLimit) => Need::Any,
        };
        loop {
            let found = self.event(origin, |plan, now, fx| plan.reuse(&origin, need, now, fx));
            let found = match found {
                Some((_, thing, since)) => Some((thing, since)),
                None => {
                    if let Some(request) = self.requests.get_mut(&id) {
                        request.in_line = true;
                    }
                    let asks = Asks {
                        who: id,
                        ticket: id,
                        need,
                        again,
                    };
                    match self.event(origin, |plan, now, fx| plan.ask(&origin, asks, now, fx)) {
                        Answer::Reuse(_, thing, since) => Some((thing, since)),
                        Answer::InLine(_) => None,
                        Answer::Overloaded | Answer::Closed => {
                            self.requests.remove(&id);
                            None
                        }
                    }
                }
            };
            if let Some(dead) = dead.take() {
                self.free_seat(dead);
            }
            let Some((thing, since)) = found else {
                return;
            };
            match self.begin(id, thing, Some(since)) {
                Ok(()) => return,
                Err(of_the_dead) => dead = Some(of_the_dead),
            }
            again = true;
        }
    }

    fn begin_or_ask_again(&mut self, id: u64, thing: Thing, since: Option<Stamp>) {
        if let Err(dead) = self.begin(id, thing, since) {
            self.acquire(id, true, Some(dead));
        }
    }

    /// Sends a request on a connection, unless a look at it shows that it is closed. Then it is the error.
    fn begin(&mut self, id: u64, thing: Thing, since: Option<Stamp>) -> Result<(), u64> {
        self.set_state(thing.id, State::Busy);
        let (now, stamp, one_way) = (self.now, self.stamp(), self.one_way());
        let Some(link) = self.links.get_mut(&thing.id) else {
            return Err(thing.id);
        };
        let (place, origin) = (link.by.place, link.origin);
        let idle = since.map(|since| since.until(stamp));
        let has_fin = link.fin.is_some_and(|fin| fin <= now + LAG);
        if let (Some(idle), true) = (idle, has_fin) {
            self.tally.probed += 1;
            if thing.served > 0 {
                self.event(origin, |plan, _, fx| plan.found_closed(place, idle, fx));
            }
            self.plan.leave(place, thing.id);
            self.no_proof(thing.id);
            self.set_state(thing.id, State::Closing);
            return Err(thing.id);
        }
        link.request = Some(id);
        link.idle = idle;
        let is_spares_first = thing.served == 0 && link.by.ticket == NOBODY;
        let closes = link.closes.filter(|closes| *closes <= now + one_way);
        let stale_until = closes.and(link.fin).map(|fin| fin.min(now + 2 * one_way));
        if closes.is_none() {
            link.closes = None;
            link.fin = None;
        }
        let Some(request) = self.requests.get(&id) else {
            return Ok(());
        };
        self.tally.waited += now - request.called;
        self.tally.exchanges += 1;
        self.tally.reused += u64::from(thing.served > 0);
        self.tally.spares_used += u64::from(is_spares_first);
        match stale_until {
            None => self.send(thing.id, Data::Request),
            Some(until) => {
                let count = match request.is_unkeyed {
                    true => &mut self.tally.stale_unkeyed,
                    false => &mut self.tally.stale_repeatable,
                };
                *count += 1;
                self.schedule_at(until.max(now), Event::StaleEnd(thing.id));
            }
        }
        Ok(())
    }

    /// The connection has ended under a request. Nothing is learnt of it, as in `pool/service.rs`.
    fn stale_ends(&mut self, id: u64) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let request = link.request.take();
        let place = link.by.place;
        self.plan.leave(place, id);
        self.no_proof(id);
        self.set_state(id, State::Closing);
        self.free_seat(id);
        let Some(request) = request else {
            return;
        };
        match self.requests.remove(&request) {
            Some(again) if !again.is_unkeyed => {
                // A new call, with a new place in line.
                self.next += 1;
                let ticket = self.next;
                self.requests.insert(
                    ticket,
                    Request {
                        called: self.now,
                        ..again
                    },
                );
                self.acquire(ticket, false, None);
            }
            _ => {}
        }
    }

    fn response_arrives(&mut self, id: u64) {
        let sent = self.now - self.one_way();
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let (origin, place, epoch, idle) = (link.origin, link.by.place, link.epoch, link.idle);
        self.first_byte(id);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.thing.served += 1;
        link.closes = None;
        let (thing, request) = (link.thing, link.request.take());
        if let Some(request) = request.and_then(|request| self.requests.remove(&request)) {
            self.tally.last_response = self.now;
            self.tally.response_times.push(self.now - request.called);
        }
        if let Some(left) = &mut self.setup.held {
            if *left > 0 {
                *left -= 1;
                self.call(origin, false);
            }
            return;
        }
        let (server, now_epoch) = self.server(origin, sent);
        if self.hears_the_server() {
            self.hear(id, &server);
        }
        if server.closes_after(thing.served) || now_epoch > epoch {
            self.tally.said_close += 1;
            self.event(origin, |plan, now, fx| {
                plan.said_close(place, id, thing.served, true, now, fx);
            });
            self.plan.leave(place, id);
            self.close(id, self.setup.rtt);
            return;
        }
        let closes = self.closing_time(id, sent, false);
        self.set_closing(id, closes, server.hidden);
        self.set_state(id, State::Idle);
        self.event(origin, |plan, now, fx| {
            plan.put_back(place, thing, now, idle, now, fx);
        });
    }

    /// What a response announces.
    fn hear(&mut self, id: u64, server: &Server) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let (origin, place, count) = (link.origin, link.by.place, link.thing.served);
        let idle = server.announced_idle();
        let idle = idle.filter(|idle| link.announced.replace(*idle) != Some(*idle));
        let cap = server.announced_max(count);
        let cap = cap.map(|max| link.countdown.read(max, count));
        let cap = cap.filter(|cap| link.announced_cap.replace(*cap) != Some(*cap));
        if let Some(idle) = idle {
            self.event(origin, |plan, _, fx| plan.announced_idle(place, idle, fx));
        }
        if let Some(cap) = cap {
            self.event(origin, |plan, _, fx| plan.announced_cap(place, cap, fx));
        }
    }

    // A connection and its end.

    fn set_state(&mut self, id: u64, state: State) {
        if let Some(link) = self.links.get_mut(&id) {
            self.idle += usize::from(state == State::Idle);
            self.idle -= usize::from(link.state == State::Idle);
            link.state = state;
        }
    }

    /// The server closes a connection then, if no request comes before.
    fn set_closing(&mut self, id: u64, closes: Option<Time>, hidden: Duration) {
        let fin = closes.map(|closes| closes + hidden + self.one_way() + LAG);
        if let Some(link) = self.links.get_mut(&id) {
            link.closes = closes;
            link.fin = fin;
            // One event for each connection is enough, if it does not come too late.
            if let Some(fin) = fin
                && link.looks.is_none_or(|looks| fin < looks)
            {
                link.looks = Some(fin);
                self.schedule_at(fin, Event::Fin(id));
            }
        }
    }

    fn fin_arrives(&mut self, id: u64) {
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if link.looks != Some(now) {
            return;
        }
        link.looks = None;
        let (fin, state) = (link.fin, link.state);
        let (origin, place) = (link.origin, link.by.place);
        match fin {
            Some(fin) if fin > now => {
                link.looks = Some(fin);
                self.schedule_at(fin, Event::Fin(id));
            }
            Some(_) if state == State::Idle => {
                self.tally.server_closes += 1;
                let removed = self.event(origin, |plan, now, fx| plan.remove(place, id, now, fx));
                assert!(removed.is_some(), "an idle connection is on the shelf");
                self.close(id, Duration::ZERO);
            }
            _ => {}
        }
    }

    /// The client closes a connection, and has its seat back when the server has closed too.
    fn close(&mut self, id: u64, after: Duration) {
        self.no_proof(id);
        self.set_state(id, State::Closing);
        if let Some(link) = self.links.get_mut(&id) {
            link.fin = None;
        }
        self.schedule(after, Event::SeatFreed(id));
    }

    fn free_seat(&mut self, id: u64) {
        if let Some(link) = self.links.remove(&id) {
            let place = link.by.place;
            self.event(link.origin, |plan, _, fx| {
                plan.seat_freed(place, Some(id), fx)
            });
        }
    }

    /// As `pool/keeper.rs`.
    fn look_at_the_clock(&mut self, id: u64) {
        let Some(link) = self
            .links
            .get(&id)
            .filter(|link| link.state != State::Closing)
        else {
            return;
        };
        let (place, now) = (link.by.place, self.stamp());
        match self.plan.expire(place, id, now) {
            Expiry::Due(..) => self.close(id, self.setup.rtt),
            Expiry::At(at) => {
                let at = at.saturating_duration_since(self.base.at);
                self.schedule_at(at, Event::Keeper(id));
            }
            Expiry::NotIdle => self.schedule(self.patience(), Event::Keeper(id)),
        }
    }

    fn patience(&self) -> Duration {
        let idle = self.setup.idle_timeout.unwrap_or(Duration::MAX);
        idle.min(self.setup.lifetime)
    }

    // A dial: the handshakes of TCP and TLS.

    fn dial(&mut self, origin: u32, by: Dialer) {
        self.next += 1;
        let id = self.next;
        let thing = Thing {
            id,
            served: 0,
            ends: self.base.at,
        };
        let link = Link {
            origin,
            by,
            state: State::Dialing,
            began: self.now,
            thing,
            has_lost: false,
            is_connected: false,
            proof: Proof::Over,
            is_established: false,
            is_accepted: false,
            sent: Data::Nothing,
            is_delivered: true,
            segment: 0,
            epoch: 0,
            closes: None,
            fin: None,
            looks: None,
            request: None,
            idle: None,
            announced: None,
            countdown: Countdown::default(),
            announced_cap: None,
            call: None,
        };
        self.links.insert(id, link);
        if self.plan.enter(by, self.stamp()) {
            return self.at_the_gate(id, &Word::Begin);
        }
        if let Some(owner) = self.requests.get_mut(&by.ticket) {
            owner.at_gate = Some(id);
        }
        self.event(origin, |plan, now, fx| plan.knock(by, id, now, fx));
    }

    /// The dial of a request that was served by a connection that came back, before it got through the gate.
    fn give_up(&mut self, dial: Option<u64>) {
        let Some(&Link { origin, by, .. }) = dial.and_then(|id| self.links.get(&id)) else {
            return;
        };
        self.tally.on_path_dials -= 1;
        self.event(origin, |plan, now, fx| plan.dial_failed(by, None, now, fx));
        dial.into_iter().for_each(|id| self.free_seat(id));
    }

    /// A dial hears that it may connect, or when to call.
    fn at_the_gate(&mut self, id: u64, word: &Word<Thing>) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if let Word::Call(at) = word {
            let at = at.saturating_duration_since(self.base.at);
            link.call = Some(at);
            return self.schedule_at(at, Event::Call(id));
        }
        let ticket = link.by.ticket;
        link.call = None;
        link.began = self.now;
        if let Some(owner) = self.requests.get_mut(&ticket) {
            owner.at_gate = None;
        }
        self.send_packet(Event::Syn(id));
        self.set_timer(SYN_REPEATED, Event::SynTimer(id, 1));
        if self.may_fail() {
            self.schedule(ATTEMPT_DELAY, Event::Repeat(id));
        }
    }

    fn dialing(&self, id: u64) -> Option<&Link> {
        self.links.get(&id).filter(|link| !link.is_connected)
    }

    fn repeat_syn(&mut self, id: u64, times: u32) {
        if self.dialing(id).is_some() {
            self.note_loss(id);
            self.send_packet(Event::Syn(id));
            self.set_timer(SYN_REPEATED * (1 << times), Event::SynTimer(id, times + 1));
        }
    }

    /// A dial looks at the clock: has it taken longer than handshakes do there?
    fn second_attempt(&mut self, id: u64) {
        let Some(&Link {
            origin, by, began, ..
        }) = self.dialing(id)
        else {
            return;
        };
        let handshake = self.handshakes.get(&origin).copied();
        let patience = handshake.map(|took| ATTEMPT_DELAY.max(4 * took));
        match (handshake, patience) {
            (Some(handshake), Some(patience)) if self.now >= began + patience => {
                self.event(origin, |plan, now, fx| {
                    plan.dial_lost(by.place, by.dial, now, fx);
                });
                if handshake <= NEAR {
                    if let Some(link) = self.links.get_mut(&id) {
                        // What it takes is measured from here.
                        link.began = self.now;
                    }
                    self.send_packet(Event::Syn(id));
                }
            }
            _ => self.schedule(ATTEMPT_DELAY, Event::Repeat(id)),
        }
    }

    fn note_loss(&mut self, id: u64) {
        if let Some(link) = self.links.get_mut(&id) {
            link.has_lost = true;
        }
    }

    /// A SYN at the server.
    fn syn_arrives(&mut self, id: u64) {
        let Some(&Link { origin, .. }) = self.dialing(id) else {
            return;
        };
        if self.is_full(origin) {
            self.tally.overflows += 1;
            return;
        }
        if !self.is_lost() {
            self.schedule(self.one_way(), Event::SynAck(id));
        }
        if self.may_fail() {
            self.set_timer(SYN_REPEATED, Event::SynAckTimer(id, 1));
        }
    }

    /// Whether a handshake can take more than a round trip.
    fn may_fail(&self) -> bool {
        self.setup.accepts.backlog.is_some() || self.setup.loss > 0.0
    }

    fn repeat_syn_ack(&mut self, id: u64, times: u32) {
        let is_open = self.links.get(&id).is_some_and(|link| !link.is_established);
        if is_open && times <= SYN_ACKS_REPEATED {
            if !self.is_lost() {
                self.schedule(self.one_way(), Event::SynAck(id));
            }
            self.set_timer(
                SYN_REPEATED * (1 << times),
                Event::SynAckTimer(id, times + 1),
            );
        }
    }

    fn syn_ack_arrives(&mut self, id: u64) {
        match self.links.get(&id) {
            // Its end of the handshake again, without data.
            Some(link) if link.is_connected => self.send_packet(Event::Segment(id, 0)),
            _ => self.connected(id),
        }
    }

    /// Linux takes one more than the backlog.
    fn is_full(&self, origin: u32) -> bool {
        let waiting = self
            .queues
            .get(&origin)
            .map_or(0, |queue| queue.links.len());
        self.setup
            .accepts
            .backlog
            .is_some_and(|backlog| waiting > backlog)
    }

    fn connected(&mut self, id: u64) {
        let tls = self.setup.tls;
        let now = self.now;
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.is_connected) else {
            return;
        };
        link.is_connected = true;
        let (origin, Dialer { place, dial, .. }) = (link.origin, link.by);
        let took = now - link.began;
        if link.has_lost {
            self.event(origin, |plan, now, fx| plan.dial_lost(place, dial, now, fx));
        } else {
            self.handshakes.insert(origin, took);
            self.event(origin, |plan, now, fx| {
                plan.connected(place, dial, took, now, fx);
            });
        }
        if tls {
            self.send(id, Data::Hello);
            return;
        }
        self.opened(id, false);
        let waits = self
            .links
            .get(&id)
            .is_some_and(|link| link.sent == Data::Nothing);
        if waits {
            // Nobody had a request for it: the end of the handshake goes alone.
            self.send(id, Data::Nothing);
        }
    }

    /// The dial has brought a connection.
    fn opened(&mut self, id: u64, is_proven: bool) {
        let lifetime = self.setup.lifetime.mul_f64(0.9 + 0.2 * self.rng.f64());
        let ends = self.base.at + self.now + lifetime;
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.thing.ends = ends;
        let (thing, by, origin) = (link.thing, link.by, link.origin);
        if is_proven && link.has_lost {
            // In the TLS handshake, perhaps.
            self.event(origin, |plan, now, fx| {
                plan.dial_lost(by.place, by.dial, now, fx);
            });
        }
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if !is_proven {
            link.proof = Proof::Wanted;
            self.schedule(FIRST_REPEAT, Event::ProofDue(id, false));
            self.schedule(PROOF_PATIENCE, Event::ProofDue(id, true));
        }
        let closes = self.closing_time(id, now, true);
        let (server, epoch) = self.server(origin, now);
        if let Some(link) = self.links.get_mut(&id) {
            link.epoch = epoch;
        }
        self.set_closing(id, closes, server.hidden);
        self.schedule(self.patience(), Event::Keeper(id));
        self.set_state(id, State::Idle);
        self.event(origin, |plan, now, fx| {
            plan.dialed(by, thing, is_proven, now, fx);
        });
    }

    fn ask_for_proof(&mut self, id: u64, is_last: bool) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        if link.proof == Proof::Wanted && (is_last || link.has_lost) {
            self.end_proof(id, false);
        }
    }

    fn first_byte(&mut self, id: u64) {
        let wanted = |link: &Link| link.proof == Proof::Wanted;
        if self.links.get(&id).is_some_and(wanted) {
            self.end_proof(id, true);
        }
    }

    fn no_proof(&mut self, id: u64) {
        if let Some(link) = self.links.get_mut(&id)
            && link.proof == Proof::Wanted
        {
            link.proof = Proof::Over;
            let (origin, Dialer { place, dial, .. }) = (link.origin, link.by);
            self.event(origin, |plan, now, fx| {
                plan.dial_ended(place, dial, now, fx)
            });
        }
    }

    fn end_proof(&mut self, id: u64, is_proven: bool) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.proof = Proof::Over;
        let (has_lost, origin) = (link.has_lost, link.origin);
        let Dialer { place, dial, .. } = link.by;
        self.event(origin, |plan, now, fx| match (has_lost, is_proven) {
            (true, _) => plan.dial_lost(place, dial, now, fx),
            (false, true) => plan.proven(place, dial, now, fx),
            (false, false) => plan.dial_ended(place, dial, now, fx),
        });
    }

    // Data on its way to the server.

    fn send(&mut self, id: u64, data: Data) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.sent = data;
        link.is_delivered = false;
        link.segment += 1;
        let (segment, is_established) = (link.segment, link.is_established);
        self.send_packet(Event::Segment(id, segment));
        // Otherwise it cannot be lost.
        let may_be_lost = self.setup.loss > 0.0 || (!is_established && self.may_fail());
        if may_be_lost && data != Data::Nothing {
            self.set_timer(REPEATED + self.setup.rtt, Event::DataTimer(id, segment, 1));
        }
    }

    fn repeat_data(&mut self, id: u64, segment: u64, times: u32) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        if link.segment != segment || link.is_delivered {
            return;
        }
        self.note_loss(id);
        self.send_packet(Event::Segment(id, segment));
        let first = REPEATED + self.setup.rtt;
        self.set_timer(
            first * (1 << times.min(8)),
            Event::DataTimer(id, segment, times + 1),
        );
    }

    fn segment_arrives(&mut self, id: u64, segment: u64) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let origin = link.origin;
        if !link.is_established {
            if self.is_full(origin) {
                self.tally.overflows += 1;
                return;
            }
            if let Some(link) = self.links.get_mut(&id) {
                link.is_established = true;
            }
            if self.setup.accepts.backlog.is_some() {
                self.queues.entry(origin).or_default().links.push_back(id);
                self.accept(origin);
            } else if let Some(link) = self.links.get_mut(&id) {
                link.is_accepted = true;
            }
        }
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if link.segment == segment && !link.is_delivered {
            link.is_delivered = true;
            if link.is_accepted {
                self.serve(id);
            }
        }
    }

    /// The server takes the next of those that wait, if it is not at one.
    fn accept(&mut self, origin: u32) {
        let Accepts { takes, stalls, .. } = self.setup.accepts;
        let Some(queue) = self.queues.get_mut(&origin) else {
            return;
        };
        if queue.is_busy {
            return;
        }
        let Some(id) = queue.links.pop_front() else {
            return;
        };
        queue.is_busy = true;
        let stall = match stalls && self.rng.f64() < 0.01 {
            true => Duration::from_millis(10) + Duration::from_millis(40).mul_f64(self.rng.f64()),
            false => Duration::ZERO,
        };
        self.schedule(takes + stall, Event::Accept(origin));
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.is_accepted = true;
        if link.is_delivered {
            self.serve(id);
        }
    }

    /// The server has what the client has sent, and answers.
    fn serve(&mut self, id: u64) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let (takes, answer) = match link.sent {
            Data::Nothing => return,
            Data::Hello => (SIGNATURE, Event::HelloDone(id)),
            Data::Request => (self.setup.service.draw(&mut self.rng), Event::Response(id)),
        };
        // A lost answer is repeated, and so is what it would have acknowledged.
        let repeated = match self.is_lost() {
            true => REPEATED + self.setup.rtt,
            false => Duration::ZERO,
        };
        if repeated > Duration::ZERO {
            self.note_loss(id);
        }
        self.schedule(takes + repeated + self.one_way(), answer);
    }
}
