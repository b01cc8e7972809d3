//! Lists of models as other services give them, from the node's own.

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The version of Ollama whose interface is spoken. Clients compare it before they ask anything.
pub(crate) const OLLAMA_VERSION: &str = "0.40.0";

/// `GET /v1/models` for Anthropic's clients.
pub(crate) fn anthropic(models: &[Value]) -> Value {
    let data = models.iter().map(|model| {
        json!({
            "type": "model", "id": model["id"], "display_name": model["release_label"],
            "created_at": time(model),
        })
    });
    let id = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
    json!({
        "data": data.collect::<Vec<_>>(), "has_more": false, "first_id": id(models.first()),
        "last_id": id(models.last()),
    })
}

/// Ollama's `GET /api/tags`.
pub(crate) fn ollama_tags(models: &[Value]) -> Value {
    let tags = models.iter().map(|model| {
        json!({
            "name": model["id"], "model": model["id"], "modified_at": time(model),
            // Clients are not told the size of a release.
            "size": 0, "digest": release_digest(model), "details": details(),
        })
    });
    json!({ "models": tags.collect::<Vec<_>>() })
}

/// Ollama's `POST /api/show`.
pub(crate) fn ollama_show(model: &Value) -> Value {
    json!({
        "modelfile": "", "parameters": "", "template": "", "details": details(),
        "modified_at": time(model),
        "model_info": {
            "general.architecture": "model",
            "general.basename": model["release_label"],
            "model.context_length": model["limits"]["context_tokens"],
        },
        "capabilities": ["completion"],
    })
}

/// What the node does not tell of a model stays empty.
fn details() -> Value {
    json!({
        "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "",
        "quantization_level": "",
    })
}

/// Stands for the release: its files have digests that only operators see.
fn release_digest(model: &Value) -> String {
    hex::encode(Sha256::digest(model["release_id"].as_str().unwrap_or_default()))
}

fn time(model: &Value) -> String {
    let created = model["created"].as_i64().unwrap_or_default();
    let time = DateTime::<Utc>::from_timestamp(created, 0).unwrap_or_default();
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}
