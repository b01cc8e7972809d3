//! Several nodes on one ledger.

use super::cluster;
use super::faults::{NOW, assert_sound, record, run, with_requests};
use super::node::{Node, SetClock};
use crate::rows::{AccountRow, content};
use crate::schema;
use crate::session::Ask;
use crate::{PostgresBackend, PostgresConfig};
use cresset_base::{Clock, SystemClock, UnixMillis};
use cresset_ledger::apply::apply;
use cresset_ledger::{AdmissionRate, AttemptState};
use cresset_store::codec::{Malformed, Reader, StoredField, encode};
use cresset_store::testing::*;
use cresset_store::{
    Backend, BatchFailure, LedgerReader, LedgerTxn, Limits, NodeFacts, Store, StoreConfig,
    StoreError,
};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use uuid::Uuid;

/// Waits for what the other nodes' renewals bring about.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2_000 {
        if holds() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("it never happened: {what}");
}

fn claimed(place: &PostgresConfig) -> (PostgresBackend, BootId) {
    let (backend, boot) = (PostgresBackend::open(place).unwrap(), BootId::generate());
    backend.claim(boot).unwrap();
    (backend, boot)
}

#[test]
fn nodes_share_a_ledger_and_end_the_one_that_is_silent() {
    let Some(cluster) = cluster::shared() else { return };
    let (place, first, boot) = with_requests(cluster);
    let (second, next) = claimed(&place);
    assert!(!second.was_left_open().unwrap());
    let recover = Command::Recover { boot: next, limit: 10, crash_block_ms: 1 };
    run(&second, vec![admit(3, 3, next, 10), recover.clone()]).unwrap();
    assert_eq!(record(&second, 2).latest().state, AttemptState::Queued, "its node is alive");
    assert!(!second.other_nodes().left_behind);
    // The first node is not heard of any more, as one that was stopped.
    first.tenure.lock().as_ref().unwrap().renewing.abort();
    eventually("the second node ends it", || second.other_nodes().left_behind);
    run(&second, vec![recover]).unwrap();
    assert_eq!(record(&second, 2).latest().failure, Some(FailureCode::NodeRestarted));
    // The other one admits what carries its own boot.
    let admits = |boot| second.transact(0, &[], NOW, |txn| Ok(txn.admission_block(boot)));
    assert_eq!(admits(next).unwrap(), None);
    assert!(admits(boot).unwrap().is_some());
    // The ended one goes on, admits nothing, and its end comes too late to be charged.
    let late = first.transact(0, &[], NOW, |txn| {
        assert!(txn.admission_block(boot).is_some());
        Ok(format!("{:?}", apply(txn, &settle(2, 2, 4), NOW)))
    });
    assert!(late.unwrap().contains("AlreadyResolved"));
    assert_sound(&second);
    assert_eq!(record(&second, 2).latest().state, AttemptState::Failed);
    assert_eq!(record(&second, 3).latest().state, AttemptState::Queued);
    let nodes = second.driver.wait(second.nodes()).unwrap();
    let state = |boot: BootId| nodes.iter().find(|node| node.boot == boot.0).unwrap().state;
    assert_eq!((state(boot), state(next)), ("ended", "running"));
}

