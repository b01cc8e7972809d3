//! A chat box. It asks as any client does, under an account that the operator chooses, with a key
//! that is made for the session and ends by itself; the account pays.

use super::accounts::{ListQuery, search};
use super::layout::{self, rows, text};
use super::{HtmlPage, Visitor};
use crate::Console;
use axum::Json;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::http::{Method, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use cresset_base::{AccountId, UnixMillis};
use cresset_commands::AdminCommand;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tower::ServiceExt;
use uuid::Uuid;

/// Milliseconds for which a key of the chat works.
const KEY_MS: u64 = 3_600_000;
/// Output tokens of an answer at most.
const MAX_TOKENS: u32 = 512;

pub(super) async fn show(
    State(live): State<Arc<Console>>,
    Query(query): Query<ListQuery>,
    visitor: Visitor,
) -> HtmlPage {
    let (accounts, status) = tokio::join!(
        visitor.ask(&live, query.command()),
        visitor.ask(&live, AdminCommand::Status),
    );
    let content = match (&accounts, &status) {
        (Err(error), _) | (_, Err(error)) => layout::failure(error),
        (Ok(accounts), Ok(status)) => chat_box(&visitor, &query, accounts, status),
    };
    visitor.page(&live, "/chat", "Chat", &content)
}

fn chat_box(visitor: &Visitor, query: &ListQuery, accounts: &Value, status: &Value) -> Markup {
    html! {
        p {
            "Each answer is charged to the account, like any request. "
            "A key that works for an hour is made for it."
        }
        noscript { p.notice { "The chat needs JavaScript." } }
        (search("/chat", query))
        @if accounts["has_more"] == true {
            p { "More accounts match than the list below shows: type more of the name." }
        }
        form id="chat" data-form=(visitor.session.form_token) {
            (choices(accounts, status))
            div id="turns" aria-live="polite" {}
            label { span { "Message" } textarea name="message" rows="3" required {} }
            div.acts { button { "Send" } button.quiet type="reset" { "New conversation" } }
        }
    }
}

fn choices(accounts: &Value, status: &Value) -> Markup {
    html! {
        label { span { "Account" } select name="account" required {
            @for account in rows(accounts, "data") {
                option value=(text(&account["id"])) {
                    (text(&account["name"])) ", " (layout::both_balances(account))
                }
            }
        } }
        label { span { "Model" } select name="model" required {
            @for model in rows(status, "models") {
                option value=(text(&model["id"])) { (text(&model["name"])) }
            }
        } }
    }
}

#[derive(Deserialize)]
pub(super) struct ChatQuestion {
    form: String,
    account: AccountId,
    model: String,
    messages: Value,
    /// The ids of the request and of the conversation.
    key: Uuid,
    session: Uuid,
}

/// Passes the question on to the public surface, and its stream back.
pub(super) async fn ask(
    State(live): State<Arc<Console>>,
    visitor: Visitor,
    Json(turn): Json<ChatQuestion>,
) -> Response {
    if !visitor.session.wrote(&turn.form) {
        return (StatusCode::FORBIDDEN, "load the page again").into_response();
    }
    let key = match key_of(&live, &visitor, turn.account).await {
        Ok(key) => key,
        Err(error) => return (StatusCode::FORBIDDEN, error).into_response(),
    };
    let body = json!({
        "model": turn.model,
        "messages": turn.messages,
        "max_tokens": MAX_TOKENS,
        "stream": true,
    });
    let request = Request::builder()
        .method(Method::POST)
        .uri("/v1/chat/completions")
        .header(AUTHORIZATION, format!("Bearer {key}"))
        .header(CONTENT_TYPE, "application/json")
        .header("idempotency-key", turn.key.to_string())
        .header("x-service-session-id", turn.session.to_string())
        .body(Body::from(body.to_string()))
        .expect("invariant: ids and keys are header values");
    let Ok(answer) = live.public.clone().oneshot(request).await;
    answer
}

async fn key_of(live: &Console, visitor: &Visitor, account: AccountId) -> Result<String, String> {
    let (id, now) = (&visitor.session.id, live.node.clock.now());
    let sessions = &live.sessions;
    if let Some(kept) = sessions.chat_key(id, account, now) {
        return Ok(kept);
    }
    let expires_at = UnixMillis(now.0.saturating_add(KEY_MS));
    let label = Some("operator's page".to_owned());
    let create = AdminCommand::KeyCreate { account, label, expires_at: Some(expires_at) };
    let key = visitor.ask(live, create).await?;
    let secret = key["secret"].as_str().ok_or("a key was made without a secret")?.to_owned();
    sessions.keep_chat_key(id, account, (secret.clone(), expires_at), now);
    Ok(secret)
}
