//! Operator commands as data, so that the command line can run them on a store or send them to a
//! running node.

use super::jobs::ModelJob;
use super::roles::Role;
use cresset_base::clock::UnixMillis;
use cresset_base::ids::{AccountId, ApplicationId, CredentialId, RequestId};
use cresset_ledger::{AttemptState, Bucket, BudgetPeriod, Refusal};
use cresset_request::documents::receipt::ReceiptStatement;
use cresset_store::{NodeFile, StoreError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Amounts are microcredits, times are milliseconds since the Unix epoch, paths are absolute. A
/// list is answered with one page; `after` is the `next_after` of the page before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum AdminCommand {
    /// A repeat with the same reference is the same account.
    AccountCreate {
        name: String,
        plan: Option<String>,
        trial: u64,
        premium: u64,
        reference: Option<String>,
    },
    /// With `matching`, those whose name contains this text, whatever its case.
    AccountList {
        after: Option<AccountId>,
        matching: Option<String>,
    },
    /// The only account with this name.
    AccountFind {
        name: String,
    },
    AccountShow {
        id: AccountId,
    },
    AccountChange {
        id: AccountId,
        name: Option<String>,
        plan: Option<String>,
        /// An empty one removes the one there is.
        note: Option<String>,
        stores_answers: Option<bool>,
    },
    /// Limits what the account may spend in each day or month; without `units` the limit ends.
    AccountBudget {
        id: AccountId,
        period: BudgetPeriod,
        units: Option<u64>,
        /// The percentage of the budget at which operators are told.
        alert_percent: Option<u8>,
    },
    /// Erases stored answers: all, or those of one request.
    AccountEraseAnswers {
        id: AccountId,
        request: Option<RequestId>,
    },
    AccountSuspend {
        id: AccountId,
    },
    AccountResume {
        id: AccountId,
    },
    /// Suspends the account, revokes its credentials and takes its credits back.
    AccountClose {
        id: AccountId,
        keep_credits: bool,
        #[serde(default)]
        erase_answers: bool,
    },
    KeyCreate {
        account: AccountId,
        label: Option<String>,
        expires_at: Option<UnixMillis>,
    },
    /// Makes another key of the same account and label. The old one ends at `old_until`, if not
    /// earlier.
    KeyRotate {
        id: CredentialId,
        old_until: UnixMillis,
        expires_at: Option<UnixMillis>,
    },
    KeyList {
        account: AccountId,
        after: Option<CredentialId>,
    },
    KeyRevoke {
        id: CredentialId,
    },
    /// As `AccountBudget`, for what is spent with one key.
    KeyBudget {
        id: CredentialId,
        period: BudgetPeriod,
        units: Option<u64>,
        alert_percent: Option<u8>,
    },
    ApplicationCreate {
        account: AccountId,
        name: String,
    },
    ApplicationList {
        account: Option<AccountId>,
        after: Option<ApplicationId>,
    },
    NodeList,
    ApplicationToken {
        application: ApplicationId,
        expires_at: Option<UnixMillis>,
    },
    TokenRevoke {
        id: CredentialId,
    },
    CreditGrant {
        account: AccountId,
        bucket: Bucket,
        units: u64,
        reference: String,
    },
    CreditDebit {
        account: AccountId,
        bucket: Bucket,
        units: u64,
        reference: String,
    },
    CreditShow {
        account: AccountId,
    },
    /// The entries of a period: from `from` on, before `until`.
    CreditStatement {
        account: AccountId,
        after: u64,
        limit: usize,
        from: Option<UnixMillis>,
        until: Option<UnixMillis>,
    },
    RequestList {
        account: AccountId,
        state: Option<AttemptState>,
        after: u64,
        /// Only those that came at this time or later.
        #[serde(default)]
        since: Option<UnixMillis>,
    },
    RequestShow {
        request: RequestId,
        scope: RequestScope,
    },
    RequestCancel {
        request: RequestId,
        scope: RequestScope,
    },
    RequestUnblock {
        request: RequestId,
        scope: RequestScope,
    },
    /// The answer names what the ledger has otherwise.
    ReceiptCheck {
        receipt: Box<ReceiptStatement>,
    },
    /// The answer tells what the node took over, and what it serves now.
    Reload,
    LedgerAudit,
    LedgerBackup {
        to: PathBuf,
    },
    /// The ledger with its answers, and these files.
    Backup {
        to: PathBuf,
        files: Vec<NodeFile>,
    },
    Status,
    /// Makes a token with which commands come from other machines.
    OperatorTokenCreate {
        name: String,
        roles: BTreeSet<Role>,
        expires_at: Option<UnixMillis>,
    },
    OperatorTokenList,
    OperatorTokenRevoke {
        name: String,
    },
    /// Has another program take the place of the running node.
    Upgrade {
        program: PathBuf,
    },
    /// A one-time address of the page, for five minutes.
    OperatorLink {
        roles: BTreeSet<Role>,
    },
    /// Loads a model, by name or id. The answer comes before it is loaded.
    ModelLoad {
        name: String,
    },
    /// Unloads a model that has no requests.
    ModelUnload {
        name: String,
    },
    /// Sets those prices of a release that are given, microcredits a million tokens.
    ModelPrice {
        name: String,
        input: Option<u64>,
        cached_input: Option<u64>,
        output: Option<u64>,
    },
    /// The prices that a release has had, oldest first.
    ModelPriceHistory {
        name: String,
    },
    ModelJobStart {
        job: ModelJob,
    },
    ModelJobStop {
        number: u64,
    },
    ModelJobList,
    /// The latest acts of operators, oldest first.
    OperatorActs {
        limit: usize,
    },
}

