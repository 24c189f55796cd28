//! What the scenes have in common: where their servers run, and which server they talk to.
//!
//! * `witness`: what the server itself has counted.
//! * `reuse`, `stale`, `retry`: one scene each.

pub(crate) mod retry;
pub(crate) mod reuse;
pub(crate) mod stale;
mod witness;

use std::time::{Duration, Instant};

use idempool::{Builder, Pool};
use rustls::pki_types::CertificateDer;
use tempfile::TempDir;
use tokio::runtime::Handle;

use crate::BoxError;
use crate::client::trust;
use crate::server::{Certificates, Options, PaymentServer, RaceServer};

/// With or without TLS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Scheme {
    Http,
    Https,
}

impl Scheme {
    pub(crate) const BOTH: [Self; 2] = [Self::Http, Self::Https];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// Starts the servers of this run, all on a runtime that is not the client's.
#[derive(Debug)]
pub(crate) struct Stage {
    servers: Handle,
    certificates: Certificates,
}

impl Stage {
    pub(crate) fn new(servers: Handle) -> Result<Self, BoxError> {
        Ok(Self {
            servers,
            certificates: Certificates::generate()?,
        })
    }

    pub(crate) async fn payment_server(
        &self,
        scheme: Scheme,
        idle_timeout: Option<Duration>,
    ) -> Result<Target, BoxError> {
        let database = tempfile::tempdir()?;
        let mut options = Options::new(database.path().join("ledger.db"));
        options.idle_timeout = idle_timeout;
        options.tls = (scheme == Scheme::Https).then(|| self.certificates.server_config());
        let server = self.servers.spawn(PaymentServer::start(options)).await??;
        Ok(Target {
            base_url: server.base_url().to_owned(),
            scheme,
            port: server.address().port(),
            authorities: vec![self.certificates.authority()],
            built_in: Some(BuiltIn {
                server,
                _database: database,
            }),
        })
    }

    pub(crate) async fn race_server(&self, scheme: Scheme) -> Result<RaceServer, BoxError> {
        let tls = (scheme == Scheme::Https).then(|| self.certificates.server_config());
        Ok(self.servers.spawn(RaceServer::start(tls)).await??)
    }

    /// A pool that trusts this run's servers.
    pub(crate) fn pool(&self) -> Result<Pool, BoxError> {
        let tls = trust([self.certificates.authority()])?;
        Ok(Pool::builder().tls_config(tls).build())
    }
}

/// The payment server that a scene talks to: one of this run's, or the user's own.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) base_url: String,
    pub(crate) scheme: Scheme,
    pub(crate) port: u16,
    /// Empty: those that the operating system trusts.
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    /// `None` if it is the user's own.
    pub(crate) built_in: Option<BuiltIn>,
}

/// A server of this run, with the directory of its database.
#[derive(Debug)]
pub(crate) struct BuiltIn {
    server: PaymentServer,
    _database: TempDir,
}

impl Target {
    /// Begins a pool that trusts this server and has no TLS session to resume.
    pub(crate) fn pool(&self) -> Result<Builder, BoxError> {
        let builder = Pool::builder();
        if self.authorities.is_empty() {
            return Ok(builder);
        }
        Ok(builder.tls_config(trust(self.authorities.iter().cloned())?))
    }

    /// Connections that the server has accepted, if it is of this run.
    async fn connections(&self) -> Result<u64, BoxError> {
        let built_in = self.built_in.as_ref().ok_or("not a server of this run")?;
        Ok(built_in.server.counts().await?.connections)
    }

    /// Stops the server if it is of this run.
    pub(crate) async fn stop(self) {
        if let Some(built_in) = self.built_in {
            built_in.server.stop().await;
        }
    }
}

/// The monotonic clock, for figures that are shown and never decided by.
#[allow(
    clippy::disallowed_methods,
    reason = "the crate's own clock is private to it, and no rule of the pool depends on this one"
)]
fn now() -> Instant {
    Instant::now()
}
