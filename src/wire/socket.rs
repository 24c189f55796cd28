//! The system calls that do not go through tokio: the peek, the half-close, the reset, the options, and what
//! TCP itself knows. No other file makes one.

use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// What one look into the receive queue showed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Peek {
    /// Open, and nothing to read.
    Quiet,
    /// The peer has closed its side.
    Closed,
    /// There are bytes to read.
    Readable,
    /// The socket is broken, and this was its error. The look consumed it: a later one says `Closed`.
    Broken(io::ErrorKind),
}

/// Looks into the receive queue without taking anything from it (`MSG_PEEK`).
///
/// A system call, so as fresh as the kernel itself, unlike the runtime's cached readiness. It takes
/// no waker and disturbs nobody who waits to read.
pub(crate) fn peek(stream: &TcpStream) -> Peek {
    match SockRef::from(stream).peek(&mut [MaybeUninit::uninit(); 1]) {
        Ok(0) => Peek::Closed,
        Ok(_) => Peek::Readable,
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Peek::Quiet,
            kind => Peek::Broken(kind),
        },
    }
}

/// Ends our direction of the stream: the peer sees a FIN behind the last byte.
pub(crate) fn shut_write(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).shutdown(Shutdown::Write)
}

/// Makes the close of this socket a reset, which throws away what was not sent or not acknowledged.
pub(crate) fn reset_on_close(stream: &TcpStream) {
    // A socket that refuses is over, and has nothing to throw away.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Takes the error that the kernel keeps for whoever asks first, if nobody has.
pub(crate) fn take_error(stream: &TcpStream) -> io::Result<Option<io::Error>> {
    SockRef::from(stream).take_error()
}

/// Sends the acknowledgement that the kernel is holding back, if it is (Linux and Android; nothing elsewhere). It
/// may hold the next one back again.
pub(crate) fn acknowledge_now(stream: &TcpStream) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if let Err(error) = SockRef::from(stream).set_tcp_quickack(true) {
        tracing::debug!(option = "quickack", %error, "socket option refused");
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = stream;
}

/// The options a new connection gets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SocketOptions {
    pub(crate) nodelay: bool,
    pub(crate) keepalive: Option<Duration>,
    pub(crate) user_timeout: Option<Duration>,
}

impl SocketOptions {
    /// Sets them. An option that this system refuses is no reason to refuse the connection.
    pub(crate) fn apply(&self, stream: &TcpStream) {
        let socket = SockRef::from(stream);
        let refused = |what: &str, result: io::Result<()>| {
            if let Err(error) = result {
                tracing::debug!(option = what, %error, "socket option refused");
            }
        };
        refused("nodelay", socket.set_tcp_nodelay(self.nodelay));
        if let Some(time) = self.keepalive {
            let keepalive = TcpKeepalive::new()
                .with_time(time)
                .with_interval(KEEPALIVE_INTERVAL);
            refused("keepalive", socket.set_tcp_keepalive(&keepalive));
        }
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if let Some(timeout) = self.user_timeout {
            refused("user_timeout", socket.set_tcp_user_timeout(Some(timeout)));
        }
    }
}

/// Between two keep-alive probes once the first went unanswered; the kernel's own 75 s would keep a
/// dead peer for ten minutes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// What TCP knows of a connection, as far as evidence of delivery needs it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct TcpState {
    /// The connection is over in both directions: nothing more is sent, received or acknowledged.
    pub(crate) closed: bool,
    /// Bytes that the peer's kernel has acknowledged, from the beginning of the connection. Our SYN
    /// counts as one and so does our FIN: only differences mean anything.
    pub(crate) acked: u64,
    /// Whether everything that was written has been sent and acknowledged.
    pub(crate) settled: bool,
    /// The smoothed round-trip time.
    pub(crate) rtt: Duration,
    /// Whether anything had to be sent again, the SYN included.
    pub(crate) has_lost: bool,
}

/// Asks TCP about a connection. `None` where the system does not tell: not Linux, a kernel before 4.19,
/// or one that only looks like it.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) fn tcp_state(stream: &TcpStream) -> Option<TcpState> {
    /// `TCP_CLOSE` of the kernel's `enum` of states.
    const CLOSE: u8 = 7;

    let info = tcp_info::read(stream)?;
    Some(TcpState {
        closed: info.state == CLOSE,
        acked: info.bytes_acked,
        settled: info.unacked == 0 && info.notsent_bytes == 0,
        rtt: Duration::from_micros(info.rtt_us.into()),
        has_lost: info.total_retrans > 0,
    })
}

