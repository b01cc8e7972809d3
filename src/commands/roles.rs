//! Who gives a command, and what each command asks of them.

use super::command::AdminCommand;
use super::error::AdminError;
use super::role::Role;
use std::collections::BTreeSet;

/// What a command asks of who gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Role(Role),
    /// The node's own user, on its machine: the command names files there, or gives rights away.
    NodeUser,
}

/// Who gives a command.
#[derive(Clone, Debug)]
pub struct Actor {
    /// As the log of acts names them.
    pub name: String,
    /// `None` for the node's own user, who may do everything.
    roles: Option<BTreeSet<Role>>,
}

impl Actor {
    /// Whoever may open the data folder.
    pub fn node_user() -> Self {
        Self { name: "the node's user".into(), roles: None }
    }

    pub fn with_roles(name: String, roles: BTreeSet<Role>) -> Self {
        Self { name, roles: Some(roles) }
    }

    pub fn roles(&self) -> BTreeSet<Role> {
        self.roles.clone().unwrap_or_else(|| BTreeSet::from([Role::Operate, Role::Money]))
    }

    pub(super) fn is_node_user(&self) -> bool {
        self.roles.is_none()
    }

    /// Whether the role, or every right, is theirs.
    pub fn has(&self, role: Role) -> bool {
        self.roles.as_ref().is_none_or(|roles| role == Role::Read || roles.contains(&role))
    }

    /// Refuses a command whose role the actor does not have, with the way to it.
    pub fn may(&self, command: &AdminCommand) -> Result<(), AdminError> {
        match command.need() {
            _ if self.roles.is_none() => Ok(()),
            Need::Role(role) if self.has(role) => Ok(()),
            Need::Role(role) => Err(AdminError::Forbidden(format!(
                "this needs the role {}, which {} does not have: `cresset admin token create \
                 --role {}` on the node's machine makes a token that has it",
                role.name(),
                self.name,
                role.name()
            ))),
            Need::NodeUser => Err(AdminError::Forbidden(
                "this command is given on the node's machine alone, by the user that it runs as"
                    .into(),
            )),
        }
    }
}

impl AdminCommand {
    pub(super) fn need(&self) -> Need {
        use AdminCommand as C;
        match self {
            C::AccountList { .. }
            | C::AccountFind { .. }
            | C::AccountShow { .. }
            | C::KeyList { .. }
            | C::ApplicationList { .. }
            | C::NodeList
            | C::CreditShow { .. }
            | C::CreditStatement { .. }
            | C::RequestList { .. }
            | C::RequestShow { .. }
            | C::ReceiptCheck { .. }
            | C::OperatorTokenList
            | C::OperatorActs { .. }
            | C::ModelJobList
            | C::ModelPrice { input: None, cached_input: None, output: None, .. }
            | C::ModelPriceHistory { .. }
            | C::Status => Need::Role(Role::Read),
            C::AccountCreate { trial: 0, premium: 0, .. }
            | C::AccountChange { .. }
            | C::AccountEraseAnswers { .. }
            | C::AccountSuspend { .. }
            | C::AccountResume { .. }
            | C::KeyCreate { .. }
            | C::KeyRotate { .. }
            | C::KeyRevoke { .. }
            | C::ApplicationCreate { .. }
            | C::ApplicationToken { .. }
            | C::TokenRevoke { .. }
            | C::RequestCancel { .. }
            | C::RequestUnblock { .. }
            | C::ModelLoad { .. }
            | C::ModelUnload { .. }
            | C::ModelJobStart { .. }
            | C::ModelJobStop { .. }
            | C::Reload
            | C::LedgerAudit => Need::Role(Role::Operate),
            C::AccountCreate { .. }
            | C::AccountClose { .. }
            | C::AccountBudget { .. }
            | C::KeyBudget { .. }
            | C::CreditGrant { .. }
            | C::CreditDebit { .. }
            | C::ModelPrice { .. } => Need::Role(Role::Money),
            C::LedgerBackup { .. }
            | C::Backup { .. }
            | C::OperatorTokenCreate { .. }
            | C::OperatorTokenRevoke { .. }
            | C::OperatorLink { .. }
            | C::Upgrade { .. } => Need::NodeUser,
        }
    }
}
