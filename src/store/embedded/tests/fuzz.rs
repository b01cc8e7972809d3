//! Reads any bytes as a stored row. They decode to a row that is stored as exactly these bytes, or
//! are damaged; one flipped bit is always damage.

use super::layout::{entry, record};
use crate::StoredBody;
use crate::codec::{StoredField, decode, encode};
use crate::embedded::rows::{CleanMarker, FileIdentity, JournalPosition};
use cresset_base::{Mutation, mutated};
use cresset_ledger::{
    Account, Adjustment, Application, Balances, Crashes, Credential, JournalEntry, RequestRecord,
    Reservation,
};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

const KEY: &[u8] = b"key";

fn check<T: StoredField>(stored: &[u8]) {
    let Ok(row) = decode::<T>(KEY, stored) else { return };
    if stored[0] == T::VERSION {
        assert_eq!(encode(KEY, &row), stored, "a row has one layout");
    }
    let mut damaged = stored.to_vec();
    for bit in 0..damaged.len() * 8 {
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(decode::<T>(KEY, &damaged).is_err(), "bit {bit}");
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
}

/// A row as it is stored, without its checksum.
fn example<T: StoredField>(rows: &impl Strategy<Value = T>) -> Vec<u8> {
    let row = rows.new_tree(&mut TestRunner::deterministic()).unwrap().current();
    let mut stored = encode(KEY, &row);
    stored.truncate(stored.len() - 4);
    stored
}

#[test]
fn rows() {
    let (record, entry) = (example(&record()), example(&entry()));
    let (zeros, later) = ([&[1][..], &[0; 200]].concat(), [&[2][..], &[0; 50]].concat());
    let seeds = [&record[..], &entry, &zeros[..1], &zeros, &later];
    bolero::check!().with_iterations(4_000).with_type().for_each(|mutation: &Mutation| {
        let mut stored = mutated(&seeds, mutation);
        // The checksum is right; otherwise the codec would not look further.
        let crc = crc32c::crc32c_append(crc32c::crc32c(KEY), &stored);
        stored.extend(crc.to_be_bytes());
        check::<RequestRecord>(&stored);
        check::<JournalEntry>(&stored);
        check::<Account>(&stored);
        check::<Application>(&stored);
        check::<Credential>(&stored);
        check::<Balances>(&stored);
        check::<Reservation>(&stored);
        check::<Adjustment>(&stored);
        check::<Crashes>(&stored);
        check::<StoredBody>(&stored);
        check::<JournalPosition>(&stored);
        check::<CleanMarker>(&stored);
        check::<FileIdentity>(&stored);
    });
}