#[test]
fn a_node_that_others_ended_begins_anew_under_another_boot() {
    let Some(cluster) = cluster::shared() else { return };
    let clock = SetClock::default();
    clock.set(NOW.0);
    let mut node = Node::open(&cluster.ledger(), &clock);
    let before = node.store.boot();
    for command in opening(100) {
        node.apply(command.into()).unwrap();
    }
    node.apply(admit(1, 1, before, 10).into()).unwrap();
    let (key, attempt) = (key(1), AttemptId(id(1)));
    node.apply(Command::Start { key, attempt }.into()).unwrap();
    let ended = format!("update nodes set state = 1 where boot = '{before}'");
    cluster.with_session(node.place(), async |session| session.script(&ended).await.unwrap());
    eventually("it learns of that", || {
        node.look_at_others();
        node.store.was_ended_by_others()
    });
    let refused = node.apply(admit(2, 2, before, 10).into());
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    node.store.request_new_boot();
    eventually("what it had reserved is released", || {
        node.look_at_others();
        record(&node.backend, 1).latest().state == AttemptState::Failed
    });
    let after = node.store.boot();
    assert!(after != before && !node.store.was_ended_by_others());
    let refused = node.apply(admit(2, 2, before, 10).into());
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    node.apply(admit(2, 2, after, 10).into()).unwrap();
    // The input was running, and its node had not crashed.
    let counted = |node: &Node| {
        let (backend, input) = (&node.backend, record(&node.backend, 1).fingerprint);
        let read =
            async move { backend.snapshot().await.unwrap().crashes(key.account, &input).await };
        backend.driver.wait(read).unwrap()
    };
    assert_eq!(counted(&node).map(|crashes| crashes.count), Some(1));
    let fingerprint = record(&node.backend, 1).fingerprint;
    let take_back = Command::TakeBackCrash { account: key.account, fingerprint, boot: before };
    node.apply(take_back.clone().into()).unwrap();
    assert_eq!(counted(&node), None);
    assert!(matches!(node.apply(take_back.into()), Ok(Outcome::Repeated)));
    node.assert_sound();
}

#[test]
fn a_violation_that_one_node_finds_stops_all() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let ((first, boot), (second, _)) = (claimed(&place), claimed(&place));
    run(&first, opening(100)).unwrap();
    first.record_violation("two and two are five").unwrap();
    first.record_violation("and another one").unwrap();
    eventually("the other node hears of it", || second.other_nodes().distrust.is_some());
    assert_eq!(second.other_nodes().distrust.as_deref(), Some("two and two are five"));
    let beside = PostgresBackend::open_beside(&place).unwrap();
    assert_eq!(beside.recorded_violation().unwrap().as_deref(), Some("two and two are five"));
    // A seal would vouch for what nobody has looked into.
    let report = cresset_ledger::audit::everything(
        &*first.audit_source().unwrap(),
        &cresset_ledger::audit::unpaced,
    );
    let seal = cresset_store::Seal { heads: report.unwrap().heads, fully_audited_at: NOW };
    second.set_seal(Some(&seal)).unwrap();
    assert_eq!(beside.seal().unwrap(), None);
    // A start that found everything sound.
    let third = PostgresBackend::open(&place).unwrap();
    assert_eq!(third.seal().unwrap(), None);
    third.claim(BootId::generate()).unwrap();
    assert_eq!(beside.recorded_violation().unwrap(), None);
    third.set_seal(Some(&seal)).unwrap();
    assert_eq!(beside.seal().unwrap(), Some(seal));
    first.close(boot, true).unwrap();
}

#[test]
fn one_node_audits_and_the_others_take_over_what_it_found() {
    const DAY: u64 = 24 * 3_600_000;
    let Some(cluster) = cluster::shared() else { return };
    let (place, clock) = (cluster.ledger(), SetClock::default());
    clock.set(NOW.0);
    let (mut first, mut second) = (Node::open(&place, &clock), Node::open(&place, &clock));
    for command in opening(100) {
        first.apply(command.into()).unwrap();
    }
    eventually("the second node leaves it to the first", || {
        second.look_at_others();
        second.do_others_audit()
    });
    first.look_at_others();
    clock.set(NOW.0 + DAY);
    assert!(first.owes_full_audit(DAY) && !second.owes_full_audit(DAY));
    assert!(first.store.audit().unwrap().ok);
    first.seal();
    second.seal();
    assert_eq!(second.store.fully_audited_at(), Some(UnixMillis(NOW.0 + DAY)));
    assert_eq!(second.due_seal(), first.due_seal());
    clock.set(NOW.0 + 2 * DAY);
    drop(first);
    eventually("the second audits once the first is gone", || {
        second.look_at_others();
        second.owes_full_audit(DAY)
    });
}

#[test]
fn nodes_with_other_plans_are_refused() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let with = |plan: &str| {
        let plans = [("default".to_owned(), plan.to_owned())].into();
        let about = NodeFacts { plans, machine: "one".into(), ..NodeFacts::default() };
        PostgresConfig { about, ..place.clone() }
    };
    let ((_first, _), (_second, _)) = (claimed(&with("a")), claimed(&with("a")));
    let other = PostgresBackend::open(&with("b")).unwrap().claim(BootId::generate());
    let Err(StoreError::Unusable(why)) = other else { panic!("{other:?}") };
    assert!(why.contains("\"default\"") && why.contains("on one"), "{why}");
}

