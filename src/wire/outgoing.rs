//! A request on its way out, which can be called back as long as the kernel has not taken a byte of it.
//!
//! hyper consumes a request when it begins to encode it, and asks the body for its first frames before
//! the first write. Both are kept here until the meter shows that a byte has left: the head as a copy,
//! the frames as cheap clones. If the connection then turns out to be dead, the request goes on to the
//! next one as if nothing had happened, whatever its method and however its body is made.
//!
//! What is kept is bounded by what hyper buffers before its first write (a few hundred KiB), and let go
//! at the first frame after it.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::header::{EXPECT, HeaderValue};
use http::{HeaderMap, Method, Request, StatusCode, Uri, Version};
use http_body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::time::{Sleep, sleep};

use crate::error::BoxError;
use crate::wire::meter::{Mark, Meter};

/// A request in the form in which it goes on the wire.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) head: Head,
    pub(crate) body: OutBody,
    /// Whether it would matter what the kernel knows of a failed delivery: nothing else makes this
    /// request safe to send again.
    pub(crate) wants_evidence: bool,
    /// Whether a retry layer above will send this request again if it fails here.
    pub(crate) is_repeatable: bool,
}

/// Method, target, version and fields.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) version: Version,
    pub(crate) headers: HeaderMap,
    pub(crate) extensions: http::Extensions,
}

impl Head {
    fn request(self, body: OutBody) -> Request<OutBody> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        *request.version_mut() = self.version;
        *request.headers_mut() = self.headers;
        *request.extensions_mut() = self.extensions;
        request
    }
}

impl Outgoing {
    /// Whether it may be asked for with an expectation: not safe to send twice, with a body, and without an
    /// expectation of the caller's.
    pub(crate) fn may_expect(&self) -> bool {
        self.wants_evidence
            && !self.body.is_end_stream()
            && self.head.version == Version::HTTP_11
            && !self.head.headers.contains_key(EXPECT)
    }

    /// Makes the request for hyper, and keeps what is needed to call it back.
    ///
    /// With `expect` the request asks the server whether it wants the body (`Expect: 100-continue`,
    /// [RFC 9110 section 10.1.1]), and the body waits for the answer, at most that long.
    ///
    /// [RFC 9110 section 10.1.1]: https://www.rfc-editor.org/rfc/rfc9110.html#section-10.1.1
    pub(crate) fn depart(
        self,
        meter: &Arc<Meter>,
        mark: Mark,
        expect: Option<Duration>,
    ) -> (Request<OutBody>, Recall) {
        let Outgoing {
            head,
            mut body,
            wants_evidence,
            is_repeatable,
        } = self;
        let returned = body.arm(meter, mark);
        let upload = body.upload.clone();
        let recall = Recall {
            head: head.clone(),
            wants_evidence,
            is_repeatable,
            returned,
            upload,
        };
        let asked = expect.map(|patience| body.hold(patience));
        let mut request = head.request(body);
        if let Some(go) = asked {
            request
                .headers_mut()
                .insert(EXPECT, HeaderValue::from_static("100-continue"));
            let go = Mutex::new(Some(go));
            hyper::ext::on_informational(&mut request, move |response| {
                if response.status() == StatusCode::CONTINUE {
                    let go = go.lock().unwrap_or_else(PoisonError::into_inner).take();
                    // Nobody listens where the patience is over.
                    let _ = go.map(|go| go.send(()));
                }
            });
        }
        (request, recall)
    }
}

/// The way back for a request of which no byte was taken.
#[derive(Debug)]
pub(crate) struct Recall {
    head: Head,
    wants_evidence: bool,
    is_repeatable: bool,
    /// `None` where the request has no body.
    returned: Option<oneshot::Receiver<OutBody>>,
    upload: Upload,
}

impl Recall {
    /// How far the body has got.
    pub(crate) fn upload(&self) -> &Upload {
        &self.upload
    }

    /// The request that hyper handed back untouched, as it was before it departed.
    pub(crate) fn handed_back(self, request: Request<OutBody>) -> Outgoing {
        Outgoing {
            head: self.head,
            body: request.into_body().released(),
            wants_evidence: self.wants_evidence,
            is_repeatable: self.is_repeatable,
        }
    }

    /// The request as it was before it departed. `None` if a byte of it was taken, or its body failed;
    /// but a body that nobody has asked for yet comes back although its head is gone.
    ///
    /// Waits for hyper to let go of the body, which it does when its connection ends.
    pub(crate) async fn back(self) -> Option<Outgoing> {
        let body = match self.returned {
            None => OutBody::empty(),
            Some(returned) => returned.await.ok()?,
        };
        Some(Outgoing {
            head: self.head,
            body,
            wants_evidence: self.wants_evidence,
            is_repeatable: self.is_repeatable,
        })
    }
}

