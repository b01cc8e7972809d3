//! The shapes of queries, bodies and objects on the wire. Only this module knows field names.

pub mod chat_request;
pub mod chat_schema;
pub mod completion;
pub mod error_object;
pub mod fields;
pub mod json;
pub mod messages;
pub mod objects;
pub mod query;
mod schemas;

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// An object as a JSON response.
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        let body =
            serde_json::to_vec(&self.0).expect("invariant: response objects have only string keys");
        ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body)
            .into_response()
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
