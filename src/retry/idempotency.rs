//! What kind of request it is, and the key that makes a POST repeatable.
//!
//! Decides the [`Class`] of a request and reads its key; never invents a key and never changes one. A
//! key is the caller's: it exists, and can be written down, before the first byte is sent.
//!
//! # Invariants
//!
//! * A request whose key cannot be read with certainty has no class: it is not sent.
//! * No key is ever printed.

use std::error::Error as StdError;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

use http::header::HeaderName;
use http::{Extensions, HeaderMap, HeaderValue, Method, Request};

use crate::delivery::TreatAsIdempotent;
use crate::error::Error;
use crate::retry::sf;

/// The default field for the key.
pub(crate) const KEY_FIELD: HeaderName = HeaderName::from_static("idempotency-key");

/// How safe it is to send a request twice.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Class {
    /// The method asks for no change: GET, HEAD, OPTIONS, TRACE, QUERY
    /// ([RFC 9110 section 9.2.1]).
    ///
    /// [RFC 9110 section 9.2.1]: https://www.rfc-editor.org/rfc/rfc9110.html#section-9.2.1
    Safe,
    /// Twice has the effect of once: PUT, DELETE ([RFC 9110 section 9.2.2]), or a request marked
    /// [`TreatAsIdempotent`].
    ///
    /// The answer may still differ: a second DELETE can be 404, and a late second PUT can overwrite
    /// somebody else's newer one. `If-Match` guards against both.
    ///
    /// [RFC 9110 section 9.2.2]: https://www.rfc-editor.org/rfc/rfc9110.html#section-9.2.2
    Idempotent,
    /// Not idempotent, but with an [`IdempotencyKey`] by which the server tells a repetition.
    Keyed,
    /// Everything else. It is sent again only on proof that it had no effect.
    Unkeyed,
}

impl Class {
    /// The class that a method has by itself. Names are case-sensitive; unknown ones are `Unkeyed`.
    ///
    /// ```
    /// use http::Method;
    /// use idempool::Class;
    ///
    /// assert_eq!(Class::of_method(&Method::DELETE), Class::Idempotent);
    /// assert_eq!(Class::of_method(&Method::PATCH), Class::Unkeyed);
    /// ```
    pub fn of_method(method: &Method) -> Self {
        if method.is_safe() {
            Class::Safe
        } else if method.is_idempotent() {
            Class::Idempotent
        } else {
            Class::Unkeyed
        }
    }

    /// A key says more than the caller's mark: it lets the server answer a repetition as the first.
    pub(crate) fn of(method: &Method, extensions: &Extensions, keyed: bool) -> Self {
        match Class::of_method(method) {
            Class::Unkeyed if keyed => Class::Keyed,
            Class::Unkeyed if extensions.get::<TreatAsIdempotent>().is_some() => Class::Idempotent,
            class => class,
        }
    }

    /// The name used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Class::Safe => "safe",
            Class::Idempotent => "idempotent",
            Class::Keyed => "keyed",
            Class::Unkeyed => "unkeyed",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A key by which a server recognises a repeated request
/// ([draft-ietf-httpapi-idempotency-key-header]).
///
/// One key is one operation with one payload: a changed payload needs a new key, and a request that is
/// repeated, also after a restart of the program, needs the old one. So make the key and write it down
/// *before* the request is sent. The retry layer refuses a key (or a clone of it) that it has seen on another
/// method, path or payload, where the payload is bytes. The library never makes up a key and never replaces one: only the
/// caller knows which requests are the same operation.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use idempool::{IdempotencyKey, ReplayBody};
///
/// let key = IdempotencyKey::random();
/// let row = key.as_str().to_owned(); // into the database, with the payment
///
/// let request = http::Request::post("https://pay.example/payments")
///     .body(ReplayBody::from(r#"{"amount":10}"#))?;
/// let request = key.attach(request)?;
/// assert_eq!(request.headers()["idempotency-key"], format!("\"{row}\""));
/// # Ok(())
/// # }
/// ```
///
/// A key can be as good as a password: whoever knows it may be given the stored answer. `Debug` prints
/// `IdempotencyKey(..)`, there is no `Display`, and the header value is marked sensitive.
///
/// [draft-ietf-httpapi-idempotency-key-header]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
#[derive(Clone)]
pub struct IdempotencyKey {
    text: Arc<str>,
    quoted: bool,
    /// What the retry layer saw it on first, shared by all clones.
    payload: Arc<OnceLock<u64>>,
}

/// Two keys are equal if they are the same on the wire.
impl PartialEq for IdempotencyKey {
    fn eq(&self, other: &Self) -> bool {
        (&self.text, self.quoted) == (&other.text, other.quoted)
    }
}

impl Eq for IdempotencyKey {}

impl Hash for IdempotencyKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.text, self.quoted).hash(state);
    }
}

