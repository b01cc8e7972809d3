//! The part of an answer's receipt that only the node knows which made the answer, and only when it
//! did. It is stored beside the answer, so that the receipt stays the same when the model, its
//! record, the build or the node's key have changed since. The rest of a receipt stands in the row
//! of the request.

use sha2::{Digest, Sha256};
use uuid::Uuid;

/// A SHA-256 digest.
pub type Sha256Bytes = [u8; 32];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiptFacts {
    pub proof: ReceiptProof,
    pub asked: AskedGeneration,
    /// SHA-256 over the ids of the answer's tokens, as `TokenDigest` makes it.
    pub answer_tokens: Sha256Bytes,
    /// SHA-256 of the answer's text in UTF-8.
    pub answer_text: Sha256Bytes,
}

/// The model that answered, what proved it, and the build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiptProof {
    /// The qualification record.
    pub record: Uuid,
    /// The grade's name.
    pub grade: String,
    /// The sister release whose reference outputs were used.
    pub like: Option<String>,
    pub release: Uuid,
    /// SHA-256 of the release's files, in the order of their names.
    pub files: Vec<Sha256Bytes>,
    pub version: String,
    pub executable: Sha256Bytes,
    pub lockfile: Sha256Bytes,
}

/// What the engine was asked to generate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedGeneration {
    /// SHA-256 over the ids of the prompt's tokens.
    pub prompt: Sha256Bytes,
    /// The seed that was used, whether the client sent it or not.
    pub seed: u64,
    pub sampling: Vec<SamplingValue>,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub ignore_eos: bool,
}

/// A sampling number by its name in requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplingValue {
    pub name: String,
    /// The bits of the value as a double.
    pub bits: u64,
}

impl SamplingValue {
    pub fn new(name: &str, value: f64) -> Self {
        Self { name: name.to_owned(), bits: value.to_bits() }
    }

    pub fn value(&self) -> f64 {
        f64::from_bits(self.bits)
    }
}

/// SHA-256 over token ids, each as four bytes, the lowest first.
#[derive(Clone, Default)]
pub struct TokenDigest(Sha256);

impl TokenDigest {
    pub fn of(ids: &[u32]) -> Sha256Bytes {
        let mut digest = Self::default();
        for id in ids {
            digest.push(*id);
        }
        digest.value()
    }

    pub fn push(&mut self, id: u32) {
        self.0.update(id.to_le_bytes());
    }

    /// The digest of what was pushed so far.
    pub fn value(&self) -> Sha256Bytes {
        self.0.clone().finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Receipts are kept for years, so their digests never change.
    #[test]
    fn a_digest_is_that_of_the_bytes_and_never_changes() {
        assert_eq!(TokenDigest::of(&[]), <[u8; 32]>::from(Sha256::digest([])));
        let bytes = [1, 0, 0, 0, 0, 1, 0, 0, 255, 255, 255, 255];
        assert_eq!(TokenDigest::of(&[1, 256, u32::MAX]), <[u8; 32]>::from(Sha256::digest(bytes)));
        let mut digest = TokenDigest::default();
        digest.push(1);
        assert_eq!(digest.value(), TokenDigest::of(&[1]));
        digest.push(2);
        assert_eq!(digest.value(), TokenDigest::of(&[1, 2]), "a value ends nothing");
    }
}
