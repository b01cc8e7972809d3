//! Credential secrets: `<prefix>_key_` or `<prefix>_app_`, then 32 base62 characters of randomness
//! (190 bits) and six of a CRC. The CRC refuses junk and the secrets of other services without a
//! look-up. Only the SHA-256 of a secret is ever stored.

use super::records::CredentialKind;
use sha2::{Digest, Sha256};

const ALPHABET: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const RANDOM_CHARS: usize = 32;
const CHECK_CHARS: usize = 6;
const HINT_CHARS: usize = 4;

/// Makes a new secret from 256 random bits. It is shown once and must not be logged.
pub fn mint(prefix: &str, kind: CredentialKind, random: &[u8; 32]) -> String {
    let head = head(prefix, kind);
    let body = base62(random, RANDOM_CHARS);
    let check = check(&head, &body);
    format!("{head}{body}{check}")
}

/// SHA-256 of a well-formed secret of either kind; `None` for everything else.
pub fn digest(prefix: &str, text: &str) -> Option<[u8; 32]> {
    let kinds = [CredentialKind::ApiKey, CredentialKind::AccessToken];
    let well_formed = kinds.iter().any(|&kind| is_well_formed(&head(prefix, kind), text));
    well_formed.then(|| Sha256::digest(text.as_bytes()).into())
}

/// The last four characters before the checksum: enough to tell secrets apart in a list, useless to
/// guess one.
/// Empty for a text too short to be a secret.
pub fn hint(secret: &str) -> &str {
    let end = secret.len().saturating_sub(CHECK_CHARS);
    secret.get(end.saturating_sub(HINT_CHARS)..end).unwrap_or_default()
}

fn head(prefix: &str, kind: CredentialKind) -> String {
    let kind = match kind {
        CredentialKind::ApiKey => "key",
        CredentialKind::AccessToken => "app",
    };
    format!("{prefix}_{kind}_")
}

fn is_well_formed(head: &str, text: &str) -> bool {
    let Some(tail) = text.strip_prefix(head) else {
        return false;
    };
    let base62 = tail.bytes().all(|byte| byte.is_ascii_alphanumeric());
    base62 && tail.len() == RANDOM_CHARS + CHECK_CHARS && {
        let (body, found) = tail.split_at(RANDOM_CHARS);
        found == check(head, body)
    }
}

fn check(head: &str, body: &str) -> String {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head.as_bytes());
    hasher.update(body.as_bytes());
    base62(&hasher.finalize().to_be_bytes(), CHECK_CHARS)
}

/// The lowest `length` base62 digits of a big-endian number, most significant first.
fn base62(number: &[u8], length: usize) -> String {
    let mut number = number.to_vec();
    let digits: Vec<u8> = (0..length).map(|_| divide(&mut number)).collect();
    let chars = digits.iter().rev();
    chars.map(|&digit| char::from(ALPHABET[usize::from(digit)])).collect()
}

/// Divides the number by 62 in place and returns the remainder.
fn divide(number: &mut [u8]) -> u8 {
    let mut remainder = 0_u32;
    for byte in number {
        let part = remainder << 8 | u32::from(*byte);
        *byte = (part / 62) as u8;
        remainder = part % 62;
    }
    remainder as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minted() -> String {
        mint("cr", CredentialKind::ApiKey, &[7; 32])
    }

    #[test]
    fn a_secret_has_its_form() {
        let secret = minted();
        assert_eq!(secret.len(), "cr_key_".len() + 38);
        assert!(secret.starts_with("cr_key_"));
        assert!(mint("cr", CredentialKind::AccessToken, &[7; 32]).starts_with("cr_app_"));
        assert_ne!(secret, mint("cr", CredentialKind::ApiKey, &[8; 32]));
        assert_eq!(hint(&secret), &secret[35..39]);
        assert_eq!(hint("ab"), "");
    }

    #[test]
    fn base62_is_positional() {
        assert_eq!(base62(&[0], 2), "00");
        assert_eq!(base62(&[61], 2), "0z");
        assert_eq!(base62(&[62], 2), "10");
        assert_eq!(base62(&u32::MAX.to_be_bytes(), 6), "4gfFC3");
    }

    #[test]
    fn only_well_formed_secrets_have_a_digest() {
        let secret = minted();
        let token = mint("cr", CredentialKind::AccessToken, &[7; 32]);
        assert!(digest("cr", &secret).is_some());
        assert!(digest("cr", &token).is_some());
        for junk in [
            "",
            "cr_key_",
            &secret[..secret.len() - 1],
            &format!("{secret}0"),
            &format!(" {secret}"),
            &secret.replace("cr_key_", "cr_app_"),
            &secret.replace("cr_", "dr_"),
            &secret.to_lowercase(),
            &format!("cr_key_{}", "é".repeat(19)),
            &format!("cr_key_{}", "0".repeat(38)),
        ] {
            assert_eq!(digest("cr", junk), None, "{junk}");
        }
        assert_eq!(digest("xx", &secret), None);
    }

    #[test]
    fn any_changed_character_is_noticed() {
        let secret = minted();
        for place in 7..secret.len() {
            let mut bytes = secret.clone().into_bytes();
            bytes[place] = if bytes[place] == b'a' { b'b' } else { b'a' };
            let changed = String::from_utf8(bytes).unwrap();
            assert_eq!(digest("cr", &changed), None, "place {place}");
        }
    }
}
