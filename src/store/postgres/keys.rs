//! The keys of rows: those that a command needs, and their form as parameters and columns.

use crate::ids::{AccountId, ApplicationId, CredentialId, RequestId};
use crate::ledger::{BudgetOwner, Command, RequestKey};
use std::collections::BTreeSet;
use tokio_postgres::Row;
use uuid::Uuid;

/// An input of an account, by its fingerprint.
pub(super) type InputKey = (AccountId, [u8; 32]);

/// The keys of rows that a transaction needs. With a request come its reservation, its last
/// credential and the crashes of its input.
#[derive(Clone, Default)]
pub(super) struct Keys {
    /// Accounts to lock.
    pub accounts: BTreeSet<AccountId>,
    /// Credentials whose accounts are to be locked.
    pub owners: BTreeSet<CredentialId>,
    pub credentials: BTreeSet<CredentialId>,
    pub digests: BTreeSet<[u8; 32]>,
    pub applications: BTreeSet<ApplicationId>,
    pub grants: BTreeSet<(AccountId, String)>,
    pub requests: BTreeSet<RequestKey>,
    pub inputs: BTreeSet<InputKey>,
}

impl Keys {
    /// The keys of these commands, as far as they are known before anything was read.
    pub(super) fn of<'a>(commands: impl Iterator<Item = &'a Command>) -> Self {
        let mut keys = Self::default();
        commands.for_each(|command| keys.add(command));
        keys
    }

    fn add(&mut self, command: &Command) {
        match command {
            Command::Admit(admit) => {
                self.add_request(admit.key);
                self.credentials.insert(admit.credential);
                self.inputs.insert((admit.key.account, admit.fingerprint));
            }
            Command::Start { key, .. }
            | Command::Settle { key, .. }
            | Command::Release { key, .. }
            | Command::RequestCancel { key } => self.add_request(*key),
            Command::IssueCredential { credential } => {
                self.accounts.insert(credential.account);
                self.credentials.insert(credential.id);
                self.digests.insert(credential.digest);
                self.applications.extend(credential.application);
            }
            Command::CreateApplication { id, account, .. } => {
                self.accounts.insert(*account);
                self.applications.insert(*id);
            }
            Command::Grant { account, reference, .. }
            | Command::Debit { account, reference, .. } => {
                self.accounts.insert(*account);
                self.grants.insert((*account, reference.clone()));
            }
            Command::ForgetCrashes { account, fingerprint }
            | Command::TakeBackCrash { account, fingerprint, .. } => {
                self.accounts.insert(*account);
                self.inputs.insert((*account, *fingerprint));
            }
            other => {
                self.accounts.extend(account_named(other));
                if let Some(id) = credential_named(other) {
                    self.add_owner(id);
                }
            }
        }
    }

    /// A credential whose account is not known.
    pub(super) fn add_owner(&mut self, id: CredentialId) {
        self.owners.insert(id);
        self.credentials.insert(id);
    }

    pub(super) fn add_request(&mut self, key: RequestKey) {
        self.accounts.insert(key.account);
        self.requests.insert(key);
    }
}

/// The account that a command names.
pub(super) fn account_named(command: &Command) -> Option<AccountId> {
    match command {
        Command::Admit(admit) => Some(admit.key.account),
        Command::Start { key, .. }
        | Command::Settle { key, .. }
        | Command::Release { key, .. }
        | Command::RequestCancel { key } => Some(key.account),
        Command::CreateAccount { id, .. }
        | Command::ChangeAccount { id, .. }
        | Command::SetAccountStatus { id, .. }
        | Command::SetBudget { owner: BudgetOwner::Account(id), .. } => Some(*id),
        Command::CreateApplication { account, .. }
        | Command::Grant { account, .. }
        | Command::Debit { account, .. }
        | Command::TakeBackCrash { account, .. }
        | Command::ForgetCrashes { account, .. } => Some(*account),
        Command::IssueCredential { credential } => Some(credential.account),
        Command::SetBudget { owner: BudgetOwner::Key(_), .. }
        | Command::RevokeCredential { .. }
        | Command::ExpireCredential { .. }
        | Command::Recover { .. } => None,
    }
}

/// The credential that a command names in place of an account.
pub(super) fn credential_named(command: &Command) -> Option<CredentialId> {
    match command {
        Command::SetBudget { owner: BudgetOwner::Key(id), .. }
        | Command::RevokeCredential { id }
        | Command::ExpireCredential { id, .. } => Some(*id),
        _ => None,
    }
}

/// Request keys as three columns.
#[derive(Clone, Default)]
pub(super) struct RequestColumns {
    pub accounts: Vec<Uuid>,
    pub requests: Vec<Uuid>,
    pub applications: Vec<Uuid>,
}

impl<'a> FromIterator<&'a RequestKey> for RequestColumns {
    fn from_iter<I: IntoIterator<Item = &'a RequestKey>>(keys: I) -> Self {
        let mut columns = Self::default();
        for key in keys {
            columns.accounts.push(key.account.0);
            columns.requests.push(key.request.0);
            columns.applications.push(application_column(key.application));
        }
        columns
    }
}

/// The scope of a request as a column of a primary key, which cannot be null: the nil UUID, which
/// is no application's, for requests made with an account's own key.
pub(super) fn application_column(application: Option<ApplicationId>) -> Uuid {
    application.map_or(Uuid::nil(), |id| id.0)
}

/// The request key in the first three columns of a row.
pub(super) fn request_of(row: &Row) -> RequestKey {
    let application: Uuid = row.get(2);
    RequestKey {
        account: AccountId(row.get(0)),
        application: (!application.is_nil()).then_some(ApplicationId(application)),
        request: RequestId(row.get(1)),
    }
}
