//! The plan against a model that keeps a plain list of connections and of those who wait.

use proptest::prelude::*;

use super::*;
use crate::clock::stamp;

/// A connection as the plan sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Thing {
    id: u64,
    served: u32,
    ends: Option<Instant>,
}

impl Item for Thing {
    fn id(&self) -> u64 {
        self.id
    }

    fn over(&self, now: Stamp) -> Option<CloseReason> {
        let is_over = self.ends.is_some_and(|end| now.at >= end);
        is_over.then_some(CloseReason::Lifetime)
    }

    fn ends(&self) -> Option<Instant> {
        self.ends
    }

    fn served(&self) -> u32 {
        self.served
    }

    fn most(&self) -> Option<u32> {
        None
    }
}

const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Dialing,
    Busy,
    Idle,
    Closing,
}

/// How far a dial is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Gate {
    /// Its name is being looked up.
    Before,
    Waits,
    Through,
}

#[derive(Clone, Copy, Debug)]
struct Connection {
    origin: u8,
    thing: Thing,
    by: Dialer,
    gate: Gate,
    place: Place,
    state: State,
    since: Stamp,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    origin: u8,
    ticket: Ticket,
    need: Need,
    since: Stamp,
    dials: bool,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Ask {
        origin: u8,
        need: Need,
    },
    /// The server has sent something by then, or has not.
    DialDone(usize, bool),
    DialFailed(usize),
    Knock(usize),
    Connected(usize),
    FirstByte(usize),
    /// A dial, or what it has opened, has lost a packet.
    Lost(usize),
    /// What a dial has opened has waited too long for the first byte.
    SaysNothing(usize),
    /// The response says close.
    SaidClose(usize),
    /// The response has ended and the connection can be used again.
    End(usize),
    /// A lease is released although nothing was sent.
    Release(usize),
    /// An exchange is dropped or has failed.
    Drop(usize),
    /// The other side has closed too.
    Gone(usize),
    /// An idle connection ends by itself.
    Ended(usize),
    /// An idle connection's own timer fires.
    Timer(usize),
    Cancel(usize),
    /// Milliseconds.
    Tick(u64),
    Sweep(u8),
    Close,
}

fn need() -> impl Strategy<Value = Need> {
    prop_oneof![5 => Just(Need::Any), 3 => Just(Need::Young), 2 => Just(Need::Fresh)]
}

fn any_bool() -> impl Strategy<Value = bool> {
    prop_oneof![Just(true), Just(false)]
}

fn event() -> impl Strategy<Value = Event> {
    let any = 0usize..64;
    prop_oneof![
        12 => (0u8..4, need()).prop_map(|(origin, need)| Event::Ask { origin, need }),
        8 => (any.clone(), any_bool()).prop_map(|(at, proven)| Event::DialDone(at, proven)),
        8 => any.clone().prop_map(Event::Knock),
        2 => any.clone().prop_map(Event::Connected),
        3 => any.clone().prop_map(Event::FirstByte),
        1 => any.clone().prop_map(Event::Lost),
        1 => any.clone().prop_map(Event::SaysNothing),
        2 => any.clone().prop_map(Event::SaidClose),
        2 => any.clone().prop_map(Event::DialFailed),
        8 => any.clone().prop_map(Event::End),
        2 => any.clone().prop_map(Event::Release),
        3 => any.clone().prop_map(Event::Drop),
        6 => any.clone().prop_map(Event::Gone),
        1 => any.clone().prop_map(Event::Ended),
        1 => any.clone().prop_map(Event::Timer),
        3 => any.prop_map(Event::Cancel),
        2 => (0u64..20_000).prop_map(Event::Tick),
        2 => (0u64..4).prop_map(Event::Tick),
        1 => (0u8..4).prop_map(Event::Sweep),
    ]
}

struct Model {
    plan: Plan<u8, Thing, Ticket>,
    limits: Limits,
    now: Stamp,
    connections: Vec<Connection>,
    line: Vec<Waiting>,
    next_ticket: Ticket,
    next_id: u64,
    lifetime: Option<Duration>,
    closed: bool,
    /// The connection that an event gives back at this moment.
    in_hand: Option<u64>,
    /// Dials whose connections are open and on which the server has sent nothing.
    unproven: Vec<Dialer>,
    /// Which dial was told to call, and when.
    calls: Vec<(Dialer, Instant)>,
}

impl Model {
    fn new(limits: Limits, lifetime: Option<Duration>) -> Self {
        Model {
            plan: Plan::new(limits, Some(IDLE_TIMEOUT)),
            limits,
            now: stamp(),
            connections: Vec::new(),
            line: Vec::new(),
            next_ticket: 1,
            next_id: 1,
            lifetime,
            closed: false,
            in_hand: None,
            unproven: Vec::new(),
            calls: Vec::new(),
        }
    }

    fn pick(&self, state: State, at: usize) -> Option<usize> {
        let found: Vec<_> = (0..self.connections.len())
            .filter(|&at| self.connections[at].state == state)
            .collect();
        (!found.is_empty()).then(|| found[at % found.len()])
    }

    /// A dial that is as far as that.
    fn pick_dial(&self, gate: Gate, at: usize) -> Option<usize> {
        let found: Vec<_> = (0..self.connections.len())
            .filter(|&at| {
                let connection = &self.connections[at];
                (connection.state, connection.gate) == (State::Dialing, gate)
            })
            .collect();
        (!found.is_empty()).then(|| found[at % found.len()])
    }

    fn by_id(&mut self, id: u64) -> &mut Connection {
        let found = self
            .connections
            .iter_mut()
            .find(|connection| connection.thing.id == id);
        found.expect("a connection that exists")
    }

