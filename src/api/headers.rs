//! Request headers: the request's id, the session, and what is refused outright.

use super::error::ApiError;
use crate::Api;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use cresset_base::{RequestId, SessionId, hyphenated};
use std::time::Duration;
use uuid::Uuid;

pub const IDEMPOTENCY_KEY: &str = "Idempotency-Key";
pub const SESSION: &str = "X-Service-Session-Id";
/// Lowers the time for which a stream continues after its client has left. It changes no answer, so
/// it is no part of the fingerprint.
pub const DISCONNECT_GRACE: &str = "X-Disconnect-Grace-Seconds";

/// The request's id as its header gave it. `finish_response` reads it once for every request and
/// leaves it among the request's extensions.
pub type KeyRead = Result<RequestId, ApiError>;

/// Extracts what names a completion request, or refuses it and says which headers are wrong: the
/// first one as the parameter, all of them in the message.
pub struct NamedRequest {
    pub id: RequestId,
    pub session: SessionId,
    /// Time for which a stream continues after its client has left, if the client names one.
    pub disconnect_grace: Option<Duration>,
}

impl FromRequestParts<Api> for NamedRequest {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        let read = parts.extensions.get::<KeyRead>().cloned();
        let id = read.expect("invariant: finish_response reads every request's key");
        let session = session(&parts.headers, &api.settings.service_name);
        let limit = api.settings.disconnect_grace_seconds;
        let disconnect_grace = disconnect_grace(&parts.headers, limit);
        let namespaces = refuse_cache_namespaces(&parts.headers);
        match (id, session, disconnect_grace, namespaces) {
            (Ok(id), Ok(session), Ok(disconnect_grace), Ok(())) => {
                Ok(Self { id, session, disconnect_grace })
            }
            (id, session, grace, namespaces) => {
                let all = [id.err(), session.err(), grace.err(), namespaces.err()];
                let all = all.into_iter().flatten();
                Err(all
                    .reduce(|first, next| first.and(&next.to_string()))
                    .expect("invariant: one of them is refused"))
            }
        }
    }
}

/// Reads the request's id: exactly one, a UUID with optional quotes around it.
pub fn idempotency_key(headers: &HeaderMap) -> Result<RequestId, ApiError> {
    let name = HeaderName::from_static("idempotency-key");
    named_uuid(
        headers.get_all(name).iter(),
        IDEMPOTENCY_KEY,
        "reuse it only to retry the same request",
    )
    .map(RequestId)
}

/// Reads the conversation's id, as `X-Service-Session-Id` or under the service's own name; one of
/// them, once.
pub fn session(headers: &HeaderMap, service_name: &str) -> Result<SessionId, ApiError> {
    let own = format!("x-{service_name}-session-id").to_ascii_lowercase();
    let generic = headers.get_all("x-service-session-id").iter();
    let named = headers.get_all(&own).iter().filter(|_| own != "x-service-session-id");
    named_uuid(generic.chain(named), SESSION, "keep it for one conversation").map(SessionId)
}

fn named_uuid<'a>(
    mut values: impl Iterator<Item = &'a HeaderValue>,
    name: &str,
    advice: &str,
) -> Result<Uuid, ApiError> {
    let refuse = |what: &str| {
        ApiError::invalid(name, format!("{what} header {name}. Send one UUID; {advice}."))
    };
    let value = values.next().ok_or_else(|| refuse("Missing"))?;
    if values.next().is_some() {
        return Err(refuse("More than one"));
    }
    let text = value.to_str().unwrap_or_default();
    let text = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
    hyphenated(text).filter(|id| !id.is_nil() && !id.is_max()).ok_or_else(|| refuse("Malformed"))
}

/// Reads the whole seconds, up to the node's own `limit`, that a stream outlives its client.
fn disconnect_grace(headers: &HeaderMap, limit: u64) -> Result<Option<Duration>, ApiError> {
    let mut values = headers.get_all(DISCONNECT_GRACE).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let digits = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let seconds = digits.and_then(|text| text.parse().ok()).filter(|seconds| *seconds <= limit);
    if let (Some(seconds), None) = (seconds, values.next()) {
        return Ok(Some(Duration::from_secs(seconds)));
    }
    let text = format!("{DISCONNECT_GRACE} must be one whole number from 0 to {limit}.");
    Err(ApiError::invalid(DISCONNECT_GRACE, text))
}

