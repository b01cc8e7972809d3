//! Answers that keep to a format: honoured as it was given, charged and replayed as any answer, or
//! refused before anything is reserved. The scripted engine takes any token that the format allows.

use super::process::Customer;
use super::support::World;
use cresset_request::Plan;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use uuid::Uuid;

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "b": { "type": "integer", "minimum": 0, "maximum": 99 },
            "a": { "enum": ["left", "right"] },
        },
        "required": ["b", "a"],
        "additionalProperties": false,
    })
}

/// A body whose other members are `more`.
fn asking(world: &World, more: &Value) -> Value {
    let mut body =
        json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 200 });
    let members = body.as_object_mut().unwrap();
    members.extend(more.as_object().unwrap().clone());
    world.ask(body)
}

fn is_of_schema(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap();
    let names: Vec<&String> = value.as_object().unwrap().keys().collect();
    names == ["b", "a"]
        && value["b"].as_i64().is_some_and(|number| (0..=99).contains(&number))
        && value["a"].as_str().is_some_and(|word| ["left", "right"].contains(&word))
}

type Holds = fn(&str) -> bool;

const GBNF: &str = "root ::= \"(\" root \")\" | \"x\"";

fn tags() -> Value {
    let structure = json!({ "begin": "<f=a>", "schema": schema(), "end": "</f>" });
    json!({ "type": "structural_tag", "structures": [structure], "triggers": ["<f="] })
}

fn newer_tags() -> Value {
    let content = json!({ "type": "json_schema", "json_schema": schema() });
    let tag = json!({ "type": "tag", "begin": "<f=a>", "content": content, "end": "</f>" });
    let format = json!({ "type": "triggered_tags", "triggers": ["<f="], "tags": [tag],
        "at_least_one": true });
    json!({ "type": "structural_tag", "format": format })
}

/// Whether every part that a trigger begins is one of the schema.
fn is_tagged(text: &str) -> bool {
    text.split("<f=").skip(1).all(|part| {
        let inner = part.strip_prefix("a>").and_then(|rest| rest.split_once("</f>"));
        inner.is_some_and(|(inner, _)| is_of_schema(inner))
    })
}

