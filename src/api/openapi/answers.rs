//! The responses of an operation: its objects, and its refusals from the error table.

use crate::error::ApiError;
use axum::http::HeaderName;
use cresset_transport::ErrorObject;
use schemars::JsonSchema;
use schemars::generate::SchemaGenerator;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The headers that every response carries.
const ALWAYS: [&str; 3] = ["x-request-id", "cache-control", "x-content-type-options"];

/// The errors that any operation may return.
fn anywhere() -> [ApiError; 4] {
    let invalid =
        ApiError::invalid("id", "The path, the query or a header is invalid; param names what.");
    [
        invalid,
        ApiError::InvalidCredential,
        ApiError::GenerationFailed,
        ApiError::ControlPlaneUnavailable,
    ]
}

/// Collects one operation's responses; `refusals` completes and returns them.
pub(super) struct Answers<'a> {
    schemas: &'a mut SchemaGenerator,
    responses: Map<String, Value>,
    /// Status of the object described last.
    last: String,
}

impl<'a> Answers<'a> {
    pub(super) fn new(schemas: &'a mut SchemaGenerator) -> Self {
        Self { schemas, responses: Map::new(), last: String::new() }
    }

    /// A JSON object under `status`.
    pub(super) fn object<T: JsonSchema>(&mut self, description: &str, status: u16) -> &mut Self {
        let schema = json!(self.schemas.subschema_for::<T>());
        let headers: Map<String, Value> = ALWAYS.map(header_ref).into_iter().collect();
        let response = json!({ "description": description, "headers": headers, "content": { "application/json": { "schema": schema } } });
        self.last = status.to_string();
        self.responses.insert(self.last.clone(), response);
        self
    }

    pub(super) fn with_content(&mut self, media_type: &str, schema: &Value) -> &mut Self {
        self.responses[&self.last]["content"][media_type] = json!({ "schema": schema });
        self
    }

    pub(super) fn with_headers(&mut self, headers: &[(String, Value)]) -> &mut Self {
        for (name, header) in headers {
            self.responses[&self.last]["headers"][name] = header.clone();
        }
        self
    }

    pub(super) fn with_links(&mut self, links: &Value) -> &mut Self {
        self.responses[&self.last]["links"] = links.clone();
        self
    }

    /// Returns the operation's responses, with these refusals and those of every operation.
    pub(super) fn refusals(&mut self, errors: &[ApiError]) -> Value {
        let mut by_status: BTreeMap<u16, Vec<ApiError>> = BTreeMap::new();
        let general = anywhere()
            .into_iter()
            .filter(|general| errors.iter().all(|e| e.code() != general.code()));
        for error in errors.iter().cloned().chain(general) {
            by_status.entry(error.status().as_u16()).or_default().push(error);
        }
        let error_schema = json!(self.schemas.subschema_for::<ErrorObject>());
        for (status, errors) in by_status {
            self.responses.insert(status.to_string(), refusal(&errors, &error_schema));
        }
        Value::Object(std::mem::take(&mut self.responses))
    }
}

/// The errors that share a status.
fn refusal(errors: &[ApiError], error_schema: &Value) -> Value {
    let codes: BTreeSet<&str> = errors.iter().map(ApiError::code).collect();
    let code = json!({ "enum": codes });
    let schema = match errors {
        [ApiError::InvalidCredential] => {
            json!({ "type": "object", "properties": { "code": code }, "required": ["code"], "additionalProperties": false })
        }
        _ => json!({ "allOf": [error_schema], "properties": { "code": code } }),
    };
    let body =
        json!({ "type": "object", "properties": { "error": schema }, "required": ["error"] });
    let lines: Vec<String> =
        errors.iter().map(|error| format!("- `{}`: {error}", error.code())).collect();
    json!({
        "description": lines.join("\n"),
        "headers": refusal_headers(errors),
        "content": { "application/json": { "schema": body } },
    })
}

/// The headers that the error table gives to these errors. A header that only some errors of the
/// status have is not promised.
fn refusal_headers(errors: &[ApiError]) -> Map<String, Value> {
    let mut all: Map<String, Value> = ALWAYS.map(header_ref).into_iter().collect();
    let having = |name: &HeaderName| {
        errors.iter().filter(|error| error.headers().contains_key(name)).count()
    };
    for name in
        errors.iter().flat_map(|error| error.headers().into_iter().filter_map(|(name, _)| name))
    {
        let component = if having(&name) == errors.len() {
            name.to_string()
        } else {
            format!("{name}.optional")
        };
        all.insert(name.to_string(), header_ref(&component).1);
    }
    all
}

/// A header by name, as a response refers to it.
pub(super) fn header_ref(name: &str) -> (String, Value) {
    (name.to_owned(), json!({ "$ref": format!("#/components/headers/{name}") }))
}

/// All headers that responses refer to.
pub(super) fn headers() -> Value {
    let header = |required: bool, description: &str, schema: Value| {
        json!({
            "required": required,
            "description": description,
            "schema": schema,
        })
    };
    let uuid = json!({ "type": "string", "format": "uuid" });
    let seconds = json!({ "type": "integer", "minimum": 1, "maximum": 60 });
    let wait = "Seconds to wait before the same request may be sent again.";
    json!({
        "x-request-id": header(true, "The request's Idempotency-Key where there is one, else a fresh UUID.", uuid),
        "cache-control": header(true, "Nothing between client and node may keep a response.", json!({ "type": "string" })),
        "x-content-type-options": header(true, "Clients take the media type as it is.", json!({ "const": "nosniff" })),
        "x-should-retry": header(
            true,
            "Whether a client may send the same request again by itself.",
            json!({ "type": "string", "enum": ["true", "false"] }),
        ),
        "retry-after": header(true, wait, seconds.clone()),
        "retry-after.optional": header(false, wait, seconds),
        "www-authenticate": header(true, "The scheme of credentials.", json!({ "const": "Bearer" })),
        "idempotent-replayed": header(
            false,
            "The answer was made before, and is not charged again.",
            json!({ "type": "string", "const": "true" }),
        ),
        "x-ignored-params": header(
            false,
            "Members of the body that were accepted and have no effect, separated by commas.",
            json!({ "type": "string" }),
        ),
    })
}
