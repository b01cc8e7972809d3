//! The rules: they apply one command to the current state. They read and check everything before
//! their first write, so a refused command has written nothing and does not disturb others in its
//! transaction.

use super::amounts::{BucketAmounts, Microcredits};
use super::commands::{AccountChange, Command, Outcome, Refusal};
pub use super::error::ApplyError;
use super::error::ApplyResult;
use super::records::{
    Account, AccountStatus, Application, Balances, Bucket, Credential, CredentialKind, EntryKind,
    RequestKey,
};
use super::state::{Adjustment, LedgerState};
use super::{admission, budget_rules, invariants, journal, resolution};
use cresset_base::{AccountId, CredentialId, UnixMillis};

/// Applies `command` at `now`, which is never before any time already stored.
///
/// Every command may be sent again: a repeat finds its own rows by id and changes nothing.
pub fn apply(state: &mut impl LedgerState, command: &Command, now: UnixMillis) -> ApplyResult {
    match command {
        Command::CreateAccount { id, name, plan, opening } => {
            create_account(state, *id, name, plan, *opening, now)
        }
        Command::ChangeAccount { id, change } => change_account(state, *id, change.clone()),
        Command::SetBudget { owner, period, limit } => {
            budget_rules::set(state, *owner, *period, *limit)
        }
        Command::SetAccountStatus { id, status } => set_account_status(state, *id, *status),
        Command::CreateApplication { id, account, name } => {
            let application =
                Application { id: *id, account: *account, name: name.clone(), created_at: now };
            create_application(state, &application)
        }
        Command::IssueCredential { credential } => issue_credential(state, credential, now),
        Command::RevokeCredential { id } => revoke_credential(state, *id, now),
        Command::ExpireCredential { id, at } => expire_credential(state, *id, *at),
        Command::Grant { account, bucket, units, reference } => {
            adjust(state, *account, Adjustment::grant(*bucket, *units), reference, now)
        }
        Command::Debit { account, bucket, units, reference } => {
            let debit = Adjustment { bucket: *bucket, units: *units, is_debit: true };
            adjust(state, *account, debit, reference, now)
        }
        Command::Admit(admit) => admission::admit(state, admit, now),
        Command::Start { key, attempt } => resolution::start(state, key, *attempt, now),
        Command::Settle { key, attempt, usage, end } => {
            resolution::settle(state, key, *attempt, *usage, *end, now)
        }
        Command::Release { key, attempt, cause } => {
            resolution::release(state, key, *attempt, *cause, now)
        }
        Command::RequestCancel { key } => request_cancel(state, key),
        Command::Recover { boot, limit, crash_block_ms } => {
            resolution::recover(state, *boot, *limit, *crash_block_ms, now)
        }
        Command::TakeBackCrash { account, fingerprint, boot } => {
            resolution::take_back_crash(state, *account, fingerprint, *boot)
        }
        Command::ForgetCrashes { account, fingerprint } => {
            resolution::forget_crashes(state, *account, fingerprint)
        }
    }
}

fn create_account(
    state: &mut impl LedgerState,
    id: AccountId,
    name: &str,
    plan: &str,
    opening: BucketAmounts,
    now: UnixMillis,
) -> ApplyResult {
    let grants = [
        ("opening trial balance", Adjustment::grant(Bucket::Trial, opening.trial)),
        ("opening premium balance", Adjustment::grant(Bucket::Premium, opening.premium)),
    ];
    let grants = grants.map(|(reference, granted)| {
        (reference, Some(granted).filter(|granted| granted.units > Microcredits::ZERO))
    });
    if let Some(account) = state.account(id)? {
        let mut same = account.name == name && account.plan == plan;
        for (reference, granted) in grants {
            same &= state.adjustment(id, reference)? == granted;
        }
        return repeat_or_taken(same);
    }
    Balances::default().credit(opening).ok_or(Refusal::AmountOverflow)?;
    state.put_account(&Account::new(id, name.to_owned(), plan.to_owned(), now))?;
    for (reference, granted) in grants {
        if let Some(granted) = granted {
            adjust(state, id, granted, reference, now)?;
        }
    }
    Ok(Outcome::Done)
}

fn change_account(
    state: &mut impl LedgerState,
    id: AccountId,
    change: AccountChange,
) -> ApplyResult {
    let before = account(state, id)?;
    let note = change.note.or(before.note).filter(|note| !note.is_empty());
    state.put_account(&Account {
        name: change.name.unwrap_or(before.name),
        plan: change.plan.unwrap_or(before.plan),
        note,
        stores_answers: change.stores_answers.unwrap_or(before.stores_answers),
        ..before
    })?;
    Ok(Outcome::Done)
}

fn set_account_status(
    state: &mut impl LedgerState,
    id: AccountId,
    status: AccountStatus,
) -> ApplyResult {
    let account = account(state, id)?;
    if account.status != status {
        state.put_account(&Account { status, ..account })?;
    }
    Ok(Outcome::Done)
}

fn create_application(state: &mut impl LedgerState, application: &Application) -> ApplyResult {
    account(state, application.account)?;
    if let Some(known) = state.application(application.id)? {
        return repeat_or_taken(
            known.account == application.account && known.name == application.name,
        );
    }
    state.put_application(application)?;
    Ok(Outcome::Done)
}

