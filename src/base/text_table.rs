//! Aligned columns of text.

use serde_json::Value;
use std::fmt::Write;

/// The value at a dotted path.
pub fn reach<'a>(row: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(row, |value, name| &value[name])
}

/// Rows of equal length as columns.
pub fn align(rows: &[Vec<String>]) -> String {
    align_from(rows, &mut Vec::new())
}

/// `align` with columns of at least these widths, which become the ones that were used.
pub fn align_from(rows: &[Vec<String>], widths: &mut Vec<usize>) -> String {
    widths.resize(rows[0].len(), 0);
    for (column, width) in widths.iter_mut().enumerate() {
        let widest = rows.iter().map(|row| row[column].chars().count()).max();
        *width = widest.unwrap_or(0).max(*width);
    }
    rows.iter().fold(String::new(), |mut text, row| {
        let cells = row.iter().zip(widths.iter()).map(|(cell, width)| format!("{cell:width$}"));
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
        text
    })
}
