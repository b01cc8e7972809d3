//! Money and request state as pure data: commands are applied to a `LedgerState`, one after
//! another. This module has no clock, no IO and no randomness; the store decides where the state is
//! kept and when it is durable.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod admission;
mod admission_rate;
mod amounts;
pub mod apply;
pub mod audit;
mod budget_rules;
mod budgets;
mod commands;
mod error;
pub mod invariants;
pub mod journal;
mod receipt_facts;
mod records;
mod resolution;
mod schemas;
pub mod secret;
mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

pub use admission::Seen;
pub use admission_rate::AdmissionRate;
pub use amounts::{BucketAmounts, Microcredits, Prices, Usage};
pub use budgets::{
    BudgetAlert, BudgetOwner, BudgetPeriod, Budgets, CalendarUse, Consumption, LimitKind,
    LimitReached, PeriodUse, PeriodUses, SpendingLimit, TokenQuotas,
};
pub use commands::{AccountChange, Admit, Command, Outcome, Refusal, ReleaseCause, SettleEnd};
pub use receipt_facts::{
    AskedGeneration, ReceiptFacts, ReceiptProof, SamplingValue, Sha256Bytes, TokenDigest,
};
pub use records::{
    Account, AccountStatus, Application, Attempt, AttemptState, Balance, Balances, Bucket,
    Credential, CredentialKind, EntryKind, FailureCode, FinishReason, JournalEntry, RequestKey,
    RequestRecord,
};
pub use state::{
    Adjustment, Crashes, JournalHead, LedgerState, Reservation, StateError, StateResult,
};
