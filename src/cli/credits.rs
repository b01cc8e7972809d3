//! `cresset credits`: grants, balances and statements.

use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::{text, values};
use crate::ids::AccountId;
use crate::ledger::Bucket;
use crate::server::operator::AdminCommand;
use clap::Subcommand;
use serde_json::Value;

const COLUMNS: &[&str] = &[
    "sequence",
    "at",
    "kind",
    "amount.trialUnits",
    "amount.premiumUnits",
    "after.processingEligibleUnits",
    "request_id",
    "reference",
];

#[derive(Debug, Subcommand)]
#[command(after_help = "Example:
  cresset credits grant --account ID --bucket premium --units 10_000_000 --reference invoice-17
The same grant sent twice is one grant.")]
pub(super) enum CreditsCommand {
    /// Add credits to an account, once per reference
    Grant {
        /// The account
        #[arg(long, value_name = "ID")]
        account: AccountId,
        /// The kind of credits; trial credits are spent first
        #[arg(long, value_parser = values::named::<Bucket>(&["trial", "premium"]))]
        bucket: Bucket,
        /// Microcredits
        #[arg(long, value_parser = values::units)]
        units: u64,
        /// The reason for the grant, such as an invoice or a ticket number
        #[arg(long, value_name = "TEXT", value_parser = values::label)]
        reference: String,
    },
    /// Show an account's balances
    Show {
        /// The account
        #[arg(long, value_name = "ID")]
        account: AccountId,
    },
    /// List every change to an account's balances, oldest first, a page at a time
    Statement {
        /// The account
        #[arg(long, value_name = "ID")]
        account: AccountId,
        /// List what came after this entry: `next_after` of the page before
        #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
        after: u64,
        /// Entries on one page
        #[arg(
            long,
            value_name = "COUNT",
            default_value_t = 100_000,
            value_parser = clap::value_parser!(u64).range(1..=100_000),
        )]
        limit: u64,
    },
}

pub(super) async fn run(context: &Context, command: CreditsCommand) -> CommandResult {
    use CreditsCommand as C;
    let (command, render): (_, Render) = match command {
        C::Grant { account, bucket, units, reference } => {
            (AdminCommand::CreditGrant { account, bucket, units, reference }, text::fields)
        }
        C::Show { account } => (AdminCommand::CreditShow { account }, text::fields),
        C::Statement { account, after, limit } => {
            (AdminCommand::CreditStatement { account, after, limit: limit as usize }, statement)
        }
    };
    context.show(command, render).await
}

fn statement(document: &Value) -> String {
    format!("{}\n{}", text::table(document, COLUMNS), text::fields(document))
}
