//! Accounts, their keys, budgets, balances and statements.

use super::layout::{
    self, both_balances, command_form, credits, field, filled, folded, hidden, rows, text, time,
};
use super::{HtmlPage, Visitor, plans};
use crate::Console;
use axum::extract::{Path, Query, State};
use cresset_base::{AccountId, UnixMillis};
use cresset_commands::AdminCommand;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Entries of a statement on one page.
const ENTRIES: usize = 100;

#[derive(Deserialize)]
pub(super) struct ListQuery {
    after: Option<AccountId>,
    /// Part of a name.
    #[serde(default)]
    name: String,
}

impl ListQuery {
    /// The accounts whose name contains what was typed, or all.
    pub(super) fn command(&self) -> AdminCommand {
        let matching = Some(self.name.trim().to_owned()).filter(|text| !text.is_empty());
        AdminCommand::AccountList { after: self.after, matching }
    }
}

pub(super) async fn list(
    State(live): State<Arc<Console>>,
    Query(query): Query<ListQuery>,
    visitor: Visitor,
) -> HtmlPage {
    let found = visitor.ask(&live, query.command()).await;
    let names = live.node.plans.names();
    let content = match &found {
        Err(error) => layout::failure(error),
        Ok(page) => account_table(page, &query),
    };
    let content = html! { (content) (new_account(&visitor, &names)) (plans::table(&live)) };
    visitor.page(&live, "/accounts", "Accounts", &content)
}

const ACCOUNT_HEADS: [&str; 10] = [
    "Name",
    "Plan",
    "Status",
    "Trial",
    "Premium",
    "Reserved",
    "Running",
    "Budget used",
    "Created",
    "Note",
];

fn account_table(page: &Value, query: &ListQuery) -> Markup {
    let all: Vec<_> = rows(page, "data").map(account_row).collect();
    html! {
        (search("/accounts", query))
        (layout::table("Accounts (balances in credits)", &ACCOUNT_HEADS, &all))
        @if let Some(after) = page["next_after"].as_str() {
            form method="get" action="/accounts" {
                (hidden("after", after)) (hidden("name", &query.name))
                button.quiet { "More accounts" }
            }
        }
    }
}

/// A form that looks for accounts by a part of their name.
pub(super) fn search(at: &str, query: &ListQuery) -> Markup {
    html! {
        form method="get" action=(at) role="search" {
            (filled("Part of an account's name", "name", &query.name))
            button.quiet { "Search" }
        }
    }
}

fn new_account(visitor: &Visitor, plans: &[String]) -> Markup {
    let fields = html! {
        (field("Name", "name", "Example & Co.", true))
        (plan_choice(plans, "default"))
        (field("Trial credits", "trial", "0", false))
        (field("Premium credits", "premium", "0", false))
        (field("Reference", "reference", "order 17", false))
        button { "Create" }
    };
    let form = command_form(&visitor.session, "account_create", "/accounts", &fields);
    html! { details { summary { "New account" } (form) } }
}

fn account_row(account: &Value) -> Vec<Markup> {
    let amount = |name: &str| html! { (credits(&account[name])) };
    vec![
        html! { a href={ "/accounts/" (text(&account["id"])) } { (text(&account["name"])) } },
        html! { (text(&account["plan"])) },
        html! { (text(&account["status"])) },
        amount("trialUnits"),
        amount("premiumUnits"),
        amount("reservedUnits"),
        html! { (text(&account["in_flight"])) },
        html! { (text(&account["budget_use"])) },
        time(&account["created_at"]),
        html! { (text(&account["note"])) },
    ]
}

fn plan_choice(plans: &[String], chosen: &str) -> Markup {
    html! {
        label { span { "Plan" }
            select name="plan" {
                @for plan in plans { option value=(plan) selected[plan == chosen] { (plan) } }
            }
        }
    }
}

#[derive(Deserialize)]
pub(super) struct StatementQuery {
    #[serde(default)]
    entries_after: u64,
}

pub(super) async fn show(
    State(live): State<Arc<Console>>,
    Path(id): Path<AccountId>,
    Query(query): Query<StatementQuery>,
    visitor: Visitor,
) -> HtmlPage {
    let (account, keys, statement) = tokio::join!(
        visitor.ask(&live, AdminCommand::AccountShow { id }),
        keys_of(&live, &visitor, id),
        visitor.ask(&live, statement_of(id, query.entries_after)),
    );
    let (account, keys, statement) = match (account, keys, statement) {
        (Ok(account), Ok(keys), Ok(statement)) => (account, keys, statement),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            let content = layout::failure(error);
            return visitor.page(&live, "/accounts", "Account", &content);
        }
    };
    let back = format!("/accounts/{id}");
    let content = html! {
        (facts(&account))
        (change(&visitor, &live.node.plans.names(), &account, &back))
        h2 { "Balance" }
        (money(&visitor, id, &back))
        h2 { "Today and this month" }
        (spending_table("Spent and allowed (amounts in credits, UTC)", &account))
        (budget(&visitor, "account_budget", &id.to_string(), &back))
        h2 { "Requests and answers" }
        p { a href={ (back) "/requests" } { "Requests of the account" } }
        (answers(&visitor, &account, &back))
        h2 { "Keys" }
        (key_table(&visitor, &keys, &back))
        (new_key(&visitor, id, &back))
        h2 { "Statement" }
        (statement_table(&statement, &back))
    };
    visitor.page(&live, "/accounts", &text(&account["name"]), &content)
}

