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
        "size": model["files"]["bytes"].as_u64().unwrap_or_default(),
        "digest": release_digest(model), "details": details(model),
    })
}

/// Ollama's `POST /api/show`.
pub(crate) fn ollama_show(model: &Value) -> Value {
    let architecture = model["files"]["architecture"].as_str().unwrap_or("model");
    json!({
        "modelfile": "", "parameters": "", "template": "", "details": details(model),
        "modified_at": time(model),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": model["release_label"],
            "general.parameter_count": model["files"]["parameters"],
            format!("{architecture}.context_length"): model["limits"]["context_tokens"],
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
fn details(model: &Value) -> Value {
    let told = |name: &str| model["files"][name].as_str().unwrap_or_default();
    let family = told("architecture");
    let families = Vec::from_iter((!family.is_empty()).then_some(family));
    json!({
        "parent_model": "", "format": told("format"), "family": family, "families": families,
        "parameter_size": model["files"]["parameters"].as_f64().map_or_else(String::new, short),
        "quantization_level": told("quantisation"),
    })
}

/// A number of parameters as people say it.
fn short(count: f64) -> String {
    let units = [(1e9, 'B', 1), (1e6, 'M', 2), (1e3, 'K', 0)];
    let unit = units.into_iter().find(|(unit, ..)| count >= *unit);
    unit.map_or_else(
        || count.to_string(),
        |(unit, letter, digits)| format!("{:.digits$}{letter}", count / unit),
    )
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
            "files": { "format": "gguf", "bytes": 144_811_456, "architecture": "llama",
                "parameters": 134_515_008, "quantisation": "Q8_0" },
        });
        let shown = ollama_show(&model);
        assert_eq!(shown["model_info"]["llama.context_length"], 4096);
        assert_eq!(shown["model_info"]["general.parameter_count"], 134_515_008);
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
        assert_eq!(tags["models"][0]["size"], 144_811_456);
        assert_eq!(
            tags["models"][0]["details"],
            json!({ "parent_model": "", "format": "gguf", "family": "llama",
                "families": ["llama"], "parameter_size": "134.52M", "quantization_level": "Q8_0" })
        );
    }

    /// A relay may ask an older node.
    #[test]
    fn what_a_node_does_not_tell_is_empty() {
        let tags = ollama_tags(&[json!({ "id": "a" })]);
        assert_eq!(tags["models"][0]["size"], 0);
        let details = &tags["models"][0]["details"];
        assert_eq!((&details["family"], &details["families"]), (&json!(""), &json!([])));
        for (count, expect) in
            [(494e6, "494.00M"), (1.54e9, "1.5B"), (671e9, "671.0B"), (2_048.0, "2K"), (5.0, "5")]
        {
            assert_eq!(short(count), expect);
        }
    }
}
