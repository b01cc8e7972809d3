//! The keys of rows: those that a command needs, and their form as parameters and columns.

use cresset_base::{AccountId, ApplicationId, CredentialId, RequestId};
use cresset_ledger::{BudgetOwner, Command, RequestKey};
use cresset_store::WriteAction;
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
    /// Those of them that are left out while another transaction has them.
    pub optional: BTreeSet<AccountId>,
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
    /// The keys of these actions, as far as they are known before anything was read. A batch with
    /// one account waits for it.
    pub(super) fn of(actions: &[&WriteAction]) -> Self {
        let mut keys = Self::default();
        for action in actions {
            keys.add(&action.command);
        }
        if keys.accounts.len() > 1 {
            keys.optional.clone_from(&keys.accounts);
            for action in actions.iter().filter(|action| action.was_put_off) {
                action.command.account().map(|account| keys.optional.remove(&account));
            }
        }
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
                self.accounts.extend(other.account());
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

/// The request key in three columns of a row, the first of which is `column`.
pub(super) fn request_at(row: &Row, column: usize) -> RequestKey {
    let application: Uuid = row.get(column + 2);
    RequestKey {
        account: AccountId(row.get(column)),
        application: (!application.is_nil()).then_some(ApplicationId(application)),
        request: RequestId(row.get(column + 1)),
    }
}
