//! The wire between the two hosts: carries each frame in its time, and loses what it is told to lose.
//!
//! Each direction has a thread that takes frames from one link and a thread that puts them on the
//! other when they are due. Frames keep their order.
//!
//! # Invariants
//!
//! * A frame arrives no earlier than the delay after it left; later, if the machine is busy. What has to
//!   cross on the way therefore never depends on the clock: see [`Rules::hold_until_crossed`].
//! * No frame is held for longer than [`PATIENCE`].

use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::bind;
use socket2::{Domain, Protocol, Socket, Type};

/// How long the server's frames are held for a request that does not come.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a thread that gets no frame looks whether it should stop.
const LOOK: Duration = Duration::from_millis(20);

/// What the wire does beside waiting.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    loss: Mutex<Loss>,
    held: Mutex<bool>,
    released: Condvar,
}

impl Rules {
    /// From here on the server's frames wait until bytes of the client are under way too. What the
    /// server does next will have crossed whatever the client writes next, on any machine.
    pub(crate) fn hold_until_crossed(&self) {
        *self.held.lock().unwrap() = true;
    }

    /// Loses these frames of the server's from here on.
    pub(crate) fn lose(&self, loss: Loss) {
        *self.loss.lock().unwrap() = loss;
    }

    /// Whether this frame of the server's is lost.
    fn loses(&self, segment: &Segment<'_>) -> bool {
        let mut loss = self.loss.lock().unwrap();
        match *loss {
            Loss::Nothing => false,
            Loss::PureAcks => segment.is_pure_ack(),
            Loss::AfterFin => {
                if segment.has(FIN) {
                    *loss = Loss::Everything;
                }
                false
            }
            Loss::Everything => true,
            Loss::NextClientPort => {
                let opens = segment.has(SYN);
                if opens {
                    *loss = Loss::ClientPort(segment.destination());
                }
                opens
            }
            Loss::ClientPort(port) => segment.destination() == port,
        }
    }

    fn crossed(&self) {
        *self.held.lock().unwrap() = false;
        self.released.notify_all();
    }

    fn wait_while_held(&self) {
        let held = self.held.lock().unwrap();
        let wait = self
            .released
            .wait_timeout_while(held, PATIENCE, |held| *held);
        *wait.unwrap().0 = false;
    }
}

/// Which of the server's frames are lost.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Loss {
    #[default]
    Nothing,
    /// Those that do nothing but acknowledge.
    PureAcks,
    /// All that leave after the first FIN.
    AfterFin,
    /// All.
    Everything,
    /// All that go to the next port from which the client connects.
    NextClientPort,
    /// All that go to this port.
    ClientPort(u16),
}

/// Carries frames until it is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    rules: Arc<Rules>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Side {
    Client,
    Server,
}

type Due = (Instant, Vec<u8>);

impl Relay {
    /// Starts to carry between two links of the namespace in which this is called.
    pub(crate) fn start(client: &str, server: &str, delay: Duration) -> Result<Relay, String> {
        let mut relay = Relay {
            rules: Arc::default(),
            stop: Arc::default(),
            threads: Vec::new(),
        };
        let (client, server) = (open(client)?, open(server)?);
        relay.carry(Side::Client, &client, &server, delay);
        relay.carry(Side::Server, &server, &client, delay);
        Ok(relay)
    }

    pub(crate) fn rules(&self) -> &Arc<Rules> {
        &self.rules
    }

    fn carry(&mut self, from: Side, source: &Arc<Socket>, target: &Arc<Socket>, delay: Duration) {
        let (sender, receiver) = channel();
        let (source, target) = (Arc::clone(source), Arc::clone(target));
        let (rules, stop) = (Arc::clone(&self.rules), Arc::clone(&self.stop));
        let take = move || take(from, &source, &sender, delay, &rules, &stop);
        self.threads.push(std::thread::spawn(take));
        let (rules, stop) = (Arc::clone(&self.rules), Arc::clone(&self.stop));
        let put = move || put(from, &target, &receiver, &rules, &stop);
        self.threads.push(std::thread::spawn(put));
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        self.rules.crossed();
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            if ended.is_err() && !std::thread::panicking() {
                panic!("the relay failed");
            }
        }
    }
}

