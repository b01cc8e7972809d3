//! Opening and closing sessions.

use super::{cookie_name, layout, session_of};
use crate::{Console, remote};
use axum::Form;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{HeaderMap, SET_COOKIE};
use axum::response::{Html, IntoResponse, Redirect, Response};
use cresset_commands::{Role, TokenRefusal, digest};
use cresset_tls::ListenerName;
use maud::{Markup, html};
use serde::Deserialize;
use std::sync::Arc;

pub(super) fn refusal(why: &str) -> Response {
    (StatusCode::FORBIDDEN, outside("Not here", &html! { p { (why) } })).into_response()
}

fn outside(title: &str, content: &Markup) -> Html<String> {
    let body = html! { main id="content" { h1 { (title) } (content) } };
    Html(layout::written(layout::plain(title, &body)))
}

pub(super) async fn login_form(State(live): State<Arc<Console>>) -> Response {
    remote::readable_by_others(&live.start)
        .map_or_else(|| login_page(None).into_response(), refusal)
}

fn login_page(error: Option<&str>) -> Html<String> {
    outside(
        "Operators",
        &html! {
            @if let Some(error) = error { p.notice.error role="alert" { (error) } }
            p {
                "On the node's machine, " code { "cresset admin link" }
                " prints an address that opens this page."
            }
            form method="post" action="/login" {
                label { span { "Operator token" }
                    input type="password" name="token" required autocomplete="current-password";
                }
                button { "Open" }
            }
        },
    )
}

#[derive(Deserialize)]
pub(super) struct LoginForm {
    token: String,
}

pub(super) async fn login(
    State(live): State<Arc<Console>>,
    Form(form): Form<LoginForm>,
) -> Response {
    if let Some(why) = remote::readable_by_others(&live.start) {
        return refusal(why);
    }
    let holder = match remote::admit(&live, form.token.trim()).await {
        Ok(holder) => holder,
        Err(TokenRefusal::TooMany) => {
            return (StatusCode::TOO_MANY_REQUESTS, login_page(Some(remote::TOO_MANY)))
                .into_response();
        }
        Err(TokenRefusal::Unknown | TokenRefusal::Ended) => {
            let page = login_page(Some("This is no valid operator token."));
            return (StatusCode::UNAUTHORIZED, page).into_response();
        }
    };
    let (digest, roles) = (digest(form.token.trim()), holder.roles());
    let id = live.sessions.open(holder.name, Some(digest), roles, live.node.clock.now());
    opened(&live, &id)
}

/// A page with a button: programs that look at addresses in messages would use the link up, and a
/// browser that comes from another site does not send the cookie on.
pub(super) async fn link_form(
    State(live): State<Arc<Console>>,
    Path(code): Path<String>,
) -> Response {
    let Some(roles) = live.sessions.roles_of_link(&code, live.node.clock.now()) else {
        return unknown_link();
    };
    let roles: Vec<_> = roles.into_iter().map(Role::name).collect();
    let roles = if roles.is_empty() { "read".to_owned() } else { roles.join(", ") };
    let content = html! {
        form method="post" action={ "/link/" (code) } { button { "Open the page (" (roles) ")" } }
    };
    outside("Operators", &content).into_response()
}

pub(super) async fn open_link(
    State(live): State<Arc<Console>>,
    Path(code): Path<String>,
) -> Response {
    match live.sessions.open_link(&code, live.node.clock.now()) {
        Some(id) => opened(&live, &id),
        None => unknown_link(),
    }
}

fn unknown_link() -> Response {
    let content = html! {
        p {
            "This link was used, or is older than five minutes: "
            code { "cresset admin link" } " makes another."
        }
    };
    (StatusCode::NOT_FOUND, outside("No such link", &content)).into_response()
}

fn opened(live: &Console, id: &str) -> Response {
    let secure =
        if live.start.tls.acceptor(ListenerName::Operator).is_some() { "; Secure" } else { "" };
    let cookie = format!("{}={id}; Path=/; HttpOnly; SameSite=Strict{secure}", cookie_name(live));
    ([(SET_COOKIE, cookie)], Redirect::to("/")).into_response()
}

#[derive(Deserialize)]
pub(super) struct LogoutForm {
    form: String,
}

pub(super) async fn logout(
    State(live): State<Arc<Console>>,
    headers: HeaderMap,
    Form(form): Form<LogoutForm>,
) -> Response {
    if let Some(session) = session_of(&live, &headers).filter(|session| session.wrote(&form.form)) {
        live.sessions.close(&session.id, live.node.clock.now());
    }
    Redirect::to("/login").into_response()
}
