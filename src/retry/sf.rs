//! A strict parser for one structured field item that is a string ([RFC 9651 section 4.2]).
//!
//! Decides whether a field is one; never repairs what is not.
//!
//! [RFC 9651 section 4.2]: https://www.rfc-editor.org/rfc/rfc9651.html#section-4.2

/// The string's content, unescaped. `None` for anything else; parameters are checked and dropped.
pub(crate) fn string_item(field: &[u8]) -> Option<String> {
    let mut input = Input(field);
    input.spaces();
    let text = input.string()?;
    input.parameters()?;
    input.spaces();
    input.0.is_empty().then_some(text)
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    fn take(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn expect(&mut self, wanted: u8) -> Option<()> {
        (self.take()? == wanted).then_some(())
    }

    fn while_(&mut self, allowed: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self
            .0
            .iter()
            .position(|&b| !allowed(b))
            .unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn spaces(&mut self) {
        self.while_(|b| b == b' ');
    }

    fn string(&mut self) -> Option<String> {
        self.expect(b'"')?;
        let mut text = String::new();
        loop {
            match self.take()? {
                b'"' => return Some(text),
                b'\\' => match self.take()? {
                    b @ (b'"' | b'\\') => text.push(char::from(b)),
                    _ => return None,
                },
                b @ 0x20..=0x7e => text.push(char::from(b)),
                _ => return None,
            }
        }
    }

    fn parameters(&mut self) -> Option<()> {
        while self.peek() == Some(b';') {
            self.take();
            self.spaces();
            if !matches!(self.peek()?, b'a'..=b'z' | b'*') {
                return None;
            }
            self.while_(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*'));
            if self.peek() == Some(b'=') {
                self.take();
                self.bare_item()?;
            }
        }
        Some(())
    }

    fn bare_item(&mut self) -> Option<()> {
        match self.peek()? {
            b'-' | b'0'..=b'9' => self.number().map(drop),
            b'"' => self.string().map(drop),
            b':' => self.binary(),
            b'?' => {
                self.take();
                matches!(self.take()?, b'0' | b'1').then_some(())
            }
            b'@' => {
                self.take();
                (!self.number()?).then_some(())
            }
            b'%' => self.display_string(),
            b'A'..=b'Z' | b'a'..=b'z' | b'*' => {
                self.while_(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&b));
                Some(())
            }
            _ => None,
        }
    }

    /// Whether it is a decimal.
    fn number(&mut self) -> Option<bool> {
        if self.peek() == Some(b'-') {
            self.take();
        }
        let whole = self.while_(|b| b.is_ascii_digit()).len();
        if self.peek() != Some(b'.') {
            return (1..=15).contains(&whole).then_some(false);
        }
        self.take();
        let fraction = self.while_(|b| b.is_ascii_digit()).len();
        ((1..=12).contains(&whole) && (1..=3).contains(&fraction)).then_some(true)
    }

    fn binary(&mut self) -> Option<()> {
        self.expect(b':')?;
        let digits = self
            .while_(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/'))
            .len();
        let padding = self.while_(|b| b == b'=').len();
        self.expect(b':')?;
        // Padding may be left out; what is there must be right.
        let padded = padding == 0 || (digits + padding).is_multiple_of(4);
        (digits % 4 != 1 && padding <= 2 && padded).then_some(())
    }

    fn display_string(&mut self) -> Option<()> {
        self.expect(b'%')?;
        self.expect(b'"')?;
        let mut bytes = Vec::new();
        loop {
            match self.take()? {
                b'"' => return std::str::from_utf8(&bytes).is_ok().then_some(()),
                b'%' => bytes.push(self.hex()? << 4 | self.hex()?),
                b @ 0x20..=0x7e => bytes.push(b),
                _ => return None,
            }
        }
    }

    fn hex(&mut self) -> Option<u8> {
        match self.take()? {
            b @ b'0'..=b'9' => Some(b - b'0'),
            b @ b'a'..=b'f' => Some(b - b'a' + 10),
            _ => None,
        }
    }
}
