//! The rules: they apply one command to the current state. They read and check everything before
//! their first write, so a refused command has written nothing and does not disturb others in its
//! transaction.

use super::amounts::{BucketAmounts, Microcredits};
use super::commands::{Command, Outcome, Refusal};
use super::invariants::{self, Violation};
use super::records::{
    Account, AccountStatus, Application, Balances, Bucket, Credential, CredentialKind, EntryKind,
    RequestKey,
};
use super::state::{Granted, LedgerState, StateError};
use super::{admission, journal, resolution};
use crate::clock::UnixMillis;
use crate::ids::{AccountId, CredentialId};

/// The reason why a command has no outcome.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The state, or the command, breaks a rule that always holds. Nothing was written and nothing
    /// may be repaired.
    #[error(transparent)]
    Violated(#[from] Violation),
    /// The transaction must be abandoned.
    #[error(transparent)]
    State(#[from] StateError),
}

pub(super) type ApplyResult<T = Outcome> = Result<T, ApplyError>;

/// Applies `command` at `now`, which is never before any time already stored.
///
/// Every command may be sent again: a repeat finds its own rows by id and changes nothing.
pub fn apply(state: &mut impl LedgerState, command: &Command, now: UnixMillis) -> ApplyResult {
    match command {
        Command::CreateAccount { id, name, plan, opening } => {
            create_account(state, *id, name, plan, *opening, now)
        }
        Command::SetAccountStatus { id, status } => set_account_status(state, *id, *status),
        Command::CreateApplication { id, account, name } => {
            let application =
                Application { id: *id, account: *account, name: name.clone(), created_at: now };
            create_application(state, &application)
        }
        Command::IssueCredential { credential } => issue_credential(state, credential, now),
        Command::RevokeCredential { id } => revoke_credential(state, *id, now),
        Command::Grant { account, bucket, units, reference } => {
            let granted = Granted { bucket: *bucket, units: *units };
            grant(state, *account, granted, reference, now)
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
        ("opening trial balance", Granted { bucket: Bucket::Trial, units: opening.trial }),
        ("opening premium balance", Granted { bucket: Bucket::Premium, units: opening.premium }),
    ];
    let grants = grants.map(|(reference, granted)| {
        (reference, Some(granted).filter(|granted| granted.units > Microcredits::ZERO))
    });
    if let Some(account) = state.account(id)? {
        let mut same = account.name == name && account.plan == plan;
        for (reference, granted) in grants {
            same &= state.granted(id, reference)? == granted;
        }
        return repeat_or_taken(same);
    }
    Balances::default().credit(opening).ok_or(Refusal::AmountOverflow)?;
    state.put_account(&Account {
        id,
        name: name.to_owned(),
        plan: plan.to_owned(),
        status: AccountStatus::Active,
        created_at: now,
        in_flight: 0,
    })?;
    for (reference, granted) in grants {
        if let Some(granted) = granted {
            grant(state, id, granted, reference, now)?;
        }
    }
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
    belongs.then_some(()).ok_or(Refusal::ApplicationNotFound.into())
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

fn grant(
    state: &mut impl LedgerState,
    id: AccountId,
    granted: Granted,
    reference: &str,
    now: UnixMillis,
) -> ApplyResult {
    account(state, id)?;
    if let Some(known) = state.granted(id, reference)? {
        let repeat = known == granted;
        return repeat.then_some(Outcome::Repeated).ok_or(Refusal::ReferenceReused.into());
    }
    let before = state.balances(id)?;
    let amount = granted.bucket_amounts();
    let after = before.credit(amount).ok_or(Refusal::AmountOverflow)?;
    invariants::check_balances(id, &after)?;
    state.put_granted(id, reference, granted)?;
    let kind = EntryKind::Grant { reference: reference.to_owned() };
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

impl Granted {
    /// Returns the grant as an amount over both buckets.
    pub(super) fn bucket_amounts(&self) -> super::BucketAmounts {
        let zero = Microcredits::ZERO;
        let (trial, premium) = match self.bucket {
            Bucket::Trial => (self.units, zero),
            Bucket::Premium => (zero, self.units),
        };
        super::BucketAmounts { trial, premium }
    }
}