impl IdempotencyKey {
    /// Makes a random key: a version 4 UUID, 122 random bits, 36 characters.
    ///
    /// Sent as a structured field string; for a server that wants it without quotes use
    /// `IdempotencyKey::raw(IdempotencyKey::random().as_str())`.
    pub fn random() -> Self {
        let text = uuid::Uuid::new_v4().hyphenated().to_string();
        IdempotencyKey::of(&text, true)
    }

    fn of(text: &str, quoted: bool) -> Self {
        IdempotencyKey {
            text: text.into(),
            quoted,
            payload: Arc::default(),
        }
    }

    /// Takes a key of the caller's, to be sent as a structured field string: in quotes, with `"` and
    /// `\` escaped ([RFC 9651 section 3.3.3]).
    ///
    /// # Errors
    /// Fails if `text` is empty or has other characters than printable ASCII and space.
    ///
    /// ```
    /// use idempool::IdempotencyKey;
    ///
    /// let key = IdempotencyKey::new(r#"a"b\c"#).unwrap();
    /// assert_eq!(key.header_value(), r#""a\"b\\c""#);
    /// assert!(IdempotencyKey::new("é").is_err());
    /// ```
    ///
    /// [RFC 9651 section 3.3.3]: https://www.rfc-editor.org/rfc/rfc9651.html#section-3.3.3
    pub fn new(text: &str) -> Result<Self, InvalidKey> {
        check(text, |b| (0x20..=0x7e).contains(&b))?;
        Ok(IdempotencyKey::of(text, true))
    }

    /// Takes a key of the caller's, to be sent as it is, without quotes.
    ///
    /// The draft asks for quotes and most servers in use today for none. To such a server the two
    /// forms are two different keys, so do not change the form of one that was sent.
    ///
    /// # Errors
    /// Fails if `text` is empty or has other characters than visible ASCII.
    pub fn raw(text: &str) -> Result<Self, InvalidKey> {
        check(text, |b| (0x21..=0x7e).contains(&b))?;
        Ok(IdempotencyKey::of(text, false))
    }

    /// Reads a key from a field value in the structured form. Parameters are ignored.
    ///
    /// # Errors
    /// Fails if the value is anything but one structured field string, or an empty one
    /// ([RFC 9651 section 4.2]).
    ///
    /// [RFC 9651 section 4.2]: https://www.rfc-editor.org/rfc/rfc9651.html#section-4.2
    pub fn parse_field(value: &HeaderValue) -> Result<Self, InvalidKey> {
        let text = sf::string_item(value.as_bytes()).ok_or(InvalidKey(Reason::NotAString))?;
        IdempotencyKey::new(&text)
    }

    /// The key itself, without quotes: what to write down, and to give to [`new`](Self::new) or
    /// [`raw`](Self::raw) after a restart.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The field value, in this key's form. Marked sensitive.
    pub fn header_value(&self) -> HeaderValue {
        let mut bytes = Vec::with_capacity(self.text.len() + 2);
        if self.quoted {
            bytes.push(b'"');
            for b in self.text.bytes() {
                if matches!(b, b'"' | b'\\') {
                    bytes.push(b'\\');
                }
                bytes.push(b);
            }
            bytes.push(b'"');
        } else {
            bytes.extend_from_slice(self.text.as_bytes());
        }
        // Cannot fail: the text was checked to be ASCII without control characters.
        let mut value = HeaderValue::from_maybe_shared(bytes::Bytes::from(bytes))
            .unwrap_or_else(|_| HeaderValue::from_static(""));
        value.set_sensitive(true);
        value
    }

    /// Notes what the key goes out on, or finds that it went out on something else before: a changed
    /// payload needs a new key. A fingerprint against mistakes, not against attackers.
    pub(crate) fn bind(&self, method: &Method, path: &str, payload: &[u8]) -> Result<(), Error> {
        let mut hasher = std::hash::DefaultHasher::new();
        (method, path, payload).hash(&mut hasher);
        let fingerprint = hasher.finish();
        if *self.payload.get_or_init(|| fingerprint) == fingerprint {
            return Ok(());
        }
        Err(Error::invalid(
            "the idempotency key was used for a request with another payload",
        ))
    }

