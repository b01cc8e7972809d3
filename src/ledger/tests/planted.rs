//! The test of the audit: each case plants one violation in a sound ledger, and the audit must name
//! it. A command that finds one writes nothing.

use super::{World, key, uuid};
use crate::audit::{AuditProgress, JournalChain, JournalHeads};
use crate::records::EntryKind;
use crate::state::StateError;
use crate::testing::MemoryState;
use crate::{
    Balances, BucketAmounts, CalendarUse, Microcredits, PeriodUses, RequestRecord, Usage, audit,
    journal,
};
use cresset_base::{AccountId, ApplicationId, AttemptId, BootId, UnixMillis};
use std::cell::RefCell;

const SOUND: [&str; 12] = [
    "account a",
    "key k a",
    "grant a trial 100 t",
    "grant a premium 100 p",
    "app x a",
    "admit a r 1 k 10 10",
    "start a r 1",
    "settle a r 1 10 0 5 stop",
    "admit a s 2 k 10 10",
    "release a s 2 failed",
    "admit a s 3 k 10 10",
    "admit a q 4 k 5 5",
];

fn find(expect: &str, plant: impl FnOnce(&mut MemoryState)) {
    let mut world = World::new();
    for line in SOUND {
        world.run(line);
    }
    assert_eq!(world.state.audit(), Vec::<String>::new());
    plant(&mut world.state);
    let found = world.state.audit();
    let named = found.iter().any(|violation| violation.contains(expect));
    assert!(named, "expected {expect:?} among {found:?}");
}

/// Checks that a command which finds the planted violation answers `expect` and writes nothing.
fn check_refused(line: &str, expect: &str, plant: fn(&mut MemoryState)) {
    let mut world = World::new();
    for line in SOUND {
        world.run(line);
    }
    plant(&mut world.state);
    let before = world.state.clone();
    assert_eq!(world.run(line), format!("violated {expect}"), "{line}");
    assert_eq!(world.state.entries, before.entries, "{line}");
    assert_eq!(world.state.requests, before.requests, "{line}");
    assert_eq!(world.state.balances, before.balances, "{line}");
    assert_eq!(world.state.reservations, before.reservations, "{line}");
}

#[test]
fn a_command_that_finds_a_violation_writes_nothing() {
    const OVERDRAWN: &str = "a bucket is overdrawn";
    const UNCOVERED: &str = "a live attempt lacks its reservation";
    check_refused("grant a premium 1 g", OVERDRAWN, |state| {
        balances(state).trial.debited = Microcredits::new(99).unwrap();
    });
    check_refused("grant a trial 1 g", OVERDRAWN, |state| {
        balances(state).premium.debited = Microcredits::new(101).unwrap();
    });
    check_refused("settle a s 3 1 0 1 stop", UNCOVERED, |state| {
        state.reservations.remove(&key("a", "s"));
    });
    check_refused("release a s 3 failed", UNCOVERED, |state| {
        state.reservations.get_mut(&key("a", "s")).unwrap().amount = BucketAmounts::ZERO;
    });
    check_refused("release a s 3 failed", UNCOVERED, |state| {
        state.reservations.get_mut(&key("a", "s")).unwrap().attempt = AttemptId(uuid("4"));
    });
    check_refused("admit a t 5 k 1 1", "a request without a live attempt is reserved", |state| {
        let stray = state.reservations[&key("a", "s")];
        state.reservations.insert(key("a", "t"), stray);
    });
    check_refused("release a s 3 failed", "more ends than reservations", |state| {
        state.accounts.values_mut().next().unwrap().in_flight = 0;
    });
    check_refused("release a s 3 failed", "an end frees more than is reserved", |state| {
        balances(state).trial.reserved = Microcredits::new(1).unwrap();
    });
}

#[test]
fn a_credential_is_as_old_as_its_command() {
    let mut world = World::new();
    world.run("account a");
    let mut command = world.command(&["key", "k", "a"]);
    if let crate::Command::IssueCredential { credential } = &mut command {
        credential.created_at = UnixMillis(7);
    }
    assert_eq!(world.apply(&command), "done");
    assert!(
        world
            .state
            .credentials
            .values()
            .all(|credential| credential.created_at == UnixMillis(1_000))
    );
}

fn balances(state: &mut MemoryState) -> &mut Balances {
    state.balances.values_mut().next().unwrap()
}

fn request<'a>(state: &'a mut MemoryState, name: &str) -> &'a mut RequestRecord {
    state.requests.get_mut(&key("a", name)).unwrap()
}

