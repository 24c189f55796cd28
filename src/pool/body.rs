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

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::time::{Sleep, sleep, timeout};

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
/// [`ErrorKind::ResponseBody`](crate::ErrorKind::ResponseBody).
#[derive(Default)]
pub struct ResponseBody {
    /// `None` when all is done: read to the end, failed, or empty.
    reading: Option<Box<Reading>>,
}

struct Reading {
    incoming: Incoming,
    ended: bool,
    after: After,
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
    pub(crate) fn reading(incoming: Incoming, after: After) -> Self {
        let reading = Reading {
            incoming,
            ended: false,
            after,
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
            match ready!(Pin::new(&mut reading.incoming).poll_frame(cx)) {
                Some(Ok(frame)) => return Poll::Ready(Some(Ok(frame))),
                Some(Err(error)) => {
                    let mut error = evidence::of_response_body(error);
                    if let Some(lease) = reading.after.lease.take() {
                        if lease.shared().is_cut() {
                            error = error.with_kind(ErrorKind::PoolClosed);
                        }
                        error = error
                            .with_origin(lease.origin())
                            .with_connection(lease.facts().clone());
                        lease.close(CloseReason::ExchangeFailed);
                    }
                    self.reading = None;
                    return Poll::Ready(Some(Err(error)));
                }
                None => reading.ended = true,
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
    /// The caller wants no more of it. Keeps the connection where that is cheap.
    fn give_up(self) {
        let Reading {
            mut incoming,
            ended,
            mut after,
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
