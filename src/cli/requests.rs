//! `cresset requests`: the requests of clients and their outcomes.

use super::support::context::Context;
use super::support::output::CommandResult;
use super::support::values::AccountArgument;
use super::support::{listing, text, values};
use clap::{Args, Subcommand};
use cresset_base::{ApplicationId, RequestId, UnixMillis};
use cresset_commands::{AdminCommand, RequestScope};
use cresset_ledger::AttemptState;

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

const STATES: &[&str] = &["queued", "running", "completed", "cancelled", "failed"];

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset requests list --account acme --state running
  cresset requests list --account acme --since 2026-11-24
  cresset requests cancel ID
  cresset requests unblock ID                  its input was running in two crashes of the node")]
pub(super) enum RequestsCommand {
    /// List an account's requests, newest last
    List {
        /// The account, by id or name
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: AccountArgument,
        /// Only those in this state
        #[arg(long, value_parser = values::named::<AttemptState>(STATES))]
        state: Option<AttemptState>,
        /// Only those from this day or month (UTC) on
        #[arg(long, value_name = "DATE", value_parser = values::date)]
        since: Option<UnixMillis>,
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
    /// Let a request's input run again that is refused because it was running in two crashes
    Unblock {
        /// A request with that input: what its client sent as Idempotency-Key
        id: RequestId,
        #[command(flatten)]
        scope: ScopeArguments,
    },
}

/// Narrows an id down that more than one account or application used.
#[derive(Args, Clone, Debug)]
pub(super) struct ScopeArguments {
    /// The account the request belongs to, by id or name, where several used the id
    #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
    account: Option<AccountArgument>,
    /// The application the request belongs to, where several used the id
    #[arg(long, value_name = "ID")]
    application: Option<ApplicationId>,
}

pub(super) async fn run(context: &Context, command: RequestsCommand) -> CommandResult {
    use RequestsCommand as C;
    let command = match command {
        C::List { account, state, since } => {
            let account = context.account(account).await?;
            let page = |after: Option<u64>| {
                let after = after.unwrap_or_default();
                AdminCommand::RequestList { account, state, after, since }
            };
            return listing::show(context, COLUMNS, page).await;
        }
        C::Show { id, scope } => {
            AdminCommand::RequestShow { request: id, scope: scope.resolved(context).await? }
        }
        C::Cancel { id, scope } => {
            AdminCommand::RequestCancel { request: id, scope: scope.resolved(context).await? }
        }
        C::Unblock { id, scope } => {
            AdminCommand::RequestUnblock { request: id, scope: scope.resolved(context).await? }
        }
    };
    context.show(command, text::fields).await
}

impl ScopeArguments {
    async fn resolved(self, context: &Context) -> CommandResult<RequestScope> {
        let account = match self.account {
            Some(account) => Some(context.account(account).await?),
            None => None,
        };
        Ok(RequestScope { account, application: self.application })
    }
}
