//! The effects of time: answers expire, requests are archived and forgotten, and a clock that jumps
//! does no harm.

use super::super::tables;
use super::*;
use crate::ClockLimits;
use crate::backend::Backend;
use crate::embedded::tables::OrFault;
use bytes::Bytes;
use cresset_ledger::{AttemptState, EntryKind, JournalEntry};

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
    assert_eq!(store.body(&key(1)).await.unwrap(), Some(body));
    assert_eq!(store.body(&key(2)).now().unwrap(), None);
    fixture.clock.set(2_000_000);
    assert_eq!(store.body(&key(1)).now().unwrap(), None);
}

/// The sum grows and shrinks with the answers: when one is replaced, when it has no settlement and
/// when it expires. Every audit compares the two.
#[tokio::test]
async fn the_answers_of_an_account_are_summed_while_they_are_kept() {
    let fixture = tokio::task::spawn_blocking(|| Fixture::new(1_000)).await.unwrap();
    let sum = async |store: &Store| {
        assert_sound(store);
        store.read().await.unwrap().answer_bytes(AccountId(id(1))).await.unwrap()
    };
    let store = fixture.open();
    for request in [1, 2, 3] {
        store.submit(admit(request, request, store.boot(), 10)).await.unwrap();
    }
    assert_eq!(sum(&store).await, 0);
    let mut random = vec![0; 5_000];
    getrandom::fill(&mut random).unwrap();
    let expiries = [(1, UnixMillis(2_000_000)), (2, UnixMillis(3_000_000)), (3, UnixMillis(9))];
    for (request, expires_at) in expiries {
        store.put_body(key(request), random.clone().into(), expires_at).await.unwrap();
    }
    let three = sum(&store).await;
    let overhead = three / 3 - 5_000;
    assert!(three % 3 == 0 && overhead < 50, "{three}");
    store.put_body(key(1), Bytes::from_static(b"short"), UnixMillis(2_000_000)).await.unwrap();
    assert_eq!(sum(&store).await, 2 * (5_000 + overhead) + 5 + overhead);
    store.submit(settle(1, 1, 1)).await.unwrap();
    store.submit(settle(2, 2, 1)).await.unwrap();
    drop(store);
    let store = fixture.open();
    assert_eq!(sum(&store).await, 5_000 + 2 * overhead + 5, "the third had no settlement");
    drop(store);
    for (now, left) in [(2_000_000, 5_000 + overhead), (3_000_000, 0)] {
        fixture.clock.set(now);
        let store = fixture.open();
        // The sweep follows the first command.
        let unknown = Command::RevokeCredential { id: CredentialId(id(9)) };
        store.submit(unknown).await.unwrap_err();
        drop(store);
        let store = fixture.open();
        assert_eq!(sum(&store).await, left, "{now}");
    }
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

/// A node's limits on the clock: 30 days ahead, five minutes behind.
fn watchful(accepted: bool) -> Limits {
    let (max_ahead_ms, max_behind_ms) = (30 * 24 * HOUR, HOUR / 12);
    let clock = ClockLimits { earliest: UnixMillis(1), max_ahead_ms, max_behind_ms, accepted };
    Limits { clock, ..Limits::default() }
}

fn open_watchful(fixture: &Fixture, accepted: bool) -> Result<Store, StoreError> {
    Store::open(&fixture.config(), Arc::new(fixture.clock.clone()), watchful(accepted))
}

#[test]
fn a_ledger_is_not_opened_with_a_clock_out_of_bounds() {
    const BEGIN: u64 = 1_000_000;
    let fixture = Fixture::new(100);
    for (now, part) in [
        (0, "this program was made later"),
        (BEGIN - HOUR / 12 - 1, "the ledger has a later time"),
        (BEGIN + 30 * 24 * HOUR + 1, "after the last time in the ledger"),
    ] {
        fixture.clock.set(now);
        let why = unusable(open_watchful(&fixture, false));
        assert!(why.contains(part) && why.contains("--accept-clock"), "{why}");
        let brief = Store::open_briefly(
            &fixture.config(),
            Arc::new(fixture.clock.clone()),
            watchful(false),
        );
        assert_eq!(unusable(brief), why);
        assert_eq!(Store::stored_time(&fixture.config()).unwrap(), UnixMillis(BEGIN));
    }
    // Vouched for once, the time of the clock is that of the ledger.
    drop(open_watchful(&fixture, true).unwrap());
    assert_sound(&open_watchful(&fixture, false).unwrap());
    fixture.clock.set(BEGIN + 60 * 24 * HOUR);
    assert_sound(&open_watchful(&fixture, false).unwrap());
}

#[test]
fn a_ledger_of_a_clock_that_was_ahead_is_mended() {
    const DAY: u64 = 24 * HOUR;
    let begin = 400 * DAY;
    let fixture = Fixture::new(1_000);
    fixture.clock.set(begin);
    drop(open_watchful(&fixture, true).unwrap());
    // One start with a clock 60 days ahead, which is killed with a request under way.
    fixture.clock.set(begin + 60 * DAY);
    let store = open_watchful(&fixture, true).unwrap();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(settle(1, 1, 1)).unwrap();
    store.submit_blocking(admit(2, 2, store.boot(), 10)).unwrap();
    let fixture = image(&fixture);
    drop(store);
    let fixture = Fixture { clock: TestClock::at(begin), dir: fixture.dir };
    assert!(unusable(open_watchful(&fixture, false)).contains("the ledger has a later time"));
    drop(open_watchful(&fixture, true).unwrap());
    // Now all is as if the clock had never been wrong, but for what was stored then.
    for _ in 0..2 {
        let store = open_watchful(&fixture, false).unwrap();
        assert_eq!(store.now(), UnixMillis(begin));
        let Command::IssueCredential { credential } = issue(7, 1, None) else { unreachable!() };
        let expires_at = Some(UnixMillis(begin + 30 * DAY));
        let credential = Credential { expires_at, ..credential };
        store.submit_blocking(Command::IssueCredential { credential }).unwrap();
        let Command::Admit(mut fresh) = admit(3, 3, store.boot(), 10) else { unreachable!() };
        fresh.credential = CredentialId(id(7));
        let outcome = store.submit_blocking(Command::Admit(fresh)).unwrap();
        let (Outcome::Admitted(record) | Outcome::Existing(record)) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(record.attempts[0].created_at, UnixMillis(begin));
        store.submit_blocking(settle(3, 3, 1)).unwrap();
        assert_eq!(spent(&store), (2, 0));
        assert_sound(&store);
    }
    assert_eq!(Store::inspect(&fixture.config()).unwrap().violations, Vec::<String>::new());
}

/// Without the record of the place, an entry that goes back in time is a violation as before.
#[test]
fn time_goes_back_only_where_an_operator_set_it_back() {
    let fixture = Fixture::new(1_000);
    let config = fixture.files();
    let backend = EmbeddedBackend::open_on(super::super::lock(&config).unwrap()).unwrap();
    backend.set_time(UnixMillis(500)).unwrap();
    backend
        .with_files(|files| {
            super::super::tables::write(&files.ledger, |txn| {
                let mut meta = txn.open_table(tables::META).or_fault()?;
                tables::put(&mut meta, tables::SET_BACK, &vec![0_u64])
            })
        })
        .unwrap();
    drop(backend);
    fixture.clock.set(500);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    let violations = store.audit().unwrap().violations;
    assert!(violations.iter().any(|found| found.contains("goes back in time")), "{violations:?}");
}

/// A node that has nothing to do for long is not taken for one that stood still.
#[test]
fn a_waiting_node_stores_the_time() {
    let fixture = Fixture::new(1_000);
    let later = 1_000_000 + 2 * HOUR;
    fixture.clock.set(later);
    let store = fixture.open();
    // The sweep follows the first command.
    store.submit_blocking(Command::RevokeCredential { id: CredentialId(id(9)) }).unwrap_err();
    drop(store);
    assert_eq!(Store::stored_time(&fixture.config()).unwrap(), UnixMillis(later));
}

#[test]
fn crashes_are_forgotten_after_their_time() {
    let fixture = Fixture::new(1_000);
    let store = fixture.open();
    store.submit_blocking(admit(1, 1, store.boot(), 10)).unwrap();
    store.submit_blocking(start(1, 1)).unwrap();
    let crashed = image(&fixture);
    drop(store);
    let mut fingerprint = [0; 32];
    fingerprint[..16].copy_from_slice(&1_u128.to_be_bytes());
    let known = |store: &Store| {
        let read = store.read().now().unwrap();
        read.crashes(AccountId(id(1)), &fingerprint).now().unwrap().map(|crashes| crashes.count)
    };
    assert_eq!(known(&crashed.open()), Some(1));
    crashed.clock.set(1_000_000 + 25 * HOUR);
    let store = crashed.open();
    store.submit_blocking(Command::RevokeCredential { id: CredentialId(id(9)) }).unwrap_err();
    drop(store);
    assert_eq!(known(&crashed.open()), None);
}
