//! Idempotency keys that clients name themselves, in any form, and the credentials that they send.

use super::IDEMPOTENCY_KEY;
use cresset_base::hyphenated;
use hyper::header::{HeaderMap, HeaderValue};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The UUID that stands for a client's own key, which is none: the same one each time. More than
/// one key is left to the node to refuse.
pub(super) fn named(headers: &HeaderMap) -> Option<Uuid> {
    let mut all = headers.get_all(IDEMPOTENCY_KEY).iter();
    let key = all.next().filter(|_| all.next().is_none())?;
    let text = key.to_str().unwrap_or_default();
    let text = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
    let is_id = hyphenated(text).is_some_and(|id| !id.is_nil() && !id.is_max());
    (!is_id && !key.is_empty()).then(|| key_of(&[b"named", key.as_bytes()]))
}

/// Whether a client sent a node's key, as the gateway's own is one: both begin with the service's
/// prefix and the kind. Its owner means it, so that its budget counts.
pub(super) fn is_like(sent: &HeaderValue, own: &HeaderValue) -> bool {
    let kind = |value: &HeaderValue| {
        let (kind, secret) = value.to_str().ok()?.rsplit_once('_')?;
        (!secret.is_empty()).then(|| kind.to_owned())
    };
    kind(own).is_some_and(|own| kind(sent) == Some(own))
}

/// The one key that stands for these texts.
pub(super) fn key_of(texts: &[&[u8]]) -> Uuid {
    let mut digest = Sha256::new();
    for text in texts {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    }
    let digest: [u8; 32] = digest.finalize().into();
    let bytes = digest.first_chunk().copied().unwrap_or_default();
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_own_key_is_told_from_any_text() {
        let header = HeaderValue::from_static;
        let own = header("Bearer cresset_key_abc");
        for (sent, expect) in [
            ("Bearer cresset_key_xyz", true),
            ("Bearer cresset_key_", false),
            ("Bearer any", false),
            ("Bearer sk-proj_1", false),
            ("Basic cresset_key_xyz", false),
        ] {
            assert_eq!(is_like(&header(sent), &own), expect, "{sent}");
        }
        assert!(!is_like(&header("any"), &header("Bearer opaque")), "no key of a node");
    }

    #[test]
    fn a_key_of_any_form_is_one_uuid() {
        let named = |keys: &[&'static str]| {
            let pairs = keys.iter().map(|key| (IDEMPOTENCY_KEY, HeaderValue::from_static(key)));
            super::named(&pairs.collect())
        };
        let one = named(&["order-17"]);
        assert!(one.is_some_and(|id| id.get_version_num() == 8), "{one:?}");
        assert_eq!(named(&["order-17"]), one);
        assert_ne!(named(&["order-18"]), one);
        assert!(named(&["00000000-0000-0000-0000-000000000000"]).is_some());
        for kept in [
            &["11111111-1111-4111-8111-111111111111"][..],
            &["\"11111111-1111-4111-8111-111111111111\""],
            &["order-17", "order-18"],
            &[""],
            &[],
        ] {
            assert_eq!(named(kept), None, "{kept:?}");
        }
    }
}