/// How far a request body has got, seen from outside.
#[derive(Clone, Debug)]
pub(crate) struct Upload(Option<Arc<Progress>>);

#[derive(Debug, Default)]
struct Progress {
    begun: AtomicBool,
    finished: AtomicBool,
    released: AtomicBool,
    failed: AtomicBool,
}

impl Upload {
    /// Whether hyper was given any of the body.
    pub(crate) fn has_begun(&self) -> bool {
        let begun = |progress: &Arc<Progress>| progress.begun.load(Ordering::Acquire);
        self.0.as_ref().is_some_and(begun)
    }

    /// Whether hyper was given all of the body.
    pub(crate) fn is_finished(&self) -> bool {
        let finished = |progress: &Arc<Progress>| progress.finished.load(Ordering::Acquire);
        self.0.as_ref().is_none_or(finished)
    }

    /// Whether hyper has let go of the body, and so will not ask for more of it.
    pub(crate) fn is_over(&self) -> bool {
        let released = |progress: &Arc<Progress>| progress.released.load(Ordering::Acquire);
        self.is_finished() || self.0.as_ref().is_none_or(released)
    }

    /// Whether the caller's body returned an error, or panicked.
    pub(crate) fn has_failed(&self) -> bool {
        let failed = |progress: &Arc<Progress>| progress.failed.load(Ordering::Acquire);
        self.0.as_ref().is_some_and(failed)
    }

    fn note(&self, which: impl Fn(&Progress) -> &AtomicBool) {
        if let Some(progress) = &self.0 {
            which(progress).store(true, Ordering::Release);
        }
    }

    fn restart(&self) {
        if let Some(progress) = &self.0 {
            progress.begun.store(false, Ordering::Release);
            progress.finished.store(false, Ordering::Release);
            progress.released.store(false, Ordering::Release);
        }
    }
}

type Inner = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

/// Any request body, with a memory that reaches back to the first byte taken.
pub(crate) struct OutBody {
    /// `None` for an empty body, which costs nothing.
    inner: Option<Inner>,
    /// Frames that were given out before and go out again first.
    again: VecDeque<Frame<Bytes>>,
    departure: Option<Departure>,
    upload: Upload,
    /// The length that the request declares, if it does: hyper asks for no more than that.
    declared: Option<u64>,
    /// Bytes given out on this trip.
    gone: u64,
    /// The hint from before the first frame. It holds for every trip, since each begins at the beginning.
    whole: SizeHint,
    /// Whether a frame was asked for on this trip.
    begun: bool,
    /// The server is being asked whether it wants the body.
    held: Option<Hold>,
}

/// What a body waits for that was announced with an expectation.
struct Hold {
    /// Resolves when the server said to go on; with an error when it gave its final answer instead, with
    /// which hyper drops the callback. `None` from then on.
    go: Option<oneshot::Receiver<()>>,
    /// The answer is not waited for longer than this: the server may not know the question.
    patience: Pin<Box<Sleep>>,
}

/// One trip of a body to a connection.
struct Departure {
    meter: Arc<Meter>,
    mark: Mark,
    /// Frames given out on this trip; `None` once a byte was taken.
    given: Option<VecDeque<Frame<Bytes>>>,
    back: oneshot::Sender<OutBody>,
}

impl OutBody {
    pub(crate) fn empty() -> Self {
        OutBody {
            inner: None,
            again: VecDeque::new(),
            departure: None,
            upload: Upload(None),
            declared: None,
            gone: 0,
            whole: SizeHint::with_exact(0),
            begun: false,
            held: None,
        }
    }

    /// Holds the body back until something is sent here, or the patience is over; for good once the sender
    /// is dropped.
    fn hold(&mut self, patience: Duration) -> oneshot::Sender<()> {
        let (said, go) = oneshot::channel();
        self.held = Some(Hold {
            go: Some(go),
            patience: Box::pin(sleep(patience)),
        });
        said
    }

    fn released(mut self) -> Self {
        self.held = None;
        self
    }

    /// Tells the body which length its request declares.
    pub(crate) fn declare(&mut self, length: Option<u64>) {
        self.declared = length;
    }

    pub(crate) fn new<B>(body: B) -> Self
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<BoxError>,
    {
        if body.is_end_stream() {
            return OutBody::empty();
        }
        OutBody {
            whole: body.size_hint(),
            inner: Some(Box::pin(AsBytes { body })),
            again: VecDeque::new(),
            departure: None,
            upload: Upload(Some(Arc::default())),
            declared: None,
            gone: 0,
            begun: false,
            held: None,
        }
    }

