//! The keys of rows as bytes. A row's checksum covers its key. Numbers are big-endian, so the order
//! of the keys is the order of what they name.

use super::codec::StoredField;
use crate::ids::{AccountId, ApplicationId, RequestId};
use crate::ledger::RequestKey;
use uuid::Uuid;

/// Account, request, then scope: all scopes of an id lie together.
pub(super) fn request_key(key: &RequestKey) -> Vec<u8> {
    let mut bytes = request_prefix(key.account, key.request);
    key.application.write(&mut bytes);
    bytes
}

/// The request whose key this is.
pub(super) fn request_of(key: &[u8]) -> Option<RequestKey> {
    let (account, rest) = key.split_first_chunk()?;
    let (request, scope) = rest.split_first_chunk()?;
    let application = match scope {
        [0] => None,
        [1, id @ ..] => Some(ApplicationId(Uuid::from_slice(id).ok()?)),
        _ => return None,
    };
    let [account, request] = [account, request].map(|id| Uuid::from_bytes(*id));
    Some(RequestKey { account: AccountId(account), application, request: RequestId(request) })
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

/// The account and the fingerprint of which this is the key.
pub(super) fn input_of(key: &[u8]) -> Option<(AccountId, [u8; 32])> {
    let (account, fingerprint) = key.split_first_chunk()?;
    Some((AccountId(Uuid::from_bytes(*account)), fingerprint.try_into().ok()?))
}

pub(super) fn entry_key(account: AccountId, sequence: u64) -> Vec<u8> {
    [account.0.as_bytes().as_slice(), &sequence.to_be_bytes()].concat()
}