/// Headers with which callers try to choose a cache namespace. The node isolates caches by account
/// and refuses these.
const CACHE_HEADERS: [&str; 4] = ["cache-salt", "cache-namespace", "cache-key", "cache-scope"];

pub fn refuse_cache_namespaces(headers: &HeaderMap) -> Result<(), ApiError> {
    let offending =
        headers.keys().find(|name| CACHE_HEADERS.iter().any(|part| name.as_str().contains(part)));
    match offending {
        Some(name) => Err(ApiError::invalid(
            name.as_str(),
            "A cache namespace cannot be chosen by the caller.",
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b";

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let parse = |(name, value): &(&str, &str)| {
            (
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_str(value).unwrap(),
            )
        };
        let mut map = HeaderMap::new();
        for (name, value) in pairs.iter().map(parse) {
            map.append(name, value);
        }
        map
    }

    #[test]
    fn request_ids() {
        let check = |values: &[&str], accepted: bool| {
            let pairs: Vec<_> = values.iter().map(|v| ("Idempotency-Key", *v)).collect();
            assert_eq!(idempotency_key(&headers(&pairs)).is_ok(), accepted, "{values:?}");
        };
        check(&[ID], true);
        check(&[&ID.to_uppercase()], true);
        check(&[&format!("\"{ID}\"")], true);
        check(&["f81d4fae-7dec-11d0-a765-00a0c91e6bf6"], true);
        check(&[], false);
        check(&[ID, ID], false);
        check(&[""], false);
        check(&["00000000-0000-0000-0000-000000000000"], false);
        check(&["ffffffff-ffff-ffff-ffff-ffffffffffff"], false);
        check(&[&ID.replace('-', "")], false);
        check(&[&format!("{{{ID}}}")], false);
        check(&[&format!("urn:uuid:{ID}")], false);
        check(&[&format!("\"{ID}")], false);
        check(&[&format!("{ID}, {ID}")], false);
        check(&["not-a-uuid"], false);
    }

    #[test]
    fn sessions_come_under_either_name_but_once() {
        let check = |pairs: &[(&str, &str)], accepted: bool| {
            assert_eq!(session(&headers(pairs), "Cresset").is_ok(), accepted, "{pairs:?}");
        };
        check(&[("X-Service-Session-Id", ID)], true);
        check(&[("x-cresset-session-id", ID)], true);
        check(&[("X-Service-Session-Id", ID), ("x-cresset-session-id", ID)], false);
        check(&[("x-other-session-id", ID)], false);
        assert!(session(&headers(&[("X-Service-Session-Id", ID)]), "Service").is_ok());
    }

    #[test]
    fn a_grace_is_one_number_up_to_the_setting() {
        let check = |values: &[&str], expect: Option<Option<u64>>| {
            let pairs: Vec<_> = values.iter().map(|v| (DISCONNECT_GRACE, *v)).collect();
            let found = disconnect_grace(&headers(&pairs), 15);
            let param = found.as_ref().err().map(|error| format!("{error:?}"));
            assert!(param.is_none_or(|text| text.contains(DISCONNECT_GRACE)), "{values:?}");
            assert_eq!(found.ok(), expect.map(|s| s.map(Duration::from_secs)), "{values:?}");
        };
        check(&[], Some(None));
        check(&["0"], Some(Some(0)));
        check(&["15"], Some(Some(15)));
        check(&["16"], None);
        check(&["-1"], None);
        check(&["+1"], None);
        check(&["1.5"], None);
        check(&[""], None);
        check(&["99999999999999999999999"], None);
        check(&["1", "1"], None);
    }

    #[test]
    fn cache_namespaces_are_refused() {
        let check = |name: &str, accepted: bool| {
            assert_eq!(
                refuse_cache_namespaces(&headers(&[(name, "x")])).is_ok(),
                accepted,
                "{name}"
            );
        };
        check("x-cache-salt", false);
        check("X-Cresset-Cache-Namespace", false);
        check("prompt-cache-key", false);
        check("cache-control", true);
    }
}