#[test]
fn wrong_balances_and_grants_are_found() {
    find("other balances than its journal", |state| {
        balances(state).trial.credited = Microcredits::new(101).unwrap();
    });
    find("overdrawn its trial", |state| {
        balances(state).trial.debited = Microcredits::new(95).unwrap();
    });
    find("overdrawn its premium", |state| {
        balances(state).premium.debited = Microcredits::new(101).unwrap();
    });
    find("reserved another sum", |state| {
        balances(state).trial.reserved = Microcredits::new(29).unwrap();
    });
    find("in flight", |state| {
        state.accounts.values_mut().next().unwrap().in_flight = 1;
    });
    find("its grant or debit disagree", |state| {
        state.granted.values_mut().next().unwrap().units = Microcredits::new(1).unwrap();
    });
    find("is not in the journal", |state| {
        let granted = *state.granted.values().next().unwrap();
        let account = AccountId(uuid("a"));
        state.granted.insert((account, "forged".into()), granted);
    });
}

#[test]
fn stray_and_missing_reservations_are_found() {
    find("reservation says otherwise", |state| {
        state.reservations.remove(&key("a", "s"));
    });
    find("reservation says otherwise", |state| {
        state.reservations.get_mut(&key("a", "s")).unwrap().boot = BootId(uuid("other"));
    });
    find("which is not there", |state| {
        let mut stray = state.reservations[&key("a", "s")];
        stray.key = key("a", "stray");
        state.reservations.insert(stray.key, stray);
    });
    find("its request is gone", |state| {
        state.requests.remove(&key("a", "q"));
        state.reservations.remove(&key("a", "q"));
    });
}

#[test]
fn attempts_that_contradict_themselves_are_found() {
    find("contradicts itself", |state| {
        request(state, "r").latest_mut().charged = BucketAmounts::ZERO;
    });
    find("contradicts itself", |state| {
        request(state, "r").latest_mut().usage = None;
    });
    find("contradicts itself", |state| {
        let failed = &mut request(state, "s").attempts[0];
        failed.charged.trial = Microcredits::new(1).unwrap();
    });
    find("contradicts itself", |state| {
        request(state, "r").latest_mut().prices.output = 7;
    });
    find("does not follow a failed one", |state| {
        request(state, "s").attempts[1].retry_of = None;
    });
    find("is not in the journal", |state| {
        request(state, "q").latest_mut().id = AttemptId(uuid("other"));
    });
    find("and its journal disagree", |state| {
        request(state, "r").latest_mut().reserved.premium = Microcredits::new(1).unwrap();
    });
    find("and its journal disagree", |state| {
        request(state, "q").latest_mut().reserved.premium = Microcredits::new(1).unwrap();
    });
    find("archived with other content", |state| {
        let mut duplicate = request(state, "r").clone();
        duplicate.stream = true;
        state.archived.insert(duplicate.key, duplicate);
    });
}

/// The entry keeps the journal's own rules, so only its content can show the violation.
fn post(
    state: &mut MemoryState,
    kind: EntryKind,
    amount: BucketAmounts,
    change: impl Fn(Balances) -> Option<Balances>,
) {
    let account = AccountId(uuid("a"));
    let at = state.entries.last().unwrap().at;
    let after = change(state.balances[&account]).unwrap();
    journal::post(state, at, account, kind, amount, after).unwrap();
}

#[test]
fn a_journal_that_says_things_twice_is_found() {
    find("is reserved twice", |state| {
        let (key, attempt) = (key("a", "r"), state.requests[&key("a", "r")].latest().id);
        let amount = state.requests[&key].latest().reserved;
        post(state, EntryKind::Reserve { key, attempt }, amount, |before| before.reserve(amount));
        let charged = state.requests[&key].latest().charged;
        post(state, EntryKind::Settle { key, attempt }, charged, |before| {
            before.resolve(amount, charged)
        });
    });
    find("ends twice", |state| {
        let (key, attempt) = (key("a", "r"), state.requests[&key("a", "r")].latest().id);
        post(state, EntryKind::Release { key, attempt }, BucketAmounts::ZERO, Some);
    });
    find("journalled twice", |state| {
        let amount = state.granted[&(AccountId(uuid("a")), "t".to_owned())].bucket_amounts();
        post(state, EntryKind::Grant { reference: "t".into() }, amount, |before| {
            before.credit(amount)
        });
    });
    find("and its grant or debit disagree", |state| {
        let amount = state.granted[&(AccountId(uuid("a")), "t".to_owned())].bucket_amounts();
        post(state, EntryKind::Debit { reference: "t".into() }, amount, |before| {
            before.resolve(BucketAmounts::ZERO, amount)
        });
    });
    find("and its grant or debit disagree", |state| {
        let amount = state.granted[&(AccountId(uuid("a")), "t".to_owned())].bucket_amounts();
        post(state, EntryKind::Grant { reference: "forged".into() }, amount, |before| {
            before.credit(amount)
        });
    });
    find("charged more than was reserved", |state| {
        let key = key("a", "q");
        let attempt = state.requests[&key].latest().id;
        let more = BucketAmounts {
            premium: Microcredits::new(50).unwrap(),
            ..state.requests[&key].latest().reserved
        };
        let reserved = state.requests[&key].latest().reserved;
        post(state, EntryKind::Settle { key, attempt }, more, |before| {
            before.resolve(reserved, more)
        });
    });
    find("does not match its reservation", |state| {
        let key = key("a", "q");
        let attempt = state.requests[&key].latest().id;
        let reserved = state.requests[&key].latest().reserved;
        post(state, EntryKind::Release { key, attempt }, BucketAmounts::ZERO, |before| {
            before.resolve(reserved, BucketAmounts::ZERO)
        });
    });
}

