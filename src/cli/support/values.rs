//! Parsers for values that people type: amounts, durations, names.

use chrono::{Months, NaiveDate};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cresset_base::{AccountId, Clock, SystemClock, UnixMillis, is_unseen};
use serde::de::DeserializeOwned;
use std::net::{Ipv4Addr, SocketAddr};
#[cfg(feature = "prover")]
use std::path::PathBuf;
use std::time::Duration;

/// Longest name, label or reference, characters.
const MAX_LABEL: usize = 128;

/// A name that is shown to people later on: it has visible characters, and none that move a
/// terminal's cursor or turn the direction of the text around them.
pub(crate) fn label(text: &str) -> Result<String, String> {
    let fits =
        text.chars().count() <= MAX_LABEL && !text.contains(is_unseen) && !text.trim().is_empty();
    let expected = || {
        format!(
            "expected 1 to {MAX_LABEL} characters, without control characters and marks of direction"
        )
    };
    fits.then(|| text.to_owned()).ok_or_else(expected)
}

/// An account, by its id or by its name where no other has the same.
#[derive(Clone, Debug)]
pub(crate) enum AccountArgument {
    Id(AccountId),
    Name(String),
}

/// Texts in the form of ids are ids, never names. An account may have a name that no new one gets.
pub(crate) fn account(text: &str) -> Result<AccountArgument, String> {
    match text.parse() {
        Ok(id) => Ok(AccountArgument::Id(id)),
        Err(_) if text.trim().is_empty() => label(text).map(AccountArgument::Name),
        Err(_) => Ok(AccountArgument::Name(text.to_owned())),
    }
}

/// The beginning of a day or a month (UTC).
pub(crate) fn date(text: &str) -> Result<UnixMillis, String> {
    let day = if text.len() == 7 { format!("{text}-01") } else { text.to_owned() };
    let time = day.parse::<NaiveDate>().ok().and_then(|day| day.and_hms_opt(0, 0, 0));
    let milliseconds = time.and_then(|time| time.and_utc().timestamp_millis().try_into().ok());
    let expected = "expected a day or a month (UTC), such as 2026-11-24 or 2026-11";
    milliseconds.map(UnixMillis).ok_or_else(|| expected.to_owned())
}

/// A month (UTC): its beginning and that of the next one.
pub(crate) fn month(text: &str) -> Result<[UnixMillis; 2], String> {
    let expected = || "expected a month, such as 2026-11".to_owned();
    let begin = format!("{text}-01").parse::<NaiveDate>().map_err(|_| expected())?;
    let next = begin.checked_add_months(Months::new(1)).ok_or_else(expected)?;
    Ok([date(text)?, date(&next.to_string())?])
}

/// Checks the report path before the (long) run, so that a bad path does not cost the run.
#[cfg(feature = "prover")]
pub(crate) fn report(text: &str) -> Result<PathBuf, String> {
    cresset_base::durable_file::file_of_kind(text, &["html", "htm", "md", "json"])
        .ok_or("expected a file in a folder that exists, ending in .html, .md or .json".to_owned())
}

/// An address to listen on. A port alone, `:PORT` and `localhost:PORT` mean this machine alone.
pub(crate) fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':')).unwrap_or(text);
    if let Ok(port) = port.parse() {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    text.parse().map_err(|_| {
        "expected IP:PORT, such as 127.0.0.1:8080 or [::]:8080, or a port of this machine alone, \
         such as 8080 or localhost:8080"
            .to_owned()
    })
}

/// One of `names`, which are the names that values of `T` have in JSON.
pub(crate) fn named<T: DeserializeOwned + Clone + Send + Sync + 'static>(
    names: &'static [&'static str],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(names.iter().copied())
        .try_map(|name| serde_json::from_value::<T>(name.into()))
}

/// `on` or `off`.
pub(crate) fn on_or_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|word| word == "on")
}

