//! Network namespaces of this process: made, entered, and gone with it.
//!
//! They have no name. A namespace lives as long as something holds it: here a descriptor, and the
//! sockets made inside. So nothing is left behind, however the process ends, and nothing is mounted,
//! which lets an ordinary user run the tests too, under `unshare --user --map-root-user`.
//!
//! A thread enters a namespace and stays; a socket keeps the one it was made in. A listener that was
//! made inside can be served by any thread.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::panic::resume_unwind;
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns, unshare};

/// One network namespace.
#[derive(Debug)]
pub(crate) struct Namespace(File);

impl Namespace {
    /// Makes one that is empty. The error says what is missing.
    pub(crate) fn new() -> Result<Namespace, String> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)
                .map_err(|error| format!("leave to make network namespaces (root): {error}"))?;
            File::open("/proc/thread-self/ns/net").map_err(|error| format!("/proc: {error}"))
        };
        // On a thread that ends with it: the test's own stays where it was.
        let made = std::thread::spawn(make).join();
        made.unwrap_or_else(|panic| resume_unwind(panic))
            .map(Namespace)
    }

    /// A path by which another process can open it.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Runs this inside, on a thread of its own.
    pub(crate) fn enter<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(&self.0, CloneFlags::CLONE_NEWNET).expect("entering a namespace of our own");
                inside()
            });
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Runs lines of `ip`'s batch language inside. The error says what is missing.
    pub(crate) fn ip(&self, script: &str) -> Result<(), String> {
        self.enter(|| {
            let alone = crate::fault_matrix::FORKS.write();
            let mut ip = Command::new("ip")
                .args(["-batch", "-"])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .map_err(|error| format!("ip (iproute2): {error}"))?;
            // The program runs: it has let go of what is ours.
            drop(alone);
            let mut stdin = ip.stdin.take().expect("it is piped");
            let written = stdin.write_all(script.as_bytes());
            drop(stdin);
            let output = ip.wait_with_output().map_err(|error| error.to_string())?;
            if written.is_ok() && output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("links that `ip` can make: {}", said.trim()))
        })
    }
}

/// Links a client at 192.0.2.1 and a server at 192.0.2.2 to what is between them, where the links are called
/// `to-client` and `to-server`. The error says what is missing.
pub(crate) fn join(
    client: &Namespace,
    between: &Namespace,
    server: &Namespace,
) -> Result<(), String> {
    let hosts = [
        (
            client,
            "client",
            ["192.0.2.1", "02:00:00:00:00:01"],
            ["192.0.2.2", "02:00:00:00:00:02"],
        ),
        (
            server,
            "server",
            ["192.0.2.2", "02:00:00:00:00:02"],
            ["192.0.2.1", "02:00:00:00:00:01"],
        ),
    ];
    // Neighbours are known and IPv6 is quiet, so that only TCP is on the wire. A segment a frame:
    // nobody after this link would cut a larger one.
    for (host, name, [ip, mac], [other_ip, other_mac]) in hosts {
        let between = between.path();
        host.ip(&format!(
            "link add {name} address {mac} type veth peer name to-{name} netns {between}\n\
             link set dev {name} addrgenmode none\n\
             link set dev {name} gso_max_segs 1\n\
             address add {ip}/30 dev {name}\n\
             link set dev {name} up\n\
             neighbour add {other_ip} lladdr {other_mac} dev {name} nud permanent\n"
        ))?;
    }
    between.ip("link set dev to-client addrgenmode none\n\
         link set dev to-client up\n\
         link set dev to-server addrgenmode none\n\
         link set dev to-server up\n")
}