    fn step(&mut self, event: Event) {
        let mut fx = Effects::none();
        match event {
            Event::Ask { origin, need } => self.ask(origin, need, &mut fx),
            Event::DialDone(at, is_proven) => {
                let Some(at) = self.pick_dial(Gate::Through, at) else {
                    return;
                };
                let now = self.now;
                let ends = self.lifetime.map(|lifetime| now.at + lifetime);
                let connection = &mut self.connections[at];
                connection.thing.ends = ends;
                connection.since = now;
                let Connection { thing, by, .. } = *connection;
                if !is_proven {
                    self.unproven.push(by);
                }
                self.in_hand = Some(thing.id);
                self.plan.dialed(by, thing, is_proven, now, &mut fx);
            }
            Event::DialFailed(at) => {
                let Some(at) = self.pick(State::Dialing, at) else {
                    return;
                };
                let Connection { by, .. } = self.connections[at];
                // Its own request hears of it, and no other.
                self.line.retain(|waiting| waiting.ticket != by.ticket);
                self.connections[at].state = State::Closing;
                self.connections[at].gate = Gate::Through;
                self.plan.dial_failed(by, None, self.now, &mut fx);
            }
            Event::Knock(at) => {
                let Some(at) = self.pick_dial(Gate::Before, at) else {
                    return;
                };
                let by = self.connections[at].by;
                if self.plan.enter(by, self.now) {
                    self.connections[at].gate = Gate::Through;
                    let mut others = self.connections.iter();
                    assert!(
                        !others.any(|other| (other.place, other.gate) == (by.place, Gate::Waits)),
                        "let past those who wait"
                    );
                } else {
                    self.connections[at].gate = Gate::Waits;
                    self.plan.knock(by, by.dial, self.now, &mut fx);
                }
            }
            Event::Connected(at) => {
                if let Some(at) = self.pick_dial(Gate::Through, at) {
                    let Dialer { place, dial, .. } = self.connections[at].by;
                    let took = Duration::from_millis(1);
                    self.plan.connected(place, dial, took, self.now, &mut fx);
                }
            }
            Event::FirstByte(at) => {
                if !self.unproven.is_empty() {
                    let at = at % self.unproven.len();
                    let Dialer { place, dial, .. } = self.unproven.swap_remove(at);
                    self.plan.proven(place, dial, self.now, &mut fx);
                }
            }
            Event::Lost(at) => {
                let dialing = self.pick_dial(Gate::Through, at);
                let by = dialing.map(|at| self.connections[at].by);
                let by = by
                    .or_else(|| (!self.unproven.is_empty()).then(|| self.unproven.swap_remove(0)));
                if let Some(Dialer { place, dial, .. }) = by {
                    self.plan.dial_lost(place, dial, self.now, &mut fx);
                }
            }
            Event::SaysNothing(at) => {
                if !self.unproven.is_empty() {
                    let at = at % self.unproven.len();
                    let Dialer { place, dial, .. } = self.unproven.swap_remove(at);
                    self.plan.dial_ended(place, dial, self.now, &mut fx);
                }
            }
            Event::SaidClose(at) => {
                let Some(at) = self.pick(State::Busy, at) else {
                    return;
                };
                let Connection { place, thing, .. } = self.connections[at];
                let count = thing.served + 1;
                self.plan
                    .said_close(place, thing.id, count, true, self.now, &mut fx);
            }
            Event::End(at) | Event::Release(at) => {
                let Some(at) = self.pick(State::Busy, at) else {
                    return;
                };
                let connection = &mut self.connections[at];
                if matches!(event, Event::End(_)) {
                    connection.thing.served += 1;
                    connection.since = self.now;
                }
                let Connection {
                    thing,
                    place,
                    since,
                    ..
                } = *connection;
                self.in_hand = Some(thing.id);
                let survived = matches!(event, Event::End(_)).then_some(Duration::from_secs(3));
                self.plan
                    .put_back(place, thing, since, survived, self.now, &mut fx);
            }
            Event::Drop(at) => {
                let Some(at) = self.pick(State::Busy, at) else {
                    return;
                };
                self.connections[at].state = State::Closing;
                let Connection { place, thing, .. } = self.connections[at];
                self.plan.leave(place, thing.id);
            }
            Event::Gone(at) => {
                let Some(at) = self.pick(State::Closing, at) else {
                    return;
                };
                let gone = self.connections.remove(at);
                let id = Some(gone.thing.id);
                self.plan.seat_freed(gone.place, id, &mut fx);
            }
            Event::Ended(at) => {
                let Some(at) = self.pick(State::Idle, at) else {
                    return;
                };
                let Connection { place, thing, .. } = self.connections[at];
                let removed = self.plan.remove(place, thing.id, self.now, &mut fx);
                assert_eq!(removed, Some(thing));
                self.connections[at].state = State::Closing;
            }
            Event::Timer(at) => {
                let Some(at) = self.pick(State::Idle, at) else {
                    return;
                };
                let Connection {
                    place,
                    thing,
                    since,
                    ..
                } = self.connections[at];
                let is_over =
                    since.until(self.now) >= IDLE_TIMEOUT || thing.over(self.now).is_some();
                let expiry = self.plan.expire(place, thing.id, self.now);
                assert_eq!(matches!(expiry, Expiry::Due(..)), is_over);
                if is_over {
                    self.connections[at].state = State::Closing;
                }
            }
            Event::Cancel(at) => {
                if self.line.is_empty() {
                    return;
                }
                let at = at % self.line.len();
                let waiting = self.line.remove(at);
                let place = self.plan.places[&waiting.origin];
                self.plan.cancel(place, waiting.ticket, &mut fx);
            }
            Event::Tick(ms) => {
                let time = Duration::from_millis(ms);
                self.now = Stamp {
                    at: self.now.at + time,
                    wall: self.now.wall + time,
                };
            }
            Event::Sweep(origin) => self.plan.sweep(&origin, self.now, &mut fx),
            Event::Close => {
                self.closed = true;
                self.plan.close(&mut fx);
            }
        }
        self.carry_out(fx);
        if let Some(id) = self.in_hand.take() {
            // Neither given to anybody nor closed. Were it lost, the gauges would not agree.
            self.by_id(id).state = State::Idle;
        }
        self.call_if_due();
        self.check();
    }

