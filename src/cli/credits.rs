//! `cresset credits`: grants, debits, balances and statements.

use super::support::context::Context;
use super::support::listing::{self, PrintedListing};
use super::support::output::{CommandResult, Render, print};
use super::support::values::AccountArgument;
use super::support::{text, values};
use crate::ids::AccountId;
use crate::ledger::Bucket;
use crate::server::operator::AdminCommand;
use clap::{Args, Subcommand};
use serde_json::Value;
use std::cell::Cell;

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
    /// List every change to an account's balances, oldest first
    Statement {
        /// The account, by id or name
        #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
        account: AccountArgument,
        /// List what came after this entry: `next_after` of an earlier list
        #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
        after: u64,
        /// The most entries to list [default: all]
        #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
        limit: Option<u64>,
    },
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
    #[arg(long, value_name = "TEXT", value_parser = values::label)]
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
        C::Statement { account, after, limit } => {
            let account = context.account(account).await?;
            return statement(context, account, after, limit.unwrap_or(u64::MAX)).await;
        }
    };
    context.show(command, render).await
}

fn adjusted(document: &Value) -> String {
    let repeat = "This was done before under the same reference; nothing was changed.\n";
    let said = if document["repeated"] == true { repeat } else { "" };
    format!("{}{said}", text::fields(document))
}

async fn statement(context: &Context, account: AccountId, begin: u64, limit: u64) -> CommandResult {
    let left = Cell::new(limit);
    let page = |after: Option<u64>| {
        let (after, limit) = (after.unwrap_or(begin), left.get() as usize);
        AdminCommand::CreditStatement { account, after, limit }
    };
    let mut listing = PrintedListing::new(context.output, COLUMNS);
    let last = listing::pages(context, page, |page| {
        print(&listing.page(page))?;
        let rows = page["data"].as_array().map_or(0, Vec::len) as u64;
        left.set(left.get().saturating_sub(rows));
        Ok(left.get() > 0)
    });
    let last = last.await?;
    print(&listing.end(&last))?;
    if context.output.json {
        return Ok(());
    }
    print(&format!("\n{}", text::fields(&last)))
}
