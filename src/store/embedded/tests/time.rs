//! The effects of time: answers expire, requests are archived and forgotten, and a clock that jumps
//! does no harm.

use super::*;
use crate::ledger::records::EntryKind;
use crate::ledger::{AttemptState, JournalEntry};
use bytes::Bytes;

const HOUR: u64 = 3_600_000;

#[tokio::test]
async fn bodies_are_kept_until_they_expire() {
    let fixture = tokio::task::spawn_blocking(|| Fixture::new(1)).await.unwrap();
    let store = fixture.open();
    assert_eq!(store.body(&key(1)).now().unwrap(), None);
    let body = Bytes::from(vec![b'x'; 300_000]);
    store.put_body(key(1), body.clone(), UnixMillis(2_000_000)).await.unwrap();
    drop(store);
    let store = fixture.open();
    assert_eq!(store.body(&key(1)).now().unwrap(), Some(body));
    assert_eq!(store.body(&key(2)).now().unwrap(), None);
    fixture.clock.set(2_000_000);
    assert_eq!(store.body(&key(1)).now().unwrap(), None);
}

/// The ledger is swept when it is opened, which makes the passing of time a matter of reopening.
#[test]
fn ended_requests_are_archived_and_at_last_forgotten() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    let boot = store.boot();
    for request in [1, 2, 3] {
        store.submit_blocking(admit(request, request, boot, 10)).unwrap();
    }
    store.submit_blocking(settle(1, 1, 10)).unwrap();
    store.submit_blocking(release(2, 2)).unwrap();
    drop(store);
    let begin = 1_000_000;
    let reopened_at = |hours: u64| {
        fixture.clock.set(begin + hours * HOUR);
        let store = fixture.open();
        // The sweep follows the first command.
        store.submit_blocking(Command::RevokeCredential { id: CredentialId(id(9)) }).unwrap_err();
        drop(store);
        fixture.open()
    };
    let store = reopened_at(23);
    let outcome = store.submit_blocking(admit(1, 9, store.boot(), 10)).unwrap();
    assert!(matches!(outcome, Outcome::Existing(_)));
    assert!(is_admitted(&store.submit_blocking(admit(2, 9, store.boot(), 10))));
    store.submit_blocking(settle(2, 9, 1)).unwrap();
    drop(store);
    let store = reopened_at(25);
    assert_eq!(
        refusal(store.submit_blocking(admit(1, 10, store.boot(), 10))),
        Refusal::ResultExpired
    );
    let outcome = store.submit_blocking(admit(2, 10, store.boot(), 10)).unwrap();
    assert!(matches!(outcome, Outcome::Existing(_)), "its last end is two hours ago");
    let record = store.read().now().unwrap().request(&key(1)).now().unwrap().unwrap();
    assert_eq!(record.latest().state, AttemptState::Completed);
    assert_eq!(requests_of(&*store.read().now().unwrap(), AccountId(id(1))).len(), 3);
    assert_sound(&store);
    drop(store);
    let store = reopened_at(30 * 24 + 25);
    assert_eq!(store.read().now().unwrap().request(&key(1)).now().unwrap(), None);
    assert!(is_admitted(&store.submit_blocking(admit(1, 11, store.boot(), 10))));
    assert_sound(&store);
}

#[test]
fn stored_time_never_goes_back() {
    let fixture = Fixture::new(100);
    fixture.clock.set(5);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 1)).unwrap();
    let record = store.read().now().unwrap().request(&key(1)).now().unwrap().unwrap();
    assert_eq!(record.latest().created_at, UnixMillis(1_000_000));
    assert_sound(&store);
}