    /// Dials that were told to call do so when it is time.
    fn call_if_due(&mut self) {
        loop {
            let waits = |by: &Dialer| {
                let mut all = self.connections.iter();
                all.any(|connection| connection.by == *by && connection.gate == Gate::Waits)
            };
            let calls = self.calls.iter().copied();
            self.calls = calls.filter(|(by, _)| waits(by)).collect();
            let due = self.calls.iter().position(|(_, at)| *at <= self.now.at);
            let Some(due) = due else {
                return;
            };
            let (by, _) = self.calls.swap_remove(due);
            let mut fx = Effects::none();
            self.plan.call(by, self.now, &mut fx);
            self.carry_out(fx);
        }
    }

    fn ask(&mut self, origin: u8, need: Need, fx: &mut Effects<u8, Thing, Ticket>) {
        let trusted = self.trusted(origin);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let asks = Asks {
            who: ticket,
            ticket,
            need,
            again: false,
        };
        let waiting = Waiting {
            origin,
            ticket,
            need,
            since: self.now,
            dials: false,
        };
        match self.plan.ask(&origin, asks, self.now, fx) {
            Answer::Reuse(place, thing, since) => {
                assert!(need != Need::Fresh && !self.closed);
                let trusted = if thing.is_unused() {
                    UNUSED_TRUSTED
                } else {
                    trusted
                };
                let is_young = since.until(self.now) < trusted;
                assert!(need != Need::Young || is_young, "too old");
                let now = self.now;
                let idle = self.connections.iter().filter(|connection| {
                    (connection.origin, connection.state) == (origin, State::Idle)
                });
                let newest = idle.map(|connection| connection.since.at).max();
                let connection = self.by_id(thing.id);
                assert_eq!((connection.state, connection.place), (State::Idle, place));
                assert!(since.until(now) < IDLE_TIMEOUT && thing.over(now).is_none());
                // Others that were newer were over, and are among the effects.
                assert!(newest >= Some(since.at));
                connection.state = State::Busy;
            }
            Answer::InLine(_) => self.line.push(waiting),
            Answer::Overloaded => {
                let others = self
                    .line
                    .iter()
                    .filter(|waiting| waiting.origin == origin && !waiting.dials);
                assert!(others.count() >= self.limits.waiters_per_origin);
            }
            Answer::Closed => assert!(self.closed),
        }
    }

    /// Does what a pool does with the effects, and checks that each of them is allowed.
    fn carry_out(&mut self, fx: Effects<u8, Thing, Ticket>) {
        if let Some((place, dial)) = fx.spare {
            assert!(!self.closed);
            let origin = self.plan.origin(place).expect("one in use").key;
            let waits = |waiting: &Waiting| waiting.origin == origin && !waiting.dials;
            assert!(
                !self.line.iter().any(waits),
                "dials ahead while somebody waits"
            );
            self.begin_dial(
                origin,
                Dialer {
                    place,
                    ticket: NOBODY,
                    dial,
                },
            );
        }
        for (thing, _) in fx.closed {
            let in_hand = self.in_hand.take_if(|id| *id == thing.id).is_some();
            let connection = self.by_id(thing.id);
            assert!(
                in_hand || connection.state == State::Idle,
                "closed while in use"
            );
            connection.state = State::Closing;
        }
        for Told {
            who,
            place,
            ticket,
            word,
        } in fx.told
        {
            if ticket == NOBODY {
                self.at_the_gate(who, place, &word);
                continue;
            }
            assert_eq!(who, ticket);
            let at = self
                .line
                .iter()
                .position(|waiting| waiting.ticket == ticket);
            let at = at.expect("told somebody who is not in line");
            match word {
                Word::Connection(thing, since) => {
                    let reuse = self.limits.idle > 0 && self.limits.idle_per_origin > 0;
                    assert!(reuse || thing.is_unused(), "reused although that is off");
                    let waiting = self.line.remove(at);
                    let in_hand = self.in_hand.take();
                    assert_eq!(in_hand, Some(thing.id), "a connection out of nowhere");
                    let is_own = since.is_none();
                    let seats = |origin: Option<u8>| {
                        let own = |connection: &&Connection| {
                            origin == Some(connection.origin) || origin.is_none()
                        };
                        self.connections.iter().filter(own).count()
                    };
                    let is_full = seats(None) >= self.limits.connections
                        || seats(Some(waiting.origin)) >= self.limits.connections_per_origin;
                    let earlier = self.line.iter().any(|other| {
                        other.origin == waiting.origin
                            && other.ticket < ticket
                            // Who cannot use it and has no dial needs the seat.
                            && (self.will_do(other, &thing, since) || (!other.dials && is_full))
                    });
                    assert!(is_own || !earlier, "served out of turn");
                    assert!(self.will_do(&waiting, &thing, since), "will not do");
                    let connection = self.by_id(thing.id);
                    assert_eq!(connection.origin, waiting.origin);
                    assert!(!is_own || connection.by.ticket == ticket);
                    connection.state = State::Busy;
                }
                Word::Dial(dial) => {
                    let waiting = self.line[at];
                    assert!(!waiting.dials, "a second dial for one request");
                    let is_passed_over = self.line.iter().any(|other| {
                        other.ticket < ticket && !other.dials && other.origin == waiting.origin
                    });
                    assert!(!is_passed_over, "dials out of turn");
                    self.line[at].dials = true;
                    let by = Dialer {
                        place,
                        ticket,
                        dial,
                    };
                    self.begin_dial(waiting.origin, by);
                }
                Word::Begin | Word::Call(_) => panic!("told to somebody in line"),
                Word::Closed => {
                    assert!(self.closed);
                    self.line.remove(at);
                }
            }
        }
    }

