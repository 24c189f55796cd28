//! Servers as they were measured in their default configuration: how long they keep an idle connection, how many
//! requests one carries, and what they say of both.

use std::time::Duration;

/// How a server keeps to its idle timeout.
#[derive(Clone, Copy, Debug)]
enum Clock {
    /// By up to so much too late.
    Late(Duration),
    /// By up to so much too early.
    Early(Duration),
    /// Several servers behind one name, of which every fourth closes after this time.
    Mixed(Duration),
}

/// What a server says of how many requests a connection carries.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Max {
    Silent,
    /// What is left after this response.
    CountsDown,
}

/// One kind of server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Server {
    pub(crate) name: &'static str,
    /// After a response. `None`: it does not close.
    idle: Option<Duration>,
    clock: Clock,
    /// Before the first request.
    unused: Option<Duration>,
    /// The last of so many responses says close.
    cap: Option<u32>,
    /// `Keep-Alive: timeout`.
    announces: Option<Duration>,
    max: Max,
    /// For so long before its FIN it answers nothing any more, and shows nothing of it.
    pub(crate) hidden: Duration,
}

const fn secs(s: u64) -> Option<Duration> {
    Some(Duration::from_secs(s))
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const NEVER_CLOSES: Server = Server {
    name: "go",
    idle: None,
    clock: Clock::Late(ms(20)),
    unused: None,
    cap: None,
    announces: None,
    max: Max::Silent,
    hidden: Duration::ZERO,
};

/// Those that stand for what is met in the field.
pub(crate) const SERVERS: &[Server] = &[
    Server {
        name: "nginx",
        idle: secs(75),
        clock: Clock::Late(ms(800)),
        unused: secs(60),
        cap: Some(1_000),
        ..NEVER_CLOSES
    },
    Server {
        name: "apache",
        idle: secs(5),
        clock: Clock::Late(ms(150)),
        unused: secs(92),
        cap: Some(101),
        ..NEVER_CLOSES
    },
    // To clients that send `Connection: keep-alive`.
    Server {
        name: "apache_announces",
        idle: secs(5),
        clock: Clock::Late(ms(150)),
        unused: secs(92),
        cap: Some(101),
        announces: secs(5),
        max: Max::CountsDown,
        ..NEVER_CLOSES
    },
    Server {
        name: "lighttpd",
        idle: secs(5),
        clock: Clock::Late(ms(1_100)),
        unused: secs(60),
        cap: Some(1_001),
        ..NEVER_CLOSES
    },
    Server {
        name: "haproxy",
        idle: secs(10),
        clock: Clock::Late(ms(100)),
        unused: secs(10),
        ..NEVER_CLOSES
    },
    // With an idle timeout of a minute, and its second of closing.
    Server {
        name: "envoy_60s",
        idle: secs(60),
        unused: secs(60),
        hidden: Duration::from_secs(1),
        ..NEVER_CLOSES
    },
    Server {
        name: "node",
        idle: secs(6),
        clock: Clock::Late(ms(50)),
        unused: secs(75),
        announces: secs(5),
        ..NEVER_CLOSES
    },
    Server {
        name: "gunicorn",
        idle: secs(2),
        clock: Clock::Late(ms(800)),
        unused: secs(6),
        ..NEVER_CLOSES
    },
    Server {
        name: "uvicorn",
        idle: secs(5),
        ..NEVER_CLOSES
    },
    // Its clock ticks in whole seconds, and may have ticked just before.
    Server {
        name: "squid",
        idle: secs(120),
        clock: Clock::Early(ms(400)),
        ..NEVER_CLOSES
    },
    Server {
        name: "actix",
        idle: secs(5),
        clock: Clock::Early(ms(350)),
        unused: secs(5),
        ..NEVER_CLOSES
    },
    Server {
        name: "tomcat",
        idle: secs(60),
        clock: Clock::Late(ms(100)),
        unused: secs(60),
        cap: Some(100),
        ..NEVER_CLOSES
    },
    // A balancer before servers of two configurations.
    Server {
        name: "mixed_60s_5s",
        idle: secs(60),
        clock: Clock::Mixed(ms(5_000)),
        ..NEVER_CLOSES
    },
    // On a tick of ten seconds.
    Server {
        name: "jdk",
        idle: secs(30),
        clock: Clock::Late(ms(10_000)),
        unused: secs(30),
        ..NEVER_CLOSES
    },
    NEVER_CLOSES,
];

impl Server {
    pub(crate) fn by_name(name: &str) -> Option<Server> {
        SERVERS.iter().find(|server| server.name == name).copied()
    }

    pub(crate) const fn never_closes() -> Server {
        NEVER_CLOSES
    }

    /// The same with another idle timeout.
    pub(crate) fn with_idle(self, idle: Duration) -> Server {
        Server {
            idle: Some(idle),
            ..self
        }
    }

    /// The same with this number of requests, or with any number.
    pub(crate) fn with_cap(self, cap: Option<u32>) -> Server {
        Server {
            cap,
            max: Max::Silent,
            ..self
        }
    }

    /// The idle timeout, or for one that has none what is a long time to most others.
    pub(crate) fn scale(&self) -> Duration {
        self.idle.unwrap_or(ms(60_000))
    }

    /// How long it keeps the connection of this number, idle from now on. `None`: for ever.
    pub(crate) fn keeps(
        &self,
        number: u64,
        is_unused: bool,
        rng: &mut fastrand::Rng,
    ) -> Option<Duration> {
        let timeout = if is_unused { self.unused } else { self.idle }?;
        Some(match self.clock {
            Clock::Late(most) => timeout + most.mul_f64(rng.f64()),
            Clock::Early(most) => timeout - most.mul_f64(rng.f64()),
            Clock::Mixed(other) if number.is_multiple_of(4) => other,
            Clock::Mixed(_) => timeout,
        })
    }

    pub(crate) fn closes_after(&self, count: u32) -> bool {
        self.cap.is_some_and(|cap| count >= cap)
    }

    pub(crate) fn announced_idle(&self) -> Option<Duration> {
        self.announces
    }

    /// The `max=` of a connection's `count`th response.
    pub(crate) fn announced_max(&self, count: u32) -> Option<u32> {
        match self.max {
            Max::Silent => None,
            Max::CountsDown => Some(self.cap?.saturating_sub(count)),
        }
    }
}