    fn arm(&mut self, meter: &Arc<Meter>, mark: Mark) -> Option<oneshot::Receiver<OutBody>> {
        self.inner.as_ref()?;
        self.upload.restart();
        self.gone = 0;
        self.begun = false;
        let (back, returned) = oneshot::channel();
        self.departure = Some(Departure {
            meter: Arc::clone(meter),
            mark,
            given: Some(VecDeque::new()),
            back,
        });
        Some(returned)
    }

    /// Remembers a frame while it can still be called back.
    fn remember(&mut self, frame: &Frame<Bytes>) {
        let Some(departure) = &mut self.departure else {
            return;
        };
        if departure.given.is_some() && departure.meter.has_taken_since(departure.mark) {
            departure.given = None;
        }
        if let Some(given) = &mut departure.given {
            given.extend(copy(frame));
        }
    }
}

impl Body for OutBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(held) = &mut self.held {
            let Some(go) = &mut held.go else {
                return Poll::Pending;
            };
            match Pin::new(go).poll(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => {
                    held.go = None;
                    return Poll::Pending;
                }
                Poll::Pending => ready!(held.patience.as_mut().poll(cx)),
            }
            self.held = None;
        }
        self.begun = true;
        let frame = match self.again.pop_front() {
            Some(frame) => Some(Ok(frame)),
            None => {
                let OutBody { inner, upload, .. } = &mut *self;
                match inner {
                    Some(inner) => {
                        let mut asked = Asked {
                            upload,
                            has_answered: false,
                        };
                        let polled = inner.as_mut().poll_frame(cx);
                        asked.has_answered = true;
                        ready!(polled)
                    }
                    None => None,
                }
            }
        };
        match &frame {
            Some(Ok(frame)) => {
                self.upload.note(|progress| &progress.begun);
                self.gone += frame.data_ref().map_or(0, Bytes::len) as u64;
                self.remember(frame);
            }
            Some(Err(_)) => self.upload.note(|progress| &progress.failed),
            None => {}
        }
        // Trailers are the end: nobody asks behind them.
        let is_last = match &frame {
            Some(Ok(frame)) => frame.is_trailers(),
            Some(Err(_)) => false,
            None => true,
        };
        let is_declared_end = self.declared.is_some_and(|length| self.gone >= length);
        if is_last || is_declared_end || self.is_end_stream() {
            self.upload.note(|progress| &progress.finished);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let inner_ended = |inner: &Inner| inner.is_end_stream();
        self.again.is_empty() && self.inner.as_ref().is_none_or(inner_ended)
    }

    /// Exact before the first frame, which is when hyper asks; an honest lower bound later.
    fn size_hint(&self) -> SizeHint {
        if !self.begun {
            return self.whole;
        }
        let mut hint = SizeHint::new();
        hint.set_lower(self.whole.lower().saturating_sub(self.gone));
        if let Some(upper) = self.whole.upper() {
            hint.set_upper(upper.saturating_sub(self.gone));
        }
        hint
    }
}

/// The caller's body is being asked for a frame. If it panics instead of an answer, it has failed: what it would give
/// if it were asked again is not the request that was meant.
struct Asked<'a> {
    upload: &'a Upload,
    has_answered: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.has_answered {
            self.upload.note(|progress| &progress.failed);
        }
    }
}

impl Drop for OutBody {
    fn drop(&mut self) {
        let Some(departure) = self.departure.take() else {
            return;
        };
        self.upload.note(|progress| &progress.released);
        let Some(mut again) = departure.given else {
            return;
        };
        let nobody_asked = self.held.is_some();
        if !nobody_asked && departure.meter.has_taken_since(departure.mark) {
            return;
        }
        if self.upload.has_failed() {
            return;
        }
        again.append(&mut self.again);
        let upload = self.upload.clone();
        // Nobody listens if the exchange went well or was dropped.
        let _ = departure.back.send(OutBody {
            inner: self.inner.take(),
            again,
            departure: None,
            upload,
            declared: self.declared,
            gone: 0,
            whole: self.whole,
            begun: false,
            held: None,
        });
    }
}

impl fmt::Debug for OutBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutBody").finish_non_exhaustive()
    }
}

fn copy(frame: &Frame<Bytes>) -> Option<Frame<Bytes>> {
    match frame.data_ref() {
        Some(data) => Some(Frame::data(data.clone())),
        None => frame
            .trailers_ref()
            .map(|trailers| Frame::trailers(trailers.clone())),
    }
}

pin_project_lite::pin_project! {
    /// Any body as one of `Bytes`; free where it is one already.
    struct AsBytes<B> {
        #[pin]
        body: B,
    }
}

impl<B> Body for AsBytes<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(self.project().body.poll_frame(cx));
        Poll::Ready(frame.map(|result| match result {
            Ok(frame) => Ok(frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))),
            Err(error) => Err(error.into()),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
