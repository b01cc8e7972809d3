//! Why a request is refused before it is one, and the answer to it.

use crate::HttpSettings;
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A fault of the line and headers of a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum HeadError {
    #[error("This is not a well-formed HTTP request. {0}")]
    Malformed(&'static str),
    #[error(
        "The request line and headers are larger than {bytes} bytes, or more than {headers} headers."
    )]
    TooLarge { bytes: usize, headers: usize },
    #[error("The request line and headers did not arrive in time.")]
    Timeout,
}

impl HeadError {
    pub const CODE: &str = "invalid_request";
    pub const FAMILY: &str = "invalid_request_error";

    pub fn too_large(limits: &HttpSettings) -> Self {
        Self::TooLarge { bytes: limits.max_header_bytes, headers: limits.max_headers }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge { .. } => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Timeout => StatusCode::REQUEST_TIMEOUT,
        }
    }

    /// The response to bytes that were refused before they became a request.
    pub(crate) fn response(&self) -> Response {
        let id = Uuid::now_v7();
        let request_id = id.to_string();
        let error = ErrorObject {
            code: Self::CODE,
            message: self.to_string(),
            family: Self::FAMILY,
            param: None,
            request_id: &request_id,
        };
        let status = self.status();
        let mut response = (status, [("x-should-retry", "false")]).into_response();
        set_json(&mut response, &error.body());
        set_headers(&mut response, id);
        tracing::debug!(status = status.as_u16(), code = Self::CODE, request_id, "refused");
        response
    }
}

/// The `error` member of a body.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Error")]
pub struct ErrorObject<'a> {
    /// Stable; what a program looks at.
    pub code: &'a str,
    /// What went wrong and what to change, for people.
    pub message: String,
    /// Family of the error.
    #[serde(rename = "type")]
    pub family: &'a str,
    /// The member, header or path part that was refused.
    pub param: Option<&'a str>,
    /// The response's `x-request-id`.
    #[schemars(extend("format" = "uuid"))]
    pub request_id: &'a str,
}

impl ErrorObject<'_> {
    pub fn body(&self) -> Value {
        json!({ "error": self })
    }
}

/// Gives a response this body and its length.
pub fn set_json(response: &mut Response, body: &Value) {
    let text = body.to_string();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CONTENT_LENGTH, text.len().into());
    *response.body_mut() = Body::from(text);
}

/// Sets the headers of every response: its request id, and its cache rules.
pub fn set_headers(response: &mut Response, id: Uuid) {
    let text = HeaderValue::from_str(&id.hyphenated().to_string())
        .expect("invariant: a UUID is a header value");
    let headers = response.headers_mut();
    // The answer of another node has its own.
    headers.entry(REQUEST_ID).or_insert(text);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("private, no-store"));
}
