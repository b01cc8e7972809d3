//! `cresset accounts`: the owners of balances, keys and requests.

use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::values::AccountArgument;
use super::support::{listing, text, values};
use crate::server::operator::AdminCommand;
use clap::Subcommand;
use serde_json::Value;

const COLUMNS: &[&str] = &[
    "id",
    "name",
    "plan",
    "status",
    "trialUnits",
    "premiumUnits",
    "reservedUnits",
    "in_flight",
    "created_at",
];

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset accounts create --name acme --trial 5_000_000 --reference order-17
  cresset accounts suspend acme                 by id or, where no other has it, by name")]
pub(super) enum AccountsCommand {
    /// Create an account together with its opening credits, or neither
    Create {
        /// Name of the account's owner
        #[arg(long, value_parser = values::label)]
        name: String,
        /// A plan of the configuration [default: default]
        #[arg(long)]
        plan: Option<String>,
        /// Trial credits to begin with, microcredits
        #[arg(
            long,
            value_name = "UNITS",
            default_value = "0",
            allow_hyphen_values = true,
            value_parser = values::units,
        )]
        trial: u64,
        /// Premium credits to begin with, microcredits
        #[arg(
            long,
            value_name = "UNITS",
            default_value = "0",
            allow_hyphen_values = true,
            value_parser = values::units,
        )]
        premium: u64,
        /// Your own name for this command, such as an order number. The same command with the same
        /// reference is one account with one opening balance, however often it is sent
        #[arg(long, value_name = "TEXT", value_parser = values::label)]
        reference: Option<String>,
    },
    /// List accounts with their balances
    List,
    /// Show one account
    Show {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
    },
    /// Give an account another name or another plan
    Change {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
        /// Its new name
        #[arg(long, value_parser = values::label, required_unless_present = "plan")]
        name: Option<String>,
        /// Its new plan, one of the configuration; it counts from the next request on
        #[arg(long)]
        plan: Option<String>,
    },
    /// Refuse the account's credentials and cancel what it runs
    Suspend {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
    },
    /// Suspend the account, revoke its keys and tokens, cancel what it runs and take its credits
    /// back. Its statement and its requests stay; `resume` opens it again
    Close {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
        /// Leave its credits as they are
        #[arg(long)]
        keep_credits: bool,
    },
    /// Accept the account's credentials again
    Resume {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
    },
}

pub(super) async fn run(context: &Context, command: AccountsCommand) -> CommandResult {
    use AccountsCommand as C;
    let (command, render): (_, Render) = match command {
        C::Create { name, plan, trial, premium, reference } => {
            (AdminCommand::AccountCreate { name, plan, trial, premium, reference }, created)
        }
        C::List => {
            return listing::show(context, COLUMNS, |after| AdminCommand::AccountList { after })
                .await;
        }
        C::Show { id } => {
            (AdminCommand::AccountShow { id: context.account(id).await? }, text::fields)
        }
        C::Change { id, name, plan } => {
            let id = context.account(id).await?;
            (AdminCommand::AccountChange { id, name, plan }, text::fields)
        }
        C::Suspend { id } => {
            (AdminCommand::AccountSuspend { id: context.account(id).await? }, text::fields)
        }
        C::Close { id, keep_credits } => {
            let id = context.account(id).await?;
            (AdminCommand::AccountClose { id, keep_credits }, text::fields)
        }
        C::Resume { id } => {
            (AdminCommand::AccountResume { id: context.account(id).await? }, text::fields)
        }
    };
    context.show(command, render).await
}

/// A second account of one name is allowed, since two customers may have one, and told.
fn created(document: &Value) -> String {
    let others = document["same_name"].as_array().map_or(&[][..], Vec::as_slice);
    let others: Vec<&str> = others.iter().filter_map(Value::as_str).collect();
    let fields = text::fields(document);
    if others.is_empty() {
        return fields;
    }
    let all = others.join(", ");
    format!("{fields}Another account has this name, so commands need their ids: {all}\n")
}
