//! A request body that can be sent again, and knows when it cannot.
//!
//! Decides whether one more attempt can have the very same body; never whether one should be made.
//!
//! # Invariants
//!
//! * Two attempts never share a stream: each is whole, or fails with an error, or is not made.
//! * All attempts declare the same exact length, or none declares one.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::error::BoxError;

/// A request body that the retry layer can send more than once.
///
/// From bytes, text or nothing it can be sent any number of times; [`from_fn`](Self::from_fn) makes
/// a new stream for every attempt; [`once`](Self::once) wraps a stream that exists only once, and can
/// be sent again only as long as nobody has read from it.
///
/// It is an ordinary [`Body`] and needs no retry layer.
///
/// ```
/// use idempool::ReplayBody;
///
/// let body = ReplayBody::from(r#"{"amount":10}"#);
/// assert_eq!(http_body::Body::size_hint(&body).exact(), Some(13));
/// ```
#[derive(Default)]
pub struct ReplayBody {
    live: Live,
    source: Source,
}

type Stream = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

/// What this attempt still has to yield.
#[derive(Default)]
enum Live {
    #[default]
    Done,
    Whole(Bytes),
    /// Untouched: the stream is taken out of the slot at the first poll, if it is still attempt
    /// `turn`'s to take.
    Waiting {
        slot: Arc<Slot>,
        turn: u64,
    },
    /// In a mutex only to be `Sync`; it is never contended.
    Stream(Mutex<Stream>),
}

/// Where the next attempt's body comes from.
#[derive(Clone, Default)]
enum Source {
    #[default]
    Empty,
    Whole(Bytes),
    Factory(Arc<dyn Fn() -> Stream + Send + Sync>),
    Slot(Arc<Slot>),
    /// This body was read from before anybody asked for a second one.
    Spent,
}

/// A stream that exists once, and the attempt that may have it.
struct Slot {
    content: Mutex<Content>,
    hint: SizeHint,
    ended: bool,
}

struct Content {
    stream: Option<Stream>,
    /// The newest attempt. An older one that wakes up late finds that it lost its turn.
    turn: u64,
}

impl ReplayBody {
    /// Creates a body without content.
    pub fn empty() -> Self {
        ReplayBody::default()
    }

    /// Creates a body that `factory` makes anew for each attempt, the first one here and now.
    ///
    /// Each call must give the same bytes. What can be checked is: a second body whose exact length
    /// differs from the first one's is not sent, and the request fails with what it had.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http_body_util::Full;
    /// use idempool::ReplayBody;
    ///
    /// let body = ReplayBody::from_fn(|| Full::new(Bytes::from_static(b"one line")));
    /// # drop(body);
    /// ```
    pub fn from_fn<F, B>(factory: F) -> Self
    where
        F: Fn() -> B + Send + Sync + 'static,
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let factory: Arc<dyn Fn() -> Stream + Send + Sync> = Arc::new(move || boxed(factory()));
        ReplayBody {
            live: Live::Stream(Mutex::new(factory())),
            source: Source::Factory(factory),
        }
    }

    /// Wraps a stream that exists only once.
    ///
    /// If an attempt fails before anything was read from it (no connection, or a server that answers
    /// first), it goes with the next attempt. Once read from, the request is not sent again.
    pub fn once<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let slot = Arc::new(Slot {
            hint: body.size_hint(),
            ended: body.is_end_stream(),
            content: Mutex::new(Content {
                stream: Some(boxed(body)),
                turn: 0,
            }),
        });
        ReplayBody {
            live: Live::Waiting {
                slot: slot.clone(),
                turn: 0,
            },
            source: Source::Slot(slot),
        }
    }

    /// Gives the body of this attempt, and the means to make the next one's.
    /// The whole body, where it is there in memory.
    pub(crate) fn whole(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Empty => Some(b""),
            Source::Whole(bytes) => Some(bytes),
            Source::Factory(_) | Source::Slot(_) | Source::Spent => None,
        }
    }

    pub(crate) fn split(self) -> (ReplayBody, Replay) {
        let replay = Replay {
            source: self.source.clone(),
            length: self.size_hint().exact(),
        };
        (self, replay)
    }
}

