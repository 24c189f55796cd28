//! The response body, which carries the lease and gives the connection back at its end.
//!
//! # Order
//!
//! The connection is back on the shelf **before** the caller sees the end of the body; otherwise the
//! next request would miss it and dial. And it goes back only when hyper says that it is ready: the end
//! of a body is published before the connection has settled.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::time::{Sleep, sleep, sleep_until, timeout};

use crate::clock::{Instant, now};
use crate::error::{Error, ErrorKind};
use crate::pool::lease::Lease;
use crate::rules::persist::Persistence;
use crate::stats::CloseReason;
use crate::wire::evidence;
use crate::wire::outgoing::Upload;

/// The body of a response.
///
/// Read it to its end and the connection goes back to the pool before you see the end. Drop it early and
/// what is left is read in the background within the bounds of
/// [`Builder::drain`](crate::Builder::drain), or the connection is closed.
///
/// # Errors
///
/// A body that ends before its framing says so is an error, never a short success:
/// [`ErrorKind::ResponseBody`](crate::ErrorKind::ResponseBody). A body whose time is over ends with
/// [`ErrorKind::BodyTimeout`](crate::ErrorKind::BodyTimeout) or
/// [`ErrorKind::RequestTimeout`](crate::ErrorKind::RequestTimeout), to whoever reads it.
#[derive(Default)]
pub struct ResponseBody {
    /// `None` when all is done: read to the end, failed, or empty.
    reading: Option<Box<Reading>>,
}

struct Reading {
    incoming: Incoming,
    ended: bool,
    after: After,
    wait: Wait,
}

/// How long the reader may be kept waiting.
struct Wait {
    /// When the time of the whole request is over.
    deadline: Option<Instant>,
    /// How long nothing may come.
    idle: Option<Duration>,
    /// Runs while nothing comes, and tells which limit it will have been. A body that is always ready has none.
    timer: Option<(Pin<Box<Sleep>>, ErrorKind)>,
}

impl Wait {
    /// Something has come. Gives the limit that was over before.
    fn heard(&mut self) -> Option<ErrorKind> {
        self.timer = None;
        let is_late = self.deadline.is_some_and(|deadline| now() >= deadline);
        is_late.then_some(ErrorKind::RequestTimeout)
    }

    /// Nothing has come. Resolves when a limit is over.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ErrorKind> {
        if self.timer.is_none() {
            let idle = self.idle.and_then(|idle| now().checked_add(idle));
            let idle = idle.map(|at| (at, ErrorKind::BodyTimeout));
            let request = self.deadline.map(|at| (at, ErrorKind::RequestTimeout));
            let first = request.into_iter().chain(idle).min_by_key(|&(at, _)| at);
            self.timer = first.map(|(at, kind)| (Box::pin(sleep_until(at)), kind));
        }
        let Some((timer, kind)) = &mut self.timer else {
            return Poll::Pending;
        };
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(*kind)
    }
}

/// What happens to the connection after the response.
pub(crate) struct After {
    lease: Option<Lease>,
    persistence: Persistence,
    upload: Upload,
    /// Runs from the moment hyper was asked and was not ready.
    patience: Option<Pin<Box<Sleep>>>,
}

impl After {
    pub(crate) fn new(lease: Lease, persistence: Persistence, upload: Upload) -> Self {
        if let Persistence::Close(reason) = persistence {
            // Noted now: hyper may close before anybody reads the end.
            lease.close_because(reason);
        }
        After {
            lease: Some(lease),
            persistence,
            upload,
            patience: None,
        }
    }

    /// The response has ended: gives the connection back once it is ready, or closes it.
    ///
    /// Never waits for an upload that goes on: that is left to the background, within the drain time.
    fn poll_settle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(lease) = &mut self.lease else {
            return Poll::Ready(());
        };
        if let Persistence::Close(reason) = self.persistence {
            // What is still being sent nobody reads any more (RFC 9112 section 9.5).
            let upload_goes_on = !self.upload.is_over();
            self.finish(|lease| match upload_goes_on {
                true => lease.abort(reason),
                false => lease.close(reason),
            });
            return Poll::Ready(());
        }
        if !self.upload.is_over() {
            self.settle_in_background();
            return Poll::Ready(());
        }
        let Some(conn) = lease.conn() else {
            return Poll::Ready(());
        };
        if let Poll::Ready(result) = conn.poll_ready(cx) {
            match result {
                Ok(()) => self.finish(Lease::put_back),
                // It ended behind the response; its task knows how.
                Err(_) => self.finish(Lease::leave_to_its_end),
            }
            return Poll::Ready(());
        }
        // All is handed over, so this is the time the connection's task needs to notice; unless the
        // server answered without reading and the kernel's buffer is full.
        let patience = match &mut self.patience {
            Some(patience) => patience,
            none => {
                let time = lease.shared().config.drain_time;
                none.insert(Box::pin(sleep(time)))
            }
        };
        ready!(patience.as_mut().poll(cx));
        self.finish(|lease| lease.abort(CloseReason::UploadUnfinished));
        Poll::Ready(())
    }

    /// As [`poll_settle`](After::poll_settle), for a response without a body.
    pub(crate) async fn settle(mut self) {
        poll_fn(|cx| self.poll_settle(cx)).await;
    }

    fn finish(&mut self, how: impl FnOnce(Lease)) {
        if let Some(lease) = self.lease.take() {
            how(lease);
        }
    }

    fn settle_in_background(&mut self) {
        let Some(mut lease) = self.lease.take() else {
            return;
        };
        let Ok(runtime) = Handle::try_current() else {
            lease.abort(CloseReason::UploadUnfinished);
            return;
        };
        let time = lease.shared().config.drain_time;
        runtime.spawn(async move {
            match timeout(time, lease.until_ready()).await {
                Ok(true) => lease.put_back(),
                Ok(false) => lease.leave_to_its_end(),
                Err(_) => lease.abort(CloseReason::UploadUnfinished),
            }
        });
    }
}

