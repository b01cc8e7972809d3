//! Expressions of the integers between two bounds of any size.

use super::exact::Decimal;
use std::fmt::Write;

/// Most digits of an integer without a bound on their side: those of 64 bits.
pub(super) const MOST_DIGITS: usize = 20;
/// Most digits of a bound. Expressions nest once for each.
const LONGEST: i64 = 64;

/// An integer: its digits without leading zeros, of which zero has one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WholeNumber {
    negative: bool,
    digits: String,
}

/// A bound of a range; `exclusive`: it is no part of it.
pub(super) struct RangeBound {
    pub at: Decimal,
    pub exclusive: bool,
}

/// The expression of all integers from `least` to `most`. An error says why there is none.
pub(super) fn expression(
    least: Option<&RangeBound>,
    most: Option<&RangeBound>,
) -> Result<String, String> {
    let [least, most] = [(least, true), (most, false)].map(|(bound, up)| {
        bound.map(|bound| {
            if bound.at.whole_digits() > LONGEST {
                return Err(format!("a bound of integers has at most {LONGEST} digits"));
            }
            Ok(inner(bound, up))
        })
    });
    let (least, most) = (least.transpose()?, most.transpose()?);
    let room = |bound: Option<&WholeNumber>| bound.map_or(0, |bound| bound.digits.len() + 1);
    let digits = MOST_DIGITS.max(room(least.as_ref())).max(room(most.as_ref()));
    let largest = |negative| WholeNumber { negative, digits: "9".repeat(digits) };
    let (least, most) =
        (least.unwrap_or_else(|| largest(true)), most.unwrap_or_else(|| largest(false)));
    let zero = || WholeNumber { negative: false, digits: "0".into() };
    let mut parts = Vec::new();
    if least.negative {
        let nearest = if most.negative { most.digits.as_str() } else { "1" };
        parts.extend(between(nearest, &least.digits).map(|sizes| format!("-({sizes})")));
    }
    if !most.negative {
        let nearest = if least.negative { zero() } else { least };
        parts.extend(between(&nearest.digits, &most.digits));
    }
    if parts.is_empty() {
        Err("no integer lies between its bounds".into())
    } else {
        Ok(parts.join("|"))
    }
}

/// The first integer inside a bound; `up`: it is the lower one.
fn inner(bound: &RangeBound, up: bool) -> WholeNumber {
    let RangeBound { at, exclusive } = bound;
    let whole = at.whole_digits().max(0) as usize;
    let mut digits: String = at.digits.chars().chain(std::iter::repeat('0')).take(whole).collect();
    if digits.is_empty() {
        digits.push('0');
    }
    // Cutting the decimals off goes towards zero.
    let moves = (at.is_integer() && *exclusive) || (!at.is_integer() && at.negative != up);
    let negative = at.negative;
    match (moves, negative != up) {
        (false, _) => normal(negative, digits),
        (true, true) => normal(negative, more(&digits)),
        (true, false) if digits == "0" => normal(!negative, "1".into()),
        (true, false) => normal(negative, less(&digits)),
    }
}

fn normal(negative: bool, digits: String) -> WholeNumber {
    WholeNumber { negative: negative && digits != "0", digits }
}

fn more(digits: &str) -> String {
    let kept = digits.trim_end_matches('9');
    let zeros = "0".repeat(digits.len() - kept.len());
    let Some(last) = kept.bytes().last() else { return format!("1{zeros}") };
    format!("{}{}{zeros}", &kept[..kept.len() - 1], (last + 1) as char)
}

/// One less than a number above zero.
fn less(digits: &str) -> String {
    let kept = digits.trim_end_matches('0');
    let nines = "9".repeat(digits.len() - kept.len());
    let Some(last) = kept.bytes().last() else { return "0".into() };
    let less = format!("{}{}{nines}", &kept[..kept.len() - 1], (last - 1) as char);
    let trimmed = less.trim_start_matches('0');
    if trimmed.is_empty() { "0".into() } else { trimmed.to_owned() }
}

/// The numbers from one to the other, both without a sign; `None` if there are none.
fn between(least: &str, most: &str) -> Option<String> {
    let (short, long) = (least.len(), most.len());
    if short > long || (short == long && least > most) {
        return None;
    }
    if short == long {
        return Some(of_one_length(least, most));
    }
    let mut parts = vec![from(least)];
    if short + 1 < long {
        parts.push(format!("[1-9][0-9]{{{},{}}}", short, long - 2));
    }
    parts.push(of_one_length(&format!("1{}", "0".repeat(long - 1)), most));
    Some(parts.join("|"))
}

