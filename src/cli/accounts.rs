//! `cresset accounts`: the owners of balances, keys and requests.

use super::support::context::Context;
use super::support::output::{CommandResult, Render};
use super::support::values::AccountArgument;
use super::support::{listing, text, values};
use clap::{Args, Subcommand};
use cresset_base::{CredentialId, RequestId};
use cresset_commands::AdminCommand;
use cresset_ledger::BudgetPeriod;
use serde_json::{Value, json};

const COLUMNS: &[&str] = &[
    "id",
    "name",
    "plan",
    "status",
    "trialUnits",
    "premiumUnits",
    "reservedUnits",
    "in_flight",
    "budget_use",
    "created_at",
    "note",
];

const SPENDING: &[&str] = &[
    "period",
    "spentUnits",
    "reservedUnits",
    "budgetUnits",
    "alert_percent",
    "tokens",
    "reserved_tokens",
    "quota_tokens",
    "renews_at",
];

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset accounts create --name acme --trial 5_000_000 --reference order-17
  cresset accounts budget acme --period month --units 50_000_000 --alert-percent 80
  cresset accounts suspend acme                 by id or, where no other has it, by name")]
pub(super) enum AccountsCommand {
    /// Create an account together with its opening credits, or neither
    Create {
        /// Name of the account's owner
        #[arg(long, allow_hyphen_values = true, value_parser = values::label)]
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
        #[arg(long, allow_hyphen_values = true, value_name = "TEXT", value_parser = values::label)]
        reference: Option<String>,
    },
    /// List accounts with their balances
    List {
        /// Only those whose name contains this text
        #[arg(long, value_name = "TEXT", value_parser = values::label)]
        matching: Option<String>,
    },
    /// Show one account
    Show {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
    },
    /// Give an account another name, plan or note, or say whether its answers are stored
    #[command(group = clap::ArgGroup::new("what").required(true).multiple(true))]
    Change {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
        /// Its new name
        #[arg(long, allow_hyphen_values = true, value_parser = values::label, group = "what")]
        name: Option<String>,
        /// Its new plan, one of the configuration; it counts from the next request on
        #[arg(long, group = "what")]
        plan: Option<String>,
        /// A note for operators, 1 000 characters at most; an empty one removes it
        #[arg(long, allow_hyphen_values = true, value_name = "TEXT", group = "what")]
        note: Option<String>,
        /// Whether answers are stored for replay from now on. Without it a repeat of a completed
        /// request is answered with 410, and a lost answer cannot be fetched again
        #[arg(long, value_name = "on|off", group = "what", value_parser = values::on_or_off())]
        store_answers: Option<bool>,
    },
    /// Limit what the account may spend in each day or month (UTC), with all its keys together
    Budget {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
        #[command(flatten)]
        limit: BudgetArguments,
    },
    /// Delete stored answers now; their requests answer 410 and are not run again
    EraseAnswers {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
        /// That of this request alone: what its client sent as Idempotency-Key
        #[arg(long, value_name = "ID")]
        request: Option<RequestId>,
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
        /// Delete its stored answers, too
        #[arg(long)]
        erase_answers: bool,
    },
    /// Accept the account's credentials again
    Resume {
        /// The account, by id or name
        #[arg(value_name = "ACCOUNT", value_parser = values::account)]
        id: AccountArgument,
    },
}

/// A budget of an account or a key.
#[derive(Args, Debug)]
pub(super) struct BudgetArguments {
    /// The period, which begins anew at midnight or with the month
    #[arg(long, value_parser = values::named::<BudgetPeriod>(&["day", "month"]))]
    period: BudgetPeriod,
    /// The most that may be charged and reserved, microcredits
    #[arg(
        long,
        value_name = "UNITS",
        value_parser = values::units,
        required_unless_present = "none",
        conflicts_with = "none",
    )]
    units: Option<u64>,
    /// Percentage of the budget at which the log, a metric and the status tell of it
    #[arg(
        long,
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(1..=100),
        conflicts_with = "none",
    )]
    alert_percent: Option<u8>,
    /// End the budget
    #[arg(long)]
    none: bool,
}

impl BudgetArguments {
    pub(super) fn of_key(self, id: CredentialId) -> AdminCommand {
        let Self { period, units, alert_percent, .. } = self;
        AdminCommand::KeyBudget { id, period, units, alert_percent }
    }
}

pub(super) async fn run(context: &Context, command: AccountsCommand) -> CommandResult {
    use AccountsCommand as C;
    let (command, render): (_, Render) = match command {
        C::Create { name, plan, trial, premium, reference } => {
            (AdminCommand::AccountCreate { name, plan, trial, premium, reference }, created)
        }
        C::List { matching } => {
            let page = |after| AdminCommand::AccountList { after, matching: matching.clone() };
            return listing::show(context, COLUMNS, page).await;
        }
        C::Show { id } => {
            (AdminCommand::AccountShow { id: context.account(id).await? }, with_spending)
        }
        C::Change { id, name, plan, note, store_answers: stores_answers } => {
            let id = context.account(id).await?;
            let change = AdminCommand::AccountChange { id, name, plan, note, stores_answers };
            (change, text::fields)
        }
        C::Budget { id, limit } => {
            let id = context.account(id).await?;
            let BudgetArguments { period, units, alert_percent, .. } = limit;
            (AdminCommand::AccountBudget { id, period, units, alert_percent }, with_spending)
        }
        C::EraseAnswers { id, request } => {
            let id = context.account(id).await?;
            (AdminCommand::AccountEraseAnswers { id, request }, text::fields)
        }
        C::Suspend { id } => {
            (AdminCommand::AccountSuspend { id: context.account(id).await? }, text::fields)
        }
        C::Close { id, keep_credits, erase_answers } => {
            let id = context.account(id).await?;
            (AdminCommand::AccountClose { id, keep_credits, erase_answers }, text::fields)
        }
        C::Resume { id } => {
            (AdminCommand::AccountResume { id: context.account(id).await? }, text::fields)
        }
    };
    context.show(command, render).await
}

/// The fields of an account or a key, then what is spent of its day and its month.
pub(super) fn with_spending(document: &Value) -> String {
    let spending = json!({ "data": document["spending"] });
    format!("{}\n{}", text::fields(document), text::table(&spending, SPENDING))
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