    /// A dial hears that it may connect, or when to call.
    fn at_the_gate(&mut self, dial: DialId, place: Place, word: &Word<Thing>) {
        let earlier = self
            .connections
            .iter()
            .any(|other| (other.place, other.gate) == (place, Gate::Waits) && other.by.dial < dial);
        assert!(!earlier, "let through out of turn");
        let mut all = self.connections.iter_mut();
        let found = all.find(|connection| connection.by.dial == dial);
        let connection = found.expect("a dial that exists");
        assert_eq!((connection.gate, connection.place), (Gate::Waits, place));
        match word {
            Word::Begin => connection.gate = Gate::Through,
            Word::Call(at) => self.calls.push((connection.by, *at)),
            _ => panic!("told to a dial"),
        }
    }

    fn begin_dial(&mut self, origin: u8, by: Dialer) {
        let thing = Thing {
            id: self.next_id,
            served: 0,
            ends: None,
        };
        self.next_id += 1;
        self.connections.push(Connection {
            origin,
            thing,
            by,
            gate: Gate::Before,
            place: by.place,
            state: State::Dialing,
            since: self.now,
        });
    }

    fn trusted(&self, origin: u8) -> Duration {
        let learnt = self.plan.learnt(&origin).cloned();
        learnt.unwrap_or_default().idle.trusted()
    }

    fn will_do(&self, waiting: &Waiting, thing: &Thing, since: Option<Stamp>) -> bool {
        let trusted = match thing.is_unused() {
            true => UNUSED_TRUSTED,
            false => self.trusted(waiting.origin),
        };
        match waiting.need {
            Need::Any => true,
            Need::Young => since.is_none_or(|since| since.until(self.now) < trusted),
            Need::Fresh => thing.is_unused(),
        }
    }

    fn count(&self, origin: Option<u8>, state: State) -> usize {
        let counted = self.connections.iter().filter(|connection| {
            origin.is_none_or(|origin| connection.origin == origin) && connection.state == state
        });
        counted.count()
    }

    fn check(&self) {
        let limits = &self.limits;
        let surveys = self.plan.survey();
        let mut wanted = 0;
        for origin in 0..4 {
            let survey = surveys.iter().find(|survey| survey.key == origin);
            let gauges = survey.map(|survey| survey.gauges).unwrap_or_default();
            let of = |state| self.count(Some(origin), state);
            let line = || self.line.iter().filter(|waiting| waiting.origin == origin);
            let expected = Gauges {
                idle: of(State::Idle),
                busy: of(State::Busy),
                dialing: of(State::Dialing),
                closing: of(State::Closing),
                waiting: line().count(),
            };
            assert_eq!(gauges, expected, "origin {origin}");
            assert_eq!(
                survey.is_some(),
                expected != Gauges::default(),
                "kept for nothing"
            );
            let seats = gauges.idle + gauges.busy + gauges.dialing + gauges.closing;
            assert!(seats <= limits.connections_per_origin);
            assert!(gauges.dialing <= limits.dials_per_origin);
            assert!(gauges.idle <= limits.idle_per_origin);
            let oldest = line().map(|waiting| waiting.since.at).min();
            assert_eq!(
                survey.and_then(|survey| survey.longest_wait),
                oldest,
                "the longest wait"
            );

            let undialed = line().filter(|waiting| !waiting.dials);
            let undialed: Vec<_> = undialed.collect();
            assert!(undialed.len() <= limits.waiters_per_origin);
            let could_use_idle = undialed.iter().any(|waiting| waiting.need == Need::Any);
            assert!(
                !(could_use_idle && gauges.idle > 0),
                "waits beside an idle connection"
            );
            let has_room =
                seats < limits.connections_per_origin && gauges.dialing < limits.dials_per_origin;
            let is_full = self.connections.len() >= limits.connections;
            let spares = self.connections.iter().filter(|connection| {
                (connection.origin, connection.by.ticket, connection.state)
                    == (origin, NOBODY, State::Dialing)
            });
            let spares = spares.count();
            assert!(
                undialed.len() <= spares || !has_room || is_full,
                "waits although it could dial"
            );
            self.check_gate(origin);
            // At a limit, what is idle goes, or is on its way already.
            let blocked_here = undialed.len() > spares && seats >= limits.connections_per_origin;
            assert!(
                !blocked_here || gauges.idle == 0 || gauges.closing > 0,
                "idle ones keep a fresh one waiting"
            );
            if has_room {
                let room = limits.connections_per_origin - seats;
                let room = room.min(limits.dials_per_origin - gauges.dialing);
                wanted += room.min(undialed.len().saturating_sub(spares));
            }
        }
        assert!(
            self.count(None, State::Idle) == 0 || self.count(None, State::Closing) >= wanted,
            "idle ones keep somebody elsewhere waiting"
        );
        assert!(self.connections.len() <= limits.connections);
        assert_eq!(self.plan.seats(), self.connections.len());
        assert!(self.count(None, State::Idle) <= limits.idle);
        if self.closed {
            assert!(self.line.is_empty() && self.count(None, State::Idle) == 0);
        }
    }

