//! Cross-origin resource sharing (CORS): web pages that may use the gateway, and the headers by
//! which a browser learns that it may.

use super::answer::GatewayBody;
use http_body_util::{Either, Full};
use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, HeaderName, HeaderValue, ORIGIN, VARY,
};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE");
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, x-should-retry, retry-after, idempotent-replayed, x-ignored-params",
);
/// Seconds for which a browser may keep the answer to a preflight request for one path.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// The origin of a request, if it is among those allowed. What tells the origin is then taken off
/// the request, which counts as one of no page from there on.
pub(super) fn take_allowed(headers: &mut HeaderMap, allowed: &[String]) -> Option<HeaderValue> {
    let mut all = headers.get_all(ORIGIN).iter();
    let origin = all.next().filter(|_| all.next().is_none())?.clone();
    if !allowed.iter().any(|own| origin == own.as_str()) {
        return None;
    }
    headers.remove(ORIGIN);
    headers.remove(SEC_FETCH_SITE);
    Some(origin)
}

/// Whether this is a preflight request: a browser asks what a page may send.
pub(super) fn is_preflight(head: &Parts) -> bool {
    head.method == Method::OPTIONS && head.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer to a preflight request of an allowed origin.
pub(super) fn preflight_response(head: &Parts) -> Response<GatewayBody> {
    let mut answer = Response::new(Either::Right(Full::default()));
    *answer.status_mut() = StatusCode::NO_CONTENT;
    let headers = answer.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
    // Credentials are headers here, and never cookies, so a page may send every header it has.
    if let Some(asked) = head.headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    answer
}

/// Lets a page of `origin` read the answer.
pub(super) fn allow_origin<B>(answer: &mut Response<B>, origin: HeaderValue) {
    let headers = answer.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    headers.append(VARY, HeaderValue::from_static("Origin"));
}