/// All keys of an account. A page of their list looks at the next credentials of every account, so
/// it may hold none.
async fn keys_of(live: &Console, visitor: &Visitor, account: AccountId) -> Result<Value, String> {
    let (mut keys, mut after) = (Vec::new(), None);
    loop {
        let mut page = visitor.ask(live, AdminCommand::KeyList { account, after }).await?;
        keys.extend(page["data"].as_array_mut().into_iter().flatten().map(Value::take));
        after = page["next_after"].as_str().and_then(|id| id.parse().ok());
        if after.is_none() {
            return Ok(json!({ "data": keys }));
        }
    }
}

fn statement_of(account: AccountId, after: u64) -> AdminCommand {
    let (from, until): (Option<UnixMillis>, Option<UnixMillis>) = (None, None);
    AdminCommand::CreditStatement { account, after, limit: ENTRIES, from, until }
}

fn facts(account: &Value) -> Markup {
    let fact = |name: &str, value: String| html! { div { dt { (name) } dd { (value) } } };
    html! {
        dl.tiles {
            (fact("Trial", credits(&account["trialUnits"])))
            (fact("Premium", credits(&account["premiumUnits"])))
            (fact("Reserved", credits(&account["reservedUnits"])))
            (fact("Status", text(&account["status"])))
            (fact("Plan", text(&account["plan"])))
            (fact("Running requests", text(&account["in_flight"])))
        }
        p { "Id " code { (text(&account["id"])) } ", created " (time(&account["created_at"])) "." }
        @if let Some(note) = account["note"].as_str() { p { "Note: " (note) } }
    }
}

fn change(visitor: &Visitor, plans: &[String], account: &Value, back: &str) -> Markup {
    let id = text(&account["id"]);
    let suspended = account["status"] == "suspended";
    let (status, word) = if suspended {
        ("account_resume", "Resume the account")
    } else {
        ("account_suspend", "Suspend the account: refuse its keys, cancel what it runs")
    };
    let fields = html! {
        (hidden("id", &id))
        (field("New name", "name", &text(&account["name"]), false))
        (plan_choice(plans, &text(&account["plan"])))
        (filled("Note", "note", account["note"].as_str().unwrap_or_default()))
        label { span { "Answers" }
            select name="answers" {
                @let stores = account["stores_answers"] == true;
                option value="on" selected[stores] { "are stored for replay" }
                option value="off" selected[!stores] { "are not stored" }
            }
        }
        button { "Change" }
    };
    let forms = html! {
        (command_form(&visitor.session, "account_change", back, &fields))
        (command_form(&visitor.session, status, back, &html! {
            (hidden("id", &id))
            button { (word) }
        }))
        (closing(visitor, &id, back))
    };
    folded("Change", &forms)
}

fn closing(visitor: &Visitor, id: &str, back: &str) -> Markup {
    command_form(
        &visitor.session,
        "account_close",
        back,
        &html! {
            (hidden("id", id))
            label { span { "Its credits" }
                select name="keep" {
                    option value="" { "are taken back" }
                    option value="yes" { "are left" }
                }
            }
            label { span { "Its stored answers" }
                select name="erase" {
                    option value="" { "expire as others do" }
                    option value="yes" { "are erased now" }
                }
            }
            button { "Close the account: suspend it, revoke its keys" }
        },
    )
}

const SPENDING_HEADS: [&str; 9] = [
    "Period",
    "Spent",
    "Reserved",
    "Budget",
    "Told at %",
    "Tokens",
    "Tokens reserved",
    "Plan's tokens",
    "Renews",
];

/// What is spent of a day and a month, and the limits on it.
fn spending_table(caption: &str, owner: &Value) -> Markup {
    let row = |period: &Value| {
        let near = period["near_budget"] == true;
        let amount = |name: &str| html! { (credits(&period[name])) };
        let count = |name: &str| html! { (text(&period[name])) };
        vec![
            html! { (text(&period["period"])) @if near { strong { ": nearly spent" } } },
            amount("spentUnits"),
            amount("reservedUnits"),
            amount("budgetUnits"),
            html! { (text(&period["alert_percent"])) },
            count("tokens"),
            count("reserved_tokens"),
            count("quota_tokens"),
            time(&period["renews_at"]),
        ]
    };
    let all: Vec<_> = rows(owner, "spending").map(row).collect();
    layout::table(caption, &SPENDING_HEADS, &all)
}

