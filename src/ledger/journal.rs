//! The journal. Every change of a balance is one entry. Entries are numbered without gaps and
//! chained by hashes, so that a dropped, doubled or edited entry breaks the chain at its place.

use super::amounts::BucketAmounts;
use super::error::ApplyError;
use super::records::{Balance, Balances, EntryKind, JournalEntry, RequestKey};
use super::state::{JournalHead, LedgerState};
use cresset_base::{AccountId, AttemptId, UnixMillis};
use sha2::{Digest, Sha256};

/// Appends one entry after the head of the account's chain and stores the resulting balances.
pub(super) fn post(
    state: &mut impl LedgerState,
    at: UnixMillis,
    account: AccountId,
    kind: EntryKind,
    amount: BucketAmounts,
    after: Balances,
) -> Result<(), ApplyError> {
    let head = state.head(account)?;
    let mut entry = JournalEntry {
        sequence: head.sequence + 1,
        at,
        account,
        kind,
        amount,
        after,
        hash: [0; 16],
    };
    entry.hash = chain(&head, &entry);
    state.append(&entry)?;
    state.put_balances(account, &after)?;
    Ok(())
}

/// The entry's hash: the first 16 bytes of SHA-256 over the previous hash and the entry's content.
/// Fields are fixed-width and big-endian; a text is preceded by its length.
pub fn chain(previous: &JournalHead, entry: &JournalEntry) -> [u8; 16] {
    let mut hasher = Sha256::new();
    hasher.update(previous.hash);
    hasher.update(entry.sequence.to_be_bytes());
    hasher.update(entry.at.0.to_be_bytes());
    hasher.update(entry.account.0.as_bytes());
    feed_kind(&mut hasher, &entry.kind);
    feed_amounts(&mut hasher, entry.amount);
    feed_balance(&mut hasher, &entry.after.trial);
    feed_balance(&mut hasher, &entry.after.premium);
    let digest: [u8; 32] = hasher.finalize().into();
    let (front, _) = digest.split_at(16);
    front.try_into().expect("invariant: split at 16")
}

fn feed_kind(hasher: &mut Sha256, kind: &EntryKind) {
    match kind {
        EntryKind::Grant { reference } => feed_reference(hasher, 0, reference),
        EntryKind::Debit { reference } => feed_reference(hasher, 4, reference),
        EntryKind::Reserve { key, attempt } => feed_attempt(hasher, 1, key, *attempt),
        EntryKind::Settle { key, attempt } => feed_attempt(hasher, 2, key, *attempt),
        EntryKind::Release { key, attempt } => feed_attempt(hasher, 3, key, *attempt),
    }
}

fn feed_reference(hasher: &mut Sha256, tag: u8, reference: &str) {
    hasher.update([tag]);
    hasher.update((reference.len() as u64).to_be_bytes());
    hasher.update(reference.as_bytes());
}

fn feed_attempt(hasher: &mut Sha256, tag: u8, key: &RequestKey, attempt: AttemptId) {
    hasher.update([tag]);
    hasher.update(key.account.0.as_bytes());
    hasher.update([u8::from(key.application.is_some())]);
    hasher.update(key.application.map_or([0; 16], |id| id.0.into_bytes()));
    hasher.update(key.request.0.as_bytes());
    hasher.update(attempt.0.as_bytes());
}

fn feed_amounts(hasher: &mut Sha256, amounts: BucketAmounts) {
    hasher.update(amounts.trial.get().to_be_bytes());
    hasher.update(amounts.premium.get().to_be_bytes());
}

fn feed_balance(hasher: &mut Sha256, balance: &Balance) {
    for units in [balance.credited, balance.debited, balance.reserved] {
        hasher.update(units.get().to_be_bytes());
    }
}