    /// Puts the key on a request, in the field `Idempotency-Key`.
    ///
    /// The key is also put in the request's extensions, where middleware and the retry layer read it.
    ///
    /// # Errors
    /// Fails with [`InvalidRequest`](crate::ErrorKind::InvalidRequest) if the request has a key
    /// already: which of the two is meant is not for us to choose.
    pub fn attach<B>(&self, request: Request<B>) -> Result<Request<B>, Error> {
        self.attach_as(KEY_FIELD, request)
    }

    /// Puts the key on a request, in a field of another name, such as `PayPal-Request-Id`.
    ///
    /// # Errors
    /// Like [`attach`](Self::attach).
    pub fn attach_as<B>(
        &self,
        field: HeaderName,
        mut request: Request<B>,
    ) -> Result<Request<B>, Error> {
        let attached = request.extensions().get::<IdempotencyKey>().is_some();
        if attached || request.headers().contains_key(&field) {
            return Err(Error::invalid("the request has an idempotency key already"));
        }
        request.headers_mut().insert(&field, self.header_value());
        request.extensions_mut().insert(self.clone());
        request.extensions_mut().insert(AttachedTo(field));
        Ok(request)
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(..)")
    }
}

/// How a key is read that the caller wrote into the header by hand.
///
/// A key that was put on with [`IdempotencyKey::attach`] keeps its own form.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum KeyForm {
    /// A structured field string, in quotes, as the draft has it. Anything else is refused.
    #[default]
    StructuredField,
    /// Any visible ASCII, as most servers have it today.
    Raw,
    /// A structured field string if it begins with a quote, else any visible ASCII.
    Either,
}

/// Text or a field value that is no idempotency key. Does not show the text.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct InvalidKey(Reason);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Reason {
    Empty,
    Character,
    NotAString,
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Reason::Empty => "an idempotency key cannot be empty",
            Reason::Character => "an idempotency key is printable ASCII",
            Reason::NotAString => "the idempotency key is not a structured field string in quotes",
        })
    }
}

impl StdError for InvalidKey {}

/// A request extension: the field that the attached key is in.
#[derive(Clone)]
struct AttachedTo(HeaderName);

/// Whether a request has a key: attached, or written into `field` by hand.
///
/// Fails where it is not certain which key the server will see: two lines, a malformed one, or one
/// that was changed after the key was attached.
pub(crate) fn has_key(
    headers: &HeaderMap,
    extensions: &Extensions,
    field: &HeaderName,
    form: KeyForm,
) -> Result<bool, Error> {
    let attached = extensions.get::<IdempotencyKey>();
    if let Some(key) = attached {
        let place = extensions.get::<AttachedTo>().map_or(field, |to| &to.0);
        let line = single(headers, place)?;
        if line.is_none_or(|line| *line != key.header_value()) {
            return Err(Error::invalid(
                "the idempotency key in the header is not the one that was attached",
            ));
        }
        if place == field {
            return Ok(true);
        }
    }
    let Some(line) = single(headers, field)? else {
        return Ok(attached.is_some());
    };
    let raw = match form {
        KeyForm::StructuredField => false,
        KeyForm::Raw => true,
        KeyForm::Either => !line.as_bytes().starts_with(b"\""),
    };
    let key = if raw {
        line.to_str()
            .map_err(|_| InvalidKey(Reason::Character))
            .and_then(IdempotencyKey::raw)
    } else {
        IdempotencyKey::parse_field(line)
    };
    key.map(|_| true).map_err(Error::invalid)
}

fn single<'h>(
    headers: &'h HeaderMap,
    field: &HeaderName,
) -> Result<Option<&'h HeaderValue>, Error> {
    let mut lines = headers.get_all(field).iter();
    let line = lines.next();
    if lines.next().is_some() {
        return Err(Error::invalid("the request has two idempotency keys"));
    }
    Ok(line)
}

fn check(text: &str, allowed: impl Fn(u8) -> bool) -> Result<(), InvalidKey> {
    if text.is_empty() {
        return Err(InvalidKey(Reason::Empty));
    }
    if !text.bytes().all(allowed) {
        return Err(InvalidKey(Reason::Character));
    }
    Ok(())
}

#[cfg(test)]
#[path = "idempotency_tests.rs"]
mod tests;
