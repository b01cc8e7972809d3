//! Rows survive encoding and decoding, and other bytes are never taken for a row.

use super::*;
use crate::codec::{StoredField, decode, encode};
use crate::testing::random_commands::{attempt, request, units};
use cresset_ledger::{
    Attempt, AttemptState, Balances, BucketAmounts, EntryKind, JournalEntry, RequestRecord,
    StateError,
};
use proptest::prelude::*;

fn split() -> impl Strategy<Value = BucketAmounts> {
    (units(Microcredits::MAX.get()), units(Microcredits::MAX.get()))
        .prop_map(|(trial, premium)| BucketAmounts { trial, premium })
}

fn balances() -> impl Strategy<Value = Balances> {
    (split(), split(), split()).prop_map(|(credited, debited, reserved)| {
        let bucket = |part: fn(&BucketAmounts) -> Microcredits| cresset_ledger::Balance {
            credited: part(&credited),
            debited: part(&debited),
            reserved: part(&reserved),
        };
        Balances {
            trial: bucket(|amounts| amounts.trial),
            premium: bucket(|amounts| amounts.premium),
        }
    })
}

fn stored_attempt() -> impl Strategy<Value = Attempt> {
    let options = (any::<Option<u64>>(), any::<Option<u64>>(), any::<Option<[u32; 3]>>());
    let states = prop_oneof![
        Just(AttemptState::Queued),
        Just(AttemptState::Running),
        Just(AttemptState::Completed),
        Just(AttemptState::Cancelled),
        Just(AttemptState::Failed),
    ];
    (any::<[u128; 4]>(), any::<[u64; 4]>(), split(), split(), options, states).prop_map(
        |(ids, numbers, reserved, charged, (started, finished, usage), state)| Attempt {
            id: AttemptId(id(ids[0])),
            number: numbers[0] as u32,
            retry_of: (numbers[1] % 2 == 0).then(|| AttemptId(id(ids[1]))),
            credential: CredentialId(id(ids[2])),
            boot: BootId(id(ids[3])),
            state,
            failure: (numbers[2] % 2 == 0).then_some(FailureCode::DeadlineExceeded),
            finish_reason: (numbers[2] % 3 == 0).then_some(FinishReason::Length),
            cancel_requested: numbers[3] % 2 == 0,
            prices: Prices {
                revision: numbers[0] as u32,
                input: numbers[1],
                cached_input: numbers[2],
                output: numbers[3],
            },
            reserved,
            charged,
            usage: usage.map(|[prompt_tokens, cached_tokens, completion_tokens]| Usage {
                prompt_tokens,
                cached_tokens,
                completion_tokens,
            }),
            created_at: UnixMillis(numbers[0]),
            started_at: started.map(UnixMillis),
            finished_at: finished.map(UnixMillis),
        },
    )
}

pub(super) fn record() -> impl Strategy<Value = RequestRecord> {
    let attempts = proptest::collection::vec(stored_attempt(), 1..4);
    (request(), any::<[u8; 32]>(), any::<[u128; 2]>(), any::<bool>(), attempts).prop_map(
        |(key, fingerprint, ids, stream, attempts)| RequestRecord {
            key,
            fingerprint,
            session: SessionId(id(ids[0])),
            model: ModelId(id(ids[1])),
            stream,
            attempts,
        },
    )
}

pub(super) fn entry() -> impl Strategy<Value = JournalEntry> {
    let kind = prop_oneof![
        any::<String>().prop_map(|reference| EntryKind::Grant { reference }),
        any::<String>().prop_map(|reference| EntryKind::Debit { reference }),
        (request(), attempt()).prop_map(|(key, attempt)| EntryKind::Reserve { key, attempt }),
        (request(), attempt()).prop_map(|(key, attempt)| EntryKind::Settle { key, attempt }),
        (request(), attempt()).prop_map(|(key, attempt)| EntryKind::Release { key, attempt }),
    ];
    (any::<[u64; 2]>(), any::<u128>(), kind, split(), balances(), any::<[u8; 16]>()).prop_map(
        |([sequence, at], account, kind, amount, after, hash)| JournalEntry {
            sequence,
            at: UnixMillis(at),
            account: AccountId(id(account)),
            kind,
            amount,
            after,
            hash,
        },
    )
}

fn round_trip<T: StoredField + PartialEq + std::fmt::Debug>(row: &T) {
    let stored = encode(b"key", row);
    assert_eq!(decode::<T>(b"key", &stored).as_ref(), Ok(row));
    let elsewhere = decode::<T>(b"yek", &stored);
    assert!(matches!(elsewhere, Err(StateError::Corrupt(_))));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_survive_their_layout(record in record(), entry in entry(), balances in balances()) {
        round_trip(&record);
        round_trip(&entry);
        round_trip(&balances);
    }

    #[test]
    fn a_damaged_row_is_never_read(
        record in record(), place in any::<proptest::sample::Index>(), flip in 1..=255_u8,
    ) {
        let mut stored = encode(b"key", &record);
        let place = place.index(stored.len());
        stored[place] ^= flip;
        assert!(decode::<RequestRecord>(b"key", &stored).is_err());
        assert!(decode::<RequestRecord>(b"key", &stored[..place]).is_err());
    }

    #[test]
    fn junk_is_never_a_row(junk in proptest::collection::vec(any::<u8>(), 0..300)) {
        assert!(decode::<RequestRecord>(b"key", &junk).is_err());
        let mut encoded = junk.clone();
        let crc = crc32c::crc32c_append(crc32c::crc32c(b"key"), &encoded);
        encoded.extend(crc.to_be_bytes());
        // Even under a right checksum, these bytes give an error or a row, never a panic.
        drop(decode::<RequestRecord>(b"key", &encoded));
        drop(decode::<JournalEntry>(b"key", &encoded));
    }
}
