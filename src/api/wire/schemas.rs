//! JSON schemas of the catalogue's types, as the public document shows them. The types themselves
//! do not depend on the API.

use schemars::JsonSchema;

// A comment for readers alone: a doc comment would become a description in the document.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "only its schema is used")]
#[schemars(rename = "Upstream", deny_unknown_fields)]
pub(super) struct UpstreamSchema {
    name: String,
    url: Option<String>,
    revision: Option<String>,
    /// SPDX identifier.
    license: String,
}
