//! Measured times as percentiles, in text and JSON.

use cresset_base::text_table::{align, reach};
use serde_json::{Value, json};
use std::time::Duration;

/// Many durations, kept as microseconds.
#[derive(Debug, Default)]
pub(super) struct Times(Vec<u32>);

impl Times {
    pub(super) fn add(&mut self, time: Duration) {
        self.0.push(u32::try_from(time.as_micros()).unwrap_or(u32::MAX));
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Milliseconds; `null` when nothing was measured.
    pub(super) fn percentiles(mut self) -> Value {
        self.0.sort_unstable();
        let at = |share| nearest_rank(&self.0, share).map(|micros| f64::from(micros) / 1_000.0);
        json!({ "p50": at(0.5), "p90": at(0.9), "p99": at(0.99) })
    }
}

/// The smallest value that `share` of all values do not exceed.
fn nearest_rank(sorted: &[u32], share: f64) -> Option<u32> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

/// A column of a table: its heading, the path of its value in a row, and how the value is shown.
pub(super) type Column = (&'static str, &'static str, fn(&Value) -> String);

/// A list of rows as a table.
pub(super) fn table(rows: &Value, columns: &[Column]) -> String {
    let head = columns.iter().map(|(heading, ..)| (*heading).to_owned()).collect();
    let cells = |row| columns.iter().map(|(_, path, show)| show(reach(row, path))).collect();
    let body = rows.as_array().into_iter().flatten().map(cells);
    align(&std::iter::once(head).chain(body).collect::<Vec<_>>())
}

/// `p50 / p90 / p99` for people.
pub(super) fn show_percentiles(percentiles: &Value) -> String {
    ["p50", "p90", "p99"].map(|name| show(&percentiles[name])).join(" / ")
}

/// A number with three significant digits.
pub(super) fn show(number: &Value) -> String {
    match number.as_f64() {
        None => "-".into(),
        Some(n) if n.abs() < 1.0 => format!("{n:.3}"),
        Some(n) if n.abs() < 10.0 => format!("{n:.2}"),
        Some(n) if n.abs() < 100.0 => format!("{n:.1}"),
        Some(n) => format!("{n:.0}"),
    }
}

pub(super) fn per_second(count: u64, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let check = |millis: &[u64], expect: Value| {
            let mut times = Times::default();
            for &ms in millis {
                times.add(Duration::from_millis(ms));
            }
            assert_eq!(times.percentiles(), expect, "{millis:?}");
        };
        check(&[], json!({ "p50": null, "p90": null, "p99": null }));
        check(&[7], json!({ "p50": 7.0, "p90": 7.0, "p99": 7.0 }));
        check(&[4, 1, 3, 2], json!({ "p50": 2.0, "p90": 4.0, "p99": 4.0 }));
        let hundred: Vec<u64> = (1..=100).rev().collect();
        check(&hundred, json!({ "p50": 50.0, "p90": 90.0, "p99": 99.0 }));
    }

    #[test]
    fn numbers_keep_three_digits() {
        for (number, expect) in
            [(0.12345, "0.123"), (1.239, "1.24"), (56.78, "56.8"), (12345.6, "12346")]
        {
            assert_eq!(show(&json!(number)), expect);
        }
        assert_eq!(show(&Value::Null), "-");
    }
}
