//! What the server itself has counted: the other side of every figure that the pool gives.
//!
//! It asks over HTTP, on a pool of its own, and takes its own requests and connections out of the
//! answer, so that what is left was everybody else's.

use http::StatusCode;
use serde_json::Value;

use crate::BoxError;
use crate::client::Client;
use crate::server::PaymentServer;

use super::Target;

/// Reads one server's counts.
#[derive(Debug)]
pub(super) struct Witness<'server> {
    client: Client,
    /// Only the built-in server tells of its handshakes.
    server: Option<&'server PaymentServer>,
}

/// A server's counts, without what the witness caused itself.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Counts {
    pub(super) payments: u64,
    pub(super) requests: u64,
    pub(super) connections: u64,
    /// `None` if the server does not tell.
    pub(super) handshakes: Option<Handshakes>,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Handshakes {
    pub(super) full: u64,
    pub(super) resumed: u64,
}

impl<'server> Witness<'server> {
    pub(super) fn new(target: &'server Target) -> Result<Self, BoxError> {
        Ok(Self {
            client: Client::new(&target.base_url, target.pool()?.build()),
            server: target.built_in.as_ref().map(|built_in| &built_in.server),
        })
    }

    /// Asks `GET /payments`. `None` if the server does not count.
    pub(super) async fn read(&self) -> Result<Option<Counts>, BoxError> {
        let answer = self.client.send(self.client.get("/payments")?).await?;
        if answer.status != StatusCode::OK {
            return Ok(None);
        }
        let Ok(json) = serde_json::from_slice::<Value>(&answer.body) else {
            return Ok(None);
        };
        let read = |name: &str| json[name].as_u64();
        let (Some(payments), Some(requests), Some(connections)) =
            (read("payments"), read("requests"), read("connections"))
        else {
            return Ok(None);
        };
        let own = self.client.stats();
        let handshakes = match self.server {
            None => None,
            Some(server) => {
                let counts = server.counts().await?;
                Some(Handshakes {
                    full: counts.full_handshakes.saturating_sub(own.tls_full),
                    resumed: counts.resumed_handshakes.saturating_sub(own.tls_resumed),
                })
            }
        };
        Ok(Some(Counts {
            payments,
            requests: requests.saturating_sub(own.requests),
            connections: connections.saturating_sub(own.connections_opened),
            handshakes,
        }))
    }
}

impl Counts {
    /// What was added after `before`.
    pub(super) fn since(self, before: Self) -> Self {
        let handshakes = self.handshakes.zip(before.handshakes);
        Self {
            payments: self.payments.saturating_sub(before.payments),
            requests: self.requests.saturating_sub(before.requests),
            connections: self.connections.saturating_sub(before.connections),
            handshakes: handshakes.map(|(after, before)| Handshakes {
                full: after.full.saturating_sub(before.full),
                resumed: after.resumed.saturating_sub(before.resumed),
            }),
        }
    }
}
