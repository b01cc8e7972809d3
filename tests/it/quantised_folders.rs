//! Quantised folders from outside: added, told of, qualified, and asked over HTTP. The answers are
//! those of the reference that the tests of `models` have (`models/goldens/quantised.json`).

use crate::process::{Customer, Finished, Folder, Served};
use cresset_models::testing::GoldenFolder;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Messages as they are usually written. A question of forty characters stands alone, so that a
/// request's prompt can be the reference's.
const TEMPLATE: &str = "{% if messages | length == 1 and messages[0].content | length == 40 %}\
    {{ messages[0].content }}{% else %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endif %}";

/// The card of an added folder, and the alternatives for the first token of the answer.
fn added_and_asked(name: &str, case: &GoldenFolder, path: &Path) -> (Value, Vec<(String, f64)>) {
    let folder = Folder::initialised();
    let added = folder.json(&["models", "add", "--path", path.to_str().unwrap(), "--name", name]);
    // A short context is enough to prove that they are computed.
    let short = |mut command: Command| {
        command.env("CRESSET_QUALIFICATION__QUICK_CONTEXT_TOKENS", "256");
        command
    };
    for command in [&["qualify", name][..], &["models", "accept", name, "--reason", "a test's"]] {
        let finished = Finished::of(short(folder.command(command)).output().unwrap());
        assert_eq!(finished.code, Some(0), "{name}: {finished:?}");
    }
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = Served::start(short(folder.serve_command(&[])));
    let body = json!({
        "model": node.model, "max_tokens": 1, "temperature": 0, "logprobs": true,
        "top_logprobs": 20, "messages": [{ "role": "user", "content": case.question }],
    });
    let id = uuid::Uuid::new_v4().to_string();
    let reply = node.chat(&key, &id, &body).finish();
    assert_eq!(reply.status, 200, "{name}: {}", reply.body);
    let answer = reply.json();
    assert_eq!(answer["usage"]["prompt_tokens"], 40, "{name}");
    let told = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"].clone();
    let one = |entry: &Value| {
        (entry["token"].as_str().unwrap().to_owned(), entry["logprob"].as_f64().unwrap())
    };
    (added["card"].clone(), told.as_array().unwrap().iter().map(one).collect())
}

fn check(name: &str, quantisation: &str) {
    let files = tempfile::tempdir().unwrap();
    let path: PathBuf = files.path().join(name);
    fs::create_dir(&path).unwrap();
    let case = GoldenFolder::write(name, &path, TEMPLATE).unwrap();
    let (card, told) = added_and_asked(name, &case, &path);
    assert_eq!(card["architecture"], case.config["model_type"], "{card}");
    assert_eq!(card["quantisation"], quantisation, "{name}: {card}");
    // No weight is wider in memory than in its file, but for the scales.
    let file = fs::metadata(path.join("model.safetensors")).unwrap().len();
    let held = card["cpu_weight_bytes"].as_u64().unwrap();
    assert!(held > file / 2 && held < file * 5 / 4, "{name}: {held} of {file}");

    let logits: Vec<f64> = case.logits.values().map(|x| f64::from(*x)).collect();
    let largest = logits.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let best = logits.iter().fold(f64::MIN, |most, x| most.max(*x));
    let mut compared = 0;
    for (token, logprob) in &told {
        let Some(logit) = case.logits.get(token) else { continue };
        let (found, want) = (logprob - told[0].1, f64::from(*logit) - best);
        let error = (found - want).abs();
        assert!(error <= 1e-2 * largest, "{name}: {token:?} {found}, not {want}");
        compared += 1;
    }
    assert!(compared >= 8, "{name}: {told:?}");
}

#[test]
fn fp8_folders_are_added_qualified_and_answer_as_the_reference() {
    check("fp8-blocks", "F8_E4M3_32");
}

#[test]
fn compressed_folders_are_added_qualified_and_answer_as_the_reference() {
    check("int4-zeros", "INT4_32");
}

#[test]
fn gptq_folders_are_added_qualified_and_answer_as_the_reference() {
    check("gptq-int4", "INT4_32");
}

#[test]
fn awq_folders_are_added_qualified_and_answer_as_the_reference() {
    check("awq-int4", "INT4_32");
}
