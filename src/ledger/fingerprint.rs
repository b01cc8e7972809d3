//! What makes two sends of a request id the same request: method, path, session and canonical body.
//! Credentials and user agent are not part of it, so that a rotated key still finds its request.

pub use super::canonical::{Canonical, JsonError, canonicalise};
use crate::ids::SessionId;
use sha2::{Digest, Sha256};

/// SHA-256 over the parts, each preceded by its length so that none can run into the next.
pub fn fingerprint(method: &str, path: &str, session: SessionId, body: &Canonical) -> [u8; 32] {
    let body = body.to_string();
    let parts = [method.as_bytes(), path.as_bytes(), session.0.as_bytes(), body.as_bytes()];
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn of(method: &str, path: &str, session: u128, body: &str) -> [u8; 32] {
        let body = canonicalise(body.as_bytes()).unwrap();
        fingerprint(method, path, SessionId(Uuid::from_u128(session)), &body)
    }

    #[test]
    fn the_same_request_has_the_same_fingerprint() {
        let first = of("POST", "/v1/x", 1, r#"{"a":1,"b":"A"}"#);
        assert_eq!(first, of("POST", "/v1/x", 1, r#"{ "b":"\u0041", "a":1 }"#));
    }

    #[test]
    fn every_part_counts() {
        let body = r#"{"a":1}"#;
        let first = of("POST", "/v1/x", 1, body);
        for other in [
            of("PUT", "/v1/x", 1, body),
            of("POST", "/v1/y", 1, body),
            of("POST", "/v1/x", 2, body),
            of("POST", "/v1/x", 1, r#"{"a":1.0}"#),
            of("POST", "/v1/x", 1, r#"{"a":1,"stream":false}"#),
            of("POST/", "v1/x", 1, body),
        ] {
            assert_ne!(first, other);
        }
    }
}
