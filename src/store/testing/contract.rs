//! The promises of `backend.rs`, checked over any backend. Each backend tests loss of power and
//! failing storage itself, because each simulates them in its own way.

use super::*;
use crate::backend::{Backend, BatchFailure, LedgerTxn, Seal};
use crate::queue::WriteAction;
use crate::settings::RequestSettings;
use crate::{Limits, StoreError};
use cresset_base::UnixMillis;
use cresset_ledger::apply::{ApplyError, apply};
use cresset_ledger::{AttemptState, LedgerState, RequestRecord, audit};

const NOW: UnixMillis = UnixMillis(1_000_000);
const HOUR_MS: u64 = 3_600_000;

/// Checks every promise, each over a ledger of its own. `make` makes an empty ledger and returns a
/// function that opens it; the opened one is dropped before it is opened again.
pub fn keeps_all<B: Backend, O: Fn() -> B>(make: impl Fn() -> O) {
    for promise in [
        reads_see_what_was_acknowledged_and_nothing_else::<B>,
        chains_have_no_gaps::<B>,
        repeats_change_nothing::<B>,
        bodies_are_there_before_their_settlement::<B>,
        ended_requests_are_forgotten_in_the_order_of_their_ends::<B>,
        time_does_not_go_back::<B>,
        budgets_hold_after_any_step_of_the_clock::<B>,
        only_reservations_of_the_dead_are_foreign::<B>,
        a_backend_that_was_not_closed_says_so::<B>,
        a_seal_stays_until_it_is_removed::<B>,
        reopening_keeps_everything_or_stays_closed::<B>,
    ] {
        let open = make();
        promise(&open);
    }
}

type Outcomes = Result<Vec<Result<Outcome, ApplyError>>, BatchFailure>;

fn transact(backend: &impl Backend, now: UnixMillis, actions: &[WriteAction]) -> Outcomes {
    let actions: Vec<_> = actions.iter().collect();
    backend.transact(0, &actions, now, |txn| {
        let outcome = |action: &&WriteAction| {
            let now = txn.time_of(&action.command);
            apply(txn, &action.command, now)
        };
        Ok(actions.iter().map(outcome).collect())
    })
}

/// Applies the commands as one batch that must succeed.
fn commit(backend: &impl Backend, now: UnixMillis, commands: Vec<Command>) {
    let actions: Vec<_> = commands.into_iter().map(WriteAction::from).collect();
    for outcome in transact(backend, now, &actions).unwrap() {
        outcome.unwrap();
    }
}

/// A claimed ledger with one request that holds a reservation, and the boot that made it.
fn with_one_reservation<B: Backend>(open: &dyn Fn() -> B) -> (B, BootId) {
    let (backend, boot) = (open(), BootId::generate());
    backend.claim(boot).unwrap();
    commit(&backend, NOW, opening(100));
    commit(&backend, NOW, vec![admit(1, 1, boot, 10)]);
    (backend, boot)
}

fn wait<T>(answer: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(answer)
}

fn request(backend: &impl Backend, number: u128) -> Option<RequestRecord> {
    let read = async || backend.snapshot().await.unwrap().request(&key(number)).await.unwrap();
    wait(read())
}

fn state(backend: &impl Backend, number: u128) -> AttemptState {
    request(backend, number).unwrap().latest().state
}

fn assert_sound(backend: &impl Backend) {
    let report = audit::everything(&*backend.audit_source().unwrap(), &audit::unpaced).unwrap();
    assert_eq!(report.violations, Vec::<String>::new());
}

fn reads_see_what_was_acknowledged_and_nothing_else<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    let before = wait(backend.snapshot()).unwrap();
    commit(&backend, NOW, vec![settle(1, 1, 4), admit(2, 2, boot, 10)]);
    assert_eq!(wait(before.request(&key(2))).unwrap(), None, "a snapshot has changed");
    let old = wait(before.request(&key(1))).unwrap().unwrap();
    assert_eq!(old.latest().state, AttemptState::Queued, "a snapshot has changed");
    assert_eq!(state(&backend, 1), AttemptState::Completed);
    let abandoned: Result<(), _> = backend.transact(0, &[], NOW, |txn| {
        apply(txn, &release(2, 2), NOW).unwrap();
        Err(BatchFailure::InDoubt("abandoned on purpose".into()))
    });
    assert!(abandoned.is_err());
    assert_eq!(state(&backend, 2), AttemptState::Queued, "an abandoned batch is visible");
    let mut digest = [0; 32];
    digest[15] = 1;
    let (credential, account) = wait(backend.credential_and_account(&digest)).unwrap().unwrap();
    assert_eq!((credential.account, account.in_flight), (account.id, 1));
    assert_eq!(wait(backend.credential_and_account(&[9; 32])).unwrap(), None);
    assert_sound(&backend);
}

