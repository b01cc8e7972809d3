//! The public surface described as OpenAPI 3.1, from the types that are sent and read and from the
//! error table.

mod answers;

use crate::ApiSettings;
use crate::error::ApiError;
use crate::headers::{DISCONNECT_GRACE, IDEMPOTENCY_KEY};
use crate::wire::chat_schema::{self, BODY, UUID};
use crate::wire::completion::{Chunk, Completion};
use crate::wire::objects::{Me, ModelObject, ModelPage};
use crate::wire::query::Page;
use answers::{Answers, header_ref};
use cresset_request::{CreditBalance, ReceiptEnvelope, RequestObject};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

const ABOUT: &str = "Text generation with accounts, keys and exact credits. Amounts are whole numbers of microcredits in \
                     strings, times are Unix seconds.";

/// The whole document, for a surface with these settings.
pub fn document(settings: &ApiSettings) -> Value {
    let sent = SchemaSettings::draft2020_12().for_serialize();
    let mut sent =
        sent.with(|s| s.definitions_path = "/components/schemas".into()).into_generator();
    let paths =
        paths(settings, &mut sent, &json!({ "$ref": format!("#/components/schemas/{BODY}") }));
    sent.subschema_for::<Chunk>();
    let mut schemas = sent.take_definitions(true);
    schemas.extend(chat_schema::published());
    schemas.sort_keys();
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Cresset", "version": env!("CARGO_PKG_VERSION"), "description": ABOUT },
        "servers": [{ "url": format!("http://{}", settings.public) }],
        "security": [{ "bearer": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "bearer": {
                "type": "http",
                "scheme": "bearer",
                "description": "An account's API key, or an application's access token.",
            } },
            "parameters": parameters(settings),
            "headers": answers::headers(),
            "schemas": schemas,
        },
    })
}

fn paths(settings: &ApiSettings, schemas: &mut SchemaGenerator, body: &Value) -> Value {
    let mut answers = Answers::new(schemas);
    json!({
        "/v1/me": { "get": {
            "operationId": "showAccount",
            "summary": "Who the credential belongs to",
            "responses": answers.object::<Me>("The account", 200).refusals(&[]),
        } },
        "/v1/models": { "get": {
            "operationId": "listModels",
            "summary": "The models that the account can use now",
            "parameters": [parameter("limit"), parameter("after")],
            "responses": answers.object::<ModelPage>("A page of models, by id", 200).refusals(&[]),
        } },
        "/v1/models/{modelId}": { "get": {
            "operationId": "showModel",
            "summary": "One of these models",
            "parameters": [parameter("modelId")],
            "responses": answers.object::<ModelObject>("The model", 200).refusals(&[ApiError::ModelNotFound]),
        } },
        "/v1/credits": { "get": {
            "operationId": "showCredits",
            "summary": "Balances, and what of them can be spent",
            "responses": answers.object::<CreditBalance>("The account's balances", 200).refusals(&[]),
        } },
        "/v1/chat/completions": { "post": completion(settings, &mut answers, body) },
        "/v1/requests/{requestId}": {
            "parameters": [parameter("requestId")],
            "get": {
                "operationId": "showRequest",
                "summary": "Where a request stands",
                "responses": answers
                    .object::<RequestObject>("The request", 200)
                    .refusals(&[ApiError::RequestNotFound]),
            },
            "delete": {
                "operationId": "cancelRequest",
                "summary": "Ends a request; one that has ended stays as it is",
                "responses": answers
                    .object::<RequestObject>("The request, ended", 200)
                    .object::<RequestObject>("The request, still ending", 202)
                    .refusals(&[ApiError::RequestNotFound]),
            },
        },
        "/v1/requests/{requestId}/receipt": { "get": receipt(&mut answers) },
    })
}

fn receipt(answers: &mut Answers) -> Value {
    let refusals: Vec<ApiError> = ApiError::each()
        .into_iter()
        .filter(|error| {
            matches!(
                error,
                ApiError::RequestNotFound
                    | ApiError::NoReceipt { .. }
                    | ApiError::RequestInProgress
                    | ApiError::RequestResultExpired
            )
        })
        .collect();
    json!({
        "operationId": "showReceipt",
        "summary": "The signed receipt of a completed request",
        "description": "It tells by digests which prompt was answered with what, by which model and build, and what was \
                        charged. It is kept as long as the answer.",
        "parameters": [parameter("requestId")],
        "responses": answers.object::<ReceiptEnvelope>("The receipt", 200).refusals(&refusals),
    })
}