/// Asks TCP about a connection: this system does not tell.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) fn tcp_state(_: &TcpStream) -> Option<TcpState> {
    None
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod tcp_info {
    use std::os::fd::AsFd;
    use std::sync::OnceLock;

    // Both names: the exported macro calls the other one unqualified.
    use nix::{getsockopt_impl, sockopt_impl};

    /// The beginning of Linux's `struct tcp_info`, which only ever grows at its end, as far as all kernels
    /// from 4.19 fill it in.
    #[allow(unreachable_pub)] // the macro makes the option `pub`, and with it what it gives
    #[repr(C)]
    #[derive(Clone, Copy, Debug)]
    pub struct TcpInfo {
        pub(super) state: u8,
        _ca_state_to_options: [u8; 7],
        _rto_ato_mss: [u32; 4],
        pub(super) unacked: u32,
        _sacked_to_fackets: [u32; 4],
        _last_times: [u32; 4],
        _pmtu_ssthresh: [u32; 2],
        pub(super) rtt_us: u32,
        _rttvar_to_reordering: [u32; 5],
        _rcv: [u32; 2],
        pub(super) total_retrans: u32,
        _pacing: [u64; 2],
        pub(super) bytes_acked: u64,
        _bytes_received: u64,
        _segments: [u32; 2],
        pub(super) notsent_bytes: u32,
        _min_rtt: u32,
        _data_segments: [u32; 2],
        _rates_and_times: [u64; 4],
        _delivered: [u32; 2],
        _bytes_sent_retrans: [u64; 2],
    }

    const _: () = assert!(size_of::<TcpInfo>() == 216);
    const _: () = assert!(std::mem::offset_of!(TcpInfo, unacked) == 24);
    const _: () = assert!(std::mem::offset_of!(TcpInfo, rtt_us) == 68);
    const _: () = assert!(std::mem::offset_of!(TcpInfo, total_retrans) == 100);
    const _: () = assert!(std::mem::offset_of!(TcpInfo, bytes_acked) == 120);
    const _: () = assert!(std::mem::offset_of!(TcpInfo, notsent_bytes) == 144);

    sockopt_impl!(
        TcpInfoOption,
        GetOnly,
        libc::IPPROTO_TCP,
        libc::TCP_INFO,
        TcpInfo
    );

    pub(super) fn read(socket: &impl AsFd) -> Option<TcpInfo> {
        static KERNEL_IS_NEW_ENOUGH: OnceLock<bool> = OnceLock::new();
        // nix asserts that the answer is as long as the struct, so the kernel's version comes first.
        let is_new_enough = KERNEL_IS_NEW_ENOUGH.get_or_init(|| version() >= Some((4, 19)));
        if !is_new_enough {
            return None;
        }
        nix::sys::socket::getsockopt(socket, TcpInfoOption).ok()
    }

    fn version() -> Option<(u32, u32)> {
        let name = nix::sys::utsname::uname().ok()?;
        let mut numbers = name
            .release()
            .to_str()?
            .split(|c: char| !c.is_ascii_digit());
        let mut next = || numbers.next()?.parse().ok();
        Some((next()?, next()?))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.expect("connect"), accepted.expect("accept").0)
    }

    /// Loopback delivers before the sender's call returns, but the promise is the kernel's, not ours.
    async fn peek_until(stream: &TcpStream, wanted: impl Fn(Peek) -> bool) -> Peek {
        loop {
            let seen = peek(stream);
            if wanted(seen) {
                return seen;
            }
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn an_idle_connection_is_quiet() {
        let (client, _server) = pair().await;
        assert_eq!(peek(&client), Peek::Quiet);
    }

    #[tokio::test]
    async fn a_peek_shows_the_end_without_taking_it() {
        let (client, server) = pair().await;
        drop(server);
        peek_until(&client, |seen| seen != Peek::Quiet).await;
        assert_eq!(peek(&client), Peek::Closed);
        assert_eq!(peek(&client), Peek::Closed);
    }

    #[tokio::test]
    async fn a_peek_shows_bytes_without_taking_them() {
        let (client, mut server) = pair().await;
        server.write_all(b"408").await.expect("write");
        peek_until(&client, |seen| seen != Peek::Quiet).await;
        assert_eq!(peek(&client), Peek::Readable);
        let mut bytes = [0; 8];
        let mut client = client;
        assert_eq!(client.read(&mut bytes).await.expect("still there"), 3);
    }

    #[tokio::test]
    async fn the_first_peek_after_a_reset_takes_the_error() {
        let (client, server) = pair().await;
        SockRef::from(&server)
            .set_linger(Some(Duration::ZERO))
            .expect("linger");
        drop(server);
        let first = peek_until(&client, |seen| seen != Peek::Quiet).await;
        assert_eq!(first, Peek::Broken(io::ErrorKind::ConnectionReset));
        assert_eq!(peek(&client), Peek::Closed);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn tcp_tells_what_was_acknowledged_and_when_it_is_over() {
        let (mut client, server) = pair().await;
        let before = tcp_state(&client).expect("Linux tells");
        assert!(before.settled && !before.closed, "{before:?}");
        client.write_all(&[0; 1000]).await.expect("write");
        let acked = || tcp_state(&client).map(|state| state.acked - before.acked);
        while acked() != Some(1000) {
            tokio::task::yield_now().await;
        }
        SockRef::from(&server)
            .set_linger(Some(Duration::ZERO))
            .expect("linger");
        drop(server);
        while !tcp_state(&client).is_some_and(|state| state.closed) {
            tokio::task::yield_now().await;
        }
    }

    /// smithy-lang/smithy-rs#4677: no `TCP_NODELAY`, and 40 ms more for each small request.
    #[tokio::test]
    async fn options_are_set_on_the_socket() {
        let (client, _server) = pair().await;
        SocketOptions {
            nodelay: true,
            keepalive: Some(Duration::from_secs(60)),
            user_timeout: Some(Duration::from_secs(30)),
        }
        .apply(&client);
        let socket = SockRef::from(&client);
        assert!(socket.tcp_nodelay().expect("nodelay"));
        assert!(socket.keepalive().expect("keepalive"));
        #[cfg(target_os = "linux")]
        {
            assert_eq!(
                socket.tcp_keepalive_time().expect("time"),
                Duration::from_secs(60)
            );
            let timeout = socket.tcp_user_timeout().expect("timeout");
            assert_eq!(timeout, Some(Duration::from_secs(30)));
        }
    }
}
