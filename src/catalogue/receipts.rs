//! Signs receipts with the node's key, and reads those that a key has signed.

use super::{Catalogue, Result, node_key};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use cresset_ledger::{ReceiptProof, Sha256Bytes};
use cresset_qualification::Record;
use cresset_qualification::envelope::{self, EnvelopeFault};
use cresset_qualification::statement::key_id;
use ed25519_dalek::{SigningKey, VerifyingKey};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// The key that signs receipts now.
pub struct ReceiptSigner(SigningKey);

impl ReceiptSigner {
    pub fn key(&self) -> NodePublicKey {
        NodePublicKey(self.0.verifying_key())
    }

    /// The statement in a signed envelope, JSON. Equal statements give equal bytes.
    pub fn seal(&self, statement: &impl Serialize) -> Vec<u8> {
        envelope::seal_json(PAYLOAD_TYPE, statement, &self.0)
    }
}

/// The public half of a key that a node signs with, or signed with once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodePublicKey(VerifyingKey);

impl NodePublicKey {
    /// The key of these 32 bytes in hex.
    pub fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        hex::decode_to_slice(text, &mut bytes).ok()?;
        VerifyingKey::from_bytes(&bytes).ok().map(Self)
    }

    /// Its name: hex SHA-256 of its bytes, as `evidence.key` of a model has it.
    pub fn id(&self) -> String {
        key_id(&self.0)
    }

    /// Its 32 bytes in hex.
    pub fn bytes(&self) -> String {
        hex::encode(self.0.as_bytes())
    }

    /// The statement of a receipt that this key signed.
    pub fn open<T: DeserializeOwned>(&self, receipt: &[u8]) -> Result<T, EnvelopeFault> {
        envelope::open_json(receipt, PAYLOAD_TYPE, &self.0)
    }
}

/// What a receipt says, whoever signed it; `None` when it is no signed document.
pub fn claimed<T: DeserializeOwned>(receipt: &[u8]) -> Option<T> {
    let envelope: Value = serde_json::from_slice(receipt).ok()?;
    let payload = BASE64.decode(envelope["payload"].as_str()?).ok()?;
    serde_json::from_slice(&payload).ok()
}

impl Catalogue {
    /// The node's key, which is made if there is none, and is listed from now on.
    pub fn receipt_signer(&self) -> Result<ReceiptSigner> {
        node_key::find_or_make(&self.data).map(ReceiptSigner)
    }

    /// The keys that this node has signed with, the present one last.
    pub fn keys(&self) -> Result<Vec<NodePublicKey>> {
        Ok(node_key::listed(&self.data)?.into_iter().map(NodePublicKey).collect())
    }
}

/// What receipts tell of the proof of a model; `None` where the record's digests are none.
pub(super) fn proof(record: &Record) -> Option<ReceiptProof> {
    let (release, build) = (&record.identity.release, &record.identity.host.engine);
    Some(ReceiptProof {
        record: record.id,
        grade: record.grade.name().to_owned(),
        like: record.like.clone(),
        release: release.release_id,
        files: release.files.values().map(|digest| bytes_of(digest)).collect::<Option<_>>()?,
        version: build.version.clone(),
        executable: bytes_of(&build.executable_sha256)?,
        lockfile: bytes_of(&build.lockfile_sha256)?,
    })
}

fn bytes_of(digest: &str) -> Option<Sha256Bytes> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(digest, &mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_receipt_opens_under_the_key_that_signed_it_alone() {
        let (data, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let signer = Catalogue::new(data.path()).receipt_signer().unwrap();
        let foreign = Catalogue::new(other.path()).receipt_signer().unwrap().key();
        let receipt = signer.seal(&"what was done");
        assert_eq!(receipt, signer.seal(&"what was done"), "it is the same each time");
        let key = NodePublicKey::parse(&signer.key().bytes()).unwrap();
        assert_eq!((key, key.id().len()), (signer.key(), 64));
        assert_eq!(key.open::<String>(&receipt).unwrap(), "what was done");
        assert!(matches!(
            foreign.open::<String>(&receipt),
            Err(EnvelopeFault::ForeignKey { key_id }) if key_id == key.id()
        ));
        let text = String::from_utf8(receipt.clone()).unwrap();
        let edited = text.replace(&BASE64.encode("\"what was done\""), &BASE64.encode("\"more\""));
        assert_eq!(key.open::<String>(edited.as_bytes()), Err(EnvelopeFault::WrongSignature));
        assert_eq!(claimed::<String>(edited.as_bytes()).unwrap(), "more");
        assert!(claimed::<String>(b"{}").is_none() && NodePublicKey::parse("00").is_none());
    }

    #[test]
    fn keys_that_were_replaced_stay_listed() {
        let data = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::new(data.path());
        assert!(catalogue.keys().unwrap().is_empty());
        let mut made = Vec::new();
        for count in 1..=3 {
            made.push(catalogue.receipt_signer().unwrap().key());
            catalogue.receipt_signer().unwrap();
            assert_eq!(catalogue.keys().unwrap(), made, "{count}");
            fs::remove_file(data.path().join("node.key")).unwrap();
            assert_eq!(catalogue.keys().unwrap(), made, "{count}");
        }
        fs::write(data.path().join("node.keys"), "no key\n").unwrap();
        assert!(catalogue.keys().unwrap_err().to_string().contains("node.keys"));
    }
}
