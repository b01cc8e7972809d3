//! Lists of models as other services give them, from the node's own.

use crate::model_names::capabilities;
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
    json!({ "models": models.iter().map(ollama_tag).collect::<Vec<_>>() })
}

/// Ollama's `GET /api/ps`: every model that a node lists answers at any time, and for good.
pub(crate) fn ollama_running(models: &[Value]) -> Value {
    let running = models.iter().map(|model| {
        let mut tag = ollama_tag(model);
        tag["context_length"] = model["limits"]["context_tokens"].clone();
        tag["expires_at"] = "9999-12-31T23:59:59Z".into();
        tag["size_vram"] = 0.into();
        tag
    });
    json!({ "models": running.collect::<Vec<_>>() })
}

fn ollama_tag(model: &Value) -> Value {
    json!({
        "name": model["id"], "model": model["id"], "modified_at": time(model),
        // Clients are not told the size of a release.
        "size": 0, "digest": release_digest(model), "details": details(),
    })
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
        "capabilities": ollama_capabilities(model),
    })
}

/// What clients look at before they offer tools or ask for thoughts.
fn ollama_capabilities(model: &Value) -> Vec<&'static str> {
    let can = |what: &str| capabilities(model).any(|one| one == what);
    let named = [(true, "completion"), (can("tools"), "tools"), (can("reasoning"), "thinking")];
    named.into_iter().filter_map(|(can, name)| can.then_some(name)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ollamas_lists_tell_what_a_model_can_do() {
        let mut model = json!({
            "id": "acme/small", "created": 1_700_000_000, "release_label": "Small",
            "release_id": "r", "limits": { "context_tokens": 4096 },
            "capabilities": ["json_schema"],
        });
        assert_eq!(ollama_show(&model)["capabilities"], json!(["completion"]));
        model["capabilities"] = json!(["tools", "reasoning"]);
        assert_eq!(ollama_show(&model)["capabilities"], json!(["completion", "tools", "thinking"]));
        let tags = ollama_tags(std::slice::from_ref(&model));
        let mut running = ollama_running(&[model]);
        assert_eq!(running["models"][0]["context_length"], 4096);
        let only_of_running = ["context_length", "expires_at", "size_vram"];
        let entry = running["models"][0].as_object_mut().unwrap();
        entry.retain(|name, _| !only_of_running.contains(&name.as_str()));
        assert_eq!(running, tags);
        assert_eq!(tags["models"][0]["modified_at"], "2023-11-14T22:13:20Z");
    }
}
