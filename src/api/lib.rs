//! The HTTP surfaces: public `/v1`, and the operator's listener and socket.
//!
//! The checks on `/v1` have a fixed order: framing and header bounds (`http1_head`), then the
//! credential, its account and a ledger that can vouch for them (`auth`). Completions go on
//! (`handlers::chat`) with the request's own headers, the account's rate limit, size and media
//! type, JSON, idempotency, model, limits, concurrency and credits. A request without a valid
//! credential learns nothing else, not even whether its path exists.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod access_log;
pub mod auth;
pub mod error;
pub mod finish_response;
mod forward;
mod gateway_hint;
pub mod handlers;
pub mod headers;
pub mod openapi;
mod settings;
pub mod sse;
pub mod wire;

pub use error::ApiError;
pub use forward::{Forwarder, forwarding};
pub use gateway_hint::GatewayHint;
pub use settings::{Api, ApiSettings, ChatBounds, ChatLeeway, CredentialSettings};

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use handlers::{chat, count, credits, me, models, requests};

/// The path of completion requests, which is a part of their fingerprints.
pub const COMPLETIONS: &str = "/v1/chat/completions";

/// The public surface. Unknown paths and methods are answered behind the credential check as well.
pub fn router(api: Api) -> Router {
    let plain = Router::new()
        .route("/v1/me", get(me::show))
        .route("/v1/models/{id}", get(models::show))
        .route("/v1/credits", get(credits::show))
        .route(COMPLETIONS, post(chat::create))
        .route("/v1/requests/{id}", get(requests::show).delete(requests::cancel))
        .route("/v1/requests/{id}/receipt", get(requests::receipt))
        .layer(from_fn(wire::query::refuse_any));
    let routes = Router::new()
        .route("/v1/models", get(models::list))
        .merge(plain)
        .fallback(not_found)
        .method_not_allowed_fallback(async || ApiError::MethodNotAllowed)
        .with_state(api.clone());
    guarded(routes, api)
}

/// Clients that look for another interface are told where it is.
async fn not_found(State(api): State<Api>, request: Request) -> ApiError {
    let (head, _) = request.into_parts();
    let gateway = api.settings.gateway.sentence(&head, "speaks other services' interfaces");
    ApiError::NotFound { gateway }
}

/// The public surface for requests that other nodes pass on. There is no way on from here.
pub fn router_for_peers(api: Api) -> Router {
    let services = api.services.clone();
    router(api).layer(from_fn_with_state(services, finish_response::require_forwarded))
}

/// Tells the node's own gateway of the prompts of chat requests, under the same checks: their text
/// or their tokens, or how many these are. No listener serves it.
pub fn prompts(api: Api) -> Router {
    let routes = Router::new()
        .route("/text", post(count::text))
        .route("/tokens", post(count::tokens))
        .fallback(count::count);
    guarded(routes.with_state(api.clone()), api)
}

/// Only requests with a valid credential reach the routes, and every answer is a finished one.
fn guarded(routes: Router, api: Api) -> Router {
    // The layers surround a service, not `routes` itself: there they would be inside the code that
    // adds the Allow header, which a 401 must not carry.
    Router::new()
        .fallback_service(routes)
        .layer(from_fn_with_state(auth::Gate::new(api.clone()), auth::require))
        .layer(from_fn_with_state(api, finish_response::finish_response))
}