fn completion(settings: &ApiSettings, answers: &mut Answers, body: &Value) -> Value {
    // Every error of the table is described here, unless it belongs to other paths alone.
    let elsewhere = |error: &ApiError| {
        matches!(
            error,
            ApiError::RequestNotFound
                | ApiError::NoReceipt { .. }
                | ApiError::NotFound { .. }
                | ApiError::MethodNotAllowed
        )
    };
    let refusals: Vec<ApiError> =
        ApiError::each().into_iter().filter(|error| !elsewhere(error)).collect();
    let stream = "Server-sent events. Each is one line `data: {json}`, a ChatCompletionChunk, with a blank line after it. The last \
                  is `data: [DONE]`. Before it there may be one whose JSON is an error's body. Lines that begin with a colon \
                  keep the connection alive.";
    let also = [header_ref("idempotent-replayed"), header_ref("x-ignored-params")];
    let responses = answers
        .object::<Completion>("The answer; with `stream`, the answer as events", 200)
        .with_content("text/event-stream", &json!({ "type": "string", "description": stream }))
        .with_headers(&also)
        .with_links(&json!({ "show": link("showRequest"), "cancel": link("cancelRequest"), "receipt": link("showReceipt") }))
        .refusals(&refusals);
    json!({
        "operationId": "createChatCompletion",
        "summary": "Answers a conversation",
        "description": "Sending the same request again with the same Idempotency-Key attaches to it while it runs, \
                        returns its answer afterwards, and is never charged twice.",
        "parameters": [
            parameter("idempotencyKey"),
            parameter("sessionId"),
            parameter("neutralSessionId"),
            parameter("disconnectGrace"),
        ],
        "requestBody": {
            "required": true,
            "description": format!("At most {} bytes. Prompt and output fit the model's `context_tokens`.", settings.http.max_body_bytes),
            "content": { "application/json": { "schema": body } },
        },
        "responses": responses,
    })
}

/// A link from a completion's response to its request object.
fn link(operation: &str) -> Value {
    json!({ "operationId": operation, "parameters": { "requestId": "$response.header.x-request-id" } })
}

fn parameter(name: &str) -> Value {
    json!({ "$ref": format!("#/components/parameters/{name}") })
}

/// The session header under every service name.
const NEUTRAL_SESSION: &str = "X-Service-Session-Id";

fn parameters(settings: &ApiSettings) -> Value {
    let id = json!({ "type": "string", "format": "uuid", "pattern": UUID });
    // The nil and the max UUID are no ids.
    let real = UUID.replacen('^', "^(?![0-]+$)(?![fF-]+$)", 1);
    let named = json!({ "type": "string", "format": "uuid", "pattern": real });
    let limit = json!({ "type": "integer", "minimum": 1, "maximum": Page::LARGEST, "default": Page::LARGEST });
    let session = format!("X-{}-Session-Id", settings.service_name);
    let at = |place: &str, name: &str, about: &str, schema: &Value| {
        let required = place != "query";
        json!({ "name": name, "in": place, "required": required, "description": about, "schema": schema })
    };
    let mut all = Map::new();
    let mut add = |key: &str, value: Value| drop(all.insert(key.to_owned(), value));
    add("limit", at("query", "limit", "Models on the page.", &limit));
    add("after", at("query", "after", "The `next_after` of the page before.", &id));
    add("modelId", at("path", "modelId", "A model's id.", &id));
    add(
        "requestId",
        at("path", "requestId", "The Idempotency-Key that the request was sent with.", &id),
    );
    let key = "Names this request: a fresh UUID for a new request, the same one to send a request again. It stays \
               taken for as long as the operator keeps the ids of ended requests (30 days by default) and is free \
               afterwards.";
    add("idempotencyKey", at("header", IDEMPOTENCY_KEY, key, &named));
    // The document has no way to ask for one of two headers.
    let either = |name: &str, other: &str| {
        let about = format!(
            "Names the conversation: a UUID that stays the same over its requests. Exactly one of this header and {other} \
             is required."
        );
        json!({ "name": name, "in": "header", "required": false, "description": about, "schema": named })
    };
    add("sessionId", either(&session, NEUTRAL_SESSION));
    add("neutralSessionId", either(NEUTRAL_SESSION, &session));
    let about = "Whole seconds that a stream goes on after its client has left. It lowers the node's own time for this \
                 request, and is no part of what makes two requests equal.";
    let seconds =
        json!({ "type": "integer", "minimum": 0, "maximum": settings.disconnect_grace_seconds });
    add(
        "disconnectGrace",
        json!({ "name": DISCONNECT_GRACE, "in": "header", "required": false, "description": about, "schema": seconds }),
    );
    Value::Object(all)
}
