//! Thinking and calls of tools, with the templates of real releases over a scripted engine: told
//! apart, streamed, charged and replayed; or refused before anything is reserved.

use super::support::{Answer, Setup, World, tiny_gguf};
use super::text_parity::sdist_models;
use cresset_models::ModelSource;
use cresset_request::Plan;
use cresset_text::TextModel;
use serde_json::{Value, json};
use uuid::Uuid;

/// Tokens that the families have for their marks.
pub const MARKS: &[&str] = &[
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

/// Tokens of a family whose answers are messages in channels.
const CHANNEL_MARKS: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
];

/// Tokens of a family that writes names and values between marks.
const VALUE_MARKS: &[&str] = &[
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
    "<|think|>",
    "<|tool_response>",
];

/// Tokens of families that write calls as Python does, or the call's id.
const OTHER_MARKS: &[&str] = &[
    "<think>",
    "</think>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
];

const IN_CHANNELS: &str = "openai-gpt-oss-120b";
const IN_VALUES: &str = "google-gemma-4-31B-it";
const IN_PYTHON: &str = "LFM2.5-8B-A1B";
const WITH_IDS: &str = "Mistral-Small-3.2-24B-Instruct-2506";
pub const THINKER: &str = "Qwen-Qwen3-0.6B";
/// Its template has no switch.
const THINKS_ALWAYS: &str = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B";
pub const CALLER: &str = "Qwen-Qwen2.5-7B-Instruct";

pub fn template(name: &str) -> String {
    std::fs::read_to_string(sdist_models().join(format!("templates/{name}.jinja"))).unwrap()
}

fn marks_of(name: &str) -> &'static [&'static str] {
    match name {
        IN_CHANNELS => CHANNEL_MARKS,
        IN_VALUES => VALUE_MARKS,
        IN_PYTHON | WITH_IDS => OTHER_MARKS,
        _ => MARKS,
    }
}

/// A node whose model has this release's template, and this reply.
pub async fn node(name: &str, reply: &'static str, choose: impl FnOnce(&mut Setup)) -> World {
    let template: &'static str = template(name).leak();
    World::with(|setup| {
        (setup.template, setup.marks, setup.reply) = (Some(template), marks_of(name), reply);
        setup.context_tokens = 2048;
        choose(setup);
    })
    .await
}

pub fn with_plan(setup: &mut Setup, change: impl FnOnce(&mut Plan)) {
    change(setup.config.plans.get_mut("default").unwrap());
}

#[test]
fn real_templates_have_the_format_of_their_family() {
    let folder = tempfile::tempdir().unwrap();
    for (name, calls, thinks) in [
        (CALLER, Some("Qwen 2.5"), false),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", Some("Hermes"), false),
        (THINKER, Some("Qwen 2.5 and 3"), true),
        ("Qwen-QwQ-32B", Some("Qwen 2.5 and 3"), true),
        ("Qwen3-Coder", Some("Qwen3-Coder"), false),
        ("Qwen3.5-4B", Some("Qwen 3.5"), true),
        ("GLM-4.6", Some("GLM 4.5"), true),
        ("GLM-4.7-Flash", Some("GLM 4.7"), true),
        ("ibm-granite-granite-4.0", Some("Hermes"), false),
        ("ibm-granite-granite-4.1", Some("Hermes"), false),
        ("mistralai-Mistral-Nemo-Instruct-2407", Some("Nemo"), false),
        ("mistralai-Ministral-3-14B-Reasoning-2512", Some("Mistral v13"), true),
        ("meta-llama-Llama-3.1-8B-Instruct", Some("Llama 3.1"), false),
        ("llama-cpp-deepseek-r1", Some("DeepSeek V3 and R1"), true),
        (IN_CHANNELS, Some("GPT-OSS"), true),
        (IN_VALUES, Some("Gemma 4"), true),
        (IN_PYTHON, Some("LFM2.5"), true),
        (WITH_IDS, Some("Mistral v11"), false),
        // These leave earlier calls out of a prompt, or do not tell of tools.
        ("LFM2-8B-A1B", None, false),
        ("HuggingFaceTB-SmolLM3-3B", None, true),
        ("deepseek-ai-DeepSeek-V3.1", None, true),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", None, true),
        ("google-gemma-2-2b-it", None, false),
        ("microsoft-Phi-3.5-mini-instruct", None, false),
    ] {
        let file = folder.path().join("tiny.gguf");
        std::fs::write(&file, tiny_gguf(0, Some(&template(name)), marks_of(name)).to_bytes())
            .unwrap();
        let model = TextModel::load(&ModelSource::gguf(file)).unwrap();
        let family = model.calls.map(|format| format.family);
        let is_known = match (family, calls) {
            (Some(family), Some(expect)) => family.contains(expect),
            (family, expect) => family == expect,
        };
        assert!(is_known, "{name}: {family:?}, not {calls:?}");
        assert_eq!(model.thinking.is_some(), thinks, "{name}");
    }
}

