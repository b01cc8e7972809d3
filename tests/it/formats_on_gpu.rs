//! A GPU keeps answers to formats and calls to their schemas as the CPU does. A tiny model computes
//! both; the GPU is emulated.

use super::capabilities::{CALLER, node};
use cresset_kernels::gpu::Emulator;
use cresset_models::ModelOptions;
use serde_json::{Value, json};
use uuid::Uuid;

/// Options in f32, so that the CPU and a GPU give the same tokens.
fn exact(on_gpu: bool) -> ModelOptions {
    ModelOptions {
        gpu: on_gpu.then(|| Emulator::with(96 << 20, 4)),
        gpu_memory_share: 0.9,
        gpu_reserve_mib: 0,
        gpu_graph_rows: 4,
        dequantise: true,
        threads: 2,
        kv_bytes: 64 << 20,
        max_batched_tokens: 256,
        max_rows: 8,
        max_context: Some(2048),
        ..ModelOptions::default()
    }
}

/// What is asked at the same time: a schema, an expression, a call, and a text without a format.
fn asked() -> [Value; 4] {
    let schema = json!({
        "type": "object",
        "properties": {
            "number": { "type": "integer", "minimum": 0, "maximum": 999 },
            "side": { "enum": ["left", "right"] },
        },
        "required": ["number", "side"],
        "additionalProperties": false,
    });
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "place", "schema": schema } });
    let tool = json!({ "type": "function", "function": { "name": "go", "parameters": schema } });
    [
        json!({ "response_format": format, "logprobs": true, "top_logprobs": 2 }),
        json!({ "guided_regex": "[a-f]{3}-(x|y){5}" }),
        json!({ "tools": [tool], "tool_choice": "required", "frequency_penalty": 0.3 }),
        json!({ "max_tokens": 24 }),
    ]
}

/// The first choice of each answer without its log-probabilities, and the ids and texts of those.
async fn answers(on_gpu: bool) -> (Value, Vec<Value>) {
    let world = node(CALLER, "", |setup| {
        (setup.computed, setup.max_rows) = (Some(exact(on_gpu)), 8);
    })
    .await;
    let capabilities = world.get("/v1/models").await.json()["data"][0]["capabilities"].clone();
    let post = async |(seed, mut extra): (usize, Value)| {
        let members = extra.as_object_mut().unwrap();
        members.insert("seed".into(), json!(seed));
        members.entry("max_tokens").or_insert(json!(150));
        let answer = world.post(Uuid::new_v4(), &world.ask(extra)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["choices"][0].clone()
    };
    let all: Vec<_> = (0..3).flat_map(|_| asked()).enumerate().collect();
    let choices = futures_util::future::join_all(all.into_iter().map(post)).await;
    world.close().await;
    (capabilities, choices)
}

/// Ids of calls are the request's own, and log-probabilities differ in their last places.
fn comparable(mut choice: Value) -> Value {
    for token in choice["logprobs"]["content"].as_array_mut().into_iter().flatten() {
        *token = token["token"].clone();
    }
    for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
        call["id"] = Value::Null;
    }
    choice
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_keeps_to_formats_and_calls_as_the_cpu_does() {
    let (capabilities, expect) = answers(false).await;
    let (on_gpu, found) = answers(true).await;
    assert_eq!(on_gpu, capabilities);
    assert_eq!(capabilities, json!(["json_schema", "tools"]));
    for (found, expect) in found.into_iter().zip(&expect) {
        assert_eq!(comparable(found), comparable(expect.clone()));
    }
    let is_place = |text: &Value| {
        let place: Value = serde_json::from_str(text.as_str().unwrap()).unwrap();
        place["number"].as_u64().is_some_and(|number| number < 1000)
    };
    assert_eq!(expect.len(), 12);
    for choices in expect.chunks(4) {
        let [schema, expression, call, _] = choices else { unreachable!("four are asked") };
        assert!(is_place(&schema["message"]["content"]), "{schema}");
        assert_eq!(expression["finish_reason"], "stop", "{expression}");
        assert_eq!(call["finish_reason"], "tool_calls", "{call}");
        assert!(is_place(&call["message"]["tool_calls"][0]["function"]["arguments"]), "{call}");
    }
}
