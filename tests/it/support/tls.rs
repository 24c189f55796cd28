//! One certificate authority for all scripted peers, and both sides' configuration.

use std::sync::{Arc, OnceLock};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

struct Authority {
    root: CertificateDer<'static>,
    server: Arc<ServerConfig>,
}

fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| {
        let mut params = CertificateParams::new(Vec::new()).expect("params");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("a root");
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let leaf_key = KeyPair::generate().expect("a key");
        let leaf = CertificateParams::new(names)
            .expect("params")
            .signed_by(&leaf_key, &issuer)
            .expect("a leaf");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let private = PrivateKeyDer::try_from(leaf_key.serialize_der()).expect("a key");
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], private)
            .expect("a server config");
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Authority {
            root: issuer.der().clone(),
            server: Arc::new(server),
        }
    })
}

pub(super) fn server_config() -> Arc<ServerConfig> {
    Arc::clone(&authority().server)
}

/// A client configuration that trusts the scripted peers, with sessions of its own.
pub(crate) fn client_config() -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(authority().root.clone()).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}
