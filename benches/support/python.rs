//! A server of Python's, for benches that compare with what servers do as they are born.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};

/// Ends when it is dropped. Its input ends with the bench, also where that is killed.
pub(crate) struct Python(Child);

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program that prints the port on which it listens. `None` where there is no `python3`.
pub(crate) fn start(program: &str) -> Option<(Python, SocketAddr)> {
    let mut command = Command::new("python3");
    let command = command.args(["-c", program]);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut python = Python(command.spawn().ok()?);
    let mut line = String::new();
    BufReader::new(python.0.stdout.take()?)
        .read_line(&mut line)
        .ok()?;
    let port: u16 = line.trim().parse().ok()?;
    Some((python, SocketAddr::from((Ipv4Addr::LOCALHOST, port))))
}