/// Machines whose clocks are two hours apart write one account's journal by the database's time.
#[test]
fn the_database_s_time_counts_whatever_the_machines_show() {
    const HOUR: u64 = 3_600_000;
    let Some(cluster) = cluster::shared() else { return };
    let (config, began) = (StoreConfig::Database(Arc::new(cluster.ledger())), SystemClock.now());
    let stores = [began.0 - HOUR, began.0 + HOUR].map(|shown| {
        let clock = SetClock::default();
        clock.set(shown);
        Store::open(&config, Arc::new(clock), Limits::default()).unwrap()
    });
    for command in opening(1_000) {
        stores[1].submit_blocking(command).unwrap();
    }
    // Their clocks stand still, and what they know of the database's is renewed.
    thread::sleep(Duration::from_millis(400));
    for number in 1..=6 {
        let store = &stores[number as usize % 2];
        store.submit_blocking(admit(number, number, store.boot(), 1)).unwrap();
        store.submit_blocking(settle(number, number, 1)).unwrap();
    }
    let ended = SystemClock.now();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let entries = runtime.block_on(async {
        stores[0].read().await.unwrap().entries(AccountId(id(1)), 0, 100).await.unwrap()
    });
    assert_eq!(entries.len(), 13);
    assert!(entries.is_sorted_by_key(|entry| entry.at));
    let around = began.0 - 100..=ended.0 + 100;
    assert!(entries.iter().all(|entry| around.contains(&entry.at.0)), "{around:?} {entries:?}");
    for store in &stores {
        let now = began.0 - 100..=SystemClock.now().0 + 100;
        assert!(now.contains(&store.now().0), "it judges expiry by the same time");
        assert!(store.audit().unwrap().ok);
    }
}

#[test]
fn a_rate_holds_over_all_nodes() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let nodes = [claimed(&place), claimed(&place)];
    run(&nodes[0].0, opening(1_000)).unwrap();
    let rate = AdmissionRate { per_minute: 60, burst: 3 };
    let mut answers = Vec::new();
    for number in 1..=4 {
        let (backend, boot) = &nodes[number as usize % 2];
        let Command::Admit(admit) = admit(number, number, *boot, 1) else { unreachable!() };
        let admit = Command::Admit(Box::new(Admit { rate, ..*admit }));
        let answer = backend
            .transact(0, &[], NOW, |txn| Ok::<_, BatchFailure>(apply(txn, &admit, NOW).map(drop)));
        answers.push(answer.unwrap().map_err(|refused| refused.to_string()));
    }
    assert_eq!(answers[..3], [Ok(()), Ok(()), Ok(())]);
    let refused = answers[3].clone().unwrap_err();
    assert!(refused.contains("more requests a minute"), "{refused}");
}

/// Steps that only this test has. Neither can be taken twice.
const PLANTED: [&str; 3] = [
    "",
    "alter table nodes add column added text not null default ''",
    "alter table accounts add column added bigint not null default 7",
];

#[test]
fn tables_of_an_earlier_schema_are_extended_once_no_node_uses_them() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let store = Store::open_briefly(
        &StoreConfig::Database(Arc::new(place.clone())),
        std::sync::Arc::new(SystemClock),
        Limits::default(),
    );
    for command in opening(100) {
        store.as_ref().unwrap().submit_blocking(command).unwrap();
    }
    drop(store);
    let script = |script: &str| {
        cluster.with_session(&place, async |session| session.script(script).await.unwrap());
    };
    let bring_up = |steps: &[&str]| {
        cluster.with_session(&place, async |session| schema::bring_up(session, steps).await)
    };
    script(
        "insert into nodes values \
        ('00000000-0000-0000-0000-000000000009', 0, clock_timestamp() + interval '1 hour')",
    );
    assert!(bring_up(&PLANTED).unwrap_err().to_string().contains("stop them first"));
    script("delete from nodes");
    // All steps or none: with the one that fails, the first has not happened.
    bring_up(&["", PLANTED[1], "no statement"]).unwrap_err();
    bring_up(&PLANTED).unwrap();
    bring_up(&PLANTED).unwrap();
    let newer = PostgresBackend::open(&place).err().unwrap().to_string();
    assert!(newer.contains("has schema 4 and this build knows 2"), "{newer}");
    // What the steps left goes on where this build may use it.
    let row = hex::encode(encode(b"format", &2_u32));
    script(&format!("update meta set row = '\\x{row}' where key = 'format'"));
    let (backend, boot) = claimed(&place);
    run(&backend, vec![admit(1, 1, boot, 10)]).unwrap();
    assert_sound(&backend);
}

