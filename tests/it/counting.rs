//! The count of a prompt's tokens, held against the usage of the same request when it runs.

use super::capabilities::{CALLER, node, with_plan};
use super::process::{Reply, request};
use super::support::World;
use serde_json::{Value, json};
use std::net::SocketAddr;

/// Asks as Anthropic's clients do.
fn ask(gateway: SocketAddr, path: &str, key: &str, body: &Value) -> Reply {
    let head = format!(
        "POST {path} HTTP/1.1\r\nx-api-key: {key}\r\nanthropic-version: 2023-06-01\r\n\
         Content-Type: application/json\r\n"
    );
    request(&format!("http://{gateway}"), &head, &body.to_string()).finish()
}

fn count(gateway: SocketAddr, key: &str, body: &Value) -> Reply {
    ask(gateway, "/v1/messages/count_tokens", key, body)
}

/// A request for the world's model with these members.
fn body(world: &World, members: &Value) -> Value {
    let mut body = json!({ "model": world.model,
        "messages": [{ "role": "user", "content": "hello" }] });
    body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_is_what_the_request_has_and_costs_nothing() {
    let mut world = node(CALLER, "so", |_| {}).await;
    let gateway = world.open_gateway().await;
    let key = world.key.clone();
    let schema = json!({ "type": "object", "properties": { "state": { "type": "string" } } });
    let tools = json!([{ "name": "lamp", "description": "Switches it.", "input_schema": schema }]);
    let call = json!({ "type": "tool_use", "id": "a", "name": "lamp", "input": { "state": "on" } });
    let result = json!({ "type": "tool_result", "tool_use_id": "a", "content": "done" });
    let turns = json!([{ "role": "user", "content": "hello" },
        { "role": "assistant", "content": [call] }, { "role": "user", "content": [result] }]);
    let long = "h\u{e9}llo <|im_end|> \n".repeat(40);
    let mut counts = Vec::new();
    for members in [
        json!({}),
        json!({ "system": "Be brief." }),
        json!({ "tools": tools }),
        json!({ "tools": tools, "messages": turns }),
        json!({ "tools": tools, "tool_choice": { "type": "none" } }),
        json!({ "messages": [{ "role": "user", "content": long }] }),
    ] {
        let mut body = body(&world, &members);
        let before = world.balances().await;
        let counted = count(gateway, &key, &body);
        assert_eq!(counted.status, 200, "{members}: {counted:?}");
        assert_eq!(world.balances().await, before);
        let counted = counted.json();
        body["max_tokens"] = json!(1);
        let usage = ask(gateway, "/v1/messages", &key, &body).json()["usage"].clone();
        let of_usage = |name: &str| usage[name].as_u64().unwrap();
        let expect = of_usage("input_tokens") + of_usage("cache_read_input_tokens");
        assert_eq!(counted, json!({ "input_tokens": expect }), "{members}: {usage}");
        counts.push(expect);
    }
    let [plain, system, tools, turns, unused, longer] = counts[..] else { unreachable!() };
    assert!(plain < tools && system < tools && tools < turns && plain < longer, "{counts:?}");
    assert_eq!(unused, plain, "tools that may not be called are not told of");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_is_checked_as_a_request_is() {
    let mut world = World::with(|setup| {
        with_plan(setup, |plan| (plan.requests_per_minute, plan.burst) = (1, 3));
    })
    .await;
    let gateway = world.open_gateway().await;
    let check = |key: &str, members: Value, status: u16, kind: &str, words: &str| {
        let answer = count(gateway, key, &body(&world, &members));
        let error = &answer.json()["error"];
        assert_eq!((answer.status, error["type"].as_str()), (status, Some(kind)), "{answer:?}");
        assert!(answer.body.contains(words), "{answer:?}");
    };
    let key = &world.key;
    check("cresset_key_wrong", json!({}), 401, "authentication_error", "");
    check("", json!({}), 401, "authentication_error", "");
    check(key, json!({ "model": "nobody" }), 404, "not_found_error", "this key can use");
    check(key, json!({ "messages": "hello" }), 400, "invalid_request_error", "list of messages");
    check(key, json!({ "messages": [] }), 400, "invalid_request_error", "messages");
    let tool = json!([{ "name": "lamp", "input_schema": { "type": "object" } }]);
    check(key, json!({ "tools": tool }), 400, "invalid_request_error", "tools");
    assert_eq!(count(gateway, key, &body(&world, &json!({}))).status, 200);
    check(key, json!({}), 429, "rate_limit_error", "a minute");
    world.close().await;
}
