//! What the scenes say: tables and sentences for a person, or one JSON object a line for a program.
//!
//! Both are made from the same rows, so that they cannot differ. Expectations that did not hold are
//! collected here and decide the exit code.

use std::io::{self, Write};
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde_json::Value;

/// One measured case of a scene.
pub(crate) trait Row {
    /// The table's columns, from left to right.
    const COLUMNS: &'static [Column];

    /// One text for each column.
    fn cells(&self) -> Vec<String>;

    /// Names and values in the order in which they are printed.
    fn fields(&self) -> Vec<(&'static str, Value)>;
}

/// The title of a column, and the side that its texts keep to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Column {
    Left(&'static str),
    Right(&'static str),
}

/// Who reads the report.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Format {
    Person,
    Json,
}

/// Writes a report, and remembers what was not as it should be.
pub(crate) struct Report<'out> {
    out: &'out mut dyn Write,
    format: Format,
    compared: u32,
    failures: Vec<String>,
}

impl<'out> Report<'out> {
    pub(crate) fn new(out: &'out mut dyn Write, format: Format) -> Self {
        Self {
            out,
            format,
            compared: 0,
            failures: Vec::new(),
        }
    }

    /// Prints a title. For people only.
    pub(crate) fn title(&mut self, text: &str) -> io::Result<()> {
        let line = "=".repeat(text.chars().count());
        self.say(&format!("\n{text}\n{line}"))
    }

    /// Prints a text as it is. For people only.
    pub(crate) fn say(&mut self, text: &str) -> io::Result<()> {
        match self.format {
            Format::Person => writeln!(self.out, "{text}"),
            Format::Json => Ok(()),
        }
    }

    /// Prints a long line in as many as it needs, set in. For people only.
    pub(crate) fn quote(&mut self, text: &impl ToString) -> io::Result<()> {
        let mut line = String::new();
        for word in text.to_string().split(' ') {
            if line.len() + 1 + word.len() > usize::from(WIDTH) {
                self.say(&line)?;
                line.clear();
            }
            line.push_str(if line.is_empty() { "  " } else { " " });
            line.push_str(word);
        }
        self.say(&line)
    }

    /// Prints rows: as a table, or each as a JSON object.
    pub(crate) fn rows<R: Row>(&mut self, rows: &[R]) -> io::Result<()> {
        match self.format {
            Format::Person => writeln!(self.out, "{}", table(rows)),
            Format::Json => rows
                .iter()
                .try_for_each(|row| writeln!(self.out, "{}", json(&row.fields()))),
        }
    }

    /// Notes `what` as a failure unless it holds. It is printed at the end.
    pub(crate) fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(what());
        }
    }

    /// Expects two counts of the same thing to agree.
    pub(crate) fn agree(&mut self, what: &str, ours: u64, theirs: u64) {
        self.compared += 1;
        self.expect(ours == theirs, || {
            format!("{what}: {ours} by the pool's count, {theirs} by the server's")
        });
    }

    /// Ends the report; gives back what did not hold.
    pub(crate) fn finish(mut self) -> io::Result<Vec<String>> {
        if self.failures.is_empty() {
            let counts = match self.compared {
                0 => "The server gave no counts to compare".to_owned(),
                n => format!("All {n} counts agree with the server's"),
            };
            self.say(&format!(
                "\n{counts}, and no payment was made twice or lost."
            ))?;
        } else {
            self.title("Not as it should be")?;
            for failure in self.failures.clone() {
                self.quote(&format!("* {failure}"))?;
            }
        }
        self.out.flush()?;
        Ok(self.failures)
    }
}

/// A count with its thousands set apart.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A text that may be missing.
pub(crate) fn or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| "-".to_owned(), |text| text.to_string())
}

/// Whole microseconds, for JSON.
pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn table<R: Row>(rows: &[R]) -> Table {
    let mut table = Table::new();
    table
        .load_style(UTF8_FULL_CONDENSED)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(WIDTH)
        .set_header(R::COLUMNS.iter().map(|column| match column {
            Column::Left(title) | Column::Right(title) => *title,
        }))
        .add_rows(rows.iter().map(Row::cells));
    for (at, column) in R::COLUMNS.iter().enumerate() {
        if let (Column::Right(_), Some(column)) = (column, table.column_mut(at)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// By hand, because `serde_json`'s own map would sort the names.
fn json(fields: &[(&'static str, Value)]) -> String {
    let fields: Vec<String> = fields
        .iter()
        .map(|(name, value)| format!("{}:{value}", Value::from(*name)))
        .collect();
    format!("{{{}}}", fields.join(","))
}

/// Fits a terminal beside an editor.
const WIDTH: u16 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_set_apart() {
        let rows = [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (1_234_567, "1,234,567"),
        ];
        for (number, text) in rows {
            assert_eq!(count(number), text);
        }
    }

    #[test]
    fn counts_that_differ_are_a_failure() {
        let mut out = Vec::new();
        let mut report = Report::new(&mut out, Format::Json);
        report.agree("requests", 2, 2);
        report.agree("connections", 1, 2);
        let failures = report.finish().expect("a vector takes all");
        let said = ["connections: 1 by the pool's count, 2 by the server's"];
        assert_eq!(failures, said);
        assert!(out.is_empty(), "JSON is for rows only");
    }
}
