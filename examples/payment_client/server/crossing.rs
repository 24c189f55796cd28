//! A close that crosses a request, on one machine: what otherwise takes a distance.
//!
//! The kernel is told to drop whatever comes for a connection, as if it were still on its way, so
//! nothing of it is read or acknowledged. Then the server closes for good. Whatever the
//! client's kernel still sends, the request once more among it, meets a closed socket.

use std::convert::Infallible;
use std::io;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{broadcast, mpsc, watch};

use super::stream::Stream;

/// The connections of a server that are deaf. They close when this is dropped.
#[derive(Debug)]
pub(crate) struct Crossing {
    close: watch::Sender<()>,
    /// Carries nothing; ends when every connection has let go of its sender.
    closed: mpsc::Receiver<Infallible>,
}

impl Crossing {
    /// Makes the connections deaf that listen to `announce`, and waits until they are.
    ///
    /// # Errors
    /// When a kernel does not do that; only Linux is asked.
    pub(crate) async fn begin(announce: &broadcast::Sender<Announced>) -> io::Result<Self> {
        let (deaf, mut answers) = mpsc::unbounded_channel();
        let (close, closing) = watch::channel(());
        let (open, closed) = mpsc::channel(1);
        // Nobody listens: nobody has to be deaf.
        let _ = announce.send(Announced {
            deaf,
            closing,
            open,
        });
        // Ends when each connection has taken its copy and let go of the sender in it.
        while let Some(answer) = answers.recv().await {
            answer?;
        }
        Ok(Self { close, closed })
    }

    /// Closes the connections, and waits until they are.
    pub(crate) async fn close(self) {
        let Self { close, mut closed } = self;
        drop(close);
        // `None`: the last sender is gone.
        let _ = closed.recv().await;
    }
}

/// What each connection is told.
#[derive(Clone, Debug)]
pub(crate) struct Announced {
    deaf: mpsc::UnboundedSender<io::Result<()>>,
    closing: watch::Receiver<()>,
    open: mpsc::Sender<Infallible>,
}

impl Announced {
    /// Is deaf until it is time to close, and closes.
    pub(crate) async fn obey(self, mut stream: Stream) {
        let Self {
            deaf,
            mut closing,
            open,
        } = self;
        let answer = hear_nothing(stream.socket());
        let is_deaf = answer.is_ok();
        // Fails if nobody waits for it any more; then it is time already.
        let _ = deaf.send(answer);
        drop(deaf);
        if !is_deaf {
            return;
        }
        let _ = closing.changed().await;
        // Still deaf, as the client may go on from here.
        if let Stream::Tls(tls) = &mut stream {
            tls.get_mut().1.send_close_notify();
            let _ = tls.flush().await;
        }
        hear_again(stream.socket());
        // At once, and without a shutdown: a socket that is half closed would hear and acknowledge.
        drop(stream);
        drop(open);
    }
}

#[cfg(target_os = "linux")]
fn hear_nothing(socket: &TcpStream) -> io::Result<()> {
    // One instruction of classic BPF: keep 0 bytes of the packet. It takes no privilege.
    let drop_all = [socket2::SockFilter::new(0x06, 0, 0, 0)];
    socket2::SockRef::from(socket).attach_filter(&drop_all)
}

/// Otherwise the close itself would never be acknowledged.
#[cfg(target_os = "linux")]
fn hear_again(socket: &TcpStream) {
    // Cannot fail: the filter is there.
    let _ = socket2::SockRef::from(socket).detach_filter();
}

#[cfg(not(target_os = "linux"))]
fn hear_nothing(_: &TcpStream) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn hear_again(_: &TcpStream) {}
