//! The requests of an account, and one of them with its attempts.

use super::layout::{self, credits, hidden, rows, text, time};
use super::{HtmlPage, Visitor};
use crate::Console;
use axum::extract::{Path, Query, State};
use cresset_base::{AccountId, ApplicationId, RequestId};
use cresset_commands::{AdminCommand, RequestScope};
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::Value;
use std::sync::Arc;

#[derive(Deserialize)]
pub(super) struct RequestsQuery {
    #[serde(default)]
    after: u64,
}

pub(super) async fn list(
    State(live): State<Arc<Console>>,
    Path(account): Path<AccountId>,
    Query(query): Query<RequestsQuery>,
    visitor: Visitor,
) -> HtmlPage {
    let command =
        AdminCommand::RequestList { account, state: None, after: query.after, since: None };
    let content = match visitor.ask(&live, command).await {
        Err(error) => layout::failure(error),
        Ok(page) => request_table(&page, account),
    };
    visitor.page(&live, "/accounts", "Requests", &content)
}

fn request_table(page: &Value, account: AccountId) -> Markup {
    let all: Vec<_> = rows(page, "data").map(request_row).collect();
    let heads = ["Request", "State", "Model", "Reserved", "Charged", "Created", "Ended"];
    html! {
        p { a href={ "/accounts/" (account) } { "The account" } }
        (layout::table("Requests, oldest first (amounts in credits)", &heads, &all))
        @if let Some(after) = page["next_after"].as_u64() {
            form method="get" action={ "/accounts/" (account) "/requests" } {
                (hidden("after", &after.to_string()))
                button.quiet { "Later requests" }
            }
        }
    }
}

fn request_row(request: &Value) -> Vec<Markup> {
    let (id, account) = (text(&request["id"]), text(&request["account_id"]));
    let application = request["application_id"].as_str();
    let scope = application.map_or_else(String::new, |id| format!("?application={id}"));
    vec![
        html! { a href={ "/accounts/" (account) "/requests/" (id) (scope) } { code { (id) } } },
        html! { (text(&request["state"])) },
        html! { code { (text(&request["model"])) } },
        html! { (credits(&request["reservedUnits"])) },
        html! { (credits(&request["chargedUnits"])) },
        time(&request["created_at"]),
        time(&request["finished_at"]),
    ]
}

#[derive(Deserialize)]
pub(super) struct RequestQuery {
    application: Option<ApplicationId>,
}

pub(super) async fn show(
    State(live): State<Arc<Console>>,
    Path((account, request)): Path<(AccountId, RequestId)>,
    Query(query): Query<RequestQuery>,
    visitor: Visitor,
) -> HtmlPage {
    let scope = RequestScope { account: Some(account), application: query.application };
    let content = match visitor.ask(&live, AdminCommand::RequestShow { request, scope }).await {
        Err(error) => layout::failure(error),
        Ok(found) => html! {
            p { a href={ "/accounts/" (account) "/requests" } { "Requests of the account" } }
            (facts(&found))
            (attempts(&found))
        },
    };
    visitor.page(&live, "/accounts", "Request", &content)
}

fn facts(request: &Value) -> Markup {
    let fact = |name: &str, value: &Value| html! { div { dt { (name) } dd { (text(value)) } } };
    html! {
        dl.tiles {
            (fact("State", &request["state"]))
            (fact("Attempts", &request["attempt_count"]))
            (fact("Failure", &request["failure_code"]))
            (fact("Stream", &request["stream"]))
            (fact("Crashes of its input", &request["input_crashes"]))
        }
        p { "Id " code { (text(&request["id"])) } ", model " code { (text(&request["model"])) }
            ", session " code { (text(&request["session_id"])) } "." }
    }
}

const ATTEMPT_HEADS: [&str; 9] = [
    "Attempt",
    "State",
    "Prompt",
    "Cached",
    "Answer",
    "Charged, trial + premium",
    "Key",
    "Created",
    "Ended",
];

fn attempts(request: &Value) -> Markup {
    let row = |attempt: &Value| {
        let tokens = |name: &str| html! { (text(&attempt["usage"][name])) };
        vec![
            html! { (text(&attempt["number"])) },
            html! { (text(&attempt["state"])) },
            tokens("prompt_tokens"),
            tokens("cached_tokens"),
            tokens("completion_tokens"),
            html! { (layout::both_balances(&attempt["charged"])) },
            html! { code { (text(&attempt["credential_id"])) } },
            time(&attempt["created_at"]),
            time(&attempt["finished_at"]),
        ]
    };
    let all: Vec<_> = rows(request, "attempts").map(row).collect();
    layout::table("Attempts (amounts in credits)", &ATTEMPT_HEADS, &all)
}
