//! The keys of rows as bytes. A row's checksum covers its key. Numbers are big-endian, so the order
//! of the keys is the order of what they name.

use super::codec::StoredField;
use crate::ids::{AccountId, RequestId};
use crate::ledger::RequestKey;

/// Account, request, then scope: all scopes of an id lie together.
pub(super) fn request_key(key: &RequestKey) -> Vec<u8> {
    let mut bytes = request_prefix(key.account, key.request);
    key.application.write(&mut bytes);
    bytes
}

pub(super) fn request_prefix(account: AccountId, request: RequestId) -> Vec<u8> {
    [account.0.into_bytes(), request.0.into_bytes()].concat()
}

pub(super) fn grant_key(account: AccountId, reference: &str) -> Vec<u8> {
    [account.0.as_bytes(), reference.as_bytes()].concat()
}

pub(super) fn crash_key(account: AccountId, fingerprint: &[u8; 32]) -> Vec<u8> {
    [account.0.as_bytes().as_slice(), fingerprint].concat()
}

pub(super) fn entry_key(account: AccountId, sequence: u64) -> Vec<u8> {
    [account.0.as_bytes().as_slice(), &sequence.to_be_bytes()].concat()
}
