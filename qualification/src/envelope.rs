//! Signed documents: a payload of a stated type in a DSSE v1 envelope with one Ed25519 signature
//! (RFC 8032).

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Display;

/// Why a stored document proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeFault {
    #[error("it is not signed")]
    Unsigned,
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    #[error("it was signed with another key, {key_id}")]
    ForeignKey { key_id: String },
    #[error("it was changed after it was signed")]
    WrongSignature,
}

impl EnvelopeFault {
    pub(crate) fn unreadable(why: impl Display) -> Self {
        Self::Unreadable(why.to_string())
    }
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    #[serde(rename = "payloadType")]
    payload_type: String,
    /// The payload's bytes in base64.
    payload: String,
    signatures: Vec<EnvelopeSignature>,
}

#[derive(Serialize, Deserialize)]
struct EnvelopeSignature {
    keyid: String,
    /// The signature's 64 bytes in base64.
    sig: String,
}

/// The name of a key: hex SHA-256 of its 32 public bytes.
pub fn key_id(key: &VerifyingKey) -> String {
    hex::encode(Sha256::digest(key.as_bytes()))
}

/// The payload with this key's signature, JSON. Equal input gives equal bytes.
pub fn seal(payload_type: &str, payload: &[u8], key: &SigningKey) -> Vec<u8> {
    let signature = key.sign(&signed_bytes(payload_type, payload));
    let envelope = Envelope {
        payload_type: payload_type.into(),
        payload: BASE64.encode(payload),
        signatures: vec![EnvelopeSignature {
            keyid: key_id(&key.verifying_key()),
            sig: BASE64.encode(signature.to_bytes()),
        }],
    };
    serde_json::to_vec_pretty(&envelope).expect("invariant: an envelope has only string keys")
}

/// [`seal`] of a value as JSON.
pub fn seal_json(payload_type: &str, value: &impl Serialize, key: &SigningKey) -> Vec<u8> {
    let payload = serde_json::to_vec(value).expect("invariant: it is representable in JSON");
    seal(payload_type, &payload, key)
}

/// The value that [`seal_json`] signed with this key.
pub fn open_json<T: DeserializeOwned>(
    stored: &[u8],
    payload_type: &str,
    key: &VerifyingKey,
) -> Result<T, EnvelopeFault> {
    let payload = open(stored, payload_type, key)?;
    serde_json::from_slice(&payload).map_err(EnvelopeFault::unreadable)
}

/// The payload of a document of this type that this key signed.
pub fn open(
    stored: &[u8],
    payload_type: &str,
    key: &VerifyingKey,
) -> Result<Vec<u8>, EnvelopeFault> {
    let stored: Value = serde_json::from_slice(stored).map_err(EnvelopeFault::unreadable)?;
    if stored.get("signatures").is_none() {
        return Err(EnvelopeFault::Unsigned);
    }
    let envelope: Envelope = serde_json::from_value(stored).map_err(EnvelopeFault::unreadable)?;
    let payload = BASE64.decode(&envelope.payload).map_err(EnvelopeFault::unreadable)?;
    let [signature] = envelope.signatures.as_slice() else {
        return Err(EnvelopeFault::unreadable("it has not one signature"));
    };
    if signature.keyid != key_id(key) {
        return Err(EnvelopeFault::ForeignKey { key_id: signature.keyid.clone() });
    }
    let bytes = BASE64.decode(&signature.sig).map_err(EnvelopeFault::unreadable)?;
    let signature = Signature::from_slice(&bytes).map_err(|_| EnvelopeFault::WrongSignature)?;
    if envelope.payload_type != payload_type {
        return Err(EnvelopeFault::unreadable(format!("its type is not {payload_type}")));
    }
    key.verify_strict(&signed_bytes(payload_type, &payload), &signature)
        .map_err(|_| EnvelopeFault::WrongSignature)?;
    Ok(payload)
}

/// The bytes that a DSSE signature covers: the pre-authentication encoding of type and payload.
fn signed_bytes(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the DSSE specification's protocol document.
    #[test]
    fn the_signed_bytes_are_those_of_the_specification() {
        let bytes = signed_bytes("http://example.com/HelloWorld", b"hello world");
        assert_eq!(bytes, b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
    }

    #[test]
    fn a_payload_is_read_under_its_own_type_alone() {
        let key = SigningKey::from_bytes(&[1; 32]);
        let sealed = seal("text/plain", b"hello", &key);
        assert_eq!(sealed, seal("text/plain", b"hello", &key));
        assert_eq!(open(&sealed, "text/plain", &key.verifying_key()).unwrap(), b"hello");
        let other = open(&sealed, "text/html", &key.verifying_key());
        assert!(matches!(other, Err(EnvelopeFault::Unreadable(_))));
    }
}
