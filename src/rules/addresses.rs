//! The addresses of one origin: which is tried first, and which are gone.
//!
//! Pure: what the resolver answered, which attempts failed and what time it is come in as arguments. It closes
//! nothing: an address that is retired says so to those who hold it, and they act.
//!
//! # Invariants
//!
//! * An address is in its book at most once, and one that is retired is in no book.
//! * What is retired stays retired. If the same socket address comes back, it is a new [`Address`].
//! * Who connects or is connected to an address holds an `Arc` of it. Neither the book nor the part of an [`Order`]
//!   that was not reached yet counts, so the number of holders is the number of connections, those being opened
//!   included.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::clock::Instant;
use crate::stats::CloseReason;

/// For how long an address that failed is tried last. Longer than a server takes to restart and than a burst of
/// dials with their timeout (10 s), so that a dead address costs few of them anything; short enough that one that
/// is back gets its share soon.
const FAILURE_MEMORY: Duration = Duration::from_secs(30);

/// One address of an origin, held by every connection to it.
#[derive(Debug)]
pub(crate) struct Address {
    socket: SocketAddr,
    retired: OnceLock<CloseReason>,
}

impl Address {
    fn new(socket: SocketAddr) -> Self {
        Address {
            socket,
            retired: OnceLock::new(),
        }
    }

    pub(crate) fn socket_addr(&self) -> SocketAddr {
        self.socket
    }

    /// Why connections to it should carry no further request, if they should not.
    pub(crate) fn retired(&self) -> Option<CloseReason> {
        self.retired.get().copied()
    }

    fn retire(&self, reason: CloseReason) {
        // The first reason stands; it left the book then, so there is no second.
        let _ = self.retired.set(reason);
    }
}

#[derive(Debug)]
struct Entry {
    address: Arc<Address>,
    /// When the answer came that was the first to leave it out. Until the next one it is neither tried nor gone.
    absent_since: Option<Instant>,
    failed_at: Option<Instant>,
    /// The turn in which it was last the first to be tried.
    turn: u64,
}

impl Entry {
    fn new(socket: SocketAddr) -> Self {
        Entry {
            address: Arc::new(Address::new(socket)),
            absent_since: None,
            failed_at: None,
            turn: 0,
        }
    }

    fn failed_lately(&self, now: Instant) -> bool {
        let lately = |at| now.saturating_duration_since(at) < FAILURE_MEMORY;
        self.failed_at.is_some_and(lately)
    }

    /// Connections to it, those being opened included.
    fn users(&self) -> usize {
        // One is the book's own.
        Arc::strong_count(&self.address) - 1
    }
}

/// The addresses of one origin.
#[derive(Debug, Default)]
pub(crate) struct Book {
    /// As the last answer had them; behind them those that it left out.
    entries: Vec<Entry>,
    turns: u64,
}

impl Book {
    /// Takes in an answer of the resolver, which was asked at `asked`. Returns whether an address is gone by it.
    ///
    /// Gone is what two answers in a row left out: some name servers answer with a changing part of their list. Two
    /// that were asked for at the same time, by a burst of dials, count as one. An empty answer says nothing.
    pub(crate) fn answer(&mut self, found: &[SocketAddr], asked: Instant, now: Instant) -> bool {
        if found.is_empty() {
            return false;
        }
        let mut before = std::mem::take(&mut self.entries);
        for &socket in found {
            let is_it = |entry: &Entry| entry.address.socket == socket;
            if self.entries.iter().any(is_it) {
                continue;
            }
            let mut entry = match before.iter().position(is_it) {
                Some(at) => before.remove(at),
                None => Entry::new(socket),
            };
            entry.absent_since = None;
            self.entries.push(entry);
        }
        let mut any_gone = false;
        for mut entry in before {
            match entry.absent_since {
                Some(since) if asked >= since => {
                    entry.address.retire(CloseReason::AddressGone);
                    any_gone = true;
                    continue;
                }
                Some(_) => {}
                None => entry.absent_since = Some(now),
            }
            self.entries.push(entry);
        }
        any_gone
    }