    /// Nobody stands at an open gate, and at a closed one somebody knows when to call.
    fn check_gate(&self, origin: u8) {
        let waits = self
            .connections
            .iter()
            .filter(|connection| (connection.origin, connection.gate) == (origin, Gate::Waits));
        let Some(first) = waits
            .map(|connection| connection.by)
            .min_by_key(|by| by.dial)
        else {
            return;
        };
        let learnt = self.plan.learnt(&origin).expect("in use");
        let Leave::At(opens) = learnt.window.leave(self.now.at) else {
            panic!("a dial waits at an open gate");
        };
        let mut calls = self.calls.iter();
        assert!(
            calls.any(|(by, at)| *by == first && *at <= opens),
            "nobody will call when it is time"
        );
    }

    /// Lets everything under way come to its end.
    fn run_out(&mut self) {
        for _ in 0..10_000 {
            if self.pick_dial(Gate::Before, 0).is_some() {
                self.step(Event::Knock(0));
            } else if self.pick_dial(Gate::Through, 0).is_some() {
                self.step(Event::DialDone(0, true));
            } else if self.pick_dial(Gate::Waits, 0).is_some() {
                self.step(Event::Tick(1));
            } else if !self.unproven.is_empty() {
                self.step(Event::FirstByte(0));
            } else if self.pick(State::Busy, 0).is_some() {
                self.step(Event::End(0));
            } else if self.pick(State::Closing, 0).is_some() {
                self.step(Event::Gone(0));
            } else {
                return;
            }
        }
        panic!("it goes on for ever");
    }
}

