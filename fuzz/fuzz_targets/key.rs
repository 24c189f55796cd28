//! Any bytes as the value of an `Idempotency-Key` field, and any text as a key.
//!
//! Promises checked: nothing panics; what is accepted is a structured field string by the judgement of
//! an independent parser, with the same content; a key survives the way into a header and back; and the
//! retry policy sees a key exactly where one can be read.

#![no_main]

use http::{HeaderValue, Request};
use idempool::{Class, IdempotencyKey, KeyForm, RetryPolicy};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(value) = HeaderValue::from_bytes(data) {
        field(&value);
    }
    if let Ok(text) = std::str::from_utf8(data) {
        text_of_callers(text);
    }
});

/// The bytes as somebody wrote them into the header by hand.
fn field(value: &HeaderValue) {
    let parsed = IdempotencyKey::parse_field(value).ok();
    let read = parsed.as_ref().map(IdempotencyKey::as_str);
    // Ours alone: a key cannot be empty.
    let expected = oracle(value.as_bytes()).filter(|text| !text.is_empty());
    // And a byte sequence among the parameters is padded in full or not at all; the oracle takes one
    // `=` where two belong.
    let stricter = read.is_none() && value.as_bytes().contains(&b':');
    assert!(
        stricter || read == expected.as_deref(),
        "{read:?}, not {expected:?}"
    );
    if let Some(key) = &parsed {
        survives_the_header(key);
    }

    let visible = !value.is_empty() && value.as_bytes().iter().all(u8::is_ascii_graphic);
    let quoted = value.as_bytes().starts_with(b"\"");
    for (form, readable) in [
        (KeyForm::StructuredField, parsed.is_some()),
        (KeyForm::Raw, visible),
        (
            KeyForm::Either,
            if quoted { parsed.is_some() } else { visible },
        ),
    ] {
        let mut request = Request::post("http://localhost/pay").body(()).unwrap();
        request
            .headers_mut()
            .insert("idempotency-key", value.clone());
        let class = RetryPolicy::default().key_form(form).class_of(&request);
        let expected = readable.then_some(Class::Keyed);
        assert_eq!(class.ok(), expected, "{form:?}");
    }
}

fn text_of_callers(text: &str) {
    let printable = |b: u8| b == b' ' || b.is_ascii_graphic();
    let quoted = IdempotencyKey::new(text);
    let raw = IdempotencyKey::raw(text);
    assert_eq!(
        quoted.is_ok(),
        !text.is_empty() && text.bytes().all(printable)
    );
    assert_eq!(
        raw.is_ok(),
        !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic())
    );
    if let Ok(key) = quoted {
        assert_eq!(key.as_str(), text);
        survives_the_header(&key);
    }
    if let Ok(key) = raw {
        assert_eq!(key.as_str(), text);
        assert_eq!(key.header_value(), text);
        attached_is_keyed(&key);
    }
}

fn survives_the_header(key: &IdempotencyKey) {
    let value = key.header_value();
    assert!(value.is_sensitive());
    assert_eq!(oracle(value.as_bytes()).as_deref(), Some(key.as_str()));
    assert!(IdempotencyKey::parse_field(&value).as_ref() == Ok(key));
    attached_is_keyed(key);
}

fn attached_is_keyed(key: &IdempotencyKey) {
    let request = Request::post("http://localhost/pay").body(()).unwrap();
    let request = key.attach(request).expect("no key yet");
    let class = RetryPolicy::default().class_of(&request);
    assert_eq!(class.expect("a readable key"), Class::Keyed);
    assert!(key.attach(request).is_err(), "a second key was taken");
}

/// The content of a structured field string, by the `sfv` crate.
fn oracle(field: &[u8]) -> Option<String> {
    let item: sfv::Item = sfv::Parser::new(field).parse().ok()?;
    item.bare_item
        .as_string()
        .map(|text| text.as_str().to_owned())
}
