//! `cresset requests`: the requests of clients and their outcomes.

use super::support::context::Context;
use super::support::output::CommandResult;
use super::support::text;
use crate::ids::{AccountId, ApplicationId, RequestId};
use crate::ledger::AttemptState;
use crate::server::operator::{AdminCommand, RequestScope};
use clap::{Args, Subcommand, ValueEnum};

const COLUMNS: &[&str] = &[
    "id",
    "state",
    "failure_code",
    "model",
    "attempt_count",
    "reservedUnits",
    "chargedUnits",
    "created_at",
];

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset requests list --account ID --state running
  cresset requests cancel ID")]
pub enum RequestsCommand {
    /// List an account's requests, newest last
    List {
        /// The account
        #[arg(long, value_name = "ID")]
        account: AccountId,
        /// Only those in this state
        #[arg(long)]
        state: Option<StateName>,
    },
    /// Show one request with all its attempts
    Show {
        /// The request: what its client sent as Idempotency-Key
        id: RequestId,
        #[command(flatten)]
        scope: ScopeArguments,
    },
    /// Stop a queued or running request; a finished one is left as it is
    Cancel {
        /// The request: what its client sent as Idempotency-Key
        id: RequestId,
        #[command(flatten)]
        scope: ScopeArguments,
    },
}

/// Narrows an id down that more than one account or application used.
#[derive(Args, Clone, Copy, Debug)]
pub struct ScopeArguments {
    /// The account the request belongs to, where several used the id
    #[arg(long, value_name = "ID")]
    account: Option<AccountId>,
    /// The application the request belongs to, where several used the id
    #[arg(long, value_name = "ID")]
    application: Option<ApplicationId>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum StateName {
    Queued,
    Running,
    Completed,
    Cancelled,
    Failed,
}

pub(super) async fn run(context: &Context, command: RequestsCommand) -> CommandResult {
    let render = match command {
        RequestsCommand::List { .. } => |list: &_| text::table(list, COLUMNS),
        _ => |request: &_| text::fields(request),
    };
    let document = context.admin(command.into()).await?;
    context.output.result(&document, render)
}

impl From<RequestsCommand> for AdminCommand {
    fn from(command: RequestsCommand) -> Self {
        match command {
            RequestsCommand::List { account, state } => {
                Self::RequestList { account, state: state.map(AttemptState::from) }
            }
            RequestsCommand::Show { id, scope } => {
                Self::RequestShow { request: id, scope: scope.into() }
            }
            RequestsCommand::Cancel { id, scope } => {
                Self::RequestCancel { request: id, scope: scope.into() }
            }
        }
    }
}

impl From<ScopeArguments> for RequestScope {
    fn from(ScopeArguments { account, application }: ScopeArguments) -> Self {
        Self { account, application }
    }
}

impl From<StateName> for AttemptState {
    fn from(name: StateName) -> Self {
        match name {
            StateName::Queued => Self::Queued,
            StateName::Running => Self::Running,
            StateName::Completed => Self::Completed,
            StateName::Cancelled => Self::Cancelled,
            StateName::Failed => Self::Failed,
        }
    }
}
