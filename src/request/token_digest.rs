//! The digest of a list of tokens, as receipts hold it.

use crate::ledger::Sha256Bytes;
use sha2::{Digest, Sha256};

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
