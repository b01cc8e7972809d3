//! Operator commands as data, so that the command line can run them on a store or send them to a
//! running node.

use super::jobs::ModelJob;
use super::role::Role;
use cresset_base::{AccountId, ApplicationId, CredentialId, RequestId, UnixMillis};
use cresset_ledger::{AttemptState, Bucket, BudgetPeriod};
use cresset_request::ReceiptStatement;
use cresset_store::NodeFile;
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
