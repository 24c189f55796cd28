//! Promises of `idempotency.rs`.

use proptest::prelude::*;

use super::*;
use crate::delivery::Delivery;
use crate::error::ErrorKind;

fn parse(field: &str) -> Result<IdempotencyKey, InvalidKey> {
    let value = HeaderValue::from_bytes(field.as_bytes()).expect("a field value");
    IdempotencyKey::parse_field(&value)
}

fn post() -> Request<()> {
    Request::post("http://pay.example/")
        .body(())
        .expect("a request")
}

fn keyed(request: &Request<()>, form: KeyForm) -> Result<bool, Error> {
    has_key(request.headers(), request.extensions(), &KEY_FIELD, form)
}

/// RFC 9110 sections 9.2.1 and 9.2.2; names are case-sensitive (R-01).
#[test]
fn methods_have_the_class_of_the_rfc() {
    for (method, class) in [
        ("GET", Class::Safe),
        ("HEAD", Class::Safe),
        ("OPTIONS", Class::Safe),
        ("TRACE", Class::Safe),
        ("QUERY", Class::Safe),
        ("PUT", Class::Idempotent),
        ("DELETE", Class::Idempotent),
        ("POST", Class::Unkeyed),
        ("PATCH", Class::Unkeyed),
        ("CONNECT", Class::Unkeyed),
        ("get", Class::Unkeyed),
        ("Put", Class::Unkeyed),
        ("PROPFIND", Class::Unkeyed),
    ] {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        assert_eq!(Class::of_method(&method), class, "{method}");
    }
}

#[test]
fn key_outranks_the_callers_mark_and_the_method_outranks_both() {
    let mut marked = Extensions::new();
    marked.insert(TreatAsIdempotent);
    let plain = Extensions::new();
    assert_eq!(Class::of(&Method::POST, &plain, true), Class::Keyed);
    assert_eq!(Class::of(&Method::POST, &marked, false), Class::Idempotent);
    assert_eq!(Class::of(&Method::POST, &marked, true), Class::Keyed);
    assert_eq!(Class::of(&Method::PUT, &plain, true), Class::Idempotent);
}

