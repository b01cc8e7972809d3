//! Chat templates of many releases against renderings by Hugging Face transformers
//! (`tests/it/goldens/templates.json`). The templates are part of a pinned sdist.

use super::text_parity::sdist_models;
use chrono::NaiveDate;
use cresset_text::{ChatMessage, ChatTemplate, Error, TemplateLimits};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::LazyLock;

static GOLDEN: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("goldens/templates.json")).unwrap());

/// By template: the cases that differ, with the reason.
static DIFFERENCES: LazyLock<BTreeMap<String, Value>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("goldens/template_differences.json")).unwrap()
});

fn template(models: &Path, name: &str) -> Result<ChatTemplate, Error> {
    let source = std::fs::read_to_string(models.join(format!("templates/{name}.jinja"))).unwrap();
    let token = |key: &str| GOLDEN[key].as_str().unwrap();
    let date: NaiveDate = token("date").parse().unwrap();
    ChatTemplate::with_clock(
        &source,
        token("bos_token"),
        token("eos_token"),
        TemplateLimits::default(),
        move || date.into(),
    )
}

fn digest(text: &str) -> String {
    hex::encode(&Sha256::digest(text)[..8])
}

/// (case, the reference's digest, or null if it raises).
fn cases(name: &str) -> impl Iterator<Item = (&'static Value, &'static Value)> {
    GOLDEN["cases"].as_array().unwrap().iter().zip(GOLDEN["renderings"][name].as_array().unwrap())
}

fn names() -> impl Iterator<Item = &'static String> {
    GOLDEN["renderings"].as_object().unwrap().keys()
}

#[test]
fn renderings_equal_the_reference() {
    let models = sdist_models();
    let (mut equal, mut total, mut differing) = (0, 0, BTreeSet::new());
    for name in names() {
        let template = template(&models, name);
        for (case, expect) in cases(name) {
            let render = |template: &ChatTemplate| {
                template
                    .render_raw(
                        &case["messages"],
                        case.get("tools"),
                        case["add_generation_prompt"] == true,
                    )
                    .ok()
            };
            let ours = template.as_ref().ok().and_then(render).map(|prompt| digest(&prompt));
            // If the reference itself raises, there is nothing to compare.
            if !expect.is_null() {
                total += 1;
                equal += usize::from(ours.as_deref() == expect.as_str());
                if ours.as_deref() != expect.as_str() {
                    differing.insert(format!("{name}: {}", case["id"].as_str().unwrap()));
                    assert!(
                        case.get("tools").is_some(),
                        "{name} differs in a case that a request can bring: {case}"
                    );
                }
            }
        }
    }
    println!("{equal} of {total} renderings are equal");
    let listed = |(name, entry): (&String, &Value)| {
        let cases: Vec<String> = serde_json::from_value(entry["cases"].clone()).unwrap();
        cases.into_iter().map(move |case| format!("{name}: {case}")).collect::<Vec<_>>()
    };
    assert_eq!(differing, DIFFERENCES.iter().flat_map(listed).collect());
    assert!(total >= 1390 && equal * 479 >= total * 471, "{equal} of {total}");
}

fn messages(case: &Value) -> Option<Vec<ChatMessage>> {
    let text = |message: &Value, key: &str| message[key].as_str().map(str::to_owned);
    let message = |message: &Value| {
        (!message["content"].is_array()).then(|| ChatMessage {
            role: text(message, "role").unwrap(),
            content: text(message, "content"),
            name: text(message, "name"),
            tool_call_id: text(message, "tool_call_id"),
            tool_calls: message.get("tool_calls").cloned(),
            reasoning_content: None,
        })
    };
    case["messages"].as_array().unwrap().iter().map(message).collect()
}

/// A request's calls carry their arguments as text, like the case `call with a string`. The
/// conversation renders as the reference renders the object or, if a template takes only text, the
/// text; or it is refused: a call never goes missing.
#[test]
fn calls_render_as_the_reference_renders_one_of_their_forms() {
    let models = sdist_models();
    let (mut objects, mut texts) = (0, 0);
    for name in names() {
        let of = |id: &str| cases(name).find(|(case, _)| case["id"] == id).unwrap();
        let (case, text) = of("call with a string");
        let (_, object) = of("call with an object");
        if (text.is_null() && object.is_null()) || DIFFERENCES.contains_key(name) {
            continue;
        }
        if let Ok(prompt) =
            template(&models, name).and_then(|t| t.render(&messages(case).unwrap(), true))
        {
            let prompt = json!(digest(&prompt));
            assert!(prompt == *object || prompt == *text, "{name}: neither form");
            objects += usize::from(prompt == *object);
            texts += usize::from(prompt != *object);
        }
    }
    println!("calls: {objects} templates render the object, {texts} the text");
    assert!(objects >= 30 && texts >= 2, "{objects} and {texts}");
}
