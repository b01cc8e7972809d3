//! A node's own gateway, which asks the node's routes in its process.

use super::*;
use axum::Json;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde_json::json;

const ID: &str = "00000000-0000-4000-8000-000000000001";
const OTHER: &str = "00000000-0000-4000-8000-000000000002";

/// What the node was asked, and the key.
type AskedChats = Arc<Mutex<Vec<(Value, String)>>>;

/// A node with two models, of which `thinker` thinks. Its stream is empty.
fn node(seen: &AskedChats) -> Router {
    let model = |id: &str, name: &str, capabilities: &[&str]| {
        json!({ "id": id, "address": name, "release_label": name, "capabilities": capabilities,
            "limits": { "max_output_tokens": 2048 } })
    };
    let models = [model(ID, "small", &[]), model(OTHER, "thinker", &["reasoning"])];
    let page = json!({ "data": models, "next_after": null });
    let seen = seen.clone();
    let chat = async move |head: HeaderMap, body: Bytes| {
        let key = head[IDEMPOTENCY_KEY].to_str().unwrap().to_owned();
        seen.lock().push((serde_json::from_slice(&body).unwrap(), key));
        let end = json!({ "id": "r", "created": 1, "usage": { "prompt_tokens": 7 },
            "choices": [{ "delta": {}, "finish_reason": "stop" }] });
        let headers = [("x-prompt-tokens", "7"), ("x-ignored-params", "seed")];
        (headers, format!("data: {end}\n\ndata: [DONE]\n\n")).into_response()
    };
    let me = async |head: HeaderMap| {
        let known = head[AUTHORIZATION] == "Bearer own";
        if known { StatusCode::OK } else { StatusCode::UNAUTHORIZED }
    };
    Router::new()
        .route(MODELS, get(async || Json(page)))
        .route("/v1/me", get(me))
        .route(CHAT, post(chat))
}

/// A node that tells what it was asked of a prompt.
fn prompts() -> Router {
    let told = async |uri: Uri, body: Bytes| {
        let asked: Value = serde_json::from_slice(&body).unwrap();
        let text = json!([uri.path(), asked["model"], asked["prompt"]]).to_string();
        Json(json!({ "text": text, "tokens": [7], "pieces": ["a"], "context_tokens": 64 }))
    };
    Router::new().fallback(told)
}

#[tokio::test]
async fn prompts_are_told_in_each_clients_words() {
    let gateway = gateway(&AskedChats::default(), 1 << 20);
    for (path, body, status, expect) in [
        (
            "/tokenize",
            json!({ "model": "small", "content": "a" }),
            "200",
            json!({ "tokens": [7], "count": 1, "max_model_len": 64 }),
        ),
        (
            "/tokenize",
            json!({ "model": "small", "prompt": "a", "with_pieces": true }),
            "200",
            json!({ "tokens": [{ "id": 7, "piece": "a" }], "count": 1, "max_model_len": 64 }),
        ),
        ("/tokenize", json!({ "model": "small" }), "400", json!("messages is required")),
        (
            "/tokenize",
            json!({ "model": "small", "content": "a", "prompt": "a" }),
            "400",
            json!("send one"),
        ),
        ("/tokenize", json!({ "content": "a" }), "400", json!("can use small, thinker")),
        (
            "/tokenize",
            json!({ "model": "small", "messages": [], "add_special_tokens": true }),
            "400",
            json!("cannot be true"),
        ),
        ("/detokenize", json!({ "model": "small" }), "400", json!("tokens is required")),
        ("/detokenize", json!({ "model": "x", "tokens": [] }), "404", json!("not known")),
        (
            "/detokenize",
            json!({ "model": ID, "tokens": [7, 8] }),
            "200",
            json!(json!(["/text", ID, [7, 8]]).to_string()),
        ),
        (
            "/apply-template",
            json!({ "model": "small", "messages": [] }),
            "200",
            json!(json!(["/text", ID, null]).to_string()),
        ),
    ] {
        let [told, _, text] = ask(&gateway, path, &[], &body).await;
        assert_eq!(told, status, "{path} {body}: {text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        match &expect {
            Value::String(part) if status == "200" => assert_eq!(answer["prompt"], *part),
            Value::String(part) => assert!(text.contains(part), "{path} {body}: {text}"),
            whole => assert_eq!(answer, *whole, "{path} {body}"),
        }
    }
}