/// The clock is set back a day, then ten years ahead, then right again: nothing is forgotten early,
/// no entry goes back in time, nothing ends twice.
#[test]
fn a_clock_that_jumps_harms_nothing() {
    const DAY: u64 = 24 * HOUR;
    let begin = 400 * DAY;
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    let mut request = 0;
    let mut run = |store: &Store| {
        request += 1;
        store.submit_blocking(admit(request, request, store.boot(), 10)).unwrap();
        store.submit_blocking(settle(request, request, 1)).unwrap();
        store.submit_blocking(admit(1_000 + request, request + 500, store.boot(), 10)).unwrap();
    };
    for now in [begin, begin - DAY, begin + 10 * 365 * DAY, begin, begin + HOUR] {
        fixture.clock.set(now);
        run(&store);
    }
    let entries =
        store.read().now().unwrap().entries(AccountId(id(1)), 0, usize::MAX).now().unwrap();
    assert!(entries.is_sorted_by_key(|entry| entry.at));
    assert_eq!(
        store.read().now().unwrap().live_requests().now().unwrap().len(),
        5,
        "time releases nothing"
    );
    drop(store);
    // The clock is right again: requests that ended within the last hour are remembered, whichever
    // clock counted that hour, although the journal's time is far ahead.
    for _ in 0..2 {
        let store = fixture.open();
        for request in 1..=5 {
            let outcome = store.submit_blocking(admit(request, 900, store.boot(), 10)).unwrap();
            assert!(matches!(outcome, Outcome::Existing(_)), "{request}");
        }
        assert_eq!(spent(&store), (5, 0));
        assert_sound(&store);
    }
}

/// An answer was durable and its settlement was not: the next start charges nothing and keeps no
/// answer.
#[tokio::test]
async fn an_answer_without_a_settlement_is_removed() {
    let fixture = tokio::task::spawn_blocking(|| Fixture::new(1_000)).await.unwrap();
    let store = fixture.open();
    for request in [1, 2] {
        store.submit(admit(request, request, store.boot(), 10)).await.unwrap();
        store
            .put_body(key(request), Bytes::from_static(b"answer"), UnixMillis(u64::MAX))
            .await
            .unwrap();
    }
    store.submit(settle(2, 2, 3)).await.unwrap();
    let crashed = image(&fixture);
    let store = crashed.open();
    assert_eq!(store.body(&key(1)).now().unwrap(), None);
    assert_eq!(store.body(&key(2)).now().unwrap(), Some(Bytes::from_static(b"answer")));
    assert_eq!(spent(&store), (3, 0));
    assert_eq!(store.stats().now().releases, [("node_restarted", 1)].into());
    assert_sound(&store);
}

/// Weeks of requests in every way they can end, swept and restarted in between: the statement's
/// lines add up to the balance.
#[test]
fn a_long_history_adds_up() {
    let fixture = Fixture::new(100_000);
    let (mut request, mut charged) = (0, 0);
    for day in 0..45_u64 {
        fixture.clock.set(1_000_000 + day * 24 * HOUR);
        let store = fixture.open();
        for number in 0..12_u32 {
            request += 1;
            store.submit_blocking(admit(request, request, store.boot(), 20)).unwrap();
            match number % 4 {
                0 => drop(store.submit_blocking(release(request, request)).unwrap()),
                // This one is left for the next start.
                1 if number == 1 => {}
                _ => {
                    store.submit_blocking(settle(request, request, number)).unwrap();
                    charged += u64::from(number);
                }
            }
        }
        store.submit_blocking(start(request, request)).unwrap();
    }
    let store = fixture.open();
    let read = store.read().now().unwrap();
    let account = AccountId(id(1));
    let mut lines = Vec::new();
    while let page = read
        .entries(account, lines.last().map_or(0, |last: &JournalEntry| last.sequence), 100)
        .now()
        .unwrap()
        && !page.is_empty()
    {
        lines.extend(page);
    }
    assert_eq!(lines.len() as u64, 1 + 2 * request as u64);
    let total = |wanted: fn(&EntryKind) -> bool| -> u64 {
        lines.iter().filter(|line| wanted(&line.kind)).map(|line| line.amount.premium.get()).sum()
    };
    let premium = read.balances(account).now().unwrap().premium;
    assert_eq!(total(|kind| matches!(kind, EntryKind::Grant { .. })), premium.credited.get());
    assert_eq!(total(|kind| matches!(kind, EntryKind::Settle { .. })), premium.debited.get());
    assert_eq!((premium.debited.get(), premium.reserved.get()), (charged, 0));
    assert_eq!(lines.last().unwrap().after, read.balances(account).now().unwrap());
    assert!(requests_of(&*read, account).len() < 12 * 35, "old tombstones are gone");
    assert_sound(&store);
}