/// A row as a build before schema 2 wrote it, with the uses of one period of each kind. `row` is
/// without uses, and has `after` bytes behind them.
fn first_version<T: StoredField>(id: Uuid, row: &T, after: usize, used: &CalendarUse) -> String {
    struct EarlierRow(Vec<u8>);
    impl StoredField for EarlierRow {
        fn write(&self, out: &mut Vec<u8>) {
            out.extend(&self.0);
        }
        fn read(_: &mut Reader<'_>) -> Result<Self, Malformed> {
            Err(Malformed("it is only written"))
        }
    }
    let row = encode(id.as_bytes(), row);
    // Between the version and the checksum: fields, two empty uses of 12 bytes, fields.
    let (before, rest) = row[1..row.len() - 4].split_at(row.len() - 5 - after - 2 * 12);
    let mut fields = before.to_vec();
    used.day.uses[0].write(&mut fields);
    used.month.uses[0].write(&mut fields);
    fields.extend(&rest[2 * 12..]);
    hex::encode(encode(id.as_bytes(), &EarlierRow(fields)))
}

#[test]
fn rows_of_the_first_schema_are_read_and_go_on() {
    let Some(cluster) = cluster::shared() else { return };
    let place = cluster.ledger();
    let (backend, boot) = claimed(&place);
    let (account, key) = (AccountId(id(1)), CredentialId(id(1)));
    let (owner, period) = (BudgetOwner::Account(account), BudgetPeriod::Month);
    let limit = SpendingLimit { units: Microcredits::new(40).unwrap(), alert_percent: None };
    run(&backend, opening(1_000)).unwrap();
    run(&backend, vec![Command::SetBudget { owner, period, limit: Some(limit) }]).unwrap();
    run(&backend, vec![admit(1, 1, boot, 37), settle(1, 1, 37)]).unwrap();
    drop(backend);
    let used = cluster.with_session(&place, async |session| {
        let read = async |table| session.ask(Ask::new(table)).await.unwrap();
        let stored = read("select row from accounts").await;
        let mut row: AccountRow = content(&stored.rows[0], 0, account.0.as_bytes()).unwrap();
        let used = std::mem::take(&mut row.account.used);
        // Balances, the head of the journal, and the clock.
        let accounts = first_version(account.0, &row, 6 * 8 + 24 + 8, &used);
        let stored = read("select row from credentials").await;
        let mut row: Credential = content(&stored.rows[0], 0, key.0.as_bytes()).unwrap();
        let of_key = std::mem::take(&mut row.used);
        let credentials = first_version(key.0, &row, 0, &of_key);
        let format = hex::encode(encode(b"format", &1_u32));
        let earlier = format!(
            "update accounts set row = '\\x{accounts}'; \
             update credentials set row = '\\x{credentials}'; \
             update meta set row = '\\x{format}' where key = 'format'; delete from nodes"
        );
        session.script(&earlier).await.unwrap();
        used
    });
    let (backend, boot) = claimed(&place);
    let found = backend.audit_source().unwrap().account(account).unwrap().unwrap();
    assert_eq!(found.used.month.uses, used.month.uses);
    assert_sound(&backend);
    let too_much = backend.transact(0, &[], NOW, |txn| {
        Ok::<_, BatchFailure>(apply(txn, &admit(2, 2, boot, 4), NOW).map(drop))
    });
    assert!(too_much.unwrap().unwrap_err().to_string().contains("account's budget"));
    run(&backend, vec![admit(2, 2, boot, 3), settle(2, 2, 3)]).unwrap();
    assert_sound(&backend);
}