fn limits() -> impl Strategy<Value = Limits> {
    (
        1usize..12,
        1usize..10,
        0usize..9,
        0usize..6,
        1usize..10,
        0usize..6,
    )
        .prop_map(
            |(connections, per_origin, idle, idle_per_origin, dials, waiters)| Limits {
                connections,
                connections_per_origin: per_origin,
                idle,
                idle_per_origin,
                dials_per_origin: dials,
                waiters_per_origin: if waiters == 5 { usize::MAX } else { waiters },
                dial_window: true,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// dotnet/corefx#32262, aio-libs/aiohttp#4936, urllib3/urllib3#644, golang/go#32336: no limit is
    /// exceeded, nobody starves, no seat is lost, every gauge is exact, after every step.
    #[test]
    fn whatever_happens_the_limits_hold_and_nobody_is_forgotten(
        events in proptest::collection::vec(event(), 0..200),
        limits in limits(),
        lifetime in proptest::option::of(0u64..60),
        closes in proptest::option::of(0usize..200),
    ) {
        let mut model = Model::new(limits, lifetime.map(Duration::from_secs));
        for (at, event) in events.into_iter().enumerate() {
            if closes == Some(at) {
                model.step(Event::Close);
            }
            model.step(event);
        }
        model.run_out();
        prop_assert!(model.line.is_empty(), "somebody waits for ever: {:?}", model.line);
        prop_assert_eq!(model.count(None, State::Idle), model.connections.len());
    }
}

const ONE: Limits = Limits {
    connections: 1,
    connections_per_origin: 1,
    idle: 1,
    idle_per_origin: 1,
    dials_per_origin: 1,
    waiters_per_origin: usize::MAX,
    dial_window: true,
};

/// Room for everything.
const MANY: Limits = Limits {
    connections: 8,
    connections_per_origin: 8,
    idle: 8,
    idle_per_origin: 8,
    dials_per_origin: 8,
    ..ONE
};

fn model(limits: Limits) -> Model {
    Model::new(limits, None)
}

fn ask(origin: u8) -> Event {
    Event::Ask {
        origin,
        need: Need::Any,
    }
}

/// aio-libs/aiohttp#4936: the place is given, not offered; nobody who comes later can take it.
#[test]
fn a_connection_that_comes_back_belongs_to_the_first_in_line_at_once() {
    let mut model = model(ONE);
    for event in [
        ask(0),
        Event::Knock(0),
        Event::DialDone(0, true),
        ask(0),
        Event::End(0),
        ask(0),
    ] {
        model.step(event);
    }
    assert_eq!(model.count(None, State::Busy), 1);
    let waiting: Vec<_> = model.line.iter().map(|waiting| waiting.ticket).collect();
    assert_eq!(waiting, [3], "the second has it, the third waits");
}

/// dotnet/corefx#29410: with reuse off, those in line get connections of their own, and one after the other.
#[test]
fn where_reuse_is_off_a_used_connection_goes_to_nobody_in_line() {
    let mut model = model(Limits {
        idle_per_origin: 0,
        ..ONE
    });
    for event in [
        ask(0),
        Event::Knock(0),
        Event::Knock(0),
        Event::DialDone(0, true),
        ask(0),
        Event::End(0),
    ] {
        model.step(event);
    }
    assert_eq!(model.count(None, State::Closing), 1);
    assert!(!model.line[0].dials, "the seat is still taken");
    model.step(Event::Gone(0));
    assert!(model.line[0].dials);
}

/// dotnet/runtime#60654: a failed dial concerns the request that it was made for.
#[test]
fn a_failed_dial_takes_nobody_but_its_owner_out_of_the_line() {
    let mut model = model(ONE);
    for event in [ask(0), ask(0), Event::DialFailed(0)] {
        model.step(event);
    }
    let waiting: Vec<_> = model.line.iter().map(|waiting| waiting.ticket).collect();
    assert_eq!(waiting, [2]);
    model.step(Event::Gone(0));
    assert!(model.line[0].dials, "and then it is the next one's turn");
}

/// golang/go#66442: who is served by a returned connection leaves a dial behind, which is finished and kept.
#[test]
fn a_dial_whose_owner_was_served_otherwise_is_kept() {
    let two = Limits {
        connections: 2,
        connections_per_origin: 2,
        idle: 2,
        idle_per_origin: 2,
        dials_per_origin: 2,
        ..ONE
    };
    let mut model = model(two);
    for event in [
        ask(0),
        Event::Knock(0),
        Event::Knock(0),
        Event::DialDone(0, true),
        ask(0),
        Event::End(0),
    ] {
        model.step(event);
    }
    assert_eq!(model.count(None, State::Busy), 1);
    assert_eq!(model.count(None, State::Dialing), 1);
    model.step(Event::Knock(0));
    model.step(Event::DialDone(0, true));
    assert_eq!(model.count(None, State::Idle), 1);
}

#[test]
fn at_the_limit_of_all_the_longest_idle_connection_of_any_origin_makes_room() {
    let two = Limits {
        connections: 2,
        idle: 2,
        ..ONE
    };
    let mut model = model(two);
    for origin in [0, 1] {
        for event in [
            ask(origin),
            Event::Knock(0),
            Event::DialDone(0, true),
            Event::End(0),
            Event::Tick(1_000),
        ] {
            model.step(event);
        }
    }
    model.step(ask(2));
    assert_eq!(model.count(Some(0), State::Closing), 1);
    assert_eq!(model.count(Some(1), State::Idle), 1);
    model.step(Event::Gone(0));
    assert_eq!(model.count(Some(2), State::Dialing), 1);
}

#[test]
fn an_origin_without_any_connection_gets_the_next_one_that_an_earlier_line_leaves() {
    let mut model = model(ONE);
    for event in [
        ask(0),
        Event::Knock(0),
        Event::DialDone(0, true),
        ask(1),
        ask(0),
        Event::End(0),
    ] {
        model.step(event);
    }
    assert_eq!(model.count(Some(0), State::Closing), 1);
    model.step(Event::Gone(0));
    assert_eq!(model.count(Some(1), State::Dialing), 1);
}

#[test]
fn an_origin_with_connections_of_its_own_is_given_anothers_only_after_a_while() {
    let two = Limits {
        connections: 2,
        connections_per_origin: 2,
        ..ONE
    };
    for (wait, yields) in [(0, false), (1, true)] {
        let mut model = model(two);
        for event in [
            ask(0),
            Event::Knock(0),
            Event::DialDone(0, true),
            ask(1),
            Event::Knock(0),
            Event::DialDone(0, true),
            ask(1),
            ask(0),
            Event::Tick(1_000 * wait),
        ] {
            model.step(event);
        }
        model.step(Event::End(0)); // that of origin 0
        assert_eq!(
            model.count(Some(0), State::Closing) == 1,
            yields,
            "{wait} s"
        );
    }
}

/// Regular payments with a pause in between: each that dials leaves a connection behind, and what the oldest of them
/// has survived covers the pause soon, whatever its jitter.
#[test]
fn a_regular_pause_is_trusted_after_two_dials() {
    let mut model = model(MANY);
    let unkeyed = Event::Ask {
        origin: 0,
        need: Need::Young,
    };
    for pause in [5, 5, 6, 7, 8, 9] {
        model.step(unkeyed);
        model.step(Event::Knock(0));
        model.step(Event::DialDone(0, true));
        model.step(Event::End(0));
        model.step(Event::Tick(1_000 * pause));
    }
    assert_eq!(model.connections.len(), 3);
}

#[test]
fn more_waiters_than_allowed_are_turned_away_at_once() {
    let bounded = Limits {
        waiters_per_origin: 1,
        ..ONE
    };
    let mut model = model(bounded);
    for _ in 0..3 {
        model.step(ask(0));
    }
    // One dials, one waits.
    assert_eq!(model.line.len(), 2);
}

impl Model {
    fn run(&mut self, events: &[Event]) -> &mut Self {
        for &event in events {
            if matches!(event, Event::DialDone(..)) {
                self.step(Event::Knock(0));
            }
            self.step(event);
        }
        self
    }

    fn dialing(&self) -> usize {
        self.count(None, State::Dialing)
    }

    /// The server announces that its connections carry so many requests.
    fn announce_cap(&mut self, cap: u32) {
        let mut fx = Effects::none();
        self.plan.announced_cap(self.plan.places[&0], cap, &mut fx);
    }
}

/// So many idle connections that have carried one request of four: with the next each of them is near its end.
fn half_used_up(limits: Limits, count: usize) -> Model {
    let mut model = model(limits);
    for event in [ask(0), Event::DialDone(0, true), Event::End(0)] {
        model.run(&vec![event; count]);
    }
    model.announce_cap(4);
    model
}

fn ask_for_fresh() -> Event {
    Event::Ask {
        origin: 0,
        need: Need::Fresh,
    }
}

#[test]
fn a_connection_near_its_end_is_replaced_where_requests_follow_one_another() {
    let mut model = half_used_up(MANY, 1);
    assert_eq!(model.run(&[ask(0)]).dialing(), 1);

    let mut model = half_used_up(MANY, 1);
    let quiet = model.run(&[Event::Tick(5_000), ask(0)]).dialing();
    assert_eq!(quiet, 0, "a quiet origin");
}

#[test]
fn as_many_are_opened_ahead_as_were_in_use_at_a_time_and_end() {
    let mut model = half_used_up(MANY, 1);
    model.run(&[ask(0), Event::DialDone(0, true), Event::End(0)]);
    let asks = [Event::Tick(1), ask(0), Event::End(0)];
    assert_eq!(model.run(&asks).run(&asks).dialing(), 0, "one is enough");
}

#[test]
fn nothing_is_opened_ahead_beyond_a_limit() {
    for limits in [
        Limits {
            connections: 1,
            ..MANY
        },
        Limits {
            connections_per_origin: 1,
            ..MANY
        },
    ] {
        let mut model = half_used_up(limits, 1);
        assert_eq!(model.run(&[ask(0)]).dialing(), 0, "{limits:?}");
    }
    let one_dial = Limits {
        dials_per_origin: 1,
        ..MANY
    };
    let mut model = half_used_up(one_dial, 1);
    assert_eq!(model.run(&[ask_for_fresh(), ask(0)]).dialing(), 1);
}

#[test]
fn nothing_is_opened_ahead_that_could_not_be_kept() {
    for (idle_per_origin, ahead) in [(1, 0), (2, 1)] {
        let mut model = model(Limits {
            idle_per_origin,
            ..MANY
        });
        // One in use for the second time, and an idle one beside it.
        model.run(&[ask(0), Event::DialDone(0, true), Event::End(0), ask(0)]);
        model.run(&[ask(0), Event::DialDone(0, true), Event::End(1)]);
        model.step(Event::SaidClose(0));
        assert_eq!(model.dialing(), ahead, "{idle_per_origin}");
    }
}

#[test]
fn nothing_is_opened_ahead_once_all_handles_are_gone() {
    let mut model = model(MANY);
    model.run(&[ask(0), Event::DialDone(0, true), Event::End(0), ask(0)]);
    let mut fx = Effects::none();
    model.plan.retire(&mut fx);
    assert_eq!(model.run(&[Event::SaidClose(0)]).dialing(), 0);
}

#[test]
fn nothing_is_opened_ahead_where_the_dial_window_is_closed() {
    for (dial_window, dials) in [(true, 5), (false, 6)] {
        let mut model = half_used_up(
            Limits {
                dial_window,
                ..MANY
            },
            1,
        );
        model.run(&[ask_for_fresh(); 5]).run(&[Event::Knock(0); 5]);
        assert_eq!(model.run(&[ask(0)]).dialing(), dials);
    }
}

/// A server that closes after each response keeps none, and one that waits may be in its way.
#[test]
fn a_first_response_that_says_close_opens_nothing_ahead() {
    let mut model = model(MANY);
    model.run(&[
        ask(0),
        ask(0),
        Event::DialDone(0, true),
        Event::DialDone(0, true),
    ]);
    assert_eq!(model.run(&[Event::SaidClose(0)]).dialing(), 0);
}

#[test]
fn dials_ahead_begin_a_millisecond_apart() {
    let mut model = half_used_up(MANY, 2);
    assert_eq!(model.run(&[ask(0), ask(0)]).dialing(), 1);
    let later = [Event::End(0), Event::Tick(1), ask(0)];
    assert_eq!(model.run(&later).dialing(), 2);
}

#[test]
fn a_response_that_says_close_does_not_wait_for_the_dial_before() {
    let mut model = half_used_up(MANY, 2);
    model.run(&[ask(0), ask(0)]);
    assert_eq!(model.run(&[Event::SaidClose(0)]).dialing(), 2);
}

#[test]
fn who_joins_the_line_waits_for_a_dial_ahead_and_the_next_dials() {
    let mut model = half_used_up(MANY, 1);
    model.run(&[ask(0)]);
    assert_eq!(model.run(&[ask(0)]).dialing(), 1);
    assert_eq!(model.run(&[ask(0)]).dialing(), 2);
}

#[test]
fn who_waits_for_a_dial_ahead_dials_when_that_has_failed() {
    let mut model = half_used_up(MANY, 1);
    model.run(&[ask(0), ask(0), Event::DialFailed(0)]);
    assert!(model.line[0].dials);
}

#[test]
fn a_connection_that_is_gone_is_not_counted_as_near_its_end_any_more() {
    for ways_to_end in [
        &[Event::Drop(0)][..],
        &[Event::End(0), Event::Ended(0)],
        &[Event::End(0), Event::Tick(1_000), Event::Timer(0)],
        &[Event::End(0), Event::Tick(1_000), Event::Sweep(0)],
        &[Event::Tick(1_000), Event::End(0)],
    ] {
        let mut model = Model::new(MANY, Some(Duration::from_secs(1)));
        model.run(&[ask(0), Event::DialDone(0, true), Event::End(0)]);
        model.announce_cap(4);
        model.lifetime = None;
        model.run(&[ask(0), Event::DialDone(0, true)]);
        model.run(ways_to_end);
        assert_eq!(model.count(None, State::Closing), 1, "{ways_to_end:?}");
        // The next one comes near its end in turn, and is replaced by one.
        model.run(&[ask(0), Event::End(0), Event::Tick(1), ask(0)]);
        assert_eq!(model.dialing(), 1, "{ways_to_end:?}");
        model.run(&[Event::DialDone(0, true), Event::End(0), Event::Tick(1)]);
        assert_eq!(model.run(&[ask(0)]).dialing(), 0, "{ways_to_end:?}");
    }
}

/// One that has carried two requests, and one of `age` that has carried one. Which is taken?
fn taken_of_two(need: Need, age: u64, learn: impl FnOnce(&mut Model)) -> u32 {
    let mut model = model(MANY);
    model.run(&[
        ask(0),
        ask(0),
        Event::DialDone(0, true),
        Event::DialDone(0, true),
    ]);
    model.run(&[Event::End(0), ask(0), Event::End(0), Event::Tick(age)]);
    model.run(&[Event::End(0), Event::Tick(1)]);
    learn(&mut model);
    model.run(&[Event::Ask { origin: 0, need }]);
    let taken = model.pick(State::Busy, 0).expect("one of the two");
    model.connections[taken].thing.served
}

#[test]
fn connections_of_a_capped_origin_are_used_up_one_after_the_other() {
    let capped = |model: &mut Model| model.announce_cap(100);
    assert_eq!(taken_of_two(Need::Any, 5, |_| ()), 1, "the newest");
    assert_eq!(taken_of_two(Need::Any, 5, capped), 2);
    assert_eq!(taken_of_two(Need::Any, 10, capped), 1, "left to grow old");
}

#[test]
fn a_connection_is_not_used_up_with_a_request_that_it_is_too_old_for() {
    // Closed after 10 ms once: 4 ms are trusted.
    let short = |model: &mut Model| {
        let mut fx = Effects::none();
        let age = Duration::from_millis(10);
        model.plan.found_closed(model.plan.places[&0], age, &mut fx);
        model.announce_cap(100);
    };
    assert_eq!(taken_of_two(Need::Young, 1, short), 2);
    assert_eq!(taken_of_two(Need::Young, 6, short), 1);
}

/// What is still unproven then says nothing of the connections that come later.
#[test]
fn an_origin_that_comes_back_begins_with_an_empty_window() {
    let mut model = model(MANY);
    model.run(&[ask(0); 4]);
    model.announce_cap(100);
    for event in [Event::DialDone(0, false), Event::Drop(0), Event::Gone(0)] {
        model.run(&[event; 4]);
    }
    assert_eq!(model.connections.len(), 0);
    assert_eq!(model.run(&[ask(0); 4]).dialing(), 4);
}

#[test]
fn of_equally_used_connections_the_newest_is_taken() {
    let mut model = half_used_up(MANY, 1);
    model.run(&[ask_for_fresh(), Event::DialDone(0, true)]);
    model.run(&[Event::Tick(1), Event::End(0), ask(0)]);
    assert_eq!(model.pick(State::Busy, 0), Some(1));
}

/// Servers close those by other clocks.
#[test]
fn the_close_of_an_unused_connection_teaches_nothing_of_idle_ones() {
    let mut model = model(MANY);
    model.run(&[ask(0), Event::Cancel(0), Event::DialDone(0, true)]);
    model.run(&[Event::Tick(500), Event::Ended(0)]);
    let learnt = model.plan.learnt(&0).expect("still closing");
    assert_eq!(learnt.idle, IdleRule::default());
}

/// It was kept before the cap was learnt.
#[test]
fn a_connection_that_goes_back_as_it_was_is_no_sign_against_a_cap() {
    let mut model = model(MANY);
    model.run(&[ask(0), Event::DialDone(0, true), Event::End(0)]);
    model.run(&[ask(0), Event::End(0)]);
    let place = model.plan.places[&0];
    for _ in 0..2 {
        let origin = model.plan.origin(place).expect("in use");
        origin.learnt.cap.closed(2);
    }
    model.run(&[ask(0), Event::Release(0)]);
    let learnt = model.plan.learnt(&0).expect("in use");
    assert_eq!(learnt.cap.cap(), Some(2));
}

/// Some servers close those after a few seconds, however long they keep the others.
#[test]
fn an_unused_connection_is_trusted_for_a_second_whatever_others_have_survived() {
    for (age, is_taken) in [(999, true), (1_000, false)] {
        let mut model = model(MANY);
        model.run(&[ask(0), Event::Cancel(0), Event::DialDone(0, true)]);
        let place = model.plan.places[&0];
        let origin = model.plan.origin(place).expect("in use");
        origin.learnt.idle.open(Duration::from_secs(60));
        let unkeyed = Event::Ask {
            origin: 0,
            need: Need::Young,
        };
        model.run(&[Event::Tick(age), unkeyed]);
        assert_eq!(model.dialing() == 0, is_taken, "{age}");
    }
}

/// A request was given a connection that came back, found it dead, and is in line again under its old ticket when the
/// dial that it had before fails. That is not its dial any more.
#[test]
fn a_dial_from_before_takes_nobody_out_of_the_line() {
    let mut plan: Plan<u8, Thing, &str> = Plan::new(MANY, None);
    let (now, mut fx) = (stamp(), Effects::none());
    let asks = |who, ticket, again| Asks {
        who,
        ticket,
        need: Need::Any,
        again,
    };
    let dials = |fx: &mut Effects<u8, Thing, &str>| {
        let told = fx.told.drain(..);
        let mut dial = told.map(|told| match told.word {
            Word::Dial(dial) => Dialer {
                place: told.place,
                ticket: told.ticket,
                dial,
            },
            word => panic!("{word:?}"),
        });
        dial.next_back().expect("a dial")
    };
    plan.ask(&0, asks("one", 1, false), now, &mut fx);
    let first = dials(&mut fx);
    let thing = Thing {
        id: 7,
        served: 1,
        ends: None,
    };
    plan.dialed(first, thing, true, now, &mut fx);
    fx.told.clear();
    plan.ask(&0, asks("two", 2, false), now, &mut fx);
    let second = dials(&mut fx);
    plan.put_back(first.place, thing, now, None, now, &mut fx);
    assert_eq!((fx.told.len(), fx.told[0].who), (1, "two"));
    fx.told.clear();

    plan.leave(first.place, 7);
    plan.ask(&0, asks("two", 2, true), now, &mut fx);
    let third = dials(&mut fx);
    plan.dial_failed(second, None, now, &mut fx);
    assert_eq!(fx.gone, [""; 0], "it was not its dial");
    plan.dial_failed(third, None, now, &mut fx);
    assert_eq!(fx.gone, ["two"]);
}
