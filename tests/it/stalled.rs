//! Steps that do not end: the node is not ready while it lasts, and ends when it lasts too long.

use crate::process::{Folder, Served, Stream, eventually, get};
use serde_json::json;
use std::os::unix::process::ExitStatusExt;
use uuid::Uuid;

/// A node whose first step takes `milliseconds`; a step without an end for 2 s is a stall.
fn node(folder: &Folder, milliseconds: u64) -> Served {
    let mut command = folder.serve_command(&[]);
    command.env("FAILPOINTS", format!("engine::step=1*sleep({milliseconds})->off"));
    command.env("CRESSET_ENGINE__STALLED_STEP_SECONDS", "2");
    Served::start(command)
}

fn ask(node: &Served, key: &str, id: &str) -> Stream {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let body =
        json!({ "model": node.model, "stream": true, "messages": messages, "max_tokens": 2 });
    node.chat(key, id, &body)
}

/// Waits until the node says that its engine is stalled.
fn stalls(node: &Served) {
    eventually("the node is not ready", || {
        let reply = get(&node.operator, "/readyz");
        reply.status == 503 && reply.body.contains("does not finish its step")
    });
}

#[test]
fn a_step_that_takes_long_makes_the_node_unready_until_it_ends() {
    let folder = Folder::ready();
    let key = folder.customer(1_000_000).key;
    let node = node(&folder, 6_000);
    let running = ask(&node, &key, &Uuid::new_v4().to_string());
    stalls(&node);
    assert_eq!(node.get(&key, "/v1/models").json()["data"], json!([]));
    let status = folder.json(&["status"]);
    let why = status["models"][0]["failure"].as_str().unwrap();
    assert!(why.contains("1 sequences wait: the engine is launching a step"), "{why}");
    assert_eq!(ask(&node, &key, &Uuid::new_v4().to_string()).finish().status, 503);
    assert!(running.finish().body.ends_with("data: [DONE]\n\n"));
    eventually("the node is ready again", || get(&node.operator, "/readyz").status == 200);
    assert_eq!(ask(&node, &key, &Uuid::new_v4().to_string()).finish().status, 200);
    assert!(node.terminate().success());
}

#[test]
fn a_step_without_an_end_ends_the_process() {
    let folder = Folder::ready();
    let key = folder.customer(1_000_000).key;
    let mut node = node(&folder, 3_600_000);
    let id = Uuid::new_v4().to_string();
    let running = ask(&node, &key, &id);
    stalls(&node);
    assert_eq!(node.wait().signal(), Some(6), "it is SIGABRT:\n{}", node.log());
    let log = node.log();
    assert!(log.contains("the engine is launching a step"), "{log}");
    assert!(log.contains("the process ends"), "{log}");
    drop(running);
    let node = folder.serve();
    let record = node.get(&key, &format!("/v1/requests/{id}")).json();
    assert_eq!((&record["state"], &record["chargedUnits"]), (&json!("failed"), &json!("0")));
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
