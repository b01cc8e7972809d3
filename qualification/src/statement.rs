//! A record as it is stored: a statement about the release's files, signed by the node that made
//! it.
//!
//! The statement follows in-toto's Statement v1 with the predicate "test result" v0.1, to which the
//! whole record is added. The envelope is a DSSE v1 envelope with one Ed25519 signature (RFC 8032).

use crate::record::{CheckState, Record, RecordFault, Verdict};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://in-toto.io/attestation/test-result/v0.1";

/// Why a stored record proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatementFault {
    #[error("it is not signed")]
    Unsigned,
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    #[error("it was signed with another key, {key_id}")]
    ForeignKey { key_id: String },
    #[error("it was changed after it was signed")]
    WrongSignature,
    #[error(transparent)]
    Record(#[from] RecordFault),
}

/// A DSSE envelope.
#[derive(Serialize, Deserialize)]
struct Envelope {
    #[serde(rename = "payloadType")]
    payload_type: String,
    /// The statement's bytes in base64.
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

/// The record as a signed statement, JSON.
pub fn sign(record: &Record, key: &SigningKey) -> Vec<u8> {
    let payload = statement(record).to_string();
    let signature = key.sign(&signed_bytes(payload.as_bytes()));
    let envelope = Envelope {
        payload_type: PAYLOAD_TYPE.into(),
        payload: BASE64.encode(payload),
        signatures: vec![EnvelopeSignature {
            keyid: key_id(&key.verifying_key()),
            sig: BASE64.encode(signature.to_bytes()),
        }],
    };
    serde_json::to_vec_pretty(&envelope).expect("invariant: an envelope has only string keys")
}

/// The record of a statement that this key signed, if its verdict follows from its checks.
pub fn verify(stored: &[u8], key: &VerifyingKey) -> Result<Record, StatementFault> {
    let unreadable = |error: &dyn std::fmt::Display| StatementFault::Unreadable(error.to_string());
    let stored: Value = serde_json::from_slice(stored).map_err(|error| unreadable(&error))?;
    if stored.get("signatures").is_none() {
        return Err(StatementFault::Unsigned);
    }
    let envelope: Envelope = serde_json::from_value(stored).map_err(|error| unreadable(&error))?;
    let payload = BASE64.decode(&envelope.payload).map_err(|error| unreadable(&error))?;
    let [signature] = envelope.signatures.as_slice() else {
        return Err(StatementFault::Unreadable("it has not one signature".into()));
    };
    if signature.keyid != key_id(key) {
        return Err(StatementFault::ForeignKey { key_id: signature.keyid.clone() });
    }
    let bytes = BASE64.decode(&signature.sig).map_err(|error| unreadable(&error))?;
    let signature = Signature::from_slice(&bytes).map_err(|_| StatementFault::WrongSignature)?;
    if envelope.payload_type != PAYLOAD_TYPE {
        return Err(StatementFault::Unreadable("it is no in-toto statement".into()));
    }
    key.verify_strict(&signed_bytes(&payload), &signature)
        .map_err(|_| StatementFault::WrongSignature)?;
    let mut statement: Value =
        serde_json::from_slice(&payload).map_err(|error| unreadable(&error))?;
    let record: Record = serde_json::from_value(statement["predicate"]["record"].take())
        .map_err(|error| unreadable(&error))?;
    record.check()?;
    Ok(record)
}

/// The bytes that a DSSE signature covers: the pre-authentication encoding of type and payload.
fn signed_bytes(payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

fn statement(record: &Record) -> Value {
    let files = record.identity.release.files.iter();
    let subject: Vec<Value> = files
        .map(|(name, sha256)| json!({ "name": name, "digest": { "sha256": sha256 } }))
        .collect();
    let named = |state| -> Vec<&str> {
        let checks = record.checks.iter().filter(|check| check.state == state);
        checks.map(|check| check.id.as_str()).collect()
    };
    let result = match record.verdict {
        Verdict::Qualified => "PASSED",
        Verdict::Inconclusive => "WARNED",
        Verdict::Failed => "FAILED",
    };
    json!({
        "_type": STATEMENT_TYPE,
        "subject": subject,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": result,
            "configuration": [],
            "passedTests": named(CheckState::Passed),
            "warnedTests": named(CheckState::NotRun),
            "failedTests": named(CheckState::Failed),
            "record": record,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::records;
    use uuid::Uuid;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    fn fault(stored: &[u8]) -> StatementFault {
        verify(stored, &key(1).verifying_key()).unwrap_err()
    }

    #[test]
    fn a_signed_record_is_read_back() {
        let record = records::of(Verdict::Qualified);
        let stored = sign(&record, &key(1));
        assert_eq!(verify(&stored, &key(1).verifying_key()), Ok(record));
    }

    /// The example of the DSSE specification's protocol document.
    #[test]
    fn the_signed_bytes_are_those_of_the_specification() {
        let bytes = signed_bytes(b"hello world");
        assert_eq!(bytes, b"DSSEv1 28 application/vnd.in-toto+json 11 hello world");
    }

    #[test]
    fn whatever_was_not_signed_here_proves_nothing() {
        let record = records::of(Verdict::Qualified);
        assert_eq!(fault(&serde_json::to_vec(&record).unwrap()), StatementFault::Unsigned);
        assert!(matches!(fault(b"{"), StatementFault::Unreadable(_)));
        let foreign = StatementFault::ForeignKey { key_id: key_id(&key(2).verifying_key()) };
        assert_eq!(fault(&sign(&record, &key(2))), foreign);
        // The foreign signature under this node's key id.
        let mut claimed: Value = serde_json::from_slice(&sign(&record, &key(2))).unwrap();
        claimed["signatures"][0]["keyid"] = key_id(&key(1).verifying_key()).into();
        assert_eq!(fault(claimed.to_string().as_bytes()), StatementFault::WrongSignature);
        let stored: Value = serde_json::from_slice(&sign(&record, &key(1))).unwrap();
        let mut without = stored.clone();
        without["signatures"] = json!([]);
        assert!(matches!(fault(without.to_string().as_bytes()), StatementFault::Unreadable(_)));
        let mut other_type = stored;
        other_type["payloadType"] = "application/json".into();
        assert!(matches!(fault(other_type.to_string().as_bytes()), StatementFault::Unreadable(_)));
    }

    #[test]
    fn a_changed_word_breaks_the_signature() {
        type Change = fn(&mut Record);
        let changes: &[Change] = &[
            |record| record.verdict = Verdict::Failed,
            |record| record.qualified_context_tokens *= 4,
            |record| record.finished_at += 100_000_000_000,
            |record| record.checks.clear(),
            |record| record.identity.host.engine.executable_sha256 = "0".into(),
            |record| record.id = Uuid::max(),
        ];
        for change in changes {
            let record = records::of(Verdict::Qualified);
            let mut envelope: Envelope = serde_json::from_slice(&sign(&record, &key(1))).unwrap();
            let mut changed = record;
            change(&mut changed);
            envelope.payload = BASE64.encode(statement(&changed).to_string());
            let stored = serde_json::to_vec(&envelope).unwrap();
            assert_eq!(fault(&stored), StatementFault::WrongSignature);
        }
    }

    /// The checks decide, even if the key itself signed another verdict.
    #[test]
    fn a_verdict_that_its_checks_do_not_lead_to_is_refused() {
        type Change = fn(&mut Record);
        let changes: &[Change] = &[
            |record| record.checks[0].state = CheckState::Failed,
            |record| record.checks.clear(),
            |record| drop(record.checks.pop()),
            |record| record.checks[1] = record.checks[0].clone(),
            |record| record.checks[0].id = "nothing".into(),
            |record| record.verdict = Verdict::Failed,
            |record| record.started_at = record.finished_at + 1,
        ];
        for change in changes {
            let mut record = records::of(Verdict::Qualified);
            change(&mut record);
            let stored = sign(&record, &key(1));
            assert!(matches!(fault(&stored), StatementFault::Record(_)), "{record:?}");
        }
        let mut failed = records::of(Verdict::Failed);
        failed.qualified_context_tokens = 1;
        assert!(matches!(fault(&sign(&failed, &key(1))), StatementFault::Record(_)));
    }
}