/// A form that sets or ends a budget.
fn budget(visitor: &Visitor, command: &str, id: &str, back: &str) -> Markup {
    let fields = html! {
        (hidden("id", id))
        label { span { "Period" }
            select name="period" {
                option value="month" { "month" }
                option value="day" { "day" }
            }
        }
        (field("Credits", "units", "none", false))
        (field("Told at %", "percent", "80", false))
        button { "Set the budget" }
    };
    let form = command_form(&visitor.session, command, back, &fields);
    folded("Budget", &form)
}

fn answers(visitor: &Visitor, account: &Value, back: &str) -> Markup {
    let fields = html! {
        (hidden("id", &text(&account["id"])))
        (field("Request", "request", "all of them", false))
        button { "Erase: requests answer 410 and are not run again" }
    };
    let stored = layout::mebibytes(&account["stored_answer_bytes"]);
    let form = command_form(&visitor.session, "account_erase_answers", back, &fields);
    html! { p { "Stored answers: " (stored) } (folded("Erase stored answers", &form)) }
}

fn money(visitor: &Visitor, account: AccountId, back: &str) -> Markup {
    let fields = |button: &str| {
        html! {
            (hidden("account", &account.to_string()))
            label { span { "Kind" }
                select name="bucket" {
                    option value="premium" { "premium" }
                    option value="trial" { "trial" }
                }
            }
            (field("Credits", "units", "10", true))
            (field("Reference", "reference", "invoice 2026-11", true))
            button { (button) }
        }
    };
    let form = |command: &str, button: &str| {
        command_form(&visitor.session, command, back, &fields(button))
    };
    html! {
        (folded("Grant credits", &form("credit_grant", "Grant")))
        (folded("Take credits back", &form("credit_debit", "Debit")))
    }
}

const KEY_HEADS: [&str; 8] =
    ["Label", "Ends with", "Created", "Last used", "Budget used", "Expires", "Revoked", "Acts"];

const ENTRY_HEADS: [&str; 7] = [
    "Time",
    "Entry",
    "Change",
    "Reference or request",
    "Prompt",
    "Answer",
    "Trial + premium after",
];

fn key_table(visitor: &Visitor, keys: &Value, back: &str) -> Markup {
    let row = |key: &Value| {
        let act = |command: &str, word: &str| {
            let button = html! { (hidden("id", &text(&key["id"]))) button.quiet { (word) } };
            command_form(&visitor.session, command, back, &button)
        };
        vec![
            html! { (text(&key["label"])) },
            html! { "…" (text(&key["hint"])) },
            time(&key["created_at"]),
            html! { (text(&key["last_used_on"])) },
            html! { (text(&key["budget_use"])) },
            time(&key["expires_at"]),
            time(&key["revoked_at"]),
            html! {
                @if key["revoked_at"].is_null() {
                    div.acts { (act("key_rotate", "Replace")) (act("key_revoke", "Revoke")) }
                    (budget(visitor, "key_budget", &text(&key["id"]), back))
                }
            },
        ]
    };
    let all: Vec<_> = rows(keys, "data").map(row).collect();
    layout::table("Keys", &KEY_HEADS, &all)
}

fn new_key(visitor: &Visitor, account: AccountId, back: &str) -> Markup {
    let fields = html! {
        (hidden("account", &account.to_string()))
        (field("Label", "label", "laptop", false))
        (field("Days until it expires", "days", "never", false))
        button { "Create" }
    };
    let form = command_form(&visitor.session, "key_create", back, &fields);
    folded("New key", &form)
}

fn statement_table(statement: &Value, back: &str) -> Markup {
    let all: Vec<_> = rows(statement, "data").map(entry_row).collect();
    html! {
        (layout::table("Entries, oldest first (amounts in credits)", &ENTRY_HEADS, &all))
        @if let Some(after) = statement["next_after"].as_u64() {
            p { a href={ (back) "?entries_after=" (after) } { "Later entries" } }
        }
    }
}

fn entry_row(entry: &Value) -> Vec<Markup> {
    let what = entry["reference"].as_str().or(entry["request_id"].as_str()).unwrap_or("–");
    let tokens = |name: &str| html! { (text(&entry[name])) };
    vec![
        time(&entry["at"]),
        html! { (text(&entry["kind"])) },
        html! { (credits(&entry["changeUnits"])) },
        html! { code { (what) } },
        tokens("prompt_tokens"),
        tokens("completion_tokens"),
        html! { (both_balances(&entry["after"])) },
    ]
}