/// A socket that takes and gives this link's frames of IPv4, whole.
fn open(link: &str) -> Result<Arc<Socket>, String> {
    const IPV4: u16 = 0x0800;
    let protocol = Protocol::from(i32::from(IPV4.to_be()));
    let missing = |error: &dyn std::fmt::Display| format!("raw sockets (AF_PACKET): {error}");
    let socket =
        Socket::new(Domain::PACKET, Type::RAW, Some(protocol)).map_err(|error| missing(&error))?;
    let mut links = getifaddrs().map_err(|error| missing(&error))?;
    let address = links.find_map(|entry| {
        let address = entry.address?;
        (entry.interface_name == link).then_some(*address.as_link_addr()?)
    });
    let address = address.ok_or_else(|| missing(&format!("no link {link}")))?;
    bind(socket.as_raw_fd(), &address).map_err(|error| missing(&error))?;
    let timeout = socket.set_read_timeout(Some(LOOK));
    timeout.map_err(|error| missing(&error))?;
    Ok(Arc::new(socket))
}

#[allow(clippy::disallowed_methods)]
fn take(
    from: Side,
    source: &Socket,
    queue: &Sender<Due>,
    delay: Duration,
    rules: &Rules,
    stop: &AtomicBool,
) {
    let mut buffer = vec![0; 1 << 16];
    while !stop.load(SeqCst) {
        let mut source = source;
        // Nothing came, or the link went down with its namespace.
        let Ok(length) = source.read(&mut buffer) else {
            continue;
        };
        let due = Instant::now() + delay;
        let mut frame = buffer[..length].to_vec();
        let Some(mut segment) = Segment::of(&mut frame) else {
            continue;
        };
        match from {
            Side::Client if segment.payload() > 0 => rules.crossed(),
            Side::Server if rules.loses(&segment) => continue,
            _ => {}
        }
        segment.fill_in_checksum();
        if queue.send((due, frame)).is_err() {
            return;
        }
    }
}

#[allow(clippy::disallowed_methods)]
fn put(from: Side, target: &Socket, queue: &Receiver<Due>, rules: &Rules, stop: &AtomicBool) {
    for (due, frame) in queue {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if from == Side::Server {
            rules.wait_while_held();
        }
        if stop.load(SeqCst) {
            return;
        }
        // A frame that the link does not take is lost, as on any wire.
        let _ = target.send(&frame);
    }
}

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// One TCP segment, inside its Ethernet frame and its IPv4 packet.
struct Segment<'a> {
    addresses: [u8; 8],
    /// From the TCP header on.
    tcp: &'a mut [u8],
}

impl<'a> Segment<'a> {
    /// `None` for everything else, which nobody here needs.
    fn of(frame: &'a mut [u8]) -> Option<Segment<'a>> {
        const ETHERNET: usize = 14;
        const TCP: u8 = 6;
        let packet = frame.get_mut(ETHERNET..)?;
        if packet.first()? >> 4 != 4 || *packet.get(9)? != TCP {
            return None;
        }
        let header = usize::from(packet[0] & 0xf) * 4;
        let total = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
        let addresses = packet.get(12..20)?.try_into().ok()?;
        let tcp = packet.get_mut(header..total)?;
        (tcp.len() >= 20).then_some(Segment { addresses, tcp })
    }

    fn payload(&self) -> usize {
        let header = usize::from(self.tcp[12] >> 4) * 4;
        self.tcp.len().saturating_sub(header)
    }

    fn destination(&self) -> u16 {
        u16::from_be_bytes([self.tcp[2], self.tcp[3]])
    }

    fn is_pure_ack(&self) -> bool {
        self.payload() == 0 && self.tcp[13] == ACK
    }

    fn has(&self, flag: u8) -> bool {
        self.tcp[13] & flag != 0
    }

    /// The kernel leaves the sum to the hardware, which a virtual link does not have and a raw socket
    /// does not replace (RFC 9293 section 3.1 has the pseudo-header).
    fn fill_in_checksum(&mut self) {
        self.tcp[16..18].fill(0);
        let length = u16::try_from(self.tcp.len()).expect("IPv4 has 16 bits for it");
        let mut sum = 6 + u32::from(length);
        for part in [&self.addresses[..], self.tcp] {
            for pair in part.chunks(2) {
                let low = pair.get(1).copied().unwrap_or_default();
                sum += u32::from(u16::from_be_bytes([pair[0], low]));
            }
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let folded = u16::try_from(sum).expect("folded");
        self.tcp[16..18].copy_from_slice(&(!folded).to_be_bytes());
    }
}
