//! A last message of the assistant that the model goes on with, in every interface that has it:
//! the prompt ends with its text, and is counted and charged as it is.

use super::capabilities::{CALLER, THINKER, node, template};
use super::process::{Reply, request};
use super::support::{World, tiny_gguf};
use super::text_parity::sdist_models;
use cresset_models::ModelSource;
use cresset_text::{ChatMessage, ChatTemplate, PromptExtras, TemplateLimits, TextModel, Unwanted};
use serde_json::{Value, json};
use std::net::SocketAddr;
use uuid::Uuid;

const BEGUN: &str = "1, 2,";

fn ask(address: SocketAddr, path: &str, key: &str, body: &Value) -> Reply {
    let (id, session) = (Uuid::new_v4(), Uuid::new_v4());
    let head = format!(
        "POST {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
         Idempotency-Key: {id}\r\nX-Service-Session-Id: {session}\r\n"
    );
    request(&format!("http://{address}"), &head, &body.to_string()).finish()
}

fn turns(last: &Value) -> Value {
    json!([{ "role": "user", "content": "hello" }, last])
}

/// Tokens of the prompt that the release's template writes before the assistant's end of turn.
fn expected(world: &World, name: &str) -> u64 {
    let template = ChatTemplate::new(&template(name), "", "", TemplateLimits::default()).unwrap();
    let last = json!({ "role": "assistant", "content": BEGUN });
    let text = template.render_raw(&turns(&last), None, false).unwrap();
    let (text, _) = text.rsplit_once(BEGUN).unwrap();
    let tokenizer = &world.node.pool.models()[0].text.tokenizer;
    tokenizer.encode(&(text.to_owned() + BEGUN), true).unwrap().len() as u64
}

#[test]
fn templates_of_releases_end_where_the_text_does() {
    let folder = tempfile::tempdir().unwrap();
    let extras = PromptExtras { continues: true, ..PromptExtras::default() };
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: Some(content.into()),
        ..ChatMessage::default()
    };
    let messages = [message("user", "hello"), message("assistant", BEGUN)];
    let mut continued = 0;
    for entry in std::fs::read_dir(sdist_models().join("templates")).unwrap() {
        let file_name = entry.unwrap().file_name().into_string().unwrap();
        let Some(name) = file_name.strip_suffix(".jinja").map(str::to_owned) else { continue };
        let file = folder.path().join("tiny.gguf");
        std::fs::write(&file, tiny_gguf(0, Some(&template(&name)), &[]).to_bytes()).unwrap();
        let Ok(model) = TextModel::load(&ModelSource::gguf(file)) else { continue };
        let prompt = model.encode_chat_until(&messages, &extras, &Unwanted::default());
        let prompt = prompt.unwrap_or_else(|why| panic!("{name}: {why}"));
        let text = model.tokenizer.decode(&prompt, false).unwrap();
        assert!(text.ends_with(BEGUN) && text.contains("hello"), "{name}: {text}");
        continued += 1;
    }
    assert!(continued > 40, "{continued}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_last_message_is_continued_wherever_the_interface_has_it() {
    for name in [CALLER, THINKER] {
        let mut world = node(name, " 3", |_| {}).await;
        let gateway = world.open_gateway().await;
        let expect = expected(&world, name);
        let begun = json!({ "role": "assistant", "content": BEGUN });
        let marked = json!({ "role": "assistant", "content": BEGUN, "prefix": true });
        let (plain, node) = (turns(&begun), world.address);
        let chat = "/v1/chat/completions";
        let (tokens, text) = ("/usage/prompt_tokens", "/choices/0/message/content");
        for (address, path, body, tokens, text) in [
            (
                node,
                chat,
                json!({ "messages": plain, "continue_final_message": true }),
                tokens,
                text,
            ),
            (node, chat, json!({ "messages": turns(&marked) }), tokens, text),
            (gateway, chat, json!({ "messages": turns(&marked) }), tokens, text),
            (
                gateway,
                chat,
                json!({ "messages": plain, "continue_final_message": true,
                    "add_generation_prompt": false }),
                tokens,
                text,
            ),
            (
                gateway,
                "/api/chat",
                json!({ "messages": plain, "stream": false }),
                "/prompt_eval_count",
                "/message/content",
            ),
        ] {
            let mut body = body;
            body["model"] = json!(world.model);
            let answer = ask(address, path, &world.key, &body);
            assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
            let answer = answer.json();
            assert_eq!(answer.pointer(tokens), Some(&json!(expect)), "{path} {body}: {answer}");
            assert_eq!(answer.pointer(text), Some(&json!(" 3")), "{path}: {answer}");
        }
        let body = json!({ "model": world.model, "messages": plain, "max_tokens": 8 });
        let answer = ask(gateway, "/v1/messages", &world.key, &body).json();
        let usage = |name: &str| answer["usage"][name].as_u64().unwrap();
        assert_eq!(usage("input_tokens") + usage("cache_read_input_tokens"), expect);
        assert_eq!(answer["content"][0]["text"], " 3");
        let counted = ask(gateway, "/v1/messages/count_tokens", &world.key, &body).json();
        assert_eq!(counted, json!({ "input_tokens": expect }));
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_continued_is_part_of_the_request() {
    let world = node(CALLER, " 3", |_| {}).await;
    let begun = json!({ "role": "assistant", "content": BEGUN });
    let id = Uuid::new_v4();
    let mut body = world.ask(json!({ "messages": turns(&begun), "continue_final_message": true }));
    let before = world.balances().await.iter().sum::<u64>();
    let first = world.post(id, &body).await;
    let again = world.post(id, &body).await;
    assert_eq!((first.status, &again.body), (200, &first.body));
    let charged = before - world.balances().await.iter().sum::<u64>();
    assert_eq!(first.json()["credits"]["chargedUnits"], charged.to_string());
    body.as_object_mut().unwrap().remove("continue_final_message");
    assert_eq!(world.post(id, &body).await.status, 422);
    // Without the member the assistant's message is a turn of the past, as it was.
    let anew = world.post(Uuid::new_v4(), &body).await.json();
    assert_ne!(anew["usage"]["prompt_tokens"], first.json()["usage"]["prompt_tokens"]);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_continued_is_refused_or_says_nothing() {
    let mut world = node(CALLER, "so", |_| {}).await;
    let gateway = world.open_gateway().await;
    let call = json!({ "type": "tool_use", "id": "a", "name": "f", "input": {} });
    let called = turns(&json!({ "role": "assistant", "content": [call] }));
    let ask = |messages: &Value| {
        let body = json!({ "model": world.model, "messages": messages, "max_tokens": 8 });
        ask(gateway, "/v1/messages", &world.key, &body)
    };
    let refused = ask(&called);
    assert!(refused.status == 400 && refused.body.contains("tool_calls cannot"), "{refused:?}");
    // An empty message says whose turn it is, which is known.
    let empty = ask(&turns(&json!({ "role": "assistant", "content": "" })));
    let none = ask(&json!([{ "role": "user", "content": "hello" }]));
    assert_eq!((empty.status, none.status), (200, 200), "{empty:?}");
    let tokens = |reply: &Reply| {
        let usage = &reply.json()["usage"];
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(&empty), tokens(&none));
    world.close().await;
}
