//! What an operator changes while a node runs: it counts for new requests, or a command says that
//! it does not.

use crate::process::{Customer, Folder, Reply, Served, eventually, get};
use serde_json::{Value, json};
use std::path::PathBuf;
use uuid::Uuid;

fn listed(node: &Served, key: &str) -> Vec<Value> {
    node.get(key, "/v1/models").json()["data"].as_array().unwrap().clone()
}

fn ask(node: &Served, key: &str, model: &str, tokens: u64) -> Reply {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let body = json!({
        "model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": true
    });
    node.chat(key, &Uuid::new_v4().to_string(), &body).finish()
}

fn charged(reply: &Reply) -> u64 {
    reply.json()["credits"]["chargedUnits"].as_str().unwrap().parse().unwrap()
}

fn error(reply: &Reply) -> (u16, String) {
    (reply.status, reply.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn manifest(folder: &Folder) -> PathBuf {
    folder.path().join("models/tiny/manifest.toml")
}

#[test]
fn a_model_is_served_when_the_command_says_so() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let file = folder.path().join("second.gguf");
    cresset_models::testing::tiny_llama_gguf(&file, 8).unwrap();
    let node = folder.serve();
    let added =
        folder.json(&["models", "add", "--path", file.to_str().unwrap(), "--name", "second"]);
    assert_eq!(added["served"], false);
    let card = &added["card"];
    assert_eq!((&card["architecture"], &card["layers"]), (&json!("llama"), &json!(2)));
    assert_eq!((&card["quantisation"], &card["context_tokens"]), (&json!("F32"), &json!(2048)));
    let parameters = card["parameters"].as_u64().unwrap();
    assert!(parameters > 60_000 && card["cpu_weight_bytes"] == 4 * parameters, "{card}");
    assert!(added["served_because"].as_str().unwrap().contains("cresset qualify second"));
    let id = added["id"].as_str().unwrap().to_owned();
    assert_eq!(folder.qualify("second")["served"], true);
    assert_eq!(listed(&node, &key).len(), 2);
    assert_eq!(ask(&node, &key, &id, 2).status, 200);
    let removed = folder.json(&["models", "remove", "second"]);
    assert_eq!(removed["served"], false);
    assert_eq!(listed(&node, &key).len(), 1);
    assert_eq!(error(&ask(&node, &key, &id, 2)), (404, "model_not_found".into()));
    assert!(node.terminate().success());
    let again = folder.json(&["qualify", "tiny"]);
    assert!(again["served_because"].as_str().unwrap().contains("no node runs"), "{again}");
    assert!(folder.fails(&["reload"], 1).contains("no node runs"));
}

#[test]
fn prices_and_plans_hold_for_new_requests_at_once() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let prompt = ask(&node, &key, &node.model, 10);
    let tokens = prompt.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    // A request that runs keeps the price that it was admitted with.
    let messages = json!([{ "role": "user", "content": "go on" }]);
    let body = json!({ "model": node.model, "messages": messages, "stream": true,
                       "max_tokens": 1500, "ignore_eos": true });
    let id = Uuid::new_v4().to_string();
    let mut running = node.chat(&key, &id, &body);
    running.read_until("content");

    let text = std::fs::read_to_string(manifest(&folder)).unwrap();
    let dearer = text.replace("output = 400000", "output = 7000000");
    std::fs::write(manifest(&folder), dearer).unwrap();
    let settings = "[plans.default]\nmax_output_tokens = 1600\n[requests]\ndeadline_seconds = 7\n";
    std::fs::write(folder.path().join("cresset.toml"), settings).unwrap();
    let told = folder.json(&["reload"]);
    assert_eq!(told["restart"], json!(["requests.deadline_seconds"]));
    let changed = told["changed"].to_string();
    for part in ["prices of tiny", "400000", "7000000", "plans.default.max_output_tokens"] {
        assert!(changed.contains(part), "{part} is not in {changed}");
    }
    eventually("the change is logged", || node.log().contains("7000000"));

    let second = ask(&node, &key, &node.model, 10);
    let cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let cost = (tokens - cached) * 100_000 + cached * 25_000 + 10 * 7_000_000;
    assert_eq!(charged(&second), cost.div_ceil(1_000_000));
    assert_eq!(ask(&node, &key, &node.model, 1601).status, 400, "the plan allows less now");
    assert!(running.rest().contains("[DONE]"));
    let record = folder.json(&["requests", "show", &id]);
    let attempt = &record["attempts"][0];
    assert_eq!(attempt["prices"]["output"], 400_000);

    std::fs::write(folder.path().join("cresset.toml"), "nonsense").unwrap();
    node.signal("HUP");
    eventually("the fault is logged", || node.log().contains("cannot be read"));
    assert_eq!(ask(&node, &key, &node.model, 1601).status, 400, "a fault changes nothing");
    std::fs::remove_file(folder.path().join("cresset.toml")).unwrap();
    folder.json(&["reload"]);
    assert_eq!(ask(&node, &key, &node.model, 1601).status, 200);
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_model_whose_record_goes_is_not_offered_until_it_is_back() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_QUALIFICATION__REVIEW_SECONDS", "1");
    let node = Served::start(command);
    let messages = json!([{ "role": "user", "content": "go on" }]);
    let body = json!({ "model": node.model, "messages": messages, "stream": true,
                       "max_tokens": 1000, "ignore_eos": true });
    let mut running = node.chat(&key, &Uuid::new_v4().to_string(), &body);
    running.read_until("content");
    let (records, aside) = (folder.path().join("qualification"), folder.path().join("aside"));
    std::fs::rename(&records, &aside).unwrap();
    eventually("the model is not offered", || listed(&node, &key).is_empty());
    assert_eq!(error(&ask(&node, &key, &node.model, 2)), (404, "model_not_found".into()));
    assert_eq!(get(&node.operator, "/readyz").status, 503);
    let status = folder.json(&["status"]);
    let why = status["models"][0]["failure"].as_str().unwrap();
    assert!(why.contains("cresset qualify tiny"), "{why}");
    assert!(running.rest().contains("[DONE]"), "what runs ends as usual");
    std::fs::rename(&aside, &records).unwrap();
    eventually("the model is offered again", || listed(&node, &key).len() == 1);
    assert_eq!(get(&node.operator, "/readyz").status, 200);
    assert_eq!(ask(&node, &key, &node.model, 2).status, 200);
    assert!(node.terminate().success());
}
