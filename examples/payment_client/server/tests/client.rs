//! A client that hides nothing: it sends bytes and says exactly what came back.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// What the peer did.
#[derive(Debug, PartialEq)]
pub(super) enum Got {
    Reply(Reply),
    /// FIN without a byte before it; over TLS also the close_notify alert.
    Fin,
    Rst,
    /// TLS only: FIN without close_notify.
    Truncated,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reply {
    pub(super) status: u16,
    head: String,
    pub(super) body: Vec<u8>,
}

impl Reply {
    pub(super) fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (field, value) = line.split_once(": ")?;
            field.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub(super) fn replayed(&self) -> bool {
        self.field("idempotent-replayed") == Some("true")
    }

    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    /// The last segment of a problem's `type`. Checks what holds for all of them.
    pub(super) fn problem(&self) -> String {
        assert_eq!(
            self.field("content-type"),
            Some("application/problem+json"),
            "{self:?}"
        );
        let body = self.json();
        assert_eq!(body["status"], self.status);
        assert!(
            body["title"].is_string() && body["detail"].is_string(),
            "{body}"
        );
        let name = body["type"]
            .as_str()
            .and_then(|url| url.strip_prefix("https://payments.example/problems/"));
        name.expect("an absolute type").to_owned()
    }
}

impl Got {
    pub(super) fn reply(self) -> Reply {
        match self {
            Self::Reply(reply) => reply,
            other => panic!("no reply: {other:?}"),
        }
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// One connection.
pub(super) struct Wire(Box<dyn Io>);

impl Wire {
    pub(super) async fn tcp(base_url: &str) -> Self {
        Self(Box::new(
            TcpStream::connect(address(base_url))
                .await
                .expect("a connection"),
        ))
    }

    pub(super) async fn tls(base_url: &str, config: &Arc<ClientConfig>) -> Self {
        let socket = TcpStream::connect(address(base_url))
            .await
            .expect("a connection");
        let name = ServerName::try_from("localhost").expect("a name");
        let stream = TlsConnector::from(config.clone())
            .connect(name, socket)
            .await;
        Self(Box::new(stream.expect("a handshake")))
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.expect("bytes are taken");
        self.0.flush().await.expect("bytes are sent");
    }

    pub(super) async fn exchange(&mut self, request: &str) -> Got {
        self.send(request.as_bytes()).await;
        self.read().await
    }

    /// Reads one reply, or the end of the connection.
    pub(super) async fn read(&mut self) -> Got {
        timeout(Duration::from_secs(20), self.read_reply())
            .await
            .expect("the peer does something")
    }

    async fn read_reply(&mut self) -> Got {
        let mut bytes = Vec::new();
        loop {
            if let Some(reply) = parse(&bytes) {
                return Got::Reply(reply);
            }
            let end = match self.0.read_buf(&mut bytes).await {
                Ok(1..) => continue,
                Ok(0) => Got::Fin,
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Got::Truncated,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Got::Rst,
                Err(error) => panic!("{error}"),
            };
            assert!(
                bytes.is_empty(),
                "half a reply: {:?}",
                String::from_utf8_lossy(&bytes)
            );
            return end;
        }
    }
}

/// Sends one request on a connection of its own.
pub(super) async fn once(base_url: &str, request: &str) -> Got {
    Wire::tcp(base_url).await.exchange(request).await
}

pub(super) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

/// A POST; `fields` are whole lines without their line ends.
pub(super) fn post(path: &str, fields: &[&str], body: &str) -> String {
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{fields}\r\n{body}"
    )
}

/// The usual payment, under the key `"k"`.
pub(super) fn keyed(path: &str) -> String {
    post(path, &[KEY], "amount=10")
}

pub(super) const KEY: &str = "Idempotency-Key: \"k\"";

pub(super) fn trusting(authority: CertificateDer<'static>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(authority).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

fn address(base_url: &str) -> SocketAddr {
    let port = base_url
        .rsplit(':')
        .next()
        .and_then(|port| port.parse().ok());
    (Ipv4Addr::LOCALHOST, port.expect("a port")).into()
}

fn parse(bytes: &[u8]) -> Option<Reply> {
    let head_end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8(bytes[..head_end].to_vec()).expect("a text head");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .expect("a status");
    let mut reply = Reply {
        status,
        head,
        body: bytes[head_end + 4..].to_vec(),
    };
    let length: usize = reply.field("content-length")?.parse().expect("a length");
    if reply.body.len() < length {
        return None;
    }
    reply.body.truncate(length);
    Some(reply)
}
