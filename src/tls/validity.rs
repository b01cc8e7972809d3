//! The end of a certificate's validity, which rustls does not show.

use cresset_base::UnixMillis;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Unix time, seconds, after which the certificate is not valid; `None` if it cannot be read.
pub(super) fn not_after(certificate: &[u8]) -> Option<u64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    certificate.validity().not_after.timestamp().try_into().ok()
}

/// Days before the end of a certificate from which on operators are told.
const RENEWAL_DAYS: u64 = 14;

/// What is wrong with a certificate that ends at `at`; `None` while that is `RENEWAL_DAYS` or more
/// after `now`. Both are Unix seconds.
pub fn ends_soon(at: u64, now: u64) -> Option<String> {
    let verb = if at < now { "ended" } else { "ends" };
    (at < now + RENEWAL_DAYS * 86_400).then(|| format!("{verb} at {}", UnixMillis(1_000 * at)))
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
