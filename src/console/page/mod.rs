//! The operator's page in a browser: what the node does, accounts, models, a chat box. It shows and
//! gives the commands of `AdminCommand`, so that roles and the log of acts are those of every other
//! way to give them.

mod accounts;
mod act;
mod acts;
mod chart;
mod chat;
pub(crate) mod history;
mod layout;
mod models;
mod overview;
mod plans;
mod requests;
mod visit;

use crate::{Console, remote};
use axum::Router;
use axum::extract::FromRequestParts;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, COOKIE, HeaderMap, HeaderName,
    HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::request::Parts;
use axum::middleware::map_response;
use axum::response::sse::{Event, Sse};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use cresset_commands::{AdminCommand, Operator, SessionView};
use futures_util::future::BoxFuture;
use futures_util::stream;
use maud::Markup;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// A file that pages name, at an address that changes with its content.
struct Asset {
    path: String,
    content: &'static str,
    media_type: &'static str,
}

impl Asset {
    fn new(content: &'static str, kind: &str, media_type: &'static str) -> Self {
        let digest = hex::encode(&Sha256::digest(content)[..8]);
        Self { path: format!("/assets/{digest}.{kind}"), content, media_type }
    }
}

static STYLE: LazyLock<Asset> =
    LazyLock::new(|| Asset::new(include_str!("page.css"), "css", "text/css; charset=utf-8"));
static SCRIPT: LazyLock<Asset> =
    LazyLock::new(|| Asset::new(include_str!("page.js"), "js", "text/javascript; charset=utf-8"));

/// Nothing comes from elsewhere, nothing is sent elsewhere, and no page stands in a frame.
const CONTENT_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; \
    img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; \
    frame-ancestors 'none'";

/// Mounted by `health`, on the operator's own listener only.
pub(super) fn router(live: Arc<Console>) -> Router {
    let asset = |asset: &'static LazyLock<Asset>| {
        get(async move || {
            let kept = "public, max-age=31536000, immutable";
            ([(CONTENT_TYPE, asset.media_type), (CACHE_CONTROL, kept)], asset.content)
        })
    };
    Router::new()
        .route("/", get(overview::show))
        .route("/events", get(overview::events))
        .merge(account_pages())
        .route("/models", get(models::show))
        .route("/models/events", get(models::events))
        .route("/chat", get(chat::show).post(chat::ask))
        .route("/acts", get(acts::show))
        .route("/act", post(act::submit))
        .route("/login", get(visit::login_form).post(visit::login))
        .route("/logout", post(visit::logout))
        .route("/link/{code}", get(visit::link_form).post(visit::open_link))
        .route(&STYLE.path, asset(&STYLE))
        .route(&SCRIPT.path, asset(&SCRIPT))
        .layer(map_response(private))
        .with_state(live)
}

fn account_pages() -> Router<Arc<Console>> {
    Router::new()
        .route("/accounts", get(accounts::list))
        .route("/accounts/{id}", get(accounts::show))
        .route("/accounts/{id}/requests", get(requests::list))
        .route("/accounts/{id}/requests/{request}", get(requests::show))
}

/// Headers of every page. What has none of its own is kept nowhere.
async fn private(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let same_origin = HeaderValue::from_static("same-origin");
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_POLICY));
    // With `no-referrer`, browsers would send forms as coming from nowhere, which is refused.
    headers.insert(REFERRER_POLICY, same_origin.clone());
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    for name in ["cross-origin-opener-policy", "cross-origin-resource-policy"] {
        headers.insert(HeaderName::from_static(name), same_origin.clone());
    }
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

type HtmlPage = Html<String>;

/// Somebody with a session. Without one a request is sent to the login.
#[derive(Clone)]
struct Visitor {
    session: SessionView,
}

impl FromRequestParts<Arc<Console>> for Visitor {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, live: &Arc<Console>) -> Result<Self, Response> {
        if let Some(why) = remote::readable_by_others(&live.start) {
            return Err(visit::refusal(why));
        }
        let session = session_of(live, &parts.headers)
            .ok_or_else(|| Redirect::to("/login").into_response())?;
        Ok(Self { session })
    }
}

fn session_of(live: &Console, headers: &HeaderMap) -> Option<SessionView> {
    let (name, now) = (cookie_name(live), live.node.clock.now());
    let cookies = headers.get_all(COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    let pairs = cookies.flat_map(|cookies| cookies.split(';')).filter_map(|pair| {
        let (found, value) = pair.trim().split_once('=')?;
        (found == name).then_some(value)
    });
    let session = pairs.into_iter().find_map(|id| live.sessions.find(id, now))?;
    is_open(live, &session).then_some(session)
}

/// Whether the session goes on: one that was opened with a token ends with it.
fn is_open(live: &Console, session: &SessionView) -> bool {
    let now = live.node.clock.now();
    let valid = |token: &String| live.files.tokens.is_valid(token, now);
    if !session.token.as_ref().is_none_or(valid) {
        live.sessions.close(&session.id, now);
    }
    live.sessions.is_open(&session.id, now)
}

/// Cookies are those of a host, whatever the port, so that nodes on one machine need names apart.
fn cookie_name(live: &Console) -> String {
    format!("cresset-{}", live.start.operator.map_or(0, |at| at.port()))
}

impl Visitor {
    async fn ask(&self, live: &Console, command: AdminCommand) -> Result<Value, String> {
        let done = Operator::of(live).execute_for(&self.session.actor, command).await;
        done.map_err(|error| error.to_string())
    }

    /// A page, with what the visitor has to be told.
    fn page(&self, live: &Console, at: &str, title: &str, content: &Markup) -> HtmlPage {
        let notices = live.sessions.take_notices(&self.session.id, live.node.clock.now());
        Html(layout::written(layout::page(&self.session, &notices, at, title, content)))
    }
}

/// A part of a page again and again, until the session or the node ends.
fn parts(
    live: Arc<Console>,
    visitor: Visitor,
    every: Duration,
    part: for<'a> fn(&'a Console, &'a Visitor) -> BoxFuture<'a, Markup>,
) -> Response {
    let parts = stream::unfold((live, visitor), move |(live, visitor)| async move {
        tokio::time::sleep(every).await;
        let ends = live.node.is_draining() || live.handed_over.is_cancelled();
        if ends || !is_open(&live, &visitor.session) {
            return None;
        }
        // A line break would begin another line of the event.
        let html = layout::written(part(&live, &visitor).await).replace('\n', "&#10;");
        let event = Event::default().event("part").retry(Duration::from_secs(3)).data(html);
        Some((Ok::<_, Infallible>(event), (live, visitor)))
    });
    Sse::new(parts).into_response()
}
