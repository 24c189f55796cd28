//! What the crate logs on this thread.

use std::fmt::Write;
use std::sync::{Arc, Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// Keeps every event of this thread until it is dropped.
pub(crate) struct Logs {
    events: Arc<Mutex<Vec<(Level, String)>>>,
    _guard: DefaultGuard,
}

/// With a single subscriber alive, tracing lets the thread that comes to an event first decide for all threads
/// whether anybody wants it, and that may be another test's. With two it asks both.
static SECOND: OnceLock<Dispatch> = OnceLock::new();

impl Logs {
    pub(crate) fn capture() -> Logs {
        SECOND.get_or_init(|| Dispatch::new(tracing_subscriber::registry()));
        let events = Arc::default();
        let capture = Capture(Arc::clone(&events));
        let subscriber = tracing_subscriber::registry().with(capture);
        Logs {
            events,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    /// The events that a program sees which logs no debugging output.
    pub(crate) fn above_debug(&self) -> Vec<String> {
        self.select(|level| *level < Level::DEBUG)
    }

    /// The debugging output.
    pub(crate) fn debug(&self) -> Vec<String> {
        self.select(|level| *level == Level::DEBUG)
    }

    /// Everything: events, spans and what was recorded on them later.
    pub(crate) fn text(&self) -> String {
        self.select(|_| true).join("\n")
    }

    fn select(&self, wanted: impl Fn(&Level) -> bool) -> Vec<String> {
        let events = self.events.lock().unwrap();
        let wanted = events.iter().filter(|(level, _)| wanted(level));
        wanted.map(|(_, text)| text.clone()).collect()
    }
}

struct Capture(Arc<Mutex<Vec<(Level, String)>>>);

impl<S: Subscriber> Layer<S> for Capture {
    fn on_new_span(&self, span: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut text = Text(format!("span {}", span.metadata().name()));
        span.record(&mut text);
        let level = *span.metadata().level();
        self.0.lock().unwrap().push((level, text.0));
    }

    fn on_record(&self, _: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut text = Text("recorded".to_owned());
        values.record(&mut text);
        self.0.lock().unwrap().push((Level::DEBUG, text.0));
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(event.metadata().target().to_owned());
        event.record(&mut text);
        let level = *event.metadata().level();
        self.0.lock().unwrap().push((level, text.0));
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }
}
