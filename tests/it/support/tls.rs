//! One certificate authority for all scripted peers, and both sides' configuration.

use std::sync::{Arc, OnceLock};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{StoresServerSessions, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion};

/// Whom a peer's certificate is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Names {
    /// The names that the tests use.
    Local,
    /// Somebody else.
    Other,
}

/// Who a client says it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Identity {
    A,
    B,
    Nobody,
}

impl Identity {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Identity::A => "a.client.example",
            Identity::B => "b.client.example",
            Identity::Nobody => "nobody",
        }
    }

    /// The name of the client that has this certificate.
    pub(crate) fn of(certificate: &CertificateDer<'_>) -> &'static str {
        let clients = &authority().clients;
        let found = clients.iter().find(|(_, client)| client.0 == *certificate);
        found.map_or("a stranger", |(identity, _)| identity.name())
    }
}

/// A certificate and its key.
type Credentials = (CertificateDer<'static>, PrivateKeyDer<'static>);

struct Authority {
    root: CertificateDer<'static>,
    clients: Vec<(Identity, Credentials)>,
    local: Arc<ServerConfig>,
    other: Arc<ServerConfig>,
}

fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("a root");
        let clients = [Identity::A, Identity::B];
        Authority {
            root: issuer.der().clone(),
            clients: clients
                .map(|identity| (identity, credentials(&issuer, &[identity.name()])))
                .into(),
            // The last one is the server's in the network with distance.
            local: issue(&issuer, &["localhost", "127.0.0.1", "192.0.2.2"]),
            other: issue(&issuer, &["elsewhere.example"]),
        }
    })
}

fn credentials(issuer: &CertifiedIssuer<'_, KeyPair>, names: &[&str]) -> Credentials {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    let key = KeyPair::generate().expect("a key");
    let leaf = CertificateParams::new(names)
        .expect("params")
        .signed_by(&key, issuer)
        .expect("a leaf");
    let private = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    (leaf.der().clone(), private)
}

fn issue(issuer: &CertifiedIssuer<'_, KeyPair>, names: &[&str]) -> Arc<ServerConfig> {
    let (leaf, private) = credentials(issuer, names);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![leaf], private)
        .expect("a server config");
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(server)
}

/// The configuration of a peer with a certificate for these names.
pub(crate) fn server_config(names: Names) -> Arc<ServerConfig> {
    let authority = authority();
    Arc::clone(match names {
        Names::Local => &authority.local,
        Names::Other => &authority.other,
    })
}

/// The configuration of a peer that asks its clients who they are, and keeps its sessions there.
pub(crate) fn server_config_asking_for_identity(
    version: &'static SupportedProtocolVersion,
    sessions: Arc<dyn StoresServerSessions>,
) -> Arc<ServerConfig> {
    let local = &authority().local;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots()), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .expect("a verifier");
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .expect("versions")
        .with_client_cert_verifier(clients)
        .with_cert_resolver(Arc::clone(&local.cert_resolver));
    server.session_storage = sessions;
    Arc::new(server)
}

/// A client configuration that trusts the scripted peers and tells them who it is.
pub(crate) fn client_config_of(identity: Identity) -> ClientConfig {
    let clients = &authority().clients;
    let Some((_, (leaf, private))) = clients.iter().find(|(it, _)| *it == identity) else {
        return client_config();
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots())
        .with_client_auth_cert(vec![leaf.clone()], private.clone_key())
        .expect("a client config")
}

fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(authority().root.clone()).expect("a root");
    roots
}

/// A client configuration that trusts the scripted peers, with sessions of its own.
pub(crate) fn client_config() -> ClientConfig {
    client_config_with(roots())
}

/// A client configuration that trusts these roots.
pub(crate) fn client_config_with(roots: RootCertStore) -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}
