//! Who is asking: one Bearer credential becomes an account and a scope, or the request ends here.

#![expect(clippy::disallowed_methods, reason = "failed credentials are limited per second")]

use super::error::ApiError;
use super::headers;
use super::transport::permits::Peer;
use crate::ids::RequestId;
use crate::ledger::secret;
use crate::ledger::{Account, AccountStatus, Credential, RequestKey};
use crate::request::services::Node;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::time::Instant;
use subtle::ConstantTimeEq;

/// A verified credential and its account.
#[derive(Clone, Debug)]
pub struct Caller {
    pub account: Account,
    pub credential: Credential,
}

impl Caller {
    /// Where this caller's request with the given id lives.
    pub fn key(&self, request: RequestId) -> RequestKey {
        RequestKey { account: self.account.id, application: self.credential.application, request }
    }
}

/// Middleware over every path, unknown ones included.
pub async fn require(State(node): State<Arc<Node>>, mut request: Request, next: Next) -> Response {
    let caller = match authenticate(&node, request.headers()).await {
        Ok(caller) => caller,
        Err(error) => return refuse(&node, request.extensions().get::<Peer>(), error),
    };
    request.extensions_mut().insert(Arc::new(caller));
    next.run(request).await
}

async fn authenticate(node: &Node, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let token = headers::bearer(headers).ok_or(ApiError::InvalidCredential)?;
    let digest = secret::digest(&node.config.credentials.prefix, token)
        .ok_or(ApiError::InvalidCredential)?;
    let found = node.store.credential_and_account(&digest).await?;
    let found = found.map(|(credential, account)| Caller { account, credential });
    let now = node.clock.now();
    let valid = |caller: &Caller| {
        let Credential { revoked_at, expires_at, digest: stored, .. } = &caller.credential;
        revoked_at.is_none()
            && expires_at.is_none_or(|end| now < end)
            && caller.account.status == AccountStatus::Active
            && bool::from(stored.ct_eq(&digest))
    };
    found.filter(valid).ok_or(ApiError::InvalidCredential)
}

/// A peer that keeps guessing has to open a new connection for every guess. That is all: a valid
/// credential is never refused for what others behind the same address send, so it has to be looked
/// up, which costs less than reading the request did.
fn refuse(node: &Node, peer: Option<&Peer>, error: ApiError) -> Response {
    let guessing = error == ApiError::InvalidCredential
        && peer.is_some_and(|peer| !node.guesses.allow(*peer, Instant::now()));
    let mut response = error.into_response();
    if guessing {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
