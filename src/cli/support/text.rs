//! Results as text for people: aligned fields, tables, times and amounts.

use cresset_base::text_table::{align_from, reach};
use cresset_base::{UnixMillis, escaped, is_unseen};
use serde_json::Value;
use std::fmt::Write;

/// One `name  value` line per field; nested objects and lists are left to `--json`.
pub(crate) fn fields(document: &Value) -> String {
    let Value::Object(fields) = document else { return format!("{}\n", cell("", document)) };
    let shown = || fields.iter().filter(|(_, value)| !value.is_object() && !value.is_array());
    let width = shown().map(|(name, _)| name.len()).max().unwrap_or(0);
    shown().fold(String::new(), |mut text, (name, value)| {
        let _ = writeln!(text, "{name:width$}  {}", cell(name, value));
        text
    })
}

/// A list's `data` as a table of the named columns; a dotted name reaches into an object.
pub(crate) fn table(document: &Value, columns: &[&str]) -> String {
    let rows = document["data"].as_array().map_or(&[][..], Vec::as_slice);
    if rows.is_empty() {
        return "(none)\n".to_owned();
    }
    more_of_table(rows, columns, &mut Vec::new())
}

/// The rows as lines of a table whose columns are as wide as `widths`, or wider where a cell is.
/// The table begins with its heads, where there are no widths yet.
pub(crate) fn more_of_table(rows: &[Value], columns: &[&str], widths: &mut Vec<usize>) -> String {
    let head = widths.is_empty().then(|| columns.iter().map(|name| heading(name)).collect());
    let body =
        rows.iter().map(|row| columns.iter().map(|name| cell(name, reach(row, name))).collect());
    align_from(&head.into_iter().chain(body).collect::<Vec<_>>(), widths)
}

/// `after.trialUnits` is headed `TRIAL_UNITS`.
fn heading(path: &str) -> String {
    let name = path.rsplit('.').next().unwrap_or(path);
    name.chars().fold(String::new(), |mut text, c| {
        text.extend(c.is_uppercase().then_some('_'));
        text.push(c.to_ascii_uppercase());
        text
    })
}

/// A freshly issued credential. Its secret is shown this one time only.
pub(crate) fn secret(document: &Value) -> String {
    format!("{}The secret is shown this once. Keep it now.\n", fields(document))
}

/// A value as one cell: `null` is a dash, times are UTC.
fn cell(name: &str, value: &Value) -> String {
    let is_time = name == "at" || name.ends_with("_at") || name.ends_with("_until");
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => plain(text),
        Value::Number(number) if is_time => number.as_u64().map_or_else(|| number.to_string(), utc),
        other => other.to_string(),
    }
}

/// The text on one line, with what could move a terminal's cursor or turn the text around it
/// escaped: some texts come from model files, and some from before names were checked.
pub(crate) fn plain(text: &str) -> String {
    escaped(text, is_unseen).into_owned()
}

/// Unix seconds as `2026-01-31 12:00:00Z`.
pub(crate) fn utc(seconds: u64) -> String {
    UnixMillis(seconds.saturating_mul(1_000)).to_string()
}

/// How far a clock is ahead of another one, in words.
pub(crate) fn ahead(seconds: i64) -> String {
    match seconds {
        0 => "the same".to_owned(),
        1.. => format!("{seconds} s ahead"),
        _ => format!("{} s behind", seconds.unsigned_abs()),
    }
}

/// The age of something that happened, in its largest unit.
pub(crate) fn age(seconds: Option<u64>) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let Some(seconds) = seconds else { return "none known".to_owned() };
    let (unit, name) = UNITS.into_iter().find(|(unit, _)| seconds >= 2 * unit).unwrap_or(UNITS[3]);
    format!("{} {name} ago", seconds / unit)
}

/// Microcredits as credits: `1500` is `0.0015`.
pub(crate) fn credits(units: u64) -> String {
    let text = format!("{}.{:06}", units / 1_000_000, units % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// An amount of a document, which is text; 0 where there is none.
pub(crate) fn amount(document: &Value) -> u64 {
    document.as_str().and_then(|units| units.parse().ok()).unwrap_or(0)
}

pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn times_are_utc() {
        let cases = [
            (0, "1970-01-01 00:00:00Z"),
            (951_782_399, "2000-02-28 23:59:59Z"),
            (951_782_400, "2000-02-29 00:00:00Z"),
            (4_107_542_399, "2100-02-28 23:59:59Z"),
            (4_107_542_400, "2100-03-01 00:00:00Z"),
        ];
        for (seconds, expect) in cases {
            assert_eq!(utc(seconds), expect);
        }
    }

    #[test]
    fn ages_have_one_unit() {
        for (seconds, expect) in
            [(0, "0 s ago"), (119, "119 s ago"), (7_199, "119 min ago"), (86_400, "24 h ago")]
        {
            assert_eq!(age(Some(seconds)), expect);
        }
        assert_eq!((age(Some(200_000)), age(None)), ("2 d ago".into(), "none known".into()));
    }

    #[test]
    fn amounts_lose_no_digit() {
        for (units, expect) in [(0, "0"), (1, "0.000001"), (1_500_000, "1.5"), (10_000_000, "10")] {
            assert_eq!(credits(units), expect);
        }
    }

    #[test]
    fn tables_align_and_reach_into_objects() {
        let until = json!({ "replaced_until": 60, "data": [] });
        assert_eq!(fields(&until), "replaced_until  1970-01-01 00:01:00Z\n");
        let list = json!({ "data": [{ "id": "\u{1b}", "at": 0, "x": { "nUnits": 5 } }, { "id": "long", "at": null, "x": {} }] });
        let expect = "ID      AT                    N_UNITS\n\\u001b  1970-01-01 00:00:00Z  5\nlong    -                     -\n";
        assert_eq!(table(&list, &["id", "at", "x.nUnits"]), expect);
        assert_eq!(table(&json!({ "data": [] }), &["id"]), "(none)\n");
    }
}
