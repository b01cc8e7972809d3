//! The schema of the body of a refusal or failure. The error table writes the body itself.

use schemars::JsonSchema;

/// The `error` member of a body.
#[expect(dead_code, reason = "only its schema is used")]
#[derive(JsonSchema)]
#[schemars(rename = "Error")]
pub struct ErrorObject<'a> {
    /// Stable; what a program looks at.
    code: &'a str,
    /// What went wrong and what to change, for people.
    message: String,
    /// Family of the error.
    #[schemars(rename = "type")]
    family: &'a str,
    /// The member, header or path part that was refused.
    param: Option<&'a str>,
    /// The response's `x-request-id`.
    #[schemars(extend("format" = "uuid"))]
    request_id: &'a str,
}
