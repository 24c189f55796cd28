//! Two hosts, a client's and a server's, with a distance between them.
//!
//! ```text
//! client 192.0.2.1 ---- relay (20 ms each way) ---- 192.0.2.2 server
//! ```
//!
//! Three network namespaces of this process; nothing outside of them is touched, and nothing of them is
//! left when the process has ended.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use super::namespaces::{Namespace, join};
use super::relay::{Relay, Rules};
use crate::support::{Conn, Gate, Names, Peer, Scheme, server_config};

/// One way. Long enough to be far more than what the hosts themselves need, short enough for many rows.
pub(crate) const DELAY: Duration = Duration::from_millis(20);

/// Both hosts and what is between them.
#[derive(Debug)]
pub(crate) struct Network {
    relay: Relay,
    client: Namespace,
    server: Namespace,
    _between: Namespace,
}

impl Network {
    /// Brings up a network for one test. `None`, and a line that says why, where that is not possible
    /// here; a failure instead if `IDEMPOOL_REQUIRE_ALL` is set to 1.
    pub(crate) fn up(test: &str) -> Option<Network> {
        Network::up_with(test, DELAY)
    }

    /// As [`up`](Network::up), with another distance: so long one way.
    pub(crate) fn up_with(test: &str, delay: Duration) -> Option<Network> {
        match Network::make(delay) {
            Ok(network) => Some(network),
            Err(missing)
                if std::env::var_os("IDEMPOOL_REQUIRE_ALL").is_some_and(|all| all == "1") =>
            {
                panic!("{test} needs {missing}")
            }
            Err(missing) => {
                use std::io::Write;
                // Past the harness, which shows only what failing tests print.
                let _ = writeln!(std::io::stderr(), "skipped: {test} needs {missing}");
                None
            }
        }
    }

    fn make(delay: Duration) -> Result<Network, String> {
        let (client, server) = (Namespace::new()?, Namespace::new()?);
        let between = Namespace::new()?;
        join(&client, &between, &server)?;
        let relay = between.enter(|| Relay::start("to-client", "to-server", delay))?;
        Ok(Network {
            relay,
            client,
            server,
            _between: between,
        })
    }

    pub(crate) fn rules(&self) -> &Arc<Rules> {
        self.relay.rules()
    }

    /// Starts a peer on the server's host.
    pub(crate) fn serve(
        &self,
        scheme: Scheme,
        script: impl Fn(&mut Conn) + Send + Sync + 'static,
    ) -> Peer {
        let listen = || TcpListener::bind("192.0.2.2:0").expect("bind");
        let listener = self.server.enter(listen);
        Peer::start_on(listener, scheme, server_config(Names::Local), script)
    }

    /// Runs this on the client's host, on a runtime of one thread.
    pub(crate) fn as_client<T: Send>(&self, client: impl AsyncFnOnce() -> T + Send) -> T {
        self.client.enter(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(client())
        })
    }

    pub(crate) fn crossing(&self) -> Crossing {
        Crossing {
            rules: Arc::clone(self.rules()),
            ready: Gate::new(),
            left: Gate::new(),
        }
    }
}

/// A meeting on the way: what the server does at its end, and what the client writes next.
#[derive(Clone, Debug)]
pub(crate) struct Crossing {
    rules: Arc<Rules>,
    ready: Gate,
    left: Gate,
}

impl Crossing {
    /// The server's part: waits until the client is ready to write, then does this. It will be seen by
    /// the client only once the client's next bytes are under way.
    pub(crate) fn server_does(&self, act: impl FnOnce()) {
        self.ready.pass();
        self.rules.hold_until_crossed();
        act();
        self.left.open();
    }

    /// The rules of the wire.
    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// As [`server_does`](Crossing::server_does), but what it does arrives as soon as it can.
    pub(crate) fn server_goes_first(&self, act: impl FnOnce()) {
        self.ready.pass();
        act();
        self.left.open();
    }

    /// The client's part: returns when the server has acted. The thread blocks meanwhile: no task of
    /// the client's moves.
    pub(crate) fn client_is_ready(&self) {
        self.ready.open();
        self.left.pass();
    }
}
