//! What a run prints: a line for machines, and tables for people.

use std::fmt::Display;

use crate::world::Tally;

/// The start of a line for machines.
#[derive(Clone, Debug)]
pub(crate) struct Line(String);

impl Line {
    pub(crate) fn new(scenario: &str, server: &str, traffic: &str) -> Self {
        Line(format!(
            "simulation: scenario={scenario} server={server} traffic={traffic}"
        ))
    }

    pub(crate) fn with(mut self, name: &str, value: impl Display) -> Self {
        self.0 += &format!(" {name}={value}");
        self
    }

    pub(crate) fn print(self, tally: &Tally, seed: u64) {
        println!(
            "{} reuse_percent={:.2} stale_unkeyed={} stale_repeatable={} dials={} spare_dials={} on_path_dials={} \
             idle_avg={:.2} idle_max={} requests={} seed={seed}",
            self.0,
            tally.reuse_percent(),
            tally.stale_unkeyed,
            tally.stale_repeatable,
            tally.dials(),
            tally.spare_dials,
            tally.on_path_dials,
            tally.idle_average(),
            tally.idle_max,
            tally.requests,
        );
    }
}

/// A table with columns as wide as what is in them.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        Table {
            rows: vec![head.iter().map(|&name| name.to_owned()).collect()],
        }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub(crate) fn print(&self, title: &str) {
        println!("\n{title}");
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(String::len).max().unwrap_or_default()
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line += &match at {
                    0 => format!("{cell:width$}"),
                    _ => format!("  {cell:>width$}"),
                };
            }
            println!("{}", line.trim_end());
        }
        println!();
    }
}
