//! Bare texts and texts with a gap, in every interface of the gateway that has them: what the model
//! reads, counts, charges, repeats and stops; and prompts told as tokens.

use super::capabilities::{THINKER, node};
use super::charges::{cost_of, units};
use super::process::{Reply, Stream, request};
use super::support::{CHAT, World};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

const MARKS: &[&str] = &[
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];
const COMPLETIONS: &str = "/v1/completions";

type Prompts = Arc<Mutex<Vec<String>>>;

/// A node whose model has these tokens, answers `reply`, and notes its prompts.
async fn noting(marks: &'static [&'static str], reply: &'static str) -> (World, Prompts) {
    let seen = Prompts::default();
    let noted = seen.clone();
    let world = World::with(|setup| {
        setup.marks = marks;
        setup.answer = Some(Arc::new(move |prompt| {
            noted.lock().unwrap().push(prompt.to_owned());
            reply.to_owned()
        }));
    });
    (world.await, seen)
}

fn open(gateway: SocketAddr, path: &str, world: &World, more: &str, body: &Value) -> Stream {
    let head = format!(
        "POST {path} HTTP/1.1\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n\
         {more}",
        world.key
    );
    request(&format!("http://{gateway}"), &head, &body.to_string())
}

fn ask(gateway: SocketAddr, path: &str, world: &World, body: &Value) -> Reply {
    open(gateway, path, world, "", body).finish()
}

/// Tokens of a text in which special tokens are written out.
fn tokens(world: &World, text: &str) -> Vec<u32> {
    world.node.pool.models()[0].text.tokenizer.encode(text, true).unwrap()
}

