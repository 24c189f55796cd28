//! One certificate authority for all scripted peers, and both sides' configuration.

use std::sync::{Arc, OnceLock};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// Whom a peer's certificate is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Names {
    /// The names that the tests use.
    Local,
    /// Somebody else.
    Other,
}

struct Authority {
    root: CertificateDer<'static>,
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
        Authority {
            root: issuer.der().clone(),
            // The last one is the server's in the network with distance.
            local: issue(&issuer, &["localhost", "127.0.0.1", "192.0.2.2"]),
            other: issue(&issuer, &["elsewhere.example"]),
        }
    })
}

fn issue(issuer: &CertifiedIssuer<'_, KeyPair>, names: &[&str]) -> Arc<ServerConfig> {
    let names: Vec<_> = names.iter().map(ToString::to_string).collect();
    let key = KeyPair::generate().expect("a key");
    let leaf = CertificateParams::new(names)
        .expect("params")
        .signed_by(&key, issuer)
        .expect("a leaf");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let private = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![leaf.der().clone()], private)
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

/// A client configuration that trusts the scripted peers, with sessions of its own.
pub(crate) fn client_config() -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(authority().root.clone()).expect("a root");
    client_config_with(roots)
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
