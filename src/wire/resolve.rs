//! From a host's name to its addresses, by the system or by a resolver of the caller's.
//!
//! It asks and nothing else: in which order the addresses are tried, and what it means that one is not in the
//! answer any more, is decided in `rules/addresses.rs`.
//!
//! [RFC 8305 section 3] would have the two families asked for separately, and connecting begun 50 ms after the
//! first answer. The system's resolver (`getaddrinfo`) answers for both families at once, so there is nothing to
//! begin with earlier.
//!
//! [RFC 8305 section 3]: https://www.rfc-editor.org/rfc/rfc8305.html#section-3

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

/// The answer of a [`Resolve`], to be waited for.
pub type Resolving = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;

/// Finds the addresses of a host. Set it with [`Builder::resolver`](crate::Builder::resolver).
///
/// # Examples
///
/// ```
/// use idempool::{Pool, Resolve, Resolving};
///
/// /// Every name is this machine.
/// struct Here;
///
/// impl Resolve for Here {
///     fn resolve(&self, _host: &str, port: u16) -> Resolving {
///         Box::pin(async move { Ok(vec![([127, 0, 0, 1], port).into()]) })
///     }
/// }
///
/// let pool = Pool::builder().resolver(Here).build();
/// # let _ = pool;
/// ```
pub trait Resolve: Send + Sync + 'static {
    /// Looks up a host, which is in lower case and never a literal address: those are connected to as they are.
    ///
    /// Called for each dial, and once more within a dial if no address of the first answer could be connected to.
    /// To remember answers, and for how long, is the resolver's matter. The future is dropped when the connect
    /// timeout is over.
    ///
    /// The order of the answer is a preference. The family of its first address goes first, and the families then
    /// take turns ([RFC 8305 section 4]). Among the addresses of one family the pool spreads its connections evenly,
    /// and tries those last that failed a short while ago. An address that is absent from two answers in a row is
    /// gone, and no request is sent to it any more. The port is connected to as it stands in the answer.
    ///
    /// [RFC 8305 section 4]: https://www.rfc-editor.org/rfc/rfc8305.html#section-4
    ///
    /// # Errors
    /// An error, or an answer without any address, fails the dial with
    /// [`ErrorKind::Resolve`](crate::ErrorKind::Resolve), the error as its source.
    ///
    /// # Panics
    /// It should not. A panic is not caught: it ends whoever was dialling.
    fn resolve(&self, host: &str, port: u16) -> Resolving;
}

impl<R: Resolve + ?Sized> Resolve for Arc<R> {
    fn resolve(&self, host: &str, port: u16) -> Resolving {
        (**self).resolve(host, port)
    }
}

/// The system's resolver: `getaddrinfo`, on a thread for blocking calls.
#[derive(Clone, Copy, Debug)]
struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, host: &str, port: u16) -> Resolving {
        let host = host.to_owned();
        Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
    }
}

/// The resolver of a pool.
#[derive(Clone)]
pub(crate) struct Resolver(Arc<dyn Resolve>);

impl Resolver {
    pub(crate) fn new(resolver: impl Resolve) -> Self {
        Resolver(Arc::new(resolver))
    }

    pub(crate) fn system() -> Self {
        Resolver::new(SystemResolver)
    }

    pub(crate) fn resolve(&self, host: &str, port: u16) -> Resolving {
        self.0.resolve(host, port)
    }
}

impl fmt::Debug for Resolver {
    /// A resolver need not be printable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_system_knows_this_machine_by_name() {
        let found = Resolver::system().resolve("localhost", 81).await;
        let found = found.expect("every system knows it");
        assert!(!found.is_empty());
        for address in found {
            assert!(address.ip().is_loopback(), "{address}");
            assert_eq!(address.port(), 81);
        }
    }
}