async fn spent(world: &World) -> u64 {
    let [trial, premium, reserved] = world.balances().await;
    assert_eq!(reserved, 0);
    2_000_000 - trial - premium
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_reads_the_text_alone() {
    let (mut world, seen) = noting(MARKS, "so").await;
    let gateway = world.open_gateway().await;
    let chat = "<|im_start|>user\nhello<|im_end|>\n";
    let ids = tokens(&world, chat);
    let gap = "<|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>";
    let (text, whole) = ("/choices/0/text", "/usage/prompt_tokens");
    for (path, body, expect, [text, count]) in [
        (COMPLETIONS, json!({ "prompt": "hello you" }), "hello you", [text, whole]),
        (COMPLETIONS, json!({ "prompt": [chat] }), chat, [text, whole]),
        (COMPLETIONS, json!({ "prompt": ids }), chat, [text, whole]),
        (COMPLETIONS, json!({ "prompt": [ids] }), chat, [text, whole]),
        (COMPLETIONS, json!({ "prompt": "a(", "suffix": ")" }), gap, [text, whole]),
        ("/completion", json!({ "prompt": "hello" }), "hello", ["/content", "/tokens_evaluated"]),
        (
            "/infill",
            json!({ "input_prefix": "a", "prompt": "(", "input_suffix": ")", "stop": ["\n"] }),
            gap,
            ["/content", "/tokens_evaluated"],
        ),
        (
            "/infill",
            json!({ "input_prefix": "a(", "input_suffix": ")",
                "input_extra": [{ "filename": "b.rs", "text": "c\n" }] }),
            "<|repo_name|>project\n<|file_sep|>b.rs\nc\n<|file_sep|>file\n\
             <|fim_prefix|>a(<|fim_suffix|>)<|fim_middle|>",
            ["/content", "/tokens_evaluated"],
        ),
        (
            "/api/generate",
            json!({ "prompt": "hello", "raw": true, "stream": false }),
            "hello",
            ["/response", "/prompt_eval_count"],
        ),
        (
            "/api/generate",
            json!({ "prompt": "a(", "suffix": ")", "stream": false }),
            gap,
            ["/response", "/prompt_eval_count"],
        ),
    ] {
        let mut body = body;
        // Clients of a server with one model name none.
        if !path.starts_with("/infill") {
            body["model"] = json!(world.model);
        }
        let before = spent(&world).await;
        let answer = ask(gateway, path, &world, &body);
        assert_eq!(answer.status, 200, "{path} {body}: {answer:?}");
        let answer = answer.json();
        assert_eq!(path == "/infill", answer["model"] != json!(world.model), "{answer}");
        let was_read = seen.lock().unwrap().iter().any(|prompt| prompt == expect);
        assert!(was_read, "{path} {body}: {:?}", seen.lock().unwrap());
        assert_eq!(answer.pointer(text), Some(&json!("so")), "{path} {body}: {answer}");
        let prompt_tokens = tokens(&world, expect).len();
        assert_eq!(answer.pointer(count), Some(&json!(prompt_tokens)), "{path} {body}: {answer}");
        let charged = spent(&world).await - before;
        assert_eq!(units(&answer["credits"]["chargedUnits"]), charged, "{path} {body}");
        if path == COMPLETIONS {
            assert_eq!(cost_of(&answer), charged, "{body}");
        }
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_prompt_is_paid_once_however_often_it_is_sent() {
    let mut world = World::new().await;
    let gateway = world.open_gateway().await;
    let body = json!({ "model": world.model, "prompt": "hello", "max_tokens": 3 });
    let key = format!("Idempotency-Key: {}\r\n", Uuid::new_v4());
    let retry = "x-stainless-retry-count: 1\r\n";
    let first = open(gateway, COMPLETIONS, &world, &key, &body).finish();
    let charged = spent(&world).await;
    assert!(first.status == 200 && charged > 0, "{first:?}");
    let again = open(gateway, COMPLETIONS, &world, &key, &body).finish();
    assert_eq!((&again.body, spent(&world).await), (&first.body, charged));
    let mut other = body.clone();
    other["prompt"] = json!("hello you");
    let changed = open(gateway, COMPLETIONS, &world, &key, &other).finish();
    assert_eq!((changed.status, spent(&world).await), (422, charged), "{changed:?}");

    let answers: Vec<Value> = ["", retry]
        .map(|more| open(gateway, COMPLETIONS, &world, more, &other).finish().json())
        .into();
    assert_eq!(answers[0], answers[1]);
    let both = charged + units(&answers[0]["credits"]["chargedUnits"]);
    assert_eq!(spent(&world).await, both);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_stops_its_completion() {
    let mut world = World::with(|setup| {
        (setup.ends, setup.step) = (false, Duration::from_millis(5));
    })
    .await;
    let gateway = world.open_gateway().await;
    for (path, body, text) in [
        (COMPLETIONS, json!({ "prompt": "hello", "max_tokens": 500 }), "\"text\""),
        ("/completion", json!({ "prompt": "hello", "n_predict": 500 }), "\"content\""),
    ] {
        let mut body = body;
        (body["model"], body["stream"]) = (json!(world.model), json!(true));
        let mut stream = open(gateway, path, &world, "", &body);
        let id = stream.header("x-request-id").unwrap().parse().unwrap();
        stream.read_until(text);
        stream.read_until(text);
        drop(stream);
        let ended = world.reaches(id, &["cancelled", "completed"]).await;
        assert_eq!(ended["state"], "cancelled", "{path}: {ended}");
        let usage = &ended["usage"];
        assert_eq!(units(&ended["chargedUnits"]), cost_of(&ended), "{path}: {usage}");
        assert_eq!(usage["prompt_tokens"], tokens(&world, "hello").len(), "{path}: {usage}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bare_text_ends_where_a_file_does() {
    let (mut world, _) = noting(MARKS, "so<|fim_pad|> you").await;
    let gateway = world.open_gateway().await;
    let raw = json!({ "model": world.model, "prompt": "hello", "max_tokens": 9 });
    let choice = ask(gateway, COMPLETIONS, &world, &raw).json()["choices"][0].clone();
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("so"), &json!("stop")));
    let chat = ask(gateway, CHAT, &world, &world.ask(json!({ "max_tokens": 9 }))).json();
    assert_eq!(chat["choices"][0]["message"]["content"], "so you", "a chat goes on");
    let stopped = json!({ "model": world.model, "prompt": "hello", "stop": "o", "echo": true });
    let stopped = ask(gateway, COMPLETIONS, &world, &stopped).json();
    assert_eq!(stopped["choices"][0]["text"], "hellos");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_read_from_the_answer_to_a_bare_text() {
    const REPLY: &str = "<think>a</think>b";
    let mut world = node(THINKER, REPLY, |_| {}).await;
    let gateway = world.open_gateway().await;
    let body = json!({ "model": world.model, "prompt": "hello", "max_tokens": 64,
        "reasoning_effort": "low" });
    let answer = ask(gateway, COMPLETIONS, &world, &body);
    assert_eq!(answer.json()["choices"][0]["text"], REPLY, "{answer:?}");
    assert_eq!(answer.header("x-ignored-params"), Some("reasoning_effort"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_refused_and_costs_nothing() {
    let (mut world, seen) = noting(&[], "so").await;
    let gateway = world.open_gateway().await;
    for (path, body, words) in [
        (COMPLETIONS, json!({ "prompt": "" }), "has no tokens"),
        (COMPLETIONS, json!({ "prompt": [5_000_000] }), "are below 299"),
        (COMPLETIONS, json!({ "prompt": "a", "suffix": "b" }), "no fill-in-the-middle tokens"),
        ("/infill", json!({ "input_prefix": "a" }), "nor has any other model"),
        ("/api/generate", json!({ "prompt": "a", "suffix": "b" }), "suffix is not for"),
        (COMPLETIONS, json!({ "prompt": "a", "unknown": 1 }), "unknown is not supported"),
        (COMPLETIONS, json!({ "prompt": "a", "n": 2 }), "n must be 1"),
        (CHAT, json!({ "prompt": "a" }), "/v1/completions"),
    ] {
        let mut body = body;
        body["model"] = json!(world.model);
        let refused = ask(gateway, path, &world, &body);
        assert!(refused.status == 400 && refused.body.contains(words), "{path}: {refused:?}");
    }
    // The node itself takes conversations only.
    for prompt in [json!("a"), json!([1]), json!({ "prefix": "a", "suffix": "b" })] {
        let body = json!({ "model": world.model, "prompt": prompt });
        let refused = world.post(Uuid::new_v4(), &body).await;
        assert_eq!(refused.error(), (400, "invalid_request".to_owned()));
        assert_eq!(refused.json()["error"]["param"], "prompt");
    }
    assert_eq!((spent(&world).await, seen.lock().unwrap().len()), (0, 0));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_told_as_tokens_and_as_text() {
    let mut world = World::new().await;
    let gateway = world.open_gateway().await;
    let user = json!([{ "role": "user", "content": "hello <|im_end|>" }]);
    let prompt = "<|im_start|>user\nhello <|im_end|><|im_end|>\n<|im_start|>assistant\n";
    let text = "hello é<|im_end|>";
    let ids = tokens(&world, text);
    let plain = world.node.pool.models()[0].text.tokenizer.encode(text, false).unwrap();
    let told = |ids: &[u32]| json!({ "tokens": ids, "count": ids.len(), "max_model_len": 1024 });
    for (path, body, expect) in [
        ("/tokenize", json!({ "content": text }), told(&ids)),
        ("/tokenize", json!({ "prompt": text, "add_special_tokens": false }), told(&ids)),
        ("/tokenize", json!({ "content": text, "parse_special": false }), told(&plain)),
        ("/tokenize", json!({ "content": "" }), told(&[])),
        ("/detokenize", json!({ "tokens": ids }), json!({ "content": text, "prompt": text })),
        ("/apply-template", json!({ "messages": user }), json!({ "prompt": prompt })),
    ] {
        let answer = ask(gateway, path, &world, &body);
        assert_eq!((answer.status, answer.json()), (200, expect), "{path} {body}");
    }
    let with_pieces = json!({ "content": "hello é", "with_pieces": true });
    let pieces = ask(gateway, "/tokenize", &world, &with_pieces).json()["tokens"].clone();
    let pieces: Vec<&Value> = pieces.as_array().unwrap().iter().map(|one| &one["piece"]).collect();
    assert_eq!(pieces, [&json!("hello"), &json!(" "), &json!([0xC3]), &json!([0xA9])]);
    let conversation = ask(gateway, "/tokenize", &world, &json!({ "messages": user })).json();
    let asked = world.ask(json!({ "messages": user }));
    let usage = ask(gateway, CHAT, &world, &asked).json()["usage"].clone();
    assert_eq!(conversation["count"], usage["prompt_tokens"]);
    let charged = cost_of(&json!({ "usage": usage }));
    assert_eq!(spent(&world).await, charged, "the answer alone is charged");
    let foreign = json!({ "tokens": [5_000_000] });
    assert_eq!(ask(gateway, "/detokenize", &world, &foreign).status, 400);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_prompt_may_have_is_bounded() {
    let mut world = World::with(|setup| {
        setup.marks = MARKS;
        let bounds = &mut setup.config.gateway;
        (bounds.max_files, bounds.max_token_ids) = (1, 3);
    })
    .await;
    let gateway = world.open_gateway().await;
    let file = json!({ "text": "a" });
    for (path, body, status, words) in [
        (COMPLETIONS, json!({ "prompt": [5, 6, 7] }), 200, ""),
        (COMPLETIONS, json!({ "prompt": [5, 6, 7, 8] }), 400, "prompt must have at most 3 items"),
        ("/detokenize", json!({ "tokens": [5, 6, 7, 8] }), 400, "at most 3 items"),
        ("/tokenize", json!({ "content": "xyz" }), 200, ""),
        ("/tokenize", json!({ "content": "xyzx" }), 400, "(gateway.max_token_ids)"),
        ("/infill", json!({ "input_extra": [file] }), 200, ""),
        ("/infill", json!({ "input_extra": [file, file] }), 400, "files must have at most 1"),
    ] {
        let mut body = body;
        body["model"] = json!(world.model);
        let answer = ask(gateway, path, &world, &body);
        assert!(answer.status == status && answer.body.contains(words), "{path}: {answer:?}");
    }
    world.close().await;
}