    /// In which order to try the addresses of the last answer, those in `tried` left out.
    ///
    /// Those that failed lately are behind the others. Apart from that the families take turns, beginning with that of
    /// the resolver's first address ([RFC 8305 section 4]); within a family the one with the fewest connections is
    /// first, and of several such the one that was chosen longest ago.
    ///
    /// [RFC 8305 section 4]: https://www.rfc-editor.org/rfc/rfc8305.html#section-4
    pub(crate) fn order(&mut self, now: Instant, tried: &[SocketAddr]) -> Order {
        let entries = &self.entries;
        let is_preferred = |at: usize| {
            let is_v6 = |entry: &Entry| entry.address.socket.is_ipv6();
            entries.first().map(is_v6) == Some(is_v6(&entries[at]))
        };
        let may_be_tried = |&at: &usize| {
            let entry = &entries[at];
            entry.absent_since.is_none() && !tried.contains(&entry.address.socket)
        };
        let mut sorted: Vec<usize> = (0..entries.len()).filter(may_be_tried).collect();
        // Each key is read once: the numbers of users move meanwhile, and a sort needs them to stand still.
        sorted.sort_by_cached_key(|&at| {
            let entry = &entries[at];
            (entry.failed_lately(now), entry.users(), entry.turn)
        });
        let order: Vec<usize> = sorted
            .chunk_by(|&a, &b| entries[a].failed_lately(now) == entries[b].failed_lately(now))
            .flat_map(|equals| interleave(equals, is_preferred))
            .collect();

        let mut order = order.into_iter();
        let first = order.next();
        let rest: Vec<_> = order
            .map(|at| Arc::downgrade(&entries[at].address))
            .collect();
        let first = first.map(|at| {
            self.turns += 1;
            self.entries[at].turn = self.turns;
            Arc::clone(&self.entries[at].address)
        });
        Order {
            first,
            rest: rest.into_iter(),
        }
    }

    /// Notes that an attempt to use this address has failed.
    pub(crate) fn failed(&mut self, socket: SocketAddr, now: Instant) {
        if let Some(entry) = self.entry(socket) {
            entry.failed_at = Some(now);
        }
    }

    /// Notes that an attempt to use this address has succeeded.
    pub(crate) fn worked(&mut self, socket: SocketAddr) {
        if let Some(entry) = self.entry(socket) {
            entry.failed_at = None;
        }
    }

    /// Retires every address, and forgets what was known of them.
    pub(crate) fn retire_all(&mut self, reason: CloseReason) {
        for entry in self.entries.drain(..) {
            entry.address.retire(reason);
        }
    }

    /// Whether there is a connection to any of the addresses, or a dial.
    pub(crate) fn is_used(&self) -> bool {
        self.entries.iter().any(|entry| entry.users() > 0)
    }

    fn entry(&mut self, socket: SocketAddr) -> Option<&mut Entry> {
        let is_it = |entry: &&mut Entry| entry.address.socket == socket;
        self.entries.iter_mut().find(is_it)
    }
}

/// The addresses that a dial is to try, in this order.
///
/// The first is held from the beginning, so that dials at the same time choose others. Each of the rest is held once
/// it was taken out, and passed over if it was retired before.
#[derive(Debug)]
pub(crate) struct Order {
    first: Option<Arc<Address>>,
    rest: std::vec::IntoIter<Weak<Address>>,
}

impl Order {
    /// Whether there is no other to be tried. One that is left may still turn out to be retired.
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none() && self.rest.len() == 0
    }
}

impl Iterator for Order {
    type Item = Arc<Address>;

    fn next(&mut self) -> Option<Arc<Address>> {
        let mut rest = self.rest.by_ref().filter_map(|address| address.upgrade());
        let first = self.first.take();
        first.or_else(|| rest.find(|address| address.retired().is_none()))
    }
}