/// RFC 9651 sections 3.3.3 and 4.1.6 (I-01).
#[test]
fn key_is_written_as_a_structured_field_string() {
    let key = IdempotencyKey::new(r#"a"b\c"#).expect("a key");
    assert_eq!(key.header_value(), r#""a\"b\\c""#);
    assert!(key.header_value().is_sensitive());
    for text in ["", "é", "a\tb", "a\nb", "\u{7f}"] {
        assert!(IdempotencyKey::new(text).is_err(), "{text:?}");
    }
}

#[test]
fn raw_key_is_written_as_it_is() {
    let key = IdempotencyKey::raw("8e03978e-40d5").expect("a key");
    assert_eq!(key.header_value(), "8e03978e-40d5");
    for text in ["", "a b", "é", "a\r\nHost: x"] {
        assert!(IdempotencyKey::raw(text).is_err(), "{text:?}");
    }
}

/// RFC 9651 section 4.2 (I-01).
#[test]
fn only_structured_field_strings_are_read() {
    for (field, text) in [
        (r#""k""#, "k"),
        (r#""a\"b""#, "a\"b"),
        (r#""a\\b""#, "a\\b"),
        (r#" "k" "#, "k"),
        (r#""k";v=1"#, "k"),
        (
            r#""k"; a;b=?1;c=:aGk=:;d=@12;e=%"f%c3%bc";f=tok/en;g=-1.5"#,
            "k",
        ),
    ] {
        assert_eq!(parse(field).expect(field).as_str(), text, "{field}");
    }
    for field in [
        "k",
        "8e03-x",
        "'k'",
        "\"k",
        r#""a\nb""#,
        "\"é\"",
        "\"a\tb\"",
        r#""a", "b""#,
        ":aw==:",
        "?1",
        "",
        "\"\"",
        "\t\"k\"",
        r#""k";"#,
        r#""k";A"#,
        r#""k";v="#,
        r#""k" ;v"#,
        r#""k"x"#,
        r#""k";v=1234567890123.5"#,
        r#""k";v=1.2345"#,
        r#""k";v=1234567890123456"#,
        r#""k";v=:YQ======:"#,
        r#""k";v=:Y:"#,
        r#""k";v=:YQ=:"#,
        r#""k";v=1."#,
        r#""k";v=@1.5"#,
        r#""k";v=%"%C3""#,
        r#""k";v=?2"#,
    ] {
        assert!(parse(field).is_err(), "{field:?}");
    }
}

proptest! {
    #[test]
    fn every_key_survives_its_own_field(text in "[ -~]{1,1100}") {
        let key = IdempotencyKey::new(&text).expect("printable");
        prop_assert_eq!(IdempotencyKey::parse_field(&key.header_value()).expect("own form"), key);
    }

    /// Another implementation is the judge.
    #[test]
    fn fields_are_read_as_the_sfv_crate_reads_them(
        field in r#"[ ]{0,2}"?[a"\\ é\t]{0,4}"?(; ?[a*A]?(=[-?@%:"]{0,2}[0-9a"=.*:]{0,18})?){0,2}[ ]{0,1}"#
    ) {
        let value = HeaderValue::from_bytes(field.as_bytes()).expect("a field value");
        let ours = sf::string_item(value.as_bytes());
        let theirs = sfv::Parser::new(value.as_bytes()).parse::<sfv::Item>().ok()
            .and_then(|item| item.bare_item.as_string().map(|s| s.as_str().to_owned()));
        prop_assert_eq!(ours, theirs, "{:?}", field);
    }

    #[test]
    fn parameters_are_read_as_the_sfv_crate_reads_them(
        items in proptest::collection::vec(proptest::sample::select(vec![
            "1", "-1", "--1", "1.5", "1.", ".5", "1.2345", "123456789012.5", "1234567890123.5",
            "123456789012345", "1234567890123456", "\"a\\\"\"", "\"a", ":YQ==:", ":YQ:", ":Y:",
            ":YQ======:", ":Y=Q=:", "::", "?0", "?2", "@1", "@-1", "@1.5", "@", "%\"f%c3%bc\"",
            "%\"%C3\"", "%\"%c3\"", "%", "tok/en:x", "*", "A", "=", "", "a,b",
        ]), 0..3),
        gap in " {0,2}",
    ) {
        let mut field = String::from("\"k\"");
        for item in items {
            field.push_str(&format!(";{gap}v*-_.1={item}"));
        }
        let ours = sf::string_item(field.as_bytes()).is_some();
        let theirs = sfv::Parser::new(&field).parse::<sfv::Item>().is_ok();
        prop_assert_eq!(ours, theirs, "{:?}", field);
    }

    #[test]
    fn no_field_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        sf::string_item(&bytes);
    }
}

/// At least 122 random bits (I-05), and readable before anything is sent (I-07).
#[test]
fn random_keys_differ_and_can_be_written_down() {
    let (one, two) = (IdempotencyKey::random(), IdempotencyKey::random());
    assert_ne!(one, two);
    assert_eq!(one.as_str().len(), 36);
    assert_eq!(IdempotencyKey::new(one.as_str()), Ok(one));
}

#[test]
fn key_is_never_printed() {
    let key = IdempotencyKey::new("secret").expect("a key");
    let request = key.attach(post()).expect("no key yet");
    assert_eq!(format!("{key:?}"), "IdempotencyKey(..)");
    assert!(!format!("{request:?}").contains("secret"));
}

/// The caller's key wins: it is not replaced, and no second one is added (I-03, B18).
#[test]
fn second_key_is_refused_and_the_first_one_stays() {
    let key = IdempotencyKey::random();
    let by_hand = Request::post("/")
        .header("idempotency-key", "\"mine\"")
        .body(())
        .expect("valid");
    for request in [by_hand, key.attach(post()).expect("no key yet")] {
        let error = key.attach(request).expect_err("a second key");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert_eq!(error.delivery(), Delivery::NotSent);
    }
    // Nor in a field of another name.
    let request = key.attach(post()).expect("no key yet");
    let elsewhere = HeaderName::from_static("paypal-request-id");
    assert!(
        IdempotencyKey::random()
            .attach_as(elsewhere, request)
            .is_err()
    );
}

#[test]
fn attached_key_is_accepted_in_its_own_form_and_field() {
    let raw = IdempotencyKey::raw("k-1").expect("a key");
    let request = raw.attach(post()).expect("no key yet");
    assert!(keyed(&request, KeyForm::StructuredField).expect("attached"));
    let field = HeaderName::from_static("paypal-request-id");
    let request = raw.attach_as(field, post()).expect("no key yet");
    assert!(keyed(&request, KeyForm::StructuredField).expect("attached"));
    assert_eq!(request.extensions().get(), Some(&raw));
}

/// One key or none (I-03).
#[test]
fn key_that_is_not_certain_is_refused() {
    let key = IdempotencyKey::random();
    let mut doubled = key.attach(post()).expect("no key yet");
    doubled.headers_mut().append(KEY_FIELD, key.header_value());
    let mut changed = key.attach(post()).expect("no key yet");
    changed
        .headers_mut()
        .insert(KEY_FIELD, HeaderValue::from_static("\"other\""));
    let mut removed = key.attach(post()).expect("no key yet");
    removed.headers_mut().remove(KEY_FIELD);
    let mut unquoted = post();
    unquoted
        .headers_mut()
        .insert(KEY_FIELD, HeaderValue::from_static("k"));
    for request in [doubled, changed, removed, unquoted] {
        let error = keyed(&request, KeyForm::StructuredField).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::InvalidRequest);
        assert_eq!(error.delivery(), Delivery::NotSent);
    }
}

#[test]
fn key_written_by_hand_is_read_in_the_form_of_the_policy() {
    let read = |value: &'static str, form| {
        let mut request = post();
        request
            .headers_mut()
            .insert(KEY_FIELD, HeaderValue::from_static(value));
        keyed(&request, form).is_ok_and(|keyed| keyed)
    };
    assert!(read("\"k\"", KeyForm::StructuredField));
    assert!(!read("k", KeyForm::StructuredField));
    assert!(read("k", KeyForm::Raw) && !read("a b", KeyForm::Raw));
    assert!(read("k", KeyForm::Either) && read("\"a b\"", KeyForm::Either));
    assert!(!read("\"k", KeyForm::Either));
    assert!(!keyed(&post(), KeyForm::Either).expect("no key at all"));
}
