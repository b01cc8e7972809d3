//! `cresset credits statement`: the changes of an account's balances, one by one or summed up.

use crate::support::context::Context;
use crate::support::listing::{self, PrintedListing};
use crate::support::output::{CommandError, CommandResult, print};
use crate::support::values::AccountArgument;
use crate::support::{text, values};
use clap::Args;
use cresset_base::{AccountId, UnixMillis};
use cresset_catalogue::{Catalogue, Manifest};
use cresset_commands::AdminCommand;
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::BTreeMap;

const COLUMNS: &[&str] = &[
    "sequence",
    "at",
    "kind",
    "changeUnits",
    "amount.trialUnits",
    "amount.premiumUnits",
    "after.processingEligibleUnits",
    "model",
    "prompt_tokens",
    "completion_tokens",
    "request_id",
    "reference",
    "credential_id",
];
/// Columns of a summary.
const SUMS: &[&str] =
    &["model", "credential_id", "requests", "prompt_tokens", "completion_tokens", "chargedUnits"];

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset credits statement --account acme --month 2026-11 --summary --csv > acme.csv
Requests that the ledger has forgotten (requests.tombstone_days) are summed up without model and \
key.")]
pub(crate) struct StatementArguments {
    /// The account, by id or name
    #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
    account: AccountArgument,
    /// List what came after this entry: `next_after` of an earlier list
    #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
    after: u64,
    /// The most entries to list [default: all]
    #[arg(
        long,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u64).range(1..),
        conflicts_with_all = ["from", "month", "summary"],
    )]
    limit: Option<u64>,
    /// List what came from the beginning of this day or month on (UTC)
    #[arg(long, value_name = "DATE", value_parser = values::date)]
    from: Option<UnixMillis>,
    /// List what came before the beginning of this day or month (UTC)
    #[arg(long, value_name = "DATE", value_parser = values::date)]
    until: Option<UnixMillis>,
    /// List what came in this month (UTC), such as 2026-11
    #[arg(long, value_parser = values::month, conflicts_with_all = ["from", "until"])]
    month: Option<[UnixMillis; 2]>,
    /// Add requests, tokens and charges up by model and key
    #[arg(long)]
    summary: bool,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    csv: bool,
}

/// The charges of each key for each model. Both are unknown for requests that the ledger has
/// forgotten.
type ChargesByKey = BTreeMap<[Option<String>; 2], [u64; 4]>;

pub(super) async fn run(context: &Context, arguments: StatementArguments) -> CommandResult {
    let account = context.account(arguments.account.clone()).await?;
    if arguments.summary {
        return summary(context, account, &arguments).await;
    }
    if arguments.csv {
        print_line(COLUMNS.iter())?;
        return pages(context, account, &arguments, |page| print_csv(COLUMNS, rows(page)))
            .await
            .map(drop);
    }
    let mut listing = PrintedListing::new(context.output, COLUMNS);
    let last = pages(context, account, &arguments, |page| print(&listing.page(page))).await?;
    print(&listing.end(&last))?;
    if context.output.json {
        return Ok(());
    }
    print(&format!("\n{}", text::fields(&last)))
}

/// Hands each page of the period to `each`, and returns the last one.
async fn pages(
    context: &Context,
    account: AccountId,
    arguments: &StatementArguments,
    mut each: impl FnMut(&Value) -> CommandResult,
) -> CommandResult<Value> {
    let month = arguments.month.map(|[from, until]| (Some(from), Some(until)));
    let (from, until) = month.unwrap_or((arguments.from, arguments.until));
    let left = Cell::new(arguments.limit.unwrap_or(u64::MAX));
    let page = |after: Option<u64>| {
        let (after, limit) = (after.unwrap_or(arguments.after), left.get() as usize);
        AdminCommand::CreditStatement { account, after, limit, from, until }
    };
    listing::pages(context, page, |page| {
        each(page)?;
        left.set(left.get().saturating_sub(rows(page).len() as u64));
        Ok(left.get() > 0)
    })
    .await
}