/// Narrows a request id down if several accounts or applications used it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RequestScope {
    pub account: Option<AccountId>,
    pub application: Option<ApplicationId>,
}

/// Why a command failed; the text says what to do about it. It is sent over the operator socket as
/// it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", content = "message", rename_all = "snake_case")]
pub enum AdminError {
    #[error("{0}")]
    NotFound(String),
    /// The command contradicts what is stored; nothing was written.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Unavailable(String),
    /// The node takes commands once it has started.
    #[error("{0}")]
    Starting(String),
    /// No valid token came with the command.
    #[error("{0}")]
    Unauthorized(String),
    /// Whoever gives the command may not.
    #[error("{0}")]
    Forbidden(String),
}

impl From<StoreError> for AdminError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Refused(refusal) => refusal.into(),
            StoreError::Unavailable(_)
            | StoreError::Overloaded
            | StoreError::Unusable(_)
            | StoreError::InUse(_) => Self::Unavailable(error.to_string()),
        }
    }
}

impl From<Refusal> for AdminError {
    fn from(refusal: Refusal) -> Self {
        let hint = match refusal {
            Refusal::AccountNotFound => "`cresset accounts list` shows those there are",
            Refusal::ApplicationNotFound => "`cresset applications list` shows those there are",
            Refusal::CredentialNotFound => "`cresset keys list --account ID` shows those there are",
            Refusal::RequestNotFound => {
                "`cresset requests list --account ID` shows those there are"
            }
            Refusal::ReferenceReused => {
                "each grant or debit has a reference of its own: choose another --reference"
            }
            Refusal::DebitTooLarge { .. } => "take less, or wait until running requests have ended",
            Refusal::AmountOverflow => "grant a smaller amount",
            _ => return Self::Refused(refusal.to_string()),
        };
        let text = format!("{refusal}: {hint}");
        match refusal {
            Refusal::ReferenceReused | Refusal::DebitTooLarge { .. } | Refusal::AmountOverflow => {
                Self::Refused(text)
            }
            _ => Self::NotFound(text),
        }
    }
}
