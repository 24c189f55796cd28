//! Tells what was learnt of an origin: as an event for whoever looks closely, and once an origin as a warning, where
//! the server's behaviour costs the caller time and a setting of the server would change that.

use crate::origin::Origin;
use crate::rules::learnt::Lesson;

pub(crate) fn tell(origin: &Origin, lesson: Lesson) {
    let (host, port) = (origin.host(), origin.port());
    match lesson {
        Lesson::Idle {
            trusted,
            closes_after,
            costly,
        } => {
            tracing::debug!(
                server.address = host,
                server.port = port,
                ?trusted,
                ?closes_after,
                "profile changed: idle timeout"
            );
            if costly {
                tracing::warn!(
                    server.address = host,
                    server.port = port,
                    ?closes_after,
                    "the server closes idle connections after less than 5 s, so most pauses cost a new connection: raise \
                     its keep-alive timeout (nginx and gunicorn: keepalive_timeout and --keep-alive; Apache and Node.js: \
                     KeepAliveTimeout and server.keepAliveTimeout)"
                );
            }
        }
        Lesson::Cap { cap, costly } => {
            tracing::debug!(
                server.address = host,
                server.port = port,
                ?cap,
                "profile changed: requests per connection"
            );
            if costly {
                tracing::warn!(
                    server.address = host,
                    server.port = port,
                    ?cap,
                    "the server closes a connection after fewer than 1,000 requests, so more than one in a thousand needs \
                     a new one: raise its limit (nginx: keepalive_requests; Apache: MaxKeepAliveRequests; Tomcat: \
                     maxKeepAliveRequests; Node.js: server.maxRequestsPerSocket)"
                );
            }
        }
        Lesson::Loss { window, costly } => {
            tracing::debug!(
                server.address = host,
                server.port = port,
                window,
                "profile changed: connecting has lost packets"
            );
            if costly {
                tracing::warn!(
                    server.address = host,
                    server.port = port,
                    window,
                    "connecting loses packets, which are repeated after a second and more: if it is not the network, raise \
                     the server's listen backlog (Python: request_queue_size; nginx: listen backlog=; Linux: \
                     net.core.somaxconn)"
                );
            }
        }
    }
}
