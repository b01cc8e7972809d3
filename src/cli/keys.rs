//! `cresset keys`: an account's API keys.

use super::accounts::{BudgetArguments, with_spending};
use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::values::AccountArgument;
use super::support::{listing, text, values};
use clap::Subcommand;
use cresset_base::CredentialId;
use cresset_commands::AdminCommand;
use std::time::Duration;

const COLUMNS: &[&str] = &[
    "id",
    "label",
    "hint",
    "created_at",
    "last_used_on",
    "budget_use",
    "expires_at",
    "revoked_at",
];

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset keys create --account acme --label laptop --expires-in 30d
  cresset keys budget ID --period day --units 2_000_000 --alert-percent 80")]
pub(super) enum KeysCommand {
    /// Create a key; its secret is shown this once
    Create {
        /// The account, by id or name
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: AccountArgument,
        /// A note that tells the key from others, such as the device it is for
        #[arg(long, allow_hyphen_values = true, value_parser = values::label)]
        label: Option<String>,
        /// Time until the key stops working, such as 30d [default: never]
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        expires_in: Option<Duration>,
    },
    /// List an account's keys, without their secrets, with the day (UTC) of their last request
    List {
        /// The account, by id or name
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: AccountArgument,
    },
    /// Make a key in place of another, which goes on working for a while
    Rotate {
        /// The key to replace, by the id that `keys list` shows
        id: CredentialId,
        /// Time for which the old key still works, such as 1h
        #[arg(long, value_name = "TIME", default_value = "24h", value_parser = values::duration)]
        grace: Duration,
        /// Time until the new key stops working, such as 30d [default: never]
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        expires_in: Option<Duration>,
    },
    /// Limit what may be spent with a key in each day or month (UTC). A key that replaces it later
    /// has the same budgets, of which nothing is spent
    Budget {
        /// The key, by the id that `keys list` shows
        id: CredentialId,
        #[command(flatten)]
        limit: BudgetArguments,
    },
    /// Refuse a key from now on and cancel what runs under it
    Revoke {
        /// The key, by the id that `keys list` shows
        id: CredentialId,
    },
}

pub(super) async fn run(context: &Context, command: KeysCommand) -> CommandResult {
    use KeysCommand as C;
    let (command, render): (_, Render) = match command {
        C::Create { account, label, expires_in } => {
            let expires_at = expires_in.map(values::from_now);
            let account = context.account(account).await?;
            (AdminCommand::KeyCreate { account, label, expires_at }, text::secret)
        }
        C::List { account } => {
            let account = context.account(account).await?;
            let page = |after| AdminCommand::KeyList { account, after };
            return listing::show(context, COLUMNS, page).await;
        }
        C::Rotate { id, grace, expires_in } => {
            let (old_until, expires_at) =
                (values::from_now(grace), expires_in.map(values::from_now));
            (AdminCommand::KeyRotate { id, old_until, expires_at }, text::secret)
        }
        C::Budget { id, limit } => (limit.of_key(id), with_spending),
        C::Revoke { id } => (AdminCommand::KeyRevoke { id }, text::fields),
    };
    context.show(command, render).await
}
