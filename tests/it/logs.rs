//! What the node writes to stderr: with `log.format = json` one document a line, and one line for
//! each request, which names everything but secrets.

use crate::process::{Customer, Folder, Served};
use serde_json::{Value, json};
use uuid::Uuid;

const PROMPT: &str = "a prompt that stays between the client and the model";

fn lines(log: &str) -> Vec<Value> {
    let parsed = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    log.lines().map(parsed).collect()
}

#[test]
fn every_line_is_json_and_each_request_has_one_with_its_figures() {
    let folder = Folder::ready();
    let Customer { key, account, .. } = folder.customer(1_000_000);
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_LOG__FORMAT", "json").env("CRESSET_LOG__LEVEL", "debug");
    let mut node = Served::start(command);
    let [plain, streamed, absent] = [(); 3].map(|()| Uuid::new_v4().to_string());
    let body = |stream: bool| {
        json!({ "model": node.model, "messages": [{ "role": "user", "content": PROMPT }],
                "stream": stream, "max_tokens": 3, "ignore_eos": true })
    };
    let answer = node.chat(&key, &plain, &body(false)).finish().json();
    assert!(node.chat(&key, &streamed, &body(true)).finish().body.contains("[DONE]"));
    assert_eq!(node.chat(&key, &plain, &body(false)).finish().status, 200);
    assert_eq!(node.get(&key, &format!("/v1/requests/{absent}")).status, 404);
    assert_eq!(node.get(&key, "/v1/me").status, 200);
    assert_eq!(node.get("nonsense", "/v1/secret").status, 401);
    node.signal("TERM");
    assert!(node.wait().success());

    let log = node.log();
    let lines = lines(&log);
    for message in ["loaded tiny", "draining"] {
        let told = |line: &&Value| line["message"].as_str().is_some_and(|m| m.contains(message));
        assert!(lines.iter().any(|line| told(&line)), "{message} is not in\n{log}");
    }
    let of = |id: &str| -> Vec<&Value> {
        let is_it = |line: &&Value| line["request_id"] == id && line["message"] == "answered";
        lines.iter().filter(is_it).collect()
    };
    for id in [&plain, &streamed] {
        let line = of(id)[0];
        assert_eq!(line["route"], "/v1/chat/completions");
        assert_eq!((&line["account"], &line["model"]), (&json!(account), &json!(node.model)));
        assert_eq!((&line["status"], &line["completion_tokens"]), (&json!(200), &json!(3)));
        assert_eq!(line["prompt_tokens"], answer["usage"]["prompt_tokens"]);
        assert!(line["charged"].as_u64().unwrap() > 0, "{line}");
        let times = ["time_to_first_token_ms", "milliseconds"].map(|name| line[name].as_u64());
        assert!(times[0].is_some() && times[0] <= times[1], "{line}");
    }
    let charged = of(&plain)[0]["charged"].to_string();
    assert_eq!(answer["credits"]["chargedUnits"], charged);
    let replayed = of(&plain)[1];
    assert_eq!((&replayed["replayed"], &replayed["charged"]), (&json!(true), &Value::Null));
    let answered = || lines.iter().filter(|line| line["message"] == "answered");
    let route = |route: &str| answered().find(|line| line["route"] == route).unwrap();
    assert_eq!(route("/v1/requests/{id}")["code"], "request_not_found");
    assert_eq!(route("/v1/me")["level"], "DEBUG", "reads are many");
    assert_eq!(
        (&route("other")["status"], &route("other")["account"]),
        (&json!(401), &Value::Null)
    );
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    for secret in [PROMPT, key.as_str(), &absent, "/v1/secret", text] {
        assert!(secret.is_empty() || !log.contains(secret), "{secret:?} is in\n{log}");
    }
}

#[test]
fn a_failure_is_json_too() {
    let folder = Folder::empty();
    let mut command = folder.serve_command(&[]);
    command.env("CRESSET_LOG__FORMAT", "json");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8(output.stderr).unwrap();
    let lines = lines(&log);
    let last = lines.last().unwrap();
    assert_eq!(last["level"], "ERROR");
    assert!(last["message"].as_str().unwrap().contains("no ledger"), "{last}");
    assert!(last["remedy"].as_str().unwrap().contains("cresset init"), "{last}");
}
