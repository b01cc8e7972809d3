//! `cresset accounts`: the owners of balances, keys and requests.

use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::{listing, text, values};
use crate::ids::AccountId;
use crate::server::operator::AdminCommand;
use clap::Subcommand;

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
  cresset accounts suspend 0192f0c1-2a7e-7c3d-9a51-3f0e5b1c7d42")]
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
        /// The account
        id: AccountId,
    },
    /// Refuse the account's credentials and cancel what it runs
    Suspend {
        /// The account
        id: AccountId,
    },
    /// Accept the account's credentials again
    Resume {
        /// The account
        id: AccountId,
    },
}

pub(super) async fn run(context: &Context, command: AccountsCommand) -> CommandResult {
    use AccountsCommand as C;
    let (command, render): (_, Render) = match command {
        C::Create { name, plan, trial, premium, reference } => {
            (AdminCommand::AccountCreate { name, plan, trial, premium, reference }, text::fields)
        }
        C::List => {
            return listing::show(context, COLUMNS, |after| AdminCommand::AccountList { after })
                .await;
        }
        C::Show { id } => (AdminCommand::AccountShow { id }, text::fields),
        C::Suspend { id } => (AdminCommand::AccountSuspend { id }, text::fields),
        C::Resume { id } => (AdminCommand::AccountResume { id }, text::fields),
    };
    context.show(command, render).await
}
