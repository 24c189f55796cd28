//! An accepted connection, with or without TLS, and the certificates for the latter.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::BoxError;

/// Either kind of connection, as one type that hyper and the raw listener can both drive.
#[derive(Debug)]
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// Sets `TCP_NODELAY` and does the handshake that `tls` asks for.
    pub(crate) async fn accept(
        socket: TcpStream,
        tls: Option<Arc<ServerConfig>>,
    ) -> io::Result<Self> {
        // Otherwise Nagle holds a second small segment until the client's delayed ACK, 40 ms later.
        socket.set_nodelay(true)?;
        match tls {
            None => Ok(Self::Plain(socket)),
            Some(config) => Ok(Self::Tls(Box::new(
                TlsAcceptor::from(config).accept(socket).await?,
            ))),
        }
    }

    /// The socket below.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Whether TLS was resumed; `None` without TLS.
    pub(crate) fn resumed(&self) -> Option<bool> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => {
                Some(stream.get_ref().1.handshake_kind() == Some(rustls::HandshakeKind::Resumed))
            }
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// An authority made for this run, and a server certificate that it signed.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    authority: CertificateDer<'static>,
    server: Arc<ServerConfig>,
}

impl Certificates {
    /// Makes both, for `localhost` and `127.0.0.1`.
    pub(crate) fn generate() -> Result<Self, BoxError> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "Payment example authority");
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let leaf = CertificateParams::new(names)?.signed_by(&key, &authority)?;
        let key = PrivateKeyDer::try_from(key.serialize_der())?;
        // Named, because a build may hold two providers and rustls then picks neither.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)?;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            authority: authority.der().clone(),
            server: Arc::new(server),
        })
    }

    /// What a client has to trust.
    pub(crate) fn authority(&self) -> CertificateDer<'static> {
        self.authority.clone()
    }

    /// What a server is started with. Clones share one session cache, so a client can resume.
    pub(crate) fn server_config(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }
}