fn of_one_length(least: &str, most: &str) -> String {
    let (Some(low), Some(high)) = (least.bytes().next(), most.bytes().next()) else {
        return String::new();
    };
    let rest = least.len() - 1;
    if low == high {
        return format!("{}({})", low as char, of_one_length(&least[1..], &most[1..]));
    }
    let mut parts = vec![format!("{}({})", low as char, from(&least[1..]))];
    if low + 1 < high {
        parts.push(format!("[{}-{}]{}", (low + 1) as char, (high - 1) as char, any(rest)));
    }
    parts.push(format!("{}({})", high as char, up_to(&most[1..])));
    parts.join("|")
}

/// Digits of this length that are no less.
fn from(least: &str) -> String {
    let Some(first) = least.bytes().next() else { return String::new() };
    if least.bytes().all(|digit| digit == b'0') {
        return any(least.len());
    }
    let mut all = format!("{}({})", first as char, from(&least[1..]));
    if first < b'9' {
        let _ = write!(all, "|[{}-9]{}", (first + 1) as char, any(least.len() - 1));
    }
    all
}

/// Digits of this length that are no more.
fn up_to(most: &str) -> String {
    let Some(first) = most.bytes().next() else { return String::new() };
    if most.bytes().all(|digit| digit == b'9') {
        return any(most.len());
    }
    let mut all = format!("{}({})", first as char, up_to(&most[1..]));
    if first > b'0' {
        let _ = write!(all, "|[0-{}]{}", (first - 1) as char, any(most.len() - 1));
    }
    all
}

fn any(count: usize) -> String {
    if count == 0 { String::new() } else { format!("[0-9]{{{count}}}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llguidance::derivre::RegexBuilder;

    fn allows(
        least: Option<(&str, bool)>,
        most: Option<(&str, bool)>,
    ) -> impl FnMut(&str) -> bool + use<> {
        let [least, most] = [least, most].map(|bound| {
            bound.map(|(at, exclusive)| RangeBound { at: Decimal::read(at).unwrap(), exclusive })
        });
        let expression = expression(least.as_ref(), most.as_ref()).unwrap();
        let mut builder = RegexBuilder::new();
        let regex = builder.mk_regex(&expression).unwrap();
        let mut regex = builder.to_regex(regex);
        move |text| regex.is_match(text)
    }

    #[test]
    fn small_ranges_hold_what_they_should() {
        for least in [-120i64, -100, -19, -10, -1, 0, 1, 9, 10, 99] {
            for most in [-101i64, -11, -10, -1, 0, 5, 10, 11, 100, 119, 205] {
                if least > most {
                    continue;
                }
                let (from, to) = (least.to_string(), most.to_string());
                // The same range by bounds that are no part of it.
                let before = (least - 1).to_string();
                let behind = if most < 0 { to.clone() } else { format!("{most}.5") };
                let mut inclusive = allows(Some((&from, false)), Some((&to, false)));
                let mut outside = allows(Some((&before, true)), Some((&behind, false)));
                for number in -250..250 {
                    let text = number.to_string();
                    let inside = (least..=most).contains(&number);
                    assert_eq!(inclusive(&text), inside, "{number} in {least}..={most}");
                    assert_eq!(outside(&text), inside, "{number} in {least}..={most}");
                }
            }
        }
    }

    #[test]
    fn large_bounds_are_exact() {
        let u64s =
            allows(Some(("18446744073709551614", false)), Some(("18446744073709551615", false)));
        let above = allows(Some(("9007199254740993", true)), None);
        let below = allows(None, Some(("-9007199254740993.5", false)));
        let fraction = allows(Some(("-0.5", false)), Some(("0.5", false)));
        let tests: [(Box<dyn FnMut(&str) -> bool>, &[&str], &[&str]); 4] = [
            (
                Box::new(u64s),
                &["18446744073709551614", "18446744073709551615"],
                &["18446744073709551613", "18446744073709551616", "1844674407370955161"],
            ),
            (
                Box::new(above),
                &["9007199254740994", "99999999999999999999"],
                &["9007199254740993", "-9007199254740994", "999999999999999999999"],
            ),
            (
                Box::new(below),
                &["-9007199254740994", "-99999999999999999999"],
                &["-9007199254740993", "9007199254740994"],
            ),
            (Box::new(fraction), &["0"], &["1", "-1"]),
        ];
        for (mut allows, inside, outside) in tests {
            assert!(inside.iter().all(|text| allows(text)), "{inside:?}");
            assert!(!outside.iter().any(|text| allows(text)), "{outside:?}");
        }
        let far = RangeBound { at: Decimal::read("1e400").unwrap(), exclusive: false };
        assert!(expression(Some(&far), None).is_err());
        let [two, one] =
            ["2", "1"].map(|at| RangeBound { at: Decimal::read(at).unwrap(), exclusive: false });
        assert!(expression(Some(&two), Some(&one)).is_err());
    }
}
