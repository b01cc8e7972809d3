//! The credential check: one Bearer credential gives an account and a scope, or the request is
//! refused.

#![expect(clippy::disallowed_methods, reason = "failed credentials are limited per second")]

use super::access_log::AccessLine;
use super::error::ApiError;
use crate::{Api, ApiSettings};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use cresset_ledger::secret;
use cresset_request::{Caller, Services};
use cresset_transport::AuthFailures;
use cresset_transport::Peer;
use std::sync::Arc;
use std::time::Instant;
use subtle::ConstantTimeEq;

/// The state of the credential check: the ledger, and the count of failures by peer.
#[derive(Clone)]
pub struct Gate {
    services: Arc<Services>,
    settings: Arc<ApiSettings>,
    failures: Arc<AuthFailures>,
}

impl Gate {
    pub fn new(Api { services, settings }: Api) -> Self {
        let failures = Arc::new(AuthFailures::new(settings.http.failed_auth_per_minute));
        Self { services, settings, failures }
    }
}

/// Middleware over every path, unknown ones included.
pub async fn require(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let caller = match authenticate(&gate, request.headers()).await {
        Ok(caller) => caller,
        Err(error) => return refuse(&gate.failures, request.extensions().get::<Peer>(), error),
    };
    if let Some(line) = request.extensions().get::<Arc<AccessLine>>() {
        line.caller(&caller);
    }
    request.extensions_mut().insert(Arc::new(caller));
    next.run(request).await
}

async fn authenticate(gate: &Gate, headers: &HeaderMap) -> Result<Caller, ApiError> {
    let token = bearer(headers).ok_or(ApiError::InvalidCredential)?;
    let Gate { services, settings, .. } = gate;
    let digest =
        secret::digest(&settings.credentials.prefix, token).ok_or(ApiError::InvalidCredential)?;
    let found = services.store.credential_and_account(&digest).await?;
    let found = found.map(|(credential, account)| Caller { account, credential });
    let now = services.store.now();
    let valid = |Caller { account, credential }: &Caller| {
        credential.authorizes(account, now) && bool::from(credential.digest.ct_eq(&digest))
    };
    found.filter(valid).ok_or(ApiError::InvalidCredential)
}

/// The token of exactly one `Authorization: Bearer …`.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// A peer that keeps guessing has to open a new connection for every guess. There is no further
/// penalty: a valid credential is never refused for what others from the same address send, so it
/// has to be looked up, which costs less than reading the request did.
fn refuse(failures: &AuthFailures, peer: Option<&Peer>, error: ApiError) -> Response {
    let guessing = error == ApiError::InvalidCredential
        && peer.is_some_and(|peer| !failures.allow(*peer, Instant::now()));
    let mut response = error.into_response();
    if guessing {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials() {
        let check = |values: &[&'static str], expect: Option<&str>| {
            let value = |text: &&'static str| HeaderValue::from_static(text);
            let pairs = values.iter().map(|text| (header::AUTHORIZATION, value(text)));
            assert_eq!(bearer(&pairs.collect()), expect);
        };
        check(&["Bearer abc"], Some("abc"));
        check(&["bearer abc"], Some("abc"));
        check(&["Basic abc"], None);
        check(&["Bearer "], None);
        check(&["Bearer"], None);
        check(&["Bearer a", "Bearer a"], None);
        check(&[], None);
    }
}
