//! The end of a certificate's validity, of which rustls tells nothing: read from the certificate's
//! DER encoding (RFC 5280, section 4.1).

use chrono::NaiveDateTime;
use cresset_base::clock::UnixMillis;

/// Tags of the DER values that are told apart here.
const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// Fields between a certificate's version and its validity: serial number, signature algorithm and
/// issuer.
const BEFORE_VALIDITY: usize = 3;

/// Unix time, seconds, after which the certificate is not valid; `None` if it cannot be read.
pub(super) fn not_after(certificate: &[u8]) -> Option<u64> {
    let (certificate, _) = take(certificate, SEQUENCE)?;
    let (mut fields, _) = take(certificate, SEQUENCE)?;
    if let Some((_, after)) = take(fields, VERSION) {
        fields = after;
    }
    for _ in 0..BEFORE_VALIDITY {
        (_, _, fields) = first(fields)?;
    }
    let (validity, _) = take(fields, SEQUENCE)?;
    let (_, _, ends) = first(validity)?;
    let (tag, time, _) = first(ends)?;
    unix_seconds(tag, std::str::from_utf8(time).ok()?)
}

/// Days before the end of a certificate from which on operators are told.
const RENEWAL_DAYS: u64 = 14;

/// What is wrong with a certificate that ends at `at`; `None` while that is `RENEWAL_DAYS` or more
/// after `now`. Both are Unix seconds.
pub fn ends_soon(at: u64, now: u64) -> Option<String> {
    let verb = if at < now { "ended" } else { "ends" };
    (at < now + RENEWAL_DAYS * 86_400).then(|| format!("{verb} at {}", UnixMillis(1_000 * at)))
}

/// A UTC time has two digits of the year, those of 1950 to 2049.
fn unix_seconds(tag: u8, time: &str) -> Option<u64> {
    let century = match tag {
        UTC_TIME if time < "50" => "20",
        UTC_TIME => "19",
        GENERALIZED_TIME => "",
        _ => return None,
    };
    let time = NaiveDateTime::parse_from_str(&format!("{century}{time}"), "%Y%m%d%H%M%SZ");
    u64::try_from(time.ok()?.and_utc().timestamp()).ok()
}

/// The content of the first value, which has this tag, and what follows it.
fn take(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (found, content, after) = first(der)?;
    (found == tag).then_some((content, after))
}

/// Tag and content of the first value, and what follows it.
fn first(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let [tag, length, rest @ ..] = der else { return None };
    // From 128 on, the number of bytes that the length has stands before it.
    let (length, rest) = match length.checked_sub(0x80) {
        None => (usize::from(*length), rest),
        Some(count) => {
            let (bytes, rest) = rest.split_at_checked(count.into())?;
            let add =
                |length: usize, byte: &u8| length.checked_mul(256)?.checked_add(usize::from(*byte));
            (bytes.iter().try_fold(0, add)?, rest)
        }
    };
    let (content, after) = rest.split_at_checked(length)?;
    Some((*tag, content, after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn certificates_are_renewed_two_weeks_before_their_end() {
        let check = |at, expect: Option<&str>| {
            assert_eq!(ends_soon(at, 86_400).as_deref(), expect);
        };
        check(86_399, Some("ended at 1970-01-01 23:59:59Z"));
        check(86_400, Some("ends at 1970-01-02 00:00:00Z"));
        check(15 * 86_400 - 1, Some("ends at 1970-01-15 23:59:59Z"));
        check(15 * 86_400, None);
    }

    #[test]
    fn times_of_both_kinds() {
        let check = |tag, time, expect| assert_eq!(unix_seconds(tag, time), expect, "{time}");
        check(UTC_TIME, "491231235959Z", Some(2_524_607_999));
        check(UTC_TIME, "700101000001Z", Some(1));
        check(UTC_TIME, "500101000000Z", None);
        check(GENERALIZED_TIME, "20500101000000Z", Some(2_524_608_000));
        check(GENERALIZED_TIME, "99991231235959Z", Some(253_402_300_799));
        check(GENERALIZED_TIME, "20501301000000Z", None);
        check(0x02, "20500101000000Z", None);
    }

    #[test]
    fn what_is_no_certificate_has_no_end() {
        let certificate = super::super::certificates(Path::new("../../tests/it/tls/first.pem"));
        let certificate = certificate.unwrap().remove(0);
        assert_eq!(not_after(&certificate), Some(4_949_055_707));
        for length in 0..certificate.len() {
            assert_eq!(not_after(&certificate[..length]), None, "{length}");
        }
        for bytes in [&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff][..], &[0x30, 0xff, 1], &[0x30, 0x80]] {
            assert_eq!(not_after(bytes), None, "{bytes:?}");
        }
    }
}
