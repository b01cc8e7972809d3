//! A record as it is stored: a statement about the release's files, signed by the node that made
//! it.
//!
//! The statement follows in-toto's Statement v1 with the predicate "test result" v0.1, to which the
//! whole record is added. The envelope is a DSSE v1 envelope with one Ed25519 signature (RFC 8032).

use crate::envelope::{self, EnvelopeFault};
use crate::record::{CheckState, Record, RecordFault, Verdict};
use ed25519_dalek::{SigningKey, VerifyingKey};
use serde_json::{Value, json};

pub use crate::envelope::key_id;

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "https://in-toto.io/attestation/test-result/v0.1";

/// Why a stored record proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatementFault {
    #[error(transparent)]
    Envelope(#[from] EnvelopeFault),
    #[error(transparent)]
    Record(#[from] RecordFault),
}

/// The record as a signed statement, JSON.
pub fn sign(record: &Record, key: &SigningKey) -> Vec<u8> {
    envelope::seal(PAYLOAD_TYPE, statement(record).to_string().as_bytes(), key)
}

/// The record of a statement that this key signed, if its verdict follows from its checks.
pub fn verify(stored: &[u8], key: &VerifyingKey) -> Result<Record, StatementFault> {
    let payload = envelope::open(stored, PAYLOAD_TYPE, key)?;
    let mut statement: Value =
        serde_json::from_slice(&payload).map_err(EnvelopeFault::unreadable)?;
    let record: Record = serde_json::from_value(statement["predicate"]["record"].take())
        .map_err(EnvelopeFault::unreadable)?;
    record.check()?;
    Ok(record)
}

fn statement(record: &Record) -> Value {
    let release = &record.identity.release;
    let digests = |(name, sha256): (&String, &String)| {
        let blake3 = release.blake3.get(name);
        json!({ "name": name, "digest": { "sha256": sha256, "blake3": blake3 } })
    };
    let subject: Vec<Value> = release.files.iter().map(digests).collect();
    let named = |states: &[CheckState]| -> Vec<&str> {
        let checks = record.checks.iter().filter(|check| states.contains(&check.state));
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
            "passedTests": named(&[CheckState::Passed]),
            "warnedTests": named(&[CheckState::NotRun, CheckState::Withheld]),
            "failedTests": named(&[CheckState::Failed]),
            "record": record,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Grade, SelfTestLine, Series};
    use crate::testing::records;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD as BASE64;
    use uuid::Uuid;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    fn fault(stored: &[u8]) -> StatementFault {
        verify(stored, &key(1).verifying_key()).unwrap_err()
    }

    fn envelope_fault(stored: &[u8]) -> EnvelopeFault {
        match fault(stored) {
            StatementFault::Envelope(fault) => fault,
            StatementFault::Record(fault) => panic!("{fault}"),
        }
    }

    /// A record without a reference that says it had one.
    fn self_as_reference(record: Record) -> Record {
        Record { grade: Grade::Reference, ..records::without_reference(record) }
    }

    #[test]
    fn a_signed_record_is_read_back() {
        let mut record = records::of(Verdict::Qualified);
        // A number whose last bit is lost where decimals are read with less care.
        let points = vec![(0.0, 4.689_704_170_628_929e-7)];
        record.checks[0].series.push(Series {
            name: "KL".into(),
            axes: Default::default(),
            points,
        });
        let stored = sign(&record, &key(1));
        assert_eq!(verify(&stored, &key(1).verifying_key()), Ok(record));
    }

    #[test]
    fn whatever_was_not_signed_here_proves_nothing() {
        let record = records::of(Verdict::Qualified);
        assert_eq!(envelope_fault(&serde_json::to_vec(&record).unwrap()), EnvelopeFault::Unsigned);
        assert!(matches!(envelope_fault(b"{"), EnvelopeFault::Unreadable(_)));
        let foreign = EnvelopeFault::ForeignKey { key_id: key_id(&key(2).verifying_key()) };
        assert_eq!(envelope_fault(&sign(&record, &key(2))), foreign);
        // The foreign signature under this node's key id.
        let mut claimed: Value = serde_json::from_slice(&sign(&record, &key(2))).unwrap();
        claimed["signatures"][0]["keyid"] = key_id(&key(1).verifying_key()).into();
        assert_eq!(envelope_fault(claimed.to_string().as_bytes()), EnvelopeFault::WrongSignature);
        let stored: Value = serde_json::from_slice(&sign(&record, &key(1))).unwrap();
        let mut without = stored.clone();
        without["signatures"] = json!([]);
        assert!(matches!(
            envelope_fault(without.to_string().as_bytes()),
            EnvelopeFault::Unreadable(_)
        ));
        let mut other_type = stored;
        other_type["payloadType"] = "application/json".into();
        assert!(matches!(
            envelope_fault(other_type.to_string().as_bytes()),
            EnvelopeFault::Unreadable(_)
        ));
    }

    #[test]
    fn a_missed_fault_fails_a_record_whatever_its_verdict() {
        let line = |right| SelfTestLine {
            place: "op".into(),
            fault: "attention is too sharp".into(),
            check: "witness".into(),
            found_by: None,
            right,
            told: "t".into(),
        };
        let healthy = records::of(Verdict::Qualified);
        let proven = healthy.clone().with_self_test(vec![line(true)]);
        assert_ne!(proven.id, healthy.id);
        assert_eq!(verify(&sign(&proven, &key(1)), &key(1).verifying_key()), Ok(proven));
        let missed = healthy.with_self_test(vec![line(true), line(false)]);
        assert_eq!((missed.verdict, missed.qualified_context_tokens), (Verdict::Failed, 0));
        let claimed = Record { verdict: Verdict::Qualified, ..missed };
        let found = verify(&sign(&claimed, &key(1)), &key(1).verifying_key());
        assert!(matches!(found, Err(StatementFault::Record(RecordFault::Verdict))));
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
            |record| record.identity.release.blake3.clear(),
            |record| record.id = Uuid::max(),
        ];
        for change in changes {
            let record = records::of(Verdict::Qualified);
            let mut stored: Value = serde_json::from_slice(&sign(&record, &key(1))).unwrap();
            let mut changed = record;
            change(&mut changed);
            stored["payload"] = BASE64.encode(statement(&changed).to_string()).into();
            assert_eq!(
                envelope_fault(stored.to_string().as_bytes()),
                EnvelopeFault::WrongSignature
            );
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
            |record| record.grade = Grade::Like,
            |record| *record = self_as_reference(record.clone()),
            |record| record.started_at = record.finished_at + 1,
            |record| record.identity.release.blake3.clear(),
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