/// The parts of an answer, plain or joined from a stream: thought, content and calls.
#[derive(Debug, Default, PartialEq)]
struct Parts {
    thought: Option<String>,
    content: String,
    calls: Vec<[String; 3]>,
    reason: String,
    usage: Value,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn plain(answer: &Answer) -> Parts {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let call = |call: &Value| {
        assert_eq!(call["type"], "function");
        [&call["id"], &call["function"]["name"], &call["function"]["arguments"]].map(text)
    };
    Parts {
        thought: message.get("reasoning_content").map(text),
        content: text(&message["content"]),
        calls: message["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
        reason: text(&choice["finish_reason"]),
        usage: answer["usage"].clone(),
    }
}

fn joined(answer: &Answer) -> Parts {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut parts = Parts::default();
    for event in answer.events() {
        let Ok(event) = serde_json::from_str::<Value>(&event) else { continue };
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        parts.content += &text(&delta["content"]);
        if let Some(thought) = delta.get("reasoning_content") {
            *parts.thought.get_or_insert_default() += &text(thought);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let at = call["index"].as_u64().unwrap() as usize;
            if let Some(id) = call.get("id") {
                assert_eq!((at, &call["type"]), (parts.calls.len(), &json!("function")));
                let name = text(&call["function"]["name"]);
                parts.calls.push([text(id), name, String::new()]);
            }
            parts.calls[at][2] += &text(&call["function"]["arguments"]);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            (parts.reason, parts.usage) = (reason.into(), event["usage"].clone());
        }
    }
    parts
}

/// Asks plainly, again, streamed, and once more for the stream. The answers agree, are replayed
/// byte for byte, and cost what their usage says.
async fn ask(world: &World, extra: &Value) -> Parts {
    let before = world.balances().await;
    let mut body = world.ask(extra.clone());
    let id = Uuid::new_v4();
    let (answer, again) = (world.post(id, &body).await, world.post(id, &body).await);
    let parts = plain(&answer);
    assert_eq!((again.header("idempotent-replayed"), &again.body), ("true", &answer.body));
    body["stream"] = json!(true);
    let streamed = Uuid::new_v4();
    let stream = world.post(streamed, &body).await;
    let attached = joined(&world.post(streamed, &body).await);
    let mut stream = joined(&stream);
    // Ids are the request's own; the second prompt is in the cache.
    assert_eq!(attached, stream);
    assert_eq!(stream.calls.len(), parts.calls.len());
    for (own, other) in stream.calls.iter_mut().zip(&parts.calls) {
        own[0].clone_from(&other[0]);
    }
    let details = "completion_tokens_details";
    assert_eq!(stream.usage[details], parts.usage[details]);
    stream.usage = parts.usage.clone();
    if parts.thought.as_deref() == Some("") {
        stream.thought.get_or_insert_default();
    }
    assert_eq!(stream, parts);
    let mut charged = 0;
    for id in [id, streamed] {
        let request = world.request(id).await;
        assert_eq!(request["state"], "completed");
        let tokens = |name: &str| request["usage"][name].as_u64().unwrap();
        assert_eq!(request["usage"]["completion_tokens"], parts.usage["completion_tokens"]);
        assert!(tokens("completion_tokens") > 0);
        charged += request["chargedUnits"].as_str().unwrap().parse::<u64>().unwrap();
    }
    let after = world.balances().await;
    assert_eq!(before.iter().sum::<u64>() - after.iter().sum::<u64>(), charged);
    parts
}

fn reasoning_tokens(parts: &Parts) -> u64 {
    parts.usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_model_thinks_is_told_apart() {
    // Two tokens are the marks, "hm" and "so" are two each, and two line breaks stand between.
    let reply = "<think>\nhm\n</think>\n\nso";
    let world = node(THINKER, reply, |_| {}).await;
    let model = &world.get("/v1/models").await.json()["data"][0];
    assert_eq!(model["capabilities"], json!(["json_schema", "tools", "reasoning"]));
    let parts = ask(&world, &json!({})).await;
    assert_eq!((parts.thought.as_deref(), parts.content.as_str()), (Some("hm"), "so"));
    assert_eq!((parts.reason.as_str(), reasoning_tokens(&parts)), ("stop", 6));
    let cut = ask(&world, &json!({ "max_tokens": 4 })).await;
    assert_eq!((cut.thought.as_deref(), cut.content.as_str()), (Some("hm"), ""));
    assert_eq!((cut.reason.as_str(), reasoning_tokens(&cut)), ("length", 4));
    // A stop string is looked for in the answer alone.
    let stopped = ask(&world, &json!({ "stop": ["hm", "o"] })).await;
    assert_eq!((stopped.thought.as_deref(), stopped.content.as_str()), (Some("hm"), "s"));
    world.close().await;
    // Where the prompt ends with the opening mark, the answer has the closing one alone.
    let world = node("Qwen3.5-4B", "hm\n</think>\n\nso", |_| {}).await;
    let parts = ask(&world, &json!({})).await;
    assert_eq!((parts.thought.as_deref(), parts.content.as_str()), (Some("hm"), "so"));
    assert_eq!(reasoning_tokens(&parts), 4);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_be_messages_in_channels() {
    let reply = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant\
        <|channel|>final<|message|>yes<|return|>";
    let world = node(IN_CHANNELS, reply, |_| {}).await;
    let model = &world.get("/v1/models").await.json()["data"][0];
    assert_eq!(model["capabilities"], json!(["json_schema", "tools", "reasoning"]));
    let tokenizer = &world.node.pool.models()[0].text.tokenizer;
    let thought = tokenizer.encode(reply.split_inclusive("<|end|>").next().unwrap(), true);
    let thought = thought.unwrap().len() as u64;
    for extra in [json!({}), json!({ "guided_choice": ["yes", "no"] })] {
        let parts = ask(&world, &extra).await;
        assert_eq!((parts.thought.as_deref(), parts.content.as_str()), (Some("hm"), "yes"));
        assert_eq!((parts.reason.as_str(), reasoning_tokens(&parts)), ("stop", thought));
    }
    let prompt =
        async |extra: Value| ask(&world, &extra).await.usage["prompt_tokens"].as_u64().unwrap();
    let medium = prompt(json!({})).await;
    assert!(prompt(json!({ "reasoning_effort": "high" })).await < medium);
    // A thought is told again where a call follows it and no answer came since.
    let called = |thought: Value| {
        let call = json!([{ "id": "a", "type": "function",
            "function": { "name": "lamp", "arguments": "{}" } }]);
        json!({ "messages": [
            { "role": "user", "content": "hello" },
            { "role": "assistant", "content": null, "tool_calls": call,
              "reasoning_content": thought },
            { "role": "tool", "tool_call_id": "a", "content": "done" },
        ] })
    };
    assert!(prompt(called(json!("hm hm hm"))).await > prompt(called(Value::Null)).await);
    world.close().await;
    let plain = node(IN_CHANNELS, reply, |setup| with_plan(setup, |plan| plan.reasoning = false));
    let plain = plain.await;
    let parts = ask(&plain, &json!({})).await;
    assert_eq!((parts.thought, parts.content.as_str()), (None, "hm\nyes"));
    // The reply is not what the grammar allows: the seed says how the answer is cut into tokens.
    let parts = ask(&plain, &json!({ "guided_choice": ["yes"], "seed": 1 })).await;
    assert_eq!((parts.thought, parts.content.as_str()), (None, "yes"));
    plain.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_format_begins_behind_the_thought() {
    let world = node(THINKER, "<think>\nhm\n</think>\n\nyes", |_| {}).await;
    let parts = ask(&world, &json!({ "guided_choice": ["yes", "no"] })).await;
    assert_eq!((parts.thought.as_deref(), parts.content.as_str()), (Some("hm"), "yes"));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_may_leave_thoughts_in_the_answer() {
    let world = node(THINKER, "<think>\nhm\n</think>\n\nso", |setup| {
        with_plan(setup, |plan| plan.reasoning = false);
    })
    .await;
    let parts = ask(&world, &json!({})).await;
    assert_eq!(parts.content, "<think>\nhm\n</think>\n\nso");
    assert_eq!((parts.thought, &parts.usage["completion_tokens_details"]), (None, &Value::Null));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thinking_is_switched_as_the_template_knows() {
    let world = node(THINKER, "so", |_| {}).await;
    let prompt = async |extra: Value| {
        let parts = ask(&world, &extra).await;
        parts.usage["prompt_tokens"].as_u64().unwrap()
    };
    let plain = prompt(json!({})).await;
    let off = prompt(json!({ "chat_template_kwargs": { "enable_thinking": false } })).await;
    // The template writes an empty thought: two marks and four line breaks.
    assert!(off > plain, "{off} and {plain}");
    assert_eq!(prompt(json!({ "reasoning_effort": "none" })).await, off);
    assert_eq!(prompt(json!({ "reasoning_effort": "high" })).await, plain);
    // An earlier thought is left out by this template, unless calls of tools followed it.
    let turns = |thought: Value| {
        json!({ "messages": [
            { "role": "user", "content": "a" },
            { "role": "assistant", "content": "b", "reasoning_content": thought },
            { "role": "user", "content": "c" },
        ] })
    };
    assert_eq!(prompt(turns(json!("hm hm hm"))).await, prompt(turns(Value::Null)).await);
    let both =
        json!({ "reasoning_effort": "none", "chat_template_kwargs": { "enable_thinking": true } });
    refused(&world, &both, "reasoning_effort", "contradicts").await;
    let unknown = json!({ "chat_template_kwargs": { "thinkng": true } });
    refused(&world, &unknown, "chat_template_kwargs.thinkng", "leave it out").await;
    let taken = json!({ "chat_template_kwargs": { "messages": 1 } });
    refused(&world, &taken, "chat_template_kwargs.messages", "leave it out").await;
    world.close().await;
    let world = World::new().await;
    refused(&world, &json!({ "reasoning_effort": "low" }), "reasoning_effort", "no switch").await;
    refused(&world, &turns(json!("hm")), "messages[1].reasoning_content", "does not think").await;
    let lowest =
        world.post(Uuid::new_v4(), &world.ask(json!({ "reasoning_effort": "none" }))).await;
    assert_eq!((lowest.status, lowest.header("x-ignored-params")), (200, "reasoning_effort"));
    world.close().await;
    // A model that always thinks has one degree of it, and cannot do without.
    let world = node(THINKS_ALWAYS, "hm\n</think>\n\nso", |_| {}).await;
    let high = world.post(Uuid::new_v4(), &world.ask(json!({ "reasoning_effort": "high" }))).await;
    assert_eq!((high.status, high.header("x-ignored-params")), (200, "reasoning_effort"));
    refused(&world, &json!({ "reasoning_effort": "none" }), "reasoning_effort", "no switch").await;
    world.close().await;
}

/// The request is refused for this field, in these words, and nothing is reserved.
async fn refused(world: &World, extra: &Value, param: &str, why: &str) {
    let (id, before) = (Uuid::new_v4(), world.balances().await);
    let answer = world.post(id, &world.ask(extra.clone())).await;
    assert_eq!(answer.error(), (400, "invalid_request".into()), "{extra}: {}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(error["param"], param, "{extra}: {error}");
    assert!(error["message"].as_str().unwrap().contains(why), "{extra}: {error}");
    assert_eq!(world.get(&format!("/v1/requests/{id}")).await.status, 404, "{extra}");
    assert_eq!(world.balances().await, before);
}

pub fn tool(name: &str) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": { "state": { "type": "string", "enum": ["on", "off"] } },
        "required": ["state"],
        "additionalProperties": false,
    });
    let function = json!({ "name": name, "description": "Switches it.", "parameters": parameters });
    json!({ "type": "function", "function": function })
}

/// A request with two tools and these members.
pub fn with_tools(extra: &Value) -> Value {
    let mut members = json!({ "tools": [tool("lamp"), tool("fan")], "max_tokens": 400 });
    members.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    members
}

/// What each family writes for a call of the lamp, behind a text where it may have one.
pub const REPLIES: [(&str, &str, &str); 11] = [
    (
        CALLER,
        "I see.\n<tool_call>\n{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}}\n</tool_call>",
        "I see.",
    ),
    (
        "Qwen3-Coder",
        "I see.\n\n<tool_call>\n<function=lamp>\n<parameter=state>\non\n</parameter>\n</function>\n</tool_call>",
        "I see.",
    ),
    (
        "GLM-4.6",
        "\n<tool_call>lamp\n<arg_key>state</arg_key>\n<arg_value>on</arg_value>\n</tool_call>",
        "",
    ),
    (
        "mistralai-Mistral-Nemo-Instruct-2407",
        "[TOOL_CALLS][{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}, \"id\": \"abcdefghi\"}]",
        "",
    ),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "[TOOL_CALLS]lamp[ARGS]{\"state\": \"on\"}", ""),
    (
        "llama-cpp-deepseek-r1",
        "</think>\n\nI see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>lamp\n```json\n{\"state\": \"on\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I see.",
    ),
    (
        "GLM-4.7-Flash",
        "hm</think><tool_call>lamp<arg_key>state</arg_key><arg_value>on</arg_value></tool_call>",
        "",
    ),
    (
        IN_VALUES,
        "I see.<|tool_call>call:lamp{state:<|\"|>on<|\"|>}<tool_call|><|tool_response>",
        "I see.",
    ),
    (IN_PYTHON, "<|tool_call_start|>[lamp(state='on')]<|tool_call_end|>", ""),
    (
        IN_CHANNELS,
        "<|channel|>commentary<|message|>I see.<|end|><|start|>assistant<|channel|>commentary to=functions.lamp <|constrain|>json<|message|>{\"state\": \"on\"}<|call|>",
        "I see.",
    ),
    (
        "meta-llama-Llama-3.1-8B-Instruct",
        "{\"name\": \"lamp\", \"parameters\": {\"state\": \"on\"}}",
        "",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_called_in_the_form_of_every_family() {
    for (name, reply, content) in REPLIES {
        let world = node(name, reply, |_| {}).await;
        let parts = ask(&world, &with_tools(&json!({}))).await;
        assert_eq!(
            (parts.content.as_str(), parts.reason.as_str()),
            (content, "tool_calls"),
            "{name}"
        );
        let [[id, function, arguments]] = &parts.calls[..] else { panic!("{name}: {parts:?}") };
        assert_eq!((id.len(), function.as_str()), (9, "lamp"), "{name}");
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(arguments, json!({ "state": "on" }), "{name}");
        // A model that is not told of tools answers with text.
        let silent = ask(&world, &with_tools(&json!({ "tool_choice": "none" }))).await;
        assert_eq!((silent.calls.len(), silent.reason.as_str()), (0, "stop"), "{name}");
        assert!(silent.usage["prompt_tokens"].as_u64() < parts.usage["prompt_tokens"].as_u64());
        // The call and its result come back in the next request.
        let call = json!([{ "id": id, "type": "function",
            "function": { "name": "lamp", "arguments": "{\"state\": \"on\"}" } }]);
        let turns = json!({ "messages": [
            { "role": "user", "content": "hello" },
            { "role": "assistant", "content": null, "tool_calls": call },
            { "role": "tool", "tool_call_id": id, "content": "done" },
        ] });
        let next = ask(&world, &with_tools(&turns)).await;
        assert!(next.usage["prompt_tokens"].as_u64() > parts.usage["prompt_tokens"].as_u64());
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demanded_call_is_made_whatever_the_model_would_say() {
    let mut made = 0;
    for (name, ..) in REPLIES {
        let world = node(name, "hello world", |_| {}).await;
        for seed in 0..3 {
            let only = json!({ "type": "function", "function": { "name": "fan" } });
            for (choice, names) in [(json!("required"), &["lamp", "fan"][..]), (only, &["fan"])] {
                let members =
                    json!({ "tool_choice": choice, "seed": seed, "parallel_tool_calls": false });
                let parts = ask(&world, &with_tools(&members)).await;
                // A random thought may have no end.
                if parts.reason == "length" {
                    continue;
                }
                made += 1;
                assert_eq!(parts.reason, "tool_calls", "{name}: {parts:?}");
                let [[_, function, arguments]] = &parts.calls[..] else { panic!("{parts:?}") };
                assert!(names.contains(&function.as_str()), "{name}: {parts:?}");
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert!(["on", "off"].contains(&arguments["state"].as_str().unwrap()), "{name}");
            }
        }
        world.close().await;
    }
    assert!(made >= 24, "{made} calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_calls_are_numbered_and_one_alone_may_be_asked_for() {
    let reply = "<tool_call>\n{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}}\n</tool_call>\n\
        <tool_call>\n{\"name\": \"fan\", \"arguments\": {\"state\": \"off\"}}\n</tool_call>";
    let world = node(CALLER, reply, |_| {}).await;
    let parts = ask(&world, &with_tools(&json!({}))).await;
    let names: Vec<&str> = parts.calls.iter().map(|call| call[1].as_str()).collect();
    assert_eq!(names, ["lamp", "fan"]);
    assert_ne!(parts.calls[0][0], parts.calls[1][0]);
    let one = ask(&world, &with_tools(&json!({ "parallel_tool_calls": false }))).await;
    assert_eq!(one.calls.len(), 1);
    // A model that must call would repeat its call, so one is enough unless several are asked for.
    let demanded = json!({ "tool_choice": "required" });
    assert_eq!(ask(&world, &with_tools(&demanded)).await.calls.len(), 1);
    let several = json!({ "tool_choice": "required", "parallel_tool_calls": true });
    assert_eq!(ask(&world, &with_tools(&several)).await.calls.len(), 2);
    let cut = ask(&world, &with_tools(&json!({ "max_tokens": 40 }))).await;
    assert_eq!((cut.reason.as_str(), cut.calls.len()), ("length", 1));
    assert!(parts.calls[0][2].starts_with(&cut.calls[0][2]));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_marks_is_a_call_where_it_is_the_whole_answer() {
    let call = "```json\n{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}}\n```";
    let spoken = "```json\n{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}}\n``` Done.";
    for (reply, reason, calls) in [(call, "tool_calls", 1), (spoken, "stop", 0)] {
        let world = node(CALLER, reply, |_| {}).await;
        let parts = ask(&world, &with_tools(&json!({}))).await;
        assert_eq!((parts.reason.as_str(), parts.calls.len()), (reason, calls), "{parts:?}");
        assert_eq!(parts.content, if calls == 0 { reply } else { "" });
        for call in &parts.calls {
            assert_eq!(call[1..], ["lamp", "{\"state\": \"on\"}"]);
        }
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_may_think_before_it_calls() {
    let reply = "<think>\nhm\n</think>\n\n\
        <tool_call>\n{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}}\n</tool_call>";
    let world = node(THINKER, reply, |_| {}).await;
    for choice in ["auto", "required"] {
        let parts = ask(&world, &with_tools(&json!({ "tool_choice": choice }))).await;
        assert_eq!((parts.thought.as_deref(), parts.content.as_str()), (Some("hm"), ""));
        assert_eq!((parts.reason.as_str(), &parts.calls[0][1][..]), ("tool_calls", "lamp"));
    }
    world.close().await;
}

/// Of a strict function such a rule is refused, with its place.
#[tokio::test(flavor = "multi_thread")]
async fn rules_that_a_family_cannot_write_are_left_out_and_named() {
    for (name, is_kept) in
        [(IN_VALUES, false), (IN_PYTHON, false), ("Qwen3-Coder", false), (CALLER, true)]
    {
        let reply = REPLIES.iter().find(|(family, ..)| *family == name).unwrap().1;
        let world = node(name, reply, |_| {}).await;
        for strict in [false, true] {
            let mut lamp = tool("lamp");
            lamp["function"]["strict"] = json!(strict);
            let state = json!({ "type": "string", "pattern": "^on?$" });
            lamp["function"]["parameters"]["properties"]["state"] = state;
            let messages = json!([{ "role": "user", "content": "hello" }]);
            let body = json!({ "messages": messages, "tools": [lamp], "max_tokens": 400 });
            let answer = world.post(Uuid::new_v4(), &world.ask(body)).await;
            if strict && !is_kept {
                let error = &answer.json()["error"];
                assert_eq!(error["param"], "tools[0].function.parameters", "{name}");
                let way_out = "leave pattern out, or strict (at #/properties/state/pattern)";
                assert!(answer.text().contains(way_out), "{name}: {}", answer.text());
                continue;
            }
            let path = "tools[0].function.parameters.properties.state.pattern";
            let named = if is_kept { "" } else { path };
            assert_eq!(
                (answer.status, answer.header("x-ignored-params")),
                (200, named),
                "{name}: {}",
                answer.text()
            );
        }
        world.close().await;
    }
}

/// A model whose qualification withheld the choice calls where it has to.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_chooses_badly_is_not_left_the_choice() {
    let reply =
        "<tool_call>\n{\"name\": \"lamp\", \"arguments\": {\"state\": \"on\"}}\n</tool_call>";
    let world = node(CALLER, reply, |setup| setup.withheld = &["tool_choice"]).await;
    let model = &world.get("/v1/models").await.json()["data"][0];
    assert_eq!(model["capabilities"], json!(["json_schema", "tools_forced"]));
    for choice in [json!({}), json!({ "tool_choice": "auto" })] {
        refused(&world, &with_tools(&choice), "tools", "send `tool_choice`").await;
    }
    for (choice, reason) in [("required", "tool_calls"), ("none", "stop")] {
        let parts = ask(&world, &with_tools(&json!({ "tool_choice": choice }))).await;
        assert_eq!(parts.reason, reason, "{choice}: {parts:?}");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_refused_where_they_are_not_to_be_had() {
    let plain = World::new().await;
    refused(&plain, &with_tools(&json!({})), "tools", "text only").await;
    // What is wrong with a definition is told by models that have tools.
    refused(&plain, &json!({ "tools": [{}] }), "tools", "text only").await;
    plain.close().await;
    let barred = node(CALLER, "so", |setup| with_plan(setup, |plan| plan.tools = false)).await;
    let model = &barred.get("/v1/models").await.json()["data"][0];
    assert_eq!(model["capabilities"], json!(["json_schema"]));
    refused(&barred, &with_tools(&json!({})), "tools", "plan").await;
    barred.close().await;
    let world = node(CALLER, "so", |_| {}).await;
    let of = |parameters: Value| {
        json!({ "tools": [tool("lamp"),
            { "type": "function", "function": { "name": "f", "parameters": parameters } }] })
    };
    let path = "tools[1].function.parameters";
    for (extra, param, why) in [
        (json!({ "tools": [{}] }), "tools[0].name", "required"),
        (json!({ "tools": [tool("f"), tool("f")] }), "tools[1]", "name of another"),
        (of(json!({ "type": "array" })), path, "object"),
        (of(json!({ "type": "object", "not": {} })), "tools[1].function.parameters.not", ""),
        (
            of(
                json!({ "type": "object", "required": ["a"], "properties": { "a": { "type": "string", "minLength": 2, "maxLength": 1 } } }),
            ),
            path,
            "cannot be kept to",
        ),
        (with_tools(&json!({ "guided_regex": "a" })), "guided_regex", "send one of them"),
        (
            with_tools(
                &json!({ "tool_choice": { "type": "function", "function": { "name": "g" } } }),
            ),
            "tool_choice",
            "not among the tools",
        ),
    ] {
        refused(&world, &extra, param, why).await;
    }
    world.close().await;
}