/// An incremental audit finds violations in all rows that new entries touch, even where the
/// violation is older.
#[test]
fn new_entries_are_audited_alone() {
    let cases: [(&str, fn(&mut MemoryState)); 7] = [
        ("", |_| {}),
        ("other balances than its journal", |state| {
            balances(state).premium.debited = Microcredits::new(1).unwrap();
        }),
        ("not what it was at the audit before", |state| state.entries[3].hash[0] ^= 1),
        ("breaks the chain", |state| state.entries.last_mut().unwrap().hash[0] ^= 1),
        ("does not follow", |state| drop(state.entries.remove(5))),
        ("in flight", |state| state.accounts.values_mut().next().unwrap().in_flight = 9),
        ("contradicts itself", |state| {
            request(state, "s").attempts[0].usage = Some(Usage::default());
        }),
    ];
    for (expect, plant) in cases {
        let mut world = World::new();
        for line in &SOUND[..8] {
            world.run(line);
        }
        let first = audit::everything(&world.state, &audit::unpaced).unwrap();
        assert_eq!(
            (first.violations.len(), first.entries, first.heads.of(JournalChain::Shared).sequence),
            (0, 4, 4)
        );
        let trusted = first.heads;
        for line in &SOUND[8..] {
            world.run(line);
        }
        plant(&mut world.state);
        let news = audit::since(&world.state, trusted, &audit::unpaced).unwrap();
        let named = news.violations.iter().any(|violation| violation.contains(expect));
        assert!(
            if expect.is_empty() { news.ok } else { named },
            "{expect:?} among {:?}",
            news.violations
        );
        assert!(news.entries < audit::everything(&world.state, &audit::unpaced).unwrap().entries);
    }
}

/// The caller is asked before every row, and what it answers ends the audit.
#[test]
fn an_audit_goes_at_its_callers_pace() {
    let mut world = World::new();
    for line in SOUND {
        world.run(line);
    }
    let seen = RefCell::new(Vec::new());
    let note = |progress: AuditProgress| {
        seen.borrow_mut().push(progress);
        Ok(())
    };
    let report = audit::everything(&world.state, &note).unwrap();
    let seen = seen.into_inner();
    let total = seen[0].total;
    let expect: Vec<_> = (0..total).map(|done| AuditProgress { done, total }).collect();
    assert_eq!((seen, report.ok), (expect, true));
    let stop = |progress: AuditProgress| match progress.done {
        ..5 => Ok(()),
        5 => Err(StateError::Io("it is told to stop".into())),
        _ => panic!("it went on"),
    };
    let heads = JournalHeads::default();
    for ended in [
        audit::everything(&world.state, &stop),
        audit::since(&world.state, heads.clone(), &stop),
        audit::at_start(&world.state, heads, &stop),
    ] {
        assert_eq!(ended.unwrap_err(), StateError::Io("it is told to stop".into()));
    }
}

