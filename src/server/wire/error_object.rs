//! The body of a refusal or failure.

use schemars::JsonSchema;
use serde::Serialize;

/// The `error` member of a body.
#[derive(Serialize, JsonSchema)]
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