fn issue_credential(
    state: &mut impl LedgerState,
    credential: &Credential,
    now: UnixMillis,
) -> ApplyResult {
    account(state, credential.account)?;
    check_scope(state, credential)?;
    if let Some(known) = state.credential(credential.id)? {
        return repeat_or_taken(known.digest == credential.digest);
    }
    if state.credential_by_digest(&credential.digest)?.is_some() {
        return Err(Refusal::IdTaken.into());
    }
    state.put_credential(&Credential { created_at: now, ..credential.clone() })?;
    Ok(Outcome::Done)
}

/// An access token belongs to an application of its own account, an API key to none.
fn check_scope(state: &impl LedgerState, credential: &Credential) -> ApplyResult<()> {
    let belongs = match (credential.kind, credential.application) {
        (CredentialKind::ApiKey, None) => true,
        (CredentialKind::AccessToken, Some(id)) => state
            .application(id)?
            .is_some_and(|application| application.account == credential.account),
        _ => false,
    };
    if belongs { Ok(()) } else { Err(Refusal::ApplicationNotFound.into()) }
}

fn revoke_credential(
    state: &mut impl LedgerState,
    id: CredentialId,
    now: UnixMillis,
) -> ApplyResult {
    let credential = state.credential(id)?.ok_or(Refusal::CredentialNotFound)?;
    if credential.revoked_at.is_none() {
        state.put_credential(&Credential { revoked_at: Some(now), ..credential })?;
    }
    Ok(Outcome::Done)
}

fn expire_credential(
    state: &mut impl LedgerState,
    id: CredentialId,
    at: UnixMillis,
) -> ApplyResult {
    let credential = state.credential(id)?.ok_or(Refusal::CredentialNotFound)?;
    if credential.expires_at.is_none_or(|end| at < end) {
        state.put_credential(&Credential { expires_at: Some(at), ..credential })?;
    }
    Ok(Outcome::Done)
}

fn adjust(
    state: &mut impl LedgerState,
    id: AccountId,
    adjustment: Adjustment,
    reference: &str,
    now: UnixMillis,
) -> ApplyResult {
    account(state, id)?;
    if let Some(known) = state.adjustment(id, reference)? {
        let repeat = known == adjustment;
        return repeat.then_some(Outcome::Repeated).ok_or(Refusal::ReferenceReused.into());
    }
    let before = state.balances(id)?;
    let amount = adjustment.bucket_amounts();
    let after = adjustment.applied_to(&before).ok_or_else(|| adjustment.refusal(&before))?;
    invariants::check_balances(id, &after)?;
    state.put_adjustment(id, reference, adjustment)?;
    let kind = adjustment.entry(reference.to_owned());
    journal::post(state, now, id, kind, amount, after)?;
    Ok(Outcome::Done)
}

fn request_cancel(state: &mut impl LedgerState, key: &RequestKey) -> ApplyResult {
    let mut record = resolution::known(state, key)?;
    if record.latest().state.is_terminal() {
        return Ok(Outcome::AlreadyResolved(record));
    }
    if !record.latest().cancel_requested {
        record.latest_mut().cancel_requested = true;
        state.put_request(&record)?;
    }
    Ok(Outcome::Request(record))
}

fn account(state: &impl LedgerState, id: AccountId) -> ApplyResult<Account> {
    Ok(state.account(id)?.ok_or(Refusal::AccountNotFound)?)
}

fn repeat_or_taken(repeat: bool) -> ApplyResult {
    repeat.then_some(Outcome::Repeated).ok_or(Refusal::IdTaken.into())
}

impl Adjustment {
    fn grant(bucket: Bucket, units: Microcredits) -> Self {
        Self { bucket, units, is_debit: false }
    }

    /// The balances after it. `None`: a grant passes the largest amount, or a debit takes more than
    /// is not reserved.
    pub(super) fn applied_to(&self, before: &Balances) -> Option<Balances> {
        let amount = self.bucket_amounts();
        if !self.is_debit {
            return before.credit(amount);
        }
        before.available().checked_sub(amount)?;
        before.resolve(BucketAmounts::ZERO, amount)
    }

    fn refusal(&self, before: &Balances) -> Refusal {
        let free = before.available();
        let available = match self.bucket {
            Bucket::Trial => free.trial,
            Bucket::Premium => free.premium,
        };
        if self.is_debit {
            Refusal::DebitTooLarge { needed: self.units, available }
        } else {
            Refusal::AmountOverflow
        }
    }

    /// The kind of its entry in the journal.
    pub(super) fn entry(&self, reference: String) -> EntryKind {
        if self.is_debit { EntryKind::Debit { reference } } else { EntryKind::Grant { reference } }
    }

    /// Returns it as an amount over both buckets.
    pub(super) fn bucket_amounts(&self) -> super::BucketAmounts {
        let zero = Microcredits::ZERO;
        let (trial, premium) = match self.bucket {
            Bucket::Trial => (self.units, zero),
            Bucket::Premium => (zero, self.units),
        };
        super::BucketAmounts { trial, premium }
    }
}