/// A start trusts the journal up to its seal, and looks at every account all the same.
#[test]
fn a_start_checks_accounts_that_stood_still() {
    let cases: [(&str, fn(&mut MemoryState)); 6] = [
        ("", |_| {}),
        ("other balances than its journal", |state| {
            balances(state).premium.credited = Microcredits::MAX;
        }),
        ("overdrawn its trial", |state| {
            balances(state).trial.debited = Microcredits::new(95).unwrap();
        }),
        ("in flight", |state| state.accounts.values_mut().next().unwrap().in_flight = 9),
        ("reserved another sum", |state| {
            state.reservations.remove(&key("a", "q"));
        }),
        ("is not what it was at the audit before", |state| drop(state.entries.pop())),
    ];
    for (expect, plant) in cases {
        let mut world = World::new();
        for line in SOUND {
            world.run(line);
        }
        let sealed = audit::everything(&world.state, &audit::unpaced).unwrap().heads;
        plant(&mut world.state);
        let report = audit::at_start(&world.state, sealed, &audit::unpaced).unwrap();
        let named = report.violations.iter().any(|violation| violation.contains(expect));
        assert!(if expect.is_empty() { report.ok } else { named }, "{expect:?}: {report:?}");
        assert_eq!((report.entries, report.requests), (0, 0));
    }
}

#[test]
fn rows_without_an_owner_are_found() {
    find("has no owner", |state| {
        let mut stray = request(state, "q").clone();
        stray.key.account = AccountId(uuid("b"));
        state.requests.insert(stray.key, stray);
    });
    find("belongs to no account", |state| {
        state.credentials.values_mut().next().unwrap().account = AccountId(uuid("b"));
    });
    find("belong to no account", |state| {
        let balances = *state.balances.values().next().unwrap();
        state.balances.insert(AccountId(uuid("b")), balances);
    });
}

#[test]
fn an_altered_journal_is_found() {
    find("does not follow", |state| {
        state.entries.remove(3);
    });
    find("does not follow", |state| {
        let duplicate = state.entries[3].clone();
        state.entries.insert(4, duplicate);
    });
    find("breaks the chain", |state| {
        state.entries[2].account = AccountId(uuid("b"));
    });
    find("breaks the chain", |state| {
        state.entries[4].hash[0] ^= 1;
    });
    find("changes the balance by another sum than its statement", |state| {
        state.entries[3].amount.trial = Microcredits::new(99).unwrap();
    });
    find("changes the balance by another sum than its statement", |state| {
        state.entries[4].at = UnixMillis(u64::MAX);
    });
    find("does not lead to the balances", |state| {
        state.entries[1].after.trial.credited = Microcredits::MAX;
    });
    find("goes back in time", |state| {
        state.entries[5].at = UnixMillis(1);
    });
    find("disagree", |state| {
        state.entries[3].amount = BucketAmounts::ZERO;
    });
    find("no application of its account", |state| {
        let application = Some(ApplicationId(uuid("x")));
        state.credentials.values_mut().next().unwrap().application = application;
    });
}

fn account(state: &mut MemoryState) -> &mut crate::Account {
    state.accounts.values_mut().next().unwrap()
}

fn credential(state: &mut MemoryState) -> &mut crate::Credential {
    state.credentials.values_mut().next().unwrap()
}

#[test]
fn wrong_uses_are_found() {
    type Uses = fn(&mut CalendarUse) -> &mut PeriodUses;
    let [day, month]: [Uses; 2] = [|used| &mut used.day, |used| &mut used.month];
    for (of, name) in [(day, "day"), (month, "month")] {
        let said = |what: &str| what.replace("PERIOD", &format!("{name} of 1970-01-01"));
        let reserved = format!("reserves another sum in its {name} than its reservations");
        let one = Microcredits::new(1).unwrap();
        find(&said("spent in the PERIOD more than its journal says"), |state| {
            of(&mut account(state).used).uses[0].spent.units = Microcredits::new(16).unwrap();
        });
        find(&said("spent in the PERIOD less than its journal says"), |state| {
            of(&mut account(state).used).uses[0].number += 1;
        });
        find(&said("spent in the PERIOD less than its credentials together"), |state| {
            of(&mut account(state).used).uses[0].spent.units = one;
        });
        find(&reserved, |state| of(&mut account(state).used).uses[0].reserved.units = one);
        find(&reserved, |state| of(&mut account(state).used).uses[0].reserved.tokens += 1);
        find(&reserved, |state| of(&mut credential(state).used).uses[0].reserved.tokens -= 1);
        find(&reserved, |state| of(&mut account(state).used).uses.clear());
        find(&said("used tokens in the PERIOD less than its credentials"), |state| {
            of(&mut credential(state).used).uses[0].spent.tokens += 1;
        });
        find(&said("used tokens in the PERIOD more than its credentials"), |state| {
            of(&mut credential(state).used).uses[0].spent.tokens -= 1;
        });
    }
    check_refused("release a s 3 failed", "an end frees more than its period reserves", |state| {
        account(state).used.day.uses[0].reserved = crate::Consumption::default();
    });
}