/// Microcredits: digits, with `_` anywhere between them to ease reading.
pub(crate) fn units(text: &str) -> Result<u64, String> {
    if text.starts_with('-') {
        return Err(
            "an amount is zero or more; `cresset credits debit` takes credits back".to_owned()
        );
    }
    text.replace('_', "")
        .parse()
        .map_err(|_| "expected a whole number of microcredits, such as 5_000_000".to_owned())
}

/// A length of time: a number and one of s, m, h, d, w.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let expected = || "expected a number and a unit (s, m, h, d or w), such as 30d".to_owned();
    let unit = text.chars().last().ok_or_else(expected)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        'w' => 604_800,
        _ => return Err(expected()),
    };
    let count: u64 = text[..text.len() - unit.len_utf8()].parse().map_err(|_| expected())?;
    match count.checked_mul(seconds) {
        Some(total @ 1..) => Ok(Duration::from_secs(total)),
        _ => Err(expected()),
    }
}

/// The time after now by `time`.
pub(crate) fn from_now(time: Duration) -> UnixMillis {
    let ahead = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    UnixMillis(SystemClock.now().0.saturating_add(ahead))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_and_months() {
        let second = |at: UnixMillis| at.seconds();
        let check = |text: &str, expect: Option<u64>| {
            assert_eq!(date(text).ok().map(second), expect, "{text}");
        };
        check("1970-01-02", Some(86_400));
        check("1970-02", Some(31 * 86_400));
        check("1969-12-31", None);
        check("2026-13", None);
        check("2026-1-1x", None);
        check("today", None);
        assert_eq!(month("1970-12").unwrap().map(second), [334 * 86_400, 365 * 86_400]);
        assert!(month("1970-12-01").is_err() && month("1970").is_err());
    }

    #[test]
    fn durations() {
        let check = |text: &str, expect: Option<u64>| {
            assert_eq!(duration(text).ok().map(|d| d.as_secs()), expect);
        };
        check("30d", Some(2_592_000));
        check("90s", Some(90));
        check("2w", Some(1_209_600));
        for wrong in [
            "",
            "d",
            "30",
            "-1d",
            "1.5h",
            "0s",
            "30é",
            "99999999999999999999d",
            "18446744073709551615w",
        ] {
            check(wrong, None);
        }
    }

    #[test]
    fn addresses_to_listen_on() {
        let check = |text: &str, expect: Option<&str>| {
            let found = listen_address(text).map(|address| address.to_string());
            assert_eq!(found.as_deref().ok(), expect, "{text}");
        };
        for text in ["127.0.0.1:8080", "localhost:8080", ":8080", "8080"] {
            check(text, Some("127.0.0.1:8080"));
        }
        check("0.0.0.0:0", Some("0.0.0.0:0"));
        check("[::1]:80", Some("[::1]:80"));
        for text in ["", ":", "localhost", "65536", "example.org:80", "127.0.0.1", "-1", "::1:80x"]
        {
            check(text, None);
        }
        assert!(listen_address("example.org:80").unwrap_err().contains("such as 127.0.0.1:8080"));
    }

    #[test]
    fn labels() {
        for right in ["acme", "Zoë & Co.", &"x".repeat(MAX_LABEL)] {
            assert_eq!(label(right).as_deref(), Ok(right));
        }
        for wrong in
            ["", " ", "two\nlines", "\u{1b}[31mred", "a\u{202e}b", &"x".repeat(MAX_LABEL + 1)]
        {
            assert!(label(wrong).is_err(), "{wrong:?}");
        }
    }

    #[cfg(feature = "prover")]
    #[test]
    fn reports() {
        for right in ["report.html", "./report.md", "../report.json"] {
            assert_eq!(report(right), Ok(right.into()));
        }
        for wrong in ["", "report", "report.txt", "/nowhere/report.md"] {
            assert!(report(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn amounts() {
        let check = |text: &str, expect: Option<u64>| assert_eq!(units(text).ok(), expect);
        check("5_000_000", Some(5_000_000));
        check("0", Some(0));
        for wrong in ["", "1.5", "-1", "1M"] {
            check(wrong, None);
        }
        assert!(units("-5").unwrap_err().contains("credits debit"));
    }
}
