//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use http::Uri;
use idempool::Origin;
use lexopt::prelude::*;

use crate::report::Format;

pub(crate) const HELP: &str = "\
Shows what a connection pool saves, what a stale connection does, and which retry is safe.

Usage: payment_client [--json] [--server URL [--ca FILE]]

Without arguments it starts its own servers on the loopback address and needs nothing else.

Options:
  --server URL  Play on a server of yours, such as http://127.0.0.1:8080. It should answer
                GET /hello, and GET /payments with {\"payments\":N,\"requests\":M,\"connections\":C}.
                If it counts payments, some are made: POST /payments with ?lose=early and ?lose=1.
                Nobody else should use it meanwhile, or the counts will differ.
  --ca FILE     Trust the authorities in this PEM file, instead of the operating system's.
  --json        Print one JSON object a line instead of tables.
  --help        Print this.

Exit code: 0 if all counts agree and no payment was made twice or lost, 1 if not, 2 for a wrong
argument.
";

/// What the program was asked to do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Args {
    Help,
    Play {
        format: Format,
        /// `None`: the built-in servers.
        server: Option<Server>,
    },
}

/// A server of the user's own.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Server {
    pub(crate) origin: Origin,
    pub(crate) authorities: Option<PathBuf>,
}

impl Args {
    /// Reads the arguments, without the program's name.
    ///
    /// # Errors
    /// When one is unknown, incomplete or not what it should be.
    pub(crate) fn read(args: impl IntoIterator<Item = OsString>) -> Result<Self, lexopt::Error> {
        let mut format = Format::Person;
        let (mut origin, mut authorities) = (None, None);
        let mut parser = lexopt::Parser::from_args(args);
        while let Some(arg) = parser.next()? {
            match arg {
                Short('h') | Long("help") => return Ok(Self::Help),
                Long("json") => format = Format::Json,
                Long("server") => origin = Some(parser.value()?.parse_with(read_origin)?),
                Long("ca") => authorities = Some(PathBuf::from(parser.value()?)),
                _ => return Err(arg.unexpected()),
            }
        }
        let server = match origin {
            None if authorities.is_some() => return Err("--ca needs --server".into()),
            None => None,
            Some(origin) => Some(Server {
                origin,
                authorities,
            }),
        };
        Ok(Self::Play { format, server })
    }
}

fn read_origin(url: &str) -> Result<Origin, &'static str> {
    let uri: Uri = url.parse().map_err(|_| "not a URL")?;
    if uri
        .path_and_query()
        .is_some_and(|path| path.as_str() != "/")
    {
        return Err("the URL must end after host and port");
    }
    Origin::of(&uri).ok_or("not an http or https URL with a host")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(args: &[&str]) -> Option<Args> {
        Args::read(args.iter().map(OsString::from)).ok()
    }

    #[test]
    fn arguments_are_read_or_refused() {
        let origin = Origin::of(&Uri::from_static("https://localhost:8443")).expect("an origin");
        let server = Server {
            origin,
            authorities: Some("ca.pem".into()),
        };
        let url = "https://localhost:8443/";
        let with_server = Args::Play {
            format: Format::Json,
            server: Some(server),
        };
        let plain = Args::Play {
            format: Format::Person,
            server: None,
        };
        assert_eq!(read(&[]), Some(plain));
        assert_eq!(
            read(&["--json", "--server", url, "--ca", "ca.pem"]),
            Some(with_server)
        );
        assert_eq!(read(&["--help"]), Some(Args::Help));
        for refused in [
            &["--ca", "ca.pem"][..],
            &["--server"],
            &["--server", "localhost:8443"],
            &["--server", "ftp://localhost"],
            &["--server", "http://localhost/payments"],
            &["payments"],
        ] {
            assert_eq!(read(refused), None, "{refused:?}");
        }
    }
}