fn chains_have_no_gaps<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    let account = AccountId(id(1));
    backend
        .transact(0, &[], NOW, |txn| {
            let before = txn.head(account)?;
            apply(txn, &admit(2, 2, boot, 10), NOW).unwrap();
            apply(txn, &settle(1, 1, 4), NOW).unwrap();
            assert_eq!(txn.head(account)?.sequence, before.sequence + 2);
            Ok(())
        })
        .unwrap();
    backend.close(boot, true).unwrap();
    drop(backend);
    let backend = open();
    commit(&backend, NOW, vec![release(2, 2)]);
    let read = async || backend.snapshot().await.unwrap().entries(account, 0, 100).await.unwrap();
    let sequences: Vec<u64> = wait(read()).iter().map(|entry| entry.sequence).collect();
    assert_eq!(sequences, [1, 2, 3, 4, 5]);
    assert_sound(&backend);
}

fn repeats_change_nothing<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, _) = with_one_reservation(open);
    commit(&backend, NOW, vec![settle(1, 1, 4)]);
    let again = transact(&backend, NOW, &[settle(1, 1, 9).into()]).unwrap();
    assert!(matches!(again[..], [Ok(Outcome::AlreadyResolved(_))]));
    let report = audit::everything(&*backend.audit_source().unwrap(), &audit::unpaced).unwrap();
    assert_eq!((report.ok, report.entries), (true, 3));
}

fn bodies_are_there_before_their_settlement<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    commit(&backend, NOW, vec![admit(2, 2, boot, 10)]);
    let with_body = |command, number, content: &'static [u8]| {
        let body = body_of(content.into(), NOW.0 + 10);
        WriteAction::new(command, Some((key(number), body)))
    };
    // The second command is refused, as it names an attempt that nobody made.
    let actions = [with_body(settle(1, 1, 4), 1, b"one"), with_body(settle(2, 9, 4), 2, b"two")];
    let outcomes = transact(&backend, NOW, &actions).unwrap();
    assert!(outcomes[0].is_ok() && outcomes[1].is_err());
    let body = |backend: &B, number, after| {
        let body = wait(backend.body(&key(number), UnixMillis(NOW.0 + after))).unwrap();
        body.map(|body| wait(body.answer()).unwrap())
    };
    assert_eq!(body(&backend, 1, 9).as_deref(), Some(&b"one"[..]));
    assert_eq!(body(&backend, 1, 10), None, "an expired answer is shown");
    drop(backend);
    let backend = open();
    backend.claim(BootId::generate()).unwrap();
    assert_eq!(body(&backend, 1, 9).as_deref(), Some(&b"one"[..]));
    assert_eq!(body(&backend, 2, 0), None, "an answer without its settlement is kept");
}

fn ended_requests_are_forgotten_in_the_order_of_their_ends<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    commit(&backend, NOW, vec![admit(2, 2, boot, 10)]);
    commit(&backend, NOW, vec![settle(1, 1, 4)]);
    let later = UnixMillis(NOW.0 + HOUR_MS);
    commit(&backend, later, vec![settle(2, 2, 4)]);
    let is_known = |number| {
        let known = backend.transact(0, &[], later, |txn| {
            Ok(txn.request(&key(number))?.is_some() || txn.archived(&key(number))?.is_some())
        });
        known.unwrap()
    };
    let requests = RequestSettings {
        body_retention_hours: 1,
        tombstone_days: 1,
        ..RequestSettings::default()
    };
    let limits = Limits { requests, ..Limits::default() };
    while backend.sweep(later, &limits).unwrap() {}
    assert!(is_known(1) && is_known(2));
    assert_eq!(state(&backend, 1), AttemptState::Completed, "an old request is unknown");
    assert_sound(&backend);
    while backend.sweep(UnixMillis(NOW.0 + 24 * HOUR_MS), &limits).unwrap() {}
    assert_eq!(request(&backend, 1), None, "a tombstone outlived its time");
    assert!(!is_known(1) && is_known(2));
    assert_sound(&backend);
}

fn time_does_not_go_back<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    let earlier = UnixMillis(NOW.0 - 500);
    let command = settle(1, 1, 4);
    backend
        .transact(0, &[], earlier, |txn| {
            assert!(txn.time_of(&command) >= NOW);
            Ok(())
        })
        .unwrap();
    commit(&backend, earlier, vec![command, admit(2, 2, boot, 10)]);
    assert_eq!(request(&backend, 1).unwrap().latest().finished_at, Some(NOW));
    assert_sound(&backend);
}

