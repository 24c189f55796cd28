//! TLS over a metered socket, or its absence: one stream type that hyper reads and writes.
//!
//! tokio-rustls directly, so that the handshake has its own time, its own counter, and the connect
//! timeout around it. A connection that is dropped without being shut down still says goodbye: RFC 8446
//! section 6.1 wants a close_notify before the write side closes, and hyper leaves it out on its error
//! paths.

use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::{Error, ErrorKind, Phase};
use crate::origin::Origin;
use crate::timings::Handshake;
use crate::wire::meter::{Meter, Metered};

/// A connection's byte stream, as hyper sees it.
pub(crate) struct Stream {
    inner: Inner,
    meter: Arc<Meter>,
}

enum Inner {
    Plain(Metered),
    #[cfg(feature = "tls")]
    Tls(Box<tokio_rustls::client::TlsStream<Metered>>),
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = matches!(self.inner, Inner::Plain(_));
        f.debug_struct("Stream")
            .field("plain", &is_plain)
            .finish_non_exhaustive()
    }
}

impl Stream {
    pub(crate) fn plain(stream: Metered, meter: Arc<Meter>) -> Self {
        Stream {
            inner: Inner::Plain(stream),
            meter,
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = match &mut self.inner {
            Inner::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            #[cfg(feature = "tls")]
            Inner::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        let read = buf.filled().len() - before;
        if read > 0 {
            self.meter.note_received(read);
        }
        poll
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.inner {
            Inner::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            #[cfg(feature = "tls")]
            Inner::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.inner {
            Inner::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            #[cfg(feature = "tls")]
            Inner::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.inner {
            Inner::Plain(stream) => stream.is_write_vectored(),
            #[cfg(feature = "tls")]
            Inner::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.inner {
            Inner::Plain(stream) => Pin::new(stream).poll_flush(cx),
            #[cfg(feature = "tls")]
            Inner::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        #[cfg(feature = "tls")]
        let silent = self.meter.needs_silence();
        match &mut self.inner {
            Inner::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            // Without a close_notify: a byte more than the request, and whoever resets it proves nothing.
            #[cfg(feature = "tls")]
            Inner::Tls(stream) if silent => Pin::new(stream.get_mut().0).poll_shutdown(cx),
            #[cfg(feature = "tls")]
            Inner::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// What a finished handshake says of itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Secured {
    pub(crate) handshake: Handshake,
    /// Round trips that the handshake took.
    pub(crate) round_trips: u32,
    pub(crate) took: Duration,
}

/// The protocol that is offered, and the only one that is spoken ([RFC 7301]).
///
/// [RFC 7301]: https://www.rfc-editor.org/rfc/rfc7301.html
#[cfg(feature = "tls")]
const ALPN: &[u8] = b"http/1.1";

/// Makes the client side of TLS connections, all from one configuration, so that they share tickets.
#[cfg(feature = "tls")]
#[derive(Clone)]
pub(crate) struct TlsClient {
    config: Arc<std::sync::OnceLock<Result<Arc<rustls::ClientConfig>, Arc<str>>>>,
}

#[cfg(feature = "tls")]
impl TlsClient {
    /// With the caller's configuration, or with the default one, made when it is first needed: it reads
    /// the system's certificates, which a pool for plain HTTP need not have.
    pub(crate) fn new(config: Option<rustls::ClientConfig>) -> Self {
        let client = TlsClient {
            config: Arc::default(),
        };
        if let Some(config) = config {
            // A new cell: it cannot have been set.
            let _ = client.config.set(Ok(with_alpn(config)));
        }
        client
    }

    fn config(&self) -> Result<Arc<rustls::ClientConfig>, Error> {
        let made = self.config.get_or_init(|| match default_config() {
            Ok(config) => Ok(with_alpn(config)),
            Err(error) => Err(error.to_string().into()),
        });
        made.clone().map_err(|reason| {
            Error::before_sending(ErrorKind::Tls, Phase::Handshake).with_source(reason.to_string())
        })
    }

    /// Shakes hands over a new connection.
    pub(crate) async fn secure(
        &self,
        origin: &Origin,
        stream: Metered,
        meter: Arc<Meter>,
    ) -> Result<(Stream, Secured), Error> {
        use rustls::{HandshakeKind, ProtocolVersion};

        use crate::clock::now;
        use crate::wire::evidence::of_handshake;

        let name = rustls::pki_types::ServerName::try_from(origin.host().to_owned())
            .map_err(Error::invalid)?;
        let connector = tokio_rustls::TlsConnector::from(self.config()?);
        let started = now();
        let stream = connector
            .connect(name, stream)
            .await
            .map_err(of_handshake)?;
        let took = now() - started;
        let (_, session) = stream.get_ref();
        if session
            .alpn_protocol()
            .is_some_and(|protocol| protocol != ALPN)
        {
            return Err(Error::before_sending(ErrorKind::Tls, Phase::Handshake)
                .with_source("the server chose a protocol that was not offered"));
        }
        let kind = session.handshake_kind();
        let handshake = match kind {
            Some(HandshakeKind::Resumed) => Handshake::Resumed,
            _ => Handshake::Full,
        };
        let round_trips = match (session.protocol_version(), kind) {
            (Some(ProtocolVersion::TLSv1_2), Some(HandshakeKind::Resumed)) => 1,
            (Some(ProtocolVersion::TLSv1_2), _) => 2,
            (_, Some(HandshakeKind::FullWithHelloRetryRequest)) => 2,
            _ => 1,
        };
        let stream = Stream {
            inner: Inner::Tls(Box::new(stream)),
            meter,
        };
        let secured = Secured {
            handshake,
            round_trips,
            took,
        };
        Ok((stream, secured))
    }
}

#[cfg(feature = "tls")]
impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").finish_non_exhaustive()
    }
}

#[cfg(feature = "tls")]
impl Drop for Stream {
    fn drop(&mut self) {
        let Inner::Tls(stream) = &mut self.inner else {
            return;
        };
        let (socket, session) = stream.get_mut();
        if self.meter.needs_silence() && socket.socket().end().is_some() {
            return;
        }
        // Says nothing if it was said before. What the kernel does not take at once stays unsaid.
        session.send_close_notify();
        while session.wants_write() {
            if session.write_tls(&mut Farewell(socket)).is_err() {
                return;
            }
        }
    }
}

#[cfg(feature = "tls")]
struct Farewell<'a>(&'a Metered);

#[cfg(feature = "tls")]
impl io::Write for Farewell<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(feature = "tls")]
fn with_alpn(mut config: rustls::ClientConfig) -> Arc<rustls::ClientConfig> {
    config.alpn_protocols = vec![ALPN.to_vec()];
    Arc::new(config)
}

/// TLS sessions kept for resumption: up to 8 tickets for each of 256 servers. rustls's own default of
/// 256 sessions serves 32.
#[cfg(all(
    feature = "platform-verifier",
    any(feature = "aws-lc-rs", feature = "ring")
))]
const SESSIONS: usize = 8 * 256;

#[cfg(all(
    feature = "platform-verifier",
    any(feature = "aws-lc-rs", feature = "ring")
))]
fn default_config() -> Result<rustls::ClientConfig, rustls::Error> {
    use rustls::client::Resumption;
    use rustls_platform_verifier::BuilderVerifierExt;

    #[cfg(feature = "aws-lc-rs")]
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    #[cfg(not(feature = "aws-lc-rs"))]
    let provider = rustls::crypto::ring::default_provider();
    let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()?
        .with_platform_verifier()?
        .with_no_client_auth();
    config.resumption = Resumption::in_memory_sessions(SESSIONS);
    Ok(config)
}

#[cfg(all(
    feature = "tls",
    not(all(
        feature = "platform-verifier",
        any(feature = "aws-lc-rs", feature = "ring")
    ))
))]
fn default_config() -> Result<rustls::ClientConfig, &'static str> {
    Err("https needs a tls_config, or the features `platform-verifier` and `aws-lc-rs` or `ring`")
}

/// TLS is compiled out: every https origin fails before anything is sent.
#[cfg(not(feature = "tls"))]
#[derive(Clone, Debug)]
pub(crate) struct TlsClient;

#[cfg(not(feature = "tls"))]
impl TlsClient {
    pub(crate) async fn secure(
        &self,
        _: &Origin,
        _: Metered,
        _: Arc<Meter>,
    ) -> Result<(Stream, Secured), Error> {
        Err(Error::before_sending(ErrorKind::Tls, Phase::Handshake)
            .with_source("idempool was built without the feature `tls`"))
    }
}
