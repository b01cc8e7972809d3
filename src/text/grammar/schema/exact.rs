//! Schemas whose numbers are as they were written. A JSON value of the library holds numbers of 53
//! bits exactly; each other one stands in it as an object with one odd member.

use serde::de::IgnoredAny;
use serde_json::Value;
use std::cmp::Ordering;
use std::fmt::Write;

/// The member that holds a number as it was written. No keyword has such a name.
const EXACT: &str = "\u{0}number";
/// The same object as text, before and behind the number.
const BEFORE: &str = r#"{"\u0000number":""#;
const BEHIND: &str = r#""}"#;
/// Numbers from here on are not told apart in 64 bits of a float.
const LARGEST: f64 = 9_007_199_254_740_992.0;

/// Reads one JSON value.
pub(in super::super) fn parse(text: &str) -> Option<Value> {
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let (mut marked, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(|c: char| matches!(c, '"' | '-' | '0'..='9')) {
        marked.push_str(&rest[..at]);
        rest = &rest[at..];
        let is_text = rest.starts_with('"');
        let length = if is_text { text_length(rest) } else { number_length(rest) };
        let (token, behind) = rest.split_at(length);
        if is_text || is_held(token) {
            marked.push_str(token);
        } else {
            let _ = write!(marked, "{BEFORE}{token}{BEHIND}");
        }
        rest = behind;
    }
    marked.push_str(rest);
    serde_json::from_str(&marked).ok()
}

/// The text of a value that `parse` read, with numbers as they were written.
pub(in super::super) fn write(value: &Value) -> String {
    let (text, mut written) = (value.to_string(), String::new());
    let mut parts = text.split(BEFORE);
    written.extend(parts.next());
    for part in parts {
        let (number, behind) = part.split_once(BEHIND).unwrap_or((part, ""));
        written.push_str(number);
        written.push_str(behind);
    }
    written
}

/// The number that a value of the library would not hold.
pub(in super::super) fn odd_number(value: &Value) -> Option<&str> {
    let members = value.as_object().filter(|members| members.len() == 1)?;
    members.get(EXACT)?.as_str()
}

/// Whether there is such a number in it.
pub(super) fn has_odd_number(value: &Value) -> bool {
    odd_number(value).is_some()
        || match value {
            Value::Array(items) => items.iter().any(has_odd_number),
            Value::Object(members) => members.values().any(has_odd_number),
            _ => false,
        }
}

fn text_length(text: &str) -> usize {
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |at| at + 2)
}

fn number_length(text: &str) -> usize {
    text.find(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E')).unwrap_or(text.len())
}

/// Whether the library's arithmetic gives this number back.
fn is_held(token: &str) -> bool {
    let Ok(float) = token.parse::<f64>() else { return false };
    float.abs() < LARGEST && Decimal::read(token) == Decimal::read(&format!("{float}"))
}

/// A number of any size: its digits, of which the last stands for ten to the exponent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decimal {
    pub negative: bool,
    /// Without zeros at either end; none for zero.
    pub digits: String,
    pub exponent: i64,
}

impl Decimal {
    pub(super) fn read(token: &str) -> Option<Self> {
        let (number, exponent) = token.split_once(['e', 'E']).unwrap_or((token, "0"));
        let (sign, number) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let all = format!("{whole}{fraction}");
        let digits = all.trim_end_matches('0');
        let zeros = (all.len() - digits.len()) as i64;
        let exponent: i64 = exponent.parse().ok()?;
        let exponent = exponent.checked_sub(fraction.len() as i64)?.checked_add(zeros)?;
        let digits = digits.trim_start_matches('0').to_owned();
        let is_zero = digits.is_empty();
        Some(Self {
            negative: sign && !is_zero,
            digits,
            exponent: if is_zero { 0 } else { exponent },
        })
    }

    /// The number that a schema has, in either form.
    pub(super) fn of(value: &Value) -> Option<Self> {
        match value {
            Value::Number(number) => Self::read(&number.to_string()),
            other => Self::read(odd_number(other)?),
        }
    }

    pub(super) fn is_integer(&self) -> bool {
        self.exponent >= 0
    }

    /// Digits in front of the decimal point; none or less for fractions.
    pub(super) fn whole_digits(&self) -> i64 {
        self.exponent.saturating_add(self.digits.len() as i64)
    }

    fn compare_sizes(&self, other: &Self) -> Ordering {
        match (self.digits.is_empty(), other.digits.is_empty()) {
            (true, true) => return Ordering::Equal,
            (true, false) => return Ordering::Less,
            (false, true) => return Ordering::Greater,
            (false, false) => {}
        }
        // Digits without zeros at their ends compare as texts do.
        self.whole_digits().cmp(&other.whole_digits()).then_with(|| self.digits.cmp(&other.digits))
    }
}

impl Ord for Decimal {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.negative, other.negative) {
            (true, false) => Ordering::Less,
            (false, true) => Ordering::Greater,
            (false, false) => self.compare_sizes(other),
            (true, true) => other.compare_sizes(self),
        }
    }
}

impl PartialOrd for Decimal {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_as_they_were_written() {
        for (text, odd) in [
            ("9007199254740991", false),
            ("9007199254740993", true),
            ("-18446744073709551616", true),
            ("0.1", false),
            ("1.50", false),
            ("0.12345678901234567890123", true),
            ("1e400", true),
            (r#"["9007199254740993\"1e400",{"a":1,"9":[2]}]"#, false),
            (r#"{"const":[9007199254740993,"x"]}"#, true),
        ] {
            let value = parse(text).unwrap();
            assert_eq!(has_odd_number(&value), odd, "{text}");
            let same = |token| Decimal::read(token);
            let written = write(&value);
            assert!(written == text || same(&written) == same(text), "{text}: {written}");
        }
        assert!(parse("{").is_none() && parse("01").is_none());
    }

    #[test]
    fn decimals_are_compared_by_value() {
        for (least, most) in [
            ("-1e400", "-9007199254740993"),
            ("-2", "-1.5"),
            ("-0.1", "0"),
            ("0", "1e-400"),
            ("9007199254740992", "9007199254740993"),
            ("12", "12.5"),
            ("99", "1e2"),
        ] {
            let read = |token| Decimal::read(token).unwrap();
            assert!(read(least) < read(most), "{least} {most}");
        }
        assert_eq!(Decimal::read("-0.0"), Decimal::read("0"));
        assert_eq!(Decimal::read("1.50e1"), Decimal::read("15"));
    }
}
