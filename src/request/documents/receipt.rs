//! The receipt of a completed request: an in-toto Statement v1 about its answer, in a DSSE v1
//! envelope. It holds digests of prompt and answer, never their text, and nothing of the machine.
//! Times are Unix seconds, amounts integer strings, digests hex.

use super::UsageObject;
use cresset_base::{AttemptId, ModelId, RequestId, SessionId, UnixMillis};
use cresset_catalogue::NodePublicKey;
use cresset_ledger::{
    AskedGeneration, Attempt, FinishReason, Microcredits, Prices, ReceiptFacts, ReceiptProof,
    RequestRecord, Usage,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use uuid::Uuid;

const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
const PREDICATE_TYPE: &str = "urn:cresset:receipt:v1";

/// The receipt as it is sent.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is used")]
#[schemars(rename = "Receipt")]
pub struct ReceiptEnvelope {
    #[serde(rename = "payloadType")]
    #[schemars(extend("const" = "application/vnd.in-toto+json"))]
    payload_type: String,
    /// Base64 of an in-toto Statement v1 in JSON, with the predicate `urn:cresset:receipt:v1`.
    payload: String,
    #[schemars(length(min = 1, max = 1))]
    signatures: Vec<ReceiptSignature>,
}

#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is used")]
struct ReceiptSignature {
    /// The node's public key: hex SHA-256 of its bytes, `evidence.key` of its models.
    keyid: String,
    /// Base64 of an Ed25519 signature of the DSSE v1 encoding of type and payload.
    sig: String,
}

/// What the node's key signs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptStatement {
    #[serde(rename = "_type")]
    statement_type: String,
    /// The answer's text.
    subject: [ReceiptSubject; 1],
    #[serde(rename = "predicateType")]
    predicate_type: String,
    pub predicate: ReceiptPredicate,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ReceiptSubject {
    name: String,
    digest: SubjectDigest,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SubjectDigest {
    sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptPredicate {
    pub request: ReceiptRequest,
    pub release: ReceiptRelease,
    pub verdict: ReceiptVerdict,
    pub build: ReceiptBuild,
    pub sampling: ReceiptSampling,
    pub prompt: ReceiptPrompt,
    pub answer: ReceiptAnswer,
    pub usage: UsageObject,
    pub charge: ReceiptCharge,
    pub key: ReceiptKey,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptRequest {
    pub id: RequestId,
    pub attempt_id: AttemptId,
    pub session_id: SessionId,
    pub model: ModelId,
    /// SHA-256 over method, path, session and canonical body.
    pub fingerprint: String,
    pub created_at: u64,
    pub finished_at: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptRelease {
    pub id: Uuid,
    /// In the order of the files' names.
    pub files_sha256: Vec<String>,
}

/// The qualification that let the model serve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptVerdict {
    pub record: Uuid,
    pub grade: String,
    pub like: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptBuild {
    pub version: String,
    pub executable_sha256: String,
    pub lockfile_sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptSampling {
    /// The seed that was used, as a request's `seed` names it: a string, because not every reader
    /// of JSON holds 64 bits.
    pub seed: String,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    /// The sampling numbers by their names in requests.
    #[serde(flatten)]
    pub numbers: BTreeMap<String, f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptPrompt {
    /// SHA-256 over the token ids, each as four bytes, the lowest first.
    pub tokens_sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptAnswer {
    pub tokens_sha256: String,
    /// SHA-256 of the text in UTF-8.
    pub text_sha256: String,
    pub finish_reason: Option<FinishReason>,
}

/// What was charged, and at which prices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptCharge {
    pub unit: String,
    #[serde(rename = "chargedUnits")]
    pub charged_units: Microcredits,
    pub prices: ReceiptPrices,
}

/// Microcredits per million tokens, as a model's `pricing` has them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptPrices {
    revision: u32,
    #[serde(rename = "inputUnitsPerMillion")]
    input: Microcredits,
    #[serde(rename = "cachedInputUnitsPerMillion")]
    cached_input: Microcredits,
    #[serde(rename = "outputUnitsPerMillion")]
    output: Microcredits,
}

/// The key that signs the statement, so that its name is enough to check the signature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptKey {
    /// Hex SHA-256 of the bytes.
    pub id: String,
    /// The 32 bytes of the Ed25519 public key, hex.
    pub ed25519: String,
}

impl ReceiptStatement {
    /// The statement about the latest attempt; `None` unless it has completed.
    pub fn of(record: &RequestRecord, facts: &ReceiptFacts, key: NodePublicKey) -> Option<Self> {
        let attempt = record.latest();
        let usage = attempt.usage.filter(|_| attempt.finish_reason.is_some())?;
        let digest = SubjectDigest { sha256: hex::encode(facts.answer_text) };
        Some(Self {
            statement_type: STATEMENT_TYPE.into(),
            subject: [ReceiptSubject { name: "answer".into(), digest }],
            predicate_type: PREDICATE_TYPE.into(),
            predicate: ReceiptPredicate {
                request: ReceiptRequest::of(record),
                release: ReceiptRelease::of(&facts.proof),
                verdict: ReceiptVerdict::of(&facts.proof),
                build: ReceiptBuild::of(&facts.proof),
                sampling: ReceiptSampling::of(&facts.asked),
                prompt: ReceiptPrompt { tokens_sha256: hex::encode(facts.asked.prompt) },
                answer: ReceiptAnswer::of(attempt, facts),
                usage: usage.into(),
                charge: ReceiptCharge::of(attempt),
                key: ReceiptKey { id: key.id(), ed25519: key.bytes() },
            },
        })
    }

    /// What is wrong with the statement by itself, whoever signed it.
    pub fn fault(&self) -> Option<String> {
        let ReceiptPredicate { usage, charge, answer, .. } = &self.predicate;
        if self.statement_type != STATEMENT_TYPE || self.predicate_type != PREDICATE_TYPE {
            return Some(format!("it is of the type {}, and no receipt", self.predicate_type));
        }
        if self.subject[0].digest.sha256 != answer.text_sha256 {
            return Some(
                "its subject and its predicate have digests of two different answers".into(),
            );
        }
        let tokens = Usage {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            completion_tokens: usage.completion_tokens,
        };
        let (cost, charged) = (charge.prices.as_prices().cost(&tokens), charge.charged_units);
        (cost != Some(charged)).then(|| {
            let cost = cost.map_or("more than any amount".into(), |cost| cost.to_string());
            format!("its usage costs {cost} microcredits at its prices, and it says {charged}")
        })
    }
}

impl ReceiptRequest {
    fn of(record: &RequestRecord) -> Self {
        let attempt = record.latest();
        Self {
            id: record.key.request,
            attempt_id: attempt.id,
            session_id: record.session,
            model: record.model,
            fingerprint: hex::encode(record.fingerprint),
            created_at: attempt.created_at.seconds(),
            finished_at: attempt.finished_at.map(UnixMillis::seconds),
        }
    }
}

impl ReceiptAnswer {
    fn of(attempt: &Attempt, facts: &ReceiptFacts) -> Self {
        Self {
            tokens_sha256: hex::encode(facts.answer_tokens),
            text_sha256: hex::encode(facts.answer_text),
            finish_reason: attempt.finish_reason,
        }
    }
}

impl ReceiptCharge {
    fn of(attempt: &Attempt) -> Self {
        Self {
            unit: "microcredit".into(),
            charged_units: attempt.charged.checked_total().unwrap_or(Microcredits::MAX),
            prices: ReceiptPrices::of(attempt.prices),
        }
    }
}

impl ReceiptPrices {
    fn of(prices: Prices) -> Self {
        let units = |price| Microcredits::new(price).unwrap_or(Microcredits::MAX);
        Self {
            revision: prices.revision,
            input: units(prices.input),
            cached_input: units(prices.cached_input),
            output: units(prices.output),
        }
    }

    fn as_prices(self) -> Prices {
        Prices {
            revision: self.revision,
            input: self.input.get(),
            cached_input: self.cached_input.get(),
            output: self.output.get(),
        }
    }
}

impl ReceiptRelease {
    fn of(proof: &ReceiptProof) -> Self {
        Self { id: proof.release, files_sha256: proof.files.iter().map(hex::encode).collect() }
    }
}

impl ReceiptVerdict {
    fn of(proof: &ReceiptProof) -> Self {
        let ReceiptProof { record, grade, like, .. } = proof.clone();
        Self { record, grade, like }
    }
}

impl ReceiptBuild {
    fn of(proof: &ReceiptProof) -> Self {
        Self {
            version: proof.version.clone(),
            executable_sha256: hex::encode(proof.executable),
            lockfile_sha256: hex::encode(proof.lockfile),
        }
    }
}

impl ReceiptSampling {
    fn of(asked: &AskedGeneration) -> Self {
        let numbers = asked.sampling.iter().map(|number| (number.name.clone(), number.value()));
        Self {
            seed: asked.seed.cast_signed().to_string(),
            max_tokens: asked.max_tokens,
            min_tokens: asked.min_tokens,
            ignore_eos: asked.ignore_eos,
            numbers: numbers.collect(),
        }
    }

    /// The seed as the engine takes it.
    pub fn engine_seed(&self) -> Option<u64> {
        self.seed.parse().ok().map(i64::cast_unsigned)
    }
}

#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use super::{
        AskedGeneration, Attempt, AttemptId, FinishReason, Microcredits, ModelId, Prices,
        ReceiptFacts, ReceiptProof, RequestId, RequestRecord, SessionId, UnixMillis, Usage, Uuid,
    };
    use cresset_base::{AccountId, BootId, CredentialId};
    use cresset_ledger::{AttemptState, BucketAmounts, RequestKey, SamplingValue};

    /// A completed request of 10 + 5 tokens that cost 20 microcredits, and what was stored of it.
    pub fn completed() -> (RequestRecord, ReceiptFacts) {
        let total = BucketAmounts {
            trial: Microcredits::new(20).unwrap_or_default(),
            ..Default::default()
        };
        let attempt = Attempt {
            id: AttemptId::generate(),
            number: 1,
            retry_of: None,
            credential: CredentialId::generate(),
            boot: BootId::generate(),
            state: AttemptState::Completed,
            failure: None,
            finish_reason: Some(FinishReason::Stop),
            cancel_requested: false,
            prices: Prices { revision: 1, input: 1_000_000, cached_input: 0, output: 2_000_000 },
            reserved: total,
            charged: total,
            usage: Some(Usage { prompt_tokens: 10, cached_tokens: 0, completion_tokens: 5 }),
            created_at: UnixMillis(1_000),
            started_at: None,
            finished_at: Some(UnixMillis(2_000)),
        };
        let key = RequestKey {
            account: AccountId::generate(),
            application: None,
            request: RequestId::generate(),
        };
        let record = RequestRecord {
            key,
            fingerprint: [1; 32],
            session: SessionId::generate(),
            model: ModelId::generate(),
            stream: false,
            attempts: vec![attempt],
        };
        let proof = ReceiptProof {
            record: Uuid::now_v7(),
            grade: "self".into(),
            like: None,
            release: Uuid::now_v7(),
            files: vec![[2; 32]],
            version: "1".into(),
            executable: [3; 32],
            lockfile: [4; 32],
        };
        let asked = AskedGeneration {
            prompt: [5; 32],
            seed: u64::MAX,
            sampling: vec![SamplingValue::new("temperature", 0.7)],
            max_tokens: 5,
            min_tokens: 0,
            ignore_eos: false,
        };
        (record, ReceiptFacts { proof, asked, answer_tokens: [6; 32], answer_text: [7; 32] })
    }
}

#[cfg(test)]
mod tests {
    use super::testing::completed;
    use super::*;
    use cresset_catalogue::Catalogue;

    fn key() -> NodePublicKey {
        let folder = tempfile::tempdir().unwrap();
        Catalogue::new(folder.path()).receipt_signer().unwrap().key()
    }

    #[test]
    fn a_statement_tells_of_a_completed_request_and_comes_back_as_it_was() {
        let (mut record, facts) = completed();
        let statement = ReceiptStatement::of(&record, &facts, key()).unwrap();
        assert_eq!(statement.fault(), None);
        let text = serde_json::to_string(&statement).unwrap();
        assert_eq!(serde_json::from_str::<ReceiptStatement>(&text).unwrap(), statement);
        assert_eq!(statement.predicate.sampling.seed, "-1");
        assert_eq!(statement.predicate.sampling.engine_seed(), Some(u64::MAX));
        assert!(text.contains(r#""temperature":0.7"#), "{text}");
        record.attempts[0].finish_reason = None;
        assert!(ReceiptStatement::of(&record, &facts, key()).is_none(), "it was cancelled");
    }

    #[test]
    fn a_statement_that_contradicts_itself_is_told() {
        type Change = fn(&mut ReceiptStatement);
        let changes: &[(&str, Change)] = &[
            ("20 microcredits", |s| s.predicate.charge.charged_units = Microcredits::ZERO),
            ("18 microcredits", |s| s.predicate.usage.completion_tokens = 4),
            ("two different answers", |s| s.predicate.answer.text_sha256 = "0".into()),
            ("no receipt", |s| s.predicate_type = "test".into()),
        ];
        let (record, facts) = completed();
        for (why, change) in changes {
            let mut statement = ReceiptStatement::of(&record, &facts, key()).unwrap();
            change(&mut statement);
            let fault = statement.fault().unwrap();
            assert!(fault.contains(why), "{fault}");
        }
    }
}