/// Every spelling of every kind of format, with what holds of its answers.
fn formats() -> Vec<(Value, Holds)> {
    let of = |kind: Value| json!({ "response_format": kind });
    let named = |schema: Value| json!({ "name": "reply", "schema": schema, "strict": true });
    let is_number: Holds = |text| text.len() == 3 && text.bytes().all(|b| b.is_ascii_digit());
    let is_word: Holds = |text| ["yes", "no"].contains(&text);
    let is_nested: Holds = |text| text.matches('(').count() == text.matches(')').count();
    vec![
        (of(json!({ "type": "json_schema", "json_schema": named(schema()) })), is_of_schema),
        (json!({ "structured_outputs": { "json": schema() } }), is_of_schema),
        (json!({ "guided_json": schema().to_string() }), is_of_schema),
        (json!({ "structured_outputs": { "regex": "[0-9]{3}" } }), is_number),
        (json!({ "guided_regex": "[0-9]{3}" }), is_number),
        (json!({ "structured_outputs": { "choice": ["yes", "no"] } }), is_word),
        (json!({ "guided_choice": ["yes", "no"] }), is_word),
        (
            json!({ "structured_outputs": { "grammar": "start: \"(\" start \")\" | \"x\"" } }),
            is_nested,
        ),
        (json!({ "guided_grammar": "start: \"(\" start \")\" | \"x\"" }), is_nested),
        (json!({ "json_schema": schema() }), is_of_schema),
        (json!({ "json_schema": schema().to_string() }), is_of_schema),
        (json!({ "regex": "[0-9]{3}" }), is_number),
        (json!({ "guided_grammar": GBNF }), is_nested),
        (json!({ "structured_outputs": { "grammar": GBNF } }), is_nested),
        (json!({ "grammar": GBNF }), is_nested),
        (json!({ "ebnf": GBNF }), is_nested),
        (of(tags()), is_tagged),
        (json!({ "structural_tag": tags() }), is_tagged),
        (json!({ "structural_tag": tags().to_string() }), is_tagged),
        (json!({ "structured_outputs": { "structural_tag": newer_tags() } }), is_tagged),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_keep_to_their_format_and_are_replayed_for_nothing() {
    let world = World::new().await;
    for (seed, (format, holds)) in (1..).zip(formats()) {
        let mut body = asking(&world, &format);
        body["seed"] = json!(seed);
        let id = Uuid::new_v4();
        let answer = world.post(id, &body).await;
        assert_eq!(answer.status, 200, "{format}: {}", answer.text());
        let json = answer.json();
        let choice = &json["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        if choice["finish_reason"] == "stop" {
            assert!(holds(text), "{format}: {text}");
        }
        assert_eq!(answer.header("x-ignored-params"), "");
        let again = world.post(id, &body).await;
        assert_eq!((again.header("idempotent-replayed"), &again.body), ("true", &answer.body));
        let streamed = asking(&world, &json!({ "stream": true, "seed": seed }));
        let mut streamed = streamed;
        streamed.as_object_mut().unwrap().extend(format.as_object().unwrap().clone());
        let events = world.post(Uuid::new_v4(), &streamed).await.events();
        let piece = |event: &String| -> Option<String> {
            let event: Value = serde_json::from_str(event).ok()?;
            Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned())
        };
        assert_eq!(events.iter().filter_map(piece).collect::<String>(), text, "{format}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_json_object_is_one_when_it_ends() {
    let world = World::new().await;
    let mut ended = 0;
    for seed in 0..20 {
        let body = json!({ "response_format": { "type": "json_object" }, "seed": seed });
        let answer = world.post(Uuid::new_v4(), &asking(&world, &body)).await.json();
        let choice = &answer["choices"][0];
        if choice["finish_reason"] == "stop" {
            let text = choice["message"]["content"].as_str().unwrap();
            assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
            ended += 1;
        }
    }
    assert!(ended > 0, "no answer came to its end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_answer_says_so() {
    let world = World::new().await;
    let body = json!({ "guided_regex": "a{100}", "max_tokens": 7 });
    let answer = world.post(Uuid::new_v4(), &asking(&world, &body)).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 7);
}

const OLD_DRAFT: &str = "http://json-schema.org/draft-04/schema#";

/// Fields and values that are refused, each with the parameter that the refusal names.
fn refusals() -> Vec<(Value, &'static str)> {
    let of = |schema: Value| json!({ "guided_json": schema });
    let strict = |schema: Value| {
        let schema = json!({ "schema": schema, "strict": true });
        json!({ "response_format": { "type": "json_schema", "json_schema": schema } })
    };
    let open = json!({ "type": "object", "properties": { "a": {} }, "required": ["a"] });
    let partial =
        json!({ "type": "object", "properties": { "a": {} }, "additionalProperties": false });
    let path = "response_format.json_schema.schema";
    let optional: Value = (0..990).map(|at| (format!("p{at}"), json!(true))).collect();
    vec![
        (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
        (of(json!({ "type": "string", "minLenght": 3 })), "guided_json.minLenght"),
        (of(json!({ "items": { "contains": {} } })), "guided_json.items.contains"),
        (of(json!({ "x-guidance": { "lenient": true } })), "guided_json.x-guidance"),
        (of(json!({ "type": "array", "uniqueItems": true })), "guided_json.uniqueItems"),
        (of(json!({ "$schema": OLD_DRAFT, "not": {} })), "guided_json.not"),
        (of(json!({ "dependencies": {} })), "guided_json.dependencies"),
        (of(json!({ "items": { "requierd": [] } })), "guided_json.items.requierd"),
        (of(json!({ "oneOf": [{ "minimum": 1 }, { "maximum": 9 }] })), "guided_json"),
        (of(json!({ "prefixItems": [true], "additionalItems": false })), "guided_json.prefixItems"),
        (of(json!({ "$ref": "#" })), "guided_json"),
        (of(json!({ "$ref": "http://127.0.0.1:1/schema" })), "guided_json"),
        (of(json!([])), "guided_json"),
        (of(json!("{")), "guided_json"),
        (strict(open), path),
        (strict(partial), path),
        (json!({ "guided_regex": "(" }), "guided_regex"),
        (json!({ "guided_regex": "" }), "guided_regex"),
        (json!({ "guided_regex": "((a{1,1000}){1,1000}){1,1000}" }), "guided_regex"),
        (of(json!({ "properties": optional })), "guided_json"),
        (json!({ "guided_choice": [] }), "guided_choice"),
        (json!({ "guided_grammar": "root ::= \"x" }), "guided_grammar"),
        (json!({ "grammar": "start: \"a\" start" }), "grammar"),
        (json!({ "ebnf": "start: \"x\"" }), "ebnf"),
        (json!({ "json_schema": { "not": {} } }), "json_schema.not"),
        (json!({ "regex": "a", "ebnf": GBNF }), "regex"),
        (json!({ "regex": "a", "guided_whitespace_pattern": " " }), "guided_whitespace_pattern"),
        (
            json!({ "structured_outputs": { "regex": "a", "disable_additional_properties": true } }),
            "structured_outputs.disable_additional_properties",
        ),
        (json!({ "structural_tag": { "structures": [] } }), "structural_tag.structures"),
        (
            json!({ "response_format": { "type": "structural_tag", "structures": tags()["structures"],
                "triggers": ["<g"] } }),
            "response_format.triggers",
        ),
        (
            json!({ "structural_tag": { "format": { "type": "qwen_xml_parameter" } } }),
            "structural_tag.format",
        ),
        (json!({ "structured_outputs": {} }), "structured_outputs"),
        (json!({ "structured_outputs": { "json": {}, "regex": "a" } }), "structured_outputs"),
        (
            json!({ "structured_outputs": { "structural_tag": {} } }),
            "structured_outputs.structural_tag.structures",
        ),
        (json!({ "guided_regex": "a", "guided_choice": ["a"] }), "guided_regex"),
        (json!({ "guided_regex": "a", "ignore_eos": true }), "guided_regex"),
        (json!({ "guided_regex": "a", "min_tokens": 2 }), "guided_regex"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_honoured_is_refused_before_anything_is_reserved() {
    let world = World::new().await;
    for (format, param) in refusals() {
        let id = Uuid::new_v4();
        let answer = world.post(id, &asking(&world, &format)).await;
        assert_eq!(answer.error(), (400, "invalid_request".into()), "{format}");
        assert_eq!(answer.json()["error"]["param"], param, "{format}: {}", answer.text());
        assert_eq!(world.get(&format!("/v1/requests/{id}")).await.status, 404, "{format}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keyword_without_effect_is_named() {
    let world = World::new().await;
    for (schema, ignored) in [
        (json!({ "enum": [1], "example": 1, "title": "One" }), "guided_json.example"),
        (json!({ "type": "string", "format": "path", "maxLength": 2 }), "guided_json.format"),
    ] {
        let format = json!({ "guided_json": schema });
        let answer = world.post(Uuid::new_v4(), &asking(&world, &format)).await;
        assert_eq!((answer.status, answer.header("x-ignored-params")), (200, ignored));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_may_leave_formats_out() {
    let world = World::new().await;
    assert_eq!(
        world.get("/v1/models").await.json()["data"][0]["capabilities"],
        json!(["json_schema"])
    );
    let without = |plan: &mut Plan| plan.structured_output = false;
    let world = World::with(|setup| without(setup.config.plans.get_mut("default").unwrap())).await;
    assert_eq!(world.get("/v1/models").await.json()["data"][0]["capabilities"], json!([]));
    let refused =
        world.post(Uuid::new_v4(), &asking(&world, &json!({ "guided_regex": "a" }))).await;
    assert_eq!(refused.json()["error"]["param"], "guided_regex");
    assert!(refused.text().contains("plan"), "{}", refused.text());
}

/// A grammar that grows beyond its bounds ends its own request, which is charged for what was
/// computed and never runs again. The model is not at fault, however many such requests there are.
#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_that_grows_is_paid_for_and_harms_nobody() {
    let world = World::with(|setup| setup.reply = "a").await;
    let hostile = json!({ "guided_regex": "(.*a.{200}){5}.*b.{300}c", "max_tokens": 1000 });
    let costly = (422, "format_too_costly".to_owned());
    for _ in 0..8 {
        let id = Uuid::new_v4();
        let answer = world.post(id, &asking(&world, &hostile)).await;
        assert_eq!(answer.error(), costly, "{}", answer.text());
        assert_eq!(answer.header("x-should-retry"), "false");
        let ended = world.request(id).await;
        let end = (&ended["state"], &ended["failure_code"], &ended["attempt_count"]);
        assert_eq!(end, (&json!("failed"), &json!("format_too_costly"), &json!(1)));
        assert!(
            ended["usage"]["completion_tokens"].as_u64() > Some(0) && ended["chargedUnits"] != "0"
        );
        assert_eq!(world.post(id, &asking(&world, &hostile)).await.error(), costly);
        assert_eq!(world.request(id).await, ended, "it ran or was charged again");
    }
    let mut streamed = asking(&world, &hostile);
    streamed["stream"] = json!(true);
    let events = world.post(Uuid::new_v4(), &streamed).await.events();
    assert!(events[events.len() - 2].contains("format_too_costly"), "{events:?}");
    assert!(world.node.recent_errors.all().is_empty());
    let answer = world.post(Uuid::new_v4(), &asking(&world, &json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// A schema that nobody wrote by hand. Its texts are short, so that random answers come to an end.
fn random_schema(dice: &mut impl FnMut(usize) -> usize, depth: usize) -> Value {
    let kinds = if depth == 0 { 7 } else { 10 };
    match dice(kinds) {
        0 => json!({ "type": "integer", "minimum": -(dice(40) as i64), "maximum": dice(900) }),
        1 => json!({ "type": "number", "minimum": 0, "exclusiveMaximum": dice(50) + 1 }),
        2 => json!({ "type": ["boolean", "null"] }),
        3 => json!({ "enum": ["a", "b\n\"c\"", dice(100), null, [1, { "k": true }]] }),
        4 => json!({ "type": "string", "minLength": dice(3), "maxLength": 3 + dice(5) }),
        5 => json!({ "type": "string", "pattern": "^[a-c]{1,4}(-[0-9]{2})?$" }),
        6 => {
            let format = ["date", "uuid", "ipv4"][dice(3)];
            json!({ "type": "string", "format": format })
        }
        7 => json!({ "anyOf": [random_schema(dice, 0), { "const": "other" }] }),
        8 => {
            let most = 1 + dice(3);
            let (items, least) = (random_schema(dice, depth - 1), dice(most));
            json!({ "type": "array", "items": items, "minItems": least, "maxItems": most })
        }
        _ => {
            let names = ["z", "name", "0", "ä b", "last"];
            let members: Vec<&str> = names.into_iter().filter(|_| dice(2) == 0).collect();
            let properties: serde_json::Map<String, Value> = members
                .iter()
                .map(|name| ((*name).to_owned(), random_schema(dice, depth - 1)))
                .collect();
            let required: Vec<&str> = members.into_iter().filter(|_| dice(3) > 0).collect();
            json!({
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": false,
            })
        }
    }
}

/// Exits with 0 when every line's answer is valid by its schema; tells those that are not.
const VALIDATE: &str = "
import json, sys, jsonschema_rs
bad = 0
for line in sys.stdin:
    schema, answer = json.loads(line)
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    if not validator.is_valid(json.loads(answer)):
        bad += 1
        print(line)
sys.exit(bad > 0)
";

/// A Python with a validator that shares nothing with the masks.
fn validator() -> Option<PathBuf> {
    let pins = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/openapi");
    let (python, installed) =
        super::clients::python("schemathesis", &pins.join("requirements.txt"));
    if let Err(why) = &installed {
        eprintln!(
            "\n!!! SKIPPED: jsonschema-rs could not be installed, nothing was judged: {why}\n"
        );
    }
    installed.is_ok().then_some(python)
}

fn random_schemas(count: usize) -> Vec<Value> {
    let mut state = 7_u64;
    let mut dice = |count: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % count
    };
    (0..count).map(|_| random_schema(&mut dice, 3)).collect()
}

/// Each line is a schema and an answer to it.
fn assert_valid(python: &Path, lines: &[String]) {
    let mut child = std::process::Command::new(python)
        .args(["-c", VALIDATE])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let input = lines.join("\n");
    let mut stdin = child.stdin.take().unwrap();
    let writing =
        std::thread::spawn(move || std::io::Write::write_all(&mut stdin, input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writing.join().unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The answer with its schema, unless it was cut off.
fn whole(schema: &Value, answer: &Value) -> Option<String> {
    let choice = &answer["choices"][0];
    let is_whole = choice["finish_reason"] == "stop";
    is_whole.then(|| json!([schema, choice["message"]["content"]]).to_string())
}

/// Random answers to random schemas, judged. Returns how many were judged, and how many were cut
/// off.
async fn judge(schemas: usize, answers: u64) -> (usize, usize) {
    let Some(python) = validator() else { return (usize::MAX, 0) };
    let world = World::new().await;
    let (mut lines, mut cut) = (Vec::new(), 0);
    for schema in random_schemas(schemas) {
        for seed in 0..answers {
            let more = json!({ "guided_json": schema, "seed": seed, "max_tokens": 1_000 });
            let answer = world.post(Uuid::new_v4(), &asking(&world, &more)).await;
            assert_eq!(answer.status, 200, "{schema}: {}", answer.text());
            match whole(&schema, &answer.json()) {
                Some(line) => lines.push(line),
                None => cut += 1,
            }
        }
    }
    assert_valid(&python, &lines);
    (lines.len(), cut)
}

/// Answers of the default release, each asked for by its schema, from 32 clients at a time.
#[test]
#[ignore = "a quarter of an hour: ten thousand answers of a real model"]
fn ten_thousand_answers_of_the_default_release_are_valid() {
    let Some(python) = validator() else { return };
    let folder = super::release::with_release();
    folder.json(&["qualify", "smollm2-135m-instruct"]);
    let plan =
        "[plans.default]\nrequests_per_minute = 1000000\nburst = 100000\nmax_concurrent = 64";
    std::fs::write(folder.path().join("cresset.toml"), plan).unwrap();
    let Customer { key, .. } = folder.customer(1_000_000_000);
    let node = folder.serve();
    let (schemas, next) = (random_schemas(200), AtomicUsize::new(0));
    let ask = || {
        let mut answers = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(schema) = schemas.get(number / 50) else { return answers };
            let asked = format!("Answer with one JSON value that is valid by {schema}");
            let body = json!({ "model": node.model, "guided_json": schema, "seed": number,
                               "max_tokens": 1_024,
                               "messages": [{ "role": "user", "content": asked }] });
            let answer = node.chat(&key, &Uuid::new_v4().to_string(), &body).finish();
            assert_eq!(answer.status, 200, "{schema}: {}", answer.body);
            answers.push(whole(schema, &answer.json()));
        }
    };
    let answers: Vec<_> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..32).map(|_| scope.spawn(ask)).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    let lines: Vec<String> = answers.iter().flatten().cloned().collect();
    println!("{} answers, {} cut off", answers.len(), answers.len() - lines.len());
    assert_valid(&python, &lines);
    assert!(answers.len() == 10_000 && lines.len() >= 9_000, "more than a tenth was cut off");
}

#[tokio::test(flavor = "multi_thread")]
async fn random_answers_are_valid_by_another_validator() {
    let (judged, cut) = judge(30, 3).await;
    assert!(judged > 60, "{judged} judged, {cut} cut off");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes: many more schemas"]
async fn ten_thousand_answers_are_valid_by_another_validator() {
    let (judged, cut) = judge(200, 50).await;
    println!("{judged} judged, {cut} cut off");
    assert!(judged > 9_000, "{judged} judged, {cut} cut off");
}
