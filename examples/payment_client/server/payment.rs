//! What a client asks for: an amount, a currency, a payee. Checked before any key is claimed.

use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::problem::Problem;

/// A valid request for a payment.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Payment {
    /// In minor units (cents): money is never a float.
    pub(crate) amount: i64,
    pub(crate) currency: String,
    pub(crate) payee: String,
}

impl Payment {
    /// Reads a form (also when no type is named) or JSON. `amount` is required; the rest has defaults,
    /// so that `amount=10` is a whole payment.
    pub(crate) fn read(headers: &HeaderMap, body: &[u8]) -> Result<Self, Problem> {
        let mut payment = Self {
            amount: 0,
            currency: "EUR".to_owned(),
            payee: "shop".to_owned(),
        };
        match media_type(headers).as_str() {
            "" | "application/x-www-form-urlencoded" => payment.read_form(body)?,
            "application/json" => payment.read_json(body)?,
            _ => return Err(Problem::MediaType),
        }
        if payment.amount < 1 {
            return Err(Problem::BodyInvalid(
                "'amount' must be a whole number above 0, in minor units.",
            ));
        }
        if payment.currency.len() != 3 || !payment.currency.bytes().all(|b| b.is_ascii_uppercase())
        {
            return Err(Problem::BodyInvalid(
                "'currency' must be three capital letters.",
            ));
        }
        if payment.payee.is_empty() || payment.payee.len() > 64 {
            return Err(Problem::BodyInvalid("'payee' must be 1 to 64 bytes long."));
        }
        Ok(payment)
    }

    fn read_form(&mut self, body: &[u8]) -> Result<(), Problem> {
        let mut seen = Vec::new();
        for pair in body.split(|&b| b == b'&').filter(|pair| !pair.is_empty()) {
            let mut halves = pair.splitn(2, |&b| b == b'=');
            let name = form_text(halves.next().unwrap_or_default())?;
            let value = form_text(halves.next().unwrap_or_default())?;
            if seen.contains(&name) {
                return Err(Problem::BodyInvalid("A field is given twice."));
            }
            match name.as_str() {
                "amount" => self.amount = value.parse().unwrap_or(0),
                "currency" => self.currency = value,
                "payee" => self.payee = value,
                _ => {}
            }
            seen.push(name);
        }
        Ok(())
    }

    fn read_json(&mut self, body: &[u8]) -> Result<(), Problem> {
        let Ok(Value::Object(fields)) = serde_json::from_slice(body) else {
            return Err(Problem::BodyInvalid("Not a JSON object."));
        };
        self.amount = fields.get("amount").and_then(Value::as_i64).unwrap_or(0);
        for (name, into) in [("currency", &mut self.currency), ("payee", &mut self.payee)] {
            match fields.get(name) {
                None => {}
                Some(Value::String(value)) => into.clone_from(value),
                Some(_) => return Err(Problem::BodyInvalid("A field is not a string.")),
            }
        }
        Ok(())
    }
}

/// SHA-256 over what makes two requests the same: operation, media type, body bytes.
///
/// The raw body, not the parsed one: a retry repeats its bytes, so any difference is another request.
/// Each part is preceded by its length, so that no two splits give the same input.
pub(crate) fn fingerprint(operation: &str, headers: &HeaderMap, body: &[u8]) -> [u8; 32] {
    let media_type = media_type(headers);
    let mut hash = Sha256::new();
    for part in [operation.as_bytes(), media_type.as_bytes(), body] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// The media type without its parameters, in lower case; empty when none is named.
fn media_type(headers: &HeaderMap) -> String {
    let line = headers
        .get(CONTENT_TYPE)
        .map_or(&b""[..], |value| value.as_bytes());
    let essence = line.split(|&b| b == b';').next().unwrap_or_default();
    String::from_utf8_lossy(essence).trim().to_ascii_lowercase()
}

/// Decodes one name or value of an `application/x-www-form-urlencoded` body.
fn form_text(raw: &[u8]) -> Result<String, Problem> {
    const BAD: Problem = Problem::BodyInvalid("Not a well-formed form.");
    let mut text = Vec::with_capacity(raw.len());
    let mut rest = raw.iter();
    while let Some(&byte) = rest.next() {
        text.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || rest.next().and_then(|&b| char::from(b).to_digit(16));
                let (Some(high), Some(low)) = (digit(), digit()) else {
                    return Err(BAD);
                };
                u8::try_from(high * 16 + low).map_err(|_| BAD)?
            }
            other => other,
        });
    }
    String::from_utf8(text).map_err(|_| BAD)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn typed(media_type: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !media_type.is_empty() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        }
        headers
    }

    #[test]
    fn body_is_a_payment_or_a_reason() {
        const FORM: &str = "application/x-www-form-urlencoded";
        type Row = (
            &'static str,
            &'static str,
            Option<(i64, &'static str, &'static str)>,
        );
        let rows: [Row; 13] = [
            ("", "amount=10", Some((10, "EUR", "shop"))),
            (
                FORM,
                "amount=10&currency=CHF&payee=M%C3%BCller+%26+Co",
                Some((10, "CHF", "Müller & Co")),
            ),
            (
                "Application/JSON; charset=utf-8",
                r#"{"amount":7,"payee":"x"}"#,
                Some((7, "EUR", "x")),
            ),
            (FORM, "", None),
            (FORM, "amount=0", None),
            (FORM, "amount=-1", None),
            (FORM, "amount=1.5", None),
            (FORM, "amount=1&amount=2", None),
            (FORM, "amount=1&currency=eur", None),
            (FORM, "amount=1&payee=%zz", None),
            ("application/json", "[1]", None),
            ("application/json", r#"{"amount":"7"}"#, None),
            ("text/plain", "amount=10", None),
        ];
        for (media_type, body, want) in rows {
            let got = Payment::read(&typed(media_type), body.as_bytes());
            let want = want.map(|(amount, currency, payee)| Payment {
                amount,
                currency: currency.to_owned(),
                payee: payee.to_owned(),
            });
            assert_eq!(got.ok(), want, "{media_type} {body}");
        }
    }

    #[test]
    fn fingerprint_tells_operation_type_and_body_apart() {
        let base = fingerprint("POST /payments", &typed("application/json"), b"1");
        assert_eq!(
            base,
            fingerprint("POST /payments", &typed("application/json; a=b"), b"1")
        );
        assert_ne!(
            base,
            fingerprint("POST /payouts", &typed("application/json"), b"1")
        );
        assert_ne!(base, fingerprint("POST /payments", &typed(""), b"1"));
        assert_ne!(
            base,
            fingerprint("POST /payments", &typed("application/json"), b"2")
        );
    }
}