impl Body for ReplayBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        // A body that was read from must not become the first attempt of a retry layer further down.
        if !matches!(this.live, Live::Done) {
            this.source = Source::Spent;
        }
        if let Live::Waiting { slot, turn } = &this.live {
            match slot.take(*turn) {
                Some(stream) => this.live = Live::Stream(Mutex::new(stream)),
                None => {
                    this.live = Live::Done;
                    let gone = "the one-shot request body went with another attempt";
                    return Poll::Ready(Some(Err(gone.into())));
                }
            }
        }
        match &mut this.live {
            Live::Stream(stream) => {
                let stream = stream.get_mut().unwrap_or_else(PoisonError::into_inner);
                stream.as_mut().poll_frame(cx)
            }
            Live::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                this.live = Live::Done;
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Live::Done | Live::Waiting { .. } => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.live {
            Live::Done => true,
            Live::Whole(bytes) => bytes.is_empty(),
            Live::Waiting { slot, .. } => slot.ended,
            Live::Stream(stream) => lock(stream).is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.live {
            Live::Done => SizeHint::with_exact(0),
            Live::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Live::Waiting { slot, .. } => slot.hint,
            Live::Stream(stream) => lock(stream).size_hint(),
        }
    }
}

impl fmt::Debug for ReplayBody {
    /// Never prints content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody")
            .field("source", &self.source.name())
            .field("length", &self.size_hint().exact())
            .finish()
    }
}

impl From<Bytes> for ReplayBody {
    fn from(bytes: Bytes) -> Self {
        if bytes.is_empty() {
            return ReplayBody::empty();
        }
        ReplayBody {
            live: Live::Whole(bytes.clone()),
            source: Source::Whole(bytes),
        }
    }
}

impl From<Vec<u8>> for ReplayBody {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

impl From<String> for ReplayBody {
    fn from(text: String) -> Self {
        Bytes::from(text).into()
    }
}

impl From<&'static str> for ReplayBody {
    fn from(text: &'static str) -> Self {
        Bytes::from_static(text.as_bytes()).into()
    }
}

impl From<&'static [u8]> for ReplayBody {
    fn from(bytes: &'static [u8]) -> Self {
        Bytes::from_static(bytes).into()
    }
}

impl From<()> for ReplayBody {
    fn from((): ()) -> Self {
        ReplayBody::empty()
    }
}

/// The means to make one more attempt's body. Kept by the retry layer while an attempt runs.
pub(crate) struct Replay {
    source: Source,
    /// What the first attempt declared.
    length: Option<u64>,
}

impl Replay {
    /// Whether the next attempt could have the whole body. Runs no code of the caller's.
    pub(crate) fn is_ready(&self) -> bool {
        match &self.source {
            Source::Empty | Source::Whole(_) | Source::Factory(_) => true,
            Source::Slot(slot) => slot.content().stream.is_some(),
            Source::Spent => false,
        }
    }

    /// Whether it will be ready however much of this attempt's body is read.
    pub(crate) fn is_lasting(&self) -> bool {
        match &self.source {
            Source::Empty | Source::Whole(_) | Source::Factory(_) => true,
            Source::Slot(_) | Source::Spent => false,
        }
    }

    /// Makes the next attempt's body. `None` when there is none, or only one of another length.
    ///
    /// From here on, earlier attempts can no longer take a one-shot stream: an exchange that still
    /// runs in the background must not get it instead.
    pub(crate) fn next(&self) -> Option<ReplayBody> {
        let live = match &self.source {
            Source::Empty => Live::Done,
            Source::Whole(bytes) => Live::Whole(bytes.clone()),
            Source::Factory(factory) => Live::Stream(Mutex::new(factory())),
            Source::Slot(slot) => {
                let mut content = slot.content();
                content.stream.as_ref()?;
                content.turn += 1;
                let turn = content.turn;
                drop(content);
                Live::Waiting {
                    slot: slot.clone(),
                    turn,
                }
            }
            Source::Spent => return None,
        };
        let body = ReplayBody {
            live,
            source: self.source.clone(),
        };
        (body.size_hint().exact() == self.length).then_some(body)
    }
}

impl Source {
    fn name(&self) -> &'static str {
        match self {
            Source::Empty => "empty",
            Source::Whole(_) => "bytes",
            Source::Factory(_) => "factory",
            Source::Slot(_) => "once",
            Source::Spent => "spent",
        }
    }
}

impl Slot {
    fn content(&self) -> MutexGuard<'_, Content> {
        lock(&self.content)
    }

    fn take(&self, turn: u64) -> Option<Stream> {
        let mut content = self.content();
        (content.turn == turn)
            .then(|| content.stream.take())
            .flatten()
    }
}