impl ResponseBody {
    pub(crate) fn reading(incoming: Incoming, after: After, deadline: Option<Instant>) -> Self {
        let lease = after.lease.as_ref();
        let idle = lease.and_then(|lease| lease.shared().config.body_idle_timeout);
        let reading = Reading {
            incoming,
            ended: false,
            after,
            wait: Wait {
                deadline,
                idle,
                timer: None,
            },
        };
        ResponseBody {
            reading: Some(Box::new(reading)),
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Some(reading) = &mut self.reading else {
            return Poll::Ready(None);
        };
        if !reading.ended {
            let over = match Pin::new(&mut reading.incoming).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => match reading.wait.heard() {
                    None => return Poll::Ready(Some(Ok(frame))),
                    over => over,
                },
                Poll::Ready(Some(Err(error))) => {
                    let error = evidence::of_response_body(error);
                    let error = reading.fail(error, |lease| {
                        lease.close(CloseReason::ExchangeFailed);
                    });
                    self.reading = None;
                    return Poll::Ready(Some(Err(error)));
                }
                Poll::Ready(None) => {
                    reading.ended = true;
                    None
                }
                Poll::Pending => Some(ready!(reading.wait.poll(cx))),
            };
            if let Some(kind) = over {
                let error = evidence::of_body_limit(kind);
                let error = reading.fail(error, |lease| lease.abort(CloseReason::TimedOut));
                self.reading = None;
                return Poll::Ready(Some(Err(error)));
            }
        }
        ready!(reading.after.poll_settle(cx));
        self.reading = None;
        Poll::Ready(None)
    }

    /// `true` only once the connection is settled too, so that whoever stops here has given it back.
    fn is_end_stream(&self) -> bool {
        self.reading.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.reading {
            Some(reading) => reading.incoming.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        if let Some(reading) = self.reading.take() {
            reading.give_up();
        }
    }
}

impl Reading {
    /// Adds to an error where it happened, and ends the connection.
    fn fail(&mut self, mut error: Error, how: impl FnOnce(Lease)) -> Error {
        if let Some(lease) = self.after.lease.take() {
            if lease.shared().is_cut() {
                error = error.with_kind(ErrorKind::PoolClosed);
            }
            error = error
                .with_origin(lease.origin())
                .with_connection(lease.facts().clone());
            how(lease);
        }
        error
    }

    /// The caller wants no more of it. Keeps the connection where that is cheap.
    fn give_up(self) {
        let Reading {
            mut incoming,
            ended,
            mut after,
            ..
        } = self;
        let Some(mut lease) = after.lease.take() else {
            return;
        };
        if let Persistence::Close(reason) = after.persistence {
            return lease.abort(reason);
        }
        let ended = ended || incoming.is_end_stream();
        let is_ready = lease.conn().is_some_and(|conn| conn.is_ready());
        if ended && after.upload.is_over() && is_ready {
            return lease.put_back();
        }
        let config = &lease.shared().config;
        let (limit, time) = (config.drain_bytes, config.drain_time);
        if !ended && (limit == 0 || incoming.size_hint().lower() > limit) {
            return lease.abort(CloseReason::BodyDropped);
        }
        let Ok(runtime) = Handle::try_current() else {
            return lease.abort(CloseReason::BodyDropped);
        };
        runtime.spawn(async move {
            let drained = async {
                let mut left = limit;
                loop {
                    let frame = poll_fn(|cx| Pin::new(&mut incoming).poll_frame(cx)).await;
                    let Some(Ok(frame)) = frame else {
                        break frame.is_none();
                    };
                    let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
                    match left.checked_sub(bytes) {
                        Some(rest) => left = rest,
                        None => break false,
                    }
                }
            };
            let settled = async { drained.await && lease.until_ready().await };
            if timeout(time, settled).await == Ok(true) {
                lease.put_back();
            } else {
                lease.abort(CloseReason::BodyDropped);
            }
        });
    }
}

impl fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("ResponseBody");
        if let Some(reading) = &self.reading {
            debug.field("hint", &reading.incoming.size_hint());
        }
        debug.finish_non_exhaustive()
    }
}
