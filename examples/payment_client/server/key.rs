//! Reads `Idempotency-Key` and `Account`, strictly.
//!
//! The field is one structured-field Item, a String ([draft section 2.1], [RFC 9651 section 3.3.3]).
//! A lenient reader would take `k` and `"k"` for the same key, or two lines for one: then two clients
//! that mean different payments share an answer, or one client that means the same payment pays twice.
//!
//! [draft section 2.1]: https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header#section-2.1
//! [RFC 9651 section 3.3.3]: https://www.rfc-editor.org/rfc/rfc9651.html#section-3.3.3

use axum::http::HeaderMap;
use sfv::{BareItem, Item, Parser};

use super::problem::Problem;

/// The key of a request; `None` when it carries none.
pub(crate) fn read_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut lines = headers.get_all("idempotency-key").iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err(Problem::KeyMalformed(
            "More than one Idempotency-Key field line.",
        ));
    }
    // Parameters are ignored: the draft defines none, and RFC 9651 has unknown ones ignored.
    let item: Item = Parser::new(line.as_bytes())
        .parse()
        .map_err(|_| Problem::KeyMalformed("Not a structured-field item; quote the key."))?;
    let BareItem::String(key) = item.bare_item else {
        return Err(Problem::KeyMalformed(
            "Not a structured-field string; quote the key.",
        ));
    };
    let key = key.as_str();
    if key.is_empty() {
        return Err(Problem::KeyMalformed("The key is empty."));
    }
    if key.len() > MAX_KEY {
        return Err(Problem::KeyMalformed(
            "The key is longer than 255 characters.",
        ));
    }
    Ok(Some(key.to_owned()))
}

/// The account that a request acts for. It stands where a real server authenticates.
pub(crate) fn read_account(headers: &HeaderMap) -> Result<String, Problem> {
    let mut lines = headers.get_all("account").iter();
    let Some(line) = lines.next() else {
        return Ok("default".to_owned());
    };
    match line.to_str() {
        Ok(name)
            if lines.next().is_none()
                && (1..=64).contains(&name.len())
                && name
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') =>
        {
            Ok(name.to_owned())
        }
        _ => Err(Problem::AccountMalformed),
    }
}

/// Longest key taken, in characters: the limit that most payment APIs publish. It bounds the index.
const MAX_KEY: usize = 255;

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn read(lines: &[&[u8]]) -> Result<Option<String>, Problem> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(
                "idempotency-key",
                HeaderValue::from_bytes(line).expect("a field value"),
            );
        }
        read_key(&headers)
    }

    #[test]
    fn structured_field_string_is_the_only_key() {
        let accepted: [(&str, &str); 6] = [
            (r#""k""#, "k"),
            (r#""a\"b""#, r#"a"b"#),
            (r#""a\\b""#, r"a\b"),
            (r#" "k" "#, "k"),
            (r#""k";v=1"#, "k"),
            (
                r#""8e03978e-40d5-43dd-bc93-6894a57f9324""#,
                "8e03978e-40d5-43dd-bc93-6894a57f9324",
            ),
        ];
        for (line, key) in accepted {
            assert_eq!(read(&[line.as_bytes()]), Ok(Some(key.to_owned())), "{line}");
        }
        let refused: [&str; 12] = [
            "k",
            "8e03-x",
            "'k'",
            r#""k"#,
            r#""a\nb""#,
            "\"é\"",
            "\"a\tb\"",
            r#""a", "b""#,
            ":aw==:",
            "?1",
            "",
            r#""""#,
        ];
        for line in refused {
            let got = read(&[line.as_bytes()]);
            assert!(
                matches!(got, Err(Problem::KeyMalformed(_))),
                "{line}: {got:?}"
            );
        }
    }

    #[test]
    fn two_field_lines_are_no_key() {
        assert!(matches!(
            read(&[b"\"a\"", b"\"a\""]),
            Err(Problem::KeyMalformed(_))
        ));
    }

    #[test]
    fn key_of_255_characters_is_the_longest() {
        let key = |n: usize| format!("\"{}\"", "k".repeat(n));
        assert!(read(&[key(255).as_bytes()]).is_ok());
        assert!(read(&[key(256).as_bytes()]).is_err());
    }
}
