//! Commands from other machines: the route of the operator's socket on the operator's listener, for
//! holders of a token.

use crate::{Console, socket};
use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::response::Response;
use axum::routing::post;
use bytes::Bytes;
use cresset_commands::socket::ROUTE;
use cresset_commands::{Actor, AdminError, Live, StartState, TokenRefusal};
use cresset_tls::ListenerName;
use std::sync::Arc;

/// Mounted by `health`, on the operator's own listener only.
pub(super) fn router(live: Arc<Console>) -> Router {
    Router::new().route(ROUTE, post(command)).with_state(live)
}

async fn command(State(live): State<Arc<Console>>, headers: HeaderMap, body: Bytes) -> Response {
    match holder(&live, &headers).await {
        Ok(actor) => socket::execute(&live, &actor, &body).await,
        Err(error) => socket::refused(&error),
    }
}

/// Who holds the token that came with a request.
async fn holder(live: &Live, headers: &HeaderMap) -> Result<Actor, AdminError> {
    if let Some(why) = readable_by_others(&live.start) {
        return Err(AdminError::Forbidden(why.into()));
    }
    let sent = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = sent.and_then(|sent| sent.strip_prefix("Bearer ")).unwrap_or_default();
    admit(live, token.trim()).await.map_err(|why| {
        if why == TokenRefusal::TooMany {
            return AdminError::Unavailable(TOO_MANY.into());
        }
        let text = "commands need a valid operator token (Authorization: Bearer …): \
                    `cresset admin token create` on the node's machine makes one";
        AdminError::Unauthorized(text.into())
    })
}

pub(super) const TOO_MANY: &str = "many wrong tokens came at the same time: try again in a second";

/// Who holds a token; refusals are counted.
pub(super) async fn admit(live: &Live, token: &str) -> Result<Actor, TokenRefusal> {
    let admitted = live.files.tokens.admit(token, live.node.store.now()).await;
    if let Err(why) = admitted {
        live.node.metrics.wrong_operator_token(why.word());
    }
    admitted
}

/// Why no secret may be sent to this listener; `None` if it speaks TLS or is this machine's alone.
pub(super) fn readable_by_others(start: &StartState) -> Option<&'static str> {
    let is_private = start.operator.is_none_or(|at| at.ip().is_loopback())
        || start.tls.acceptor(ListenerName::Operator).is_some();
    (!is_private).then_some(
        "this listener takes no token, because others can read what is sent to it: add operator \
         to tls.listeners, or let it listen on a loopback address",
    )
}