/// Nothing behind these locks is left half-changed by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn boxed<B>(body: B) -> Stream
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    Box::pin(http_body_util::BodyExt::map_err(body, Into::into))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use http::HeaderMap;
    use http_body_util::{BodyExt, Full};

    use super::*;

    async fn read(body: ReplayBody) -> Bytes {
        body.collect().await.expect("a whole body").to_bytes()
    }

    fn stream(text: &'static str) -> impl Body<Data = Bytes, Error = Infallible> + Send {
        Full::new(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn body_crosses_threads_whatever_it_is_made_of() {
        fn check<T: Send + Sync + Unpin + Default>() {}
        check::<ReplayBody>();
    }

    #[tokio::test]
    async fn bytes_are_whole_in_every_attempt() {
        let (first, replay) = ReplayBody::from("amount=10").split();
        assert_eq!(first.size_hint().exact(), Some(9));
        assert_eq!(read(first).await, "amount=10");
        for _ in 0..3 {
            let next = replay.next().expect("replayable");
            assert_eq!(next.size_hint().exact(), Some(9));
            assert_eq!(read(next).await, "amount=10");
        }
    }

    #[test]
    fn nothing_is_an_ended_body_of_length_zero() {
        for body in [ReplayBody::empty(), "".into(), ().into(), Vec::new().into()] {
            assert!(body.is_end_stream());
            assert_eq!(body.size_hint().exact(), Some(0));
        }
    }

    #[tokio::test]
    async fn factory_is_called_once_for_each_attempt() {
        let calls = Arc::new(AtomicUsize::new(0));
        let count = calls.clone();
        let (first, replay) = ReplayBody::from_fn(move || {
            count.fetch_add(1, Relaxed);
            stream("line")
        })
        .split();
        assert_eq!(read(first).await, "line");
        assert_eq!(calls.load(Relaxed), 1);
        assert!(replay.is_ready());
        assert_eq!(read(replay.next().expect("replayable")).await, "line");
        assert_eq!(calls.load(Relaxed), 2);
    }

    /// The declared length must be the one that follows (B26).
    #[test]
    fn factory_that_changes_its_length_is_not_sent_again() {
        let calls = AtomicUsize::new(0);
        let (_first, replay) = ReplayBody::from_fn(move || match calls.fetch_add(1, Relaxed) {
            0 => stream("long enough"),
            _ => stream("short"),
        })
        .split();
        assert!(replay.next().is_none());
    }

    /// No empty body in place of a spent one (B21, B22).
    #[tokio::test]
    async fn one_shot_stream_that_was_read_is_not_sent_again() {
        let (first, replay) = ReplayBody::once(stream("once")).split();
        assert!(replay.is_ready());
        assert_eq!(read(first).await, "once");
        assert!(!replay.is_ready());
        assert!(replay.next().is_none());
    }

    #[tokio::test]
    async fn one_shot_stream_that_nobody_read_goes_with_the_next_attempt() {
        let (first, replay) = ReplayBody::once(stream("once")).split();
        drop(first);
        let next = replay.next().expect("unread");
        assert_eq!(next.size_hint().exact(), Some(4));
        assert_eq!(read(next).await, "once");
    }

    #[tokio::test]
    async fn late_reader_of_an_earlier_attempt_fails_and_takes_nothing() {
        let (first, replay) = ReplayBody::once(stream("once")).split();
        let next = replay.next().expect("unread");
        assert!(first.collect().await.is_err());
        assert_eq!(read(next).await, "once");
    }

    #[tokio::test]
    async fn body_that_was_read_from_cannot_be_replayed_by_a_layer_further_down() {
        // Of unknown length: no comparison of lengths would notice.
        let endless = || StreamOf(3);
        for mut body in [ReplayBody::from("text"), ReplayBody::from_fn(endless)] {
            body.frame().await;
            let (_rest, replay) = body.split();
            assert!(!replay.is_ready() && replay.next().is_none());
        }
    }

    /// So many frames, and no length.
    struct StreamOf(u32);

    impl Body for StreamOf {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let Some(left) = self.0.checked_sub(1) else {
                return Poll::Ready(None);
            };
            self.0 = left;
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
        }
    }

    #[tokio::test]
    async fn trailers_pass() {
        let body = ReplayBody::from_fn(|| {
            let mut trailers = HeaderMap::new();
            trailers.insert("digest", "abc".parse().expect("a value"));
            Full::new(Bytes::from_static(b"x"))
                .with_trailers(std::future::ready(Some(Ok(trailers))))
        });
        let collected = body.collect().await.expect("a body");
        assert_eq!(
            collected.trailers().map(|t| t["digest"].as_bytes()),
            Some(&b"abc"[..])
        );
    }

    #[tokio::test]
    async fn error_of_a_stream_reaches_the_reader() {
        struct Broken;
        impl Body for Broken {
            type Data = Bytes;
            type Error = BoxError;
            fn poll_frame(
                self: Pin<&mut Self>,
                _: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
                Poll::Ready(Some(Err("disk on fire".into())))
            }
        }
        let error = ReplayBody::from_fn(|| Broken)
            .collect()
            .await
            .expect_err("broken");
        assert_eq!(error.to_string(), "disk on fire");
    }
}