fn rows(page: &Value) -> &[Value] {
    page["data"].as_array().map_or(&[], Vec::as_slice)
}

async fn summary(
    context: &Context,
    account: AccountId,
    arguments: &StatementArguments,
) -> CommandResult {
    let mut sums = ChargesByKey::new();
    pages(context, account, arguments, |page| {
        rows(page).iter().try_for_each(|row| add(&mut sums, row))
    })
    .await?;
    let names = Catalogue::new(&context.data_dir).manifests().unwrap_or_default();
    let named: Vec<Value> = sums.iter().map(|sum| named(sum, &names)).collect();
    if arguments.csv {
        print_line(SUMS.iter())?;
        return print_csv(SUMS, &named);
    }
    let document = json!({ "account_id": account, "data": named });
    context.output.result(&document, |document| text::table(document, SUMS))
}

/// Adds an entry that charges a request to the sums.
fn add(sums: &mut ChargesByKey, row: &Value) -> CommandResult {
    if row["kind"] != "settle" {
        return Ok(());
    }
    let text = |name: &str| row[name].as_str().map(str::to_owned);
    let number = |name: &str| row[name].as_u64().unwrap_or(0);
    let change = text("changeUnits").and_then(|units| units.parse::<i64>().ok());
    let change = change.ok_or_else(|| CommandError::new("an entry of the node has no amount"))?;
    let sum = sums.entry([text("model"), text("credential_id")]).or_default();
    let more = [1, number("prompt_tokens"), number("completion_tokens"), change.unsigned_abs()];
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    Ok(())
}

/// One line of a summary, with the model's name where this folder knows it.
fn named((key, sum): (&[Option<String>; 2], &[u64; 4]), known: &[Manifest]) -> Value {
    let ([model, credential], [requests, prompt, completion, charged]) = (key, sum);
    let manifest = known.iter().find(|one| model.as_deref() == Some(&one.id.to_string()));
    let model = manifest.map(|one| one.name.clone()).or_else(|| model.clone());
    json!({
        "model": model,
        "credential_id": credential,
        "requests": requests,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "chargedUnits": charged.to_string(),
    })
}

/// Prints rows as comma-separated values.
fn print_csv(columns: &[&str], rows: &[Value]) -> CommandResult {
    for row in rows {
        let cell = |column: &&str| {
            let value = row.pointer(&format!("/{}", column.replace('.', "/")));
            match value.unwrap_or(&Value::Null) {
                Value::Null => String::new(),
                Value::String(text) => text::plain(text),
                Value::Number(at) if *column == "at" => text::utc(at.as_u64().unwrap_or(0)),
                other => other.to_string(),
            }
        };
        print_line(columns.iter().map(|column| plain_cell(cell(column))))?;
    }
    Ok(())
}

/// A text that a spreadsheet would run as a formula, with a mark before it that makes it a text.
fn plain_cell(text: String) -> String {
    let is_run = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    if is_run && text.parse::<i64>().is_err() { format!("'{text}") } else { text }
}

fn print_line(cells: impl Iterator<Item = impl AsRef<[u8]>>) -> CommandResult {
    let mut line = csv::Writer::from_writer(Vec::new());
    line.write_record(cells).map_err(CommandError::new)?;
    let line = line.into_inner().map_err(CommandError::new)?;
    print(&String::from_utf8_lossy(&line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cell_is_a_formula() {
        for (text, expect) in [
            ("=1+1", "'=1+1"),
            ("@SUM(1)", "'@SUM(1)"),
            ("+cmd|calc", "'+cmd|calc"),
            ("-2+3", "'-2+3"),
            ("\t=1", "'\t=1"),
            ("-20", "-20"),
            ("order 7 = 3", "order 7 = 3"),
            ("", ""),
        ] {
            assert_eq!(plain_cell(text.into()), expect);
        }
    }
}
