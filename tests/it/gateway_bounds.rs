//! What the node's own gateway takes and `/v1` does not: long conversations, many tools, large
//! bodies, more output tokens than are left.

use super::capabilities::{CALLER, THINKER, node};
use super::process::{Reply, request};
use serde_json::{Value, json};
use std::net::SocketAddr;
use uuid::Uuid;

fn ask(address: SocketAddr, path: &str, key: &str, body: &str) -> Reply {
    let (id, session) = (Uuid::new_v4(), Uuid::new_v4());
    let head = format!(
        "POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
         Idempotency-Key: {id}\r\nX-Service-Session-Id: {session}\r\n"
    );
    request(&format!("http://{address}"), &head, body).finish()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_has_bounds_of_its_own() {
    let mut world = node(CALLER, "so", |_| {}).await;
    let gateway = world.open_gateway().await;
    let parts = vec![json!({ "type": "text", "text": "a" }); 65];
    let tool = |number: usize, about: usize| {
        let function = json!({ "name": format!("f{number}"), "description": "x".repeat(about) });
        json!({ "type": "function", "function": function })
    };
    // Tools that may not be called are not told of, so they take no room in the prompt.
    let tools = |count: usize, about: usize| {
        let tools: Vec<Value> = (0..count).map(|number| tool(number, about)).collect();
        json!({ "tools": tools, "tool_choice": "none" })
    };
    for (members, padding, refused) in [
        (json!({ "messages": [{ "role": "user", "content": parts }] }), 0, "at most 64 items"),
        (tools(65, 1), 0, "at most 64 items"),
        (tools(1, 4_097), 0, "at most 4096 characters"),
        (json!({ "max_tokens": 32_000 }), 0, "max_tokens must be at most"),
        (json!({}), 300 << 10, "262144 bytes"),
    ] {
        let mut body = json!({ "model": world.model,
            "messages": [{ "role": "user", "content": "hello" }] });
        body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        let body = body.to_string() + &" ".repeat(padding);
        let path = "/v1/chat/completions";
        let strict = ask(world.address, path, &world.key, &body);
        assert!(strict.status >= 400 && strict.body.contains(refused), "{strict:?}");
        let taken = ask(gateway, path, &world.key, &body);
        assert_eq!(taken.status, 200, "{refused}: {taken:?}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thinking_is_switched_through_every_interface() {
    let mut world = node(THINKER, "so", |_| {}).await;
    let gateway = world.open_gateway().await;
    let user = json!([{ "role": "user", "content": "hello" }]);
    for (path, mut off, tokens) in [
        (
            "/v1/chat/completions",
            json!({ "messages": user, "reasoning_effort": "none" }),
            "/usage/prompt_tokens",
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": user, "chat_template_kwargs": { "enable_thinking": false } }),
            "/usage/prompt_tokens",
        ),
        (
            "/v1/responses",
            json!({ "input": "hello", "reasoning": { "effort": "none" } }),
            "/usage/input_tokens",
        ),
        (
            "/api/chat",
            json!({ "messages": user, "think": false, "stream": false }),
            "/prompt_eval_count",
        ),
    ] {
        off["model"] = json!(world.model);
        let mut on = off.clone();
        for name in ["reasoning_effort", "chat_template_kwargs", "reasoning", "think"] {
            on.as_object_mut().unwrap().remove(name);
        }
        let [off, on] = [off, on].map(|body| {
            let answer = ask(gateway, path, &world.key, &body.to_string());
            assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
            answer.json().pointer(tokens).and_then(Value::as_u64).unwrap()
        });
        // The template writes an empty thought where the model must not think.
        assert!(off > on, "{path}: {off} and {on}");
    }
    world.close().await;
}
