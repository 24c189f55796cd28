//! Every order in which two or three threads can meet at the desk, tried by loom.

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use super::*;
use crate::clock::Instant;

struct Numbers;

impl Trade for Numbers {
    type Key = u8;
    type Item = Number;
    type Line = Inbox;

    fn close(_: Number, _: CloseReason) {}

    fn learnt(_: &u8, _: Lesson) {}
}

/// A connection; its seat is free once it is dropped.
struct Number {
    seat: Arc<Seat<Numbers>>,
}

impl Item for Number {
    fn id(&self) -> u64 {
        self.seat.id()
    }

    fn over(&self, _: Stamp) -> Option<CloseReason> {
        None
    }

    fn ends(&self) -> Option<Instant> {
        None
    }

    fn served(&self) -> u32 {
        1
    }

    fn most(&self) -> Option<u32> {
        None
    }
}

/// What somebody in line has heard; `None` once they listen no more.
#[derive(Clone)]
struct Inbox(Arc<Mutex<Option<Vec<News<Numbers>>>>>);

impl Line<Numbers> for Inbox {
    fn tell(&self, news: News<Numbers>) {
        let dropped = match &mut *self.0.lock().expect("no panic") {
            Some(heard) => {
                heard.push(news);
                None
            }
            None => Some(news),
        };
        drop(dropped);
    }
}

impl Inbox {
    fn new() -> Self {
        Inbox(Arc::new(Mutex::new(Some(Vec::new()))))
    }

    fn hear(&self) -> Vec<News<Numbers>> {
        let mut heard = self.0.lock().expect("no panic");
        heard.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Stops listening. What was not heard is passed on.
    fn leave(&self) {
        let unheard = self.0.lock().expect("no panic").take();
        drop(unheard);
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

fn ask(desk: &Arc<Desk<Numbers>>, inbox: &Inbox) -> Asked<Numbers> {
    let asks = Asks {
        who: inbox.clone(),
        ticket: desk.ticket(),
        need: Need::Any,
        again: false,
    };
    desk.ask(&0, asks)
}

/// Somebody has the only connection.
fn held(desk: &Arc<Desk<Numbers>>) -> Held<Numbers> {
    let inbox = Inbox::new();
    let spot = match ask(desk, &inbox) {
        Asked::InLine(spot) => spot,
        _ => panic!("nothing is idle"),
    };
    for news in inbox.hear() {
        if let News::MayDial(permit) = news {
            let seat = Arc::clone(permit.seat());
            permit.opened(Number { seat }, true);
        }
    }
    drop(spot);
    match inbox.hear().pop() {
        Some(News::Connection(held)) => held,
        _ => panic!("it was opened for us"),
    }
}

/// Waits in line, like a request does; `true` once it has had a connection.
fn is_served(desk: &Arc<Desk<Numbers>>) -> bool {
    let inbox = Inbox::new();
    let _spot = match ask(desk, &inbox) {
        Asked::Reuse(held) => {
            drop(held);
            return true;
        }
        Asked::InLine(spot) => spot,
        _ => return false,
    };
    loop {
        for news in inbox.hear() {
            match news {
                News::Connection(held) => {
                    drop(held);
                    return true;
                }
                News::MayDial(permit) => {
                    let seat = Arc::clone(permit.seat());
                    permit.opened(Number { seat }, true);
                }
                News::Begin | News::Call(_) => panic!("told to who has not knocked"),
                News::Closed => return false,
            }
        }
        thread::yield_now();
    }
}

/// Somebody on a thread of their own who waits in line.
fn joins(desk: &Arc<Desk<Numbers>>) -> thread::JoinHandle<bool> {
    let desk = Arc::clone(desk);
    thread::spawn(move || is_served(&desk))
}

fn idle(desk: &Arc<Desk<Numbers>>) -> usize {
    let survey = desk.survey();
    let gauges = survey.first().map(|survey| survey.gauges);
    let gauges = gauges.unwrap_or_default();
    assert_eq!(
        (gauges.busy, gauges.dialing, gauges.closing, gauges.waiting),
        (0, 0, 0, 0),
        "{gauges:?}"
    );
    gauges.idle
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_duration = Some(Duration::from_secs(60));
    builder.check(model);
}

/// dotnet/corefx#32472, golang/go#32336: a connection that is given back just as somebody joins the line
/// reaches them; if it did not, this would never end.
#[test]
fn whoever_joins_while_a_connection_is_given_back_gets_it() {
    check(|| {
        let desk = Desk::new(ONE, None);
        let first = held(&desk);
        let waits = joins(&desk);
        drop(first);
        assert!(waits.join().expect("no panic"));
        assert_eq!(idle(&desk), 1);
    });
}

/// aio-libs/aiohttp#9670: what reaches somebody who has just stopped waiting is passed on.
#[test]
fn luck_that_comes_to_somebody_who_leaves_is_passed_on() {
    check(|| {
        let desk = Desk::new(ONE, None);
        let first = held(&desk);
        let inbox = Inbox::new();
        let Asked::InLine(spot) = ask(&desk, &inbox) else {
            panic!("nothing is idle");
        };
        let leaves = thread::spawn(move || {
            drop(spot);
            inbox.leave();
        });
        let waits = joins(&desk);
        drop(first);
        leaves.join().expect("no panic");
        assert!(waits.join().expect("no panic"));
        assert_eq!(idle(&desk), 1);
    });
}

/// urllib3/urllib3#644: a connection that does not come back leaves its seat to whoever waits.
#[test]
fn a_connection_that_breaks_while_somebody_joins_leaves_its_seat_to_them() {
    check(|| {
        let desk = Desk::new(ONE, None);
        let first = held(&desk);
        let waits = joins(&desk);
        drop(first.leave());
        assert!(waits.join().expect("no panic"));
        assert_eq!(idle(&desk), 1);
    });
}

/// A pool that is closed forgets nobody in line.
#[test]
fn whoever_joins_while_the_pool_closes_is_turned_away() {
    check(|| {
        let desk = Desk::new(ONE, None);
        let first = held(&desk);
        let waits = joins(&desk);
        desk.close();
        drop(first);
        assert!(!waits.join().expect("no panic"));
        assert!(desk.survey().is_empty(), "something is left");
    });
}