/// One of the preferred and one of the others in turn, until neither has any.
fn interleave(sorted: &[usize], is_preferred: impl Fn(usize) -> bool) -> Vec<usize> {
    let (preferred, others): (Vec<usize>, Vec<usize>) =
        sorted.iter().partition(|&&at| is_preferred(at));
    let (mut preferred, mut others) = (preferred.into_iter(), others.into_iter());
    let mut order = Vec::with_capacity(sorted.len());
    loop {
        let pair = (preferred.next(), others.next());
        if pair == (None, None) {
            return order;
        }
        order.extend(pair.0);
        order.extend(pair.1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::now;

    fn sockets(list: &[&str]) -> Vec<SocketAddr> {
        let parse = |text: &&str| SocketAddr::new(text.parse().expect("an address"), 80);
        list.iter().map(parse).collect()
    }

    /// A book of these addresses, which came when they were asked for.
    fn book(list: &[&str], now: Instant) -> Book {
        let mut book = Book::default();
        book.answer(&sockets(list), now, now);
        book
    }

    fn order(book: &mut Book, now: Instant) -> Vec<SocketAddr> {
        let order = book.order(now, &[]);
        order.map(|address| address.socket_addr()).collect()
    }

    fn choose(book: &mut Book, now: Instant) -> Arc<Address> {
        book.order(now, &[]).next().expect("an address")
    }

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn families_take_turns_from_the_resolvers_first() {
        let mut six_first = book(
            &["::1", "::2", "::3", "127.0.0.1", "127.0.0.2", "::1"],
            now(),
        );
        assert_eq!(
            order(&mut six_first, now()),
            sockets(&["::1", "127.0.0.1", "::2", "127.0.0.2", "::3"])
        );
        let mut four_first = book(&["127.0.0.1", "::1", "::2"], now());
        assert_eq!(
            order(&mut four_first, now()),
            sockets(&["127.0.0.1", "::1", "::2"])
        );
    }

    // valyala/fasthttp#1236, elixir-grpc/grpc#355: an address that is added gets connections at once.
    #[test]
    fn an_address_that_is_added_is_first_until_it_has_its_share() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let mut held: Vec<_> = (0..4).map(|_| choose(&mut book, start)).collect();
        let all = sockets(&["127.0.0.1", "127.0.0.2", "127.0.0.3"]);
        book.answer(&all, start, start);
        for _ in 0..2 {
            let chosen = choose(&mut book, start);
            assert_eq!(chosen.socket_addr(), all[2]);
            held.push(chosen);
        }
        let share = |socket| held.iter().filter(|a| a.socket_addr() == socket).count();
        assert_eq!(all.iter().map(|&a| share(a)).collect::<Vec<_>>(), [2, 2, 2]);
    }

    #[test]
    fn without_connections_the_turn_goes_round() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2", "127.0.0.3"], start);
        let chosen: Vec<_> = (0..6)
            .map(|_| choose(&mut book, start).socket_addr())
            .collect();
        let round = sockets(&["127.0.0.1", "127.0.0.2", "127.0.0.3"]);
        assert_eq!(chosen, [&round[..], &round[..]].concat());
    }

    // grpc/grpc-go#3795: the dead one is remembered for a short time.
    #[test]
    fn an_address_that_failed_is_last_until_that_is_long_ago() {
        let start = now();
        let mut book = book(&["::1", "127.0.0.1"], start);
        let (six, four) = (sockets(&["::1"])[0], sockets(&["127.0.0.1"])[0]);
        book.failed(six, start);
        assert_eq!(order(&mut book, start), [four, six]);
        assert_eq!(
            order(&mut book, start + FAILURE_MEMORY - MS),
            [four, six],
            "still remembered"
        );
        assert_eq!(order(&mut book, start + FAILURE_MEMORY), [six, four]);
        book.failed(six, start);
        book.worked(six);
        assert_eq!(order(&mut book, start), [six, four]);
    }

    #[test]
    fn when_every_address_failed_none_is_put_last_for_it() {
        let start = now();
        let mut book = book(&["::1", "127.0.0.1", "::2"], start);
        let fresh = order(&mut book, start);
        for (after, &socket) in [3, 1, 2].iter().zip(&fresh) {
            book.failed(socket, start + *after * MS);
        }
        // The turn has gone on within the first family.
        let expected = sockets(&["::2", "127.0.0.1", "::1"]);
        assert_eq!(order(&mut book, start + 4 * MS), expected);
    }

    // grpc/grpc#20146, grpc/grpc#12295
    #[test]
    fn an_address_that_two_answers_left_out_is_gone() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let old = choose(&mut book, start);
        let new = sockets(&["127.0.0.2"]);
        assert!(!book.answer(&new, start + MS, start + MS));
        assert_eq!(old.retired(), None);
        assert!(book.answer(&new, start + 2 * MS, start + 2 * MS));
        assert_eq!(old.retired(), Some(CloseReason::AddressGone));
        assert_eq!(order(&mut book, start + 2 * MS), new);
        assert!(!book.answer(&new, start + 3 * MS, start + 3 * MS));

        // One that comes back is another one: what is open to the old one stays retired.
        book.answer(&sockets(&["127.0.0.1"]), start, start);
        let back = choose(&mut book, start);
        assert_eq!(back.socket_addr(), old.socket_addr());
        assert_eq!((back.retired(), old.retired().is_some()), (None, true));
    }

    // grpc/grpc-go#4513: an old server may go on accepting connections, and answer for what it is not any more.
    #[test]
    fn an_address_that_the_last_answer_left_out_is_not_tried() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let rest = sockets(&["127.0.0.2"]);
        book.answer(&rest, start, start);
        assert_eq!(order(&mut book, start), rest);
    }

    #[test]
    fn an_address_that_answers_leave_out_now_and_then_stays() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let held = [choose(&mut book, start), choose(&mut book, start)];
        for turn in 0..4 {
            let part = sockets(&[["127.0.0.1", "127.0.0.2"][turn % 2]]);
            assert!(!book.answer(&part, start, start));
        }
        assert!(!book.answer(&[], start, start), "an empty answer");
        assert!(!book.answer(&[], start, start), "another one");
        assert!(held.iter().all(|address| address.retired().is_none()));
    }

    #[test]
    fn answers_that_were_asked_for_at_once_count_as_one() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let part = sockets(&["127.0.0.2"]);
        for came in [1, 2, 3] {
            assert!(!book.answer(&part, start, start + came * MS));
        }
        assert!(book.answer(&part, start + 2 * MS, start + 4 * MS));
    }

    // grpc/grpc-go#4513
    #[test]
    fn an_evicted_book_retires_every_address_and_starts_anew() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let mut waiting = book.order(start, &[]);
        let held = choose(&mut book, start);
        let first = waiting.next().expect("an address");
        book.retire_all(CloseReason::Evicted);
        for address in [&first, &held] {
            assert_eq!(address.retired(), Some(CloseReason::Evicted));
        }
        assert!(waiting.next().is_none(), "a retired address was tried");
        assert!(book.order(start, &[]).is_empty());
        assert!(!book.is_used());
    }

    #[test]
    fn only_what_was_taken_out_of_an_order_is_held() {
        let start = now();
        let mut book = book(&["127.0.0.1", "127.0.0.2"], start);
        let mut order = book.order(start, &[]);
        let users = |book: &Book| book.entries.iter().map(Entry::users).collect::<Vec<_>>();
        assert_eq!(users(&book), [1, 0]);
        let both = (order.next(), order.next());
        assert_eq!(users(&book), [1, 1]);
        drop((both, order));
        assert!(!book.is_used());
    }

    #[test]
    fn what_was_tried_is_left_out() {
        let mut book = book(&["127.0.0.1", "127.0.0.2"], now());
        let tried = sockets(&["127.0.0.1"]);
        let mut order = book.order(now(), &tried);
        let next = order.next().map(|address| address.socket_addr());
        assert_eq!(next, Some(sockets(&["127.0.0.2"])[0]));
        assert!(order.is_empty() && order.next().is_none());
    }

    proptest! {
        // elixir-grpc/grpc#355, connectrpc/connect-go#782, istio/istio#7878, valyala/fasthttp#1236
        #[test]
        fn dials_without_failures_spread_evenly(addresses in 1u8..20, dials in 0usize..200) {
            let start = now();
            let mut book = Book::default();
            let all: Vec<_> = (0..addresses).map(|n| ([127, 0, 0, n], 80).into()).collect();
            book.answer(&all, start, start);
            let held: Vec<_> = (0..dials).map(|_| choose(&mut book, start)).collect();
            let share = |socket: &SocketAddr| held.iter().filter(|a| a.socket_addr() == *socket).count();
            let shares: Vec<_> = all.iter().map(share).collect();
            let (least, most) = (shares.iter().min(), shares.iter().max());
            prop_assert!(most.unwrap() - least.unwrap() <= 1, "{shares:?}");
        }

        #[test]
        fn whatever_was_closed_the_least_used_address_is_next(
            addresses in 1u8..6,
            events in proptest::collection::vec(proptest::option::of(0usize..16), 0..100),
        ) {
            let start = now();
            let mut book = Book::default();
            let all: Vec<_> = (0..addresses).map(|n| ([127, 0, 0, n], 80).into()).collect();
            book.answer(&all, start, start);
            let mut held: Vec<Arc<Address>> = Vec::new();
            for event in events {
                match event {
                    Some(at) if at < held.len() => drop(held.swap_remove(at)),
                    Some(_) => {}
                    None => {
                        let share = |socket: &SocketAddr| held.iter().filter(|a| a.socket_addr() == *socket).count();
                        let least = all.iter().map(share).min();
                        let chosen = choose(&mut book, start);
                        prop_assert_eq!(Some(share(&chosen.socket_addr())), least);
                        held.push(chosen);
                    }
                }
            }
        }
    }
}