/// A ledger either has its time set back, or stays at the later one: no period's budget is spent
/// twice, and each period has spent what the entries of its own time say.
fn budgets_hold_after_any_step_of_the_clock<B: Backend>(open: &dyn Fn() -> B) {
    const NOVEMBER: UnixMillis = UnixMillis(1_795_910_400_000);
    const DECEMBER: UnixMillis = UnixMillis(1_796_256_000_000);
    let (backend, boot, account) = (open(), BootId::generate(), AccountId(id(1)));
    backend.claim(boot).unwrap();
    commit(&backend, NOVEMBER, opening(1_000));
    let limit = SpendingLimit { units: Microcredits::new(40).unwrap(), alert_percent: None };
    let (owner, period) = (BudgetOwner::Account(account), BudgetPeriod::Month);
    commit(&backend, NOVEMBER, vec![Command::SetBudget { owner, period, limit: Some(limit) }]);
    for (request, (now, has_room)) in
        [(NOVEMBER, true), (DECEMBER, true), (NOVEMBER, false), (DECEMBER, false)]
            .into_iter()
            .enumerate()
    {
        // A database goes by its own clock, and refuses.
        drop(backend.set_time(now));
        let request = request as u128 + 1;
        let admitted = transact(&backend, now, &[admit(request, request, boot, 37).into()]);
        assert_eq!(admitted.unwrap()[0].is_ok(), has_room, "{request}");
        if has_room {
            commit(&backend, now, vec![settle(request, request, 37)]);
        }
    }
    let read = wait(backend.snapshot()).unwrap();
    let entries = wait(read.entries(account, 0, 100)).unwrap();
    let used = wait(read.account(account)).unwrap().unwrap().used;
    for month in [NOVEMBER, DECEMBER] {
        let number = period.number_at(month);
        let own = entries.iter().filter(|entry| period.number_at(entry.at) == number);
        let charged = own.filter(|entry| entry.settlement().is_some());
        let units: Vec<u64> = charged.map(|entry| entry.amount.total().get()).collect();
        assert_eq!((units, used.current(period, month).spent.units.get()), (vec![37], 37));
    }
    assert_sound(&backend);
}

fn only_reservations_of_the_dead_are_foreign<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    let foreign = |backend: &B, boot| {
        backend.transact(0, &[], NOW, |txn| Ok(txn.foreign_reservations(boot, 10)?)).unwrap()
    };
    assert_eq!(foreign(&backend, boot), []);
    drop(backend);
    let (backend, next) = (open(), BootId::generate());
    backend.claim(next).unwrap();
    assert_eq!(foreign(&backend, next).iter().map(|open| open.key).collect::<Vec<_>>(), [key(1)]);
    commit(&backend, NOW, vec![Command::Recover { boot: next, limit: 10, crash_block_ms: 1 }]);
    assert_eq!(foreign(&backend, next), []);
    assert_eq!(state(&backend, 1), AttemptState::Failed);
    assert_sound(&backend);
}

fn a_backend_that_was_not_closed_says_so<B: Backend>(open: &dyn Fn() -> B) {
    for (clean, left_open) in [(false, true), (true, false)] {
        let (backend, boot) = (open(), BootId::generate());
        backend.claim(boot).unwrap();
        backend.close(boot, clean).unwrap();
        drop(backend);
        assert_eq!(open().was_left_open().unwrap(), left_open);
    }
}

fn a_seal_stays_until_it_is_removed<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, boot) = with_one_reservation(open);
    assert_eq!(backend.seal().unwrap(), None);
    let heads =
        audit::everything(&*backend.audit_source().unwrap(), &audit::unpaced).unwrap().heads;
    let seal = Seal { heads, fully_audited_at: NOW };
    backend.set_seal(Some(&seal)).unwrap();
    backend.close(boot, false).unwrap();
    drop(backend);
    let backend = open();
    assert_eq!(backend.seal().unwrap(), Some(seal));
    backend.set_seal(None).unwrap();
    assert_eq!(backend.seal().unwrap(), None);
}

fn reopening_keeps_everything_or_stays_closed<B: Backend>(open: &dyn Fn() -> B) {
    let (backend, _) = with_one_reservation(open);
    assert!(backend.can_reopen());
    let refused = backend.reopen(|_| Err(StoreError::Unavailable("refused on purpose".into())));
    assert!(refused.is_err());
    assert!(matches!(wait(backend.snapshot()), Err(StoreError::Unavailable(_))));
    assert!(transact(&backend, NOW, &[settle(1, 1, 4).into()]).is_err());
    backend
        .reopen(|source| {
            assert_eq!(
                audit::everything(source, &audit::unpaced).unwrap().violations,
                Vec::<String>::new()
            );
            Ok(())
        })
        .unwrap();
    assert_eq!(state(&backend, 1), AttemptState::Queued);
    commit(&backend, NOW, vec![settle(1, 1, 4)]);
    assert_sound(&backend);
}
