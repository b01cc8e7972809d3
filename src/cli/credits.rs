//! `cresset credits`: grants, debits, balances and statements.

mod statement;

use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::values::AccountArgument;
use super::support::{text, values};
use clap::{Args, Subcommand};
use cresset_commands::AdminCommand;
use cresset_ledger::Bucket;
use serde_json::Value;
use statement::StatementArguments;

#[derive(Debug, Subcommand)]
#[command(after_help = "Example:
  cresset credits grant --account acme --bucket premium --units 10_000_000 --reference invoice-17
  cresset credits debit --account acme --bucket premium --units 2_000_000 --reference chargeback-3
The same grant or debit sent twice is one.")]
pub(super) enum CreditsCommand {
    /// Add credits to an account, once per reference
    Grant(AdjustmentArguments),
    /// Take credits from an account, once per reference; what is reserved stays
    Debit(AdjustmentArguments),
    /// Show an account's balances
    Show {
        /// The account, by id or name
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: AccountArgument,
    },
    /// List every change to an account's balances, oldest first, or sum up a period
    Statement(StatementArguments),
}

#[derive(Args, Debug)]
pub(super) struct AdjustmentArguments {
    /// The account, by id or name
    #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
    account: AccountArgument,
    /// The kind of credits; trial credits are spent first
    #[arg(long, value_parser = values::named::<Bucket>(&["trial", "premium"]))]
    bucket: Bucket,
    /// Microcredits
    #[arg(long, allow_hyphen_values = true, value_parser = values::units)]
    units: u64,
    /// The reason, such as an invoice, a ticket or a payment that was called back
    #[arg(long, allow_hyphen_values = true, value_name = "TEXT", value_parser = values::label)]
    reference: String,
}

pub(super) async fn run(context: &Context, command: CreditsCommand) -> CommandResult {
    use CreditsCommand as C;
    let (command, render): (_, Render) = match command {
        C::Grant(AdjustmentArguments { account, bucket, units, reference }) => {
            let account = context.account(account).await?;
            (AdminCommand::CreditGrant { account, bucket, units, reference }, adjusted)
        }
        C::Debit(AdjustmentArguments { account, bucket, units, reference }) => {
            let account = context.account(account).await?;
            (AdminCommand::CreditDebit { account, bucket, units, reference }, adjusted)
        }
        C::Show { account } => {
            let account = context.account(account).await?;
            (AdminCommand::CreditShow { account }, text::fields)
        }
        C::Statement(arguments) => return statement::run(context, arguments).await,
    };
    context.show(command, render).await
}

fn adjusted(document: &Value) -> String {
    let repeat = "This was done before under the same reference; nothing was changed.\n";
    let said = if document["repeated"] == true { repeat } else { "" };
    format!("{}{said}", text::fields(document))
}