#[tokio::test]
async fn a_conversation_has_no_raw_prompt() {
    let seen = AskedChats::default();
    let gateway = gateway(&seen, 1 << 20);
    let body = json!({ "model": "small", "prompt": "Hi" });
    let [status, _, text] = ask(&gateway, CHAT, &[], &body).await;
    assert!(status == "400" && text.contains("/v1/completions"), "{text}");
    assert!(seen.lock().is_empty());
}

fn gateway(seen: &AskedChats, max_body_bytes: usize) -> Gateway {
    let options = GatewayOptions {
        upstream: GatewayUpstream::Here { node: node(seen), prompts: prompts() },
        http: HttpSettings { max_body_bytes, ..HttpSettings::default() },
        ..tests::settings("http://unused:1")
    };
    Gateway::new(options, tests::loopback()).unwrap()
}

/// Status, ignored members and text of the answer to a request.
async fn ask(gateway: &Gateway, path: &str, headers: &[(&str, &str)], body: &Value) -> [String; 3] {
    let request = Request::post(path).header("host", "localhost");
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let request = request.body(Body::from(body.to_string())).unwrap();
    let (head, body) = gateway.answer(request).await.into_parts();
    let named = head.headers.get("x-ignored-params").and_then(|names| names.to_str().ok());
    let text = String::from_utf8_lossy(&body.collect().await.unwrap().to_bytes()).into_owned();
    [head.status.as_str().to_owned(), named.unwrap_or_default().to_owned(), text]
}

#[tokio::test]
async fn thinking_reaches_models_that_think_in_every_dialect() {
    let seen = AskedChats::default();
    let gateway = gateway(&seen, 1 << 20);
    let user = json!([{ "role": "user", "content": "Hi" }]);
    for (path, mut body, effort, called) in [
        (CHAT, json!({ "messages": user, "reasoning_effort": "low" }), "low", "reasoning_effort"),
        (
            CHAT,
            json!({ "messages": user, "chat_template_kwargs": { "enable_thinking": true } }),
            "high",
            "reasoning_effort",
        ),
        (
            "/v1/messages",
            json!({ "messages": user, "thinking": { "type": "enabled" } }),
            "high",
            "thinking",
        ),
        (
            "/v1/responses",
            json!({ "input": "Hi", "reasoning": { "effort": "low" } }),
            "low",
            "reasoning.effort",
        ),
        ("/api/chat", json!({ "messages": user, "think": "medium" }), "medium", "think"),
        ("/api/generate", json!({ "prompt": "Hi", "think": true }), "high", "think"),
    ] {
        for (model, expect, named) in [
            ("thinker", Some(effort), "seed".to_owned()),
            (OTHER, Some(effort), "seed".to_owned()),
            ("small", None, format!("seed, {called}")),
        ] {
            body["model"] = model.into();
            let [status, told, text] = ask(&gateway, path, &[], &body).await;
            assert_eq!((status.as_str(), told), ("200", named), "{path} {body}: {text}");
            let (asked, _) = seen.lock().pop().unwrap();
            assert_eq!(asked["reasoning_effort"].as_str(), expect, "{path} {body}: {asked}");
            assert!(asked["chat_template_kwargs"].is_null(), "{asked}");
        }
    }
}

#[tokio::test]
async fn models_are_listed_with_a_slash_behind_and_without() {
    let gateway = gateway(&AskedChats::default(), 1 << 20);
    let list = async |path: &str| {
        let request = Request::get(path).header("host", "localhost").body(Body::empty()).unwrap();
        let (head, body) = gateway.answer(request).await.into_parts();
        (head.status, body.collect().await.unwrap().to_bytes())
    };
    let expect = list(MODELS).await;
    assert!(expect.0 == StatusCode::OK && expect.1.starts_with(b"{\"data\":[{\"id\":\"small\""));
    for path in ["/v1/models/", "/v1/models/?limit=5"] {
        assert_eq!(list(path).await, expect, "{path}");
    }
}

