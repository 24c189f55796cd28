//! The socket calls: the peek and the options. No other file makes one.

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
