//! Shared by the tests of every backend: the commands that they send, and the promises that
//! `contract` checks. A backend's own tests lie beside it.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::wildcard_imports,
    reason = "tests start threads, share helpers, and have failed where they cannot go on"
)]

pub mod contract;
pub mod load;
pub mod random_commands;
pub mod stepped;

use crate::StoreError;
use crate::stored_body::{StoredBody, StoredContent};
use cresset_base::UnixMillis;
pub use cresset_base::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId,
};
use cresset_ledger::AdmissionRate;
pub use cresset_ledger::{
    AccountChange, Admit, Bucket, BucketAmounts, BudgetOwner, BudgetPeriod, Budgets, CalendarUse,
    Command, Credential, CredentialKind, FailureCode, FinishReason, Microcredits, Outcome, Prices,
    Refusal, ReleaseCause, RequestKey, SettleEnd, SpendingLimit, TokenQuotas, Usage,
};
use uuid::Uuid;

/// Account 1 with a key and `balance` premium units.
pub fn opening(balance: u64) -> Vec<Command> {
    let account = AccountId(id(1));
    vec![
        Command::CreateAccount {
            id: account,
            name: "one".into(),
            plan: "basic".into(),
            opening: BucketAmounts::ZERO,
        },
        issue(1, 1, None),
        Command::Grant {
            account,
            bucket: Bucket::Premium,
            units: Microcredits::new(balance).unwrap(),
            reference: "opening".into(),
        },
    ]
}

pub fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

pub fn key(request: u128) -> RequestKey {
    RequestKey { account: AccountId(id(1)), application: None, request: RequestId(id(request)) }
}

pub fn issue(credential: u128, account: u128, application: Option<u128>) -> Command {
    let mut digest = [0; 32];
    digest[..16].copy_from_slice(&credential.to_be_bytes());
    let kind = match application {
        Some(_) => CredentialKind::AccessToken,
        None => CredentialKind::ApiKey,
    };
    let credential = Credential {
        id: CredentialId(id(credential)),
        kind,
        account: AccountId(id(account)),
        application: application.map(|application| ApplicationId(id(application))),
        label: Some("label".into()),
        digest,
        hint: "hint".into(),
        created_at: UnixMillis(0),
        expires_at: None,
        revoked_at: None,
        budgets: Budgets::default(),
        used: CalendarUse::default(),
    };
    Command::IssueCredential { credential }
}

/// An admission of account 1 that reserves `cost` units.
pub fn admit(request: u128, attempt: u128, boot: BootId, cost: u32) -> Command {
    let mut fingerprint = [0; 32];
    fingerprint[..16].copy_from_slice(&request.to_be_bytes());
    Command::Admit(Box::new(Admit {
        key: key(request),
        credential: CredentialId(id(1)),
        attempt: AttemptId(id(attempt)),
        boot,
        fingerprint,
        session: SessionId(id(1)),
        model: ModelId(id(1)),
        stream: true,
        prompt_tokens: 0,
        max_output_tokens: cost,
        prices: Prices { revision: 1, input: 1_000_000, cached_input: 500_000, output: 1_000_000 },
        max_concurrent: 1_000,
        quotas: TokenQuotas::default(),
        rate: AdmissionRate::default(),
        retention_ms: u64::MAX,
        crash_block_ms: u64::MAX,
    }))
}

pub fn is_admitted(outcome: &Result<Outcome, StoreError>) -> bool {
    matches!(outcome, Ok(Outcome::Admitted(_)))
}

/// An answer as it is stored until `expires_at`.
pub fn body_of(answer: bytes::Bytes, expires_at: u64) -> StoredBody {
    let content = StoredContent::of(answer);
    StoredBody { expires_at: UnixMillis(expires_at), content, receipt: None }
}

pub fn start(request: u128, attempt: u128) -> Command {
    Command::Start { key: key(request), attempt: AttemptId(id(attempt)) }
}

pub fn settle(request: u128, attempt: u128, charge: u32) -> Command {
    let usage = Usage { completion_tokens: charge, ..Usage::default() };
    Command::Settle {
        key: key(request),
        attempt: AttemptId(id(attempt)),
        usage,
        end: SettleEnd::Completed(FinishReason::Stop),
    }
}

pub fn release(request: u128, attempt: u128) -> Command {
    Command::Release {
        key: key(request),
        attempt: AttemptId(id(attempt)),
        cause: ReleaseCause::Failed(FailureCode::GenerationFailed),
    }
}