#[tokio::test]
async fn output_tokens_are_the_models_at_most_in_every_dialect() {
    let seen = AskedChats::default();
    let gateway = gateway(&seen, 1 << 20);
    let user = json!([{ "role": "user", "content": "Hi" }]);
    for (path, body) in [
        (CHAT, json!({ "messages": user, "max_completion_tokens": 32_000 })),
        ("/v1/completions", json!({ "prompt": "Hi", "max_tokens": 32_000 })),
        ("/v1/messages", json!({ "messages": user, "max_tokens": 32_000 })),
        ("/v1/responses", json!({ "input": "Hi", "max_output_tokens": 32_000 })),
        ("/api/chat", json!({ "messages": user, "options": { "num_predict": 32_000 } })),
    ] {
        let mut body = body;
        body["model"] = "small".into();
        let [status, _, text] = ask(&gateway, path, &[], &body).await;
        assert_eq!(status, "200", "{path}: {text}");
        let (asked, _) = seen.lock().pop().unwrap();
        let most = [&asked["max_tokens"], &asked["max_completion_tokens"]];
        assert!(most.iter().any(|most| **most == 2048), "{path}: {asked}");
    }
}

#[tokio::test]
async fn refusals_name_the_bound_or_the_setting() {
    let gateway = gateway(&AskedChats::default(), 2 << 20);
    let long = json!({ "model": "small", "prompt": "a".repeat(2 << 20) });
    for (path, headers, body, expect) in [
        ("/v1/completions", &[][..], &long, ["413", "2 MiB", "request_too_large"]),
        ("/v1/messages", &[], &long, ["413", "2 MiB", "request_too_large"]),
        (CHAT, &[("host", "box.lan")], &Value::Null, ["403", "gateway.names", "--host"]),
        (
            CHAT,
            &[("origin", "http://a.example")],
            &Value::Null,
            ["403", "gateway.origins", "--origin"],
        ),
    ] {
        let mut request = Request::post(path);
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_string())).unwrap();
        let (head, body) = gateway.answer(request).await.into_parts();
        let text = body.collect().await.unwrap().to_bytes();
        let text = format!("{} {}", head.status, String::from_utf8_lossy(&text));
        assert!(expect.iter().all(|part| text.contains(part)), "{path} {headers:?}: {text}");
    }
}

#[tokio::test]
async fn a_large_body_of_a_stranger_is_not_read() {
    let seen = AskedChats::default();
    let mut gateway = gateway(&seen, 16 << 20);
    let text = json!({ "model": ID, "messages": [] }).to_string();
    for (own, length, padding, status) in
        [(true, None, 1 << 20, 200), (false, Some(40 << 10), 0, 200), (false, None, 0, 401)]
    {
        gateway.credential = own.then(|| HeaderValue::from_static("Bearer own"));
        let mut request = Request::post(CHAT)
            .header("host", "localhost")
            .header(AUTHORIZATION, if own { "Bearer own" } else { "Bearer theirs" });
        if let Some(length) = length {
            request = request.header(CONTENT_LENGTH, length);
        }
        let body = text.clone() + &" ".repeat(padding);
        let answer = gateway.answer(request.body(Body::from(body)).unwrap()).await;
        assert_eq!(answer.status(), status, "{own} {length:?}");
    }
    assert_eq!(seen.lock().len(), 2);
}

#[tokio::test]
async fn a_key_that_is_no_uuid_is_the_same_one_each_time() {
    let seen = AskedChats::default();
    let gateway = gateway(&seen, 1 << 20);
    let body = json!({ "model": "small", "messages": [] });
    for key in ["order-17", "order-17", "order-18", ID] {
        ask(&gateway, CHAT, &[("idempotency-key", key)], &body).await;
    }
    let keys: Vec<String> = seen.lock().iter().map(|(_, key)| key.clone()).collect();
    assert!(keys.iter().all(|key| Uuid::parse_str(key).is_ok()), "{keys:?}");
    assert_eq!((&keys[0], keys[3].as_str()), (&keys[1], ID));
    assert_ne!(keys[1], keys[2]);
}

#[tokio::test]
async fn a_message_begins_with_the_tokens_that_the_node_tells() {
    let gateway = gateway(&AskedChats::default(), 1 << 20);
    let body = json!({ "model": "small", "stream": true,
        "messages": [{ "role": "user", "content": "Hi" }] });
    let [_, _, text] = ask(&gateway, "/v1/messages", &[], &body).await;
    let begun = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let begun: Value = serde_json::from_str(begun).unwrap();
    assert_eq!(begun["message"]["usage"]["input_tokens"], 7, "{text}");
}
